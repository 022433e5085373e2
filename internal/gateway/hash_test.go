package gateway

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
)

// compareSeeded sends seeded commands to a redis-server and to a gateway, and compares the replies.
func compareSeeded(t *testing.T, seeds uint64, commands func(rng *rand.Rand) [][]string,
	alike func(cmd []string, got, want []byte) bool) {
	t.Helper()
	redis := startRedis(t)
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		addr := serve(t, Options{Databases: []Database{{"default", api}}})
		for seed := range seeds {
			for _, proto := range []string{"2", "3"} {
				rng := rand.New(rand.NewPCG(seed, 11))
				both := []*peer{dial(t, "tcp", addr), dial(t, "unix", redis)}
				for _, p := range both {
					p.do(t, "HELLO", proto)
					p.do(t, "FLUSHALL")
				}
				var script []string
				for range 60 {
					var cmds [][]string
					for range 1 + rng.IntN(2)*rng.IntN(40) {
						cmds = append(cmds, commands(rng)...)
					}
					for _, p := range both {
						p.send(t, cmds...)
					}
					for _, c := range cmds {
						script = append(script, fmt.Sprintf("%.200q", c))
						got, want := both[0].reply(t), both[1].reply(t)
						if !bytes.Equal(got, want) && !alike(c, got, want) {
							t.Fatalf("%s, seed %d, RESP%s: %.200q\n got %.800q\nwant %.800q\nafter\n%s", name, seed,
								proto, c, got, want,
								strings.Join(script[max(0, len(script)-25):], "\n"))
						}
					}
				}
			}
		}
	}
}

