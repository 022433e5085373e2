package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
)

func (a *app) addClusterCommands(root *cobra.Command) {
	for _, c := range append(a.operateCommands(),
		a.statusCommand(),
		a.nodesCommand(),
		a.shardsCommand(),
		explained(a.viewCommand("stats", "Show what the directory counts: memory, sessions, memory nodes", a.printStats),
			"Show what the directory counts: the memory of each placement group, sessions, memory nodes.\n\n"+memoryHelp),
		a.statCommand(), a.topCommand(),
		a.namespaceCommand(), a.whoAmICommand(), a.directoryCommand(), a.certsCommand(), a.tokenKeysCommand(), a.auditCommand(), a.supportCommand(),
	) {
		c.GroupID = "cluster"
		root.AddCommand(c)
	}
}

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
	var lent, used uint64
	for _, n := range m.GetNodes() {
		if n.GetState() == dirpb.NodeState_NODE_UP {
			lent += n.GetCapacityBytes()
			used += n.GetUsedBytes()
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
	a.printTable(row{"Store", st.GetClusterId()}, []row{
		{"copies", fmt.Sprintf("%d of %d placement groups fully replicated", whole, pgs) + unusedText(len(m.GetPgs())-pgs)},
		{"directory", fmt.Sprintf("%d nodes, leader %s", len(st.GetDirectory()), leader)},
		{"memory nodes", nodesText(m.GetNodes())},
		{"memory", fmt.Sprintf("%s lent, %s in regions", bytesText(lent), bytesText(used))},
		{"atomics", atomicsText(m.GetNodes())},
		{"namespaces", namespacesText(st)},
		{"shards", len(m.GetShards())},
		{"jobs", fmt.Sprintf("%d, of which %d are worked on and %d in trouble", len(st.GetJobs()), owned, troubled)},
		{"sessions", fmt.Sprintf("%d live, %d being fenced", live, len(st.GetSessions())-live)},
		{"status words", statusWordsText(st)},
		{"map version", m.GetVersion()},
		{"reclaim epoch", epochText(st)},
		{"access", accessText(st)},
	})
	if sums := overview.Sums(memories); len(sums) > 0 {
		more := ""
		if n := len(sums); !all && n > shortRows {
			slices.SortStableFunc(sums, func(x, y *overview.Memory) int { return cmp.Compare(liveShare(y), liveShare(x)) })
			sums, more = sums[:shortRows], fmt.Sprintf("the %d fullest of %d namespaces: kvctl status --all shows every one", shortRows, n)
		}
		fmt.Fprintln(a.stdout)
		a.printTable(append(row{"Namespace"}, memoryHeader...), mapTo(sums, func(x *overview.Memory) row { return append(row{x.Namespace}, memoryRow(x)...) }))
		a.printMore(more)
	}
	a.printGroups(m, memories, all)
	if jobs := st.GetJobs(); len(jobs) > 0 {
		more := ""
		if n := len(jobs); !all && n > shortRows {
			cut := proto.CloneOf(st)
			cut.Jobs, st, more = cut.Jobs[:shortRows], cut, fmt.Sprintf("%d of %d jobs: kvctl jobs shows every one", shortRows, n)
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
		pgs = append(pgs, append(row{p.GetId(), v.namespaces[p.GetNamespaceId()].GetName(), overview.StateText(m, p), p.GetEpoch(), overview.CopiesOf(m, p), v.members(p)}, fullness(of[p.GetId()])...))
	}
	if len(pgs) > 0 {
		fmt.Fprintln(a.stdout)
		a.printTable(row{"PG", "Namespace", "State", "Epoch", "Copies", "Members", "Live %", "Lost", "Short"}, pgs)
	}
	if cut {
		fmt.Fprintln(a.stdout)
		a.printMore(fmt.Sprintf("%d placement groups, of which %d lack something, the fullest %.1f %% live: kvctl status --all shows every one", len(m.GetPgs()), lacking, fullest))
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
	for _, x := range []struct{ title, state string }{{"draining", "draining"}, {"restarting", "restarting"}, {"waiting for", "silent"}} {
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
	for _, p := range []string{"NODE_STATE_", "NODE_", "PG_STATE_", "PG_", "NAMESPACE_MODE_", "NAMESPACE_", "SESSION_LIFE_", "SESSION_", "JOB_KIND_", "JOB_", "ATOMICS_BY_", "RIGHT_"} {
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
			fmt.Fprintf(a.stdout, "%s,\"regions\":%d}\n", bytes.TrimSuffix(b, []byte("}")), regionsOn(st.GetMap(), n.GetId()))
		}
		return nil
	}
	var rows []row
	for _, n := range nodes {
		var ends []string
		for _, e := range n.GetEndpoints() {
			ends = append(ends, endpointText(e))
		}
		rows = append(rows, row{n.GetId(), n.GetName(), overview.NodeState(n), yesNo(n.GetDraining()), regionsOn(st.GetMap(), n.GetId()), bytesText(n.GetCapacityBytes()), bytesText(n.GetUsedBytes()),
			bootText(n), n.GetDomain(), strings.Join(ends, ", ")})
	}
	a.printTable(row{"ID", "Name", "State", "Draining", "Regions", "Lent", "In regions", "Boot", "Domain", "Endpoints"}, rows)
	return nil
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
			rows = append(rows, row{p.GetId(), overview.StateText(m, p), p.GetEpoch(), overview.CopiesOf(m, p), v.members(p), s.GetId(),
				fmt.Sprintf("%#x/%d", s.GetPrefix(), s.GetDepth()), fmt.Sprintf("%#x", s.GetOffset()), s.GetSegments(), slots, moveText(s)})
		}
		if len(shards) == 0 {
			rows = append(rows, row{p.GetId(), overview.StateText(m, p), p.GetEpoch(), overview.CopiesOf(m, p), v.members(p), "-", "-", "-", "-", "-", ""})
		}
	}
	a.printTable(row{"PG", "State", "Epoch", "Copies", "Members", "Shard", "Prefix", "Offset", "Segments", "Slots", "Move"}, rows)
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
			bytesText(u.GetIndexBytesUsed()), bytesText(u.GetLeakedUnits() * layout.UnitSize), u.GetLeakedExtents(), scrubbed})
	}
	a.printTable(row{"PG", "Granted", "Returned", "Granted %", "Index used", "Leaked", "Leaking extents", "Scrubbed"}, rows)
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

