package engine

import "context"

// OwnNear makes the caller the owner of a lane, as an operation without a Task does, and returns its id, -1 if there is
// none.
func (c *Core) OwnNear() int {
	near, l := c.ownNear()
	c.near.Put(near)
	if l == nil {
		return -1
	}
	return l.id
}

func (c *Core) GaveUp(pg uint32, missed int64) { c.gaveUp(pg, missed) }

func (c *Core) SetVain(pg uint32) { c.gaveUp(pg, c.opts.Nanos()-vainFor) }

func (c *Core) SetFullFor(nanos int64) { c.opts.FullFor = nanos }

// Begin starts ops as Do does, for a caller that drives the lane itself.
func (l *Lane) Begin(ops []*Op, deadline int64) {
	l.begin(&waiter{ops: ops, left: len(ops), owns: true, deadline: deadline})
}

func (l *Lane) Abandon(op *Op, err error) { l.abandon(op, err) }

func (l *Lane) EndOverdue() { l.endOverdue() }

// Queue leaves ops to the lane's owner, as a caller does that does not get the lane; over reports whether it was told
// that they are over.
func (l *Lane) Queue(ops []*Op) (over func() bool) {
	w := l.newWaiter(context.Background(), ops)
	l.enqueue(w)
	return func() bool { return len(w.ch) == 1 }
}
