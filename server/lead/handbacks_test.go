package lead

import (
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A place waits for its home, and goes there in one reply.
func TestHandBack(t *testing.T) {
	w, a, b, u := memoryWorld(t)
	list := freePlaces(u+10, 10, 5, 20, 1023)
	if r := w.say(Renewal{Session: b, HandBacks: list}); !r.Returned || len(r.Deliveries) != 0 {
		t.Fatalf("the answer is %+v", r)
	}
	w.say(Renewal{Session: b, HandBacks: freePlaces(u+40, 1, 7)})
	if n := w.way(); n != 31 || w.take() != nil {
		t.Fatalf("%d units are on their way, want 31 and no command", n)
	}
	want := freePlaces(u+10, 10, 5, 20, 1023, 1, 7) // they adjoin
	sameText(t, "delivered", w.say(Renewal{Session: a}).Deliveries, want)
	sameText(t, "delivered again", w.say(Renewal{Session: a}).Deliveries, nil)
	if w.way() != 0 {
		t.Fatalf("%d units are on their way", w.way())
	}
	// Places that nobody may hand back.
	c := w.grant(b, 1, 100)[0].Unit
	r := w.say(Renewal{Session: a, HandBacks: slices.Concat(
		freePlaces(u, 10, 1),       // its own
		freePlaces(c-5, 10, 1),     // of two homes
		freePlaces(c+95, 10, 1),    // past what was granted
		freePlaces(u-5, 5, 1),      // the index
		freePlaces(1<<32-3, 10, 1), // past the end
		freePlaces(c, 0, 1),
		[]*dirpb.FreePlaces{{PgId: 1, Generation: 2, Unit: c, Places: []uint32{10 << 10}},
			{PgId: 9, Generation: 1, Unit: c, Places: []uint32{10 << 10}}})})
	if w.way() != 0 || w.l.Pending() || len(r.Deliveries) > 0 || len(w.say(Renewal{Session: b}).Deliveries) > 0 {
		t.Fatalf("%d units are on their way, delivered %v", w.way(), r.Deliveries)
	}
	// A session of another namespace, one that only reads, and what no heap can have.
	other := w.open(w.create("other", 1, 1))
	reader := w.apply(
		&fsmpb.Command{Op: &fsmpb.Command_OpenSession{
			OpenSession: &fsmpb.OpenSession{NamespaceId: w.pg(1).NamespaceId, ReadOnly: true}}}).Session.Id
	if _, _, err := w.l.Opened(w.s, reader, w.now); err != nil {
		t.Fatal(err)
	}
	for _, x := range []uint32{other, reader} {
		w.say(Renewal{Session: x, HandBacks: list, Held: []*dirpb.Held{{PgId: 1, Generation: 1, FreeUnits: 9}}})
		if w.l.sessions.of(x).held[1] != nil {
			t.Fatalf("session %d holds memory that it may not have", x)
		}
		w.l.Closing(x, list, nil)
		w.l.Closed(w.s, w.now, x)
		w.l.Closing(x, list, nil) // nor one that is forgotten
		if w.l.Closed(w.s, w.now, x); w.way() != 0 {
			t.Fatalf("%d units that session %d may not hand back are on their way", w.way(), x)
		}
	}
	whole := w.s.Heap(1).End - w.s.Heap(1).Start
	for _, h := range []*dirpb.Held{{OwnUnits: whole + 1}, {FreeUnits: 1 << 63}, {ForeignUnits: whole + 1},
		{LimboUnits: whole + 1}, {NetUnits: 1<<48 + 1}, {NetUnits: -1 << 63}} {
		h.PgId, h.Generation = 1, 1
		if w.say(Renewal{Session: b, Held: []*dirpb.Held{h}}); w.l.sessions.of(b).held[1] != nil {
			t.Fatalf("a session holds %v of %d units", h, whole)
		}
	}
	third := w.open(w.pg(2).NamespaceId)
	if w.say(Renewal{Session: third, Held: []*dirpb.Held{{PgId: 1, Generation: 1, FreeUnits: 9}}}); w.l.sessions.of(
		third).held[1] != nil {
		t.Fatal("a session holds memory of another namespace")
	}
	// The queues are one leadership's.
	w.say(Renewal{Session: b, HandBacks: list})
	w.elect()
	w.numbers = map[uint32]uint64{}
	sameText(t, "by the next leader", w.say(Renewal{Session: a}).Deliveries, nil)
}

// The queue for a TakeBack is bounded: a session may hand back again and again a place whose home is gone.
func TestBacksBounded(t *testing.T) {
	m := memory{backs: make([]*fsmpb.Back, maxQueue-1)}
	for range 3 {
		m.back(1, &fsmpb.Back{})
	}
	if len(m.backs) != maxQueue {
		t.Fatalf("%d runs wait, want %d", len(m.backs), maxQueue)
	}
}

// A renewal that arrives behind a later one extends the lease, and is not heeded.
func TestNumbers(t *testing.T) {
	for _, first := range []Renewal{{}, {HandBacks: freePlaces(0, 1, 1)}} { // with hand-backs or without
		w, a, b, u := memoryWorld(t)
		own := w.grant(b, 1, 100)[0].Unit
		w.wait(lease)
		epoch, _ := w.l.Epochs()
		first.Session, first.Number, first.Term = b, 5, w.l.opts.Term
		if first.Number = w.numbers[b] + 5; epoch == 0 {
			t.Fatal("the test proves nothing")
		}
		if _, err := w.l.Renew(w.s, w.now, first); err != nil {
			t.Fatal(err)
		}
		acked, quiesced, _ := w.l.Acknowledged(b)
		report, _ := w.l.Report(b)
		// a newer map
		w.apply(&fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: 1, Incarnation: 1}}})
		w.boot("m1", "d1", 2, 2)
		w.now += lease / 2
		for _, late := range []uint64{first.Number, first.Number - 1, 1, 0} {
			w.l.sessions.of(a).queue = []place{{pg: 1, generation: 1, unit: u, units: 1}}
			w.l.sessions.of(b).queue = []place{{pg: 1, generation: 1, unit: own, units: 1}}
			all := Renewal{Session: b, Number: late, Term: w.l.opts.Term, Report: epoch, Acked: w.s.MapVersion(),
				Quiesced:  w.s.MapVersion(),
				HandBacks: freePlaces(u+10, 10, 5), Returns: []*dirpb.ReturnedRun{run(own, 10)},
				Held: []*dirpb.Held{{PgId: 1, Generation: 1, FreeUnits: 9}}}
			acks, empty := all, Renewal{Session: b, Number: late, Term: w.l.opts.Term}
			acks.HandBacks, acks.Returns = nil, nil
			for _, x := range []Renewal{all, acks, empty} {
				r, err := w.l.Renew(w.s, w.now, x)
				if err != nil || r.Moved || r.Returned || len(r.Deliveries)+len(r.Supply) > 0 || w.way() != 2 ||
					w.l.sessions.of(b).held != nil {
					t.Fatalf("number %d after %d: %+v, %v, %d units on their way", late, first.Number, r, err, w.way())
				}
			}
			if k, q, _ := w.l.Acknowledged(b); k != acked || q != quiesced {
				t.Fatalf("number %d after %d acknowledged map %d, %d", late, first.Number, k, q)
			}
			if e, _ := w.l.Report(b); e != report {
				t.Fatalf("number %d after %d reported epoch %d", late, first.Number, e)
			}
			if got := w.l.sessions.of(b).expires; got != w.now+lease {
				t.Fatalf("the lease ends at %v, want %v", got, w.now+lease)
			}
		}
	}
}

