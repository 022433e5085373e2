package fsm

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// TestScripts applies the commands of testdata and compares what each changes: a
// line for each entity, "-" before one that is gone. Every command is checked as
// harness.try does.
//
//	pg1 ACTIVE e2 g1 v9 [1 2+3]   epoch, generation, changed_version; 3 is a joiner,
//	                              a member without keys has a "?"
//	heap1 …                       lists in units, extents and segments
//
// Amounts of memory are in units, but bytes for the index.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "cluster":
				s = newScript(t, d)
				return s.changes()
			case "run":
				var out strings.Builder
				for line := range strings.Lines(d.Input) {
					line = strings.TrimSpace(line)
					fmt.Fprintf(&out, "> %s\n", line)
					r := s.h.try(s.command(strings.Fields(line)))
					if r.Err != nil {
						fmt.Fprintf(&out, "  %v\n", r.Err)
					}
					if r.Grant != nil {
						fmt.Fprintf(&out, "  granted %s, waiting %d\n", strings.Join(runTexts(r.Grant.Runs), " "),
							r.Grant.WaitingUnits)
					}
					if b := r.Status.GetBlock(); b != nil {
						fmt.Fprintf(&out, "  block %d of pg%d g%d, v%d\n", b.Offset, b.PgId, b.Generation,
							r.Status.MapVersion)
					}
					if r.Leaks != nil {
						fmt.Fprintf(&out, "  leaks in extents %v\n", r.Leaks)
					}
					for _, l := range r.Lost {
						fmt.Fprintf(&out, "  namespace %s lost placement group %d with %s, %d bytes\n", l.Namespace,
							l.PG, l.Node, l.HeldBytes)
					}
					out.WriteString(s.changes())
				}
				s.h.checkCopies()
				return out.String()
			}
			t.Fatalf("%s: directive %q", d.Pos, d.Cmd)
			return ""
		})
	})
}

type script struct {
	h     *harness
	show  []uint32 // placement groups to print, all when empty
	seen  map[string]string
	incar uint64
}

// newScript makes a cluster: nodes, replicas, shards, segments, mib a memory
// node, show.
func newScript(t *testing.T, d *datadriven.TestData) *script {
	nodes, q, mib := 1, &dirpb.CreateNamespaceRequest{Name: "w", Shards: 1}, uint64(8)
	s := &script{seen: map[string]string{}, incar: 100}
	for _, a := range d.CmdArgs {
		n, err := strconv.ParseUint(a.Vals[0], 10, 32)
		if err != nil {
			t.Fatalf("%s: %v", d.Pos, err)
		}
		switch a.Key {
		case "nodes":
			nodes = int(n)
		case "replicas":
			q.Replicas = uint32(n)
		case "shards":
			q.Shards = uint32(n)
		case "segments":
			q.Segments = uint32(n)
		case "mib":
			mib = n
		case "show":
			s.show = append(s.show, uint32(n))
		default:
			t.Fatalf("%s: argument %q", d.Pos, a.Key)
		}
	}
	q.BytesPerNode = mib << 20
	s.h = cluster(t, nodes, q)
	return s
}

