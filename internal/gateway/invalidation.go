package gateway

import (
	"bytes"
	"slices"

	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// invalidate tells those who cache keys, of any database, that they were written; c, whose client wrote them, is nil if
// that is not known. A writer with NOLOOP is not told of its own writes, and forgets the key all the same, unless its
// own read keeps it: then it caches the version that it has left. As in Redis a client with BCAST hears of all the keys
// with a prefix at once, in the order of their names, and others of each by itself.
func (t *trackTable) invalidate(g *Gateway, box *live.Outbox, c *conn, keys []written) {
	t.Lock()
	defer t.Unlock()
	for _, k := range keys {
		// Peers tell names without databases, so a key of that name counts as written in each of them.
		for db := range g.o.Databases {
			name := trackedName{db, string(k.name)}
			if silent := t.invalidateLocked(g, box, c, name); silent && k.read && db == k.db {
				t.enterLocked(c, name)
				t.keys[name].read, t.keys[name].version = true, k.version
			}
		}
	}
	var met []string
	for prefix := range t.prefixes {
		if slices.ContainsFunc(keys, func(k written) bool { return bytes.HasPrefix(k.name, []byte(prefix)) }) {
			met = append(met, prefix)
		}
	}
	slices.Sort(met)
	for _, prefix := range met {
		var names [][]byte
		for _, k := range keys {
			if bytes.HasPrefix(k.name, []byte(prefix)) {
				names = append(names, k.name)
			}
		}
		slices.SortFunc(names, bytes.Compare)
		names = slices.CompactFunc(names, bytes.Equal)
		for x := range t.prefixes[prefix] {
			if x != c || !x.tracker.Load().noLoop {
				t.tell(g, box, x, names...)
			}
		}
	}
}

// invalidateLocked takes a key out and tells its clients, and reports whether c was one of them and is not told.
// Messages are pushed with the table's lock held, which keeps them in the order of the writes; a push never waits.
func (t *trackTable) invalidateLocked(g *Gateway, box *live.Outbox, c *conn, name trackedName) (silent bool) {
	k := t.keys[name]
	if k == nil {
		return false
	}
	t.removeLocked(name, k)
	for x := range k.conns {
		delete(t.conns[x], name)
		if x == c && x.tracker.Load().noLoop {
			silent = true
			continue
		}
		t.tell(g, box, x, []byte(name.key))
	}
	return silent
}

func (t *trackTable) removeLocked(name trackedName, k *trackedKey) {
	delete(t.keys, name)
	t.size -= len(name.key)
	t.items -= len(k.conns)
}

// invalidateAll tells everybody that any key may have been written.
func (t *trackTable) invalidateAll(g *Gateway, box *live.Outbox) {
	t.Lock()
	defer t.Unlock()
	clear(t.keys)
	t.size, t.items = 0, 0
	for x, own := range t.conns {
		clear(own)
		t.tell(g, box, x)
	}
}

// tell pushes an invalidation to a connection, or to the one that hears in its place; no keys: of all. A
// connection of RESP2 can only hear it as a message.
// The caller holds the table's lock. The connection of redirect may end at any time: then c itself hears of that, once,
// if it can.
func (t *trackTable) tell(g *Gateway, box *live.Outbox, c *conn, keys ...[]byte) {
	tr, to := c.tracker.Load(), c
	if tr.redirect != 0 {
		g.mu.Lock()
		to = g.mu.conns[tr.redirect]
		g.mu.Unlock()
		if to == nil {
			// A client of RESP2 cannot be told; it sees the flag in CLIENT TRACKINGINFO.
			if tr.broken.Swap(true) || !c.seenP3.Load() {
				return
			}
			w := resp.Writer{Proto: 3}
			w.Push(2)
			w.BulkString("tracking-redir-broken")
			w.Int(tr.redirect)
			c.out.Push(box, w.Bytes())
			return
		}
	}
	box.Begin()
	w := box.Form(to.seenP3.Load())
	switch {
	case to.seenP3.Load():
		w.Push(2)
		w.BulkString("invalidate")
	// As in Redis any subscription of that connection will do: in RESP2 only one that listens can be told.
	case tr.redirect != 0 && to.listener.Listens():
		w.Push(3)
		w.BulkString("message")
		w.BulkString("__redis__:invalidate")
	default:
		return
	}
	if len(keys) == 0 {
		w.Null()
	} else {
		w.Array(len(keys))
		for _, k := range keys {
			w.Bulk(k)
		}
	}
	to.out.Push(box, w.Bytes())
}
