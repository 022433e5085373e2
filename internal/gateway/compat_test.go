package gateway

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestLikeRedis sends seeded commands to a redis-server and to a gateway, and
// compares the replies byte for byte.
func TestLikeRedis(t *testing.T) {
	for name, api := range map[string]func(t *testing.T) client.API{
		"fake":  func(*testing.T) client.API { return clienttest.New(clienttest.Options{}) },
		"store": func(t *testing.T) client.API { return newStore(t) },
	} {
		t.Run(name, func(t *testing.T) { likeRedis(t, randomCommands, 12, api(t)) })
		t.Run(name+" shared", func(t *testing.T) { likeRedis(t, randomInDatabases, 12, api(t), 3) })
	}
}

// likeRedis sends commands of so many seeds to a redis-server and to a gateway over api, in both protocols, and
// compares the replies. The gateway has one database, or several that share the namespace.
func likeRedis(t *testing.T, commands func(*rand.Rand) [][]string, seeds uint64, api client.API, databases ...int) {
	t.Helper()
	redis := startRedis(t)
	dbs := []Database{{"default", api}}
	for _, n := range databases {
		dbs = slices.Repeat(dbs, n)
	}
	addr := serve(t, Options{Databases: dbs})
	for seed := range seeds {
		for _, proto := range []string{"2", "3"} {
			compareWith(t, commands, seed, proto, dial(t, "tcp", addr), dial(t, "unix", redis))
		}
	}
}

// startRedis starts a redis-server with further arguments. Tests that need one are run by make test-compat.
func startRedis(t *testing.T, more ...string) (sock string) {
	t.Helper()
	if os.Getenv("KVD_COMPAT") != "1" {
		t.Skip("it needs redis-server: run make test-compat, or set KVD_COMPAT=1")
	}
	dir, err := os.MkdirTemp("", "kvd") // short enough for a socket in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	sock = filepath.Join(dir, "redis")
	args := append([]string{"--port", "0", "--unixsocket", sock, "--save", "", "--dir", dir, "--proto-max-bulk-len",
		strconv.Itoa(client.DefaultMaxValueLen)}, more...)
	cmd := exec.Command("redis-server", args...)
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	testutil.UntilNone(t, "redis-server listens", func() string {
		c, err := net.Dial("unix", sock)
		if err == nil {
			c.Close()
			return ""
		}
		return fmt.Sprintf("%v\n%s", err, out.String())
	})
	return sock
}

// compareWith sends the commands of a seed to both, and compares the replies.
func compareWith(t *testing.T, commands func(*rand.Rand) [][]string, seed uint64, proto string, ours, theirs *peer) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 7))
	for _, p := range []*peer{ours, theirs} {
		p.do(t, "HELLO", proto)
		p.do(t, "FLUSHALL")
	}
	var script []string
	bad := 0
	for range 150 {
		n := 1
		if rng.IntN(3) == 0 {
			n += rng.IntN(60)
		}
		var cmds [][]string
		for len(cmds) < n {
			cmds = append(cmds, commands(rng)...)
		}
		for _, p := range []*peer{ours, theirs} {
			p.send(t, cmds...)
		}
		for _, c := range cmds {
			script = append(script, fmt.Sprintf("%.200q", c))
			got, want := ours.reply(t), theirs.reply(t)
			if !alike(c, got, want) {
				if bad++; bad > 8 {
					t.FailNow()
				}
				t.Errorf("seed %d, RESP%s: %.200q\n got %.400q\nwant %.400q\nafter\n%s", seed, proto, c, got, want,
					strings.Join(script[max(0, len(script)-12):], "\n"))
			}
		}
	}
}

// alike allows for clocks that were read at different times, and for sets without
// order.
func alike(cmd []string, got, want []byte) bool {
	if bytes.Equal(got, want) {
		return true
	}
	tolerance := 0
	switch strings.ToLower(cmd[0]) {
	case "ttl", "expiretime":
		tolerance = 1
	case "pttl", "pexpiretime":
		tolerance = 2000
	case "keys":
		a, b := strings.Split(string(got), "\r\n"), strings.Split(string(want), "\r\n")
		slices.Sort(a)
		slices.Sort(b)
		return slices.Equal(a, b)
	case "xpending", "xinfo":
		return sameButTimes(cmd, got, want)
	case "exec":
		return false
	}
	if tolerance == 0 || got[0] != ':' || want[0] != ':' {
		return false
	}
	a, err1 := strconv.Atoi(strings.TrimSpace(string(got[1:])))
	b, err2 := strconv.Atoi(strings.TrimSpace(string(want[1:])))
	return err1 == nil && err2 == nil && a > 0 && b > 0 && a-b <= tolerance && b-a <= tolerance
}

