package gateway

import (
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
)

// answers says the lines of a block of testdata/scripts, and returns the replies as Go's strings.
func answers(t *testing.T, p *peer, input string) string {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(input) {
		w := words(line)
		if source, is := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "> "); is {
			w = []string{"EVAL", source, "1", "key", "a", "2"}
		}
		p.send(t, w)
		reply := p.reply(t)
		if w[0] == "HELLO" {
			reply = []byte("...")
		}
		b.WriteString(strings.Trim(strconv.Quote(string(reply)), `"`) + "\n")
	}
	return b.String()
}

// TestScripts: a gateway answers as testdata says, which is what Redis says but for testdata/scripts/kvd.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			return answers(t, p, d.Input)
		})
	})
}

// TestScriptsLikeRedis: a redis-server answers as testdata says.
func TestScriptsLikeRedis(t *testing.T) {
	p := dial(t, "unix", startRedis(t))
	datadriven.RunTest(t, "testdata/scripts/redis", func(t *testing.T, d *datadriven.TestData) string {
		return answers(t, p, d.Input)
	})
}

// TestScriptKill: SCRIPT KILL ends the script that has run for the longest time, and nothing of it is done; others go
// on meanwhile.
func TestScriptKill(t *testing.T) {
	addr := serve(t, Options{Databases: fake(), ScriptTimeout: time.Hour})
	p, other := dial(t, "tcp", addr), dial(t, "tcp", addr)
	p.send(t, []string{"EVAL", "redis.call('set', KEYS[1], 'x') while true do pcall(function() while true do end " +
		"end) end", "1", "k"})
	testutil.Until(t, "a script to kill", func() bool {
		if reply := other.do(t, "SET", "other", "1"); reply != "+OK\r\n" {
			t.Fatal(reply)
		}
		return other.do(t, "SCRIPT", "KILL") == "+OK\r\n"
	})
	if got := string(p.reply(t)); !strings.HasPrefix(got, "-ERR Script killed by user with SCRIPT KILL.") {
		t.Errorf("the script's reply is %q", got)
	}
	if got := other.do(t, "EXISTS", "k"); got != ":0\r\n" {
		t.Errorf("a key of the script that was killed: %q", got)
	}
	testutil.Until(t, "no script is left", func() bool {
		return strings.HasPrefix(other.do(t, "SCRIPT", "KILL"), "-NOTBUSY")
	})
}

