package gateway

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/redis/acl"
)

// Histograms have buckets of powers of two: of 1 µs, of 1 command.
const (
	// The last bucket of each histogram, behind these, counts what is beyond them.
	timeBuckets  = 22 // 1 µs ... 2 s
	batchBuckets = 13 // 1 ... 4096
)

// commandStats are padded: connections on different processors count different
// commands.
// nanos is the sum of the times, and buckets counts calls by time: bucket i those of up to 2^i µs that are in none
// before.
type commandStats struct {
	ok, failed, nanos atomic.Uint64 // calls, and the time of all of them
	rejected          atomic.Uint64 // of those that failed: refused before they began
	buckets           [timeBuckets + 1]atomic.Uint64
	_                 [64]byte
}

// metrics are the gateway's counters. They are written by every connection, so commands are
// counted by batches and not one by one where they are alike; the rest is counted once for each
// read or write.
type metrics struct {
	commands          []commandStats // by command.id
	hits, misses      atomic.Uint64  // of lookups by GET and its like
	read, written     atomic.Uint64  // bytes
	protocolErrors    atomic.Uint64  // connections closed since they sent no RESP
	batches, batchSum atomic.Uint64  // of them, and of the entries in them
	batchBuckets      [batchBuckets + 1]atomic.Uint64
	queued            atomic.Int64                      // bytes of replies that sockets did not take
	authFails         atomic.Uint64                     // wrong passwords
	denied            [acl.DeniedAuth + 1]atomic.Uint64 // by why users were refused something
	httpRequests      atomic.Uint64                     // connections closed since they spoke HTTP
	evicted           atomic.Uint64                     // connections closed for others' memory
	late              atomic.Uint64                     // and since they were slow
	flooded           atomic.Uint64                     // and since they left messages unread
	messages          atomic.Uint64                     // given to subscribers
}

// noteCommands counts n commands that took so long each.
// A failed command is one that was answered with an error.
// A nil command counts nothing, which saves its callers a case.
func (m *metrics) noteCommands(c *command, n uint64, failed bool, took time.Duration) {
	if c == nil || n == 0 {
		return
	}
	s := &m.commands[c.ID]
	if failed {
		s.failed.Add(n)
	} else {
		s.ok.Add(n)
	}
	s.nanos.Add(n * uint64(took))
	s.buckets[bucket(uint64(took)/1000, timeBuckets)].Add(n)
}

// bucket is the first i with v <= 2^i, n if there is none.
// v is in the histogram's unit. A value of 0 is in the first bucket.
func bucket(v uint64, n int) int {
	if v <= 1 {
		return 0
	}
	return min(bits.Len64(v-1), n)
}

// batch counts n commands that went to the store in one client.Do.
// n counts entries: a command on several keys has one for each of them.
func (m *metrics) batch(n int) {
	m.batches.Add(1)
	m.batchSum.Add(uint64(n))
	m.batchBuckets[bucket(uint64(n), batchBuckets)].Add(1)
}

// noteLookups counts misses and hits.
func (m *metrics) noteLookups(n [2]uint64) {
	m.misses.Add(n[0])
	m.hits.Add(n[1])
}

var (
	descCommands = prometheus.NewDesc("kvd_gateway_commands_total", "Commands answered.", []string{"command", "result"},
		nil)
	descSeconds = prometheus.NewDesc("kvd_gateway_command_seconds",
		"Time from a command's arrival to its reply; pipelined commands share it.", []string{"command"}, nil)
	descConns    = prometheus.NewDesc("kvd_gateway_connections", "Open connections.", nil, nil)
	descAccepted = prometheus.NewDesc("kvd_gateway_connections_total", "Connections accepted.", nil, nil)
	descRefused  = prometheus.NewDesc("kvd_gateway_connections_refused_total", "Connections over the limit.", nil, nil)
	descHits     = prometheus.NewDesc("kvd_gateway_hits_total", "Lookups that found their key.", nil, nil)
	descMisses   = prometheus.NewDesc("kvd_gateway_misses_total", "Lookups that did not find their key.", nil, nil)
	descRead     = prometheus.NewDesc("kvd_gateway_bytes_read_total", "Bytes received.", nil, nil)
	descWritten  = prometheus.NewDesc("kvd_gateway_bytes_written_total", "Bytes sent.", nil, nil)
	descBatch    = prometheus.NewDesc("kvd_gateway_batch_commands", "Commands that went to the store together.", nil,
		nil)
	descDenied = prometheus.NewDesc("kvd_gateway_denied_total",
		"Commands that users may not perform: not the command, not in the database, or not on the key or the channel.",
		[]string{"reason"}, nil)
	descAuth   = prometheus.NewDesc("kvd_gateway_auth_failures_total", "Wrong passwords.", nil, nil)
	descClosed = prometheus.NewDesc("kvd_gateway_connections_closed_total", "Connections that the gateway closed. "+
		"http: a browser, perhaps of a web page that attacks. memory: others waited for what it had. slow: it left a "+
		"command half said, or its replies unread. messages: it left messages that others published, or "+
		"invalidations, unread.", []string{"reason"}, nil)
	descBuffers = prometheus.NewDesc("kvd_gateway_buffer_bytes",
		"Memory that connections, of memcached's protocol too, have of buffer-memory.", nil, nil)
	descListen = prometheus.NewDesc("kvd_gateway_subscriptions",
		"Subscriptions of connections, by what they are to: channel, pattern or shard.", []string{"to"}, nil)
	descMessages = prometheus.NewDesc("kvd_gateway_messages_total",
		"Messages given to subscribers of this gateway, one for each.", nil, nil)
	descTracked = prometheus.NewDesc("kvd_gateway_tracked_keys",
		"Keys that clients cache by CLIENT TRACKING, without BCAST.", nil, nil)
	descPeers = prometheus.NewDesc("kvd_gateway_peers", "Other gateways of the same databases, by state. The "+
		"directory names known ones. Following ones tell this one what happens, and this one tells followers.",
		[]string{"state"}, nil)
	descDropped = prometheus.NewDesc("kvd_gateway_peer_dropped_total",
		"Messages that were not told to other gateways, which read too slowly.", nil, nil)
	descProtocol = prometheus.NewDesc("kvd_gateway_protocol_errors_total",
		"Connections closed because they sent no RESP.", nil, nil)
)

