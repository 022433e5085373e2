package metrics

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	gometrics "github.com/hashicorp/go-metrics"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server"
)

// scrape gives what c serves, in Prometheus's text format.
func scrape(t *testing.T, c prometheus.Collector) string {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&b, f); err != nil {
			t.Fatal(err)
		}
	}
	if problems, err := testutil.CollectAndLint(c); err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v, %v", problems, err)
	}
	return b.String()
}

func wantLines(t *testing.T, got string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains("\n"+got, "\n"+w+"\n") {
			t.Errorf("lacks %s", w)
		}
	}
	if t.Failed() {
		t.Log(got)
	}
}

type fakeStatus struct {
	st  *dirpb.StatusReply
	err error
}

func (f fakeStatus) Status(context.Context, *dirpb.StatusRequest) (*dirpb.StatusReply, error) {
	return f.st, f.err
}

func TestDirectory(t *testing.T) {
	st := &dirpb.StatusReply{
		ClusterId: "c", RaftApplied: 9, Epoch: 70, MinEpoch: 60, AnsweredBy: "d1", Leads: true,
		Directory: []*dirpb.DirectoryNode{{Id: "d1", Leader: true, Voter: true},
			{Id: "d2", Voter: true, SilentMillis: 4000}, {Id: "d3"}},
		Sessions: []*dirpb.SessionInfo{
			{Namespace: "a", Life: dirpb.SessionLife_SESSION_LIVE},
			{Namespace: "a", Life: dirpb.SessionLife_SESSION_FENCING},
			{Namespace: "gone", Life: dirpb.SessionLife_SESSION_LIVE},
		},
		Jobs: []*dirpb.Job{{Kind: dirpb.JobKind_JOB_MOVE}, {Kind: dirpb.JobKind_JOB_MOVE, Trouble: "no room"}},
		Usage: []*dirpb.PGUsage{
			{PgId: 1, HeapUnits: 100, GrantedUnits: 50, ReturnedUnits: 10, LeakedUnits: 1, IndexBytesUsed: 64,
				LastScrub:  &dirpb.JobReport{LostRecords: 2, RepairedRecords: 3},
				StatusHeld: 7, StatusDead: 2,
				WaitingUnits: 4, RecalledUnits: 16, LiveUnits: 30, FreeUnits: 8, ForeignUnits: 5, LimboUnits: 3,
				ComingUnits: 2, LostUnits: 2, Short: true, Estimated: true},
			{PgId: 2, HeapUnits: 100, Estimated: true}, {PgId: 9, HeapUnits: 1, Estimated: true},
		},
		Map: &dirpb.Map{
			Version: 5,
			Nodes: []*dirpb.Node{
				{Name: "m1", State: dirpb.NodeState_NODE_UP, CapacityBytes: 1000, UsedBytes: 500, Draining: true,
					Waiting: true},
				{Name: "m2", State: dirpb.NodeState_NODE_DOWN},
			},
			Namespaces: []*dirpb.Namespace{
				{Id: 1, Name: "a", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 2, LimitBytes: 4096},
				{Id: 2, Name: "b", Mode: dirpb.NamespaceMode_NAMESPACE_STORE, Replicas: 1, LimitBytes: 1 << 40, Lost: 5,
					Losses: []*dirpb.Loss{{PgId: 2, Times: 3, Node: "m2"}}},
			},
			Pgs: []*dirpb.PlacementGroup{
				{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, IndexBytes: 4096 + 640,
					Recalled: []uint32{3, 4}},
				{Id: 2, NamespaceId: 2, State: dirpb.PGState_PG_LOST},
			},
			Shards: []*dirpb.Shard{{NamespaceId: 1, PgId: 1, Move: &dirpb.Move{}}, {NamespaceId: 1, PgId: 1}},
		},
	}
	got := scrape(t, Directory("d1", fakeStatus{st: st}))
	wantLines(t, got,
		`kvd_directory_info{cluster="c",id="d1"} 1`, "kvd_directory_leader 1", "kvd_directory_leader_known 1",
		"kvd_directory_voters 2",
		"kvd_directory_map_version 5", "kvd_directory_applied_index 9", "kvd_directory_reclaim_epoch 70",
		"kvd_directory_reclaim_epoch_min 60",
		`kvd_directory_node_up{node="m1"} 1`, `kvd_directory_node_up{node="m2"} 0`,
		`kvd_directory_node_awaited{node="m1"} 1`, `kvd_directory_node_awaited{node="m2"} 0`,
		`kvd_directory_node_draining{node="m1"} 1`,
		`kvd_directory_node_capacity_bytes{node="m1"} 1000`, `kvd_directory_node_used_bytes{node="m1"} 500`,
		`kvd_directory_sessions{namespace="a",state="live"} 1`,
		`kvd_directory_sessions{namespace="a",state="fencing"} 1`,
		`kvd_directory_sessions{namespace="b",state="live"} 0`,
		`kvd_directory_jobs{kind="move"} 2`, `kvd_directory_jobs{kind="scrub"} 0`, "kvd_directory_jobs_in_trouble 1",
		`kvd_directory_placement_groups{namespace="a",state="active"} 1`, `kvd_directory_placement_groups{namespace="b",state="lost"} 1`,
		`kvd_directory_shards{namespace="a"} 2`, `kvd_directory_shards_moving{namespace="a"} 1`,
		`kvd_directory_extents_recalled{namespace="a"} 2`,
		`kvd_directory_namespace_info{mode="cache",namespace="a",replicas="2"} 1`,
		`kvd_directory_namespace_heap_bytes{namespace="a"} 6400`,
		`kvd_directory_namespace_limit_bytes{namespace="a"} 4096`,
		`kvd_directory_namespace_limit_bytes{namespace="b"} 6400`,
		`kvd_directory_namespace_granted_bytes{namespace="a"} 3200`,
		`kvd_directory_namespace_returned_bytes{namespace="a"} 640`,
		`kvd_directory_namespace_leaked_bytes{namespace="a"} 64`,
		`kvd_directory_namespace_index_bytes{namespace="a"} 640`,
		`kvd_directory_namespace_index_used_bytes{namespace="a"} 64`,
		`kvd_directory_status_blocks{namespace="a",state="held"} 7`,
		`kvd_directory_status_blocks{namespace="a",state="dead"} 2`,
		`kvd_directory_status_blocks{namespace="b",state="dead"} 0`,
		`kvd_directory_scrub_lost_records{namespace="a"} 2`, `kvd_directory_scrub_repaired_records{namespace="a"} 3`,
		`kvd_directory_pg_heap_bytes{namespace="a",pg="1"} 6400`, `kvd_directory_pg_short{namespace="a",pg="1"} 1`,
		`kvd_directory_pg_short{namespace="b",pg="2"} 0`,
		`kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="live"} 1920`, `kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="free"} 512`,
		`kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="foreign"} 320`, `kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="limbo"} 192`,
		`kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="coming"} 128`, `kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="lost"} 128`,
		`kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="waiting"} 256`, `kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="recalled"} 1024`,
		`kvd_directory_lost_total{namespace="a"} 0`, `kvd_directory_lost_total{namespace="b"} 5`,
		`kvd_directory_losses{namespace="a"} 0`, `kvd_directory_losses{namespace="b"} 1`,
		`kvd_directory_copies_missing{namespace="a"} 2`, `kvd_directory_copies_missing{namespace="b"} 1`,
		`kvd_directory_copies_without_room{namespace="b"} 1`,
		`kvd_directory_member_up{id="d1"} 1`, `kvd_directory_member_up{id="d2"} 0`,
		`kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="room"} 2944`, `kvd_directory_pg_memory_bytes{namespace="b",pg="2",state="lost"} 0`,
	)
	if strings.Contains(got, `pg="9"`) {
		t.Error("a placement group of no namespace is shown")
	}
	// A follower leaves out what only a leader knows.
	st.Leads, st.AnsweredBy = false, "d2"
	for _, u := range st.Usage {
		u.LiveUnits, u.FreeUnits, u.ForeignUnits, u.LimboUnits, u.ComingUnits, u.LostUnits, u.Short, u.Estimated = 0, 0,
			0, 0, 0, 0, false, false
	}
	got = scrape(t, Directory("d2", fakeStatus{st: st}))
	wantLines(t, got, "kvd_directory_leader 0", "kvd_directory_leader_known 1", `kvd_directory_jobs{kind="move"} 2`,
		`kvd_directory_pg_heap_bytes{namespace="a",pg="1"} 6400`, `kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="waiting"} 256`,
		`kvd_directory_pg_memory_bytes{namespace="a",pg="1",state="recalled"} 1024`)
	for _, name := range []string{"kvd_directory_member_up", "kvd_directory_node_awaited",
		"kvd_directory_reclaim_epoch", "kvd_directory_jobs_in_trouble", "kvd_directory_pg_short",
		`pg="1",state="live"`, `pg="1",state="free"`, `pg="1",state="foreign"`, `pg="1",state="limbo"`,
		`pg="1",state="coming"`, `pg="1",state="lost"`} {
		if strings.Contains(got, name) {
			t.Errorf("a follower shows %s", name)
		}
	}
	if err := testutil.CollectAndCompare(Directory("d1", fakeStatus{err: errors.New("closed")}),
		strings.NewReader("")); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("no status: %v", err)
	}
}

