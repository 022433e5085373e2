package gateway

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/glob"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/resp"
)

// ---- SCAN --------------------------------------------------------------------

// SCAN's cursor is a client.Cursor between two segments, so that any gateway can go
// on with it: the shard's prefix (at most 20 bits) above the segment (32 bits). No
// such cursor but the first is 0.
const (
	cursorPrefixShift  = 44 // of a left-aligned prefix, to make it 20 bits
	cursorSegmentShift = 32
)

// decodeCursor is what a client sent as a cursor. Any number is a place in the index: one that
// no SCAN returned begins at that place, and can do no harm.
func decodeCursor(n uint64) client.Cursor {
	return client.Cursor{Prefix: n >> cursorSegmentShift << cursorPrefixShift, Segment: uint32(n)}
}

// encodeCursor is the number for a cursor; ok is false for one within a segment, which has no
// number of its own, so that SCAN goes on until the segment ends. A reply may then have more
// keys than COUNT says, which Redis allows itself, too.
func encodeCursor(cur client.Cursor) (n uint64, ok bool) {
	if cur.Done {
		return 0, true
	}
	n = cur.Prefix>>cursorPrefixShift<<cursorSegmentShift | uint64(cur.Segment)
	return n, cur.Slot == 0 && n != 0 && decodeCursor(n).Prefix == cur.Prefix
}

// pages calls f with pages of keys from cur on, until it says stop. The
// keys are f's; those that gateways keep for themselves are left out. Corrupt records are left out; an error at the end, which is ErrCorrupt, says so.
func (c *conn) pages(api client.API, cur client.Cursor, o client.ScanOptions, f func(kvs []client.KV, next client.Cursor) (more bool, err error)) error {
	var damaged error // of the first such page
	for !cur.Done {
		var kvs []client.KV
		from := cur
		o.Cursor = &cur
		for kv, err := range api.Scan(c.ctx, o) {
			switch {
			case errors.Is(err, client.ErrCorrupt) && cur != from:
				damaged = cmp.Or(damaged, err)
			case err != nil:
				return err
			case isReserved(kv.Key):
			default:
				kvs = append(kvs, kv)
			}
		}
		more, err := f(kvs, cur)
		if err != nil {
			return err
		}
		if !more {
			break
		}
	}
	return damaged
}

// rest takes the error of pages for a reply that has no room for half an answer: what is
// corrupt is logged.
func (c *conn) rest(err error) error {
	if errors.Is(err, client.ErrCorrupt) {
		c.g.o.Logger.Error("keys left out of a scan", "err", err)
		return nil
	}
	return err
}

// maxScanCount bounds the keys of one reply of SCAN: COUNT is the client's, and the keys are
// collected before the first is sent, since their number comes first.
const maxScanCount = 10_000

// parseCursor reads a number as C's strtoul does, which is how Redis reads a cursor: with a sign, or
// nothing at all.
func parseCursor(b []byte) (n uint64, ok bool) {
	digits := bytes.TrimPrefix(b, []byte("-"))
	negative := len(digits) < len(b)
	if !negative {
		digits = bytes.TrimPrefix(b, []byte("+"))
	}
	if len(b) == 0 {
		return 0, true
	}
	n, err := strconv.ParseUint(string(digits), 10, 64)
	if negative {
		n = -n
	}
	return n, err == nil
}

