package index

import (
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
	// status word tells, since nothing can land any more.
	ErrBroken = errors.New("the chain broke")
)

// MaxLegs is how many keys a Transaction has at most: each has two CASes of a round.
const MaxLegs = (MaxCAS - 1) / 2

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
	route   Route
	off     uint64      // of the slot in the region
	intent  final       // with final, places that no word names yet
	final   final       // not of a DeleteKey
	decided layout.Word // what takes the intent's place in the end
}

// Transaction is a whole transaction over keys with hints, each with one copy. It is the Machine of an Op of kind
// Transact. Its last round is one chain, which stops at the first CAS that misses (Router.Chains):
//
//	{WRITE records; CAS each slot to its intent; CAS the status word to COMMIT; CAS each slot to its final word}
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
	posted bool
	last   bool // the round under way is the last
	alone  int  // how often that was repeated, without the placing
}

var _ Machine = (*Transaction)(nil)

// Where is Machine: a Transaction is where its status word is.
func (t *Transaction) Where(m Router) (Route, bool) { return m.RoutePG(t.Status.PG, false) }

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
	if !t.fits() {
		return b.Finish(ErrApart)
	}
	for i := range t.Legs {
		if !t.prepare(&t.Legs[i]) {
			return b.Finish(ErrApart) // which gives back the places
		}
	}
	for i := range t.Legs {
		if pg := t.Legs[i].route.PG; pg.ID != t.Status.PG {
			return t.placeAll(pg)
		}
	}
	return t.placeLast()
}

// broke ends a Transaction of which nobody knows how far it came.
func (t *Transaction) broke() Action {
	t.Release(false)
	t.b.deciding = false
	return t.b.Finish(ErrBroken)
}

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
		t.about(l)
		b.Route = r
		h, ok := b.env.Hint(b.op())
		b.Route = Route{PG: home, MapVersion: r.MapVersion}
		if !ok || h.Shard != r.Shard || !h.Leads(&r) || h.Word.State() != layout.Live || h.Flags != 0 ||
			h.Version == 0 || l.Cond != Always && (l.Cond != IfVersion || h.Version != l.IfVersion) {
			return false
		}
		l.hint, l.off = h, r.SlotOff(l.Hash, h.Slot)
	}
	return true
}

func (t *Transaction) chains(pg *PG) bool {
	return pg.Replicas == 1 && !pg.Joining && t.b.env.Chains(pg)
}

// prepare takes l's places and encodes its records. It is false if there are none now, or if they would be long.
func (t *Transaction) prepare(l *Leg) bool {
	b, x := t.b, l.hint.Word
	if n := layout.RecordLen(len(l.Key), len(l.Value)); l.Effect == PutKey && (n > maxLeg || b.Whole != 0 &&
		n > int(b.Whole)) {
		return false
	}
	version := b.env.Version(l.hint.Version)
	in := layout.Intent{Kind: layout.IntentDelete, PG: t.Status.PG, Generation: t.Status.Generation, Off: t.Status.Off,
		Seq: t.Status.Seq, TS: t.TS, Coord: t.Coord, Try: t.Try, Parent: x}
	h := layout.RecordHeader{Version: version, Flags: l.Flags & layout.FlagsOfValue, Expiry: l.Expiry, Pinned: l.Pinned,
		Writer: b.env.Session()}
	if l.Effect == PutKey {
		in.Kind = layout.IntentPut
		if !t.take(l, &l.final, layout.RecordLen(len(l.Key), len(l.Value))) {
			return false
		}
		layout.EncodeRecord(l.final.own, h, l.Key, l.Value)
		in.Final = l.final.word
	}
	var v [layout.IntentLen]byte
	layout.EncodeIntent(v[:], &in)
	if !t.take(l, &l.intent, layout.RecordLen(len(l.Key), layout.IntentLen)) {
		return false
	}
	layout.EncodeRecord(l.intent.own, layout.RecordHeader{Version: version, Flags: layout.FlagIntent,
		Writer: b.env.Session()}, l.Key, v[:])
	word := l.intent.word.WithState(layout.Frozen)
	if l.decided = in.Final; l.decided == 0 {
		l.decided = word.Delete(b.env.Session())
	}
	l.Placed = Placed{Shard: l.route.Shard, Generation: l.route.PG.Generation, Slot: l.hint.Slot, Word: word,
		Intent: in, Version: version, Flags: HintFlagsOf(h.Flags, h.Expiry)}
	return true
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
	t.posted = true
	return t.b.Post(stepTransact)
}

