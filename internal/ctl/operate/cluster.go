package operate

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

// printStatus prints what st says, of a large store the short form unless all is true.
func (a *commands) printStatus(st *dirpb.StatusReply, all bool) error {
	if a.JSON() {
		return a.printStateJSON(st, st)
	}
	m := st.GetMap()
	leader := "none"
	for _, d := range st.GetDirectory() {
		if d.GetLeader() {
			leader = d.GetId()
		}
	}
	var lent, used, registered uint64
	for _, n := range m.GetNodes() {
		if n.GetState() == dirpb.NodeState_NODE_UP {
			lent += n.GetCapacityBytes()
			used += n.GetUsedBytes()
			registered += overview.Registered(m, n)
		}
	}
	whole, pgs, serves := 0, 0, overview.InUse(m)
	memories := overview.Memories(st)
	for _, p := range m.GetPgs() {
		if !serves(p) {
			continue
		}
		if pgs++; overview.Lacks(m, p) == "" {
			whole++
		}
	}
	owned, troubled := 0, 0
	for _, j := range st.GetJobs() {
		if j.GetOwner() != 0 {
			owned++
		}
		if j.GetTrouble() != "" {
			troubled++
		}
	}
	live := 0
	for _, s := range st.GetSessions() {
		if s.GetLife() == dirpb.SessionLife_SESSION_LIVE {
			live++
		}
	}
	a.printVerdict(st)
	rows := []ctl.Row{
		{"copies", fmt.Sprintf("%d of %d placement groups fully replicated", whole, pgs) +
			unusedText(len(m.GetPgs())-pgs)},
		{"directory", fmt.Sprintf("%d nodes, leader %s", len(st.GetDirectory()), leader)},
		{"memory nodes", nodesText(m.GetNodes())},
		{"memory", fmt.Sprintf("%s lent, %s in regions", units.Rounded(lent), overview.RegisteredText(registered,
			used))},
		{"atomics", atomicsText(m.GetNodes())},
		{"namespaces", ctl.NamespacesText(st)},
		{"shards", len(m.GetShards())},
		{"jobs", fmt.Sprintf("%d, of which %d are worked on and %d in trouble", len(st.GetJobs()), owned, troubled)},
		{"sessions", fmt.Sprintf("%d live, %d being fenced", live, len(st.GetSessions())-live)},
		{"status words", statusWordsText(st)},
		{"map version", m.GetVersion()},
		{"reclaim epoch", epochText(st)},
		{"access", accessText(st)},
	}
	if text := overview.PathsText(st); text != "" {
		rows = append(rows, ctl.Row{"tcp in place of RDMA", text})
	}
	a.PrintTable(ctl.Row{"Store", st.GetClusterId()}, rows)
	if sums := overview.Sums(memories); len(sums) > 0 {
		more := ""
		if n := len(sums); !all && n > shortRows {
			slices.SortStableFunc(sums, func(x, y *overview.Memory) int {
				return cmp.Compare(liveShare(y), liveShare(x))
			})
			sums, more = sums[:shortRows], fmt.Sprintf("the %d fullest of %d namespaces: kvctl status --all shows "+
				"every one", shortRows, n)
		}
		fmt.Fprintln(a.Stdout)
		ctl.PrintColumns(a.App, overview.MemoryColumns.Without("PG"), sums)
		a.printMore(more)
	}
	a.printGroups(st, memories, all)
	if jobs := st.GetJobs(); len(jobs) > 0 {
		more := ""
		if n := len(jobs); !all && n > shortRows {
			cut := proto.CloneOf(st)
			cut.Jobs, st, more = cut.Jobs[:shortRows], cut, fmt.Sprintf("%d of %d jobs: kvctl jobs shows every one",
				shortRows, n)
		}
		fmt.Fprintln(a.Stdout)
		if err := a.printJobs(st); err != nil {
			return err
		}
		a.printMore(more)
	}
	return nil
}

