package luascript

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	lua "github.com/yuin/gopher-lua"

	"github.com/kvd-project/kvd/internal/number"
)

// jsonLimits are the settings of cjson, which begin anew with each run, or of what cjson.new has made.
type jsonLimits struct {
	encodeDepth, decodeDepth    int
	precision                   int
	sparseConvert               bool
	sparseRatio, sparseSafe     int
	encodeInvalid, encodeAsNull bool
	decodeInvalid               bool
}

var defaultJSONLimits = jsonLimits{encodeDepth: 1000, decodeDepth: 1000, precision: 14, sparseRatio: 2, sparseSafe: 10,
	decodeInvalid: true}

// maxJSONDepth bounds the depths that a script may ask for.
const maxJSONDepth = 10_000

// jsonLibrary is cjson with settings that it keeps in c.
func (s *sandbox) jsonLibrary(c *jsonLimits) library {
	setting := func(n *int, least, most int) lua.LGFunction {
		return func(L *lua.LState) int {
			if L.Get(1) != lua.LNil {
				v := argInt(L, 1)
				if v < least || v > most {
					L.ArgError(1, fmt.Sprintf("expected integer between %d and %d", least, most))
				}
				*n = v
			}
			L.Push(lua.LNumber(*n))
			return 1
		}
	}
	return library{
		"encode": func(L *lua.LState) int {
			return s.jsonEncode(L, c)
		}, "decode": func(L *lua.LState) int { return s.jsonDecode(L, c) },
		"encode_max_depth":        setting(&c.encodeDepth, 1, maxJSONDepth),
		"decode_max_depth":        setting(&c.decodeDepth, 1, maxJSONDepth),
		"encode_number_precision": setting(&c.precision, 1, 14),
		"encode_keep_buffer": func(L *lua.LState) int {
			keep := true // to no effect
			option(L, &keep)
			L.Push(lua.LBool(keep))
			return 1
		},
		"encode_invalid_numbers": func(L *lua.LState) int {
			if L.Get(1) == lua.LString("null") {
				c.encodeAsNull, c.encodeInvalid = true, false
			} else if L.Get(1) != lua.LNil {
				option(L, &c.encodeInvalid)
				c.encodeAsNull = false
			}
			if c.encodeAsNull {
				L.Push(lua.LString("null"))
			} else {
				L.Push(lua.LBool(c.encodeInvalid))
			}
			return 1
		},
		"decode_invalid_numbers": func(L *lua.LState) int {
			option(L, &c.decodeInvalid)
			L.Push(lua.LBool(c.decodeInvalid))
			return 1
		},
		"encode_sparse_array": func(L *lua.LState) int {
			option(L, &c.sparseConvert)
			c.sparseRatio, c.sparseSafe = max(optInt(L, 2, c.sparseRatio), 0), max(optInt(L, 3, c.sparseSafe), 0)
			L.Push(lua.LBool(c.sparseConvert))
			L.Push(lua.LNumber(c.sparseRatio))
			L.Push(lua.LNumber(c.sparseSafe))
			return 3
		},
		"new": func(L *lua.LState) int {
			own := defaultJSONLimits
			t := L.NewTable()
			s.charge(L, 4*tableCost)
			s.fillJSON(t, &own)
			L.Push(t)
			return 1
		},
	}
}

// option reads the first argument as cjson reads what is on or off, and leaves the setting alone if there is none.
func option(L *lua.LState, setting *bool) {
	switch v := L.Get(1).(type) {
	case *lua.LNilType:
	case lua.LBool:
		*setting = bool(v)
	default:
		text := argString(L, 1)
		if text != "on" && text != "off" {
			L.ArgError(1, "invalid option '"+text+"'")
		}
		*setting = text == "on"
	}
}

// fillJSON makes a table cjson, with settings that are kept in c.
func (s *sandbox) fillJSON(t *lua.LTable, c *jsonLimits) *lua.LTable {
	s.L.SetFuncs(t, s.jsonLibrary(c))
	t.RawSetString("null", s.null)
	t.RawSetString("_NAME", lua.LString("cjson"))
	t.RawSetString("_VERSION", lua.LString("2.1.0"))
	return t
}

type jsonEncoder struct {
	*builder
	*jsonLimits
}

