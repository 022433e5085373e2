package mem

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/driver"
)

const (
	// populatePart is how many bytes of pages are taken at a time, unless one huge page is more: some ten milliseconds'
	// work.
	populatePart = 32 << 20
	// mostTakers is how many goroutines take parts of one Alloc's pages. The kernel clears them on as many processors.
	mostTakers = 4
	// spareRoom is left to what else a process, and the kernel for it, needs: page tables are a 512th of what they map.
	spareRoom = 16 << 20
)

// taking is how many bytes all goroutines of this process still have to take of what they have begun.
var taking struct {
	sync.Mutex
	bytes int64
}

// inParts calls do for each part of size bytes in pages of this size, through turn unless that is nil. Several parts
// are done at once then. It refuses what there is no room for, before it begins and before each part: the kernel would
// end a process for it, and perhaps this one. Huge pages have a pool of their own.
func inParts(size, page int64, turn func(take func() error) error, do func(off, n int64) error) error {
	if turn == nil {
		return do(0, size)
	}
	room := page < thpBytes
	taking.Lock()
	if err := hasRoom(room, taking.bytes+size); err != nil {
		taking.Unlock()
		return err
	}
	taking.bytes += size
	taking.Unlock()
	p := &parts{part: max(populatePart, page), size: size, rest: size}
	defer func() { p.taken(p.rest) }()
	take1 := func(off, n int64) error {
		return turn(func() error {
			if err := hasRoom(room, p.ahead()+n); err != nil {
				return err
			}
			return retried(func() error { return do(off, n) })
		})
	}
	var wg sync.WaitGroup
	for range min(mostTakers, (size+p.part-1)/p.part) {
		wg.Go(func() { p.run(take1) })
	}
	wg.Wait()
	return p.err
}

// parts are those of one Alloc, which several goroutines take.
type parts struct {
	part, size int64
	mu         sync.Mutex
	next       int64 // where the first part begins that nobody has taken
	rest       int64 // bytes that are not there yet
	err        error // ends all of them
}

// run takes parts until there are no more, or one fails.
func (p *parts) run(take func(off, n int64) error) {
	for {
		p.mu.Lock()
		off, n := p.next, min(p.part, p.size-p.next)
		if p.err != nil || n == 0 {
			p.mu.Unlock()
			return
		}
		p.next += n
		p.mu.Unlock()
		if err := take(off, n); err != nil {
			p.mu.Lock()
			p.err = cmp.Or(p.err, err)
			p.mu.Unlock()
			return
		}
		p.taken(n)
	}
}

// ahead is how many bytes are in parts that nobody has begun.
func (p *parts) ahead() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.size - p.next
}

func (p *parts) taken(n int64) {
	p.mu.Lock()
	p.rest -= n
	p.mu.Unlock()
	taking.Lock()
	defer taking.Unlock()
	taking.bytes -= n
}

func hasRoom(asked bool, bytes int64) error {
	if !asked {
		return nil
	}
	if have, of := Room(); have >= 0 && have < bytes+spareRoom {
		return &LimitError{Limit: of, Want: bytes + spareRoom, Have: have, Unit: "bytes", Err: unix.ENOMEM,
			Hint: "make room there, or lend less memory"}
	}
	return nil
}

func retried(do func() error) error {
	for {
		if err := do(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// populate takes all pages of b, a mapping that nobody else uses yet of the descriptor fd, or of none if that is -1.
func populate(b []byte, fd int, page int64, o driver.AllocOptions) error {
	if o.Lock {
		// The limit on locked memory is to be known before the work is done. Kernels before 4.4 tell afterwards.
		if _, _, errno := unix.Syscall(unix.SYS_MLOCK2, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
			unix.MLOCK_ONFAULT); errno != 0 && errno != unix.ENOSYS {
			return lockLimit(int64(len(b)), errno)
		}
	}
	err := inParts(int64(len(b)), page, o.Populate, func(off, n int64) error {
		err := unix.Madvise(b[off:off+n], unix.MADV_POPULATE_WRITE)
		if !errors.Is(err, unix.EINVAL) {
			return err
		}
		// Kernels before 5.14 do not know it.
		if fd >= 0 {
			return unix.Fallocate(fd, 0, off, n)
		}
		for i := off; i < off+n; i += page {
			b[i] = 0
		}
		return nil
	})
	if err == nil {
		return nil
	}
	// EFAULT is where a touch would end the process by SIGBUS.
	if o.HugePageBytes != 0 && (errors.Is(err, unix.EFAULT) || errors.Is(err, unix.ENOMEM) ||
		errors.Is(err, unix.ENOSPC)) {
		return hugeLimit(int64(len(b)), o.HugePageBytes, err)
	}
	return fmt.Errorf("take its pages: %w", err)
}