// collector gives the counters to Prometheus when it asks.
type collector struct{ g *Gateway }

func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descCommands, descSeconds, descConns, descAccepted, descRefused, descHits,
		descMisses, descRead, descWritten, descBatch, descProtocol, descAuth, descDenied, descClosed, descBuffers,
		descListen, descMessages, descTracked, descPeers, descDropped} {
		ch <- d
	}
}

// Collect reads the counters one after the other while they change, so a sum and its parts may
// differ by what happened meanwhile. Commands that were never called are left out: there are
// hundreds.
// It asks no store and waits for nobody, so that a store in trouble can still be observed. The locks of hub and
// live.Tracked are held while it counts.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	m := &c.g.m
	counter := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	for _, cmd := range commandsByID {
		s := &m.commands[cmd.ID]
		ok, failed := s.ok.Load(), s.failed.Load()
		if ok+failed == 0 {
			continue
		}
		counter(descCommands, ok, cmd.Name, "ok")
		counter(descCommands, failed, cmd.Name, "error")
		n, b := cumulative(s.buckets[:], 1e-6)
		ch <- prometheus.MustNewConstHistogram(descSeconds, n, float64(s.nanos.Load())/1e9, b, cmd.Name)
	}
	ch <- prometheus.MustNewConstMetric(descConns, prometheus.GaugeValue, float64(c.g.srv.Conns()))
	counter(descAccepted, c.g.srv.Accepted())
	counter(descRefused, c.g.srv.Refused())
	counter(descHits, m.hits.Load())
	counter(descMisses, m.misses.Load())
	counter(descRead, m.read.Load())
	counter(descWritten, m.written.Load())
	counter(descProtocol, m.protocolErrors.Load())
	counter(descAuth, m.authFails.Load())
	for _, why := range []acl.Denial{acl.DeniedCommand, acl.DeniedDatabase, acl.DeniedKey, acl.DeniedChannel} {
		counter(descDenied, m.denied[why].Load(), why.String())
	}
	counter(descClosed, m.httpRequests.Load(), "http")
	counter(descClosed, m.evicted.Load(), "memory")
	counter(descClosed, m.late.Load(), "slow")
	counter(descClosed, m.flooded.Load(), "messages")
	ch <- prometheus.MustNewConstMetric(descBuffers, prometheus.GaugeValue, float64(c.g.o.Budget.Used()))
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	channels, patterns, shards := c.g.hub.Subscriptions()
	gauge(descListen, channels, "channel")
	gauge(descListen, patterns, "pattern")
	gauge(descListen, shards, "shard")
	counter(descMessages, m.messages.Load())
	tracked, _, _ := c.g.tracked.Counts()
	gauge(descTracked, tracked)
	peers := c.g.o.Peers.Stats()
	gauge(descPeers, peers.Known, "known")
	gauge(descPeers, peers.Following, "following")
	gauge(descPeers, peers.Followers, "followers")
	counter(descDropped, peers.Dropped)
	n, b := cumulative(m.batchBuckets[:], 1)
	ch <- prometheus.MustNewConstHistogram(descBatch, n, float64(m.batchSum.Load()), b)
}

// cumulative turns counters into Prometheus's buckets; the last one is +Inf.
// scale is what a unit of the histogram is in Prometheus's, seconds for times.
func cumulative(counts []atomic.Uint64, scale float64) (n uint64, buckets map[float64]uint64) {
	buckets = make(map[float64]uint64, len(counts))
	for i := range counts {
		n += counts[i].Load()
		if i < len(counts)-1 {
			buckets[float64(uint64(1)<<i)*scale] = n
		}
	}
	return n, buckets
}
