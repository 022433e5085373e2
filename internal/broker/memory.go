package broker

import (
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
)

// memory is a client's shared memory. Bytes of it change whenever the client likes.
type memory struct {
	mem      []byte // as mapped, from the page on in which the client's begins
	bytes    []byte // the client's
	arena    *client.Arena
	uses     atomic.Int64 // operations under way there, and 1 until it is taken back
	released chan struct{}
}

// checkSealed says why a file is no memory that cannot vanish under a mapping.
func checkSealed(fd int) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("the memory is in no memfd: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return fmt.Errorf("the memory is not sealed against shrinking (F_SEAL_SHRINK)")
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return fmt.Errorf("fstatfs: %w", err)
	}
	if fs.Type != unix.TMPFS_MAGIC {
		return fmt.Errorf("the memory is on a file system of type %#x: want a memfd of usual pages", fs.Type)
	}
	return nil
}

// mapMemory maps n bytes of a file that it has checked. The file may be closed afterwards.
func mapMemory(fd int, off, n uint64) (*memory, error) {
	if err := checkSealed(fd); err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	if size := uint64(st.Size); n > size || off > size-n {
		return nil, fmt.Errorf("%d bytes at %d of memory that has %d", n, off, size)
	}
	skip := off % uint64(os.Getpagesize())
	mem, err := unix.Mmap(fd, int64(off-skip), int(n+skip), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", n, err)
	}
	m := &memory{mem: mem, bytes: mem[skip:][:n:n], released: make(chan struct{})}
	m.uses.Store(1)
	return m, nil
}

// use notes an operation under way; it reports false if the memory is being taken back. The owner calls it, so that
// this is not lost in between.
func (m *memory) use() { m.uses.Add(1) }

// drop ends a use. The last one lets the memory go.
func (m *memory) drop() {
	if m.uses.Add(-1) == 0 {
		close(m.released)
	}
}

// unused waits until nothing touches the memory. It reports false if it gave up for the sake of over.
func (m *memory) unused(over <-chan struct{}) bool {
	m.drop()
	select {
	case <-m.released:
		return true
	case <-over:
		return false
	}
}

// unmap gives it up. Nothing touches it.
func (m *memory) unmap() error {
	if m.arena != nil {
		_ = m.arena.Deregister() // the Client may be closed
	}
	return unix.Munmap(m.mem)
}

// at is the bytes that a submission names, nil if they are not within.
func (m *memory) at(off, n uint64) []byte {
	size := uint64(len(m.bytes))
	if n > size || off > size-n {
		return nil
	}
	return m.bytes[off : off+n : off+n]
}

// shared is memory that this process makes for a client: a ring.
type shared struct {
	fd  int
	mem []byte
}

// newRing makes a ring of a depth, sealed so that it stays as long as it is.
func newRing(l ring.Layout) (s shared, err error) {
	if s.fd, err = unix.MemfdCreate("kvd ring", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return s, fmt.Errorf("memfd_create: %w", err)
	}
	if err = unix.Ftruncate(s.fd, int64(l.Len)); err == nil {
		_, err = unix.FcntlInt(uintptr(s.fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		s.mem, err = unix.Mmap(s.fd, 0, int(l.Len), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(s.fd)
		return s, fmt.Errorf("memory of a ring: %w", err)
	}
	l.Format(s.mem)
	return s, nil
}

func (s shared) close() {
	_ = unix.Munmap(s.mem)
	_ = unix.Close(s.fd)
}
