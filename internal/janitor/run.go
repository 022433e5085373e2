package janitor

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// Options configure Run.
type Options struct {
	// Directory lists gRPC addresses of directory nodes. Required.
	Directory []string
	// Devices, Provider and Require are as in client.Options. Devices is required.
	Devices  []*rdma.Device
	Provider string
	Require  string
	// TLS is used towards the directory; nil means plain text.
	TLS *tls.Config
	// Identities is as in client.Options.
	Identities client.Identities
	// Logger receives what an operator may want to know. Default: discard.
	Logger *slog.Logger
	// Poll is the pause between two questions for work while there is some, or if the directory does not
	// let the question wait. Default 100 ms.
	Poll time.Duration
	// Done, if not nil, is called after every job that ended here, with its duration, what it has done so far and its
	// outcome. It may be called concurrently.
	Done func(kind dirpb.JobKind, took time.Duration, report *dirpb.JobReport, err error)
	// Window is how many operations of a job are under way at once. Default 8.
	Window int

	// of all namespaces' jobs, which share processors; nil but in tests
	order *order
	paced func(job *dirpb.Job, operations int, rested time.Duration) // after each batch; nil but in tests
}

// idleSession is how long a session without work is kept.
const idleSession = 2 * time.Second

// Run claims jobs and does them, under one session for each namespace, until ctx ends; then
// it returns nil. Others take up what it leaves undone once its session is fenced.
func Run(ctx context.Context, o Options) error {
	o.Poll = cmp.Or(o.Poll, 100*time.Millisecond)
	o.Window = cmp.Or(o.Window, 8)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	identities, err := identity.ParseMapping(o.Identities.TrustDomain, o.Identities.Units)
	if err != nil {
		return fmt.Errorf("Identities: %w", err)
	}
	dir, err := dirclient.Open(dirclient.Options{Addrs: o.Directory, TLS: o.TLS, Identities: identities,
		Logger: o.Logger, AttemptTimeout: 2 * time.Second})
	if err != nil {
		return err
	}
	defer dir.Close()
	r := &runner{o: o, dir: dir, order: cmp.Or(o.order, &order{}), busy: make(map[string]bool)}
	defer r.wg.Wait()
	for {
		var rep *dirpb.FindWorkReply
		began := time.Now()
		err := dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
			rep, err = dc.FindWork(ctx, &dirpb.FindWorkRequest{WaitMillis: uint64(waitForWork / time.Millisecond)})
			return err
		})
		if err == nil {
			for _, ns := range rep.GetNamespaces() {
				r.serve(ctx, ns)
			}
		} else if ctx.Err() == nil {
			o.Logger.Debug("janitor: no answer from the directory", "err", err)
		}
		pause := o.Poll
		if err == nil && len(rep.GetNamespaces()) == 0 {
			pause -= time.Since(began) // it waited
		}
		if pause <= 0 {
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// waitForWork is how long the directory may let a janitor wait that asks for work.
const waitForWork = time.Second

type runner struct {
	o     Options
	dir   *dirclient.Client
	wg    sync.WaitGroup
	order *order
	mu    sync.Mutex
	busy  map[string]bool // namespaces that a goroutine serves
}

// serve starts a goroutine for a namespace that has none.
func (r *runner) serve(ctx context.Context, namespace string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy[namespace] {
		return
	}
	r.busy[namespace] = true
	r.wg.Go(func() {
		if err := r.work(ctx, namespace); err != nil && ctx.Err() == nil {
			r.o.Logger.Warn("janitor: stopped for now", "namespace", namespace, "err", err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.busy, namespace)
	})
}

// work does a namespace's jobs until there have been none for a while.
func (r *runner) work(ctx context.Context, namespace string) error {
	c, err := client.Open(ctx, client.Options{Directory: r.o.Directory, Namespace: namespace, Provider: r.o.Provider,
		Require: r.o.Require,
		Devices: r.o.Devices, Name: "janitor", Lanes: 1, CacheBytes: 1 << 10, TLS: r.o.TLS, Identities: r.o.Identities,
		Logger: r.o.Logger, OpTimeout: 5 * time.Second, NoEviction: true, Background: true})
	if err != nil {
		return err
	}
	defer c.Close()
	// Several at once: a job on a frozen placement group waits for the one that
	// brings it back.
	var wg sync.WaitGroup
	defer wg.Wait()
	done := make(chan uint32, maxJobs)
	working := make(map[uint32]bool)
	pause := leastPause
	for idle := time.Now(); ctx.Err() == nil && (len(working) > 0 || time.Since(idle) < idleSession); {
		if len(working) < maxJobs {
			job, session, err := r.claim(ctx, c, slices.Collect(maps.Keys(working)))
			if err != nil {
				return err
			}
			if job != nil {
				working[job.GetId()] = true
				wg.Go(func() {
					r.do(ctx, c, session, job)
					done <- job.GetId()
				})
				pause = leastPause
				continue
			}
		}
		select {
		case <-ctx.Done():
		case id := <-done:
			delete(working, id)
			idle, pause = time.Now(), leastPause
		case <-time.After(pause):
			pause = min(2*pause, max(leastPause, r.o.Poll/4))
		}
	}
	return nil
}

// leastPause is how long to wait before asking for work again if there was some: one job
// brings about the next, as a move does its clean-up, and a namespace that grows from little splits its
// shards a hundred times. The pause doubles up to a quarter of Options.Poll.
const leastPause = time.Millisecond

// maxJobs bounds the jobs that one session works on at once.
const maxJobs = 8

func (r *runner) claim(ctx context.Context, c *client.Client, working []uint32) (*dirpb.Job, uint32, error) {
	session, err := inside.Of(c).Session(ctx)
	if err != nil {
		return nil, 0, err
	}
	var rep *dirpb.ClaimJobReply
	err = r.dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
		rep, err = dc.ClaimJob(ctx, &dirpb.ClaimJobRequest{SessionId: session, Working: working})
		return err
	})
	return rep.GetJob(), session, err
}

