// Package dirclient is the way clients, memory nodes and kvctl reach the
// directory. It finds the leader among the directory's nodes, follows it when it
// moves, and reconnects by itself.
//
// It leaves to its callers what a request means: whether it may be sent twice
// ([Client.Call]) or not ([Client.CallOnce]). They also decide what to do with a
// map ([Client.WatchMap]). It holds no view of the cluster but the leader's
// address.
//
// Start with [Client] and [Error]. A Client's methods may be called
// concurrently. Requests and replies belong to the caller.
//
// Whether a request was sent is not guessed from the error's code, which gRPC
// gives to a refused connection and to a broken one alike. A stats handler
// notes when a request's headers went out.
package dirclient

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/alarm"
	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/wrongport"
)

const (
	// maxBackoff bounds the wait between two rounds over the directory's nodes
	// and between two attempts to connect to one of them.
	maxBackoff = 250 * time.Millisecond
	minBackoff = 10 * time.Millisecond
	// connectTimeout bounds one attempt to connect, so that an unplugged
	// machine delays a search for the leader by no more.
	connectTimeout = time.Second
	// keepaliveTime is the shortest that gRPC allows. keepaliveTimeout is also
	// the TCP user timeout, so a request to an unplugged machine fails that soon.
	keepaliveTime    = 10 * time.Second
	keepaliveTimeout = 2 * time.Second
	// window is how many bytes a directory node may send ahead of what was read.
	window = 1 << 20
	// maxMapBytes bounds one message of the directory.
	maxMapBytes = 64 << 20
	// maxNodes bounds the addresses learned from NotLeader details.
	maxNodes = 64
)

// Options configure a Client.
type Options struct {
	// Addrs are the gRPC addresses (host:port) of some or all directory nodes.
	// Required.
	Addrs []string
	// TLS is used when not nil; otherwise the connection is in clear.
	TLS *tls.Config
	// Identities says how directory nodes' certificates name their owners: with TLS, a peer of another role
	// than directory is asked nothing.
	Identities identity.Mapping
	// Logger receives a message when the directory is lost, and when it is found again. Default: discard.
	Logger *slog.Logger
	// AttemptTimeout is how long Call waits for one node's answer before it
	// asks another. Default 2 s.
	AttemptTimeout time.Duration
}

func (o *Options) ensureDefaults() {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = 2 * time.Second
	}
}

// Validate reports every problem of o.
func (o *Options) Validate() error {
	var errs []error
	if len(o.Addrs) == 0 {
		errs = append(errs, errors.New("Addrs: empty, want the address of at least one directory node"))
	}
	if len(o.Addrs) > maxNodes {
		errs = append(errs, fmt.Errorf("Addrs: %d addresses, at most %d", len(o.Addrs), maxNodes))
	}
	for _, a := range o.Addrs {
		if _, _, err := net.SplitHostPort(a); err != nil {
			errs = append(errs, fmt.Errorf("Addrs: %q: want host:port", a))
		}
	}
	if o.AttemptTimeout < 0 {
		errs = append(errs, fmt.Errorf("AttemptTimeout: %v, want >= 0", o.AttemptTimeout))
	}
	return errors.Join(errs...)
}

// Client is a connection to the directory, whichever of its nodes leads.
type Client struct {
	opts   Options
	closed context.Context // ends with Close
	close  context.CancelFunc
	idle   func() // releases alarm's waker

	mu struct {
		sync.Mutex
		leader  string // the node that answered last as leader, or that one named
		nodes   []*node
		watches map[*watch]bool
	}
}

// node is one directory node. The gRPC connection is made on first use.
type node struct {
	addr string
	conn *grpc.ClientConn
	rpc  dirpb.DirectoryClient
	// dialErr is why the last attempt to connect failed; nil after a success.
	dialErr atomic.Pointer[dialError]
	// line is the last connection made; nil once it was hung up.
	line atomic.Pointer[line]
}

// line is a connection, without the TLS above it.
type line struct {
	conn net.Conn
	made time.Time
}

// dialError is a failure to connect, in TCP or, talk, above it.
type dialError struct {
	err  error
	talk bool
}

