package fsm

import (
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Meta is the cluster's identity and counters.
func (s *State) Meta() *fsmpb.Meta { return s.meta }

// MapVersion grows with every change of what Map returns.
func (s *State) MapVersion() uint64 { return s.meta.MapVersion }

// Node returns a memory node or nil.
func (s *State) Node(id uint32) *dirpb.Node { return s.nodes[id] }

// Nodes are the memory nodes by id.
func (s *State) Nodes() []*dirpb.Node { return ordered.Values(s.nodes) }

// Session returns a session that is live or being fenced, or nil.
func (s *State) Session(id uint32) *fsmpb.Session { return s.sessions[id] }

// Sessions are the live ones and those being fenced, by id.
func (s *State) Sessions() []*fsmpb.Session { return ordered.Values(s.sessions) }

// SessionCount is the number of sessions not yet fenced.
func (s *State) SessionCount() int { return len(s.sessions) }

// Life of a session id; ids never given out count as fenced.
func (s *State) Life(id uint32) dirpb.SessionLife {
	if x := s.sessions[id]; x != nil {
		return x.Life
	}
	return dirpb.SessionLife_SESSION_FENCED
}

// Directory are the known directory nodes by id.
func (s *State) Directory() []*fsmpb.Directory { return ordered.Values(s.directory) }

// DirectoryNode returns one directory node or nil.
func (s *State) DirectoryNode(id string) *fsmpb.Directory { return s.directory[id] }

// Namespace returns a namespace or nil.
func (s *State) Namespace(id uint32) *dirpb.Namespace { return s.namespaces[id] }

// NamespaceNamed returns a namespace or nil.
func (s *State) NamespaceNamed(name string) *dirpb.Namespace {
	for _, w := range s.namespaces {
		if w.Name == name {
			return w
		}
	}
	return nil
}

// Rebalancing are the namespaces that an operator has spread by whoever leads, by id.
func (s *State) Rebalancing() (ids []uint32) {
	for id, w := range s.namespaces {
		if w.Rebalancing == dirpb.Rebalancing_REBALANCING_ON && !w.Deleting {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// PGs are the placement groups of a namespace, or of all for 0, by id.
func (s *State) PGs(namespace uint32) []*dirpb.PlacementGroup {
	all := ordered.Values(s.pgs)
	if namespace == 0 {
		return all
	}
	return slices.DeleteFunc(all, func(pg *dirpb.PlacementGroup) bool { return pg.NamespaceId != namespace })
}

// PG returns a placement group or nil.
func (s *State) PG(id uint32) *dirpb.PlacementGroup { return s.pgs[id] }

// Heap returns a placement group's memory or nil.
func (s *State) Heap(pg uint32) *fsmpb.Heap { return s.heaps[pg] }

// Shard returns a shard or nil.
func (s *State) Shard(id uint32) *dirpb.Shard { return s.shards[id] }

// Shards are the shards of a namespace, or of all for 0, by id.
func (s *State) Shards(namespace uint32) []*dirpb.Shard {
	all := ordered.Values(s.shards)
	if namespace == 0 {
		return all
	}
	return slices.DeleteFunc(all, func(sh *dirpb.Shard) bool { return sh.NamespaceId != namespace })
}

// Job returns a background job or nil.
func (s *State) Job(id uint32) *dirpb.Job { return s.jobs[id].GetJob() }

// Jobs are the background jobs by id.
func (s *State) Jobs() []*dirpb.Job {
	jobs := make([]*dirpb.Job, 0, len(s.jobs))
	for _, j := range ordered.Values(s.jobs) {
		jobs = append(jobs, j.Job)
	}
	return jobs
}

// JobsOf are the jobs that occupy a placement group, also as a move's target, by id.
func (s *State) JobsOf(pg uint32) []*dirpb.Job {
	return slices.DeleteFunc(s.Jobs(), func(j *dirpb.Job) bool { return j.PgId != pg && j.TargetPgId != pg })
}

// FrozenVersion is the map version that froze a placement group, 0 when it is
// not frozen.
func (s *State) FrozenVersion(pg uint32) uint64 { return s.heaps[pg].GetFrozenVersion() }

// Usage accounts every placement group's memory.
func (s *State) Usage() []*dirpb.PGUsage {
	heaps := make([]*dirpb.PGUsage, 0, len(s.heaps))
	for _, id := range ordered.Keys(s.heaps) {
		h := s.heaps[id]
		var free, waiting, recalled uint64
		for _, r := range h.Free {
			free += uint64(r.Units)
			if r.Returned != 0 {
				waiting += uint64(r.Units)
			}
		}
		for _, r := range h.Recalls {
			from, to := extentBounds(h, r.Extent)
			recalled += to - from
		}
		index := h.IndexNext
		for _, a := range h.IndexFree {
			index -= arrayBytes(a.Segments)
		}
		leaked, extents := s.Leaks(id)
		heaps = append(heaps, &dirpb.PGUsage{
			PgId: id, HeapUnits: h.End - h.Start, GrantedUnits: h.Watermark - h.Start - free, ReturnedUnits: free,
			WaitingUnits: waiting, RecalledUnits: recalled,
			IndexBytesUsed: index, LeakedUnits: leaked, LeakedExtents: uint32(len(extents)),
			LastScrub: h.LastScrub, LastScrubUnixMillis: h.LastScrubUnixMillis,
			StatusHeld: uint32(len(h.StatusHeld)), StatusDead: uint32(len(h.StatusDead)),
		})
	}
	return heaps
}

// Map is the view of a session: all memory nodes, without what operators alone use of them, and its namespace with
// rkeys. A nil session is an operator: all namespaces, with their losses, planned and leaving members too, no rkeys.
func (s *State) Map(x *fsmpb.Session) *dirpb.Map {
	m := &dirpb.Map{Version: s.meta.MapVersion, ClusterId: s.meta.ClusterId, Nodes: ordered.Values(s.nodes)}
	var only uint32
	if x != nil {
		only = x.NamespaceId
		for i, n := range m.Nodes {
			if n.Control != "" || n.Identity != "" || n.Version != "" {
				n = proto.CloneOf(n)
				n.Control, n.Identity, n.Version = "", "", ""
				m.Nodes[i] = n
			}
		}
	}
	for _, w := range ordered.Values(s.namespaces) {
		if only == 0 || w.Id == only {
			if x != nil && (w.Lost > 0 || w.Owner != "" || w.Quota != nil || w.Rebalancing != 0 || w.Nodes != 0) {
				w = proto.CloneOf(w)
				w.Lost, w.Losses, w.Rebalancing, w.Nodes, w.Grows = 0, nil, dirpb.Rebalancing_REBALANCING_NONE, 0, false
				w.Owner, w.Access, w.Quota = "", nil, nil
			}
			m.Namespaces = append(m.Namespaces, w)
		}
	}
	for _, pg := range s.PGs(only) {
		switch {
		case x == nil:
			pg = proto.CloneOf(pg)
			for _, mem := range regions(pg) {
				mem.Keys = nil
			}
		case pg.Planned != nil || pg.Leaving != nil || pg.Joining:
			pg = proto.CloneOf(pg)
			pg.Planned, pg.Leaving = nil, nil
			for _, mem := range pg.Members {
				mem.Retained, mem.Rejoins = nil, false
			}
		}
		m.Pgs = append(m.Pgs, pg)
	}
	m.LastVolume, m.Volumes, m.UnknownVolumes = s.meta.VolumeId, s.volumesFor(only), s.meta.UnknownVolumes
	for _, sh := range ordered.Values(s.shards) {
		if only == 0 || sh.NamespaceId == only {
			m.Shards = append(m.Shards, sh)
		}
	}
	return m
}

// WantRegions are the regions that one process of a memory node must have.
func (s *State) WantRegions(node uint32, incarnation uint64) []*dirpb.WantRegion {
	var want []*dirpb.WantRegion
	for _, pg := range ordered.Values(s.pgs) {
		if pg.State == dirpb.PGState_PG_LOST {
			continue
		}
		for _, m := range regions(pg) {
			if m.NodeId == node && m.Incarnation == incarnation {
				want = append(want, &dirpb.WantRegion{
					PgId: pg.Id, NamespaceId: pg.NamespaceId, RegionBytes: pg.RegionBytes, IndexBytes: pg.IndexBytes,
					Epoch: pg.Epoch, Published: len(m.Keys) > 0, Since: m.Since, Retain: m.Retained,
				})
			}
		}
	}
	return want
}
