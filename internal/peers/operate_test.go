package peers_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/peers/peerstest"
)

// operated is a gateway of so many clients.
type operated struct {
	clients int64
	mu      sync.Mutex
	killed  []int64
}

func (o *operated) Describe() *peers.Description {
	return &peers.Description{Clients: uint32(o.clients)}
}

func (o *operated) Clients() (all []*peers.Client) {
	for i := range o.clients {
		all = append(all, &peers.Client{Id: i + 1})
	}
	return all
}

func (o *operated) SlowLog(n int) []*peers.SlowCommand { return []*peers.SlowCommand{{Id: int64(n)}} }

func (o *operated) Kill(id int64) (string, bool) {
	if id > o.clients {
		return "", false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.killed = append(o.killed, id)
	return "10.0.0.9:41000", true
}

// logged is a log that tests read.
type logged struct {
	sync.Mutex
	bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.Buffer.Write(p)
}

func (l *logged) String() string {
	l.Lock()
	defer l.Unlock()
	return l.Buffer.String()
}

// Operators are told of clients, and end them; nobody else is, or does. The log says who did.
func TestOperators(t *testing.T) {
	ca := identitytest.New(t)
	conf := func(role string) *tls.Config { return ca.Config(ca.Role(role, "x")) }
	wire, log, o := peerstest.Listen(t), &logged{}, &operated{clients: 1000}
	p := peerstest.NewRoom().New(
		t, peers.Options{Listener: wire, TLS: conf("gateway"), Logger: slog.New(slog.NewTextHandler(log, nil))})
	p.Start((&ear{}).deliver, func() {}, o)
	t.Cleanup(func() { p.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, role := range []string{"operator", "gateway", "client", "memnode", "directory", "janitor", "archive"} {
		conn, err := grpc.NewClient("passthrough:///"+wire.Addr().String(),
			grpc.WithTransportCredentials(credentials.NewTLS(conf(role))))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		g := peerspb.NewGatewaysClient(conn)
		want := codes.PermissionDenied
		if role == "operator" {
			want = codes.OK
		}
		d, err := g.Describe(ctx, &peerspb.DescribeRequest{})
		if status.Code(err) != want || err == nil && d.Clients != 1000 {
			t.Errorf("%s: Describe: %v, %v", role, d, err)
		}
		s, err := g.SlowLog(ctx, &peerspb.SlowLogRequest{Count: 7})
		if status.Code(err) != want || err == nil && s.Commands[0].Id != 7 {
			t.Errorf("%s: SlowLog: %v, %v", role, s, err)
		}
		ids, err := clientsOf(ctx, g)
		if status.Code(err) != want || err == nil && (len(ids) != 1000 || ids[999] != 1000) {
			t.Errorf("%s: ListClients: %d clients, %v", role, len(ids), err)
		}
		for id, found := range map[int64]bool{3: true, 2000: false} {
			k, err := g.KillClient(ctx, &peerspb.KillClientRequest{Id: id})
			if status.Code(err) != want || err == nil && (k.Found != found || found != (k.Addr != "")) {
				t.Errorf("%s: KillClient %d: %v, %v", role, id, k, err)
			}
		}
	}
	if len(o.killed) != 1 || o.killed[0] != 3 {
		t.Errorf("killed: %v, want 3", o.killed)
	}
	if text := log.String(); !strings.Contains(text, "an operator ended a client's connection") ||
		!strings.Contains(text, "/kvd/operator/x") || !strings.Contains(text, "peer=10.0.0.9:41000") {
		t.Errorf("the log has no line of who did it: %s", text)
	}
}

func clientsOf(ctx context.Context, g peerspb.GatewaysClient) (ids []int64, err error) {
	s, err := g.ListClients(ctx, &peerspb.ListClientsRequest{})
	for err == nil {
		var r *peerspb.ListClientsReply
		if r, err = s.Recv(); err == nil {
			for _, c := range r.Clients {
				ids = append(ids, c.Id)
			}
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return ids, err
}
