package lead

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A count begins where memory is lost, or may be and somebody lacks it.
func TestReclaim(t *testing.T) {
	say := func(w *world, a uint32, h []*dirpb.Held) { w.say(Renewal{Session: a, Held: h}) }
	for name, tc := range map[string]struct {
		provoke func(w *world, a, b uint32, all uint64)
		short   bool
		after   time.Duration // not before, and within 2 s of it; 0: at once
		reason  string        // "": never
	}{
		"full": {func(*world, uint32, uint32, uint64) {}, true, 0, ""},
		"idle": {func(*world, uint32, uint32, uint64) {}, false, 0, ""},
		"all in limbo": {func(w *world, a, b uint32, all uint64) {
			say(w, a, held(all, 0, 0, all/2, int64(all-all/2)))
		}, true, 0, ""},
		"dirty": {func(w *world, a, b uint32, all uint64) {
			w.leak(w.open(1))
		}, false, testOptions.ScrubInterval, ReasonDirty},
		"dirty, short": {func(w *world, a, b uint32, all uint64) { w.leak(w.open(1)) }, true, 0, ReasonDirty},
		"new term": {func(w *world, a, b uint32, all uint64) {
			w.elect()
			clear(w.numbers)
		}, false, testOptions.ScrubInterval, ReasonTerm},
		"new term,short": {func(w *world, a, b uint32, all uint64) {
			w.elect()
			clear(w.numbers)
			w.ack()
		}, true, 0, ReasonTerm},
		"lost": {func(w *world, a, b uint32, all uint64) {
			say(w, a, held(all, 0, 0, 0, int64(all-all/10)))
		}, false, testOptions.ScrubInterval, ReasonLost},
		"little lost": {func(w *world, a, b uint32, all uint64) {
			say(w, a, held(all, 0, 0, 0, int64(all-all/50)))
		}, false, 0, ""},
		"lost, short": {func(w *world, a, b uint32, all uint64) {
			say(w, a, held(all, 0, 0, 0, int64(all-all/10)))
		}, true, retryShort, ReasonShort},
		"little, short": {func(w *world, a, b uint32, all uint64) {
			say(w, a, held(all, 0, 0, 0, int64(all-all/30)))
		}, true, retryShort, ReasonShort},
		"less, short": {func(w *world, a, b uint32, all uint64) {
			say(w, a, held(all, 0, 0, 0, int64(all-all/40)))
		}, true, 0, ""},
		"in pieces": {func(w *world, a, b uint32, all uint64) {
			say(w, a, held(all, 70_000, 0, 0, int64(all-70_000)))
		}, true, retryShort, ReasonShort},
	} {
		t.Run(name, func(t *testing.T) {
			w, a, b, _, all := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
			tc.provoke(w, a, b, all)
			begun := w.now
			for w.now < begun+testOptions.ScrubInterval+10*time.Second && len(w.s.Jobs()) == 0 {
				w.wait(200 * time.Millisecond)
				if tc.short {
					w.l.Short(w.s, 1, 1000, w.now)
				}
				w.ack()
				w.step()
			}
			took := w.now - begun
			var j *dirpb.Job
			if jobs := w.s.Jobs(); len(jobs) > 0 {
				j = jobs[0]
			}
			if j.GetReason() != tc.reason || j != nil && (j.Kind != dirpb.JobKind_JOB_SCRUB || !j.Count) {
				t.Fatalf("%v after %v, want %q", j, took, tc.reason)
			}
			slack := 2 * time.Second
			if tc.after == lostWindow {
				slack += 2 * lostWindow // as its windows lie
			}
			if tc.reason != "" && (took < tc.after-2*accountEvery || took > tc.after+slack) {
				t.Fatalf("%q after %v, want %v", j.Reason, took, tc.after)
			}
		})
	}
	// In a cache sessions evict and link all the time: what is lost has to be so for a while.
	w, a, _, _, all := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_CACHE)
	lost := func(units uint64) {
		w.wait(time.Second)
		w.l.Short(w.s, 1, 1000, w.now)
		say(w, a, held(all, 0, 0, 0, int64(all-units)))
		w.ack()
		w.step()
	}
	for i := range 30 {
		if lost(all / 4 * uint64(i%2)); len(w.s.Jobs()) > 0 {
			t.Fatalf("%v, though nothing was lost a moment ago", w.s.Jobs()[0])
		}
	}
	for i := 0; len(w.s.Jobs()) == 0 && i < 60; i++ {
		lost(all / 4)
	}
	if jobs := w.s.Jobs(); len(jobs) != 1 || jobs[0].Reason != ReasonShort {
		t.Fatalf("%v, with a quarter lost", jobs)
	}
	// An interval of 0: nothing by itself, whatever is short.
	w, _, _, _, _ = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	w.l.opts.ScrubInterval = 0
	w.leak(w.open(1))
	w.l.Short(w.s, 1, 1000, w.now)
	w.ack()
	w.want()
}

