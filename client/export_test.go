package client

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// PinnedFor is how far ahead the time of a key's access word lies.
func (c *Client) PinnedFor(ctx context.Context, key []byte) (time.Duration, error) {
	t := tools{c}
	loc, err := t.Locate(key)
	if err != nil {
		return 0, err
	}
	off, w, _, err := t.slotOf(ctx, loc, key)
	if err != nil || off == 0 {
		return 0, err
	}
	b, err := t.ReadRaw(ctx, loc.PG, loc.Replicas-1, loc.IndexBytes+off, 8)
	if err != nil {
		return 0, err
	}
	a := layout.AccessWord(binary.LittleEndian.Uint64(b))
	if !a.Of(w) {
		return 0, nil
	}
	return time.Duration(a.AheadTicks(uint64(time.Now().UnixMilli()))) * layout.AccessTickMillis * time.Millisecond, nil
}

// Opened are the devices that the Client opened itself.
func (c *Client) Opened() []*rdma.Device { return c.opened }

// ExpiriesWaiting is how many puts with an expiry the session's sweep has not heard of yet.
func (c *Client) ExpiriesWaiting() (n uint32) {
	for i := range c.sess.Load().expiries {
		q := &c.sess.Load().expiries[i]
		n += q.put.Load() - q.got.Load()
	}
	return n
}

// ExpiriesMost is how many of them there is room for.
const ExpiriesMost = expiriesLen

// Renewals are how many the session has sent, up to which one limbo has been released, and
// whether it is quiet.
func (c *Client) Renewals() (sent, released uint64, quiet bool) {
	s := c.sess.Load()
	sent, released = s.core.Renewals()
	return sent, released, s.core.Quiet()
}

// Buffered is how many bytes of large buffers its operations have taken, while nobody uses the Client.
func (c *Client) Buffered() (n uint64) {
	for _, l := range c.sess.Load().core.Lanes() {
		n += l.Stats.Buffered
	}
	return n
}

// Lanes is how many the session has.
func (c *Client) Lanes() int { return c.sess.Load().core.KeyLanes() }

// EndStatus leaves the session without status words, as if the directory had ended it and nobody had told.
func (c *Client) EndStatus() { c.sess.Load().status.end() }

// Turns are how many asks the session's control has performed itself, and how many goroutines were started to perform
// others or to control meanwhile.
func (c *Client) Turns() (alone, begun uint64) {
	s := c.sess.Load()
	s.turn.Lock()
	defer s.turn.Unlock()
	return s.turn.alone, s.turn.begun
}

// Wake has the session's control look at the agenda.
func (c *Client) Wake() { c.sess.Load().wake() }

// StatusWords are how many status words transactions have taken, and how many nobody uses again.
func (c *Client) StatusWords() (busy, aside int) {
	w := &c.sess.Load().status
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.busy, w.mu.aside
}

// Performed is how many operations each lane has ended. Nobody uses the Client meanwhile.
func (c *Client) Performed() (n []uint64) {
	for _, l := range c.sess.Load().core.Lanes() {
		n = append(n, l.Performed())
	}
	return n
}

// Holds is how many Views are not released.
func (c *Client) Holds() int { return c.sess.Load().core.Holds() }

// LoseSession ends the session, as when the directory says that it is over.
func (c *Client) LoseSession() { c.sess.Load().lost(errSessionLost) }

// AbortBroken is what MultiCAS does when a chain of ops broke, of which nobody knows whether it has happened: it aborts
// that. The session is lost before if lost. again: MultiCAS would try once more.
func (c *Client) AbortBroken(ctx context.Context, ops []Op, lost bool) (again bool, err error) {
	s := c.sess.Load()
	t := s.newTxn(ops, uint64(time.Now().UnixNano()), 0)
	pg, err := t.home()
	if err != nil {
		return false, err
	}
	if t.x, err = s.status.take(ctx, pg); err != nil {
		return false, err
	}
	t.at = t.x.at
	t.at.Seq++
	if err := t.request(); err != nil {
		return false, err
	}
	if lost {
		s.lost(errSessionLost)
	}
	err = t.commit(ctx, layout.Abort)
	return retryable(err), err
}
