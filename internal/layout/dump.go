package layout

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"time"
)

// The dumps below print any bytes, however broken: each field that is there,
// then what is wrong. Offsets are those of the region.

const (
	dumpRowBytes = 8  // bytes of hex on one line
	dumpMaxBytes = 64 // of a key, value or stray bytes
)

// dumper collects annotated lines; it cannot fail before flush.
type dumper struct {
	out  bytes.Buffer
	base uint64 // region offset of b[0]
	b    []byte
}

func (d *dumper) title(format string, args ...any) { fmt.Fprintf(&d.out, format+"\n", args...) }

// field prints n bytes from off, as far as they exist, with a name and meaning.
func (d *dumper) field(off, n int, name, format string, args ...any) {
	p := d.b[min(off, len(d.b)):min(off+n, len(d.b))]
	d.row(off, p[:min(len(p), dumpRowBytes)], name, fmt.Sprintf(format, args...))
	for i := dumpRowBytes; i < len(p); i += dumpRowBytes {
		d.row(off+i, p[i:min(i+dumpRowBytes, len(p))], "", "")
	}
}

func (d *dumper) row(off int, p []byte, name, meaning string) {
	line := fmt.Sprintf("  %#08x  %-23s  %-9s %s", d.base+uint64(off), fmt.Sprintf("% x", p), name, meaning)
	d.out.WriteString(strings.TrimRight(line, " ") + "\n")
}

// text prints a run of bytes, at most dumpMaxBytes of them, with its length.
func (d *dumper) text(off, n int, name string) {
	p := d.b[min(off, len(d.b)):min(off+n, len(d.b))]
	show := min(len(p), dumpMaxBytes)
	d.field(off, show, name, "%d bytes %q", n, p[:min(show, 32)])
	if more := n - show; more > 0 {
		d.title("  %8s  … %d more", "", more)
	}
}

func (d *dumper) problem(err error) {
	if err != nil {
		d.title("  problem: %v", err)
	}
}

func (d *dumper) u32(off int) uint32 { return uint32(d.u64n(off, 4)) }
func (d *dumper) u64(off int) uint64 { return d.u64n(off, 8) }

func (d *dumper) u64n(off, n int) uint64 {
	var x [8]byte
	copy(x[:n], d.b[min(off, len(d.b)):])
	return binary.LittleEndian.Uint64(x[:])
}

func (d *dumper) flush(w io.Writer) error {
	_, err := w.Write(d.out.Bytes())
	return err
}

// DumpRegion prints the region header in b, the first bytes of a region.
func DumpRegion(w io.Writer, b []byte) error {
	d := &dumper{b: b}
	d.title("region header")
	d.field(0, 8, "magic", "%q", b[:min(8, len(b))])
	d.field(8, 4, "format", "%d", d.u32(8))
	d.field(12, 4, "pg", "%d", d.u32(12))
	d.field(16, 4, "namespace", "%d", d.u32(16))
	d.field(20, 4, "epoch", "%d", d.u32(20))
	d.field(24, 8, "region", "%d bytes", d.u64(24))
	d.field(32, 8, "index", "%d bytes, heap from unit %d", d.u64(32), d.u64(32)/UnitSize)
	d.field(40, 8, "incarn.", "%#x", d.u64(40))
	d.field(48, 4, "CRC", "%#08x", d.u32(48))
	_, err := ParseRegion(b)
	d.problem(err)
	return d.flush(w)
}

// DumpGroup prints the group in b, which stands at off in a region whose heap is
// [heapLo, heapHi) units. Slots that were never used are left out.
func DumpGroup(w io.Writer, off uint64, b []byte, heapLo, heapHi uint32) error {
	d := &dumper{base: off, b: b}
	d.group("group", heapLo, heapHi)
	return d.flush(w)
}

