package gateway

import (
	"bytes"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/internal/loop"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/poll"
)

// output is what a connection has still to send. Replies go to the socket at once if
// it takes them; what it does not take a goroutine sends, so that a client may write
// a long pipeline before it reads. A client that has too much to read waits, and one
// that reads too slowly is disconnected.
//
// Replies beyond smallOutput come out of the connection's share of the gateway's memory; if that is used up
// the connection waits until its client has read.
//
// Other goroutines push messages that the client did not ask for (push.go): those of publish/subscribe and
// invalidations. They share mu with the replies, so neither cuts the other in two.
type output struct {
	// nc, raw, link and write are set before there is any other goroutine, or by over with mu held.
	nc      net.Conn
	raw     syscall.RawConn // nil: only the goroutine writes
	link    *loop.Link      // in a loop, instead of both
	write   func(fd uintptr) bool
	timeout time.Duration // Options.WriteTimeout
	limit   int           // bytes queued before the connection waits
	share   *netsrv.Share // the connection's
	queued  *atomic.Int64 // the gateway's sum
	written *atomic.Uint64
	slow    func()            // told that the client was disconnected since it read too slowly
	flooded func(pending int) // told that it was, since it left so many bytes of messages unread
	corked  bool              // as mu.corked; the connection's goroutine's
	turns   chan struct{}     // the gateway's, see conn.longTurn: of those who send frames

	// write's argument and answers; the connection's goroutine's.
	p    []byte
	n    int
	werr error

	mu struct {
		sync.Mutex
		// queue is in the order of sending. While draining is set a goroutine has taken an earlier queue, or is about
		// to take this one, and is the only one that writes to the socket.
		queue    []chunk
		size     int // bytes in queue
		draining bool
		err      error // kept: nothing is sent after it
		pushes
	}
	room sync.Cond // signalled when the queue was taken, or err set
}

// chunk is a part of the queue. held bytes of the share stand for it; without, it is among the
// smallOutput bytes for which nothing does.
// b is not empty. If lent is set, send waits until it has gone, so that no copy is needed of what there is no memory
// for.
type chunk struct {
	b    []byte
	held int64
	lent bool // b is the sender's, who waits
	// frame is a buffer of the share, of which b is a part. It goes back once that is sent.
	frame []byte
}

const (
	smallOutput = 64 << 10 // bytes that each connection may have queued without the share; also of one write
	// outputRate is how fast, in bytes a second, a client must read on the whole once it has
	// been given the write timeout.
	outputRate = 64 << 10
)

// init makes the closure once that would be allocated for every write otherwise.
func (o *output) init() {
	o.room.L = &o.mu
	o.write = func(fd uintptr) bool {
		o.n, o.werr = loop.WriteNow(fd, o.p)
		return true // never waits
	}
}

// over says where to send to, outside of a loop; raw is nc's, see rawOf. Nothing may be queued but messages that others
// push. A connection with TLS has no raw side: what it writes goes through its goroutine. It is called by conn.over.
// The goroutine that still sends by way of the loop is interrupted by a deadline in the past, and goes on with nc where
// it was: moved tells it so.
func (o *output) over(nc net.Conn, raw syscall.RawConn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.flushLocked()
	o.nc, o.raw, o.mu.place = nc, raw, atConn
	if o.mu.via != nil { // the goroutine that sends goes on with nc
		o.mu.via.SetWriteDeadline(time.Unix(1, 0))
	}
}

// idleLocked reports whether all has been sent.
// An output with an error is not idle: the connection is about to end, and does not go into a loop for that.
func (o *output) idleLocked() bool {
	return !o.mu.draining && o.mu.err == nil && len(o.mu.pushed) == 0
}