// randomCommands are one command, or a transaction.
func randomCommands(rng *rand.Rand) [][]string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	key := func() string { return pick("key:0", "key:1", "key:2", "key:3", "key:4", "key:5", "") }
	num := func() string {
		return pick("0", "1", "-1", "5", "-7", "100", "9223372036854775807", "-9223372036854775808",
			"9223372036854775808", "007", "+3", "", "abc", "1.5", " 1", "2147483648")
	}
	float := func() string {
		return pick("0", "1", "0.1", "-2.5", "3.0e3", "5.0e-5", "1e400", "inf", "-inf", "nan", "abc", "", " 1", "10.5",
			"0x10", "1e5", "-0", "123456789.123456789", "1e30")
	}
	value := func() string {
		switch rng.IntN(5) {
		case 0:
			return num()
		case 1:
			return float()
		case 2:
			return strings.Repeat(pick("x", "\x00", "é", "\r\n"), rng.IntN(100))
		case 3:
			return strings.Repeat("v", rng.IntN(5000))
		}
		return pick("", "a", "hello", "Hello World", "$-1\r\n")
	}
	// Far enough away, or long ago.
	secs := func() string {
		return pick("100", "1000", "1", "0", "-1", "-100", "9223372036854775807", "9223372036854775", "abc", "50000",
			"x y")
	}
	if s := secs; true {
		secs = func() string {
			for {
				if v := s(); v != "1" { // would expire on one side first
					return v
				}
			}
		}
	}
	at := func() string {
		return pick("4000000000", "1", "100", "0", "-5", "2500000000", "9223372036854775807", "q")
	}
	atMS := func() string {
		return pick("4000000000000", "1", "0", "-1", "2500000000123", "9223372036854775807", "")
	}
	setOpts := func() (o []string) {
		for range rng.IntN(4) {
			switch rng.IntN(9) {
			case 0:
				o = append(o, pick("EX", "ex", "Ex"), secs())
			case 1:
				o = append(o, "PX", pick("100000", "0", "-1", "9223372036854775807", "1x"))
			case 2:
				o = append(o, "EXAT", at())
			case 3:
				o = append(o, "pxat", atMS())
			case 4:
				o = append(o, pick("NX", "nx"))
			case 5:
				o = append(o, pick("XX", "xX"))
			case 6:
				o = append(o, pick("GET", "get"))
			case 7:
				o = append(o, "KEEPTTL")
			case 8:
				o = append(o, pick("PERSIST", "foo", "EX"))
			}
		}
		return o
	}
	keys := func() (k []string) {
		for range 1 + rng.IntN(4) {
			k = append(k, key())
		}
		return k
	}
	one := func(k string) []string {
		switch rng.IntN(38) {
		case 0, 1, 2:
			return []string{pick("GET", "get", "gEt"), k}
		case 3, 4, 5:
			return []string{"SET", k, value()}
		case 6, 7:
			return append([]string{"SET", k, value()}, setOpts()...)
		case 8:
			return append([]string{"GETEX", k}, setOpts()...)
		case 9:
			return []string{"SETNX", k, value()}
		case 10:
			return []string{"SETEX", k, secs(), value()}
		case 11:
			return []string{"PSETEX", k, pick("100000", "0", "-1", "z"), value()}
		case 12:
			return []string{"GETSET", k, value()}
		case 13:
			return []string{"GETDEL", k}
		case 14, 15:
			return []string{"APPEND", k, value()}
		case 16:
			return []string{"STRLEN", k}
		case 17, 18:
			return []string{pick("GETRANGE", "SUBSTR"), k, num(), num()}
		case 19, 20:
			return []string{"SETRANGE", k, pick("0", "1", "5", "100", "-1", "99999999999", "67108864", "abc"), value()}
		case 21:
			return []string{pick("INCR", "DECR"), k}
		case 22, 23:
			return []string{pick("INCRBY", "DECRBY"), k, num()}
		case 24, 25:
			return []string{"INCRBYFLOAT", k, float()}
		case 26:
			return []string{pick("DEL", "UNLINK"), k}
		case 27:
			return []string{"TYPE", k}
		case 28:
			return []string{pick("TTL", "PTTL"), k}
		case 29:
			return []string{pick("EXPIRETIME", "PEXPIRETIME"), k}
		case 30:
			return []string{"PERSIST", k}
		case 31:
			return append([]string{"EXPIRE", k, secs()}, pick2(rng, "NX", "xx", "GT", "lt", "zz")...)
		case 32:
			return append([]string{
				"PEXPIRE", k, pick("100000", "-1", "0", "9223372036854775807", "-9223372036854775808")},
				pick2(rng, "NX", "XX", "gt", "LT")...)
		case 33:
			return append([]string{"EXPIREAT", k, at()}, pick2(rng, "NX", "XX", "GT", "LT")...)
		case 34:
			return append([]string{"PEXPIREAT", k, atMS()}, pick2(rng, "NX", "XX", "GT", "LT")...)
		case 35:
			return []string{pick("EXISTS", "TOUCH"), k}
		case 36:
			return []string{"OBJECT", pick("FREQ", "freq"), k}
		default:
			return []string{"GET", k}
		}
	}
	switch rng.IntN(30) {
	case 0:
		return [][]string{append([]string{"MGET"}, keys()...)}
	case 1:
		m := []string{"MSET"}
		for _, k := range keys() {
			m = append(m, k, value())
		}
		if rng.IntN(5) == 0 {
			m = m[:len(m)-1]
		}
		return [][]string{m}
	case 2:
		return [][]string{append([]string{pick("DEL", "UNLINK", "EXISTS", "TOUCH")}, keys()...)}
	case 3:
		return [][]string{{pick("RENAME", "RENAMENX"), key(), key()}}
	case 4:
		return [][]string{append([]string{"COPY", key(), key()}, pick2(rng, "REPLACE", "replace", "DB", "foo")...)}
	case 5:
		return [][]string{
			{"KEYS", pick("*", "key:*", "key:[0-3]", "key:[^1]", "k?y:5", "nothing", "*:*", "[a-", "key:\\4", "**5")}}
	case 6:
		return [][]string{append([]string{"MSETNX", key(), value()}, [][]string{nil, {key(), value()}}[rng.IntN(2)]...)}
	case 7:
		return [][]string{{pick("PING", "ECHO", "FOO", "GET", "SET", "config", "object", "client"), "x" + value()}}
	case 8:
		return [][]string{
			{pick("PING", "DBSIZE", "EXEC", "DISCARD", "UNWATCH", "GET", "nosuchcommand", "MGET", "SELECT", "SCAN")}}
	case 9:
		return [][]string{{"SELECT", pick("0", "abc", "-1", "99", "")}}
	case 10:
		return [][]string{{"SCAN", pick("abc", "1x", "0"), pick("COUNT", "MATCH", "foo"), pick("0", "x", "-1"),
			"match"}}
	case 11:
		return [][]string{{"nosuchcommand", value(), value(), value()}}
	case 12, 13:
		k := key()
		several := rng.IntN(2) == 0
		tx := [][]string{{"WATCH", k}, {"MULTI"}}
		if rng.IntN(3) > 0 {
			tx = tx[1:]
		}
		for range rng.IntN(6) {
			if several {
				k = key()
			}
			c := one(k)
			if several && rng.IntN(4) == 0 {
				c = []string{pick("RENAME", "RENAMENX", "COPY"), k, key()}
			}
			for strings.Contains(strings.ToLower(c[0]), "ttl") ||
				strings.Contains(strings.ToLower(c[0]), "expiretime") {
				c = one(k)
			}
			tx = append(tx, c)
		}
		switch rng.IntN(8) {
		case 0:
			tx = append(tx, []string{"nosuchcommand"})
		case 1:
			tx = append(tx, []string{"MULTI"}, []string{"WATCH", k})
		case 2:
			tx = append(tx, []string{"GET"})
		case 3:
			return append(tx, []string{"DISCARD"})
		}
		return append(tx, []string{"EXEC"})
	}
	return [][]string{one(key())}
}

