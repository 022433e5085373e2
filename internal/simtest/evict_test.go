package simtest

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma/sim"
)

// named is a word that named a record, LIVE.
type named struct {
	pg   uint32
	word layout.Word
}

// linked is the record that a word named when a slot last took it.
type linked struct{ key, value string }

// number is the key's; ok is false for fillers.
func (l linked) number() (n int, ok bool) {
	if l.key == "" || l.key[0] != 'k' {
		return 0, false
	}
	n, err := strconv.Atoi(l.key[3:])
	return n, err == nil
}

// evicting is an eviction under way.
type evicting struct {
	call   int64
	pg     uint32
	expire bool          // only what has expired
	chosen []layout.Word // to be removed, perhaps
	took   []layout.Word // that it has taken from a head
	over   bool          // more is pinned than may be
	share  *share        // if there are pins
}

// isAccess reports whether a region's offset is that of an access word.
func (w *World) isAccess(off uint64) bool {
	return off >= w.indexBytes && off < w.indexBytes+w.accessBytes
}

// beginEvict starts a script's Evict or Expire: on another lane than the key's operations,
// if there are several.
func (c *cl) beginEvict(s Step) {
	hash, _ := hashOf(s.Key)
	sh := c.core.View().ShardOf(hash)
	home, stash := layout.GroupOff(hash, sh.Segments)
	c.startEvict(s, c.evictLane(s.Key), repair.Work{PG: sh.PG.ID, Off: sh.Off + home, More: []uint64{sh.Off + stash}},
		func(l []repair.Candidate) (picked []int) {
			for i := range l {
				if _, ok := c.w.linked[named{sh.PG.ID, l[i].Word.WithState(layout.Live)}].number(); ok {
					picked = append(picked, i)
				}
			}
			return picked
		})
}

func (c *cl) evictLane(key int) int { return (c.laneFor(key) + 1) % len(c.lanes) }

func (c *cl) startEvict(s Step, lane int, x repair.Work, pick func(l []repair.Candidate) []int) {
	r := c.newRun(lane)
	if r == nil {
		return
	}
	ev := &evicting{call: c.w.tick(), pg: x.PG, expire: s.Verb == Expire}
	r.step, r.evict = s, ev
	if !ev.expire {
		x.Choose = func(l []repair.Candidate) []int {
			picked := pick(l)
			if c.w.cfg.Pins != 0 {
				picked = c.unpinned(ev, l, picked)
			}
			for _, i := range picked {
				if w := l[i].Word; !slices.Contains(ev.chosen, w) {
					ev.chosen = append(ev.chosen, w)
				}
			}
			return picked
		}
		if c.w.cfg.Pins != 0 {
			x.Spare = c.spare(ev)
			ev.share = &share{groups: append([]uint64{x.Off}, x.More...), all: map[site]*lived{}}
			c.w.watchShare(ev)
		}
	}
	r.t.Op.Kind, r.t.Op.Machine = index.Evict, repair.New(index.Evict, &x)
	c.start(r)
}

// evicted records what an eviction has removed, key by key.
func (c *cl) evicted(r *running) {
	w, op := c.w, &r.t.Op
	switch err := op.Err; {
	case err == nil, errors.Is(err, engine.ErrTimeout), errors.Is(err, engine.ErrNoConn),
		errors.Is(err, engine.ErrLease):
	default:
		w.fail(fmt.Errorf("eviction of client %d: %w", c.i, err))
	}
	for _, f := range workOf(op).Findings {
		w.fail(fmt.Errorf("eviction of client %d: finding: %s", c.i, f))
	}
	var done []layout.Word
	if op.Err == nil {
		for _, x := range workOf(op).Evicted {
			done = append(done, x.Word)
			c.tell(uint64(x.Word))
			w.evictedOne(c, r.evict, x.Word, OK, x.Expired)
		}
	}
	c.evictedMaybe(r, done)
}

// evictedMaybe records what an eviction may have removed besides done. An eviction that has ended by itself
// may have taken a word before it started over; of others a CAS may still land.
func (c *cl) evictedMaybe(r *running, done []layout.Word) {
	list := r.evict.chosen
	if r.over && r.err == nil {
		list = r.evict.took
	}
	for _, x := range list {
		if !slices.Contains(done, x) {
			c.w.evictedOne(c, r.evict, x, Unknown, false)
		}
	}
}

func (w *World) evictedOne(c *cl, ev *evicting, x layout.Word, out Outcome, expired bool) {
	l := w.linked[named{ev.pg, x.WithState(layout.Live)}]
	n, ok := l.number()
	if !ok || ev.expire {
		return // a filler, or gone before
	}
	w.record(&Event{Client: c.i, Verb: Evict, Key: n, Old: l.value, Out: out, Expired: expired, Call: ev.call,
		Return: w.tick()})
}

