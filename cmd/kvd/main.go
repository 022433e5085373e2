// Command kvd runs the store's processes: a directory node, a memory node, a
// janitor, or, as kvd dev, all of a store in one process.
//
// It leaves the settings to internal/config and what a role does to its package;
// here they are started, announced and stopped. Read app.go first, then
// directory.go for how a role looks.
//
// A role prints one line on stdout when it serves: `ready` with its addresses. kvd dev prints a few more, for
// people, that say what to type next. Logs go to stderr. SIGTERM and SIGINT stop a role with exit status 0; a
// second one ends the process at once. The two signals differ for a memory node whose memory outlives it
// (keep.go). SIGHUP reloads (reload.go). Exit status 1 is a failure, 2 a mistake in the command line or the
// configuration.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/kvd-project/kvd/internal/keeper"
)

func main() {
	ctx, end := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	once := !keeper.IsWorker() // whose keeper passes on what systemd may have sent to both
	go func() {
		for s := range signals {
			cause := context.Canceled
			if s == os.Interrupt {
				cause = keeper.ErrInterrupted
			}
			end(cause)
			if once {
				signal.Stop(signals) // the next signal has its usual effect
			}
		}
	}()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}
