package client

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/alarm"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/evict"
	"github.com/kvd-project/kvd/internal/layout"
)

// evictor keeps memory at hand if the directory has none left to grant: in a cache
// it evicts, by samples, ahead of need; everywhere it takes back what has expired. The places that it
// unlinks go to the session's limbo, as after any delete. It works on the
// session's lanes, between and beside its operations, in one goroutine.
type evictor struct {
	s      *sess
	ctx    context.Context // the session's, and over before it when the session closes
	stop   context.CancelFunc
	policy *evict.Policy // the Client's
	pins   evict.Pins    // written by choosers, under the mutex that they share
	kick   chan struct{} // capacity 1

	mu struct {
		sync.Mutex
		rooms map[room]bool              // groups without a slot
		needs map[uint32]map[uint32]bool // by placement group: sizes of places that could not be had, units
	}
	pgs map[uint32]*pressure

	seen     atomic.Int64 // candidates, of the works under way
	passed   atomic.Int64 // of them, those picked whose headers say that they are pinned
	perGroup float64      // of them in a group, on average

	taken   uint64 // units, by the session, when last looked at
	sent    uint64 // renewals, when last looked at
	sentAt  time.Time
	renewal time.Duration // between two, lately
	hurried time.Time     // when another was asked for

	sweep sweep // for what has expired
}

// room is two groups of which one is to give up a slot.
type room struct {
	pg          uint32
	home, stash uint64
}

// pressure is what the evictor knows of one placement group.
type pressure struct {
	generation uint32
	taken      uint64 // Flow.Taken when last looked at
	looked     time.Time
	rate       float64 // units taken a second
	perVictim  float64 // units
	held       uint64  // units granted to the session
	short      bool    // the directory had no more to grant, the last time
	settled    time.Time
	wants      map[uint32]*wanted // sizes of places that could not be had, units
	clearing   *clearing          // nil: nothing is being cleared
	// slack is the share of held that is kept free so that some of it is in one piece. It
	// grows while places are wanted that memory in pieces does not give, and fades.
	slack  float64
	raised time.Time // slack
	given  []given   // lately
	// stocked is what was evicted for the session's stock, units, less twice what its operations took since.
	stocked int64
	recall  recalling
	// insists: the last clearing left pinned records where they are, so the next one does not.
	insists bool
}

// given is own memory that was evicted for others.
type given struct {
	at    time.Time
	units uint64
}

// recalling is what the evictor makes of a recall, which takes away what was at hand and gives it back when it is over.
type recalling struct {
	count  uint64    // engine.Core.Recalls when last looked at
	missed bool      // an operation has missed memory since the evictor saw the last one begin
	seen   time.Time // when one was under way last
}

// spares reports whether nothing is to be evicted for the stock: a recall is under way, or what it frees cannot be
// granted yet, and nobody has missed memory since it began. Recalls may come and go between two looks; missing says
// whether an operation has missed memory since the last look. At the first one after a recall has begun it may have
// done so before.
func (r *recalling) spares(now time.Time, recalls uint64, under, missing bool) bool {
	if recalls != r.count {
		r.count, r.missed, missing = recalls, false, false
		r.seen = now
	}
	if under {
		r.seen = now
	}
	r.missed = r.missed || missing
	return !r.missed && now.Sub(r.seen) < evictAfter
}

// took notes what operations took.
func (p *pressure) took(units uint64) { p.stocked -= min(p.stocked, stockedPerTaken*int64(units)) }

// stockable is how much more may be evicted for the session's stock, whose target is given. Renewals hand back what
// operations have not used, and a session that evicts that anew is never done; missing: some operation has found no
// memory.
func (p *pressure) stockable(target int64, missing bool) int64 {
	if missing {
		p.stocked = 0
	}
	return max(target-p.stocked, 0)
}

// owed is how much of what others ask for is not on its way yet: that which was evicted for
// them since a time is.
func (p *pressure) owed(give uint64, since time.Time) int64 {
	p.given = slices.DeleteFunc(p.given, func(g given) bool { return g.at.Before(since) })
	owed := int64(give)
	for _, g := range p.given {
		owed -= int64(g.units)
	}
	return max(owed, 0)
}

