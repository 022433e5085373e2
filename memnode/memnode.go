// Package memnode lends a machine's memory to the store. It makes the regions that the directory asks for,
// registers them with every provider, and publishes their rkeys. Then it stays off the data path: clients
// READ, WRITE and CAS the regions without waking this code.
//
// It leaves moving bytes to the providers, placement to the directory, and the
// meaning of a region's bytes, but for the header page, to clients.
//
// Start with [Node], then accept (who may connect) and region. A Node's methods may be called concurrently. A
// region's bytes belong to clients from its publication until it has been deregistered with every provider.
// Deregistration on a reset or Close comes after every peer has been fenced. Devices and the directory client
// stay their opener's; Close releases all that was made of them.
//
// Fencing before anything is reused follows Mu (OSDI'20): a lease alone fences
// nothing.
package memnode

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

var (
	// ErrClosed means that the node was closed.
	ErrClosed = errors.New("memory node closed")
	// ErrCapacity means that a region does not fit into what the node lends.
	ErrCapacity = errors.New("over capacity")
	// ErrNotRegistered refuses connections while the directory does not know
	// this incarnation.
	ErrNotRegistered = errors.New("memory node is not registered with the directory")
	// ErrEnded refuses a session that has closed, is being fenced or was fenced.
	ErrEnded = errors.New("the session has ended")
)

// Directory is what a node needs of the directory; *dirclient.Client is one.
// Call runs an idempotent request against the leader until ctx ends.
type Directory interface {
	Call(ctx context.Context, fn func(context.Context, dirpb.DirectoryClient) error) error
}

// Options configure a Node.
type Options struct {
	// Name is the node's own, stable across restarts. Required.
	Name string
	// CapacityBytes is how much memory the node lends. Required.
	CapacityBytes int64
	// HugePageBytes is 0 for normal pages, or 2<<20 or 1<<30.
	HugePageBytes int
	// Lock pins the regions in memory.
	Lock bool
	// Populate takes all pages of a region when it is made, before anybody is told of it. Otherwise each is taken, over
	// shm in the client's name, when it is first used.
	Populate bool
	// Devices serve the regions, each at its own address: at least one. Several of one provider, which may not be shm,
	// are as many ways to the same memory. A device whose adapter executes atomics goes with other ports of that
	// adapter, and with tcp, which then leaves its atomics to that adapter.
	Devices []DeviceListen
	// Directory is asked for work. Required.
	Directory Directory
	// Domain is the failure domain's label; may be empty.
	Domain string
	// HostID names the machine to clients that could share its memory. Default:
	// hostid.ID().
	HostID string
	// Version of the program, for people; may be empty.
	Version string
	// Control is where its keeper listens on this machine for operators, to tell them; may be empty.
	Control string
	// Logger gets what an operator needs to know. Default: discards.
	Logger *slog.Logger
	// Identities says how the certificates of peers name their owners, on devices with TLS. The zero
	// value takes SPIFFE ids of any trust domain.
	Identities identity.Mapping
	// Keeper, if not nil, holds the regions beyond this process. The next process of this node takes them over,
	// and clients notice the loss of their connections alone.
	Keeper Keeper
	// Door names the peers of earlier processes of this node that may still be about to write to its memory, from which
	// they are barred. It is called, until it names none, before memory that the Keeper held is used. Nil: there are
	// none.
	Door func() (inside []string, err error)
	// Restart, if there is a Keeper, is called once when this process is to be replaced by another one. It must not
	// block.
	Restart func()
	// MayRestart, if not nil, is asked before Restart, with the bytes of the regions that are here. An error
	// says why the next process could not serve them, and then this one stays.
	MayRestart func(regionBytes int64) error
	// FenceTimeout bounds one attempt to fence one connection. Default 1 s.
	FenceTimeout time.Duration
}

// DeviceListen is one provider's way in.
type DeviceListen struct {
	Device *rdma.Device
	// Addr to listen on, in the provider's own syntax.
	Addr string
	// Advertise is what clients dial when that is not the listener's address:
	// a host, which takes the listener's port, or all of an address.
	Advertise string
}

