package gateway

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// tracker is how a connection's client caches (CLIENT TRACKING). It does not change, but for broken.
// The connection's goroutine makes it, and makes another one for each change; others read it.
type tracker struct {
	// The client hears of what it reads, only when it says so before each command (OPTIN), or unless it says so
	// (OPTOUT), or of all keys with its prefixes (BCAST).
	redirect             int64 // the connection that hears of it, 0: this one
	bcast, optIn, optOut bool
	noLoop               bool        // it does not hear of its own writes
	prefixes             []string    // of BCAST
	broken               atomic.Bool // the connection of redirect is gone
}

// letters are those in the flags of CLIENT LIST.
func (t *tracker) letters() string {
	s := "t"
	if t.broken.Load() {
		s += "R"
	}
	if t.bcast {
		s += "B"
	}
	return s
}

// caching is what CLIENT CACHING has said of the next command.
type caching uint8

const (
	cachingAsUsual caching = iota
	cachingYes
	cachingNo
)

// trackTable knows which clients cache what. Its keys are those that clients without BCAST have read, each with the
// version that they read: writes through this gateway and its peers take them out, and a look at the version now and
// then finds what was written past them, and what has expired. Lock order: the table before an output. A key's life in
// it: enterKey before the read, setVersion after it, and invalidation, which takes it out; a client that reads it again
// enters it again, as in Redis.
type trackTable struct {
	clients atomic.Int32   // that have a tracker; for a look without a lock
	checks  sync.WaitGroup // the goroutine that looks at versions

	sync.Mutex
	most     int // keys: Options.TrackingKeys
	keys     map[trackedName]*trackedKey
	size     int                                // bytes of the keys
	items    int                                // connections of all keys
	prefixes map[string]map[*conn]struct{}      // of BCAST
	conns    map[*conn]map[trackedName]struct{} // that have a tracker, and what of keys is theirs
	checking bool                               // a goroutine looks at versions
}

// trackedName is a key's name as clients of its database have it, without a prefix.
type trackedName struct {
	db  int
	key string
}

// trackedKey is a key that clients cache.
type trackedKey struct {
	conns   map[*conn]struct{} // whose clients cache it
	read    bool               // else it is being read, and nothing is known
	version uint64             // that was read; 0: there was no such key
}

const (
	// maxTrackedBytes bounds the names of keys that are cached.
	maxTrackedBytes = 64 << 20
	// unknownVersion is that of a key which could not be read. No record has it.
	unknownVersion = ^uint64(0)
	// checkBatch is how many versions are read at a time.
	checkBatch = 64
)

func (t *trackTable) init(most int) {
	t.most = most
	t.keys = make(map[trackedName]*trackedKey)
	t.prefixes = make(map[string]map[*conn]struct{})
	t.conns = make(map[*conn]map[trackedName]struct{})
}

func (t *trackTable) counts() (keys, items, prefixes int) {
	t.Lock()
	defer t.Unlock()
	return len(t.keys), t.items, len(t.prefixes)
}

// tracks reports whether anybody, here or at another gateway, wants to hear of keys that are written.
func (g *Gateway) tracks() bool { return g.tracked.clients.Load() > 0 || g.o.Peers.WantsKeys() }

// hearsOfWrites reports whether wrote has anybody to tell.
func (g *Gateway) hearsOfWrites() bool { return g.tracks() || g.watchers.any() }

// wrote says that c's client has written keys, or may have.
// It is called when the store has answered, and before the client's reply is sent: a client that hears of a write and
// reads again finds it. The peers are told the names without their databases, so that their clients of any database
// drop them.
func (g *Gateway) wrote(c *conn, keys []written) {
	if len(keys) == 0 { // to peers that would be all keys
		return
	}
	g.watchers.touch(keys)
	if g.o.Peers.WantsKeys() {
		names := make([][]byte, len(keys))
		for i, k := range keys {
			names[i] = k.name
		}
		g.o.Peers.Changed(names...)
	}
	if g.tracked.clients.Load() > 0 {
		g.tracked.invalidate(g, &c.box, c, keys)
	}
}

