package overview

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
)

// The lists of this file are what kvctl and the page of a directory node show of a status, in the same words.

// decimal is a number as a cell.
func decimal[T ~uint32 | ~uint64 | ~int](n T) string { return strconv.FormatUint(uint64(n), 10) }

// orDash is a number that is there from 1 on.
func orDash(n uint32) string {
	if n == 0 {
		return "-"
	}
	return decimal(n)
}

// YesNo is b for people.
func YesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// Percent is the part n of a whole for people, in percent; - if there is no whole.
func Percent(n, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", float64(n)/float64(whole)*100)
}

// amount is a column of bytes that every directory node knows.
func amount(head, name string, of func(*Memory) uint64) Column[*Memory] {
	return Column[*Memory]{Head: head, Name: name, Text: func(m *Memory) string { return units.Rounded(of(m)) },
		JSON: func(m *Memory) any { return of(m) }}
}

// known is a column of something that a leader alone knows.
func known(head, name string, text func(*Memory) string, json func(*Memory) any) Column[*Memory] {
	return Column[*Memory]{Head: head, Name: name,
		Text: func(m *Memory) string {
			if m == nil || !m.Known {
				return "-"
			}
			return text(m)
		},
		JSON: func(m *Memory) any {
			if !m.Known {
				return nil
			}
			return json(m)
		}}
}

// knownAmount is a column of bytes that a leader alone knows.
func knownAmount(head, name string, of func(*Memory) uint64) Column[*Memory] {
	return known(head, name, func(m *Memory) string { return units.Rounded(of(m)) },
		func(m *Memory) any { return of(m) })
}

// MemoryColumns are those of memory, of a placement group or of a whole namespace.
var MemoryColumns = Columns[*Memory]{
	{Head: "Namespace", Name: "namespace", Text: func(m *Memory) string { return m.Namespace },
		JSON: func(m *Memory) any { return m.Namespace }},
	{Head: "PG", Name: "pg",
		Text: func(m *Memory) string {
			if m.PG == 0 {
				return "all"
			}
			return decimal(m.PG)
		},
		JSON: func(m *Memory) any {
			if m.PG == 0 {
				return Absent
			}
			return m.PG
		}},
	amount("Heap", "heap_bytes", func(m *Memory) uint64 { return m.Heap }),
	amount("", "granted_bytes", func(m *Memory) uint64 { return m.Granted }),
	knownAmount("Live", "live_bytes", func(m *Memory) uint64 { return m.Live }),
	known("Live %", "live_percent", func(m *Memory) string { return Percent(m.Live, m.Heap) },
		func(m *Memory) any {
			if m.Heap == 0 {
				return nil
			}
			return float64(m.Live) / float64(m.Heap) * 100
		}),
	knownAmount("", "free_bytes", func(m *Memory) uint64 { return m.Free }),
	knownAmount("", "foreign_bytes", func(m *Memory) uint64 { return m.Foreign }),
	knownAmount("At sessions", "", func(m *Memory) uint64 { return m.Free + m.Foreign }),
	knownAmount("Limbo", "limbo_bytes", func(m *Memory) uint64 { return m.Limbo }),
	knownAmount("Coming", "coming_bytes", func(m *Memory) uint64 { return m.Coming }),
	amount("Waiting", "waiting_bytes", func(m *Memory) uint64 { return m.Waiting }),
	amount("Recalled", "recalled_bytes", func(m *Memory) uint64 { return m.Recalled }),
	knownAmount("Lost", "lost_bytes", func(m *Memory) uint64 { return m.Lost }),
	amount("Room", "room_bytes", func(m *Memory) uint64 { return m.Room }),
	known("Short", "short", func(m *Memory) string { return YesNo(m.Short) },
		func(m *Memory) any { return m.Short }),
}

// RegionsOn counts the placement groups that have node as a member, or soon will.
func RegionsOn(m *dirpb.Map, node uint32) int { return regionsOf(m)[node] }

