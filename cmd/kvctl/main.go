// Command kvctl is the operator's and the script's way to the store. It moves keys in and out, and whole file
// trees. It shows the cluster's state, what operations cost, and what the bytes in remote memory are.
//
// It leaves the data path to package client, and membership to the directory. It leaves the meaning of remote
// bytes to internal/layout, and generating load to internal/ycsb. Read app.go first: flags, the tree of commands and
// how a process ends. Then read internal/ctl for how a command reaches the store and prints, and shell.go for many
// commands in one process. Commands have packages below internal/ctl, by groups.
//
// A process runs a single command, or, as a shell, one after the other. Nothing here is called concurrently
// except the workers of import, export and bench, which share a client. Data goes to stdout and nothing else
// does; progress and errors go to stderr.
package main

import (
	"context"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"
)

func main() {
	a := newProgram(os.Stdin, os.Stdout, os.Stderr)
	a.signals = func(ctx context.Context, brief bool) context.Context {
		if !brief {
			return endsWith(ctx, os.Interrupt, syscall.SIGTERM)
		}
		// Otherwise a get spends a fifth of its time on waking other processors, and on threads that
		// listen for signals.
		runtime.GOMAXPROCS(1)
		ctx, cancel := context.WithCancel(ctx)
		time.AfterFunc(briefly, func() { context.AfterFunc(endsWith(ctx, os.Interrupt, syscall.SIGTERM), cancel) })
		return ctx
	}
	os.Exit(a.run(context.Background(), os.Args[1:]))
}

// briefly is how long a command that only reads a key leaves signals to the system, which then ends it as
// it ends a process that has just begun.
const briefly = 100 * time.Millisecond

// endsWith is ctx that also ends with a signal. A second one ends the process at once.
func endsWith(ctx context.Context, s ...os.Signal) context.Context {
	ctx, stop := signal.NotifyContext(ctx, s...)
	context.AfterFunc(ctx, stop)
	return ctx
}
