package fsm

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// A session has 64 blocks of a placement group at most. Its status arrays double, to an eighth of the index, and a
// block is granted once.
func TestStatusBounds(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 40 << 20, Shards: 1})
	seen := make(map[uint64]bool)
	all := func() (n uint64) {
		x := h.do(openIn(1, 0)).Session.Id
		for held := uint32(0); ; held++ {
			r := h.try(grantStatus(x, 1, held))
			if r.Err != nil {
				if held == MaxStatusBlocks {
					h.refuse(grantStatus(x, 1, held), ErrFull, "has 64 blocks")
				} else {
					h.refuse(grantStatus(x, 1, held), ErrFull, "an eighth")
				}
				return n
			}
			if at := r.Status.Block.Offset; seen[at] {
				t.Fatalf("block %d is granted twice", at)
			} else {
				seen[at] = true
			}
			n++
		}
	}
	sum := uint64(0)
	for range 100 {
		n := all()
		if sum += n; n < MaxStatusBlocks {
			break
		}
	}
	most := (h.pg(1).IndexBytes - layout.RegionPageSize) / statusPart / layout.SegmentSize
	if got := statusSegments(h.pg(1)); got != most || sum != most*statusBlocksOf {
		t.Errorf("%d blocks in %d segments, want %d segments full", sum, got, most)
	}
	segments := uint32(0)
	for i, a := range h.pg(1).StatusArrays {
		if want := min(max(segments, 1), maxStatusSegments, uint32(most)-segments); a.Segments != want {
			t.Errorf("status array %d has %d segments, want %d", i, a.Segments, want)
		}
		segments += a.Segments
	}
	h.checkCopies()
}

// A full index has room for the first status words if it was not laid out to the last segment, whatever moves.
func TestStatusRoom(t *testing.T) {
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, BytesPerNode: 8 << 20, IndexPercent: 5,
		Shards: 2, Segments: 1})
	x := h.do(openIn(1, 0)).Session.Id
	room := func() uint64 { return (h.pg(1).IndexBytes - h.s.Heap(1).IndexNext) / layout.SegmentSize }
	grow := func(segments uint32) *fsmpb.Command {
		return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: h.s.Shards(1)[0].Id, Segments: segments})
	}
	if room() >= layout.MaxGrowth {
		t.Fatalf("room for %d segments: too many for one move", room())
	}
	h.refuse(grow(uint32(room())), ErrFull, "beside the first status words")
	h.do(grow(uint32(room() - 1)))
	if room() != 1 {
		t.Fatalf("room for %d segments", room())
	}
	h.do(grantStatus(x, 1, 0))
	if room() != 0 {
		t.Fatalf("room for %d segments", room())
	}
	for held := uint32(1); held < statusBlocksOf; held++ {
		h.do(grantStatus(x, 1, held))
	}
	h.refuse(grantStatus(x, 1, statusBlocksOf), ErrFull, "the index of placement group 1 has no room for status words")

	// Without room for any, a move takes nothing from status words.
	full := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 8 << 20, Shards: 1})
	pg, heap := full.pg(1), full.s.Heap(1)
	heap.IndexNext = pg.IndexBytes
	heap.IndexFree = []*fsmpb.Array{{Offset: layout.RegionPageSize, Segments: 3}}
	if TakesFirst(pg, heap, 3) {
		t.Error("three segments that come free again are kept for status words")
	}
	heap.IndexFree = append(heap.IndexFree, &fsmpb.Array{Offset: pg.IndexBytes - layout.SegmentSize, Segments: 1})
	if !TakesFirst(pg, heap, 1) || TakesFirst(pg, heap, 3) {
		t.Error("the last free segment is not kept for status words")
	}
}

