package fsm

import (
	"fmt"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// departedAt is a cluster in which memory node 2 left placement group 1 at a reclaim epoch, and is back with what it
// held.
func departedAt(t *testing.T, epoch uint64) (h *harness, since uint64) {
	t.Helper()
	h = cluster(t, 3, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, Shards: 1})
	since = h.pg(1).Members[1].Since
	c := nodeDown(2, 100)
	c.GetNodeDown().ReclaimEpoch = epoch
	h.do(c)
	h.do(activate(1, h.pg(1).Epoch))
	h.do(retaining(101, &dirpb.RetainedRegion{PgId: 1, Incarnation: 100, Since: since}))
	return h, since
}

// retaining registers memory node 2 with memory of an earlier incarnation.
func retaining(incarnation uint64, what ...*dirpb.RetainedRegion) *fsmpb.Command {
	return registerWith(&dirpb.RegisterNodeRequest{Name: "m2", Incarnation: incarnation, CapacityBytes: gib,
		Retained: what})
}

func (h *harness) planRetained(epoch uint64) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 1, Epoch: h.pg(1).Epoch, NodeId: 2, Retain: true,
			ReclaimEpoch: epoch}}}
}

func (h *harness) thaw(epoch uint64) {
	c := activate(1, h.pg(1).Epoch)
	c.GetActivatePg().ReclaimEpoch = epoch
	h.do(c)
}

// A memory node may join with what it held for 900 reclaim epochs after it left, and with nothing else than it offers.
func TestRetainedFor(t *testing.T) {
	h, since := departedAt(t, 5)
	h.refuse(h.planRetained(5+RetainEpochs+1), ErrRefused, "retains nothing")
	h.refuse(h.planRetained(4), ErrRefused, "retains nothing")
	if got := h.s.RetainedBy(2, 5+RetainEpochs); !slices.Equal(got, []uint32{1}) ||
		h.s.RetainedBy(2, 5+RetainEpochs+1) != nil || h.s.RetainedBy(1, 5) != nil {
		t.Errorf("memory node 2 retains %d", got)
	}
	h.do(h.planRetained(5 + RetainEpochs))
	for _, w := range h.s.WantRegions(2, 101) {
		sh := h.s.Shard(1)
		want := fmt.Sprint(&dirpb.Retained{Incarnation: 100, Since: since, Epoch: 5, Arrays: []*dirpb.RetainedArray{
			{ShardId: 1, Offset: sh.Offset, Segments: sh.Segments}}})
		if w.PgId == 1 && fmt.Sprint(w.Retain) != want {
			t.Errorf("memory node 2 is to have %v, want %s", w, want)
		}
	}
	h.checkCopies()

	for name, offer := range map[string]*dirpb.RetainedRegion{
		"another time":        {PgId: 1, Incarnation: 100, Since: since + 1},
		"another incarnation": {PgId: 1, Incarnation: 99, Since: since},
		"another group":       {PgId: 2, Incarnation: 100, Since: since},
	} {
		h, _ := departedAt(t, 5)
		h.do(retaining(102, offer))
		if h.s.Retains(1, 2, 5) {
			t.Errorf("%s: it is believed", name)
		}
		h.do(retaining(103, &dirpb.RetainedRegion{PgId: 1, Incarnation: 100, Since: since}))
		if h.s.Retains(1, 2, 5) {
			t.Errorf("%s: what it did not have it has again", name)
		}
	}
}

// A memory node that leaves its placement groups to be replaced is to retain them for the process that follows; one
// that drains is not.
func TestRetainedToBeReplaced(t *testing.T) {
	for _, replaced := range []bool{true, false} {
		h := cluster(t, 3, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, Shards: 1})
		if replaced {
			h.do(registerWith(&dirpb.RegisterNodeRequest{Name: "m2", Incarnation: 100, Boot: 1, Keeps: true,
				CapacityBytes: gib}))
			h.do(&fsmpb.Command{
				Op: &fsmpb.Command_LeaveNode{
					LeaveNode: &dirpb.LeaveNodeRequest{NodeId: 2, Incarnation: 100, PauseMillis: 1000}}})
		}
		if got := h.s.RetainedBy(2, 5); got != nil {
			t.Errorf("memory node 2 is to retain %d, of which it is a member", got)
		}
		h.do(&fsmpb.Command{
			Op: &fsmpb.Command_StartLeave{
				StartLeave: &fsmpb.StartLeave{PgId: 1, Epoch: h.pg(1).Epoch, NodeId: 2, ReclaimEpoch: 5}}})
		h.do(activate(1, h.pg(1).Epoch))
		// 4: the leader may have looked at the clock before.
		for epoch, want := range map[uint64]bool{4: replaced, 5 + RetainEpochs: replaced, 5 + RetainEpochs + 1: false} {
			if got := h.s.RetainedBy(2, epoch); slices.Equal(got, []uint32{1}) != want {
				t.Errorf("replaced %t, epoch %d: memory node 2 is to retain %d", replaced, epoch, got)
			}
		}
		if h.s.Retains(1, 2, 5) {
			t.Error("it may join with what it has not offered")
		}
	}
}

