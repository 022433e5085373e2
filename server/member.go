package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/wrongport"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	joinTimeout = 10 * time.Second
	// maxReplyBytes bounds an answer of another directory node; a Status is large.
	maxReplyBytes = 64 << 20
)

// peers is which other directory nodes do not answer this one, while it leads. Raft calls
// observe, from any goroutine; the zero value is ready.
type peers struct {
	mu struct {
		sync.Mutex
		silent map[raft.ServerID]silence
	}
}

// silence is since when a directory node has not answered, and in which term.
type silence struct {
	term  uint64
	since time.Time
}

// observe is a raft.FilterFn that keeps what it is shown and passes nothing on: unlike a
// channel it misses nothing.
func (p *peers) observe(o *raft.Observation) bool {
	switch x := o.Data.(type) {
	case raft.FailedHeartbeatObservation:
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.mu.silent == nil {
			p.mu.silent = make(map[raft.ServerID]silence)
		}
		p.mu.silent[x.PeerID] = silence{o.Raft.CurrentTerm(), x.LastContact}
	case raft.ResumedHeartbeatObservation:
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.mu.silent, x.PeerID)
	}
	return false
}

// forget drops what is known of a directory node that is new, or is no member any more.
func (p *peers) forget(id raft.ServerID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.mu.silent, id)
}

// silence is how long a directory node has not answered in term, 0 if it does or it has been
// less than least.
func (p *peers) silence(id raft.ServerID, term uint64, least time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.mu.silent[id]
	if d := time.Since(s.since); ok && s.term == term && d >= least {
		return d
	}
	return 0
}

// mind watches over this node's membership: it joins, tells the leader of a
// changed address, and stops a node that was removed or whose disk failed.
func (n *Node) mind() {
	n.hurry()
	often := max(n.opts.ElectionTimeout/4, 20*time.Millisecond)
	tick := time.NewTimer(often)
	defer tick.Stop()
	// A removal is believed when no leader has called for this long since: the
	// entry that removes a node may reach it without being committed, and then
	// the next leader calls again.
	patience := n.patience()
	present := time.Now() // when the node last was a member, or heard a leader
	var dismissed dismissal
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-n.store.Failed():
			n.fail(fmt.Errorf("directory %q: data folder %s: %w", n.opts.ID, n.opts.DataDir, n.store.Err()))
			return
		case <-tick.C:
		}
		members := n.members()
		member := n.member(members)
		now := time.Now()
		if member || len(members) == 0 || now.Sub(n.raft.LastContact()) < patience {
			present = now
		} else if now.Sub(present) >= patience {
			n.fail(ErrRemoved)
			return
		}
		if member && now.Sub(n.raft.LastContact()) >= patience && n.raft.State() != raft.Leader &&
			dismissed.due(now, patience) {
			if dismissed.noteAnswer(n.isDismissed(patience), now) {
				n.fail(ErrRemoved)
				return
			}
		}
		if (len(members) == 0 && len(n.opts.Join) > 0) || (member && n.outdated(members)) {
			err := n.enterCluster(member)
			if errors.Is(err, ErrRemoved) && dismissed.due(now, patience) && dismissed.noteAnswer(true, now) {
				n.fail(ErrRemoved)
				return
			}
			if errors.Is(err, ErrTaken) {
				n.fail(fmt.Errorf("directory %q: %w", n.opts.ID, err))
				return
			}
			switch {
			case err == nil || n.ctx.Err() != nil:
			case member:
				n.log.Info("directory: its new address is told again", "id", n.opts.ID, "err", err)
			default:
				n.log.Info("directory: not admitted: it neither votes nor counts, and asks again", "id", n.opts.ID,
					"err", err)
			}
			tick.Reset(often)
		} else if member {
			tick.Reset(4 * often) // nothing but a removal is to be noticed
		} else {
			tick.Reset(often)
		}
	}
}

// patience is how long a member is silent before it is believed to be gone.
func (n *Node) patience() time.Duration { return max(5*n.opts.ElectionTimeout, time.Second) }

