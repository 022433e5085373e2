// Package resp is the codec of RESP2 and RESP3, Redis's protocol, for a server:
// commands in, replies out, both without copies beyond the one buffer.
//
// It leaves connections, batches and the meaning of commands to its caller. Start
// with [Reader] and [Writer]. Neither may be used by two goroutines at a time. Commands that a Reader
// returns lie in its buffer until the next Fill.
//
// The limits and the texts of protocol errors are those of Redis 7
// (networking.c, sds.c).
package resp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
)

// ErrIncomplete: the bytes at hand hold no further whole command; Fill gets more.
var ErrIncomplete = errors.New("incomplete command")

// ErrNoMemory: Reader.Reserve refused.
var ErrNoMemory = errors.New("out of buffer memory")

// ProtocolError is about bytes that are no command. Its text is what Redis
// replies, behind "ERR ", before it closes the connection.
type ProtocolError struct{ text string }

func (e *ProtocolError) Error() string { return "Protocol error: " + e.text }

func protocol(format string, a ...any) error {
	return &ProtocolError{fmt.Sprintf(format, a...)}
}

// Limits bound what a client can make a Reader keep.
type Limits struct {
	Args  int // of a command
	Bulk  int // bytes of an argument
	Query int // bytes of a command, framing included
	// Unauthenticated words the errors as Redis does before AUTH.
	Unauthenticated bool
}

// MaxLine bounds inline commands and the lines that announce lengths, in bytes. As in Redis, a
// line that is whole when it is first looked at may be longer by what comes in one read.
const MaxLine = 64 << 10

// maxWholeLine is how far the end of a line is looked for: MaxLine and the 16 KiB of one of
// Redis's reads.
const maxWholeLine = MaxLine + 16<<10

// Buffers are so long when a connection is new, and when it has much to say; longer
// ones only while one command needs them.
const (
	minBuffer = 4 << 10
	maxBuffer = 64 << 10
	maxArena  = 4 << 10 // arguments that an idle Reader may keep room for
)

type span struct{ off, n uint32 }

// Reader parses commands. Between Fills it does no I/O.
type Reader struct {
	// Limits may be changed between two calls of Next.
	Limits Limits
	// Reserve, if not nil, is asked before a buffer of more than 64 KiB is made, for the bytes
	// beyond that. It is told, with a negative number of bytes, when a buffer has gone.
	Reserve func(bytes int) bool
	// Empty counts the empty commands that Next has skipped.
	Empty uint64

	src      io.Reader
	buf      []byte
	r, w     int // buf[r:w] is unread; a command that is not whole starts at r
	full     bool
	reserved int

	// The command that starts at r, as far as it is known.
	pos   int // parsed so far, from r
	left  int // arguments to come; 0: its first line is not parsed yet
	bulk  int // announced length of the argument at pos; -1: not known yet
	spans []span

	args [][]byte // what Next returned since Fill
}

// NewReader reads from src.
func NewReader(src io.Reader, l Limits) *Reader {
	return &Reader{Limits: l, src: src, bulk: -1}
}

// Buffered is how many bytes wait to be parsed.
func (d *Reader) Buffered() int { return d.w - d.r }

// Release gives the buffer back; the Reader must not be used any more.
func (d *Reader) Release() {
	if d.reserved > 0 {
		d.Reserve(-d.reserved)
	}
	d.reserved, d.buf, d.args, d.spans = 0, nil, nil, nil
}

// Fill reads once from the source, and waits if there is nothing. Commands that Next returned before are
// invalid afterwards. Commands that are announced to be long get
// room as their bytes arrive, not before.
func (d *Reader) Fill() error {
	if cap(d.args) > maxArena {
		d.args = nil
	}
	clear(d.args)
	d.args = d.args[:0]
	size := len(d.buf)
	have := d.w - d.r
	switch need := d.pos + d.bulk + 2; {
	case have == 0 && size > maxBuffer:
		size = maxBuffer
	case size == 0:
		size = minBuffer
	case have == size && d.bulk >= 0 && need > size:
		size = min(need, 2*size)
	case have == size:
		size *= 2
	case d.full && size < maxBuffer:
		size *= 2
	}
	if size != len(d.buf) {
		if size > d.Limits.Query {
			size = d.Limits.Query
			if have >= size {
				return protocol("command of more than %d bytes", d.Limits.Query)
			}
		}
		over := max(0, size-maxBuffer)
		if over > 0 && d.Reserve != nil && !d.Reserve(over) {
			return ErrNoMemory
		}
		b := make([]byte, size)
		copy(b, d.buf[d.r:d.w])
		d.buf = b
		if d.reserved > 0 { // for a moment there were both
			d.Reserve(-d.reserved)
		}
		if d.reserved = over; d.Reserve == nil {
			d.reserved = 0
		}
	} else if d.r > 0 {
		copy(d.buf, d.buf[d.r:d.w])
	}
	d.r, d.w = 0, have
	for range 100 {
		n, err := d.src.Read(d.buf[d.w:])
		d.w += n
		d.full = d.w == len(d.buf)
		if n > 0 {
			return nil // an error comes again
		}
		if err != nil {
			return err
		}
	}
	return io.ErrNoProgress
}