// unusedText says how many placement groups have no shard.
func unusedText(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(", %d without a shard", n)
}

// shortRows is how many rows a table of the short status has.
const shortRows = 32

// liveShare is the part of a heap that holds records, as far as that is known.
func liveShare(m *overview.Memory) float64 { return float64(m.Live) / float64(max(1, m.Heap)) }

func (a *commands) printMore(more string) {
	if more != "" {
		fmt.Fprintf(a.Stdout, "%s\n", more)
	}
}

// printGroups lists the placement groups; in the short form of a large store those that lack something.
func (a *commands) printGroups(st *dirpb.StatusReply, memories []*overview.Memory, all bool) {
	m, of := st.GetMap(), make(map[uint32]*overview.Memory)
	for _, x := range memories {
		of[x.PG] = x
	}
	cut := !all && len(m.GetPgs()) > shortRows
	var pgs []*dirpb.PlacementGroup
	lacking, fullest := 0, 0.0
	for _, p := range m.GetPgs() {
		if x := of[p.GetId()]; x != nil {
			fullest = max(fullest, 100*liveShare(x))
		}
		if overview.Lacks(m, p) != "" {
			lacking++
		} else if cut {
			continue
		}
		if cut && len(pgs) == shortRows {
			continue
		}
		pgs = append(pgs, p)
	}
	if len(pgs) > 0 {
		fmt.Fprintln(a.Stdout)
		ctl.PrintColumns(a.App, overview.GroupColumns(st).Without("Region", "Extents recalled"), pgs)
	}
	if cut {
		fmt.Fprintln(a.Stdout)
		a.printMore(fmt.Sprintf("%d placement groups, of which %d lack something, the fullest %.1f %% live: kvctl "+
			"status --all shows every one", len(m.GetPgs()), lacking, fullest))
	}
}

// nodesText counts memory nodes by how they are, and names those that are not simply up or down.
func nodesText(nodes []*dirpb.Node) string {
	by := make(map[string][]string)
	down := 0
	for _, n := range nodes {
		state := overview.NodeState(n)
		if by[state] = append(by[state], n.GetName()); n.GetState() != dirpb.NodeState_NODE_UP {
			down++
		}
		if n.GetDraining() {
			by["draining"] = append(by["draining"], n.GetName())
		}
	}
	text := fmt.Sprintf("%d up, %d down", len(nodes)-down-len(by["silent"]), down)
	if n := len(by["silent"]); n > 0 {
		text = fmt.Sprintf("%d up, %d silent, %d down", len(nodes)-down-n, n, down)
	}
	for _, x := range []struct{ title, state string }{{"draining", "draining"}, {"restarting", "restarting"},
		{"waiting for", "silent"}} {
		const most = 8
		if names := by[x.state]; len(names) > most {
			text += fmt.Sprintf(", %s: %s and %d more", x.title, strings.Join(names[:most], ", "), len(names)-most)
		} else if len(names) > 0 {
			text += fmt.Sprintf(", %s: %s", x.title, strings.Join(names, ", "))
		}
	}
	return text
}

// statusWordsText counts blocks of status words in the namespaces that have any.
func statusWordsText(st *dirpb.StatusReply) string {
	var each []string
	for _, ns := range overview.Namespaces(st) {
		if ns.StatusHeld+ns.StatusDead > 0 {
			each = append(each, fmt.Sprintf("%s: %d blocks held, %d dead", ns.Name, ns.StatusHeld, ns.StatusDead))
		}
	}
	return cmp.Or(strings.Join(each, "; "), "none in use")
}

// accessText tells whether callers are held to their roles.
func accessText(st *dirpb.StatusReply) string {
	if st.GetIdentifies() {
		return "by the role in the caller's certificate"
	}
	return "no TLS: everybody is operator"
}

