package fsm

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// worlds are states to begin a fuzz run in: empty; two copies on three memory nodes with
// sessions that hold memory and status words; the same with a move, a recall and a scrub under way; the
// same with a member lost and a session being fenced; and the second with a session fenced whose status
// words are being settled; and a store with a tier.
func worlds(t tester) (all [][]Row) {
	add := func(h *harness) { all = append(all, h.s.Rows()) }
	add(newHarness(t))
	h := cluster(t, 3, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, Shards: 4})
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "b", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1,
		LimitBytes: 1 << 24}))
	h.activate()
	for range 3 {
		h.do(openIn(1, 1))
	}
	h.do(openIn(2, 1))
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", Owner: "client/owner",
		Quota: &dirpb.Quota{Sessions: 5, IndexBytes: 1 << 30}}))
	h.do(access("group:team", dirpb.Right_RIGHT_WRITE))
	h.do(openBy(false, "client/x", "team"))
	h.do(byAnn(&fsmpb.Command{}, "a note"))
	for pg := range uint32(3) {
		h.do(grant(1, pg+1, 5000, 300, 1))
		h.do(grant(2, pg+1, 300, 1, 1))
		for session := range uint32(3) {
			h.do(grantStatus(session+1, pg+1, 0))
		}
	}
	add(h)
	h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: 1, Split: true}))
	h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 2, InPlace: true,
		Extents: []uint32{h.s.heaps[2].Homes[0].Unit / extentUnits}}))
	h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 3, Repair: true}))
	for job := range uint32(3) {
		h.do(claim(1, job+1))
	}
	add(h)
	h.do(expire(2))
	h.do(nodeDown(2, 100))
	add(h)
	s, err := Load(all[1])
	if err != nil {
		t.Fatal(err)
	}
	h = &harness{t: t, s: s, disk: map[string][]byte{}}
	h.do(expire(2))
	for node := range uint32(3) {
		h.do(confirm(node+1, 100, 2))
	}
	for pg := range uint32(2) { // and not the first, so that blocks stay dead
		job := h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: pg + 2})).Job
		h.do(claim(1, job.Id))
		h.do(endJob(&fsmpb.EndJob{SessionId: 1, JobId: job.Id}))
	}
	h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: 1}))
	add(h)
	add(tiered(t))
	return all
}

// encode writes commands as a fuzz run takes them: each behind its length.
func encode(t tester, cmds ...*fsmpb.Command) (b []byte) {
	for _, c := range cmds {
		m, err := proto.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		b = append(binary.AppendUvarint(b, uint64(len(m))), m...)
	}
	return b
}