// Status words count towards the quota of the index, but for the first segment of each placement group.
func TestStatusQuota(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 40 << 20, Shards: 1, Segments: 4,
		Quota: &dirpb.Quota{IndexBytes: 4 * layout.SegmentSize}})
	x := h.do(openIn(1, 0)).Session.Id
	for held := range uint32(statusBlocksOf) {
		h.do(grantStatus(x, 1, held))
	}
	h.refuse(grantStatus(x, 1, statusBlocksOf), ErrFull, "quota index")
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", Quota: &dirpb.Quota{IndexBytes: 6 * layout.SegmentSize}}))
	h.do(grantStatus(x, 1, statusBlocksOf))
	if n := h.s.IndexBytes(1); n != 6*layout.SegmentSize {
		t.Errorf("%d bytes of index", n)
	}
}

func TestStatusRefused(t *testing.T) {
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, Shards: 2})
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "b", Replicas: 1, Shards: 1, BytesPerNode: 64 << 20}))
	h.activate()
	x, other := h.do(openIn(1, 0)).Session.Id, h.do(openIn(2, 0)).Session.Id
	reader := h.do(&fsmpb.Command{
		Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: 1, ReadOnly: true}}}).Session.Id
	h.refuse(grantStatus(reader, 1, 0), ErrRefused, "read-only")
	h.refuse(grantStatus(other, 1, 0), ErrNotFound, "placement group 1 of the session's namespace")
	own := h.do(grantStatus(x, 1, 0)).Status.Block
	for what, c := range map[string]*fsmpb.Command{
		"another's": takeStatus(other, 1, own),
		"no longer": takeStatus(99, 1, own),
		"not its": takeStatus(x, 1, &dirpb.StatusBlock{PgId: 1, Generation: own.Generation, Offset: own.Offset +
			layout.GroupSize}),
		"elsewhere":  takeStatus(x, 1, &dirpb.StatusBlock{PgId: 2, Generation: own.Generation, Offset: own.Offset}),
		"nowhere":    takeStatus(x, 1, &dirpb.StatusBlock{PgId: 77, Generation: own.Generation, Offset: own.Offset}),
		"no renewal": takeStatus(x, 0, own),
		"empty":      takeStatus(x, 1),
	} {
		if r := h.do(c); len(r.Changes) != 0 {
			t.Errorf("%s: changed %q", what, r.Changes)
		}
	}
	h.refuse(takeStatus(x, 1, make([]*dirpb.StatusBlock, MaxStatusBack+1)...), ErrInvalid, "4097 blocks")
	h.do(takeStatus(x, 1, own, own))
	if b := h.do(grantStatus(x, 1, 0)).Status.Block; !proto.Equal(b, own) {
		t.Errorf("granted %v, want %v, which was given back", b, own)
	}
	h.do(takeStatus(x, 1, own)) // overtaken
	if n := len(h.s.Heap(1).StatusHeld); n != 1 {
		t.Errorf("the session has %d blocks after a renewal that was overtaken", n)
	}
	h.do(nodeDown(2, 100))
	h.refuse(grantStatus(x, 1, 1), ErrUnavailable, "PG_FROZEN")
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: 1}), ErrRefused, "PG_FROZEN")
	h.do(expire(x))
	h.refuse(grantStatus(x, 1, 1), ErrNotFound, "live")
	h.checkCopies()
}

