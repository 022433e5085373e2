package shm

import (
	"crypto/rand"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
)

// Cells holds descriptors beyond this process.
type Cells interface {
	// Put holds duplicates of fds under a name that is free; meta says whose they are, for people.
	Put(name string, meta []byte, fds ...int) error
	// Drop closes what is held under a name.
	Drop(name string) error
}

// CellItems begins the names that a Device gives to Cells. Each has two descriptors: the control cell of a connection,
// and a pidfd of its dialer.
const CellItems = "cell/"

// KeptCell is the control cell of a connection that an earlier process of this memory node had. Its methods serve one
// goroutine at a time.
type KeptCell struct {
	page  []byte
	pidfd int
}

// AdoptCell bars the dialer of a connection of an earlier process: nothing that it posts from now on has an effect. The
// caller keeps both descriptors, pidfd until it closes the cell.
func AdoptCell(cell, pidfd int) (*KeptCell, error) {
	page, err := mem.Map(cell, int64(os.Getpagesize()), unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, fmt.Errorf("adopt control cell: %w", err)
	}
	if err := unix.PidfdSendSignal(pidfd, 0, nil, 0); err != nil && err != unix.ESRCH && err != unix.EPERM {
		_ = mem.Unmap(page)
		return nil, fmt.Errorf("adopt control cell: its pidfd: %w", err)
	}
	k := &KeptCell{page: page, pidfd: pidfd}
	cellOf(page).bar()
	return k, nil
}

// Outside tells whether nothing that the dialer posted to the earlier process can land any more. The dialer
// has then left the verb that it was inside, or its process is dead. Once true it stays so.
func (k *KeptCell) Outside() bool {
	_, busy := cellOf(k.page).inside()
	runtime.KeepAlive(k)
	return !busy || ended(k.pidfd)
}

// Close unmaps the cell.
func (k *KeptCell) Close() error { return mem.Unmap(k.page) }

// ended tells whether all threads of a pidfd's process have.
func ended(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&unix.POLLIN != 0
}

// keep has the cell outlive this process, before the dialer is told that it may use it.
func (p *peer) keep() error {
	cells := p.l.d.o.Cells
	if cells == nil {
		return nil
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	item := fmt.Sprintf("%s%x", CellItems, b)
	if err := cells.Put(item, []byte(p.remote), p.mem.FD, p.pidfd); err != nil {
		return fmt.Errorf("keep the control cell: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.item = item
	return nil
}

// forget ends what keep began, once the cell has been given back. The caller holds no lock.
func (p *peer) forget() {
	p.mu.Lock()
	item := p.mu.item
	if p.mu.cell == nil {
		p.mu.item = ""
	}
	gone := p.mu.cell == nil
	p.mu.Unlock()
	if gone && item != "" {
		_ = p.l.d.o.Cells.Drop(item) // else the next process finds it closed
	}
}