func (s *script) command(f []string) *fsmpb.Command {
	n := make([]uint32, len(f))
	var words []string
	var at []uint32 // the numbers
	for i, x := range f[1:] {
		if v, err := strconv.ParseUint(x, 10, 32); err == nil {
			n[i], at = uint32(v), append(at, uint32(v))
		} else {
			words = append(words, x)
		}
	}
	arg := func(i int) uint32 {
		if i < len(at) {
			return at[i]
		}
		return 0
	}
	has := func(w string) bool { return slices.Contains(words, w) }
	node := s.h.s.Node(arg(0))
	epoch := s.h.pg(arg(0)).GetEpoch()
	switch f[0] {
	case "up":
		s.incar++
		return register(fmt.Sprint("m", arg(0)), s.incar)
	case "down":
		return nodeDown(arg(0), node.GetIncarnation())
	case "publish": // node, pg
		return publish(arg(0), node.GetIncarnation(), arg(1), node.GetIncarnation())
	case "activate":
		return activate(arg(0), epoch)
	case "plan": // pg, node
		return &fsmpb.Command{
			Op: &fsmpb.Command_PlanJoin{PlanJoin: &fsmpb.PlanJoin{PgId: arg(0), Epoch: epoch, NodeId: arg(1)}}}
	case "leave": // pg, node
		return &fsmpb.Command{
			Op: &fsmpb.Command_StartLeave{StartLeave: &fsmpb.StartLeave{PgId: arg(0), Epoch: epoch, NodeId: arg(1)}}}
	case "split", "migrate": // shard, target
		return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: arg(0), TargetPgId: arg(1),
			Split: f[0] == "split"})
	case "grow": // shard, segments
		return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: arg(0), Segments: arg(1)})
	case "recall": // pg, extents
		return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_RECALL, PgId: arg(0), Extents: at[1:],
			InPlace: has("inplace")})
	case "scrub": // pg
		return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: arg(0), Repair: has("repair")})
	case "settle": // pg
		return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SETTLE, PgId: arg(0)})
	case "status": // session, pg, held
		return grantStatus(arg(0), arg(1), arg(2))
	case "back": // session, number, pg, offset, generation
		b := &dirpb.StatusBlock{PgId: arg(2), Generation: s.h.pg(arg(2)).GetGeneration(), Offset: uint64(arg(3))}
		if arg(4) != 0 {
			b.Generation = arg(4)
		}
		return takeStatus(arg(0), uint64(arg(1)), b)
	case "claim": // session, job
		return claim(arg(0), arg(1))
	case "giveback":
		return endJob(&fsmpb.EndJob{SessionId: arg(0), JobId: arg(1), GiveBack: true})
	case "end": // session, job, reclaim epoch and minimum, linked units by extent
		e := &fsmpb.EndJob{SessionId: arg(0), JobId: arg(1), Epoch: uint64(arg(2)), MinEpoch: uint64(arg(2)),
			UnixMillis: 5}
		if len(at) > 3 {
			e.Report = &dirpb.JobReport{LinkedUnits: at[3:]}
		}
		return endJob(e)
	case "finish": // pg, extent, reclaim epoch, minimum
		return &fsmpb.Command{Op: &fsmpb.Command_FinishRecall{FinishRecall: &fsmpb.FinishRecall{
			PgId: arg(0), Extent: arg(1), Epoch: uint64(arg(2)), MinEpoch: uint64(arg(3)),
		}}}
	case "goodbye": // node
		return &fsmpb.Command{
			Op: &fsmpb.Command_LeaveNode{
				LeaveNode: &dirpb.LeaveNodeRequest{NodeId: arg(0), Incarnation: node.GetIncarnation()}}}
	case "drain", "undrain":
		return drain(arg(0), f[0] == "undrain")
	case "remove":
		return remove(arg(0), has("force"))
	case "create": // nodes
		return createPG(1, at...)
	case "remake": // pg, nodes
		return &fsmpb.Command{
			Op: &fsmpb.Command_RemakePg{RemakePg: &fsmpb.RemakePG{PgId: arg(0), Epoch: epoch, NodeIds: at[1:]}}}
	case "accept": // how many losses the operator knows of
		return &fsmpb.Command{
			Op: &fsmpb.Command_AcceptLoss{AcceptLoss: &dirpb.AcceptLossRequest{Name: "w", Lost: uint64(arg(0))}}}
	case "open":
		return openIn(1, 0)
	case "close": // session, reclaim epoch, pg, unit, units
		var runs []*dirpb.ReturnedRun
		if len(at) > 2 {
			generation := s.h.pg(arg(2)).GetGeneration()
			if arg(5) != 0 {
				generation = arg(5)
			}
			runs = append(runs, &dirpb.ReturnedRun{PgId: arg(2), Unit: arg(3), Units: arg(4), Generation: generation})
		}
		c := closeS(arg(0), uint64(arg(1)), runs...)
		c.GetCloseSession().Leaked, c.GetCloseSession().Settled = has("leaked"), has("settled")
		return c
	case "expire":
		return expire(arg(0))
	case "confirm": // node, session
		return confirm(arg(0), node.GetIncarnation(), arg(1))
	case "grant": // session, pg, units, minimum reclaim epoch, of a place
		return grant(arg(0), arg(1), arg(2), max(arg(4), 1), uint64(arg(3)))
	}
	s.h.t.Fatalf("command %q", f)
	return nil
}

