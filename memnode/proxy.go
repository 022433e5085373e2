package memnode

import (
	"context"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// A region has one atomic domain: either CPUs or one adapter execute atomics on
// its words. An adapter's read-modify-write is atomic only against its own, so one
// by a CPU between its read and its write would be lost, and the other way round.
// If a device has an adapter that executes atomics, other devices leave theirs
// to it, over a connection of this process to itself.
//
// They go on reading and writing by CPU. Adapter and CPU both move aligned words
// whole; index words change by atomics alone, and a record is complete before an
// atomic names it. The adapter's completion comes after the word has changed in
// memory, so that a CPU reading behind it sees the change.

// loopPrivateSize is the length of such a connection's private data, in bytes:
//
//	0          32          36       40
//	+----------+-----------+--------+
//	| loop key | namespace | number |   little-endian
//	+----------+-----------+--------+
//
//	loop key  random, known to this process alone
//	number    of the attempt to connect, so that one given up cannot be taken
//	          for the one that followed
const (
	loopKeySize     = 32
	loopPrivateSize = loopKeySize + 8
)

// loopPatience bounds waiting for the adapter to execute an atomic, and for a
// connection to it.
const loopPatience = 2 * time.Second

// loop is the way to the adapter for the atomics of one namespace.
type loop struct {
	n         *Node
	namespace uint32
	pd        *rdma.PD // of n.hca, at both ends

	// turn, of capacity 1, is full while somebody executes an atomic; that one
	// alone uses what follows.
	turn   chan struct{}
	mem    *rdma.Memory // the word that an atomic finds, from the first use on
	mr     *rdma.MR
	qp     *rdma.QP // nil: not connected
	cq     *rdma.CQ // of qp
	failed bool     // the last atomic was; logged once

	// Guarded by Node.mu.
	number uint32
	peer   rdma.Peer // the other end of qp
}

// loopLocked gives the namespace's loop, or nil if nobody needs one.
func (n *Node) loopLocked(namespace uint32) (*loop, error) {
	leans := func(d *device) bool { return !d.isAdapter() }
	if n.hca == nil || !slices.ContainsFunc(n.devices, leans) || n.mu.loops[namespace] != nil {
		return n.mu.loops[namespace], nil
	}
	pd, err := n.hca.pdLocked(namespace)
	if err != nil {
		return nil, err
	}
	l := &loop{n: n, namespace: namespace, pd: pd, turn: make(chan struct{}, 1)}
	n.mu.loops[namespace] = l
	return l, nil
}

// atomicsBy tells clients who executes the atomics that come in by d.
func (n *Node) atomicsBy(d *rdma.Device) dirpb.AtomicsBy {
	switch c := d.Caps(); {
	case c.AtomicScope == driver.AtomicHCA:
		return dirpb.AtomicsBy_ATOMICS_BY_NIC
	case n.hca != nil:
		return dirpb.AtomicsBy_ATOMICS_BY_PROXY
	case c.AtomicsByAgent:
		return dirpb.AtomicsBy_ATOMICS_BY_AGENT
	}
	return dirpb.AtomicsBy_ATOMICS_BY_CPU
}

// admitLoop decides on a connection that says it is this process's own. No session
// has it, so no session's fence ends it.
func (n *Node) admitLoop(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
	if subtle.ConstantTimeCompare(r.Private[:loopKeySize], n.loopKey[:]) != 1 {
		return nil, 0, errors.New("private data is not of this process")
	}
	namespace, number := binary.LittleEndian.Uint32(r.Private[loopKeySize:]),
		binary.LittleEndian.Uint32(r.Private[loopKeySize+4:])
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.mu.loops[namespace]
	if l == nil || l.number != number {
		return nil, 0, fmt.Errorf("connection %d to the adapter of namespace %d has been given up", number, namespace)
	}
	l.peer = r.Peer
	return l.pd, rdma.AccessRemoteAtomic, nil
}

// on gives the function that has the adapter execute atomics on mr.
func (l *loop) on(mr *rdma.MR) rdma.AtomicFunc {
	return func(op rdma.Opcode, off, compare, swap uint64) (found uint64, s rdma.Status) {
		l.turn <- struct{}{}
		defer func() { <-l.turn }()
		found, s, err := l.execute(rdma.WR{Op: op, RemoteAddr: mr.Base() + off, RKey: mr.RKey(), Compare: compare,
			Swap: swap})
		switch {
		case err != nil && !l.failed:
			l.n.log.Error("the adapter does not execute atomics that come in by other providers", "namespace",
				l.namespace, "err", err)
		case err == nil && l.failed:
			l.n.log.Info("the adapter executes atomics again", "namespace", l.namespace)
		}
		l.failed = err != nil
		return found, s
	}
}

// execute does one atomic. When it returns, the atomic has happened or never will.
func (l *loop) execute(w rdma.WR) (uint64, rdma.Status, error) {
	if err := l.connect(); err != nil {
		return 0, driver.RemOpErr, err
	}
	w.ID, w.Flags, w.Local, w.LKey = 1, rdma.Signaled, l.mr.Bytes()[:8], l.mr.LKey()
	if n, err := l.qp.PostSend([]rdma.WR{w}); n != 1 {
		return 0, driver.RemOpErr, errors.Join(err, l.endConnection())
	}
	var late <-chan time.Time
	var wcs [1]rdma.WC
	for l.cq.Poll(wcs[:]) == 0 {
		if late == nil {
			late = time.After(loopPatience)
		}
		select {
		case <-l.cq.Ready():
		case <-late:
			return 0, driver.GeneralErr, errors.Join(fmt.Errorf("no completion of %v within %v", w.Op, loopPatience),
				l.endConnection())
		}
	}
	if s := wcs[0].Status; s != driver.Success {
		return 0, s, errors.Join(&rdma.WCError{WC: wcs[0]}, l.endConnection())
	}
	return binary.LittleEndian.Uint64(w.Local), driver.Success, nil
}

// ready connects, so that an adapter which cannot reach itself is noticed before
// anybody depends on it.
func (l *loop) ready() error {
	l.turn <- struct{}{}
	defer func() { <-l.turn }()
	if err := l.connect(); err != nil {
		return fmt.Errorf("%s: connection of this process to itself: %w", l.n.hca.dev.Name(), err)
	}
	return nil
}

// connect makes the connection, if it is missing or broken.
func (l *loop) connect() (err error) {
	if l.qp != nil && l.qp.State() == driver.StateRTS {
		return nil
	}
	if err := l.endConnection(); err != nil {
		return err
	}
	dev := l.n.hca.dev
	if l.mr == nil {
		if l.mem == nil {
			if l.mem, err = dev.Alloc(8, rdma.AllocOptions{Name: "kvd-atomics"}); err != nil {
				return err
			}
		}
		if l.mr, err = l.pd.RegMR(l.mem, 0, 8, rdma.AccessLocal); err != nil {
			return err
		}
	}
	cq, err := dev.CreateCQ(16) // one WR, and room for what a provider keeps for itself
	if err != nil {
		return err
	}
	l.n.mu.Lock()
	l.number++
	l.peer = nil
	private := binary.LittleEndian.AppendUint32(append([]byte(nil), l.n.loopKey[:]...), l.namespace)
	private = binary.LittleEndian.AppendUint32(private, l.number)
	l.n.mu.Unlock()
	ctx, cancel := context.WithTimeout(l.n.ctx, loopPatience)
	defer cancel()
	// The address that clients dial is the one that a certificate is for.
	qp, err := dev.Dial(ctx, l.pd, cq, l.n.hca.endpoint.GetAddr(), private)
	if err != nil {
		return errors.Join(err, cq.Close())
	}
	l.qp, l.cq = qp, cq
	return nil
}

// endConnection ends a connection of which something may be outstanding. It gives up only
// when the node closes, which tries again: an agent that answered while its atomic
// may still land would confirm a fence that is none.
func (l *loop) endConnection() error {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := l.hangUp(l.n.ctx)
		if err == nil || l.n.ctx.Err() != nil {
			return err
		}
		if !l.failed {
			l.failed = true
			l.n.log.Error("cannot confirm that an atomic has ended; trying on", "namespace", l.namespace, "err", err)
		}
		if !l.n.wait(pause, nil) {
			return err
		}
	}
}

