package inside

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/check"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

func (a *commands) checkCommand() *cobra.Command {
	var noRepair, free bool
	var patient time.Duration
	c := &cobra.Command{
		Use:   "check",
		Short: "Repair the namespace's memory, read all of it and check it",
		Long: "Wait until every placement group of the namespace has all of its copies. Have\n" +
			"janitors scrub it, which repairs copies that differ and recalls memory that sessions\n" +
			"left behind. Then read every replica, and check:\n\n" +
			"  all replicas hold the same words and records\n" +
			"  headers, words and records are good and belong where they are\n" +
			"  no key is there twice, and no two records overlap\n" +
			"  all memory that was granted is linked\n\n" +
			"The store may be in use: what changes while it is looked at is read again, and\n" +
			"counted as busy if it does not rest. Memory that other sessions hold is counted\n" +
			"apart. With --no-repair nothing is changed and nothing waited for but the copies.\n" +
			"With --repair records without a good copy are freed, too. get calls their keys\n" +
			"corrupt; afterwards they are gone.\n" +
			"Exit status 1 if something is wrong.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if patient <= 0 {
				return ctl.Usagef("--for %v: want > 0", patient)
			}
			if noRepair && free {
				return ctl.Usagef("--repair and --no-repair: want one of them")
			}
			return a.check(cmd.Context(), !noRepair, free, patient)
		},
	}
	c.Flags().BoolVar(&noRepair, "no-repair", false, "only report: no scrub, no recall")
	c.Flags().BoolVar(&free, "repair", false, "also free records without a good copy")
	c.Flags().DurationVar(&patient, "for", 30*time.Second, "how long to go on waiting while nothing changes")
	return c
}

// CheckReport is what was found, and what janitors did before.
type CheckReport struct {
	OK bool `json:"ok"`
	*check.Report

	Scrubbed        int    `json:"scrubbed"` // placement groups
	SyncedWords     uint64 `json:"synced_words"`
	RepairedRecords uint64 `json:"repaired_records"`
	BrokenLocks     uint64 `json:"broken_locks"`
	Recalls         int    `json:"recalled_extents"`
	// Lost had no good copy left. Freed are those of them that are gone now.
	Lost  uint64 `json:"lost_records"`
	Freed uint64 `json:"freed_records"`
}

// differenceRest is how long a difference between copies must stand to be one.
const differenceRest = 300 * time.Millisecond

func (a *commands) check(ctx context.Context, repair, free bool, patient time.Duration) error {
	return a.inside(ctx, func(b ctl.Backend, s ctl.Store, st *dirpb.StatusReply, ns *dirpb.Namespace) error {
		rep, err := a.examine(ctx, b, s, st, ns, repair, free, patient)
		if err != nil {
			return err
		}
		if err := a.printCheck(rep); err != nil {
			return err
		}
		if !rep.OK {
			return ctl.Fail(ctl.ExitNo)
		}
		return nil
	})
}

// examine repairs the namespace, if it is to, frees what is lost, if it is to, and checks it.
func (a *commands) examine(ctx context.Context, b ctl.Backend, s ctl.Store, st *dirpb.StatusReply, ns *dirpb.Namespace,
	repair, free bool, patient time.Duration) (*CheckReport, error) {
	rep := &CheckReport{Report: check.NewReport()}
	if err := a.awaitWhole(ctx, b, ns, patient); err != nil && !errors.Is(err, ctl.ErrStalled) {
		return nil, err
	}
	var freed []string // problems with what was freed
	for round := 1; ; round++ {
		if repair {
			if err := a.scrub(ctx, b, ns, patient, rep); err != nil {
				return nil, err
			}
		}
		if free && round == 1 {
			n := len(rep.Problems)
			if err := a.freeLost(ctx, b, st, ns, rep); err != nil {
				return nil, err
			}
			freed = rep.Problems[n:]
		}
		bar := a.Bar("check", "", func() int64 { return check.Segments(st.GetMap(), ns.GetId()) })
		err := check.Run(ctx, rep.Report, check.Options{Store: raw{b, s}, Namespace: ns, Session: s.Stats().Session,
			NowMillis: uint64(a.Now().UnixMilli()), Rest: differenceRest, Key: a.ShowKey, Progress: bar.Step})
		bar.End()
		// Janitors work on after a scrub, and what they leave behind is not counted then. The next one recalls it.
		if err != nil || !repair || rep.Unreachable == 0 || round == scrubRounds {
			rep.OK = rep.Good() && rep.Lost == 0 && rep.Freed == 0
			return rep, err
		}
		a.Say("kvctl check: %s became nobody's since the scrub: checking again", units.Rounded(rep.Unreachable))
		rep.Report = check.NewReport()
		rep.Problems = append(rep.Problems, freed...)
	}
}

