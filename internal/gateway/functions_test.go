package gateway

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestFunctions: a gateway answers as testdata says, which is what Redis says but for testdata/functions/kvd.
func TestFunctions(t *testing.T) {
	datadriven.Walk(t, "testdata/functions", func(t *testing.T, path string) {
		p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			return answers(t, p, d.Input)
		})
	})
}

// TestFunctionsLikeRedis: a redis-server answers as testdata says.
func TestFunctionsLikeRedis(t *testing.T) {
	p := dial(t, "unix", startRedis(t))
	datadriven.RunTest(t, "testdata/functions/redis", func(t *testing.T, d *datadriven.TestData) string {
		return answers(t, p, d.Input)
	})
}

// library is a source of one function.
func library(name, function, body string) string {
	return "#!lua name=" + name + "\nredis.register_function('" + function + "', function(keys, args) " + body + " end)"
}

// TestFunctionsAmongGateways: gateways of a store have the same libraries, a new one at once and a changed one in time.
func TestFunctionsAmongGateways(t *testing.T) {
	dbs := fake()
	one, two := dial(t, "tcp", serve(t, Options{Databases: dbs})), dial(t, "tcp", serve(t, Options{Databases: dbs}))
	two.want(t, "-ERR Function not found\r\n", "FCALL", "f", "0")
	one.want(t, bulk("l"), "FUNCTION", "LOAD", library("l", "f", "return 1"))
	two.want(t, ":1\r\n", "FCALL", "f", "0")
	one.want(t, bulk("l"), "FUNCTION", "LOAD", "REPLACE", library("l", "f", "return 2"))
	one.want(t, ":2\r\n", "FCALL", "f", "0")
	testutil.Until(t, "the other gateway calls the new function", func() bool {
		return two.do(t, "FCALL", "f", "0") == ":2\r\n"
	})
	two.want(t, "+OK\r\n", "FUNCTION", "DELETE", "l")
	testutil.Until(t, "the function is gone", func() bool {
		return one.do(t, "FCALL", "f", "0") == "-ERR Function not found\r\n"
	})
}

// TestFunctionsAtOnce: libraries that several gateways load at the same time are all there.
func TestFunctionsAtOnce(t *testing.T) {
	dbs := []Database{{"default", newStore(t)}}
	done := make(chan string)
	const each = 8
	for _, gateway := range []string{"a", "b"} {
		p := dial(t, "tcp", serve(t, Options{Databases: dbs}))
		go func() {
			bad := ""
			for i := range each {
				name := gateway + string(rune('0'+i))
				if got := p.do(t, "FUNCTION", "LOAD", library(name, name, "return '"+name+"'")); got != bulk(name) {
					bad += got
				}
			}
			done <- bad
		}()
	}
	if bad := <-done + <-done; bad != "" {
		t.Fatal(bad)
	}
	p := dial(t, "tcp", serve(t, Options{Databases: dbs}))
	for _, gateway := range []string{"a", "b"} {
		for i := range each {
			name := gateway + string(rune('0'+i))
			p.want(t, bulk(name), "FCALL", name, "0")
		}
	}
}