// sameLines is for replies without order.
func sameLines(got, want []byte) bool {
	a, b := strings.Split(string(got), "\r\n"), strings.Split(string(want), "\r\n")
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

// firstLine is what is the same in replies that are chosen at random.
func firstLine(b []byte) string {
	if b[0] == '$' && b[1] != '-' {
		return "$"
	}
	line, _, _ := strings.Cut(string(b), "\r\n")
	return line
}

// oddNumbers are numbers that are none, or at the end of what there is.
func oddNumbers(rng *rand.Rand) string {
	return []string{"0", "1", "-1", "5", "-7", "100", "9223372036854775807", "-9223372036854775808",
		"-9223372036854775807", "4611686018427387904",
		"-4611686018427387905", "9223372036854775808", "007", "+3", "", "abc", "1.5", " 1", "2147483648", "nan",
		"inf"}[rng.IntN(21)]
}

// TestHashesLikeRedis: all commands on hashes reply as a redis-server, in all but the order of what Redis keeps in a
// hash table.
func TestHashesLikeRedis(t *testing.T) {
	compareSeeded(t, 12, randomHashCommands, func(cmd []string, got, want []byte) bool {
		switch strings.ToLower(cmd[0]) {
		case "hgetall", "hkeys", "hvals", "hscan":
			return sameLines(got, want)
		case "hrandfield":
			return firstLine(got) == firstLine(want)
		}
		return false
	})
}

func randomHashCommands(rng *rand.Rand) [][]string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	key := func() string { return "key:" + strconv.Itoa(rng.IntN(5)) }
	field := func() string {
		switch rng.IntN(60) {
		case 0:
			return strings.Repeat("long", 20)
		case 1:
			return ""
		case 2:
			return strconv.Itoa(rng.IntN(700))
		}
		return "f" + strconv.Itoa(rng.IntN(12))
	}
	fields := func() (all []string) {
		for range 1 + rng.IntN(5) {
			all = append(all, field())
		}
		return all
	}
	value := func() string {
		switch rng.IntN(8) {
		case 0:
			return oddNumbers(rng)
		case 1:
			return pick("0.1", "-2.5", "3.0e3", "5.0e-5", "1e400", "-inf", "-0", "0x10", "123456789.123456789", "1e30")
		case 2:
			return strings.Repeat(pick("x", "\x00", "é", "\r\n"), rng.IntN(80))
		}
		return strconv.Itoa(rng.IntN(2000) - 1000)
	}
	pairs := func() (all []string) {
		for range 1 + rng.IntN(5) {
			all = append(all, field(), value())
		}
		if rng.IntN(300) == 0 {
			for i := range 520 {
				all = append(all, strconv.Itoa(i), "v")
			}
		}
		return all
	}
	k := key()
	one := func() []string {
		switch rng.IntN(30) {
		case 0, 1, 2, 3:
			return append([]string{pick("HSET", "hset", "HMSET"), k}, pairs()...)
		case 4:
			return append([]string{pick("HSET", "HMSET"), k, "f"}, pairs()...)
		case 5:
			return []string{"HSETNX", k, field(), value()}
		case 6, 7:
			return []string{"HGET", k, field()}
		case 8:
			return append([]string{"HMGET", k}, fields()...)
		case 9:
			return []string{"HGETALL", k}
		case 10:
			return []string{pick("HKEYS", "HVALS"), k}
		case 11:
			return []string{"HLEN", k}
		case 12:
			return []string{pick("HSTRLEN", "HEXISTS"), k, field()}
		case 13, 14:
			return append([]string{"HDEL", k}, fields()...)
		case 15, 16, 17:
			return []string{"HINCRBY", k, field(), oddNumbers(rng)}
		case 18, 19:
			return []string{"HINCRBYFLOAT", k, field(), value()}
		case 20:
			return append([]string{"HRANDFIELD", k}, [][]string{{}, {pick("0", "1", "3", "100", "-1", "-20")},
				{pick("2", "-7", "0"), "WithValues"}, {"1", "foo"}, {"1", "withvalues", "x"}, {"x"},
				{"-9223372036854775808"}, {pick("9223372036854775807", "-9223372036854775807"), "withvalues"}}[rng.IntN(
				8)]...)
		case 21, 22:
			c := []string{"HSCAN", k, pick("0", "0", "0", "0", "abc", "1x", " 1", "", "-", "18446744073709551616"),
				"COUNT", pick("1000", "1000", "1000", "0", "x", "-1")}
			if rng.IntN(2) == 0 {
				c = append(c, pick("MATCH", "match", "foo", "TYPE"), pick("*", "f*", "f1?", "[", "hash"))
			}
			if rng.IntN(10) == 0 {
				c = append(c, "COUNT")
			}
			return c
		case 23:
			return []string{pick("TYPE", "EXISTS", "GET", "STRLEN", "TTL", "INCR", "DEL", "GETDEL", "PERSIST"), k}
		case 24:
			return []string{"OBJECT", "ENCODING", k}
		case 25:
			return []string{pick("EXPIRE", "PEXPIRE"), k, pick("100000000", "-1")}
		case 26:
			return []string{pick("SET", "SETNX", "GETSET"), k, value()}
		case 27:
			return []string{pick("DEL", "UNLINK"), k}
		case 28:
			return []string{pick("HSET", "HGET", "HDEL", "HSCAN", "HRANDFIELD", "HINCRBY", "HSETNX")}
		}
		return append([]string{"HSET", k}, pairs()...)
	}
	switch rng.IntN(40) {
	case 0:
		return [][]string{{"RENAME", key(), key()}}
	case 1:
		return [][]string{{"COPY", key(), key(), "REPLACE"}}
	case 2:
		tx := [][]string{{"MULTI"}}
		for range rng.IntN(5) {
			c := one()
			for strings.HasPrefix(c[0], "HR") || c[0] == "HSCAN" || c[0] == "HGETALL" || c[0] == "HKEYS" ||
				c[0] == "HVALS" || c[0] == "TTL" {
				c = one()
			}
			tx = append(tx, c)
		}
		return append(tx, []string{"EXEC"})
	}
	c := one()
	for c[0] == "TTL" {
		c = one()
	}
	return [][]string{c}
}

