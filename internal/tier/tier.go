// Package tier keeps values of namespaces on this machine's disk: it is what a tier node does. It has a folder, which
// is a volume to the directory, and in it a tierstore.Store for each namespace whose tier names the tier node. Sessions
// READ the files of theirs over tcp, as they READ memory.
//
// It leaves to tierstore how objects are kept, and to the directory which namespaces there are and what is to be
// demoted. It moves no value by itself: who demotes and collects does so with what [Service.Namespaces] gives.
//
// Start with [Service] and [Namespace]. A Service's methods may be called concurrently. Devices and the directory
// client stay their opener's. A Namespace's Store is open until its Done is closed.
//
// Disks that are read by others' verbs, as memory is, are those of TeRM (FAST'24). Shares that nobody hands out are
// rendezvous hashing (Thaler and Ravishankar, 1998).
package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/internal/tierstore"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// readers is how many READs of one namespace wait for the disk at a time.
const readers = 64

// ErrGivenUp says that an operator gave the folder up, so what it holds is lost. A tier node needs an empty one.
var ErrGivenUp = errors.New("the folder was given up, and what it holds is lost: empty it, or use another one")

// Directory is what a Service needs of the directory; *dirclient.Client is one.
type Directory interface {
	Call(ctx context.Context, fn func(context.Context, dirpb.DirectoryClient) error) error
}

// Options configure a Service.
type Options struct {
	// Name is the tier node's, by which namespaces name it. Required.
	Name string
	// Folder holds the files. It is made if it is missing, and locked. Required.
	Folder string
	// SizeBytes is what the files may take; of each namespace, unless that has a bound of its own. Required.
	SizeBytes int64
	// Device serves READs at Addr. It has Caps.Functions, and is its opener's. Required.
	Device *rdma.Device
	Addr   string
	// Advertise is what clients dial; empty: the listener's own address.
	Advertise string
	// Directory is told, and tells what is to be done. Required.
	Directory Directory
	// Domain is the failure domain's label; may be empty.
	Domain string
	// HostID names the machine. Default: hostid.ID().
	HostID string
	// Version of the program, for people; may be empty.
	Version string
	// Identities says how certificates of peers name their owners, on devices with TLS.
	Identities identity.Mapping
	// Logger gets what an operator needs to know. Default: discards.
	Logger *slog.Logger
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if o.Name == "" {
		bad("Name is empty")
	}
	if o.Folder == "" {
		bad("Folder is empty")
	}
	if o.SizeBytes < 4*tierstore.MaxSegment {
		bad("SizeBytes is %d, want at least %d", o.SizeBytes, 4*tierstore.MaxSegment)
	}
	if o.Directory == nil {
		bad("Directory is missing")
	}
	if o.Device == nil || !o.Device.Caps().Functions {
		bad("Device is missing, or has no function regions")
	}
	return errors.Join(errs...)
}

// Service is a running tier node.
type Service struct {
	o      Options
	log    *slog.Logger
	folder *folder
	unlock io.Closer
	// The way in.
	listener rdma.Listener
	endpoint *dirpb.Endpoint

	ctx   context.Context // ends with Close, or by end
	end   context.CancelCauseFunc
	wg    sync.WaitGroup
	ready chan struct{} // closed by the first answer
	kick  chan struct{} // capacity 1: tell the directory now

	closeOnce sync.Once
	closeErr  error

	// run's alone, and Close's behind it.
	closing map[uint32]*Namespace // that are gone, and not closed yet
	told    map[uint32]string     // what was logged last of a namespace's files that stay

	mu struct {
		sync.Mutex
		// As the directory said last.
		keys     []token.Key
		sessions admit.Sessions
		spaces   map[uint32]*Namespace
		peers    map[rdma.Peer]peer // connected
		heard    time.Time          // when the directory last answered; zero: never
		err      error              // of the last exchange with it
		failures map[uint32]error   // of opening a namespace's files, until it succeeds
		reads    uint64             // that failed: the reader got zeroes
	}
}

// peer is whose connection it is.
type peer struct{ session, namespace uint32 }

