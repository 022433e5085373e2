// Package devstore runs a whole store in one process: directory nodes, memory
// nodes, a janitor and the devices that clients of this process need. `kvd dev` is
// built on it, and so are tests and examples.
//
// It leaves every part to its own package ([server], [memnode], the providers)
// and only starts, connects and stops them. Start with [Options] and [Start]. A
// Store's methods may be called concurrently. A Store owns all that it opened,
// the devices included; clients close before it.
package devstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/memnode"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
	"github.com/kvd-project/kvd/server"
)

// Sim is the name of the simulated provider, which is open to this process alone
// and cannot serve a region together with another.
const Sim = "sim"

// ErrInMemory means that a directory node that keeps its state in memory cannot
// be started again.
var ErrInMemory = errors.New("the directory keeps its state in memory: set Options.Dir to restart it")

var errClosed = errors.New("devstore is closed")

// Options configure a Store. The zero value is usable.
type Options struct {
	// Nodes is how many memory nodes there are to begin with. Default 1.
	Nodes int
	// Replicas is how many copies the namespace "default" has, which is made at the
	// start. 0 leaves it to the directory, which makes it when the first session asks for
	// it.
	Replicas int
	// Namespaces are made at the start, in this order, unless the directory remembers them.
	Namespaces []Namespace
	// CapacityBytes is what each memory node lends. It is mapped when it is first
	// used. Default 1 GiB.
	CapacityBytes int64
	// Providers serve the memory: some of shm and tcp, or sim alone. Default shm
	// and tcp.
	Providers []string
	// Directories is how many directory nodes there are. Default 1.
	Directories int
	// Addr is where the first directory node serves gRPC. Default 127.0.0.1:0.
	Addr string
	// Lease and EpochInterval are the directory's. Defaults 5 s and the
	// directory's own. Memory that shares a busy machine with its users must not
	// count as lost because nobody was scheduled for a second.
	Lease, EpochInterval time.Duration
	// Dir holds the directory nodes' state. Default: memory.
	Dir string
	// NoJanitor leaves background jobs (new copies, splits, repair) undone.
	NoJanitor bool
	// Seed chooses the schedule of sim, and SGEs has it take registered memory alone, as an adapter; see sim.Options.
	Seed uint64
	SGEs int
	// Logger receives the messages of all parts. Default: discard.
	Logger *slog.Logger
}

// Namespace is one to make at the start.
type Namespace struct {
	Name string
	// Mode is store unless it says cache.
	Mode dirpb.NamespaceMode
	// Replicas is the number of copies; 0: two, or one if there is one memory node.
	Replicas int
	// BytesPerNode is what each memory node lends to it; 0: half of what is free then.
	BytesPerNode int64
	// Shards is how many it begins with, a power of two; 0: chosen.
	Shards int
}

