package janitor

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// Runs cover the same units as the pairs that they were made of, ascend and do not meet.
func TestRunsOf(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from := rapid.OneOf(rapid.Uint32Range(0, 60), rapid.Uint32Range(layout.ExtentUnits-60, layout.ExtentUnits-1))
		want := map[uint32]bool{}
		var pairs []uint32
		for range rapid.IntRange(0, 30).Draw(t, "places") {
			lo, n := from.Draw(t, "from"), rapid.Uint32Range(1, 9).Draw(t, "units")
			pairs = append(pairs, lo, n)
			for u := lo; u < min(lo+n, layout.ExtentUnits); u++ { // a place ends with its extent
				want[u] = true
			}
		}
		given := slices.Clone(pairs)
		got := runsOf(pairs)
		if !slices.Equal(given, pairs) {
			t.Fatalf("changed its argument %v to %v", given, pairs)
		}
		at := uint32(0)
		for i := 0; i < len(got); i += 2 {
			skip, take := got[i], got[i+1]
			if take == 0 || skip == 0 && i > 0 {
				t.Fatalf("%v of %v: run %d is empty or meets the one before", got, pairs, i/2)
			}
			at += skip
			for range take {
				if !want[at] {
					t.Fatalf("%v of %v: unit %d was in no place", got, pairs, at)
				}
				delete(want, at)
				at++
			}
		}
		if len(want) > 0 || at > layout.ExtentUnits || len(got)%2 != 0 {
			t.Fatalf("%v of %v: left out %v", got, pairs, want)
		}
	})
}

// The report of a recall in place lists what stays in its extents, of each once, whatever
// the order in which it was found; that of another job lists nothing.
func TestReport(t *testing.T) {
	const e = layout.ExtentUnits
	job := &dirpb.Job{Kind: dirpb.JobKind_JOB_RECALL, Extents: []uint32{3, 1, 7}, InPlace: true}
	found := []*repair.Work{
		{Records: 2, Units: 30, Synced: 1, Linked: map[uint32]uint32{1: 10, 3: 20}, Kept: []repair.UnitRun{
			{Unit: e + 100, Units: 10}, {Unit: 3*e + 50, Units: 20}}},
		{Records: 1, Units: 5, Lost: 1, Linked: map[uint32]uint32{1: 5}, Kept: []repair.UnitRun{
			{Unit: e + 95, Units: 5}, {Unit: 9 * e, Units: 1}}},
		{Linked: map[uint32]uint32{1: 4}, Kept: []repair.UnitRun{{Unit: 2*e - 4, Units: 4}, {Unit: e, Units: 4}}},
	}
	want := &dirpb.JobReport{Groups: 3, Records: 3, Bytes: 35 * layout.UnitSize, SyncedWords: 1, LostRecords: 1,
		LinkedUnits: []uint32{0, 19, 0, 20},
		Kept: []*dirpb.UnitRuns{{Extent: 3, SkipTake: []uint32{50, 20}},
			{Extent: 1, SkipTake: []uint32{0, 4, 91, 15, e - 4 - 110, 4}}, {Extent: 7}}}
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}} {
		r := Begin(job)
		for _, i := range order {
			Add(r, found[i])
		}
		Finish(r)
		if !proto.Equal(r, want) {
			t.Errorf("in order %v: %v, want %v", order, r, want)
		}
	}
	for _, job := range []*dirpb.Job{{Kind: dirpb.JobKind_JOB_RECALL, Extents: []uint32{1}},
		{Kind: dirpb.JobKind_JOB_SCRUB, Count: true}} {
		r := Begin(job)
		Add(r, found[0])
		Finish(r)
		if len(r.Kept) != 0 || r.Records != 2 {
			t.Errorf("%v: reports %v", job, r)
		}
	}
}

