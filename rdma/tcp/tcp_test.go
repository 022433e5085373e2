package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// agentLoops is how many loops the listeners of a test have.
var agentLoops = 1

// bothWays runs a test with quiet agents in a loop, and with a goroutine for each.
func bothWays(t *testing.T, f func(*testing.T)) {
	defer func(n int) { agentLoops = n }(agentLoops)
	for name, n := range map[string]int{"loop": 1, "goroutine": 0} {
		agentLoops = n
		t.Run(name, f)
	}
}

// events makes options whose PeerClosed goes to a channel.
func events() (Options, chan PeerClosed) {
	ch := make(chan PeerClosed, 16)
	return Options{Events: Events{PeerClosed: func(e PeerClosed) { ch <- e }}}, ch
}

func receive[T any](t *testing.T, ch <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(rdmatest.Patience):
		t.Fatalf("%s: nothing within %v", what, rdmatest.Patience)
		panic("unreachable")
	}
}

// collect polls n WCs.
func collect(t *testing.T, l *rdmatest.Lane, n int) []rdma.WC {
	t.Helper()
	var all []rdma.WC
	wcs := make([]rdma.WC, 16)
	for len(all) < n {
		k := l.CQ.Poll(wcs)
		all = append(all, wcs[:k]...)
		if k == 0 && !(l.E.H.Wait && l.CQ.Wait(rdmatest.Patience)) {
			receive(t, l.CQ.Ready(), "Ready")
		}
	}
	return all
}

// rawPeer is a dialer that speaks the wire format by hand.
func rawPeer(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(rdmatest.Patience))
	return c
}

func greeted(t *testing.T, addr string) net.Conn {
	t.Helper()
	c := rawPeer(t, addr)
	if _, err := c.Write(appendHello(nil, nil)); err != nil {
		t.Fatal(err)
	}
	var b [welcomeSize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		t.Fatal(err)
	}
	if w, err := parseWelcome(b[:]); err != nil || w.status != statusAccepted {
		t.Fatal(w, err)
	}
	return c
}

// rawNode is a memory node that hands its first connection to f.
func rawNode(t *testing.T, f func(net.Conn)) (addr string) {
	t.Helper()
	ln := testutil.Listen(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		f(c)
	}()
	t.Cleanup(func() { _ = ln.Close(); <-done })
	return ln.Addr().String()
}

func welcomeDialer(c net.Conn) error {
	if _, err := io.ReadFull(c, make([]byte, helloSize)); err != nil {
		return err
	}
	_, err := c.Write(appendWelcome(nil, statusAccepted, ""))
	return err
}

// dialRaw connects a Lane to a rawNode.
func dialRaw(t *testing.T, e *rdmatest.Env, addr string, n int64) *rdmatest.Lane {
	t.Helper()
	l := e.Unconnected(n)
	q, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	l.QP = q
	return l
}

// TestWireVectors pins the bytes of each format.
func TestWireVectors(t *testing.T) {
	for _, v := range []struct {
		name string
		got  []byte
		want string
	}{
		{"hello", appendHello(nil, []byte{0xaa, 0xbb}), "4b564474 0200 0200 aabb"},
		{"accepted", appendWelcome(nil, statusAccepted, ""), "4b564472 0200 01 00 0000 0000 00008000 00040000"},
		{"refused", appendWelcome(nil, statusRefused, "no"), "4b564472 0200 02 00 0200 0000 00008000 00040000 6e6f"},
		{"READ", doorbellOf(requestOf(driver.OpRead, 0x1122334455667788, 0x40, 128)),
			"01 00 0100 18000000  01 000000 80000000 8877665544332211 4000000000000000"},
		{"WRITE", doorbellOf(requestOf(driver.OpWrite, 1, 2, 3, 0xa, 0xb, 0xc)),
			"01 00 0100 1b000000  02 000000 03000000 0100000000000000 0200000000000000 0a0b0c"},
		{"CMP_AND_SWP", requestOf(driver.OpCmpAndSwp, 1, 8, 8, appendWord(appendWord(nil, 5), 6)...),
			"03 000000 08000000 0100000000000000 0800000000000000 0500000000000000 0600000000000000"},
		{"FETCH_ADD", requestOf(driver.OpFetchAdd, 1, 8, 8, appendWord(nil, 5)...),
			"04 000000 08000000 0100000000000000 0800000000000000 0500000000000000"},
		{"reply", appendReply(nil, reply{op: driver.OpRead, status: driver.Success, seq: 0x102, length: 8}),
			"01 01 0201 08000000"},
		{"goodbye", appendGoodbye(nil, 3), "fe 01 0300 00000000"},
		{"paced", appendPaced(nil, 3), "fd 01 0300 00000000"},
	} {
		if got, want := hex.EncodeToString(v.got), strings.ReplaceAll(v.want, " ", ""); got != want {
			t.Errorf("%s\n got %s\nwant %s", v.name, got, want)
		}
	}
}

// TestPostSendWire checks that what PostSend sends is what the vectors say.
func TestPostSendWire(t *testing.T) {
	d := open(t, Options{}).(*device)
	p, g := newGuarded(t, d)
	c, _ := d.CreateCQ(4)
	s := &script{}
	q := newQP(d, p.(*pd), c.(*cq), s, s, 1<<20)
	b := g.all[guardSize:]
	copy(b[64:], "payload")
	key := g.mr.lkey
	if n, err := q.PostSend([]driver.WR{
		{Op: driver.OpRead, Local: b[:8], LKey: key, RKey: 1, RemoteAddr: 2},
		{Op: driver.OpWrite, Local: b[64:71], LKey: key, RKey: 3, RemoteAddr: 4},
		{Op: driver.OpCmpAndSwp, Local: b[8:16], LKey: key, RKey: 5, RemoteAddr: 8, Compare: 6, Swap: 7},
		{Op: driver.OpFetchAdd, Local: b[16:24], LKey: key, RKey: 5, RemoteAddr: 16, Swap: 9},
	}); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	want := doorbellOf(requestOf(driver.OpRead, 1, 2, 8), requestOf(driver.OpWrite, 3, 4, 7, []byte("payload")...),
		requestOf(driver.OpCmpAndSwp, 5, 8, 8, appendWord(appendWord(nil, 6), 7)...),
		requestOf(driver.OpFetchAdd, 5, 16, 8, appendWord(nil, 9)...))
	if !bytes.Equal(s.out.Bytes(), want) {
		t.Fatalf("\n got %x\nwant %x", s.out.Bytes(), want)
	}
}