// send sends or queues p. It waits while too much is queued. If paid is 0 it does not keep
// p. Else paid bytes of the share stand for p, and both are the output's from now on.
// Ordering is the point of it: while a goroutine drains the queue nothing is written past it. An
// error is kept, and ends every later send. It does not say how much the client has received.
// The connection's goroutine, or its loop, calls it; it is never called by two at a time. In a loop it takes what the
// socket takes, and leaves the loop for the rest, since it may wait then.
func (o *output) send(p []byte, paid int64) error {
	if len(p) == 0 {
		o.share.Give(paid)
		o.uncork()
		return nil
	}
	if o.link.Looped() {
		if p = o.sendLooped(p); len(p) == 0 {
			o.share.Drop(paid)
			return nil
		}
		o.link.Waits()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.uncorkLocked()
	o.pushesFirstLocked()
	for o.mu.err == nil && o.mu.draining {
		if o.enqueue(p, paid) {
			return nil
		}
		o.room.Wait()
	}
	if o.mu.err == nil && o.raw != nil {
		o.p, o.n, o.werr = p, 0, nil
		err := o.raw.Write(o.write)
		o.p = nil
		if err == nil && o.werr != loop.ErrNothing {
			err = o.werr
		}
		o.mu.err = err
		o.written.Add(uint64(o.n))
		p = p[o.n:]
	}
	if o.mu.err != nil || len(p) == 0 {
		o.share.Drop(paid)
		return o.mu.err
	}
	lent := !o.enqueue(p, paid)
	if lent {
		o.add(chunk{b: p, lent: true})
	}
	o.drainLocked()
	for lent && o.mu.draining {
		o.room.Wait()
	}
	return o.mu.err
}

// sendFrame sends or queues p, a part of a buffer of the share, which goes back when p is sent. Its goroutine sends it,
// by turns with those of others.
func (o *output) sendFrame(p, frame []byte) error {
	o.link.Waits()
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.uncorkLocked()
	o.pushesFirstLocked()
	for o.mu.err == nil && o.mu.size > 0 && o.mu.size+len(p) > o.limit {
		o.room.Wait()
	}
	if o.mu.err != nil {
		o.share.Return(frame)
		return o.mu.err
	}
	o.add(chunk{b: p, frame: frame})
	if !o.mu.draining {
		o.drainLocked()
	}
	return nil
}

// enqueue adds p to the queue if the connection may have that much queued. The output is
// locked.
// Up to smallOutput bytes are copied without asking, so that a client that is a little late
// costs no more than a buffer; beyond that each byte is paid for, and a connection that gets no
// memory waits for its client instead.
// A single reply that was paid for may be beyond the limit, if nothing else is queued.
func (o *output) enqueue(p []byte, paid int64) bool {
	var last *chunk
	if n := len(o.mu.queue); n > 0 && !o.mu.queue[n-1].lent && o.mu.queue[n-1].frame == nil {
		last = &o.mu.queue[n-1]
	}
	n := o.mu.size + len(p)
	switch size := max(len(p), smallOutput); {
	case n > o.limit && (paid == 0 || o.mu.size > 0):
		return false
	case paid > 0:
		o.add(chunk{b: p, held: paid})
	case last != nil && (last.held == 0 && n <= smallOutput || cap(last.b)-len(last.b) >= len(p)):
		last.b = append(last.b, p...)
		o.mu.size = n
		o.queued.Add(int64(len(p)))
	case n <= smallOutput:
		o.add(chunk{b: bytes.Clone(p)})
	case o.share.Try(int64(size)):
		o.add(chunk{b: append(make([]byte, 0, size), p...), held: int64(size)})
	default:
		return false
	}
	return true
}

// add appends to the queue; the output is locked.
func (o *output) add(c chunk) {
	o.mu.queue = append(o.mu.queue, c)
	o.mu.size += len(c.b)
	o.queued.Add(int64(len(c.b)))
}

// sendLooped sends what a socket in a loop takes, and returns the rest.
// An empty rest says that all of p is with the socket. An error of writing is left to the ordinary path, which meets it
// again.
func (o *output) sendLooped(p []byte) []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.pushesFirstLocked(); o.mu.draining || o.mu.err != nil || len(o.mu.pushed) > 0 && !o.mu.corked {
		return p
	}
	n := o.link.Write(p)
	o.written.Add(uint64(n))
	if n == len(p) {
		o.uncorkLocked()
	}
	return p[n:]
}

