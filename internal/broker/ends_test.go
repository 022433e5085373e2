package broker

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// only is the only connection of the first tenant.
func (w *world) only(t *testing.T) (c *conn) {
	t.Helper()
	x := w.b.tenants[0]
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.mu.conns) != 1 {
		t.Fatalf("%d connections, want 1", len(x.mu.conns))
	}
	for c = range x.mu.conns {
	}
	return c
}

// TestClientsWhileViewsEnd: who ends a View may count it while an operator asks who is there, which waits for that.
func TestClientsWhileViewsEnd(t *testing.T) {
	w := newWorld(t, withViews(nil))
	w.looker(t)
	c := w.only(t)
	c.views.Lock() // as who ends a View has it
	done := make(chan []Client)
	go func() { done <- w.b.Clients() }()
	testutil.Until(t, "the question waits for the views", func() bool {
		b := make([]byte, 1<<20)
		return strings.Contains(string(b[:runtime.Stack(b, true)]), "broker.(*conn).viewing")
	})
	tenant, conn := w.b.tenants[0].mu.TryLock(), c.mu.TryLock()
	if !tenant || !conn {
		t.Errorf("the tenant is free: %v, its connection is: %v", tenant, conn)
	}
	if tenant {
		w.b.tenants[0].mu.Unlock()
	}
	if conn {
		c.mu.Unlock()
	}
	c.views.Unlock()
	if all := <-done; len(all) != 1 {
		t.Errorf("%+v", all)
	}
}

// heldPut begins a PUT from the program's arena that is held, and asks for the arena to be deregistered meanwhile.
func (p *program) heldPut(c *conn, key string) {
	p.t.Helper()
	p.start(ring.Submission{Op: ring.OpPut, Memory: p.welcome.Arena, Length: 4, Timeout: 6000}, key, "")
	p.publish()
	memory := func() *memory {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.mu.memories[p.welcome.Arena]
	}
	m := memory()
	testutil.Until(p.t, "the PUT is under way", func() bool { return m.uses.Load() == 2 })
	p.send(ring.Numbered(ring.Head{Kind: ring.KindDeregister, Serial: 6}, p.welcome.Arena))
	testutil.Until(p.t, "the arena is taken back", func() bool { return memory() == nil })
}

// TestDeregisteredAtTheEnd: a connection that waits until nobody uses a memory ends as any other: when its program
// dies, by a fault of the broker's own, and with the broker.
func TestDeregisteredAtTheEnd(t *testing.T) {
	causes, fault := make(chan error, 2), make(chan struct{})
	w := newWorldWith(t, nil, &client.Events{Begin: func(ctx context.Context, op client.OpEvent) context.Context {
		key := op.Key
		if len(op.Ops) > 0 {
			key = op.Ops[0].Key
		}
		switch string(key) {
		case "held":
			<-ctx.Done()
			causes <- context.Cause(ctx)
		case "fault":
			<-fault
			panic("a fault")
		}
		return ctx
	}})
	before := w.before(t)
	p := w.open(t, "default", 1<<20, ring.Hello{})
	p.heldPut(w.only(t), "held")
	w.only(t).end(errDead) // as who watches its process does
	w.gone(t, p, before)
	if err := <-causes; !errors.Is(err, errDead) {
		t.Errorf("what was under way ended by %v, want the program's death", err)
	}
	p = w.open(t, "default", 1<<20, ring.Hello{})
	p.heldPut(w.only(t), "fault")
	close(fault)
	w.gone(t, p, before)
	p = w.open(t, "default", 1<<20, ring.Hello{})
	p.heldPut(w.only(t), "held")
	if err := w.b.Close(); err != nil {
		t.Error(err)
	}
	if err := <-causes; !errors.Is(err, errClosing) {
		t.Errorf("what was under way ended by %v, want the broker's end", err)
	}
}

// gone waits until nothing is left of the only program, which may be there still.
func (w *world) gone(t *testing.T, p *program, before left) {
	t.Helper()
	testutil.UntilNone(t, "connections", w.b.tenants[0].stats.Clients.Load)
	p.close()
	w.none(t, before)
}

// TestFaultOfView: a VIEW that the broker's own fault ends counts no more, and neither does its connection.
func TestFaultOfView(t *testing.T) {
	w := newWorldWith(t, withViews(nil), &client.Events{
		Begin: func(ctx context.Context, op client.OpEvent) context.Context {
			if string(op.Key) == "fault" {
				panic("a fault")
			}
			return ctx
		}})
	before := w.before(t)
	p := w.looker(t)
	p.start(ring.Submission{Op: ring.OpView, Word: 1}, "fault", "")
	p.publish()
	w.gone(t, p.program, before)
	if got := w.seen(); got != [2]int64{} {
		t.Errorf("views are left: %v", got)
	}
}

// TestPinUnknown: a pin counts until its time is over unless it certainly did not happen.
func TestPinUnknown(t *testing.T) {
	w := newWorld(t, nil)
	w.open(t, "default", 0, ring.Hello{})
	c := w.only(t)
	c.mu.Lock()
	q := c.mu.queues[0]
	c.mu.Unlock()
	pins := &w.b.tenants[0].pins
	for _, x := range []struct {
		err  error
		left int
	}{{client.ErrNotFound, 0}, {fmt.Errorf("it may have: %w", client.ErrUnknownOutcome), 1}} {
		it := item{sub: ring.Submission{Op: ring.OpPin}, end: time.Now().Add(time.Hour)}
		if !pins.take(time.Now(), it.end, 8) {
			t.Fatal("no pin")
		}
		q.answer(&it, &client.Op{Err: x.err})
		if pins.n != x.left {
			t.Errorf("%v: %d pins count, want %d", x.err, pins.n, x.left)
		}
	}
}