// TestWords compares the word copies with copy at every alignment.
func TestWords(t *testing.T) {
	m, err := open(t, Options{}).Alloc(4096, driver.AllocOptions{Name: "words"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Free()
	src := make([]byte, 200)
	for i := range src {
		src[i] = byte(i + 1)
	}
	for off := range 9 {
		for n := range 100 {
			clear(m.Bytes)
			storeWords(m.Bytes[off:off+n], src[off/2:])
			want := make([]byte, 256)
			copy(want[off:off+n], src[off/2:])
			if !bytes.Equal(m.Bytes[:256], want) {
				t.Fatalf("storeWords of %d bytes at %d", n, off)
			}
			got := make([]byte, n+1)
			loadWords(got, m.Bytes[off:off+n])
			if !bytes.Equal(got[:n], want[off:off+n]) || got[n] != 0 {
				t.Fatalf("loadWords of %d bytes at %d", n, off)
			}
		}
	}
}

// watched is a script that lets the test look at the region whenever the agent
// is about to wait.
type watched struct {
	script
	look func()
}

func (w *watched) Read(p []byte) (int, error)  { w.look(); return w.script.Read(p) }
func (w *watched) Write(p []byte) (int, error) { w.look(); return w.script.Write(p) }

// TestWordsWholeAcrossParts has messages arrive and leave in parts of every
// awkward size, and looks for words of which only some bytes have moved.
func TestWordsWholeAcrossParts(t *testing.T) {
	const n = agentOut + 1000 // longer than any buffer
	d := open(t, Options{}).(*device)
	p, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Alloc(n+64, driver.AllocOptions{Name: "parts"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Free()
	const all = driver.AccessRemoteRead | driver.AccessRemoteWrite
	r, err := p.RegMR(m, 0, n+64, all)
	if err != nil {
		t.Fatal(err)
	}
	run := func(s *watched) []byte {
		a := newAgent(&listener{d: d}, s, "parts")
		a.pd, a.access = p.(*pd), all
		a.exec.Lock()
		if err := a.run(); !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if err := a.flush(); err != nil {
			t.Fatal(err)
		}
		return s.out.Bytes()
	}
	// torn finds an aligned word within [from, to) whose bytes differ; addr is the
	// address of b[0].
	torn := func(b []byte, addr, from, to int) int {
		for at := (from + 7) &^ 7; at+8 <= to; at += 8 {
			if w := b[at-addr:][:8]; w[0] != w[7] || bytes.Count(w, w[:1]) != 8 {
				return at
			}
		}
		return -1
	}
	for _, addr := range []int{0, 3, 8, 61} {
		for _, step := range []int{1, 3, 7, 8, 13, 4096 + 5, 1 << 20} {
			clear(m.Bytes)
			looks, bad := 0, -1
			s := &watched{script: script{
				step: step, in: doorbellOf(
					requestOf(driver.OpWrite, r.RKey(), uint64(addr), n, bytes.Repeat([]byte{0xff}, n)...))}}
			s.look = func() {
				if looks++; bad < 0 && (looks < 100 || looks%251 == 0) {
					bad = torn(m.Bytes, 0, addr, addr+n)
				}
			}
			run(s)
			if bad >= 0 || bytes.Count(m.Bytes, []byte{0xff}) != n {
				t.Fatalf("WRITE to %d in steps of %d: word %d torn", addr, step, bad)
			}
		}
		// Six bytes of replies in front of each READ vary where its parts end.
		for before := range 9 {
			reqs := [][]byte{}
			for range before {
				reqs = append(reqs, requestOf(driver.OpRead, r.RKey(), 0, 6))
			}
			reqs = append(reqs, requestOf(driver.OpRead, r.RKey(), uint64(addr), n))
			clear(m.Bytes)
			s := &watched{script: script{step: 1 << 20, in: doorbellOf(reqs...)}}
			s.look = func() { rdmatest.Fill(m.Bytes, m.Bytes[0]+1) }
			out := run(s)
			data := out[before*(replySize+6)+replySize:]
			if bad := torn(data, addr, addr, addr+n); bad >= 0 || len(data) != n {
				t.Fatalf("READ of %d behind %d others: word %d torn", addr, before, bad)
			}
		}
	}
}

// TestMalformedFrames sends a good verb, then each kind of nonsense: the
// connection ends, says why, and takes nobody along.
func TestMalformedFrames(t *testing.T) { bothWays(t, malformedFrames) }

func malformedFrames(t *testing.T) {
	head := func(typ, zero byte, count uint16, length uint32) []byte {
		b := []byte{typ, zero, 0, 0, 0, 0, 0, 0}
		binary.LittleEndian.PutUint16(b[2:], count)
		binary.LittleEndian.PutUint32(b[4:], length)
		return b
	}
	read := requestOf(driver.OpRead, 1, 0, 8)
	dirty := slices.Clone(read)
	dirty[2] = 1
	when := func(v byte, op driver.Opcode, operands ...byte) []byte {
		b := requestOf(op, 1, 0, 8, operands...)
		b[1] = v
		return doorbellOf(b)
	}
	for name, bad := range map[string][]byte{
		"type 0":                 head(0, 0, 1, 24),
		"type 2":                 head(2, 0, 1, 24),
		"reserved byte":          head(1, 1, 1, 24),
		"no requests":            head(1, 0, 0, 0),
		"too many requests":      head(1, 0, maxSendWR+1, 24*(maxSendWR+1)),
		"giant frame":            head(1, 0, 1, 1<<32-1),
		"frame over the limit":   head(1, 0, 1, maxFrame+1),
		"frame below its count":  head(1, 0, 2, 47),
		"request exceeds frame":  append(head(1, 0, 1, 24), requestOf(driver.OpWrite, 1, 0, 8)...),
		"bytes behind requests":  nil, // needs the rkey
		"unknown op":             doorbellOf(requestOf(77, 1, 0, 8)),
		"op 0":                   doorbellOf(requestOf(0, 1, 0, 8)),
		"goodbye as a request":   doorbellOf(requestOf(opGoodbye, 1, 0, 0)),
		"reserved request bytes": doorbellOf(dirty),
		"READ that depends":      when(1, driver.OpRead),
		"WRITE that depends":     when(1, driver.OpWrite, make([]byte, 8)...),
		"FETCH_ADD that depends": when(1, driver.OpFetchAdd, make([]byte, 8)...),
		"CAS of no condition":    when(2, driver.OpCmpAndSwp, make([]byte, 16)...),
		"READ of nothing":        doorbellOf(requestOf(driver.OpRead, 1, 0, 0)),
		"giant READ":             doorbellOf(requestOf(driver.OpRead, 1, 0, maxMsg+1)),
		"giant WRITE":            append(head(1, 0, 1, 24), requestOf(driver.OpWrite, 1, 0, 1<<31)...),
		"atomic of 16 bytes":     append(head(1, 0, 1, 40), requestOf(driver.OpCmpAndSwp, 1, 0, 16)...),
		"abort with a length":    doorbellOf(requestOf(opAbort, 0, 0, 1)),
	} {
		t.Run(name, func(t *testing.T) {
			o, ended := events()
			e := rdmatest.NewEnv(t, harness(t, o, Options{}))
			mr := e.Memory(64, rdmatest.All)
			witness := e.Dial()
			c := greeted(t, e.Listener().Addr())
			good := doorbellOf(requestOf(driver.OpFetchAdd, mr.RKey(), 0, 8, appendWord(nil, 1)...))
			if bad == nil {
				bad = append(head(1, 0, 1, 25), append(requestOf(driver.OpRead, mr.RKey(), 0, 8), 0)...)
			}
			if _, err := c.Write(append(good, bad...)); err != nil {
				t.Fatal(err)
			}
			got := receive(t, ended, "PeerClosed")
			if got.Reason != ReasonMalformed || !errors.Is(got.Err, errMalformed) {
				t.Fatalf("the connection ended %v", got)
			}
			e.Must(witness.OK(witness.Read(mr, 0, witness.Word())))
			if v := rdmatest.Le(mr.Bytes()); v != 1 {
				t.Fatalf("word %d, want 1: the good verb's effect alone", v)
			}
		})
	}
}

// TestHandshakeRefusesStrangers has peers that never say a valid hello.
func TestHandshakeRefusesStrangers(t *testing.T) { bothWays(t, handshakeRefusesStrangers) }

func handshakeRefusesStrangers(t *testing.T) {
	for name, c := range map[string]struct {
		say    []byte
		answer string // text of the refusal that the peer reads, if any
		want   error
	}{
		"another protocol":   {[]byte("GET / HTTP/1.1\r\n"), "", errBadMagic},
		"another version":    {[]byte("KVDt\x63\x00\x00\x00"), "unknown version 99", errBadVersion},
		"giant private data": {[]byte("KVDt\x02\x00\xff\xff"), "", errMalformed},
		"slow loris":         {[]byte("KVD"), "", context.DeadlineExceeded},
		"silence":            {nil, "", context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			o, ended := events()
			o.HandshakeTimeout = 100 * time.Millisecond
			e := rdmatest.NewEnv(t, harness(t, o, Options{}))
			p := rawPeer(t, e.Listener().Addr())
			if _, err := p.Write(c.say); err != nil {
				t.Fatal(err)
			}
			answer, _ := io.ReadAll(p)
			if !bytes.Contains(answer, []byte(c.answer)) {
				t.Errorf("answer %q", answer)
			}
			_ = p.Close()
			got := receive(t, ended, "PeerClosed")
			timeout, ok := errors.AsType[net.Error](got.Err)
			if errors.Is(c.want, context.DeadlineExceeded) {
				if !ok || !timeout.Timeout() {
					t.Errorf("ended %v, want a timeout", got)
				}
			} else if !errors.Is(got.Err, c.want) {
				t.Errorf("ended %v, want %v", got, c.want)
			}
			if got.Reason != ReasonHandshake || len(e.Peers()) != 0 {
				t.Errorf("ended %v; Accept ran %d times", got, len(e.Peers()))
			}
		})
	}
}

// TestDialStrangers dials what is no memory node, or one of another make.
func TestDialStrangers(t *testing.T) {
	welcome := func(change func([]byte)) []byte {
		b := appendWelcome(nil, statusAccepted, "")
		change(b)
		return b
	}
	for name, c := range map[string]struct {
		say  []byte
		want string
	}{
		"another protocol": {[]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), "bad magic"},
		"another version":  {welcome(func(b []byte) { b[4] = 9 }), "unknown version 9"},
		"giant text":       {welcome(func(b []byte) { b[6], b[8], b[9] = statusRefused, 0xff, 0xff }), "malformed"},
		"invalid status":   {welcome(func(b []byte) { b[6] = 0 }), "malformed"},
		"smaller messages": {welcome(func(b []byte) { b[14] = 1 }), "messages of 65536 bytes"},
		"shorter queue":    {welcome(func(b []byte) { b[17] = 0 }), "and 0 WRs"},
		"cut short":        {welcome(func([]byte) {})[:7], "EOF"},
		"silence":          {nil, "timeout"},
		"control chars":    {appendWelcome(nil, statusRefused, "no\x1b[31m\n"), "no?[31m?"},
	} {
		t.Run(name, func(t *testing.T) {
			addr := rawNode(t, func(n net.Conn) {
				if _, err := n.Write(c.say); err != nil || c.say == nil {
					_, _ = io.Copy(io.Discard, n)
				}
				_, _ = io.ReadFull(n, make([]byte, helloSize))
			})
			active := Options{}
			if c.say == nil {
				active.HandshakeTimeout = 200 * time.Millisecond
			}
			e := rdmatest.NewEnv(t, harness(t, Options{}, active))
			l := e.Unconnected(4096)
			q, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, addr, nil)
			if err == nil {
				_ = q.Close()
				t.Fatal("dial succeeded")
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("dial gave %q, want %q in it", err, c.want)
			}
		})
	}
}

// TestSilentPeer has a memory node that stops reading after the handshake.
// PostSend must take everything at once all the same, and the WRs must end as
// unknown after PeerTimeout.
func TestSilentPeer(t *testing.T) {
	bothReaders(t, func(t *testing.T, newHarness func(t testing.TB, passive, active Options) rdmatest.Harness) {
		t.Run("64 of 4 MiB", func(t *testing.T) { silentPeer(t, newHarness, 4<<20, 64) })
		t.Run("1000 of 8 KiB", func(t *testing.T) { silentPeer(t, newHarness, 8<<10, 1000) })
	})
}

func silentPeer(t *testing.T, newHarness func(t testing.TB, passive, active Options) rdmatest.Harness, size, n int) {
	leave := make(chan struct{})
	addr := rawNode(t, func(c net.Conn) {
		if welcomeDialer(c) == nil {
			<-leave
		}
	})
	t.Cleanup(func() { close(leave) })
	const timeout = 2 * time.Second // all is posted before, beside other tests, too
	e := rdmatest.NewEnv(t, newHarness(t, Options{}, Options{PeerTimeout: timeout}))
	mr := e.Memory(8, rdmatest.All)
	l := dialRaw(t, e, addr, int64(size))
	b := l.Buf(size)
	start := time.Now()
	for i := range n {
		w := l.Write(mr, 0, b)
		w.ID = uint64(i)
		if k, err := l.QP.PostSend([]rdma.WR{w}); k != 1 || err != nil {
			t.Fatalf("PostSend %d gave %d, %v", i, k, err)
		}
	}
	if took := time.Since(start); took >= timeout {
		t.Errorf("posting took %v: a PostSend waited for the peer", took)
	}
	for i, wc := range collect(t, l, n) {
		want := driver.WRFlushErr
		if i == 0 {
			want = driver.RetryExcErr
		}
		if wc.ID != uint64(i) || wc.Status != want {
			t.Fatalf("WC %d is %+v, want %v", i, wc, want)
		}
	}
	if took := time.Since(start); took < timeout {
		t.Errorf("given up after %v, before PeerTimeout", took)
	}
	if _, err := l.QP.PostSend([]rdma.WR{l.Write(mr, 0, b)}); !errors.Is(err, rdma.ErrQPError) {
		t.Errorf("posting afterwards gave %v", err)
	}
	if err := l.QP.Close(); !errors.Is(err, ErrUnconfirmed) {
		t.Errorf("Close gave %v, want ErrUnconfirmed", err)
	}
}

// TestCloseUnconfirmed closes a healthy-looking QP whose memory node says
// nothing any more.
func TestCloseUnconfirmed(t *testing.T) {
	leave := make(chan struct{})
	addr := rawNode(t, func(c net.Conn) {
		if welcomeDialer(c) == nil {
			<-leave
		}
	})
	t.Cleanup(func() { close(leave) })
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{PeerTimeout: 100 * time.Millisecond}))
	l := dialRaw(t, e, addr, 4096)
	if err := l.QP.Close(); !errors.Is(err, ErrUnconfirmed) {
		t.Errorf("Close gave %v, want ErrUnconfirmed", err)
	}
}

