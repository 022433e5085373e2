package tcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

// script is a stream whose peer has said everything already. It hands out at
// most step bytes a read.
type script struct {
	in     []byte
	step   int
	out    bytes.Buffer
	pauses bool // every other read is os.ErrDeadlineExceeded
	paused bool
}

func (s *script) Read(p []byte) (int, error) {
	if s.paused = s.pauses && !s.paused; s.paused {
		return 0, os.ErrDeadlineExceeded
	}
	n := copy(p[:min(len(p), s.step)], s.in)
	s.in = s.in[n:]
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}
func (s *script) Write(p []byte) (int, error)      { return s.out.Write(p) }
func (s *script) Close() error                     { return nil }
func (s *script) CloseWrite() error                { return nil }
func (s *script) LocalAddr() net.Addr              { return nil }
func (s *script) RemoteAddr() net.Addr             { return nil }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// guarded is a region with guard bytes around it.
type guarded struct {
	all []byte
	mr  *mr
}

const (
	guardSize  = 64
	regionSize = 1024
)

func newGuarded(t testing.TB, d driver.Device) (driver.PD, *guarded) {
	t.Helper()
	p, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Alloc(regionSize+2*guardSize, driver.AllocOptions{Name: "fuzz"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Free() })
	r, err := p.RegMR(m, guardSize, regionSize, driver.AccessRemoteRead|driver.AccessRemoteWrite|
		driver.AccessRemoteAtomic)
	if err != nil {
		t.Fatal(err)
	}
	return p, &guarded{all: m.Bytes[:regionSize+2*guardSize], mr: r.(*mr)}
}

// setKey gives the region a key that seeds can name.
func (g *guarded) setKey(rkey uint64) {
	t := g.mr.pd.keys.Load().clone()
	delete(t.byRKey, g.mr.rkey)
	g.mr.rkey = rkey
	t.byRKey[rkey] = g.mr
	g.mr.pd.keys.Store(t)
}

func (g *guarded) intact() bool {
	var zero [guardSize]byte
	return bytes.Equal(g.all[:guardSize], zero[:]) && bytes.Equal(g.all[guardSize+regionSize:], zero[:])
}

// doorbellOf frames requests with their operands.
func doorbellOf(requests ...[]byte) []byte {
	f := frame{count: len(requests)}
	b := make([]byte, frameSize)
	for _, r := range requests {
		f.length += len(r)
		b = append(b, r...)
	}
	putFrame(b, f)
	return b
}

func requestOf(op driver.Opcode, rkey, addr uint64, n int, operands ...byte) []byte {
	return append(appendRequest(nil, request{op: op, length: n, rkey: rkey, addr: addr}), operands...)
}

const seedKey = 7

func requestSeeds() [][]byte {
	read := requestOf(driver.OpRead, seedKey, 8, 16)
	write := requestOf(driver.OpWrite, seedKey, 3, 5, 1, 2, 3, 4, 5)
	cas := requestOf(driver.OpCmpAndSwp, seedKey, 16, 8, make([]byte, 16)...)
	add := requestOf(driver.OpFetchAdd, seedKey, 24, 8, 1, 0, 0, 0, 0, 0, 0, 0)
	good := doorbellOf(read, write, cas, add)
	giant := doorbellOf(read)
	binary.LittleEndian.PutUint32(giant[4:], 1<<32-1)
	return [][]byte{
		nil, good, append(good, good...), good[:len(good)-3], giant,
		doorbellOf(requestOf(driver.OpWrite, seedKey, 0, regionSize, make([]byte, regionSize)...)),
		doorbellOf(requestOf(driver.OpRead, seedKey, 1<<64-4, 8), read),
		doorbellOf(requestOf(driver.OpRead, seedKey, regionSize-8, 9)),
		doorbellOf(requestOf(driver.OpFetchAdd, seedKey, regionSize-4, 8, 1, 0, 0, 0, 0, 0, 0, 0)),
		doorbellOf(requestOf(driver.OpCmpAndSwp, seedKey, 4, 8, make([]byte, 16)...)),
		doorbellOf(read, requestOf(opAbort, 0, 0, 0), write),
		doorbellOf(requestOf(driver.OpRead, seedKey+1, 0, 8)),
		bytes.Repeat([]byte{0xff}, 64), make([]byte, 64),
	}
}

