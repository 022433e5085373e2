package index

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/layout"
)

// meeting is what an Op knows of an intent that it met: a record that says what a transaction is about to do to the
// key. The key's value is that of the record before, or of the record that the intent leads to, by what the
// transaction's status word says at its tail.
type meeting struct {
	word    layout.Word // that names it
	in      layout.Intent
	version uint64 // of the record after; that before has a lower one, a guard's both have it
	atA     bool   // a writer met it: it looks at the heads
	status  layout.Status
	named   bool // recs have been read
	shown   bool // every replica of the status word was seen to have the verdict
	resume  bool // the Op waits, and looks at the status word next
	verdict layout.Verdict
	recs    [2][]byte // of the records before and after
	// settled is an intent whose verdict every replica of its status word shows. It counts as a LIVE word of the record
	// that stands names, 0: of none.
	settled, stands layout.Word
	// How often a writer has waited for the intent waitedFor.
	waitedFor layout.Word
	waits     int32
	intents   []layout.Word // FROZEN words of the key's group that are known to be intents
	list      []met         // that a scan has yet to look through
	// of a record that an intent under sync names: R[k]'s, and that of R[k-1], which is at copyOff
	copies  [2][]byte
	copyOff uint64
}

// met is an intent on a scan's page.
type met struct {
	off uint64 // of its record in the region
	in  layout.Intent
}

// isSettled reports whether the word under change is an intent that counts as the word of the record that it stands
// for.
func (o *Op) isSettled() bool { return o.far != nil && o.met.settled != 0 && o.met.settled == o.x }

// meet goes on at the intent record r, found at the tail under w.
func (o *Op) meet(slot uint8, w layout.Word, r *layout.Record) Action {
	o.env.Forget(o)
	o.noting = false
	o.take(Hint{Word: w, Slot: slot})
	if !o.Kind.Reads() {
		return o.meetAtA(r) // the head, where it is to be changed, has had it
	}
	in, err := layout.ParseIntent(r.Value, o.Route.PG.HeapLo, o.Route.PG.HeapHi)
	if err != nil {
		return o.finish(o.txnError(err))
	}
	return o.lookThrough(w, in)
}

// lookThrough reads the value that an intent at the tail stands for. It waits for nobody and changes nothing.
func (o *Op) lookThrough(w layout.Word, in layout.Intent) Action {
	m := &o.need().met
	m.word, m.in, m.version, m.atA, m.named = w, in, 0, false, false
	switch in.Kind {
	case layout.IntentGuardAbsent:
		return o.standsFor(nil) // whatever the verdict
	case layout.IntentGuard:
		return o.readStands(in.Parent)
	}
	return o.readStatus()
}

// meetAtA goes on at the intent record r, which the head names by x.
func (o *Op) meetAtA(r *layout.Record) Action {
	in, err := layout.ParseIntent(r.Value, o.Route.PG.HeapLo, o.Route.PG.HeapHi)
	if err != nil {
		return o.finish(o.txnError(err))
	}
	m := &o.need().met
	m.word, m.in, m.version, m.atA, m.named = o.x, in, r.Version, true, false
	return o.readStatus()
}

// readStatus reads the status word of the intent that was met: a reader where it becomes visible, a writer where it is
// decided.
func (o *Op) readStatus() Action {
	m := &o.met
	r, ok := o.env.RoutePG(m.in.PG, false)
	if !ok || r.PG.Generation < m.in.Generation {
		return o.again(Refresh)
	}
	if r.PG.Generation != m.in.Generation {
		// Every copy of the word is lost: it says COMMIT to nobody any more.
		m.verdict = layout.Abort
		return o.statusKnown()
	}
	if end := statusEnd(r.PG); !layout.StatusOff(m.in.Off, end) {
		return o.badIntent(&layout.CorruptError{What: "intent", Off: 16, Check: "offset of the status word",
			Got: m.in.Off, Want: end})
	}
	o.begin()
	here := r.PG.ID == o.Route.PG.ID && !m.named
	if o.toStatus(&r); m.atA {
		for k := range o.statusReads() {
			o.add(Access{Verb: Read, Space: Index, Replica: k, Off: m.in.Off, Buf: o.word(int(k))})
		}
		here = here && o.needsRecord()
	} else {
		o.add(Access{Verb: Read, Space: Index, Replica: r.PG.Reader(), Off: m.in.Off, Buf: o.word(0)})
		if r.PG.Joining {
			o.add(Access{Verb: Read, Space: Index, Replica: r.PG.tail(), Off: m.in.Off, Buf: o.word(1)})
		}
	}
	if here { // both records in the same round trip
		m.named = true
		for i, w := range [...]layout.Word{m.in.Parent, m.in.Final} {
			if w.State() == layout.Live {
				o.readNamed(i, w)
			}
		}
	}
	return o.post(stepReadStatus)
}

