package values

import (
	"bytes"
	"encoding/binary"
	"math/bits"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"bitcount":    cmdBitCount,
	"bitfield":    cmdBitField,
	"bitfield_ro": cmdBitFieldRO,
	"bitpos":      cmdBitPos,
	"getbit":      cmdGetBit,
	"setbit":      cmdSetBit,
})

var _ = severalKeys(map[string]SeveralFunc{
	"bitop": cmdBitOp,
})

// Bits of strings, numbered from the most significant one of the first byte on. All behind the end of a
// string is 0, and so is a string that is not there.

const errBitOffset = "ERR bit offset is not an integer or out of range"

// bitOffset reads the place of a bit; #n is the n-th integer of that many bits. The value must stay shorter than most
// bytes. As in Redis it is the product that must be good, which may be one that has overflowed. width is that of
// BITFIELD's integers in bits, and 0 for commands without #n; most is in bytes.
func bitOffset(b []byte, width, most int) (int64, bool) {
	scale := int64(1)
	if width > 0 && len(b) > 0 && b[0] == '#' {
		b, scale = b[1:], int64(width)
	}
	n, ok := resp.ParseInt(b)
	at := n * scale
	return at, ok && at >= 0 && at>>3 < int64(most)
}

// bitAt is a bit of a value, 0 behind its end.
func bitAt(value []byte, at int64) int64 {
	if at>>3 >= int64(len(value)) {
		return 0
	}
	return int64(value[at>>3] >> (7 - at&7) & 1)
}

// lengthened is the value in a buffer that may be written to, with zeros behind it so that it has at least n bytes.
// n is in bytes. The caller calls set, for the change to count.
func (k *Key) lengthened(n int) ([]byte, error) {
	had := len(k.Value)
	b, err := k.mutable(max(n, had))
	if err != nil {
		return nil, err
	}
	if n > had {
		b = b[:n]
		clear(b[had:])
	}
	k.Own = b
	return b, nil
}

// BitPart is the byte of a value of n bytes that GETBIT needs.
func BitPart(args [][]byte, n int) (from, to int) {
	if at, ok := bitOffset(args[2], 0, n); ok {
		return int(at >> 3), int(at>>3) + 1
	}
	return 0, 0
}

// cmdSetBit replies with the bit before. It writes nothing if that is the same already, within the string.
func cmdSetBit(k *Key, args [][]byte, w *resp.Writer) error {
	at, ok := bitOffset(args[2], 0, k.MaxValue)
	if !ok {
		return refusal(errBitOffset)
	}
	on, ok := resp.ParseInt(args[3])
	if !ok || on&^1 != 0 {
		return refusal("ERR bit is not an integer or out of range")
	}
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	was := bitAt(k.Value, at)
	if was == on && k.Present && at>>3 < int64(len(k.Value)) {
		w.Int(was)
		return nil
	}
	b, err := k.lengthened(int(at>>3) + 1)
	if err != nil {
		return err
	}
	mask := byte(1) << (7 - at&7)
	if b[at>>3] &^= mask; on == 1 {
		b[at>>3] |= mask
	}
	k.set(b, k.Expires)
	w.Int(was)
	return nil
}

// cmdGetBit is 0 behind the string's end, however far, up to the longest string that there may be.
func cmdGetBit(k *Key, args [][]byte, w *resp.Writer) error {
	at, ok := bitOffset(args[2], 0, k.MaxValue)
	if !ok {
		return refusal(errBitOffset)
	}
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	w.Int(bitAt(k.Value, at-8*int64(k.From)))
	return nil
}

// bitRange is what BITCOUNT and BITPOS look at: the bits from lo to before hi.
type bitRange struct{ lo, hi int64 }

// newBitRange makes one of start and end, which count from the end if they are negative, in bytes or bits. Both are
// within the value afterwards; hi <= lo: there is nothing to look at.
func newBitRange(start, end int64, inBits bool, n int) bitRange {
	total := int64(n)
	if inBits {
		total *= 8
	}
	if start < 0 {
		start += total
	}
	if end < 0 {
		end += total
	}
	start, end = max(start, 0), min(max(end, 0), total-1)
	if start > end {
		return bitRange{}
	}
	if inBits {
		return bitRange{start, end + 1}
	}
	return bitRange{8 * start, 8 * (end + 1)}
}

