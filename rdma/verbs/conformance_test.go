//go:build verbs && cgo && linux

package verbs

import (
	"os"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// needAdapters skips where there is no Soft-RoCE to test with. With KVD_VERBS=1,
// as in the virtual machine, nothing skips.
func needAdapters(t testing.TB) {
	if os.Getenv("KVD_VERBS") != "1" {
		t.Skip("needs two RDMA adapters, rxe0 and rxe1: make test-verbs")
	}
}

// needIWARP is needAdapters for siw's, which are in a virtual machine of their own.
func needIWARP(t testing.TB) {
	if os.Getenv("KVD_VERBS") != "siw" {
		t.Skip("needs two iWARP adapters, siw0 and siw1: make test-verbs")
	}
}

func open(t testing.TB, o Options) *rdma.Device {
	t.Helper()
	d, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return rdma.NewDevice("verbs", d)
}

func TestConformance(t *testing.T) {
	needAdapters(t)
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		return rdmatest.Harness{Passive: open(t, Options{Device: "rxe0"}), Active: open(t, Options{Device: "rxe1"}),
			Addr: "127.0.0.1:0"}
	})
}

// Both ends on one adapter: no frame leaves it.
func TestConformanceLoopback(t *testing.T) {
	needAdapters(t)
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		d := open(t, Options{Device: "rxe0"})
		return rdmatest.Harness{Passive: d, Active: d, Addr: "127.0.0.1:0"}
	})
}

// Memory whose atomics an agent executes.
func TestConformanceAgent(t *testing.T) {
	needAdapters(t)
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		return rdmatest.Harness{Passive: open(t, Options{Device: "rxe0", Atomics: AtomicsAgent}),
			Active: open(t, Options{Device: "rxe1", Atomics: AtomicsAgent}), Addr: "127.0.0.1:0"}
	})
}

// Queue pairs that the connection manager connects.
func TestConformanceCM(t *testing.T) {
	needAdapters(t)
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		return rdmatest.Harness{Passive: open(t, Options{Device: "rxe0", Connect: ConnectCM}),
			Active: open(t, Options{Device: "rxe1", Connect: ConnectCM}), Addr: "127.0.0.1:0"}
	})
}

// Adapters of iWARP: agents' atomics, and the manager.
func TestConformanceIWARP(t *testing.T) {
	needIWARP(t)
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		return rdmatest.Harness{Passive: open(t, Options{Device: "siw0"}), Active: open(t, Options{Device: "siw1"}),
			Addr: "127.0.0.1:0"}
	})
}
