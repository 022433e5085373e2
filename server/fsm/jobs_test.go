package fsm

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Planned and leaving members have regions, take room and are the directory's own
// business.
func TestHiddenMembers(t *testing.T) {
	h := cluster(t, 3, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, Shards: 1})
	x := h.do(openIn(1, 0)).Session
	check := func(what string, node uint32, published bool) {
		t.Helper()
		op, own := h.s.Map(nil), h.s.Map(x)
		if own.Pgs[0].Planned != nil || own.Pgs[0].Leaving != nil {
			t.Errorf("%s: a session sees %v", what, own.Pgs[0])
		}
		m := op.Pgs[0].Planned
		if m == nil {
			m = op.Pgs[0].Leaving
		}
		if m.GetNodeId() != node || m.GetKeys() != nil {
			t.Errorf("%s: an operator sees %v", what, op.Pgs[0])
		}
		i := slices.IndexFunc(h.s.WantRegions(node, 100), func(w *dirpb.WantRegion) bool {
			return w.PgId == 1 && w.Published == published
		})
		if i < 0 {
			t.Errorf("%s: memory node %d is to have %v", what, node, h.s.WantRegions(node, 100))
		}
	}
	used := h.s.Node(3).UsedBytes
	h.do(&fsmpb.Command{Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 1, Epoch: 1, NodeId: 3}}})
	check("planned", 3, false)
	if h.s.Node(3).UsedBytes != used+h.pg(1).RegionBytes {
		t.Errorf("memory node 3 uses %d, before the plan %d", h.s.Node(3).UsedBytes, used)
	}
	h.do(drain(3, false))
	if h.s.Node(3).UsedBytes != used {
		t.Errorf("without the plan memory node 3 uses %d", h.s.Node(3).UsedBytes)
	}
	h.refuse(&fsmpb.Command{Op: &fsmpb.Command_StartLeave{StartLeave: &fsmpb.StartLeave{PgId: 1, Epoch: 2, NodeId: 2}}},
		ErrNotFound)
	h.do(&fsmpb.Command{Op: &fsmpb.Command_StartLeave{StartLeave: &fsmpb.StartLeave{PgId: 1, Epoch: 1, NodeId: 2}}})
	check("leaving", 2, true)
	h.refuse(publish(2, 100, 1, 77), ErrRefused, "cannot change")
	h.do(activate(1, 2))
	if w := h.s.WantRegions(2, 100); len(w) != 1 || w[0].PgId != 2 {
		t.Errorf("memory node 2 left and is to have %v", w)
	}
	h.checkCopies()
}

// A memory node that is to have a region again, in the same process, publishes the keys of the
// one that it made for this: not of one that it had before.
func TestRegionOfAnEarlierPlan(t *testing.T) {
	h := cluster(t, 3, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, Shards: 1})
	plan := func() uint64 {
		t.Helper()
		h.do(&fsmpb.Command{Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 1, Epoch: 1, NodeId: 3}}})
		for _, w := range h.s.WantRegions(3, 100) {
			if w.PgId == 1 && !w.Published {
				return w.Since
			}
		}
		t.Fatalf("memory node 3 is to have %v", h.s.WantRegions(3, 100))
		return 0
	}
	tell := func(since uint64) *fsmpb.Command {
		c := publish(3, 100, 1, 77)
		c.GetPublishRegion().Since = since
		return c
	}
	first := plan()
	h.do(drain(3, false)) // which gives up the plan
	h.do(drain(3, true))
	h.refuse(tell(first), ErrNotFound)
	again := plan()
	if again == first || first == 0 {
		t.Fatalf("planned at %d, then at %d", first, again)
	}
	h.refuse(tell(first), ErrNotFound)
	if m := h.pg(1).Planned; len(m.GetKeys()) != 0 {
		t.Fatalf("planned is %v", m)
	}
	h.do(tell(again))
	if pg := h.pg(1); !pg.Joining || pg.Members[2].NodeId != 3 || len(pg.Members[2].Keys) == 0 {
		t.Fatalf("not joining: %v", pg)
	}
	h.checkCopies()
}

func TestNoRoom(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: gib / 2})
	h.do(registerWith(&dirpb.RegisterNodeRequest{Name: "m2", Incarnation: 1, CapacityBytes: gib/2 - 1}))
	h.refuse(&fsmpb.Command{Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: 1, Epoch: 1, NodeId: 2}}},
		ErrFull, "m2")
	h.refuse(createPG(1, 2), ErrFull, "m2")
	h.refuse(createPG(1, 7), ErrNotFound)
	h.refuse(createPG(2, 2), ErrNotFound)
	if pg := h.do(createPG(1, 1)).PG; pg.Id != 2 || pg.RegionBytes != gib/2 || pg.IndexBytes != h.pg(1).IndexBytes {
		t.Fatalf("created %v", pg)
	}
	h.refuse(createPG(1, 1), ErrFull, "m1")
}

