package memcached

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/netsrv"
)

// The text commands that write: a client that sends a value may add, replace or join it, and one that sends a number
// may count. Those of the meta and of the binary protocol end in the same write, join, touch and number. Each of them
// is a single operation of the store, so that it takes effect at once or not at all, whatever other gateways do.

// store performs set, add, replace, append, prepend and cas, whose words toks are, name, key, flags, exptime and length
// first; it reads the value behind the line. An error ends the connection: it was not read whole, so that nobody knows
// where the next command begins. A value that is refused for its length alone is passed over, and the connection goes
// on.
func (c *conn) store(cmd command, toks [][]byte) (reply, error) {
	flags, err := strconv.ParseUint(string(toks[2]), 10, 32)
	exp, okExp := c.expiry(toks[3])
	n, okLen := valueLen(toks[4])
	if err != nil || !okExp || !okLen || !goodKey(toks[1]) {
		return badFormat, nil
	}
	op := client.Op{Kind: client.OpPut, Expires: exp, Flags: uint32(flags)}
	if cmd == cmdCas {
		op.Cond = client.IfVersion
		if op.Version, err = strconv.ParseUint(string(toks[5]), 10, 64); err != nil {
			return badFormat, nil
		}
	}
	c.key = append(c.key[:0], toks[1]...) // the line goes when the value is read
	op.Key = c.key
	c.s.detail.noteSet(op.Key)
	if n > c.s.o.MaxValueBytes {
		return c.refuseLarge(op.Key, n, cmd == cmdSet)
	}
	value, whole, give, err := c.readValue(n)
	defer give()
	if err != nil {
		return c.unread(err), err
	}
	if !whole {
		return badChunk, nil
	}
	op.Value = value
	none := notStored
	switch cmd {
	case cmdAdd:
		op.Cond = client.IfAbsent
	case cmdReplace:
		op.Cond = client.IfPresent
	case cmdCas:
		none = notFound
	case cmdAppend, cmdPrepend:
		c.join(&op, cmd == cmdAppend, nil)
	}
	switch _, err := c.write(op); {
	case errors.Is(err, client.ErrExists):
		return notStored, nil
	case errors.Is(err, client.ErrConflict):
		return exists, nil
	default:
		return c.outcome(err, stored, none), nil
	}
}

// refuseLarge passes over a value of n bytes, more than are stored. If the old value goes, a client that sets a key
// does not find it afterwards.
func (c *conn) refuseLarge(key []byte, n int, oldGoes bool) (reply, error) {
	if err := c.skipValue(n); err != nil {
		return tooLarge, err
	}
	if oldGoes {
		if err := c.remove(key); err != nil && !errors.Is(err, client.ErrNotFound) {
			return c.trouble(err), nil
		}
	}
	return tooLarge, nil
}

// unread says why a value was not read, if the peer is still there.
func (c *conn) unread(err error) reply {
	if errors.Is(err, netsrv.ErrBudget) {
		r := c.trouble(err)
		c.say(r)
		return r
	}
	return badChunk
}

// write performs an op that writes, and returns the new version.
func (c *conn) write(op client.Op) (version uint64, err error) {
	if op.Kind == client.OpPut && op.Cond == client.Always && op.Expires.IsZero() && len(op.Value) <= eachLimit {
		return c.s.o.Client.Put(c.ctx, op.Key, op.Value, client.PutOptions{Flags: op.Flags}) // it costs least
	}
	give, err := c.do(len(op.Value), func(ctx context.Context) error {
		ops := [1]client.Op{op}
		c.s.o.Client.Do(ctx, ops[:])
		version = ops[0].Item.Version
		return ops[0].Err
	})
	give()
	return version, err
}

// update is client.API.Update. give is to be called when what f was shown is not needed any more.
func (c *conn) update(key []byte, f client.UpdateFunc) (version uint64, give func(), err error) {
	give, err = c.do(0, func(ctx context.Context) (err error) {
		version, err = c.s.o.Client.Update(ctx, key, f)
		return err
	})
	return version, give, err
}

// join makes op, a Put, add its value to the one there is. The Put's condition on the
// version stays. vivify, if not nil, tells when a new item expires.
func (c *conn) join(op *client.Op, behind bool, vivify *time.Time) {
	put := *op
	op.Kind, op.Update = client.OpUpdate, func(cur client.Item, present bool) (client.Change, error) {
		switch {
		case !present && vivify != nil:
			return client.Change{Value: put.Value, Expires: *vivify, Flags: put.Flags}, nil
		case !present:
			return client.Change{}, client.ErrNotFound
		case put.Cond == client.IfVersion && cur.Version != put.Version:
			return client.Change{}, client.ErrConflict
		case len(cur.Value)+len(put.Value) > c.s.o.MaxValueBytes:
			return client.Change{}, errTooLarge
		}
		a, b := cur.Value, put.Value
		if !behind {
			a, b = b, a
		}
		return client.Change{Value: append(append(make([]byte, 0, len(a)+len(b)), a...), b...), Expires: cur.Expires,
			Flags: cur.Flags}, nil
	}
}

// touch gives key another expiry and, if it is not nil, fills it in. give is to be called when the
// item is not needed any more.
func (c *conn) touch(key []byte, exp time.Time, it *client.Item) (version uint64, give func(), err error) {
	return c.update(key, func(cur client.Item, present bool) (client.Change, error) {
		if !present {
			return client.Change{}, client.ErrNotFound
		}
		if it != nil {
			*it = cur
			it.Value, it.Expires = bytes.Clone(cur.Value), exp
		}
		return client.Change{Value: cur.Value, Expires: exp, Flags: cur.Flags, Note: cur.Note}, nil
	})
}

// number is the sum that incr and decr make of a value: 64 bits that wrap upwards, and
// stop at 0 downwards.
func number(value []byte, delta uint64, down bool) (uint64, error) {
	// memcached itself pads a number that lost digits, and reads up to a space.
	if i := bytes.IndexByte(value, ' '); i > 0 {
		value = value[:i]
	}
	v, err := strconv.ParseUint(string(value), 10, 64)
	switch {
	case err != nil:
		return 0, errNotNumeric
	case !down:
		return v + delta, nil
	case delta > v:
		return 0, nil
	}
	return v - delta, nil
}

func (c *conn) incr(cmd command, toks [][]byte) reply {
	if !goodKey(toks[1]) {
		return badFormat
	}
	delta, err := strconv.ParseUint(string(toks[2]), 10, 64)
	if err != nil {
		return badDelta
	}
	var sum []byte
	_, give, err := c.update(toks[1], func(cur client.Item, present bool) (client.Change, error) {
		if !present {
			return client.Change{}, client.ErrNotFound
		}
		n, err := number(cur.Value, delta, cmd == cmdDecr)
		sum = strconv.AppendUint(sum[:0], n, 10)
		return client.Change{Value: sum, Expires: cur.Expires, Flags: cur.Flags, Note: noteOfSum(cur, sum)}, err
	})
	give()
	return c.outcome(err, reply{string(sum), resOK}, notFound)
}
