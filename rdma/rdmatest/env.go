package rdmatest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Patience bounds every wait of the suite. No case comes near it unless the
// provider hangs.
const Patience = time.Minute

// All are every remote right.
const All = rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic

// Env is one memory node: a PD of the passive device and a listener that admits
// everybody to it. It closes what it made when the test ends, devices last, and
// fails the test if any of that reports an error.
type Env struct {
	H  Harness
	T  testing.TB
	PD *rdma.PD

	// Accept, if set before a dial, replaces admitting everybody with All.
	Accept func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error)

	arenas   bool // Values lie in Arenas
	listener rdma.Listener
	undo     []func() error

	mu struct {
		sync.Mutex
		peers  []rdma.Peer
		closed map[rdma.Peer]int
	}
	changed chan struct{} // capacity 1: a Closed callback ran
}

// NewEnv prepares the passive side. It does not listen until the first dial.
func NewEnv(t testing.TB, h Harness) *Env {
	t.Helper()
	e := &Env{H: h, T: t, changed: make(chan struct{}, 1)}
	e.mu.closed = make(map[rdma.Peer]int)
	t.Cleanup(e.close)
	e.PD = e.NewPD(h.Passive)
	return e
}

func (e *Env) close() {
	for i := len(e.undo) - 1; i >= 0; i-- {
		if err := e.undo[i](); err != nil {
			e.T.Errorf("cleaning up: %v", err)
		}
	}
	if err := e.H.Active.Close(); err != nil {
		e.T.Errorf("closing the active device: %v", err)
	}
	if e.H.Passive == e.H.Active {
		return
	}
	if err := e.H.Passive.Close(); err != nil {
		e.T.Errorf("closing the passive device: %v", err)
	}
}

// Undo runs f before everything made earlier is closed, once.
func (e *Env) Undo(what string, f func() error) (now func() error) {
	var once sync.Once
	var err error
	do := func() error {
		once.Do(func() {
			if err = f(); err != nil {
				err = fmt.Errorf("%s: %w", what, err)
			}
		})
		return err
	}
	e.undo = append(e.undo, do)
	return do
}

// Must fails the test on err.
func (e *Env) Must(err error) {
	e.T.Helper()
	if err != nil {
		e.T.Fatal(err)
	}
}

// NewPD makes a PD of d.
func (e *Env) NewPD(d *rdma.Device) *rdma.PD {
	e.T.Helper()
	pd, err := d.AllocPD()
	e.Must(err)
	e.Undo("dealloc pd", pd.Dealloc)
	return pd
}

// Region registers n zeroed bytes of pd's device. revoke deregisters it before
// the end of the test.
func (e *Env) Region(pd *rdma.PD, n int64, a rdma.Access) (mr *rdma.MR, revoke func() error) {
	e.T.Helper()
	m, err := pd.Device().Alloc(n, rdma.AllocOptions{Name: "rdmatest", Shared: true})
	e.Must(err)
	e.Undo("free", m.Free)
	mr, err = pd.RegMR(m, 0, n, a)
	e.Must(err)
	return mr, e.Undo("deregister", mr.Deregister)
}

// Memory is a Region of the passive PD.
func (e *Env) Memory(n int64, a rdma.Access) *rdma.MR {
	e.T.Helper()
	mr, _ := e.Region(e.PD, n, a)
	return mr
}

// Listener is started by the first use.
func (e *Env) Listener() rdma.Listener {
	e.T.Helper()
	if e.listener != nil {
		return e.listener
	}
	l, err := e.H.Passive.Listen(e.H.Addr, rdma.ListenOptions{
		Accept: func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			pd, a := e.PD, All
			if e.Accept != nil {
				var err error
				if pd, a, err = e.Accept(r); err != nil {
					return nil, 0, err
				}
			}
			e.mu.Lock()
			defer e.mu.Unlock()
			e.mu.peers = append(e.mu.peers, r.Peer)
			return pd, a, nil
		},
		Closed: func(p rdma.Peer) {
			e.mu.Lock()
			e.mu.closed[p]++
			e.mu.Unlock()
			select {
			case e.changed <- struct{}{}:
			default:
			}
		},
	})
	e.Must(err)
	e.listener = l
	e.Undo("close listener", l.Close)
	return l
}