// dismissal is a removal that a node hears of from others: raft sends a node that is removed what is on its way to it
// and no more, so that the entry which says so may never come. A leader that does not name the node is believed when
// another answer, as long after the first as a removal takes to be believed, is the same; the first may be of a leader
// whose removal is not committed.
type dismissal struct {
	asked, since time.Time // the last answer; the first of those that are alike
}

// due reports whether it is time to ask.
func (d *dismissal) due(now time.Time, patience time.Duration) bool {
	return now.Sub(d.asked) >= patience
}

// noteAnswer takes an answer, and reports whether the node is gone.
func (d *dismissal) noteAnswer(gone bool, now time.Time) bool {
	first := d.since.IsZero()
	if d.asked = now; !gone {
		d.since = time.Time{}
		return false
	}
	if first {
		d.since = now
	}
	return !first
}

// isDismissed asks the other directory nodes of this cluster, each for at most patience, whether a leader among them
// knows this one no more.
func (n *Node) isDismissed(patience time.Duration) bool {
	var ask []string
	cluster := ""
	n.machine.view(func(s *fsm.State) {
		cluster = s.Meta().ClusterId
		for _, d := range s.Directory() {
			if d.Id != n.opts.ID {
				ask = append(ask, d.GrpcAddr)
			}
		}
	})
	for _, addr := range ask {
		ctx, cancel := context.WithTimeout(n.ctx, patience)
		var reply *dirpb.StatusReply
		err := n.call(ctx, addr, func(c dirpb.DirectoryClient) (err error) {
			reply, err = c.Status(ctx, &dirpb.StatusRequest{})
			return err
		})
		cancel()
		if err != nil || !reply.Leads || reply.ClusterId != cluster {
			continue
		}
		return !slices.ContainsFunc(reply.Directory, func(d *dirpb.DirectoryNode) bool {
			return d.Id == n.opts.ID && d.Incarnation == n.disk.incarnation
		})
	}
	return false
}

// hurry elects the only voter of a cluster at once: it has no leader to wait for.
// When it cannot call itself, the election timeout does the same a little later.
func (n *Node) hurry() {
	members := n.members()
	if !n.member(members) || len(members) != 1 || members[n.opts.ID].Suffrage != raft.Voter {
		return
	}
	q := &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}
	err := n.transport.TimeoutNow(n.disk.server(), n.transport.LocalAddr(), q, &raft.TimeoutNowResponse{})
	if err != nil {
		n.log.Debug("directory: no election ahead of time", "err", err)
	}
}

// claimID gives entry its identity: the one that has the id, or else caller. The leader does that, and not the state
// machine: that of an earlier version stores an entry as it is. An error matches fsm.ErrForeign.
func claimID(s *fsm.State, entry *fsmpb.Directory, caller string) error {
	if err := s.CheckDirectoryOwner(entry.Id, caller); err != nil {
		return err
	}
	entry.Identity = cmp.Or(s.DirectoryNode(entry.Id).GetIdentity(), caller)
	return nil
}

// outdated reports whether the cluster has other addresses of this node than it
// has now. A leader tells its address itself.
func (n *Node) outdated(members map[string]raft.Server) bool {
	if n.raft.State() == raft.Leader || len(members) == 1 {
		return false
	}
	if string(members[n.opts.ID].Address) != string(n.transport.LocalAddr()) {
		return true // so no leader can call
	}
	if _, leader := n.raft.LeaderWithID(); leader == "" {
		return false
	}
	var me *fsmpb.Directory
	n.machine.view(func(s *fsm.State) { me = s.DirectoryNode(n.opts.ID) })
	self := n.self()
	return me.GetRaftAddr() != self.RaftAddr || me.GetGrpcAddr() != self.GrpcAddr
}