func (o *Options) ensureDefaults() {
	if o.Nodes == 0 {
		o.Nodes = 1
	}
	if o.CapacityBytes == 0 {
		o.CapacityBytes = 1 << 30
	}
	if len(o.Providers) == 0 {
		o.Providers = []string{"shm", "tcp"}
	}
	if o.Directories == 0 {
		o.Directories = 1
	}
	if o.Lease == 0 {
		o.Lease = 5 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate joins every problem that the parts would not name themselves.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.Nodes < 0 {
		bad("Nodes is %d, want at least 1", o.Nodes)
	}
	if o.Replicas < 0 || o.Replicas > max(o.Nodes, 0) {
		bad("Replicas is %d, want 0 to the number of memory nodes, %d", o.Replicas, o.Nodes)
	}
	for _, n := range o.Namespaces {
		if n.Replicas < 0 || n.Replicas > max(o.Nodes, 0) || n.BytesPerNode < 0 {
			bad("Namespaces: %q with %d copies and %d bytes a memory node, want 0 to the number of memory nodes, %d, "+
				"and no less than 0", n.Name, n.Replicas, n.BytesPerNode, o.Nodes)
		}
	}
	if o.Directories < 0 {
		bad("Directories is %d, want at least 1", o.Directories)
	}
	if len(o.Providers) > 1 && slices.Contains(o.Providers, Sim) {
		bad("Providers is %q: sim's atomics are not atomic with those of another", o.Providers)
	}
	return errors.Join(errs...)
}

// Store is a running store.
type Store struct {
	o       Options
	fabric  *sim.Fabric    // nil without sim
	devices []*rdma.Device // clients'
	dir     *dirclient.Client
	run     string   // folder of the shm sockets; empty without shm
	sweep   *sweeper // nil: no janitor

	mu struct {
		sync.Mutex
		directories []*directory
		nodes       []*node
		closed      bool
		err         error // of Close
	}
}

// directory is one directory node, running or not.
type directory struct {
	o    server.Options // from the second start on with fixed addresses
	node *server.Node   // nil: stopped
}

// node is one memory node, running or not.
type node struct {
	name    string
	node    *memnode.Node
	devices []*rdma.Device
	killed  bool
}

// close is idempotent.
func (n *node) close() error {
	var errs []error
	if n.node != nil {
		errs = append(errs, n.node.Close())
	}
	for _, d := range n.devices {
		errs = append(errs, d.Close())
	}
	n.devices = nil
	return errors.Join(errs...)
}

// Start starts everything and waits until every memory node is known to the
// directory. ctx bounds the start alone.
func Start(ctx context.Context, o Options) (_ *Store, err error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("devstore options: %w", err)
	}
	s := &Store{o: o}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if slices.Contains(o.Providers, Sim) {
		s.fabric = sim.New(sim.Options{Seed: o.Seed, SGEs: o.SGEs})
	}
	if slices.Contains(o.Providers, "shm") {
		if s.run, err = runtimeDir(); err != nil {
			return nil, err
		}
	}
	if err := s.startDirectories(ctx); err != nil {
		return nil, err
	}
	for i := range o.Nodes {
		if err := s.startNode(ctx, "m"+strconv.Itoa(i+1)); err != nil {
			return nil, err
		}
	}
	for _, name := range o.Providers {
		d, err := s.open(name, "client")
		if err != nil {
			return nil, err
		}
		s.devices = append(s.devices, d)
	}
	for _, n := range s.Nodes() {
		if err := n.Ready(ctx); err != nil {
			return nil, err
		}
	}
	if o.Replicas > 0 {
		o.Namespaces = append([]Namespace{{Name: "default", Replicas: o.Replicas}}, o.Namespaces...)
	}
	for _, n := range o.Namespaces {
		if err := s.create(ctx, n); err != nil {
			return nil, err
		}
	}
	if !o.NoJanitor {
		if err := s.startJanitor(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// create makes a namespace, unless the directory remembers it.
func (s *Store) create(ctx context.Context, n Namespace) error {
	err := s.dir.CallOnce(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{
			Name: n.Name, Mode: n.Mode, Replicas: uint32(n.Replicas), BytesPerNode: uint64(n.BytesPerNode),
			Shards: uint32(n.Shards),
		})
		return err
	})
	if err != nil && status.Code(err) != codes.AlreadyExists {
		return fmt.Errorf("namespace %q with %d copies: %w", n.Name, n.Replicas, err)
	}
	return nil
}

// runtimeDir makes a folder that is this user's alone, with a path short enough
// for a socket in it.
func runtimeDir() (string, error) {
	base := os.Getenv("XDG_RUNTIME_DIR")
	if st, err := os.Stat(base); base == "" || err != nil || !st.IsDir() {
		base = "" // the temporary folder
	}
	dir, err := os.MkdirTemp(base, "kvd-")
	if err != nil {
		return "", fmt.Errorf("folder for shm sockets: %w", err)
	}
	return dir, nil
}

func (s *Store) startDirectories(ctx context.Context) error {
	for i := range s.o.Directories {
		d := &directory{o: server.Options{
			ID:            "d" + strconv.Itoa(i+1),
			InMemory:      s.o.Dir == "",
			Lease:         s.o.Lease,
			EpochInterval: s.o.EpochInterval,
			Logger:        s.o.Logger,
		}}
		if s.o.Dir != "" {
			d.o.DataDir = filepath.Join(s.o.Dir, d.o.ID)
		}
		if i == 0 {
			d.o.GRPCAddr, d.o.Bootstrap = s.o.Addr, true
		} else {
			d.o.Join = s.Directory()
		}
		var err error
		if d.node, err = server.Open(ctx, d.o); err != nil {
			return err
		}
		d.o.GRPCAddr = d.node.Addr()
		s.mu.Lock()
		s.mu.directories = append(s.mu.directories, d)
		s.mu.Unlock()
		// The next one joins it, so it has to know the leader.
		if err := d.node.Ready(ctx); err != nil {
			return err
		}
	}
	var err error
	if s.dir, err = dirclient.Open(dirclient.Options{Addrs: s.Directory(), Logger: s.o.Logger}); err != nil {
		return err
	}
	return s.awaitVoters(ctx)
}

// awaitVoters waits until every directory node votes, and notes the raft addresses,
// which a node keeps over restarts.
func (s *Store) awaitVoters(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		st, err := s.Status(ctx)
		if err != nil {
			return err
		}
		raft := make(map[string]string)
		for _, d := range st.GetDirectory() {
			if d.GetVoter() {
				raft[d.GetId()] = d.GetRaftAddr()
			}
		}
		s.mu.Lock()
		if len(raft) == len(s.mu.directories) {
			for _, d := range s.mu.directories {
				d.o.RaftAddr = raft[d.o.ID]
			}
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d directory nodes vote: %w", len(raft), s.o.Directories, ctx.Err())
		case <-tick.C:
		}
	}
}

func (s *Store) startNode(ctx context.Context, name string) (err error) {
	n := &node{name: name}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	o := memnode.Options{Name: name, CapacityBytes: s.o.CapacityBytes, Directory: s.dir, Logger: s.o.Logger}
	for _, p := range s.o.Providers {
		d, err := s.open(p, name)
		if err != nil {
			return err
		}
		n.devices = append(n.devices, d)
		addr := "127.0.0.1:0"
		switch p {
		case "shm":
			addr = filepath.Join(s.run, name+".sock")
		case Sim:
			addr = name
		}
		o.Devices = append(o.Devices, memnode.DeviceListen{Device: d, Addr: addr})
	}
	if n.node, err = memnode.Open(ctx, o); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return errClosed
	}
	s.mu.nodes = append(s.mu.nodes, n)
	return nil
}

