package heap

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func mustAdd(t testing.TB, h *Heap, unit, units uint32) {
	t.Helper()
	if err := h.AddRun(unit, units); err != nil {
		t.Fatal(err)
	}
}

func mustCheck(t testing.TB, h *Heap) {
	t.Helper()
	if err := h.Check(); err != nil {
		t.Fatal(err)
	}
}

func mustAlloc(t testing.TB, h *Heap, units uint32) Place {
	t.Helper()
	p, ok := h.Alloc(units)
	if !ok {
		t.Fatalf("no place of %d units", units)
	}
	return p
}

// The directory's answers are checked like any other input.
func TestAddRunRefuses(t *testing.T) {
	h := New()
	mustAdd(t, h, 100, 100)
	h.Free(Place{Unit: 300, Units: 8, Ver: 1}) // foreign
	before := h.Stats()
	for _, c := range []struct {
		unit, units uint32
		want        error
	}{
		{0, 0, ErrRunBounds},
		{0, ExtentUnits + 1, ErrRunBounds},
		{1, ExtentUnits, ErrRunBounds},
		{ExtentUnits - 1, 2, ErrRunBounds},
		{5, math.MaxUint32, ErrRunBounds},
		{math.MaxUint32, 2, ErrRunBounds},
		{100, 100, ErrRunOverlap},
		{0, 101, ErrRunOverlap},
		{199, 1, ErrRunOverlap},
		{150, 10, ErrRunOverlap},
		{0, ExtentUnits, ErrRunOverlap},
		{307, 10, ErrRunOverlap},
		{290, 11, ErrRunOverlap},
	} {
		if err := h.AddRun(c.unit, c.units); !errors.Is(err, c.want) {
			t.Errorf("run %d+%d: %v, want %v", c.unit, c.units, err, c.want)
		}
	}
	if h.Stats() != before {
		t.Errorf("refused runs changed %+v to %+v", before, h.Stats())
	}
	mustAdd(t, h, 0, 100)
	mustAdd(t, h, 200, 100)
	mustAdd(t, h, 308, 1)
	mustAdd(t, h, math.MaxUint32, 1)
	mustAdd(t, h, ExtentUnits, ExtentUnits)
	mustCheck(t, h)
}

// A grant made for one large record serves it, although its size class also has
// smaller sizes, and an allocation of another size leaves it alone.
func TestExactRun(t *testing.T) {
	for _, units := range []uint32{1, 31, 32, 63, 64, 65, 127, 1023, 63488, 65008, MaxUnits} {
		h := New()
		mustAdd(t, h, 7, units)
		if _, ok := h.Alloc(units + 1); ok {
			t.Fatalf("%d units from a run of %d", units+1, units)
		}
		if p := mustAlloc(t, h, units); p != (Place{Unit: 7, Units: units}) {
			t.Fatalf("got %v", p)
		}
		mustCheck(t, h)
	}
	h := New()
	mustAdd(t, h, 0, ExtentUnits)
	for _, units := range []uint32{0, MaxUnits + 1, ExtentUnits, math.MaxUint32} {
		if _, ok := h.Alloc(units); ok {
			t.Errorf("a place of %d units", units)
		}
	}
	if n := h.AllocBatch(MaxUnits, make([]Place, 5)); n != 4 {
		t.Errorf("%d places of a quarter extent each", n)
	}
}

func TestVer(t *testing.T) {
	h := New()
	mustAdd(t, h, 0, 8)
	for life := range 2100 {
		p := mustAlloc(t, h, 8)
		if want := uint16(life % 1024); p.Ver != want {
			t.Fatalf("life %d carries ver %d", life, p.Ver)
		}
		h.Unuse(p)
		if q := mustAlloc(t, h, 8); q != p {
			t.Fatalf("%v unused comes back as %v", p, q)
		}
		h.Free(p)
	}
	// Other start units are unaffected, and nothing is fresh even where the ver
	// has wrapped to 0.
	for i := range uint32(8) {
		p := mustAlloc(t, h, 1)
		if p.Unit != i || i > 0 && p.Ver != 0 {
			t.Fatalf("got %v for unit %d", p, i)
		}
		h.FreeBatch([]Place{p})
		_ = mustAlloc(t, h, 1)
	}
}

