package server

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// ReportNode notes why no process of a memory node comes up, for Status, or why the one that serves is not replaced.
func (n *Node) ReportNode(ctx context.Context, q *dirpb.ReportNodeRequest) (*dirpb.ReportNodeReply, error) {
	l, id, err := n.leadsFor(q.Name)
	if err != nil {
		return nil, err
	}
	if err := fsm.CheckText("trouble", q.Trouble); err != nil {
		return nil, refusal(err)
	}
	if q.Trouble == "" {
		return nil, status.Error(codes.InvalidArgument, "trouble is empty; nothing was done")
	}
	var stays *fsmpb.Command
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		if err = s.CheckNodeOwner(q.Name, rights.Caller(ctx).String()); err != nil {
			return
		}
		if q.Stays {
			stays = x.Stays(s, id, q.Trouble)
		} else {
			x.Troubled(id, q.Trouble, now)
		}
	})
	if err != nil {
		return nil, refusal(err)
	}
	if stays != nil {
		if _, err := n.do(ctx, l, stays); err != nil {
			return nil, err
		}
	}
	return &dirpb.ReportNodeReply{}, nil
}

// whyStays is why a process that was to be replaced has not been, as it said itself.
func (n *Node) whyStays(id uint32) (why string) {
	if l := n.leading.Load(); l != nil {
		n.withState(l, func(x *lead.Leader, _ *fsm.State, _ time.Duration) { why = x.WhyStays(id) })
	}
	return why
}

// arrives refuses a memory node a name that another process has, of which the log is told once. It gives what is to be
// called when the registration is part of the state, or has failed.
func (n *Node) arrives(l *leadership, q *dirpb.RegisterNodeRequest) (arrived func(), err error) {
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) { err = x.BeginArrival(s, now, q) })
	if e := (*lead.TakenError)(nil); errors.As(err, &e) && e.New {
		n.log.Error("directory: two processes want the name of one memory node, and the second is refused: give it "+
			"another name, or stop one of them",
			"node", e.Name, "registered", e.Owner, "refused", e.Rival)
	}
	if err != nil {
		return nil, status.Error(codes.AlreadyExists, err.Error())
	}
	return func() {
		n.withState(l, func(x *lead.Leader, _ *fsm.State, _ time.Duration) { x.EndArrival(q) })
	}, nil
}

// showNodes adds what the leader alone knows to nodes, in place of shared rows.
func showNodes(nodes []*dirpb.Node, x *lead.Leader, s *fsm.State, now time.Duration) {
	waiting := make(map[uint32]bool)
	for _, id := range x.Waiting(s, now) {
		waiting[id] = true
	}
	for i, m := range nodes {
		if t, r := x.Trouble(m.Id, now), x.Rival(m.Id, now); t != "" || r != "" || waiting[m.Id] {
			nodes[i] = proto.CloneOf(m)
			nodes[i].Waiting, nodes[i].Trouble, nodes[i].Rival = waiting[m.Id], t, r
		}
	}
}
