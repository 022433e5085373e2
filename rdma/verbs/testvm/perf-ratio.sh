#!/bin/sh
# perf-ratio.sh KVCTL - in the guest: kvctl perf next to perftest, between the same
# two adapters, taking turns within one boot. Prints what each measured, the ratio
# of the medians and a verdict for each verb. Rounds differ by a factor of three
# in such a guest, so it also prints the ratio of the best rounds' medians and that
# of the minima. Where perftest's median is far from its minimum the guest was short
# of processors, and there is no verdict: a process that only polls then makes the
# kernel's threads, which are the adapter, wait for the scheduler's tick.
# Exits 1 if a number is missing, and 0 whatever the ratios are.
#   env: ITERS (2000), ROUNDS (3), LIMIT (1.3), PASSIVE (rxe0), ACTIVE (rxe1)
# KVCTL is a binary built with the tag verbs; without it only perftest is run.
KVCTL=${1:-}
ITERS=${ITERS:-2000} ROUNDS=${ROUNDS:-3} LIMIT=${LIMIT:-1.3}
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

# perftest TOOL BYTES ARGS... prints t_typical, which is the median, and t_min, in µs.
perftest() {
	tool=$1 bytes=$2
	shift 2
	timeout 150 "$tool" -d "$PASSIVE" -x "$gp" -p $PORT -n "$ITERS" -F "$@" >"$dir/server" 2>&1 </dev/null &
	server=$!
	tries=0
	until listening; do
		tries=$((tries + 1))
		[ $tries -gt 200 ] && break
		usleep 50000
	done
	timeout 120 "$tool" -d "$ACTIVE" -x "$ga" -p $PORT -n "$ITERS" -F "$@" 127.0.0.1 >"$dir/client" 2>&1 </dev/null ||
		{ kill $server 2>/dev/null; cat "$dir/server" "$dir/client" >&2; }
	wait $server
	awk -v b="$bytes" -v n="$ITERS" '$1 == b && $2 == n { print $5, $3 }' "$dir/client"
}

# kvctl VERB BYTES prints the median and the minimum in µs.
kvctl() {
	timeout 120 "$KVCTL" --provider verbs --rdma-device "$ACTIVE" -o json \
		perf --passive-device "$PASSIVE" --verbs "$1" --sizes "$2" --iters "$ITERS" >"$dir/kvctl" 2>"$dir/stderr" </dev/null ||
		cat "$dir/stderr" >&2
	sed -n 's/.*"min_ns":\([0-9]*\),"median_ns":\([0-9]*\).*/\2 \1/p' "$dir/kvctl" |
		awk '{ printf "%.2f %.2f\n", $1 / 1000, $2 / 1000 }'
}

# run NAME COMMAND... adds the two numbers that COMMAND prints to the files
# NAME.median and NAME.min.
run() {
	name=$dir/$1
	shift
	v=$("$@")
	if [ -n "$v" ]; then
		echo "${v% *}" >>"$name.median"
		echo "${v#* }" >>"$name.min"
	fi
	printf '  %-20s' "${v:-missing}"
}

# nth N FILE prints the Nth smallest of its ROUNDS numbers.
nth() {
	[ "$(wc -l 2>/dev/null <"$2")" = "$ROUNDS" ] && sort -n "$2" | sed -n "$1p"
}
middle=$(((ROUNDS + 1) / 2))

echo "perftest and kvctl perf, $PASSIVE GID $gp passive, $ACTIVE GID $ga active, $ITERS iterations; median and minimum, µs"
verbs="READ WRITE CAS"
round=0
while [ $round -lt "$ROUNDS" ]; do
	round=$((round + 1))
	for verb in $verbs; do
		case $verb in
		READ) set -- ib_read_lat 64 -s 64 ;;
		WRITE) set -- ib_write_lat 64 -s 64 ;;
		CAS) set -- ib_atomic_lat 8 -A CMP_AND_SWAP ;;
		esac
		printf 'round %s %-6s' "$round" "$verb"
		run "p.$verb" perftest "$@"
		case $verb in READ) name=READ ;; WRITE) name=PINGPONG ;; CAS) name=CMP_AND_SWP ;; esac
		[ -n "$KVCTL" ] && run "k.$verb" kvctl "$name" "$2"
		echo
	done
done

echo
printf '%-22s %10s %10s %7s %7s %7s\n' "medians of $ROUNDS" perftest kvctl ratio best minima
for verb in $verbs; do
	case $verb in
	READ) what="READ 64 B" ;;
	WRITE) what="WRITE 64 B, ping-pong" ;;
	CAS) what="CMP_AND_SWP 8 B" ;;
	esac
	p=$dir/p.$verb k=$dir/k.$verb
	if [ -z "$(nth 1 "$p.median")" ] || [ -z "$(nth 1 "$k.median")" ]; then
		printf '%-22s missing\n' "$what"
		missing=1
		continue
	fi
	echo "$what|$(nth $middle "$p.median")|$(nth $middle "$k.median")|$(nth 1 "$p.median")|$(nth 1 "$k.median")|$(nth 1 "$p.min")|$(nth 1 "$k.min")" |
		awk -F'|' -v l="$LIMIT" '{
			verdict = $3 / $2 <= l ? "met" : "MISSED"
			if ($2 > 5 * $6) verdict = "disturbed: no verdict"
			printf "%-22s %10.2f %10.2f %7.2f %7.2f %7.2f %s (at most %s)\n",
				$1, $2, $3, $3 / $2, $5 / $4, $7 / $6, verdict, l }'
done
exit $missing
