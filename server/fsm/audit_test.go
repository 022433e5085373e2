package fsm

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func byAnn(c *fsmpb.Command, action string) *fsmpb.Command {
	c.Audit = &dirpb.AuditEntry{UnixMillis: 7, Identity: "operator/ann", Remote: "10.0.0.1:9", Action: action,
		Object: "a"}
	return c
}

func auditActions(s *State, after uint64, limit int) (actions []string) {
	entries, _ := s.Audit(after, limit)
	for _, e := range entries {
		actions = append(actions, e.Action)
	}
	return actions
}

// TestAudit: changes that somebody asked for are kept, refusals and repetitions are not.
func TestAudit(t *testing.T) {
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1})
	limit := func(bytes uint64) *fsmpb.Command {
		return &fsmpb.Command{
			Op: &fsmpb.Command_SetNamespace{SetNamespace: &dirpb.SetNamespaceRequest{Name: "a", LimitBytes: bytes}}}
	}
	if r := h.do(byAnn(limit(1<<20), "first")); r.Audit.GetNumber() != 1 || r.Audit.Identity != "operator/ann" {
		t.Errorf("the first entry is %v", r.Audit)
	}
	if r := h.do(byAnn(limit(1<<20), "again")); r.Audit != nil {
		t.Errorf("what changes nothing has the entry %v", r.Audit)
	}
	h.refuse(byAnn(&fsmpb.Command{
		Op: &fsmpb.Command_SetNamespace{SetNamespace: &dirpb.SetNamespaceRequest{Name: "none"}}}, "refused"),
		ErrNotFound)
	h.do(limit(2 << 20)) // nobody asked for it
	h.do(byAnn(limit(1<<20), "second"))
	h.do(byAnn(&fsmpb.Command{}, "outside the state"))
	h.refuse(&fsmpb.Command{}, ErrInvalid)
	if got, want := auditActions(h.s, 0, 0), []string{"first", "second", "outside the state"}; !slices.Equal(
		got, want) {
		t.Errorf("entries %q, want %q", got, want)
	}
	if got := auditActions(h.s, 1, 1); !slices.Equal(got, []string{"outside the state"}) {
		t.Errorf("the last of those after 1 is %q", got)
	}
	if got := auditActions(h.s, 99, 0); got != nil {
		t.Errorf("after the last there is %q", got)
	}
	long := byAnn(limit(3<<20), strings.Repeat("é", MaxLabelLen))
	long.Audit.Detail = strings.Repeat("d", MaxAuditDetail+1)
	if e := h.do(long).Audit; len(e.Action) > MaxLabelLen || len(e.Detail) != MaxAuditDetail {
		t.Errorf("%d bytes of action and %d of detail are kept", len(e.Action), len(e.Detail))
	}
}

// TestAuditBound: the latest entries are kept, also by a state that is loaded from its rows.
func TestAuditBound(t *testing.T) {
	s := New()
	const all = MaxAudit + 10
	for i := range all {
		if r := Apply(s, byAnn(&fsmpb.Command{}, "x")); r.Err != nil || r.Audit.Number != uint64(i+1) ||
			len(r.Changes) != 2 {
			t.Fatalf("entry %d: %v, %v, %d rows", i, r.Err, r.Audit, len(r.Changes))
		}
	}
	for range 2 {
		entries, dropped := s.Audit(0, 0)
		if len(entries) != MaxAudit || dropped != 10 || entries[0].Number != 11 || entries[MaxAudit-1].Number != all {
			t.Fatalf("%d entries from %d on, %d dropped", len(entries), entries[0].Number, dropped)
		}
		rows := s.Rows()
		if _, err := Load(rows[1:]); err == nil {
			t.Error("a state is loaded without one of its entries")
		}
		var err error
		if s, err = Load(rows); err != nil {
			t.Fatal(err)
		}
	}
}
