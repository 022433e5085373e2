package lead

import "testing"

// TestTroubleEnds: a process of the memory node is heard, nobody repeats it for a minute, or the memory node is gone.
func TestTroubleEnds(t *testing.T) {
	w := newWorld(t)
	m1, m2 := w.keeper("m1", 1), w.keeper("m2", 1)
	w.l.Troubled(m1, "workers die", w.now)
	w.l.Troubled(m2, "workers die, too", w.now)
	w.l.Heartbeat(w.s, w.now, m1, 1, nil)
	if a, b := w.l.Trouble(m1, w.now), w.l.Trouble(m2, w.now); a != "" || b != "workers die, too" {
		t.Errorf("when m1 was heard: %q, %q", a, b)
	}
	if last := w.l.Trouble(m2, w.now+troubleTime-1); last == "" || w.l.Trouble(m2, w.now+troubleTime) != "" {
		t.Errorf("a minute before and after its end: %q, %q", last, w.l.Trouble(m2, w.now+troubleTime))
	}
	w.l.Troubled(99, "of nobody", w.now)
	w.l.forgetTroubles(w.s, w.now)
	if n := len(w.l.troubles); n != 1 {
		t.Errorf("%d are remembered, want that of m2", n)
	}
	w.l.forgetTroubles(w.s, w.now+troubleTime)
	if n := len(w.l.troubles); n != 0 {
		t.Errorf("%d are remembered after a minute", n)
	}
}