// changes prints what is not as it was when last called.
func (s *script) changes() string {
	now := make(map[string]string)
	shown := func(pg uint32) bool { return len(s.show) == 0 || slices.Contains(s.show, pg) }
	st := s.h.s
	for _, n := range st.Nodes() {
		line := fmt.Sprintf("%s %d", n.State, n.Incarnation)
		if n.Draining {
			line += " draining"
		}
		if n.Leaving {
			line += " leaving"
		}
		now[fmt.Sprint("node", n.Id)] = line
	}
	for _, w := range st.Map(nil).Namespaces {
		if w.Lost > 0 {
			line := fmt.Sprintf("lost %d:", w.Lost)
			for _, l := range w.Losses {
				line += fmt.Sprintf(" pg%d ×%d %s %d bytes", l.PgId, l.Times, l.Node, l.HeldBytes)
			}
			now[fmt.Sprint("namespace", w.Id)] = line
		}
	}
	for _, pg := range st.PGs(0) {
		if !shown(pg.Id) {
			continue
		}
		name := func(m *dirpb.Member) string {
			if len(m.Keys) == 0 {
				return fmt.Sprint(m.NodeId, "?")
			}
			return fmt.Sprint(m.NodeId)
		}
		var chain []string
		for _, m := range pg.Members {
			chain = append(chain, name(m))
		}
		members := strings.Join(chain, " ")
		if last := len(chain) - 1; pg.Joining {
			members = strings.Join(chain[:last], " ") + "+" + chain[last]
		}
		line := fmt.Sprintf("%s e%d g%d v%d [%s]", strings.TrimPrefix(pg.State.String(), "PG_"), pg.Epoch,
			pg.Generation, pg.ChangedVersion, members)
		if pg.Planned != nil {
			line += " planned " + name(pg.Planned)
		}
		if pg.Leaving != nil {
			line += " leaving " + name(pg.Leaving)
		}
		if v := st.FrozenVersion(pg.Id); v != 0 {
			line += fmt.Sprint(" frozen by v", v)
		}
		if len(pg.Recalled) > 0 {
			line += fmt.Sprint(" recalled ", pg.Recalled)
		}
		for _, a := range pg.StatusArrays {
			line += fmt.Sprintf(" status %d×%d", a.Offset, a.Segments)
		}
		now[fmt.Sprint("pg", pg.Id)] = line
		h := st.Heap(pg.Id)
		line = fmt.Sprintf("[%d %d %d) index to %d", h.Start, h.Watermark, h.End, h.IndexNext)
		for _, r := range h.Free {
			line += fmt.Sprintf(" free %d+%d", r.Unit, r.Units)
			if r.Returned != 0 {
				line += fmt.Sprintf(" at %d", r.Returned-1)
			}
		}
		for _, a := range h.IndexFree {
			line += fmt.Sprintf(" array %d×%d", a.Offset, a.Segments)
			if a.Returned != 0 {
				line += fmt.Sprintf(" at %d", a.Returned-1)
			}
		}
		for _, r := range h.Recalls {
			line += fmt.Sprintf(" recall %d", r.Extent)
			if r.Scanned {
				line += fmt.Sprintf(" scanned at %d", r.Epoch)
			}
		}
		for _, x := range h.Homes {
			line += fmt.Sprintf(" s%d has %d+%d", x.SessionId, x.Unit, x.Units)
		}
		for _, b := range h.StatusHeld {
			line += fmt.Sprintf(" s%d has block %d", b.SessionId, b.Offset)
		}
		for _, b := range h.StatusDead {
			line += fmt.Sprintf(" block %d died at %d", b.Offset, b.Died)
		}
		if h.Settled > 0 {
			line += fmt.Sprint(" settled ", h.Settled)
		}
		if h.Dirty {
			line += " dirty"
		}
		if h.LastScrub != nil {
			line += fmt.Sprint(" linked ", h.LastScrub.LinkedUnits)
		}
		if n, extents := st.Leaks(pg.Id); n > 0 {
			line += fmt.Sprintf(" leaks %d in %v", n, extents)
		}
		now[fmt.Sprint("heap", pg.Id)] = line
	}
	for _, sh := range st.Shards(0) {
		if !shown(sh.PgId) {
			continue
		}
		line := fmt.Sprintf("%d/%d pg%d %d×%d", sh.Prefix, sh.Depth, sh.PgId, sh.Offset, sh.Segments)
		if m := sh.Move; m != nil {
			line += fmt.Sprintf(" to shard%d pg%d %d", m.ChildId, m.PgId, m.Offset)
			if m.Split {
				line += " split"
			}
			if m.Segments != 0 {
				line += fmt.Sprint("×", m.Segments)
			}
			if m.Abandoned {
				line += " abandoned"
			}
		}
		now[fmt.Sprint("shard", sh.Id)] = line
	}
	for _, j := range st.Jobs() {
		if !shown(j.PgId) {
			continue
		}
		line := strings.TrimPrefix(j.Kind.String(), "JOB_") + fmt.Sprint(" pg", j.PgId)
		if j.TargetPgId != 0 {
			line += fmt.Sprint(" to pg", j.TargetPgId)
		}
		if j.ShardId != 0 {
			line += fmt.Sprint(" shard", j.ShardId)
		}
		if j.Kind == dirpb.JobKind_JOB_RECALL {
			line += fmt.Sprint(" extents ", j.Extents)
			if j.InPlace {
				line += " in place"
			}
		}
		if j.Segments != 0 {
			line += fmt.Sprintf(" %d×%d", j.Offset, j.Segments)
		}
		if j.Wipe {
			line += " wipe"
		}
		if j.Barrier != 0 {
			line += fmt.Sprint(" from v", j.Barrier)
		}
		if j.Owner != 0 {
			line += fmt.Sprint(" by s", j.Owner)
		}
		now[fmt.Sprint("job", j.Id)] = line
	}
	for _, x := range st.Sessions() {
		now[fmt.Sprint("session", x.Id)] = strings.TrimPrefix(x.Life.String(), "SESSION_")
	}
	var out strings.Builder
	for _, k := range slices.Sorted(maps.Keys(s.seen)) {
		if _, ok := now[k]; !ok {
			fmt.Fprintf(&out, "- %s\n", k)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(now)) {
		if s.seen[k] != now[k] {
			fmt.Fprintf(&out, "%s %s\n", k, now[k])
		}
	}
	s.seen = now
	return out.String()
}

func activate(pg, epoch uint32) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_ActivatePg{ActivatePg: &fsmpb.ActivatePG{PgId: pg, Epoch: epoch}}}
}

