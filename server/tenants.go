package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// callerOf is who calls, as namespaces know it; background says that it is for a session of that kind, for which
// memory nodes and janitors use every namespace.
func callerOf(ctx context.Context, background bool) fsm.Caller {
	i := rights.Caller(ctx)
	c := fsm.Caller{Identity: i.String(), Groups: rights.Groups(ctx)}
	switch i.Role {
	case 0, identity.Operator:
		c.Everywhere = true
	case identity.MemNode, identity.Janitor:
		c.Everywhere = background // a tier node uses the namespaces that name it; see OpenSession
	}
	return c
}

// checkBackground refuses memory nodes, tier nodes and janitors sessions that are not background ones: they are
// nobody's tenants.
func checkBackground(ctx context.Context, background bool) error {
	i := rights.Caller(ctx)
	if identity.RolesOf(identity.MemNode, identity.Tier, identity.Janitor).Has(i.Role) && !background {
		return status.Errorf(codes.PermissionDenied, "%s has the role %v, which is for background sessions alone", i,
			i.Role)
	}
	return nil
}

// WhoAmI tells a caller whose its certificate is, and what namespaces let it do.
func (n *Node) WhoAmI(ctx context.Context, _ *dirpb.WhoAmIRequest) (*dirpb.WhoAmIReply, error) {
	if _, err := n.leader(); err != nil {
		return nil, err
	}
	i := rights.Caller(ctx)
	reply := &dirpb.WhoAmIReply{Identity: i.String(), Groups: rights.Groups(ctx)}
	if reply.Identity != "" {
		reply.Role = i.Role.String()
	}
	if i.Role == identity.Directory {
		return reply, nil // it opens no session
	}
	worker := i.Role == identity.MemNode || i.Role == identity.Janitor
	n.machine.view(func(s *fsm.State) {
		for _, w := range s.Map(nil).Namespaces {
			right := fsm.RightOf(w, callerOf(ctx, worker))
			if worker || i.Role == identity.Tier && serves(s, w, reply.Identity) {
				right = dirpb.Right_RIGHT_WRITE
			}
			if right != dirpb.Right_RIGHT_UNSPECIFIED && !w.Deleting {
				reply.Namespaces = append(reply.Namespaces, &dirpb.NamespaceRight{Namespace: w.Name, Right: right})
			}
		}
	})
	slices.SortFunc(reply.Namespaces, func(a, b *dirpb.NamespaceRight) int {
		return cmp.Compare(a.Namespace, b.Namespace)
	})
	return reply, nil
}

// administered finds a namespace that the caller administers. Others are told that they may not, and that there is
// such a namespace.
func administered(ctx context.Context, s *fsm.State, name string) (*dirpb.Namespace, error) {
	w := s.NamespaceNamed(name)
	if w == nil {
		return nil, fmt.Errorf("namespace %.64q: %w", name, fsm.ErrNotFound)
	}
	return w, fsm.CheckRight(w, callerOf(ctx, false), dirpb.Right_RIGHT_ADMIN)
}

// ShowNamespace tells those who administer a namespace who else may use it, its quotas, and what it has taken of them.
func (n *Node) ShowNamespace(ctx context.Context, q *dirpb.ShowNamespaceRequest) (*dirpb.ShowNamespaceReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	reply := &dirpb.ShowNamespaceReply{}
	return reply, n.ask(l, func(_ *lead.Leader, s *fsm.State, _ time.Duration) (err error) {
		reply.Namespace, err = administered(ctx, s, q.Name)
		id := reply.Namespace.GetId()
		reply.GrantedBytes, reply.IndexBytes, reply.Sessions = s.GrantedBytes(id), s.IndexBytes(id), s.SessionsOf(id)
		return err
	})
}

// GrantAccess gives somebody a right in a namespace in the place of the one that he has. The reply does not wait for
// the sessions that are fenced if that is less.
func (n *Node) GrantAccess(ctx context.Context, q *dirpb.GrantAccessRequest) (*dirpb.GrantAccessReply, error) {
	if q.GetAccess().GetRight() == dirpb.Right_RIGHT_UNSPECIFIED {
		return nil, status.Errorf(codes.InvalidArgument, "no right for %.160q in namespace %.64q, want read, write "+
			"or admin; nothing was done", q.GetAccess().GetWho(), q.Namespace)
	}
	w, fencing, err := n.setAccess(ctx, q.Namespace, q.Access)
	if err != nil {
		return nil, err
	}
	return &dirpb.GrantAccessReply{Namespace: w, Fencing: fencing}, nil
}

// RevokeAccess takes somebody's right in a namespace. The reply does not wait for the sessions that are fenced.
func (n *Node) RevokeAccess(ctx context.Context, q *dirpb.RevokeAccessRequest) (*dirpb.RevokeAccessReply, error) {
	w, fencing, err := n.setAccess(ctx, q.Namespace, &dirpb.Access{Who: q.Who})
	if err != nil {
		return nil, err
	}
	return &dirpb.RevokeAccessReply{Namespace: w, Fencing: fencing}, nil
}

// setAccess changes an access list. A refusal makes no entry in the log.
func (n *Node) setAccess(ctx context.Context, name string, a *dirpb.Access) (*dirpb.Namespace, uint32, error) {
	caller := callerOf(ctx, false)
	c := &fsmpb.SetAccess{Access: a, Identity: caller.Identity, Groups: caller.Groups, Everywhere: caller.Everywhere}
	action, details := actRevokeAccess, []any{"who", a.GetWho()}
	if a.GetRight() != dirpb.Right_RIGHT_UNSPECIFIED {
		action, details = actGrantAccess, append(details, "right", enumText(a.Right, "RIGHT_"))
	}
	res, err := n.change(ctx, func(s *fsm.State) (*fsmpb.Command, error) {
		w, err := administered(ctx, s, name)
		if err != nil {
			return nil, err
		}
		c.NamespaceId = w.Id
		return audited(ctx, &fsmpb.Command{Op: &fsmpb.Command_SetAccess{SetAccess: c}}, action, name, details...),
			s.CheckAccess(c)
	})
	return res.Namespace, res.Fencing, err
}

// quotaDetails are the details of an audit entry about quotas; nil: they stay as they are.
func quotaDetails(q *dirpb.Quota) []any {
	switch {
	case q == nil:
		return nil
	case q.Sessions == 0 && q.Lanes == 0 && q.TcpOpsPerSecond == 0 && q.IndexBytes == 0:
		return []any{"quota", "none"}
	}
	return []any{"quota-sessions", q.Sessions, "quota-lanes", q.Lanes, "quota-tcp-ops", q.TcpOpsPerSecond,
		"quota-index", q.IndexBytes}
}
