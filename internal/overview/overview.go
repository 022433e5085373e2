// Package overview puts together what the directory's status says of the store. That is its problems
// and what mends each, its namespaces, how the memory of each placement group is used. `kvctl status`,
// the page that daemons serve and the metrics show the same numbers, because all of them take them
// from here.
//
// It leaves asking to its callers and showing to them too. Start with [Problems], [Namespaces] and [Memories], then
// [Column]: kvctl and the page print the same columns. All functions are pure and may be called concurrently; results
// share nothing with the status that they came from.
package overview

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// Namespace is what the directory says of one, put together.
type Namespace struct {
	Name, Mode string // mode: store or cache
	Deleting   bool
	Replicas   int
	// Memory for records, each copy counted once.
	HeapBytes, LimitBytes, GrantedBytes, ReturnedBytes, LeakedBytes uint64
	// IndexBytes is what shards can occupy, IndexUsedBytes what they do.
	IndexBytes, IndexUsedBytes uint64
	// Blocks of status words: that sessions have, and dead ones, which wait until no intent is left that may name them.
	StatusHeld, StatusDead int
	// The counts of the last scrub of each placement group.
	LostRecords, RepairedRecords uint64
	Shards, Moving               int
	PGs, Recalled                int // placement groups; extents
	PGState                      map[dirpb.PGState]int
	Live, Fencing                int // sessions
	// Lost is how often a placement group lost all its copies, Losses how many of them did
	// since somebody accepted that.
	Lost   uint64
	Losses int
	// Missing is how many copies placement groups in use lack, Homeless how many of these have
	// nowhere to get one.
	Missing, Homeless int
}

// Namespaces puts together what st says of each namespace, in its order.
func Namespaces(st *dirpb.StatusReply) []*Namespace {
	var all []*Namespace
	byID, byName := make(map[uint32]*Namespace), make(map[string]*Namespace)
	for _, n := range st.GetMap().GetNamespaces() {
		ns := &Namespace{
			Name: n.GetName(), Mode: Mode(n.GetMode()), Deleting: n.GetDeleting(), Replicas: int(n.GetReplicas()),
			LimitBytes: n.GetLimitBytes(), PGState: make(map[dirpb.PGState]int), Lost: n.GetLost(),
			Losses: len(n.GetLosses()),
		}
		all = append(all, ns)
		byID[n.GetId()], byName[ns.Name] = ns, ns
	}
	byPG, used := make(map[uint32]*Namespace), InUse(st.GetMap())
	for _, p := range st.GetMap().GetPgs() {
		if ns := byID[p.GetNamespaceId()]; ns != nil {
			byPG[p.GetId()] = ns
			ns.PGs++
			ns.PGState[p.GetState()]++
			ns.Recalled += len(p.GetRecalled())
			if lacks := ns.Replicas - Copies(p); lacks > 0 && used(p) {
				ns.Missing += lacks
				if homeless(st.GetMap(), p, ns.Replicas) {
					ns.Homeless++
				}
			}
			ns.IndexBytes += p.GetIndexBytes() - min(p.GetIndexBytes(), layout.RegionPageSize)
		}
	}
	for _, p := range st.GetUsage() {
		if ns := byPG[p.GetPgId()]; ns != nil {
			ns.HeapBytes += p.GetHeapUnits() * layout.UnitSize
			ns.GrantedBytes += p.GetGrantedUnits() * layout.UnitSize
			ns.ReturnedBytes += p.GetReturnedUnits() * layout.UnitSize
			ns.LeakedBytes += p.GetLeakedUnits() * layout.UnitSize
			ns.IndexUsedBytes += p.GetIndexBytesUsed()
			ns.StatusHeld += int(p.GetStatusHeld())
			ns.StatusDead += int(p.GetStatusDead())
			ns.LostRecords += p.GetLastScrub().GetLostRecords()
			ns.RepairedRecords += p.GetLastScrub().GetRepairedRecords()
		}
	}
	for _, s := range st.GetMap().GetShards() {
		if ns := byID[s.GetNamespaceId()]; ns != nil {
			ns.Shards++
			if s.GetMove() != nil {
				ns.Moving++
			}
		}
	}
	for _, s := range st.GetSessions() {
		if ns := byName[s.GetNamespace()]; ns != nil {
			switch s.GetLife() {
			case dirpb.SessionLife_SESSION_LIVE:
				ns.Live++
			case dirpb.SessionLife_SESSION_FENCING:
				ns.Fencing++
			}
		}
	}
	for _, ns := range all {
		if ns.LimitBytes == 0 || ns.LimitBytes > ns.HeapBytes {
			ns.LimitBytes = ns.HeapBytes
		}
	}
	return all
}