func (d *dumper) group(what string, heapLo, heapHi uint32) {
	d.title("%s at %#x", what, d.base)
	h := Header(d.u64(0))
	var flags []string
	if h.OVF() {
		flags = append(flags, "OVF")
	}
	if h.Split() {
		flags = append(flags, "SPLIT")
	}
	d.field(0, 8, "header", "epoch %d depth %d %s", h.Epoch(), h.Depth(), strings.Join(flags, " "))
	if l := Lock(d.u64(GroupLockOff)); l == 0 {
		d.field(GroupLockOff, 8, "lock", "free")
	} else {
		d.field(GroupLockOff, 8, "lock", "session %d stamp %#x", l.Session(), l.Stamp())
	}
	unused := 0
	for i := range GroupSlots {
		word := Word(d.u64(int(SlotOff(i))))
		if word == 0 {
			unused++
			continue
		}
		d.field(int(SlotOff(i)), 8, fmt.Sprintf("slot %d", i), "%v%s", word, where(word))
	}
	d.title("  %8s  %d slots never used", "", unused)
	d.problem(Group(d.b).Check(heapLo, heapHi))
}

// where adds the region offset of the record that a word names.
func where(w Word) string {
	if w.State() == Empty {
		return ""
	}
	return fmt.Sprintf(" at %#x", w.Off())
}

// DumpSegment prints the groups of the segment in b, which stands at off; groups
// that are all zero are only counted.
func DumpSegment(w io.Writer, off uint64, b []byte, heapLo, heapHi uint32) error {
	d := &dumper{}
	zero := 0
	for i := 0; i*GroupSize < len(b); i++ {
		g := b[i*GroupSize : min((i+1)*GroupSize, len(b))]
		if len(bytes.Trim(g, "\x00")) == 0 {
			zero++
			continue
		}
		d.base, d.b = off+uint64(i)*GroupSize, g
		name := fmt.Sprintf("group %d", i)
		if i == StashGroup {
			name = "stash group"
		}
		d.group(name, heapLo, heapHi)
	}
	d.title("%d groups all zero", zero)
	return d.flush(w)
}

// DumpRecord prints the record in b, which stands at off in its region. b may be
// longer than the record.
func DumpRecord(w io.Writer, off uint64, b []byte) error {
	d := &dumper{base: off, b: b}
	d.title("record at %#x", off)
	var head [RecordHeaderSize]byte
	copy(head[:], b)
	h := HeadOf(head[:])
	keyLen, valueLen, flags := int(h.KeyLen), int(h.ValueLen), h.Flags
	d.field(0, 8, "version", "%d", d.u64(0))
	d.field(8, 2, "klen", "%d", keyLen)
	d.field(10, 1, "flg", "%s", flags)
	switch {
	case h.Pinned != 0:
		d.field(11, 1, "fmt", "%d, pinned until %s", d.u64n(11, 1),
			time.Unix(int64(h.Pinned), 0).UTC().Format("2006-01-02T15:04:05Z"))
	case h.Stub:
		d.field(11, 1, "fmt", "%d, a stub", d.u64n(11, 1))
	case h.Parent != 0:
		d.field(11, 1, "fmt", "%d, child of u%d v%d %dB", d.u64n(11, 1), h.Parent.Unit(), h.Parent.Ver(),
			h.Parent.ReadLen())
	default:
		d.field(11, 1, "fmt", "%d", d.u64n(11, 1))
	}
	d.field(12, 4, "vlen", "%d", valueLen)
	switch e := h.Expiry; {
	case flags&FlagChunk != 0:
		d.field(16, 8, "expiry", "chunk %d", e)
	case e == 0:
		d.field(16, 8, "expiry", "none")
	case e > 1<<47:
		d.field(16, 8, "expiry", "%d ms", e)
	default:
		d.field(16, 8, "expiry", "%s", time.UnixMilli(int64(e)).UTC().Format("2006-01-02T15:04:05.000Z"))
	}
	d.field(24, 4, "CRC", "%#08x", d.u32(24))
	if h.Parent != 0 {
		d.field(28, 4, "writer", "unit %d of its parent", d.u32(28))
	} else {
		d.field(28, 4, "writer", "session %d", d.u32(28))
	}
	if keyLen > 0 {
		d.text(RecordHeaderSize, keyLen, "key")
	}
	r, err := ParseLinked(b)
	switch {
	case err == nil && r.Stub:
		d.stub(RecordHeaderSize+keyLen, &r)
	case err == nil && r.Flags&FlagManifest != 0:
		d.manifest(RecordHeaderSize+keyLen, r.Value)
	case err == nil && r.Flags&FlagIntent != 0:
		d.intent(RecordHeaderSize+keyLen, r.Value)
	case valueLen > 0:
		d.text(RecordHeaderSize+keyLen, valueLen, "value")
	}
	d.problem(err)
	return d.flush(w)
}