func TestForeign(t *testing.T) {
	h := New()
	mustAdd(t, h, 0, 64)
	h.FreeBatch([]Place{{Unit: 1000, Units: 4, Ver: 1023}, {Unit: 1004, Units: 4, Ver: 5}})
	if s := h.Stats(); s.ForeignFree != 8 || s.Free != 64 {
		t.Fatalf("%+v", s)
	}
	if p := mustAlloc(t, h, 8); p.Unit != 0 {
		t.Errorf("foreign neighbours merged into %v", p)
	}
	if p := mustAlloc(t, h, 2); p.Unit >= 1000 {
		t.Errorf("a foreign place was cut into %v", p)
	}
	got := []Place{mustAlloc(t, h, 4), mustAlloc(t, h, 4)}
	if want := []Place{{1004, 4, 6}, {1000, 4, 0}}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	h.Unuse(got[0])
	if p := mustAlloc(t, h, 4); p != got[0] {
		t.Errorf("%v unused comes back as %v", got[0], p)
	}
	mustCheck(t, h)
}

func TestRefuse(t *testing.T) {
	h := New()
	mustAdd(t, h, 100, 100)
	p := mustAlloc(t, h, 10)
	h.Free(Place{Unit: 500, Units: 10})
	bad := []Place{
		{Unit: p.Unit, Units: 0},
		{Unit: p.Unit, Units: 9},
		{Unit: p.Unit, Units: 11},
		{Unit: p.Unit + 1, Units: 9},
		{Unit: p.Unit, Units: 10, Ver: 1024},
		{Unit: 150, Units: 10},               // free
		{Unit: 95, Units: 10},                // half own
		{Unit: 195, Units: 10},               // half own
		{Unit: 90, Units: 200},               // around
		{Unit: 500, Units: 10},               // free already
		{Unit: 505, Units: 1},                // inside a free one
		{Unit: 495, Units: 6},                // overlaps one
		{Unit: 0, Units: MaxUnits + 1},       // too large
		{Unit: 5, Units: math.MaxUint32},     // wraps
		{Unit: ExtentUnits - 1, Units: 2},    // crosses
		{Unit: math.MaxUint32 - 3, Units: 5}, // past the end
	}
	for i, b := range bad {
		before := h.Stats()
		if i%2 == 0 {
			h.Free(b)
		} else {
			h.Unuse(b)
		}
		before.RefusedPlaces++
		if got := h.Stats(); got != before {
			t.Errorf("%v: %+v, want %+v", b, got, before)
		}
	}
	mustCheck(t, h)
	h.Free(p)
	if s := h.Stats(); s.InUse != 0 || s.Free != 100 {
		t.Errorf("%+v", s)
	}
}

func TestDrain(t *testing.T) {
	h := New()
	mustAdd(t, h, ExtentUnits-100, 100)
	mustAdd(t, h, ExtentUnits, 50)
	mustAdd(t, h, ExtentUnits+50, 50)
	var held []Place
	for range 3 {
		held = append(held, mustAlloc(t, h, 10))
	}
	h.Free(held[0])  // linked
	h.Unuse(held[2]) // not
	h.Free(Place{Unit: 9, Units: 3})
	h.Free(Place{Unit: 12, Units: 1})
	h.Free(Place{Unit: 2*ExtentUnits - 1, Units: 1})
	h.Free(Place{Unit: 2 * ExtentUnits, Units: 1, Ver: 1023})
	base := held[0].Unit
	want := []Run{
		{Unit: ExtentUnits - 100, Units: 10},
		{Unit: ExtentUnits - 80, Units: 80, Fresh: true},
		{Unit: ExtentUnits, Units: 100, Fresh: true},
	}
	wantForeign := []Place{{9, 3, 1}, {12, 1, 1}, {2*ExtentUnits - 1, 1, 1}, {2 * ExtentUnits, 1, 0}}
	if base != ExtentUnits-100 {
		t.Fatalf("the test expects the lowest run to be cut first, not %d", base)
	}
	if got, foreign := h.Drain(); !slices.Equal(got, want) || !slices.Equal(foreign, wantForeign) {
		t.Errorf("got  %v, foreign %v\nwant %v, foreign %v", got, foreign, want, wantForeign)
	}
	mustCheck(t, h)
	if s := h.Stats(); s != (Stats{Granted: 10, InUse: 10}) {
		t.Errorf("%+v", s)
	}
	if got, foreign := h.Drain(); got != nil || foreign != nil {
		t.Errorf("drained twice: %v, foreign %v", got, foreign)
	}
	// Places that were in use come back later, and drained memory may be granted anew.
	mustAdd(t, h, base, 10)
	if p := mustAlloc(t, h, 10); p.Ver != 0 {
		t.Errorf("a fresh grant remembers %v", p)
	}
	h.Free(held[1])
	if got, foreign := h.Drain(); !slices.Equal(got, []Run{{Unit: held[1].Unit, Units: 10}}) || foreign != nil {
		t.Errorf("got %v, foreign %v, want %v", got, foreign, held[1])
	}
	mustCheck(t, h)
}