func bitUnit(b []byte) (inBits, ok bool) { return Fold(b, "bit"), Fold(b, "bit") || Fold(b, "byte") }

// cmdBitCount looks at the key before most of its arguments, as Redis 7.0 does.
func cmdBitCount(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	r := bitRange{0, 8 * int64(len(k.Value))}
	switch {
	case !k.Present: // before anything is wrong with the arguments
		w.Int(0)
		return nil
	case len(args) == 4, len(args) == 5:
		start, ok1 := resp.ParseInt(args[2])
		end, ok2 := resp.ParseInt(args[3])
		if !ok1 || !ok2 {
			return ErrNotInt
		}
		if start < 0 && end < 0 && start > end {
			w.Int(0)
			return nil
		}
		inBits := false
		if len(args) == 5 {
			var ok bool
			if inBits, ok = bitUnit(args[4]); !ok {
				return ErrSyntax
			}
		}
		r = newBitRange(start, end, inBits, len(k.Value))
	case len(args) != 2:
		return ErrSyntax
	}
	w.Int(countBits(k.Value, r))
	return nil
}

// countBits counts eight bytes at a time between the edges.
// r lies within v.
func countBits(v []byte, r bitRange) (n int64) {
	if r.hi <= r.lo {
		return 0
	}
	first, last := r.lo>>3, (r.hi-1)>>3
	head, tail := byte(0xff)>>(r.lo&7), byte(0xff)<<(7-(r.hi-1)&7)
	if first == last {
		return int64(bits.OnesCount8(v[first] & head & tail))
	}
	n = int64(bits.OnesCount8(v[first]&head) + bits.OnesCount8(v[last]&tail))
	for v = v[first+1 : last]; len(v) >= 8; v = v[8:] {
		n += int64(bits.OnesCount64(binary.LittleEndian.Uint64(v)))
	}
	for _, b := range v {
		n += int64(bits.OnesCount8(b))
	}
	return n
}

// cmdBitPos is -1 if there is no such bit. A string that is not there is all 0: its first 0 is at 0, and it has no 1.
func cmdBitPos(k *Key, args [][]byte, w *resp.Writer) error {
	want, ok := resp.ParseInt(args[2])
	if !ok {
		return ErrNotInt
	}
	if want&^1 != 0 {
		return refusal("ERR The bit argument must be 1 or 0.")
	}
	if !k.Present {
		w.Int(-want)
		return nil
	}
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	r, endGiven := bitRange{0, 8 * int64(len(k.Value))}, false
	switch n := len(args); {
	case n > 6:
		return ErrSyntax
	case n > 3:
		start, ok := resp.ParseInt(args[3])
		if !ok {
			return ErrNotInt
		}
		inBits := false
		if n == 6 {
			if inBits, ok = bitUnit(args[5]); !ok {
				return ErrSyntax
			}
		}
		end := int64(len(k.Value)) - 1
		if n > 4 {
			if end, ok = resp.ParseInt(args[4]); !ok {
				return ErrNotInt
			}
			endGiven = true
		}
		r = newBitRange(start, end, inBits, len(k.Value))
	}
	at := findBit(k.Value, r, byte(want))
	// Zeros follow a string, unless the client said where to end.
	if at < 0 && want == 0 && !endGiven && r.hi > r.lo {
		at = r.hi
	}
	w.Int(at)
	return nil
}

// findBit is the first such bit; -1: there is none.
// It passes over whole bytes that do not have it.
func findBit(v []byte, r bitRange, want byte) int64 {
	skip := byte(0xff) * (1 - want) // a byte without the bit
	for at := r.lo; at < r.hi; {
		if at&7 == 0 && r.hi-at >= 8 && v[at>>3] == skip {
			at += 8
			continue
		}
		if v[at>>3]>>(7-at&7)&1 == want {
			return at
		}
		at++
	}
	return -1
}

// fieldOp is one operation of BITFIELD.
// kind is the first letter of GET, SET or INCRBY, and overflow that of WRAP, SAT or FAIL.
type fieldOp struct {
	kind     byte // 'g', 's' or 'i'
	overflow byte // 'w', 's' or 'f'
	signed   bool
	width    int   // bits, 1 to 64
	at       int64 // its first bit
	arg      int64 // of SET and INCRBY
}

