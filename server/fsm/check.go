package fsm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// check returns why rows that each decode do not make a state: commands count on what rows
// say of each other, and on ids that were given out. A snapshot that lacks rows, or holds
// those of another state, must not be served.
func (s *State) check() error {
	errs := []error{s.checkDirectory(), s.checkKeys(), s.checkAudit(), s.checkReigns(), s.checkRecovered(),
		s.checkDiscriminators()}
	for _, k := range kinds {
		errs = append(errs, k.verify(s))
	}
	return errors.Join(errs...)
}

func (s *State) checkHeap(h *fsmpb.Heap) error {
	if s.pgs[h.PgId] == nil {
		return fmt.Errorf("%d: its placement group is missing", h.PgId)
	}
	// An earlier version knew no homes, without which memory of sessions that live would be granted again.
	if n := len(h.ProtoReflect().GetUnknown()); n > 0 {
		return fmt.Errorf("placement group %d: %d bytes of another version's fields: this version cannot take over "+
			"that directory", h.PgId, n)
	}
	return nil
}

func (s *State) checkDirectory() error {
	for id, d := range s.directory {
		if d.Id != id || id == "" {
			return fmt.Errorf("directory node %q is in the row of %q", d.Id, id)
		}
	}
	return nil
}

func (s *State) checkPG(pg *dirpb.PlacementGroup) error {
	h := s.heaps[pg.Id]
	switch {
	case s.namespaces[pg.NamespaceId] == nil:
		return fmt.Errorf("%d: its namespace %d is missing", pg.Id, pg.NamespaceId)
	case h == nil:
		return fmt.Errorf("%d: its heap is missing", pg.Id)
	case len(pg.Members) > MaxReplicas+1 || pg.Joining && len(pg.Members) == 0:
		return fmt.Errorf("%d has %d members, joining %v", pg.Id, len(pg.Members), pg.Joining)
	case pg.RegionBytes > maxRegionBytes || h.IndexNext < layout.RegionPageSize || h.IndexNext > pg.IndexBytes ||
		pg.IndexBytes > pg.RegionBytes || pg.AccessBytes > pg.RegionBytes-pg.IndexBytes ||
		h.Start < (pg.IndexBytes+pg.AccessBytes)/layout.UnitSize || h.End > pg.RegionBytes/layout.UnitSize ||
		h.Start > h.Watermark || h.Watermark > h.End:
		return fmt.Errorf("%d: index %d of %d bytes, access words %d, units %d to %d, granted below %d, "+
			"do not divide a region of %d bytes",
			pg.Id, h.IndexNext, pg.IndexBytes, pg.AccessBytes, h.Start, h.End, h.Watermark, pg.RegionBytes)
	}
	if len(h.Departed) > MaxReplicas {
		return fmt.Errorf("%d: %d members have departed, want at most %d", pg.Id, len(h.Departed), MaxReplicas)
	}
	for _, m := range regions(pg) {
		if s.nodes[m.NodeId] == nil {
			return fmt.Errorf("%d: its memory node %d is missing", pg.Id, m.NodeId)
		}
	}
	// Ascending, and each inside one extent of what was granted.
	at := uint64(0)
	for _, r := range h.Free {
		if uint64(r.Unit) < at || !granted(h, r.Unit, r.Units) {
			return fmt.Errorf("%d: free run %d+%d", pg.Id, r.Unit, r.Units)
		}
		at = runEnd(r)
	}
	at = 0
	for _, x := range h.Homes {
		if uint64(x.Unit) < at || !granted(h, x.Unit, x.Units) || s.sessions[x.SessionId] == nil {
			return fmt.Errorf("%d: run %d+%d of session %d", pg.Id, x.Unit, x.Units, x.SessionId)
		}
		at = uint64(x.Unit) + uint64(x.Units)
	}
	for _, a := range h.IndexFree {
		if a.Offset < layout.RegionPageSize || a.Offset > h.IndexNext || arrayBytes(a.Segments) > h.IndexNext-a.Offset {
			return fmt.Errorf("%d: free array of %d segments at %d", pg.Id, a.Segments, a.Offset)
		}
	}
	var recalled []uint32
	for i, r := range h.Recalls {
		if i > 0 && r.Extent <= h.Recalls[i-1].Extent || uint64(r.Extent)*extentUnits >= h.End {
			return fmt.Errorf("%d: recall of extent %d", pg.Id, r.Extent)
		}
		recalled = append(recalled, r.Extent)
	}
	if !slices.Equal(recalled, pg.Recalled) {
		return fmt.Errorf("%d: extents %d are recalled, the map says %d", pg.Id, recalled, pg.Recalled)
	}
	return s.checkStatus(pg, h)
}

