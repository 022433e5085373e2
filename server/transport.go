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

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/netsrv"
)

const (
	// handshakeTimeout is from a call to the first byte behind TLS: raft's own nodes call when they have
	// something to say.
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
// have shown the certificate of a directory node, if there is TLS, have said a [hello] that is meant for this node, and
// sent a byte, and there are at most maxInbound: one more costs the host that has most of them one, as a netsrv.Door
// says that replaces connections. Raft is handed the other one when it has let go of that.
type streams struct {
	net.Listener
	advertise net.Addr
	server    *tls.Config // nil: plain TCP
	client    *tls.Config
	door      *netsrv.Door
	log       *slog.Logger
	ready     chan *streamConn // for Accept
	handed    chan struct{}    // capacity maxInbound: an element for each that raft has
	stop      chan struct{}    // closed by Close
	begun     chan struct{}    // closed when party is known
	party     *party
	wg        sync.WaitGroup // what accepts, and waits for first bytes

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

// newStreams owns lis, also after an error.
func newStreams(lis net.Listener, advertise string, conf *tls.Config, m identity.Mapping, log *slog.Logger) (*streams,
	error) {
	door, err := netsrv.NewDoor(netsrv.Limits{MaxConns: maxInbound, HandshakeTimeout: handshakeTimeout, Replace: true,
		Logger: log})
	if err != nil {
		return nil, errors.Join(err, lis.Close())
	}
	s := &streams{Listener: lis, advertise: raftAddr(advertise), door: door, log: log, ready: make(chan *streamConn),
		handed: make(chan struct{}, maxInbound), stop: make(chan struct{}), begun: make(chan struct{})}
	s.mu.conns = make(map[*streamConn]struct{})
	if conf != nil {
		directories := identity.RolesOf(identity.Directory)
		s.server = m.Require(serverTLS(conf), "Raft", directories)
		s.client = m.Require(clientTLS(conf), "Raft", directories)
	}
	s.wg.Go(s.listen)
	return s, nil
}

func serverTLS(conf *tls.Config) *tls.Config {
	return certs.With(conf, func(c *tls.Config) {
		c.ClientAuth = tls.RequireAndVerifyClientCert
		if c.ClientCAs == nil {
			c.ClientCAs = c.RootCAs
		}
	})
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
		c, g, err := s.door.Accept(s.Listener, s.stop)
		if err != nil {
			return
		}
		s.welcome(c, g)
	}
}

func (s *streams) welcome(c net.Conn, g *netsrv.Guest) {
	if s.server != nil {
		c = tls.Server(c, s.server)
	}
	sc, err := s.track(c, g)
	if err != nil {
		g.Release()
		return
	}
	s.wg.Go(func() {
		if err := sc.hear(); err != nil {
			if identity.IsRefusal(err) || errors.Is(err, errRefused) {
				s.log.Warn("directory: a connection to the Raft port was refused", "remote", c.RemoteAddr().String(),
					"err", err)
			}
			_ = sc.Close() // what there was to answer has been
			return
		}
		select {
		case s.handed <- struct{}{}:
			sc.handed = true
		case <-s.stop:
			_ = sc.Close()
			return
		}
		select {
		case s.ready <- sc:
		case <-s.stop:
			_ = sc.Close()
		}
	})
}

func (s *streams) Dial(addr raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	p, err := s.known(ctx)
	if err != nil {
		return nil, err
	}
	peer := p.at(string(addr))
	if peer == "" {
		return nil, fmt.Errorf("no member of the cluster is at %s", addr)
	}
	c, _, err := s.call(ctx, string(addr), peer, false)
	if err != nil {
		return nil, err
	}
	sc, err := s.track(c, nil)
	if err != nil {
		return nil, err
	}
	sc.peer, sc.addr = peer, string(addr)
	return sc, nil
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

// track keeps c until it is closed; g is nil for one that was dialed.
func (s *streams) track(c net.Conn, g *netsrv.Guest) (*streamConn, error) {
	sc := &streamConn{Conn: c, s: s, guest: g, conf: s.client}
	if g != nil {
		sc.conf = s.server
	}
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
	guest     *netsrv.Guest // nil: dialed
	peer      raft.ServerID // that was dialed
	addr      string        // of peer
	first     []byte        // heard before raft reads
	handed    bool          // to raft, or about to be
	closing   sync.Once
	handshake sync.Once
	err       error
	state     tls.ConnectionState // after a handshake
	conf      *tls.Config         // of that; nil: there is no TLS
}

// hear waits for a caller's hello, answers it, and waits for what the caller says then. The Door ends that if it takes
// too long.
func (c *streamConn) hear() error {
	if err := c.ready(); err != nil {
		return err
	}
	var b [1]byte
	if _, err := io.ReadFull(c.Conn, b[:]); err != nil {
		return err
	}
	if b[0] == helloMagic[0] {
		if err := c.s.greet(c, b[:]); err != nil {
			return err
		}
		if _, err := io.ReadFull(c.Conn, b[:]); err != nil {
			return err
		}
	} else if err := c.s.hearRaw(); err != nil {
		return err
	}
	c.first = b[:]
	if !c.guest.Finish() {
		return c.guest.Err()
	}
	return nil
}

func (c *streamConn) ready() error {
	c.handshake.Do(func() {
		if t, ok := c.Conn.(*tls.Conn); ok {
			ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
			defer cancel()
			if c.err = t.HandshakeContext(ctx); c.err == nil {
				c.state = t.ConnectionState()
			}
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
	if n == 0 {
		return 0, err
	}
	if c.conf != nil { // its peer's certificate may have been revoked since the handshake
		if err := certs.StillWelcome(c.conf, c.state); err != nil {
			c.s.log.Warn("directory: a Raft connection is closed", "remote", c.RemoteAddr().String(), "err", err)
			return 0, errors.Join(err, c.Close())
		}
	}
	if c.guest != nil {
		c.guest.Touch()
	}
	return n, err
}

// Write refuses to speak to a member whose address is another one's by now: raft keeps connections by address.
func (c *streamConn) Write(b []byte) (int, error) {
	if err := c.ready(); err != nil {
		return 0, err
	}
	if c.peer != "" {
		if now := c.s.party.at(c.addr); now != "" && now != c.peer {
			return 0, errors.Join(fmt.Errorf("%s is the address of %v now, and was of %v", c.addr, diskOf(now),
				diskOf(c.peer)), c.Close())
		}
	}
	return c.Conn.Write(b)
}

func (c *streamConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.mu.conns, c)
	c.s.mu.Unlock()
	err := c.Conn.Close()
	if c.guest != nil {
		c.closing.Do(func() {
			c.guest.Release()
			if c.handed {
				<-c.s.handed
			}
		})
	}
	return err
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
