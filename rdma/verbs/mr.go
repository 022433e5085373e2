//go:build verbs && cgo && linux

package verbs

// #include "shim.h"
import "C"

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/kvd-project/kvd/rdma/driver"
)

// pd is a protection domain of the adapter.
type pd struct {
	d  *device
	c  *C.struct_ibv_pd
	mu struct {
		sync.Mutex
		dead  bool
		qps   int
		begun int            // registrations under way
		mrs   map[uint32]*mr // by rkey, for the agent
		local map[uint64]*mr // by lkey
	}
}

// mr is a memory region of the adapter. Its keys are the adapter's, of 32 bits.
type mr struct {
	pd     *pd
	c      *C.struct_ibv_mr
	bytes  []byte
	base   uint64 // address of the first byte, to the adapter
	access driver.Access
	lkey   uint32
	rkey   uint32
	// use is held for reading by an agent's atomic, for writing to deregister.
	use  sync.RWMutex
	dead atomic.Bool // set under use
}

var (
	_ driver.PD = (*pd)(nil)
	_ driver.MR = (*mr)(nil)
)

func (d *device) AllocPD() (driver.PD, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil, driver.ErrClosed
	}
	p := &pd{d: d}
	p.mu.mrs, p.mu.local = make(map[uint32]*mr), make(map[uint64]*mr)
	if rc := C.kvd_alloc_pd(d.ctx, &p.c); rc != 0 {
		return nil, syscall.Errno(rc)
	}
	d.mu.pds++
	return p, nil
}

// Dealloc fails while MRs or QPs of p remain.
func (p *pd) Dealloc() error {
	p.d.departing.wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.dead {
		return fmt.Errorf("verbs: dealloc pd: %w", driver.ErrClosed)
	}
	if n := len(p.mu.mrs) + p.mu.begun; n+p.mu.qps > 0 {
		return fmt.Errorf("verbs: dealloc pd: %d MRs and %d QPs remain", n, p.mu.qps)
	}
	if rc := C.kvd_dealloc_pd(p.c); rc != 0 {
		return fmt.Errorf("verbs: dealloc pd: %w", syscall.Errno(rc))
	}
	p.mu.dead = true
	p.d.mu.Lock()
	p.d.mu.pds--
	p.d.mu.Unlock()
	return nil
}

func (p *pd) addQP() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.dead {
		return fmt.Errorf("PD: %w", driver.ErrClosed)
	}
	p.mu.qps++
	return nil
}

func (p *pd) removeQP() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.qps--
}

// RegMR pins the memory. A right that is not given is refused by the adapter.
func (p *pd) RegMR(m *driver.Memory, off, n int64, a driver.Access) (driver.MR, error) {
	flags := accessFlags(a, p.d.native)
	if a&driver.AccessLocal != 0 && p.d.iwarp() {
		flags |= C.IBV_ACCESS_REMOTE_WRITE // for what a READ brings (RFC 5040, 6.1): it comes as a WRITE does
	}
	return p.register(m, off, n, a, flags)
}

func (p *pd) register(m *driver.Memory, off, n int64, a driver.Access, flags C.int) (driver.MR, error) {
	if off < 0 || n <= 0 || off > int64(len(m.Bytes)) || n > int64(len(m.Bytes))-off {
		return nil, fmt.Errorf("bytes [%d,+%d) of %d", off, n, len(m.Bytes))
	}
	r := &mr{pd: p, bytes: m.Bytes[off : off+n : off+n], access: a}
	va := uint64(addressOf(r.bytes))
	if va%8 != 0 {
		return nil, fmt.Errorf("memory at offset %d is not 8-byte aligned", off)
	}
	if r.base = va; !p.d.ownBase {
		r.base = baseOf(va, a)
	}
	p.mu.Lock()
	if p.mu.dead {
		p.mu.Unlock()
		return nil, fmt.Errorf("PD: %w", driver.ErrClosed)
	}
	p.mu.begun++
	p.mu.Unlock()
	// Pinning takes long, and several processors can do it at once.
	rc := C.kvd_reg_mr(p.c, C.uint64_t(va), C.size_t(n), C.uint64_t(r.base), flags, &r.c)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.begun--
	if rc != 0 {
		return nil, limited("register memory", n, rc)
	}
	r.lkey, r.rkey = uint32(r.c.lkey), uint32(r.c.rkey)
	p.add(r)
	return r, nil
}

