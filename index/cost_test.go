package index_test

import (
	"fmt"
	"testing"
)

// TestCosts counts round trips and verbs, the unlock off the path included,
// against the cost table of docs/protocol.md.
func TestCosts(t *testing.T) {
	type cost struct{ rounds, verbs int }
	for _, c := range []struct {
		name, op string
		warm     bool // the client has a hint
		absent   bool
		want     [3]cost // by replicas
	}{
		{"GET cached", "get k", true, false, [3]cost{{1, 2}, {1, 2}, {1, 2}}},
		{"GET", "get k", false, false, [3]cost{{2, 2}, {2, 2}, {2, 2}}},
		{"GET absent", "get k", false, true, [3]cost{{1, 1}, {1, 1}, {1, 1}}},
		{"UPDATE cached", "put k v2", true, false, [3]cost{{1, 2}, {2, 4}, {3, 6}}},
		{"UPDATE no hint", "put k v2", false, false, [3]cost{{3, 6}, {4, 9}, {5, 11}}},
		{"INSERT", "put k v2", false, true, [3]cost{{2, 5}, {3, 8}, {4, 10}}},
		{"DELETE cached", "del k", true, false, [3]cost{{1, 1}, {2, 2}, {3, 3}}},
		{"MODIFY cached", "append k v", true, false, [3]cost{{2, 4}, {3, 6}, {4, 8}}},
	} {
		for r := 1; r <= 3; r++ {
			t.Run(fmt.Sprintf("%s r=%d", c.name, r), func(t *testing.T) {
				w := newWorld(uint8(r), 64)
				if !c.absent {
					if err := w.client(1).do(t, "put", "k", "v1"); err != nil {
						t.Fatal(err)
					}
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