// cmdScan keeps the promise of Redis's SCAN: what is there from its begin to its end is returned
// at least once. The pattern is applied behind the store, so a call can return no keys and still
// a cursor to go on with.
func cmdScan(c *conn, w *resp.Writer, args [][]byte) {
	n, ok := parseCursor(args[1])
	if !ok {
		w.Error("ERR invalid cursor")
		return
	}
	count, pattern, ofType := int64(10), []byte(nil), []byte(nil)
	for i := 2; i < len(args); i += 2 {
		switch {
		case i+1 == len(args):
			w.Error(errSyntax)
			return
		case fold(args[i], "count"):
			var ok bool
			if count, ok = resp.ParseInt(args[i+1]); !ok {
				w.Error(errNotInt)
				return
			}
			if count < 1 {
				w.Error(errSyntax)
				return
			}
		case fold(args[i], "match"):
			pattern = args[i+1]
		case fold(args[i], "type"):
			ofType = args[i+1]
		default:
			w.Error(errSyntax)
			return
		}
	}
	var found [][]byte
	var next uint64
	if n>>(cursorSegmentShift+20) != 0 { // none of ours: there is nothing behind it
		w.Array(2)
		w.BulkString("0")
		w.Array(0)
		return
	}
	err := c.pages(c.api, decodeCursor(n), client.ScanOptions{Count: int(min(count, maxScanCount)), KeysOnly: true}, func(kvs []client.KV, cur client.Cursor) (bool, error) {
		for _, kv := range kvs {
			if (ofType == nil || fold(ofType, kv.Type.String())) && (pattern == nil || glob.Match(pattern, kv.Key)) {
				found = append(found, kv.Key)
			}
		}
		var ok bool
		next, ok = encodeCursor(cur)
		return !ok, nil // within a segment: it has some more
	})
	if err := c.rest(err); err != nil {
		w.Error(c.g.storeError(err))
		return
	}
	w.Array(2)
	w.BulkString(strconv.FormatUint(next, 10))
	w.Array(len(found))
	for _, k := range found {
		w.Bulk(k)
	}
}

// scanPage is how many keys a command reads at a time that goes through all of them.
const scanPage = 1000

// cmdKeys returns a whole database, or an error: half of the keys would look like all of them.
// The memory that the keys may take is taken before the first is read, so that a few KEYS at a
// time cannot exhaust the gateway.
func cmdKeys(c *conn, w *resp.Writer, args [][]byte) {
	var found [][]byte
	seen := make(map[string]struct{}) // Scan may return a key twice
	size := 0
	most := 3 * int64(c.g.o.OutputBytes) // the keys, twice, and the reply
	if err := c.take(most); err != nil {
		w.Error(c.g.storeError(err))
		return
	}
	defer c.share.Drop(most)
	var errTooMany = fmt.Errorf("%w: KEYS: more than %d bytes of keys; use SCAN", client.ErrInvalid, c.g.o.OutputBytes)
	err := c.pages(c.api, client.Cursor{}, client.ScanOptions{Count: scanPage, KeysOnly: true}, func(kvs []client.KV, _ client.Cursor) (bool, error) {
		for _, kv := range kvs {
			if !glob.Match(args[1], kv.Key) {
				continue
			}
			if _, ok := seen[string(kv.Key)]; ok {
				continue
			}
			seen[string(kv.Key)] = struct{}{}
			found = append(found, kv.Key)
			if size += len(kv.Key) + 64; size > c.g.o.OutputBytes {
				return false, errTooMany
			}
		}
		return true, nil
	})
	if err := c.rest(err); err != nil {
		w.Error(c.g.storeError(err))
		return
	}
	w.Array(len(found))
	for _, k := range found {
		w.Bulk(k)
	}
}

// cmdRandomKey looks at the keys behind a random place, and before it if there are
// none: not every key is equally likely.
func cmdRandomKey(c *conn, w *resp.Writer, _ [][]byte) {
	from := client.Cursor{Prefix: uint64(rand.Uint32N(1<<20)) << cursorPrefixShift, Segment: rand.Uint32N(4096)}
	var found []byte
	for _, cur := range []client.Cursor{from, {Prefix: from.Prefix}, {}} {
		err := c.pages(c.api, cur, client.ScanOptions{Count: 64, KeysOnly: true}, func(kvs []client.KV, _ client.Cursor) (bool, error) {
			if len(kvs) > 0 {
				found = kvs[rand.IntN(len(kvs))].Key
			}
			return found == nil, nil
		})
		if err := c.rest(err); err != nil {
			w.Error(c.g.storeError(err))
			return
		}
		if found != nil {
			w.Bulk(found)
			return
		}
	}
	w.Null()
}

// cmdDBSize counts by reading the index; unlike INFO it never answers with an older number.
func cmdDBSize(c *conn, w *resp.Writer, _ [][]byte) {
	n, err := c.api.Count(c.ctx)
	if err != nil {
		w.Error(c.g.storeError(err))
		return
	}
	if c.db == 0 && n > 0 {
		if set, err := c.libraries(false); err != nil || set.version != 0 {
			n-- // the key of libraries, if only one that cannot be read
		}
	}
	w.Int(int64(n))
}

