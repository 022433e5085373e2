package gateway

import (
	"fmt"
	"math"
	"regexp"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client/clienttest"
)

// slowTimes are what two servers need not have alike: an entry's times, and the address.
var slowTimes = regexp.MustCompile(`(\*6\r\n:\d+\r\n):\d+\r\n:\d+\r\n`)

// shown is a reply to SLOWLOG GET without times, and with the address ADDR.
func shown(reply, addr string) string {
	return strings.ReplaceAll(slowTimes.ReplaceAllString(reply, "$1"), bulk(addr), "ADDR;")
}

// slowArgsOf is an entry as shown has it.
func slowArgsOf(id int, name string, args ...string) string {
	s := fmt.Sprintf("*6\r\n:%d\r\n*%d\r\n", id, len(args))
	for _, a := range args {
		s += bulk(a)
	}
	return s + "ADDR;" + bulk(name)
}

// onBothWays runs a test with connections that are in loops, and with such as have goroutines of their own.
func onBothWays(t *testing.T, f func(t *testing.T, p *peer, g *Gateway)) {
	onBothWaysWith(t, func() Options {
		return Options{SlowLogTime: -1, Databases: []Database{{"default", clienttest.New(clienttest.Options{})}}}
	}, f)
}

func onBothWaysWith(t *testing.T, options func() Options, f func(t *testing.T, p *peer, g *Gateway)) {
	twoProcessors(t)
	for name, calm := range map[string]int{"loop": 1, "goroutine": math.MaxInt} {
		t.Run(name, func(t *testing.T) {
			was := testCalm
			testCalm = calm
			t.Cleanup(func() { testCalm = was })
			addr, g := start(t, options())
			if calm == 1 {
				f(t, looped(t, g, "tcp", addr, 2)[0], g)
			} else {
				f(t, dial(t, "tcp", addr), g)
			}
		})
	}
}

// TestSlowLogShowsCommands: commands alone, pipelined, in transactions and refused.
func TestSlowLogShowsCommands(t *testing.T) {
	onBothWays(t, func(t *testing.T, p *peer, g *Gateway) {
		p.want(t, "+OK\r\n", "SET", "before", "1")
		p.want(t, ":0\r\n", "SLOWLOG", "LEN")
		p.want(t, "+OK\r\n", "CLIENT", "SETNAME", "me")
		p.want(t, "+OK\r\n", "CONFIG", "SET", "slowlog-log-slower-than", "0")
		p.want(t, bulk("1"), "GET", "before")
		p.send(t, []string{"SET", "a", "1"}, []string{"mget", "a", "b"}, []string{"Set", "a", "b", "c"},
			[]string{"nosuch"}, []string{"GET"},
			[]string{"MULTI"}, []string{"SET", "x", "1"}, []string{"SET", "y", "2"}, []string{"ECHO", "z"},
			[]string{"EXEC"},
			[]string{"MULTI"}, []string{"INCR", "x"}, []string{"EXEC"})
		for range 13 {
			p.reply(t)
		}
		args := [][]string{{"CONFIG", "SET", "slowlog-log-slower-than", "0"}, {"GET", "before"}, {"SET", "a", "1"},
			{"mget", "a", "b"},
			{"MULTI"}, {"SET", "x", "1"}, {"SET", "y", "2"}, {"ECHO", "z"}, {"MULTI"}, {"INCR", "x"}}
		want := fmt.Sprintf("*%d\r\n", len(args))
		for i := len(args) - 1; i >= 0; i-- {
			want += slowArgsOf(i, "me", args[i]...)
		}
		if got := shown(p.do(t, "SLOWLOG", "GET", "-1"), p.LocalAddr().String()); got != want {
			t.Errorf("got %q\nwant %q", got, want)
		}
		p.want(t, fmt.Sprintf(":%d\r\n", len(args)+1), "SLOWLOG", "LEN")
		p.want(t, "+OK\r\n", "SLOWLOG", "RESET")
		if got, want := shown(p.do(t, "SLOWLOG", "GET"), p.LocalAddr().String()),
			"*1\r\n"+slowArgsOf(len(args)+2, "me", "SLOWLOG", "RESET"); got != want {
			t.Errorf("got %q\nwant %q", got, want)
		}
		p.want(t, "+OK\r\n", "CONFIG", "SET", "slowlog-log-slower-than", "3600000000")
		p.want(t, "+OK\r\n", "SLOWLOG", "RESET")
		p.want(t, bulk("1"), "GET", "before")
		p.want(t, "*0\r\n", "SLOWLOG", "GET")
	})
}

