package broker

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// world is a store and a broker with a socket for each of two tenants.
type world struct {
	st    *devstore.Store
	b     *Broker
	paths map[string]string // by socket
	c     map[string]*client.Client
}

func newWorld(t testing.TB, change func(s *Socket)) *world { return newWorldWith(t, change, nil) }

// newWorldWith has events for the first tenant's client.
func newWorldWith(t testing.TB, change func(s *Socket), events *client.Events) *world {
	t.Helper()
	return newWorldOf(t, []devstore.Namespace{{Name: "default"}, {Name: "other"}}, change, events)
}

// newWorldOf has a tenant for each namespace.
func newWorldOf(t testing.TB, spaces []devstore.Namespace, change func(s *Socket), events *client.Events) *world {
	t.Helper()
	return newWorldIn(t, devstore.Options{CapacityBytes: 256 << 20, Namespaces: spaces}, change, events)
}

// newWorldIn is newWorldOf in a store of any kind.
func newWorldIn(t testing.TB, o devstore.Options, change func(s *Socket), events *client.Events) *world {
	t.Helper()
	st, err := devstore.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{st: st, paths: map[string]string{}, c: map[string]*client.Client{}}
	var sockets []Socket
	for _, space := range o.Namespaces {
		ns := space.Name
		c, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Namespace: ns,
			Devices: st.Devices(), Events: events})
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "s")
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		s := Socket{Name: ns, Listener: l, Namespaces: map[string]*client.Client{ns: c}, Default: ns,
			Limits: Limits{HelloTime: time.Second}}
		if change != nil {
			change(&s)
		}
		w.paths[ns], w.c[ns], events = path, c, nil
		sockets = append(sockets, s)
	}
	if w.b, err = New(sockets, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	w.b.Serve()
	t.Cleanup(func() {
		if err := w.b.Close(); err != nil {
			t.Error(err)
		}
		for _, c := range w.c {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// program is a client end, as libkvd is one.
type program struct {
	t       testing.TB
	nc      *net.UnixConn
	welcome ring.Welcome
	arena   []byte
	fd      int // of the arena
	files   []int
	mem     []byte
	*ring.Client
	queue []int // files of the queue
	tag   uint32
}

// dial connects without a hello.
func (w *world) dial(t testing.TB, socket string) *program {
	t.Helper()
	p := w.connect(t, socket)
	t.Cleanup(p.close)
	return p
}

// connect is dial for a caller that closes the program itself: of thousands the test would keep each until its end.
func (w *world) connect(t testing.TB, socket string) *program {
	t.Helper()
	nc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: w.paths[socket], Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	return &program{t: t, nc: nc, fd: -1}
}

func (p *program) close() {
	_ = p.nc.Close()
	if p.mem != nil {
		_ = unix.Munmap(p.mem)
		p.mem = nil
	}
	if p.arena != nil {
		_ = unix.Munmap(p.arena)
		p.arena = nil
	}
	closeAll(p.files)
	p.files = nil
}

// makeArena makes memory with seals.
func (p *program) makeArena(n, seals int) int {
	p.t.Helper()
	fd, err := unix.MemfdCreate("arena", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	p.files = append(p.files, fd)
	return fd
}

func (p *program) self() int {
	p.t.Helper()
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		p.t.Fatal(err)
	}
	p.files = append(p.files, fd)
	return fd
}

func (p *program) send(b []byte, files ...int) {
	p.t.Helper()
	if _, _, err := p.nc.WriteMsgUnix(b, unix.UnixRights(files...), nil); err != nil {
		p.t.Fatal(err)
	}
}

// hear reads a message; io.EOF: the broker has gone.
func (p *program) hear() (h ring.Head, body []byte, files []int, err error) {
	b, oob := make([]byte, ring.MaxMessage), make([]byte, 256)
	_ = p.nc.SetReadDeadline(time.Now().Add(20 * time.Second))
	n, oobn, _, _, err := p.nc.ReadMsgUnix(b, oob)
	if err != nil {
		return h, nil, nil, err
	}
	if n == 0 {
		return h, nil, nil, io.EOF
	}
	files, err = filesOf(oob[:oobn])
	p.files = append(p.files, files...)
	if err == nil {
		h, body, err = ring.ParseHead(b[:n])
	}
	return h, body, files, err
}

// refusal expects that, and its code.
func (p *program) refusal(what string, code ring.Code) string {
	p.t.Helper()
	h, body, _, err := p.hear()
	if err != nil || h.Kind != ring.KindRefused {
		p.t.Errorf("%s: %+v, %v, want a refusal", what, h, err)
		return ""
	}
	r, err := ring.ParseRefused(body)
	if err != nil || r.Code != code || r.Outcome != ring.No || r.Text == "" {
		p.t.Errorf("%s: %+v, %v, want code %d", what, r, err, code)
	}
	return r.Text
}

// ended expects the connection's end.
func (p *program) ended(what string) {
	p.t.Helper()
	if h, _, _, err := p.hear(); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		p.t.Errorf("%s: %+v, %v, want the end", what, h, err)
	}
}

// open says hello with an arena.
func (w *world) open(t testing.TB, socket string, arena int, hello ring.Hello) *program {
	t.Helper()
	p := w.dial(t, socket)
	p.greet(arena, hello)
	return p
}

// greet says hello with an arena.
func (p *program) greet(arena int, hello ring.Hello) {
	t := p.t
	t.Helper()
	files := []int{p.self()}
	if hello.ArenaBytes = uint64(arena); arena > 0 {
		p.fd = p.makeArena(arena, unix.F_SEAL_SHRINK)
		files = append(files, p.fd)
		var err error
		if p.arena, err = unix.Mmap(p.fd, 0, arena, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			t.Fatal(err)
		}
	}
	p.send(hello.Message(1), files...)
	h, body, files, err := p.hear()
	if err != nil || h.Kind != ring.KindWelcome || h.Serial != 1 || len(files) != 1+ring.FilesOfQueue {
		if r, rerr := ring.ParseRefused(body); rerr == nil {
			t.Fatalf("%+v", r)
		}
		t.Fatalf("%+v, %d files, %v", h, len(files), err)
	}
	if p.welcome, err = ring.ParseWelcome(body); err != nil {
		t.Fatal(err)
	}
	p.attach(files[1:])
}

// attach maps a queue.
func (p *program) attach(files []int) {
	p.t.Helper()
	var st unix.Stat_t
	err := unix.Fstat(files[0], &st)
	if err == nil {
		p.mem, err = unix.Mmap(files[0], 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	l, err := ring.ParseHeader(p.mem)
	if err != nil {
		p.t.Fatal(err)
	}
	p.Client = ring.NewClient(p.mem, l)
	p.queue = files
}

// start submits, with a key and what follows it in the slot.
func (p *program) start(s ring.Submission, key, value string) uint32 {
	p.t.Helper()
	s.Tag = p.tag
	p.tag++
	s.KeyBytes = uint16(len(key))
	copy(p.Slot(s.Tag)[copy(p.Slot(s.Tag), key):], value)
	if !p.Submit(&s) {
		p.t.Fatal("the ring is full")
	}
	return s.Tag
}

// publish wakes the broker.
func (p *program) publish() {
	if p.Publish() {
		_, _ = unix.Write(p.queue[1], binary.NativeEndian.AppendUint64(nil, 1))
	}
}

// wait returns n completions, by tag.
func (p *program) wait(n int) map[uint32]ring.Completion {
	p.t.Helper()
	got := map[uint32]ring.Completion{}
	end := time.Now().Add(20 * time.Second)
	for len(got) < n {
		all, err := p.Reap(nil)
		if err != nil {
			p.t.Fatal(err)
		}
		for _, c := range all {
			got[c.Tag] = c
		}
		if len(all) == 0 {
			if time.Now().After(end) {
				p.t.Fatalf("%d of %d completions", len(got), n)
			}
			if p.Idle() {
				pfd := []unix.PollFd{{Fd: int32(p.queue[2]), Events: unix.POLLIN}}
				_, _ = unix.Poll(pfd, 100)
				var b [8]byte
				_, _ = unix.Read(p.queue[2], b[:])
			}
			p.Awake()
		}
	}
	return got
}

// one performs one operation.
func (p *program) one(s ring.Submission, key, value string) (ring.Completion, []byte) {
	p.t.Helper()
	tag := p.start(s, key, value)
	p.publish()
	return p.wait(1)[tag], p.Slot(tag)
}

func (p *program) want(what string, c ring.Completion, outcome ring.Outcome, code ring.Code) {
	p.t.Helper()
	if c.Outcome != outcome || c.Code != code {
		p.t.Errorf("%s: outcome %d, code %d: %q, want %d, %d", what, c.Outcome, c.Code, p.text(c), outcome, code)
	}
}

func (p *program) text(c ring.Completion) string {
	if c.Code == ring.OK || c.Length > ring.SlotSize {
		return ""
	}
	return string(p.Slot(c.Tag)[:c.Length])
}

// TestOperations: each operation does what it says, by slot and by arena, and fails as it should.
func TestOperations(t *testing.T) {
	w := newWorld(t, nil)
	p := w.open(t, "default", 8<<20, ring.Hello{Name: "test"})
	slot := ring.Submission{Op: ring.OpPut, Length: 5, ValueFlags: 7}
	c, _ := p.one(slot, "a", "small")
	p.want("put", c, ring.Yes, ring.OK)
	version := c.Version
	c, got := p.one(ring.Submission{Op: ring.OpGet, Length: ring.SlotSize}, "a", "")
	p.want("get", c, ring.Yes, ring.OK)
	if c.Version != version || string(got[:c.Length]) != "small" || c.ValueFlags != 7 {
		t.Errorf("%+v: %q", c, got[:c.Length])
	}
	c, _ = p.one(ring.Submission{Op: ring.OpGet, Length: 4}, "a", "")
	if p.want("get into too little", c, ring.No, ring.ShortBuffer); c.Length != 5 {
		t.Errorf("the value has %d bytes, want 5", c.Length)
	}
	c, _ = p.one(ring.Submission{Op: ring.OpGet, Length: 9}, "none", "")
	p.want("get of nothing", c, ring.No, ring.NotFound)
	slot.Flags = ring.FlagIfAbsent
	c, _ = p.one(slot, "a", "other")
	p.want("put if absent", c, ring.No, ring.Condition)
	slot.Flags, slot.Word = ring.FlagIfVersion, version+1
	c, _ = p.one(slot, "a", "other")
	p.want("put of another version", c, ring.No, ring.Condition)
	slot.Word = version
	c, _ = p.one(slot, "a", "other")
	p.want("put of the version", c, ring.Yes, ring.OK)
	c, _ = p.one(ring.Submission{Op: ring.OpExists}, "a", "")
	if p.want("exists", c, ring.Yes, ring.OK); c.Length != 5 {
		t.Errorf("a value of %d bytes", c.Length)
	}
	c, got = p.one(ring.Submission{Op: ring.OpGetRange, Word: 2, Length: 100}, "a", "")
	if p.want("range", c, ring.Yes, ring.OK); string(got[:c.Length]) != "her" {
		t.Errorf("%q", got[:c.Length])
	}
	c, _ = p.one(ring.Submission{Op: ring.OpTouch, TTL: 60_000}, "a", "")
	p.want("touch", c, ring.Yes, ring.OK)
	version = c.Version
	c, _ = p.one(ring.Submission{Op: ring.OpExists}, "a", "")
	if c.Expires < uint64(time.Now().UnixMilli()) || c.Version != version || version == 0 {
		t.Errorf("it expires at %d, version %d, want %d", c.Expires, c.Version, version)
	}
	c, _ = p.one(ring.Submission{Op: ring.OpPut, Flags: ring.FlagIfPresent, Length: 1}, "absent", "x")
	p.want("put if present of nothing", c, ring.No, ring.Condition)
	c, got = p.one(ring.Submission{Op: ring.OpIncr, Word: uint64(1<<64 - 3)}, "n", "")
	if p.want("incr", c, ring.Yes, ring.OK); string(got[:c.Length]) != "-3" || c.Version == 0 {
		t.Errorf("%q", got[:c.Length])
	}
	c, _ = p.one(ring.Submission{Op: ring.OpIncr, Word: 1}, "a", "")
	p.want("incr of a text", c, ring.No, ring.WrongType)
	c, _ = p.one(ring.Submission{Op: ring.OpDelete}, "a", "")
	p.want("delete", c, ring.Yes, ring.OK)
	c, _ = p.one(ring.Submission{Op: ring.OpDelete}, "a", "")
	p.want("delete again", c, ring.No, ring.NotFound)

	r := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{0, 1, 1025, 8 << 10, 100_000, 3 << 20} {
		value := make([]byte, n)
		for i := range value {
			value[i] = byte(r.Uint32())
		}
		copy(p.arena, value)
		s := ring.Submission{Op: ring.OpPut, Memory: p.welcome.Arena, Length: uint64(n), ValueFlags: 9}
		c, _ = p.one(s, "long", "")
		p.want(fmt.Sprint("put of ", n), c, ring.Yes, ring.OK)
		clear(p.arena[4<<20:])
		s = ring.Submission{Op: ring.OpGet, Memory: p.welcome.Arena, Offset: 4<<20 + 8, Length: uint64(n)}
		c, _ = p.one(s, "long", "")
		p.want(fmt.Sprint("get of ", n), c, ring.Yes, ring.OK)
		if !bytes.Equal(p.arena[4<<20+8:][:n], value) || c.Length != uint64(n) || c.ValueFlags != 9 {
			t.Errorf("%d bytes: another value, of %d bytes, flags %d", n, c.Length, c.ValueFlags)
		}
		if rest := p.arena[4<<20+8+n:]; !bytes.Equal(rest, make([]byte, len(rest))) {
			t.Errorf("%d bytes: bytes behind the value are others", n)
		}
	}
	c, _ = p.one(ring.Submission{Op: ring.OpGet, Memory: p.welcome.Arena, Length: 1 << 20}, "long", "")
	if p.want("get of a long value", c, ring.No, ring.ShortBuffer); c.Length != 3<<20 {
		t.Errorf("the value has %d bytes", c.Length)
	}
	c, _ = p.one(ring.Submission{Op: ring.OpPut, Length: 1, Timeout: 5000}, "with its time", "x")
	p.want("put with a timeout", c, ring.Yes, ring.OK)
	if n, _ := w.c["other"].Count(t.Context()); n != 0 {
		t.Errorf("the other tenant has %d keys", n)
	}
}

// TestBatches: what is queued at once shares round trips, and each operation has its own verdict.
func TestBatches(t *testing.T) {
	w := newWorld(t, nil)
	p := w.open(t, "default", 1<<20, ring.Hello{Depth: 64})
	for i := range 32 {
		p.start(ring.Submission{Op: ring.OpPut, Length: 4}, fmt.Sprint("k", i), fmt.Sprintf("v%03d", i))
	}
	p.publish()
	p.wait(32)
	before := w.b.tenants[0].stats.Batches.Load()
	first := p.tag
	for i := range 64 { // half of them are not there
		p.start(ring.Submission{Op: ring.OpGet, Length: 100}, fmt.Sprint("k", i), "")
	}
	p.publish()
	got := p.wait(64)
	for i := range 64 {
		c := got[first+uint32(i)]
		if i >= 32 {
			p.want("a key that is not there", c, ring.No, ring.NotFound)
		} else if p.want("a key", c, ring.Yes, ring.OK); string(p.Slot(c.Tag)[:c.Length]) != fmt.Sprintf("v%03d", i) {
			t.Errorf("key %d: %q", i, p.Slot(c.Tag)[:c.Length])
		}
	}
	if n := w.b.tenants[0].stats.Batches.Load() - before; n != 1 {
		t.Errorf("64 operations were performed in %d groups", n)
	}
}

// TestScans: a scan gives all keys, however little fits into a call; its cursors are the connection's and bounded.
func TestScans(t *testing.T) {
	w := newWorld(t, nil)
	p := w.open(t, "default", 1<<20, ring.Hello{})
	const n = 500
	for i := range n {
		for _, prefix := range []string{"a:", "b:"} {
			key := prefix + strings.Repeat("x", i%200) + fmt.Sprint(i)
			if _, err := w.c["default"].Put(t.Context(), []byte(key), []byte("v"), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	seen, cursor, calls := map[string]bool{}, uint64(0), 0
	for first := true; first || cursor != 0; first = false {
		c, _ := p.one(ring.Submission{Op: ring.OpScan, Memory: p.welcome.Arena, Length: 4096, Word: cursor}, "a:", "")
		p.want("scan", c, ring.Yes, ring.OK)
		cursor = c.Version
		calls++
		for b := p.arena[:c.Length]; len(b) > 0; {
			k := int(binary.LittleEndian.Uint16(b))
			seen[string(b[2:2+k])] = true
			b = b[2+k:]
		}
	}
	if len(seen) != n || calls < 10 {
		t.Errorf("%d of %d keys in %d calls", len(seen), n, calls)
	}
	c, _ := p.one(ring.Submission{Op: ring.OpScan, Memory: p.welcome.Arena, Length: 4096, Word: 77}, "a:", "")
	p.want("scan from nowhere", c, ring.No, ring.Stale)
	var cursors []uint64
	for range maxScans + 1 {
		c, _ := p.one(ring.Submission{Op: ring.OpScan, Memory: p.welcome.Arena, Length: 4096}, "a:", "")
		cursors = append(cursors, c.Version)
	}
	c, _ = p.one(ring.Submission{Op: ring.OpScan, Memory: p.welcome.Arena, Length: 4096, Word: cursors[0]}, "a:", "")
	p.want("the oldest of many scans", c, ring.No, ring.Stale)
	c, _ = p.one(ring.Submission{Op: ring.OpScan, Memory: p.welcome.Arena, Length: 4096, Word: cursors[1]}, "a:", "")
	p.want("the next of many scans", c, ring.Yes, ring.OK)
	c, _ = p.one(ring.Submission{Op: ring.OpDeletePrefix}, "a:", "")
	if p.want("delete by prefix", c, ring.Yes, ring.OK); c.Version != n {
		t.Errorf("%d of %d keys were deleted", c.Version, n)
	}
	if left, err := w.c["default"].Count(t.Context()); left != n || err != nil {
		t.Errorf("%d keys are left, want %d: %v", left, n, err)
	}
}

// TestBadSubmissions: what makes no sense is refused, and the connection goes on.
func TestBadSubmissions(t *testing.T) {
	w := newWorld(t, nil)
	p := w.open(t, "default", 1<<20, ring.Hello{})
	arena := p.welcome.Arena
	for what, s := range map[string]ring.Submission{
		"no key":                      {Op: ring.OpGet},
		"two conditions":              {Op: ring.OpPut, Flags: ring.FlagIfAbsent | ring.FlagIfPresent},
		"a condition of a GET":        {Op: ring.OpGet, Flags: ring.FlagIfVersion},
		"flags that nobody knows":     {Op: ring.OpPut, Flags: 1 << 7},
		"a value beyond its slot":     {Op: ring.OpPut, Length: ring.SlotSize},
		"memory that is not there":    {Op: ring.OpGet, Memory: arena + 1, Length: 1},
		"behind the arena":            {Op: ring.OpGet, Memory: arena, Offset: 1 << 20, Length: 1},
		"over the arena's end":        {Op: ring.OpPut, Memory: arena, Offset: 1<<20 - 1, Length: 2},
		"an offset that wraps":        {Op: ring.OpPut, Memory: arena, Offset: 1<<64 - 1, Length: 2},
		"a length that wraps":         {Op: ring.OpGet, Memory: arena, Offset: 2, Length: 1<<64 - 1},
		"a scan with too little room": {Op: ring.OpScan, Memory: arena, Length: 100},
		"a range beyond all":          {Op: ring.OpGetRange, Word: 1 << 63, Length: 1},
		"a pin for no time":           {Op: ring.OpPin},
		"a pin for too long":          {Op: ring.OpPin, TTL: ring.MaxPin + 1},
		"a pin for ever":              {Op: ring.OpPin, TTL: 1<<64 - 1},
	} {
		key := "key"
		if what == "no key" {
			key = ""
		}
		c, _ := p.one(s, key, "")
		if p.want(what, c, ring.No, ring.Argument); p.text(c) == "" {
			t.Errorf("%s: no text", what)
		}
	}
	for _, op := range []ring.Op{0, ring.OpView, ring.OpNop + 1, 255} {
		c, _ := p.one(ring.Submission{Op: op}, "key", "")
		p.want(fmt.Sprint("operation ", op), c, ring.No, ring.Unsupported)
	}
	s := ring.Submission{Op: ring.OpGet, Length: 1}
	tag := p.start(s, "key", "")
	// A key that is longer than a slot.
	at := 4096 + int(tag&(p.Depth()-1))*ring.EntrySize
	binary.LittleEndian.PutUint16(p.mem[at+2:], 2000)
	p.publish()
	c := p.wait(1)[tag]
	p.want("a long key", c, ring.No, ring.Argument)
	c, _ = p.one(ring.Submission{Op: ring.OpNop}, "", "")
	p.want("nothing", c, ring.Yes, ring.OK)
}

// TestDoor: who may not connect is told why, and nothing is left of him.
func TestDoor(t *testing.T) {
	files := openFiles(t)
	t.Run("door", func(t *testing.T) {
		w := newWorld(t, func(s *Socket) {
			s.Limits.Clients = 2
			s.Limits.ArenaBytes = 1 << 20
			if s.Name == "other" {
				s.Secret = "word"
			}
		})
		hello := func(socket string, h ring.Hello, files func(p *program) []int) *program {
			p := w.dial(t, socket)
			p.send(h.Message(3), files(p)...)
			return p
		}
		self := func(p *program) []int { return []int{p.self()} }
		say := func(what, socket string, h ring.Hello, files func(p *program) []int, code ring.Code) {
			t.Helper()
			p := hello(socket, h, files)
			p.refusal(what, code)
			p.ended(what)
			p.close()
		}
		say("another namespace", "default", ring.Hello{Namespace: "other"}, self, ring.Denied)
		say("no secret", "other", ring.Hello{}, self, ring.Denied)
		say("another secret", "other", ring.Hello{Secret: "wor"}, self, ring.Denied)
		say("no pidfd", "default", ring.Hello{}, func(p *program) []int {
			return []int{p.makeArena(4096, 0)}
		}, ring.Argument)
		say("no files", "default", ring.Hello{}, func(*program) []int { return nil }, ring.Protocol)
		arena := ring.Hello{ArenaBytes: 8192}
		say("no arena", "default", arena, self, ring.Protocol)
		say("an arena without a seal", "default", arena, func(p *program) []int {
			return []int{p.self(), p.makeArena(8192, 0)}
		}, ring.Argument)
		say("a short arena", "default", arena, func(p *program) []int {
			return []int{p.self(), p.makeArena(4096, unix.F_SEAL_SHRINK)}
		}, ring.Argument)
		say("no memfd", "default", arena, func(p *program) []int {
			f, err := os.Open(os.Args[0])
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = f.Close() })
			return []int{p.self(), int(f.Fd())}
		}, ring.Argument)
		say("too large an arena", "default", ring.Hello{ArenaBytes: 2 << 20}, func(p *program) []int {
			return []int{p.self(), p.makeArena(2<<20, unix.F_SEAL_SHRINK)}
		}, ring.Busy)
		say("too many files", "default", arena, func(p *program) []int {
			one := p.self()
			return []int{one, one, one, one, one, one, one, one}
		}, ring.Protocol)
		for what, b := range map[string][]byte{
			"garbage":      []byte("GET / HTTP/1.1\r\n\r\n"),
			"a bye":        ring.Bare(ring.Head{Kind: ring.KindBye}),
			"half a hello": (&ring.Hello{}).Message(1)[:20],
		} {
			p := w.dial(t, "default")
			p.send(b)
			p.refusal(what, ring.Protocol)
			p.ended(what)
			p.close()
		}
		p := w.dial(t, "default")
		p.refusal("silence", ring.Timeout)
		p.ended("silence")
		p.close()
		testutil.UntilNone(t, "programs that were refused", func() int64 { return w.b.tenants[0].stats.Clients.Load() })
		one, two := w.open(t, "default", 4096, ring.Hello{}), w.open(t, "default", 0, ring.Hello{})
		p = w.dial(t, "default")
		p.send((&ring.Hello{}).Message(1), p.self())
		p.refusal("one too many", ring.Busy)
		p.ended("one too many")
		p.close()
		if all := w.b.Clients(); len(all) != 2 || all[0].Namespace != "default" || all[0].PID != int32(os.Getpid()) {
			t.Errorf("%+v", all)
		}
		one.close()
		two.close()
		testutil.UntilNone(t, "programs that have gone", func() int64 { return w.b.tenants[0].stats.Clients.Load() })
		with := w.open(t, "other", 0, ring.Hello{Secret: "word"})
		with.close()
		for _, t2 := range w.b.tenants {
			testutil.UntilNone(t, "bytes of arenas", func() int64 { return t2.stats.ArenaBytes.Load() })
		}
	})
	testutil.UntilNone(t, "files that are open", func() int { return openFiles(t) - files })
}

func openFiles(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestMemories: memory is handed over and taken back, while operations are under way there, and is bounded.
func TestMemories(t *testing.T) {
	w := newWorld(t, func(s *Socket) { s.Limits.ArenaBytes = 4 << 20 })
	p := w.open(t, "default", 1<<20, ring.Hello{})
	fd := p.makeArena(1<<20, unix.F_SEAL_SHRINK)
	p.send((&ring.Register{Offset: 5000, Length: 100_000}).Message(5), fd)
	h, body, _, err := p.hear()
	number, nerr := ring.ParseNumbered(body)
	if err != nil || nerr != nil || h.Kind != ring.KindDone || h.Serial != 5 || number == p.welcome.Arena {
		t.Fatalf("%+v, memory %d, %v, %v", h, number, err, nerr)
	}
	if _, err := unix.Pwrite(fd, []byte("registered"), 5000+99_990); err != nil {
		t.Fatal(err)
	}
	c, _ := p.one(ring.Submission{Op: ring.OpPut, Memory: number, Offset: 99_990, Length: 10}, "k", "")
	p.want("put from registered memory", c, ring.Yes, ring.OK)
	if it, err := w.c["default"].Get(t.Context(), []byte("k")); string(it.Value) != "registered" || err != nil {
		t.Errorf("%q, %v", it.Value, err)
	}
	p.send(ring.Numbered(ring.Head{Kind: ring.KindDeregister, Serial: 6}, number))
	if h, _, _, err := p.hear(); err != nil || h.Kind != ring.KindDone || h.Serial != 6 {
		t.Fatalf("%+v, %v", h, err)
	}
	c, _ = p.one(ring.Submission{Op: ring.OpGet, Memory: number, Length: 10}, "k", "")
	p.want("get into memory that was taken back", c, ring.No, ring.Argument)
	p.send(ring.Numbered(ring.Head{Kind: ring.KindDeregister, Serial: 7}, number))
	p.refusal("taken back twice", ring.Argument)
	p.send((&ring.Register{Offset: 0, Length: 1 << 20}).Message(8), p.makeArena(1<<20, 0))
	p.refusal("no seal", ring.Argument)
	p.send((&ring.Register{Offset: 0, Length: 8 << 20}).Message(9), p.makeArena(8<<20, unix.F_SEAL_SHRINK))
	p.refusal("too much", ring.Busy)
	big := p.makeArena(3<<20, unix.F_SEAL_SHRINK)
	p.send((&ring.Register{Offset: 0, Length: 3 << 20}).Message(10), big)
	if h, _, _, err := p.hear(); err != nil || h.Kind != ring.KindDone {
		t.Errorf("the rest of what there is: %+v, %v", h, err)
	}
	p.send((&ring.Register{Offset: 0, Length: 4096}).Message(11), big)
	p.refusal("a page more than there is", ring.Busy)
	c, _ = p.one(ring.Submission{Op: ring.OpGet, Length: 100}, "k", "")
	p.want("the connection goes on", c, ring.Yes, ring.OK)
	p.close()
	testutil.UntilNone(t, "bytes of arenas", func() int64 { return w.b.tenants[0].stats.ArenaBytes.Load() })
}

// TestQueues: a connection has eight queues, which are served side by side.
func TestQueues(t *testing.T) {
	w := newWorld(t, nil)
	p := w.open(t, "default", 0, ring.Hello{Depth: ring.MinDepth})
	all := []*program{p}
	for i := 1; i < ring.MaxQueues; i++ {
		p.send(ring.Bare(ring.Head{Kind: ring.KindQueue, Serial: uint32(i)}))
		h, body, files, err := p.hear()
		if err != nil || h.Kind != ring.KindQueued || len(files) != ring.FilesOfQueue {
			t.Fatalf("%+v, %q, %v", h, body, err)
		}
		q := &program{t: t, nc: p.nc}
		q.attach(files)
		all = append(all, q)
	}
	p.send(ring.Bare(ring.Head{Kind: ring.KindQueue, Serial: 99}))
	p.refusal("one queue too many", ring.Busy)
	done := make(chan error)
	for i, q := range all {
		go func() {
			for n := range 200 {
				key := fmt.Sprint(i, ":", n%10)
				c, _ := q.one(ring.Submission{Op: ring.OpPut, Length: 1}, key, "x")
				if c.Code != ring.OK {
					done <- fmt.Errorf("queue %d: %+v", i, c)
					return
				}
			}
			done <- nil
		}()
	}
	for range all {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if n := w.b.tenants[0].stats.Queues.Load(); n != ring.MaxQueues {
		t.Errorf("%d queues", n)
	}
}

// TestBroken: a program that breaks a ring's rules is disconnected, and nothing of it is left.
func TestBroken(t *testing.T) {
	goroutines := runtime.NumGoroutine()
	t.Run("broken", func(t *testing.T) {
		w := newWorld(t, nil)
		for what, change := range map[string]func(p *program){
			"a tail too far ahead": func(p *program) { binary.LittleEndian.PutUint32(p.mem[64:], 1<<20) },
			"a slot twice": func(p *program) {
				p.start(ring.Submission{Op: ring.OpNop}, "", "")
				p.start(ring.Submission{Op: ring.OpNop}, "", "")
				copy(p.mem[4096+ring.EntrySize:][:ring.EntrySize], p.mem[4096:])
				p.Publish()
			},
			"a message of no kind": func(p *program) { p.send(ring.Bare(ring.Head{Kind: 33})) },
			"files that nobody wants": func(p *program) {
				p.send(ring.Bare(ring.Head{Kind: ring.KindQueue}), p.self())
			},
		} {
			p := w.open(t, "default", 1<<20, ring.Hello{})
			change(p)
			_, _ = unix.Write(p.queue[1], binary.NativeEndian.AppendUint64(nil, 1))
			if strings.Contains(what, "message") || strings.Contains(what, "files") {
				p.refusal(what, ring.Protocol)
			}
			p.ended(what)
			p.close()
		}
		testutil.UntilNone(t, "programs", func() int64 { return w.b.tenants[0].stats.Clients.Load() })
		if n := w.b.tenants[0].stats.Broken.Load(); n != 4 {
			t.Errorf("%d programs broke the protocol, want 4", n)
		}
		if n := w.b.tenants[0].stats.ArenaBytes.Load(); n != 0 {
			t.Errorf("%d bytes of arenas are left", n)
		}
		// An eventfd that is full and blocks, and a queue that nobody wakes, do not keep a connection.
		p := w.open(t, "default", 0, ring.Hello{})
		for _, fd := range p.queue[1:] {
			if err := unix.SetNonblock(fd, false); err != nil {
				t.Fatal(err)
			}
		}
		_, _ = unix.Write(p.queue[2], binary.NativeEndian.AppendUint64(nil, 1<<64-2))
		p.Idle() // the broker is to wake it
		p.start(ring.Submission{Op: ring.OpNop}, "", "")
		p.publish()
		p.close()
		testutil.UntilNone(t, "programs", func() int64 { return w.b.tenants[0].stats.Clients.Load() })
	})
	testutil.Until(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= goroutines })
}
