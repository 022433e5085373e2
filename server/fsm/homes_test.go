package fsm

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func takeBack(epoch uint64, runs ...*fsmpb.Back) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_TakeBack{TakeBack: &fsmpb.TakeBack{Epoch: epoch, Runs: runs}}}
}

func recall(inPlace bool, extents ...uint32) *fsmpb.Command {
	return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 1, Extents: extents, InPlace: inPlace})
}

func finish(extent uint32, epoch uint64) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_FinishRecall{
			FinishRecall: &fsmpb.FinishRecall{PgId: 1, Extent: extent, Epoch: epoch, MinEpoch: epoch}}}
}

// twoExtents is a cluster whose placement group has memory in extents 0 and 1, little
// enough to be modelled a unit at a time.
func twoExtents(t tester) *harness {
	return cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 18 << 20, IndexPercent: 85, Shards: 1})
}

func freeText(h *fsmpb.Heap) string {
	var out []string
	for _, r := range h.Free {
		out = append(out, fmt.Sprintf("%d+%d/%d", r.Unit, r.Units, r.Returned))
	}
	return strings.Join(out, " ")
}

func homesText(h *fsmpb.Heap) string {
	var out []string
	for _, r := range h.Homes {
		out = append(out, fmt.Sprintf("%d+%d=%d", r.Unit, r.Units, r.SessionId))
	}
	return strings.Join(out, " ")
}