func startJob(j *fsmpb.StartJob) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: j}}
}

func claim(session, job uint32) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{SessionId: session, JobId: job}}}
}

func endJob(e *fsmpb.EndJob) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_EndJob{EndJob: e}}
}

func grantStatus(session, pg, held uint32) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_GrantStatus{GrantStatus: &fsmpb.GrantStatus{SessionId: session, PgId: pg, Held: held}}}
}

func takeStatus(session uint32, number uint64, blocks ...*dirpb.StatusBlock) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_TakeStatus{
			TakeStatus: &fsmpb.TakeStatus{SessionId: session, Number: number, Blocks: blocks}}}
}

func drain(node uint32, cancel bool) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_DrainNode{DrainNode: &fsmpb.DrainNode{NodeId: node, Cancel: cancel}}}
}

func remove(node uint32, force bool) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_RemoveNode{RemoveNode: &fsmpb.RemoveNode{NodeId: node, Force: force}}}
}

func rebalance(namespace uint32, to dirpb.Rebalancing) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_Rebalance{Rebalance: &fsmpb.Rebalance{NamespaceId: namespace, To: to}}}
}

func createPG(namespace uint32, nodes ...uint32) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_CreatePg{CreatePg: &fsmpb.CreatePG{NamespaceId: namespace, NodeIds: nodes}}}
}

