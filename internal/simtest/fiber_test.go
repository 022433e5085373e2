package simtest

import (
	"bytes"
	"iter"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// fiber runs a lane whose provider executes WRs within PostSend (Config.Synchronous): it
// stands still there until what it has posted is over, while the scheduler lets the verbs
// take effect one by one, and whatever else may happen in between.
type fiber struct {
	w      *World
	l      *engine.Lane
	next   func() (struct{}, bool)
	stop   func()
	yield  func(struct{}) bool
	mail   []func() // for the lane's next turn
	within bool     // PostSend
}

// stopped unwinds a fiber whose client is no more.
type stopped struct{}

func (w *World) newFiber(l *engine.Lane) *fiber {
	f := &fiber{w: w, l: l}
	f.next, f.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if x := recover(); x != nil && x != (stopped{}) {
				panic(x)
			}
		}()
		f.yield = yield
		for more := true; more; more = yield(struct{}{}) {
			for len(f.mail) > 0 {
				do := f.mail[0]
				f.mail = f.mail[1:]
				do()
			}
			l.Pump()
		}
	})
	return f
}

// run gives the lane a turn: to its end, or to where a PostSend waits.
func (f *fiber) run() {
	before := f.w.fiber
	f.w.fiber = f
	f.next()
	f.w.fiber = before
}

// wait is sim.Options.Wait.
func (w *World) wait() {
	f := w.fiber
	f.within = true
	if !f.yield(struct{}{}) {
		panic(stopped{})
	}
	f.within = false
}

// within reports whether a lane of the client waits within PostSend: nothing else that
// belongs to its owner happens to it meanwhile. lane -1: any.
func (c *cl) within(lane int) bool {
	for i, f := range c.fibers {
		if f.within && (lane < 0 || lane == i) {
			return true
		}
	}
	return false
}

// stopFibers ends the client's lanes where they stand.
func (c *cl) stopFibers() {
	for _, f := range c.fibers {
		f.stop()
		f.within = false
	}
	c.fibers = nil
}

// canBeginTwo reports whether the client's next two steps may share a chain.
func (c *cl) canBeginTwo() bool {
	if c.fibers == nil || c.w.cfg.Window < 2 || c.scan != nil || c.stream != nil ||
		c.pos+1 >= len(c.script) || !c.canBegin() {
		return false
	}
	a, b := c.script[c.pos], c.script[c.pos+1]
	if !a.Verb.mayBeHinted() || !b.Verb.mayBeHinted() || c.within(c.laneFor(b.Key)) {
		return false
	}
	for _, r := range c.run {
		if r.lane == c.quickLane() || r.lane == c.laneFor(b.Key) {
			return false // they are for tasks
		}
	}
	return true
}

// mayBeHinted reports whether the blocking client may try such a step without a task.
func (v Verb) mayBeHinted() bool { return v == Get || v == Put || v == PutEx }

// quickLane is the lane on which the client's next step is tried without a task: any lane may be the one of a
// processor.
func (c *cl) quickLane() int { return c.pos % len(c.lanes) }

func (c *cl) beginQuickly(lane int, rs ...*running) {
	for _, r := range rs {
		c.addRunning(r)
		r.quick, r.epoch = true, c.core.Epoch()
	}
	f := c.fibers[lane]
	f.mail = append(f.mail, func() { c.quickly(lane, rs) })
}

// quickly performs what it can without a task, in shared chains, as the blocking client
// does, and leaves the others to the lanes of their keys.
func (c *cl) quickly(lane int, rs []*running) {
	l := c.lanes[lane]
	ops := make([]*engine.Op, len(rs))
	for i, r := range rs {
		o := &r.t.Op
		ops[i] = &engine.Op{Kind: o.Kind, Key: o.Key, Value: o.Value, Expiry: o.Expiry, Pinned: o.Pinned,
			Hash: o.Hash, Check: o.Check, Asker: r}
	}
	l.Hinted(ops)
	for i, r := range rs {
		switch q := ops[i]; {
		case q.Over():
			r.quick = false
			o := &r.t.Op
			o.Err, o.Version = q.Err, q.Version
			c.w.quick[o.Kind]++
			c.done(r)
		case q.Task() != nil: // decided, and not published
			r.quick = false
			c.lanes[r.lane].Recycle(r.t)
			r.t, r.lane = q.Task(), lane
			r.t.Done = func(*engine.Task) { c.done(r) }
			c.w.wentOn++
		default:
			f := c.fibers[r.lane]
			f.mail = append(f.mail, func() {
				r.quick, r.start = false, c.w.step // it begins anew
				f.l.Start(r.t)
			})
		}
	}
}

// Take is engine.Asker.
func (r *running) Take(rec *layout.Record, _ [][]byte) {
	r.t.Op.Record = *rec
	r.t.Op.Record.Key, r.t.Op.Record.Value = bytes.Clone(rec.Key), bytes.Clone(rec.Value)
}

// mayBeQuick reports whether the blocking client tries an operation without a task.
func mayBeQuick(o *index.Op) bool {
	return o.Cond == index.Always && (o.Kind.Reads() || o.Kind == index.Put) &&
		len(o.Value) <= layout.MaxRecordSize && o.Whole == 0 && o.Part == nil
}
