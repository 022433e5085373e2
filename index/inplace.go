package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

// A Get may ask for its value where it is (Part.InPlace). Then slot, header and key are read as ever, and the CRC is
// taken of memory that is shown, not of bytes that a READ brought. By I4 those bytes do not change while the Op counts
// as in flight. Its caller keeps it so afterwards: a View of the library is a GET in flight. Bytes in place that do not
// stand the verdict decide nothing: the record, or the chunks, are read anew as by any GET, to where damage is mended.

// InPlace reports whether the Op asks for its value where it is.
func (o *Op) InPlace() bool { return o.Part != nil && o.Part.InPlace }

// show has the value of w's record judged where it is, if it can be shown.
func (o *Op) show(w layout.Word) bool {
	head := layout.RecordLen(len(o.Key), 0)
	if f := o.need(); !o.InPlace() || f.inOne || len(o.Key) > apartHead || w.ReadLen() <= head {
		return false
	}
	b := o.env.Show(o, w.Off()+uint64(head), w.ReadLen()-head)
	if b == nil {
		return false
	}
	o.values[0] = Value{Bytes: b, shown: true, off: w.Off()}
	o.apartRead = true
	return true
}

// judgeShown makes v, whose header and key were read to head, what a READ of all of it would have made it.
func (o *Op) judgeShown(v *Value, head []byte) {
	n, crc := v.Start(head)
	switch v.N = n; {
	case n < 0:
	case o.Part.Unchecked:
		v.CRC = layout.HeadSum(head)
	default:
		v.CRC = o.env.SumShown(o, v.off, layout.HeadOf(head).Version, crc, v.Bytes[:n])
	}
}

// shown says in the answer of a Get whether its value is where it is.
func (o *Op) shown() {
	if o.InPlace() {
		o.Part.Shown = o.isApartRead() && o.values[0].shown
	}
}

// showChunks has the headers of all chunks read, if the chunks can be shown.
func (o *Op) showChunks() bool {
	o.Part.Shown = false
	for i, off := range o.readOffs {
		n := min(o.readLen-i*o.payload, o.payload)
		b := o.env.Show(o, off+layout.RecordHeaderSize, n)
		if b == nil {
			o.parts = nil
			return false
		}
		o.parts = append(o.parts, b)
	}
	o.begin()
	o.chunksShown = true
	for i, off := range o.readOffs {
		o.add(Access{Verb: Read, Space: Heap, Replica: o.Route.PG.Reader(), Off: off,
			Buf: o.recBuf(1+i, layout.RecordHeaderSize)})
	}
	return true
}

// gotShown judges the chunks where they are.
func (o *Op) gotShown() Action {
	o.chunksShown = false
	for i, b := range o.parts {
		v, head := Value{Bytes: b, off: o.readOffs[i], chunk: true, id: o.readID, index: uint64(i)}, o.recAt(1+i)
		o.judgeShown(&v, head)
		if r := (layout.Record{}); v.N != len(b) || r.ParseApart(head, b, v.CRC) != nil {
			o.parts = nil
			return o.copyChunks()
		}
	}
	o.Part.Shown = true
	return o.finish(nil)
}
