package client

import (
	"context"
	"errors"

	"github.com/kvd-project/kvd/index"
)

// Exists tells that key is there, of whatever Type, or returns ErrNotFound. It reads no value, so Info.Size is -1. It
// notes no use, so a cache forgets the key as if nobody had asked. A key whose place is remembered and that does not
// expire costs a READ of 8 bytes. Another key costs the start of its record besides, and without a hint its group.
func (c *Client) Exists(ctx context.Context, key []byte) (Info, error) {
	if err := checkKey(key); err != nil {
		return Info{}, err
	}
	q := newCall(index.Exists, key)
	defer q.free()
	if err := c.do(ctx, q); err != nil {
		return Info{}, err
	}
	return Info{Size: -1, Version: q.own.Version, Expires: q.own.Expires}, nil
}

// ExistsPrefix returns how many of keys, from the first on, are there. It asks for all of them in one Do, as Exists
// does. The error, if not nil, is that of keys[n], which may be there or not; the n keys before it are. Errors of keys
// behind an absent one are left out.
func (c *Client) ExistsPrefix(ctx context.Context, keys [][]byte) (n int, err error) {
	g := gets.Get().(*[]Op)
	defer gets.Put(g)
	if n := len(keys); n > cap(*g) {
		*g = append((*g)[:cap(*g)], make([]Op, n-cap(*g))...)
	}
	ops := (*g)[:len(keys)]
	for i := range ops {
		ops[i].Kind, ops[i].Key = OpExists, keys[i]
	}
	c.Do(ctx, ops)
	n, err = LeadingThere(ops)
	for i := range ops {
		ops[i].Key, ops[i].Item, ops[i].Err = nil, Item{}, nil // the pool must hold no caller's keys
	}
	return n, err
}

// LeadingThere returns how many of ops, from the first on, have found their keys, and the error of the next one unless
// that is ErrNotFound. It is for those who substitute a fake for a [Client].
func LeadingThere(ops []Op) (n int, err error) {
	for n < len(ops) && ops[n].Err == nil {
		n++
	}
	if n < len(ops) && !errors.Is(ops[n].Err, ErrNotFound) {
		err = ops[n].Err
	}
	return n, err
}
