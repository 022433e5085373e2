package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/rdma/driver"
)

// The format's limits. They are part of version 2: both ends refuse more.
const (
	wireVersion = 2

	// maxMsg bounds one READ or WRITE, bytes.
	maxMsg = 8 << 20
	// maxSendWR bounds the WRs outstanding on one QP, and those of one frame.
	maxSendWR = 1024
	// maxInline is the dialer's own limit, bytes.
	maxInline = 1024
	// wholeBytes is Caps.WholeBytes.
	wholeBytes = driver.LeastWholeBytes
	// maxFrame bounds the requests of one frame, bytes; a longer doorbell is
	// several frames.
	maxFrame = 16 << 20
	// maxRefusal bounds the text of a refusal, bytes.
	maxRefusal = 256
)

// Errors of the format. Each closes the connection it is met on.
var (
	errBadMagic   = errors.New("bad magic")
	errBadVersion = errors.New("unknown version")
	errMalformed  = errors.New("malformed frame")
)

// helloSize is the length of hello, which a dialer sends first. Everything on the wire is little-endian.
//
//	0        4        6        8
//	+--------+--------+--------+----------------+
//	|"KVDt"  |version |priv len| private data   |
//	+--------+--------+--------+----------------+
//
//	version   2
//	priv len  bytes of private data, at most driver.MaxPrivate; 0 means none
const helloSize = 8

const (
	helloMagic   = "KVDt"
	welcomeMagic = "KVDr"
)

func appendHello(b, private []byte) []byte {
	b = append(b, helloMagic...)
	b = binary.LittleEndian.AppendUint16(b, wireVersion)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(private)))
	return append(b, private...)
}

// parseHello checks the fixed part and returns the length of the private data.
func parseHello(b []byte) (private int, err error) {
	if string(b[:4]) != helloMagic {
		return 0, fmt.Errorf("hello: %w %q", errBadMagic, b[:4])
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != wireVersion {
		return 0, fmt.Errorf("hello: %w %d of the dialer, want %d: upgrade the older of the two", errBadVersion, v,
			wireVersion)
	}
	n := int(binary.LittleEndian.Uint16(b[6:]))
	if n > driver.MaxPrivate {
		return 0, fmt.Errorf("hello: %w: private data %d bytes, at most %d", errMalformed, n, driver.MaxPrivate)
	}
	return n, nil
}

// welcome answers a hello.
//
//	0        4        6      7      8        10       12       16        20
//	+--------+--------+------+------+--------+--------+--------+---------+----------+
//	|"KVDr"  |version |status| zero |text len|  zero  | maxMsg |maxSendWR| text     |
//	+--------+--------+------+------+--------+--------+--------+---------+----------+
//
//	status     1 accepted, 2 refused; 0 is invalid
//	text len   bytes of the refusal's text, at most 256; 0 when accepted
//	maxMsg     bytes of one READ or WRITE that the memory node takes
//	maxSendWR  WRs outstanding that the memory node takes
type welcome struct {
	status    byte
	textLen   int
	maxMsg    uint32
	maxSendWR uint32
}

const (
	welcomeSize = 20

	statusAccepted = 1
	statusRefused  = 2
)

func appendWelcome(b []byte, status byte, text string) []byte {
	text = text[:min(len(text), maxRefusal)]
	b = append(b, welcomeMagic...)
	b = binary.LittleEndian.AppendUint16(b, wireVersion)
	b = append(b, status, 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(text)))
	b = append(b, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, maxMsg)
	b = binary.LittleEndian.AppendUint32(b, maxSendWR)
	return append(b, text...)
}

