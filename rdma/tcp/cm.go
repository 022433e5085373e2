package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Dial connects, with TLS if the device has a client configuration, and shows
// the hello.
func (d *device) Dial(ctx context.Context, r driver.DialRequest) (driver.QP, error) {
	p, ok := r.PD.(*pd)
	if !ok || p.d != d {
		return nil, errors.New("the PD is not of this device")
	}
	c, ok := r.CQ.(*cq)
	if !ok || c.d != d {
		return nil, errors.New("the CQ is not of this device")
	}
	if len(r.Private) > driver.MaxPrivate {
		return nil, fmt.Errorf("private data %d bytes, at most %d", len(r.Private), driver.MaxPrivate)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	dialer := net.Dialer{Timeout: d.o.HandshakeTimeout, KeepAlive: -1,
		Control: control(d.o.SocketBuffer, d.o.SocketBuffer/2)}
	raw, err := dialer.DialContext(ctx, "tcp", r.Addr)
	if err != nil {
		return nil, err
	}
	q, err := d.greet(ctx, raw.(*net.TCPConn), p, c, r)
	if err != nil {
		_ = raw.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", ctx.Err(), err)
		}
		return nil, err
	}
	return q, nil
}

func (d *device) greet(ctx context.Context, nc *net.TCPConn, p *pd, c *cq, r driver.DialRequest) (*qp, error) {
	budget, err := d.tune(nc)
	if err != nil {
		return nil, err
	}
	_ = nc.SetDeadline(time.Now().Add(d.o.HandshakeTimeout))
	stop := context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	sk := newSock(nc)
	var conn net.Conn = sk
	if d.o.TLSClient != nil {
		host, _, err := net.SplitHostPort(r.Addr)
		if err != nil {
			return nil, err
		}
		cfg, err := certs.ForHost(d.o.TLSClient, host)
		if err != nil {
			return nil, err
		}
		t := tls.Client(sk, cfg)
		if err := t.Handshake(); err != nil {
			return nil, err
		}
		conn = t
	}
	if _, err := conn.Write(appendHello(nil, r.Private)); err != nil {
		return nil, err
	}
	var head [welcomeSize + maxRefusal]byte
	if _, err := io.ReadFull(conn, head[:welcomeSize]); err != nil {
		return nil, fmt.Errorf("welcome: %w", err)
	}
	w, err := parseWelcome(head[:])
	if err != nil {
		return nil, err
	}
	if w.status == statusRefused {
		text := head[welcomeSize:][:w.textLen]
		if _, err := io.ReadFull(conn, text); err != nil {
			return nil, fmt.Errorf("welcome: %w", err)
		}
		return nil, fmt.Errorf("%w: %s", driver.ErrRefused, printable(string(text)))
	}
	if !stop() {
		return nil, ctx.Err()
	}
	if err := nc.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	q := newQP(d, p, c, sk, conn, budget)
	d.mu.Lock()
	defer d.mu.Unlock()
	_, okPD := d.mu.pds[p]
	_, okCQ := d.mu.cqs[c]
	if !okPD || !okCQ {
		return nil, fmt.Errorf("PD or CQ: %w", driver.ErrClosed)
	}
	d.mu.lastQP++
	q.num = d.mu.lastQP
	if err := c.attach(q); err != nil {
		return nil, err
	}
	d.mu.qps[q] = struct{}{}
	p.qps++
	c.qps++
	d.watchLocked()
	return q, nil
}

// printable makes a stranger's text fit for a log line.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// control prepares a socket with buffers of these sizes, bytes, before it connects or listens: then the window scale is
// still open. It also chooses how the socket is paced.
func control(send, receive int) func(_, addr string, c syscall.RawConn) error {
	return func(_, addr string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) {
			err = errors.Join(
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, send),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receive))
			if a, aerr := netip.ParseAddrPort(addr); aerr == nil && a.Addr().Unmap().IsLoopback() {
				unpace(int(fd))
			}
		})
		return errors.Join(cerr, err)
	}
}

// unpace lets a socket send as fast as it can if the machine's congestion control is BBR: that sends in small pieces,
// each at its time, and on the loopback device there is nothing to be gentle to. It has to come before the connection,
// which keeps its pace otherwise; accepted ones have the listener's. Any other congestion control stays, and so does
// BBR where reno is forbidden.
func unpace(fd int) {
	if cc, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION); err == nil &&
		strings.HasPrefix(cc, "bbr") {
		_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
	}
}

