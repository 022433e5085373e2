// Package prom shows what a client counts to Prometheus.
//
// It leaves counting to package client and serving to its user, who registers a [NewCollector] and serves the
// registry. A collector may be scraped concurrently, and before and after the client is closed. A scrape asks every
// lane. So it takes the time for which the lanes are busy with what they do at the moment: microseconds.
//
// Metrics carry no labels of the client's own. If a process has several clients,
// tell them apart with prometheus.WrapCollectorWith:
//
//	reg.MustRegister(prometheus.WrapCollectorWith(prometheus.Labels{"namespace": "cache"}, prom.NewCollector(c)))
//
// A client that loses its session opens another. Counters go on from what they were;
// memory and connections are those of the present session.
package prom

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvd_client_"+name, help, labels, nil)
}

var (
	operations = desc("operations_total", "Operations that ended, by kind.", "op")
	roundTrips = desc("round_trips_total", "Round trips of operations to memory nodes, by kind of operation.", "op")
	verbs      = desc("verbs_total", "Verbs posted, by kind.", "verb")
	doorbells  = desc("doorbells_total", "Calls that posted one or more verbs.")
	readBytes  = desc("read_bytes_total", "Bytes asked for by READs.")
	written    = desc("written_bytes_total", "Bytes sent by WRITEs.")
	hintHits   = desc("hint_hits_total", "Operations that began with a remembered slot word.")
	mirrorHits = desc("mirror_hits_total", "Keys without a hint that were found where an image of the index had them.")
	mirrorOld  = desc("mirror_stale_total", "Keys that were not found where an image of the index had them.")
	mirrorSize = desc("mirror_bytes", "The client's own memory for images of the index.")
	casLosses  = desc("cas_losses_total", "Compare-and-swaps that found another word than expected.")
	unknown    = desc("unknown_outcomes_total", "Operations that ended without knowing whether they happened.")
	evicted    = desc("evicted_records_total", "Records that the client evicted from a cache to make room.")
	evictedB   = desc("evicted_bytes_total", "Memory of the records that the client evicted, or removed since they "+
		"had expired.")
	expired     = desc("expired_records_total", "Records that the client removed since they had expired.")
	sweepMemory = desc("sweep_memory_bytes", "The client's own memory in which it remembers the expiry of its puts.")
	sweepLost   = desc("sweep_forgotten_total", "Puts with an expiry that the client had no room to remember; their "+
		"records are removed later.")
	refused = desc("refused_places_total", "Unlinked places that could not be taken back, because slot words are "+
		"damaged.")
	notes = desc("access_notes_total", "Access words written; a cache chooses by them what to evict.")
	pins  = desc("pins_total", "Keys that the client has pinned for some time.")

	pinsPassed = desc("pins_passed_total", "Pinned records of samples that eviction passed over.")
	pinsOver   = desc("pins_over_total", "Samples taken while more was pinned than the namespace allows.")
	pinsBroken = desc("pins_broken_total", "Pinned records that were evicted early: more is pinned than the "+
		"namespace allows.")
	mended = desc("mended_copies_total", "Damaged copies of records that operations wrote anew from good ones: "+
		"a memory node's memory may be bad.")
	granted = desc("granted_bytes", "Memory that the directory granted to the session.")
	memory  = desc("memory_bytes", "Memory of the session by state. Live are records, and limbo replaced records "+
		"that somebody may still read. Free memory was granted to it and is unused; foreign memory was granted to "+
		"others, and unlinked by it.", "state")
	handedBack = desc("memory_handed_back_bytes_total", "Free memory that others were granted, and that the client "+
		"handed back to go home to them.")
	returned = desc("memory_returned_bytes_total", "Granted memory that the client gave back, to be granted to "+
		"anybody.")
	received = desc("memory_received_bytes_total", "Granted memory that others had unlinked and that came home to "+
		"the client.")
	refusedB = desc("memory_refused_bytes_total", "Memory that came home, or was granted, and that the client did "+
		"not take in, since its description cannot be right.")
	lost = desc("memory_lost_bytes_total", "Memory that the client gave up after an unknown outcome; a recall "+
		"finds it.")
	waits    = desc("memory_waits_total", "Operations that found no free memory and waited for some.")
	epochLag = desc("reclaim_epoch_lag", "Reclaim epochs between the newest and the oldest that somebody may "+
		"still work in.")
	connections = desc("connections", "Memory nodes that the session is connected to, by provider.", "provider")
	routes      = desc("routes", "Ways to memory nodes, where either end has several ports, by state. A connection "+
		"avoids those that have failed.", "state")
	path = desc("path", "Memory nodes that the session is connected to, by provider and reason. Over tcp, "+
		"where RDMA is within reach, that is not-built, no-adapter, adapter-unusable, not-offered, dial-failed or "+
		"asked-for. Otherwise it is empty.", "provider", "reason")
)