// written is a key that was written, or may have been.
type written struct {
	name []byte
	db   int
	// read: who wrote it has read it in the same step, and may cache it as the write has left it, with that version.
	read    bool
	version uint64
}

// wroteAll says that it may have written any.
func (g *Gateway) wroteAll(c *conn) {
	g.o.Peers.Changed()
	if g.tracked.clients.Load() > 0 {
		g.tracked.invalidateAll(g, &c.box)
	}
}

// tracksReads reports whether the client caches what the command at hand reads.
// With BCAST nothing is noted at reads: such clients hear of every key with their prefixes.
func (c *conn) tracksReads() bool {
	t := c.tracker.Load()
	return t != nil && !t.bcast && !c.tracksLate && (!t.optIn || c.caching == cachingYes) &&
		(!t.optOut || c.caching != cachingNo)
}

// beginTracking enters the keys that the client is about to cache, before they are read, so that no write in between is
// missed. Messages that are pushed meanwhile wait for the reply.
func (b *batch) beginTracking() {
	if b.c.tracker.Load() == nil {
		return
	}
	b.c.out.cork()
	for _, u := range b.units {
		if u.track {
			b.c.g.tracked.enterKey(b.c, b.c.db, u.name)
		}
	}
}

// endTracking remembers the versions that were read.
// Long values are read when their replies are due, and noted then (readLarge).
func (b *batch) endTracking() {
	if b.c.tracker.Load() == nil {
		return
	}
	for _, u := range b.units {
		if u.track && u.large == 0 {
			b.endTrackingOf(u)
		}
	}
}

// endTrackingOf notes what was read of one key; a unit that wrote it, or failed, has no version to go by, and the next
// look decides.
func (b *batch) endTrackingOf(u *unit) {
	version := u.got
	if u.err != nil || u.kind > spec.Read {
		version = unknownVersion
	}
	b.c.g.tracked.setVersion(b.c.g, b.c, b.c.db, u.name, version)
}

// enterKey notes that a connection's client caches a key. A table that is full loses others, whose clients are told.
// Which of the others go is up to the map's order, which is as good as chance. An invalidation too many costs a client
// one read.
func (t *trackTable) enterKey(c *conn, db int, key []byte) {
	t.Lock()
	defer t.Unlock()
	if _, ok := t.conns[c]; ok {
		t.enterLocked(c, trackedName{db, string(key)})
	}
}

// enterLocked is enterKey for a client that caches.
func (t *trackTable) enterLocked(c *conn, name trackedName) {
	own := t.conns[c]
	if own == nil {
		own = make(map[trackedName]struct{})
		t.conns[c] = own
	}
	k := t.keys[name]
	if k == nil {
		for other := range t.keys {
			if len(t.keys) < t.most && t.size+len(name.key) <= maxTrackedBytes {
				break
			}
			t.invalidateLocked(c.g, &c.box, nil, other)
		}
		k = &trackedKey{conns: make(map[*conn]struct{}, 1)}
		t.keys[name] = k
		t.size += len(name.key)
	}
	if _, ok := k.conns[c]; !ok {
		k.conns[c] = struct{}{}
		own[name] = struct{}{}
		t.items++
	}
}

// setVersion notes which version of a key was read. Those who read another one before are told.
// Two clients that read at about the same time may report the older version last; then it is the newer one's client
// that is told, for nothing, and the next check finds the difference for the other.
func (t *trackTable) setVersion(g *Gateway, c *conn, db int, key []byte, version uint64) {
	t.Lock()
	defer t.Unlock()
	name := trackedName{db, string(key)}
	k := t.keys[name]
	if k == nil {
		return // it was written meanwhile
	}
	if k.read && k.version != version {
		for x := range k.conns {
			if x != c {
				delete(k.conns, x)
				delete(t.conns[x], name)
				t.items--
				t.tell(g, &c.box, x, key)
			}
		}
	}
	k.read, k.version = true, version
}

