package lead

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// freePlaces are free places of placement group 1 that adjoin, as units and ver in turn.
func freePlaces(unit uint32, unitsVer ...uint32) []*dirpb.FreePlaces {
	f := &dirpb.FreePlaces{PgId: 1, Generation: 1, Unit: unit}
	for i := 0; i < len(unitsVer); i += 2 {
		f.Places = append(f.Places, unitsVer[i]<<10|unitsVer[i+1])
	}
	return []*dirpb.FreePlaces{f}
}

func run(unit, units uint32) *dirpb.ReturnedRun {
	return &dirpb.ReturnedRun{PgId: 1, Unit: unit, Units: units, Generation: 1}
}

func sameText[M proto.Message](t *testing.T, what string, got, want []M) {
	t.Helper()
	if !slices.EqualFunc(got, want, func(a, b M) bool { return proto.Equal(a, b) }) {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

// say sends a session's next renewal, which must be heeded.
func (w *world) say(r Renewal) Answer {
	w.t.Helper()
	a, err := w.tell(r)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

// way is how many units are on their way home, or back to all.
func (w *world) way() (units uint64) {
	w.l.OnTheWay(func(_, _, n uint32) { units += uint64(n) })
	return units
}

// take makes free what came back, and tells the command's runs.
func (w *world) take() []*fsmpb.Back {
	w.t.Helper()
	c := w.l.TakeBack(w.s, w.now)
	if c == nil {
		return nil
	}
	w.apply(c)
	return c.GetTakeBack().Runs
}

// memory is a world with one placement group and two sessions, of which the first was
// granted 1000 units, from unit on.
func memoryWorld(t *testing.T) (w *world, a, b, unit uint32) {
	w = newWorld(t)
	w.nodes(1, 2)
	ns := w.create("n", 1, 1)
	a, b = w.open(ns), w.open(ns)
	w.want()
	return w, a, b, w.grant(a, 1, 1000)[0].Unit
}

// ---- hand-backs --------------------------------------------------------------

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
		[]*dirpb.FreePlaces{{PgId: 1, Generation: 2, Unit: c, Places: []uint32{10 << 10}}, {PgId: 9, Generation: 1, Unit: c, Places: []uint32{10 << 10}}})})
	if w.way() != 0 || w.l.Pending() || len(r.Deliveries) > 0 || len(w.say(Renewal{Session: b}).Deliveries) > 0 {
		t.Fatalf("%d units are on their way, delivered %v", w.way(), r.Deliveries)
	}
	// A session of another namespace, one that only reads, and what no heap can have.
	other := w.open(w.create("other", 1, 1))
	reader := w.apply(&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: w.pg(1).NamespaceId, ReadOnly: true}}}).Session.Id
	if _, _, err := w.l.Opened(w.s, reader, w.now); err != nil {
		t.Fatal(err)
	}
	for _, x := range []uint32{other, reader} {
		w.say(Renewal{Session: x, HandBacks: list, Held: []*dirpb.Held{{PgId: 1, Generation: 1, FreeUnits: 9}}})
		if w.l.sessions.of(x).held[1] != nil {
			t.Fatalf("session %d holds memory that it may not have", x)
		}
		w.l.Closed(w.s, w.now, x, list, nil)
		if w.l.Closed(w.s, w.now, x, list, nil); w.way() != 0 { // nor one that is forgotten
			t.Fatalf("%d units that session %d may not hand back are on their way", w.way(), x)
		}
	}
	whole := w.s.Heap(1).End - w.s.Heap(1).Start
	for _, h := range []*dirpb.Held{{OwnUnits: whole + 1}, {FreeUnits: 1 << 63}, {ForeignUnits: whole + 1}, {LimboUnits: whole + 1}, {NetUnits: 1<<48 + 1}, {NetUnits: -1 << 63}} {
		h.PgId, h.Generation = 1, 1
		if w.say(Renewal{Session: b, Held: []*dirpb.Held{h}}); w.l.sessions.of(b).held[1] != nil {
			t.Fatalf("a session holds %v of %d units", h, whole)
		}
	}
	third := w.open(w.pg(2).NamespaceId)
	if w.say(Renewal{Session: third, Held: []*dirpb.Held{{PgId: 1, Generation: 1, FreeUnits: 9}}}); w.l.sessions.of(third).held[1] != nil {
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
		w.apply(&fsmpb.Command{Op: &fsmpb.Command_NodeDown{NodeDown: &fsmpb.NodeDown{NodeId: 1, Incarnation: 1}}}) // a newer map
		w.boot("m1", "d1", 2, 2)
		w.now += lease / 2
		for _, late := range []uint64{first.Number, first.Number - 1, 1, 0} {
			w.l.sessions.of(a).queue = []place{{pg: 1, generation: 1, unit: u, units: 1}}
			w.l.sessions.of(b).queue = []place{{pg: 1, generation: 1, unit: own, units: 1}}
			all := Renewal{Session: b, Number: late, Term: w.l.opts.Term, Report: epoch, Acked: w.s.MapVersion(), Quiesced: w.s.MapVersion(),
				HandBacks: freePlaces(u+10, 10, 5), Returns: []*dirpb.ReturnedRun{run(own, 10)}, Held: []*dirpb.Held{{PgId: 1, Generation: 1, FreeUnits: 9}}}
			acks, empty := all, Renewal{Session: b, Number: late, Term: w.l.opts.Term}
			acks.HandBacks, acks.Returns = nil, nil
			for _, x := range []Renewal{all, acks, empty} {
				r, err := w.l.Renew(w.s, w.now, x)
				if err != nil || r.Moved || r.Returned || len(r.Deliveries)+len(r.Supply) > 0 || w.way() != 2 || w.l.sessions.of(b).held != nil {
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
		r, err := w.l.Renew(w.s, w.now, Renewal{Session: b, Number: w.numbers[b], Term: term, HandBacks: freePlaces(u, 10, 1), Returns: []*dirpb.ReturnedRun{run(own+50, 10)}})
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
	w.l.Closed(w.s, w.now, c, nil, nil)
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
		w.apply(&fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{SessionId: b, PgId: 1, WantUnits: 1 << 18, PlaceUnits: 1 << 18, MinEpoch: 5000}}})
	}
	r := w.apply(&fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{SessionId: a, PgId: 1, PlaceUnits: 100000, MinEpoch: 5000}}})
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
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: []uint32{a}}}})
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
	sameText(t, "free", h.Free, []*fsmpb.Run{{Unit: u, Units: 20, Returned: epoch + 1}, {Unit: u + 100, Units: 10, Returned: epoch + 1}})
	// Handed back later still; what is free already is not free twice.
	w.say(Renewal{Session: b, HandBacks: slices.Concat(freePlaces(u+5, 10, 5), freePlaces(u+200, 10, 5))})
	w.now += gather
	w.take()
	if u := w.s.Usage()[0]; u.ReturnedUnits != 40 {
		t.Fatalf("usage %v", u)
	}
}

