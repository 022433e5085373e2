package simtest

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

func (c *cl) laneFor(key int) int { return key % len(c.lanes) }

// canBegin reports whether the next script step may begin.
func (c *cl) canBegin() bool {
	if c.scan != nil {
		return len(c.run) == 0
	}
	if c.stream != nil || c.collect != nil {
		return len(c.run) == 0
	}
	if c.pos >= len(c.script) {
		return false
	}
	s := c.script[c.pos]
	if s.Verb == Close && c.asked((*asked).isUnserved) != nil {
		return false // it waits for that, see client's endGrants
	}
	if s.Verb == Grant && !c.w.canInherit() {
		return false
	}
	if s.Verb == Close || s.Verb == Scan || s.Verb == Stream || s.Verb == Collect {
		return len(c.run)+len(c.orphans) == 0
	}
	lane := c.laneFor(s.Key)
	if s.Verb == Evict || s.Verb == Expire {
		lane = c.evictLane(s.Key)
	}
	if c.within(lane) || c.fibers != nil && s.Verb.mayBeHinted() && c.within(c.quickLane()) {
		return false
	}
	n := 0
	for _, r := range c.run {
		if r.lane == c.laneFor(s.Key) {
			n++
		}
	}
	if s.Verb == Txn || s.Verb == Look {
		return len(c.run) == c.settling()
	}
	return n-c.settling() < c.w.cfg.Window
}

// begin starts the client's next script step.
func (c *cl) begin() {
	lane := c.quickLane()
	switch r := c.next(); {
	case r == nil:
	case c.w.cfg.Synchronous && mayBeQuick(&r.t.Op):
		c.beginQuickly(lane, r)
	default:
		c.start(r)
	}
}

// beginTwo starts two steps at once; see canBeginTwo.
func (c *cl) beginTwo() {
	lane := c.quickLane()
	a := c.next()
	b := c.next()
	c.beginQuickly(lane, a, b)
}

// next takes the client's next script step: nil if it is under way or needs nothing more.
func (c *cl) next() *running {
	w := c.w
	if c.scan != nil {
		c.scanPage()
		return nil
	}
	if c.stream != nil {
		c.streamPart()
		return nil
	}
	if c.collect != nil {
		c.collectPart()
		return nil
	}
	s := c.script[c.pos]
	c.pos++
	switch s.Verb {
	case Close:
		c.close()
		return nil
	case Scan:
		c.scan = &scanning{call: w.tick(), found: map[int]bool{}}
		c.scanPage()
		return nil
	case Stream:
		c.beginStream(s)
		return nil
	case Evict, Expire:
		c.beginEvict(s)
		return nil
	case Demote, Promote, Collect:
		c.beginTiered(s)
		return nil
	case Txn:
		c.beginTxn(w.cfg.Txns[s.Key])
		return nil
	case Look:
		c.beginLook(w.cfg.Txns[s.Key])
		return nil
	case Grant:
		c.inherit()
		return nil
	}
	e := &Event{Client: c.i, Verb: s.Verb, Key: s.Key, Call: w.tick()}
	r := c.newRun(c.laneFor(s.Key))
	if r == nil {
		return nil
	}
	r.e, r.step = e, s
	o := &r.t.Op
	o.Key = keyOf(s.Key)
	o.Hash, o.Check = hashOf(s.Key)
	c.values++
	e.Value = fmt.Sprintf("%d.%d", c.i, c.values)
	o.Whole = c.whole()
	c.pin(r)
	c.lend(r)
	switch s.Verb {
	case Get:
		if o.Kind = index.Get; (c.w.cfg.Long != 0 || c.w.cfg.Payload != 0) && c.values%2 == 0 {
			r.piece = index.Part{Len: 1 << 20, Known: c.known[s.Key]}
			o.Part = &r.piece
		}
	case Watch:
		c.beginWatch(r)
	case Has:
		o.Kind = index.Exists
	case GetIf:
		o.Kind = index.Get
		if ref, ok := c.seen[s.Key]; ok {
			e.Old = ref.value
			o.IfVersion, o.Cond = ref.version, index.IfVersion
		}
	case Put:
		o.Kind, o.Value = index.Put, []byte(e.Value)
	case PutEx:
		o.Kind, o.Value, o.Expiry = index.Put, []byte(e.Value), w.millis+ttlMillis
		w.expiring = append(w.expiring, &expiring{e, o.Expiry})
	case Add:
		o.Kind, o.Cond, o.Value = index.Put, index.IfAbsent, []byte(e.Value)
	case Give:
		c.give(e, o)
	case Del:
		o.Kind = index.Delete
	case CAS, DelIf:
		ref, ok := c.seen[s.Key]
		if !ok {
			r.t.Op.Reset()
			c.lanes[r.lane].Recycle(r.t)
			return nil
		}
		e.Old = ref.value
		o.IfVersion, o.Cond = ref.version, index.IfVersion
		o.Kind, o.Value = index.Put, []byte(e.Value)
		if s.Verb == DelIf {
			o.Kind, o.Value = index.Delete, nil
		}
	case Touch:
		o.Kind, o.Keeps = index.Modify, true
		o.Modify = func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
			if cur == nil {
				return nil, 0, 0, index.ErrNotFound
			}
			return bytes.Clone(cur.Value), cur.Flags & layout.FlagsOfValue, 0, nil
		}
	case Incr:
		o.Kind = index.Modify
		o.Modify = func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
			old := ""
			if cur != nil {
				old = string(cur.Value)
			}
			e.Value = old + "+"
			return []byte(e.Value), 0, 0, nil
		}
	}
	return r
}