func TestJobsRefused(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", Shards: MaxShards})
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "b", BytesPerNode: 64 << 20}))
	h.activate()
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: 1, Split: true}), ErrRefused, "depth 12")
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: 1, TargetPgId: 2}), ErrNotFound)
	sh := h.s.Shards(2)[0]
	for _, segments := range []uint32{1, sh.Segments, 2*sh.Segments + 1, 128 * sh.Segments} {
		h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: sh.Id, Segments: segments}),
			ErrInvalid, "2 to 127")
	}
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: sh.Id, Segments: 2 * sh.Segments,
		Split: true}), ErrInvalid, "one of these")
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_JOIN, PgId: 1}), ErrInvalid, "JOB_JOIN")
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 3}), ErrNotFound)
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: strings.Repeat("r", 257)}),
		ErrInvalid, "reason")
	j := h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1, Reason: "why"})).Job
	if j.Id != 1 || j.Reason != "why" || !proto.Equal(j, h.s.Job(1)) || len(h.s.JobsOf(1)) != 1 ||
		len(h.s.JobsOf(2)) != 0 || h.s.Job(2) != nil {
		t.Fatalf("job %v, of the state %v", j, h.s.Jobs())
	}
	other := h.do(openIn(2, 0)).Session.Id
	reader := h.do(&fsmpb.Command{
		Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: 1, ReadOnly: true}}}).Session.Id
	own := h.do(openIn(1, 0)).Session.Id
	h.refuse(claim(other, 1), ErrNotFound)
	h.refuse(claim(reader, 1), ErrRefused, "read-only")
	h.refuse(claim(9, 1), ErrNotFound)
	h.refuse(claim(own, 2), ErrNotFound)
	if j := h.do(claim(own, 1)).Job; j.Owner != own {
		t.Fatalf("claimed %v", j)
	}
	if r := h.do(claim(own, 1)); len(r.Changes) != 0 || r.Job.Owner != own {
		t.Fatalf("claimed again: %v", r)
	}
	h.do(expire(own))
	h.refuse(endJob(&fsmpb.EndJob{SessionId: own, JobId: 1, Report: &dirpb.JobReport{}}), ErrNotFound)
	h.do(expire(reader))
	h.do(confirm(1, 100, own, reader))
	if !h.s.Heap(1).Dirty || h.s.Heap(2).Dirty {
		t.Fatalf("dirty: %v, %v", h.s.Heap(1).Dirty, h.s.Heap(2).Dirty)
	}
	if h.s.Job(1).Owner != 0 {
		t.Fatalf("a fenced session owns %v", h.s.Job(1))
	}
}

// A read-only session leaves nothing; a row of a scrub has an end.
func TestScrubRow(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", BytesPerNode: 40 << 20})
	reader := h.do(&fsmpb.Command{
		Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: 1, ReadOnly: true}}}).Session.Id
	h.do(expire(reader))
	h.do(confirm(1, 100, reader))
	if h.s.Heap(1).Dirty {
		t.Fatal("dirty after a session that could not write")
	}
	x := h.do(openIn(1, 0)).Session.Id
	h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 1}))
	h.do(claim(x, 1))
	report := &dirpb.JobReport{Groups: 5, LinkedUnits: make([]uint32, 1000)}
	for range 100 {
		report.Findings = append(report.Findings, "x"+strings.Repeat("é", 300)) // cut inside a rune
	}
	h.do(endJob(&fsmpb.EndJob{SessionId: x, JobId: 1, Report: report, UnixMillis: 77}))
	u := h.s.Usage()[0]
	if r := u.LastScrub; u.LastScrubUnixMillis != 77 || r.Groups != 5 || len(r.LinkedUnits) != 3 ||
		len(r.Findings) != 32 {
		t.Fatalf("kept %d extents, %d findings of %v", len(r.LinkedUnits), len(r.Findings), u)
	}
	if f := u.LastScrub.Findings[31]; len(f) != 199 || !utf8.ValidString(f) {
		t.Fatalf("a finding of %d bytes", len(f))
	}
	if u.IndexBytesUsed != h.s.Heap(1).IndexNext {
		t.Fatalf("usage %v", u)
	}
	h.checkCopies()
}

