#!/bin/sh
# After a package is removed, or its settings are, too. The data folder of a directory node stays.
set -e
if [ -d /run/systemd/system ]; then
	case "$1" in remove | purge | 0) systemctl daemon-reload ;; esac
fi
if [ "$1" = purge ] && [ -d /var/lib/private/kvd-directory ]; then
	echo "kvd: /var/lib/private/kvd-directory, the data folder of a directory node, stays"
fi
