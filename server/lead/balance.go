package lead

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Balancing evens out how full the placement groups of a namespace are. A key's hash decides
// its group, so the namespace is full as soon as one group is; the memory of the others is
// worth nothing then. The leader therefore moves shards, or halves of shards, from fuller
// groups to emptier ones.
//
// Balancing goes by live memory, not by the number of shards: shards differ in depth, and 16
// shards on 7 groups are uneven however they lie. The directory does not know what one shard
// holds. Hashes are uniform, so a shard counts with its group's live memory times 2^-depth,
// over the sum of 2^-depth of the group's shards.
//
// Large values. The chunks of a value lie in the placement group of its key, and one record
// takes up to 4 MiB. A group therefore counts as full when spareUnits are left, and a move
// leaves as much at its target. In a large heap that changes nothing; a small one is relieved
// earlier, while a large record still finds a place. The estimate above does not know that
// one key holds gigabytes. A move of such a shard surprises, and group.sated keeps it from
// being moved back and forth.
//
// Caches are left alone, except that an operator's rebalance spreads their hashes. The memory
// of a cache is always full, because clients evict when it is. A full group evicts its own
// records, and uniform hashes give every group about the same share; a move would evict at
// its target as much as it brings.

const (
	// spareUnits of a heap, or a 32nd of it if that is less, do not count as room: the
	// longest record finds a place there, in heaps of 128 MiB and more.
	spareUnits          = 4 << 20 / layout.UnitSize
	defaultBalanceUnits = 16 << 20 / layout.UnitSize
	// satedPart: a namespace's live memory has changed if it did by a satedPart-th. Less may
	// be what sessions had not told yet.
	satedPart = 128
	// satedFor bounds how long a group that took memory in gives none away, if nothing
	// else ends it.
	satedFor = 10 * time.Minute
	// leastMove is the least share of a heap that is worth the split of a shard.
	leastMove = 1.0 / 256
	// maxSteps bounds how many moves a rebalance says in advance.
	maxSteps = 4096
)

// reasonUneven of a move says that Plan began it by itself.
const reasonUneven = "its placement group is fuller than others"

// rule says when a move is worth its work.
type rule struct {
	floor float64                     // least share of the heap that a group has in use before it gives
	slack func(share float64) float64 // difference in shares that is left alone
	most  float64                     // a move may be so much larger than what makes the two groups equal
	split bool                        // halves of shards may move
	room  bool                        // what moves needs room in the target's heap
}

var (
	// byItself begins if the fullest group is an eighth full. Hashes are uniform, so what is
	// uneven then stays so, and little has to move: less work, and less memory of the source
	// that is not granted to writers again for a while. It tolerates 6 % of a heap if groups
	// are half full and 2 % in the end, which is more than sessions' reports lag behind. A
	// move halves the difference, at least, if a shard of that size exists.
	byItself = rule{
		floor: 1.0 / 8, slack: func(x float64) float64 {
			return max(1.0/50, min(x, 1-x)/8)
		}, most: 1.5, split: true, room: true,
	}
	// byMemory is an operator's rebalance of a namespace that holds something.
	byMemory = rule{slack: func(float64) float64 { return 3.0 / 100 }, most: 1.5, split: true, room: true}
	// byHashes is an operator's rebalance if memory says nothing: of a cache, and of
	// a store that is nearly empty. Whole shards move as long as that makes a difference smaller.
	byHashes = rule{slack: func(float64) float64 { return 3.0 / 100 }, most: 2}
)

// took is what a placement group was last given by balancing.
type took struct {
	units uint64 // estimate
	total uint64 // live units of the namespace then
	at    time.Duration
}

// group is a placement group as balancing sees it, or one that is to be created. Amounts are
// units.
type group struct {
	id     uint32
	name   string
	pg     *dirpb.PlacementGroup // nil: to be created
	whole  uint64                // heap
	heap   uint64                // less the spare
	load   uint64                // what is evened out: live memory, or hashes in its place
	room   uint64                // heap that can be granted now, less the spare
	copies int                   // members
	shards []*piece
	arrays map[uint32]int // that came back and can be given again, by segments
	index  uint64         // bytes that no shard ever had

	// A sated group took memory in, and the namespace's live memory has hardly changed
	// since. It gives nothing: two groups whose estimates are wrong would exchange the
	// same shard for ever. While memory grows, what moves is bounded by what is written.
	sated bool
}