// A run that does not qualify any more is left out, and the others of the command are not.
func TestTakeBackSkips(t *testing.T) {
	const e = layout.ExtentUnits
	for name, tc := range map[string]struct {
		before func(h *harness)
		back   *fsmpb.Back // Unit is relative to the start of the heap
		taken  bool
	}{
		"own":           {nil, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1}, true},
		"own, fresh":    {nil, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1, Fresh: true}, true},
		"end of a home": {nil, &fsmpb.Back{Unit: 100, Units: 900, SessionId: 1}, true},
		"of nobody": {func(h *harness) { h.do(closeS(2, 1)) },
			&fsmpb.Back{Unit: 1000, Units: 1000}, true},
		"free already": {func(h *harness) {
			h.do(takeBack(3, &fsmpb.Back{PgId: 1, Generation: 1, Unit: uint32(h.s.Heap(1).Start) + 120, Units: 1,
				SessionId: 1}))
		}, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1}, false},
		"free already, of nobody": {func(h *harness) {
			h.do(closeS(2, 1))
			h.do(takeBack(3, &fsmpb.Back{PgId: 1, Generation: 1, Unit: uint32(h.s.Heap(1).Start) + 1000, Units: 1}))
		}, &fsmpb.Back{Unit: 1000, Units: 2}, false},
		"another's":        {nil, &fsmpb.Back{Unit: 1000, Units: 50, SessionId: 1}, false},
		"partly another's": {nil, &fsmpb.Back{Unit: 990, Units: 20, SessionId: 1}, false},
		"partly nobody's": {func(h *harness) {
			h.do(closeS(2, 1))
		}, &fsmpb.Back{Unit: 990, Units: 20, SessionId: 1}, false},
		"while the home lives":  {nil, &fsmpb.Back{Unit: 100, Units: 50}, false},
		"while part has a home": {func(h *harness) { h.do(closeS(2, 1)) }, &fsmpb.Back{Unit: 990, Units: 20}, false},
		"while it is fenced":    {func(h *harness) { h.do(expire(1)) }, &fsmpb.Back{Unit: 100, Units: 50}, false},
		"of a session fenced": {func(h *harness) {
			h.do(expire(1))
		}, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1}, false},
		"of a session that ended": {func(h *harness) {
			h.do(closeS(1, 1))
		}, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1}, false},
		"of no session":      {nil, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 99}, false},
		"another generation": {nil, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1, Generation: 2}, false},
		"no placement group": {nil, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1, PgId: 7}, false},
		"never granted":      {nil, &fsmpb.Back{Unit: 1990, Units: 50}, false},
		"the index":          {nil, &fsmpb.Back{Unit: 1<<32 - 2, Units: 10, SessionId: 1}, false},
		"empty":              {nil, &fsmpb.Back{Unit: 100, SessionId: 1}, false},
		"overflow":           {nil, &fsmpb.Back{Unit: 100, Units: 1<<32 - 1, SessionId: 1}, false},
		"being recalled": {func(h *harness) {
			h.do(recall(false, 0))
		}, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1, Mark: 1}, false},
		"recalled since": {func(h *harness) {
			recallWhole(h, 0)
			h.do(grant(1, 1, e/8, e/8, 5000)) // all of extent 1; what was recalled matures
			h.do(grant(1, 1, 2000, 2000, 5000))
		}, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1}, false},
		"recalled before": {func(h *harness) {
			recallWhole(h, 0)
			h.do(grant(1, 1, e/8, e/8, 5000))
			h.do(grant(1, 1, 2000, 2000, 5000))
		}, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1, Mark: 1}, true},
		"another extent recalled": {func(h *harness) {
			h.do(grant(1, 1, e/8, e/8, 0))
			recallWhole(h, 1)
		}, &fsmpb.Back{Unit: 100, Units: 50, SessionId: 1}, true},
	} {
		t.Run(name, func(t *testing.T) {
			h := twoExtents(t)
			start := uint32(h.s.Heap(1).Start)
			for range 3 {
				h.do(openIn(1, 0))
			}
			h.do(grant(1, 1, 1000, 1000, 0))
			h.do(grant(2, 1, 1000, 1000, 0))
			if tc.before != nil {
				tc.before(h)
			}
			witness := h.do(grant(3, 1, 10, 10, 0)).Grant.Runs[0]
			b := proto.CloneOf(tc.back)
			b.Unit += start
			if b.PgId == 0 {
				b.PgId = 1
			}
			if b.Generation == 0 {
				b.Generation = 1
			}
			at := func(unit uint32) *fsmpb.Run {
				i := slices.IndexFunc(h.s.Heap(1).Free, func(r *fsmpb.Run) bool {
					return r.Unit <= unit && uint64(unit) < runEnd(r)
				})
				if i < 0 {
					return nil
				}
				return h.s.Heap(1).Free[i]
			}
			if !tc.taken {
				free, homes := freeText(h.s.Heap(1)), homesText(h.s.Heap(1))
				h.do(takeBack(77, b))
				if now := freeText(h.s.Heap(1)); now != free {
					t.Fatalf("free were %s, now %s", free, now)
				}
				if now := homesText(h.s.Heap(1)); now != homes {
					t.Fatalf("homes were %s, now %s", homes, now)
				}
			}
			h.do(takeBack(77, b, &fsmpb.Back{PgId: 1, Generation: 1, Unit: witness.Unit, Units: witness.Units,
				SessionId: 3, Mark: h.s.Heap(1).RecallSeq}))
			h.checkCopies()
			if r := at(witness.Unit); r == nil || r.Returned != 78 {
				t.Fatalf("free are %s, not %v", freeText(h.s.Heap(1)), witness)
			}
			if !tc.taken {
				return
			}
			want := uint64(78)
			if b.Fresh {
				want = 0
			}
			for u := b.Unit; u < b.Unit+b.Units; u++ {
				if r := at(u); r == nil || r.Returned != want {
					t.Fatalf("free are %s, not %v", freeText(h.s.Heap(1)), b)
				}
			}
			if _, any := h.s.HomeOf(1, b.Unit, b.Units); any {
				t.Fatalf("%v has a home: %s", b, homesText(h.s.Heap(1)))
			}
		})
	}
	h := twoExtents(t)
	h.refuse(takeBack(1, make([]*fsmpb.Back, MaxRuns+1)...), ErrInvalid)
}

// recallWhole recalls an extent, moving its records, and has it freed.
func recallWhole(h *harness, extent uint32) {
	j := h.do(recall(false, extent)).Job
	h.do(claim(3, j.Id))
	h.do(endJob(&fsmpb.EndJob{SessionId: 3, JobId: j.Id, Epoch: 5, Report: &dirpb.JobReport{}}))
	h.do(finish(extent, 6))
}