// awaitWhole waits until every placement group of ns has all of its copies, and what
// sessions held that are being fenced is nobody's. Copies that are still missing when nothing changes any
// more are reported later.
func (a *commands) awaitWhole(ctx context.Context, b ctl.Backend, ns *dirpb.Namespace, patient time.Duration) error {
	return a.Await(ctx, b, "check", patient, func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
		pgs := overview.Groups(st.GetMap(), ns.GetId())
		var missing []string
		for _, p := range pgs {
			if lacks := overview.Lacks(st.GetMap(), p); lacks != "" {
				missing = append(missing, fmt.Sprintf("placement group %d: %s", p.GetId(), lacks))
			}
		}
		done := len(pgs) - len(missing)
		fencing := 0
		for _, s := range st.GetSessions() {
			if s.GetNamespace() == ns.GetName() && s.GetLife() == dirpb.SessionLife_SESSION_FENCING {
				fencing++
			}
		}
		if fencing > 0 {
			missing = append(missing, fmt.Sprintf("%d sessions to be fenced", fencing))
		}
		return ctl.Progress{Done: uint64(done), Total: uint64(len(pgs)),
			Left: "waiting for " + strings.Join(missing, ", "), Detail: ctl.JobsText(st)}, len(missing) == 0, nil
	})
}

// scrubRounds bounds how often the namespace is scrubbed. A recall moves records
// and so changes what a scrub counts; the second scrub, or the third, has nothing
// to recall unless the store is in use.
const scrubRounds = 3

// scrubbing is one placement group's scrub.
type scrubbing struct {
	job    uint32 // 0: not started
	before int64  // time of the last scrub that was not ours
	ended  bool   // it reported, and its recalls are awaited
	done   bool
	why    string // it could not be started
	vain   int    // how often it ended without a report
	// recalled is when a recall that followed it was seen last.
	recalled time.Time
}

// recallPause is longer than from the end of one recall to the begin of the next that
// follows the same scrub.
const recallPause = 2 * time.Second

// scrub has janitors scrub every placement group that can be, and waits until they
// and the recalls that they cause are done.
func (a *commands) scrub(ctx context.Context, b ctl.Backend, ns *dirpb.Namespace, patient time.Duration,
	rep *CheckReport) error {
	for round := 1; ; round++ {
		lost := rep.Lost
		rep.Lost = 0
		recalls := make(map[uint32]bool)
		groups := make(map[uint32]*scrubbing)
		stalled := a.Await(ctx, b, "check", patient, func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
			return a.scrubStep(ctx, b, ns, st, groups, recalls, rep)
		})
		if stalled != nil && !errors.Is(stalled, ctl.ErrStalled) {
			return stalled
		}
		done := 0
		var last *dirpb.StatusReply
		if stalled != nil {
			last = a.lastStatus(ctx, b)
		}
		for _, id := range slices.Sorted(maps.Keys(groups)) {
			switch g := groups[id]; {
			case g.done && g.ended:
				done++
			case g.done: // nothing is left of it
			case g.ended: // what leaks is counted with the rest
				for _, j := range last.GetJobs() {
					if j.GetPgId() == id && j.GetKind() == dirpb.JobKind_JOB_RECALL {
						rep.Problem(id, "recall of extent %s did not end: %s", overview.ExtentsText(j),
							unfinished(j.GetId(), last))
					}
				}
			case g.job != 0:
				rep.Problem(id, "scrub did not end: %s", unfinished(g.job, last))
			case g.why != "":
				rep.Problem(id, "not scrubbed: %s", g.why)
			}
		}
		rep.Scrubbed, rep.Lost = max(rep.Scrubbed, done), max(rep.Lost, lost)
		rep.Recalls += len(recalls)
		if stalled != nil || len(recalls) == 0 || round == scrubRounds {
			return a.dismiss(ctx, b, ns)
		}
	}
}

// janitorName is what janitors call their sessions.
const janitorName = "janitor"

