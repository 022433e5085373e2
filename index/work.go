package index

import (
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/layout"
)

// Work is the request of a janitor's kinds and what they found.
//
// Sync, Scrub: the segment at Off of placement group PG. Clean: the group at Off;
// Wipe leaves zeroes on every replica. Relocate: the group at Off, moving what lies in
// Extents, or, with Count, moving what lies in Window alone, counting what is linked and
// listing what lies in Extents. Evict: the groups at Off and More. Move, Abandon: home group
// Group (segment*16 + group) of shard Shard, with what of its keys is in the stash.
//
// An Op that starts over (a fault, another view, no memory) does its group from the
// beginning; what it had done already it finds done.
type Work struct {
	PG      uint32
	Off     uint64
	Frozen  bool // the placement group is frozen, which is as it should be
	Shard   uint32
	Group   uint32
	Extents []uint32
	Count   bool
	Window  UnitRun
	// WindowMost is the length from which on places in Window stay where they are, 0: none.
	WindowMost uint32
	Wipe       bool
	// Drop, with Wipe: nobody ever reaches the array again, not even what is
	// readable in it. Without it a readable word stays, and is a finding.
	Drop   bool
	Target uint32 // Clean: the child's placement group; places elsewhere are freed
	// More are other groups of the placement group that an Evict looks at besides Off.
	More []uint64
	// Choose, of Evict, picks from what the groups hold, as positions in c. nil: only
	// what has expired goes.
	Choose func(c []Candidate) []int
	// What has expired where Mine is false is left to others until it has been expired
	// since Late (Unix ms). nil: none is left. Evict without Choose.
	Mine func(unit uint32) bool
	Late uint64
	// Only, of Evict without Choose, are the fingerprints of the records to look at in the
	// group at Off and in those at More, in that order. Of these the header alone says
	// whether they have expired. nil: every record is looked at.
	Only [][]uint16

	// Answer.
	Records  uint64            // linked, at the head
	Units    uint64            // of their places
	Synced   uint64            // words that differed between replicas
	Moved    uint64            // records moved or relocated
	Repaired uint64            // copies rewritten from a good one
	Lost     uint64            // records without a good copy, or that went with a child
	Linked   map[uint32]uint32 // Scrub, Relocate with Count: linked units by extent
	Kept     []UnitRun         // Relocate with Count: the places in Extents
	Findings []string          // at most 8, for people
	Evicted  []Evicted         // Evict
	Expiring uint64            // Evict: records of the group with an expiry, as far as was looked
	Overflow []uint64          // Evict with Only: groups of which some keys are in the stash
}

// UnitRun is the place of a record, or of a chunk of one.
type UnitRun struct{ Unit, Units uint32 }

func (r UnitRun) meets(unit, units uint32) bool {
	return r.Units > 0 && unit < r.Unit+r.Units && r.Unit < unit+units
}

// Candidate is a record that an Evict may remove.
type Candidate struct {
	Word   layout.Word
	Access layout.AccessWord // 0 if what is noted is about another key
	Units  uint32
}

// Evicted is a record that an Evict has removed.
type Evicted struct {
	Candidate
	Hash    uint64 // of its key; 0 if that was not read
	Expired bool
}

const (
	// MaxCAS bounds the CASes that one round waits for.
	MaxCAS = 32

	maxChain    = 8         // replicas of a placement group
	batchBytes  = 256 << 10 // of records read in one round, or one record
	maxFindings = 8
	maxFinding  = 200 // bytes
	// maxLooks bounds how often a group that keeps changing is looked at before
	// the Op waits a little.
	maxLooks = 64
	// maxFrozen bounds how often a word that stays FROZEN is waited for.
	maxFrozen = 200
)

// workState is where a janitor's kind stands.
type workState struct {
	then   func() Action // consumes the round under way; also where a sync leads back to
	parent Route         // the Op's own route while it is at the child
	away   bool
	parts  []uint32 // at the child: which of its segments are at work, of those that take what is in one of the parent's

	groups []uint64           // region offsets of the groups at work: home and stash, for each of parts, or one
	images [][maxChain][]byte // the groups by replica
	copies [maxChain][]byte   // a segment by replica
	buf    []byte

	header layout.Header // of groups[0] at A
	items  []*item
	swings []swing
	behind []wordRef // words that differed between replicas when the lock was taken
	looks  int
	frozen int // times that a FROZEN word was waited for; not reset by a restart
	places []place

	wantPG   uint32
	wantCode uint8

	evicts []evictGroup

	keys map[keyHash]wordRef
	same [][2]wordRef // slots that seem to name the same key
}

// wordRef is one word of a group: a slot or headerSlot.
type wordRef struct {
	base uint64 // region offset of the group
	slot uint8
}

func (r wordRef) off() uint64 {
	if r.slot == headerSlot {
		return r.base
	}
	return r.base + layout.SlotOff(int(r.slot))
}