// checkStructure returns what of s contradicts itself.
func checkStructure(s *State) error {
	var wrong []error
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	used := make(map[uint32]uint64)
	for _, pg := range s.PGs(0) {
		on := make(map[uint32]bool)
		live := pg.State == dirpb.PGState_PG_ACTIVE || pg.State == dirpb.PGState_PG_FROZEN
		for _, m := range regions(pg) {
			if on[m.NodeId] {
				bad("pg %d has memory node %d twice", pg.Id, m.NodeId)
			}
			on[m.NodeId] = true
			used[m.NodeId] += pg.RegionBytes
			n := s.Node(m.NodeId)
			if n == nil || live && (n.State != up || n.Incarnation != m.Incarnation) {
				bad("pg %v has a region on %v", pg, n)
			}
		}
		copies := len(pg.Members)
		if pg.Joining {
			copies--
		}
		switch {
		case len(pg.Members) > MaxReplicas+1, copies < 1 && pg.State != dirpb.PGState_PG_LOST:
			bad("pg %v has %d members", pg, len(pg.Members))
		case live != (copies > 0 && published(pg.Members)):
			bad("pg %v: its regions are not those of its state", pg)
		case pg.Joining && !live, pg.Planned != nil && (!live || pg.Joining || pg.Leaving != nil), pg.Leaving != nil &&
			pg.State != dirpb.PGState_PG_FROZEN:
			bad("pg %v is not in a state to change", pg)
		case (pg.State == dirpb.PGState_PG_FROZEN) != (s.FrozenVersion(pg.Id) != 0):
			bad("pg %v was frozen by version %d", pg, s.FrozenVersion(pg.Id))
		case pg.Generation > pg.Epoch, pg.Generation == 0, pg.ChangedVersion > s.MapVersion(), pg.ChangedVersion == 0:
			bad("pg %v in map %d", pg, s.MapVersion())
		}

		h := s.Heap(pg.Id)
		pos := h.Start
		for _, r := range h.Free {
			if uint64(r.Unit) < pos || runEnd(r) > h.Watermark || runEnd(r) > extentEnd(uint64(r.Unit)) ||
				recallOf(h, r.Unit/extentUnits) != nil {
				bad("pg %d: free run %v after %d, watermark %d, recalled %v", pg.Id, r, pos, h.Watermark, pg.Recalled)
			}
			pos = runEnd(r)
		}
		if h.Watermark > h.End || recallOf(h, uint32(h.Watermark/extentUnits)) != nil && h.Watermark < h.End {
			bad("pg %d: watermark %d of %d, recalled %v", pg.Id, h.Watermark, h.End, pg.Recalled)
		}
		var recalled, scanning []uint32
		for _, r := range h.Recalls {
			recalled = append(recalled, r.Extent)
			if !r.Scanned {
				scanning = append(scanning, r.Extent)
			}
		}
		if !slices.Equal(recalled, pg.Recalled) || !slices.IsSorted(recalled) {
			bad("pg %d: recalls %v, recalled %v", pg.Id, recalled, pg.Recalled)
		}
		checkHomes(s, pg, bad)
		for i, m := range h.RecallMarks {
			if m.Seq == 0 || m.Seq > h.RecallSeq || i > 0 && h.RecallMarks[i-1].Extent >= m.Extent {
				bad("pg %d: marks %v, %d recalls began", pg.Id, h.RecallMarks, h.RecallSeq)
			}
		}
		for _, r := range h.Recalls {
			if !recalledSince(h, r.Extent, 0) {
				bad("pg %d: recall of extent %d left no mark: %v", pg.Id, r.Extent, h.RecallMarks)
			}
		}
		count := make(map[dirpb.JobKind]int)
		voluntary := 0
		for _, j := range s.JobsOf(pg.Id) {
			count[j.Kind]++
			if !urgent(j.Kind) && j.Kind != dirpb.JobKind_JOB_SETTLE {
				voluntary++
			}
			if j.Kind == dirpb.JobKind_JOB_RECALL {
				scanning = slices.DeleteFunc(scanning, func(e uint32) bool { return slices.Contains(j.Extents, e) })
			}
		}
		join := 0
		if pg.Joining && pg.State == dirpb.PGState_PG_ACTIVE {
			join = 1
		}
		if voluntary > 1 || count[dirpb.JobKind_JOB_SETTLE] > 1 || count[dirpb.JobKind_JOB_SETTLE] > 0 && !live ||
			count[dirpb.JobKind_JOB_JOIN] != join || count[dirpb.JobKind_JOB_RECOVER] > 1 || len(scanning) > 0 ||
			count[dirpb.JobKind_JOB_RECOVER] > 0 && (pg.State != dirpb.PGState_PG_FROZEN || copies < 2) || !live &&
			voluntary > 0 {
			bad("pg %v has jobs %v, nobody scans %v", pg, s.JobsOf(pg.Id), scanning)
		}
		checkIndex(s, pg, bad)
		checkBlocks(s, pg, bad)
	}
	for _, n := range s.Nodes() {
		if n.UsedBytes != used[n.Id] {
			bad("memory node %v: regions take %d", n, used[n.Id])
		}
	}
	for _, j := range s.Jobs() {
		sh := s.Shard(j.ShardId)
		move := j.Kind == dirpb.JobKind_JOB_MOVE
		switch {
		case j.Owner != 0 && s.Session(j.Owner).GetNamespaceId() != j.NamespaceId,
			s.PG(j.PgId).GetNamespaceId() != j.NamespaceId,
			j.Barrier > s.MapVersion(), move != (j.TargetPgId != 0):
			bad("job %v", j)
		case (move || j.Kind == dirpb.JobKind_JOB_ABANDON) &&
			(sh.GetMove() == nil || sh.PgId != j.PgId || sh.Move.Abandoned == move ||
				move && (sh.Move.PgId != j.TargetPgId || s.PG(sh.Move.PgId) == nil)):
			bad("job %v of shard %v", j, sh)
		}
	}
	fencing := make(map[uint32]int) // by namespace
	for _, x := range s.Sessions() {
		w := s.Namespace(x.NamespaceId)
		if w == nil || w.Deleting && x.Life == dirpb.SessionLife_SESSION_LIVE {
			bad("session %v in namespace %v", x, w)
		}
		fencing[x.NamespaceId]++
	}
	for _, pg := range s.PGs(0) {
		if s.Namespace(pg.NamespaceId) == nil || s.Heap(pg.Id) == nil {
			bad("pg %v is of no namespace, or has no heap", pg)
		}
	}
	for _, w := range s.namespaces {
		if w.Deleting && fencing[w.Id] == 0 {
			bad("nothing keeps namespace %v", w)
		}
		shards := s.Shards(w.Id)
		slices.SortFunc(shards, func(a, b *dirpb.Shard) int {
			return int(a.Prefix<<(31-a.Depth)) - int(b.Prefix<<(31-b.Depth))
		})
		next := uint32(0)
		for _, sh := range shards {
			moving := slices.ContainsFunc(s.Jobs(), func(j *dirpb.Job) bool { return j.ShardId == sh.Id })
			if sh.Prefix<<(31-sh.Depth) != next || sh.Depth > MaxShardDepth || s.PG(sh.PgId).GetNamespaceId() != w.Id ||
				moving != (sh.Move != nil) {
				bad("shard %v at %#x", sh, next)
			}
			next += 1 << (31 - sh.Depth)
		}
		if next != 1<<31 {
			bad("the shards of namespace %d end at %#x", w.Id, next)
		}
	}
	return errors.Join(wrong...)
}

