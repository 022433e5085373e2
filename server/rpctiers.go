package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// KeepVolume registers a process of a tier node, hears it, and tells it what it is to do. Its lists of sessions and
// namespaces are obeyed, so they must not come from a leader that was deposed.
func (n *Node) KeepVolume(ctx context.Context, q *dirpb.KeepVolumeRequest) (*dirpb.KeepVolumeReply, error) {
	l, err := n.confirmed(ctx)
	if err != nil {
		return nil, err
	}
	v := proto.CloneOf(q.Volume)
	var was *dirpb.Volume
	known := false
	err = n.ask(l, func(_ *lead.Leader, s *fsm.State, _ time.Duration) error {
		if v != nil {
			v.Identity = rights.Caller(ctx).String()
		}
		if id := s.Meta().ClusterId; q.ClusterId != "" && q.ClusterId != id {
			return fmt.Errorf("%w: the folder of tier node %.64q is of the store %.64q, and this is %q. Start it with "+
				"the directory of its store, or with another folder", fsm.ErrRefused, v.GetName(), q.ClusterId, id)
		}
		// The state machine refuses it as well; said again, it makes no entry in the log.
		if err := s.CheckKeep(v); err != nil {
			return err
		}
		was = s.VolumeNamed(v.Name)
		known = proto.Equal(was, s.AsKept(v))
		return nil
	})
	if err != nil {
		return nil, err
	}
	reply := &dirpb.KeepVolumeReply{VolumeId: was.GetId(), AgainMillis: n.heartbeatMillis()}
	if !known {
		c := &fsmpb.Command{Op: &fsmpb.Command_KeepVolume{KeepVolume: &fsmpb.KeepVolume{Volume: v}}}
		if was == nil {
			audited(ctx, c, actRegisterTier, v.Name, "capacity-bytes", v.CapacityBytes, "domain", v.Domain)
		}
		res, err := n.do(ctx, l, c)
		if err != nil {
			return nil, err
		}
		if reply.VolumeId = res.VolumeID; was.GetBoot() != v.Boot {
			n.log.Info("directory: a process of a tier node is there", "tier_node", v.Name, "volume", res.VolumeID,
				"boot", v.Boot)
		}
	}
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		x.KeptVolume(reply.VolumeId, v.Boot, q.UsedBytes, now)
		reply.ClusterId, reply.Keys, reply.Sessions = s.Meta().ClusterId, s.Keys(), s.Admitted()
		reply.Recoveries = s.Meta().Recoveries
		reply.Namespaces = s.TierWork(reply.VolumeId)
		for _, w := range reply.Namespaces {
			w.Budgets = x.TierBudgets(s, w.NamespaceId, now)
		}
	})
	return reply, nil
}

// GiveUpTier declares what a tier node holds lost for good, unless it was heard within a lease.
func (n *Node) GiveUpTier(ctx context.Context, q *dirpb.GiveUpTierRequest) (*dirpb.GiveUpTierReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	reply := &dirpb.GiveUpTierReply{}
	if err := n.ask(l, func(x *lead.Leader, s *fsm.State, now time.Duration) error {
		v := s.VolumeNamed(q.Name)
		if v == nil || q.VolumeId != 0 && q.VolumeId != v.Id {
			return fmt.Errorf("tier node %.64q, volume %d: %w", q.Name, q.VolumeId, fsm.ErrNotFound)
		}
		reply.VolumeId = v.Id
		if _, silent := x.VolumeStats(v.Id, now); silent < n.opts.Lease {
			return fmt.Errorf("%w: tier node %q was heard %v ago: stop it first", fsm.ErrRefused, v.Name,
				silent.Round(time.Millisecond))
		}
		return nil
	}); err != nil {
		return nil, err
	}
	c := &fsmpb.Command{Op: &fsmpb.Command_GiveUpVolume{GiveUpVolume: &fsmpb.GiveUpVolume{VolumeId: reply.VolumeId,
		UnixMillis: time.Now().UnixMilli()}}}
	if _, err := n.do(ctx, l, audited(ctx, c, actGiveUpTier, q.Name, "volume", reply.VolumeId)); err != nil {
		return nil, err
	}
	n.log.Warn("directory: tier node given up", "tier_node", q.Name, "volume", reply.VolumeId)
	return reply, nil
}

// tierDetails are what an audit entry tells of the tier that a namespace is to have.
func tierDetails(t *dirpb.Tier) []any {
	if t == nil {
		return nil
	}
	return []any{"tier-nodes", strings.Join(t.Nodes, ","), "tier-copies", t.Copies, "tier-bytes", t.Bytes}
}

// serves reports whether an identity is a tier node's of a namespace.
func serves(s *fsm.State, w *dirpb.Namespace, identity string) bool {
	return slices.ContainsFunc(w.GetTier().GetNodes(), func(name string) bool {
		return s.VolumeNamed(name).GetIdentity() == identity
	})
}
