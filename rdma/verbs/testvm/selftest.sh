#!/usr/bin/env bash
# usage: selftest.sh
#
# Proves that the virtual machine tells failure from success and that its RDMA
# devices work: four boots, less than a minute.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
(($# == 0)) || usage

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0

# expect STATUS NAME ARG... runs run.sh ARG...; the output is shown if it disappoints.
expect() {
	local want=$1 name=$2 got=0 start=$SECONDS
	shift 2
	"$HERE/run.sh" "$@" >"$dir/.out" 2>&1 || got=$?
	if ((got == want)); then
		echo "ok    $name: $got ($((SECONDS - start)) s)"
	else
		echo "FAIL  $name: $got, want $want"
		sed 's/^/      /' "$dir/.out"
		failed=1
	fi
}

expect 3 "a machine without RDMA; its command's status" -n 0 -a rdma_libs=none "$dir" '
	! ibv_devices 2>/dev/null && [ ! -e /sys/class/infiniband ] && exit 3'
expect 124 'a hang' -n 0 -t 10 "$dir" 'sleep 1000'
expect 125 'a panic' -n 0 "$dir" 'echo c >/proc/sysrq-trigger; exit 0'

cat >"$dir/net.sh" <<'GUEST'
set -e
[ "$(rdma link | grep -c 'state ACTIVE')" = 2 ]
# gid N prints the index of the IPv4 GID of rxeN.
gid() {
	grep -l "0a4d:010$(($1 + 1))" /sys/class/infiniband/rxe$1/ports/1/gids/[0-9] | sed -n '1s/.*\///p'
}
# client COMMAND... succeeds once COMMAND does: a server may not listen yet.
client() {
	for i in $(seq 50); do
		! "$@" || return 0
		usleep 200000
	done
	return 1
}
# pingpong N sends N messages to and fro.
pingpong() {
	ibv_rc_pingpong -d rxe1 -g "$(gid 1)" -n "$1" &
	client ibv_rc_pingpong -d rxe0 -g "$(gid 0)" -n "$1" 10.77.1.2
	wait $!
}
pingpong 500
rping -s -a 10.77.1.2 -C 3 &
client rping -c -I 10.77.1.1 -a 10.77.1.2 -C 3
wait $!
# Packets are lost, and not any more. ibv_rc_pingpong need not survive it, since the side that is done first, or gives up,
# acknowledges nothing any more: that verbs do is what TestPacketLoss is for.
/bin/tc qdisc add dev n0 root netem loss 5%
pingpong 3000 &
dropped() { /bin/tc -s qdisc show dev n0 | grep -q 'dropped [1-9][0-9]'; }
for i in $(seq 600); do
	! dropped || break
	usleep 50000
done
dropped
/bin/tc -s qdisc show dev n0 >&2
/bin/tc qdisc del dev n0 root
kill $! || :
killall -q ibv_rc_pingpong || :
wait
pingpong 500
GUEST
expect 0 'two devices, verbs and rdma_cm between them, 5% packet loss' -n 2 "$dir" 'sh net.sh'

exit $failed