// TestLostConnection has a memory node that answers one WR of three and dies.
func TestLostConnection(t *testing.T) { bothReaders(t, lostConnection) }

func lostConnection(t *testing.T, newHarness func(t testing.TB, passive, active Options) rdmatest.Harness) {
	addr := rawNode(t, func(c net.Conn) {
		if welcomeDialer(c) != nil {
			return
		}
		if _, err := io.ReadFull(c, make([]byte, frameSize+3*(requestSize+8))); err != nil {
			return
		}
		_, _ = c.Write(appendReply(nil, reply{op: driver.OpWrite, status: driver.Success}))
	})
	e := rdmatest.NewEnv(t, newHarness(t, Options{}, Options{}))
	l := dialRaw(t, e, addr, 4096)
	mr := e.Memory(64, rdmatest.All)
	if _, err := l.Post(l.Write(mr, 0, l.Word()), l.Write(mr, 8, l.Word()), l.Write(mr, 16, l.Word())); err != nil {
		t.Fatal(err)
	}
	wcs := collect(t, l, 3)
	if wcs[0].Status != driver.Success || wcs[1].Status != driver.RetryExcErr || wcs[2].Status != driver.WRFlushErr {
		t.Errorf("WCs %+v", wcs)
	}
	if s := l.QP.State(); s != driver.StateErr {
		t.Errorf("state %d", s)
	}
	if err := l.QP.Close(); !errors.Is(err, ErrUnconfirmed) {
		t.Errorf("Close gave %v, want ErrUnconfirmed", err)
	}
}

