package client_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/tcp"
)

// TestCutConnections cuts every TCP connection to the memory nodes again and
// again under load: operations in flight find out what became of them.
func TestCutConnections(t *testing.T) {
	t.Parallel()
	r := newRig(t, "tcp", 2, 5*time.Second)
	c := r.client(r.options())
	other := r.client(r.options())
	l := startLoad(t, c, "", 4, nil)
	defer l.halt()
	cuts := 60
	if testing.Short() {
		cuts = 15
	}
	for i := range cuts {
		l.progress(int64(i % 7 * 20))
		r.nodes[i%2].proxy.cut()
	}
	l.progress(100)
	l.end(c)
	l.end(other) // sees the same
	if s := c.Stats(); s.FreeUnits+s.LiveUnits+s.LimboUnits != s.GrantedUnits {
		t.Errorf("free + live + limbo is not granted: %+v", s)
	}
}

// TestStalledNode lets a memory node fall silent without closing anything: an
// operation ends with its time, says what it knows, and the client goes on when
// the node answers again.
func TestStalledNode(t *testing.T) {
	r := newRig(t, "tcp", 1, 3*time.Second)
	o := r.options()
	o.OpTimeout = 300 * time.Millisecond
	c := r.client(o)
	ctx := t.Context()
	if _, err := c.Put(ctx, []byte("k"), []byte("1"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	r.nodes[0].proxy.stall()
	begin := time.Now()
	_, err := c.Put(ctx, []byte("k"), []byte("2"), client.PutOptions{})
	if !errors.Is(err, client.ErrUnknownOutcome) {
		t.Fatalf("put on a silent node: %v", err)
	}
	if _, err := c.Get(ctx, []byte("k")); !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
		t.Fatalf("get on a silent node: %v", err)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Fatalf("two operations of 300 ms took %v", d)
	}
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := c.Put(short, []byte("k"), []byte("3"), client.PutOptions{}); !errors.Is(
		err, context.DeadlineExceeded) {
		t.Fatalf("put with a deadline: %v", err)
	}
	r.nodes[0].proxy.resume()
	eventually(t, func() string {
		if _, err := c.Put(ctx, []byte("k"), []byte("4"), client.PutOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
	if it, err := c.Get(ctx, []byte("k")); err != nil || string(it.Value) != "4" {
		t.Fatalf("%q, %v", it.Value, err)
	}
}

// TestLeaveSilentNode: whoever waits in the socket of a silent memory node hears of others'
// operations and of the end of its context.
func TestLeaveSilentNode(t *testing.T) {
	r := newRig(t, "tcp", 2, time.Minute)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Replicas: 1})
	d, err := tcp.Open(tcp.Options{PeerTimeout: time.Minute}) // nothing else ends a wait
	if err != nil {
		t.Fatal(err)
	}
	r.devices = append(r.devices, rdma.NewDevice("tcp", d))
	o := r.options()
	o.Devices = r.devices[1:]
	o.OpTimeout, o.Lanes = time.Minute, 1
	c := r.client(o)
	ctx := t.Context()
	var keys [2][]byte // by memory node
	for i := 0; keys[0] == nil || keys[1] == nil; i++ {
		key := []byte(strconv.Itoa(i))
		if _, err := c.Put(ctx, key, []byte("1"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		keys[r.nodeOf(c, key)] = key
	}
	r.nodes[0].proxy.stall()
	defer r.nodes[0].proxy.resume()
	short, cancel := context.WithCancel(ctx)
	waits, ended := make(chan struct{}), make(chan error, 1)
	var once sync.Once
	go func() {
		_, err := c.Get(inside.OnWait(short, func() { once.Do(func() { close(waits) }) }), keys[0])
		ended <- err
	}()
	<-waits
	if it, err := c.Get(ctx, keys[1]); err != nil || string(it.Value) != "1" {
		t.Fatalf("the other memory node's key: %q, %v", it.Value, err)
	}
	select {
	case err := <-ended:
		t.Fatalf("a Get of a silent memory node ended: %v", err)
	default:
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled: %v", err)
	}
}