// Places that a session hands back under another term are not taken; all else of its renewal is.
func TestTerms(t *testing.T) {
	w, a, b, u := memoryWorld(t)
	own := w.grant(b, 1, 100)[0].Unit
	w.say(Renewal{Session: a, HandBacks: freePlaces(own, 10, 1)})
	w.l.opts.Term = 3
	for _, term := range []uint64{0, 2, 4} {
		w.numbers[b]++
		r, err := w.l.Renew(w.s, w.now, Renewal{Session: b, Number: w.numbers[b], Term: term,
			HandBacks: freePlaces(u, 10, 1), Returns: []*dirpb.ReturnedRun{run(own+50, 10)}})
		if err != nil || r.Returned || w.way() > 0 {
			t.Fatalf("term %d: %+v, %v, %d units on their way", term, r, err, w.way())
		}
		if term == 0 {
			sameText(t, "delivered", r.Deliveries, freePlaces(own, 10, 1))
		}
	}
	w.say(Renewal{Session: b, HandBacks: freePlaces(u, 10, 1), Returns: []*dirpb.ReturnedRun{run(own+50, 10)}})
	if w.way() != 20 {
		t.Fatalf("%d units are on their way, want 20", w.way())
	}
}

// Places of an extent that is being recalled are not taken, and those that wait go with it,
// also once it is free and granted to the same session again.
func TestRecalledPlaces(t *testing.T) {
	w, a, b, u := memoryWorld(t)
	c := w.open(1)
	dead := w.grant(c, 1, 100)[0].Unit
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: c}}})
	w.l.Closed(w.s, w.now, c)
	w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{run(u+100, 10)}})
	w.say(Renewal{Session: b, HandBacks: slices.Concat(freePlaces(u, 10, 1), freePlaces(dead, 10, 1))})
	if w.way() != 30 {
		t.Fatalf("%d units are on their way, want 30", w.way())
	}
	queue := slices.Clone(w.l.sessions.of(a).queue)
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 1, Extents: []uint32{0}})
	w.say(Renewal{Session: b, HandBacks: freePlaces(u+20, 10, 1)})
	w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{run(u+200, 10)}})
	if w.way() > 20 { // its queue went with its reply
		t.Fatalf("%d units are on their way", w.way())
	}
	w.l.sessions.of(a).queue = queue
	sameText(t, "delivered while recalled", w.say(Renewal{Session: a}).Deliveries, nil)
	// The command that was accepted before is void.
	backs := w.l.TakeBack(w.s, w.now+time.Hour)
	if n := len(backs.GetTakeBack().GetRuns()); n != 2 {
		t.Fatalf("%v is proposed, want 2 runs", backs)
	}
	w.apply(backs)
	if h := w.s.Heap(1); len(h.Free) != 0 {
		t.Fatalf("free are %v", h.Free)
	}
	w.ack()
	w.do(b, dirpb.JobKind_JOB_RECALL)
	w.wait(lease)
	w.want("extent 0 is free")
	w.apply(backs)
	for i, r := range w.s.Heap(1).Free {
		if i > 0 || r.Unit/layout.ExtentUnits != 0 || uint64(r.Unit+r.Units) != layout.ExtentUnits {
			t.Fatalf("free are %v", w.s.Heap(1).Free)
		}
	}
	// All of it is a's again.
	for range 3 {
		w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{SessionId: b, PgId: 1, WantUnits: 1 << 18,
				PlaceUnits: 1 << 18, MinEpoch: 5000}}})
	}
	r := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{SessionId: a, PgId: 1, PlaceUnits: 100000,
			MinEpoch: 5000}}})
	if home, _ := w.s.HomeOf(1, u, 200); home != a {
		t.Fatalf("the test proves nothing: granted %v", r.Grant)
	}
	w.l.sessions.of(a).queue = queue
	sameText(t, "delivered after the recall", w.say(Renewal{Session: a}).Deliveries, nil)
}

