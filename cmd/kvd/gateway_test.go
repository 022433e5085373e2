package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// redis sends commands to a server of Redis's protocol and gives the replies' lines,
// with blanks between them. A nil cfg means in clear.
func redis(t *testing.T, network, addr string, cfg *tls.Config, commands ...string) string {
	t.Helper()
	conn, err := net.DialTimeout(network, addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	if cfg != nil {
		conn = tls.Client(conn, cfg)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	var lines []string
	r := bufio.NewReader(conn)
	next := func() string {
		l, err := r.ReadString('\n')
		if err != nil {
			return err.Error()
		}
		return strings.TrimSuffix(l, "\r\n")
	}
	for _, c := range commands {
		words := strings.Fields(c)
		var b strings.Builder
		fmt.Fprintf(&b, "*%d\r\n", len(words))
		for _, w := range words {
			fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(w), w)
		}
		if _, err := io.WriteString(conn, b.String()); err != nil {
			lines = append(lines, err.Error())
			break
		}
		l := next()
		lines = append(lines, l)
		if strings.HasPrefix(l, "$") && l != "$-1" {
			lines = append(lines, next())
		}
	}
	return strings.Join(lines, " ")
}

// memcachedSay sends text to a server of memcached's protocol and gives n lines.
func memcachedSay(t *testing.T, addr, text string, n int) string {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(conn)
	var lines []string
	for range n {
		l, err := r.ReadString('\n')
		if err != nil {
			t.Fatalf("after %q: %v", lines, err)
		}
		lines = append(lines, strings.TrimSuffix(l, "\r\n"))
	}
	return strings.Join(lines, " ")
}

func wantPage(t *testing.T, addr, path string, code int, want ...string) {
	t.Helper()
	c := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := c.Get("http://" + addr + path)
	if err != nil {
		t.Error(err)
		return
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != code {
		t.Errorf("%s: %d, %v", path, r.StatusCode, err)
	}
	for _, w := range want {
		if !strings.Contains(string(b), w) {
			t.Errorf("%s lacks %q:\n%s", path, w, b[max(0, len(b)-8<<10):])
		}
	}
}

// createNamespace makes a cache that belongs to the last of owner, or else to the owner of cfg's certificate; the
// others may write.
func createNamespace(t *testing.T, directory, name string, cfg *tls.Config, owner ...string) {
	t.Helper()
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{directory}, TLS: cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = dir.CallOnce(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
		q := &dirpb.CreateNamespaceRequest{Name: name, Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1,
			BytesPerNode: 24 << 20}
		if len(owner) > 0 {
			q.Owner = owner[len(owner)-1]
		}
		if _, err := c.CreateNamespace(ctx, q); err != nil {
			return err
		}
		for _, who := range owner[:max(len(owner)-1, 0)] {
			_, err := c.GrantAccess(ctx, &dirpb.GrantAccessRequest{
				Namespace: name, Access: &dirpb.Access{Who: who, Right: dirpb.Right_RIGHT_WRITE}})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A gateway serves several namespaces by several protocols at several addresses.
func TestGateway(t *testing.T) {
	env, dir := runtimeDir(t)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s")
	addr := d.kv["directory"]
	start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB", "--shm-socket=off")
	createNamespace(t, addr, "cache", nil)

	var out, errs bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	args := []string{"gateway", "--directory=" + addr, "--databases=cache,sessions", "--listen=127.0.0.1:0",
		"--listen-memcached=127.0.0.1:0", "--http-listen=127.0.0.1:0"}
	if code := run(ctx, args, &out, &errs); code != exitFailure || out.Len() > 0 ||
		!strings.Contains(errs.String(), `kvd: database "sessions": unknown namespace: namespace "sessions" does not exist: make it with kvctl namespace create sessions --mode cache`) {
		t.Errorf("a database that is not there: exit status %d, %q, %q", code, &out, &errs)
	}

	createNamespace(t, addr, "sessions", nil)
	socket := filepath.Join(dir, "gateway", "redis.sock")
	if code := run(ctx, append(args, "--password=secret"), &out, &errs); code != exitUsage ||
		!strings.Contains(errs.String(), "listen-memcached is") {
		t.Errorf("a password, and memcached without one: exit status %d, %q", code, &errs)
	}
	locked := start(t, env, "gateway", "--directory="+addr, "--listen=127.0.0.1:0", "--password=secret")
	if locked.kv["memcached"] != "" || !strings.Contains(locked.stderr.String(), "memcached's protocol is off") {
		t.Errorf("a password, and memcached at %q: %s", locked.kv["memcached"], locked.stderr)
	}
	p := start(t, env, append(args, "--listen-unix="+socket, "--memcached-database=sessions", "--password=secret",
		"--insecure", "--hot-keys")...)
	if p.kv["role"] != "gateway" || p.kv["databases"] != "cache,sessions" || p.kv["unix"] != socket ||
		p.kv["tls"] != "" {
		t.Errorf("ready line holds %v", p.kv)
	}
	if strings.Contains(p.stderr.String(), "secret") || strings.Contains(fmt.Sprint(p.kv), "secret") {
		t.Errorf("it tells its password: %v, %s", p.kv, p.stderr)
	}
	if got := redis(t, "tcp", p.kv["redis"], nil, "GET k"); !strings.HasPrefix(got, "-NOAUTH") {
		t.Errorf("without a password: %q", got)
	}
	if got := redis(t, "tcp", p.kv["redis"], nil, "AUTH secret", "SET k v", "SELECT 1", "GET k", "SET s t"); got !=
		"+OK +OK +OK $-1 +OK" {
		t.Errorf("over tcp: %q", got)
	}
	if got := redis(t, "unix", socket, nil, "AUTH secret", "GET k"); got != "+OK $1 v" {
		t.Errorf("over the unix socket: %q", got)
	}
	if got := memcachedSay(t, p.kv["memcached"], "get s\r\nget k\r\n", 4); got != "VALUE s 0 1 t END END" {
		t.Errorf("memcached's protocol: %q", got)
	}
	for name, want := range map[string]fs.FileMode{socket: fs.ModeSocket | 0o660,
		filepath.Dir(socket): fs.ModeDir | 0o700} {
		if st, err := os.Stat(name); err != nil || st.Mode() != want {
			t.Errorf("%s: mode %v, %v, want %v", name, st.Mode(), err, want)
		}
	}
	wantPage(t, p.kv["http"], "/readyz", http.StatusOK, "ok\n")
	wantPage(t, p.kv["http"], "/metrics", http.StatusOK, `kvd_client_operations_total{namespace="cache",op="put"} 1`,
		`kvd_client_operations_total{namespace="sessions",op="put"} 1`, `kvd_gateway_commands_total{command="set",result="ok"} 2`, `role="gateway"`)
	redis(t, "tcp", p.kv["redis"], nil, append([]string{"AUTH secret"}, slices.Repeat([]string{"GET k"}, 3000)...)...)
	wantPage(t, p.kv["http"], "/", http.StatusOK,
		"<td>get</td><td>30", "evicted records", "Slow commands", "<td>cache</td><td>k</td><td>")
	wantPage(t, p.kv["http"], "/debug/pprof/cmdline", http.StatusNotFound)

	second := spawn(t, env, "gateway", "--directory="+addr, "--listen=off", "--listen-memcached=off", "--listen-unix="+
		socket)
	if code := second.wait(); code != exitFailure ||
		!strings.Contains(second.stderr.String(), "another process has that address") {
		t.Errorf("a second one at the same socket: exit status %d, %s", code, second.stderr)
	}
	if code := p.stop(syscall.SIGKILL); code == 0 {
		t.Error("SIGKILL did not end it")
	}
	// The socket file that it left is in nobody's way. Three databases of this one share a namespace, and a session.
	p = start(t, env, "gateway", "--directory="+addr, "--databases=cache*2,sessions,cache", "--listen=off",
		"--listen-memcached=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--listen-unix="+socket)
	if got := redis(t, "unix", socket, nil, "GET k"); got != "$1 v" {
		t.Errorf("another gateway: %q", got)
	}
	if got := redis(t, "unix", socket, nil, "MULTI", "MOVE k 3", "SELECT 1", "SET k w", "EXEC", "GET k", "SELECT 2",
		"GET s", "SELECT 3", "GET k", "DBSIZE", "SELECT 4", "PING", "PING", "PING"); got !=
		"+OK +QUEUED +QUEUED +QUEUED *3 :1 +OK +OK $1 w +OK $1 t +OK $1 v :1 -ERR DB index is out of range" {
		t.Errorf("databases of one namespace: %q", got)
	}
	if got := memcachedSay(t, p.kv["memcached"], "get k\r\n", 1); got != "END" {
		t.Errorf("memcached's protocol sees another database's key: %q", got)
	}
	if got := memcachedSay(t, p.kv["memcached"], "set m 0 0 1\r\nm\r\n", 1); got != "STORED" {
		t.Error(got)
	}
	if got := memcachedSay(t, p.kv["memcached"], "stats\r\n", 32); !strings.Contains(got, "curr_items 1 ") {
		t.Errorf("memcached counts others' keys: %q", got)
	}
	wantPage(t, p.kv["http"], "/metrics", http.StatusOK, `kvd_client_operations_total{namespace="cache",op="put"} `)
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
	wantEmpty(t, filepath.Dir(socket))
}

// wantOperated sees that an operator finds a gateway by the directory, and is told of it there.
func wantOperated(t *testing.T, directory string, ready map[string]string, cfg *tls.Config) {
	t.Helper()
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{directory}, TLS: cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for found := false; !found; time.Sleep(10 * time.Millisecond) {
		var st *dirpb.StatusReply
		err := dir.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
			st, err = c.Status(ctx, &dirpb.StatusRequest{})
			return err
		})
		if err != nil {
			t.Fatalf("it does not show gateway %s: %v", ready["peers"], err)
		}
		for _, g := range st.Gateways {
			if found = g.Addr == ready["peers"]; found && (!slices.Equal(g.Namespaces, []string{"cache"}) ||
				!strings.HasSuffix(g.Identity, "/kvd/gateway/it")) {
				t.Errorf("the directory shows %v", g)
			}
		}
	}
	err = askGateway(ctx, ready["peers"], cfg, func(ctx context.Context, g peerspb.GatewaysClient) error {
		d, err := g.Describe(ctx, &peerspb.DescribeRequest{})
		if err == nil && (!slices.Equal(d.Listen, []string{ready["tls"]}) || d.Commands == 0) {
			t.Errorf("the gateway shows %v", d)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// listen-tls asks for a certificate, unless anyone may come.
func TestGatewayTLS(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	cfg := files.load("operator")
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s"}, files.flags("directory")...)...)
	start(t, env, append([]string{"memnode", "--name=m", "--directory=" + d.kv["directory"], "--memory=64MiB",
		"--shm-socket=off"}, files.flags("memnode")...)...)
	createNamespace(t, d.kv["directory"], "cache", cfg, files.identity("gateway"))
	bare := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: cfg.RootCAs, ServerName: "127.0.0.1"}
	full := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: cfg.RootCAs, Certificates: cfg.Certificates,
		ServerName: "127.0.0.1"}
	stranger := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: x509.NewCertPool(), ServerName: "127.0.0.1"}
	for _, clients := range []string{"certified", "any"} {
		p := start(t, env,
			append([]string{"gateway", "--directory=" + d.kv["directory"], "--listen=off", "--listen-memcached=off",
				"--listen-tls=127.0.0.1:0", "--tls-clients=" + clients, "--http-listen=127.0.0.1:0"},
				files.flags("gateway")...)...)
		if got := redis(t, "tcp", p.kv["tls"], full, "PING"); got != "+PONG" {
			t.Errorf("%s: with a certificate: %q", clients, got)
		}
		wantOperated(t, d.kv["directory"], p.kv, cfg)
		want := map[string]string{"certified": "certificate required", "any": "+PONG"}[clients]
		if got := redis(t, "tcp", p.kv["tls"], bare, "PING"); !strings.Contains(got, want) {
			t.Errorf("%s: without a certificate: %q, want %q", clients, got, want)
		}
		if got := redis(t, "tcp", p.kv["tls"], stranger, "PING"); !strings.Contains(got, "unknown authority") {
			t.Errorf("%s: a client that trusts others: %q", clients, got)
		}
		c := http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: bare, DisableKeepAlives: true}}
		if r, err := c.Get("https://" + p.kv["http"] + "/metrics"); err == nil {
			_ = r.Body.Close()
			t.Errorf("metrics without a certificate: %s", r.Status)
		}
		c.Transport = &http.Transport{TLSClientConfig: full, DisableKeepAlives: true}
		if r, err := c.Get("https://" + p.kv["http"] + "/metrics"); err != nil {
			t.Error(err)
		} else if _ = r.Body.Close(); r.StatusCode != http.StatusOK {
			t.Errorf("metrics: %s", r.Status)
		}
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d, want 0", code)
		}
	}
}

// kvd dev starts although something else has its usual ports, and says where it is.
func TestDevTakesOtherPorts(t *testing.T) {
	usual := map[string]string{"redis": "127.0.0.1:6379", "memcached": "127.0.0.1:11211", "http": "127.0.0.1:7480"}
	for _, addr := range usual {
		if l, err := net.Listen("tcp", addr); err == nil { // otherwise somebody has it
			defer l.Close()
		}
	}
	env, _ := runtimeDir(t)
	p := start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--memnodes=1")
	for key, addr := range usual {
		if got := p.kv[key]; got == addr || !strings.HasPrefix(got, "127.0.0.1:") {
			t.Errorf("%s at %q although it is taken", key, got)
		}
		if !strings.Contains(p.stderr.String(), "setting="+key) {
			t.Errorf("no word about %s: %s", key, p.stderr)
		}
	}
	if got := redis(t, "tcp", p.kv["redis"], nil, "PING"); got != "+PONG" {
		t.Errorf("ping: %q", got)
	}
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
	p = start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--redis=off", "--memcached=off", "--http=off")
	if p.kv["redis"] != "" || p.kv["memcached"] != "" || p.kv["http"] != "" {
		t.Errorf("ready line holds %v", p.kv)
	}
}

// kvd dev keeps memcached's keys apart from those of Redis's databases if it is told so.
func TestDevMemcachedDatabase(t *testing.T) {
	for database, seen := range map[string]string{"": "+OK $1 x +OK $-1", "cache": "+OK $1 x +OK $-1",
		"default": "+OK $-1 +OK $1 x", "apart": "+OK $-1 +OK $-1"} {
		env, _ := runtimeDir(t)
		p := start(t, env, "dev", "--listen=127.0.0.1:0", "--redis=127.0.0.1:0", "--memcached=127.0.0.1:0",
			"--http=off", "--memory=128MiB", "--memnodes=1", "--memcached-database="+database)
		c, err := net.Dial("tcp", p.kv["memcached"])
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(patience))
		fmt.Fprint(c, "set k 0 0 1\r\nx\r\n")
		if line, err := bufio.NewReader(c).ReadString('\n'); line != "STORED\r\n" {
			t.Errorf("%q: %q, %v", database, line, err)
		}
		c.Close()
		if got := redis(t, "tcp", p.kv["redis"], nil, "SELECT 0", "GET k", "SELECT 1", "GET k"); got != seen {
			t.Errorf("%q: Redis's databases have %q, want %q", database, got, seen)
		}
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("%q: exit status %d, want 0", database, code)
		}
	}
}

