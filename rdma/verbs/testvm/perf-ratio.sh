#!/bin/sh
# perf-ratio.sh [COMMAND...] - in the guest: kvctl perf next to perftest, between the same
# two adapters, taking turns within one boot. A COMMAND is kvctl, built with the tag
# verbs, with what stands before it: 'env GOMAXPROCS=1 ./kvctl'. Without one only
# perftest is run.
#
# Prints what each round measured, then for each verb and COMMAND the ratio to
# perftest of the medians and a verdict. Rounds differ by a factor of three in
# such a guest, so there are also the ratios of the tenth percentiles' medians, of the best
# rounds' medians, and of the minima. Where perftest's median is far from its minimum
# the guest was short of processors, and there is no verdict: a process that only
# polls then makes the kernel's threads, which are the adapter, wait for the scheduler's tick.
# The last columns are what the active process had to do for a verb: calls into C, switches of context, and
# processor time in µs; medians of the rounds, as kvctl perf -o json counts them.
# Exits 1 if a number is missing, and 0 whatever the ratios are.
#   env: ITERS (2000), ROUNDS (3), LIMIT (1.3), VERBS (READ WRITE CAS), PASSIVE (rxe0), ACTIVE (rxe1)
ITERS=${ITERS:-2000} ROUNDS=${ROUNDS:-3} LIMIT=${LIMIT:-1.3} VERBS=${VERBS:-READ WRITE CAS}
PASSIVE=${PASSIVE:-rxe0} ACTIVE=${ACTIVE:-rxe1}
PORT=18515 # perftest's own, for its bootstrap over TCP
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
missing=0

# gid DEVICE prints the index of its RoCE v2 GID that is an IPv4 address.
gid() {
	p=/sys/class/infiniband/$1/ports/1
	for g in "$p"/gids/*; do
		i=${g##*/}
		case $(cat "$g" 2>/dev/null) in 0000:0000:0000:0000:0000:ffff:*) ;; *) continue ;; esac
		[ "$(cat "$p/gid_attrs/types/$i" 2>/dev/null)" = "RoCE v2" ] && { echo "$i"; return 0; }
	done
	echo "perf-ratio: $1 has no RoCE v2 GID with an IPv4 address" >&2
	return 1
}
gp=$(gid "$PASSIVE") && ga=$(gid "$ACTIVE") || exit 1

# listening tells whether somebody listens at PORT: state 0A of /proc/net/tcp*.
listening() {
	awk -v p=":$(printf %04X $PORT)" '$4 == "0A" && substr($2, length($2)-4) == p { f = 1 } END { exit !f }' /proc/net/tcp /proc/net/tcp6
}

# perftest TOOL BYTES ARGS... prints median, minimum and tenth percentile, in µs. -U lists each latency.
perftest() {
	tool=$1
	shift 2
	timeout 150 "$tool" -d "$PASSIVE" -x "$gp" -p $PORT -n "$ITERS" -F "$@" >"$dir/server" 2>&1 </dev/null &
	server=$!
	tries=0
	until listening; do
		tries=$((tries + 1))
		[ $tries -gt 200 ] && break
		usleep 50000
	done
	timeout 120 "$tool" -d "$ACTIVE" -x "$ga" -p $PORT -n "$ITERS" -U -F "$@" 127.0.0.1 >"$dir/client" 2>&1 </dev/null ||
		{ kill $server 2>/dev/null; cat "$dir/server" "$dir/client" >&2; }
	wait $server
	sed -n 's/^[0-9]*, *\([0-9.]*\) *$/\1/p' "$dir/client" | sort -n |
		awk '{ v[NR] = $1 } END { if (NR) printf "%.2f %.2f %.2f\n", v[int((NR + 1) / 2)], v[1], v[int((NR + 9) / 10)] }'
}

