package client_test

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma/driver"
)

// between is a device that has something happen amid a chain which READs or WRITEs a long value.
type between struct {
	driver.Device
	next  atomic.Pointer[happening] // nil: nothing more
	dials atomic.Int32
	shown atomic.Pointer[[]byte] // to the memory node by the connection amid whose chain it happens
}

// happening is what happens, and when.
type happening struct {
	of   func(*driver.WR) bool // the WR of the value
	at   hook
	skip atomic.Int32 // chains
	f    func()

	// Of a chain that has been posted: its completion is the moment.
	qp     uint32
	id     uint64
	posted atomic.Bool
}

// hook is a place in such a chain.
type hook uint8

const (
	beforeSlot    hook = iota
	beforeHead         // the slot has been read, or its READ is under way
	beforeValue        // header and key have come; of a PUT, its WRITE has been posted alone
	beforeVerdict      // the chain is over, and its completions have not been seen
	hooks
)

func (h hook) String() string {
	return [...]string{"before the slot", "before the head", "before the value", "before the verdict"}[h]
}

// readsValue, writesValue and views tell the WR of the value of a GET, a PUT and a View.
func readsValue(w *driver.WR) bool  { return w.Op == driver.OpRead && w.Value != nil }
func writesValue(w *driver.WR) bool { return w.Op == driver.OpWrite && w.Value != nil }
func views(w *driver.WR) bool {
	return w.Op == driver.OpRead && (w.Value != nil || len(w.Local) != 8 && len(w.Local) != layout.GroupSize)
}

func (b *between) Dial(ctx context.Context, r driver.DialRequest) (driver.QP, error) {
	switch c := r.CQ.(type) {
	case *waitingCQ:
		r.CQ = c.CQ
	case *betweenCQ:
		r.CQ = c.CQ
	}
	private := bytes.Clone(r.Private)
	q, err := b.Device.Dial(ctx, r)
	b.dials.Add(1)
	if err != nil {
		return nil, err
	}
	return &betweenQP{q, b, private}, nil
}

func (b *between) CreateCQ(depth int) (driver.CQ, error) {
	c, err := b.Device.CreateCQ(depth)
	if err != nil {
		return nil, err
	}
	if w, ok := c.(driver.Waiter); ok {
		return &waitingCQ{betweenCQ{c, b}, w}, nil
	}
	return &betweenCQ{c, b}, nil
}

func (b *between) fire(h *happening) {
	if b.next.CompareAndSwap(h, nil) {
		h.f()
	}
}

type betweenCQ struct {
	driver.CQ
	b *between
}

func (c *betweenCQ) Poll(wcs []driver.WC) int {
	n := c.CQ.Poll(wcs)
	h := c.b.next.Load()
	if h == nil || !h.posted.Load() {
		return n
	}
	for _, wc := range wcs[:n] {
		if wc.QPNum == h.qp && (wc.ID == h.id || wc.Status != driver.Success) {
			c.b.fire(h)
		}
	}
	return n
}

type waitingCQ struct {
	betweenCQ
	driver.Waiter
}

type betweenQP struct {
	driver.QP
	b     *between
	shown []byte
}

func (q *betweenQP) PostSend(wrs []driver.WR) (int, error) {
	h := q.b.next.Load()
	if h == nil || h.posted.Load() {
		return q.QP.PostSend(wrs)
	}
	i := 0
	for i < len(wrs) && !h.of(&wrs[i]) {
		i++
	}
	if i == len(wrs) || h.skip.Add(-1) >= 0 {
		return q.QP.PostSend(wrs)
	}
	q.b.shown.Store(&q.shown)
	switch {
	case h.at == beforeSlot:
		return q.split(h, wrs, 0)
	case h.at == beforeHead:
		return q.split(h, wrs, i)
	case h.at == beforeValue && wrs[i].Op == driver.OpWrite:
		return q.split(h, wrs, i+1)
	case h.at == beforeValue && wrs[i].Value != nil:
		v := wrs[i].Value
		start := v.Start
		v.Start = func(head []byte) (int, uint32) {
			v.Start = start
			q.b.fire(h)
			return start(head)
		}
	case h.at == beforeVerdict:
		last := &wrs[len(wrs)-1]
		if last.Flags&driver.Signaled == 0 { // the device is synchronous
			return q.split(h, wrs, len(wrs))
		}
		h.qp, h.id = q.Num(), last.ID
		h.posted.Store(true)
	}
	return q.QP.PostSend(wrs)
}

// split has it happen before the i-th WR is posted.
func (q *betweenQP) split(h *happening, wrs []driver.WR, i int) (n int, err error) {
	if i > 0 {
		n, err = q.QP.PostSend(wrs[:i])
	}
	q.b.fire(h)
	if n < i || i == len(wrs) {
		return n, err
	}
	n, err = q.QP.PostSend(wrs[i:])
	return i + n, err
}

func (q *betweenQP) Abort() error {
	if a, ok := q.QP.(driver.Aborter); ok {
		return a.Abort()
	}
	return q.QP.Close()
}

func (q *betweenQP) AtomicsByAgent() bool {
	a, ok := q.QP.(driver.AgentAtomics)
	return ok && a.AtomicsByAgent()
}

// Map is driver.Mapper, of a device whose capabilities have it.
func (q *betweenQP) Map(rkey, addr uint64, n int) (*driver.Mapping, bool, error) {
	return q.QP.(driver.Mapper).Map(rkey, addr, n)
}

// fencer is the device of a memory node, which can end the connections of one session.
type fencer struct {
	driver.Device
	mu    sync.Mutex
	peers map[string][]driver.Peer // by what they have shown
}

func (f *fencer) Listen(addr string, o driver.ListenOptions) (driver.Listener, error) {
	accept := o.Accept
	o.Accept = func(r driver.ConnRequest) (driver.PD, driver.Access, error) {
		private := string(r.Private)
		pd, a, err := accept(r)
		if err == nil {
			f.mu.Lock()
			f.peers[private] = append(f.peers[private], r.Peer)
			f.mu.Unlock()
		}
		return pd, a, err
	}
	return f.Device.Listen(addr, o)
}

// cut fences all connections that have shown private.
func (f *fencer) cut(ctx context.Context, private []byte) error {
	f.mu.Lock()
	peers := f.peers[string(private)]
	delete(f.peers, string(private))
	f.mu.Unlock()
	if len(peers) == 0 {
		return errors.New("there is no connection to cut")
	}
	var errs []error
	for _, p := range peers {
		errs = append(errs, p.Fence(ctx))
	}
	return errors.Join(errs...)
}
