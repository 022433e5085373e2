package verbperf

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// A ping-pong has two connections. The active side dials the passive side as for
// the other verbs and, in the private data, says where it listens itself, which
// memory it lends and how long a message is; the passive side dials back. Then
// they take turns to WRITE a message whose last 8 bytes count the rounds, and to
// look at that word of their own memory until the other's message is there.
//
// The private data of a connection, words separated by a blank:
//
//	kvctl perf 1                                        verbs on the passive side's memory
//	kvctl perf 2 ping BYTES ADDRESS RKEY BASE SECRET    the same, and: dial ADDRESS
//	kvctl perf 2 pong SECRET                            the passive side has come
//
// A message lies at the start of the lent memory, moved up so that its last
// word is aligned.
const (
	preamble   = "kvctl perf "
	plain      = preamble + "1"
	pingPrefix = preamble + "2 ping "
	pongPrefix = preamble + "2 pong "
)

// shmPingpong begins the names that a passive side of shm connects to.
const shmPingpong = "@kvctl-perf-"

// ping is what the active side asks for.
type ping struct {
	bytes      int // of a message
	addr       string
	rkey, base uint64
	secret     string
}

func (g ping) String() string {
	return fmt.Sprintf("%s%d %s %#x %#x %s", pingPrefix, g.bytes, g.addr, g.rkey, g.base, g.secret)
}

// parsePing checks what a stranger asks for. remote is who asks, as the provider
// knows it: the only host that this side would connect to.
func parsePing(private, provider, remote string) (g ping, err error) {
	f := strings.Split(strings.TrimPrefix(private, pingPrefix), " ")
	if len(f) != 5 || f[4] == "" {
		return g, errors.New("ping-pong: want BYTES ADDRESS RKEY BASE SECRET")
	}
	g.addr, g.secret = f[1], f[4]
	if g.bytes, err = strconv.Atoi(f[0]); err != nil || g.bytes < 8 || g.bytes > Region {
		return g, fmt.Errorf("ping-pong: %.20q bytes, want 8 to %d", f[0], Region)
	}
	if g.rkey, err = strconv.ParseUint(f[2], 0, 64); err != nil {
		return g, fmt.Errorf("ping-pong: rkey %.20q", f[2])
	}
	if g.base, err = strconv.ParseUint(f[3], 0, 64); err != nil {
		return g, fmt.Errorf("ping-pong: base %.20q", f[3])
	}
	if provider == "shm" {
		if !strings.HasPrefix(g.addr, shmPingpong) {
			return g, fmt.Errorf("ping-pong: address %.60q, want %s…", g.addr, shmPingpong)
		}
		return g, nil
	}
	to, err := netip.ParseAddrPort(g.addr)
	if err != nil {
		return g, fmt.Errorf("ping-pong: address %.60q, want IP:PORT", g.addr)
	}
	if from, err := netip.ParseAddrPort(remote); err != nil || from.Addr().Unmap() != to.Addr().Unmap() {
		return g, fmt.Errorf("ping-pong: address %.60q is not of %s, which asks", g.addr, remote)
	}
	return g, nil
}

// volley is one side's end of a ping-pong.
type volley struct {
	qp       *rdma.QP
	cq       *rdma.CQ
	wr       [1]rdma.WR
	count    []byte  // the message's last word
	seen     *uint64 // the word of this side's memory that the other side writes
	signal   uint64  // every so manyth WRITE is signaled
	unpolled int     // signaled WRITEs whose WC has not been polled
	wc       [1]rdma.WC
}

// padded is the memory that a message of n bytes takes.
func padded(n int) int { return (n + 7) &^ 7 }

// lastWord is where a message of n bytes ends in m.
func lastWord(m *rdma.Memory, n int) *uint64 {
	return (*uint64)(unsafe.Pointer(&m.Bytes[padded(n)-8]))
}

// newVolley writes messages of n bytes from local, which begins with padded(n) bytes
// of their own, to the memory that rkey and base name, and sees those that arrive
// in mem.
func newVolley(dev *rdma.Device, qp *rdma.QP, cq *rdma.CQ, local *rdma.MR, mem *rdma.Memory, n int, rkey,
	base uint64) *volley {
	end := padded(n)
	v := &volley{qp: qp, cq: cq, seen: lastWord(mem, n), count: local.Bytes()[end-8 : end], signal: 1}
	v.wr[0] = rdma.WR{Op: rdma.OpWrite, Local: local.Bytes()[end-n : end : end], LKey: local.LKey(),
		RemoteAddr: base + uint64(end-n), RKey: rkey}
	if n <= dev.Caps().MaxInline {
		// The buffer is free at once, so completions matter to the send queue only.
		v.wr[0].Flags = rdma.Inline
		v.signal = uint64(max(1, min(16, dev.Caps().MaxSendWR/4)))
	}
	return v
}

