package janitor_test

import (
	"context"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/janitor"
)

// start starts a store of some memory nodes without a janitor, until the test's end; call asks its directory.
func start(t *testing.T, nodes int) (s *devstore.Store, call func(func(context.Context, dirpb.DirectoryClient) error)) {
	t.Helper()
	s, err := devstore.Start(t.Context(), devstore.Options{Nodes: nodes, Providers: []string{"shm"},
		CapacityBytes: 64 << 20, NoJanitor: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	dir, err := dirclient.Open(dirclient.Options{Addrs: s.Directory()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dir.Close() })
	return s, func(f func(context.Context, dirpb.DirectoryClient) error) {
		t.Helper()
		if err := dir.Call(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
}

// A janitor that has work asks for more at once: a namespace that grows from one segment
// goes through a hundred jobs, each of which follows from the one before.
func TestJobsFollowEachOther(t *testing.T) {
	s, call := start(t, 1)
	call(func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 32 << 20,
			Shards: 4, Segments: 1, IndexPercent: 5})
		return err
	})
	// All four shards are in one placement group, so they split one after the other. There is work
	// before the janitor first looks for some.
	call(func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.StartJob(ctx, &dirpb.StartJobRequest{Namespace: "n", Kind: dirpb.JobKind_JOB_MOVE})
		return err
	})
	for tick := time.NewTicker(5 * time.Millisecond); ; <-tick.C {
		st, err := s.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(st.GetJobs()) > 0 {
			break
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// Poll is never over: who only waits for it goes from one job to the next every half hour.
	ended, stopped := make(chan dirpb.JobKind, 100), make(chan error, 1)
	o := janitor.Options{Directory: s.Directory(), Devices: s.Devices(), Poll: 2 * time.Hour,
		Done: func(kind dirpb.JobKind, _ time.Duration, _ *dirpb.JobReport, err error) {
			if err != nil {
				t.Errorf("%v: %v", kind, err)
			}
			ended <- kind
		}}
	pace := o.Pace()
	go func() { stopped <- janitor.Run(ctx, o) }()
	c, err := client.Open(t.Context(), client.Options{Directory: s.Directory(), Namespace: "n", Devices: s.Devices()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	limit := time.After(time.Minute)
	// The goroutine that has ended one job may say so after another has ended the next one.
	left := map[dirpb.JobKind]int{dirpb.JobKind_JOB_MOVE: 4, dirpb.JobKind_JOB_CLEAN: 4}
	for range 8 {
		select {
		case kind := <-ended:
			if left[kind]--; left[kind] < 0 {
				t.Fatalf("one more %v ended; left are %v", kind, left)
			}
		case <-limit:
			t.Fatalf("left are %v", left)
		}
	}
	if most, _ := pace(dirpb.JobKind_JOB_MOVE); most < 1 || most > 2 {
		t.Errorf("moves had %d operations at once, want 1 or 2", most)
	}
	cancel()
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

// A drain's joins wait while a placement group is recovered, but not for ever, and its recoveries go first.
func TestRecoversBeforeJoins(t *testing.T) {
	s, call := start(t, 3)
	ended := make(chan dirpb.JobKind, 100)
	o := janitor.Options{Directory: s.Directory(), Devices: s.Devices(), Done: func(kind dirpb.JobKind, _ time.Duration,
		report *dirpb.JobReport, err error) {
		if err == nil && (kind != dirpb.JobKind_JOB_JOIN || report.GetGroups() > 0) {
			// nothing waits in a placement group without shards
			ended <- kind
		}
	}}
	recovering, counts := o.Order()
	pace := o.Pace()
	end := recovering()
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- janitor.Run(ctx, o) }()
	defer func() {
		cancel()
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	}()
	call(func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2, BytesPerNode: 16 << 20,
			Shards: 2, Segments: 1, IndexPercent: 5})
		return err
	})
	head := "" // of the placement group of the first shard
	for tick := time.NewTicker(time.Millisecond); head == ""; <-tick.C {
		st, err := s.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range st.GetMap().GetNodes() {
			if pgs := st.GetMap().GetPgs(); len(pgs) > 0 && pgs[0].GetState() == dirpb.PGState_PG_ACTIVE &&
				n.GetId() == pgs[0].GetMembers()[0].GetNodeId() {
				head = n.GetName()
			}
		}
	}
	call(func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: head})
		return err
	})
	await := func(kind dirpb.JobKind) {
		t.Helper()
		for limit := time.After(time.Minute); ; {
			select {
			case k := <-ended:
				if k == kind {
					return
				}
			case <-limit:
				t.Fatalf("no %v within a minute", kind)
			}
		}
	}
	await(dirpb.JobKind_JOB_JOIN)
	if most, rested := pace(dirpb.JobKind_JOB_JOIN); most != 1 || rested == 0 {
		t.Errorf("a join for which nobody waits had %d operations at once and rested for %v, want 1, and rests", most,
			rested)
	}
	if _, held := counts(); held == 0 {
		t.Error("a join went on beside a recovery")
	}
	end()
	await(dirpb.JobKind_JOB_RECOVER)
	if begun, _ := counts(); begun < 2 {
		t.Error("the recovery of the drain did not go first")
	}
}