// Without a home a place goes back to all; while the home lives, or is being fenced, never.
func TestDeadHome(t *testing.T) {
	w, a, b, u := memoryWorld(t)
	list := freePlaces(u, 10, 5, 10, 6)
	w.say(Renewal{Session: b, HandBacks: list})
	w.quiet[a] = true
	w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: []uint32{a}}}})
	w.say(Renewal{Session: b, HandBacks: freePlaces(u+100, 10, 5)})
	w.want()
	if w.way() != 30 || w.l.Pending() {
		t.Fatalf("%d units on their way, pending %v, while the home is being fenced", w.way(), w.l.Pending())
	}
	w.fence()
	w.plan() // finds that it is gone
	if w.way() != 30 || !w.l.Pending() {
		t.Fatalf("%d units on their way, pending %v, once the home is fenced", w.way(), w.l.Pending())
	}
	w.now += gather
	got := w.take()
	sameText(t, "made free", got, []*fsmpb.Back{
		{PgId: 1, Generation: 1, Unit: u, Units: 20}, {PgId: 1, Generation: 1, Unit: u + 100, Units: 10}})
	if w.take() != nil || w.l.Pending() {
		t.Fatal("made free twice")
	}
	h := w.s.Heap(1)
	epoch, _ := w.l.Epochs()
	sameText(t, "free", h.Free, []*fsmpb.Run{{Unit: u, Units: 20, Returned: epoch + 1},
		{Unit: u + 100, Units: 10, Returned: epoch + 1}})
	// Handed back later still; what is free already is not free twice.
	w.say(Renewal{Session: b, HandBacks: slices.Concat(freePlaces(u+5, 10, 5), freePlaces(u+200, 10, 5))})
	w.now += gather
	w.take()
	if u := w.s.Usage()[0]; u.ReturnedUnits != 40 {
		t.Fatalf("usage %v", u)
	}
}

// Places that a session hands back as it closes go home, or to all; those that waited for it, too.
// A plan may see the end of the session before the call that ended it goes on.
func TestClosedSession(t *testing.T) {
	t.Run("the call is first", func(t *testing.T) {
		closes(t, func(w *world, b uint32) { w.l.Closed(w.s, w.now, b) })
	})
	t.Run("a plan is first", func(t *testing.T) {
		closes(t, func(w *world, b uint32) {
			w.plan()
			w.l.Closed(w.s, w.now, b)
		})
	})
}

