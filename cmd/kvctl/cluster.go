package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

func (a *app) addClusterCommands(root *cobra.Command) {
	for _, c := range []*cobra.Command{
		a.viewCommand("status", "Show the state of the store at a glance", a.printStatus),
		a.viewCommand("nodes", "List memory nodes", a.printNodes),
		a.viewCommand("shards", "List the namespace's placement groups and shards", a.printShards),
		a.viewCommand("stats", "Show what the directory counts: memory, sessions, memory nodes", a.printStats),
		a.namespaceCommand(), a.directoryCommand(),
	} {
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
				st, err := clusterStatus(cmd.Context(), b)
				if err != nil {
					return err
				}
				return print(st)
			})
		},
	}
}

// printProto prints a message as one line of JSON, with the field names of
// directory.proto and every field present.
func (a *app) printProto(m proto.Message) error {
	b, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return err
	}
	// protojson varies its spaces on purpose; output for scripts does not.
	var line bytes.Buffer
	if err := json.Compact(&line, b); err != nil {
		return err
	}
	line.WriteByte('\n')
	_, err = a.stdout.Write(line.Bytes())
	return err
}

func (a *app) printStatus(st *dirpb.StatusReply) error {
	if a.json() {
		return a.printProto(st)
	}
	m := st.GetMap()
	leader := "none"
	for _, d := range st.GetDirectory() {
		if d.GetLeader() {
			leader = d.GetId()
		}
	}
	up := 0
	var lent, used uint64
	for _, n := range m.GetNodes() {
		if n.GetState() == dirpb.NodeState_NODE_UP {
			up++
			lent += n.GetCapacityBytes()
			used += n.GetUsedBytes()
		}
	}
	active := 0
	for _, p := range m.GetPgs() {
		if p.GetState() == dirpb.PGState_PG_ACTIVE {
			active++
		}
	}
	live := 0
	for _, s := range st.GetSessions() {
		if s.GetLife() == dirpb.SessionLife_SESSION_LIVE {
			live++
		}
	}
	a.printTable(row{"Store", st.GetClusterId()}, []row{
		{"directory", fmt.Sprintf("%d nodes, leader %s", len(st.GetDirectory()), leader)},
		{"memory nodes", fmt.Sprintf("%d up, %d down", up, len(m.GetNodes())-up)},
		{"memory", fmt.Sprintf("%s lent, %s in regions", bytesText(lent), bytesText(used))},
		{"namespaces", strings.Join(mapTo(m.GetNamespaces(), (*dirpb.Namespace).GetName), ", ")},
		{"placement groups", fmt.Sprintf("%d active, %d not", active, len(m.GetPgs())-active)},
		{"shards", len(m.GetShards())},
		{"sessions", fmt.Sprintf("%d live, %d being fenced", live, len(st.GetSessions())-live)},
		{"map version", m.GetVersion()},
		{"reclaim epoch", fmt.Sprintf("%d, minimum %d", st.GetEpoch(), st.GetMinEpoch())},
	})
	return nil
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
	for _, p := range []string{"NODE_STATE_", "NODE_", "PG_STATE_", "PG_", "NAMESPACE_MODE_", "NAMESPACE_", "SESSION_LIFE_", "SESSION_"} {
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
		return printProtos(a, nodes)
	}
	var rows []row
	for _, n := range nodes {
		var ends []string
		for _, e := range n.GetEndpoints() {
			ends = append(ends, e.GetProvider()+" "+e.GetAddr())
		}
		rows = append(rows, row{n.GetId(), n.GetName(), short(n.GetState()), bytesText(n.GetCapacityBytes()), bytesText(n.GetUsedBytes()),
			n.GetDomain(), strings.Join(ends, ", ")})
	}
	a.printTable(row{"ID", "Name", "State", "Lent", "In regions", "Domain", "Endpoints"}, rows)
	return nil
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

// pgsOf lists the placement groups of a namespace by id.
func pgsOf(m *dirpb.Map, ns uint32) []*dirpb.PlacementGroup {
	var out []*dirpb.PlacementGroup
	for _, p := range m.GetPgs() {
		if p.GetNamespaceId() == ns {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(x, y *dirpb.PlacementGroup) int { return int(x.GetId()) - int(y.GetId()) })
	return out
}

func (a *app) printShards(st *dirpb.StatusReply) error {
	m := st.GetMap()
	ns, err := namespaceOf(m, a.namespace)
	if err != nil {
		return err
	}
	names := make(map[uint32]string)
	for _, n := range m.GetNodes() {
		names[n.GetId()] = n.GetName()
	}
	byPG := shardsOf(m, ns.GetId())
	if a.json() {
		for _, p := range pgsOf(m, ns.GetId()) {
			if err := a.printProto(&dirpb.Map{Pgs: []*dirpb.PlacementGroup{p}, Shards: byPG[p.GetId()]}); err != nil {
				return err
			}
		}
		return nil
	}
	var rows []row
	for _, p := range pgsOf(m, ns.GetId()) {
		members := mapTo(p.GetMembers(), func(mb *dirpb.Member) string { return names[mb.GetNodeId()] })
		shards := byPG[p.GetId()]
		slices.SortFunc(shards, func(x, y *dirpb.Shard) int { return int(x.GetPrefix()) - int(y.GetPrefix()) })
		for _, s := range shards {
			slots := uint64(s.GetClusters()) * (layout.ClusterGroups + 1) * layout.GroupSlots
			rows = append(rows, row{p.GetId(), short(p.GetState()), p.GetEpoch(), strings.Join(members, ", "), s.GetId(),
				fmt.Sprintf("%#x/%d", s.GetPrefix(), s.GetDepth()), fmt.Sprintf("%#x", s.GetOffset()), s.GetClusters(), slots})
		}
		if len(shards) == 0 {
			rows = append(rows, row{p.GetId(), short(p.GetState()), p.GetEpoch(), strings.Join(members, ", "), "-", "-", "-", "-", "-"})
		}
	}
	a.printTable(row{"PG", "State", "Epoch", "Members", "Shard", "Prefix", "Offset", "Clusters", "Slots"}, rows)
	return nil
}

func (a *app) printStats(st *dirpb.StatusReply) error {
	if a.json() {
		// The map is what status prints.
		rest := proto.Clone(st).(*dirpb.StatusReply)
		rest.Map = nil
		return a.printProto(rest)
	}
	fmt.Fprintf(a.stdout, "raft applied %d, reclaim epoch %d, minimum %d\n\n", st.GetRaftApplied(), st.GetEpoch(), st.GetMinEpoch())
	var rows []row
	for _, u := range st.GetUsage() {
		h := u.GetHeapUnits() * layout.UnitSize
		rows = append(rows, row{u.GetPgId(), bytesText(h), bytesText(u.GetGrantedUnits() * layout.UnitSize),
			bytesText(u.GetReturnedUnits() * layout.UnitSize), percent(u.GetGrantedUnits(), u.GetHeapUnits())})
	}
	a.printTable(row{"PG", "Heap", "Granted", "Returned", "Granted %"}, rows)
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
	a.printTable(row{"Session", "Client", "Namespace", "State", "Age", "Reported epoch"}, rows)
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
	c := &cobra.Command{Use: "namespace", Short: "Create and list namespaces", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	req := &dirpb.CreateNamespaceRequest{}
	var mode, size string
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
			return a.withBackend(func(b backend) error {
				var rep *dirpb.CreateNamespaceReply
				err := b.Directory(cmd.Context(), false, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
					rep, err = d.CreateNamespace(ctx, req)
					return err
				})
				if err != nil {
					return fmt.Errorf("%q: %w", req.Name, err)
				}
				return a.printNamespaces([]*dirpb.Namespace{rep.GetNamespace()})
			})
		},
	})
	f := create.Flags()
	f.Uint32Var(&req.Replicas, "replicas", 1, "copies of every record")
	f.StringVar(&mode, "mode", "store", "store (full is an error) or cache (full evicts)")
	f.StringVar(&size, "bytes", "0", "memory on each node, such as 512MiB or 4GiB; 0 for half of what is free")
	f.Uint32Var(&req.Shards, "shards", 0, "shards to begin with; 0: chosen")
	f.Uint32Var(&req.IndexPercent, "index-percent", 0, "share of the memory for the index; 0: chosen")
	_ = create.RegisterFlagCompletionFunc("mode", cobra.FixedCompletions([]string{"store", "cache"}, cobra.ShellCompDirectiveNoFileComp))
	c.AddCommand(create, a.viewCommand("list", "List namespaces", func(st *dirpb.StatusReply) error {
		return a.printNamespaces(st.GetMap().GetNamespaces())
	}))
	return c
}