// wanted is a place that operations wait for.
type wanted struct {
	since, asked time.Time // first and last
	hunted       time.Time // when records of its size were evicted last
}

// clearing is a stretch of own memory out of which everything goes, and how far the search
// for what lies there has come.
type clearing struct {
	from, units uint32
	at          sweepPos
	spares      bool        // pinned records stay
	spared      atomic.Bool // some have
}

// sweepPos is a group in a shard's array.
type sweepPos struct {
	shard int
	group uint32
}

const (
	evictBusy = 4 * time.Millisecond   // between two looks while memory is short
	evictIdle = 100 * time.Millisecond // otherwise, unless the session is calm
	// A sample is so many groups, and loses as many records: looking at several at once
	// keeps what is worth keeping, as internal/evict measured.
	evictSample = 4
	// evictSeen is how many candidates a sample should have.
	evictSeen = 60
	// evictWorks samples are worked on together, at most.
	evictWorks = 16
	// evictSpell bounds the time for which one placement group is seen to and others are not.
	evictSpell = 50 * time.Millisecond
	// evictVain is how many rounds in a spell may find nothing but what is pinned.
	evictVain = 16
	// ghostEntries is how many evicted keys a Client remembers, 8 bytes each.
	ghostEntries = 128 << 10
	// Up to slackMost of the memory held is kept at hand if that is in pieces too small.
	slackMost  = 1.0 / 4
	slackFades = 30 * time.Second
	// foreignShare of the memory held, one in so many, may be free places of one length that
	// others were granted, before no more of these are evicted.
	foreignShare = 2048
	// stockedPerTaken: some of what is evicted for the stock has lengths that operations do not want.
	stockedPerTaken = 2
	// evictAfter is longer than until what a recall frees can be granted.
	evictAfter = 5 * time.Second
)

// frequency is engine.Frequency over the Client's policy.
type frequency struct{ c *Client }

func (f frequency) Born(hash uint64) uint32 { return f.c.policy.Born(engine.Millis(), hash) }

func (f frequency) Touched(nowMillis uint64, old layout.AccessWord, hits uint32) uint32 {
	return f.c.policy.Touched(nowMillis, old, hits)
}

// newEvictor makes the evictor of a session. The policy, with what it has learnt, is the Client's and outlives
// sessions.
func newEvictor(s *sess) *evictor {
	e := &evictor{s: s, policy: s.c.policy, kick: make(chan struct{}, 1), pgs: map[uint32]*pressure{}, perGroup: 15}
	e.sweep.wheel, e.sweep.stretch = evict.NewWheel(engine.Millis(), wheelBytes), 1
	e.ctx, e.stop = context.WithCancel(s.ctx)
	e.mu.rooms, e.mu.needs = map[room]bool{}, map[uint32]map[uint32]bool{}
	return e
}

// wake has run look again. It never waits: one look sees all that has come until then.
func (e *evictor) wake() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// WantRoom implements engine.Control.
func (s *sess) WantRoom(pg uint32, home, stash uint64) {
	s.stir()
	e := s.evictor
	if e == nil {
		return
	}
	e.mu.Lock()
	e.mu.rooms[room{pg, home, stash}] = true
	e.mu.Unlock()
	e.wake()
}

// starves says that no place of so many units could be had. Nobody misses one of none: it was asked for ahead.
func (e *evictor) starves(pg, units uint32) {
	if units == 0 {
		return
	}
	e.mu.Lock()
	if e.mu.needs[pg] == nil {
		e.mu.needs[pg] = map[uint32]bool{}
	}
	e.mu.needs[pg][units] = true
	e.mu.Unlock()
	e.wake()
}

