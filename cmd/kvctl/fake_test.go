package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// fakeDirectory answers what a test tells it to, over gRPC.
type fakeDirectory struct {
	dirpb.UnimplementedDirectoryServer
	mu    sync.Mutex
	now   *dirpb.StatusReply
	next  []*dirpb.StatusReply // each is shown once before the one after it
	steps [][]string           // of successive rebalances
	err   error                // of the next call that changes something
	calls []string
	// startJob, if set, answers StartJob.
	startJob func(*dirpb.StartJobRequest) (*dirpb.StartJobReply, error)
	who      dirpb.WhoAmIReply // what WhoAmI answers
}

// serve starts f and returns its address.
func (f *fakeDirectory) serve(t *testing.T, with ...grpc.ServerOption) string {
	t.Helper()
	return serveGRPC(t, func(s *grpc.Server) { dirpb.RegisterDirectoryServer(s, f) }, with...)
}

// serveGRPC serves what register registers, and returns its address.
func serveGRPC(t *testing.T, register func(*grpc.Server), with ...grpc.ServerOption) string {
	t.Helper()
	lis := testutil.Listen(t)
	s := grpc.NewServer(with...)
	register(s)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(lis) })
	t.Cleanup(func() {
		s.Stop()
		wg.Wait()
	})
	return lis.Addr().String()
}

func (f *fakeDirectory) Status(context.Context, *dirpb.StatusRequest) (*dirpb.StatusReply, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st := proto.Clone(f.now).(*dirpb.StatusReply)
	if len(f.next) > 0 {
		f.now, f.next = f.next[0], f.next[1:]
	}
	return st, nil
}

// called notes a request and gives the error that the test has set.
func (f *fakeDirectory) called(name string, m proto.Message) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, err := ctl.ProtoJSON(m)
	if err != nil {
		return err
	}
	f.calls = append(f.calls, name+" "+string(b))
	err, f.err = f.err, nil
	return err
}

func (f *fakeDirectory) DrainNode(_ context.Context, q *dirpb.DrainNodeRequest) (*dirpb.DrainNodeReply, error) {
	return &dirpb.DrainNodeReply{Regions: 2}, f.called("DrainNode", q)
}

func (f *fakeDirectory) AcceptLoss(_ context.Context, q *dirpb.AcceptLossRequest) (*dirpb.AcceptLossReply, error) {
	return &dirpb.AcceptLossReply{Namespace: &dirpb.Namespace{Id: 9, Name: q.Name, Lost: q.Lost}},
		f.called("AcceptLoss", q)
}

func (f *fakeDirectory) Audit(_ context.Context, q *dirpb.AuditRequest) (*dirpb.AuditReply, error) {
	return &dirpb.AuditReply{Dropped: 6, Entries: []*dirpb.AuditEntry{
		{Number: 7, UnixMillis: 1_000_000, Identity: "spiffe://example.org/kvd/operator/ann", Remote: "10.0.0.9:51000",
			Action: "node.remove", Object: "m1", Detail: "force=true"},
		{Number: 8, UnixMillis: 1_001_000, Action: "namespace.rebalance", Object: "a", Detail: "steps=2"},
	}}, f.called("Audit", q)
}

func (f *fakeDirectory) RotateKey(_ context.Context, q *dirpb.RotateKeyRequest) (*dirpb.RotateKeyReply, error) {
	return &dirpb.RotateKeyReply{Generation: 8}, f.called("RotateKey", q)
}

func (f *fakeDirectory) RemoveNode(_ context.Context, q *dirpb.RemoveNodeRequest) (*dirpb.RemoveNodeReply, error) {
	return &dirpb.RemoveNodeReply{}, f.called("RemoveNode", q)
}

func (f *fakeDirectory) GiveUpNode(_ context.Context, q *dirpb.GiveUpNodeRequest) (*dirpb.GiveUpNodeReply, error) {
	return &dirpb.GiveUpNodeReply{}, f.called("GiveUpNode", q)
}

func (f *fakeDirectory) RestartNode(_ context.Context, q *dirpb.RestartNodeRequest) (*dirpb.RestartNodeReply, error) {
	// m3 begins empty.
	return &dirpb.RestartNodeReply{Boot: 2, Kept: q.Node != "m3" && !q.Leave, Version: "v1.4.0"},
		f.called("RestartNode", q)
}

func (f *fakeDirectory) Rebalance(_ context.Context, q *dirpb.RebalanceRequest) (*dirpb.RebalanceReply, error) {
	rep := &dirpb.RebalanceReply{}
	err := f.called("Rebalance", q)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil && len(f.steps) > 0 {
		rep.Steps, f.steps = f.steps[0], f.steps[1:]
	}
	return rep, err
}

func (f *fakeDirectory) StartJob(_ context.Context, q *dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
	if err := f.called("StartJob", q); err != nil {
		return nil, err
	}
	if f.startJob != nil {
		return f.startJob(q)
	}
	return &dirpb.StartJobReply{JobIds: []uint32{41, 42}}, nil
}

func (f *fakeDirectory) CreateNamespace(_ context.Context, q *dirpb.CreateNamespaceRequest) (
	*dirpb.CreateNamespaceReply, error) {
	return &dirpb.CreateNamespaceReply{Namespace: &dirpb.Namespace{Id: 9, Name: q.Name, Mode: q.Mode, Replicas: 2,
			BytesPerNode: q.BytesPerNode}},
		f.called("CreateNamespace", q)
}