// A role's endpoints are there while it still starts, and say so; what they say
// afterwards is how it is.
func TestHTTP(t *testing.T) {
	env, _ := runtimeDir(t)
	nobody := testutil.Listen(t) // answers nothing
	at := freeAddr(t)
	p := spawn(t, env, "memnode", "--name=m", "--directory="+nobody.Addr().String(), "--http-listen="+at)
	if _, err := nobody.Accept(); err != nil { // so it has started
		t.Fatal(err)
	}
	wantPage(t, at, "/readyz", http.StatusServiceUnavailable)
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"health", "http://" + at}, &out, &errs); code != exitFailure ||
		!strings.Contains(errs.String(), "503 Service Unavailable: ") {
		t.Errorf("kvd health: exit status %d, %s%s", code, &out, &errs)
	}
	out.Reset()
	if code := run(t.Context(), []string{"health", "http://" + at + "/healthz"}, &out, &errs); code != 0 ||
		out.String() != "SERVING\n" {
		t.Errorf("kvd health of /healthz: exit status %d, %s%s", code, &out, &errs)
	}
	wantPage(t, at, "/healthz", http.StatusOK, "ok")
	wantPage(t, at, "/metrics", http.StatusOK, "kvd_ready 0")
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d", code)
	}

	d := start(t, env, "directory", "--id=d7", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--http-listen=127.0.0.1:0")
	m := start(t, env, "memnode", "--name=m9", "--directory="+d.kv["directory"], "--memory=64MiB",
		"--http-listen=127.0.0.1:0")
	j := start(t, env, "janitor", "--directory="+d.kv["directory"], "--http-listen=127.0.0.1:0")
	for role, x := range map[string]struct {
		p    *process
		want []string
	}{
		"directory": {d, []string{`id="d7"`, `kvd_directory_node_up{node="m9"} 1`, "kvd_directory_leader_known 1",
			"kvd_raft_commit_seconds_count", "kvd_raft_term "}},
		"memnode": {m, []string{`kvd_memnode_registered{node="m9"} 1`,
			`kvd_memnode_capacity_bytes{node="m9"} 6.7108864e+07`,
			`kvd_janitor_jobs_total{kind="scrub",result="failed"} 0`}},
		"janitor": {j, []string{`kvd_janitor_jobs_total{kind="scrub",result="failed"} 0`}},
	} {
		wantPage(t, x.p.kv["http"], "/readyz", http.StatusOK, "ok")
		wantPage(t, x.p.kv["http"], "/metrics", http.StatusOK, append(x.want, "kvd_ready 1", `role="`+role+`"`,
			"go_goroutines")...)
		healthy(t, "http://"+x.p.kv["http"])
		wantPage(t, x.p.kv["http"], "/", http.StatusOK, "<h1>kvd "+role+"</h1>")
	}
	wantPage(t, d.kv["http"], "/", http.StatusOK, "<summary>m9</summary>", "<td>64.0 MiB</td>", "<td>d7</td>")
	// Each page leads to the others. A process tells of its page every few seconds.
	href := func(name string, x *process) string {
		return `<a rel="noreferrer" href="http://` + x.kv["http"] + `/">` + name
	}
	for _, x := range []struct {
		p    *process
		want []string
	}{{d, []string{href("memnode m9", m), href("janitor ", j)}},
		{m, []string{href("directory d7", d), href("janitor ", j)}},
		{j, []string{href("directory d7", d), href("memnode m9", m)}}} {
		testutil.UntilNone(t, fmt.Sprintf("the page at %s leads to all of %q", x.p.kv["http"], x.want), func() string {
			page := read(t, "http://"+x.p.kv["http"]+"/")
			if !slices.ContainsFunc(x.want, func(w string) bool { return !strings.Contains(page, w) }) {
				return ""
			}
			return page
		})
	}
}