// epochText tells the reclaim epoch, which only a leader knows.
func epochText(st *dirpb.StatusReply) string {
	if overview.Answer(st) != "" {
		return "-"
	}
	return fmt.Sprintf("%d, minimum %d", st.GetEpoch(), st.GetMinEpoch())
}

func (a *commands) printNodes(st *dirpb.StatusReply) error {
	nodes := st.GetMap().GetNodes()
	slices.SortFunc(nodes, func(x, y *dirpb.Node) int { return int(x.GetId()) - int(y.GetId()) })
	if a.JSON() {
		for _, n := range nodes {
			b, err := ctl.ProtoJSON(n)
			if err != nil {
				return err
			}
			var fabrics [][]byte // the leader alone knows them
			for _, f := range st.GetNodeStats()[n.GetId()].GetFabrics() {
				text, err := ctl.ProtoJSON(f)
				if err != nil {
					return err
				}
				fabrics = append(fabrics, text)
			}
			fmt.Fprintf(a.Stdout, "%s,\"regions\":%d,\"registered_bytes\":\"%d\",\"fabrics\":[%s]}\n",
				bytes.TrimSuffix(b, []byte("}")), overview.RegionsOn(st.GetMap(), n.GetId()),
				overview.Registered(st.GetMap(), n), bytes.Join(fabrics, []byte(",")))
		}
		return nil
	}
	ctl.PrintColumns(a.App, overview.NodeColumns(st.GetMap()), nodes)
	return nil
}

// atomicsText says who executes atomics on the memory of the nodes that are up.
func atomicsText(nodes []*dirpb.Node) string {
	by := map[string][]string{}
	for _, n := range nodes {
		if n.GetState() != dirpb.NodeState_NODE_UP {
			continue
		}
		who := "CPUs"
		for _, e := range n.GetEndpoints() {
			switch e.GetAtomics() {
			case dirpb.AtomicsBy_ATOMICS_BY_NIC, dirpb.AtomicsBy_ATOMICS_BY_PROXY:
				who = "RDMA adapter"
			case dirpb.AtomicsBy_ATOMICS_BY_AGENT:
				who = "CPUs, an agent's for verbs clients"
			}
		}
		by[who] = append(by[who], n.GetName())
	}
	if len(by) == 1 {
		for who := range by {
			return who
		}
	}
	var all []string
	for _, who := range slices.Sorted(maps.Keys(by)) {
		all = append(all, who+" ("+strings.Join(by[who], ", ")+")")
	}
	return strings.Join(all, "; ")
}

// shardsOf lists the shards of a namespace by placement group.
func shardsOf(m *dirpb.Map, ns uint32) map[uint32][]*dirpb.Shard {
	out := make(map[uint32][]*dirpb.Shard)
	for _, s := range m.GetShards() {
		if s.GetNamespaceId() == ns {
			out[s.GetPgId()] = append(out[s.GetPgId()], s)
		}
	}
	return out
}

func (a *commands) printShards(st *dirpb.StatusReply) error {
	m := st.GetMap()
	ns, err := a.OwnNamespace(m)
	if err != nil {
		return err
	}
	members := overview.Members(m)
	byPG := shardsOf(m, ns.GetId())
	if a.JSON() {
		for _, p := range overview.Groups(m, ns.GetId()) {
			if err := a.PrintProto(&dirpb.Map{Pgs: []*dirpb.PlacementGroup{p}, Shards: byPG[p.GetId()]}); err != nil {
				return err
			}
		}
		return nil
	}
	var rows []ctl.Row
	for _, p := range overview.Groups(m, ns.GetId()) {
		shards := byPG[p.GetId()]
		slices.SortFunc(shards, func(x, y *dirpb.Shard) int { return int(x.GetPrefix()) - int(y.GetPrefix()) })
		for _, s := range shards {
			slots := uint64(s.GetSegments()) * (layout.SegmentGroups + 1) * layout.GroupSlots
			rows = append(rows, ctl.Row{p.GetId(), overview.StateText(m, p), p.GetEpoch(), overview.CopiesOf(m, p),
				members(p), s.GetId(),
				fmt.Sprintf("%#x/%d", s.GetPrefix(), s.GetDepth()), fmt.Sprintf("%#x", s.GetOffset()), s.GetSegments(),
				slots, moveText(s)})
		}
		if len(shards) == 0 {
			rows = append(rows, ctl.Row{p.GetId(), overview.StateText(m, p), p.GetEpoch(), overview.CopiesOf(m, p),
				members(p), "-", "-", "-", "-", "-", ""})
		}
	}
	a.PrintTable(ctl.Row{"PG", "State", "Epoch", "Copies", "Members", "Shard", "Prefix", "Offset", "Segments", "Slots",
		"Move"}, rows)
	return nil
}

