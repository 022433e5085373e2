package exec

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// TestNotes: each command's changes have its own event or those that it names, and are undone with what it did.
func TestNotes(t *testing.T) {
	s := newShelf(1)
	s.put(t, "a", "1")
	p := s.plan(t)
	told := func() (list []string) {
		for _, c := range p.Changes {
			list = append(list, fmt.Sprintf("%s %s new=%t gone=%t", c.Name, c.Key.Name, c.Created, c.Deleted))
		}
		return list
	}
	do := func(own string, f func()) {
		p.Forget()
		n := p.Note()
		f()
		if a := p.Find[KeyName{Name: "a"}]; !n.Had(a) {
			t.Error("a was not there")
		}
		n.End(Event{values.OnGeneric, own})
	}
	do("set", func() { p.set("a", "2"); p.set("b", "1") })
	do("read", func() { p.Key([]byte("b")) })
	before := p.Snapshot()
	do("", func() {
		from, to := p.Key([]byte("a")), p.Key([]byte("c"))
		p.Name(from, values.OnGeneric, "rename_from")
		p.Name(to, values.OnGeneric, "rename_to")
		to.SetAs(client.Plain, from.Value, 0)
		from.Delete()
	})
	set := []string{"set a new=false gone=false", "set b new=true gone=false"}
	all := append(slices.Clone(set), "rename_from a new=false gone=true", "rename_to c new=true gone=false")
	if got := told(); !slices.Equal(got, all) {
		t.Errorf("told %q, want %q", got, all)
	}
	p.Undo(before)
	if got := told(); !slices.Equal(got, set) {
		t.Errorf("undone: told %q, want %q", got, set)
	}
	if err := p.Commit(); err != nil || s.value(t, 0, "a") != "2" || s.value(t, 0, "c") != "none" {
		t.Errorf("%v: a is %s, c is %s", err, s.value(t, 0, "a"), s.value(t, 0, "c"))
	}
	if p.Begin(1e12, 0); len(p.Changes) > 0 {
		t.Errorf("%d changes at the beginning", len(p.Changes))
	}
}
