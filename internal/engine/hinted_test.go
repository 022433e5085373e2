package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma/driver"
)

// A PUT takes one round trip for each copy: the records and the decision, then the word at each further replica.
func TestHintedCopies(t *testing.T) {
	for copies := 1; copies <= 3; copies++ {
		r := newRig(t, copies, true)
		r.put("a", "1")
		before := r.l.Counters()
		op := &engine.Op{Kind: index.Put, Key: []byte("a"), Value: []byte("2"), Hash: rigHash("a"),
			Check: rigCheck("a")}
		if left := r.l.Hinted([]*engine.Op{op}); left != 0 || op.Err != nil || int(op.Rounds) != copies {
			t.Fatalf("%d copies: %d are left, %v, %d round trips", copies, left, op.Err, op.Rounds)
		}
		n := r.l.Counters()
		for _, v := range []driver.Opcode{driver.OpWrite, driver.OpCmpAndSwp} {
			if n.Verbs[v]-before.Verbs[v] != uint64(copies) {
				t.Errorf("%d copies: %d of %v", copies, n.Verbs[v]-before.Verbs[v], v)
			}
		}
		r.wantCopies("a", "2")
		r.get("a", "2")
	}
}

// A Modify, and a PUT of a version, take a round trip to read the record before those of the PUT, and no Task.
func TestHintedChanges(t *testing.T) {
	for copies := 1; copies <= 3; copies++ {
		for _, versioned := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d copies, of a version %v", copies, versioned), func(t *testing.T) {
				r := newRig(t, copies, true)
				r.put("a", "1")
				op := r.appends("a", "2")
				if versioned {
					op = &engine.Op{Kind: index.Put, Cond: index.IfVersion, IfVersion: r.versionOf("a"),
						Key: []byte("a"), Value: []byte("12"), Hash: rigHash("a"), Check: rigCheck("a")}
				}
				rounds := r.l.Stats.Rounds[op.Kind]
				if left := r.l.Hinted([]*engine.Op{op}); left != 0 || op.Err != nil || int(op.Rounds) != 1+copies {
					t.Fatalf("%d are left, %v, %d round trips", left, op.Err, op.Rounds)
				}
				if n := r.l.Stats.Rounds[op.Kind] - rounds; int(n) != 1+copies {
					t.Errorf("%d round trips are counted", n)
				}
				r.wantCopies("a", "12")
				if v := r.versionOf("a"); v != op.Version {
					t.Errorf("version %d, and it is %d", op.Version, v)
				}
			})
		}
	}
}

// appends is a Modify that appends to what it finds, and is given nothing that is not there.
func (r *rig) appends(key, more string) *engine.Op {
	return &engine.Op{Kind: index.Modify, Key: []byte(key), Hash: rigHash(key), Check: rigCheck(key),
		Modify: func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
			if cur == nil {
				return nil, 0, 0, index.ErrNotFound
			}
			return append(bytes.Clone(cur.Value), more...), 0, 0, nil
		}}
}

// versionOf is the version of the key's record at the head.
func (r *rig) versionOf(key string) uint64 {
	r.t.Helper()
	_, w := r.slot(1, key)
	rec, err := layout.ParseRecord(r.nodes[0].mem[w.Off():][:w.ReadLen()])
	if err != nil {
		r.t.Fatal(err)
	}
	return rec.Version
}

// Modifies of one key that come together each see what the one before has left: those that find another word than the
// one that they have read begin anew in a Task. None changes what another has put meanwhile.
func TestHintedChangesOfOneKey(t *testing.T) {
	r := newRig(t, 2, true)
	r.put("a", "1")
	ops := []*engine.Op{r.appends("a", "2"), r.appends("a", "2"), r.appends("a", "2")}
	if left := r.l.Hinted(ops); left != 2 {
		t.Fatalf("%d of 3 are left", left)
	}
	r.wantCopies("a", "12")
	put := &engine.Op{Kind: index.Put, Key: []byte("a"), Value: []byte("5"), Hash: rigHash("a"), Check: rigCheck("a")}
	if left := r.l.Hinted([]*engine.Op{r.appends("a", "2"), put}); left != 1 || !put.Over() {
		t.Fatalf("%d of 2 are left, the PUT is over: %v", left, put.Over())
	}
	r.wantCopies("a", "5")
	if left := r.l.Hinted([]*engine.Op{r.appends("a", "2")}); left != 0 {
		t.Fatal("left, and nobody else is there")
	}
	r.wantCopies("a", "52")
}

