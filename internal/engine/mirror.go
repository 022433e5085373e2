package engine

import (
	"maps"
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// mirror keeps images of groups, as READs of them showed them: a GET of a key without a hint finds there which slot
// and record it is to READ. An image is a guess of where a key is. It never says that a key is absent, and its
// words are never what a CAS expects: a fingerprint and a group are no key.
//
// All lanes of a session share it, and any goroutine may call its methods. Images are immutable, and replaced whole:
// nobody waits who looks into one. Two lanes may leave the older of two images. Its memory is counted and bounded: a
// group for which there is no room is READ, as without a mirror. A nil mirror has nothing.
type mirror struct {
	max    int64 // bytes
	used   atomic.Int64
	shards atomic.Pointer[map[uint32]mirrored] // by the array's id; replaced whole under adding
	adding sync.Mutex
}

// mirrored is the images of an array's groups, by their order there, each nil or the first of its words. That has the
// reclaim epoch of the READ in its low half, and above a bit for each slot with a word that names a record. Those
// words follow it. So an image takes 8 bytes a key and 16 to 24 bytes more.
type mirrored []atomic.Pointer[uint64]

const imagePtrLen = 8

// forgotten stands for each image of an array that is gone: none with words takes its place.
var forgotten uint64

func newMirror(maxBytes int) *mirror {
	if maxBytes <= 0 {
		return nil
	}
	m := &mirror{max: int64(maxBytes)}
	m.shards.Store(&map[uint32]mirrored{})
	return m
}

// imageLen is what an image of n words takes of the heap, whose small objects come in steps of 16 bytes.
func imageLen(n int) int64 { return int64(8*(1+n)+15) &^ 15 }

// words is the image that begins at x.
func words(x *uint64) []uint64 { return unsafe.Slice(x, 1+bits.OnesCount32(uint32(*x>>32))) }

// put keeps g, the group at off in an array of so many segments, as READ by an operation that began at epoch. It
// reports whether there was room.
func (m *mirror) put(shard, segments uint32, off uint64, g layout.Group, epoch uint32) bool {
	at := m.of(shard, segments)
	i := off / layout.GroupSize
	if i >= uint64(len(at)) {
		return at != nil
	}
	var b [1 + layout.GroupSlots]uint64
	n, slots := 1, uint32(0)
	for s := range layout.GroupSlots {
		if w := g.Slot(s); w.Readable() {
			b[n] = uint64(w)
			n++
			slots |= 1 << s
		}
	}
	x := append(make([]uint64, 0, n), b[:n]...)
	x[0] = uint64(slots)<<32 | uint64(epoch)
	old, more := at[i].Load(), imageLen(n-1)
	switch {
	case old == &forgotten:
		return true
	case old != nil:
		more -= imageLen(len(words(old)) - 1)
	}
	if !m.take(more) {
		return false
	}
	if !at[i].CompareAndSwap(old, &x[0]) {
		m.used.Add(-more)
	}
	return true
}

// take counts n bytes more, or less, and reports whether there is room for them.
func (m *mirror) take(n int64) bool {
	if m.used.Add(n) > m.max && n > 0 {
		m.used.Add(-n)
		return false
	}
	return true
}

// of is where the images of an array are, nil if there is no room for them.
func (m *mirror) of(shard, segments uint32) mirrored {
	if at, ok := (*m.shards.Load())[shard]; ok {
		return at
	}
	m.adding.Lock()
	defer m.adding.Unlock()
	all := *m.shards.Load()
	if at, ok := all[shard]; ok {
		return at
	}
	n := int64(segments) * (layout.SegmentGroups + 1)
	if !m.take(n * imagePtrLen) {
		return nil
	}
	all = maps.Clone(all)
	all[shard] = make(mirrored, n)
	m.shards.Store(&all)
	return all[shard]
}

// asking is whether keys are looked for in images.
type asking struct {
	asked atomic.Bool   // since the last MirrorAsked
	tell  chan struct{} // of one
}

func (a *asking) ask() {
	if !a.asked.Load() && !a.asked.Swap(true) {
		select {
		case a.tell <- struct{}{}:
		default:
		}
	}
}

// MirrorAsked gives, once, when somebody looks for a key in the images of groups from now on. A single goroutine
// may wait.
func (c *Core) MirrorAsked() <-chan struct{} {
	c.asking.asked.Store(false)
	return c.asking.tell
}

// find looks for the one word, in the images of a hash's home group or else of its stash, that has its fingerprint. Of
// images it takes those that are younger than a word's life.
func (m *mirror) find(shard, segments uint32, hash uint64, now uint32) (w layout.Word, slot uint8, ok bool) {
	at := (*m.shards.Load())[shard]
	home, stash := layout.GroupOff(hash, segments)
	w, s, n := at.find(home, layout.FP(hash), now)
	if n == 0 {
		w, s, n = at.find(stash, layout.FP(hash), now)
		s += index.StashSlot
	}
	return w, s, n == 1
}

// find is how many words with a fingerprint an image has that is not too old, the last of them, and its slot.
func (at mirrored) find(off uint64, fp uint16, now uint32) (w layout.Word, slot uint8, n int) {
	i := off / layout.GroupSize
	if i >= uint64(len(at)) {
		return 0, 0, 0
	}
	x := at[i].Load()
	if x == nil || now-uint32(*x) >= layout.WordLifeEpochs {
		return 0, 0, 0
	}
	slots := uint32(*x >> 32)
	for _, v := range words(x)[1:] {
		if layout.Word(v).FP() == fp {
			w, slot = layout.Word(v), uint8(bits.TrailingZeros32(slots))
			n++
		}
		slots &= slots - 1
	}
	return w, slot, n
}

// keep forgets the arrays that v does not have.
func (m *mirror) keep(v *View) {
	if m == nil {
		return
	}
	m.adding.Lock()
	defer m.adding.Unlock()
	has := make(map[uint32]bool, len(v.Shards))
	for i := range v.Shards {
		s := &v.Shards[i]
		if has[s.ID] = true; s.route.Child != nil {
			has[s.route.Child.Shard] = true
		}
	}
	all := maps.Clone(*m.shards.Load())
	for id, at := range all {
		if !has[id] {
			delete(all, id)
			m.forget(at)
		}
	}
	m.shards.Store(&all)
}

// forget gives back what the images of an array take that nobody finds any more. A lane that still knows it keeps none
// there.
func (m *mirror) forget(at mirrored) {
	n := int64(len(at)) * imagePtrLen
	for i := range at {
		if x := at[i].Swap(&forgotten); x != nil {
			n += imageLen(len(words(x)) - 1)
		}
	}
	m.used.Add(-n)
}

// MirrorBytes is what images of groups take now.
func (c *Core) MirrorBytes() int64 {
	if m := c.in.Load().mirror; m != nil {
		return m.used.Load()
	}
	return 0
}