// A recall in place frees exactly what lies between the records that stay.
func TestRecallInPlace(t *testing.T) {
	const e = layout.ExtentUnits
	h := twoExtents(t)
	start, end := uint32(h.s.Heap(1).Start), uint32(h.s.Heap(1).End)
	for range 3 {
		h.do(openIn(1, 0))
	}
	h.do(grant(1, 1, 1000, 1000, 0))
	h.do(grant(2, 1, 1000, 1000, 0))
	h.do(grant(2, 1, e/8, e/8, 0)) // in extent 1
	h.refuse(recall(true), ErrInvalid)
	h.refuse(recall(true, 0, 0), ErrExists)
	h.refuse(recall(true, 0, 1, 2, 3, 4, 5, 6, 7, 8), ErrInvalid)
	j := h.do(recall(true, 0, 1)).Job
	if !j.InPlace || !slices.Equal(j.Extents, []uint32{0, 1}) || !slices.Equal(h.pg(1).Recalled, j.Extents) {
		t.Fatalf("began %v of %v", j, h.pg(1))
	}
	h.do(claim(3, j.Id))
	kept := func(extent uint32, list ...uint32) *dirpb.UnitRuns {
		return &dirpb.UnitRuns{Extent: extent, SkipTake: list}
	}
	report := func(k ...*dirpb.UnitRuns) *fsmpb.Command {
		return endJob(&fsmpb.EndJob{SessionId: 3, JobId: j.Id, Epoch: 9, Report: &dirpb.JobReport{Kept: k}})
	}
	h.refuse(endJob(&fsmpb.EndJob{SessionId: 3, JobId: j.Id, Epoch: 9}), ErrInvalid, "without a report")
	h.refuse(report(), ErrInvalid, "extent 0 0 times")
	h.refuse(report(kept(0)), ErrInvalid, "extent 1 0 times")
	h.refuse(report(kept(0), kept(1), kept(0)), ErrInvalid, "extent 0 2 times")
	h.refuse(report(kept(0, 1), kept(1)), ErrInvalid, "1 numbers")
	h.refuse(report(kept(0, e, 1), kept(1)), ErrInvalid, "want pairs")
	h.refuse(report(kept(0, 1<<32-1, 1<<32-1), kept(1)), ErrInvalid, "want pairs")
	h.refuse(report(kept(0, 1, 2, 3, 0), kept(1)), ErrInvalid, "an empty run")
	// Linked: a record before the heap and into it, two a unit apart, and one at the very end; in the other
	// extent nothing.
	h.do(report(kept(0, start-3, 5, 10, 20, 1, 4, e-start-37-8, 8), kept(1)))
	h.checkCopies()
	h.refuse(finish(0, 9), ErrRefused)
	h.do(finish(0, 10))
	h.checkCopies()
	if got, want := freeText(h.s.Heap(1)), fmt.Sprintf("%d+10/11 %d+1/11 %d+%d/11", start+2, start+32, start+37,
		e-start-37-8); got != want {
		t.Fatalf("free are %s, want %s", got, want)
	}
	if got, want := homesText(h.s.Heap(1)), fmt.Sprintf("%d+%d=2", e, e/8); got != want {
		t.Fatalf("homes are %s, want %s", got, want)
	}
	h.do(finish(1, 10))
	if got, want := freeText(h.s.Heap(1)), fmt.Sprintf("%d+10/11 %d+1/11 %d+%d/11 %d+%d/11", start+2, start+32,
		start+37, e-start-37-8, e, end-e); got != want {
		t.Fatalf("free are %s, want %s", got, want)
	}
	if u := h.s.Usage()[0]; homesText(h.s.Heap(1)) != "" || u.GrantedUnits != 2+20+4+8 || len(h.pg(1).Recalled) != 0 {
		t.Fatalf("in the end %v, homes %s", u, homesText(h.s.Heap(1)))
	}
	// A recall that moves records keeps nothing, whatever its report says.
	j = h.do(recall(false, 0)).Job
	h.do(claim(3, j.Id))
	h.do(report(kept(0, start, 100)))
	h.do(finish(0, 10))
	if got, want := freeText(h.s.Heap(1)), fmt.Sprintf("%d+%d/11 %d+%d/11", start, e-start, e, end-e); got != want {
		t.Fatalf("free are %s, want %s", got, want)
	}
}