// checkTracked looks at the versions of all keys that are cached, in as many steps as they take, once in each
// Options.TrackingCheck. It ends when no client caches any more.
// The goroutine belongs to the trackTable; Close waits for it. The steps are spread over the time between two checks,
// so that the store meets a trickle of lookups and no burst.
func (g *Gateway) checkTracked() {
	for {
		began := time.Now()
		names := g.tracked.names()
		// All steps together take Options.TrackingCheck, if the store is fast enough, and no step is nearer to the one
		// before than that makes it.
		for i, steps := 0, (len(names)+checkBatch-1)/checkBatch; i < steps; i++ {
			g.checkVersions(names[i*checkBatch : min((i+1)*checkBatch, len(names))])
			if !g.pause(time.Until(began.Add(g.o.TrackingCheck * time.Duration(i+1) / time.Duration(steps)))) {
				return
			}
		}
		if len(names) == 0 && !g.pause(g.o.TrackingCheck) || g.tracked.rests() {
			return
		}
	}
}

// pause waits, and reports whether the Gateway goes on.
// A time that is not positive still gives way to Close.
func (g *Gateway) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-g.ctx.Done():
		return false
	}
}

// names are the keys that have been read.
// A copy, since the lock must not be held while the store is asked.
func (t *trackTable) names() []trackedName {
	t.Lock()
	defer t.Unlock()
	return slices.Collect(maps.Keys(t.keys))
}

// rests ends the checking if no client caches any more.
// checking is changed with the lock that track holds when it decides whether to begin another goroutine.
func (t *trackTable) rests() bool {
	t.Lock()
	defer t.Unlock()
	if len(t.conns) == 0 {
		t.checking = false
	}
	return !t.checking
}

// checkVersions looks at some keys, and tells of those whose version is another one than the one that was read. A key
// that cannot be looked at now is left to the next time, unless it was never read. Typed, since collections are cached
// like other values, and have versions only for those who take them.
func (g *Gateway) checkVersions(names []trackedName) {
	var box live.Outbox
	defer box.Flush()
	ctx := inside.LimitMemory(g.ctx, eachLimit)
	for db := range g.dbs {
		d := &g.dbs[db]
		var ops []client.Op
		var asked []trackedName
		for _, n := range names {
			if n.db == db {
				ops = append(ops, client.Op{Kind: client.OpGet, Key: d.stored([]byte(n.key)), Typed: true})
				asked = append(asked, n)
			}
		}
		if len(ops) == 0 {
			continue
		}
		d.api.Do(ctx, ops)
		for i := range ops {
			version, err := ops[i].Item.Version, ops[i].Err
			if large := (*inside.TooLargeError)(nil); errors.As(err, &large) {
				version, err = g.versionOfLarge(d.api, ops[i].Key, large.Want)
			}
			switch {
			case errors.Is(err, client.ErrNotFound):
				version = 0
			case err != nil:
				version = unknownVersion
			}
			g.tracked.compare(g, &box, asked[i], version)
		}
	}
}

// versionOfLarge reads a value that takes memory of the budget.
// want is in bytes. The share is its own, so that no connection is held to account for it.
func (g *Gateway) versionOfLarge(api client.API, key []byte, want int) (version uint64, err error) {
	share := g.o.Budget.Share(func(int64) {})
	defer share.Close()
	n := readCost * int64(want)
	if err := share.Take(g.ctx, n, time.Second); err != nil {
		return 0, err
	}
	defer share.Drop(n)
	ctx, cancel := context.WithTimeout(inside.LimitMemory(g.ctx, want), 10*time.Second)
	defer cancel()
	op := [1]client.Op{{Kind: client.OpGet, Key: key, Typed: true}}
	api.Do(ctx, op[:])
	return op[0].Item.Version, op[0].Err
}

// compare tells of a key whose version is another one than the one that was read.
func (t *trackTable) compare(g *Gateway, box *live.Outbox, name trackedName, version uint64) {
	t.Lock()
	defer t.Unlock()
	k := t.keys[name]
	if k == nil || !k.read || k.version == version || version == unknownVersion && k.version != unknownVersion {
		return
	}
	t.invalidateLocked(g, box, nil, name)
}
