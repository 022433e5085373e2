package lead

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// crowd is a world of so many sessions that read, in one namespace; the limit on sessions bounds it.
func crowd(tb testing.TB, n int) *world {
	w := &world{t: tb, s: fsm.New(), mute: make(map[uint32]bool), quiet: make(map[uint32]bool),
		numbers: make(map[uint32]uint64)}
	w.elect()
	w.nodes(1, 4)
	ns := w.create("n", 1, 1)
	w.proceed()
	for range n {
		epoch, _ := w.l.Epochs()
		r := w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_OpenSession{
				OpenSession: &fsmpb.OpenSession{NamespaceId: ns, Epoch: epoch, ReadOnly: true}}})
		if _, _, err := w.l.Opened(w.s, r.Session.Id, w.now); err != nil {
			tb.Fatal(err)
		}
	}
	w.proceed()
	return w
}

// proceed applies what is due now.
func (w *world) proceed() {
	for _, step := range w.l.Plan(w.s, w.now) {
		w.apply(step.Do)
	}
}

var crowds = []int{100, 1_000, 10_000, fsm.MaxSessions}

// BenchmarkRenew is a renewal beside so many sessions, each of which reports as sessions do.
func BenchmarkRenew(b *testing.B) {
	for _, n := range crowds {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w := crowd(b, n)
			ids := w.s.Admitted().Live
			v := w.s.MapVersion()
			// Between two renewals of a session every other one renews, and E grows by three.
			every := max(1, n/3)
			b.ResetTimer()
			for i := range b.N {
				if i%every == 0 {
					w.l.Run(w.s, 1)
				}
				w.now += lease / 3 / time.Duration(n)
				epoch, _ := w.l.Epochs()
				if _, err := w.l.Renew(w.s, w.now, Renewal{Session: ids[i%n], Report: epoch, Acked: v, Quiesced: v,
					Number: uint64(i/n + 1), Callable: true}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkPlan is a look of the planner at a state of so many sessions in which nothing is due.
func BenchmarkPlan(b *testing.B) {
	for _, n := range crowds {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w := crowd(b, n)
			b.ResetTimer()
			for range b.N {
				w.now++
				if steps := w.l.Plan(w.s, w.now); len(steps) > 0 {
					b.Fatalf("due: %v", steps)
				}
				if ids := w.l.Calls(w.now); len(ids) > 0 {
					b.Fatalf("called: %d", ids)
				}
			}
		})
	}
}

// The books of sessions are right whatever sessions do and however they end, and the floor of a namespace is what the
// slowest of its sessions has said, none if one of them is not known to be alive.
func TestBooks(t *testing.T) {
	w := newWorld(t)
	w.nodes(2, 8)
	spaces := []uint32{w.create("a", 1, 1), w.create("b", 1, 1)}
	rnd := rand.New(rand.NewPCG(1, 2))
	seen := make(map[string]bool)
	for range 4000 {
		all := w.s.Sessions()
		var x uint32
		if len(all) > 0 {
			x = all[rnd.IntN(len(all))].Id
		}
		switch n := rnd.IntN(40); {
		case n < 3 && len(all) < 12:
			w.open(spaces[n%2])
		case n == 3 && len(all) < 12: // its answer is lost
			w.apply(&fsmpb.Command{
				Op: &fsmpb.Command_OpenSession{
					OpenSession: &fsmpb.OpenSession{NamespaceId: spaces[0], ReadOnly: rnd.IntN(2) == 0}}})
		case n == 4:
			w.try(&fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{SessionId: x}}})
			if rnd.IntN(2) == 0 {
				w.l.Closed(w.s, w.now, x)
			}
		case n == 5:
			w.apply(&fsmpb.Command{
				Op: &fsmpb.Command_ExpireSessions{ExpireSessions: &fsmpb.ExpireSessions{SessionIds: []uint32{x}}}})
		case n == 6:
			w.fence()
		case n == 7:
			w.now += time.Duration(rnd.Int64N(int64(lease)))
		case n == 8:
			w.proceed()
		case n == 9 && rnd.IntN(8) == 0:
			w.elect()
		default:
			w.now += time.Duration(rnd.Int64N(int64(lease / 20)))
			w.l.Run(w.s, uint64(rnd.IntN(2)))
			e, _ := w.l.Epochs()
			_, _ = w.tell(Renewal{Session: x, Report: e - min(e, uint64(rnd.IntN(3))),
				Acked:    w.s.MapVersion() - uint64(rnd.IntN(2)),
				Quiesced: w.s.MapVersion(), Callable: rnd.IntN(2) == 0})
		}
		v := w.l.newView(w.s, w.now)
		if problem := w.l.checkBooks(w.s); problem != "" {
			t.Fatal(problem)
		}
		for _, ns := range spaces {
			want := floor{math.MaxUint64, math.MaxUint64}
			for _, y := range w.s.Sessions() {
				if y.NamespaceId != ns {
					continue
				}
				x := w.l.sessions.of(y.Id)
				if x == nil || x.expired || w.now > x.expires || y.Life != dirpb.SessionLife_SESSION_LIVE {
					x = &session{}
				}
				want = floor{min(want.acked, x.acked), min(want.quiesced, x.quiesced)}
			}
			if got := v.floor(ns); got != want {
				t.Fatalf("floor of namespace %d: %+v, want %+v", ns, got, want)
			}
			seen[fmt.Sprint(want == floor{}, want.acked == math.MaxUint64, want.acked < want.quiesced)] = true
		}
	}
	if len(seen) < 4 {
		t.Errorf("floors were only %v", seen)
	}
}

// Accounts of memory, which are made several times a second, do not look at sessions that only read, of which there may
// be many more than of others.
func TestAccountsAreOfWriters(t *testing.T) {
	w := crowd(t, 3)
	writer := w.open(1)
	free := func() uint64 {
		w.l.accounted = 0
		w.l.plan(w.s, w.now).account()
		return w.l.memory(w.s, 1).account.Free
	}
	held := map[uint32]*dirpb.Held{1: {PgId: 1, Generation: w.pg(1).Generation, FreeUnits: 9}}
	for _, x := range w.s.Sessions() {
		if x.ReadOnly {
			w.l.sessions.of(x.Id).held = held // as it cannot be
		}
	}
	if n := free(); n != 0 {
		t.Errorf("readers were looked at, who have %d units free", n)
	}
	if w.l.sessions.of(writer).held = held; free() != 9 {
		t.Errorf("%d units are free, want 9", free())
	}
}