func (s *sandbox) jsonEncode(L *lua.LState, c *jsonLimits) int {
	if L.GetTop() != 1 {
		L.ArgError(1, "expected 1 argument")
	}
	e := &jsonEncoder{&builder{s: s, L: L}, c}
	defer s.resetPending(s.pending)
	e.append(L.Get(1), 0)
	return e.push()
}

// append appends a value within so many tables.
func (e *jsonEncoder) append(v lua.LValue, depth int) {
	e.s.step(e.L)
	switch v := v.(type) {
	case lua.LString:
		e.quote(string(v))
	case lua.LNumber:
		e.appendNumber(v)
	case lua.LBool:
		e.text(strconv.FormatBool(bool(v)))
	case *lua.LNilType, *lua.LUserData:
		e.text("null")
	case *lua.LTable:
		if depth++; depth > e.encodeDepth {
			e.L.RaiseError("Cannot serialise, excessive nesting (%d)", depth)
		}
		e.appendTable(v, depth)
	default:
		e.L.RaiseError("Cannot serialise %s: type not supported", v.Type().String())
	}
}

func (e *jsonEncoder) appendNumber(n lua.LNumber) {
	if f := float64(n); f-f != 0 {
		switch {
		case e.encodeAsNull:
			e.text("null")
			return
		case !e.encodeInvalid:
			e.L.RaiseError("Cannot serialise number: must not be NaN or Inf")
		case f != f:
			e.text("nan") // whatever its sign
			return
		}
	}
	e.text(formatG(float64(n), e.precision))
}

func (e *jsonEncoder) appendTable(t *lua.LTable, depth int) {
	t = e.s.contents(t)
	if n := e.arrayLen(t); n > 0 {
		e.byte('[')
		for i := 1; i <= n; i++ {
			if i > 1 {
				e.byte(',')
			}
			e.append(rawIndex(t, i), depth)
		}
		e.byte(']')
		return
	}
	e.byte('{')
	first := true
	for k, v := t.Next(lua.LNil); k != lua.LNil; k, v = t.Next(k) {
		if !first {
			e.byte(',')
		}
		first = false
		switch k := k.(type) {
		case lua.LString:
			e.quote(string(k))
		case lua.LNumber:
			e.byte('"')
			e.appendNumber(k)
			e.byte('"')
		default:
			e.L.RaiseError("Cannot serialise %s: table key must be a number or string", k.Type().String())
		}
		e.byte(':')
		e.append(v, depth)
	}
	e.byte('}')
}

// arrayLen is the length of a table whose keys are all integers from 1 on, 0 for others.
func (e *jsonEncoder) arrayLen(t *lua.LTable) int {
	most, items := 0, 0
	for k, _ := t.Next(lua.LNil); k != lua.LNil; k, _ = t.Next(k) {
		e.s.step(e.L)
		n, is := k.(lua.LNumber)
		if !is || n < 1 || n != lua.LNumber(math.Floor(float64(n))) {
			return 0
		}
		most = max(most, truncated(float64(n)))
		items++
	}
	if e.sparseRatio > 0 && most > items*e.sparseRatio && most > e.sparseSafe {
		if !e.sparseConvert {
			e.L.RaiseError("Cannot serialise table: excessively sparse array")
		}
		return 0
	}
	return most
}

// jsonEscapes says, for each byte, what is behind the backslash: 0 if there is none, u if its number is.
var jsonEscapes = func() (e [256]byte) {
	for c := range ' ' {
		e[c] = 'u'
	}
	e[127] = 'u'
	for i, c := range []byte("\b\t\n\f\r\"\\/") {
		e[c] = `btnfr"\/`[i]
	}
	return e
}()

