package memcached_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/memcached"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestFlushLater: a flush_all with a delay takes what is there when it is due, even if the store fails at first; items
// stay until then. A later one takes its place.
func TestFlushLater(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	addr, _ := serve(t, memcached.Options{Client: store})
	c := dial(t, addr)
	say := func(line, want string) {
		t.Helper()
		if got := c.ask(t, line+"\r\n"); got != want {
			t.Fatalf("%q: %q, want %q", line, got, want)
		}
	}
	say("set a 0 0 1\r\nx", "STORED\r\n")
	say("flush_all 1000", "OK\r\n")
	say("get a", "VALUE a 0 1\r\nx\r\nEND\r\n")
	var failures atomic.Int64
	store.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		if o.Key == nil && failures.Add(1) == 1 { // the first scan
			return clienttest.Fault{Err: client.ErrUnavailable}
		}
		return clienttest.Fault{}
	})
	say("flush_all 1", "OK\r\n")
	testutil.Until(t, "the item is flushed", func() bool { return c.ask(t, "get a\r\n") == "END\r\n" })
	if failures.Load() < 2 {
		t.Error("the flush did not fail first")
	}
	say("set a 0 0 1\r\nx", "STORED\r\n")
	say("flush_all 1000", "OK\r\n") // ended by Close
	say("get a", "VALUE a 0 1\r\nx\r\nEND\r\n")
}
