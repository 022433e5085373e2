package index_test

import (
	"fmt"
	"strings"
	"testing"
)

type cost struct{ rounds, verbs int }

type costCase struct {
	name, op string
	warm     bool // the client has a hint
	absent   bool
	want     [3]cost // by replicas
}

// TestCosts counts round trips and verbs, the unlock off the path included,
// against the cost table of docs/protocol.md.
func TestCosts(t *testing.T) {
	testCosts(t, false, []costCase{
		{"GET cached", "get k", true, false, [3]cost{{1, 2}, {1, 2}, {1, 2}}},
		{"GET", "get k", false, false, [3]cost{{2, 2}, {2, 2}, {2, 2}}},
		{"GET absent", "get k", false, true, [3]cost{{1, 1}, {1, 1}, {1, 1}}},
		{"GET of a stub cached", "get k", true, false, [3]cost{{2, 2}, {2, 2}, {2, 2}}},
		{"GET of a stub", "get k", false, false, [3]cost{{3, 2}, {3, 2}, {3, 2}}},
		{"EXISTS of a stub cached", "exists k", true, false, [3]cost{{1, 1}, {1, 1}, {1, 1}}},
		{"UPDATE of a stub cached", "put k v2", true, false, [3]cost{{1, 2}, {2, 4}, {3, 6}}},
		{"MODIFY of a stub cached", "append k v", true, false, [3]cost{{4, 6}, {5, 8}, {6, 10}}},
		{"DEMOTE cached", "demote k", true, false, [3]cost{{2, 4}, {3, 6}, {4, 8}}},
		{"PROMOTE of a stub cached", "promote k", true, false, [3]cost{{3, 4}, {4, 6}, {5, 8}}},
		{"READDRESS of a stub cached", "readdress k to=1", true, false, [3]cost{{2, 4}, {3, 6}, {4, 8}}},
		{"LOCATE of a stub", "locate k", false, false, [3]cost{{2, 4}, {2, 5}, {2, 5}}},
		{"EXISTS cached", "exists k", true, false, [3]cost{{1, 1}, {1, 1}, {1, 1}}},
		{"EXISTS", "exists k", false, false, [3]cost{{2, 2}, {2, 2}, {2, 2}}},
		{"EXISTS absent", "exists k", false, true, [3]cost{{1, 1}, {1, 1}, {1, 1}}},
		{"UPDATE cached", "put k v2", true, false, [3]cost{{1, 2}, {2, 4}, {3, 6}}},
		{"UPDATE no hint", "put k v2", false, false, [3]cost{{3, 6}, {4, 9}, {5, 11}}},
		{"INSERT", "put k v2", false, true, [3]cost{{2, 5}, {3, 8}, {4, 10}}},
		{"DELETE cached", "del k", true, false, [3]cost{{1, 1}, {2, 2}, {3, 3}}},
		{"MODIFY cached", "append k v", true, false, [3]cost{{2, 4}, {3, 6}, {4, 8}}},
	})
}

// TestSpeculativeCosts counts them where words are published speculatively. By a confirmed word an UPDATE is one round
// trip, with any number of copies. A LIVE word that is read without a hint is confirmed in one more.
func TestSpeculativeCosts(t *testing.T) {
	testCosts(t, true, []costCase{
		{"GET cached", "get k", true, false, [3]cost{{1, 2}, {1, 2}, {1, 2}}},
		{"GET", "get k", false, false, [3]cost{{2, 2}, {3, 3}, {3, 4}}},
		{"GET absent", "get k", false, true, [3]cost{{1, 1}, {1, 1}, {1, 1}}},
		{"EXISTS", "exists k", false, false, [3]cost{{2, 2}, {3, 3}, {3, 4}}},
		{"UPDATE cached", "put k v2", true, false, [3]cost{{1, 2}, {1, 4}, {1, 6}}},
		{"UPDATE no hint", "put k v2", false, false, [3]cost{{3, 6}, {4, 9}, {5, 11}}},
		{"INSERT", "put k v2", false, true, [3]cost{{2, 5}, {3, 8}, {4, 10}}},
		{"DELETE cached", "del k", true, false, [3]cost{{1, 1}, {2, 2}, {3, 3}}},
		{"MODIFY cached", "append k v", true, false, [3]cost{{2, 4}, {2, 6}, {2, 8}}},
	})
}

