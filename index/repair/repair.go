// Package repair has the operations of janitors, and eviction. They are step machines that look at all words of a
// group or a segment in a round. A key operation looks at a slot.
//
// Each is an [Op], which an [index.Op] drives like any operation. Package index has the lock, and the way back to
// the first round after a fault or in another view. It also has sync, which brings one word down the chain. This
// package says what is read, decided and copied. The directory decides what is to be done, and when; package
// internal/janitor cuts that into [Work], and clients evict by it.
//
// Start with [Work] and [New]; move.go is the longest of the machines. An Op belongs to the one goroutine that
// performs it, and is performed once. The rounds' names are the steps of docs/protocol.md. Their order is in the
// code, read from top to bottom. A function posts a round by await and hands it the function that consumes it.
package repair

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
)

// Work is the request of an Op and what it found.
//
// Sync, Scrub: the segment at Off of placement group PG. Clean: the group at Off; Wipe leaves zeroes on every
// replica. Relocate: the group at Off, moving what lies in Extents. With Count, Relocate moves what lies in Window
// alone, counts what is linked and lists what lies in Extents. SettleAll: the group at Off. Evict: the groups at
// Off and More. Move, Abandon: home group Group (segment*16 + group) of shard Shard, with what of its keys is in
// the stash.
//
// An Op that starts over (a fault, another view, no memory) does its group from the
// beginning; what it had done already it finds done.
type Work struct {
	// PG is the placement group, and Off the segment or group in it: bytes from the start of the region.
	PG  uint32
	Off uint64
	// Frozen: the placement group is frozen, which is as it should be.
	Frozen bool
	// Shard and Group say what a Move or Abandon is about; the map knows where that is.
	Shard, Group uint32
	// Extents are the ones that are recalled.
	Extents []uint32
	// Count counts in place: what lies in Extents stays there and is listed in Kept.
	Count bool
	// Window is memory that somebody needs in one piece: with Count, records that lie there move.
	Window UnitRun
	// WindowMost is the length in units from which on places in Window stay where they are, 0: none.
	WindowMost uint32
	// Wipe leaves zeroes, for an array that is used for another shard next: not even a nonce may stay in it.
	Wipe bool
	// FreeLost, of Scrub, takes away the words of records that have no good copy, with their places. With Only it
	// takes away those alone that have a fingerprint of Only[0] and are in a group of More.
	FreeLost bool
	// Drop, with Wipe: nobody ever reaches the array again, not even what is
	// readable in it. Without it a readable word stays, and is a finding.
	Drop   bool
	Target uint32 // Clean: the child's placement group; places elsewhere are freed
	// More are other groups of the placement group that an Evict looks at besides Off.
	More []uint64
	// Choose, of Evict, picks from what the groups hold, as positions in c. nil: only
	// what has expired goes.
	Choose func(c []Candidate) []int
	// Spare, of Evict with Choose, is told of each record picked that has not expired. until is that time, Unix ms,
	// until which its header pins it; 0: it does not. true: it stays. nil: none does.
	Spare func(c Candidate, until uint64) bool
	// Expired records for which Mine is false are left to others until they have been expired since Late
	// (Unix ms). nil: none is left. Evict without Choose.
	Mine func(unit uint32) bool
	Late uint64
	// Only, of Evict without Choose, are the fingerprints of the records to look at. They are those in the group at
	// Off and in those at More, in that order. For these records the header alone says whether they have expired.
	// nil: every record is looked at.
	Only [][]uint16

	// Answer.
	Records  uint64            // linked, at the head
	Settled  uint64            // intents taken away
	Units    uint64            // of their places
	Synced   uint64            // words that differed between replicas
	Bytes    uint64            // read and written, but for atomics
	Moved    uint64            // records moved or relocated
	Repaired uint64            // copies rewritten from a good one
	Lost     uint64            // records without a good copy, or that went with a child
	Freed    uint64            // of Lost: those that are gone now
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
	Pinned  uint64 // until when its header says that it is pinned, Unix ms; 0: it does not
	Expired bool
}

