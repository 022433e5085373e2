// Package heap allocates remote memory on the client's side. It carves the runs that the directory granted to one
// session in one placement group into places for records. It takes the places back when their life has ended. It
// posts no verb, reads no clock, asks the directory for nothing and never touches the memory itself. Its caller
// decides when to ask for another run, and when a place may be reused at all ([Limbo] holds a place until then).
//
// Start with [Heap], which owns the memory, [Cache], which a lane puts in front of it, and [Place]. A Heap's
// methods may be called concurrently. A Cache and a Limbo belong to one goroutine each. No method keeps a slice it
// was passed.
//
// A slot word repeats only if the same start unit is linked with the same ver. So a Heap remembers for every start
// unit the ver of its next life. Two kinds of memory follow from that:
//
//   - Own memory lies in a run granted to this session. Every ver in it is known, so it is cut at any unit and
//     merged again freely. This holds only while the directory grants no part of the run to anyone else before this
//     session has closed. It must not grant even a part that another session hands back.
//   - A foreign place lies elsewhere: this session unlinked its record. Only its start unit's ver is known, so it
//     is reused whole or not at all, or goes home. TakeForeign gives it up and, in the session that it was granted
//     to, Receive takes it in.
//
// The algorithm is two-level segregated fit with immediate coalescing (Masmano et al., "TLSF: a New Dynamic Memory
// Allocator for Real-Time Systems", ECRTS 2004). Its headers are kept aside, since the memory is elsewhere, and its
// bins are ordered by address. The magazines in front of it are Bonwick's ("Magazines and Vmem", USENIX ATC 2001).
package heap

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

const (
	// ExtentUnits is the size of an extent; no run and no place crosses the
	// boundary between two.
	ExtentUnits = 1 << 18
	// MaxUnits is the largest place.
	MaxUnits = 1 << 16

	verMask = 1<<10 - 1
)

// Errors of [Heap.AddRun]; the run was not added and the Heap is unchanged.
var (
	ErrRunBounds  = errors.New("run is empty or crosses an extent boundary")
	ErrRunOverlap = errors.New("run overlaps memory already held")
)

// Place is the memory of one record. Ver is the ver of one of its lives. An Alloc returns that of the next life,
// and a Free is given that of the life that ended.
type Place struct {
	Unit  uint32 // first unit in the placement group
	Units uint32 // 1..MaxUnits
	Ver   uint16 // 0..1023
}

func (p Place) String() string {
	return fmt.Sprintf("%d+%d ver=%d", p.Unit, p.Units, p.Ver)
}

// Run is free memory inside one extent, on its way back to the directory.
type Run struct {
	Unit, Units uint32
	// Fresh memory has not been linked since it was granted: all its vers are 0.
	Fresh bool
}

// Stats counts units, except where the name says otherwise.
type Stats struct {
	Granted uint64 // own memory
	Free    uint64 // own memory that Alloc can draw on
	InUse   uint64 // own memory allocated and not given back; Granted - Free
	// ForeignFree counts foreign places waiting to be reused. Those in use are not
	// counted anywhere: the session that unlinks such a record next keeps its place.
	ForeignFree uint64
	// RefusedPlaces counts places given back that cannot be: out of bounds, free
	// already, or not what was allocated. They come from a damaged slot word, and
	// are left alone until their extent is recalled.
	RefusedPlaces uint64
}

// Heap is the remote memory of one session in one placement group. While others have
// unlinked records in its own memory, their places count as in use here.
type Heap struct {
	// starved changes whenever the memory does not satisfy an Alloc; Caches that
	// see it change give back what they hold. It is read on every Cache.Alloc and
	// Cache.Free, hence apart from the mutex, which changes hands.
	starved atomic.Uint64
	_       [64]byte

	mu struct {
		sync.Mutex
		space
	}
}

// New returns a Heap that holds nothing.
func New() *Heap {
	h := &Heap{}
	h.mu.foreign = make(map[uint32][]Place)
	return h
}

// AddRun adds a freshly granted run: the next life at each of its units carries
// ver 0. Its error is ErrRunBounds or ErrRunOverlap.
func (h *Heap) AddRun(unit, units uint32) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.mu.addRun(unit, units); err != nil {
		return fmt.Errorf("run %d+%d: %w", unit, units, err)
	}
	return nil
}

