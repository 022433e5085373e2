package keeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	programEnv = "KEEPER_TEST_PROGRAM"
	folderEnv  = "KEEPER_TEST_FOLDER"
)

// TestMain is also the worker, and a keeper, of the tests that need processes.
func TestMain(m *testing.M) {
	if p := os.Getenv(programEnv); p != "" {
		os.Exit(program(p, os.Getenv(folderEnv)))
	}
	os.Exit(m.Run())
}

// program gives an exit status.
func program(name, folder string) int {
	if name == "keeper" {
		status, err := Run(context.Background(), Options{Path: os.Args[0], Env: []string{programEnv + "=hang"},
			Vital: "v/", Logger: slog.Default()})
		fmt.Fprintln(os.Stderr, status, err)
		return status
	}
	if name == "choose" { // as another user
		_, err := Choose(context.Background(), folder, os.Args[0])
		fmt.Println(err)
		return 0
	}
	c, err := Connect()
	if err != nil || c == nil {
		fmt.Fprintln(os.Stderr, "no keeper:", err)
		return 90
	}
	lives := count(folder)
	switch name {
	case "dies": // with something held, as often as it has to
		items, err := c.List()
		switch {
		case err != nil:
			return 91
		case lives == 1 && len(items) == 0:
			fd, err := unix.MemfdCreate("v", unix.MFD_CLOEXEC)
			if err != nil {
				return 92
			}
			if _, err := unix.Write(fd, []byte("it is kept")); err != nil || c.Put("v/1", []byte("meta"), fd) != nil {
				return 93
			}
		case len(items) != 1 || items[0].Name != "v/1" || string(items[0].Meta) != "meta" ||
			content(items[0].FDs[0]) != "it is kept":
			return 94
		case lives == 4:
			return 0
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "chosen":
		return chosen(c)
	case "fails":
		return 7
	case "killed": // with nothing held, before it is up
		if lives == 3 {
			return 6
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "was up": // with nothing held
		if lives == 1 && c.Up("v1") != nil {
			return 97
		}
		return 4 - lives
	case "loses": // what is vital goes before it does
		if c.Put("v/1", nil, 0) != nil || c.Drop("v/1") != nil || c.Put("other", nil, 0) != nil {
			return 95
		}
		return 8
	case "again": // with nothing held
		if lives == 3 {
			return 6
		}
		return Again
	case "serves":
		term, hup := make(chan os.Signal, 1), make(chan os.Signal, 1)
		signal.Notify(term, syscall.SIGTERM, syscall.SIGINT)
		signal.Notify(hup, syscall.SIGHUP)
		if c.Put("v/1", nil, 0) != nil {
			return 96
		}
		fmt.Println("serving")
		<-hup
		fmt.Println("reloaded")
		if <-term == syscall.SIGINT {
			return 4
		}
		return 5
	case "hang":
		fmt.Println("serving", os.Getpid())
		time.Sleep(time.Minute) // a select without an end ends, as a deadlock
		fmt.Println("there still")
	case "looks":
		return looks(c)
	}
	return 99
}

// count adds a life to those that the folder has seen.
func count(folder string) int {
	f, err := os.OpenFile(filepath.Join(folder, "lives"), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return 0
	}
	defer f.Close()
	_, _ = f.Write([]byte{'.'})
	b, _ := os.ReadFile(f.Name())
	return len(b)
}

func content(fd int) string {
	b := make([]byte, 512)
	n, _ := unix.Pread(fd, b, 0)
	return string(b[:max(n, 0)])
}

func run(t *testing.T, ctx context.Context, program string, told ...func(string)) (status int, log string) {
	t.Helper()
	var b bytes.Buffer
	t.Setenv(folderEnv, t.TempDir())
	o := Options{Path: os.Args[0], Env: []string{programEnv + "=" + program}, Vital: "v/",
		Logger: slog.New(slog.NewTextHandler(&b, nil))}
	for _, f := range told {
		o.Trouble = f
	}
	status, err := Run(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	return status, b.String()
}

// TestWorkersFollow: a worker that is killed is followed by one that finds what it had; those that die at once wait
// ever longer, and from the second on it is told why; an orderly end is the keeper's.
func TestWorkersFollow(t *testing.T) {
	var told []string
	began := time.Now()
	status, log := run(t, t.Context(), "dies", func(text string) {
		told = append(told, text)
		if files, err := openFiles("/memfd:" + troubleFile); err != nil || len(files) != 1 ||
			content(files[0]) != text {
			t.Errorf("told %q, and open are %v, %v", text, files, err)
		}
	})
	if files, err := openFiles("/memfd:" + troubleFile); err != nil || len(files) != 0 {
		t.Errorf("at the end open are %v, %v", files, err)
	}
	if len(told) != 2 || !strings.Contains(told[0], "die soon after their start: 2 now, the last with signal: killed "+
		"after ") ||
		!strings.Contains(told[0], "starts the next after 100ms") || !strings.Contains(told[1], ": 3 now") ||
		!strings.Contains(told[1], "200ms") {
		t.Errorf("told %q", told)
	}
	if status != 0 {
		t.Errorf("status %d", status)
	}
	if n := strings.Count(log, `how="signal: killed"`); n != 3 {
		t.Errorf("%d of 3 deaths are logged:\n%s", n, log)
	}
	for _, pause := range []string{"50ms", "100ms", "200ms"} {
		if !strings.Contains(log, "pause="+pause) {
			t.Errorf("no pause of %s:\n%s", pause, log)
		}
	}
	if took := time.Since(began); took < 350*time.Millisecond {
		t.Errorf("ended after %v, with pauses of 350ms in all", took)
	}
}

// openFiles are this process's descriptors of files whose name begins so.
func openFiles(name string) (fds []int, err error) {
	files, err := filepath.Glob("/proc/self/fd/*")
	for _, f := range files {
		if to, err := os.Readlink(f); err == nil && strings.HasPrefix(to, name) {
			fd, err := strconv.Atoi(filepath.Base(f))
			if err != nil {
				return nil, err
			}
			fds = append(fds, fd)
		}
	}
	return fds, err
}

func TestPauses(t *testing.T) {
	for _, c := range []struct{ pause, lived, want time.Duration }{
		{0, time.Hour, 0}, {maxPause, soon, 0}, {0, 0, minPause}, {minPause, soon - 1, 2 * minPause},
		{maxPause, 0, maxPause}, {maxPause - 1, 0, maxPause},
	} {
		if got := nextPause(c.pause, c.lived); got != c.want {
			t.Errorf("after a pause of %v and a life of %v: %v, want %v", c.pause, c.lived, got, c.want)
		}
	}
}

// TestAgain: a worker may ask for the next one, which does not wait.
func TestAgain(t *testing.T) {
	status, log := run(t, t.Context(), "again")
	if status != 6 || strings.Count(log, "asks for another one") != 2 || strings.Contains(log, "pause=") {
		t.Errorf("status %d\n%s", status, log)
	}
}

// TestNothingToKeep: a worker that ends while nothing vital is held is the last, and its status the keeper's.
func TestNothingToKeep(t *testing.T) {
	for program, want := range map[string]int{"fails": 7, "loses": 8} {
		if status, log := run(t, t.Context(), program); status != want {
			t.Errorf("%s: status %d, want %d\n%s", program, status, want, log)
		}
	}
	// It is not the last if it was killed, or if another one came up before.
	for program, want := range map[string]int{"killed": 6, "was up": 0} {
		var told []string
		status, log := run(t, t.Context(), program, func(text string) { told = append(told, text) })
		if n := strings.Count(log, "the worker died; another one takes over"); status != want || n < 2 {
			t.Errorf("%s: status %d, want %d, after %d deaths\n%s", program, status, want, n, log)
		}
		if len(told) == 0 || strings.Contains(told[0], "holds the memory") {
			t.Errorf("%s: told %q", program, told)
		}
	}
	_, err := Run(t.Context(), Options{Path: filepath.Join(t.TempDir(), "none"), Vital: "v/",
		Logger: slog.New(slog.DiscardHandler)})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no program: %v", err)
	}
}

// child starts this binary with a program of its own and gives its stdout.
func child(t *testing.T, prog string) (*exec.Cmd, *lines) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), programEnv+"="+prog, folderEnv+"="+t.TempDir())
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = w, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); _ = r.Close() })
	return cmd, &lines{t: t, r: r}
}

