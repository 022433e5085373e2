package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/inside"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// memory is a namespace of one placement group, without a key, whose replicas are slices, with the
// state that the directory would show of it.
type memory struct {
	ctl.Store // nil: what is not below is not called
	t         *testing.T
	regions   [][]byte
	st        *dirpb.StatusReply
}

const (
	memIndex    = layout.RegionPageSize * 8
	memRegion   = 1 << 20
	memSegments = 2
	memSession  = 77
)

func newMemory(t *testing.T, replicas int) *memory {
	m := &memory{t: t}
	pg := &dirpb.PlacementGroup{Id: 1, NamespaceId: 1, Epoch: 1, State: dirpb.PGState_PG_ACTIVE, RegionBytes: memRegion,
		IndexBytes: memIndex}
	mp := &dirpb.Map{Version: 5, Pgs: []*dirpb.PlacementGroup{pg},
		Namespaces: []*dirpb.Namespace{{Id: 1, Name: "default", Replicas: uint32(replicas)}},
		Shards: []*dirpb.Shard{
			{Id: 1, NamespaceId: 1, PgId: 1, Offset: layout.RegionPageSize, Segments: memSegments}}}
	for i := range replicas {
		pg.Members = append(pg.Members, &dirpb.Member{NodeId: uint32(i + 1), Incarnation: 1})
		mp.Nodes = append(mp.Nodes, &dirpb.Node{Id: uint32(i + 1), Name: fmt.Sprintf("m%d", i+1),
			State: dirpb.NodeState_NODE_UP})
		b := make([]byte, memRegion)
		layout.InitRegion(b, layout.RegionHeader{PG: 1, Namespace: 1, RegionBytes: memRegion, IndexBytes: memIndex})
		m.regions = append(m.regions, b)
	}
	m.st = &dirpb.StatusReply{Map: mp, Usage: []*dirpb.PGUsage{{PgId: 1}},
		Sessions: []*dirpb.SessionInfo{
			{Id: memSession, Namespace: "default", Client: "kvctl", Life: dirpb.SessionLife_SESSION_LIVE}}}
	return m
}

func (m *memory) pg() *dirpb.PlacementGroup { return m.st.Map.Pgs[0] }

func (m *memory) ReadRaw(_ context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error) {
	if pg != 1 || replica >= len(m.regions) || off+uint64(n) > memRegion {
		return nil, client.ErrInvalid
	}
	return slices.Clone(m.regions[replica][off:][:n]), nil
}

func (m *memory) Stats() client.Stats { return client.Stats{Session: memSession} }
func (m *memory) Close() error        { return nil }

// check runs kvctl check on m and the directory f.
func (m *memory) check(f *fakeDirectory, args ...string) (inside.CheckReport, result) {
	m.t.Helper()
	if f == nil {
		f = &fakeDirectory{}
	}
	if f.now == nil {
		f.now = m.st
	}
	e := &env{t: m.t, flags: []string{"--directory", f.serve(m.t)}, now: time.Now}
	e.backend = func(a *ctl.App) (ctl.Backend, error) {
		b, err := ctl.OpenStore(a)
		return inMemory{b, m}, err
	}
	r := e.run("", append([]string{"-o", "json", "check"}, args...)...)
	if r.code != ctl.ExitOK && r.code != ctl.ExitNo {
		return inside.CheckReport{}, r
	}
	return decode[inside.CheckReport](m.t, r.stdout), r
}

// inMemory is a directory with m's sessions.
type inMemory struct {
	ctl.Backend
	m *memory
}

func (b inMemory) Open(context.Context, ctl.SessionOptions) (ctl.Store, error) { return b.m, nil }

