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
		w.objects[layout.ObjectAt{Volume: 7, At: 0x100040}] = object
		s = layout.StubOf(&rec, len(object), layout.HeadSum(object), layout.ObjectAt{Volume: 7, At: 0x100040})
		h, body := rec.RecordHeader, layout.AppendStub(nil, &s, bytes.Clone(rec.Tail()))
		h.Stub = true
		layout.EncodeRecord(b, h, bytes.Clone(rec.Key), body)
	}
	return object, s
}

// stubOf is the key's stub at the tail.
func (w *world) stubOf(key string) (s layout.Stub, ok bool) {
	r := w.pg.Replicas - 1
	_, _, x, ok := w.find(r, key)
	if !ok {
		return s, false
	}
	rec, err := layout.ParseLinked(w.region[r][x.Off():][:x.ReadLen()])
	if err != nil || !rec.Stub {
		return s, false
	}
	s, err = rec.Object()
	return s, err == nil
}

// TestOnStub goes through what operations do with a stub: some need it alone, and those that need the value do not take
// its bytes for one.
func TestOnStub(t *testing.T) {
	for _, c := range []struct {
		op   string
		want error
		left string // "stub", "gone" or "record"
	}{
		{"get k", nil, "stub"},
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
		{"append k v2", nil, "record"},
		{"scan", nil, "stub"},
		{"sync", nil, "stub"},
		{"scrub", nil, "stub"},
		{"clean", nil, "stub"},
		{"evict k", nil, "gone"},
		{"demote k", index.ErrKept, "stub"},
		{"promote k", nil, "record"},
		{"drop k", nil, "gone"},
		{"drop k at=64", index.ErrKept, "stub"},
		{"drop k version=99", index.ErrKept, "stub"},
		{"readdress k to=9 at=64", index.ErrKept, "stub"},
		{"readdress k to=9 version=99", index.ErrKept, "stub"},
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
					if c.op == "get k" && string(cl.op.Record.Value) != string(valueOf("kib1")) {
						t.Errorf("found %q", cl.op.Record.Value)
					}
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
				other := w.client(2)
				if err := other.do(t, "get", "k"); err != nil || len(other.op.Record.Value) != 1<<10 {
					t.Errorf("GET of the intent: %v, %d bytes", err, len(other.op.Record.Value))
				}
				for _, op := range []string{"demote", "promote", "drop", "locate", "readdress"} {
					if err := other.do(t, op, "k"); !errors.Is(err, index.ErrKept) {
						t.Errorf("%s at the intent: %v, want %v", op, err, index.ErrKept)
					}
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
	must(t, w.client(3).do(t, "get", "k"))
}

// tiered is a world in which k was demoted, by client 1.
func tiered(t *testing.T, replicas uint8, cache bool) *world {
	t.Helper()
	w := newWorld(replicas, 1024).asCache()
	w.pg.Cache = cache
	must(t, w.client(1).do(t, "put", "k", "kib1"))
	must(t, w.client(1).do(t, "demote", "k"))
	return w
}

// TestObjectGone: nobody answers that a key is absent because an object is missing. The key is made absent first, and
// only of an object that nobody will have again.
func TestObjectGone(t *testing.T) {
	for _, c := range []struct {
		name  string
		cache bool
		state index.VolumeState
		bytes string // of the object: "good", "gone" or "bad"
		op    string
		want  error
		left  string
	}{
		{"away", true, index.VolumeAway, "good", "get k", index.ErrTier, "stub"},
		{"away", false, index.VolumeAway, "good", "append k x", index.ErrTier, "stub"},
		{"lost", true, index.VolumeLost, "gone", "get k", index.ErrNotFound, "gone"},
		{"lost", false, index.VolumeLost, "gone", "get k", index.ErrNotFound, "gone"},
		{"lost", false, index.VolumeLost, "gone", "append k x", nil, "record"},
		{"bytes lost", true, index.VolumeUp, "gone", "get k", index.ErrNotFound, "gone"},
		{"bytes lost", true, index.VolumeUp, "bad", "get k", index.ErrNotFound, "gone"},
		{"bytes lost", true, index.VolumeUp, "gone", "append k x", nil, "record"},
		{"bytes lost", true, index.VolumeUp, "gone", "promote k", index.ErrNotFound, "gone"},
		{"bytes lost", false, index.VolumeUp, "gone", "get k", index.ErrTier, "stub"},
		{"bytes lost", false, index.VolumeUp, "bad", "append k x", index.ErrTier, "stub"},
	} {
		for r := uint8(1); r <= 3; r++ {
			for _, hint := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s cache=%v %s %s r=%d hint=%v", c.name, c.cache, c.bytes, c.op, r, hint),
					func(t *testing.T) {
						w := tiered(t, r, c.cache)
						s, _ := w.stubOf("k")
						w.volumes[7] = c.state
						switch object := w.objects[s.At[0]]; c.bytes {
						case "gone":
							delete(w.objects, s.At[0])
						case "bad":
							object[len(object)-1] ^= 1
						}
						cl := w.client(2)
						if hint {
							must(t, cl.do(t, "exists", "k"))
						}
						if err := cl.do(t, fields(c.op)...); !errors.Is(err, c.want) {
							t.Fatalf("%v, want %v", err, c.want)
						}
						w.leaves(t, c.left, &s)
						if len(w.wrong) > 0 {
							t.Error(w.wrong)
						}
					})
			}
		}
	}
}