// ErrGone ends a job that another janitor has by now.
var ErrGone = errors.New("the job is somebody else's by now")

// do performs one job and reports how it went.
func (r *runner) do(ctx context.Context, c *client.Client, session uint32, job *dirpb.Job) {
	log := r.o.Logger.With("job", job.GetId(), "kind", job.GetKind(), "pg", job.GetPgId())
	began := time.Now()
	report := Begin(job)
	tell := func(q *dirpb.ReportJobRequest) error {
		q.SessionId, q.JobId = session, job.GetId()
		var rep *dirpb.ReportJobReply
		err := r.dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
			rep, err = dc.ReportJob(ctx, q)
			return err
		})
		if err == nil && rep.GetGone() {
			err = ErrGone
		}
		return err
	}
	err := r.run(ctx, c, session, job, report, tell)
	if err == nil {
		Finish(report)
		err = tell(&dirpb.ReportJobRequest{Finished: true, Report: report})
	}
	if r.o.Done != nil {
		r.o.Done(job.GetKind(), time.Since(began), report, err)
	}
	switch {
	case err == nil:
		log.Info("janitor: done", "groups", report.GetGroups(), "synced", report.GetSyncedWords(), "repaired",
			report.GetRepairedRecords(),
			"lost", report.GetLostRecords(), "transferred_bytes", report.GetTransferredBytes(), "took",
			time.Since(began).Round(time.Millisecond))
		return
	case errors.Is(err, ErrGone), ctx.Err() != nil:
		log.Info("janitor: given up", "err", err)
		return
	}
	log.Warn("janitor: cannot finish; giving the job back", "err", err)
	if err := tell(&dirpb.ReportJobRequest{Trouble: err.Error()}); err != nil {
		log.Info("janitor: trouble not reported", "err", err)
	}
}

