package broker

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// looker is a program that views, as libkvd does.
type looker struct {
	*program
	regions map[uint32][]byte
	gone    []uint32
}

// withViews lets the first tenant alone have views.
func withViews(change func(l *Limits)) func(s *Socket) {
	return func(s *Socket) {
		if s.Name == "default" {
			s.Limits.ViewBytes = 64 << 20
			if change != nil {
				change(&s.Limits)
			}
		}
	}
}

func (w *world) looker(t *testing.T) *looker {
	t.Helper()
	l := &looker{w.open(t, "default", 0, ring.Hello{}), map[uint32][]byte{}, nil}
	t.Cleanup(func() {
		for _, m := range l.regions {
			_ = unix.Munmap(m)
		}
	})
	return l
}

// told takes a message of a region, which must be there.
func (l *looker) told() ring.Kind {
	l.t.Helper()
	h, body, files, err := l.hear()
	if err != nil || h.Serial != 0 {
		l.t.Fatalf("%+v, %v", h, err)
	}
	if h.Kind == ring.KindRegionGone {
		n, err := ring.ParseNumbered(body)
		if l.regions[n] == nil || err != nil {
			l.t.Fatalf("region %d, which the program does not have, is gone: %v", n, err)
		}
		l.gone = append(l.gone, n)
		return h.Kind
	}
	r, err := ring.ParseRegion(body)
	var st unix.Stat_t
	if err != nil || h.Kind != ring.KindRegion || len(files) != 1 || l.regions[r.Region] != nil ||
		unix.Fstat(files[0], &st) != nil || uint64(st.Size) != r.Length || r.Offset != 0 ||
		checkSealed(files[0]) != nil {
		l.t.Fatalf("%+v: %+v, %d files, of %d bytes, %v", h, r, len(files), st.Size, err)
	}
	if m, err := unix.Mmap(files[0], 0, 4096, unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		l.t.Error("a region can be mapped for writing")
		_ = unix.Munmap(m)
	}
	if l.regions[r.Region], err = unix.Mmap(files[0], 0, int(r.Length), unix.PROT_READ, unix.MAP_SHARED); err != nil {
		l.t.Fatal(err)
	}
	return h.Kind
}

// see is what the program sees of a View.
func (l *looker) see(c ring.Completion, slot []byte) (got []byte) {
	l.t.Helper()
	l.want("view", c, ring.Yes, ring.OK)
	if l.regions[c.Region] == nil {
		l.told()
	}
	parts := []ring.Part{{Offset: c.Offset, Length: c.Length}}
	if c.Flags&ring.FlagChunked != 0 {
		var err error
		if parts, err = ring.ParseParts(slot, c.Length); err != nil || len(parts) < 2 || parts[0].Offset != c.Offset {
			l.t.Fatalf("%+v, %v", parts, err)
		}
	}
	for _, p := range parts {
		got = append(got, l.regions[c.Region][p.Offset:][:p.Length]...)
	}
	return got
}

func (l *looker) release(what string, number uint64, code ring.Code) {
	l.t.Helper()
	outcome := ring.No
	if code == ring.OK {
		outcome = ring.Yes
	}
	c, _ := l.one(ring.Submission{Op: ring.OpViewRelease, Word: number}, "", "")
	l.want(what, c, outcome, code)
}

// put stores a value of n bytes, and returns it.
func (w *world) put(t *testing.T, key string, n int) []byte {
	t.Helper()
	v := make([]byte, n)
	for i := range v {
		v[i] = byte(i*7 + i>>8 + n)
	}
	if _, err := w.c["default"].Put(t.Context(), []byte(key), v, client.PutOptions{Flags: 7}); err != nil {
		t.Fatal(err)
	}
	return v
}

// seen is how many Views the first tenant's programs have, and of how many bytes.
func (w *world) seen() [2]int64 {
	c := &w.b.tenants[0].stats
	return [2]int64{c.Views.Load(), c.ViewBytes.Load()}
}

