package fsm

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// tester is what testing.T and rapid.T share.
type tester interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

type harness struct {
	t    tester
	s    *State
	disk map[string][]byte // what the Changes of all commands amount to
}

func newHarness(t tester) *harness {
	h := &harness{t: t, s: New(), disk: make(map[string][]byte)}
	for _, r := range h.s.Rows() { // as Init, which most tests leave out, would
		h.disk[string(r.Key)] = r.Value
	}
	return h
}

// try applies c as raft would, from its encoding, and checks what every command
// must keep.
func (h *harness) try(c *fsmpb.Command) Result {
	h.t.Helper()
	b, err := proto.Marshal(c)
	if err != nil {
		h.t.Fatal(err)
	}
	c = new(fsmpb.Command)
	if err := proto.Unmarshal(b, c); err != nil {
		h.t.Fatal(err)
	}
	before, version := h.rows(), h.s.MapVersion()
	mapBefore := h.mapText()
	r := Apply(h.s, c)
	if r.Err != nil && (len(r.Changes) > 0 || !slices.Equal(before, h.rows())) {
		h.t.Fatalf("refused command %v changed the state: %v", c, r.Err)
	}
	switch changed := mapBefore != h.mapText(); {
	case changed && h.s.MapVersion() != version+1, !changed && h.s.MapVersion() != version:
		h.t.Fatalf("%v: map version %d to %d, map changed: %v", c, version, h.s.MapVersion(), changed)
	}
	if err := checkStructure(h.s); err != nil {
		h.t.Fatalf("%v: %v", c, err)
	}
	for _, row := range r.Changes {
		if row.Value == nil {
			delete(h.disk, string(row.Key))
		} else {
			h.disk[string(row.Key)] = row.Value
		}
	}
	return r
}

func (h *harness) do(c *fsmpb.Command) Result {
	h.t.Helper()
	r := h.try(c)
	if r.Err != nil {
		h.t.Fatalf("%v: %v", c, r.Err)
	}
	return r
}

func (h *harness) refuse(c *fsmpb.Command, want error, words ...string) {
	h.t.Helper()
	r := h.try(c)
	if !errors.Is(r.Err, want) {
		h.t.Fatalf("%v: error %v, want %v", c, r.Err, want)
	}
	for _, w := range words {
		if !strings.Contains(r.Err.Error(), w) {
			h.t.Fatalf("error %q does not say %q", r.Err, w)
		}
	}
}

func (h *harness) rows() (out []string) {
	for _, r := range h.s.Rows() {
		out = append(out, string(r.Key)+"\x00"+string(r.Value))
	}
	return out
}

// mapText prints what a client of any namespace could see, without the version.
func (h *harness) mapText() string {
	m := h.s.Map(nil)
	m.Version = 0
	m.Pgs, m.Volumes = h.s.PGs(0), h.s.Volumes()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		h.t.Fatal(err)
	}
	return string(b)
}

// checkCopies compares the state with what disk and snapshot would restore.
func (h *harness) checkCopies() {
	h.t.Helper()
	var disk []Row
	for k, v := range h.disk {
		disk = append(disk, Row{[]byte(k), v})
	}
	if len(disk) == 0 {
		return
	}
	for name, rows := range map[string][]Row{"disk": disk, "snapshot": h.s.Rows()} {
		s, err := Load(rows)
		if err != nil {
			h.t.Fatal(err)
		}
		restored := &harness{t: h.t, s: s}
		if !slices.Equal(restored.rows(), h.rows()) {
			h.t.Fatalf("%s restores a different state", name)
		}
		checkRoster(h.t, s)
	}
}

func (h *harness) pg(id uint32) *dirpb.PlacementGroup { return h.s.pgs[id] }

// activate publishes every missing region.
func (h *harness) activate() {
	h.t.Helper()
	for _, n := range h.s.Nodes() {
		if n.State != up {
			continue
		}
		for _, w := range h.s.WantRegions(n.Id, n.Incarnation) {
			if !w.Published {
				h.do(publish(n.Id, n.Incarnation, w.PgId, uint64(w.PgId)<<8|uint64(n.Id)))
			}
		}
	}
}

// cluster registers n memory nodes and creates a namespace over them.
func cluster(t tester, n int, q *dirpb.CreateNamespaceRequest) *harness {
	h := newHarness(t)
	for i := range n {
		h.do(register(fmt.Sprintf("m%d", i+1), 100))
	}
	if q != nil {
		h.do(create(q))
		h.activate()
	}
	return h
}
