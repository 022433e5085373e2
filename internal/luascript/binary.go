package luascript

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"strings"

	lua "github.com/yuin/gopher-lua"
)

// argBits is a number as the 32 bits that bit works on: those at the low end of the double that the number becomes by
// adding 2^52 + 2^51, whatever the number is.
func argBits(L *lua.LState, n int) uint32 {
	return uint32(math.Float64bits(argNumber(L, n) + 6755399441055744))
}

func (s *sandbox) bitLibrary() library {
	push := func(L *lua.LState, v uint32) int { L.Push(lua.LNumber(int32(v))); return 1 }
	fold := func(f func(a, b uint32) uint32) lua.LGFunction {
		return func(L *lua.LState) int {
			v := argBits(L, 1)
			for i := 2; i <= L.GetTop(); i++ {
				v = f(v, argBits(L, i))
			}
			return push(L, v)
		}
	}
	shift := func(f func(v uint32, n int) uint32) lua.LGFunction {
		return func(L *lua.LState) int { return push(L, f(argBits(L, 1), int(argBits(L, 2)&31))) }
	}
	return library{
		"tobit":   func(L *lua.LState) int { return push(L, argBits(L, 1)) },
		"bnot":    func(L *lua.LState) int { return push(L, ^argBits(L, 1)) },
		"bswap":   func(L *lua.LState) int { return push(L, bits.ReverseBytes32(argBits(L, 1))) },
		"band":    fold(func(a, b uint32) uint32 { return a & b }),
		"bor":     fold(func(a, b uint32) uint32 { return a | b }),
		"bxor":    fold(func(a, b uint32) uint32 { return a ^ b }),
		"lshift":  shift(func(v uint32, n int) uint32 { return v << n }),
		"rshift":  shift(func(v uint32, n int) uint32 { return v >> n }),
		"arshift": shift(func(v uint32, n int) uint32 { return uint32(int32(v) >> n) }),
		"rol":     shift(bits.RotateLeft32),
		"ror":     shift(func(v uint32, n int) uint32 { return bits.RotateLeft32(v, -n) }),
		"tohex": func(L *lua.LState) int {
			v, n := argBits(L, 1), 8
			form := "%08x"
			if L.Get(2) != lua.LNil {
				if n = int(int32(argBits(L, 2))); n < 0 {
					n, form = -n, "%08X"
				}
			}
			text := fmt.Sprintf(form, v)
			L.Push(lua.LString(text[8-min(max(n, 0), 8):]))
			return 1
		},
	}
}

func (s *sandbox) structLibrary() library {
	return library{"pack": s.structPack, "unpack": s.structUnpack, "size": s.structSize}
}

// maxIntSize is the longest integer of a format, maxStructSize what numbers in it go up to.
const maxIntSize, maxStructSize = 32, math.MaxInt32

// structFormat reads a format, item by item.
type structFormat struct {
	L     *lua.LState
	text  string
	order binary.ByteOrder
	align int
}

// next is the next item, its size and how much padding is before it if so many bytes are behind; opt is 0 at the end.
func (f *structFormat) next(total int) (opt byte, size, pad int) {
	for f.text != "" {
		opt, f.text = f.text[0], f.text[1:]
		switch opt {
		case 'b', 'B', 'x':
			size = 1
		case 'h', 'H':
			size = 2
		case 'l', 'L', 'T', 'd':
			size = 8
		case 'f':
			size = 4
		case 'c':
			return opt, f.number(1), 0
		case 'i', 'I':
			if size = f.number(4); size > maxIntSize {
				f.L.RaiseError("integral size %d is larger than limit of %d", size, maxIntSize)
			}
		case 's':
			return opt, 0, 0
		case ' ':
			continue
		case '<':
			f.order = binary.LittleEndian
			continue
		case '>':
			f.order = binary.BigEndian
			continue
		case '!':
			if f.align = f.number(8); f.align == 0 || f.align&(f.align-1) != 0 {
				f.L.RaiseError("alignment %d is not a power of 2", f.align)
			}
			continue
		default:
			f.L.ArgError(1, "invalid format option '"+string([]byte{opt})+"'")
		}
		if a := min(size, f.align); a > 1 {
			pad = (a - total&(a-1)) & (a - 1)
		}
		return opt, size, pad
	}
	return 0, 0, 0
}

// number is the one that follows an option.
func (f *structFormat) number(otherwise int) int {
	if f.text == "" || !isDigit(f.text[0]) {
		return otherwise
	}
	n := 0
	for f.text != "" && isDigit(f.text[0]) {
		d := int(f.text[0] - '0')
		if n > (maxStructSize-d)/10 {
			f.L.RaiseError("integral size overflow")
		}
		n = 10*n + d
		f.text = f.text[1:]
	}
	return n
}

