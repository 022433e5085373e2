package index_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// startTransaction makes o a Transact of words: seq=N, and for each key key=value, or key=- which deletes it.
func (c *client) startTransaction(o *index.Op, words []string) {
	x := &index.Transaction{Status: index.StatusAt{PG: 1, Off: statusOff(0), Seq: 1}, TS: 1, Coord: uint64(c.id)}
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		if key == "seq" {
			_, _ = fmt.Sscan(value, &x.Status.Seq)
			continue
		}
		l := index.Leg{Key: []byte(key), Hash: hashOf(key), Effect: index.PutKey, Value: valueOf(value)}
		if value == "-" {
			l.Effect, l.Value = index.DeleteKey, nil
		}
		x.Legs = append(x.Legs, l)
	}
	x.Found = layout.Status(binary.LittleEndian.Uint64(c.w.region[0][statusOff(0):]))
	o.Kind, o.Machine, o.Key, o.Hash = index.Transact, x, nil, 0
}

// transactWorld has keys k and m, which c has hints of, and which others put again after that as stale says.
func transactWorld(t *testing.T, replicas uint8, stale ...string) (w *world, c *client) {
	t.Helper()
	w = newWorld(replicas, 256)
	c = w.client(1)
	for _, k := range []string{"k", "m"} {
		must(t, w.client(2).do(t, "put", k, "old"))
		must(t, c.do(t, "get", k))
	}
	for _, k := range stale {
		must(t, w.client(2).do(t, "put", k, "stale"))
	}
	return w, c
}

// fresh is what a reader without a hint finds at key, "" if it is absent.
func (w *world) fresh(t *testing.T, key string) string {
	t.Helper()
	r := w.client(3)
	delete(r.hints, key)
	return w.value(t, r, key)
}

func (w *world) status() layout.Status {
	return layout.Status(binary.LittleEndian.Uint64(w.region[0][statusOff(0):]))
}

// TestTransactCosts: two keys with hints are written in one round trip, and nothing is left to settle. Others cost no
// verb.
func TestTransactCosts(t *testing.T) {
	_, c := transactWorld(t, 1)
	must(t, c.do(t, "transact", "k=new", "m=new"))
	if x := c.op.Machine.(*index.Transaction); c.op.Rounds != 1 || c.verbs != 10 || x.Verdict != layout.Commit ||
		!x.Legs[0].Settled || !x.Legs[1].Settled {
		t.Errorf("%d round trips, %d verbs, %v; want 1, 10 and a settled commit", c.op.Rounds, c.verbs, x.Verdict)
	}
	if k, m := c.w.fresh(t, "k"), c.w.fresh(t, "m"); k != "new" || m != "new" {
		t.Errorf("k is %q, m is %q", k, m)
	}
	must(t, c.do(t, "transact", "seq=2", "k=-", "m=newer")) // by the hints that the first one has left
	if c.op.Rounds != 1 || c.verbs != 9 {
		t.Errorf("with a delete %d round trips, %d verbs; want 1 and 9", c.op.Rounds, c.verbs)
	}
	if k, m := c.w.fresh(t, "k"), c.w.fresh(t, "m"); k != "" || m != "newer" {
		t.Errorf("k is %q, m is %q", k, m)
	}
}

// TestTransactApart: what cannot be one chain is left as it is, and its places are used again.
func TestTransactApart(t *testing.T) {
	hint := func(change func(*index.Hint)) func(*client) {
		return func(c *client) {
			h := c.hints["m"]
			change(&h)
			c.hints["m"] = h
		}
	}
	for name, c := range map[string]struct {
		replicas uint8
		change   func(c *client)
		words    string
	}{
		"two copies":       {2, func(*client) {}, "k=new m=new"},
		"no such provider": {1, func(c *client) { c.unchained = true }, "k=new m=new"},
		"long":             {1, func(*client) {}, "k=new m=kib8"},
		"long key": {1, func(c *client) { c.hints[strings.Repeat("m", 5000)] = c.hints["m"] }, "k=new " +
			strings.Repeat("m", 5000) + "=-"},
		"no memory":          {1, func(c *client) { c.memory = 3 }, "k=new m=new"},
		"one that expires":   {1, hint(func(h *index.Hint) { h.Flags = index.HintExpires }), "k=new m=new"},
		"version not known":  {1, hint(func(h *index.Hint) { h.Version = 0 }), "k=new m=new"},
		"hint of elsewhere":  {1, hint(func(h *index.Hint) { h.Shard = 77 }), "k=new m=new"},
		"too many":           {1, func(*client) {}, strings.Repeat("k=new ", index.MaxLegs+1)},
		"status of the past": {1, func(c *client) { c.w.pg.Generation = 9 }, "k=new m=new"},
	} {
		t.Run(name, func(t *testing.T) {
			w, cl := transactWorld(t, c.replicas)
			c.change(cl)
			err := cl.do(t, append([]string{"transact"}, fields(c.words)...)...)
			if !errors.Is(err, index.ErrApart) || cl.verbs != 0 || w.status() != 0 {
				t.Errorf("%v after %d verbs, status %v; want %v", err, cl.verbs, w.status(), index.ErrApart)
			}
		})
	}
}

