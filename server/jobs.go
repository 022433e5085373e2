package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// claimTries is how many jobs others may snatch from one call of ClaimJob.
const claimTries = 8

func startJob(q *fsmpb.StartJob) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: q}}
}

// refused tells whether err is the state machine's, or this node's, and nothing was done.
func refused(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.ResourceExhausted:
		return true
	case codes.FailedPrecondition:
		return len(status.Convert(err).Details()) == 0 // else NotLeader
	}
	return false
}

// RequestSplit lets a shard that is full grow. It is answered growing also while something
// else keeps the shard's placement group busy: the client asks again if it still finds the
// shard full.
func (n *Node) RequestSplit(ctx context.Context, q *dirpb.RequestSplitRequest) (*dirpb.RequestSplitReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	var job *fsmpb.StartJob
	reply := &dirpb.RequestSplitReply{}
	ask := func() {
		n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
			y, sh := s.Session(q.SessionId), s.Shard(q.ShardId)
			switch {
			case y == nil || y.Life != dirpb.SessionLife_SESSION_LIVE:
				err = sessionGone(q.SessionId)
			case sh == nil || sh.NamespaceId != y.NamespaceId:
				err = status.Errorf(codes.NotFound, "shard %d of session %d's namespace does not exist", q.ShardId,
					q.SessionId)
			case y.ReadOnly:
				err = status.Errorf(codes.FailedPrecondition, "session %d is read-only", q.SessionId)
			default:
				job, reply.Growing, reply.Why = x.Grow(s, sh, now)
			}
		})
	}
	if ask(); err != nil || job == nil {
		return reply, err
	}
	_, err = n.do(ctx, l, startJob(job))
	if err == nil || !refused(err) {
		return reply, err
	}
	// Perhaps somebody was faster; then it grows, or will.
	why := status.Convert(err).Message()
	err = nil
	if ask(); err == nil && job != nil {
		reply.Growing, reply.Why = false, why
	}
	return reply, err
}

// FindWork names the namespaces that have a job which a janitor could claim now, and waits
// for one if asked to.
func (n *Node) FindWork(ctx context.Context, q *dirpb.FindWorkRequest) (*dirpb.FindWorkReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	reply := &dirpb.FindWorkReply{}
	n.await(ctx, l, q.WaitMillis, l.work.next, func() bool {
		n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) { reply.Namespaces = x.Work(s, now) })
		return len(reply.Namespaces) > 0
	})
	return reply, nil
}

// ClaimJob gives a session a job of its namespace, if there is one. A session works on
// one at a time: asked again, the directory names the one that it has.
func (n *Node) ClaimJob(ctx context.Context, q *dirpb.ClaimJobRequest) (*dirpb.ClaimJobReply, error) {
	l, err := n.confirmed(ctx)
	if err != nil {
		return nil, err
	}
	if len(q.Working) > maxWorking {
		return nil, status.Errorf(codes.InvalidArgument, "session %d works on %d jobs, want at most %d", q.SessionId,
			len(q.Working), maxWorking)
	}
	// Others may claim at the same time.
	for range claimTries {
		var job *dirpb.Job
		n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
			if y := s.Session(q.SessionId); y == nil || y.Life != dirpb.SessionLife_SESSION_LIVE {
				err = sessionGone(q.SessionId)
			} else if y.ReadOnly {
				err = status.Errorf(codes.FailedPrecondition, "session %d is read-only", q.SessionId)
			}
			job = x.Claimable(s, q.SessionId, now, q.Working...)
		})
		if err != nil || job == nil || job.Owner == q.SessionId {
			return &dirpb.ClaimJobReply{Job: job}, err
		}
		_, err = n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{
			SessionId: q.SessionId, JobId: job.Id,
		}}})
		if err != nil && !refused(err) {
			return nil, err
		}
		if err == nil {
			n.log.Info("directory: a janitor began a job", "session", q.SessionId, "job", job.Id, "kind", job.Kind,
				"pg", job.PgId)
			job.Owner = q.SessionId
			return &dirpb.ClaimJobReply{Job: job}, nil
		}
	}
	return &dirpb.ClaimJobReply{}, nil
}

// maxWorking bounds the jobs that a claim may name.
const maxWorking = 1024