// give has o put a version that no session makes. It is of the past, or 1 to 3 steps after what this client saw last.
func (c *cl) give(e *Event, o *index.Op) {
	const nobodys = layout.VersionStep - 1
	after := uint64(c.values) % 4
	e.Version = after*layout.VersionStep | nobodys
	if ref, ok := c.seen[e.Key]; ok && after > 0 {
		e.Version += ref.version &^ nobodys
	}
	e.Value, e.versions = fmt.Sprintf("given %#x", e.Version), c.w.versionOf
	o.Kind, o.Value, o.Cond, o.IfVersion = index.Put, []byte(e.Value), index.IfOlder, e.Version
}

// whole is Op.Whole for the client's latest value.
func (c *cl) whole() uint32 { return uint32(c.w.cfg.Long >> (c.values % 8) & 1) }

func (c *cl) newRun(lane int) *running {
	t, err := c.lanes[lane].NewTask()
	if err != nil {
		c.w.fail(err)
		return nil
	}
	if t.Op.Patience = -1; c.w.cfg.Patient {
		t.Op.Patience = 1
	}
	return &running{t: t, lane: lane, work: -1}
}

func (c *cl) start(r *running) {
	c.addRunning(r)
	c.lanes[r.lane].Start(r.t)
}

// addRunning counts an operation among those under way.
func (c *cl) addRunning(r *running) {
	r.start = c.w.step
	c.run = append(c.run, r)
	r.t.Done = func(*engine.Task) { c.done(r) }
}

func remove(list *[]*running, r *running) bool {
	for i, x := range *list {
		if x == r {
			*list = append((*list)[:i:i], (*list)[i+1:]...)
			return true
		}
	}
	return false
}

// done takes an operation's answer.
func (c *cl) done(r *running) {
	answered := !remove(&c.run, r)
	remove(&c.orphans, r)
	r.over, r.err = true, r.t.Op.Err
	c.w.mended += int(r.t.Op.Mended)
	if !answered {
		switch {
		case r.work >= 0:
			c.worked(r)
		case r.evict != nil:
			c.evicted(r)
		case r.tiered:
			c.tieredDone(r)
		case r.txn != nil:
			r.txn.over(r, r.err)
		case r.look != nil:
			r.look.over(r, r.err)
		case r.grant != nil:
			c.inherited(r, r.err)
		case r.e == nil:
			c.scanned(r)
		default:
			c.answer(r)
		}
	}
	c.lanes[r.lane].Recycle(r.t)
}

// answer records the outcome of a script's operation.
func (c *cl) answer(r *running) {
	w, e, op := c.w, r.e, &r.t.Op
	err := op.Err
	if c.streamed(r) {
		return // it goes on
	}
	switch {
	case err == nil:
		e.Out = OK
		if e.Verb.reads() {
			e.Got = string(op.Record.Value)
			if p := op.Parts(); p != nil {
				e.Got = string(bytes.Join(p, nil))
			}
			if !bytes.Equal(op.Record.Key, keyOf(e.Key)) {
				w.fail(fmt.Errorf("I14: get of %s answered a record of %q", keyOf(e.Key), op.Record.Key))
			}
		}
		switch e.Verb {
		case Watch:
			if err := c.watch(r); errors.Is(err, engine.ErrLease) || errors.Is(err, engine.ErrMapChanged) {
				e.Out = NotDone
			} else if err != nil {
				w.fail(err)
			}
		case Has:
			_, e.Got, _ = strings.Cut(w.versions[op.Record.Version], "=")
		case Get, GetIf:
			c.seen[e.Key] = ref{op.Version, e.Got}
			if op.Part != nil {
				c.known[e.Key] = op.Part.Known
			}
		case Give:
			if op.Version != e.Version {
				w.fail(fmt.Errorf("%v: has the version %#x, and %#x was given", e, op.Version, e.Version))
			}
			c.seen[e.Key] = ref{op.Version, e.Value}
			w.version(e.Key, op.Version, e.Value)
		case Put, PutEx, Add, CAS, Incr, Stream:
			c.seen[e.Key] = ref{op.Version, e.Value}
			w.version(e.Key, op.Version, e.Value)
		}
	case errors.Is(err, index.ErrUnchanged) && e.Verb == GetIf:
		e.Out, e.Got = OK, e.Old
	case errors.Is(err, index.ErrUnknown):
		e.Out = Unknown
	case errors.Is(err, index.ErrNotFound):
		e.Out = NotFound
	case errors.Is(err, index.ErrExists):
		e.Out = Exists
	case errors.Is(err, index.ErrConflict):
		e.Out = Conflict
	case errors.Is(err, index.ErrFull), errors.Is(err, engine.ErrTimeout), errors.Is(err, engine.ErrNoConn),
		errors.Is(err, engine.ErrLease), errors.Is(err, index.ErrDraft), errors.Is(err, index.ErrTier):
		e.Out = NotDone
	default:
		w.fail(fmt.Errorf("%v: %w", e, err))
	}
	if r.lent != nil {
		got := ""
		if err == nil && r.lent.holds(op.Record.Value) {
			got = e.Got
		}
		if err := r.lent.returned(e.String(), got); err != nil {
			w.fail(err)
		}
	}
	e.Return = w.tick()
	w.record(e)
	c.tell(uint64(e.Out), xxh3.HashString(e.Got))
}

