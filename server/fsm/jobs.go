package fsm

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// RECOVER and JOIN follow from a change of the chain. Of the others a placement group has
// at most one; it waits, parked, while there is one of those two. SETTLE comes beside any of them: it does what
// clients do, and others may wait for it.

func urgent(k dirpb.JobKind) bool {
	return k == dirpb.JobKind_JOB_RECOVER || k == dirpb.JobKind_JOB_JOIN
}

// changesOf are the jobs that occupy a placement group, but for SETTLE.
func (s *State) changesOf(pg uint32) []*dirpb.Job {
	return slices.DeleteFunc(s.JobsOf(pg), func(j *dirpb.Job) bool { return j.Kind == dirpb.JobKind_JOB_SETTLE })
}

// addJob gives j an id and a row.
func (s *State) addJob(j *dirpb.Job) {
	m := s.editMeta()
	m.JobId++
	j.Id = m.JobId
	s.putJob(&fsmpb.Job{Job: j})
}

func (s *State) setOwner(id, session uint32) {
	row := proto.CloneOf(s.jobs[id])
	row.Job.Owner = session
	s.putJob(row)
}

func (s *State) endJobs(pg uint32, kinds ...dirpb.JobKind) {
	for _, j := range s.JobsOf(pg) {
		if slices.Contains(kinds, j.Kind) {
			jobRows.drop(s, j.Id)
		}
	}
}

// loseJob ends j because a placement group it works on starts over empty. The other placement group needs a new job.
func (s *State) loseJob(j *dirpb.Job, lost uint32) {
	jobRows.drop(s, j.Id)
	switch j.Kind {
	case dirpb.JobKind_JOB_MOVE:
		sh := s.editShard(j.ShardId)
		mv := sh.Move
		if mv.PgId == lost {
			s.freeArray(lost, mv.Offset, sh.ChildSegments(), 0)
		}
		switch {
		case j.PgId != lost:
			mv.Abandoned = true
			s.addJob(&dirpb.Job{
				Kind: dirpb.JobKind_JOB_ABANDON, NamespaceId: j.NamespaceId, PgId: j.PgId, ShardId: sh.Id,
				Barrier: s.nextVersion(), Reason: "the child's memory was lost",
			})
		case mv.PgId != lost:
			segments := sh.ChildSegments()
			sh.Move = nil
			s.addJob(&dirpb.Job{
				Kind: dirpb.JobKind_JOB_CLEAN, NamespaceId: j.NamespaceId, PgId: mv.PgId, Offset: mv.Offset,
				Segments: segments,
				Wipe:     true, Drop: true, Barrier: s.nextVersion(), Reason: "the parent's memory was lost",
			})
		default:
			sh.Move = nil
		}
	case dirpb.JobKind_JOB_ABANDON:
		s.editShard(j.ShardId).Move = nil
	case dirpb.JobKind_JOB_CLEAN:
		if j.Wipe {
			s.freeArray(lost, j.Offset, j.Segments, 0)
		}
	}
}

