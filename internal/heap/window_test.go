package heap

import (
	"slices"
	"testing"
)

func TestWindow(t *testing.T) {
	h := New()
	if _, ok := h.Window(8); ok {
		t.Fatal("a window of nothing")
	}
	if err := h.AddRun(100, 64); err != nil {
		t.Fatal(err)
	}
	var ps []Place
	for range 16 {
		p, ok := h.Alloc(4)
		if !ok {
			t.Fatal("no place")
		}
		ps = append(ps, p)
	}
	if !h.Owns(100) || !h.Owns(163) || h.Owns(99) || h.Owns(164) || h.Owns(1<<30) {
		t.Fatal("Owns")
	}
	if _, ok := h.Window(65); ok {
		t.Fatal("a window larger than the run")
	}
	// Two of the second four places are free: most of all windows of 16 units.
	for _, i := range []int{5, 7, 12} {
		h.Free(ps[i])
	}
	w, ok := h.Window(16)
	if !ok || w != ps[4].Unit {
		t.Fatalf("window at %d, want %d", w, ps[4].Unit)
	}
	// Once the others have gone it is one place.
	h.Free(ps[4])
	h.Free(ps[6])
	if p, ok := h.Alloc(16); !ok || p.Unit != w {
		t.Fatalf("place %v, %v", p, ok)
	}
	if err := h.Check(); err != nil {
		t.Fatal(err)
	}
}

func TestAllocFit(t *testing.T) {
	h := New()
	if err := h.AddRun(0, 64); err != nil {
		t.Fatal(err)
	}
	// Own free blocks of 6 and 40 units, foreign places of 9, 12 and 30.
	var own [4]Place
	for i, units := range []uint32{6, 8, 40, 10} {
		own[i], _ = h.Alloc(units)
	}
	h.Free(own[0])
	h.Free(own[2])
	for i, units := range []uint32{9, 12, 30} {
		h.Free(Place{Unit: 1000 + 100*uint32(i), Units: units, Ver: 7})
	}
	for _, c := range []struct {
		units, whole, most, want uint32
		foreign                  bool
	}{
		{5, 6, 10, 6, false},    // whole
		{8, 10, 16, 9, true},    // rather than a piece of 40
		{10, 11, 20, 10, false}, // a piece of it; 12 is longer than whole
		{29, 33, 58, 30, true},  // as good as what is left of it
		{25, 28, 50, 25, false},
		{20, 25, 40, 0, false},
		{4, 5, 8, 5, false},
		{1, 2, 12, 12, true}, // nothing else
		{1, 2, 100, 0, false},
	} {
		p, ok := h.AllocFit(c.units, c.whole, c.most)
		if p.Units != c.want || ok != (c.want != 0) || ok && (p.Unit >= 1000) != c.foreign {
			t.Errorf("%d units: %v, %v; want %d", c.units, p, ok, c.want)
		}
	}
	// Of lengths that no slot word can tell, less is taken.
	for size, want := range map[uint32]uint32{31: 31, 33: 32, 35: 34, 62: 62, 63: 62, 64: 64, 67: 64, 1100: 1088} {
		h := New()
		if err := h.AddRun(0, size); err != nil {
			t.Fatal(err)
		}
		if p, ok := h.AllocFit(want, size, size); !ok || p.Units != want {
			t.Errorf("a block of %d units: %v, %v", size, p, ok)
		}
	}
	if err := h.Check(); err != nil {
		t.Fatal(err)
	}
}

// A place that is given back need be neither own nor of a length that there is enough of.
func TestWelcome(t *testing.T) {
	h := New()
	if err := h.AddRun(0, 64); err != nil {
		t.Fatal(err)
	}
	for i := range uint32(3) {
		h.Free(Place{Unit: 1000 + 10*i, Units: 8})
	}
	ps := []Place{{Unit: 10, Units: 8}, {Unit: 2000, Units: 8}, {Unit: 2100, Units: 9}, {Unit: 70, Units: 8},
		{Unit: 63, Units: 1}, {Unit: 1 << 30, Units: 8}}
	for stock, want := range map[uint64][]int{0: {0, 4}, 24: {0, 2, 4}, 25: {0, 1, 2, 3, 4, 5}} {
		if got := h.Welcome(ps, stock, nil); !slices.Equal(got, want) {
			t.Errorf("stock of %d: %v are welcome, want %v", stock, got, want)
		}
	}
}
