package httpd

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// maxConns bounds connections. A further one replaces the connection that has done nothing for longest.
	maxConns = 64
	// maxBusy bounds the requests that are answered at a time, but for those about health, which
	// are answered at any time.
	maxBusy = 16
)

// crowd is a listener of which no more than maxConns connections are open at a time. New ones are not
// made to wait for old ones that do nothing, so that questions for health are answered, whoever
// else has connections here.
type crowd struct {
	net.Listener
	busy chan struct{} // a token for each request that is not about health

	mu struct {
		sync.Mutex
		guests map[*guest]struct{}
	}
}

// guest is a connection. Its fields are guarded by crowd.mu.
type guest struct {
	net.Conn
	of    *crowd
	busy  bool      // it has a request
	since time.Time // when it had not, last
}

func newCrowd(l net.Listener) *crowd {
	c := &crowd{Listener: l, busy: make(chan struct{}, maxBusy)}
	c.mu.guests = make(map[*guest]struct{})
	return c
}

func (c *crowd) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return nil, err
		}
		g := &guest{Conn: conn, of: c, since: time.Now()}
		if goes := c.addGuest(g); goes != nil {
			_ = goes.Close() // nobody needs it
			if goes == g {
				continue
			}
		}
		return g, nil
	}
}

// addGuest adds g and returns who has to go, if anybody has: g itself if all others are busy.
func (c *crowd) addGuest(g *guest) (goes *guest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.mu.guests) >= maxConns {
		goes = g
		for x := range c.mu.guests {
			if !x.busy && x.since.Before(goes.since) {
				goes = x
			}
		}
		delete(c.mu.guests, goes)
	}
	if goes != g {
		c.mu.guests[g] = struct{}{}
	}
	return goes
}

func (g *guest) Close() error {
	g.of.mu.Lock()
	delete(g.of.mu.guests, g)
	g.of.mu.Unlock()
	return g.Conn.Close()
}

func (g *guest) setBusy(busy bool) {
	g.of.mu.Lock()
	defer g.of.mu.Unlock()
	g.busy, g.since = busy, time.Now()
}

type guestKey struct{}

// connContext is http.Server's: it tells the handler which guest asks.
func connContext(ctx context.Context, conn net.Conn) context.Context {
	if t, ok := conn.(interface{ NetConn() net.Conn }); ok { // *tls.Conn
		conn = t.NetConn()
	}
	return context.WithValue(ctx, guestKey{}, conn)
}

// handler lets h answer, health at any time and no more than maxBusy other requests at a time.
func (c *crowd) handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g, ok := r.Context().Value(guestKey{}).(*guest); ok {
			g.setBusy(true)
			defer g.setBusy(false)
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