// statusReads is of how many replicas a writer reads the status word at once: of all, so that it need not bring up
// those that show the verdict already.
func (o *Op) statusReads() uint8 {
	if n := o.Route.PG.Replicas; int(n) <= len(o.cells)/8 {
		return n
	}
	return 1
}

// needsRecord reports whether a writer that meets an intent needs the record that it stands for: a Prepare that puts or
// deletes the key whatever it holds does without.
func (o *Op) needsRecord() bool {
	switch o.Kind {
	case Settle:
		return false
	case Prepare:
		return o.Cond != Always || o.Txn.Effect == KeepKey
	}
	return o.Machine == nil
}

// statusEnd is where the index of pg ends, bytes from the start of the region.
func statusEnd(pg *PG) uint64 {
	if pg.AccessOff != 0 {
		return pg.AccessOff
	}
	return uint64(pg.HeapLo) * layout.UnitSize
}

// toStatus goes to the placement group of the status word; toParent, which every way on or out takes, comes back.
func (o *Op) toStatus(r *Route) {
	p := o.Route
	o.parent, o.fixed = &p, o.met.in.Off
	o.Route = Route{PG: r.PG, MapVersion: p.MapVersion}
}

// readNamed adds a READ of the record under w, where the Op looks.
func (o *Op) readNamed(i int, w layout.Word) {
	m := &o.met
	k := o.Route.PG.Reader()
	if m.atA || o.Kind == Settle {
		k = 0
	}
	if n := w.ReadLen(); cap(m.recs[i]) < n || o.Kind == Scan { // a page keeps all records
		m.recs[i] = o.env.Buf(o, n)
	}
	m.recs[i] = m.recs[i][:w.ReadLen()]
	o.add(Access{Verb: Read, Space: Heap, Replica: k, Off: w.Off(), Buf: m.recs[i]})
}

func (o *Op) gotStatus() Action {
	m := &o.met
	s := layout.Status(wordAt(o.word(0)))
	if o.Kind == Decide {
		return o.gotDecided(s)
	}
	m.shown = false
	if m.atA {
		v, over := s.Of(m.in.Seq)
		m.shown = v != layout.Undecided && !over && o.statusReads() == o.Route.PG.Replicas
		for k := 1; m.shown && k < int(o.Route.PG.Replicas); k++ {
			m.shown = layout.Status(wordAt(o.word(k))) == s
		}
	}
	if !m.atA && o.Route.PG.Joining && wordAt(o.word(1)) != layout.Word(s) {
		if o.env.ReadOnly() {
			return o.again(Backoff)
		}
		return o.sync(0, 1, stepStart)
	}
	return o.judgeStatus(s)
}

func (o *Op) judgeStatus(s layout.Status) Action {
	m := &o.met
	if err := s.Check(m.in.Off); err != nil {
		return o.badIntent(err)
	}
	v, over := s.Of(m.in.Seq)
	if over && o.Kind == Settle {
		return o.finish(nil) // the intent is gone from every replica
	}
	if over && o.Machine != nil {
		m.verdict = layout.Undecided
		o.toParent()
		return o.Machine.Next()
	}
	if over {
		o.toParent()
		return o.again(0) // the intent is gone from every replica
	}
	m.status, m.verdict = s, v
	switch {
	case !m.atA, m.shown:
		return o.statusKnown()
	case v != layout.Undecided:
		return o.sync(0, 1, stepSyncStatus)
	}
	if m.waitedFor != m.word {
		// others get on: the waits begin anew, short, or whoever came later would always be first
		m.waitedFor, m.waits, o.Waits = m.word, 0, 0
	}
	if m.waits < o.patienceFor(&m.in) {
		m.waits++
		m.resume = o.Machine == nil && o.Kind != Settle
		o.toParent()
		return o.again(Backoff)
	}
	o.begin()
	o.add(Access{Verb: CAS, Space: Index, Off: m.in.Off, Expect: uint64(s),
		New: uint64(s.With(m.in.Seq, layout.Abort))})
	return o.post(stepAbortStatus)
}