// TestFullBothWays keeps 64 messages of 4 MiB outstanding, READs and WRITEs in
// turn, so that both directions' socket buffers are full at once.
func TestFullBothWays(t *testing.T) { bothReaders(t, fullBothWays) }

func fullBothWays(t *testing.T, newHarness func(t testing.TB, passive, active Options) rdmatest.Harness) {
	const size = 4 << 20
	for _, mode := range []string{"clear", "tls"} {
		t.Run(mode, func(t *testing.T) {
			n := 64
			var passive, active Options
			if mode == "tls" {
				n = 24 // the same, and slow under the race detector
				passive, active = tlsOptions(t)
			}
			e := rdmatest.NewEnv(t, newHarness(t, passive, active))
			mr := e.Memory(2*size, rdmatest.All)
			l := e.DialWith(2*size, nil)
			in, out := l.Buf(size), l.Buf(size)
			rdmatest.Pattern(out, 1)
			rdmatest.Pattern(mr.Bytes()[:size], 2)
			for i := range n {
				w := l.Write(mr, size, out)
				if i%2 == 0 {
					w = l.Read(mr, 0, in)
				}
				if _, err := l.Post(w); err != nil {
					t.Fatal(err)
				}
			}
			for _, wc := range collect(t, l, n) {
				if wc.Status != driver.Success {
					t.Fatalf("%+v", wc)
				}
			}
			if !bytes.Equal(in, mr.Bytes()[:size]) || !bytes.Equal(out, mr.Bytes()[size:]) {
				t.Fatal("bytes differ")
			}
		})
	}
}