// ---- namespaces ------------------------------------------------------------

func (a *app) namespaceCommand() *cobra.Command {
	c := &cobra.Command{Use: "namespace", Short: "Create, change, share, delete and list namespaces", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	req := &dirpb.CreateNamespaceRequest{}
	var mode, size, limit string
	var ifNotExists bool
	var quota quotaFlags
	create := changes(&cobra.Command{
		Use:   "create NAME",
		Short: "Create a namespace",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Name = args[0]
			switch mode {
			case "store":
				req.Mode = dirpb.NamespaceMode_NAMESPACE_STORE
			case "cache":
				req.Mode = dirpb.NamespaceMode_NAMESPACE_CACHE
			default:
				return usagef("--mode %q: want store or cache", mode)
			}
			var err error
			if req.BytesPerNode, err = parseBytes(size); err != nil {
				return usagef("--bytes: %w", err)
			}
			if req.LimitBytes, err = parseBytes(limit); err != nil {
				return usagef("--limit: %w", err)
			}
			if err := quota.check(); err != nil {
				return err
			}
			req.Owner = quota.owner
			if req.Quota, err = quota.quota(nil); err != nil {
				return err
			}
			return a.withBackend(func(b backend) error {
				var rep *dirpb.CreateNamespaceReply
				err := b.Directory(cmd.Context(), ifNotExists, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
					rep, err = d.CreateNamespace(ctx, req)
					return err
				})
				if ifNotExists && status.Code(err) == codes.AlreadyExists {
					ns, err := existing(cmd.Context(), b, req)
					if err != nil {
						return err
					}
					return a.printNamespaces([]*dirpb.Namespace{ns})
				}
				if err != nil {
					return fmt.Errorf("%q: %w", req.Name, err)
				}
				a.warnOfLimit(cmd.Context(), b, rep.GetNamespace())
				return a.printNamespaces([]*dirpb.Namespace{rep.GetNamespace()})
			})
		},
	})
	f := create.Flags()
	f.BoolVar(&ifNotExists, "if-not-exists", false, "leave a namespace as it is that exists with this mode, and this number of copies if one is given")
	f.Uint32Var(&req.Replicas, "replicas", 0, "copies of every record; 0: 2 if two memory nodes exist, else 1")
	f.StringVar(&mode, "mode", "store", "store (full is an error) or cache (full evicts)")
	f.Uint32Var(&req.Nodes, "nodes", 0, "memory nodes to be on, for good; 0: as many as its limit needs, or 8 without one, and further ones as it fills; all, if there are no more than 8")
	f.StringVar(&size, "bytes", "0", "memory on each node, such as 512MiB or 4GiB; 0 for half of what is free")
	quota.add(f)
	f.StringVar(&limit, "limit", "0", "memory that all keys together may take, each copy counted once; 0: all there is")
	f.Uint32Var(&req.Shards, "shards", 0, "shards to begin with, a power of two; 0: chosen")
	f.Uint32Var(&req.Segments, "segments", 0, "segments that each shard begins with; 0: an eighth of the index in all")
	f.Uint32Var(&req.IndexPercent, "index-percent", 0, "share of the memory for the index, in which shards grow and split as they fill; 0: chosen")
	_ = create.RegisterFlagCompletionFunc("mode", cobra.FixedCompletions([]string{"store", "cache"}, cobra.ShellCompDirectiveNoFileComp))
	c.AddCommand(create, a.namespaceSetCommand(), a.namespaceGrantCommand(), a.namespaceRevokeCommand(), a.namespaceShowCommand(), a.namespaceDeleteCommand(), a.acceptLossCommand(), a.viewCommand("list", "List namespaces", func(st *dirpb.StatusReply) error {
		return a.printNamespaces(st.GetMap().GetNamespaces())
	}))
	return c
}