// A snapshot is refused whose status words contradict each other.
func TestStatusRows(t *testing.T) {
	rows := worlds(t)[4]
	if _, err := Load(rows); err != nil {
		t.Fatal(err)
	}
	edit := func(kind byte, change func(m proto.Message)) (out []Row) {
		for _, r := range rows {
			var m proto.Message
			switch {
			case r.Key[0] != kind || len(r.Key) == 5 && r.Key[4] != 1 && kind != rowJob:
			case kind == rowHeap:
				m = &fsmpb.Heap{}
			case kind == rowPG:
				m = &dirpb.PlacementGroup{}
			case kind == rowMeta:
				m = &fsmpb.Meta{}
			case kind == rowJob:
				m = &fsmpb.Job{}
			}
			if m != nil {
				if err := proto.Unmarshal(r.Value, m); err != nil {
					t.Fatal(err)
				}
				change(m)
				r = encodeRow(string(r.Key), m)
			}
			out = append(out, r)
		}
		return out
	}
	heap := func(change func(h *fsmpb.Heap)) []Row {
		return edit(rowHeap, func(m proto.Message) { change(m.(*fsmpb.Heap)) })
	}
	arrays := func(change func(a *dirpb.StatusArray)) []Row {
		return edit(rowPG, func(m proto.Message) { change(m.(*dirpb.PlacementGroup).StatusArrays[0]) })
	}
	for what, tc := range map[string]struct {
		rows []Row
		want string
	}{
		"one block twice": {heap(func(h *fsmpb.Heap) {
			h.StatusHeld[0].Offset = h.StatusDead[0].Offset
		}), "block of status words"},
		"a block inside another": {heap(func(h *fsmpb.Heap) {
			h.StatusHeld[0].Offset += 8
		}), "block of status words"},
		"a block of no array": {heap(func(h *fsmpb.Heap) {
			h.StatusDead[0].Offset = layout.RegionPageSize
		}), "block of status words"},
		"a block of nobody":      {heap(func(h *fsmpb.Heap) { h.StatusHeld[0].SessionId = 77 }), "of session 77"},
		"a block of a stranger":  {heap(func(h *fsmpb.Heap) { h.StatusHeld[0].SessionId = 4 }), "of session 4"},
		"a death to come":        {heap(func(h *fsmpb.Heap) { h.StatusDead[0].Died = 2 }), "number 2 of 1"},
		"no death":               {heap(func(h *fsmpb.Heap) { h.StatusDead[0].Died = 0 }), "number 0 of 1"},
		"settled more than died": {heap(func(h *fsmpb.Heap) { h.Settled = 2 }), "settled are 2"},
		"an array in a shard's": {arrays(func(a *dirpb.StatusArray) {
			a.Offset = layout.RegionPageSize
		}), "meet at"},
		"an array beyond the index": {arrays(func(a *dirpb.StatusArray) { a.Offset = 1 << 62 }), "status array of 1"},
		"an array of many segments": {arrays(func(a *dirpb.StatusArray) {
			a.Segments = 1<<32 - 1
		}), "status array of 4294967295"},
		"an array between groups": {arrays(func(a *dirpb.StatusArray) { a.Offset -= 8 }), "status array of 1"},
		"an empty array":          {arrays(func(a *dirpb.StatusArray) { a.Segments = 0 }), "status array of 0"},
		"a job after deaths to come": {edit(rowJob, func(m proto.Message) {
			if j := m.(*fsmpb.Job); j.Job.Kind == dirpb.JobKind_JOB_SETTLE {
				j.Deaths = 9
			}
		}), "began when 9"},
		"deaths that nobody counted": {edit(rowMeta, func(m proto.Message) {
			m.(*fsmpb.Meta).StatusDeaths = 0
		}), "and 0 have ended"},
	} {
		if _, err := Load(tc.rows); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", what, err, tc.want)
		}
	}
}