func (s *State) startJob(c *fsmpb.StartJob) (*dirpb.Job, error) {
	if len(c.GetReason()) > MaxLabelLen {
		return nil, fmt.Errorf("%w: reason is longer than %d bytes", ErrInvalid, MaxLabelLen)
	}
	switch c.GetKind() {
	case dirpb.JobKind_JOB_MOVE:
		return s.startMove(c)
	case dirpb.JobKind_JOB_RECALL, dirpb.JobKind_JOB_SCRUB, dirpb.JobKind_JOB_SETTLE:
	default:
		return nil, fmt.Errorf("%w: job kind %s, want JOB_MOVE, JOB_RECALL, JOB_SCRUB or JOB_SETTLE", ErrInvalid,
			c.GetKind())
	}
	pg := s.pgs[c.PgId]
	if pg == nil {
		return nil, fmt.Errorf("placement group %d: %w", c.PgId, ErrNotFound)
	}
	if c.Kind == dirpb.JobKind_JOB_SETTLE {
		return s.startSettle(c, pg)
	}
	if err := s.checkIdle(pg); err != nil {
		return nil, err
	}
	j := &dirpb.Job{Kind: c.Kind, NamespaceId: pg.NamespaceId, PgId: pg.Id, Reason: c.Reason}
	if c.Kind == dirpb.JobKind_JOB_SCRUB {
		j.Count = c.Count
	}
	if c.Kind == dirpb.JobKind_JOB_RECALL {
		h := s.heaps[pg.Id]
		if len(c.Extents) == 0 || len(c.Extents) > MaxRecalls {
			return nil, fmt.Errorf("%w: recall of %d extents, want 1 to %d", ErrInvalid, len(c.Extents), MaxRecalls)
		}
		for i, x := range c.Extents {
			if lo, hi := h.Start/extentUnits, h.Watermark; uint64(x) < lo || uint64(x)*extentUnits >= hi ||
				h.Watermark == h.Start {
				return nil, fmt.Errorf("%w: nothing of extent %d of placement group %d was ever granted", ErrInvalid, x,
					pg.Id)
			}
			if recallOf(h, x) != nil || slices.Contains(c.Extents[:i], x) {
				return nil, fmt.Errorf("recall of extent %d of placement group %d: %w", x, pg.Id, ErrExists)
			}
		}
		if c.WindowUnits > 0 &&
			(!c.InPlace || uint64(c.WindowUnit)+uint64(c.WindowUnits) > extentEnd(uint64(c.WindowUnit)) ||
				!slices.Contains(c.Extents, c.WindowUnit/extentUnits)) {
			return nil, fmt.Errorf("%w: window %d+%d, want one inside an extent that is recalled in place", ErrInvalid,
				c.WindowUnit, c.WindowUnits)
		}
		for _, x := range c.Extents {
			s.beginRecall(pg.Id, x)
		}
		j.Extents, j.InPlace, j.Barrier = slices.Clone(c.Extents), c.InPlace, s.nextVersion()
		j.WindowUnit, j.WindowUnits, j.WindowMost = c.WindowUnit, c.WindowUnits, c.WindowMost
	}
	s.addJob(j)
	if c.Kind == dirpb.JobKind_JOB_SCRUB && c.Repair {
		s.putJob(&fsmpb.Job{Job: j, Repair: true})
	}
	return j, nil
}

// startMove gives a shard a child to move into: half of its hashes, or all of them into
// another placement group or a larger array.
func (s *State) startMove(c *fsmpb.StartJob) (*dirpb.Job, error) {
	sh := s.shards[c.ShardId]
	if sh == nil {
		return nil, fmt.Errorf("shard %d: %w", c.ShardId, ErrNotFound)
	}
	to := c.TargetPgId
	if to == 0 {
		to = sh.PgId
	}
	target := s.pgs[to]
	switch {
	case target == nil || target.NamespaceId != sh.NamespaceId:
		return nil, fmt.Errorf("placement group %d of the shard's namespace: %w", to, ErrNotFound)
	case c.Segments != 0 && (c.Split || to != sh.PgId):
		return nil, fmt.Errorf("%w: shard %d is to have %d segments, and to split or to leave its placement group: "+
			"want one of these", ErrInvalid, sh.Id, c.Segments)
	case c.Segments%sh.Segments != 0 || c.Segments/sh.Segments == 1 || c.Segments/sh.Segments > layout.MaxGrowth:
		return nil, fmt.Errorf("%w: %d segments for shard %d of %d, want 2 to %d times as many", ErrInvalid, c.Segments,
			sh.Id, sh.Segments, layout.MaxGrowth)
	case !c.Split && to == sh.PgId && c.Segments == 0:
		return nil, fmt.Errorf("%w: shard %d is in placement group %d already", ErrInvalid, sh.Id, to)
	case sh.Move != nil:
		return nil, fmt.Errorf("%w: shard %d is moving already", ErrRefused, sh.Id)
	case c.Split && sh.Depth >= MaxShardDepth:
		return nil, fmt.Errorf("%w: shard %d has depth %d, the greatest there is", ErrRefused, sh.Id, sh.Depth)
	}
	for _, pg := range []*dirpb.PlacementGroup{s.pgs[sh.PgId], target} {
		if err := s.checkIdle(pg); err != nil {
			return nil, err
		}
	}
	segments := max(c.Segments, sh.Segments)
	if c.Split || c.Segments != 0 {
		if err := s.CheckIndexQuota(sh.NamespaceId, segments); err != nil {
			return nil, err
		}
	}
	if TakesFirst(target, s.heaps[to], segments) {
		return nil, fmt.Errorf("%w: the index of placement group %d has no room for %d segments beside the first "+
			"status words", ErrFull, to, segments)
	}
	offset, h := takeArray(target, s.heaps[to], segments)
	if h == nil {
		return nil, fmt.Errorf("%w: the index of placement group %d has no room for %d segments", ErrFull, to, segments)
	}
	s.putHeap(h)
	m := s.editMeta()
	m.ShardId++
	s.editShard(sh.Id).Move = &dirpb.Move{ChildId: m.ShardId, PgId: to, Offset: offset, Split: c.Split,
		Segments: c.Segments}
	j := &dirpb.Job{
		Kind: c.Kind, NamespaceId: sh.NamespaceId, PgId: sh.PgId, TargetPgId: to, ShardId: sh.Id, Reason: c.Reason,
	}
	s.addJob(j)
	return j, nil
}