func (a *app) acceptLossCommand() *cobra.Command {
	return changes(&cobra.Command{
		Use:   "accept-loss NAME",
		Short: "Say that you know what a namespace lost",
		Long: "A placement group that lost all its copies is empty once its memory node is back, and\n" +
			"looks like any other. kvctl status, the page and an alert (KvdDataLost) say what was lost until this\n" +
			"command accepts it. It prints what it accepts. kvd_directory_lost_total goes on counting.",
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.complete(func(st *dirpb.StatusReply) []string {
			return mapTo(st.GetMap().GetNamespaces(), (*dirpb.Namespace).GetName)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withBackend(func(b backend) error { return a.acceptLoss(cmd.Context(), b, args[0]) })
		},
	})
}

func (a *app) acceptLoss(ctx context.Context, b backend, name string) error {
	st, err := clusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := namespaceOf(st.GetMap(), name)
	if err != nil {
		return err
	}
	// It names the count that is shown here, so it may be repeated.
	err = b.Directory(ctx, true, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.AcceptLoss(ctx, &dirpb.AcceptLossRequest{Name: name, Lost: ns.GetLost()})
		return err
	})
	if err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	if a.json() {
		return printProtos(a, ns.GetLosses())
	}
	a.printTable(row{"PG", "Times", "Last", "Memory node", "Held"}, mapTo(ns.GetLosses(), func(l *dirpb.Loss) row {
		return row{l.GetPgId(), l.GetTimes(), time.UnixMilli(l.GetUnixMillis()).UTC().Format(time.RFC3339), l.GetNode(), bytesText(l.GetHeldBytes())}
	}))
	return nil
}

// existing gives the namespace that req asks for, if it is of the kind that req asks for:
// what cannot be changed later.
func existing(ctx context.Context, b backend, req *dirpb.CreateNamespaceRequest) (*dirpb.Namespace, error) {
	st, err := clusterStatus(ctx, b)
	if err != nil {
		return nil, err
	}
	ns, err := namespaceOf(st.GetMap(), req.GetName())
	if err != nil {
		return nil, err
	}
	if ns.GetMode() != req.GetMode() || req.GetReplicas() != 0 && ns.GetReplicas() != req.GetReplicas() {
		want := fmt.Sprintf("mode %s", short(req.GetMode()))
		if req.GetReplicas() != 0 {
			want += fmt.Sprintf(" and %d copies", req.GetReplicas())
		}
		return nil, &exitError{exitNo, fmt.Errorf("%q exists with mode %s and %d copies, want %s", ns.GetName(), short(ns.GetMode()), ns.GetReplicas(), want)}
	}
	if req.GetOwner() != "" && ns.GetOwner() != req.GetOwner() {
		return nil, &exitError{exitNo, fmt.Errorf("%q exists and belongs to %q, want %q", ns.GetName(), ns.GetOwner(), req.GetOwner())}
	}
	return ns, nil
}

