package keeper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// chosen is a worker that does what its program's name says.
func chosen(c *Client) int {
	hup, usr := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	signal.Notify(usr, syscall.SIGTERM)
	self, err := os.Executable()
	if err != nil {
		return 97
	}
	name := filepath.Base(self)
	switch name {
	case "fails":
		return 3
	case "ends":
		return 0
	case "hangs":
		select {}
	case "first", "second":
	default:
		return 98
	}
	if items, err := c.List(); err != nil || len(items) == 0 && c.Put("v/1", nil, 0) != nil ||
		c.Up(name+" version") != nil {
		return 99
	}
	fmt.Println("up", name)
	select {
	case <-hup:
		return Again
	case <-usr:
		return 0
	}
}

// copyOf puts this test binary under a name of its own.
func copyOf(t *testing.T, dir, name string, mode os.FileMode) string {
	t.Helper()
	b, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, b, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// logged may be read while a keeper writes to it.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// keeping runs a keeper of the program first, with a control socket, until the test ends.
func keeping(t *testing.T, dir string, up time.Duration) (socket string, out *lines, log *logged) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout := os.Stdout
	os.Stdout = w
	ctx, cancel := context.WithCancel(t.Context())
	socket, log = filepath.Join(dir, "s"), new(logged)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		status, err := Run(
			ctx, Options{Path: copyOf(t, dir, "first", 0o755),
				Env: []string{programEnv + "=chosen", folderEnv + "=" + dir}, Vital: "v/", Control: socket,
				UpTimeout: up, Logger: slog.New(slog.NewTextHandler(log, nil))})
		if status != 0 || err != nil {
			t.Errorf("status %d, %v", status, err)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		os.Stdout = stdout
		_, _ = r.Close(), w.Close()
	})
	out = &lines{t: t, r: r}
	if got := out.next(); got != "up first" {
		t.Fatalf("the worker says %q", got)
	}
	return socket, out, log
}

// replace has the worker ask for another one; the keeper passes the signal on.
func replace(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}

