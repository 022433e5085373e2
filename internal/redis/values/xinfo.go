package values

import (
	"bytes"

	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"xinfo|consumers": cmdXInfoConsumers,
	"xinfo|groups":    cmdXInfoGroups,
	"xinfo|stream":    cmdXInfoStream,
})

// streamInfo is the key's stream for XINFO, which wants it to be there, and the id of its first entry.
func (k *Key) streamInfo(name []byte) (s *collection.Stream, first collection.StreamID, err error) {
	if !k.Present {
		return nil, first, errNoKey
	}
	if s, err = k.readStream(name); err != nil {
		return nil, first, err
	}
	first, err = s.Edge(false)
	return s, first, streamError(err, name)
}

// cmdXInfoStream looks at all entries before it replies, so that damage is an error and no half of a reply. The numbers
// of the radix tree are what Redis would have.
func cmdXInfoStream(k *Key, args [][]byte, w *resp.Writer) error {
	s, first, err := k.streamInfo(args[2])
	if err != nil {
		return err
	}
	opts := args[3:]
	full, count := len(opts) > 0, int64(10)
	if full && (len(opts) != 1 && len(opts) != 3 || !Fold(opts[0], "full") || len(opts) == 3 &&
		!Fold(opts[1], "count")) {
		return refusal("ERR unknown subcommand or wrong number of arguments for '" + Clip(args[1], 128) +
			"'. Try XINFO HELP.")
	}
	if len(opts) == 3 {
		if count, err = parseIntAs(opts[2], ErrNotInt); err != nil {
			return err
		}
		if count < 0 {
			count = 10
		}
	}
	if _, err := countRange(s, collection.StreamID{}, collection.MaxStreamID, 0); err != nil {
		return streamError(err, args[2])
	}
	w.Map(9 + int(Bit(!full)))
	keys, nodes := s.Nodes()
	field := func(name string, n int) { w.BulkString(name); w.Int(int64(n)) }
	field("length", s.Len())
	field("radix-tree-keys", keys)
	field("radix-tree-nodes", nodes)
	w.BulkString("last-generated-id")
	writeID(w, s.Last)
	w.BulkString("max-deleted-entry-id")
	writeID(w, s.MaxDeleted)
	field("entries-added", int(s.Added))
	w.BulkString("recorded-first-entry-id")
	writeID(w, first)
	if full {
		w.BulkString("entries")
		if err := writeSome(w, s, collection.StreamID{}, collection.MaxStreamID, false, count, args[2]); err != nil {
			return err // it has been looked at
		}
		w.BulkString("groups")
		w.Array(len(s.Groups))
		for _, g := range s.Groups {
			writeGroup(w, s, g, first, count)
		}
		return nil
	}
	field("groups", len(s.Groups))
	w.BulkString("first-entry")
	writeEdge(w, s, false)
	w.BulkString("last-entry")
	writeEdge(w, s, true)
	return nil
}

// writeEdge is the first or the last entry of a stream that is not corrupt.
func writeEdge(w *resp.Writer, s *collection.Stream, last bool) {
	if s.Len() == 0 {
		w.Null()
		return
	}
	s.Range(collection.StreamID{}, collection.MaxStreamID, last, func(e collection.StreamEntry) bool {
		writeEntry(w, e)
		return false
	})
}

// writeRead is how far a group has read.
func writeRead(w *resp.Writer, s *collection.Stream, g *collection.StreamGroup, first collection.StreamID) {
	w.BulkString("last-delivered-id")
	writeID(w, g.Last)
	// Both numbers are null if entries in the middle were deleted, so that nobody can count what the group has passed.
	w.BulkString("entries-read")
	intOrNull(w, g.Read, g.Read != -1)
	w.BulkString("lag")
	lag, ok := s.Lag(g, first)
	intOrNull(w, lag, ok)
}

// intOrNull is for numbers that a group may not know any more.
func intOrNull(w *resp.Writer, n int64, ok bool) {
	if ok {
		w.Int(n)
	} else {
		w.Null()
	}
}

