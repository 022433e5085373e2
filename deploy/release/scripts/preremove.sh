#!/bin/sh
# Before a package is removed, not before it is upgraded. It does not stop a memory node, whose memory would be gone.
set -e
case "$1" in remove | 0) ;; *) exit 0 ;; esac
[ -d /run/systemd/system ] || exit 0
case $(systemctl show --value --property=ActiveState kvd-memnode) in
inactive | failed) ;;
*)
	echo "kvd: kvd-memnode runs, and what it holds is lost with it: kvctl drain NAME --wait, then systemctl stop kvd-memnode, then remove the package" >&2
	exit 1
	;;
esac
systemctl disable --quiet --now kvd-gateway kvd-broker kvd-directory kvd-memnode
