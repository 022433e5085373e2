package overview

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// Problem is something about the store that an operator has to know, and what mends it:
// a command, if there is one.
type Problem struct {
	What string `json:"what"`
	Mend string `json:"mend"`
}

// Copies is how many members of p hold all that it holds. A joiner does not yet, and what is
// lost or being made holds nothing.
func Copies(p *dirpb.PlacementGroup) int {
	switch n := len(p.GetMembers()); {
	case p.GetState() == dirpb.PGState_PG_LOST || p.GetState() == dirpb.PGState_PG_CREATING:
		return 0
	case p.GetJoining() && n > 0:
		return n - 1
	default:
		return n
	}
}

// homeless reports whether p needs a region on one more memory node and there is none that
// is up, stays, has no part of p and has room.
func homeless(m *dirpb.Map, p *dirpb.PlacementGroup, want int) bool {
	members := p.GetMembers()
	if Copies(p) == 0 { // its members have nothing: they are waited for
		members = slices.DeleteFunc(slices.Clone(members), func(x *dirpb.Member) bool {
			return !isUp(m, x.GetNodeId())
		})
	}
	if len(members) >= want || p.GetPlanned() != nil {
		return false
	}
	return !slices.ContainsFunc(m.GetNodes(), func(n *dirpb.Node) bool {
		return n.GetState() == dirpb.NodeState_NODE_UP && !n.GetDraining() && !n.GetSilent() &&
			n.GetCapacityBytes()-min(n.GetUsedBytes(), n.GetCapacityBytes()) >= p.GetRegionBytes() &&
			!slices.ContainsFunc(members, func(x *dirpb.Member) bool { return x.GetNodeId() == n.GetId() })
	})
}

// InUse are the placement groups that have a shard, or are to get one. In a namespace without shards all are. Those
// that are not, such as a drain leaves, serve no key: nobody misses a copy there.
func InUse(m *dirpb.Map) func(*dirpb.PlacementGroup) bool {
	has, of := make(map[uint32]bool), make(map[uint32]bool) // by placement group, by namespace
	for _, sh := range m.GetShards() {
		has[sh.GetPgId()], has[sh.GetMove().GetPgId()], of[sh.GetNamespaceId()] = true, true, true
	}
	return func(p *dirpb.PlacementGroup) bool { return has[p.GetId()] || !of[p.GetNamespaceId()] }
}

func isUp(m *dirpb.Map, node uint32) bool {
	return slices.ContainsFunc(m.GetNodes(), func(n *dirpb.Node) bool {
		return n.GetId() == node && n.GetState() == dirpb.NodeState_NODE_UP
	})
}

// lossProblems are those of what a namespace lost.
func lossProblems(n *dirpb.Namespace) (all []Problem) {
	accept := "kvctl namespace accept-loss " + n.GetName()
	add := func(mend, format string, args ...any) { all = append(all, Problem{fmt.Sprintf(format, args...), mend}) }
	at := func(l *dirpb.Loss) string { return time.UnixMilli(l.GetUnixMillis()).UTC().Format(time.RFC3339) }
	var pgs, doubted []string
	var last *dirpb.Loss
	for _, l := range n.GetLosses() {
		s := number(l.GetPgId())
		if l.GetVolumeId() != 0 {
			add(accept, "namespace %s lost values that had no copy but on tier node %s, which was given up at %s",
				n.GetName(), l.GetNode(), at(l))
			continue
		}
		if l.GetRecovered() {
			doubted = append(doubted, s)
			continue
		}
		if l.GetTimes() > 1 {
			s += fmt.Sprintf(" (%d times)", l.GetTimes())
		}
		pgs = append(pgs, s)
		if last == nil || l.GetUnixMillis() > last.GetUnixMillis() {
			last = l
		}
	}
	if len(doubted) > 0 {
		add(fmt.Sprintf("kvctl --namespace %s check; then %s", n.GetName(), accept),
			"namespace %s may lack keys: the directory was recovered without the entries by which something "+
				"moved to placement group %s", n.GetName(), strings.Join(doubted, ", "))
	}
	if last != nil {
		add(accept, "namespace %s lost keys: all copies of placement group %s, the last one with memory node %s at %s",
			n.GetName(), strings.Join(pgs, ", "), last.GetNode(), at(last))
	}
	return all
}