// piece is a shard of a group.
type piece struct {
	sh    *dirpb.Shard // nil: the other half of one that is to be split
	depth uint32
	size  uint32 // segments
	load  uint64
	live  uint64
}

// shift is one move: of a shard or, with split, of half of it. From a group to itself it only
// makes smaller pieces.
type shift struct {
	from, to *group
	what     *piece
	split    bool
	load     uint64
	live     uint64
}

// balance is a namespace as balancing sees it.
type balance struct {
	groups []*group
	total  uint64 // live
	quota  uint64 // that may be granted before the namespace reaches its limit
	index  uint64 // bytes of more shards before the namespace reaches its quota of index
	rule   rule   // an operator's
}

func (g *group) share() float64 { return float64(g.load) / float64(g.heap) }

// holds reports whether the index has room for n more arrays of so many segments.
func (g *group) holds(segments uint32, n int) bool {
	n -= min(n, g.arrays[segments])
	return uint64(n)*uint64(segments)*layout.SegmentSize <= g.index
}

func (g *group) take(segments uint32) {
	if g.arrays[segments] > 0 {
		g.arrays[segments]--
		return
	}
	g.index -= min(g.index, uint64(segments)*layout.SegmentSize)
}

// spared is a heap of so many units less what does not count as room.
func spared(units uint64) uint64 { return units - min(spareUnits, units/32) }

// balance looks at a namespace's placement groups: not lost, and with no member that drains.
func (v *view) balance(ns uint32) *balance {
	w := v.s.Namespace(ns)
	b := &balance{quota: math.MaxUint64, index: math.MaxUint64, rule: byMemory}
	at := make(map[uint32]*group)
	var granted, heaps uint64
	for _, pg := range v.pgs {
		h := v.s.Heap(pg.Id)
		if pg.NamespaceId != ns || h == nil {
			continue
		}
		u := v.supply(h)
		granted += u.granted
		live := min(v.l.live(v.s, pg.Id), h.End-h.Start)
		b.total += live
		heaps += h.End - h.Start
		if pg.State == dirpb.PGState_PG_LOST || v.draining(pg) {
			continue
		}
		g := &group{
			id: pg.Id, name: fmt.Sprintf("placement group %d", pg.Id), pg: pg, whole: h.End - h.Start,
			heap: max(1, spared(h.End-h.Start)), load: live,
			copies: len(pg.Members), arrays: make(map[uint32]int),
			index: pg.IndexBytes - min(pg.IndexBytes, h.IndexNext),
		}
		g.room = u.room - min(u.room, h.End-h.Start-spared(h.End-h.Start))
		for _, a := range h.IndexFree {
			if a.Returned == 0 {
				g.arrays[a.Segments]++
			}
		}
		if len(pg.StatusArrays) == 0 { // room is kept for the first status words
			g.take(1)
		}
		b.groups = append(b.groups, g)
		at[g.id] = g
	}
	if limit := w.GetLimitBytes() / layout.UnitSize; limit != 0 {
		b.quota = limit - min(limit, granted)
	}
	if limit := w.GetQuota().GetIndexBytes(); limit != 0 {
		b.index = limit - min(limit, v.s.IndexBytes(ns))
	}
	// A shard's part of its group's live memory.
	sum := make(map[uint32]float64)
	for _, sh := range v.shards(ns) {
		sum[sh.PgId] += weight(sh.Depth)
	}
	for _, sh := range v.shards(ns) {
		g := at[sh.PgId]
		x := &piece{sh: sh, depth: sh.Depth, size: sh.Segments}
		if g != nil {
			x.live = uint64(float64(g.load) * weight(sh.Depth) / sum[sh.PgId])
			x.load = x.live
		}
		if to := sh.Move; to != nil && !to.Abandoned && !to.Split {
			g = at[to.PgId] // where it goes
		}
		if g != nil {
			g.shards = append(g.shards, x)
		}
	}
	for _, g := range b.groups {
		if n, ok := v.l.took[g.id]; ok {
			changed := max(b.total, n.total) - min(b.total, n.total)
			g.sated = changed < max(n.units/2, b.total/satedPart) && v.now-n.at < satedFor
		}
	}
	if w.GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE || b.total < heaps/8 {
		b.rule = byHashes
	}
	return b
}