// A place that comes home must be in use, with that start and length; its ver tells which life comes next.
func TestReceive(t *testing.T) {
	h := New()
	mustAdd(t, h, 100, 100)
	p, q := mustAlloc(t, h, 10), mustAlloc(t, h, 10)
	foreign := Place{Unit: 500, Units: 10, Ver: 3}
	h.Free(foreign)
	if f := mustAlloc(t, h, 10); f.Unit != foreign.Unit {
		t.Fatalf("got %v, want the foreign place", f)
	}
	for _, bad := range []Place{
		{Unit: p.Unit, Units: 9},
		{Unit: p.Unit, Units: 11},
		{Unit: p.Unit, Units: 20}, // two places
		{Unit: p.Unit + 1, Units: 9},
		{Unit: p.Unit + 1, Units: 10},
		{Unit: p.Unit, Units: 10, Ver: 1024},
		{Unit: p.Unit},
		{Unit: 150, Units: 10},            // free
		{Unit: 120, Units: 80},            // all that is free
		{Unit: 500, Units: 10},            // another's, in use here
		{Unit: 300, Units: 10},            // between
		{Unit: 0, Units: 100},             // before
		{Unit: ExtentUnits, Units: 10},    // of an extent not known
		{Unit: math.MaxUint32, Units: 10}, // wraps
		{Unit: 5, Units: math.MaxUint32},
	} {
		before := h.Stats()
		before.RefusedPlaces++
		if h.Receive(bad) || h.Stats() != before {
			t.Errorf("%v: received, or %+v, want %+v", bad, h.Stats(), before)
		}
	}
	mustCheck(t, h)
	if p.Ver = 700; !h.Receive(p) || h.Receive(p) {
		t.Fatalf("%v is not received once", p)
	}
	mustCheck(t, h)
	if s := h.Stats(); s.Free != 90 || s.InUse != 10 {
		t.Fatalf("%+v", s)
	}
	if got := mustAlloc(t, h, 10); got != p {
		t.Fatalf("the next life of %v is %v", p, got)
	}
	h.Free(p)
	h.Free(q)
	if own, _ := h.Drain(); !slices.Equal(own, []Run{{Unit: 100, Units: 20}, {Unit: 120, Units: 80, Fresh: true}}) {
		t.Fatalf("drained %v: what came home was linked", own)
	}
}

// A heap is never asked for more runs than it gives: what is beyond is kept, not lost.
func TestTakeOwnRuns(t *testing.T) {
	h := New()
	mustAdd(t, h, 0, 100)
	var held []Place
	for range 10 {
		held = append(held, mustAlloc(t, h, 10))
	}
	for i, p := range held {
		if i%2 == 0 {
			h.Free(p)
		} else {
			h.Unuse(p)
		}
	}
	got := h.TakeOwn(1000, 1, 3)
	if want := []Run{{70, 10, true}, {80, 10, false}, {90, 10, true}}; !slices.Equal(got, want) {
		t.Fatalf("took %v, want %v", got, want)
	}
	mustCheck(t, h)
	if s := h.Stats(); s.Granted != 70 || s.Free != 70 {
		t.Fatalf("%+v", s)
	}
}

// model is the heap as its documentation describes it, a unit at a time.
type model struct {
	units map[uint32]modelUnit // own memory
	away  map[uint32]Place     // free foreign places; Ver is the next life's
	held  []Place              // with the caller
	stats Stats
}

type modelUnit struct {
	free, linked bool
	next         uint16 // as a start unit
}

func newModel() *model {
	return &model{units: map[uint32]modelUnit{}, away: map[uint32]Place{}}
}

func overlap(a, b Place) bool {
	return uint64(a.Unit) < uint64(b.Unit)+uint64(b.Units) && uint64(b.Unit) < uint64(a.Unit)+uint64(a.Units)
}

