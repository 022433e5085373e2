package memcached

import (
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/loop"
)

var _ loop.Conn = (*conn)(nil)

// Link, and what follows, is as in loop.Conn.
func (c *conn) Link() *loop.Link { return &c.link }

func (c *conn) Moved(int) {}

func (c *conn) Read(bool) error { return c.begin() }

func (c *conn) Lookups() (store client.API, n, limit int) {
	if n := c.lacking(); n > 0 {
		if !c.share.Try(n) {
			return nil, 0, 0
		}
		c.reserved += n
	}
	if len(c.pend) > freeKeys {
		return c.s.o.Client, len(c.pend), eachLimit
	}
	return c.s.o.Client, len(c.pend), oneLimit
}

func (c *conn) Ask(ops []client.Op) { copy(ops, c.ops) }

func (c *conn) Found(ops []client.Op) {
	copy(c.ops, ops)
	c.looked = true
}

func (c *conn) Finish() (commands int, err error) {
	err = c.flushAnswers()
	c.idle.Store(time.Now().UnixMilli())
	return c.said, err
}

// Tick has nothing to do: connections may be silent, and half a command is not left to a loop.
func (c *conn) Tick(time.Time) {}
