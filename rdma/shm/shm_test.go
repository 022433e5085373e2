package shm

import (
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

func TestConformance(t *testing.T) {
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		return rdmatest.Harness{Passive: open(t), Active: open(t), Addr: filepath.Join(t.TempDir(), "shm")}
	})
}

// A single device is both ends, as kvd dev uses it, over an abstract socket.
func TestConformanceOneDevice(t *testing.T) {
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		d := open(t)
		return rdmatest.Harness{Passive: d, Active: d, Addr: "@kvd-" + t.TempDir()}
	})
}

func open(t testing.TB) *rdma.Device {
	t.Helper()
	d, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	return rdma.NewDevice("shm", d)
}

func TestMain(m *testing.M) {
	childMain()
	goleak.VerifyTestMain(m)
}
