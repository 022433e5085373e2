package heap

import "testing"

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

func TestAllocForeign(t *testing.T) {
	h := New()
	if err := h.AddRun(0, 64); err != nil {
		t.Fatal(err)
	}
	for i, units := range []uint32{3, 9, 12, 30} {
		h.Free(Place{Unit: 1000 + 100*uint32(i), Units: units, Ver: 7})
	}
	for _, c := range []struct{ least, most, want uint32 }{{4, 8, 0}, {4, 9, 9}, {4, 40, 12}, {31, 100, 0}, {20, 100_000, 30}, {1, 3, 3}, {1, 100, 0}} {
		p, ok := h.AllocForeign(c.least, c.most)
		if p.Units != c.want || ok != (c.want != 0) || ok && (p.Unit < 1000 || p.Ver != 8) {
			t.Errorf("%d to %d units: %v, %v; want %d", c.least, c.most, p, ok, c.want)
		}
	}
	if err := h.Check(); err != nil {
		t.Fatal(err)
	}
}