// run performs the operations of a job. Those that fail for want of time or a
// connection are tried again for a while: the view may be changing.
func (r *runner) run(ctx context.Context, c *client.Client, session uint32, job *dirpb.Job, report *dirpb.JobReport,
	tell func(*dirpb.ReportJobRequest) error) error {
	v, err := inside.Of(c).ViewAtLeast(ctx, job.GetBarrier())
	if err != nil {
		return err
	}
	plan, err := NewPlan(v, job)
	if err != nil {
		return err
	}
	defer r.order.begin(job.GetKind())()
	var calm calmness
	begun := time.Now()
	told, stay := time.Now(), false
	progress := func(done int) error {
		if time.Since(told) <= 200*time.Millisecond {
			return nil
		}
		told = time.Now()
		return tell(&dirpb.ReportJobRequest{Done: uint64(done), Total: uint64(plan.Len)})
	}
	const tries = 4
	for lo, hi := 0, 0; lo < plan.Len; lo = hi {
		if plan.outlasts && lo == plan.first {
			if err := outlast(ctx, c, session, func() error { return progress(lo) }); err != nil {
				return err
			}
		}
		r.order.turn(ctx, job.GetKind())
		window, rests := paceOf(job, time.Since(begun), r.o.Window)
		works := make([]*repair.Work, 0, window)
		hi = plan.Batch(lo, window)
		began := time.Now()
		for i := lo; i < hi; i++ {
			w := plan.At(i)
			if stay {
				w.Window = repair.UnitRun{}
			}
			works = append(works, &w)
		}
		for try := 1; len(works) > 0; try++ {
			if err := owns(ctx, c, session); err != nil {
				return err
			}
			var again []*repair.Work
			for i, err := range r.perform(ctx, c, plan.Kind, works) {
				switch {
				case err == nil:
					Add(report, works[i])
				case works[i].Window.Units > 0 && ctx.Err() == nil:
					// The records in the window stay where they are from now on: better some pieces that are free
					// than an extent that nobody may use.
					stay = true
					works[i].Window = repair.UnitRun{}
					again = append(again, works[i])
				case try == tries || ctx.Err() != nil:
					return fmt.Errorf("%v at %#x (group %d): %w", plan.Kind, works[i].Off, works[i].Group, err)
				default:
					again = append(again, works[i])
				}
			}
			works = again
			if job.GetKind() == dirpb.JobKind_JOB_MOVE && len(works) > 0 && try == 1 {
				if err := r.forget(ctx, c, v, job, works, report); err != nil {
					return err
				}
			}
		}
		rested := calm.rest(ctx, time.Since(began), rests)
		if r.o.paced != nil {
			r.o.paced(job, hi-lo, rested)
		}
		if err := progress(lo); err != nil {
			return err
		}
	}
	return nil
}

// forget takes away what the segments of a cache's moves that failed hold of records without a good copy: a cache may
// lose a record at any time, and a move cannot tell where one belongs that it cannot read. In a store such a move waits
// for somebody who says that the record is lost.
func (r *runner) forget(ctx context.Context, c *client.Client, v *engine.View, job *dirpb.Job, works []*repair.Work,
	report *dirpb.JobReport) error {
	if !v.PGs[job.GetPgId()].Cache {
		return nil
	}
	at := slices.IndexFunc(v.Shards, func(s engine.Shard) bool { return s.ID == job.GetShardId() })
	if at < 0 {
		return nil
	}
	var scrubs []*repair.Work
	for _, w := range works {
		off := v.Shards[at].Off + uint64(w.Group/layout.SegmentGroups)*layout.SegmentSize
		if !slices.ContainsFunc(scrubs, func(s *repair.Work) bool { return s.Off == off }) {
			scrubs = append(scrubs, &repair.Work{PG: job.GetPgId(), Off: off, FreeLost: true})
		}
	}
	for i, err := range inside.Of(c).Work(ctx, index.Scrub, scrubs) {
		if err != nil {
			return fmt.Errorf("scrub at %#x: %w", scrubs[i].Off, err)
		}
		report.LostRecords += scrubs[i].Lost
	}
	return nil
}

// owns fails if session, under which a job was claimed, is not the one in force: the claim went with it.
func owns(ctx context.Context, c *client.Client, session uint32) error {
	if id, err := inside.Of(c).Session(ctx); err != nil || id != session {
		return cmp.Or(err, ErrGone)
	}
	return nil
}

// outlast waits until all that anybody has under way now has ended, which takes a reclaim epoch or two. It calls
// progress meanwhile.
func outlast(ctx context.Context, c *client.Client, session uint32, progress func() error) error {
	over, err := inside.Of(c).UnderWay(ctx)
	for err == nil && !over() {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(10 * time.Millisecond):
		}
		err = cmp.Or(owns(ctx, c, session), progress())
	}
	return err
}

// perform does some operations. Those that empty a window have little time: whoever waits
// for it, waits for memory.
func (r *runner) perform(ctx context.Context, c *client.Client, kind index.Kind, works []*repair.Work) []error {
	if works[0].Window.Units > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, windowTime)
		defer cancel()
	}
	return inside.Of(c).Work(ctx, kind, works)
}

// windowTime is how long records of a few groups may take to find another place.
const windowTime = 500 * time.Millisecond