// Problems lists what is wrong with the store by st, the worst first.
func Problems(st *dirpb.StatusReply) []Problem {
	var all []Problem
	add := func(mend, format string, args ...any) { all = append(all, Problem{fmt.Sprintf(format, args...), mend}) }

	if answer := Answer(st); answer != "" {
		add("ask again once a directory node leads that can be reached", "%s", answer)
	}
	if ahead := st.GetAhead(); len(ahead) > 0 {
		var names []string
		for _, a := range ahead {
			names = append(names, fmt.Sprintf("%s (told of entry %d, term %d)", a.GetName(), a.GetPosition().GetIndex(),
				a.GetPosition().GetTerm()))
		}
		add("start the directory with its latest data folders; if they are gone for good, or a node has stopped "+
			"since the others lack what it has: stop all, and go on from the folder that has that entry: kvctl "+
			"directory recover --id ID --data-dir DIR",
			"the directory's data folders are older (entry %d, term %d) than what memory nodes were told, as after a "+
				"backup was put back: %s. It grants nothing, memory nodes do not follow it, and sessions end as "+
				"their leases run out",
			st.GetPosition().GetIndex(), st.GetPosition().GetTerm(), strings.Join(names, ", "))
	}
	leader := slices.ContainsFunc(st.GetDirectory(), (*dirpb.DirectoryNode).GetLeader)
	if !leader && len(st.GetDirectory()) > 0 {
		add("start those that are down: kvd directory --id ID --data-dir DIR",
			"the directory has no leader: %d of its %d nodes must run and reach each other. Until then there are no "+
				"new sessions and no new memory, and operations end as leases run out",
			len(st.GetDirectory())/2+1, len(st.GetDirectory()))
	}
	for _, n := range st.GetMap().GetNamespaces() {
		all = append(all, lossProblems(n)...)
	}
	all = append(all, copyProblems(st)...)
	for _, n := range st.GetMap().GetNodes() {
		if n.GetState() != dirpb.NodeState_NODE_UP {
			add(fmt.Sprintf("kvd memnode --name %s; or, if it is gone for good: kvctl nodes remove %s --force",
				n.GetName(), n.GetName()),
				"memory node %s is down", n.GetName())
		}
		if n.GetTrouble() != "" {
			add(fmt.Sprintf("the log of memory node %s says more; on its machine: kvctl doctor", n.GetName()),
				"memory node %s does not come up: %s", n.GetName(), n.GetTrouble())
		}
		if n.GetRival() != "" {
			add(fmt.Sprintf("give one of the two another name (kvd memnode --name), or stop it; kvctl nodes shows "+
				"the address of %s", n.GetName()),
				"another process wants the name of memory node %s and is refused: the one at %s has it, and the "+
					"other is at %s", n.GetName(), dirpb.Addresses(n.GetEndpoints()), n.GetRival())
		}
		if n.GetWaiting() {
			add(fmt.Sprintf("kvd memnode --name %s; or, if its memory is gone for good: kvctl nodes give-up %s",
				n.GetName(), n.GetName()),
				"memory node %s is silent and has the only copy of %s", n.GetName(), waitingFor(st.GetMap(), n))
		}
	}
	for _, g := range st.GetGateways() {
		if g.GetTrouble() != "" {
			add("set listen-peers (or advertise-peers) of gateways to addresses that the others reach, and give them "+
				"certificates for these: kvctl certs issue NAME --role gateway --ip ADDRESS",
				"gateway %s does not hear all others, or is not heard by them: %s", g.GetAddr(), g.GetTrouble())
		}
	}
	all = append(all, bypassProblems(st)...)
	for _, d := range st.GetDirectory() {
		if d.GetSilentMillis() > 0 {
			add(fmt.Sprintf("kvd directory --id %s --data-dir DIR; or, if it is gone for good: kvctl directory "+
				"remove %s", d.GetId(), d.GetId()),
				"directory node %s has not answered for %v", d.GetId(),
				(time.Duration(d.GetSilentMillis()) * time.Millisecond).Round(time.Second/10))
		}
	}
	return all
}