// own counts the units of p that are own memory.
func (m *model) own(p Place) (n uint32) {
	for i := range p.Units {
		if _, ok := m.units[p.Unit+i]; ok {
			n++
		}
	}
	return n
}

func (m *model) onAway(p Place) bool {
	for _, f := range m.away {
		if overlap(p, f) {
			return true
		}
	}
	return false
}

func (m *model) onHeld(p Place) bool {
	return slices.ContainsFunc(m.held, func(q Place) bool { return overlap(p, q) })
}

func crosses(p Place) bool {
	return uint64(p.Unit%ExtentUnits)+uint64(p.Units) > ExtentUnits
}

func (m *model) addRun(unit, units uint32) error {
	p := Place{Unit: unit, Units: units}
	switch {
	case units == 0 || crosses(p):
		return ErrRunBounds
	case m.own(p) > 0 || m.onAway(p):
		return ErrRunOverlap
	}
	for i := range units {
		m.units[unit+i] = modelUnit{free: true}
	}
	m.stats.Granted += uint64(units)
	m.stats.Free += uint64(units)
	return nil
}

// allocated checks what an Alloc of units units returned.
func (m *model) allocated(units uint32, p Place, ok bool) error {
	if !ok {
		for _, f := range m.away {
			if f.Units == units {
				return fmt.Errorf("missed foreign %v", f)
			}
		}
		run := uint32(0)
		last := uint32(0)
		for _, u := range slices.Sorted(maps.Keys(m.units)) {
			if !m.units[u].free {
				run = 0
				continue
			}
			if run == 0 || u != last+1 || u%ExtentUnits == 0 {
				run = 0
			}
			run++
			last = u
			if run >= units {
				return fmt.Errorf("missed %d free units up to %d", units, u)
			}
		}
		return nil
	}
	if p.Units != units {
		return fmt.Errorf("%v is not of %d units", p, units)
	}
	if m.onHeld(p) {
		return fmt.Errorf("%v overlaps a place in use", p)
	}
	if f, ok := m.away[p.Unit]; ok {
		if f != p {
			return fmt.Errorf("foreign %v reused as %v", f, p)
		}
		delete(m.away, p.Unit)
		m.stats.ForeignFree -= uint64(units)
	} else {
		if crosses(p) || m.units[p.Unit].next != p.Ver {
			return fmt.Errorf("%v crosses, or should carry %d", p, m.units[p.Unit].next)
		}
		for i := range units {
			u, ok := m.units[p.Unit+i]
			if !ok || !u.free {
				return fmt.Errorf("%v: unit %d is not free own memory", p, p.Unit+i)
			}
			u.free = false
			m.units[p.Unit+i] = u
		}
		m.stats.Free -= uint64(units)
	}
	m.held = append(m.held, p)
	return nil
}

// giveBack mirrors Free and Unuse.
func (m *model) giveBack(p Place, linked bool) {
	next := p.Ver
	if linked {
		next = (p.Ver + 1) % 1024
	}
	own := uint32(0)
	if p.Units <= MaxUnits {
		own = m.own(p)
	}
	at := slices.IndexFunc(m.held, func(q Place) bool { return q.Unit == p.Unit && q.Units == p.Units })
	switch {
	case p.Units == 0 || p.Units > MaxUnits || crosses(p) || p.Ver > 1023,
		own > 0 && (at < 0 || own < p.Units),
		own == 0 && m.onAway(p):
		m.stats.RefusedPlaces++
		return
	case own == 0:
		m.away[p.Unit] = Place{p.Unit, p.Units, next}
		m.stats.ForeignFree += uint64(p.Units)
	default:
		first := m.units[p.Unit]
		linked = linked || first.next != next
		for i := range p.Units {
			u := m.units[p.Unit+i]
			u.free = true
			u.linked = u.linked || linked
			m.units[p.Unit+i] = u
		}
		first = m.units[p.Unit]
		first.next = next
		m.units[p.Unit] = first
		m.stats.Free += uint64(p.Units)
	}
	if at >= 0 {
		m.held = slices.Delete(m.held, at, at+1)
	}
}

