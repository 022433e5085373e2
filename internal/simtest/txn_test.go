package simtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// Part is what a transaction does to one key.
type Part struct {
	Key    int
	Effect index.Effect
	Cond   index.Cond // IfVersion: of what the client saw last; without that the transaction is skipped
}

// part is a Part in a history.
type part struct {
	Part
	value, old, got string // written; expected; kept, "" if absent
}

func (p part) String() string {
	s := fmt.Sprintf("%s key%d", [...]string{"", "put", "del", "keep"}[p.Effect], p.Key)
	switch {
	case p.Effect == index.PutKey:
		s += " " + p.value
	case p.Effect == index.KeepKey:
		s += " " + p.got
	}
	switch p.Cond {
	case index.IfVersion:
		s += " if " + p.old
	case index.IfAbsent:
		s += " if absent"
	case index.IfPresent:
		s += " if present"
	}
	return s
}

// statusWord is a status word that a client was handed.
type statusWord struct {
	at   index.StatusAt
	seq  uint64 // of its last transaction
	word layout.Status
	busy bool // or put aside for ever, if it is not known that all intents are gone
}

// transaction is one under way. Its coordinator is what a client library does: prepare all keys, decide, acknowledge,
// settle.
type transaction struct {
	c        *cl
	e        *Event
	x        *statusWord
	at       index.StatusAt
	reqs     []*index.Txn
	placed   []bool
	stage    index.Kind
	left     int
	out      Outcome // OK as long as nothing speaks against it
	doubt    bool    // an intent may be there, or come, of which nothing is known
	answered bool
	whole    []uint32 // by part
	versions []uint64 // by part, of its condition
	chain    *index.Transaction
	broken   bool // a try as one chain has left it open whether it happened
}

// statusBase is where the status words are, in every placement group.
func (w *World) statusBase() uint64 {
	return layout.RegionPageSize + uint64(w.cfg.Segments)*layout.SegmentSize
}

// isStatus reports whether an index offset is that of a status word.
func (w *World) isStatus(off uint64) bool {
	return w.cfg.Status > 0 && off >= w.statusBase() && off < w.statusBase()+layout.SegmentSize
}

// handStatus hands client c its status words, as the directory will.
func (w *World) handStatus(c *cl) {
	for i := range w.cfg.Status {
		n := c.i*w.cfg.Status + i
		pg := uint32(1 + i%w.cfg.PGs)
		off := w.statusBase() + uint64(n/layout.GroupSlots)*layout.GroupSize + layout.SlotOff(n%layout.GroupSlots)
		c.status = append(c.status,
			&statusWord{at: index.StatusAt{PG: pg, Generation: w.st.PG(pg).Generation, Off: off}})
	}
	w.grantBlock(c)
}

// beginTxn begins a script's transaction, if it has a status word.
func (c *cl) beginTxn(parts []Part) {
	i := slices.IndexFunc(c.status, func(x *statusWord) bool { return !x.busy })
	if i < 0 {
		return
	}
	w, x := c.w, c.status[i]
	t := &transaction{c: c, x: x, at: x.at, out: OK, placed: make([]bool, len(parts))}
	t.at.Seq = x.seq + 1
	e := &Event{Client: c.i, Verb: Txn, Call: w.tick()}
	var whole []uint32
	for _, p := range parts {
		c.values++
		whole = append(whole, c.whole())
		q := part{Part: p, value: fmt.Sprintf("%d.%d", c.i, c.values)}
		if p.Cond == index.IfVersion {
			ref, ok := c.seen[p.Key]
			if !ok {
				return
			}
			q.old = ref.value
		}
		e.Parts = append(e.Parts, q)
		t.reqs = append(t.reqs, &index.Txn{Status: t.at, Effect: p.Effect, TS: uint64(c.pos), Coord: uint64(c.id)})
	}
	x.busy = true
	t.e, t.whole = e, whole
	for _, p := range parts {
		t.versions = append(t.versions, c.seen[p.Key].version)
	}
	c.txns = append(c.txns, t)
	if !w.cfg.Together || slices.ContainsFunc(parts, func(p Part) bool {
		return p.Effect == index.KeepKey || p.Cond != index.Always && p.Cond != index.IfVersion
	}) {
		t.prepare()
		return
	}
	t.stage = index.Transact
	r := t.newRun(-1)
	if r == nil {
		return
	}
	z := &index.Transaction{Status: t.at, TS: uint64(c.pos), Coord: uint64(c.id), Found: x.word}
	for i := range e.Parts {
		p := &e.Parts[i]
		l := index.Leg{Key: keyOf(p.Key), Value: []byte(p.value), Effect: p.Effect, Cond: p.Cond,
			IfVersion: t.versions[i]}
		l.Hash, l.Check = hashOf(p.Key)
		z.Legs = append(z.Legs, l)
	}
	t.chain = z
	r.t.Op.Kind, r.t.Op.Machine = index.Transact, z
	t.start([]*running{r})
}

