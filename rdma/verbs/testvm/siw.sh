#!/usr/bin/env bash
# usage: siw.sh [6.12|6.1]...
#
# Compiles the module siw, which Debian's kernels leave out: an iWARP adapter in software. It goes among the modules
# of KVD_VM_DIR/kernel-6.12, out of which initramfs.sh takes it. Source, headers and build tools of the kernel are
# Debian's packages (some 170 MB, which are removed again); a C compiler and make have to be there.
# It does nothing if the module is there. Without arguments it serves the kernel that
# KVD_VM_KERNEL names (default 6.12).
set -euo pipefail
. "$(dirname "$0")/lib.sh"

# build_siw KERNEL VERSION compiles for the kernel package of that version.
build_siw() {
	local tmp=$VM_DIR/siw version=$2 abi=${2%-amd64} source=linux-source-$1 headers kbuild
	case $1 in 6.1) kbuild=linux-kbuild-6.1 ;; *) kbuild=linux-kbuild-$abi ;; esac
	command -v gcc >/dev/null && command -v make >/dev/null || die "siw.sh needs gcc and make"
	echo "siw.sh: siw for $version" >&2
	rm -rf "$tmp"
	mkdir -p "$tmp/deb" "$tmp/root"
	download "$tmp/deb" "$source" "linux-headers-$version" "linux-headers-$abi-common" "$kbuild"
	for deb in "$tmp"/deb/*.deb; do
		case $deb in
		*/linux-source*) dpkg-deb --fsys-tarfile "$deb" | tar -xO "./usr/src/$source.tar.xz" | in_sysroot xz -dc |
			tar -x -C "$tmp" --wildcards '*/drivers/infiniband/sw/siw/*' ;;
		*) dpkg-deb -x "$deb" "$tmp/root" ;;
		esac
	done
	# The headers name each other by the paths they have when installed.
	headers=$tmp/root/usr/src/linux-headers-$version
	sed -i "s#include /usr/src/#include $tmp/root/usr/src/#" "$headers/Makefile"
	make -s -C "$headers" M="$tmp/$source/drivers/infiniband/sw/siw" CONFIG_RDMA_SIW=m CONFIG_DEBUG_INFO_BTF_MODULES= \
		modules >"$tmp/log" 2>&1 ||
		die "cannot compile siw: $(tail -n 5 "$tmp/log")"
	strip --strip-debug -o "$tmp/siw.ko" "$tmp/$source/drivers/infiniband/sw/siw/siw.ko"
	mkdir -p "${3%/*}"
	mv "$tmp/siw.ko" "$3"
	rm -rf "$tmp"
}

[[ ${1-} != -* ]] || usage
(($#)) || set -- "${KVD_VM_KERNEL:-6.12}"
"$HERE/fetch.sh" "$@"
one_at_a_time
for k; do
	version=$(<"$VM_DIR/kernel-$k/version")
	module=$(siw_module "$k")
	[[ -e $module ]] || build_siw "$k" "$version" "$module"
done
