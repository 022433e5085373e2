package index

import (
	"bytes"

	"github.com/kvd-project/kvd/internal/layout"
)

// A long value does not pass through the Op's buffers: it lies apart from its record's header and key. A GET's lands
// in memory of the caller, a PUT's leaves from there, and its CRC is taken on the way. Slot, header, key and CRC are
// judged as those of any record are. Before that nothing in the caller's memory counts. If the verdict is no, the Op's
// driver clears it before the caller may look (engine.Task).

// apartFrom is the length of the records, in bytes, from which values are apart. A shorter record fits the buffers that
// each operation has at hand, where copying it costs less than a second piece of memory.
const apartFrom = 8 << 10

// apartHead is the most that a header with its key takes if the value is apart, bytes.
const apartHead = 2 << 10

// Value is what an access reads or writes behind Buf.
type Value struct {
	// Bytes is the caller's memory: where a READ puts the value, or where a WRITE takes it from.
	Bytes []byte
	// Slack is how many bytes behind Bytes a READ covers as well. They are thrown away.
	Slack int
	// CRC is, of a WRITE, what the CRC of Bytes goes on from; layout.SealHead completes the header in Buf. A READ
	// has it as a result: the CRC of Bytes[:N], from what Start says on.
	CRC uint32
	N   int // result of a READ: how many of Bytes are the value; -1: Start refused it

	shown bool   // a READ brings the header and the key alone: Bytes are where the record is
	off   uint64 // of that, likewise

	chunk     bool // it is the index-th of the chunks that id names, of exactly the length of Bytes
	id, index uint64
}

// Start looks at the header and key that a READ has brought, before the value comes. It says how many bytes of value
// there are, and what their CRC goes on from. It gives -1 if none may be put into Bytes. Any goroutine may call it
// while the access is under way.
func (v *Value) Start(head []byte) (n int, crc uint32) {
	h := layout.HeadOf(head)
	if v.chunk {
		if h.KeyLen != 0 || h.Flags&layout.FlagChunk == 0 || h.Version != v.id || h.Expiry != v.index ||
			uint64(h.ValueLen) != uint64(len(v.Bytes)) {
			return -1, 0
		}
		return len(v.Bytes), layout.HeadCRC(head)
	}
	const refused = layout.FlagManifest | layout.FlagChunk | layout.FlagIntent
	if layout.RecordLen(int(h.KeyLen), 0) != len(head) || h.Flags&refused != 0 || h.Stub || uint64(h.ValueLen) > uint64(
		len(v.Bytes)) {
		return -1, 0
	}
	return int(h.ValueLen), layout.HeadCRC(head)
}

// from is the length of the records whose values are apart.
func (o *Op) from() int {
	if o.Apart != 0 {
		return int(o.Apart)
	}
	return apartFrom
}

// ValueOf is what a, of the round under way, reads or writes behind Buf, nil if that is all.
func (o *Op) ValueOf(a *Access) *Value {
	if a.Apart == 0 {
		return nil
	}
	return &o.values[a.Apart-1]
}

// LenOf is how many bytes of remote memory a, a READ or a WRITE of the round under way, covers.
func (o *Op) LenOf(a *Access) int {
	n := len(a.Buf)
	if v := o.ValueOf(a); v != nil {
		n += len(v.Bytes) + v.Slack
	}
	return n
}

// readRecord is where the READ of w's record is to put it, and its Apart.
func (o *Op) readRecord(w layout.Word) (rec []byte, apart uint8) {
	n := o.readLenOf(w)
	if n >= o.from() && o.Kind == Get && o.Cond == Always && (o.Part == nil || o.Part.InPlace) {
		switch {
		case o.show(w):
			return o.recBuf(0, layout.RecordLen(len(o.Key), 0)), 0
		case o.into(n):
			return o.recBuf(0, layout.RecordLen(len(o.Key), 0)), 1
		}
	}
	return o.recBuf(0, n), 0
}

// into has the value of a record of n bytes read into memory of the caller, if there is some for it.
func (o *Op) into(n int) bool {
	n -= layout.RecordLen(len(o.Key), 0)
	if f := o.need(); n <= 0 || len(o.Key) > apartHead || f.inOne {
		return false
	}
	b := o.env.Into(o, n)
	if len(b) == 0 {
		return false
	}
	b = b[:min(n, len(b))]
	o.values[0] = Value{Bytes: b, Slack: n - len(b)}
	o.apartRead = true
	return true
}

// gotApart judges the record that was read with its value apart, but for its slot.
func (o *Op) gotApart(r *layout.Record) bool {
	v := &o.values[0]
	if v.shown {
		o.judgeShown(v, o.rec)
	}
	return v.N >= 0 && r.ParseApart(o.rec, v.Bytes[:v.N], v.CRC) == nil && bytes.Equal(r.Key, o.Key)
}

// isApartRead reports whether the round under way reads a record with its value apart.
func (o *Op) isApartRead() bool { return o.far != nil && o.apartRead }

// isApartWrite reports whether own is the start alone of the record that is written.
func (o *Op) isApartWrite() bool { return o.far != nil && o.apartWrite }

// isApart reports whether the Op's value leaves from the caller's memory in a record of n bytes.
func (o *Op) isApart(n int) bool {
	return n >= o.from() && (o.Kind == Put || o.Kind == Modify) && len(o.Key) <= apartHead && len(o.Value) > 0
}

// ownLen is the length of the record that is written, bytes.
func (o *Op) ownLen() int {
	if o.isApartWrite() {
		return len(o.own) + len(o.values[0].Bytes)
	}
	return len(o.own)
}

// encode puts the record that is written, or what it has besides its value, into own.
func (o *Op) encode(h layout.RecordHeader, value []byte, apart bool) {
	if o.far != nil {
		o.apartWrite = false
	}
	n := layout.RecordLen(len(o.Key), len(value))
	k := 0 // of the value that go with the key, so that the others begin a cache line at the memory node
	if apart {
		if n = layout.RecordLen(len(o.Key), 0); len(value) > layout.UnitSize {
			k = -n & (layout.UnitSize - 1)
		}
		n += k
	}
	if cap(o.own) < n {
		o.own = o.env.Buf(o, n)
	}
	if o.own = o.own[:n]; !apart {
		layout.EncodeRecord(o.own, h, o.Key, value)
		return
	}
	layout.EncodeHead(o.own, h, o.Key, len(value))
	o.need().values[0] = Value{Bytes: value[k:]}
	o.apartWrite = true
}

// sum takes anew what goes with the key of a value that is apart, and the CRC that the rest goes on from.
func (o *Op) sum() {
	v := &o.values[0]
	copy(o.own[layout.RecordLen(len(o.Key), 0):], o.Value[:len(o.Value)-len(v.Bytes)])
	v.CRC = layout.HeadCRC(o.own)
}

// setVersion changes the version of the record in own.
func (o *Op) setVersion() {
	if !o.isApartWrite() {
		layout.SetVersion(o.own, o.version)
		return
	}
	layout.SetHeadVersion(o.own, o.version)
}