// prepare places the intents that are not there yet.
func (t *transaction) prepare() {
	t.stage = index.Prepare
	var runs []*running
	for i := range t.e.Parts {
		if t.placed[i] {
			continue
		}
		if r := t.newRun(i); r != nil {
			o := &r.t.Op
			p := &t.e.Parts[i]
			o.Kind, o.Cond, o.Value, o.Whole, o.IfVersion = index.Prepare, p.Cond, []byte(p.value), t.whole[i],
				t.versions[i]
			runs = append(runs, r)
		}
	}
	t.start(runs)
}

// together takes the end of a try as one chain.
func (t *transaction) together(err error) {
	if t.c.life != live {
		return
	}
	z := t.chain
	for i := range z.Legs {
		l := &z.Legs[i]
		t.reqs[i].Placed = l.Placed
		if l.IsPlaced {
			t.placed[i] = !l.Settled
		}
	}
	switch {
	case errors.Is(err, index.ErrApart), errors.Is(err, index.ErrMissed):
		t.prepare()
	case errors.Is(err, index.ErrBroken):
		// It may be decided, and any of its intents there; nothing comes any more.
		for i := range t.placed {
			t.placed[i] = true
		}
		t.broken = true
		t.decide()
	case err != nil:
		out := NotDone
		if errors.Is(err, index.ErrUnknown) && z.MayHaveHappened() {
			out = Unknown
		}
		t.answer(out)
		t.drop() // with its word
	default:
		t.x.word = z.Found
		if z.Verdict != layout.Commit {
			t.out = NotDone
		}
		t.settleIntents(z.Verdict)
	}
}

func (t *transaction) newRun(i int) *running {
	r := t.c.newRun(0)
	if r == nil {
		return nil
	}
	r.txn, r.part, r.step = t, i, Step{Txn, 0}
	o := &r.t.Op
	if i >= 0 {
		k := t.e.Parts[i].Key
		o.Key = keyOf(k)
		o.Hash, o.Check = hashOf(k)
		o.Txn = t.reqs[i]
	}
	return r
}

func (t *transaction) start(runs []*running) {
	t.left = len(runs)
	for _, r := range runs {
		t.c.start(r)
	}
}

// over takes the end of one of t's operations. If that was abandoned it may go on.
func (t *transaction) over(r *running, err error) {
	op := &r.t.Op
	t.c.tell(uint64(t.stage), uint64(r.part+1), uint64(outcomeOf(err)))
	t.left--
	switch t.stage {
	case index.Transact:
		t.together(err)
	case index.Prepare:
		switch {
		case err == nil:
			t.placed[r.part] = true
			t.prepared(r.part, op)
		default:
			t.out = max(t.out, outcomeOf(err))
			t.doubt = t.doubt || errors.Is(err, index.ErrUnknown) || errors.Is(err, engine.ErrTimeout)
		}
		if t.left == 0 {
			t.decide()
		}
	case index.Decide:
		t.decided(op, err)
	case index.Settle:
		t.doubt = t.doubt || err != nil
		if t.left == 0 {
			t.end()
		}
	}
}