// writeGroup is a group as XINFO STREAM FULL tells of it, with count of what is pending unless that is 0.
// Its times are Unix ms.
func writeGroup(w *resp.Writer, s *collection.Stream, g *collection.StreamGroup, first collection.StreamID,
	count int64) {
	w.Map(7)
	w.BulkString("name")
	w.Bulk(g.Name)
	writeRead(w, s, g, first)
	w.BulkString("pel-count")
	w.Int(int64(g.Pending.Len()))
	w.BulkString("pending")
	n := g.Pending.Len()
	if count > 0 {
		n = int(min(count, int64(n)))
	}
	w.Array(n)
	for i := range n {
		p := g.Pending.At(i)
		w.Array(4)
		writeID(w, p.ID)
		w.Bulk(g.Consumers[p.Consumer].Name)
		w.Int(p.Delivered)
		w.Int(p.Times)
	}
	// The pending entries are kept by id for the whole group, and sorted out by consumer for this reply alone.
	pending := make([][]collection.PendingEntry, len(g.Consumers))
	for i := range g.Pending.Len() {
		p := g.Pending.At(i)
		pending[p.Consumer] = append(pending[p.Consumer], p)
	}
	w.BulkString("consumers")
	w.Array(len(g.Consumers))
	for i, c := range g.Consumers {
		w.Map(4)
		w.BulkString("name")
		w.Bulk(c.Name)
		w.BulkString("seen-time")
		w.Int(c.Seen)
		w.BulkString("pel-count")
		w.Int(int64(len(pending[i])))
		some := pending[i]
		if count > 0 && count < int64(len(some)) {
			some = some[:count]
		}
		w.BulkString("pending")
		w.Array(len(some))
		for _, p := range some {
			w.Array(3)
			writeID(w, p.ID)
			w.Int(p.Delivered)
			w.Int(p.Times)
		}
	}
}

// cmdXInfoGroups has the groups in the order of their names.
func cmdXInfoGroups(k *Key, args [][]byte, w *resp.Writer) error {
	s, first, err := k.streamInfo(args[2])
	if err != nil {
		return err
	}
	w.Array(len(s.Groups))
	for _, g := range s.Groups {
		w.Map(6)
		w.BulkString("name")
		w.Bulk(g.Name)
		w.BulkString("consumers")
		w.Int(int64(len(g.Consumers)))
		w.BulkString("pending")
		w.Int(int64(g.Pending.Len()))
		writeRead(w, s, g, first)
	}
	return nil
}

// cmdXInfoConsumers tells idle times in ms, by this gateway's clock.
func cmdXInfoConsumers(k *Key, args [][]byte, w *resp.Writer) error {
	s, _, err := k.streamInfo(args[2])
	if err != nil {
		return err
	}
	g := s.Group(args[3])
	if g == nil {
		return noGroup(args[2], args[3])
	}
	w.Array(len(g.Consumers))
	for i, n := range g.PendingOf() {
		c := g.Consumers[i]
		w.Map(3)
		w.BulkString("name")
		w.Bulk(c.Name)
		w.BulkString("pending")
		w.Int(int64(n))
		w.BulkString("idle")
		w.Int(max(0, k.Now-c.Seen))
	}
	return nil
}

// asText is a name within an error, which in Redis ends with a 0.
func asText(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(b)
}

// noGroup and noKeyOrGroup are Redis's texts, of which clients look at the first word.
func noGroup(name, group []byte) refusal {
	return refusal("NOGROUP No such consumer group '" + asText(group) + "' for key name '" + asText(name) + "'")
}

func noKeyOrGroup(name, group []byte) refusal {
	return refusal("NOGROUP No such key '" + asText(name) + "' or consumer group '" + asText(group) + "'")
}

// parseIntAs is an integer argument with an error of its own.
func parseIntAs(b []byte, why refusal) (n int64, err error) {
	n, ok := resp.ParseInt(b)
	if !ok {
		return 0, why
	}
	return n, nil
}
