package engine

import (
	"fmt"
	"sort"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// Keys are one region's keys at one endpoint of its memory node.
type Keys struct {
	IndexRKey, IndexBase uint64
	HeapRKey, HeapBase   uint64
}

// Member is one replica of a placement group.
type Member struct {
	Node        uint32
	Incarnation uint64
	Since       uint64          // tells two regions of one incarnation apart
	Keys        map[string]Keys // by the endpoint's name
}

// PG is a placement group as a session sees it.
type PG struct {
	index.PG
	Active                  bool // verbs may be posted
	Frozen                  bool // active again soon
	Leaving                 bool // new operations wait: its head is about to stop
	Members                 []Member
	RegionBytes, IndexBytes uint64
	AccessBytes             uint64 // IndexBytes, or 0: no access words
	StatusArrays            []StatusArray
}

// StatusArray is a part of a placement group's index that has status words of transactions. No hash leads there.
type StatusArray struct {
	Off      uint64 // bytes from the start of the region
	Segments uint32
}

// Shard is a range of the hash space.
type Shard struct {
	ID       uint32
	Prefix   uint32
	Depth    uint8
	PG       *PG
	Off      uint64
	Segments uint32
	// These fields are set while the shard splits, migrates or grows. They are the child's id, placement group and
	// place, and its segments, which are a multiple of Segments. Split says whether half of the hashes go there or
	// all.
	Child         uint32 // 0: it does none of these
	ChildPG       *PG
	ChildOff      uint64
	ChildSegments uint32
	Split         bool

	route, child index.Route
}

// Node is a memory node as a session sees it.
type Node struct {
	Incarnation uint64
	Up          bool
	Leaving     bool
	// Lost is the map version in which placement groups went on without it though it stays up, 0 for none. Verbs
	// that are under way on a connection of an earlier map may never end.
	Lost uint64
	Used bool // some placement group has a member there
}

// Has reports whether a connection to the memory of an incarnation, made under a version of the map, is good for it
// still.
func (n Node) Has(incarnation, version uint64) bool {
	return n.Up && n.Incarnation == incarnation && n.Lost <= version
}

// View is one version of the map, immutable once installed.
type View struct {
	Version uint64
	PGs     map[uint32]*PG
	Nodes   map[uint32]Node
	Shards  []Shard // sorted by prefix, covering the hash space
	// table finds a shard by the top tableBits bits of a hash.
	table     []uint16
	tableBits uint8
	byID      []*PG // PGs again
}

// MaxID bounds the ids of memory nodes and placement groups, which index arrays.
const MaxID = 1 << 16

// ViewOf checks what the directory says of one namespace, which is hostile until
// then, and makes it a View.
func ViewOf(m *dirpb.Map, namespace uint32) (*View, error) {
	nodes := make(map[uint32]Node, len(m.GetNodes()))
	for _, n := range m.GetNodes() {
		if n.GetId() > MaxID {
			return nil, fmt.Errorf("map %d: node id %d, at most %d", m.GetVersion(), n.GetId(), MaxID)
		}
		nodes[n.GetId()] = Node{n.GetIncarnation(), n.GetState() == dirpb.NodeState_NODE_UP, n.GetLeaving(),
			n.GetLostVersion(), false}
	}
	var payload uint32
	cache := false
	for _, n := range m.GetNamespaces() {
		if n.GetId() != namespace {
			continue
		}
		if payload = n.GetChunkPayload(); payload != 0 && !layout.IsPayload(payload) {
			return nil, fmt.Errorf("map %d: chunks of %d bytes, want at most %d", m.GetVersion(), payload,
				layout.ChunkPayload)
		}
		cache = n.GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE
	}
	pgs := make(map[uint32]*PG)
	var list []*PG
	for _, p := range m.GetPgs() {
		if p.GetNamespaceId() != namespace {
			continue
		}
		n := len(p.GetMembers())
		if p.GetId() > MaxID || n > maxReplicas || p.GetJoining() && n < 2 {
			return nil, fmt.Errorf("map %d: placement group %d with %d members", m.GetVersion(), p.GetId(), n)
		}
		pg := &PG{PG: index.PG{ID: p.GetId(), Epoch: p.GetEpoch(), Replicas: uint8(n), Joining: p.GetJoining(),
			Generation: p.GetGeneration(), ChunkPayload: payload, Recalled: p.GetRecalled(),
			Cache: cache && p.GetAccessBytes() != 0},
			Active: p.GetState() == dirpb.PGState_PG_ACTIVE, Frozen: p.GetState() == dirpb.PGState_PG_FROZEN,
			RegionBytes: p.GetRegionBytes(), IndexBytes: p.GetIndexBytes(), AccessBytes: p.GetAccessBytes()}
		for _, mb := range p.GetMembers() {
			mem := Member{Node: mb.GetNodeId(), Incarnation: mb.GetIncarnation(), Since: mb.GetSince(),
				Keys: map[string]Keys{}}
			if mb.GetNodeId() > MaxID {
				return nil, fmt.Errorf("map %d: placement group %d: node id %d, at most %d", m.GetVersion(), p.GetId(),
					mb.GetNodeId(), MaxID)
			}
			if n, ok := nodes[mem.Node]; ok {
				n.Used = true
				nodes[mem.Node] = n
			}
			for _, k := range mb.GetKeys() {
				mem.Keys[k.GetProvider()] = Keys{IndexRKey: k.GetIndexRkey(), IndexBase: k.GetIndexBase(),
					HeapRKey: k.GetHeapRkey(), HeapBase: k.GetHeapBase()}
			}
			pg.Members = append(pg.Members, mem)
		}
		for _, a := range p.GetStatusArrays() {
			pg.StatusArrays = append(pg.StatusArrays, StatusArray{a.GetOffset(), a.GetSegments()})
		}
		pg.Leaving = pg.Active && n > 1 && !p.GetJoining() && nodes[pg.Members[0].Node].Leaving
		pgs[pg.ID] = pg
		list = append(list, pg)
	}
	var shards []Shard
	for _, sh := range m.GetShards() {
		if sh.GetNamespaceId() != namespace {
			continue
		}
		x := Shard{ID: sh.GetId(), Prefix: sh.GetPrefix(), Depth: uint8(min(sh.GetDepth(), 255)),
			PG: pgs[sh.GetPgId()], Off: sh.GetOffset(), Segments: sh.GetSegments()}
		if mv := sh.GetMove(); mv != nil && !mv.GetAbandoned() {
			x.Child, x.ChildPG, x.ChildOff, x.Split = mv.GetChildId(), pgs[mv.GetPgId()], mv.GetOffset(), mv.GetSplit()
			x.ChildSegments = sh.ChildSegments()
			if x.Child == 0 || x.ChildPG == nil {
				return nil, fmt.Errorf("map %d: shard %d moves to shard %d of placement group %d, which is not there",
					m.GetVersion(), x.ID, x.Child, mv.GetPgId())
			}
		} else if mv != nil {
			x.Split = mv.GetSplit()
		}
		shards = append(shards, x)
	}
	v, err := NewView(m.GetVersion(), list, shards)
	if err != nil {
		return nil, err
	}
	v.Nodes = nodes
	return v, nil
}

// NewView checks and indexes a map. Shards must cover the hash space without
// overlap.
func NewView(version uint64, pgs []*PG, shards []Shard) (*View, error) {
	v := &View{Version: version, PGs: make(map[uint32]*PG, len(pgs)), Shards: shards}
	for _, p := range pgs {
		if p.Replicas == 0 && !p.Active && !p.Frozen {
			v.add(p) // nothing is left of it
			continue
		}
		if p.Replicas == 0 || int(p.Replicas) != len(p.Members) {
			return nil, fmt.Errorf("map %d: pg %d has %d members, want %d", version, p.ID, len(p.Members), p.Replicas)
		}
		if p.IndexBytes < layout.RegionPageSize || p.IndexBytes > p.RegionBytes || p.RegionBytes > 1<<38 {
			return nil, fmt.Errorf("map %d: pg %d: index of %d bytes in a region of %d", version, p.ID, p.IndexBytes,
				p.RegionBytes)
		}
		if p.AccessBytes != 0 && (p.AccessBytes != p.IndexBytes || p.AccessBytes > p.RegionBytes-p.IndexBytes) {
			return nil, fmt.Errorf("map %d: pg %d: access words of %d bytes for an index of %d in a region of %d",
				version, p.ID, p.AccessBytes, p.IndexBytes, p.RegionBytes)
		}
		if p.AccessBytes != 0 {
			p.AccessOff = p.IndexBytes
		}
		p.HeapLo = uint32((p.IndexBytes + p.AccessBytes + layout.UnitSize - 1) / layout.UnitSize)
		p.HeapHi = uint32(min(p.RegionBytes/layout.UnitSize, 1<<32-1))
		p.Head = p.Members[0].Incarnation ^ p.Members[0].Since<<32 // incarnations are random
		v.add(p)
		for _, a := range p.StatusArrays {
			if !v.fits(p, a.Off, a.Segments) {
				return nil, fmt.Errorf("map %d: pg %d: %d segments of status words at %#x do not lie in its index",
					version, p.ID, a.Segments, a.Off)
			}
		}
	}
	if len(shards) == 0 {
		return v, nil
	}
	sort.Slice(shards, func(i, j int) bool {
		return left(shards[i]) < left(shards[j])
	})
	next := uint64(0)
	for i := range shards {
		s := &shards[i]
		switch {
		case s.Depth > 12:
			return nil, fmt.Errorf("map %d: shard %d: depth %d, at most 12", version, s.ID, s.Depth)
		case s.Prefix>>s.Depth != 0 || left(*s) != next:
			return nil, fmt.Errorf("map %d: shard %d: prefix %#x/%d leaves a gap or overlaps", version, s.ID, s.Prefix,
				s.Depth)
		case !v.fits(s.PG, s.Off, s.Segments):
			return nil, fmt.Errorf("map %d: shard %d: %d segments at %#x do not lie in the index of its pg", version,
				s.ID, s.Segments, s.Off)
		case s.Child != 0 && !v.fits(s.ChildPG, s.ChildOff, s.ChildSegments):
			return nil, fmt.Errorf("map %d: shard %d: its child's %d segments at %#x do not lie in the index of its pg",
				version, s.ID, s.ChildSegments, s.ChildOff)
		case s.Child != 0 && (s.ChildSegments%s.Segments != 0 || s.ChildSegments/s.Segments > layout.MaxGrowth):
			return nil, fmt.Errorf("map %d: shard %d of %d segments moves to %d, want up to %d times as many", version,
				s.ID, s.Segments, s.ChildSegments, layout.MaxGrowth)
		}
		s.route = index.Route{PG: &s.PG.PG, Shard: s.ID, Depth: s.Depth, ShardOff: s.Off, Segments: s.Segments,
			MapVersion: version, Split: s.Split}
		if s.Child != 0 {
			s.child = index.Route{PG: &s.ChildPG.PG, Shard: s.Child, Depth: s.Depth, ShardOff: s.ChildOff,
				Segments: s.ChildSegments, MapVersion: version}
			if s.Split {
				s.child.Depth++
			}
			if !s.ChildPG.Active {
				s.child.PG = nil
			}
			s.route.Child = &s.child
		}
		next += span(s.Depth)
		v.tableBits = max(v.tableBits, s.Depth)
	}
	if next != 0 {
		return nil, fmt.Errorf("map %d: shards end at hash %#x", version, next)
	}
	v.table = make([]uint16, 1<<v.tableBits)
	for i, s := range shards {
		lo := int(s.Prefix) << (v.tableBits - s.Depth)
		for j := range 1 << (v.tableBits - s.Depth) {
			v.table[lo+j] = uint16(i)
		}
	}
	return v, nil
}

// add indexes a placement group by its id, by which slots of arrays are found faster than in a map.
func (v *View) add(p *PG) {
	v.PGs[p.ID] = p
	for int(p.ID) >= len(v.byID) {
		v.byID = append(v.byID, nil)
	}
	v.byID[p.ID] = p
}

// fits reports whether an array of segments lies in the index of p. The remains of a lost placement group
// have none, and are never routed to.
func (v *View) fits(p *PG, off uint64, segments uint32) bool {
	return p != nil && v.PGs[p.ID] == p && segments != 0 && off%layout.GroupSize == 0 && off >= layout.RegionPageSize &&
		off <= p.IndexBytes && uint64(segments)*layout.SegmentSize <= p.IndexBytes-off
}

// left is the least hash that a shard covers: its prefix, aligned with the top of the hash.
func left(s Shard) uint64 {
	if s.Depth == 0 {
		return 0
	}
	return uint64(s.Prefix) << (64 - s.Depth)
}

// span is the number of hashes a shard covers; 0 stands for all of them.
func span(depth uint8) uint64 {
	if depth == 0 {
		return 0
	}
	return 1 << (64 - depth)
}

// PG finds a placement group; nil if the view has none of that id.
func (v *View) PG(id uint32) *PG {
	if int(id) >= len(v.byID) {
		return nil
	}
	return v.byID[id]
}

// ShardOf finds the shard of a hash; nil if the view has none.
func (v *View) ShardOf(hash uint64) *Shard {
	if len(v.table) == 0 {
		return nil
	}
	return &v.Shards[v.table[layout.ShardPrefix(hash, v.tableBits)]]
}