// regionsOf is RegionsOn of each memory node of m, whose placement groups it goes through once.
func regionsOf(m *dirpb.Map) map[uint32]int {
	regions := make(map[uint32]int)
	for _, p := range m.GetPgs() {
		planned, leaving := p.GetPlanned().GetNodeId(), p.GetLeaving().GetNodeId()
		for _, mb := range p.GetMembers() {
			if regions[mb.GetNodeId()]++; mb.GetNodeId() == planned {
				planned = 0
			}
			if mb.GetNodeId() == leaving {
				leaving = 0
			}
		}
		if regions[planned]++; leaving != planned {
			regions[leaving]++
		}
	}
	delete(regions, 0) // nobody's
	return regions
}

// IsOn reports whether p has node as a member, or soon will.
func IsOn(p *dirpb.PlacementGroup, node uint32) bool {
	is := func(mb *dirpb.Member) bool { return mb.GetNodeId() == node }
	return node != 0 && (slices.ContainsFunc(p.GetMembers(), is) || is(p.GetPlanned()) || is(p.GetLeaving()))
}

// NodeColumns are those of the memory nodes of a map.
func NodeColumns(m *dirpb.Map) Columns[*dirpb.Node] {
	regions, registered := regionsOf(m), registered(m)
	return Columns[*dirpb.Node]{
		{Head: "ID", Text: func(n *dirpb.Node) string { return decimal(n.GetId()) }},
		{Head: "Name", Text: (*dirpb.Node).GetName},
		{Head: "State", Text: NodeState},
		{Head: "Draining", Text: func(n *dirpb.Node) string { return YesNo(n.GetDraining()) }},
		{Head: "Regions", Text: func(n *dirpb.Node) string { return decimal(regions[n.GetId()]) }},
		{Head: "Lent", Text: func(n *dirpb.Node) string { return units.Rounded(n.GetCapacityBytes()) }},
		{Head: "In regions", Text: func(n *dirpb.Node) string {
			return RegisteredText(registered(n), n.GetUsedBytes())
		}},
		{Head: "Boot", Text: bootText},
		{Head: "Domain", Text: (*dirpb.Node).GetDomain},
		{Head: "Endpoints", Text: func(n *dirpb.Node) string {
			var ends []string
			for _, e := range n.GetEndpoints() {
				ends = append(ends, endpointText(e))
			}
			return strings.Join(ends, ", ")
		}},
	}
}

// RegisteredText is how much of regions is registered, if that is not all.
func RegisteredText(registered, used uint64) string {
	if registered == used {
		return units.Rounded(used)
	}
	return units.Rounded(registered) + " of " + units.Rounded(used)
}

// bootText is the number of a process whose memory the next one takes over; "-": it ends with this one.
func bootText(n *dirpb.Node) string {
	if !n.GetKeeps() {
		return "-"
	}
	return decimal(n.GetBoot())
}

// endpointText says who executes atomics if a CPU alone does not go without saying.
func endpointText(e *dirpb.Endpoint) string {
	s := e.GetProvider() + " " + e.GetAddr()
	if by := e.GetAtomics(); by > dirpb.AtomicsBy_ATOMICS_BY_CPU {
		s += " atomics=" + lower(by.String(), "ATOMICS_BY_")
	}
	return s
}

// Members gives a function that lists the members of a placement group of m for people, from head to tail. It names
// also the one that is about to enter, and the one that has just left.
func Members(m *dirpb.Map) func(*dirpb.PlacementGroup) string {
	names := make(map[uint32]string)
	for _, n := range m.GetNodes() {
		names[n.GetId()] = n.GetName()
	}
	return func(p *dirpb.PlacementGroup) string {
		var all []string
		for i, mb := range p.GetMembers() {
			name := names[mb.GetNodeId()]
			if p.GetJoining() && i == len(p.GetMembers())-1 {
				name += " (joining)"
			}
			all = append(all, name)
		}
		if mb := p.GetPlanned(); mb != nil {
			all = append(all, names[mb.GetNodeId()]+" (planned)")
		}
		if mb := p.GetLeaving(); mb != nil {
			all = append(all, names[mb.GetNodeId()]+" (leaving)")
		}
		return strings.Join(all, ", ")
	}
}

