package server

import (
	"context"
	"math"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
)

// rpc is one of the directory's calls, for whatever bytes.
type rpc struct {
	name string
	// call returns false where the bytes are no request.
	call func(ctx context.Context, n *Node, b []byte) (ok bool, err error)
	seed proto.Message
}

func unary[Q any, P interface {
	*Q
	proto.Message
}, R any](name string, f func(*Node, context.Context, P) (R, error), seed P) rpc {
	return rpc{name, func(ctx context.Context, n *Node, b []byte) (bool, error) {
		q := P(new(Q))
		if proto.Unmarshal(b, q) != nil {
			return false, nil
		}
		_, err := f(n, ctx, q)
		return true, err
	}, seed}
}

// mapStream takes one map.
type mapStream struct {
	grpc.ServerStreamingServer[dirpb.Map]
	ctx    context.Context
	cancel context.CancelFunc
}

func (s *mapStream) Context() context.Context { return s.ctx }
func (s *mapStream) Send(*dirpb.Map) error    { s.cancel(); return nil }
func (s *mapStream) SendMsg(any) error        { s.cancel(); return nil }

var rpcs = []rpc{
	unary("OpenSession", (*Node).OpenSession, &dirpb.OpenSessionRequest{Namespace: "default", Client: "c",
		HostId: "h"}),
	unary("Renew", (*Node).Renew, &dirpb.RenewRequest{SessionId: 1, ReportEpoch: 1, AckedMapVersion: 2,
		QuiescedMapVersion: 3, Number: 4, Term: 2,
		HandBacks: []*dirpb.FreePlaces{{PgId: 1, Generation: 1, Unit: 1 << 14, Places: []uint32{3 << 10, 1<<10 | 7}}},
		Returns:   []*dirpb.ReturnedRun{{PgId: 1, Unit: 1 << 14, Units: 3, Generation: 1}},
		Held: []*dirpb.Held{{PgId: 1, Generation: 1, OwnUnits: 9, FreeUnits: 5, ForeignUnits: 3, LimboUnits: 1,
			NetUnits: -4}},
		StatusBack: []*dirpb.StatusBlock{{PgId: 1, Generation: 1, Offset: 1 << 16}}}),
	unary("CloseSession", (*Node).CloseSession, &dirpb.CloseSessionRequest{
		SessionId: 1, Runs: []*dirpb.ReturnedRun{{PgId: 1, Unit: 1 << 14, Units: 3, Generation: 1, Fresh: true}},
		HandBacks: []*dirpb.FreePlaces{{PgId: 1, Generation: 1, Unit: 1 << 14, Places: []uint32{1 << 31}}},
		Held:      []*dirpb.Held{{PgId: 1, Generation: 1, NetUnits: math.MinInt64}}, Settled: true}),
	{"WatchMap", func(ctx context.Context, n *Node, b []byte) (bool, error) {
		q := new(dirpb.WatchMapRequest)
		if proto.Unmarshal(b, q) != nil {
			return false, nil
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		return true, n.WatchMap(q, &mapStream{ctx: ctx, cancel: cancel})
	}, &dirpb.WatchMapRequest{SessionId: 1}},
	unary("GrantExtent", (*Node).GrantExtent, &dirpb.GrantExtentRequest{SessionId: 1, PgId: 1, WantUnits: 300,
		PlaceUnits: 5}),
	unary("GrantStatus", (*Node).GrantStatus, &dirpb.GrantStatusRequest{SessionId: 1, PgId: 1, Held: 1}),
	unary("SessionState", (*Node).SessionState, &dirpb.SessionStateRequest{SessionId: 1}),
	unary("RequestSplit", (*Node).RequestSplit, &dirpb.RequestSplitRequest{SessionId: 1, ShardId: 1}),
	unary("Meet", (*Node).Meet, &dirpb.MeetRequest{SessionIds: []uint32{1}, Id: []byte("0123456789abcdef"), Addr: "h:1",
		HostId: "h", News: 1}),
	unary("Pages", (*Node).Pages, &dirpb.PagesRequest{Id: []byte("0123456789abcdef"), Role: "memnode", Name: "m",
		Addr: "h:1", HostId: "h", News: 1}),
	unary("RegisterNode", (*Node).RegisterNode, &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 2, HostId: "h",
		CapacityBytes: 1 << 28, Domain: "rack",
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1", Atomics: dirpb.AtomicsBy_ATOMICS_BY_NIC}}}),
	unary("Heartbeat", (*Node).Heartbeat, &dirpb.HeartbeatRequest{NodeId: 1, Incarnation: 1, FencedSessions: []uint32{
		1, 2}, Stats: &dirpb.NodeStats{Connections: 1 << 63}}),
	unary("PublishRegion", (*Node).PublishRegion, &dirpb.PublishRegionRequest{NodeId: 1, Incarnation: 1, PgId: 1,
		Keys: []*dirpb.RegionKeys{{Provider: "tcp", HeapRkey: 1}}}),
	unary("FindWork", (*Node).FindWork, &dirpb.FindWorkRequest{}),
	unary("ClaimJob", (*Node).ClaimJob, &dirpb.ClaimJobRequest{SessionId: 1, Working: []uint32{1}}),
	unary("ReportJob", (*Node).ReportJob, &dirpb.ReportJobRequest{SessionId: 1, JobId: 1, Finished: true,
		Report: &dirpb.JobReport{LinkedUnits: []uint32{math.MaxUint32},
			Findings: []string{"x"}, Kept: []*dirpb.UnitRuns{{Extent: 0, SkipTake: []uint32{1, 2}}}}}),
	unary("StartJob", (*Node).StartJob, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_SCRUB, Namespace: "default",
		PgId: 1, Repair: true}),
	unary("DrainNode", (*Node).DrainNode, &dirpb.DrainNodeRequest{Node: "m1"}),
	unary("RemoveNode", (*Node).RemoveNode, &dirpb.RemoveNodeRequest{Node: "m1", Force: true}),
	unary("ReportNode", (*Node).ReportNode, &dirpb.ReportNodeRequest{Name: "m1", Trouble: "its workers die"}),
	unary("GiveUpNode", (*Node).GiveUpNode, &dirpb.GiveUpNodeRequest{Node: "m1"}),
	unary("RestartNode", (*Node).RestartNode, &dirpb.RestartNodeRequest{Node: "m1"}),
	unary("Rebalance", (*Node).Rebalance, &dirpb.RebalanceRequest{Namespace: "default"}),
	unary("CreateNamespace", (*Node).CreateNamespace, &dirpb.CreateNamespaceRequest{
		Name: "n", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1, BytesPerNode: 1 << 25, Shards: 2,
		IndexPercent: 9, Segments: 1}),
	unary("SetNamespace", (*Node).SetNamespace, &dirpb.SetNamespaceRequest{Name: "default", LimitBytes: 1 << 20}),
	unary("Status", (*Node).Status, &dirpb.StatusRequest{}),
	{"JoinDirectory", func(ctx context.Context, n *Node, b []byte) (bool, error) {
		q := new(dirpb.JoinDirectoryRequest)
		if proto.Unmarshal(b, q) != nil || checkAdvertised(q.RaftAddr) == nil && checkAdvertised(q.GrpcAddr) == nil {
			return false, nil // it would call there
		}
		_, err := n.JoinDirectory(ctx, q)
		return true, err
	}, &dirpb.JoinDirectoryRequest{Id: "d9", RaftAddr: "h", GrpcAddr: "h:1"}},
	unary("RemoveDirectory", (*Node).RemoveDirectory, &dirpb.RemoveDirectoryRequest{Id: "d1"}),
	unary("WhoAmI", (*Node).WhoAmI, &dirpb.WhoAmIRequest{}),
	unary("ShowNamespace", (*Node).ShowNamespace, &dirpb.ShowNamespaceRequest{Name: "default"}),
	unary("GrantAccess", (*Node).GrantAccess, &dirpb.GrantAccessRequest{
		Namespace: "default", Access: &dirpb.Access{Who: "group:g", Right: dirpb.Right_RIGHT_READ}}),
	unary("RevokeAccess", (*Node).RevokeAccess, &dirpb.RevokeAccessRequest{Namespace: "default", Who: "group:g"}),
}

// FuzzRequests sends the directory requests of any content. It neither panics nor hangs, says
// of each refusal what it is, and its state stays one that it could start from.
func FuzzRequests(f *testing.F) {
	for i, r := range rpcs {
		b, err := proto.Marshal(r.seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(byte(i), b)
		f.Add(byte(i), []byte{})
	}
	// store is a directory with a memory node, and a session that has memory and a job.
	store := func(t *testing.T) *Node {
		n := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, Lease: forever,
			EpochInterval: 10 * time.Millisecond}))
		ctx := testCtx(t)
		must := func(_ any, err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		must(n.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 1, CapacityBytes: 1 << 28,
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}}))
		must(n.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "default"}))
		h, err := n.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: 1, Incarnation: 1})
		must(h, err)
		for _, w := range h.Regions {
			must(n.PublishRegion(ctx, &dirpb.PublishRegionRequest{NodeId: 1, Incarnation: 1, PgId: w.PgId,
				Since: w.Since, Keys: []*dirpb.RegionKeys{{Provider: "tcp", HeapRkey: 1}}}))
		}
		must(n.OpenSession(ctx, &dirpb.OpenSessionRequest{}))
		must(n.GrantExtent(ctx, &dirpb.GrantExtentRequest{SessionId: 1, PgId: 1, WantUnits: 5000}))
		must(n.GrantStatus(ctx, &dirpb.GrantStatusRequest{SessionId: 1, PgId: 1}))
		must(n.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_SCRUB, Namespace: "default", PgId: 1}))
		must(n.ClaimJob(ctx, &dirpb.ClaimJobRequest{SessionId: 1}))
		return n
	}
	f.Fuzz(func(t *testing.T, which byte, data []byte) {
		n := store(t) // of its own: what comes of a request must not depend on others
		defer n.Close()
		r := rpcs[int(which)%len(rpcs)]
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		began := time.Now()
		ok, err := r.call(ctx, n, data)
		if !ok {
			return
		}
		if d := time.Since(began); d > patience/2 {
			t.Fatalf("%s took %v", r.name, d)
		}
		switch c := status.Code(err); c {
		case codes.Internal, codes.Unknown, codes.Unimplemented, codes.DataLoss:
			t.Fatalf("%s: %v", r.name, err)
		}
		if _, err := n.Status(t.Context(), &dirpb.StatusRequest{}); err != nil {
			t.Fatalf("after %s: %v", r.name, err)
		}
		var rows []fsm.Row
		n.machine.view(func(s *fsm.State) { rows = s.Rows() })
		if _, err := fsm.Load(rows); err != nil {
			t.Fatalf("after %s the directory could not start again: %v", r.name, err)
		}
	})
}
