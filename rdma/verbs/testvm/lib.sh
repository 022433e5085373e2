# lib.sh - what the scripts of this directory share; sourced, not run.
# shellcheck shell=bash
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VM_DIR=${KVD_VM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvd-vm}
SYSROOT=$VM_DIR/sysroot
LIB_PATH=$SYSROOT/lib/x86_64-linux-gnu:$SYSROOT/usr/lib/x86_64-linux-gnu

die() {
	printf '%s: %s\n' "${0##*/}" "$*" >&2
	exit 2
}

# usage prints the header of the script, which is its only usage text.
usage() {
	sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
	exit 2
}

# want_kernel NAME accepts the names that -k, KVD_VM_KERNEL and arguments may have.
want_kernel() {
	case $1 in 6.12 | 6.1) ;; *) die "kernel \"$1\": want 6.12 or 6.1" ;; esac
}

# one_at_a_time makes the rest of the script exclusive among all users of VM_DIR.
one_at_a_time() {
	mkdir -p "$VM_DIR"
	exec 9>"$VM_DIR/lock"
	flock 9
}

# in_sysroot PROGRAM ARG... runs a program of the sysroot with its own libraries,
# so that the host need not have it.
in_sysroot() {
	local program
	program=$(find_sys "bin/$1")
	"$(find_sys 'ld-linux-x86-64.so.2')" --inhibit-cache --library-path "$LIB_PATH" "$program" "${@:2}"
}

# find_sys TAIL prints the one file of the sysroot whose path ends in TAIL.
find_sys() {
	local f
	f=$(find "$SYSROOT" \( -type f -o -type l \) -path "*$1" -print -quit)
	[[ -n $f ]] || die "$SYSROOT has no $1; remove it and run fetch.sh"
	printf '%s\n' "$f"
}

# update_lists WHY refreshes what apt knows, which only root may do.
update_lists() {
	[[ $(id -u) == 0 ]] || die "$1; run apt-get update as root"
	apt-get update -qq >&2
}

# download DIR PACKAGE... fetches packages; apt's lists are refreshed if they are too old.
download() {
	local dir=$1 log=$1/log
	shift
	if ! (cd "$dir" && apt-get download -qq -o APT::Sandbox::User=root "$@") >"$log" 2>&1; then
		update_lists "cannot download: $(tail -n 1 "$log")"
		(cd "$dir" && apt-get download -qq -o APT::Sandbox::User=root "$@") >&2
	fi
}

# siw_module 6.12 prints where a kernel's module siw is, or will be.
siw_module() { printf '%s\n' "$VM_DIR/kernel-$1/lib/modules/$(<"$VM_DIR/kernel-$1/version")/extra/siw.ko"; }
