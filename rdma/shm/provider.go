// Package shm is the provider for clients on the memory node's own machine. Registered memory is a memfd that
// the dialer maps. A verb is the dialer's own loads, stores and CPU atomics. Nobody else runs: no system
// call, no context switch, no cycle of the memory node. A long WRITE to memory that this process has not written is
// the exception: the kernel is asked to map it.
//
// It leaves argument checks and counters to package rdma, and mapping memory to internal/mem. Start with
// [Device], [QP.PostSend] and, for what the two processes share, cell and mrTable. Device, PD, MR and
// Listener methods may be called concurrently. A CQ and its QPs belong to one goroutine at a time. Other
// goroutines may use only CQ.Ready, QP.State and QP.Close. Local buffers are free again when PostSend
// returns.
//
// Verbs execute inside PostSend, so their WCs are there when it returns (Caps.Synchronous). A QP's control
// cell says whether its process is inside PostSend. The fence is barring the cell and seeing it idle, or
// seeing the process dead (Caps.SelfFencing). The handshake between "I am inside, am I barred?" and "you are
// barred, are you inside?" is Dekker's. The per-MR generations follow the type-2 memory windows' key halves
// (IBTA vol. 1, §10.6.7).
package shm

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

var (
	_ driver.Device     = (*Device)(nil)
	_ driver.PD         = (*PD)(nil)
	_ driver.KeyChooser = (*PD)(nil)
	_ driver.MR         = (*MR)(nil)
	_ driver.CQ         = (*CQ)(nil)
	_ driver.QP         = (*QP)(nil)
	_ driver.Listener   = (*Listener)(nil)
	_ driver.Peer       = (*peer)(nil)
)

const (
	maxMsg    = 1 << 30
	maxInline = 1024
	maxSendWR = 4096
	// wholeBytes is Caps.WholeBytes; see the loops of cell.go, which do better.
	wholeBytes = driver.LeastWholeBytes
)

// Errors of the control calls. All mean that the call had no effect, except
// ErrUnconfirmed.
var (
	// ErrForeign means an argument was made by another Device.
	ErrForeign = errors.New("object of another device")
	// ErrInUse means objects made from this one are still there.
	ErrInUse = errors.New("still in use")
	// ErrNotShared means remote rights over memory that is not a memfd.
	ErrNotShared = errors.New("remote access needs memory allocated with Shared")
	// ErrKeyInUse means that an rkey names another MR of the device, or nothing.
	ErrKeyInUse = errors.New("rkey cannot be used")
	// ErrProtocol means the other end of the socket broke the handshake's rules.
	ErrProtocol = errors.New("shm protocol violation")
	// ErrVersion means the other end speaks another version.
	ErrVersion = errors.New("shm protocol version differs")
	// ErrUnconfirmed means keys are revoked and QPs barred, but a process was still inside a verb when the wait
	// ended. The verb that it began may yet land.
	ErrUnconfirmed = errors.New("a peer is still inside a verb")
)

// Options configure a Device. The zero value is ready to use.
type Options struct {
	// RequestTimeout bounds each exchange with the peer's process. The passive side's handshake is one; a Door that is
	// given has its own bound for that. The first use of rkeys on a QP is another, for which a PostSend waits so long
	// in all. Default 2 s.
	RequestTimeout time.Duration
	// Door decides which connections a listener takes; NewDoor makes it. Listeners may share it. Default: one of
	// NewDoor's for each device.
	Door *netsrv.Door
	// ConfirmTimeout bounds how long Deregister and Listener.Close wait for
	// peers to leave a verb they are inside. Default 5 s.
	ConfirmTimeout time.Duration
	// Cells, if not nil, holds the control cells of connections beyond this process. The next process can so
	// tell what their dialers may still do (AdoptCell).
	Cells Cells
	// Socket, if not nil, gives the listening socket for an address: what listen opens, or one that an earlier process
	// opened.
	Socket func(addr string, listen func() (net.Listener, error)) (net.Listener, error)
}

func (o *Options) ensureDefaults() {
	if o.RequestTimeout == 0 {
		o.RequestTimeout = defaultRequestTimeout
	}
	if o.ConfirmTimeout == 0 {
		o.ConfirmTimeout = 5 * time.Second
	}
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var errs []error
	if o.RequestTimeout < 0 {
		errs = append(errs, fmt.Errorf("RequestTimeout is %v, want > 0", o.RequestTimeout))
	}
	if o.ConfirmTimeout < 0 {
		errs = append(errs, fmt.Errorf("ConfirmTimeout is %v, want > 0", o.ConfirmTimeout))
	}
	return errors.Join(errs...)
}

// Device is one opened instance: the memory it registers, and what it maps of
// others. See driver.Device.
type Device struct {
	o Options
	// lastNum is the last QP number given out; numbers are unique here.
	lastNum atomic.Uint32
	// deregs counts Deregister calls. A QP that finds it changed drops its
	// cache of local MRs, so that the hot path checks one word for all of them.
	deregs atomic.Uint64

	mu struct {
		sync.Mutex
		closed    bool
		pds       int
		cqs       int
		qps       int
		listeners int
		lastLKey  uint64
		lkeys     map[uint64]*MR
		rkeys     map[uint64]*MR
		table     *mrTable // nil until the first Listen or remote MR
		maps      map[mapKey]*mapping
	}
}

