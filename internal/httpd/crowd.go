package httpd

import (
	"context"
	"net"
	"net/http"

	"github.com/kvd-project/kvd/internal/netsrv"
)

const (
	// maxConns bounds connections. A further one replaces one that does nothing; see netsrv.Door. So new ones do
	// not wait for old ones, and questions for health are answered, whoever else has connections here.
	maxConns = 64
	// maxBusy bounds the requests that are answered at a time, but for those about health, which
	// are answered at any time.
	maxBusy = 16
)

// crowd are those who ask.
type crowd struct {
	busy chan struct{} // a token for each request that is not about health
}

func newCrowd() *crowd { return &crowd{busy: make(chan struct{}, maxBusy)} }

type guestKey struct{}

// connContext is http.Server's: it tells the handler which guest asks.
func connContext(ctx context.Context, conn net.Conn) context.Context {
	if t, ok := conn.(interface{ NetConn() net.Conn }); ok { // *tls.Conn
		conn = t.NetConn()
	}
	if c, ok := conn.(*netsrv.Conn); ok {
		ctx = context.WithValue(ctx, guestKey{}, c.Guest)
	}
	return ctx
}

// handler lets h answer, health at any time and no more than maxBusy other requests at a time.
func (c *crowd) handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g, ok := r.Context().Value(guestKey{}).(*netsrv.Guest); ok {
			g.Finish() // with the first request; http.Server bounds the time for others
			g.SetBusy(true)
			defer g.SetBusy(false)
		}
		if r.URL.Path != "/healthz" && r.URL.Path != "/readyz" {
			select {
			case c.busy <- struct{}{}:
				defer func() { <-c.busy }()
			default:
				w.Header().Set("Connection", "close")
				say(w, http.StatusServiceUnavailable, "too many requests at a time")
				return
			}
		}
		h.ServeHTTP(w, r)
	})
}
