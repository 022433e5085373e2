package netsrv

import (
	"cmp"
	"container/list"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Limits are those of a [Door]. The zero value of every field is its default.
type Limits struct {
	// MaxConns is how many connections may be open at a time. Default 10,000.
	MaxConns int
	// MaxPerAddr is how many of them one address may have. An address is an IPv4 address, or an IPv6 network of 64
	// bits, since a host has one of those to itself. Connections from this machine, over loopback or a Unix socket,
	// count in MaxConns only. Default three quarters of MaxConns. Many clients may share an address (NAT, a load
	// balancer). Even if all do they find most of the places, while no single address can take the last.
	MaxPerAddr int
	// MaxHandshakes is how many connections may be open whose handshake is not over. Default 1,024, and at
	// most MaxConns.
	MaxHandshakes int
	// HandshakeTimeout closes a connection whose handshake takes longer. Default 10 s.
	HandshakeTimeout time.Duration
	// Replace makes connections that do nothing give way, too; see [Door]. It is for listeners whose clients
	// lose nothing by that, and for some hundred connections at most. A new one over a limit looks at all
	// connections.
	Replace bool
	// Light says that a connection is cheap to make and to have, so new ones matter more than old ones. A new one does
	// not wait until the server is done with the one that gave way to it. net/http takes half a second for that after a
	// request that it could not read, and nobody came in meanwhile.
	Light bool
	// Refuse, if not nil, may say last words to a connection that is refused, unless it speaks TLS. It runs in the
	// goroutine that accepts, and the connection has a deadline already.
	Refuse func(net.Conn)
	// Logger hears of refused connections and of failures to accept, at most once in 5 s each. Default: discard.
	Logger *slog.Logger
}

const (
	defaultMaxConns         = 10_000
	defaultMaxHandshakes    = 1024
	defaultHandshakeTimeout = 10 * time.Second
	// welcomeTime is what a connection has at least, with Limits.Replace, before it gives way.
	welcomeTime = 10 * time.Millisecond
	// silence is how long a connection has done nothing that gives way before those that do something.
	silence = 500 * time.Millisecond
	// evictPatience is how long a newcomer waits for the memory of the connection that gave way to it.
	evictPatience = time.Second
	// logPause is between two lines of the log about one thing.
	logPause = 5 * time.Second
)

func (o *Limits) ensureDefaults() {
	o.MaxConns = cmp.Or(o.MaxConns, defaultMaxConns)
	o.MaxPerAddr = cmp.Or(o.MaxPerAddr, max(o.MaxConns*3/4, 1))
	o.MaxHandshakes = cmp.Or(o.MaxHandshakes, min(defaultMaxHandshakes, o.MaxConns))
	o.HandshakeTimeout = cmp.Or(o.HandshakeTimeout, defaultHandshakeTimeout)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate joins every problem.
func (o *Limits) Validate() error {
	var errs []error
	for _, f := range []struct {
		name string
		n    int
	}{{"MaxConns", o.MaxConns}, {"MaxPerAddr", o.MaxPerAddr}, {"MaxHandshakes", o.MaxHandshakes}} {
		if f.n < 0 {
			errs = append(errs, fmt.Errorf("%s: %d: must be positive", f.name, f.n))
		}
	}
	if o.HandshakeTimeout < 0 {
		errs = append(errs, fmt.Errorf("HandshakeTimeout: %v: must be positive", o.HandshakeTimeout))
	}
	return errors.Join(errs...)
}

// Reason is why a Door refused or closed a connection. The zero value is invalid.
type Reason uint8

const (
	// ReasonFull: MaxConns were open.
	ReasonFull Reason = 1 + iota
	// ReasonAddress: the address had MaxPerAddr.
	ReasonAddress
	// ReasonHandshake: it gave way to another before its handshake, or a request, was there whole.
	ReasonHandshake
	// ReasonTimeout: its handshake took longer than HandshakeTimeout, or a request too long.
	ReasonTimeout
	// ReasonIdle: it did nothing, and gave way to another.
	ReasonIdle
)

// NumReasons bounds arrays indexed by Reason.
const NumReasons = 6

func (r Reason) String() string {
	names := [NumReasons]string{"invalid", "full", "address", "handshake", "timeout", "idle"}
	if r >= NumReasons {
		return fmt.Sprintf("Reason(%d)", uint8(r))
	}
	return names[r]
}

// Door decides which connections of one or several listeners are let in, and counts them until they are
// released. Nothing has been read from a connection when it decides, so a stranger costs a descriptor and no more.
//
// A connection over a limit takes the place of one whose handshake is not over. That is the oldest of the address that
// has most of those, or, over MaxPerAddr, the oldest of the same address. So a flood of half handshakes takes places
// from itself first. If there is none, the new connection is refused. With Replace, an open connection that is not busy
// gives way to it instead. The first to give way is one whose handshake is not over, then one that has done nothing for
// half a second. The next is one of the address that has most connections, then the one that has done nothing for
// longest. Each has 10 ms first, so that whoever comes amid a flood is heard: if all are younger than that, accepting
// waits.
//
// If the process is out of descriptors, a connection gives way likewise, and accepting pauses for 5 ms
// up to a second. The listener lives on.
//
// A Door's methods may be called concurrently.
type Door struct {
	o        Limits
	accepted atomic.Uint64
	refused  [NumReasons]atomic.Uint64
	failures atomic.Uint64

	mu struct {
		sync.Mutex
		guests map[*Guest]struct{}
		hosts  map[netip.Prefix]*host
		greets list.List // of *Guest, oldest first: those whose handshake is not over
	}
	// When the log was last told of refused connections, and of failures to accept; ns since began.
	toldRefused, toldFailed atomic.Int64
}

var began = time.Now()

// mayTell reports whether a line of the log is due again after the one at last.
func mayTell(last *atomic.Int64) bool {
	was, now := last.Load(), int64(time.Since(began))+1
	return (was == 0 || now-was >= int64(logPause)) && last.CompareAndSwap(was, now)
}

// host counts the connections of one address.
type host struct{ conns, greets int }

// DoorStats is a snapshot of a Door.
type DoorStats struct {
	Conns      int                // open
	Handshakes int                // of them, not over
	Accepted   uint64             // ever
	Refused    [NumReasons]uint64 // refused, or closed, by Reason
	Failures   uint64             // of accept(2), for want of descriptors or memory
}

// NewDoor makes a Door.
func NewDoor(o Limits) (*Door, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.ensureDefaults()
	d := &Door{o: o}
	d.mu.guests = make(map[*Guest]struct{})
	d.mu.hosts = make(map[netip.Prefix]*host)
	return d, nil
}

// Stats may be called at any time.
func (d *Door) Stats() DoorStats {
	s := DoorStats{Accepted: d.accepted.Load(), Failures: d.failures.Load()}
	for r := range s.Refused {
		s.Refused[r] = d.refused[r].Load()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.Conns, s.Handshakes = len(d.mu.guests), d.mu.greets.Len()
	return s
}

// ErrGaveWay: there were too many connections, and another took the place of this one.
var ErrGaveWay = errors.New("the connection gave way to another")

// Guest is a connection that a Door has let in. It counts until Release. Its methods may be called concurrently.
type Guest struct {
	d        *Door
	raw      net.Conn
	from     netip.Prefix // zero: a Unix socket
	local    bool
	since    time.Time
	timer    *time.Timer // of the handshake
	heard    atomic.Int64
	released chan struct{}

	// Guarded by Door.mu.
	greet *list.Element // nil: the handshake is over
	busy  bool
	gone  bool // out of Door.mu.guests
	why   Reason
}

// rawConn is the connection below TLS.
func rawConn(c net.Conn) (raw net.Conn, isTLS bool) {
	for {
		t, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c, isTLS
		}
		c, isTLS = t.NetConn(), true
	}
}

// origin is the address that c counts for, and whether it is of this machine.
func origin(c net.Conn) (from netip.Prefix, local bool) {
	t, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}, true
	}
	a, _ := netip.AddrFromSlice(t.IP)
	a = a.Unmap()
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	from, _ = a.Prefix(bits)
	return from, a.IsLoopback()
}