func (s *sandbox) newFormat(L *lua.LState) *structFormat {
	return &structFormat{L: L, text: argString(L, 1), order: binary.LittleEndian, align: 1}
}

func (s *sandbox) structPack(L *lua.LState) int {
	f := s.newFormat(L)
	x := &builder{s: s, L: L}
	defer s.resetPending(s.pending)
	arg := 1
	for {
		opt, size, pad := f.next(len(x.b))
		if opt == 0 {
			break
		}
		s.step(L)
		x.fill(0, pad)
		if opt == 'x' {
			x.byte(0)
			continue
		}
		arg++
		switch opt {
		case 'f':
			v := math.Float32bits(float32(argNumber(L, arg)))
			x.room(4)
			x.b = appendInteger(x.b, f.order, uint64(v), 4)
		case 'd':
			x.room(8)
			x.b = appendInteger(x.b, f.order, math.Float64bits(argNumber(L, arg)), 8)
		case 'c', 's':
			text := argString(L, arg)
			if size == 0 {
				size = len(text)
			}
			if len(text) < size {
				L.ArgError(arg+1, "string too short") // which Redis counts so
			}
			s.work(L, size)
			if x.text(text[:size]); opt == 's' {
				x.byte(0)
			}
		default:
			n := argNumber(L, arg)
			v := unsigned(n)
			x.room(size)
			x.b = appendInteger(x.b, f.order, v, size)
		}
	}
	return x.push()
}

// appendInteger appends the low bytes of an integer, and zeros beyond them, as C's shifts have it.
func appendInteger(b []byte, order binary.ByteOrder, v uint64, size int) []byte {
	at := len(b)
	b = append(b, make([]byte, size)...) // at most maxIntSize
	for i := range size {
		k := at + i
		if order == binary.BigEndian {
			k = at + size - 1 - i
		}
		b[k] = byte(v)
		v >>= 8
	}
	return b
}

func (s *sandbox) structUnpack(L *lua.LState) int {
	f := s.newFormat(L)
	data := argString(L, 2)
	at := optInt(L, 3, 1) - 1
	if at < 0 {
		L.ArgError(3, "offset must be 1 or greater")
	}
	need := func(size int) {
		if size > len(data) || at > len(data)-size {
			L.ArgError(2, "data string too short")
		}
	}
	n := 0
	for {
		opt, size, pad := f.next(at)
		if opt == 0 {
			break
		}
		s.step(L)
		at += pad
		need(size)
		if n > maxUnpacked {
			L.RaiseError("too many results to unpack")
		}
		switch opt {
		case 'x':
			at++
			continue
		case 'f':
			L.Push(lua.LNumber(math.Float32frombits(uint32(readInteger(data[at:at+4], f.order)))))
		case 'd':
			L.Push(lua.LNumber(math.Float64frombits(readInteger(data[at:at+8], f.order))))
		case 'c':
			if size == 0 {
				v, is := L.Get(-1).(lua.LNumber)
				if n == 0 || !is {
					L.RaiseError("format 'c0' needs a previous size")
				}
				L.Pop(1)
				n--
				if size = truncated(float64(v)); size < 0 {
					size = math.MaxInt
				}
				need(size)
			}
			L.Push(s.part(L, data, at, at+size))
		case 's':
			end := strings.IndexByte(data[at:], 0)
			if end < 0 {
				L.RaiseError("unfinished string in data")
			}
			L.Push(s.part(L, data, at, at+end))
			size = end + 1
		default:
			v := readInteger(data[at:at+size], f.order)
			if opt >= 'a' {
				if bit := size*8 - 1; bit < 63 && bit >= 0 && v>>bit&1 != 0 {
					v |= ^uint64(0) << bit
				}
				L.Push(lua.LNumber(int64(v)))
			} else {
				L.Push(lua.LNumber(v))
			}
		}
		n++
		at += size
	}
	L.Push(lua.LNumber(at + 1))
	return n + 1
}

// readInteger reads the integer that the bytes are; of more than eight the low ones count.
func readInteger(b string, order binary.ByteOrder) (v uint64) {
	for i := range len(b) {
		c := b[len(b)-1-i]
		if order == binary.BigEndian {
			c = b[i]
		}
		v = v<<8 | uint64(c)
	}
	return v
}

func (s *sandbox) structSize(L *lua.LState) int {
	f := s.newFormat(L)
	total := 0
	for {
		opt, size, pad := f.next(total)
		switch {
		case opt == 0:
			L.Push(lua.LNumber(total))
			return 1
		case opt == 's':
			L.ArgError(1, "option 's' has no fixed size")
		case opt == 'c' && size == 0:
			L.ArgError(1, "option 'c0' has no fixed size")
		}
		if total += pad + size; total > maxStructSize {
			L.RaiseError("format result too large")
		}
	}
}