// TestObjectMoves: a reader whose object has moved looks again, and finds it.
func TestObjectMoves(t *testing.T) {
	w := tiered(t, 2, true)
	cl := w.client(2)
	must(t, cl.start(fields("get k")))
	for cl.action != index.Fetch {
		cl.advance(100, noFault)
	}
	s, _ := w.stubOf("k")
	to := layout.ObjectAt{Volume: 7, At: 9 << 20}
	w.objects[to] = w.objects[s.At[0]]
	must(t, w.client(3).do(t, "readdress", "k", fmt.Sprintf("to=%d", to.At)))
	delete(w.objects, s.At[0])
	clear(cl.op.Object.Got)
	if _, err := cl.run(50); err != nil || cl.op.Err != nil || len(cl.op.Record.Value) != 1<<10 {
		t.Fatalf("%v, %v, %d bytes", err, cl.op.Err, len(cl.op.Record.Value))
	}
	if s, _ = w.stubOf("k"); s.At[0] != to || s.Copies != 1 {
		t.Errorf("the stub is %+v", s)
	}
}

// TestSecondCopy: an object is read where it can be had.
func TestSecondCopy(t *testing.T) {
	for _, first := range []index.VolumeState{index.VolumeAway, index.VolumeLost, index.VolumeUp} {
		w := tiered(t, 2, false)
		s, _ := w.stubOf("k")
		other := layout.ObjectAt{Volume: 8, At: 64}
		w.objects[other] = w.objects[s.At[0]]
		cl := w.client(3)
		o := &index.Op{Kind: index.Readdress, Key: []byte("k"), Hash: hashOf("k"),
			Tiered: &index.Tiered{Stub: s, To: []layout.ObjectAt{s.At[0], other}}}
		cl.begin(o)
		if _, err := cl.run(50); err != nil || o.Err != nil {
			t.Fatal(err, o.Err)
		}
		delete(w.objects, s.At[0])
		w.volumes[7] = first
		get := w.client(4)
		must(t, get.do(t, "get", "k"))
		if len(get.op.Record.Value) != 1<<10 {
			t.Errorf("%d bytes", len(get.op.Record.Value))
		}
		must(t, get.do(t, "locate", "k"))
		if !get.op.Tiered.Named {
			t.Error("not named")
		}
	}
}