// FuzzApply applies commands of any content. None may make the machine panic, break the
// state's structure, change it when refused, or do two things in two copies of it.
func FuzzApply(f *testing.F) {
	all := worlds(f)
	report := &dirpb.JobReport{LinkedUnits: []uint32{1, 2}, Findings: []string{"x"}, Kept: []*dirpb.UnitRuns{
		{Extent: 0, SkipTake: []uint32{1, 2, 3, 4}}}}
	for i := range byte(len(all)) {
		f.Add(i, encode(f, register("m1", 101), register("m9", 1), nodeDown(1, 100), publish(1, 100, 1, 9)))
		f.Add(i, encode(
			f, create(&dirpb.CreateNamespaceRequest{Name: "c", Replicas: 2, BytesPerNode: 1 << 26, Shards: 8,
				IndexPercent: 20, Segments: 3}),
			&fsmpb.Command{Op: &fsmpb.Command_SetNamespace{
				SetNamespace: &dirpb.SetNamespaceRequest{Name: "a", LimitBytes: 1 << 20}}},
			// The limit it has already: fuzzing found that this made a new map.
			&fsmpb.Command{Op: &fsmpb.Command_SetNamespace{
				SetNamespace: &dirpb.SetNamespaceRequest{Name: "a", LimitBytes: 1 << 20}}}, createPG(1, 1, 3)))
		f.Add(i, encode(f, access("client/x", dirpb.Right_RIGHT_READ), access("group:team", 0),
			openBy(true, "client/x", "team"), access("client/x", 0),
			set(&dirpb.SetNamespaceRequest{Name: "a", Owner: "group:team", Quota: &dirpb.Quota{Sessions: 1}}),
			set(&dirpb.SetNamespaceRequest{Name: "b", Owner: "client/x"}),
			accessBy(Caller{Identity: "client/x"}, "client/y", dirpb.Right_RIGHT_ADMIN)))
		f.Add(i, encode(f, openIn(1, 2), expire(1, 3), confirm(1, 100, 1, 2, 3), confirm(3, 100, 1, 2, 3)))
		f.Add(i, encode(
			f, closeS(1, 5, &dirpb.ReturnedRun{PgId: 1, Unit: 1 << 14, Units: 100, Generation: 1, Fresh: true}),
			grant(3, 1, 1<<20, 1<<14, 1<<12)))
		f.Add(i, encode(f, takeBack(7, &fsmpb.Back{PgId: 1, Generation: 1, Unit: 1 << 14, Units: 5, SessionId: 1},
			&fsmpb.Back{PgId: 2, Generation: 1, Unit: 9, Units: 1})))
		f.Add(i, encode(f, endJob(&fsmpb.EndJob{SessionId: 1, JobId: 1, Report: report, Epoch: 9, MinEpoch: 8}),
			endJob(&fsmpb.EndJob{SessionId: 1, JobId: 2, Report: report, Epoch: 9}),
			endJob(&fsmpb.EndJob{SessionId: 1, JobId: 3, Report: report}), finish(0, 1<<11)))
		f.Add(i, encode(f, grantStatus(1, 1, 0), grantStatus(1, 1, 1), grantStatus(3, 2, 9), grantStatus(4, 4, 0),
			takeStatus(1, 1, &dirpb.StatusBlock{PgId: 1, Generation: 1, Offset: 1 << 16}),
			expire(3), confirm(1, 100, 3), confirm(2, 100, 3), confirm(3, 100, 3),
			startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: 2}), claim(1, 4),
			endJob(&fsmpb.EndJob{SessionId: 1, JobId: 4})))
		f.Add(i, encode(f, drain(3, false), remove(3, true), activate(1, 2),
			startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: 2, TargetPgId: 3})))
		f.Add(i, encode(
			f, &fsmpb.Command{Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 1, Epoch: 1, NodeId: 3}}},
			&fsmpb.Command{Op: &fsmpb.Command_StartLeave{StartLeave: &fsmpb.StartLeave{PgId: 2, Epoch: 1, NodeId: 2}}}))
		f.Add(i, encode(
			f, &fsmpb.Command{
				Op: &fsmpb.Command_Init{
					Init: &fsmpb.Init{ClusterId: "c", ClusterKey: []byte("k"), Level: &fsmpb.Level{Level: Level}}}},
			&fsmpb.Command{Op: &fsmpb.Command_PutDirectory{
				PutDirectory: &fsmpb.PutDirectory{Directory: &fsmpb.Directory{Id: "d", RaftAddr: "h:1"}}}},
			byAnn(&fsmpb.Command{}, "a note"), byAnn(drain(3, false), "drain"),
			&fsmpb.Command{Op: &fsmpb.Command_DropDirectory{DropDirectory: &fsmpb.DropDirectory{Id: "d"}}},
			&fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: 600}}},
			rotate(2, 'a'), rotate(3, 'b')))
		f.Add(i, encode(f, keep(volume("t1", 2, 1)), keep(volume("t3", 1)), silence(1, 1), silence(2, 1),
			set(tierSet("cold", &dirpb.Tier{Nodes: []string{"t2", "t1"}})),
			create(&dirpb.CreateNamespaceRequest{Name: "d", Tier: &dirpb.Tier{Nodes: []string{"t1"}, Copies: 9}}),
			giveUp(1), giveUp(2), keep(volume("t1", 1)), deleteNamespace("cold")))
	}
	f.Fuzz(func(t *testing.T, world byte, data []byte) {
		rows := all[int(world)%len(all)]
		s, err := Load(rows)
		if err != nil {
			t.Fatal(err)
		}
		twin, err := Load(rows)
		if err != nil {
			t.Fatal(err)
		}
		h := &harness{t: t, s: s, disk: map[string][]byte{}}
		for range 16 {
			n, k := binary.Uvarint(data)
			if k <= 0 || n > uint64(len(data)-k) {
				break
			}
			c := new(fsmpb.Command)
			if proto.Unmarshal(data[k:][:n], c) != nil {
				break
			}
			data = data[k+int(n):]
			r := h.try(proto.CloneOf(c))
			if again := Apply(twin, c); (again.Err == nil) != (r.Err == nil) || !sameRows(again.Changes, r.Changes) {
				t.Fatalf("%v: two copies part: %v, %v", c, r.Err, again.Err)
			}
		}
		if !sameRows(s.Rows(), twin.Rows()) {
			t.Fatal("two copies differ")
		}
		readAll(s)
		if again, err := Load(s.Rows()); err != nil || !sameRows(again.Rows(), s.Rows()) {
			t.Fatalf("the state does not survive its snapshot: %v", err)
		}
	})
}

func sameRows(a, b []Row) bool {
	return slices.EqualFunc(a, b, func(x, y Row) bool {
		return bytes.Equal(x.Key, y.Key) && bytes.Equal(x.Value, y.Value)
	})
}

func readAll(s *State) {
	s.Usage()
	s.Map(nil)
	for _, x := range s.Sessions() {
		s.Map(x)
	}
	s.Admitted()
	s.Keys()
	s.Audit(0, 0)
	for _, v := range s.Volumes() {
		s.TierWork(v.Id)
	}
	for _, n := range s.Nodes() {
		s.WantRegions(n.Id, n.Incarnation)
		s.FenceWork(n.Id, n.Incarnation)
	}
	for _, pg := range s.PGs(0) {
		s.Extents(pg.Id)
		s.Leaks(pg.Id)
		s.CanRecall(pg.Id, 0)
		s.JobsOf(pg.Id)
	}
}

