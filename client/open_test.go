package client_test

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

// forgetful is a directory whose two sessions end before they hear of a map.
type forgetful struct {
	dirpb.UnimplementedDirectoryServer
	opened atomic.Int32
}

func (f *forgetful) OpenSession(context.Context, *dirpb.OpenSessionRequest) (*dirpb.OpenSessionReply, error) {
	n := f.opened.Add(1)
	if n > 2 {
		return nil, status.Error(codes.NotFound, "no such namespace")
	}
	return &dirpb.OpenSessionReply{SessionId: uint32(n), NamespaceId: 1, RenewMillis: 1, LeaseMillis: 1000}, nil
}

func (f *forgetful) Renew(context.Context, *dirpb.RenewRequest) (*dirpb.RenewReply, error) {
	return nil, status.Error(codes.NotFound, "the session is fenced")
}

func (f *forgetful) WatchMap(_ *dirpb.WatchMapRequest, s grpc.ServerStreamingServer[dirpb.Map]) error {
	<-s.Context().Done()
	return nil
}

// A session that is lost before its first map is opened again by whoever waits for it.
func TestOpenLost(t *testing.T) {
	l := testutil.Listen(t)
	f, s := &forgetful{}, grpc.NewServer()
	dirpb.RegisterDirectoryServer(s, f)
	go s.Serve(l)
	defer s.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: []string{l.Addr().String()}, Devices: []*rdma.Device{
		rdma.NewDevice("sim", sim.New(sim.Options{}).Device("c"))}})
	if c != nil || !errors.Is(err, client.ErrNoNamespace) {
		t.Errorf("%v, %v; want what the third attempt found", c, err)
	}
}

// Over sockets alone a client has one connection to a memory node unless it is told otherwise.
func TestDefaultLanes(t *testing.T) {
	for provider, want := range map[string]int{"tcp": 1, "shm": min(runtime.GOMAXPROCS(0), 16)} {
		st, c := open(t, provider, devstore.Options{}, client.Options{})
		if n := c.Lanes(); n != want {
			t.Errorf("%s: %d lanes, want %d", provider, n, want)
		}
		two, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices(),
			Provider: provider, Lanes: 2})
		if err != nil {
			t.Fatal(err)
		}
		if n := two.Lanes(); n != 2 {
			t.Errorf("%s: %d lanes, want the 2 asked for", provider, n)
		}
		if err := two.Close(); err != nil {
			t.Error(err)
		}
	}
}
