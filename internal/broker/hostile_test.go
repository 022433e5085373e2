package broker

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// script decides what a hostile program does. At its end all is 0.
type script struct{ b []byte }

func (s *script) byte() byte {
	if len(s.b) == 0 {
		return 0
	}
	b := s.b[0]
	s.b = s.b[1:]
	return b
}

func (s *script) u64() uint64 {
	var b [8]byte
	s.b = s.b[copy(b[:], s.b):]
	return binary.LittleEndian.Uint64(b[:])
}

// number is a number at, or near, what may matter.
func (s *script) number() uint64 {
	switch c := s.byte(); c % 8 {
	case 0:
		return s.u64()
	case 1:
		return hostileArena - uint64(c/8)
	case 2:
		return hostileArena + uint64(c/8)
	case 3:
		return 1<<64 - 1 - uint64(c/8)
	case 4:
		return ring.SlotSize - 16 + uint64(c/8)
	case 5:
		return uint64(c/8) * 4096
	}
	return uint64(s.byte())
}

const hostileArena = 256 << 10

// hostile is a program that may write anything.
type hostile struct {
	*program
	s         *script
	cheap     bool // most of it is nonsense, and what reads the whole namespace is rare
	submitted int
	done      []ring.Completion
	socket    int32
}

// act is a step of it. It reports false when it leaves.
func (h *hostile) act() bool {
	switch c := h.s.byte(); {
	case len(h.s.b) == 0:
		return false
	case c < 8: // any word of the ring's
		at := int(h.s.u64() % uint64(len(h.mem)))
		h.mem[at] = h.s.byte()
	case c < 12: // a tail
		binary.LittleEndian.PutUint32(h.mem[64:], uint32(h.s.number()))
	case c < 20: // a message
		h.message()
	case c < 24: // what wakes
		fd := h.queue[1+int(c)%2]
		_ = unix.SetNonblock(fd, c&2 == 0)
		_, _ = unix.Write(fd, binary.NativeEndian.AppendUint64(nil, 1+h.s.number()%4))
	case c < 40: // bytes of its memory
		h.arena[h.s.u64()%hostileArena] = h.s.byte()
	default:
		for range 1 + int(c)%16 {
			h.submit()
		}
		h.publish()
	}
	return h.reap()
}

// reap takes what there is.
func (h *hostile) reap() bool {
	var err error
	h.done, err = h.Reap(h.done[:0])
	return err == nil
}

// flood fills the ring again and again, and seldom does anything else. It reports false when it leaves.
func (h *hostile) flood() bool {
	if h.s.byte() < 16 {
		return h.act()
	}
	before := h.submitted
	for range 1 + int(h.s.byte())%64 {
		h.submit()
	}
	h.publish()
	return len(h.s.b) > 0 && h.reap() && (h.submitted > before || h.full())
}

// full waits for completions, for a while. It reports false once the broker has ended the connection.
func (h *hostile) full() bool {
	if h.Idle() {
		_, _ = unix.Write(h.queue[1], binary.NativeEndian.AppendUint64(nil, 1)) // whatever it did to the ring's words
		p := []unix.PollFd{{Fd: int32(h.queue[2]), Events: unix.POLLIN}, {Fd: h.socket, Events: unix.POLLIN}}
		_, _ = unix.Poll(p, 5)
		if p[0].Revents != 0 {
			var b [8]byte
			_ = unix.SetNonblock(h.queue[2], true)
			_, _ = unix.Read(h.queue[2], b[:])
		}
		if p[1].Revents != 0 {
			var b [1]byte
			n, _, err := unix.Recvfrom(int(h.socket), b[:], unix.MSG_DONTWAIT)
			if err == nil && n == 0 || err != nil && err != unix.EAGAIN {
				return false
			}
		}
	}
	h.Awake()
	return h.reap()
}

// submit queues what is well-formed as bytes, mostly.
func (h *hostile) submit() {
	s := h.s
	x := ring.Submission{Op: ring.Op(s.byte() % 22), Tag: h.tag, KeyBytes: uint16(1 + s.byte()%3)}
	if h.cheap && s.byte() < 200 {
		x.Op = ring.Op(s.byte())
	}
	if x.Op >= 18 && x.Op < 22 { // of streams
		x.Op += ring.OpPutBegin - 18
	}
	if c := s.byte(); c < 64 {
		x.Flags = c & 15
	} else if c < 72 {
		x.KeyBytes = uint16(s.number())
	}
	if x.Op == ring.OpScan || x.Op == ring.OpDeletePrefix {
		if h.cheap && s.byte() > 0 {
			x.Op = ring.OpNop
		}
		x.KeyBytes = uint16(s.byte() % 4)
	}
	if c := s.byte(); c < 128 {
		x.Memory = uint32(c % 4)
	}
	x.Offset, x.Length, x.Word = s.number(), s.number(), s.number()
	if x.Op >= ring.OpPutAppend && s.byte() < 128 {
		x.Word %= 32
	}
	if c := s.byte(); c < 32 {
		x.TTL, x.Timeout = s.number(), uint32(s.number())
	}
	slot := h.Slot(x.Tag)
	for i := range 4 {
		slot[i] = 'a' + s.byte()%3
	}
	if h.Submit(&x) {
		h.tag++
		h.submitted++
	}
}

