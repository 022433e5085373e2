package gateway

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/testutil"
)

// lineTime and lineFrom are what lines of MONITOR need not have alike.
var lineTime, lineFrom = regexp.MustCompile(`^\+\d+\.\d{6} `),
	regexp.MustCompile(`^\[(\d+) (unix:/|127\.0\.0\.1:)[^\]]*\]`)

// manyKeys are commands on any number of keys, each of which is performed by itself.
var manyKeys = regexp.MustCompile(`"(MSET|MGET|DEL|EXISTS)"`)

// shownUntil are the lines of a MONITOR up to that of ECHO end.
func shownUntil(t *testing.T, p *peer, end string) (lines []string) {
	t.Helper()
	for {
		l := string(p.reply(t))
		if !lineTime.MatchString(l) {
			t.Fatalf("%q is no line of MONITOR", l)
		}
		l = lineFrom.ReplaceAllString(lineTime.ReplaceAllString(l, ""), "[$1 ADDR]")
		if strings.HasSuffix(l, `"ECHO" "`+end+`"`+"\r\n") {
			return lines
		}
		lines = append(lines, l)
	}
}

// monitored is commands for TestMonitorLikeRedis: alone, refused, in transactions and scripts, with what is secret.
func monitored() (script [][]string) {
	add := func(args ...string) { script = append(script, args) }
	for _, line := range strings.Split(strings.TrimSpace(`
SELECT 1
SET a b
set a b BADOPT
get
nosuch x
INCR a
MSET a 1 b 2 c 3
MGET a b c
MSET a 1 b
DEL a b c
exists a a
CONFIG GET save
CLIENT SETNAME me
CLIENT LIST
CLIENT ID
ACL WHOAMI
ACL LIST
ACL SETUSER anna on >secret
ACL DELUSER anna
AUTH wrong
AUTH nobody wrong
HELLO 2 AUTH nobody wrong
HELLO 2 AUTH nobody wrong SETNAME x
SLOWLOG LEN
LATENCY LATEST
LPUSH l 1 2 3
BLPOP l 1
blpop l l notatimeout
BLPOP nothing 0.01
RENAME l m
SUNIONSTORE s t u
MULTI
SET x 1
SET x 2
GET x
EXEC
MULTI
SET x 1
LPUSH x 1
ECHO between
RENAME m n
EXEC
EXEC
MULTI
GET x
SELECT 2
GET y
EXEC
DISCARD
MULTI
nosuch
EXEC
MULTI
SET x 1
DISCARD
MULTI
MONITOR
EXEC
WATCH x
SET x 3
MULTI
SET x 4
EXEC
UNWATCH
PUBLISH c m
SCRIPT LOAD x
EVALSHA aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0
EVAL x 0
EVAL x y
FCALL nosuch 0
OBJECT ENCODING x
OBJECT nosuch x
FLUSHDB
RESET
SET after 1
PING`), "\n") {
		add(strings.Fields(line)...)
	}
	add("SET", "k\"\\\n\r\t\a\b", "\x00\x1f é\xff'")
	add("SET", "", "")
	add("MGET", "k", "k", "j")
	call := "redis.call('set',KEYS[1],ARGV[1]); redis.call('select',1); redis.pcall('incr',KEYS[1]); return " +
		"redis.call('mget','x','y')"
	add("EVAL", call, "1", "k", "v\n\xff")
	add("EVAL", "redis.call('set','a','1'); return redis.call('nosuch')", "0")
	add("EVAL", "redis.call('set','a','1'); error('x')", "0")
	add("MULTI")
	add("EVAL", call, "1", "k", "v")
	add("GET", "k")
	add("EXEC")
	add("SCRIPT", "LOAD", "return redis.call('get',KEYS[1])")
	add("EVALSHA", "4ca238f611c9d0ae4e9a75a5dbac22aedc1e44fe", "1", "k")
	add("EVALSHA", "4ca238f611c9d0ae4e9a75a5dbac22aedc1e44fe", "1", "j")
	return script
}

// TestMonitorLikeRedis compares what MONITOR shows with a redis-server's, of commands one by one and of all in one
// pipeline.
func TestMonitorLikeRedis(t *testing.T) {
	sock := startRedis(t)
	twoProcessors(t)
	addr, _ := start(t, Options{Databases: fakes(3)})
	for _, pipelined := range []bool{false, true} {
		var got [2][]string
		for i, side := range [][2]string{{"tcp", addr}, {"unix", sock}} {
			m, p := dial(t, side[0], side[1]), dial(t, side[0], side[1])
			p.do(t, "FLUSHALL")
			m.want(t, "+OK\r\n", "MONITOR")
			m.send(t, []string{"MONITOR"}) // no reply
			all := append(monitored(), []string{"ECHO", "end"})
			if pipelined {
				p.send(t, all...)
				for range all {
					p.reply(t)
				}
			} else {
				for _, cmd := range all {
					p.do(t, cmd...)
				}
			}
			for _, l := range shownUntil(t, m, "end") {
				// The gateway does not keep how the client wrote the names of these.
				got[i] = append(got[i], manyKeys.ReplaceAllStringFunc(l, strings.ToLower))
			}
			if list := p.do(t, "CLIENT", "LIST"); strings.Count(list, "flags=O") != 1 {
				t.Errorf("CLIENT LIST: %q", list)
			}
			m.want(t, "+RESET\r\n", "RESET")
			m.want(t, "+PONG\r\n", "PING") // which is not shown
			m.Close()
		}
		for i := range max(len(got[0]), len(got[1])) {
			if i >= len(got[0]) || i >= len(got[1]) || got[0][i] != got[1][i] {
				t.Fatalf("pipelined %v: line %d of %d and %d:\n got %q\nwant %q", pipelined, i, len(got[0]),
					len(got[1]), got[0][min(i, len(got[0])):][:1], got[1][min(i, len(got[1])):][:1])
			}
		}
	}
}

