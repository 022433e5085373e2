package sim

import (
	"fmt"
	"unsafe"

	"github.com/kvd-project/kvd/rdma/driver"
)

var (
	_ driver.PD         = (*pd)(nil)
	_ driver.KeyChooser = (*pd)(nil)
	_ driver.MR         = (*mr)(nil)
)

// pd is a protection domain; guarded by Fabric.mu.
type pd struct {
	dev      *device
	mrs, qps int
	gone     bool
}

// mr is a registered region; guarded by Fabric.mu. Both keys hold its index in
// Fabric.mu.mrs below and a nonce above, so a revoked one is never valid again unless RegMRAs is told so.
type mr struct {
	pd         *pd
	bytes      []byte
	base       uint64 // address of the first byte
	access     driver.Access
	lkey, rkey uint64
}

func (p *pd) RegMR(m *driver.Memory, off, n int64, a driver.Access) (driver.MR, error) {
	return p.register(m, off, n, a, 0)
}

// RegMRAs gives an rkey of an MR that is gone to another one, as an adapter may do for another process. No address of
// the one is the other's.
func (p *pd) RegMRAs(m *driver.Memory, off, n int64, a driver.Access, rkey uint64) (driver.MR, error) {
	if rkey == 0 {
		return nil, fmt.Errorf("rkey 0 names nothing")
	}
	return p.register(m, off, n, a, rkey)
}

// register makes up an rkey if it is given none.
func (p *pd) register(m *driver.Memory, off, n int64, a driver.Access, rkey uint64) (driver.MR, error) {
	if off < 0 || n <= 0 || off%8 != 0 || off > int64(len(m.Bytes)) || n > int64(len(m.Bytes))-off {
		return nil, fmt.Errorf("bytes [%d,+%d) of %d: want 8-byte aligned and inside", off, n, len(m.Bytes))
	}
	f := p.dev.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.gone || p.dev.closed {
		return nil, driver.ErrClosed
	}
	r := &mr{pd: p, bytes: m.Bytes[off : off+n : off+n], access: a, rkey: rkey}
	index := uint64(len(f.mu.mrs))
	if rkey != 0 {
		if index = uint64(uint32(rkey)); index >= uint64(len(f.mu.mrs)) || f.mu.mrs[index] != nil {
			return nil, fmt.Errorf("rkey %#x is in use, or no MR ever had it", rkey)
		}
		f.mu.again++
		r.base = f.mu.again << 40
	} else {
		f.mu.mrs = append(f.mu.mrs, nil)
	}
	r.lkey = (f.mu.rng.Uint64()|1<<63)&^(1<<32-1) | index
	if rkey == 0 {
		r.rkey = (f.mu.rng.Uint64()|1<<63)&^(1<<32-1) | index
	}
	f.mu.mrs[index] = r
	p.mrs++
	p.dev.mrs++
	return r, nil
}

func (p *pd) Dealloc() error {
	f := p.dev.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.mrs+p.qps != 0 {
		return fmt.Errorf("dealloc pd of %q: still in use: %d MRs, %d QPs", p.dev.name, p.mrs, p.qps)
	}
	p.gone = true
	return nil
}

func (m *mr) LKey() uint64 { return m.lkey }
func (m *mr) RKey() uint64 { return m.rkey }
func (m *mr) Base() uint64 { return m.base }

func (m *mr) Deregister() error {
	f := m.pd.dev.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if i := uint32(m.rkey); f.mu.mrs[i] == m {
		f.mu.mrs[i] = nil
		m.pd.mrs--
		m.pd.dev.mrs--
	}
	return nil
}

// byIndexLocked finds the region whose index a key holds.
func (f *Fabric) byIndexLocked(key uint64) *mr {
	if i := uint64(uint32(key)); i < uint64(len(f.mu.mrs)) {
		return f.mu.mrs[i]
	}
	return nil
}

// localOKLocked tells whether local lies inside the MR that lkey names and q may use.
func (q *qp) localOKLocked(lkey uint64, local []byte) bool {
	m := q.f.byIndexLocked(lkey)
	if m == nil || m.lkey != lkey || m.pd != q.pd {
		return false
	}
	off := localOffset(m, local)
	return off <= uint64(len(m.bytes)) && uint64(len(local)) <= uint64(len(m.bytes))-off
}

// piecesOKLocked tells whether all local memory of w is as localOKLocked wants it.
func (q *qp) piecesOKLocked(w *work) bool {
	if !q.localOKLocked(w.wr.LKey, w.wr.Local) {
		return false
	}
	for _, s := range w.sges {
		if !q.localOKLocked(s.LKey, s.Bytes) {
			return false
		}
	}
	return true
}

// localOffset is local's distance from m's first byte; huge if it lies before.
func localOffset(m *mr, local []byte) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(local))) - uintptr(unsafe.Pointer(unsafe.SliceData(m.bytes))))
}

// remoteLocked gives the target bytes of x, or nil if the target refuses it.
func (q *qp) remoteLocked(x *work) []byte {
	w := &x.wr
	m := q.f.byIndexLocked(w.RKey)
	if m == nil || m.rkey != w.RKey || m.pd != q.targetPD {
		return nil
	}
	need := driver.AccessRemoteAtomic
	switch w.Op {
	case driver.OpRead:
		need = driver.AccessRemoteRead
	case driver.OpWrite:
		need = driver.AccessRemoteWrite
	}
	if m.access&q.limit&need == 0 {
		return nil
	}
	off, n := w.RemoteAddr-m.base, uint64(x.bytes) // wraps for what is below
	if off > uint64(len(m.bytes)) || n > uint64(len(m.bytes))-off {
		return nil
	}
	return m.bytes[off : off+n]
}
