package metrics

import (
	"context"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

var dirFamily = &family{prefix: "kvd_directory_"}

var (
	dirInfo        = dirFamily.desc("info", "1, with this directory node's id and the cluster's.", "id", "cluster")
	dirLeader      = dirFamily.desc("leader", "1 on the directory node that leads, else 0.")
	dirLeaderKnown = dirFamily.desc("leader_known", "1 while this directory node leads or knows who does, else 0.")
	dirVoters      = dirFamily.desc("voters", "Directory nodes with a vote.")
	dirNodeUp      = dirFamily.desc("node_up", "1 for a memory node that is heard, 0 for one that counts as lost.",
		"node")
	dirNodeAwaited = dirFamily.desc("node_awaited", "1 for a silent memory node for which the store waits, since it "+
		"has an only copy, else 0; on the leader only.", "node")
	dirNodeDrain = dirFamily.desc("node_draining", "1 for a memory node that is being emptied, else 0.", "node")
	dirNodeBytes = dirFamily.desc("node_capacity_bytes", "Memory that a memory node lends at most.", "node")
	dirNodeUsed  = dirFamily.desc("node_used_bytes", "Memory of a memory node that is given to regions.", "node")
	dirSessions  = dirFamily.desc("sessions", "Sessions by namespace and state: live, or fencing (lost, and some "+
		"memory node has not confirmed).", "namespace", "state")
	dirPGs = dirFamily.desc("placement_groups", "Placement groups by namespace and state: creating, active, "+
		"frozen or lost.", "namespace", "state")
	dirShards   = dirFamily.desc("shards", "Shards of a namespace.", "namespace")
	dirMoving   = dirFamily.desc("shards_moving", "Shards that split or migrate.", "namespace")
	dirJobs     = dirFamily.desc("jobs", "Background jobs that are not finished, by kind.", "kind")
	dirTroubled = dirFamily.desc("jobs_in_trouble", "Background jobs that do not get on; on the leader only.")
	dirRecalls  = dirFamily.desc("extents_recalled", "Extents that nobody may allocate from, since they are "+
		"recalled.", "namespace")
	dirMapVersion = dirFamily.desc("map_version", "Version of the map.")
	dirEpoch      = dirFamily.desc("reclaim_epoch", "Reclaim epoch; on the leader only.")
	dirMinEpoch   = dirFamily.desc("reclaim_epoch_min", "Oldest reclaim epoch that a session may still work in; on "+
		"the leader only.")
	dirNSInfo = dirFamily.desc("namespace_info", "1, with a namespace's mode, store or cache, and its number of "+
		"copies.", "namespace", "mode", "replicas")
	dirNSHeap = dirFamily.desc("namespace_heap_bytes",
		"Memory for records in a namespace, each copy counted once.", "namespace")
	dirNSLimit = dirFamily.desc("namespace_limit_bytes", "Memory that sessions may hold in a namespace at most; "+
		"all of the heap if there is no limit.", "namespace")
	dirNSGranted = dirFamily.desc("namespace_granted_bytes",
		"Memory that sessions hold, for records or to allocate from.", "namespace")
	dirNSReturned = dirFamily.desc("namespace_returned_bytes",
		"Memory that was handed back and waits, or is ready, to be granted.", "namespace")
	dirNSLeaked = dirFamily.desc("namespace_leaked_bytes",
		"Memory that nobody holds and no slot names, by the last scrub.", "namespace")
	dirNSIndex    = dirFamily.desc("namespace_index_used_bytes", "Index that shards occupy.", "namespace")
	dirNSIndexAll = dirFamily.desc("namespace_index_bytes", "Index that shards can occupy.", "namespace")
	dirNSStatus   = dirFamily.desc("status_blocks", "Blocks of status words of transactions by namespace and state: "+
		"held by sessions, or dead. Dead ones are of ended sessions, "+
		"until SETTLE jobs have gone through the namespace.",
		"namespace", "state")
	dirNSLost = dirFamily.desc("scrub_lost_records", "Records without a good copy, as the last scrub of each "+
		"placement group found.", "namespace")
	dirNSRepaired = dirFamily.desc("scrub_repaired_records",
		"Copies that the last scrub of each placement group repaired.", "namespace")
	dirPGHeap = dirFamily.desc("pg_heap_bytes", "Memory for records in a placement group, each copy counted once.",
		"namespace", "pg")
	dirPGMemory = dirFamily.desc("pg_memory_bytes", "Memory of a placement group by state. Granted memory is live "+
		"(records), limbo, coming (on its way home), lost, or with sessions: free if granted to them, foreign if "+
		"granted to others. The leader alone knows these. The rest is waiting (for reclaim epochs) or room (to be "+
		"granted now). Memory that is recalled is one of the former, too.", "namespace", "pg", "state")
	dirPGShort = dirFamily.desc("pg_short", "1 while sessions find too little memory in a placement group, else "+
		"0; on the leader only.", "namespace", "pg")
	dirLost = dirFamily.desc("lost_total", "Times that a placement group lost all its copies, and with them "+
		"what it held, or that a tier node was given up.", "namespace")
	dirLosses = dirFamily.desc("losses", "Placement groups that lost all their copies, and tier nodes that were "+
		"given up, which nobody has accepted yet (kvctl namespace accept-loss).", "namespace")
	dirMissing  = dirFamily.desc("copies_missing", "Copies that placement groups lack.", "namespace")
	dirHomeless = dirFamily.desc("copies_without_room", "Placement groups that lack a copy, or have none, and for "+
		"which no memory node has room.", "namespace")
	dirMemberUp = dirFamily.desc("member_up", "1 for a directory node that answers the leader, 0 for one that "+
		"does not; on the leader only.", "id")
	dirBypass = dirFamily.desc("clients_by_tcp", "Clients that reach memory nodes by tcp though their machine has an "+
		"RDMA adapter, by host and reason (as in kvd_client_path); on the leader only.", "host", "reason")
	dirApplied = dirFamily.desc("applied_index", "Last entry of raft's log that this directory node has applied.")
)

// Status is what [Directory] asks; *server.Node answers it about itself, without the network.
type Status interface {
	Status(context.Context, *dirpb.StatusRequest) (*dirpb.StatusReply, error)
}

// Directory shows the directory as the directory node named id knows it.
func Directory(id string, d Status) prometheus.Collector { return directory{dirFamily, id, d} }

// Renewals shows how often sessions have renewed their leases.
func Renewals(n interface{ Renewals() uint64 }) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "kvd_directory_renewals_total", Help: "Renewals of sessions' leases that this directory node has " +
			"answered, as the leader.",
	}, func() float64 { return float64(n.Renewals()) })
}

