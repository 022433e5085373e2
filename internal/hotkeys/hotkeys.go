// Package hotkeys estimates which keys are used most, from a sample of their uses, in constant memory.
//
// It leaves to its callers which uses are in the sample, and what a key belongs to. Start with [Keys]. Its methods may
// be called concurrently; a nil one counts nothing. It keeps copies of keys and no buffer of its callers.
//
// The idea is Metwally and others, Efficient computation of frequent and top-k elements in data streams, 2005
// (Space-Saving). A key that is not counted takes the place of the least one, and its count, as an error that it may
// have.
package hotkeys

import (
	"cmp"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/ordered"
)

const (
	// Every is of how many uses one should be in the sample, on average. Chance says which, since programs repeat
	// themselves.
	Every = 256
	// Most bounds the keys that are counted, and MaxKey the bytes by which a key is known.
	Most, MaxKey = 128, 128
	// half is how long ago a use counts half.
	half = 30 * time.Second
	// least is the least share of all uses that is told: below it the estimate is noise.
	least = 0.002
)

// Keys is an estimate. It takes some 30 KiB, and no more however long it runs. Create it with New.
type Keys struct {
	mu struct {
		sync.Mutex
		total  float64        // uses, as far as they still count
		counts map[string]int // where a key is counted
		uses   []float64      // dense, since the least one is looked for often
		keys   []counted      // of uses
		at     time.Time      // when all of it was made less last
		text   []byte         // of a key, while it is looked up
	}
}

// counted is a key that was used at least as often as is counted, less error.
type counted struct {
	name  string  // in counts: two bytes of the group's number, so that equal keys of two groups are two, then the key
	error float64 // uses that may have been another key's
}

// Key is a key that is used much. Its part of the uses of all keys lately is about Share, and at least Least, by a
// sample.
type Key struct {
	Group        uint16
	Key          string  // its first MaxKey bytes
	Share, Least float64 // 0 to 1
}

// New makes an estimate.
func New() *Keys {
	h := &Keys{}
	h.mu.counts = make(map[string]int, Most)
	h.mu.at = time.Now()
	return h
}

// Next draws how many uses from now the next one of the sample is: 1 to 2*Every-1, with Every as its mean.
func Next() int { return 1 + rand.IntN(2*Every-1) }

// Add counts a use of each key of a group. Long keys that begin alike are counted as one.
func (h *Keys) Add(group uint16, keys ...[]byte) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fadeLocked(time.Now())
	for _, key := range keys {
		h.addLocked(group, key[:min(len(key), MaxKey)])
	}
}

func (h *Keys) addLocked(group uint16, key []byte) {
	h.mu.text = append(append(h.mu.text[:0], byte(group), byte(group>>8)), key...)
	h.mu.total++
	at, ok := h.mu.counts[string(h.mu.text)]
	if !ok {
		at = h.placeLocked(counted{name: string(h.mu.text)})
	}
	h.mu.uses[at]++
}

// placeLocked gives a key a place, that of the least one if there is no other.
// The new key takes over the count of the one that goes, which it may have had: Space-Saving never counts too few.
func (h *Keys) placeLocked(k counted) (at int) {
	if len(h.mu.uses) < Most {
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
func (h *Keys) fadeLocked(now time.Time) {
	for ; now.Sub(h.mu.at) >= half; h.mu.at = h.mu.at.Add(half) {
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

// All gives the keys that are used most, the most used one first.
func (h *Keys) All() (all []Key) {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fadeLocked(time.Now())
	for i, uses := range h.mu.uses {
		k := &h.mu.keys[i]
		if sure := uses - k.error; sure >= 2 && sure/h.mu.total >= least {
			all = append(all, Key{uint16(k.name[0]) | uint16(k.name[1])<<8, k.name[2:], uses / h.mu.total,
				sure / h.mu.total})
		}
	}
	ordered.Sort(all, func(a, b Key) int {
		return cmp.Or(cmp.Compare(b.Share, a.Share), cmp.Compare(a.Group, b.Group), cmp.Compare(a.Key, b.Key))
	})
	return all
}

// Counted is how many keys are counted, at most Most.
func (h *Keys) Counted() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.mu.counts)
}
