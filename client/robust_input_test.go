package client_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// TestBadInput gives arguments that cannot work.
func TestBadInput(t *testing.T) {
	r := newRig(t, "tcp", 1, 5*time.Second)
	ctx := t.Context()
	c := r.client(r.options())

	o := r.options()
	o.Namespace = "nowhere"
	if _, err := client.Open(ctx, o); !errors.Is(err, client.ErrNoNamespace) ||
		!strings.Contains(err.Error(), "nowhere") {
		t.Errorf("unknown namespace: %v", err)
	}
	// Nobody listens there, and somebody who is no directory.
	deaf := testutil.Listen(t)
	for what, addr := range map[string]string{"closed port": freeAddr(t), "silent listener": deaf.Addr().String()} {
		o := r.options()
		o.Directory = []string{addr}
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		begin := time.Now()
		_, err := client.Open(short, o)
		cancel()
		if !errors.Is(err, client.ErrUnavailable) || !strings.Contains(err.Error(), addr) {
			t.Errorf("%s: %v", what, err)
		}
		if d := time.Since(begin); d > 5*time.Second {
			t.Errorf("%s: %v for a context of 300 ms", what, d)
		}
	}
	o = r.options()
	o.Directory = []string{"no port"}
	if _, err := client.Open(ctx, o); err == nil || !strings.Contains(err.Error(), "no port") {
		t.Errorf("malformed address: %v", err)
	}
	for _, bad := range []client.Options{
		{Devices: r.devices},
		{Directory: []string{"127.0.0.1:1"}, Provider: "rocket"},
		{Directory: []string{"127.0.0.1:1"}, Devices: r.devices, Lanes: 99},
		{Directory: []string{"127.0.0.1:1"}, Devices: r.devices, OpTimeout: -1},
		{Directory: []string{"127.0.0.1:1"}, Devices: r.devices, Provider: "verbs"},
	} {
		if _, err := client.Open(ctx, bad); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}

	long, huge := make([]byte, client.MaxKeyLen+1), make([]byte, client.DefaultMaxValueLen+1)
	k := []byte("k")
	if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"get, no key":        func() error { _, err := c.Get(ctx, nil); return err }(),
		"get, long key":      func() error { _, err := c.Get(ctx, long); return err }(),
		"get into, long key": func() error { _, err := c.GetInto(ctx, long, nil); return err }(),
		"put, long value":    func() error { _, err := c.Put(ctx, k, huge, client.PutOptions{}); return err }(),
		"put, TTL":           func() error { _, err := c.Put(ctx, k, k, client.PutOptions{TTL: -1}); return err }(),
		"delete, long key":   c.Delete(ctx, long),
		"incr, long key":     func() error { _, err := c.Incr(ctx, long, 1); return err }(),
		"touch, TTL":         c.Touch(ctx, k, -1),
		"multi-get":          c.MultiGet(ctx, [][]byte{long})[0].Err,
		"multi-put":          c.MultiPut(ctx, []client.KV{{Key: k, Value: huge}})[0].Err,
		"multi-delete":       c.MultiDelete(ctx, [][]byte{nil})[0].Err,
	} {
		if !errors.Is(err, client.ErrInvalid) || client.Outcome(err) != rdma.No {
			t.Errorf("%s: %v", what, err)
		}
	}
	if it, err := c.Get(ctx, k); err != nil || string(it.Value) != "k" {
		t.Errorf("nothing of it happened, but k is %q, %v", it.Value, err)
	}
	// A good key beside a bad one.
	if rs := c.MultiGet(ctx, [][]byte{long, k}); rs[1].Err != nil || string(rs[1].Value) != "k" {
		t.Errorf("multi-get: %q, %v", rs[1].Value, rs[1].Err)
	}
}

// TestCloseUnderLoad closes clients while goroutines use them: every operation
// ends with an answer or ErrClosed, and what was acknowledged is there.
func TestCloseUnderLoad(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 1, 5*time.Second)
			check := r.client(r.options())
			for round := range 5 {
				c, err := client.Open(t.Context(), r.options())
				if err != nil {
					t.Fatal(err)
				}
				l := startLoad(t, c, fmt.Sprintf("%d/", round), 4, func(err error) bool {
					return errors.Is(err, client.ErrClosed)
				})
				l.progress(50)
				if err := c.Close(); err != nil {
					t.Error(err)
				}
				if _, err := c.Get(t.Context(), []byte("k")); !errors.Is(err, client.ErrClosed) {
					t.Errorf("get after Close: %v", err)
				}
				l.end(check)
				for _, pg := range r.status().GetMap().GetPgs() {
					if pg.GetEpoch() != 1 {
						t.Fatalf("the machine was too busy for this test: a memory node lost its lease: %v", pg)
					}
				}
			}
		})
	}
}

// scanned is the error that ends a scan.
func scanned(kvs iter.Seq2[client.KV, error]) error {
	for _, err := range kvs {
		if err != nil {
			return err
		}
	}
	return nil
}
