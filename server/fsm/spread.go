package fsm

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/internal/units"
)

// Spread is where the copies can go that the placement groups of a namespace lack.
type Spread struct {
	// Where has the memory nodes by placement group.
	Where map[uint32][]uint32
	// Short are the placement groups that lack more than there is a place for.
	Short []uint32
	// Shared are those that would have two copies in one failure domain.
	Shared []uint32
}

// Places counts the copies that have one.
func (x *Spread) Places() (n int) {
	for _, nodes := range x.Where {
		n += len(nodes)
	}
	return n
}

// SpreadOptions say what a spread reckons with beside the state.
type SpreadOptions struct {
	// Usable, unless nil, is asked of every memory node that takes regions.
	Usable func(*dirpb.Node) bool
	// Given is what memory nodes are about to be given, in bytes by id.
	Given map[uint32]uint64
	// Joins are the memory nodes, by placement group, that are about to join one. Their share is part of Given.
	Joins map[uint32]uint32
}

// Spread finds places for the given number of copies of a namespace's placement groups. Each copy is on
// another memory node, and in another failure domain if that is possible. No group takes the only place of
// another (augmenting paths, after Kuhn's matching). Members on draining memory nodes count as copies to
// replace. Groups that lost everything count for nothing.
func (s *State) Spread(namespace uint32, copies int, o SpreadOptions) *Spread {
	sp := &spreader{free: make(map[uint32]uint64), at: make(map[uint32][]*wanted)}
	for _, n := range ordered.Values(s.nodes) {
		if used := n.UsedBytes + o.Given[n.Id]; placeable(n) && used <= n.CapacityBytes &&
			(o.Usable == nil || o.Usable(n)) {
			sp.nodes = append(sp.nodes, n)
			sp.free[n.Id] = n.CapacityBytes - used
		}
	}
	out := &Spread{Where: make(map[uint32][]uint32)}
	for _, pg := range s.PGs(namespace) {
		if pg.State == dirpb.PGState_PG_LOST {
			continue
		}
		g := &spreading{pg: pg, has: make(map[uint32]bool), domains: make(map[string]bool)}
		stay := 0
		keep := func(id uint32) {
			g.has[id] = true
			if n := s.nodes[id]; n != nil && !n.Draining {
				g.domains[n.Domain] = true
				stay++
			}
		}
		for _, m := range pg.Members {
			keep(m.NodeId)
		}
		if pg.Planned != nil {
			keep(pg.Planned.NodeId)
		}
		if pg.Leaving != nil {
			g.has[pg.Leaving.NodeId] = true
		}
		if id := o.Joins[pg.Id]; id != 0 {
			keep(id)
		}
		for ; stay < copies; stay++ {
			g.wants = append(g.wants, &wanted{group: g})
		}
		for _, w := range g.wants {
			switch {
			case sp.find(w, true, make(map[uint32]bool)):
			case sp.find(w, false, make(map[uint32]bool)):
			default:
				out.Short = append(out.Short, pg.Id)
			}
		}
		sp.groups = append(sp.groups, g)
	}
	for _, g := range sp.groups {
		shared := false
		for _, w := range g.wants {
			if w.on != nil {
				out.Where[g.pg.Id] = append(out.Where[g.pg.Id], w.on.Id)
				shared = shared || w.shares(w.on.Domain)
			}
		}
		if shared {
			out.Shared = append(out.Shared, g.pg.Id)
		}
	}
	out.Short = slices.Compact(out.Short)
	return out
}

// spreader assigns wanted copies to memory nodes.
type spreader struct {
	nodes  []*dirpb.Node
	free   map[uint32]uint64    // bytes, by memory node
	at     map[uint32][]*wanted // by memory node
	groups []*spreading
}

// spreading is a placement group that lacks copies.
type spreading struct {
	pg      *dirpb.PlacementGroup
	has     map[uint32]bool // memory nodes that have a region of it already
	domains map[string]bool // of copies that stay
	wants   []*wanted
}

