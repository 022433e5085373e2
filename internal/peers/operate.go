package peers

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/rights"
)

// These are messages of peerspb, which operators are told.
type (
	Description = peerspb.DescribeReply
	Client      = peerspb.Client
	SlowCommand = peerspb.SlowCommand
)

// Operated is a gateway as operators see it. Its methods may be called concurrently, and what they return is the
// caller's.
type Operated interface {
	Describe() *Description
	// Clients are its connections, in the order of their ids.
	Clients() []*Client
	// SlowLog is the newest n entries of the slow log, the newest first; 0: all.
	SlowLog(n int) []*SlowCommand
	// Kill ends a connection, and tells where its client was; false: there is none of that id.
	Kill(id int64) (addr string, found bool)
}

// clientsTogether is how many clients go in one reply.
const clientsTogether = 256

var errNotOperated = status.Error(codes.Unimplemented, "this gateway answers no operators")

// Describe says how the gateway is.
func (s service) Describe(context.Context, *peerspb.DescribeRequest) (*peerspb.DescribeReply, error) {
	if s.p.operated == nil {
		return nil, errNotOperated
	}
	return s.p.operated.Describe(), nil
}

// ListClients lists the connections.
func (s service) ListClients(_ *peerspb.ListClientsRequest,
	stream grpc.ServerStreamingServer[peerspb.ListClientsReply]) error {
	if s.p.operated == nil {
		return errNotOperated
	}
	for all := s.p.operated.Clients(); len(all) > 0; {
		n := min(len(all), clientsTogether)
		if err := stream.Send(&peerspb.ListClientsReply{Clients: all[:n]}); err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}

// SlowLog shows the slow log.
func (s service) SlowLog(_ context.Context, q *peerspb.SlowLogRequest) (*peerspb.SlowLogReply, error) {
	if s.p.operated == nil {
		return nil, errNotOperated
	}
	return &peerspb.SlowLogReply{Commands: s.p.operated.SlowLog(int(q.Count))}, nil
}

// KillClient ends a connection. The log says who asked for that.
func (s service) KillClient(ctx context.Context, q *peerspb.KillClientRequest) (*peerspb.KillClientReply, error) {
	if s.p.operated == nil {
		return nil, errNotOperated
	}
	addr, found := s.p.operated.Kill(q.Id)
	if !found {
		return &peerspb.KillClientReply{}, nil
	}
	remote := ""
	if from, ok := peer.FromContext(ctx); ok && from.Addr != nil {
		remote = from.Addr.String()
	}
	s.p.o.Logger.Info("an operator ended a client's connection", "identity", rights.Caller(ctx).String(), "remote",
		remote, "id", q.Id, "peer", addr)
	return &peerspb.KillClientReply{Found: true, Addr: addr}, nil
}