func (o *Options) ensureDefaults() {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.HostID == "" {
		o.HostID = hostid.ID()
	}
	if o.FenceTimeout == 0 {
		o.FenceTimeout = time.Second
	}
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if o.Name == "" {
		bad("Name is empty")
	}
	if o.CapacityBytes <= 0 || o.CapacityBytes > 1<<50 {
		bad("CapacityBytes is %d, want 1..2^50 bytes", o.CapacityBytes)
	}
	if o.HugePageBytes != 0 && o.HugePageBytes != 2<<20 && o.HugePageBytes != 1<<30 {
		bad("HugePageBytes is %d, want 0, 2 MiB or 1 GiB", o.HugePageBytes)
	}
	if i := strings.IndexFunc(o.Domain, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 {
		bad("Domain %q holds what cannot be printed, at byte %d", o.Domain, i)
	}
	if o.Directory == nil {
		bad("Directory is missing")
	}
	if o.FenceTimeout < 0 {
		bad("FenceTimeout is %v, want > 0", o.FenceTimeout)
	}
	if len(o.Devices) == 0 {
		bad("Devices is empty")
	}
	adapter := o.adapter()
	seen := map[string]int{}
	for i, d := range o.Devices {
		if d.Device == nil {
			bad("Devices[%d]: Device is missing", i)
			continue
		}
		if seen[d.Device.Name()]++; d.Device.Name() == "shm" && seen["shm"] > 1 {
			bad("Devices[%d]: a second shm device", i)
		}
		switch s := d.Device.Caps().AtomicScope; {
		case s == driver.AtomicNone:
			bad("Devices[%d]: %s has no atomics", i, d.Device.Name())
		case adapter == nil || d.Device == adapter || d.Device.Name() == "tcp" || s == driver.AtomicHCA &&
			ofOneAdapter(d.Device, adapter):
		case s == driver.AtomicHCA:
			bad("Devices[%d]: %s and %s each have an adapter execute atomics, and those of one are not atomic with "+
				"the other's: leave one out, or have agents execute them",
				i, adapter.Name(), d.Device.Name())
		default:
			bad("Devices[%d]: atomics of %s are CPU instructions, which lose updates beside atomics of %s's adapter: "+
				"leave %s out, or have %s leave atomics to its agent",
				i, d.Device.Name(), adapter.Name(), d.Device.Name(), adapter.Name())
		}
	}
	return errors.Join(errs...)
}

// adapter is the first device whose adapter executes atomics, or nil.
func (o *Options) adapter() *rdma.Device {
	for _, d := range o.Devices {
		if d.Device != nil && d.Device.Caps().AtomicScope == driver.AtomicHCA {
			return d.Device
		}
	}
	return nil
}

// ofOneAdapter reports whether the devices are known to be ports of one adapter.
func ofOneAdapter(a, b *rdma.Device) bool {
	x, _, _ := strings.Cut(a.Caps().Port, "/")
	y, _, _ := strings.Cut(b.Caps().Port, "/")
	return x != "" && x == y
}

// Node is a running memory node.
type Node struct {
	// Set by Open, and not changed afterwards but where it says so.
	o       Options
	log     *slog.Logger
	devices []*device // hca first, so that what leans on it ends before it
	// hca executes the atomics of every device, but those of other ports of its adapter; nil: CPUs do.
	hca     *device
	loopKey [loopKeySize]byte // random; this process shows it to itself
	ctx     context.Context   // ends with Close
	cancel  context.CancelFunc
	wg      sync.WaitGroup // goroutines that Close waits for
	// boot is the life of this process: 1, or one more than that of the process whose memory it has. keep is what is
	// said of it to the next one. Only run changes boot, before it registers and with the lock.
	boot uint64
	keep keeping
	// nonce tells this process from all others. Only run changes it, before it registers, to pass for another one.
	nonce uint64
	ready chan struct{} // closed by the first answered heartbeat
	turns chan struct{} // holds one for each part of a region whose pages are being taken
	// failed is closed, at most once, when this process cannot serve with its settings; mu.err says why.
	failed chan struct{}
	kick   chan struct{} // capacity 1: heartbeat now
	// interrupt ends the heartbeat that waits for news of the directory; nil: none does.
	interrupt atomic.Pointer[func()]
	// seq numbers heartbeats, so that a reply can be told to be older than a
	// publication.
	seq atomic.Uint64

	// Each happens once.
	restarts  sync.Once   // Options.Restart
	leaving   atomic.Bool // Leave was called: the directory may disown this life
	closeOnce sync.Once   // Close
	closeErr  error       // of the first Close, for every one

	mu struct {
		sync.Mutex
		// Whose memory node this is, and who may connect. Registering and heartbeats write these.
		reg      *registration               // nil: not registered, nobody may connect
		saved    *registration               // that of the state at the keeper; nil: there is none
		kept     Kept                        // what became of the memory of the process before
		inside   []string                    // peers for which Door waits
		peers    map[uint32]map[uint32]*peer // connected, by session and lane; no entry is empty
		byPeer   map[rdma.Peer]*peer         // those in peers, by their connection
		sessions admit.Sessions              // whom the directory admits
		keys     []token.Key                 // whose tokens are taken, the present one first
		asked    time.Time                   // when a heartbeat was last sent for another key
		fencing  map[uint32]*fence           // by session; dropped when over, and known to who asked
		regions  map[uint32]*region          // by PG
		making   map[uint32]*making          // by PG
		// by PG: memory without keys, which no state but the next registration's offer needs
		retained map[uint32]*region
		failures map[uint32]*failure // by PG: why a wanted region is not there
		loops    map[uint32]*loop    // by namespace
		used     int64               // bytes of regions, made or being made
		// rescued are the items that are kept aside, of rescuedBytes.
		rescued      []string
		rescuedBytes int64     // 0 with none
		heartbeat    time.Time // when the last one was answered
		err          error     // of the last exchange with the directory
		clusterID    string    // of the directory that was followed last; with another one sessions and told begin anew
		told         position  // what the directory was at when this node last acted on an answer of it
	}
}

// device is one way in and, per namespace, the PD that keeps its MRs and QPs
// away from others'.
type device struct {
	dev      *rdma.Device
	name     string // of its endpoint, and of its keys
	listener rdma.Listener
	endpoint *dirpb.Endpoint
	// Guarded by Node.mu.
	pds    map[uint32]*rdma.PD
	quotas map[uint32]*dirpb.NamespaceQuota // as the directory said last
}

// isAdapter reports whether an adapter executes the atomics that come in by d.
func (d *device) isAdapter() bool { return d.dev.Caps().AtomicScope == driver.AtomicHCA }

// registration is one life of the node in the directory's eyes.
type registration struct {
	nodeID      uint32
	incarnation uint64
	interval    time.Duration
}

// Open listens on every device and starts to register; it does not wait for the
// directory (see [Node.Ready]). ctx bounds Open alone.
func Open(ctx context.Context, o Options) (*Node, error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("memory node %q: %w", o.Name, err)
	}
	n := &Node{
		o:     o,
		log:   o.Logger.With("node", o.Name),
		ready: make(chan struct{}), failed: make(chan struct{}),
		turns: make(chan struct{}, mostTurns),
		kick:  make(chan struct{}, 1),
		boot:  1,
		nonce: dirpb.RandomID(),
	}
	n.mu.kept = KeptOff
	if o.Keeper != nil {
		n.mu.kept = KeptPending
	}
	n.mu.peers = map[uint32]map[uint32]*peer{}
	n.mu.byPeer = map[rdma.Peer]*peer{}
	n.mu.fencing = map[uint32]*fence{}
	n.mu.regions, n.mu.retained = map[uint32]*region{}, map[uint32]*region{}
	n.mu.making = map[uint32]*making{}
	n.mu.failures = map[uint32]*failure{}
	n.mu.loops = map[uint32]*loop{}
	_, _ = rand.Read(n.loopKey[:]) // never fails
	n.ctx, n.cancel = context.WithCancel(context.Background())
	devices := slices.Clone(o.Devices)
	slices.SortStableFunc(devices, func(a, b DeviceListen) int {
		return cmp.Compare(a.Device.Caps().AtomicScope, b.Device.Caps().AtomicScope) // HCA before CPU
	})
	for _, dl := range devices {
		err := ctx.Err()
		if err == nil {
			err = n.listen(dl)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("memory node %q: %w", o.Name, err), n.Close())
		}
	}
	n.wg.Go(n.run)
	return n, nil
}

