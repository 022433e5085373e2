package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
)

const long = 64 << 10 // bytes of the shortest long value

// bulkClient is a client of one lane over tcp, whose first connection is number 1 at the proxy. Its second one, number
// 2, is in use; "b" has a long value.
func bulkClient(t *testing.T) (*client.Client, *proxy, []byte) {
	r := newRig(t, "tcp", 1, 5*time.Second)
	o := r.options()
	o.Lanes = 1
	c, p := r.client(o), r.nodes[0].proxy
	put := func(key string, v []byte) {
		t.Helper()
		if err := put(t, c, key, v); err != nil {
			t.Fatal(err)
		}
	}
	value := bytes.Repeat([]byte("b"), long)
	put("a", []byte("short"))
	for range 3 {
		put("b", value[:long*3/4])
		get(t, c, "b", value[:long*3/4])
	}
	if n := p.served.Load(); n != 1 {
		t.Fatalf("%d connections before the first long value, want 1", n)
	}
	put("b", value)
	eventually(t, func() string {
		get(t, c, "b", value)
		n, _ := p.saw(2)
		return unless(n > long, "a second connection has %d bytes of long values", n)
	})
	if n := p.served.Load(); n != 2 {
		t.Fatalf("%d connections, want 2", n)
	}
	return c, p, value
}

func get(t *testing.T, c *client.Client, key string, want []byte) {
	t.Helper()
	if it, err := c.Get(t.Context(), []byte(key)); err != nil || !bytes.Equal(it.Value, want) {
		t.Fatalf("get %q: %d bytes, %v", key, len(it.Value), err)
	}
}

// A short GET does not wait for a long one whose bytes do not come.
func TestShortBesideLong(t *testing.T) {
	c, p, value := bulkClient(t)
	p.hold(2)
	done := make(chan error, 1)
	go func() {
		it, err := c.Get(context.Background(), []byte("b"))
		if err == nil && !bytes.Equal(it.Value, value) {
			err = fmt.Errorf("got %d bytes", len(it.Value))
		}
		done <- err
	}()
	eventually(t, func() string { _, n := p.saw(2); return unless(n > 0, "the long one is not under way") })
	for range 3 {
		get(t, c, "a", []byte("short"))
	}
	if _, err := c.Put(t.Context(), []byte("a"), []byte("other"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	get(t, c, "a", []byte("other"))
	select {
	case err := <-done:
		t.Fatalf("the long one has ended: %v", err)
	default:
	}
	p.resume()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// When connections are cut both come back, and a PUT whose end was not heard of has happened or has not.
func TestCutSecondConnection(t *testing.T) {
	c, p, value := bulkClient(t)
	last := value
	for i := range 12 {
		next := bytes.Repeat([]byte{byte(i)}, long+i)
		cut := make(chan struct{})
		go func() { p.cut(); close(cut) }()
		_, err := c.Put(t.Context(), []byte("b"), next, client.PutOptions{})
		<-cut
		it, gerr := c.Get(t.Context(), []byte("b"))
		switch {
		case gerr != nil:
			t.Fatal(gerr)
		case bytes.Equal(it.Value, next):
			last = next
		case err == nil || !bytes.Equal(it.Value, last):
			t.Fatalf("put %d: %v, then get: %d bytes", i, err, len(it.Value))
		}
		get(t, c, "a", []byte("short"))
	}
	n := 0
	eventually(t, func() string {
		get(t, c, "b", last)
		was := n
		if n = int(p.served.Load()); n == was {
			b, _ := p.saw(n)
			return unless(b > long, "the last connection has %d bytes of long values", b)
		}
		return "connections come"
	})
}

// unless is nothing, or what is not so.
func unless(ok bool, format string, args ...any) string {
	if ok {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

// Over tcp alone a client has a lane more, which performs what is expected to be long, and nothing else.
func TestLaneForBulk(t *testing.T) {
	r := newRig(t, "tcp", 1, 5*time.Second)
	o := r.options()
	o.Lanes = 0
	c := r.client(o)
	if n := c.Lanes(); n != 1 {
		t.Fatalf("keys hash to %d lanes, want 1", n)
	}
	value := bytes.Repeat([]byte("b"), 5<<20)
	for _, x := range []struct {
		what    string
		do      func() error
		on, off uint64 // operations of the first lane, and of the one for bulk
	}{
		{"a short put", func() error { return put(t, c, "a", value[:long/2]) }, 1, 0},
		{"a short get", func() error { get(t, c, "a", value[:long/2]); return nil }, 1, 0},
		{"a long put", func() error { return put(t, c, "b", value[:long]) }, 0, 1},
		{"a long get", func() error { get(t, c, "b", value[:long]); return nil }, 0, 1},
		{"a put in chunks", func() error { return put(t, c, "b", value) }, 0, 1},
		{"a get of chunks", func() error { get(t, c, "b", value); return nil }, 0, 1},
		{"a delete", func() error { return c.Delete(t.Context(), []byte("b")) }, 1, 0},
		{"a batch of both", func() error {
			ops := []client.Op{{Kind: client.OpPut, Key: []byte("c"), Value: value[:9]},
				{Kind: client.OpPut, Key: []byte("d"), Value: value}, {Kind: client.OpGet, Key: []byte("a")}}
			c.Do(t.Context(), ops)
			return errors.Join(ops[0].Err, ops[1].Err, ops[2].Err)
		}, 2, 1},
	} {
		was := c.Performed()
		if err := x.do(); err != nil {
			t.Fatalf("%s: %v", x.what, err)
		}
		if is := c.Performed(); len(is) != 2 || is[0]-was[0] != x.on || is[1]-was[1] != x.off {
			t.Errorf("%s: lanes had performed %d and then %d, want %d and %d more", x.what, was, is, x.on, x.off)
		}
	}
}

func put(t *testing.T, c *client.Client, key string, v []byte) error {
	_, err := c.Put(t.Context(), []byte(key), v, client.PutOptions{})
	return err
}