// A session that links while a count goes on, and says so afterwards, would have what is lost pass for
// linked. A session that lacks memory is not told then that there is none, and another count follows.
func TestDoubtedCount(t *testing.T) {
	for name, tc := range map[string]struct {
		before, during, after int64 // what the session says that it has linked, of 8 parts of all
		doubted               bool
	}{
		"at rest":              {8, 8, 8, false},
		"before, not yet said": {2, 2, 8, true},
		"meanwhile":            {2, 8, 8, true},
		"unlinks":              {8, 8, 4, true},
	} {
		t.Run(name, func(t *testing.T) {
			w, a, b, _, all := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
			say := func(parts int64) {
				w.say(Renewal{Session: a, Held: held(all, 0, 0, 0, parts*int64(all)/8)})
				w.l.Short(w.s, 1, 1000, w.now)
			}
			coming := func() bool { return w.l.Coming(w.s, 1, 1, 1000, w.now) > 0 }
			say(tc.before)
			w.leak(w.open(1))
			w.ack()
			w.step()
			j := w.claim(b)
			if j.GetReason() != ReasonDirty {
				t.Fatalf("%v is under way", j)
			}
			say(tc.during)
			var linked []uint32
			for _, e := range w.s.Extents(1) {
				linked = append(linked, uint32(e.Granted))
			}
			w.finish(b, j, linked...)
			w.now += accountEvery
			say(tc.after)
			w.now += accountEvery
			if got := coming(); got != tc.doubted {
				t.Errorf("memory is on its way: %v", got)
			}
			w.now += retryShort
			say(tc.after)
			w.ack()
			w.step()
			if again := w.claim(b); (again.GetReason() == ReasonShort) != tc.doubted {
				t.Fatalf("%v is under way", again)
			} else if again != nil {
				w.finish(b, again, linked...)
				w.now += accountEvery
				say(tc.after)
			}
			w.now += accountEvery
			if coming() {
				t.Error("memory is on its way after a count at which nobody worked")
			}
		})
	}
}