// TestTransactLooks: a key that has changed stops the chain before any intent is there. Its slot is looked at, and the
// chain posted again. The session's own hint does without the look.
func TestTransactLooks(t *testing.T) {
	for _, stale := range []string{"k", "m"} {
		for rounds := int32(2); rounds <= 3; rounds++ {
			w, c := transactWorld(t, 1, stale)
			if err := c.start(fields("transact k=new m=new")); err != nil {
				t.Fatal(err)
			}
			c.advance(1<<30, noFault)
			if w.frozen() != 0 || w.status() != 0 {
				t.Errorf("%s changed: %d intents, status %v", stale, w.frozen(), w.status())
			}
			if rounds == 2 {
				c.hints[stale] = w.client(2).hints[stale]
			}
			if _, err := c.run(9); err != nil || c.op.Err != nil || c.op.Rounds != rounds {
				t.Errorf("%s changed: %v, %v after %d round trips, want %d", stale, err, c.op.Err, c.op.Rounds, rounds)
			}
			if k, m := w.fresh(t, "k"), w.fresh(t, "m"); k != "new" || m != "new" {
				t.Errorf("%s changed: k is %q, m is %q", stale, k, m)
			}
		}
	}
}

// TestTransactFinds: a key without a hint is looked for in its group. An absent key, and keys whose fingerprints are
// equal, are left to other operations.
func TestTransactFinds(t *testing.T) {
	w, c := transactWorld(t, 1)
	delete(c.hints, "m")
	must(t, c.do(t, "transact", "k=new", "m=new"))
	if c.op.Rounds != 3 || c.verbs != 13 || w.fresh(t, "m") != "new" {
		t.Errorf("%d round trips, %d verbs, m is %q; want 3 and 13", c.op.Rounds, c.verbs, w.fresh(t, "m"))
	}
	w, c = transactWorld(t, 1)
	if err := c.do(t, "transact", "k=new", "n=new"); !errors.Is(err, index.ErrApart) || w.status() != 0 ||
		w.fresh(t, "k") != "old" {
		t.Errorf("an absent key: %v, status %v, k is %q", err, w.status(), w.fresh(t, "k"))
	}
	must(t, w.client(2).do(t, "put", "mm", "other"))
	delete(c.hints, "m")
	if err := c.do(t, "transact", "k=new", "m=new"); !errors.Is(err, index.ErrApart) || w.fresh(t, "mm") != "other" {
		t.Errorf("keys of one fingerprint: %v, mm is %q", err, w.fresh(t, "mm"))
	}
}

// frozen counts the intents in the slots of the keys' group.
func (w *world) frozen() (n int) {
	g := layout.Group(w.region[0][home():][:layout.GroupSize])
	for i := range layout.GroupSlots {
		if g.Slot(i).State() == layout.Frozen {
			n++
		}
	}
	return n
}