// slowScript is commands whose entries Redis cuts, redacts or leaves out, and SLOWLOG with wrong arguments.
func slowScript() (script [][]string) {
	add := func(args ...string) { script = append(script, args) }
	many := []string{"SADD", "set"}
	for i := range 40 {
		many = append(many, fmt.Sprint("k", i))
	}
	add("CONFIG", "SET", "slowlog-max-len", "100")
	add("CONFIG", "GET", "slowlog*")
	add("CONFIG", "SET", "slowlog-log-slower-than", "0")
	add("SET", "long", strings.Repeat("v", 200))
	add("SET", "just", strings.Repeat("v", 128))
	add(many...)
	add(append([]string{"del"}, many[2:]...)...) // as Redis would write it
	add(append([]string{"mset"}, many[2:]...)...)
	add(append([]string{"mget"}, many[2:33]...)...)
	add("ECHO", "\x00\xff")
	add("AUTH", "wrong")
	add("AUTH", "nobody", "wrong")
	add("HELLO", "3", "AUTH", "nobody", "wrong")
	add("ACL", "SETUSER", "anna", "on", ">secret")
	add("MULTI")
	add("SET", "a", "1")
	add("GET", "a")
	add("EXEC")
	add("EVAL", "return KEYS[1]", "1", "a")
	add("SLOWLOG", "GET", "-1")
	add("SLOWLOG", "GET", "3")
	add("SLOWLOG", "GET", "0")
	add("SLOWLOG", "GET")
	add("SLOWLOG", "LEN")
	for _, bad := range []string{"-2", "x", "9223372036854775808"} {
		add("SLOWLOG", "GET", bad)
	}
	add("SLOWLOG", "GET", "1", "2")
	add("SLOWLOG", "RESET")
	add("SLOWLOG", "LEN")
	add("CONFIG", "SET", "slowlog-log-slower-than", "-1")
	add("SLOWLOG", "HELP")
	add("SLOWLOG", "LEN")
	add("SLOWLOG", "RESET")
	add("SLOWLOG", "GET")
	return script
}

// TestSlowLogLikeRedis compares entries with those of a redis-server.
func TestSlowLogLikeRedis(t *testing.T) {
	redis := dial(t, "unix", startRedis(t))
	onBothWays(t, func(t *testing.T, p *peer, _ *Gateway) {
		for _, p := range []*peer{redis, p} {
			p.do(t, "FLUSHALL")
			p.do(t, "SLOWLOG", "RESET")
			p.do(t, "CLIENT", "SETNAME", "me")
		}
		// Numbers go on after RESET.
		number := regexp.MustCompile(`\*6\r\n:\d+\r\n`)
		for _, cmd := range slowScript() {
			got := number.ReplaceAllString(shown(p.do(t, cmd...), p.LocalAddr().String()), "*6;")
			want := number.ReplaceAllString(shown(redis.do(t, cmd...), redis.RemoteAddr().String()+":0"), "*6;")
			if cmd[0] == "CONFIG" && cmd[1] == "GET" {
				got, want = "", ""
			}
			if got != want {
				t.Errorf("%.100q\n got %q\nwant %q", cmd, got, want)
			}
		}
	})
}

// TestSlowLogHidesSecrets: passwords are in no entry, and long arguments are cut.
func TestSlowLogHidesSecrets(t *testing.T) {
	p := dial(t, "tcp",
		serve(t, Options{SlowLogTime: 1, Databases: []Database{{"default", clienttest.New(clienttest.Options{})}}}))
	for _, cmd := range slowScript() {
		if cmd[0] == "CONFIG" {
			continue
		}
		reply := p.do(t, cmd...)
		if cmd[0] != "SLOWLOG" || cmd[1] != "GET" || len(cmd) != 3 || cmd[2] != "-1" {
			continue
		}
		for _, secret := range []string{"wrong", "nobody", "anna", "secret"} {
			if strings.Contains(reply, secret) {
				t.Errorf("it has %q: %q", secret, reply)
			}
		}
		for _, want := range []string{bulk(strings.Repeat("v", 128) + "... (72 more bytes)"),
			bulk(strings.Repeat("v", 128)), bulk("... (11 more arguments)"), bulk("(redacted)")} {
			if !strings.Contains(reply, want) {
				t.Errorf("it has no %q: %q", want, reply)
			}
		}
	}
}

// TestLatencyHistogram counts calls, of subcommands too.
func TestLatencyHistogram(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", clienttest.New(clienttest.Options{})}}}))
	p.want(t, "*0\r\n", "LATENCY", "HISTOGRAM", "get", "nosuch")
	for range 3 {
		p.want(t, "$-1\r\n", "GET", "a")
	}
	p.do(t, "CONFIG", "GET", "timeout")
	got := p.do(t, "LATENCY", "HISTOGRAM", "get", "set", "config")
	for _, want := range []string{"*4\r\n" + bulk("get") + "*4\r\n" + bulk("calls") + ":3\r\n" + bulk("histogram_usec"),
		bulk("config|get") + "*4\r\n" + bulk("calls") + ":1\r\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in %q", want, got)
		}
	}
}
