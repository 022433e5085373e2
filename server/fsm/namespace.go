package fsm

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	defaultIndexPercent = 10
	maxIndexPercent     = 90
	shardsPerPG         = 4
)

// checkName accepts 1 to 64 characters of [a-z0-9._-].
func checkName(what, name string) error {
	if len(name) == 0 || len(name) > MaxNameLen {
		return fmt.Errorf("%w: %s name %.64q has %d characters, want 1..%d", ErrInvalid, what, name, len(name), MaxNameLen)
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return fmt.Errorf("%w: %s name %q holds %q, want only a-z 0-9 . _ -", ErrInvalid, what, name, c)
		}
	}
	return nil
}

// createNamespace lays a namespace out over the memory nodes that are up: one
// placement group per memory node, whose chain starts at that node and goes on around the
// ring, so that every node is arbiter of one and publisher of another.
func (s *State) createNamespace(c *fsmpb.CreateNamespace) (*dirpb.Namespace, error) {
	q := c.GetNamespace()
	if err := checkName("namespace", q.GetName()); err != nil {
		return nil, err
	}
	if s.NamespaceNamed(q.Name) != nil {
		return nil, fmt.Errorf("namespace %q: %w", q.Name, ErrExists)
	}
	mode := q.Mode
	switch mode {
	case dirpb.NamespaceMode_NAMESPACE_MODE_UNSPECIFIED:
		mode = dirpb.NamespaceMode_NAMESPACE_STORE
	case dirpb.NamespaceMode_NAMESPACE_STORE, dirpb.NamespaceMode_NAMESPACE_CACHE:
	default:
		return nil, fmt.Errorf("%w: namespace mode %d", ErrInvalid, mode)
	}
	replicas := max(int(q.Replicas), 1)
	if q.Replicas > MaxReplicas {
		return nil, fmt.Errorf("%w: %d replicas, want 1..%d", ErrInvalid, q.Replicas, MaxReplicas)
	}
	percent := uint64(q.IndexPercent)
	if percent == 0 {
		percent = defaultIndexPercent
	}
	if percent > maxIndexPercent {
		return nil, fmt.Errorf("%w: index of %d percent, want 1..%d", ErrInvalid, percent, maxIndexPercent)
	}
	ring := s.ring()
	switch {
	case len(ring) == 0:
		return nil, fmt.Errorf("%w: no memory node is up", ErrUnavailable)
	case len(ring) < replicas:
		return nil, fmt.Errorf("%w: %d replicas need as many memory nodes; %d up", ErrUnavailable, replicas, len(ring))
	}
	shards, err := shardCount(int64(q.Shards), len(ring))
	if err != nil {
		return nil, err
	}
	lent := make([]uint64, len(ring)) // to this namespace, by ring position
	least := uint64(maxRegionBytes) * MaxReplicas
	for i, n := range ring {
		free := n.CapacityBytes - min(n.UsedBytes, n.CapacityBytes)
		lent[i] = q.BytesPerNode
		if lent[i] == 0 {
			lent[i] = free / 2
		}
		if lent[i] > free {
			return nil, fmt.Errorf("%w: memory node %q has %d bytes free of the %d wanted", ErrFull, n.Name, free, lent[i])
		}
		least = min(least, lent[i])
	}

	// Everything is worked out before the first change.
	pgs := make([]*dirpb.PlacementGroup, len(ring))
	clusters := make([]uint32, len(ring))
	for i := range ring {
		pg := &dirpb.PlacementGroup{Epoch: 1, State: dirpb.PGState_PG_CREATING}
		region := uint64(maxRegionBytes)
		for k := range replicas {
			j := (i + k) % len(ring)
			region = min(region, lent[j]/uint64(replicas))
			pg.Members = append(pg.Members, &dirpb.Member{NodeId: ring[j].Id, Incarnation: ring[j].Incarnation})
		}
		pg.RegionBytes = region &^ (layout.RegionPageSize - 1)
		own := uint64((shards - i + len(ring) - 1) / len(ring)) // prefixes p < shards with p mod len(ring) = i
		if pg.IndexBytes, clusters[i], err = regionLayout(pg.RegionBytes, percent, own); err != nil {
			return nil, err
		}
		pgs[i] = pg
	}

	m := s.editMeta()
	m.NamespaceId++
	w := &dirpb.Namespace{
		Id: m.NamespaceId, Name: q.Name, Mode: mode, Replicas: uint32(replicas),
		HashSeed: c.HashSeed, Format: layout.FormatVersion, BytesPerNode: least,
	}
	s.namespaces[w.Id] = w
	s.mark(idKey(rowNamespace, w.Id), w)
	for _, pg := range pgs {
		m.PgId++
		pg.Id, pg.NamespaceId = m.PgId, w.Id
		s.putPG(pg)
		start := pg.IndexBytes / layout.UnitSize
		s.putHeap(&fsmpb.Heap{PgId: pg.Id, Start: start, Watermark: start, End: pg.RegionBytes / layout.UnitSize})
	}
	for prefix := range shards {
		i := prefix % len(ring)
		m.ShardId++
		sh := &dirpb.Shard{
			Id: m.ShardId, NamespaceId: w.Id, Prefix: uint32(prefix), Depth: uint32(bits.TrailingZeros(uint(shards))),
			PgId:     pgs[i].Id,
			Offset:   layout.RegionPageSize + uint64(prefix/len(ring))*uint64(clusters[i])*layout.ClusterSize,
			Clusters: clusters[i],
		}
		s.shards[sh.Id] = sh
		s.mark(idKey(rowShard, sh.Id), sh)
	}
	s.refreshUsed()
	return w, nil
}

