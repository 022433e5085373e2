package server

import (
	"context"
	"fmt"
	stdmaps "maps"
	"slices"
	"strings"
	"sync"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// JoinDirectory makes a directory node a voter, or updates its addresses. A node may have another disk than
// the member with its id. It then takes that one's place, as a new member, if that one is silent.
func (n *Node) JoinDirectory(ctx context.Context, q *dirpb.JoinDirectoryRequest) (*dirpb.JoinDirectoryReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	if err := checkJoin(q); err != nil {
		return nil, err
	}
	entry := &fsmpb.Directory{Id: q.Id, RaftAddr: q.RaftAddr, GrpcAddr: q.GrpcAddr}
	// The state machine refuses it as well, but that of an earlier version does not.
	n.machine.view(func(s *fsm.State) { err = claimID(s, entry, rights.Caller(ctx).String()) })
	if err != nil {
		n.log.Warn("a call was refused", "rpc", dirpb.Directory_JoinDirectory_FullMethodName, "identity",
			rights.Caller(ctx).String(), "err", err)
		return nil, refusal(err)
	}
	server := disk{q.Id, q.Incarnation}.server()
	members := n.members()
	if members[q.Id].ID != server && q.Member {
		if _, err := n.confirmed(ctx); err != nil {
			return nil, err
		}
		return nil, status.Errorf(codes.NotFound, "%v was removed; to come back it needs an empty data folder",
			disk{q.Id, q.Incarnation})
	}
	for id, m := range members {
		if id != q.Id && string(m.Address) == q.RaftAddr {
			return nil, status.Errorf(codes.AlreadyExists, "raft address %s belongs to directory node %q", q.RaftAddr,
				id)
		}
	}
	unlock, err := n.lockMembership(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := n.checkJoiner(q); err != nil {
		return nil, err
	}
	was := n.members()[q.Id]
	if err := n.checkPlace(ctx, l, q, was); err != nil {
		return nil, err
	}
	// A voter that cannot be reached might cost the quorum.
	reach, cancel := context.WithTimeout(ctx, raftTimeout)
	_, _, err = n.streams.call(reach, q.RaftAddr, server, true)
	cancel()
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "nothing was done: directory node %q does not answer at %s: %v",
			q.Id, q.RaftAddr, err)
	}
	detail := []any{"raft", q.RaftAddr, "grpc", q.GrpcAddr}
	if was.ID != "" && was.ID != server {
		detail = append(detail, "data-folder", q.Incarnation, "instead-of", diskOf(was.ID).incarnation)
	}
	c := &fsmpb.Command{Op: &fsmpb.Command_PutDirectory{PutDirectory: &fsmpb.PutDirectory{Directory: entry}}}
	if _, err = n.do(ctx, l, audited(ctx, c, actJoinDirectory, q.Id, detail...)); err != nil {
		return nil, err
	}
	if was.ID == server && was.Suffrage == raft.Voter && string(was.Address) == q.RaftAddr {
		return &dirpb.JoinDirectoryReply{}, nil
	}
	if was.ID != "" && was.ID != server {
		if err := n.wait(ctx, n.raft.RemoveServer(was.ID, 0, enqueueTimeout)); err != nil {
			return nil, n.applyError(err)
		}
		n.peers.forget(was.ID)
		n.log.Warn("directory: a node has lost its data folder, and is a new member from now on", "node", q.Id, "now",
			q.Incarnation, "before", diskOf(was.ID).incarnation)
	}
	if err := n.wait(ctx, n.raft.AddVoter(server, raft.ServerAddress(q.RaftAddr), 0, enqueueTimeout)); err != nil {
		return nil, n.applyError(err)
	}
	n.peers.forget(server)
	n.log.Info("directory: node joined", "node", q.Id, "raft", q.RaftAddr, "grpc", q.GrpcAddr)
	return &dirpb.JoinDirectoryReply{}, nil
}

// checkJoin refuses a request that is malformed.
func checkJoin(q *dirpb.JoinDirectoryRequest) error {
	if q.Id == "" || len(q.Id) > fsm.MaxNameLen {
		return status.Errorf(codes.InvalidArgument, "id %.64q, want 1..%d characters", q.Id, fsm.MaxNameLen)
	}
	if err := fsm.CheckText("id", q.Id); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if diskOf(raft.ServerID(q.Id)).incarnation != "" || q.Incarnation != "" && !isIncarnation(q.Incarnation) {
		return status.Errorf(codes.InvalidArgument, "id %q with data folder %.64q, want none in the id, and %d "+
			"hexadecimal digits", q.Id, q.Incarnation, incarnationLen)
	}
	for _, a := range []string{q.RaftAddr, q.GrpcAddr} {
		if err := checkAdvertised(a); err != nil {
			return status.Errorf(codes.InvalidArgument, "address %.256q of directory node %q: %v", a, q.Id, err)
		}
	}
	return nil
}

