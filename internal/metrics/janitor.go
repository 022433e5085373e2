package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

// JobResult is how a job ended at a janitor.
type JobResult string

// Results of jobs. A job that was given up is another janitor's by now, or will be, since
// this one stops. A job that failed went back to the directory with its trouble.
const (
	JobDone    JobResult = "done"
	JobGivenUp JobResult = "given_up"
	JobFailed  JobResult = "failed"
)

// Janitor counts the jobs that ended at a janitor of this process. Its methods may be
// called concurrently.
type Janitor struct {
	jobs, seconds, bytes *prometheus.CounterVec
}

// NewJanitor makes a Janitor that has counted nothing.
func NewJanitor() *Janitor {
	j := &Janitor{
		jobs: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvd_janitor_jobs_total",
			Help: "Background jobs that ended here, by how: done, given_up (somebody else's by now) or failed " +
				"(handed back, to be tried again)."}, []string{"kind", "result"}),
		seconds: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvd_janitor_job_seconds_total",
			Help: "Time that background jobs took here, however they ended."}, []string{"kind"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvd_janitor_job_transferred_bytes_total",
			Help: "Bytes that background jobs which ended here read from memory nodes and wrote to them. For a join " +
				"that is the index of every copy and the records that the new one lacked."}, []string{"kind"}),
	}
	for k := range jobKinds {
		j.seconds.WithLabelValues(overview.JobKind(k))
		j.bytes.WithLabelValues(overview.JobKind(k))
		for _, r := range []JobResult{JobDone, JobGivenUp, JobFailed} {
			j.jobs.WithLabelValues(overview.JobKind(k), string(r))
		}
	}
	return j
}

// Count counts a job with the time that it took and the bytes that it transferred.
func (j *Janitor) Count(kind dirpb.JobKind, r JobResult, took time.Duration, bytes uint64) {
	j.jobs.WithLabelValues(overview.JobKind(kind), string(r)).Inc()
	j.seconds.WithLabelValues(overview.JobKind(kind)).Add(took.Seconds())
	j.bytes.WithLabelValues(overview.JobKind(kind)).Add(float64(bytes))
}

// Describe implements [prometheus.Collector].
func (j *Janitor) Describe(ch chan<- *prometheus.Desc) {
	j.jobs.Describe(ch)
	j.seconds.Describe(ch)
	j.bytes.Describe(ch)
}

// Collect implements [prometheus.Collector].
func (j *Janitor) Collect(ch chan<- prometheus.Metric) {
	j.jobs.Collect(ch)
	j.seconds.Collect(ch)
	j.bytes.Collect(ch)
}