// weight is a shard's part of all hashes.
func weight(depth uint32) float64 { return math.Ldexp(1, -int(depth)) }

// hashed replaces live memory by what the groups would hold if the namespace were full.
func (b *balance) hashed() {
	var heaps uint64
	for _, g := range b.groups {
		heaps += g.heap
		g.sated = false
	}
	for _, g := range b.groups {
		g.load = 0
		for _, x := range g.shards {
			x.load = uint64(float64(heaps) * weight(x.depth))
			g.load += x.load
		}
	}
}

// create adds a group that is to be made like another.
func (b *balance) create(like *dirpb.PlacementGroup, id uint32, name string, copies int) {
	heap := (like.RegionBytes - like.IndexBytes - like.AccessBytes) / layout.UnitSize
	g := &group{
		id: id, name: name, heap: max(1, spared(heap)), room: spared(heap), copies: copies,
		arrays: make(map[uint32]int), index: like.IndexBytes - layout.RegionPageSize,
	}
	g.take(1) // room is kept for the first status words
	b.groups = append(b.groups, g)
}

// ask is the first move of an operator's rebalance, or nil.
func (b *balance) ask() *shift {
	if !b.rule.room {
		b.hashed()
	}
	return b.next(b.rule, nil, nil)
}

// next is the move that the rule asks for first, or nil: from the fullest group that may give
// to the emptiest one that may take. If every piece of the fullest group is too large, its
// smallest shard is split in place. Nil functions mean any group.
func (b *balance) next(r rule, gives, takes func(*group) bool) *shift {
	order := slices.Clone(b.groups)
	slices.SortFunc(order, func(x, y *group) int {
		return cmp.Or(cmp.Compare(y.share(), x.share()), cmp.Compare(x.id, y.id))
	})
	low := slices.Clone(order)
	slices.SortFunc(low, func(x, y *group) int {
		return cmp.Or(cmp.Compare(x.share(), y.share()), cmp.Compare(x.id, y.id))
	})
	for _, from := range order {
		if from.share() < r.floor {
			break
		}
		if from.sated || gives != nil && !gives(from) {
			continue
		}
		coarse := false
		for _, to := range low {
			if from.share()-to.share() <= r.slack(from.share()) {
				break
			}
			if to.copies < from.copies || takes != nil && !takes(to) {
				continue
			}
			m, large := b.pick(r, from, to)
			if m != nil {
				return m
			}
			coarse = coarse || large
		}
		if m := b.finer(from); coarse && r.split && m != nil {
			return m
		}
	}
	return nil
}

// pressed groups are so full that a move out of them may leave less behind at its target.
func (g *group) pressed() bool { return g.share() > 7.0/8 }

// reserve is how many arrays an index must have room for before it takes one out of g. The
// last one is for shards that outgrow theirs.
func (g *group) reserve() int {
	if g.pressed() {
		return 1
	}
	return 2
}

// needs is how many units must be free at the target of a move out of g, for so many that are
// estimated. Writers there go on meanwhile, and the estimate knows of no large values: a move
// that finds no room does not end.
func (g *group) needs(units uint64) uint64 {
	if g.pressed() {
		return units + units/8
	}
	return 2 * units
}

