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
	if x := c.op.Machine.(*index.Transaction); c.op.Rounds != 1 || c.verbs != 9 || x.Verdict != layout.Commit ||
		!x.Legs[0].Settled || !x.Legs[1].Settled {
		t.Errorf("%d round trips, %d verbs, %v; want 1, 9 and a settled commit", c.op.Rounds, c.verbs, x.Verdict)
	}
	if k, m := c.w.fresh(t, "k"), c.w.fresh(t, "m"); k != "new" || m != "new" {
		t.Errorf("k is %q, m is %q", k, m)
	}
	must(t, c.do(t, "transact", "seq=2", "k=-", "m=newer")) // by the hints that the first one has left
	if c.op.Rounds != 1 || c.verbs != 8 {
		t.Errorf("with a delete %d round trips, %d verbs; want 1 and 8", c.op.Rounds, c.verbs)
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
		"two copies":         {2, func(*client) {}, "k=new m=new"},
		"no such provider":   {1, func(c *client) { c.unchained = true }, "k=new m=new"},
		"no hint":            {1, func(c *client) { delete(c.hints, "m") }, "k=new m=new"},
		"long":               {1, func(*client) {}, "k=new m=kib8"},
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

// TestTransactStops: a key that has changed stops the chain. Placed intents are told, and nothing is decided.
func TestTransactStops(t *testing.T) {
	for stale, placed := range map[string][2]bool{"k": {}, "m": {true, false}} {
		w, c := transactWorld(t, 1, stale)
		err := c.do(t, "transact", "k=new", "m=new")
		x := c.op.Machine.(*index.Transaction)
		if got := [2]bool{x.Legs[0].IsPlaced, x.Legs[1].IsPlaced}; !errors.Is(err, index.ErrMissed) || got != placed {
			t.Errorf("%s changed: %v, placed %v; want %v, %v", stale, err, got, index.ErrMissed, placed)
		}
		if s := w.status(); s != 0 {
			t.Errorf("%s changed: the status word says %v", stale, s)
		}
		if _, ok := c.hints[stale]; ok {
			t.Errorf("%s changed, and the hint that did not hold is kept", stale)
		}
		for _, k := range []string{"k", "m"} {
			want := "old"
			if k == stale {
				want = "stale"
			}
			if got := w.fresh(t, k); got != want {
				t.Errorf("%s changed: %s is %q, want %q", stale, k, got, want)
			}
		}
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
	if c.op.Fail(errors.New("time is over")); !errors.Is(c.op.Err, index.ErrUnknown) {
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
