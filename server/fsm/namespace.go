package fsm

import (
	"errors"
	"fmt"
	"math/bits"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/units"
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
		return fmt.Errorf("%w: %s name %.64q has %d characters, want 1..%d", ErrInvalid, what, name, len(name),
			MaxNameLen)
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return fmt.Errorf("%w: %s name %q holds %q, want only a-z 0-9 . _ -", ErrInvalid, what, name, c)
		}
	}
	return nil
}

// CheckText accepts text that others choose and people read: at most MaxLabelLen bytes of
// printable characters, without line breaks and what terminals obey. It may be empty.
func CheckText(what, text string) error {
	if len(text) > MaxLabelLen {
		return fmt.Errorf("%w: %s is longer than %d bytes", ErrInvalid, what, MaxLabelLen)
	}
	for i, r := range text {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return fmt.Errorf("%w: %s %q holds %q at byte %d, want printable characters", ErrInvalid, what, text, r, i)
		}
	}
	return nil
}

// layoutOf is the mode of a namespace to be created, and how many percent of its memory are to be index.
func layoutOf(q *dirpb.CreateNamespaceRequest) (mode dirpb.NamespaceMode, percent uint64, err error) {
	switch mode = q.Mode; mode {
	case dirpb.NamespaceMode_NAMESPACE_MODE_UNSPECIFIED:
		mode = dirpb.NamespaceMode_NAMESPACE_STORE
	case dirpb.NamespaceMode_NAMESPACE_STORE, dirpb.NamespaceMode_NAMESPACE_CACHE:
	default:
		return 0, 0, fmt.Errorf("%w: namespace mode %d", ErrInvalid, mode)
	}
	if q.Replicas > MaxReplicas {
		return 0, 0, fmt.Errorf("%w: %d replicas, want 1..%d", ErrInvalid, q.Replicas, MaxReplicas)
	}
	if percent = uint64(q.IndexPercent); percent == 0 {
		percent = defaultIndexPercent
	}
	most := uint64(maxIndexPercent)
	if mode == dirpb.NamespaceMode_NAMESPACE_CACHE {
		most /= 2 // its access words are as large as the index
	}
	if percent > most {
		return 0, 0, fmt.Errorf("%w: index of %d percent, want 1..%d", ErrInvalid, percent, most)
	}
	return mode, percent, nil
}

// chunkPayload is what chunks of a namespace that is made now hold, bytes; 0: 2 MiB, as all versions read.
func (s *State) chunkPayload() uint32 {
	if !s.KnowsLong() {
		return 0
	}
	return layout.ChunkPayload
}

// checkBounds returns why no namespace of that mode can have the longest value and the pinned share that q asks for.
func (s *State) checkBounds(mode dirpb.NamespaceMode, q interface {
	GetMaxValueBytes() uint64
	GetMaxPinnedPercent() uint32
}) error {
	return errors.Join(s.checkMaxValue(q.GetMaxValueBytes()), s.checkMaxPinned(mode, q.GetMaxPinnedPercent()))
}

// CheckLevel refuses a request to make or to change a namespace if the state has not reached the level of what it asks
// for. A leader asks before it proposes: directory nodes of earlier versions do not know of it, and would
// carry out the rest.
func (s *State) CheckLevel(q interface {
	GetMaxValueBytes() uint64
	GetMaxPinnedPercent() uint32
	GetTier() *dirpb.Tier
}) error {
	refused := func(what string, level uint32) error {
		return fmt.Errorf("%w: %s begin with level %d, and the directory is at level %d. Start this version of kvd on "+
			"every directory node first", ErrRefused, what, level, s.Level())
	}
	switch level := s.Level(); {
	case q.GetMaxValueBytes() != 0 && level < levelLong:
		return refused("namespaces with a longest value of their own", levelLong)
	case q.GetMaxPinnedPercent() != 0 && level < levelPins:
		return refused("pins", levelPins)
	case q.GetTier() != nil && level < levelTiers:
		return refused("namespaces with a tier", levelTiers)
	}
	return nil
}

// checkMaxValue returns why no namespace can have a longest value of n bytes; 0 asks for none.
func (s *State) checkMaxValue(n uint64) error {
	switch {
	case n == 0:
		return nil
	case !s.KnowsLong():
		return fmt.Errorf("%w: namespaces with a longest value of their own begin with level %d, and the directory is "+
			"at level %d. Start this version of kvd on every directory node first",
			ErrRefused, levelLong, s.Level())
	case n > layout.MaxValueLen:
		return fmt.Errorf("%w: longest value of %s, want 1B..%s", ErrInvalid, units.Bytes(n),
			units.Bytes(uint64(layout.MaxValueLen)))
	}
	return nil
}

// maxPinned bounds the share of a cache that may be pinned, percent: the rest serves those who pin nothing.
const maxPinned = 90

