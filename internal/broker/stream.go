package broker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
)

const (
	// maxStreams is how many streams a connection may have, and maxSocketStreams those of a socket. Each has a buffer
	// of 8 MiB at most.
	maxStreams, maxSocketStreams = 4, 16
	// streamPiece is the bytes for which a stream has the longest timeout of an operation, once more for each piece.
	streamPiece = 64 << 20
)

// errAborted ends a PutFrom whose program wants it no more.
var errAborted = errors.New("the program gave up its stream")

// streams are a connection's, by number, without those that operations have.
type streams struct {
	last uint64
	open int // also those that operations have
	idle map[uint64]*stream
}

// stream is a PUT whose value comes piece by piece. PutFrom runs in a goroutine of its own, and reads the stream.
type stream struct {
	number  uint64
	left    uint64 // bytes that are to come
	ctx     context.Context
	cancel  context.CancelCauseFunc
	pieces  chan []byte   // of the program's memory, one at a time; closed by a commit
	taken   chan struct{} // has one when a piece was copied
	started chan struct{} // closed by the first Read: nothing is refused without the value
	done    chan struct{} // closed when PutFrom has returned, and the store's memory is given back
	version uint64
	err     error

	reading bool   // Read was called
	piece   []byte // the rest of it, for Read
}

// Read gives what writes bring, and ends with a commit.
func (s *stream) Read(b []byte) (int, error) {
	if !s.reading {
		s.reading = true
		close(s.started)
	}
	for len(s.piece) == 0 {
		select {
		case p, ok := <-s.pieces:
			if !ok {
				return 0, io.EOF
			}
			s.piece = p
		case <-s.ctx.Done():
			return 0, context.Cause(s.ctx)
		}
	}
	n := copy(b, s.piece)
	if s.piece = s.piece[n:]; len(s.piece) == 0 {
		s.taken <- struct{}{}
	}
	return n, nil
}

// stop ends a stream without a commit, and returns when nothing of it is left.
func (s *stream) stop(cause error) {
	s.cancel(cause)
	<-s.done
}

// run is PutFrom. A stream that ends lets another one of the socket begin.
func (c *conn) run(s *stream, key []byte, size int64, o client.PutOptions) {
	err := recoverFrom(func() { s.version, s.err = c.client.PutFrom(s.ctx, key, s, size, o) })
	if err != nil {
		s.err = err
		c.t.b.log.Error("the broker's own fault ended a connection", "err", err)
		c.end(err)
	}
	s.cancel(errAborted)
	<-c.t.streams
	close(s.done)
}

// begin makes a stream. It returns when PutFrom refuses the value unseen, or wants its first bytes.
func (q *queue) begin(ctx context.Context, it *item) *ring.Completion {
	c, sub := q.c, &it.sub
	if sub.Length > math.MaxInt64 {
		return q.failure(sub.Tag, ring.No, ring.TooLarge, "the value is too long")
	}
	c.mu.Lock()
	l := &c.mu.streams
	if l.open >= maxStreams {
		c.mu.Unlock()
		return q.failure(sub.Tag, ring.No, ring.Busy, fmt.Sprintf("a connection has %d streams at most", maxStreams))
	}
	l.open++
	l.last++
	s := &stream{number: l.last, left: sub.Length, pieces: make(chan []byte), taken: make(chan struct{}, 1),
		started: make(chan struct{}), done: make(chan struct{})}
	c.mu.Unlock()
	select {
	case c.t.streams <- struct{}{}:
	default:
		c.dropStream()
		return q.failure(sub.Tag, ring.No, ring.Busy,
			fmt.Sprintf("the programs of this socket have %d streams, which is their limit", maxSocketStreams))
	}
	o := client.PutOptions{Flags: sub.ValueFlags}
	if sub.TTL != 0 {
		o.TTL = ttl(sub)
	}
	most := c.t.Limits.streamTime(sub.Length)
	limited, end := context.WithTimeoutCause(c.ctx, most,
		fmt.Errorf("a stream of %d bytes has %v: %w", sub.Length, most, context.DeadlineExceeded))
	s.ctx, s.cancel = context.WithCancelCause(limited)
	c.wg.Go(func() {
		defer end()
		c.run(s, it.key, int64(sub.Length), o)
	})
	select {
	case <-s.started:
	case <-s.done:
	case <-ctx.Done():
		s.stop(context.Cause(ctx))
	}
	return q.keep(s, sub)
}

