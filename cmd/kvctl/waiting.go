package main

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

// pollEvery is how often a command that waits asks the directory.
const pollEvery = 100 * time.Millisecond

// errStalled means that nothing has changed for as long as a wait allows.
var errStalled = errors.New("nothing changes any more")

// progress is how far something has come.
type progress struct {
	done, total uint64
	// left says what is still missing. Without a terminal it is printed whenever it
	// changes, so it holds nothing that changes all the time; detail may.
	left, detail string
}

// await asks the directory until step says that it is done or fails. Silence of
// the directory is borne for as long as patient.Patience lasts. stall is how long nothing
// may change before it ends with errStalled; 0: for ever.
func (a *app) await(ctx context.Context, b backend, what string, stall time.Duration,
	step func(*dirpb.StatusReply) (p progress, done bool, err error)) error {
	bar := a.bar(what, "", func() int64 { return 1 })
	defer bar.end()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	said, seen := "", ""
	answered, changed := time.Now(), time.Now()
	var applied uint64
	for {
		st, err := clusterStatus(ctx, b)
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
				bar.set(strings.TrimSpace(what+": "+p.left+" "+p.detail), int64(p.done), int64(max(p.total, p.done)+1))
			} else if p.left != said {
				said = p.left
				a.say("kvctl %s: %s", what, p.left)
			}
			if now := activity(st); now != seen {
				seen, changed = now, time.Now()
			} else if stall > 0 && time.Since(changed) >= stall {
				return errStalled
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// activity differs between two states when anything but sessions has got on.
func activity(st *dirpb.StatusReply) string {
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

// waited is the error of a wait for something that goes on without kvctl.
func waited(err error) error {
	if err == nil || errors.As(err, new(*exitError)) {
		return err
	}
	return exitWith(exitCode(err), fmt.Errorf("while waiting for it, it goes on by itself: %w", err))
}

// call makes a request that changes something; one that may happen twice is made again if nobody knows whether it did.
func call[T any](ctx context.Context, b backend, twice bool, fn func(context.Context, dirpb.DirectoryClient) (
	T, error)) (rep T, err error) {
	err = b.Directory(ctx, twice, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = fn(ctx, d)
		return err
	})
	return rep, err
}