// message sends one, which may be none.
func (h *hostile) message() {
	s := h.s
	var b []byte
	var files []int
	switch s.byte() % 8 {
	case 0:
		b = make([]byte, s.byte())
		for i := range b {
			b[i] = s.byte()
		}
	case 1:
		b, files = (&ring.Register{Offset: s.number(), Length: s.number()}).Message(1), []int{h.fd}
	case 2:
		b = ring.Numbered(ring.Head{Kind: ring.KindDeregister, Serial: 2}, uint32(s.byte()%4))
	case 3:
		b = ring.Bare(ring.Head{Kind: ring.KindQueue, Serial: 3})
	case 4:
		b = (&ring.Hello{}).Message(4)
	case 5:
		b, files = (&ring.Register{Length: 4096}).Message(5), []int{h.queue[int(s.byte())%3]}
	case 6:
		b = ring.Bare(ring.Head{Kind: ring.Kind(s.byte()), Serial: 6})
	case 7:
		b = ring.Bare(ring.Head{Kind: ring.KindBye, Serial: 7})
	}
	if len(b) == 0 {
		return
	}
	// A broker that has ended the connection, or has not read yet, is no fault of the test.
	raw, err := h.nc.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.Sendmsg(int(fd), b, rights(files), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
}

func rights(files []int) []byte {
	if len(files) == 0 {
		return nil
	}
	return unix.UnixRights(files...)
}

// attack is a connection of a hostile program's, which ends without a word. It returns how much it submitted.
func (w *world) attack(t testing.TB, b []byte, flood bool) int {
	p := w.connect(t, "default")
	defer p.close()
	depth := uint32(64)
	if flood {
		depth = ring.DefaultDepth
	}
	p.greet(hostileArena, ring.Hello{Depth: depth})
	h := &hostile{program: p, s: &script{b}, cheap: flood}
	raw, err := p.nc.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) { h.socket = int32(fd) })
	step := h.act
	if flood {
		step = h.flood
	}
	for step() {
	}
	return h.submitted
}

// TestHostile: programs write anything, and nothing of them is left. Others are served meanwhile, and read their own.
// Each eighth program's steps are of all kinds. The others have long floods of submissions in between.
// KVD_HOSTILE says how many submissions it takes.
func TestHostile(t *testing.T) {
	most := 10_000_000
	if testing.Short() {
		most = 100_000
	}
	if v := os.Getenv("KVD_HOSTILE"); v != "" {
		f, err := strconv.ParseFloat(v, 64)
		if err != nil {
			t.Fatal(err)
		}
		most = int(f)
	}
	w := newWorld(t, nil)
	before := w.before(t)
	honest := w.open(t, "other", 0, ring.Hello{})
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], rand.Uint64())
	t.Logf("seed %x", seed[:8])
	r := rand.NewChaCha8(seed)
	b := make([]byte, 256<<10)
	heap := testutil.Memory()
	connections := 0
	for n := 0; n < most; connections++ {
		all := connections%8 == 0
		script := b
		if all {
			script = b[:16<<10]
		}
		_, _ = r.Read(script) // which never fails
		n += w.attack(t, script, !all)
		key, value := fmt.Sprint("key", connections%64), fmt.Sprint("value", connections)
		c, _ := honest.one(ring.Submission{Op: ring.OpPut, Length: uint64(len(value))}, key, value)
		honest.want("put of another tenant", c, ring.Yes, ring.OK)
		c, got := honest.one(ring.Submission{Op: ring.OpGet, Length: 100}, key, "")
		if honest.want("get of another tenant", c, ring.Yes, ring.OK); string(got[:c.Length]) != value {
			t.Fatalf("%s is %q, want %q", key, got[:c.Length], value)
		}
	}
	honest.close()
	w.none(t, before)
	if n, err := w.c["other"].Count(t.Context()); err != nil || n != uint64(256+min(64, connections)) {
		t.Errorf("the other tenant has %d keys, %v", n, err)
	}
	x := &w.b.tenants[0].stats
	t.Logf("%d connections, %d broke the rules; %d operations ended well; %d bytes of memory more", connections,
		x.Broken.Load(), x.Codes[ring.OK].Load(), testutil.UntilGrown(t, "hostile programs", heap, 16<<20))
	if x.Broken.Load() == 0 || x.Codes[ring.OK].Load() == 0 || x.Codes[ring.Argument].Load() == 0 {
		t.Error("the programs broke nothing, or did nothing that is right")
	}
}

// FuzzBroker: whatever a program writes to its ring, its memory and its socket, the broker serves the next one.
func FuzzBroker(f *testing.F) {
	w := newWorld(f, nil)
	f.Add([]byte{200, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16})
	f.Fuzz(func(t *testing.T, b []byte) {
		w.attack(t, b, false)
		p := w.open(t, "default", 0, ring.Hello{})
		c, _ := p.one(ring.Submission{Op: ring.OpNop}, "", "")
		if p.want("nop", c, ring.Yes, ring.OK); c.Tag != 0 {
			t.Errorf("%+v", c)
		}
		p.close()
	})
}
