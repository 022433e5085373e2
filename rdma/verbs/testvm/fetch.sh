#!/usr/bin/env bash
# usage: fetch.sh [6.12|6.1|sysroot]...
#
# Downloads what the virtual machine is made of and unpacks it below KVD_VM_DIR
# (default ~/.cache/kvd-vm): sysroot/ is user space and the headers of libibverbs,
# kernel-6.12/ a kernel. The argument sysroot asks for no kernel; without arguments
# it is the one that KVD_VM_KERNEL names (default 6.12). Nothing of this is
# installed. QEMU is, if a kernel is asked for, it is missing and this is root.
#
# It needs Debian on amd64. Files that are there already are not fetched again: remove
# KVD_VM_DIR to get newer packages.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

# Depended-upon packages come along. The xz and zstd of the sysroot unpack kernels.
PACKAGES=(busybox-static ibverbs-utils rdmacm-utils perftest iproute2 libibverbs-dev librdmacm-dev xz-utils zstd)

[[ ${1-} != -* ]] || usage
(($#)) || set -- "${KVD_VM_KERNEL:-6.12}"
kernels=()
for k; do
	[[ $k != sysroot ]] || continue
	want_kernel "$k"
	kernels+=("$k")
done

# closure PACKAGE... names the packages and all that they depend upon.
closure() {
	apt-cache depends --recurse --important "$@" | sed -n 's/^\([a-z0-9][^ ]*\)$/\1/p' | sort -u
}

# kernel_package 6.12 names the newest generic kernel of a series. The cloud
# flavour lacks rxe and 9p.
kernel_package() {
	apt-cache search --names-only "^linux-image-${1//./\\.}\.[^ ]*-amd64\$" | cut -d' ' -f1 |
		grep -vE -- '-(cloud|rt)-amd64$' | sort -V | tail -n 1
}

# unpack_vmlinux VMLINUZ VMLINUX extracts the ELF image, which QEMU enters through
# its PVH note: without decompression in the guest a boot takes seconds less. The
# tools complain about what follows the image, hence the result is what counts.
unpack_vmlinux() {
	local magic tool at
	for tool in xz zstd; do
		case $tool in
		xz) magic='\xfd7zXZ\x00' unpack=(xz -dc --single-stream) ;;
		zstd) magic='\x28\xb5\x2f\xfd' unpack=(zstd -dcq) ;;
		esac
		while read -r at; do
			tail -c +$((at + 1)) "$1" | in_sysroot "${unpack[@]}" >"$2" 2>/dev/null || true
			[[ $(head -c 4 "$2" | tail -c 3) != ELF ]] || return 0
		done < <(LC_ALL=C grep -aobP "$magic" "$1" | LC_ALL=C cut -d: -f1)
	done
	die "cannot extract the kernel from $1"
}

fetch_sysroot() {
	[[ ! -e $SYSROOT/packages || $(<"$SYSROOT/packages") != "${PACKAGES[*]}" ]] || return 0
	echo "fetch.sh: user space into $SYSROOT" >&2
	local tmp=$VM_DIR/fetching
	rm -rf "$tmp" "$SYSROOT"
	mkdir -p "$tmp/deb" "$tmp/root"
	[[ -n $(closure libibverbs-dev) ]] || update_lists "apt knows no libibverbs-dev"
	# shellcheck disable=SC2046 # one word is one package
	download "$tmp/deb" $(closure "${PACKAGES[@]}")
	for deb in "$tmp"/deb/*.deb; do dpkg-deb -x "$deb" "$tmp/root"; done
	printf '%s\n' "${PACKAGES[*]}" >"$tmp/root/packages"
	mv "$tmp/root" "$SYSROOT"
	rm -rf "$tmp"
}

fetch_kernel() {
	local dir=$VM_DIR/kernel-$1 tmp=$VM_DIR/fetching package
	[[ ! -e $dir ]] || return 0
	package=$(kernel_package "$1") || true
	if [[ -z $package ]]; then
		update_lists "apt knows no linux-image-$1.*-amd64"
		package=$(kernel_package "$1") || true
		[[ -n $package ]] || die "apt knows no linux-image-$1.*-amd64 (KVD_VM_KERNEL=6.1 or 6.12 chooses another)"
	fi
	echo "fetch.sh: $package into $dir" >&2
	rm -rf "$tmp"
	mkdir -p "$tmp/deb" "$tmp/root"
	download "$tmp/deb" "$package"
	dpkg-deb -x "$tmp"/deb/*.deb "$tmp/root"
	printf '%s\n' "${package#linux-image-}" >"$tmp/root/version"
	unpack_vmlinux "$tmp"/root/boot/vmlinuz-* "$tmp/root/vmlinux"
	mv "$tmp/root" "$dir"
	rm -rf "$tmp"
}

install_qemu() {
	local install=(apt-get install --yes -qq --no-install-recommends qemu-system-x86)
	[[ $(id -u) == 0 ]] || die "no qemu-system-x86_64; install the package qemu-system-x86"
	echo "fetch.sh: installing QEMU" >&2
	"${install[@]}" >/dev/null 2>&1 && return
	update_lists "cannot install QEMU"
	"${install[@]}" >/dev/null
}

one_at_a_time
if [[ ! -e $SYSROOT/packages ]]; then
	command -v apt-get >/dev/null && [[ $(dpkg --print-architecture) == amd64 ]] ||
		die "needs Debian's packages for amd64"
fi
fetch_sysroot
for k in "${kernels[@]}"; do
	command -v qemu-system-x86_64 >/dev/null || install_qemu
	fetch_kernel "$k"
done