// tookOwn checks that runs are free own memory, as long as can be, and takes them away.
func (m *model) tookOwn(runs []Run) error {
	for i, r := range runs {
		if r.Units == 0 || crosses(Place{Unit: r.Unit, Units: r.Units}) {
			return fmt.Errorf("%+v crosses", r)
		}
		if i > 0 {
			q := runs[i-1]
			switch end := uint64(q.Unit) + uint64(q.Units); {
			case uint64(r.Unit) < end:
				return fmt.Errorf("%+v before %+v", q, r)
			case q.Fresh == r.Fresh && uint64(r.Unit) == end && r.Unit%ExtentUnits != 0:
				return fmt.Errorf("%+v and %+v are not merged", q, r)
			}
		}
		for u := r.Unit; u != r.Unit+r.Units; u++ {
			if w, ok := m.units[u]; !ok || !w.free || w.linked == r.Fresh {
				return fmt.Errorf("%+v: unit %d is %+v", r, u, w)
			}
			delete(m.units, u)
			m.stats.Free--
			m.stats.Granted--
		}
	}
	return nil
}

// tookForeign checks that list is free foreign places, ascending, and takes them away.
func (m *model) tookForeign(list []Place) error {
	for i, p := range list {
		if f, ok := m.away[p.Unit]; !ok || f != p || i > 0 && list[i-1].Unit >= p.Unit {
			return fmt.Errorf("%v: free at %d is %v, %v", list, p.Unit, f, ok)
		}
		delete(m.away, p.Unit)
		m.stats.ForeignFree -= uint64(p.Units)
	}
	return nil
}

// drained checks that what was drained is all that is free, once, as long as can be.
func (m *model) drained(runs []Run, foreign []Place) error {
	if err := errors.Join(m.tookOwn(runs), m.tookForeign(foreign)); err != nil {
		return err
	}
	if m.stats.Free != 0 || m.stats.ForeignFree != 0 {
		return fmt.Errorf("not drained: %+v", m.stats)
	}
	return nil
}

// freeBlocks are the stretches of free own memory inside extents, the longest first.
func (m *model) freeBlocks() (out []Run) {
	for _, u := range slices.Sorted(maps.Keys(m.units)) {
		if !m.units[u].free {
			continue
		}
		if n := len(out); n > 0 && out[n-1].Unit+out[n-1].Units == u && u%ExtentUnits != 0 {
			out[n-1].Units++
		} else {
			out = append(out, Run{Unit: u, Units: 1})
		}
	}
	slices.SortStableFunc(out, func(a, b Run) int { return int(b.Units) - int(a.Units) })
	return out
}

// takeOwn are the units that TakeOwn is to remove, and in how many runs.
func (m *model) takeOwn(units uint64, least uint32, most int) (want map[uint32]bool, runs int) {
	want = map[uint32]bool{}
	for _, x := range m.freeBlocks() {
		if x.Units < least || units == 0 || runs >= most {
			break
		}
		n := x.Units
		if uint64(n) > units { // its end is enough
			n = max(uint32(units), least)
		}
		taken := uint64(0)
		for i := range n {
			u := x.Unit + x.Units - 1 - i
			if i == 0 || m.units[u].linked != m.units[u+1].linked {
				if runs == most {
					break
				}
				runs++
			}
			want[u] = true
			taken++
		}
		units -= min(units, taken)
	}
	return want, runs
}

// receive mirrors Receive.
func (m *model) receive(p Place) bool {
	at := slices.IndexFunc(m.held, func(q Place) bool { return q.Unit == p.Unit && q.Units == p.Units })
	if at < 0 || m.own(m.held[at]) == 0 || p.Ver > 1023 {
		m.stats.RefusedPlaces++
		return false
	}
	for i := range p.Units {
		m.units[p.Unit+i] = modelUnit{free: true, linked: true, next: m.units[p.Unit+i].next}
	}
	first := m.units[p.Unit]
	first.next = p.Ver
	m.units[p.Unit] = first
	m.stats.Free += uint64(p.Units)
	m.held = slices.Delete(m.held, at, at+1)
	return true
}

// forget mirrors Forget.
func (m *model) forget(extent uint32) (free uint64) {
	for u, x := range m.units {
		if u/ExtentUnits == extent {
			if x.free {
				m.stats.Free--
				free++
			}
			m.stats.Granted--
			delete(m.units, u)
		}
	}
	for u, p := range m.away {
		if u/ExtentUnits == extent {
			m.stats.ForeignFree -= uint64(p.Units)
			free += uint64(p.Units)
			delete(m.away, u)
		}
	}
	m.held = slices.DeleteFunc(m.held, func(p Place) bool { return p.Unit/ExtentUnits == extent })
	return free
}

