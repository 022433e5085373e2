// Package netsrv accepts connections for the servers of other people's protocols
// (RESP, memcached) and keeps the books: how many there are, that there are not
// more than allowed, and that none outlives the server.
//
// A [Budget] bounds the memory that they have in flight, whichever of the servers they belong to.
//
// It leaves what is said on a connection to Options.Handle, which has it for
// itself until it returns. Start with [Server]; its methods may be called
// concurrently.
package netsrv

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// Options configure a Server.
type Options struct {
	// MaxConns is how many connections may be open at a time, over all listeners.
	// Default 10,000.
	MaxConns int
	// Handle serves one connection, in a goroutine of its own; the Server closes
	// the connection afterwards. When the Server is closed, so is every connection,
	// and Handle must return soon. Required.
	Handle func(net.Conn)
	// Refuse, if not nil, may say last words to a connection over the limit. It runs
	// in the goroutine that accepts, and the connection has a write deadline already.
	Refuse func(net.Conn)
	// Logger receives background errors and warnings. Default: discard.
	Logger *slog.Logger
}

const (
	keepAlive     = 30 * time.Second
	refuseTimeout = 100 * time.Millisecond
	// Out of file descriptors, accept fails at once, again and again.
	minBackoff, maxBackoff = 5 * time.Millisecond, time.Second
)

// ErrClosed: the Server has been closed.
var ErrClosed = errors.New("server closed")

// Server serves any number of listeners.
type Server struct {
	o                 Options
	done              chan struct{}
	accepted, refused atomic.Uint64
	open              atomic.Int64

	mu struct {
		sync.Mutex
		closed    bool
		listeners map[net.Listener]struct{}
		conns     map[net.Conn]struct{}
	}
	wg sync.WaitGroup // Serve and Handle calls
}

// New makes a Server without listeners.
func New(o Options) (*Server, error) {
	if o.MaxConns == 0 {
		o.MaxConns = 10_000
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	var errs []error
	if o.MaxConns < 0 {
		errs = append(errs, fmt.Errorf("MaxConns: %d: must be positive", o.MaxConns))
	}
	if o.Handle == nil {
		errs = append(errs, errors.New("Handle: missing"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	s := &Server{o: o, done: make(chan struct{})}
	s.mu.listeners = make(map[net.Listener]struct{})
	s.mu.conns = make(map[net.Conn]struct{})
	return s, nil
}

// Serve accepts from l, which it closes, until the Server is closed (nil) or
// accepting fails for good. It may run for several listeners at once.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	s.mu.Lock()
	if s.mu.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.mu.listeners[l] = struct{}{}
	s.wg.Add(1)
	s.mu.Unlock()
	defer s.wg.Done()
	defer func() {
		s.mu.Lock()
		delete(s.mu.listeners, l)
		s.mu.Unlock()
	}()

	backoff := minBackoff
	for {
		c, err := l.Accept()
		if err == nil {
			backoff = minBackoff
			s.start(c)
			continue
		}
		select {
		case <-s.done:
			return nil
		default:
		}
		if errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("accept on %s: %w", l.Addr(), err)
		}
		s.o.Logger.Warn("accept failed", "listener", l.Addr(), "error", err, "retry", backoff)
		select {
		case <-time.After(backoff):
		case <-s.done:
			return nil
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

func (s *Server) start(c net.Conn) {
	s.mu.Lock()
	full := len(s.mu.conns) >= s.o.MaxConns
	if !s.mu.closed && !full {
		s.mu.conns[c] = struct{}{}
		s.wg.Add(1)
		s.mu.Unlock()
		s.accepted.Add(1)
		s.open.Add(1)
		go s.handle(c)
		return
	}
	s.mu.Unlock()
	s.refused.Add(1)
	if full && s.o.Refuse != nil {
		c.SetDeadline(time.Now().Add(refuseTimeout))
		s.o.Refuse(c)
	}
	c.Close()
}

func (s *Server) handle(c net.Conn) {
	defer s.wg.Done()
	defer func() {
		s.mu.Lock()
		delete(s.mu.conns, c)
		s.mu.Unlock()
		s.open.Add(-1)
		c.Close()
		// A request of one connection must not end the process that serves the others.
		if r := recover(); r != nil {
			s.o.Logger.Error("bug: handler panicked", "peer", c.RemoteAddr(), "panic", r, "stack", string(debug.Stack()))
		}
	}()
	if t, ok := c.(interface{ NetConn() net.Conn }); ok { // *tls.Conn
		tune(t.NetConn())
	} else {
		tune(c)
	}
	s.o.Handle(c)
}

// tune fails on a connection that is gone; its handler will notice.
func tune(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		t.SetNoDelay(true)
		t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepAlive, Interval: keepAlive, Count: 3})
	}
}

// Close closes the listeners and the connections, and waits until every Handle and
// Serve has returned. Later calls wait too.
func (s *Server) Close() error {
	s.mu.Lock()
	if !s.mu.closed {
		s.mu.closed = true
		close(s.done)
		for l := range s.mu.listeners {
			l.Close()
		}
		for c := range s.mu.conns {
			c.Close()
		}
	}
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// Conns is how many connections are open.
func (s *Server) Conns() int { return int(s.open.Load()) }

// Accepted counts the connections that were handed to Handle.
func (s *Server) Accepted() uint64 { return s.accepted.Load() }

// Refused counts the connections over the limit.
func (s *Server) Refused() uint64 { return s.refused.Load() }
