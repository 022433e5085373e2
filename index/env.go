package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

// Env is what an Op needs of its session. Calls happen inside Next, on its
// goroutine, and do not block.
type Env interface {
	Router
	Hints
	Places
	Clock
	Tier
}

// Router knows the map that its lane has taken over, and answers from that alone.
type Router interface {
	// Route finds a hash's placement group; ok is false while the map has none
	// that is active.
	Route(hash uint64) (r Route, ok bool)
	// RouteShard is Route for a Scan: the shard whose hash prefix covers the one
	// given (left-aligned).
	RouteShard(prefix uint64) (r Route, ok bool)
	// RoutePG finds a placement group; frozen: also one that is frozen.
	RoutePG(id uint32, frozen bool) (r Route, ok bool)
	// RouteMove finds a shard that splits or migrates by its id, for a janitor.
	RouteMove(shard uint32) (r Route, ok bool)
	// HashOf is the hash of a key in this namespace, for a janitor.
	HashOf(key []byte) uint64
	// Crowded: the shard fills up and should split before it is full.
	Crowded(shard uint32)
	// Chains: a chain to the head of pg can stop at a CAS that misses (Access.IfHit).
	Chains(pg *PG) bool
	// ReadOnly: the session may not CAS or WRITE.
	ReadOnly() bool
}

// Hints is what a session remembers of keys. No hint proves anything.
type Hints interface {
	// Hint returns what is remembered of the Op's key, if it was last seen less
	// than layout.WordLifeEpochs ago.
	Hint(o *Op) (Hint, bool)
	Remember(o *Op, h Hint)
	Forget(o *Op)

	// Guess returns where the Op's key may be, by an image of its group: a word with its fingerprint, which may be
	// another key's, and no version. So it may begin what compares the whole key, and is never what a CAS expects. If
	// there is none, the key may be there all the same.
	Guess(o *Op) (Hint, bool)
	// Image shows g, the group at off in the shard of the Op's route, as its reader showed it just now. It reports
	// whether there is room for images.
	Image(o *Op, off uint64, g layout.Group) (room bool)

	// NoteDue asks, at most once for each look at a record, whether this access to the
	// Op's key is worth noting: then the Op reads the slot's access word on the way, and
	// calls Note when it has succeeded. Only if PG.AccessOff is not 0.
	NoteDue(o *Op) bool
	// Note writes the access word of the slot at off in the index, of whose record w is
	// the word: off the path, and with no harm if it is lost. old is what was there, as
	// far as it is known; born: the record is a new key's. until, of an Op without a key, is until when eviction
	// finds the record pinned, Unix ms; 0: it is not.
	Note(o *Op, off uint64, w layout.Word, old layout.AccessWord, expiry, until uint64, born bool)
}

// Places is memory: local for buffers, and remote for records. An Op hands back every place that it gets from Alloc
// by exactly one of the other calls. The exception is a place that a word names when the Op is done.
type Places interface {
	// Buf returns n bytes of registered, 8-byte aligned memory that stays with
	// the Op until it is recycled.
	Buf(o *Op, n int) []byte

	// Into returns memory of the caller of a GET, for a value of at most n bytes, or nil if there is none. It
	// may be shorter, if the value may be. It is the memory given before, unless that was too short.
	Into(o *Op, n int) []byte

	// Show shows the n bytes at off of the reader's region, in the Op's placement group, as they are there, or gives
	// nil. They may change once the Op is over, unless its caller sees to it, and must not be written to.
	Show(o *Op, off uint64, n int) []byte
	// SumShown is crc gone on over b, the value of the record of version at off. b is what Show has shown there.
	SumShown(o *Op, off, version uint64, crc uint32, b []byte) uint32

	// Alloc takes a place for a record of size code; ver and size are what its slot word
	// must carry. size may be larger than code: a READ of the record brings more than it.
	Alloc(pg *PG, code uint8) (unit uint32, ver uint16, size uint8, ok bool)
	// Unuse returns a place that no word ever named; nothing is under way to it.
	Unuse(pg *PG, w layout.Word)
	// Unlinked hands over the place of w, which this Op has replaced and
	// published: it goes to limbo.
	Unlinked(pg *PG, w layout.Word)
	// Retire hands over the place of w, a word of this Op that did not take
	// effect but may have been seen: limbo, and its ver is spent.
	Retire(pg *PG, w layout.Word)
	// Leak says that the place of w is lost to this session; recall finds it.
	Leak(pg *PG, w layout.Word)
}

