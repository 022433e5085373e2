// Package janitor does the store's background work: it brings joiners up, moves
// shards and extents, and checks every record, with the verbs that clients use.
//
// The directory decides what is to be done, and when (package server/lead); how a group
// is moved or checked is package index/repair. This package cuts a job into those
// operations ([Plan]), and runs them ([Run]) under a session of its own. That session is
// leased and fenced like any other. A job that stops anywhere can be started over.
//
// A Plan is immutable. Run owns its goroutines and clients.
package janitor

import (
	"cmp"
	"fmt"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
)

// Plan is a job cut into operations.
type Plan struct {
	Kind index.Kind
	Len  int
	at   func(i int) repair.Work
	// first operations are all to be done before any other begins.
	first int
	// outlasts says that the others also wait until all that anybody had under way when the first were done has ended.
	outlasts bool
}

// Batch is where a batch of at most n operations from the lo-th on ends: one batch is
// done before the next begins.
func (p *Plan) Batch(lo, n int) int {
	if lo < p.first {
		return min(lo+n, p.first)
	}
	return min(lo+n, p.Len)
}

// Outlasts reports whether the i-th operation must wait for operations, anybody's, that were under way when the first
// pass was done. It then begins only after all of them have ended.
func (p *Plan) Outlasts(i int) bool { return p.outlasts && i >= p.first }

// At is the i-th operation.
func (p *Plan) At(i int) repair.Work { return p.at(i) }

// array is what a placement group's index holds of one shard.
type array struct {
	off      uint64
	segments int
}

const groups = layout.SegmentGroups + 1

// NewPlan works out what a job asks for under a view.
func NewPlan(v *engine.View, job *dirpb.Job) (*Plan, error) {
	pg := v.PGs[job.GetPgId()]
	if pg == nil {
		return nil, fmt.Errorf("job %d: no placement group %d", job.GetId(), job.GetPgId())
	}
	base := repair.Work{PG: job.GetPgId(), Extents: job.GetExtents(), Count: job.GetInPlace() || job.GetCount(),
		Window: repair.UnitRun{Unit: job.GetWindowUnit(), Units: job.GetWindowUnits()}, WindowMost: job.GetWindowMost(),
		Shard: job.GetShardId()}
	switch job.GetKind() {
	case dirpb.JobKind_JOB_RECOVER, dirpb.JobKind_JOB_JOIN, dirpb.JobKind_JOB_SCRUB:
		base.Frozen = job.GetKind() == dirpb.JobKind_JOB_RECOVER
		kind := index.Sync
		if job.GetKind() == dirpb.JobKind_JOB_SCRUB {
			if kind = index.Scrub; job.GetCount() {
				return overArrays(index.Relocate, base, arraysOf(v, pg), groups, layout.GroupSize), nil
			}
		}
		p := overArrays(kind, base, append(arraysOf(v, pg), statusArraysOf(pg)...), 1, layout.SegmentSize)
		if job.GetKind() == dirpb.JobKind_JOB_JOIN && job.GetRejoin() {
			p.twice()
		}
		return p, nil
	case dirpb.JobKind_JOB_RECALL:
		return overArrays(index.Relocate, base, arraysOf(v, pg), groups, layout.GroupSize), nil
	case dirpb.JobKind_JOB_SETTLE:
		// Its status blocks are left as they are: their session's verbs have all landed, so nobody commits by them any
		// more, and what they say of a last transaction is what its intents are settled by.
		return overArrays(index.SettleAll, base, arraysOf(v, pg), groups, layout.GroupSize), nil
	case dirpb.JobKind_JOB_CLEAN:
		base.Wipe, base.Drop, base.Target = job.GetWipe(), job.GetDrop(), job.GetChildPgId()
		a := array{job.GetOffset(), int(job.GetSegments())}
		if a.off%layout.GroupSize != 0 || a.off < layout.RegionPageSize || a.off > pg.IndexBytes ||
			uint64(a.segments) > (pg.IndexBytes-a.off)/layout.SegmentSize {
			return nil, fmt.Errorf("job %d: %d segments at %#x do not lie in the index of placement group %d",
				job.GetId(), a.segments, a.off, pg.ID)
		}
		p := overArrays(index.Clean, base, []array{a}, groups, layout.GroupSize)
		// The stashes first: what is MOVED there is told from an unfinished move by
		// the home group's SPLIT, which goes with the home group.
		p.first = a.segments
		all := p.at
		p.at = func(i int) repair.Work {
			if i < a.segments {
				return all(i*groups + layout.StashGroup)
			}
			i -= a.segments
			return all(i/layout.SegmentGroups*groups + i%layout.SegmentGroups)
		}
		return p, nil
	case dirpb.JobKind_JOB_MOVE, dirpb.JobKind_JOB_ABANDON:
		for i := range v.Shards {
			if s := &v.Shards[i]; s.ID == job.GetShardId() {
				kind := index.Move
				if job.GetKind() == dirpb.JobKind_JOB_ABANDON {
					kind = index.Abandon
				}
				return &Plan{Kind: kind, Len: int(s.Segments) * layout.SegmentGroups, at: func(i int) repair.Work {
					w := base
					w.Group = uint32(i)
					return w
				}}, nil
			}
		}
		return nil, fmt.Errorf("job %d: no shard %d", job.GetId(), job.GetShardId())
	}
	return nil, fmt.Errorf("job %d: unknown kind %v", job.GetId(), job.GetKind())
}

