package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/server"
)

// auditShown is how many of the latest changes the page shows.
const auditShown = 20

// directoryPage is what the directory's leader knows, for people; if there is none, what
// this node does. used is what the process's clients know of namespaces.
func directoryPage(d *server.Node, used func() map[string]use) func(context.Context) (httpd.Page, error) {
	var jobs paces
	return func(ctx context.Context) (httpd.Page, error) {
		st, err := d.ClusterStatus(ctx, &dirpb.StatusRequest{})
		if err != nil {
			return httpd.Page{}, err
		}
		p := clusterPage(st, jobs.left(st, time.Now()), used())
		if a, err := d.Audit(ctx, &dirpb.AuditRequest{Limit: auditShown}); err == nil { // the leader's alone
			p.Tables = append(p.Tables, auditTable(a))
		}
		return p, nil
	}
}

// clusterPage shows st, and how long each job will take, as far as that is known.
func clusterPage(st *dirpb.StatusReply, left map[uint32]time.Duration, used map[string]use) httpd.Page {
	line, mend := overview.Summary(st)
	pictures := []httpd.Picture{namespacesPicture(st), nodesPicture(st), groupsPicture(st), shardsPicture(st)}
	if len(st.GetJobs()) > 0 {
		pictures = append([]httpd.Picture{jobsPicture(st, left)}, pictures...)
	}
	return httpd.Page{
		Health:   httpd.Health{Well: overview.VerdictOf(st) == overview.Healthy, Text: line, Mend: mend},
		Pictures: pictures,
		Lead:     1,
		Tables: []httpd.Table{namespacesTable(st, used), problemsTable(st), nodesTable(st), membersTable(st),
			memoryTable(st), groupsTable(st), shardsTable(st), jobsTable(st, left), tenantsTable(st),
			sessionsTable(st)},
	}
}

// memoryParts are the parts of a heap. Where only the leader would know more, all that is granted is one of them.
func memoryParts(m *overview.Memory) []httpd.Part {
	var parts []httpd.Part
	if m.Known {
		parts = []httpd.Part{part("live", m.Live), part("free", m.Free+m.Foreign), part("limbo", m.Limbo),
			part("coming", m.Coming), part("lost", m.Lost)}
	} else {
		parts = []httpd.Part{part("granted", m.Granted)}
	}
	return append(parts, part("waiting", m.Waiting), part("room", m.Room))
}

func part(kind string, n uint64) httpd.Part {
	return httpd.Part{Kind: kind, Size: float64(n), Text: kind + " " + units.Rounded(n)}
}

func namespacesPicture(st *dirpb.StatusReply) httpd.Picture {
	p := httpd.Picture{Title: "Memory of each namespace"}
	of := make(map[string]*overview.Memory)
	for _, m := range overview.Sums(overview.Memories(st)) {
		of[m.Namespace] = m
	}
	for _, ns := range overview.Namespaces(st) {
		b := httpd.Bar{Label: ns.Name, Bad: ns.Losses > 0 || ns.Missing > 0,
			Note: fmt.Sprintf("%s, copies: %d, shards: %d, sessions: %d", ns.Mode, ns.Replicas, ns.Shards, ns.Live)}
		if m := of[ns.Name]; m != nil {
			b.Parts = memoryParts(m)
			if m.Known && m.Heap > 0 {
				b.Note += fmt.Sprintf(", %s of %s live", units.Rounded(m.Live), units.Rounded(m.Heap))
			}
		}
		p.Bars = append(p.Bars, b)
	}
	return p
}

func nodesPicture(st *dirpb.StatusReply) httpd.Picture {
	p := httpd.Picture{Title: "Memory of each node"}
	for _, n := range overview.NodeMemories(st) {
		state := nodeState(n.Node)
		parts := append([]httpd.Part{part("index", n.Index)}, memoryParts(&n.Memory)...)
		p.Bars = append(p.Bars, httpd.Bar{Label: n.Node.GetName(), Note: state + ", lends " +
			units.Rounded(n.Node.GetCapacityBytes()), Bad: state == "down" || state == "silent",
			Parts: append(parts, part("other", n.Other), part("spare", n.Spare))})
	}
	return p
}

// groupsPicture has those first that lack something. A group without a copy has no memory to show.
func groupsPicture(st *dirpb.StatusReply) httpd.Picture {
	p := httpd.Picture{Title: "Placement groups"}
	var well []httpd.Bar
	members, of := overview.Members(st.GetMap()), make(map[uint32]*overview.Memory)
	for _, m := range overview.Memories(st) {
		of[m.PG] = m
	}
	for _, g := range sortedGroups(st) {
		lacks := overview.Lacks(st.GetMap(), g)
		b := httpd.Bar{Label: fmt.Sprintf("%d: %s", g.GetId(), cmp.Or(members(g), "nowhere")), Note: lacks,
			Bad: lacks != ""}
		if m := of[g.GetId()]; m != nil {
			b.Label = m.Namespace + " " + b.Label
			if overview.Copies(g) > 0 {
				b.Parts = memoryParts(m)
			}
		}
		if b.Bad {
			p.Bars = append(p.Bars, b)
		} else {
			well = append(well, b)
		}
	}
	p.Bars = append(p.Bars, well...)
	return p
}

