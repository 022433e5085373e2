package memnode

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// resident is how many bytes of b have a page.
func resident(t *testing.T, b []byte) (bytes int) {
	t.Helper()
	there := make([]byte, len(b)/os.Getpagesize())
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		uintptr(unsafe.Pointer(unsafe.SliceData(there)))); e != 0 {
		t.Fatal(e)
	}
	for _, x := range there {
		bytes += int(x&1) * os.Getpagesize()
	}
	return bytes
}

// TestPopulate: all pages of a region are there when its keys are published, and none beyond the header's if the node
// does not populate.
func TestPopulate(t *testing.T) {
	for _, populate := range []bool{true, false} {
		t.Run(fmt.Sprint(populate), func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := openWith(t, dir, 1<<20, func(o *Options) { o.Populate = populate }, "shm", "tcp")
			dir.want(1, 1)
			dir.keys(1, "shm")
			if got := resident(t, n.of(1)); (got == regionBytes) != populate || got == 0 {
				t.Errorf("%d of %d bytes have pages", got, regionBytes)
			}
		})
	}
}

// TestMakingAside: while the memory of a region is being taken, heartbeats and fences go on, and other regions are
// dropped; when it is wanted no longer, or the node closes, its memory goes back.
func TestMakingAside(t *testing.T) {
	for _, closes := range []bool{false, true} {
		t.Run(fmt.Sprint("closes ", closes), func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := openWith(t, dir, 1<<20, func(o *Options) { o.Populate = true }, "shm", "tcp")
			dir.want(1, 1)
			dir.keys(1, "shm")
			for range cap(n.turns) { // as parts of other regions do
				n.turns <- struct{}{}
			}
			defer func() {
				for len(n.turns) > 0 {
					<-n.turns
				}
			}()
			dir.want(2, 1)
			dir.until("the second one begun", func() bool { return n.Stats().RegisteredBytes == 2*regionBytes })
			mustDial(t, dir, "tcp", rw, 5)
			dir.change(func() { dir.fence = []uint32{5} })
			dir.until("a fence confirmed", func() bool { return slices.Contains(dir.last.FencedSessions, 5) })
			dir.change(func() { dir.regions = dir.regions[1:] })
			dir.until("the first region dropped", func() bool { return n.Stats().RegisteredBytes == regionBytes })
			if s := n.Stats(); len(s.Regions) != 1 || s.Regions[0].PG != 2 || s.Regions[0].Published ||
				s.Regions[0].Err != nil {
				t.Errorf("regions %+v, want one that is being made", s.Regions)
			}
			if closes {
				if err := n.Close(); err != nil {
					t.Error(err)
				}
			} else {
				dir.change(func() { dir.regions = nil })
			}
			dir.until("its memory back", func() bool { return n.Stats().RegisteredBytes == 0 })
			if dir.published[2] != nil {
				t.Error("its keys were published")
			}
		})
	}
}

// TestNoRoom: a region for which the machine has no memory is an error that says so, takes nothing, and others are
// made.
func TestNoRoom(t *testing.T) {
	have, _ := mem.Room()
	if have < 0 {
		t.Skip("nothing here says how much memory there is")
	}
	dir := newDirectory(t)
	n, _ := openWith(t, dir, 1<<50, func(o *Options) { o.Populate = true }, "shm", "tcp")
	dir.want(1, 1)
	dir.change(func() { dir.regions[0].RegionBytes = uint64(have) + 1<<40 })
	dir.want(2, 1)
	dir.keys(2, "shm")
	dir.until("an error", func() bool { s := n.Stats(); return s.Regions[0].Err != nil })
	s := n.Stats()
	var limit *mem.LimitError
	if err := s.Regions[0].Err; !errors.As(err, &limit) || !errors.Is(err, unix.ENOMEM) || limit.Want < 1<<40 {
		t.Errorf("the error is %v", err)
	}
	if s.RegisteredBytes != regionBytes {
		t.Errorf("%d bytes in use, want %d", s.RegisteredBytes, regionBytes)
	}
}

// slowDevice registers memory when it is let go, with a turn for each MR.
type slowDevice struct {
	driver.Device
	asked chan struct{}
	goOn  chan struct{}
}

type slowPD struct {
	driver.PD
	d slowDevice
}

func (d slowDevice) AllocPD() (driver.PD, error) {
	pd, err := d.Device.AllocPD()
	return slowPD{pd, d}, err
}

func (p slowPD) RegMR(m *driver.Memory, off, n int64, a driver.Access) (driver.MR, error) {
	select {
	case p.d.asked <- struct{}{}:
		<-p.d.goOn
	default: // nobody looks
	}
	return p.PD.RegMR(m, off, n, a)
}

// TestRegisteringAside: while an adapter's driver pins the pages of a region, others are made, published and dropped; a
// region that is not wanted any more when it is registered goes, and its keys with it.
func TestRegisteringAside(t *testing.T) {
	dir := newDirectory(t)
	slow := slowDevice{asked: make(chan struct{}), goOn: make(chan struct{})}
	n, _ := openWith(t, dir, 1<<20, func(o *Options) {
		slow.Device = o.Devices[0].Device.Driver()
		o.Devices[0].Device = rdma.NewDevice("tcp", slow)
	}, "tcp")
	dir.want(1, 1)
	<-slow.asked // it is being registered
	dir.want(2, 1)
	dir.keys(2, "tcp")
	dir.change(func() { dir.regions = nil })
	dir.until("the second region dropped", func() bool {
		s := n.Stats().Regions
		return len(s) == 1 && s[0].PG == 1 && !s[0].Published
	})
	close(slow.goOn)
	dir.until("the first region gone", func() bool {
		s := n.Stats()
		return len(s.Regions) == 0 && s.RegisteredBytes == 0
	})
}
