package layout

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// stubRecord encodes a stub of a key.
func stubRecord(h RecordHeader, key string, s *Stub, tail string) []byte {
	body := AppendStub(nil, s, []byte(tail))
	b := make([]byte, RecordLen(len(key), len(body)))
	h.Stub = true
	EncodeRecord(b, h, []byte(key), body)
	return b
}

func TestStubVectors(t *testing.T) {
	vectors(t, "stub", func(t *testing.T, d *datadriven.TestData) string {
		var out bytes.Buffer
		var key, tail string
		d.MaybeScanArgs(t, "key", &key)
		switch d.Cmd {
		case "encode":
			d.MaybeScanArgs(t, "tail", &tail)
			s := Stub{Version: num[uint64](t, d, "object", 1), Len: num[uint32](t, d, "len", 0),
				ValueLen: num[uint32](t, d, "vlen", 0), Sum: num[uint32](t, d, "sum", 0), Long: d.HasArg("long")}
			for _, line := range strings.Fields(d.Input) {
				if _, err := fmt.Sscanf(line, "%d@%v", &s.At[s.Copies].Volume, &s.At[s.Copies].At); err != nil {
					d.Fatalf(t, "%q: %v", line, err)
				}
				s.Copies++
			}
			b := stubRecord(RecordHeader{Version: num[uint64](t, d, "version", 0),
				Flags: num[RecordFlags](t, d, "flags", 0), Expiry: num[uint64](t, d, "expiry", 0),
				Writer: num[uint32](t, d, "writer", 0)}, key, &s, tail)
			out.WriteString(hexLines(b))
			if err := DumpRecord(&out, 0x40, b); err != nil {
				d.Fatalf(t, "%v", err)
			}
			if _, err := ParseRecord(b); err != nil {
				fmt.Fprintf(&out, "as a record: %v\n", err)
			}
		case "body":
			body := unhex(t, d, d.Input)
			b := make([]byte, RecordLen(len(key), len(body)))
			EncodeRecord(b, RecordHeader{Version: 1, Flags: num[RecordFlags](t, d, "flags", 0), Stub: true},
				[]byte(key), body)
			if _, err := ParseLinked(b); err != nil {
				return fmt.Sprintf("error: %v\n", err)
			}
			return "accepted\n"
		}
		return out.String()
	})
}

// No changed bit of a stub goes unnoticed, nor does a cut.
func TestStubDetectsEveryFlip(t *testing.T) {
	s := Stub{Version: 7, Len: 100, ValueLen: 63, Sum: 9, Copies: 2,
		At: [MaxStubCopies]ObjectAt{{Volume: 1, At: 1 << 20}, {Volume: 2, At: 1<<63 | 5}}}
	b := stubRecord(RecordHeader{Version: 8, Expiry: 9, Flags: FlagUser}, "a key", &s, "tail")
	r, err := ParseLinked(append(bytes.Clone(b), 0xff))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := r.Object(); err != nil || got != s || !r.Stub || string(r.Tail()) != "tail" || r.Expiry != 9 {
		t.Fatalf("%+v, %v from %+v", got, err, r)
	}
	for i := range len(b) * 8 {
		b[i/8] ^= 1 << (i % 8)
		if _, err := ParseLinked(b); !isCorrupt(err) {
			t.Fatalf("bit %d flipped: error %v, want *CorruptError", i, err)
		}
		b[i/8] ^= 1 << (i % 8)
	}
	for n := range len(b) {
		if _, err := ParseLinked(b[:n]); !isCorrupt(err) {
			t.Fatalf("cut to %d bytes: error %v, want *CorruptError", n, err)
		}
	}
}

// Nobody is given a stub who does not ask for stubs, whichever way the record comes.
func TestStubIsNoRecord(t *testing.T) {
	s := Stub{Version: 7, Len: 100, ValueLen: 67, Copies: 1, At: [MaxStubCopies]ObjectAt{{Volume: 1, At: 1}}}
	b := stubRecord(RecordHeader{Version: 8}, "k", &s, "")
	if _, err := ParseRecord(b); !isCorrupt(err) {
		t.Errorf("ParseRecord: %v", err)
	}
	var r Record
	head, value := b[:RecordHeaderSize+1], b[RecordHeaderSize+1:]
	if err := r.ParseApart(head, value, HeadSum(head)); !isCorrupt(err) {
		t.Errorf("ParseApart: %v", err)
	}
	if err := r.ParseHead(head, len(b)); err != nil || !r.Stub {
		t.Errorf("ParseHead: %v, stub %t", err, r.Stub)
	}
	if !MendKey(append(bytes.Clone(b[:RecordHeaderSize]), append([]byte("x"), value...)...), []byte("k")) {
		t.Error("the key of a stub is not mended")
	}
}

// object is a record with the stub that names it.
func object(h RecordHeader, key, value string) (b []byte, s Stub) {
	b = make([]byte, RecordLen(len(key), len(value)))
	EncodeRecord(b, h, []byte(key), []byte(value))
	r, err := ParseRecord(b)
	if err != nil {
		panic(err)
	}
	return b, StubOf(&r, len(b), HeadSum(b), ObjectAt{Volume: 1, At: 64})
}