// DumpStatus prints the status word in b, which stands at off in its region.
func DumpStatus(w io.Writer, off uint64, b []byte) error {
	d := &dumper{base: off, b: b}
	d.title("status word at %#x", off)
	s := Status(d.u64(0))
	d.field(0, 8, "status", "%v", s)
	d.problem(s.Check(off))
	return d.flush(w)
}

func (d *dumper) manifest(off int, v []byte) {
	m, err := ParseManifest(v, 0, 1<<32-1)
	if err != nil {
		d.text(off, len(v), "value")
		d.problem(err)
		return
	}
	d.field(off, 8, "length", "%d bytes in all", m.Len)
	d.field(off+8, 4, "n", "%d chunks", len(m.Chunks))
	d.field(off+12, 4, "pay", "%d bytes in a chunk", m.Payload)
	d.field(off+16, 8, "id", "%d", m.ID)
	for i, c := range m.Chunks {
		d.field(off+manifestHeaderSize+8*i, 8, fmt.Sprintf("chunk %d", i), "u%d v%d %dB at %#x",
			c.Unit, c.Ver, SizeOf(c.Code), uint64(c.Unit)*UnitSize)
	}
}

func (d *dumper) stub(off int, r *Record) {
	s, _ := r.Object() // ParseLinked has checked it
	d.field(off, 8, "version", "object of version %d", s.Version)
	d.field(off+8, 4, "len", "%d bytes in the tier", s.Len)
	d.field(off+12, 4, "vlen", "%d bytes of value", s.ValueLen)
	d.field(off+16, 4, "CRC", "%#08x in the object", s.Sum)
	d.field(off+20, 1, "n", "%d copies", s.Copies)
	d.field(off+21, 1, "long", "%t", s.Long)
	d.field(off+22, 2, "zero", "")
	for i, c := range s.At[:s.Copies] {
		d.field(off+StubLen(i), objectAtSize, fmt.Sprintf("copy %d", i), "volume %d at %#x", c.Volume, c.At)
	}
	if t := r.Tail(); len(t) > 0 {
		d.text(off+StubLen(int(s.Copies)), len(t), "tail")
	}
}

func (d *dumper) intent(off int, v []byte) {
	i, err := ParseIntent(v, 0, 1<<32-1)
	if err != nil {
		d.text(off, len(v), "value")
		d.problem(err)
		return
	}
	d.field(off, 2, "kind, try", "%v, try %d", i.Kind, i.Try)
	d.field(off+2, 2, "lng", "manifests: %v", i.Long)
	d.field(off+4, 4, "pg", "%d", i.PG)
	d.field(off+8, 4, "gen", "%d", i.Generation)
	d.field(off+12, 4, "zero", "")
	d.field(off+16, 8, "off", "status word at %#x", i.Off)
	d.field(off+24, 8, "seq", "transaction %d", i.Seq)
	d.field(off+32, 8, "parent", "%v%s", i.Parent, where(i.Parent))
	d.field(off+40, 8, "final", "%v%s", i.Final, where(i.Final))
	d.field(off+48, 8, "ts", "%d", i.TS)
	d.field(off+56, 8, "coord", "session %d", i.Coord)
}

func (f RecordFlags) String() string {
	var s []string
	if f&FlagManifest != 0 {
		s = append(s, "MANIFEST")
	}
	if f&FlagChunk != 0 {
		s = append(s, "CHUNK")
	}
	if f&FlagNote != 0 {
		s = append(s, "NOTE")
	}
	if f&FlagIntent != 0 {
		s = append(s, "INTENT")
	}
	if r := f & recordFlagsRsv; r != 0 {
		s = append(s, fmt.Sprintf("%#x", uint8(r)))
	}
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, "|")
}