const (
	defaultRequestTimeout = 2 * time.Second
	// DefaultMaxConns is how many connections all listeners of a device have at most, each with three
	// descriptors.
	DefaultMaxConns = 20_000
)

// NewDoor makes a Door for listeners of this provider: a process that it refuses is told so, if it has said hello by
// then. MaxConns and HandshakeTimeout are DefaultMaxConns and 2 s unless set; all callers are of this machine, so
// MaxPerAddr says nothing.
func NewDoor(l netsrv.Limits) (*netsrv.Door, error) {
	l.MaxConns = cmp.Or(l.MaxConns, DefaultMaxConns)
	l.HandshakeTimeout = cmp.Or(l.HandshakeTimeout, defaultRequestTimeout)
	l.Refuse = refuse
	return netsrv.NewDoor(l)
}

// Open makes a Device. It needs no hardware and touches nothing.
func Open(o Options) (*Device, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("shm: %w", err)
	}
	o.ensureDefaults()
	if o.Door == nil {
		var err error
		if o.Door, err = NewDoor(netsrv.Limits{HandshakeTimeout: o.RequestTimeout}); err != nil {
			return nil, fmt.Errorf("shm: %w", err)
		}
	}
	d := &Device{o: o}
	d.mu.lkeys = make(map[uint64]*MR)
	d.mu.rkeys = make(map[uint64]*MR)
	d.mu.maps = make(map[mapKey]*mapping)
	return d, nil
}

// Caps implements driver.Device.
func (d *Device) Caps() driver.Caps {
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
		Synchronous:    true,
		SelfFencing:    true,
		EnforcesRights: false,
		ChoosesKeys:    true,
		Maps:           true,
	}
}

// Alloc implements driver.Device. MRs with remote rights need o.Shared.
func (d *Device) Alloc(size int64, o driver.AllocOptions) (*driver.Memory, error) {
	return mem.Alloc(size, o)
}

// AllocPD implements driver.Device.
func (d *Device) AllocPD() (driver.PD, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil, driver.ErrClosed
	}
	d.mu.pds++
	return &PD{d: d, peers: make(map[*peer]struct{})}, nil
}

// CreateCQ implements driver.Device.
func (d *Device) CreateCQ(depth int) (driver.CQ, error) {
	if depth <= 0 {
		return nil, fmt.Errorf("depth is %d WCs, want > 0", depth)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil, driver.ErrClosed
	}
	d.mu.cqs++
	return newCQ(d, depth), nil
}

// Close implements driver.Device.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil
	}
	if n := len(d.mu.lkeys); n+d.mu.pds+d.mu.cqs+d.mu.qps+d.mu.listeners > 0 {
		return fmt.Errorf("shm: close device: %w: %d MRs, %d PDs, %d CQs, %d QPs, %d listeners",
			ErrInUse, n, d.mu.pds, d.mu.cqs, d.mu.qps, d.mu.listeners)
	}
	d.mu.closed = true
	if d.mu.table != nil {
		return d.mu.table.mem.Free()
	}
	return nil
}

// mapKey tells one mapping of a foreign memfd from another.
type mapKey struct {
	dev, ino uint64
	writable bool
}

// mapping is a foreign memfd mapped here, once for all the QPs and MRs that
// need it. refs is guarded by Device.mu.
type mapping struct {
	key   mapKey
	bytes []byte
	refs  int
	// populated has a bit for each granule that populate has seen.
	populated []atomic.Uint64
	fd        int // for reading, see Map; -1: there is none. Guarded likewise
}

// mapLocked maps size bytes of fd, or finds the mapping that does. It does not
// take over fd; the caller gives the mapping back once with unmapLocked.
func (d *Device) mapLocked(fd int, size int64, writable bool) (*mapping, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	key := mapKey{dev: st.Dev, ino: st.Ino, writable: writable}
	if m := d.mu.maps[key]; m != nil {
		if int64(len(m.bytes)) < size {
			return nil, fmt.Errorf("%w: memfd of %d bytes announced as %d", ErrProtocol, len(m.bytes), size)
		}
		m.refs++
		return m, nil
	}
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	b, err := mem.Map(fd, size, prot)
	if err != nil {
		return nil, err
	}
	m := &mapping{key: key, bytes: b, refs: 1, populated: granules(len(b)), fd: -1}
	d.mu.maps[key] = m
	return m, nil
}

func (d *Device) unmapLocked(m *mapping) {
	if m.refs--; m.refs == 0 {
		delete(d.mu.maps, m.key)
		_ = mem.Unmap(m.bytes)
		if m.fd >= 0 {
			_ = unix.Close(m.fd)
		}
	}
}
