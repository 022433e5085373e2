package values

import (
	"slices"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/rdb"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// Values of any type in parts, for commands that take several types: SORT, DUMP, RESTORE.

// partsOf takes a value apart. Its parts alias the value where they can.
// A hash's parts are fields and values in turn, a sorted set's its members in order with their scores beside. An error,
// which is collection.ErrCorrupt, means that the record is damaged or was not written by a gateway.
func partsOf(t client.Type, value []byte) (v rdb.Value, err error) {
	switch t {
	case client.Plain:
		return rdb.Value{Kind: rdb.String, Parts: [][]byte{value}}, nil
	case client.Hash:
		v.Kind = rdb.Hash
		h := collection.Hash(value)
		if _, err = h.Len(); err != nil {
			return v, err
		}
		for field, value := range h.All() {
			v.Parts = append(v.Parts, field, value)
		}
	case client.Set:
		v.Kind = rdb.Set
		s := collection.Set(value)
		if _, err = s.Len(); err != nil {
			return v, err
		}
		v.Parts = s.Members(nil)
	case client.SortedSet:
		v.Kind = rdb.SortedSet
		z, err := collection.ParseZSet(value)
		if err != nil {
			return v, err
		}
		for i := range z.Len() {
			v.Parts, v.Scores = append(v.Parts, z.Member(i)), append(v.Scores, z.Score(i))
		}
	case client.List:
		v.Kind = rdb.List
		for off := collection.ListStart; off < len(value); {
			e, next, err := collection.ListNext(value, off)
			if err != nil {
				return v, err
			}
			v.Parts, off = append(v.Parts, e), next
		}
	case client.Stream:
		v.Kind = rdb.Stream
		if v.Stream, err = collection.ParseStream(value); err != nil {
			return v, err
		}
		// A stream is not taken apart, but every entry is looked at, so that nothing damaged is dumped.
		err = v.Stream.Range(collection.StreamID{}, collection.MaxStreamID, false, func(collection.StreamEntry) bool {
			return true
		})
		return v, err
	default:
		return v, collection.ErrCorrupt
	}
	return v, nil
}

// valueOf puts a value together.
// It is for payloads from clients: a field or member that comes twice counts once, and the order of a sorted set is
// made anew. A collection that is longer than any may be is collection.ErrTooLong.
func valueOf(v rdb.Value) (t client.Type, value []byte, err error) {
	switch v.Kind {
	case rdb.String:
		return client.Plain, v.Parts[0], nil
	case rdb.Hash:
		var h collection.Hash
		h, _, err = h.SetAll(v.Parts)
		t, value = client.Hash, h
	case rdb.Set:
		var s collection.Set
		s, _, err = s.AddAll(v.Parts)
		t, value = client.Set, s
	case rdb.SortedSet:
		// The payload's order need not be that of scores.
		list := make([]collection.ZEntry, len(v.Parts))
		for i, m := range v.Parts {
			list[i] = collection.ZEntry{Member: m, Score: v.Scores[i]}
		}
		slices.SortFunc(list, collection.CompareZ)
		t, value = client.SortedSet, collection.ZSet{}.AppendChanged(nil, nil, list)
	case rdb.Stream:
		t, value = client.Stream, v.Stream.Bytes(true)
	case rdb.List:
		t = client.List
		value, err = collection.ListSplice(nil, collection.ListStart, collection.ListStart, 0, v.Parts...)
	}
	if err == nil && len(value) > collection.MaxLen {
		err = collection.ErrTooLong
	}
	return t, value, err
}

// elementsOf are what SORT sorts of a list, set or sorted set, in its order.
func elementsOf(t client.Type, value []byte) ([][]byte, error) {
	v, err := partsOf(t, value)
	return v.Parts, err
}

// fieldOf is the value of a hash's field; nil: there is none, or no hash.
// A corrupt hash is none, as far as SORT's patterns go.
func fieldOf(k *Key, field []byte) []byte {
	if k.Type != client.Hash {
		return nil
	}
	v, err := collection.Hash(k.Value).Get(field)
	if err != nil {
		return nil
	}
	return v
}

// storeList makes a list of elements, nil ones empty, the value of k, or deletes it if there are none, and replies how
// many they are. If the list would be too long it replies so, and if there is no room for it yet it asks for that; the
// key is as it was in both cases.
func storeList(k *Key, name []byte, elements [][]byte, w *resp.Writer) error {
	if len(elements) == 0 {
		if k.Present {
			k.Delete()
		}
		w.Int(0)
		return nil
	}
	size := 0
	for _, e := range elements {
		size += collection.ListSize(e)
	}
	// The new list is beside the old one for a moment, and takes room of its own.
	size = collection.ListGrown(nil, size)
	switch {
	case size > min(k.MaxValue, collection.MaxLen):
		return collectionError(client.List, name, collection.ErrTooLong)
	case size > k.Room:
		k.Want = size
		return nil
	}
	value, err := collection.ListSplice(nil, collection.ListStart, collection.ListStart, 0, elements...)
	if err != nil {
		return collectionError(client.List, name, err)
	}
	k.Flags = 0
	k.SetAs(client.List, value, 0)
	w.Int(int64(len(elements)))
	return nil
}