// Of what a count found, the extents are recalled that give most, in place, as many as are
// needed; where what is free lies in pieces, one is emptied.
func TestScrubbed(t *testing.T) {
	scrub := func(w *world, a uint32, reason string, linked ...uint32) []*fsmpb.StartJob {
		w.t.Helper()
		w.ack()
		w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: reason, Count: true})
		w.finish(a, w.claim(a), linked...)
		return w.l.queue
	}
	const e = layout.ExtentUnits
	// a has it all, and says that half of extent 1 and a third of extent 2 are linked, and
	// nothing is free.
	w, a, _, _, all := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	q := scrub(w, a, ReasonLost, uint32(e-w.s.Heap(1).Start), e/2, e/3, uint32(w.s.Usage()[0].GrantedUnits-all)+e)
	if len(q) != 1 || !slices.Equal(q[0].Extents, []uint32{1, 2}) || !q[0].InPlace {
		t.Fatalf("queued %v", q)
	}
	// Where somebody lacks some, too: all that is lost.
	w, a, _, _, _ = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	w.l.Short(w.s, 1, 1000, w.now)
	if q = scrub(w, a, ReasonShort, uint32(e-w.s.Heap(1).Start), e/2, e/3, e); len(q) != 1 ||
		!slices.Equal(q[0].Extents, []uint32{1, 2}) || !q[0].InPlace {
		t.Fatalf("queued %v", q)
	}
	// Places that are free with their home, or in limbo there, are nobody else's to find.
	w, a, _, _, all = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	w.say(Renewal{Session: a, Held: held(all, all/2, 0, all-all/2, 0)})
	if q = scrub(w, a, ReasonLost); len(q) != 0 {
		t.Fatalf("queued %v", q)
	}
	// A recall has what waits for reclaim epochs wait anew, which matters if somebody waits for it. Of extent 1 a
	// quarter waits and less is lost, of extent 2 more.
	for _, tc := range []struct {
		reason string
		short  bool
		want   []uint32
	}{{ReasonDirty, true, []uint32{2}}, {ReasonDirty, false, []uint32{1, 2}}, {ReasonRepair, false, []uint32{1, 2}}} {
		w, a, _, _, _ = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
		w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{run(e, e/4), run(2*e, e/4)}})
		w.now += gather
		w.take()
		left := w.s.Usage()[0].GrantedUnits
		w.say(Renewal{Session: a, Held: held(left, 0, 0, 0, int64(left))})
		if tc.short {
			w.l.Short(w.s, 1, 1000, w.now)
		}
		q = scrub(w, a, tc.reason, uint32(e-w.s.Heap(1).Start), e*3/4-e/5, e*3/4-e/3, e)
		var extents []uint32
		for _, j := range q {
			extents = append(extents, j.Extents...)
		}
		if slices.Sort(extents); !slices.Equal(extents, tc.want) {
			t.Fatalf("%+v: queued %v", tc, q)
		}
	}
	// Of no extent is an eighth lost, and of all together more than is borne: the first of them is enough.
	for lost, want := range map[uint32]int{e / 9: 1, e / 40: 0} {
		w, a, _, _, all = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
		less, first := lost-e/64, uint32(e-w.s.Heap(1).Start)
		left := all - uint64(lost+less)
		w.say(Renewal{Session: a, Held: held(left, 0, 0, 0, int64(left))})
		if q = scrub(w, a, ReasonLost, first, e-less, e-lost, uint32(w.s.Usage()[0].GrantedUnits)-first-2*e); len(q) !=
			want || want > 0 && !slices.Equal(q[0].Extents, []uint32{2}) {
			t.Fatalf("queued %v for %d and %d units lost of %d", q, less, lost, w.s.Usage()[0].HeapUnits)
		}
	}
	// In a cache no more than what counted as lost for a while.
	for claim, want := range map[uint64]int{e / 4: 1, e: 2} {
		w, a, _, _, _ = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_CACHE)
		w.l.memory(w.s, 1).claim = claim
		w.l.Short(w.s, 1, 1000, w.now)
		if q = scrub(w, a, ReasonShort, uint32(e-w.s.Heap(1).Start), e/2, e/3, e); len(q) != 1 ||
			len(q[0].Extents) != want {
			t.Fatalf("queued %v of %d units that are lost", q, claim)
		}
	}
	// An operator who asks only to look gets no recall.
	w, a, _, _, _ = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	if q = scrub(w, a, ReasonLook); len(q) != 0 {
		t.Fatalf("queued %v", q)
	}
}