// maxPackDepth is lua-cmsgpack's: deeper tables are packed as nil. maxUnpackDepth bounds the tables of an input.
const maxPackDepth, maxUnpackDepth = 16, 1000

func (s *sandbox) messageLibrary() library {
	return library{
		"pack": s.messagePack,
		"unpack": func(L *lua.LState) int {
			return s.messageUnpack(L, 0, 0)
		},
		"unpack_one": func(L *lua.LState) int { return s.messageUnpack(L, 1, optInt(L, 2, 0)) },
		"unpack_limit": func(L *lua.LState) int {
			limit, offset := argInt(L, 2), optInt(L, 3, 0)
			return s.messageUnpack(L, limit, offset)
		},
	}
}

func (s *sandbox) messagePack(L *lua.LState) int {
	n := L.GetTop()
	if n == 0 {
		L.ArgError(0, "MessagePack pack needs input.")
	}
	x := &builder{s: s, L: L}
	defer s.resetPending(s.pending)
	for i := 1; i <= n; i++ {
		s.appendMessage(x, L.Get(i), 0)
	}
	return x.push()
}

// maxMessageHead is the longest head of a value.
const maxMessageHead = 9

func (s *sandbox) appendMessage(x *builder, v lua.LValue, depth int) {
	s.step(x.L)
	x.room(maxMessageHead)
	switch v := v.(type) {
	case lua.LString:
		n := len(v)
		s.work(x.L, n)
		x.room(maxMessageHead + n)
		switch {
		case n < 32:
			x.b = append(x.b, 0xa0|byte(n))
		case n <= 0xff:
			x.b = append(x.b, 0xd9, byte(n))
		case n <= 0xffff:
			x.b = binary.BigEndian.AppendUint16(append(x.b, 0xda), uint16(n))
		default:
			x.b = binary.BigEndian.AppendUint32(append(x.b, 0xdb), uint32(n))
		}
		x.b = append(x.b, v...)
	case lua.LBool:
		if v {
			x.byte(0xc3)
		} else {
			x.byte(0xc2)
		}
	case lua.LNumber:
		f := float64(v)
		switch {
		case f == math.Trunc(f) && f >= -1<<63 && f < 1<<63:
			x.b = appendMessageInt(x.b, int64(f))
		case float64(float32(f)) == f || f != f:
			x.b = binary.BigEndian.AppendUint32(append(x.b, 0xca), math.Float32bits(float32(f)))
		default:
			x.b = binary.BigEndian.AppendUint64(append(x.b, 0xcb), math.Float64bits(f))
		}
	case *lua.LTable:
		if depth < maxPackDepth {
			s.appendMessageTable(x, s.contents(v), depth+1)
		} else {
			x.byte(0xc0)
		}
	default:
		x.byte(0xc0)
	}
}

func appendMessageInt(b []byte, n int64) []byte {
	switch {
	case n >= -32 && n <= 127:
		return append(b, byte(n))
	case n >= 0 && n <= 0xff:
		return append(b, 0xcc, byte(n))
	case n >= 0 && n <= 0xffff:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(n))
	case n >= 0 && n <= 0xffffffff:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(n))
	case n >= 0:
		return binary.BigEndian.AppendUint64(append(b, 0xcf), uint64(n))
	case n >= -128:
		return append(b, 0xd0, byte(n))
	case n >= -32768:
		return binary.BigEndian.AppendUint16(append(b, 0xd1), uint16(n))
	case n >= math.MinInt32:
		return binary.BigEndian.AppendUint32(append(b, 0xd2), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xd3), uint64(n))
}

func (s *sandbox) appendMessageTable(x *builder, t *lua.LTable, depth int) {
	count, most, array := 0, 0, true
	for k, _ := t.Next(lua.LNil); k != lua.LNil; k, _ = t.Next(k) {
		s.step(x.L)
		n, is := k.(lua.LNumber)
		if !is || n <= 0 || n != lua.LNumber(math.Floor(float64(n))) {
			array = false
		} else {
			most = max(most, truncated(float64(n)))
		}
		count++
	}
	head := func(fix, short, long byte) {
		x.room(maxMessageHead)
		switch {
		case count <= 15:
			x.b = append(x.b, fix|byte(count))
		case count <= 0xffff:
			x.b = binary.BigEndian.AppendUint16(append(x.b, short), uint16(count))
		default:
			x.b = binary.BigEndian.AppendUint32(append(x.b, long), uint32(count))
		}
	}
	if array && most == count {
		head(0x90, 0xdc, 0xdd)
		for i := 1; i <= count; i++ {
			s.appendMessage(x, rawIndex(t, i), depth)
		}
		return
	}
	head(0x80, 0xde, 0xdf)
	for k, v := t.Next(lua.LNil); k != lua.LNil; k, v = t.Next(k) {
		s.appendMessage(x, k, depth)
		s.appendMessage(x, v, depth)
	}
}