// Groups lists the placement groups of a namespace by id.
func Groups(m *dirpb.Map, namespace uint32) []*dirpb.PlacementGroup {
	var out []*dirpb.PlacementGroup
	for _, p := range m.GetPgs() {
		if p.GetNamespaceId() == namespace {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(x, y *dirpb.PlacementGroup) int { return cmp.Compare(x.GetId(), y.GetId()) })
	return out
}

// Usage finds a placement group's usage; nil if st does not tell it.
func Usage(st *dirpb.StatusReply, pg uint32) *dirpb.PGUsage {
	i := slices.IndexFunc(st.GetUsage(), func(u *dirpb.PGUsage) bool { return u.GetPgId() == pg })
	if i < 0 {
		return nil
	}
	return st.GetUsage()[i]
}

// CopiesOf says how many copies of p there are of how many: 1 of 2.
func CopiesOf(m *dirpb.Map, p *dirpb.PlacementGroup) string {
	return fmt.Sprintf("%d of %d", Copies(p), replicas(m, p))
}

func replicas(m *dirpb.Map, p *dirpb.PlacementGroup) int {
	for _, n := range m.GetNamespaces() {
		if n.GetId() == p.GetNamespaceId() {
			return int(n.GetReplicas())
		}
	}
	return 0
}

// Lacks says what keeps a placement group in use from having all of its copies, or "".
func Lacks(m *dirpb.Map, p *dirpb.PlacementGroup) string {
	lacks := lacks(m, p)
	if lacks != "" && !InUse(m)(p) {
		return ""
	}
	return lacks
}

func lacks(m *dirpb.Map, p *dirpb.PlacementGroup) string {
	switch {
	case p.GetState() != dirpb.PGState_PG_ACTIVE || p.GetJoining():
		return fmt.Sprintf("%s, %s copies", StateText(m, p), CopiesOf(m, p))
	case awaited(m, p) != nil:
		return StateText(m, p)
	case Copies(p) < replicas(m, p):
		return CopiesOf(m, p) + " copies"
	}
	return ""
}

// StateText is a placement group's state for people.
func StateText(m *dirpb.Map, p *dirpb.PlacementGroup) string {
	s := PGState(p.GetState())
	if p.GetJoining() {
		s += ", joining"
	}
	if n := awaited(m, p); n != nil {
		s += ", waiting for " + n.GetName()
	}
	return s
}

// awaited is the silent memory node that has the only copy of p; nil if there is none.
func awaited(m *dirpb.Map, p *dirpb.PlacementGroup) *dirpb.Node {
	if Copies(p) != 1 {
		return nil
	}
	for _, n := range m.GetNodes() {
		if n.GetWaiting() && n.GetId() == p.GetMembers()[0].GetNodeId() {
			return n
		}
	}
	return nil
}

// NodeState is a memory node's state for people.
func NodeState(n *dirpb.Node) string {
	switch {
	case n.GetState() != dirpb.NodeState_NODE_UP:
		return "down"
	case n.GetWaiting():
		return "silent"
	case n.GetPauseMillis() > 0:
		return "restarting"
	}
	return "up"
}

// number names a placement group to people.
func number(id uint32) string { return strconv.FormatUint(uint64(id), 10) }

// JobKind is a kind of job as people and labels have it: recover.
func JobKind(k dirpb.JobKind) string { return lower(k.String(), "JOB_") }

// PGState is a placement group's state likewise: active.
func PGState(s dirpb.PGState) string { return lower(s.String(), "PG_") }

// Mode is a namespace's mode likewise: cache.
func Mode(m dirpb.NamespaceMode) string { return lower(m.String(), "NAMESPACE_") }

// lower gives an enum's name without what all names of the enum begin with.
func lower(name, prefix string) string { return strings.ToLower(strings.TrimPrefix(name, prefix)) }
