package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/kvd-project/kvd/internal/certs"
)

const (
	// handshakeTimeout is also how long a caller may take to say something: raft's own
	// nodes call when they have something to say.
	handshakeTimeout = 10 * time.Second
	// maxInbound bounds the connections that callers hold. Other directory nodes hold
	// fewer than ten each.
	maxInbound = 128
	// inboundBytes is about what raft takes for one that has said something.
	inboundBytes = 288 << 10
)

// streams is raft's stream layer over TCP or TLS. It closes every connection when
// it is closed: raft's own transport leaves the handlers of accepted
// connections reading until the peer hangs up.
//
// Anybody who reaches the listener can connect, and raft takes a large buffer for every
// connection that it is handed, for as long as it lives. So it is handed only those that
// have shown a certificate, if there is TLS, and sent a byte, and there are at most
// maxInbound: one more costs the host that has most of them one, a silent one if there
// is any, else the one that was silent for longest.
type streams struct {
	net.Listener
	advertise net.Addr
	server    *tls.Config // nil: plain TCP
	client    *tls.Config
	log       *slog.Logger
	ready     chan *streamConn // for Accept
	stop      chan struct{}    // closed by Close
	wg        sync.WaitGroup   // what accepts, and waits for first bytes

	mu struct {
		sync.Mutex
		conns  map[*streamConn]struct{}
		closed bool
	}
}

// raftAddr is an advertised address; its host may be a name.
type raftAddr string

func (a raftAddr) Network() string { return "tcp" }
func (a raftAddr) String() string  { return string(a) }

func newStreams(lis net.Listener, advertise string, conf *tls.Config, log *slog.Logger) *streams {
	s := &streams{Listener: lis, advertise: raftAddr(advertise), log: log, ready: make(chan *streamConn), stop: make(chan struct{})}
	s.mu.conns = make(map[*streamConn]struct{})
	if conf != nil {
		s.server = certs.With(serverTLS(conf), func(c *tls.Config) { c.ClientAuth = tls.RequireAndVerifyClientCert })
		s.client = clientTLS(conf)
	}
	s.wg.Go(s.listen)
	return s
}

func serverTLS(conf *tls.Config) *tls.Config {
	c := conf.Clone()
	if c.ClientCAs == nil {
		c.ClientCAs = c.RootCAs
	}
	return c
}

func clientTLS(conf *tls.Config) *tls.Config {
	c := conf.Clone()
	if c.RootCAs == nil {
		c.RootCAs = c.ClientCAs
	}
	return c
}

func (s *streams) Addr() net.Addr { return s.advertise }

// Accept gives the next caller that has said something.
func (s *streams) Accept() (net.Conn, error) {
	select {
	case c := <-s.ready:
		return c, nil
	case <-s.stop:
		return nil, net.ErrClosed
	}
}

// listen accepts callers, and waits for each to say something.
func (s *streams) listen() {
	for {
		c, err := s.Listener.Accept()
		if err == nil {
			s.welcome(c)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		// Out of descriptors, or a connection that died in the queue: others may still come.
		s.log.Warn("directory: cannot accept a connection of another directory node", "err", err)
		select {
		case <-time.After(50 * time.Millisecond):
		case <-s.stop:
			return
		}
	}
}

func (s *streams) welcome(c net.Conn) {
	host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	if s.server != nil {
		c = tls.Server(c, s.server)
	}
	s.makeRoom()
	sc, err := s.track(c, host)
	if err != nil {
		return
	}
	s.wg.Go(func() {
		if err := sc.hear(); err != nil {
			_ = sc.Close() // it has said nothing that an answer could be to
			return
		}
		select {
		case s.ready <- sc:
		case <-s.stop:
			_ = sc.Close()
		}
	})
}

// makeRoom closes an accepted connection if there are too many, and waits until raft has
// let go of it. Only listen calls it, which makes them.
func (s *streams) makeRoom() {
	worst, theirs := s.leastWelcome()
	if worst == nil {
		return
	}
	s.log.Warn("directory: too many connections to the Raft port: one is closed", "most", maxInbound, "remote", worst.from, "from_there", theirs)
	conn := worst.Conn
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn() // without a goodbye, which might have to wait
	}
	_ = conn.Close()
	t := time.NewTimer(time.Second)
	defer t.Stop()
	select {
	case <-worst.gone:
	case <-t.C: // raft is at work on what it said
	case <-s.stop:
	}
}

// leastWelcome takes out the connection that has to go for another, or nil; theirs is how many
// its host has.
func (s *streams) leastWelcome() (worst *streamConn, theirs int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := make(map[string]int)
	n := 0
	for c := range s.mu.conns {
		if c.from != "" {
			of[c.from]++
			n++
		}
	}
	if n < maxInbound {
		return nil, 0
	}
	for c := range s.mu.conns {
		if c.from != "" && (worst == nil || c.lessWelcome(worst, of)) {
			worst = c
		}
	}
	delete(s.mu.conns, worst)
	return worst, of[worst.from]
}

