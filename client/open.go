package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/evict"
	"github.com/kvd-project/kvd/internal/hotkeys"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// Client is one session with the store, renewed and reopened by itself. Its
// methods may be called concurrently.
type Client struct {
	o    Options
	dir  *dirclient.Client
	sess atomic.Pointer[sess]

	policy   *evict.Policy
	hot      *hotkeys.Keys // nil: nobody wants to know
	stats    counts
	opened   []*rdma.Device // those of o.Devices that are the Client's own
	bulkLane bool           // see lanesFor
	arenas   arenas
	streams  streams  // values that PutFroms write
	warned   sync.Map // Path.Reason that the log was told of

	mu struct {
		sync.Mutex
		closed bool
		wg     sync.WaitGroup // reopening and closing of lost sessions
		past   laneTotals     // of sessions that have ended
		last   laneTotals     // as Stats saw it last
	}
	ctx    context.Context
	cancel context.CancelFunc
}

func (o *Options) ensureDefaults() {
	o.Namespace = cmp.Or(o.Namespace, "default")
	o.Name = cmp.Or(o.Name, defaultName())
	o.CacheBytes = cmp.Or(o.CacheBytes, hintBytes(memoryBytes()))
	o.OpTimeout = cmp.Or(o.OpTimeout, 10*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// hintBytes is the default of Options.CacheBytes where the program may use so much memory.
func hintBytes(memory uint64) int {
	const least, most = 64 << 20, 1 << 30
	return int(min(max(memory/16, least), most))
}

// memoryBytes is what the program may use of the machine's memory: as much as there is, as its control group has, or as
// the Go runtime has been told (GOMEMLIMIT).
func memoryBytes() uint64 {
	n := uint64(debug.SetMemoryLimit(-1)) // which only asks
	var s unix.Sysinfo_t
	if unix.Sysinfo(&s) == nil {
		n = min(n, uint64(s.Totalram)*uint64(s.Unit))
	}
	if b, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil { // of a container; "max" is no limit
		if g, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil {
			n = min(n, g)
		}
	}
	return n
}

// Validate reports every bad field.
func (o *Options) Validate() error {
	var errs []error
	bad := func(f string, a ...any) {
		errs = append(errs, fmt.Errorf("%w: "+f, append([]any{ErrInvalid}, a...)...))
	}
	if len(o.Directory) == 0 {
		bad("Directory: no address")
	}
	if len(o.Devices) > maxDevices {
		bad("Devices: %d, want at most %d", len(o.Devices), maxDevices)
	}
	if o.Lanes < 0 || o.Lanes > engine.MaxLanes {
		bad("Lanes: %d, want 1..%d, or 0 for the default", o.Lanes, engine.MaxLanes)
	}
	if o.CacheBytes < 0 {
		bad("CacheBytes: %d, want >= 0 bytes", o.CacheBytes)
	}
	if o.MirrorBytes < 0 {
		bad("MirrorBytes: %d, want >= 0 bytes", o.MirrorBytes)
	}
	if o.ViewBytes < 0 {
		bad("ViewBytes: %d, want >= 0 bytes", o.ViewBytes)
	}
	if o.Views < 0 {
		bad("Views: %d, want >= 0", o.Views)
	}
	if o.OpTimeout < 0 {
		bad("OpTimeout: %v, want > 0", o.OpTimeout)
	}
	switch f := o.TLSFiles; {
	case f == (TLSFiles{}):
	case f.CA == "" || f.Cert == "" || f.Key == "":
		bad("TLSFiles: want CA, Cert and Key, or no file")
	case o.TLS != nil:
		bad("TLSFiles: TLS is set too")
	}
	if _, err := o.Identities.mapping(); err != nil {
		bad("Identities: %v", err)
	}
	named := func(d *rdma.Device) bool { return d.Name() == o.Provider }
	switch {
	case o.Provider == "":
	case len(o.Devices) > 0 && !slices.ContainsFunc(o.Devices, named):
		bad("Provider: %q is not among Devices", o.Provider)
	case len(o.Devices) == 0 && !slices.Contains(providers.Names(), o.Provider):
		bad("Provider: %q, want one of %s", o.Provider, strings.Join(providers.Names(), ", "))
	}
	if err := providers.CheckRequire(o.Require, o.Provider); err != nil {
		bad("Require: %q: %w", o.Require, err)
	}
	verbs := func(d *rdma.Device) bool { return d.Name() == "verbs" }
	if o.Require != "" && len(o.Devices) > 0 && !slices.ContainsFunc(o.Devices, verbs) {
		bad("Require: %q: verbs is not among Devices: %w", o.Require,
			cmp.Or(o.Devices[0].PassedOver(), errors.New("it was not opened")))
	}
	return errors.Join(errs...)
}

func (i Identities) mapping() (identity.Mapping, error) {
	return identity.ParseMapping(i.TrustDomain, i.Units)
}

// Connect opens a Client of the namespace "default" with the defaults of all Options,
// without TLS. addrs are gRPC addresses of directory nodes; one of a cluster is enough, if it
// is up. ctx bounds the opening only, and so does the default OpTimeout.
func Connect(ctx context.Context, addrs ...string) (*Client, error) {
	o := Options{Directory: addrs}
	o.ensureDefaults()
	ctx, cancel := context.WithTimeout(ctx, o.OpTimeout)
	defer cancel()
	return Open(ctx, o)
}

// Open opens a session with the directory. ctx bounds the opening only; without a deadline,
// Open waits for a directory that does not answer.
func Open(ctx context.Context, o Options) (_ *Client, err error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.TLSFiles != (TLSFiles{}) {
		source, err := certs.Open(certs.Options{Files: certs.Files(o.TLSFiles), AtUse: func(err error) {
			if errors.Is(err, certs.ErrListExpired) {
				o.Logger.Warn("files of certificates are in use as before", "err", err)
				return
			}
			o.Logger.Error("files of certificates have changed and are not usable: those in use are kept", "err", err)
		}})
		if err != nil {
			return nil, fmt.Errorf("TLSFiles: %w", err)
		}
		o.TLS = source.Config()
	}
	if o.Require == RequireRDMA {
		o.Provider = "verbs"
	}
	identities, err := o.Identities.mapping()
	if err != nil {
		return nil, err // Validate found none
	}
	ghosts := ghostEntries
	if o.ReadOnly {
		ghosts = 1 // it neither evicts nor brings a key back
	}
	c := &Client{o: o, policy: evict.New(evict.Options{Seed: rand.Uint64(), GhostEntries: ghosts})}
	if o.HotKeys {
		c.hot = hotkeys.New()
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			c.cancel()
			err = errors.Join(err, c.release())
		}
	}()
	if c.dir, err = dirclient.Open(dirclient.Options{Addrs: o.Directory, TLS: o.TLS, Identities: identities,
		Logger: o.Logger, AttemptTimeout: 8 * time.Second}); err != nil {
		return nil, err
	}
	if len(o.Devices) == 0 {
		c.opened, err = providers.OpenFor(o.Provider, providers.Options{TLSClient: o.TLS, Identities: identities,
			Require: o.Require, Verbs: verbs.Options{Logger: o.Logger}})
		if err != nil {
			return nil, fmt.Errorf("open provider: %w", err)
		}
		c.o.Devices = c.opened
	}
	if c.o.Lanes == 0 {
		c.o.Lanes, c.bulkLane = lanesFor(c.o.Devices)
	}
	// A session may be lost before its first map, on a machine that stands still.
	for _, err = c.openSession(ctx, 0); errors.Is(err, errSessionLost) && ctx.Err() == nil; {
		_, err = c.openSession(ctx, 0)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// lanesFor is how many lanes keys hash to, and whether there is one for bulk beside them.
func lanesFor(devices []*rdma.Device) (lanes int, bulk bool) {
	if !slices.ContainsFunc(devices, func(d *rdma.Device) bool { return d.Name() != "tcp" }) {
		return 1, true
	}
	return min(runtime.GOMAXPROCS(0), engine.MaxLanes), false
}

// release gives back what Open took, when there is no session any more.
func (c *Client) release() error {
	var err error
	if c.dir != nil {
		err = c.dir.Close()
	}
	return errors.Join(err, providers.Close(c.opened))
}

// Close waits for operations under way (up to OpTimeout), gives memory back and
// closes the session. It is idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	was := c.mu.closed
	c.mu.closed = true
	c.mu.Unlock()
	if was {
		return nil
	}
	c.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), c.o.OpTimeout)
	defer cancel()
	// A reopening under way may still bring another session.
	c.mu.wg.Wait()
	c.sess.Load().close(ctx)
	c.arenas.close()
	return c.release()
}

