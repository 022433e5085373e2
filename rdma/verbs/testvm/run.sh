#!/usr/bin/env bash
# usage: run.sh [-n NODES] [-s] [-k 6.12|6.1] [-t SECONDS] [-m MIB] [-c CPUS] [-a KERNEL_ARGS] DIR COMMAND
#
# Boots a virtual machine, mounts DIR read-write at /share, runs COMMAND there with
# sh, prints its output and exits with its status.
#
#   -n  RDMA devices: rxe0..rxeN-1 at 10.77.1.1..N on one Ethernet segment (1)
#   -s  they are siw0..siwN-1, of iWARP, which siw.sh compiles
#   -k  kernel (KVD_VM_KERNEL, else 6.12)
#   -t  seconds until the machine counts as hung (300)
#   -m  memory (1024)
#   -c  processors (2)
#   -a  more kernel arguments; rdma_libs=none leaves out libibverbs
#
# Its own statuses: 2 nothing was run, 124 hang, 125 the machine died or came up
# without what was asked for. A COMMAND's status above 110 is reported as 110.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

nodes=1 kernel=${KVD_VM_KERNEL:-6.12} seconds=300 mib=1024 cpus=2 args= siw=false
while getopts n:sk:t:m:c:a: o; do
	case $o in
	n) nodes=$OPTARG ;;
	s) siw=true ;;
	k) kernel=$OPTARG ;;
	t) seconds=$OPTARG ;;
	m) mib=$OPTARG ;;
	c) cpus=$OPTARG ;;
	a) args=$OPTARG ;;
	*) usage ;;
	esac
done
shift $((OPTIND - 1))
(($# == 2)) || usage
want_kernel "$kernel"
for n in "$nodes" "$seconds" "$mib" "$cpus"; do
	[[ $n =~ ^[0-9]{1,6}$ ]] || die "\"$n\" is no number"
done
((nodes <= 64)) || die "$nodes RDMA devices: want at most 64"
share=$(cd "$1" && pwd) || die "no folder $1 to share"
[[ $share != *,* ]] || die "$share: QEMU takes no comma in the share's path"
if $siw; then
	"$HERE/siw.sh" "$kernel" || die "no siw"
	args+=" rdma_type=siw"
fi
"$HERE/initramfs.sh" "$kernel" || die "no machine to boot"

cmd=$(mktemp "$share/.testvm-XXXXXX") || die "$share: cannot write there"
trap 'rm -f "$cmd"' EXIT
printf '%s\n' "$2" >"$cmd"

# Software emulation: KVM is seldom there in containers, and never needed. A busy
# host's timer interrupts fail the kernel's check of them; hence no_timer_check.
# Without erms and fsrm the kernel's memcpy, which is how rxe moves data, goes by
# words; with them it is one string instruction, which QEMU executes byte by byte, so
# that aligned words tear as no adapter and no processor tears them.
# The kernel rewrites its own instructions as it boots, and QEMU 7.2 may keep one that
# another processor translated just then: "Oops: int3". Hence it boots with one
# processor, and init starts the others last.
timeout --foreground -k 5 "$seconds" qemu-system-x86_64 \
	-accel tcg,thread=multi -cpu max,erms=off,fsrm=off -M q35 -smp "$cpus" -m "$mib" \
	-nodefaults -no-user-config -no-reboot -display none -serial stdio \
	-kernel "$VM_DIR/kernel-$kernel/vmlinux" -initrd "$VM_DIR/initramfs-$kernel.gz" \
	-append "console=ttyS0 quiet loglevel=4 panic=-1 no_timer_check mitigations=off tsc=reliable maxcpus=1 noreplace-smp rdma_nodes=$nodes cmd=${cmd##*/} $args" \
	-device isa-debug-exit,iobase=0xf4,iosize=0x04 \
	-virtfs "local,path=$share,mount_tag=share,security_model=none" </dev/null &
vm=$!
# In the background, so that a signal to this script ends the machine at once.
trap 'kill $vm; wait $vm || true; exit 143' INT TERM HUP
start=$SECONDS status=0
wait $vm || status=$?

# timeout's own statuses are among those that a guest can cause, hence the clock.
if ((status == 124 || SECONDS - start >= seconds)); then
	echo "testvm: hung: no end after $seconds s" >&2
	exit 124
fi
# Bits of the debug port: see finish in init. QEMU's own statuses are no success.
status=$((status & 1 ? (status >> 1) - 16 : -1))
if ((status < 0 || status > 110)); then
	echo "testvm: the machine ended without reporting the command's status" >&2
	exit 125
fi
exit "$status"