// Arrays of the index wait until no session reports an earlier reclaim epoch, however large E is.
func TestArraysMature(t *testing.T) {
	h := twoExtents(t)
	h.do(openIn(1, 0))
	h.s.Heap(1).IndexFree = []*fsmpb.Array{{Offset: 1 << 16, Segments: 1, Returned: 11}}
	end := func(epoch, least uint64) uint64 {
		// Behind the harness, which would find that nothing was given out there.
		j := Apply(h.s, startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1})).Job
		Apply(h.s, claim(1, j.Id))
		if r := Apply(h.s,
			endJob(&fsmpb.EndJob{SessionId: 1, JobId: j.Id, Epoch: epoch, MinEpoch: least,
				Report: &dirpb.JobReport{}})); r.Err != nil {
			t.Fatal(r.Err)
		}
		return h.s.Heap(1).IndexFree[0].Returned
	}
	if end(5000, 11+ReuseEpochs) != 11 || end(5000, 12+ReuseEpochs) != 0 {
		t.Fatalf("the array is %v", h.s.Heap(1).IndexFree[0])
	}
}

// To look whether a grant is possible changes nothing, and tells what the grant will be.
func TestFitGrantIsGranted(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := twoExtents(rt)
		h.do(openIn(1, 0))
		for range rapid.IntRange(1, 12).Draw(rt, "grants") {
			c := grant(uint32(rapid.IntRange(1, 2).Draw(rt, "session")), 1,
				rapid.Uint32Range(0, 1<<17).Draw(rt, "want"), rapid.Uint32Range(0, 1<<15).Draw(rt, "place"), 5000)
			before := h.rows()
			can, err := h.s.FitGrant(c.GetGrantExtent())
			if !slices.Equal(before, h.rows()) || len(h.s.takeChanges()) != 0 {
				rt.Fatalf("FitGrant(%v) changed the state", c)
			}
			r := h.try(c)
			if !proto.Equal(can, r.Grant) || (err == nil) != (r.Err == nil) || err != nil &&
				err.Error() != r.Err.Error() {
				rt.Fatalf("%v: can be granted %v, %v; was %v, %v", c, can, err, r.Grant, r.Err)
			}
			if runs := r.Grant.GetRuns(); len(runs) > 1 {
				x := runs[0]
				h.do(takeBack(uint64(rapid.IntRange(0, 6000).Draw(rt, "epoch")),
					&fsmpb.Back{PgId: 1, Generation: 1, Unit: x.Unit, Units: x.Units, SessionId: 1}))
			}
		}
	})
}

// A table of homes has an end: in pieces too many nothing is granted until some are gone.
func TestMaxHomes(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 40 << 20})
	h.do(openIn(1, 0))
	h.do(openIn(1, 0))
	hp := copyHeap(h.s.Heap(1))
	for i := range uint32(MaxHomes) {
		hp.Homes = append(hp.Homes, &fsmpb.Home{Unit: uint32(hp.Start) + i, Units: 1, SessionId: 1 + i%2})
	}
	hp.Watermark = hp.Start + MaxHomes
	h.s.heaps[1] = hp
	if g := h.do(grant(1, 1, 10, 1, 0)).Grant; len(g.Runs) != 0 {
		t.Fatalf("granted %v", g)
	}
	h.do(takeBack(1, &fsmpb.Back{PgId: 1, Generation: 1, Unit: uint32(hp.Start), Units: 1, SessionId: 1}))
	if g := h.do(grant(1, 1, 10, 1, 0)).Grant; len(g.Runs) != 1 {
		t.Fatalf("granted %v", g)
	}
}

// A namespace at its limit is granted nothing, but who moves records is: a recall that moves
// ends only with memory for what it moves.
func TestGrantAtLimit(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 40 << 20, LimitBytes: 1 << 20})
	h.do(openIn(1, 0))
	h.do(openIn(1, 0))
	granted := func(session uint32) (n uint32) {
		for _, r := range h.do(grant(session, 1, 1<<20, 10, 0)).Grant.Runs {
			n += r.Units
		}
		return n
	}
	if n := granted(1); n != 1<<20/layout.UnitSize || granted(1) != 0 || granted(2) != 0 {
		t.Fatalf("granted %d units", n)
	}
	h.do(recall(false, 0))
	if n := granted(2); n != 0 {
		t.Fatalf("granted %d units before it is claimed", n)
	}
	h.do(claim(2, 1))
	if n := granted(2); n != moveGrant {
		t.Fatalf("granted %d units for moves", n)
	}
	if n := granted(1); n != 0 {
		t.Fatalf("granted %d units to one who moves nothing", n)
	}
	h.do(endJob(&fsmpb.EndJob{SessionId: 2, JobId: 1, Report: &dirpb.JobReport{}}))
	if n := granted(2); n != 0 {
		t.Fatalf("granted %d units once it has moved all", n)
	}
}

