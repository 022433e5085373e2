package gateway

import (
	"errors"
	"net"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/internal/redis/live"
)

// pushes is the part of an output that other goroutines fill: messages that its client did not ask for. They wait in
// pushed until somebody flushes them, so that the messages of a batch of PUBLISH, or of a peer's message, go
// out in one write for each client.
// All of it is guarded by output.mu.
type pushes struct {
	pushed []byte
	held   int64        // bytes of the share that stand for it
	full   time.Time    // since when more than softPushes bytes are unread; zero: they are not
	box    *live.Outbox // that has been told of pushed
	// corked holds back what is pushed until the reply of the connection's own batch has been sent. The
	// confirmation of a subscription comes before its first message, and a value that was read before its invalidation.
	corked bool
	place  place
	via    net.Conn // over the socket of a connection in a loop, while a goroutine sends
}

type place uint8

const (
	atConn place = iota
	parked       // on its way into a loop: nobody may write
	// Only the loop's own descriptor may be written to, by Link.PushWrite.
	inLoop
)

const (
	// As Redis's client-output-buffer-limit for pubsub: unread bytes that close a connection at once, and those that do
	// after softPatience.
	hardPushes, softPushes = 32 << 20, 8 << 20
	softPatience           = 60 * time.Second
	// keepPushed is how long a buffer may be, in bytes, that serves again after a flush.
	keepPushed = 4 << 10
)

// errFlooded ends a connection that leaves too many messages unread.
// It is what later sends of the connection return. Its client is told nothing, as in Redis: there is no room to tell
// it.
var errFlooded = errors.New("messages are not read")

// Flush is of live.Output.
func (o *output) Flush(box *live.Outbox) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.box == box {
		o.mu.box = nil
	}
	o.flushLocked()
}

// Push adds a message, which it copies. It never waits: a client that leaves too much unread is disconnected, and so is
// one for whose messages there is no memory. The message goes out with box's next flush, or sooner.
// Any goroutine may call it, with the locks of live.Hub, live.Monitors or live.Tracked held: an output's lock comes
// after theirs. p is a whole message, so that a reply is never between two halves of it.
func (o *output) Push(box *live.Outbox, p []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.err != nil {
		return
	}
	if n := len(o.mu.pushed) + len(p); n > cap(o.mu.pushed) {
		size := max(2*cap(o.mu.pushed), n, 512)
		held := int64(0)
		if size > smallOutput {
			if held = int64(size); !o.share.Try(held) {
				o.floodLocked()
				return
			}
		}
		o.mu.pushed = append(make([]byte, 0, size), o.mu.pushed...)
		o.share.Drop(o.mu.held)
		o.mu.held = held
	}
	o.mu.pushed = append(o.mu.pushed, p...)
	o.queued.Add(int64(len(p)))
	if o.mu.box != box {
		o.mu.box = box
		box.Add(o)
	}
	if len(o.mu.pushed) > sendFrom {
		o.flushLocked()
	}
	switch pending := o.mu.size + len(o.mu.pushed); {
	case pending <= softPushes:
		o.mu.full = time.Time{}
	case o.mu.full.IsZero():
		o.mu.full = time.Now()
	case pending > hardPushes, time.Since(o.mu.full) > softPatience:
		o.floodLocked()
	}
}

// floodLocked disconnects a client that leaves too much unread, and gives back what is unread.
// A message of which a part has been sent stays half a message; Kill makes sure that nothing follows it.
func (o *output) floodLocked() {
	o.mu.err = errFlooded
	o.flooded(o.mu.size + len(o.mu.pushed))
	o.dropPushesLocked()
	o.link.Kill() // which ends drain, if that is at work
	o.room.Broadcast()
}

// dropPushesLocked forgets the messages that wait, sent by now or not, and gives back their memory.
func (o *output) dropPushesLocked() {
	o.queued.Add(-int64(len(o.mu.pushed)))
	o.share.Drop(o.mu.held)
	o.mu.pushed, o.mu.held, o.mu.box = nil, 0, nil
}