const (
	// batchBytes bounds the records that one round reads; a longer one is read alone. An Op holds so much registered
	// memory, and a lane's other operations wait so long for the wire.
	batchBytes = 256 << 10
	// A damaged segment could have hundreds of findings, and each travels to the directory.
	maxFindings = 8
	maxFinding  = 200 // bytes
	// maxLooks bounds how often a group that keeps changing is looked at before
	// the Op waits a little.
	maxLooks = 64
	// maxFrozen bounds how often a word that stays FROZEN is waited for.
	maxFrozen = 200
)

// base is the index.Op that performs an Op.
type base = index.Base

// Op is one operation of a janitor's kinds.
type Op struct {
	Kind index.Kind
	Work Work

	*base // nil until Begin
	work  workState
}

var _ index.Machine = (*Op)(nil)

// New makes an operation of kind k, which is a janitor's, that does w: the Machine of an index.Op of the same
// kind. It begins with its own copy of w, so it may outlive its caller, and leaves the answer in Op.Work.
func New(k index.Kind, w *Work) *Op { return &Op{Kind: k, Work: *w} }

// workState is where an Op stands.
type workState struct {
	then func() index.Action // consumes the round under way; also where a sync leads back to

	// at the child: which of its segments are at work, of those that take what is in one of the parent's
	parts  []uint32
	groups []uint64 // region offsets of the groups at work: home and stash, for each of parts, or one
	// Memory of the index.Op, taken when it is first needed and kept over a restart.
	images [][index.MaxChain][]byte // the groups by replica
	copies [index.MaxChain][]byte   // a segment by replica
	buf    []byte                   // for records; see scratch

	header layout.Header // of groups[0] at A
	items  []*item       // the records at work
	swings []swing       // the words that are being changed
	behind []wordRef     // words that differed between replicas when the lock was taken
	looks  int           // times that the groups were read; see maxLooks
	frozen int           // times that a FROZEN word was waited for; not reset by a restart
	// places are all that were taken, or unlinked, since the Op began: each is handed over exactly once, however it
	// ends.
	places []place

	// These are what takePlaces did not get.
	wantPG   uint32
	wantCode uint8

	evicts []evictGroup

	keys map[keyHash]wordRef
	same [][2]wordRef // slots that seem to name the same key
	// ruins are the segment's records of which no copy is good.
	ruins []*item
}

// wordRef is one word of a group: a slot or index.HeaderSlot. Replicas are laid out alike, so it names the word on
// each.
type wordRef struct {
	base uint64 // region offset of the group
	slot uint8
}

func (r wordRef) off() uint64 {
	if r.slot == index.HeaderSlot {
		return r.base
	}
	return r.base + layout.SlotOff(int(r.slot))
}

// item is a slot and the record that it names, as one Op saw it. Nobody is kept from changing the word: whatever is
// done for an item is decided by a CAS that expects x.
type item struct {
	wordRef
	x     layout.Word // as last seen at A
	stale bool        // x changed after the record was read
	mine  bool        // of the moved set
	done  bool        // the child has it

	under layout.Word // what the slot holds if that is an intent which names x; 0: x
	tried bool        // a good copy was looked for
	lost  bool        // and there is none

	key      []byte         // its own memory
	hash     uint64         // of key
	id       uint64         // of a manifest
	chunks   []layout.Chunk // of a manifest whose chunks are copied, too
	oldParts []layout.Chunk // of a manifest; of an intent, the places of what it names
	long     []layout.Word  // of an intent: the manifests that it names, whose chunks are not in oldParts yet

	// Of an intent that is to be settled.
	in      *layout.Intent
	verdict layout.Verdict // Undecided: it is gone
	before  *item          // the record before, of which a copy takes the intent's place after an ABORT
	gone    []layout.Chunk // of the manifests that go with it

	// The copy's place, and those of its chunks.
	havePlace bool
	n         layout.Word // of the copy
	newID     uint64      // of the copy's manifest
	newChunks []layout.Chunk
	copied    int // of newChunks
	// triedChunk is the chunk, counted from 1, of which a good copy was looked for last.
	triedChunk int
	lostChunk  bool  // there is none
	written    bool  // the copy is complete on every replica
	fresh      []int // the places, in workState.places

	evicted Evicted
}

