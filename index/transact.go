package index

import (
	"bytes"
	"errors"

	"github.com/kvd-project/kvd/internal/layout"
)

// Answers of a Transaction besides those of any Op.
var (
	// ErrApart: the transaction cannot be one chain. Nothing has happened.
	ErrApart = errors.New("not one chain")
	// ErrMissed: a key's slot does not hold what is remembered. The transaction is undecided, and goes on by a Prepare
	// for each Leg that is not Placed.
	ErrMissed = errors.New("a key has changed")
	// ErrBroken: a connection broke, or another view came. Any Leg may be placed, and the transaction decided. The
	// status word tells: a READ by the connection that is in use now has shown that nothing can land any more.
	ErrBroken = errors.New("the chain broke")
)

// MaxLegs is how many keys a Transaction has at most: each has three CASes of a round.
const MaxLegs = MaxCAS / 3

// maxLeg bounds a record that a Transaction writes, in bytes: its chain is short.
const maxLeg = 4 << 10

// Leg is a Transaction's part of one key.
type Leg struct {
	// Request. Key and Value stay the caller's until Done.
	Key, Value  []byte
	Hash, Check uint64
	IfVersion   uint64
	Expiry      uint64 // Unix ms, 0 = none
	Pinned      uint32 // as in Op
	Flags       layout.RecordFlags
	Effect      Effect // PutKey or DeleteKey
	Cond        Cond   // Always or IfVersion

	// Answer. Placed, what a Settle takes away, means something if IsPlaced.
	Placed   Placed
	IsPlaced bool // the intent was in the slot
	Settled  bool // and is gone

	hint    Hint
	seen    layout.Word // that the slot held when the hint was refuted
	word    []byte      // the slot, when it is looked at
	rec     []byte      // and the record under seen
	group   []byte      // the home group, if there was no hint
	lost    bool        // there is no hint yet
	route   Route
	off     uint64      // of the slot in the region
	intent  final       // with final, places that no word names yet
	final   final       // not of a DeleteKey
	decided layout.Word // what takes the intent's place in the end
}

// Transaction is a whole transaction over keys that are there, each with one copy. It is the Machine of an Op of kind
// Transact. Its last round is one chain, which stops at the first CAS that misses (Router.Chains):
//
//	{WRITE records; CAS each slot but the first to what it holds; CAS each slot to its intent;
//	 CAS the status word to COMMIT; CAS each slot to its final word}
//
// The CASes that change nothing keep a hint that is old from leaving intents. Such a hint is made anew, from what the
// session has learnt meanwhile or from the slot, and the chain is posted again.
//
// The keys and the status word of that chain are in one placement group. Legs in one other placement group are placed
// in a round before; their owner settles them behind the answer. It is one Txn's Prepares, Decide and Settles in their
// order: only what is waited for differs. With a single copy the head is the tail, so nothing is to be published.
//
// It belongs to the one goroutine that performs it, and is performed once.
type Transaction struct {
	// Request, as in Txn.
	Status    StatusAt
	TS, Coord uint64
	Try       uint8
	Legs      []Leg

	// Found is the word that the status word is expected to hold, then the one that it holds. Verdict is Commit, or
	// Abort if somebody has aborted it; Undecided after an error.
	Found   layout.Status
	Verdict layout.Verdict

	b      *Base
	posted bool   // a chain
	last   bool   // the round under way is the last
	looked *Leg   // whose slot the round under way looks at; nil: it is a chain
	looks  int    // how often hints were made anew
	finds  bool   // the round under way reads groups
	at     Route  // where the chain was posted last; PG nil: nowhere
	broken bool   // nobody knows how far that chain came; the round under way is a READ behind it
	behind []byte // the word that this READ takes
}

var _ Machine = (*Transaction)(nil)

// Where is Machine: a Transaction is where its status word is.
func (t *Transaction) Where(m Router) (Route, bool) { return m.RoutePG(t.Status.PG, false) }

// MayHaveHappened reports, of a Transaction whose Op ended with ErrUnknown, whether its verdict was under way.
// Otherwise there may be intents, and it is not decided.
func (t *Transaction) MayHaveHappened() bool { return t.last }

// OnFrozen is Machine.
func (t *Transaction) OnFrozen() bool { return false }

// Wanted is Machine. A Transaction does not wait for memory.
func (t *Transaction) Wanted() (pg uint32, code uint8) { return t.Status.PG, 0 }

