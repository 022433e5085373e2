package index_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// TestExistsBytes counts the bytes of an Exists, whatever its record has, for a key of one byte.
func TestExistsBytes(t *testing.T) {
	const head = layout.RecordHeaderSize + 1
	for _, put := range []string{"put k v", "put k kib100", "put k kib8 whole=4096", "put k v expiry=5000"} {
		for r := uint8(1); r <= 3; r++ {
			for _, hint := range []bool{false, true} {
				want := layout.GroupSize + head
				switch {
				case hint && strings.Contains(put, "expiry"):
					want = 8 + head
				case hint:
					want = 8
				}
				w := newWorld(r, 1<<14)
				must(t, w.client(1).do(t, fields(put)...))
				c := w.client(2)
				if hint {
					must(t, c.do(t, "get", "k"))
				}
				version := w.client(1).op.Version
				must(t, c.do(t, "exists", "k"))
				if c.bytes != want {
					t.Errorf("%s r=%d, hint %v: %d bytes, want %d (steps %v)", put, r, hint, c.bytes, want, c.steps)
				}
				if x := &c.op.Record; x.Version != version || string(x.Key) != "k" || x.Value != nil ||
					x.Expiry != 0 != strings.Contains(put, "expiry") {
					t.Errorf("%s r=%d, hint %v: found %+v, want version %d", put, r, hint, x, version)
				}
			}
		}
	}
}

// TestExistsNotes: an Exists leaves the access word as it is.
func TestExistsNotes(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		w := newWorld(r, 64).asCache()
		must(t, w.client(1).do(t, "put", "k", "v"))
		i := slotOfK(t, w)
		before := w.access(i)
		w.millis += 100_000
		must(t, w.client(1).do(t, "exists", "k"))
		must(t, w.client(2).do(t, "exists", "k"))
		if a := w.access(i); a != before {
			t.Errorf("r=%d: %#x, want %#x", r, uint64(a), uint64(before))
		}
	}
}

// TestExistsHints asks by hints of what is there no longer, or not as it was.
func TestExistsHints(t *testing.T) {
	for _, c := range []struct {
		name, put, then string
		clock           uint64
		hint            func(h *index.Hint)
		there           bool
		rounds          int
	}{
		{name: "unchanged", put: "put k v", there: true, rounds: 1},
		{name: "replaced", put: "put k v", then: "put k v2", there: true, rounds: 2},
		{name: "deleted", put: "put k v", then: "del k", rounds: 2},
		{name: "made anew", put: "put k v", then: "del k;put k v2", there: true, rounds: 2},
		// The slot is another key's of the same fingerprint. Its record is read whole before that is an answer.
		{name: "another's slot", put: "put k v", then: "del k;put kk v", rounds: 5},
		{name: "was to expire", put: "put k v expiry=5000", then: "del k", rounds: 2},
		{name: "expires", put: "put k v expiry=5000", clock: 4999, there: true, rounds: 1},
		{name: "expired", put: "put k v expiry=5000", clock: 5000, rounds: 2},
		{name: "expires now", put: "put k v", then: "put k v expiry=5000", clock: 5000, rounds: 3},
		{name: "a word alone", put: "put k v", hint: func(h *index.Hint) { h.Version = 0 }, there: true, rounds: 1},
		{name: "a word of another key", put: "put kk v", hint: func(h *index.Hint) { h.Version = 0 }, rounds: 4},
	} {
		for r := uint8(1); r <= 3; r++ {
			w := newWorld(r, 1<<14)
			must(t, w.client(1).do(t, fields(c.put)...))
			key := fields(c.put)[1]
			d := w.client(2)
			must(t, d.do(t, "get", key))
			h := d.hints[key]
			if c.hint != nil {
				c.hint(&h)
			}
			d.hints["k"] = h
			if c.then != "" {
				for op := range strings.SplitSeq(c.then, ";") {
					must(t, w.client(1).do(t, fields(op)...))
				}
			}
			w.millis = max(w.millis, c.clock)
			err := d.do(t, "exists", "k")
			if (err == nil) != c.there || err != nil && !errors.Is(err, index.ErrNotFound) {
				t.Errorf("%s r=%d: %v", c.name, r, err)
			}
			if int(d.op.Rounds) != c.rounds {
				t.Errorf("%s r=%d: %d rounds, want %d (steps %v)", c.name, r, d.op.Rounds, c.rounds, d.steps)
			}
		}
	}
}