// Where there is time and room an extent of which little is linked is emptied rather than
// left in pieces.
func TestScrubbedEmpties(t *testing.T) {
	const e = layout.ExtentUnits
	for _, tc := range []struct {
		name          string
		linked        uint32 // of extent 1
		room          uint32 // units of extent 0 that may be granted
		short         bool
		empties, none bool
	}{
		{"little linked", e / 32, e / 2, false, true, false},
		{"nothing linked, no room", 0, 0, false, true, false},
		{"no room", e / 32, 0, false, false, false},
		{"much linked", e / 2, e / 2, false, false, false},
		{"short", e / 32, e / 2, true, false, false},
		{"nothing lost", e, e / 2, false, false, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, a, _, u, all := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
			if tc.room > 0 {
				w.free(a, u, tc.room)
				all -= uint64(tc.room)
			}
			// The heap's last units are the reserve.
			rest := uint32(w.s.Heap(1).Watermark - 2*e)
			w.say(Renewal{Session: a, Held: held(all, 0, 0, 0, int64(all))})
			if tc.short {
				w.l.Short(w.s, 1, 1000, w.now)
			}
			w.ack()
			w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonLost, Count: true})
			w.finish(a, w.claim(a), e-u-tc.room, tc.linked, min(rest, e), rest-min(rest, e))
			q := w.l.queue
			if tc.none != (len(q) == 0) {
				t.Fatalf("queued %v", q)
			}
			if !tc.none && (len(q) != 1 || !slices.Equal(q[0].Extents, []uint32{1}) || q[0].InPlace == tc.empties ||
				q[0].WindowUnits > 0) {
				t.Fatalf("queued %v", q)
			}
		})
	}
}

// If others take the room before an extent is emptied, it is recalled in place: what is nobody's there comes back.
func TestRecallWithoutRoom(t *testing.T) {
	const e = layout.ExtentUnits
	for _, taken := range []bool{false, true} {
		w, a, b, u, all := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
		w.free(a, u, e-u)
		all -= uint64(e - u)
		rest := uint32(w.s.Heap(1).Watermark - 2*e)
		w.say(Renewal{Session: a, Held: held(all, 0, 0, 0, int64(all))})
		w.ack()
		w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonRepair})
		w.finish(a, w.claim(a), 0, e/16, min(rest, e), rest-min(rest, e))
		if q := w.l.queue; len(q) != 1 || q[0].InPlace {
			t.Fatalf("queued %v", q)
		}
		if taken {
			w.fill(b, 1)
		}
		for range 50 {
			w.wait(200 * time.Millisecond)
			w.ack()
			w.step()
		}
		if j := w.claim(a); j.GetKind() != dirpb.JobKind_JOB_RECALL || !slices.Equal(j.Extents, []uint32{1}) ||
			j.InPlace != taken {
			t.Fatalf("room taken %v: %v", taken, j)
		}
	}
}

// free makes fresh what a session was granted, from unit on.
func (w *world) free(session, unit, units uint32) {
	w.t.Helper()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_TakeBack{TakeBack: &fsmpb.TakeBack{Runs: []*fsmpb.Back{
		{PgId: 1, Generation: 1, Unit: unit, Units: units, SessionId: session, Fresh: true}}}}})
}