// checkHomes checks that the homes of a placement group's memory ascend, are as long as can
// be inside their extents, belong to sessions of its namespace, and are not free.
func checkHomes(s *State, pg *dirpb.PlacementGroup, bad func(string, ...any)) {
	h := s.Heap(pg.Id)
	end, last := h.Start, uint32(0)
	free := h.Free
	for _, x := range h.Homes {
		from, to := uint64(x.Unit), uint64(x.Unit)+uint64(x.Units)
		switch {
		case x.Units == 0 || from < end || to > h.Watermark || to > extentEnd(from):
			bad("pg %d: home %v after %d, watermark %d", pg.Id, x, end, h.Watermark)
		case from == end && last == x.SessionId && from%extentUnits != 0:
			bad("pg %d: home %v is not merged with the one before", pg.Id, x)
		case s.Session(x.SessionId).GetNamespaceId() != pg.NamespaceId:
			bad("pg %d: home %v of no session of its namespace", pg.Id, x)
		}
		for len(free) > 0 && runEnd(free[0]) <= from {
			free = free[1:]
		}
		if len(free) > 0 && uint64(free[0].Unit) < to {
			bad("pg %d: free run %v in home %v", pg.Id, free[0], x)
		}
		end, last = to, x.SessionId
	}
}

// checkIndex checks that the arrays of a placement group's index, in use or free, fill
// what was given out of it without overlap.
func checkIndex(s *State, pg *dirpb.PlacementGroup, bad func(string, ...any)) {
	type array struct{ from, to uint64 }
	var all []array
	add := func(off uint64, segments uint32) {
		all = append(all, array{off, off + uint64(segments)*layout.SegmentSize})
	}
	for _, sh := range s.Shards(0) {
		if sh.PgId == pg.Id {
			add(sh.Offset, sh.Segments)
		}
		if m := sh.Move; m != nil && m.PgId == pg.Id && !m.Abandoned {
			add(m.Offset, sh.ChildSegments())
		}
	}
	for _, a := range s.Heap(pg.Id).IndexFree {
		add(a.Offset, a.Segments)
	}
	for _, a := range pg.StatusArrays {
		add(a.Offset, a.Segments)
	}
	for _, j := range s.Jobs() {
		if j.Kind == dirpb.JobKind_JOB_CLEAN && j.PgId == pg.Id && j.Wipe {
			add(j.Offset, j.Segments)
		}
	}
	slices.SortFunc(all, func(a, b array) int { return int(a.from) - int(b.from) })
	end := uint64(layout.RegionPageSize)
	for _, a := range all {
		if a.from != end && s.Meta().Recoveries == 0 {
			bad("pg %d: array at %d, want one at %d", pg.Id, a.from, end)
		}
		end = a.to
	}
	// A recovery may leave some of the index to nobody.
	if next := s.Heap(pg.Id).IndexNext; end != next && s.Meta().Recoveries == 0 || end > next || next > pg.IndexBytes {
		bad("pg %d: arrays end at %d, the next begins at %d, the index has %d bytes", pg.Id, end, next, pg.IndexBytes)
	}
}

