package engine

import (
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// wordCache remembers where keys were found: array, slot, slot word and version,
// keyed by 64 hash bits of their own (Check). Of keys that share those it remembers one; the
// fingerprint in its word tells most others apart. It is bounded, 4-way set-associative, and a key whose set is full
// has another one. It grows by doubling until its bound; from there on replacement is round-robin.
//
// All lanes of a session share it, and any goroutine may call its methods, none of which waits. An entry is a seqlock
// of its own (Lameter, "Effective Synchronization on Linux/NUMA Systems", 2005): a writer marks it busy, changes it and
// counts, and a reader that saw one or the other looks again. Two writers never change an entry at once: the later one
// leaves it. So entries may be lost and may be old, as any hint, but what a reader gets stood in an entry together.
type wordCache struct {
	tables [cacheParts]atomic.Pointer[cacheTable]
	shift  uint8 // of a check: what is left is its part
	parts  [cacheParts]cachePart
	maps   *mappedTables
}

// cachePart is the tables of one part of the checks: so none is large, and what it takes to double it.
type cachePart struct {
	max     int // sets
	used    atomic.Int64
	hand    atomic.Uint32
	growing sync.Mutex
	_       [32]byte // no part shares a cache line with another
}

// cacheTable is immutable but for its entries. Lanes may look into one, and change it, after a larger one has taken its
// place.
type cacheTable struct {
	sets []cacheSet
	mask uint64
}

const (
	cacheParts    = 4
	cacheWays     = 4
	cacheEntryLen = 32
	cacheSetLen   = cacheWays * cacheEntryLen
	// mappedTable is the length, in bytes, from which a table is mapped: it then lies on huge pages where the
	// kernel has some, so that looking into it costs a cache miss and not the walk of the page tables as well.
	mappedTable = 2 << 20
)

const (
	_ = uint(unsafe.Sizeof(cacheSet{}) - cacheSetLen)
	_ = uint(cacheSetLen - unsafe.Sizeof(cacheSet{}))
)

// cacheEntry is 32 bytes, two to a cache line; word 0 is empty.
type cacheEntry struct {
	check, word, version atomic.Uint64
	// meta, from the top: low bits of the reclaim epoch of when the word was seen (32), low bits of the array's id
	// (16), slot (6), flags (2), busy (1), count of changes (7). A reader would be deceived if exactly 128 changes came
	// between two of its loads.
	meta atomic.Uint64
}

const (
	metaSeen  = 32
	metaShard = 16
	metaSlot  = 10
	metaFlags = 8
	metaBusy  = 1 << 7
	metaCount = metaBusy - 1
)

type cacheSet [cacheWays]cacheEntry

// cached is what an entry held, and where it stands.
type cached struct {
	e             *cacheEntry
	t             *cacheTable // of e, which lasts as long
	word, version uint64
	meta          uint64
}

// newWordCache begins with small tables, which double as keys come, up to maxBytes together. Large ones are maps'
// memory; maps nil: none is.
func newWordCache(maxBytes int, maps *mappedTables) *wordCache {
	c := &wordCache{shift: 64, maps: maps}
	parts := 1
	for parts < cacheParts && maxBytes/(2*parts) >= 64*cacheSetLen {
		parts *= 2
		c.shift--
	}
	most := 1
	for most*2*cacheSetLen <= maxBytes/parts {
		most *= 2
	}
	for i := range parts {
		c.parts[i].max = most
		c.tables[i].Store(c.newTable(min(4, most)))
	}
	return c
}

func (c *wordCache) newTable(sets int) *cacheTable {
	t := &cacheTable{mask: uint64(sets - 1)}
	if t.sets = c.maps.sets(t, sets); t.sets == nil {
		t.sets = make([]cacheSet, sets)
	}
	return t
}

func (c *wordCache) partOf(check uint64) uint64 { return check >> c.shift }

// find makes x the entry of a key with fingerprint fp, and reports whether there is one.
func (c *wordCache) find(x *cached, check uint64, fp uint16) bool {
	t := c.tables[c.partOf(check)].Load()
	ok, full := t.sets[check&t.mask].find(x, check, fp)
	if !ok && full {
		ok, _ = t.second(check).find(x, check, fp)
	}
	x.t = t
	return ok
}

// second is the set of a key whose own is full.
func (t *cacheTable) second(check uint64) *cacheSet { return &t.sets[check>>36&t.mask] }

// find makes x a key's entry, and reports whether there is one and whether entries fill the set.
func (s *cacheSet) find(x *cached, check uint64, fp uint16) (ok, full bool) {
	full = true
	for i := range s {
		e := &s[i]
		switch {
		case e.word.Load() == 0:
			full = false
		case e.check.Load() == check && e.load(x, check, fp):
			return true, full
		}
	}
	return false, full
}

// load makes x what e holds of the key, unless it is being changed.
func (e *cacheEntry) load(x *cached, check uint64, fp uint16) bool {
	for range 4 {
		m := e.meta.Load()
		if m&metaBusy != 0 {
			continue
		}
		x.e, x.meta, x.word, x.version = e, m, e.word.Load(), e.version.Load()
		k := e.check.Load()
		if e.meta.Load() == m {
			return k == check && x.word != 0 && layout.Word(x.word).FP() == fp
		}
	}
	return false
}

// seen is when the word was seen: low bits of a reclaim epoch.
func (x *cached) seen() uint32 { return uint32(x.meta >> metaSeen) }

func (x *cached) flags() index.HintFlags { return index.HintFlags(x.meta >> metaFlags & 3) }

// read makes h what was found; of its array's id only the low 16 bits.
func (x *cached) read(h *index.Hint) {
	h.Word, h.Version, h.Shard, h.Slot, h.Flags = layout.Word(x.word), x.version, uint32(uint16(x.meta>>metaShard)),
		uint8(x.meta>>metaSlot&63), x.flags()
}

// saw notes that the word still stood there at the reclaim epoch given, unless the entry has changed since.
func (x *cached) saw(epoch uint32) {
	if int32(epoch-x.seen()) > 0 {
		x.e.meta.CompareAndSwap(x.meta, x.meta&(1<<metaSeen-1)|uint64(epoch)<<metaSeen)
	}
}

// replace makes the entry, unless it has changed since, that of another record of the key in the same slot.
func (x *cached) replace(word layout.Word, version uint64, flags index.HintFlags, epoch uint32) {
	e := x.e
	if e.meta.CompareAndSwap(x.meta, x.meta|metaBusy) {
		e.version.Store(version)
		e.word.Store(uint64(word))
		place := uint32(x.meta) &^ (1<<metaSlot - 1)
		e.meta.Store(uint64(epoch)<<metaSeen | uint64(place) | uint64(flags)<<metaFlags | (x.meta+1)&metaCount)
	}
}

// set makes e, whose word was w, the entry of a key, and reports whether it could; a nil h: of none.
func (e *cacheEntry) set(w, check uint64, h *index.Hint, epoch uint32) bool {
	m := e.meta.Load()
	if m&metaBusy != 0 || !e.meta.CompareAndSwap(m, m|metaBusy) {
		return false
	}
	ok := e.word.Load() == w
	switch {
	case !ok:
	case h == nil:
		e.word.Store(0)
		m &= metaCount
	default:
		e.check.Store(check)
		e.version.Store(h.Version)
		e.word.Store(uint64(h.Word))
		m = uint64(epoch)<<metaSeen | uint64(uint16(h.Shard))<<metaShard | uint64(h.Slot)<<metaSlot | uint64(h.Flags)<<
			metaFlags | m&metaCount
	}
	e.meta.Store(m&^metaCount | (m+1)&metaCount)
	return ok
}

// room is where a key belongs in the set, and the word there: its own entry, whatever its fingerprint, or an empty one,
// or nil.
func (s *cacheSet) room(check uint64) (e *cacheEntry, word uint64) {
	for i := range s {
		if w := s[i].word.Load(); w == 0 {
			e, word = &s[i], 0
		} else if s[i].check.Load() == check {
			return &s[i], w
		}
	}
	return e, word
}

// room is where a key belongs in the table: in its own set, first, or in its second one.
func (t *cacheTable) room(check uint64) (e *cacheEntry, word uint64, first bool) {
	if e, word = t.sets[check&t.mask].room(check); e != nil {
		return e, word, true
	}
	e, word = t.second(check).room(check)
	return e, word, false
}

// touch loads where find will look: a set is two cache lines.
func (c *wordCache) touch(check uint64) uint64 {
	t := c.tables[c.partOf(check)].Load()
	s := &t.sets[check&t.mask]
	sum := s[0].word.Load() + s[cacheWays/2].word.Load()
	runtime.KeepAlive(t)
	return sum
}

// get returns the hint for a key last seen less than maxAge reclaim epochs before now;
// of its array's id only the low 16 bits.
func (c *wordCache) get(check uint64, fp uint16, now, maxAge uint32) (h index.Hint, ok bool) {
	var x cached
	if !c.find(&x, check, fp) || now-x.seen() >= maxAge {
		return h, false
	}
	x.read(&h)
	return h, true
}

// put remembers a key by h.Word, which is LIVE or FROZEN and so has the key's fingerprint.
func (c *wordCache) put(check uint64, h index.Hint, now uint32) {
	i := c.partOf(check)
	p := &c.parts[i]
	t := c.tables[i].Load()
	e, w, first := t.room(check)
	for !first && len(t.sets) < p.max {
		// Two cache misses for each of many keys are not worth the memory, and a key that is forgotten is worth still
		// less.
		if load := int(p.used.Load()) * 8 / cacheWays; load <= 4*len(t.sets) && (e != nil || load <= len(t.sets)) ||
			!c.grow(i, t) {
			break
		}
		t = c.tables[i].Load()
		e, w, first = t.room(check)
	}
	if e == nil {
		e = &t.sets[check&t.mask][p.hand.Add(1)%cacheWays]
		w = e.word.Load()
	}
	if e.set(w, check, &h, now) && w == 0 {
		p.used.Add(1)
	}
	runtime.KeepAlive(t)
}

// drop forgets a key whose word is known to be gone.
func (c *wordCache) drop(check uint64, fp uint16) {
	i := c.partOf(check)
	t := c.tables[i].Load()
	// Twice, if its own set was full and is not any more, or if two lanes have put it at once.
	for _, set := range []*cacheSet{&t.sets[check&t.mask], t.second(check)} {
		for k := range set {
			e := &set[k]
			if w := e.word.Load(); w != 0 && e.check.Load() == check && layout.Word(w).FP() == fp &&
				e.set(w, 0, nil, 0) {
				c.parts[i].used.Add(-1)
			}
		}
	}
	runtime.KeepAlive(t)
}

// grow puts a table of twice as many sets in the place of t, and reports whether there is another than t now. An
// entry's set is given by its check bits alone. Of what other lanes change in t meanwhile, the new one may miss some.
func (c *wordCache) grow(part uint64, t *cacheTable) bool {
	p := &c.parts[part]
	if !p.growing.TryLock() {
		return false
	}
	defer p.growing.Unlock()
	if c.tables[part].Load() != t {
		return true
	}
	larger, used := c.newTable(2*len(t.sets)), int64(0)
	for i := range t.sets {
		for k := range t.sets[i] {
			used += larger.take(&t.sets[i][k])
		}
	}
	p.used.Store(used)
	c.tables[part].Store(larger)
	runtime.KeepAlive(t)
	return true
}

// take copies old, an entry of a smaller table, if it holds a key and nobody changes it now; nobody else knows t yet.
// It returns how many it copied.
func (t *cacheTable) take(old *cacheEntry) int64 {
	var x cached
	w, check := old.word.Load(), old.check.Load()
	if w == 0 || !old.load(&x, check, layout.Word(w).FP()) {
		return 0
	}
	e, _, _ := t.room(check)
	if e == nil {
		return 0
	}
	var h index.Hint
	x.read(&h)
	e.set(e.word.Load(), check, &h, x.seen())
	return 1
}

// len is how many keys it remembers, or a few more or less while lanes change it.
func (c *wordCache) len() (n int) {
	for i := range c.parts {
		n += int(c.parts[i].used.Load())
	}
	return n
}

// mappedTables is the memory of large tables, of one device, until it is given back: a table's when nobody can reach
// that any more, and all of it at the end. A nil one has none. Its methods may be called concurrently.
type mappedTables struct {
	dev *rdma.Device
	mu  sync.Mutex
	all map[*rdma.Memory]struct{} // nil: closed
}

func newMappedTables(dev *rdma.Device) *mappedTables {
	return &mappedTables{dev: dev, all: map[*rdma.Memory]struct{}{}}
}

// sets maps n sets for t, or returns nil: they are to be on the heap.
func (m *mappedTables) sets(t *cacheTable, n int) []cacheSet {
	if m == nil || n*cacheSetLen < mappedTable {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all == nil {
		return nil
	}
	x, err := m.dev.Alloc(int64(n)*cacheSetLen, rdma.AllocOptions{Name: "kvd-hints"})
	if err != nil {
		return nil
	}
	m.all[x] = struct{}{}
	runtime.AddCleanup(t, m.free, x)
	return unsafe.Slice((*cacheSet)(unsafe.Pointer(unsafe.SliceData(x.Bytes))), n)
}

// free unmaps a table that nobody can reach any more.
func (m *mappedTables) free(x *rdma.Memory) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.all[x]; ok {
		delete(m.all, x)
		_ = x.Free() // nothing can be done about a failed unmap here
	}
}

// close unmaps all. Nobody looks into a table any more.
func (m *mappedTables) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for x := range m.all {
		_ = x.Free()
	}
	m.all = nil
}
