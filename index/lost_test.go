package index_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// TestIntentOfLostMemory: an intent whose status word's placement group has lost its memory counts as aborted for
// everybody, whatever stands by now where the word was: another transaction's verdict there is not its own.
func TestIntentOfLostMemory(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		for _, next := range []string{"get k", "append k +x", "prepare k put mine x=4 seq=1 ts=9"} {
			w := txnWorld(t, r, "put k old", true)
			must(t, w.client(1).do(t, fields("prepare k put new "+txnAt(true))...))
			must(t, w.client(1).do(t, fields("decide commit "+txnAt(true))...))
			w.other.pg.Generation++ // as if all of it had been lost, and another transaction had committed there since
			c := w.client(2)
			must(t, c.do(t, fields(next)...))
			if next == "prepare k put mine x=4 seq=1 ts=9" {
				must(t, c.do(t, "decide", "abort", "x=4"))
				must(t, c.do(t, "settle", "k", "abort", "x=4"))
			}
			want := "old"
			if next == "append k +x" {
				want = "old+x"
			}
			if got := w.value(t, w.client(3), "k"); got != want {
				t.Errorf("r=%d, %s: then k is %q, want %q", r, next, got, want)
			}
		}
	}
}

// TestModifyOfChunks: a function that modifies a value in chunks is given the whole of it, and nothing of how it is
// kept.
func TestModifyOfChunks(t *testing.T) {
	for r := uint8(1); r <= 2; r++ {
		w := newWorld(r, 200_000)
		c := w.client(1)
		must(t, c.do(t, "put", "k", "long100"))
		o := &index.Op{Kind: index.Modify, Key: []byte("k"), Hash: hashOf("k")}
		o.Modify = func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
			if cur == nil || !bytes.Equal(cur.Value, longValue(100)) || cur.Flags&^layout.FlagsOfValue != 0 {
				t.Errorf("r=%d: given a value of %d bytes with flags %#x", r, len(cur.Value), cur.Flags)
			}
			return []byte("short"), cur.Flags, 0, nil
		}
		c.begin(o)
		if _, err := c.run(300); err != nil || o.Err != nil {
			t.Fatal(err, o.Err)
		}
		if got := w.value(t, w.client(2), "k"); got != "short" {
			t.Errorf("r=%d: then k is %q", r, short([]byte(got)))
		}
	}
}

// TestSettleOvertaken: of two who take an aborted intent away at once, with a copy of the record before each, the
// slower one gives the place of its copy back, or leaves it to a recall if its compare-and-swap was not heard of.
func TestSettleOvertaken(t *testing.T) {
	for _, f := range []fault{noFault, failBefore} {
		for r := uint8(1); r <= 3; r++ {
			w := txnWorld(t, r, "put k old", false)
			c := w.client(1)
			must(t, c.do(t, fields("prepare k put new x=3")...))
			must(t, c.do(t, "decide", "abort", "x=3"))
			must(t, c.start(fields("settle k abort x=3")))
			for c.op.Step().String() != "cas-slot" || !c.posted {
				if _, done := c.advance(0, noFault); done {
					t.Fatal("done before it has settled")
				}
				if c.op.Step().String() != "cas-slot" {
					c.advance(1<<30, noFault)
				}
			}
			must(t, w.client(2).do(t, "settle", "k", "find", "x=3"))
			c.advance(1<<30, f)
			lines, err := c.run(100)
			if err != nil || c.op.Err != nil {
				t.Fatal(err, c.op.Err)
			}
			what := fmt.Sprintf("fault %d, r=%d", f, r)
			if got := w.value(t, w.client(3), "k"); got != "old" {
				t.Errorf("%s: then k is %q", what, got)
			}
			if f == noFault {
				w.checkTidy(t, what)
			} else if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, "leak u4") }) {
				t.Errorf("%s: the copy's place is left to nobody: %q", what, lines) // a recall finds it
			}
		}
	}
}