// Next returns the next command, its name first, or ErrIncomplete, or a
// *ProtocolError, after which the Reader is of no use. Empty commands are skipped.
// The arguments may be overwritten by the caller; they are his until Fill.
func (d *Reader) Next() ([][]byte, error) {
	for d.r < d.w {
		var args [][]byte
		var err error
		if d.left > 0 || d.buf[d.r] == '*' {
			args, err = d.multibulk()
		} else {
			args, err = d.inline()
		}
		if err != nil || len(args) > 0 {
			return args, err
		}
		d.Empty++
	}
	return nil, ErrIncomplete
}

// done leaves the command at r behind.
func (d *Reader) done() {
	d.r += d.pos
	d.pos, d.left, d.bulk = 0, 0, -1
	if cap(d.spans) > maxArena {
		d.spans = nil
	}
	d.spans = d.spans[:0]
}

// lineEnd is where the first byte end is, or -1. As in Redis, which looks for it with strchr, a
// line with a NUL before it does not end: nothing comes of it but the error of a line that is
// too long.
func lineEnd(b []byte, end byte) int {
	i := bytes.IndexByte(b[:min(len(b), maxWholeLine)], end)
	if i >= 0 && bytes.IndexByte(b[:i], 0) >= 0 {
		return -1
	}
	return i
}

// line is the line at pos without its end, and its length with it.
func (d *Reader) line(tooLong string) (line []byte, n int, err error) {
	b := d.buf[d.r+d.pos : d.w]
	// As in Redis, what follows CR is not looked at.
	i := lineEnd(b, '\r')
	if i < 0 {
		if len(b) > MaxLine {
			return nil, 0, protocol("%s", tooLong)
		}
		return nil, 0, ErrIncomplete
	}
	if i+2 > len(b) {
		return nil, 0, ErrIncomplete
	}
	return b[:i], i + 2, nil
}

// short is the number behind byte want in the line at pos, and the length of the line with its end, if it has up to
// four digits. n is 0 for all other lines, right or wrong: line and ParseInt are for them, and say the same of those
// that short takes.
func (d *Reader) short(want byte) (number, n int) {
	b := d.buf[d.r+d.pos : d.w]
	if len(b) < 4 || b[0] != want || b[1] == '0' && b[2] != '\r' {
		return 0, 0
	}
	for i, c := range b[1:min(6, len(b)-1)] {
		switch {
		case c >= '0' && c <= '9':
			number = 10*number + int(c-'0')
		case c == '\r' && i > 0:
			return number, i + 3
		default:
			return 0, 0
		}
	}
	return 0, 0
}

func (d *Reader) multibulk() ([][]byte, error) {
	if count, n := d.short('*'); d.left == 0 && count > 0 && count <= d.Limits.Args {
		d.pos, d.left = n, count
	}
	if d.left == 0 {
		line, n, err := d.line("too big mbulk count string")
		if err != nil {
			return nil, err
		}
		count, ok := ParseInt(line[1:])
		switch {
		case ok && d.Limits.Unauthenticated && count > int64(d.Limits.Args):
			return nil, protocol("unauthenticated multibulk length")
		case !ok || count > int64(d.Limits.Args):
			return nil, protocol("invalid multibulk length")
		}
		d.pos += n
		if count <= 0 {
			d.done()
			return nil, nil
		}
		d.left = int(count)
	}
	for d.left > 0 {
		if size, n := d.short('$'); d.bulk < 0 && n > 0 && size <= d.Limits.Bulk && d.pos+n+size+2 <= d.Limits.Query {
			d.pos += n
			d.bulk = size
		}
		if d.bulk < 0 {
			line, n, err := d.line("too big bulk count string")
			if err != nil {
				// Redis looks at the first byte only when the line is whole.
				return nil, err
			}
			if len(line) == 0 || line[0] != '$' {
				got := byte('\r')
				if len(line) > 0 {
					got = line[0]
				}
				return nil, protocol("expected '$', got '%c'", got)
			}
			size, ok := ParseInt(line[1:])
			switch {
			case ok && d.Limits.Unauthenticated && size > int64(d.Limits.Bulk):
				return nil, protocol("unauthenticated bulk length")
			case !ok || size < 0 || size > int64(d.Limits.Bulk):
				return nil, protocol("invalid bulk length")
			}
			if d.pos+n+int(size)+2 > d.Limits.Query {
				return nil, protocol("command of more than %d bytes", d.Limits.Query)
			}
			d.pos += n
			d.bulk = int(size)
		}
		if d.w-d.r-d.pos < d.bulk+2 {
			return nil, ErrIncomplete
		}
		d.spans = append(d.spans, span{uint32(d.pos), uint32(d.bulk)})
		d.pos += d.bulk + 2
		d.bulk = -1
		d.left--
	}
	at := len(d.args)
	for _, s := range d.spans {
		b := d.buf[d.r+int(s.off):]
		d.args = append(d.args, b[:s.n:s.n])
	}
	d.done()
	return d.args[at:len(d.args):len(d.args)], nil
}

