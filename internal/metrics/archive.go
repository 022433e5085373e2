package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/archive"
)

var archiveFamily = &family{prefix: "kvd_archive_"}

var (
	archiveHolds = archiveFamily.desc("holds_lock",
		"1 if this archive works; 0 if another holds the lock of the destination, for which this one waits.")
	archiveInterval = archiveFamily.desc("interval_seconds", "Time between two snapshots of a namespace, as it is set.")
	archiveRPO      = archiveFamily.desc("rpo_seconds", "Age of what the newest snapshot has: writes of that time are "+
		"lost with the store. Only the archive that works tells it.", "namespace")
	archiveSuccess = archiveFamily.desc("last_success_timestamp_seconds",
		"When the newest snapshot was done, in seconds since 1970.", "namespace")
	archiveLeftOut = archiveFamily.desc("left_out_keys", "Keys, or places with keys, that the newest snapshot by this "+
		"archive lacks since they are damaged.", "namespace")
	archiveFailures = archiveFamily.desc("failures_total",
		"Failures: of a namespace, or with an empty namespace of the lock or the directory.", "namespace")
)

// Archive shows what an archive has done.
func Archive(s *archive.Service) prometheus.Collector { return archives{archiveFamily, s} }

type archives struct {
	*family
	s *archive.Service
}

// Collect implements [prometheus.Collector].
func (a archives) Collect(ch chan<- prometheus.Metric) {
	out, st := sink(ch), a.s.Stats()
	out.gauge(archiveHolds, truth(st.Holds))
	out.gauge(archiveInterval, a.s.Every().Seconds())
	out.count(archiveFailures, float64(st.Failures), "")
	for name, n := range st.Namespaces {
		out.gauge(archiveRPO, max(time.Since(n.Since), 0).Seconds(), name)
		out.gauge(archiveLeftOut, float64(n.LeftOut), name)
		if !n.Success.IsZero() {
			out.gauge(archiveSuccess, float64(n.Success.UnixMilli())/1e3, name)
		}
		out.count(archiveFailures, float64(n.Failures), name)
	}
}