// Open prepares a Client; it does not connect and so does not fail when the
// directory is down.
func Open(o Options) (*Client, error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("dirclient: %w", err)
	}
	o.TLS = o.Identities.Called(o.TLS, identity.Directory)
	c := &Client{opts: o}
	c.closed, c.close = context.WithCancel(context.Background())
	c.idle = alarm.Hold()
	for _, a := range o.Addrs {
		if _, err := c.node(a); err != nil {
			c.Close()
			return nil, err
		}
	}
	return c, nil
}

// Close ends every call and watch with ErrClosed. It is idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Err() != nil {
		return nil
	}
	c.close()
	c.idle()
	var errs []error
	for _, n := range c.mu.nodes {
		errs = append(errs, n.conn.Close())
	}
	return errors.Join(errs...)
}

// Call runs fn, which makes one idempotent request, against the leader. It runs
// fn again, elsewhere or later, while nodes are unreachable, silent for
// AttemptTimeout or not the leader. When ctx ends, it returns an *Error. Any
// other error of fn is returned at once, with its gRPC status.
func (c *Client) Call(ctx context.Context, fn func(context.Context, dirpb.DirectoryClient) error) error {
	return c.call(ctx, fn, true)
}

// CallOnce is Call for a request that must not take effect twice. It runs fn
// again only when its request certainly was not applied: it was never sent, or
// the node answered that it does not lead. Otherwise it returns an *Error that
// matches ErrUnknownOutcome.
func (c *Client) CallOnce(ctx context.Context, fn func(context.Context, dirpb.DirectoryClient) error) error {
	return c.call(ctx, fn, false)
}

func (c *Client) call(ctx context.Context, fn func(context.Context, dirpb.DirectoryClient) error,
	idempotent bool) error {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	e := &Error{}
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		var tried []string
		for n := c.next(tried); n != nil; n = c.next(tried) {
			var sent atomic.Bool
			actx, cancel := context.WithValue(ctx, sentKey{}, &sent), context.CancelFunc(func() {})
			if idempotent {
				actx, cancel = alarm.WithTimeout(actx, c.opts.AttemptTimeout)
			}
			began := time.Now()
			err := fn(actx, n.rpc)
			cancel()
			if err == nil {
				c.lead(n.addr)
				c.moveWatches(n.addr)
				return struct{}{}, nil
			}
			v := judgeError(ctx, err)
			if v == final {
				n.hangUp(err, began)
				c.lead(n.addr)
				return struct{}{}, backoff.Permanent(error(&replyError{n.addr, err}))
			}
			tried = append(tried, n.addr)
			e.noteAttempt(ctx, n.attempt(err, v, sent.Load()))
			if v == notLeader {
				c.follow(n.addr, leaderOf(err))
				continue
			}
			if !errors.Is(ctx.Err(), context.Canceled) { // which says nothing of the node
				c.forget(n.addr)
			}
			if sent.Load() {
				e.Sent = e.Sent || !isNothingDone(err)
				if !idempotent {
					return struct{}{}, backoff.Permanent(error(e))
				}
			}
			if ctx.Err() != nil {
				break
			}
		}
		return struct{}{}, e
	}, backoff.WithBackOff(newBackOff()), backoff.WithMaxElapsedTime(0))
	if err == nil {
		return nil
	}
	if r := (*replyError)(nil); errors.As(err, &r) {
		return r
	}
	if c.closed.Err() != nil {
		e.cause = ErrClosed
	} else {
		e.cause = context.Cause(ctx)
	}
	return e
}

