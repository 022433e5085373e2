package fsm

import (
	"reflect"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// checkRoster compares the roster of a state with one that is made anew of its sessions.
func checkRoster(t interface{ Fatalf(string, ...any) }, s *State) {
	want, is := newRoster(), s.roster
	want.readersToo = is.readersToo
	for _, x := range s.Sessions() {
		want.noteSession(x.Id, nil, x)
	}
	want.changes, want.recent = is.changes, is.recent
	if want.live = slices.Clip(want.live); len(is.live) == 0 {
		want.live = is.live
	}
	if !reflect.DeepEqual(is, want) {
		t.Fatalf("roster\n%+v\nwant\n%+v", is, want)
	}
}

// Lists of sessions that a State has handed out stay as they were, and each session that changes is named to those who
// ask not too late.
func TestRoster(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a"})
	open := func() uint32 { return h.do(openIn(1, 0)).Session.Id }
	changed := func(after uint64, want ...uint32) (now uint64) {
		t.Helper()
		ids, now, ok := h.s.ChangedSessions(after)
		if !ok || !slices.Equal(ids, want) || now != after+uint64(len(want)) {
			t.Fatalf("after %d changes %d changed, now %d, %v; want %d", after, ids, now, ok, want)
		}
		return now
	}
	a, b, c := open(), open(), open()
	at := changed(0, a, b, c)
	three := h.s.Admitted()
	h.do(expire(b))
	two := h.s.Admitted()
	d := open()
	at = changed(at, b, d)
	h.do(closeS(b, 0))
	changed(at, b)
	for _, x := range []struct {
		a    *dirpb.Sessions
		want []uint32
	}{{three, []uint32{a, b, c}}, {two, []uint32{a, c}}, {h.s.Admitted(), []uint32{a, c, d}}} {
		if !slices.Equal(x.a.Live, x.want) {
			t.Errorf("live are %d, want %d", x.a.Live, x.want)
		}
	}
	for range recentChanges {
		open()
	}
	if _, _, ok := h.s.ChangedSessions(at); ok {
		t.Error("more changes than are remembered are known")
	}
	if _, _, ok := h.s.ChangedSessions(1 << 40); ok {
		t.Error("changes to come are known")
	}
	checkRoster(t, h.s)
}
