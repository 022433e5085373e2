package gateway

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
)

// alikeSets allows for the order of what Redis keeps in a hash table, and for chance.
func alikeSets(cmd []string, got, want []byte) bool {
	switch strings.ToLower(cmd[0]) {
	case "smembers", "sscan", "sinter", "sunion", "sdiff":
		return sameLines(got, want)
	case "spop", "srandmember":
		return firstLine(got) == firstLine(want) && (len(cmd) < 3 || cmd[2] != "1000" || sameLines(got, want))
	}
	return false
}

// TestSetsLikeRedis: commands on sets reply as a redis-server, but for the order of what Redis keeps in a hash table.
func TestSetsLikeRedis(t *testing.T) {
	compareSeeded(t, 12, func(rng *rand.Rand) [][]string {
		c := randomSetCommand(rng)
		if rng.IntN(3) == 0 {
			c = randomSeveralSets(rng)
		}
		if c[0] == "SPOP" && len(c) > 1 && (len(c) != 3 || c[2] != "1000") {
			// what is left depends on chance, unless it is nothing
			return [][]string{c, {"DEL", c[1]}}
		}
		return [][]string{c}
	}, alikeSets)
}

func setKey(rng *rand.Rand) string { return "key:" + strconv.Itoa(rng.IntN(5)) }

func setMembers(rng *rand.Rand) (all []string) {
	for range 1 + rng.IntN(6) {
		switch rng.IntN(40) {
		case 0:
			all = append(all, oddNumbers(rng))
		case 1:
			all = append(all, strings.Repeat("x", rng.IntN(200)))
		case 2:
			all = append(all, "m"+strconv.Itoa(rng.IntN(10)))
		case 3:
			all = append(all, strconv.FormatInt(rng.Int64()>>rng.IntN(64), 10))
		default:
			all = append(all, strconv.Itoa(rng.IntN(30)-10))
		}
	}
	if rng.IntN(200) == 0 {
		for i := range 520 {
			all = append(all, strconv.Itoa(i))
		}
	}
	return all
}

func randomSetCommand(rng *rand.Rand) []string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	k := setKey(rng)
	members := func() []string { return setMembers(rng) }
	switch rng.IntN(24) {
	case 0, 1, 2, 3:
		return append([]string{pick("SADD", "sadd"), k}, members()...)
	case 4, 5:
		return append([]string{"SREM", k}, members()...)
	case 6, 7:
		return []string{"SISMEMBER", k, members()[0]}
	case 8:
		return append([]string{"SMISMEMBER", k}, members()...)
	case 9:
		return []string{"SCARD", k}
	case 10, 11:
		return []string{"SMEMBERS", k}
	case 12:
		return append([]string{"SPOP", k}, [][]string{{}, {pick("0", "1", "3", "1000", "1000")}, {"-1"},
			{oddNumbers(rng)}, {"1", "x"}}[rng.IntN(5)]...)
	case 13:
		return append([]string{"SRANDMEMBER", k}, [][]string{{}, {pick("0", "1", "3", "1000", "-1", "-20")}, {"x"},
			{"-9223372036854775808"}, {"1", "x"}, {"9223372036854775807"}}[rng.IntN(6)]...)
	case 14, 15:
		c := []string{"SSCAN", k, pick("0", "0", "0", "0", "abc", "1x", " 1", "", "-", "18446744073709551616"), "COUNT",
			pick("1000", "1000", "1000", "0", "x", "-1")}
		if rng.IntN(2) == 0 {
			c = append(c, pick("MATCH", "match", "foo", "TYPE"), pick("*", "1*", "[1-3]?", "[", "set"))
		}
		if rng.IntN(10) == 0 {
			c = append(c, "COUNT")
		}
		return c
	case 16:
		return []string{pick("TYPE", "EXISTS", "GET", "STRLEN", "HGET", "HLEN"), k}
	case 17:
		return []string{"OBJECT", "ENCODING", k}
	case 18:
		return []string{pick("SET", "HSETNX"), k, pick("f", "1"), "v"}[:3+rng.IntN(2)]
	case 19:
		return []string{pick("DEL", "UNLINK"), k}
	case 20:
		return []string{"EXPIRE", k, pick("1000000", "-1")}
	case 21:
		return []string{pick("SADD", "SREM", "SPOP", "SISMEMBER", "SSCAN", "SINTER", "SINTERCARD", "SMOVE",
			"SUNIONSTORE")}
	}
	return append([]string{"SADD", k}, members()...)
}

// randomSeveralSets is a command on several sets.
func randomSeveralSets(rng *rand.Rand) []string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	c := []string{pick("SINTER", "SUNION", "SDIFF", "SINTERSTORE", "SUNIONSTORE", "SDIFFSTORE", "SINTERCARD", "SMOVE")}
	switch c[0] {
	case "SMOVE":
		return append(c, setKey(rng), setKey(rng), setMembers(rng)[0])
	case "SINTERCARD":
		n := 1 + rng.IntN(3)
		c = append(c, strconv.Itoa(n))
		for range n {
			c = append(c, setKey(rng))
		}
		if rng.IntN(5) == 0 {
			c[1] = oddNumbers(rng)
		}
		for range rng.IntN(3) {
			c = append(c, pick("LIMIT", "limit", "LIMIT", "foo"), pick("0", "1", "3", "100", "-1", "x"))
		}
		return c[:len(c)-rng.IntN(15)/14]
	}
	for range 2 + rng.IntN(3) {
		c = append(c, setKey(rng))
	}
	return c
}

