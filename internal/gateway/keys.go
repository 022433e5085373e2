package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/units"
)

// SCAN's cursor is a client.Cursor between two segments, so that any gateway can go
// on with it: the shard's prefix (at most 20 bits) above the segment (32 bits). No
// such cursor but the first is 0.
const (
	cursorPrefixShift  = 44 // of a left-aligned prefix, to make it 20 bits
	cursorSegmentShift = 32
)

// decodeCursor is what a client sent as a cursor. Any number is a place in the index: one that
// no SCAN returned begins at that place, and can do no harm.
// It is the inverse of encodeCursor.
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

// pages calls f with pages of a database's keys from cur on, until it says stop. The
// keys are f's; all others of the namespace are left out. Corrupt records are left out; an error at the end, which is
// ErrCorrupt, says so. f is called once for each page, which may be empty. Its error ends the scan and is returned;
// keys that are written meanwhile may come or not, and a key may come twice.
func (c *conn) pages(d *database, cur client.Cursor, o client.ScanOptions, f func(kvs []client.KV, next client.Cursor) (
	more bool, err error)) error {
	return c.storedPages(d.shared, cur, o, func(kvs []client.KV, next client.Cursor) (bool, error) {
		own := kvs[:0]
		for _, kv := range kvs {
			var i int
			if i, kv.Key = d.shared.find(kv.Key); i == d.number {
				own = append(own, kv)
			}
		}
		return f(own, next)
	})
}

