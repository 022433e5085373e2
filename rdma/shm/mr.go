package shm

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/rdma/driver"
)

// tableSlots bounds how many MRs with remote rights a Device has at once.
const tableSlots = 1 << 16

// mrTable is a page of memory that a Device shows, read-only, to all who dial
// it: which of its MRs are still registered.
//
//	word 0        count of deregistrations, so that one load checks all MRs
//	word slot     generation of the MR in slot 1..65535: odd while registered
//
// A dialer that finds word 0 changed compares the generations of the MRs it
// knows. The kernel refuses it a writable mapping (F_SEAL_FUTURE_WRITE).
type mrTable struct {
	mem   *driver.Memory
	words []uint64
	free  []uint32 // slots below next that are free
	next  uint32
}

func newMRTable() (*mrTable, error) {
	m, err := mem.AllocControl(tableSlots*8, "kvd-mr-table", true)
	if err != nil {
		return nil, err
	}
	return &mrTable{mem: m, words: words(m.Bytes), next: 1}, nil
}

// words views 8-byte aligned mapped memory as words.
func words(b []byte) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}

func (t *mrTable) take() (slot uint32, gen uint64, err error) {
	switch {
	case len(t.free) > 0:
		slot = t.free[len(t.free)-1]
		t.free = t.free[:len(t.free)-1]
	case t.next < tableSlots:
		slot = t.next
		t.next++
	default:
		return 0, 0, fmt.Errorf("device has %d MRs with remote rights, at most %d", tableSlots-1, tableSlots-1)
	}
	return slot, atomic.AddUint64(&t.words[slot], 1), nil
}

// give revokes slot: the generation first, then the count that makes dialers
// look at it.
func (t *mrTable) give(slot uint32) {
	atomic.AddUint64(&t.words[slot], 1)
	atomic.AddUint64(&t.words[0], 1)
	t.free = append(t.free, slot)
}

// tableLocked makes the device's table when it is first needed.
func (d *Device) tableLocked() (*mrTable, error) {
	if d.mu.table == nil {
		t, err := newMRTable()
		if err != nil {
			return nil, err
		}
		d.mu.table = t
	}
	return d.mu.table, nil
}

// PD is a protection domain. Its fields are guarded by Device.mu.
type PD struct {
	d       *Device
	mrs     int
	qps     int
	peers   map[*peer]struct{}
	dealloc bool
}

// MR is a registered memory region.
type MR struct {
	pd     *PD
	mem    *driver.Memory
	off    int64
	bytes  []byte
	access driver.Access
	lkey   uint64
	rkey   uint64 // 0 without remote rights
	slot   uint32
	gen    uint64
	dead   bool // guarded by Device.mu
}

const remoteRights = driver.AccessRemoteRead | driver.AccessRemoteWrite | driver.AccessRemoteAtomic

// RegMR implements driver.PD.
func (p *PD) RegMR(m *driver.Memory, off, n int64, a driver.Access) (driver.MR, error) {
	return p.regMR(m, off, n, a, 0)
}

// RegMRAs implements driver.KeyChooser.
func (p *PD) RegMRAs(m *driver.Memory, off, n int64, a driver.Access, rkey uint64) (driver.MR, error) {
	if rkey == 0 || a&remoteRights == 0 {
		return nil, fmt.Errorf("rkey %#x with access rights %#x: %w", rkey, a, ErrKeyInUse)
	}
	return p.regMR(m, off, n, a, rkey)
}