type directory struct {
	*family
	id string
	d  Status
}

// Collect implements [prometheus.Collector].
func (d directory) Collect(ch chan<- prometheus.Metric) {
	st, err := d.d.Status(context.Background(), &dirpb.StatusRequest{})
	if err != nil {
		ch <- prometheus.NewInvalidMetric(dirInfo, err)
		return
	}
	out := sink(ch)
	out.gauge(dirInfo, 1, d.id, st.GetClusterId())
	var leads, known bool
	voters := 0
	for _, n := range st.GetDirectory() {
		known = known || n.GetLeader()
		leads = leads || n.GetLeader() && n.GetId() == d.id
		if n.GetVoter() {
			voters++
		}
		if st.GetLeads() {
			out.gauge(dirMemberUp, truth(n.GetSilentMillis() == 0), n.GetId())
		}
	}
	for _, b := range overview.Bypasses(st) {
		if b.Adapter {
			out.gauge(dirBypass, float64(b.Clients), b.Host, b.Reason)
		}
	}
	out.gauge(dirLeader, truth(leads))
	out.gauge(dirLeaderKnown, truth(known))
	out.gauge(dirVoters, float64(voters))
	out.gauge(dirMapVersion, float64(st.GetMap().GetVersion()))
	out.gauge(dirApplied, float64(st.GetRaftApplied()))
	for _, n := range st.GetMap().GetNodes() {
		out.gauge(dirNodeUp, truth(n.GetState() == dirpb.NodeState_NODE_UP), n.GetName())
		if st.GetLeads() {
			out.gauge(dirNodeAwaited, truth(n.GetWaiting()), n.GetName())
		}
		out.gauge(dirNodeDrain, truth(n.GetDraining()), n.GetName())
		out.gauge(dirNodeBytes, float64(n.GetCapacityBytes()), n.GetName())
		out.gauge(dirNodeUsed, float64(n.GetUsedBytes()), n.GetName())
	}
	d.jobs(out, st, leads)
	if leads {
		out.gauge(dirEpoch, float64(st.GetEpoch()))
		out.gauge(dirMinEpoch, float64(st.GetMinEpoch()))
	}
	d.namespaces(out, st)
	d.memory(out, st)
}

