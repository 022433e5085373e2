package overview

import (
	"cmp"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// NodeMemory is how the memory that a memory node lends is used: each copy counts where it lies.
type NodeMemory struct {
	Node *dirpb.Node
	// Memory is of all its placement groups; known, if all of them are.
	Memory
	// Index is memory of their regions outside of heaps. Other is of regions of no chain: those that are being made or
	// given up. Spare is given to no region.
	Index, Other, Spare uint64
}

// NodeMemories tells how each memory node's memory is used, in st's order.
func NodeMemories(st *dirpb.StatusReply) []*NodeMemory {
	of := make(map[uint32]*Memory)
	for _, m := range Memories(st) {
		of[m.PG] = m
	}
	var all []*NodeMemory
	byID := make(map[uint32]*NodeMemory)
	for _, n := range st.GetMap().GetNodes() {
		m := &NodeMemory{Node: n, Memory: Memory{Known: true}, Other: n.GetUsedBytes(),
			Spare: n.GetCapacityBytes() - min(n.GetUsedBytes(), n.GetCapacityBytes())}
		all = append(all, m)
		byID[n.GetId()] = m
	}
	for _, p := range st.GetMap().GetPgs() {
		m := of[p.GetId()]
		for _, x := range p.GetMembers() {
			n := byID[x.GetNodeId()]
			if m == nil || n == nil {
				continue
			}
			n.Known, n.Short = n.Known && m.Known, n.Short || m.Short
			add := m.numbers()
			for i, v := range n.numbers() {
				*v += *add[i]
			}
			n.Index += p.GetRegionBytes() - min(m.Heap, p.GetRegionBytes())
			n.Other -= min(p.GetRegionBytes(), n.Other)
		}
	}
	return all
}

// Span is a shard in the hash space of its namespace, which goes from 0 to 1.
type Span struct {
	Shard    *dirpb.Shard
	From, To float64
}

// Spans tells which hashes each shard of a namespace has, ascending. A shard of a depth that hashes do not have is left
// out.
func Spans(m *dirpb.Map, namespace uint32) []*Span {
	var all []*Span
	for _, s := range m.GetShards() {
		if s.GetNamespaceId() != namespace || s.GetDepth() > 32 || uint64(s.GetPrefix()) >= 1<<s.GetDepth() {
			continue
		}
		n := float64(uint64(1) << s.GetDepth())
		all = append(all, &Span{s, float64(s.GetPrefix()) / n, (float64(s.GetPrefix()) + 1) / n})
	}
	slices.SortFunc(all, func(a, b *Span) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.Shard.GetId(), b.Shard.GetId()))
	})
	return all
}

// Registered is how many bytes of the regions that a memory node is to have are registered there. The rest waits for
// pages, or for adapters to pin them. Members of a placement group in use have published their keys. Memory nodes of a
// version that tells no boots count as if they had.
func Registered(m *dirpb.Map, n *dirpb.Node) uint64 { return registered(m)(n) }

// registered is Registered of each memory node of m, whose placement groups it goes through once.
func registered(m *dirpb.Map) func(*dirpb.Node) uint64 {
	type life struct {
		node        uint32
		incarnation uint64
	}
	missing := make(map[life]uint64)
	wait := func(p *dirpb.PlacementGroup, mb *dirpb.Member) {
		if mb != nil && mb.GetBoot() == 0 {
			missing[life{mb.GetNodeId(), mb.GetIncarnation()}] += p.GetRegionBytes()
		}
	}
	for _, p := range m.GetPgs() {
		wait(p, p.GetPlanned())
		if p.GetState() == dirpb.PGState_PG_CREATING {
			for _, mb := range p.GetMembers() {
				wait(p, mb)
			}
		}
	}
	return func(n *dirpb.Node) uint64 {
		if n.GetBoot() == 0 {
			return n.GetUsedBytes()
		}
		return n.GetUsedBytes() - min(missing[life{n.GetId(), n.GetIncarnation()}], n.GetUsedBytes())
	}
}