// TestChoose: the next worker is of the program that was chosen, and those after it; one that does not come up, however
// it fails, is followed by one of the program before. A choice that is taken back is none.
func TestChoose(t *testing.T) {
	dir := t.TempDir()
	socket, out, log := keeping(t, dir, 0)
	choose := func(name string) *Choice {
		t.Helper()
		x, err := Choose(t.Context(), socket, copyOf(t, dir, name, 0o755))
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	serving := "first"
	for _, c := range []struct{ name, why string }{
		{"fails", "exit status 3"}, {"ends", "exit status 0"}, {"second", ""}, {"fails", "exit status 3"},
		{"first", ""},
	} {
		x := choose(c.name)
		if _, err := Choose(t.Context(), socket, copyOf(t, dir, "other", 0o755)); !errors.Is(err, ErrRefused) ||
			!strings.Contains(err.Error(), "another program was chosen") {
			t.Errorf("a second choice: %v", err)
		}
		replace(t)
		version, err := x.Wait(t.Context())
		if c.why == "" {
			serving = c.name
		}
		if (err == nil) != (c.why == "") || err != nil &&
			(!errors.Is(err, ErrNotUp) || !strings.Contains(err.Error(), c.why)) || version != serving+" version" {
			t.Fatalf("%s: version %q, %v", c.name, version, err)
		}
		if got := out.next(); got != "up "+serving {
			t.Fatalf("after %s the worker says %q", c.name, got)
		}
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	}
	x := choose("second")
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	for { // until the keeper has noticed, another choice is refused
		y, err := Choose(t.Context(), socket, filepath.Join(dir, "first"))
		if err == nil {
			replace(t)
			if version, err := y.Wait(t.Context()); version != "first version" || err != nil {
				t.Errorf("version %q, %v", version, err)
			}
			_ = y.Close()
			break
		}
		if !errors.Is(err, ErrRefused) {
			t.Fatal(err)
		}
	}
	if n := strings.Count(log.String(), "did not come up"); n != 3 {
		t.Errorf("%d of 3 failures are logged:\n%s", n, log)
	}
}

// TestChosenHangs: a program that does not say in time that it is up is killed.
func TestChosenHangs(t *testing.T) {
	dir := t.TempDir()
	socket, out, _ := keeping(t, dir, 50*time.Millisecond)
	x, err := Choose(t.Context(), socket, copyOf(t, dir, "hangs", 0o755))
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	replace(t)
	if version, err := x.Wait(t.Context()); version != "first version" || !errors.Is(err, ErrNotUp) ||
		!strings.Contains(err.Error(), "not up within 50ms") {
		t.Errorf("version %q, %v", version, err)
	}
	if got := out.next(); got != "up first" {
		t.Errorf("the worker says %q", got)
	}
}

// TestHostilePrograms: a keeper takes only what nobody else can have written, and only from those who may; it outlives
// whatever is said to it.
func TestHostilePrograms(t *testing.T) {
	dir := t.TempDir()
	socket, _, _ := keeping(t, dir, 0)
	refused := map[string]string{
		"":                                 "absolute path",
		"first":                            "absolute path",
		"/" + strings.Repeat("x", maxPath): "absolute path",
		"/a\nb":                            "absolute path",
		dir:                                "no regular file",
		"/dev/null":                        "no regular file",
		socket:                             "no regular file",
		filepath.Join(dir, "none"):         "no such file",
		copyOf(t, dir, "group", 0o775):     "mode 0775",
		copyOf(t, dir, "world", 0o757):     "mode 0757",
		copyOf(t, dir, "text", 0o644):      "cannot be executed",
	}
	if os.Geteuid() == 0 {
		path := copyOf(t, dir, "stranger", 0o755)
		if err := os.Chown(path, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		refused[path] = "is user 65534's"
	}
	for path, why := range refused {
		if _, err := Choose(t.Context(), socket, path); !errors.Is(err, ErrRefused) ||
			!strings.Contains(err.Error(), why) {
			t.Errorf("%.40q: %v, want %q", path, err, why)
		}
	}
	for _, text := range []string{"", "\n", "{", "[]\n", "nonsense\n", `{"program":7}` + "\n",
		strings.Repeat("[", 2*maxChoice), `{"program":"` + strings.Repeat("x", 2*maxChoice)} {
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, text) // it may hang up before the end
		if err := c.(*net.UnixConn).CloseWrite(); err != nil && !errors.Is(err, unix.ENOTCONN) {
			t.Error(err)
		}
		var v verdict
		if err := json.NewDecoder(c).Decode(&v); err == nil && v.Error == "" {
			t.Errorf("%.20q was taken", text)
		}
		_ = c.Close()
	}
	if err := mayChoose(os.Geteuid() + 1); err == nil {
		t.Error("any user may choose")
	}
}

// TestOtherUsersMayNotChoose: neither by the mode of the socket nor, where that lets them in, by who they are.
func TestOtherUsersMayNotChoose(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("only root becomes another user")
		}
		t.Skip("only root becomes another user")
	}
	dir, err := os.MkdirTemp("", "keeper")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	socket, _, _ := keeping(t, dir, 0)
	for _, c := range []struct {
		mode os.FileMode
		why  string
	}{{0o600, "permission denied"}, {0o666, "user 65534 may not choose"}} {
		if err := os.Chmod(socket, c.mode); c.mode != 0o600 && err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(filepath.Join(dir, "first"))
		cmd.Env = []string{programEnv + "=choose", folderEnv + "=" + socket}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), c.why) {
			t.Errorf("mode %v: %v: %s", c.mode, err, out)
		}
	}
}

// TestControlIsTakenOver: the socket of a keeper that was killed is in nobody's way; that of one that lives is not
// taken.
func TestControlIsTakenOver(t *testing.T) {
	dir := t.TempDir()
	left := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: left, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	socket, _, _ := keeping(t, dir, 0)
	_, err = Run(t.Context(), Options{Path: os.Args[0], Vital: "v/", Control: socket,
		Logger: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "another keeper listens there") {
		t.Errorf("%v", err)
	}
}