// TestSMove: a member moves between sets.
func TestSMove(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	p.do(t, "HELLO", "3")
	for _, c := range []struct{ cmd, reply string }{
		{"SMOVE a b 1", ":0\r\n"},
		{"SADD a 1 x", ":2\r\n"},
		{"SMOVE a b 2", ":0\r\n"},
		{"SMOVE a b 1", ":1\r\n"},
		{"SMEMBERS b", "~1\r\n" + bulk("1")},
		{"SMOVE a a x", ":1\r\n"},
		{"SMOVE a b x", ":1\r\n"},
		{"EXISTS a", ":0\r\n"},
		{"SCARD b", ":2\r\n"},
		{"SET s v", "+OK\r\n"},
		{"SMOVE b s x", wrongType},
		{"SMOVE s b x", wrongType},
		{"SMOVE a s x", ":0\r\n"},
		{"SUNIONSTORE s b", ":2\r\n"},
		{"SDIFFSTORE a b s", ":0\r\n"},
		{"SINTERSTORE b a s", ":0\r\n"},
		{"EXISTS b", ":0\r\n"},
	} {
		p.want(t, c.reply, strings.Fields(c.cmd)...)
	}
	p.want(t, "+set\r\n", "TYPE", "s")
}

// TestSets: shapes of replies in both versions of the protocol.
func TestSets(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	p3 := dial(t, "tcp", p.RemoteAddr().String())
	p3.do(t, "HELLO", "3")
	for _, c := range []struct{ cmd, reply, reply3 string }{
		{"SADD s 3 1 2 3", ":3\r\n", ":0\r\n"},
		{"SMEMBERS s", "*3\r\n$1\r\n1\r\n$1\r\n2\r\n$1\r\n3\r\n", "~3\r\n$1\r\n1\r\n$1\r\n2\r\n$1\r\n3\r\n"},
		{"SMEMBERS no", "*0\r\n", "~0\r\n"},
		{"OBJECT ENCODING s", bulk("intset"), ""},
		{"SADD u 3 x", ":2\r\n", ":0\r\n"},
		{"OBJECT ENCODING u", bulk("hashtable"), ""},
		{"SMISMEMBER u x y", "*2\r\n:1\r\n:0\r\n", ""},
		{"SINTER s u", "*1\r\n$1\r\n3\r\n", "~1\r\n$1\r\n3\r\n"},
		{"SINTER s u no", "*0\r\n", "~0\r\n"},
		{"SUNION s u", "*4\r\n$1\r\n1\r\n$1\r\n2\r\n$1\r\n3\r\n$1\r\nx\r\n", ""},
		{"SDIFF s u", "*2\r\n$1\r\n1\r\n$1\r\n2\r\n", ""},
		{"SINTERCARD 2 s s LIMIT 2", ":2\r\n", ""},
		{"SMOVE s u 1", ":1\r\n", ""},
		{"SMOVE u s 1", ":1\r\n", ""},
		{"SMOVE s u 7", ":0\r\n", ""},
		{"SMOVE s s 1", ":1\r\n", ""},
		{"SUNIONSTORE d s u", ":4\r\n", ""},
		{"SINTERSTORE d s no", ":0\r\n", ""},
		{"EXISTS d", ":0\r\n", ""},
		{"SUNIONSTORE s s", ":3\r\n", ""},
		{"SDIFFSTORE s s s", ":0\r\n", ""},
		{"EXISTS s", ":0\r\n", ""},
		{"SRANDMEMBER u -9000000000", "-ERR kvd: the reply to that count would be longer than 4 MiB\r\n", ""},
		{"COMMAND GETKEYS SINTERCARD 2 s u LIMIT 1", "*2\r\n$1\r\ns\r\n$1\r\nu\r\n", ""},
		{"SSCAN u 0", "*2\r\n$1\r\n0\r\n*2\r\n$1\r\n3\r\n$1\r\nx\r\n", ""},
		{"SPOP u 5", "*2\r\n$1\r\n3\r\n$1\r\nx\r\n", "~0\r\n"},
		{"SPOP u", "$-1\r\n", "_\r\n"},
		{"MULTI", "+OK\r\n", ""},
		{"SADD s 1", "+QUEUED\r\n", ""},
		{"SINTER s s", "+QUEUED\r\n", ""},
		{"SINTERSTORE s s", "+QUEUED\r\n", ""},
		{"EXEC", "*3\r\n:1\r\n*1\r\n$1\r\n1\r\n:1\r\n", ""},
	} {
		p.want(t, c.reply, strings.Fields(c.cmd)...)
		if c.reply3 != "" {
			p3.want(t, c.reply3, strings.Fields(c.cmd)...)
		}
	}
}
