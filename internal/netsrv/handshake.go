package netsrv

import (
	"context"
	"crypto/tls"
	"net"
	"runtime"
	"sync/atomic"
)

// turns bounds how many TLS handshakes compute at a time. Each takes some hundred microseconds of a processor at a stretch, and strangers
// may begin as many as they like: on all processors they would keep those waiting who are already in.
var turns = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))

// Greet performs the handshake of a connection that [TLSServer] or [TLSListener] has made, when it is its turn. Others have theirs
// while it waits for its peer. ctx bounds it.
func Greet(ctx context.Context, c *tls.Conn) error {
	if t, ok := c.NetConn().(*turnConn); ok {
		t.begin()
		defer t.end()
	}
	return c.HandshakeContext(ctx)
}

// GreetOver is Greet for servers of others: handshake performs it over the connection that it is given, which is c, and may keep that one.
func GreetOver(c net.Conn, handshake func(net.Conn) error) error {
	t := &turnConn{Conn: c}
	t.begin()
	defer t.end()
	return handshake(t)
}

// TLSServer is tls.Server for [Greet].
func TLSServer(c net.Conn, conf *tls.Config) *tls.Conn {
	return tls.Server(&turnConn{Conn: c}, conf)
}

// TLSListener is tls.NewListener for [Greet].
func TLSListener(l net.Listener, conf *tls.Config) net.Listener { return &tlsListener{l, conf} }

type tlsListener struct {
	net.Listener
	conf *tls.Config
}

func (l *tlsListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return TLSServer(c, l.conf), nil
}

// turnConn gives up the turn of its handshake while it waits for the peer, and is the connection below otherwise.
type turnConn struct {
	net.Conn
	greets atomic.Bool
}

func (c *turnConn) begin() {
	turns <- struct{}{}
	c.greets.Store(true)
}

func (c *turnConn) end() {
	c.greets.Store(false)
	<-turns
}

// NetConn is the connection below.
func (c *turnConn) NetConn() net.Conn { return c.Conn }

// Read belongs to the goroutine of the handshake until that is over, as does what crypto/tls writes before; a Write waits for
// nobody then, since a handshake's fits into the socket.
func (c *turnConn) Read(p []byte) (int, error) {
	if !c.greets.Load() {
		return c.Conn.Read(p)
	}
	c.end()
	defer c.begin()
	return c.Conn.Read(p)
}