// Free, but in pieces: what lies in the longest stretch that is nearly free moves, if the
// free memory elsewhere can take it twice.
func TestCompact(t *testing.T) {
	const e = layout.ExtentUnits
	for _, tc := range []struct {
		name        string
		pieces      uint32 // free ones of 900 units in extent 1, a thousand units apart
		elsewhere   uint32 // free of extent 0, of which the rest of the reserve is no part
		short       bool
		unit, units uint32 // of the window
	}{
		{"not short", 200, e / 4, false, 0, 0},
		{"nothing in pieces", 0, 0, true, 0, 0},
		{"nearly free", 140, e / 4, true, e, e / 2},
		{"half of it", 66, e / 4, true, e, e / 4},
		{"little room", 200, 0, true, e, e / 4}, // the reserve
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, a, _, u, _ := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
			var runs []*fsmpb.Back
			for i := range tc.pieces {
				runs = append(runs, &fsmpb.Back{PgId: 1, Generation: 1, Unit: e + 1000*i, Units: 900, SessionId: a,
					Fresh: true})
			}
			w.apply(&fsmpb.Command{Op: &fsmpb.Command_TakeBack{TakeBack: &fsmpb.TakeBack{Runs: runs}}})
			for i := uint32(0); i < tc.elsewhere; i += 900 { // in pieces, too
				w.free(a, u+2*i, min(900, tc.elsewhere-i))
			}
			all := w.s.Usage()[0].GrantedUnits
			w.say(Renewal{Session: a, Held: held(all, 0, 0, 0, int64(all))})
			if tc.short {
				w.l.Short(w.s, 1, 20_000, w.now)
			}
			w.ack()
			w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonShort, Count: true})
			lives := make([]uint32, 4)
			for _, x := range w.s.Extents(1) {
				lives[x.Number] = uint32(x.Granted)
			}
			w.finish(a, w.claim(a), lives...)
			q := w.l.queue
			if tc.units == 0 {
				if len(q) > 0 {
					t.Fatalf("queued %v", q)
				}
				return
			}
			if len(q) != 1 || !q[0].InPlace || !slices.Equal(q[0].Extents, []uint32{1}) || q[0].WindowUnit != tc.unit ||
				q[0].WindowUnits != tc.units {
				t.Fatalf("queued %v", q)
			}
			// And begins.
			w.ack()
			w.want("JOB_RECALL begins: no 20000 units in one piece are free")
			if j := w.s.Jobs()[0]; j.WindowUnit != tc.unit || j.WindowUnits != tc.units {
				t.Fatalf("began %v", j)
			}
		})
	}
}

// The emptiest stretch is one that no other beats, of those that begin where a free run does.
func TestEmptiest(t *testing.T) {
	const e = layout.ExtentUnits
	found := 0
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 11))
		h := &fsmpb.Heap{Start: 1000, End: 3*e - rng.Uint64N(e/2)}
		for at := h.Start + rng.Uint64N(e); ; {
			n := 1 + rng.Uint64N(1<<rng.IntN(17))
			n = min(n, (at/e+1)*e-at) // inside an extent
			if at+n > h.End {
				break
			}
			h.Free = append(h.Free, &fsmpb.Run{Unit: uint32(at), Units: uint32(n)})
			at += n + rng.Uint64N(1<<rng.IntN(18))
		}
		h.Watermark = h.End
		if rng.IntN(3) == 0 {
			h.Recalls = []*fsmpb.Recall{{Extent: uint32(rng.IntN(3))}}
		}
		recalled := func(x uint32) bool { return len(h.Recalls) > 0 && h.Recalls[0].Extent == x }
		size := uint64(1) << (4 + rng.IntN(14))
		in := func(from, to uint64) (sum uint64) {
			for _, r := range h.Free {
				lo, hi := max(from, uint64(r.Unit)), min(to, uint64(r.Unit)+uint64(r.Units))
				sum += max(hi, lo) - lo
			}
			return sum
		}
		most := uint64(0)
		for _, r := range h.Free {
			x := r.Unit / e
			if at := uint64(r.Unit); !recalled(x) && at+size <= min((uint64(x)+1)*e, h.End) {
				most = max(most, in(at, at+size))
			}
		}
		unit, free, here, ok := emptiest(h, size, -1)
		if !ok {
			if most > 0 {
				t.Fatalf("seed %d: nothing found, a stretch of %d has %d free", seed, size, most)
			}
			continue
		}
		found++
		x := unit / e
		if end := uint64(unit) + size; recalled(x) || end > min((uint64(x)+1)*e, h.End) || uint64(unit) < h.Start {
			t.Fatalf("seed %d: %d+%d of %v", seed, unit, size, h)
		}
		if real := in(uint64(unit), uint64(unit)+size); free != real || free != most {
			t.Fatalf("seed %d: %d+%d has %d free, told %d, the most is %d", seed, unit, size, real, free, most)
		}
		if want := in(uint64(x)*e, (uint64(x)+1)*e); here != want {
			t.Fatalf("seed %d: of extent %d %d units are free, told %d", seed, x, want, here)
		}
	}
	if found < 1000 {
		t.Fatalf("found %d", found)
	}
}
