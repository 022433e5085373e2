package sim_test

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/rdmatest"
	"github.com/kvd-project/kvd/rdma/sim"
)

// conformance judges one way to configure the provider; every case gets a
// schedule of its own.
func conformance(t *testing.T, o sim.Options) {
	var seed uint64
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		seed++
		o.Seed = seed
		h := rdmatest.Harness{Addr: "m1"}
		o.Wait = func() { h.Drive() }
		fab := sim.New(o)
		h.Passive, h.Active = rdma.NewDevice("sim", fab.Device("m1")), rdma.NewDevice("sim", fab.Device("c1"))
		if o.Manual {
			var mu sync.Mutex
			rng := rand.New(rand.NewPCG(seed, 1))
			var evs []sim.Event
			h.Drive = func() {
				mu.Lock()
				defer mu.Unlock()
				if evs = fab.AppendEvents(evs[:0]); len(evs) > 0 {
					_ = fab.Fire(evs[rng.IntN(len(evs))]) // stale if its QP was just closed
				}
			}
		}
		return h
	})
}

func TestConformance(t *testing.T) { conformance(t, sim.Options{}) }

// A single device is both ends; units are cache lines; READs overtake atomics.
func TestConformanceLoose(t *testing.T) {
	conformance(t, sim.Options{TearBytes: 64, NoAtomicThenRead: true, MaxInline: -1, MaxSendWR: 16, MaxMsg: 70000})
}

func TestConformanceManual(t *testing.T) {
	conformance(t, sim.Options{Manual: true, ReadPieces: 3, WritePieces: 3, DeliverEvents: true})
}

func TestConformanceManualImmediate(t *testing.T) {
	conformance(t, sim.Options{Manual: true, NoAtomicThenRead: true})
}

// Package rdma makes up for a provider without Values.
func TestConformanceNoValues(t *testing.T) { conformance(t, sim.Options{NoValues: true}) }

func TestConformanceManualNoValues(t *testing.T) {
	conformance(t, sim.Options{Manual: true, NoValues: true, ReadPieces: 3, WritePieces: 3, DeliverEvents: true})
}

// Package rdma makes up for an adapter: it takes SGEs, in registered memory alone.
func TestConformanceSGEs(t *testing.T) { conformance(t, sim.Options{SGEs: 3}) }

// Slack has no SGE of its own.
func TestConformanceTwoSGEs(t *testing.T) {
	conformance(t, sim.Options{SGEs: 2, TearBytes: 64, NoAtomicThenRead: true, MaxSendWR: 16})
}

func TestConformanceManualSGEs(t *testing.T) {
	conformance(t, sim.Options{Manual: true, SGEs: 3, ReadPieces: 3, WritePieces: 3, DeliverEvents: true})
}

func TestConformanceSynchronous(t *testing.T) { conformance(t, sim.Options{Synchronous: true}) }

func TestConformanceManualSynchronous(t *testing.T) {
	conformance(t, sim.Options{Manual: true, Synchronous: true, ReadPieces: 3, WritePieces: 3})
}