// TestLongDoorbell posts more than a frame, and a mix of copied and referenced
// payloads, in one call.
func TestLongDoorbell(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	const total = 24 << 20
	mr := e.Memory(total, rdmatest.All)
	l := e.DialWith(total, nil)
	b := l.Buf(total)
	rdmatest.Pattern(b, 3)
	var wrs []rdma.WR
	rng := rand.New(rand.NewPCG(1, 2))
	for at := 0; at < total; {
		n := 1 + rng.IntN(64<<10)
		if rng.IntN(16) == 0 {
			n = 1 + rng.IntN(maxMsg)
		}
		n = min(n, total-at)
		w := l.Write(mr, uint64(at), b[at:at+n])
		w.Flags = 0
		wrs = append(wrs, w)
		at += n
	}
	wrs = append(wrs, l.Read(mr, 0, make([]byte, 0)))
	back, _ := e.Region(l.PD, 8, rdma.AccessLocal)
	last := &wrs[len(wrs)-1]
	last.Local, last.LKey = back.Bytes(), back.LKey()
	if len(wrs) > maxSendWR {
		t.Fatalf("%d WRs", len(wrs))
	}
	e.Must(l.OK(wrs...))
	if !bytes.Equal(mr.Bytes(), b) {
		t.Fatal("bytes differ")
	}
}

// stalledReader greets, asks for n READs of mr, and reads nothing.
func stalledReader(t *testing.T, e *rdmatest.Env, mr *rdma.MR, n int) net.Conn {
	t.Helper()
	c := greeted(t, e.Listener().Addr())
	one := requestOf(driver.OpRead, mr.RKey(), 0, len(mr.Bytes()))
	for range n {
		if _, err := c.Write(doorbellOf(one)); err != nil {
			t.Fatal(err)
		}
	}
	// The agent has begun to answer.
	if _, err := io.ReadFull(c, make([]byte, replySize)); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestDeregisterDuringTransfer takes a region away, and unmaps it, while an
// agent is in the middle of a READ that its peer does not take.
func TestDeregisterDuringTransfer(t *testing.T) { bothWays(t, deregisterDuringTransfer) }

func deregisterDuringTransfer(t *testing.T) {
	o, ended := events()
	e := rdmatest.NewEnv(t, harness(t, o, Options{}))
	m, err := e.H.Passive.Alloc(maxMsg, rdma.AllocOptions{Name: "doomed"})
	e.Must(err)
	mr, err := e.PD.RegMR(m, 0, maxMsg, rdmatest.All)
	e.Must(err)
	c := stalledReader(t, e, mr, 8)
	e.Must(mr.Deregister())
	e.Must(m.Free())
	if err := mr.Deregister(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("the second Deregister gave %v", err)
	}
	if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, net.ErrClosed) &&
		!strings.Contains(err.Error(), "reset") {
		t.Fatal(err)
	}
	if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonVerb {
		t.Errorf("ended %v", got)
	}
}

// TestDeregisterDuringWrite is the same while an agent waits for the rest of a
// WRITE.
func TestDeregisterDuringWrite(t *testing.T) { bothWays(t, deregisterDuringWrite) }

func deregisterDuringWrite(t *testing.T) {
	const size = 2 * agentIn // more than is waited for before it is executed
	o, ended := events()
	e := rdmatest.NewEnv(t, harness(t, o, Options{}))
	m, err := e.H.Passive.Alloc(size, rdma.AllocOptions{Name: "doomed"})
	e.Must(err)
	mr, err := e.PD.RegMR(m, 0, size, rdmatest.All)
	e.Must(err)
	c := greeted(t, e.Listener().Addr())
	whole := doorbellOf(requestOf(driver.OpFetchAdd, mr.RKey(), 8, 8, appendWord(nil, 1)...),
		requestOf(driver.OpWrite, mr.RKey(), 0, size, bytes.Repeat([]byte{1}, size)...))
	if _, err := c.Write(whole[:len(whole)-size/2]); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, replySize+8)); err != nil { // it waits for the rest
		t.Fatal(err)
	}
	e.Must(mr.Deregister())
	e.Must(m.Free())
	if _, err := c.Write(whole[len(whole)-size/2:]); err != nil {
		t.Fatal(err)
	}
	var b [replySize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		t.Fatal(err)
	}
	if r, err := parseReply(b[:], driver.OpWrite, 1, 0); err != nil || r.status != driver.RemOpErr {
		t.Fatalf("reply %+v, %v; want REM_OP_ERR", r, err)
	}
	_ = c.Close()
	if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonVerb {
		t.Errorf("ended %v", got)
	}
}

