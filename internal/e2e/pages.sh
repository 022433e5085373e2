#!/bin/sh
# pages.sh N COMMAND...: runs a command, with KVD_PAGES=1 in its environment, while this machine
# has N huge pages of 2 MiB more than before, which takes root. Where they cannot be had it
# says why and does nothing, which is a failure where CI is set.
set -eu
skip() {
	echo "SKIP: $1"
	[ -z "${CI:-}" ] || exit 1
	exit 0
}
file=/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
more=$1
shift
was=$(cat "$file" 2>/dev/null) || skip "$file: this kernel has no huge pages of 2 MiB"
trap 'echo "$was" >"$file"' EXIT
trap 'exit 1' HUP INT TERM
if ! (echo $((was + more)) >"$file") 2>/dev/null; then
	trap - EXIT
	skip "$file cannot be written: it takes root, and a machine that lets it"
fi
got=$(($(cat "$file") - was))
if [ "$got" -lt "$more" ]; then
	skip "only $got of $more huge pages could be reserved: memory is in use or in pieces"
fi
KVD_PAGES=1 "$@"