func (a *app) printNamespaces(ns []*dirpb.Namespace) error {
	if a.json() {
		return printProtos(a, ns)
	}
	a.printTable(row{"ID", "Name", "Mode", "Replicas", "Bytes a node", "Format"}, mapTo(ns, func(n *dirpb.Namespace) row {
		return row{n.GetId(), n.GetName(), short(n.GetMode()), n.GetReplicas(), bytesText(n.GetBytesPerNode()), n.GetFormat()}
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
	c := &cobra.Command{Use: "directory", Short: "List and remove directory nodes", Args: cobra.NoArgs,
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
		fmt.Fprintf(a.stdout, "cluster  %s\njoin     %s\n", st.GetClusterId(), strings.Join(addrs, ","))
		return nil
	}), changes(&cobra.Command{
		Use:   "remove ID",
		Short: "Remove a directory node, which should be stopped",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withBackend(func(b backend) error {
				err := b.Directory(cmd.Context(), false, func(ctx context.Context, d dirpb.DirectoryClient) error {
					_, err := d.RemoveDirectory(ctx, &dirpb.RemoveDirectoryRequest{Id: args[0]})
					return err
				})
				if err != nil {
					return fmt.Errorf("%q: %w", args[0], err)
				}
				return nil
			})
		},
	}))
	return c
}