// emptied notes what an eviction takes from a head, if the atomic is one's, and checks
// that it had expired unless it was chosen.
func (w *World) emptied(ev sim.Event, r *region, off uint64, old layout.Word) {
	if w.chain(r.pg)[0] != r {
		return // others may have skipped what the head held last
	}
	for _, x := range w.took(ev, off, old) {
		rec, err := w.recordAt(r, old)
		if err == nil && !x.evict.expire {
			w.unpins(w.owners[ev.QP].c, x.evict, old, &rec)
		}
		if x.evict.expire && err == nil && (rec.Expiry == 0 || rec.Expiry > w.millis) {
			w.fail(fmt.Errorf("client %d removes %q, which expires at %d, at %d", w.owners[ev.QP].c.i, rec.Key,
				rec.Expiry, w.millis))
		}
	}
}

// took notes with the evictions whose CAS an atomic is what they have taken.
func (w *World) took(ev sim.Event, off uint64, old layout.Word) (evictions []*running) {
	c := w.owners[ev.QP].c
	for _, list := range [][]*running{c.run, c.orphans} {
		for _, x := range list {
			if x.evict == nil || !posted(&x.t.Op, off, old) {
				continue
			}
			if !slices.Contains(x.evict.took, old) {
				x.evict.took = append(x.evict.took, old)
			}
			evictions = append(evictions, x)
		}
	}
	return evictions
}

// posted reports whether a CAS of old at off is among an operation's accesses.
func posted(o *index.Op, off uint64, old layout.Word) bool {
	return slices.ContainsFunc(o.Accesses, func(a index.Access) bool {
		return a.Verb == index.CAS && a.Off == off && a.Expect == uint64(old)
	})
}

// mustEvict reports whether the client lacks memory that the directory does not have, or a
// slot, and does nothing about it.
func (c *cl) mustEvict() bool {
	waits := false
	if c.within(-1) {
		return false
	}
	if c.vainAt != c.w.effects {
		c.vainAt, c.vain = c.w.effects, 0
	}
	if c.vain > 2*len(c.w.relevant) {
		return false // there is nothing
	}
	for _, r := range c.run {
		if r.evict != nil {
			return false
		}
		switch r.t.Waiting() {
		case index.Alloc:
			pg, _ := r.t.Op.Wanted()
			waits = waits || c.core.Exhausted(pg) && c.inLimbo() == 0
		case index.Grow:
			waits = waits || len(c.rooms) > 0
		}
	}
	return waits
}

// evictForNeed removes one record of some group: of one that is to give up a slot, if there
// is one. It goes round, which is as good as a policy here.
func (c *cl) evictForNeed() {
	c.evicts++
	c.vain++
	c.tell(uint64(c.evicts))
	sh := c.core.View().ShardOf(3 << 12)
	x := repair.Work{PG: sh.PG.ID}
	if len(c.rooms) > 0 {
		x.Off = c.rooms[c.evicts%len(c.rooms)]
		if c.evicts%2 == 1 {
			c.rooms = c.rooms[:0]
		}
	} else {
		groups := c.w.groups()
		g := groups[c.evicts%len(groups)]
		x.Off = sh.Off + uint64(g[0])*layout.SegmentSize + uint64(g[1])*layout.GroupSize
	}
	c.startEvict(Step{Verb: Evict}, c.evicts%len(c.lanes), x, func(l []repair.Candidate) []int {
		if len(l) == 0 {
			return nil
		}
		return []int{c.evicts % len(l)}
	})
}

// groups are those where a key of the scope may be, in order.
func (w *World) groups() (list [][2]int) {
	for g := range w.relevant {
		list = append(list, g)
	}
	slices.SortFunc(list, func(a, b [2]int) int { return cmp.Or(a[0]-b[0], a[1]-b[1]) })
	return list
}

// expiring is a PutEx.
type expiring struct {
	e  *Event
	at uint64
}

// mayExpire reports whether anything expires when the clock moves on. It does not move while
// an operation on a key is under way: one judges by the clock what it read before, and by
// that writes or answers after; expiry is linearizable only as far as clocks agree. Nor does it if an update of what
// expires was left by its client: if its CAS at the head was executed, it is visible when the tail is lost, or somebody
// publishes it.
func (w *World) mayExpire() bool {
	for _, c := range w.cls {
		if c.life == live && slices.ContainsFunc(c.run, func(r *running) bool { return r.e != nil }) {
			return false
		}
	}
	for i := range w.hist {
		e := &w.hist[i]
		base := e.Old
		if e.Verb == Incr {
			base = strings.TrimSuffix(e.Value, "+")
		}
		if e.Out == Unknown && (e.Verb == Incr || e.Verb == CAS) &&
			slices.ContainsFunc(w.expiring, func(x *expiring) bool { return x.e.Key == e.Key && x.e.Value == base }) {
			return false
		}
	}
	return len(w.expiring) > 0 || w.cfg.Pins != 0
}

// passExpiry moves the clock on, which takes away what was put to expire.
func (w *World) passExpiry() {
	w.clocks++
	w.millis += stepMillis
	for _, x := range w.expiring {
		if x.e.Out == NotDone {
			continue
		}
		e := &Event{Client: -1, Verb: expired, Key: x.e.Key, Old: x.e.Value, Out: OK, Call: w.tick(), Return: w.tick()}
		if x.e.Out != OK {
			e.Out, e.Return = Unknown, math.MaxInt64 // it may come yet
		}
		w.record(e)
	}
	w.expiring = nil
	for _, c := range w.cls {
		c.tell(w.millis)
		if c.life == live {
			c.core.Tick()
		}
	}
}
