package peers_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/peers/peerstest"
	"github.com/kvd-project/kvd/internal/testutil"
)

const patience = testutil.Limit

// ear takes what a gateway hears.
type ear struct {
	sync.Mutex
	messages []string
	keys     []string
	all      int
	lost     int
}

func (e *ear) deliver(h peers.Heard) {
	e.Lock()
	defer e.Unlock()
	for _, m := range h.Messages {
		e.messages = append(e.messages, fmt.Sprintf("%s=%.20s %d %v", m.Channel, m.Payload, len(m.Payload), m.Shard))
	}
	for _, k := range h.Keys {
		e.keys = append(e.keys, string(k))
	}
	if h.AllKeys {
		e.all++
	}
}

func (e *ear) lose() {
	e.Lock()
	defer e.Unlock()
	e.lost++
}

func (e *ear) is(f func(*ear) bool) func() bool {
	return func() bool {
		e.Lock()
		defer e.Unlock()
		return f(e)
	}
}

func begin(t *testing.T, r *peerstest.Room, o peers.Options) (*peers.Peers, *ear) {
	p, e := r.New(t, o), &ear{}
	p.Start(e.deliver, e.lose, nil)
	t.Cleanup(func() { p.Close() })
	return p, e
}

func following(n int, all ...*peers.Peers) func() bool {
	return func() bool {
		for _, p := range all {
			if s := p.Stats(); s.Following != n || s.Followers != n {
				return false
			}
		}
		return true
	}
}

func want(t *testing.T, p *peers.Peers, messages, keys bool) {
	t.Helper()
	p.Want(messages, keys)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	p.AwaitHeard(ctx, nil)
	if ctx.Err() != nil {
		t.Fatal("peers have not heard")
	}
}

// Gateways tell each other what they want to hear, and nothing else.
func TestInterest(t *testing.T) {
	r := peerstest.NewRoom()
	a, ea := begin(t, r, peers.Options{})
	b, eb := begin(t, r, peers.Options{})
	c, ec := begin(t, r, peers.Options{})
	testutil.Until(t, "all follow all", following(2, a, b, c))
	if a.WantsMessages() || a.WantsKeys() {
		t.Error("wanted by nobody")
	}
	want(t, b, true, false)
	want(t, c, false, true)
	a.Publish(false, []byte("ch"), []byte("hello"))
	a.Publish(true, []byte("ch"), nil)
	a.Changed([]byte("k"), []byte("l"))
	a.Changed()
	testutil.Until(t, "b hears messages", eb.is(func(e *ear) bool {
		return slices.Equal(e.messages, []string{"ch=hello 5 false", "ch= 0 true"}) && len(e.keys) == 0 && e.all == 0
	}))
	testutil.Until(t, "c hears keys", ec.is(func(e *ear) bool { return len(e.messages) == 0 && e.all == 1 }))
	want(t, b, false, false)
	want(t, c, false, false)
	testutil.Until(t, "nobody wants anything", func() bool { return !a.WantsMessages() && !a.WantsKeys() })
	if !ea.is(func(e *ear) bool { return len(e.messages)+len(e.keys)+e.all == 0 })() {
		t.Error("a heard itself")
	}
}

// A peer that dies is forgotten and told as lost; one that comes back by another stream hears again.
func TestCutAndDeath(t *testing.T) {
	r := peerstest.NewRoom()
	wire := peerstest.Listen(t)
	a, _ := begin(t, r, peers.Options{Listener: wire})
	b, eb := begin(t, r, peers.Options{})
	testutil.Until(t, "they follow each other", following(1, a, b))
	want(t, b, true, true)
	lost := 0
	eb.is(func(e *ear) bool { lost = e.lost; return true })()
	wire.Cut()
	testutil.Until(t, "b is told that it lost something, and that it follows again", eb.is(func(e *ear) bool {
		return e.lost >= lost+2
	}))
	testutil.Until(t, "they follow each other again", following(1, a, b))
	want(t, b, true, true)
	a.Publish(false, []byte("ch"), []byte("x"))
	testutil.Until(t, "b hears", eb.is(func(e *ear) bool { return slices.Contains(e.messages, "ch=x 1 false") }))
	a.Close()
	testutil.Until(t, "b forgets a", func() bool {
		s := b.Stats()
		return s.Known == 0 && s.Following == 0 && s.Followers == 0
	})
	if b.WantsMessages() || b.WantsKeys() {
		t.Error("a wants something, and is gone")
	}
	want(t, b, false, true) // nobody is waited for
}