// resumes reports whether the Op goes on where it waited for an intent. The map is the same as then, so that one look
// at the status word tells as much as beginning anew would.
func (o *Op) resumes(was *Route) bool {
	if o.far == nil || !o.met.resume {
		return false
	}
	o.met.resume = false
	return was.PG == o.Route.PG && was.MapVersion == o.Route.MapVersion && was.Shard == o.Route.Shard
}

// patienceFor is how often the Op waits for the transaction of an intent before aborting it: a few times if that is
// younger, and else more often with each of its attempts. The waits get longer each time, up to a millisecond.
func (o *Op) patienceFor(in *layout.Intent) int32 {
	n := int32(defaultPatience)
	switch {
	case o.Patience < 0:
		return 0
	case o.Kind == Prepare && (&layout.Intent{TS: o.Txn.TS, Coord: o.Txn.Coord}).Older(in):
		return youngerPatience
	case o.Patience > 0:
		n = int32(o.Patience)
	}
	return n << min(in.Try, 4)
}

// youngerPatience is how often a transaction waits for a younger one, which most often is about to be decided.
const youngerPatience = 2

const defaultPatience = 20

func (o *Op) gotAbort() Action {
	m := &o.met
	a := &o.Accesses[0]
	if a.Found != a.Expect {
		return o.judgeStatus(layout.Status(a.Found))
	}
	m.verdict = layout.Abort
	// Nobody acts on what the tail of the status word does not show.
	return o.sync(0, 1, stepSyncStatus)
}

// statusKnown reads the record that the intent stands for. A writer comes here when every replica shows the verdict.
func (o *Op) statusKnown() Action {
	m := &o.met
	o.toParent()
	switch {
	case o.Kind == Settle:
		o.Txn.Verdict = m.verdict
		return o.settleBy()
	case o.Machine != nil:
		return o.Machine.Next()
	}
	w := m.in.Parent
	i := 0
	if m.verdict == layout.Commit {
		w, i = m.in.Final, 1
	}
	switch {
	case w.State() != layout.Live:
		m.stands = 0
		return o.standsFor(nil)
	case !o.needsRecord():
		return o.standsForWord(w, i)
	case m.named:
		m.named = false
		m.recs[0], m.recs[1] = m.recs[i], m.recs[1-i]
		m.stands = w
		return o.gotStands()
	}
	return o.readStands(w)
}

func (o *Op) readStands(w layout.Word) Action {
	o.met.stands = w
	o.begin()
	o.readNamed(0, w)
	return o.post(stepReadIntent)
}

func (o *Op) gotStands() Action {
	if o.Kind == Settle {
		return o.settleCopy()
	}
	r, err := layout.ParseLinked(o.met.recs[0])
	if err == nil && (r.Flags&(layout.FlagIntent|layout.FlagChunk) != 0 || o.Kind != Scan &&
		!bytes.Equal(r.Key, o.Key)) {
		err = errors.New("names a record of another key, or kind")
	}
	if err != nil {
		if o.Kind == Scan {
			return o.badIntent(err)
		}
		return o.mendStands(o.met.stands, func(gone bool) Action {
			if gone {
				return o.finish(o.txnError(err))
			}
			return o.gotStands()
		})
	}
	return o.standsFor(&r)
}

// badIntent ends an Op that an intent cannot tell the key's value. A scan leaves the key out.
func (o *Op) badIntent(err error) Action {
	if o.Kind != Scan {
		return o.finish(o.txnError(err))
	}
	o.toParent()
	o.corrupted(fmt.Errorf("pg %d: intent at %#x: %w", o.Route.PG.ID, o.met.word.Off(), err))
	return o.scanIntents()
}

// standsFor acts on the record that an intent stands for, nil: the key is absent.
func (o *Op) standsFor(r *layout.Record) Action {
	m := &o.met
	switch o.Kind {
	case Scan:
		if r != nil && (o.Scan.Expired || !o.isExpired(&r.RecordHeader)) {
			o.Scan.Found = append(o.Scan.Found, *r)
		}
		return o.scanIntents()
	case Get, Exists, Pin:
		if r == nil {
			return o.finish(ErrNotFound)
		}
		o.takeRecord(o.slot, m.word, r)
		return o.gotten(r)
	}
	// From here on the word is a LIVE one whose record is r: whoever changes it expects the intent.
	o.x, m.settled = m.word, m.word
	o.xVersion, o.xFlags, o.expired = 0, 0, false
	if r != nil {
		o.xVersion, o.xFlags, o.Version = r.Version, HintFlagsOf(r.Flags, r.Expiry), r.Version
		o.expired = o.isExpired(&r.RecordHeader)
	} else {
		m.stands = 0
	}
	o.atA = true
	return o.changeAtA(r)
}