// TestStatusProperties grants and gives back blocks of status words at random, while sessions die, memory is lost and
// placement groups come and go. A dead session's block is free as soon as each placement group was gone through since,
// by a job that began after the death, or has lost its memory, or went away; and no sooner.
func TestStatusProperties(t *testing.T) {
	freed, sooner, lost, gone := 0, 0, 0, 0 // sooner: without the end of a job; gone: with their placement groups
	rapid.Check(t, func(rt *rapid.T) {
		pick := func(label string, n int) int { return rapid.IntRange(0, n-1).Draw(rt, label) }
		h := newHarness(rt)
		incarnation := uint64(100)
		join := func(name string) {
			incarnation++
			h.try(registerWith(&dirpb.RegisterNodeRequest{Name: name, Incarnation: incarnation,
				CapacityBytes: 200 << 20}))
		}
		for i := range 3 {
			join(fmt.Sprint("m", i+1))
		}
		h.do(create(&dirpb.CreateNamespaceRequest{Name: "w", Replicas: 1, Shards: 4, BytesPerNode: 40 << 20,
			Segments: 10}))
		type word struct {
			pg, generation uint32
			offset         uint64
		}
		owner := make(map[word]uint32)            // the session whose intents may name it
		missing := make(map[word]map[uint32]bool) // of a dead one: placement groups that may have some
		since := make(map[uint32]map[word]bool)   // by job: those dead when it began
		// look follows what a command did; ended is the job that it ended, restarted is whether a memory node came back
		// empty.
		look := func(ended *dirpb.Job, restarted bool) {
			for at := range since[ended.GetId()] {
				delete(missing[at], ended.GetPgId())
			}
			for at, x := range owner {
				if p := h.pg(at.pg); p == nil && restarted || p != nil && p.Generation != at.generation {
					delete(owner, at)
					lost++
				} else if h.s.Session(x) == nil && missing[at] == nil {
					missing[at] = make(map[uint32]bool)
					for _, p := range h.s.PGs(1) {
						missing[at][p.Id] = !wordless(p)
					}
				}
			}
			for at := range missing {
				maps.DeleteFunc(missing[at], func(id uint32, may bool) bool {
					return !may || h.pg(id) == nil || wordless(h.pg(id))
				})
				if owner[at] == 0 {
					delete(missing, at)
					continue
				}
				dead := slices.ContainsFunc(h.s.Heap(at.pg).GetStatusDead(), func(b *fsmpb.DeadStatus) bool {
					return b.Offset == at.offset
				})
				if dead != (len(missing[at]) > 0) {
					rt.Fatalf("%v is dead: %v, and placement groups %v may name it", at, dead, missing[at])
				}
				if dead {
					continue
				}
				freed++
				if ended == nil {
					sooner++
				}
				if h.pg(at.pg) == nil {
					gone++
				}
				delete(owner, at)
				delete(missing, at)
				for _, dead := range since { // it may be granted, and die, once more
					delete(dead, at)
				}
			}
			for _, j := range h.s.Jobs() {
				if j.Kind == dirpb.JobKind_JOB_SETTLE && since[j.Id] == nil {
					since[j.Id] = make(map[word]bool)
					for at := range missing {
						since[j.Id][at] = true
					}
				}
			}
		}
		for range 150 {
			pgs, sessions, nodes, jobs := h.s.PGs(1), h.s.Sessions(), h.s.Nodes(), h.s.Jobs()
			pg, node := pgs[pick("pg", len(pgs))], nodes[pick("node", len(nodes))]
			x := &fsmpb.Session{}
			if len(sessions) > 0 {
				x = sessions[pick("session", len(sessions))]
			}
			own, restarted := heldStatus(h.s.Heap(pg.Id), x.Id), false
			switch kind := rapid.SampledFrom([]string{"settle", "end", "grant", "open", "expire", "end", "settle",
				"end", "settle", "publish", "close", "back", "restart", "create", "move", "drain"}).Draw(
				rt, "kind"); kind {
			case "open":
				h.try(openIn(1, 0))
			case "publish":
				for _, w := range h.s.WantRegions(node.Id, node.Incarnation) {
					h.try(publish(node.Id, node.Incarnation, w.PgId, node.Incarnation))
				}
			case "grant":
				r := h.try(grantStatus(x.Id, pg.Id, uint32(len(own))))
				if r.Err != nil {
					break
				}
				at := word{pg.Id, pg.Generation, r.Status.Block.Offset}
				if o := owner[at]; o != 0 {
					rt.Fatalf("session %d was granted %v, which intents of session %d may name", x.Id, at, o)
				}
				owner[at] = x.Id
			case "back":
				if len(own) > 0 {
					at := own[pick("block", len(own))]
					h.do(takeStatus(x.Id, x.StatusNumber+1, &dirpb.StatusBlock{PgId: pg.Id, Generation: pg.Generation,
						Offset: at}))
					delete(owner, word{pg.Id, pg.Generation, at})
				}
			case "close":
				c := closeS(x.Id, 0)
				if c.GetCloseSession().Settled = pick("settled", 2) == 0; c.GetCloseSession().Settled {
					maps.DeleteFunc(owner, func(_ word, o uint32) bool { return o == x.Id })
				}
				h.try(c)
			case "expire":
				h.do(expire(x.Id))
				for _, n := range nodes {
					h.try(confirm(n.Id, n.Incarnation, x.Id))
				}
			case "settle":
				h.try(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: pg.Id}))
			case "end":
				if len(jobs) == 0 || x.Id == 0 {
					break
				}
				j := jobs[pick("job", len(jobs))]
				h.try(claim(x.Id, j.Id))
				if r := h.try(endJob(&fsmpb.EndJob{SessionId: x.Id, JobId: j.Id, MinEpoch: 9})); r.Err == nil {
					look(j, false)
				}
			case "restart":
				if restarted = pick("twice", 3) == 0; restarted {
					join(node.Name)
				}
			case "drain":
				h.try(drain(node.Id, node.Draining))
			case "create":
				if len(pgs) < 6 {
					h.try(createPG(1, node.Id))
				}
			case "move":
				shards := h.s.Shards(1)
				h.try(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE,
					ShardId: shards[pick("shard", len(shards))].Id, TargetPgId: pg.Id}))
			}
			look(nil, restarted)
		}
		h.checkCopies()
	})
	t.Logf("%d blocks were free again after a death, %d without a job's end, %d with their placement group, "+
		"%d were lost",
		freed, sooner, gone, lost)
	if !t.Failed() && (freed == 0 || lost == 0) {
		t.Error("too few to prove anything")
	}
}

