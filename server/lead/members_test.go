package lead

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// The node that joins is up, heard, not draining, with room, best in a domain of its own, then the least
// used, then the lowest id.
func TestCandidate(t *testing.T) {
	type n struct {
		name, domain  string
		regions, used uint64 // used: placement groups that it has already
	}
	for _, tc := range []struct {
		name  string
		nodes []n
		spoil func(w *world, id func(string) uint32)
		want  string
	}{
		{"lowest id", []n{{"c", "x", 8, 0}, {"d", "x", 8, 0}}, nil, "c"},
		{"domain before use", []n{{"c", "a", 8, 0}, {"d", "x", 2, 1}}, nil, "d"},
		{"any domain before none", []n{{"c", "a", 8, 0}}, nil, "c"},
		{"least used share", []n{{"c", "x", 4, 1}, {"d", "x", 8, 1}}, nil, "d"},
		{"room", []n{{"c", "x", 1, 1}, {"d", "a", 8, 0}}, nil, "d"},
		{"nobody has room", []n{{"c", "x", 1, 1}}, nil, ""},
		{"draining", []n{{"c", "x", 8, 0}, {"d", "a", 8, 0}}, func(w *world, id func(string) uint32) {
			w.drain(id("c"))
		}, "d"},
		{"down", []n{{"c", "x", 8, 0}, {"d", "a", 8, 0}}, func(w *world, id func(string) uint32) {
			w.down(id("c"))
		}, "d"},
		{"silent", []n{{"c", "x", 8, 0}, {"d", "a", 8, 0}}, func(w *world, id func(string) uint32) {
			w.mute[id("c")] = true
			w.pass(lease + 1)
			w.beat()
		}, "d"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			_, b := w.node("a", "a", 8), w.node("b", "b", 8)
			w.create("n", 2, 2)
			ids := map[string]uint32{}
			for _, n := range tc.nodes {
				ids[n.name] = w.node(n.name, n.domain, n.regions)
			}
			// Regions of no concern, to use room up.
			for _, n := range tc.nodes {
				for i := range n.used {
					for _, o := range w.s.Nodes() {
						if o.Name != n.name {
							w.drain(o.Id)
						}
					}
					w.create(fmt.Sprint("fill-", n.name, i), 1, 1)
					for _, o := range w.s.Nodes() {
						w.stay(o.Id)
					}
				}
			}
			w.down(b)
			if tc.spoil != nil {
				tc.spoil(w, func(name string) uint32 { return ids[name] })
			}
			w.step() // what is frozen thaws
			var got []string
			for _, s := range w.plan() {
				if _, ok := s.Do.Op.(*fsmpb.Command_PlanJoin); ok {
					got = append(got, s.Why)
				}
			}
			want := 2 // both placement groups were on a and b
			if tc.want == "" {
				want = 0
			}
			if len(got) != want || want > 0 &&
				!strings.Contains(got[0], fmt.Sprintf("group 1: memory node %q is to join", tc.want)) {
				t.Fatalf("joins %q, want %q", got, tc.want)
			}
		})
	}
}

// A memory node that drains: each of its placement groups gets a replacement first, and lets
// it go when that is a copy. Every change waits for all to have acknowledged the one
// before.
func TestDrain(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns := w.create("n", 2, 4)
	x := w.open(ns)
	w.drain(2)
	w.want(`group 1: memory node "m3" is to join: a member drains`) // the other one waits
	w.want()
	w.publish()
	w.on(1, dirpb.PGState_PG_ACTIVE, 1, 2, 3)
	if j := w.claim(x); j != nil {
		t.Fatalf("claimed %v before its barrier", j)
	}
	w.ack()
	j := w.claim(x)
	if j.GetKind() != dirpb.JobKind_JOB_JOIN || !j.Calm {
		t.Fatalf("claimed %v, want a join for which nobody waits", j)
	}
	w.finish(x, j)
	w.want() // not acknowledged
	w.ack()
	w.want(`group 1: memory node "m2" leaves: it drains`)
	w.on(1, dirpb.PGState_PG_FROZEN, 1, 3)
	w.settleJobs(x)
	w.on(1, dirpb.PGState_PG_ACTIVE, 1, 3)
	w.on(2, dirpb.PGState_PG_ACTIVE, 3, 1)
	w.on(3, dirpb.PGState_PG_ACTIVE, 3, 1)
	if used := w.s.Node(2).UsedBytes; used != 0 {
		t.Fatalf("%d bytes are left on the drained node", used)
	}
	w.want()
}

