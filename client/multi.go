package client

import (
	"context"
	"sync"
)

// MultiGet gets every key; the phases of all of them share round trips: one or
// two in all. Results stand in the order of keys, each with its own error. Values of up to 4 KiB lie in
// one piece of memory, which lives until the last of them is let go.
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
	// A first pass adds up the lengths, so that one allocation holds all short values. Long ones keep the buffers that
	// they were read to.
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
		// The pool must hold no caller's keys, and no long values.
		o.Key, o.Item, o.Err = nil, Item{}, nil
	}
	return res
}

// gets are the Ops of a MultiGet or an ExistsPrefix, with their buffers, of at most keptInto bytes each.
var gets = sync.Pool{New: func() any { return new([]Op) }}

// keptInto is in bytes. A longer buffer is its result's, or is dropped.
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

// batch performs n Ops that fill makes. An Op whose Err fill sets is not performed.
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