// The units the property tests use: around a boundary, and the very last.
func drawUnit(t *rapid.T) uint32 {
	return rapid.OneOf(
		rapid.Uint32Range(ExtentUnits-200, ExtentUnits+200),
		rapid.Uint32Range(math.MaxUint32-200, math.MaxUint32),
	).Draw(t, "unit")
}

func drawUnits(t *rapid.T) uint32 {
	return rapid.OneOf(rapid.Uint32Range(1, 6), rapid.Uint32Range(1, 150)).Draw(t, "units")
}

func TestHeapModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h, m := New(), newModel()
		fail := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		pick := func(t *rapid.T) Place {
			if len(m.held) == 0 {
				t.Skip("nothing held")
			}
			return rapid.SampledFrom(m.held).Draw(t, "place")
		}
		give := func(p Place, linked bool) {
			if linked {
				h.Free(p)
			} else {
				h.Unuse(p)
			}
			m.giveBack(p, linked)
		}
		t.Repeat(map[string]func(*rapid.T){
			"addRun": func(t *rapid.T) {
				unit, units := drawUnit(t), rapid.Uint32Range(0, 250).Draw(t, "units")
				for _, p := range m.held {
					if m.own(p) == 0 && overlap(p, Place{Unit: unit, Units: units}) {
						t.Skip("the directory does not grant what a session holds")
					}
				}
				got, want := h.AddRun(unit, units), m.addRun(unit, units)
				if !errors.Is(got, want) {
					t.Fatalf("run %d+%d: %v, want %v", unit, units, got, want)
				}
			},
			"alloc": func(t *rapid.T) {
				units := drawUnits(t)
				p, ok := h.Alloc(units)
				fail(m.allocated(units, p, ok))
			},
			"allocBatch": func(t *rapid.T) {
				units := drawUnits(t)
				dst := make([]Place, rapid.IntRange(1, 8).Draw(t, "n"))
				n := h.AllocBatch(units, dst)
				for _, p := range dst[:n] {
					fail(m.allocated(units, p, true))
				}
				if n < len(dst) {
					fail(m.allocated(units, Place{}, false))
				}
			},
			"free":  func(t *rapid.T) { give(pick(t), true) },
			"unuse": func(t *rapid.T) { give(pick(t), false) },
			// Other sessions reused the place before this one unlinked it again.
			"freeLater": func(t *rapid.T) {
				p := pick(t)
				p.Ver = (p.Ver + rapid.Uint16Range(1, 1022).Draw(t, "lives")) % 1024
				give(p, true)
			},
			"freeForeign": func(t *rapid.T) {
				p := Place{drawUnit(t), drawUnits(t), rapid.Uint16Range(0, 1023).Draw(t, "ver")}
				if m.own(p) == 0 && m.onHeld(p) {
					t.Skip("two sessions' places do not overlap")
				}
				give(p, true)
			},
			"freeDamaged": func(t *rapid.T) {
				p := Place{drawUnit(t), rapid.Uint32().Draw(t, "units"), rapid.Uint16().Draw(t, "ver")}
				if p.Units > 1<<10 && p.Units <= MaxUnits {
					t.Skip("slow in the model")
				}
				if p.Units <= MaxUnits && m.own(p) == 0 && m.onHeld(p) {
					t.Skip("two sessions' places do not overlap")
				}
				give(p, rapid.Bool().Draw(t, "linked"))
			},
			"drain": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "rarely") == 0 {
					fail(m.drained(h.Drain()))
				}
			},
			"takeOwn": func(t *rapid.T) {
				units := rapid.OneOf(rapid.Uint64Range(0, 300), rapid.Just(uint64(math.MaxUint64))).Draw(t, "units")
				least, most := rapid.Uint32Range(1, 40).Draw(t, "least"), rapid.IntRange(0, 4).Draw(t, "runs")
				want, n := m.takeOwn(units, least, most)
				got := h.TakeOwn(units, least, most)
				for _, r := range got {
					for u := r.Unit; u != r.Unit+r.Units; u++ {
						if !want[u] {
							t.Fatalf("%d units in at most %d runs, none shorter than %d: took %v of %v", units, most,
								least, got, m.freeBlocks())
						}
						delete(want, u)
					}
				}
				if len(want) > 0 || len(got) != n {
					t.Fatalf("%d units in at most %d runs, none shorter than %d: took %v of %v, not %v", units, most,
						least, got, m.freeBlocks(), want)
				}
				fail(m.tookOwn(got))
			},
			"takeForeign": func(t *rapid.T) {
				places, units := rapid.IntRange(0, 4).Draw(t, "places"), rapid.Uint64Range(0, 40).Draw(t, "units")
				var sizes, got []uint32
				for _, p := range m.away {
					sizes = append(sizes, p.Units)
				}
				slices.Sort(sizes)
				slices.Reverse(sizes)
				n, sum := 0, uint64(0)
				for n < min(len(sizes), places) && sum < units {
					sum += uint64(sizes[n])
					n++
				}
				list := h.TakeForeign(places, units)
				for _, p := range list {
					got = append(got, p.Units)
				}
				slices.Sort(got)
				slices.Reverse(got)
				if !slices.Equal(got, sizes[:n]) {
					t.Fatalf("%d units in at most %d places: took %v of lengths %v", units, places, list, sizes)
				}
				fail(m.tookForeign(list))
			},
			// Another session unlinked the record, perhaps after many lives.
			"receive": func(t *rapid.T) {
				p := pick(t)
				p.Ver = rapid.Uint16Range(0, 1023).Draw(t, "ver")
				if got, want := h.Receive(p), m.receive(p); got != want {
					t.Fatalf("received %v: %v, want %v", p, got, want)
				}
			},
			"receiveDamaged": func(t *rapid.T) {
				p := Place{drawUnit(t), rapid.OneOf(rapid.Uint32Range(0, 6), rapid.Uint32()).Draw(t, "units"),
					rapid.Uint16().Draw(t, "ver")}
				if len(m.held) > 0 && rapid.Bool().Draw(t, "near") {
					p = rapid.SampledFrom(m.held).Draw(t, "place")
					switch rapid.IntRange(0, 3).Draw(t, "damage") {
					case 0:
						p.Unit++
					case 1:
						p.Units++
					case 2:
						p.Units--
					case 3:
						p.Ver |= 1 << 10
					}
				}
				if got, want := h.Receive(p), m.receive(p); got != want {
					t.Fatalf("received %v: %v, want %v", p, got, want)
				}
			},
			"forget": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "rarely") > 0 {
					return
				}
				extent := rapid.SampledFrom([]uint32{0, 1, 5, math.MaxUint32 / ExtentUnits}).Draw(t, "extent")
				if got, want := h.Forget(extent), m.forget(extent); got != want {
					t.Fatalf("forgot %d free units of extent %d, want %d", got, extent, want)
				}
			},
			"": func(t *rapid.T) {
				m.stats.InUse = m.stats.Granted - m.stats.Free
				if got := h.Stats(); got != m.stats {
					t.Fatalf("%+v, want %+v", got, m.stats)
				}
				fail(h.Check())
			},
		})
		for len(m.held) > 0 {
			give(m.held[0], true)
		}
		fail(h.Check())
		fail(m.drained(h.Drain()))
		fail(h.Check())
	})
}

