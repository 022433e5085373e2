package lead

import (
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func held(own, free, foreign, limbo uint64, net int64) []*dirpb.Held {
	return []*dirpb.Held{{PgId: 1, Generation: 1, OwnUnits: own, FreeUnits: free, ForeignUnits: foreign,
		LimboUnits: limbo, NetUnits: net}}
}

func TestAccounts(t *testing.T) {
	w, a, b, u := memoryWorld(t)
	w.grant(b, 1, 500)
	check := func(what string, live, free, foreign, limbo, coming, lost uint64) {
		t.Helper()
		w.now += time.Second
		got := w.l.Account(w.s, 1, w.now)
		want := Account{Heap: got.Heap, Granted: w.s.Usage()[0].GrantedUnits, Waiting: w.s.Usage()[0].WaitingUnits,
			Recalled: got.Recalled, Room: got.Room,
			Live: live, Free: free, Foreign: foreign, Limbo: limbo, Coming: coming, Lost: lost}
		if got != want || got.Live+got.Free+got.Foreign+got.Limbo+got.Coming+got.Lost != got.Granted {
			t.Fatalf("%s: %+v, want %+v", what, got, want)
		}
	}
	check("nobody has said anything", 1500, 0, 0, 0, 0, 0)
	w.say(Renewal{Session: a, Held: held(1000, 600, 0, 0, 400)})
	w.say(Renewal{Session: b, Held: held(500, 300, 20, 30, 150)})
	check("all have", 550, 900, 20, 30, 0, 0)
	w.say(Renewal{Session: b, HandBacks: freePlaces(u, 20, 1), Held: held(500, 300, 0, 30, 150)})
	check("on its way home", 550, 900, 0, 30, 20, 0)
	w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{run(u+500, 50)}, Held: held(950, 550, 0, 0, 400)})
	check("and back to all", 550, 850, 0, 30, 50, 20) // the delivery is lost, unless the session tells of it
	w.now += gather
	w.take()
	check("free", 550, 850, 0, 30, 0, 20)
	if w.s.Usage()[0].WaitingUnits != 50 {
		t.Fatal("the test proves nothing")
	}
	// b is killed: what it had linked stays, what it had free is lost. Others unlink b's.
	w.leak(b)
	w.l.ended(w.s, w.now, b)
	check("killed", 550, 550, 0, 0, 0, 350)
	w.say(Renewal{Session: a, Held: held(950, 550, 0, 200, 200)})
	check("unlinked", 350, 550, 0, 200, 0, 350)
	// The next leader knows nothing of it: all that nobody names is live, until it is counted.
	w.elect()
	clear(w.numbers)
	w.say(Renewal{Session: a, Held: held(950, 550, 0, 200, 200)})
	check("another term", 700, 550, 0, 200, 0, 0)
	x := w.open(1)
	w.ack()
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonLook})
	w.finish(x, w.claim(x), 350)
	check("counted", 350, 550, 0, 200, 0, 350)
	w.say(Renewal{Session: a, Held: held(950, 540, 0, 200, 210)})
	check("linked since", 360, 540, 0, 200, 0, 350)
	// Of another life of the regions nothing counts.
	w.say(Renewal{Session: x, Held: []*dirpb.Held{{PgId: 1, Generation: 2, FreeUnits: 99},
		{PgId: 9, Generation: 1, FreeUnits: 99}}})
	check("stale", 360, 540, 0, 200, 0, 350)
}

// fullWorld is a world of a full placement group: a session has it all, and another finds too
// little.
func fullWorld(t *testing.T, mode dirpb.NamespaceMode) (w *world, a, b, unit uint32, all uint64) {
	w = newWorld(t)
	w.nodes(1, 2)
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
		Namespace: &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: region, Shards: 1, Mode: mode},
	}}})
	w.publish()
	a, b = w.open(1), w.open(1)
	w.want()
	unit = uint32(w.s.Heap(1).Start)
	all = w.fill(a, 1)
	w.say(Renewal{Session: a, Held: held(all, 0, 0, 0, int64(all))})
	w.now += accountEvery
	return w, a, b, unit, all
}