// TestTieredLoses: demoting and the like change nothing if the key has changed since they looked.
func TestTieredLoses(t *testing.T) {
	for _, c := range []struct {
		setup, op, meanwhile, left string
		want                       error
	}{
		{"put k kib1", "demote k", "put k kib2", "record", index.ErrKept},
		{"put k kib1", "demote k", "del k", "gone", index.ErrKept},
		{"put k kib1", "demote k", "append k x", "record", index.ErrKept},
		{"put k kib1;demote k", "promote k", "put k kib2", "record", index.ErrKept},
		{"put k kib1;demote k", "promote k", "del k", "gone", index.ErrKept},
		{"put k kib1;demote k", "promote k", "promote k", "record", index.ErrKept},
		{"put k kib1;demote k", "promote k", "readdress k to=1", "stub", index.ErrKept},
		{"put k kib1 pinned=90000", "demote k", "", "record", index.ErrKept},
		{"put k kib1 expiry=500", "demote k", "", "record", index.ErrKept},
		{"put k long9", "demote k", "", "record", index.ErrKept},
		{"", "demote k", "", "gone", index.ErrNotFound},
		{"", "locate k", "", "gone", nil},
	} {
		for r := uint8(1); r <= 3; r++ {
			for _, hint := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s %s r=%d hint=%v", c.setup, c.op, c.meanwhile, r, hint), func(t *testing.T) {
					w := newWorld(r, 1<<18).asCache()
					do := func(ops string) {
						for _, op := range fieldsOf(ops) {
							if err := w.client(1).do(t, op...); err != nil {
								t.Fatal(op, err)
							}
						}
					}
					do(c.setup)
					s, _ := w.stubOf("k")
					cl := w.client(2)
					if hint && c.setup != "" {
						_ = cl.do(t, "exists", "k")
					}
					must(t, cl.start(fields(c.op)))
					for c.meanwhile != "" && cl.action != index.Fetch && cl.action != index.Store {
						cl.advance(100, noFault)
					}
					w.objects[layout.ObjectAt{Volume: 7, At: 1}] = w.objects[s.At[0]]
					do(c.meanwhile)
					s, _ = w.stubOf("k")
					if _, err := cl.run(100); err != nil || !errors.Is(cl.op.Err, c.want) {
						t.Fatalf("%v, %v, want %v", err, cl.op.Err, c.want)
					}
					w.leaves(t, c.left, &s)
					if len(w.wrong) > 0 {
						t.Error(w.wrong)
					}
				})
			}
		}
	}
}

// TestStubKeepsWhatItStandsFor: to demote a key, to move its object and to promote it change neither its value, its
// version, its expiry nor its flags.
func TestStubKeepsWhatItStandsFor(t *testing.T) {
	w := newWorld(2, 1024)
	cl := w.client(1)
	must(t, cl.do(t, "put", "k", "kib1", "expiry=5000"))
	read := func() string {
		c := w.client(2)
		must(t, c.do(t, "get", "k"))
		r := c.op.Record
		return fmt.Sprint(r.Version, c.op.Version, r.Expiry, r.Flags, r.Stub, r.ValueLen, string(r.Value))
	}
	must(t, cl.do(t, "touch", "k"))
	want := read()
	for i, op := range []string{"demote k", "readdress k to=77", "promote k", "demote k"} {
		if op == "readdress k to=77" {
			s, _ := w.stubOf("k")
			w.objects[layout.ObjectAt{Volume: 7, At: 77}] = w.objects[s.At[0]]
		}
		must(t, w.client(uint32(3+i)).do(t, fields(op)...))
		if got := read(); got != want {
			t.Fatalf("after %s: %.60s, want %.60s", op, got, want)
		}
	}
	// A Touch rewrites the stub, and reads no object.
	s, _ := w.stubOf("k")
	object := w.objects[s.At[0]]
	delete(w.objects, s.At[0])
	must(t, w.client(9).do(t, "touch", "k"))
	if got, ok := w.stubOf("k"); !ok || got != s {
		t.Errorf("the stub is %+v, %v after a touch, want %+v", got, ok, s)
	}
	w.objects[s.At[0]] = object
	if r := w.client(9).op; r.Version <= cl.op.Version {
		t.Errorf("version %d after a touch, want more than %d", r.Version, cl.op.Version)
	}
	must(t, w.client(3).do(t, "get", "k"))
	if r := w.client(3).op.Record; string(r.Value) != string(valueOf("kib1")) || r.Expiry != 70_000 || r.Version !=
		w.client(9).op.Version {
		t.Errorf("after a touch: version %d, expiry %d, %d bytes", r.Version, r.Expiry, len(r.Value))
	}
	must(t, w.client(4).do(t, "promote", "k"))
	must(t, w.client(5).do(t, "get", "k"))
	if r := w.client(5).op.Record; r.Stub || r.Version != w.client(9).op.Version {
		t.Errorf("promoted: %+v", r.RecordHeader)
	}
	w.millis = 70_000
	if err := cl.do(t, "get", "k"); !errors.Is(err, index.ErrNotFound) {
		t.Errorf("expired: %v", err)
	}
}