func (n *Node) listen(dl DeviceListen) error {
	nth := 1
	for _, d := range n.devices {
		if d.dev.Name() == dl.Device.Name() {
			nth++
		}
	}
	d := &device{dev: dl.Device, name: dirpb.EndpointName(dl.Device.Name(), nth), pds: map[uint32]*rdma.PD{}}
	if n.hca == nil && d.isAdapter() {
		n.hca = d
	}
	l, err := dl.Device.Listen(dl.Addr, rdma.ListenOptions{
		Accept: func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) { return n.accept(d, r) },
		Closed: n.gone,
	})
	if err != nil {
		return err
	}
	d.listener = l
	n.devices = append(n.devices, d)
	addr, err := dirpb.Advertised(l.Addr(), dl.Advertise)
	if err != nil {
		return fmt.Errorf("%s: %w", dl.Device.Name(), err)
	}
	d.endpoint = &dirpb.Endpoint{Provider: d.name, Addr: addr, Atomics: n.atomicsBy(dl.Device)}
	n.log.Info("memory node listens", "provider", d.name, "addr", l.Addr(), "advertise", addr, "atomics",
		d.endpoint.Atomics)
	return nil
}

// Ready waits until the directory knows the node and has answered a heartbeat. It fails at once with ErrCapacity if the
// node's regions need more than it lends.
func (n *Node) Ready(ctx context.Context) error {
	select {
	case <-n.ready:
		return nil
	case <-n.ctx.Done():
		return ErrClosed
	case <-n.failed:
		n.mu.Lock()
		defer n.mu.Unlock()
		return fmt.Errorf("memory node %q: %w", n.o.Name, n.mu.err)
	case <-ctx.Done():
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.err != nil {
		return fmt.Errorf("memory node %q is not ready: %w: %w", n.o.Name, context.Cause(ctx), n.mu.err)
	}
	return fmt.Errorf("memory node %q is not ready: %w", n.o.Name, context.Cause(ctx))
}

// leaveTimeout bounds a goodbye: a directory that does not answer must not keep a process
// from ending.
const leaveTimeout = 5 * time.Second

// Leave says goodbye to the directory, and returns when no session uses this process's memory. The directory
// takes the memory out of use now rather than when the process's lease has run out. The regions are served until Close.
// Leave gives up after 5 s, or when ctx ends; an error says that sessions may still use the memory.
func (n *Node) Leave(ctx context.Context) error {
	n.leaving.Store(true)
	n.mu.Lock()
	reg := n.mu.reg
	n.mu.Unlock()
	if reg == nil {
		return nil // nobody was told of any memory
	}
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	err := n.o.Directory.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.LeaveNode(ctx, &dirpb.LeaveNodeRequest{NodeId: reg.nodeID, Incarnation: reg.incarnation})
		return err
	})
	if err != nil {
		return fmt.Errorf("memory node %q: leave: %w", n.o.Name, err)
	}
	n.log.Info("memory node left the directory", "node_id", reg.nodeID, "incarnation", reg.incarnation)
	return nil
}

