package httpd

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
)

// TestRights: beyond loopback, everybody with a certificate may ask about health, and operators alone about the
// rest. Without TLS everybody may, but for profiles.
func TestRights(t *testing.T) {
	a := identitytest.New(t)
	of := func(role string) *tls.Config { return a.Config(a.Role(role, "it")) }
	unit := a.Config(a.Leaf(func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: "ann", OrganizationalUnit: []string{"sre"}}
	}))
	private := []string{"/", "/metrics", "/debug/pprof/", "/debug/pprof/goroutine?debug=1", "/debug/pprof/symbol", "/debug/pprof/trace?seconds=0.01", "/debug/pprof/cmdline", "/none"}
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
		{"a client over loopback", "127.0.0.1:0", true, of("client"), 0, "", 0},
		{"loopback in clear", "127.0.0.1:0", false, nil, 0, "", 0},
		{"in clear", "0.0.0.0:0", false, nil, 0, "", 403},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var log buffer
			o := Options{Addr: tc.addr, Identities: identity.Mapping{Units: map[string]identity.Role{"sre": identity.Operator}}, Logger: slog.New(slog.NewTextHandler(&log, nil))}
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
				if r.ProtoMajor != 1 { // a connection with several requests at a time counted as idle when the first is answered
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
	s := start(t, Options{Addr: "0.0.0.0:0", TLS: a.Config(a.Role("memnode", "m")), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	_, port, err := net.SplitHostPort(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	c := http.Client{Transport: &http.Transport{TLSClientConfig: a.Config(a.Role("client", "eve")), DisableKeepAlives: true}}
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