// Unsynced is Machine. A Transaction syncs nothing.
func (t *Transaction) Unsynced(error) (goesOn bool) { return false }

// Release is Machine.
func (t *Transaction) Release(idle bool) {
	for i := range t.Legs {
		t.Legs[i].release(t.b, idle)
	}
}

// release gives back the places of l that no word names; unless it is idle, verbs may still come to them.
func (l *Leg) release(b *Base, idle bool) {
	for _, p := range [...]*final{&l.intent, &l.final} {
		switch {
		case !p.have:
		case idle:
			b.env.Unuse(l.route.PG, p.word)
		default:
			b.env.Leak(l.route.PG, p.word)
		}
		p.have = false
	}
}

// Begin is Machine. Nothing is carried over from a round that was posted.
func (t *Transaction) Begin(b *Base) Action {
	t.b = b
	if t.posted {
		return t.broke()
	}
	t.finds, t.looked, t.last = false, nil, false
	t.Release(true)
	if !t.fits() {
		return b.Finish(ErrApart)
	}
	for i := range t.Legs {
		if !t.prepare(&t.Legs[i]) {
			return b.Finish(ErrApart) // which gives back the places
		}
	}
	for i := range t.Legs {
		if t.Legs[i].lost {
			return t.find()
		}
	}
	return t.goOn()
}

// goOn posts the next round, when the legs that were at work have hints.
func (t *Transaction) goOn() Action {
	for i := range t.Legs {
		if l := &t.Legs[i]; l.lost {
			return t.lookAt(l)
		}
	}
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID != t.Status.PG && !l.IsPlaced {
			return t.placeAll(l.route.PG)
		}
	}
	return t.placeLast()
}

// find reads the groups of the legs without hints, which are in one placement group.
func (t *Transaction) find() Action {
	var pg *PG
	t.b.NewRound()
	for i := range t.Legs {
		l := &t.Legs[i]
		switch {
		case !l.lost:
			continue
		case pg == nil:
			pg = l.route.PG
		case pg != l.route.PG:
			return t.b.Finish(ErrApart)
		}
		if l.group == nil {
			l.group = t.b.Buf(layout.GroupSize)
		}
		at, _ := layout.GroupOff(l.Hash, l.route.Segments)
		t.b.Add(Access{Verb: Read, Space: Index, Off: l.route.ShardOff + at, Buf: l.group})
	}
	t.b.Route = Route{PG: pg, MapVersion: t.b.Route.MapVersion}
	t.finds = true
	return t.b.Post(stepTransact)
}

// found takes the groups that find has read. A key of which one slot may tell is looked at next; others are not for a
// Transaction.
func (t *Transaction) found() Action {
	t.finds = false
	for i := range t.Legs {
		l := &t.Legs[i]
		if !l.lost {
			continue
		}
		g, n := layout.Group(l.group), 0
		for slot := range layout.GroupSlots {
			if x := g.Slot(slot); x.Readable() && x.FP() == layout.FP(l.Hash) {
				l.seen, l.hint.Slot = x, uint8(slot)
				n++
			}
		}
		if n != 1 || g.CheckHeader() != nil {
			return t.b.Finish(ErrApart)
		}
		l.off = l.route.SlotOff(l.Hash, l.hint.Slot)
	}
	return t.goOn()
}

// broke ends a Transaction of which nobody knows how far it came. Its chain may be on its way still, by a connection
// that is lost, while others act on the verdict. So a word is read where the chain went: that waits for the next
// connection. Until then the outcome is open.
func (t *Transaction) broke() Action {
	t.Release(false)
	r, ok := t.b.env.RoutePG(t.at.PG.ID, false)
	t.broken, t.b.deciding = true, true
	r.MapVersion = t.at.MapVersion // by which it acts
	switch {
	case !ok:
		t.b.Route.MapVersion = r.MapVersion
		return t.b.Restart(Refresh)
	case r.PG.Generation != t.at.PG.Generation:
		return t.open() // the chain went with the memory
	}
	off := t.Status.Off
	for i := range t.Legs {
		if l := &t.Legs[i]; r.PG.ID != t.Status.PG && l.route.PG.ID == r.PG.ID {
			off = l.off
		}
	}
	if t.behind == nil {
		t.behind = t.b.Buf(8)
	}
	t.b.Route = r
	t.b.NewRound()
	t.b.Add(Access{Verb: Read, Space: Index, Off: off, Buf: t.behind})
	return t.b.Post(stepTransact)
}

