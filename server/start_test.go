package server

import (
	"context"
	"crypto/tls"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvd-project/kvd/server/raftstore"
)

func TestOptions(t *testing.T) {
	for _, tc := range []struct {
		opts Options
		want []string
	}{
		{Options{}, []string{"ID", "DataDir"}},
		{Options{ID: strings.Repeat("d", 65), InMemory: true}, []string{"ID"}},
		{Options{ID: "d", InMemory: true, GRPCAddr: "10.0.0.1:1"}, []string{"GRPCAddr", "Insecure"}},
		{Options{ID: "d", InMemory: true, RaftAddr: ":1"}, []string{"RaftAddr", "TLS", "RaftAdvertise"}},
		{Options{ID: "d", InMemory: true, GRPCAddr: "0.0.0.0:1", Insecure: true}, []string{"GRPCAdvertise"}},
		{Options{ID: "d", InMemory: true, GRPCAdvertise: "0.0.0.0:1"}, []string{"GRPCAdvertise"}},
		{Options{ID: "d", InMemory: true, RaftAdvertise: "host"}, []string{"RaftAdvertise", "host:port"}},
		{Options{ID: "d", InMemory: true, GRPCAddr: "127.0.0.1:x"}, []string{"GRPCAddr", "port"}},
		{Options{ID: "d", InMemory: true, Bootstrap: true, Join: []string{"nohost"}},
			[]string{"own address", "nohost"}},
		{Options{ID: "d", InMemory: true, Lease: 1, EpochInterval: 1, ElectionTimeout: 1},
			[]string{"Lease", "EpochInterval", "ElectionTimeout", "50ms", "10ms"}},
		{Options{ID: "d", InMemory: true, ScrubInterval: 1}, []string{"ScrubInterval", "10ms"}},
		{Options{ID: "d", InMemory: true, TLS: &tls.Config{}}, []string{"certificate", "RootCAs"}},
	} {
		_, err := Open(context.Background(), tc.opts)
		if err == nil {
			t.Fatalf("%+v opened", tc.opts)
		}
		for _, w := range tc.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("error %q does not say %q", err, w)
			}
		}
	}
	o := Options{ID: "d", InMemory: true, GRPCAddr: "0.0.0.0:1", GRPCAdvertise: "host:1", Insecure: true}
	o.ensureDefaults()
	if err := o.Validate(); err != nil || o.Lease != time.Second || o.EpochInterval != 100*time.Millisecond ||
		o.DefaultNamespace != "default" {
		t.Fatalf("%+v: %v", o, err)
	}
}

func TestCannotStart(t *testing.T) {
	dir := t.TempDir()
	n := ready(t, start(t, Options{ID: "d1", DataDir: dir, Bootstrap: true}))
	ctx := testCtx(t)
	_, err := Open(ctx, Options{ID: "d1", DataDir: dir, Bootstrap: true})
	if !errors.Is(err, raftstore.ErrLocked) || !strings.Contains(err.Error(), dir) {
		t.Errorf("second node on one folder: %v", err)
	}
	_, err = Open(ctx, Options{ID: "d2", InMemory: true, Bootstrap: true, GRPCAddr: n.Addr()})
	if err == nil || !strings.Contains(err.Error(), "GRPCAddr "+n.Addr()) {
		t.Errorf("port in use: %v", err)
	}
	raftAddr := string(n.transport.LocalAddr())
	_, err = Open(ctx, Options{ID: "d2", InMemory: true, Bootstrap: true, RaftAddr: raftAddr})
	if err == nil || !strings.Contains(err.Error(), "RaftAddr "+raftAddr) {
		t.Errorf("raft port in use: %v", err)
	}
	if _, err = Open(ctx, Options{ID: "d2", InMemory: true}); !errors.Is(err, ErrNoState) {
		t.Errorf("nothing to start from: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if err := n.Ready(ctx); err == nil {
		t.Error("ready after Close")
	}
	// With state on disk neither Bootstrap nor Join is needed.
	ready(t, start(t, Options{ID: "d1", DataDir: dir}))
}

// The health service says whether this node can be of use.
func TestHealth(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	check := func(n *Node, service string, want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		r, err := health{n: n}.Check(testCtx(t), &healthpb.HealthCheckRequest{Service: service})
		if err != nil || r.Status != want {
			t.Fatalf("%q is %v, %v; want %v", service, r.GetStatus(), err, want)
		}
	}
	check(n, "", healthpb.HealthCheckResponse_SERVING)
	check(n, "kvd.directory.v1.Directory", healthpb.HealthCheckResponse_SERVING)
	_, err := health{n: n}.Check(testCtx(t), &healthpb.HealthCheckRequest{Service: "other"})
	wantCode(t, err, codes.NotFound, "other")
	// A node whose cluster cannot be reached is up, but of no use.
	lost := start(t, Options{ID: "d2", InMemory: true, Join: []string{"127.0.0.1:1"}})
	check(lost, "", healthpb.HealthCheckResponse_NOT_SERVING)
}