// TestViewProperties changes chains, moves, recalls and drains at random. The
// harness checks the structure after each command.
func TestViewProperties(t *testing.T) {
	done := make(map[string]int)
	ended := make(map[dirpb.JobKind]int)
	few := func() (out []string) {
		for _, k := range []string{"up", "down", "publish", "activate", "plan", "leave", "split", "migrate", "recall",
			"scrub", "claim", "end",
			"giveback", "finish", "drain", "remove", "createpg", "remake", "accept", "open", "close", "expire",
			"confirm", "grant", "settle", "status", "back"} {
			if done[k] < 2 {
				out = append(out, k)
			}
		}
		for k := dirpb.JobKind_JOB_RECOVER; k <= dirpb.JobKind_JOB_SETTLE; k++ {
			if ended[k] < 1 {
				out = append(out, k.String())
			}
		}
		return out
	}
	property := func(rt *rapid.T) {
		h := newHarness(rt)
		twin := New()
		type hold struct {
			generation uint32
			run        *dirpb.ReturnedRun
			session    uint32
		}
		var held []hold
		incarnation, epoch := uint64(100), uint64(1)
		pick := func(label string, n int) int { return rapid.IntRange(0, n-1).Draw(rt, label) }
		apply := func(c *fsmpb.Command) Result {
			r := h.try(c)
			Apply(twin, proto.CloneOf(c))
			return r
		}
		join := func(i int) {
			incarnation++
			apply(registerWith(&dirpb.RegisterNodeRequest{Name: fmt.Sprint("m", i), Incarnation: incarnation,
				CapacityBytes: 200 << 20}))
		}
		for i := range 3 + pick("nodes", 3) {
			join(i)
		}
		apply(create(&dirpb.CreateNamespaceRequest{
			Name: "w", Replicas: uint32(1 + pick("replicas", 3)), Shards: 1 << pick("shards", 3),
			BytesPerNode: 60 << 20, Segments: 40,
		}))
		publishAll := func() {
			for _, n := range h.s.Nodes() {
				for _, w := range h.s.WantRegions(n.Id, n.Incarnation) {
					if n.State == up && !w.Published {
						apply(publish(n.Id, n.Incarnation, w.PgId, incarnation))
					}
				}
			}
		}
		publishAll()
		apply(openIn(1, epoch))
		apply(openIn(1, epoch))

		for range 150 + pick("steps", 150) {
			epoch += uint64(rapid.SampledFrom([]int{1, 1, 5, 1100}).Draw(rt, "epochs"))
			kind := rapid.SampledFrom([]string{ // rapid prefers the first ones
				"end", "claim", "plan", "publish", "migrate", "recall", "end", "claim", "finish", "activate", "scrub",
				"split", "grant",
				"end", "claim", "leave", "down", "open", "finish", "up", "giveback", "createpg", "remake", "remake",
				"accept", "close", "expire", "confirm", "grant",
				"settle", "status", "status", "back", "settle", "grow", "drain", "undrain", "activate", "remove"}).Draw(
				rt, "kind")
			pgs, nodes, sessions, jobs, shards := h.s.PGs(0), h.s.Nodes(), h.s.Sessions(), h.s.Jobs(), h.s.Shards(0)
			// Mostly one for which the command makes sense.
			apt := func(pg *dirpb.PlacementGroup) bool {
				switch kind {
				case "activate":
					return pg.State == dirpb.PGState_PG_FROZEN
				case "finish":
					return len(pg.Recalled) > 0
				case "recall":
					return h.s.Heap(pg.Id).Watermark > h.s.Heap(pg.Id).Start
				}
				return pg.State == active && len(h.s.JobsOf(pg.Id)) == 0
			}
			if likely := slices.DeleteFunc(h.s.PGs(0), func(pg *dirpb.PlacementGroup) bool {
				return !apt(pg)
			}); len(likely) > 0 && pick("apt", 9) < 8 {
				pgs = likely
			}
			if owned := slices.DeleteFunc(h.s.Jobs(), func(j *dirpb.Job) bool {
				return (j.Owner != 0) != (kind == "end")
			}); len(owned) > 0 && pick("owned", 9) < 8 {
				jobs = owned
			}
			pg := pgs[pick("pg", len(pgs))]
			node := &dirpb.Node{}
			if len(nodes) > 0 {
				node = nodes[pick("node", len(nodes))]
			}
			if i := slices.IndexFunc(jobs, func(j *dirpb.Job) bool {
				return j.Kind == dirpb.JobKind_JOB_MOVE && j.PgId != j.TargetPgId
			}); i >= 0 && kind == "down" {
				// The one that loses a move's child, where no other replica is left.
				if n := h.s.Node(h.pg(jobs[i].TargetPgId).Members[0].NodeId); n != nil && pick("child", 2) == 0 {
					node = n
				}
			}
			x, job := &fsmpb.Session{}, &dirpb.Job{}
			if len(sessions) > 0 {
				x = sessions[pick("session", len(sessions))]
			}
			if len(jobs) > 0 {
				job = jobs[pick("job", len(jobs))]
			}
			shard := shards[pick("shard", len(shards))]
			heap := h.s.Heap(pg.Id)
			extent := uint32(heap.Start/layout.ExtentUnits) + uint32(pick("extent", 2))
			var c *fsmpb.Command
			switch kind {
			case "up":
				join(pick("name", 7))
				done[kind]++
				continue
			case "publish":
				publishAll()
				done[kind]++
				continue
			case "down":
				c = nodeDown(node.Id, node.Incarnation)
			case "activate":
				c = activate(pg.Id, pg.Epoch)
			case "plan":
				c = &fsmpb.Command{
					Op: &fsmpb.Command_PlanJoin{
						PlanJoin: &fsmpb.PlanJoin{PgId: pg.Id, Epoch: pg.Epoch, NodeId: node.Id}}}
			case "leave":
				c = &fsmpb.Command{
					Op: &fsmpb.Command_StartLeave{
						StartLeave: &fsmpb.StartLeave{PgId: pg.Id, Epoch: pg.Epoch, NodeId: node.Id}}}
			case "split", "migrate":
				c = startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: shard.Id, TargetPgId: pg.Id,
					Split: kind == "split"})
			case "grow":
				c = startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: shard.Id,
					Segments: shard.Segments * uint32(1+pick("growth", 3))})
			case "recall":
				extents := []uint32{extent}
				if pick("both", 3) == 0 {
					extents = append(extents, extent^1)
				}
				c = startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: pg.Id, Extents: extents,
					InPlace: pick("in place", 2) == 0})
			case "scrub":
				c = startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: pg.Id,
					Repair: pick("repair", 2) == 0})
			case "settle":
				c = startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: pg.Id})
			case "status":
				c = grantStatus(x.Id, pg.Id, uint32(len(heldStatus(heap, x.Id))-pick("told", 2)))
			case "back":
				var blocks []*dirpb.StatusBlock
				for _, at := range heldStatus(heap, x.Id) {
					blocks = append(blocks, &dirpb.StatusBlock{PgId: pg.Id, Generation: pg.Generation, Offset: at})
				}
				c = takeStatus(x.Id, epoch, blocks...)
			case "claim":
				c = claim(x.Id, job.Id)
			case "end", "giveback":
				if job.Owner != 0 && pick("owner", 9) < 8 {
					x = h.s.Session(job.Owner)
				}
				c = endJob(&fsmpb.EndJob{
					SessionId: x.Id, JobId: job.Id, GiveBack: kind == "giveback", Epoch: epoch,
					Report: &dirpb.JobReport{LinkedUnits: []uint32{uint32(pick("linked", 1000)), 3}},
				})
				if job.InPlace {
					for _, x := range job.Extents {
						k := &dirpb.UnitRuns{Extent: x}
						for range pick("kept", 4) {
							k.SkipTake = append(k.SkipTake, uint32(pick("skip", 1<<16)), uint32(1+pick("take", 300)))
						}
						c.GetEndJob().Report.Kept = append(c.GetEndJob().Report.Kept, k)
					}
				}
			case "finish":
				if len(pg.Recalled) > 0 {
					extent = pg.Recalled[0]
				}
				c = &fsmpb.Command{Op: &fsmpb.Command_FinishRecall{FinishRecall: &fsmpb.FinishRecall{
					PgId: pg.Id, Extent: extent, Epoch: epoch, MinEpoch: epoch,
				}}}
			case "drain", "undrain":
				c = drain(node.Id, kind == "undrain")
			case "remove":
				c = remove(node.Id, pick("force", 3) == 2)
			case "createpg":
				var chain []uint32
				for range h.s.Namespace(1).Replicas {
					if len(nodes) > 0 {
						chain = append(chain, nodes[pick("chain", len(nodes))].Id)
					}
				}
				c = createPG(1, chain...)
			case "remake":
				// Where there is one that can be, that one.
				for _, g := range h.s.PGs(1) {
					if g.State == dirpb.PGState_PG_CREATING || g.State == dirpb.PGState_PG_LOST {
						pg = g
					}
				}
				var chain []uint32
				for range 1 + pick("members", 2) {
					if len(nodes) > 0 {
						chain = append(chain, nodes[pick("chain", len(nodes))].Id)
					}
				}
				c = &fsmpb.Command{
					Op: &fsmpb.Command_RemakePg{
						RemakePg: &fsmpb.RemakePG{PgId: pg.Id, Epoch: pg.Epoch, NodeIds: chain}}}
			case "accept":
				w := h.s.Namespace(1)
				c = &fsmpb.Command{
					Op: &fsmpb.Command_AcceptLoss{
						AcceptLoss: &dirpb.AcceptLossRequest{Name: w.Name, Lost: w.Lost - uint64(pick("less", 2))}}}
			case "open":
				c = openIn(1, epoch)
			case "close":
				var runs []*dirpb.ReturnedRun
				for _, o := range held {
					if p := h.pg(o.run.PgId); o.session == x.Id && (p == nil || p.Generation == o.generation) {
						runs = append(runs, o.run)
					}
				}
				c = closeS(x.Id, epoch, runs...)
				c.GetCloseSession().Leaked, c.GetCloseSession().Settled = pick("leaked", 2) == 0,
					pick("settled", 2) == 0
			case "expire":
				c = expire(x.Id)
			case "confirm":
				var ids []uint32
				for _, o := range sessions {
					ids = append(ids, o.Id)
				}
				c = confirm(node.Id, node.Incarnation, ids...)
			case "grant":
				c = grant(x.Id, pg.Id, rapid.SampledFrom([]uint32{1 << 18, 1 << 16, 100}).Draw(rt, "want"),
					uint32(pick("place", 200)), epoch-1)
			}
			state := pg.State
			r := apply(c)
			if r.Err != nil {
				for _, e := range []error{ErrInvalid, ErrNotFound, ErrExists, ErrRefused, ErrFull, ErrUnavailable} {
					if errors.Is(r.Err, e) {
						r.Err = nil
					}
				}
				if r.Err != nil {
					rt.Fatalf("%v: %v is of no kind", c, r.Err)
				}
				if kind == "close" && x.Id != 0 {
					rt.Fatalf("%v: refused", c)
				}
				continue
			}
			done[kind]++
			switch kind {
			case "end":
				ended[job.Kind]++
			case "activate":
				if state != dirpb.PGState_PG_FROZEN {
					rt.Fatalf("activated %v", pg)
				}
			case "recall", "finish": // its sessions forget what they had there
				extents := []uint32{extent}
				if kind == "recall" {
					extents = r.Job.Extents
				}
				held = slices.DeleteFunc(held, func(o hold) bool {
					return o.run.PgId == pg.Id && slices.Contains(extents, o.run.Unit/layout.ExtentUnits)
				})
			case "close":
				held = slices.DeleteFunc(held, func(o hold) bool { return o.session == x.Id })
			case "grant":
				for _, g := range r.Grant.Runs {
					if slices.Contains(pg.Recalled, g.Unit/layout.ExtentUnits) {
						rt.Fatalf("granted %v of a recalled extent of %v", g, pg)
					}
					for _, o := range held {
						if o.run.PgId == pg.Id && o.generation == pg.Generation && g.Unit < o.run.Unit+o.run.Units &&
							o.run.Unit < g.Unit+g.Units {
							rt.Fatalf("granted %v while session %d holds %v", g, o.session, o.run)
						}
					}
					if home, _ := h.s.HomeOf(pg.Id, g.Unit, g.Units); home != x.Id || g.Generation != pg.Generation {
						rt.Fatalf("session %d was granted %v, whose home is %d", x.Id, g, home)
					}
					held = append(held, hold{pg.Generation, g, x.Id})
				}
			}
			h.checkCopies()
		}
		if !slices.EqualFunc(h.s.Rows(), twin.Rows(), func(a, b Row) bool {
			return bytes.Equal(a.Key, b.Key) && bytes.Equal(a.Value, b.Value)
		}) {
			rt.Fatal("the same commands gave two states")
		}
	}
	// Chance decides what is accepted; some rounds are enough.
	for round := 0; round == 0 || round < 8 && !t.Failed() && len(few()) > 0; round++ {
		rapid.Check(t, property)
	}
	t.Logf("accepted %v, ended %v", done, ended)
	if out := few(); !t.Failed() && len(out) > 0 {
		t.Errorf("too few to prove anything: %v", out)
	}
}
