#!/usr/bin/env bash
# usage: initramfs.sh [6.12|6.1]...
#
# Makes KVD_VM_DIR/initramfs-6.12.gz, what the virtual machine has before its
# share is mounted: busybox, iproute2, the RDMA tools with the libraries that
# they and a cgo program need, and the kernel's modules. Without arguments it
# serves the kernel that KVD_VM_KERNEL names (default 6.12). It fetches what is
# missing, and does nothing for an image that is newer than its parts.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

PROGRAMS=(
	ip tc rdma rping
	ibv_devices ibv_devinfo ibv_rc_pingpong
	ib_read_lat ib_write_lat ib_atomic_lat ib_read_bw ib_write_bw ib_atomic_bw
)
# Loaded always, and if there are RDMA devices. rxe asks the crypto API for crc32
# without depending upon the module.
BASE_MODULES=(virtio_pci 9pnet_virtio 9p)
RDMA_MODULES=(veth bridge sch_netem crc32_generic ib_uverbs rdma_ucm rdma_rxe)
# For siw, if siw.sh has made it.
SIW_MODULES=(crc32c_generic siw)

# add_program NAME copies a program and the libraries it needs, all of the sysroot.
add_program() {
	local program lib
	program=$(find_sys "bin/$1")
	cp -L "$program" "$root/bin/"
	while read -r lib; do
		[[ $lib == "$SYSROOT"/* ]] || die "$1 needs $lib, which the sysroot lacks"
		cp -Lu "$lib" "$root/$libs/"
	done < <("$ld" --inhibit-cache --library-path "$LIB_PATH" --list "$program" |
		sed -n 's/.* => \(.*\) (0x.*/\1/p; s/^\t\([^ ]*\) => not found/\1/p')
}

# add_module NAME LIST copies a module after those it depends upon, and appends
# its name to LIST, which is in loading order.
add_module() {
	local name=$1 list=$2 file out=$root/lib/modules/$1.ko dep
	[[ ! -e $out ]] || return 0
	file=$(find "$modules" \( -name "$name.ko*" -o -name "${name//_/-}.ko*" \) -print -quit)
	if [[ -z $file ]]; then
		grep -qE "/(${name}|${name//_/-})\.ko" "$modules/modules.builtin" || die "kernel $k has no module $name"
		return 0
	fi
	case $file in
	*.xz) in_sysroot xz -dc "$file" >"$out" ;;
	*) cp "$file" "$out" ;;
	esac
	for dep in $(tr '\0' '\n' <"$out" | sed -n 's/^depends=//p' | tr ',' ' '); do add_module "$dep" "$list"; done
	echo "$name" >>"$root/lib/modules/$list"
}

build() {
	root=$VM_DIR/building libs=lib/x86_64-linux-gnu
	rm -rf "$root"
	mkdir -p "$root"/{bin,sbin,usr,lib/modules,etc/libibverbs.d,proc,sys,dev,tmp,run,share} "$root/$libs/libibverbs"
	ln -s lib "$root/lib64"
	ln -s ../lib "$root/usr/lib"
	ln -s ../bin "$root/usr/bin"
	cp "$busybox" "$root/bin/busybox"
	ln -s busybox "$root/bin/sh"
	ln -s busybox "$root/bin/env"
	for program in "${PROGRAMS[@]}"; do add_program "$program"; done
	cp -L "$ld" "$root/lib/"
	for lib in libpthread.so.0 libdl.so.2 libresolv.so.2 librt.so.1 libm.so.6 libgcc_s.so.1; do
		cp -L "$(find_sys "$lib")" "$root/$libs/"
	done
	# Of the providers of libibverbs only those of the devices in software are enabled.
	for p in rxe siw; do
		cp "$(find_sys "etc/libibverbs.d/$p.driver")" "$root/etc/libibverbs.d/"
		cp -L "$(find "$SYSROOT" -name "lib$p-rdmav*.so" -print -quit)" "$root/$libs/libibverbs/"
	done

	for m in "${BASE_MODULES[@]}"; do add_module "$m" base; done
	for m in "${RDMA_MODULES[@]}"; do add_module "$m" rdma; done
	if [[ -e $(siw_module "$k") ]]; then
		for m in "${SIW_MODULES[@]}"; do add_module "$m" siw; done
	fi

	install -m 755 "$HERE/init" "$root/init"
	echo 'root:x:0:0:root:/tmp:/bin/sh' >"$root/etc/passwd"
	echo 'root:x:0:' >"$root/etc/group"
	echo '127.0.0.1 localhost' >"$root/etc/hosts"
	(cd "$root" && find . | "$busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$image.new"
	mv "$image.new" "$image"
	rm -rf "$root"
	echo "initramfs.sh: made $image, $(($(stat -c %s "$image") >> 20)) MiB" >&2
}

[[ ${1-} != -* ]] || usage
(($#)) || set -- "${KVD_VM_KERNEL:-6.12}"
"$HERE/fetch.sh" "$@"
one_at_a_time
for k; do
	image=$VM_DIR/initramfs-$k.gz modules=$VM_DIR/kernel-$k/lib/modules
	fresh=true
	for part in "$HERE/init" "$HERE/initramfs.sh" "$SYSROOT/packages" "$VM_DIR/kernel-$k/version" "$(siw_module "$k")"; do
		[[ $image -nt $part ]] || fresh=false
	done
	$fresh && continue
	modules=$(echo "$modules"/*)
	busybox=$(find_sys bin/busybox) ld=$(find_sys ld-linux-x86-64.so.2)
	build
done