// parseWelcome checks the fixed part. A version this side does not know is
// accepted in a refusal, which is how a dialer learns of it.
func parseWelcome(b []byte) (welcome, error) {
	if string(b[:4]) != welcomeMagic {
		return welcome{}, fmt.Errorf("welcome: %w %q", errBadMagic, b[:4])
	}
	w := welcome{
		status:    b[6],
		textLen:   int(binary.LittleEndian.Uint16(b[8:])),
		maxMsg:    binary.LittleEndian.Uint32(b[12:]),
		maxSendWR: binary.LittleEndian.Uint32(b[16:]),
	}
	switch v := binary.LittleEndian.Uint16(b[4:]); {
	case w.textLen > maxRefusal:
		return welcome{}, fmt.Errorf("welcome: %w: text %d bytes, at most %d", errMalformed, w.textLen, maxRefusal)
	case w.status == statusRefused:
	case v != wireVersion:
		return welcome{}, fmt.Errorf("welcome: %w %d of the memory node, want %d: upgrade the older of the two",
			errBadVersion, v, wireVersion)
	case w.status != statusAccepted || b[7]|b[10]|b[11] != 0 || w.textLen != 0:
		return welcome{}, fmt.Errorf("welcome: %w: % x", errMalformed, b[:welcomeSize])
	case w.maxMsg < maxMsg || w.maxSendWR < maxSendWR:
		return welcome{}, fmt.Errorf("welcome: memory node takes messages of %d bytes and %d WRs, want %d and %d",
			w.maxMsg, w.maxSendWR, maxMsg, maxSendWR)
	}
	return w, nil
}

// frame heads the requests of one doorbell.
//
//	0      1      2       4        8
//	+------+------+-------+--------+-----------------+
//	| type | zero | count | length | count requests  |
//	+------+------+-------+--------+-----------------+
//
//	type    1; 0 is invalid
//	count   requests, 1..1024
//	length  bytes of all of them, at most 16 MiB; they fill it exactly
type frame struct {
	count  int
	length int
}

const (
	frameSize    = 8
	typeDoorbell = 1
)

func putFrame(b []byte, f frame) {
	b[0], b[1] = typeDoorbell, 0
	binary.LittleEndian.PutUint16(b[2:], uint16(f.count))
	binary.LittleEndian.PutUint32(b[4:], uint32(f.length))
}

func parseFrame(b []byte) (frame, error) {
	f := frame{
		count:  int(binary.LittleEndian.Uint16(b[2:])),
		length: int(binary.LittleEndian.Uint32(b[4:])),
	}
	if b[0] != typeDoorbell || b[1] != 0 || f.count == 0 || f.count > maxSendWR ||
		f.length > maxFrame || f.length < f.count*requestSize {
		return frame{}, fmt.Errorf("%w: head % x", errMalformed, b[:frameSize])
	}
	return f, nil
}

// request is one WR on the wire.
//
//	0      1      4        8                16               24
//	+------+------+--------+----------------+----------------+---------------+
//	|  op  | when | length |      rkey      |  remote addr   | operands      |
//	+------+------+--------+----------------+----------------+---------------+
//
//	op        driver.Opcode, or 255: a WR that its own side refused
//	when      1, of a CMP_AND_SWP: it is skipped unless the latest one in front of
//	          it on the connection took effect; see driver.IfHit. Then two zeroes
//	length    bytes to READ or WRITE, 1..8 MiB; 8 for atomics; 0 for op 255
//	operands  READ and op 255 none; WRITE length bytes of payload;
//	          CMP_AND_SWP compare and swap, FETCH_ADD the addend, 8 bytes each
//
// Op 255 keeps the order: the agent answers it with REM_INV_REQ_ERR after
// everything before it and stops executing, so that a WR with a bad local buffer
// completes in its turn and nothing behind it takes effect.
type request struct {
	op     driver.Opcode
	ifHit  bool
	length int
	rkey   uint64
	addr   uint64
}

const (
	requestSize = 24

	opAbort driver.Opcode = 255
)

func appendRequest(b []byte, r request) []byte {
	when := byte(0)
	if r.ifHit {
		when = 1
	}
	b = append(b, byte(r.op), when, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(r.length))
	b = binary.LittleEndian.AppendUint64(b, r.rkey)
	return binary.LittleEndian.AppendUint64(b, r.addr)
}

// operands is how many bytes follow the fixed part.
func (r request) operands() int {
	switch r.op {
	case driver.OpWrite:
		return r.length
	case driver.OpCmpAndSwp:
		return 16
	case driver.OpFetchAdd:
		return 8
	}
	return 0
}

