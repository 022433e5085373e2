package fsm

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func begin(id, term, base uint64) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_Reign{Reign: &fsmpb.Reign{Id: id, Term: term, Base: base, Node: "d1"}}}
}

// A state knows what it lacks of what memory nodes were told, whatever has happened to it since: entries of a
// leadership that went on elsewhere, of one that it never had, also if its own log is longer by now; and of no other
// cluster.
func TestLacks(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(1))
	if p := h.s.Position(5); p != nil {
		t.Fatalf("a position before the first leadership: %v", p)
	}
	h.do(begin(11, 2, 10))
	h.do(begin(12, 3, 20))
	h.do(begin(13, 4, 30))
	if p := h.s.Position(34); p.Reign != 13 || p.Term != 4 || p.Index != 34 || p.ClusterId != "c" {
		t.Fatalf("position %v", p)
	}
	const applied = 40
	for _, tc := range []struct {
		name  string
		p     *dirpb.Position
		lacks bool
	}{
		{"nothing", nil, false},
		{"another cluster's", &dirpb.Position{ClusterId: "x", Reign: 99, Term: 9, Index: 99}, false},
		{"up to date", &dirpb.Position{ClusterId: "c", Reign: 13, Term: 4, Index: 40}, false},
		{"behind", &dirpb.Position{ClusterId: "c", Reign: 11, Term: 2, Index: 20}, false},
		{"an entry that is not applied", &dirpb.Position{ClusterId: "c", Reign: 13, Term: 4, Index: 41}, true},
		{"a leadership that went on elsewhere", &dirpb.Position{ClusterId: "c", Reign: 12, Term: 3, Index: 31}, true},
		{"one that began after the copy", &dirpb.Position{ClusterId: "c", Reign: 77, Term: 4, Index: 12}, true},
		{"of an old term", &dirpb.Position{ClusterId: "c", Reign: 77, Term: 1, Index: 1}, true},
		{"of a later recovery", &dirpb.Position{ClusterId: "c", Recoveries: 1}, true},
	} {
		if got := h.s.Lacks(tc.p, applied); got != tc.lacks {
			t.Errorf("%s: lacks %v", tc.name, got)
		}
	}
	h.refuse(begin(14, 5, 30), ErrInvalid, "the last began behind entry 30")
	h.refuse(begin(0, 5, 50), ErrInvalid, "leadership 0")
	h.checkCopies()

	// The latest are kept; of those before them nothing is said.
	for k := range uint64(MaxReigns) {
		h.do(begin(100+k, 5+k, 50+10*k))
	}
	h.checkCopies()
	if h.s.Lacks(&dirpb.Position{ClusterId: "c", Reign: 12, Term: 3, Index: 31}, 1<<20) {
		t.Error("it lacks what it cannot know")
	}
	if !h.s.Lacks(&dirpb.Position{ClusterId: "c", Reign: 12, Term: 6, Index: 31}, 1<<20) {
		t.Error("a leadership of a term that is kept is not missed")
	}
}

// At level 0 there are no leaderships, so that nodes of an earlier version have the same rows.
func TestReignAtLevelZero(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(0))
	h.refuse(begin(11, 2, 10), ErrRefused, "the directory is at level 0")
}
