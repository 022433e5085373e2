package shm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// pair is a memory node and a dialer, two devices of this process.
type pair struct {
	passive, active *side
	ln              driver.Listener
	cq              driver.CQ
	qp              *QP
}

func newPair(t *testing.T) *pair {
	t.Helper()
	return newPairOf(t, Options{})
}

// newPairOf has these options on the passive side.
func newPairOf(t *testing.T, o Options) *pair {
	t.Helper()
	p := &pair{}
	var err error
	p.passive, err = newSide(o, rdmatest.All)
	must(t, err)
	p.active, err = newSide(Options{}, driver.AccessLocal)
	must(t, err)
	p.ln, err = p.passive.d.Listen("@kvd-"+t.TempDir(), driver.ListenOptions{
		Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) { return p.passive.pd, rdmatest.All, nil },
	})
	must(t, err)
	p.cq, err = p.active.d.CreateCQ(1)
	must(t, err)
	p.qp = p.dial(t)
	t.Cleanup(func() {
		must(t, p.qp.Close(), p.cq.Close(), p.active.close(), p.ln.Close(), p.passive.close())
		if n := len(p.active.d.mu.maps); n != 0 {
			t.Errorf("%d mappings left", n)
		}
	})
	return p
}

func (p *pair) dial(t *testing.T) *QP {
	t.Helper()
	qp, err := p.active.d.Dial(within(t, rdmatest.Patience),
		driver.DialRequest{PD: p.active.pd, CQ: p.cq, Addr: p.ln.Addr()})
	must(t, err)
	return qp.(*QP)
}

// read posts one READ of 8 bytes and returns its status.
func (p *pair) read(t *testing.T, q *QP, rkey uint64) driver.Status {
	t.Helper()
	_, err := q.PostSend([]driver.WR{{Op: driver.OpRead, Flags: driver.Signaled, Local: p.active.m.Bytes[:8],
		LKey: p.active.mr.LKey(), RKey: rkey}})
	must(t, err)
	var wc [2]driver.WC
	if n := p.cq.Poll(wc[:]); n != 1 {
		t.Fatalf("%d WCs", n)
	}
	return wc[0].Status
}

// MRs of one memfd, and QPs of one device, share one mapping. It goes when the
// last MR over it has been deregistered, without waiting for the QP to close.
func TestMappingsAreSharedAndReleased(t *testing.T) {
	p := newPair(t)
	var mrs []driver.MR
	for i := range int64(20) {
		mr, err := p.passive.pd.RegMR(p.passive.m, i*4096, 4096, rdmatest.All)
		must(t, err)
		mrs = append(mrs, mr)
	}
	other := p.dial(t)
	for _, mr := range mrs {
		for _, q := range []*QP{p.qp, other} {
			if s := p.read(t, q, mr.RKey()); s != driver.Success {
				t.Fatal(s)
			}
		}
	}
	if n := len(p.active.d.mu.maps); n != 2 {
		t.Errorf("%d mappings, want the table and the memfd", n)
	}
	for i, mr := range mrs[1:] {
		must(t, mr.Deregister())
		if s := p.read(t, p.qp, mrs[0].RKey()); s != driver.Success {
			t.Fatalf("after %d deregistrations: %v", i+1, s)
		}
	}
	must(t, other.Close())
	must(t, mrs[0].Deregister())
	if s := p.read(t, p.qp, mrs[0].RKey()); s != driver.RemAccessErr {
		t.Errorf("READ under the last rkey: %v", s)
	}
	if n := len(p.active.d.mu.maps); n != 1 {
		t.Errorf("%d mappings, want the table alone", n)
	}
}

// Control cells stay mapped while their QP can be reached, and no longer.
func TestCellsAreUnmapped(t *testing.T) {
	p := newPair(t)
	cells := func() int {
		b, err := os.ReadFile("/proc/self/maps")
		must(t, err)
		return bytes.Count(b, []byte("memfd:kvd-cell"))
	}
	for range 20 {
		q := p.dial(t)
		must(t, q.Close())
		if _, err := q.PostSend(nil); !errors.Is(err, driver.ErrClosed) {
			t.Fatalf("PostSend on a closed QP: %v", err)
		}
	}
	limit := time.After(rdmatest.Patience)
	for cells() > 4 { // both ends of p.qp's, and perhaps the last one's
		runtime.GC()
		select {
		case <-limit:
			t.Fatalf("%d cells mapped", cells())
		default:
		}
	}
}

