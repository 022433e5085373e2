package server

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"

	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/server/fsm"
)

// Options configure a directory node.
type Options struct {
	// ID names this directory node within the cluster, for good. Required.
	ID string
	// DataDir holds everything the node remembers. Required unless InMemory.
	DataDir string
	// InMemory keeps the state in memory only; a stopped node is forgotten. For
	// tests and trials.
	InMemory bool

	// GRPCAddr is where clients, memory nodes and operators call, host:port.
	// Default 127.0.0.1:0.
	GRPCAddr string
	// RaftAddr is where other directory nodes call, host:port.
	// Default 127.0.0.1:0.
	RaftAddr string
	// GRPCAdvertise and RaftAdvertise are the addresses told to others. Default:
	// the listeners' own. Required where a listener's host is unspecified.
	GRPCAdvertise string
	RaftAdvertise string

	// MaxConns is how many connections GRPCAddr takes, MaxConnsPerAddr how many of them from one address; see
	// netsrv.Limits, which has the defaults.
	MaxConns, MaxConnsPerAddr int

	// Bootstrap starts a new cluster with this node alone, unless DataDir already holds one. With Join as well,
	// Join names all directory nodes that begin together, this one too and alike for all of them. The first that
	// it names starts the cluster, once each of the others has answered that it is in none. Then the others
	// enter it.
	Bootstrap bool
	// Join are gRPC addresses of directory nodes whose cluster this node enters,
	// unless it is a member already.
	Join []string

	// Lease is how long a session or a memory node lives without being heard.
	// Default 1 s, least 50 ms.
	Lease time.Duration
	// LastCopyLeases is how many leases a memory node may be silent that holds the only copy of something. To
	// call it lost is to lose that. Default 10.
	LastCopyLeases int
	// LastCopyWait is how long one may be silent whose memory outlives its process, since it may come back
	// with that. Default 0: until an operator gives it up.
	LastCopyWait time.Duration
	// EpochInterval is the least time between two reclaim epochs.
	// Default 100 ms, least 10 ms.
	EpochInterval time.Duration
	// ScrubInterval is the least time between two automatic scrubs of a placement
	// group in which sessions ended uncleanly. Default 30 s; negative: never.
	ScrubInterval time.Duration
	// ElectionTimeout is how long a follower waits for its leader, and a
	// candidate for votes. Default 300 ms, least 50 ms.
	ElectionTimeout time.Duration
	// TokenLife is how long a session's token opens connections to memory nodes; a session has another one
	// before half of that is over. Memory nodes' clocks may be wrong by the length of the other half. Default 1 h,
	// least 2 s.
	TokenLife time.Duration
	// DefaultNamespace is created by the first session that names it or none.
	// Default "default".
	DefaultNamespace string

	// TLS authenticates both listeners and this node's calls to others. It needs Certificates, and RootCAs or
	// ClientCAs. GetConfigForClient may be in their place; calls ask it too, for what holds now. Callers must
	// show a certificate whatever ClientAuth says. The raft listener takes one of a directory node; the other
	// takes one of a role that may call. This node's own must be of a directory node. VerifyConnection is asked
	// again at each request of a connection: a certificate may have been revoked.
	TLS *tls.Config
	// Identities says how the certificates of callers name their owners, if there is TLS. The zero value
	// takes SPIFFE ids of any trust domain.
	Identities identity.Mapping
	// Insecure permits listeners beyond loopback without TLS.
	Insecure bool

	// Version is what the program calls itself, to directory nodes and operators of other versions. Default "devel".
	Version string
	// Logger receives what an operator should know. Default: discarded.
	Logger *slog.Logger

	fs           vfs.FS        // tests: the filesystem under DataDir
	stallTimeout time.Duration // tests: see raftstore.Options
	snapshotLogs uint64        // tests: entries between snapshots, and kept after one
}

