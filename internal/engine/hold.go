package engine

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma"
)

// Hold is what remains of a GET whose caller looks at the value where it is. To the store that GET is in flight until
// the Hold is over: renewals report the reclaim epoch in which it began (OldestHeld). So its bytes do not change (I4).
// A Hold is over for good when it is released or expires, whichever is first, and its state says which. It expires
// before a report that does not count it is sent. It expires before a map that changes its placement group is in
// force, and at the session's end. Its caller learns that on Release, after its last look at the bytes. A lease that
// is over by then makes them worth nothing, as after any READ.
type Hold struct {
	For int64 // how long its caller wants it, nanoseconds; set before the GET

	core  *Core // nil: the GET is not over
	state atomic.Uint32
	// The rest is set by keep, under the table's mutex.
	epoch      uint64 // at the start of the GET; MaxUint64: its caller has a copy
	pg         uint32
	pgEpoch    uint32
	generation uint32
	hash       uint64
	from       int64 // Options.Nanos
	bytes      int
	shown      []*rdma.Mapping
	one        [1]*rdma.Mapping // shown, if it is one
	onEnd      func()           // runs before whatever the end allows; nil: nothing
}

const (
	holdOn uint32 = iota
	holdReleased
	holdExpired
)

const (
	// mostHolds is the default of Options.MostHolds.
	mostHolds = 16
	// shortHold is how old a Hold may become while memory is short, nanoseconds.
	shortHold = int64(100e6)
)

// Errors with which a GET in place ends.
var (
	// ErrHolds: the session has as many Holds as it may have.
	ErrHolds = errors.New("too many views")
	// ErrMapChanged: its placement group has changed meanwhile. It may be tried again at once.
	ErrMapChanged = errors.New("placement group has changed")
)

// Keeper is the [Asker] of a GET in place.
type Keeper interface {
	// Keep is the Hold to be, in memory of the caller. The engine has it from then on.
	Keep() *Hold
}

// holds are the Holds of a session that are not released.
type holds struct {
	sync.Mutex
	list   []*Hold
	bytes  int
	summed [1 << 8]summed // see Task.SumShown
}

// summed is a CRC of bytes in place.
type summed struct {
	pg, pgEpoch, generation uint32
	crc, sum                uint32
	n                       int
	off, version            uint64
	at                      int64 // Options.Nanos
}

// summedFor is how long a CRC is not taken again, nanoseconds.
const summedFor = int64(10e9)

// Show is index.Env. The Task has what it shows until its end.
func (t *Task) Show(o *index.Op, off uint64, n int) []byte {
	l := t.lane
	pg := l.view.PG(o.Route.PG.ID)
	if pg == nil || pg.Epoch != o.Route.PG.Epoch || n <= 0 {
		return nil
	}
	r := pg.Reader()
	c := l.connOf(pg, r)
	if c == nil || !c.caps.Maps {
		return nil
	}
	k := l.keysOf(c, pg, r)
	m, err := c.qp.Map(k.HeapRKey, k.HeapBase+off-pg.IndexBytes, n)
	if err != nil {
		return nil // a READ tells why
	}
	t.shown = append(t.shown, m)
	return m.Bytes
}

// SumShown is index.Env. It remembers some CRCs for a while. A version lies in its place unchanged, and a CRC that is
// not of these bytes fits no header.
func (t *Task) SumShown(o *index.Op, off, version uint64, crc uint32, b []byte) uint32 {
	c, pg := t.lane.core, o.Route.PG
	key := summed{pg: pg.ID, pgEpoch: pg.Epoch, generation: pg.Generation, crc: crc, n: len(b), off: off,
		version: version}
	// Chunks of a value have one version, and lie at distances that are alike.
	x := &c.holds.summed[(off/layout.UnitSize^version)*0x9e3779b97f4a7c15>>56]
	now := c.opts.Nanos()
	c.holds.Lock()
	was := *x
	c.holds.Unlock()
	key.sum, key.at = was.sum, was.at
	if was == key && now-was.at < summedFor {
		return was.sum
	}
	key.sum, key.at = layout.ValueCRC(crc, b), now
	c.holds.Lock()
	*x = key
	c.holds.Unlock()
	return key.sum
}

// hideShown gives back what Show has shown.
func (t *Task) hideShown() {
	for i, m := range t.shown {
		m.Release()
		t.shown[i] = nil
	}
	t.shown = t.shown[:0]
}

// keep makes a Hold for op, a GET in place that has succeeded. t is its Task, nil if it had none.
func (l *Lane) keep(op *Op, t *Task) error {
	k, ok := op.Asker.(Keeper)
	if !ok {
		return nil
	}
	if t != nil {
		return l.Hold(t, k.Keep())
	}
	h := k.Keep()
	h.epoch, h.hash = math.MaxUint64, op.Hash
	s := l.view.ShardOf(op.Hash)
	if s == nil {
		return ErrMapChanged
	}
	return l.core.hold(h, &s.PG.PG)
}

// Hold makes h the Hold of t, a GET in place that has succeeded. Task.Done calls it: then the reclaim epoch in which t
// began is published for the lane still.
func (l *Lane) Hold(t *Task, h *Hold) error {
	h.epoch, h.hash = math.MaxUint64, t.Op.Hash
	if t.Op.Part.Shown {
		h.epoch, h.shown = t.epoch, t.shown
		for _, m := range h.shown {
			h.bytes += len(m.Bytes)
		}
	}
	if err := l.core.hold(h, t.Op.Route.PG); err != nil {
		h.bytes, h.shown = 0, nil
		return err
	}
	switch {
	case len(h.shown) == 1:
		h.one[0] = h.shown[0]
		h.shown, t.shown = h.one[:], t.shown[:0]
	case len(h.shown) > 0:
		t.shown = nil // they are h's now
	}
	return nil
}