// A Modify that says no ends with its error, and what is not a chain's to decide is left to a Task: nothing is written.
func TestHintedChangesRefused(t *testing.T) {
	refuse := errors.New("no")
	for name, tc := range map[string]struct {
		op   func(r *rig) *engine.Op
		do   func(r *rig)
		over error
	}{
		"refused": {func(r *rig) *engine.Op {
			op := r.appends("a", "2")
			op.Modify = func(*layout.Record) ([]byte, layout.RecordFlags, uint64, error) { return nil, 0, 0, refuse }
			return op
		}, func(*rig) {}, refuse},
		"another version": {func(r *rig) *engine.Op {
			return &engine.Op{Kind: index.Put, Cond: index.IfVersion, IfVersion: 1 + r.versionOf("a"), Key: []byte("a"),
				Value: []byte("2"), Hash: rigHash("a"), Check: rigCheck("a")}
		}, func(*rig) {}, nil},
		"absence": {func(*rig) *engine.Op {
			return &engine.Op{Kind: index.Put, Cond: index.IfAbsent, Key: []byte("a"), Value: []byte("2"),
				Hash: rigHash("a"), Check: rigCheck("a")}
		}, func(*rig) {}, nil},
		"the write is not executed": {func(r *rig) *engine.Op { return r.appends("a", "2") }, func(r *rig) {
			bells := 0
			r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
				if bells++; bells > 1 {
					return 0, driver.ErrQPError
				}
				return q.PostSend(wrs)
			}
		}, nil},
		"somebody is faster": {func(r *rig) *engine.Op {
			op := r.appends("a", "2")
			modify := op.Modify
			op.Modify = func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
				off, w := r.slot(1, "a")
				putWord(r.nodes[0].mem[off:], uint64(w.WithState(layout.Frozen)))
				return modify(cur)
			}
			return op
		}, func(*rig) {}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1, true)
			r.put("a", "1")
			op := tc.op(r)
			tc.do(r)
			left := r.l.Hinted([]*engine.Op{op})
			r.wire.post = nil
			if over := tc.over != nil; op.Over() != over || (left == 0) != over || !errors.Is(op.Err, tc.over) {
				t.Fatalf("over %v, %d left: %v", op.Over(), left, op.Err)
			}
			r.wantCopies("a", "1")
		})
	}
}

// wantCopies checks that every replica has the same word for key, and the record with the value.
func (r *rig) wantCopies(key, value string) {
	r.t.Helper()
	_, first := r.slot(1, key)
	for _, n := range r.nodes {
		_, w := r.slot(n.id, key)
		rec, err := layout.ParseRecord(n.mem[w.Off():][:w.ReadLen()])
		if w != first || err != nil || string(rec.Key) != key || string(rec.Value) != value {
			r.t.Errorf("memory node %d has %v and %q, %v; want %v and %q", n.id, w, rec.Value, err, first, value)
		}
	}
}