// run evicts when room is short, and sleeps otherwise. It is one goroutine for each session of a cache.
func (e *evictor) run() {
	defer e.s.wg.Done()
	t := alarm.NewTimer(evictIdle)
	defer t.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-e.kick:
		case <-t.C:
		}
		v := e.s.core.View()
		if v == nil {
			t.Reset(evictIdle)
			continue
		}
		busy := e.makeRoom()
		for _, pg := range v.PGs {
			if pg.Active && pg.Cache {
				busy = e.relieve(v, pg) || busy
			}
		}
		calm := e.calm() && !busy
		pause := e.sweepSome(v, calm)
		switch {
		case busy:
			e.s.core.Tick()
			pause = min(pause, evictBusy)
		case !calm:
			pause = min(pause, evictIdle)
		}
		t.Reset(pause)
	}
}

// calm reports whether the session has taken no memory since it was asked last.
func (e *evictor) calm() bool {
	taken := uint64(0)
	for _, m := range e.s.core.Heaps() {
		if f := e.s.core.Flow(m.PG, m.Generation); f != nil {
			taken += f.Taken()
		}
	}
	calm := taken == e.taken
	e.taken = taken
	return calm
}

// work evicts, and keeps accounts.
func (e *evictor) work(works []*repair.Work) (records int, units uint64) {
	errs := e.s.c.work(e.ctx, e.s, index.Evict, works)
	now := engine.Millis()
	for i, w := range works {
		if errs[i] != nil && e.ctx.Err() == nil {
			e.s.c.o.Logger.Debug("not evicted", "pg", w.PG, "group", w.Off, "err", errs[i])
		}
		for _, f := range w.Findings {
			e.s.c.o.Logger.Warn("while evicting", "finding", f)
		}
		e.sweep.found = e.sweep.found || w.Expiring > 0
		for _, x := range w.Evicted {
			records++
			units += uint64(x.Units)
			if x.Expired {
				e.s.c.stats.expired.Add(1)
				continue
			}
			e.s.c.stats.evicted.Add(1)
			if c := candidateOf(x.Candidate); e.s.pinned.Load() != 0 && (x.Pinned > now || c.Pinned(now)) {
				e.s.c.stats.pinsBroken.Add(1)
			}
			e.policy.Evicted(now, x.Hash, candidateOf(x.Candidate))
		}
	}
	e.s.c.stats.evictedUnits.Add(units)
	return records, units
}

func wordsOf(list []repair.Candidate) []layout.Word {
	words := make([]layout.Word, len(list))
	for i, c := range list {
		words[i] = c.Word
	}
	return words
}

// candidateOf is c as the policy sees it: a record without an access word is not known to be of any use.
func candidateOf(c repair.Candidate) evict.Candidate {
	return evict.Candidate{Word: c.Access, Known: c.Access != 0, Units: c.Units}
}

// picking is what a Work does with a policy and pins.
type picking struct {
	e    *evictor
	mu   *sync.Mutex // policies choose for one goroutine at a time, lanes ask from several
	n    int         // records that are to go
	must bool        // if all records are pinned, no pin counts

	none  bool // no pin counts
	drawn layout.Word
	alone bool // it is there to be looked at alone
	rest  float64
}

// chooser picks n records of what w asks about. w passes over pinned ones.
func (e *evictor) chooser(w *repair.Work, mu *sync.Mutex, n int) func([]repair.Candidate) []int {
	p := &picking{e: e, mu: mu, n: n}
	w.Spare = p.spare
	return p.choose
}

// choose picks records, and one more whose header is looked at.
func (p *picking) choose(list []repair.Candidate) []int {
	e := p.e
	p.mu.Lock()
	defer p.mu.Unlock()
	e.seen.Add(int64(len(list)))
	c := make([]evict.Candidate, len(list))
	for i := range list {
		c[i] = candidateOf(list[i])
	}
	now := engine.Millis()
	if p.none, p.drawn = e.s.pinned.Load() == 0, 0; p.none {
		return e.policy.Choose(now, c, nil, p.n)
	}
	may, passed := e.pins.Evictable(now, e.quota(), c, p.n, make([]int, 0, len(c)))
	e.s.c.stats.pinsPassed.Add(uint64(passed))
	if p.none = e.pins.Over(e.quota()); p.none {
		e.s.c.stats.pinsOver.Add(1)
	}
	if len(may) == 0 && p.must {
		p.none = true
		return e.policy.Choose(now, c, nil, p.n)
	}
	some := make([]evict.Candidate, len(may))
	for i, j := range may {
		some[i] = c[j]
	}
	picked := e.policy.Choose(now, some, nil, p.n)
	for i, j := range picked {
		picked[i] = may[j]
	}
	return p.draw(now, list, c, picked)
}

