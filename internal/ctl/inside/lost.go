package inside

import (
	"context"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/check"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
)

// lostSegments is how many segments are looked through together.
const lostSegments = 16

// freeLost frees the records of the namespace of which no copy is good, in a session of its own, and writes down what
// they were. It mends those that have a good copy: janitors may have been kept from it, by a move that does not end for
// such a record.
func (a *commands) freeLost(ctx context.Context, b ctl.Backend, st *dirpb.StatusReply, ns *dirpb.Namespace,
	rep *CheckReport) (
	err error) {
	s, err := b.Open(ctx, ctl.SessionOptions{})
	if err != nil {
		return err
	}
	defer func() { a.Closed("session", s.Close) }()
	rep.Lost = 0 // counted anew
	for _, pg := range overview.Groups(st.GetMap(), ns.GetId()) {
		if len(pg.GetMembers()) == 0 {
			continue
		}
		var works []*repair.Work
		for _, r := range check.Arrays(st.GetMap(), pg.GetId()) {
			for i := range uint64(r.Segments) {
				works = append(works, &repair.Work{PG: pg.GetId(), Off: r.Off + i*layout.SegmentSize, FreeLost: true})
			}
		}
		for ; len(works) > 0; works = works[min(lostSegments, len(works)):] {
			some := works[:min(lostSegments, len(works))]
			for i, err := range s.Work(ctx, index.Scrub, some) {
				w := some[i]
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				if err != nil {
					rep.Problem(w.PG, "segment at %#x: %v", w.Off, err)
				}
				rep.Freed += w.Freed
				rep.Lost += w.Lost - min(w.Lost, w.Freed)
				rep.RepairedRecords += w.Repaired
				for _, f := range w.Findings {
					rep.Problem(w.PG, "%s", f)
				}
			}
		}
	}
	return nil
}
