package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// cells holds what a Device puts there.
type cells struct {
	mu      sync.Mutex
	items   map[string][2]int
	refuse  error
	dropped chan string
}

func (c *cells) Put(name string, meta []byte, fds ...int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refuse != nil {
		return c.refuse
	}
	var two [2]int
	for i := range two {
		fd, err := unix.FcntlInt(uintptr(fds[i]), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		two[i] = fd
	}
	if len(meta) == 0 {
		return errors.New("no meta")
	}
	c.items[name] = two
	return nil
}

func (c *cells) Drop(name string) error {
	c.mu.Lock()
	two, ok := c.items[name]
	delete(c.items, name)
	c.mu.Unlock()
	if !ok {
		return fmt.Errorf("no %q", name)
	}
	c.dropped <- name
	return errors.Join(unix.Close(two[0]), unix.Close(two[1]))
}

// TestKeptCells: a connection's cell is held from before its dialer may use it until it is known to be outside for
// ever; by what is held another process bars the dialer and knows when it is outside.
func TestKeptCells(t *testing.T) {
	c := &cells{items: map[string][2]int{}, dropped: make(chan string, 8)}
	passive, err := newSide(Options{Cells: c}, rdmatest.All)
	if err != nil {
		t.Fatal(err)
	}
	l, err := passive.d.Listen(fmt.Sprintf("@kept-%d", os.Getpid()), driver.ListenOptions{
		Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) { return passive.pd, rdmatest.All, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	active, err := newSide(Options{}, driver.AccessLocal)
	if err != nil {
		t.Fatal(err)
	}
	cq, err := active.d.CreateCQ(16)
	if err != nil {
		t.Fatal(err)
	}
	dial := func() (*QP, error) {
		q, err := active.d.Dial(context.Background(), driver.DialRequest{PD: active.pd, CQ: cq, Addr: l.Addr()})
		if err != nil {
			return nil, err
		}
		return q.(*QP), nil
	}
	refuse := func(err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.refuse = err
	}
	refuse(errors.New("full"))
	if _, err := dial(); !errors.Is(err, driver.ErrRefused) {
		t.Errorf("a cell that is not held: %v", err)
	}
	refuse(nil)
	q, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	var two [2]int
	c.mu.Lock()
	if len(c.items) != 1 {
		t.Fatalf("%d cells are held", len(c.items))
	}
	for _, two = range c.items {
	}
	c.mu.Unlock()
	w := []driver.WR{{Op: driver.OpWrite, Flags: driver.Signaled, Local: active.m.Bytes[:8], LKey: active.mr.LKey(),
		RKey: passive.mr.RKey()}}
	if _, err := q.PostSend(w); err != nil {
		t.Fatal(err)
	}
	q.cell.beginOp(q.seq) // it is inside a verb
	k, err := AdoptCell(two[0], two[1])
	if err != nil {
		t.Fatal(err)
	}
	if k.Outside() {
		t.Error("outside, and inside a verb")
	}
	q.cell.endOp(q.seq)
	q.seq += 2
	if !k.Outside() {
		t.Error("inside, and no verb is under way")
	}
	if _, err := q.PostSend(w); !errors.Is(err, driver.ErrQPError) {
		t.Errorf("a barred dialer posts: %v", err)
	}
	if err := errors.Join(k.Close(), q.Close()); err != nil {
		t.Error(err)
	}
	<-c.dropped
	if err := errors.Join(cq.Close(), active.close(), l.Close(), passive.close()); err != nil {
		t.Error(err)
	}
}

// TestKeptCellOfTheDead: a process that died inside a verb is outside.
func TestKeptCellOfTheDead(t *testing.T) {
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	pidfd, err := unix.PidfdOpen(child.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	m, err := mem.AllocControl(64, "test", false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Free()
	cellOf(m.Bytes).beginOp(0)
	k, err := AdoptCell(m.FD, pidfd)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if k.Outside() {
		t.Error("outside, and inside a verb")
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // killed
	if !k.Outside() {
		t.Error("inside, and dead")
	}
}

// TestAdoptCellRefuses: descriptors that are none of a cell's.
func TestAdoptCellRefuses(t *testing.T) {
	m, err := mem.AllocControl(64, "test", false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Free()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(self)
	for what, fds := range map[string][2]int{"no cell": {int(null.Fd()), self}, "no process": {m.FD, int(null.Fd())},
		"nothing": {-1, -1}} {
		if _, err := AdoptCell(fds[0], fds[1]); err == nil {
			t.Errorf("%s was adopted", what)
		}
	}
}

// TestSocketOfAnother: a device listens at a socket that it is given.
func TestSocketOfAnother(t *testing.T) {
	addr := fmt.Sprintf("@socket-%d", os.Getpid())
	ln, err := listenUnix(addr)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSide(Options{Socket: func(a string, _ func() (net.Listener, error)) (net.Listener, error) {
		if a != addr {
			t.Errorf("asked for %q", a)
		}
		return ln, nil
	}}, rdmatest.All)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.d.Listen(addr, driver.ListenOptions{Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) {
		return s.pd, rdmatest.All, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	cq, err := s.d.CreateCQ(16)
	if err != nil {
		t.Fatal(err)
	}
	q, err := s.d.Dial(t.Context(), driver.DialRequest{PD: s.pd, CQ: cq, Addr: addr})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(q.Close(), cq.Close(), l.Close(), s.close()); err != nil {
		t.Error(err)
	}
}