// ReportJob notes how far a janitor got, ends the job, or, with trouble, gives it
// back.
func (n *Node) ReportJob(ctx context.Context, q *dirpb.ReportJobRequest) (*dirpb.ReportJobReply, error) {
	l, err := n.confirmed(ctx)
	if err != nil {
		return nil, err
	}
	if q.Finished && q.Trouble != "" {
		return nil, status.Errorf(codes.InvalidArgument, "job %d is finished, and in trouble: %.64q", q.JobId,
			q.Trouble)
	}
	var job *dirpb.Job
	var epoch, least uint64
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		if s.Life(q.SessionId) != dirpb.SessionLife_SESSION_LIVE {
			err = sessionGone(q.SessionId)
			return
		}
		if j := s.Job(q.JobId); j != nil && j.Owner == q.SessionId {
			job = j
			x.Progress(j.Id, q.Done, q.Total, label(strings.ToValidUTF8(q.Trouble, "?")), now)
			epoch, least = x.Epochs()
		}
	})
	if err != nil {
		return nil, err
	}
	if job == nil {
		return &dirpb.ReportJobReply{Gone: true}, nil
	}
	if !q.Finished && q.Trouble == "" {
		return &dirpb.ReportJobReply{}, nil
	}
	_, err = n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{
		SessionId: q.SessionId, JobId: q.JobId, GiveBack: !q.Finished, Report: q.Report,
		Epoch: epoch, MinEpoch: least, UnixMillis: time.Now().UnixMilli(),
	}}})
	if status.Code(err) == codes.NotFound {
		return &dirpb.ReportJobReply{Gone: true}, nil
	}
	if err != nil {
		return nil, err
	}
	if q.Finished {
		n.log.Info("directory: a job is done", "job", job.Id, "kind", job.Kind, "pg", job.PgId)
		n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) { x.Scrubbed(s, job, now) })
		l.wake()
	} else {
		n.log.Warn("directory: a job was given back and is tried again later", "job", job.Id, "kind", job.Kind, "pg",
			job.PgId, "trouble", label(q.Trouble))
	}
	return &dirpb.ReportJobReply{}, nil
}

// StartJob begins a job, or, for a placement group or shard of 0, one for each of the namespace. Those of
// many whose placement groups are busy cannot begin yet. They wait at this leader, and are forgotten if it
// stops leading; the reply names those that began. A single one that cannot begin is refused.
func (n *Node) StartJob(ctx context.Context, q *dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	jobs, many, err := n.jobsFor(q)
	if err != nil {
		return nil, err
	}
	var why string
	var waiting int
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		if many {
			all := len(jobs)
			jobs = x.Offer(s, jobs, now)
			waiting = all - len(jobs)
		} else {
			why = x.Busy(s, jobs[0], now)
		}
	})
	if why != "" {
		return nil, status.Errorf(codes.FailedPrecondition, "%s; nothing was done", why)
	}
	reply := &dirpb.StartJobReply{}
	var errs []error
	for _, job := range jobs {
		res, err := n.do(ctx, l, audited(ctx, startJob(job), actStartJob, q.Namespace,
			"kind", enumText(job.Kind, "JOB_"), "pg", job.PgId, "shard", job.ShardId, "target-pg", job.TargetPgId,
			"repair", job.Repair))
		switch {
		case err == nil:
			reply.JobIds = append(reply.JobIds, res.Job.Id)
		case !many || !refused(err):
			return nil, err
		default:
			errs = append(errs, errors.New(status.Convert(err).Message()))
		}
	}
	if len(reply.JobIds) == 0 && waiting == 0 {
		if len(errs) == 0 {
			return nil, status.Errorf(codes.NotFound, "namespace %q has nothing to start a job on", q.Namespace)
		}
		return nil, status.Error(codes.FailedPrecondition, errors.Join(errs...).Error())
	}
	return reply, nil
}

