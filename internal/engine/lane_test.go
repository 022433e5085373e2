package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

var errGone = errors.New("the caller has gone")

// A completion after the lease has ended is worth nothing: others may have been given the memory that was
// read. A write may have happened; one that was not posted did not.
func TestLeaseEndsUnderWay(t *testing.T) {
	for _, kind := range []index.Kind{index.Get, index.Put, index.Delete} {
		t.Run(kind.String(), func(t *testing.T) {
			r := newRig(t, 1, false)
			r.put("a", "1")
			task := r.request(kind, "a", "2")
			r.l.Start(task)
			r.l.Pump()
			if task.IsDone() || len(r.fab.Events()) == 0 {
				t.Fatal("nothing was posted")
			}
			r.now += rigLease
			r.settleLane()
			v, err := r.answer(task)
			if !errors.Is(err, engine.ErrLease) || v != "" || errors.Is(err, index.ErrUnknown) != (kind != index.Get) {
				t.Fatalf("ended with %q, %v", v, err)
			}
			before := r.l.Counters()
			if _, err := r.do(kind, "a", "3"); !errors.Is(err, engine.ErrLease) || errors.Is(err, index.ErrUnknown) {
				t.Fatalf("begun without a lease: %v", err)
			}
			if after := r.l.Counters(); after != before {
				t.Fatalf("posted without a lease: %+v, before %+v", after, before)
			}
			r.renew(rigLease)
			r.put("a", "4")
			r.get("a", "4")
		})
	}
}

// The same of what is executed within PostSend: a read of the only copy, on a provider that
// fences by itself, needs no lease.
func TestLeaseEndsWithinPost(t *testing.T) {
	for _, tc := range []struct {
		replicas    int
		put         bool
		ok, unknown bool
	}{{1, false, true, false}, {2, false, false, false}, {1, true, true, true}} {
		t.Run(fmt.Sprintf("%d copies, put %v", tc.replicas, tc.put), func(t *testing.T) {
			r := newRig(t, tc.replicas, true)
			r.put("a", "1")
			if q := r.hinted(tc.put, "a", "2"); !q.OK || q.Err != nil {
				t.Fatalf("with a lease: %v, %v", q.OK, q.Err)
			}
			r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
				r.now += rigLease
				return q.PostSend(wrs)
			}
			q := r.hinted(tc.put, "a", "3")
			if q.OK != tc.ok || errors.Is(q.Err, index.ErrUnknown) != tc.unknown || errors.Is(q.Err, engine.ErrLease) !=
				tc.unknown {
				t.Fatalf("dealt with %v, %v; want %v, unknown %v", q.OK, q.Err, tc.ok, tc.unknown)
			}
		})
	}
}

// Replies come in any order; each says what held when its renewal was sent.
func TestLateReply(t *testing.T) {
	r := newRig(t, 1, false)
	first, second := r.core.BeginRenew(), r.core.BeginRenew()
	end := r.now + 2*rigLease
	r.core.EndRenew(second, 9, 8, end)
	r.core.EndRenew(first, 7, 6, end-rigLease)
	if r.core.Epoch() != 9 || r.core.MinEpoch() != 8 {
		t.Fatalf("epoch %d, minimum %d went back", r.core.Epoch(), r.core.MinEpoch())
	}
	if r.now = end - 1; !r.core.LeaseValid() {
		t.Fatal("a late reply shortened the lease")
	}
	if r.now = end; r.core.LeaseValid() {
		t.Fatal("the lease goes on for ever")
	}
}