// Programs look at values of all lengths in place, whatever happens to the keys meanwhile. Each of them gets a region
// once.
func TestViews(t *testing.T) {
	w := newWorld(t, withViews(nil))
	p, other := w.looker(t), w.looker(t)
	if p.welcome.ViewBytes != 64<<20 {
		t.Errorf("the broker says that views have %d bytes", p.welcome.ViewBytes)
	}
	for i, n := range []int{8 << 10, 100_000, 9 << 20} {
		key, number := fmt.Sprint("k", n), uint64(i+1)
		value := w.put(t, key, n)
		s := ring.Submission{Op: ring.OpView, Word: number, TTL: 10_000}
		c, slot := p.one(s, key, "")
		slot = bytes.Clone(slot)
		w.put(t, key, n/2) // another value
		if err := w.c["default"].Delete(t.Context(), []byte(key)); err != nil {
			t.Fatal(err)
		}
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		got := p.see(c, slot)
		if !bytes.Equal(got, value) || c.Version == 0 || c.ValueFlags != 7 || c.Expires != 0 ||
			c.ValidUntil < uint64(now.Nano()) || c.ValidUntil > uint64(now.Nano()+10e9) {
			t.Errorf("%d bytes: other bytes, of %+v at %d", n, c, now.Nano())
		}
		other.release("another program's view", number, ring.ViewExpired)
		if got := w.seen(); got != [2]int64{1, int64(n)} {
			t.Errorf("views: %v", got)
		}
		if all := w.b.Clients(); all[0].Views+all[1].Views != 1 {
			t.Errorf("%+v", all)
		}
		p.release("held", number, ring.OK)
		p.release("released", number, ring.ViewExpired)
	}
	w.put(t, "k", 100_000)
	c, slot := other.one(ring.Submission{Op: ring.OpView}, "k", "")
	other.see(c, slot)
	if got := w.seen(); len(p.regions) != 1 || len(other.regions) != 1 || got[0] != 1 {
		t.Errorf("%d and %d regions, views: %v", len(p.regions), len(other.regions), got)
	}
	for what, x := range map[string]struct {
		key  string
		s    ring.Submission
		code ring.Code
	}{
		"a number twice": {"k", ring.Submission{}, ring.Argument},
		"too long":       {"k", ring.Submission{TTL: 10_001, Word: 9}, ring.Argument},
		"flags":          {"k", ring.Submission{Flags: ring.FlagIfAbsent, Word: 9}, ring.Argument},
		"no key":         {"", ring.Submission{Word: 9}, ring.Argument},
		"absent":         {"none", ring.Submission{Word: 9}, ring.NotFound},
		"short":          {"short", ring.Submission{Word: 9}, ring.Unsupported},
		"empty":          {"empty", ring.Submission{Word: 9}, ring.Unsupported},
	} {
		w.put(t, "short", 100)
		w.put(t, "empty", 0)
		x.s.Op = ring.OpView
		c, _ := other.one(x.s, x.key, "")
		other.want(what, c, ring.No, x.code)
	}
	other.release("of the number 0", 0, ring.OK)
	if got := w.seen(); got != [2]int64{} {
		t.Errorf("views are left: %v", got)
	}
}

// The record under a View goes, and others want its memory: a View that held has shown the record's own bytes.
func TestViewsOfWhatIsGone(t *testing.T) {
	w := newWorld(t, withViews(nil))
	p := w.looker(t)
	const size = 100_000
	want := w.put(t, "k", size)
	c, slot := p.one(ring.Submission{Op: ring.OpView, Word: 1, TTL: 10_000}, "k", "")
	slot = bytes.Clone(slot)
	p.see(c, slot)
	for round := range 200 {
		w.put(t, "k", size-1-round)
		if err := w.c["default"].Delete(t.Context(), []byte("k")); err != nil {
			t.Fatal(err)
		}
	}
	got := bytes.Clone(p.see(c, slot))
	r, _ := p.one(ring.Submission{Op: ring.OpViewRelease, Word: 1}, "", "")
	if r.Code == ring.OK && !bytes.Equal(got, want) {
		t.Error("a view that held has shown other bytes")
	}
	if r.Code != ring.OK && r.Code != ring.ViewExpired {
		t.Errorf("the release ended with code %d", r.Code)
	}
	if got := w.seen(); got != [2]int64{} {
		t.Errorf("views are left: %v", got)
	}
}