func sortedGroups(st *dirpb.StatusReply) []*dirpb.PlacementGroup {
	return slices.SortedFunc(slices.Values(st.GetMap().GetPgs()), func(a, b *dirpb.PlacementGroup) int {
		return cmp.Compare(a.GetId(), b.GetId())
	})
}

// tableOf has the facts of each of all that columns have, as kvctl shows them.
func tableOf[T any](title string, columns overview.Columns[T], all []T) httpd.Table {
	t := httpd.Table{Title: title, Header: columns.Heads()}
	for _, x := range all {
		t.Rows = append(t.Rows, columns.Texts(x))
	}
	return t
}

func groupsTable(st *dirpb.StatusReply) httpd.Table {
	return tableOf("Placement groups", overview.GroupColumns(st), sortedGroups(st))
}

// shardsPicture has the hash space of each namespace, from hash 0 on.
func shardsPicture(st *dirpb.StatusReply) httpd.Picture {
	p := httpd.Picture{Title: "Shards over the hash space"}
	for _, n := range st.GetMap().GetNamespaces() {
		spans := overview.Spans(st.GetMap(), n.GetId())
		b := httpd.Bar{Label: n.GetName()}
		moving := 0
		for i, s := range spans {
			kind := "shard"
			if i%2 == 1 {
				kind = "next" // so that one sees where a shard ends
			}
			text := fmt.Sprintf("shard %d, %s in placement group %d", s.Shard.GetId(), hashes(s.Shard),
				s.Shard.GetPgId())
			if v := s.Shard.GetMove(); v != nil {
				moving++
				kind = "moving"
				if v.GetSplit() {
					kind = "splitting"
				}
				text += fmt.Sprintf(", %s to placement group %d", kind, v.GetPgId())
			}
			b.Parts = append(b.Parts, httpd.Part{Kind: kind, Size: s.To - s.From, Text: text})
		}
		b.Note = fmt.Sprintf("%d shards, %d of them split or move", len(spans), moving)
		p.Bars = append(p.Bars, b)
	}
	return p
}

// hashes says which ones a shard has: the bits that they begin with.
func hashes(s *dirpb.Shard) string {
	if s.GetDepth() == 0 {
		return "all hashes"
	}
	return fmt.Sprintf("hashes %0*b…", s.GetDepth(), s.GetPrefix())
}

func shardsTable(st *dirpb.StatusReply) httpd.Table {
	t := httpd.Table{Title: "Shards", Header: []string{"namespace", "id", "hashes", "placement group", "moves"}}
	for _, n := range st.GetMap().GetNamespaces() {
		for _, s := range overview.Spans(st.GetMap(), n.GetId()) {
			moves := "-"
			if v := s.Shard.GetMove(); v != nil {
				moves = fmt.Sprintf("to placement group %d", v.GetPgId())
				if v.GetSplit() {
					moves = "half of it " + moves
				}
			}
			t.Rows = append(t.Rows, []string{n.GetName(), strconv.Itoa(int(s.Shard.GetId())), hashes(s.Shard),
				strconv.Itoa(int(s.Shard.GetPgId())), moves})
		}
	}
	return t
}

// tenantsTable says whose the namespaces are, and what they may take.
func tenantsTable(st *dirpb.StatusReply) httpd.Table {
	t := httpd.Table{Title: "Tenants", Header: []string{"namespace", "owner", "others", "memory at most", "sessions",
		"lanes", "verbs a second over tcp", "index"}}
	most := func(n uint64, s string) string {
		if n == 0 {
			return "-"
		}
		return s
	}
	number := func(n uint64) string { return most(n, strconv.FormatUint(n, 10)) }
	for _, n := range st.GetMap().GetNamespaces() {
		var others []string
		for _, x := range n.GetAccess() {
			others = append(others, x.GetWho()+" ("+rightText(x.GetRight())+")")
		}
		q := n.GetQuota()
		t.Rows = append(t.Rows, []string{n.GetName(), cmp.Or(n.GetOwner(), "everybody"),
			cmp.Or(strings.Join(others, ", "), "-"), most(n.GetLimitBytes(), units.Rounded(n.GetLimitBytes())),
			number(uint64(q.GetSessions())), number(uint64(q.GetLanes())), number(q.GetTcpOpsPerSecond()),
			most(q.GetIndexBytes(), units.Rounded(q.GetIndexBytes()))})
	}
	return t
}