// draw adds to the picked ones the one that is drawn.
func (p *picking) draw(now uint64, list []repair.Candidate, c []evict.Candidate, picked []int) []int {
	if p.must || len(c) == 0 {
		return picked
	}
	var i int
	if i, p.rest = evict.Draw(now, c, rand.Float64()); i < 0 {
		p.e.pins.Drawn(p.rest, false)
		return picked
	}
	p.drawn = list[i].Word
	if p.alone = !slices.Contains(picked, i); p.alone {
		picked = append(picked, i)
	}
	return picked
}

// spare is told until when a record's header says that it is pinned.
func (p *picking) spare(c repair.Candidate, until uint64) bool {
	pinned := until > engine.Millis()
	if c.Word == p.drawn {
		p.mu.Lock()
		p.e.pins.Drawn(p.rest, pinned)
		p.mu.Unlock()
		if p.alone {
			return true
		}
	}
	if !pinned || p.none {
		return false
	}
	p.e.s.c.stats.pinsPassed.Add(1)
	p.e.passed.Add(1)
	return true
}

// quota is the share of the cache that may be pinned.
func (e *evictor) quota() float64 { return float64(e.s.pinned.Load()) / 100 }

// makeRoom frees a slot in groups that have none.
func (e *evictor) makeRoom() bool {
	var rooms map[room]bool
	e.mu.Lock()
	if len(e.mu.rooms) > 0 {
		rooms, e.mu.rooms = e.mu.rooms, map[room]bool{}
	}
	e.mu.Unlock()
	if len(rooms) == 0 {
		return false
	}
	var mu sync.Mutex
	works := make([]*repair.Work, 0, 2*len(rooms))
	for r := range rooms {
		for _, off := range [...]uint64{r.home, r.stash} {
			p := &picking{e: e, mu: &mu, n: 1, must: true}
			works = append(works, &repair.Work{PG: r.pg, Off: off, Choose: p.choose, Spare: p.spare})
		}
	}
	e.work(works)
	return true
}

// pressureOf is what is known of pg's memory, with what operations miss of it since, and the units of the largest place
// that they do.
func (e *evictor) pressureOf(pg *engine.PG, now time.Time) (p *pressure, need uint32) {
	e.mu.Lock()
	needs := e.mu.needs[pg.ID]
	delete(e.mu.needs, pg.ID)
	e.mu.Unlock()
	if p = e.pgs[pg.ID]; p == nil || p.generation != pg.Generation {
		p = &pressure{generation: pg.Generation, perVictim: 4, settled: now, wants: map[uint32]*wanted{}}
		e.pgs[pg.ID] = p
	}
	for units := range needs {
		need = max(need, units)
		if w := p.wants[units]; w != nil {
			w.asked = now
		} else {
			p.wants[units] = &wanted{since: now, asked: now}
		}
	}
	return p, need
}

