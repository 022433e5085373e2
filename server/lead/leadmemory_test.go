package lead

import (
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func TestFinishRecall(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 2)
	ns := w.create("n", 1, 1)
	x, slow := w.open(ns), w.open(ns)
	w.want()
	w.grant(x, 1, 1000)
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: 1, Extents: []uint32{0}})
	w.want()
	w.ack()
	w.do(x, dirpb.JobKind_JOB_RECALL)
	scanned := w.s.Heap(1).Recalls[0].Epoch
	w.quiet[slow] = true
	for range 3 {
		w.pass(lease / 4)
		w.beat()
		w.renew(x, 0, 0)
		w.l.Advance(w.s, w.now)
		w.want() // one session may be at it still
	}
	if e, least := w.l.Epochs(); e <= scanned || least > scanned {
		t.Fatalf("E %d, minimum %d, scanned in %d: the test proves nothing", e, least, scanned)
	}
	w.renew(slow, 0, 0)
	w.want("extent 0 is free")
	if got := w.pg(1).Recalled; len(got) != 0 {
		t.Fatalf("recalled %v", got)
	}
}

func TestScrub(t *testing.T) {
	w := newWorld(t)
	w.nodes(1, 2)
	ns := w.create("n", 1, 1)
	x := w.open(ns)
	dirty := func(units uint32) {
		t.Helper()
		y := w.open(ns)
		for units > 0 {
			for _, r := range w.grant(y, 1, min(units, layout.ExtentUnits/4)) {
				units -= r.Units
			}
		}
		w.leak(y)
	}
	w.wait(40 * time.Second)
	w.want() // clean
	dirty(100)
	w.want("JOB_SCRUB begins: " + ReasonDirty)
	if j := w.s.Jobs()[0]; j.Kind != dirpb.JobKind_JOB_SCRUB || j.Reason != ReasonDirty || !j.Count {
		t.Fatalf("began %v", j)
	}
	// A hundred units in one extent are not worth a recall.
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want()
	dirty(1000)
	w.wait(29 * time.Second)
	w.want() // not twice in half a minute
	w.wait(time.Second)
	w.want("JOB_SCRUB begins: " + ReasonDirty)
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want()
	// Of more than a twentieth it is known in seconds, but not before it was so for a while.
	// the rest of the first extent, and into the second
	dirty(layout.ExtentUnits - uint32(w.s.Heap(1).Watermark) + 1000)
	if lost := w.s.Usage()[0]; lost.GrantedUnits < lost.HeapUnits/20 {
		t.Fatalf("the test proves nothing: %v", lost)
	}
	w.passing(lostWindow-lease, 0)
	w.passing(3*lostWindow, 1)
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want("JOB_RECALL begins")
	w.want() // one at a time
	if j := w.s.Jobs()[0]; !slices.Equal(j.Extents, []uint32{0}) || j.InPlace {
		t.Fatalf("began %v", j)
	}
	w.ack()
	w.do(x, dirpb.JobKind_JOB_RECALL)
	w.want() // of the second extent less than an eighth leaked

	// An operator who asks for repair gets all of it, one who does not, nothing.
	w.wait(lease)
	w.want("extent 0 is free")
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonLook})
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want()
	w.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: ReasonRepair, Repair: true})
	w.finish(x, w.claim(x), 0, 0, 0, 0)
	w.want("JOB_RECALL begins")
	if j := w.s.Jobs()[0]; !slices.Equal(j.Extents, []uint32{1}) {
		t.Fatalf("began %v", j)
	}

	// Without an interval nothing is scrubbed unasked.
	w.ack()
	w.do(x, dirpb.JobKind_JOB_RECALL)
	dirty(100)
	w.l.opts.ScrubInterval = 0
	w.wait(100 * time.Second)
	w.want("extent 1 is free")
	if !w.s.Heap(1).Dirty {
		t.Fatal("the test proves nothing")
	}
}