// FuzzRequestFrame lets an agent execute arbitrary bytes: it must end, touch
// only its region, and answer in well-formed replies.
func FuzzRequestFrame(f *testing.F) {
	for i, s := range requestSeeds() {
		f.Add(s, uint8(7*i))
	}
	f.Fuzz(func(t *testing.T, in []byte, step uint8) {
		d := open(t, Options{})
		p, g := newGuarded(t, d)
		g.setKey(seedKey)
		s := &script{in: in, step: int(step) + 1}
		a := newAgent(&listener{d: d.(*device)}, s, "fuzz")
		a.pd, a.access = p.(*pd), driver.AccessRemoteRead|driver.AccessRemoteWrite|driver.AccessRemoteAtomic
		a.exec.Lock()
		if err := a.run(); err == nil {
			t.Fatal("no error at the end of input")
		}
		_ = a.flush()
		if !g.intact() {
			t.Fatal("bytes outside the region changed")
		}
		out := s.out.Bytes()
		looped, all, half := inTurns(t, d.(*device), in, int(step)+1)
		if !bytes.Equal(looped, out) {
			t.Fatalf("replies\n% x, in a loop\n% x", out, looped)
		}
		// Of a WRITE that ends in the middle, a goroutine executes what has arrived.
		if !half && !bytes.Equal(all, g.all) {
			t.Fatalf("memory\n% x, in a loop\n% x", g.all, all)
		}
		for seq := uint16(0); len(out) > 0; seq++ {
			if len(out) < replySize {
				t.Fatalf("%d bytes of a reply", len(out))
			}
			n := int(binary.LittleEndian.Uint32(out[4:]))
			r, err := parseReply(out, driver.Opcode(out[0]), seq, n)
			if err != nil {
				t.Fatal(err)
			}
			if len(out) < replySize+n || n > regionSize {
				t.Fatalf("payload of %d bytes, %d there", n, len(out)-replySize)
			}
			out = out[replySize+n:]
			if r.status != driver.Success && len(out) > 0 {
				t.Fatal("more behind an error")
			}
		}
	})
}

// inTurns has an agent in a loop be told in, step bytes at a time, and executes the
// rest as its goroutine does when it leaves the loop. It returns the replies, the
// region with its guards, and whether in ends in the middle of a request.
func inTurns(t *testing.T, d *device, in []byte, step int) (replies, all []byte, half bool) {
	t.Helper()
	p, g := newGuarded(t, d)
	g.setKey(seedKey)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	peer := fds[1]
	defer func() { _ = unix.Close(peer) }()
	var cpu atomic.Int64
	m, err := newMeteredConn(os.NewFile(uintptr(fds[0]), "agent"), nil, nil, &cpu)
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLoop(&cpu) // turn is called by hand
	if err != nil {
		t.Fatal(err)
	}
	defer l.p.Close()
	a := newAgent(&listener{d: d}, m, "fuzz")
	a.pd, a.access = p.(*pd), driver.AccessRemoteRead|driver.AccessRemoteWrite|driver.AccessRemoteAtomic
	hear := func() {
		b := make([]byte, 4096)
		for {
			n, err := unix.Read(peer, b)
			if err != nil || n == 0 {
				return
			}
			replies = append(replies, b[:n]...)
		}
	}
	a.exec.Lock()
	if !a.join(l) {
		t.Fatal("not in the loop")
	}
	a.exec.Unlock()
	for len(a.back) == 0 {
		n, err := unix.Write(peer, in[:min(len(in), step)])
		if in = in[max(n, 0):]; err != nil || len(in) == 0 {
			_ = unix.Shutdown(peer, unix.SHUT_WR)
		}
		a.turn()
		hear()
	}
	a.exec.Lock()
	if err = <-a.back; err == nil {
		if _, err := unix.Write(peer, in); err != nil && len(in) > 0 {
			t.Fatal(err)
		}
		_ = unix.Shutdown(peer, unix.SHUT_WR)
		err = a.run()
	}
	half = errors.Is(err, io.EOF) && a.r < a.w
	_ = a.flush()
	_ = m.Close()
	hear()
	if !g.intact() {
		t.Fatal("bytes outside the region changed in a loop")
	}
	return replies, g.all, half
}

