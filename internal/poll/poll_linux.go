package poll

import (
	"errors"
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Poller is a set of descriptors (epoll(7), level-triggered).
type Poller struct {
	ep, wake int // wake is an eventfd

	// Of the goroutine that calls Wait.
	slept  bool
	events [128]unix.EpollEvent
	ready  [128]int
}

// New makes an empty Poller. It takes two descriptors, until Close.
func New() (*Poller, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		_ = unix.Close(ep)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	p := &Poller{ep: ep, wake: wake}
	if err := p.Add(wake); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Close releases the Poller. Nobody may be in Wait.
func (p *Poller) Close() {
	_ = unix.Close(p.ep)
	_ = unix.Close(p.wake)
}

// Add begins to watch fd, which its user leaves non-blocking.
func (p *Poller) Add(fd int) error {
	err := unix.EpollCtl(p.ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP,
		Fd: int32(fd)})
	if err != nil {
		return fmt.Errorf("epoll_ctl add %d: %w", fd, err)
	}
	return nil
}

// Remove ends watching fd. A Wait that has already found it may still name it.
func (p *Poller) Remove(fd int) {
	_ = unix.EpollCtl(p.ep, unix.EPOLL_CTL_DEL, fd, nil)
}

// Wake makes the Wait under way, or the next one, return.
func (p *Poller) Wake() {
	one := [8]byte{1}
	_, _ = unix.Write(p.wake, one[:])
}

// Slept reports whether the last Wait had to wait: nothing was ready yet. It is for the goroutine that calls Wait.
func (p *Poller) Slept() bool { return p.slept }

// countEvents is how many events there are.
func (p *Poller) countEvents() int {
	k, _, _ := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.ep), uintptr(unsafe.Pointer(&p.events[0])),
		uintptr(len(p.events)), 0, 0, 0)
	return max(int(k), 0)
}

// Look looks again and again, for d at most, and reports whether Wait would return at once. In between, other threads
// may have the processor. It is for the goroutine that calls Wait.
func (p *Poller) Look(d time.Duration) bool {
	for began := time.Now(); ; {
		switch {
		case p.countEvents() > 0:
			return true
		case time.Since(began) >= d:
			return false
		}
		yieldThread()
	}
}

func yieldThread() { _, _, _ = syscall.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// Wait returns the descriptors that can be read, or have ended, when there are some. It also says whether
// Wake was called since the last time. After d, which has the grain of a millisecond, it returns none. A
// negative d is no limit. The slice stays valid until the next call.
func (p *Poller) Wait(d time.Duration) (ready []int, woken bool) {
	// Mostly something is ready, and then the processor need not be given up for the call.
	n := p.countEvents()
	p.slept = n == 0
	limit := -1
	if d >= 0 {
		limit = int(d / time.Millisecond)
	}
	for n == 0 {
		k, err := unix.EpollWait(p.ep, p.events[:], limit)
		if err != nil && !errors.Is(err, unix.EINTR) {
			panic(fmt.Sprintf("bug: epoll_wait: %v", err)) // of descriptors and memory that are ours
		}
		if n = max(k, 0); limit >= 0 {
			break
		}
	}
	ready = p.ready[:0]
	for _, e := range p.events[:n] {
		if int(e.Fd) != p.wake {
			ready = append(ready, int(e.Fd))
			continue
		}
		woken = true
		var count [8]byte
		_, _ = unix.Read(p.wake, count[:])
	}
	return ready, woken
}