// A namespace that is well is status 0, and a finding or a lack of copies status 1.
func TestCheckVerdict(t *testing.T) {
	m := newMemory(t, 3)
	if rep, r := m.check(nil, "--no-repair"); r.code != ctl.ExitOK || !rep.OK || rep.Replicas != 3 {
		t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
	}
	m.regions[1][0] ^= 1
	if rep, r := m.check(nil, "--no-repair"); r.code != ctl.ExitNo || rep.OK || rep.Total != 1 ||
		rep.Findings[0].Replica != 1 {
		t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
	}
	m = newMemory(t, 3)
	m.pg().Members = m.pg().Members[:2]
	const lacks = "placement group 1: 2 of 3 copies"
	rep, r := m.check(nil, "--no-repair", "--for", "1ms")
	if r.code != ctl.ExitNo || !strings.Contains(fmt.Sprint(rep.Problems), lacks) ||
		!strings.Contains(r.stderr, "kvctl check: waiting for "+lacks) {
		t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
	}
}

// janitorOf plays the directory and a janitor: a scrub finds leaks in the first of
// its runs, and recalls of them make a second one necessary.
type janitorOf struct {
	f      *fakeDirectory
	m      *memory
	scrubs int
	leaks  int // extents, in the first scrub
	report *dirpb.JobReport
	silent bool // nobody works
}

func (j *janitorOf) start(q *dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
	j.f.mu.Lock()
	defer j.f.mu.Unlock()
	if q.GetKind() != dirpb.JobKind_JOB_SCRUB || !q.GetRepair() || q.GetPgId() != 1 || q.GetNamespace() != "default" {
		return nil, status.Errorf(codes.InvalidArgument, "%v", q)
	}
	j.scrubs++
	id := uint32(10 * j.scrubs)
	show := func(change func(*dirpb.StatusReply)) {
		last := j.f.now
		if len(j.f.next) > 0 {
			last = j.f.next[len(j.f.next)-1]
		}
		st := proto.Clone(last).(*dirpb.StatusReply)
		change(st)
		j.f.next = append(j.f.next, st)
	}
	job := &dirpb.Job{Id: id, Kind: dirpb.JobKind_JOB_SCRUB, NamespaceId: 1, PgId: 1, Total: 34}
	j.f.now = proto.Clone(j.f.now).(*dirpb.StatusReply)
	j.f.now.Jobs = []*dirpb.Job{job}
	if j.silent {
		return &dirpb.StartJobReply{JobIds: []uint32{id}}, nil
	}
	show(func(st *dirpb.StatusReply) { st.Jobs[0].Owner, st.Jobs[0].Done = 5, 17 })
	leaks := j.leaks
	j.leaks = 0
	show(func(st *dirpb.StatusReply) { // done; its leaks are recalled one by one
		st.Jobs = nil
		u := st.Usage[0]
		u.LastScrubUnixMillis += 1000
		u.LastScrub, u.LeakedExtents = j.report, uint32(leaks)
	})
	for i := range leaks {
		show(func(st *dirpb.StatusReply) {
			st.Jobs = []*dirpb.Job{{Id: id + uint32(i) + 1, Kind: dirpb.JobKind_JOB_RECALL, NamespaceId: 1, PgId: 1,
				Extents: []uint32{uint32(i)}}}
			st.Map.Pgs[0].Recalled = []uint32{uint32(i)}
			st.Usage[0].LeakedExtents--
		})
		show(func(st *dirpb.StatusReply) { st.Jobs = nil }) // a reclaim epoch has to pass
		show(func(st *dirpb.StatusReply) {
			st.Map.Pgs[0].Recalled, st.Usage[0].GrantedUnits = nil, st.Usage[0].GrantedUnits-10
		})
	}
	return &dirpb.StartJobReply{JobIds: []uint32{id}}, nil
}

