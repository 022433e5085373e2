package resp

import (
	"math"
	"strconv"
	"strings"
)

// Writer appends replies to a buffer. With Proto 2 the types of RESP3 become those
// that Redis sends to a client of RESP2 instead.
type Writer struct {
	Proto  int // 2 or 3; 0 is 2
	Errors int // errors written so far
	// More is asked before a string makes Bytes longer than Limit, with how long they become. If it says no, the string
	// is left out, and what has been written is no reply. nil: all is written.
	More  func(n int) bool
	Limit int
	buf   []byte
}

// Bytes is what has been written since Reset; it is valid until the next call.
func (w *Writer) Bytes() []byte { return w.buf }

// Len is len(Bytes()).
func (w *Writer) Len() int { return len(w.buf) }

// Reset forgets what has been written. Room for more than keep bytes is given up.
func (w *Writer) Reset(keep int) {
	if w.buf = w.buf[:0]; cap(w.buf) > keep {
		w.buf = nil
	}
}

// Truncate forgets what has been written behind the first n bytes.
func (w *Writer) Truncate(n int) { w.buf = w.buf[:n] }

// Raw appends whole replies.
func (w *Writer) Raw(b []byte) { w.buf = append(w.buf, b...) }

// room reports whether a string of n bytes may be written.
func (w *Writer) room(n int) bool {
	return w.More == nil || len(w.buf)+n <= w.Limit || w.More(len(w.buf)+n)
}

func (w *Writer) head(t byte, n int64) {
	w.buf = append(w.buf, t)
	if n >= 0 && n < 10 {
		w.buf = append(w.buf, byte('0'+n), '\r', '\n')
		return
	}
	w.buf = strconv.AppendInt(w.buf, n, 10)
	w.buf = append(w.buf, '\r', '\n')
}

func (w *Writer) line(t byte, s string) {
	w.buf = append(w.buf, t)
	for i := range len(s) {
		c := s[i]
		if c == '\r' || c == '\n' {
			c = ' ' // a line ends once
		}
		w.buf = append(w.buf, c)
	}
	w.buf = append(w.buf, '\r', '\n')
}

// Simple is a simple string.
func (w *Writer) Simple(s string) { w.line('+', s) }

// OK is the simple string OK.
func (w *Writer) OK() { w.buf = append(w.buf, "+OK\r\n"...) }

// Error is an error; s begins with its code ("ERR ..."). As in Redis, ends of lines around it go.
func (w *Writer) Error(s string) {
	w.Errors++
	w.line('-', strings.Trim(s, "\r\n"))
}

// Int is an integer.
func (w *Writer) Int(n int64) { w.head(':', n) }

// Bulk is a string of bytes.
func (w *Writer) Bulk(b []byte) {
	if !w.room(len(b)) {
		return
	}
	w.head('$', int64(len(b)))
	w.buf = append(w.buf, b...)
	w.buf = append(w.buf, '\r', '\n')
}

// BulkString is Bulk.
func (w *Writer) BulkString(s string) {
	if !w.room(len(s)) {
		return
	}
	w.head('$', int64(len(s)))
	w.buf = append(w.buf, s...)
	w.buf = append(w.buf, '\r', '\n')
}

// Null is "no such thing".
func (w *Writer) Null() {
	if w.Proto == 3 {
		w.buf = append(w.buf, "_\r\n"...)
	} else {
		w.buf = append(w.buf, "$-1\r\n"...)
	}
}

// NullArray is "no such array".
func (w *Writer) NullArray() {
	if w.Proto == 3 {
		w.buf = append(w.buf, "_\r\n"...)
	} else {
		w.buf = append(w.buf, "*-1\r\n"...)
	}
}

// Array begins an array of n replies.
func (w *Writer) Array(n int) { w.head('*', int64(n)) }

// Map begins a map of n pairs of replies; in RESP2 an array of both.
func (w *Writer) Map(n int) {
	if w.Proto == 3 {
		w.head('%', int64(n))
	} else {
		w.head('*', 2*int64(n))
	}
}

// Set begins a set of n replies.
func (w *Writer) Set(n int) { w.head(w.type3('~'), int64(n)) }

// Push begins an out-of-band message of n replies.
func (w *Writer) Push(n int) { w.head(w.type3('>'), int64(n)) }

func (w *Writer) type3(t byte) byte {
	if w.Proto == 3 {
		return t
	}
	return '*'
}

// Double is a floating-point number.
func (w *Writer) Double(f float64) {
	var a [32]byte
	s := a[:0]
	switch {
	case math.IsInf(f, 1):
		s = append(s, "inf"...)
	case math.IsInf(f, -1):
		s = append(s, "-inf"...)
	case math.IsNaN(f):
		s = append(s, "nan"...)
	default:
		s = strconv.AppendFloat(s, f, 'g', 17, 64)
	}
	if w.Proto != 3 {
		w.Bulk(s)
		return
	}
	w.buf = append(w.buf, ',')
	w.buf = append(w.buf, s...)
	w.buf = append(w.buf, '\r', '\n')
}

// Bool is a boolean; in RESP2 an integer.
func (w *Writer) Bool(b bool) {
	switch {
	case w.Proto == 3 && b:
		w.buf = append(w.buf, "#t\r\n"...)
	case w.Proto == 3:
		w.buf = append(w.buf, "#f\r\n"...)
	case b:
		w.Int(1)
	default:
		w.Int(0)
	}
}

// BigNumber is an integer of any size, in decimal digits.
func (w *Writer) BigNumber(digits string) {
	if w.Proto == 3 {
		w.line('(', digits)
	} else {
		w.BulkString(digits)
	}
}

// Verbatim is a text of a three-letter format, such as "txt".
func (w *Writer) Verbatim(format, s string) {
	if w.Proto != 3 || len(format) != 3 {
		w.BulkString(s)
		return
	}
	if !w.room(len(s)) {
		return
	}
	w.head('=', int64(len(s)+4))
	w.buf = append(w.buf, format...)
	w.buf = append(w.buf, ':')
	w.buf = append(w.buf, s...)
	w.buf = append(w.buf, '\r', '\n')
}
