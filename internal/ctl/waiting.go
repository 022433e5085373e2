package ctl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/patient"
)

// Stuck is how long nothing may happen before a wait for a drain or a rebalance gives up.
const Stuck = time.Minute

// pollEvery is how often a command that waits asks the directory.
const pollEvery = 100 * time.Millisecond

// ErrStalled means that nothing has changed within the time that a wait allows.
var ErrStalled = errors.New("nothing changes any more")

// Progress is how far something has come.
type Progress struct {
	Done, Total uint64
	// Left says what is still missing. Without a terminal it is printed whenever it
	// changes, so it holds nothing that changes all the time; detail may.
	Left, Detail string
}

// Await asks the directory until step says that it is done or fails. Silence of
// the directory is borne for patient.Patience. stall is how long nothing
// may change before it ends with ErrStalled; 0: for ever.
func (a *App) Await(ctx context.Context, b Backend, what string, stall time.Duration,
	step func(*dirpb.StatusReply) (p Progress, done bool, err error)) error {
	bar := a.Bar(what, "", func() int64 { return 1 })
	defer bar.End()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	said, seen := "", ""
	answered, changed := time.Now(), time.Now()
	var applied uint64
	for {
		st, err := ClusterStatus(ctx, b)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, dirclient.ErrUnavailable) && time.Since(answered) < patient.Patience:
		case err != nil:
			return err
		case st.GetRaftApplied() < applied: // another directory node, which is behind
		default:
			answered, applied = time.Now(), st.GetRaftApplied()
			p, done, err := step(st)
			if done || err != nil {
				return err
			}
			if bar != nil {
				// It ends when step says so.
				bar.set(strings.TrimSpace(what+": "+p.Left+" "+p.Detail), int64(p.Done), int64(max(p.Total, p.Done)+1))
			} else if p.Left != said {
				said = p.Left
				a.Say("kvctl %s: %s", what, p.Left)
			}
			if now := Activity(st); now != seen {
				seen, changed = now, time.Now()
			} else if stall > 0 && time.Since(changed) >= stall {
				return ErrStalled
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// Activity differs between two states when anything but sessions has got on.
func Activity(st *dirpb.StatusReply) string {
	var b strings.Builder
	fmt.Fprint(&b, st.GetMap().GetVersion())
	for _, j := range st.GetJobs() {
		fmt.Fprint(&b, " ", j.GetId(), ":", j.GetOwner(), ":", j.GetDone())
	}
	for _, u := range st.GetUsage() {
		fmt.Fprint(&b, " ", u.GetPgId(), ":", u.GetLastScrubUnixMillis(), ":", u.GetLeakedExtents())
	}
	return b.String()
}

// Waited is the error of a wait for something that goes on without kvctl.
func Waited(err error) error {
	if err == nil || errors.As(err, new(*ExitError)) {
		return err
	}
	return ExitWith(ExitCode(err), fmt.Errorf("while waiting for it, it goes on by itself: %w", err))
}

// Call makes a request that changes something; one that may happen twice is made again if nobody knows whether it did.
func Call[T any](ctx context.Context, b Backend, twice bool, fn func(context.Context, dirpb.DirectoryClient) (
	T, error)) (rep T, err error) {
	err = b.Directory(ctx, twice, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = fn(ctx, d)
		return err
	})
	return rep, err
}

// Pause waits for d; false means that ctx has ended, which is how a command that
// watches something ends.
func Pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
