package layout

import (
	"encoding/binary"
	"fmt"
)

// Status is a transaction's status word: what its verdict is swung on. It stands in the index area like a slot,
// changes by CAS alone and is replicated down the chain like a slot. Its state bits are those of an EMPTY word, so
// that whoever brings words up treats it as a word without a record.
//
//	63 62 61 60 59                         20 19               0
//	+-----+-----+----------------------------+-----------------+
//	| 0 0 | vrd |          seq (40)          | owner low 20    |
//	+-----+-----+----------------------------+-----------------+
//
//	vrd    see Verdict
//	seq    of the transaction that was decided last; it only grows, so no word repeats
//	owner  low 20 bits of the session that the word is granted to
//
// Vectors: testdata/intent.
type Status uint64

// Verdict is what a status word says of the transaction of its seq.
type Verdict uint8

const (
	Undecided Verdict = 0 // of seq 0, or of a word granted anew
	Commit    Verdict = 1
	Abort     Verdict = 2
)

func (v Verdict) String() string {
	return [...]string{"undecided", "COMMIT", "ABORT", "invalid"}[v&3]
}

// MaxStatusSeq is the last transaction that a status word can serve.
const MaxStatusSeq = 1<<40 - 1

// MakeStatus builds the status word of session that says v of transaction seq.
func MakeStatus(seq uint64, v Verdict, session uint32) Status {
	return Status(v&3)<<60 | Status(seq&MaxStatusSeq)<<20 | Status(session&0xfffff)
}

func (s Status) Seq() uint64      { return uint64(s>>20) & MaxStatusSeq }
func (s Status) Verdict() Verdict { return Verdict(s>>60) & 3 }
func (s Status) Owner() uint32    { return uint32(s) & 0xfffff }

// With is s once v is said of transaction seq.
func (s Status) With(seq uint64, v Verdict) Status { return MakeStatus(seq, v, s.Owner()) }

// Of is the verdict on transaction seq: Undecided while the word has not come to it. over: the word went on to a later
// transaction, so seq's intents are gone.
func (s Status) Of(seq uint64) (v Verdict, over bool) {
	switch k := s.Seq(); {
	case k < seq:
		return Undecided, false
	case k > seq:
		return Undecided, true
	}
	return s.Verdict(), false
}

// Check reports a word that nobody writes, read at off in its region.
func (s Status) Check(off uint64) error {
	if s>>62 != 0 || s.Verdict() == 3 {
		return &CorruptError{What: "status word", Off: off, Check: "state and verdict", Got: uint64(s)}
	}
	return nil
}

func (s Status) String() string {
	return fmt.Sprintf("transaction %d %v of s%d", s.Seq(), s.Verdict(), s.Owner())
}

// StatusOff reports whether off is that of a status word, in the index area of indexBytes. A status word is in a
// block, which is laid out as a Group with status words for slots.
func StatusOff(off, indexBytes uint64) bool {
	in := (off - RegionPageSize) % GroupSize
	return off >= RegionPageSize && off < indexBytes && off%8 == 0 && in >= GroupSlotsOff
}

// IntentKind is what a transaction does to a key. The zero value is invalid.
type IntentKind uint8

const (
	IntentPut         IntentKind = 1
	IntentDelete      IntentKind = 2
	IntentInsert      IntentKind = 3 // put of a key that was absent
	IntentGuard       IntentKind = 4 // the key stays as it is
	IntentGuardAbsent IntentKind = 5 // the key stays absent
)

func (k IntentKind) String() string {
	names := [...]string{"invalid", "put", "delete", "insert", "guard", "guard-absent"}
	if int(k) >= len(names) {
		k = 0
	}
	return names[k]
}

// IntentLen is the length of an intent record's value, in bytes.
const IntentLen = 64

// Intent is the value of a FlagIntent record: one key of a transaction that may not be decided yet. The slot word that
// names the record is FROZEN.
//
//	0     1      2   4      8        12       16      24      32       40       48      56      64
//	+-----+------+---+------+--------+--------+-------+-------+--------+--------+-------+-------+
//	| kind| try  |lng| pg   | gen    | 0      | off   | seq   | parent | final  | ts    | coord |
//	+-----+------+---+------+--------+--------+-------+-------+--------+--------+-------+-------+
//
//	pg, gen, off  the status word: placement group, its generation, bytes from the start of the region
//	seq           of the transaction at that word
//	parent        the word before: LIVE; EMPTY for insert and guard-absent
//	final         the LIVE word of the new record; 0 for delete and guard-absent
//	ts, coord     version clock of the first attempt, and session: the age
//	try           attempts so far; others wait longer for later ones
//	lng           u16, see IntentLong
type Intent struct {
	Kind          IntentKind
	Try           uint8
	Long          IntentLong
	PG            uint32
	Generation    uint32
	Off           uint64
	Seq           uint64
	Parent, Final Word
	TS            uint64
	Coord         uint64
}

