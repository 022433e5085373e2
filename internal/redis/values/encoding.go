package values

import (
	"sync/atomic"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"object|encoding": cmdEncoding,
})

// EncodingLimits are the settings by which OBJECT ENCODING tells which encoding Redis would have chosen; 0 in set: they
// are the defaults.
type EncodingLimits struct {
	Set                                                         atomic.Bool
	hashEntries, hashValue, setInts, sortedEntries, sortedValue atomic.Int64
}

// Of is where the value of a setting goes that is one of them, else nil.
func (e *EncodingLimits) Of(name string) *atomic.Int64 {
	switch name {
	case "hash-max-listpack-entries":
		return &e.hashEntries
	case "hash-max-listpack-value":
		return &e.hashValue
	case "set-max-intset-entries":
		return &e.setInts
	case "zset-max-listpack-entries":
		return &e.sortedEntries
	case "zset-max-listpack-value":
		return &e.sortedValue
	}
	return nil
}

// hashLarge reports whether Redis would keep a hash in a table by these limits.
func (e *EncodingLimits) hashLarge(h collection.Hash) bool {
	n, err := h.Len()
	if err != nil || int64(n) > e.hashEntries.Load() {
		return true
	}
	most := e.hashValue.Load()
	for field, value := range h.All() {
		if int64(max(len(field), len(value))) > most {
			return true
		}
	}
	return false
}

// sortedLarge reports whether Redis would keep a sorted set in a skip list by these limits.
func (e *EncodingLimits) sortedLarge(z collection.ZSet) bool {
	if int64(z.Len()) > e.sortedEntries.Load() {
		return true
	}
	most := e.sortedValue.Load()
	for i := range z.Len() {
		if int64(len(z.Member(i))) > most {
			return true
		}
	}
	return false
}

// encodingOf is the one that Redis would have chosen for a collection.
// Tools print it, and nothing here depends on it: collections have encodings of their own (package collection). While
// the limits are the defaults these tell; else, or for a nil e, what the value has is counted.
func (e *EncodingLimits) encodingOf(t client.Type, value []byte) string {
	changed := e != nil && e.Set.Load()
	switch t {
	case client.Hash:
		h := collection.Hash(value)
		if large := h.Large(); changed && e.hashLarge(h) || !changed && large {
			return "hashtable"
		}
		return "listpack"
	case client.Set:
		s := collection.Set(value)
		if n, err := s.Len(); s.Ints() && (!changed || err == nil && int64(n) <= e.setInts.Load()) {
			return "intset"
		}
		return "hashtable"
	case client.SortedSet:
		z, err := collection.ParseZSet(value)
		if err == nil && (changed && !e.sortedLarge(z) || !changed && z.Small()) {
			return "listpack"
		}
		return "skiplist"
	case client.List:
		return "quicklist"
	}
	return t.String()
}

// cmdEncoding answers as Redis would after SET; records here are all alike.
func cmdEncoding(k *Key, _ [][]byte, w *resp.Writer) error {
	_, isInt := resp.ParseInt(k.Value)
	switch {
	case !k.Present:
		w.Null()
	case k.Type != client.Plain:
		w.BulkString(k.Limits.encodingOf(k.Type, k.Value))
	case isInt:
		w.BulkString("int")
	case len(k.Value) <= 44:
		w.BulkString("embstr")
	default:
		w.BulkString("raw")
	}
	return nil
}
