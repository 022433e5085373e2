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