// A word that was remembered of lost memory may come back in the new one, where it is another
// key's.
func TestHintsOfLostGeneration(t *testing.T) {
	for _, quick := range []bool{false, true} {
		t.Run(fmt.Sprintf("quick %v", quick), func(t *testing.T) {
			r := newRig(t, 1, quick)
			r.put("a mine", "1111")
			off, w := r.slot(1, "a mine")
			r.startOver()
			r.grant(rigLo+4000, 1000)
			mem := r.nodes[0].mem
			layout.EncodeRecord(mem[w.Off():], layout.RecordHeader{Version: 1 << 20, Writer: 9}, []byte("a hers"),
				[]byte("2222"))
			putWord(mem[off:], uint64(w))
			for range 2 { // before the lane has seen the map, and after
				if quick {
					if q := r.hinted(true, "a mine", "3333"); q.OK {
						t.Error("wrote by a hint of lost memory")
					}
					if q := r.hinted(false, "a mine", ""); q.OK {
						t.Error("read by a hint of lost memory")
					}
				}
				r.l.Pump()
			}
			r.put("a mine", "3333")
			r.get("a hers", "2222")
			r.get("a mine", "3333")
		})
	}
}

// No place of lost memory is used again, wherever it was: with the session, in a lane's
// stock, in limbo. Grants of the new memory stay the session's, whatever an operation of the old still asks for.
func TestPlacesOfLostGeneration(t *testing.T) {
	r := newRig(t, 1, false)
	for i := range 20 {
		r.put(fmt.Sprint("k", i%10), fmt.Sprint(i)) // half of them replace others
	}
	old := r.core.View().PGs[1].PG
	r.startOver()
	const lo, units = rigLo + 8000, 40
	r.grant(lo, units)
	r.core.HeapOf(&old)
	for range 3 {
		r.renew(rigLease)
		r.l.Pump()
	}
	if n := r.core.HeapOf(&r.core.View().PGs[1].PG).Stats().Granted; n != units {
		t.Fatalf("the session has %d units of the new memory, want %d", n, units)
	}
	for i := range 10 {
		k := fmt.Sprintf("%c", 'a'+i)
		r.put(k, "new")
		if _, w := r.slot(1, k); w.Unit() < lo || w.Unit() >= lo+units {
			t.Fatalf("key %q lies at unit %d, granted are %d to %d", k, w.Unit(), lo, lo+units)
		}
	}
}

// A lane that needs many places keeps what left limbo and serves it again, though not as many at a time are needed as
// left it. It keeps no more than it needs, and nothing when it needs none any more.
func TestLimboServesAgain(t *testing.T) {
	r := newRig(t, 1, true)
	r.startOver()
	r.grant(rigLo, 4000)
	r.put("a", "1")
	puts := func(n int) {
		t.Helper()
		for range n {
			if q := r.hinted(true, "a", "2"); !q.OK {
				t.Fatal("no place")
			}
		}
		r.renew(rigLease)
		r.l.Pump()
	}
	for range 4 {
		puts(400)
	}
	free := func() uint64 { return r.core.HeapOf(&r.core.View().PGs[1].PG).Stats().Free + r.l.CachedUnits() }
	before := free()
	for i := range 20 {
		puts(400 - i%2*60)
	}
	if now := free(); now != before {
		t.Errorf("%d units are free outside of limbo, and %d before PUTs whose number differs by a sixth", now, before)
	}
	puts(270)
	puts(270)
	if now := free(); now <= before {
		t.Errorf("%d units are free outside of limbo, and %d before there were fewer PUTs", now, before)
	}
	for range 5 {
		puts(0)
	}
	if n := r.l.LimboUnits(); n != 0 {
		t.Errorf("%d units are in limbo when nothing is needed any more", n)
	}
}