// Places that a session hands back as it closes go home, or to all; those that waited for it, too.
func TestClosedSession(t *testing.T) {
	w, a, b, u := memoryWorld(t)
	own := w.grant(b, 1, 100)[0].Unit
	w.say(Renewal{Session: a, HandBacks: freePlaces(own, 10, 1)})
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: b}}})
	closed, _ := w.l.Epochs()
	w.l.Closed(w.s, w.now, b, slices.Concat(freePlaces(u, 10, 3), freePlaces(own+20, 10, 3)), []*dirpb.Held{{PgId: 1, Generation: 1, NetUnits: 70}})
	w.now += gather
	sameText(t, "made free", w.take(), []*fsmpb.Back{{PgId: 1, Generation: 1, Unit: own, Units: 10}, {PgId: 1, Generation: 1, Unit: own + 20, Units: 10}})
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
	r := w.say(Renewal{Session: a, Returns: []*dirpb.ReturnedRun{fresh, run(u+100, 10), run(other, 10), run(other-5, 10), run(other+100, 10), stale, run(u+400, 0), {PgId: 9, Unit: u, Units: 1}}})
	if !r.Returned || w.way() != 20 {
		t.Fatalf("%d units are on their way, want 20", w.way())
	}
	if w.take() != nil {
		t.Fatal("a command at once for what nobody waits for")
	}
	w.l.Short(w.s, 1, 1, w.now)
	sameText(t, "made free", w.take(), []*fsmpb.Back{
		{PgId: 1, Generation: 1, Unit: u, Units: 10, SessionId: a, Fresh: true}, {PgId: 1, Generation: 1, Unit: u + 100, Units: 10, SessionId: a}})
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
		w.l.sessions.of(a).queue = append(w.l.sessions.of(a).queue, place{pg: 1, generation: 1, unit: u + i%1000, units: 1})
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

// ---- accounts ----------------------------------------------------------------

func held(own, free, foreign, limbo uint64, net int64) []*dirpb.Held {
	return []*dirpb.Held{{PgId: 1, Generation: 1, OwnUnits: own, FreeUnits: free, ForeignUnits: foreign, LimboUnits: limbo, NetUnits: net}}
}

