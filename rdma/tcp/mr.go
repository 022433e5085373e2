package tcp

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-project/kvd/rdma/driver"
)

// pd is a protection domain: the table in which its QPs and connections look
// keys up, so that a key of another PD is simply unknown.
type pd struct {
	d *device
	// keys is replaced as a whole under d.mu; readers never lock.
	keys  atomic.Pointer[keyTable]
	qps   int                   // QPs and connections; guarded by d.mu
	limit atomic.Pointer[limit] // nil: none; stored under d.mu
	paced atomic.Int64          // ns that agents waited for a turn, all together
}

type keyTable struct {
	byRKey map[uint64]*mr
	byLKey map[uint64]*mr
}

// mr is a registered memory region. Its remote addresses start at 0.
type mr struct {
	pd     *pd
	bytes  []byte
	access driver.Access
	lkey   uint64
	rkey   uint64
	dead   atomic.Bool
	// proxy executes atomics in this CPU's place; nil: nobody does.
	proxy atomic.Pointer[driver.AtomicFunc]
	fn    *function // performs READs, and there are no bytes; or nil
}

// size is how many bytes peers see.
func (r *mr) size() uint64 {
	if r.fn != nil {
		return uint64(r.fn.size)
	}
	return uint64(len(r.bytes))
}

var (
	_ driver.PD            = (*pd)(nil)
	_ driver.MR            = (*mr)(nil)
	_ driver.AtomicProxier = (*mr)(nil)
	_ driver.KeyChooser    = (*pd)(nil)
)

func (p *pd) RegMR(m *driver.Memory, off, n int64, a driver.Access) (driver.MR, error) {
	return p.RegMRAs(m, off, n, a, randomKey())
}

func randomKey() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:]) // never fails
		if k := binary.LittleEndian.Uint64(b[:]); k != 0 {
			return k
		}
	}
}

// ErrKeyInUse means that an rkey names another MR of the PD, or nothing.
var ErrKeyInUse = errors.New("rkey cannot be used")

func (p *pd) RegMRAs(m *driver.Memory, off, n int64, a driver.Access, rkey uint64) (driver.MR, error) {
	if rkey == 0 {
		return nil, fmt.Errorf("rkey 0: %w", ErrKeyInUse)
	}
	if off < 0 || n <= 0 || off > int64(len(m.Bytes)) || n > int64(len(m.Bytes))-off {
		return nil, fmt.Errorf("bytes [%d,+%d) of %d", off, n, len(m.Bytes))
	}
	b := m.Bytes[off : off+n : off+n]
	if uintptr(unsafe.Pointer(unsafe.SliceData(b)))%8 != 0 {
		return nil, fmt.Errorf("memory at offset %d is not 8-byte aligned", off)
	}
	r := &mr{pd: p, bytes: b, access: a, rkey: rkey}
	d := p.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.keys.Load().byRKey[rkey] != nil {
		return nil, fmt.Errorf("rkey %#x: %w", rkey, ErrKeyInUse)
	}
	d.mu.lastLKey++
	r.lkey = d.mu.lastLKey
	t := p.keys.Load().clone()
	t.byRKey[r.rkey], t.byLKey[r.lkey] = r, r
	p.keys.Store(t)
	return r, nil
}

func (t *keyTable) clone() *keyTable {
	return &keyTable{byRKey: maps.Clone(t.byRKey), byLKey: maps.Clone(t.byLKey)}
}

// Dealloc fails while MRs, QPs or accepted connections of p remain.
func (p *pd) Dealloc() error {
	d := p.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(p.keys.Load().byRKey); n > 0 || p.qps > 0 {
		return fmt.Errorf("tcp: dealloc pd: %d MRs and %d QPs remain", n, p.qps)
	}
	delete(d.mu.pds, p)
	return nil
}

func (r *mr) LKey() uint64 { return r.lkey }
func (r *mr) RKey() uint64 { return r.rkey }
func (r *mr) Base() uint64 { return 0 }

// ProxyAtomics leaves atomics to f. READ and WRITE stay this CPU's: it and an
// adapter both move aligned words whole, and only a read-modify-write can lose
// the other's.
func (r *mr) ProxyAtomics(f driver.AtomicFunc) { r.proxy.Store(&f) }

// Deregister returns when no agent touches the region any more, so the memory
// may be freed. A transfer it interrupts loses its connection. Calls of a function are told to end, and waited for.
func (r *mr) Deregister() error {
	d := r.pd.d
	d.mu.Lock()
	if r.dead.Swap(true) {
		d.mu.Unlock()
		return fmt.Errorf("tcp: deregister mr: %w", driver.ErrClosed)
	}
	t := r.pd.keys.Load().clone()
	delete(t.byRKey, r.rkey)
	delete(t.byLKey, r.lkey)
	r.pd.keys.Store(t)
	agents := make([]*agent, 0, len(d.mu.agents))
	for a := range d.mu.agents {
		agents = append(agents, a)
	}
	d.mu.Unlock()
	// An agent that looked the key up earlier holds exec until it has finished.
	for _, a := range agents {
		a.quiesce()
	}
	if r.fn != nil {
		r.fn.end()
		r.fn.calls.Wait()
	}
	return nil
}

