package gateway

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client/clienttest"
)

// SORT, on a redis-server and on a gateway.
func TestSortLikeRedis(t *testing.T) {
	likeRedis(t, randomSorts, 16, clienttest.New(clienttest.Options{}))
}

func randomSorts(rng *rand.Rand) [][]string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	n := func() string { return strconv.Itoa(rng.IntN(9) - 2) }
	element := func() string {
		if rng.IntN(12) == 0 {
			return pick("abc", "1.5", "", "-3e2", "inf", "nan")
		}
		return strconv.Itoa(rng.IntN(12))
	}
	key := pick("list", "set", "zset", "hash1", "none", "w1")
	switch rng.IntN(12) {
	case 0, 1:
		return [][]string{{"RPUSH", "list", element(), element()}}
	case 2:
		return [][]string{{"SADD", "set", element(), element()}}
	case 3:
		return [][]string{{"ZADD", "zset", n(), element(), n(), element()}}
	case 4:
		return [][]string{{"SET", "w" + strconv.Itoa(rng.IntN(12)), element()}}
	case 5:
		return [][]string{{"HSET", "hash" + strconv.Itoa(rng.IntN(12)), "f", element(), "g", element()}}
	case 6:
		return [][]string{{"DEL", pick("list", "set", "zset", "w1", "hash1")}}
	}
	cmd := []string{pick("SORT", "SORT_RO", "sort"), key}
	by := false
	for range rng.IntN(5) {
		switch rng.IntN(9) {
		case 0:
			cmd = append(cmd, "LIMIT", n(), n())
		case 1:
			cmd = append(cmd, pick("ASC", "DESC", "desc"))
		case 2:
			cmd = append(cmd, "ALPHA")
		case 3:
			by = true
			cmd = append(cmd, "BY", pick("w*", "hash*->f", "none*"))
		case 4, 5:
			cmd = append(cmd, "GET", pick("#", "w*", "hash*->g", "w*->f", "hash*", "none"))
		case 6:
			cmd = append(cmd, "BY", "nosort")
		case 7:
			cmd = append(cmd, pick("foo", "GET", "LIMIT"))
		case 8:
			cmd = append(cmd, pick("STORE", "store"), pick("list", "to", "set", "w1"))
		}
	}
	if by && slices.Contains(cmd, "ALPHA") {
		return [][]string{{"EXISTS", key}} // of equal weights Redis's order is none that it tells of
	}
	if slices.Contains(cmd, "nosort") && key == "set" {
		return [][]string{{"EXISTS", key}} // a set has no order
	}
	return [][]string{cmd, {"LRANGE", pick("list", "to"), "0", "-1"}}
}

// Either store restores all that the other dumps, and has the same value then.
func TestDumpLikeRedis(t *testing.T) {
	theirs := dial(t, "unix", startRedis(t))
	ours := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", clienttest.New(clienttest.Options{})}}}))
	long := strings.Repeat("long ", 40)
	var members, pairs, scored, mixed []string
	for i := range 700 {
		m := strconv.Itoa(i * 37)
		members, pairs, scored = append(members, m), append(pairs, "f"+m, "v"+m),
			append(scored, strconv.Itoa(i%50)+".25", "m"+m)
		mixed = append(mixed, []string{m, "text" + m, "-" + m, "", long}[i%5])
	}
	values := [][]string{
		{"SET", "10"}, {"SET", ""}, {"SET", "-70000"}, {"SET", "9223372036854775807"}, {"SET", "hello"},
		{"SET", strings.Repeat("ab", 50_000)},
		{"SET", "\x00\xff\r\n"},
		append([]string{"RPUSH"}, mixed[:5]...), append([]string{"RPUSH"}, mixed...),
		{"RPUSH", strings.Repeat("x", 20_000), "y"},
		append([]string{"SADD"}, members[:9]...), append([]string{"SADD"}, members...),
		append([]string{"SADD", "a"}, members[:5]...), {"SADD", "1", "70000", "5000000000"},
		append([]string{"HSET"}, pairs[:8]...), append([]string{"HSET"}, pairs...),
		{"HSET", "f", long, "g", "", "h", "-5"},
		append([]string{"ZADD"}, scored[:8]...), append([]string{"ZADD"}, scored...),
		{"ZADD", "inf", "a", "-inf", "b", "0.1", "c", "3", long},
		{"RPUSH", strings.Repeat("z", 16_376), strings.Repeat("z", 16_377), strings.Repeat("z", 16_378),
			strings.Repeat("z", 16_379)},
	}
	show := func(p *peer) string {
		var s string
		for _, c := range [][]string{{"TYPE", "k"}, {"GET", "k"}, {"LRANGE", "k", "0", "-1"}, {"HGETALL", "k"},
			{"SMEMBERS", "k"}, {"ZRANGE", "k", "0", "-1", "WITHSCORES"}} {
			r := p.do(t, c...)
			if c[0] == "HGETALL" || c[0] == "SMEMBERS" {
				lines := strings.Split(r, "\r\n")
				slices.Sort(lines)
				r = strings.Join(lines, "\r\n")
			}
			s += r
		}
		return s
	}
	for _, v := range values {
		cmd := append([]string{v[0], "k"}, v[1:]...)
		for _, way := range [][2]*peer{{theirs, ours}, {ours, theirs}, {ours, ours}} {
			from, to := way[0], way[1]
			from.do(t, "DEL", "k")
			from.do(t, cmd...)
			want := show(from)
			dump := from.do(t, "DUMP", "k")
			_, payload, ok := strings.Cut(dump, "\r\n")
			if !ok || dump[0] != '$' {
				t.Fatalf("%.60q: DUMP: %.100q", cmd, dump)
			}
			payload = strings.TrimSuffix(payload, "\r\n")
			to.do(t, "DEL", "k")
			if got := to.do(t, "RESTORE", "k", "0", payload); got != "+OK\r\n" {
				t.Errorf("%.60q: RESTORE: %q", cmd, got)
				continue
			}
			if got := show(to); got != want {
				t.Errorf("%.60q: restored as\n%.300q, want\n%.300q", cmd, got, want)
			}
		}
	}
	both := []*peer{ours, theirs}
	for _, cmd := range [][]string{
		{"DUMP", "none"}, {"DUMP"}, {"RESTORE", "k", "0", "foo"}, {"RESTORE", "k", "0", "foo", "REPLACE"},
		{"RESTORE", "n", "0", ""},
		{"RESTORE", "n", "-1", "x"}, {"RESTORE", "n", "x", "x"}, {"RESTORE", "n", "0", "x", "FOO"},
		{"RESTORE", "n", "0", "x", "FREQ", "256"},
		{"RESTORE", "n", "0", "x", "IDLETIME", "-1"}, {"RESTORE", "n", "0", "x", "IDLETIME"},
		{"RESTORE", "n", "0", "x", "IDLETIME", "1", "FREQ", "2"},
	} {
		var got [2]string
		for i, p := range both {
			got[i] = p.do(t, cmd...)
		}
		if got[0] != got[1] {
			t.Errorf("%q: %q, want %q", cmd, got[0], got[1])
		}
	}
}