// TestTransactStops: a key that has gone, or has changed against the condition, leaves the rest to other operations. So
// does one whose slot shows intents for long. Placed intents are told, and nothing is decided.
func TestTransactStops(t *testing.T) {
	for name, x := range map[string]struct {
		change string
		rounds int32
	}{
		"deleted": {"del m", 2},
		"intent":  {"prepare m put other x=1 seq=1", 9},
		"expires": {"put m newer expiry=5000", 2},
	} {
		t.Run(name, func(t *testing.T) {
			w, c := transactWorld(t, 1)
			if err := c.start(fields("transact k=new m=new")); err != nil {
				t.Fatal(err)
			}
			c.advance(6, noFault) // the records, the look at m, the intent of k
			must(t, w.client(2).do(t, fields(x.change)...))
			_, err := c.run(30)
			z := c.op.Machine.(*index.Transaction)
			if got := [2]bool{z.Legs[0].IsPlaced, z.Legs[1].IsPlaced}; err != nil ||
				!errors.Is(c.op.Err, index.ErrMissed) || got != [2]bool{true, false} {
				t.Errorf("%v, %v, placed %v; want %v, the first alone", err, c.op.Err, got, index.ErrMissed)
			}
			if w.status() != 0 || c.op.Rounds != x.rounds {
				t.Errorf("the status word says %v after %d round trips, want %d", w.status(), c.op.Rounds, x.rounds)
			}
			if got := w.fresh(t, "k"); got != "old" {
				t.Errorf("k is %q", got)
			}
		})
	}
	// The intent that is there already stays, and the chain goes on behind it.
	w, c := transactWorld(t, 1)
	if err := c.start(fields("transact k=new m=new")); err != nil {
		t.Fatal(err)
	}
	c.advance(6, noFault)
	must(t, w.client(2).do(t, "put", "m", "newer"))
	if _, err := c.run(9); err != nil || c.op.Err != nil || c.op.Rounds != 3 || w.fresh(t, "m") != "new" ||
		w.fresh(t, "k") != "new" {
		t.Errorf("%v, %v after %d round trips; m is %q", err, c.op.Err, c.op.Rounds, w.fresh(t, "m"))
	}
}

// TestTransactAborted: a verdict of somebody else stands. A transaction goes on if its status word was another than its
// owner knew.
func TestTransactAborted(t *testing.T) {
	w, c := transactWorld(t, 1)
	binary.LittleEndian.PutUint64(w.region[0][statusOff(0):], uint64(layout.MakeStatus(1, layout.Abort, 1)))
	if err := c.start(fields("transact k=new m=new")); err != nil {
		t.Fatal(err)
	}
	x := c.op.Machine.(*index.Transaction)
	x.Found = 0
	if _, err := c.run(9); err != nil || c.op.Err != nil {
		t.Fatal(err, c.op.Err)
	}
	if x.Verdict != layout.Abort || !x.Legs[0].IsPlaced || x.Legs[0].Settled || w.fresh(t, "k") != "old" {
		t.Errorf("%v, %+v; k is %q", x.Verdict, x.Legs[0], w.fresh(t, "k"))
	}

	w, c = transactWorld(t, 1)
	binary.LittleEndian.PutUint64(w.region[0][statusOff(0):], uint64(layout.MakeStatus(3, layout.Commit, 1)))
	if err := c.start(fields("transact seq=4 k=new m=new")); err != nil {
		t.Fatal(err)
	}
	x = c.op.Machine.(*index.Transaction)
	x.Found = layout.MakeStatus(2, layout.Commit, 1)
	if _, err := c.run(9); err != nil || c.op.Err != nil {
		t.Fatal(err, c.op.Err)
	}
	if x.Verdict != layout.Commit || !x.Legs[1].Settled || c.op.Rounds != 2 || w.fresh(t, "m") != "new" {
		t.Errorf("%v after %d round trips, m is %q; want a commit after 2", x.Verdict, c.op.Rounds, w.fresh(t, "m"))
	}
}

// TestTransactBeginsAnew: a round that only reads, and breaks or belongs to a view that has gone, leaves no trace.
// Others have learnt the hint that it was about meanwhile. The chain is posted once then.
func TestTransactBeginsAnew(t *testing.T) {
	for name, c := range map[string]struct {
		looks, fails bool
	}{
		"find breaks": {false, true}, "find in another view": {false, false},
		"look breaks": {true, true}, "look in another view": {true, false},
	} {
		t.Run(name, func(t *testing.T) {
			w, cl := transactWorld(t, 1)
			h := cl.hints["m"]
			delete(cl.hints, "m")
			if err := cl.start(fields("transact k=new m=new")); err != nil {
				t.Fatal(err)
			}
			if c.looks {
				cl.advance(1<<30, noFault)
			}
			if f := noFault; c.fails {
				cl.advance(1<<30, failBefore)
			} else {
				cl.advance(1<<30, f)
				cl.op.Rebase()
			}
			cl.hints["m"] = h
			before := cl.op.Rounds
			if _, err := cl.run(9); err != nil || cl.op.Err != nil || cl.op.Rounds != before+1 {
				t.Errorf("%v, %v after %d more round trips, want 1", err, cl.op.Err, cl.op.Rounds-before)
			}
			if k, m := w.fresh(t, "k"), w.fresh(t, "m"); k != "new" || m != "new" || len(w.wrong) > 0 {
				t.Errorf("k is %q, m is %q, places given up twice: %v", k, m, w.wrong)
			}
		})
	}
}

