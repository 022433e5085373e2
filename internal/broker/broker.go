// Package broker serves programs of this machine that are not written in Go. Each talks to it through rings in shared
// memory. It has what a Go program has of package client: one-sided READs into its own memory, and a verdict for each
// key.
//
// The package knows no protocol of the store: it takes submissions from rings, gives them to a client.Client, and
// completes them. Package ring has the bytes. Programs are hostile. They may write to their ring and arena at any
// time, hand over any descriptor, and die anywhere.
package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
)

// Limits bound what the programs of one socket may use. 0 is the default.
type Limits struct {
	Clients     int           // connections at a time; default 64
	ArenaBytes  int64         // shared memory of all of them, bytes; default 16 GiB
	Depth       uint32        // entries of each queue at most, a power of two; default ring.MaxDepth
	HelloTime   time.Duration // until the first message; default 2 s
	Timeout     time.Duration // of an operation that names none; default 10 s
	LongTimeout time.Duration // the longest that one may name; default a minute
	// ViewBytes is how much Views that are not over may show together, bytes. 0: there are none. A program with a View
	// can read all of the region that the value lies in.
	ViewBytes  int64
	Views      int           // how many these may be; default 64
	RegionTime time.Duration // until a region in which a program has no View is taken back; default 10 s
	Pins       int           // pins whose time is not over, also of keys that were unpinned; default 1,048,576
}

func (l *Limits) fill() {
	def(&l.Clients, 64)
	def(&l.ArenaBytes, 16<<30)
	def(&l.Depth, ring.MaxDepth)
	def(&l.HelloTime, 2*time.Second)
	def(&l.Timeout, 10*time.Second)
	def(&l.LongTimeout, time.Minute)
	def(&l.Views, 64)
	def(&l.RegionTime, 10*time.Second)
	def(&l.Pins, 1<<20)
}

func def[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// Socket is a tenant: who may connect there, and what they reach.
type Socket struct {
	Name string // shown to operators
	// Listener is of network "unixpacket". Serve closes it.
	Listener *net.UnixListener
	// Namespaces are what its programs may name, each with a client whose rights are theirs. They stay the caller's,
	// who closes them after Close.
	Namespaces map[string]*client.Client
	Default    string   // of Namespaces, for programs that name none
	UIDs       []uint32 // who may connect; nil: the broker's own user, and root
	Secret     string   // that programs say; "": none
	Limits     Limits
}

// Broker serves Sockets. Its methods may be called concurrently.
type Broker struct {
	log     *slog.Logger
	self    int // a pidfd of this process
	threads threads
	tenants []*tenant
	wg      sync.WaitGroup
	done    chan struct{}
	once    sync.Once
}

// tenant is a Socket that is served.
type tenant struct {
	Socket
	b     *Broker
	stats Counters
	// copies bounds the PUTs that are copied first, at a time: each may be as long as a value.
	copies  chan struct{}
	streams chan struct{} // has one for each
	pins    pins
	mu      struct {
		sync.Mutex
		conns map[*conn]struct{}
		arena int64 // bytes
		views int
		shown int64 // bytes of views
	}
}

// Counters are a Socket's. They only grow, but those of the first two lines, which are of now.
type Counters struct {
	Clients, ArenaBytes, Queues atomic.Int64
	Views, ViewBytes            atomic.Int64
	Accepted                    atomic.Uint64
	Refused                     atomic.Uint64 // connections
	Broken                      atomic.Uint64 // connections that ended for a broken protocol
	Batches                     atomic.Uint64 // groups of operations that shared round trips
	Bytes                       atomic.Uint64 // of values, both ways
	Lapsed                      atomic.Uint64 // Views that the program did not release in time
	Ops                         [ring.OpPutAbort + 1]atomic.Uint64
	Codes                       [ring.System + 1]atomic.Uint64 // of completions
}

// New makes a Broker, which Serve starts.
func New(sockets []Socket, log *slog.Logger) (*Broker, error) {
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return nil, fmt.Errorf("broker: pidfd_open: %w", err)
	}
	b := &Broker{log: log, self: self, done: make(chan struct{})}
	b.threads.left.Store(maxThreads)
	for _, s := range sockets {
		s.Limits.fill()
		if s.UIDs == nil {
			s.UIDs = []uint32{0, uint32(os.Geteuid())}
		}
		t := &tenant{Socket: s, b: b, copies: make(chan struct{}, 4),
			streams: make(chan struct{}, maxSocketStreams)}
		t.mu.conns = map[*conn]struct{}{}
		b.tenants = append(b.tenants, t)
	}
	return b, nil
}

