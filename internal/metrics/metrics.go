// Package metrics shows what the store's parts already tell about themselves to
// Prometheus: memory nodes, the directory, raft, janitors, and, by package client/prom, clients.
//
// It leaves counting to the parts and serving to internal/httpd; commands alone put
// them together. Start with [MemNode], [Directory], [Raft] and [Janitor]. All collectors may be
// scraped concurrently; none of them owns what it shows.
//
// Names are kvd_PART_WHAT_UNIT, in seconds and bytes, _total for what only grows.
// docs/metrics.md lists them; a test in deploy compares that list with what is served.
package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/prom"
)

// Client shows a client of a process that has others too.
func Client(namespace string, c *client.Client) prometheus.Collector {
	return prometheus.WrapCollectorWith(prometheus.Labels{"namespace": namespace}, prom.NewCollector(c))
}

// family is the descriptions of one collector.
type family struct {
	prefix string
	descs  []*prometheus.Desc
}

func (f *family) desc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(f.prefix+name, help, labels, nil)
	f.descs = append(f.descs, d)
	return d
}

func (f *family) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range f.descs {
		ch <- d
	}
}

// sink is one scrape.
type sink chan<- prometheus.Metric

func (s sink) gauge(d *prometheus.Desc, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (s sink) count(d *prometheus.Desc, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
