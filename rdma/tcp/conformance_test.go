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

// TestConformanceWaiting is the same where lanes read their replies themselves.
func TestConformanceWaiting(t *testing.T) {
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		return waiting(harness(t, Options{}, Options{}))
	})
}

// limited is a device whose PDs have a limit of verbs.
type limited struct {
	driver.Device
	perSecond uint64
}

func (d limited) AllocPD() (driver.PD, error) {
	p, err := d.Device.AllocPD()
	if err == nil {
		p.(*pd).LimitRate(d.perSecond)
	}
	return p, err
}

// TestConformancePaced is the same while agents wait for turns all the time.
func TestConformancePaced(t *testing.T) {
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		h := harness(t, Options{}, Options{})
		h.Passive = rdma.NewDevice("tcp", limited{h.Passive.Driver(), 4000})
		return h
	})
}

// waiting has the lanes of h wait with CQ.Wait.
func waiting(h rdmatest.Harness) rdmatest.Harness {
	h.Wait = true
	return h
}

// bothReaders runs f with lanes that leave reading to goroutines and with lanes that read
// themselves.
func bothReaders(t *testing.T,
	f func(t *testing.T, newHarness func(t testing.TB, passive, active Options) rdmatest.Harness)) {
	t.Run("goroutine", func(t *testing.T) { f(t, harness) })
	t.Run("waiter", func(t *testing.T) {
		f(t, func(t testing.TB, passive, active Options) rdmatest.Harness {
			return waiting(harness(t, passive, active))
		})
	})
}
