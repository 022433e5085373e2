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
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

const handshakeTimeout = 10 * time.Second

// streams is raft's stream layer over TCP or TLS. It closes every connection when
// it is closed: raft's own transport leaves the handlers of accepted
// connections reading until the peer hangs up.
type streams struct {
	net.Listener
	advertise net.Addr
	server    *tls.Config // nil: plain TCP
	client    *tls.Config

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

func newStreams(lis net.Listener, advertise string, conf *tls.Config) *streams {
	s := &streams{Listener: lis, advertise: raftAddr(advertise)}
	s.mu.conns = make(map[*streamConn]struct{})
	if conf != nil {
		s.server = serverTLS(conf)
		s.server.ClientAuth = tls.RequireAndVerifyClientCert
		s.client = clientTLS(conf)
	}
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

func (s *streams) Accept() (net.Conn, error) {
	c, err := s.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if s.server != nil {
		c = tls.Server(c, s.server)
	}
	return s.track(c)
}

func (s *streams) Dial(addr raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, err := s.dial(ctx, string(addr))
	if err != nil {
		return nil, err
	}
	return s.track(c)
}

func (s *streams) dial(ctx context.Context, addr string) (net.Conn, error) {
	if s.client == nil {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}
	return (&tls.Dialer{Config: s.client}).DialContext(ctx, "tcp", addr)
}

func (s *streams) track(c net.Conn) (net.Conn, error) {
	sc := &streamConn{Conn: c, s: s}
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
	s.mu.closed = true
	conns := s.mu.conns
	s.mu.conns = nil
	s.mu.Unlock()
	for c := range conns {
		_ = c.Conn.Close() // the peer sees the end of the stream either way
	}
	return err
}

// streamConn bounds the TLS handshake, which its first Read or Write does.
type streamConn struct {
	net.Conn
	s         *streams
	handshake sync.Once
	err       error
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
	return c.Conn.Read(b)
}

func (c *streamConn) Write(b []byte) (int, error) {
	if err := c.ready(); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (c *streamConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.mu.conns, c)
	c.s.mu.Unlock()
	return c.Conn.Close()
}

// newRaftLogger sends raft's messages to l, each one level lower than raft
// thinks: an election is news to raft and routine to an operator.
func newRaftLogger(l *slog.Logger) hclog.Logger {
	il := hclog.NewInterceptLogger(&hclog.LoggerOptions{Name: "raft", Level: hclog.Off, Output: io.Discard})
	il.RegisterSink(&logSink{l: l, said: make(map[string]*saying)})
	return il
}

// sayPause is the least time between two lines of raft that say the same: a node that is
// down is called again many times a second, and each call that fails is a line.
const sayPause = time.Second

// logSink passes raft's messages on, and counts those that come too often.
type logSink struct {
	l    *slog.Logger
	mu   sync.Mutex
	said map[string]*saying // by message, of which raft has a few dozen
}

type saying struct {
	at      time.Time
	skipped int
}

// due tells whether msg may be passed on, and how many like it were not since the last.
func (s *logSink) due(msg string, now time.Time) (skipped int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.said[msg]
	if last == nil {
		s.said[msg] = &saying{at: now}
		return 0, true
	}
	if now.Sub(last.at) < sayPause {
		last.skipped++
		return 0, false
	}
	skipped = last.skipped
	*last = saying{at: now}
	return skipped, true
}

func (s *logSink) Accept(_ string, level hclog.Level, msg string, args ...any) {
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
	skipped, ok := s.due(msg, time.Now())
	if !ok {
		return
	}
	if skipped > 0 {
		args = append(args[:len(args):len(args)], "skipped", skipped)
	}
	for i, a := range args {
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			args[i] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
	}
	s.l.Log(context.Background(), to, "raft: "+msg, args...)
}
