package index

import "github.com/kvd-project/kvd/internal/layout"

// An Exists tells that its key is there, reads no value and notes no use. It goes the ways of a Get. Where the slot is
// known, and what it held of a record that does not expire, it READs the slot alone. Elsewhere it READs the start of
// records, header and key. The CRC covers the value, so a start proves less than a record:
//
//   - A start with the whole key, in good form, tells that the key is there, unless its version is far ahead.
//   - Nothing else rests on starts. Intents, records that seem to have expired, and starts of which none is the key's,
//     are READ whole, and judged as a Get judges them.

// readsHeads reports whether the round under way, or the one that is made, READs the starts of records alone.
func (o *Op) readsHeads() bool { return o.Kind.asks() && (o.far == nil || !o.inOne) }

// readLenOf is how much of w's record is READ, bytes.
func (o *Op) readLenOf(w layout.Word) int {
	n := w.ReadLen()
	if o.readsHeads() {
		n = min(n, layout.RecordLen(len(o.Key), 0))
	}
	return n
}

// gotHead judges head, the start of the record that w names, but for its slot: the key is there.
func (o *Op) gotHead(head []byte, w layout.Word, r *layout.Record) bool {
	return seenHead(head, w, o.Key, r) && r.Version < o.lastVersion() && !o.isExpired(&r.RecordHeader)
}