// An eighth of a namespace's placement groups, and at least one, swap members at a time; one that cannot go on holds no
// other up.
func TestDrainsByParts(t *testing.T) {
	for nodes, atOnce := range map[int]int{3: 1, 15: 1, 16: 2} {
		w := newWorld(t)
		w.nodes(nodes, 8)
		x := w.open(w.create("n", 2, 1))
		w.drain(1) // it is in two placement groups
		if n := w.step(); n != atOnce {
			t.Fatalf("%d memory nodes: %d begin to swap members, want %d", nodes, n, atOnce)
		}
		w.publish()
		w.ack()
		if w.want(); atOnce == 2 {
			continue
		}
		w.l.Progress(w.claim(x).Id, 0, 1, "stuck", w.now)
		w.want("is to join: a member drains")
	}
}

// After a freeze the next placement group rests before it swaps members.
func TestRestsAfterFreeze(t *testing.T) {
	for freeze, rests := range map[time.Duration]time.Duration{0: 0, 5 * time.Millisecond: 1280 * time.Millisecond,
		time.Second / 2: restMost} {
		w := newWorld(t)
		w.nodes(3, 8)
		x := w.open(w.create("n", 2, 1))
		w.drain(2)
		w.want("group 1: memory node \"m3\" is to join")
		w.publish()
		w.ack()
		w.do(x, dirpb.JobKind_JOB_JOIN)
		w.ack()
		w.want("group 1: memory node \"m2\" leaves")
		w.on(1, dirpb.PGState_PG_FROZEN, 1, 3)
		w.want() // no session has quiesced
		w.now += freeze
		w.ack()
		w.do(x, dirpb.JobKind_JOB_RECOVER)
		w.ack()
		w.want("every session has quiesced")
		w.ack()
		thawed := w.now
		for len(w.plan()) == 0 && w.now < thawed+time.Minute {
			w.now += 5 * time.Millisecond
			w.beat()
			w.ack()
		}
		if took := w.now - thawed; took < rests || took > rests+10*time.Millisecond {
			t.Errorf("after a freeze of %v the next one rests %v, want %v", freeze, took, rests)
		}
	}
}

// settleJobs lets everyone acknowledge and every job be done until nothing more is due.
func (w *world) settleJobs(x uint32) {
	w.t.Helper()
	for range 1000 {
		w.publish()
		w.ack()
		j := w.claim(x)
		if j != nil {
			w.finish(x, j)
		}
		if w.step() == 0 && j == nil {
			return
		}
	}
	w.t.Fatalf("no end: %q", w.log[len(w.log)-20:])
}