// Raft's own are in seconds, without those that are not asked for.
func TestRaft(t *testing.T) {
	if Raft() != Raft() {
		t.Error("two sinks")
	}
	gometrics.MeasureSince([]string{"raft", "commitTime"}, time.Now().Add(-20*time.Millisecond))
	gometrics.AddSampleWithLabels([]string{"raft", "replication", "appendEntries", "rpc"}, 2,
		[]gometrics.Label{{Name: "peer_id", Value: "d2"}})
	gometrics.IncrCounter([]string{"raft", "state", "leader"}, 1)
	gometrics.IncrCounter([]string{"raft", "apply"}, 3)
	gometrics.IncrCounter([]string{"raft", "apply"}, -1) // would panic
	gometrics.SetGauge([]string{"raft", "peers"}, 3)
	gometrics.EmitKey([]string{"raft", "k"}, 1)
	got := scrape(t, Raft())
	wantLines(t, got, `kvd_raft_commit_seconds_bucket{le="0.01"} 0`, `kvd_raft_commit_seconds_count 1`,
		`kvd_raft_append_rpc_seconds_bucket{le="0.003"} 1`, `kvd_raft_append_rpc_seconds_bucket{le="0.001"} 0`,
		`kvd_raft_transitions_total{to="leader"} 1`, `kvd_raft_transitions_total{to="follower"} 0`,
		"kvd_raft_proposals_total 3")
	if strings.Contains(got, "peer") {
		t.Error("a series for each peer")
	}
}