// claimJob gives a job to a janitor. Claiming one's own again changes nothing.
func (s *State) claimJob(c *fsmpb.ClaimJob) (*dirpb.Job, error) {
	x := s.sessions[c.GetSessionId()]
	if x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE {
		return nil, fmt.Errorf("session %d, live: %w", c.GetSessionId(), ErrNotFound)
	}
	j := s.Job(c.JobId)
	if j == nil || j.NamespaceId != x.NamespaceId {
		return nil, fmt.Errorf("job %d of the session's namespace: %w", c.JobId, ErrNotFound)
	}
	if x.ReadOnly {
		return nil, fmt.Errorf("%w: session %d is read-only", ErrRefused, x.Id)
	}
	if j.Owner == x.Id {
		return j, nil
	}
	if j.Owner != 0 { // dropSession takes the jobs of those that are gone
		return nil, fmt.Errorf("%w: session %d works on job %d", ErrRefused, j.Owner, j.Id)
	}
	if !urgent(j.Kind) && j.Kind != dirpb.JobKind_JOB_SETTLE {
		for _, pg := range []uint32{j.PgId, j.TargetPgId} {
			if pg == 0 {
				continue
			}
			for _, o := range s.JobsOf(pg) {
				if urgent(o.Kind) {
					return nil, fmt.Errorf("%w: job %d waits for job %d, %s", ErrRefused, j.Id, o.Id, o.Kind)
				}
			}
		}
	}
	s.setOwner(j.Id, x.Id)
	return s.Job(j.Id), nil
}