// sessionsTable has those first that are being fenced.
func sessionsTable(st *dirpb.StatusReply) httpd.Table {
	all := slices.SortedFunc(slices.Values(st.GetSessions()), func(a, b *dirpb.SessionInfo) int {
		return cmp.Or(cmp.Compare(b.GetLife(), a.GetLife()), cmp.Compare(a.GetId(), b.GetId()))
	})
	return tableOf("Sessions", overview.SessionColumns.Without("Reclaim epoch"), all)
}

// auditTable has the latest change first.
func auditTable(a *dirpb.AuditReply) httpd.Table {
	latest := slices.Clone(a.GetEntries())
	slices.Reverse(latest)
	return tableOf("Latest changes", overview.AuditColumns, latest)
}

// gatewayCharts are what a gateway knows of the last minutes.
func gatewayCharts() []httpd.Chart {
	seconds := []string{"kvd_gateway_command_seconds", "kvd_memcached_command_seconds"}
	hits, misses := []string{"kvd_gateway_hits_total", "kvd_memcached_hits_total"},
		[]string{"kvd_gateway_misses_total", "kvd_memcached_misses_total"}
	return []httpd.Chart{
		{Title: "Commands", Unit: "a second",
			Lines: []httpd.Line{{Name: "Redis", Of: []string{"kvd_gateway_commands_total"}},
				{Name: "memcached", Of: []string{"kvd_memcached_commands_total"}}}},
		{Title: "Latency", Unit: "ms", Lines: []httpd.Line{{Name: "half within", Of: seconds, Quantile: 0.5},
			{Name: "99 % within", Of: seconds, Quantile: 0.99},
			{Name: "99.9 % within", Of: seconds, Quantile: 0.999}}},
		{Title: "Hits", Unit: "%", Lines: []httpd.Line{{Name: "of lookups", Of: hits, Beside: misses}}},
		{Title: "Evictions", Unit: "records a second",
			Lines: []httpd.Line{{Name: "evicted", Of: []string{"kvd_client_evicted_records_total"}},
				{Name: "expired", Of: []string{"kvd_client_expired_records_total"}}}},
	}
}

// directoryCharts are what a directory node knows of the last minutes. Renewals are the leader's; a map version is a
// change of the map.
func directoryCharts() []httpd.Chart {
	raft := func(name, of string) httpd.Line {
		return httpd.Line{Name: name, Of: []string{"kvd_raft_" + of + "_seconds"}, Quantile: 0.99}
	}
	return []httpd.Chart{
		{Title: "Control", Unit: "a second",
			Lines: []httpd.Line{{Name: "renewals", Of: []string{"kvd_directory_renewals_total"}},
				{Name: "changes of the map", Of: []string{"kvd_directory_map_version"}},
				{Name: "raft entries", Of: []string{"kvd_raft_commit_index"}}}},
		{Title: "Raft, 99 % within", Unit: "ms",
			Lines: []httpd.Line{raft("commit", "commit"), raft("leader's disk", "leader_store"),
				raft("follower's disk", "follower_store")}},
		{Title: "Sessions and jobs", Unit: "open",
			Lines: []httpd.Line{{Name: "sessions", Of: []string{"kvd_directory_sessions"}, Level: true},
				{Name: "jobs", Of: []string{"kvd_directory_jobs"}, Level: true}}},
		processChart(),
	}
}

// memnodeCharts are what a memory node knows of the last minutes: not what its clients, or an adapter, do with its
// memory by themselves.
func memnodeCharts() []httpd.Chart {
	cpu := []string{"kvd_memnode_data_path_cpu_seconds_total"}
	return []httpd.Chart{
		{Title: "Verbs executed for others", Unit: "% of a processor",
			Lines: []httpd.Line{{Name: "all", Of: cpu, Times: 100}}},
		{Title: "Callers", Unit: "open",
			Lines: []httpd.Line{{Name: "connections", Of: []string{"kvd_memnode_connections"}, Level: true},
				{Name: "sessions", Of: []string{"kvd_memnode_sessions"}, Level: true}}},
		{Title: "Memory", Unit: "MiB",
			Lines: []httpd.Line{{Name: "in regions", Of: []string{"kvd_memnode_registered_bytes"}, Level: true,
				Times: 1.0 / (1 << 20)},
				{Name: "lent at most", Of: []string{"kvd_memnode_capacity_bytes"}, Level: true,
					Times: 1.0 / (1 << 20)}}},
		processChart(),
	}
}

func processChart() httpd.Chart {
	return httpd.Chart{Title: "Process", Unit: "% of a processor",
		Lines: []httpd.Line{{Name: "all of it", Of: []string{"process_cpu_seconds_total"}, Times: 100}}}
}

// distinctCharts puts the charts of several roles in one process together, of which each has one of the process.
func distinctCharts(roles ...[]httpd.Chart) []httpd.Chart {
	var all []httpd.Chart
	for _, c := range slices.Concat(roles...) {
		if !slices.ContainsFunc(all, func(x httpd.Chart) bool { return x.Title == c.Title }) {
			all = append(all, c)
		}
	}
	return all
}
