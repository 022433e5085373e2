#!/usr/bin/env bash
# test.sh FOLDER: makes a release in FOLDER, makes it again from an export of the tree elsewhere, which has to give the same
# bytes, and a second one; installs, starts, upgrades and removes their packages in a Debian under a systemd of its
# own. Programs in C and Python are built and installed there, too. FOLDER/.base is that Debian, and serves again. For root.
set -euo pipefail
mkdir -p "$1"
out=$(realpath "$1")
cd "$(dirname "$0")/../.."
here=$PWD/deploy/release
arch=$(dpkg --print-architecture)
export ARCHES=${ARCHES:-amd64 arm64} # of which arch has to be one
last=${ARCHES##* }
case $last in amd64) machine=x86_64 ;; *) machine=aarch64 ;; esac
step() { printf '\n== %s (%ds)\n' "$*" "$SECONDS"; }
fail() {
	printf 'FAIL: %s\n' "$*" >&2
	exit 1
}
# has TEXT FILE: the file has a line with the text.
has() { grep --quiet --fixed-strings -- "$1" "$2" || { cat "$2" >&2; fail "$2 has no line with $1"; }; }

export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
temp=$(mktemp -d)
manager=
group=
base=
end() {
	[ -z "$base" ] || kill -- "-$base" 2>/dev/null || true
	if [ -n "$manager" ]; then
		kill -KILL "$manager" 2>/dev/null || true
		wait "$manager" 2>/dev/null || true
	fi
	# The kernel tells nobody that the last process of a group is gone.
	if [ -n "$group" ]; then
		for _ in $(seq 100); do
			find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
			[ -d "$group" ] || break
			sleep 0.05
		done
	fi
	rm -rf "$temp"
}
trap end EXIT

# A Debian comes by the network while the processors build.
packages=systemd,dbus,rpm,man-db,bash-completion,gcc,libc6-dev,pkg-config,python3-venv
if [ "$(cat "$out/.base/complete" 2>/dev/null)" != "$packages" ]; then
	rm -rf "${out:?}/.base"
	set -m # a process group of its own, which ends as a whole
	debootstrap --variant=minbase --include="$packages" bookworm "$out/.base" >"$out/debootstrap.log" 2>&1 </dev/null &
	base=$!
	set +m
fi

step 'two builds of a release have the same bytes'
"$here/release.sh" v0.1.0 "$out/first"
"$here/release.sh" v0.2.0-rc1 "$out/second" >"$temp/second" 2>&1 &
second=$!
mkdir "$temp/tree"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory "$temp/tree"
"$temp/tree/deploy/release/release.sh" v0.1.0 "$temp/again"
diff --recursive "$out/first" "$temp/again" || fail 'the second build differs'
rm -rf "$temp/tree" "$temp/again"
wait "$second" || { cat "$temp/second"; fail 'a second release is not made'; }
if "$here/release.sh" 0.3 "$temp/none" 2>"$temp/log"; then fail 'a release of no version was made'; fi
has 'VERSION=0.3' "$temp/log"
if "$here/release.sh" v0.3.0-try "$temp/none" 2>"$temp/log"; then fail 'a release was made that Python has no version for'; fi
has 'VERSION=v0.3.0-try' "$temp/log"

step 'checksums, SBOMs, archives'
(cd "$out/first" && sha256sum --check --quiet --strict SHA256SUMS)
[ "$(wc -l <"$out/first/SHA256SUMS")" = $((12 * $(wc -w <<<"$ARCHES"))) ] || fail 'not twelve files for each architecture'
has '"name": "github.com/hashicorp/raft"' "$out/first/kvd-0.1.0-linux-$last.cdx.json"
has '"bomFormat": "CycloneDX"' "$out/first/kvctl-0.1.0-linux-amd64.cdx.json"
has '"version": "v0.1.0"' "$out/first/kvctl-0.1.0-linux-amd64.cdx.json"
has '"bom-ref": "pkg:pypi/kvd@0.2.0rc1"' "$out/second/kvd-python-0.2.0-rc1-linux-amd64.cdx.json"
has "$(sha256sum "$out/first"/kvd-0.1.0-py3-none-manylinux_2_*_x86_64.whl | cut -d ' ' -f 1)" "$out/first/kvd-python-0.1.0-linux-amd64.cdx.json"
mkdir "$temp/archive"
tar --extract --gzip --file "$out/first/kvd-0.1.0-linux-$arch.tar.gz" --directory "$temp/archive"
"$temp/archive/kvd-0.1.0-linux-$arch/usr/bin/kvd" version | grep --quiet '^kvd v0.1.0 '
[ "$(stat --format=%s "$temp/archive/kvd-0.1.0-linux-$arch/usr/bin/kvctl")" -lt 20000000 ] || fail 'kvctl has 20 MB or more'

