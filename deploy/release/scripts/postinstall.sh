#!/bin/sh
# After install and upgrade, of both kinds of package. Nothing is started or restarted: a store is upgraded one
# process at a time, and the memory that a memory node lends is data.
set -e
case "$1" in abort-*) exit 0 ;; esac
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
for role in directory memnode gateway broker; do
	systemctl is-active --quiet "kvd-$role" || continue
	case $role in
	memnode) echo "kvd: kvd-memnode goes on with the program it has; when every copy is there (kvctl status): kvctl nodes restart NAME --leave" ;;
	*) echo "kvd: kvd-$role goes on with the program it has; one node at a time: systemctl restart kvd-$role" ;;
	esac
done
