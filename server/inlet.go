package server

import (
	"container/list"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"

	"github.com/kvd-project/kvd/internal/netsrv"
)

const (
	// maxStreams bounds the requests that a connection has under way; a client waits with more. A client has a few:
	// one waits for news, others renew sessions.
	maxStreams = 256
	// maxHeaderBytes bounds those of a request. They hold a path and a deadline.
	maxHeaderBytes = 16 << 10
	// connBuffer is what gRPC reads into, for each connection; a longer message is read past it.
	connBuffer = 8 << 10
	// maxHalfBytes bounds the memory of requests that are there by halves, of all connections together. It is counted
	// as what their connections have sent since none was, and halfCost for each: so it has room for a first half from
	// every client at once, as when all of them acknowledge a map, and for few that are large.
	maxHalfBytes = 512 << 20
	// halfCost is the most that a request takes of which nothing but the head is there.
	halfCost = 32 << 10
	// halfMost is what gRPC keeps at most of what has been sent of a request.
	halfMost = maxMessageBytes + window
	// halfTimeout is how long a request may take from its first byte to its last.
	halfTimeout = 30 * time.Second
)

// inlet is the listener of the directory's gRPC server. It bounds connections and unfinished handshakes by a
// netsrv.Door, which gRPC tells that TLS and HTTP/2 have greeted each other by lifting the deadline; and requests that
// have not arrived whole, which are memory that anybody can take who may connect: one that takes too long costs its
// connection, and beyond maxHalfBytes the connection that has most of it is closed.
//
// It is gRPC's stats.Handler, too, since that tells when a request has begun and when it is there.
type inlet struct {
	net.Listener
	door *netsrv.Door

	mu struct {
		sync.Mutex
		conns map[[2]string]*inletConn // by local and remote address
		half  list.List                // of *arrival, oldest first
		bytes int64                    // what they weigh
	}
}

// inletConn is a connection of gRPC's.
type inletConn struct {
	*netsrv.Conn
	in   *inlet
	read atomic.Int64 // bytes
	half atomic.Int64 // requests in inlet.mu.half; written under inlet.mu

	// Guarded by inlet.mu:
	since  int64 // of read: when none of its requests was there by halves
	weighs int64 // in inlet.mu.bytes
}

// arrival is a request on its way.
type arrival struct {
	conn  *inletConn
	timer *time.Timer
	at    *list.Element // nil: it is there; guarded by inlet.mu
}

// newInlet leaves lis to its caller until it is served from.
func newInlet(lis net.Listener, limits netsrv.Limits) (*inlet, error) {
	door, err := netsrv.NewDoor(limits)
	if err != nil {
		return nil, err
	}
	in := &inlet{Listener: door.Listen(lis), door: door}
	in.mu.conns = make(map[[2]string]*inletConn)
	return in, nil
}

func (in *inlet) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.StatsHandler(in), grpc.ConnectionTimeout(handshakeTimeout), grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(maxHeaderBytes), grpc.ReadBufferSize(connBuffer),
	}
}

func connKey(local, remote net.Addr) [2]string { return [2]string{local.String(), remote.String()} }

func (in *inlet) Accept() (net.Conn, error) {
	c, err := in.Listener.Accept()
	if err != nil {
		return nil, err
	}
	ic := &inletConn{Conn: c.(*netsrv.Conn), in: in}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.mu.conns[connKey(c.LocalAddr(), c.RemoteAddr())] = ic
	return ic, nil
}

func (c *inletConn) Close() error {
	key := connKey(c.LocalAddr(), c.RemoteAddr())
	c.in.mu.Lock()
	if c.in.mu.conns[key] == c {
		delete(c.in.mu.conns, key)
	}
	c.in.mu.Unlock()
	return c.Conn.Close()
}

type connTag struct{}
type arrivalTag struct{}

func (in *inlet) TagConn(ctx context.Context, info *stats.ConnTagInfo) context.Context {
	in.mu.Lock()
	defer in.mu.Unlock()
	return context.WithValue(ctx, connTag{}, in.mu.conns[connKey(info.LocalAddr, info.RemoteAddr)])
}

func (in *inlet) HandleConn(context.Context, stats.ConnStats) {}

func (in *inlet) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	c, _ := ctx.Value(connTag{}).(*inletConn)
	if c == nil {
		return ctx // it has just been closed
	}
	return context.WithValue(ctx, arrivalTag{}, &arrival{conn: c})
}

// HandleRPC implements stats.Handler. Every method takes one message.
func (in *inlet) HandleRPC(ctx context.Context, s stats.RPCStats) {
	a, _ := ctx.Value(arrivalTag{}).(*arrival)
	if a == nil {
		return
	}
	switch s.(type) {
	case *stats.Begin:
		in.addArrival(a).giveWay()
	case *stats.InPayload, *stats.End:
		in.mu.Lock()
		a.removeLocked()
		in.mu.Unlock()
	}
}

func (c *inletConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.read.Add(int64(n)); c.half.Load() > 0 {
		c.in.mu.Lock()
		worst := c.weighLocked()
		c.in.mu.Unlock()
		worst.giveWay()
	}
	return n, err
}

func (c *inletConn) giveWay() {
	if c != nil {
		c.Guest.Evict(netsrv.ReasonHandshake)
	}
}

// addArrival adds a, and gives the connection that has to go, if that is too much.
func (in *inlet) addArrival(a *arrival) (worst *inletConn) {
	in.mu.Lock()
	defer in.mu.Unlock()
	a.at = in.mu.half.PushBack(a)
	a.conn.half.Add(1)
	a.timer = time.AfterFunc(halfTimeout, func() {
		in.mu.Lock()
		late := a.at != nil
		a.removeLocked()
		in.mu.Unlock()
		if late {
			a.conn.Guest.Evict(netsrv.ReasonTimeout)
		}
	})
	return a.conn.weighLocked()
}

// weighLocked notes what the half requests of c take, and gives the connection that has to go, if all of them take too
// much: of those that take most the one with the oldest.
func (c *inletConn) weighLocked() (worst *inletConn) {
	in, n, read := c.in, c.half.Load(), c.read.Load()
	if n == 0 {
		c.since = read
	}
	was := c.weighs
	c.weighs = n*halfCost + min(read-c.since, n*halfMost)
	in.mu.bytes += c.weighs - was
	if in.mu.bytes <= maxHalfBytes || c.weighs <= was {
		return nil
	}
	for e := in.mu.half.Front(); e != nil; e = e.Next() {
		if x := e.Value.(*arrival).conn; worst == nil || x.weighs > worst.weighs {
			worst = x
		}
	}
	for e := in.mu.half.Front(); e != nil; {
		x := e.Value.(*arrival)
		if e = e.Next(); x.conn == worst {
			x.removeLocked()
		}
	}
	return worst
}

func (a *arrival) removeLocked() {
	if a.at == nil {
		return
	}
	a.conn.in.mu.half.Remove(a.at)
	a.at = nil
	a.conn.half.Add(-1)
	a.timer.Stop()
	a.conn.weighLocked() // less than before: nobody has to go
}