// hangUp ends the connection, if there is one. After nil nothing of it can land.
func (l *loop) hangUp(ctx context.Context) error {
	if l.qp == nil {
		return nil
	}
	l.n.mu.Lock()
	p := l.peer
	l.n.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, l.n.o.FenceTimeout)
	defer cancel()
	if err := p.Fence(ctx); err != nil {
		return fmt.Errorf("fence the connection to the adapter: %w", err)
	}
	_ = l.qp.Abort() // nothing is left for it to confirm
	err := l.cq.Close()
	l.qp, l.cq = nil, nil
	return err
}

// close releases everything of the loop, which nobody uses any more.
func (l *loop) close(ctx context.Context) error {
	if err := l.hangUp(ctx); err != nil {
		return fmt.Errorf("namespace %d: %w", l.namespace, err)
	}
	var errs []error
	if l.mr != nil {
		errs = append(errs, l.mr.Deregister())
	}
	if l.mem != nil {
		errs = append(errs, l.mem.Free())
	}
	l.mr, l.mem = nil, nil
	return errors.Join(errs...)
}

// closeLoops releases the connections to the adapter when no agent is left that
// might use one: every peer is fenced, or every listener but the adapter's closed.
func (n *Node) closeLoops(ctx context.Context) error {
	n.mu.Lock()
	loops := make([]*loop, 0, len(n.mu.loops))
	for _, l := range n.mu.loops {
		loops = append(loops, l)
	}
	n.mu.Unlock()
	var errs []error
	for _, l := range loops {
		if err := l.close(ctx); err != nil {
			errs = append(errs, err)
			continue
		}
		n.mu.Lock()
		delete(n.mu.loops, l.namespace)
		n.mu.Unlock()
	}
	return errors.Join(errs...)
}
