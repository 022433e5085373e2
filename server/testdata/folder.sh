#!/usr/bin/env bash
# Makes data folders of directory nodes with the kvd and kvctl in a folder BIN, for TestEarlierFolders:
#
#	server/testdata/folder.sh BIN NAME
#
# In server/testdata/folders/NAME are then one-d1.tar.gz, of a directory of one node, with a snapshot and a log;
# three-d1.tar.gz to three-d3.tar.gz, with a log; and what kvctl status -o json said at last, as one.json and three.json. All of
# them were killed, so the disk has what a crash leaves.
set -euo pipefail
bin=$(realpath "$1") out=$(dirname "$0")/folders/$2
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
cd "$work"
declare -A pid
trap 'kill -9 "${pid[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT

start() { # NAME COMMAND...
	local name=$1
	shift
	"$@" <&0 >"$name.log" 2>&1 & # bash takes the standard input of what it runs beside it, unless told not to
	pid[$name]=$!
}

finish() { # NAME...
	for name in "$@"; do
		kill -9 "${pid[$name]}"
		wait "${pid[$name]}" 2>/dev/null || true
		unset "pid[$name]"
	done
}

until_says() { # TEXT COMMAND...: until the command prints the text
	local text=$1
	shift
	for _ in $(seq 100); do
		if "$@" 2>/dev/null | grep -q -- "$text"; then return; fi
		sleep 0.2
	done
	echo "$* does not say $text" >&2
	"$@" >&2 || true
	tail -n 5 ./*.log >&2
	exit 1
}

kvctl() { "$bin/kvctl" --timeout 10s "$@"; }
metrics() { curl -s http://127.77.0.1:7402/metrics; }

# A session that stays: its first command is run, and the process waits for more, as its input stays open.
hold() { # NAME COMMAND
	mkfifo "$1.in"
	local fd
	exec {fd}<>"$1.in"
	start "$1" "$bin/kvctl" --namespace shop shell <&$fd
	echo "$2" >&$fd
}

directory() { # NODES
	export KVD_DIRECTORY=127.77.0.1:7400
	local first=--bootstrap
	for i in $(seq "$1"); do
		start "d$i" "$bin/kvd" directory --id "d$i" --data-dir "$work/d$i" --listen "127.77.0.$i:7400" --raft-listen "127.77.0.$i:7401" \
			--http-listen "127.77.0.$i:7402" $first
		first="--join 127.77.0.1:7400"
		until_says "d$i" kvctl directory list
	done
	for m in m1 m2; do
		start $m "$bin/kvd" memnode --name $m --memory 64MiB --janitor=false --shm-socket off
		until_says "$m *up" kvctl nodes
	done
	kvctl namespace create shop --replicas 2 --owner group:shop --quota-sessions 20 --bytes 16MiB --limit 8MiB
	kvctl namespace create cache --mode cache --bytes 8MiB --replicas 1
	kvctl namespace grant shop group:sales write
	kvctl keys rotate
	hold reader 'get a'
	hold writer 'txn put held 1 put held2 2'
	until_says held kvctl --namespace shop scan
	hold dead 'txn put dead 1 put dead2 2'
	until_says dead kvctl --namespace shop scan
}

changes() {
	kvctl --namespace shop txn put a 1 put b 2
	kvctl --namespace shop put c 3
	kvctl --namespace shop shards split 1 # a job that nobody claims
	finish dead # which the memory nodes then fence
	until_says 'live.*2' sessions
	kvctl --namespace cache put hit 1
}

sessions() { kvctl status -o json | grep -o SESSION_LIVE | sort | uniq -c | sed 's/^/live /'; }

# Status comes last, and what the state machine does by itself a moment before.
keep() { # NAME NODES
	local before now=
	for _ in $(seq 100); do
		before=$now now=$(kvctl status -o json | grep -o '"raft_applied":"[0-9]*"')
		if [ "$now" = "$before" ] && ! kvctl status -o json | grep -q 'SESSION_FENCING'; then break; fi
		sleep 0.3
	done
	kvctl status -o json >"$out/$1.json"
	for i in $(seq "$2"); do finish "d$i"; done
	finish m1 m2 reader writer
	for i in $(seq "$2"); do
		tar --sort=name --owner=0 --group=0 --numeric-owner --exclude=LOCK -cz -f "$out/$1-d$i.tar.gz" "d$i"
		rm -r "d$i"
	done
	rm -f ./*.in
}

directory 1
for _ in $(seq 2100); do
	echo 'namespace grant shop group:x read'
	echo 'namespace grant shop group:x write'
done >grants
kvctl shell <grants >/dev/null
until_says 'kvd_raft_snapshot_index [1-9]' metrics
changes
keep one 1
directory 3
changes
keep three 3
ls -l "$out"
