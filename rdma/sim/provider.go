package sim

import (
	"fmt"
	"os"
	"slices"

	"github.com/kvd-project/kvd/rdma/driver"
)

var _ driver.Device = (*device)(nil)

// device is one end of the fabric. Its fields are guarded by Fabric.mu.
type device struct {
	f       *Fabric
	name    string
	closed  bool
	crashed bool

	mrs, qps, cqs, listeners int // open
}

func (d *device) Caps() driver.Caps { return d.f.caps }

// Alloc ignores the options beyond recording them: heap memory has no pages to
// lock and no descriptor to share.
func (d *device) Alloc(size int64, o driver.AllocOptions) (*driver.Memory, error) {
	const most = 1 << 40 // bytes; far beyond any heap, and keeps rounding exact
	if size <= 0 || size > most {
		return nil, fmt.Errorf("alloc %q: size %d bytes, want 1 to %d", o.Name, size, int64(most))
	}
	if o.Adopt != nil || o.File != nil {
		return nil, fmt.Errorf("alloc %q: adopt memory of another process: %w", o.Name, driver.ErrNotSupport)
	}
	page := int64(os.Getpagesize())
	return driver.NewMemory(make([]byte, (size+page-1)/page*page), -1, o, nil), nil
}

func (d *device) AllocPD() (driver.PD, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if d.closed {
		return nil, driver.ErrClosed
	}
	return &pd{dev: d}, nil
}

func (d *device) CreateCQ(depth int) (driver.CQ, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if d.closed {
		return nil, driver.ErrClosed
	}
	d.cqs++
	c := &cq{dev: d, ready: make(chan struct{}, 1)}
	d.f.mu.cqs = append(d.f.mu.cqs, c)
	return c, nil
}

func (d *device) Close() error {
	f := d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.closed {
		return nil
	}
	if d.mrs+d.qps+d.cqs+d.listeners != 0 {
		return fmt.Errorf("close device %q: still open: %d MRs, %d QPs, %d CQs, %d listeners", d.name, d.mrs, d.qps,
			d.cqs, d.listeners)
	}
	d.closed = true
	f.mu.devices = slices.DeleteFunc(f.mu.devices, func(x *device) bool { return x == d })
	return nil
}
