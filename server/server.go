// Package server is the directory, a raft group. It knows memory nodes, namespaces, placement groups,
// sessions and the reclaim epoch. It serves them by the gRPC contract of internal/dirpb. No data operation
// calls it.
//
// Package server/fsm is what is replicated, and how it changes; server/lead is what a leader knows and
// decides beyond that; server/raftstore keeps it on disk.
// This package adds what those may not have: clocks, randomness, locks, the network, and
// who leads.
//
// Start with [Open] and [Node], then leadership in lead.go, which hosts a lead.Leader. A Node's methods may be
// called concurrently. A Node owns its goroutines, listeners and folder from
// Open until Done is closed.
//
// Outcomes follow one rule. A status FAILED_PRECONDITION with a NotLeader detail says that nothing was done.
// UNAVAILABLE says in words whether nothing was done or the outcome is unknown. Every other error is a
// refusal that changed nothing.
//
// A member is a node with a disk (disk.go): a node that has lost its disk is another one. A connection
// between two begins with who they are (hello.go). Members are admitted and removed in admit.go; member.go
// has their own side of it.
//
// The thin host around a pure machine follows rqlite's store; leases that only
// the leader keeps, etcd's lessor.
package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/raftstore"
)

var (
	// ErrRemoved is why a node stopped that an operator removed from the cluster.
	ErrRemoved = errors.New("this directory node was removed from the cluster")
	// ErrTaken is why a node stopped whose id another one has, which is alive: nothing was done.
	ErrTaken = errors.New("the id belongs to another directory node, which is alive")
	// ErrNoState means that a node has nothing to start from.
	ErrNoState = errors.New("the data folder holds no cluster: bootstrap a new one or join one")
)

const (
	maxMessageBytes = 8 << 20
	window          = 1 << 20 // bytes that a client may send ahead of what was read
	logCacheEntries = 512
	raftPool        = 3 // idle connections kept to each node
	raftTimeout     = 5 * time.Second
)

// Node is one directory node.
type Node struct {
	dirpb.UnimplementedDirectoryServer

	opts      Options
	disk      disk
	process   string // random, of this one
	log       *slog.Logger
	grpcAddr  string // advertised
	streams   *streams
	renewals  atomic.Uint64 // answered
	transport *raft.NetworkTransport
	store     *raftstore.Store
	machine   *machine
	raft      *raft.Raft
	grpc      *grpc.Server
	inlet     *inlet

	leading atomic.Pointer[leadership] // nil while another node leads
	reigns  event                      // when that changes
	peers   peers

	ctx    context.Context // ends when the node begins to stop
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
	// futures is how many of raft's are waited for.
	futures atomic.Int64
	quorum  quorum
	done    chan struct{}
	stop    sync.Once
	opened  chan struct{} // closed when Open ends: Raft may stop the node before that
	// membership is taken while members join, and while the level is raised because all members know the next one.
	membership chan struct{}
}

