package server

import (
	"container/list"
	"context"
	"net"
	"sync"
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
	maxHeaderBytes = 64 << 10
	// connBuffer is what gRPC reads into, for each connection; a longer message is read past it.
	connBuffer = 8 << 10
	// maxHalf is how many requests may be there by halves. Each takes up to maxMessageBytes and a window.
	maxHalf = 64
	// halfTimeout is how long a request may take from its first byte to its last.
	halfTimeout = 30 * time.Second
)

// inlet is the listener of the directory's gRPC server. It bounds connections and unfinished handshakes by a
// netsrv.Door, which gRPC tells that TLS and HTTP/2 have greeted each other by lifting the deadline; and requests that have not arrived whole, which are memory that anybody can take who may
// connect: one that takes too long, or one over maxHalf, costs a connection, the one with the most of them.
//
// It is gRPC's stats.Handler, too, since that tells when a request has begun and when it is there.
type inlet struct {
	net.Listener
	door *netsrv.Door

	mu struct {
		sync.Mutex
		conns map[[2]string]*inletConn // by local and remote address
		half  list.List                // of *arrival, oldest first
	}
}

// inletConn is a connection of gRPC's.
type inletConn struct {
	*netsrv.Conn
	in   *inlet
	half int // requests in inlet.mu.half; guarded by inlet.mu
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

// options are what goes with an inlet.
func (in *inlet) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.StatsHandler(in), grpc.ConnectionTimeout(handshakeTimeout), grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(maxHeaderBytes), grpc.ReadBufferSize(connBuffer),
	}
}

func connKey(local, remote net.Addr) [2]string { return [2]string{local.String(), remote.String()} }

// Accept implements net.Listener.
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

// Close implements net.Conn.
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

// TagConn implements stats.Handler.
func (in *inlet) TagConn(ctx context.Context, info *stats.ConnTagInfo) context.Context {
	in.mu.Lock()
	defer in.mu.Unlock()
	return context.WithValue(ctx, connTag{}, in.mu.conns[connKey(info.LocalAddr, info.RemoteAddr)])
}

// HandleConn implements stats.Handler.
func (in *inlet) HandleConn(context.Context, stats.ConnStats) {}

// TagRPC implements stats.Handler.
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
		if worst := in.addArrival(a); worst != nil {
			worst.Guest.Evict(netsrv.ReasonHandshake)
		}
	case *stats.InPayload, *stats.End:
		in.mu.Lock()
		a.removeLocked()
		in.mu.Unlock()
	}
}

// addArrival adds a, and gives the connection that has to go, if there are too many: of those with the most half
// requests the one with the oldest.
func (in *inlet) addArrival(a *arrival) (worst *inletConn) {
	in.mu.Lock()
	defer in.mu.Unlock()
	a.at = in.mu.half.PushBack(a)
	a.conn.half++
	a.timer = time.AfterFunc(halfTimeout, func() {
		in.mu.Lock()
		late := a.at != nil
		a.removeLocked()
		in.mu.Unlock()
		if late {
			a.conn.Guest.Evict(netsrv.ReasonTimeout)
		}
	})
	if in.mu.half.Len() <= maxHalf {
		return nil
	}
	for e := in.mu.half.Front(); e != nil; e = e.Next() {
		if c := e.Value.(*arrival).conn; worst == nil || c.half > worst.half {
			worst = c
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
	in := a.conn.in
	in.mu.half.Remove(a.at)
	a.at = nil
	a.conn.half--
	a.timer.Stop()
}