// TestExistsDamaged: what an Exists says of damaged records. A start that tells of the key is believed. All else is
// judged by the whole record, as by a GET: nothing is absent that is damaged.
func TestExistsDamaged(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		for _, where := range []string{"version", "key length", "flags", "format", "value length", "expiry", "crc",
			"writer", "key", "value"} {
			for lost := range 2 {
				for _, hinted := range []bool{false, true} {
					name := fmt.Sprintf("r=%d, %s, lost %d, hinted %v", r, where, lost, hinted)
					w := newWorld(r, 256)
					c := w.client(1)
					must(t, c.do(t, "put", "k", "old", fmt.Sprintf("expiry=%d", uint64(0x55<<40+5000))))
					w.millis = 6000 // the expiry has come if it is damaged
					if !hinted {
						c = w.client(2)
					}
					damaged := []uint8{r - 1}
					if lost == 1 {
						for k := range r - 1 {
							damaged = append(damaged, k)
						}
					}
					w.damage(t, "k", damaged, where)
					err := c.do(t, "exists", "k")
					var corrupt *layout.CorruptError
					if err != nil && !errors.As(err, &corrupt) {
						t.Errorf("%s: %v", name, err)
					}
					if h := c.hints["k"]; h.Version > 1<<40 {
						t.Errorf("%s: version %#x is remembered", name, h.Version)
					}
					if lost == 0 && r > 1 && err != nil {
						t.Errorf("%s: %v: another copy is whole", name, err)
					}
				}
			}
		}
	}
}

// TestPin: a Pin has the access word say until when, wherever the key's record is and whatever shares its fingerprint,
// and leaves the count if it has read that. Where there are no access words it is an Exists.
func TestPin(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		for _, before := range []string{"", "put kk v", "put k v2 expiry=9000;put kk v", "put k kib100",
			"prepare k put v3 seq=1 ts=9"} {
			for _, hinted := range []bool{false, true} {
				name := fmt.Sprintf("r=%d, %q, hinted %v", r, before, hinted)
				w := newWorld(r, 1<<12).asCache()
				must(t, w.client(1).do(t, "put", "k", "v"))
				if before != "" {
					for op := range strings.SplitSeq(before, ";") {
						must(t, w.client(1).do(t, fields(op)...))
					}
				}
				c := w.client(2)
				if hinted {
					must(t, c.do(t, "get", "k"))
				}
				i := slotOfK(t, w)
				was := w.access(i)
				must(t, c.do(t, "pin", "k", "expiry=8000"))
				if a := w.access(i); a.AheadTicks(w.millis) != (8000-1000)/layout.AccessTickMillis ||
					a.Count() != was.Count() && (before == "" || hinted && before != "prepare k put v3 seq=1 ts=9") {
					t.Errorf("%s: %#x, and was %#x", name, uint64(a), uint64(was))
				}
				must(t, c.do(t, "pin", "k")) // no longer
				if a := w.access(i); a.AheadTicks(w.millis) != 0 {
					t.Errorf("%s: %#x after that", name, uint64(a))
				}
			}
		}
		w := newWorld(r, 64)
		must(t, w.client(1).do(t, "put", "k", "v"))
		must(t, w.client(1).do(t, "pin", "k", "expiry=8000"))
		if err := w.client(1).do(t, "pin", "z", "expiry=8000"); !errors.Is(err, index.ErrNotFound) {
			t.Errorf("r=%d: a pin of nothing: %v", r, err)
		}
	}
}
