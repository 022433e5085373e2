#!/bin/sh
# pages.sh N COMMAND...: runs a command, with KVD_PAGES=1 in its environment, while this machine
# has N huge pages of 2 MiB more than before, which takes root. Where they cannot be had it
# says why and does nothing.
set -eu
file=/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
more=$1
shift
was=$(cat "$file" 2>/dev/null) || { echo "SKIP: $file: this kernel has no huge pages of 2 MiB"; exit 0; }
trap 'echo "$was" >"$file"' EXIT
trap 'exit 1' HUP INT TERM
if ! (echo $((was + more)) >"$file") 2>/dev/null; then
	trap - EXIT
	echo "SKIP: $file cannot be written: it takes root, and a machine that lets it"
	exit 0
fi
got=$(($(cat "$file") - was))
if [ "$got" -lt "$more" ]; then
	echo "SKIP: only $got of $more huge pages could be reserved: memory is in use or in pieces"
	exit 0
fi
KVD_PAGES=1 "$@"
