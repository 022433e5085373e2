package httpd

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
)

// TestRights: everybody with a certificate may ask about health, and operators alone about the rest, on loopback too.
// Without TLS everybody may, but for profiles beyond loopback.
func TestRights(t *testing.T) {
	a := identitytest.New(t)
	of := func(role string) *tls.Config { return a.Config(a.Role(role, "it")) }
	unit := a.Config(a.Leaf(func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: "ann", OrganizationalUnit: []string{"sre"}}
	}))
	private := []string{"/", "/metrics", "/debug/pprof/", "/debug/pprof/goroutine?debug=1", "/debug/pprof/symbol",
		"/debug/pprof/trace?seconds=0.01", "/debug/pprof/cmdline", "/none"}
	health := []string{"/healthz", "/readyz"}
	const denied = "spiffe://test.example/kvd/client/it has the role client, and "
	for _, tc := range []struct {
		name, addr string
		tls        bool
		as         *tls.Config
		code       int // of private; 0: anything but 401 and 403
		says       string
		pprof      int // likewise, if it differs
	}{
		{"an operator", "0.0.0.0:0", true, of("operator"), 0, "", 0},
		{"a client", "0.0.0.0:0", true, of("client"), 403, denied, 403},
		{"a directory node", "0.0.0.0:0", true, of("directory"), 403, "is for operator", 403},
		{"no identity", "0.0.0.0:0", true, a.Config(a.Leaf()), 401, "no SPIFFE id", 401},
		{"a unit", "0.0.0.0:0", true, unit, 0, "", 0},
		{"a client over loopback", "127.0.0.1:0", true, of("client"), 403, denied, 403},
		{"a memory node over loopback", "127.0.0.1:0", true, of("memnode"), 403, "is for operator", 403},
		{"no identity over loopback", "127.0.0.1:0", true, a.Config(a.Leaf()), 401, "no SPIFFE id", 401},
		{"an operator over loopback", "127.0.0.1:0", true, of("operator"), 0, "", 0},
		{"loopback in clear", "127.0.0.1:0", false, nil, 0, "", 0},
		{"in clear", "0.0.0.0:0", false, nil, 0, "", 403},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var log buffer
			o := Options{Addr: tc.addr, Identities: identity.Mapping{
				Units: map[string]identity.Role{"sre": identity.Operator}},
				Logger: slog.New(slog.NewTextHandler(&log, nil))}
			scheme := "http"
			if tc.tls {
				o.TLS = of("gateway")
				scheme = "https"
			}
			s := start(t, o)
			s.Serving(func() error { return nil }, nil)
			_, port, err := net.SplitHostPort(s.Addr())
			if err != nil {
				t.Fatal(err)
			}
			c := http.Client{Transport: &http.Transport{TLSClientConfig: tc.as, ForceAttemptHTTP2: true}}
			defer c.CloseIdleConnections()
			ask := func(path string) (int, string) {
				t.Helper()
				r, err := c.Get(scheme + "://127.0.0.1:" + port + path)
				if err != nil {
					t.Fatal(err)
				}
				defer r.Body.Close()
				if r.ProtoMajor != 1 {
					// a connection with several requests at a time counted as idle when the first is answered
					t.Errorf("%s: %s", path, r.Proto)
				}
				b, err := io.ReadAll(r.Body)
				if err != nil {
					t.Fatal(err)
				}
				return r.StatusCode, string(b)
			}
			for _, path := range health {
				if code, b := ask(path); code != 200 {
					t.Errorf("%s: %d %s", path, code, b)
				}
			}
			for _, path := range private {
				want := tc.code
				if strings.HasPrefix(path, "/debug/pprof") {
					want = tc.pprof
				}
				code, b := ask(path)
				switch {
				case want == 0 && (code == 401 || code == 403):
					t.Errorf("%s: refused: %d %.200s", path, code, b)
				case want != 0 && (code != want || strings.Count(b, "\n") != 1 || !strings.Contains(b, tc.says)):
					t.Errorf("%s: %d %.200q, want %d and a line with %q", path, code, b, want, tc.says)
				}
			}
			if refused := strings.Count(log.String(), "a request was refused"); (refused > 0) != (tc.pprof != 0) {
				t.Errorf("%d refusals are logged:\n%s", refused, &log)
			}
		})
	}
}

