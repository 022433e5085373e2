package engine

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"

	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma"
)

// buffer is registered local memory, known to every device of the session.
type buffer struct {
	b     []byte
	mem   *rdma.Memory
	mrs   []*rdma.MR
	lkeys []uint64 // by device
}

// bufPool makes registered buffers and keeps large ones for reuse.
type bufPool struct {
	devs []*rdma.Device
	pds  []*rdma.PD

	mu struct {
		sync.Mutex
		free [32][]*buffer // by log2 of the size
		kept int           // bytes in free
		all  int           // bytes registered
	}
}

const (
	minBuf = 16 << 10
	// maxKept bounds the idle large buffers of a session, in bytes.
	maxKept = 64 << 20
)

// open takes a PD of each device. The buffers of one pool are registered with all of them, since an operation
// may go from a memory node of one fabric to one of another.
func (p *bufPool) open(devs []*rdma.Device) error {
	p.devs = devs
	for _, d := range devs {
		pd, err := d.AllocPD()
		if err != nil {
			p.close()
			return err
		}
		p.pds = append(p.pds, pd)
	}
	return nil
}

// register maps n bytes and registers them with every device.
func (p *bufPool) register(n int) (*buffer, error) {
	mem, err := p.devs[0].Alloc(int64(n), rdma.AllocOptions{Name: "kvd-client"})
	if err != nil {
		return nil, fmt.Errorf("registered buffer of %s: %w", units.Bytes(n), err)
	}
	b := &buffer{b: mem.Bytes, mem: mem}
	for _, pd := range p.pds {
		mr, err := pd.RegMR(mem, 0, int64(len(mem.Bytes)), rdma.AccessLocal)
		if err != nil {
			b.free()
			return nil, err
		}
		b.mrs = append(b.mrs, mr)
		b.lkeys = append(b.lkeys, mr.LKey())
	}
	return b, nil
}

// free deregisters and unmaps b. Nothing may be under way that names it.
func (b *buffer) free() error {
	var errs []error
	for _, mr := range b.mrs {
		errs = append(errs, mr.Deregister())
	}
	return errors.Join(append(errs, b.mem.Free())...)
}

// get returns a buffer of at least n bytes.
func (p *bufPool) get(n int) (*buffer, error) {
	class := bits.Len(uint(max(n, minBuf) - 1))
	p.mu.Lock()
	if l := p.mu.free[class]; len(l) > 0 {
		b := l[len(l)-1]
		p.mu.free[class] = l[:len(l)-1]
		p.mu.kept -= len(b.b)
		p.mu.Unlock()
		return b, nil
	}
	p.mu.Unlock()
	return p.register(1 << class)
}

// put takes back a buffer that nothing under way names any more, and keeps it for the next long value while the pool
// holds less than maxKept bytes: mapping and registering one costs more than most operations do.
func (p *bufPool) put(b *buffer) {
	class := bits.Len(uint(len(b.b) - 1))
	p.mu.Lock()
	if p.mu.kept+len(b.b) <= maxKept {
		p.mu.free[class] = append(p.mu.free[class], b)
		p.mu.kept += len(b.b)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	_ = b.free() // nothing can be done about a failed unmap here
}

// close frees what the pool keeps. Buffers that are out come back by put, and are then freed there.
func (p *bufPool) close() error {
	var errs []error
	for i, l := range p.mu.free {
		for _, b := range l {
			errs = append(errs, b.free())
		}
		p.mu.free[i] = nil
	}
	for _, pd := range p.pds {
		errs = append(errs, pd.Dealloc())
	}
	p.pds = nil
	return errors.Join(errs...)
}
