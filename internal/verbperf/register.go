package verbperf

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma"
)

// Registration is what one way of registering memory took.
type Registration struct {
	Pages   string `json:"pages"`   // "4KiB", "THP", "2MiB"
	Threads int    `json:"threads"` // that took the pages beforehand; 0: they are taken when somebody needs them
	Bytes   int64  `json:"bytes"`
	// Seconds a GiB: to map the memory and take its pages, to register it, which for an adapter pins each page, and to
	// deregister it.
	Alloc      float64 `json:"alloc_seconds_per_gib"`
	Register   float64 `json:"register_seconds_per_gib"`
	Deregister float64 `json:"deregister_seconds_per_gib"`
	// Missing is why there are no such pages; the times are 0 then.
	Missing string `json:"missing,omitempty"`
}

// mostThreads is how many goroutines the system's pages are taken by; see driver.AllocOptions.Populate.
const mostThreads = 4

// Registers measures how long size bytes take to register with dev, for each kind of page and number of threads. It
// holds one such piece of memory at a time. The process has no transparent huge pages while small pages are measured.
func Registers(ctx context.Context, dev *rdma.Device, size int64) (rs []Registration, err error) {
	threads := []int{0, 1}
	if n := min(mostThreads, runtime.NumCPU()); n > 1 {
		threads = append(threads, n)
	}
	for _, k := range []struct {
		pages string
		huge  int
		small bool
	}{{"4KiB", 0, true}, {"THP", 0, false}, {"2MiB", 2 << 20, false}} {
		for _, n := range threads {
			if err := ctx.Err(); err != nil {
				return rs, context.Cause(ctx)
			}
			r := Registration{Pages: k.pages, Threads: n, Bytes: size}
			o := rdma.AllocOptions{Name: "kvctl-perf-register", HugePageBytes: k.huge, Shared: dev.Name() == "shm"}
			err := r.measure(dev, o, k.small)
			if k.huge != 0 && err != nil { // there are none, or not enough
				rs = append(rs, Registration{Pages: k.pages, Missing: err.Error()})
				break
			}
			if err != nil {
				return rs, fmt.Errorf("%s pages, %d threads: %w", k.pages, n, err)
			}
			rs = append(rs, r)
		}
	}
	return rs, nil
}

func (r *Registration) measure(dev *rdma.Device, o rdma.AllocOptions, small bool) (err error) {
	var undo []func() error
	defer func() {
		for i := len(undo) - 1; i >= 0; i-- {
			err = errors.Join(err, undo[i]())
		}
	}()
	if small {
		if err := unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("turn transparent huge pages off: %w", err)
		}
		undo = append(undo, func() error { return unix.Prctl(unix.PR_SET_THP_DISABLE, 0, 0, 0, 0) })
	}
	if r.Threads > 0 {
		turns := make(chan struct{}, r.Threads)
		o.Populate = func(take func() error) error {
			turns <- struct{}{}
			defer func() { <-turns }()
			return take()
		}
	}
	perGiB := func(began time.Time) float64 { return time.Since(began).Seconds() / float64(r.Bytes) * (1 << 30) }
	began := time.Now()
	m, err := dev.Alloc(r.Bytes, o)
	if err != nil {
		return err
	}
	r.Alloc = perGiB(began)
	undo = append(undo, m.Free)
	pd, err := dev.AllocPD()
	if err != nil {
		return err
	}
	undo = append(undo, pd.Dealloc)
	began = time.Now()
	mr, err := pd.RegMR(m, 0, r.Bytes, rights)
	if err != nil {
		return err
	}
	r.Register = perGiB(began)
	began = time.Now()
	err = mr.Deregister()
	r.Deregister = perGiB(began)
	return err
}