// add enters r under its keys. An MR that others reach is none for local buffers: its addresses are not those of its
// bytes.
func (p *pd) add(r *mr) {
	p.mu.mrs[r.rkey] = r
	if r.access&driver.AccessLocal != 0 {
		p.mu.local[r.LKey()] = r
	}
}

// localMR is the MR of an lkey, or nil.
func (p *pd) localMR(lkey uint64) *mr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.local[lkey]
}

// has tells whether all of b lies in r.
func (r *mr) has(b []byte) bool {
	at := addressOf(b) - addressOf(r.bytes) // wraps for what is below
	return at <= uintptr(len(r.bytes)) && uintptr(len(b)) <= uintptr(len(r.bytes))-at
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// alignBits are the low bits that an MR's address at the adapter has in common with its mapping's. Adapters want those
// of a page, of 1 GiB at most.
const alignBits = 30

// baseOf is where an adapter has memory that is mapped at va. Of memory that others reach it is made up: an adapter may
// give an rkey again, to another region or another process, and mappings begin where earlier ones did. A verb for
// memory that is gone must meet none at all.
func baseOf(va uint64, a driver.Access) uint64 {
	if a&driver.AccessLocal != 0 {
		return va
	}
	return va&(1<<alignBits-1) | random64()>>32<<alignBits // below 2^62: the sum with a size does not wrap
}

// accessFlags are the adapter's rights of an MR or of a queue pair. An MR that
// others may change must be writable to its owner, too (ibv_reg_mr(3)).
func accessFlags(a driver.Access, native bool) C.int {
	var f C.int
	if a&driver.AccessLocal != 0 {
		f |= C.IBV_ACCESS_LOCAL_WRITE
	}
	if a&driver.AccessRemoteRead != 0 {
		f |= C.IBV_ACCESS_REMOTE_READ
	}
	if a&driver.AccessRemoteWrite != 0 {
		f |= C.IBV_ACCESS_REMOTE_WRITE | C.IBV_ACCESS_LOCAL_WRITE
	}
	if a&driver.AccessRemoteAtomic != 0 && native {
		f |= C.IBV_ACCESS_REMOTE_ATOMIC | C.IBV_ACCESS_LOCAL_WRITE
	}
	return f
}

func (r *mr) LKey() uint64 { return uint64(r.lkey) }

// RKey is the adapter's: 32 bits, and few of them are random. The PD and the handshake keep strangers out, not the key.
func (r *mr) RKey() uint64 { return uint64(r.rkey) }

// Base is the mapping's virtual address for local buffers, made up for others.
func (r *mr) Base() uint64 { return r.base }

// Deregister returns when neither the adapter nor an agent touches the region
// any more.
func (r *mr) Deregister() error {
	r.use.Lock()
	defer r.use.Unlock()
	if r.dead.Load() {
		return fmt.Errorf("verbs: deregister mr: %w", driver.ErrClosed)
	}
	// Out of the table first: once the adapter has let go of the key another
	// region may get it.
	r.pd.mu.Lock()
	delete(r.pd.mu.mrs, r.rkey)
	delete(r.pd.mu.local, r.LKey())
	r.pd.mu.Unlock()
	if rc := C.kvd_dereg_mr(r.c); rc != 0 {
		r.pd.mu.Lock()
		r.pd.add(r)
		r.pd.mu.Unlock()
		return fmt.Errorf("verbs: deregister mr: %w", syscall.Errno(rc))
	}
	r.dead.Store(true)
	return nil
}

func random64() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}

func random24() uint32 { return uint32(random64()) & (1<<24 - 1) }

func getWord(b []byte) uint64    { return binary.NativeEndian.Uint64(b) }
func putWord(b []byte, v uint64) { binary.NativeEndian.PutUint64(b, v) }