// quote adds a string.
func (e *jsonEncoder) quote(text string) {
	size := len(text) + 2
	for _, c := range []byte(text) {
		switch jsonEscapes[c] {
		case 0:
		case 'u':
			size += 5
		default:
			size++
		}
	}
	e.room(size)
	b := append(e.b, '"')
	for i := range len(text) {
		e.s.step(e.L)
		switch c := text[i]; jsonEscapes[c] {
		case 0:
			b = append(b, c)
		case 'u':
			const digits = "0123456789abcdef"
			b = append(b, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
		default:
			b = append(b, '\\', jsonEscapes[c])
		}
	}
	e.b = append(b, '"')
}

type jsonDecoder struct {
	s     *sandbox
	L     *lua.LState
	src   string
	at    int
	depth int
	token jsonToken

	settings *jsonLimits
}

// jsonToken is the one read last. kind is its name in errors.
type jsonToken struct {
	kind  string
	start int
	value lua.LValue
}

func (s *sandbox) jsonDecode(L *lua.LState, c *jsonLimits) int {
	if L.GetTop() != 1 {
		L.ArgError(1, "expected 1 argument")
	}
	defer s.resetPending(s.pending)
	d := &jsonDecoder{s: s, L: L, src: argString(L, 1), settings: c}
	if len(d.src) >= 2 && (d.src[0] == 0 || d.src[1] == 0) {
		L.RaiseError("JSON parser does not support UTF-16 or UTF-32")
	}
	d.next()
	v := d.value()
	if d.next(); d.token.kind != "T_END" {
		d.expected("the end")
	}
	L.Push(v)
	return 1
}

func (d *jsonDecoder) expected(what string) {
	d.L.RaiseError("Expected %s but found %s at character %d", what, d.token.kind, d.token.start+1)
}

var jsonMarks = map[byte]string{'{': "T_OBJ_BEGIN", '}': "T_OBJ_END", '[': "T_ARR_BEGIN", ']': "T_ARR_END",
	':': "T_COLON", ',': "T_COMMA"}

// next reads a token.
func (d *jsonDecoder) next() {
	d.s.step(d.L)
	for d.at < len(d.src) && strings.IndexByte(" \t\n\r", d.src[d.at]) >= 0 {
		d.at++
		d.s.step(d.L)
	}
	d.token = jsonToken{kind: "T_END", start: d.at, value: lua.LNil}
	if d.at >= len(d.src) {
		return
	}
	c := d.src[d.at]
	rest := d.src[d.at:]
	if name := jsonMarks[c]; name != "" {
		d.at++
		d.token.kind = name
		return
	}
	switch {
	case c == '"':
		d.readString()
	case (c == '-' || isDigit(c)) && !d.settings.decodeInvalid && isInvalidNumber(rest):
		d.token.kind = "invalid number"
	case c == '-' || isDigit(c):
		d.readNumber()
	case strings.HasPrefix(rest, "true"):
		d.at += 4
		d.token.kind, d.token.value = "T_BOOLEAN", lua.LTrue
	case strings.HasPrefix(rest, "false"):
		d.at += 5
		d.token.kind, d.token.value = "T_BOOLEAN", lua.LFalse
	case strings.HasPrefix(rest, "null"):
		d.at += 4
		d.token.kind, d.token.value = "T_NULL", d.s.null
	case d.settings.decodeInvalid && isInvalidNumber(rest):
		d.readNumber()
	default:
		d.token.kind = "invalid token"
	}
}

// isInvalidNumber reports whether a text begins with a number that JSON has not: one with a plus, a hexadecimal one,
// one with a leading zero, infinity or NaN.
func isInvalidNumber(text string) bool {
	if text[0] == '+' {
		return true
	}
	text = strings.TrimPrefix(text, "-")
	if strings.HasPrefix(text, "0") {
		return len(text) > 1 && (text[1]|0x20 == 'x' || isDigit(text[1]))
	}
	return len(text) >= 3 && (strings.EqualFold(text[:3], "inf") || strings.EqualFold(text[:3], "nan"))
}

// readNumber reads what C's strtod would.
func (d *jsonDecoder) readNumber() {
	f, n, _ := number.Double(d.src[d.at:])
	if n == 0 {
		d.token.kind = "invalid number"
		if c := d.src[d.at]; c != '-' && !isDigit(c) {
			d.token.kind = "invalid token"
		}
		return
	}
	d.at += n
	d.token.kind, d.token.value = "T_NUMBER", lua.LNumber(f)
}

// readString reads a string, its escapes with it.
func (d *jsonDecoder) readString() {
	i := d.at + 1
	x := &builder{s: d.s, L: d.L} // its memory is pending until the whole is decoded
	if end := d.stringEnd(i); end > i {
		x.room(end - i)
	}
	for {
		d.s.step(d.L)
		if i >= len(d.src) {
			d.token.kind, d.token.start, d.at = "unexpected end of string", i, i
			return
		}
		c := d.src[i]
		if c == '"' {
			break
		}
		if c != '\\' {
			end := strings.IndexAny(d.src[i:], `"\`)
			if end < 0 {
				end = len(d.src) - i
			}
			d.s.work(d.L, end)
			x.text(d.src[i : i+end])
			i += end
			continue
		}
		if i+1 >= len(d.src) {
			d.token.kind, d.token.start = "invalid escape code", i
			return
		}
		if d.src[i+1] == 'u' {
			r, n := unicodeEscape(d.src[i:])
			if n == 0 {
				d.token.kind, d.token.start = "invalid unicode escape code", i
				return
			}
			x.room(utf8.UTFMax)
			x.b = utf8.AppendRune(x.b, r)
			i += n
			continue
		}
		at := strings.IndexByte(`"\/btnfr`, d.src[i+1])
		if at < 0 {
			d.token.kind, d.token.start = "invalid escape code", i
			return
		}
		x.byte("\"\\/\b\t\n\f\r"[at])
		i += 2
	}
	d.s.grow(d.L, 16)
	d.at = i + 1
	d.token.kind, d.token.value = "T_STRING", ownString(x.b)
}

// stringEnd is where the string ends whose first byte is at i; without escapes it is as long as it will be.
func (d *jsonDecoder) stringEnd(i int) int {
	for ; i < len(d.src) && d.src[i] != '"'; i++ {
		d.s.step(d.L)
		if d.src[i] == '\\' {
			i++
		}
	}
	return min(i, len(d.src))
}

// unicodeEscape reads \uXXXX, or two of them that make a rune; n is 0 if it is neither.
func unicodeEscape(t string) (r rune, n int) {
	unit := func(t string) rune {
		if len(t) < 6 || t[0] != '\\' || t[1] != 'u' {
			return -1
		}
		u := rune(0)
		for i := 2; i < 6; i++ {
			d := digitOf(t[i])
			if d >= 16 {
				return -1
			}
			u = u<<4 | rune(d)
		}
		return u
	}
	r = unit(t)
	switch {
	case r < 0:
		return 0, 0
	case !utf16.IsSurrogate(r):
		return r, 6
	}
	if r = utf16.DecodeRune(r, unit(t[6:])); r == utf8.RuneError {
		return 0, 0
	}
	return r, 12
}

// value makes the value that begins with the token.
func (d *jsonDecoder) value() lua.LValue {
	switch d.token.kind {
	case "T_STRING", "T_NUMBER", "T_BOOLEAN", "T_NULL":
		return d.token.value
	case "T_OBJ_BEGIN", "T_ARR_BEGIN":
	default:
		d.expected("value")
	}
	if d.depth++; d.depth > d.settings.decodeDepth {
		d.L.RaiseError("Found too many nested data structures (%d) at character %d", d.depth, d.at)
	}
	t := d.L.CreateTable(0, 0) // one of NewTable has room for 64 entries
	if d.token.kind == "T_OBJ_BEGIN" {
		d.object(t)
	} else {
		d.array(t)
	}
	d.depth--
	return t
}

func (d *jsonDecoder) object(t *lua.LTable) {
	d.s.grow(d.L, tableCost)
	if d.next(); d.token.kind == "T_OBJ_END" {
		return
	}
	for ; ; d.next() {
		if d.token.kind != "T_STRING" {
			d.expected("object key string")
		}
		key := string(d.token.value.(lua.LString))
		if d.next(); d.token.kind != "T_COLON" {
			d.expected("colon")
		}
		d.next()
		d.s.grow(d.L, entryCost)
		t.RawSetString(key, d.value())
		if d.next(); d.token.kind == "T_OBJ_END" {
			return
		}
		if d.token.kind != "T_COMMA" {
			d.expected("comma or object end")
		}
	}
}

func (d *jsonDecoder) array(t *lua.LTable) {
	d.s.grow(d.L, 160)
	if d.next(); d.token.kind == "T_ARR_END" {
		return
	}
	for i := 1; ; i++ {
		d.s.grow(d.L, 32)
		t.RawSetInt(i, d.value())
		if d.next(); d.token.kind == "T_ARR_END" {
			return
		}
		if d.token.kind != "T_COMMA" {
			d.expected("comma or array end")
		}
		d.next()
	}
}