// ring orders the memory nodes that are up so that neighbours, which share a chain, are
// in different failure domains where possible: one of each domain in turn.
func (s *State) ring() []*dirpb.Node {
	var domains [][]*dirpb.Node
	at := make(map[string]int)
	for _, n := range byID(s.nodes) {
		if n.State != dirpb.NodeState_NODE_UP {
			continue
		}
		i, ok := at[n.Domain]
		if !ok {
			i = len(domains)
			at[n.Domain] = i
			domains = append(domains, nil)
		}
		domains[i] = append(domains[i], n)
	}
	slices.SortStableFunc(domains, func(a, b []*dirpb.Node) int { return len(b) - len(a) })
	var ring []*dirpb.Node
	for round := 0; ; round++ {
		before := len(ring)
		for _, d := range domains {
			if round < len(d) {
				ring = append(ring, d[round])
			}
		}
		if len(ring) == before {
			return ring
		}
	}
}

func shardCount(asked int64, pgs int) (int, error) {
	if asked == 0 {
		return 1 << bits.Len(uint(pgs*shardsPerPG-1)), nil
	}
	if asked > MaxShards || asked < int64(pgs) || asked&(asked-1) != 0 {
		return 0, fmt.Errorf("%w: %d shards over %d placement groups, want a power of two in %d..%d",
			ErrInvalid, asked, pgs, 1<<bits.Len(uint(pgs-1)), MaxShards)
	}
	return int(asked), nil
}

// regionLayout divides a region: a header page, then as many clusters for each of
// its shards as percent of the region hold, then whole pages of heap.
//
//	0      4096                                index            region
//	+--------+---------+---------+-----+-------+----------------+
//	| header | shard 0 | shard 1 |  …  | slack | heap           |
//	+--------+---------+---------+-----+-------+----------------+
//
// A shard is clusters × layout.ClusterSize bytes; slack is less than a page.
func regionLayout(region, percent, shards uint64) (index uint64, clusters uint32, err error) {
	const page = layout.RegionPageSize
	per := uint64(1)
	if area := region / 100 * percent; area > page {
		per = max(per, (area-page)/(shards*layout.ClusterSize))
	}
	index = (page + shards*per*layout.ClusterSize + page - 1) / page * page
	if least := index + minHeapUnits*layout.UnitSize; region < least {
		return 0, 0, fmt.Errorf("%w: a region of %d bytes is too small for %d shards, want at least %d", ErrInvalid, region, shards, least)
	}
	return index, uint32(per), nil
}