// reopen replaces a lost session in the background.
func (c *Client) reopen(old *sess) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return
	}
	c.mu.wg.Add(2)
	go func() { // frees what is local; not under old's own goroutines
		defer c.mu.wg.Done()
		old.close(context.Background())
	}()
	go func() {
		defer c.mu.wg.Done()
		defer close(old.replaced)
		missing := false // old.missing is closed
		for wait := 10 * time.Millisecond; c.ctx.Err() == nil; wait = min(2*wait, time.Second) {
			s, err := c.openSession(c.ctx, old.nsID)
			switch {
			case err == nil:
				if missing {
					c.o.Logger.Info("the namespace can be used again", "namespace", c.o.Namespace, "id", s.nsID)
				}
				return
			case errors.Is(err, ErrNoNamespace), errors.Is(err, ErrForbidden):
				if old.refusal.Store(&err); missing {
					break
				}
				missing = true
				close(old.missing)
				c.o.Logger.Warn("the namespace was deleted, or is not for this client any more: operations fail "+
					"until it can be used again", "namespace", c.o.Namespace, "id", old.nsID, "err", err)
			default:
				c.o.Logger.Warn("session not reopened yet", "err", err)
			}
			select {
			case <-time.After(wait):
			case <-c.ctx.Done():
			}
		}
	}()
}

// live returns the session in force; it waits while a lost one is being replaced.
func (c *Client) live(ctx context.Context) (*sess, error) {
	s := c.sess.Load()
	if !s.core.Dead() {
		return s, nil
	}
	inside.WillWait(ctx)
	t := time.NewTimer(c.o.OpTimeout)
	defer t.Stop()
	for s.core.Dead() {
		if c.ctx.Err() != nil {
			return nil, ErrClosed
		}
		select {
		case <-s.replaced:
		case <-s.missing:
			if s == c.sess.Load() {
				return nil, *s.refusal.Load()
			}
		case <-c.ctx.Done():
			return nil, ErrClosed
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-t.C:
			return nil, fmt.Errorf("%w: session lost and not reopened within %v", ErrUnavailable, c.o.OpTimeout)
		}
		s = c.sess.Load()
	}
	return s, nil
}