// FuzzReplyFrame lets a QP with WRs outstanding read arbitrary bytes: every WR
// must complete once, in order, and only its own buffer may change.
func FuzzReplyFrame(f *testing.F) {
	ok := func(op driver.Opcode, seq uint16, payload ...byte) []byte {
		return append(appendReply(nil, reply{op: op, status: driver.Success, seq: seq, length: len(payload)}),
			payload...)
	}
	fail := func(op driver.Opcode, seq uint16, s driver.Status) []byte {
		return appendReply(nil, reply{op: op, status: s, seq: seq})
	}
	read := ok(driver.OpRead, 0, bytes.Repeat([]byte{0xaa}, 16)...)
	write := ok(driver.OpWrite, 1)
	cas := ok(driver.OpCmpAndSwp, 2, 1, 2, 3, 4, 5, 6, 7, 8)
	long := append(appendReply(nil, reply{op: driver.OpRead, status: driver.Success, seq: 0, length: 1 << 31}),
		read[replySize:]...)
	for _, s := range [][]byte{
		nil, read, append(read[:len(read):len(read)], write...),
		bytes.Join([][]byte{read, write, cas, fail(opAbort, 3, driver.RemInvReqErr)}, nil),
		bytes.Join([][]byte{read, write, cas, ok(opAbort, 3)}, nil),
		bytes.Join([][]byte{read, fail(driver.OpWrite, 1, driver.RemAccessErr), cas}, nil),
		bytes.Join([][]byte{read, appendGoodbye(nil, 1), write}, nil), appendGoodbye(nil, 3),
		read[:20], long, write, fail(driver.OpRead, 0, driver.WRFlushErr), fail(driver.OpRead, 0, 0),
		bytes.Join([][]byte{appendPaced(nil, 0), read, appendPaced(nil, 1), appendPaced(nil, 1), write, cas,
			fail(opAbort, 3, driver.RemInvReqErr)}, nil),
		appendPaced(nil, 1), bytes.Join([][]byte{read, write, cas, cas, cas, cas}, nil), bytes.Repeat([]byte{0xff}, 40),
		make([]byte, 40),
	} {
		f.Add(s, uint8(len(s)), false)
		f.Add(s, uint8(len(s)), true)
	}
	f.Fuzz(func(t *testing.T, in []byte, step uint8, pauses bool) {
		d := open(t, Options{}).(*device)
		p, g := newGuarded(t, d)
		c, err := d.CreateCQ(8)
		if err != nil {
			t.Fatal(err)
		}
		s := &script{in: in, step: int(step) + 1, pauses: pauses}
		q := newQP(d, p.(*pd), c.(*cq), s, s, 1<<20)
		if pauses {
			q.sock = &sock{} // a detached one
		}
		b := g.all[guardSize:]
		wrs := []driver.WR{
			{ID: 0, Op: driver.OpRead, Flags: driver.Signaled, Local: b[0:16]},
			{ID: 1, Op: driver.OpWrite, Flags: driver.Signaled, Local: b[64:72]},
			{ID: 2, Op: driver.OpCmpAndSwp, Flags: driver.Signaled, Local: b[128:136]},
			{ID: 3, Op: driver.OpRead, Flags: driver.Signaled, Local: make([]byte, 8)}, // not registered
			{ID: 4, Op: driver.OpRead, Flags: driver.Signaled, Local: b[192:200]},
		}
		for i := range wrs {
			wrs[i].LKey = g.mr.lkey
		}
		if n, err := q.PostSend(wrs); n != len(wrs) || err != nil {
			t.Fatal(n, err)
		}
		for ended := false; !ended; {
			q.readReplies()
			select {
			case <-q.gone:
				ended = true
			default:
				if !pauses {
					t.Fatal("the reader stopped before the end")
				}
			}
		}
		wcs := make([]driver.WC, 8)
		if n := c.Poll(wcs); n != len(wrs) {
			t.Fatalf("%d WCs, want %d", n, len(wrs))
		}
		failed := false
		for i, wc := range wcs[:len(wrs)] {
			if wc.ID != uint64(i) || wc.Op != wrs[i].Op || failed != (wc.Status == driver.WRFlushErr) {
				t.Fatalf("WCs %+v", wcs[:len(wrs)])
			}
			failed = failed || wc.Status != driver.Success
		}
		if !failed || wcs[3].Status == driver.Success {
			t.Fatal("a refused WR succeeded")
		}
		for _, hole := range [][2]int{{16, 128}, {136, regionSize}} {
			if bytes.ContainsFunc(b[hole[0]:hole[1]], func(r rune) bool { return r != 0 }) {
				t.Fatalf("bytes %v changed", hole)
			}
		}
		if !g.intact() {
			t.Fatal("bytes outside the region changed")
		}
	})
}