// storedPages is pages for all keys of a namespace, by their names in the store.
// A page is read as a whole before f has it, so its memory is bounded by o.Count and what a segment has beyond that.
func (c *conn) storedPages(n *namespace, cur client.Cursor, o client.ScanOptions,
	f func(kvs []client.KV, next client.Cursor) (more bool, err error)) error {
	var damaged error // of the first such page
	for !cur.Done {
		var kvs []client.KV
		from := cur
		o.Cursor = &cur
		for kv, err := range n.api.Scan(c.ctx, o) {
			switch {
			case errors.Is(err, client.ErrCorrupt) && cur != from:
				damaged = cmp.Or(damaged, err)
			case err != nil:
				return err
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
// Any other error is returned as it is, for storeError.
func (g *Gateway) rest(err error) error {
	if errors.Is(err, client.ErrCorrupt) {
		g.o.Logger.Error("keys left out of a scan", "err", err)
		return nil
	}
	return err
}

// maxScanCount bounds the keys of one reply of SCAN: COUNT is the client's, and the keys are
// collected before the first is sent, since their number comes first.
const maxScanCount = 10_000

// cmdScan keeps the promise of Redis's SCAN: what is there from its begin to its end is returned
// at least once. The pattern is applied behind the store, so a call can return no keys and still
// a cursor to go on with.
// TYPE needs no value to be read. A database that shares its namespace gets fewer keys for the same work.
func cmdScan(c *conn, w *resp.Writer, args [][]byte) error {
	n, ok := values.ParseCursor(args[1])
	if !ok {
		return refusal("ERR invalid cursor")
	}
	count, pattern, ofType := int64(10), []byte(nil), []byte(nil)
	p := values.OptionsOf(args[2:])
	for p.More() {
		switch {
		case p.Option("count", 1):
			if count = p.Int(); count < 1 {
				p.Wrong()
			}
		case p.Option("match", 1):
			pattern = p.Str()
		case p.Option("type", 1):
			ofType = p.Str()
		default:
			p.Wrong()
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	var found [][]byte
	var next uint64
	// Redis takes any number as a cursor, and so does this.
	if n>>(cursorSegmentShift+20) != 0 { // none of ours: there is nothing behind it
		w.Array(2)
		w.BulkString("0")
		w.Array(0)
		return nil
	}
	err := c.pages(c.in, decodeCursor(n), client.ScanOptions{Count: int(min(count, maxScanCount)), KeysOnly: true},
		func(kvs []client.KV, cur client.Cursor) (bool, error) {
			for _, kv := range kvs {
				if (ofType == nil || values.Fold(ofType, kv.Type.String())) &&
					(pattern == nil || glob.Match(pattern, kv.Key)) {
					found = append(found, kv.Key)
				}
			}
			var ok bool
			next, ok = encodeCursor(cur)
			return !ok, nil // within a segment: it has some more
		})
	if err := c.g.rest(err); err != nil {
		return refusal(c.g.storeError(err))
	}
	w.Array(2)
	w.BulkString(strconv.FormatUint(next, 10))
	w.Array(len(found))
	for _, k := range found {
		w.Bulk(k)
	}
	return nil
}

// scanPage is how many keys a command reads at a time that goes through all of them.
const scanPage = 1000

// cmdKeys returns a whole database, or an error: half of the keys would look like all of them.
// The memory that the keys may take is taken before the first is read, so that a few KEYS at a
// time cannot exhaust the gateway.
// Beyond Options.OutputBytes it refuses, where Redis would answer with any number of bytes.
func cmdKeys(c *conn, w *resp.Writer, args [][]byte) error {
	var found [][]byte
	seen := make(map[string]struct{}) // Scan may return a key twice
	size := 0
	most := 3 * int64(c.g.o.OutputBytes) // the keys, twice, and the reply
	if err := c.take(most); err != nil {
		return refusal(c.g.storeError(err))
	}
	defer c.share.Drop(most)
	var errTooMany = fmt.Errorf("%w: KEYS: more than %s of keys; use SCAN", client.ErrInvalid,
		units.Bytes(c.g.o.OutputBytes))
	err := c.pages(c.in, client.Cursor{}, client.ScanOptions{Count: scanPage, KeysOnly: true},
		func(kvs []client.KV, _ client.Cursor) (bool, error) {
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
	if err := c.g.rest(err); err != nil {
		return refusal(c.g.storeError(err))
	}
	w.Array(len(found))
	for _, k := range found {
		w.Bulk(k)
	}
	return nil
}

// cmdRandomKey looks at the keys behind a random place, and before it if there are
// none: not every key is equally likely.
func cmdRandomKey(c *conn, w *resp.Writer, _ [][]byte) error {
	// A place is one of the 2^20 prefixes that a cursor may have, and of the segments of a shard that is not too large.
	from := client.Cursor{Prefix: uint64(rand.Uint32N(1<<20)) << cursorPrefixShift, Segment: rand.Uint32N(4096)}
	var found []byte
	for _, cur := range []client.Cursor{from, {Prefix: from.Prefix}, {}} {
		err := c.pages(c.in, cur, client.ScanOptions{Count: 64, KeysOnly: true},
			func(kvs []client.KV, _ client.Cursor) (bool, error) {
				if len(kvs) > 0 {
					found = kvs[rand.IntN(len(kvs))].Key
				}
				return found == nil, nil
			})
		if err := c.g.rest(err); err != nil {
			return refusal(c.g.storeError(err))
		}
		if found != nil {
			w.Bulk(found)
			return nil
		}
	}
	w.Null()
	return nil
}

// cmdDBSize counts by reading the index, or all of the namespace if others share it; unlike INFO it never answers with
// an older number.
func cmdDBSize(c *conn, w *resp.Writer, _ [][]byte) error {
	keys, err := c.g.countKeys(c.ctx, c.in.shared)
	if err != nil {
		return refusal(c.g.storeError(err))
	}
	n := keys[c.in.number]
	if c.db == 0 && n > 0 && len(keys) == 1 {
		if set, err := c.libraries(false); err != nil || set.version != 0 {
			n-- // the key of libraries, if only one that cannot be read
		}
	}
	w.Int(int64(n))
	return nil
}

func cmdFlushDB(c *conn, w *resp.Writer, args [][]byte) error {
	return c.flushDatabases(w, args, c.db, c.db)
}
func cmdFlushAll(c *conn, w *resp.Writer, args [][]byte) error {
	return c.flushDatabases(w, args, 0, len(c.g.o.Databases)-1)
}

// cmdSwapDB does nothing if both databases are one, and else is refused. Databases are a list that each gateway was
// given at its start: one that has stopped for a moment, with writes under way, would go on in the old order after all
// others had changed, and nobody could hinder it, since the memory nodes do not know of databases.
func cmdSwapDB(c *conn, w *resp.Writer, args [][]byte) error {
	var dbs [2]int64
	for i, which := range []string{"first", "second"} {
		n, ok := resp.ParseInt(args[1+i])
		if !ok || n != int64(int32(n)) {
			return refusal("ERR invalid " + which + " DB index")
		}
		dbs[i] = n
	}
	for i := range dbs {
		if _, err := c.dbIndex(args[1+i]); err != nil {
			return err
		}
	}
	if dbs[0] != dbs[1] {
		return refusal("ERR kvd: SWAPDB is not supported: gateways cannot change the order of their databases at one " +
			"moment; nothing was done")
	}
	w.OK()
	return nil
}

// flushDatabases deletes every key that is there when it starts, a page at a time.
// It is no step in time: keys that are written meanwhile may stay or go. Those whose record is
// longer than a batch may read are deleted one by one. An error in the middle leaves the rest of
// the keys in place.
// from and to are databases, both of them flushed. ASYNC is no different from SYNC: the reply comes when the keys are
// gone.
func (c *conn) flushDatabases(w *resp.Writer, args [][]byte, from, to int) error {
	if p := values.OptionsOf(args[1:]); p.Left() > 1 || p.More() && !p.Flag("async") && !p.Flag("sync") {
		return values.ErrSyntax
	}
	defer c.g.wroteAll(c) // whatever came of it
	for _, n := range c.g.namespaces() {
		if err := c.flushNamespace(n, from, to); err != nil {
			return refusal(c.g.storeError(err))
		}
	}
	w.OK()
	return nil
}

// flushNamespace is flushDatabases for those of the databases that are in a namespace, all of them in one scan.
// The libraries of functions stay, as in Redis.
func (c *conn) flushNamespace(n *namespace, from, to int) error {
	in := func(db int) bool { return from <= db && db <= to }
	if !slices.ContainsFunc(n.dbs, in) {
		return nil
	}
	// Expired keys count until they are gone.
	return c.storedPages(n, client.Cursor{}, client.ScanOptions{Count: scanPage, KeysOnly: true, Expired: true},
		func(kvs []client.KV, _ client.Cursor) (bool, error) {
			var names [][]byte
			for _, kv := range kvs {
				if i, _ := n.find(kv.Key); i >= 0 && in(n.dbs[i]) {
					names = append(names, kv.Key)
				}
			}
			for i, r := range n.api.MultiDelete(c.smallCtx, names) {
				err := r.Err
				if errors.As(err, new(*inside.TooLargeError)) {
					var give func()
					give, err = c.do(func(ctx context.Context) error { return n.api.Delete(ctx, names[i]) })
					give()
				}
				if err != nil && !errors.Is(err, client.ErrNotFound) {
					return false, err
				}
			}
			return true, nil
		})
}