// GroupColumns are those of the placement groups of a status.
func GroupColumns(st *dirpb.StatusReply) Columns[*dirpb.PlacementGroup] {
	m := st.GetMap()
	namespaces, memories := make(map[uint32]string), make(map[uint32]*Memory)
	for _, ns := range m.GetNamespaces() {
		namespaces[ns.GetId()] = ns.GetName()
	}
	for _, x := range Memories(st) {
		memories[x.PG] = x
	}
	columns := Columns[*dirpb.PlacementGroup]{
		{Head: "PG", Text: func(p *dirpb.PlacementGroup) string { return decimal(p.GetId()) }},
		{Head: "Namespace", Text: func(p *dirpb.PlacementGroup) string { return namespaces[p.GetNamespaceId()] }},
		{Head: "State", Text: func(p *dirpb.PlacementGroup) string { return StateText(m, p) }},
		{Head: "Epoch", Text: func(p *dirpb.PlacementGroup) string { return decimal(p.GetEpoch()) }},
		{Head: "Copies", Text: func(p *dirpb.PlacementGroup) string { return CopiesOf(m, p) }},
		{Head: "Members", Text: Members(m)},
		{Head: "Region", Text: func(p *dirpb.PlacementGroup) string { return units.Rounded(p.GetRegionBytes()) }},
		{Head: "Extents recalled", Text: func(p *dirpb.PlacementGroup) string { return decimal(len(p.GetRecalled())) }},
	}
	for _, c := range MemoryColumns.Only("Live %", "Lost", "Short") {
		columns = append(columns, Column[*dirpb.PlacementGroup]{Head: c.Head,
			Text: func(p *dirpb.PlacementGroup) string { return c.Text(memories[p.GetId()]) }})
	}
	return columns
}

// JobColumns are those of the jobs of a status.
func JobColumns(st *dirpb.StatusReply) Columns[*dirpb.Job] {
	namespaces, owners := make(map[uint32]string), make(map[uint32]string)
	for _, ns := range st.GetMap().GetNamespaces() {
		namespaces[ns.GetId()] = ns.GetName()
	}
	for _, s := range st.GetSessions() {
		owners[s.GetId()] = s.GetClient()
	}
	return Columns[*dirpb.Job]{
		{Head: "ID", Text: func(j *dirpb.Job) string { return decimal(j.GetId()) }},
		{Head: "Kind", Text: kindText},
		{Head: "Namespace", Text: func(j *dirpb.Job) string { return namespaces[j.GetNamespaceId()] }},
		{Head: "PG", Text: func(j *dirpb.Job) string {
			if t := j.GetTargetPgId(); t != 0 && t != j.GetPgId() {
				return orDash(j.GetPgId()) + " → " + orDash(t)
			}
			return orDash(j.GetPgId())
		}},
		{Head: "Shard", Text: func(j *dirpb.Job) string { return orDash(j.GetShardId()) }},
		{Head: "Extents", Text: func(j *dirpb.Job) string {
			if j.GetKind() == dirpb.JobKind_JOB_RECALL {
				return ExtentsText(j)
			}
			return "-"
		}},
		{Head: "Owner", Text: func(j *dirpb.Job) string {
			owner := orDash(j.GetOwner())
			if c := owners[j.GetOwner()]; c != "" {
				owner += " " + c
			}
			return owner
		}},
		{Head: "Done", Text: func(j *dirpb.Job) string { return decimal(j.GetDone()) }},
		{Head: "Total", Text: func(j *dirpb.Job) string { return decimal(j.GetTotal()) }},
		{Head: "Because", Text: (*dirpb.Job).GetReason},
		{Head: "Trouble", Text: JobTrouble},
	}
}

