// Package rights holds callers of gRPC services to what their roles may do.
//
// It leaves who a caller is to internal/identity. Which role may call which RPC is in the table that
// stands beside each service's contract, such as dirpb.Rights. Whose a session or a memory node is, a
// service asks by itself, of [Caller].
//
// Start with [Table] and [Table.ServerOptions]. Everything may be called concurrently; a Table is
// not changed once it is in use.
//
// Default refusal follows capabilities: an RPC without a row is for nobody.
package rights

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"maps"
	"path"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/identity"
)

// Table gives the roles that may call an RPC by its full name, /package.Service/Method.
type Table map[string]identity.Roles

// WithHealth is t and the gRPC health service, which every identity may ask.
func WithHealth(t Table) Table {
	all := Table{
		healthpb.Health_Check_FullMethodName: identity.Every,
		healthpb.Health_List_FullMethodName:  identity.Every,
		healthpb.Health_Watch_FullMethodName: identity.Every,
	}
	maps.Copy(all, t)
	return all
}

// ServerOptions has a gRPC server with TLS refuse what t does not allow. UNAUTHENTICATED tells a caller that nobody
// knows it, PERMISSION_DENIED one with another role. Either way nothing was done. log gets a line of each refusal.
// welcome, if not nil, is asked about the connection of each request and of each message of a stream. A connection may
// outlive the reasons for which it was accepted. The error of welcome is an UNAUTHENTICATED.
func (t Table) ServerOptions(m identity.Mapping, welcome func(tls.ConnectionState) error,
	log *slog.Logger) []grpc.ServerOption {
	refuse := func(method string, i identity.Identity, from string, err error) error {
		log.Warn("a call was refused", "rpc", method, "identity", i.String(), "remote", from, "err", err)
		return Refusal(err)
	}
	// admit gives still, which asks about the connection again.
	admit := func(ctx context.Context, method string) (_ context.Context, still func() error, _ error) {
		state, from, err := connection(ctx)
		if err != nil {
			return nil, nil, refuse(method, identity.Identity{}, from, err)
		}
		i, err := m.Admit(state, path.Base(method), t[method])
		var groups []string
		if err == nil {
			groups, err = identity.GroupsOfConnection(state)
		}
		if err != nil {
			return nil, nil, refuse(method, i, from, err)
		}
		still = func() error {
			if welcome == nil {
				return nil
			}
			if err := welcome(*state); err != nil {
				return refuse(method, i, from, err)
			}
			return nil
		}
		return context.WithValue(ctx, callerKey{}, caller{i, groups}), still, still()
	}
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, q any, info *grpc.UnaryServerInfo,
			next grpc.UnaryHandler) (any, error) {
			ctx, _, err := admit(ctx, info.FullMethod)
			if err != nil {
				return nil, err
			}
			return next(ctx, q)
		}),
		grpc.ChainStreamInterceptor(func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo,
			next grpc.StreamHandler) error {
			ctx, still, err := admit(s.Context(), info.FullMethod)
			if err != nil {
				return err
			}
			return next(srv, stream{s, ctx, still})
		}),
	}
}

// Refusal is the gRPC status of an error of package identity.
func Refusal(err error) error {
	if errors.As(err, new(*identity.DeniedError)) {
		return status.Error(codes.PermissionDenied, err.Error())
	}
	return status.Error(codes.Unauthenticated, err.Error())
}

// caller is who calls.
type caller struct {
	identity identity.Identity
	groups   []string
}

// connection is that of a call, and from where it comes.
func connection(ctx context.Context) (state *tls.ConnectionState, from string, err error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, "", identity.ErrNoCertificate
	}
	if p.Addr != nil {
		from = p.Addr.String()
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return nil, from, identity.ErrNoCertificate
	}
	return &info.State, from, nil
}

type callerKey struct{}

// Caller is who calls, as a server with [Table.ServerOptions] admitted it; nobody on a server
// without TLS, where everybody may do everything.
func Caller(ctx context.Context) identity.Identity {
	c, _ := ctx.Value(callerKey{}).(caller)
	return c.identity
}

// Groups are the groups of who calls, sorted; the caller does not change them.
func Groups(ctx context.Context) []string {
	c, _ := ctx.Value(callerKey{}).(caller)
	return c.groups
}

// stream is a stream whose context knows its caller, and that ends when its caller is welcome no more.
type stream struct {
	grpc.ServerStream
	ctx   context.Context
	still func() error
}

func (s stream) SendMsg(m any) error {
	if err := s.still(); err != nil {
		return err
	}
	return s.ServerStream.SendMsg(m)
}

func (s stream) Context() context.Context { return s.ctx }
