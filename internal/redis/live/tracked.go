package live

import (
	"bytes"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// Tracked knows which clients cache what. Its keys are those that clients without BCAST have read, each with the
// version that they read. Writes through this gateway and its peers take them out. A look at the version now and then
// finds what was written past them, and what has expired. Lock order: Tracked before an output.
//
// A key is entered before the read (Enter), gets its version after it (SetVersion), and is taken out by an
// invalidation. A client that reads it again enters it again, as in Redis.
type Tracked struct {
	clients   atomic.Int32             // that have a Tracking; for a look without a lock
	most      int                      // keys
	databases int                      // that clients can select
	find      func(id int64) *Listener // nil: there is no such client

	mu struct {
		sync.Mutex
		keys     map[exec.KeyName]*trackedKey
		size     int                                     // bytes of the keys
		items    int                                     // clients of all keys
		prefixes map[string]map[*Listener]struct{}       // of BCAST
		clients  map[*Listener]map[exec.KeyName]struct{} // that have a Tracking, and what of keys is theirs
		checking bool                                    // a goroutine looks at versions
	}
}

// trackedKey is a key that clients cache.
type trackedKey struct {
	clients map[*Listener]struct{} // that cache it
	read    bool                   // else it is being read, and nothing is known
	version uint64                 // that was read; 0: there was no such key
}

// Written is a key that was written, or may have been.
type Written struct {
	Name []byte
	DB   int
	// Read: who wrote it has read it in the same step, and may cache it as the write has left it, with that version.
	Read    bool
	Version uint64
}

const (
	// maxTrackedBytes bounds the names of keys that are cached.
	maxTrackedBytes = 64 << 20
	// UnknownVersion is that of a key which could not be read. No record has it.
	UnknownVersion = ^uint64(0)
)

// Init is to be called first. most bounds the keys, of any database. find is called with Tracked's lock held, and must
// not wait.
func (t *Tracked) Init(most, databases int, find func(id int64) *Listener) {
	t.most, t.databases, t.find = most, databases, find
	t.mu.keys = make(map[exec.KeyName]*trackedKey)
	t.mu.prefixes = make(map[string]map[*Listener]struct{})
	t.mu.clients = make(map[*Listener]map[exec.KeyName]struct{})
}

// Clients is how many cache.
func (t *Tracked) Clients() int { return int(t.clients.Load()) }

// Counts are the keys, the clients of all keys, and the prefixes.
func (t *Tracked) Counts() (keys, items, prefixes int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.mu.keys), t.mu.items, len(t.mu.prefixes)
}

// Each calls f for each client that caches. f must not wait, nor call Tracked.
func (t *Tracked) Each(f func(l *Listener)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for l := range t.mu.clients {
		f(l)
	}
}

// Track begins to note what a client caches, or goes on in another way.
// check begins a goroutine that looks at versions until Rests, and reports whether it has. It is called if there is
// none and the client needs one, with the lock held.
func (t *Tracked) Track(l *Listener, how *Tracking, check func() bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l.tracking.Swap(how) == nil {
		t.clients.Add(1)
	}
	if _, ok := t.mu.clients[l]; !ok {
		t.mu.clients[l] = nil
	}
	for _, p := range how.Prefixes {
		if t.mu.prefixes[p] == nil {
			t.mu.prefixes[p] = make(map[*Listener]struct{})
		}
		t.mu.prefixes[p][l] = struct{}{}
	}
	// Clients with BCAST have no keys in the table, so there is nothing to look at for them.
	if !t.mu.checking && !how.BCast {
		t.mu.checking = check()
	}
}

// Leave forgets what a client caches, and reports whether there was anything.
func (t *Tracked) Leave(l *Listener) bool {
	how := l.Tracking()
	if how == nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range t.mu.clients[l] {
		k := t.mu.keys[name]
		delete(k.clients, l)
		if t.mu.items--; len(k.clients) == 0 {
			t.removeLocked(name, k)
		}
	}
	delete(t.mu.clients, l)
	for _, p := range how.Prefixes {
		if delete(t.mu.prefixes[p], l); len(t.mu.prefixes[p]) == 0 {
			delete(t.mu.prefixes, p)
		}
	}
	l.tracking.Store(nil)
	t.clients.Add(-1)
	return true
}

// Enter notes that a client caches a key. A table that is full loses others, whose clients are told.
// Which of the others go is up to the map's order. An invalidation too many costs a client one read.
func (t *Tracked) Enter(box *Outbox, l *Listener, db int, key []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.mu.clients[l]; ok {
		t.enterLocked(box, l, exec.KeyName{DB: db, Name: string(key)})
	}
}

// enterLocked is Enter for a client that caches.
func (t *Tracked) enterLocked(box *Outbox, l *Listener, name exec.KeyName) {
	own := t.mu.clients[l]
	if own == nil {
		own = make(map[exec.KeyName]struct{})
		t.mu.clients[l] = own
	}
	k := t.mu.keys[name]
	if k == nil {
		for other := range t.mu.keys {
			if len(t.mu.keys) < t.most && t.mu.size+len(name.Name) <= maxTrackedBytes {
				break
			}
			t.invalidateLocked(box, nil, other)
		}
		k = &trackedKey{clients: make(map[*Listener]struct{}, 1)}
		t.mu.keys[name] = k
		t.mu.size += len(name.Name)
	}
	if _, ok := k.clients[l]; !ok {
		k.clients[l] = struct{}{}
		own[name] = struct{}{}
		t.mu.items++
	}
}