// A snapshot that lacks a row of which others speak is refused, and one that holds a row
// under another id.
func TestLoadChecks(t *testing.T) {
	for i, rows := range worlds(t) {
		if _, err := Load(rows); err != nil {
			t.Fatalf("state %d: %v", i, err)
		}
		for at, r := range rows {
			kind := r.Key[0]
			without := slices.Delete(slices.Clone(rows), at, at+1)
			if _, err := Load(without); err == nil && len(rows) > 2 &&
				(bytes.IndexByte([]byte{rowMeta, rowNamespace, rowPG, rowHeap, rowShard}, kind) >= 0 ||
					kind == rowSession && r.Key[4] < 3 && i < 3) {
				t.Errorf("state %d is taken without row %q", i, r.Key)
			}
			if kind == rowMeta {
				continue
			}
			moved := slices.Clone(rows)
			moved[at] = Row{append([]byte{kind}, 0, 0, 0, 77), r.Value}
			if _, err := Load(moved); err == nil {
				t.Errorf("state %d is taken with row %q under the id 77", i, r.Key)
			}
		}
	}
}

// A snapshot with a shard that has no array is refused, and one with a job that is none, or of nothing.
func TestLoadEmpty(t *testing.T) {
	for want, empty := range map[string]proto.Message{
		"shard: 1: no segments": &dirpb.Shard{Id: 1, NamespaceId: 1, Depth: 2, PgId: 1,
			Offset: layout.RegionPageSize},
		"a row without a job":              &fsmpb.Job{},
		"its placement group 0 is missing": &fsmpb.Job{Job: &dirpb.Job{Id: 1, Kind: dirpb.JobKind_JOB_JOIN}},
	} {
		kind := byte(rowJob)
		if _, ok := empty.(*dirpb.Shard); ok {
			kind = rowShard
		}
		rows := worlds(t)[2]
		i := slices.IndexFunc(rows, func(r Row) bool { return r.Key[0] == kind })
		rows[i] = encodeRow(string(rows[i].Key), empty)
		if _, err := Load(rows); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("loaded: %v, want %q", err, want)
		}
	}
}

// FuzzLoad restores snapshots of any content. A snapshot that is taken as a state must be a state that can
// be read, and that commands can be applied to.
func FuzzLoad(f *testing.F) {
	all := worlds(f)
	for _, rows := range all {
		snap := &fsmpb.Snapshot{Applied: 7}
		for _, r := range rows {
			snap.Rows = append(snap.Rows, &fsmpb.Row{Key: r.Key, Value: r.Value})
		}
		b, err := proto.Marshal(snap)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		// Every row left out once: what others refer to is missing then.
		for i := range snap.Rows {
			less := &fsmpb.Snapshot{Applied: 7, Rows: slices.Delete(slices.Clone(snap.Rows), i, i+1)}
			b, err := proto.Marshal(less)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		snap := new(fsmpb.Snapshot)
		if proto.Unmarshal(data, snap) != nil {
			return
		}
		var rows []Row
		for _, r := range snap.Rows {
			rows = append(rows, Row{r.Key, r.Value})
		}
		s, err := Load(rows)
		if err != nil {
			return
		}
		readAll(s)
		for _, n := range s.Nodes() {
			Apply(s, register(n.Name, n.Incarnation+1))
			Apply(s, drain(n.Id, false))
			Apply(s, nodeDown(n.Id, n.Incarnation+1))
		}
		for _, x := range s.Sessions() {
			for _, pg := range s.PGs(0) {
				Apply(s, grant(x.Id, pg.Id, 1, 1, 1<<20))
				if r := Apply(s, grantStatus(x.Id, pg.Id, 1)); r.Err == nil {
					Apply(s, takeStatus(x.Id, 1<<60, r.Status.Block))
				}
			}
			for _, j := range s.Jobs() {
				Apply(s, claim(x.Id, j.Id))
				Apply(s, endJob(&fsmpb.EndJob{SessionId: x.Id, JobId: j.Id, Report: &dirpb.JobReport{}}))
			}
			Apply(s, closeS(x.Id, 1))
		}
		for _, pg := range s.PGs(0) {
			Apply(s, activate(pg.Id, pg.Epoch))
			Apply(s, startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: pg.Id, Extents: []uint32{0}}))
		}
		for _, pg := range s.PGs(0) {
			Apply(s, startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: pg.Id}))
		}
		for _, sh := range s.Shards(0) {
			Apply(s, startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: sh.Id, Split: true}))
		}
		for _, w := range s.namespaces {
			Apply(s, openIn(w.Id, 1))
			Apply(s, createPG(w.Id, 1))
		}
		for _, n := range s.Nodes() {
			Apply(s, remove(n.Id, true))
		}
		readAll(s)
	})
}
