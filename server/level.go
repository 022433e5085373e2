package server

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// raisePause is how long a leader waits before it asks directory nodes of an earlier version again.
const raisePause = time.Second

func (n *Node) latestLevel() *fsmpb.Level {
	return &fsmpb.Level{Level: fsm.Level, Version: n.opts.Version}
}

func (n *Node) level() (level uint32) {
	n.machine.view(func(s *fsm.State) { level = s.Level() })
	return level
}

// raiseLevel takes the state to the latest level as soon as every directory node says that it knows that, while this
// node leads.
func (n *Node) raiseLevel(ctx context.Context, l *leadership) {
	tick := time.NewTimer(0)
	defer tick.Stop()
	said := ""
	for n.level() < fsm.Level {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := n.tryRaise(ctx, l); err != nil && ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			n.log.Info("directory: its level is not raised yet", "level", n.level(), "latest", fsm.Level, "err", err)
		}
		tick.Reset(raisePause)
	}
}

// tryRaise asks all members, and raises the level if they know the latest one. Nobody joins meanwhile.
func (n *Node) tryRaise(ctx context.Context, l *leadership) error {
	select {
	case n.membership <- struct{}{}:
		defer func() { <-n.membership }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for id := range n.members() {
		if id == n.opts.ID {
			continue
		}
		if err := n.knowsLatest(ctx, id); err != nil {
			return err
		}
	}
	res, err := n.propose(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_Raise{Raise: n.latestLevel()}})
	if err == nil {
		err = res.Err
	}
	if err != nil {
		return err
	}
	if err := n.beginReign(ctx, l); err != nil {
		n.log.Info("directory: memory nodes are told of no position before the next election", "err", err)
	}
	n.log.Info("directory: every node runs a version that knows this level, and none of an earlier version can take "+
		"part any more",
		"level", fsm.Level, "version", n.opts.Version)
	return nil
}

// knowsLatest returns why a member does not, or may not, know the latest level.
func (n *Node) knowsLatest(ctx context.Context, id string) error {
	var addr string
	n.machine.view(func(s *fsm.State) { addr = s.DirectoryNode(id).GetGrpcAddr() })
	if addr == "" {
		return fmt.Errorf("directory node %q has not said where it serves", id)
	}
	ctx, cancel := context.WithTimeout(ctx, raftTimeout)
	defer cancel()
	var reply *dirpb.StatusReply
	err := n.call(ctx, addr, func(c dirpb.DirectoryClient) (err error) {
		reply, err = c.Status(ctx, &dirpb.StatusRequest{})
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("directory node %q does not say which level it knows: %w", id, err)
	case reply.AnsweredBy != id:
		return fmt.Errorf("directory node %q is to serve at %s, where %q answers", id, addr, reply.AnsweredBy)
	case reply.KnowsLevel < fsm.Level:
		return fmt.Errorf("directory node %q runs %s, which knows levels up to %d: start kvd %s there", id,
			program(reply.Version), reply.KnowsLevel, n.opts.Version)
	}
	return nil
}

// checkJoiner refuses a directory node that does not know the level of the state. The caller has taken membership.
func (n *Node) checkJoiner(q *dirpb.JoinDirectoryRequest) error {
	if level := n.level(); q.Level < level {
		return status.Errorf(codes.FailedPrecondition, "directory node %q runs %s, which knows levels up to %d, and "+
			"the directory is at level %d: start kvd %s there, or later",
			q.Id, program(q.Version), q.Level, level, n.opts.Version)
	}
	return nil
}

// program names a version as another program told it.
func program(version string) string {
	if version == "" {
		return "a version of kvd that knows no levels"
	}
	return fmt.Sprintf("kvd %.64q", version)
}

// noMethod answers an RPC that this version does not have.
func (n *Node) noMethod(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	return status.Errorf(codes.Unimplemented, "directory node %q runs kvd %s, which does not know %.128q; nothing "+
		"was done; the caller is of another version: upgrade the directory nodes first",
		n.opts.ID, n.opts.Version, method)
}