// Clock tells operations apart, and the time.
type Clock interface {
	// Session is the session's id, never 0.
	Session() uint32
	// Stamp differs for every call of every lane of the session.
	Stamp() uint32
	// Version returns a version greater than after, unique in the store.
	Version(after uint64) uint64
	// NowMillis is the Unix time in milliseconds; only TTLs depend on it.
	NowMillis() uint64
}

// MaxChain bounds the replicas of a placement group.
const MaxChain = 8

// PG is what an Op knows of a placement group in one of its epochs.
type PG struct {
	ID       uint32
	Epoch    uint32
	Replicas uint8
	// Joining: the last replica is a joiner. Writers take it for the tail;
	// it is no copy yet, so readers compare it with the one before.
	Joining bool
	// Speculative: an UPDATE posts its CAS at every replica at once; see speculate.go.
	Speculative bool
	// Generation is the placement group epoch in which the memory was made. Words and places of
	// another generation mean nothing.
	Generation uint32
	// Head identifies the head's memory: the same in two placement group epochs, it is the same.
	Head uint64
	// AccessOff is where the access words begin, IndexBytes from the region's start; the
	// word of what is at index offset x is at AccessOff + x. 0: there are none.
	AccessOff uint64
	// Cache: the namespace may forget what is in it, so memory that is lacking comes by eviction. There are access
	// words then; a store may have them, too.
	Cache bool
	// The heap, in units: records lie in [HeapLo, HeapHi).
	HeapLo, HeapHi uint32
	// ChunkPayload is what each chunk of a long value that is written holds, bytes. 0: layout.ChunkSize.
	ChunkPayload uint32
	// Recalled are the extents in which no place is taken or reused.
	Recalled []uint32
}

func (p *PG) payload() int {
	if p.ChunkPayload != 0 {
		return int(p.ChunkPayload)
	}
	return layout.ChunkSize
}

// tail is where a write becomes visible.
func (p *PG) tail() uint8 { return p.Replicas - 1 }

// Reader is where records are read: the tail, or the one before a joiner.
func (p *PG) Reader() uint8 {
	if p.Joining {
		return p.Replicas - 2
	}
	return p.Replicas - 1
}

// IsRecalled reports whether unit lies in an extent being recalled.
func (p *PG) IsRecalled(unit uint32) bool {
	for _, x := range p.Recalled {
		if unit/layout.ExtentUnits == x {
			return true
		}
	}
	return false
}

// Route is where a hash lives under one map version.
type Route struct {
	PG         *PG
	Shard      uint32 // id of its array of segments, never used for another
	Depth      uint8  // bits of hash prefix that the shard covers
	ShardOff   uint64 // of the first segment, bytes in the region
	Segments   uint32
	MapVersion uint64
	// Child is where keys of the moved set go while the shard splits, migrates or grows, nil while it does none of
	// these. It has n times the parent's number of segments, n being 1 to layout.MaxGrowth. The contents of one
	// segment of the parent go into n segments of the child, which lie side by side.
	Child *Route
	// Split: the moved set is the hashes whose bit below the prefix is 1.
	// Otherwise it is all of them.
	Split bool
}

// Fan is how many segments of the child, side by side, take what is in one of r's. r has a child.
func (r *Route) Fan() uint32 { return r.Child.Segments / r.Segments }

// Moves reports whether hash belongs to the moved set.
func (r *Route) Moves(hash uint64) bool { return !r.Split || layout.HashBit(hash, r.Depth) }

// Hint is what a session remembers of a key: the word that named its record,
// and where. A hint is never an answer, only a guess that a READ or CAS proves.
type Hint struct {
	Word    layout.Word
	Version uint64
	Shard   uint32 // its array
	Slot    uint8  // slot of the home group, or StashSlot + slot of the stash group
	Flags   HintFlags
}

// StashSlot is added to the number of a slot in the stash group.
const StashSlot = 32

// HintFlags qualify a hint.
type HintFlags uint8

const (
	HintManifest HintFlags = 1 << iota // the record is a manifest
	HintExpires                        // the record has an expiry
)