// TestStatusOfFrozen: while a placement group of the namespace is frozen, its words are there: a dead session's block
// is not free before that one was gone through, too.
func TestStatusOfFrozen(t *testing.T) {
	h := cluster(t, 3, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, Shards: 4})
	var frozen, other []uint32
	x := h.do(openIn(1, 0)).Session.Id
	for _, pg := range h.s.PGs(1) {
		if regionOn(pg, 2) != nil {
			frozen = append(frozen, pg.Id)
		} else {
			other = append(other, pg.Id)
		}
	}
	if len(frozen) == 0 || len(other) == 0 {
		t.Fatalf("on memory node 2 are %d, and not %d", frozen, other)
	}
	h.do(grantStatus(x, other[0], 0))
	h.do(expire(x))
	for _, n := range []uint32{1, 2, 3} {
		h.do(&fsmpb.Command{
			Op: &fsmpb.Command_ConfirmFence{
				ConfirmFence: &fsmpb.ConfirmFence{NodeId: n, Incarnation: h.s.Node(n).Incarnation, SessionIds: []uint32{
					x}}}})
	}
	h.do(nodeDown(2, 100))
	deaths := h.s.Meta().StatusDeaths
	if deaths != 1 || h.pg(frozen[0]).State != dirpb.PGState_PG_FROZEN {
		t.Fatalf("%d deaths, %v", deaths, h.pg(frozen[0]))
	}
	for _, pg := range other {
		h.s.editHeap(pg).Settled = deaths
		h.s.settlePGs(pg)
	}
	if n := len(h.s.Heap(other[0]).StatusDead); n != 1 || h.s.SettledDeaths(1) != 0 ||
		!h.s.Unsettled(h.pg(frozen[0]), deaths) {
		t.Errorf("%d blocks are dead, and of %d sessions nothing is left", n, h.s.SettledDeaths(1))
	}
	for _, pg := range frozen {
		h.s.editHeap(pg).Settled = deaths
		h.s.settlePGs(pg)
	}
	if n := len(h.s.Heap(other[0]).StatusDead); n != 0 {
		t.Errorf("%d blocks are dead when all was gone through", n)
	}
}
