package gateway

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
)

// TestPresence: commands that ask whether a key is there, and until when, read no value and note no use, alone, in a
// pipeline and in a transaction. Beside a command that needs the value they go by that.
func TestPresence(t *testing.T) {
	s := clienttest.New(clienttest.Options{MaxKeys: 2, Evict: true})
	var asked, other atomic.Int64
	s.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		if o.Kind == client.OpExists {
			asked.Add(1)
		} else {
			other.Add(1)
		}
		return clienttest.Fault{}
	})
	addr, _ := start(t, Options{Databases: []Database{{"default", s}}})
	p := dial(t, "tcp", addr)
	p.want(t, ":1\r\n", "HSET", "h", "f", "v")
	p.want(t, "+OK\r\n", "SET", "k", "v")
	asked.Store(0)
	other.Store(0)
	p.want(t, ":1\r\n", "EXISTS", "h")
	p.want(t, ":3\r\n", "EXISTS", "h", "k", "none", "k")
	p.want(t, ":-1\r\n", "TTL", "h")
	p.want(t, ":-2\r\n", "PTTL", "none")
	p.send(t, []string{"EXISTS", "h"}, []string{"TTL", "k"}, []string{"EXISTS", "none"})
	for _, want := range []string{":1\r\n", ":-1\r\n", ":0\r\n"} {
		if got := string(p.reply(t)); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	p.want(t, "+OK\r\n", "MULTI")
	p.want(t, "+QUEUED\r\n", "EXISTS", "h")
	p.want(t, "+QUEUED\r\n", "TTL", "h")
	p.want(t, "*2\r\n:1\r\n:-1\r\n", "EXEC")
	if a, o := asked.Load(), other.Load(); a != 10 || o != 0 {
		t.Errorf("asked %d times, and %d others", a, o)
	}
	for _, queue := range [][]string{{"SET", "h", "v", "NX"}, {"SETNX", "k", "v"}, {"SET", "none", "v", "XX"},
		{"DEL", "none"}} {
		p.want(t, "+OK\r\n", "MULTI")
		p.want(t, "+QUEUED\r\n", queue...)
		p.want(t, map[bool]string{true: "*1\r\n$-1\r\n", false: "*1\r\n:0\r\n"}[queue[0] == "SET"], "EXEC")
	}
	if a, o := asked.Load(), other.Load(); a != 14 || o != 0 {
		t.Errorf("conditions: asked %d times, and %d others", a, o)
	}
	// h was used longest ago.
	p.want(t, "+OK\r\n", "SET", "new", "v")
	p.want(t, ":2\r\n", "EXISTS", "h", "k", "new")
	p.want(t, ":1\r\n", "EXISTS", "k")
	p.send(t, []string{"EXISTS", "k"}, []string{"GET", "k"}, []string{"TTL", "k"})
	for _, want := range []string{":1\r\n", "$1\r\nv\r\n", ":-1\r\n"} {
		if got := string(p.reply(t)); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	// That was a use of k, so is TOUCH of new.
	p.want(t, ":1\r\n", "TOUCH", "new")
	p.want(t, ":1\r\n", "EXISTS", "k")
	p.want(t, "+OK\r\n", "SET", "newer", "v")
	p.want(t, ":0\r\n", "EXISTS", "k")
}
