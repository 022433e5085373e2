package client

import (
	"context"
	"sync"

	"github.com/kvd-project/kvd/internal/engine"
)

// MultiGet gets every key; the phases of all of them share round trips: one or
// two in all. Results stand in the order of keys, each with its own error. Values of up to 4 KiB lie in
// one piece of memory, which lives as long as any of them.
func (c *Client) MultiGet(ctx context.Context, keys [][]byte) []Result {
	g := gets.Get().(*[]Op)
	defer gets.Put(g)
	if n := len(keys); n > cap(*g) {
		*g = append((*g)[:cap(*g)], make([]Op, n-cap(*g))...)
	}
	ops := (*g)[:len(keys)]
	for i := range ops {
		if ops[i].Into == nil {
			ops[i].Into = make([]byte, 0, 64)
		}
		ops[i].Kind, ops[i].Key = OpGet, keys[i]
	}
	c.Do(ctx, ops)
	total := 0
	for i := range ops {
		if n := len(ops[i].Item.Value); n <= keptInto {
			total += n
		}
	}
	all := make([]byte, 0, total)
	res := make([]Result, len(keys))
	for i := range ops {
		o := &ops[i]
		if res[i] = (Result{Item: o.Item, Err: o.Err}); o.Err == nil && len(o.Item.Value) <= keptInto {
			all = append(all, o.Item.Value...)
			res[i].Value = all[len(all)-len(o.Item.Value) : len(all) : len(all)]
			o.Into = o.Item.Value[:0]
		}
		if cap(o.Into) > keptInto {
			o.Into = nil
		}
		o.Key, o.Item, o.Err = nil, Item{}, nil
	}
	return res
}

// gets are the Ops of a MultiGet, with their buffers, of at most keptInto bytes each.
var gets = sync.Pool{New: func() any { return new([]Op) }}

const keptInto = 4 << 10

// MultiPut puts every pair; each has its own outcome.
func (c *Client) MultiPut(ctx context.Context, pairs []KV) []Result {
	return c.batch(ctx, len(pairs), func(o *Op, i int) {
		p := &pairs[i]
		exp, err := expiry(p.TTL)
		o.Kind, o.Key, o.Value, o.Expires, o.Flags, o.Err = OpPut, p.Key, p.Value, expires(exp), p.Flags, err
	})
}

// MultiDelete deletes every key; each has its own outcome.
func (c *Client) MultiDelete(ctx context.Context, keys [][]byte) []Result {
	return c.batch(ctx, len(keys), func(o *Op, i int) { o.Kind, o.Key = OpDelete, keys[i] })
}

// batch performs n Ops that fill makes. One whose Err it sets is not performed.
func (c *Client) batch(ctx context.Context, n int, fill func(*Op, int)) []Result {
	ops, of, res := make([]Op, 0, n), make([]int, 0, n), make([]Result, n)
	for i := range n {
		var o Op
		if fill(&o, i); o.Err != nil {
			res[i].Err = o.Err
			continue
		}
		ops, of = append(ops, o), append(of, i)
	}
	c.Do(ctx, ops)
	for j := range ops {
		res[of[j]] = Result{Item: ops[j].Item, Err: ops[j].Err}
	}
	return res
}

// multi performs calls together: one doorbell a lane and memory node for each
// round trip of all of them.
func (c *Client) multi(ctx context.Context, calls []*call) {
	if c.o.Events != nil {
		for _, q := range calls {
			_, end := c.begin(ctx, q) // one context is for all of them
			defer end()
		}
	}
	limit := MemoryLimit(ctx)
	for _, q := range calls {
		q.limit = limit
	}
	todo := calls
	for until := int64(0); len(todo) > 0; {
		s, err := c.live(ctx)
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			for _, q := range todo {
				q.err = err
			}
			return
		}
		s.multi(ctx, s.spread(todo))
		var again []*call
		retry := true
		for _, q := range todo {
			if q.err != nil && retryable(q.err) && retry {
				retry = c.patient(&until)
			}
			if q.err != nil && retryable(q.err) && retry {
				q.err, q.finished, q.cancel = nil, false, nil
				again = append(again, q)
			} else if q.err != nil {
				q.err = c.public(s, q)
			}
		}
		if todo = again; len(todo) > 0 {
			if err := c.pause(ctx); err != nil {
				for _, q := range todo {
					q.err = err
				}
				return
			}
		}
	}
}

// spread sorts calls by their keys' lanes.
func (s *sess) spread(calls []*call) [][]*call {
	byLane := make([][]*call, len(s.lanes))
	for _, q := range calls {
		d := s.hashKey(q)
		byLane[d.l.ID()] = append(byLane[d.l.ID()], q)
	}
	return byLane
}

func (s *sess) multi(ctx context.Context, byLane [][]*call) {
	deadline := engine.Nanos() + int64(s.c.o.OpTimeout)
	ws := make([]*waiter, len(s.lanes))
	led := make([]bool, len(s.lanes))
	var wg sync.WaitGroup
	// Post on every lane before waiting on any.
	for i, qs := range byLane {
		if len(qs) == 0 {
			continue
		}
		d := s.lanes[i]
		ws[i] = newWaiter(qs, deadline)
		if s.dead.Load() || s.shut.Load() {
			for _, q := range qs {
				q.err = engine.ErrLease
			}
			ws[i] = nil
			continue
		}
		if led[i] = d.tryLead(); led[i] {
			ws[i].leading = true
			for _, q := range qs {
				d.start(q)
			}
			d.pump()
		} else {
			d.enqueue(ws[i])
			d.l.Kick()
		}
	}
	// A lane that is led must be driven: operations of one lane may wait for an
	// insert lock that one of another lane holds, or for a view that comes only when
	// the other has quiesced. A waiter may be made the leader at any moment. So each
	// lane that is not done gets a goroutine of its own, the last one this.
	finish := func(i int) {
		if led[i] {
			s.lanes[i].drive(ctx, ws[i])
		} else {
			s.lanes[i].join(ctx, ws[i])
		}
	}
	last := -1
	for i, w := range ws {
		switch {
		case w == nil:
		case led[i] && w.left == 0:
			s.lanes[i].handOver()
		default:
			if last >= 0 {
				WillWait(ctx)
				wg.Add(1)
				go func(i int) {
					defer wg.Done()
					finish(i)
				}(last)
			}
			last = i
		}
	}
	if last >= 0 {
		finish(last)
	}
	wg.Wait()
}

// batchLimit bounds the operations of one multi step, and so its buffers.
const batchLimit = 1024