// moveText says where keys of a shard are going.
func moveText(s *dirpb.Shard) string {
	mv := s.GetMove()
	switch {
	case mv == nil:
		return ""
	case mv.GetAbandoned():
		return fmt.Sprintf("given up, shard %d was lost", mv.GetChildId())
	case mv.GetSplit():
		return fmt.Sprintf("half to shard %d in PG %d", mv.GetChildId(), mv.GetPgId())
	}
	if mv.GetSegments() != 0 {
		return fmt.Sprintf("all to shard %d of %d segments", mv.GetChildId(), mv.GetSegments())
	}
	return fmt.Sprintf("all to shard %d in PG %d", mv.GetChildId(), mv.GetPgId())
}

func (a *commands) printStats(st *dirpb.StatusReply) error {
	if a.JSON() {
		// The map is what status prints.
		rest := proto.Clone(st).(*dirpb.StatusReply)
		rest.Map = nil
		return a.printStateJSON(st, rest)
	}
	fmt.Fprintf(a.Stdout, "raft applied %d, reclaim epoch %s\n\n", st.GetRaftApplied(), epochText(st))
	a.printMemory(st)
	fmt.Fprintln(a.Stdout)
	var rows []ctl.Row
	for _, u := range st.GetUsage() {
		scrubbed := "never"
		if ms := u.GetLastScrubUnixMillis(); ms != 0 {
			scrubbed = a.Now().Sub(time.UnixMilli(ms)).Round(time.Second).String() + " ago"
		}
		rows = append(rows, ctl.Row{u.GetPgId(), units.Rounded(u.GetGrantedUnits() * layout.UnitSize),
			units.Rounded(u.GetReturnedUnits() * layout.UnitSize), overview.Percent(u.GetGrantedUnits(),
				u.GetHeapUnits()),
			units.Rounded(u.GetIndexBytesUsed()), units.Rounded(u.GetLeakedUnits() * layout.UnitSize),
			u.GetLeakedExtents(),
			scrubbed})
	}
	a.PrintTable(ctl.Row{"PG", "Granted", "Returned", "Granted %", "Index used", "Leaked", "Leaking extents",
		"Scrubbed"},
		rows)
	fmt.Fprintln(a.Stdout)

	rows = nil
	names := make(map[uint32]string)
	for _, n := range st.GetMap().GetNodes() {
		names[n.GetId()] = n.GetName()
	}
	ids := make([]uint32, 0, len(st.GetNodeStats()))
	for id := range st.GetNodeStats() {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		s := st.GetNodeStats()[id]
		rows = append(rows, ctl.Row{names[id], s.GetConnections(), units.Rounded(s.GetRegisteredBytes()),
			time.Duration(s.GetDataPathCpuNanos()).Round(time.Microsecond)})
	}
	a.PrintTable(ctl.Row{"Memory node", "Connections", "Registered", "CPU on the data path"}, rows)
	fmt.Fprintln(a.Stdout)

	ctl.PrintColumns(a.App, overview.SessionColumns.Without("Identity"), st.GetSessions())
	return nil
}
