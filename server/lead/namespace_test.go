package lead

import (
	"slices"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func (w *world) replicas(name string, n uint32) fsm.Result {
	return w.try(&fsmpb.Command{
		Op: &fsmpb.Command_SetNamespace{
			SetNamespace: &dirpb.SetNamespaceRequest{Name: name, Replicas: n, KeepLimit: true}}})
}

func (w *world) remove(name string) fsm.Result {
	return w.try(&fsmpb.Command{
		Op: &fsmpb.Command_DeleteNamespace{
			DeleteNamespace: &dirpb.DeleteNamespaceRequest{Name: name, EndSessions: true}}})
}

// Each of three memory nodes has room for one more region than it has, so every placement
// group finds a second copy only if none takes the place that is another's only one.
func TestMoreReplicas(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 2)
	ns := w.create("n", 1, 4)
	x := w.open(ns)
	if r := w.replicas("n", 2); r.Err != nil {
		t.Fatal(r.Err)
	}
	w.settleJobs(x)
	for _, pg := range w.s.PGs(ns) {
		if len(pg.Members) != 2 || pg.State != dirpb.PGState_PG_ACTIVE || pg.Joining {
			t.Errorf("%v, want two copies", pg)
		}
	}
	// And back: the copies that are given up leave their memory to others.
	if r := w.replicas("n", 1); r.Err != nil {
		t.Fatal(r.Err)
	}
	w.elect() // the next leader goes on
	w.settleJobs(x)
	for _, pg := range w.s.PGs(ns) {
		if len(pg.Members) != 1 || pg.State != dirpb.PGState_PG_ACTIVE {
			t.Errorf("%v, want one copy", pg)
		}
	}
	var used uint64
	for _, n := range w.s.Nodes() {
		used += n.UsedBytes
	}
	if used != 3*region {
		t.Errorf("regions take %d bytes, want three of %d", used, region)
	}
}

// Members are added and given up in any order of commands, leaders and steps, and what was asked
// for last is what there is in the end.
func TestReplicasChanged(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns := w.create("n", 1, 4)
	x := w.open(ns)
	for i, n := range []uint32{2, 1, 3, 2, 3, 1, 2} {
		if r := w.replicas("n", n); r.Err != nil {
			t.Fatal(r.Err)
		}
		for range i {
			w.publish()
			w.ack()
			if j := w.claim(x); j != nil && i%2 == 0 {
				w.finish(x, j)
			}
			w.step()
		}
		if i%3 == 0 {
			w.elect()
		}
	}
	w.settleJobs(x)
	for _, pg := range w.s.PGs(ns) {
		if len(pg.Members) != 2 || pg.State != dirpb.PGState_PG_ACTIVE || pg.Joining || pg.Planned != nil {
			t.Errorf("%v, want two copies", pg)
		}
	}
}

// Nothing is begun in a namespace that is being deleted: it waits for fences, and goes.
func TestDeleteLeavesAlone(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 8)
	ns, other := w.create("n", 2, 4), w.create("o", 1, 4)
	x, y := w.open(ns), w.open(other)
	w.grant(x, 1, 100)
	scrub := w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1})
	if got := w.l.Work(w.s, w.now); !slices.Equal(got, []string{"n"}) {
		t.Fatalf("work in %q", got)
	}
	w.l.Offer(w.s, []*fsmpb.StartJob{{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1}}, w.now)
	w.rebalance(ns)
	w.drain(1) // which asks for other members
	if r := w.remove("n"); r.Err != nil || r.Deleted.Fencing != 1 {
		t.Fatalf("%v, %v", r.Deleted, r.Err)
	}
	if _, err := w.tell(Renewal{Session: x}); err == nil {
		t.Fatal("a session of the namespace goes on")
	}
	if got := w.l.Work(w.s, w.now); len(got) != 0 {
		t.Fatalf("a janitor is to work in %q", got)
	}
	if why := w.l.Busy(w.s, &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 2}, w.now); why == "" {
		t.Fatal("a job may begin")
	}
	for range 2 { // this leader and the next
		for _, s := range w.plan() {
			for _, pg := range w.s.PGs(ns) {
				if q := s.Do.GetPlanJoin(); q.GetPgId() == pg.Id || s.Do.GetStartJob().GetPgId() == pg.Id {
					t.Errorf("due is %v: %s", s.Do, s.Why)
				}
			}
		}
		w.elect()
	}
	w.stay(1)
	w.fence()
	if w.s.Namespace(ns) != nil || w.s.Job(scrub) != nil || w.s.Namespace(other) == nil {
		t.Fatalf("namespaces are %v and %v", w.s.Namespace(ns), w.s.Namespace(other))
	}
	w.settleJobs(y)
	for range 3 {
		w.wait(lease)
		w.step()
	}
	if len(w.l.queue) != 0 || w.l.sessions.n != 1 {
		t.Errorf("the leader keeps queue %v, sessions %v", w.l.queue, w.l.sessions)
	}
	for id := range w.l.memories {
		if w.s.PG(id) == nil {
			t.Errorf("the leader accounts for placement group %d, which is gone", id)
		}
	}
}
