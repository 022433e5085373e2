package index_test

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// meetWorld is a world in which client 1 has prepared k, and client 2 comes with a hint from before.
func meetWorld(t testing.TB, r uint8, elsewhere bool, effect string) (w *world, c *client) {
	w = txnWorld(t, r, "put k old", elsewhere)
	c = w.client(2)
	must(t, c.do(t, "get", "k"))
	for range 5 { // versions grow that client 2 does not know of
		must(t, w.client(1).do(t, "put", "k", "old"))
	}
	must(t, w.client(1).do(t, fields("prepare k "+effect+" ts=1 "+txnAt(elsewhere))...))
	return w, c
}

// stepsOf finishes c's operation and returns its round trips.
func (c *client) stepsOf(t testing.TB) []string {
	t.Helper()
	if _, err := c.run(300); err != nil || c.op.Err != nil {
		t.Fatal(err, c.op.Err)
	}
	return c.steps
}

// TestMeetDecided: a Prepare whose hint is from before another transaction's intent takes three round trips more than
// its publish, once that is decided: the intent, the status word with what it needs to know of the key, and its own
// intent.
func TestMeetDecided(t *testing.T) {
	for r := 1; r <= 3; r++ {
		for _, op := range []string{"put mine", "put mine if-present", "keep", "del"} {
			for _, verdict := range []string{"commit", "abort"} {
				w, c := meetWorld(t, uint8(r), false, "put new")
				must(t, w.client(1).do(t, "decide", verdict, "x=3"))
				must(t, c.start(fields("prepare k "+op+" ts=2 x=4")))
				want := []string{"cas-slot", "read-lost", "read-status", "cas-slot"}
				if op == "keep" || op == "put mine if-present" {
					want[0] = "get-cached" // it needs the record, and finds the intent's word instead
					want = slices.Insert(want, 1, "get-cached")
					want = slices.Delete(want, 2, 3)
				}
				for range r - 1 {
					want = append(want, "publish")
				}
				if got := c.stepsOf(t); !slices.Equal(got, want) {
					t.Errorf("%s of an intent with %s, r=%d: %v, want %v", op, verdict, r, got, want)
				}
				there := w.client(1).txns["k"].Placed.Version
				if v := c.op.Version; verdict == "commit" && (v < there || v == there && op != "keep") {
					t.Errorf("%s of an intent, r=%d: version %d does not follow %d", op, r, v, there)
				}
			}
		}
	}
}

// TestMeetWaits: each look of a younger transaction at an intent that stands is a single round trip, and it goes on
// from there; in another placement group the record is read behind the last look.
func TestMeetWaits(t *testing.T) {
	for r := 1; r <= 3; r++ {
		for _, elsewhere := range []bool{false, true} {
			w, c := meetWorld(t, uint8(r), elsewhere, "put new")
			must(t, c.start(fields("prepare k put mine if-present ts=2 x=4")))
			for waits := 0; waits < 5; {
				if _, done := c.advance(1<<30, noFault); done {
					t.Fatal("it did not wait")
				}
				if c.action == index.Backoff {
					waits++
				}
			}
			must(t, w.client(1).do(t, fields("decide commit "+txnAt(elsewhere))...))
			want := []string{"get-cached", "get-cached", "read-status", "read-status", "read-status", "read-status",
				"read-status", "read-status"}
			if elsewhere {
				want = append(want, "read-intent")
			}
			want = append(want, "cas-slot")
			for range r - 1 {
				want = append(want, "publish")
			}
			if got := c.stepsOf(t); !slices.Equal(got, want) {
				t.Errorf("r=%d, elsewhere %v: %v, want %v", r, elsewhere, got, want)
			}
		}
	}
}

// TestMeetSettled: the owner settles between the look at the status word and the CAS that expects the intent. The CAS
// finds the word that the intent stood for, so that the next one follows at once.
func TestMeetSettled(t *testing.T) {
	for r := 1; r <= 3; r++ {
		for _, op := range []string{"put mine", "put mine if-present", "del"} {
			w, c := meetWorld(t, uint8(r), false, "put new")
			must(t, w.client(1).do(t, "decide", "commit", "x=3"))
			must(t, c.start(fields("prepare k "+op+" ts=2 x=4")))
			for c.op.Step().String() != "read-status" || c.posted {
				c.advance(1<<30, noFault)
			}
			must(t, w.client(1).do(t, "settle", "k", "commit", "x=3"))
			was := len(c.steps)
			want := []string{"cas-slot", "cas-slot"}
			for range r - 1 {
				want = append(want, "publish")
			}
			if got := c.stepsOf(t)[was:]; !slices.Equal(got, want) {
				t.Errorf("%s, r=%d: %v, want %v", op, r, got, want)
			}
			must(t, c.do(t, "decide", "commit", "x=4"))
			must(t, c.do(t, "settle", "k", "commit", "x=4"))
			if v, want := w.value(t, w.client(5), "k"), map[bool]string{true: "", false: "mine"}[op == "del"]; v !=
				want {
				t.Errorf("%s, r=%d: the value is %q, want %q", op, r, v, want)
			}
			w.checkTidy(t, fmt.Sprintf("%s, r=%d", op, r))
		}
	}
}

// TestTxnAges: of two transactions that meet, the older waits for two looks, since the younger is most often about to
// be decided, and aborts it then; the younger waits ten times as often.
func TestTxnAges(t *testing.T) {
	for _, tc := range []struct{ there, comes, waits int }{{5, 3, 2}, {3, 5, 20}} {
		w := txnWorld(t, 2, "put k old", false)
		must(t, w.client(1).do(t, "prepare", "k", "put", "one", "x=3", "seq=1", fmt.Sprintf("ts=%d", tc.there)))
		c := w.client(2)
		must(t, c.start(fields(fmt.Sprintf("prepare k put two x=4 seq=1 ts=%d", tc.comes))))
		waits, aborted := 0, false
		for done := false; !done && !aborted; {
			_, done = c.advance(1<<30, noFault)
			if c.action == index.Backoff {
				waits++
			}
			aborted = layout.Status(binary.LittleEndian.Uint64(w.region[0][statusOff(3):])).Verdict() == layout.Abort
		}
		if !aborted || waits != tc.waits {
			t.Errorf("of %d meets that of %d: aborts it %v, after %d waits; want %d", tc.comes, tc.there, aborted,
				waits, tc.waits)
		}
		c.stepsOf(t)
	}
}