// A window lies inside an extent that is recalled in place, and is the job's.
func TestRecallWindow(t *testing.T) {
	const e = layout.ExtentUnits
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 40 << 20})
	h.do(openIn(1, 0))
	for len(h.do(grant(1, 1, 1<<31, 0, 0)).Grant.Runs) > 0 {
	}
	window := func(inPlace bool, unit, units uint32, extents ...uint32) *fsmpb.Command {
		return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 1, Extents: extents, InPlace: inPlace,
			WindowUnit: unit, WindowUnits: units})
	}
	for _, bad := range []*fsmpb.Command{
		window(false, e, 10, 1),         // all of it moves anyway
		window(true, e-1, 2, 0, 1),      // of two extents
		window(true, e, e+1, 1),         // longer than one
		window(true, 0, 10, 1),          // of another
		window(true, 2*e-1, 2, 1),       // past the end
		window(true, 1<<32-1, 10, 1),    // nowhere
		window(true, e, 1<<32-1, 1),     // too long
		window(true, e, 1<<32-1-e+1, 1), // whose end wraps
	} {
		h.refuse(bad, ErrInvalid, "window")
	}
	if len(h.s.Jobs()) > 0 || len(h.pg(1).Recalled) > 0 {
		t.Fatalf("jobs %v, %v", h.s.Jobs(), h.pg(1))
	}
	j := h.do(window(true, 2*e-100, 100, 0, 1)).Job
	if !j.InPlace || j.WindowUnit != 2*e-100 || j.WindowUnits != 100 || !proto.Equal(j, h.s.Job(j.Id)) {
		t.Fatalf("began %v", j)
	}
	h.checkCopies()
}

// The rows of an earlier version say who holds memory in fields that this one does not
// know. It must not take such a directory over, and says so.
func TestLoadRefusesEarlierHeaps(t *testing.T) {
	h := twoExtents(t)
	h.do(openIn(1, 0))
	h.do(grant(1, 1, 100, 100, 0))
	rows := h.s.Rows()
	i := slices.IndexFunc(rows, func(r Row) bool { return r.Key[0] == rowHeap })
	for name, b := range map[string][]byte{
		"first_session": protowire.AppendVarint(protowire.AppendTag(nil, 6, protowire.VarintType), 3),
		"holders":       protowire.AppendBytes(protowire.AppendTag(nil, 10, protowire.BytesType), []byte{8, 1, 16, 1}),
		"later":         protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 3),
	} {
		old := slices.Clone(rows)
		old[i] = Row{rows[i].Key, slices.Concat(rows[i].Value, b)}
		if _, err := Load(old); err == nil || !strings.Contains(err.Error(), "placement group 1") ||
			!strings.Contains(err.Error(), "another version") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Load(rows); err != nil {
		t.Fatal(err)
	}
}

type homeUnit struct {
	home     uint32
	free     bool
	returned uint64 // free: as in fsmpb.Run
}

// homeModel is a heap as docs/protocol.md, "Memory goes home", describes it.
type homeModel struct {
	start, watermark uint32
	units            []homeUnit // from start
	recalled         map[uint32]bool
	seq              map[uint32]uint64
	recalls          uint64
}

func (m *homeModel) at(unit uint32) *homeUnit { return &m.units[unit-m.start] }

func (m *homeModel) end() uint32 { return m.start + uint32(len(m.units)) }

// back takes runs back, ascending.
func (m *homeModel) back(runs []*fsmpb.Back, epoch uint64, live func(uint32) bool) (taken int) {
	for _, b := range runs {
		from, to := uint64(b.Unit), uint64(b.Unit)+uint64(b.Units)
		extent := b.Unit / layout.ExtentUnits
		if b.SessionId != 0 && !live(b.SessionId) || b.Units == 0 || from < uint64(m.start) ||
			to > uint64(m.watermark) ||
			(to-1)/layout.ExtentUnits != uint64(extent) || m.recalled[extent] || m.seq[extent] > b.Mark {
			continue
		}
		ok := true
		for u := b.Unit; u < b.Unit+b.Units; u++ {
			x := m.at(u)
			ok = ok && !x.free && x.home == b.SessionId
		}
		if !ok {
			continue
		}
		taken++
		for u := b.Unit; u < b.Unit+b.Units; u++ {
			x := homeUnit{free: true, returned: epoch + 1}
			if b.Fresh && b.SessionId != 0 {
				x.returned = 0
			}
			*m.at(u) = x
		}
	}
	return taken
}

