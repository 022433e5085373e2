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

// taking is how many bytes all goroutines of this process still have to take of what they have begun, but for pages
// that have a pool of their own. Its lock is that of all parts, too.
var taking struct {
	sync.Mutex
	bytes int64
	parts int           // under way: some of their bytes are there already
	next  chan struct{} // closed when there are fewer of them
}

// inParts calls do for each part of size bytes in pages of this size, through turn unless that is nil. Several parts
// are done at once then. It refuses what there is no room for, before it begins and before each part: the kernel would
// end a process for it, and perhaps this one. Huge pages have a pool of their own.
func inParts(size, page int64, turn func(take func() error) error, do func(off, n int64) error) error {
	if turn == nil {
		return do(0, size)
	}
	p := &parts{part: max(populatePart, page), size: size}
	if page < thpBytes {
		p.room = Room
	}
	return p.all(turn, do)
}

// parts are those of one Alloc, which several goroutines take.
type parts struct {
	part, size int64
	room       func() (have int64, of string) // as Room; nil: it is not asked
	next       int64                          // where the first part begins that nobody has taken
	rest       int64                          // bytes of taking: not there yet, those under way included
	err        error                          // ends all of them
}

// all takes all parts.
func (p *parts) all(turn func(take func() error) error, do func(off, n int64) error) error {
	taking.Lock()
	if err := hasRoom(p.room, taking.bytes+p.size); err != nil {
		taking.Unlock()
		return err
	}
	if p.room != nil {
		p.rest = p.size
		taking.bytes += p.size
	}
	taking.Unlock()
	var wg sync.WaitGroup
	for range min(mostTakers, (p.size+p.part-1)/p.part) {
		wg.Go(func() {
			p.run(func(off, n int64) error {
				return turn(func() error {
					if err := p.begin(); err != nil {
						return err
					}
					err := retried(func() error { return do(off, n) })
					p.end(n, err)
					return err
				})
			})
		})
	}
	wg.Wait()
	taking.Lock()
	defer taking.Unlock()
	p.giveUpLocked()
	return p.err
}

// run takes parts until there are no more, or one fails.
func (p *parts) run(take func(off, n int64) error) {
	for {
		taking.Lock()
		off, n := p.next, min(p.part, p.size-p.next)
		if p.err != nil || n == 0 {
			taking.Unlock()
			return
		}
		p.next += n
		taking.Unlock()
		if err := take(off, n); err != nil {
			taking.Lock()
			p.err = cmp.Or(p.err, err)
			taking.Unlock()
			return
		}
	}
}

// begin begins a part, if there is room for all that this process has still to take. Parts under way count as a whole,
// though some of their bytes are there, and no room any more. So where they make the difference it waits until one of
// them has ended.
func (p *parts) begin() error {
	taking.Lock()
	defer taking.Unlock()
	for {
		if p.err != nil {
			return p.err
		}
		err := hasRoom(p.room, taking.bytes)
		if err == nil {
			taking.parts++
			return nil
		}
		if taking.parts == 0 {
			p.err = err
			p.giveUpLocked() // others may have room now
			return err
		}
		if taking.next == nil {
			taking.next = make(chan struct{})
		}
		next := taking.next
		taking.Unlock()
		<-next
		taking.Lock()
	}
}

// end ends a part of n bytes that has begun.
func (p *parts) end(n int64, err error) {
	taking.Lock()
	defer taking.Unlock()
	taking.parts--
	if p.err = cmp.Or(p.err, err); err == nil && p.room != nil {
		p.rest -= n
		taking.bytes -= n
	}
	if taking.next != nil {
		close(taking.next)
		taking.next = nil
	}
}

// giveUpLocked says that the rest will not be taken.
func (p *parts) giveUpLocked() {
	taking.bytes -= p.rest
	p.rest = 0
}

func hasRoom(room func() (have int64, of string), bytes int64) error {
	if room == nil {
		return nil
	}
	if have, of := room(); have >= 0 && have < bytes+spareRoom {
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
