package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Values that are longer than an operation may read without asking. Nobody knows how long a value is before it was
// found, so every operation is tried within a small limit first (inside.LimitMemory), which is enough for nearly all of
// them and costs no look at the Budget. An operation that needs more ends with a *inside.TooLargeError that names the
// length, has done nothing, and is tried again with memory of the connection's share for that length. The share is what
// bounds a gateway: many clients that read long values at a time wait for each other's memory instead of taking the
// process down.

// performLarge performs a unit again that needs memory of the share. Reads are put off until
// their replies are due, since many large values may not fit at a time.
// A value's length is known when it has been found, so the answer to the first try is how much
// to take. The order matters: memory first, then the operation; a write that was refused for
// want of memory has not happened.
// It is called for a unit with any error, and leaves one that is none of memory as it is.
func (b *batch) performLarge(u *unit) {
	c := b.c
	held, reads := int64(0), oneLimit
	for range largeTries {
		var large *inside.TooLargeError
		switch {
		case errors.As(u.err, &large):
			if u.kind <= spec.Read {
				u.large, u.err = large.Want, nil
				return
			}
			reads = max(reads, large.Want)
		case errors.Is(u.err, values.ErrRoom):
			if u.k.Want == 0 {
				u.outRoom *= 8
			} else { // the unit's next command may want a little more
				u.k.Room = max(u.k.Want, min(2*u.k.Room, u.k.MaxValue))
			}
		default:
			large = nil
			c.share.Drop(held - b.keep(u, held))
			return
		}
		n := readCost*int64(reads) + writeCost*int64(u.k.Room) + 2*int64(u.outRoom)
		if err := c.take(n - held); err != nil {
			c.share.Drop(held)
			u.takeAnswer(client.Item{}, err)
			return
		}
		held = max(held, n)
		clear(b.ops)
		b.performOne(inside.LimitMemory(c.ctx, reads), u)
	}
	c.share.Drop(held - b.keep(u, held))
}

// keep leaves of the held bytes of the share what stands for what a unit has for its
// replies, and returns how many these are.
// The factors are upper bounds of what buffers that grew by doubling have: a unit's replies, and a value with its
// reply.
func (b *batch) keep(u *unit, held int64) int64 {
	u.k.Own = nil
	if u.kind > spec.Read {
		u.into, u.k.Value = nil, nil
	}
	n := min(held, int64(2*u.out.Len()+3*len(u.k.Value)))
	b.held += n
	return n
}

// readLarge performs a read that was put off. give is to be called when its reply has been
// written; until then paid bytes of the share stand for the reply.
// It reads one value at a time: a pipeline of GETs of long values would otherwise have all of them in
// memory, and be sent none of it meanwhile.
// If the key is gone by now, or another try fails, that is the unit's answer. For a command that needs a part, the unit
// has that part alone.
func (b *batch) readLarge(e *entry, u *unit) (paid int64, give func()) {
	c := b.c
	c.link.Waits()
	if u.track {
		c.out.cork()
		defer b.endTrackingOf(u)
	}
	if e.cmd.part != nil {
		if paid, give, ok := b.readPart(e, u); ok {
			return paid, give
		}
	}
	held, more := int64(0), int64(0)
	frames := b.frames(e, u)
	for range largeTries {
		op := [1]client.Op{{Kind: client.OpGet, Key: b.c.in.stored(u.name), Typed: u.kind == spec.Read}}
		if frames {
			if err := b.makeFrame(u, u.large); err != nil {
				u.takeAnswer(client.Item{}, err)
				break
			}
			op[0].Into = u.frame[replyHead : replyHead : replyHead+u.large]
		} else {
			n := 2 * int64(u.large)
			if err := c.take(n - held); err != nil {
				u.takeAnswer(client.Item{}, err)
				break
			}
			held = max(held, n)
		}
		ctx, over := c.longTurn(u.large)
		c.in.api.Do(ctx, op[:])
		over()
		u.takeAnswer(op[0].Item, op[0].Err)
		var large *inside.TooLargeError
		if !errors.As(u.err, &large) {
			break
		}
		u.large = large.Want
	}
	if b.framed(u) {
		return 0, func() { u.k.Value = nil }
	}
	held += b.spareFrame(u)
	if u.err == nil && u.k.Type != client.Plain {
		more = (framing - 1) * int64(len(u.k.Value))
		if err := c.take(more); err != nil {
			more = 0
			u.takeAnswer(client.Item{}, err)
		}
	}
	// The value's memory is one half, that of the reply takes the place of what it was read to.
	return held/2 + more, func() {
		u.k.Value = nil
		c.share.Drop(held - held/2)
	}
}

const (
	// replyHead is room for the head of a bulk string before its bytes, and replyFrame for its end, too.
	replyHead  = 24
	replyFrame = replyHead + 2
)

// makeFrame gives u a frame for n bytes, in place of the one that it has. Memory of the share stands for it.
func (b *batch) makeFrame(u *unit, n int) (err error) {
	b.dropFrame(u)
	u.frame, err = b.c.takeBuffer(n + replyFrame)
	return err
}