// addIntents adds what places the intents of the legs in a placement group: the records, then the CASes, each if the
// one before hit.
func (t *Transaction) addIntents(pg uint32) {
	first := true
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID == pg {
			for _, f := range [...]*final{&l.final, &l.intent} {
				if f.have {
					t.b.Add(Access{Verb: Write, Space: Heap, Off: f.word.Off(), Buf: f.own})
				}
			}
		}
	}
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID == pg {
			t.swing(l.off, uint64(l.hint.Word), uint64(l.Placed.Word), !first)
			first = false
		}
	}
}

func (t *Transaction) swing(off, expect, word uint64, ifHit bool) {
	t.b.Add(Access{Verb: CAS, Space: Index, Off: off, Expect: expect, New: word, IfHit: ifHit})
}

// placeLast posts the last round: the other intents, the verdict behind them all, and what they lead to.
func (t *Transaction) placeLast() Action {
	r, ok := t.Where(t.b.env)
	if !ok || !t.chains(r.PG) {
		return t.broke()
	}
	t.b.Route = r
	t.b.NewRound()
	if t.alone == 0 {
		t.addIntents(t.Status.PG)
	}
	t.swing(t.Status.Off, uint64(t.Found), uint64(t.Found.With(t.Status.Seq, layout.Commit)), len(t.b.Accesses) > 0)
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID == t.Status.PG {
			t.swing(l.off, uint64(l.Placed.Word), uint64(l.decided), true)
		}
	}
	t.posted, t.last, t.b.deciding = true, true, true
	return t.b.Post(stepTransact)
}

// Next is Machine.
func (t *Transaction) Next() Action {
	t.b.deciding = false
	cas := t.b.Accesses
	for len(cas) > 0 && cas[0].Verb == Write {
		cas = cas[1:]
	}
	hit := func() bool {
		a := &cas[0]
		cas = cas[1:]
		return a.Found == a.Expect
	}
	here, missed := t.b.Route.PG.ID, false
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID == here && !(t.last && t.alone > 0) {
			if l.IsPlaced = hit(); l.IsPlaced {
				l.intent.have, l.final.have = false, false
			} else if !missed {
				missed = true
				t.forget(l)
			}
		}
	}
	switch {
	case missed:
		return t.b.Finish(ErrMissed)
	case !t.last:
		return t.placeLast()
	}
	if a := &cas[0]; !hit() {
		t.Found = layout.Status(a.Found)
		if v, over := t.Found.Of(t.Status.Seq); over || v == layout.Commit || t.Found.Check(t.Status.Off) != nil {
			return t.broke()
		} else if v == layout.Undecided {
			// The caller did not know the word before.
			if t.alone++; t.alone > maxRetries {
				return t.broke()
			}
			return t.placeLast()
		}
		t.Verdict = layout.Abort
		return t.b.Finish(nil)
	}
	t.Found, t.Verdict = t.Found.With(t.Status.Seq, layout.Commit), layout.Commit
	for i := range t.Legs {
		if l := &t.Legs[i]; l.route.PG.ID == here {
			if l.Settled = hit(); l.Settled {
				t.settled(l)
			}
		}
	}
	return t.b.Finish(nil)
}

// about makes the Op one about l's key, for its Env.
func (t *Transaction) about(l *Leg) {
	t.b.Hash, t.b.Check, t.b.Key = l.Hash, l.Check, l.Key
}

func (t *Transaction) forget(l *Leg) {
	t.about(l)
	t.b.env.Forget(t.b.op())
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
