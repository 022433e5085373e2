package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/peterh/liner"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/testutil"
)

func TestWords(t *testing.T) {
	for line, want := range map[string][]string{
		"":                         nil,
		" \t ":                     nil,
		`get a`:                    {"get", "a"},
		`  put  "a b"	'c d' `:      {"put", "a b", "c d"},
		`"\x00\xfF\n\r\t\b\a\"\\"`: {"\x00\xff\n\r\t\b\a\"\\"},
		`"\xg0\q"`:                 {"xg0q"},
		`"\x4"`:                    {"x4"},
		`'\x00\n' '\''`:            {`\x00\n`, "'"},
		`a\x00 b"c d"`:             {`a\x00`, "bc d"},
		`""  ''`:                   {"", ""},
		`ключ "ключ"`:              {"ключ", "ключ"},
	} {
		if got, err := words(line); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q %v, want %q", line, got, err, want)
		}
	}
	for _, line := range []string{`"`, `'`, `a "b`, `"a"b`, `'a''b'`, `"a\"`, `"\`} {
		if got, err := words(line); err == nil {
			t.Errorf("%s: %q, want an error", line, got)
		}
	}
}

func TestQuoteWord(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		args := rapid.SliceOf(rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string {
			return string(b)
		})).Draw(t, "args")
		quoted := make([]string, len(args))
		for i, a := range args {
			quoted[i] = quoteWord(a)
		}
		line := strings.Join(quoted, " ")
		if got, err := words(line); err != nil || !slices.Equal(got, args) {
			t.Errorf("%s: %q %v, want %q", line, got, err, args)
		}
	})
}

// terminal is a shell as a user sees it.
type terminal struct {
	t    *testing.T
	tty  *os.File
	cmd  *exec.Cmd
	mu   sync.Mutex
	seen strings.Builder
	news chan struct{} // there is more; capacity 1
	at   int           // how much of it has been expected
}

func (e *env) terminal(state string, args ...string) *terminal {
	e.t.Helper()
	cmd := exec.Command(os.Args[0], append(slices.Clone(e.flags), args...)...)
	cmd.Env = append(os.Environ(), asMain+"=1", "XDG_STATE_HOME="+state, "TERM=xterm", "COLUMNS=100")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 40, Cols: 100})
	if err != nil {
		if os.Getenv("CI") != "" {
			e.t.Fatalf("no pseudo-terminal: %v", err)
		}
		e.t.Skipf("no pseudo-terminal: %v", err)
	}
	x := &terminal{t: e.t, tty: tty, cmd: cmd, news: make(chan struct{}, 1)}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 4096)
		for {
			n, err := tty.Read(b)
			x.mu.Lock()
			x.seen.Write(b[:n])
			x.mu.Unlock()
			select {
			case x.news <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	})
	e.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = tty.Close()
		wg.Wait()
	})
	return x
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.seen.String()
}

// expect waits until the terminal shows s behind what was expected before.
func (x *terminal) expect(s string) {
	x.t.Helper()
	if !x.shows(s, 20*time.Second) {
		x.t.Fatalf("no %q in %q", s, x.text()[x.at:])
	}
}

// shows is expect for so long, and reports whether it came.
func (x *terminal) shows(s string, limit time.Duration) bool {
	over := time.After(limit)
	for {
		if i := strings.Index(x.text()[x.at:], s); i >= 0 {
			x.at += i + len(s)
			return true
		}
		select {
		case <-x.news:
		case <-over:
			return false
		}
	}
}

func (x *terminal) types(keys string) {
	x.t.Helper()
	if _, err := io.WriteString(x.tty, keys); err != nil {
		x.t.Fatal(err)
	}
}

// completes types tabs until the terminal shows s: a completion gives up after a moment, which on a busy machine may be
// too short.
func (x *terminal) completes(s string) {
	x.t.Helper()
	for end := time.Now().Add(testutil.Limit); ; {
		x.types("\t")
		if x.shows(s, 2*time.Second) {
			return
		}
		if time.Now().After(end) {
			x.t.Fatalf("not completed to %q: %q", s, x.text()[x.at:])
		}
	}
}

// taken waits until no signal of this number waits for the process.
func (x *terminal) taken(s syscall.Signal) {
	x.t.Helper()
	testutil.Until(x.t, fmt.Sprintf("signal %v is taken", s), func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", x.cmd.Process.Pid))
		if err != nil {
			x.t.Fatal(err)
		}
		_, mask, _ := strings.Cut(string(b), "\nShdPnd:\t")
		mask, _, _ = strings.Cut(mask, "\n")
		pending, err := strconv.ParseUint(mask, 16, 64)
		if err != nil {
			x.t.Fatal(err)
		}
		return pending&(1<<(s-1)) == 0
	})
}

// cooked waits until a command has the terminal: what is typed before is for the
// shell.
func (x *terminal) cooked() {
	x.t.Helper()
	testutil.UntilNone(x.t, "a command has the terminal", func() string {
		m, err := unix.IoctlGetTermios(int(x.tty.Fd()), unix.TCGETS)
		if err != nil {
			x.t.Fatal(err)
		}
		if m.Lflag&unix.ICANON != 0 {
			return ""
		}
		return fmt.Sprintf("the shell has it: %q", x.text())
	})
}

// ends waits until the shell has ended, and wants status 0.
func (x *terminal) ends() {
	x.t.Helper()
	done := make(chan error, 1)
	go func() { done <- x.cmd.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			x.t.Fatalf("%v: %s", err, x.text())
		}
	case <-time.After(testutil.Limit):
		_ = x.cmd.Process.Kill()
		<-done
		x.t.Fatalf("does not end: %q", x.text())
	}
}

func TestShellOnTerminal(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	e.must("", "put", "greeting:long one", "hello")
	e.must("", "namespace", "create", "other", "--bytes", "1MiB")
	state := t.TempDir()
	x := e.terminal(state)
	x.expect("default> ")

	// Commands, flags and keys are completed.
	x.types("bigk\t")
	x.expect("bigkeys ")
	x.types("--to\t")
	x.expect("--top")
	x.types("\x15") // Ctrl-U
	x.types("get greet")
	x.completes(`get "greeting:long one" `)
	x.types("\r")
	x.expect("\r\nhello\r\n")
	x.expect("default> ")

	// An error does not end it; history goes back to what was typed.
	x.types("get nothing\r")
	x.expect("kvctl get: \"nothing\": not found\r\n")
	x.expect("default> ")
	x.types("\x10\x10") // Ctrl-P: an arrow is three bytes, which have to come together
	x.expect(`get "greeting:long one" `)
	x.types("\r")
	x.expect("\r\nhello\r\n")

	// A value is typed in, with the terminal as it was before.
	x.expect("default> ")
	x.types("put typed\r")
	x.expect("put typed\r\n")
	x.cooked()
	x.types("one\rtwo\r\x04")
	x.expect("version ")
	x.expect("default> ")
	if got := e.must("", "get", "typed"); got != "one\ntwo\n" {
		t.Errorf("typed %q", got)
	}

	x.types("put dropped\r")
	x.expect("put dropped\r\n")
	x.cooked()
	x.types("one\r\x03")
	x.expect("kvctl put: read value from stdin: ")
	x.expect("(it did not happen)")
	x.expect("default> ")

	// Ctrl-C drops a line, and ends what runs but not the shell.
	x.types("get some\x03")
	x.expect("default> ")
	x.types("latency --history --interval 20ms\r")
	x.expect("Missing")
	x.expect("µs")
	x.types("\x03")
	x.expect("default> ")
	x.types("bench --duration 10m --records 100\r")
	x.expect("run")
	x.types("\x03")
	x.expect("kvctl bench: ")
	x.expect("default> ")

	x.types("use oth")
	x.completes("use other ")
	x.types("\r")
	x.expect("other> ")
	x.types(`put "a\x00" 1` + "\r")
	x.expect("version ")
	x.expect("other> ")
	if got := e.must("", "--namespace", "other", "get", "a\x00"); got != "1" {
		t.Errorf("value %q", got)
	}
	x.types("\x04") // Ctrl-D
	x.ends()

	// The history outlives it, for this user alone.
	file := filepath.Join(state, "kvctl", "history")
	st, err := os.Stat(file)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", st, err)
	}
	y := e.terminal(state, "shell")
	y.expect("default> ")
	y.types("\x10")
	y.expect(`put "a\x00" 1`)
	y.types("\x15exit\r")
	y.ends()
}

// A signal that ends the process ends the shell, while it waits for a line.
func TestShellTerminated(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	x := e.terminal(t.TempDir())
	x.expect("default> ")
	if err := x.cmd.Process.Signal(os.Interrupt); err != nil { // as Ctrl-C is no signal now, it is nothing
		t.Fatal(err)
	}
	// Nothing orders a signal and what is typed: on a busy machine it may come to a command after all.
	x.taken(syscall.SIGINT)
	x.types("get n\r")
	x.expect("default> ")
	x.types("incr n\r")
	x.expect("\r\n1\r\n")
	x.expect("default> ")
	if err := x.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := x.cmd.Wait(); err == nil || x.cmd.ProcessState.ExitCode() != ctl.ExitInterrupted {
		t.Errorf("%v: %s", err, x.text())
	}
}

func TestHistoryIsBounded(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_STATE_HOME", dir)
	h := openHistory()
	l := liner.NewLiner() // stdin is no terminal
	defer l.Close()
	for i := range liner.HistoryLimit + 10 {
		h.add(l, fmt.Sprintf("get %d", i), t.Logf)
	}
	h.add(l, "put k "+strings.Repeat("x", maxRemembered), t.Logf)
	b, err := os.ReadFile(filepath.Join(dir, "kvctl", "history"))
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(b, []byte("\n")); n != liner.HistoryLimit || !bytes.HasSuffix(b, []byte("get 1009\n")) {
		t.Errorf("%d lines, the last %q", n, b[max(0, len(b)-20):])
	}
	// Where it cannot be kept, that is said once.
	t.Setenv("XDG_STATE_HOME", "/dev/null")
	h = openHistory()
	said := 0
	for range 3 {
		h.add(l, "get x", func(string, ...any) { said++ })
	}
	if said != 1 {
		t.Errorf("said %d times", said)
	}
}

// Commands of a shell share a session, except those that measure sessions.
func TestShellSharesSession(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	n := 0
	e.wrap(func(s ctl.Store) ctl.Store { n++; return s })
	out := e.must("put a b\nget a\nttl a 1h\nincr n\nscan\nmget a n\n", "shell")
	if n != 1 || !strings.Contains(out, "1.0") && !strings.Contains(out, "b\n") {
		t.Errorf("%d sessions: %s", n, out)
	}
	if out := e.must("get a\ncost --trials 4 --batch 8\n", "shell"); strings.Count(out, " ok\n") < 12 {
		t.Errorf("cost: %s", out)
	}
	if r := e.run("get a\nfrobnicate\nget none\n"+strings.Repeat("x", maxLine+1), "shell"); r.code != ctl.ExitUsage ||
		!strings.Contains(r.stderr, "line 4: longer") {
		t.Errorf("%+v", r)
	}
}

// readers lets nobody write.
type readers struct{ ctl.Backend }

func (readers) Open(_ context.Context, o ctl.SessionOptions) (ctl.Store, error) {
	if !o.ReadOnly {
		return nil, fmt.Errorf("%w: client/x has read", client.ErrForbidden)
	}
	return ctl.Opened{}, nil
}

// The shell of somebody who may only read has a session for that.
func TestShellOfReader(t *testing.T) {
	k := &kept{Backend: readers{}}
	if s, err := k.Session(t.Context()); err != nil || s == nil {
		t.Errorf("%v, %v", s, err)
	}
}