// open ends a Transaction of which nobody knows how far it came. Nothing of it can land any more.
func (t *Transaction) open() Action {
	t.Release(false)
	t.b.deciding = false
	return t.b.Finish(ErrBroken)
}

// notPosted says that the round is not under way. If the chain was posted before, its outcome stays open.
func (t *Transaction) notPosted() { t.b.deciding = t.broken }

// fits reports whether every leg has a hint that is enough, in one of two placement groups at most, each with a single
// copy behind a provider that stops at a miss.
func (t *Transaction) fits() bool {
	b := t.b
	home := b.Route.PG
	if t.Status.Generation != home.Generation || !layout.StatusOff(t.Status.Off, statusEnd(home)) ||
		len(t.Legs) > MaxLegs || !t.chains(home) {
		return false
	}
	other := home
	for i := range t.Legs {
		l := &t.Legs[i]
		r, ok := b.env.Route(l.Hash)
		if !ok || l.Effect == KeepKey || r.PG != home && other != home && r.PG != other {
			return false
		}
		if r.PG != home && other == home {
			if other = r.PG; !t.chains(other) {
				return false
			}
		}
		l.route = r
		h, ok := t.remembered(l)
		if ok && !l.suits(&h) {
			return false
		}
		l.lost, l.hint, l.off = !ok, h, r.SlotOff(l.Hash, h.Slot)
	}
	return true
}

// remembered is what the session remembers of l's key.
func (t *Transaction) remembered(l *Leg) (Hint, bool) {
	at := t.b.Route
	t.about(l)
	t.b.Route = l.route
	h, ok := t.b.env.Hint(t.b.op())
	t.b.Route = at
	return h, ok
}

// suits reports whether l's key may be written by h alone.
func (l *Leg) suits(h *Hint) bool {
	return h.Shard == l.route.Shard && h.Leads(&l.route) && h.Word.State() == layout.Live && h.Flags == 0 &&
		h.Version != 0 && (l.Cond == Always || l.Cond == IfVersion && h.Version == l.IfVersion)
}

func (t *Transaction) chains(pg *PG) bool {
	return pg.Replicas == 1 && !pg.Joining && t.b.env.Chains(pg)
}

// prepare takes l's places and encodes its records. It is false if there are none now, or if they would be long.
func (t *Transaction) prepare(l *Leg) bool {
	b := t.b
	n, intent := layout.RecordLen(len(l.Key), len(l.Value)), layout.RecordLen(len(l.Key), layout.IntentLen)
	if intent > maxLeg || l.Effect == PutKey && (n > maxLeg || b.Whole != 0 && n > int(b.Whole)) {
		return false
	}
	if l.Effect == PutKey && !t.take(l, &l.final, n) || !t.take(l, &l.intent, intent) {
		return false
	}
	if !l.lost {
		t.encode(l)
	}
	return true
}

// encode makes l's records, which go by its hint.
func (t *Transaction) encode(l *Leg) {
	b := t.b
	version := b.env.Version(l.hint.Version)
	in := layout.Intent{Kind: layout.IntentDelete, PG: t.Status.PG, Generation: t.Status.Generation, Off: t.Status.Off,
		Seq: t.Status.Seq, TS: t.TS, Coord: t.Coord, Try: t.Try, Parent: l.hint.Word}
	h := layout.RecordHeader{Version: version, Flags: l.Flags & layout.FlagsOfValue, Expiry: l.Expiry, Pinned: l.Pinned,
		Writer: b.env.Session()}
	if l.Effect == PutKey {
		in.Kind = layout.IntentPut
		layout.EncodeRecord(l.final.own, h, l.Key, l.Value)
		in.Final = l.final.word
	}
	var v [layout.IntentLen]byte
	layout.EncodeIntent(v[:], &in)
	layout.EncodeRecord(l.intent.own, layout.RecordHeader{Version: version, Flags: layout.FlagIntent,
		Writer: b.env.Session()}, l.Key, v[:])
	word := l.intent.word.WithState(layout.Frozen)
	if l.decided = in.Final; l.decided == 0 {
		l.decided = word.Delete(b.env.Session())
	}
	l.Placed = Placed{Shard: l.route.Shard, Generation: l.route.PG.Generation, Slot: l.hint.Slot, Word: word,
		Intent: in, Version: version, Flags: HintFlagsOf(h.Flags, h.Expiry)}
}