// A drain that is taken back after the join leaves one member too many: the one on the
// memory node that is fullest goes, of a failure domain that has two if there is one.
func TestSurplus(t *testing.T) {
	for _, tc := range []struct {
		name   string
		domain [3]string
		room   [3]uint64
		gone   uint32
	}{
		{"fullest", [3]string{"a", "b", "c"}, [3]uint64{4, 8, 8}, 1},
		{"last of equals", [3]string{"a", "b", "c"}, [3]uint64{8, 8, 8}, 3},
		{"doubled domain", [3]string{"a", "b", "b"}, [3]uint64{4, 5, 8}, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.node("m1", tc.domain[0], tc.room[0])
			w.node("m2", tc.domain[1], tc.room[1])
			ns := w.create("n", 2, 1)
			// Of the two placement groups only the first is of concern.
			w.drain(1)
			w.drain(2)
			w.stay(1)
			w.node("m3", tc.domain[2], tc.room[2])
			x := w.open(ns)
			w.want(`group 1: memory node "m3" is to join: a member drains`)
			w.stay(2)
			w.publish()
			w.ack()
			w.do(x, dirpb.JobKind_JOB_JOIN)
			w.ack()
			w.want(fmt.Sprintf(`group 1: memory node "m%d" leaves: it has more members than it needs`, tc.gone))
			w.settleJobs(x)
			if pg := w.pg(1); len(pg.Members) != 2 || pg.State != dirpb.PGState_PG_ACTIVE {
				t.Fatalf("%v", pg)
			}
		})
	}
}

// With no room for the regions of a memory node that drains its shards migrate, one
// at a time, and the placement groups that hold nothing any more go away.
func TestEvacuate(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 1)
	ns := w.create("n", 1, 4) // shards 1 and 4 in placement group 1
	x := w.open(ns)
	w.grant(x, 2, 1000) // so 3 has the most room
	w.drain(1)
	w.want("groups [1 3]: JOB_MOVE begins: its memory node drains")
	w.want() // one at a time
	if j := w.claim(x); j.TargetPgId != 3 || j.ShardId != 1 {
		t.Fatalf("claimed %v", j)
	}
	w.finish(x, w.s.Jobs()[0])
	w.settleJobs(x)
	if w.pg(1) != nil || w.s.Node(1).UsedBytes != 0 {
		t.Fatalf("left over: %v on %v", w.pg(1), w.s.Node(1))
	}
	// Nowhere to go: a heap with too little room is no place.
	w.fill(x, 2)
	w.fill(x, 3)
	w.drain(3)
	w.want()
}

// Of a placement group that cannot be replaced whole, the empty shell gives a member up.
func TestEvacuateReplicated(t *testing.T) {
	w := newWorld(t)
	w.nodes(4, 2)
	ns := w.create("n", 2, 4)
	x := w.open(ns)
	w.drain(1) // of placement groups 1 and 4; no memory node has room
	w.settleJobs(x)
	for _, sh := range w.s.Shards(ns) {
		for _, m := range w.pg(sh.PgId).Members {
			if m.NodeId == 1 {
				t.Fatalf("shard %v is still on a node that drains", sh)
			}
		}
	}
	for _, pg := range w.s.PGs(ns) {
		if slices.ContainsFunc(pg.Members, func(m *dirpb.Member) bool { return m.NodeId == 1 }) {
			t.Fatalf("left over: %v", pg)
		}
	}
	// Such a shell, which has the most room, is no place for the shards of another memory node: they would have fewer
	// copies there.
	w.grant(x, 3, 1000)
	w.drain(2)
	w.settleJobs(x)
	for _, sh := range w.s.Shards(ns) {
		if pg := w.pg(sh.PgId); sh.PgId == 2 || len(pg.Members) != 2 {
			t.Fatalf("shard %v is on %v", sh, pg.Members)
		}
	}
}

// A shard that is full, and has no room in its own index, is not split into a placement group with fewer copies.
func TestGrowKeepsCopies(t *testing.T) {
	w := newWorld(t)
	w.nodes(4, 2)
	ns := w.create("n", 2, 4)
	x := w.open(ns)
	w.drain(1)
	w.settleJobs(x)
	w.stay(1)
	for _, sh := range w.s.Shards(ns) {
		own := w.pg(sh.PgId)
		own.IndexBytes = w.s.Heap(own.Id).IndexNext
		if q, _, why := w.l.Grow(w.s, sh, w.now); q != nil && len(w.pg(q.TargetPgId).Members) < len(own.Members) {
			t.Errorf("shard %d goes from %v to %v (%s)", sh.Id, own.Members, w.pg(q.TargetPgId).Members, why)
		}
	}
}
