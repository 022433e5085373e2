package memnode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
)

// making is a region whose memory a goroutine of its own takes from the system and registers with every device. For
// gigabytes that lasts seconds, as an adapter's driver pins each page. Meanwhile other regions are made, published and
// dropped.
type making struct {
	want   *dirpb.WantRegion
	r      *region
	cancel context.CancelFunc
	err    error
}

// mostTurns bounds how many processors clear pages at a time, of whichever regions: their parts take turns, so
// that a small region does not wait for a large one.
const mostTurns = 4

// saidBytes is the size from which on the log tells of a region when its making begins, too.
const saidBytes = 1 << 30

// makeLocked has the memory of r, whose share of the node's is accounted for, taken and registered. The outcome comes
// by made, also when ctx ends.
func (n *Node) makeLocked(ctx context.Context, reg *registration, r *region, made chan<- *making) {
	m := &making{want: r.want, r: r}
	ctx, m.cancel = context.WithCancel(ctx)
	n.mu.making[r.want.GetPgId()] = m
	if n.o.Populate && r.bytes >= saidBytes {
		n.log.Info("taking the memory of a region", "pg", r.want.GetPgId(), "namespace", r.want.GetNamespaceId(),
			"bytes", r.bytes)
	}
	go func() {
		began := time.Now()
		m.err = n.allocate(ctx, r)
		if m.err != nil && ctx.Err() == nil && n.dropRescued("a region gets no memory beside it") {
			m.err = n.allocate(ctx, r)
		}
		if m.err = cmp.Or(m.err, ctx.Err()); m.err == nil {
			m.err = n.prepare(reg, r, false)
		}
		r.took = time.Since(began).Round(time.Millisecond)
		m.cancel()
		made <- m
	}()
}

// takeMade makes what m got a region, or gives it back if it is wanted no longer.
func (n *Node) takeMade(reg *registration, m *making, wanted bool) {
	if !wanted {
		m.err = cmp.Or(m.err, context.Canceled)
	}
	pg := m.want.GetPgId()
	n.mu.Lock()
	delete(n.mu.making, pg)
	n.mu.Unlock()
	err := n.finishRegion(reg, m.r, false, m.err)
	if !wanted || errors.Is(m.err, context.Canceled) { // wanted again, perhaps
		n.log.Info("the memory of a region is wanted no longer", "pg", pg, "bytes", m.r.bytes, "took", m.r.took)
		n.retryNow() // there is room for others now
		err = nil
	}
	n.outcome(pg, m.want.GetNamespaceId(), "make", err)
}

// endMaking gives back all memory that is being taken.
func (n *Node) endMaking(reg *registration, made <-chan *making) {
	n.mu.Lock()
	left := len(n.mu.making)
	for _, m := range n.mu.making {
		m.cancel()
	}
	n.mu.Unlock()
	for ; left > 0; left-- {
		n.takeMade(reg, <-made, false)
	}
}

// allocate gives r memory that is zero; ctx ends it between two parts.
func (n *Node) allocate(ctx context.Context, r *region) (err error) {
	w := r.want
	o := rdma.AllocOptions{Name: regionName(w.GetPgId()), HugePageBytes: r.pageBytes, Lock: n.o.Lock}
	if n.o.Populate {
		o.Populate = func(take func() error) error {
			select {
			case n.turns <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
			defer func() { <-n.turns }()
			if err := ctx.Err(); err != nil {
				return err
			}
			return take()
		}
	}
	if n.o.Keeper == nil {
		alloc := n.allocator()
		o.Shared = alloc.Name() == "shm"
		r.mem, err = alloc.Alloc(int64(w.GetRegionBytes()), o)
		return err
	}
	item := fmt.Sprintf("%s%d/%016x", RegionItems, w.GetPgId(), dirpb.RandomID())
	if r.mem, err = n.allocItem(item, int64(w.GetRegionBytes()), o); err == nil {
		r.item = item
	}
	return err
}