// A new MR in the table slot of an old one does not bring the old rkey back,
// for a QP that used it and for one that did not.
func TestReusedSlotRevivesNothing(t *testing.T) {
	p := newPair(t)
	old, err := p.passive.pd.RegMR(p.passive.m, 0, 4096, rdmatest.All)
	must(t, err)
	if s := p.read(t, p.qp, old.RKey()); s != driver.Success {
		t.Fatal(s)
	}
	must(t, old.Deregister())
	fresh, err := p.passive.pd.RegMR(p.passive.m, 0, 4096, rdmatest.All)
	must(t, err)
	defer fresh.Deregister()
	if old.(*MR).slot != fresh.(*MR).slot {
		t.Fatal("the slot was not reused")
	}
	if s := p.read(t, p.qp, fresh.RKey()); s != driver.Success {
		t.Errorf("new rkey: %v", s)
	}
	if s := p.read(t, p.qp, old.RKey()); s != driver.RemAccessErr {
		t.Errorf("old rkey: %v", s)
	}
	q := p.dial(t)
	if s := p.read(t, q, old.RKey()); s != driver.RemAccessErr {
		t.Errorf("old rkey on a new QP: %v", s)
	}
	must(t, q.Close())
}

// Without WRITE and atomic rights the kernel itself refuses the dialer a
// writable mapping.
func TestReadOnlyRightsAreReadOnlyDescriptors(t *testing.T) {
	p := newPair(t)
	ro, err := p.passive.pd.RegMR(p.passive.m, 0, 4096, driver.AccessRemoteRead)
	must(t, err)
	defer ro.Deregister()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: p.ln.Addr(), Net: "unixpacket"})
	must(t, err)
	defer c.Close()
	_, err = c.Write(encodeHello(nil))
	must(t, err)
	_, fds, err := readWelcome(c)
	must(t, err)
	defer closeFDs(fds)
	if _, err := mem.Map(fds[1], 4096, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("the MR table can be mapped for writing")
	}
	for _, k := range []struct {
		mr   driver.MR
		want error
	}{{ro, unix.EACCES}, {p.passive.mr, nil}} {
		_, err = c.Write(request{id: 1, rkey: k.mr.RKey()}.encode())
		must(t, err)
		a, err := readAnswer(c, tableSlots)
		must(t, err)
		b, err := mem.Map(a.fd, 4096, unix.PROT_READ|unix.PROT_WRITE)
		if !errors.Is(err, k.want) {
			t.Errorf("writable mapping with access %v: %v, want %v", a.access, err, k.want)
		}
		if err == nil {
			must(t, mem.Unmap(b))
		}
		a.close()
	}
}

// More unpolled WCs than the CQ was made for: it grows, in order.
func TestCQGrows(t *testing.T) {
	p := newPair(t)
	var wcs [7]driver.WC
	next, polled := uint64(0), uint64(0)
	for round := range 200 {
		wrs := make([]driver.WR, 11)
		for i := range wrs {
			wrs[i] = driver.WR{ID: next, Op: driver.OpRead, Flags: driver.Signaled, Local: p.active.m.Bytes[:8],
				LKey: p.active.mr.LKey(), RKey: p.passive.mr.RKey()}
			next++
		}
		if n, err := p.qp.PostSend(wrs); n != len(wrs) || err != nil {
			t.Fatalf("round %d: %d, %v", round, n, err)
		}
		for _, wc := range wcs[:p.cq.Poll(wcs[:])] {
			if wc.ID != polled {
				t.Fatalf("WC %d, want %d", wc.ID, polled)
			}
			polled++
		}
	}
	for polled < next {
		for _, wc := range wcs[:p.cq.Poll(wcs[:])] {
			if wc.ID != polled {
				t.Fatalf("WC %d, want %d", wc.ID, polled)
			}
			polled++
		}
	}
}

