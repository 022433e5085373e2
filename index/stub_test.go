package index_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// stubOut puts a stub in place of the key's record, on every replica and in its place, and gives the object.
func (w *world) stubOut(key string) (object []byte, s layout.Stub) {
	for r := range w.pg.Replicas {
		_, _, x, ok := w.find(r, key)
		if !ok {
			panic("no " + key)
		}
		b := w.region[r][x.Off():][:x.ReadLen()]
		rec, err := layout.ParseRecord(b)
		if err != nil {
			panic(err)
		}
		object = bytes.Clone(b[:rec.EncodedLen()])
		s = layout.StubOf(&rec, len(object), layout.HeadSum(object), layout.ObjectAt{Volume: 7, At: 0x100040})
		h, body := rec.RecordHeader, layout.AppendStub(nil, &s, bytes.Clone(rec.Tail()))
		h.Stub = true
		layout.EncodeRecord(b, h, bytes.Clone(rec.Key), body)
	}
	return object, s
}

// TestOnStub goes through what operations do with a stub: some need it alone, and those that need the value do not take
// its bytes for one.
func TestOnStub(t *testing.T) {
	for _, c := range []struct {
		op   string
		want error
		left string // "stub", "gone" or "record"
	}{
		{"get k", index.ErrTier, "stub"},
		{"exists k", nil, "stub"},
		{"pin k expiry=70000", nil, "stub"},
		{"put k v2", nil, "record"},
		{"put k v2 if-absent", index.ErrExists, "stub"},
		{"put k v2 if-present", nil, "record"},
		{"put k v2 if=99", index.ErrConflict, "stub"},
		{"put k v2 if=11", nil, "record"},
		{"del k", nil, "gone"},
		{"del k if=11", nil, "gone"},
		{"del k if=99", index.ErrConflict, "stub"},
		{"append k v2", index.ErrTier, "stub"},
		{"scan", nil, "stub"},
		{"sync", nil, "stub"},
		{"scrub", nil, "stub"},
		{"clean", nil, "stub"},
		{"evict k", nil, "gone"},
	} {
		for r := uint8(1); r <= 3; r++ {
			for _, hint := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s r=%d hint=%v", c.op, r, hint), func(t *testing.T) {
					w := newWorld(r, 1024).asCache()
					must(t, w.client(1).do(t, "put", "k", "kib1"))
					_, s := w.stubOut("k")
					cl := w.client(2)
					if hint {
						if err := cl.do(t, "exists", "k"); err != nil {
							t.Fatal(err)
						}
					}
					if err := cl.do(t, fields(c.op)...); !errors.Is(err, c.want) {
						t.Fatalf("%v, want %v", err, c.want)
					}
					w.leaves(t, c.left, &s)
					if c.op == "scan" && (len(cl.op.Scan.Found) != 1 || !cl.op.Scan.Found[0].Stub) {
						t.Errorf("found %+v", cl.op.Scan.Found)
					}
				})
			}
		}
	}
}

// leaves checks what every replica has of k.
func (w *world) leaves(t *testing.T, what string, s *layout.Stub) {
	t.Helper()
	for r := range w.pg.Replicas {
		_, _, x, ok := w.find(r, "k")
		if !ok {
			if what != "gone" {
				t.Errorf("r%d: k is gone, want a %s", r, what)
			}
			continue
		}
		rec, err := layout.ParseLinked(w.region[r][x.Off():][:x.ReadLen()])
		switch {
		case err != nil:
			t.Errorf("r%d: %v", r, err)
		case what == "gone" || rec.Stub != (what == "stub"):
			t.Errorf("r%d: %+v, want %s", r, rec.RecordHeader, what)
		case rec.Stub:
			if got, err := rec.Object(); err != nil || got != *s {
				t.Errorf("r%d: %+v, %v, want %+v", r, got, err, *s)
			}
		}
	}
}

// TestStubInTransactions: the parent of an intent, and what a guard or an abort leaves, may be a stub, which is copied
// as it is.
func TestStubInTransactions(t *testing.T) {
	for _, c := range []struct{ prepare, verdict, left string }{
		{"prepare k put v2", "abort", "stub"}, {"prepare k put v2", "commit", "record"},
		{"prepare k del", "abort", "stub"}, {"prepare k del", "commit", "gone"},
		{"prepare k keep", "abort", "stub"}, {"prepare k keep", "commit", "stub"},
	} {
		for r := uint8(1); r <= 3; r++ {
			t.Run(fmt.Sprintf("%s %s r=%d", c.prepare, c.verdict, r), func(t *testing.T) {
				w := newWorld(r, 1024)
				cl := w.client(1)
				must(t, cl.do(t, "put", "k", "kib1"))
				_, s := w.stubOut("k")
				delete(cl.hints, "k")
				must(t, cl.do(t, fields(c.prepare)...))
				if err := w.client(2).do(t, "get", "k"); !errors.Is(err, index.ErrTier) {
					t.Errorf("GET of the intent: %v, want %v", err, index.ErrTier)
				}
				must(t, cl.do(t, "decide", c.verdict))
				must(t, cl.do(t, "settle", "k", c.verdict))
				w.leaves(t, c.left, &s)
			})
		}
	}
}

// TestStubMended: a damaged copy of a stub is mended from a good one, as a record's is.
func TestStubMended(t *testing.T) {
	for r := uint8(2); r <= 3; r++ {
		for bad := range r {
			for _, at := range []int{0, 11, layout.RecordHeaderSize, layout.RecordHeaderSize + 9} {
				w := newWorld(r, 1024)
				must(t, w.client(1).do(t, "put", "k", "kib1"))
				_, s := w.stubOut("k")
				_, _, x, _ := w.find(bad, "k")
				w.region[bad][x.Off()+uint64(at)] ^= 0x40
				must(t, w.client(2).do(t, "scrub"))
				w.leaves(t, "stub", &s)
				if t.Failed() {
					t.Fatalf("r=%d, byte %d of replica %d", r, at, bad)
				}
			}
		}
	}
}

// TestStubSynced: a stub that the head alone has comes to the other replicas as any record.
func TestStubSynced(t *testing.T) {
	w := newWorld(3, 1024)
	must(t, w.client(1).do(t, "put", "k", "kib1"))
	_, s := w.stubOut("k")
	for r := uint8(1); r < 3; r++ {
		g, i, x, _ := w.find(r, "k")
		clear(w.region[r][x.Off():][:x.ReadLen()])
		w.setSlot(r, g, i, 0)
	}
	must(t, w.client(2).do(t, "sync"))
	w.leaves(t, "stub", &s)
	w.pg.Joining = true
	if err := w.client(3).do(t, "get", "k"); !errors.Is(err, index.ErrTier) || strings.Contains(err.Error(), "corrupt") {
		t.Errorf("%v, want %v", err, index.ErrTier)
	}
}