// checkBlocks checks that a placement group's blocks of status words that are not free lie in its status arrays, each
// once, and that a dead one is free no later than it may be.
func checkBlocks(s *State, pg *dirpb.PlacementGroup, bad func(string, ...any)) {
	h := s.Heap(pg.Id)
	seen := make(map[uint64]bool)
	note := func(at uint64) {
		in := slices.ContainsFunc(pg.StatusArrays, func(a *dirpb.StatusArray) bool {
			return a.Offset <= at && at+layout.GroupSize <= a.Offset+uint64(a.Segments)*layout.SegmentSize &&
				(at-a.Offset)%layout.GroupSize == 0
		})
		if !in || seen[at] {
			bad("pg %v: block %d, twice: %v", pg, at, seen[at])
		}
		seen[at] = true
	}
	count := make(map[uint32]int)
	for _, b := range h.StatusHeld {
		note(b.Offset)
		if count[b.SessionId]++; s.Session(b.SessionId).GetNamespaceId() != pg.NamespaceId ||
			count[b.SessionId] > MaxStatusBlocks {
			bad("pg %d: block %v", pg.Id, b)
		}
	}
	for _, b := range h.StatusDead {
		note(b.Offset)
		if settled := s.SettledDeaths(pg.NamespaceId); b.Died <= settled || b.Died > s.Meta().StatusDeaths {
			bad("pg %d: block %v, of %d deaths, %d of them settled", pg.Id, b, s.Meta().StatusDeaths, settled)
		}
	}
	if h.Settled > s.Meta().StatusDeaths {
		bad("pg %d settled %d of %d", pg.Id, h.Settled, s.Meta().StatusDeaths)
	}
}

// A heap's copy has every field of it.
func TestCopyHeap(t *testing.T) {
	h := &fsmpb.Heap{
		PgId: 1, Start: 2, Watermark: 3, End: 4, Free: []*fsmpb.Run{{Unit: 1}}, FrozenVersion: 6, IndexNext: 7,
		IndexFree: []*fsmpb.Array{{Offset: 1}}, Homes: []*fsmpb.Home{{Unit: 1}}, Recalls: []*fsmpb.Recall{{Extent: 1}},
		RecallSeq: 9, RecallMarks: []*fsmpb.RecallMark{{Extent: 1}},
		Dirty: true, LastScrub: &dirpb.JobReport{Groups: 1}, LastScrubUnixMillis: 8,
		StatusHeld: []*fsmpb.HeldStatus{{Offset: 1}}, StatusDead: []*fsmpb.DeadStatus{{Offset: 2}}, Settled: 3,
		Departed:  []*fsmpb.Departed{{NodeId: 1}},
		Recovered: &fsmpb.Recovered{Epoch: 1},
	}
	fields := h.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if !h.ProtoReflect().Has(fields.Get(i)) {
			t.Errorf("the test sets no %s", fields.Get(i).Name())
		}
	}
	if c := copyHeap(h); !proto.Equal(c, h) {
		t.Errorf("copied %v, want %v", c, h)
	}
}