type lines struct {
	t *testing.T
	r io.Reader
}

func (l *lines) next() string {
	l.t.Helper()
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := l.r.Read(b); err != nil {
			return string(line) // every process that had the pipe has ended
		}
		if b[0] == '\n' {
			return string(line)
		}
		line = append(line, b[0])
	}
}

// TestKeeperDies: the worker ends with it, so that nothing is served by two.
func TestKeeperDies(t *testing.T) {
	cmd, out := child(t, "keeper")
	if got := out.next(); !strings.HasPrefix(got, "serving ") {
		t.Fatalf("the worker says %q", got)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if got := out.next(); got != "" {
		t.Errorf("the worker says %q", got)
	}
}

// TestSignalsArePassedOn: SIGHUP, and SIGTERM in place of the end of the context, or SIGINT if that was its cause.
func TestSignalsArePassedOn(t *testing.T) {
	for cause, want := range map[error]int{context.Canceled: 5, ErrInterrupted: 4} {
		signalWorker(t, cause, want)
	}
}

func signalWorker(t *testing.T, cause error, want int) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout := os.Stdout
	os.Stdout = w
	defer func() { os.Stdout = stdout }()
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	out := &lines{t: t, r: r}
	go func() {
		out.next()
		_ = syscall.Kill(os.Getpid(), syscall.SIGHUP)
		out.next()
		cancel(cause)
	}()
	if status, log := run(t, ctx, "serves"); status != want {
		t.Errorf("%v: status %d, want %d\n%s", cause, status, want, log)
	}
}