// pending is how much has still to be sent, in parts and in bytes; any goroutine may ask.
func (o *output) pending() (parts, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	parts, n = len(o.mu.queue), o.mu.size+len(o.mu.pushed)
	if len(o.mu.pushed) > 0 {
		parts++
	}
	return parts, n
}

// drainLocked has a goroutine send what is queued.
// draining must not be set already. The goroutine ends by itself once the queue is empty or the connection has failed;
// finish waits for it.
func (o *output) drainLocked() {
	o.mu.draining = true
	go o.drain()
}

// drain sends the queue, and messages that are pushed meanwhile, and ends. It reports the first error to send and
// closes the connection then. It takes the whole queue at a time, so that the connection can fill another meanwhile,
// and gives back what stood for each chunk as soon as that is sent.
func (o *output) drain() {
	o.mu.Lock()
	for {
		if !o.mu.corked || o.mu.err != nil {
			o.queuePushesLocked()
		}
		if len(o.mu.queue) == 0 {
			break
		}
		queue := o.mu.queue
		o.mu.queue, o.mu.size = nil, 0
		err := o.mu.err
		o.room.Broadcast()
		o.mu.Unlock()
		for _, c := range queue {
			if err == nil {
				err = o.sendAll(c.b, c.frame != nil)
			}
			o.queued.Add(-int64(len(c.b)))
			if c.frame != nil {
				o.share.Return(c.frame)
			} else {
				o.share.Drop(c.held)
			}
		}
		o.mu.Lock()
		if err != nil && o.mu.err == nil {
			if t := net.Error(nil); errors.As(err, &t) && t.Timeout() {
				o.slow()
			}
			o.link.Kill()
			o.mu.err = err
		}
	}
	o.mu.draining = false
	if o.mu.via != nil {
		o.mu.via.Close()
		o.mu.via = nil
	}
	if o.mu.place == atConn {
		o.nc.SetWriteDeadline(time.Time{}) // sendAll's must not end a later write
	}
	o.room.Broadcast()
	o.mu.Unlock()
}

// sendAll sends b in parts: there must be some progress within the timeout, and on the whole
// outputRate beyond it.
// Without the second bound a client that reads a byte a minute would be given for ever what the
// queue holds.
// Parts of smallOutput bytes are what progress is measured by: a Write that has not ended tells nothing of how far it
// came. With turns it takes one while the socket takes a part.
func (o *output) sendAll(b []byte, turns bool) error {
	last := time.Now().Add(o.timeout + time.Duration(len(b))*time.Second/outputRate)
	for len(b) > 0 {
		part := b[:min(len(b), smallOutput)]
		limit := time.Now().Add(o.timeout)
		if limit.After(last) {
			limit = last
		}
		nc, raw, err := o.path(limit)
		if err != nil {
			return err
		}
		var n int
		if turns && raw != nil {
			n, err = o.writeInTurn(raw, part)
		} else {
			n, err = nc.Write(part)
		}
		o.written.Add(uint64(n))
		b = b[n:]
		if err != nil && !o.moved(nc) {
			return err
		}
	}
	return nil
}

// writeInTurn writes some of p, in a turn of those who write. Those who wait for a processor have it before the next
// part: a request that needs microseconds would wait until the socket takes no more, after megabytes.
func (o *output) writeInTurn(raw syscall.RawConn, p []byte) (n int, err error) {
	cerr := raw.Write(func(fd uintptr) bool {
		o.turns <- struct{}{}
		n, err = loop.WriteNow(fd, p)
		<-o.turns
		return err != loop.ErrNothing
	})
	poll.Yield()
	if cerr != nil {
		return n, cerr
	}
	return n, err
}

// finish waits until everything is sent or sending fails. A message that is pushed later goes nowhere.
// The connection's goroutine calls it once, at the end. The wait is bounded by what sendAll allows for the queue.
func (o *output) finish() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.mu.draining {
		o.room.Wait()
	}
	if o.mu.err == nil {
		o.mu.err = errClosing
	}
	o.dropPushesLocked()
}