func (a *app) printNamespaces(ns []*dirpb.Namespace) error {
	if a.json() {
		return printProtos(a, ns)
	}
	header := row{"ID", "Name", "Mode", "Replicas", "Bytes a node", "Limit", "Format", "Owner"}
	some := slices.ContainsFunc(ns, func(n *dirpb.Namespace) bool { return n.GetNodes() != 0 })
	if some {
		header = append(header, "Nodes")
	}
	a.printTable(header, mapTo(ns, func(n *dirpb.Namespace) row {
		limit := "-"
		if n.GetLimitBytes() != 0 {
			limit = bytesText(n.GetLimitBytes())
		}
		name := n.GetName()
		if n.GetDeleting() {
			name += " (being deleted)"
		}
		if n.GetRebalancing() == dirpb.Rebalancing_REBALANCING_ON {
			name += " (being rebalanced)"
		}
		nodes := "all"
		if n.GetNodes() != 0 {
			nodes = strconv.FormatUint(uint64(n.GetNodes()), 10)
			if n.GetGrows() {
				nodes += ", grows"
			}
		}
		r := row{n.GetId(), name, short(n.GetMode()), n.GetReplicas(), bytesText(n.GetBytesPerNode()), limit, n.GetFormat(), cmp.Or(n.GetOwner(), "-")}
		if some {
			r = append(r, nodes)
		}
		return r
	}))
	return nil
}

// parseBytes reads "4096", "64KiB", "1.5GiB"; KB, MB and GB mean the same.
func parseBytes(s string) (uint64, error) {
	num := strings.TrimRight(strings.TrimSpace(s), "KMGTiBkmgtb ")
	unit := strings.ToUpper(strings.TrimSpace(s)[len(num):])
	unit = strings.TrimSuffix(strings.TrimSuffix(strings.TrimSpace(unit), "B"), "I")
	shift, ok := map[string]uint{"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[unit]
	v, err := strconv.ParseFloat(num, 64)
	if err != nil || !ok || !(v >= 0) || v*float64(uint64(1)<<shift) >= 1<<62 {
		return 0, fmt.Errorf("%q: want a number of bytes, such as 4096, 512MiB or 4GiB", s)
	}
	return uint64(v * float64(uint64(1)<<shift)), nil
}

// ---- directory -------------------------------------------------------------

func (a *app) directoryCommand() *cobra.Command {
	c := &cobra.Command{Use: "directory", Short: "List, remove and recover directory nodes", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	c.AddCommand(a.viewCommand("list", "List directory nodes", func(st *dirpb.StatusReply) error {
		if a.json() {
			return printProtos(a, st.GetDirectory())
		}
		a.printTable(row{"ID", "Raft", "gRPC", "Role"}, mapTo(st.GetDirectory(), func(d *dirpb.DirectoryNode) row {
			role := "learner"
			if d.GetLeader() {
				role = "leader"
			} else if d.GetVoter() {
				role = "voter"
			}
			return row{d.GetId(), d.GetRaftAddr(), d.GetGrpcAddr(), role}
		}))
		return nil
	}), a.viewCommand("join-info", "Print what another directory node needs to join this store", func(st *dirpb.StatusReply) error {
		addrs := mapTo(st.GetDirectory(), (*dirpb.DirectoryNode).GetGrpcAddr)
		if a.json() {
			return a.printJSON(map[string]any{"cluster_id": st.GetClusterId(), "join": addrs})
		}
		fmt.Fprintf(a.stdout, "cluster  %s\njoin     %s\n", visible(st.GetClusterId()), visible(strings.Join(addrs, ",")))
		return nil
	}), a.removeDirectoryCommand(), a.recoverCommand())
	return c
}

func (a *app) removeDirectoryCommand() *cobra.Command {
	var force bool
	c := changes(&cobra.Command{
		Use:   "remove ID",
		Short: "Remove a directory node, which should be stopped",
		Long: "Remove a directory node from the store; if it runs, it stops. It is refused if those that are left\n" +
			"and answer would be no majority, since nothing could be decided any more. --force removes it all the same.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withBackend(func(b backend) error {
				err := b.Directory(cmd.Context(), false, func(ctx context.Context, d dirpb.DirectoryClient) error {
					_, err := d.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: args[0], Force: force})
					return err
				})
				if err != nil {
					return fmt.Errorf("%q: %w", args[0], err)
				}
				return nil
			})
		},
	})
	c.Flags().BoolVar(&force, "force", false, "also if those that are left and answer are no majority")
	return c
}