// pick is the best move between two groups. Whole shards go before halves, which cost an array
// of the index for good. No move, but large: smaller pieces would do.
func (b *balance) pick(r rule, from, to *group) (best *shift, large bool) {
	want := (float64(from.load)*float64(to.heap) - float64(to.load)*float64(from.heap)) / float64(from.heap+to.heap)
	least := leastMove * float64(min(from.heap, to.heap))
	need, room := from.reserve(), min(to.room, b.quota)
	if !r.room {
		need = 1
	}
	rank := func(m *shift) (class int, off float64) {
		x := float64(m.load)
		off = math.Abs(x - want)
		switch {
		case off > want/2:
			return 2, off
		case m.split:
			return 1, off
		}
		return 0, off
	}
	for _, x := range from.shards {
		if x.sh.GetMove() != nil {
			continue
		}
		for _, m := range []*shift{
			{from: from, to: to, what: x, load: x.load, live: x.live},
			{from: from, to: to, what: x, load: x.load / 2, live: x.live / 2, split: true},
		} {
			if m.split && (!r.split || x.depth >= fsm.MaxShardDepth || !b.splits(x) || float64(m.load) < least) ||
				!to.holds(x.size, need) {
				continue
			}
			small, fits := float64(m.load) < r.most*want, !r.room || from.needs(m.live) <= room
			if !small || !fits {
				// Memory that sessions hold, or that waits for reclaim epochs, comes back. Pieces for the room of this
				// moment would be many. Only a group that is pressed cannot wait.
				comes := small && !from.pressed() && from.needs(m.live) <= min(to.heap-min(to.heap, to.load), b.quota)
				large = large || !comes && float64(room) >= 2*least // the least that could fit
				continue
			}
			if best == nil {
				best = m
				continue
			}
			class, off := rank(m)
			was, far := rank(best)
			if cmp.Or(cmp.Compare(class, was), cmp.Compare(off, far)) < 0 {
				best = m
			}
		}
	}
	return best, large
}

// splits reports whether the namespace's quota of index has room for another shard as large as x.
func (b *balance) splits(x *piece) bool { return uint64(x.size)*layout.SegmentSize <= b.index }

// finer splits g's smallest shard in place, if halves of its halves are worth a split; nil: it
// cannot be.
func (b *balance) finer(g *group) *shift {
	var least *piece
	for _, x := range g.shards {
		if x.sh.GetMove() != nil || x.depth >= fsm.MaxShardDepth || !b.splits(x) || !g.holds(x.size, g.reserve()) ||
			float64(x.load)/4 < leastMove*float64(g.heap) {
			continue
		}
		if least == nil || x.load < least.load {
			least = x
		}
	}
	if least == nil {
		return nil
	}
	return &shift{from: g, to: g, what: least, split: true}
}

// apply has the model look as it will when m is done.
func (b *balance) apply(m *shift) {
	x := m.what
	m.to.take(x.size)
	if m.split {
		b.index -= min(b.index, uint64(x.size)*layout.SegmentSize)
		x.depth++
		x.load, x.live = x.load/2, x.live/2
		x = &piece{depth: x.depth, size: x.size, load: x.load, live: x.live}
	} else {
		m.from.shards = slices.DeleteFunc(m.from.shards, func(o *piece) bool { return o == x })
	}
	m.to.shards = append(m.to.shards, x)
	m.from.load -= min(m.from.load, m.load)
	m.to.load += m.load
	m.to.room -= min(m.to.room, m.live)
}

func (m *shift) String() string {
	size := float64(m.live*layout.UnitSize) / (1 << 20)
	switch {
	case m.to == m.from:
		return fmt.Sprintf("split a shard of %s in two", m.from.name)
	case m.split:
		return fmt.Sprintf("move half of a shard, about %.0f MiB, from %s to %s", size, m.from.name, m.to.name)
	case size >= 1:
		return fmt.Sprintf("move a shard, about %.0f MiB, from %s to %s", size, m.from.name, m.to.name)
	}
	return fmt.Sprintf("move a shard from %s to %s", m.from.name, m.to.name)
}

func (m *shift) job(reason string) *fsmpb.StartJob {
	return &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: m.what.sh.Id, Split: m.split, TargetPgId: m.to.id,
		Reason: reason}
}

// shift begins m, whose groups are free.
func (p *plan) shift(b *balance, m *shift, reason string) {
	pgs := places(m.from.id, m.to.id)
	if m.to != m.from {
		p.l.took[m.to.id] = took{units: m.live, total: b.total, at: p.now}
	}
	p.start(m.job(reason), pgs...)
}

// settled reports whether a placement group's live memory can be judged: nothing has worked on
// it for so long that every session has told since what it holds.
func (v *view) settled(id uint32) bool {
	told := settleTime
	if m := v.l.memories[id]; m != nil && m.short(v.now) {
		told = settleShort
	}
	return v.now-max(v.l.worked[id], v.l.began) >= min(v.l.opts.Lease, told)
}