// drop has a session own nothing any more.
func (m *homeModel) drop(session uint32) {
	for i := range m.units {
		if m.units[i].home == session {
			m.units[i].home = 0
		}
	}
}

// compare checks a heap, and that all its memory adds up.
func (m *homeModel) compare(h *fsmpb.Heap, granted uint64) error {
	if uint64(m.watermark) != h.Watermark {
		return fmt.Errorf("watermark %d, want %d", h.Watermark, m.watermark)
	}
	got := make([]homeUnit, len(m.units))
	free := uint64(0)
	for _, r := range h.Free {
		free += uint64(r.Units)
		for u := r.Unit; u < r.Unit+r.Units; u++ {
			got[u-m.start] = homeUnit{free: true, returned: r.Returned}
		}
	}
	for _, x := range h.Homes {
		for u := x.Unit; u < x.Unit+x.Units; u++ {
			if got[u-m.start].free {
				return fmt.Errorf("unit %d is free and has home %d", u, x.SessionId)
			}
			got[u-m.start].home = x.SessionId
		}
	}
	for i := range got {
		if got[i] != m.units[i] {
			return fmt.Errorf("unit %d is %+v, want %+v", m.start+uint32(i), got[i], m.units[i])
		}
	}
	if want := h.Watermark - h.Start - free; granted != want {
		return fmt.Errorf("%d units are granted, want %d", granted, want)
	}
	return nil
}