func TestAccounts(t *testing.T) {
	w, a, b, u := memoryWorld(t)
	w.grant(b, 1, 500)
	check := func(what string, live, free, foreign, limbo, coming, lost uint64) {
		t.Helper()
		w.now += time.Second
		got := w.l.Account(w.s, 1, w.now)
		want := Account{Heap: got.Heap, Granted: w.s.Usage()[0].GrantedUnits, Waiting: w.s.Usage()[0].WaitingUnits, Recalled: got.Recalled, Room: got.Room,
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
	w.l.ended(w.s, b)
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
	w.say(Renewal{Session: x, Held: []*dirpb.Held{{PgId: 1, Generation: 2, FreeUnits: 99}, {PgId: 9, Generation: 1, FreeUnits: 99}}})
	check("stale", 360, 540, 0, 200, 0, 350)
}

// full is a world of a full placement group: a session has it all, and another finds too
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
			w.apply(&fsmpb.Command{Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: []uint32{a}}}})
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
			if strings.Contains("waiting coming back going home free foreign limbo", name) && name != "" && (got < much || got > much+w.s.Usage()[0].HeapUnits/256+1000) {
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
		if early := i < lostWindow/time.Second; early && n != 0 || i > 2*lostWindow/time.Second && (n < 50_000 || n > 50_000+uint64(i)) {
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

// ---- recall by itself ----------------------------------------------------------

// A count begins where memory is lost, or may be and somebody lacks it.
func TestReclaim(t *testing.T) {
	say := func(w *world, a uint32, h []*dirpb.Held) { w.say(Renewal{Session: a, Held: h}) }
	for name, tc := range map[string]struct {
		provoke func(w *world, a, b uint32, all uint64)
		short   bool
		after   time.Duration // not before, and within 2 s of it; 0: at once
		reason  string        // "": never
	}{
		"full":           {func(*world, uint32, uint32, uint64) {}, true, 0, ""},
		"idle":           {func(*world, uint32, uint32, uint64) {}, false, 0, ""},
		"all in limbo":   {func(w *world, a, b uint32, all uint64) { say(w, a, held(all, 0, 0, all/2, int64(all-all/2))) }, true, 0, ""},
		"dirty":          {func(w *world, a, b uint32, all uint64) { w.leak(w.open(1)) }, false, testOptions.ScrubInterval, ReasonDirty},
		"dirty, short":   {func(w *world, a, b uint32, all uint64) { w.leak(w.open(1)) }, true, 0, ReasonDirty},
		"new term":       {func(w *world, a, b uint32, all uint64) { w.elect(); clear(w.numbers) }, false, testOptions.ScrubInterval, ReasonTerm},
		"new term,short": {func(w *world, a, b uint32, all uint64) { w.elect(); clear(w.numbers); w.ack() }, true, 0, ReasonTerm},
		"lost":           {func(w *world, a, b uint32, all uint64) { say(w, a, held(all, 0, 0, 0, int64(all-all/10))) }, false, testOptions.ScrubInterval, ReasonLost},
		"little lost":    {func(w *world, a, b uint32, all uint64) { say(w, a, held(all, 0, 0, 0, int64(all-all/50))) }, false, 0, ""},
		"lost, short":    {func(w *world, a, b uint32, all uint64) { say(w, a, held(all, 0, 0, 0, int64(all-all/10))) }, true, retryShort, ReasonShort},
		"little, short":  {func(w *world, a, b uint32, all uint64) { say(w, a, held(all, 0, 0, 0, int64(all-all/30))) }, true, retryShort, ReasonShort},
		"less, short":    {func(w *world, a, b uint32, all uint64) { say(w, a, held(all, 0, 0, 0, int64(all-all/40))) }, true, 0, ""},
		"in pieces":      {func(w *world, a, b uint32, all uint64) { say(w, a, held(all, 70_000, 0, 0, int64(all-70_000))) }, true, retryShort, ReasonShort},
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
	if q = scrub(w, a, ReasonShort, uint32(e-w.s.Heap(1).Start), e/2, e/3, e); len(q) != 1 || !slices.Equal(q[0].Extents, []uint32{1, 2}) || !q[0].InPlace {
		t.Fatalf("queued %v", q)
	}
	// Places that are free with their home, or in limbo there, are nobody else's to find.
	w, a, _, _, all = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	w.say(Renewal{Session: a, Held: held(all, all/2, 0, all-all/2, 0)})
	if q = scrub(w, a, ReasonLost); len(q) != 0 {
		t.Fatalf("queued %v", q)
	}
	// A recall has what waits for reclaim epochs wait anew, which matters if somebody waits for it. Of extent 1 a quarter waits and less is lost,
	// of extent 2 more.
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
		if q = scrub(w, a, ReasonLost, first, e-less, e-lost, uint32(w.s.Usage()[0].GrantedUnits)-first-2*e); len(q) != want || want > 0 && !slices.Equal(q[0].Extents, []uint32{2}) {
			t.Fatalf("queued %v for %d and %d units lost of %d", q, less, lost, w.s.Usage()[0].HeapUnits)
		}
	}
	// In a cache no more than what counted as lost for a while.
	for claim, want := range map[uint64]int{e / 4: 1, e: 2} {
		w, a, _, _, _ = fullWorld(t, dirpb.NamespaceMode_NAMESPACE_CACHE)
		w.l.memory(w.s, 1).claim = claim
		w.l.Short(w.s, 1, 1000, w.now)
		if q = scrub(w, a, ReasonShort, uint32(e-w.s.Heap(1).Start), e/2, e/3, e); len(q) != 1 || len(q[0].Extents) != want {
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
			if !tc.none && (len(q) != 1 || !slices.Equal(q[0].Extents, []uint32{1}) || q[0].InPlace == tc.empties || q[0].WindowUnits > 0) {
				t.Fatalf("queued %v", q)
			}
		})
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
				runs = append(runs, &fsmpb.Back{PgId: 1, Generation: 1, Unit: e + 1000*i, Units: 900, SessionId: a, Fresh: true})
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
			if len(q) != 1 || !q[0].InPlace || !slices.Equal(q[0].Extents, []uint32{1}) || q[0].WindowUnit != tc.unit || q[0].WindowUnits != tc.units {
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

// ---- shares and floors -----------------------------------------------------------

// In a full cache one who has nothing is given what the others have more than their share.
func TestShares(t *testing.T) {
	for _, mode := range []dirpb.NamespaceMode{dirpb.NamespaceMode_NAMESPACE_CACHE, dirpb.NamespaceMode_NAMESPACE_STORE} {
		w, a, b, _, all := fullWorld(t, mode)
		give := func(x uint32) (units, share uint64) {
			w.now += accountEvery
			w.plan()
			for _, s := range w.say(Renewal{Session: x}).Supply {
				units, share = s.GiveUnits, s.ShareUnits
			}
			return units, share
		}
		cache := mode == dirpb.NamespaceMode_NAMESPACE_CACHE
		w.say(Renewal{Session: b, Held: held(0, 0, 0, 0, 10)})
		if n, _ := give(a); n != 0 {
			t.Fatalf("%v: to be handed over are %d units, with nobody short", mode, n)
		}
		w.l.Short(w.s, 1, 10, w.now)
		n, share := give(a)
		if heap := w.s.Usage()[0].HeapUnits; share != heap/2 {
			t.Fatalf("%v: a share of %d units of %d", mode, share, heap)
		}
		// As much as half a share lacks, and at most a quarter of what is more than the share.
		if want := (all - share) / 4; cache && n != min(want, share/2) || !cache && n != 0 {
			t.Fatalf("%v: to be handed over are %d units, want %d", mode, n, want)
		}
		if n, _ := give(b); n != 0 {
			t.Fatalf("%v: one who has nothing is to hand over %d units", mode, n)
		}
		// A session that has enough, or puts nothing, is given nothing.
		for _, h := range [][]*dirpb.Held{held(share/2, 0, 0, 0, 10), held(0, 0, 0, 0, 0)} {
			w.say(Renewal{Session: b, Held: h})
			w.l.Short(w.s, 1, 10, w.now)
			if n, _ := give(a); n != 0 {
				t.Fatalf("%v: to be handed over are %d units to one who has %v", mode, n, h)
			}
		}
	}
}

// The memory that a session may keep shrinks with the number of sessions and if memory is short.
func TestSupplyTold(t *testing.T) {
	w, a, _, _, _ := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	units := w.s.Usage()[0].HeapUnits
	sameText(t, "nothing said", w.say(Renewal{Session: a}).Supply, nil)
	want := &dirpb.Supply{PgId: 1, FloorUnits: units / 8, ShareUnits: units / 2}
	sameText(t, "all asked for", w.say(Renewal{Session: a, Held: held(1, 0, 0, 0, 1)}).Supply, []*dirpb.Supply{want})
	w.l.Short(w.s, 1, 10, w.now)
	want = &dirpb.Supply{PgId: 1, Short: true, FloorUnits: min(floorShort, units/64), ShareUnits: units / 2}
	sameText(t, "short", w.say(Renewal{Session: a}).Supply, []*dirpb.Supply{want})
	for range 62 {
		w.open(1)
	}
	want.FloorUnits, want.ShareUnits = units/(32*64), units/64
	sameText(t, "many sessions", w.say(Renewal{Session: a}).Supply, []*dirpb.Supply{want})
	w.now += shortFor
	sameText(t, "short no more", w.say(Renewal{Session: a}).Supply, nil)
}