// TestHashes: shapes of replies in both versions of the protocol, and errors.
func TestHashes(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	p3 := dial(t, "tcp", p.RemoteAddr().String())
	p3.do(t, "HELLO", "3")
	for _, c := range []struct{ cmd, reply, reply3 string }{
		{"HSET h a 1 b 2 a 3", ":2\r\n", ":0\r\n"},
		{"HGETALL h", "*4\r\n$1\r\na\r\n$1\r\n3\r\n$1\r\nb\r\n$1\r\n2\r\n",
			"%2\r\n$1\r\na\r\n$1\r\n3\r\n$1\r\nb\r\n$1\r\n2\r\n"},
		{"HGETALL no", "*0\r\n", "%0\r\n"},
		{"HGET h c", "$-1\r\n", "_\r\n"},
		{"HMGET h b c", "*2\r\n$1\r\n2\r\n$-1\r\n", "*2\r\n$1\r\n2\r\n_\r\n"},
		{"HKEYS h", "*2\r\n$1\r\na\r\n$1\r\nb\r\n", "*2\r\n$1\r\na\r\n$1\r\nb\r\n"},
		{"HRANDFIELD h 5 WITHVALUES", "*4\r\n$1\r\na\r\n$1\r\n3\r\n$1\r\nb\r\n$1\r\n2\r\n",
			"*2\r\n*2\r\n$1\r\na\r\n$1\r\n3\r\n*2\r\n$1\r\nb\r\n$1\r\n2\r\n"},
		{"HRANDFIELD h -9000000000", "-ERR kvd: the reply to that count would be longer than 4 MiB\r\n", ""},
		{"HSCAN h 0", "*2\r\n$1\r\n0\r\n*4\r\n$1\r\na\r\n$1\r\n3\r\n$1\r\nb\r\n$1\r\n2\r\n", ""},
		{"HINCRBY h a 4", ":7\r\n", ":11\r\n"},
		{"HINCRBYFLOAT h f 0.1", bulk("0.1"), bulk("0.2")},
		{"OBJECT ENCODING h", bulk("listpack"), ""},
		{"MEMORY USAGE h", ":128\r\n", ""},
		{"GET h", wrongType, ""},
		{"COMMAND INFO hget", "*1\r\n*10\r\n" + bulk("hget") +
			":3\r\n*2\r\n+readonly\r\n+fast\r\n:1\r\n:1\r\n:1\r\n*3\r\n+@read\r\n+@hash\r\n+@fast\r\n*0\r\n" +
			oneSpec("RO", "access", 0, 1) + "*0\r\n", ""},
		{"EXPIRE h 1000", ":1\r\n", ":1\r\n"},
		{"HSET h g 1", ":1\r\n", ":0\r\n"},
		{"PERSIST h", ":1\r\n", ":0\r\n"},
		{"HDEL h a b f g", ":4\r\n", ":0\r\n"},
		{"EXISTS h", ":0\r\n", ":0\r\n"},
	} {
		p.want(t, c.reply, strings.Fields(c.cmd)...)
		if c.reply3 != "" {
			p3.want(t, c.reply3, strings.Fields(c.cmd)...)
		}
	}
}

// TestCorruptCollections: bytes that are no collection are an error that names the key, and stay what they are.
func TestCorruptCollections(t *testing.T) {
	db := fake()
	p := dial(t, "tcp", serve(t, Options{Databases: db}))
	for _, c := range []struct {
		typ      client.Type
		value    string
		commands []string
	}{
		{client.Hash, "\x01\x02\x01a\x01b\x01", []string{"HGET k a", "HGETALL k", "HSET k a 1", "HSETNX k b 1",
			"HDEL k a", "HLEN k", "HINCRBY k n 1",
			"HINCRBYFLOAT k n 1", "HMGET k a b", "HKEYS k", "HVALS k", "HRANDFIELD k", "HSCAN k 0", "HSTRLEN k a",
			"HEXISTS k a", "HMSET k a 1"}},
		{client.Set, "\x01\x02\x00\x01\x00", []string{"SADD k a", "SREM k a", "SISMEMBER k a", "SMISMEMBER k a",
			"SCARD k", "SMEMBERS k", "SPOP k",
			"SRANDMEMBER k", "SSCAN k 0", "SINTER k", "SUNION k", "SDIFF k", "SINTERCARD 1 k", "SINTERSTORE k k",
			"SMOVE k k a"}},
	} {
		for _, cmd := range c.commands {
			ops := []client.Op{{Kind: client.OpPut, Key: []byte("k"), Value: []byte(c.value), Type: c.typ}}
			db[0].Client.Do(t.Context(), ops)
			if ops[0].Err != nil {
				t.Fatal(ops[0].Err)
			}
			p.want(t, "-ERR kvd: corrupt "+c.typ.String()+" at key \"k\": nothing was done\r\n", strings.Fields(cmd)...)
			get := []client.Op{{Kind: client.OpGet, Key: []byte("k"), Typed: true}}
			if db[0].Client.Do(t.Context(), get); get[0].Err != nil || string(get[0].Item.Value) != c.value {
				t.Errorf("%s: %q, %v", cmd, get[0].Item.Value, get[0].Err)
			}
		}
	}
	p.want(t, ":1\r\n", "DEL", "k")
}

