package metrics

import (
	"strings"
	"sync"

	gometrics "github.com/hashicorp/go-metrics"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/server"
)

// Raft shows what hashicorp/raft measures in this process. The library reports to a
// global of its own, so that is taken over with the first call. Several nodes of one
// process are counted together.
//
// Only what is in the tables below is kept, in seconds where raft has milliseconds.
// Raft's other metrics repeat these, or make a series for every peer.
func Raft() prometheus.Collector { return raftOnce() }

var raftOnce = sync.OnceValue(func() *raftSink {
	s := newRaftSink()
	c := gometrics.DefaultConfig("")
	c.EnableHostname, c.EnableRuntimeMetrics = false, false
	// It fails if it starts a collector of its own, which is off.
	if _, err := gometrics.NewGlobal(c, s); err != nil {
		panic(err)
	}
	return s
})

// raftSink keeps what raft reports.
type raftSink struct {
	samples  map[string]prometheus.Observer
	counters map[string]prometheus.Counter
	all      []prometheus.Collector
}

func newRaftSink() *raftSink {
	s := &raftSink{samples: make(map[string]prometheus.Observer), counters: make(map[string]prometheus.Counter)}
	for _, m := range []struct{ key, name, help string }{
		{"raft.commitTime", "commit_seconds", "Time from a proposal to its commit, on the leader."},
		{"raft.fsm.applyBatch", "apply_seconds", "Time that the state machine took for a batch of entries."},
		{"raft.leader.dispatchLog", "leader_store_seconds", "Time that the leader's log took to be stored, fsync " +
			"included."},
		{"raft.rpc.appendEntries.storeLogs", "follower_store_seconds",
			"Time that a follower's log took to be stored, fsync included."},
		{"raft.replication.appendEntries.rpc", "append_rpc_seconds",
			"Time of a call that sends entries to a follower."},
		{"raft.leader.lastContact", "leader_contact_age_seconds",
			"Age of a follower's last contact, when the leader looked."},
		{"raft.snapshot.takeSnapshot", "snapshot_seconds", "Time that a snapshot took."},
		{"raft.rpc.installSnapshot", "install_snapshot_seconds",
			"Time that a snapshot of the leader's took to be installed."},
	} {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvd_raft_" + m.name, Help: m.help, Buckets: []float64{.0001, .0003, .001, .003, .01, .03, .1, .3, 1,
				3, 10},
		})
		s.samples[m.key] = h
		s.all = append(s.all, h)
	}
	states := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kvd_raft_transitions_total", Help: "Times that this process became follower, candidate or leader.",
	}, []string{"to"})
	s.all = append(s.all, states)
	for _, to := range []string{"follower", "candidate", "leader"} {
		s.counters["raft.state."+to] = states.WithLabelValues(to)
	}
	for _, m := range []struct{ key, name, help string }{
		{"raft.apply", "proposals_total", "Commands proposed, on the leader."},
		{"raft.transition.heartbeat_timeout", "heartbeat_timeouts_total", "Times that a follower missed its leader."},
		{"raft.transition.leader_lease_timeout", "leader_lease_timeouts_total",
			"Times that a leader stepped down since it missed a quorum."},
	} {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "kvd_raft_" + m.name, Help: m.help})
		s.counters[m.key] = c
		s.all = append(s.all, c)
	}
	return s
}

// Describe implements [prometheus.Collector].
func (s *raftSink) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range s.all {
		c.Describe(ch)
	}
}

// Collect implements [prometheus.Collector].
func (s *raftSink) Collect(ch chan<- prometheus.Metric) {
	for _, c := range s.all {
		c.Collect(ch)
	}
}

// AddSample implements [gometrics.MetricSink]; val is in milliseconds.
func (s *raftSink) AddSample(key []string, val float32) {
	if h := s.samples[strings.Join(key, ".")]; h != nil {
		h.Observe(float64(val) / 1000)
	}
}

// AddSampleWithLabels implements [gometrics.MetricSink]. Its labels name peers.
func (s *raftSink) AddSampleWithLabels(key []string, val float32, _ []gometrics.Label) {
	s.AddSample(key, val)
}

// IncrCounter implements [gometrics.MetricSink].
func (s *raftSink) IncrCounter(key []string, val float32) {
	if c := s.counters[strings.Join(key, ".")]; c != nil && val > 0 {
		c.Add(float64(val))
	}
}

// IncrCounterWithLabels implements [gometrics.MetricSink].
func (s *raftSink) IncrCounterWithLabels(key []string, val float32, _ []gometrics.Label) {
	s.IncrCounter(key, val)
}

// SetGauge, SetGaugeWithLabels and EmitKey implement [gometrics.MetricSink]; nothing
// of theirs is kept.
func (*raftSink) SetGauge([]string, float32)                              {}
func (*raftSink) SetGaugeWithLabels([]string, float32, []gometrics.Label) {}
func (*raftSink) EmitKey([]string, float32)                               {}

var logFamily = &family{prefix: "kvd_raft_"}

var (
	raftTerm   = logFamily.desc("term", "Raft's term, as this directory node knows it.")
	raftLast   = logFamily.desc("last_index", "Last entry of raft's log on this directory node.")
	raftCommit = logFamily.desc("commit_index", "Last entry of raft's log that this directory node knows to be "+
		"committed.")
	raftSnapshot = logFamily.desc("snapshot_index", "Last entry of raft's log that this directory node's snapshot "+
		"covers; 0 without one.")
)

// RaftLog shows where n's log stands. The metric kvd_directory_applied_index tells how far n has applied it.
func RaftLog(n interface{ Raft() server.RaftState }) prometheus.Collector {
	return raftLog{logFamily, n}
}

type raftLog struct {
	*family
	n interface{ Raft() server.RaftState }
}

// Collect implements [prometheus.Collector].
func (r raftLog) Collect(ch chan<- prometheus.Metric) {
	s, out := r.n.Raft(), sink(ch)
	out.gauge(raftTerm, float64(s.Term))
	out.gauge(raftLast, float64(s.LastIndex))
	out.gauge(raftCommit, float64(s.Commit))
	out.gauge(raftSnapshot, float64(s.SnapshotIndex))
}