// PostSend and Poll of a chain allocate nothing.
func TestNoAllocations(t *testing.T) {
	p := newPair(t)
	wr := driver.WR{Op: driver.OpRead, Local: p.active.m.Bytes[:8], LKey: p.active.mr.LKey(), RKey: p.passive.mr.RKey()}
	wrs := []driver.WR{wr, wr}
	wrs[1].Flags, wrs[1].Local = driver.Signaled, p.active.m.Bytes[8:136]
	var wcs [4]driver.WC
	if n := testing.AllocsPerRun(1000, func() {
		if _, err := p.qp.PostSend(wrs); err != nil || p.cq.Poll(wcs[:]) != 1 {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Every size, alignment and length of local and remote bytes.
func TestLoadStoreEveryAlignment(t *testing.T) {
	p := newPair(t)
	local, remote := p.active.m.Bytes[4096:], p.passive.m.Bytes
	for n := 1; n <= 600; n = n + 1 + n/16 {
		for lo := range 9 {
			for ro := range 9 {
				for _, op := range []driver.Opcode{driver.OpRead, driver.OpWrite} {
					clear(local[:1024])
					clear(remote[:1024])
					to, at := remote, ro
					l, r := local[8+lo:8+lo+n], remote[8+ro:8+ro+n]
					rdmatest.Pattern(l, 1)
					if op == driver.OpRead {
						clear(l)
						rdmatest.Pattern(r, 1)
						to, at = local, lo
					}
					if _, err := p.qp.PostSend([]driver.WR{{Op: op, Local: l, LKey: p.active.mr.LKey(),
						RemoteAddr: uint64(8 + ro), RKey: p.passive.mr.RKey()}}); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(l, r) || l[0] != 1 {
						t.Fatalf("%v of %d bytes, local+%d remote+%d: bytes differ", op, n, lo, ro)
					}
					if !zero(to[:8+at]) || !zero(to[8+at+n:1024]) {
						t.Fatalf("%v of %d bytes, local+%d remote+%d touched its neighbours", op, n, lo, ro)
					}
				}
			}
		}
	}
}

func zero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

func TestListenAddresses(t *testing.T) {
	s, err := newSide(Options{}, driver.AccessLocal)
	must(t, err)
	o := driver.ListenOptions{Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) {
		return s.pd, 0, nil
	}}
	dir := t.TempDir()
	live := filepath.Join(dir, "live")
	l, err := s.d.Listen(live, o)
	must(t, err)
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, []byte("precious"), 0o600))
	for _, addr := range []string{live, file, "", "@", filepath.Join(dir, "none", "s"),
		filepath.Join(dir, strings.Repeat("x", 200))} {
		if l, err := s.d.Listen(addr, o); err == nil {
			t.Errorf("Listen(%q) succeeded", addr)
			must(t, l.Close())
		}
	}
	if b, err := os.ReadFile(file); string(b) != "precious" {
		t.Errorf("the file is %q, %v", b, err)
	}
	// Listening in its way did not break the live one.
	cq, err := s.d.CreateCQ(1)
	must(t, err)
	qp, err := s.d.Dial(within(t, rdmatest.Patience), driver.DialRequest{PD: s.pd, CQ: cq, Addr: live})
	must(t, err)
	must(t, qp.Close(), l.Close(), cq.Close())
	if _, err := os.Lstat(live); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket file after Close: %v", err)
	}
	if _, err := s.d.Listen(live, driver.ListenOptions{}); err == nil {
		t.Error("Listen without Accept succeeded")
	}
	must(t, s.close())
}