// usual are the operations of every client. Those of janitors and evictors are shown
// if there were some.
var usual = []string{"get", "put", "delete", "modify", "scan"}

// NewCollector gives the metrics of c. It does not own c.
func NewCollector(c *client.Client) prometheus.Collector { return collector{c} }

type collector struct{ c *client.Client }

func (x collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		operations, roundTrips, verbs, doorbells, readBytes, written, hintHits, mirrorHits, mirrorOld, mirrorSize,
		casLosses, unknown,
		evicted, evictedB, expired, sweepMemory, sweepLost, refused, notes, pins, pinsPassed,
		pinsOver, pinsBroken, mended, granted, memory, handedBack, returned, received, refusedB, lost, waits,
		epochLag, connections, path, routes,
	} {
		ch <- d
	}
}

func (x collector) Collect(ch chan<- prometheus.Metric) {
	s := x.c.Stats()
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	for op, n := range s.Ops {
		if n > 0 || slices.Contains(usual, op) {
			count(operations, n, op)
			count(roundTrips, s.Rounds[op], op)
		}
	}
	for i, n := range s.Verbs.Verbs {
		if i > 0 { // 0 is no verb
			count(verbs, n, rdma.Opcode(i).String())
		}
	}
	count(doorbells, s.Verbs.Doorbells)
	count(readBytes, s.Verbs.ReadBytes)
	count(written, s.Verbs.WriteBytes)
	count(hintHits, s.CacheHits)
	count(mirrorHits, s.MirrorHits)
	count(mirrorOld, s.MirrorStale)
	gauge(mirrorSize, uint64(s.MirrorBytes))
	count(casLosses, s.CASLosses)
	count(unknown, s.Unknown)
	count(evicted, s.Evicted)
	count(evictedB, s.EvictedBytes)
	count(expired, s.Expired)
	count(sweepLost, s.SweepForgotten)
	count(refused, s.RefusedPlaces)
	count(notes, s.Notes)
	count(pins, s.Pins)
	count(pinsPassed, s.PinsPassed)
	count(pinsOver, s.PinsOver)
	count(pinsBroken, s.PinsBroken)
	count(mended, s.Mended)
	gauge(sweepMemory, s.SweepBytes)
	gauge(granted, s.GrantedUnits*layout.UnitSize)
	gauge(memory, s.LiveUnits*layout.UnitSize, "live")
	gauge(memory, s.LimboUnits*layout.UnitSize, "limbo")
	gauge(memory, s.FreeUnits*layout.UnitSize, "free")
	gauge(memory, s.ForeignUnits*layout.UnitSize, "foreign")
	count(handedBack, s.HandedBackUnits*layout.UnitSize)
	count(returned, s.ReturnedUnits*layout.UnitSize)
	count(received, s.ReceivedUnits*layout.UnitSize)
	count(refusedB, s.RefusedUnits*layout.UnitSize)
	count(lost, s.LostUnits*layout.UnitSize)
	count(waits, s.MemoryWaits)
	gauge(epochLag, s.Epoch-min(s.Epoch, s.MinEpoch))
	by := make(map[string]uint64)
	for _, how := range s.Connections { // "tcp (CAS proxied to the adapter)"
		provider, _, _ := strings.Cut(how, " ")
		by[provider]++
	}
	for provider, n := range by {
		gauge(connections, n, provider)
	}
	failed := uint64(0)
	for _, p := range s.Routes {
		if p.Err != "" {
			failed++
		}
	}
	gauge(routes, uint64(len(s.Routes))-failed, "up")
	gauge(routes, failed, "failed")
	for _, p := range s.Paths {
		gauge(path, uint64(p.Connections), p.Provider, p.Reason)
	}
}
