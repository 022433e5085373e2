#!/bin/sh
# boot.sh BASE FOLDER: a systemd as process 1 of namespaces of its own, whose root is the folder BASE, of a Debian, which
# it leaves as it is: what changes goes to memory. It finds FOLDER at /release. test.sh runs it under unshare.
set -e
base=$1 release=$2
mount --make-rprivate /
ip link set lo up
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o "lowerdir=$base,upperdir=/mnt/upper,workdir=/mnt/work" overlay /mnt/root
cd /mnt/root
mkdir -p release old
mount --rbind "$release" release
mount --rbind /dev dev
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 none sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mkdir -p run/systemd/system
printf '[Unit]\nDefaultDependencies=no\n' >run/systemd/system/kvd-test.target
# Nothing but what the test starts, and no journal.
for role in directory memnode gateway broker archive; do
	mkdir "run/systemd/system/kvd-$role.service.d"
	printf '[Unit]\nDefaultDependencies=no\n[Service]\nStandardOutput=append:/run/kvd-%s.log\nStandardError=append:/run/kvd-%s.log\n' $role $role >"run/systemd/system/kvd-$role.service.d/test.conf"
done
pivot_root . old
umount -l old
exec env -i container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_LOG_TARGET=null \
	/lib/systemd/systemd --system --unit=kvd-test.target --show-status=no
