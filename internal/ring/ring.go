// Package ring has the bytes that a broker and its clients share: messages of their socket, and rings in shared memory.
// The rings are after io_uring's, between a program and a kernel. There is one of submissions and one of completions,
// and each end says when it sleeps.
//
// The package does no I/O, and has no goroutines. All integers are little-endian. Nothing of the other end's is
// believed before it is checked. It is copied first, since that end may change it meanwhile.
package ring

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	// Magic is the first word of a ring, and of the first messages.
	Magic = 0x4b564442
	// Ends of one Major understand each other. The lower Minor of the two holds.
	Major, Minor = 1, 0

	// Depths of a queue are powers of two in between, in entries.
	MinDepth, MaxDepth, DefaultDepth = 16, 1024, 256
	// MaxQueues is how many queues a connection may have.
	MaxQueues = 8
	// SlotSize is the bytes of a slot: a key, with a small value or the text of an error.
	SlotSize = 1024
	// MaxKey is the longest key in bytes.
	MaxKey = SlotSize

	// EntrySize is the bytes of a submission, and of a completion.
	EntrySize = 64

	// Words of 32 bits at the start of a ring, a cache line each.
	offSQTail             = 64  // the client's: submissions that were queued
	offSQHead             = 128 // the broker's: those that it has taken
	offBrokerSleeps       = 192 // set by the broker, cleared by whoever wakes it
	offCQTail             = 256 // the broker's: completions that were queued
	offCQHead             = 320 // the client's: those that it has taken
	offClientSleeps       = 384
	offBrokerCPU          = 448 // on which processor the broker looks at the ring
	offClientCPU          = 512
	headerSize            = 48
	offSubmissions        = 4096
	page                  = 4096
	noCPU           int32 = -1
)

// ErrProtocol means that the other end broke the rules. The connection is over.
var ErrProtocol = errors.New("broken protocol")

func protocolError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// Op says what a submission asks for.
type Op uint8

const (
	OpGet          Op = 1 + iota // the value to Memory
	OpPut                        // the value of Memory
	OpDelete                     // of the key
	OpExists                     // its version, expiry and, unless Word is WithoutLength, length
	OpTouch                      // another expiry
	OpIncr                       // adds Word, signed, to a number in decimal digits
	OpScan                       // keys with a prefix, from a cursor, to Memory
	OpDeletePrefix               // of all keys with a prefix
	OpGetRange                   // the value's bytes from Word on
	OpView                       // shows a value in place, for TTL; Word is the View's number, which the client chooses
	OpViewRelease                // ends the View Word, and says whether what it showed was the value to its end
	OpPin                        // keeps a value from eviction for TTL, at most MaxPin
	OpUnpin                      // ends that
	OpCancel                     // of the submission with the tag Word
	OpNop                        // nothing, and completes
)

// WithoutLength is the Word of an EXISTS that asks for no length, which so costs less.
const WithoutLength = 1

// MaxPin is how long a PIN may last, in milliseconds.
const MaxPin = 70 * 60 * 1000

// A PUT of Length bytes that come piece by piece. The stream's number is the Version that its beginning answers.
const (
	OpPutBegin  Op = 50 + iota // of the key; nothing is stored without a commit
	OpPutAppend                // Memory is next of the stream Word
	OpPutCommit                // of the stream Word: all of the value has come
	OpPutAbort                 // of the stream Word: it is not wanted any more
)

// Flags of submissions; a PUT or DELETE has one of them at most.
const (
	FlagIfAbsent = 1 << iota
	FlagIfPresent
	FlagIfVersion // Word
)

// FlagChunked, of a completion of a View, says that it has several parts. They are in the slot, see PutParts.
const FlagChunked = 1

// Outcome says whether an operation happened, as rdma.Outcome does.
type Outcome uint8

const (
	Yes Outcome = iota
	No
	Unknown
)

// Code says why.
type Code uint8

const (
	OK          Code = iota
	NotFound         // there is no such key
	Condition        // another version, a key where there should be none, or none
	TooLarge         // the value is longer than the namespace's, or the arena, takes
	ShortBuffer      // the value is longer than the memory for it: Length
	WrongType        // the value is a collection, or no number
	Timeout          // the time was over
	Cancelled        // by the client
	Unavailable      // the store
	Denied           // the session has no right to that
	Full             // no memory, or the quota is used up
	Corrupt          // the value is damaged
	Argument         // the submission is not well-formed
	Stale            // of an earlier connection
	Forked           // a child calls with its parent's connection
	Busy             // a limit of this listener or connection
	ViewExpired      // the View is over
	Protocol         // an end broke the rules
	Closed           // the connection is closed
	Unsupported      // by this broker
	Internal         // a fault of the broker's
	System           // this machine refused something
)

// Submission is what a client asks for. The key is in the slot that the tag names.
type Submission struct {
	Op         Op
	Flags      uint8
	KeyBytes   uint16
	Tag        uint32 // modulo the depth it is the slot
	Memory     uint32 // 0: the slot
	Batch      uint32 // for traces
	Offset     uint64 // in Memory
	Length     uint64 // bytes there
	Word       uint64 // a version, delta, cursor, offset, View or tag
	TTL        uint64 // milliseconds; 0: none
	Timeout    uint32 // milliseconds; 0: the broker's
	ValueFlags uint32
}

