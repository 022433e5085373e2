package ctl

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// Store is what commands use of a *client.Client and its tools.
type Store interface {
	client.API
	Stats() client.Stats
	Locate(key []byte) (inside.Location, error)
	ReadRaw(ctx context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error)
	PutGiven(ctx context.Context, records []inside.Given)
	Work(ctx context.Context, kind index.Kind, works []*repair.Work) []error
	Close() error
}

// Opened is a Client with its tools.
type Opened struct {
	*client.Client
	inside.Tools
}

// SessionOptions qualify a session.
type SessionOptions struct {
	Lanes    int // 0: chosen
	ReadOnly bool
	Mirrored bool // with a mirror, and as few hints as there can be
}

// Backend is one store as kvctl reaches it: over its directory. Its methods are not called concurrently.
type Backend interface {
	// Open opens a session of its own.
	Open(ctx context.Context, o SessionOptions) (Store, error)
	// Directory makes one request; see dirclient.Client.Call and CallOnce.
	Directory(ctx context.Context, idempotent bool, fn func(context.Context, dirpb.DirectoryClient) error) error
	Close() error
}

// keeping is a backend with a session of one lane that outlives a command.
type keeping interface {
	Session(ctx context.Context) (Store, error)
}

// Remote is a store that runs elsewhere.
type Remote struct {
	o       client.Options
	Devices []*rdma.Device
	ask     dirclient.Options
	dir     *dirclient.Client // nil until the first request; sessions have their own
}

// OpenStore makes the backend that the flags ask for. It does not connect yet.
func OpenStore(a *App) (Backend, error) {
	cfg, err := a.TLSConfig()
	if err != nil {
		return nil, err
	}
	if cfg == nil && !a.Insecure {
		for _, addr := range a.Directory {
			if !IsLoopback(addr) {
				return nil, Usagef("--directory %s is not a loopback address: want --tls-ca, or --insecure to send "+
					"everything in clear", addr)
			}
		}
	}
	for adapter := range strings.SplitSeq(a.RDMADevice, ",") {
		if err := (&verbs.Options{Device: strings.TrimSpace(adapter)}).Validate(); err != nil {
			return nil, Usagef("--rdma-device: %w", err)
		}
	}
	devices, err := providers.OpenFor(a.Provider, a.providerOptions(cfg))
	switch {
	case err != nil && a.Require != "":
		return nil, fmt.Errorf("--require: %w", err)
	case err != nil:
		return nil, fmt.Errorf("--provider: %w", err)
	}
	b, err := NewRemote(a, a.Directory, cfg, devices)
	if err != nil {
		err = errors.Join(err, providers.Close(devices))
	}
	return b, err
}

// providerOptions are what the flags say of providers.
func (a *App) providerOptions(cfg *tls.Config) providers.Options {
	return providers.Options{TLSClient: cfg, Identities: a.Mapping, Require: a.Require, Verbs: verbs.Options{
		Device: a.RDMADevice, Logger: a.debugLog()}}
}