// Things happen between the doorbells of a PUT with two copies, and of a Modify behind its reads: it writes the head's
// record and word, which decides, then the tail's.
func TestHintedCopiesInterrupted(t *testing.T) {
	const head, publish = 1, 2 // doorbells
	for name, tc := range map[string]struct {
		before func(r *rig, bell int) (fails bool)
		posts  int
		goesOn bool // in a Task
		err    error
		want   string // then
	}{
		"nothing":                      {func(*rig, int) bool { return false }, 2, false, nil, "2"},
		"the head's queue pair breaks": {func(r *rig, bell int) bool { return bell == head }, 1, false, nil, "1"},
		"somebody brings the tail up": {func(r *rig, bell int) bool {
			if bell == publish {
				off, w := r.slot(1, "a")
				putWord(r.nodes[1].mem[off:], uint64(w))
			}
			return false
		}, 2, true, nil, "2"},
		"the tail's queue pair breaks behind the decision": {func(r *rig, bell int) bool {
			return bell == publish
		}, 2, true, nil, "2"},
		"the lease ends behind the decision": {func(r *rig, bell int) bool {
			if bell == head {
				r.now += rigLease
			}
			return false
		}, 1, true, index.ErrUnknown, ""},
	} {
		for _, modify := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, modify %v", name, modify), func(t *testing.T) {
				r := newRig(t, 2, true)
				r.put("a", "1")
				_, was := r.slot(1, "a")
				bell := 0
				r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
					if bell++; tc.before(r, bell) {
						return 0, driver.ErrQPError
					}
					return q.PostSend(wrs)
				}
				op := &engine.Op{Kind: index.Put, Key: []byte("a"), Value: []byte("2"), Hash: rigHash("a"),
					Check: rigCheck("a")}
				if modify {
					bell = -1 // it reads first
					op.Kind, op.Value = index.Modify, nil
					op.Modify = func(*layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
						return []byte("2"), 0, 0, nil
					}
				}
				left := r.l.Hinted([]*engine.Op{op})
				r.wire.post = nil
				over := tc.want == "2" && !tc.goesOn
				if op.Over() != over || (left == 0) != over || (op.Task() != nil) != tc.goesOn || bell != tc.posts {
					t.Fatalf("over %v, %d left, goes on %v, after %d doorbells", op.Over(), left, op.Task() != nil,
						bell)
				}
				if !tc.goesOn {
					if _, w := r.slot(1, "a"); (w == was) == over {
						t.Fatalf("the head has %v, had %v", w, was)
					}
					r.wantCopies("a", tc.want)
					return
				}
				if v, ok := op.Task().Op.MapVersion(); !ok || v != r.version {
					t.Errorf("what is decided is bound to map %d, %v", v, ok)
				}
				for _, n := range r.nodes {
					r.connect(n.id)
				}
				r.settleLane()
				if !op.Over() || !errors.Is(op.Err, tc.err) || tc.err != nil && r.l.Stats.Leaked == 0 {
					t.Fatalf("over %v: %v, %d units left to recall", op.Over(), op.Err, r.l.Stats.Leaked)
				}
				if tc.err == nil {
					r.wantCopies("a", "2")
				}
			})
		}
	}
}

// PUTs with and without another copy and GETs share a chain, as far as their memory nodes do.
func TestHintedCopiesShare(t *testing.T) {
	r := newRig(t, 2, true)
	var ops []*engine.Op
	var got [8]hinted
	for i := range 8 {
		key := string(rune('a' + i))
		r.put(key, "1")
		op := &engine.Op{Kind: index.Get, Key: []byte(key), Hash: rigHash(key), Check: rigCheck(key), Asker: &got[i]}
		if i%2 == 0 {
			op.Kind, op.Value = index.Put, bytes.Repeat([]byte{'2'}, i+1)
		}
		ops = append(ops, op)
	}
	bells := 0
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
		bells++
		return q.PostSend(wrs)
	}
	left := r.l.Hinted(ops)
	r.wire.post = nil
	if left != 0 || bells != 3 {
		t.Fatalf("%d of 8 are left after %d doorbells", left, bells)
	}
	for i, op := range ops {
		if i%2 == 0 {
			r.wantCopies(string(op.Key), string(op.Value))
		} else if got[i].value != "1" {
			t.Errorf("%s is %q", op.Key, got[i].value)
		}
	}
}

// A PUT is not decided behind a failure of what shares its chain: its copies may be out of reach.
func TestHintedCopiesBehindAFailure(t *testing.T) {
	r := newRig(t, 2, true)
	r.put("a", "1")
	r.put("b", "1")
	bells := 0
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
		if bells++; bells == 1 {
			return 0, driver.ErrQPError
		}
		return q.PostSend(wrs)
	}
	put := &engine.Op{Kind: index.Put, Key: []byte("a"), Value: []byte("2"), Hash: rigHash("a"), Check: rigCheck("a")}
	get := &engine.Op{Kind: index.Get, Key: []byte("b"), Hash: rigHash("b"), Check: rigCheck("b")}
	left := r.l.Hinted([]*engine.Op{put, get})
	r.wire.post = nil
	if left != 2 || bells != 1 {
		t.Errorf("%d of 2 are left after %d doorbells", left, bells)
	}
	r.wantCopies("a", "1")
}

// Without a Task nothing is done in a placement group that is frozen, where no verb may be
// posted, nor in one that a replica joins, where readers look at two.
func TestHintedNotInEveryView(t *testing.T) {
	for name, change := range map[string]func(*dirpb.PlacementGroup){
		"frozen":  func(p *dirpb.PlacementGroup) { p.State = dirpb.PGState_PG_FROZEN },
		"joining": func(p *dirpb.PlacementGroup) { p.Joining = true },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 2, true)
			r.put("a", "1")
			try := func(put, want bool) {
				t.Helper()
				before := r.l.Counters()
				if q := r.hinted(put, "a", "2"); q.OK != want {
					t.Fatalf("put %v dealt with: %v, want %v", put, q.OK, want)
				}
				if posted := r.l.Counters() != before; posted != want {
					t.Fatalf("put %v posted: %v, want %v", put, posted, want)
				}
			}
			try(false, true)
			try(true, true)
			r.epoch++
			r.install(change)
			try(false, false)
			try(true, false)
			r.epoch++
			r.install(nil)
			try(false, true)
			// A map that the lane has not seen may say anything.
			r.offer(change)
			try(false, false)
		})
	}
}