// outcomeOf is what an error of a part of a transaction says of the whole.
func outcomeOf(err error) Outcome {
	switch {
	case err == nil:
		return OK
	case errors.Is(err, index.ErrNotFound), errors.Is(err, index.ErrExists), errors.Is(err, index.ErrConflict):
		return Conflict
	}
	return NotDone
}

func (t *transaction) prepared(i int, op *index.Op) {
	p := &t.e.Parts[i]
	if p.Effect == index.KeepKey {
		p.got = ""
		if k := op.Txn.Placed.Intent.Kind; k == layout.IntentGuard {
			p.got = t.c.w.valueOf(t.c.w.chain(op.Route.PG.ID)[0], &op.Record)
		}
	}
}

// decide goes on when all intents are placed, or not.
func (t *transaction) decide() {
	if t.c.life != live {
		return
	}
	if t.out != OK && !t.doubt && !slices.Contains(t.placed, true) {
		// Nobody knows of it: its number is used again.
		t.x.busy = false
		t.answer(t.out)
		t.drop()
		return
	}
	t.stage = index.Decide
	r := t.newRun(-1)
	if r == nil {
		return
	}
	verdict := layout.Abort
	if t.out == OK && !t.broken {
		verdict = layout.Commit
	}
	r.t.Op.Kind = index.Decide
	r.t.Op.Txn = &index.Txn{Status: t.at, Found: t.x.word, Verdict: verdict}
	t.start([]*running{r})
}

// decided takes the verdict.
func (t *transaction) decided(op *index.Op, err error) {
	if err != nil {
		out := t.out
		if out == OK {
			if out = NotDone; t.broken || errors.Is(err, index.ErrUnknown) {
				out = Unknown
			}
		}
		t.answer(out)
		t.drop() // with its word
		return
	}
	v, _ := op.Txn.Found.Of(t.at.Seq)
	t.x.word = op.Txn.Found
	if t.out == OK && v != layout.Commit {
		t.out = NotDone
	}
	t.settleIntents(v)
}

// settleIntents answers, and takes away the intents that are left.
func (t *transaction) settleIntents(v layout.Verdict) {
	t.answer(t.out)
	t.stage = index.Settle
	var runs []*running
	for i, q := range t.reqs {
		if !t.placed[i] {
			continue
		}
		if r := t.newRun(i); r != nil {
			r.t.Op.Kind = index.Settle
			q.Verdict = v
			runs = append(runs, r)
		}
	}
	if t.start(runs); t.left == 0 {
		t.end()
	}
}

func (t *transaction) answer(out Outcome) {
	if t.answered {
		return
	}
	t.answered = true
	t.e.Out, t.e.Return = out, t.c.w.tick()
	t.c.w.record(t.e)
}

// end is when all intents have gone; the status word serves another transaction.
func (t *transaction) end() {
	if !t.doubt {
		t.x.busy, t.x.seq = false, t.at.Seq
	}
	t.drop()
}

func (t *transaction) drop() {
	t.c.txns = slices.DeleteFunc(t.c.txns, func(x *transaction) bool { return x == t })
}

// loseTxns ends c's transactions with c.
func (c *cl) loseTxns() {
	for _, t := range slices.Clone(c.txns) {
		out := NotDone // it is never posted
		if (t.stage == index.Decide || t.stage == index.Transact) && t.out == OK {
			out = Unknown
		}
		t.answer(out)
		t.drop()
	}
}

// settling counts the operations of c that nobody waits for.
func (c *cl) settling() (n int) {
	for _, r := range c.run {
		if r.txn != nil && r.txn.answered {
			n++
		}
	}
	return n
}

// joint is the model of several keys: their values, "" when absent.
type joint [8]string

