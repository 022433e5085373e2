package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/broker"
	"github.com/kvd-project/kvd/internal/ring"
)

var brokerFamily = &family{prefix: "kvd_broker_"}

var (
	brokerPrograms = brokerFamily.desc("programs", "Programs that are connected.", "socket")
	brokerArenas   = brokerFamily.desc("arena_bytes", "Bytes of memory that programs share with the broker.", "socket")
	brokerQueues   = brokerFamily.desc("queues", "Queues of programs that are connected.", "socket")
	brokerViews    = brokerFamily.desc("views", "Views of values in place that are not over.", "socket")
	brokerShown    = brokerFamily.desc("view_bytes", "Bytes of values that views show.", "socket")
	brokerLapsed   = brokerFamily.desc("views_lapsed_total", "Views that a program did not release in time.", "socket")
	brokerAccepted = brokerFamily.desc("connections_total", "Connections let in.", "socket")
	brokerRefused  = brokerFamily.desc("connections_refused_total", "Connections refused at the limit.", "socket")
	brokerBroken   = brokerFamily.desc("protocol_errors_total",
		"Programs that were disconnected since they broke the protocol.", "socket")
	brokerBatches = brokerFamily.desc("batches_total", "Groups of operations that shared round trips.", "socket")
	brokerBytes   = brokerFamily.desc("value_bytes_total", "Bytes of values, read and written.", "socket")
	brokerOps     = brokerFamily.desc("operations_total", "Operations, by kind.", "socket", "op")
	brokerCodes   = brokerFamily.desc("completions_total", "Operations that ended, by how.", "socket", "code")
)

// Broker shows what programs do by a broker's sockets.
func Broker(b interface {
	Each(f func(socket string, c *broker.Counters))
}) prometheus.Collector {
	return brokers{brokerFamily, b.Each}
}

type brokers struct {
	*family
	each func(f func(socket string, c *broker.Counters))
}

// Collect implements [prometheus.Collector].
func (b brokers) Collect(ch chan<- prometheus.Metric) {
	out := sink(ch)
	b.each(func(socket string, c *broker.Counters) {
		out.gauge(brokerPrograms, float64(c.Clients.Load()), socket)
		out.gauge(brokerArenas, float64(c.ArenaBytes.Load()), socket)
		out.gauge(brokerQueues, float64(c.Queues.Load()), socket)
		out.gauge(brokerViews, float64(c.Views.Load()), socket)
		out.gauge(brokerShown, float64(c.ViewBytes.Load()), socket)
		out.count(brokerLapsed, float64(c.Lapsed.Load()), socket)
		out.count(brokerAccepted, float64(c.Accepted.Load()), socket)
		out.count(brokerRefused, float64(c.Refused.Load()), socket)
		out.count(brokerBroken, float64(c.Broken.Load()), socket)
		out.count(brokerBatches, float64(c.Batches.Load()), socket)
		out.count(brokerBytes, float64(c.Bytes.Load()), socket)
		for op := range c.Ops {
			if ring.Op(op).Known() {
				out.count(brokerOps, float64(c.Ops[op].Load()), socket, ring.Op(op).String())
			}
		}
		for code := range c.Codes {
			out.count(brokerCodes, float64(c.Codes[code].Load()), socket, ring.Code(code).String())
		}
	})
}
