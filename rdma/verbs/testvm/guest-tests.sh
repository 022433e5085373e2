#!/bin/sh
# usage, in the guest: sh guest-tests.sh SUITE...
#
# Runs suites of the test binaries in the share, all of them, and fails if one did
# or had nothing to run.
#
#   provider    package rdma/verbs over the devices, but what is in cm
#   cm, cm-store        connections by the RDMA connection manager, and of a device with itself: cases of the
#                       conformance suite; and processes of a store that end
#   iwarp, iwarp-store  the same over siw, whose connections are all so
#   store       package internal/verbstest: kvd and kvctl over the devices
#   client      TestApart of package client: what happens amid operations with long values
#   nohardware  the part of it for a machine without devices
set -o pipefail
cd /share || exit 2
export KVD_BIN=/share
KVD_VERBS_KERNEL=$(uname -r | cut -d. -f1-2)
export KVD_VERBS_KERNEL

# The conformance suite's cases that connections, and iWARP's completions, could break; and the store's that end
# processes, and that cut ports off.
CASES='^(read-and-write-every|chain-takes|write-is-visible|contended-cas|last-byte|unknown-rkey|wrong-lkey|close-|accept-|refusal-|dial-|fence-|closed-|listener-)'
STORE='^TestFence$/process|^TestRestart$|^TestTwoPorts$'

suite() {
	case $1 in
	provider)
		# The older kernel is there for its atomics between devices.
		case $KVD_VERBS_KERNEL in
		6.1) set -- provider 1 ./verbs.test -test.skip '^TestConformance(CM|Loopback|Agent)$' ;;
		*) set -- provider 1 ./verbs.test -test.skip '^TestConformance(CM|Loopback)$' ;;
		esac
		;;
	cm) set -- cm 1 ./verbs.test -test.run "^TestConformance(CM|Loopback)\$/$CASES" ;;
	cm-store)
		export KVD_VERBS_CONNECT=cm KVD_PULLS=2
		set -- cm-store 1 ./verbstest.test -test.run "$STORE"
		;;
	iwarp) set -- iwarp siw ./verbs.test -test.run "^TestConformanceIWARP\$/$CASES" ;;
	iwarp-store)
		export KVD_VERBS_NIC=siw KVD_PULLS=2
		set -- iwarp-store 1 ./verbstest.test -test.run "$STORE"
		;;
	store)
		export KVD_PULLS=2 # cm-store has the other kind of cut
		set -- store 1 ./verbstest.test
		;;
	client) set -- client 1 ./client.test -test.run '^TestApart$' ;;
	nohardware) set -- nohardware none ./verbstest.test -test.run TestNoHardware ;;
	*)
		echo "guest-tests.sh: no suite $1"
		return 1
		;;
	esac
	name=$1 KVD_VERBS=$2
	export KVD_VERBS
	shift 2
	echo "== $name, Linux $KVD_VERBS_KERNEL: KVD_VERBS=$KVD_VERBS $*"
	start=$(cut -d. -f1 /proc/uptime)
	"$@" -test.v -test.timeout 10m 2>&1 | tee /tmp/output
	rc=$?
	if [ $rc = 0 ] && ! grep -q '^--- PASS' /tmp/output; then
		echo "guest-tests.sh: every test was skipped"
		rc=1
	fi
	echo "== $name, Linux $KVD_VERBS_KERNEL: status $rc after $(($(cut -d. -f1 /proc/uptime) - start)) s"
	return $rc
}

failed=0
for s; do suite "$s" || failed=1; done
exit $failed