func TestCheckScrubs(t *testing.T) {
	m := newMemory(t, 2)
	m.st.Usage[0].GrantedUnits += 20 // what two extents leak
	j := &janitorOf{m: m, leaks: 2, f: &fakeDirectory{now: m.st}, report: &dirpb.JobReport{
		SyncedWords: 3, RepairedRecords: 2, BrokenLocks: 1}}
	j.f.startJob = j.start
	// Another job is in the way at first.
	m.st.Jobs = []*dirpb.Job{{Id: 3, Kind: dirpb.JobKind_JOB_MOVE, NamespaceId: 1, PgId: 2, TargetPgId: 1, ShardId: 4}}
	free := proto.Clone(m.st).(*dirpb.StatusReply)
	free.Jobs = nil
	j.f.next = []*dirpb.StatusReply{m.st, m.st, m.st, free}
	rep, r := m.check(j.f)
	if r.code != ctl.ExitOK || rep.Unreachable != 0 {
		t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
	}
	if j.scrubs != 2 || rep.Scrubbed != 1 || rep.Recalls != 2 || rep.SyncedWords != 6 || rep.RepairedRecords != 4 ||
		rep.BrokenLocks != 2 {
		t.Errorf("%d scrubs: %s", j.scrubs, r.stdout)
	}
	if !strings.Contains(r.stderr, "1 extents are being recalled") {
		t.Errorf("said %q", r.stderr)
	}
}

// Memory that is lost after the scrub, by a janitor that went on working, is recalled by the next one before it
// is reported. The report then is of the store as it is.
func TestCheckLostSinceScrub(t *testing.T) {
	m := newMemory(t, 2)
	j := &janitorOf{m: m, f: &fakeDirectory{now: m.st}, report: &dirpb.JobReport{SyncedWords: 3}}
	j.f.startJob = func(q *dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
		if j.scrubs == 1 {
			j.leaks = 1
		}
		rep, err := j.start(q)
		j.f.mu.Lock()
		defer j.f.mu.Unlock()
		if j.scrubs == 1 {
			j.f.next[len(j.f.next)-1].Usage[0].GrantedUnits += 10
		}
		return rep, err
	}
	rep, r := m.check(j.f)
	if r.code != ctl.ExitOK || !rep.OK || rep.Unreachable != 0 || rep.Recalls != 1 || rep.PGs != 1 || j.scrubs < 2 ||
		rep.SyncedWords != 3*uint64(j.scrubs) {
		t.Errorf("%d scrubs, exit %d: %s%s", j.scrubs, r.code, r.stdout, r.stderr)
	}
	if !strings.Contains(r.stderr, "640 B became nobody's since the scrub") {
		t.Errorf("said %q", r.stderr)
	}
}

// A scrub that could not do all says so, and is no success.
func TestCheckScrubTrouble(t *testing.T) {
	for _, c := range []struct {
		name string
		prep func(*memory, *janitorOf)
		want string
	}{
		{"records without a good copy", func(_ *memory, j *janitorOf) { j.report.LostRecords = 2 }, `"lost_records":2`},
		{"no janitor", func(_ *memory, j *janitorOf) { j.silent = true }, "scrub did not end: no janitor takes it"},
		{"always busy", func(m *memory, _ *janitorOf) {
			m.st.Jobs = []*dirpb.Job{{Id: 3, Kind: dirpb.JobKind_JOB_JOIN, NamespaceId: 1, PgId: 1}}
		}, "not scrubbed: join of placement group 1 is in the way"},
		{"refused", func(_ *memory, j *janitorOf) {
			j.f.startJob = func(*dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
				return nil, status.Error(codes.FailedPrecondition, "it rests")
			}
		}, "it rests"},
		{"a recall has no room", func(m *memory, j *janitorOf) {
			m.st.Usage[0].GrantedUnits += 10
			j.leaks = 1
		}, "recall of extent 0 did not end: no room"},
		{"leaks stay", func(m *memory, _ *janitorOf) { m.st.Usage[0].GrantedUnits += 9 }, `"leaked_extents":1`},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMemory(t, 2)
			j := &janitorOf{m: m, f: &fakeDirectory{now: m.st}, report: &dirpb.JobReport{}}
			j.f.startJob = j.start
			c.prep(m, j)
			if strings.Contains(c.want, "extent") {
				// The job that follows the scrub does not end.
				j.f.startJob = func(q *dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
					rep, err := j.start(q)
					j.f.mu.Lock()
					defer j.f.mu.Unlock()
					j.f.next = j.f.next[:min(len(j.f.next), 3)]
					for _, st := range j.f.next {
						st.Usage[0].LeakedExtents = 1
						for _, job := range st.Jobs {
							job.Trouble = "no room"
						}
					}
					return rep, err
				}
			}
			rep, r := m.check(j.f, "--for", "200ms")
			if r.code != ctl.ExitNo || rep.OK || !strings.Contains(r.stdout, c.want) {
				t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
			}
		})
	}
	m := newMemory(t, 2)
	f := &fakeDirectory{startJob: func(*dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
		return nil, status.Error(codes.Unimplemented, "what is a scrub?")
	}}
	if _, r := m.check(f); r.code != ctl.ExitUsage || !strings.Contains(r.stderr,
		"scrub of placement group 1: directory") {
		t.Errorf("%+v", r)
	}
	if _, r := m.check(nil, "--for", "0s"); r.code != ctl.ExitUsage {
		t.Errorf("%+v", r)
	}
}