// standsForWord acts on the record under w, of which nobody needs to know more than the intent says: it is the i-th of
// the two that this names.
func (o *Op) standsForWord(w layout.Word, i int) Action {
	m := &o.met
	m.stands, m.settled = w, m.word
	o.x, o.xVersion, o.xFlags, o.expired = m.word, m.version, 0, false
	if m.in.Long&[...]layout.IntentLong{layout.LongParent, layout.LongFinal}[i] != 0 {
		o.xFlags = HintManifest
	}
	o.atA = true
	return o.place(nil)
}

// settledMeanwhile goes on after a CAS that expected a settled intent and found what it stands for, c: its owner was
// first.
func (o *Op) settledMeanwhile(c layout.Word) Action {
	o.x, o.met.settled = c, 0
	return o.place(nil)
}

// changeAtA changes what x stands for at the head, of which r is the record, nil if the key is absent, if the Op's
// condition holds. Nobody learns of a state that the tail does not show.
func (o *Op) changeAtA(r *layout.Record) Action {
	if o.Kind == Modify {
		return o.modify(r)
	}
	if err := o.refuted(r); err != nil {
		return o.answerAfterSync(err)
	}
	switch o.Kind {
	case Prepare:
		return o.place(r)
	case Delete:
		return o.casDelete()
	}
	return o.update()
}

// refuted is the answer if the Op's condition does not hold for the key's record r, nil if the key is absent. A Delete
// of a record that has expired takes it away all the same.
func (o *Op) refuted(r *layout.Record) error {
	present := r != nil && !o.expired
	switch {
	case r == nil && o.Kind == Delete, !present && (o.Cond == IfVersion || o.Cond == IfPresent) && o.Kind != Delete:
		return ErrNotFound
	case present && o.Cond == IfVersion && r.Version != o.IfVersion, r != nil && o.outdone(r):
		return ErrConflict
	case present && o.Cond == IfAbsent:
		return ErrExists
	}
	return nil
}

// manifestsMet lists those manifests whose chunks go with a settled intent. Those of the record that it stands for stay
// if that goes on: in the slot, as a copy, or as the parent of another intent. A guard's two records share their
// chunks.
func (o *Op) manifestsMet() (list []layout.Word) {
	in, kept := &o.met.in, layout.Word(0)
	if o.Kind == Settle || o.Kind == Prepare {
		kept = o.met.stands
	}
	if in.Kind == layout.IntentGuard {
		if in.Long != 0 && kept == 0 {
			list = append(list, in.Parent)
		}
		return list
	}
	if in.Long&layout.LongParent != 0 && in.Parent != kept {
		list = append(list, in.Parent)
	}
	if in.Long&layout.LongFinal != 0 && in.Final != kept {
		list = append(list, in.Final)
	}
	return list
}

// unlinkMet hands over the places that go with a settled intent: of the records before and after, unless n, or the
// intent that takes its place, names one of them still.
func (o *Op) unlinkMet() {
	m := &o.met
	for _, w := range [...]layout.Word{m.in.Parent, m.in.Final} {
		if w.State() != layout.Live || w == o.n || o.Kind == Prepare && w == m.stands {
			continue
		}
		o.env.Unlinked(o.Route.PG, w)
	}
}

// maxIntentRead is the longest READ of an intent's record, in bytes: a longer FROZEN record is a mover's.
const maxIntentRead = (layout.RecordHeaderSize + layout.MaxKeyLen + layout.IntentLen) * 17 / 16

// readFrozen reads the records of those FROZEN words of the locked group g of which it is not known whether they are
// intents, and lets the lock go: an intent does not keep others from inserting, a mover does. It is false if there is
// none, or if another word tells of a mover.
func (o *Op) readFrozen(g layout.Group) bool {
	if o.movedUnfinished(g) {
		return false
	}
	list := o.frozenIn(g)
	if len(list) == 0 {
		return false
	}
	o.begin()
	o.addUnlock()
	for i, w := range list {
		o.add(Access{Verb: Read, Space: Heap, Off: w.Off(), Buf: o.recBuf(i, w.ReadLen())})
	}
	return true
}