// hold puts h, of a GET that found its key in pg, into the table.
func (c *Core) hold(h *Hold, pg *index.PG) error {
	c.holds.Lock()
	defer c.holds.Unlock()
	h.from = c.opts.Nanos()
	switch {
	case c.dead.Load() || !c.LeaseValid():
		return ErrLease
	case len(c.holds.list) >= c.opts.MostHolds:
		return fmt.Errorf("%w: %d of the session are not released", ErrHolds, len(c.holds.list))
	case h.bytes > c.opts.HoldBytes-c.holds.bytes:
		return fmt.Errorf("%w: %s of values are not released, %s more are wanted, at most %s are allowed", ErrHolds,
			units.Bytes(c.holds.bytes), units.Bytes(h.bytes), units.Bytes(c.opts.HoldBytes))
	}
	h.pg, h.pgEpoch, h.generation = pg.ID, pg.Epoch, pg.Generation
	if !h.stands(c.View()) {
		return ErrMapChanged
	}
	h.core = c
	h.state.Store(holdOn)
	c.holds.list = append(c.holds.list, h)
	c.holds.bytes += h.bytes
	return nil
}

// stands reports whether the bytes of h are untouched by what v changes: its placement group is active and as it was,
// and its key's shard is still in it.
func (h *Hold) stands(v *View) bool {
	pg, s := v.PG(h.pg), v.ShardOf(h.hash)
	return pg != nil && pg.Active && pg.Epoch == h.pgEpoch && pg.Generation == h.generation && s != nil &&
		(s.PG == pg || s.ChildPG == pg)
}

// expireLocked ends h, unless it is over.
func (h *Hold) expireLocked() {
	if h.state.CompareAndSwap(holdOn, holdExpired) && h.onEnd != nil {
		h.onEnd()
	}
}

// endHoldsLocked expires those that f is true of.
func (c *Core) endHoldsLocked(f func(*Hold) bool) {
	for _, h := range c.holds.list {
		if f(h) {
			h.expireLocked()
		}
	}
}

// OldestHeld expires those that are due, and gives the least reclaim epoch at the start of a Hold that is not over. A
// renewal asks after it has asked all lanes, since a GET ends when there is a Hold in its place. It reports no later
// epoch. A Hold is due when its caller's time for it is over, or when it is 100 ms old and memory is short.
func (c *Core) OldestHeld() (epoch uint64, ok bool) {
	c.holds.Lock()
	defer c.holds.Unlock()
	now := c.opts.Nanos()
	c.endHoldsLocked(func(h *Hold) bool {
		age := now - h.from
		return age >= h.For || age >= shortHold && h.epoch != math.MaxUint64 && (c.Short(h.pg) || c.Exhausted(h.pg))
	})
	for _, h := range c.holds.list {
		if h.state.Load() == holdOn && h.epoch != math.MaxUint64 && (!ok || h.epoch < epoch) {
			epoch, ok = h.epoch, true
		}
	}
	return epoch, ok
}

// Holds is how many Holds are not released.
func (c *Core) Holds() int {
	c.holds.Lock()
	defer c.holds.Unlock()
	return len(c.holds.list)
}

// Stands reports whether what was read of h's bytes before the call was the value's. Methods of a Hold belong to one
// goroutine at a time.
func (h *Hold) Stands() bool {
	// A read-modify-write: what was read before it was read before any expiry that it does not see.
	return h.state.CompareAndSwap(holdOn, holdOn) && h.core.LeaseValid()
}

// Where finds a part of h's bytes in the memory that they are shown of: by a descriptor and an offset. The descriptor
// is the provider's until Release. ok is false if there is none.
func (h *Hold) Where(part []byte) (fd int, off int64, ok bool) {
	p := uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	for _, m := range h.shown {
		at := p - uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes)))
		if at < uintptr(len(m.Bytes)) && m.FD >= 0 {
			return m.FD, m.Off + int64(at), true
		}
	}
	return -1, 0, false
}

// OnEnd has f called before h's bytes may change, perhaps by another goroutine: by Release, too. f must not block. It
// is false, and f is not called, if h is over. left is for how long the lease goes on at least, nanoseconds.
func (h *Hold) OnEnd(f func()) (left int64, ok bool) {
	h.core.holds.Lock()
	defer h.core.holds.Unlock()
	left = h.core.leaseEnd.Load() - h.core.opts.Nanos()
	if h.state.Load() != holdOn || left <= 0 {
		return 0, false
	}
	h.onEnd = f
	return left, true
}

// Release ends h and gives its bytes back, which must not be touched any more. It reports what Stands would have. Only
// the first call counts. It does nothing for a Hold that there never was.
func (h *Hold) Release() bool {
	if h.core == nil {
		return false
	}
	c := h.core
	c.holds.Lock()
	if h.onEnd != nil {
		h.onEnd() // first: once the state has changed no report counts h
		h.onEnd = nil
	}
	c.holds.Unlock()
	ok := h.state.CompareAndSwap(holdOn, holdReleased) && h.core.LeaseValid()
	c.holds.Lock()
	for i, x := range c.holds.list {
		if x == h {
			last := len(c.holds.list) - 1
			c.holds.list[i], c.holds.list[last] = c.holds.list[last], nil
			c.holds.list = c.holds.list[:last]
			c.holds.bytes -= h.bytes
			break
		}
	}
	c.holds.Unlock()
	for _, m := range h.shown {
		m.Release()
	}
	h.shown = nil
	if invariants.On {
		invariants.Assert(h.state.Load() != holdOn, "session %d: released and not over", c.opts.Session)
	}
	return ok
}