// jointModel is model for all keys of a history at once.
func jointModel(at map[int]int) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return joint{} },
		Step: func(state, in, out any) (bool, any) {
			s, e := state.(joint), in.(*Event)
			if e.Verb != Txn {
				ok, v := model.Step(s[at[e.Key]], in, out)
				s[at[e.Key]] = v.(string)
				return ok, s
			}
			n, holds := s, true
			for _, p := range e.Parts {
				v := s[at[p.Key]]
				switch p.Cond {
				case index.IfVersion:
					holds = holds && v != "" && v == p.old
				case index.IfAbsent:
					holds = holds && v == ""
				case index.IfPresent:
					holds = holds && v != ""
				}
				switch p.Effect {
				case index.PutKey:
					n[at[p.Key]] = p.value
				case index.DeleteKey:
					n[at[p.Key]] = ""
				default:
					holds = holds && (e.Out != OK || v == p.got)
				}
			}
			switch e.Out {
			case OK:
				return holds, n
			case Conflict:
				return !holds, s
			}
			if holds { // unknown
				return true, n
			}
			return true, s
		},
		Equal: func(a, b any) bool { return a.(joint) == b.(joint) },
	}
}

// checkJoint reports an error if no order explains the whole history: transactions are strictly serializable, and key
// operations with them.
func checkJoint(h []Event) error {
	at := map[int]int{}
	add := func(k int) {
		if _, ok := at[k]; !ok {
			at[k] = len(at)
		}
	}
	var ops []porcupine.Operation
	for i := range h {
		e := &h[i]
		if e.Verb == Txn {
			for _, p := range e.Parts {
				add(p.Key)
			}
		} else {
			add(e.Key)
		}
		if e.Out == NotDone || e.Verb.reads() && e.Out == Unknown {
			continue
		}
		op := porcupine.Operation{ClientId: len(ops), Input: e, Call: e.Call, Return: e.Return}
		if e.Out == Unknown {
			op.Return = math.MaxInt64
		}
		ops = append(ops, op)
	}
	if len(at) > len(joint{}) {
		return fmt.Errorf("%d keys in a history with transactions, at most %d", len(at), len(joint{}))
	}
	if porcupine.CheckOperations(jointModel(at), ops) {
		return nil
	}
	var b strings.Builder
	for i := range h {
		fmt.Fprintf(&b, "\n  [%d,%d] %v", h[i].Call, h[i].Return, &h[i])
	}
	return fmt.Errorf("I15: no order explains the history:%s", b.String())
}

// names lists the words of the records that x names in r: its own, those of an intent, and the chunks of all of these.
func (w *World) names(r *region, x layout.Word) []layout.Word {
	list := w.records(r, x)
	if w.cfg.Long == 0 && w.cfg.Payload == 0 {
		return list
	}
	for _, n := range list {
		if rec, err := w.recordAt(r, n); err == nil {
			chunks, _ := w.chunks(r, &rec)
			list = append(list, chunks...)
		}
	}
	return list
}

// chunks lists the words of the chunks of rec in r, none if it is no manifest; value is rec's, or an error if a chunk
// is not there.
func (w *World) chunks(r *region, rec *layout.Record) (list []layout.Word, value func() (string, error)) {
	if rec.Flags&layout.FlagManifest == 0 {
		return nil, func() (string, error) { return string(rec.Value), nil }
	}
	m, err := layout.ParseManifest(rec.Value, 0, math.MaxUint32)
	for _, c := range m.Chunks {
		list = append(list, layout.MakeLive(c.Ver, 0, c.Code, c.Unit))
	}
	return list, func() (string, error) {
		var b strings.Builder
		for i, x := range list {
			c, e := w.recordAt(r, x)
			if e == nil && (c.Flags&layout.FlagChunk == 0 || c.Version != m.ID || c.Expiry != uint64(i)) {
				e = fmt.Errorf("%v is no chunk %d of manifest %#x", x, i, m.ID)
			}
			err = errors.Join(err, e)
			b.Write(c.Value)
		}
		return b.String(), err
	}
}

// valueOf is the value of rec in r.
func (w *World) valueOf(r *region, rec *layout.Record) string {
	if rec.Stub {
		return w.valueOfStub(rec)
	}
	_, value := w.chunks(r, rec)
	v, err := value()
	if err != nil {
		w.fail(fmt.Errorf("I3: m%d: %w", r.node.i, err))
	}
	return v
}