// jobsFor works out the jobs that a request means, and whether it means all that there
// are.
func (n *Node) jobsFor(q *dirpb.StartJobRequest) (jobs []*fsmpb.StartJob, many bool, err error) {
	invalid := func(format string, args ...any) {
		err = status.Errorf(codes.InvalidArgument, format, args...)
	}
	n.machine.view(func(s *fsm.State) {
		w := s.NamespaceNamed(q.Namespace)
		if w == nil {
			err = status.Errorf(codes.NotFound, "namespace %.64q does not exist", q.Namespace)
			return
		}
		switch q.Kind {
		case dirpb.JobKind_JOB_MOVE:
			many = q.ShardId == 0
			if many && q.TargetPgId != 0 {
				invalid("a target, placement group %d, for every shard: name one shard, or rebalance", q.TargetPgId)
				return
			}
			for _, sh := range s.Shards(w.Id) {
				if many && sh.Move == nil || sh.Id == q.ShardId {
					jobs = append(jobs, &fsmpb.StartJob{
						Kind: q.Kind, ShardId: sh.Id, TargetPgId: q.TargetPgId, Split: q.TargetPgId == 0,
						Reason: "an operator asked for it",
					})
				}
			}
			if !many && len(jobs) == 0 {
				err = status.Errorf(codes.NotFound, "shard %d of namespace %q does not exist", q.ShardId, w.Name)
			}
		case dirpb.JobKind_JOB_RECALL, dirpb.JobKind_JOB_SCRUB:
			many = q.PgId == 0
			job := &fsmpb.StartJob{Kind: q.Kind, Extents: []uint32{q.Extent}, Reason: "an operator asked for it"}
			if q.Kind == dirpb.JobKind_JOB_SCRUB {
				job.Extents, job.Repair, job.Reason = nil, q.Repair, lead.ReasonLook
				if q.Repair {
					job.Reason = lead.ReasonRepair
				}
			}
			for _, pg := range s.PGs(w.Id) {
				if (!many || pg.State == dirpb.PGState_PG_LOST) && pg.Id != q.PgId {
					continue
				}
				jobs = append(jobs, &fsmpb.StartJob{
					Kind: job.Kind, PgId: pg.Id, Extents: job.Extents, Repair: job.Repair, Reason: job.Reason,
				})
			}
			if !many && len(jobs) == 0 {
				err = status.Errorf(codes.NotFound, "placement group %d of namespace %q does not exist", q.PgId, w.Name)
			}
		default:
			invalid("job kind %s, want JOB_MOVE, JOB_RECALL or JOB_SCRUB", q.Kind)
		}
	})
	return jobs, many, err
}

func (n *Node) nodeNamed(name string) (id uint32, err error) {
	n.machine.view(func(s *fsm.State) {
		for _, m := range s.Nodes() {
			if m.Name == name {
				id = m.Id
			}
		}
	})
	if id == 0 {
		return 0, status.Errorf(codes.NotFound, "memory node %.64q does not exist", name)
	}
	return id, nil
}

// leadsFor is this node's leadership and the id of a memory node that a call is about.
func (n *Node) leadsFor(name string) (l *leadership, id uint32, err error) {
	if l, err = n.leader(); err == nil {
		id, err = n.nodeNamed(name)
	}
	return l, id, err
}

// DrainNode has a memory node lose its regions to others, or stay after all. It may be
// asked again to see what is left.
func (n *Node) DrainNode(ctx context.Context, q *dirpb.DrainNodeRequest) (*dirpb.DrainNodeReply, error) {
	l, id, err := n.leadsFor(q.Node)
	if err != nil {
		return nil, err
	}
	c := &fsmpb.Command{Op: &fsmpb.Command_DrainNode{DrainNode: &fsmpb.DrainNode{NodeId: id, Cancel: q.Cancel}}}
	if _, err := n.do(ctx, l, audited(ctx, c, actDrainNode, q.Node, "cancel", q.Cancel)); err != nil {
		return nil, err
	}
	reply := &dirpb.DrainNodeReply{}
	n.machine.view(func(s *fsm.State) {
		for _, pg := range s.PGs(0) {
			all := append(slices.Clone(pg.Members), pg.Planned, pg.Leaving)
			if slices.ContainsFunc(all, func(m *dirpb.Member) bool { return m.GetNodeId() == id }) {
				reply.Regions++
			}
		}
	})
	return reply, nil
}

