// Package netsrv accepts connections, and keeps the books. The books say how many there are in all and of
// each address. There are not more than allowed, and handshakes end.
//
// A [Door] does that for every listener of the store. A [Server] adds what the servers of other people's
// protocols (RESP, memcached) need: a goroutine for each connection, which does not outlive the server.
// A [Budget] bounds the memory that their connections have in flight, whichever of the servers they belong to.
//
// It leaves what is said on a connection to Options.Handle, which has it for
// itself until it returns. Start with [Limits] and [Door]; all methods may be called
// concurrently.
package netsrv

import (
	"crypto/tls"
	"errors"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// Options configure a Server.
type Options struct {
	// Limits hold over all listeners. A handshake is TLS's; in clear there is none.
	Limits
	// Handle serves one connection, in a goroutine of its own; the Server closes
	// the connection afterwards. When the Server is closed, so is every connection,
	// and Handle must return soon. Required.
	Handle func(net.Conn)
}

const (
	keepAlive     = 30 * time.Second
	refuseTimeout = 100 * time.Millisecond
	// Out of file descriptors, accept fails at once, again and again.
	minBackoff, maxBackoff = 5 * time.Millisecond, time.Second
)

// Server serves any number of listeners.
type Server struct {
	o    Options
	door *Door
	done chan struct{}
	open atomic.Int64

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
	door, err := NewDoor(o.Limits)
	if err == nil {
		o.Limits = door.o
	}
	if o.Handle == nil {
		err = errors.Join(err, errors.New("Handle: missing"))
	}
	if err != nil {
		return nil, err
	}
	s := &Server{o: o, door: door, done: make(chan struct{})}
	s.mu.listeners = make(map[net.Listener]struct{})
	s.mu.conns = make(map[net.Conn]struct{})
	return s, nil
}

// Serve accepts from l, which it closes, until the Server is closed or accepting fails for good. It returns nil when
// the Server is closed, also when that came first. It may run for several listeners at once.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	s.mu.Lock()
	if s.mu.closed {
		s.mu.Unlock()
		return nil
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

	for {
		c, g, err := s.door.Accept(l, s.done)
		if err == nil {
			s.start(c, g)
			continue
		}
		select {
		case <-s.done:
			return nil
		default:
			return err
		}
	}
}

func (s *Server) start(c net.Conn, g *Guest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, isTLS := rawConn(c)
	if s.mu.closed || !isTLS && !g.Finish() { // in clear there is no handshake
		c.Close()
		g.Release()
		return
	}
	s.mu.conns[c] = struct{}{}
	s.wg.Add(1)
	s.open.Add(1)
	go s.handle(c, g)
}

func (s *Server) handle(c net.Conn, g *Guest) {
	defer s.wg.Done()
	defer func() {
		s.mu.Lock()
		delete(s.mu.conns, c)
		s.mu.Unlock()
		s.open.Add(-1)
		c.Close()
		g.Release()
		// A request of one connection must not end the process that serves the others.
		if r := recover(); r != nil {
			s.o.Logger.Error("bug: handler panicked", "peer", c.RemoteAddr(), "panic", r, "stack",
				string(debug.Stack()))
		}
	}()
	raw, _ := rawConn(c)
	tune(raw)
	if t, ok := c.(*tls.Conn); ok && (t.Handshake() != nil || !g.Finish()) {
		return // a stranger, or one that took too long
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

// Accepted counts the connections that were let in.
func (s *Server) Accepted() uint64 { return s.door.accepted.Load() }

// Refused counts the connections over a limit: refused, or gone from their handshake for another.
func (s *Server) Refused() (n uint64) {
	for _, r := range []Reason{ReasonFull, ReasonAddress, ReasonHandshake} {
		n += s.door.refused[r].Load()
	}
	return n
}

// Door counts the Server's connections.
func (s *Server) Door() *Door { return s.door }
