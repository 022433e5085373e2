package fsm

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// How far a recovery goes ahead of what the state has given out: beyond whatever was given out by entries that are
// missing.
const (
	recoverSessions   = 1 << 24
	recoverShards     = 1 << 16
	recoverJobs       = 1 << 16
	recoverNamespaces = 1 << 8
	recoverPGs        = 1 << 6 // there are few; a memory node tells by Member.since whose a region is
	recoverPGEpochs   = 1 << 16
	recoverKeys       = 1 << 10
	recoverVersions   = 1 << 32 // of the map
	recoverEpochs     = 1 << 32 // reclaim epochs
	recoverVolumes    = 1 << 16
)

// recover begins a cluster of one from the state of one folder, of which committed entries may be missing.
//
// Nobody of before goes on: sessions are fenced, and token keys replaced, so that sessions which the state does not
// know have none either. Memory nodes fence everybody who is connected, before they register with what they hold, and
// believe compares that with the state. All memory of a placement group counts as granted and as nobody's, so none of
// it is granted before somebody has counted what is linked; the same holds for the index. Every chain is frozen, since
// it may have lost its last member's word.
func (s *State) recover(c *fsmpb.Recover) error {
	m := s.meta
	switch {
	case m.ClusterId == "":
		return fmt.Errorf("%w: there is no cluster yet", ErrRefused)
	case !s.KnowsBoots():
		return fmt.Errorf("%w: recoveries begin with level %d, and the folder is at level %d", ErrRefused, levelBoots,
			s.Level())
	case s.directory[c.GetNode()] == nil:
		return fmt.Errorf("directory node %.64q: %w", c.GetNode(), ErrNotFound)
	case len(c.Key) != KeyBytes || len(c.PreviousKey) != KeyBytes:
		return fmt.Errorf("%w: keys of %d and %d bytes, want %d", ErrInvalid, len(c.Key), len(c.PreviousKey), KeyBytes)
	case m.SessionId > math.MaxUint32-recoverSessions || m.ShardId > math.MaxUint32-recoverShards ||
		m.KeyGeneration > math.MaxUint32-recoverKeys || m.VolumeId > math.MaxUint32-recoverVolumes ||
		m.JobId > math.MaxUint32-recoverJobs || m.NamespaceId > math.MaxUint32-recoverNamespaces:
		return fmt.Errorf("%w: ids are used up", ErrFull)
	}
	m = s.editMeta()
	m.Recoveries++
	m.SessionId += recoverSessions
	m.ShardId += recoverShards
	m.JobId += recoverJobs
	m.NamespaceId += recoverNamespaces
	m.PgId = min(m.PgId+recoverPGs, max(m.PgId, MaxPGID))
	m.MapVersion += recoverVersions
	m.EpochCeiling += recoverEpochs
	if s.KnowsTiers() {
		list := m.UnknownVolumes
		if n := len(list); n == 0 || list[n-1].Last != m.VolumeId {
			list = append(list, &dirpb.VolumeIds{First: m.VolumeId + 1})
		}
		m.VolumeId += recoverVolumes
		m.UnknownVolumes, list[len(list)-1].Last = list, m.VolumeId
	}
	m.ClusterKey, m.PreviousKey = c.Key, c.PreviousKey
	m.KeyGeneration, m.KeyUnixMillis = s.KeyGeneration()+recoverKeys, c.UnixMillis
	s.mapChanged = true
	for id := range s.directory {
		if id != c.Node {
			if err := s.dropDirectory(id); err != nil {
				return err
			}
		}
	}
	for _, pg := range ordered.Values(s.pgs) {
		s.recoverPG(pg.Id)
	}
	s.fence(ordered.Keys(s.sessions))
	s.settlePGs()
	return nil
}

// recoverPG forgets what the state believes of a placement group that missing entries may have changed.
func (s *State) recoverPG(id uint32) {
	pg, h := s.editPG(id), s.editHeap(id)
	if pg.State != dirpb.PGState_PG_LOST {
		was := h.Recovered
		h.Recovered = &fsmpb.Recovered{Epoch: pg.Epoch, IndexNext: h.IndexNext, HeldBytes: heldBytes(h)}
		if was != nil { // that of the recovery before has not ended
			h.Recovered.IndexNext, h.Recovered.IndexEnd, h.Recovered.HeldBytes = was.IndexNext, was.IndexEnd,
				was.HeldBytes
		}
		h.Watermark, h.Free, h.Homes, h.Dirty, h.LastScrub = h.End, nil, nil, true, nil
		h.IndexNext, h.IndexFree = pg.IndexBytes, nil
	}
	h.Recalls, h.Departed, pg.Recalled = nil, nil, nil
	s.endJobs(id, dirpb.JobKind_JOB_RECALL, dirpb.JobKind_JOB_SCRUB, dirpb.JobKind_JOB_JOIN)
	if pg.Joining {
		pg.Members, pg.Joining = pg.Members[:len(pg.Members)-1], false
	}
	pg.Planned, pg.Leaving = nil, nil
	pg.Epoch += recoverPGEpochs
	if pg.State == dirpb.PGState_PG_ACTIVE || pg.State == dirpb.PGState_PG_FROZEN {
		s.freeze(pg, len(pg.Members))
	}
}