// debugLog receives background errors and warnings; KVD_DEBUG shows them on stderr.
func (a *App) debugLog() *slog.Logger {
	if os.Getenv("KVD_DEBUG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(a.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// NewRemote takes over devices unless it fails.
func NewRemote(a *App, directory []string, cfg *tls.Config, devices []*rdma.Device) (*Remote, error) {
	if len(directory) == 0 {
		return nil, Usagef("--directory is empty: want host:port of a directory node")
	}
	for _, addr := range directory {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return nil, Usagef("--directory %q: want host:port, such as 10.0.0.11:7400", addr)
		}
	}
	log := a.debugLog()
	ask := dirclient.Options{Addrs: directory, TLS: cfg, Identities: a.Mapping, Logger: log,
		AttemptTimeout: min(a.Timeout, 2*time.Second)}
	if err := ask.Validate(); err != nil {
		return nil, Usagef("--directory: dirclient: %w", err)
	}
	return &Remote{Devices: devices, ask: ask, o: client.Options{Directory: directory, Namespace: a.Namespace,
		Provider: a.Provider, Require: a.Require,
		Devices: devices, Name: fmt.Sprintf("kvctl pid %d", os.Getpid()), OpTimeout: a.Timeout, TLS: cfg,
		Identities: a.Identities, Logger: log}}, nil
}

// Open opens a session within the time that an operation may take.
func (r *Remote) Open(ctx context.Context, o SessionOptions) (Store, error) {
	opts := r.o
	opts.ReadOnly = o.ReadOnly
	opts.Lanes = o.Lanes
	if o.Mirrored {
		opts.CacheBytes, opts.MirrorBytes = 1, 16<<20
	}
	ctx, cancel := context.WithTimeout(ctx, opts.OpTimeout)
	defer cancel()
	c, err := client.Open(ctx, opts)
	if err != nil {
		return nil, err
	}
	return Opened{c, inside.Of(c)}, nil
}

// Directory makes a request within the time that an operation may take.
func (r *Remote) Directory(ctx context.Context, idempotent bool,
	fn func(context.Context, dirpb.DirectoryClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, r.o.OpTimeout)
	defer cancel()
	if r.dir == nil {
		var err error
		if r.dir, err = dirclient.Open(r.ask); err != nil {
			return err
		}
	}
	if idempotent {
		return r.dir.Call(ctx, fn)
	}
	return r.dir.CallOnce(ctx, fn)
}

// Close closes the connections to directory nodes, and the devices.
func (r *Remote) Close() error {
	var err error
	if r.dir != nil {
		err = r.dir.Close()
	}
	return errors.Join(err, providers.Close(r.Devices))
}

// TLSConfig is nil when no TLS flag is set. With a certificate, connections go by what the files hold when they are
// made: a shell runs for longer than a certificate may be valid.
func (a *App) TLSConfig() (*tls.Config, error) {
	if a.TLSCA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(a.TLSCA)
	if err != nil {
		return nil, fmt.Errorf("--tls-ca: %w", err)
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: x509.NewCertPool(), ServerName: a.TLSName}
	if !cfg.RootCAs.AppendCertsFromPEM(pem) {
		return nil, Usagef("--tls-ca %s: no certificate in it", a.TLSCA)
	}
	if a.TLSCert == "" {
		if a.TLSCRL != "" {
			authorities, err := certs.Parse(pem)
			if err != nil {
				return nil, Usagef("--tls-ca %s: %w", a.TLSCA, err)
			}
			text, err := os.ReadFile(a.TLSCRL)
			if err != nil {
				return nil, fmt.Errorf("--tls-crl: %w", err)
			}
			revoked, err := certs.ParseRevoked(text, authorities)
			if err != nil {
				return nil, Usagef("--tls-crl %s: %w", a.TLSCRL, err)
			}
			cfg.VerifyConnection = revoked.VerifyConnection
		}
		return cfg, nil
	}
	// The passive side of perf serves, too, and asks nobody for a certificate.
	s, err := certs.Open(
		certs.Options{Files: certs.Files{CA: a.TLSCA, Cert: a.TLSCert, Key: a.TLSKey, CRL: a.TLSCRL,
			ServerName: a.TLSName}, Anonymous: true, AtUse: func(err error) {
			a.debugLog().Error("files of certificates have changed and are not usable: those in use are kept", "err",
				err)
		}})
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	return s.Config(), nil
}

// IsLoopback reports whether an address is of this machine alone, or is none.
func IsLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return true // refused later, for its form
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// With opens a session, runs fn and closes both, whatever happens. In a shell the
// commands that want one lane share a session.
func (a *App) With(ctx context.Context, o SessionOptions, fn func(Store) error) error {
	return a.WithBackend(func(b Backend) error {
		if k, ok := b.(keeping); ok && o.Lanes == 1 {
			s, err := k.Session(ctx)
			if err != nil {
				return err
			}
			return fn(s)
		}
		s, err := b.Open(ctx, o)
		if err != nil {
			return err
		}
		defer a.Closed("session", s.Close)
		return fn(s)
	})
}

// Closed closes something at the end of a command, whose outcome that does not
// change.
func (a *App) Closed(what string, fn func() error) {
	if err := fn(); err != nil {
		a.Say("kvctl: warning: closing the %s: %v", what, err)
	}
}

// WithBackend runs fn with the store that the flags name, and closes that, whatever happens.
func (a *App) WithBackend(fn func(Backend) error) error {
	b, err := a.Backend(a)
	if err != nil {
		return err
	}
	defer a.Closed("store", b.Close)
	return fn(b)
}

// ClusterStatus asks the directory's leader for everything.
func ClusterStatus(ctx context.Context, b Backend) (*dirpb.StatusReply, error) {
	st, _, err := askStatus(ctx, b, 0)
	return st, err
}

// electionPatience is how long ClusterView looks for a leader once another directory node
// has answered: an election takes less.
const electionPatience = 2 * time.Second

// ClusterView is ClusterStatus for people who look: if no leader answers it gives what
// another directory node knows, which overview.Answer tells.
func ClusterView(ctx context.Context, b Backend) (*dirpb.StatusReply, error) {
	st, other, err := askStatus(ctx, b, electionPatience)
	if err != nil && other != nil && ctx.Err() == nil {
		return other, nil
	}
	return st, err
}

// askStatus asks for the leader's status; other is the newest answer of one that does not lead.
// The search for the leader ends so long after the first of these; 0: it goes on.
func askStatus(ctx context.Context, b Backend, patience time.Duration) (st, other *dirpb.StatusReply, err error) {
	search, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err = b.Directory(search, true, func(ctx context.Context, d dirpb.DirectoryClient) error {
		rep, err := d.Status(ctx, &dirpb.StatusRequest{})
		if err != nil {
			return err
		}
		if overview.Answer(rep) == "" {
			st = rep
			return nil
		}
		if other == nil && patience > 0 {
			late := time.AfterFunc(patience, func() { cancel(errNoLeader) })
			context.AfterFunc(search, func() { late.Stop() })
		}
		if rep.GetRaftApplied() >= other.GetRaftApplied() {
			other = rep
		}
		return notLeader(rep)
	})
	return st, other, dirclient.NoEffect(err)
}

var errNoLeader = errors.New("no directory node that answers leads")

// notLeader is what a directory node that does not lead answers to other requests: it has
// the request go on to the leader.
func notLeader(st *dirpb.StatusReply) error {
	leader := &dirpb.NotLeader{}
	for _, d := range st.GetDirectory() {
		if d.GetLeader() && d.GetId() != st.GetAnsweredBy() {
			leader.Leader = d.GetGrpcAddr()
		}
	}
	s, err := status.New(codes.FailedPrecondition, "directory node "+st.GetAnsweredBy()+" does not lead").WithDetails(
		leader)
	if err != nil {
		return err
	}
	return s.Err()
}

// OwnNamespace finds the namespace that commands work in.
func (a *App) OwnNamespace(m *dirpb.Map) (*dirpb.Namespace, error) {
	ns, err := NamespaceOf(m, a.Namespace)
	if err != nil && len(m.GetNamespaces()) > 0 {
		err = fmt.Errorf("%w (--namespace or KVD_NAMESPACE chooses one)", err)
	}
	return ns, err
}

// maxNamed is how many namespaces an error names.
const maxNamed = 20

// NamespaceOf finds a namespace by name in a map.
func NamespaceOf(m *dirpb.Map, name string) (*dirpb.Namespace, error) {
	i := slices.IndexFunc(m.GetNamespaces(), func(n *dirpb.Namespace) bool { return n.GetName() == name })
	if i < 0 {
		if len(m.GetNamespaces()) == 0 {
			return nil, fmt.Errorf("%w %q: there is none yet (kvctl namespace create %s)", client.ErrNoNamespace, name,
				name)
		}
		names, more := MapTo(m.GetNamespaces(), (*dirpb.Namespace).GetName), ""
		if n := len(names) - maxNamed; n > 0 {
			names, more = names[:maxNamed], fmt.Sprintf(" and %d more", n)
		}
		return nil, fmt.Errorf("%w %q: there are %s%s", client.ErrNoNamespace, name, strings.Join(names, ", "), more)
	}
	return m.GetNamespaces()[i], nil
}