// When all has come back, a run is one block again, whatever happened in it.
func TestCoalesce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := New()
		const units = 3000
		for _, cut := range [][2]uint32{{0, 1000}, {2000, 1000}, {1000, 1000}} {
			if err := h.AddRun(64+cut[0], cut[1]); err != nil {
				t.Fatal(err)
			}
		}
		var held []Place
		for _, n := range rapid.SliceOfN(rapid.Uint32Range(1, 300), 1, 100).Draw(t, "sizes") {
			if p, ok := h.Alloc(n); ok {
				held = append(held, p)
			}
		}
		for _, p := range rapid.Permutation(held).Draw(t, "order") {
			h.Free(p)
		}
		p, ok := h.Alloc(units)
		if !ok || p.Unit != 64 {
			t.Fatalf("the whole run: %v, %v", p, ok)
		}
		h.Unuse(p)
		sum := uint32(0)
		runs, foreign := h.Drain()
		if len(foreign) > 0 {
			t.Fatalf("foreign %v", foreign)
		}
		for i, r := range runs {
			if r.Unit != 64+sum {
				t.Fatalf("run %d starts at %d", i, r.Unit)
			}
			sum += r.Units
		}
		if sum != units {
			t.Fatalf("drained %d units", sum)
		}
	})
}

