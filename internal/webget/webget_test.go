package webget

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const limit = 1000

// TestGet: pages of any form, but for those that are too long, as Go's server sends them.
func TestGet(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /page", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.Proto, r.URL.RawQuery)
	})
	mux.HandleFunc("GET /parts", func(w http.ResponseWriter, _ *http.Request) {
		for range 10 {
			_, _ = io.WriteString(w, strings.Repeat("x", limit/10))
			_ = http.NewResponseController(w).Flush()
		}
	})
	mux.HandleFunc("GET /long", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, strings.Repeat("x", limit+1))
	})
	mux.HandleFunc("GET /away", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/page", http.StatusFound)
	})
	a := identitytest.New(t)
	clear, secret := httptest.NewServer(mux), httptest.NewUnstartedServer(mux)
	defer clear.Close()
	secret.TLS = a.Config(a.Role("gateway", "g"))
	secret.EnableHTTP2 = true // which Get does not ask for
	secret.StartTLS()
	defer secret.Close()
	ca, cert, key := a.Files(a.Role("operator", "o"))
	files := certs.Files{CA: ca, Cert: cert, Key: key}
	fixed, err := files.LoadConfig()
	if err != nil {
		t.Fatal(err)
	}
	followed, err := certs.Open(certs.Options{Files: files})
	if err != nil {
		t.Fatal(err)
	}
	for _, from := range []struct {
		base  string
		creds *tls.Config
	}{{clear.URL, nil}, {clear.URL, fixed}, {secret.URL, fixed}, {secret.URL, followed.Config()}} {
		for _, c := range []struct {
			path   string
			status int
			page   string
			err    string
		}{
			{"/page?debug=1", 200, "HTTP/1.1 debug=1", ""},
			{"/parts", 200, strings.Repeat("x", limit), ""},
			{"/long", 0, "", "longer than 1000 bytes"},
			{"/none", 404, "404 page not found\n", ""},
			{"/away", 302, `<a href="/page">Found</a>.` + "\n\n", ""},
		} {
			u, err := url.Parse(from.base + c.path)
			if err != nil {
				t.Fatal(err)
			}
			status, page, err := Get(t.Context(), u, from.creds, limit)
			if status != c.status || string(page) != c.page || (err == nil) != (c.err == "") || err != nil &&
				(!strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), u.String())) {
				t.Errorf("%s: %d, %q, %v", u, status, page, err)
			}
		}
	}
}

// TestGetOfOthers: whoever does not answer as a web server does is an error in bounded time and memory, which names the
// address.
func TestGetOfOthers(t *testing.T) {
	endless := strings.Repeat("X-Header: x\r\n", 1+headBytes/13)
	for _, c := range []struct{ name, says, err string }{
		{"silence", "", context.DeadlineExceeded.Error()},
		{"half a head", "HTTP/1.1 200 OK\r\nContent-", context.DeadlineExceeded.Error()},
		{"half a page", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", context.DeadlineExceeded.Error()},
		{"another protocol", "-ERR unknown command\r\n", "malformed HTTP"},
		{"an endless head", "HTTP/1.1 200 OK\r\n" + endless, "more than 64 KiB come before the page"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lis := testutil.Listen(t)
			done := make(chan struct{})
			go func() {
				defer close(done)
				conn, err := lis.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(conn, c.says)
				_, _ = io.Copy(io.Discard, conn) // until Get closes it
				_ = conn.Close()
			}()
			defer func() { <-done }()
			patience := 10 * time.Second
			if c.err == context.DeadlineExceeded.Error() {
				patience = 100 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if status, page, err := Get(ctx, &url.URL{Scheme: "http", Host: lis.Addr().String()}, nil, limit); err ==
				nil ||
				!strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), lis.Addr().String()) {
				t.Errorf("%d, %q, %v; want %q", status, page, err, c.err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := Get(ctx, &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, nil, limit); !errors.Is(
		err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	if _, _, err := Get(t.Context(), &url.URL{Scheme: "ftp", Host: "127.0.0.1:1"}, nil, limit); err == nil ||
		!strings.Contains(err.Error(), "want http or https") {
		t.Errorf("ftp: %v", err)
	}
}