// regMR makes up an rkey if this one is 0.
func (p *PD) regMR(m *driver.Memory, off, n int64, a driver.Access, rkey uint64) (driver.MR, error) {
	if off < 0 || n <= 0 || off%8 != 0 || off > int64(len(m.Bytes)) || n > int64(len(m.Bytes))-off {
		return nil, fmt.Errorf("bytes [%d,+%d) of %d: want 8-byte aligned and inside", off, n, len(m.Bytes))
	}
	if a&^(remoteRights|driver.AccessLocal) != 0 {
		return nil, fmt.Errorf("unknown access rights %#x", a)
	}
	if a&remoteRights != 0 && m.FD < 0 {
		return nil, ErrNotShared
	}
	r := &MR{pd: p, mem: m, off: off, bytes: m.Bytes[off : off+n : off+n], access: a}
	d := p.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.dealloc {
		return nil, driver.ErrClosed
	}
	if d.mu.rkeys[rkey] != nil {
		return nil, fmt.Errorf("rkey %#x: %w", rkey, ErrKeyInUse)
	}
	r.rkey = rkey
	if a&remoteRights != 0 {
		t, err := d.tableLocked()
		if err != nil {
			return nil, err
		}
		if r.slot, r.gen, err = t.take(); err != nil {
			return nil, err
		}
		for r.rkey == 0 || d.mu.rkeys[r.rkey] != nil {
			var b [8]byte
			_, _ = rand.Read(b[:]) // never fails
			r.rkey = binary.LittleEndian.Uint64(b[:])
		}
		d.mu.rkeys[r.rkey] = r
	}
	d.mu.lastLKey++
	r.lkey = d.mu.lastLKey
	d.mu.lkeys[r.lkey] = r
	p.mrs++
	return r, nil
}

// Dealloc implements driver.PD.
func (p *PD) Dealloc() error {
	var settled []*peer
	defer func() { // without the lock
		for _, q := range settled {
			q.forget()
		}
	}()
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if p.dealloc {
		return nil
	}
	for q := range p.peers {
		if q.orphaned() && q.settleLocked() {
			settled = append(settled, q)
		}
	}
	if p.mrs+p.qps+len(p.peers) > 0 {
		return fmt.Errorf("dealloc pd: %w: %d MRs, %d QPs, %d peers", ErrInUse, p.mrs, p.qps, len(p.peers))
	}
	p.dealloc = true
	p.d.mu.pds--
	return nil
}

// LKey implements driver.MR.
func (m *MR) LKey() uint64 { return m.lkey }

// RKey implements driver.MR. It is 0 without remote rights, and random
// otherwise: knowing it is half of the right to use it, the PD the other half.
func (m *MR) RKey() uint64 { return m.rkey }

// Base implements driver.MR.
func (m *MR) Base() uint64 { return 0 }

// Deregister implements driver.MR. It returns when no peer of the PD is inside a verb that began before the
// keys were revoked. ErrUnconfirmed means one was for longer than Options.ConfirmTimeout; calling again waits
// again.
func (m *MR) Deregister() error {
	d := m.pd.d
	d.mu.Lock()
	if !m.dead {
		m.dead = true
		m.pd.mrs--
		delete(d.mu.lkeys, m.lkey)
		d.deregs.Add(1)
		if m.rkey != 0 {
			delete(d.mu.rkeys, m.rkey)
			d.mu.table.give(m.slot)
		}
	}
	// A peer entering from now on sees the revocation, because it announces
	// itself in its cell before it looks at the table.
	type inside struct {
		p   *peer
		seq uint64
	}
	var wait []inside
	if m.rkey != 0 {
		for p := range m.pd.peers {
			if seq, busy := p.inside(); busy {
				wait = append(wait, inside{p, seq})
			}
		}
	}
	d.mu.Unlock()
	if len(wait) == 0 {
		return nil
	}
	deadline := time.Now().Add(d.o.ConfirmTimeout)
	var b backoff
	for _, w := range wait {
		for {
			if seq, busy := w.p.inside(); !busy || seq != w.seq {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("deregister mr: %w: %s", ErrUnconfirmed, w.p.remote)
			}
			b.wait(nil, w.p.confirmed)
		}
	}
	return nil
}

// exportFDLocked gives a descriptor for the MR's memfd that carries no more rights
// than access; the caller closes it. Device.mu is held, which keeps the memory
// from being freed.
func (m *MR) exportFDLocked(access driver.Access) (int, error) {
	if writable(access) {
		return unix.FcntlInt(uintptr(m.mem.FD), unix.F_DUPFD_CLOEXEC, 0)
	}
	return unix.Open(fmt.Sprintf("/proc/self/fd/%d", m.mem.FD), unix.O_RDONLY|unix.O_CLOEXEC, 0)
}
