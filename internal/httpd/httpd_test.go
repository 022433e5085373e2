package httpd

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/internal/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, o Options) *Server {
	t.Helper()
	o.Addr, o.Role, o.Version = cmp.Or(o.Addr, "127.0.0.1:0"), "gateway", "v1 <test>"
	s, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if err := errors.Join(s.Close(), s.Close()); err != nil {
			t.Error(err)
		}
	})
	return s
}

func get(t *testing.T, s *Server, path string) (code int, body string, h http.Header) {
	t.Helper()
	r, err := http.Get("http://" + s.Addr() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b), r.Header
}

func TestReady(t *testing.T) {
	s := start(t, Options{})
	want := func(code int, text, metric string) {
		t.Helper()
		if c, b, _ := get(t, s, "/readyz"); c != code || b != text+"\n" {
			t.Errorf("readyz: %d %q, want %d %q", c, b, code, text)
		}
		if _, b, _ := get(t, s, "/metrics"); !strings.Contains(b, "\n"+metric+"\n") {
			t.Errorf("metrics lack %q", metric)
		}
		if c, b, _ := get(t, s, "/healthz"); c != 200 || b != "ok\n" {
			t.Errorf("healthz: %d %q", c, b)
		}
	}
	want(503, "starting", "kvd_ready 0")
	s.Serving(func() error { return nil }, nil)
	want(200, "ok", "kvd_ready 1")
	s.Serving(func() error { return errors.New("no leader") }, nil)
	want(503, "no leader", "kvd_ready 0")
}

func TestMetrics(t *testing.T) {
	s := start(t, Options{})
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "kvd_test_total", Help: "Test."})
	if err := s.Register(c); err != nil {
		t.Fatal(err)
	}
	if err := s.Register(c); err == nil {
		t.Error("registered twice")
	}
	c.Add(3)
	_, b, _ := get(t, s, "/metrics")
	for _, w := range []string{"kvd_test_total 3\n", `kvd_build_info{goversion="go1.`, `role="gateway"`,
		"go_goroutines ", "process_resident_memory_bytes "} {
		if !strings.Contains(b, w) {
			t.Errorf("metrics lack %q", w)
		}
	}
}

func TestPaths(t *testing.T) {
	s := start(t, Options{})
	for path, want := range map[string]int{
		"/debug/pprof/": 200, "/debug/pprof/goroutine?debug=1": 200, "/debug/pprof/heap": 200,
		"/debug/pprof/profile?seconds=1": 200,
		"/":                              200, "/state.json": 200, "/console.js": 200, "/console.css": 200,
		"/debug/pprof/cmdline": 404, "/none": 404, "/metrics/x": 404,
	} {
		if code, _, _ := get(t, s, path); code != want {
			t.Errorf("GET %s: %d, want %d", path, code, want)
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE"} {
		q, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.Addr()+"/metrics", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		r, err := http.DefaultClient.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Body.Close()
		if r.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, r.StatusCode)
		}
	}
}

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Requests that are not, or too long, get an answer or are hung up on.
func TestHostile(t *testing.T) {
	s := start(t, Options{Logger: slog.New(slog.NewTextHandler(new(buffer), nil))})
	for _, q := range []string{
		"\x00\x01\x02\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "*1\r\n$4\r\nPING\r\n",
		"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("x", headerBytes+8<<10) + "\r\n\r\n",
		"GET /" + strings.Repeat("x", headerBytes+8<<10) + " HTTP/1.1\r\nHost: localhost\r\n\r\n",
	} {
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		if err := c.SetDeadline(time.Now().Add(testutil.Limit)); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, q) // it may be hung up on
		b, _ := io.ReadAll(c)       // a reset is an answer too
		if strings.HasPrefix(string(b), "HTTP/1.1 2") {
			t.Errorf("%.20q: answered %.40q", q, b)
		}
		_ = c.Close()
	}
	if code, _, _ := get(t, s, "/healthz"); code != 200 {
		t.Errorf("afterwards: %d", code)
	}
}

// TestCrowd: connections that do nothing, begin a request and do not end it, or do not read the
// answer keep nobody from asking for health.
func TestCrowd(t *testing.T) {
	for name, say := range map[string]string{
		"silent":     "",
		"idle":       "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"half":       "GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
		"deaf":       strings.Repeat("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
		"long":       "GET /debug/pprof/trace?seconds=60 HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"deaf page":  strings.Repeat("GET /debug/pprof/goroutine?debug=2 HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
		"post":       "POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
		"deaf probe": strings.Repeat("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 1000),
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, Options{})
			s.Serving(func() error { return nil }, nil)
			for range 3 * maxConns {
				c, err := net.Dial("tcp", s.Addr())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				go io.WriteString(c, say)
			}
			probe := http.Client{Timeout: testutil.Limit, Transport: &http.Transport{DisableKeepAlives: true}}
			for range 20 {
				for _, path := range []string{"/healthz", "/readyz"} {
					began := time.Now()
					r, err := probe.Get("http://" + s.Addr() + path)
					if err != nil {
						t.Fatal(err)
					}
					_ = r.Body.Close()
					if took := time.Since(began); r.StatusCode != 200 || took > 10*time.Second {
						t.Fatalf("%s: %d after %v", path, r.StatusCode, took)
					}
				}
			}
		})
	}
}

// TestAbortedScrape: a client that goes while it is sent metrics is worth one line.
func TestAbortedScrape(t *testing.T) {
	var log buffer
	s := start(t, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for i := range 500 { // more than sockets hold
		if err := s.Register(
			prometheus.NewCounter(prometheus.CounterOpts{Name: fmt.Sprint("kvd_test_", i, "_total"),
				Help: strings.Repeat("x", 20_000)})); err != nil {
			t.Fatal(err)
		}
	}
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	testutil.Until(t, "it is told", func() bool {
		text := log.String()
		n := strings.Count(text, "\n")
		if n > 1 || n == 1 && !strings.Contains(text, "did not wait for the metrics") {
			t.Fatalf("%d lines: %s", n, text)
		}
		return n == 1
	})
	if code, _, _ := get(t, s, "/healthz"); code != 200 {
		t.Errorf("afterwards: %d", code)
	}
}

func TestNone(t *testing.T) {
	var s *Server
	s.Serving(nil, nil)
	if err := errors.Join(s.Register(nil), s.Close()); err != nil || s.Addr() != "" {
		t.Error(err, s.Addr())
	}
	taken := start(t, Options{})
	if _, err := Start(t.Context(), Options{Addr: taken.Addr()}); err == nil {
		t.Error("two servers at one address")
	}
}