// TestScriptClose: a Gateway that closes waits for no script.
func TestScriptClose(t *testing.T) {
	g, err := New(Options{Databases: fake(), ScriptTimeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	l := testutil.Listen(t)
	done := make(chan error, 1)
	go func() { done <- g.Serve(l) }()
	p := dial(t, "tcp", l.Addr().String())
	p.send(t, []string{"EVAL", "while true do end", "0"})
	testutil.Until(t, "a script runs", func() bool {
		n := 0
		g.eachScript(func(*runningScript) { n++ })
		return n == 1
	})
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestScriptLimits: a script ends after its time and beyond its memory, nothing of it is done, and the memory comes
// back.
func TestScriptLimits(t *testing.T) {
	budget := netsrv.NewBudget(64 << 20)
	brief := dial(t, "tcp", serve(t, Options{Databases: fake(), Budget: budget, ScriptTimeout: 50 * time.Millisecond}))
	p := dial(t, "tcp",
		serve(t, Options{Databases: fake(), Budget: budget, ScriptTimeout: time.Hour, ScriptMemory: 8 << 20}))
	for source, want := range map[string]string{
		"redis.call('set', 'k', '1') while true do end":                                                "longer than script-timeout",
		"redis.call('set', 'k', '1') local s = 'x' while true do s = s..s end":                         "more than script-memory",
		"redis.call('set', 'k', '1') return string.find(string.rep('a', 1e5), '.-.-.-.-b')":            "longer than script-timeout",
		"redis.call('set', 'k', '1') local t = {} while true do t[#t+1] = redis.call('echo', 'x') end": "more than script-memory",
	} {
		at := p
		if strings.Contains(want, "timeout") {
			at = brief
		}
		if got := at.do(t, "EVAL", source, "0"); !strings.HasPrefix(got, "-ERR") || !strings.Contains(got, want) {
			t.Errorf("%s: %q", source, got)
		}
	}
	for _, at := range []*peer{p, brief} {
		if got := at.do(t, "EXISTS", "k"); got != ":0\r\n" {
			t.Errorf("a key of a script that was ended: %q", got)
		}
	}
	p.do(t, "EVAL", "local s = string.rep('x', 4e6) return #s", "0")
	testutil.Until(t, "the memory is back", func() bool { return budget.Used() == 0 })
}

// TestScriptAtomic: scripts of several connections on one key take effect one after the other.
func TestScriptAtomic(t *testing.T) {
	addr := serve(t, Options{Databases: []Database{{"default", newStore(t)}}})
	const conns, each = 8, 50
	var wg sync.WaitGroup
	for range conns {
		p := dial(t, "tcp", addr)
		wg.Go(func() {
			for range each {
				if got := p.do(t, "EVAL", "local n = tonumber(redis.call('get', KEYS[1]) or '0') redis.call('set', "+
					"KEYS[1], n + 1) redis.call('append', KEYS[1], '') return n", "1", "k"); got[0] != ':' {
					t.Error(got)
				}
			}
		})
	}
	wg.Wait()
	if got := dial(t, "tcp", addr).do(t, "GET", "k"); got != bulk(strconv.Itoa(conns*each)) {
		t.Errorf("%d increments counted %q", conns*each, got)
	}
}

// TestScriptPublishes: what a script publishes is heard when it has taken effect, once, and not at all if it fails.
func TestScriptPublishes(t *testing.T) {
	store, p, other := severalStore(t, severalCase{keys: "SET k 1"})
	sub := dial(t, "tcp", p.RemoteAddr().String())
	sub.do(t, "SUBSCRIBE", "c")
	sub.do(t, "PSUBSCRIBE", "mark*")
	for _, c := range []struct{ source, reply string }{
		{"return redis.call('publish','c','first')", ":1"},
		{"redis.call('publish','c','fails') redis.call('nothing')", "-ERR"},
		{"redis.pcall('publish','c') return redis.call('publish','nobody','x')", ":0"},
		{"redis.call('incr',KEYS[1]) redis.call('publish','c',redis.call('get',KEYS[1])) return " +
			"redis.call('publish','c','last')", ":1"},
	} {
		atCommit(store, func() clienttest.Fault { // after which the script runs again
			other.want(t, ":11\r\n", "INCRBY", "k", "10")
			return clienttest.Fault{}
		})
		if got := p.do(t, "EVAL", c.source, "1", "k"); !strings.HasPrefix(got, c.reply) {
			t.Errorf("%s: %q", c.source, got)
		}
	}
	p.want(t, ":1\r\n", "PUBLISH", "mark", "end")
	for _, m := range []string{"first", "12", "last"} {
		sub.hears(t, message("c", m))
	}
	sub.hears(t, "*4\r\n"+bulk("pmessage")+bulk("mark*")+bulk("mark")+bulk("end"))
	p.want(t, "-ERR Write commands are not allowed from read-only scripts. script: "+
		"de85327b3ebd1554fb6b61797a339807ad56f83d, on @user_script:1.\r\n",
		"EVAL_RO", "return redis.call('publish','c','x')", "0")
	p.do(t, "ACL", "SETUSER", "u", "on", "nopass", "~*", "+@all", "resetchannels")
	p.do(t, "AUTH", "u", "any")
	p.want(t, "-ERR The user executing the script can't publish to the channel mentioned in the command script: "+
		"de85327b3ebd1554fb6b61797a339807ad56f83d, on @user_script:1.\r\n",
		"EVAL", "return redis.call('publish','c','x')", "0")
}

// TestScriptRights: a script may do what its user may.
func TestScriptRights(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	admin, p := dial(t, "tcp", addr), dial(t, "tcp", addr)
	admin.do(t, "ACL", "SETUSER", "u", "on", ">pw", "~a:*", "%R~r:*", "+eval", "+get", "+set", "+select", "db=0")
	p.do(t, "AUTH", "u", "pw")
	for _, c := range []struct{ source, key, want string }{
		{"return redis.call('set', KEYS[1], '1')", "a:1", "+OK"},
		{"return redis.call('get', KEYS[1])", "b:1", "-NOPERM this user has no permissions to access one of the keys " +
			"used as arguments"},
		{"return redis.call('get', 'b:1')", "a:1", "-ERR The user executing the script can't access at least one of " +
			"the keys mentioned in the command arguments"},
		{"return redis.call('set', 'r:1', '1')", "a:1", "-ERR The user executing the script can't access at least " +
			"one of the keys mentioned in the command arguments"},
		{"return redis.call('get', 'r:1')", "a:1", "$-1"},
		{"return redis.call('del', KEYS[1])", "a:1", "-ERR The user executing the script can't run this command or " +
			"subcommand"},
		{"return redis.pcall('select', '1')", "a:1", "-ERR The user executing the script can't access this database"},
		{"return {tostring(redis.acl_check_cmd('set', 'a:1', '1')), tostring(redis.acl_check_cmd('set', 'r:1', " +
			"'1')), tostring(redis.acl_check_cmd('del', 'a:1'))}", "a:1",
			"*3\r\n$4\r\ntrue\r\n$5\r\nfalse\r\n$5\r\nfalse"},
	} {
		if got := p.do(t, "EVAL", c.source, "1", c.key); !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q", c.source, got)
		}
	}
	if got := admin.do(t, "ACL", "LOG"); !strings.Contains(got, bulk("context")+bulk("lua")) {
		t.Errorf("ACL LOG has no entry of a script: %q", got)
	}
}