// parseFieldOps reads the operations. end is how many bytes the value has at least when all are done, 0 if all of them
// read.
func parseFieldOps(args [][]byte, most int) (ops []fieldOp, end int, err error) {
	// OVERFLOW is about the operations behind it, up to the next one.
	overflow := byte('w')
	p := OptionsOf(args)
	for p.More() {
		op := fieldOp{overflow: overflow}
		switch {
		case p.Option("get", 2):
			op.kind = 'g'
		case p.Option("set", 3):
			op.kind = 's'
		case p.Option("incrby", 3):
			op.kind = 'i'
		case p.Option("overflow", 1):
			switch {
			case p.Flag("wrap"):
				overflow = 'w'
			case p.Flag("sat"):
				overflow = 's'
			case p.Flag("fail"):
				overflow = 'f'
			default:
				p.Refuse("ERR Invalid OVERFLOW type specified")
			}
			continue
		default:
			p.Wrong()
		}
		op.parse(&p, most)
		if op.kind != 'g' {
			// Only operations that write make the string longer, even if what they write is 0.
			end = max(end, int((op.at+int64(op.width)-1)>>3)+1)
		}
		ops = append(ops, op)
	}
	return ops, end, p.End()
}

// parse reads what is behind the operation's name.
func (o *fieldOp) parse(p *args.Parser, most int) {
	var ok bool
	if o.signed, o.width, ok = fieldType(p.Str()); !ok {
		p.Refuse("ERR Invalid bitfield type. Use something like i16 u8. Note that u64 is not supported but i64 is.")
	}
	if o.at, ok = bitOffset(p.Str(), o.width, most); !ok {
		p.Refuse(errBitOffset)
	}
	if o.kind != 'g' {
		o.arg = p.Int()
	}
}

// fieldType reads i1 to i64 and u1 to u63.
// Redis has no u64, since replies are signed integers of 64 bits.
func fieldType(b []byte) (signed bool, width int, ok bool) {
	if len(b) == 0 || b[0] != 'i' && b[0] != 'u' {
		return false, 0, false
	}
	signed = b[0] == 'i'
	b, _, _ = bytes.Cut(b[1:], []byte{0}) // a C string in Redis
	n, ok := resp.ParseInt(b)
	if !ok || n < 1 || n > 64 || n == 64 && !signed {
		return false, 0, false
	}
	return signed, int(n), true
}

// cmdBitFieldRO is a read to the store, while BITFIELD is an update even if it only reads.
func cmdBitFieldRO(k *Key, args [][]byte, w *resp.Writer) error { return bitField(k, args, w, true) }
func cmdBitField(k *Key, args [][]byte, w *resp.Writer) error   { return bitField(k, args, w, false) }

// bitField checks all of the operations before it performs the first one.
// Operations see what those before them have done. The string is made as long as the last of them needs, even if that
// fails.
func bitField(k *Key, args [][]byte, w *resp.Writer, readOnly bool) error {
	ops, end, err := parseFieldOps(args[2:], k.MaxValue)
	if err != nil {
		return err
	}
	if readOnly && end > 0 {
		return refusal("ERR BITFIELD_RO only supports the GET subcommand")
	}
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	v := k.Value
	if end > 0 {
		var err error
		if end > k.MaxValue {
			return refusal(errBitOffset)
		}
		if v, err = k.lengthened(end); err != nil {
			return err
		}
		k.set(v, k.Expires)
	}
	w.Array(len(ops))
	for i := range ops {
		if n, ok := ops[i].perform(v); ok {
			w.Int(n)
		} else {
			w.Null()
		}
	}
	return nil
}

// perform returns the reply; not ok: the new value overflows, and nothing was done.
// v is changed in place. SET replies with the old value, and INCRBY with the new one.
func (o *fieldOp) perform(v []byte) (int64, bool) {
	old := getField(v, o.at, o.width)
	if o.signed && o.width < 64 && old>>(o.width-1) == 1 {
		old |= ^uint64(0) << o.width
	}
	if o.kind == 'g' {
		return int64(old), true
	}
	base, incr := old, o.arg
	if o.kind == 's' {
		base, incr = uint64(o.arg), 0
	}
	var now uint64
	var over bool
	if o.signed {
		now, over = o.addSigned(int64(base), incr)
	} else {
		now, over = o.addUnsigned(base, incr)
	}
	if over && o.overflow == 'f' {
		return 0, false
	}
	setField(v, o.at, o.width, now)
	if o.kind == 's' {
		return int64(old), true
	}
	return int64(now), true
}

