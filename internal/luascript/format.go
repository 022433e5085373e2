package luascript

import (
	"fmt"
	"strconv"
	"strings"

	lua "github.com/yuin/gopher-lua"
)

func (s *sandbox) stringFormat(L *lua.LState) int {
	format := argString(L, 1)
	x := &builder{s: s, L: L}
	defer s.resetPending(s.pending)
	arg := 1
	for i := 0; i < len(format); i++ {
		s.step(L)
		if format[i] != '%' {
			x.byte(format[i])
			continue
		}
		i++
		if i < len(format) && format[i] == '%' {
			x.byte('%')
			continue
		}
		start := i
		for i < len(format) && strings.IndexByte("-+ #0", format[i]) >= 0 {
			i++
		}
		if i-start >= 6 {
			L.RaiseError("invalid format (repeated flags)")
		}
		for digits := 0; i < len(format) && digits < 2 && isDigit(format[i]); digits++ {
			i++
		}
		precise := false
		if i < len(format) && format[i] == '.' {
			precise = true
			i++
			for digits := 0; i < len(format) && digits < 2 && isDigit(format[i]); digits++ {
				i++
			}
		}
		if i < len(format) && isDigit(format[i]) {
			L.RaiseError("invalid format (width or precision too long)")
		}
		if i >= len(format) {
			L.RaiseError("invalid option '%%%s' to 'format'", "")
		}
		arg++
		s.formatArg(x, format[start:i], format[i], precise, arg)
	}
	return x.push()
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// formatArg appends an argument in one of C's formats, which are Go's where it counts.
func (s *sandbox) formatArg(x *builder, flags string, verb byte, precise bool, arg int) {
	L := x.L
	var room [128]byte
	number := func(form string, v any) { x.bytes(fmt.Appendf(room[:0], form, v)) }
	if arg > L.GetTop() {
		L.ArgError(arg, "no value")
	}
	switch verb {
	case 'c':
		x.padded(flags, string([]byte{byte(argInt(L, arg))}))
	case 'd', 'i':
		n := int64(argInt(L, arg))
		number("%"+strings.ReplaceAll(flags, "#", "")+"d", n)
	case 'u':
		number("%"+strings.NewReplacer("#", "", "+", "", " ", "").Replace(flags)+"d", unsigned(argNumber(L, arg)))
	case 'o', 'x', 'X':
		n := unsigned(argNumber(L, arg))
		if n == 0 {
			flags = strings.ReplaceAll(flags, "#", "")
		}
		number("%"+strings.NewReplacer("+", "", " ", "").Replace(flags)+string(verb), n)
	case 'e', 'E', 'f', 'g', 'G':
		f := argNumber(L, arg)
		if f-f != 0 { // infinite, or no number
			text := formatG(f, 6)
			if verb < 'a' {
				text = strings.ToUpper(text)
			}
			x.padded(strings.ReplaceAll(strings.SplitN(flags, ".", 2)[0], "0", ""), text)
			return
		}
		if !precise {
			flags += ".6"
		}
		number("%"+flags+string(verb), f)
	case 'q':
		x.quoted(argString(L, arg))
	case 's':
		text := argString(L, arg)
		if precise {
			dot := strings.IndexByte(flags, '.')
			n, _ := strconv.Atoi(flags[dot+1:])
			flags, text = flags[:dot], text[:min(n, len(text))]
		}
		x.padded(flags, text)
	default:
		L.RaiseError("invalid option '%%%s' to 'format'", flags+string(verb))
	}
}

// unsigned is what C makes of a number for %x.
func unsigned(f float64) uint64 {
	if f >= 1<<63 {
		return uint64(truncated(f-1<<63)) ^ 1<<63
	}
	return uint64(truncated(f))
}

// padded adds a string in the width of the flags, counted in bytes.
func (x *builder) padded(flags, text string) {
	left := strings.Contains(flags, "-")
	width, _ := strconv.Atoi(strings.TrimLeft(flags, "-+ #0"))
	x.room(max(width, len(text)))
	if !left {
		x.fill(' ', width-len(text))
	}
	x.text(text)
	if left {
		x.fill(' ', width-len(text))
	}
	x.s.work(x.L, len(text))
}

// quoted adds a string as Lua's source has it.
func (x *builder) quoted(text string) {
	size := len(text) + 2
	for _, c := range []byte(text) {
		switch c {
		case '"', '\\', '\n', '\r':
			size++
		case 0:
			size += 3
		}
	}
	x.room(size)
	x.b = append(x.b, '"')
	for i := range len(text) {
		x.s.step(x.L)
		switch c := text[i]; c {
		case '"', '\\', '\n':
			x.b = append(x.b, '\\', c)
		case '\r':
			x.b = append(x.b, `\r`...)
		case 0:
			x.b = append(x.b, `\000`...)
		default:
			x.b = append(x.b, c)
		}
	}
	x.b = append(x.b, '"')
}
