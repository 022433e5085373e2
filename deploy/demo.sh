#!/bin/sh
# Puts a large file tree into stores of several shapes, takes it out again and
# compares. Usage: demo.sh BIN [TREE], where BIN holds kvd and kvctl; TREE is
# Go's own sources unless it is given.
#
# It prints one line for each run, and ends with status 0 when no run lost or
# changed a byte. Everything listens on loopback ports that nobody else uses,
# and lives in a temporary folder.
#
# shellcheck disable=SC2086 # lists of process ids and flags are split on purpose
set -eu

bin=$(cd "$1" && pwd)
tree=${2:-$(go env GOROOT)/src}
work=$(mktemp -d "${TMPDIR:-/tmp}/kvd-demo.XXXXXX")
export XDG_RUNTIME_DIR="$work/run"
mkdir -m 700 "$XDG_RUNTIME_DIR"
pids=
# Many processes share this machine: who is not scheduled for a second is not
# dead.
lease="--lease 5s"

stop() { # PID...: ask, and wait
	for pid in "$@"; do kill -TERM "$pid" 2>/dev/null || true; done
	for pid in "$@"; do
		wait "$pid" 2>/dev/null || true
		pids=$(echo "$pids " | sed "s/ $pid / /") # the number may be somebody else's soon
	done
}

cleanup() {
	status=$?
	trap - EXIT
	stop $pids
	if [ $status -ne 0 ]; then
		echo "demo: failed; the logs of the processes follow" >&2
		tail -n 20 "$work"/*.log >&2 || true
	fi
	rm -rf "$work"
	exit $status
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# serve NAME ARGS...: start kvd and wait until it is ready; its ready line is
# then in $work/NAME.out, its process id in $pid.
serve() {
	name=$1
	shift
	: >"$work/$name.out"
	"$bin/kvd" "$@" >"$work/$name.out" 2>"$work/$name.log" &
	pid=$!
	pids="$pids $pid"
	waited=0
	until grep -q '^ready ' "$work/$name.out"; do
		kill -0 "$pid" 2>/dev/null || { echo "demo: kvd $1 ended" >&2; exit 1; }
		waited=$((waited + 1))
		[ $waited -lt 600 ] || { echo "demo: kvd $1 is not ready after a minute" >&2; exit 1; }
		sleep 0.1
	done
}

# ready NAME KEY: a value of NAME's ready line.
ready() { sed -n "s/.* $2=\([^ ]*\).*/\1/p" "$work/$1.out"; }

# field JSON NAME: a number of kvctl's one-line or indented report.
field() { tr -d ' \n' <"$1" | sed "s/.*\"$2\":\([0-9.]*\).*/\1/"; }

row() { printf '%-44s %8s %13s %10s %10s\n' "$@"; }

# run TITLE KVCTL-ARGS...: import, export, compare. $during, if set, is a command
# to run while the import is under way.
during=
run() {
	title=$1
	shift
	"$bin/kvctl" "$@" -o json import "$tree" --prefix go/ >"$work/import.json" &
	import=$!
	if [ -n "$during" ]; then $during; fi
	wait $import
	rm -rf "$work/out"
	"$bin/kvctl" "$@" -o json export "$work/out" --prefix go/ >"$work/export.json"
	diff -r "$tree" "$work/out"
	files=$(field "$work/import.json" files)
	bytes=$(field "$work/import.json" bytes)
	[ "$files" = "$(field "$work/export.json" files)" ] && [ "$bytes" = "$(field "$work/export.json" bytes)" ] ||
		{ echo "demo: import and export count differently" >&2; exit 1; }
	row "$title" "$files" "$bytes" \
		"$(LC_ALL=C printf %.2f "$(field "$work/import.json" seconds)")" "$(LC_ALL=C printf %.2f "$(field "$work/export.json" seconds)")"
}

row STORE FILES BYTES "IMPORT s" "EXPORT s"

serve dev dev --listen 127.0.0.1:0
run "kvd dev" --directory "$(ready dev directory)"
stop $pid

serve d1 directory --id d1 --data-dir "$work/d1" --listen 127.0.0.1:0 --raft-listen 127.0.0.1:0 $lease --bootstrap
directory=$(ready d1 directory)
d1=$pid
memnodes=
for m in m1 m2; do
	serve $m memnode --name $m --directory "$directory"
	memnodes="$memnodes $pid"
done
run "kvd directory, 2 kvd memnode, shm" --directory "$directory" --provider shm
# The same keys again: every one is an update now.
run "the same, tcp, every key again" --directory "$directory" --provider tcp
stop $memnodes $d1

# Three directory nodes. The first, which leads unless an election went otherwise,
# is killed in the middle of the import.
serve d1 directory --id d1 --data-dir "$work/e1" --listen 127.0.0.1:0 --raft-listen 127.0.0.1:0 $lease --bootstrap
d1=$pid
directory=$(ready d1 directory)
directories=
for d in d2 d3; do
	serve $d directory --id $d --data-dir "$work/e$d" --listen 127.0.0.1:0 --raft-listen 127.0.0.1:0 $lease --join "$directory"
	directories="$directories $pid"
done
all="$directory,$(ready d2 directory),$(ready d3 directory)"
memnodes=
for m in m1 m2; do
	serve $m memnode --name $m --directory "$all"
	memnodes="$memnodes $pid"
done
kill_leader() {
	# Some keys are there, and not all: the import is under way.
	until "$bin/kvctl" --directory "$all" scan --prefix go/ --limit 100 2>/dev/null | grep -q .; do sleep 0.02; done
	kill -0 "$import" 2>/dev/null || { echo "demo: the import was over before a directory node could be killed" >&2; exit 1; }
	kill -9 "$d1"
	stop "$d1"
	kill -0 "$import" 2>/dev/null || { echo "demo: the import was over when the directory node was dead" >&2; exit 1; }
}
during=kill_leader
run "3 kvd directory, one killed midway" --directory "$all" --provider tcp
stop $memnodes $directories
echo "demo: every byte came back"