// TestLocateSyncs: who has located a key's object knows that the tail shows what the head does.
func TestLocateSyncs(t *testing.T) {
	for _, atHead := range []string{"put k v", "del k", "readdress k to=5"} {
		for r := uint8(2); r <= 3; r++ {
			w := tiered(t, r, true)
			s, _ := w.stubOf("k")
			c := w.client(2)
			must(t, c.start(fields(atHead)))
			for range 30 {
				if c.steps != nil && c.steps[len(c.steps)-1] == "cas-slot" && !c.posted {
					break // decided, and not published
				}
				c.advance(100, noFault)
			}
			l := w.client(3)
			l.begin(&index.Op{Kind: index.Locate, Key: []byte("k"), Hash: hashOf("k"), Tiered: &index.Tiered{Stub: s}})
			if _, err := l.run(60); err != nil || l.op.Err != nil {
				t.Fatal(atHead, err, l.op.Err)
			}
			if l.op.Tiered.Named {
				t.Errorf("%s, r=%d: the object counts as named", atHead, r)
			}
			if s2, ok := w.stubOf("k"); ok && s2.At[0] == s.At[0] {
				t.Errorf("%s, r=%d: the tail shows the object still", atHead, r)
			}
		}
	}
}

func fieldsOf(ops string) (list [][]string) {
	for op := range strings.SplitSeq(ops, ";") {
		if op != "" {
			list = append(list, fields(op))
		}
	}
	return list
}

// toDecision goes on until the operation's next accesses are those that decide, and performs none of them.
func (c *client) toDecision() {
	for c.op.Step().String() != "cas-slot" {
		limit := 0
		if c.posted {
			limit = 1 << 30
		}
		c.advance(limit, noFault)
	}
}

// failCAS fails what decides without an effect; refused: it was never posted.
func (c *client) failCAS(refused bool) {
	for i := range c.op.Accesses {
		a := &c.op.Accesses[i]
		a.Failed, a.Refused = true, refused && a.Verb == index.CAS
	}
	c.posted = false
}

// TestDropEndsWithItsAttempt: what an Op decides is taken for the drop of a lost key only if it is that. Else a Modify
// would be applied twice.
func TestDropEndsWithItsAttempt(t *testing.T) {
	for _, how := range []string{"refused", "lost, and rebased", "not executed"} {
		for r := uint8(1); r <= 3; r++ {
			t.Run(fmt.Sprintf("%s r=%d", how, r), func(t *testing.T) {
				w := tiered(t, r, true)
				s, _ := w.stubOf("k")
				delete(w.objects, s.At[0])
				c, other := w.client(2), w.client(3)
				must(t, c.start(fields("append k x")))
				c.toDecision()
				switch how {
				case "refused":
					c.failCAS(true)
				case "lost, and rebased":
					must(t, other.do(t, "put", "k", "v"))
					c.advance(1<<30, noFault)
					c.op.Rebase()
				case "not executed":
					c.failCAS(false)
					for c.op.Step().String() != "resolve" {
						c.advance(1<<30, noFault)
					}
				}
				must(t, other.do(t, "put", "k", "v"))
				if _, err := c.run(100); err != nil || c.op.Err != nil {
					t.Fatal(err, c.op.Err)
				}
				must(t, other.do(t, "get", "k"))
				if got := string(other.op.Record.Value); c.modified != 1 || got != "vx" {
					t.Errorf("%q after %d calls of the function, want \"vx\" after 1", got, c.modified)
				}
				if len(w.wrong) > 0 {
					t.Error(w.wrong)
				}
			})
		}
	}
}