// dropFrame gives up u's frame, of which nothing is in use.
func (b *batch) dropFrame(u *unit) {
	if u.frame != nil {
		b.c.share.Return(u.frame)
		u.frame = nil
	}
}

// spareFrame parts with u's frame, to which something else was read than what can be framed. It returns the bytes of
// the share that stand for it.
func (b *batch) spareFrame(u *unit) int64 {
	n := int64(cap(u.frame))
	u.frame = nil
	return n
}

// frames reports whether the reply to a command can be the memory that its value is read to. To a client that tracks
// what it reads it goes with those before it, so that no invalidation comes in between.
func (b *batch) frames(e *entry, u *unit) bool { return e.cmd.Plain && !u.track }

// framed reports whether u's value was read to its frame, so that this can be the reply.
func (b *batch) framed(u *unit) bool {
	return u.err == nil && u.k.Present && u.k.Type == client.Plain && len(u.k.Value) > 0 && len(u.frame) > 0 &&
		&u.k.Value[0] == &u.frame[replyHead]
}

// replyFramed replies with u's value where it was read to.
func (b *batch) replyFramed(e *entry, u *unit) error {
	n := len(u.k.Value)
	head := fmt.Appendf(nil, "$%d\r\n", n)
	frame := u.frame
	u.frame = nil
	p := frame[replyHead-len(head) : replyHead+n+2]
	copy(p, head)
	copy(p[len(p)-2:], "\r\n")
	if e.cmd.Kind.Looks() {
		b.lookups[1]++
	}
	b.cur.streamed = true
	if b.w.Len() > 0 {
		if err := b.c.push(&b.w, 0); err != nil {
			b.c.share.Return(frame)
			return err
		}
	}
	return b.c.out.sendFrame(p, frame)
}

// longTurn waits until few others copy long values. It makes a context for an operation that does and may have n bytes.
// The turn is over when the operation waits for the network, or with over. Half of the processors serve requests that
// need microseconds meanwhile: whoever is ready to run gets his time behind all who were before.
func (c *conn) longTurn(n int) (ctx context.Context, over func()) {
	c.g.turns <- struct{}{}
	over = sync.OnceFunc(func() { <-c.g.turns })
	return inside.OnWait(inside.LimitMemory(c.g.ctx, n), over), over
}

// readPart reads what an entry's command needs of a value; see readLarge for paid and give. It reports false if that
// changes all the time, or is a collection's: then the value is read as a whole.
func (b *batch) readPart(e *entry, u *unit) (paid int64, give func(), ok bool) {
	c, name := b.c, b.c.in.stored(u.name)
	held := int64(0) // of the part, and of its reply
	frames := b.frames(e, u)
	for range largeTries {
		ctx := inside.LimitMemory(c.ctx, u.large) // a record is read as a whole
		_, in, err := c.in.api.GetRange(ctx, name, 0, nil)
		from, to := 0, 0
		it := client.Item{Version: in.Version, Expires: in.Expires}
		if err == nil {
			from, to = e.cmd.part(e.args, int(in.Size))
		}
		if from < to {
			if frames {
				if err = b.makeFrame(u, to-from); err == nil {
					it.Value = u.frame[replyHead : replyHead+to-from]
				}
			} else {
				need := 2 * int64(to-from)
				if err = c.take(need - held); err == nil {
					held = max(held, need)
					it.Value = make([]byte, to-from)
				}
			}
			if err == nil {
				var n int
				var now client.Info
				n, now, err = c.in.api.GetRange(ctx, name, int64(from), it.Value)
				if err == nil && (now.Version != in.Version || n < len(it.Value)) {
					continue
				}
			}
		}
		if large := (*inside.TooLargeError)(nil); errors.As(err, &large) {
			u.large = large.Want
			continue
		}
		if errors.Is(err, client.ErrWrongType) && u.kind == spec.Read {
			break // the command asks for the type, or there is no part of a collection
		}
		if err != nil {
			it = client.Item{}
		}
		if u.takeAnswer(it, err); u.stored && err == nil {
			u.k.From, u.k.Whole = from, int(in.Size)
		}
		if b.framed(u) {
			return 0, func() { u.k.Value = nil }, true
		}
		held += b.spareFrame(u)
		return held / 2, func() {
			u.k.Value = nil
			c.share.Drop(held - held/2)
		}, true
	}
	b.dropFrame(u)
	c.share.Drop(held)
	return 0, nil, false
}

// getInto reads a value to the start of *buf, which it makes longer if it must.
// The length that did not fit is the one to make room for, and an eighth more, since values of
// one kind differ a little. It tries again as often as somebody makes the value longer in
// between; LimitMemory bounds that.
// The value is (*buf)[:n], and there until the buffer is used again. Any other error than ErrShortBuffer is the
// store's.
func getInto(ctx context.Context, api client.API, name []byte, buf *[]byte) (int, error) {
	if cap(*buf) == 0 {
		*buf = make([]byte, 512)
	}
	for {
		b := (*buf)[:cap(*buf)]
		*buf = b
		n, err := api.GetInto(ctx, name, b)
		if err == nil {
			return n, nil
		}
		if !errors.Is(err, io.ErrShortBuffer) {
			return 0, err
		}
		*buf = make([]byte, n+n/8)
	}
}
