package client

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/evict"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
)

// sweep takes back what has expired. It does so in two ways, both the evictor's:
//
// A session remembers its own puts by their expiry, and looks at their groups soon after. That keeps pace
// with whatever the session puts.
//
// Records that nobody remembers (of other sessions, of those that have ended, too many at a time) are found
// by going through the index: slowly at rest, faster while that finds much or while memory is short.
//
// A single batch is under way at a time, and unless memory is short no more than half of the
// time goes into batches: the lanes are there for the session's operations.
type sweep struct {
	wheel  *evict.Wheel
	hashes []uint64 // scratch, sweepBatch
	// forgotten is how many puts there was no room for, when last looked at.
	forgotten uint64
	rest      time.Time

	// The way through the index.
	at       sweepPos
	scan     time.Time // when it goes on
	pace     evict.Pace
	stretch  int  // how many batches at rest are made one, with as long a pause, while the session is calm
	expiring bool // there was something that expires in the last pass, or we put it
	found    bool // in this pass

	freed   time.Time // when something was unlinked last
	starved time.Time // when an operation of a store found no memory last
}

const (
	// Groups of the index looked at, each evictIdle, at rest.
	sweepGroups = 64
	sweepSlow   = 4  // if nothing expires, as far as is known
	sweepDear   = 16 // without access words: each record's header is read
	// sweepStretch bounds sweep.stretch: a calm session looks every eight seconds.
	sweepStretch = 80
	// sweepWork is how many groups one Work looks at.
	sweepWork = 16
	// sweepBatch is how many records that are due are looked for together.
	sweepBatch = 256
	// A place that another session was granted is left to it for so long, unless memory is
	// short.
	sweepForeign = 10 * time.Second
	// sweepSoon bounds how often the sweep looks whether something is due.
	sweepSoon = 10 * time.Millisecond
	// wheelBytes bounds what a session remembers of when its records expire: a million of
	// them.
	wheelBytes = 8 << 20
)

// expiries are the latest puts with an expiry on one lane, on their way from its leaders
// to the evictor. If there is no room they are lost to it, and found by the way through
// the index.
type expiries struct {
	ring atomic.Pointer[[expiriesLen]expiring] // nil until the first one
	put  atomic.Uint32                         // ever; the leader's
	lost atomic.Uint64                         // since there was no room
	_    [64]byte
	got  atomic.Uint32 // ever; the evictor's
}

// expiring is a put: when it expires (Unix ms), and the hash of its key.
type expiring struct{ expiry, hash uint64 }

const (
	expiriesLen   = 4096
	expiriesBytes = 16 * expiriesLen
)

// add reports whether it is time to collect.
func (q *expiries) add(expiry, hash uint64) (full bool) {
	ring := q.ring.Load()
	if ring == nil {
		ring = new([expiriesLen]expiring)
		q.ring.Store(ring)
	}
	n := q.put.Load()
	held := n - q.got.Load()
	if held == expiriesLen {
		q.lost.Add(1)
		return false // it was said
	}
	ring[n%expiriesLen] = expiring{expiry, hash}
	q.put.Store(n + 1)
	return held == expiriesLen/2
}

func (q *expiries) bytes() int {
	if q.ring.Load() == nil {
		return 0
	}
	return expiriesBytes
}

// collect hands over what lanes have put into the ring since the last time. There is one reader, the evictor.
func (q *expiries) collect(into *evict.Wheel) {
	ring := q.ring.Load()
	if ring == nil {
		return
	}
	got := q.got.Load()
	for end := q.put.Load(); got != end; got++ {
		x := &ring[got%expiriesLen]
		into.Add(x.expiry, x.hash)
	}
	q.got.Store(got)
}

// expiring notes that a record was put that expires; see engine.Options.
func (s *sess) expiring(l *engine.Lane, expiryMillis, hash uint64) {
	first := false // since the sweep looked
	if e := &s.c.stats.expires; !e.Load() {
		first = !e.Swap(true)
	}
	if e := s.evictor; e != nil && (s.expiries[l.ID()].add(expiryMillis, hash) || first) {
		e.wake()
	}
}

