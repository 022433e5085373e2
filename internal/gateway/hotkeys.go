package gateway

import (
	"cmp"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/ordered"
)

const (
	// hotEvery is of how many commands of a connection one is looked at, on average. Which one is chance: clients repeat
	// themselves.
	hotEvery = 256
	// maxHot bounds the keys that are counted, and maxHotKey the bytes by which a key is known; maxHotArgs bounds the keys of a
	// command.
	maxHot, maxHotKey, maxHotArgs = 128, 128, 16
	// hotHalf is how long ago a use counts half.
	hotHalf = 30 * time.Second
	// hotLeast is the least share of all uses that is told: below it the estimate is noise.
	hotLeast = 0.002
)

// hotKeys estimates which keys are used most, from a sample of the commands, in constant memory: Metwally and others, Efficient
// computation of frequent and top-k elements in data streams, 2005 (Space-Saving). A key that is not counted takes the place of the
// least one, and its count, as an error that it may have. Its methods may be called concurrently; a nil one counts nothing.
type hotKeys struct {
	mu struct {
		sync.Mutex
		total  float64        // uses, as far as they still count
		counts map[string]int // where a key is counted
		uses   []float64      // dense, since the least one is looked for often
		keys   []hotKey       // of uses
		at     time.Time      // when all of it was made less last
		text   []byte         // of a key, while it is looked up
	}
}

// hotKey is a key that is counted. It was used at least as often as is counted, less error.
type hotKey struct {
	db    int     // as SELECT counts
	name  string  // in counts
	error float64 // uses that may have been another key's
}

// key is the key's own bytes, without its database.
// The first two bytes of name are the database's number, so that keys of several databases are different ones.
func (k *hotKey) key() string { return k.name[2:] }

// newHotKeys makes an estimate that takes some 30 KiB, and no more however long it runs.
func newHotKeys() *hotKeys {
	h := &hotKeys{}
	h.mu.counts = make(map[string]int, maxHot)
	h.mu.at = time.Now()
	return h
}

// see counts the keys of a connection's command, if it is one that is looked at.
// It is called for commands that are about to be performed, whether they then fail or not. The lock is taken for a sample of them only.
func (h *hotKeys) see(c *conn, cmd *command, args [][]byte) {
	if h == nil || !c.sampled() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fadeLocked(time.Now())
	n := 0
	for _, s := range both(cmd.keySpans(args)) {
		for i := s.First; s.First > 0 && i <= s.Last && i < len(args) && n < maxHotArgs; i += s.Step {
			h.addLocked(c.db, args[i])
			n++
		}
	}
}

// sampled reports whether the command at hand is one that is looked at.
// The distance to the next one is uniform between 1 and 2*hotEvery-1, with hotEvery as its mean.
func (c *conn) sampled() bool {
	if c.untilSample == 0 {
		c.untilSample = 1 + rand.IntN(2*hotEvery-1)
	}
	c.untilSample--
	return c.untilSample == 0
}

// addLocked counts one use. Long keys that begin alike are counted as one.
func (h *hotKeys) addLocked(db int, key []byte) {
	key = key[:min(len(key), maxHotKey)]
	h.mu.text = append(append(h.mu.text[:0], byte(db), byte(db>>8)), key...)
	h.mu.total++
	at, ok := h.mu.counts[string(h.mu.text)]
	if !ok {
		at = h.placeLocked(hotKey{db: db, name: string(h.mu.text)})
	}
	h.mu.uses[at]++
}

// placeLocked gives a key a place, that of the least one if there is no other.
// The new key takes over the count of the one that goes, which it may have had: Space-Saving never counts too few.
func (h *hotKeys) placeLocked(k hotKey) (at int) {
	if len(h.mu.uses) < maxHot {
		at = len(h.mu.uses)
		h.mu.uses, h.mu.keys = append(h.mu.uses, 0), append(h.mu.keys, k)
	} else {
		for i, n := range h.mu.uses {
			if n < h.mu.uses[at] {
				at = i
			}
		}
		delete(h.mu.counts, h.mu.keys[at].name)
		k.error = h.mu.uses[at]
		h.mu.keys[at] = k
	}
	h.mu.counts[k.name] = at
	return at
}

// fadeLocked halves what is old.
// It is called before anything is counted or told, so nothing need run while nobody asks.
func (h *hotKeys) fadeLocked(now time.Time) {
	for ; now.Sub(h.mu.at) >= hotHalf; h.mu.at = h.mu.at.Add(hotHalf) {
		if h.mu.total < 1e-3 { // nothing since long ago
			clear(h.mu.counts)
			h.mu.uses, h.mu.keys, h.mu.at = h.mu.uses[:0], h.mu.keys[:0], now
			return
		}
		h.mu.total /= 2
		for i := range h.mu.uses {
			h.mu.uses[i] /= 2
			h.mu.keys[i].error /= 2
		}
	}
}

// HotKey is a key that is used much. Share is its part of the uses of all keys lately, and at least Least, as far as a sample tells.
// Key has no more than its first bytes.
type HotKey struct {
	Database, Key string  // as operators call it; bytes of its name
	Share, Least  float64 // 0 to 1
}

// HotKeys are those that are used most, the most used one first; none unless [Options].HotKeys says so.
func (g *Gateway) HotKeys() []HotKey {
	h := g.hot
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fadeLocked(time.Now())
	var all []HotKey
	for i, uses := range h.mu.uses {
		k := &h.mu.keys[i]
		if sure := uses - k.error; sure >= 2 && sure/h.mu.total >= hotLeast {
			all = append(all, HotKey{g.label(k.db), k.key(), uses / h.mu.total, sure / h.mu.total})
		}
	}
	ordered.Sort(all, func(a, b HotKey) int {
		return cmp.Or(cmp.Compare(b.Share, a.Share), cmp.Compare(a.Database, b.Database), cmp.Compare(a.Key, b.Key))
	})
	return all
}

// CommandCost is what a command has taken since the Gateway began.
type CommandCost struct {
	Name          string        // lower case, "config|get"
	Calls, Failed uint64        // failed ones are calls, too
	Took          time.Duration // all of them together
}

// Costs are the commands that have been called, the one that took most time in all first.
// Costs may be called at any time. Its numbers are read one after the other, while commands go on.
func (g *Gateway) Costs() []CommandCost {
	var all []CommandCost
	for _, cmd := range commandsByID {
		s := &g.m.commands[cmd.id]
		failed := s.failed.Load()
		if n := s.ok.Load() + failed; n > 0 {
			all = append(all, CommandCost{cmd.name, n, failed, time.Duration(s.nanos.Load())})
		}
	}
	ordered.Sort(all, func(a, b CommandCost) int {
		return cmp.Or(cmp.Compare(b.Took, a.Took), cmp.Compare(a.Name, b.Name))
	})
	return all
}