// Accept may name only a PD of the device, and a peer fenced inside Accept does
// not get in.
func TestAcceptIsChecked(t *testing.T) {
	s, err := newSide(Options{}, driver.AccessLocal)
	must(t, err)
	foreign, err := newSide(Options{}, driver.AccessLocal)
	must(t, err)
	gone, err := s.d.AllocPD()
	must(t, err, gone.Dealloc())
	cq, err := s.d.CreateCQ(1)
	must(t, err)
	accept := map[string]func(driver.ConnRequest) driver.PD{
		"foreign": func(driver.ConnRequest) driver.PD { return foreign.pd },
		"nil":     func(driver.ConnRequest) driver.PD { return nil },
		"gone":    func(driver.ConnRequest) driver.PD { return gone },
		"fenced": func(r driver.ConnRequest) driver.PD {
			if err := r.Peer.Fence(context.Background()); err != nil {
				t.Error(err)
			}
			return s.pd
		},
	}
	l, err := s.d.Listen("@kvd-"+t.TempDir(), driver.ListenOptions{
		Accept: func(r driver.ConnRequest) (driver.PD, driver.Access, error) {
			return accept[string(r.Private)](r), rdmatest.All, nil
		},
		Closed: func(p driver.Peer) { t.Errorf("Closed was called for %v", p) },
	})
	must(t, err)
	for name := range accept {
		_, err := s.d.Dial(within(t, rdmatest.Patience), driver.DialRequest{PD: s.pd, CQ: cq, Addr: l.Addr(),
			Private: []byte(name)})
		if err == nil || name != "fenced" && !errors.Is(err, driver.ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := s.d.Dial(within(t, rdmatest.Patience),
		driver.DialRequest{PD: foreign.pd, CQ: cq, Addr: l.Addr()}); !errors.Is(err, ErrForeign) {
		t.Errorf("dial with a foreign PD: %v", err)
	}
	must(t, l.Close(), cq.Close(), s.close(), foreign.close())
}

// Garbage instead of a hello is refused with a reason, and hurts nobody else.
func TestHostileDialer(t *testing.T) {
	p := newPair(t)
	other := encodeHello(nil)
	binary.LittleEndian.PutUint32(other[8:], version+1)
	reserved := encodeHello(nil)
	reserved[12] = 1
	for _, c := range []struct {
		name string
		send []byte
		want error
	}{
		{"short", []byte("GET / HTTP/1.1\r\n")[:7], driver.ErrRefused},
		{"text", []byte("GET / HTTP/1.1\r\n\r\n"), driver.ErrRefused},
		{"version", other, driver.ErrRefused},
		{"reserved", reserved, driver.ErrRefused},
		{"long", encodeHello(make([]byte, driver.MaxPrivate+1)), driver.ErrRefused},
		{"huge", encodeHello(make([]byte, 100<<10)), driver.ErrRefused},
	} {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: p.ln.Addr(), Net: "unixpacket"})
		must(t, err)
		_, err = conn.Write(c.send)
		must(t, err)
		_, fds, err := readWelcome(conn)
		if !errors.Is(err, c.want) || len(fds) != 0 {
			t.Errorf("%s: %d descriptors, %v", c.name, len(fds), err)
		}
		must(t, conn.Close())
	}
	// A malformed request ends the connection.
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: p.ln.Addr(), Net: "unixpacket"})
	must(t, err)
	_, err = conn.Write(encodeHello(nil))
	must(t, err)
	_, fds, err := readWelcome(conn)
	must(t, err)
	closeFDs(fds)
	_, err = conn.Write(make([]byte, requestSize+1))
	must(t, err)
	if _, err := readAnswer(conn, tableSlots); err == nil {
		t.Error("a malformed request was answered")
	}
	must(t, conn.Close())
	if s := p.read(t, p.qp, p.passive.mr.RKey()); s != driver.Success {
		t.Errorf("the honest dialer: %v", s)
	}
}

// impostor listens and plays a memory node by hand.
func impostor(t *testing.T, play func(c *net.UnixConn)) (addr string) {
	t.Helper()
	addr = "@kvd-" + t.TempDir()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: addr, Net: "unixpacket"})
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			if _, err := c.Read(make([]byte, maxFrame)); err == nil {
				play(c)
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		must(t, l.Close())
		<-done
	})
	return addr
}