// Open starts a directory node. ctx bounds the start only; use Ready to wait for
// a leader.
func Open(ctx context.Context, opts Options) (_ *Node, err error) {
	opts.ensureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, fmt.Errorf("directory options: %w", err)
	}
	n := &Node{opts: opts, log: opts.Logger, process: rand.Text(), done: make(chan struct{}),
		opened: make(chan struct{}), membership: make(chan struct{}, 1)}
	n.ctx, n.cancel = context.WithCancelCause(context.Background())
	n.quorum = quorum{ended: n.ctx.Done(), verify: func() error {
		return n.raft.VerifyLeader().Error()
	}, began: func() func() {
		n.futures.Add(1)
		return func() { n.futures.Add(-1) }
	}}
	var undo []func() error
	defer func() {
		if err != nil {
			n.stop.Do(func() { n.cancel(err) }) // there is nothing to shut down
			for _, f := range slices.Backward(undo) {
				err = errors.Join(err, f())
			}
		}
		close(n.opened)
	}()

	lis, err := listen(ctx, "GRPCAddr", opts.GRPCAddr)
	if err != nil {
		return nil, err
	}
	undo = append(undo, lis.Close)
	if n.inlet, err = newInlet(lis, netsrv.Limits{
		MaxConns: opts.MaxConns, MaxPerAddr: opts.MaxConnsPerAddr, HandshakeTimeout: handshakeTimeout, Logger: n.log,
		// All clients may call anew at once, as after an election, and those over a limit would keep each other out.
		MaxHandshakes: math.MaxInt,
	}); err != nil {
		return nil, fmt.Errorf("directory %q: %w", opts.ID, err)
	}
	n.grpcAddr = opts.GRPCAdvertise
	if n.grpcAddr == "" {
		n.grpcAddr = lis.Addr().String()
	}
	raftLis, err := listen(ctx, "RaftAddr", opts.RaftAddr)
	if err != nil {
		return nil, err
	}
	raftAddr := opts.RaftAdvertise
	if raftAddr == "" {
		raftAddr = raftLis.Addr().String()
	}
	if n.streams, err = newStreams(raftLis, raftAddr, opts.TLS, opts.Identities, n.log); err != nil {
		return nil, fmt.Errorf("directory %q: %w", opts.ID, err)
	}
	undo = append(undo, n.streams.Close)

	n.store, err = raftstore.Open(ctx, raftstore.Options{
		Dir: opts.DataDir, FS: opts.fs, StallTimeout: opts.stallTimeout, Logger: n.log,
	})
	if err != nil {
		return nil, fmt.Errorf("directory %q: %w", opts.ID, err)
	}
	undo = append(undo, n.store.Close)
	if n.machine, err = newMachine(n.store, n.log); err != nil {
		return nil, fmt.Errorf("directory %q, kvd %s: restore from %s: %w", opts.ID, opts.Version, opts.DataDir, err)
	}
	n.machine.halt = func(err error) {
		n.fail(fmt.Errorf("directory %q, kvd %s: %w", opts.ID, opts.Version, err))
	}
	if err := n.startRaft(raftAddr); err != nil {
		return nil, fmt.Errorf("directory %q: %w", opts.ID, err)
	}

	serve := append(n.inlet.options(),
		grpc.MaxRecvMsgSize(maxMessageBytes), grpc.ForceServerCodecV2(newCodec()),
		// Windows of a fixed size: to find a better one, gRPC would answer each request with a ping.
		grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(window),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	)
	serve = append(serve, grpc.UnknownServiceHandler(n.noMethod))
	n.grpc = grpc.NewServer(append(serve, n.identify()...)...)
	dirpb.RegisterDirectoryServer(n.grpc, n)
	healthpb.RegisterHealthServer(n.grpc, health{n: n})

	n.wg.Add(3)
	go func() {
		defer n.wg.Done()
		// Serve returns nil after a Stop.
		if err := n.grpc.Serve(n.inlet); err != nil {
			n.fail(fmt.Errorf("directory %q: serve %s: %w", opts.ID, opts.GRPCAddr, err))
		}
	}()
	go func() { defer n.wg.Done(); n.lead() }()
	go func() { defer n.wg.Done(); n.mind() }()
	return n, nil
}

func listen(ctx context.Context, field, addr string) (net.Listener, error) {
	lis, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("directory cannot listen on %s %s: %w", field, addr, err)
	}
	return lis, nil
}