// fakes are so many databases.
func fakes(n int) (dbs []Database) {
	for i := range n {
		dbs = append(dbs, Database{fmt.Sprint("db", i), clienttest.New(clienttest.Options{})})
	}
	return dbs
}

// TestMonitorHidesSecrets: no form of a password is shown, whoever gives it, and wherever.
func TestMonitorHidesSecrets(t *testing.T) {
	onBothWays(t, func(t *testing.T, p *peer, g *Gateway) {
		m := dial(t, "tcp", p.RemoteAddr().String())
		m.want(t, "+OK\r\n", "MONITOR")
		for _, cmd := range []string{"AUTH sesame", "AUTH default sesame", "auth a b c sesame",
			"HELLO 3 AUTH default sesame", "HELLO 2 SETNAME x AUTH default sesame",
			"ACL SETUSER anna on >sesame", "acl setuser anna #sesame", "CONFIG SET requirepass sesame", "HELLO 2"} {
			p.do(t, strings.Fields(cmd)...)
		}
		p.do(t, "MULTI")
		p.do(t, "AUTH", "default", "sesame")
		p.do(t, "EXEC")
		p.do(t, "ECHO", "end")
		lines := shownUntil(t, m, "end")
		if len(lines) != 9 {
			t.Errorf("%d lines: %q", len(lines), lines)
		}
		for _, l := range lines {
			if strings.Contains(l, "sesame") {
				t.Errorf("it shows %q", l)
			}
		}
	})
}

// TestMonitorCuts: a line is bounded, and what a script does is shown once, however often it runs.
func TestMonitorCuts(t *testing.T) {
	long := strings.Repeat("x", live.MaxShown+10)
	budget := netsrv.NewBudget(256 << 20)
	addr, _ := start(t, Options{Databases: fakes(1), Budget: budget})
	m, p := dial(t, "tcp", addr), dial(t, "tcp", addr)
	m.want(t, "+OK\r\n", "MONITOR")
	p.want(t, "+OK\r\n", "MSET", "a", long, "b", long)
	p.want(t, ":8\r\n", "EVAL", "for i=1,8 do redis.call('set','a',ARGV[1]) end return 8", "0", long)
	p.do(t, "ECHO", "end")
	lines := shownUntil(t, m, "end")
	if n := len(lines); n < 4 || n > 6 {
		t.Errorf("%d lines", n)
	}
	for i, l := range lines {
		if len(l) > live.MaxShown+200 {
			t.Errorf("line %d has %d bytes", i, len(l))
		}
	}
	m.Close()
	p.Close()
	testutil.Until(t, "the memory of the lines comes back", func() bool { return budget.Used() == 0 })
}

// TestMonitorWithoutReading: a client that does not read what it MONITORs is disconnected, others are not held up, and
// nothing is held for it afterwards.
func TestMonitorWithoutReading(t *testing.T) {
	budget := netsrv.NewBudget(256 << 20)
	addr, g := start(t, Options{Databases: fakes(1), Budget: budget})
	m, p := dial(t, "tcp", addr), dial(t, "tcp", addr)
	m.want(t, "+OK\r\n", "MONITOR")
	value := strings.Repeat("v", 512<<10)
	for n := 0; g.monitors.Count() > 0; n++ {
		p.want(t, "+OK\r\n", "SET", "a", value)
		if n > 10*hardPushes/len(value) {
			t.Fatalf("%d bytes later it is still there", n*len(value))
		}
	}
	if g.heed.Load() != 0 {
		t.Error("it goes on showing commands")
	}
	if n := g.m.flooded.Load(); n != 1 {
		t.Errorf("%d connections were flooded", n)
	}
	p.Close()
	testutil.Until(t, "nothing is held or queued", func() bool { return budget.Used() == 0 && g.m.queued.Load() == 0 })
}

// TestMonitorWhileBlocked: a client that MONITORs hears of others while it waits for a key.
func TestMonitorWhileBlocked(t *testing.T) {
	addr, _ := start(t, Options{Databases: fakes(1)})
	m, p := dial(t, "tcp", addr), dial(t, "tcp", addr)
	m.want(t, "+OK\r\n", "MONITOR")
	m.send(t, []string{"BLPOP", "l", "0"})
	p.waits(t, 1)
	p.do(t, "ECHO", "end")
	if lines := shownUntil(t, m, "end"); !slices.Contains(lines, "[0 ADDR] \"BLPOP\" \"l\" \"0\"\r\n") {
		t.Errorf("%q", lines)
	}
	p.want(t, ":1\r\n", "RPUSH", "l", "1")
}

// TestMonitorNeedsTheRight: without it there is no MONITOR, and who loses it is disconnected.
func TestMonitorNeedsTheRight(t *testing.T) {
	addr, g := start(t, Options{Databases: fakes(1)})
	p, m, own := dial(t, "tcp", addr), dial(t, "tcp", addr), dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "ACL", "SETUSER", "anna", "on", ">pw", "~*", "+@all")
	m.want(t, "+OK\r\n", "AUTH", "anna", "pw")
	m.want(t, "+OK\r\n", "MONITOR")
	own.want(t, "+OK\r\n", "MONITOR")
	p.want(t, "+OK\r\n", "ACL", "SETUSER", "anna", "-monitor")
	m.closed(t)
	testutil.Until(t, "one monitor", func() bool { return g.monitors.Count() == 1 })
	again := dial(t, "tcp", addr)
	again.want(t, "+OK\r\n", "AUTH", "anna", "pw")
	again.want(t, "-NOPERM this user has no permissions to run the 'monitor' command\r\n", "MONITOR")
}