// heldBytes is what has been granted of a heap and did not come back.
func heldBytes(h *fsmpb.Heap) uint64 {
	if h.Recovered != nil {
		return h.Recovered.HeldBytes
	}
	held := (h.Watermark - h.Start) * layout.UnitSize
	for _, r := range h.Free {
		held -= uint64(r.Units) * layout.UnitSize
	}
	return held
}

// checkHeld refuses a report of regions that no memory node makes.
func checkHeld(c *dirpb.RegisterNodeRequest) error {
	if len(c.Held) > MaxPGID {
		return fmt.Errorf("%w: memory node %q holds %d regions, want at most %d", ErrInvalid, c.Name, len(c.Held),
			MaxPGID)
	}
	for _, r := range c.Held {
		if r.IndexEnd > maxRegionBytes {
			return fmt.Errorf("%w: memory node %q: an index of %d bytes", ErrInvalid, c.Name, r.IndexEnd)
		}
	}
	return nil
}

// believe compares what a memory node holds, whose memory is that of the state's incarnation of it, with what the state
// says since the last recovery. A region that it does not have, or has of another time, is lost. If it knows of a later
// epoch of the placement group, some copies have missed what others have, and nobody knows which, so all of them are
// lost.
func (s *State) believe(n *dirpb.Node, c *dirpb.RegisterNodeRequest, unixMillis int64) {
	held := make(map[uint32]*dirpb.HeldRegion, len(c.Held))
	for _, r := range c.Held {
		held[r.PgId] = r
	}
	for _, pg := range ordered.Values(s.pgs) {
		rec, r := s.heaps[pg.Id].GetRecovered(), held[pg.Id]
		if rec == nil {
			continue
		}
		i := slices.IndexFunc(pg.Members, func(m *dirpb.Member) bool { return m.NodeId == n.Id })
		switch {
		case r.GetEpoch() > rec.Epoch && r.NamespaceId == pg.NamespaceId:
			p := s.editPG(pg.Id)
			had := p.State == dirpb.PGState_PG_ACTIVE || p.State == dirpb.PGState_PG_FROZEN
			if had {
				s.noteLoss(p, n, unixMillis)
			}
			s.startOver(p, p.Members, n.Id, n.Incarnation, had)
		case i < 0:
		case r == nil || r.Since != pg.Members[i].Since:
			s.loseMember(pg.Id, n, n.Incarnation, unixMillis, 0)
			s.settlePG(pg.Id)
		case r.IndexEnd > rec.IndexEnd:
			rec = &fsmpb.Recovered{Epoch: rec.Epoch, IndexNext: rec.IndexNext, IndexEnd: r.IndexEnd,
				HeldBytes: rec.HeldBytes}
			s.editHeap(pg.Id).Recovered = rec
		}
	}
	s.settlePGs()
}

// endRecovery gives the rest of the index free again of the placement groups all of whose members have registered since
// the recovery. If there is more in it than the state knows of, shards moved there, or status words were granted, by
// entries that are missing.
func (s *State) endRecovery(unixMillis int64) {
	if s.meta.Recoveries == 0 {
		return
	}
	for _, h := range ordered.Values(s.heaps) {
		rec, pg := h.Recovered, s.pgs[h.PgId]
		waits := func(m *dirpb.Member) bool { return s.nodes[m.NodeId].GetRecoveries() != s.meta.Recoveries }
		if rec == nil || pg == nil || slices.ContainsFunc(pg.Members, waits) {
			continue
		}
		h = s.editHeap(pg.Id)
		h.Recovered = nil
		h.IndexNext = rec.IndexNext
		if rec.IndexEnd > rec.IndexNext && len(pg.Members) > 0 {
			segments := (rec.IndexEnd - layout.RegionPageSize + layout.SegmentSize - 1) / layout.SegmentSize
			h.IndexNext = min(pg.IndexBytes, layout.RegionPageSize+segments*layout.SegmentSize)
			s.addLoss(pg.NamespaceId, &dirpb.Loss{PgId: pg.Id, UnixMillis: unixMillis,
				Node: s.nodes[pg.Members[0].NodeId].GetName(), Recovered: true})
		}
	}
}

// checkRecovered refuses rows of a recovery that cannot be.
func (s *State) checkRecovered() error {
	var errs []error
	for _, h := range ordered.Values(s.heaps) {
		if r := h.Recovered; r != nil && (r.IndexNext < layout.RegionPageSize || s.pgs[h.PgId] != nil &&
			r.IndexNext > s.pgs[h.PgId].IndexBytes) {
			errs = append(errs, fmt.Errorf("heap %d: recovered with an index of %d bytes", h.PgId, r.IndexNext))
		}
	}
	at := uint32(0)
	for _, r := range s.meta.UnknownVolumes {
		if r.First <= at || r.Last < r.First || r.Last > s.meta.VolumeId {
			errs = append(errs, fmt.Errorf("meta: volumes %d..%d, unknown after %d, of %d", r.First, r.Last, at,
				s.meta.VolumeId))
		}
		at = r.Last
	}
	return errors.Join(errs...)
}