func (o *Options) ensureDefaults() {
	def := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	def(&o.GRPCAddr, "127.0.0.1:0")
	def(&o.RaftAddr, "127.0.0.1:0")
	def(&o.DefaultNamespace, "default")
	def(&o.Version, "devel")
	if o.InMemory {
		def(&o.DataDir, "directory")
		if o.fs == nil {
			o.fs = vfs.NewMem()
		}
	}
	if o.Lease == 0 {
		o.Lease = time.Second
	}
	if o.LastCopyLeases == 0 {
		o.LastCopyLeases = 10
	}
	if o.EpochInterval == 0 {
		o.EpochInterval = 100 * time.Millisecond
	}
	if o.ScrubInterval == 0 {
		o.ScrubInterval = 30 * time.Second
	}
	if o.ElectionTimeout == 0 {
		o.ElectionTimeout = 300 * time.Millisecond
	}
	if o.TokenLife == 0 {
		o.TokenLife = time.Hour
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.snapshotLogs == 0 {
		o.snapshotLogs = 4096
	}
}

// Validate joins every problem of o.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.ID == "" || len(o.ID) > fsm.MaxNameLen {
		bad("ID is %q, want 1..%d characters", o.ID, fsm.MaxNameLen)
	} else if err := fsm.CheckText("ID", o.ID); err != nil {
		bad("%v", err)
	} else if diskOf(raft.ServerID(o.ID)).incarnation != "" {
		bad("ID is %q, which ends like the name of a data folder: leave out %q", o.ID, incarnationMark)
	}
	if err := fsm.CheckText("Version", o.Version); err != nil {
		bad("%v", err)
	}
	if o.DataDir == "" && !o.InMemory {
		bad("DataDir is required unless InMemory is set")
	}
	for _, l := range []struct{ name, addr, advertise string }{
		{"GRPCAddr", o.GRPCAddr, o.GRPCAdvertise}, {"RaftAddr", o.RaftAddr, o.RaftAdvertise},
	} {
		host, err := splitAddr(l.addr, 0)
		if err != nil {
			bad("%s is %q: %v", l.name, l.addr, err)
			continue
		}
		if o.TLS == nil && !o.Insecure && !isLoopback(host) {
			bad("%s is %q, which others can reach: set TLS, or Insecure to do without", l.name, l.addr)
		}
		advertise := l.name[:4] + "Advertise"
		if l.advertise == "" {
			if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
				bad("%s is %q: %s is required to tell others where to call", l.name, l.addr, advertise)
			}
		} else if err := checkAdvertised(l.advertise); err != nil {
			bad("%s is %q: %v", advertise, l.advertise, err)
		}
	}
	if o.MaxConns < 0 || o.MaxConnsPerAddr < 0 {
		bad("MaxConns is %d and MaxConnsPerAddr %d, want at least 1, or 0 for the defaults", o.MaxConns,
			o.MaxConnsPerAddr)
	}
	for _, a := range o.Join {
		if _, err := splitAddr(a, 1); err != nil {
			bad("Join holds %q: %v", a, err)
		}
	}
	if self := cmp.Or(o.GRPCAdvertise, o.GRPCAddr); o.Bootstrap && len(o.Join) > 0 && !slices.Contains(o.Join, self) {
		bad("Join %q lacks this node's own address %q: with Bootstrap it names all nodes that begin together", o.Join,
			self)
	}
	least := func(name string, v, min time.Duration) {
		if v < min {
			bad("%s is %v, want at least %v", name, v, min)
		}
	}
	least("Lease", o.Lease, 50*time.Millisecond)
	if o.LastCopyWait < 0 {
		bad("LastCopyWait is %v, want 0 or more", o.LastCopyWait)
	}
	if o.LastCopyLeases < 1 {
		bad("LastCopyLeases is %d, want at least 1", o.LastCopyLeases)
	}
	least("EpochInterval", o.EpochInterval, 10*time.Millisecond)
	if o.ScrubInterval > 0 {
		least("ScrubInterval", o.ScrubInterval, 10*time.Millisecond)
	}
	least("ElectionTimeout", o.ElectionTimeout, 50*time.Millisecond)
	least("TokenLife", o.TokenLife, 2*time.Second)
	if t := o.TLS; t != nil {
		if len(t.Certificates) == 0 && t.GetCertificate == nil {
			bad("TLS has no certificate")
		}
		if t.ClientCAs == nil && t.RootCAs == nil && t.GetConfigForClient == nil {
			bad("TLS has neither RootCAs nor ClientCAs to check other nodes with")
		}
	}
	return errors.Join(errs...)
}

// splitAddr checks a host:port whose port is at least low and returns the host.
func splitAddr(addr string, low int) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", errors.New("want host:port")
	}
	if p, err := strconv.Atoi(port); err != nil || p < low || p > 65535 {
		return "", fmt.Errorf("port %q, want %d..65535", port, low)
	}
	return host, nil
}

// checkAdvertised refuses an address that others cannot call.
func checkAdvertised(addr string) error {
	if len(addr) > fsm.MaxLabelLen {
		return fmt.Errorf("%d bytes, want at most %d", len(addr), fsm.MaxLabelLen)
	}
	if err := fsm.CheckText("address", addr); err != nil {
		return err
	}
	host, err := splitAddr(addr, 1)
	if err != nil {
		return err
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		return errors.New("want a host that others can reach")
	}
	return nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
