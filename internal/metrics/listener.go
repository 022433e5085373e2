package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/netsrv"
)

var listenerFamily = &family{prefix: "kvd_listener_"}

var (
	listenerConns      = listenerFamily.desc("connections", "Open connections.", "listener")
	listenerHandshakes = listenerFamily.desc("handshakes", "Open connections whose handshake is not over.", "listener")
	listenerAccepted   = listenerFamily.desc("connections_total", "Connections let in.", "listener")
	listenerRefused    = listenerFamily.desc("connections_refused_total", "Connections refused or closed, by reason. "+
		"full is the limit in all, address that of one address. handshake: it gave way to another before its "+
		"handshake, or a request, was there whole. timeout: those took too long. idle: it did nothing, and gave way.",
		"listener", "reason")
	listenerFailures = listenerFamily.desc("accept_failures_total",
		"Times that no connection could be accepted, for want of file descriptors or memory.", "listener")
)

// Listeners shows who comes in by each of some listeners. Those that are nil are left out.
func Listeners(doors map[string]*netsrv.Door) prometheus.Collector {
	return listeners{listenerFamily, doors}
}

type listeners struct {
	*family
	doors map[string]*netsrv.Door
}

// Collect implements [prometheus.Collector].
func (l listeners) Collect(ch chan<- prometheus.Metric) {
	out := sink(ch)
	for name, d := range l.doors {
		if d == nil {
			continue
		}
		s := d.Stats()
		out.gauge(listenerConns, float64(s.Conns), name)
		out.gauge(listenerHandshakes, float64(s.Handshakes), name)
		out.count(listenerAccepted, float64(s.Accepted), name)
		out.count(listenerFailures, float64(s.Failures), name)
		for r := netsrv.Reason(1); r < netsrv.NumReasons; r++ {
			out.count(listenerRefused, float64(s.Refused[r]), name, r.String())
		}
	}
}