// Memory is on its way, or all of it is in use.
func TestComing(t *testing.T) {
	const much = 50_000
	for name, provoke := range map[string]func(w *world, a, b, u uint32, all uint64){
		"": func(*world, uint32, uint32, uint32, uint64) {},
		"too little": func(w *world, a, b, u uint32, all uint64) {
			w.say(Renewal{Session: a, Held: held(all, 30, 0, 0, int64(all-30))})
		},
		"waiting": func(w *world, a, b, u uint32, all uint64) {
			w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{run(u, much)}})
			w.now += gather
			w.take()
		},
		"coming back": func(w *world, a, b, u uint32, all uint64) {
			w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{run(u, much)}})
		},
		"going home": func(w *world, a, b, u uint32, all uint64) {
			w.say(Renewal{Session: b, HandBacks: freePlaces(u, much, 1)})
		},
		"free": func(w *world, a, b, u uint32, all uint64) {
			w.say(Renewal{Session: a, Held: held(all, much, 0, 0, int64(all-much))})
		},
		"foreign": func(w *world, a, b, u uint32, all uint64) {
			w.say(Renewal{Session: b, Held: held(0, 0, much, 0, -much)})
		},
		"limbo": func(w *world, a, b, u uint32, all uint64) {
			w.say(Renewal{Session: a, Held: held(all, 0, 0, much, int64(all-much))})
		},
		"recalled": func(w *world, a, b, u uint32, all uint64) {
			w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 1, Extents: []uint32{1}, InPlace: true})
			w.ack()
			w.finish(b, w.claim(b)) // scanned, and not free yet
		},
		"counted": func(w *world, a, b, u uint32, all uint64) {
			w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1})
		},
		"dirty":          func(w *world, a, b, u uint32, all uint64) { w.leak(w.open(1)) },
		"another term":   func(w *world, a, b, u uint32, all uint64) { w.elect(); clear(w.numbers) },
		"not said since": func(*world, uint32, uint32, uint32, uint64) {},
		"silent": func(w *world, a, b, u uint32, all uint64) {
			w.now += lease * 3 / 4
			w.say(Renewal{Session: b})
		},
		"fencing": func(w *world, a, b, u uint32, all uint64) {
			w.apply(&fsmpb.Command{
				Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: []uint32{a}}}})
		},
		"lost": func(w *world, a, b, u uint32, all uint64) {
			w.say(Renewal{Session: a, Held: held(all, 0, 0, 0, int64(all-much))})
			for range 3 * lostWindow / time.Second {
				w.now += time.Second
				w.l.Account(w.s, 1, w.now)
				w.say(Renewal{Session: a})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, a, b, u, all := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
			provoke(w, a, b, u, all)
			w.now += accountEvery
			w.l.Short(w.s, 1, 10, w.now)
			w.now++
			for id, x := range w.l.sessions.all() { // say again what they hold
				if name != "not said since" {
					x.told = w.now
				}
				if name != "silent" {
					w.l.Heard(w.s, w.now, id)
				}
			}
			got := w.l.Coming(w.s, 1, 1, 10, w.now)
			if none := name == "" || name == "too little"; none != (got == 0) {
				t.Fatalf("%d units are coming", got)
			}
			if strings.Contains("waiting coming back going home free foreign limbo", name) && name != "" &&
				(got < much || got > much+w.s.Usage()[0].HeapUnits/256+1000) {
				t.Fatalf("%d units are coming, want %d", got, much)
			}
		})
	}
}

// Reclaim epochs run while somebody waits for memory that waits for them, and else they do not.
func TestHasty(t *testing.T) {
	const store, cache = dirpb.NamespaceMode_NAMESPACE_STORE, dirpb.NamespaceMode_NAMESPACE_CACHE
	for _, tc := range []struct {
		mode  dirpb.NamespaceMode
		short bool
		waits uint32 // units
		hasty bool
	}{
		{store, false, 0, false}, {store, true, 0, false}, {store, false, 50_000, false}, {store, true, 50_000, true},
		// In a cache others are evicted, unless there are few.
		{cache, true, 50_000, false}, {cache, false, 150_000, false}, {cache, true, 150_000, true},
	} {
		w, a, b, _, _ := fullWorld(t, tc.mode)
		w.l.Advance(w.s, w.now) // from now on
		if tc.waits > 0 {
			w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{run(layout.ExtentUnits, tc.waits)}})
			w.now += gather
			w.take()
		}
		before, _ := w.l.Epochs()
		var most uint64
		for range 20 { // two seconds
			last, _ := w.l.Epochs()
			w.now += 100 * time.Millisecond
			if tc.short {
				w.l.Short(w.s, 1, 10, w.now)
			}
			w.plan()
			w.beat()
			w.say(Renewal{Session: a, Report: last})
			w.say(Renewal{Session: b, Report: last})
			now, _ := w.l.Epochs()
			most = max(most, now-last)
		}
		epoch, _ := w.l.Epochs()
		switch ran := epoch - before; {
		case tc.hasty && (ran < fsm.ReuseEpochs || most > fsm.ReuseEpochs):
			t.Errorf("%+v: %d epochs, %d at once", tc, ran, most)
		case !tc.hasty && ran > 22:
			t.Errorf("%+v: %d epochs in two seconds", tc, ran)
		}
	}
}

// Memory counts as lost once it has for some time without a break.
func TestLostForAWhile(t *testing.T) {
	w, a, _, _, all := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	lost := func(now uint64) uint64 {
		w.now += time.Second
		w.say(Renewal{Session: a, Held: held(all, 0, 0, 0, int64(all-now))})
		w.l.Account(w.s, 1, w.now)
		return w.l.memory(w.s, 1).lost()
	}
	for i := range 61 {
		if n := lost(uint64(50_000 * (i % 3 / 2) * (1 + i))); n != 0 { // now and then
			t.Fatalf("%d units are lost", n)
		}
	}
	for i := range 3 * lostWindow / time.Second {
		n := lost(50_000 + uint64(i))
		if early := i < lostWindow/time.Second; early && n != 0 || i > 2*lostWindow/time.Second &&
			(n < 50_000 || n > 50_000+uint64(i)) {
			t.Fatalf("%d units are lost after %d s", n, i)
		}
	}
	if n := lost(0); n != 0 {
		t.Fatalf("%d units are lost that are linked", n)
	}
}

// After a standstill E runs no further than what waits needs.
func TestHastyBound(t *testing.T) {
	w, _, _, _, _ := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: 1 << 20}}})
	w.l.Advance(w.s, w.now)
	before, _ := w.l.Epochs()
	w.l.hasty = true
	w.now += time.Hour
	w.l.Advance(w.s, w.now)
	if epoch, _ := w.l.Epochs(); epoch != before+fsm.ReuseEpochs {
		t.Fatalf("E is %d, was %d", epoch, before)
	}
}
