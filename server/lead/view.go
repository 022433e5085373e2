package lead

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// view is the state and the leader's knowledge at one moment, with what decisions look
// up again and again.
type view struct {
	l      *Leader
	s      *fsm.State
	now    time.Duration
	lapsed map[uint32]bool           // namespaces of sessions whose leases have run out
	pgs    []*dirpb.PlacementGroup   // by id, without those of namespaces that are being deleted
	all    []*dirpb.Job              // by id
	jobs   map[uint32][]*dirpb.Job   // by placement group that they occupy
	held   map[uint32]*dirpb.PGUsage // by placement group, once asked for
	parts  map[uint32][]*dirpb.Shard // by namespace, once asked for
}

// floor is what every session of a namespace has acknowledged and quiesced.
type floor struct{ acked, quiesced uint64 }

func (l *Leader) newView(s *fsm.State, now time.Duration) *view {
	v := &view{l: l, s: s, now: now, lapsed: make(map[uint32]bool), parts: make(map[uint32][]*dirpb.Shard)}
	v.pgs = slices.DeleteFunc(s.PGs(0), func(pg *dirpb.PlacementGroup) bool {
		return s.Namespace(pg.NamespaceId).GetDeleting()
	})
	v.all, v.jobs = s.Jobs(), make(map[uint32][]*dirpb.Job)
	for _, j := range v.all {
		for _, id := range places(j.PgId, j.TargetPgId) {
			v.jobs[id] = append(v.jobs[id], j)
		}
	}
	l.catchUp(s)
	for x := range l.lapsed(now) {
		if s.Life(x.id) == dirpb.SessionLife_SESSION_LIVE {
			v.lapsed[x.namespace] = true
		}
	}
	return v
}

// floor is none of a namespace with a session that is being fenced, is silent for a lease, or has not been answered
// yet.
func (v *view) floor(namespace uint32) floor { return v.floorWithout(namespace, 0) }

// floorOf is floor for what concerns one placement group: sessions of which nothing can land there any more, though
// elsewhere, do not count.
func (v *view) floorOf(pg *dirpb.PlacementGroup) floor {
	return v.floorWithout(pg.NamespaceId, v.s.FencedFrom(pg.Id))
}

func (v *view) floorWithout(namespace, fenced uint32) floor {
	x, all := v.l.votes[namespace], v.s.SessionsIn(namespace)-fenced
	switch {
	case all == 0:
		return floor{math.MaxUint64, math.MaxUint64}
	case x == nil || x.n < all || v.lapsed[namespace]:
		return floor{}
	}
	return floor{x.acked.least(0), x.quiesced.least(0)}
}

// shards are a namespace's, by id.
func (v *view) shards(namespace uint32) []*dirpb.Shard {
	out, ok := v.parts[namespace]
	if !ok {
		out = v.s.Shards(namespace)
		v.parts[namespace] = out
	}
	return out
}

func (v *view) usage(pg uint32) *dirpb.PGUsage {
	if v.held == nil {
		v.held = make(map[uint32]*dirpb.PGUsage)
		for _, u := range v.s.Usage() {
			v.held[u.PgId] = u
		}
	}
	return v.held[pg]
}

// heapRoom is how many units of a heap are not granted.
func (v *view) heapRoom(pg uint32) uint64 {
	u := v.usage(pg)
	return u.GetHeapUnits() - min(u.GetGrantedUnits(), u.GetHeapUnits())
}

// indexRoom is how many bytes of an index no shard has.
func (v *view) indexRoom(pg *dirpb.PlacementGroup) uint64 {
	return pg.IndexBytes - min(v.usage(pg.Id).GetIndexBytesUsed(), pg.IndexBytes)
}

// fits reports whether pg's index has room for another array of so many segments, beside the first status words.
func fits(h *fsmpb.Heap, pg *dirpb.PlacementGroup, segments uint32) bool {
	if fsm.TakesFirst(pg, h, segments) {
		return false
	}
	if slices.ContainsFunc(h.GetIndexFree(), func(a *fsmpb.Array) bool {
		return a.Segments == segments && a.Returned == 0
	}) {
		return true
	}
	bytes := uint64(segments) * layout.SegmentSize
	return h.GetIndexNext() <= pg.IndexBytes && bytes <= pg.IndexBytes-h.GetIndexNext()
}

// growthPart is the part of its share of what an index has left that a shard's new array takes. The
// rest is for splits: shards are what moves between placement groups.
const growthPart = 4

// leastGrowth is the least times as many segments that a shard's new array has. The former array
// serves again for an array of its size alone.
const leastGrowth = 4