func parseRequest(b []byte) (request, error) {
	r := request{
		op:     driver.Opcode(b[0]),
		ifHit:  b[1] == 1,
		length: int(binary.LittleEndian.Uint32(b[4:])),
		rkey:   binary.LittleEndian.Uint64(b[8:]),
		addr:   binary.LittleEndian.Uint64(b[16:]),
	}
	ok := b[2]|b[3] == 0 && (b[1] == 0 || r.ifHit && r.op == driver.OpCmpAndSwp)
	switch r.op {
	case driver.OpRead, driver.OpWrite:
		ok = ok && r.length >= 1 && r.length <= maxMsg
	case driver.OpCmpAndSwp, driver.OpFetchAdd:
		ok = ok && r.length == 8
	case opAbort:
		ok = ok && r.length == 0
	default:
		ok = false
	}
	if !ok {
		return request{}, fmt.Errorf("%w: request % x", errMalformed, b[:requestSize])
	}
	return r, nil
}

// reply answers one request; replies come in the order of the requests.
//
//	0      1        2       4        8
//	+------+--------+-------+--------+-----------+
//	|  op  | status | seq   | length | payload   |
//	+------+--------+-------+--------+-----------+
//
//	op      the request's, or 254, goodbye: seq requests were executed and no
//	        more will be; the agent sends nothing more. Or 253, paced: the agent
//	        is there, and executes request seq when a limit of verbs lets it
//	status  driver.Success, RemInvReqErr, RemAccessErr or RemOpErr. After an
//	        error the agent sends nothing more
//	seq     the request's number on its connection, from 0, mod 65536
//	length  bytes of payload: what a READ asked for; 8, the word found, for an
//	        atomic; 0 for a WRITE and for errors
type reply struct {
	op     driver.Opcode
	status driver.Status
	seq    uint16
	length int
}

const (
	replySize = 8

	opGoodbye driver.Opcode = 254
	opPaced   driver.Opcode = 253
)

func appendReply(b []byte, r reply) []byte {
	b = append(b, byte(r.op), byte(r.status))
	b = binary.LittleEndian.AppendUint16(b, r.seq)
	return binary.LittleEndian.AppendUint32(b, uint32(r.length))
}

// parseReply checks b against the request that it must answer: its op, number
// and the payload it asked for.
func parseReply(b []byte, op driver.Opcode, seq uint16, payload int) (reply, error) {
	r := reply{
		op:     driver.Opcode(b[0]),
		status: driver.Status(b[1]),
		seq:    binary.LittleEndian.Uint16(b[2:]),
		length: int(binary.LittleEndian.Uint32(b[4:])),
	}
	ok := r.op == op && r.seq == seq
	switch r.status {
	case driver.Success:
		ok = ok && r.length == payload && op != opAbort
	case driver.RemInvReqErr, driver.RemAccessErr, driver.RemOpErr:
		ok = ok && r.length == 0
	default:
		ok = false
	}
	if !ok {
		return reply{}, fmt.Errorf("%w: reply % x to %v number %d of %d bytes", errMalformed, b[:replySize], op, seq,
			payload)
	}
	return r, nil
}

func appendGoodbye(b []byte, seq uint16) []byte {
	return appendReply(b, reply{op: opGoodbye, status: driver.Success, seq: seq})
}

// isGoodbye says whether b is a goodbye after exactly seq replies.
func isGoodbye(b []byte, seq uint16) bool {
	var want [replySize]byte
	return string(b[:replySize]) == string(appendGoodbye(want[:0], seq))
}

func appendPaced(b []byte, seq uint16) []byte {
	return appendReply(b, reply{op: opPaced, status: driver.Success, seq: seq})
}

// isPaced says whether b says that request seq waits.
func isPaced(b []byte, seq uint16) bool {
	var want [replySize]byte
	return string(b[:replySize]) == string(appendPaced(want[:0], seq))
}

func appendWord(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func word(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }
