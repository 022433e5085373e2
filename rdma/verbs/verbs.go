// Package verbs is the provider for RNICs: libibverbs, on InfiniBand and RoCE adapters and on Soft-RoCE. The
// adapter executes READ, WRITE and the atomics. Memory nodes' CPUs take part in connecting, fencing and
// nothing else, unless the adapter has no atomics (see [AtomicsAgent]).
//
// It is built with the tag verbs and cgo, and needs libibverbs.so.1 at run time
// only: one binary serves machines with and without it. Without the tag, the
// library or a usable adapter, [Open] fails with [ErrUnavailable] and says what
// is missing.
//
// It leaves deciding who may connect to the Accept callback of its user, and mapping memory to internal/mem.
// Read [Options] and [Open] first, then qp.go for the side that posts. Read cm.go for how a connection comes
// about, and shim.h for what crosses into C.
//
// Concurrency and buffer ownership are those of package driver. Every CQ has a goroutine that sleeps in the
// runtime's poller until the adapter raises a completion event. The adapter raises one only for a CQ that
// somebody waits for. Every connection has a goroutine, at either end, that watches its control channel.
//
// Names and semantics are rdma-core's (ibv_post_send(3), ibv_modify_qp(3),
// rdma(7)); spinning before sleeping follows eRPC and HERD.
package verbs

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

// ErrUnavailable means that this process can use no RDMA adapter; the error that
// wraps it says why.
var ErrUnavailable = errors.New("verbs unavailable")

// Options configure a device. The zero value chooses everything itself.
type Options struct {
	// Device is NAME, NAME/PORT or NAME/PORT/GIDINDEX, as ibv_devinfo shows
	// them. [Choose] fills in the parts that are left out.
	Device string
	// Near is an address of this machine ("10.0.0.1"): an adapter that has it as a
	// GID is preferred. Ignored when Device is set.
	Near string
	// MTU is the path MTU, bytes: 256, 512, 1024, 2048 or 4096. Default: the port's.
	MTU int
	// Atomics says who executes atomics on this side's memory. Default
	// AtomicsAuto.
	Atomics Atomics
	// Connect says how queue pairs are connected. Default ConnectAuto.
	Connect Connect
	// PeerTimeout is about how long a peer may leave a packet unanswered before
	// the connection counts as lost (RETRY_EXC_ERR). Default 500 ms, 50 ms to 60 s.
	PeerTimeout time.Duration
	// Fabric is what the network asks for.
	Fabric Fabric
	// HandshakeTimeout bounds connecting, on both sides; a Door that is given has its own for the
	// passive side. Default 5 s.
	HandshakeTimeout time.Duration
	// Door decides which connections a listener takes; NewDoor makes it. Listeners may share it. Default: one of
	// NewDoor's for each device.
	Door *netsrv.Door
	// Socket, if not nil, gives the listening socket for an address: what listen opens, or one that an earlier process
	// listened with.
	Socket func(addr string, listen func() (net.Listener, error)) (net.Listener, error)
	// TLSServer and TLSClient protect the control channel, over which
	// connections are set up. The adapter's data is in clear in any case.
	TLSServer, TLSClient *tls.Config
	// Logger receives the choice of adapter, and connections that fail. Default:
	// discards.
	Logger *slog.Logger
}

const (
	defaultHandshakeTimeout = 5 * time.Second
	// DefaultMaxConns is how many connections all listeners of a device have at most; its queue pairs may be fewer.
	DefaultMaxConns = 20_000
)

// NewDoor makes a Door for listeners of this provider. A connection that it refuses is told so, unless there
// is TLS. MaxConns and HandshakeTimeout are DefaultMaxConns and 5 s unless set.
func NewDoor(l netsrv.Limits) (*netsrv.Door, error) {
	l.MaxConns = cmp.Or(l.MaxConns, DefaultMaxConns)
	l.HandshakeTimeout = cmp.Or(l.HandshakeTimeout, defaultHandshakeTimeout)
	l.Refuse = func(c net.Conn) {
		w := welcome{refused: true}
		_, _ = c.Write(w.append(nil, "too many connections")) // or it is gone
	}
	return netsrv.NewDoor(l)
}

// Atomics says who executes the atomics on registered memory. The zero value is
// AtomicsAuto.
type Atomics uint8

const (
	// AtomicsAuto: the adapter if it has atomics and passes a test of them when it
	// is opened, else the agent.
	AtomicsAuto Atomics = iota
	// AtomicsNIC: the adapter; Open fails if it cannot.
	AtomicsNIC
	// AtomicsAgent: the initiator sends a message and an agent, a goroutine at the
	// target, answers it with a CPU atomic. For adapters without atomics, and for
	// memory whose atomic domain is the CPUs'.
	AtomicsAgent
)