// TestHomes grants, takes back, closes, fences and recalls at random and compares with the
// model after each command.
func TestHomes(t *testing.T) {
	done := map[string]int{}
	defer func() {
		t.Logf("done %v", done)
		for _, k := range []string{"grant", "again", "own", "nobody", "close", "fence", "recall", "in place", "stale",
			"split"} {
			if !t.Failed() && done[k] < 5 {
				t.Errorf("%s: %d times, too few to prove anything", k, done[k])
			}
		}
	}()
	rapid.Check(t, func(rt *rapid.T) {
		h := twoExtents(rt)
		hp := h.s.Heap(1)
		m := &homeModel{start: uint32(hp.Start), watermark: uint32(hp.Start), units: make([]homeUnit, hp.End-hp.Start),
			recalled: map[uint32]bool{}, seq: map[uint32]uint64{}}
		epoch := uint64(1)
		live := func(id uint32) bool { return h.s.Life(id) == dirpb.SessionLife_SESSION_LIVE }
		pick := func(label string, n int) int { return rapid.IntRange(0, n-1).Draw(rt, label) }
		var marks []uint64
		janitor := h.do(openIn(1, epoch)).Session.Id
		for range 3 {
			h.do(openIn(1, epoch))
		}
		session := func() uint32 {
			all := h.s.Sessions()[1:] // the janitor is the first
			return all[pick("session", len(all))].Id
		}
		// runs are pieces of what is granted, ascending: of the session's own, if it is not 0.
		runs := func(session uint32) (out []*fsmpb.Back) {
			at := m.start
			for range 1 + pick("runs", 5) {
				var from, to []uint32 // stretches that qualify
				last := homeUnit{free: true}
				for u := at; u < m.watermark; u++ {
					x := *m.at(u)
					if fits := !x.free && x.home == session; fits &&
						(last.free || last.home != session || u%layout.ExtentUnits == 0) {
						from, to = append(from, u), append(to, u)
					} else if !fits {
						last = x
						continue
					}
					to[len(to)-1] = u + 1
					last = x
				}
				if len(from) == 0 {
					return out
				}
				i := pick("stretch", len(from))
				lo, n := from[i], to[i]-from[i]
				lo += uint32(pick("skip", int(min(n, 300))))
				n = 1 + uint32(pick("units", int(min(to[i]-lo, 20000))))
				switch pick("off", 12) { // sometimes what does not qualify
				case 0:
					lo = max(m.start, lo-1)
				case 1:
					n++
				}
				b := &fsmpb.Back{PgId: 1, Generation: 1, Unit: lo, Units: n, SessionId: session,
					Fresh: pick("fresh", 2) == 0, Mark: h.s.Heap(1).RecallSeq}
				if len(marks) > 0 && pick("old mark", 4) == 0 {
					b.Mark = marks[pick("mark", len(marks))]
				}
				out = append(out, b)
				if at = lo + n; pick("overlap", 6) == 0 {
					at = lo + 1
				}
			}
			return out
		}
		for range 15 + pick("steps", 25) {
			epoch += uint64(rapid.SampledFrom([]int{1, 1, 5, 1100}).Draw(rt, "epochs"))
			marks = append(marks, h.s.Heap(1).RecallSeq)
			switch kind := rapid.SampledFrom([]string{"grant", "own", "grant", "nobody", "close", "fence", "recall",
				"own", "grant"}).Draw(rt, "kind"); kind {
			case "grant":
				x, place := session(), rapid.SampledFrom([]uint32{1, 10, 5000, 17000}).Draw(rt, "place")
				r := h.try(grant(x, 1, rapid.SampledFrom([]uint32{0, 100, 60000}).Draw(rt, "want"), place, epoch))
				if r.Err != nil || len(r.Grant.Runs) == 0 {
					continue
				}
				for i := range m.units {
					if u := &m.units[i]; u.free && u.returned != 0 && epoch > u.returned-1+ReuseEpochs {
						u.returned = 0
					}
				}
				mark := uint32(h.s.Heap(1).Watermark)
				for u := m.watermark; u < mark; u++ {
					*m.at(u) = homeUnit{free: true} // passed over, unless it is granted
				}
				if r.Grant.Runs[0].Units < place {
					rt.Fatalf("granted %v for a place of %d", r.Grant, place)
				}
				for _, g := range r.Grant.Runs {
					if g.Unit < m.watermark {
						done["again"]++
					}
					for u := g.Unit; u < g.Unit+g.Units; u++ {
						if *m.at(u) != (homeUnit{free: true}) || m.recalled[u/layout.ExtentUnits] {
							rt.Fatalf("granted %v: unit %d is %+v", g, u, *m.at(u))
						}
						*m.at(u) = homeUnit{home: x}
					}
				}
				m.watermark = mark
				done[kind]++
			case "own", "nobody":
				x := uint32(0)
				if kind == "own" {
					x = session()
				}
				list := runs(x)
				h.do(takeBack(epoch, list...))
				n := m.back(list, epoch, live)
				done[kind] += n
				done["stale"] += len(list) - n
				if len(h.s.Heap(1).Homes) > len(h.s.Sessions())+2 {
					done["split"]++
				}
			case "close":
				x := session()
				list := slices.DeleteFunc(runs(x), func(b *fsmpb.Back) bool {
					return uint64(b.Unit)+uint64(b.Units) > min(extentEnd(uint64(b.Unit)), uint64(m.watermark))
				})
				var back []*dirpb.ReturnedRun
				for _, b := range list {
					b.Mark = h.s.Heap(1).RecallSeq
					back = append(back, &dirpb.ReturnedRun{PgId: 1, Unit: b.Unit, Units: b.Units, Fresh: b.Fresh,
						Generation: 1})
				}
				h.do(closeS(x, epoch, back...))
				m.back(list, epoch, func(uint32) bool { return true })
				m.drop(x)
				h.do(openIn(1, epoch))
				done[kind]++
			case "fence":
				x := session()
				h.do(expire(x))
				if pick("later", 2) == 0 { // its home lives until then
					list := append(runs(0), runs(x)...)
					h.do(takeBack(epoch, list...))
					m.back(list, epoch, live)
				}
				h.do(confirm(1, 100, x))
				m.drop(x)
				h.do(openIn(1, epoch))
				done[kind]++
			case "recall":
				inPlace, extents := pick("in place", 2) == 0, []uint32{0}
				if m.watermark > layout.ExtentUnits {
					extents = rapid.SampledFrom([][]uint32{{0}, {1}, {0, 1}, {1, 0}}).Draw(rt, "extents")
				}
				if m.watermark == m.start {
					continue
				}
				j := h.do(recall(inPlace, extents...)).Job
				end := func(x uint32) uint32 { return min((x+1)*layout.ExtentUnits, m.end()) }
				for _, x := range extents {
					m.recalls++
					m.recalled[x], m.seq[x] = true, m.recalls
					for u := max(m.start, x*layout.ExtentUnits); u < end(x); u++ {
						m.at(u).free, m.at(u).returned = false, 0
					}
					m.watermark = max(m.watermark, end(x))
				}
				list := append(runs(0), runs(session())...) // void
				h.do(takeBack(epoch, list...))
				m.back(list, epoch, live)
				h.do(claim(janitor, j.Id))
				report := &dirpb.JobReport{}
				keep := map[uint32]bool{}
				for _, x := range extents {
					k := &dirpb.UnitRuns{Extent: x}
					at := uint32(0)
					if x == 0 {
						at = m.start - 5
						k.SkipTake = []uint32{at, 3}
						at += 3
					}
					for range pick("kept", 4) {
						skip, take := uint32(rapid.SampledFrom([]int{0, 1, 2, 300}).Draw(rt, "skip")),
							uint32(1+pick("take", 40))
						k.SkipTake = append(k.SkipTake, skip, take)
						for u := at + skip; u < at+skip+take; u++ {
							keep[x*layout.ExtentUnits+u] = true
						}
						at += skip + take
					}
					report.Kept = append(report.Kept, k)
				}
				h.do(endJob(&fsmpb.EndJob{SessionId: janitor, JobId: j.Id, Epoch: epoch, Report: report}))
				epoch++
				for _, x := range extents {
					h.do(finish(x, epoch))
					delete(m.recalled, x)
					lo := max(m.start, x*layout.ExtentUnits)
					for u := lo; u < end(x); u++ {
						*m.at(u) = homeUnit{free: true, returned: epoch + 1}
						if inPlace && keep[u] {
							*m.at(u) = homeUnit{}
						}
					}
				}
				if done[kind]++; inPlace {
					done["in place"]++
				}
			}
			if err := m.compare(h.s.Heap(1), h.s.Usage()[0].GrantedUnits); err != nil {
				rt.Fatal(err)
			}
			h.checkCopies()
		}
	})
}

