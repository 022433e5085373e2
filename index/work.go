package index

import (
	"bytes"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/kvd-project/kvd/internal/layout"
)

// Work is the request of a janitor's kinds and what they found.
//
// Sync, Scrub: the cluster at Off of placement group PG. Clean: the group at Off;
// Wipe leaves zeroes on every replica. Relocate: the group at Off, moving what lies in
// Extents, or, with Count, moving what lies in Window alone, counting what is linked and
// listing what lies in Extents. Evict: the groups at Off and More. Move, Abandon: home group
// Group (cluster*16 + group) of shard Shard, with what of its keys is in the stash.
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
	Records  uint64            // linked, at the arbiter
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

	groups [2]uint64 // region offsets of the groups at work: home and stash, or one
	nGroup int
	images [2][maxChain][]byte // the groups by replica
	copies [maxChain][]byte    // a cluster by replica
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

// placeState says whose a place is, as far as this Op knows.
type placeState uint8

const (
	placeDone   placeState = iota // none of this Op's business, or no longer
	placeOwn                      // taken; no word ever named it
	placePosted                   // a CAS is under way that links or unlinks it
	placeFreed                    // A has unlinked it for us; not yet published
)

type place struct {
	pg    *PG
	w     layout.Word
	state placeState
}

// swing is one word to be taken from x to n, at A and then down the chain.
type swing struct {
	wordRef
	x, n  layout.Word
	found layout.Word // at A
	won   bool        // A holds n
	exact bool        // every stage so far took exactly x→n
	fresh []int       // places that n links
	old   []int       // places that x gives free
	it    *item
}

// Wanted is what Alloc asked for: so many units in one run, in placement group pg.
func (o *Op) Wanted() (pg uint32, units uint32) {
	if w := o.work; w != nil {
		return w.wantPG, layout.UnitsOf(w.wantCode)
	}
	return o.Route.PG.ID, layout.UnitsOf(o.wantCode)
}

// ---- the machine -----------------------------------------------------------

