package memcached_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	promtest "github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/memcached"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
)

// authFile makes a file of users.
func authFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "users")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// logins are what a client says on one connection, and how it is answered.
var logins = []struct{ say, want string }{
	{"get k", "CLIENT_ERROR unauthenticated"},
	{"version", "CLIENT_ERROR unauthenticated"},
	{"mn", "CLIENT_ERROR unauthenticated"},
	{"add k 0 0 8", "CLIENT_ERROR unauthenticated"},
	{"set k 0 0", "CLIENT_ERROR unauthenticated"},
	{"set k 0 0 x", "CLIENT_ERROR unauthenticated"},
	{"set k 0 0 4\r\nuser", "CLIENT_ERROR bad authentication token format"},
	{"set k 0 0 8\r\nuser bad", "CLIENT_ERROR authentication failure"},
	{"set k 0 0 11\r\nnobody pass", "CLIENT_ERROR authentication failure"},
	{"set k 0 0 9\r\nuser pass", "STORED"},
	{"get k", "END"}, // nothing was stored
	{"set k 0 0 1\r\n1", "STORED"},
	{"incr k 1", "2"},
}

// TestLogin: a connection gives a name and a password first, and is served then.
func TestLogin(t *testing.T) {
	var log lockedBuffer
	addr, s := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{}),
		AuthFile: authFile(t, "user:pass\nother:more:than\n"),
		Logger:   slog.New(slog.NewTextHandler(&log, nil))})
	c := connect(t, addr)
	for _, x := range logins {
		if got := c.ask(t, x.say); got != x.want {
			t.Errorf("%q: %q, want %q", x.say, got, x.want)
		}
	}
	if got := talk(t, addr, "set k 0 0 10\r\nother more\r\nquit\r\n"); got !=
		"CLIENT_ERROR authentication failure\r\nCLIENT_ERROR unauthenticated\r\n" {
		t.Errorf("a part of a password: %q", got)
	}
	if got := talk(t, addr, "set k 0 0 5000\r\n"+strings.Repeat("x", 5000)+"\r\nget k\r\n"); got !=
		"CLIENT_ERROR bad authentication token format\r\n" {
		t.Errorf("a long password: %q", got)
	}
	if got := talk(t, addr, strings.Repeat("x", 3000)+"\r\nget k\r\n"); got != "CLIENT_ERROR line too long\r\n" {
		t.Errorf("a long line: %q", got)
	}
	if got := talk(t, addr, "set k 0 0 9 noreply\r\nuser pass\r\nget k\r\n"); !strings.HasPrefix(
		got, "STORED\r\nVALUE k 0 1\r\n2\r\n") {
		t.Errorf("in one piece: %q", got)
	}
	want := "# HELP kvd_memcached_auth_failures_total Wrong passwords.\n# TYPE kvd_memcached_auth_failures_total " +
		"counter\nkvd_memcached_auth_failures_total 3\n"
	if err := promtest.GatherAndCompare(registry(t, s), strings.NewReader(want),
		"kvd_memcached_auth_failures_total"); err != nil {
		t.Error(err)
	}
	if strings.Count(log.String(), `msg="wrong password" protocol=memcached`) != 3 ||
		strings.Contains(log.String(), "pass\n") {
		t.Errorf("logged:\n%s", log.String())
	}
}

