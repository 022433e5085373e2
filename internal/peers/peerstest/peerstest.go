// Package peerstest has a directory for tests of gateways that meet, and connections between them that can be cut.
package peerstest

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/peers"
)

// Room is where gateways meet, as the directory's leader is. Its methods may be called concurrently.
type Room struct {
	mu      sync.Mutex
	news    uint64
	all     []*dirpb.PeerGateway
	trouble map[string]string // by id
	changed chan struct{}
}

// NewRoom makes an empty one.
func NewRoom() *Room {
	return &Room{news: 1, trouble: make(map[string]string), changed: make(chan struct{})}
}

// Troubles are what gateways have told of themselves last, but for those that said nothing.
func (r *Room) Troubles() (all []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.trouble {
		if s != "" {
			all = append(all, s)
		}
	}
	return all
}

func (r *Room) changedLocked() {
	r.news++
	close(r.changed)
	r.changed = make(chan struct{})
}

// Meet is peers.Options.Meet.
func (r *Room) Meet(ctx context.Context, q *dirpb.MeetRequest) (*dirpb.MeetReply, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	isIt := func(g *dirpb.PeerGateway) bool { return string(g.Id) == string(q.Id) }
	r.trouble[string(q.Id)] = q.Trouble
	if q.Leaves {
		delete(r.trouble, string(q.Id))
		r.all = slices.DeleteFunc(r.all, isIt)
		r.changedLocked()
		return &dirpb.MeetReply{}, nil
	}
	if !slices.ContainsFunc(r.all, isIt) {
		r.all = append(r.all, &dirpb.PeerGateway{Id: q.Id, Addr: q.Addr, HostId: q.HostId})
		r.changedLocked()
	}
	for r.news == q.News {
		changed := r.changed
		r.mu.Unlock()
		t := time.NewTimer(time.Duration(q.WaitMillis) * time.Millisecond)
		select {
		case <-changed:
		case <-t.C:
		case <-ctx.Done():
		}
		late := !t.Stop() || ctx.Err() != nil
		r.mu.Lock()
		if late {
			break
		}
	}
	return &dirpb.MeetReply{News: r.news, Gateways: slices.DeleteFunc(slices.Clone(r.all), isIt)}, ctx.Err()
}

// Wire is a listener whose connections can be cut, as by a network.
type Wire struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

// Listen listens on this machine.
func Listen(t testing.TB) *Wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return &Wire{Listener: l}
}

// Accept is net.Listener's.
func (w *Wire) Accept() (net.Conn, error) {
	c, err := w.Listener.Accept()
	if err == nil {
		w.mu.Lock()
		w.conns = append(w.conns, c)
		w.mu.Unlock()
	}
	return c, err
}

// Cut breaks the connections that there are.
func (w *Wire) Cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		_ = c.Close() // it may have ended
	}
	w.conns = nil
}

// New makes Peers that meet in the room, closed with the test.
func (r *Room) New(t testing.TB, o peers.Options) *peers.Peers {
	t.Helper()
	o.Meet = r.Meet
	if o.Listener == nil {
		o.Listener = Listen(t)
	}
	p, err := peers.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