// TestGatewayWaits: a gateway without a directory says what it waits for.
func TestGatewayWaits(t *testing.T) {
	env, _ := runtimeDir(t)
	l := testutil.Listen(t) // where nobody answers
	p := spawn(t, env, "gateway", "--directory="+l.Addr().String(), "--listen=127.0.0.1:0", "--listen-memcached=off")
	p.says(`msg="waiting for the directory" database=cache directory=`+l.Addr().String(), 1)
	p.says("it says nothing: is it a directory node's gRPC port?", 1)
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d", code)
	}
}

// TestGatewayUsers: both protocols have users, from files that SIGHUP reads again: all of a good one, nothing of a
// bad one. Nothing of a password is logged.
func TestGatewayUsers(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s")
	addr := d.kv["directory"]
	start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB", "--shm-socket=off")
	createNamespace(t, addr, "cache", nil)
	createNamespace(t, addr, "sessions", nil)
	dir := t.TempDir()
	users, logins := filepath.Join(dir, "users.acl"), filepath.Join(dir, "memcached")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(users, "user default off\nuser app on >s3cret ~app:* +@read +@write +@connection db=0\n")
	write(logins, "app:s3cret\n")
	args := []string{"gateway", "--directory=" + addr, "--databases=cache,sessions", "--listen=127.0.0.1:0",
		"--acl-file=" + users}
	if p := start(t, env, args...); p.kv["memcached"] != "" ||
		!strings.Contains(p.stderr.String(), "memcached's protocol is off") {
		t.Errorf("users, and memcached without any at %q: %s", p.kv["memcached"], p.stderr)
	}
	var out, errs bytes.Buffer
	if code := run(t.Context(), append(args, "--listen-memcached=127.0.0.1:0"), &out, &errs); code != exitUsage ||
		!strings.Contains(errs.String(), "memcached-auth-file") {
		t.Errorf("users, and memcached without any: exit status %d, %q", code, &errs)
	}
	p := start(t, env, append(args, "--listen-memcached=127.0.0.1:0", "--memcached-item-size=1KiB",
		"--memcached-auth-file="+logins)...)
	app := func(password string, cmds ...string) string {
		return redis(t, "tcp", p.kv["redis"], nil, append([]string{"AUTH app " + password}, cmds...)...)
	}
	if got := app("s3cret", "SET app:k v", "GET app:k"); got != "+OK +OK $1 v" {
		t.Errorf("as app: %q", got)
	}
	for cmd, want := range map[string]string{
		"GET k":    "-NOPERM this user has no permissions to access one of the keys used as arguments",
		"SELECT 1": "-NOPERM this user has no permissions to access this database",
		"ACL LIST": "-NOPERM this user has no permissions to run the 'acl|list' command",
	} {
		if got := app("s3cret", cmd); got != "+OK "+want {
			t.Errorf("%s as app: %q", cmd, got)
		}
	}
	if got := redis(t, "tcp", p.kv["redis"], nil, "GET app:k"); !strings.HasPrefix(got, "-NOAUTH") {
		t.Errorf("without a password: %q", got)
	}
	if got := memcachedSay(t, p.kv["memcached"], "get k\r\nset x 0 0 10\r\napp s3cret\r\nget app:k\r\n", 5); got !=
		"CLIENT_ERROR unauthenticated STORED VALUE app:k 0 1 v END" {
		t.Errorf("memcached's protocol: %q", got)
	}
	if got := memcachedSay(t, p.kv["memcached"], "set x 0 0 10\r\napp s3cret\r\nset app:k 0 0 1025\r\n"+
		strings.Repeat("x", 1025)+"\r\n", 2); got != "STORED SERVER_ERROR object too large for cache" {
		t.Errorf("a value longer than memcached-item-size: %q", got)
	}
	if got := app("s3cret", "SET app:k v"); got != "+OK +OK" {
		t.Errorf("as app: %q", got)
	}
	write(users, "user app on >s3cret +nosuch\n")
	write(logins, "s3cret\n")
	p.hangUp()
	p.says("SIGHUP: the users are kept as they were", 2)
	if got := app("s3cret", "GET app:k"); got != "+OK $1 v" {
		t.Errorf("after a bad file: %q", got)
	}
	write(users, "user app on >n3w ~* +@all\n")
	write(logins, "other:n3w\n")
	p.hangUp()
	p.says("SIGHUP: reloaded", 1)
	if got := app("n3w", "SELECT 1", "GET k"); got != "+OK +OK $-1" {
		t.Errorf("with other users: %q", got)
	}
	if got := memcachedSay(t, p.kv["memcached"], "set x 0 0 10\r\napp s3cret\r\nset x 0 0 9\r\nother n3w\r\n",
		2); got != "CLIENT_ERROR authentication failure STORED" {
		t.Errorf("memcached's protocol with other users: %q", got)
	}
	if log := p.stderr.String(); strings.Contains(log, "s3cret") || strings.Contains(log, "n3w") {
		t.Errorf("it logs a password: %s", log)
	}
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
}