func cmdFlushDB(c *conn, w *resp.Writer, args [][]byte) { c.flush(w, args, c.db, c.db) }
func cmdFlushAll(c *conn, w *resp.Writer, args [][]byte) {
	c.flush(w, args, 0, len(c.g.o.Databases)-1)
}

// flush deletes every key that is there when it starts, a page at a time.
// It is no step in time: keys that are written meanwhile may stay or go. Those whose record is
// longer than a batch may read are deleted one by one. An error in the middle leaves the rest of
// the keys in place.
func (c *conn) flush(w *resp.Writer, args [][]byte, from, to int) {
	if len(args) > 2 || len(args) == 2 && !fold(args[1], "async") && !fold(args[1], "sync") {
		w.Error(errSyntax)
		return
	}
	defer c.g.wroteAll(c) // whatever came of it
	for db := from; db <= to; db++ {
		api := c.g.o.Databases[db].Client
		var names [][]byte
		// Expired keys count until they are gone.
		err := c.pages(api, client.Cursor{}, client.ScanOptions{Count: scanPage, KeysOnly: true, Expired: true}, func(kvs []client.KV, _ client.Cursor) (bool, error) {
			names = names[:0]
			for _, kv := range kvs {
				names = append(names, kv.Key)
			}
			for i, r := range api.MultiDelete(c.smallCtx, names) {
				err := r.Err
				if errors.As(err, new(*inside.TooLargeError)) {
					var give func()
					give, err = c.do(func(ctx context.Context) error { return api.Delete(ctx, names[i]) })
					give()
				}
				if err != nil && !errors.Is(err, client.ErrNotFound) {
					return false, err
				}
			}
			return true, nil
		})
		if err != nil {
			w.Error(c.g.storeError(err))
			return
		}
	}
	w.OK()
}

// ---- several keys --------------------------------------------------------------

// cmdMSetNX sets all of its keys or none.
func cmdMSetNX(t *staged, args [][]byte, w *resp.Writer) {
	if len(args)%2 == 0 {
		w.Error("ERR wrong number of arguments for 'msetnx' command")
		return
	}
	var names [][]byte
	for i := 1; i < len(args); i += 2 {
		names = append(names, args[i])
	}
	t.load(names...)
	for _, n := range names {
		if t.key(n).present {
			w.Int(0)
			return
		}
	}
	for i := 1; i < len(args); i += 2 {
		t.key(args[i]).setAs(client.Plain, args[i+1], 0)
	}
	w.Int(1)
}

func cmdRename(c *conn, w *resp.Writer, args [][]byte)   { c.rename(w, args, false) }
func cmdRenameNX(c *conn, w *resp.Writer, args [][]byte) { c.rename(w, args, true) }