func closes(t *testing.T, end func(w *world, b uint32)) {
	w, a, b, u := memoryWorld(t)
	own := w.grant(b, 1, 100)[0].Unit
	w.say(Renewal{Session: a, HandBacks: freePlaces(own, 10, 1)})
	w.l.Closing(b, slices.Concat(freePlaces(u, 10, 3), freePlaces(own+20, 10, 3)),
		[]*dirpb.Held{{PgId: 1, Generation: 1, NetUnits: 70}})
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: b}}})
	closed, _ := w.l.Epochs()
	end(w, b)
	w.now += gather
	sameText(t, "made free", w.take(), []*fsmpb.Back{{PgId: 1, Generation: 1, Unit: own, Units: 10},
		{PgId: 1, Generation: 1, Unit: own + 20, Units: 10}})
	// Places that may have been in limbo as it closed are so until every session has seen a later reclaim epoch.
	other := w.open(1)
	mine := w.grant(other, 1, 10)[0].Unit
	w.say(Renewal{Session: other, HandBacks: freePlaces(u+50, 10, 4)})
	w.l.epoch = closed + 2
	for _, x := range []struct {
		who    uint32
		report uint64
		want   []*dirpb.FreePlaces
	}{
		{a, closed, freePlaces(u+50, 10, 4)}, // from one that lives
		{a, closed + 2, nil},                 // the other one is behind
		{other, closed, nil},
		{a, closed + 2, nil},
		{other, closed + 1, nil},
		{a, closed + 2, freePlaces(u, 10, 3)},
		{a, closed + 2, nil},
	} {
		if len(x.want) == 0 && x.who == a && w.way() != 10 && w.l.sessions.of(other).report <= closed {
			t.Fatalf("%d units wait", w.way())
		}
		sameText(t, "delivered", w.say(Renewal{Session: x.who, Report: x.report}).Deliveries, x.want)
	}
	w.say(Renewal{Session: other, Held: held(10, 10, 0, 0, 0)})
	if home, _ := w.s.HomeOf(1, mine, 10); home != other || w.way() != 0 {
		t.Fatalf("home %d, %d units on their way", home, w.way())
	}
	w.say(Renewal{Session: a, Held: held(1000, 1000, 0, 0, 0)})
	w.now += time.Second
	if got := w.l.Account(w.s, 1, w.now).Live; got != 70 {
		t.Fatalf("%d units are live, want those that the closed session left", got)
	}
}

// A session returns its own runs and no others.
func TestGiveUp(t *testing.T) {
	w, a, b, u := memoryWorld(t)
	other := w.grant(b, 1, 100)[0].Unit
	fresh := run(u, 10)
	fresh.Fresh = true
	stale := run(u+300, 10)
	stale.Generation = 2
	r := w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{fresh, run(u+100, 10), run(other, 10),
		run(other-5, 10), run(other+100, 10), stale, run(u+400, 0), {PgId: 9, Unit: u, Units: 1}}})
	if !r.Returned || w.way() != 20 {
		t.Fatalf("%d units are on their way, want 20", w.way())
	}
	if w.take() != nil {
		t.Fatal("a command at once for what nobody waits for")
	}
	w.l.Short(w.s, 1, 1, w.now)
	sameText(t, "made free", w.take(), []*fsmpb.Back{
		{PgId: 1, Generation: 1, Unit: u, Units: 10, SessionId: a, Fresh: true},
		{PgId: 1, Generation: 1, Unit: u + 100, Units: 10, SessionId: a}})
	if _, any := w.s.HomeOf(1, u, 10); any {
		t.Fatal("what was returned has a home")
	}
	if home, _ := w.s.HomeOf(1, u+10, 90); home != a {
		t.Fatalf("what was not has home %d", home)
	}
	// Returned twice, and by a message that was late: nobody's own any more.
	w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{run(u, 10), run(u+95, 10)}})
	if w.way() != 0 {
		t.Fatalf("%d units are on their way", w.way())
	}
}

// A reply holds no more than it may, and what is left over is next.
func TestDeliverInParts(t *testing.T) {
	w, a, _, u := memoryWorld(t)
	for i := range uint32(maxDelivered + 5) {
		w.l.sessions.of(a).queue = append(w.l.sessions.of(a).queue,
			place{pg: 1, generation: 1, unit: u + i%1000, units: 1})
	}
	for _, want := range []int{maxDelivered, 5, 0} {
		n := 0
		for _, f := range w.say(Renewal{Session: a}).Deliveries {
			n += len(f.Places)
		}
		if n != want {
			t.Fatalf("%d places in one reply, want %d", n, want)
		}
	}
}
