package main

import (
	"context"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"

	"github.com/kvd-project/kvd/internal/peers/peerspb"
)

// fakeGateway answers operators over gRPC. Each time that it is asked how it is, a second has passed and 1,500 commands.
type fakeGateway struct {
	peerspb.UnimplementedGatewaysServer
	mu     sync.Mutex
	asked  uint64
	paused string
	killed func(id int64)
}

// serve starts g and returns its address.
func (g *fakeGateway) serve(t *testing.T) string {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	peerspb.RegisterGatewaysServer(s, g)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(lis) })
	t.Cleanup(func() {
		s.Stop()
		wg.Wait()
	})
	return lis.Addr().String()
}

func (g *fakeGateway) Describe(context.Context, *peerspb.DescribeRequest) (*peerspb.DescribeReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.asked++
	return &peerspb.DescribeReply{Version: "v1.4.0", UptimeMillis: 60_000 + 1000*g.asked, Listen: []string{"127.0.0.1:6379", "unix:/run/kvd/redis.sock"}, Clients: 12, MaxClients: 10000,
		Commands: 1500 * g.asked, Hits: 3000, Misses: 1000, MemoryBytes: 40 << 20, BufferBytes: 1 << 20, SlowCommands: 3, Blocked: 2, Monitors: 1, Paused: g.paused}, nil
}

func (g *fakeGateway) ListClients(_ *peerspb.ListClientsRequest, s grpc.ServerStreamingServer[peerspb.ListClientsReply]) error {
	for _, c := range []*peerspb.Client{
		{Id: 7, Addr: "10.0.0.9:41000", LocalAddr: "10.0.0.1:6379", Name: "till", AgeSeconds: 3700, IdleSeconds: 2, Flags: "N", Db: 1, Queued: -1, Command: "get", User: "app",
			Redirect: -1, Protocol: 3, Library: "go-redis", LibraryVersion: "9.23.0"},
		{Id: 9, Addr: "@", AgeSeconds: 1, Flags: "bx", Queued: 2, OutputBytes: 2048, MemoryBytes: 70000, User: "a\x1b[2J", Redirect: -1, Protocol: 2},
	} {
		if err := s.Send(&peerspb.ListClientsReply{Clients: []*peerspb.Client{c}}); err != nil {
			return err
		}
	}
	return nil
}

func (g *fakeGateway) SlowLog(_ context.Context, q *peerspb.SlowLogRequest) (*peerspb.SlowLogReply, error) {
	all := []*peerspb.SlowCommand{
		{Id: 4, UnixMicros: 1_000_000_000_123, TookMicros: 31_400, Args: [][]byte{[]byte("SET"), []byte("a key"), []byte("\x00\xff"), []byte("... (2 more arguments)")}, Addr: "10.0.0.9:41000", Name: "till"},
		{Id: 3, UnixMicros: 1_000_000_000_000, TookMicros: 10_000, Args: [][]byte{[]byte("auth"), []byte("(redacted)")}, Addr: "10.0.0.9:41000"},
	}
	if q.Count > 0 {
		all = all[:min(len(all), int(q.Count))]
	}
	return &peerspb.SlowLogReply{Commands: all}, nil
}

func (g *fakeGateway) KillClient(_ context.Context, q *peerspb.KillClientRequest) (*peerspb.KillClientReply, error) {
	if q.Id != 7 {
		return &peerspb.KillClientReply{}, nil
	}
	g.killed(q.Id)
	return &peerspb.KillClientReply{Found: true, Addr: "10.0.0.9:41000"}, nil
}