// randomInDatabases are such commands, which change the database now and then, and use keys of others.
func randomInDatabases(rng *rand.Rand) [][]string {
	key := func() string { return []string{"key:0", "key:1", "key:2", "key:3", ""}[rng.IntN(5)] }
	db := func() string { return strconv.Itoa(rng.IntN(3)) }
	one := func() []string {
		switch rng.IntN(8) {
		case 0, 1:
			return []string{"SELECT", db()}
		case 2, 3:
			return []string{"MOVE", key(), db()}
		case 4, 5:
			return append([]string{"COPY", key(), key(), "DB", db()}, pick2(rng, "REPLACE")...)
		case 6:
			return []string{"EVAL", "local a=redis.call('get',KEYS[1]) redis.call('select',ARGV[1]) if a then " +
				"redis.call('set',KEYS[1],a..'+') end return{a,redis.call('exists',KEYS[1])}", "1", key(), db()}
		}
		return []string{"SET", key(), db()}
	}
	switch n := rng.IntN(48); {
	case n < 16:
		return [][]string{one()}
	case n < 24:
		tx := [][]string{{"WATCH", key()}, {"SELECT", db()}, {"WATCH", key()}, {"MULTI"}}
		if rng.IntN(3) > 0 {
			tx = tx[3:]
		}
		for range 1 + rng.IntN(6) {
			tx = append(tx, one())
		}
		return append(tx, []string{"EXEC"})
	case n < 25:
		return [][]string{{[]string{"FLUSHDB", "PING"}[rng.IntN(2)]}, {"KEYS", "*"}}
	}
	return randomCommands(rng)
}

// pick2 is none, one or two of s.
func pick2(rng *rand.Rand, s ...string) (out []string) {
	for range max(0, rng.IntN(5)-2) {
		out = append(out, s[rng.IntN(len(s))])
	}
	return out
}