// write posts message i.
func (v *volley) write(ctx context.Context, i uint64, limit time.Duration) error {
	w := &v.wr[0]
	w.Flags &^= rdma.Signaled
	if i%v.signal == 0 {
		// The WR that was signaled last was acknowledged long ago, or its message would not have been answered.
		if err := v.until(ctx, limit, "completion of an earlier one", func() bool {
			return v.unpolled == 0
		}); err != nil {
			return err
		}
		w.Flags |= rdma.Signaled
		v.unpolled++
	}
	binary.LittleEndian.PutUint64(v.count, i)
	_, err := v.qp.PostSend(v.wr[:])
	return err
}

// await looks at memory until message i is there. Now and then it looks for failures
// too, and seldom, because while it polls for completions it sees no message.
func (v *volley) await(ctx context.Context, i uint64, limit time.Duration) error {
	return v.until(ctx, limit, "sign of it", func() bool {
		for began := (time.Time{}); ; {
			for range 4096 {
				if atomic.LoadUint64(v.seen) == i {
					return true
				}
			}
			if began.IsZero() {
				began = time.Now()
			} else if time.Since(began) > 10*time.Millisecond {
				return false
			}
		}
	})
}

// until polls for completions while it is not done.
func (v *volley) until(ctx context.Context, limit time.Duration, what string, done func() bool) error {
	var began time.Time
	for !done() {
		switch {
		case v.cq.Poll(v.wc[:]) == 1:
			if v.wc[0].Status != driver.Success {
				return &rdma.WCError{WC: v.wc[0]}
			}
			v.unpolled--
		case began.IsZero():
			began = time.Now()
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case v.qp.State() != driver.StateRTS:
			return rdma.ErrQPError
		case time.Since(began) > limit:
			return fmt.Errorf("no %s for %v: %w", what, limit, context.DeadlineExceeded)
		}
	}
	return nil
}

func (s *Passive) accept(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
	private := string(r.Private)
	switch {
	case private == plain:
		return s.pd, rights, nil
	case strings.HasPrefix(private, pingPrefix):
		g, err := parsePing(private, s.dev.Name(), r.Remote)
		if err != nil {
			return nil, 0, err
		}
		if err := s.start(g, r.Peer); err != nil {
			return nil, 0, err
		}
		return s.pd, rights, nil
	case strings.HasPrefix(private, preamble):
		return nil, 0, fmt.Errorf("this side knows versions 1 and 2 of kvctl perf, not %.40q", private)
	}
	return nil, 0, errors.New("not kvctl perf")
}

// start begins to answer a ping-pong of the connection that peer is.
func (s *Passive) start(g ping, peer rdma.Peer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.closed:
		return errors.New("closing")
	case s.mu.stop != nil:
		return errors.New("another ping-pong is under way")
	}
	ctx, stop := context.WithCancel(context.Background())
	s.mu.peer, s.mu.stop = peer, stop
	atomic.StoreUint64(lastWord(s.mem, g.bytes), 0)
	s.echoes.Go(func() {
		// The active side takes the end of the connection for leave to begin another
		// ping-pong, so this one is over before that.
		err := s.echo(ctx, g, func() { s.finish(peer) })
		s.finish(peer)
		if err != nil && ctx.Err() == nil {
			s.Failed(err)
		}
		stop()
	})
	return nil
}

func (s *Passive) finish(peer rdma.Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.peer == peer {
		s.mu.peer, s.mu.stop = nil, nil
	}
}

// gone is told of every connection that is no more.
func (s *Passive) gone(peer rdma.Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.stop != nil && s.mu.peer == peer {
		s.mu.stop()
	}
}

// echo answers until ctx ends or the active side is silent for too long; over is
// called before the connection is closed.
func (s *Passive) echo(ctx context.Context, g ping, over func()) (err error) {
	var undo []func() error
	defer func() {
		for i := len(undo) - 1; i >= 0; i-- {
			err = errors.Join(err, undo[i]())
		}
	}()
	m, err := s.dev.Alloc(int64(padded(g.bytes)), rdma.AllocOptions{Name: "kvctl-perf-pong"})
	if err != nil {
		return err
	}
	undo = append(undo, m.Free)
	local, err := s.pd.RegMR(m, 0, int64(padded(g.bytes)), rdma.AccessLocal)
	if err != nil {
		return err
	}
	undo = append(undo, local.Deregister)
	cq, err := s.dev.CreateCQ(64)
	if err != nil {
		return err
	}
	undo = append(undo, cq.Close)
	dctx, cancel := context.WithTimeout(ctx, s.Limit)
	qp, err := s.dev.Dial(dctx, s.pd, cq, g.addr, []byte(pongPrefix+g.secret))
	cancel()
	if err != nil {
		return fmt.Errorf("ping-pong: connect back: %w", err)
	}
	undo = append(undo, qp.Close, func() error { over(); return nil })
	v := newVolley(s.dev, qp, cq, local, s.mem, g.bytes, g.rkey, g.base)
	for i := uint64(1); ; i++ {
		if err := v.await(ctx, i, s.Limit); err != nil {
			return fmt.Errorf("ping-pong, message %d (the last seen is %d): %w", i, atomic.LoadUint64(v.seen), err)
		}
		if err := v.write(ctx, i, s.Limit); err != nil {
			return fmt.Errorf("ping-pong, answer %d: %w", i, err)
		}
	}
}

