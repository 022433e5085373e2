//go:build verbs && cgo && linux

package verbs

// #include "shim_cm.h"
import "C"

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

// keepAlive finds a peer whose machine has gone while nothing is under way.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 3}

// Dial connects the control channel, exchanges what the queue pairs need to know
// of each other, and moves ours to RTS.
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
	dialer := net.Dialer{Timeout: d.o.HandshakeTimeout, KeepAliveConfig: keepAlive}
	raw, err := dialer.DialContext(ctx, "tcp", r.Addr)
	if err != nil {
		return nil, err
	}
	q, err := d.greet(ctx, raw, p, c, r)
	if err != nil {
		_ = raw.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", ctx.Err(), err)
		}
		return nil, err
	}
	return q, nil
}

func (d *device) greet(ctx context.Context, conn net.Conn, p *pd, c *cq, r driver.DialRequest) (_ *qp, err error) {
	_ = conn.SetDeadline(time.Now().Add(d.o.HandshakeTimeout))
	raw := conn
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if conn, err = d.secure(ctx, conn, r.Addr); err != nil {
		return nil, err
	}
	q, err := newQP(d, p, c, 0)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			q.ctl = nil
			err = errors.Join(err, q.Close())
		}
	}()
	h := hello{ways: d.o.Connect.ways(d.iwarp()), domain: domainAgent, ep: d.endpoint(q.num), private: r.Private}
	if d.canCAS {
		h.domain = domainNIC
	}
	if _, err := conn.Write(h.append(nil)); err != nil {
		return nil, err
	}
	var head [headSize + maxRefusal]byte
	if _, err := io.ReadFull(conn, head[:headSize]); err != nil {
		return nil, fmt.Errorf("welcome: %w", err)
	}
	w, err := parseWelcome(head[:headSize])
	if err != nil {
		return nil, fmt.Errorf("welcome: %w", err)
	}
	if w.refused {
		text := head[headSize:][:w.textLen]
		if _, err := io.ReadFull(conn, text); err != nil {
			return nil, fmt.Errorf("welcome: %w", err)
		}
		return nil, fmt.Errorf("%w: %s", driver.ErrRefused, printable(string(text)))
	}
	if w.domain == domainNIC && !d.canCAS {
		return nil, fmt.Errorf("the memory node's atomics are its adapter's, and ours (%s) has none", d.info.Name)
	}
	if d.iwarp() && w.domain != domainAgent {
		return nil, errors.New("the memory node's adapter is not of iWARP, and ours is")
	}
	if w.domain == domainAgent {
		if q.hold, err = newAgentQueue(q); err != nil {
			return nil, err
		}
	}
	if w.way&h.ways == 0 {
		return nil, errors.New("the memory node does not connect by the RDMA connection manager, which this side " +
			"needs: it is of an older version, or set to tcp")
	}
	if w.way == wayCM {
		b := head[headSize:][:rendezvousSize]
		if _, err := io.ReadFull(conn, b); err != nil {
			return nil, fmt.Errorf("welcome: %w", err)
		}
		if w.meet, err = parseRendezvous(b); err != nil {
			return nil, fmt.Errorf("welcome: %w", err)
		}
		if q.hold != nil {
			q.hold.meet = w.meet
		}
		err = q.connectCM(ctx, &h.ep, &w.ep, &w.meet)
	} else {
		err = q.connect(h.ep, w.ep)
	}
	if err != nil {
		return nil, err
	}
	if !stop() {
		return nil, ctx.Err()
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	q.ctl, q.ctlDone, q.goodbye = conn, make(chan struct{}), make(chan struct{})
	go q.watchPeer()
	return q, nil
}