func (d *Reader) inline() ([][]byte, error) {
	b := d.buf[d.r:d.w]
	i := lineEnd(b, '\n')
	if i < 0 {
		if len(b) > MaxLine {
			return nil, protocol("too big inline request")
		}
		return nil, ErrIncomplete
	}
	d.pos = i + 1
	line := b[:i]
	if i > 0 && line[i-1] == '\r' {
		line = line[:i-1]
	}
	at := len(d.args)
	args, ok := SplitLine(d.args, line)
	if !ok {
		return nil, protocol("unbalanced quotes in request")
	}
	if len(args)-at > d.Limits.Args {
		return nil, protocol("invalid multibulk length")
	}
	d.args = args
	d.done()
	return d.args[at:len(d.args):len(d.args)], nil
}

// SplitLine appends the words of line to args, as sdssplitargs has them: quoted as
// in a shell, escapes within double quotes. It unquotes in place.
func SplitLine(args [][]byte, line []byte) (_ [][]byte, ok bool) {
	const (
		bare = iota
		double
		single
	)
	i := 0
	peek := func(k int) byte {
		if i+k < len(line) {
			return line[i+k]
		}
		return 0
	}
	for {
		for i < len(line) && isSpace(line[i]) {
			i++
		}
		if peek(0) == 0 {
			return args, true
		}
		start, out := i, i
		mode := bare
	word:
		for {
			c := peek(0)
			switch mode {
			case bare:
				switch c {
				case ' ', '\n', '\r', '\t', 0:
					break word
				case '"':
					mode = double
				case '\'':
					mode = single
				default:
					line[out] = c
					out++
				}
			case double:
				switch {
				case c == '\\' && peek(1) == 'x' && hex(peek(2)) >= 0 && hex(peek(3)) >= 0:
					line[out] = byte(hex(peek(2))<<4 | hex(peek(3)))
					out++
					i += 3
				case c == '\\' && i+1 < len(line):
					i++
					c = line[i]
					switch c {
					case 'n':
						c = '\n'
					case 'r':
						c = '\r'
					case 't':
						c = '\t'
					case 'b':
						c = '\b'
					case 'a':
						c = '\a'
					}
					line[out] = c
					out++
				case c == '"':
					if e := peek(1); e != 0 && !isSpace(e) {
						return args, false
					}
					i++
					break word
				case i >= len(line) || c == 0:
					return args, false
				default:
					line[out] = c
					out++
				}
			case single:
				switch {
				case c == '\\' && peek(1) == '\'':
					i++
					line[out] = '\''
					out++
				case c == '\'':
					if e := peek(1); e != 0 && !isSpace(e) {
						return args, false
					}
					i++
					break word
				case i >= len(line) || c == 0:
					return args, false
				default:
					line[out] = c
					out++
				}
			}
			i++
		}
		args = append(args, line[start:out:out])
	}
}

func isSpace(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }

func hex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// ParseInt reads a decimal int64 as strictly as Redis's string2ll: an optional
// minus sign, no leading zeros, no spaces.
func ParseInt(b []byte) (n int64, ok bool) {
	neg := false
	if len(b) > 1 && b[0] == '-' {
		neg = true
		b = b[1:]
	}
	if len(b) == 0 || len(b) > 19 {
		return 0, false
	}
	if b[0] == '0' {
		return 0, len(b) == 1 && !neg
	}
	var u uint64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		u = u*10 + uint64(c-'0')
	}
	if neg {
		return -int64(u), u <= 1<<63
	}
	return int64(u), u < 1<<63
}