// enterCluster joins the cluster, or starts it with this node alone if that is this node's part: see Options.Bootstrap.
// A node of the list that does not answer may be in a cluster, and this one the member of it that lost its disk, so no
// cluster is started before all have.
func (n *Node) enterCluster(member bool) error {
	if member || !n.opts.Bootstrap || n.opts.Join[0] != n.grpcAddr {
		return n.join(member)
	}
	for _, addr := range n.opts.Join[1:] {
		ctx, cancel := context.WithTimeout(n.ctx, joinTimeout)
		in := false
		err := n.call(ctx, addr, func(c dirpb.DirectoryClient) error {
			reply, err := c.Status(ctx, &dirpb.StatusRequest{})
			in = reply.GetClusterId() != "" || reply.GetRaftApplied() > 0 || len(reply.GetDirectory()) > 0
			return err
		})
		cancel()
		if in {
			return n.join(member)
		}
		if err != nil {
			return fmt.Errorf("ask %s, which begins with this node, whether it is in a cluster: %w", addr, err)
		}
	}
	if err := n.raft.BootstrapCluster(n.alone()).Error(); err != nil {
		return err
	}
	n.log.Info("directory: cluster is started", "id", n.opts.ID, "others", n.opts.Join[1:])
	n.hurry()
	return nil
}

// join asks the leader, wherever it is, to enter this node, or to note its new addresses if it is a member by its own
// log. Then the error matches ErrRemoved if the leader knows better; otherwise ErrTaken if the id is another's.
func (n *Node) join(member bool) error {
	ctx, cancel := context.WithTimeout(n.ctx, joinTimeout)
	defer cancel()
	self := n.self()
	var ask []string
	if a := n.leaderGRPC(); a != "" {
		ask = append(ask, a)
	}
	n.machine.view(func(s *fsm.State) {
		for _, d := range s.Directory() {
			if d.Id != self.Id {
				ask = append(ask, d.GrpcAddr)
			}
		}
	})
	ask = append(ask, n.opts.Join...)
	var errs []error
	asked := map[string]bool{n.grpcAddr: true}
	for len(ask) > 0 {
		addr := ask[0]
		ask = ask[1:]
		if asked[addr] {
			continue
		}
		asked[addr] = true
		err := n.call(ctx, addr, func(c dirpb.DirectoryClient) error {
			if !member {
				// A leader of an earlier version would take this node for the member that it was with another disk.
				s, err := c.Status(ctx, &dirpb.StatusRequest{})
				if err != nil {
					return err
				}
				if s.KnowsLevel < fsm.Level {
					return fmt.Errorf("it runs %s: start kvd %s there first", program(s.Version), n.opts.Version)
				}
			}
			_, err := c.JoinDirectory(ctx, &dirpb.JoinDirectoryRequest{Id: self.Id, RaftAddr: self.RaftAddr,
				GrpcAddr: self.GrpcAddr, Member: member,
				Level: fsm.Level, Version: n.opts.Version, Incarnation: n.disk.incarnation, Process: n.process})
			return err
		})
		if member && status.Code(err) == codes.NotFound {
			return fmt.Errorf("%w: %w", ErrRemoved, err)
		}
		if status.Code(err) == codes.Aborted {
			return fmt.Errorf("%w: %w", ErrTaken, err)
		}
		if err == nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("ask %s: %w", addr, err))
		for _, d := range status.Convert(err).Details() {
			if nl, ok := d.(*dirpb.NotLeader); ok && nl.Leader != "" {
				ask = append([]string{nl.Leader}, ask...)
			}
		}
	}
	return errors.Join(errs...)
}

func (n *Node) call(ctx context.Context, addr string, fn func(dirpb.DirectoryClient) error) error {
	creds := insecure.NewCredentials()
	if n.opts.TLS != nil {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return err
		}
		conf, err := certs.ForHost(n.opts.Identities.Called(clientTLS(n.opts.TLS), identity.Directory), host)
		if err != nil {
			return err
		}
		creds = credentials.NewTLS(conf)
	}
	conn, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(wrongport.Creds(creds, "a directory node's gRPC port", nil)),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReplyBytes)))
	if err != nil {
		return err
	}
	return errors.Join(fn(dirpb.NewDirectoryClient(conn)), conn.Close())
}