// farWorld has key k in placement group 1 and key L in placement group 2, which c has hints of.
func farWorld(t *testing.T) (w *world, c *client) {
	t.Helper()
	w = newWorld(1, 256)
	w.other = newWorld(1, 256)
	w.other.pg.ID = 2
	w.depth, w.split, w.moved = 1, true, true
	w.child = &index.Route{PG: &w.other.pg, Shard: 9, ShardOff: shardOff, Segments: 1, Depth: 1}
	c = w.client(1)
	for _, k := range []string{"k", "L"} {
		must(t, w.client(2).do(t, "put", k, "old"))
		must(t, c.do(t, "get", k))
	}
	c.places = nil
	return w, c
}

// TestTransactFar: keys in two placement groups are two chains. The second is settled by others.
func TestTransactFar(t *testing.T) {
	w, c := farWorld(t)
	must(t, c.do(t, "transact", "k=new", "L=new"))
	x := c.op.Machine.(*index.Transaction)
	if c.op.Rounds != 2 || x.Verdict != layout.Commit || !x.Legs[0].Settled || !x.Legs[1].IsPlaced ||
		x.Legs[1].Settled {
		t.Errorf("%d round trips, %v, %+v; want 2 and the second left", c.op.Rounds, x.Verdict, x.Legs)
	}
	if k, l := w.fresh(t, "k"), w.fresh(t, "L"); k != "new" || l != "new" {
		t.Errorf("k is %q, L is %q", k, l)
	}
}

// TestTransactFarStops: what ends a transaction between its two chains leaves no place to somebody else that a slot
// names. Nothing is decided.
func TestTransactFarStops(t *testing.T) {
	over := errors.New("time is over")
	for name, x := range map[string]struct {
		end  func(w *world, c *client)
		want error
	}{
		"given up": {func(_ *world, c *client) { c.op.Fail(over) }, index.ErrUnknown},
		"without a view": {func(w *world, c *client) {
			w.noRoute = true
			c.op.Rebase()
			c.op.Next()
			c.op.Fail(over)
		}, index.ErrUnknown},
		"view goes":   {func(w *world, c *client) { w.noRoute = true; c.op.Next() }, index.ErrMissed},
		"memory goes": {func(w *world, c *client) { w.pg.Generation++; c.op.Next() }, index.ErrMissed},
	} {
		t.Run(name, func(t *testing.T) {
			w, c := farWorld(t)
			if err := c.start(fields("transact k=new L=new")); err != nil {
				t.Fatal(err)
			}
			c.advance(1<<30, noFault)
			x.end(w, c)
			placed := c.op.Machine.(*index.Transaction).Legs[1].IsPlaced
			if happened := c.op.Machine.(*index.Transaction).MayHaveHappened(); happened {
				t.Error("may have happened, and its verdict was not posted")
			}
			if !errors.Is(c.op.Err, x.want) || placed != (x.want == index.ErrMissed) || w.status() != 0 {
				t.Errorf("%v, placed %v, status %v; want %v", c.op.Err, placed, w.status(), x.want)
			}
			for _, p := range c.places {
				if strings.HasPrefix(p, "unuse pg 2") {
					t.Errorf("gives back a place that a slot names: %v", c.places)
				}
			}
		})
	}
	// The map changes between a look and the first chain: nothing has happened.
	w, c := transactWorld(t, 1)
	delete(c.hints, "m")
	if err := c.start(fields("transact k=new m=new")); err != nil {
		t.Fatal(err)
	}
	c.advance(1<<30, noFault)
	c.advance(1<<30, noFault)
	w.pg.Generation++
	if _, err := c.run(9); err != nil || !errors.Is(c.op.Err, index.ErrApart) || w.status() != 0 || w.frozen() != 0 {
		t.Errorf("%v, %v, status %v, %d intents; want %v", err, c.op.Err, w.status(), w.frozen(), index.ErrApart)
	}
}