// WatchMap calls fn with every map of the session that is newer than version after, in order,
// and when the session is called (Map.renew). It goes on until ctx ends or fn fails, and returns
// that error. When the stream breaks it resumes at another node behind the last map that fn
// took. When another node answers a call as leader, it resumes at that one: only leaders call. A
// refusal by the directory (an unknown session) is returned at once.
func (c *Client) WatchMap(ctx context.Context, sessionID uint32, after uint64, fn func(*dirpb.Map) error) error {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	bo := newBackOff()
	lost := false
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		e := &Error{}
		var tried []string
		for n := c.next(tried); n != nil; n = c.next(tried) {
			began := time.Now()
			err := func() (err error) {
				sctx, cancel := context.WithCancelCause(ctx)
				defer cancel(nil) // releases the stream when fn fails
				defer c.follows(n.addr, func() { cancel(errMoved) })()
				defer func() {
					if err != nil && context.Cause(sctx) == errMoved {
						err = errMoved
					}
				}()
				stream, err := n.rpc.WatchMap(sctx, &dirpb.WatchMapRequest{SessionId: sessionID, AfterVersion: after})
				if err != nil {
					return err
				}
				for {
					m, err := stream.Recv()
					if errors.Is(err, io.EOF) {
						return status.Error(codes.Unavailable, "stream ended")
					}
					if err != nil {
						return err
					}
					if lost {
						c.opts.Logger.Info("directory found again: maps arrive", "directory", n.addr)
						lost = false
					}
					bo.Reset()
					if m.GetVersion() <= after && !m.GetRenew() {
						continue
					}
					if err := fn(m); err != nil {
						return &callbackError{err}
					}
					after = max(after, m.GetVersion())
				}
			}()
			if f := (*callbackError)(nil); errors.As(err, &f) {
				return struct{}{}, backoff.Permanent(err)
			}
			if err == errMoved && ctx.Err() == nil {
				tried = nil
				continue
			}
			v := judgeError(ctx, err)
			if v == final {
				n.hangUp(err, began)
				return struct{}{}, backoff.Permanent(error(&replyError{n.addr, err}))
			}
			tried = append(tried, n.addr)
			e.noteAttempt(ctx, n.attempt(err, v, false))
			if v == notLeader {
				c.follow(n.addr, leaderOf(err))
			} else {
				c.forget(n.addr)
			}
			if ctx.Err() != nil {
				break
			}
		}
		if !lost && ctx.Err() == nil {
			lost = true
			c.opts.Logger.Warn("directory lost: no new maps until it answers", "err", e)
		}
		return struct{}{}, e
	}, backoff.WithBackOff(bo), backoff.WithMaxElapsedTime(0))
	if f := (*callbackError)(nil); errors.As(err, &f) {
		return f.error
	}
	if r := (*replyError)(nil); errors.As(err, &r) {
		return r
	}
	if c.closed.Err() != nil {
		return ErrClosed
	}
	return context.Cause(ctx)
}

// watch is a stream of maps from one node.
type watch struct {
	addr string
	move func() // to another node
}

var errMoved = errors.New("the watch follows the leader")

// follows has move called, until stop, when another node than that at addr turns out to lead.
func (c *Client) follows(addr string, move func()) (stop func()) {
	w := &watch{addr, move}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.watches == nil {
		c.mu.watches = make(map[*watch]bool)
	}
	c.mu.watches[w] = true
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.mu.watches, w)
	}
}

// moveWatches moves the watches to the leader.
func (c *Client) moveWatches(leader string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for w := range c.mu.watches {
		if w.addr != leader {
			w.move()
		}
	}
}

// callbackError carries fn's error through the retry loop, whatever its type.
type callbackError struct{ error }

// bound makes a context that ends with ctx or with Close.
func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.closed, func() { cancel(ErrClosed) })
	return ctx, func() { stop(); cancel(nil) }
}

func newBackOff() *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval, b.Multiplier = minBackoff, maxBackoff, 2
	return b
}

// next picks the node to ask: the presumed leader, then the nodes that may be
// connected, then those known to be down. It returns nil when all were tried.
func (c *Client) next(tried []string) *node {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Err() != nil {
		return nil
	}
	var best *node
	rank := 0
	for _, n := range c.mu.nodes {
		if slices.Contains(tried, n.addr) {
			continue
		}
		r := 1
		switch s := n.conn.GetState(); {
		case n.addr == c.mu.leader:
			r = 3
		case s == connectivity.Ready || s == connectivity.Idle:
			r = 2
		}
		if r > rank {
			best, rank = n, r
		}
	}
	return best
}

func (c *Client) lead(addr string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.leader = addr
}

func (c *Client) forget(addr string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.leader == addr {
		c.mu.leader = ""
	}
}

// follow notes that addr does not lead and who, it says, does.
func (c *Client) follow(addr, leader string) {
	c.forget(addr)
	if leader == "" || leader == addr {
		return
	}
	if _, err := c.node(leader); err != nil {
		c.opts.Logger.Debug("directory names a leader that cannot be dialed", "directory", addr, "leader", leader,
			"err", err)
		return
	}
	c.lead(leader)
}