func (directory) jobs(out sink, st *dirpb.StatusReply, leads bool) {
	by := make(map[dirpb.JobKind]int)
	troubled := 0
	for _, j := range st.GetJobs() {
		by[j.GetKind()]++
		if j.GetTrouble() != "" {
			troubled++
		}
	}
	for k := range jobKinds {
		out.gauge(dirJobs, float64(by[k]), overview.JobKind(k))
	}
	if leads {
		out.gauge(dirTroubled, float64(troubled))
	}
}

func (directory) namespaces(out sink, st *dirpb.StatusReply) {
	for _, ns := range overview.Namespaces(st) {
		out.gauge(dirNSInfo, 1, ns.Name, ns.Mode, strconv.Itoa(ns.Replicas))
		for d, v := range map[*prometheus.Desc]uint64{
			dirNSHeap: ns.HeapBytes, dirNSLimit: ns.LimitBytes, dirNSGranted: ns.GrantedBytes,
			dirNSReturned: ns.ReturnedBytes,
			dirNSLeaked:   ns.LeakedBytes, dirNSIndex: ns.IndexUsedBytes, dirNSIndexAll: ns.IndexBytes,
			dirNSLost: ns.LostRecords, dirNSRepaired: ns.RepairedRecords,
			dirShards: uint64(ns.Shards), dirMoving: uint64(ns.Moving), dirRecalls: uint64(ns.Recalled),
			dirLosses: uint64(ns.Losses), dirMissing: uint64(ns.Missing), dirHomeless: uint64(ns.Homeless),
		} {
			out.gauge(d, float64(v), ns.Name)
		}
		out.count(dirLost, float64(ns.Lost), ns.Name)
		for s := range dirpb.PGState_name {
			if s := dirpb.PGState(s); s != dirpb.PGState_PG_STATE_UNSPECIFIED {
				out.gauge(dirPGs, float64(ns.PGState[s]), ns.Name, overview.PGState(s))
			}
		}
		out.gauge(dirNSStatus, float64(ns.StatusHeld), ns.Name, "held")
		out.gauge(dirNSStatus, float64(ns.StatusDead), ns.Name, "dead")
		out.gauge(dirSessions, float64(ns.Live), ns.Name, "live")
		out.gauge(dirSessions, float64(ns.Fencing), ns.Name, "fencing")
	}
}

// jobKinds goes through the kinds of jobs.
func jobKinds(yield func(dirpb.JobKind) bool) {
	for k := range dirpb.JobKind_name {
		if k := dirpb.JobKind(k); k != dirpb.JobKind_JOB_KIND_UNSPECIFIED && !yield(k) {
			return
		}
	}
}

// memory shows each placement group.
func (directory) memory(out sink, st *dirpb.StatusReply) {
	for _, m := range overview.Memories(st) {
		pg := strconv.FormatUint(uint64(m.PG), 10)
		show := func(state string, v uint64) { out.gauge(dirPGMemory, float64(v), m.Namespace, pg, state) }
		out.gauge(dirPGHeap, float64(m.Heap), m.Namespace, pg)
		show("waiting", m.Waiting)
		show("recalled", m.Recalled)
		show("room", m.Room)
		if !m.Known {
			continue
		}
		show("live", m.Live)
		show("free", m.Free)
		show("foreign", m.Foreign)
		show("limbo", m.Limbo)
		show("coming", m.Coming)
		show("lost", m.Lost)
		out.gauge(dirPGShort, truth(m.Short), m.Namespace, pg)
	}
}
