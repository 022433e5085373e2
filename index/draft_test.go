package index_test

import (
	"errors"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// draftRig writes a value of three chunks through a Draft. The newest map has the placement group as now is; the Op
// goes by the world's own.
type draftRig struct {
	w     *world
	c     *client
	now   *index.PG
	draft *index.Draft
	value []byte
	at    int
}

const draftPayload = 4096 - layout.RecordHeaderSize

func newDraftRig() *draftRig {
	w := newWorld(2, layout.ExtentUnits+100_000)
	w.quiet, w.pg.ChunkPayload = true, draftPayload
	now := w.pg
	r := &draftRig{w: w, c: w.client(2), now: &now, value: make([]byte, 2*draftPayload+100)}
	for i := range r.value {
		r.value[i] = byte(i / 7)
	}
	r.draft = &index.Draft{Len: uint64(len(r.value))}
	r.check()
	return r
}

func (r *draftRig) check() { r.draft.Check(func(uint32) *index.PG { return r.now }) }

// put performs a Put of the next n bytes, or the one that links all if n is 0, and returns its error.
func (r *draftRig) put(t *testing.T, n int) error {
	t.Helper()
	o := &index.Op{Kind: index.Put, Key: []byte("d"), Hash: hashOf("d"),
		Part:  &index.Part{Draft: r.draft, Link: n == 0},
		Value: r.value[r.at:min(r.at+n, len(r.value))]}
	r.c.begin(o)
	if lines, err := r.c.run(300); err != nil {
		t.Fatal(err, lines)
	}
	if o.Err == nil {
		r.at += len(o.Value)
	}
	return o.Err
}

// dropped is the units of the places that rest in the Draft. Afterwards it is void.
func (r *draftRig) dropped() (units []uint32) {
	r.draft.Drop(func(_ *index.PG, w layout.Word) { units = append(units, w.Unit()) })
	return units
}

// A value that is written in parts is there when it is linked, and not before; its Draft has nothing then.
func TestDraft(t *testing.T) {
	r := newDraftRig()
	for _, n := range []int{draftPayload, 2 * draftPayload} {
		must(t, r.put(t, n))
		if err := r.c.do(t, "get", "d"); !errors.Is(err, index.ErrNotFound) {
			t.Fatalf("before it is linked: %v", err)
		}
	}
	if err := r.put(t, draftPayload); r.at == len(r.value) && err == nil {
		t.Error("more than its length was taken")
	}
	r.c.op.Reset()
	must(t, r.put(t, 0))
	r.w.check(t, "linked", map[string]string{"d": string(r.value)})
	if units := r.dropped(); len(units) > 0 {
		t.Errorf("the places %d are linked, and rest in the draft", units)
	}
	if err := r.put(t, 0); !errors.Is(err, index.ErrDraft) {
		t.Errorf("linked again: %v", err)
	}
}

// A map that takes something away from a Draft makes it void for good, also when the next map knows nothing of that.
// Places of recalled extents are nobody's; the others come back once.
func TestDraftVoid(t *testing.T) {
	first := uint32(heapLo)
	for what, c := range map[string]struct {
		change func(r *draftRig) // of the newest map, which comes after the first part
		rest   int               // places that come back, of the first part's
	}{
		"recalled":             {func(r *draftRig) { r.now.Recalled = []uint32{first / layout.ExtentUnits} }, 0},
		"another epoch":        {func(r *draftRig) { r.now.Epoch++ }, 1},
		"another generation":   {func(r *draftRig) { r.now.Generation++ }, 0},
		"gone":                 {func(r *draftRig) { r.now = nil }, 0},
		"another was recalled": {func(r *draftRig) { r.now.Recalled = []uint32{7} }, -1},
	} {
		for _, before := range []bool{false, true} { // the map comes before the next part, or while it is written
			r := newDraftRig()
			must(t, r.put(t, draftPayload))
			was := *r.now
			c.change(r)
			r.check()
			if before { // it is over
				r.now = &was
				r.check()
			}
			err := r.put(t, draftPayload)
			if void := c.rest >= 0; errors.Is(err, index.ErrDraft) != void {
				t.Errorf("%s, over: %v: the next part: %v", what, before, err)
				continue
			} else if !void {
				continue
			}
			if units := r.dropped(); len(units) != c.rest {
				t.Errorf("%s, over: %v: %d places come back, want %d", what, before, len(units), c.rest)
			}
			if d := r.draft.Again(); d.Len != r.draft.Len {
				t.Errorf("again with %d bytes", d.Len)
			}
		}
	}
}

// A part that is written while a map comes of which its Op does not know is left with the Draft by that map.
func TestDraftMeetsNewerMap(t *testing.T) {
	for what, change := range map[string]func(*index.PG){
		"a recall":              func(pg *index.PG) { pg.Recalled = []uint32{heapLo / layout.ExtentUnits} },
		"another epoch":         func(pg *index.PG) { pg.Epoch++ },
		"a recall of the other": nil,
	} {
		r := newDraftRig()
		now := *r.now
		if r.now = &now; change != nil {
			change(r.now)
		} else {
			r.now.Recalled = []uint32{7}
		}
		r.check() // there is nothing in it yet
		err := r.put(t, draftPayload)
		if errors.Is(err, index.ErrDraft) != (change != nil) {
			t.Errorf("%s: %v", what, err)
		}
		given := len(r.w.left) == 1
		if rest := len(r.dropped()); given != (change != nil) || rest != b2i(change == nil) {
			t.Errorf("%s: given back: %v, and %d rest", what, given, rest)
		}
	}
}