// A stub and its object are the record again. The object counts only if it is the one that the stub names.
func TestStubFill(t *testing.T) {
	b, s := object(RecordHeader{Version: 5, Flags: FlagUser, Writer: 3, Expiry: 77}, "key", "some valueUSER")
	parse := func(h RecordHeader, key string, s *Stub, tail string) Record {
		r, err := ParseLinked(stubRecord(h, key, s, tail))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for _, c := range []struct {
		flags      RecordFlags
		tail, want string
	}{{FlagUser, "USER", "some valueUSER"}, {FlagUser, "user", "some valueuser"}, {0, "", "some value"},
		{FlagUser | FlagNote, "a note..USER", "some valuea note..USER"}, {FlagNote | Type(2).Flags(), "a note..",
			"some valuea note.."}} {
		r := parse(RecordHeader{Version: 9, Flags: c.flags, Expiry: 11}, "key", &s, c.tail)
		if err := s.Fill(&r, append(bytes.Clone(b), 1, 2, 3)); err != nil {
			t.Fatalf("%q: %v", c.tail, err)
		}
		if string(r.Value) != c.want || r.Version != 9 || r.Expiry != 11 || r.Flags != c.flags || r.Stub ||
			int(r.ValueLen) != len(c.want) {
			t.Errorf("%q: %+v", c.tail, r)
		}
	}
	other := func(h RecordHeader, key, value string) []byte { b, _ := object(h, key, value); return b }
	flagged := func(version uint64, key, value string) []byte {
		return other(RecordHeader{Version: version, Flags: FlagUser, Writer: 3, Expiry: 77}, key, value)
	}
	pinned := bytes.Clone(b)
	long := s
	long.Long = true
	for name, c := range map[string]struct {
		s *Stub
		b []byte
	}{
		"zeroes":  {&s, make([]byte, len(b))},
		"short":   {&s, b[:len(b)-1]},
		"nothing": {&s, nil},
		"version": {&s, flagged(6, "key", "some valueUSER")},
		"key":     {&s, flagged(5, "kex", "some valueUSER")},
		"value":   {&s, flagged(5, "key", "some valveUSER")},
		"no tail": {&s, other(RecordHeader{Version: 5, Writer: 3, Expiry: 77}, "key", "some valueUSER")},
		"a stub":  {&s, stubRecord(RecordHeader{Version: 5}, "key", &s, "")},
		"chunks":  {&long, pinned},
	} {
		r := parse(RecordHeader{Version: 9, Flags: FlagUser}, "key", &s, "USER")
		was := r
		if err := c.s.Fill(&r, c.b); !isCorrupt(err) {
			t.Errorf("%s: error %v, want *CorruptError", name, err)
		}
		if !r.Stub || !bytes.Equal(r.Value, was.Value) {
			t.Errorf("%s: the stub is %+v afterwards", name, r)
		}
	}
}

// Any bytes at all are a stub that encodes to the same, or refused.
func FuzzParseStub(f *testing.F) {
	s := Stub{Version: 7, Len: 100, ValueLen: 64, Copies: 1, At: [MaxStubCopies]ObjectAt{{Volume: 1, At: 1 << 20}}}
	f.Add(AppendStub(nil, &s, nil), uint8(0))
	s.Copies, s.At[1] = 2, ObjectAt{Volume: 2, At: 9}
	f.Add(AppendStub(nil, &s, []byte("tail")), uint8(FlagUser))
	s.Long, s.Len = true, 1<<28
	f.Add(AppendStub(nil, &s, nil), uint8(0))
	f.Add([]byte{}, uint8(0xff))
	b, whole := object(RecordHeader{Version: 5}, "key", "value")
	f.Add(AppendStub(nil, &whole, nil), uint8(0))
	f.Fuzz(func(t *testing.T, body []byte, flags uint8) {
		rec := make([]byte, RecordLen(3, len(body)))
		EncodeRecord(rec, RecordHeader{Version: 1, Flags: RecordFlags(flags), Stub: true}, []byte("key"), body)
		if err := DumpRecord(discard{}, 0, rec); err != nil {
			t.Fatal(err)
		}
		r, err := ParseLinked(rec)
		if err != nil {
			if !isCorrupt(err) {
				t.Fatalf("error %T %v, want *CorruptError", err, err)
			}
			return
		}
		s, err := r.Object()
		if err != nil || !bytes.Equal(AppendStub(nil, &s, r.Tail()), body) {
			t.Fatalf("%x is %+v, %v", body, s, err)
		}
		tail := append([]byte(nil), r.Tail()...)
		if err := s.Fill(&r, b); err == nil && string(r.Value) != "value"+string(tail) {
			t.Fatalf("%x fills to %q", body, r.Value)
		} else if err != nil && !isCorrupt(err) {
			t.Fatalf("error %T %v, want *CorruptError", err, err)
		}
	})
}

// The header of a stub is that of a record: its version is changed in place.
func TestStubVersion(t *testing.T) {
	s := Stub{Version: 7, Len: 100, ValueLen: 67, Copies: 1, At: [MaxStubCopies]ObjectAt{{Volume: 1, At: 1}}}
	b := stubRecord(RecordHeader{Version: 8}, "k", &s, "")
	SetVersion(b, 12)
	r, err := ParseLinked(b)
	if got, _ := r.Object(); err != nil || r.Version != 12 || got.Version != 7 {
		t.Fatalf("%+v, %v", r, err)
	}
	if binary.LittleEndian.Uint64(b[RecordHeaderSize+1:]) != 7 {
		t.Fatal("the object's version has moved")
	}
}