// records lists the words of the records that x names in r: its own, and those of an intent.
func (w *World) records(r *region, x layout.Word) []layout.Word {
	list := []layout.Word{x}
	if x.State() != layout.Frozen {
		return list
	}
	rec, err := w.recordAt(r, x)
	if err != nil || rec.Flags&layout.FlagIntent == 0 {
		return list
	}
	in, err := layout.ParseIntent(rec.Value, 0, math.MaxUint32)
	if err != nil {
		w.fail(fmt.Errorf("I3: m%d links %v: %w", r.node.i, x, err))
		return list
	}
	for _, n := range []layout.Word{in.Parent, in.Final} {
		if n.State() == layout.Live {
			list = append(list, n)
		}
	}
	return list
}

// intentOf is the intent that x names in r.
func (w *World) intentOf(r *region, x layout.Word) (in layout.Intent, ok bool) {
	if x.State() != layout.Frozen {
		return in, false
	}
	rec, err := w.recordAt(r, x)
	if err != nil || rec.Flags&layout.FlagIntent == 0 {
		return in, false
	}
	in, err = layout.ParseIntent(rec.Value, 0, math.MaxUint32)
	return in, err == nil
}

// checkStatus checks I16: a verdict stands, and no replica holds an intent of a transaction whose status word has gone
// on.
func (w *World) checkStatus(r *region, off uint64, old, now layout.Word) {
	if !w.isStatus(off) {
		return
	}
	if a, b := layout.Status(old), layout.Status(now); b.Seq() < a.Seq() || b.Seq() == a.Seq() &&
		a.Verdict() != layout.Undecided {
		w.fail(fmt.Errorf("I16: the status word at %#x of m%d goes from %v to %v", off, r.node.i, a, b))
	}
	for _, pg := range w.st.PGs(1) {
		w.checkIntents(w.copies(pg.Id), r, off)
	}
}

// checkIntents checks that none of some copies holds an intent of a transaction that the status word at off of x has
// left behind. A joiner is no copy: who knows of it may bring an intent there that others, who do not, have settled.
func (w *World) checkIntents(copies []*region, x *region, off uint64) {
	now := layout.Status(binary.LittleEndian.Uint64(x.bytes[off:]))
	for _, o := range copies {
		for _, s := range o.slots {
			if o.node.crashed || !s.now.Readable() {
				continue
			}
			if in, ok := w.intentOf(o, s.now); ok && in.PG == x.pg && in.Off == off && now.Seq() > in.Seq {
				w.fail(fmt.Errorf("I16: slot %#x of m%d holds an intent of transaction %d, and its status word has "+
					"gone on to %v", s.off, o.node.i, in.Seq, now))
			}
		}
	}
}

// checkAllIntents is checkIntents for the status words of all intents of some copies.
func (w *World) checkAllIntents(copies []*region) {
	for _, o := range copies {
		for _, s := range o.slots {
			if in, ok := w.intentOf(o, s.now); ok && !o.node.crashed {
				for _, x := range w.copies(in.PG) {
					if !x.node.crashed {
						w.checkIntents(copies, x, in.Off)
					}
				}
			}
		}
	}
}

// checkScanned checks, when the scan of a recall is done, that no intent, and no manifest, names anything in the extent
// (I7): all sessions have known of the recall before the scan began.
func (w *World) checkScanned(pg, extent uint32) {
	chain := w.chain(pg)
	if w.cfg.InPlace || w.cfg.Reclaims || len(chain) == 0 {
		return
	}
	for _, s := range chain[0].slots {
		if !s.now.Readable() {
			continue
		}
		for _, x := range w.names(chain[0], s.now)[1:] {
			if x.Unit()/layout.ExtentUnits == extent {
				w.fail(fmt.Errorf("I7: extent %d of pg %d was scanned, but what slot %#x holds names %v", extent, pg,
					s.off, x))
			}
		}
	}
}
