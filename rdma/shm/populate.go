package shm

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// granuleBytes is for how much of a mapping one bit says whether its pages are mapped. The kernel maps as much at a
// time when a page is read.
const granuleBytes = 64 << 10

// granules are such bits, for a mapping of size bytes.
func granules(size int) []atomic.Uint64 { return make([]atomic.Uint64, (size/granuleBytes+64)/64) }

// populate has the kernel map the pages of b, a part of the mapping that is about to be written, unless it has before.
// Otherwise each page is a fault, and these take longer than the copy. It takes pages that are not there yet. Other
// goroutines may do the same. An old kernel does nothing, and so it is when there is no memory: a store decides then.
func (m *mapping) populate(b []byte) {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - uintptr(unsafe.Pointer(unsafe.SliceData(m.bytes)))
	first, end := start/granuleBytes, (start+uintptr(len(b))+granuleBytes-1)/granuleBytes
	for first < end {
		n := uintptr(0) // granules that nobody has populated
		for first+n < end && m.claim(first+n) {
			n++
		}
		if n > 0 {
			lo, hi := first*granuleBytes, min((first+n)*granuleBytes, uintptr(len(m.bytes)))
			_ = unix.Madvise(m.bytes[lo:hi], unix.MADV_POPULATE_READ)
		}
		first += n + 1
	}
}

// claim reports whether nobody has claimed a granule before.
func (m *mapping) claim(granule uintptr) bool {
	w, bit := &m.populated[granule/64], uint64(1)<<(granule%64)
	return w.Load()&bit == 0 && w.Or(bit)&bit == 0
}