// A place whose home is asked for while the placement group does not exist has none.
func TestHomeOf(t *testing.T) {
	h := twoExtents(t)
	start := uint32(h.s.Heap(1).Start)
	h.do(openIn(1, 0))
	h.do(openIn(1, 0))
	h.do(grant(1, 1, 10, 10, 0))
	h.do(grant(2, 1, 10, 10, 0))
	for _, tc := range []struct {
		pg, unit, units, home uint32
		any                   bool
	}{
		{1, start, 10, 1, true}, {1, start + 9, 1, 1, true}, {1, start + 10, 10, 2, true}, {1, start + 5, 10, 0, true},
		{1, start + 15, 10, 0, true}, {1, start + 20, 1, 0, false}, {1, start - 1, 1, 0, false},
		{1, start - 1, 2, 0, true},
		{1, start, 1<<32 - 1, 0, true}, {2, start, 1, 0, false},
	} {
		if home, any := h.s.HomeOf(tc.pg, tc.unit, tc.units); home != tc.home || any != tc.any {
			t.Errorf("%d+%d of placement group %d: home %d, any %v; want %d, %v", tc.unit, tc.units, tc.pg, home, any,
				tc.home, tc.any)
		}
	}
	for _, tc := range []struct {
		pg, generation, unit, units uint32
		want                        bool
	}{
		{1, 1, start, 20, true}, {1, 2, start, 20, false}, {2, 1, start, 20, false}, {1, 1, start, 21, false},
		{1, 1, start, 0, false},
	} {
		if got := h.s.Settled(tc.pg, tc.generation, tc.unit, tc.units, 0); got != tc.want {
			t.Errorf("settled %+v: %v", tc, got)
		}
	}
	if err := errors.Join(h.try(recall(false, 0)).Err); err != nil {
		t.Fatal(err)
	}
	if h.s.Settled(1, 1, start, 20, 9) {
		t.Error("settled while its extent is being recalled")
	}
}