// A store in use loses a memory node, gets another, is drained and grows, and is as
// good as new each time.
func TestOperateStore(t *testing.T) {
	e := newEnv(t, devstore.Options{Nodes: 3, Replicas: 2, CapacityBytes: 1 << 30, Lease: 2 * time.Second,
		Providers: []string{"shm"}})
	const keys = 300
	for i := range keys {
		e.must("value", "put", fmt.Sprintf("key%d", i))
	}
	check := func(what string, replicas int) {
		t.Helper()
		rep := decode[inside.CheckReport](t, e.must("", "-o", "json", "check", "--for", "60s"))
		if rep.Records != keys || rep.Replicas != replicas || rep.Scrubbed != rep.PGs || rep.Unreachable != 0 ||
			rep.Held != 0 {
			t.Errorf("%s: %+v", what, rep)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	check("new", 6)

	e.must("", "shards", "split", "--all")
	check("split", 6)

	// Two of its three memory nodes have room for what the third held.
	e.must("", "drain", "m1", "--wait")
	if out := e.must("", "nodes"); !strings.Contains(out, "m1    up     yes             0") {
		t.Errorf("drained:\n%s", out)
	}
	check("drained", 6)
	e.must("", "nodes", "add", "m1", "--wait")

	if err := e.store.AddNode(ctx, "m4"); err != nil {
		t.Fatal(err)
	}
	e.must("", "rebalance", "--wait")
	if out := e.must("", "rebalance"); out != "default: nothing to do\n" {
		t.Errorf("rebalance after a rebalance: %q", out)
	}
	st, err := e.store.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	copies := 2 * len(st.GetMap().GetPgs())
	check("balanced", copies)

	if err := e.store.KillNode(1); err != nil {
		t.Fatal(err)
	}
	for n := dirpb.NodeState_NODE_UP; n == dirpb.NodeState_NODE_UP; {
		if st, err = e.store.Status(ctx); err != nil {
			t.Fatal(err)
		}
		for _, node := range st.GetMap().GetNodes() {
			if node.GetName() == "m2" {
				n = node.GetState()
			}
		}
	}
	check("lost a memory node", copies)
	e.must("", "nodes", "remove", "m2")
	if out := e.must("", "nodes"); strings.Contains(out, "m2") {
		t.Errorf("removed:\n%s", out)
	}
	for i := range keys {
		if out := e.must("", "get", fmt.Sprintf("key%d", i)); out != "value" {
			t.Fatalf("key%d: %q", i, out)
		}
	}
}

// A wait ends with its command, and bears a directory that is silent for a while.
func TestAwait(t *testing.T) {
	boom := errors.New("boom")
	f := &fakeDirectory{now: &dirpb.StatusReply{}}
	e := &env{t: t, flags: []string{"--directory", f.serve(t)}}
	var got error
	e.backend = func(a *ctl.App) (ctl.Backend, error) {
		b, err := ctl.OpenStore(a)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		got = a.Await(ctx, b, "test", 0, func(*dirpb.StatusReply) (ctl.Progress, bool, error) {
			cancel(boom)
			return ctl.Progress{}, false, nil
		})
		return b, nil
	}
	e.run("", "status")
	if !errors.Is(got, boom) {
		t.Errorf("await: %v", got)
	}
}