// Close fences every peer, deregisters and frees every region and returns when
// all goroutines are gone. It is idempotent. Memory that a peer may still touch
// is reported and not freed.
func (n *Node) Close() error {
	n.closeOnce.Do(func() {
		n.cancel() // first: a registration under way is not taken from here on
		n.mu.Lock()
		n.mu.reg = nil
		n.mu.Unlock()
		n.wg.Wait()
		n.mu.Lock()
		clear(n.mu.failures) // nobody tries again
		n.mu.Unlock()
		var errs []error
		for _, d := range slices.Backward(n.devices) {
			if d == n.hca { // no other listener is left
				if err := n.closeLoops(context.Background()); err != nil {
					errs = append(errs, err)
				}
			}
			if err := d.listener.Close(); err != nil {
				errs = append(errs, fmt.Errorf("%s: close listener: %w", d.dev.Name(), err))
			}
		}
		if len(errs) == 0 {
			for _, r := range slices.Concat(slices.Collect(maps.Values(n.mu.regions)),
				slices.Collect(maps.Values(n.mu.retained))) {
				errs = append(errs, n.drop(r))
			}
			for _, d := range n.devices {
				for ns, pd := range d.pds {
					if err := pd.Dealloc(); err != nil {
						errs = append(errs, fmt.Errorf("namespace %d: %w", ns, err))
					}
				}
			}
		}
		err := errors.Join(errs...)
		if err == nil {
			n.closeKept()
		}
		if err != nil {
			n.closeErr = fmt.Errorf("memory node %q: close: %w", n.o.Name, err)
		}
	})
	return n.closeErr
}