// lessWelcome reports whether c goes before d, given how many connections each host has.
func (c *streamConn) lessWelcome(d *streamConn, of map[string]int) bool {
	if of[c.from] != of[d.from] {
		return of[c.from] > of[d.from]
	}
	if ch, dh := c.heard.Load(), d.heard.Load(); ch != dh {
		return !ch
	}
	return c.last.Load() < d.last.Load()
}

func (s *streams) Dial(addr raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, err := s.dial(ctx, string(addr))
	if err != nil {
		return nil, err
	}
	return s.track(c, "")
}

func (s *streams) dial(ctx context.Context, addr string) (net.Conn, error) {
	if s.client == nil {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	conf, err := certs.ForHost(s.client, host)
	if err != nil {
		return nil, err
	}
	return (&tls.Dialer{Config: conf}).DialContext(ctx, "tcp", addr)
}

// track keeps c until it is closed; from is the host of one that was accepted.
func (s *streams) track(c net.Conn, from string) (*streamConn, error) {
	sc := &streamConn{Conn: c, s: s, from: from, gone: make(chan struct{})}
	sc.last.Store(time.Now().UnixNano())
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil, errors.Join(net.ErrClosed, c.Close())
	}
	s.mu.conns[sc] = struct{}{}
	return sc, nil
}

func (s *streams) Close() error {
	err := s.Listener.Close()
	s.mu.Lock()
	was := s.mu.closed
	s.mu.closed = true
	conns := s.mu.conns
	s.mu.conns = nil
	s.mu.Unlock()
	if !was {
		close(s.stop)
	}
	for c := range conns {
		_ = c.Conn.Close() // the peer sees the end of the stream either way
	}
	s.wg.Wait()
	return err
}

// streamConn bounds the TLS handshake, which its first Read or Write does.
type streamConn struct {
	net.Conn
	s         *streams
	from      string // host of a caller; empty: dialed
	first     []byte // heard before raft reads
	heard     atomic.Bool
	last      atomic.Int64  // Unix nanoseconds of the last byte that came
	gone      chan struct{} // closed by Close
	closing   sync.Once
	handshake sync.Once
	err       error
}

// hear waits for a caller's first byte.
func (c *streamConn) hear() error {
	if err := c.ready(); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	var b [1]byte
	if _, err := io.ReadFull(c.Conn, b[:]); err != nil {
		return err
	}
	c.first = b[:]
	c.heard.Store(true)
	c.last.Store(time.Now().UnixNano())
	return c.SetReadDeadline(time.Time{})
}

func (c *streamConn) ready() error {
	c.handshake.Do(func() {
		if t, ok := c.Conn.(*tls.Conn); ok {
			ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
			defer cancel()
			c.err = t.HandshakeContext(ctx)
		}
	})
	return c.err
}

func (c *streamConn) Read(b []byte) (int, error) {
	if err := c.ready(); err != nil {
		return 0, err
	}
	if len(c.first) > 0 {
		n := copy(b, c.first)
		c.first = c.first[n:]
		return n, nil
	}
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.last.Store(time.Now().UnixNano())
	}
	return n, err
}

func (c *streamConn) Write(b []byte) (int, error) {
	if err := c.ready(); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (c *streamConn) Close() error {
	defer c.closing.Do(func() { close(c.gone) })
	c.s.mu.Lock()
	delete(c.s.mu.conns, c)
	c.s.mu.Unlock()
	return c.Conn.Close()
}

// newRaftLogger sends raft's messages to l, each one level lower than raft
// thinks: an election is news to raft and routine to an operator.
func newRaftLogger(l *slog.Logger) hclog.Logger {
	il := hclog.NewInterceptLogger(&hclog.LoggerOptions{Name: "raft", Level: hclog.Off, Output: io.Discard})
	il.RegisterSink(logSink{l})
	return il
}

// logSink passes raft's messages on. A node that is down is called again many times a second,
// and each call that fails is a line: the logger limits them, like those of others.
type logSink struct{ l *slog.Logger }

func (s logSink) Accept(_ string, level hclog.Level, msg string, args ...any) {
	to := slog.LevelDebug
	switch level {
	case hclog.Warn:
		to = slog.LevelInfo
	case hclog.Error:
		to = slog.LevelWarn
	}
	if !s.l.Enabled(context.Background(), to) {
		return
	}
	for i, a := range args {
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			args[i] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
	}
	s.l.Log(context.Background(), to, "raft: "+msg, args...)
}