// Open opens the folder and listens; it does not wait for the directory (see [Service.Ready]).
func Open(o Options) (_ *Service, err error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("tier node %q: %w", o.Name, err)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.HostID == "" {
		o.HostID = hostid.ID()
	}
	s := &Service{o: o, log: o.Logger.With("tier_node", o.Name), ready: make(chan struct{}),
		kick: make(chan struct{}, 1), closing: make(map[uint32]*Namespace), told: make(map[uint32]string)}
	s.ctx, s.end = context.WithCancelCause(context.Background())
	s.mu.spaces, s.mu.peers = make(map[uint32]*Namespace), make(map[rdma.Peer]peer)
	s.mu.failures = make(map[uint32]error)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("tier node %q: %w", o.Name, err), s.Close())
		}
	}()
	if err := os.MkdirAll(o.Folder, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder: %w", err)
	}
	if s.unlock, err = lock(filepath.Join(o.Folder, "LOCK")); err != nil {
		return nil, fmt.Errorf("lock %s, which another process may use: %w", o.Folder, err)
	}
	if s.folder, err = openFolder(o.Folder); err != nil {
		return nil, err
	}
	if err := s.listen(); err != nil {
		return nil, err
	}
	s.wg.Go(s.run)
	return s, nil
}

func (s *Service) listen() (err error) {
	s.listener, err = s.o.Device.Listen(s.o.Addr, rdma.ListenOptions{
		Accept: func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			pd, err := s.admit(r)
			if err != nil {
				s.log.Debug("connection refused", "remote", r.Remote, "err", err)
			}
			return pd, rdma.AccessRemoteRead, err
		},
		Closed: s.gone,
	})
	if err != nil {
		return err
	}
	addr, err := dirpb.Advertised(s.listener.Addr(), s.o.Advertise)
	if err != nil {
		return err
	}
	s.endpoint = &dirpb.Endpoint{Provider: dirpb.EndpointName(s.o.Device.Name(), 1), Addr: addr}
	s.log.Info("tier node listens", "provider", s.endpoint.Provider, "addr", s.listener.Addr(), "advertise", addr)
	return nil
}

// admit decides on a connection from its private data: a session that lives may READ what is here of its namespace.
func (s *Service) admit(r rdma.ConnRequest) (*rdma.PD, error) {
	var who identity.Identity
	if r.TLS != nil {
		var err error
		if who, err = s.o.Identities.Admit(r.TLS, "a connection to a tier node", admit.Connects); err != nil {
			return nil, err
		}
	}
	if len(r.Private) < admit.LaneSize {
		return nil, fmt.Errorf("private data of %d bytes, want a session token and a lane", len(r.Private))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g, err := admit.Verify(s.mu.keys, r.Private[:len(r.Private)-admit.LaneSize], r.TLS != nil, who)
	if err != nil {
		if unknown := (*token.GenerationError)(nil); errors.As(err, &unknown) && unknown.Generation > unknown.Newest {
			s.tell()
		}
		return nil, err
	}
	n := s.mu.spaces[g.Namespace]
	switch {
	case s.mu.sessions.Ended(g.Session):
		return nil, fmt.Errorf("session %d has ended", g.Session)
	case n == nil:
		return nil, fmt.Errorf("nothing of namespace %d, of session %d, is here", g.Namespace, g.Session)
	}
	s.mu.peers[r.Peer] = peer{g.Session, g.Namespace}
	return n.pd, nil
}

func (s *Service) gone(p rdma.Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.peers, p)
}

// tell has the directory told without delay.
func (s *Service) tell() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Namespace is what is here of one namespace.
type Namespace struct {
	// Store holds its objects.
	Store *tierstore.Store
	// Done is closed when the Store is about to be closed.
	Done <-chan struct{}

	service *Service
	dir     string
	done    chan struct{}
	closing bool // close began
	pd      *rdma.PD
	region  *rdma.MR
	work    *dirpb.TierWork
}

// Work is the tier node's part in the namespace, as the directory said last. The caller must not modify it.
func (n *Namespace) Work() *dirpb.TierWork {
	n.service.mu.Lock()
	defer n.service.mu.Unlock()
	return n.work
}

// Mine reports whether a segment of the index of a placement group is this tier node's to demote from. The tier nodes
// of the namespace that are up agree on that, but for the moments in which they change.
func (n *Namespace) Mine(pg, segment uint32) bool {
	return Owner(n.Work().Volumes, pg, segment) == n.service.Volume()
}

// Owner is the one of the volumes to which a segment of the index of a placement group is given, 0 for none. A volume
// that comes or goes moves no segment between others.
func Owner(volumes []uint32, pg, segment uint32) (owner uint32) {
	best := uint64(0)
	for _, v := range volumes {
		if h := mix(uint64(v)<<32 ^ mix(uint64(pg)<<32|uint64(segment))); owner == 0 || h > best {
			owner, best = v, h
		}
	}
	return owner
}

