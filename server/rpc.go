package server

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

const (
	// maxLanes is the number of lanes that a session may number.
	maxLanes = 256
	// activationWait is how long OpenSession waits at most for memory nodes to make the
	// first of the namespace's regions, and othersWait for the others once one is made.
	activationWait = 5 * time.Second
	othersWait     = time.Second
	// renewsPerLease is how often a session or memory node should be heard within
	// one lease.
	renewsPerLease = 4
)

var errorCodes = []struct {
	err  error
	code codes.Code
}{
	{fsm.ErrInvalid, codes.InvalidArgument},
	{fsm.ErrNotFound, codes.NotFound},
	{fsm.ErrExists, codes.AlreadyExists},
	{fsm.ErrRefused, codes.FailedPrecondition},
	{fsm.ErrFull, codes.ResourceExhausted},
	{fsm.ErrForeign, codes.PermissionDenied},
	{fsm.ErrUnavailable, codes.Unavailable},
}

// change carries out, as the leader, the one command that a call asks for: what make gives, which sees the state and
// may refuse. A refusal of make's is no entry of the log.
func (n *Node) change(ctx context.Context, make func(*fsm.State) (*fsmpb.Command, error)) (fsm.Result, error) {
	l, err := n.leader()
	if err != nil {
		return fsm.Result{}, err
	}
	var c *fsmpb.Command
	if n.machine.view(func(s *fsm.State) { c, err = make(s) }); err != nil {
		return fsm.Result{}, refusal(err)
	}
	return n.do(ctx, l, c)
}

// asked is change for a command that the state has no say in before.
func (n *Node) asked(ctx context.Context, c *fsmpb.Command) (fsm.Result, error) {
	return n.change(ctx, func(*fsm.State) (*fsmpb.Command, error) { return c, nil })
}

// ask has the leader look at what it knows and at the state, which may be a refusal.
func (n *Node) ask(l *leadership, look func(x *lead.Leader, s *fsm.State, now time.Duration) error) (err error) {
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) { err = look(x, s, now) })
	return refusal(err)
}

// do proposes c and turns a refusal into a status.
func (n *Node) do(ctx context.Context, l *leadership, c *fsmpb.Command) (fsm.Result, error) {
	res, err := n.propose(ctx, l, c)
	return res, cmp.Or(err, refusal(res.Err))
}

// nothingDone is the status of a call that is unavailable now and took no effect.
func nothingDone(text string) error {
	s := status.New(codes.Unavailable, text)
	if d, err := s.WithDetails(&dirpb.NothingDone{}); err == nil {
		s = d
	}
	return s.Err()
}

// refusal is the status of an error of package fsm's kinds, which changed nothing. It leaves a status as it is.
func refusal(err error) error {
	if _, ok := status.FromError(err); ok {
		return err
	}
	for _, e := range errorCodes {
		if errors.Is(err, e.err) {
			if e.code == codes.Unavailable {
				return nothingDone(err.Error() + "; nothing was done")
			}
			return status.Error(e.code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}

func (n *Node) renewMillis() uint64 {
	return uint64(max(n.opts.Lease/renewsPerLease, time.Millisecond).Milliseconds())
}

// heartbeatMillis is how long a heartbeat waits for news.
func (n *Node) heartbeatMillis() uint64 {
	return uint64(max(min(n.opts.Lease/3, waitMost), time.Millisecond).Milliseconds())
}

// label makes s fit for the state: short, and UTF-8 after the cut.
func label(s string) string {
	if len(s) > fsm.MaxLabelLen {
		s = strings.ToValidUTF8(s[:fsm.MaxLabelLen], "")
	}
	return s
}