// Of an extent that is being recalled nothing is taken, wherever the session has it, and what
// it unlinks there is nobody's.
func TestRecalledExtent(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", "1")
	r.put("a", "2") // its first place is in limbo
	if r.l.LimboUnits() == 0 || r.l.CachedUnits() == 0 {
		t.Fatalf("%d units in limbo, %d in stock", r.l.LimboUnits(), r.l.CachedUnits())
	}
	r.core.SetExhausted(1, "")
	r.install(func(p *dirpb.PlacementGroup) { p.Recalled = []uint32{0} })
	if r.core.Recalls(1) != 1 || r.core.Recalls(2) != 0 || !r.core.Exhausted(1) {
		t.Fatalf("%d and %d recalls, exhausted %v", r.core.Recalls(1), r.core.Recalls(2), r.core.Exhausted(1))
	}
	none := func(when string) {
		t.Helper()
		free := r.core.HeapOf(&r.core.View().PGs[1].PG).Stats().Free
		if l, c := r.l.LimboUnits(), r.l.CachedUnits(); l != 0 || c != 0 || free != 0 {
			t.Fatalf("%s: %d units in limbo, %d in stock, %d free", when, l, c, free)
		}
	}
	none("recalled")
	if _, err := r.do(index.Delete, "a", ""); err != nil {
		t.Fatal(err)
	}
	none("unlinked since")
	x := r.request(index.Put, "a", "3")
	r.l.Start(x)
	r.settleLane()
	if x.Waiting() != index.Alloc {
		t.Fatalf("waits for %v", x.Waiting())
	}
	r.install(nil) // the recall is over
	if r.core.Recalls(1) != 1 || r.core.Exhausted(1) {
		t.Fatalf("%d recalls; exhausted, as was said before what the recall freed: %v", r.core.Recalls(1),
			r.core.Exhausted(1))
	}
	r.grant(rigLo+4000, 100)
	r.l.Deliver(func(*engine.Lane) {})
	r.settleLane()
	if _, err := r.answer(x); err != nil {
		t.Fatal(err)
	}
}

// A lane acknowledges the map that it has seen and no other, and not while an operation that
// began under an older one is under way.
func TestAcks(t *testing.T) {
	r := newRig(t, 1, false)
	check := func(what string, acked, quiesced uint64) {
		t.Helper()
		if a, q := r.core.Acked(); a != acked || q != quiesced {
			t.Fatalf("%s: acknowledged %d, quiesced %d, want %d, %d", what, a, q, acked, quiesced)
		}
	}
	v := r.version
	check("idle", v, v)
	r.put("a", "1")
	check("after an operation", v, v)
	r.offer(nil)
	check("not seen", v, v)
	r.l.Pump()
	check("seen", v+1, v+1)
	task := r.request(index.Put, "a", "2")
	r.l.Start(task)
	r.l.Pump()
	r.install(nil)
	check("an operation is under way", v+1, v+1)
	// In another placement group epoch it is done with the old map once its verbs are.
	r.epoch++
	r.install(nil)
	check("under way still", v+1, v+1)
	r.settleLane()
	check("over", v+3, v+3)
	if _, err := r.answer(task); err != nil {
		t.Fatal(err)
	}
	check("answered", v+3, v+3)
}

// Where a queue pair takes a part of what it is given, the CASes that it took may have
// happened, and the others have not.
func TestPostedInPart(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("connection lost for good %v", lost), func(t *testing.T) {
			r := newRig(t, 1, false)
			var tasks []*engine.Task
			for _, k := range []string{"a", "b"} {
				r.put(k, "1")
				x := r.request(index.Put, k, "2")
				got := r.request(index.Get, k, "")
				r.l.Start(got)
				r.settleLane()
				x.Op.Cond, x.Op.IfVersion = index.IfVersion, got.Op.Version
				r.l.Recycle(got)
				tasks = append(tasks, x)
			}
			var taken, refused []driver.WR
			r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
				if len(wrs) != 4 {
					t.Errorf("posted %d WRs, want two chains of two", len(wrs))
				}
				taken, refused = slices.Clone(wrs[:2]), slices.Clone(wrs[2:])
				if n, err := q.PostSend(taken); n != 2 || err != nil {
					t.Errorf("took %d, %v", n, err)
				}
				return 2, driver.ErrQPError
			}
			for _, x := range tasks {
				r.l.Start(x)
			}
			r.l.Pump()
			r.wire.post = nil
			if lost { // what was taken lands all the same, and nobody is told
				if err := r.fab.Kill(r.qp(1)); err != nil {
					t.Fatal(err)
				}
			}
			fire(r.fab)
			if !slices.Equal(r.wantConn, []uint32{1}) || len(taken) != 2 || taken[1].Op != rdma.OpCmpAndSwp ||
				refused[1].Op != rdma.OpCmpAndSwp {
				t.Fatalf("connections wanted: %v; took %+v, refused %+v", r.wantConn, taken, refused)
			}
			if lost {
				r.l.Pump()
				r.l.ConnFailed(1, false, true, engine.ErrNoConn)
			} else {
				r.connect(1)
			}
			r.settleLane()
			for i, k := range []string{"a", "b"} {
				posted := happened(r, k, taken[1])
				_, err := r.answer(tasks[i])
				switch {
				case !lost && err != nil:
					t.Errorf("%q, posted %v: %v", k, posted, err)
				case lost && (!errors.Is(err, engine.ErrNoConn) || errors.Is(err, index.ErrUnknown) != posted):
					t.Errorf("%q, posted %v: %v", k, posted, err)
				}
			}
			if lost {
				return
			}
			r.get("a", "2")
			r.get("b", "2")
		})
	}
}