// startRaft starts raft on the store; on an error nothing of it is left running.
func (n *Node) startRaft(addr string) error {
	logger := newRaftLogger(n.log)
	conf := raft.DefaultConfig()
	conf.Logger = logger
	conf.HeartbeatTimeout = n.opts.ElectionTimeout
	conf.ElectionTimeout = n.opts.ElectionTimeout
	conf.LeaderLeaseTimeout = n.opts.ElectionTimeout * 3 / 4
	// A leader that removed itself goes on as a follower without a vote until mind
	// stops the node; raft's own way of stopping cannot be waited for.
	conf.ShutdownOnRemove = false
	conf.SnapshotThreshold = n.opts.snapshotLogs
	conf.TrailingLogs = n.opts.snapshotLogs
	conf.SnapshotInterval = 10 * time.Second
	conf.NoSnapshotRestoreOnStart = true // newMachine did
	conf.NoLegacyTelemetry = true

	logs, err := raft.NewLogCache(logCacheEntries, keptLog{n.store, n.machine})
	if err != nil {
		return err
	}
	snaps := keptSnapshots{n.store.Snapshots(), n.machine}
	has, err := raft.HasExistingState(logs, n.store, snaps)
	if err != nil {
		return err
	}
	if n.disk, err = openDisk(n.store, n.opts.ID, has); err != nil {
		return fmt.Errorf("%s: %w", n.opts.DataDir, err)
	}
	conf.LocalID = n.disk.server()
	if !has && !n.opts.Bootstrap && len(n.opts.Join) == 0 {
		return fmt.Errorf("%s: %w", n.opts.DataDir, ErrNoState)
	}
	// Each follower is sent one request at a time, which takes along all that has come meanwhile. With
	// pipelines a leader that is told of a newer term can wait for ever: raft's goroutine that takes
	// the replies in has ended, and the one that sends waits for it, so that Shutdown never returns
	// (raft 1.8.0, pipelineReplicate).
	n.transport = raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: n.streams, MaxPool: raftPool, Timeout: raftTimeout, Logger: logger, MaxRPCsInFlight: 1,
	})
	if !has && n.opts.Bootstrap && len(n.opts.Join) == 0 {
		err = raft.BootstrapCluster(conf, logs, n.store, snaps, n.transport, n.alone())
	}
	if err == nil {
		n.raft, err = raft.NewRaft(conf, n.machine, logs, stable{n.store}, snaps, n.transport)
	}
	if err != nil {
		return errors.Join(err, n.transport.Close())
	}
	n.raft.RegisterObserver(raft.NewObserver(nil, false, n.peers.observe))
	n.streams.begin(&party{
		server: conf.LocalID, process: n.process,
		cluster: func() (id string) {
			n.machine.view(func(s *fsm.State) { id = s.Meta().ClusterId })
			return id
		},
		at: func(address string) raft.ServerID {
			return n.find(func(m raft.Server) bool { return string(m.Address) == address }).ID
		},
		addressOf: func(id raft.ServerID) string {
			return string(n.find(func(m raft.Server) bool { return m.ID == id }).Address)
		},
		mixed: func() bool { return n.disk.incarnation == "" && n.level() < fsm.Level && len(n.members()) > 0 },
	})
	if err := n.claimDisk(); err != nil {
		return errors.Join(err, n.raft.Shutdown().Error())
	}
	return nil
}

// alone is a cluster of this node.
func (n *Node) alone() raft.Configuration {
	return raft.Configuration{Servers: []raft.Server{{
		Suffrage: raft.Voter, ID: n.disk.server(), Address: n.transport.LocalAddr(),
	}}}
}

// stable keeps raft from panicking when the disk has failed, or when the store is closed and
// the leader's last call is still under way: raft cannot go on
// without storing its term, but this node stops in a moment anyway. Until then
// raft is told that the term was stored. That is safe because votes and entries
// are refused: it grants no vote, wins no election and acknowledges no entry.
type stable struct{ *raftstore.Store }

func (s stable) SetUint64(key []byte, val uint64) error {
	err := s.Store.SetUint64(key, val)
	if err != nil && (s.Err() != nil || errors.Is(err, raftstore.ErrClosed)) && string(key) == "CurrentTerm" {
		return nil
	}
	return err
}

// RaftState is where a directory node's Raft stands.
type RaftState struct {
	Term                           uint64
	LastIndex, Commit, Applied     uint64 // of the log
	SnapshotIndex, SnapshotEntries uint64 // of the last snapshot; entries since
}

// Raft tells where this node's Raft stands.
func (n *Node) Raft() RaftState {
	last, applied := n.raft.LastIndex(), n.raft.AppliedIndex()
	snap, _ := strconv.ParseUint(n.raft.Stats()["last_snapshot_index"], 10, 64)
	return RaftState{Term: n.raft.CurrentTerm(), LastIndex: last, Commit: n.raft.CommitIndex(), Applied: applied,
		SnapshotIndex: snap, SnapshotEntries: last - min(last, snap)}
}

