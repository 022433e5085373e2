package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
)

// viewCommand is a command that shows one Status reply.
func (a *app) viewCommand(name, short string, print func(*dirpb.StatusReply) error) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withBackend(func(b backend) error {
				st, err := clusterView(cmd.Context(), b)
				if err != nil {
					return err
				}
				if answer := overview.Answer(st); answer != "" && name != "status" { // status lists it
					a.say("kvctl: warning: %s", answer)
				}
				return print(st)
			})
		},
	}
}

// explained is c with a long description.
func explained(c *cobra.Command, long string) *cobra.Command {
	c.Long = long
	return c
}

// protoJSON gives a message as one line of JSON, with the field names of
// directory.proto and every field present.
func protoJSON(m proto.Message) ([]byte, error) {
	b, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return nil, err
	}
	// protojson varies its spaces on purpose; output for scripts does not.
	var line bytes.Buffer
	if err := json.Compact(&line, b); err != nil {
		return nil, err
	}
	return line.Bytes(), nil
}

func (a *app) printProto(m proto.Message) error {
	b, err := protoJSON(m)
	if err != nil {
		return err
	}
	_, err = a.stdout.Write(append(b, '\n'))
	return err
}

// printStatus prints what st says, of a large store the short form unless all is true.
func (a *app) printStatus(st *dirpb.StatusReply, all bool) error {
	if a.json() {
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
	rows := []row{
		{"copies", fmt.Sprintf("%d of %d placement groups fully replicated", whole, pgs) +
			unusedText(len(m.GetPgs())-pgs)},
		{"directory", fmt.Sprintf("%d nodes, leader %s", len(st.GetDirectory()), leader)},
		{"memory nodes", nodesText(m.GetNodes())},
		{"memory", fmt.Sprintf("%s lent, %s in regions", bytesText(lent), registeredText(registered, used))},
		{"atomics", atomicsText(m.GetNodes())},
		{"namespaces", namespacesText(st)},
		{"shards", len(m.GetShards())},
		{"jobs", fmt.Sprintf("%d, of which %d are worked on and %d in trouble", len(st.GetJobs()), owned, troubled)},
		{"sessions", fmt.Sprintf("%d live, %d being fenced", live, len(st.GetSessions())-live)},
		{"status words", statusWordsText(st)},
		{"map version", m.GetVersion()},
		{"reclaim epoch", epochText(st)},
		{"access", accessText(st)},
	}
	if text := overview.PathsText(st); text != "" {
		rows = append(rows, row{"tcp in place of RDMA", text})
	}
	a.printTable(row{"Store", st.GetClusterId()}, rows)
	if sums := overview.Sums(memories); len(sums) > 0 {
		more := ""
		if n := len(sums); !all && n > shortRows {
			slices.SortStableFunc(sums, func(x, y *overview.Memory) int {
				return cmp.Compare(liveShare(y), liveShare(x))
			})
			sums, more = sums[:shortRows], fmt.Sprintf("the %d fullest of %d namespaces: kvctl status --all shows "+
				"every one", shortRows, n)
		}
		fmt.Fprintln(a.stdout)
		a.printTable(append(row{"Namespace"}, memoryHeader...), mapTo(sums, func(x *overview.Memory) row {
			return append(row{x.Namespace}, memoryRow(x)...)
		}))
		a.printMore(more)
	}
	a.printGroups(m, memories, all)
	if jobs := st.GetJobs(); len(jobs) > 0 {
		more := ""
		if n := len(jobs); !all && n > shortRows {
			cut := proto.CloneOf(st)
			cut.Jobs, st, more = cut.Jobs[:shortRows], cut, fmt.Sprintf("%d of %d jobs: kvctl jobs shows every one",
				shortRows, n)
		}
		fmt.Fprintln(a.stdout)
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

func (a *app) printMore(more string) {
	if more != "" {
		fmt.Fprintf(a.stdout, "%s\n", more)
	}
}

// printGroups lists the placement groups; in the short form of a large store those that lack something.
func (a *app) printGroups(m *dirpb.Map, memories []*overview.Memory, all bool) {
	v, of := newView(m), make(map[uint32]*overview.Memory)
	for _, x := range memories {
		of[x.PG] = x
	}
	cut := !all && len(m.GetPgs()) > shortRows
	var pgs []row
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
		pgs = append(pgs,
			append(row{p.GetId(), v.namespaces[p.GetNamespaceId()].GetName(), overview.StateText(m, p), p.GetEpoch(),
				overview.CopiesOf(m, p), v.members(p)}, fullness(of[p.GetId()])...))
	}
	if len(pgs) > 0 {
		fmt.Fprintln(a.stdout)
		a.printTable(row{"PG", "Namespace", "State", "Epoch", "Copies", "Members", "Live %", "Lost", "Short"}, pgs)
	}
	if cut {
		fmt.Fprintln(a.stdout)
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

// view answers questions about a map.
type view struct {
	nodes      map[uint32]*dirpb.Node
	namespaces map[uint32]*dirpb.Namespace
}

func newView(m *dirpb.Map) view {
	v := view{make(map[uint32]*dirpb.Node), make(map[uint32]*dirpb.Namespace)}
	for _, n := range m.GetNodes() {
		v.nodes[n.GetId()] = n
	}
	for _, ns := range m.GetNamespaces() {
		v.namespaces[ns.GetId()] = ns
	}
	return v
}

// members lists the chain from head to tail, and who is about to enter or
// has just left it.
func (v view) members(p *dirpb.PlacementGroup) string {
	var names []string
	for i, mb := range p.GetMembers() {
		name := v.nodes[mb.GetNodeId()].GetName()
		if p.GetJoining() && i == len(p.GetMembers())-1 {
			name += " (joining)"
		}
		names = append(names, name)
	}
	if mb := p.GetPlanned(); mb != nil {
		names = append(names, v.nodes[mb.GetNodeId()].GetName()+" (planned)")
	}
	if mb := p.GetLeaving(); mb != nil {
		names = append(names, v.nodes[mb.GetNodeId()].GetName()+" (leaving)")
	}
	return strings.Join(names, ", ")
}

func mapTo[T, U any](in []T, f func(T) U) []U {
	out := make([]U, len(in))
	for i, v := range in {
		out[i] = f(v)
	}
	return out
}

// short drops the prefix of an enum's name: "NODE_UP" is "up".
func short(e fmt.Stringer) string {
	s := e.String()
	for _, p := range []string{"NODE_STATE_", "NODE_", "PG_STATE_", "PG_", "NAMESPACE_MODE_", "NAMESPACE_",
		"SESSION_LIFE_", "SESSION_", "JOB_KIND_", "JOB_", "ATOMICS_BY_", "RIGHT_"} {
		if rest, ok := strings.CutPrefix(s, p); ok {
			return strings.ToLower(rest)
		}
	}
	return strings.ToLower(s)
}

func (a *app) printNodes(st *dirpb.StatusReply) error {
	nodes := st.GetMap().GetNodes()
	slices.SortFunc(nodes, func(x, y *dirpb.Node) int { return int(x.GetId()) - int(y.GetId()) })
	if a.json() {
		for _, n := range nodes {
			b, err := protoJSON(n)
			if err != nil {
				return err
			}
			var fabrics [][]byte // the leader alone knows them
			for _, f := range st.GetNodeStats()[n.GetId()].GetFabrics() {
				text, err := protoJSON(f)
				if err != nil {
					return err
				}
				fabrics = append(fabrics, text)
			}
			fmt.Fprintf(a.stdout, "%s,\"regions\":%d,\"registered_bytes\":\"%d\",\"fabrics\":[%s]}\n",
				bytes.TrimSuffix(b, []byte("}")), regionsOn(st.GetMap(), n.GetId()),
				overview.Registered(st.GetMap(), n), bytes.Join(fabrics, []byte(",")))
		}
		return nil
	}
	var rows []row
	for _, n := range nodes {
		var ends []string
		for _, e := range n.GetEndpoints() {
			ends = append(ends, endpointText(e))
		}
		rows = append(rows, row{n.GetId(), n.GetName(), overview.NodeState(n), yesNo(n.GetDraining()),
			regionsOn(st.GetMap(), n.GetId()), bytesText(n.GetCapacityBytes()),
			registeredText(overview.Registered(st.GetMap(), n), n.GetUsedBytes()),
			bootText(n), n.GetDomain(), strings.Join(ends, ", ")})
	}
	a.printTable(row{"ID", "Name", "State", "Draining", "Regions", "Lent", "In regions", "Boot", "Domain", "Endpoints"},
		rows)
	return nil
}

// registeredText is how much of regions is registered, if that is not all.
func registeredText(registered, used uint64) string {
	if registered == used {
		return bytesText(used)
	}
	return bytesText(registered) + " of " + bytesText(used)
}

// bootText is the number of a process whose memory the next one takes over; "-": it ends with this one.
func bootText(n *dirpb.Node) string {
	if !n.GetKeeps() {
		return "-"
	}
	return strconv.FormatUint(n.GetBoot(), 10)
}

// endpointText says who executes atomics if a CPU alone does not go without saying.
func endpointText(e *dirpb.Endpoint) string {
	s := e.GetProvider() + " " + e.GetAddr()
	if by := e.GetAtomics(); by > dirpb.AtomicsBy_ATOMICS_BY_CPU {
		s += " atomics=" + short(by)
	}
	return s
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

// printProtos prints one line of JSON a message.
func printProtos[M proto.Message](a *app, ms []M) error {
	for _, m := range ms {
		if err := a.printProto(m); err != nil {
			return err
		}
	}
	return nil
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

func (a *app) printShards(st *dirpb.StatusReply) error {
	m := st.GetMap()
	ns, err := a.ownNamespace(m)
	if err != nil {
		return err
	}
	v := newView(m)
	byPG := shardsOf(m, ns.GetId())
	if a.json() {
		for _, p := range overview.Groups(m, ns.GetId()) {
			if err := a.printProto(&dirpb.Map{Pgs: []*dirpb.PlacementGroup{p}, Shards: byPG[p.GetId()]}); err != nil {
				return err
			}
		}
		return nil
	}
	var rows []row
	for _, p := range overview.Groups(m, ns.GetId()) {
		shards := byPG[p.GetId()]
		slices.SortFunc(shards, func(x, y *dirpb.Shard) int { return int(x.GetPrefix()) - int(y.GetPrefix()) })
		for _, s := range shards {
			slots := uint64(s.GetSegments()) * (layout.SegmentGroups + 1) * layout.GroupSlots
			rows = append(rows, row{p.GetId(), overview.StateText(m, p), p.GetEpoch(), overview.CopiesOf(m, p),
				v.members(p), s.GetId(),
				fmt.Sprintf("%#x/%d", s.GetPrefix(), s.GetDepth()), fmt.Sprintf("%#x", s.GetOffset()), s.GetSegments(),
				slots, moveText(s)})
		}
		if len(shards) == 0 {
			rows = append(rows, row{p.GetId(), overview.StateText(m, p), p.GetEpoch(), overview.CopiesOf(m, p),
				v.members(p), "-", "-", "-", "-", "-", ""})
		}
	}
	a.printTable(row{"PG", "State", "Epoch", "Copies", "Members", "Shard", "Prefix", "Offset", "Segments", "Slots",
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

func (a *app) printStats(st *dirpb.StatusReply) error {
	if a.json() {
		// The map is what status prints.
		rest := proto.Clone(st).(*dirpb.StatusReply)
		rest.Map = nil
		return a.printStateJSON(st, rest)
	}
	fmt.Fprintf(a.stdout, "raft applied %d, reclaim epoch %s\n\n", st.GetRaftApplied(), epochText(st))
	a.printMemory(st)
	fmt.Fprintln(a.stdout)
	var rows []row
	for _, u := range st.GetUsage() {
		scrubbed := "never"
		if ms := u.GetLastScrubUnixMillis(); ms != 0 {
			scrubbed = a.now().Sub(time.UnixMilli(ms)).Round(time.Second).String() + " ago"
		}
		rows = append(rows, row{u.GetPgId(), bytesText(u.GetGrantedUnits() * layout.UnitSize),
			bytesText(u.GetReturnedUnits() * layout.UnitSize), percent(u.GetGrantedUnits(), u.GetHeapUnits()),
			bytesText(u.GetIndexBytesUsed()), bytesText(u.GetLeakedUnits() * layout.UnitSize), u.GetLeakedExtents(),
			scrubbed})
	}
	a.printTable(row{"PG", "Granted", "Returned", "Granted %", "Index used", "Leaked", "Leaking extents", "Scrubbed"},
		rows)
	fmt.Fprintln(a.stdout)

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
		rows = append(rows, row{names[id], s.GetConnections(), bytesText(s.GetRegisteredBytes()),
			time.Duration(s.GetDataPathCpuNanos()).Round(time.Microsecond)})
	}
	a.printTable(row{"Memory node", "Connections", "Registered", "CPU on the data path"}, rows)
	fmt.Fprintln(a.stdout)

	rows = nil
	for _, s := range st.GetSessions() {
		rows = append(rows, row{s.GetId(), s.GetClient(), s.GetNamespace(), short(s.GetLife()),
			(time.Duration(s.GetAgeMillis()) * time.Millisecond).Round(time.Second), s.GetReportEpoch()})
	}
	a.printTable(row{"Session", "Client", "Namespace", "State", "Age", "Reclaim epoch"}, rows)
	return nil
}

func percent(n, of uint64) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", float64(n)/float64(of)*100)
}
