# Machines for the tour of the documents, which sources this. Each has a network, a home folder,
# a /usr/local/bin and a /var/lib of its own, all empty, and a shell that stays. $MACHINES is a
# folder with their files and the pipes of their shells, $SYSTEM the PATH of an empty machine.

ip link add br0 type bridge && ip link set br0 up || exit 1

# machine NAME ADDRESS makes one, and connects it to the others.
machine() {
	local m="$MACHINES/$1"
	mkdir -p "$m/home" "$m/bin" "$m/lib/kvd" && mkfifo "$m/typed" "$m/status" || return
	MACHINE="$m" PATH="$SYSTEM" unshare --net --mount bash -c '
		mount --bind "$MACHINE/home" "$HOME" && mount --bind "$MACHINE/bin" /usr/local/bin && mount --bind "$MACHINE/lib" /var/lib &&
			cd && echo 0 >"$MACHINE/status" && exec bash
		echo 1 >"$MACHINE/status"' <>"$m/typed" &
	read -r status <>"$m/status" && [ "$status" = 0 ] || return
	ip link add "to-$1" type veth peer name eth0 netns $! && ip link set "to-$1" master br0 up &&
		on "$1" <<<"ip addr add $2/24 dev eth0 && ip link set lo up && ip link set eth0 up"
}

# on MACHINE types stdin there, and waits for its end. The pipe of the status is opened for both
# directions, so that it does not end when the writer of the status before closes it only now.
on() {
	{ printf '{ '; cat; printf '\n} </dev/null\necho $? >"$MACHINE/status"\n'; } >"$MACHINES/$1/typed"
	local status
	read -r status <>"$MACHINES/$1/status" && return "$status"
}

# ssh MACHINE COMMAND…, and scp FILE… MACHINE:FOLDER/, for machines on which no sshd runs.
ssh() {
	on "$1" <<<"${*:2}"
}
scp() {
	local to="${*: -1}" file folder
	folder="${to#*:}"
	case "$folder" in
	/usr/local/bin/) folder="$MACHINES/${to%%:*}/bin/" ;;
	[!/]*/) folder="$MACHINES/${to%%:*}/home/$folder" ;;
	*) echo "scp: no folder of a machine: $to" >&2; return 1 ;;
	esac
	for file in "${@:1:$#-1}"; do
		(umask 077 && cat "$file" >"$folder${file##*/}") && chmod "$(stat -c %a "$file")" "$folder${file##*/}" || return
	done
}
export -f on ssh scp