// node finds or adds the node at addr.
func (c *Client) node(addr string) (*node, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("directory %q: want host:port", addr)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.mu.nodes {
		if n.addr == addr {
			return n, nil
		}
	}
	if c.closed.Err() != nil {
		return nil, ErrClosed
	}
	if len(c.mu.nodes) >= maxNodes {
		return nil, fmt.Errorf("directory %s: more than %d addresses known", addr, maxNodes)
	}
	n := &node{addr: addr}
	creds := insecure.NewCredentials()
	if c.opts.TLS != nil {
		creds = &liveCreds{credentials.NewTLS(c.opts.TLS), c.opts.TLS, host}
	}
	conn, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(&recordCreds{wrongport.Creds(creds, "a directory node's gRPC port", n.begun), n,
			c.opts.Logger}),
		grpc.WithContextDialer(n.dial),
		grpc.WithStatsHandler(sentHandler{}),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: grpcbackoff.Config{
				BaseDelay: minBackoff, Multiplier: 2, Jitter: 0.2, MaxDelay: maxBackoff,
			},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveTime, Timeout: keepaliveTimeout, PermitWithoutStream: true,
		}),
		// Windows of a fixed size: to find a better one, gRPC would send a ping with every message.
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMapBytes)),
	)
	if err != nil {
		return nil, fmt.Errorf("directory %s: %w", addr, err)
	}
	n.conn, n.rpc = conn, dirpb.NewDirectoryClient(conn)
	c.mu.nodes = append(c.mu.nodes, n)
	return n, nil
}

// dial connects and keeps the reason of a failure, which gRPC gives back only
// as text.
func (n *node) dial(ctx context.Context, addr string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		n.dialErr.Store(&dialError{err, false})
		return nil, err
	}
	n.line.Store(&line{conn, time.Now()})
	if e := n.dialErr.Load(); e != nil && !e.talk {
		n.dialErr.CompareAndSwap(e, nil)
	}
	return conn, nil
}

// begun notes what came of a connection, with its first bytes. Until then the reason of the one before stays.
func (n *node) begun(err error) {
	if err == nil {
		n.dialErr.Store(nil)
		return
	}
	n.dialErr.Store(&dialError{err, true})
}

// hangUp closes the connection by which a request of that time was refused for the certificate that was shown when it
// was made. The next request shows the one that the files hold by then.
func (n *node) hangUp(err error, at time.Time) {
	if l := n.line.Load(); l != nil && l.made.Before(at) && status.Code(err) == codes.Unauthenticated &&
		n.line.CompareAndSwap(l, nil) {
		_ = l.conn.Close() // gRPC makes another
	}
}

// liveCreds is TLS to host by what conf gives at each handshake.
type liveCreds struct {
	credentials.TransportCredentials // of conf
	conf                             *tls.Config
	host                             string
}

func (l *liveCreds) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn,
	credentials.AuthInfo, error) {
	conf, err := certs.ForHost(l.conf, l.host)
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(conf).ClientHandshake(ctx, authority, raw)
}

func (l *liveCreds) Clone() credentials.TransportCredentials {
	return &liveCreds{l.TransportCredentials.Clone(), l.conf, l.host}
}

// recordCreds logs that somebody answers who should not.
type recordCreds struct {
	credentials.TransportCredentials
	n   *node
	log *slog.Logger
}

func (r *recordCreds) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn,
	credentials.AuthInfo, error) {
	conn, info, err := r.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if identity.IsRefusal(err) {
		r.log.Warn("a process that is no directory node answers at a directory node's address", "addr", r.n.addr, "err",
			err)
	}
	return conn, info, err
}

func (r *recordCreds) Clone() credentials.TransportCredentials {
	return &recordCreds{r.TransportCredentials.Clone(), r.n, r.log}
}

// sentKey is the context key of the flag that sentHandler raises.
type sentKey struct{}

// sentHandler notes, per attempt, that a request was handed to a connection.
// Without that note it certainly was not applied.
type sentHandler struct{}

func (sentHandler) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }
func (sentHandler) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if _, ok := s.(*stats.OutHeader); ok {
		if f, ok := ctx.Value(sentKey{}).(*atomic.Bool); ok {
			f.Store(true)
		}
	}
}
func (sentHandler) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (sentHandler) HandleConn(context.Context, stats.ConnStats)                       {}