// Everything else that leaves an operation to a Task; nothing is posted then.
func TestHintedDeclines(t *testing.T) {
	synchronous := func(c *driver.Caps) { c.Synchronous, c.SelfFencing = true, true }
	for name, tc := range map[string]struct {
		caps     func(*driver.Caps)
		do       func(r *rig)
		get, put bool // may be done without
	}{
		"nothing":           {synchronous, func(*rig) {}, true, true},
		"it does not fence": {func(c *driver.Caps) { c.Synchronous = true }, func(*rig) {}, false, false},
		"another is under way": {synchronous, func(r *rig) {
			x := r.request(index.Put, "b", "1")
			r.l.Start(x)
			r.t.Cleanup(func() { r.settleLane() })
		}, false, false},
		"mail":                 {synchronous, func(r *rig) { r.l.Deliver(func(*engine.Lane) {}) }, false, false},
		"memory has come back": {synchronous, func(r *rig) { r.renew(rigLease); r.renew(rigLease) }, false, false},
		"the word is old": {synchronous, func(r *rig) {
			r.core.SetEpoch(r.core.Epoch() + layout.WordLifeEpochs)
		}, false, false},
		"the array is another": {synchronous, func(r *rig) { r.shard = 9; r.install(nil) }, false, false},
		"the word is frozen": {synchronous, func(r *rig) {
			off, w := r.slot(1, "a")
			putWord(r.nodes[0].mem[off:], uint64(w.WithState(layout.Frozen)))
			r.get("a", "1") // and remembers it
		}, true, false},
		"no lease":       {synchronous, func(r *rig) { r.now += rigLease }, true, false},
		"no connection":  {synchronous, func(r *rig) { r.disconnect(1) }, false, false},
		"another key":    {synchronous, func(r *rig) { r.put("a other", "1"); r.l.Pump() }, true, true},
		"no memory left": {synchronous, func(r *rig) { r.useUp() }, true, false},
	} {
		for _, put := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, put %v", name, put), func(t *testing.T) {
				r := newRigOf(t, 1, tc.caps)
				r.put("a", "1")
				tc.do(r)
				before := r.l.Counters()
				want := put && tc.put || !put && tc.get
				if q := r.hinted(put, "a", "2"); q.OK != want || q.Err != nil {
					t.Fatalf("dealt with %v, %v; want %v", q.OK, q.Err, want)
				}
				if posted := r.l.Counters() != before; posted != want {
					t.Fatalf("posted %v, want %v", posted, want)
				}
			})
		}
	}
}

// A hint found by 64 bits of a key's hash can be another key's. A change by hint reads no key,
// so the word's fingerprint is compared as well.
func TestHintOfAnotherKey(t *testing.T) {
	for name, do := range map[string]func(r *rig) bool{
		"put":    func(r *rig) bool { return r.collide(index.Put) == nil },
		"delete": func(r *rig) bool { return errors.Is(r.collide(index.Delete), index.ErrNotFound) },
		"put without a task": func(r *rig) bool {
			q := &engine.Op{Kind: index.Put, Key: []byte("b"), Value: []byte("2"), Hash: rigHash("a") ^ 1,
				Check: rigCheck("a")}
			r.l.Hinted([]*engine.Op{q})
			return !q.Over()
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1, true)
			r.put("a", "1")
			if !do(r) {
				t.Error("the hint of another key was believed")
			}
			r.get("a", "1")
		})
	}
}

// collide performs an operation on key b, which shares with a the home group and the bits that
// hints are found by, but not the fingerprint.
func (r *rig) collide(kind index.Kind) error {
	x := r.request(kind, "b", "2")
	x.Op.Hash, x.Op.Check = rigHash("a")^1, rigCheck("a")
	r.l.Start(x)
	r.settleLane()
	_, err := r.answer(x)
	return err
}

// useUp takes all places that there are.
func (r *rig) useUp() {
	r.t.Helper()
	for range 3000 {
		if q := r.hinted(true, "a", "2"); !q.OK {
			return
		}
	}
	r.t.Fatal("there is no end of memory")
}