// A refusal does not repeat what the caller said.
func TestRefusalIsShort(t *testing.T) {
	a := identitytest.New(t)
	var log buffer
	s := start(t, Options{Addr: "0.0.0.0:0", TLS: a.Config(a.Role("memnode", "m")),
		Logger: slog.New(slog.NewTextHandler(&log, nil))})
	_, port, err := net.SplitHostPort(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	c := http.Client{Transport: &http.Transport{TLSClientConfig: a.Config(a.Role("client", "eve")),
		DisableKeepAlives: true}}
	r, err := c.Get("https://127.0.0.1:" + port + "/" + strings.Repeat("x", 8000))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusForbidden || len(b) > 500 || bytes.Contains(b, []byte("xxx")) {
		t.Errorf("%d, %d bytes: %.600s, %v", r.StatusCode, len(b), b, err)
	}
	if l := log.String(); len(l) > 1000 || !strings.Contains(l, "kvd/client/eve") {
		t.Errorf("%d bytes in the log: %.1100s", len(l), l)
	}
}

// TestForeignHost: on loopback no path answers a request for another name, as a browser sends it for a page whose name
// was made to mean this machine. Elsewhere names are the operator's choice.
func TestForeignHost(t *testing.T) {
	a := identitytest.New(t)
	for _, at := range []struct {
		addr string
		tls  bool
		any  bool // every name is answered
	}{{"127.0.0.1:0", false, false}, {"127.0.0.1:0", true, false}, {"[::1]:0", false, false},
		{"0.0.0.0:0", false, true}, {"0.0.0.0:0", true, true}} {
		t.Run(fmt.Sprint(at.addr, " tls ", at.tls), func(t *testing.T) {
			o, c, scheme := Options{Addr: at.addr}, http.Client{}, "http://"
			if at.tls {
				o.TLS, scheme = a.Config(a.Role("gateway", "g")), "https://"
				c.Transport = &http.Transport{TLSClientConfig: a.Config(a.Role("operator", "o"))}
			}
			if l, err := net.Listen("tcp", at.addr); err != nil {
				if at.addr != "[::1]:0" {
					t.Fatal(err)
				}
				t.Skipf("this machine has no IPv6: %v", err)
			} else {
				l.Close()
			}
			s := start(t, o)
			defer c.CloseIdleConnections()
			s.Serving(func() error { return nil }, nil)
			_, port, err := net.SplitHostPort(s.Addr())
			if err != nil {
				t.Fatal(err)
			}
			to := "127.0.0.1:" + port
			if at.addr[0] == '[' {
				to = "[::1]:" + port
			}
			for _, path := range []string{"/", "/metrics", "/state.json", "/healthz", "/readyz", "/console.js",
				"/debug/pprof/", "/debug/pprof/symbol", "/none"} {
				for host, local := range map[string]bool{
					"localhost": true, "localhost:" + port: true, "LOCALHOST": true, "127.0.0.1": true, "127.0.0.1:" +
						port: true, "127.1.2.3:9": true, "[::1]": true, "[::1]:" + port: true,
					"10.0.0.9:80": true, "evil.example": false, "evil.example:" + port: false,
					"localhost.evil.example": false, "127.0.0.1.evil.example": false, "localhost.": false,
					"evil.localhost": false, "127.1": false, "2130706433": false, "0x7f000001": false,
					"[evil.example]:80": false, ":" + port: false, "127.0.0.1@evil.example": false,
				} {
					q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, scheme+to+path, nil)
					if err != nil {
						t.Fatal(err)
					}
					q.Host = host
					r, err := c.Do(q)
					if err != nil {
						t.Fatal(err)
					}
					b, err := io.ReadAll(r.Body)
					r.Body.Close()
					switch refused := r.StatusCode == http.StatusMisdirectedRequest; {
					case err != nil:
						t.Fatal(err)
					case refused != (!local && !at.any):
						t.Errorf("%s of %q: %d %.80q", path, host, r.StatusCode, b)
					case refused && (strings.Count(string(b), "\n") != 1 || strings.Contains(string(b), "evil")):
						t.Errorf("%s of %q: it says %q", path, host, b)
					}
				}
			}
		})
	}
	// A request of HTTP/1.0 need not name a host, and then names none that is good.
	s := start(t, Options{})
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); err != nil || !strings.HasPrefix(string(b), "HTTP/1.0 421 ") {
		t.Errorf("without a host: %.80q, %v", b, err)
	}
}