// happened reports whether the slot of key holds what a CAS was to put there.
func happened(r *rig, key string, cas driver.WR) bool {
	_, w := r.slot(1, key)
	return uint64(w) == cas.Swap
}

// holding is an insert that has its key's lock and has not been told.
func (r *rig) holding(key string) *engine.Task {
	r.t.Helper()
	x := r.request(index.Put, key, "1")
	r.l.Start(x)
	for range 10 {
		r.l.Pump()
		if fire(r.fab); r.lock(1, key) != 0 {
			return x
		}
	}
	r.t.Fatal("it takes no lock")
	return nil
}

// An unlock that went down with its connection is repeated on the next one; one that is
// known to be done is not.
func TestUnlockAfterReconnection(t *testing.T) {
	r := newRig(t, 1, false)
	x := r.holding("a")
	for !x.IsDone() { // the release goes with the CAS of the slot, behind it
		if !r.l.Pump() {
			_ = r.fab.Fire(r.fab.Events()[0])
		}
	}
	if _, err := r.answer(x); err != nil {
		t.Fatal(err)
	}
	if l := r.lock(1, "a"); l.Session() != rigSelf {
		t.Fatalf("the lock is %v before its release took effect", l)
	}
	r.disconnect(1)
	r.connect(1)
	r.settleLane()
	if l := r.lock(1, "a"); l != 0 {
		t.Fatalf("the lock is %v after a reconnection", l)
	}
	r.get("a", "1") // whose WC proves the unlock
	before := r.l.Counters()
	r.connect(1)
	r.settleLane()
	if after := r.l.Counters(); after != before {
		t.Fatalf("posted again: %+v, before %+v", after, before)
	}
}

// An unlock that waits for a connection is not taken for done when an older WC comes.
func TestUnlockNeverPosted(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("b", "2")
	r.put("a other", "1") // which the insert has to read, so that its release does not go with that
	x := r.holding("a")
	x.Deadline = r.now + second/2
	older := r.request(index.Get, "b", "")
	r.l.Start(older)
	// It is posted, and what the insert does next is not.
	posts := 0
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
		if posts++; posts > 1 {
			return 0, driver.ErrQPError
		}
		return q.PostSend(wrs)
	}
	r.l.Pump()
	r.wire.post = nil
	if x.Waiting() != index.Reconnect || older.Waiting() != 0 || older.IsDone() {
		t.Fatalf("the insert waits for %v, the get for %v", x.Waiting(), older.Waiting())
	}
	r.now = x.Deadline
	r.l.Pump()
	if _, err := r.answer(x); !errors.Is(err, engine.ErrNoConn) || errors.Is(err, index.ErrUnknown) {
		t.Fatalf("the insert ended with %v", err)
	}
	fire(r.fab)
	r.l.Pump()
	if v, err := r.answer(older); v != "2" || err != nil {
		t.Fatalf("the get ended with %q, %v", v, err)
	}
	if l := r.lock(1, "a"); l.Session() != rigSelf {
		t.Fatalf("the lock is %v, with no connection to release it", l)
	}
	r.connect(1)
	r.settleLane()
	if l := r.lock(1, "a"); l != 0 {
		t.Fatalf("the lock is %v after a reconnection", l)
	}
}