// Sessions say about once a second what they hold, and more often if memory is short.
const (
	settleTime, settleShort = 1200 * time.Millisecond, 400 * time.Millisecond
	// easeEvery is the least time between two looks for moves.
	easeEvery = 200 * time.Millisecond
)

// noteWorkedPGs remembers which placement groups something works on.
func (p *plan) noteWorkedPGs() {
	for _, pg := range p.pgs {
		if len(p.jobs[pg.Id]) > 0 || pg.State != dirpb.PGState_PG_ACTIVE {
			p.l.worked[pg.Id] = p.now
		}
	}
}

// ease begins moves from fuller to emptier placement groups of every store, as many as concern
// different ones.
func (p *plan) ease() {
	// Plan may be called for every command; heaps can have many free runs to look at.
	if p.now < p.l.eased+min(p.l.opts.Lease/8, easeEvery) {
		return
	}
	p.l.eased = p.now
	groups := make(map[uint32]int) // by namespace
	for _, pg := range p.pgs {
		groups[pg.NamespaceId]++
	}
	for ns, n := range ordered.All(groups) {
		p.extend(ns)
		if n == 1 || p.s.Namespace(ns).GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE {
			continue
		}
		b := p.balance(ns)
		ready := func(g *group) bool { return p.l.balances(g) && p.free(g.pg) && p.settled(g.id) && p.accounted(g.pg) }
		// A group that is short itself, in pieces perhaps, takes nothing.
		takes := func(g *group) bool { return ready(g) && !p.l.memory(p.s, g.id).short(p.now) }
		for m := b.next(byItself, ready, takes); m != nil; m = b.next(byItself, ready, takes) {
			p.shift(b, m, reasonUneven)
		}
	}
}

// accounted reports whether it is known how much of a placement group's memory is live:
// what is lost is recalled first.
func (p *plan) accounted(pg *dirpb.PlacementGroup) bool {
	m := p.l.memory(p.s, pg.Id)
	return m.known && !p.s.Heap(pg.Id).GetDirty() && len(pg.Recalled) == 0 && m.account.Lost <= m.account.Heap/32
}

// balances reports whether a group is large enough to be balanced without being asked.
func (l *Leader) balances(g *group) bool { return g.pg != nil && g.whole >= l.opts.BalanceUnits }

// relieving reports whether a placement group gets memory back without anybody's doing: a move
// out of it is under way or due, or what moved out waits for reclaim epochs. A writer who finds
// the group full waits meanwhile. A move whose janitor reports trouble is no relief, and none is
// due between groups that such a job occupies.
func (l *Leader) relieving(s *fsm.State, pg uint32) bool {
	v := l.newView(s, l.planned)
	at := s.PG(pg)
	if at == nil || evicts(s, pg) {
		return false
	}
	if w := s.Namespace(at.NamespaceId); w.GetGrows() && w.GetRebalancing() == dirpb.Rebalancing_REBALANCING_ON {
		return true
	}
	for _, j := range v.jobs[pg] {
		if j.PgId != pg || v.troubled(j) {
			continue
		}
		if j.Kind == dirpb.JobKind_JOB_MOVE && j.TargetPgId != pg || j.Kind == dirpb.JobKind_JOB_CLEAN &&
			j.ChildPgId != 0 && j.ChildPgId != pg {
			return true
		}
	}
	if v.supply(s.Heap(pg)).waits >= spareUnits {
		return true
	}
	takes := func(g *group) bool {
		return l.balances(g) && g.pg.State == dirpb.PGState_PG_ACTIVE && !slices.ContainsFunc(v.jobs[g.id], v.troubled)
	}
	room := func(g *group) bool { return takes(g) && !l.memory(s, g.id).short(l.planned) }
	return v.balance(at.NamespaceId).next(byItself, func(g *group) bool { return g.id == pg && takes(g) }, room) != nil
}

// Fullness is how many units of a placement group's heap hold records, by what this leader
// was told, and how many units the heap has.
func (l *Leader) Fullness(s *fsm.State, pg uint32) (live, heap uint64) {
	h := s.Heap(pg)
	heap = h.GetEnd() - h.GetStart()
	return min(l.live(s, pg), heap), heap
}

