package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
)

// allowed is which roles may call what of a directory node.
var allowed = rights.WithHealth(dirpb.Rights())

// identify gives the options of a gRPC server that serves only callers with the right to call. Without
// TLS everybody may do everything.
func (n *Node) identify() []grpc.ServerOption {
	if n.opts.TLS == nil {
		return nil
	}
	conf := serverTLS(n.opts.TLS)
	welcome := func(cs tls.ConnectionState) error { return certs.StillWelcome(conf, cs) }
	o := append([]grpc.ServerOption{grpc.Creds(credentials.NewTLS(conf))},
		allowed.ServerOptions(n.opts.Identities, welcome, n.log)...)
	return append(o, grpc.ChainUnaryInterceptor(n.owned))
}

// owned refuses requests about a session or a memory node of another identity. SessionState alone
// asks for others' sessions, and changes nothing.
func (n *Node) owned(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	session, ofSession := q.(interface{ GetSessionId() uint32 })
	node, ofNode := q.(interface{ GetNodeId() uint32 })
	if info.FullMethod == dirpb.Directory_SessionState_FullMethodName || !ofSession && !ofNode {
		return next(ctx, q)
	}
	// A leader knows every session and memory node whose id it or others gave out.
	if _, err := n.leader(); err != nil {
		return nil, err
	}
	var err error
	n.machine.view(func(s *fsm.State) {
		if ofSession {
			err = ownedBy(ctx, fmt.Sprintf("session %d", session.GetSessionId()),
				s.Session(session.GetSessionId()).GetIdentity())
		}
		if ofNode && err == nil {
			err = ownedBy(ctx, fmt.Sprintf("memory node %d", node.GetNodeId()), s.Node(node.GetNodeId()).GetIdentity())
		}
	})
	if err != nil {
		n.log.Warn("a call was refused", "rpc", info.FullMethod, "identity", rights.Caller(ctx).String(), "err", err)
		return nil, err
	}
	return next(ctx, q)
}

// ownedBy refuses a caller that is not owner. It refuses neither callers nor owners that are not known,
// of times without TLS.
func ownedBy(ctx context.Context, what, owner string) error {
	if i := rights.Caller(ctx).String(); i != "" && owner != "" && i != owner {
		return status.Errorf(codes.PermissionDenied, "%s belongs to %s, not to %s", what, owner, i)
	}
	return nil
}

// identity is that of this node's own certificate; empty without TLS, or if the certificate has none.
func (n *Node) identity() string {
	conf := n.opts.TLS
	if conf == nil {
		return ""
	}
	if conf.GetConfigForClient != nil {
		if now, err := conf.GetConfigForClient(&tls.ClientHelloInfo{}); err == nil && now != nil {
			conf = now
		}
	}
	if len(conf.Certificates) == 0 || len(conf.Certificates[0].Certificate) == 0 {
		return ""
	}
	c, err := x509.ParseCertificate(conf.Certificates[0].Certificate[0])
	if err != nil {
		return ""
	}
	i, err := n.opts.Identities.OfCertificate(c)
	if err != nil {
		return ""
	}
	return i.String()
}

// mayWatchAll refuses a caller that may not see every namespace.
func mayWatchAll(ctx context.Context) error {
	i, want := rights.Caller(ctx), allowed[dirpb.Directory_Status_FullMethodName]
	if i == (identity.Identity{}) || want.Has(i.Role) {
		return nil
	}
	return rights.Refusal(&identity.DeniedError{Identity: i, Right: "WatchMap without a session", Want: want})
}