// relieve evicts from one placement group until what is at hand will last until more
// comes out of limbo. It reports whether memory is short at all.
func (e *evictor) relieve(v *engine.View, pg *engine.PG) bool {
	supply, held := int64(0), uint64(0)
	now := time.Now()
	p, need := e.pressureOf(pg, now)
	f := e.s.core.Flow(pg.ID, pg.Generation)
	if f != nil {
		if dt := now.Sub(p.looked); dt > 20*time.Millisecond {
			taken := f.Taken()
			p.took(taken - p.taken)
			p.rate += min(1, dt.Seconds()/0.2) * (float64(taken-p.taken)/dt.Seconds() - p.rate)
			p.taken, p.looked = taken, now
			p.slack -= p.slack * min(1, dt.Seconds()/slackFades.Seconds())
		}
		held = e.s.core.HeapOf(&pg.PG).Stats().Granted
	}
	refused, give := e.s.core.Exhausted(pg.ID), e.s.core.Give(pg.ID)
	switch {
	case refused || need > 0:
		p.short = true
	case held > p.held:
		p.short = false // there was more
	}
	p.held = held
	if !p.short && (give == 0 || held == 0) {
		return false
	}
	if f != nil {
		if now.Sub(p.settled) > time.Second {
			e.recountHeld(pg)
			p.settled = now
		}
		supply = f.Supply()
	}
	limbo := e.limbo(now)
	demand := evict.Demand{Held: held, Share: e.s.core.Share(pg.ID), Rate: p.rate, LimboSeconds: limbo.Seconds(),
		Slack: p.slack, Need: need, Starving: need > 0 || len(p.wants) > 0}
	target := demand.Supply()
	lack, under := int64(0), len(pg.Recalled) > 0
	if p.short {
		lack = min(max(target-supply, 0), p.stockable(target, need > 0))
	}
	if lack > 0 && !refused && !under {
		e.s.WantMemory(pg.ID, need) // perhaps there is some by now
	}
	if p.recall.spares(now, e.s.core.Recalls(pg.ID), under, need > 0) {
		target, lack = 0, 0
	}
	// Memory for others comes on top: this session's own, which is free in one piece again.
	// Less what lies about: more than the session will use in the next few seconds.
	owed := p.owed(give, now.Add(-limbo-time.Second))
	owed = max(owed-max(supply-max(target, int64(4*p.rate)), 0), 0)
	lack += owed
	if e.fit(v, pg, p, now, limbo) && now.Sub(e.hurried) >= e.s.renew/10 {
		// An operation waits for what is in limbo: every renewal brings its end nearer.
		e.hurried = now
		e.s.agenda.Hurry()
		e.s.wake()
	}
	h := e.s.core.HeapOf(&pg.PG)
	for vain := 0; lack > 0 && e.ctx.Err() == nil && time.Since(now) < evictSpell; {
		stock := uint64(0) // own memory only
		if lack > owed {
			stock = demand.Foreign(foreignShare)
		}
		victims := int(float64(lack)/p.perVictim) + 1
		groups := e.groups()
		var mu sync.Mutex
		works := make([]*repair.Work, 0, min((victims+evictSample-1)/evictSample, evictWorks))
		for range cap(works) {
			if w := e.sample(v, pg, groups); w != nil {
				w.Choose = e.chooserAmong(pg.ID, e.chooser(w, &mu, min(victims, evictSample)),
					func(list []repair.Candidate) []int {
						return engine.Welcome(h, wordsOf(list), stock)
					})
				works = append(works, w)
			}
		}
		e.seen.Store(0)
		e.passed.Store(0)
		records, units := e.work(works)
		e.perGroup += 0.1 * (float64(e.seen.Load())/float64(max(groups*len(works), 1)) - e.perGroup)
		if records == 0 && e.passed.Load() > 0 && vain < evictVain {
			vain++ // those that are pinned are not picked again
			continue
		}
		if records == 0 {
			break
		}
		p.perVictim += 0.2 * (float64(units)/float64(records) - p.perVictim)
		if lack -= int64(units); stock == 0 {
			owed -= int64(units)
			p.given = append(p.given, given{now, units})
		} else {
			p.stocked += int64(units)
		}
	}
	e.s.core.SetNoteInterval(e.policy.NoteIntervalMillis())
	return true
}

// limbo is about how long what is unlinked now will be in limbo. Renewals are not sent at
// equal intervals: operations that wait make them more frequent.
func (e *evictor) limbo(now time.Time) time.Duration {
	sent, released := e.s.core.Renewals()
	if n := sent - e.sent; n > 0 {
		if e.sentAt.IsZero() {
			e.renewal = e.s.renew
		} else {
			e.renewal += (now.Sub(e.sentAt)/time.Duration(n) - e.renewal) / 4
		}
		e.sent, e.sentAt = sent, now
	}
	return time.Duration(sent-released+1) * min(e.renewal, e.s.renew)
}

