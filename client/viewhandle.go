package client

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ViewHandle is what another process of this machine, or a device, needs to look at a View's bytes. Its files may be
// sent to that process over a unix socket. It looks, and then reads the first word of State, of 32 bits, and after that
// CLOCK_MONOTONIC. It believes what it saw if the word is 0 and the clock is before Deadline. The handle is the
// caller's, who closes it; that ends nothing. A process that has Memory can read all values that lie in it.
type ViewHandle struct {
	Memory *os.File    // for reading
	Parts  []ViewRange // as in View.Parts
	// State is a page for reading. Its first word is 0 until the View is released or expires.
	State *os.File
	// Deadline is nanoseconds of CLOCK_MONOTONIC: then the lease is over if nobody has renewed it. Another Handle of
	// the View has a later one.
	Deadline int64
}

// ViewRange is some of the bytes of a file.
type ViewRange struct{ Off, Len int64 }

// Handle shows the View to other processes of this machine. The error is errors.ErrUnsupported if the View has a copy,
// and ErrViewExpired if it is over.
func (v *View) Handle() (_ *ViewHandle, err error) {
	if v.over {
		return nil, ErrViewExpired
	}
	h, memory := &ViewHandle{}, -1
	for _, p := range v.parts {
		fd, off, ok := v.hold.Where(p)
		if !ok || memory >= 0 && fd != memory {
			return nil, fmt.Errorf("%w: the View's bytes are in no file", errors.ErrUnsupported)
		}
		memory = fd
		h.Parts = append(h.Parts, ViewRange{off, int64(len(p))})
	}
	if memory < 0 {
		return nil, fmt.Errorf("%w: the View has no bytes", errors.ErrUnsupported)
	}
	defer func() {
		if err != nil {
			_ = h.Close()
		}
	}()
	if v.page == nil {
		if v.page, err = newStatePage(); err != nil {
			return nil, err
		}
	}
	var now unix.Timespec
	if err = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("read the clock: %w", err)
	}
	left, ok := v.hold.OnEnd(v.page.end)
	if !ok {
		return nil, ErrViewExpired
	}
	h.Deadline = now.Nano() + left
	if h.Memory, err = dup(memory, "view memory"); err != nil {
		return nil, err
	}
	if h.State, err = dup(v.page.fd, "view state"); err != nil {
		return nil, err
	}
	return h, nil
}

// Close closes the files of the handle. Mappings of them stay.
func (h *ViewHandle) Close() error {
	var errs []error
	for _, f := range []*os.File{h.Memory, h.State} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

func dup(fd int, name string) (*os.File, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", name, err)
	}
	return os.NewFile(uintptr(n), name), nil
}

// statePage is a page that other processes may map, with a word that says whether a View is over.
type statePage struct {
	fd  int // for reading
	mem []byte
}

func newStatePage() (_ *statePage, err error) {
	w, err := unix.MemfdCreate("kvd view state", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("view state: %w", err)
	}
	defer func() { _ = unix.Close(w) }()
	size := os.Getpagesize()
	if err := unix.Ftruncate(w, int64(size)); err != nil {
		return nil, fmt.Errorf("view state: %w", err)
	}
	p := &statePage{fd: -1}
	if p.mem, err = unix.Mmap(w, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("view state: %w", err)
	}
	// Nobody but this mapping writes to it from now on, nor changes its length.
	_, err = unix.FcntlInt(uintptr(w), unix.F_ADD_SEALS,
		unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
	if err == nil {
		p.fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", w), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		p.unmap()
		return nil, fmt.Errorf("view state: %w", err)
	}
	return p, nil
}

// end says that the View is over.
func (p *statePage) end() { atomic.StoreUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(p.mem))), 1) }

// unmap gives the page up. Other processes keep theirs.
func (p *statePage) unmap() {
	_ = unix.Munmap(p.mem)
	if p.fd >= 0 {
		_ = unix.Close(p.fd)
	}
}