// messageUnpack pushes the values of a string, up to limit of them (0: all), and before them, if there is a limit, the
// offset behind them, -1 at the end.
func (s *sandbox) messageUnpack(L *lua.LState, limit, offset int) int {
	src := argString(L, 1)
	all := limit == 0 && offset == 0
	switch {
	case offset < 0 || limit < 0:
		L.RaiseError("Invalid request to unpack with offset of %d and limit of %d.", offset, len(src))
	case offset > len(src):
		L.RaiseError("Start offset %d greater than input length %d.", offset, len(src))
	}
	defer s.resetPending(s.pending)
	d := &messageDecoder{s: s, L: L, src: src, at: offset}
	var out []lua.LValue
	for d.at < len(src) && (all || len(out) < limit) {
		if len(out) > maxUnpacked {
			L.RaiseError("too many results to unpack")
		}
		out = append(out, d.value(0))
	}
	n := len(out)
	if !all {
		end := d.at
		if end >= len(src) {
			end = -1
		}
		L.Push(lua.LNumber(end))
		n++
	}
	for _, v := range out {
		L.Push(v)
	}
	return n
}

type messageDecoder struct {
	s   *sandbox
	L   *lua.LState
	src string
	at  int
}

// take is the next n bytes.
func (d *messageDecoder) take(n int) string {
	if n > len(d.src)-d.at {
		d.L.RaiseError("Missing bytes in input.")
	}
	d.at += n
	return d.src[d.at-n : d.at]
}

func (d *messageDecoder) uint(bytes int) uint64 { return readInteger(d.take(bytes), binary.BigEndian) }

func (d *messageDecoder) text(n uint64) lua.LValue {
	t := d.take(int(min(n, math.MaxInt32*4)))
	d.s.work(d.L, len(t))
	d.s.grow(d.L, len(t)+16)
	return lua.LString(strings.Clone(t))
}

// value is the next one, within so many others.
func (d *messageDecoder) value(depth int) lua.LValue {
	d.s.step(d.L)
	if depth > maxUnpackDepth {
		d.L.RaiseError("stack overflow (in function mp_decode_to_lua_type)")
	}
	switch c := d.take(1)[0]; {
	case c < 0x80:
		return lua.LNumber(c)
	case c < 0x90:
		return d.hash(uint64(c&15), depth)
	case c < 0xa0:
		return d.array(uint64(c&15), depth)
	case c < 0xc0:
		return d.text(uint64(c & 31))
	case c >= 0xe0:
		return lua.LNumber(int8(c))
	case c == 0xc0:
		return lua.LNil
	case c == 0xc2, c == 0xc3:
		return lua.LBool(c == 0xc3)
	case c >= 0xc4 && c <= 0xc6:
		return d.text(d.uint(1 << (c - 0xc4)))
	case c == 0xca:
		return lua.LNumber(math.Float32frombits(uint32(d.uint(4))))
	case c == 0xcb:
		return lua.LNumber(math.Float64frombits(d.uint(8)))
	case c >= 0xcc && c <= 0xcf:
		return lua.LNumber(d.uint(1 << (c - 0xcc)))
	case c >= 0xd0 && c <= 0xd3:
		size := 1 << (c - 0xd0)
		shift := 64 - 8*size
		return lua.LNumber(int64(d.uint(size)<<shift) >> shift)
	case c >= 0xd9 && c <= 0xdb:
		return d.text(d.uint(1 << (c - 0xd9)))
	case c == 0xdc, c == 0xdd:
		return d.array(d.uint(2<<(c-0xdc)), depth)
	case c == 0xde, c == 0xdf:
		return d.hash(d.uint(2<<(c-0xde)), depth)
	}
	d.L.RaiseError("Bad data format in input.")
	return lua.LNil
}

// array and hash charge for entries as they come, since a length costs the input nothing.
func (d *messageDecoder) array(n uint64, depth int) lua.LValue {
	d.s.grow(d.L, 160)
	t := d.L.CreateTable(0, 0)
	for i := range n {
		d.s.grow(d.L, 32)
		t.RawSetInt(int(i)+1, d.value(depth+1))
	}
	return t
}

func (d *messageDecoder) hash(n uint64, depth int) lua.LValue {
	d.s.grow(d.L, tableCost)
	t := d.L.CreateTable(0, 0)
	for range n {
		k := d.value(depth + 1)
		v := d.value(depth + 1)
		d.s.grow(d.L, entryCost)
		if i, is := k.(lua.LNumber); is {
			d.s.chargeIndex(d.L, t, i)
		}
		d.L.RawSet(t, k, v)
	}
	return t
}