// sweepSome takes back some of what has expired, and returns when it wants to go on. While the
// session is calm it is as fast as ever at rest, but in larger batches.
func (e *evictor) sweepSome(v *engine.View, calm bool) time.Duration {
	sw := &e.sweep
	for i := range e.s.expiries {
		e.s.expiries[i].collect(sw.wheel)
	}
	begin := time.Now()
	if left := sw.rest.Sub(begin); left > 0 {
		return left
	}
	short := e.short(v)
	more := e.sweepDue(v)
	if soon := begin.Add(evictIdle); (short || !calm) && sw.scan.After(soon) {
		sw.scan = soon
	}
	if now := time.Now(); !now.Before(sw.scan) {
		groups, records, rest := e.sweepNext(v, short)
		end := time.Now()
		pause := time.Duration(sw.pace.Done(groups, records, end.Sub(now).Microseconds(), short)) * time.Microsecond
		if short || !calm || pause < evictIdle {
			sw.stretch = 1
		} else {
			sw.stretch = min(2*sw.stretch, evict.PaceMost/rest, sweepStretch)
		}
		sw.scan = end.Add(pause * time.Duration(sw.stretch))
	}
	now := time.Now()
	if e.starving(v) {
		sw.starved = now
	}
	if now.Sub(sw.starved) < 2*e.s.renew && now.Sub(sw.freed) < time.Second && now.Sub(e.hurried) >= e.s.renew/4 {
		// An operation waits for what is in limbo: every renewal brings its end nearer.
		e.hurried = now
		e.s.agenda.Hurry()
		e.s.wake()
	}
	pause := now.Sub(begin)
	if short {
		pause /= 4
	}
	sw.rest = now.Add(pause)
	e.account()
	if more {
		return pause
	}
	next := sw.scan.Sub(now)
	if at, ok := sw.wheel.Next(); ok {
		next = min(next, time.UnixMilli(int64(at)).Sub(now))
	}
	return max(next, pause, sweepSoon)
}

// account shows what the sweep remembers.
func (e *evictor) account() {
	sw, st := &e.sweep, &e.s.c.stats
	bytes, forgotten := sw.wheel.Bytes(), sw.wheel.Forgotten()
	for i := range e.s.expiries {
		q := &e.s.expiries[i]
		bytes += q.bytes()
		forgotten += q.lost.Load()
	}
	st.sweepBytes.Store(uint64(bytes))
	st.sweepForgotten.Add(forgotten - sw.forgotten)
	sw.forgotten = forgotten
}

// short reports whether memory is wanted of any placement group.
func (e *evictor) short(v *engine.View) bool {
	for id, pg := range v.PGs {
		if c := e.s.core; pg.Active && (c.Exhausted(id) || c.Short(id) || c.Give(id) > 0) {
			return true
		}
	}
	return false
}

// starving reports whether operations found no memory in a store since it was asked last;
// relieve sees to those in a cache.
func (e *evictor) starving(v *engine.View) (yes bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for id := range e.mu.needs {
		if pg := v.PGs[id]; pg == nil || !pg.Cache {
			delete(e.mu.needs, id)
			yes = true
		}
	}
	return yes
}

// dueGroup is a group in which a record of ours is due.
type dueGroup struct {
	pg         uint32
	off, stash uint64
	hash       uint64
}