// checkMaxPinned returns why a namespace of that mode cannot let so many percent of it be pinned; 0: none.
func (s *State) checkMaxPinned(mode dirpb.NamespaceMode, percent uint32) error {
	switch {
	case percent == 0:
		return nil
	case s.Level() < levelPins:
		return fmt.Errorf("%w: pins begin with level %d, and the directory is at level %d. Start this version of kvd "+
			"on every directory node first", ErrRefused, levelPins, s.Level())
	case mode != dirpb.NamespaceMode_NAMESPACE_CACHE:
		return fmt.Errorf("%w: only a cache has pins: elsewhere nothing is evicted", ErrInvalid)
	case percent > maxPinned:
		return fmt.Errorf("%w: %d %% of the namespace pinned, want 0..%d", ErrInvalid, percent, maxPinned)
	}
	return nil
}

// lentBy is how many bytes each memory node of the ring lends to a namespace, which wants so many of each, 0 for half
// of what is free; and the least of these.
func lentBy(ring []*dirpb.Node, bytesPerNode uint64) (lent []uint64, least uint64, err error) {
	lent = make([]uint64, len(ring))
	least = uint64(maxRegionBytes) * MaxReplicas
	for i, n := range ring {
		free := n.CapacityBytes - min(n.UsedBytes, n.CapacityBytes)
		lent[i] = bytesPerNode
		if lent[i] == 0 {
			lent[i] = free / 2
		}
		if lent[i] > free {
			return nil, 0, fmt.Errorf("%w: memory node %q has %s free of the %s wanted", ErrFull, n.Name,
				units.Bytes(free), units.Bytes(lent[i]))
		}
		least = min(least, lent[i])
	}
	return lent, least, nil
}

// createNamespace lays a namespace out over memory nodes that are up, all or some: one
// placement group per memory node, whose chain starts at that node and goes on around the
// ring, so that every node is head of one and tail of another.
func (s *State) createNamespace(c *fsmpb.CreateNamespace) (*dirpb.Namespace, error) {
	q := c.GetNamespace()
	if err := checkName("namespace", q.GetName()); err != nil {
		return nil, err
	}
	if w := s.NamespaceNamed(q.Name); w != nil {
		if err := s.checkStays(w.Id); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("namespace %q: %w", q.Name, ErrExists)
	}
	mode, percent, err := layoutOf(q)
	if err := errors.Join(err, checkTenancy(q.Owner), s.checkBounds(mode, q)); err != nil {
		return nil, err
	}
	all := s.placeable()
	replicas := int(q.Replicas)
	if replicas == 0 {
		replicas = min(2, len(all))
	}
	switch {
	case len(all) == 0:
		return nil, fmt.Errorf("%w: no memory node is up that is not draining", ErrUnavailable)
	case len(all) < replicas:
		return nil, fmt.Errorf("%w: %s", ErrUnavailable, fewNodes(q.Name, replicas, len(all)))
	}
	perIndex := uint64(1) // bytes of index and access words for each byte of index
	if mode == dirpb.NamespaceMode_NAMESPACE_CACHE {
		perIndex = 2
	}
	homes, bound, grows, err := s.footprint(q, all, replicas, perIndex*percent)
	if err != nil {
		return nil, err
	}
	ring := ringOf(homes)
	if err := s.checkPGs(len(ring)); err != nil {
		return nil, err
	}
	shards := int(q.Shards)
	if shards == 0 {
		shards = min(1<<bits.Len(uint(len(ring)*shardsPerPG-1)), MaxShards)
	}
	if shards > MaxShards || shards&(shards-1) != 0 {
		return nil, fmt.Errorf("%w: %d shards, want a power of two in 1..%d", ErrInvalid, shards, MaxShards)
	}
	lent, least, err := lentBy(ring, q.BytesPerNode)
	if err != nil {
		return nil, err
	}
	most, err := firstSegments(q, shards)
	if err != nil {
		return nil, err
	}

	// Everything is worked out before the first change.
	pgs := make([]*dirpb.PlacementGroup, len(ring))
	segments := make([]uint32, len(ring))
	for i := range ring {
		pg := &dirpb.PlacementGroup{}
		region := uint64(maxRegionBytes)
		for k := range replicas {
			j := (i + k) % len(ring)
			region = min(region, lent[j]/uint64(replicas))
			pg.Members = append(pg.Members, &dirpb.Member{NodeId: ring[j].Id, Incarnation: ring[j].Incarnation})
		}
		pg.RegionBytes = region &^ (layout.RegionPageSize - 1)
		own := uint64((shards - i + len(ring) - 1) / len(ring)) // prefixes p < shards with p mod len(ring) = i
		if pg.IndexBytes, segments[i], err = regionLayout(pg.RegionBytes, percent, perIndex, own, q.Segments); err !=
			nil {
			return nil, err
		}
		segments[i] = min(segments[i], most)
		pg.AccessBytes = (perIndex - 1) * pg.IndexBytes
		pgs[i] = pg
	}

	w := &dirpb.Namespace{
		Name: q.Name, Mode: mode, Replicas: uint32(replicas),
		HashSeed: c.HashSeed, Format: layout.FormatVersion, BytesPerNode: least, LimitBytes: q.LimitBytes,
		Owner: q.Owner, Quota: quotaOf(q.Quota), Nodes: bound, Grows: grows,
		MaxValueBytes: q.MaxValueBytes, ChunkPayload: s.chunkPayload(), MaxPinnedPercent: q.MaxPinnedPercent,
	}
	if err := s.checkTier(w, q.Tier); err != nil {
		return nil, err
	}
	w.Tier = s.tierOf(w, q.Tier)
	m := s.editMeta()
	m.NamespaceId++
	w.Id = m.NamespaceId
	s.putNamespace(w)
	for _, pg := range pgs {
		s.addPG(pg, w.Id)
	}
	s.addShards(w.Id, shards, pgs, segments)
	s.refreshUsed()
	return w, nil
}