// abandon answers an operation whose caller goes, as the blocking client does; its
// verbs stay in flight.
func (c *cl) abandon(r *running, err error) {
	posted := r.t.Op.Posted()
	remove(&c.run, r)
	c.orphans = append(c.orphans, r)
	c.lanes[r.lane].Orphan(r.t, err)
	switch {
	case r.work >= 0:
		c.todo = append(c.todo, r.work)
		return
	case r.evict != nil:
		c.evictedMaybe(r, nil)
		return
	case r.tiered:
		c.collect = nil
		return
	case r.look != nil:
		if !errors.Is(err, engine.ErrLease) {
			r.look.over(r, err)
		}
		return
	case r.txn != nil && errors.Is(err, engine.ErrLease):
		c.loseTxns()
		return
	case r.txn != nil:
		r.txn.over(r, errAbandoned(r, posted))
		return
	case r.e == nil:
		return // the page is read again
	}
	c.endStream(r)
	if r.lent != nil {
		if err := r.lent.returned(r.e.String(), ""); err != nil {
			c.w.fail(err)
		}
	}
	r.e.Out = NotDone
	if errors.Is(errAbandoned(r, posted), index.ErrUnknown) {
		r.e.Out = Unknown
	}
	r.e.Return = c.w.tick()
	c.w.record(r.e)
}

// errAbandoned is the error of an operation that was abandoned; posted says whether its deciding verb was under way.
func errAbandoned(r *running, posted bool) error {
	if r.over && errors.Is(r.err, index.ErrUnknown) || !r.over && posted {
		return index.ErrUnknown
	}
	return engine.ErrTimeout
}

func (c *cl) scanPage() {
	r := c.newRun(0)
	if r == nil {
		return
	}
	r.step = Step{Scan, 0}
	o, at := &r.t.Op, c.scan.next
	o.Kind, o.Hash = index.Scan, at.prefix
	o.Scan = &index.Page{Segment: at.segment, Shard: at.shard, From: at.slot, Bytes: 128}
	c.start(r)
}

func (c *cl) scanned(r *running) {
	s, op := c.scan, &r.t.Op
	switch {
	case s == nil:
		return
	case errors.Is(op.Err, engine.ErrTimeout), errors.Is(op.Err, engine.ErrNoConn), errors.Is(op.Err, index.ErrFull):
		return // the page is read again
	case errors.Is(op.Err, engine.ErrLease):
		c.scan = nil
		return
	case op.Err != nil:
		c.w.fail(fmt.Errorf("scan: %w", op.Err))
		return
	}
	for i := range op.Scan.Found {
		if k := op.Scan.Found[i].Key; k[0] == 'k' {
			n := 0
			for _, d := range k[3:] {
				n = n*10 + int(d-'0')
			}
			s.found[n] = true
			c.tell(uint64(n))
		}
	}
	switch {
	case op.Scan.Next != 0:
		s.next.shard, s.next.slot = op.Scan.Shard, op.Scan.Next
	case op.Scan.End:
		s.next = cursor{prefix: nextShard(c.core.View(), s.next.prefix)}
		s.next.done = s.next.prefix == 0
	default:
		s.next.segment, s.next.shard, s.next.slot = s.next.segment+1, 0, 0
	}
	if s.next.done {
		c.w.scans = append(c.w.scans, scanned{c.i, s.call, c.w.tick(), s.found})
		c.scan = nil
	}
}

// nextShard is the left-aligned prefix behind the shard that covers prefix; 0
// behind the last.
func nextShard(v *engine.View, prefix uint64) uint64 {
	sh := v.ShardOf(prefix)
	if sh == nil || sh.Depth == 0 {
		return 0
	}
	return uint64(sh.Prefix+1) << (64 - sh.Depth)
}