// take takes a place for a record of n bytes, and memory to encode it in.
func (t *Transaction) take(l *Leg, f *final, n int) bool {
	code, _ := layout.CodeFor(n)
	unit, ver, size, ok := t.b.env.Alloc(l.route.PG, code)
	if ok {
		*f = final{word: layout.MakeLive(ver, layout.FP(l.Hash), size, unit), own: t.b.Buf(n), have: true}
	}
	return ok
}

// placeAll posts the intents of the legs in pg, which is not the status word's.
func (t *Transaction) placeAll(pg *PG) Action {
	t.b.NewRound()
	t.b.Route = Route{PG: pg, MapVersion: t.b.Route.MapVersion}
	t.addIntents(pg.ID)
	return t.postChain()
}

// toPlace lists the legs in a placement group that have no intents yet.
func (t *Transaction) toPlace(pg uint32) (list []*Leg) {
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID == pg && !l.IsPlaced {
			list = append(list, l)
		}
	}
	return list
}

// addIntents adds what places the intents of the legs in a placement group: the records, then the CASes, each if the
// one before hit.
func (t *Transaction) addIntents(pg uint32) {
	list := t.toPlace(pg)
	for _, l := range list {
		for _, f := range [...]*final{&l.final, &l.intent} {
			if f.have {
				t.b.Add(Access{Verb: Write, Space: Heap, Off: f.word.Off(), Buf: f.own})
			}
		}
	}
	first := true
	for i, l := range list {
		if i > 0 {
			t.swing(l.off, uint64(l.hint.Word), uint64(l.hint.Word), !first)
			first = false
		}
	}
	for _, l := range list {
		t.swing(l.off, uint64(l.hint.Word), uint64(l.Placed.Word), !first)
		first = false
	}
}

func (t *Transaction) swing(off, expect, word uint64, ifHit bool) {
	t.b.Add(Access{Verb: CAS, Space: Index, Off: off, Expect: expect, New: word, IfHit: ifHit})
}

// placeLast posts the last round: the other intents, the verdict behind them all, and what they lead to.
func (t *Transaction) placeLast() Action {
	r, ok := t.Where(t.b.env)
	if !ok || r.PG.Generation != t.Status.Generation || !t.chains(r.PG) {
		if !t.posted {
			return t.b.Finish(ErrApart)
		}
		return t.b.Finish(ErrMissed) // what was posted is over, and nothing is decided
	}
	r.MapVersion = t.b.Route.MapVersion // by which its places were taken
	t.b.Route = r
	t.b.NewRound()
	t.addIntents(t.Status.PG)
	t.swing(t.Status.Off, uint64(t.Found), uint64(t.Found.With(t.Status.Seq, layout.Commit)), len(t.b.Accesses) > 0)
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID == t.Status.PG {
			t.swing(l.off, uint64(l.Placed.Word), uint64(l.decided), true)
		}
	}
	t.last = true
	return t.postChain()
}

// postChain posts a round that places intents, whose outcome is open until its results are taken.
func (t *Transaction) postChain() Action {
	t.at, t.posted, t.b.deciding = t.b.Route, true, true
	return t.b.Post(stepTransact)
}

// Next is Machine.
func (t *Transaction) Next() Action {
	t.b.deciding = false
	switch {
	case t.broken:
		return t.open()
	case t.finds:
		return t.found()
	case t.looked != nil:
		return t.gotLook(t.looked)
	}
	cas := t.b.Accesses
	for len(cas) > 0 && cas[0].Verb == Write {
		cas = cas[1:]
	}
	var missed *Leg
	hit := func(l *Leg) bool {
		a := &cas[0]
		cas = cas[1:]
		if a.Found == a.Expect {
			return true
		}
		if missed == nil && l != nil {
			missed, l.seen = l, layout.Word(a.Found)
		}
		return false
	}
	here := t.b.Route.PG.ID
	list := t.toPlace(here)
	for i, l := range list {
		if i > 0 {
			hit(l)
		}
	}
	for _, l := range list {
		if l.IsPlaced = hit(l); l.IsPlaced {
			l.intent.have, l.final.have = false, false
		}
	}
	switch {
	case missed != nil:
		return t.missed(missed)
	case !t.last:
		return t.placeLast()
	}
	if a := &cas[0]; !hit(nil) {
		t.Found = layout.Status(a.Found)
		if v, over := t.Found.Of(t.Status.Seq); over || v == layout.Commit || t.Found.Check(t.Status.Off) != nil {
			return t.open()
		} else if v == layout.Undecided {
			// The caller did not know the word before.
			if t.looks++; t.looks > maxRetries {
				return t.open()
			}
			return t.placeLast()
		}
		t.Verdict = layout.Abort
		return t.b.Finish(nil)
	}
	t.Found, t.Verdict = t.Found.With(t.Status.Seq, layout.Commit), layout.Commit
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID == here {
			if l.Settled = hit(nil); l.Settled {
				t.settled(l)
			}
		}
	}
	return t.b.Finish(nil)
}