func unsealed(t *testing.T, size int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("t", unix.MFD_CLOEXEC)
	must(t, err, unix.Ftruncate(fd, size))
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// Dial fails with an error and leaks nothing, whatever a memory node sends.
func TestHostileWelcome(t *testing.T) {
	s, err := newSide(Options{}, driver.AccessLocal)
	must(t, err)
	cq, err := s.d.CreateCQ(1)
	must(t, err)
	cell, err := mem.AllocControl(64, "cell", false)
	must(t, err)
	table, err := mem.AllocControl(4096, "table", true)
	must(t, err)
	loose := unsealed(t, 4096)
	wrongVersion := func(c *net.UnixConn) {
		b := make([]byte, welcomeSize)
		binary.LittleEndian.PutUint64(b, magic)
		_, _ = c.Write(b)
	}
	for name, play := range map[string]func(*net.UnixConn){
		"hangs up":       func(*net.UnixConn) {},
		"garbage":        func(c *net.UnixConn) { _, _ = c.Write([]byte("220 smtp ready")) },
		"too long":       func(c *net.UnixConn) { _, _ = c.Write(make([]byte, 64<<10)) },
		"wrong version":  wrongVersion,
		"no descriptors": func(c *net.UnixConn) { _ = reply(c, 4096, nil) },
		"one descriptor": func(c *net.UnixConn) { _ = reply(c, 4096, nil, cell.FD) },
		"many descriptors": func(c *net.UnixConn) {
			_ = reply(c, 4096, nil, cell.FD, cell.FD, cell.FD, cell.FD, cell.FD)
		},
		"too many to read": func(c *net.UnixConn) { _ = reply(c, 4096, nil, make([]int, 40)...) },
		"unsealed cell":    func(c *net.UnixConn) { _ = reply(c, 4096, nil, loose, table.FD) },
		"unsealed table":   func(c *net.UnixConn) { _ = reply(c, 4096, nil, cell.FD, loose) },
		"read-only cell":   func(c *net.UnixConn) { _ = reply(c, 4096, nil, table.FD, table.FD) },
		"table too small":  func(c *net.UnixConn) { _ = reply(c, 1<<30, nil, cell.FD, table.FD) },
		"table of 0":       func(c *net.UnixConn) { _ = reply(c, 0, nil, cell.FD, table.FD) },
		"table of 9":       func(c *net.UnixConn) { _ = reply(c, 9, nil, cell.FD, table.FD) },
	} {
		t.Run(name, func(t *testing.T) {
			addr := impostor(t, play)
			before := openFDs(t)
			qp, err := s.d.Dial(within(t, rdmatest.Patience), driver.DialRequest{PD: s.pd, CQ: cq, Addr: addr})
			if err == nil {
				must(t, qp.Close())
				t.Fatal("Dial succeeded")
			}
			if n := openFDs(t); n > before+1 { // the impostor's end may still be open
				t.Errorf("%d descriptors, %d before", n, before)
			}
			if n := len(s.d.mu.maps); n != 0 {
				t.Errorf("%d mappings left", n)
			}
		})
	}
	must(t, cell.Free(), table.Free(), cq.Close(), s.close())
}

func openFDs(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(e)
}

// A WR fails with a status, whatever the memory node answers about an rkey, and nothing is mapped that
// could crash us. Silence ends after RequestTimeout.
func TestHostileAnswer(t *testing.T) {
	cell, err := mem.AllocControl(64, "cell", false)
	must(t, err)
	table, err := mem.AllocControl(4096, "table", true)
	must(t, err)
	m, err := mem.Alloc(8192, driver.AllocOptions{Shared: true})
	must(t, err)
	ro, err := unix.Open("/proc/self/fd/"+strconv.Itoa(m.FD), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	loose := unsealed(t, 8192)
	good := answer{id: 1, status: driver.Success, access: driver.AccessRemoteRead, slot: 1, gen: 1, n: 8192,
		fileBytes: 8192, fd: m.FD}
	for _, c := range []struct {
		name string
		edit func(*answer)
		want driver.Status
	}{
		{"good", func(*answer) {}, driver.Success},
		{"refused", func(a *answer) { *a = answer{id: 1, status: driver.RemAccessErr, fd: -1} }, driver.RemAccessErr},
		{"failed", func(a *answer) { *a = answer{id: 1, status: driver.RemOpErr, fd: -1} }, driver.RemOpErr},
		{"silent", nil, driver.RetryExcErr},
		{"other request", func(a *answer) { a.id = 7 }, driver.GeneralErr},
		{"unsealed", func(a *answer) { a.fd = loose }, driver.GeneralErr},
		{"smaller than said", func(a *answer) { a.n, a.fileBytes = 1<<20, 1<<20 }, driver.GeneralErr},
		{"read-only for write", func(a *answer) { a.access |= driver.AccessRemoteWrite; a.fd = ro }, driver.GeneralErr},
		{"no descriptor", func(a *answer) { a.fd = -1 }, driver.WRFlushErr},
		{"refused with descriptor", func(a *answer) { a.status = driver.RemAccessErr }, driver.WRFlushErr},
		{"status", func(a *answer) { a.status = driver.WRFlushErr }, driver.WRFlushErr},
		{"no access", func(a *answer) { a.access = 0 }, driver.WRFlushErr},
		{"local access", func(a *answer) { a.access = driver.AccessLocal }, driver.WRFlushErr},
		{"slot 0", func(a *answer) { a.slot = 0 }, driver.WRFlushErr},
		{"slot outside the table", func(a *answer) { a.slot = 512 }, driver.WRFlushErr},
		{"even generation", func(a *answer) { a.gen = 2 }, driver.WRFlushErr},
		{"empty", func(a *answer) { a.n = 0 }, driver.WRFlushErr},
		{"misaligned", func(a *answer) { a.off, a.n = 4, 8 }, driver.WRFlushErr},
		{"past the end", func(a *answer) { a.off = 8 }, driver.WRFlushErr},
		{"overflow", func(a *answer) { a.off, a.n = 1<<63, 1<<63+8 }, driver.WRFlushErr},
		{"file too large", func(a *answer) { a.fileBytes = 1 << 63 }, driver.WRFlushErr},
	} {
		t.Run(c.name, func(t *testing.T) {
			addr := impostor(t, func(conn *net.UnixConn) {
				if reply(conn, 4096, nil, cell.FD, table.FD) != nil {
					return
				}
				buf := make([]byte, maxFrame)
				if _, err := conn.Read(buf); err != nil {
					return
				}
				if c.edit != nil {
					a := good
					c.edit(&a)
					_ = a.send(conn)
				}
				_, _ = conn.Read(buf)
			})
			clear(cell.Bytes) // barred by the dialer before
			s, err := newSide(Options{RequestTimeout: 100 * time.Millisecond}, driver.AccessLocal)
			must(t, err)
			cq, err := s.d.CreateCQ(1)
			must(t, err)
			q, err := s.d.Dial(within(t, rdmatest.Patience), driver.DialRequest{PD: s.pd, CQ: cq, Addr: addr})
			must(t, err)
			p := &pair{active: s, cq: cq}
			if got := p.read(t, q.(*QP), 42); got != c.want {
				t.Errorf("status %v, want %v", got, c.want)
			}
			must(t, q.Close(), cq.Close(), s.close())
		})
	}
	must(t, unix.Close(ro), cell.Free(), table.Free(), m.Free())
}

// More answers than questions end the connection and leak no descriptor.
func TestUnaskedAnswers(t *testing.T) {
	cell, err := mem.AllocControl(64, "cell", false)
	must(t, err)
	table, err := mem.AllocControl(4096, "table", true)
	must(t, err)
	addr := impostor(t, func(c *net.UnixConn) {
		_ = reply(c, 4096, nil, cell.FD, table.FD)
		a := answer{status: driver.Success, access: 1, slot: 1, gen: 1, n: 64, fileBytes: 64, fd: cell.FD}
		for a.send(c) == nil {
		}
	})
	before := openFDs(t)
	s, err := newSide(Options{}, driver.AccessLocal)
	must(t, err)
	cq, err := s.d.CreateCQ(1)
	must(t, err)
	q, err := s.d.Dial(within(t, rdmatest.Patience), driver.DialRequest{PD: s.pd, CQ: cq, Addr: addr})
	must(t, err)
	for q.State() != driver.StateErr {
		select {
		case <-cq.Ready():
		case <-time.After(rdmatest.Patience):
			t.Fatal("the QP did not notice")
		}
	}
	must(t, q.Close(), cq.Close(), s.close())
	if n := openFDs(t); n > before+1 {
		t.Errorf("%d descriptors, %d before", n, before)
	}
	must(t, cell.Free(), table.Free())
}

func FuzzDecode(f *testing.F) {
	f.Add(encodeHello([]byte("x")))
	f.Add(request{1, 2}.encode())
	f.Add(make([]byte, answerSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if private, err := decodeHello(b); err == nil && len(private) > driver.MaxPrivate {
			t.Error("private data too long")
		}
		if r, err := decodeRequest(b); err == nil && !bytes.Equal(r.encode(), b) {
			t.Error("a request has two forms")
		}
		if a, err := decodeAnswer(b, []int{99}, 512); err == nil {
			if a.off+a.n > a.fileBytes || a.slot >= 512 || a.access&^remoteRights != 0 {
				t.Errorf("accepted %+v", a)
			}
		}
	})
}

func TestOptions(t *testing.T) {
	_, err := Open(Options{RequestTimeout: -1, ConfirmTimeout: -2})
	if err == nil || !strings.Contains(err.Error(), "RequestTimeout is -1ns") ||
		!strings.Contains(err.Error(), "ConfirmTimeout is -2ns") {
		t.Errorf("Open: %v", err)
	}
	s, err := newSide(Options{}, driver.AccessLocal)
	must(t, err)
	m, err := s.d.Alloc(4096, driver.AllocOptions{})
	must(t, err)
	if _, err := s.pd.RegMR(m, 0, 4096, driver.AccessRemoteRead); !errors.Is(err, ErrNotShared) {
		t.Errorf("remote rights over private memory: %v", err)
	}
	must(t, m.Free(), s.close())
}