// JobTrouble is why a job does not get on, or empty.
func JobTrouble(j *dirpb.Job) string {
	if j.GetTrouble() == "" && j.GetWaiting() {
		return "waits until every session has heard of it"
	}
	return j.GetTrouble()
}

// kindText is the kind of a job, and how it goes about it.
func kindText(j *dirpb.Job) string {
	switch s := JobKind(j.GetKind()); {
	case j.GetInPlace():
		return s + " in place"
	case j.GetCount():
		return s + ", count only"
	default:
		return s
	}
}

// ExtentsText lists the extents that a job recalls.
func ExtentsText(j *dirpb.Job) string {
	var all []string
	for _, x := range j.GetExtents() {
		all = append(all, decimal(x))
	}
	return strings.Join(all, ",")
}

// mostAge bounds the ages that are shown, in milliseconds.
const mostAge = 1 << 40

// SessionColumns are those of sessions.
var SessionColumns = Columns[*dirpb.SessionInfo]{
	{Head: "Session", Text: func(s *dirpb.SessionInfo) string { return decimal(s.GetId()) }},
	{Head: "Client", Text: (*dirpb.SessionInfo).GetClient},
	{Head: "Namespace", Text: (*dirpb.SessionInfo).GetNamespace},
	{Head: "State", Text: func(s *dirpb.SessionInfo) string { return lower(s.GetLife().String(), "SESSION_") }},
	{Head: "Age", Right: true, Text: func(s *dirpb.SessionInfo) string {
		return (time.Duration(min(s.GetAgeMillis(), mostAge)) * time.Millisecond).Round(time.Second).String()
	}},
	{Head: "Reclaim epoch", Text: func(s *dirpb.SessionInfo) string { return decimal(s.GetReportEpoch()) }},
	{Head: "Identity", Text: func(s *dirpb.SessionInfo) string { return cmp.Or(s.GetIdentity(), "-") }},
}

// DirectoryColumns are those of directory nodes. The leader of st alone knows which ones answer.
func DirectoryColumns(st *dirpb.StatusReply) Columns[*dirpb.DirectoryNode] {
	return Columns[*dirpb.DirectoryNode]{
		{Head: "ID", Text: (*dirpb.DirectoryNode).GetId},
		{Head: "Raft", Text: (*dirpb.DirectoryNode).GetRaftAddr},
		{Head: "gRPC", Text: (*dirpb.DirectoryNode).GetGrpcAddr},
		{Head: "Role", Text: func(d *dirpb.DirectoryNode) string {
			switch {
			case d.GetLeader():
				return "leader"
			case d.GetVoter():
				return "voter"
			}
			return "learner"
		}},
		{Head: "Answers", Text: func(d *dirpb.DirectoryNode) string {
			if !st.GetLeads() {
				return "-"
			}
			return YesNo(d.GetSilentMillis() == 0)
		}},
	}
}

// AuditColumns are those of changes that somebody made.
var AuditColumns = Columns[*dirpb.AuditEntry]{
	{Head: "Number", Text: func(e *dirpb.AuditEntry) string { return decimal(e.GetNumber()) }},
	{Head: "Time", Text: func(e *dirpb.AuditEntry) string {
		return time.UnixMilli(e.GetUnixMillis()).UTC().Format(time.RFC3339)
	}},
	{Head: "Identity", Text: func(e *dirpb.AuditEntry) string { return cmp.Or(e.GetIdentity(), "-") }},
	{Head: "From", Text: func(e *dirpb.AuditEntry) string { return cmp.Or(e.GetRemote(), "-") }},
	{Head: "Action", Text: (*dirpb.AuditEntry).GetAction},
	{Head: "Object", Text: (*dirpb.AuditEntry).GetObject},
	{Head: "Detail", Text: (*dirpb.AuditEntry).GetDetail},
}