// missed goes on when l's slot did not hold the word of its hint.
func (t *Transaction) missed(l *Leg) Action {
	if t.looks++; t.looks > maxRetries {
		return t.b.Finish(ErrMissed)
	}
	if h, ok := t.remembered(l); ok && h.Word != l.hint.Word { // others of the session were there
		return t.renew(l, h)
	}
	return t.lookAt(l) // the hint stays: others begin with a look, too, and the next COMMIT replaces it
}

// lookAt reads l's slot, and the record under what that held.
func (t *Transaction) lookAt(l *Leg) Action {
	if l.word == nil {
		l.word = t.b.Buf(8)
	}
	t.b.NewRound()
	t.b.Route = Route{PG: l.route.PG, MapVersion: t.b.Route.MapVersion}
	t.b.Add(Access{Verb: Read, Space: Index, Off: l.off, Buf: l.word})
	if l.isSeen() {
		if n := l.seen.ReadLen(); cap(l.rec) < n {
			l.rec = t.b.Buf(n)
		}
		l.rec = l.rec[:l.seen.ReadLen()]
		t.b.Add(Access{Verb: Read, Space: Heap, Off: l.seen.Off(), Buf: l.rec})
	}
	t.looked = l
	return t.b.Post(stepTransact)
}

// isSeen reports whether l's key may have the record under the word that its slot held.
func (l *Leg) isSeen() bool {
	x := l.seen
	return x.State() == layout.Live && x.FP() == layout.FP(l.Hash) && layout.InHeap(x, l.route.PG.HeapLo,
		l.route.PG.HeapHi) && x.ReadLen() <= maxLook
}

// maxLook is the longest record that is read for a hint, in bytes.
const maxLook = 64 << 10

// gotLook makes l's hint anew. A slot that changes, or has somebody's intent, is looked at again.
func (t *Transaction) gotLook(l *Leg) Action {
	t.looked = nil
	x := wordAt(l.word)
	if x == l.seen && l.isSeen() {
		var r layout.Record
		if r.Parse(l.rec) != nil || !bytes.Equal(r.Key, l.Key) {
			return t.b.Finish(ErrMissed)
		}
		return t.renew(l, Hint{Word: x, Version: r.Version, Shard: l.route.Shard, Slot: l.hint.Slot,
			Flags: HintFlagsOf(r.Flags, r.Expiry)})
	}
	if l.seen = x; !l.isSeen() && x.State() != layout.Frozen {
		return t.b.Finish(ErrMissed)
	}
	if t.looks++; t.looks > maxRetries {
		return t.b.Finish(ErrMissed)
	}
	return t.lookAt(l)
}

// renew goes on by hint h of l, which stopped a chain or had none.
func (t *Transaction) renew(l *Leg, h Hint) Action {
	if !l.suits(&h) {
		return t.b.Finish(ErrMissed)
	}
	l.hint, l.off = h, l.route.SlotOff(l.Hash, h.Slot)
	t.encode(l)
	l.lost = false
	return t.goOn()
}

// about makes the Op one about l's key, for its Env.
func (t *Transaction) about(l *Leg) {
	t.b.Hash, t.b.Check, t.b.Key = l.Hash, l.Check, l.Key
}

// settled hands over what l's key and its intent named, and remembers what it names now.
func (t *Transaction) settled(l *Leg) {
	t.b.env.Unlinked(l.route.PG, l.hint.Word)
	t.b.env.Unlinked(l.route.PG, l.Placed.Word)
	if t.about(l); l.Effect == DeleteKey {
		t.b.env.Forget(t.b.op())
		return
	}
	t.b.env.Remember(t.b.op(), Hint{Word: l.decided, Version: l.Placed.Version, Shard: l.route.Shard, Slot: l.hint.Slot,
		Flags: l.Placed.Flags})
}
