package broker

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestExists: questions that are queued at once are one Do, read no value, and tell what there is. The length comes if
// it is asked for.
func TestExists(t *testing.T) {
	const n = 64
	w := newWorld(t, nil)
	p := w.open(t, "default", 0, ring.Hello{Depth: n})
	c, _ := p.one(ring.Submission{Op: ring.OpPut, Length: 5, TTL: 60_000}, "k", "hello")
	p.want("put", c, ring.Yes, ring.OK)
	version := c.Version
	batches, before, first := w.b.tenants[0].stats.Batches.Load(), w.c["default"].Stats(), p.tag
	for i := range uint32(n) {
		p.start(ring.Submission{Op: ring.OpExists, Word: ring.WithoutLength}, "k"+strings.Repeat("x", int(i%2)), "")
	}
	p.publish()
	for tag, c := range p.wait(n) {
		if there := (tag-first)%2 == 0; !there {
			p.want("a key that is not there", c, ring.No, ring.NotFound)
		} else if p.want("a key", c, ring.Yes, ring.OK); c.Length != 0 || c.Version != version ||
			c.Expires < uint64(time.Now().UnixMilli()) {
			t.Errorf("%+v, want version %d", c, version)
		}
	}
	if k := w.b.tenants[0].stats.Batches.Load() - batches; k != 1 {
		t.Errorf("%d questions were asked in %d groups", n, k)
	}
	after := w.c["default"].Stats()
	if after.Ops["exists"]-before.Ops["exists"] != n || after.Ops["get"] != before.Ops["get"] {
		t.Errorf("%d questions were %d of the client's, and %d GETs", n, after.Ops["exists"]-before.Ops["exists"],
			after.Ops["get"]-before.Ops["get"])
	}
	// Beside them are one with a timeout of its own, and one that asks for the length.
	alone := p.start(ring.Submission{Op: ring.OpExists, Word: ring.WithoutLength}, "k", "")
	other := p.start(ring.Submission{Op: ring.OpExists, Word: ring.WithoutLength, Timeout: 30_000}, "k", "")
	long := p.start(ring.Submission{Op: ring.OpExists}, "k", "")
	p.publish()
	got := p.wait(3)
	for tag, length := range map[uint32]uint64{alone: 0, other: 0, long: 5} {
		if c := got[tag]; c.Code != ring.OK || c.Length != length || c.Version != version {
			t.Errorf("%+v, want length %d, version %d", c, length, version)
		}
	}
}

// TestPins: a program pins and unpins keys of a cache that allows it, and as many as its socket may.
func TestPins(t *testing.T) {
	const limit = 8
	if ring.MaxPin*time.Millisecond != client.MaxPin {
		t.Errorf("programs pin for %v, and clients for %v", ring.MaxPin*time.Millisecond, client.MaxPin)
	}
	cache := devstore.Namespace{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, BytesPerNode: 16 << 20}
	w := newWorldOf(t, []devstore.Namespace{cache}, func(s *Socket) { s.Limits.Pins = limit }, nil)
	p := w.open(t, "cache", 0, ring.Hello{})
	c, _ := p.one(ring.Submission{Op: ring.OpPut, Length: 1}, "k", "v")
	p.want("put", c, ring.Yes, ring.OK)
	pin := ring.Submission{Op: ring.OpPin, TTL: ring.MaxPin}
	for range 2 * limit { // what was refused is no pin of the socket's
		c, _ = p.one(pin, "k", "")
		if p.want("pin", c, ring.No, ring.Unsupported); !strings.Contains(p.text(c), "--max-pinned") {
			t.Fatalf("%q", p.text(c))
		}
	}
	if _, err := w.st.DirectoryNodes()[0].SetNamespace(t.Context(), &dirpb.SetNamespaceRequest{Name: "cache",
		KeepLimit: true, MaxPinnedPercent: proto.Uint32(30)}); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the client knows that pins are allowed", func() bool {
		c, _ = p.one(pin, "k", "")
		return c.Code == ring.OK
	})
	for range 2 * limit {
		c, _ = p.one(pin, "none", "")
		p.want("pin of nothing", c, ring.No, ring.NotFound)
	}
	batches, first := w.b.tenants[0].stats.Batches.Load(), p.tag
	for i := range uint32(10) { // pins, questions and ends of pins share a Do
		p.start([]ring.Submission{{Op: ring.OpExists, Word: ring.WithoutLength}, pin, {Op: ring.OpUnpin}}[i%3], "k", "")
	}
	p.publish()
	for tag, c := range p.wait(10) {
		p.want(fmt.Sprint("entry ", tag-first), c, ring.Yes, ring.OK)
	}
	if n := w.b.tenants[0].stats.Batches.Load() - batches; n != 1 {
		t.Errorf("pins and questions were %d groups", n)
	}
	c, _ = p.one(ring.Submission{Op: ring.OpUnpin}, "none", "")
	p.want("unpin of nothing", c, ring.No, ring.NotFound)
	if n := w.c["cache"].Stats().Pins; n != 4 {
		t.Errorf("the client has pinned %d keys, want 4", n)
	}
	for i := range 2 * limit { // four of the limit are left, also after a disconnect: nobody keeps whose they are
		if i == 2 {
			p.close()
			p = w.open(t, "cache", 0, ring.Hello{})
		}
		c, _ = p.one(pin, "k", "")
		if i < limit-4 {
			p.want("pin within the limit", c, ring.Yes, ring.OK)
		} else if p.want("pin beyond the limit", c, ring.No, ring.Busy); p.text(c) == "" {
			t.Error("no text")
		}
	}
	c, _ = p.one(ring.Submission{Op: ring.OpUnpin}, "k", "")
	p.want("unpin at the limit", c, ring.Yes, ring.OK)
}

// TestPinsForgotten: pins count until their time is over, by a clock that may be set.
func TestPinsForgotten(t *testing.T) {
	var p pins
	now := time.Unix(1_000_000*60, 0)
	take := func(what string, at time.Time, lasts time.Duration, want bool) {
		t.Helper()
		if got := p.take(at, at.Add(lasts), 3); got != want {
			t.Errorf("%s: %v, with %d pins", what, got, p.n)
		}
	}
	take("a short one", now, time.Minute, true)
	take("a long one", now, time.Hour, true)
	take("the third", now, ring.MaxPin*time.Millisecond, true)
	take("the fourth", now, time.Minute, false)
	take("the fourth, as the first ends", now.Add(time.Minute), time.Minute, false)
	take("once the first is over", now.Add(2*time.Minute), time.Hour, true)
	p.giveBack(now.Add(time.Minute)) // is forgotten already
	take("with another given back too late", now.Add(2*time.Minute), time.Hour, false)
	p.giveBack(now.Add(time.Hour))
	take("with another given back", now.Add(2*time.Minute), time.Hour, true)
	take("by a clock that was set back", now.Add(-24*time.Hour), time.Hour, false)
	take("by a clock that was set far ahead", now.Add(1000*time.Hour), time.Hour, true)
	if p.n != 1 {
		t.Errorf("%d pins are left", p.n)
	}
	take("back", now, time.Hour, true)
	if p.n != 2 {
		t.Errorf("%d pins", p.n)
	}
}
