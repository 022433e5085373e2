package main

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
)

// p99 is of n questions, one after the other.
func (h *honest) p99(n int, reply string, say []byte) time.Duration {
	h.t.Helper()
	var took []time.Duration
	for range n {
		began := time.Now()
		h.want(reply, say)
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[n*99/100]
}

// TestCrowds: beside thousands of idle connections and hundreds of hostile ones at each of its listeners a process
// serves a client as before, and takes no more memory than docs/gateway.md says.
func TestCrowds(t *testing.T) {
	const idle, hostile, asked = 2000, 50, 1000
	env, _ := runtimeDir(t)
	p := start(t, env, "dev", "--memnodes=1", "--memory=256MiB", "--listen=127.0.0.1:0", "--redis=127.0.0.1:0",
		"--memcached=127.0.0.1:0", "--http=127.0.0.1:0",
		"--buffer-memory=64MiB")
	for _, x := range []struct {
		listener, addr, say, reply string
		bad                        []string
		each                       int64 // bytes, documented
	}{
		{"redis", p.kv["redis"], "PING\r\n", "+PONG\r\n",
			[]string{"*2\r\n$3\r\nGE", "*1000000000\r\n", "*1\r\n$999999999999\r\n", strings.Repeat("x", 70_000),
				strings.Repeat("PING\r\n", 50_000)}, 100 << 10},
		{"memcached", p.kv["memcached"], "mn\r\n", "MN\r\n",
			[]string{"ge", "set k 0 0 99999999999\r\n", "set k 0 0 1000000\r\nhalf", strings.Repeat("x", 70_000),
				strings.Repeat("version\r\n", 50_000)}, 100 << 10},
		{"directory", p.kv["directory"], "", "", []string{"", "PRI * HT", "GET / HTTP/1.1\r\n\r\n",
			"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x04\x00\x00\x00\x00\x00"}, 100 << 10},
		{"http", p.kv["http"], "", "", []string{"", "GET /metrics HTTP/1.1\r\n", "POST / HTTP/1.1\r\nHost: " +
			"localhost\r\nContent-Length: 1000000000000\r\n\r\n"}, 100 << 10},
	} {
		t.Run(x.listener, func(t *testing.T) {
			before := anonymous(t, p.cmd.Process.Pid)
			var quiet, crowded, held time.Duration
			var h *honest
			if x.say != "" {
				h = newHonest(t, x.addr)
				quiet = h.p99(asked, x.reply, []byte(x.say))
			}
			crowd := attack(t, x.addr, idle, nil)
			for _, say := range x.bad {
				crowd = append(crowd, attack(t, x.addr, hostile, []byte(say))...)
			}
			if h != nil {
				crowded = h.p99(asked, x.reply, []byte(x.say))
				newHonest(t, x.addr).want(x.reply, []byte(x.say))
				held = h.p99(asked, x.reply, []byte(x.say))
			}
			wantPage(t, p.kv["http"], "/metrics", 200, `kvd_listener_connections{listener="redis"}`)
			roundTrip(t, open(t, p.kv["directory"], "tcp", nil), "k")
			grown := anonymous(t, p.cmd.Process.Pid) - before
			bound := int64(idle+len(x.bad)*hostile)*x.each + 2*(64<<20)
			t.Logf("%d idle connections and %d hostile ones take %.1f MB, bound %.1f MB; p99 %v as they come, %v "+
				"then, %v before",
				idle, len(x.bad)*hostile, float64(grown)/1e6, float64(bound)/1e6, crowded, held, quiet)
			if grown > bound && !raceEnabled {
				t.Errorf("%d bytes more, at most %d are due", grown, bound)
			}
			for _, c := range crowd {
				_ = c.Close()
			}
		})
	}
}

// TestCrowdTLS: half handshakes at listen-tls and at a memory node's listen-tcp take a bounded memory, and a client
// with a certificate is served beside them.
func TestCrowdTLS(t *testing.T) {
	const flood, asked = 1500, 300 // more than handshakes are taken at a time
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	cfg := files.load("client")
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s"}, files.flags("directory")...)...)
	m := start(t, env,
		append([]string{"memnode", "--name=m", "--directory=" + d.kv["directory"], "--memory=64MiB",
			"--shm-socket=off"}, files.flags("memnode")...)...)
	createNamespace(t, d.kv["directory"], "cache", files.load("operator"), files.identity("client"),
		files.identity("gateway"))
	g := start(t, env,
		append([]string{"gateway", "--directory=" + d.kv["directory"], "--listen=off", "--listen-memcached=off",
			"--listen-tls=127.0.0.1:0"}, files.flags("gateway")...)...)
	client := func() *honest {
		t.Helper()
		c, err := tls.Dial("tcp", g.kv["tls"], &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: cfg.RootCAs,
			Certificates: cfg.Certificates, ServerName: "127.0.0.1"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return &honest{t, c, bufio.NewReader(c)}
	}
	h := client()
	h.want("+OK\r\n", redisCommand("SET", "k", "v"))
	get := func(h *honest, n int) time.Duration { return h.p99(n, "$1\r\nv\r\n", redisCommand("GET", "k")) }
	quiet := get(h, asked)
	for _, x := range []struct {
		name, addr string
		p          *process
	}{{"gateway", g.kv["tls"], g}, {"memory node", m.kv["tcp"], m}, {"directory", d.kv["directory"], d}} {
		before := anonymous(t, x.p.cmd.Process.Pid)
		var crowd []net.Conn
		for _, say := range []string{"", "\x16\x03\x01", "\x16\x03\x01\x40\x00" + strings.Repeat("x", 1000)} {
			crowd = append(crowd, attack(t, x.addr, flood/3, []byte(say))...)
		}
		crowded := get(h, asked)
		get(client(), 1)
		held := get(h, asked)
		grown := anonymous(t, x.p.cmd.Process.Pid) - before
		const bound = 1024*(160<<10) + 16<<20
		t.Logf("%s: %d half handshakes take %.1f MB, bound %.1f MB; p99 of a GET %v as they come, %v then, %v before",
			x.name, flood, float64(grown)/1e6, float64(bound)/1e6, crowded, held, quiet)
		if grown > bound && !raceEnabled {
			t.Errorf("%s: %d bytes more, at most %d are due", x.name, grown, bound)
		}
		for _, c := range crowd {
			_ = c.Close()
		}
	}
}

// metricsOf is the page of metrics at addr, in clear.
func metricsOf(t *testing.T, addr string) string { return metricsPage(t, addr, nil) }

// metricsPage is the page of metrics at addr; a nil cfg means in clear.
func metricsPage(t *testing.T, addr string, cfg *tls.Config) string {
	t.Helper()
	c := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: cfg}}
	url := "http://" + addr + "/metrics"
	if cfg != nil {
		url = "https://" + addr + "/metrics"
	}
	r, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestMaxPerAddress: each role takes as many connections of an address as its settings say.
func TestMaxPerAddress(t *testing.T) {
	var at string
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if ip := a.(*net.IPNet).IP; ip.To4() != nil && !ip.IsLoopback() {
			at = ip.String() + ":0"
		}
	}
	if at == "" {
		if os.Getenv("CI") != "" {
			t.Fatal("no IPv4 address but loopback")
		}
		t.Skip("this machine has no IPv4 address but loopback, of which no limit for an address holds")
	}
	// Enough for what the roles say to each other.
	const most = 24
	limit := []string{"--insecure", "--http-listen=127.0.0.1:0", fmt.Sprintf("--max-connections-per-address=%d", most)}
	env, _ := runtimeDir(t)
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=" + at,
			"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s"}, limit...)...)
	m := start(t, env,
		append([]string{"memnode", "--name=m", "--directory=" + d.kv["directory"], "--memory=64MiB", "--shm-socket=off",
			"--listen-tcp=" + at}, limit...)...)
	createNamespace(t, d.kv["directory"], "cache", nil)
	g := start(t, env,
		append([]string{"gateway", "--directory=" + d.kv["directory"], "--listen=" + at, "--listen-memcached=" + at},
			limit...)...)
	for _, x := range []struct {
		p              *process
		key, name, say string
	}{
		{g, "redis", "redis", ""}, {g, "memcached", "memcached", ""},
		{m, "tcp", "tcp", ""},
		{d, "directory", "grpc", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"},
	} {
		conns := attack(t, x.p.kv[x.key], 2*most, []byte(x.say))
		// Those whose handshake is not over give way to each other.
		counted := regexp.MustCompile(fmt.Sprintf(`(?m)^kvd_listener_connections_refused_total\{listener="%s",reason="(address|handshake)"\} [1-9]`, x.name))
		open := regexp.MustCompile(fmt.Sprintf(`(?m)^kvd_listener_connections\{listener="%s"\} (\d+)$`, x.name))
		testutil.UntilNone(t, fmt.Sprintf("%s: %d are open, and refused ones counted", x.name, most), func() string {
			page := metricsOf(t, x.p.kv["http"])
			n := open.FindStringSubmatch(page)
			if counted.MatchString(page) && n != nil && n[1] == fmt.Sprint(most) {
				return ""
			}
			return fmt.Sprintf("open: %v", n)
		})
		for _, c := range conns {
			_ = c.Close()
		}
	}
}

// TestServersOfListeners: a gateway that serves one protocol has the descriptors of both for it.
func TestServersOfListeners(t *testing.T) {
	for _, x := range []struct {
		names []string
		want  int
	}{{nil, 1}, {[]string{"redis"}, 1}, {[]string{"memcached"}, 1}, {[]string{"redis", "tls", "unix"}, 1},
		{[]string{"memcached", "unix"}, 2}} {
		l := make(listeners)
		for _, name := range x.names {
			l[name] = new(net.TCPListener)
		}
		if n := l.servers(); n != x.want {
			t.Errorf("%v: %d servers, want %d", x.names, n, x.want)
		}
	}
}