// TestStoreAfterRun: a keeper that is asked to end leaves what it held in systemd's store for the next one; one that is
// interrupted leaves nothing.
func TestStoreAfterRun(t *testing.T) {
	for cause, want := range map[error]string{context.Canceled: "v/1", ErrInterrupted: ""} {
		s := newStandIn(t, 64)
		before, _ := s.keeper(nil)
		t.Setenv(folderEnv, t.TempDir())
		ctx, cancel := context.WithCancelCause(t.Context())
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout := os.Stdout
		os.Stdout = w
		go func() {
			(&lines{t: t, r: r}).next() // it serves, with something held
			cancel(cause)
			_ = syscall.Kill(os.Getpid(), syscall.SIGHUP) // on which the worker waits first
		}()
		_, err = Run(ctx, Options{Path: os.Args[0], Env: []string{programEnv + "=serves"}, Vital: "v/",
			Logger: slog.New(slog.DiscardHandler), Store: before.out})
		os.Stdout = stdout
		_ = w.Close()
		if err := errors.Join(err, newBarrier(s)); err != nil {
			t.Fatal(err)
		}
		k, _ := s.keeper(nil)
		if got := k.text(); !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("%v: the next keeper has %q", cause, got)
		}
		k.closeAll(false)
	}
}

// pair is a client of a store that is served until the test ends.
func pair(t *testing.T) (*Client, *store, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	a, err := connOf(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	b, err := connOf(fds[1])
	if err != nil {
		t.Fatal(err)
	}
	s, done := &store{}, make(chan struct{})
	go func() { defer close(done); s.serve(a, func(string) {}) }()
	c := &Client{conn: b}
	t.Cleanup(func() { _ = c.Close(); <-done; _ = a.Close(); s.closeAll(false) })
	return c, s, b
}

func memfd(t *testing.T, text string) int {
	t.Helper()
	fd, err := unix.MemfdCreate("t", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if _, err := unix.Write(fd, []byte(text)); err != nil {
		t.Fatal(err)
	}
	return fd
}

// show is what a client sees, in short.
func show(t *testing.T, c *Client) (out string) {
	t.Helper()
	items, err := c.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range items {
		out += i.Name + "(" + string(i.Meta) + ")"
		for _, fd := range i.FDs {
			out += ":" + content(fd)
		}
		out += " "
		i.Close()
	}
	return out
}

// TestHeld: what is put is listed in the order in which it came, with what its descriptors say, until it is dropped.
func TestHeld(t *testing.T) {
	c, s, _ := pair(t)
	a, b := memfd(t, "A"), memfd(t, "B")
	for _, err := range []error{c.Put("one", nil, a), c.Put("two", []byte("m"), b, a), c.Put("three", nil, b)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := show(t, c); got != "one():A two(m):B:A three():B " {
		t.Errorf("held: %s", got)
	}
	if err := errors.Join(c.Drop("one"), c.Drop("two"), c.Put("one", nil, b)); err != nil {
		t.Fatal(err)
	}
	if got := show(t, c); got != "three():B one():B " {
		t.Errorf("held: %s", got)
	}
	for what, err := range map[string]error{
		"a name that is taken": c.Put("one", nil, a), "a name that is not": c.Drop("two"), "no name": c.Put("", nil, a),
		"no descriptor":     c.Put("x", nil),
		"three descriptors": c.Put("x", nil, a, a, a), "a long name": c.Put(strings.Repeat("x", maxName+1), nil, a),
		"much meta":        c.Put("x", make([]byte, maxMeta+1), a),
		"a name of 64 KiB": c.Put(strings.Repeat("x", 1<<16), nil, a), "a name with a newline": c.Put("a\nb", nil, a),
	} {
		if !errors.Is(err, ErrRefused) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := show(t, c); got != "three():B one():B " {
		t.Errorf("after what was refused: %s", got)
	}
	for k := range 200 { // what it remembers of names that are gone is bounded
		if err := errors.Join(c.Put(fmt.Sprint(k), nil, a), c.Drop(fmt.Sprint(k))); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.order) > 80 {
		t.Errorf("%d names are remembered", len(s.order))
	}
	var none *Client
	if items, err := none.List(); errors.Join(err, none.Put("x", nil, a), none.Drop("x"), none.Close()) != nil ||
		items != nil {
		t.Error("a process without a keeper cannot do without it")
	}
}

// TestRename: what is held has another name, with all that it had, and none but that.
func TestRename(t *testing.T) {
	c, s, _ := pair(t)
	d := newStandIn(t, 64)
	before, _ := d.keeper(nil)
	s.out = before.out
	a, b := memfd(t, "A"), memfd(t, "B")
	if err := errors.Join(c.Put("one", []byte("m"), a, b), c.Put("two", nil, memfd(t, "B2"))); err != nil {
		t.Fatal(err)
	}
	where, err := c.Rename("one", "rescue/one")
	if got := show(t, c); err != nil || got != "two():B2 rescue/one(m):A:B " || !strings.Contains(where, "rescue/one") {
		t.Errorf("at %q, %v; held: %s", where, err, got)
	}
	for _, names := range [][2]string{{"none", "other"}, {"two", "rescue/one"}, {"two", ""}} {
		if _, err := c.Rename(names[0], names[1]); !errors.Is(err, ErrRefused) {
			t.Errorf("%q: %v", names, err)
		}
	}
	if got := show(t, c); got != "two():B2 rescue/one(m):A:B " {
		t.Errorf("held: %s", got)
	}
	// Behind it systemd, which holds a file once, has it, too.
	s.closeAll(true)
	if k, log := d.keeper(nil); k.text() != "rescue/one(m):A:B two():B2 " || log.Len() > 0 {
		t.Errorf("the next keeper has %s\n%s", k.text(), log)
		k.closeAll(false)
	}
}

// TestHostileWorker: a packet that is no message is refused, takes no descriptor, and does not end the worker's
// connection.
func TestHostileWorker(t *testing.T) {
	c, s, raw := pair(t)
	fd, err := unix.MemfdCreate("hostile", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte("A")); err != nil {
		t.Fatal(err)
	}
	if err := c.Put("one", nil, fd); err != nil {
		t.Fatal(err)
	}
	good := (&message{op: opPut, name: "two"}).encode()
	edit := func(f func(b []byte)) []byte { b := bytes.Clone(good); f(b); return b }
	for what, x := range map[string]struct {
		b   []byte
		fds int
	}{
		"short":             {good[:4], 1},
		"no name":           {good[:headSize], 1},
		"longer than said":  {append(bytes.Clone(good), 'x'), 1},
		"too long":          {make([]byte, maxFrame+100), 1},
		"reserved":          {edit(func(b []byte) { b[7] = 1 }), 1},
		"no operation":      {edit(func(b []byte) { b[0] = 0 }), 1},
		"unknown operation": {edit(func(b []byte) { b[0] = 77 }), 1},
		"a keeper's answer": {edit(func(b []byte) { b[0] = opItem }), 1},
		"drop with a file":  {edit(func(b []byte) { b[0] = opDrop }), 1},
		"name past the end": {edit(func(b []byte) { binary.LittleEndian.PutUint16(b[2:], 4) }), 1},
		"ten descriptors":   {good, 10},
		"no descriptor":     {good, 0},
		"drop with meta":    {(&message{op: opDrop, name: "one", meta: []byte("m")}).encode(), 0},
		"a name that is":    {(&message{op: opPut, name: "one"}).encode(), 1},
	} {
		var oob []byte
		if x.fds > 0 {
			fds := make([]int, x.fds)
			for i := range fds {
				fds[i] = fd
			}
			oob = unix.UnixRights(fds...)
		}
		if _, _, err := raw.WriteMsgUnix(x.b, oob, nil); err != nil {
			t.Fatal(what, err)
		}
		if m, _, err := receive(raw); err != nil || m.op != opRefuse {
			t.Errorf("%s: %+v %v", what, m, err)
		}
	}
	got := show(t, c)
	for _, want := range []int{2, 1} { // this one, and the keeper's
		if files, err := openFiles("/memfd:hostile"); err != nil || len(files) != want {
			t.Errorf("%d descriptors are open, want %d: %v", len(files), want, err)
		}
		if err := c.Drop("one"); (err == nil) != (want == 2) {
			t.Error(err)
		}
	}
	if err := c.Put("one", nil, fd); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if got != "one():A " || len(s.items) != 1 {
		t.Errorf("held: %s", got)
	}
}

// TestConnect: a process that is no worker has no keeper, and one that was told nonsense says so.
func TestConnect(t *testing.T) {
	if c, err := Connect(); c != nil || err != nil {
		t.Errorf("%v %v", c, err)
	}
	for _, text := range []string{"x", "-1", "2", "99999"} {
		t.Setenv(socketEnv, text)
		if c, err := Connect(); c != nil || err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v %v", text, c, err)
		}
	}
}

// FuzzDecode: a packet is refused, or says again what it said.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{}, 0)
	f.Add((&message{op: opPut, name: "n", meta: []byte("m")}).encode(), 1)
	f.Add((&message{op: opList}).encode(), 0)
	f.Fuzz(func(t *testing.T, b []byte, files int) {
		m, err := decode(b, files)
		if err == nil && !bytes.Equal(m.encode(), b) {
			t.Errorf("%x says %+v", b, m)
		}
		if err != nil && !errors.Is(err, ErrProtocol) {
			t.Error(err)
		}
	})
}
