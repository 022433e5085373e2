package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/memnode"
)

var nodeFamily = &family{prefix: "kvd_memnode_"}

var (
	nodeRegistered = nodeFamily.desc("registered", "1 while the directory knows this incarnation, else 0.")
	nodeHeartbeat  = nodeFamily.desc("heartbeat_age_seconds", "Time since the directory last answered a heartbeat.")
	nodeCapacity   = nodeFamily.desc("capacity_bytes", "Memory that the node lends at most.")
	nodeLent       = nodeFamily.desc("registered_bytes", "Memory of regions made for the directory.")
	nodeRegions    = nodeFamily.desc("regions", "Regions by state: published, making (wanted and not published yet) "+
		"or failing.", "state")
	nodeConnections = nodeFamily.desc("connections", "Queue pairs of clients.")
	nodeSessions    = nodeFamily.desc("sessions", "Sessions with at least one connection.")
	nodeFencing     = nodeFamily.desc("fences_pending", "Sessions whose fence is not confirmed yet.")
	nodeKept        = nodeFamily.desc("kept", "1, with how much this process had of the memory of the one before it. "+
		"That is kept (all of it), first (there was none), off (no keeper) or pending. Or it is why it began empty: "+
		"damaged, version, stranger, missing, open, disowned, putback.", "reason")
	nodeRescued = nodeFamily.desc("rescued_bytes", "Memory of an earlier process that this one cannot use, and "+
		"that is kept aside until its room is wanted.")
	nodeInside = nodeFamily.desc("kept_waits_for_peers", "Clients of this machine that are inside a verb which "+
		"they began before a restart, and for which the memory that was kept waits.")
	nodePaced = nodeFamily.desc("paced_seconds_total", "Time that connections waited, all together, as their "+
		"namespace was at its quota of verbs a second over tcp.", "namespace")
	nodeCPU = nodeFamily.desc("data_path_cpu_seconds_total",
		"CPU time spent executing verbs for others; 0 if clients or adapters execute them.")
)

// MemNode shows a memory node.
func MemNode(name string, n *memnode.Node) prometheus.Collector {
	return prometheus.WrapCollectorWith(prometheus.Labels{"node": name}, memNode{nodeFamily, n})
}

type memNode struct {
	*family
	n *memnode.Node
}

// Collect implements [prometheus.Collector].
func (m memNode) Collect(ch chan<- prometheus.Metric) {
	s, out := m.n.Stats(), sink(ch)
	out.gauge(nodeRegistered, truth(s.Registered))
	if !s.LastHeartbeat.IsZero() {
		out.gauge(nodeHeartbeat, time.Since(s.LastHeartbeat).Seconds())
	}
	out.gauge(nodeCapacity, float64(s.CapacityBytes))
	out.gauge(nodeLent, float64(s.RegisteredBytes))
	var published, making, failing float64
	for _, r := range s.Regions {
		switch {
		case r.Err != nil:
			failing++
		case r.Published:
			published++
		default:
			making++
		}
	}
	out.gauge(nodeRegions, published, "published")
	out.gauge(nodeRegions, making, "making")
	out.gauge(nodeRegions, failing, "failing")
	out.gauge(nodeConnections, float64(s.Connections))
	out.gauge(nodeSessions, float64(s.Sessions))
	out.gauge(nodeFencing, float64(len(s.Fencing)))
	out.gauge(nodeKept, 1, s.Kept.String())
	out.gauge(nodeRescued, float64(s.RescuedBytes))
	out.gauge(nodeInside, float64(len(s.Inside)))
	paced := make(map[string]time.Duration) // another namespace may have had the name, and is being deleted
	for _, q := range s.Quotas {
		paced[q.Name] += q.Paced
	}
	for name, d := range paced {
		out.count(nodePaced, d.Seconds(), name)
	}
	out.count(nodeCPU, s.DataPathCPU.Seconds())
}