// waitingFor names the placement groups that wait for a silent memory node, by namespace, and says why.
func waitingFor(m *dirpb.Map, n *dirpb.Node) string {
	var parts []string
	why := "since it may come back with what it holds"
	for _, ns := range m.GetNamespaces() {
		var pgs []string
		for _, p := range m.GetPgs() {
			if p.GetNamespaceId() == ns.GetId() && awaited(m, p) == n {
				pgs = append(pgs, number(p.GetId()))
			}
		}
		if len(pgs) == 0 {
			continue
		}
		parts = append(parts, fmt.Sprintf("placement groups %s of namespace %s", strings.Join(pgs, ", "), ns.GetName()))
		if ns.GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE {
			why = "since it may come back with what it holds, and no other memory node has room for the cache to " +
				"start over"
		}
	}
	return strings.Join(parts, ", ") + ": operations there wait, " + why
}

// copyProblems are the placement groups in use that hold nothing or lack copies, by namespace.
func copyProblems(st *dirpb.StatusReply) (all []Problem) {
	used := InUse(st.GetMap())
	for _, n := range st.GetMap().GetNamespaces() {
		groups, mends := make(map[string][]string), make(map[string]string) // by Problem.What
		for _, p := range st.GetMap().GetPgs() {
			want := int(n.GetReplicas())
			if p.GetNamespaceId() != n.GetId() || Copies(p) >= want || !used(p) {
				continue
			}
			var k Problem
			switch {
			case Copies(p) == 0 && p.GetState() == dirpb.PGState_PG_LOST:
				k = Problem{"no copy: their keys cannot be read or written",
					"start their memory nodes; if they are gone for good: kvctl nodes remove NODE --force"}
			case Copies(p) == 0:
				k = Problem{"no copy yet: memory nodes are making them", "kvctl nodes shows who is down"}
			default:
				k = Problem{fmt.Sprintf("%d of %d copies: new ones are being made", Copies(p), want),
					"kvctl jobs shows how far they are"}
			}
			if homeless(st.GetMap(), p, want) {
				k.What, _, _ = strings.Cut(k.What, ":")
				k.What += ", and no other memory node has room for one"
				k.Mend = "start another memory node with room (kvd memnode --name NAME --memory SIZE), or one that " +
					"is down"
			}
			groups[k.What], mends[k.What] = append(groups[k.What], number(p.GetId())), k.Mend
		}
		for _, what := range slices.Sorted(maps.Keys(groups)) {
			noun := "placement group"
			if len(groups[what]) > 1 {
				noun += "s"
			}
			all = append(all,
				Problem{fmt.Sprintf("namespace %s: %s %s: %s", n.GetName(), noun, strings.Join(groups[what], ", "),
					what), mends[what]})
		}
	}
	return all
}

// Answer says whose answer st is and how old, "" if it is the leader's or an older version's,
// which does not say.
func Answer(st *dirpb.StatusReply) string {
	if st.GetLeads() || st.GetAnsweredBy() == "" {
		return ""
	}
	age := "of unknown age: it has heard no leader since it was started"
	if ms := st.GetAgeMillis(); ms >= 0 {
		age = fmt.Sprintf("%v old", (time.Duration(ms) * time.Millisecond).Round(time.Second/10))
	}
	return fmt.Sprintf("this is the answer of directory node %s, which does not lead: it is %s, and lacks what only "+
		"a leader knows", st.GetAnsweredBy(), age)
}