func testCosts(t *testing.T, speculative bool, cases []costCase) {
	for _, c := range cases {
		for r := 1; r <= 3; r++ {
			t.Run(fmt.Sprintf("%s r=%d", c.name, r), func(t *testing.T) {
				w := newWorld(uint8(r), 64)
				w.pg.Speculative = speculative
				if !c.absent {
					if err := w.client(1).do(t, "put", "k", "v1"); err != nil {
						t.Fatal(err)
					}
				}
				if strings.Contains(c.name, "stub") {
					must(t, w.client(1).do(t, "demote", "k"))
				}
				cl := w.client(2)
				if c.warm {
					if err := cl.do(t, "get", "k"); err != nil {
						t.Fatal(err)
					}
				}
				_ = cl.do(t, fields(c.op)...)
				if got := (cost{int(cl.op.Rounds), cl.verbs}); got != c.want[r-1] {
					t.Errorf("%d rounds, %d verbs; want %d and %d (steps %v)", got.rounds, got.verbs,
						c.want[r-1].rounds, c.want[r-1].verbs, cl.steps)
				}
			})
		}
	}
}

// TestTxnCosts counts the same of the parts of a transaction, and of operations that meet an intent.
func TestTxnCosts(t *testing.T) {
	for _, c := range []struct {
		name, before, op string
		warm             bool
		want             [3]cost
	}{
		{"prepare cached", "", "prepare k put v2", true, [3]cost{{1, 3}, {2, 6}, {3, 9}}},
		{"prepare delete cached", "", "prepare k del", true, [3]cost{{1, 2}, {2, 4}, {3, 6}}},
		{"prepare guard cached", "", "prepare k keep", true, [3]cost{{2, 5}, {3, 8}, {4, 11}}},
		{"prepare no hint", "", "prepare k put v2", false, [3]cost{{3, 5}, {4, 8}, {5, 11}}},
		{"prepare insert", "", "prepare m put v2", false, [3]cost{{3, 7}, {4, 11}, {5, 14}}},
		{"decide", "", "decide commit", false, [3]cost{{1, 1}, {2, 2}, {3, 3}}},
		{"settle a commit", "prepare k put v2", "settle k commit", false, [3]cost{{1, 1}, {2, 2}, {3, 3}}},
		{"settle an abort", "prepare k put v2", "settle k abort", false, [3]cost{{2, 3}, {3, 5}, {4, 7}}},
		{"settle an aborted guard", "prepare k keep", "settle k abort", false, [3]cost{{1, 1}, {2, 2}, {3, 3}}},
		{"GET of an intent", "prepare k put v2", "get k", false, [3]cost{{3, 5}, {3, 5}, {3, 5}}},
		{"GET of an intent, cached", "prepare k put v2", "get k", true, [3]cost{{3, 7}, {3, 7}, {3, 7}}},
		{"GET of a guard", "prepare k keep", "get k", false, [3]cost{{3, 3}, {3, 3}, {3, 3}}},
	} {
		for r := 1; r <= 3; r++ {
			t.Run(fmt.Sprintf("%s r=%d", c.name, r), func(t *testing.T) {
				w := newWorld(uint8(r), 64)
				must(t, w.client(2).do(t, "put", "k", "v1"))
				cl := w.client(1)
				if c.warm {
					must(t, cl.do(t, "get", "k"))
				}
				if c.before != "" {
					h := cl.hints["k"]
					must(t, cl.do(t, fields(c.before)...))
					if cl.hints["k"] = h; !c.warm {
						delete(cl.hints, "k")
					}
				}
				must(t, cl.do(t, fields(c.op)...))
				if got := (cost{int(cl.op.Rounds), cl.verbs}); got != c.want[r-1] {
					t.Errorf("%d rounds, %d verbs; want %d and %d (steps %v)", got.rounds, got.verbs,
						c.want[r-1].rounds, c.want[r-1].verbs, cl.steps)
				}
			})
		}
	}
}