// addShards gives a new namespace so many shards, each placement group in turn.
func (s *State) addShards(namespace uint32, shards int, pgs []*dirpb.PlacementGroup, segments []uint32) {
	m := s.editMeta()
	for prefix := range shards {
		i := prefix % len(pgs)
		m.ShardId++
		at, h := takeArray(pgs[i], s.heaps[pgs[i].Id], segments[i])
		s.putHeap(h)
		s.putShard(&dirpb.Shard{
			Id: m.ShardId, NamespaceId: namespace, Prefix: uint32(prefix),
			Depth: uint32(bits.TrailingZeros(uint(shards))),
			PgId:  pgs[i].Id, Offset: at, Segments: segments[i],
		})
	}
}

// rebalance notes that the leader is to spread a namespace, or that this ends, and how. It may be repeated; the first
// end counts.
func (s *State) rebalance(c *fsmpb.Rebalance) error {
	w := s.namespaces[c.GetNamespaceId()]
	switch {
	case w == nil:
		return fmt.Errorf("namespace %d: %w", c.GetNamespaceId(), ErrNotFound)
	case !s.KnowsBoots():
		return fmt.Errorf("%w: rebalances begin with level %d, and the directory is at level %d: start this version "+
			"of kvd on every directory node first",
			ErrRefused, levelBoots, s.Level())
	case dirpb.Rebalancing_name[int32(c.To)] == "":
		return fmt.Errorf("%w: a rebalance that is %d", ErrInvalid, c.To)
	case w.Rebalancing == c.To, w.Rebalancing != dirpb.Rebalancing_REBALANCING_ON &&
		c.To != dirpb.Rebalancing_REBALANCING_ON:
		return nil
	}
	if err := s.checkStays(w.Id); err != nil {
		return err
	}
	w = proto.CloneOf(w)
	if w.Rebalancing = c.To; c.Nodes != 0 && c.To == dirpb.Rebalancing_REBALANCING_ON {
		w.Nodes = c.Nodes
	}
	s.putNamespace(w)
	return nil
}

// acceptLoss forgets what a namespace lost, but not how often, if the operator knows all of
// it. It may be repeated.
func (s *State) acceptLoss(q *dirpb.AcceptLossRequest) (*dirpb.Namespace, error) {
	w := s.NamespaceNamed(q.GetName())
	switch {
	case w == nil:
		return nil, fmt.Errorf("namespace %q: %w", q.GetName(), ErrNotFound)
	case w.Lost != q.Lost:
		return nil, fmt.Errorf("%w: namespace %q has lost keys %d times, not %d; look again", ErrRefused,
			w.Name, w.Lost, q.Lost)
	case len(w.Losses) == 0:
		return w, nil
	}
	w = proto.CloneOf(w)
	w.Losses = nil
	s.putNamespace(w)
	return w, nil
}

// regionLayout divides a region: a header page, then segments, percent of it in
// all but at least one for each of its first shards, then whole pages of heap.
//
//	0      4096                                         index              region
//	+--------+---------+---------+-----+------------------+--------+---------+
//	| header | shard 0 | shard 1 |  …  | room for others  | access | heap    |
//	+--------+---------+---------+-----+------------------+--------+---------+
//
// Access words, which a namespace of mode cache has, are as many bytes as the index:
// perIndex is 2 then, else 1.
//
// A shard is segments × layout.SegmentSize bytes: as many as asked, or so many for
// 0 that the first shards fill an eighth of the index.
func regionLayout(region, percent, perIndex, shards uint64, asked uint32) (index uint64, segments uint32, err error) {
	const page = layout.RegionPageSize
	least := (page + shards*layout.SegmentSize + page - 1) / page * page
	index = max(least, region/100*percent/page*page)
	if need := perIndex*index + minHeapUnits*layout.UnitSize; region < need {
		return 0, 0, fmt.Errorf("%w: a region of %s is too small for %d shards, want at least %s", ErrInvalid,
			units.Bytes(region), shards, units.Bytes(need))
	}
	if shards == 0 {
		return index, 0, nil
	}
	room := (index - page) / layout.SegmentSize / shards // at most 2^38 / 4352, so it fits
	if uint64(asked) > room {
		return 0, 0, fmt.Errorf("%w: %d segments a shard, but an index of %s has room for %d in each of %d shards",
			ErrInvalid, asked, units.Bytes(index), room, shards)
	}
	if asked == 0 {
		asked = uint32(max(1, room/8))
	}
	return index, asked, nil
}
