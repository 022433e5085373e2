package server

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc/peer"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Actions of audit entries. docs/tls.md lists them.
const (
	actCreateNamespace  = "namespace.create"
	actSetNamespace     = "namespace.set"
	actDeleteNamespace  = "namespace.delete"
	actGrantAccess      = "namespace.grant"
	actRevokeAccess     = "namespace.revoke"
	actAcceptLoss       = "namespace.accept-loss"
	actRebalance        = "namespace.rebalance"
	actStartJob         = "namespace.job"
	actRegisterNode     = "node.register"
	actDrainNode        = "node.drain"
	actRemoveNode       = "node.remove"
	actGiveUpNode       = "node.give-up"
	actRestartNode      = "node.restart"
	actRegisterTier     = "tier.register"
	actGiveUpTier       = "tier.give-up"
	actJoinDirectory    = "directory.join"
	actRemoveDirectory  = "directory.remove"
	actRecoverDirectory = "directory.recover"
	actRotateKey        = "keys.rotate"
)

// audited has c, for which the caller of ctx asked, recorded if it changes something. details are keys and values in
// turn, of which those that are zero are left out.
func audited(ctx context.Context, c *fsmpb.Command, action, object string, details ...any) *fsmpb.Command {
	c.Audit = &dirpb.AuditEntry{
		UnixMillis: time.Now().UnixMilli(), Identity: rights.Caller(ctx).String(), Remote: remoteOf(ctx),
		Action: action, Object: auditText(object), Detail: detailText(details),
	}
	return c
}

// enumText is the name of a value of an enumeration for people.
func enumText(v fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(v.String(), prefix))
}

func remoteOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		return p.Addr.String()
	}
	return ""
}

// detailText is KEY=VALUE with spaces between; a value that could be taken for more is quoted.
func detailText(details []any) string {
	var b strings.Builder
	for i := 0; i+1 < len(details); i += 2 {
		value := fmt.Sprint(details[i+1])
		switch value {
		case "", "0", "false":
			continue
		}
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%s=%s", details[i], auditText(value))
	}
	return b.String()
}

// auditText is s, quoted unless it is one printable word.
func auditText(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return r == ' ' || r == '"' || r == '=' || !unicode.IsPrint(r) }) {
		return fmt.Sprintf("%+q", s)
	}
	return s
}

// logAudit writes the line of an audit entry. Every directory node does, as it hears of it.
func logAudit(log *slog.Logger, e *dirpb.AuditEntry) {
	log.Info("audit", "number", e.Number, "at", time.UnixMilli(e.UnixMillis).UTC().Format(time.RFC3339Nano),
		"identity", e.Identity, "remote", e.Remote, "action", e.Action, "object", e.Object, "detail", e.Detail)
}

// Audit gives the changes that somebody made and that are kept.
func (n *Node) Audit(_ context.Context, q *dirpb.AuditRequest) (*dirpb.AuditReply, error) {
	if _, err := n.leader(); err != nil {
		return nil, err
	}
	reply := &dirpb.AuditReply{}
	n.machine.view(func(s *fsm.State) {
		reply.Entries, reply.Dropped = s.Audit(q.After, int(min(q.Limit, fsm.MaxAudit)))
	})
	return reply, nil
}