// startWork begins the group or cluster afresh under o.Route. Nothing is under way.
func (o *Op) startWork() Action {
	if o.work == nil {
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
		n = layout.ClusterSize
	}
	if err := checkIndex(o.Route.PG, o.Work.Off, n); err != nil {
		return o.finish(err)
	}
	switch o.Kind {
	case Sync:
		return o.readCopies(o.syncCluster)
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
	if o.work != nil {
		o.toParent()
		o.dropWork()
	}
}

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

// ---- places ----------------------------------------------------------------

// addPlace notes a place and returns its number.
func (o *Op) addPlace(pg *PG, w layout.Word, s placeState) int {
	o.work.places = append(o.work.places, place{pg, w, s})
	return len(o.work.places) - 1
}

func (w *workState) turn(places []int, s placeState) {
	for _, i := range places {
		w.places[i].state = s
	}
}

// dropWork gives back the places that no word ever named, and leaves to recall those
// of which that is not certain. Nothing is under way to them.
func (o *Op) dropWork() {
	for _, p := range o.work.places {
		switch p.state {
		case placeOwn:
			o.env.Unuse(p.pg, p.w)
		case placePosted, placeFreed:
			o.env.Leak(p.pg, p.w)
		}
	}
	o.work.places = o.work.places[:0]
}

// leakWork leaves every place to recall: a verb may still land there.
func (o *Op) leakWork() {
	if o.work == nil {
		return
	}
	for _, p := range o.work.places {
		if p.state != placeDone {
			o.env.Leak(p.pg, p.w)
		}
	}
	o.work.places = o.work.places[:0]
}

// unlinkFreed hands over what has been unlinked and published.
func (o *Op) unlinkFreed() {
	for i := range o.work.places {
		if p := &o.work.places[i]; p.state == placeFreed {
			p.state = placeDone
			o.env.Unlinked(p.pg, p.w)
		}
	}
}

func chunkWord(c layout.Chunk) layout.Word { return layout.MakeLive(c.Ver, 0, c.Code, c.Unit) }

// takePlaces takes a place in pg for a copy of it's record, and for its chunks if
// they are to be copied. It is all or none.
func (o *Op) takePlaces(pg *PG, it *item) bool {
	take := func(code uint8) (layout.Chunk, bool) {
		unit, ver, size, ok := o.env.Alloc(pg, code)
		if !ok {
			o.work.wantPG, o.work.wantCode = pg.ID, code
			o.givePlaces(it)
			return layout.Chunk{}, false
		}
		c := layout.Chunk{Unit: unit, Code: size, Ver: ver}
		it.fresh = append(it.fresh, o.addPlace(pg, chunkWord(c), placeOwn))
		return c, true
	}
	for _, c := range it.chunks {
		n, ok := take(c.Code)
		if !ok {
			return false
		}
		it.newChunks = append(it.newChunks, n)
	}
	c, ok := take(it.x.Code())
	if !ok {
		return false
	}
	it.havePlace = true
	it.n = layout.MakeLive(c.Ver, it.x.FP(), c.Code, c.Unit)
	o.work.places[it.fresh[len(it.fresh)-1]].w = it.n
	if len(it.chunks) > 0 {
		it.newID = o.env.Version(0)
	}
	return true
}

// givePlaces gives back it's places, which no word named and nothing is under way to.
func (o *Op) givePlaces(it *item) {
	for _, i := range it.fresh {
		if p := &o.work.places[i]; p.state == placeOwn {
			p.state = placeDone
			o.env.Unuse(p.pg, p.w)
		}
	}
	it.havePlace, it.written, it.copied, it.fresh, it.newChunks = false, false, 0, nil, nil
}

// ---- reading ---------------------------------------------------------------

// scratch is n bytes that the next call takes again.
func (o *Op) scratch(n int) []byte {
	w := o.work
	if len(w.buf) < n {
		size := 4096
		for size < n {
			size *= 2
		}
		w.buf = o.env.Buf(o, size)
	}
	return w.buf[:n]
}

func aligned(n int) int { return (n + 7) &^ 7 }

// image is the i-th group at work as replica k showed it last.
func (o *Op) image(i int, k uint8) layout.Group {
	b := &o.work.images[i][k]
	if *b == nil {
		*b = o.env.Buf(o, layout.GroupSize)
	}
	return layout.Group(*b)
}

// addImages adds READs of the groups at work on every replica.
func (o *Op) addImages() {
	for k := range o.Route.PG.Replicas {
		for i := range o.work.nGroup {
			o.add(Access{Verb: Read, Space: Index, Replica: k, Off: o.work.groups[i], Buf: o.image(i, k)})
		}
	}
}

// setGroups says which groups are at work.
func (o *Op) setGroups(off ...uint64) {
	o.work.nGroup = copy(o.work.groups[:], off)
}

// differing lists the words in which a replica's group at base differs from that of the
// replica before it; slots before the header, which speaks of them.
func differing(list []wordRef, replicas uint8, base uint64, group func(k uint8) layout.Group) []wordRef {
	for i := range layout.GroupSlots {
		for k := uint8(1); k < replicas; k++ {
			if group(k).Slot(i) != group(k-1).Slot(i) {
				list = append(list, wordRef{base, uint8(i)})
				break
			}
		}
	}
	for k := uint8(1); k < replicas; k++ {
		if group(k).Header() != group(k-1).Header() {
			return append(list, wordRef{base, headerSlot})
		}
	}
	return list
}

// behind lists the slots of the groups at work that differ between replicas.
func (o *Op) behind() (list []wordRef) {
	for i := range o.work.nGroup {
		list = differing(list, o.Route.PG.Replicas, o.work.groups[i], func(k uint8) layout.Group { return o.image(i, k) })
	}
	return slices.DeleteFunc(list, func(r wordRef) bool { return r.slot == headerSlot })
}

// fetch READs n bytes of each item's record at A (0: all of it), in batches, and lets
// got judge them.
func (o *Op) fetch(list []*item, n int, got func(it *item, b []byte) error, then func() Action) Action {
	size := func(it *item) int {
		if n != 0 {
			return n
		}
		return it.x.ReadLen()
	}
	if len(list) == 0 {
		return then()
	}
	m := o.readBatch(list, size)
	return o.await(func() Action {
		for i, it := range list[:m] {
			if err := got(it, o.Accesses[i].Buf); err != nil {
				return o.finish(err)
			}
		}
		return o.fetch(list[m:], n, got, then)
	})
}

// readBatch adds a READ at A for as many of the items as one round may have.
func (o *Op) readBatch(list []*item, size func(*item) int) (n int) {
	total := 0
	for n < len(list) && (n == 0 || total+aligned(size(list[n])) <= batchBytes) {
		total += aligned(size(list[n]))
		n++
	}
	buf := o.scratch(total)
	o.begin()
	for _, it := range list[:n] {
		o.add(Access{Verb: Read, Space: Heap, Off: it.x.Off(), Buf: buf[:size(it):size(it)]})
		buf = buf[aligned(size(it)):]
	}
	return n
}

// parseOf parses the record that it names, not a chunk.
func (o *Op) parseOf(it *item, b []byte) (layout.Record, error) {
	r, err := layout.ParseRecord(b)
	if err == nil && r.Flags&layout.FlagChunk != 0 {
		err = &layout.CorruptError{What: "record", Off: 10, Check: "chunk named by a slot", Got: uint64(r.Flags)}
	}
	if err != nil {
		return r, fmt.Errorf("%s: record at %#x: %w", o.where(it.wordRef), it.x.Off(), err)
	}
	return r, nil
}

// partsOf parses the manifest r.
func (o *Op) partsOf(it *item, r *layout.Record) (m layout.Manifest, err error) {
	if m, err = layout.ParseManifest(r.Value, o.Route.PG.HeapLo, o.Route.PG.HeapHi); err != nil {
		err = fmt.Errorf("%s: record at %#x: %w", o.where(it.wordRef), it.x.Off(), err)
	}
	return m, err
}

// inHeap checks a word's place.
func (o *Op) inHeap(r wordRef, x layout.Word) error {
	if layout.InHeap(x, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
		return nil
	}
	return fmt.Errorf("%s: %w", o.where(r), &layout.CorruptError{What: "slot", Off: layout.SlotOff(int(r.slot)),
		Check: "outside the heap", Got: uint64(x)})
}

// ---- swings ----------------------------------------------------------------

// swingA takes every word of w.swings from x to n at A.
func (o *Op) swingA(then func() Action) Action { return o.swingStage(0, 0, then) }

// swingStage does so at replica k, for those that may go on blindly there.
func (o *Op) swingStage(k uint8, from int, then func() Action) Action {
	w := o.work
	o.begin()
	next := from
	for ; next < len(w.swings) && len(o.Accesses) < MaxCAS; next++ {
		s := &w.swings[next]
		if k > 0 && !s.exact {
			continue
		}
		o.add(Access{Verb: CAS, Space: Index, Replica: k, Off: s.off(), Expect: uint64(s.x), New: uint64(s.n)})
		if k == 0 {
			w.turn(s.fresh, placePosted)
			w.turn(s.old, placePosted)
		}
	}
	if len(o.Accesses) == 0 {
		return then()
	}
	return o.await(func() Action {
		i := 0
		for j := from; j < next; j++ {
			s := &w.swings[j]
			if k > 0 && !s.exact {
				continue
			}
			f := layout.Word(o.Accesses[i].Found)
			i++
			s.exact = f == s.x
			if k > 0 {
				continue
			}
			s.found, s.won = f, s.exact
			if s.won {
				w.turn(s.fresh, placeDone)
				w.turn(s.old, placeFreed)
			} else {
				w.turn(s.fresh, placeOwn)
				w.turn(s.old, placeDone)
			}
		}
		return o.swingStage(k, next, then)
	})
}

// publishSwings carries what A took down the chain, blindly as far as each stage
// took exactly x→n, by sync from the first other finding on.
func (o *Op) publishSwings(then func() Action) Action { return o.publishFrom(1, then) }

func (o *Op) publishFrom(k uint8, then func() Action) Action {
	if k < o.Route.PG.Replicas {
		return o.swingStage(k, 0, func() Action { return o.publishFrom(k+1, then) })
	}
	var rest []wordRef
	for _, s := range o.work.swings {
		if s.won && !s.exact {
			rest = append(rest, s.wordRef)
		}
	}
	return o.syncWords(rest, then)
}

// syncWords syncs each word of list.
func (o *Op) syncWords(list []wordRef, then func() Action) Action {
	w := o.work
	if o.Route.PG.Replicas == 1 || len(list) == 0 {
		o.syncBase = 0
		return then()
	}
	w.then = func() Action { return o.syncWords(list[1:], then) }
	o.retries = 0
	o.syncBase = list[0].base
	return o.sync(list[0].slot, 1, stepWork)
}

// setHeaders changes the header of the group at base by f, from A on down the chain,
// each from the replica's own value. guess is what the first may hold.
func (o *Op) setHeaders(base uint64, k uint8, guess layout.Header, f func(layout.Header) layout.Header, then func() Action) Action {
	if k >= o.Route.PG.Replicas {
		return then()
	}
	o.begin()
	// Where nothing is to change the CAS only tells.
	o.add(Access{Verb: CAS, Space: Index, Replica: k, Off: base, Expect: uint64(guess), New: uint64(f(guess))})
	return o.await(func() Action {
		found := layout.Header(o.Accesses[0].Found)
		if found == guess || f(found) == found {
			return o.setHeaders(base, k+1, guess, f, then)
		}
		if o.work.looks++; o.work.looks > maxLooks {
			return o.leave(Backoff)
		}
		return o.setHeaders(base, k, found, f, then)
	})
}

// ---- lock ------------------------------------------------------------------

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

func (o *Op) finishWork() Action { return o.finish(nil) }

// ---- Sync ------------------------------------------------------------------

// readCopies READs the cluster on every replica.
func (o *Op) readCopies(then func() Action) Action {
	o.begin()
	for k := range o.Route.PG.Replicas {
		b := &o.work.copies[k]
		if *b == nil {
			*b = o.env.Buf(o, layout.ClusterSize)
		}
		o.add(Access{Verb: Read, Space: Index, Replica: k, Off: o.Work.Off, Buf: *b})
	}
	return o.await(then)
}

// groupOf is group i of the cluster as replica k showed it.
func (o *Op) groupOf(i int, k uint8) layout.Group {
	return layout.Group(o.work.copies[k][i*layout.GroupSize:][:layout.GroupSize])
}

// clusterDiffers lists the words of the cluster that differ between replicas.
func (o *Op) clusterDiffers() (list []wordRef) {
	for i := range layout.ClusterGroups + 1 {
		list = differing(list, o.Route.PG.Replicas, o.Work.Off+uint64(i)*layout.GroupSize,
			func(k uint8) layout.Group { return o.groupOf(i, k) })
	}
	return list
}

func (o *Op) syncCluster() Action {
	list := o.clusterDiffers()
	if Mutation(MutJoinSkipsEmpty) {
		list = slices.DeleteFunc(list, func(r wordRef) bool {
			i := int((r.base - o.Work.Off) / layout.GroupSize)
			return r.slot != headerSlot && o.groupOf(i, 0).Slot(int(r.slot)).State() == layout.Empty
		})
	}
	o.Work.Synced += uint64(len(list))
	return o.syncWords(list, o.finishWork)
}

// ---- Move ------------------------------------------------------------------

// startMove begins Move and Abandon.
func (o *Op) startMove() Action {
	r := &o.Route
	if o.Kind == Move && (r.Child == nil || r.Child.PG == nil) {
		return o.leave(Refresh)
	}
	if uint64(o.Work.Group) >= uint64(r.Clusters)*layout.ClusterGroups {
		return o.finish(fmt.Errorf("shard %d has no group %d", r.Shard, o.Work.Group))
	}
	home, stash := o.groupAt(r)
	if err := checkIndex(r.PG, stash, layout.GroupSize); err != nil {
		return o.finish(err)
	}
	if o.Kind == Abandon {
		o.setGroups(home, stash)
		return o.lockWork(o.abandon)
	}
	if _, s := o.groupAt(r.Child); r.Child.Clusters != r.Clusters || checkIndex(r.Child.PG, s, layout.GroupSize) != nil ||
		r.Child.PG.Replicas == 0 || r.Child.PG.Replicas > maxChain {
		return o.finish(fmt.Errorf("shard %d: its child %d at %#x of pg %d is not its like", r.Shard, r.Child.Shard, r.Child.ShardOff, r.Child.PG.ID))
	}
	o.setGroups(home, stash)
	return o.lockWork(o.moveLocked)
}

// groupAt gives the region offsets of home group Work.Group in r's array and of its
// stash.
func (o *Op) groupAt(r *Route) (home, stash uint64) {
	cluster := r.ShardOff + uint64(o.Work.Group/layout.ClusterGroups)*layout.ClusterSize
	return cluster + uint64(o.Work.Group%layout.ClusterGroups)*layout.GroupSize, cluster + layout.StashGroup*layout.GroupSize
}

func (o *Op) moveLocked() Action {
	if err := o.damaged(o.image(0, 0), o.work.groups[0], 0); err != nil {
		return o.finish(err)
	}
	if h := o.work.header; h.Split() && h.Depth() > o.Route.Depth {
		// All but the header was everywhere before A got it. The header still comes
		// after whatever differs: readers go by it.
		return o.syncWords(o.work.behind, func() Action {
			return o.syncWords([]wordRef{{o.work.groups[0], headerSlot}}, o.finishWork)
		})
	}
	return o.readMoving()
}

// readMoving finds the moved set in the groups just read at A. Under the lock
// nothing is inserted; keys of the set may be updated and deleted.
func (o *Op) readMoving() Action {
	w := o.work
	if w.looks++; w.looks > maxLooks {
		return o.leave(Backoff)
	}
	old := w.items
	w.items = nil
	var unread []*item
	for i := range w.nGroup {
		if i == 1 && !o.image(0, 0).Header().OVF() {
			break // none of its keys is in the stash
		}
		for j := range layout.GroupSlots {
			x := o.image(i, 0).Slot(j)
			if !x.Readable() {
				continue
			}
			ref := wordRef{w.groups[i], uint8(j)}
			if err := o.inHeap(ref, x); err != nil {
				return o.finish(err)
			}
			at := slices.IndexFunc(old, func(it *item) bool {
				return it.wordRef == ref && !it.stale && it.x.WithState(layout.Live) == x.WithState(layout.Live)
			})
			if at >= 0 {
				old[at].x = x
				w.items = append(w.items, old[at])
				old = slices.Delete(old, at, at+1)
				continue
			}
			it := &item{wordRef: ref, x: x}
			w.items, unread = append(w.items, it), append(unread, it)
		}
	}
	for _, it := range old {
		o.givePlaces(it)
	}
	return o.fetch(unread, 0, o.gotMoving, o.placeMoving)
}

// gotMoving judges whether a record belongs to the moved set. One that cannot be
// read might, and would be lost.
func (o *Op) gotMoving(it *item, b []byte) error {
	r, err := o.parseOf(it, b)
	if err != nil {
		return err
	}
	hash := o.env.HashOf(r.Key)
	home, _ := layout.GroupOff(hash, o.Route.Clusters)
	switch inHome := it.base == o.work.groups[0]; {
	case o.Route.ShardOff+home != o.work.groups[0] && inHome:
		return fmt.Errorf("%s: record at %#x: its key belongs into the group at %#x", o.where(it.wordRef), it.x.Off(), o.Route.ShardOff+home)
	case o.Route.ShardOff+home != o.work.groups[0]:
		return nil
	case o.Kind == Move && !o.Route.moves(hash):
		if it.x.State() == layout.Frozen {
			o.finding("%s: FROZEN, but its key does not move", o.where(it.wordRef))
		}
		return nil
	}
	it.mine, it.hash, it.key = true, hash, bytes.Clone(r.Key)
	if r.Flags&layout.FlagManifest != 0 && o.Kind == Move && o.Route.Child.PG.ID != o.Route.PG.ID {
		m, err := o.partsOf(it, &r)
		if err != nil {
			return err
		}
		it.id, it.chunks = m.ID, m.Chunks
	}
	return nil
}

// mine are the items of the moved set.
func (w *workState) mine() (list []*item) {
	for _, it := range w.items {
		if it.mine {
			list = append(list, it)
		}
	}
	return list
}

// placeMoving takes places for all records that go to another placement group, before
// anything is frozen that would have to wait for memory.
func (o *Op) placeMoving() Action {
	if child := o.Route.Child.PG; child.ID != o.Route.PG.ID {
		for _, it := range o.work.mine() {
			if !it.havePlace && !o.takePlaces(child, it) {
				return o.noMemory()
			}
		}
	}
	return o.freeze(false)
}

// noMemory starts over when there is memory.
func (o *Op) noMemory() Action {
	o.dropWork()
	return o.leave(Alloc)
}

// freeze bars updates and deletes: LIVE→FROZEN at A. again: a word was not what was
// read, so the group is read anew before anything is copied.
func (o *Op) freeze(again bool) Action {
	w := o.work
	w.swings = w.swings[:0]
	for _, it := range w.mine() {
		if it.x.State() == layout.Live {
			w.swings = append(w.swings, swing{wordRef: it.wordRef, x: it.x, n: it.x.WithState(layout.Frozen), it: it})
		}
	}
	if len(w.swings) == 0 {
		if again {
			o.begin()
			o.addImages()
			return o.await(o.readMoving)
		}
		return o.frozen()
	}
	if w.looks++; w.looks > maxLooks {
		return o.leave(Backoff)
	}
	return o.swingA(func() Action {
		for i := range w.swings {
			s := &w.swings[i]
			switch {
			case s.won:
				s.it.x = s.n
				continue
			case s.found.State() == layout.Live && s.base == w.groups[0] && layout.InHeap(s.found, o.Route.PG.HeapLo, o.Route.PG.HeapHi):
				// No insert happens here, so it is the same key: a busy one is
				// frozen as it is found, and read afterwards.
				s.it.x = s.found
			default:
				s.it.x = 0
			}
			s.it.stale, again = true, true
		}
		return o.freeze(again)
	})
}

// frozen brings FROZEN down to P: a reader of P must know that the word may be
// on its way before there is another.
func (o *Op) frozen() Action {
	w := o.work
	next := o.readChild
	if Mutation(MutMovedBeforeCopy) {
		next = func() Action { return o.setMoved(o.readChild) }
	}
	if len(w.mine()) == 0 {
		return o.setMoved(o.setSplit)
	}
	if Mutation(MutCopyBeforeFrozen) {
		return next()
	}
	w.swings = w.swings[:0]
	for _, it := range w.mine() {
		// Whoever froze it, A took exactly LIVE→FROZEN.
		w.swings = append(w.swings, swing{wordRef: it.wordRef, x: it.x.WithState(layout.Live), n: it.x, won: true, exact: true})
	}
	return o.publishSwings(next)
}

// readChild reads the child's groups.
func (o *Op) readChild() Action {
	if o.work.looks++; o.work.looks > maxLooks {
		return o.leave(Backoff)
	}
	o.toChild()
	o.setGroups(o.groupAt(&o.Route))
	o.begin()
	o.addImages()
	return o.await(o.gotChild)
}

// atParent comes back from the child, to the groups there.
func (o *Op) atParent() {
	o.toParent()
	o.setGroups(o.groupAt(&o.Route))
}

// gotChild looks which of the keys the child has: a janitor before may have copied
// some.
func (o *Op) gotChild() Action {
	w := o.work
	child := o.Route.PG
	same := child.ID == w.parent.PG.ID
	late := o.behind()
	var half []wordRef // copied, but not on every replica
	var cands []*item
	of := map[*item]*item{}
	for _, it := range w.mine() {
		it.done = false
		for i := range w.nGroup {
			for j := range layout.GroupSlots {
				x, ref := o.image(i, 0).Slot(j), wordRef{w.groups[i], uint8(j)}
				switch {
				case !x.Readable() || x.FP() != layout.FP(it.hash):
				case same && x.WithState(layout.Live) == it.x.WithState(layout.Live):
					it.done = true
					if slices.Contains(late, ref) {
						half = append(half, ref)
					}
				case layout.InHeap(x, child.HeapLo, child.HeapHi):
					c := &item{wordRef: ref, x: x}
					cands, of[c] = append(cands, c), it
				}
			}
		}
	}
	got := func(c *item, b []byte) error {
		// What cannot be read is no key of this group: nobody but a janitor before
		// wrote one, and its record was complete first.
		if r, err := o.parseOf(c, b); err != nil {
			o.finding("%v", err)
		} else if bytes.Equal(r.Key, of[c].key) {
			of[c].done = true
			if slices.Contains(late, c.wordRef) {
				half = append(half, c.wordRef)
			}
		}
		return nil
	}
	return o.fetch(cands, 0, got, func() Action {
		if Mutation(MutChildOnlyAtA) {
			half = nil
		}
		return o.syncWords(half, o.linkChild)
	})
}

// linkChild chooses a slot of the child for every key that it lacks, and links it
// there: the parent's slot if that is free, so that a hint stays right.
func (o *Op) linkChild() Action {
	w := o.work
	var todo []*item
	for _, it := range w.mine() {
		if !it.done {
			todo = append(todo, it)
		}
	}
	if len(todo) == 0 {
		return o.setMoved(o.setSplit)
	}
	w.swings = w.swings[:0]
	var taken [2][layout.GroupSlots]bool
	choose := func(it *item, i, j int) bool {
		x := o.image(i, 0).Slot(j)
		if x.State() != layout.Empty || taken[i][j] {
			return false
		}
		taken[i][j] = true
		w.swings = append(w.swings, swing{wordRef: wordRef{w.groups[i], uint8(j)}, x: x, it: it})
		return true
	}
	first := func(it *item, i int) bool {
		for j := range layout.GroupSlots {
			if choose(it, i, j) {
				return true
			}
		}
		return false
	}
	parentHome, _ := o.groupAt(&w.parent)
	var rest []*item
	for _, it := range todo {
		if it.base != parentHome || !choose(it, 0, int(it.slot)) {
			rest = append(rest, it)
		}
	}
	overflow := false
	for _, it := range rest {
		if first(it, 0) {
			continue
		}
		if overflow = true; !first(it, 1) {
			o.finding("%s: no slot is left for what moves there", o.where(wordRef{w.groups[0], headerSlot}))
			return o.leave(Grow)
		}
	}
	copies := todo
	if o.Route.PG.ID == w.parent.PG.ID {
		copies = nil
	}
	return o.copyItems(copies, func() Action {
		o.toChild()
		if !overflow {
			return o.swingChild()
		}
		return o.setHeaders(w.groups[0], 0, o.image(0, 0).Header(), func(h layout.Header) layout.Header { return h | layout.FlagOVF }, o.swingChild)
	})
}

func (o *Op) swingChild() Action {
	w := o.work
	for i := range w.swings {
		s := &w.swings[i]
		if s.n = s.it.x.WithState(layout.Live); s.it.havePlace {
			s.n, s.fresh = s.it.n, s.it.fresh
		}
	}
	linked := func() Action {
		for i := range w.swings {
			if !w.swings[i].won {
				return o.readChild() // taken meanwhile, in the stash
			}
			w.swings[i].it.done = true
		}
		return o.setMoved(o.setSplit)
	}
	return o.swingA(func() Action {
		if Mutation(MutChildOnlyAtA) {
			return linked()
		}
		return o.publishSwings(linked)
	})
}

// setMoved sends readers to the child, which has everything by now. The stash first: who
// finds a MOVED word of a key's fingerprint in the home group looks for the key in
// the child, wherever it was.
func (o *Op) setMoved(then func() Action) Action {
	w := o.work
	o.atParent()
	moved := func(i int, then func() Action) Action {
		w.swings = w.swings[:0]
		for _, it := range w.mine() {
			if it.base == w.groups[i] && it.x.State() == layout.Frozen {
				w.swings = append(w.swings, swing{wordRef: it.wordRef, x: it.x, n: it.x.WithState(layout.Moved), it: it})
			}
		}
		return o.swingA(func() Action {
			for i := range w.swings {
				s := &w.swings[i]
				if !s.won {
					return o.finish(fmt.Errorf("%s: holds %v instead of %v, which only its mover may change", o.where(s.wordRef), s.found, s.x))
				}
				s.it.x = s.n
				o.Work.Moved++
			}
			return o.publishSwings(then)
		})
	}
	// What somebody before has left between A and P comes first.
	return o.syncWords(w.behind, func() Action {
		return moved(1, func() Action { return moved(0, then) })
	})
}

// setSplit says that the group's move is complete.
func (o *Op) setSplit() Action {
	depth := uint8(layout.MigratedDepth)
	if o.Route.Split {
		depth = o.Route.Depth + 1
	}
	return o.setHeaders(o.work.groups[0], 0, o.work.header, func(h layout.Header) layout.Header {
		if h.Split() && h.Depth() >= depth {
			return h
		}
		return h.WithSplit(depth)
	}, o.finishWork)
}

// ---- copies ----------------------------------------------------------------

// copyItems writes a copy of every item's record, which A names, to its fresh place on
// all replicas, chunks first. A Move's go to the child.
func (o *Op) copyItems(list []*item, then func() Action) Action {
	list = slices.DeleteFunc(slices.Clone(list), func(it *item) bool { return it.written })
	if len(list) == 0 {
		return then()
	}
	o.toParent()
	for _, it := range list {
		if it.copied < len(it.newChunks) {
			return o.copyChunk(it, func() Action { return o.copyItems(list, then) })
		}
	}
	n := o.readBatch(list, func(it *item) int { return it.x.ReadLen() })
	return o.await(func() Action {
		bufs := make([][]byte, n)
		for i, it := range list[:n] {
			r, err := o.parseOf(it, o.Accesses[i].Buf)
			if err == nil && it.key != nil && !bytes.Equal(r.Key, it.key) {
				err = fmt.Errorf("%s: record at %#x has changed", o.where(it.wordRef), it.x.Off())
			}
			if err != nil {
				return o.finish(err)
			}
			bufs[i] = o.Accesses[i].Buf[:layout.RecordLen(len(r.Key), len(r.Value))]
			if len(it.newChunks) > 0 {
				m, err := o.partsOf(it, &r)
				if err == nil && (m.ID != it.id || len(m.Chunks) != len(it.newChunks)) {
					err = fmt.Errorf("%s: manifest at %#x has changed", o.where(it.wordRef), it.x.Off())
				}
				if err != nil {
					return o.finish(err)
				}
				layout.EncodeManifest(r.Value, layout.Manifest{Len: m.Len, ID: it.newID, Chunks: it.newChunks})
				layout.SetVersion(bufs[i], r.Version) // and the CRC
			}
		}
		if o.Kind == Move {
			o.toChild()
		}
		o.begin()
		for i, it := range list[:n] {
			for k := range o.Route.PG.Replicas {
				o.add(Access{Verb: Write, Space: Heap, Replica: k, Off: it.n.Off(), Buf: bufs[i]})
			}
		}
		return o.await(func() Action {
			for _, it := range list[:n] {
				it.written = true
			}
			return o.copyItems(list[n:], then)
		})
	})
}

// copyChunk copies the next chunk of a manifest under the new manifest's id.
func (o *Op) copyChunk(it *item, then func() Action) Action {
	from, to := it.chunks[it.copied], it.newChunks[it.copied]
	b := o.scratch(layout.SizeOf(from.Code))
	o.begin()
	o.add(Access{Verb: Read, Space: Heap, Off: uint64(from.Unit) * layout.UnitSize, Buf: b})
	return o.await(func() Action {
		r, err := parseChunk(b, it.id, it.copied)
		if err != nil {
			return o.finish(fmt.Errorf("%s: chunk %d at %#x: %w", o.where(it.wordRef), it.copied, uint64(from.Unit)*layout.UnitSize, err))
		}
		b := b[:layout.RecordLen(0, len(r.Value))]
		layout.SetVersion(b, it.newID)
		if o.Kind == Move {
			o.toChild()
		}
		o.begin()
		for k := range o.Route.PG.Replicas {
			o.add(Access{Verb: Write, Space: Heap, Replica: k, Off: uint64(to.Unit) * layout.UnitSize, Buf: b})
		}
		return o.await(func() Action {
			it.copied++
			return then()
		})
	})
}

// parseChunk parses chunk i of the manifest with the id given.
func parseChunk(b []byte, id uint64, i int) (layout.Record, error) {
	r, err := layout.ParseRecord(b)
	if err == nil && (r.Flags&layout.FlagChunk == 0 || r.Version != id || r.Expiry != uint64(i)) {
		err = &layout.CorruptError{What: "chunk", Check: "manifest id", Got: r.Version, Want: id}
	}
	return r, err
}

// replace gives every item's record a fresh place, a batch at a time; its old one is
// handed over.
func (o *Op) replace(list []*item, then func() Action) Action {
	w := o.work
	if len(list) == 0 {
		return then()
	}
	n, total := 0, 0
	for n < len(list) && (n == 0 || total+list[n].x.ReadLen() <= batchBytes) {
		if total += list[n].x.ReadLen(); len(list[n].chunks) > 0 {
			total += batchBytes
		}
		n++
	}
	for _, it := range list[:n] {
		if !o.takePlaces(o.Route.PG, it) {
			return o.noMemory()
		}
	}
	return o.copyItems(list[:n], func() Action {
		w.swings = w.swings[:0]
		for _, it := range list[:n] {
			s := swing{wordRef: it.wordRef, x: it.x, n: it.n, fresh: it.fresh, it: it}
			s.old = append(s.old, o.addPlace(o.Route.PG, it.x.WithState(layout.Live), placeDone))
			for _, c := range it.chunks {
				s.old = append(s.old, o.addPlace(o.Route.PG, chunkWord(c), placeDone))
			}
			w.swings = append(w.swings, s)
		}
		return o.swingA(func() Action {
			return o.publishSwings(func() Action {
				for i := range w.swings {
					if s := &w.swings[i]; s.won {
						s.it.done = true
						o.Work.Moved++
					} else {
						o.givePlaces(s.it)
					}
				}
				o.unlinkFreed()
				return o.replace(list[n:], then)
			})
		})
	})
}

// ---- Clean -----------------------------------------------------------------

func (o *Op) startClean() Action {
	o.setGroups(o.Work.Off)
	if o.Work.Wipe {
		o.begin()
		o.addImages()
		return o.await(o.wipe)
	}
	// A stash group's lock is taken as well: nobody else ever wants it.
	return o.lockWork(func() Action {
		free := o.Work.Target != 0 && o.Work.Target != o.Route.PG.ID
		return o.emptyWords(o.movedWords(), free, o.deleted, func() Action {
			return o.publishSwings(func() Action {
				o.unlinkFreed()
				return o.syncWords(o.work.behind, o.clearSplit)
			})
		})
	})
}

func (o *Op) deleted(x layout.Word) layout.Word { return x.Delete(o.env.Session()) }

// movedWords lists the MOVED words of the groups at work.
func (o *Op) movedWords() (list []*item) {
	for i := range o.work.nGroup {
		for j := range layout.GroupSlots {
			if x := o.image(i, 0).Slot(j); x.State() == layout.Moved {
				list = append(list, &item{wordRef: wordRef{o.work.groups[i], uint8(j)}, x: x})
			}
		}
	}
	return list
}

// clearSplit takes SPLIT from the header, from A on: nobody sets it again from a
// replica before. Then the Op is done.
func (o *Op) clearSplit() Action {
	for k := range o.Route.PG.Replicas {
		if o.image(0, k).Header().Split() {
			return o.setHeaders(o.work.groups[0], 0, o.work.header, func(h layout.Header) layout.Header { return h &^ layout.FlagSplit }, o.finishWork)
		}
	}
	return o.finishWork()
}

// emptyWords takes the words of list to what n says, at A. free: their places, which
// nothing else names, are ours then; unlinkFreed hands them over.
func (o *Op) emptyWords(list []*item, free bool, n func(layout.Word) layout.Word, then func() Action) Action {
	swingAll := func() Action { return o.emptyNow(list, n, then) }
	if !free {
		return swingAll()
	}
	var named, manifests []*item
	for _, it := range list {
		if err := o.inHeap(it.wordRef, it.x); err != nil {
			o.finding("%v", err)
			continue
		}
		it.mine = true
		named = append(named, it)
	}
	return o.readManifests(named, &manifests, false, swingAll)
}

// emptyNow is emptyWords where it is known which items are ours, and their chunks.
func (o *Op) emptyNow(list []*item, n func(layout.Word) layout.Word, then func() Action) Action {
	w := o.work
	w.swings = w.swings[:0]
	for _, it := range list {
		s := swing{wordRef: it.wordRef, x: it.x, n: n(it.x), it: it}
		if it.mine {
			s.old = append(s.old, o.addPlace(o.Route.PG, it.x.WithState(layout.Live), placeDone))
			for _, c := range it.oldParts {
				s.old = append(s.old, o.addPlace(o.Route.PG, chunkWord(c), placeDone))
			}
		}
		w.swings = append(w.swings, s)
	}
	return o.swingA(then)
}

// readManifests finds the manifests among the items' records at A, and their chunks.
// A bad one is a finding, or ends the Op if it must not be skipped.
func (o *Op) readManifests(list []*item, manifests *[]*item, must bool, then func() Action) Action {
	got := func(it *item, b []byte) error {
		if layout.RecordFlags(b[10])&layout.FlagManifest != 0 {
			*manifests = append(*manifests, it)
		}
		return nil
	}
	return o.fetch(list, layout.RecordHeaderSize, got, func() Action {
		return o.fetch(*manifests, 0, func(it *item, b []byte) error {
			r, err := o.parseOf(it, b)
			if err == nil {
				if r.Flags&layout.FlagManifest == 0 {
					return nil // half a look at something else
				}
				var m layout.Manifest
				if m, err = o.partsOf(it, &r); err == nil {
					it.id, it.oldParts = m.ID, m.Chunks
					return nil
				}
			}
			if !must {
				o.finding("%v", err)
				err = nil
			}
			return err
		}, then)
	})
}

// wipe leaves zeroes in a group that nobody reaches any more.
func (o *Op) wipe() Action {
	w := o.work
	g := o.image(0, 0)
	var gone []*item
	var stay [layout.GroupSlots]bool
	for i := range layout.GroupSlots {
		x, ref := g.Slot(i), wordRef{o.Work.Off, uint8(i)}
		if x.Readable() && !o.Work.Drop {
			o.finding("%s: %v in an array that nobody reaches", o.where(ref), x)
			stay[i] = true
		} else if x.State() != layout.Empty {
			gone = append(gone, &item{wordRef: ref, x: x})
		}
	}
	free := o.Work.Drop || o.Work.Target != 0 && o.Work.Target != o.Route.PG.ID
	return o.emptyWords(gone, free, func(layout.Word) layout.Word { return 0 }, func() Action {
		for i := range w.swings {
			if s := &w.swings[i]; s.won {
				clear(g[layout.SlotOff(int(s.slot)):][:8])
			}
		}
		return o.wipeFrom(0, stay)
	})
}

// wipeFrom clears what replica k and those behind it still show, and looks whether
// it is gone.
func (o *Op) wipeFrom(k uint8, stay [layout.GroupSlots]bool) Action {
	o.begin()
	for ; k < o.Route.PG.Replicas && len(o.Accesses) == 0; k++ {
		for off := uint64(0); off < layout.GroupSize; off += 8 {
			x := wordAt(o.image(0, k)[off:])
			if x == 0 || off >= layout.GroupSlotsOff && stay[(off-layout.GroupSlotsOff)/8] {
				continue
			}
			o.add(Access{Verb: CAS, Space: Index, Replica: k, Off: o.Work.Off + off, Expect: uint64(x), New: 0})
		}
	}
	if len(o.Accesses) == 0 {
		o.unlinkFreed()
		return o.finishWork()
	}
	return o.await(func() Action {
		for i := range o.Accesses {
			if a := &o.Accesses[i]; a.Found != a.Expect {
				// Somebody changed it after all.
				if o.work.looks++; o.work.looks > maxLooks {
					return o.finish(fmt.Errorf("pg %d group %#x keeps changing while it is wiped", o.Route.PG.ID, o.Work.Off))
				}
				o.begin()
				o.addImages()
				return o.await(o.wipe)
			}
		}
		return o.wipeFrom(k, stay)
	})
}

// ---- Abandon ---------------------------------------------------------------

// abandon undoes a move whose child was lost. What is MOVED went with it; what is
// FROZEN was never changed there.
func (o *Op) abandon() Action {
	w := o.work
	var frozen []*item
	for i := range w.nGroup {
		for j := range layout.GroupSlots {
			x, ref := o.image(i, 0).Slot(j), wordRef{w.groups[i], uint8(j)}
			if x.State() != layout.Frozen || i == 1 && !w.header.OVF() {
				continue
			}
			if err := o.inHeap(ref, x); err != nil {
				return o.finish(err)
			}
			frozen = append(frozen, &item{wordRef: ref, x: x})
		}
	}
	w.items = frozen
	return o.fetch(frozen, 0, o.gotMoving, func() Action {
		// The same word LIVE again would be one that somebody may remember.
		return o.replace(w.mine(), func() Action {
			for _, it := range w.mine() {
				if !it.done {
					return o.finish(fmt.Errorf("%s: changed while it was FROZEN", o.where(it.wordRef)))
				}
			}
			return o.abandonMoved()
		})
	})
}

func (o *Op) abandonMoved() Action {
	w := o.work
	return o.emptyWords(o.movedWords(), true, o.deleted, func() Action {
		for i := range w.swings {
			if w.swings[i].won {
				o.Work.Lost++
			}
		}
		return o.publishSwings(func() Action {
			o.unlinkFreed()
			return o.syncWords(w.behind, o.clearSplit)
		})
	})
}

// ---- Relocate --------------------------------------------------------------

// relocate looks for what lies in the extent, until there is nothing.
func (o *Op) relocate() Action {
	o.setGroups(o.Work.Off)
	o.begin()
	o.addImages()
	return o.await(func() Action {
		w := o.work
		if w.looks++; w.looks > maxLooks {
			return o.leave(Backoff)
		}
		g := o.image(0, 0)
		if Mutation(MutRecallPOnly) {
			g = o.image(0, o.Route.PG.publisher())
		}
		w.items = nil
		count := o.Work.Count
		if count {
			o.Work.Lost = 0
		}
		for j := range layout.GroupSlots {
			x, ref := g.Slot(j), wordRef{o.Work.Off, uint8(j)}
			if !x.Readable() {
				continue
			}
			if err := o.inHeap(ref, x); err != nil {
				if count {
					// It names no memory of the heap's, so it keeps none.
					o.Work.Lost++
					o.finding("%v", err)
					continue
				}
				return o.finish(err)
			}
			w.items = append(w.items, &item{wordRef: ref, x: x})
		}
		var manifests []*item
		// Without its manifest nobody knows the chunks of a long value, which a recall must not
		// free.
		must := !count || len(o.Work.Extents) > 0
		if count && o.Work.Window.Units == 0 {
			return o.readManifests(w.items, &manifests, must, o.countFound)
		}
		return o.readManifests(w.items, &manifests, must, o.relocateFound)
	})
}

// countFound counts what the group links. What a replica still shows that is gone at A is
// synced: it may lie in an extent of which all the rest becomes free.
func (o *Op) countFound() Action {
	o.Work.Records, o.Work.Units, o.Work.Linked, o.Work.Kept = 0, 0, map[uint32]uint32{}, nil
	kept := func(unit uint32, code uint8) {
		o.linked(unit, code)
		if slices.Contains(o.Work.Extents, unit/layout.ExtentUnits) {
			o.Work.Kept = append(o.Work.Kept, UnitRun{unit, layout.UnitsOf(code)})
		}
	}
	for _, it := range o.work.items {
		o.Work.Records++
		kept(it.x.Unit(), it.x.Code())
		for _, c := range it.oldParts {
			kept(c.Unit, c.Code)
		}
	}
	late := differing(nil, o.Route.PG.Replicas, o.Work.Off, func(k uint8) layout.Group { return o.image(0, k) })
	o.Work.Synced += uint64(len(late))
	return o.syncWords(late, o.finishWork)
}

func (o *Op) relocateFound() Action {
	in := func(unit uint32, code uint8) bool {
		if units := layout.UnitsOf(code); o.Work.Count {
			return o.Work.Window.meets(unit, units) && (o.Work.WindowMost == 0 || units < o.Work.WindowMost)
		}
		return slices.Contains(o.Work.Extents, unit/layout.ExtentUnits)
	}
	var list []*item
	for _, it := range o.work.items {
		if slices.ContainsFunc(it.oldParts, func(c layout.Chunk) bool { return in(c.Unit, c.Code) }) {
			it.chunks = it.oldParts // all of them: they carry the manifest's id
		} else if !in(it.x.Unit(), it.x.Code()) {
			continue
		}
		if it.x.State() == layout.Frozen {
			// Its mover copies it, or the one after.
			if o.work.frozen++; o.work.frozen > maxFrozen {
				return o.finish(fmt.Errorf("%s: %v stays FROZEN in extent %d", o.where(it.wordRef), it.x, it.x.Unit()/layout.ExtentUnits))
			}
			return o.leave(Backoff)
		}
		list = append(list, it)
	}
	if len(list) > 0 {
		return o.replace(list, o.relocate) // whoever won a word instead of us put it elsewhere
	}
	if o.Work.Count {
		return o.countFound()
	}
	if Mutation(MutRecallAOnly) {
		return o.finishWork()
	}
	// A replica may still show what is gone at A, and that lies in the extent.
	late := differing(nil, o.Route.PG.Replicas, o.Work.Off, func(k uint8) layout.Group { return o.image(0, k) })
	o.Work.Synced += uint64(len(late))
	return o.syncWords(late, o.finishWork)
}

// ---- Scrub -----------------------------------------------------------------

// keyHash tells keys apart well enough for a finding.
type keyHash struct{ a, b uint64 }

func (o *Op) startScrub() Action {
	o.Work.Records, o.Work.Units, o.Work.Lost = 0, 0, 0
	o.Work.Linked, o.Work.Findings = map[uint32]uint32{}, nil
	o.work.keys, o.work.same = map[keyHash]wordRef{}, nil
	return o.readCopies(func() Action {
		list := o.clusterDiffers()
		o.Work.Synced += uint64(len(list))
		if len(list) == 0 {
			return o.scrubRecords()
		}
		return o.syncWords(list, func() Action { return o.readCopies(o.scrubRecords) })
	})
}

func (o *Op) scrubRecords() Action {
	var list []*item
	for i := range layout.ClusterGroups + 1 {
		g := o.groupOf(i, 0)
		base := o.Work.Off + uint64(i)*layout.GroupSize
		if err := g.Check(0, 1<<32-1); err != nil {
			o.finding("pg %d group %#x: %v", o.Route.PG.ID, base, err)
		}
		for j := range layout.GroupSlots {
			x, ref := g.Slot(j), wordRef{base, uint8(j)}
			if !x.Readable() {
				continue
			}
			if err := o.inHeap(ref, x); err != nil {
				o.Work.Lost++
				o.finding("%v", err)
				continue
			}
			list = append(list, &item{wordRef: ref, x: x})
		}
	}
	return o.scrubBatch(list)
}

// linked counts the place of w.
func (o *Op) linked(unit uint32, code uint8) {
	o.Work.Units += uint64(layout.UnitsOf(code))
	o.Work.Linked[unit/layout.ExtentUnits] += layout.UnitsOf(code)
}

// scrubBatch READs some of the records on every replica and judges them.
func (o *Op) scrubBatch(list []*item) Action {
	if len(list) == 0 {
		return o.scrubSame()
	}
	r := int(o.Route.PG.Replicas)
	n, total := 0, 0
	for n < len(list) && (n == 0 || total+r*aligned(list[n].x.ReadLen()) <= batchBytes) {
		total += r * aligned(list[n].x.ReadLen())
		n++
	}
	buf := o.scratch(total)
	o.begin()
	for _, it := range list[:n] {
		buf = o.addCopies(it.x.Off(), it.x.ReadLen(), buf)
	}
	return o.await(func() Action {
		var bad, manifests []*item
		copies := map[*item][][]byte{}
		for i, it := range list[:n] {
			o.Work.Records++
			o.linked(it.x.Unit(), it.x.Code())
			c := o.copiesAt(i)
			good, ok := o.goodCopy(it, c)
			if !ok || o.anyBad(c, good) != 0 {
				bad, copies[it] = append(bad, it), c
			}
			if !ok {
				continue
			}
			rec, _ := layout.ParseRecord(good)
			o.noteKey(it.wordRef, rec.Key)
			if rec.Flags&layout.FlagManifest == 0 {
				continue
			}
			m, err := o.partsOf(it, &rec)
			if err != nil {
				o.Work.Lost++
				o.finding("%v", err)
				continue
			}
			it.id, it.oldParts = m.ID, m.Chunks
			manifests = append(manifests, it)
		}
		return o.scrubBad(bad, copies, func() Action {
			return o.scrubChunks(manifests, 0, func() Action { return o.scrubBatch(list[n:]) })
		})
	})
}

// addCopies adds a READ of n bytes of the heap on every replica, into b, and returns
// the rest of b.
func (o *Op) addCopies(off uint64, n int, b []byte) []byte {
	for k := range o.Route.PG.Replicas {
		o.add(Access{Verb: Read, Space: Heap, Replica: k, Off: off, Buf: b[:n:n]})
		b = b[aligned(n):]
	}
	return b
}

// copiesAt is what the i-th addCopies of the round has read, by replica.
func (o *Op) copiesAt(i int) (c [][]byte) {
	r := int(o.Route.PG.Replicas)
	for _, a := range o.Accesses[i*r:][:r] {
		c = append(c, a.Buf)
	}
	return c
}

// goodCopy is the first copy that is whole and whose key belongs where the slot is.
func (o *Op) goodCopy(it *item, copies [][]byte) (good []byte, ok bool) {
	for _, b := range copies {
		if r, err := o.parseOf(it, b); err == nil && o.belongs(r.Key, it.base) {
			return b[:layout.RecordLen(len(r.Key), len(r.Value))], true
		}
	}
	return nil, false
}

// anyBad has a bit for every replica whose copy is not good.
func (o *Op) anyBad(copies [][]byte, good []byte) (bad uint8) {
	for k, b := range copies {
		if !bytes.Equal(b[:len(good)], good) {
			bad |= 1 << k
		}
	}
	return bad
}

// belongs reports whether a lookup of key would come to the group at base, or to the
// cluster whose stash that is.
func (o *Op) belongs(key []byte, base uint64) bool {
	hash := o.env.HashOf(key)
	r, ok := o.env.Route(hash)
	if !ok {
		return true // nobody can tell now
	}
	for c := &r; c != nil; c = c.Child {
		if c.PG == nil || c.PG.ID != o.Route.PG.ID {
			continue
		}
		if home, stash := layout.GroupOff(hash, c.Clusters); c.ShardOff+home == base || c.ShardOff+stash == base {
			return true
		}
	}
	return false
}

// noteKey looks whether another slot of the cluster names the same key.
func (o *Op) noteKey(at wordRef, key []byte) {
	f := fnv.New64a()
	_, _ = f.Write(key)
	h := keyHash{o.env.HashOf(key), f.Sum64()}
	if other, ok := o.work.keys[h]; ok {
		o.work.same = append(o.work.same, [2]wordRef{other, at})
		return
	}
	o.work.keys[h] = at
}

// readWords READs one word on every replica and hands them over.
func (o *Op) readWords(r wordRef, then func(words []layout.Word) Action) Action {
	o.begin()
	for k := range o.Route.PG.Replicas {
		// Into an image: Scrub has no other use for them.
		o.add(Access{Verb: Read, Space: Index, Replica: k, Off: r.off(), Buf: o.image(0, k)[:8:8]})
	}
	return o.await(func() Action {
		var words []layout.Word
		for i := range o.Accesses {
			words = append(words, wordAt(o.Accesses[i].Buf))
		}
		return then(words)
	})
}

// scrubBad repairs records of which a copy is not good, or says that none is.
func (o *Op) scrubBad(list []*item, copies map[*item][][]byte, then func() Action) Action {
	if len(list) == 0 {
		return then()
	}
	it, next := list[0], func() Action { return o.scrubBad(list[1:], copies, then) }
	good, ok := o.goodCopy(it, copies[it])
	if !ok {
		good = nil
	}
	return o.repair(it, it.x.Off(), copies[it], good, next)
}

// repair writes good over the copies at off that differ from it, if it is still
// linked: then nobody else writes there.
func (o *Op) repair(it *item, off uint64, copies [][]byte, good []byte, then func() Action) Action {
	return o.readWords(it.wordRef, func(words []layout.Word) Action {
		if words[0] != it.x {
			return then() // replaced meanwhile
		}
		for _, x := range words {
			if x != it.x {
				// Its writer is still writing, or has died: sync compares the copies.
				return o.syncWords([]wordRef{it.wordRef}, then)
			}
		}
		if good == nil {
			o.Work.Lost++
			_, err := layout.ParseRecord(copies[0])
			if err == nil {
				err = fmt.Errorf("not what belongs there")
			}
			o.finding("%s: no good copy at %#x: %v", o.where(it.wordRef), off, err)
			return then()
		}
		o.begin()
		bad := o.anyBad(copies, good)
		for k := range o.Route.PG.Replicas {
			if bad&(1<<k) != 0 {
				o.add(Access{Verb: Write, Space: Heap, Replica: k, Off: off, Buf: good})
			}
		}
		n := uint64(len(o.Accesses))
		return o.await(func() Action {
			o.Work.Repaired += n
			return then()
		})
	})
}

// scrubChunks does for the chunks of manifests, from the i-th of the first on, what
// scrubBatch does for records.
func (o *Op) scrubChunks(list []*item, i int, then func() Action) Action {
	if len(list) == 0 {
		return then()
	}
	it := list[0]
	if i >= len(it.oldParts) {
		return o.scrubChunks(list[1:], 0, then)
	}
	c := it.oldParts[i]
	o.linked(c.Unit, c.Code)
	off, n := uint64(c.Unit)*layout.UnitSize, layout.SizeOf(c.Code)
	o.begin()
	o.addCopies(off, n, o.scratch(int(o.Route.PG.Replicas)*aligned(n)))
	return o.await(func() Action {
		next := func() Action { return o.scrubChunks(list, i+1, then) }
		copies := o.copiesAt(0)
		var good []byte
		for _, b := range copies {
			if r, err := parseChunk(b, it.id, i); err == nil {
				good = b[:layout.RecordLen(0, len(r.Value))]
				break
			}
		}
		if good != nil && o.anyBad(copies, good) == 0 {
			return next()
		}
		return o.repair(it, off, copies, good, next)
	})
}

// scrubSame looks at slots that seem to name one key: in this order, since words do not
// come back, both did at once if neither has changed.
func (o *Op) scrubSame() Action {
	if len(o.work.same) == 0 {
		return o.finishWork()
	}
	pair := o.work.same[0]
	o.work.same = o.work.same[1:]
	o.begin()
	for i, r := range pair {
		o.add(Access{Verb: Read, Space: Index, Off: r.off(), Buf: o.word(i)})
	}
	return o.await(func() Action {
		both := true
		for i, r := range pair {
			both = both && wordAt(o.words[i]) == o.groupOf(int((r.base-o.Work.Off)/layout.GroupSize), 0).Slot(int(r.slot))
		}
		if both {
			o.finding("%s and group %#x slot %d: the same key", o.where(pair[0]), pair[1].base, pair[1].slot)
		}
		return o.scrubSame()
	})
}