func (a Atomics) String() string {
	return [...]string{"auto", "nic", "agent", "invalid"}[min(int(a), 3)]
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if _, err := parseSelector(o.Device); err != nil {
		errs = append(errs, err)
	}
	if o.Near != "" {
		if _, err := netip.ParseAddr(o.Near); err != nil {
			bad("Near %q: want an IP address", o.Near)
		}
	}
	if o.MTU != 0 && mtuCode(o.MTU) == 0 {
		bad("MTU is %d bytes, want 256, 512, 1024, 2048 or 4096", o.MTU)
	}
	if o.Atomics > AtomicsAgent {
		bad("Atomics is %d, want AtomicsAuto, AtomicsNIC or AtomicsAgent", o.Atomics)
	}
	if o.Connect > ConnectCM {
		bad("Connect is %d, want ConnectAuto, ConnectTCP or ConnectCM", o.Connect)
	}
	if o.PeerTimeout != 0 && (o.PeerTimeout < 50*time.Millisecond || o.PeerTimeout > time.Minute) {
		bad("PeerTimeout is %v, want 50ms to 1m", o.PeerTimeout)
	}
	if err := o.Fabric.validate(); err != nil {
		errs = append(errs, err)
	}
	if o.HandshakeTimeout < 0 {
		bad("HandshakeTimeout is %v, want more than 0", o.HandshakeTimeout)
	}
	return errors.Join(errs...)
}

// DeviceInfo describes an adapter.
type DeviceInfo struct {
	Name      string // "mlx5_0", "rxe0"
	Transport string // "InfiniBand" (RoCE too) or "iWARP"
	Firmware  string
	// Atomics are the adapter's own.
	Atomics driver.AtomicScope
	// MemoryWindows is "none", "type 1", "type 2" or "type 1 and 2".
	MemoryWindows string
	MaxQP         int
	MaxQPWR       int // WRs of one QP
	MaxSGE        int // SGEs of one WR
	MaxSGERead    int // of one READ; 0: the adapter does not say
	MaxCQE        int
	MaxMR         int
	MaxMRBytes    uint64
	MaxQPRdAtom   int // READs and atomics under way on one QP, as target
	MaxInitRdAtom int // as initiator
	Ports         []PortInfo
	// Err is why the adapter could not be asked for more than its name, or nil.
	Err error
}

// PortInfo describes one port of an adapter.
type PortInfo struct {
	Number      int    // from 1
	State       string // "ACTIVE", "DOWN", …
	LinkLayer   string // "Ethernet", "InfiniBand"
	MTU         int    // active, bytes
	MaxMTU      int    // bytes
	MaxMsgBytes int    // longest message
	LID         int    // InfiniBand
	Speed       string // "100 Gb/sec (4X EDR)", or "" if unknown
	GIDs        []GIDInfo
	// Addrs are an iWARP port's: those of its network interface that are not link-local.
	Addrs []netip.Addr
}

// GIDInfo is one entry of a port's GID table that is in use.
type GIDInfo struct {
	Index  int
	GID    netip.Addr // of 16 bytes
	Type   GIDType
	Netdev string // "" if unknown
}

// GIDType says how packets of a GID are framed. The zero value is unknown.
type GIDType uint8

const (
	GIDInfiniBand GIDType = 1 + iota
	GIDRoCEv1
	GIDRoCEv2
)

func (t GIDType) String() string {
	return [...]string{"unknown", "IB", "RoCE v1", "RoCE v2"}[t&3]
}

// selector is Options.Device, taken apart. 0 and -1 mean: choose.
type selector struct {
	name string
	port int
	gid  int
}

func parseSelector(s string) (selector, error) {
	sel := selector{gid: -1}
	if s == "" {
		return sel, nil
	}
	f := strings.Split(s, "/")
	sel.name = f[0]
	var err error
	if len(f) > 1 {
		sel.port, err = strconv.Atoi(f[1])
	}
	if len(f) > 2 && err == nil {
		sel.gid, err = strconv.Atoi(f[2])
	}
	if err != nil || f[0] == "" || len(f) > 3 || len(f) > 1 && (sel.port < 1 || sel.port > 255) || len(f) > 2 &&
		(sel.gid < 0 || sel.gid > 65535) {
		return selector{}, fmt.Errorf("device %q: want NAME, NAME/PORT or NAME/PORT/GIDINDEX, such as mlx5_0/1/3", s)
	}
	return sel, nil
}

// mtuCode is the enum ibv_mtu of a size in bytes, or 0.
func mtuCode(bytes int) uint8 {
	for code := uint8(1); code <= 5; code++ {
		if mtuBytes(code) == bytes {
			return code
		}
	}
	return 0
}

func mtuBytes(code uint8) int {
	if code < 1 || code > 5 {
		return 0
	}
	return 128 << code
}