// arraysOf lists the arrays of a placement group, those of children that are
// still being moved to among them.
func arraysOf(v *engine.View, pg *engine.PG) (as []array) {
	for i := range v.Shards {
		s := &v.Shards[i]
		if s.PG == pg {
			as = append(as, array{s.Off, int(s.Segments)})
		}
		if s.Child != 0 && s.ChildPG == pg {
			as = append(as, array{s.ChildOff, int(s.ChildSegments)})
		}
	}
	return as
}

// statusArraysOf lists a placement group's arrays of status words. They are words like others for who brings replicas
// up; nothing lies there that moves, or that could be recalled.
func statusArraysOf(pg *engine.PG) (as []array) {
	for _, a := range pg.StatusArrays {
		as = append(as, array{a.Off, int(a.Segments)})
	}
	return as
}

// overArrays makes one operation of each of per pieces of size bytes of a segment.
func overArrays(kind index.Kind, base repair.Work, as []array, per int, size uint64) *Plan {
	n := 0
	for _, a := range as {
		n += a.segments * per
	}
	return &Plan{Kind: kind, Len: n, at: func(i int) repair.Work {
		w := base
		for _, a := range as {
			if i < a.segments*per {
				w.Off = a.off + uint64(i/per)*layout.SegmentSize + uint64(i%per)*size
				break
			}
			i -= a.segments * per
		}
		return w
	}}
}

// twice makes the operations of p two passes. A joiner that retains a word that a lost head decided alone, such as the
// EMPTY of a delete, may take that word once more: the delete comes again, by the same word. Somebody who read it
// before, and syncs the slot only then, takes the joiner back to the word that came between. After the first pass no
// word at the joiner is a retained one that the chain does not have; so whoever begins then does no such harm, and the
// second pass, when all others have ended, mends theirs.
func (p *Plan) twice() {
	n, at := p.Len, p.at
	p.Len, p.first, p.outlasts = 2*n, n, true
	p.at = func(i int) repair.Work { return at(i % n) }
}

// Add sums up what one operation found.
func Add(r *dirpb.JobReport, w *repair.Work) {
	r.Groups++
	r.Records += w.Records
	r.Bytes += w.Units * layout.UnitSize
	r.SyncedWords += w.Synced
	r.TransferredBytes += w.Bytes
	r.RepairedRecords += w.Repaired
	r.LostRecords += w.Lost
	for x, n := range w.Linked {
		for len(r.LinkedUnits) <= int(x) {
			r.LinkedUnits = append(r.LinkedUnits, 0)
		}
		r.LinkedUnits[x] += n
	}
	for _, k := range w.Kept {
		for i := range r.Kept { // of one extent, unsorted until Finish
			if r.Kept[i].Extent == k.Unit/layout.ExtentUnits {
				r.Kept[i].SkipTake = append(r.Kept[i].SkipTake, k.Unit%layout.ExtentUnits, k.Units)
			}
		}
	}
	for _, f := range w.Findings {
		if len(r.Findings) < maxFindings {
			r.Findings = append(r.Findings, f)
		}
	}
}

const maxFindings = 32

// Begin is the report of a job before its first operation.
func Begin(job *dirpb.Job) *dirpb.JobReport {
	r := &dirpb.JobReport{}
	if job.GetInPlace() {
		for _, x := range job.GetExtents() {
			r.Kept = append(r.Kept, &dirpb.UnitRuns{Extent: x})
		}
	}
	return r
}

// Finish completes the report of a job whose operations are all done.
func Finish(r *dirpb.JobReport) {
	for _, k := range r.Kept {
		k.SkipTake = runsOf(k.SkipTake)
	}
}

// runsOf turns pairs of offset and units, in any order, into runs that ascend, as in
// dirpb.UnitRuns: units to skip, units of the run. Runs that meet become one.
func runsOf(pairs []uint32) (out []uint32) {
	type run struct{ from, to uint32 }
	runs := make([]run, 0, len(pairs)/2)
	for i := 0; i+1 < len(pairs); i += 2 {
		runs = append(runs, run{pairs[i], min(pairs[i]+pairs[i+1], layout.ExtentUnits)})
	}
	ordered.Sort(runs, func(a, b run) int { return cmp.Compare(a.from, b.from) })
	at := uint32(0)
	for _, r := range runs {
		switch n := len(out); {
		case r.to <= at:
		case n > 0 && r.from <= at:
			out[n-1] += r.to - at
			at = r.to
		default:
			from := max(r.from, at)
			out = append(out, from-at, r.to-from)
			at = r.to
		}
	}
	return out
}