// item is a slot and the record that it names.
type item struct {
	wordRef
	x     layout.Word // as last seen at A
	stale bool        // x changed after the record was read
	mine  bool        // of the moved set
	done  bool        // the child has it

	key      []byte
	hash     uint64
	id       uint64         // of a manifest
	chunks   []layout.Chunk // of a manifest whose chunks are copied, too
	oldParts []layout.Chunk // of a manifest

	// The copy's place, and those of its chunks.
	havePlace bool
	n         layout.Word
	newID     uint64
	newChunks []layout.Chunk
	copied    int // chunks
	written   bool
	fresh     []int // in workState.places

	evicted Evicted
}

// Wanted is what Alloc asked for: so many units in one run, in placement group pg.
func (o *Op) Wanted() (pg uint32, units uint32) {
	if o.far != nil && o.work != nil {
		w := o.work
		return w.wantPG, layout.UnitsOf(w.wantCode)
	}
	return o.Route.PG.ID, layout.UnitsOf(o.wantCode)
}

// startWork begins the group or segment afresh under o.Route. Nothing is under way.
func (o *Op) startWork() Action {
	if o.need().work == nil {
		o.work = &workState{}
	}
	w := o.work
	o.dropWork()
	w.then = nil
	w.items, w.swings, w.behind, w.looks = nil, w.swings[:0], nil, 0
	if o.Route.PG.Replicas == 0 || o.Route.PG.Replicas > maxChain {
		return o.finish(fmt.Errorf("pg %d: chain of %d replicas", o.Route.PG.ID, o.Route.PG.Replicas))
	}
	switch o.Kind {
	case Move, Abandon:
		return o.startMove()
	}
	n := uint64(layout.GroupSize)
	if o.Kind == Sync || o.Kind == Scrub {
		n = layout.SegmentSize
	}
	if err := checkIndex(o.Route.PG, o.Work.Off, n); err != nil {
		return o.finish(err)
	}
	switch o.Kind {
	case Sync:
		return o.readCopies(o.syncSegment)
	case Scrub:
		return o.startScrub()
	case Clean:
		return o.startClean()
	case Evict:
		return o.startEvict()
	default:
		return o.relocate()
	}
}

// checkIndex reports whether n bytes at off are groups of pg's index area.
func checkIndex(pg *PG, off, n uint64) error {
	end := uint64(pg.HeapLo) * layout.UnitSize
	if pg.AccessOff != 0 {
		end = pg.AccessOff
	}
	if off < layout.RegionPageSize || off%layout.GroupSize != 0 || off > end || n > end-off {
		return fmt.Errorf("pg %d: no group at offset %#x of its index", pg.ID, off)
	}
	return nil
}

// workNext consumes the round under way.
func (o *Op) workNext() Action { return o.work.then() }

// await posts the round in o.Accesses; then consumes it.
func (o *Op) await(then func() Action) Action {
	o.work.then = then
	return o.post(stepWork)
}

// leave gives up the lock and starts over after a.
func (o *Op) leave(a Action) Action {
	o.toParent()
	return o.unlockAnd(a)
}

// toChild goes on at the child of o.Route, toParent comes back. The lock stays
// where it is.
func (o *Op) toChild() {
	if w := o.work; !w.away {
		w.parent, w.away = o.Route, true
		o.Route = *o.Route.Child
		o.Route.MapVersion = w.parent.MapVersion
	}
}

func (o *Op) toParent() {
	if w := o.work; w != nil && w.away {
		o.Route, w.away = w.parent, false
	}
}

// endWork ends a janitor's kind: its lock is where it was taken, its places go.
func (o *Op) endWork() {
	if o.far != nil && o.work != nil {
		o.toParent()
		o.dropWork()
	}
}

func (o *Op) finishWork() Action { return o.finish(nil) }

func (o *Op) finding(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	s = s[:min(len(s), maxFinding)]
	if f := o.Work.Findings; len(f) < maxFindings && !slices.Contains(f, s) {
		o.Work.Findings = append(f, s)
	}
}

// where names a word for an error or a finding.
func (o *Op) where(r wordRef) string {
	return fmt.Sprintf("pg %d group %#x slot %d", o.Route.PG.ID, r.base, r.slot)
}

// lockWork takes the insert lock of the first group at work, and reads them all on every
// replica: at A behind the lock.
func (o *Op) lockWork(then func() Action) Action {
	if o.lock == 0 {
		o.lock = layout.MakeLock(o.env.Session(), o.env.Stamp())
	}
	o.lockOff = o.work.groups[0] + layout.GroupLockOff
	o.begin()
	o.add(Access{Verb: CAS, Space: Index, Off: o.lockOff, Expect: uint64(o.lockExpect), New: uint64(o.lock)})
	o.addImages()
	return o.await(func() Action {
		found := layout.Lock(o.Accesses[0].Found)
		if found != o.lockExpect && found != o.lock {
			o.lockExpect = 0
			if found == 0 {
				return o.lockWork(then)
			}
			o.LockOwner, o.OwnerFenced = found.Session(), false
			o.lockExpect = found
			return o.askFenced()
		}
		o.locked, o.lockExpect, o.Waits = true, 0, 0
		o.work.header = o.image(0, 0).Header()
		o.work.behind = o.behind()
		return then()
	})
}