// endJob ends a job that its owner has finished, or gives it back. It returns the
// extents to recall after a scrub that repairs.
func (s *State) endJob(c *fsmpb.EndJob) ([]uint32, error) {
	x := s.sessions[c.GetSessionId()]
	row := s.jobs[c.GetJobId()]
	j := row.GetJob()
	if j == nil || x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE || j.Owner != x.Id {
		return nil, fmt.Errorf("job %d of session %d: %w", c.GetJobId(), c.GetSessionId(), ErrNotFound)
	}
	if c.GiveBack {
		s.setOwner(j.Id, 0)
		return nil, nil
	}
	if j.Kind == dirpb.JobKind_JOB_SCRUB && c.Report == nil {
		return nil, fmt.Errorf("%w: scrub %d without a report", ErrInvalid, j.Id)
	}
	if j.Kind == dirpb.JobKind_JOB_RECALL && j.InPlace {
		if err := checkKept(j, c.Report); err != nil {
			return nil, err
		}
	}
	touched := []uint32{j.PgId}
	if j.TargetPgId != 0 && j.TargetPgId != j.PgId {
		touched = append(touched, j.TargetPgId)
	}
	for _, pg := range touched {
		h := s.editHeap(pg)
		h.IndexFree = matured(h.IndexFree, c.MinEpoch)
	}
	jobRows.drop(s, j.Id)
	var leaks []uint32
	switch j.Kind {
	case dirpb.JobKind_JOB_JOIN:
		pg := s.editPG(j.PgId)
		pg.Joining = false
		pg.Members[len(pg.Members)-1].Rejoins = false
		s.newEpoch(pg)
	case dirpb.JobKind_JOB_MOVE:
		s.endMove(j)
	case dirpb.JobKind_JOB_CLEAN:
		if j.Wipe {
			s.freeArray(j.PgId, j.Offset, j.Segments, c.Epoch+1)
		}
	case dirpb.JobKind_JOB_ABANDON:
		sh := s.editShard(j.ShardId)
		touched = append(touched, sh.Move.GetPgId())
		sh.Move = nil
	case dirpb.JobKind_JOB_RECALL:
		s.endScan(j, c)
	case dirpb.JobKind_JOB_SETTLE:
		s.endSettle(row)
	case dirpb.JobKind_JOB_SCRUB:
		h := s.editHeap(j.PgId)
		report := bounded(c.Report, h.End)
		if j.Count && h.LastScrub != nil { // it looked at no record
			report.RepairedRecords, report.LostRecords, report.Findings = h.LastScrub.RepairedRecords,
				h.LastScrub.LostRecords, h.LastScrub.Findings
		}
		h.LastScrub, h.LastScrubUnixMillis, h.Dirty = report, c.UnixMillis, false
		if row.Repair {
			_, leaks = s.Leaks(j.PgId)
		}
	}
	s.settlePGs(touched...)
	return leaks, nil
}

// endMove puts the child into the map, and out of it what moved there. The parent's copies of that are then
// to be cleaned.
func (s *State) endMove(j *dirpb.Job) {
	sh := proto.CloneOf(s.shards[j.ShardId])
	mv := sh.Move
	child := &dirpb.Shard{
		Id: mv.ChildId, NamespaceId: sh.NamespaceId, Prefix: sh.Prefix, Depth: sh.Depth,
		PgId: mv.PgId, Offset: mv.Offset, Segments: sh.ChildSegments(),
	}
	sh.Move = nil
	if mv.Split {
		sh.Depth++
		sh.Prefix <<= 1
		child.Depth, child.Prefix = sh.Depth, sh.Prefix|1
		s.putShard(sh)
	} else {
		shardRows.drop(s, sh.Id)
	}
	s.putShard(child)
	s.addJob(&dirpb.Job{
		Kind: dirpb.JobKind_JOB_CLEAN, NamespaceId: j.NamespaceId, PgId: j.PgId, Offset: sh.Offset,
		Segments:  sh.Segments,
		ChildPgId: mv.PgId, Wipe: !mv.Split, Barrier: s.nextVersion(), Reason: fmt.Sprintf("shard %d moved to shard %d",
			sh.Id, child.Id),
	})
}

// bounded is r with no more than a state row may hold, for a heap that ends at a
// unit.
func bounded(r *dirpb.JobReport, end uint64) *dirpb.JobReport {
	r = proto.CloneOf(r)
	r.Kept = nil
	extents := int((end + extentUnits - 1) / extentUnits)
	r.LinkedUnits = r.LinkedUnits[:min(len(r.LinkedUnits), extents)]
	r.Findings = r.Findings[:min(len(r.Findings), maxFindings)]
	for i, f := range r.Findings {
		r.Findings[i] = strings.ToValidUTF8(f[:min(len(f), maxFindingLen)], "")
	}
	return r
}