// dismiss gives janitors a few seconds to close their sessions: what they were granted
// can be told from what leaked only when they have.
func (a *commands) dismiss(ctx context.Context, b ctl.Backend, ns *dirpb.Namespace) error {
	late := errors.New("janitors have more to do")
	ctx, cancel := context.WithTimeoutCause(ctx, 5*time.Second, late)
	defer cancel()
	err := a.Await(ctx, b, "check", 0, func(st *dirpb.StatusReply) (ctl.Progress, bool, error) {
		n := 0
		for _, s := range st.GetSessions() {
			if s.GetNamespace() == ns.GetName() && s.GetClient() == janitorName {
				n++
			}
		}
		return ctl.Progress{Left: "waiting for janitors to leave"}, n == 0, nil
	})
	if errors.Is(err, late) {
		return nil
	}
	return err
}

// lastStatus is the state as far as the directory tells it.
func (a *commands) lastStatus(ctx context.Context, b ctl.Backend) *dirpb.StatusReply {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return &dirpb.StatusReply{}
	}
	return st
}

// unfinished says why a job is not done.
func unfinished(id uint32, st *dirpb.StatusReply) string {
	for _, j := range st.GetJobs() {
		switch {
		case j.GetId() != id:
		case j.GetTrouble() != "":
			return j.GetTrouble()
		case j.GetWaiting():
			return "it waits until every session has heard of it"
		case j.GetOwner() == 0:
			return "no janitor takes it"
		default:
			return fmt.Sprintf("session %d is at %d of %d", j.GetOwner(), j.GetDone(), j.GetTotal())
		}
	}
	return "it is gone"
}

// scrubStep starts what can be started and looks how far the rest is.
func (a *commands) scrubStep(ctx context.Context, b ctl.Backend, ns *dirpb.Namespace, st *dirpb.StatusReply,
	groups map[uint32]*scrubbing, recalls map[uint32]bool, rep *CheckReport) (p ctl.Progress, done bool, err error) {
	jobs := make(map[uint32]*dirpb.Job)   // by id
	busy := make(map[uint32][]*dirpb.Job) // by placement group
	for _, j := range st.GetJobs() {
		jobs[j.GetId()] = j
		busy[j.GetPgId()] = append(busy[j.GetPgId()], j)
		if t := j.GetTargetPgId(); t != 0 && t != j.GetPgId() {
			busy[t] = append(busy[t], j)
		}
		if j.GetKind() == dirpb.JobKind_JOB_RECALL && j.GetNamespaceId() == ns.GetId() {
			recalls[j.GetId()] = true
		}
	}
	usage := make(map[uint32]*dirpb.PGUsage)
	for _, u := range st.GetUsage() {
		usage[u.GetPgId()] = u
	}
	finished, leaking := 0, 0
	pgs := overview.Groups(st.GetMap(), ns.GetId())
	for _, pg := range pgs {
		id, u := pg.GetId(), usage[pg.GetId()]
		g := groups[id]
		if g == nil {
			g = &scrubbing{}
			groups[id] = g
		}
		if g.job != 0 && !g.ended && jobs[g.job] == nil {
			if u.GetLastScrubUnixMillis() == g.before {
				// Its placement group began anew, and that is not scrubbed yet.
				*g = scrubbing{vain: g.vain + 1, why: "scrubs end without a report"}
			} else {
				g.ended = true
				r := u.GetLastScrub()
				rep.SyncedWords += r.GetSyncedWords()
				rep.RepairedRecords += r.GetRepairedRecords()
				rep.BrokenLocks += r.GetBrokenLocks()
				rep.Lost += r.GetLostRecords()
			}
		}
		if g.job == 0 && !g.done {
			switch {
			case g.vain == scrubRounds:
			case pg.GetState() != dirpb.PGState_PG_ACTIVE:
				g.done = pg.GetState() == dirpb.PGState_PG_LOST
				g.why = overview.StateText(st.GetMap(), pg)
			case len(busy[id]) > 0:
				g.why = ctl.JobName(busy[id][0]) + " is in the way"
			case pg.GetJoining():
				g.why = overview.StateText(st.GetMap(), pg)
			default:
				if err := a.startScrub(ctx, b, id, u, g); err != nil {
					return p, false, err
				}
			}
		}
		leaking += len(pg.GetRecalled())
		switch {
		case g.done || !g.ended:
		case len(busy[id]) > 0 || len(pg.GetRecalled()) > 0:
			g.recalled = time.Now()
		default:
			// A recall that moves records makes what the scrub counted old. The next scrub tells if anything leaks
			// then.
			g.done = u.GetLeakedExtents() == 0 || !g.recalled.IsZero() && time.Since(g.recalled) >= recallPause
		}
		if g.done {
			finished++
		}
		if j := jobs[g.job]; j != nil {
			p.Detail = ctl.JobsText(st)
		}
	}
	p.Done, p.Total = uint64(finished), uint64(len(pgs))
	p.Left = fmt.Sprintf("scrubbed %d of %d placement groups%s", finished, len(pgs), ctl.Troubles(st))
	if leaking > 0 {
		p.Left += fmt.Sprintf(", %d extents are being recalled", leaking)
	}
	return p, finished == len(pgs), nil
}