// The placement group is frozen while sessions hear of a joiner that retains something. When it thaws the joiner is one
// like any, or, if it is too late, none. Nobody is shown what it retains.
func TestRejoinFreezes(t *testing.T) {
	for epoch, joins := range map[uint64]bool{5 + layout.WordLifeEpochs - 1: true, 5 + layout.WordLifeEpochs: false,
		4: false} {
		h, _ := departedAt(t, 5)
		x := h.do(openIn(1, 0)).Session
		h.do(h.planRetained(6))
		h.do(publish(2, 101, 1, 77))
		pg := h.pg(1)
		if pg.State != dirpb.PGState_PG_FROZEN || !pg.Joining || len(pg.Members) != 2 ||
			h.s.FrozenVersion(1) != pg.ChangedVersion || len(h.s.JobsOf(1)) != 0 {
			t.Fatalf("joining: %v, jobs %v", pg, h.s.JobsOf(1))
		}
		if m := h.s.Map(x).Pgs[0].Members[1]; m.NodeId != 2 || m.Retained != nil {
			t.Errorf("a session sees %v", m)
		}
		h.thaw(epoch)
		pg = h.pg(1)
		if m := h.s.Map(x).Pgs[0].Members; joins && m[1].Rejoins {
			t.Errorf("a session sees %v", m)
		}
		if pg.State != active || pg.Joining != joins || (len(pg.Members) == 2) != joins ||
			(len(h.s.JobsOf(1)) == 1) != joins || joins && pg.Members[1].Retained != nil {
			t.Errorf("known at %d: %v, jobs %v", epoch, pg, h.s.JobsOf(1))
		}
		h.checkCopies()
	}
}

// The words of a joiner that retained some are looked at twice, also if another member is lost meanwhile and the join
// begins again; those of one that began with zeroes are not, nor is anything left of it in a copy.
func TestRejoinIsAJob(t *testing.T) {
	joins := func(h *harness) *dirpb.Job {
		t.Helper()
		for _, j := range h.s.JobsOf(1) {
			if j.Kind == dirpb.JobKind_JOB_JOIN {
				return j
			}
		}
		t.Fatalf("nobody joins: %v", h.s.JobsOf(1))
		return nil
	}
	for _, lost := range []bool{false, true} {
		h := cluster(t, 3, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 3, Shards: 1})
		since := h.pg(1).Members[1].Since
		c := nodeDown(2, 100)
		c.GetNodeDown().ReclaimEpoch = 5
		h.do(c)
		x := h.do(openIn(1, 0)).Session
		end := func(j *dirpb.Job) {
			t.Helper()
			h.do(&fsmpb.Command{Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{SessionId: x.Id, JobId: j.Id}}})
			h.do(&fsmpb.Command{
				Op: &fsmpb.Command_EndJob{
					EndJob: &fsmpb.EndJob{SessionId: x.Id, JobId: j.Id, Report: &dirpb.JobReport{}}}})
		}
		end(h.s.JobsOf(1)[0]) // the survivors are two
		h.do(activate(1, h.pg(1).Epoch))
		h.do(retaining(101, &dirpb.RetainedRegion{PgId: 1, Incarnation: 100, Since: since}))
		h.do(h.planRetained(6))
		h.do(publish(2, 101, 1, 77))
		h.thaw(7)
		if !joins(h).Rejoin {
			t.Errorf("retained: %v", joins(h))
		}
		if lost {
			h.do(nodeDown(3, 100))
			h.thaw(8)
			if !joins(h).Rejoin {
				t.Errorf("begun again: %v", joins(h))
			}
		}
		end(joins(h))
		if pg := h.pg(1); pg.Joining || pg.Members[len(pg.Members)-1].Rejoins {
			t.Errorf("a copy: %v", pg)
		}
		h.checkCopies()
	}
}

// A shard that has given up its array, or has another one, has zeroes there: what was retained of it is not taken.
func TestRetainedArrayGone(t *testing.T) {
	h, _ := departedAt(t, 5)
	h.do(h.planRetained(6))
	h.s.editPG(1).Planned.Retained.Arrays[0].Offset += layout.SegmentSize
	h.do(publish(2, 101, 1, 77))
	if pg := h.pg(1); pg.State != active || pg.Joining || pg.Planned != nil {
		t.Errorf("%v", pg)
	}
}

// A joiner that is lost was no copy, and a placement group that starts over has nothing in common with what it was.
func TestRetainedOfCopiesOnly(t *testing.T) {
	h, _ := departedAt(t, 5)
	h.do(h.planRetained(6))
	h.do(publish(2, 101, 1, 77))
	h.thaw(7)
	since := h.pg(1).Members[1].Since
	h.do(retaining(102, &dirpb.RetainedRegion{PgId: 1, Incarnation: 101, Since: since}))
	if pg := h.pg(1); pg.Joining || h.s.Retains(1, 2, 7) {
		t.Errorf("a joiner is back: %v", pg)
	}

	h, _ = departedAt(t, 5)
	h.do(nodeDown(1, 100))
	if h.s.Retains(1, 2, 5) {
		t.Error("the placement group has no copy left, and remembers one")
	}
	h.checkCopies()

	h, _ = departedAt(t, 5)
	h.do(nodeDown(2, 101))
	h.do(&fsmpb.Command{Op: &fsmpb.Command_RemoveNode{RemoveNode: &fsmpb.RemoveNode{NodeId: 2}}})
	if d := h.s.Heap(1).Departed; len(d) != 0 {
		t.Errorf("memory node 2 is removed, and %v", d)
	}
}

// TestRetainedArraysSince: an array of a shard that was made after the memory node left is not what it retains there.
func TestRetainedArraysSince(t *testing.T) {
	h, _ := departedAt(t, 5)
	sh := proto.CloneOf(h.s.Shard(1))
	m := h.s.editMeta()
	m.ShardId++
	sh.Id, sh.Offset = m.ShardId, sh.Offset+uint64(sh.Segments)*layout.SegmentSize
	h.s.shards[sh.Id] = sh
	r, err := h.s.retain(h.pg(1), 2, 6)
	if err != nil || len(r.Arrays) != 1 || r.Arrays[0].ShardId != 1 {
		t.Errorf("memory node 2 retains %v, %v", r, err)
	}
}