// Doors count the connections of the gRPC and the Raft listener, for metrics.
func (n *Node) Doors() (grpc, raft *netsrv.Door) { return n.inlet.door, n.streams.door }

// Addr is the gRPC address told to others.
func (n *Node) Addr() string { return n.grpcAddr }

// Done is closed when the node has stopped, by Close or by itself; Err then says
// why.
func (n *Node) Done() <-chan struct{} { return n.done }

// Err is why the node stopped by itself: nil while it runs and after Close.
func (n *Node) Err() error {
	if err := context.Cause(n.ctx); !errors.Is(err, errClosed) {
		return err
	}
	return nil
}

var errClosed = errors.New("closed")

// Ready waits until this node leads, or knows where the leader is.
func (n *Node) Ready(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if n.leading.Load() != nil {
			return nil
		}
		if n.leaderGRPC() != "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("directory %q has no leader yet: %w", n.opts.ID, ctx.Err())
		case <-n.ctx.Done():
			return fmt.Errorf("directory %q stopped: %w", n.opts.ID, context.Cause(n.ctx))
		case <-tick.C:
		}
	}
}

// Close stops the node and waits for it. A node that leads hands the leadership over
// first, so that no lease runs out for want of a leader. It is idempotent.
func (n *Node) Close() error {
	n.fail(errClosed)
	<-n.done
	return n.Err()
}

// fail begins to stop the node because of err, once.
func (n *Node) fail(err error) {
	n.stop.Do(func() {
		n.cancel(err)
		go func() {
			if <-n.opened; n.grpc != nil {
				n.shutdown()
			}
		}()
	})
}

func (n *Node) shutdown() {
	defer close(n.done)
	if err := n.Err(); err != nil {
		n.log.Error("directory: stopping", "id", n.opts.ID, "err", err)
	} else {
		n.handOver()
	}
	// Answers under way get a moment; streams end with the node's context.
	stopped := make(chan struct{})
	go func() { defer close(stopped); n.grpc.GracefulStop() }()
	select {
	case <-stopped:
	case <-time.After(time.Second):
		n.grpc.Stop()
		<-stopped
	}
	n.settled()
	// This closes the transport too.
	if err := n.raft.Shutdown().Error(); err != nil {
		n.log.Warn("directory: raft did not stop cleanly", "err", err)
	}
	n.wg.Wait()
	if err := n.store.Close(); err != nil {
		n.log.Warn("directory: data folder did not close cleanly", "dir", n.opts.DataDir, "err", err)
	}
}

func (n *Node) self() *fsmpb.Directory {
	return &fsmpb.Directory{Id: n.opts.ID, RaftAddr: string(n.transport.LocalAddr()), GrpcAddr: n.grpcAddr}
}

// members are raft's current members by id.
func (n *Node) members() map[string]raft.Server {
	out := make(map[string]raft.Server)
	for _, m := range n.configuration() {
		out[diskOf(m.ID).id] = m
	}
	return out
}

func (n *Node) configuration() []raft.Server {
	// GetConfiguration never fails: it returns what is in memory.
	if f := n.raft.GetConfiguration(); f.Error() == nil {
		return f.Configuration().Servers
	}
	return nil
}

// find returns a member of raft's for which is holds, or none.
func (n *Node) find(is func(raft.Server) bool) raft.Server {
	all := n.configuration()
	if i := slices.IndexFunc(all, is); i >= 0 {
		return all[i]
	}
	return raft.Server{}
}

// member reports whether this node, with the disk that it has, is among members.
func (n *Node) member(members map[string]raft.Server) bool {
	return members[n.opts.ID].ID == n.disk.server()
}

// leaderGRPC is the gRPC address of another node that leads, empty when there is
// none, or this one has been elected and is not ready yet.
func (n *Node) leaderGRPC() string {
	_, id := n.raft.LeaderWithID()
	if id == "" || id == n.disk.server() {
		return ""
	}
	var addr string
	n.machine.view(func(s *fsm.State) { addr = s.DirectoryNode(diskOf(id).id).GetGrpcAddr() })
	return addr
}