// Home is where an active side listens for the passive side at addr, which connects back. It also
// says whether that is an address of this machine alone.
func Home(provider, addr string) (home string, local bool, err error) {
	if provider == "shm" {
		return shmPingpong + rand.Text(), true, nil
	}
	// Connecting a UDP socket sends nothing, and chooses the address of this
	// machine that addr is reached from.
	c, err := net.Dial("udp", addr)
	if err != nil {
		return "", false, fmt.Errorf("address for a ping-pong with %s: %w", addr, err)
	}
	host := c.LocalAddr().(*net.UDPAddr).IP
	return net.JoinHostPort(host.String(), "0"), host.IsLoopback(), c.Close()
}

// pingpong measures half the time of a WRITE there and one back.
func (p *Conn) pingpong(ctx context.Context, c Case, limit time.Duration) (r Result, err error) {
	r = Result{Verb: c.String(), Bytes: c.Bytes, Iterations: c.Iters, Depth: c.Depth}
	var undo []func() error
	defer func() {
		for i := len(undo) - 1; i >= 0; i-- {
			err = errors.Join(err, undo[i]())
		}
	}()
	m, err := p.dev.Alloc(int64(padded(c.Bytes)), rdma.AllocOptions{Name: "kvctl-perf-ping", Shared: true})
	if err != nil {
		return r, err
	}
	undo = append(undo, m.Free)
	mr, err := p.pd.RegMR(m, 0, int64(padded(c.Bytes)), rdma.AccessRemoteWrite)
	if err != nil {
		return r, err
	}
	undo = append(undo, mr.Deregister)
	cq, err := p.dev.CreateCQ(64)
	if err != nil {
		return r, err
	}
	undo = append(undo, cq.Close)

	secret := rand.Text()
	var taken atomic.Bool
	came, left := make(chan struct{}), make(chan struct{})
	l, err := p.dev.Listen(p.Home, rdma.ListenOptions{
		Accept: func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			got, ok := strings.CutPrefix(string(r.Private), pongPrefix)
			if !ok || subtle.ConstantTimeCompare([]byte(got), []byte(secret)) != 1 || taken.Swap(true) {
				return nil, 0, errors.New("not the passive side of this ping-pong")
			}
			close(came)
			return p.pd, rdma.AccessRemoteWrite, nil
		},
		Closed: func(rdma.Peer) { close(left) }, // only one was accepted
	})
	if err != nil {
		return r, err
	}
	undo = append(undo, l.Close)

	dctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	qp, err := p.dev.Dial(dctx, p.pd, cq, p.addr,
		[]byte(ping{c.Bytes, l.Addr(), mr.RKey(), mr.Base(), secret}.String()))
	if err != nil {
		return r, err
	}
	undo = append(undo, func() error {
		// The passive side answers one ping-pong at a time: see this one end.
		err := qp.Close()
		if taken.Load() {
			select {
			case <-left:
			case <-time.After(limit):
			}
		}
		return err
	})
	select {
	case <-came:
	case <-dctx.Done():
		return r, fmt.Errorf("the passive side did not connect back to %s: %w", l.Addr(), context.Cause(dctx))
	}

	v := newVolley(p.dev, qp, cq, p.mr, m, c.Bytes, p.rkey, p.base)
	i := uint64(0)
	h, err := p.latency(c.Iters, func() error {
		i++
		if err := v.write(ctx, i, limit); err != nil {
			return fmt.Errorf("message %d: %w", i, err)
		}
		if err := v.await(ctx, i, limit); err != nil {
			return fmt.Errorf("answer %d (the last seen is %d): %w", i, atomic.LoadUint64(v.seen), err)
		}
		return nil
	})
	if err != nil {
		return r, err
	}
	r.take(p, h, 2)
	r.VerbsPerSec = 1e9 / r.AvgNanos
	r.MiBPerSec = r.VerbsPerSec * float64(c.Bytes) / (1 << 20)
	return r, nil
}
