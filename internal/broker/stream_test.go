package broker

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// begin begins a stream, and returns its number.
func (p *program) begin(key string, size int, s ring.Submission) uint64 {
	p.t.Helper()
	s.Op, s.Length = ring.OpPutBegin, uint64(size)
	c, _ := p.one(s, key, "")
	p.want("a stream's beginning", c, ring.Yes, ring.OK)
	return c.Version
}

// append gives a stream what fits into the arena.
func (p *program) append(stream uint64, b []byte) ring.Completion {
	p.t.Helper()
	c, _ := p.one(ring.Submission{Op: ring.OpPutAppend, Word: stream, Memory: p.welcome.Arena,
		Length: uint64(copy(p.arena, b))}, "", "")
	clear(p.arena[:len(b)])
	return c
}

// ends does the last operation on a stream.
func (p *program) ends(op ring.Op, stream uint64) ring.Completion {
	p.t.Helper()
	c, _ := p.one(ring.Submission{Op: op, Word: stream}, "", "")
	return c
}

// units is the memory of the store that the first tenant has, and what is on its way back.
func (w *world) units() uint64 {
	s := w.c["default"].Stats()
	return uint64(s.LiveUnits + s.LimboUnits)
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>12)
	}
	return b
}

// TestStream: values of any length come piece by piece, through the arena and through slots. Nobody sees them before
// the commit.
func TestStream(t *testing.T) {
	w := newWorld(t, nil)
	const arena = 1 << 20
	p := w.open(t, "default", arena, ring.Hello{})
	ctx, c := t.Context(), w.c["default"]
	if _, err := c.Put(ctx, []byte("k"), []byte("old"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{0, 1000, 5000, 3 << 20, 20<<20 + 3} {
		want := pattern(size)
		n := p.begin("k", size, ring.Submission{ValueFlags: 7, TTL: 3_600_000})
		for at := 0; at < size; {
			if size == 1000 {
				got, _ := p.one(ring.Submission{Op: ring.OpPutAppend, Word: n, Length: 500}, "",
					string(want[at:at+500]))
				p.want("500 bytes by the slot", got, ring.Yes, ring.OK)
				at += 500
				continue
			}
			some := min(size-at, arena)
			p.want(fmt.Sprint("bytes from ", at), p.append(n, want[at:at+some]), ring.Yes, ring.OK)
			at += some
		}
		if it, err := c.Get(ctx, []byte("k")); err != nil || len(it.Value) == size && size > 0 {
			t.Errorf("before the commit there are %d bytes, %v", len(it.Value), err)
		}
		p.want("one byte too many", p.append(n, []byte("x")), ring.No, ring.Argument)
		x := p.ends(ring.OpPutCommit, n)
		p.want("commit", x, ring.Yes, ring.OK)
		it, err := c.Get(ctx, []byte("k"))
		if err != nil || !bytes.Equal(it.Value, want) || it.Version != x.Version || it.Flags != 7 ||
			it.Expires.Before(time.Now()) {
			t.Errorf("%d bytes, %d of version %d, want %d of %d, expires %v: %v", size, len(it.Value), it.Version,
				size, x.Version, it.Expires, err)
		}
		p.want("commit again", p.ends(ring.OpPutCommit, n), ring.No, ring.Stale)
		if _, err := c.Put(ctx, []byte("k"), []byte("old"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestStreamRefused: streams are bounded, and what makes no sense leaves a stream as it was.
func TestStreamRefused(t *testing.T) {
	w := newWorld(t, nil)
	p := w.open(t, "default", 1<<20, ring.Hello{})
	for _, op := range []ring.Op{ring.OpPutAppend, ring.OpPutCommit, ring.OpPutAbort} {
		p.want(fmt.Sprint(op, " of no stream"), p.ends(op, 1), ring.No, ring.Stale)
	}
	long := ring.Submission{Op: ring.OpPutBegin, Length: uint64(w.c["default"].MaxValueLen()) + 1}
	c, _ := p.one(long, "k", "")
	p.want("a value that is too long", c, ring.No, ring.TooLarge)
	long.Length = 1<<64 - 1
	c, _ = p.one(long, "k", "")
	p.want("a value that nobody has", c, ring.No, ring.TooLarge)
	var all []uint64
	for range maxStreams {
		all = append(all, p.begin("k", 10, ring.Submission{}))
	}
	c, _ = p.one(ring.Submission{Op: ring.OpPutBegin, Length: 1}, "k", "")
	p.want("one stream too many", c, ring.No, ring.Busy)
	p.want("four bytes", p.append(all[0], []byte("four")), ring.Yes, ring.OK)
	p.want("seven of six", p.append(all[0], []byte("seven b")), ring.No, ring.Argument)
	p.want("an early commit", p.ends(ring.OpPutCommit, all[0]), ring.No, ring.Argument)
	p.want("none", p.append(all[0], nil), ring.Yes, ring.OK)
	p.want("the rest", p.append(all[0], []byte("twenty")), ring.Yes, ring.OK)
	p.want("a commit", p.ends(ring.OpPutCommit, all[0]), ring.Yes, ring.OK)
	if it, err := w.c["default"].Get(t.Context(), []byte("k")); string(it.Value) != "fourtwenty" || err != nil {
		t.Errorf("%q, %v", it.Value, err)
	}
	p.want("the end of another", p.ends(ring.OpPutAbort, all[1]), ring.Yes, ring.OK)
	for range 2 {
		p.begin("k", 10, ring.Submission{})
	}
	for range maxSocketStreams/maxStreams - 1 {
		q := w.open(t, "default", 0, ring.Hello{})
		for range maxStreams {
			q.begin("k", 10, ring.Submission{})
		}
	}
	q := w.open(t, "default", 0, ring.Hello{})
	c, _ = q.one(ring.Submission{Op: ring.OpPutBegin, Length: 1}, "k", "")
	q.want("more than the socket's", c, ring.No, ring.Busy)
	// The others have theirs until they go.
	p.close()
	testutil.Until(t, "a stream of those that went", func() bool {
		c, _ = q.one(ring.Submission{Op: ring.OpPutBegin, Length: 1}, "k", "")
		return c.Code == ring.OK
	})
}

// TestStreamEnds: a stream whose program gives it up, dies or says good-bye stores nothing. The store has its memory
// again, and another program may have a stream.
func TestStreamEnds(t *testing.T) {
	w := newWorld(t, nil)
	before := w.before(t)
	units := w.units()
	const size = 24 << 20
	piece := pattern(1 << 20)
	for what, end := range map[string]func(p *program, n uint64){
		"given up": func(p *program, n uint64) { p.want("abort", p.ends(ring.OpPutAbort, n), ring.Yes, ring.OK) },
		"dead":     func(*program, uint64) {},
		"good-bye": func(p *program, _ uint64) { p.send(ring.Bare(ring.Head{Kind: ring.KindBye})) },
	} {
		p := w.open(t, "default", 1<<20, ring.Hello{})
		n := p.begin("never", size, ring.Submission{})
		for at := 0; at < size; at += len(piece) {
			p.want(what, p.append(n, piece), ring.Yes, ring.OK)
		}
		if w.units() <= units {
			t.Errorf("%s: the store has %d units in use, and had %d without the value", what, w.units(), units)
		}
		end(p, n)
		if what == "good-bye" {
			p.ended(what)
		}
		p.close()
		w.none(t, before)
		testutil.UntilNone(t, what+": units", func() uint64 { return w.units() - units })
		if n := len(w.b.tenants[0].streams); n != 0 {
			t.Errorf("%s: %d streams", what, n)
		}
		if _, err := w.c["default"].Get(t.Context(), []byte("never")); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestStreamStill: a stream has a time. When it is over the store has its memory again, and the program hears of it.
func TestStreamStill(t *testing.T) {
	w := newWorld(t, func(s *Socket) { s.Limits.LongTimeout = time.Second })
	w.before(t)
	units := w.units()
	p := w.open(t, "default", 1<<20, ring.Hello{})
	c, _ := p.one(ring.Submission{Op: ring.OpPutBegin, Length: 24 << 20}, "never", "")
	n := c.Version
	if p.want("a stream's beginning", c, ring.Yes, ring.OK); t.Failed() {
		return
	}
	for range 24 { // until the memory of the first pieces is taken, if there is the time for it
		if c = p.append(n, pattern(1<<20)); c.Code != ring.OK {
			break
		}
	}
	testutil.UntilNone(t, "streams", func() int { return len(w.b.tenants[0].streams) })
	testutil.UntilNone(t, "units", func() uint64 { return w.units() - units })
	if c.Code == ring.OK {
		c = p.ends(ring.OpPutCommit, n)
	}
	if p.want("a stream that stood still", c, ring.No, ring.Timeout); p.text(c) == "" {
		t.Error("no text")
	}
	p.want("again", p.ends(ring.OpPutCommit, n), ring.No, ring.Stale)
	p.want("another", p.ends(ring.OpPutAbort, p.begin("k", 1, ring.Submission{})), ring.Yes, ring.OK)
}

// TestStreamCancelled: a piece that nobody reads ends with its time, and the stream with it.
func TestStreamCancelled(t *testing.T) {
	w := newWorld(t, nil)
	p := w.open(t, "default", 1<<20, ring.Hello{})
	s := &stream{number: 1, left: 100, pieces: make(chan []byte), taken: make(chan struct{}, 1),
		done: make(chan struct{})}
	var conn *conn
	w.b.tenants[0].mu.Lock()
	for conn = range w.b.tenants[0].mu.conns {
	}
	w.b.tenants[0].mu.Unlock()
	var once sync.Once
	s.cancel = func(cause error) {
		once.Do(func() {
			s.err = fmt.Errorf("it was ended: %w", cause)
			close(s.done)
		})
	}
	conn.mu.Lock()
	conn.mu.streams = streams{open: 1, last: 1, idle: map[uint64]*stream{1: s}}
	conn.mu.Unlock()
	c, _ := p.one(ring.Submission{Op: ring.OpPutAppend, Word: 1, Length: 10, Timeout: 20}, "", "0123456789")
	p.want("a piece", c, ring.No, ring.Timeout)
	p.want("the next", p.append(1, []byte("x")), ring.No, ring.Stale)
}