// Accept gives the next connection of l that the Door lets in, until l is closed or stop is; the error is then a
// net.ErrClosed. The caller releases the Guest when it has closed the connection.
func (d *Door) Accept(l net.Listener, stop <-chan struct{}) (net.Conn, *Guest, error) {
	for backoff := minBackoff; ; {
		c, err := l.Accept()
		if err == nil {
			if g := d.admit(c, stop); g != nil {
				return c, g, nil
			}
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return nil, nil, fmt.Errorf("accept on %s: %w", l.Addr(), err)
		}
		d.outOfDescriptors(l, err, backoff)
		t := time.NewTimer(backoff)
		select {
		case <-t.C:
		case <-stop:
			t.Stop()
			return nil, nil, fmt.Errorf("accept on %s: %w", l.Addr(), net.ErrClosed)
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// outOfDescriptors tells of a failure to accept, and makes room if it can.
func (d *Door) outOfDescriptors(l net.Listener, err error, backoff time.Duration) {
	n := d.failures.Add(1)
	if mayTell(&d.toldFailed) {
		d.o.Logger.Warn("accept failed: connections wait", "listener", l.Addr(), "error", err, "retry", backoff,
			"failures", n)
	}
	d.mu.Lock()
	goes, _ := d.removeLeastWelcomeLocked(nil)
	d.mu.Unlock()
	if goes != nil {
		goes.evict()
	}
}

// admit lets c in, or closes it and gives nil.
func (d *Door) admit(c net.Conn, stop <-chan struct{}) *Guest {
	raw, isTLS := rawConn(c)
	g := &Guest{d: d, raw: raw, since: time.Now(), released: make(chan struct{})}
	g.from, g.local = origin(raw)
	g.heard.Store(g.since.UnixNano())
	goes, why, wait := d.addGuest(g)
	for wait > 0 {
		t := time.NewTimer(wait)
		select {
		case <-t.C:
			goes, why, wait = d.addGuest(g)
		case <-stop:
			t.Stop()
			_ = raw.Close() // nobody has begun to talk
			return nil
		}
	}
	if goes != nil {
		goes.evict()
	}
	if why != 0 {
		d.count(why, c)
		if d.o.Refuse != nil && !isTLS {
			_ = c.SetDeadline(time.Now().Add(refuseTimeout))
			d.o.Refuse(c)
		}
		_ = raw.Close() // nobody has begun to talk
		return nil
	}
	d.accepted.Add(1)
	if goes != nil && !d.o.Light {
		// The memory of the one that gives way is not had twice.
		t := time.NewTimer(evictPatience)
		defer t.Stop()
		select {
		case <-goes.released:
		case <-t.C:
		case <-stop:
		}
	}
	return g
}

// addGuest adds g, and gives the connection that has to go for it, if any, or why g is refused, or how long to wait
// because all that could go have only just come.
func (d *Door) addGuest(g *Guest) (goes *Guest, why Reason, wait time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.mu.hosts[g.from]
	if h == nil {
		h = new(host)
	}
	for _, limit := range []struct {
		over bool
		of   *netip.Prefix
		why  Reason
	}{
		{!g.local && h.conns >= d.o.MaxPerAddr, &g.from, ReasonAddress},
		{len(d.mu.guests) >= d.o.MaxConns, nil, ReasonFull},
		{d.mu.greets.Len() >= d.o.MaxHandshakes, nil, ReasonHandshake},
	} {
		if !limit.over {
			continue
		}
		if goes, wait = d.removeLeastWelcomeLocked(limit.of); wait > 0 {
			return nil, 0, wait
		} else if goes == nil {
			return nil, limit.why, 0
		}
		break // the one that goes makes room in every respect
	}
	d.mu.hosts[g.from] = h // its last connection may have gone
	h.conns++
	h.greets++
	d.mu.guests[g] = struct{}{}
	g.greet = d.mu.greets.PushBack(g)
	g.timer = time.AfterFunc(d.o.HandshakeTimeout, g.expire)
	return goes, 0, 0
}

// removeLeastWelcomeLocked takes out the connection that gives way to another, of an address if that is not nil; nil
// if there is none, or none until wait is over.
func (d *Door) removeLeastWelcomeLocked(of *netip.Prefix) (worst *Guest, wait time.Duration) {
	if d.o.Replace {
		now := time.Now()
		for x := range d.mu.guests {
			if x.busy || of != nil && x.from != *of {
				continue
			}
			if (x.greet != nil || d.o.Light) && now.Sub(x.since) < welcomeTime {
				wait = welcomeTime / 2 // and not until the first is old enough: then one would come in for each wait
			} else if worst == nil || x.lessWelcomeLocked(worst, now) {
				worst = x
			}
		}
		if wait > 0 && !d.o.Light && worst != nil && worst.greet == nil && !worst.isSilent(now) {
			return nil, wait // those that are heard do not go for a flood of those that are not
		}
	} else {
		most := 0
		for e := d.mu.greets.Front(); e != nil; e = e.Next() {
			x := e.Value.(*Guest)
			if of != nil && x.from != *of {
				continue
			}
			if n := d.mu.hosts[x.from].greets; n > most {
				worst, most = x, n
			}
			if of != nil {
				break
			}
		}
	}
	if worst == nil {
		return nil, wait
	}
	worst.why = ReasonIdle
	if worst.greet != nil {
		worst.why = ReasonHandshake
	}
	worst.removeLocked()
	return worst, 0
}

// lessWelcomeLocked reports whether g gives way before x does.
func (g *Guest) lessWelcomeLocked(x *Guest, now time.Time) bool {
	if a, b := g.greet != nil, x.greet != nil; a != b {
		return a
	}
	if a, b := g.isSilent(now), x.isSilent(now); a != b {
		return a
	}
	if a, b := g.d.mu.hosts[g.from].conns, g.d.mu.hosts[x.from].conns; a != b {
		return a > b
	}
	return g.heard.Load() < x.heard.Load()
}

// isSilent reports whether the connection has done nothing lately.
func (g *Guest) isSilent(now time.Time) bool { return now.UnixNano()-g.heard.Load() >= int64(silence) }

// count counts a connection that was refused or closed, and tells the log of it now and then. The caller does not
// hold the lock.
func (d *Door) count(why Reason, c net.Conn) {
	n := d.refused[why].Add(1)
	if mayTell(&d.toldRefused) {
		s := d.Stats()
		d.o.Logger.Warn("too many connections: some are refused or closed", "listener", c.LocalAddr(), "peer",
			c.RemoteAddr(), "reason", why,
			"so_far", n, "open", s.Conns, "most", d.o.MaxConns, "handshakes", s.Handshakes)
	}
}

// removeLocked takes g out of the books, once.
func (g *Guest) removeLocked() {
	if g.gone {
		return
	}
	g.gone = true
	g.finishLocked()
	delete(g.d.mu.guests, g)
	h := g.d.mu.hosts[g.from]
	if h.conns--; h.conns == 0 {
		delete(g.d.mu.hosts, g.from)
	}
}

func (g *Guest) finishLocked() {
	if g.greet == nil {
		return
	}
	g.d.mu.greets.Remove(g.greet)
	g.greet = nil
	g.d.mu.hosts[g.from].greets--
	g.timer.Stop()
}

// Evict closes the connection, unless it has had to go already. It had to if what was on its way
// had to give way (ReasonHandshake), or took too long (ReasonTimeout).
func (g *Guest) Evict(why Reason) {
	g.d.mu.Lock()
	goes := !g.gone
	if goes {
		g.why = why
		g.removeLocked()
	}
	g.d.mu.Unlock()
	if goes {
		g.evict()
	}
}

// evict closes the connection, which is out of the books, below whoever serves it, who notices and releases it.
func (g *Guest) evict() {
	_ = g.raw.Close() // the peer sees the end either way
	g.d.count(g.why, g.raw)
}

// expire is called when the time for the handshake is over.
func (g *Guest) expire() {
	if g.removeLate() {
		g.evict()
	}
}

// removeLate takes g out of the books if its handshake has taken too long.
func (g *Guest) removeLate() bool {
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	if g.greet == nil || time.Since(g.since) < g.d.o.HandshakeTimeout {
		return false
	}
	g.why = ReasonTimeout
	g.removeLocked()
	return true
}

// Finish says that the handshake is over. It reports false if the connection had to give way, and is closed.
func (g *Guest) Finish() bool {
	g.Touch()
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	g.finishLocked()
	return !g.gone
}

// Err is why the Door closed the connection: nil if it did not, an os.ErrDeadlineExceeded if the handshake took too
// long, else ErrGaveWay.
func (g *Guest) Err() error {
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	switch g.why {
	case 0:
		return nil
	case ReasonTimeout:
		return fmt.Errorf("handshake not over after %v: %w", g.d.o.HandshakeTimeout, os.ErrDeadlineExceeded)
	}
	return ErrGaveWay
}

// Touch says that the connection has just done something. It is cheap.
func (g *Guest) Touch() { g.heard.Store(time.Now().UnixNano()) }

// SetBusy says whether the connection is at work, so that it does not give way; see Limits.Replace.
func (g *Guest) SetBusy(busy bool) {
	g.Touch()
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	g.busy = busy
}

// Release says that the connection is closed and what served it is gone. It is called once.
func (g *Guest) Release() {
	if g.removeLate() { // whoever served it noticed that sooner than the timer
		g.d.count(g.why, g.raw)
	}
	g.d.mu.Lock()
	g.removeLocked()
	g.d.mu.Unlock()
	close(g.released)
}

// Listen gives a listener for servers of others (gRPC, HTTP): its connections are of type [*Conn] and those of l
// that the Door lets in. Closing the listener closes l.
func (d *Door) Listen(l net.Listener) net.Listener {
	return &doorListener{Listener: l, d: d, stop: make(chan struct{})}
}

type doorListener struct {
	net.Listener
	d    *Door
	stop chan struct{}
	once sync.Once
}

func (l *doorListener) Accept() (net.Conn, error) {
	c, g, err := l.d.Accept(l.Listener, l.stop)
	if err != nil {
		return nil, err
	}
	return &Conn{Conn: c, Guest: g}, nil
}

func (l *doorListener) Close() error {
	l.once.Do(func() { close(l.stop) })
	return l.Listener.Close()
}

// Conn is a connection whose Close releases its Guest.
type Conn struct {
	net.Conn
	Guest *Guest
	once  sync.Once
}

// SetDeadline ends the handshake if t is zero: servers that bound handshakes by a deadline (gRPC) lift it then.
func (c *Conn) SetDeadline(t time.Time) error {
	if t.IsZero() {
		c.Guest.Finish()
	}
	return c.Conn.SetDeadline(t)
}

// Close may be called several times.
func (c *Conn) Close() error {
	err := c.Conn.Close()
	c.once.Do(c.Guest.Release)
	return err
}
