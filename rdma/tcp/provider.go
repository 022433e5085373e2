// Package tcp is a provider that emulates one-sided verbs over TCP, optionally
// TLS, for machines without an RNIC. A QP is one connection; a small agent in
// the memory node executes whole doorbells against registered memory. Agents whose
// peers say little at a time share an event loop, each other one has a goroutine.
//
// It leaves what every provider shares (forms of WRs, counters, errors) to package rdma, and mapping memory
// to internal/mem. It leaves deciding who may connect to the Accept callback of its user. Read [Options] and
// [Open] first, then wire.go for the bytes. Read agent.go and loop.go for the side that executes, and qp.go
// for the side that posts.
//
// Concurrency and buffer ownership are those of package driver. The goroutine that waits for a
// CQ reads the replies itself (wait.go); while nobody does, a goroutine of the CQ
// does. Another one writes only while requests do not fit into the socket. Large
// WRITEs are sent from the caller's buffer and READs land in it directly.
//
// Batching replies until the input is drained follows Redis and memcached; the
// meaning of the verbs, ibv_post_send(3) on an RC QP.
package tcp

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Options configure a device. The zero value is ready for use, in clear.
type Options struct {
	// TLSServer, if set, is used by Listen for every connection; nothing in
	// clear is accepted then.
	TLSServer *tls.Config
	// TLSClient, if set, is used by Dial. An empty ServerName means the host
	// that is dialed.
	TLSClient *tls.Config
	// PeerTimeout is how long a peer may be silent while something is
	// outstanding before the connection counts as lost (RETRY_EXC_ERR).
	// Default 2 s, at least 100 ms.
	PeerTimeout time.Duration
	// HandshakeTimeout bounds a connection's way to its first doorbell, on both
	// sides; a Door that is given has its own for the passive side. Default 5 s.
	HandshakeTimeout time.Duration
	// Door decides which connections a listener takes; NewDoor makes it. Listeners may share it. Default: one of
	// NewDoor's for each device.
	Door *netsrv.Door
	// SocketBuffer is the size of the kernel's buffers for requests, bytes: the dialing side sends from one, the
	// listening side receives to one. Those for replies have half of it. The kernel caps it silently
	// (net.core.wmem_max, rmem_max). Default 1 MiB, at least 64 KiB.
	SocketBuffer int
	// Socket, if not nil, gives the listening socket for an address: what listen opens, or one that an earlier process
	// opened.
	Socket func(addr string, listen func() (net.Listener, error)) (net.Listener, error)
	// Events receives notifications; its functions must not block.
	Events Events
}

// Events are notifications of the passive side.
type Events struct {
	// PeerClosed is called once for every connection a Listener took from the
	// network, accepted or not, after it is gone.
	PeerClosed func(PeerClosed)
}

// PeerClosed says why a connection ended.
type PeerClosed struct {
	Remote string
	Reason Reason
	Err    error // nil for ReasonDeparted and ReasonFenced
}

func (e PeerClosed) String() string {
	if e.Err == nil {
		return fmt.Sprintf("%s %v", e.Remote, e.Reason)
	}
	return fmt.Sprintf("%s %v: %v", e.Remote, e.Reason, e.Err)
}

// Reason classifies the end of a connection on the passive side. The zero value
// is invalid.
type Reason uint8

const (
	// ReasonDeparted: the peer closed the connection.
	ReasonDeparted Reason = 1 + iota
	// ReasonLost: the network or the peer's machine failed.
	ReasonLost
	// ReasonHandshake: no valid hello came in time.
	ReasonHandshake
	// ReasonRefused: Accept refused.
	ReasonRefused
	// ReasonMalformed: the peer broke the protocol.
	ReasonMalformed
	// ReasonVerb: a verb was answered with an error status.
	ReasonVerb
	// ReasonFenced: this side fenced the peer.
	ReasonFenced
)

// NumReasons bounds arrays indexed by Reason.
const NumReasons = 8

func (r Reason) String() string {
	names := [NumReasons]string{"invalid", "departed", "lost", "handshake", "refused", "malformed", "verb", "fenced"}
	if r >= NumReasons {
		return fmt.Sprintf("Reason(%d)", uint8(r))
	}
	return names[r]
}

func (o *Options) ensureDefaults() {
	if o.PeerTimeout == 0 {
		o.PeerTimeout = 2 * time.Second
	}
	if o.HandshakeTimeout == 0 {
		o.HandshakeTimeout = defaultHandshakeTimeout
	}
	if o.SocketBuffer == 0 {
		o.SocketBuffer = 1 << 20
	}
	o.TLSServer, o.TLSClient = ownTLS(o.TLSServer), ownTLS(o.TLSClient)
}

// ownTLS copies c with what this protocol wants: TLS 1.3, and no small records
// at the start, since requests are not web pages.
func ownTLS(c *tls.Config) *tls.Config {
	if c == nil {
		return nil
	}
	return certs.With(c, func(c *tls.Config) {
		c.MinVersion = max(c.MinVersion, tls.VersionTLS13)
		c.DynamicRecordSizingDisabled = true
	})
}