// TestDeregisterUnderLoad unmaps regions while dialers READ and WRITE them: an
// agent that touched one afterwards would crash the test.
func TestDeregisterUnderLoad(t *testing.T) { bothWays(t, deregisterUnderLoad) }

func deregisterUnderLoad(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	const size = 64 << 10
	for range 30 {
		m, err := e.H.Passive.Alloc(size, rdma.AllocOptions{Name: "doomed"})
		e.Must(err)
		mr, err := e.PD.RegMR(m, 0, size, rdmatest.All)
		e.Must(err)
		addr := e.Listener().Addr()
		lanes := []*rdmatest.Lane{dialRaw(t, e, addr, size), dialRaw(t, e, addr, size)}
		started := make(chan struct{}, 1)
		ended := make(chan error, 1)
		go func() {
			ended <- rdmatest.Each(len(lanes), func(i int) error {
				l := lanes[i]
				b := l.Buf(size)
				w := []rdma.WR{l.Read(mr, 0, b), l.Read(mr, 0, b)}
				if i == 1 {
					w = []rdma.WR{l.Write(mr, 0, b), l.Write(mr, 0, b)}
				}
				for {
					if err := l.OK(w...); err != nil {
						return err
					}
					select {
					case started <- struct{}{}:
					default:
					}
				}
			})
		}()
		<-started
		e.Must(mr.Deregister())
		e.Must(m.Free())
		err = receive(t, ended, "the lanes' end")
		if wc, ok := errors.AsType[*rdma.WCError](err); !ok || !slices.Contains([]driver.Status{
			driver.RemAccessErr, driver.RemOpErr, driver.RetryExcErr}, wc.WC.Status) {
			t.Fatal(err)
		}
		for _, l := range lanes {
			if err := l.QP.Close(); err != nil && !errors.Is(err, ErrUnconfirmed) {
				t.Fatal(err)
			}
		}
	}
}

// TestFenceStalledPeer fences a peer that does not take its replies, and
// reuses the PD at once.
func TestFenceStalledPeer(t *testing.T) { bothWays(t, fenceStalledPeer) }

func fenceStalledPeer(t *testing.T) {
	o, ended := events()
	e := rdmatest.NewEnv(t, harness(t, o, Options{}))
	mr := e.Memory(maxMsg, rdmatest.All)
	other := e.NewPD(e.H.Passive)
	stalledReader(t, e, mr, 8)
	e.Accept = func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) { return other, rdmatest.All, nil }
	idle := greeted(t, e.Listener().Addr())
	for _, p := range e.Peers() {
		e.Must(p.Fence(e.Ctx()))
	}
	e.Must(other.Dealloc()) // the fenced connection no longer counts
	var b [replySize]byte
	if _, err := io.ReadFull(idle, b[:]); err != nil || !isGoodbye(b[:], 0) {
		t.Errorf("the idle peer read % x, %v; want a goodbye", b, err)
	}
	_ = idle.Close()
	for range 2 {
		if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonFenced || got.Err != nil {
			t.Errorf("ended %v", got)
		}
	}
	other2 := e.NewPD(e.H.Passive)
	e.Accept = func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) { return other2, rdmatest.All, nil }
}

// TestListenerClosesStrangers closes a listener with peers in every stage of
// the handshake.
func TestListenerClosesStrangers(t *testing.T) { bothWays(t, listenerClosesStrangers) }