// Where is index.Machine: a Move and an Abandon go by their shard, all else by its placement group.
func (o *Op) Where(m index.Router) (index.Route, bool) {
	switch o.Kind {
	case index.Move, index.Abandon:
		return m.RouteMove(o.Work.Shard)
	}
	return m.RoutePG(o.Work.PG, o.Work.Frozen)
}

// OnFrozen is index.Machine: it is as the directory's job has it.
func (o *Op) OnFrozen() bool { return o.Work.Frozen }

// Wanted is index.Machine; it means something only after Next returned Alloc.
func (o *Op) Wanted() (pg uint32, code uint8) { return o.work.wantPG, o.work.wantCode }

// Begin is index.Machine: it begins the group or segment afresh.
func (o *Op) Begin(b *index.Base) index.Action {
	o.base = b
	w := &o.work
	o.Release(true)
	w.then = nil
	w.items, w.swings, w.behind, w.looks = nil, w.swings[:0], nil, 0
	if o.Route.PG.Replicas == 0 || o.Route.PG.Replicas > index.MaxChain {
		return o.Finish(fmt.Errorf("pg %d: chain of %d replicas", o.Route.PG.ID, o.Route.PG.Replicas))
	}
	switch o.Kind {
	case index.Move, index.Abandon:
		return o.startMove()
	}
	n := uint64(layout.GroupSize)
	if o.Kind == index.Sync || o.Kind == index.Scrub {
		n = layout.SegmentSize
	}
	if err := checkIndex(o.Route.PG, o.Work.Off, n); err != nil {
		return o.Finish(err)
	}
	switch o.Kind {
	case index.Sync:
		return o.readCopies(o.syncSegment)
	case index.Scrub:
		return o.startScrub()
	case index.Clean:
		return o.startClean()
	case index.Evict:
		return o.startEvict()
	case index.SettleAll:
		return o.startSettle()
	default:
		return o.relocate()
	}
}

// checkIndex reports whether n bytes at off are groups of pg's index area. A Work comes from the directory, whose map
// may be newer or older than the session's: what it says is checked like what memory says.
func checkIndex(pg *index.PG, off, n uint64) error {
	end := uint64(pg.HeapLo) * layout.UnitSize
	if pg.AccessOff != 0 {
		end = pg.AccessOff
	}
	if off < layout.RegionPageSize || off%layout.GroupSize != 0 || off > end || n > end-off {
		return fmt.Errorf("pg %d: no group at offset %#x of its index", pg.ID, off)
	}
	return nil
}

// Next is index.Machine: it consumes the round under way.
func (o *Op) Next() index.Action { return o.work.then() }

// Unsynced is index.Machine: what only looks at words goes on, and tells.
func (o *Op) Unsynced(err error) (goesOn bool) {
	if o.Kind != index.Sync && o.Kind != index.Scrub {
		return false
	}
	o.finding("%v", err)
	return true
}

// await posts the round in o.Accesses as step; then consumes it.
func (o *Op) await(step index.Step, then func() index.Action) index.Action {
	o.work.then = then
	return o.Post(step)
}

func (o *Op) finishWork() index.Action {
	if invariants.On {
		for _, p := range o.work.places {
			invariants.Assert(p.state == placeDone || p.state == placeOwn, "%v ends and has not handed over place %v",
				o.Kind, p.w)
		}
	}
	o.Work.Bytes = o.Bytes()
	return o.Finish(nil)
}

// finding tells people of something that the Op can neither mend nor is stopped by.
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
func (o *Op) lockWork(then func() index.Action) index.Action {
	o.NewRound()
	o.AddLock(o.work.groups[0])
	o.addImages()
	return o.await(index.StepLockGroups, func() index.Action {
		switch held, ask := o.Locked(); {
		case ask != 0:
			return ask
		case !held:
			return o.lockWork(then)
		}
		o.work.header = o.image(0, 0).Header()
		o.work.behind = o.slotsBehind()
		return then()
	})
}

func wordAt(b []byte) layout.Word { return layout.Word(binary.LittleEndian.Uint64(b)) }
