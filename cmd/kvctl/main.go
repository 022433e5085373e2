// Command kvctl is the operator's and the script's way to the store: keys in and
// out, whole file trees, the cluster's state, what operations cost, and what the
// bytes in remote memory are.
//
// It leaves the data path to package client, membership to the directory, the
// meaning of remote bytes to internal/layout, and generating load to
// internal/ycsb. Read app.go first (flags, output, exit status), then store.go
// for how a command reaches the store, then shell.go for many of them in one
// process; every other file is one group of commands.
//
// One command runs in one process, or one after the other in a shell; nothing here
// is called concurrently except the workers of import, export and bench, which share
// a client. Data goes to stdout and nothing else does; progress and errors go to
// stderr.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	// Interrupts end a command, or what runs in a shell; see app.root.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	a := newApp(os.Stdin, os.Stdout, os.Stderr)
	code := a.run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}