// wanted is one copy that is lacking; on is nil until it has a place.
type wanted struct {
	group *spreading
	on    *dirpb.Node
}

// shares reports whether another copy than w is in a failure domain.
func (w *wanted) shares(domain string) bool {
	return w.group.domains[domain] || slices.ContainsFunc(w.group.wants, func(o *wanted) bool {
		return o != w && o.on != nil && o.on.Domain == domain
	})
}

// find gives w a place, best in a failure domain without a copy, if need be by finding
// another one for those that are there. apart leaves out domains that have a copy. seen are
// memory nodes that were tried.
func (sp *spreader) find(w *wanted, apart bool, seen map[uint32]bool) bool {
	size := w.group.pg.RegionBytes
	shared := make(map[string]bool)
	var order []*dirpb.Node
	for _, n := range sp.nodes {
		if !w.group.has[n.Id] && !slices.ContainsFunc(w.group.wants, func(o *wanted) bool { return o.on == n }) {
			order = append(order, n)
			shared[n.Domain] = w.shares(n.Domain)
		}
	}
	slices.SortStableFunc(order, func(a, b *dirpb.Node) int {
		return cmp.Or(falseFirst(shared[a.Domain], shared[b.Domain]), cmp.Compare(len(sp.at[a.Id]), len(sp.at[b.Id])),
			cmp.Compare(sp.free[b.Id], sp.free[a.Id]))
	})
	for _, n := range order {
		if seen[n.Id] || apart && shared[n.Domain] {
			continue
		}
		seen[n.Id] = true
		if sp.free[n.Id] >= size {
			sp.put(w, n)
			return true
		}
		for _, o := range slices.Clone(sp.at[n.Id]) {
			if sp.free[n.Id]+o.group.pg.RegionBytes < size {
				continue
			}
			sp.take(o)
			if sp.find(o, apart, seen) {
				sp.put(w, n)
				return true
			}
			sp.put(o, n)
		}
	}
	return false
}

func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

func (sp *spreader) put(w *wanted, n *dirpb.Node) {
	w.on = n
	sp.at[n.Id] = append(sp.at[n.Id], w)
	sp.free[n.Id] -= w.group.pg.RegionBytes
}

func (sp *spreader) take(w *wanted) {
	sp.at[w.on.Id] = slices.DeleteFunc(sp.at[w.on.Id], func(o *wanted) bool { return o == w })
	sp.free[w.on.Id] += w.group.pg.RegionBytes
	w.on = nil
}

// setReplicas changes the number of copies of w, a private copy in place. The leader then has
// placement groups joined, or left, by one memory node after the other.
func (s *State) setReplicas(w *dirpb.Namespace, replicas uint32) {
	lower := replicas < w.Replicas
	w.BytesPerNode = w.BytesPerNode * uint64(replicas) / uint64(w.Replicas)
	w.Replicas = replicas
	if !lower {
		return
	}
	// A region that is only planned is not made, unless it is to replace one that drains.
	for _, pg := range s.PGs(w.Id) {
		stay := 0
		for _, m := range pg.Members {
			if !s.nodes[m.NodeId].GetDraining() {
				stay++
			}
		}
		if pg.Planned != nil && stay >= int(replicas) {
			s.editPG(pg.Id).Planned = nil
		}
	}
	s.refreshUsed()
}

// homes counts the memory nodes that take new regions, and their failure domains: 0 if none
// has a label.
func (s *State) homes() (up, domains int) {
	labels := make(map[string]bool)
	labelled := false
	for _, n := range s.nodes {
		if placeable(n) {
			up++
			labels[n.Domain] = true
			labelled = labelled || n.Domain != ""
		}
	}
	if labelled {
		domains = len(labels)
	}
	return up, domains
}

func fewNodes(namespace string, replicas, up int) string {
	return fmt.Sprintf("%d copies of namespace %q need as many memory nodes; %d are up and not draining", replicas,
		namespace, up)
}