// Alloc returns a place of exactly units units, or false if none is free, which
// also asks every Cache to give back what it holds.
func (h *Heap) Alloc(units uint32) (Place, bool) {
	var p [1]Place
	n := h.AllocBatch(units, p[:])
	return p[0], n == 1
}

// AllocBatch fills dst with places of units units each and returns how many it
// found. Finding none has the effect that a failed Alloc has.
func (h *Heap) AllocBatch(units uint32, dst []Place) int {
	if units-1 >= MaxUnits || len(dst) == 0 {
		return 0
	}
	h.mu.Lock()
	n := 0
	for n < len(dst) {
		p, ok := h.mu.alloc(units)
		if !ok {
			break
		}
		dst[n] = p
		n++
	}
	h.mu.Unlock()
	if n == 0 {
		h.starved.Add(1)
	}
	return n
}

// Free gives back a place whose life p.Ver has ended, or may have begun: that ver
// is not used again at p.Unit before it wraps. p may be foreign.
func (h *Heap) Free(p Place) {
	h.mu.Lock()
	h.mu.giveBack(p, true)
	h.mu.Unlock()
}

// FreeBatch frees each of ps.
func (h *Heap) FreeBatch(ps []Place) {
	h.mu.Lock()
	for _, p := range ps {
		h.mu.giveBack(p, true)
	}
	h.mu.Unlock()
}

// Unuse gives back a place that no posted verb has named since it was allocated;
// its next life carries p.Ver.
func (h *Heap) Unuse(p Place) {
	h.mu.Lock()
	h.mu.giveBack(p, false)
	h.mu.Unlock()
}

// Drain removes all that is free from the Heap and returns it in ascending order. It returns own memory, merged
// within extents, and foreign places, as TakeForeign does. Places in Caches must have been flushed to be included.
// Places in use stay, and may be given back and drained later.
func (h *Heap) Drain() ([]Run, []Place) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.takeOwn(^uint64(0), 1, ExtentUnits+1, 1<<31), h.mu.takeForeign(1<<31, ^uint64(0))
}

// TakeForeign removes free foreign places, the largest first, until it has removed that number of units at least,
// or that number of places. It returns them in ascending order. Ver is the ver of their next life.
func (h *Heap) TakeForeign(places int, units uint64) []Place {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.takeForeign(places, units)
}

// TakeOwn removes free own memory: at least the given units, in at most the given number of runs. It takes the
// longest blocks first, and none shorter than least, and returns them in ascending order. The memory is not this
// session's own any more.
func (h *Heap) TakeOwn(units uint64, least uint32, runs int) []Run {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.takeOwn(units, least, ExtentUnits+1, runs)
}

// TakeShort is TakeOwn of blocks that are shorter than under alone, which are of no use to
// a session that needs places of that length.
func (h *Heap) TakeShort(units uint64, under uint32, runs int) []Run {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.takeOwn(units, 1, under, runs)
}

// Receive takes back a place of own memory that comes home: another session unlinked its
// record, and p.Ver is the ver of its next life. A place that this Heap does not have in
// use, with that start and length, is refused and counted.
func (h *Heap) Receive(p Place) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.receive(p)
}

// Forget drops all that the Heap holds in an extent, in use or free: it is being
// recalled. The caller gives nothing of it back any more. It returns how many units were
// free.
func (h *Heap) Forget(extent uint32) (free uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	free = h.mu.free + h.mu.foreignFree
	h.mu.forget(extent)
	return free - h.mu.free - h.mu.foreignFree
}

// Stats returns the current counts. Places that Caches hold count as in use.
func (h *Heap) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	return Stats{
		Granted:       h.mu.granted,
		Free:          h.mu.free,
		InUse:         h.mu.granted - h.mu.free,
		ForeignFree:   h.mu.foreignFree,
		RefusedPlaces: h.mu.refused,
	}
}

// Check verifies the Heap's share of I7, that no unit is two things at once, over
// all internal structures. It takes time proportional to the memory held, and is
// for tests and invariants builds.
func (h *Heap) Check() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.check()
}