// IntentLong says which of the records that an intent names are manifests. Both records of a guard are, or neither: the
// second is a copy of the first and names the same chunks.
type IntentLong uint16

const (
	LongParent IntentLong = 1 << iota
	LongFinal
)

func (l IntentLong) String() string {
	return [...]string{"neither", "parent", "final", "both"}[l&(LongParent|LongFinal)]
}

// Older reports whether the transaction of i began before that of o.
func (i *Intent) Older(o *Intent) bool {
	return i.TS < o.TS || i.TS == o.TS && i.Coord < o.Coord
}

// EncodeIntent writes i to b, which must hold IntentLen bytes.
func EncodeIntent(b []byte, i *Intent) {
	_ = b[IntentLen-1]
	clear(b[:IntentLen])
	b[0], b[1] = byte(i.Kind), i.Try
	binary.LittleEndian.PutUint16(b[2:], uint16(i.Long))
	binary.LittleEndian.PutUint32(b[4:], i.PG)
	binary.LittleEndian.PutUint32(b[8:], i.Generation)
	binary.LittleEndian.PutUint64(b[16:], i.Off)
	binary.LittleEndian.PutUint64(b[24:], i.Seq)
	binary.LittleEndian.PutUint64(b[32:], uint64(i.Parent))
	binary.LittleEndian.PutUint64(b[40:], uint64(i.Final))
	binary.LittleEndian.PutUint64(b[48:], i.TS)
	binary.LittleEndian.PutUint64(b[56:], i.Coord)
}

// ParseIntent checks the value of an intent record; parent and final are checked against the heap [lo, hi) in units.
// The placement group and the offset are for the caller to check, who knows the map.
func ParseIntent(b []byte, lo, hi uint32) (i Intent, err error) {
	bad := func(off uint64, check string, got, want uint64) (Intent, error) {
		return Intent{}, corrupt("intent", off, check, got, want, b)
	}
	if len(b) != IntentLen {
		return bad(0, "length", uint64(len(b)), IntentLen)
	}
	i = Intent{Kind: IntentKind(b[0]), Try: b[1], Long: IntentLong(binary.LittleEndian.Uint16(b[2:])),
		PG: binary.LittleEndian.Uint32(b[4:]), Generation: binary.LittleEndian.Uint32(b[8:]),
		Off: binary.LittleEndian.Uint64(b[16:]), Seq: binary.LittleEndian.Uint64(b[24:]),
		Parent: Word(binary.LittleEndian.Uint64(b[32:])), Final: Word(binary.LittleEndian.Uint64(b[40:])),
		TS: binary.LittleEndian.Uint64(b[48:]), Coord: binary.LittleEndian.Uint64(b[56:])}
	if z := binary.LittleEndian.Uint32(b[12:]); z != 0 {
		return bad(12, "reserved bytes", uint64(z), 0)
	}
	if i.Kind < IntentPut || i.Kind > IntentGuardAbsent {
		return bad(0, "kind", uint64(i.Kind), uint64(IntentGuardAbsent))
	}
	if i.Seq == 0 || i.Seq > MaxStatusSeq {
		return bad(24, "sequence number", i.Seq, MaxStatusSeq)
	}
	if i.Off%8 != 0 {
		return bad(16, "offset of the status word", i.Off, 0)
	}
	parent, final := Live, Live
	switch i.Kind {
	case IntentInsert:
		parent = Empty
	case IntentDelete:
		final = Empty
	case IntentGuardAbsent:
		parent, final = Empty, Empty
	}
	if i.Parent.State() != parent || parent == Live && !InHeap(i.Parent, lo, hi) {
		return bad(32, "parent", uint64(i.Parent), uint64(hi))
	}
	if i.Final.State() != final || final == Live && !InHeap(i.Final, lo, hi) || final == Empty && i.Final != 0 {
		return bad(40, "final", uint64(i.Final), uint64(hi))
	}
	long := LongParent | LongFinal
	if parent == Empty {
		long &^= LongParent
	}
	if final == Empty {
		long &^= LongFinal
	}
	if i.Long&^long != 0 || i.Kind == IntentGuard && i.Long != 0 && i.Long != long {
		return bad(2, "which records are manifests", uint64(i.Long), uint64(long))
	}
	return i, nil
}
