package server

import (
	"context"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// takeStatus takes back the status words that a renewal gives back, before anything of the renewal is heeded: its
// answer says that they are not the session's any more.
func (n *Node) takeStatus(ctx context.Context, l *leadership, q *dirpb.RenewRequest) error {
	if len(q.StatusBack) == 0 {
		return nil
	}
	c := &fsmpb.TakeStatus{SessionId: q.SessionId, Number: q.Number, Blocks: q.StatusBack}
	var some bool
	var err error
	n.machine.view(func(s *fsm.State) { some, err = s.GivesStatus(c) })
	if err != nil {
		return refusal(err)
	}
	if some {
		_, err = n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_TakeStatus{TakeStatus: c}})
	}
	return err
}

// GrantStatus gives a session a block of status words, or tells it of the one that it was given and does not know of.
func (n *Node) GrantStatus(ctx context.Context, q *dirpb.GrantStatusRequest) (*dirpb.GrantStatusReply, error) {
	c := &fsmpb.GrantStatus{SessionId: q.SessionId, PgId: q.PgId, Held: q.Held}
	res, err := n.change(ctx, func(s *fsm.State) (*fsmpb.Command, error) {
		return &fsmpb.Command{Op: &fsmpb.Command_GrantStatus{GrantStatus: c}}, s.CanGrantStatus(c)
	})
	return res.Status, err
}