// A lock is waited for until its owner is fenced, and broken then.
func TestLockOfFenced(t *testing.T) {
	r := newRig(t, 1, false)
	home, _ := layout.GroupOff(rigHash("a"), 1)
	putWord(r.nodes[0].mem[layout.RegionPageSize+home+layout.GroupLockOff:], uint64(layout.MakeLock(9, 77)))
	x := r.request(index.Put, "a", "1")
	r.l.Start(x)
	r.settleFor(second / 20)
	if x.IsDone() || r.lock(1, "a").Session() != 9 || !slices.Contains(r.wantFenced, 9) {
		t.Fatalf("done %v, lock %v, asked about %v", x.IsDone(), r.lock(1, "a"), r.wantFenced)
	}
	r.core.SetFenced(9)
	r.settleLane()
	if _, err := r.answer(x); err != nil || r.lock(1, "a") != 0 {
		t.Fatalf("ended with %v, lock %v", err, r.lock(1, "a"))
	}
	r.get("a", "1")
}

// A replaced record's place is used again when the reply to a renewal that was sent after
// says that everybody is past it.
func TestLimbo(t *testing.T) {
	r := newRig(t, 1, false)
	r.startOver()
	r.grant(rigLo, 2) // two places of a unit
	r.put("a", "1")
	_, first := r.slot(1, "a")
	sent := r.core.BeginRenew()
	r.put("a", "2")
	free := func(want bool) {
		t.Helper()
		r.l.Pump()
		x := r.request(index.Put, "a", "3")
		r.l.Start(x)
		r.settleLane()
		if x.IsDone() != want {
			t.Fatalf("has a place: %v, want %v", x.IsDone(), want)
		}
		if !want {
			r.l.Orphan(x, errGone)
		}
		_, _ = r.answer(x)
	}
	free(false)
	r.core.EndRenew(sent, 10, 20, r.now+rigLease) // sent before
	free(false)
	r.core.EndRenew(r.core.BeginRenew(), 30, 30, r.now+rigLease) // somebody is not past it
	free(false)
	r.core.EndRenew(r.core.BeginRenew(), 31, 31, r.now+rigLease)
	free(true)
	if _, w := r.slot(1, "a"); w.Unit() != first.Unit() || w.Ver() == first.Ver() {
		t.Fatalf("the record is at %v, the free place was %v", w, heap.Place{Unit: first.Unit(), Units: first.Units(),
			Ver: first.Ver()})
	}
}

// An operation that reads of a move which its map does not have waits for the map, until the
// directory, asked after it had looked several times, says that there is no newer one.
func TestMovedNowhere(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", "1")
	r.renew(rigLease)
	off, w := r.slot(1, "a")
	mem := r.nodes[0].mem
	putWord(mem[off:], uint64(w.WithState(layout.Moved)))
	asked := r.core.BeginRenew() // before anybody looked
	t1 := r.request(index.Get, "a", "")
	r.l.Start(t1)
	look := func() {
		t.Helper()
		r.settleFor(second / 100)
	}
	look()
	said := func(seq uint64) { r.core.SetNewest(seq, r.version); look() }
	if said(asked); t1.IsDone() {
		t.Fatalf("ended by what the directory said before it looked: %v", t1.Op.Err)
	}
	r.core.SetNewest(r.core.BeginRenew(), r.version+1)
	if look(); t1.IsDone() {
		t.Fatalf("ended while a newer map is on its way: %v", t1.Op.Err)
	}
	r.install(nil) // it tells nothing of a move either
	if look(); t1.IsDone() {
		t.Fatalf("ended although nobody was asked in the new map: %v", t1.Op.Err)
	}
	said(r.core.BeginRenew())
	var corrupt *layout.CorruptError
	if _, err := r.answer(t1); !errors.As(err, &corrupt) ||
		!strings.Contains(err.Error(), "slot is MOVED, but nothing moves") {
		t.Fatalf("%v, want that the group is corrupt", err)
	}
	// Another one that finds the word well in time has its value.
	t2 := r.request(index.Get, "a", "")
	r.l.Start(t2)
	look()
	putWord(mem[off:], uint64(w))
	look()
	if v, err := r.answer(t2); v != "1" || err != nil {
		t.Fatalf("%q, %v", v, err)
	}
}