// sweepDue removes records that this session put and that have expired since. It reports
// whether there are more.
func (e *evictor) sweepDue(v *engine.View) (more bool) {
	if e.sweep.hashes == nil {
		e.sweep.hashes = make([]uint64, 0, sweepBatch)
	}
	now := engine.Millis()
	hashes := e.sweep.wheel.Take(now, e.sweep.hashes)
	if len(hashes) == 0 {
		return false
	}
	list := make([]dueGroup, 0, len(hashes))
	for _, h := range hashes {
		sh := v.ShardOf(h)
		if sh == nil || !sh.PG.Active {
			e.sweep.wheel.Add(now+1000, h)
			continue
		}
		home, stash := layout.GroupOff(h, sh.Segments)
		list = append(list, dueGroup{sh.PG.ID, sh.Off + home, sh.Off + stash, h})
	}
	works := e.visit(list)
	// A key that is not in its home group may be in the stash.
	over := map[uint64]bool{}
	gone := map[uint64]bool{}
	for _, w := range works {
		for _, off := range w.Overflow {
			over[off] = true
		}
	}
	if len(over) > 0 {
		for _, w := range works {
			for _, x := range w.Evicted {
				gone[x.Hash] = true
			}
		}
		list = slices.DeleteFunc(list, func(g dueGroup) bool { return !over[g.off] || gone[g.hash] })
		for i := range list {
			list[i].off = list[i].stash
		}
		e.visit(list)
	}
	return len(hashes) == cap(hashes)
}

// visit looks for records of list in its groups, and removes what has expired.
func (e *evictor) visit(list []dueGroup) []*repair.Work {
	ordered.Sort(list, func(a, b dueGroup) int {
		return cmp.Or(cmp.Compare(a.pg, b.pg), cmp.Compare(a.off, b.off), cmp.Compare(a.hash, b.hash))
	})
	var works []*repair.Work
	var w *repair.Work
	for i, g := range list {
		fp := layout.FP(g.hash)
		switch last := i - 1; {
		case i > 0 && g.pg == list[last].pg && g.off == list[last].off:
			if g.hash != list[last].hash {
				at := &w.Only[len(w.Only)-1]
				*at = append(*at, fp)
			}
			continue
		case w == nil || w.PG != g.pg || len(w.Only) == sweepWork:
			w = &repair.Work{PG: g.pg, Off: g.off}
			works = append(works, w)
		default:
			w.More = append(w.More, g.off)
		}
		w.Only = append(w.Only, []uint16{fp})
	}
	if records, _ := e.work(works); records > 0 {
		e.sweep.freed = time.Now()
	}
	return works
}

// sweepNext looks for what has expired in the next groups of the index, of which rest are
// enough at rest.
func (e *evictor) sweepNext(v *engine.View, short bool) (groups, records, rest int) {
	sw := &e.sweep
	if e.s.c.stats.expires.Swap(false) {
		sw.expiring = true
	}
	late := engine.Millis() - uint64(sweepForeign/time.Millisecond)
	var works []*repair.Work
	rest = sweepSlow
	for {
		if sw.at.shard >= len(v.Shards) {
			sw.at = sweepPos{}
			sw.expiring, sw.found = sw.found, false
			break
		}
		sh := &v.Shards[sw.at.shard]
		all, dear := sh.Segments*(layout.SegmentGroups+1), !sh.PG.Cache
		if !sh.PG.Active || dear && !sw.expiring && !short || sw.at.group >= all {
			sw.at = sweepPos{shard: sw.at.shard + 1}
			continue
		}
		switch {
		case dear:
			rest = sweepDear
		case !sw.expiring:
			rest = sweepSlow
		default:
			rest = sweepGroups
		}
		n := min(sw.pace.Batch(rest*sw.stretch, short)-groups, int(all-sw.at.group))
		if n <= 0 {
			break
		}
		groups += n
		each := min(max(n/(4*len(e.s.expiries)), 1), sweepWork)
		for n > 0 {
			w := &repair.Work{PG: sh.PG.ID, Off: sh.Off + uint64(sw.at.group)*layout.GroupSize}
			if !short {
				w.Mine, w.Late = func(unit uint32) bool { return e.s.core.Owns(&sh.PG.PG, unit) }, late
			}
			sw.at.group, n = sw.at.group+1, n-1
			for ; n > 0 && len(w.More) < each-1; n-- {
				w.More = append(w.More, sh.Off+uint64(sw.at.group)*layout.GroupSize)
				sw.at.group++
			}
			works = append(works, w)
		}
	}
	if len(works) > 0 {
		if records, _ = e.work(works); records > 0 {
			sw.freed = time.Now()
		}
	}
	return groups, records, rest
}
