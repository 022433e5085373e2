// Package webget asks a process for one page, as `kvd health` and `kvctl support bundle` do.
//
// It leaves what the page means to its caller. Start with [Get], which may be called concurrently; the bytes that it
// gives are the caller's. Each question has a connection of its own, as in HTTP/1.0 (RFC 1945). http.Client would keep
// connections, follow redirects and know proxies, which nobody needs here. It is the larger part of net/http.
package webget

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/units"
)

// headBytes bounds what comes before a page.
const headBytes = 64 << 10

// Get gives the status and the page at u, which is http or https; creds are for the latter, nil for the system's
// authorities. A page longer than limit bytes is an error. Errors name u.
func Get(ctx context.Context, u *url.URL, creds *tls.Config, limit int) (status int, page []byte, err error) {
	status, page, err = get(ctx, u, creds, limit)
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w", u.Redacted(), cmp.Or(ctx.Err(), err))
	}
	return status, page, nil
}

func get(ctx context.Context, u *url.URL, creds *tls.Config, limit int) (status int, page []byte, err error) {
	dial := new(net.Dialer).DialContext
	switch u.Scheme {
	case "http":
	case "https":
		if creds != nil {
			if creds, err = certs.ForHost(creds, u.Hostname()); err != nil {
				return 0, nil, err
			}
		}
		dial = (&tls.Dialer{Config: creds}).DialContext
	default:
		return 0, nil, fmt.Errorf("scheme %q: want http or https", u.Scheme)
	}
	conn, err := dial(ctx, "tcp", net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), u.Scheme)))
	if err != nil {
		return 0, nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	q := &http.Request{Method: http.MethodGet, URL: u, Close: true}
	if err := q.Write(conn); err != nil {
		return 0, nil, err
	}
	in := &io.LimitedReader{R: conn, N: headBytes}
	r, err := http.ReadResponse(bufio.NewReader(in), q)
	if err != nil && in.N == 0 {
		err = fmt.Errorf("more than %s come before the page", units.Bytes(headBytes))
	}
	if err != nil {
		return 0, nil, err
	}
	defer r.Body.Close()
	in.N = math.MaxInt64 // the page has a limit of its own
	page, err = io.ReadAll(io.LimitReader(r.Body, int64(limit)+1))
	if err == nil && len(page) > limit {
		err = fmt.Errorf("the page is longer than %s", units.Bytes(limit))
	}
	return r.StatusCode, page, err
}