// lockMembership waits until nobody else changes who the members are.
func (n *Node) lockMembership(ctx context.Context) (unlock func(), err error) {
	select {
	case n.membership <- struct{}{}:
		return func() { <-n.membership }, nil
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// checkPlace refuses a node in whose place, as a member with its id, there is another process that is alive. was is
// that member, if there is one. The caller has locked the membership.
func (n *Node) checkPlace(ctx context.Context, l *leadership, q *dirpb.JoinDirectoryRequest, was raft.Server) error {
	server := disk{q.Id, q.Incarnation}.server()
	same := was.ID == server
	if !same && q.Incarnation != "" && n.level() < fsm.Level {
		return status.Errorf(codes.Unavailable, "nothing was done: until every directory node runs kvd %s, none is "+
			"admitted; ask again then", n.opts.Version)
	}
	if was.ID == "" || same && string(was.Address) == q.RaftAddr {
		return nil
	}
	there, err := hello{process: n.process}, error(nil)
	if was.ID != n.disk.server() {
		there, err = n.streams.probe(ctx, string(was.Address), was.ID)
	}
	switch {
	case err == nil && there.process == q.Process && same: // it has two addresses
	case err == nil && same:
		return status.Errorf(codes.Aborted, "%v is alive at %s, so that at %s has a copy of its data folder; nothing "+
			"was done; delete the copy",
			diskOf(was.ID), was.Address, q.RaftAddr)
	case err == nil:
		return status.Errorf(codes.Aborted, "directory node %q is alive at %s, so that at %s, with the data folder "+
			"%s, is not it; nothing was done. Choose another id, or stop that one first",
			q.Id, was.Address, q.RaftAddr, q.Incarnation)
	case there.process == q.Process && there.process != "": // it has the address of the one before, which is not there
	case !same && n.peers.silence(was.ID, l.term, n.patience()) == 0:
		return status.Errorf(codes.Unavailable, "nothing was done: directory node %q, with the data folder that it "+
			"had before, was heard within the last %v; ask again", q.Id, n.patience())
	}
	return nil
}

// RemoveDirectory removes a directory node, which then stops.
func (n *Node) RemoveDirectory(ctx context.Context, q *dirpb.RemoveDirectoryRequest) (*dirpb.RemoveDirectoryReply,
	error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	unlock, err := n.lockMembership(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	members := n.members()
	gone, ok := members[q.Id]
	if !ok {
		return nil, status.Errorf(codes.NotFound, "no directory node %.64q", q.Id)
	}
	if len(members) == 1 {
		return nil, status.Errorf(codes.FailedPrecondition, "directory node %q is the only one left", q.Id)
	}
	if !q.Force {
		delete(members, q.Id)
		if err := n.checkMajority(ctx, q.Id, members); err != nil {
			return nil, err
		}
	}
	if q.Id == n.opts.ID {
		// Said before it is done: afterwards this node is no member any more. Of others it is said afterwards, since
		// raft does not tell a node of its removal to which another entry is still on its way.
		if _, err := n.do(ctx, l, audited(ctx, &fsmpb.Command{}, actRemoveDirectory, q.Id)); err != nil {
			return nil, err
		}
	}
	if err := n.wait(ctx, n.raft.RemoveServer(gone.ID, 0, enqueueTimeout)); err != nil {
		return nil, n.applyError(err)
	}
	n.peers.forget(gone.ID)
	n.log.Info("directory: node removed", "node", q.Id)
	if q.Id != n.opts.ID {
		// Failing here leaves an entry that the next leader drops.
		c := &fsmpb.Command{Op: &fsmpb.Command_DropDirectory{DropDirectory: &fsmpb.DropDirectory{Id: q.Id}}}
		if _, err := n.do(ctx, l, audited(ctx, c, actRemoveDirectory, q.Id)); err != nil {
			n.log.Info("directory: entry of a removed node stays for now", "node", q.Id, "err", err)
		}
	}
	return &dirpb.RemoveDirectoryReply{}, nil
}

// checkMajority refuses the removal of a directory node if those of rest that answer are no majority of its voters.
func (n *Node) checkMajority(ctx context.Context, gone string, rest map[string]raft.Server) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	voters := 0
	silent := make(map[string]error)
	for id, m := range rest {
		if m.Suffrage != raft.Voter {
			continue
		}
		if voters++; id == n.opts.ID {
			continue
		}
		wg.Go(func() {
			if _, err := n.streams.probe(ctx, string(m.Address), m.ID); err != nil {
				mu.Lock()
				defer mu.Unlock()
				silent[id] = err
			}
		})
	}
	wg.Wait()
	if need := voters/2 + 1; voters-len(silent) < need {
		var why strings.Builder
		for _, id := range slices.Sorted(stdmaps.Keys(silent)) {
			fmt.Fprintf(&why, "; %q: %v", id, silent[id])
		}
		return status.Errorf(codes.FailedPrecondition, "nothing was done: without directory node %q there are %d, "+
			"%d do not answer, and %d must for a majority. Start these first, or use force%s",
			gone, voters, len(silent), need, why.String())
	}
	return nil
}