// recountHeld counts afresh what the session holds in pg.
func (e *evictor) recountHeld(pg *engine.PG) {
	held := uint64(0)
	for _, l := range e.s.core.Lanes() {
		if !e.s.onLane(l, func(l *engine.Lane) { held += l.Held(pg.ID) }) {
			return
		}
	}
	e.s.core.Settle(pg.ID, pg.Generation, held)
}

// randomGroup is a group of one of pg's arrays, each as likely.
func randomGroup(v *engine.View, pg *engine.PG) (off uint64, ok bool) {
	total := uint64(0)
	for i := range v.Shards {
		if v.Shards[i].PG == pg {
			total += uint64(v.Shards[i].Segments)
		}
	}
	if total == 0 {
		return 0, false
	}
	n := rand.Uint64N(total * (layout.SegmentGroups + 1))
	for i := range v.Shards {
		if sh := &v.Shards[i]; sh.PG == pg {
			in := uint64(sh.Segments) * (layout.SegmentGroups + 1)
			if n < in {
				return sh.Off + n*layout.GroupSize, true
			}
			n -= in
		}
	}
	return 0, false
}

// fit sees to places that could not be had though as much is at hand: it is not in one
// piece, or of other sizes, in which other sessions were granted it. First some records of
// such a size go; if there are none, everything in one stretch of own memory. It reports whether
// anything is waited for.
func (e *evictor) fit(v *engine.View, pg *engine.PG, p *pressure, now time.Time, limbo time.Duration) bool {
	h := e.s.core.HeapOf(&pg.PG)
	found := false
	for units, w := range p.wants {
		if now.Sub(w.asked) > time.Second {
			delete(p.wants, units) // nobody waits any more
			continue
		}
		pl, ok := engine.Fit(h, units)
		if ok {
			h.Unuse(pl) // the lane that looks first finds it
			delete(p.wants, units)
			found = true
			continue
		}
		if now.Sub(p.raised) >= limbo {
			p.slack, p.raised = min(1.5*max(p.slack, evict.SupplyShare), slackMost), now
		}
		if now.Sub(w.since) < limbo || now.Sub(w.hunted) < limbo {
			continue // what has been evicted is on its way
		}
		w.hunted = now
		var mu sync.Mutex
		groups := e.groups()
		works := make([]*repair.Work, 0, evictWorks)
		for range cap(works) {
			if x := e.sample(v, pg, groups); x != nil {
				x.Choose = e.chooserAmong(pg.ID, e.chooser(x, &mu, 1), func(list []repair.Candidate) (at []int) {
					for i, c := range list {
						if c.Units >= units && c.Units <= 2*units {
							at = append(at, i)
						}
					}
					return at
				})
				works = append(works, x)
			}
		}
		if records, _ := e.work(works); records == 0 && p.clearing == nil {
			if from, ok := h.Window(units); ok {
				p.clearing = &clearing{from: from, units: units, spares: e.s.pinned.Load() != 0 && !p.insists &&
					!e.pins.Over(e.quota())}
			}
		}
	}
	if found {
		for _, l := range e.s.core.Lanes() { // those that wait look again
			l.Deliver(func(*engine.Lane) {})
			l.Visit()
		}
	}
	if p.clearing != nil && !e.clear(v, pg, p.clearing) {
		p.insists = p.clearing.spared.Load()
		p.clearing = nil
	}
	return len(p.wants) > 0
}

// chooserAmong chooses among those candidates that some may be, of memory that this session gets.
func (e *evictor) chooserAmong(pg uint32, choose func([]repair.Candidate) []int,
	some func([]repair.Candidate) []int) func([]repair.Candidate) []int {
	return func(list []repair.Candidate) []int {
		list, from := e.staying(pg, list)
		at := some(list)
		fit := make([]repair.Candidate, len(at))
		for i, j := range at {
			fit[i] = list[j]
		}
		picked := choose(fit)
		for i := range picked {
			picked[i] = from[at[picked[i]]]
		}
		return picked
	}
}

