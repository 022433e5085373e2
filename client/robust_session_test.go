package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// raw is a session that moves bytes by itself, to do what a client never does.
type raw struct {
	r     *rig
	id    uint32
	token []byte
	dev   *rdma.Device
	pd    *rdma.PD
	cq    *rdma.CQ
	mem   *rdma.Memory
	mr    *rdma.MR
	qps   map[uint32]*rdma.QP // by memory node
	m     *dirpb.Map
	stop  context.CancelFunc
	wg    sync.WaitGroup
	pause atomic.Bool // no renewals
}

func (r *rig) raw() *raw {
	t := r.t
	t.Helper()
	x := &raw{r: r, qps: map[uint32]*rdma.QP{}}
	ctx, cancel := context.WithCancel(t.Context())
	x.stop = cancel
	var rep *dirpb.OpenSessionReply
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(r.admin.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
		rep, err = c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "default", Client: "raw"})
		return err
	}))
	x.id, x.token = rep.GetSessionId(), rep.GetToken()
	first := make(chan *dirpb.Map, 1)
	x.wg.Go(func() {
		_ = r.admin.WatchMap(ctx, x.id, 0, func(m *dirpb.Map) error {
			select {
			case first <- m:
			default:
			}
			return nil
		})
	})
	x.wg.Go(func() {
		tick := time.NewTicker(min(time.Duration(rep.GetRenewMillis())*time.Millisecond/2, 20*time.Millisecond))
		defer tick.Stop()
		epoch, number := rep.GetEpoch(), uint64(0)
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !x.pause.Load() {
				_ = r.admin.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
					number++
					now, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: x.id, ReportEpoch: epoch, Number: number})
					epoch = max(epoch, now.GetEpoch()) // its verbs end at once
					return err
				})
			}
		}
	})
	x.m = <-first
	var err error
	d := r.open() // which goes on while another one's goroutine waits
	x.dev = d
	x.pd, err = d.AllocPD()
	check(err)
	x.cq, err = d.CreateCQ(64)
	check(err)
	x.mem, err = d.Alloc(1<<20, rdma.AllocOptions{Name: "raw"})
	check(err)
	x.mr, err = x.pd.RegMR(x.mem, 0, int64(len(x.mem.Bytes)), rdma.AccessLocal)
	check(err)
	for _, n := range x.m.GetNodes() {
		for _, e := range n.GetEndpoints() {
			x.qps[n.GetId()], err = d.Dial(ctx, x.pd, x.cq, e.GetAddr(), append(bytes.Clone(x.token), 0, 0, 0, 0))
			check(err)
		}
	}
	t.Cleanup(x.close)
	return x
}

func (x *raw) close() {
	x.stop()
	x.wg.Wait()
	var errs []error
	for _, q := range x.qps {
		errs = append(errs, q.Close())
	}
	errs = append(errs, x.mr.Deregister(), x.mem.Free(), x.cq.Close(), x.pd.Dealloc(), x.dev.Close())
	if err := errors.Join(errs...); err != nil {
		x.r.t.Error(err)
	}
}

func (x *raw) state() dirpb.SessionLife {
	x.r.t.Helper()
	var rep *dirpb.SessionStateReply
	if err := x.r.admin.Call(x.r.t.Context(), func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
		rep, err = c.SessionState(ctx, &dirpb.SessionStateRequest{SessionId: x.id})
		return err
	}); err != nil {
		x.r.t.Fatal(err)
	}
	return rep.GetLife()
}

// do performs one verb at off of pg's region.
func (x *raw) do(pg uint32, off uint64, wr rdma.WR) {
	x.r.t.Helper()
	if err := x.try(pg, off, wr); err != nil {
		x.r.t.Fatalf("%v at %#x of pg %d: %v", wr.Op, off, pg, err)
	}
}

// try is do for a verb that may be refused.
func (x *raw) try(pg uint32, off uint64, wr rdma.WR) error {
	t := x.r.t
	t.Helper()
	for _, p := range x.m.GetPgs() {
		if p.GetId() != pg {
			continue
		}
		k := p.GetMembers()[0].GetKeys()[0]
		if wr.RemoteAddr, wr.RKey = k.GetIndexBase()+off, k.GetIndexRkey(); off >= p.GetIndexBytes() {
			wr.RemoteAddr, wr.RKey = k.GetHeapBase()+off-p.GetIndexBytes(), k.GetHeapRkey()
		}
		wr.Flags, wr.LKey = rdma.Signaled, x.mr.LKey()
		if n, err := x.qps[p.GetMembers()[0].GetNodeId()].PostSend([]rdma.WR{wr}); n != 1 || err != nil {
			return fmt.Errorf("post: %d, %w", n, err)
		}
		var wc [1]rdma.WC
		eventually(t, func() string {
			if x.cq.Poll(wc[:]) == 0 {
				return "no completion"
			}
			return ""
		})
		if wc[0].Status != driver.Success {
			return &rdma.WCError{WC: wc[0]}
		}
		return nil
	}
	t.Fatalf("no placement group %d", pg)
	return nil
}

func (x *raw) read(pg uint32, off uint64, n int) []byte {
	x.r.t.Helper()
	x.do(pg, off, rdma.WR{Op: rdma.OpRead, Local: x.mem.Bytes[:n]})
	return bytes.Clone(x.mem.Bytes[:n])
}

func (x *raw) write(pg uint32, off uint64, b []byte) {
	x.r.t.Helper()
	x.do(pg, off, rdma.WR{Op: rdma.OpWrite, Local: x.mem.Bytes[:copy(x.mem.Bytes, b)]})
}

// set makes the index word at off w, whatever it was.
func (x *raw) set(pg uint32, off, w uint64) {
	x.r.t.Helper()
	for {
		old := binary.LittleEndian.Uint64(x.read(pg, off, 8))
		x.do(pg, off, rdma.WR{Op: rdma.OpCmpAndSwp, Compare: old, Swap: w, Local: x.mem.Bytes[:8]})
		if binary.LittleEndian.Uint64(x.mem.Bytes) == old {
			return
		}
	}
}

// TestLockOfTheDead holds an insert lock: others wait as long as its owner
// lives, and take it over only when its fence is confirmed.
func TestLockOfTheDead(t *testing.T) {
	r := newRig(t, "tcp", 1, time.Second)
	o := r.options()
	o.OpTimeout = 30 * time.Second
	c := r.client(o)
	ctx := t.Context()
	x := r.raw()
	k := []byte("k")
	loc, err := inside.Of(c).Locate(k)
	if err != nil {
		t.Fatal(err)
	}
	x.set(loc.PG, loc.Home+layout.GroupLockOff, uint64(layout.MakeLock(x.id, 7)))
	short, cancel := context.WithTimeout(ctx, 1300*time.Millisecond)
	defer cancel()
	if _, err := c.Put(short, k, k, client.PutOptions{}); !errors.Is(err, context.DeadlineExceeded) ||
		client.Outcome(err) != rdma.No {
		t.Fatalf("put behind a live owner's lock: %v", err)
	}
	if _, err := c.Get(ctx, k); !errors.Is(err, client.ErrNotFound) {
		t.Fatalf("get behind a live owner's lock: %v", err)
	}
	x.pause.Store(true)
	if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if s := x.state(); s != dirpb.SessionLife_SESSION_FENCED {
		t.Fatalf("the lock was taken over while its owner was %v", s)
	}
}
