package engine

import (
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/rdma"
)

// wordCache remembers where keys were found: array, slot, slot word and version,
// keyed by 64 hash bits of their own (Check). Of keys that share those it remembers one; the
// fingerprint in its word tells most others apart. It is bounded, 4-way set-associative, and grows by doubling until its
// bound. From there on a key whose set is full has another one, and replacement is round-robin. It serves
// one goroutine at a time.
type wordCache struct {
	sets []cacheSet
	mask uint64
	max  int // sets
	used int
	hand uint8
	dev  *rdma.Device // maps large tables; nil: none is
	mem  *rdma.Memory // of sets; nil: they are on the Go heap
}

const (
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

// cacheEntry is 32 bytes, two to a cache line; check 0 with word 0 is empty.
type cacheEntry struct {
	check   uint64
	word    uint64
	version uint64
	seen    uint32 // low bits of the reclaim epoch
	shard   uint16 // low bits of the array's id
	slot    uint8
	flags   uint8
}

type cacheSet [cacheWays]cacheEntry

// newWordCache begins with a small table, which doubles as keys come, up to maxBytes.
func newWordCache(maxBytes int, dev *rdma.Device) *wordCache {
	c := &wordCache{max: 1, dev: dev}
	for c.max*2*cacheSetLen <= maxBytes {
		c.max *= 2
	}
	c.alloc(min(64, c.max))
	return c
}

// alloc makes an empty table. The old one is its caller's to free.
func (c *wordCache) alloc(sets int) {
	c.sets, c.mem, c.mask = nil, nil, uint64(sets-1)
	if n := sets * cacheSetLen; c.dev != nil && n >= mappedTable {
		if m, err := c.dev.Alloc(int64(n), rdma.AllocOptions{Name: "kvd-hints"}); err == nil { // else on the heap
			c.mem = m
			c.sets = unsafe.Slice((*cacheSet)(unsafe.Pointer(unsafe.SliceData(m.Bytes))), sets)
			return
		}
	}
	c.sets = make([]cacheSet, sets)
}

// close forgets everything and gives the memory back. The cache can be used on, and remembers next to nothing.
func (c *wordCache) close() {
	m := c.mem
	c.dev, c.max, c.used = nil, 1, 0
	c.alloc(1)
	free(m)
}

// free unmaps a table that nobody uses any more.
func free(m *rdma.Memory) {
	if m != nil {
		_ = m.Free() // nothing can be done about a failed unmap here
	}
}

// find returns the entry of a key with fingerprint fp, or nil; it is void at the next put.
func (c *wordCache) find(check uint64, fp uint16) *cacheEntry {
	e, full := c.sets[check&c.mask].find(check, fp)
	if e == nil && full && len(c.sets) == c.max {
		e, _ = c.second(check).find(check, fp)
	}
	return e
}

// second is the set of a key whose own is full.
func (c *wordCache) second(check uint64) *cacheSet { return &c.sets[check>>40&c.mask] }

// find returns a key's entry, or nil and whether others fill the set.
func (s *cacheSet) find(check uint64, fp uint16) (e *cacheEntry, full bool) {
	full = true
	for i := range s {
		switch e := &s[i]; {
		case e.word == 0:
			full = false
		case e.check == check && layoutWord(e.word).FP() == fp:
			return e, full
		}
	}
	return nil, full
}

// room is where a key belongs in the set: its own entry, whatever its fingerprint, or an empty one, or nil.
func (s *cacheSet) room(check uint64) (e *cacheEntry) {
	for i := range s {
		if s[i].word == 0 {
			e = &s[i]
		} else if s[i].check == check {
			return &s[i]
		}
	}
	return e
}

// touch loads where find will look: a set is two cache lines.
func (c *wordCache) touch(check uint64) uint64 {
	s := &c.sets[check&c.mask]
	return s[0].check + s[cacheWays/2].check
}

// get returns the hint for a key last seen less than maxAge reclaim epochs before now;
// of its array's id only the low 16 bits.
func (c *wordCache) get(check uint64, fp uint16, now, maxAge uint32) (h index.Hint, ok bool) {
	e := c.find(check, fp)
	if e == nil || now-e.seen >= maxAge {
		return h, false
	}
	e.read(&h)
	return h, true
}

// read makes h what the entry remembers; of its array's id only the low 16 bits.
func (e *cacheEntry) read(h *index.Hint) {
	h.Word, h.Version, h.Shard, h.Slot, h.Flags = layoutWord(e.word), e.version, uint32(e.shard), e.slot, index.HintFlags(e.flags)
}

// put remembers a key by h.Word, which is LIVE or FROZEN and so has the key's fingerprint.
func (c *wordCache) put(check uint64, h index.Hint, now uint32) {
	set := &c.sets[check&c.mask]
	e := set.room(check)
	for e == nil && len(c.sets) < c.max && c.used*8 > len(c.sets)*cacheWays*3 {
		c.grow()
		set = &c.sets[check&c.mask]
		e = set.room(check)
	}
	if e == nil && len(c.sets) == c.max {
		e = c.second(check).room(check)
	}
	if e == nil {
		c.hand++
		e = &set[c.hand%cacheWays]
	}
	if e.word == 0 {
		c.used++
	}
	*e = cacheEntry{check: check, word: uint64(h.Word), version: h.Version, seen: now,
		shard: uint16(h.Shard), slot: h.Slot, flags: uint8(h.Flags)}
}

// drop forgets a key whose word is known to be gone.
func (c *wordCache) drop(check uint64, fp uint16) {
	// Twice, if its own set was full and is not any more.
	for _, set := range []*cacheSet{&c.sets[check&c.mask], c.second(check)} {
		if e, _ := set.find(check, fp); e != nil {
			*e = cacheEntry{}
			c.used--
		}
	}
}

func (c *wordCache) clear() {
	clear(c.sets)
	c.used = 0
}

// grow doubles the table; an entry's set is given by its check bits alone.
func (c *wordCache) grow() {
	old, m := c.sets, c.mem
	defer free(m)
	c.alloc(len(old) * 2)
	c.used = 0
	for i := range old {
		for j := range old[i] {
			e := old[i][j]
			if e.word == 0 {
				continue
			}
			if to := c.sets[e.check&c.mask].room(e.check); to != nil {
				*to = e
				c.used++
			}
		}
	}
}