// startScrub asks for a scrub. A refusal is kept, and it is asked for again.
func (a *commands) startScrub(ctx context.Context, b ctl.Backend, pg uint32, u *dirpb.PGUsage, g *scrubbing) error {
	rep, err := ctl.Call(ctx, b, false, func(ctx context.Context, d dirpb.DirectoryClient) (*dirpb.StartJobReply,
		error) {
		return d.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_SCRUB, Namespace: a.Namespace, PgId: pg,
			Repair: true})
	})
	switch status.Code(err) {
	case codes.FailedPrecondition, codes.Unavailable, codes.Aborted, codes.AlreadyExists:
		g.why = err.Error()
		return nil
	}
	if err != nil {
		return fmt.Errorf("scrub of placement group %d: %w", pg, err)
	}
	if len(rep.GetJobIds()) != 1 {
		return fmt.Errorf("scrub of placement group %d: the directory started %d jobs, want 1", pg,
			len(rep.GetJobIds()))
	}
	g.job, g.before = rep.GetJobIds()[0], u.GetLastScrubUnixMillis()
	return nil
}

func (a *commands) printCheck(r *CheckReport) error {
	if a.JSON() {
		return a.PrintJSON(r)
	}
	verdict := "ok"
	if !r.OK {
		verdict = fmt.Sprintf("NOT OK, %d findings", r.Total+uint64(len(r.Problems)))
	}
	held := "bytes on their way back"
	if r.Holders > 0 {
		held = fmt.Sprintf("bytes held by %d sessions", r.Holders)
	}
	a.PrintTable(ctl.Row{"Checked", ""}, []ctl.Row{
		{"placement groups", r.PGs}, {"replicas", r.Replicas}, {"groups", r.Groups}, {"  with overflow", r.Overflow},
		{"  insert lock held", r.Locks}, {"slots live", r.Live}, {"  frozen", r.Frozen},
		{"    by transactions", r.Intents}, {"  moved", r.Moved}, {"  empty", r.Empty},
		{"  never used", r.Unused}, {"keys in a stash", r.Stashed}, {"expired", r.Expired},
		{"chunks of long values", r.Chunks},
		{"records", r.Records}, {"bytes of records", r.Bytes}, {held, r.Held}, {"busy, not checked", r.Busy},
	})
	fmt.Fprintln(a.Stdout)
	a.PrintTable(ctl.Row{"Repaired", ""}, []ctl.Row{
		{"placement groups scrubbed", r.Scrubbed}, {"words that differed", r.SyncedWords},
		{"records that differed", r.RepairedRecords},
		{"locks of sessions that are gone", r.BrokenLocks}, {"extents recalled", r.Recalls},
	})
	fmt.Fprintln(a.Stdout)
	a.PrintTable(ctl.Row{"Wrong", ""}, []ctl.Row{
		{"unreachable bytes", r.Unreachable}, {"leaked extents", r.LeakedExtents},
		{"replicas that differ", r.Differing},
		{"  words", r.DifferingWords}, {"  records", r.DifferingRecords}, {"corrupt records", r.Corrupt},
		{"records lost, no good copy", r.Lost}, {"  freed", r.Freed}, {"result", verdict},
	})
	if len(r.Problems) > 0 {
		fmt.Fprintln(a.Stdout)
		for _, p := range r.Problems {
			fmt.Fprintln(a.Stdout, ctl.Visible(p))
		}
	}
	if len(r.Findings) > 0 {
		fmt.Fprintln(a.Stdout)
		a.PrintTable(ctl.Row{"PG", "Replica", "Offset", "Slot", "What"}, ctl.MapTo(r.Findings,
			func(f check.Finding) ctl.Row {
				return ctl.Row{f.PG, f.Replica, fmt.Sprintf("%#x", f.Off), f.Slot, f.What}
			}))
	}
	return nil
}