type fakeRaft server.RaftState

func (f fakeRaft) Raft() server.RaftState { return server.RaftState(f) }

func TestRaftLog(t *testing.T) {
	wantLines(t, scrape(
		t, RaftLog(fakeRaft{Term: 3, LastIndex: 12, Commit: 11, Applied: 10, SnapshotIndex: 8, SnapshotEntries: 4})),
		"kvd_raft_term 3", "kvd_raft_last_index 12", "kvd_raft_commit_index 11", "kvd_raft_snapshot_index 8")
}

func TestJanitor(t *testing.T) {
	j := NewJanitor()
	j.Count(dirpb.JobKind_JOB_SCRUB, JobDone, 250*time.Millisecond, 10)
	j.Count(dirpb.JobKind_JOB_SCRUB, JobDone, 500*time.Millisecond, 5)
	j.Count(dirpb.JobKind_JOB_SCRUB, JobFailed, 250*time.Millisecond, 0)
	j.Count(dirpb.JobKind_JOB_MOVE, JobGivenUp, time.Second, 0)
	// Kinds of which there were none are there as well: rate needs their first 0.
	wantLines(t, scrape(t, j), `kvd_janitor_jobs_total{kind="scrub",result="done"} 2`,
		`kvd_janitor_jobs_total{kind="scrub",result="failed"} 1`,
		`kvd_janitor_jobs_total{kind="move",result="given_up"} 1`,
		`kvd_janitor_jobs_total{kind="recover",result="done"} 0`,
		`kvd_janitor_job_seconds_total{kind="scrub"} 1`, `kvd_janitor_job_transferred_bytes_total{kind="scrub"} 15`,
		`kvd_janitor_job_seconds_total{kind="move"} 1`, `kvd_janitor_job_seconds_total{kind="join"} 0`)
}