// follow is a follower that does nothing by itself.
func follow(t *testing.T, addr string, creds credentials.TransportCredentials,
	q *peerspb.FollowRequest) grpc.BidiStreamingClient[peerspb.FollowRequest, peerspb.FollowReply] {
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(creds),
		grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(64<<10),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s, err := peerspb.NewGatewaysClient(conn).Follow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(q); err != nil && !errors.Is(err, io.EOF) { // EOF: it is refused already, and Recv says why
		t.Fatal(err)
	}
	return s
}

// A follower that reads too slowly misses messages, which are counted, and is told that any key may have changed;
// nobody waits for it, and what it has still to be told is bounded.
func TestSlowFollower(t *testing.T) {
	r := peerstest.NewRoom()
	wire := peerstest.Listen(t)
	a, _ := begin(t, r, peers.Options{Listener: wire})
	id := []byte(strings.Repeat("s", 16))
	if _, err := r.Meet(t.Context(), meetRequest(id)); err != nil {
		t.Fatal(err)
	}
	s := follow(t, wire.Addr().String(), insecure.NewCredentials(), &peerspb.FollowRequest{
		Id: id, Number: 1, Messages: true, Keys: true})
	testutil.Until(t, "it is followed", func() bool { return a.WantsKeys() })
	payload := make([]byte, 1<<20)
	for i := 0; a.Stats().Dropped == 0; i++ {
		if i > 1000 {
			t.Fatal("a gigabyte is queued")
		}
		a.Publish(false, []byte("ch"), payload)
	}
	// The queue of now may go on its way yet, and the next one wait for that: more than three are never taken.
	for range 600 {
		a.Changed(payload[:100<<10])
	}
	for {
		m, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if m.AllKeys {
			break
		}
	}
}

// A caller whom the directory does not name is refused, and so is one without an id.
func TestStrangers(t *testing.T) {
	r := peerstest.NewRoom()
	wire := peerstest.Listen(t)
	a, _ := begin(t, r, peers.Options{Listener: wire})
	for _, id := range []string{"", "x", strings.Repeat("x", 16)} {
		_, err := follow(t, wire.Addr().String(), insecure.NewCredentials(), &peerspb.FollowRequest{
			Id: []byte(id), Number: 1, Messages: true}).Recv()
		if status.Code(err) != codes.PermissionDenied {
			t.Errorf("%q: %v", id, err)
		}
	}
	if a.WantsMessages() {
		t.Error("a stranger is told of messages")
	}
}

// With TLS both ends must be gateways.
func TestRoles(t *testing.T) {
	ca := identitytest.New(t)
	r := peerstest.NewRoom()
	conf := func(role, name string) *tls.Config { return ca.Config(ca.Role(role, name)) }
	wire := peerstest.Listen(t)
	a, _ := begin(t, r, peers.Options{Listener: wire, TLS: conf("gateway", "g1")})
	b, eb := begin(t, r, peers.Options{TLS: conf("gateway", "g2")})
	testutil.Until(t, "they follow each other", following(1, a, b))
	want(t, b, true, false)
	a.Publish(false, []byte("ch"), []byte("x"))
	testutil.Until(t, "b hears", eb.is(func(e *ear) bool { return len(e.messages) == 1 }))

	c, _ := begin(t, r, peers.Options{TLS: conf("memnode", "m1")})
	testutil.Until(t, "all are known", func() bool { return a.Stats().Known == 2 && c.Stats().Known == 2 })
	id := []byte(strings.Repeat("i", 16))
	if _, err := r.Meet(t.Context(), meetRequest(id)); err != nil {
		t.Fatal(err)
	}
	for role, want := range map[string]codes.Code{"memnode": codes.PermissionDenied, "client": codes.PermissionDenied,
		"gateway": codes.OK} {
		s := follow(t, wire.Addr().String(), credentials.NewTLS(conf(role, "x")), &peerspb.FollowRequest{
			Id: id, Number: 1})
		if _, err := s.Recv(); status.Code(err) != want {
			t.Errorf("%s: %v", role, err)
		}
	}
	if s := c.Stats(); s.Following != 0 || s.Followers != 0 {
		t.Errorf("a memory node among gateways: %+v", s)
	}
}

func meetRequest(id []byte) *dirpb.MeetRequest {
	return &dirpb.MeetRequest{Id: id, Addr: "127.0.0.1:1"}
}