// alone is a listener of one connection.
type alone struct{ net.Conn }

func (l alone) Accept() (net.Conn, error) { return l.Conn, nil }
func (alone) Addr() net.Addr              { return nil }

// someGuest is what a Door makes of a connection.
func someGuest(t *testing.T) *netsrv.Guest {
	t.Helper()
	door, err := NewDoor(netsrv.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	c, _ := net.Pipe()
	_, g, err := door.Accept(alone{c}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Release)
	return g
}

// FuzzHello feeds both directions of the handshake.
func FuzzHello(f *testing.F) {
	f.Add(appendHello(nil, nil))
	f.Add(appendHello(nil, []byte("token")))
	f.Add(appendHello(nil, make([]byte, driver.MaxPrivate+1)))
	f.Add([]byte("KVDt\x03\x00\x00\x00"))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add(appendWelcome(nil, statusAccepted, ""))
	f.Add(appendWelcome(nil, statusRefused, "no such session"))
	f.Add([]byte("KVDr\x02\x00\x02\x00\xff\xff\x00\x00"))
	f.Fuzz(func(t *testing.T, in []byte) {
		d := open(t, Options{})
		p, _ := newGuarded(t, d)
		refuse := errors.New("refused")
		var private []byte
		s := &script{in: bytes.Clone(in), step: 3}
		a := newAgent(&listener{d: d.(*device), o: driver.ListenOptions{
			Accept: func(r driver.ConnRequest) (driver.PD, driver.Access, error) {
				private = bytes.Clone(r.Private)
				if len(private) == 0 {
					return nil, 0, refuse
				}
				return p, driver.AccessRemoteRead, nil
			}}}, s, "fuzz")
		a.guest = someGuest(t)
		a.exec.Lock()
		err := a.handshake()
		if err == nil && !bytes.HasPrefix(in, appendHello(nil, private)) {
			t.Fatalf("accepted %q with private data %q", in, private)
		}
		if len(in) < welcomeSize {
			return
		}
		w, err := parseWelcome(in)
		if err == nil && (w.textLen > maxRefusal || w.status != statusAccepted && w.status != statusRefused) {
			t.Fatalf("%+v of % x", w, in)
		}
	})
}
