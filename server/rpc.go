package server

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
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

// do proposes c and turns a refusal into a status.
func (n *Node) do(ctx context.Context, l *leadership, c *fsmpb.Command) (fsm.Result, error) {
	res, err := n.propose(ctx, l, c)
	if err != nil || res.Err == nil {
		return res, err
	}
	return res, refusal(res.Err)
}

// nothingDone is the status of a call that is unavailable now and took no effect.
func nothingDone(text string) error {
	s := status.New(codes.Unavailable, text)
	if d, err := s.WithDetails(&dirpb.NothingDone{}); err == nil {
		s = d
	}
	return s.Err()
}

// refusal is the status of an error of package fsm's kinds, which changed nothing.
func refusal(err error) error {
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