// Serve accepts connections until Close. The error of a listener that fails is logged.
func (b *Broker) Serve() {
	for _, t := range b.tenants {
		b.wg.Go(t.accept)
	}
}

// Close ends all connections, and returns when nothing of them is left.
func (b *Broker) Close() error {
	var errs []error
	b.once.Do(func() {
		close(b.done)
		for _, t := range b.tenants {
			if err := t.Listener.Close(); !errors.Is(err, net.ErrClosed) {
				errs = append(errs, err)
			}
			t.mu.Lock()
			for c := range t.mu.conns {
				c.end(errClosing)
			}
			t.mu.Unlock()
		}
		b.wg.Wait()
		errs = append(errs, unix.Close(b.self))
	})
	return errors.Join(errs...)
}

var errClosing = errors.New("the broker stops")

// accept has a goroutine for each connection.
func (t *tenant) accept() {
	for {
		nc, err := t.Listener.AcceptUnix()
		if err != nil {
			select {
			case <-t.b.done:
				return
			default:
			}
			if errors.Is(err, net.ErrClosed) {
				t.b.log.Error("listener of the broker is closed", "socket", t.Name)
				return
			}
			t.b.log.Warn("accept", "socket", t.Name, "err", err)
			select {
			case <-t.b.done:
				return
			case <-time.After(100 * time.Millisecond): // too many files, mostly
			}
			continue
		}
		c := &conn{t: t, nc: nc}
		c.ctx, c.cancel = context.WithCancelCause(context.Background())
		if !t.add(c) {
			t.stats.Refused.Add(1)
			_ = nc.Close()
			continue
		}
		t.b.wg.Go(c.serve)
	}
}

// maxLate is how many connections beyond a socket's limit may be there, to hear of it.
const maxLate = 16

// add makes c one of the tenant's, if there may be another.
func (t *tenant) add(c *conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-t.b.done:
		return false
	default:
	}
	if len(t.mu.conns) >= t.Limits.Clients+maxLate {
		return false
	}
	c.late = len(t.mu.conns) >= t.Limits.Clients
	t.mu.conns[c] = struct{}{}
	t.stats.Clients.Add(1)
	t.stats.Accepted.Add(1)
	return true
}

func (t *tenant) remove(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.conns, c)
	t.stats.Clients.Add(-1)
}

// takeArena counts n bytes of shared memory; negative ones give back.
func (t *tenant) takeArena(n int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n > 0 && n > t.Limits.ArenaBytes-t.mu.arena {
		return fmt.Errorf("%d bytes of shared memory: this socket's programs have %d of %d", n, t.mu.arena,
			t.Limits.ArenaBytes)
	}
	t.mu.arena += n
	t.stats.ArenaBytes.Store(t.mu.arena)
	return nil
}

// Client is what Clients tells of a connection.
type Client struct {
	Socket, Name, Namespace string
	PID                     int32
	UID                     uint32
	ArenaBytes              int64
	Queues, Views           int
	Ops                     uint64
	Since                   time.Time
}

// Clients are the connections that serve.
func (b *Broker) Clients() (all []Client) {
	for _, t := range b.tenants {
		t.mu.Lock()
		conns := slices.Collect(maps.Keys(t.mu.conns))
		t.mu.Unlock()
		for _, c := range conns { // without the lock: whoever ends a View takes it last
			if x, ok := c.describe(); ok {
				all = append(all, x)
			}
		}
	}
	return all
}

// Each calls f with the counters of every Socket.
func (b *Broker) Each(f func(socket string, c *Counters)) {
	for _, t := range b.tenants {
		f(t.Name, &t.stats)
	}
}

// maxThreads is how many queues wait in a thread of their own, which is faster than Go's poller. Others use that.
const maxThreads = 64

type threads struct{ left atomic.Int32 }

// takeThread reports whether the caller may wait in a thread; leaveThread gives that back.
func (t *threads) takeThread() bool {
	if t.left.Add(-1) >= 0 {
		return true
	}
	t.left.Add(1)
	return false
}

func (t *threads) leaveThread() { t.left.Add(1) }
