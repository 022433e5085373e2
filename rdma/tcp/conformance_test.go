package tcp

import (
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

func open(t testing.TB, o Options) driver.Device {
	t.Helper()
	d, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	d.(*device).loops = agentLoops
	return d
}

func harness(t testing.TB, passive, active Options) rdmatest.Harness {
	t.Helper()
	return rdmatest.Harness{
		Passive: rdma.NewDevice("tcp", open(t, passive)),
		Active:  rdma.NewDevice("tcp", open(t, active)),
		Addr:    "127.0.0.1:0",
	}
}

func TestConformance(t *testing.T) { conformance(t) }

// TestConformanceWithoutLoops has agents stay with their goroutines.
func TestConformanceWithoutLoops(t *testing.T) {
	defer func(n int) { agentLoops = n }(agentLoops)
	agentLoops = 0
	conformance(t)
}

func conformance(t *testing.T) {
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		return harness(t, Options{}, Options{})
	})
}