// Peers are the connections accepted so far, in order.
func (e *Env) Peers() []rdma.Peer {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]rdma.Peer(nil), e.mu.peers...)
}

// ClosedCalls is how often Closed was called for p.
func (e *Env) ClosedCalls(p rdma.Peer) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mu.closed[p]
}

// WaitClosed returns when Closed has been called for p.
func (e *Env) WaitClosed(p rdma.Peer) {
	e.T.Helper()
	limit := time.NewTimer(Patience)
	defer limit.Stop()
	for e.ClosedCalls(p) == 0 {
		if e.H.Drive != nil {
			e.H.Drive()
		}
		select {
		case <-e.changed:
		case <-limit.C:
			e.T.Fatalf("Closed was not called for %s within %v", p.Remote(), Patience)
		}
	}
}

// Ctx bounds one control call.
func (e *Env) Ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	e.T.Cleanup(cancel)
	return ctx
}

// Lane is one QP with a PD, a CQ and local memory of its own.
type Lane struct {
	E     *Env
	PD    *rdma.PD
	CQ    *rdma.CQ
	QP    *rdma.QP
	Local *rdma.MR
	// Close closes the QP, once.
	Close func() error

	used   int
	nextID uint64
	head   []byte // of cases that need one
	wcs    []rdma.WC
}

// LaneBytes is the local memory of a Lane from Env.Dial.
const LaneBytes = 64 << 10

// Dial makes a Lane to the Env's listener.
func (e *Env) Dial() *Lane {
	e.T.Helper()
	return e.DialWith(LaneBytes, nil)
}

// DialWith makes a Lane with n bytes of local memory.
func (e *Env) DialWith(n int64, private []byte) *Lane {
	e.T.Helper()
	addr := e.Listener().Addr()
	l := e.Unconnected(n)
	qp, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, addr, private)
	e.Must(err)
	l.QP, l.Close = qp, e.Undo("close qp", qp.Close)
	return l
}

// Unconnected is a Lane without its QP, for dials that are to fail.
func (e *Env) Unconnected(n int64) *Lane {
	e.T.Helper()
	l := &Lane{E: e, PD: e.NewPD(e.H.Active), nextID: 1 << 32}
	l.Local, _ = e.Region(l.PD, n, rdma.AccessLocal)
	cq, err := e.H.Active.CreateCQ(2*e.H.Active.Caps().MaxSendWR + 16)
	e.Must(err)
	e.Undo("close cq", cq.Close)
	l.CQ = cq
	return l
}

// Buf takes n bytes, 8-byte aligned, of the local memory. Nothing returns them.
func (l *Lane) Buf(n int) []byte {
	b := l.Local.Bytes()
	if n > len(b)-l.used {
		panic(fmt.Sprintf("rdmatest: lane of %d bytes has %d left, want %d", len(b), len(b)-l.used, n))
	}
	p := b[l.used : l.used+n : l.used+n]
	l.used += (n + 7) &^ 7
	return p
}

// Word takes one aligned word of local memory.
func (l *Lane) Word() []byte { return l.Buf(8) }

// Read, Write, CAS and Add build signaled WRs at byte off of mr.
func (l *Lane) Read(mr *rdma.MR, off uint64, local []byte) rdma.WR {
	return l.wr(rdma.OpRead, mr, off, local, 0, 0)
}

// Write: see Read.
func (l *Lane) Write(mr *rdma.MR, off uint64, local []byte) rdma.WR {
	return l.wr(rdma.OpWrite, mr, off, local, 0, 0)
}

// CAS is a CMP_AND_SWP; see Read.
func (l *Lane) CAS(mr *rdma.MR, off uint64, local []byte, compare, swap uint64) rdma.WR {
	return l.wr(rdma.OpCmpAndSwp, mr, off, local, compare, swap)
}

// Add is a FETCH_ADD; see Read.
func (l *Lane) Add(mr *rdma.MR, off uint64, local []byte, n uint64) rdma.WR {
	return l.wr(rdma.OpFetchAdd, mr, off, local, 0, n)
}