// staying is the candidates that do not lie in an extent being recalled, and their places in list. The others' memory
// comes back to nobody before the recall is over, and what it has counted by then not even after it. So a session that
// evicts them, if it is all that the cache has, is never done.
func (e *evictor) staying(pg uint32, list []repair.Candidate) (stay []repair.Candidate, from []int) {
	v := e.s.core.View() // the recall may have begun since the evictor looked
	for i, c := range list {
		if p := v.PG(pg); p != nil && !p.IsRecalled(c.Word.Unit()) {
			stay, from = append(stay, c), append(from, i)
		}
	}
	return stay, from
}

// clear evicts what lies in a stretch of own memory, a thousand groups of the index at a
// time. It reports whether there is more to look at.
func (e *evictor) clear(v *engine.View, pg *engine.PG, c *clearing) (more bool) {
	choose := func(list []repair.Candidate) (picked []int) {
		list, from := e.staying(pg.ID, list)
		for i, x := range list {
			if u := x.Word.Unit(); u >= c.from+c.units || c.from >= u+x.Units {
				continue
			}
			if k := candidateOf(x); c.spares && k.Pinned(engine.Millis()) {
				e.s.c.stats.pinsPassed.Add(1)
				c.spared.Store(true)
				continue
			}
			picked = append(picked, from[i])
		}
		return picked
	}
	spare := func(_ repair.Candidate, until uint64) bool {
		if !c.spares || until <= engine.Millis() {
			return false
		}
		e.s.c.stats.pinsPassed.Add(1)
		c.spared.Store(true)
		return true
	}
	for budget := 1024; budget > 0 && e.ctx.Err() == nil; {
		if c.at.shard >= len(v.Shards) {
			return false
		}
		sh := &v.Shards[c.at.shard]
		all := sh.Segments * (layout.SegmentGroups + 1)
		if sh.PG != pg || c.at.group >= all {
			c.at = sweepPos{shard: c.at.shard + 1}
			continue
		}
		var works []*repair.Work
		for len(works) < evictWorks && c.at.group < all {
			w := &repair.Work{PG: pg.ID, Off: sh.Off + uint64(c.at.group)*layout.GroupSize, Choose: choose,
				Spare: spare}
			for c.at.group++; c.at.group < all && len(w.More) < repair.MaxEvictGroups-1; c.at.group++ {
				w.More = append(w.More, sh.Off+uint64(c.at.group)*layout.GroupSize)
			}
			budget -= 1 + len(w.More)
			works = append(works, w)
		}
		e.work(works)
	}
	return true
}

// groups is how many groups make a sample: more if the index is nearly empty.
func (e *evictor) groups() int {
	return max(evictSample, min(int(evictSeen/max(e.perGroup, 1)), repair.MaxEvictGroups))
}

// sample is a look at so many groups, nil if there are none.
func (e *evictor) sample(v *engine.View, pg *engine.PG, groups int) *repair.Work {
	w := &repair.Work{PG: pg.ID}
	for range groups {
		if off, ok := randomGroup(v, pg); ok && w.Off == 0 {
			w.Off = off
		} else if ok {
			w.More = append(w.More, off)
		}
	}
	if w.Off == 0 {
		return nil
	}
	return w
}

// counts are a Client's of all its sessions.
type counts struct {
	evicted, expired, evictedUnits atomic.Uint64
	pinsPassed, pinsBroken         atomic.Uint64
	pinsOver                       atomic.Uint64
	sweepBytes, sweepForgotten     atomic.Uint64
	expires                        atomic.Bool // something with an expiry was put since the sweep looked
}

// work performs operations of one of a janitor's kinds on a session's lanes.
func (c *Client) work(ctx context.Context, s *sess, kind index.Kind, works []*repair.Work) []error {
	errs := make([]error, len(works))
	store := make([]call, len(works))
	ops := make([]*engine.Op, len(works))
	for i, w := range works {
		q := &store[i]
		m := repair.New(kind, w)
		q.Kind, q.Lane, q.Machine, q.Asker = kind, int32(1+i%s.core.KeyLanes()), m, q
		q.page = func() { *w = m.Work }
		ops[i] = &q.Op
	}
	s.core.Do(ctx, ops)
	for i := range store {
		if store[i].Err != nil {
			errs[i] = c.public(s, &store[i])
		}
	}
	return errs
}