// mix is splitmix64's finalizer.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Namespaces are those that have files here, by id.
func (s *Service) Namespaces() []*Namespace {
	s.mu.Lock()
	defer s.mu.Unlock()
	return ordered.Values(s.mu.spaces)
}

// Volume is the id of the folder, 0 until the directory has given it one.
func (s *Service) Volume() uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.folder.Volume
}

// Addr is where sessions are told to dial.
func (s *Service) Addr() string { return s.endpoint.Addr }

// Ready waits for the directory's first answer.
func (s *Service) Ready(ctx context.Context) error {
	select {
	case <-s.ready:
		return nil
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Done is closed when the Service ends, also by itself; Err then says why.
func (s *Service) Done() <-chan struct{} { return s.ctx.Done() }

// Err is why the Service ended by itself, or nil.
func (s *Service) Err() error {
	if err := context.Cause(s.ctx); !errors.Is(err, errClosed) {
		return err
	}
	return nil
}

var errClosed = errors.New("closed")

// Close lets nobody READ any more, closes the files and waits for all of that. It is idempotent.
func (s *Service) Close() error {
	s.closeOnce.Do(func() {
		s.end(errClosed)
		s.wg.Wait()
		var errs []error
		if s.listener != nil {
			errs = append(errs, s.listener.Close())
		}
		for _, n := range append(s.Namespaces(), ordered.Values(s.closing)...) {
			errs = append(errs, n.close())
		}
		if s.unlock != nil {
			errs = append(errs, s.unlock.Close())
		}
		if err := errors.Join(errs...); err != nil {
			s.closeErr = fmt.Errorf("tier node %q: close: %w", s.o.Name, err)
		}
	})
	return s.closeErr
}

// regionBytes is the size of every function region: addresses are of all bytes that may ever be written.
const regionBytes = math.MaxInt64 &^ 63

// open opens the files of a namespace, and has them READ.
func (s *Service) open(w *dirpb.TierWork) (n *Namespace, err error) {
	n = &Namespace{service: s, work: w, done: make(chan struct{}),
		dir: filepath.Join(s.o.Folder, namespaceDir(w.NamespaceId))}
	n.Done = n.done
	limit := s.o.SizeBytes
	if w.LimitBytes != 0 {
		limit = min(limit, max(int64(w.LimitBytes), 4*tierstore.MaxSegment))
	}
	store, damaged, err := tierstore.Open(tierstore.Options{Folder: n.dir, Volume: s.folder.Volume,
		Namespace: uint64(w.NamespaceId), HashSeed: w.HashSeed, Limit: limit})
	if err != nil {
		return nil, err
	}
	n.Store = store
	for _, d := range damaged {
		s.log.Error("bytes on the disk are not those that were written: values there are lost", "namespace",
			w.Namespace, "err", d)
	}
	if n.pd, err = s.o.Device.AllocPD(); err == nil {
		n.region, err = n.pd.RegFunc(regionBytes, readers, n.read)
	}
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// read performs a session's READ. Bytes that are not there, or that the disk does not give, are zeroes: the reader
// judges by sums, and an error would end its connection.
func (n *Namespace) read(ctx context.Context, off uint64, b []byte) driver.Status {
	if err := n.Store.Read(ctx, off, b); err != nil {
		clear(b)
		if disk := (*tierstore.DiskError)(nil); errors.As(err, &disk) {
			n.service.mu.Lock()
			n.service.mu.reads++
			first := n.service.mu.reads == 1
			n.service.mu.Unlock()
			if first {
				n.service.log.Error("the disk does not give what is there: readers go to the next copy", "namespace",
					n.Work().Namespace, "err", err)
			}
		}
	}
	return driver.Success
}

// close ends the READs of a namespace's files, and closes them. It goes on where an earlier call failed, as it does
// while connections have not ended. Its callers are one after the other.
func (n *Namespace) close() error {
	if !n.closing {
		n.closing = true
		close(n.done)
	}
	if n.region != nil {
		if err := n.region.Deregister(); err != nil {
			return err
		}
		n.region = nil
	}
	if n.pd != nil {
		if err := n.pd.Dealloc(); err != nil {
			return err
		}
		n.pd = nil
	}
	return n.Store.Close()
}