// addUnsigned and addSigned do what the operation wants if the sum does not fit.
func (o *fieldOp) addUnsigned(v uint64, incr int64) (sum uint64, over bool) {
	// high and low say beyond which end the exact sum would be; sum itself may have wrapped around.
	most := uint64(1)<<o.width - 1
	sum = v + uint64(incr)
	high := v > most || incr > 0 && uint64(incr) > most-v
	low := !high && incr < 0 && -uint64(incr) > v
	switch {
	case !high && !low:
		return sum, false
	case o.overflow == 'w':
		return sum & most, true
	case high:
		return most, true
	}
	return 0, true
}

// addSigned takes and returns signed integers: sum has the bits of one, of which setField takes as many as the field is
// wide.
func (o *fieldOp) addSigned(v, incr int64) (sum uint64, over bool) {
	most := int64(uint64(1)<<(o.width-1) - 1)
	least := -most - 1
	// The differences wrap around for a v that is far out of range, and the result is then Redis's, too.
	high := v > most || (o.width != 64 || v >= 0 && incr > 0) && incr > most-v
	low := !high && (v < least || (o.width != 64 || v < 0 && incr < 0) && incr < least-v)
	sum = uint64(v) + uint64(incr)
	switch {
	case !high && !low:
		return sum, false
	case o.overflow == 'w' && o.width < 64:
		shift := 64 - o.width
		return uint64(int64(sum<<shift) >> shift), true
	case o.overflow == 'w':
		return sum, true
	case high:
		return uint64(most), true
	}
	return uint64(least), true
}

// getField is the integer of so many bits at a place.
func getField(v []byte, at int64, width int) (n uint64) {
	for i := range int64(width) {
		n = n<<1 | uint64(bitAt(v, at+i))
	}
	return n
}

// setField writes the low bits of n there, the highest of them first. v is long enough.
func setField(v []byte, at int64, width int, n uint64) {
	for i := range int64(width) {
		p := at + i
		mask := byte(1) << (7 - p&7)
		if v[p>>3] &^= mask; n>>(int64(width)-1-i)&1 == 1 {
			v[p>>3] |= mask
		}
	}
}

// cmdBitOp writes the longest of the lengths; shorter values go on with zeros.
// It replies with that length in bytes, and deletes the destination if it is 0. The expiry goes, as with SET.
func cmdBitOp(t Keys, args [][]byte, w *resp.Writer) error {
	op, dest, names := args[1], args[2], args[3:]
	switch {
	case Fold(op, "and"), Fold(op, "or"), Fold(op, "xor"):
	case !Fold(op, "not"):
		return ErrSyntax
	case len(names) != 1:
		return refusal("ERR BITOP NOT must be called with a single source key.")
	}
	t.Load(names...)
	n := 0
	for _, name := range names {
		k := t.Key(name)
		if err := k.typed(client.Plain); err != nil {
			return err
		}
		n = max(n, len(k.Value))
	}
	d := t.Key(dest)
	if n == 0 {
		if d.Present {
			d.Delete()
			t.Name(d, OnGeneric, "del")
		}
		w.Int(0)
		return nil
	}
	if n > d.Room {
		d.Want = n
		return ErrRoom
	}
	// The sources stay as they are; the destination may be one of them.
	out := make([]byte, n)
	copy(out, t.Key(names[0]).Value)
	for _, name := range names[1:] {
		combineBits(op[0]|0x20, out, t.Key(name).Value)
	}
	if Fold(op, "not") {
		for i := range out {
			out[i] = ^out[i]
		}
	}
	d.Flags = 0
	d.SetAs(client.Plain, out, 0)
	w.Int(int64(n))
	return nil
}

// combineBits makes dst the and, or, or xor of itself and src.
// src is no longer than dst, and goes on with zeros.
func combineBits(op byte, dst, src []byte) {
	switch op {
	case 'a':
		for i := range src {
			dst[i] &= src[i]
		}
		clear(dst[len(src):])
	case 'o':
		for i := range src {
			dst[i] |= src[i]
		}
	case 'x':
		for i := range src {
			dst[i] ^= src[i]
		}
	}
}