// TestPromoteOfLonger: a Promote that meets a longer record in its second attempt takes another place for it.
func TestPromoteOfLonger(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		w := tiered(t, r, true)
		c, other := w.client(2), w.client(3)
		must(t, c.start(fields("promote k")))
		c.toDecision()
		c.failCAS(true)
		must(t, other.do(t, "put", "k", "kib4"))
		must(t, other.do(t, "demote", "k"))
		delete(c.hints, "k") // as if another operation of the session had met the new record
		if _, err := c.run(100); err != nil || c.op.Err != nil {
			t.Fatal(err, c.op.Err)
		}
		w.leaves(t, "record", nil)
		must(t, other.do(t, "get", "k"))
		if got := len(other.op.Record.Value); got != 4<<10 {
			t.Errorf("r=%d: %d bytes, want 4096", r, got)
		}
		if len(w.wrong) > 0 {
			t.Error(w.wrong)
		}
	}
}

// TestLongObject: an object of a kind that this version does not read is neither asked for nor taken for lost.
func TestLongObject(t *testing.T) {
	for _, op := range []string{"get k", "append k x", "promote k"} {
		w := newWorld(2, 1024).asCache()
		must(t, w.client(1).do(t, "put", "k", "kib1"))
		w.stubOut("k")
		for r := range w.pg.Replicas {
			_, _, x, _ := w.find(r, "k")
			b := w.region[r][x.Off():][:x.ReadLen()]
			rec, err := layout.ParseLinked(b)
			must(t, err)
			s, _ := rec.Object()
			s.Long, s.Len = true, 1<<28
			body := layout.AppendStub(nil, &s, bytes.Clone(rec.Tail()))
			layout.EncodeRecord(b, rec.RecordHeader, bytes.Clone(rec.Key), body)
		}
		s, _ := w.stubOf("k")
		c := w.client(2)
		must(t, c.start(fields(op)))
		for range 20 {
			if c.advance(1<<30, noFault); c.action == index.Fetch {
				t.Fatalf("%s asks for %d bytes", op, c.op.Object.Len)
			}
		}
		if !errors.Is(c.op.Err, index.ErrTier) {
			t.Errorf("%s: %v, want %v", op, c.op.Err, index.ErrTier)
		}
		w.leaves(t, "stub", &s)
	}
}

// TestRare: only operations on stubs have what is for them, and Reset clears that.
func TestRare(t *testing.T) {
	for _, c := range []struct {
		op   string
		stub bool // it is about one
		rare bool
	}{
		{"get k", false, false}, {"put j v", false, false}, {"put k v2", false, false}, {"append k x", false, false},
		{"del k", false, false}, {"sync", false, false}, {"scan", false, false}, {"put k v2", true, false},
		{"del k", true, false}, {"sync", true, false}, {"get k", true, true}, {"append k x", true, true},
	} {
		w := newWorld(3, 1024).asCache()
		must(t, w.client(1).do(t, "put", "k", "kib1"))
		if c.stub {
			w.stubOut("k")
		}
		cl := w.client(2)
		must(t, cl.do(t, fields(c.op)...))
		if got := cl.op.HasRare(); got != c.rare {
			t.Errorf("%s, stub %t: rare %t, want %t", c.op, c.stub, got, c.rare)
		}
		cl.op.Reset()
		if cl.op.HasRare() {
			t.Errorf("%s, stub %t: rare after Reset", c.op, c.stub)
		}
	}
}