// covers tells whether b lies inside the region's own bytes.
func (r *mr) covers(b []byte) bool {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(r.bytes)))
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return at >= start && at-start <= uintptr(len(r.bytes)) && uintptr(len(b)) <= uintptr(len(r.bytes))-(at-start)
}

// word is the aligned word at addr, which the caller has checked.
func (r *mr) word(addr uint64) *uint64 {
	return (*uint64)(unsafe.Pointer(&r.bytes[addr]))
}

// atomic does op on the word at addr and returns the word found. It holds up
// Deregister and Peer.Fence until a proxy has answered, as they must wait for what
// that may still do to the region.
func (r *mr) atomic(op driver.Opcode, addr, compare, swap uint64) (found uint64, s driver.Status) {
	if f := r.proxy.Load(); f != nil {
		found, s = (*f)(op, addr, compare, swap)
		switch s {
		case driver.Success, driver.RemInvReqErr, driver.RemAccessErr:
			return found, s
		}
		return 0, driver.RemOpErr // the one reply that says: effect unknown
	}
	if op == driver.OpCmpAndSwp {
		return compareAndSwap(r.word(addr), compare, swap), driver.Success
	}
	return fetchAdd(r.word(addr), swap), driver.Success
}

// loadWords copies region memory to a private buffer. Every aligned 8-byte word
// is loaded once, whole, and not before the words in front of it, in which other
// CPUs' stores are seen (a plain MOV on amd64, LDAR on arm64).
func loadWords(dst, region []byte) {
	dst = dst[:len(region)]
	p := unsafe.Pointer(unsafe.SliceData(region))
	i := min(int(-uintptr(p)&7), len(region))
	copy(dst[:i], region[:i])
	for ; i+32 <= len(region); i += 32 {
		d, s := dst[i:i+32:i+32], unsafe.Add(p, i)
		binary.NativeEndian.PutUint64(d, atomic.LoadUint64((*uint64)(s)))
		binary.NativeEndian.PutUint64(d[8:], atomic.LoadUint64((*uint64)(unsafe.Add(s, 8))))
		binary.NativeEndian.PutUint64(d[16:], atomic.LoadUint64((*uint64)(unsafe.Add(s, 16))))
		binary.NativeEndian.PutUint64(d[24:], atomic.LoadUint64((*uint64)(unsafe.Add(s, 24))))
	}
	for ; i+8 <= len(region); i += 8 {
		binary.NativeEndian.PutUint64(dst[i:], atomic.LoadUint64((*uint64)(unsafe.Add(p, i))))
	}
	copy(dst[i:], region[i:])
}

// storeWords copies a private buffer to region memory. Every aligned 8-byte word
// is stored once, whole, by a plain store, which amd64 and arm64 do not split;
// an atomic store would cost a locked instruction a word. The caller orders it
// before what follows. Where words lie alike in both, whole ones are copied as the runtime copies
// pointers, each by one store (runtime.memmove), which is several times as fast.
func storeWords(region, src []byte) {
	src = src[:len(region)]
	p := unsafe.Pointer(unsafe.SliceData(region))
	i := min(int(-uintptr(p)&7), len(region))
	copy(region[:i], src[:i])
	if q := unsafe.Pointer(unsafe.SliceData(src)); (uintptr(p)^uintptr(q))&7 == 0 {
		n := (len(region) - i) &^ 7
		copy(region[i:i+n], src[i:i+n])
		i += n
	}
	for ; i+32 <= len(region); i += 32 {
		s, d := src[i:i+32:i+32], unsafe.Add(p, i)
		*(*uint64)(d) = binary.NativeEndian.Uint64(s)
		*(*uint64)(unsafe.Add(d, 8)) = binary.NativeEndian.Uint64(s[8:])
		*(*uint64)(unsafe.Add(d, 16)) = binary.NativeEndian.Uint64(s[16:])
		*(*uint64)(unsafe.Add(d, 24)) = binary.NativeEndian.Uint64(s[24:])
	}
	for ; i+8 <= len(region); i += 8 {
		*(*uint64)(unsafe.Add(p, i)) = binary.NativeEndian.Uint64(src[i:])
	}
	copy(region[i:], src[i:])
}

// le converts a word between memory's little-endian order and the host's.
func le(v uint64) uint64 {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], v)
	return binary.LittleEndian.Uint64(b[:])
}

// compareAndSwap returns the word found.
func compareAndSwap(p *uint64, compare, swap uint64) uint64 {
	for {
		if atomic.CompareAndSwapUint64(p, le(compare), le(swap)) {
			return compare
		}
		if found := le(atomic.LoadUint64(p)); found != compare {
			return found
		}
	}
}

// fetchAdd returns the word found.
func fetchAdd(p *uint64, n uint64) uint64 {
	for {
		found := atomic.LoadUint64(p)
		if atomic.CompareAndSwapUint64(p, found, le(le(found)+n)) {
			return le(found)
		}
	}
}