// Views are bounded for each socket, by number and by bytes; a socket has none unless that is set.
func TestViewLimits(t *testing.T) {
	w := newWorld(t, withViews(func(l *Limits) { l.Views, l.ViewBytes = 3, 1<<20 }))
	w.put(t, "some", 10_000)
	w.put(t, "many", 600_000)
	for key, most := range map[string]int{"some": 3, "many": 1} {
		a, b := w.looker(t), w.looker(t)
		var got []*looker
		for i := range 5 {
			p := []*looker{a, b}[i%2]
			c, slot := p.one(ring.Submission{Op: ring.OpView, Word: uint64(i), TTL: 10_000}, key, "")
			if i < most {
				p.see(c, slot)
				got = append(got, p)
				continue
			}
			p.want("one more", c, ring.No, ring.Busy)
		}
		for i, p := range got {
			p.release("held", uint64(i), ring.OK)
		}
		if got := w.seen(); got != [2]int64{} {
			t.Errorf("views are left: %v", got)
		}
	}
	p := w.open(t, "other", 0, ring.Hello{})
	if _, err := w.c["other"].Put(t.Context(), []byte("k"), make([]byte, 10_000), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	c, _ := p.one(ring.Submission{Op: ring.OpView}, "k", "")
	if p.want("without views", c, ring.No, ring.Unsupported); p.welcome.ViewBytes != 0 {
		t.Errorf("the broker says that views have %d bytes", p.welcome.ViewBytes)
	}
}

// A View that is not released in time ends by itself, and its memory is taken back once no View is in there.
func TestViewsLapse(t *testing.T) {
	w := newWorld(t, withViews(func(l *Limits) { l.RegionTime = 5 * time.Millisecond }))
	p := w.looker(t)
	w.put(t, "k", 10_000)
	for round := range uint32(2) {
		c, slot := p.one(ring.Submission{Op: ring.OpView, Word: 1, TTL: 20}, "k", "")
		p.see(c, slot)
		testutil.UntilNone(t, "views that lapse", w.seen)
		p.release("late", 1, ring.ViewExpired)
		if k := p.told(); k != ring.KindRegionGone || c.Region != round+1 || p.gone[round] != c.Region {
			t.Errorf("message %d: region %d, gone %v", k, c.Region, p.gone)
		}
	}
	if n := w.b.tenants[0].stats.Lapsed.Load(); n != 2 {
		t.Errorf("%d views have lapsed, want 2", n)
	}
}

// A View that the store has ended did not hold.
func TestViewsExpire(t *testing.T) {
	w := newWorld(t, withViews(nil))
	p := w.looker(t)
	w.put(t, "k", 10_000)
	c, slot := p.one(ring.Submission{Op: ring.OpView, Word: 1, TTL: 10_000}, "k", "")
	p.see(c, slot)
	if err := w.c["default"].Close(); err != nil {
		t.Fatal(err)
	}
	p.release("without its session", 1, ring.ViewExpired)
	c, _ = p.one(ring.Submission{Op: ring.OpView, Word: 1}, "k", "")
	p.want("of no store", c, ring.No, ring.Unavailable)
	if got := w.seen(); got != [2]int64{} {
		t.Errorf("views are left: %v", got)
	}
}

// Views end with their connection, however that ends, and with the broker.
func TestViewsEnd(t *testing.T) {
	w := newWorld(t, withViews(nil))
	w.put(t, "k", 10_000)
	for what, end := range map[string]func(p *looker){
		"gone":    func(p *looker) { _ = p.nc.Close() },
		"bye":     func(p *looker) { p.send(ring.Bare(ring.Head{Kind: ring.KindBye, Serial: 2})) },
		"message": func(p *looker) { p.send(ring.Bare(ring.Head{Kind: 7, Serial: 2})) },
		"ring":    func(p *looker) { p.mem[65] += 2; _, _ = unix.Write(p.queue[1], []byte{1, 0, 0, 0, 0, 0, 0, 0}) },
	} {
		p := w.looker(t)
		for i := range 3 {
			c, slot := p.one(ring.Submission{Op: ring.OpView, Word: uint64(i), TTL: 10_000}, "k", "")
			p.see(c, slot)
		}
		end(p)
		testutil.UntilNone(t, what+": views", w.seen)
		testutil.UntilNone(t, what+": programs", w.b.tenants[0].stats.Clients.Load)
	}
	p := w.looker(t)
	c, slot := p.one(ring.Submission{Op: ring.OpView, TTL: 10_000}, "k", "")
	p.see(c, slot)
	if err := w.b.Close(); err != nil || w.seen() != [2]int64{} {
		t.Errorf("closed: %v, views: %v", err, w.seen())
	}
}