// Validate joins every problem with the options as they are.
func (o Options) Validate() error {
	var errs []error
	if o.PeerTimeout != 0 && o.PeerTimeout < 100*time.Millisecond {
		errs = append(errs, fmt.Errorf("PeerTimeout is %v, want at least 100ms", o.PeerTimeout))
	}
	if o.HandshakeTimeout < 0 {
		errs = append(errs, fmt.Errorf("HandshakeTimeout is %v, want more than 0", o.HandshakeTimeout))
	}
	if o.SocketBuffer != 0 && o.SocketBuffer < 64<<10 {
		errs = append(errs, fmt.Errorf("SocketBuffer is %d bytes, want at least 65536", o.SocketBuffer))
	}
	return errors.Join(errs...)
}

// DefaultMaxConns is how many connections a memory node takes unless told otherwise. A client has one for each of its
// lanes to each memory node.
const DefaultMaxConns = 20_000

// NewDoor makes a Door for listeners of this provider. A connection that it refuses is told so, unless there
// is TLS. MaxConns and HandshakeTimeout are DefaultMaxConns and 5 s unless set.
func NewDoor(l netsrv.Limits) (*netsrv.Door, error) {
	l.MaxConns = cmp.Or(l.MaxConns, DefaultMaxConns)
	l.HandshakeTimeout = cmp.Or(l.HandshakeTimeout, defaultHandshakeTimeout)
	// or it is gone
	l.Refuse = func(c net.Conn) { _, _ = c.Write(appendWelcome(nil, statusRefused, "too many connections")) }
	return netsrv.NewDoor(l)
}

const defaultHandshakeTimeout = 5 * time.Second

// Open makes a device. It touches no network until Dial or Listen.
func Open(o Options) (driver.Device, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("tcp: %w", err)
	}
	o.ensureDefaults()
	if o.Door == nil {
		var err error
		if o.Door, err = NewDoor(netsrv.Limits{HandshakeTimeout: o.HandshakeTimeout}); err != nil {
			return nil, fmt.Errorf("tcp: %w", err)
		}
	}
	// As many processors are left to those who serve a connection each.
	d := &device{o: o, loops: runtime.GOMAXPROCS(0) / 2}
	d.mu.pds = make(map[*pd]struct{})
	d.mu.cqs = make(map[*cq]struct{})
	d.mu.qps = make(map[*qp]struct{})
	d.mu.agents = make(map[*agent]struct{})
	d.mu.listeners = make(map[*listener]struct{})
	return d, nil
}

type device struct {
	o     Options
	loops int // of each listener; 0: every connection is served by its goroutine
	mu    struct {
		sync.Mutex
		closed    bool
		pds       map[*pd]struct{}
		cqs       map[*cq]struct{}
		qps       map[*qp]struct{}
		agents    map[*agent]struct{}
		listeners map[*listener]struct{}
		lastLKey  uint64
		lastQP    uint32
		watch     *time.Timer // runs while there are QPs
	}
}

var _ driver.Device = (*device)(nil)

func (d *device) Caps() driver.Caps {
	return driver.Caps{
		AtomicScope:    driver.AtomicCPU,
		AtomicThenRead: true,
		StopAtMiss:     true,
		TearBytes:      8,
		MaxInline:      maxInline,
		MaxMsg:         maxMsg,
		MaxSendWR:      maxSendWR,
		WholeBytes:     wholeBytes,
		MaxSGE:         2,
		AnyMemory:      true,
		Sums:           true,
		EnforcesRights: true,
		ChoosesKeys:    true,
		Functions:      true,
		SharedWire:     true,
	}
}

func (d *device) Alloc(size int64, o driver.AllocOptions) (*driver.Memory, error) {
	return mem.Alloc(size, o)
}

func (d *device) AllocPD() (driver.PD, error) {
	p := &pd{d: d}
	p.keys.Store(&keyTable{byRKey: map[uint64]*mr{}, byLKey: map[uint64]*mr{}})
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil, driver.ErrClosed
	}
	d.mu.pds[p] = struct{}{}
	return p, nil
}

func (d *device) CreateCQ(depth int) (driver.CQ, error) {
	if depth <= 0 || depth > 1<<24 {
		return nil, fmt.Errorf("depth %d, want 1..%d", depth, 1<<24)
	}
	c := newCQ(d, depth)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil, driver.ErrClosed
	}
	d.mu.cqs[c] = struct{}{}
	return c, nil
}

// Close reports what is still open and leaves it open.
func (d *device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.mu.pds)+len(d.mu.cqs)+len(d.mu.qps)+len(d.mu.listeners) > 0 {
		return fmt.Errorf("tcp: close device: %d PDs, %d CQs, %d QPs and %d listeners remain",
			len(d.mu.pds), len(d.mu.cqs), len(d.mu.qps), len(d.mu.listeners))
	}
	d.mu.closed = true
	return nil
}

// watchLocked keeps the timer that looks for silent peers running while there
// are QPs to look at.
func (d *device) watchLocked() {
	if len(d.mu.qps) > 0 && d.mu.watch == nil {
		d.mu.watch = time.AfterFunc(d.o.PeerTimeout/watchTicks, d.watchTick)
	}
}

// watchTicks is how often in one PeerTimeout QPs are looked at.
const watchTicks = 4

func (d *device) watchTick() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for q := range d.mu.qps {
		q.watch()
	}
	for c := range d.mu.cqs {
		c.tick()
	}
	d.mu.watch = nil
	d.watchLocked()
}