// The buffers of a chain that was not executed hold no answer, and places that were not linked are free again.
func TestHintedNotExecuted(t *testing.T) {
	r := newRig(t, 1, true)
	r.put("a", "1")
	if q := r.hinted(false, "a", ""); !q.OK || q.value != "1" {
		t.Fatalf("dealt with %v, %q", q.OK, q.value)
	}
	for _, put := range []bool{false, true} {
		r.wire.post = func(driver.QP, []driver.WR) (int, error) { return 0, driver.ErrQPError }
		if q := r.hinted(put, "a", "2"); q.OK {
			t.Fatalf("put %v was not executed, and is done", put)
		}
	}
	r.wire.post = nil
	r.get("a", "1")
	// A PUT that loses its CAS takes no memory.
	off, w := r.slot(1, "a")
	other := layout.MakeLive(w.Ver()+1, w.FP(), w.Code(), w.Unit()+1)
	for range 3000 {
		putWord(r.nodes[0].mem[off:], uint64(other))
		if q := r.hinted(true, "a", "2"); q.OK {
			t.Fatal("done, over a word that it does not know")
		}
		if now := layout.Word(r.nodes[0].word(off)); now != other {
			t.Fatalf("the slot holds %v, want %v", now, other)
		}
	}
	if r.l.Stats.CASLosses != 3000 {
		t.Fatalf("%d CAS lost: there was no place for the others", r.l.Stats.CASLosses)
	}
}

// A record that is replaced without a Task goes through limbo, and its place comes back.
func TestHintedLimbo(t *testing.T) {
	r := newRig(t, 1, true)
	r.startOver()
	r.grant(rigLo, 3)
	r.put("a", "1")
	for round := range 5 {
		for i := range 2 {
			if q := r.hinted(true, "a", "2"); !q.OK {
				t.Fatalf("round %d: no place for put %d", round, i)
			}
		}
		if q := r.hinted(true, "a", "3"); q.OK {
			t.Fatalf("round %d: took a place that others may look at", round)
		}
		for range 2 { // their own renewal, and one that shows that all are past it
			r.renew(rigLease)
			r.l.Pump()
		}
	}
}

// An expired record is not there.
func TestHintedExpired(t *testing.T) {
	r := newRig(t, 1, true)
	x := r.request(index.Put, "a", "1")
	x.Op.Expiry = 1000
	r.l.Start(x)
	r.settleLane()
	if _, err := r.answer(x); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		millis uint64
		want   bool
	}{{999, true}, {1000, false}} {
		r.millis = tc.millis
		if q := r.hinted(false, "a", ""); q.OK != tc.want {
			t.Fatalf("at %d dealt with %v, want %v", tc.millis, q.OK, tc.want)
		}
	}
}

// A chain whose accesses are noted looks at the clock once, for the lease, and a lease that has ended keeps the notes
// back, but not what was read.
func TestNotesOfChain(t *testing.T) {
	r := newRig(t, 1, true)
	r.epoch++
	r.generation = r.epoch
	r.install(func(pg *dirpb.PlacementGroup) { pg.AccessBytes = rigIndex })
	r.grant(rigLo+(rigIndex+layout.UnitSize-1)/layout.UnitSize, 2000)
	const n = 8
	var ops []*engine.Op
	for i := range n {
		key := fmt.Sprint("key", i)
		r.put(key, "1")
		ops = append(ops, &engine.Op{Kind: index.Get, Key: []byte(key), Hash: rigHash(key), Check: rigCheck(key)})
	}
	for _, valid := range []bool{true, false} {
		r.millis += 60_000 // each is due
		r.core.Tick()
		r.renew(rigLease)
		r.l.Pump()
		if !valid {
			r.now += 2 * rigLease
		}
		looks, notes := r.looks, r.l.Stats.Notes
		if left := r.l.Hinted(ops); left != 0 {
			t.Fatalf("valid %v: %d are left", valid, left)
		}
		if looks = r.looks - looks; looks != 1 {
			t.Errorf("valid %v: %d looks at the clock", valid, looks)
		}
		want := uint64(0)
		if valid {
			want = n
		}
		if notes = r.l.Stats.Notes - notes; notes != want {
			t.Errorf("valid %v: %d notes, want %d", valid, notes, want)
		}
		for _, op := range ops {
			if op.Err != nil {
				t.Errorf("valid %v: %s: %v", valid, op.Key, op.Err)
			}
		}
	}
}