// secure adds TLS to the control channel if it is configured.
func (d *device) secure(ctx context.Context, conn net.Conn, addr string) (net.Conn, error) {
	if d.o.TLSClient == nil {
		return conn, nil
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	cfg, err := certs.ForHost(d.o.TLSClient, host)
	if err != nil {
		return nil, err
	}
	cfg.MinVersion = max(cfg.MinVersion, tls.VersionTLS13)
	t := tls.Client(conn, cfg)
	return t, t.HandshakeContext(ctx)
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

// listener is the passive side's control channel.
type listener struct {
	d   *device
	o   driver.ListenOptions
	ln  *net.TCPListener
	cq  *C.struct_ibv_cq // of queue pairs that post nothing
	ch  *C.struct_ibv_comp_channel
	cpu atomic.Int64
	wg  sync.WaitGroup // every peer

	mu struct {
		sync.Mutex
		closed bool
		peers  map[*peer]struct{}
	}
	closing  sync.Once
	closeErr error
	stop     chan struct{}
	stopped  chan struct{} // closed when the accept loop has ended
	cm       cmListener
}

var _ driver.Listener = (*listener)(nil)

// Listen accepts connections at addr, "host:port"; port 0 picks one.
func (d *device) Listen(addr string, o driver.ListenOptions) (driver.Listener, error) {
	if o.Accept == nil {
		return nil, errors.New("ListenOptions.Accept is nil")
	}
	lc := net.ListenConfig{KeepAlive: -1} // start says what each connection has
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
	l.mu.peers = make(map[*peer]struct{})
	if rc := C.kvd_create_cq(d.ctx, 16, &l.cq, &l.ch); rc != 0 {
		_ = ln.Close()
		return nil, limited("create CQ", 4096, rc)
	}
	abandon := func(err error) (driver.Listener, error) {
		l.cm.close()
		_ = ln.Close()
		_ = C.kvd_destroy_cq(l.cq, l.ch)
		return nil, err
	}
	if d.o.Connect.ways(d.iwarp()) == wayCM {
		if err := l.cm.open(l); err != nil {
			return abandon(err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return abandon(driver.ErrClosed)
	}
	d.mu.listeners++
	go l.accept()
	return l, nil
}

func (l *listener) Addr() string { return l.ln.Addr().String() }

// CPUNanos is the time spent executing atomics by agents; 0 if the adapter
// executes them.
func (l *listener) CPUNanos() int64 { return l.cpu.Load() }

func (l *listener) accept() {
	defer close(l.stopped)
	for {
		c, g, err := l.d.o.Door.Accept(l.ln, l.stop)
		if err != nil {
			return
		}
		l.start(c, g)
	}
}

func (l *listener) start(c net.Conn, g *netsrv.Guest) {
	_ = c.(*net.TCPConn).SetKeepAliveConfig(keepAlive) // it fails for a connection that has ended, as serve will find
	p := &peer{l: l, remote: c.RemoteAddr().String(), conn: c, guest: g, done: make(chan struct{})}
	if l.d.o.TLSServer != nil {
		p.conn = tls.Server(c, certs.With(l.d.o.TLSServer, func(cfg *tls.Config) {
			cfg.MinVersion = max(cfg.MinVersion, tls.VersionTLS13)
		}))
	}
	l.mu.Lock()
	l.mu.peers[p] = struct{}{}
	l.mu.Unlock()
	l.wg.Add(1)
	go p.serve()
}

// Close fences every peer and returns when all of them are gone.
func (l *listener) Close() error {
	l.closing.Do(func() { l.closeErr = l.end() })
	return l.closeErr
}

func (l *listener) end() error {
	close(l.stop)
	err := l.ln.Close()
	<-l.stopped // no peer comes any more
	l.cm.close()
	l.mu.Lock()
	var errs []error
	for p := range l.mu.peers {
		errs = append(errs, p.fence())
	}
	l.mu.Unlock()
	l.wg.Wait()
	if rc := C.kvd_destroy_cq(l.cq, l.ch); rc != 0 {
		errs = append(errs, fmt.Errorf("verbs: close listener: destroy CQ: %w", syscall.Errno(rc)))
	}
	l.d.mu.Lock()
	l.d.mu.listeners--
	l.d.mu.Unlock()
	return errors.Join(append(errs, err)...)
}

// peer is one connection's passive side: a queue pair that, unless an agent
// executes atomics, posts nothing and completes nothing, and the control channel.
type peer struct {
	l        *listener
	remote   string
	conn     net.Conn
	guest    *netsrv.Guest
	pd       *pd
	access   driver.Access
	accepted bool
	done     chan struct{} // closed when serve has ended

	mu    sync.Mutex
	dead  bool // no queue pair, or none any more
	err   error
	qp    *C.struct_ibv_qp
	agent *agent

	// If the connection manager connects: what is awaited, until overdue wakes serve, and what has come.
	nonce   nonce
	overdue *time.Timer
	path    C.struct_kvd_path
	cmID    *C.struct_rdma_cm_id
}

var _ driver.Peer = (*peer)(nil)

func (p *peer) Remote() string { return p.remote }

// Fence destroys the queue pair: when that has returned the adapter executes
// nothing of the peer any more.
func (p *peer) Fence(ctx context.Context) error {
	err := p.fence()
	select {
	case <-p.done:
	case <-ctx.Done():
		return errors.Join(err, ctx.Err())
	}
	return err
}

func (p *peer) fence() error {
	err := p.kill()
	p.wake()
	return err
}

// wake ends serve's waiting; it still says goodbye.
func (p *peer) wake() { _ = p.conn.SetReadDeadline(time.Unix(1, 0)) }

// kill moves the queue pair to the error state and destroys it, once.
func (p *peer) kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return p.err
	}
	p.dead = true
	if p.qp == nil {
		return nil
	}
	begin := time.Now()
	rc := C.kvd_err(p.qp)
	if p.agent != nil {
		p.agent.stop()
	}
	if rc2 := C.kvd_destroy_qp(p.qp); rc2 != 0 {
		p.err = fmt.Errorf("verbs: fence %s: destroy QP: %w", p.remote, syscall.Errno(rc2))
		if rc != 0 {
			return p.err // it may still be at work
		}
	}
	p.l.d.o.Logger.Debug("QP destroyed", "remote", p.remote, "took", time.Since(begin))
	p.qp = nil
	if p.cmID != nil {
		p.l.cm.m.drop(p.cmID)
	}
	if p.agent != nil {
		p.err = errors.Join(p.err, p.agent.free())
	}
	return p.err
}

func (p *peer) serve() {
	defer p.l.wg.Done()
	err := p.handshake()
	if err == nil {
		_ = p.conn.SetDeadline(time.Time{})
		p.mu.Lock()
		if p.dead { // fenced meanwhile
			p.wake()
		}
		p.mu.Unlock()
		var b [1]byte
		_, _ = p.conn.Read(b[:]) // bye, the end, or a fence
	} else {
		p.l.d.o.Logger.Debug("RDMA connection not made", "remote", p.remote, "err", err)
	}
	if kerr := p.kill(); kerr != nil {
		p.l.d.o.Logger.Error("QP not destroyed", "remote", p.remote, "err", kerr)
	} else if err == nil {
		_ = p.conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = p.conn.Write([]byte{wireGoodbye})
	}
	_ = p.conn.Close()
	if p.overdue != nil {
		p.overdue.Stop()
		p.l.cm.take(p.nonce)
	}
	p.guest.Release()
	p.l.mu.Lock()
	delete(p.l.mu.peers, p)
	p.l.mu.Unlock()
	if p.pd != nil {
		p.pd.removeQP()
	}
	if p.accepted && p.l.o.Closed != nil {
		p.l.o.Closed(p)
	}
	close(p.done)
}

// handshake ends with a welcome or a refusal.
func (p *peer) handshake() error {
	d := p.l.d
	// The Door ends a handshake that takes too long.
	var b [headSize + driver.MaxPrivate]byte
	if _, err := io.ReadFull(p.conn, b[:headSize]); err != nil {
		return err
	}
	h, n, err := parseHello(b[:headSize])
	if err != nil {
		return err
	}
	h.private = b[headSize:][:n]
	if _, err := io.ReadFull(p.conn, h.private); err != nil {
		return err
	}
	w, err := p.admit(&h)
	if err == nil && !p.guest.Finish() {
		err = p.guest.Err()
	}
	var text string
	if err != nil {
		w, text = welcome{refused: true}, err.Error()
	}
	_ = p.conn.SetWriteDeadline(time.Now().Add(d.o.HandshakeTimeout)) // Accept may have taken its time
	_, werr := p.conn.Write(w.append(nil, text))
	return errors.Join(err, werr)
}

// admit asks the user and makes the queue pair.
func (p *peer) admit(h *hello) (w welcome, err error) {
	d := p.l.d
	w.domain = domainAgent
	if d.native {
		w.domain = domainNIC
		if h.domain != domainNIC {
			return w, errors.New("this side's atomics are its adapter's, and the dialer's adapter has none")
		}
	}
	if w.way, err = d.o.Connect.ways(d.iwarp()).choose(h.ways); err != nil {
		return w, err
	}
	q := driver.ConnRequest{Private: h.private, Remote: p.remote, Peer: p}
	if c, ok := p.conn.(*tls.Conn); ok {
		s := c.ConnectionState()
		q.TLS = &s
	}
	dpd, access, err := p.l.o.Accept(q)
	if err != nil {
		return w, err
	}
	p.accepted = true
	own, ok := dpd.(*pd)
	if !ok || own.d != d {
		return w, errors.New("the PD that was chosen is not of this device")
	}
	if err := d.limitable(access); err != nil {
		return w, err
	}
	if err := own.addQP(); err != nil {
		return w, err
	}
	p.pd, p.access = own, access
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return w, errors.New("fenced while connecting")
	}
	cq := p.l.cq
	var a *agent
	if !d.native {
		if a, err = newAgent(p); err != nil {
			return w, err
		}
		cq = a.cq
	}
	undo := func(err error) error {
		if p.qp != nil {
			_ = C.kvd_destroy_qp(p.qp)
			p.qp = nil
		}
		if a != nil {
			err = errors.Join(err, a.free())
		}
		return err
	}
	var inline C.int
	if rc := C.kvd_create_qp(own.c, cq, recvBuffers, recvBuffers, 1, 0, &p.qp, &inline); rc != 0 {
		p.qp = nil
		return w, undo(limited("create QP", 4096, rc))
	}
	if rc := d.initQP(p.qp, accessFlags(access&^driver.AccessLocal, d.native)); rc != 0 {
		return w, undo(fmt.Errorf("QP to INIT: %w", syscall.Errno(rc)))
	}
	w.ep = d.endpoint(uint32(p.qp.qp_num))
	w.ep.rdAtomic = min(h.ep.rdAtomic, d.destDepth)
	path, err := d.path(&w.ep, &h.ep)
	if err != nil {
		return w, undo(err)
	}
	if a != nil {
		if err := a.prepare(p.qp); err != nil {
			return w, undo(err)
		}
	}
	if w.way == wayCM {
		if err := p.l.cm.open(p.l); err != nil {
			return w, undo(err)
		}
		p.path, w.meet = path, p.l.cm.await(p)
		if a != nil && a.ms.word != nil {
			w.meet.word, w.meet.wordRKey = a.ms.word.Base(), uint32(a.ms.word.RKey())
		}
	} else if err := p.connect(&path, a != nil); err != nil {
		return w, undo(fmt.Errorf("%w, towards %v", err, &h.ep))
	}
	if p.agent = a; a != nil {
		a.start()
	}
	return w, nil
}

// connect moves the queue pair from INIT to RTR, and to RTS if it sends.
func (p *peer) connect(path *C.struct_kvd_path, sends bool) error {
	if rc := C.kvd_rtr(p.qp, path); rc != 0 {
		return fmt.Errorf("QP to RTR: %w", syscall.Errno(rc))
	}
	if sends {
		if rc := C.kvd_rts(p.qp, path); rc != 0 {
			return fmt.Errorf("QP to RTS: %w", syscall.Errno(rc))
		}
	}
	return nil
}