// rename writes the new key, then deletes the old one if it is still what was
// copied; if not, it copies again.
// If the connection or the gateway ends in between there are both names; never neither. The copy
// keeps expiry and flags. With nx the new name is only written again over what this command
// itself wrote.
func (c *conn) rename(w *resp.Writer, args [][]byte, nx bool) {
	from, to := args[1], args[2]
	for _, k := range args[1:] {
		if bad := badKey(k); bad != "" {
			w.Error(bad)
			return
		}
	}
	api := c.api
	remove := func(name []byte, version uint64) error {
		give, err := c.do(func(ctx context.Context) error { return api.DeleteVersion(ctx, name, version) })
		give()
		return err
	}
	give := func() {}
	defer func() { give() }()
	wrote := uint64(0) // the version of to that this command wrote
	for {
		give()
		var it client.Item
		var err error
		give, err = c.do(func(ctx context.Context) (err error) {
			it, err = getTyped(ctx, api, from)
			return err
		})
		if err != nil {
			if errors.Is(err, client.ErrNotFound) {
				if wrote != 0 { // somebody else deleted it first
					_ = remove(to, wrote)
				}
				w.Error(errNoKey)
				return
			}
			w.Error(c.g.storeError(err))
			return
		}
		if string(from) == string(to) {
			if nx {
				w.Int(0)
			} else {
				w.OK()
			}
			return
		}
		put := client.Op{Kind: client.OpPut, Key: to, Value: it.Value, Expires: it.Expires, Flags: it.Flags, Type: it.Type}
		if nx {
			if put.Cond = client.IfAbsent; wrote != 0 {
				put.Cond, put.Version = client.IfVersion, wrote
			}
		}
		version := uint64(0)
		done, err := c.do(func(ctx context.Context) error {
			ops := []client.Op{put}
			api.Do(ctx, ops)
			version = ops[0].Item.Version
			return ops[0].Err
		})
		done()
		switch {
		case errors.Is(err, client.ErrExists):
			w.Int(0)
			return
		case nx && (errors.Is(err, client.ErrConflict) || errors.Is(err, client.ErrNotFound)):
			w.Int(0) // to is somebody else's by now
			return
		case err != nil:
			w.Error(c.g.storeError(err))
			return
		}
		wrote = version
		err = remove(from, it.Version)
		switch {
		case err == nil:
			if notify := eventClass(c.g.notify.Load()); notify != 0 {
				c.g.event(&c.box, notify, c.db, keyEvent{onNew, "new"}, to)
			}
			c.changedKey(c.db, onGeneric, "rename_from", from)
			c.changedKey(c.db, onGeneric, "rename_to", to)
			if nx {
				w.Int(1)
			} else {
				w.OK()
			}
			return
		case errors.Is(err, client.ErrConflict), errors.Is(err, client.ErrNotFound):
		default:
			w.Error(c.g.storeError(err))
			return
		}
	}
}

// getTyped is api.Get of a value of any type.
func getTyped(ctx context.Context, api client.API, name []byte) (client.Item, error) {
	ops := [1]client.Op{{Kind: client.OpGet, Key: name, Typed: true}}
	api.Do(ctx, ops[:])
	return ops[0].Item, ops[0].Err
}

// cmdCopy reads, and then writes on condition that there is no such key, or in any case with
// REPLACE. The copy is of the value at the time of the read.
func cmdCopy(c *conn, w *resp.Writer, args [][]byte) {
	db, replace := c.db, false
	for i := 3; i < len(args); i++ {
		switch {
		case fold(args[i], "replace"):
			replace = true
		case fold(args[i], "db") && i+1 < len(args):
			var bad string
			if db, bad = c.dbIndex(args[i+1]); bad != "" {
				w.Error(bad)
				return
			}
			i++
		default:
			w.Error(errSyntax)
			return
		}
	}
	for _, k := range args[1:3] {
		if bad := badKey(k); bad != "" {
			w.Error(bad)
			return
		}
	}
	if db == c.db && string(args[1]) == string(args[2]) {
		w.Error("ERR source and destination objects are the same")
		return
	}
	var it client.Item
	give, err := c.do(func(ctx context.Context) (err error) {
		it, err = getTyped(ctx, c.api, args[1])
		return err
	})
	defer func() { give() }()
	if err == nil {
		op := client.Op{Kind: client.OpPut, Key: args[2], Value: it.Value, Expires: it.Expires, Flags: it.Flags, Type: it.Type, Cond: client.IfAbsent}
		if replace {
			op.Cond = client.Always
		}
		var done func()
		done, err = c.do(func(ctx context.Context) error {
			ops := []client.Op{op}
			c.g.o.Databases[db].Client.Do(ctx, ops)
			return ops[0].Err
		})
		done()
	}
	switch {
	case err == nil:
		c.madeKey(db, onGeneric, "copy_to", args[2])
		w.Int(1)
	case errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrExists):
		w.Int(0)
	default:
		w.Error(c.g.storeError(err))
	}
}

// keyCount is how many keys a database has, up to a second old.
// INFO is asked often, by monitors, and a count reads the whole index. Others wait meanwhile and
// get the same number.
func (g *Gateway) keyCount(db int) (uint64, error) {
	n := &g.counts[db]
	n.Lock()
	defer n.Unlock()
	if time.Since(n.at) > time.Second {
		v, err := g.o.Databases[db].Client.Count(g.ctx)
		if err != nil {
			return 0, err
		}
		if set := g.functions.now.Load(); db == 0 && v > 0 && set != nil && set.version != 0 {
			v-- // as far as is known
		}
		n.n, n.at = v, time.Now()
	}
	return n.n, nil
}