func (f *fakeDirectory) SetNamespace(_ context.Context, q *dirpb.SetNamespaceRequest) (*dirpb.SetNamespaceReply,
	error) {
	return &dirpb.SetNamespaceReply{Namespace: &dirpb.Namespace{Id: 1, Name: q.Name, Replicas: max(q.Replicas, 1),
		LimitBytes: q.LimitBytes}}, f.called("SetNamespace", q)
}

func (f *fakeDirectory) ShowNamespace(_ context.Context, q *dirpb.ShowNamespaceRequest) (*dirpb.ShowNamespaceReply,
	error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.now.GetMap().GetNamespaces() {
		if w.Name == q.Name {
			return &dirpb.ShowNamespaceReply{Namespace: w, GrantedBytes: 3 << 20, IndexBytes: 1 << 20, Sessions: 2}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "namespace %q: not found", q.Name)
}

// changed is a namespace of the state with another access list.
func (f *fakeDirectory) changed(name string, access ...*dirpb.Access) *dirpb.Namespace {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.now.GetMap().GetNamespaces() {
		if w.Name == name {
			return &dirpb.Namespace{Id: w.Id, Name: name, Owner: w.Owner, Access: access}
		}
	}
	return nil
}

func (f *fakeDirectory) GrantAccess(_ context.Context, q *dirpb.GrantAccessRequest) (*dirpb.GrantAccessReply, error) {
	return &dirpb.GrantAccessReply{Namespace: f.changed(q.Namespace, q.Access), Fencing: 1}, f.called("GrantAccess", q)
}

func (f *fakeDirectory) RevokeAccess(_ context.Context, q *dirpb.RevokeAccessRequest) (*dirpb.RevokeAccessReply,
	error) {
	return &dirpb.RevokeAccessReply{Namespace: f.changed(q.Namespace)}, f.called("RevokeAccess", q)
}

func (f *fakeDirectory) WhoAmI(context.Context, *dirpb.WhoAmIRequest) (*dirpb.WhoAmIReply, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return proto.CloneOf(&f.who), nil
}

func (f *fakeDirectory) DeleteNamespace(_ context.Context, q *dirpb.DeleteNamespaceRequest) (
	*dirpb.DeleteNamespaceReply, error) {
	rep := &dirpb.DeleteNamespaceReply{Id: q.Id}
	if q.EndSessions {
		rep.Fencing = 2
	}
	return rep, f.called("DeleteNamespace", q)
}

// Scripts of operating commands against a directory that shows what the script
// says:
//
//	state            the state, as the text of a StatusReply; it begins the script anew
//	next             another one, which follows when the one before was shown
//	steps            what the next rebalance answers, one step a line
//	who              what whoami answers, as the text of a WhoAmIReply
//	refuse           the next call that changes something is refused with that text
//	break            it breaks off, as by a directory node that stops
//	paused           what the gateway says that it holds up
//	kvctl            a command line, and below it what is typed; the calls that changed
//	                 something are printed
//
// $gateway is the address of a gateway, and $here the name of this machine.
func TestOperate(t *testing.T) {
	datadriven.Walk(t, "testdata/operate", func(t *testing.T, path string) {
		f := &fakeDirectory{now: &dirpb.StatusReply{}}
		g := &fakeGateway{killed: func(id int64) { _ = f.called("KillClient", &peerspb.KillClientRequest{Id: id}) }}
		words := strings.NewReplacer("$gateway", g.serve(t), "$here", hostid.ID())
		e := &env{t: t, flags: []string{"--directory", f.serve(t), "--timeout", "10s"},
			now: func() time.Time { return time.UnixMilli(1_000_000) }}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			d.Input = words.Replace(d.Input)
			parse := func() *dirpb.StatusReply {
				st := &dirpb.StatusReply{}
				if err := prototext.Unmarshal([]byte(d.Input), st); err != nil {
					d.Fatalf(t, "%v", err)
				}
				return st
			}
			f.mu.Lock()
			switch d.Cmd {
			case "state":
				f.now, f.next, f.steps, f.err = parse(), nil, nil, nil
			case "next":
				f.next = append(f.next, parse())
			case "steps":
				f.steps = append(f.steps, strings.Split(d.Input, "\n"))
				if d.Input == "" {
					f.steps[len(f.steps)-1] = nil
				}
			case "who":
				proto.Reset(&f.who)
				if err := prototext.Unmarshal([]byte(d.Input), &f.who); err != nil {
					d.Fatalf(t, "%v", err)
				}
			case "paused":
				g.mu.Lock()
				g.paused = d.Input
				g.mu.Unlock()
			case "refuse":
				f.err = status.Error(codes.FailedPrecondition, d.Input)
			case "break":
				f.err = status.Error(codes.Unavailable, "stopping")
			}
			f.calls = nil
			f.mu.Unlock()
			if d.Cmd != "kvctl" {
				return ""
			}
			line, stdin, _ := strings.Cut(d.Input, "\n")
			r := e.run(stdin, split(t, line)...)
			var out strings.Builder
			f.mu.Lock()
			for _, c := range f.calls {
				fmt.Fprintln(&out, "→ "+c)
			}
			f.mu.Unlock()
			out.WriteString(r.stderr + r.stdout)
			if r.code != ctl.ExitOK {
				fmt.Fprintf(&out, "exit %d\n", r.code)
			}
			text := out.String()
			for _, v := range volatile {
				if v.to == "<addr>" {
					text = v.re.ReplaceAllString(text, v.to)
				}
			}
			return text
		})
	})
}