// Completion is the answer.
type Completion struct {
	Tag        uint32
	Outcome    Outcome
	Code       Code
	Flags      uint16
	Length     uint64 // of the value, or of a text in the slot
	Version    uint64
	Expires    uint64 // Unix milliseconds; 0: never
	CRC        uint32
	Region     uint32 // of a View
	Offset     uint64 // in Region, of the View's first part
	ValidUntil uint64 // nanoseconds of CLOCK_MONOTONIC: then the broker ends the View
	ValueFlags uint32
}

// Put encodes s in EntrySize bytes.
func (s *Submission) Put(b []byte) {
	_ = b[EntrySize-1]
	b[0], b[1] = byte(s.Op), s.Flags
	binary.LittleEndian.PutUint16(b[2:], s.KeyBytes)
	for i, v := range []uint32{s.Tag, s.Memory, s.Batch} {
		binary.LittleEndian.PutUint32(b[4+4*i:], v)
	}
	for i, v := range []uint64{s.Offset, s.Length, s.Word, s.TTL} {
		binary.LittleEndian.PutUint64(b[16+8*i:], v)
	}
	binary.LittleEndian.PutUint32(b[48:], s.Timeout)
	binary.LittleEndian.PutUint32(b[52:], s.ValueFlags)
	binary.LittleEndian.PutUint64(b[56:], 0)
}

// ParseSubmission decodes EntrySize bytes, which nobody else changes. It says whether they are well-formed; what they
// mean is the broker's to check.
func ParseSubmission(b []byte) (s Submission, err error) {
	_ = b[EntrySize-1]
	u32, u64 := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	s = Submission{Op(b[0]), b[1], binary.LittleEndian.Uint16(b[2:]), u32(b[4:]), u32(b[8:]), u32(b[12:]), u64(b[16:]),
		u64(b[24:]), u64(b[32:]), u64(b[40:]), u32(b[48:]), u32(b[52:])}
	if z := u64(b[56:]); z != 0 {
		err = protocolError("a submission ends with %#x, not with 0", z)
	}
	return s, err
}

// Put encodes c in EntrySize bytes.
func (c *Completion) Put(b []byte) {
	_ = b[EntrySize-1]
	binary.LittleEndian.PutUint32(b, c.Tag)
	b[4], b[5] = byte(c.Outcome), byte(c.Code)
	binary.LittleEndian.PutUint16(b[6:], c.Flags)
	for i, v := range []uint64{c.Length, c.Version, c.Expires} {
		binary.LittleEndian.PutUint64(b[8+8*i:], v)
	}
	binary.LittleEndian.PutUint32(b[32:], c.CRC)
	binary.LittleEndian.PutUint32(b[36:], c.Region)
	binary.LittleEndian.PutUint64(b[40:], c.Offset)
	binary.LittleEndian.PutUint64(b[48:], c.ValidUntil)
	binary.LittleEndian.PutUint32(b[56:], c.ValueFlags)
	binary.LittleEndian.PutUint32(b[60:], 0)
}

// ParseCompletion decodes EntrySize bytes, which nobody else changes.
func ParseCompletion(b []byte) (c Completion, err error) {
	_ = b[EntrySize-1]
	u32, u64 := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	c = Completion{u32(b), Outcome(b[4]), Code(b[5]), binary.LittleEndian.Uint16(b[6:]), u64(b[8:]), u64(b[16:]),
		u64(b[24:]), u32(b[32:]), u32(b[36:]), u64(b[40:]), u64(b[48:]), u32(b[56:])}
	switch z := u32(b[60:]); {
	case z != 0:
		err = protocolError("a completion ends with %#x, not with 0", z)
	case c.Outcome > Unknown, c.Code > System:
		err = protocolError("outcome %d, code %d", c.Outcome, c.Code)
	}
	return c, err
}

var opNames = [...]string{"none", "get", "put", "delete", "exists", "touch", "incr", "scan", "delete-prefix",
	"get-range", "view", "view-release", "pin", "unpin", "cancel", "nop", OpPutBegin: "put-begin",
	OpPutAppend: "put-append", OpPutCommit: "put-commit", OpPutAbort: "put-abort"}

// Known reports whether o is one of those above.
func (o Op) Known() bool { return o > 0 && int(o) < len(opNames) && opNames[o] != "" }

func (o Op) String() string {
	if !o.Known() {
		return opNames[0]
	}
	return opNames[o]
}

var codeNames = [...]string{"ok", "not-found", "condition", "too-large", "short-buffer", "wrong-type", "timeout",
	"cancelled", "unavailable", "denied", "full", "corrupt", "argument", "stale", "forked", "busy", "view-expired",
	"protocol", "closed", "unsupported", "internal", "system"}

func (c Code) String() string { return codeNames[min(int(c), int(System))] }