// CheckDomains returns why the replicas of a namespace cannot be in failure domains of their own, although
// there are memory nodes for them; else nil. The namespace may not exist yet.
func (s *State) CheckDomains(namespace string, replicas uint32) error {
	if up, domains := s.homes(); up >= int(replicas) && domains > 0 && domains < int(replicas) {
		return fmt.Errorf("%w: %d copies of namespace %q need as many failure domains; memory nodes that are up and "+
			"not draining are in %d", ErrRefused, replicas, namespace, domains)
	}
	return nil
}

func (s *State) checkReplicas(w *dirpb.Namespace, replicas uint32) error {
	if replicas > MaxReplicas {
		return fmt.Errorf("%w: %d copies of namespace %q, want 1..%d", ErrInvalid, replicas, w.Name, MaxReplicas)
	}
	if replicas <= w.Replicas {
		return nil
	}
	up, domains := s.homes()
	if up < int(replicas) {
		return fmt.Errorf("%w: %s", ErrRefused, fewNodes(w.Name, int(replicas), up))
	}
	if err := s.CheckDomains(w.Name, replicas); err != nil {
		return err
	}
	labelled := domains > 0
	sp := s.Spread(w.Id, int(replicas), SpreadOptions{})
	switch {
	case len(sp.Short) > 0:
		return fmt.Errorf("%w: %d copies of namespace %q: no memory node has room for the copy of %s that placement "+
			"group %d needs; free are %s",
			ErrFull, replicas, w.Name, units.Bytes(s.pgs[sp.Short[0]].RegionBytes), sp.Short[0], s.freeText())
	case labelled && len(sp.Shared) > 0:
		return fmt.Errorf("%w: %d copies of namespace %q: two copies of placement group %d would be in one failure "+
			"domain. Memory nodes of other domains have no room; free are %s",
			ErrFull, replicas, w.Name, sp.Shared[0], s.freeText())
	}
	return nil
}

// freeText lists what memory nodes that take regions have free.
func (s *State) freeText() string {
	var out []string
	for _, n := range ordered.Values(s.nodes) {
		if placeable(n) {
			out = append(out, fmt.Sprintf("%s at %q", units.Bytes(n.CapacityBytes-min(n.UsedBytes, n.CapacityBytes)),
				n.Name))
		}
	}
	return strings.Join(out, ", ")
}

// setNamespace changes what may change of a namespace.
func (s *State) setNamespace(q *dirpb.SetNamespaceRequest) (*dirpb.Namespace, error) {
	old := s.NamespaceNamed(q.GetName())
	if old == nil {
		return nil, fmt.Errorf("namespace %.64q: %w", q.GetName(), ErrNotFound)
	}
	if err := s.checkStays(old.Id); err != nil {
		return nil, err
	}
	if err := errors.Join(s.checkReplicas(old, q.Replicas), checkTenancy(q.Owner), s.checkNodes(old, q),
		s.checkBounds(old.Mode, q), s.checkTier(old, q.Tier)); err != nil {
		return nil, err
	}
	w := proto.CloneOf(old)
	if q.Nodes != 0 && s.KnowsBoots() {
		w.Nodes, w.Grows, w.Rebalancing = q.Nodes, false, dirpb.Rebalancing_REBALANCING_ON
	}
	if q.MaxValueBytes != 0 {
		w.MaxValueBytes = q.MaxValueBytes
	}
	if q.MaxPinnedPercent != nil {
		w.MaxPinnedPercent = *q.MaxPinnedPercent
	}
	if q.Tier != nil {
		w.Tier = s.tierOf(w, q.Tier)
	}
	if !q.KeepLimit {
		w.LimitBytes = q.LimitBytes
	}
	if q.Owner != "" {
		setOwner(w, q.Owner)
	}
	if q.Quota != nil {
		w.Quota = quotaOf(q.Quota)
	}
	if q.Replicas != 0 && q.Replicas != w.Replicas {
		s.setReplicas(w, q.Replicas)
	}
	if proto.Equal(w, old) {
		return old, nil
	}
	s.putNamespace(w)
	s.fenceBeyond(w)
	return w, nil
}
