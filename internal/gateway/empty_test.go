package gateway

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
)

// TestEmptyKey: the empty name is a key like any, for all kinds of commands, and only it names what it has in the
// store.
func TestEmptyKey(t *testing.T) {
	for name, store := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, Options{Databases: []Database{{"0", store}, {"1", clienttest.New(clienttest.Options{})}}})
			p, other := dial(t, "tcp", addr), dial(t, "tcp", addr)
			for _, c := range []struct{ cmd, reply string }{
				{"GET ~", "$-1\r\n"},
				{"SET ~ nothing", "+OK\r\n"},
				{"GET ~", bulk("nothing")},
				{"EXISTS ~ a ~", ":2\r\n"},
				{"DBSIZE", ":1\r\n"},
				{"RANDOMKEY", bulk("")},
				{"KEYS *", array("")},
				{"SCAN 0 COUNT 1000", "*2\r\n" + bulk("0") + array("")},
				{"SCAN 0 COUNT 1000 MATCH ?", "*2\r\n" + bulk("0") + "*0\r\n"},
				{"MSET ~ 1 a 2", "+OK\r\n"},
				{"MGET a ~", array("2", "1")},
				{"INCR ~", ":2\r\n"},
				{"EXPIRE ~ 100", ":1\r\n"},
				{"TTL ~", ":100\r\n"},
				{"SETNX ~ x", ":0\r\n"},
				{"SET ~ 3 NX GET", bulk("2")},
				{"RENAME ~ b", "+OK\r\n"},
				{"COPY b ~", ":1\r\n"},
				{"DEL ~ b", ":2\r\n"},
				{"HSET ~ f v", ":1\r\n"},
				{"TYPE ~", "+hash\r\n"},
				{"SINTER ~ ~", wrongType},
				{"MOVE ~ 1", ":1\r\n"},
				{"DBSIZE", ":1\r\n"},
				{"SELECT 1", "+OK\r\n"},
				{"HGETALL ~", array("f", "v")},
				{"MOVE ~ 0", ":1\r\n"},
				{"SELECT 0", "+OK\r\n"},
				{"EVAL return{redis.call('hget',KEYS[1],'f'),redis.call('del',KEYS[1])} 1 ~", "*2\r\n" + bulk("v") +
					":1\r\n"},
				{"WATCH ~", "+OK\r\n"},
			} {
				p.want(t, c.reply, strings.Split(strings.ReplaceAll(c.cmd, "~", ""), " ")...)
			}
			other.want(t, ":1\r\n", "RPUSH", "", "x")
			p.want(t, "+OK\r\n", "MULTI")
			p.want(t, "+QUEUED\r\n", "SET", "", "y")
			p.want(t, "*-1\r\n", "EXEC")
			p.want(t, "*2\r\n"+bulk("")+bulk("x"), "BLPOP", "", "1")
			p.send(t, []string{"BLPOP", "", "0"})
			other.want(t, ":1\r\n", "RPUSH", "", "z")
			if got := string(p.reply(t)); got != "*2\r\n"+bulk("")+bulk("z") {
				t.Errorf("BLPOP: %q", got)
			}
			p.want(t, "-ERR kvd: this key is reserved for the empty key\r\n", "SET", inside.EmptyKey, "v")
			p.want(t, "+OK\r\n", "SET", "", "kept")
			it, err := store.Get(t.Context(), []byte(inside.EmptyKey))
			if err != nil || string(it.Value) != "kept" {
				t.Errorf("the store has %q, %v", it.Value, err)
			}
			p.want(t, "+OK\r\n", "FLUSHDB")
			p.want(t, "$-1\r\n", "GET", "")
		})
	}
}

// TestEmptyKeyEvents: events and invalidations are about the empty name.
func TestEmptyKeyEvents(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	sub, p, caches := dial(t, "tcp", addr), dial(t, "tcp", addr), dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "CONFIG", "SET", "notify-keyspace-events", "KEA")
	sub.do(t, "SUBSCRIBE", "__keyevent@0__:set")
	caches.do(t, "HELLO", "3")
	caches.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	caches.want(t, "_\r\n", "GET", "")
	p.want(t, "+OK\r\n", "SET", "", "v")
	if got, want := string(sub.reply(t)), message("__keyevent@0__:set", ""); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := string(caches.reply(t)), fmt.Sprintf(">2\r\n%s*1\r\n%s", bulk("invalidate"), bulk("")); got !=
		want {
		t.Errorf("%q, want %q", got, want)
	}
}