// Blocks start where the model says, and each start finds its neighbours.
func TestStarts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newTiles()
		want := []uint32{0}
		edges := rapid.SampledFrom([]uint32{0, 1, 63, 64, 4095, 4096, 4097, 8192, 131072, ExtentUnits - 64,
			ExtentUnits - 1})
		unit := rapid.OneOf(edges, rapid.Uint32Range(0, ExtentUnits-1))
		for range rapid.IntRange(1, 60).Draw(t, "n") {
			i := unit.Draw(t, "unit")
			at, found := slices.BinarySearch(want, i)
			switch {
			case !found:
				s.start(i)
				want = slices.Insert(want, at, i)
			case i != 0:
				s.drop(i)
				want = slices.Delete(want, at, at+1)
			}
			j := unit.Draw(t, "probe")
			at, found = slices.BinarySearch(want, j)
			block := j
			if !found {
				block, at = want[at-1], at-1
			}
			end := uint32(ExtentUnits)
			if at+1 < len(want) {
				end = want[at+1]
			}
			if s.isStart(j) != found || s.end(j) != end || s.block(j) != block {
				t.Fatalf("%d in %v: %v %d %d", j, want, s.isStart(j), s.end(j), s.block(j))
			}
			if err := s.check(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Short runs in many extents, as come from a store that others have used, take a few KiB each: an extent takes memory
// by what is known of it.
func TestScatteredRuns(t *testing.T) {
	const runs = 256
	h := New()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i := range uint32(runs) {
		mustAdd(t, h, i*ExtentUnits+500*i, 4)
	}
	runtime.ReadMemStats(&after)
	if got := (after.TotalAlloc - before.TotalAlloc) / runs; got > 8<<10 {
		t.Errorf("%d bytes for each run", got)
	}
	mustCheck(t, h)
}

// A block that is cut and merged again and again, above another one in its bin, does not fill the bin's heap with what
// it was.
func TestOldEntries(t *testing.T) {
	h := New()
	mustAdd(t, h, 0, 1)
	mustAdd(t, h, 10, 3)
	row, col := binOf(1)
	b := &h.mu.bins.all[row*cols+col]
	for range 1000 {
		p := mustAlloc(t, h, 2)
		if p.Unit != 10 || b.blocks != 2 {
			t.Fatalf("allocated %v and left %d single units, want 2", p, b.blocks)
		}
		h.Unuse(p)
		if len(b.heap) > 2*2+maxOld {
			t.Fatalf("%d entries for a block", len(b.heap))
		}
	}
	mustCheck(t, h)
	for _, want := range []uint32{0, 10, 11, 12} {
		if p := mustAlloc(t, h, 1); p.Unit != want {
			t.Errorf("allocated %v, want unit %d", p, want)
		}
	}
	if p, ok := h.Alloc(1); ok {
		t.Errorf("allocated %v twice", p)
	}
}

// Check is only worth something if it notices.
func TestCheckNotices(t *testing.T) {
	for name, damage := range map[string]func(*space){
		"free":    func(s *space) { s.free-- },
		"start":   func(s *space) { s.extents[0].tiles.start(500) },
		"summary": func(s *space) { s.extents[0].tiles.l1[0] = 0 },
		"kind":    func(s *space) { s.extents[0].tiles.setFree(3, true) },
		"ver":     func(s *space) { s.extents[0].tiles.page[0].next = &[pageUnits]uint16{700: 3} },
		"bin":     func(s *space) { s.remove(10, 10) },
		"twice":   func(s *space) { s.insert(10, 10) },
		"foreign": func(s *space) { s.foreign[3][0].Unit++ },
		"held twice": func(s *space) {
			s.foreign[3] = append(s.foreign[3], s.foreign[3][0])
			s.foreignFree += 3
		},
		"away":       func(s *space) { s.extents[0].markAway(2000, 2001, true) },
		"foreignOwn": func(s *space) { s.extents[0].markAway(5, 6, true) },
	} {
		h := New()
		mustAdd(t, h, 0, 1000)
		a := mustAlloc(t, h, 10)
		b := mustAlloc(t, h, 10)
		_ = mustAlloc(t, h, 10)
		h.Free(b)
		h.Free(Place{Unit: 1500, Units: 3})
		mustCheck(t, h)
		if a.Unit != 0 || b.Unit != 10 {
			t.Fatalf("the test expects ascending places, not %v %v", a, b)
		}
		damage(&h.mu.space)
		if h.Check() == nil {
			t.Errorf("%s: not noticed", name)
		}
	}
}