// RemoveNode forgets a memory node.
func (n *Node) RemoveNode(ctx context.Context, q *dirpb.RemoveNodeRequest) (*dirpb.RemoveNodeReply, error) {
	l, id, err := n.leadsFor(q.Node)
	if err != nil {
		return nil, err
	}
	c := &fsmpb.Command{
		Op: &fsmpb.Command_RemoveNode{
			RemoveNode: &fsmpb.RemoveNode{NodeId: id, Force: q.Force, UnixMillis: time.Now().UnixMilli()}}}
	_, err = n.do(ctx, l, audited(ctx, c, actRemoveNode, q.Node, "force", q.Force))
	if err != nil {
		return nil, err
	}
	n.log.Info("directory: memory node removed", "node", q.Node, "force", q.Force)
	return &dirpb.RemoveNodeReply{}, nil
}

// GiveUpNode declares a silent memory node lost.
func (n *Node) GiveUpNode(ctx context.Context, q *dirpb.GiveUpNodeRequest) (*dirpb.GiveUpNodeReply, error) {
	l, id, err := n.leadsFor(q.Node)
	if err != nil {
		return nil, err
	}
	var c *fsmpb.Command
	if err := n.ask(l, func(x *lead.Leader, s *fsm.State, now time.Duration) (err error) {
		c, err = x.GiveUp(s, id, now)
		return err
	}); err != nil {
		return nil, err
	}
	c.GetNodeDown().UnixMillis = time.Now().UnixMilli()
	if _, err := n.do(ctx, l, audited(ctx, c, actGiveUpNode, q.Node)); err != nil {
		return nil, err
	}
	n.log.Warn("directory: memory node given up", "node", q.Node)
	return &dirpb.GiveUpNodeReply{}, nil
}

// restartMillis is how long a process may take that replaces another one.
const restartMillis = 30_000

// RestartNode has the process of a memory node replaced by another one with the same memory. The process is
// told so with the answer to its heartbeat, and not expected for a while. If it is to leave first, it is told
// so when no chain has it any more. A request that names the process replaces no other one, and may be made
// again.
func (n *Node) RestartNode(ctx context.Context, q *dirpb.RestartNodeRequest) (*dirpb.RestartNodeReply, error) {
	l, id, err := n.leadsFor(q.Node)
	if err != nil {
		return nil, err
	}
	var m *dirpb.Node
	n.machine.view(func(s *fsm.State) { m = s.Node(id) })
	last := &dirpb.Node{Id: id, Name: q.Node, Boot: q.Boot, Incarnation: q.Incarnation}
	switch another := m.GetBoot() != q.Boot || m.GetIncarnation() != q.Incarnation; {
	case q.Boot > m.GetBoot() && q.Incarnation == m.GetIncarnation():
		return nil, status.Errorf(codes.InvalidArgument, "memory node %.64q has had no boot %d, and is at %d; "+
			"nothing was done", q.Node, q.Boot, m.GetBoot())
	case q.Boot != 0 && (another || m.GetPauseMillis() > 0):
		return n.awaitNext(ctx, last)
	case m.GetState() != dirpb.NodeState_NODE_UP:
		return nil, status.Errorf(codes.FailedPrecondition, "memory node %.64q is down: there is no process to "+
			"replace; nothing was done", q.Node)
	case !m.GetKeeps():
		return nil, status.Errorf(codes.FailedPrecondition, "memory node %.64q does not keep its memory over a "+
			"restart (keep: off); nothing was done", q.Node)
	}
	c := &fsmpb.Command{
		Op: &fsmpb.Command_PauseNode{PauseNode: &dirpb.PauseNodeRequest{NodeId: id, Incarnation: m.Incarnation,
			Millis: restartMillis}}}
	if q.Leave {
		if err := n.mayPart(ctx, l, m); err != nil {
			return nil, err
		}
		c = &fsmpb.Command{
			Op: &fsmpb.Command_LeaveNode{LeaveNode: &dirpb.LeaveNodeRequest{NodeId: id, Incarnation: m.Incarnation,
				PauseMillis: restartMillis}}}
	}
	n.withState(l, func(x *lead.Leader, _ *fsm.State, _ time.Duration) { x.AskToLeave(id) })
	if _, err := n.do(ctx, l, audited(ctx, c, actRestartNode, q.Node, "leave", q.Leave, "program", q.Program)); err !=
		nil {
		return nil, err
	}
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) { x.BeginPause(s, id, now) })
	return n.awaitNext(ctx, m)
}