// The figures of a store's parts agree with what was done.
func TestParts(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := devstore.Start(ctx, devstore.Options{Nodes: 1, CapacityBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	open := func(provider string) *client.Client {
		c, err := client.Open(ctx, client.Options{Directory: s.Directory(), Devices: s.Devices(), Provider: provider})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	one, two := open("tcp"), open("shm")
	defer two.Close()
	for range 5 {
		if _, err := one.Put(ctx, []byte("k"), make([]byte, 1000), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	got := scrape(t, Client("n", one))
	wantLines(t, got, `kvd_client_operations_total{namespace="n",op="put"} 5`,
		`kvd_client_operations_total{namespace="n",op="get"} 0`,
		`kvd_client_hint_hits_total{namespace="n"} 4`, `kvd_client_connections{namespace="n",provider="tcp"} 1`,
		`kvd_client_unknown_outcomes_total{namespace="n"} 0`,
		`kvd_client_memory_bytes{namespace="n",state="live"} 1088`,
		`kvd_client_memory_bytes{namespace="n",state="foreign"} 0`,
		`kvd_client_memory_handed_back_bytes_total{namespace="n"} 0`,
		`kvd_client_memory_lost_bytes_total{namespace="n"} 0`, `kvd_client_memory_refused_bytes_total{namespace="n"} 0`)
	// Two clients in one registry.
	reg := prometheus.NewPedanticRegistry()
	for name, c := range map[string]*client.Client{"n": one, "o": two} {
		if err := reg.Register(Client(name, c)); err != nil {
			t.Error(err)
		}
	}
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
	got = scrape(t, MemNode("m1", s.Nodes()[0]))
	wantLines(t, got, `kvd_memnode_registered{node="m1"} 1`, `kvd_memnode_capacity_bytes{node="m1"} 6.7108864e+07`,
		`kvd_memnode_paced_seconds_total{namespace="default",node="m1"} 0`, `kvd_memnode_regions{node="m1",state="published"} 1`, `kvd_memnode_fences_pending{node="m1"} 0`, `kvd_memnode_sessions{node="m1"} 1`)
	if strings.Contains(got, `cpu_seconds_total{node="m1"} 0`+"\n") {
		t.Error("verbs over tcp took no CPU time")
	}
	got = scrape(t, RaftLog(s.DirectoryNodes()[0]))
	for _, name := range []string{"term", "last_index", "commit_index"} {
		if !strings.Contains(got, "\nkvd_raft_"+name+" ") || strings.Contains(got, "\nkvd_raft_"+name+" 0\n") {
			t.Errorf("kvd_raft_%s is 0 or missing:\n%s", name, got)
		}
	}
	got = scrape(t, Directory("d1", s.DirectoryNodes()[0]))
	wantLines(t, got, `kvd_directory_sessions{namespace="default",state="live"} 2`,
		`kvd_directory_node_up{node="m1"} 1`, "kvd_directory_leader 1",
		`kvd_directory_pg_short{namespace="default",pg="1"} 0`)
	for _, state := range []string{"live", "free", "foreign", "limbo", "coming", "lost", "waiting", "recalled",
		"room"} {
		if !strings.Contains(got, `kvd_directory_pg_memory_bytes{namespace="default",pg="1",state="`+state+`"}`) {
			t.Errorf("a leader does not show state %s:\n%s", state, got)
		}
	}
	// A client that is closed can still be scraped.
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	scrape(t, Client("n", one))
}
