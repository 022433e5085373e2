package ring

import (
	"encoding/binary"
	"math"
)

// MaxMessage is the longest message of the socket in bytes, and MaxFiles how many descriptors come with one at most.
const MaxMessage, MaxFiles = 4096, 8

// Kind says what a message is.
type Kind uint16

const (
	KindHello      Kind = 1 + iota // a client's first
	KindQueue                      // asks for another queue
	KindRegister                   // hands over memory
	KindDeregister                 // takes it back
	KindBye                        // ends the connection

	KindWelcome    Kind = 59 + iota // answers KindHello; 64
	KindQueued                      // answers KindQueue
	KindDone                        // answers KindRegister and KindDeregister
	KindRefused                     // answers any
	KindRegion                      // tells of memory that Views lie in
	KindRegionGone                  // no View will lie there any more
)

// headSize is the bytes before a message's own.
const headSize = 16

// Head begins each message.
type Head struct {
	Kind   Kind
	Serial uint32 // of the request; its answer has the same
}

// Hello is a client's first message. Its files are a pidfd of the client and, if there are ArenaBytes, the arena.
type Hello struct {
	Depth      uint32 // 0: as the broker likes
	ArenaBytes uint64
	Generation uint64 // how many connections this client had before
	Namespace  string
	Secret     string
	Name       string // of the program
}

// Welcome answers it. Its files are a pidfd of the broker, and those of the first queue, see FilesOfQueue.
type Welcome struct {
	Depth      uint32
	Arena      uint32 // 0: there is none
	MaxValue   uint64 // bytes
	MaxKey     uint32 // bytes
	Operations uint32 // limits of this connection
	ArenaBytes uint64
	ViewBytes  uint64
	Name       string // of the broker
}

// FilesOfQueue are a queue's: its ring, and eventfds that wake the broker and the client.
const FilesOfQueue = 3

// Register hands over a range of a file.
type Register struct{ Offset, Length uint64 }

// Refused says why a request failed.
type Refused struct {
	Outcome Outcome
	Code    Code
	Text    string
}

// Region tells of memory of the store's. Its file is for reading.
type Region struct {
	Region         uint32
	Length, Offset uint64
}

// encoder appends to a message.
type encoder struct{ b []byte }

func (e *encoder) u16(v uint16) { e.b = binary.LittleEndian.AppendUint16(e.b, v) }
func (e *encoder) u32(v ...uint32) {
	for _, x := range v {
		e.b = binary.LittleEndian.AppendUint32(e.b, x)
	}
}
func (e *encoder) u64(v ...uint64) {
	for _, x := range v {
		e.b = binary.LittleEndian.AppendUint64(e.b, x)
	}
}
func (e *encoder) text(s ...string) {
	for _, x := range s {
		e.b = append(e.b, x...)
	}
}
func (e *encoder) short(s ...string) {
	for _, x := range s {
		e.u16(uint16(len(x)))
	}
}

// message encodes one, with what body appends.
func message(h Head, body func(e *encoder)) []byte {
	e := encoder{make([]byte, 0, 128)}
	e.u16(uint16(h.Kind))
	e.u16(0)
	e.u32(0, h.Serial, 0)
	if body != nil {
		body(&e)
	}
	binary.LittleEndian.PutUint32(e.b[4:], uint32(len(e.b)))
	return e.b
}

// Bare is a message without a body: KindQueue, KindBye.
func Bare(h Head) []byte { return message(h, nil) }

// Numbered is a message of one number: KindDeregister and KindDone of memory, KindQueued of a queue, KindRegionGone.
func Numbered(h Head, n uint32) []byte {
	return message(h, func(e *encoder) { e.u32(n, 0) })
}

// Message encodes m; its texts are 65,535 bytes long at most, together less than MaxMessage.
func (m *Hello) Message(serial uint32) []byte {
	return message(Head{KindHello, serial}, func(e *encoder) {
		version(e)
		e.u32(m.Depth, 0)
		e.u64(m.ArenaBytes, m.Generation)
		e.short(m.Namespace, m.Secret, m.Name)
		e.u16(0)
		e.text(m.Namespace, m.Secret, m.Name)
	})
}

func version(e *encoder) {
	e.u32(Magic)
	e.u16(Major)
	e.u16(Minor)
}

// Message encodes m.
func (m *Welcome) Message(serial uint32) []byte {
	return message(Head{KindWelcome, serial}, func(e *encoder) {
		version(e)
		e.u32(m.Depth, m.Arena)
		e.u64(m.MaxValue)
		e.u32(m.MaxKey, m.Operations)
		e.u64(m.ArenaBytes, m.ViewBytes)
		e.short(m.Name)
		e.u16(0)
		e.u32(0)
		e.text(m.Name)
	})
}

// Message encodes m.
func (m *Register) Message(serial uint32) []byte {
	return message(Head{KindRegister, serial}, func(e *encoder) { e.u64(m.Offset, m.Length) })
}

// Message encodes m.
func (m *Refused) Message(serial uint32) []byte {
	return message(Head{KindRefused, serial}, func(e *encoder) {
		e.b = append(e.b, byte(m.Outcome), byte(m.Code))
		e.u16(0)
		text := m.Text[:min(len(m.Text), MaxMessage-headSize-8)]
		e.u32(uint32(len(text)))
		e.text(text)
	})
}

// Message encodes m.
func (m *Region) Message() []byte {
	return message(Head{Kind: KindRegion}, func(e *encoder) {
		e.u32(m.Region, 0)
		e.u64(m.Length, m.Offset)
	})
}

