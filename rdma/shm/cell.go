package shm

import (
	"encoding/binary"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvd-project/kvd/rdma/driver"
)

// cell is a QP's control cell: one cache line at the start of a memfd that the
// passive side makes for this QP alone and the dialer maps.
//
//	word 0  seq     odd while the dialer is inside PostSend; the dialer adds 1
//	                when entering and again when leaving
//	word 1  barred  not 0: a dialer that enters must leave without touching anything.
//	                Set by either side, never cleared
//
// The dialer stores seq, then loads barred; the passive side stores barred,
// then loads seq. Both pairs are sequentially consistent, so at least one sees
// the other: a barred cell seen with an even seq is a closed door. The passive
// side believes nothing else about the cell; a dialer that lies in it can hold
// up its own fence and no more than it could do by ignoring the cell.
type cell struct {
	seq    uint64
	barred uint64
	_      [6]uint64
}

const (
	_ = uint(unsafe.Sizeof(cell{}) - 64) // exactly one cache line
	_ = uint(64 - unsafe.Sizeof(cell{}))
)

func cellOf(b []byte) *cell { return (*cell)(unsafe.Pointer(unsafe.SliceData(b))) }

// beginOp announces operation number seq+1, and tells whether it may go on.
func (c *cell) beginOp(seq uint64) bool {
	atomic.StoreUint64(&c.seq, seq+1)
	return atomic.LoadUint64(&c.barred) == 0
}

// endOp ends the operation; its loads and stores are done before.
func (c *cell) endOp(seq uint64) {
	if tso {
		// A plain store is a release store here, and half the price of the
		// XCHG that sync/atomic makes of it.
		c.seq = seq + 2
		return
	}
	atomic.StoreUint64(&c.seq, seq+2)
}

// setSeq stores QP.seq, which Close loads on another goroutine. The next instruction that the order matters for is
// beginOp's exchange, so a plain store will do where endOp's does; the race detector, which knows nothing of that, is
// not asked.
//
//go:norace
func setSeq(seq *uint64, to uint64) {
	if tso {
		*seq = to
		return
	}
	atomic.StoreUint64(seq, to)
}

func (c *cell) bar() { atomic.StoreUint64(&c.barred, 1) }

// inside tells whether an operation is going on, and which.
func (c *cell) inside() (seq uint64, busy bool) {
	seq = atomic.LoadUint64(&c.seq)
	return seq, seq&1 != 0
}

// tso: the processor keeps all loads and stores in program order, except that a
// load may pass an earlier store (Intel SDM vol. 3, §9.2).
const tso = runtime.GOARCH == "amd64"

// barrier orders everything before it against everything after it, also a store
// against a later load; w is a word of the caller's own.
func barrier(w *uint64) {
	atomic.StoreUint64(w, 0)
	atomic.LoadUint64(w)
}

// The loops below move bytes between local memory and the mapping so that every
// aligned 8-byte word of the mapping is loaded or stored whole. copy() alone
// does not promise that: for a short or oddly placed range it may fetch a word
// in two pieces. For a range aligned on both sides its moves start and end on
// word boundaries and no processor of ours splits a word, so ranges above
// wordLoopBytes use it; a loop of words is as fast below.
const wordLoopBytes = 512

// load copies n bytes of the mapping at src to dst.
func load(dst, src unsafe.Pointer, n uintptr) {
	if (uintptr(dst)|uintptr(src)|n)&7 != 0 {
		loadOdd(dst, src, n)
		return
	}
	if n > wordLoopBytes {
		copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
		return
	}
	for ; n >= 32; n -= 32 {
		a := atomic.LoadUint64((*uint64)(src))
		b := atomic.LoadUint64((*uint64)(unsafe.Add(src, 8)))
		c := atomic.LoadUint64((*uint64)(unsafe.Add(src, 16)))
		d := atomic.LoadUint64((*uint64)(unsafe.Add(src, 24)))
		*(*uint64)(dst) = a
		*(*uint64)(unsafe.Add(dst, 8)) = b
		*(*uint64)(unsafe.Add(dst, 16)) = c
		*(*uint64)(unsafe.Add(dst, 24)) = d
		src, dst = unsafe.Add(src, 32), unsafe.Add(dst, 32)
	}
	for ; n >= 8; n -= 8 {
		*(*uint64)(dst) = atomic.LoadUint64((*uint64)(src))
		src, dst = unsafe.Add(src, 8), unsafe.Add(dst, 8)
	}
}

// store copies n bytes at src to the mapping at dst.
func store(dst, src unsafe.Pointer, n uintptr) {
	if (uintptr(dst)|uintptr(src)|n)&7 != 0 {
		storeOdd(dst, src, n)
		return
	}
	if n > wordLoopBytes {
		copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
		return
	}
	for ; n >= 32; n -= 32 {
		a := *(*uint64)(src)
		b := *(*uint64)(unsafe.Add(src, 8))
		c := *(*uint64)(unsafe.Add(src, 16))
		d := *(*uint64)(unsafe.Add(src, 24))
		*(*uint64)(dst) = a
		*(*uint64)(unsafe.Add(dst, 8)) = b
		*(*uint64)(unsafe.Add(dst, 16)) = c
		*(*uint64)(unsafe.Add(dst, 24)) = d
		src, dst = unsafe.Add(src, 32), unsafe.Add(dst, 32)
	}
	for ; n >= 8; n -= 8 {
		*(*uint64)(dst) = *(*uint64)(src)
		src, dst = unsafe.Add(src, 8), unsafe.Add(dst, 8)
	}
}

// loadOdd is load for a range that is not aligned at both ends and on both
// sides: bytes up to the first word of the mapping, words, bytes.
func loadOdd(dst, src unsafe.Pointer, n uintptr) {
	head := min(-uintptr(src)&7, n)
	for i := range head {
		*(*byte)(unsafe.Add(dst, i)) = *(*byte)(unsafe.Add(src, i))
	}
	src, dst, n = unsafe.Add(src, head), unsafe.Add(dst, head), n-head
	words := n &^ 7 // not 0 only if src is aligned now
	if words != 0 && uintptr(dst)&7 == 0 {
		load(dst, src, words)
	} else {
		for i := uintptr(0); i < words; i += 8 {
			binary.NativeEndian.PutUint64(bytes8(unsafe.Add(dst, i)), atomic.LoadUint64((*uint64)(unsafe.Add(src, i))))
		}
	}
	for i := words; i < n; i++ {
		*(*byte)(unsafe.Add(dst, i)) = *(*byte)(unsafe.Add(src, i))
	}
}

// storeOdd is store for such a range.
func storeOdd(dst, src unsafe.Pointer, n uintptr) {
	head := min(-uintptr(dst)&7, n)
	for i := range head {
		*(*byte)(unsafe.Add(dst, i)) = *(*byte)(unsafe.Add(src, i))
	}
	src, dst, n = unsafe.Add(src, head), unsafe.Add(dst, head), n-head
	words := n &^ 7 // not 0 only if dst is aligned now
	if words != 0 && uintptr(src)&7 == 0 {
		store(dst, src, words)
	} else {
		for i := uintptr(0); i < words; i += 8 {
			*(*uint64)(unsafe.Add(dst, i)) = binary.NativeEndian.Uint64(bytes8(unsafe.Add(src, i)))
		}
	}
	for i := words; i < n; i++ {
		*(*byte)(unsafe.Add(dst, i)) = *(*byte)(unsafe.Add(src, i))
	}
}

func bytes8(p unsafe.Pointer) []byte { return unsafe.Slice((*byte)(p), 8) }

// casTries is how often a word may go away from what a CAS expects, and come back to it, while the CAS is at it. Others
// that work on the word do not come near; one that wants to hold up the CAS might.
const casTries = 1 << 16

// compareAndSwap returns the word found, if it could tell.
func compareAndSwap(p *uint64, old, new uint64) (found uint64, ok bool) {
	for range casTries {
		if v := atomic.LoadUint64(p); v != old {
			return v, true
		}
		if atomic.CompareAndSwapUint64(p, old, new) {
			return old, true
		}
	}
	return 0, false
}

// backoff waits a little longer each time, for conditions in shared memory that
// nothing announces.
type backoff struct{ d time.Duration }

const maxBackoff = time.Millisecond

// wait returns early when either channel is closed; nil channels never are.
func (b *backoff) wait(x, y <-chan struct{}) {
	if b.d == 0 {
		b.d = 10 * time.Microsecond
	}
	t := time.NewTimer(b.d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-x:
	case <-y:
	}
	b.d = min(2*b.d, maxBackoff)
}

// access is the right that each verb needs.
var access = [driver.NumOpcodes]driver.Access{
	driver.OpRead:      driver.AccessRemoteRead,
	driver.OpWrite:     driver.AccessRemoteWrite,
	driver.OpCmpAndSwp: driver.AccessRemoteAtomic,
	driver.OpFetchAdd:  driver.AccessRemoteAtomic,
}