// open opens a device; name tells the devices of one fabric apart.
func (s *Store) open(provider, name string) (*rdma.Device, error) {
	if provider == Sim {
		return rdma.NewDevice(Sim, s.fabric.Device(name)), nil
	}
	return providers.Open(provider, providers.Options{})
}

// Directory gives the gRPC addresses of all directory nodes, the stopped ones
// included.
func (s *Store) Directory() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var addrs []string
	for _, d := range s.mu.directories {
		addrs = append(addrs, d.o.GRPCAddr)
	}
	return addrs
}

// DirectoryNodes are the directory nodes that run.
func (s *Store) DirectoryNodes() []*server.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	var nodes []*server.Node
	for _, d := range s.mu.directories {
		if d.node != nil {
			nodes = append(nodes, d.node)
		}
	}
	return nodes
}

// Devices are for clients of this process, one for each provider in the order of
// Options.Providers. They stay the Store's.
func (s *Store) Devices() []*rdma.Device { return slices.Clone(s.devices) }

// Nodes are the memory nodes in the order of their start, the killed ones
// included.
func (s *Store) Nodes() []*memnode.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	var nodes []*memnode.Node
	for _, n := range s.mu.nodes {
		nodes = append(nodes, n.node)
	}
	return nodes
}

// Status asks the leading directory node.
func (s *Store) Status(ctx context.Context) (st *dirpb.StatusReply, err error) {
	err = s.dir.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
		st, err = c.Status(ctx, &dirpb.StatusRequest{})
		return err
	})
	return st, err
}

// KillNode stops memory node i of Nodes without a word to anyone. Its connections
// break, its memory is gone, and the directory hears no more of it.
func (s *Store) KillNode(i int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.mu.nodes[i]
	if n.killed {
		return fmt.Errorf("memory node %q is stopped already", n.name)
	}
	n.killed = true
	return n.close()
}

// AddNode starts one more memory node and waits until the directory knows it. With
// the name of a killed one it is that node's next incarnation, empty.
func (s *Store) AddNode(ctx context.Context, name string) error {
	s.mu.Lock()
	i := slices.IndexFunc(s.mu.nodes, func(n *node) bool { return n.name == name && !n.killed })
	closed := s.mu.closed
	s.mu.Unlock()
	switch {
	case closed:
		return errClosed
	case i >= 0:
		return fmt.Errorf("memory node %q is running", name)
	}
	if err := s.startNode(ctx, name); err != nil {
		return err
	}
	nodes := s.Nodes()
	return nodes[len(nodes)-1].Ready(ctx)
}

// StopDirectory stops directory node i, as SIGTERM does.
func (s *Store) StopDirectory(i int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.mu.directories[i]
	if d.node == nil {
		return fmt.Errorf("directory %q is stopped already", d.o.ID)
	}
	err := d.node.Close()
	d.node = nil
	return err
}

// RestartDirectory starts directory node i again, from its folder and at its
// addresses.
func (s *Store) RestartDirectory(ctx context.Context, i int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.mu.directories[i]
	switch {
	case s.mu.closed:
		return errClosed
	case d.node != nil:
		return fmt.Errorf("directory %q is running", d.o.ID)
	case d.o.InMemory:
		return fmt.Errorf("directory %q: %w", d.o.ID, ErrInMemory)
	}
	n, err := server.Open(ctx, d.o)
	if err != nil {
		return err
	}
	d.node = n
	return nil
}

// Wait returns nil when ctx ends, and otherwise why the first directory node
// stopped by itself.
func (s *Store) Wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stopped := make(chan error)
	s.mu.Lock()
	for _, d := range s.mu.directories {
		if n := d.node; n != nil {
			wg.Go(func() {
				select {
				case <-ctx.Done():
					return
				case <-n.Done():
				}
				if err := n.Err(); err != nil {
					select {
					case stopped <- err:
					case <-ctx.Done():
					}
				}
			})
		}
	}
	s.mu.Unlock()
	select {
	case err := <-stopped:
		return err
	case <-ctx.Done():
		return nil
	}
}

// Close stops everything and removes the sockets. It is idempotent.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return s.mu.err
	}
	s.mu.closed = true
	var errs []error
	if s.sweep != nil {
		errs = append(errs, s.sweep.close())
	}
	for _, n := range s.mu.nodes {
		errs = append(errs, n.close())
	}
	if s.dir != nil {
		errs = append(errs, s.dir.Close())
	}
	for _, d := range slices.Backward(s.mu.directories) {
		if d.node != nil {
			errs = append(errs, d.node.Close())
		}
	}
	for _, d := range s.devices {
		errs = append(errs, d.Close())
	}
	if s.run != "" {
		errs = append(errs, os.RemoveAll(s.run))
	}
	s.mu.err = errors.Join(errs...)
	return s.mu.err
}
