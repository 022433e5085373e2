package simtest

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/janitor"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// canClaim is the job that a janitor would get.
func (c *cl) canClaim() *dirpb.Job {
	if !c.janitor || c.job != nil || len(c.run)+len(c.orphans) > 0 {
		return nil
	}
	if c.i >= len(c.w.claims) {
		return nil
	}
	j := c.w.claims[c.i]
	if j == nil || c.core.View().Version < j.Barrier {
		return nil
	}
	return j
}

func (c *cl) claim() {
	j := c.canClaim()
	if err := c.claimJob(j); err != nil {
		c.w.fail(fmt.Errorf("claim: %w", err))
		return
	}
	p, err := janitor.NewPlan(c.core.View(), j)
	if err != nil {
		c.giveBack(j, err.Error())
		return
	}
	c.job, c.plan, c.report, c.todo, c.tries = j, p, janitor.Begin(j), c.todo[:0], 0
	c.passed = 0
	for i := p.Len - 1; i >= 0; i-- {
		if p.At(i).Count || c.w.isRelevant(p.Kind, p.At(i)) {
			c.todo = append(c.todo, i)
		}
	}
}

// isRelevant reports whether anybody could tell that a piece of a job was done: a key of
// the scope may be in its group.
func (w *World) isRelevant(k index.Kind, x repair.Work) bool {
	switch k {
	case index.Move, index.Abandon:
		return w.relevant[[2]int{int(x.Group) / layout.SegmentGroups % w.cfg.Segments,
			int(x.Group) % layout.SegmentGroups}]
	case index.Clean, index.Relocate, index.SettleAll:
		off := int(x.Off) - layout.RegionPageSize
		g := off / layout.GroupSize
		return w.relevant[[2]int{g / (layout.SegmentGroups + 1) % w.cfg.Segments, g % (layout.SegmentGroups + 1)}]
	}
	return true
}

// gone reports whether the janitor's job is not its any more.
func (c *cl) gone() bool {
	if c.job == nil {
		return false
	}
	return !c.owns(c.job) || c.stuck()
}

// stuck reports whether the job waits for a frozen placement group that nobody brings
// back. A janitor (internal/janitor) works on several jobs at once; this one gives up one
// for the other.
func (c *cl) stuck() bool {
	for _, r := range c.run {
		if r.t.Waiting() != index.Refresh {
			return false
		}
	}
	if len(c.run) == 0 {
		return false
	}
	j := c.w.ld.Claimable(c.w.st, c.id, time.Duration(c.w.now), c.job.Id)
	return j != nil && (j.Kind == dirpb.JobKind_JOB_RECOVER || j.Kind == dirpb.JobKind_JOB_JOIN)
}

// canWork reports whether the job's next operation may begin, and its lane is free. An operation of the second pass
// begins when all has ended that anybody had under way after the first, which a reclaim epoch tells the janitor
// (Tools.UnderWay): as places leave limbo, which before checks.
func (c *cl) canWork() bool {
	n := len(c.todo)
	switch {
	case n == 0:
		return true
	case c.outlasts() && c.passed == 0:
		return len(c.run) == 0
	case c.outlasts():
		if o, _ := c.w.begunBefore(c.passed); o != nil {
			return false
		}
	}
	return !c.within(c.todo[n-1] % len(c.lanes))
}

// outlasts reports whether the job's next operation is of the second of two passes.
func (c *cl) outlasts() bool {
	n := len(c.todo)
	return n > 0 && c.plan.Outlasts(c.todo[n-1])
}

// work begins the next operation of the job, or ends it.
func (c *cl) work() {
	if c.outlasts() && c.passed == 0 {
		c.passed = c.w.step
		c.tell(uint64(len(c.todo)))
		return
	}
	if n := len(c.todo); n > 0 {
		i := c.todo[n-1]
		c.todo = c.todo[:n-1]
		r := c.newRun(i % len(c.lanes))
		if r == nil {
			return
		}
		r.work = i
		x := c.plan.At(i)
		r.t.Op.Kind, r.t.Op.Machine = c.plan.Kind, repair.New(c.plan.Kind, &x)
		c.start(r)
		return
	}
	w := c.w
	epoch, least := w.ld.Epochs()
	j := c.job
	c.job = nil
	janitor.Finish(c.report)
	if isSweep(j) {
		w.endSweep(j, true)
		return
	}
	w.ld.Progress(j.Id, 1, 1, "", time.Duration(w.now))
	if j.Kind == dirpb.JobKind_JOB_RECALL {
		w.scannedExtent(j)
	}
	res := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: c.id, JobId: j.Id, Report: c.report, Epoch: epoch,
			MinEpoch: least}}})
	if res.Err == nil {
		w.ld.Scrubbed(w.st, j, time.Duration(w.now))
	}
}

// workOf is what an operation of a janitor's kinds was asked, and found.
func workOf(op *index.Op) *repair.Work { return &op.Machine.(*repair.Op).Work }

func (c *cl) worked(r *running) {
	if c.job == nil {
		return
	}
	op := &r.t.Op
	c.w.traceLine("      => %v %+v: %v", op.Kind, *workOf(op), op.Err)
	switch {
	case op.Err == nil:
		janitor.Add(c.report, workOf(op))
	case errors.Is(op.Err, engine.ErrLease):
		// The claim went with the session; a renewal tells.
		c.todo = append(c.todo, r.work)
	default:
		c.todo = append(c.todo, r.work)
		if c.tries++; c.tries > 20 {
			c.giveBack(c.job, op.Err.Error())
			c.job, c.todo = nil, nil
		}
	}
}

func (c *cl) giveBack(j *dirpb.Job, why string) {
	w := c.w
	w.traceLine("      => %v is given back: %s", j, why)
	if isSweep(j) {
		w.endSweep(j, false)
		return
	}
	w.ld.Progress(j.Id, 0, 1, why, time.Duration(w.now))
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: c.id, JobId: j.Id, GiveBack: true}}})
}

// dropJob gives up what is not the janitor's any more.
func (c *cl) dropJob() {
	switch {
	case !c.owns(c.job):
	case isSweep(c.job):
		c.w.endSweep(c.job, false)
	default:
		c.w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_EndJob{EndJob: &fsmpb.EndJob{SessionId: c.id, JobId: c.job.Id, GiveBack: true}}})
	}
	c.job = nil
	for len(c.run) > 0 {
		c.abandon(c.run[0], engine.ErrTimeout)
	}
	c.todo = nil
}