// TestTransactFarBroken: a READ goes by the next connection to where the chain went, and the answer waits for it.
func TestTransactFarBroken(t *testing.T) {
	for _, f := range []fault{failBefore, failAfter} {
		for pg := uint32(1); pg <= 2; pg++ {
			w, c := farWorld(t)
			if err := c.start(fields("transact k=new L=new")); err != nil {
				t.Fatal(err)
			}
			if pg == 1 {
				c.advance(1<<30, noFault)
			}
			c.advance(1<<30, f)
			c.advance(1<<30, noFault) // reconnects
			c.op.Rebase()             // the view has changed, too
			if a := c.op.Next(); a != index.Post || len(c.op.Accesses) != 1 || c.op.Accesses[0].Verb != index.Read ||
				c.op.Route.PG.ID != pg {
				t.Fatalf("action %d, %+v at placement group %d; want a READ at %d", a, c.op.Accesses, c.op.Route.PG.ID,
					pg)
			}
			if v, ok := c.op.MapVersion(); !ok || v != 1 || !c.op.Posted() {
				t.Errorf("acts by map %d (%v), posted %v; want the chain's", v, ok, c.op.Posted())
			}
			if c.op.Next() != index.Done || !errors.Is(c.op.Err, index.ErrBroken) {
				t.Errorf("%v, want %v", c.op.Err, index.ErrBroken)
			}
			if got, want := w.fresh(t, "k") == "new", f == failAfter && pg == 1; got != want {
				t.Errorf("%v in placement group %d: happened: %v, want %v", f, pg, got, want)
			}
		}
	}
	// No connection comes: the outcome stays open.
	for _, end := range []func(o *index.Op){
		func(o *index.Op) { o.Next(); o.NotPosted() },
		func(o *index.Op) { o.Next() },
		func(*index.Op) {},
	} {
		_, c := farWorld(t)
		if err := c.start(fields("transact k=new L=new")); err != nil {
			t.Fatal(err)
		}
		c.advance(1<<30, noFault)
		c.advance(1<<30, failAfter)
		c.advance(1<<30, noFault)
		end(c.op)
		if c.op.Fail(errors.New("no connection")); !errors.Is(c.op.Err, index.ErrUnknown) {
			t.Errorf("given up while it waits for a connection: %v, want %v", c.op.Err, index.ErrUnknown)
		}
	}
	// The chain went with the memory.
	w, c := farWorld(t)
	if err := c.start(fields("transact k=new L=new")); err != nil {
		t.Fatal(err)
	}
	c.advance(1<<30, failBefore)
	c.advance(1<<30, noFault)
	next := *w.other
	next.pg.Generation++
	w.other = &next
	if c.op.Next() != index.Done || !errors.Is(c.op.Err, index.ErrBroken) {
		t.Errorf("placement group 2 has lost its memory: %v, want %v", c.op.Err, index.ErrBroken)
	}
}

// TestTransactBroken: a connection that breaks, or a caller that goes, leaves open what has happened, and no place goes
// back to where a verb may still come.
func TestTransactBroken(t *testing.T) {
	for _, f := range []fault{failBefore, failAfter} {
		w, c := transactWorld(t, 1)
		if err := c.start(fields("transact k=new m=new")); err != nil {
			t.Fatal(err)
		}
		lines, _ := c.advance(1<<30, f)
		more, err := c.run(9)
		if err != nil || !errors.Is(c.op.Err, index.ErrBroken) {
			t.Fatalf("%v, %v; want %v", err, c.op.Err, index.ErrBroken)
		}
		all := strings.Join(append(lines, more...), "\n")
		if n := strings.Count(all, "place: leak"); n != 4 || strings.Contains(all, "place: unuse") {
			t.Errorf("%d places are left to recall, want 4:\n%s", n, all)
		}
		want := map[fault]string{failBefore: "old", failAfter: "new"}[f]
		if got := w.fresh(t, "m"); got != want {
			t.Errorf("m is %q, want %q", got, want)
		}
	}
	_, c := transactWorld(t, 1)
	if err := c.start(fields("transact k=new m=new")); err != nil {
		t.Fatal(err)
	}
	c.advance(3, noFault)
	if c.op.Fail(errors.New("time is over")); !errors.Is(c.op.Err, index.ErrUnknown) ||
		!c.op.Machine.(*index.Transaction).MayHaveHappened() {
		t.Errorf("given up while it was under way: %v, want %v", c.op.Err, index.ErrUnknown)
	}
	_, c = transactWorld(t, 1)
	if err := c.start(fields("transact k=new m=new")); err != nil {
		t.Fatal(err)
	}
	if c.op.Next() != index.Post {
		t.Fatal("posts nothing")
	}
	c.op.NotPosted()
	if c.op.Fail(errors.New("no connection")); errors.Is(c.op.Err, index.ErrUnknown) {
		t.Errorf("given up before it was posted: %v", c.op.Err)
	}
}
