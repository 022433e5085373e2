package fsm

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
)

// FirstNodes is how many memory nodes a namespace without a limit begins on. In a store with no more it has all.
const FirstNodes = 8

// Roomy is how much heap a namespace with that limit (bytes) has: hashes do not fill placement groups evenly.
func Roomy(limit uint64) uint64 { return limit + limit/4 }

// placeable are the memory nodes that take new regions, by id.
func (s *State) placeable() (all []*dirpb.Node) {
	for _, n := range ordered.Values(s.nodes) {
		if placeable(n) {
			all = append(all, n)
		}
	}
	return all
}

// footprint chooses the memory nodes of a namespace to be created, of all that take regions, which are no fewer than
// its copies: as many as are asked for, or as its size needs. bound is their number, 0 if the namespace is to have
// whatever nodes there are; grows, whether it takes further ones as it fills. Of a region, so many percent are no heap.
func (s *State) footprint(q *dirpb.CreateNamespaceRequest, all []*dirpb.Node, replicas int, percent uint64) (
	homes []*dirpb.Node, bound uint32, grows bool, err error) {
	switch {
	case !s.KnowsBoots() || q.Nodes == 0 && len(all) <= FirstNodes:
		return all, 0, false, nil
	case q.Nodes != 0 && int(q.Nodes) < replicas:
		return nil, 0, false, fmt.Errorf("%w: namespace %q on %d memory nodes, want at least one for each of %d copies",
			ErrInvalid, q.Name, q.Nodes, replicas)
	case int(q.Nodes) > len(all):
		return nil, 0, false, fmt.Errorf("%w: namespace %q on %d memory nodes; %d are up and not draining",
			ErrUnavailable, q.Name, q.Nodes, len(all))
	}
	order := emptiest(all)
	if q.Nodes != 0 {
		return order[:q.Nodes], q.Nodes, false, nil
	}
	n := max(replicas, FirstNodes)
	if q.LimitBytes != 0 {
		heap := uint64(0)
		for n = 0; n < len(order) && (n < replicas || heap < Roomy(q.LimitBytes)); n++ {
			lent := cmp.Or(q.BytesPerNode, freeOf(order[n])/2)
			heap += min(lent, maxRegionBytes*MaxReplicas) / uint64(replicas) / 100 * (100 - percent)
		}
	}
	if n >= len(all) {
		return all, 0, false, nil
	}
	return order[:n], uint32(n), true, nil
}

func freeOf(n *dirpb.Node) uint64 { return n.CapacityBytes - min(n.UsedBytes, n.CapacityBytes) }

// emptiest orders memory nodes, which come by id, so that each first part of them is spread over as many failure
// domains as there are, and has those with most bytes free.
func emptiest(all []*dirpb.Node) []*dirpb.Node {
	left := slices.Clone(all)
	slices.SortStableFunc(left, func(a, b *dirpb.Node) int { return cmp.Compare(freeOf(b), freeOf(a)) })
	turn := make(map[string]int) // of a domain's next node
	turns := make(map[uint32]int)
	for _, n := range left {
		turns[n.Id] = turn[n.Domain]
		turn[n.Domain]++
	}
	slices.SortStableFunc(left, func(a, b *dirpb.Node) int { return cmp.Compare(turns[a.Id], turns[b.Id]) })
	return left
}

// ringOf orders memory nodes so that neighbours, which
// share a chain, are in different failure domains if possible: one of each domain
// in turn.
func ringOf(nodes []*dirpb.Node) []*dirpb.Node {
	nodes = slices.SortedFunc(slices.Values(nodes), func(a, b *dirpb.Node) int { return cmp.Compare(a.Id, b.Id) })
	var domains [][]*dirpb.Node
	at := make(map[string]int)
	for _, n := range nodes {
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

// checkNodes returns why w cannot be on as many memory nodes as q says.
func (s *State) checkNodes(w *dirpb.Namespace, q *dirpb.SetNamespaceRequest) error {
	if q.Nodes == 0 {
		return nil
	}
	replicas := cmp.Or(q.Replicas, w.Replicas)
	switch pgs := len(s.PGs(w.Id)); {
	case !s.KnowsBoots():
		return fmt.Errorf("%w: namespaces of some memory nodes begin with level %d, and the directory is at level "+
			"%d. Start this version of kvd on every directory node first",
			ErrRefused, levelBoots, s.Level())
	case q.Nodes < replicas:
		return fmt.Errorf("%w: namespace %q on %d memory nodes, want at least one for each of %d copies", ErrInvalid,
			w.Name, q.Nodes, replicas)
	case int(q.Nodes) < pgs:
		return fmt.Errorf("%w: namespace %q has %d placement groups, and another memory node arbitrates each; it "+
			"cannot be on %d", ErrRefused, w.Name, pgs, q.Nodes)
	}
	return nil
}