// TestLongCollections: collections grow to 4 MiB, and no longer; what is refused has not happened, even behind
// commands of the same pipeline that have.
func TestLongCollections(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", newStore(t)}}}))
	half := strings.Repeat("x", 2<<20)
	p.want(t, ":1\r\n", "HSET", "h", "a", half)
	p.want(t, ":1\r\n", "SADD", "s", half)
	tooLong := func(typ string) string {
		return "-ERR kvd: " + typ + " longer than 4 MiB, or than values may be: nothing was done\r\n"
	}
	p.send(t, []string{"HSET", "h", "b", "1"}, []string{"HSET", "h", "c", half},
		[]string{"HSET", "h", "d", "2", "a", "1", "e", half}, []string{"HLEN", "h"},
		[]string{"SADD", "s", "1"}, []string{"SADD", "s", half[1:] + "y", "2"}, []string{"SMEMBERS", "s"})
	for i, want := range []string{":1\r\n", tooLong("hash"), ":2\r\n", ":4\r\n", ":1\r\n", tooLong("set"),
		"*2\r\n" + bulk(half) + bulk("1")} {
		if got := string(p.reply(t)); got != want {
			t.Errorf("reply %d: %.100q, want %.100q", i, got, want)
		}
	}
	p.want(t, bulk("1"), "HGET", "h", "a")
	args := []string{"HSET", "many"}
	for i := range 60_000 {
		args = append(args, "field"+strconv.Itoa(i), "value")
	}
	p.want(t, ":60000\r\n", args...)
	p.want(t, ":0\r\n", args...)
	args[0] = "HDEL"
	p.want(t, ":60000\r\n", args...)
	args[0] = "SADD"
	p.want(t, ":60001\r\n", args...)
	p.want(t, ":60001\r\n", "SINTERCARD", "2", "many", "many")
	args[0] = "SREM"
	p.want(t, ":60001\r\n", args...)
	p.want(t, ":0\r\n", "EXISTS", "many")
}

// TestHIncrFromMany: no increment of a field is lost, nor a member that others add.
func TestHIncrFromMany(t *testing.T) {
	addr := serve(t, Options{Databases: []Database{{"default", newStore(t)}}})
	const conns, times = 6, 60
	done := make(chan bool)
	for i := range conns {
		p := dial(t, "tcp", addr)
		go func() {
			defer func() { done <- true }()
			for j := range times {
				for _, c := range [][]string{{"HINCRBY", "h", "n", "1"}, {"SADD", "s", fmt.Sprint(i*times + j)}} {
					if reply := p.do(t, c...); reply[0] != ':' {
						t.Errorf("%q: %q", c, reply)
					}
				}
			}
		}()
	}
	for range conns {
		<-done
	}
	p := dial(t, "tcp", addr)
	p.want(t, bulk(fmt.Sprint(conns*times)), "HGET", "h", "n")
	p.want(t, fmt.Sprintf(":%d\r\n", conns*times), "SCARD", "s")
}