// decoder reads a message. The first thing that is wrong stays its error.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) take(n int) []byte {
	if n > len(d.b) {
		if d.err == nil {
			d.err = protocolError("a message ends %d bytes early", n-len(d.b))
		}
		return make([]byte, n)
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) u8() uint8            { return d.take(1)[0] }
func (d *decoder) u16() uint16          { return binary.LittleEndian.Uint16(d.take(2)) }
func (d *decoder) u32() uint32          { return binary.LittleEndian.Uint32(d.take(4)) }
func (d *decoder) u64() uint64          { return binary.LittleEndian.Uint64(d.take(8)) }
func (d *decoder) text(n uint16) string { return string(d.take(int(n))) }
func (d *decoder) zero(v uint32) {
	if v != 0 && d.err == nil {
		d.err = protocolError("%#x in a message where 0 should be", v)
	}
}

// end is the error, also if there is more.
func (d *decoder) end() error {
	if d.err == nil && len(d.b) > 0 {
		d.err = protocolError("a message has %d bytes more than its fields", len(d.b))
	}
	return d.err
}

// version reads the start of a first message.
func (d *decoder) version() {
	magic, major := d.u32(), d.u16()
	d.u16() // the lower minor version holds, and there is one
	switch {
	case d.err != nil:
	case magic != Magic:
		d.err = protocolError("the first message begins with %#x, not with %#x", magic, uint32(Magic))
	case major != Major:
		d.err = protocolError("the other end speaks version %d, this one %d", major, Major)
	}
}

// ParseHead reads the head of a message, and returns the rest.
func ParseHead(b []byte) (h Head, body []byte, err error) {
	d := decoder{b: b}
	h.Kind = Kind(d.u16())
	d.zero(uint32(d.u16()))
	n := d.u32()
	h.Serial = d.u32()
	d.zero(d.u32())
	if d.err == nil && (uint64(n) != uint64(len(b)) || len(b) > MaxMessage) {
		d.err = protocolError("a message of %d bytes says that it has %d", len(b), n)
	}
	return h, d.b, d.err
}

// ParseBare reads the body of a message that has none.
func ParseBare(body []byte) error { return (&decoder{b: body}).end() }

// ParseNumbered reads a body of Numbered.
func ParseNumbered(body []byte) (n uint32, err error) {
	d := decoder{b: body}
	n = d.u32()
	d.zero(d.u32())
	return n, d.end()
}

// ParseHello reads a body.
func ParseHello(body []byte) (m Hello, err error) {
	d := decoder{b: body}
	d.version()
	m.Depth = d.u32()
	d.zero(d.u32())
	m.ArenaBytes, m.Generation = d.u64(), d.u64()
	ns, secret, name := d.u16(), d.u16(), d.u16()
	d.zero(uint32(d.u16()))
	if d.err != nil {
		return m, d.err
	}
	m.Namespace, m.Secret, m.Name = d.text(ns), d.text(secret), d.text(name)
	if m.Depth != 0 && !ValidDepth(m.Depth) && d.err == nil {
		d.err = protocolError("a queue of depth %d", m.Depth)
	}
	if m.ArenaBytes > math.MaxInt64 && d.err == nil {
		d.err = protocolError("an arena of %d bytes", m.ArenaBytes)
	}
	return m, d.end()
}

// ParseWelcome reads a body.
func ParseWelcome(body []byte) (m Welcome, err error) {
	d := decoder{b: body}
	d.version()
	m.Depth, m.Arena, m.MaxValue = d.u32(), d.u32(), d.u64()
	m.MaxKey, m.Operations, m.ArenaBytes, m.ViewBytes = d.u32(), d.u32(), d.u64(), d.u64()
	n := d.u16()
	d.zero(uint32(d.u16()))
	d.zero(d.u32())
	if d.err != nil {
		return m, d.err
	}
	m.Name = d.text(n)
	if !ValidDepth(m.Depth) && d.err == nil {
		d.err = protocolError("a queue of depth %d", m.Depth)
	}
	return m, d.end()
}

// ParseRegister reads a body.
func ParseRegister(body []byte) (m Register, err error) {
	d := decoder{b: body}
	m = Register{d.u64(), d.u64()}
	if d.err == nil && (m.Length == 0 || m.Offset > math.MaxInt64 || m.Length > math.MaxInt64-m.Offset) {
		d.err = protocolError("%d bytes at %d of a file", m.Length, m.Offset)
	}
	return m, d.end()
}

// ParseRefused reads a body.
func ParseRefused(body []byte) (m Refused, err error) {
	d := decoder{b: body}
	m.Outcome, m.Code = Outcome(d.u8()), Code(d.u8())
	d.zero(uint32(d.u16()))
	n := d.u32()
	if d.err == nil && n > MaxMessage {
		d.err = protocolError("a text of %d bytes", n)
	}
	if d.err != nil {
		return m, d.err
	}
	m.Text = d.text(uint16(n))
	if d.err == nil && (m.Outcome > Unknown || m.Code > System) {
		d.err = protocolError("outcome %d, code %d", m.Outcome, m.Code)
	}
	return m, d.end()
}

// ParseRegion reads a body.
func ParseRegion(body []byte) (m Region, err error) {
	d := decoder{b: body}
	m.Region = d.u32()
	d.zero(d.u32())
	m.Length, m.Offset = d.u64(), d.u64()
	return m, d.end()
}