func listenerClosesStrangers(t *testing.T) {
	passive, _ := tlsOptions(t)
	for name, o := range map[string]Options{"clear": {}, "tls": passive} {
		t.Run(name, func(t *testing.T) {
			d := rdma.NewDevice("tcp", open(t, o))
			l, err := d.Listen("127.0.0.1:0", rdma.ListenOptions{
				Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) { return nil, 0, errors.New("no") }})
			if err != nil {
				t.Fatal(err)
			}
			rawPeer(t, l.Addr())
			if _, err := rawPeer(t, l.Addr()).Write([]byte("KV")); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > time.Second {
				t.Errorf("Close took %v", took)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestReasons follows one connection to each ordinary end.
func TestReasons(t *testing.T) { bothWays(t, reasons) }

func reasons(t *testing.T) {
	o, ended := events()
	e := rdmatest.NewEnv(t, harness(t, o, Options{}))
	mr := e.Memory(64, rdma.AccessRemoteRead)
	l := e.Dial()
	e.Must(l.Close())
	if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonDeparted || got.String() != got.Remote+" departed" {
		t.Errorf("Close ended the connection %v", got)
	}
	l = e.Dial()
	if _, err := l.Do(l.Write(mr, 0, l.Word())); err != nil {
		t.Fatal(err)
	}
	if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonVerb ||
		!strings.Contains(got.Err.Error(), "REM_ACCESS_ERR") {
		t.Errorf("a refused WRITE ended the connection %v", got)
	}
	e.Accept = func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) { return nil, 0, errors.New("not today") }
	u := e.Unconnected(64)
	if _, err := e.H.Active.Dial(e.Ctx(), u.PD, u.CQ, e.Listener().Addr(), nil); !errors.Is(err, rdma.ErrRefused) {
		t.Errorf("dial gave %v", err)
	}
	if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonRefused ||
		!strings.Contains(got.Err.Error(), "not today") {
		t.Errorf("a refusal ended the connection %v", got)
	}
	foreign := e.NewPD(e.H.Active)
	e.Accept = func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) { return foreign, rdmatest.All, nil }
	if _, err := e.H.Active.Dial(e.Ctx(), u.PD, u.CQ, e.Listener().Addr(), nil); !errors.Is(err, rdma.ErrRefused) {
		t.Errorf("dial to a foreign PD gave %v", err)
	}
	receive(t, ended, "PeerClosed")
	for r := range Reason(NumReasons + 1) {
		if r.String() == "" {
			t.Errorf("Reason %d has no name", r)
		}
	}
}

// TestNoAllocations holds both sides to it, through the loopback.
func TestNoAllocations(t *testing.T) { bothWays(t, noAllocations) }

func noAllocations(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	l, wrs := cachedGet(e)
	mr := e.Memory(64, rdmatest.All)
	wrs = append([]rdma.WR{l.Write(mr, 0, l.Buf(32)), l.CAS(mr, 40, l.Word(), 1, 2), l.Add(mr, 48, l.Word(), 1)},
		wrs...)
	for i := range wrs[:3] {
		wrs[i].Flags = 0
	}
	wcs := make([]rdma.WC, 4)
	if n := testing.AllocsPerRun(200, func() { get(t, l, wrs, wcs) }); n >= 1 {
		t.Errorf("%v allocations a doorbell", n)
	}
	l.E.H.Wait = true
	if n := testing.AllocsPerRun(200, func() { get(t, l, wrs, wcs) }); n >= 1 {
		t.Errorf("%v allocations a doorbell whose replies the waiting goroutine reads", n)
	}
}

// TestCPUNanos checks that agents' time is counted while they work, and that
// waiting is not work.
func TestCPUNanos(t *testing.T) { bothWays(t, cPUNanos) }

func cPUNanos(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	l, wrs := cachedGet(e)
	wcs := make([]rdma.WC, 4)
	start, before := time.Now(), e.Listener().CPUNanos()
	for range 100 {
		get(t, l, wrs, wcs)
	}
	if got, most := e.Listener().CPUNanos()-before, time.Since(start); got <= 0 || got > int64(most) {
		t.Errorf("100 doorbells cost the agent %d ns of %v", got, most)
	}
	const idle = 300 * time.Millisecond
	before = e.Listener().CPUNanos()
	<-time.After(idle) // what is measured
	get(t, l, wrs, wcs)
	e.Must(l.Close())
	e.WaitClosed(e.Peers()[0]) // everything is booked
	if got := e.Listener().CPUNanos() - before; got > int64(idle/2) {
		t.Errorf("one doorbell in %v cost the agent %v", idle, time.Duration(got))
	}
}

func TestOptionsValidate(t *testing.T) {
	_, err := Open(Options{PeerTimeout: time.Millisecond, HandshakeTimeout: -1, SocketBuffer: 100})
	for _, want := range []string{"PeerTimeout is 1ms", "HandshakeTimeout is -1ns", "SocketBuffer is 100 bytes"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Open gave %v, want %q in it", err, want)
		}
	}
}

// TestForeignObjects dials with a PD and a CQ of another device.
func TestForeignObjects(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	l := e.Unconnected(64)
	cq, err := e.H.Passive.CreateCQ(1)
	e.Must(err)
	e.Undo("close cq", cq.Close)
	for _, c := range []struct {
		pd *rdma.PD
		cq *rdma.CQ
	}{{e.PD, l.CQ}, {l.PD, cq}} {
		if _, err := e.H.Active.Dial(e.Ctx(), c.pd, c.cq, e.Listener().Addr(), nil); err == nil ||
			!strings.Contains(err.Error(), "not of this device") {
			t.Errorf("dial gave %v", err)
		}
	}
}

// TestSharedCQGrows completes more on one CQ than its depth.
func TestSharedCQGrows(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	mr := e.Memory(64, rdmatest.All)
	u := e.Unconnected(4096)
	cq, err := e.H.Active.CreateCQ(1)
	e.Must(err)
	e.Undo("close cq", cq.Close)
	u.CQ = cq
	const qps, each = 4, 100
	for range qps {
		q, err := e.H.Active.Dial(e.Ctx(), u.PD, cq, e.Listener().Addr(), nil)
		e.Must(err)
		e.Undo("close qp", q.Close)
		wrs := make([]rdma.WR, each)
		for i := range wrs {
			wrs[i] = u.Read(mr, 0, u.Local.Bytes()[:8])
			wrs[i].ID = uint64(i)
		}
		if n, err := q.PostSend(wrs); n != each {
			t.Fatal(n, err)
		}
	}
	next := map[uint32]uint64{}
	for _, wc := range collect(t, u, qps*each) {
		if wc.ID != next[wc.QPNum] || wc.Status != driver.Success {
			t.Fatal(fmt.Sprint(wc, next))
		}
		next[wc.QPNum]++
	}
	if err := cq.Close(); err == nil {
		t.Error("a CQ with QPs closed")
	}
}

// TestProxyAtomics has somebody else execute the atomics of an MR: the agent
// touches the word no more, and passes on what it is told.
func TestProxyAtomics(t *testing.T) { bothWays(t, proxyAtomics) }

func proxyAtomics(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	proxied, own := e.Memory(64, rdmatest.All), e.Memory(64, rdmatest.All)
	type call struct {
		op                 rdma.Opcode
		off, compare, swap uint64
	}
	var calls []call
	answer := driver.Success
	e.Must(proxied.ProxyAtomics(func(op rdma.Opcode, off, compare, swap uint64) (uint64, rdma.Status) {
		calls = append(calls, call{op, off, compare, swap})
		return 77, answer
	}))

	l := e.Dial()
	found := l.Word()
	e.Must(l.OK(l.CAS(proxied, 8, found, 0, 5)))
	if v := rdmatest.Le(found); v != 77 {
		t.Errorf("CMP_AND_SWP found %d, want the proxy's 77", v)
	}
	e.Must(l.OK(l.Add(proxied, 16, found, 6)))
	if v := rdmatest.Le(found); v != 77 {
		t.Errorf("FETCH_ADD found %d, want the proxy's 77", v)
	}
	if want := []call{{rdma.OpCmpAndSwp, 8, 0, 5}, {rdma.OpFetchAdd, 16, 0, 6}}; !slices.Equal(calls, want) {
		t.Errorf("the proxy was asked %v, want %v", calls, want)
	}
	if !bytes.Equal(proxied.Bytes(), make([]byte, len(proxied.Bytes()))) {
		t.Errorf("the agent touched the memory: % x", proxied.Bytes())
	}
	// READ, WRITE and other MRs are the agent's own.
	e.Must(l.OK(l.Write(proxied, 0, l.Buf(8))))
	e.Must(l.OK(l.Read(proxied, 0, l.Buf(8))))
	e.Must(l.OK(l.CAS(own, 8, found, 0, 5)))
	if rdmatest.Le(found) != 0 || rdmatest.Le(own.Bytes()[8:]) != 5 || len(calls) != 2 {
		t.Errorf("another MR's word %d, found %d, %d calls", rdmatest.Le(own.Bytes()[8:]), rdmatest.Le(found),
			len(calls))
	}

	for status, told := range map[rdma.Status]struct {
		status  rdma.Status
		applied rdma.Outcome
	}{
		driver.RemAccessErr: {driver.RemAccessErr, rdma.No},
		driver.RemInvReqErr: {driver.RemInvReqErr, rdma.No},
		driver.RemOpErr:     {driver.RemOpErr, rdma.Unknown},
		driver.GeneralErr:   {driver.RemOpErr, rdma.Unknown},
		driver.RetryExcErr:  {driver.RemOpErr, rdma.Unknown},
		driver.LocProtErr:   {driver.RemOpErr, rdma.Unknown},
		0:                   {driver.RemOpErr, rdma.Unknown},
	} {
		answer = status
		l := e.Dial()
		err := l.OK(l.CAS(proxied, 8, l.Word(), 0, 5))
		wc, ok := errors.AsType[*rdma.WCError](err)
		if !ok || wc.WC.Status != told.status || wc.Applied() != told.applied {
			t.Errorf("%v: the dialer is told %v, want %v", status, err, told.status)
		}
	}
}

// TestProxyHoldsDeregister: what a proxy may still do to the memory is waited for.
func TestProxyHoldsDeregister(t *testing.T) { bothWays(t, proxyHoldsDeregister) }

func proxyHoldsDeregister(t *testing.T) {
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	mr, revoke := e.Region(e.PD, 64, rdmatest.All)
	entered, leave := make(chan struct{}), make(chan struct{})
	e.Must(mr.ProxyAtomics(func(rdma.Opcode, uint64, uint64, uint64) (uint64, rdma.Status) {
		close(entered)
		<-leave
		return 0, driver.Success
	}))
	l := e.Dial()
	w := l.CAS(mr, 0, l.Word(), 0, 1)
	if n, err := l.QP.PostSend([]rdma.WR{w}); n != 1 {
		t.Fatal(err)
	}
	receive(t, entered, "the proxy")
	fence, cancel := context.WithCancel(context.Background())
	cancel()
	if err := e.Peers()[0].Fence(fence); err == nil {
		t.Error("a fence was confirmed while a proxy was at work")
	}
	revoked := make(chan error, 1)
	go func() { revoked <- revoke() }()
	for end := time.Now().Add(rdmatest.Patience); time.Now().Before(end); {
		// until Deregister has made the rkey unknown
		l := e.Dial()
		if err := l.OK(l.Read(mr, 0, l.Word())); err != nil {
			break
		}
	}
	select {
	case <-revoked:
		t.Error("Deregister returned while a proxy was at work")
	default:
	}
	close(leave)
	e.Must(receive(t, revoked, "Deregister"))
	e.Must(e.Peers()[0].Fence(e.Ctx()))
}

// counted is a stream that counts what is written to it.
type counted struct {
	script
	writes []int // bytes each
}

func (c *counted) Write(p []byte) (int, error) {
	c.writes = append(c.writes, len(p))
	return c.script.Write(p)
}

// PostSend itself writes a doorbell with a payload that is too long to be copied, if the socket has room
// for it; a goroutine would have to be woken for that first.
func TestPostSendWritesPayload(t *testing.T) {
	d := open(t, Options{}).(*device)
	p, _ := newGuarded(t, d)
	c, err := d.CreateCQ(8)
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Alloc(2<<20, driver.AllocOptions{Name: "payload"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Free()
	r, err := p.RegMR(m, 0, 2<<20, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Deregister()
	for i := range m.Bytes {
		m.Bytes[i] = byte(i * 7)
	}
	for _, size := range []int{copyMax + 1, 256 << 10, 1 << 20} {
		s := &counted{}
		q := newQP(d, p.(*pd), c.(*cq), s, s, 2<<20)
		wrs := []driver.WR{
			{Op: driver.OpWrite, Local: m.Bytes[8:][:size], LKey: r.LKey(), RKey: 5, RemoteAddr: 64},
			{Op: driver.OpCmpAndSwp, Local: m.Bytes[:8], LKey: r.LKey(), Flags: driver.Signaled},
		}
		if n, err := q.PostSend(wrs); n != 2 || err != nil {
			t.Fatal(n, err)
		}
		if q.mu.busy {
			t.Fatalf("a payload of %d bytes was left to a goroutine", size)
		}
		out := s.out.Bytes()
		if want := frameSize + 2*requestSize + size + 16; len(out) != want ||
			!bytes.Equal(out[frameSize+requestSize:][:size], m.Bytes[8:][:size]) {
			t.Fatalf("a payload of %d bytes: %d bytes written, want %d", size, len(out), want)
		}
		for _, n := range s.writes {
			if n > writePiece {
				t.Errorf("a payload of %d bytes: %d in one write, at most %d", size, n, writePiece)
			}
		}
	}
}