// TestFunctionsAreHidden: the key of libraries is nobody's to see or to touch.
func TestFunctionsAreHidden(t *testing.T) {
	s := clienttest.New(clienttest.Options{})
	p := dial(t, "tcp",
		serve(t, Options{Databases: []Database{{"default", s}, {"other", clienttest.New(clienttest.Options{})}}}))
	p.want(t, "+OK\r\n", "CONFIG", "SET", "notify-keyspace-events", "KEA")
	listener := dial(t, "tcp", p.RemoteAddr().String())
	listener.do(t, "PSUBSCRIBE", "__key*")
	p.want(t, bulk("l"), "FUNCTION", "LOAD", library("l", "f", "return 1"))
	p.do(t, "SET", "seen", "1")
	listener.hears(t, "*4\r\n"+bulk("pmessage")+bulk("__key*")+bulk("__keyspace@0__:seen")+bulk("set"))
	for _, c := range []struct{ want, cmd string }{
		{":1\r\n", "DBSIZE"}, {"*1\r\n" + bulk("seen"), "KEYS *"}, {bulk("seen"), "RANDOMKEY"},
		{"*2\r\n" + bulk("0") + "*1\r\n" + bulk("seen"), "SCAN 0"},
		{"+OK\r\n", "FLUSHALL"}, {":0\r\n", "DBSIZE"}, {"$-1\r\n", "RANDOMKEY"}, {":1\r\n", "FCALL f 0"},
	} {
		p.want(t, c.want, strings.Fields(c.cmd)...)
	}
	if got := p.do(t, "INFO", "keyspace"); strings.Contains(got, "db0") {
		t.Errorf("an empty database: %q", got)
	}
	const refused = "-ERR kvd: this key is reserved for libraries of functions\r\n"
	key := inside.FunctionsKey
	for _, cmd := range [][]string{{"GET", key}, {"SET", key, "x"}, {"DEL", "a", key}, {"MGET", "a", key},
		{"RENAME", key, "a"}, {"RENAME", "a", key}, {"COPY", key, "a"},
		{"WATCH", key}, {"HSET", key, "f", "v"}, {"MSETNX", key, "x"}, {"BLPOP", key, "0.01"},
		{"SORT", "a", "STORE", key}, {"OBJECT", "ENCODING", key}, {"GETDEL", key}} {
		if got := p.do(t, cmd...); got != refused {
			t.Errorf("%q: %q", cmd, got)
		}
	}
	if got := p.do(t, "EVAL", "return redis.call('get', KEYS[1])", "1", key); !strings.HasPrefix(
		got, strings.TrimSuffix(refused, "\r\n")) {
		t.Errorf("in a script: %q", got)
	}
	p.want(t, "+OK\r\n", "SELECT", "1")
	p.want(t, refused, "GET", key)
	p.want(t, ":1\r\n", "FCALL", "f", "0")
}

// TestDamagedFunctions: what is no library stays what it is until FUNCTION FLUSH, and everybody is told.
func TestDamagedFunctions(t *testing.T) {
	for _, op := range []client.Op{{Value: []byte("x")}, {Value: []byte("x"), Type: client.Hash},
		{Value: newLibrarySet().payload()[1:]}} {
		s := clienttest.New(clienttest.Options{})
		op.Kind, op.Key = client.OpPut, []byte(inside.FunctionsKey)
		s.Do(t.Context(), []client.Op{op})
		p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", s}}}))
		for _, cmd := range [][]string{{"FCALL", "f", "0"}, {"FUNCTION", "LIST"},
			{"FUNCTION", "LOAD", library("l", "f", "return 1")}, {"FUNCTION", "DUMP"}, {"FUNCTION", "STATS"},
			{"FUNCTION", "DELETE", "l"}} {
			if got := p.do(t, cmd...); !strings.HasPrefix(got, "-ERR kvd: the libraries of functions in the store "+
				"cannot be read, and FUNCTION FLUSH deletes them: ") {
				t.Errorf("%q: %q", cmd, got)
			}
		}
		p.want(t, ":0\r\n", "DBSIZE")
		p.want(t, "+OK\r\n", "FUNCTION", "FLUSH")
		p.want(t, "-ERR Function not found\r\n", "FCALL", "f", "0")
		p.want(t, bulk("l"), "FUNCTION", "LOAD", library("l", "f", "return 1"))
		p.want(t, ":1\r\n", "FCALL", "f", "0")
	}
}

// TestFunctionBounds: libraries have a bound together, and so have values.
func TestFunctionBounds(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	half := "--" + strings.Repeat("x", maxLibraries/2-100) + "\n"
	p.want(t, bulk("a"), "FUNCTION", "LOAD", library("a", "a", half+"return 1"))
	if got := p.do(t, "FUNCTION", "LOAD", library("b", "b", half+half+"return 1")); !strings.HasPrefix(got, "-ERR ") {
		t.Error(got)
	}
	p.want(t, ":1\r\n", "FCALL", "a", "0")
	small := dial(t, "tcp", serve(t, Options{Databases: fake(), MaxValueBytes: 1000}))
	small.want(t, bulk("a"), "FUNCTION", "LOAD", library("a", "a", "--"+strings.Repeat("x", 600)+"\n"))
	if got := small.do(t, "FUNCTION", "LOAD", library("b", "b", "--"+strings.Repeat("x", 600)+"\n")); !strings.Contains(
		got, "all together may have 1000") {
		t.Error(got)
	}
}