// larger is how many segments a shard that is full should get in a new array of its placement
// group, 0 if it should split. A namespace that begins with little grows so in two or three moves, each of
// a small part of what follows it, where splits of one shard at a time would double it.
func (v *view) larger(pg *dirpb.PlacementGroup, sh *dirpb.Shard) uint32 {
	var all float64
	for _, o := range v.shards(pg.NamespaceId) {
		if o.PgId == pg.Id {
			all += weight(o.Depth)
		}
	}
	room := float64(pg.IndexBytes-min(v.s.Heap(pg.Id).GetIndexNext(), pg.IndexBytes)) / layout.SegmentSize
	times := min(uint32(room*weight(sh.Depth)/all/growthPart)/sh.Segments, layout.MaxGrowth)
	if times < leastGrowth {
		return 0
	}
	return times * sh.Segments
}

// busy says why no voluntary change of pg may begin, "" if one may.
func (v *view) busy(pg *dirpb.PlacementGroup) string {
	if why := v.changing(pg); why != "" {
		return why
	}
	for _, j := range v.jobs[pg.Id] {
		// It may be in trouble because memory is short, and what gives memory back is not to wait for it.
		if j.Kind != dirpb.JobKind_JOB_SETTLE || !v.troubled(j) {
			return fmt.Sprintf("has job %d, %s", j.Id, j.Kind)
		}
	}
	if v.floorOf(pg).acked < pg.ChangedVersion {
		return "has sessions that have not acknowledged its last change"
	}
	return ""
}

// changing says why pg does not stay as it is, "" if it does.
func (v *view) changing(pg *dirpb.PlacementGroup) string {
	switch {
	case pg.State != dirpb.PGState_PG_ACTIVE:
		return "is " + pg.State.String()
	case v.s.Namespace(pg.NamespaceId).GetDeleting():
		return "is of a namespace that is being deleted"
	case pg.Joining || pg.Planned != nil || pg.Leaving != nil:
		return "is changing its members"
	}
	return ""
}

// waiting reports whether some session has not reached j's barrier.
func (v *view) waiting(j *dirpb.Job) bool {
	switch pg := v.s.PG(j.PgId); {
	case pg != nil && j.Kind == dirpb.JobKind_JOB_RECOVER:
		return v.floorOf(pg).quiesced < j.Barrier
	case pg != nil && j.Kind == dirpb.JobKind_JOB_JOIN:
		return v.floorOf(pg).acked < j.Barrier
	}
	return v.floor(j.NamespaceId).acked < j.Barrier
}

// startable reports whether somebody who works on nothing else may begin j.
func (v *view) startable(j *dirpb.Job) bool {
	if j.Owner != 0 && v.s.Life(j.Owner) != dirpb.SessionLife_SESSION_FENCED || v.waiting(j) ||
		v.s.Namespace(j.NamespaceId).GetDeleting() {
		return false
	}
	if k := v.l.jobs[j.Id]; k != nil && v.now < k.retry {
		return false
	}
	want := dirpb.PGState_PG_ACTIVE
	if j.Kind == dirpb.JobKind_JOB_RECOVER {
		want = dirpb.PGState_PG_FROZEN
	}
	for _, id := range places(j.PgId, j.TargetPgId) {
		if pg := v.s.PG(id); pg == nil || pg.State != want {
			return false // parked by a freeze, or on its way out
		}
		if urgency(j) == 0 && slices.ContainsFunc(v.jobs[id], urgent) {
			return false // parked until the copies are whole again
		}
	}
	return true
}

// urgency of a job: 2 if data is a loss away from being gone without it, 1 if other jobs may not end without it, else
// 0.
func urgency(j *dirpb.Job) int {
	switch j.Kind {
	case dirpb.JobKind_JOB_RECOVER, dirpb.JobKind_JOB_JOIN:
		return 2
	case dirpb.JobKind_JOB_SETTLE:
		return 1
	}
	return 0
}

func urgent(j *dirpb.Job) bool { return urgency(j) == 2 }

// calm reports whether nobody waits for j: it brings up a copy beyond those that there are to be, so that one can be
// given up.
func (v *view) calm(j *dirpb.Job) bool {
	return j.Kind == dirpb.JobKind_JOB_JOIN && !v.lacks(v.s.PG(j.PgId))
}

// lacks reports whether pg has fewer copies than it is to have; one that joins is none yet.
func (v *view) lacks(pg *dirpb.PlacementGroup) bool {
	n := len(pg.GetMembers())
	if pg.GetJoining() {
		n--
	}
	return n < int(v.s.Namespace(pg.GetNamespaceId()).GetReplicas())
}

// places are the placement groups that a job occupies.
func places(pg, target uint32) []uint32 {
	if target == 0 || target == pg {
		return []uint32{pg}
	}
	return []uint32{pg, target}
}

// draining reports whether pg has a member on a memory node that drains.
func (v *view) draining(pg *dirpb.PlacementGroup) bool {
	return slices.ContainsFunc(pg.Members, v.leaves)
}

func (v *view) leaves(m *dirpb.Member) bool { return v.s.Node(m.NodeId).GetDraining() }