// TestLoginLikeMemcached: memcached -Y answers the same.
func TestLoginLikeMemcached(t *testing.T) {
	if os.Getenv("KVD_COMPAT") != "1" {
		t.Skip("needs memcached 1.6 installed: set KVD_COMPAT=1")
	}
	dir, err := os.MkdirTemp("", "kvd") // that its user may enter
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "users")
	if err := errorsOf(os.Chmod(dir, 0o755), os.WriteFile(file, []byte("user:pass\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	theirs := startMemcached(t, "-Y", file)
	c := connect(t, theirs)
	for _, x := range logins {
		if got := c.ask(t, x.say); got != x.want {
			t.Errorf("%q: memcached says %q, not %q", x.say, got, x.want)
		}
	}
}

// TestLoginIsSlowToGuess: wrong passwords cost a second each after ten of them.
func TestLoginIsSlowToGuess(t *testing.T) {
	addr, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{}),
		AuthFile: authFile(t, "user:pass\n")})
	c := connect(t, addr)
	for range 11 {
		c.ask(t, "set k 0 0 8\r\nuser bad")
	}
	began := time.Now()
	if got := c.ask(t, "set k 0 0 9\r\nuser pass"); got != "STORED" {
		t.Errorf("got %q", got)
	}
	if took := time.Since(began); took < netsrv.GuessDelay {
		t.Errorf("it took %v after many wrong passwords", took)
	}
	if got := c.ask(t, "get k"); got != "END" {
		t.Errorf("got %q", got)
	}
}

// TestReloadUsers: a new file holds at once, users that it has no more are disconnected, and a bad one changes
// nothing and is told of without its passwords.
func TestReloadUsers(t *testing.T) {
	path := authFile(t, "a:1\nb:2\n")
	addr, s := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{}), AuthFile: path})
	a, b := connect(t, addr), connect(t, addr)
	login := func(c *stranger, user, want string) {
		t.Helper()
		if got := c.ask(t, fmt.Sprintf("set k 0 0 %d\r\n%s", len(user), user)); got != want {
			t.Errorf("%s: %q, want %s", user, got, want)
		}
	}
	login(a, "a 1", "STORED")
	login(b, "b 2", "STORED")
	for _, bad := range []string{"a:1\nsecret\n", ":secret\n", "a:\n", "a:secret\na:secret\n", "a b:secret\n", "",
		"a:" + strings.Repeat("secret", 500)} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := s.ReloadUsers(); err == nil || strings.Contains(err.Error(), "secret") ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
	if got := b.ask(t, "get k"); got != "END" {
		t.Errorf("got %q", got)
	}
	if err := errorsOf(os.WriteFile(path, []byte("a:3\r\nc:4\r\n"), 0o600), s.ReloadUsers()); err != nil {
		t.Fatal(err)
	}
	if got := a.ask(t, "get k"); got != "END" {
		t.Errorf("got %q", got)
	}
	if _, err := b.Read(make([]byte, 1)); err == nil {
		t.Error("a user who is gone is still served")
	}
	login(connect(t, addr), "a 1", "CLIENT_ERROR authentication failure")
	login(connect(t, addr), "a 3", "STORED")
	if _, err := memcached.New(memcached.Options{Client: clienttest.New(clienttest.Options{}), AuthFile: path +
		".not"}); err == nil {
		t.Error("a server without its file of users began")
	}
}

// startMemcached starts a memcached with further arguments.
func startMemcached(t *testing.T, more ...string) (addr string) {
	t.Helper()
	addr, err := loopback.FreeAt("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(addr)
	cmd := exec.Command("memcached", append([]string{"-u", "nobody", "-l", "127.0.0.1", "-p", port, "-U", "0"},
		more...)...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	for until := time.Now().Add(testutil.Limit); ; {
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			return addr
		} else if time.Now().After(until) {
			t.Fatal(err)
		}
	}
}

// lockedBuffer may be read while others write.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// stranger says lines and gets a line for each.
type stranger struct {
	net.Conn
	r *bufio.Reader
}

func connect(t *testing.T, addr string) *stranger {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(testutil.Limit))
	return &stranger{c, bufio.NewReader(c)}
}

// ask returns the answer's line, without its end.
func (c *stranger) ask(t *testing.T, say string) string {
	t.Helper()
	if _, err := io.WriteString(c, say+"\r\n"); err != nil {
		t.Fatal(err)
	}
	line, err := c.r.ReadString('\n')
	if err != nil {
		t.Fatalf("%q: %v", say, err)
	}
	return strings.TrimSuffix(line, "\r\n")
}

// errorsOf is the first error, if there is one.
func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
