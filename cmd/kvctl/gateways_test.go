package main

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
)

// fakeGateway answers operators over gRPC. Each time that it is asked how it is, a second has passed and 1,500
// commands.
type fakeGateway struct {
	peerspb.UnimplementedGatewaysServer
	mu     sync.Mutex
	asked  uint64
	paused string
	killed func(id int64)
}

// serve starts g and returns its address.
func (g *fakeGateway) serve(t *testing.T, with ...grpc.ServerOption) string {
	t.Helper()
	return serveGRPC(t, func(s *grpc.Server) { peerspb.RegisterGatewaysServer(s, g) }, with...)
}

func (g *fakeGateway) Describe(context.Context, *peerspb.DescribeRequest) (*peerspb.DescribeReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.asked++
	return &peerspb.DescribeReply{Version: "v1.4.0", UptimeMillis: 60_000 + 1000*g.asked,
		Listen: []string{"127.0.0.1:6379", "unix:/run/kvd/redis.sock"}, Clients: 12, MaxClients: 10000,
		Commands: 1500 * g.asked, Hits: 3000, Misses: 1000, MemoryBytes: 40 << 20, BufferBytes: 1 << 20,
		SlowCommands: 3, Blocked: 2, Monitors: 1, Paused: g.paused}, nil
}

func (g *fakeGateway) ListClients(_ *peerspb.ListClientsRequest,
	s grpc.ServerStreamingServer[peerspb.ListClientsReply]) error {
	for _, c := range []*peerspb.Client{
		{Id: 7, Addr: "10.0.0.9:41000", LocalAddr: "10.0.0.1:6379", Name: "till", AgeSeconds: 3700, IdleSeconds: 2,
			Flags: "N", Db: 1, Queued: -1, Command: "get", User: "app",
			Redirect: -1, Protocol: 3, Library: "go-redis", LibraryVersion: "9.23.0"},
		{Id: 9, Addr: "@", AgeSeconds: 1, Flags: "bx", Queued: 2, OutputBytes: 2048, MemoryBytes: 70000,
			User: "a\x1b[2J", Redirect: -1, Protocol: 2},
	} {
		if err := s.Send(&peerspb.ListClientsReply{Clients: []*peerspb.Client{c}}); err != nil {
			return err
		}
	}
	return nil
}

func (g *fakeGateway) SlowLog(_ context.Context, q *peerspb.SlowLogRequest) (*peerspb.SlowLogReply, error) {
	all := []*peerspb.SlowCommand{
		{Id: 4, UnixMicros: 1_000_000_000_123, TookMicros: 31_400,
			Args: [][]byte{[]byte("SET"), []byte("a key"), []byte("\x00\xff"), []byte("... (2 more arguments)")},
			Addr: "10.0.0.9:41000", Name: "till"},
		{Id: 3, UnixMicros: 1_000_000_000_000, TookMicros: 10_000, Args: [][]byte{[]byte("auth"), []byte("(redacted)")},
			Addr: "10.0.0.9:41000"},
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

// Over TLS kvctl shows a gateway its certificate, and believes nothing of a process that shows another role.
func TestGatewaysOverTLS(t *testing.T) {
	auth := identitytest.New(t)
	ca, cert, key := auth.Files(auth.Role("operator", "ann"))
	as := func(role string) grpc.ServerOption {
		return grpc.Creds(credentials.NewTLS(auth.Config(auth.Role(role, "x"))))
	}
	killed := 0
	g := &fakeGateway{killed: func(int64) { killed++ }}
	f := &fakeDirectory{now: &dirpb.StatusReply{Gateways: []*dirpb.GatewayInfo{
		{Addr: g.serve(t, as("gateway")), HostId: hostid.ID(), Namespaces: []string{"a"},
			Identity: "spiffe://test.example/kvd/gateway/g1"},
		{Addr: g.serve(t, as("memnode")), HostId: hostid.ID(), Namespaces: []string{"a"},
			Identity: "spiffe://test.example/kvd/gateway/g2"},
	}}}
	directory := f.serve(t, as("directory"))
	kvctl := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := newProgram(strings.NewReader(""), &out, &errs).run(t.Context(),
			append([]string{"--directory=" + directory, "--tls-ca=" + ca, "--tls-cert=" + cert, "--tls-key=" + key,
				"--timeout=10s"}, args...))
		return code, out.String(), errs.String()
	}
	const impostor = "/kvd/memnode/x has the role memnode, and answering as a gateway is for gateway"
	if code, out, errs := kvctl("gateways", "--interval", "0"); code != ctl.ExitUnavailable ||
		!strings.Contains(out, "40.0 MiB") || !strings.Contains(errs, impostor) ||
		!strings.Contains(errs, "1 of 2 gateways did not answer") {
		t.Errorf("exit status %d\n%s%s", code, out, errs)
	}
	if code, out, errs := kvctl("gateways", "kill", "g1", "7"); code != ctl.ExitOK || killed != 1 {
		t.Errorf("exit status %d, %d were killed\n%s%s", code, killed, out, errs)
	}
	if code, _, errs := kvctl("gateways", "kill", "g2", "7"); code != ctl.ExitUnavailable || killed != 1 ||
		!strings.Contains(errs, impostor) || !strings.Contains(errs, "(it did not happen)") {
		t.Errorf("exit status %d, %d were killed\n%s", code, killed, errs)
	}
}