func (s *State) checkShard(sh *dirpb.Shard) error {
	pg := s.pgs[sh.PgId]
	switch {
	case pg == nil || pg.NamespaceId != sh.NamespaceId:
		return fmt.Errorf("%d: its placement group %d is missing", sh.Id, sh.PgId)
	case sh.Depth > MaxShardDepth || sh.Prefix>>sh.Depth != 0:
		return fmt.Errorf("%d: prefix %#x of depth %d", sh.Id, sh.Prefix, sh.Depth)
	case sh.Segments == 0:
		return fmt.Errorf("%d: no segments", sh.Id)
	case sh.Move != nil && (sh.ChildSegments()%sh.Segments != 0 || sh.ChildSegments()/sh.Segments > layout.MaxGrowth):
		return fmt.Errorf("%d: %d segments move to %d", sh.Id, sh.Segments, sh.ChildSegments())
	case sh.Move != nil && !sh.Move.Abandoned && s.pgs[sh.Move.PgId] == nil:
		return fmt.Errorf("%d: placement group %d, where it moves, is missing", sh.Id, sh.Move.PgId)
	}
	return nil
}

func (s *State) checkDiscriminators() error {
	writers := 0
	for _, x := range s.sessions {
		if s.roster.hasDiscriminator(x) {
			writers++
		}
	}
	if n := len(s.roster.discriminators); n != writers {
		return fmt.Errorf("%d sessions that are to have a discriminator of their own have %d", writers, n)
	}
	return nil
}

func (s *State) checkSession(x *fsmpb.Session) error {
	switch {
	case s.namespaces[x.NamespaceId] == nil:
		return fmt.Errorf("%d: its namespace %d is missing", x.Id, x.NamespaceId)
	case x.Discriminator >= MaxWriters:
		return fmt.Errorf("%d: discriminator %d", x.Id, x.Discriminator)
	case x.Life != dirpb.SessionLife_SESSION_LIVE && (x.Life != dirpb.SessionLife_SESSION_FENCING ||
		len(x.Pending) == 0):
		return fmt.Errorf("%d is %s, and %d memory nodes have not confirmed", x.Id, x.Life, len(x.Pending))
	}
	return nil
}

func (s *State) checkJob(row *fsmpb.Job) error {
	j := row.GetJob()
	sh := s.shards[j.GetShardId()]
	move := j.GetKind() == dirpb.JobKind_JOB_MOVE
	switch {
	case j == nil:
		return errors.New("a row without a job")
	case s.pgs[j.PgId] == nil || s.pgs[j.PgId].NamespaceId != j.NamespaceId:
		return fmt.Errorf("%d: its placement group %d is missing", j.GetId(), j.GetPgId())
	case j.Owner != 0 && s.sessions[j.Owner] == nil:
		return fmt.Errorf("%d: its owner, session %d, is missing", j.Id, j.Owner)
	case move != (j.TargetPgId != 0) || move && s.pgs[j.TargetPgId] == nil:
		return fmt.Errorf("%d: its target, placement group %d, is missing", j.Id, j.TargetPgId)
	case (move || j.Kind == dirpb.JobKind_JOB_ABANDON) &&
		(sh.GetMove() == nil || sh.PgId != j.PgId || sh.Move.Abandoned == move || move && sh.Move.PgId != j.TargetPgId):
		return fmt.Errorf("%d: its shard %d does not move", j.Id, j.ShardId)
	case j.Kind == dirpb.JobKind_JOB_JOIN && !s.pgs[j.PgId].Joining:
		return fmt.Errorf("%d: nobody joins placement group %d", j.Id, j.PgId)
	}
	return s.checkSettle(row)
}

func (s *State) checkNamespace(w *dirpb.Namespace) error {
	if w.Replicas == 0 || w.Replicas > MaxReplicas {
		return fmt.Errorf("%d: %d replicas", w.Id, w.Replicas)
	}
	if err := checkAccessList(w); err != nil {
		return err
	}
	covered := uint64(0) // of the hashes, in 2^-MaxShardDepth
	for _, sh := range s.shards {
		if sh.NamespaceId == w.Id {
			covered += 1 << (MaxShardDepth - min(sh.Depth, MaxShardDepth))
		}
	}
	if covered != MaxShards {
		return fmt.Errorf("%d: its shards cover %d parts in %d of the hashes", w.Id, covered, MaxShards)
	}
	return nil
}