// supply is what a heap can grant.
type supply struct {
	granted uint64 // units that sessions hold, have linked or have lost
	room    uint64 // units that can be granted now
	waits   uint64 // units that came back and wait for reclaim epochs
}

func (v *view) supply(h *fsmpb.Heap) (u supply) {
	_, least := v.l.Epochs()
	u.granted, u.room = h.GetWatermark()-h.GetStart(), h.GetEnd()-h.GetWatermark()
	for _, r := range h.GetFree() {
		n := uint64(r.Units)
		u.granted -= min(u.granted, n)
		if mature(r, least) {
			u.room += n
		} else {
			u.waits += n
		}
	}
	return u
}

// mature reports whether a free run may be granted if the least reclaim epoch in use is this one.
func mature(r *fsmpb.Run, least uint64) bool {
	return r.Returned == 0 || least > r.Returned-1+fsm.ReuseEpochs
}

// swap replaces a member of a placement group by a memory node that has less to hold.
type swap struct {
	pg      uint32
	in, out *dirpb.Node
}

func (w *swap) String() string {
	return fmt.Sprintf("replace memory node %q of placement group %d by %q", w.out.Name, w.pg, w.in.Name)
}

// regions is which memory nodes hold which regions of a namespace, and how many bytes every
// node holds.
type regions struct {
	used    map[uint32]uint64
	members map[uint32][]*dirpb.Node // by placement group, in the order of the chain
}

func (p *plan) regions(ns uint32) *regions {
	r := &regions{used: make(map[uint32]uint64), members: make(map[uint32][]*dirpb.Node)}
	for _, n := range p.s.Nodes() {
		r.used[n.Id] = n.UsedBytes + p.given[n.Id]
	}
	for _, pg := range p.pgs {
		if pg.NamespaceId != ns || pg.State == dirpb.PGState_PG_LOST || pg.Planned != nil || pg.Leaving != nil ||
			p.draining(pg) ||
			uint32(len(pg.Members)) != p.s.Namespace(ns).GetReplicas() {
			continue
		}
		for _, m := range pg.Members {
			r.members[pg.Id] = append(r.members[pg.Id], p.s.Node(m.NodeId))
		}
	}
	return r
}

// next is the swap that makes regions more even, or nil: the memory node that leaves is still
// at least as full as the one that joins when it is done. It is the member that surplus names,
// and not one that would arbitrate nothing any more: that would get another placement group.
func (r *regions) next(p *plan) (best *swap) {
	heads := make(map[uint32]int) // how many chains a memory node is the head of
	for _, chain := range r.members {
		heads[chain[0].GetId()]++
	}
	for _, pg := range p.pgs {
		chain := r.members[pg.Id]
		if len(chain) == 0 || slices.Contains(chain, nil) {
			continue
		}
		for _, in := range p.s.Nodes() {
			if slices.Contains(chain, in) || !p.usable(in, pg.RegionBytes) ||
				in.CapacityBytes-min(in.CapacityBytes, r.used[in.Id]) < pg.RegionBytes {
				continue
			}
			r.used[in.Id] += pg.RegionBytes
			out := surplus(append(slices.Clone(chain), in), func(n *dirpb.Node) uint64 { return r.used[n.Id] })
			even := out != in && (out != chain[0] || heads[out.Id] > 1) && fullerBy(out, r.used[out.Id]-pg.RegionBytes,
				in, r.used[in.Id]) >= 0
			r.used[in.Id] -= pg.RegionBytes
			if even && (best == nil ||
				cmp.Or(fullerBy(out, r.used[out.Id], best.out, r.used[best.out.Id]),
					fullerBy(best.in, r.used[best.in.Id], in, r.used[in.Id])) > 0) {
				best = &swap{pg: pg.Id, in: in, out: out}
			}
		}
	}
	return best
}

func (r *regions) apply(p *plan, w *swap) {
	bytes := p.s.PG(w.pg).RegionBytes
	r.used[w.in.Id] += bytes
	r.used[w.out.Id] -= bytes
	r.members[w.pg] = append(slices.DeleteFunc(slices.Clone(r.members[w.pg]), func(n *dirpb.Node) bool {
		return n == w.out
	}), w.in)
}