// Jobs that bring replicas up, or check them, go over a placement group's status words, too; the others over its shards
// alone. A SETTLE goes over each group of these, those of a child among them, and changes no status word.
func TestPlanOfStatusArrays(t *testing.T) {
	const index0 = layout.RegionPageSize
	seg := func(i uint64) uint64 { return index0 + i*layout.SegmentSize }
	member := []*dirpb.Member{{NodeId: 1, Incarnation: 1}}
	v, err := engine.ViewOf(
		&dirpb.Map{Version: 3, Nodes: []*dirpb.Node{{Id: 1, Incarnation: 1, State: dirpb.NodeState_NODE_UP}},
			Pgs: []*dirpb.PlacementGroup{{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, RegionBytes: 16 << 20,
				IndexBytes: 4 << 20, Members: member,
				StatusArrays: []*dirpb.StatusArray{{Offset: seg(10), Segments: 1}, {Offset: seg(12), Segments: 2}}}},
			Shards: []*dirpb.Shard{{Id: 1, NamespaceId: 1, PgId: 1, Offset: seg(0), Segments: 2,
				Move: &dirpb.Move{ChildId: 2, PgId: 1, Offset: seg(4), Segments: 2, Split: true}}}}, 1)
	if err != nil {
		t.Fatal(err)
	}
	shards, status := []uint64{seg(0), seg(1), seg(4), seg(5)}, []uint64{seg(10), seg(12), seg(13)}
	for _, tc := range []struct {
		job  *dirpb.Job
		kind index.Kind
		want []uint64 // segments
		per  int      // operations of each
	}{
		{&dirpb.Job{Kind: dirpb.JobKind_JOB_JOIN}, index.Sync, slices.Concat(shards, status), 1},
		{&dirpb.Job{Kind: dirpb.JobKind_JOB_RECOVER}, index.Sync, slices.Concat(shards, status), 1},
		{&dirpb.Job{Kind: dirpb.JobKind_JOB_SCRUB}, index.Scrub, slices.Concat(shards, status), 1},
		{&dirpb.Job{Kind: dirpb.JobKind_JOB_SCRUB, Count: true}, index.Relocate, shards, groups},
		{&dirpb.Job{Kind: dirpb.JobKind_JOB_RECALL}, index.Relocate, shards, groups},
		{&dirpb.Job{Kind: dirpb.JobKind_JOB_SETTLE}, index.SettleAll, shards, groups},
	} {
		tc.job.PgId = 1
		p, err := NewPlan(v, tc.job)
		if err != nil {
			t.Fatalf("%v: %v", tc.job.Kind, err)
		}
		var got []uint64
		for i := range p.Len {
			w := p.At(i)
			if w.PG != 1 || tc.per == 1 && (w.Off-index0)%layout.SegmentSize != 0 {
				t.Errorf("%v: operation %d is at %#x of placement group %d", tc.job.Kind, i, w.Off, w.PG)
			}
			got = append(got, w.Off)
		}
		var want []uint64
		for _, s := range tc.want {
			for i := range tc.per {
				want = append(want, s+uint64(i)*layout.GroupSize)
			}
		}
		if p.Kind != tc.kind || !slices.Equal(got, want) {
			t.Errorf("%v: %v at %#x, want %v at %#x", tc.job.Kind, p.Kind, got, tc.kind, want)
		}
	}
}

// A rejoin goes over all words twice, and the second time waits for whatever was under way; a join of a member that
// began with zeroes does not.
func TestPlanOfRejoin(t *testing.T) {
	const index0 = layout.RegionPageSize
	v, err := engine.ViewOf(
		&dirpb.Map{Version: 3, Nodes: []*dirpb.Node{{Id: 1, Incarnation: 1, State: dirpb.NodeState_NODE_UP}},
			Pgs: []*dirpb.PlacementGroup{{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, RegionBytes: 16 << 20,
				IndexBytes: 4 << 20,
				Members:    []*dirpb.Member{{NodeId: 1, Incarnation: 1}}}},
			Shards: []*dirpb.Shard{{Id: 1, NamespaceId: 1, PgId: 1, Offset: index0, Segments: 3}}}, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, rejoin := range []bool{false, true} {
		p, err := NewPlan(v, &dirpb.Job{Kind: dirpb.JobKind_JOB_JOIN, PgId: 1, Rejoin: rejoin})
		if err != nil {
			t.Fatal(err)
		}
		seen, outlasts := map[uint64]int{}, 0
		for i := range p.Len {
			if seen[p.At(i).Off]++; p.Outlasts(i) {
				outlasts++
			} else if outlasts > 0 || seen[p.At(i).Off] > 1 {
				t.Errorf("rejoin %t: operation %d, at %#x, waits for nothing", rejoin, i, p.At(i).Off)
			}
		}
		want := map[bool]int{false: 0, true: 3}[rejoin]
		if len(seen) != 3 || p.Len != 3+want || outlasts != want || rejoin &&
			(p.Batch(0, 8) != 3 || p.Batch(3, 8) != 6) {
			t.Errorf("rejoin %t: %d operations at %v, %d of which wait", rejoin, p.Len, seen, outlasts)
		}
	}
}