# kvctl COMMAND VERB BYTES prints the same, and then calls into C, switches and µs of processor time a verb.
kvctl() {
	# shellcheck disable=SC2086 # COMMAND is words
	timeout 120 $1 --provider verbs --rdma-device "$ACTIVE" -o json \
		perf --passive-device "$PASSIVE" --verbs "$2" --sizes "$3" --iters "$ITERS" >"$dir/kvctl" 2>"$dir/stderr" </dev/null ||
		cat "$dir/stderr" >&2
	tr ',{}[]' '\n' <"$dir/kvctl" | awk -F: '{ gsub(/[" ]/, ""); v[$1] = $2 }
		END { if (v["median_ns"]) printf "%.2f %.2f %.2f %.2f %.2f %.2f\n", v["median_ns"] / 1000, v["min_ns"] / 1000,
			v["p10_ns"] / 1000, v["cgo_calls"], v["switches"], v["cpu_ns"] / 1000 }'
}

# run NAME COMMAND... adds the line of numbers that COMMAND prints to the file NAME.
run() {
	file=$dir/$1
	shift
	v=$("$@")
	[ -z "$v" ] || echo "$v" >>"$file"
	printf '  %-24s' "$(echo "${v:-missing}" | cut -d' ' -f1-3)"
}

# nth N COLUMN FILE prints the Nth smallest of a column's ROUNDS numbers.
nth() {
	[ "$(wc -l 2>/dev/null <"$3")" = "$ROUNDS" ] && cut -d' ' -f"$2" "$3" | sort -n | sed -n "$1p"
}
middle=$(((ROUNDS + 1) / 2))

echo "perftest and kvctl perf, $PASSIVE GID $gp passive, $ACTIVE GID $ga active, $ITERS iterations; median, minimum and tenth percentile, µs"
round=0
while [ $round -lt "$ROUNDS" ]; do
	round=$((round + 1))
	for verb in $VERBS; do
		case $verb in
		READ) name=READ bytes=64 tool="ib_read_lat 64 -s 64" ;;
		WRITE) name=PINGPONG bytes=64 tool="ib_write_lat 64 -s 64" ;;
		CAS) name=CMP_AND_SWP bytes=8 tool="ib_atomic_lat 8 -A CMP_AND_SWAP" ;;
		esac
		printf 'round %s %-6s' "$round" "$verb"
		# shellcheck disable=SC2086 # words
		run "p.$verb" perftest $tool
		n=0
		for command; do
			n=$((n + 1))
			run "k$n.$verb" kvctl "$command" $name $bytes
		done
		echo
	done
done

echo
printf '%-22s %-36s %9s %9s %6s %6s %6s %6s %7s %8s %8s\n' "medians of $ROUNDS" command perftest kvctl ratio p10 best minima "C calls" switches "µs proc."
for verb in $VERBS; do
	case $verb in
	READ) what="READ 64 B" ;;
	WRITE) what="WRITE 64 B, ping-pong" ;;
	CAS) what="CMP_AND_SWP 8 B" ;;
	esac
	n=0
	for command; do
		n=$((n + 1))
		p=$dir/p.$verb k=$dir/k$n.$verb
		if [ -z "$(nth 1 1 "$p")" ] || [ -z "$(nth 1 1 "$k")" ]; then
			printf '%-22s %-36s missing\n' "$what" "$command"
			missing=1
			continue
		fi
		set_p="$(nth $middle 1 "$p") $(nth $middle 3 "$p") $(nth 1 1 "$p") $(nth 1 2 "$p")"
		set_k="$(nth $middle 1 "$k") $(nth $middle 3 "$k") $(nth 1 1 "$k") $(nth 1 2 "$k")"
		echo "$set_p $set_k $(nth $middle 4 "$k") $(nth $middle 5 "$k") $(nth $middle 6 "$k")" |
			awk -v l="$LIMIT" -v what="$what" -v command="$command" '{
				verdict = $5 / $1 <= l ? "met" : "MISSED"
				if ($1 > 5 * $4) verdict = "disturbed: no verdict"
				printf "%-22s %-36s %9.2f %9.2f %6.2f %6.2f %6.2f %6.2f %7.2f %8.2f %8.1f %s (at most %s)\n", what, command,
					$1, $5, $5 / $1, $6 / $2, $7 / $3, $8 / $4, $9, $10, $11, verdict, l }'
	done
done
exit $missing