// flushLocked sends what has been pushed, as far as the socket takes it at once; a goroutine sends the rest. While
// that, or the connection itself, is at work, they do it behind what they send. place and corked say who may write: a
// connection on its way into a loop is flushed by enterLoop or unpark, a corked one by uncork, and one whose goroutine
// drains by that.
func (o *output) flushLocked() {
	m := &o.mu
	if len(m.pushed) == 0 || m.corked || m.err != nil || m.draining || m.place == parked {
		return
	}
	n := 0
	switch {
	case m.place == inLoop:
		var ok bool
		if n, m.via, ok = o.link.PushWrite(m.pushed); !ok {
			return // over is about to be called, and flushes
		}
	case o.raw != nil:
		err := o.raw.Write(func(fd uintptr) bool {
			n = writeNow(fd, m.pushed)
			return true
		})
		if err != nil {
			m.err = err
			o.dropPushesLocked()
			return
		}
	}
	o.written.Add(uint64(n))
	if n == len(m.pushed) && cap(m.pushed) <= keepPushed {
		o.queued.Add(-int64(n))
		m.pushed = m.pushed[:0]
		return
	}
	if n == len(m.pushed) {
		o.dropPushesLocked()
		return
	}
	o.queued.Add(-int64(n))
	m.pushed = m.pushed[n:]
	if m.place == inLoop && m.via == nil {
		o.floodLocked() // half a message may have been sent
		return
	}
	o.queuePushesLocked()
	o.drainLocked()
}

// writeNow writes what a socket takes without waiting. If it takes nothing, an ordinary write of the rest meets the
// reason too. The descriptor is non-blocking, as all of package net's are.
func writeNow(fd uintptr, p []byte) int {
	n, _ := syscall.Write(int(fd), p)
	return max(n, 0)
}

// queuePushesLocked makes what has been pushed a part of the queue.
// A chunk of pushes may exceed output.limit: hardPushes bounds them instead.
func (o *output) queuePushesLocked() {
	if len(o.mu.pushed) == 0 {
		return
	}
	o.mu.queue = append(o.mu.queue, chunk{b: o.mu.pushed, held: o.mu.held})
	o.mu.size += len(o.mu.pushed)
	o.mu.pushed, o.mu.held = nil, 0
}

// pushesFirstLocked sees to it that what was pushed before a reply goes out before it, unless it has to wait for that.
func (o *output) pushesFirstLocked() {
	if len(o.mu.pushed) == 0 || o.mu.corked {
		return
	}
	if o.flushLocked(); o.mu.draining {
		o.queuePushesLocked()
	}
}

// cork has what is pushed wait until the next send. The connection's goroutine calls it.
func (o *output) cork() {
	if o.corked {
		return
	}
	o.corked = true
	o.mu.Lock()
	o.mu.corked = true
	o.mu.Unlock()
}

// uncork ends that. The connection's goroutine calls it, as cork. corked without mu is a copy for that goroutine alone,
// which saves the lock when there is nothing to do.
func (o *output) uncork() {
	if o.corked {
		o.mu.Lock()
		o.uncorkLocked()
		o.mu.Unlock()
	}
}

// uncorkLocked is uncork for those who hold mu: messages that were pushed meanwhile go out now, behind the reply that
// was sent with the same lock held.
func (o *output) uncorkLocked() {
	if o.corked {
		o.corked, o.mu.corked = false, false
		o.flushLocked()
	}
}

// park prepares for the way into a loop, and reports whether there is nothing left to write.
// The connection's goroutine calls it before Link.Enter. A message that is pushed from here on waits until the loop has
// the descriptor, or until unpark.
func (o *output) park() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.idleLocked() {
		return false
	}
	o.mu.place = parked
	return true
}

// unpark ends that for a connection that is in no loop.
func (o *output) unpark() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.place == parked {
		o.mu.place = atConn
		o.flushLocked()
	}
}

func (o *output) enterLoop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.place = inLoop
	o.flushLocked()
}

// path is where the goroutine that sends writes to, with a deadline.
// It is asked anew for each part, since the connection may leave its loop between two of them.
func (o *output) path(limit time.Time) (nc net.Conn, raw syscall.RawConn, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.err != nil {
		return nil, nil, o.mu.err
	}
	nc = o.mu.via
	if nc == nil || o.mu.place == atConn {
		nc, raw = o.nc, o.raw
	}
	return nc, raw, nc.SetWriteDeadline(limit)
}

// moved reports whether the connection has left its loop since path gave nc.
func (o *output) moved(nc net.Conn) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mu.err == nil && nc == o.mu.via && o.mu.place == atConn
}
