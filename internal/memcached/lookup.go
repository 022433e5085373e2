package memcached

import (
	"bytes"
	"context"
	"errors"
	"hash/maphash"
	"strconv"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
)

// get queues the keys of a get or gets.
func (c *conn) get(cmd command, toks [][]byte, began time.Time) (r reply, bad bool) {
	if len(toks) < 2 {
		return badCommand, true
	}
	for _, k := range toks[1:] {
		if !goodKey(k) {
			return badFormat, true
		}
	}
	for i, k := range toks[1:] {
		c.queue(k, lookup{cmd: cmd, began: began, last: i == len(toks)-2})
	}
	return said, false
}

// queue adds a lookup. Two of one key are not performed together: the second could
// find an older value than the first.
func (c *conn) queue(key []byte, l lookup) {
	if len(c.pend) == batchKeys {
		c.link.Waits() // there is more to do than a loop has time for
		c.performLookups()
	}
	slot, twice := c.slotOf(key)
	if twice {
		c.performLookups()
		slot, _ = c.slotOf(key)
	}
	*slot = c.batch<<8 | uint32(len(c.pend))
	n := len(c.arena)
	c.arena = append(c.arena, key...)
	if len(c.ops) == len(c.pend) {
		c.ops = append(c.ops, client.Op{Into: make([]byte, 0, 64)})
	}
	op := &c.ops[len(c.pend)]
	op.Kind, op.Key = client.OpGet, c.arena[n:len(c.arena):len(c.arena)]
	c.pend = append(c.pend, l)
}

// performLookups performs the lookups that wait and writes their answers. Long values are read one at a
// time, when their answer is due.
func (c *conn) performLookups() {
	if len(c.pend) == 0 {
		return
	}
	ops := c.ops[:len(c.pend)]
	var err error
	if !c.looked {
		ctx := c.ctx
		if n := c.lacking(); n > 0 {
			if err = c.take(n); err == nil {
				c.reserved += n
			}
		}
		if len(ops) > freeKeys {
			ctx = c.smallCtx
		}
		if err == nil {
			c.s.o.Client.Do(ctx, ops)
		}
	}
	c.looked = false
	defer func() {
		c.share.Give(c.reserved)
		c.reserved = 0
	}()
	for i := range ops {
		op, l := &ops[i], &c.pend[i]
		if err != nil {
			op.Item, op.Err = client.Item{}, err
		}
		if op.Err != nil && errors.As(op.Err, new(*inside.TooLargeError)) { // what is new is on the heap
			c.answerLarge(op, l)
		} else {
			c.answer(op, l)
		}
		// The buffer may serve again; a long one goes.
		if v := op.Item.Value; cap(v) > cap(op.Into) && cap(v) <= keepInto {
			op.Into = v[:0]
		}
		op.Item, op.Key = client.Item{}, nil
	}
	c.pend, c.arena = c.pend[:0], c.arena[:0]
	if c.batch++; c.batch == 1<<24 {
		c.batch, c.slots = 1, [4 * batchKeys]uint32{}
	}
}

// lacking is how many bytes of the share are to be taken before the lookups that wait are performed.
func (c *conn) lacking() int64 {
	if len(c.pend) <= freeKeys {
		return 0
	}
	return int64(len(c.pend))*2*eachLimit - c.reserved
}

// slotOf is where a key stands among those that wait, or would.
func (c *conn) slotOf(key []byte) (slot *uint32, there bool) {
	for i := maphash.Bytes(c.s.seed, key); ; i++ {
		slot = &c.slots[i%uint64(len(c.slots))]
		if *slot>>8 != c.batch {
			return slot, false
		}
		if bytes.Equal(c.ops[*slot&0xff].Key, key) {
			return slot, true
		}
	}
}

// answerLarge performs a lookup again, of a long value.
func (c *conn) answerLarge(op *client.Op, l *lookup) {
	var give func()
	give, op.Err = c.do(0, func(ctx context.Context) error {
		again := [1]client.Op{{Kind: client.OpGet, Key: op.Key}}
		c.s.o.Client.Do(ctx, again[:])
		op.Item = again[0].Item
		return again[0].Err
	})
	c.answer(op, l)
	op.Item = client.Item{}
	give()
}

func (c *conn) found(err error) {
	switch {
	case err == nil:
		c.s.stats.hits.Add(1)
	case errors.Is(err, client.ErrNotFound):
		c.s.stats.misses.Add(1)
	}
}

func (c *conn) answer(op *client.Op, l *lookup) {
	c.found(op.Err)
	if l.meta == nil {
		c.s.detail.noteGet(op.Key, op.Err == nil)
	}
	if l.binary {
		c.done(l.cmd, c.binaryGot(l.op, l.opaque, op.Key, &op.Item, op.Err), l.began)
		return
	}
	if l.meta != nil {
		c.done(l.cmd, c.metaGot(l.meta, &op.Item, op.Err), l.began)
		return
	}
	// An error of one key is the whole command's, and comes instead of END.
	if c.broken == nil && op.Err != nil && !errors.Is(op.Err, client.ErrNotFound) {
		c.broken = op.Err
	}
	if op.Err == nil {
		c.value(op.Key, &op.Item, l.cmd == cmdGets)
	}
	if l.last {
		r := c.end()
		c.done(l.cmd, r.res, l.began)
	}
}

// end ends the answer to a command with several keys.
func (c *conn) end() reply {
	r := reply{"END", resOK}
	if c.broken != nil {
		r = c.trouble(c.broken)
		c.broken = nil
	}
	c.say(r)
	return r
}

func (c *conn) value(key []byte, it *client.Item, cas bool) {
	c.out().WriteString("VALUE ")
	c.out().Write(key)
	c.uint(' ', uint64(it.Flags))
	c.uint(' ', uint64(len(it.Value)))
	if cas {
		c.uint(' ', it.Version)
	}
	c.out().WriteString("\r\n")
	c.out().Write(it.Value)
	c.out().WriteString("\r\n")
}

func (c *conn) uint(before byte, n uint64) {
	c.out().Write(strconv.AppendUint(append(c.num[:0], before), n, 10))
}

func (c *conn) getAndTouch(cmd command, toks [][]byte) reply {
	exp, ok := c.expiry(toks[1])
	if !ok {
		return badExptime
	}
	for _, k := range toks[2:] {
		if !goodKey(k) {
			return badFormat
		}
	}
	if len(toks) > batchKeys {
		c.link.Waits()
	}
	for _, k := range toks[2:] {
		var it client.Item
		version, give, err := c.touch(k, exp, &it)
		it.Version = version
		c.found(err)
		c.s.detail.noteGet(k, err == nil)
		switch {
		case err == nil:
			c.value(k, &it, cmd == cmdGats)
		case c.broken == nil && !errors.Is(err, client.ErrNotFound):
			c.broken = err
		}
		give()
	}
	r := c.end()
	r.text = ""
	return r
}