// mayPart refuses that a memory node leaves its placement groups to be replaced if that would cost the only copy of
// something, or if they are busy with something else.
func (n *Node) mayPart(ctx context.Context, l *leadership, m *dirpb.Node) error {
	look := func(x *lead.Leader, s *fsm.State, now time.Duration) error { return x.MayPart(s, m.Id, now) }
	if err := n.ask(l, look); err != nil {
		return err
	}
	if !n.awaitIdle(ctx, l, m.Id) {
		return status.Errorf(codes.FailedPrecondition, "placement groups of memory node %.64q are busy (kvctl jobs); "+
			"nothing was done", m.Name)
	}
	return n.ask(l, look)
}

// awaitNext waits until a process of a memory node has registered that takes over from m. The state tells, whoever
// leads by then.
func (n *Node) awaitNext(ctx context.Context, m *dirpb.Node) (*dirpb.RestartNodeReply, error) {
	for {
		changed := n.machine.move()
		var now *dirpb.Node
		n.machine.view(func(s *fsm.State) { now = s.Node(m.Id) })
		switch {
		case now == nil:
			return nil, status.Errorf(codes.Unknown, "memory node %.64q was removed while it was being replaced",
				m.Name)
		case now.Boot != m.Boot || now.Incarnation != m.Incarnation:
			return &dirpb.RestartNodeReply{Boot: now.Boot, Kept: now.Incarnation == m.Incarnation,
				Version: now.Version}, nil
		case now.PauseMillis == 0 && now.State == dirpb.NodeState_NODE_UP:
			if why := n.whyStays(m.Id); why != "" {
				return nil, status.Errorf(codes.FailedPrecondition,
					"memory node %.64q was not restarted, and its process serves on: %s", m.Name, why)
			}
			return nil, status.Errorf(codes.FailedPrecondition, "memory node %.64q did not leave its placement "+
				"groups, or was not replaced, in time: its process is still the same", m.Name)
		case now.PauseMillis == 0:
			return nil, status.Errorf(codes.Unknown, "memory node %.64q ended, or was declared lost, and no other "+
				"process of it has registered", m.Name)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, status.Errorf(codes.DeadlineExceeded,
				"memory node %.64q was told to restart, and no other process of it has registered yet", m.Name)
		case <-n.ctx.Done():
			return nil, n.notLeader()
		}
	}
}

// Rebalance spreads a namespace over the memory nodes that there are now, step by step, whichever directory
// node leads. It goes on until nothing is left to do, a step is refused or it is cancelled. It may be asked
// again to see what is left.
func (n *Node) Rebalance(ctx context.Context, q *dirpb.RebalanceRequest) (*dirpb.RebalanceReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	if err := n.told(ctx, l); err != nil {
		return nil, err
	}
	reply := &dirpb.RebalanceReply{}
	c := &fsmpb.Rebalance{To: dirpb.Rebalancing_REBALANCING_ON}
	if q.Cancel {
		c.To = dirpb.Rebalancing_REBALANCING_CANCELLED
	}
	if err := n.ask(l, func(x *lead.Leader, s *fsm.State, now time.Duration) error {
		w := s.NamespaceNamed(q.Namespace)
		if w == nil {
			return fmt.Errorf("namespace %.64q does not exist: %w", q.Namespace, fsm.ErrNotFound)
		}
		c.NamespaceId, reply.Steps = w.Id, x.Rebalance(s, w.Id, now)
		return nil
	}); err != nil {
		return nil, err
	}
	if !q.DryRun && (q.Cancel || len(reply.Steps) > 0) {
		_, err = n.do(ctx, l, audited(ctx, &fsmpb.Command{Op: &fsmpb.Command_Rebalance{Rebalance: c}}, actRebalance,
			q.Namespace,
			"steps", len(reply.Steps), "cancel", q.Cancel))
	}
	return reply, err
}

// told waits until a leader that was elected just now knows how full placement groups are.
func (n *Node) told(ctx context.Context, l *leadership) error {
	var wait time.Duration
	n.withState(l, func(x *lead.Leader, _ *fsm.State, now time.Duration) { wait = x.Untold(now) })
	if wait == 0 {
		return nil
	}
	over := n.reigns.next()
	if n.leading.Load() != l {
		return n.notLeader()
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-over:
	case <-n.ctx.Done():
	}
	return n.notLeader()
}