// SetVersion notes which version of a key was read, 0 for a key that is not there. Those who read another one are told.
// Two clients that read at about the same time may report the older version last. Then the newer one's client is told,
// for nothing, and the next check finds the difference for the other.
func (t *Tracked) SetVersion(box *Outbox, l *Listener, db int, key []byte, version uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	name := exec.KeyName{DB: db, Name: string(key)}
	k := t.mu.keys[name]
	if k == nil {
		return // it was written meanwhile
	}
	if k.read && k.version != version {
		for x := range k.clients {
			if x != l {
				delete(k.clients, x)
				delete(t.mu.clients[x], name)
				t.mu.items--
				t.tellLocked(box, x, key)
			}
		}
	}
	k.read, k.version = true, version
}

// Names are the keys that clients cache.
// A copy, since the lock must not be held while the store is asked.
func (t *Tracked) Names() []exec.KeyName {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.mu.keys))
}

// Rests ends the checking if no client caches, and reports whether it has ended.
// Track holds the same lock when it decides whether to begin another goroutine.
func (t *Tracked) Rests() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.clients) == 0 {
		t.mu.checking = false
	}
	return !t.mu.checking
}

// Checking reports whether a goroutine looks at versions.
func (t *Tracked) Checking() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.checking
}

// Compare tells of a key whose version is another one than the one that was read. A key whose version is unknown is
// left to the next time, unless it was never read.
func (t *Tracked) Compare(box *Outbox, name exec.KeyName, version uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.mu.keys[name]
	if k == nil || !k.read || k.version == version || version == UnknownVersion && k.version != UnknownVersion {
		return
	}
	t.invalidateLocked(box, nil, name)
}

// Invalidate tells those who cache keys, of any database, that they were written; writer is nil if it is not known. A
// writer with NOLOOP is not told of its own writes, and forgets the key all the same. If its own read keeps the key, it
// caches the version that it has left. As in Redis a client with BCAST hears of all the keys with a prefix at once, in
// the order of their names. Others hear of each key by itself.
func (t *Tracked) Invalidate(box *Outbox, writer *Listener, keys []Written) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range keys {
		// Peers tell names without databases, so a key of that name counts as written in each of them.
		for db := range t.databases {
			name := exec.KeyName{DB: db, Name: string(k.Name)}
			if silent := t.invalidateLocked(box, writer, name); silent && k.Read && db == k.DB {
				t.enterLocked(box, writer, name)
				t.mu.keys[name].read, t.mu.keys[name].version = true, k.Version
			}
		}
	}
	var met []string
	for prefix := range t.mu.prefixes {
		if slices.ContainsFunc(keys, func(k Written) bool { return bytes.HasPrefix(k.Name, []byte(prefix)) }) {
			met = append(met, prefix)
		}
	}
	slices.Sort(met)
	for _, prefix := range met {
		var names [][]byte
		for _, k := range keys {
			if bytes.HasPrefix(k.Name, []byte(prefix)) {
				names = append(names, k.Name)
			}
		}
		slices.SortFunc(names, bytes.Compare)
		names = slices.CompactFunc(names, bytes.Equal)
		for x := range t.mu.prefixes[prefix] {
			if x != writer || !x.Tracking().NoLoop {
				t.tellLocked(box, x, names...)
			}
		}
	}
}

// invalidateLocked takes a key out and tells its clients, and reports whether the writer was one and is not told.
// Messages are pushed with the table's lock held, which keeps them in the order of the writes; a push never waits.
func (t *Tracked) invalidateLocked(box *Outbox, writer *Listener, name exec.KeyName) (silent bool) {
	k := t.mu.keys[name]
	if k == nil {
		return false
	}
	t.removeLocked(name, k)
	for x := range k.clients {
		delete(t.mu.clients[x], name)
		if x == writer && x.Tracking().NoLoop {
			silent = true
			continue
		}
		t.tellLocked(box, x, []byte(name.Name))
	}
	return silent
}

func (t *Tracked) removeLocked(name exec.KeyName, k *trackedKey) {
	delete(t.mu.keys, name)
	t.mu.size -= len(name.Name)
	t.mu.items -= len(k.clients)
}

// InvalidateAll tells everybody that any key may have been written.
func (t *Tracked) InvalidateAll(box *Outbox) {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.mu.keys)
	t.mu.size, t.mu.items = 0, 0
	for x, own := range t.mu.clients {
		clear(own)
		t.tellLocked(box, x)
	}
}

// tellLocked pushes an invalidation to a client, or to the one that hears in its place; no keys: of all. A client of
// RESP2 can only hear it as a message.
// The client of Redirect may end at any time: then l itself hears of that, once, if it can.
func (t *Tracked) tellLocked(box *Outbox, l *Listener, keys ...[]byte) {
	how, to := l.Tracking(), l
	if how.Redirect != 0 {
		if to = t.find(how.Redirect); to == nil {
			// A client of RESP2 cannot be told; it sees the flag in CLIENT TRACKINGINFO.
			if how.broken.Swap(true) || !l.SpeaksRESP3() {
				return
			}
			w := resp.Writer{Proto: 3}
			w.Push(2)
			w.BulkString("tracking-redir-broken")
			w.Int(how.Redirect)
			l.Output().Push(box, w.Bytes())
			return
		}
	}
	box.Begin()
	resp3 := to.SpeaksRESP3()
	w := box.Form(resp3)
	switch {
	case resp3:
		w.Push(2)
		w.BulkString("invalidate")
	// As in Redis any subscription of that client will do: in RESP2 only one that listens can be told.
	case how.Redirect != 0 && to.Listens():
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
	to.Output().Push(box, w.Bytes())
}