// TestFunctionKill: FUNCTION KILL ends functions and SCRIPT KILL scripts; FUNCTION STATS shows what runs.
func TestFunctionKill(t *testing.T) {
	addr := serve(t, Options{Databases: fake(), ScriptTimeout: time.Hour})
	p, script, other := dial(t, "tcp", addr), dial(t, "tcp", addr), dial(t, "tcp", addr)
	other.do(t, "FUNCTION", "LOAD", library("l", "f", "redis.call('set', keys[1], 'x') while true do end"))
	p.send(t, []string{"FCALL", "F", "1", "k"})
	running := "*4\r\n" + bulk("running_script") + "*6\r\n" + bulk("name") + bulk("f") + bulk("command") + "*4\r\n" +
		bulk("FCALL") + bulk("F") + bulk("1") + bulk("k") + bulk("duration_ms")
	testutil.Until(t, "the function runs", func() bool {
		return strings.HasPrefix(other.do(t, "FUNCTION", "STATS"), running)
	})
	other.want(t, "-NOTBUSY No scripts in execution right now.\r\n", "SCRIPT", "KILL")
	script.send(t, []string{"EVAL", "while true do end", "0"})
	testutil.Until(t, "a script to kill", func() bool { return other.do(t, "SCRIPT", "KILL") == "+OK\r\n" })
	if got := string(script.reply(t)); !strings.HasPrefix(got, "-ERR Script killed by user with SCRIPT KILL.") {
		t.Errorf("the script's reply is %q", got)
	}
	other.want(t, "+OK\r\n", "FUNCTION", "KILL")
	if got := string(p.reply(t)); !strings.HasPrefix(got, "-ERR Script killed by user with FUNCTION KILL.") {
		t.Errorf("the function's reply is %q", got)
	}
	other.want(t, ":0\r\n", "EXISTS", "k")
	testutil.Until(t, "no function is left", func() bool {
		return strings.HasPrefix(other.do(t, "FUNCTION", "KILL"), "-NOTBUSY")
	})
}

// TestScriptPublish: what scripts publish goes out once their effects are there, once, and not at all if they fail.
func TestScriptPublish(t *testing.T) {
	s := clienttest.New(clienttest.Options{})
	addr := serve(t, Options{Databases: []Database{{"default", s}}})
	p, listener, other := dial(t, "tcp", addr), dial(t, "tcp", addr), dial(t, "tcp", addr)
	listener.do(t, "SUBSCRIBE", "c")
	listener.do(t, "PSUBSCRIBE", "c*")
	listener.do(t, "SSUBSCRIBE", "s")
	p.want(t, ":2\r\n", "EVAL", "return redis.call('publish', 'c', ARGV[1])", "0", "one")
	listener.hears(t, message("c", "one"))
	listener.hears(t, "*4\r\n"+bulk("pmessage")+bulk("c*")+bulk("c")+bulk("one"))
	p.want(t, ":1\r\n", "EVAL", "return redis.call('spublish', 's', 'two')", "0")
	listener.hears(t, "*3\r\n"+bulk("smessage")+bulk("s")+bulk("two"))
	if got := p.do(t, "EVAL", "redis.call('publish', 'c', 'never') error('stop')", "0"); !strings.HasPrefix(
		got, "-ERR user_script:1: stop") {
		t.Error(got)
	}
	// The first run meets another's write, so there is a second one.
	writes := 0
	s.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		if o.Kind == client.OpPut && string(o.Key) == "k" && o.Cond != client.Always {
			if writes++; writes == 1 {
				s.Fail(nil)
				other.do(t, "SET", "k", "1")
			}
		}
		return clienttest.Fault{}
	})
	p.want(t, ":2\r\n", "EVAL", "redis.call('publish', 'c', 'three') return redis.call('incr', 'k')", "0")
	listener.hears(t, message("c", "three"))
	listener.hears(t, "*4\r\n"+bulk("pmessage")+bulk("c*")+bulk("c")+bulk("three"))
	p.do(t, "PUBLISH", "c", "last")
	listener.hears(t, message("c", "last"))
}