func (l *Lane) wr(op rdma.Opcode, mr *rdma.MR, off uint64, local []byte, compare, swap uint64) rdma.WR {
	return rdma.WR{Op: op, Flags: rdma.Signaled, Local: local, LKey: l.Local.LKey(),
		RemoteAddr: mr.Base() + off, RKey: mr.RKey(), Compare: compare, Swap: swap}
}

// Post posts wrs as one chain and returns the ID of the first; the others
// follow. All must be taken.
func (l *Lane) Post(wrs ...rdma.WR) (first uint64, err error) {
	first = l.nextID
	for i := range wrs {
		wrs[i].ID = l.nextID
		l.nextID++
	}
	n, err := l.QP.PostSend(wrs)
	if err == nil && n != len(wrs) {
		err = errors.New("nil error")
	}
	if err != nil {
		return first, fmt.Errorf("PostSend took %d of %d: %w", n, len(wrs), err)
	}
	return first, nil
}

// Wait polls until the WC of the WR with that ID, and returns the WCs polled,
// that one last.
func (l *Lane) Wait(id uint64) ([]rdma.WC, error) {
	l.wcs = l.wcs[:0]
	var one [1]rdma.WC
	var limit *time.Timer
	for {
		if l.CQ.Poll(one[:]) == 1 {
			l.wcs = append(l.wcs, one[0])
			if one[0].ID == id {
				return l.wcs, nil
			}
			continue
		}
		if limit == nil {
			limit = time.NewTimer(Patience)
			defer limit.Stop()
		}
		if l.E.H.Drive != nil {
			l.E.H.Drive()
			select {
			case <-limit.C:
				return l.wcs, l.lost(id)
			default:
			}
			continue
		}
		if l.E.H.Wait {
			select {
			case <-limit.C:
				return l.wcs, l.lost(id)
			default:
			}
			if l.CQ.Wait(Patience) {
				continue
			}
		}
		select {
		case <-l.CQ.Ready():
		case <-limit.C:
			return l.wcs, l.lost(id)
		}
	}
}

func (l *Lane) lost(id uint64) error {
	return fmt.Errorf("qp %d state %d: no WC of WR %#x within %v; polled %+v", l.QP.Num(), l.QP.State(), id, Patience,
		l.wcs)
}

// Do posts wrs as one chain, and waits for the WC of the last one, which must be signaled or fail. It returns
// all WCs with IDs that index wrs.
func (l *Lane) Do(wrs ...rdma.WR) ([]rdma.WC, error) {
	first, err := l.Post(wrs...)
	if err != nil {
		return nil, err
	}
	got, err := l.Wait(first + uint64(len(wrs)) - 1)
	if err != nil {
		return nil, err
	}
	for i := range got {
		if got[i].QPNum != l.QP.Num() {
			return nil, fmt.Errorf("WC %+v on qp %d", got[i], l.QP.Num())
		}
		got[i].ID -= first
		if got[i].ID >= uint64(len(wrs)) || got[i].Op != wrs[got[i].ID].Op {
			return nil, fmt.Errorf("WC %+v (index relative to the chain) matches none of its %d WRs", got[i], len(wrs))
		}
	}
	return got, nil
}

// OK is Do for a chain in which every WR succeeds.
func (l *Lane) OK(wrs ...rdma.WR) error {
	wcs, err := l.Do(wrs...)
	if err != nil {
		return err
	}
	for _, wc := range wcs {
		if wc.Status != driver.Success {
			return &rdma.WCError{WC: wc}
		}
	}
	return nil
}

// Le reads a little-endian word of b.
func Le(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

// PutLe writes one.
func PutLe(b []byte, v uint64) { binary.LittleEndian.PutUint64(b, v) }

// Fill sets every byte of b.
func Fill(b []byte, v byte) {
	if len(b) > 0 {
		b[0] = v
	}
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// Pattern fills b with bytes that depend on seed and position.
func Pattern(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8)*31 ^ seed
	}
}

// Each runs f for 0..n-1 in goroutines of their own, waits for all, and joins
// their errors.
func Each(n int, f func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
