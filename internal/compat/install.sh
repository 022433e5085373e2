#!/bin/sh
# Installs what `make test-compat` needs and is missing: Debian packages, as root.
# The services that come with them are not started.
set -eu

missing=
need() { # need PACKAGE COMMAND...
	package=$1
	shift
	"$@" >/dev/null 2>&1 || missing="$missing $package"
}
need redis-server command -v redis-server
need redis-tools command -v redis-benchmark
need memcached command -v memcached
need libmemcached-tools command -v memccapable
need nodejs command -v node
need npm command -v npm
need python3-redis /usr/bin/python3 -c 'import redis'
need python3-pymemcache /usr/bin/python3 -c 'import pymemcache'
# Applications, and what they are libraries for.
for package in \
	python3-celery python3-django python3-django-redis python3-dogpile.cache python3-flask-caching python3-flask-limiter \
	python3-flask-session python3-limits python3-pylibmc python3-rq \
	php-cli php-memcached php-redis ruby ruby-activesupport ruby-dalli ruby-redis ruby-sidekiq nginx-light; do
	need $package dpkg --status $package
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ]; then
	echo "install.sh: as root, run: apt-get install --no-install-recommends$missing" >&2
	exit 1
fi
# invoke-rc.d asks policy-rc.d whether a package may start its service.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod +x $policy
	trap 'rm -f $policy' EXIT
fi
apt-get update
# shellcheck disable=SC2086 # names of packages
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $missing