// streamTime bounds a stream from its beginning to its end: a program that stands still keeps no memory.
func (l *Limits) streamTime(size uint64) time.Duration {
	n := size/streamPiece + 1
	if n > uint64(math.MaxInt64/l.LongTimeout) {
		return math.MaxInt64
	}
	return l.LongTimeout * time.Duration(n)
}

// keep answers an operation after which the stream goes on, unless it has ended.
func (q *queue) keep(s *stream, sub *ring.Submission) *ring.Completion {
	c := q.c
	select {
	case <-s.done:
	default:
		c.mu.Lock()
		if !c.ended.Load() {
			if c.mu.streams.idle == nil {
				c.mu.streams.idle = map[uint64]*stream{}
			}
			c.mu.streams.idle[s.number] = s
			c.mu.Unlock()
			return &ring.Completion{Tag: sub.Tag, Version: s.number}
		}
		c.mu.Unlock()
		s.stop(errClosing)
	}
	c.dropStream()
	no := q.failed(sub, s.err, 0)
	no.Outcome = ring.No // without a commit nothing is stored
	return no
}

// dropStream forgets a stream that has ended.
func (c *conn) dropStream() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.streams.open--
}

// stopStreams ends those that no operation has. Others end with their operations, since the connection has ended.
func (c *conn) stopStreams() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.mu.streams.idle {
		s.cancel(errClosing)
	}
}

// stream performs an operation on a stream. The operation has it alone: another one meanwhile is a mistake.
func (q *queue) stream(ctx context.Context, it *item) *ring.Completion {
	c, sub := q.c, &it.sub
	if sub.Op == ring.OpPutBegin {
		return q.begin(ctx, it)
	}
	c.mu.Lock()
	s := c.mu.streams.idle[sub.Word]
	delete(c.mu.streams.idle, sub.Word)
	c.mu.Unlock()
	if s == nil {
		return q.failure(sub.Tag, ring.No, ring.Stale, "there is no such stream, or another operation has it")
	}
	switch sub.Op {
	case ring.OpPutAppend:
		return q.append(ctx, s, it)
	case ring.OpPutCommit:
		return q.commit(ctx, s, sub)
	}
	s.stop(errAborted)
	c.dropStream()
	return &ring.Completion{Tag: sub.Tag}
}

// append gives the stream bytes of the program's memory. When it returns nobody reads them any more.
func (q *queue) append(ctx context.Context, s *stream, it *item) *ring.Completion {
	n := uint64(len(it.buf))
	if n > s.left {
		if no := q.keep(s, &it.sub); no.Code != ring.OK {
			return no
		}
		return q.failure(it.sub.Tag, ring.No, ring.Argument,
			fmt.Sprintf("%d bytes, and the value has %d more", n, s.left))
	}
	s.left -= n
	if n == 0 {
		return q.keep(s, &it.sub)
	}
	pieces := s.pieces
	for waiting := true; waiting; {
		select {
		case pieces <- it.buf:
			pieces = nil
		case <-s.taken:
			waiting = false
			q.c.t.stats.Bytes.Add(n)
		case <-s.done:
			waiting = false
		case <-ctx.Done():
			s.stop(context.Cause(ctx))
		}
	}
	return q.keep(s, &it.sub)
}

// commit stores the value.
func (q *queue) commit(ctx context.Context, s *stream, sub *ring.Submission) *ring.Completion {
	if left := s.left; left > 0 {
		if no := q.keep(s, sub); no.Code != ring.OK {
			return no
		}
		return q.failure(sub.Tag, ring.No, ring.Argument, fmt.Sprintf("%d bytes of the value are missing", left))
	}
	close(s.pieces)
	unwatch := context.AfterFunc(ctx, func() { s.cancel(context.Cause(ctx)) })
	<-s.done
	unwatch()
	q.c.dropStream()
	if s.err != nil {
		return q.failed(sub, s.err, 0)
	}
	return &ring.Completion{Tag: sub.Tag, Version: s.version}
}