// Stats is a snapshot for metrics and people.
type Stats struct {
	NodeID      uint32
	Incarnation uint64
	Boot        uint64
	Registered  bool
	// Kept says how much this process had of the memory of the one before it.
	Kept Kept
	// Inside are peers of earlier processes for which a registration with kept memory waits; see Options.Door.
	Inside []string
	// LastHeartbeat is when the directory last answered one; zero: never.
	LastHeartbeat time.Time
	// DirectoryErr is why the last exchange with the directory failed, or nil.
	DirectoryErr    error
	CapacityBytes   int64
	RegisteredBytes int64
	// RescuedBytes is memory of an earlier process that cannot be used, and is kept aside.
	RescuedBytes int64
	Connections  int
	Sessions     int
	// Fencing are the sessions whose fence is not confirmed yet.
	Fencing []uint32
	// DataPathCPU is the CPU time spent executing verbs for peers.
	DataPathCPU time.Duration
	Regions     []RegionStats
	// Quotas are those of namespaces that have memory here, if verbs come over tcp.
	Quotas []QuotaStats
}

// QuotaStats is what a namespace is held to here.
type QuotaStats struct {
	Namespace uint32
	Name      string
	// TCPOps is how many verbs a second execute over tcp at most; 0: any number.
	TCPOps uint64
	// Paced is how long connections have waited for that, all together.
	Paced time.Duration
}

// RegionStats is one region the directory wants, or one that is being dropped.
type RegionStats struct {
	PG, Namespace uint32
	Bytes         int64
	Published     bool
	// Err is why the region could not be made, published or dropped, or nil.
	Err error
}

// Stats may be called at any time.
func (n *Node) Stats() Stats {
	s := Stats{CapacityBytes: n.o.CapacityBytes, DataPathCPU: n.dataPathCPU()}
	n.mu.Lock()
	defer n.mu.Unlock()
	if r := n.mu.reg; r != nil {
		s.Registered, s.NodeID, s.Incarnation = true, r.nodeID, r.incarnation
	}
	s.Boot, s.Kept, s.Inside = n.boot, n.mu.kept, n.mu.inside
	s.LastHeartbeat, s.DirectoryErr = n.mu.heartbeat, n.mu.err
	s.RegisteredBytes, s.RescuedBytes = n.mu.used, n.mu.rescuedBytes
	s.Connections, s.Sessions = len(n.mu.byPeer), len(n.mu.peers)
	for id, f := range n.mu.fencing {
		if !f.confirmed {
			s.Fencing = append(s.Fencing, id)
		}
	}
	slices.Sort(s.Fencing)
	for pg, r := range n.mu.regions {
		rs := RegionStats{PG: pg, Namespace: r.want.GetNamespaceId(), Bytes: r.bytes, Published: r.published}
		if f := n.mu.failures[pg]; f != nil {
			rs.Err = f.err
		}
		s.Regions = append(s.Regions, rs)
	}
	for pg, m := range n.mu.making {
		s.Regions = append(s.Regions, RegionStats{PG: pg, Namespace: m.want.GetNamespaceId(), Bytes: m.r.bytes})
	}
	for pg, f := range n.mu.failures {
		if n.mu.regions[pg] == nil && n.mu.making[pg] == nil {
			s.Regions = append(s.Regions, RegionStats{PG: pg, Namespace: f.namespace, Err: f.err})
		}
	}
	ordered.Sort(s.Regions, func(a, b RegionStats) int { return int(int64(a.PG) - int64(b.PG)) })
	for _, d := range n.devices {
		for _, ns := range slices.Sorted(maps.Keys(d.quotas)) {
			q, pd := d.quotas[ns], d.pds[ns]
			if pd == nil {
				continue
			}
			if paced, ok := pd.Paced(); ok {
				s.Quotas = append(s.Quotas, QuotaStats{Namespace: ns, Name: q.GetName(), TCPOps: q.GetTcpOpsPerSecond(),
					Paced: paced})
			}
		}
	}
	return s
}

func (n *Node) dataPathCPU() (sum time.Duration) {
	for _, d := range n.devices {
		sum += time.Duration(d.listener.CPUNanos())
	}
	return sum
}