step 'what RPM packages say'
rpm=$out/first/kvd-0.1.0-1.x86_64.rpm
rpm --query --package --queryformat '%{NAME} %{VERSION} %{RELEASE} %{ARCH} %{LICENSE} %{BUILDTIME}\n' "$rpm" >"$temp/rpm"
has "kvd 0.1.0 1 x86_64 Apache-2.0 $SOURCE_DATE_EPOCH" "$temp/rpm"
rpm --query --package --queryformat '%{VERSION} %{ARCH}\n' "$out/second"/*."$machine".rpm >"$temp/rpm"
has "0.2.0~rc1 $machine" "$temp/rpm"
rpm --query --package --configfiles "$rpm" >"$temp/rpm"
diff "$temp/rpm" <(printf '/etc/kvd/%s.yaml\n' archive broker directory gateway memnode) || fail 'other settings'
dpkg-deb --contents "$out/first/kvd_0.1.0-1_amd64.deb" | awk '!/\/$/ {print substr($6, 2)}' | sed s,vendor-completions,site-functions, | sort >"$temp/deb"
rpm --query --package --list "$rpm" | sort | diff "$temp/deb" - || fail 'the packages differ'
dpkg-deb --info "$out/first/libkvd0_0.1.0-1_amd64.deb" symbols >"$temp/symbols"
has ' kvd_open@KVD_1.0 0.1.0' "$temp/symbols"
rpm --query --package --provides --requires "$out/first/libkvd-0.1.0-1.x86_64.rpm" "$out/first/libkvd-devel-0.1.0-1.x86_64.rpm" >"$temp/rpm"
has 'libkvd.so.0()(64bit)' "$temp/rpm"
has 'libkvd = 0.1.0-1' "$temp/rpm"

step 'a Debian of its own'
if [ -n "$base" ]; then
	wait "$base" || { tail -n 5 "$out/debootstrap.log"; fail 'there is no Debian'; }
	base=
	# Images of Debian without documents have this; man pages are documents.
	rm -f "$out/.base/etc/dpkg/dpkg.cfg.d/docker"
	echo "$packages" >"$out/.base/complete"
fi
cgroups=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/self/mounts)
[ -n "$cgroups" ] || fail 'there is no cgroup2 here, which systemd wants'
group=$cgroups/kvd-release-$$
mkdir "$group"
(
	echo "$BASHPID" >"$group/cgroup.procs"
	exec unshare --pid --mount --net --cgroup --uts --ipc --fork --kill-child "$here/boot.sh" "$out/.base" "$out"
) >"$temp/systemd" 2>&1 &
manager=$!
# within COMMAND: runs it on that machine.
within() {
	nsenter --target "$(cat "/proc/$manager/task/$manager/children" | tr -d ' ')" --pid --mount --net --cgroup --uts --ipc --root --wd -- env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"
}
# until_ COMMAND: waits until it succeeds on that machine.
until_() {
	for _ in $(seq 300); do
		kill -0 "$manager" || { cat "$temp/systemd" >&2; fail 'systemd has ended'; }
		within "$@" >/dev/null 2>&1 && return
		sleep 0.1
	done
	fail "waited half a minute for $*"
}
until_ systemctl is-active --quiet kvd-test.target
# kvctl ARGS: of that machine. equal WANT COMMAND: it prints that, there.
kvctl() { within kvctl --timeout=1m "$@"; }
equal() {
	local want=$1 got
	shift
	got=$("$@") || fail "$*: status $?"
	[ "$got" = "$want" ] || fail "$*: $got, want $want"
}
show() { within systemctl show --value --property="$1" "$2"; }

# life INSTALL UPGRADE REMOVE: a store on the machine from INSTALL of the first release to the removal of the second.
life() {
	local keeper
	within sh -c "$1"
	equal "kvd v0.1.0" within sh -c 'kvd version | cut -d " " -f 1,2'
	within bash -c 'man --where kvctl-nodes-restart kvd-memnode && . /usr/share/bash-completion/completions/kvctl && test -s /usr/share/fish/vendor_completions.d/kvd.fish' >/dev/null
	for role in directory memnode gateway broker archive; do
		equal inactive show ActiveState kvd-$role
		equal disabled show UnitFileState kvd-$role
	done

	within systemctl enable --quiet kvd-directory
	within systemctl start kvd-directory kvd-memnode
	kvctl namespace create cache --mode=cache --bytes=64MiB >/dev/null
	kvctl namespace create one --replicas=1 >/dev/null
	within systemctl start kvd-gateway
	kvctl --namespace=one put hello world
	keeper=$(show MainPID kvd-memnode)
	within sed -i 's/^# Metrics/# Ours. Metrics/' /etc/kvd/memnode.yaml

	within sh -c "$2" >"$temp/log" 2>&1 || { cat "$temp/log"; fail 'it is not upgraded'; }
	has 'kvctl nodes restart NAME --leave' "$temp/log"
	has 'systemctl restart kvd-directory' "$temp/log"
	equal "kvctl v0.2.0-rc1" within sh -c 'kvctl version | cut -d " " -f 1,2'
	within grep --quiet '^# Ours. Metrics' /etc/kvd/memnode.yaml || fail 'changed settings were replaced'
	equal "$keeper" show MainPID kvd-memnode
	kvctl nodes -o json >"$temp/nodes"
	has '"v0.1.0"' "$temp/nodes"
	equal world kvctl --namespace=one get hello
	within systemctl restart kvd-directory kvd-gateway
	kvctl nodes restart m1 >/dev/null
	equal active show ActiveState kvd-memnode
	kvctl nodes -o json >"$temp/nodes"
	has '"v0.2.0-rc1"' "$temp/nodes"
	equal world kvctl --namespace=one get hello

	if within sh -c "$3" >"$temp/log" 2>&1; then fail 'it was removed under a memory node'; fi
	has 'kvd-memnode runs, and what it holds is lost with it' "$temp/log"
	equal world kvctl --namespace=one get hello
	within systemctl stop kvd-memnode
	within sh -c "$3" >"$temp/log" 2>&1 || { cat "$temp/log"; fail 'it is not removed'; }
	if within test -e /usr/bin/kvd || within test -e /usr/lib/systemd/system/kvd-directory.service; then fail 'programs or units are left'; fi
	if within test -L /etc/systemd/system/multi-user.target.wants/kvd-directory.service; then fail 'the unit is still enabled'; fi
	equal not-found show LoadState kvd-directory.service
	within test -d /var/lib/private/kvd-directory || fail 'the data folder is gone'
}

step 'Debian: installed, started, upgraded, removed, purged'
life "dpkg --install /release/first/kvd_0.1.0-1_$arch.deb" "dpkg --install /release/second/kvd_0.2.0~rc1-1_$arch.deb" 'dpkg --remove kvd'
within grep --quiet '^# Ours. Metrics' /etc/kvd/memnode.yaml || fail 'settings are gone before they are purged'
within dpkg --purge kvd >"$temp/log" 2>&1
has '/var/lib/private/kvd-directory, the data folder of a directory node, stays' "$temp/log"
if within test -e /etc/kvd; then fail 'settings are left'; fi

step 'C and Python: libkvd installed and upgraded, programs built and run, removed'
second=0.2.0~rc1-1_$arch.deb
within dpkg --install "/release/first/libkvd0_0.1.0-1_$arch.deb" "/release/first/libkvd-dev_0.1.0-1_$arch.deb" >/dev/null
within dpkg --install "/release/second/libkvd0_$second" "/release/second/libkvd-dev_$second" "/release/second/kvd_$second" >/dev/null
within systemd-run --quiet --unit=kvd-dev --property=DefaultDependencies=no --property=StandardError=append:/run/kvd-dev.log --property=StandardOutput=append:/run/kvd-dev.log kvd dev
until_ grep --quiet '^ready role=dev' /run/kvd-dev.log
within sh -c 'cd /tmp && cc -Wall -Werror /usr/share/doc/libkvd-dev/examples/hello.c $(pkg-config --cflags --libs kvd) -o hello && cc -Wall -Werror -static-libgcc /usr/share/doc/libkvd-dev/examples/hello.c /usr/lib/*-linux-gnu/libkvd.a -o hello-static'
equal world within /tmp/hello
equal world within /tmp/hello-static
equal world kvctl get hello
within sh -c 'python3 -m venv /tmp/venv && /tmp/venv/bin/pip install --quiet --no-index /release/first/kvd-*_$(uname -m).whl && apt-get remove --yes gcc libkvd-dev libkvd0 >/dev/null && ! command -v cc && ! test -e /usr/include/kvd.h'
# The array leaves no room in the arena for a copy of it, and tracemalloc counts what Python takes.
cat >"$out/array.py" <<'EOF'
import tracemalloc
import kvd

with kvd.Client(arena=8 << 20) as client:
    weights = client.alloc(3 << 19, "float32")  # 6 MiB
    weights[0], weights[-1] = 1.5, 2.5
    tracemalloc.start()
    client.put("weights", weights)
    weights[0] = weights[-1] = 0
    client.get_into("weights", weights)
    copied = tracemalloc.get_traced_memory()[1]
    print(weights[0], weights[-1], copied < 100_000)
EOF
equal '1.5 2.5 True' within /tmp/venv/bin/python /release/array.py
within systemctl stop kvd-dev
within dpkg --purge kvd >/dev/null

step 'RPM: the same, with rpm on that machine'
within rm -rf /var/lib/private/kvd-directory
machine=$(uname -m)
life "rpm --install --nodeps /release/first/kvd-0.1.0-1.$machine.rpm" "rpm --upgrade --nodeps /release/second/kvd-0.2.0~rc1-1.$machine.rpm" 'rpm --erase kvd'
within grep --quiet '^# Ours. Metrics' /etc/kvd/memnode.yaml.rpmsave || fail 'changed settings are gone'

step 'test-release: PASS'
