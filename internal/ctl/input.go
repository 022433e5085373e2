package ctl

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Typed warns, and has the user type a name. Nothing has happened if it is not that one.
func (a *App) Typed(ctx context.Context, name, warning string) error {
	fmt.Fprintf(a.Stderr, "%s Type its name to go on: ", warning)
	sc := bufio.NewScanner(a.quiet(ctx))
	more := sc.Scan()
	if !more || !IsTerminal(a.Stdin) { // which shows the end of the line
		fmt.Fprintln(a.Stderr)
	}
	if !more {
		if err := sc.Err(); err != nil {
			return err
		}
	}
	if got := strings.TrimSpace(sc.Text()); got != name {
		return ExitWith(ExitNo, fmt.Errorf("%q was typed, want %q: nothing was deleted", got, name))
	}
	return nil
}

// Input is stdin for a command that reads it to its end; what says what is expected there.
// An interrupt ends the wait for it. A user at a terminal is told that the command waits, and how to go on.
func (a *App) Input(ctx context.Context, what string) io.Reader {
	if IsTerminal(a.Stdin) && IsTerminal(a.Stderr) {
		a.Say("kvctl %s: reading %s from the terminal; Ctrl-D (^D) on a line of its own ends it, Ctrl-C cancels",
			a.Verb, what)
	}
	return a.quiet(ctx)
}

// quiet is input without a word.
func (a *App) quiet(ctx context.Context) io.Reader {
	f, ok := a.Stdin.(*os.File)
	if !ok {
		return a.Stdin
	}
	// A regular file never lets anybody wait.
	if st, err := f.Stat(); err == nil && (IsTerminal(f) || st.Mode().Type() == fs.ModeNamedPipe) {
		return &waitingInput{f: f, ctx: ctx, terminal: IsTerminal(f)}
	}
	return f
}

// waitingInput reads a terminal or a pipe until ctx ends, so that what is typed next is for
// the shell.
type waitingInput struct {
	f        *os.File
	ctx      context.Context
	terminal bool
}

func (w *waitingInput) Read(p []byte) (int, error) {
	const wait = 50 // ms
	fd := int(w.f.Fd())
	if w.terminal {
		// An interrupt drops what has been typed, perhaps between poll and read: a read must not
		// wait. The terminal is opened once more, since not waiting is for all who share an open file.
		again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|
			unix.O_CLOEXEC, 0)
		if err == nil { // not another user's, as after su: that one may wait
			defer unix.Close(again)
			fd = again
		}
	}
	for w.ctx.Err() == nil {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, wait)
		if n > 0 {
			if n, err = unix.Read(fd, p); n == 0 && err == nil && len(p) > 0 {
				return 0, io.EOF
			} else if err == nil {
				return n, nil
			}
		}
		if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return 0, err
		}
	}
	return 0, context.Cause(w.ctx)
}