// tune makes a connection prompt and quick to notice a dead peer, and returns
// how many bytes may be outstanding without a write having to wait: half of what
// the kernel granted, as it counts its own overhead too.
func (d *device) tune(c *net.TCPConn) (budget int64, err error) {
	if err := c.SetNoDelay(true); err != nil {
		return 0, err
	}
	// Unanswered data is given up after TCP_USER_TIMEOUT (tcp(7)); it also bounds
	// keepalive probes, which find a dead peer when nothing is under way.
	if err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true,
		Idle: max(d.o.PeerTimeout/2, time.Second), Interval: time.Second, Count: 3}); err != nil {
		return 0, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var sndbuf int
	cerr := raw.Control(func(fd uintptr) {
		if err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(d.o.PeerTimeout.Milliseconds())); err == nil {
			sndbuf, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF)
		}
	})
	return int64(sndbuf / 2), errors.Join(cerr, err)
}

// listener is the passive side.
type listener struct {
	d   *device
	o   driver.ListenOptions
	ln  *net.TCPListener
	cpu atomic.Int64
	wg  sync.WaitGroup // every agent

	loops struct {
		once sync.Once // makes all
		all  []*loop
		next atomic.Uint32
	}

	closing  sync.Once
	closeErr error
	stop     chan struct{} // closed by Close
	stopped  chan struct{} // closed when the accept loop has ended
}

var _ driver.Listener = (*listener)(nil)

// Listen accepts connections at addr, "host:port"; port 0 picks one.
func (d *device) Listen(addr string, o driver.ListenOptions) (driver.Listener, error) {
	if o.Accept == nil {
		return nil, errors.New("ListenOptions.Accept is nil")
	}
	lc := net.ListenConfig{KeepAlive: -1, Control: control(d.o.SocketBuffer/2, d.o.SocketBuffer)}
	listen := func() (net.Listener, error) { return lc.Listen(context.Background(), "tcp", addr) }
	var sock net.Listener
	var err error
	if d.o.Socket != nil {
		sock, err = d.o.Socket(addr, listen)
	} else {
		sock, err = listen()
	}
	if err != nil {
		return nil, err
	}
	ln, ok := sock.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("listen %s: not a tcp socket", addr), sock.Close())
	}
	l := &listener{d: d, o: o, ln: ln, stop: make(chan struct{}), stopped: make(chan struct{})}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		_ = ln.Close()
		return nil, driver.ErrClosed
	}
	d.mu.listeners[l] = struct{}{}
	go l.accept()
	return l, nil
}

func (l *listener) Addr() string { return l.ln.Addr().String() }

// CPUNanos is the time that this listener's agents, or loops of them, spent running. They run from waking up
// with input, or room for output, until waiting again. The time includes the read(2) and write(2) themselves,
// TLS, and executing the verbs. It leaves out the kernel's work in softirqs and the Go scheduler's between
// wake-ups. It counts time in which a running agent was preempted.
func (l *listener) CPUNanos() int64 { return l.cpu.Load() }

func (l *listener) accept() {
	defer close(l.stopped)
	for {
		c, g, err := l.d.o.Door.Accept(l.ln, l.stop)
		if err != nil {
			return
		}
		if err := l.start(c.(*net.TCPConn), g); err != nil {
			_ = c.Close()
			g.Release()
			if f := l.d.o.Events.PeerClosed; f != nil {
				f(PeerClosed{Remote: c.RemoteAddr().String(), Reason: ReasonHandshake, Err: err})
			}
		}
	}
}

func (l *listener) start(c *net.TCPConn, g *netsrv.Guest) error {
	if _, err := l.d.tune(c); err != nil {
		return err
	}
	m, err := newMeteredConn(c, c.LocalAddr(), c.RemoteAddr(), &l.cpu)
	if err != nil {
		return err
	}
	a := newAgent(l, m, c.RemoteAddr().String())
	a.guest = g
	if l.d.o.TLSServer != nil {
		a.conn = tls.Server(m, l.d.o.TLSServer)
	} else if l.d.loops > 0 {
		a.calm = 0
	}
	l.d.mu.Lock()
	l.d.mu.agents[a] = struct{}{}
	l.d.mu.Unlock()
	l.wg.Add(1)
	go a.serve()
	return nil
}

func newAgent(l *listener, nc stream, remote string) *agent {
	return &agent{l: l, remote: remote, nc: nc, conn: nc, calm: neverCalm,
		buffers: takeBuffers(), back: make(chan error, 1), done: make(chan struct{})}
}

// Close fences every peer and returns when all agents have ended.
func (l *listener) Close() error {
	l.closing.Do(func() {
		close(l.stop)
		l.closeErr = l.ln.Close()
		<-l.stopped // no agent is started any more
		d := l.d
		d.mu.Lock()
		for a := range d.mu.agents {
			if a.l == l {
				a.fence()
			}
		}
		d.mu.Unlock()
		l.wg.Wait()
		for _, p := range l.loops.all {
			p.close()
		}
		d.mu.Lock()
		delete(d.mu.listeners, l)
		d.mu.Unlock()
	})
	return l.closeErr
}
