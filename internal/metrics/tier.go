package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/tier"
)

var tierFamily = &family{prefix: "kvd_tier_"}

var (
	tierSize  = tierFamily.desc("size_bytes", "Bytes that the files of a namespace may take, as it is set.")
	tierHeard = tierFamily.desc("directory_silence_seconds", "Time since the directory last answered; -1: it has not "+
		"yet.")
	tierConns  = tierFamily.desc("connections", "Connections of sessions that read files.")
	tierFailed = tierFamily.desc("failed_reads_total",
		"Reads that were answered with zeroes, since the disk did not give what is there.")
	tierFiles = tierFamily.desc("file_bytes", "Bytes of a namespace's files.", "namespace")
	tierLive  = tierFamily.desc("live_bytes", "Bytes of objects in them that are not known to be garbage.",
		"namespace")
	tierWritten = tierFamily.desc("written_bytes_total", "Bytes written to a namespace's files since the start.",
		"namespace")
	tierBudget = tierFamily.desc("budget_bytes",
		"Bytes of a namespace's values that its tier nodes together are to take out of memory.", "namespace")
	tierClosed = tierFamily.desc("closed_namespaces", "Namespaces whose files cannot be opened.")
)

// Tier shows a tier node.
func Tier(s *tier.Service) prometheus.Collector { return tiers{tierFamily, s} }

type tiers struct {
	*family
	s *tier.Service
}

// Collect implements [prometheus.Collector].
func (c tiers) Collect(ch chan<- prometheus.Metric) {
	out, st := sink(ch), c.s.Stats()
	silence := -1.0
	if !st.LastHeard.IsZero() {
		silence = time.Since(st.LastHeard).Seconds()
	}
	out.gauge(tierSize, float64(st.SizeBytes))
	out.gauge(tierHeard, silence)
	out.gauge(tierConns, float64(st.Connections))
	out.count(tierFailed, float64(st.FailedReads))
	closed := 0
	for _, n := range st.Namespaces {
		if n.Err != nil {
			closed++
			continue
		}
		out.gauge(tierFiles, float64(n.Bytes), n.Name)
		out.gauge(tierLive, float64(n.LiveBytes), n.Name)
		out.count(tierWritten, float64(n.WrittenBytes), n.Name)
		out.gauge(tierBudget, float64(n.BudgetBytes), n.Name)
	}
	out.gauge(tierClosed, float64(closed))
}
