package server

import (
	"cmp"
	"context"
	"time"

	"github.com/hashicorp/raft"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// CreateNamespace lays out a namespace over the memory nodes that are up, for its owner. The owner is the
// caller unless another one is named. CreateNamespace refuses more copies than there are failure domains. If
// there are too few memory nodes it is unavailable, as more may be about to come.
func (n *Node) CreateNamespace(ctx context.Context, q *dirpb.CreateNamespaceRequest) (*dirpb.CreateNamespaceReply,
	error) {
	if q.Owner == "" {
		q.Owner = rights.Caller(ctx).String()
	}
	details := append([]any{"mode", enumText(cmp.Or(q.Mode, dirpb.NamespaceMode_NAMESPACE_STORE), "NAMESPACE_"),
		"replicas", q.Replicas, "bytes-per-node", q.BytesPerNode, "limit-bytes", q.LimitBytes, "owner", q.Owner},
		quotaDetails(q.Quota)...)
	if q.Nodes != 0 {
		details = append(details, "nodes", q.Nodes)
	}
	if q.MaxValueBytes != 0 {
		details = append(details, "max-value-bytes", q.MaxValueBytes)
	}
	if q.MaxPinnedPercent != 0 {
		details = append(details, "max-pinned-percent", q.MaxPinnedPercent)
	}
	details = append(details, tierDetails(q.Tier)...)
	res, err := n.change(ctx, func(s *fsm.State) (_ *fsmpb.Command, err error) {
		if err := s.CheckLevel(q); err != nil {
			return nil, err
		}
		// Not by the state machine, which would refuse what earlier versions have committed.
		if s.NamespaceNamed(q.Name) == nil {
			err = s.CheckDomains(q.Name, q.Replicas)
		}
		return audited(ctx, createNamespace(q), actCreateNamespace, q.Name, details...), err
	})
	return &dirpb.CreateNamespaceReply{Namespace: res.Namespace}, err
}

// SetNamespace changes a namespace's limit, number of copies, owner and quotas. The reply does not wait for
// copies that are made, or given up, from then on. Nor does it wait for sessions of the former owner that are
// fenced.
func (n *Node) SetNamespace(ctx context.Context, q *dirpb.SetNamespaceRequest) (*dirpb.SetNamespaceReply, error) {
	details := []any{"replicas", q.Replicas}
	switch {
	case q.KeepLimit:
	case q.LimitBytes == 0:
		details = append(details, "limit-bytes", "none")
	default:
		details = append(details, "limit-bytes", q.LimitBytes)
	}
	if q.Nodes != 0 {
		details = append(details, "nodes", q.Nodes)
	}
	if q.MaxValueBytes != 0 {
		details = append(details, "max-value-bytes", q.MaxValueBytes)
	}
	if q.MaxPinnedPercent != nil {
		details = append(details, "max-pinned-percent", *q.MaxPinnedPercent)
	}
	details = append(append(details, "owner", q.Owner), quotaDetails(q.Quota)...)
	details = append(details, tierDetails(q.Tier)...)
	res, err := n.change(ctx, func(s *fsm.State) (*fsmpb.Command, error) {
		return audited(ctx, &fsmpb.Command{Op: &fsmpb.Command_SetNamespace{SetNamespace: q}}, actSetNamespace, q.Name,
			details...), s.CheckLevel(q)
	})
	return &dirpb.SetNamespaceReply{Namespace: res.Namespace}, err
}

// DeleteNamespace takes a namespace away with all its keys. The reply does not wait for
// the sessions that are fenced. The namespace goes with the last of them.
func (n *Node) DeleteNamespace(ctx context.Context, q *dirpb.DeleteNamespaceRequest) (*dirpb.DeleteNamespaceReply,
	error) {
	res, err := n.asked(ctx, audited(ctx, &fsmpb.Command{Op: &fsmpb.Command_DeleteNamespace{DeleteNamespace: q}},
		actDeleteNamespace, q.Name,
		"id", q.Id, "end-sessions", q.EndSessions))
	if err != nil {
		return nil, err
	}
	if len(res.Changes) > 0 {
		n.log.Info("directory: namespace deleted", "namespace", q.Name, "id", res.Deleted.Id, "sessions_to_fence",
			res.Deleted.Fencing)
	}
	return res.Deleted, nil
}

// AcceptLoss notes that an operator knows what a namespace lost. It may be repeated.
func (n *Node) AcceptLoss(ctx context.Context, q *dirpb.AcceptLossRequest) (*dirpb.AcceptLossReply, error) {
	res, err := n.asked(ctx, audited(ctx, &fsmpb.Command{Op: &fsmpb.Command_AcceptLoss{AcceptLoss: q}}, actAcceptLoss,
		q.Name, "times", q.Lost))
	if err != nil {
		return nil, err
	}
	n.log.Info("directory: a loss was accepted", "namespace", q.Name, "times", q.Lost)
	return &dirpb.AcceptLossReply{Namespace: res.Namespace}, nil
}

// leaderStatusTimeout bounds how long ClusterStatus waits for the leader.
const leaderStatusTimeout = 2 * time.Second

// ClusterStatus is Status as the leader answers it, asked over the network if need be. If no leader answers,
// it is this node's own answer, which says how old it is.
func (n *Node) ClusterStatus(ctx context.Context, q *dirpb.StatusRequest) (*dirpb.StatusReply, error) {
	own, err := n.Status(ctx, q)
	addr := n.leaderGRPC()
	if err != nil || own.Leads || addr == "" {
		return own, err
	}
	ctx, cancel := context.WithTimeout(ctx, leaderStatusTimeout)
	defer cancel()
	var reply *dirpb.StatusReply
	err = n.call(ctx, addr, func(c dirpb.DirectoryClient) (err error) {
		reply, err = c.Status(ctx, q)
		return err
	})
	if err != nil || !reply.GetLeads() {
		return own, nil
	}
	return reply, nil
}

// Status shows what this node knows, and how old that is. Reclaim epochs, reports, node statistics, the
// progress of jobs and which directory nodes answer are the leader's alone.
func (n *Node) Status(context.Context, *dirpb.StatusRequest) (*dirpb.StatusReply, error) {
	reply := &dirpb.StatusReply{RaftApplied: n.machine.appliedIndex(), AnsweredBy: n.opts.ID,
		Identifies: n.opts.TLS != nil,
		KnowsLevel: fsm.Level, Version: n.opts.Version}
	l, err := n.leader()
	if reply.Leads = err == nil; !reply.Leads {
		reply.AgeMillis = -1
		if heard := n.raft.LastContact(); !heard.IsZero() {
			reply.AgeMillis = max(0, time.Since(heard).Milliseconds())
		}
	}
	reply.Position = n.machine.position()
	members := n.members()
	_, leader := n.raft.LeaderWithID()
	now := time.Now().UnixMilli()
	show := func(x *lead.Leader, s *fsm.State, uptime time.Duration) {
		reply.ClusterId, reply.Level = s.Meta().ClusterId, s.Level()
		reply.Map = s.Map(nil)
		reply.Usage = s.Usage()
		reply.Jobs = s.Jobs()
		reply.KeyUse = &dirpb.KeyUse{Generation: s.KeyGeneration(), MadeUnixMillis: s.Meta().KeyUnixMillis}
		if x != nil {
			reply.KeyUse = x.KeyUse(s)
			reply.Epoch, reply.MinEpoch = x.Epochs()
			reply.Ahead = x.Ahead()
			showNodes(reply.Map.Nodes, x, s, uptime)
			for _, v := range reply.Map.Volumes { // which are this reply's alone
				used, silent := x.VolumeStats(v.Id, uptime)
				v.UsedBytes, v.SilentMillis = used, uint64(silent.Milliseconds())
			}
			reply.NodeStats = x.Stats()
			reply.Gateways = l.meeting.show(s)
			reply.Jobs = x.Jobs(s, uptime)
			for _, u := range reply.Usage {
				a := x.Account(s, u.PgId, uptime)
				u.LiveUnits, u.FreeUnits, u.ForeignUnits, u.LimboUnits = a.Live, a.Free, a.Foreign, a.Limbo
				u.WaitingUnits, u.ComingUnits, u.LostUnits, u.Short, u.Estimated = a.Waiting, a.Coming, a.Lost, a.Short,
					true
			}
		}
		for _, d := range s.Directory() {
			if m, ok := members[d.Id]; ok {
				row := &dirpb.DirectoryNode{
					Id: d.Id, RaftAddr: d.RaftAddr, GrpcAddr: d.GrpcAddr,
					Leader: m.ID == leader, Voter: m.Suffrage == raft.Voter, Incarnation: diskOf(m.ID).incarnation,
				}
				if reply.Leads {
					row.SilentMillis = uint64(n.peers.silence(m.ID, l.term, n.opts.ElectionTimeout).Milliseconds())
				}
				reply.Directory = append(reply.Directory, row)
			}
		}
		for _, y := range s.Sessions() {
			info := &dirpb.SessionInfo{
				Id: y.Id, Client: y.Client, Life: y.Life, Namespace: s.Namespace(y.NamespaceId).GetName(),
				AgeMillis: uint64(max(0, now-y.OpenedUnixMillis)), ReportEpoch: y.Epoch, Identity: y.Identity,
			}
			if x != nil {
				if epoch, ok := x.Report(y.Id); ok {
					info.ReportEpoch = epoch
				}
				info.Paths = x.Paths(y.Id)
			}
			reply.Sessions = append(reply.Sessions, info)
		}
	}
	if reply.Leads {
		n.withState(l, show)
	} else {
		n.machine.view(func(s *fsm.State) { show(nil, s, 0) })
	}
	return reply, nil
}

var _ dirpb.DirectoryServer = (*Node)(nil)