// frozenIn lists the FROZEN words of g that may be intents and are not known to be.
func (o *Op) frozenIn(g layout.Group) (list []layout.Word) {
	for i := range layout.GroupSlots {
		w := g.Slot(i)
		if w.State() == layout.Frozen && !o.isIntent(w) && w.ReadLen() <= maxIntentRead &&
			layout.InHeap(w, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
			list = append(list, w)
		}
	}
	return list
}

// isIntent reports whether w is known to be an intent: no slot repeats a word while the Op is in flight.
func (o *Op) isIntent(w layout.Word) bool { return slices.Contains(o.met.intents, w) }

func (o *Op) gotFrozen() Action {
	g := layout.Group(o.groups[0])
	list := o.frozenIn(g)
	for i, w := range list {
		r, err := layout.ParseRecord(o.recAt(i))
		if err != nil || r.Flags&layout.FlagIntent == 0 {
			return o.midMove(g)
		}
		o.met.intents = append(o.met.intents, w)
	}
	return o.lockGroup()
}

// syncIntent brings the records that an intent names to R[k], one by one and each behind its chunks, before the intent:
// the key's value is that of either of them.
func (o *Op) syncIntent() Action {
	r, err := layout.ParseRecord(o.syncRecs[1])
	if err != nil {
		return o.syncRead()
	}
	in, err := layout.ParseIntent(r.Value, o.Route.PG.HeapLo, o.Route.PG.HeapHi)
	if err != nil {
		return o.syncBroken(err)
	}
	for o.syncNamed < 2 {
		w := [...]layout.Word{in.Parent, in.Final}[o.syncNamed]
		if o.syncNamed++; w.State() != layout.Live {
			continue
		}
		o.begin()
		for i, k := range [2]uint8{o.syncK, o.syncFrom()} {
			o.add(Access{Verb: Read, Space: Heap, Replica: k, Off: w.Off(), Buf: o.copyBuf(uint8(i), w.ReadLen())})
		}
		return o.post(stepSyncIntent)
	}
	n := layout.RecordLen(len(r.Key), len(r.Value))
	return o.syncCAS(!bytes.Equal(o.syncRecs[0][:n], o.syncRecs[1][:n]))
}

// copyBuf is syncBuf for records that an intent names.
func (o *Op) copyBuf(i uint8, n int) []byte {
	b := &o.met.copies[i]
	if cap(*b) < n {
		*b = o.env.Buf(o, n)
	}
	*b = (*b)[:n]
	return *b
}

func (o *Op) gotSyncIntent() Action {
	if o.Accesses[0].Verb == Read {
		mine, prev := o.met.copies[0], o.met.copies[1]
		o.met.copyOff = o.Accesses[0].Off
		if _, err := layout.ParseLinked(prev); err != nil {
			return o.mendSync(o.met.copyOff, mine, prev, func(ruined bool) Action {
				if !ruined {
					return o.gotSyncNamed(prev)
				}
				if !isWhole(mine) {
					return o.syncIntent()
				}
				o.met.copies[1] = prev
				return o.copyNamed()
			})
		}
		return o.gotSyncNamed(prev)
	}
	return o.syncIntent()
}

// gotSyncNamed goes on with prev at the start of which is the whole record that an intent names.
func (o *Op) gotSyncNamed(prev []byte) Action {
	r, err := layout.ParseLinked(prev)
	if err != nil {
		return o.syncBroken(o.txnError(err))
	}
	prev = prev[:layout.RecordLen(len(r.Key), len(r.Value))]
	has := bytes.Equal(o.met.copies[0][:len(prev)], prev)
	o.met.copies[1] = prev
	switch {
	case o.lacksChunks(prev, has):
		o.chunk = 0
		return o.syncChunks()
	case !has:
		return o.copyNamed()
	}
	return o.syncIntent()
}

// copyNamed writes the record that an intent names, just read at R[k-1], to R[k].
func (o *Op) copyNamed() Action {
	o.begin()
	o.add(Access{Verb: Write, Space: Heap, Replica: o.syncK, Off: o.met.copyOff, Buf: o.met.copies[1]})
	return o.post(stepSyncIntent)
}

// scanIntents looks through the intents on a scan's page, one after the other.
func (o *Op) scanIntents() Action {
	m := &o.need().met
	n := len(m.list) - 1
	if n < 0 {
		return o.scanned()
	}
	x := m.list[n]
	m.list = m.list[:n]
	return o.lookThrough(layout.Word(x.off/layout.UnitSize), x.in)
}
