package rdb

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/collection"
)

// Payloads that a redis-server 7.0.15 returned to DUMP are in internal/gateway, which compares with one.
func TestAppend(t *testing.T) {
	// As in the documentation of DUMP, for version 10.
	if got, want := Append(nil, Value{Parts: [][]byte{[]byte("10")}}),
		"\x00\xc0\n\n\x00n\x9f\x11Z\x11\xd9\xb1c"; !strings.HasPrefix(string(got), want[:5]) {
		t.Errorf("%q, want %q", got, want)
	}
	for _, v := range []Value{
		{Parts: [][]byte{[]byte("-129")}},
		{Parts: [][]byte{bytes.Repeat([]byte("x"), 70_000)}},
		{Kind: List, Parts: [][]byte{[]byte("a"), []byte(""), []byte("a"), []byte("007")}},
		{Kind: Set, Parts: [][]byte{[]byte("a"), []byte("100000")}},
		{Kind: Hash, Parts: [][]byte{[]byte("f"), []byte("v"), []byte("g"), []byte("v")}},
		{Kind: SortedSet, Parts: [][]byte{[]byte("m"), []byte("n")}, Scores: []float64{1.5, -2}},
	} {
		b := Append(nil, v)
		got, err := Parse(b, 1<<20)
		if err != nil || !reflect.DeepEqual(got, v) {
			t.Errorf("%v: %v, %v", v.Kind, got, err)
		}
		for i := range min(len(b), 100) {
			b[i] ^= 1
			if _, err := Parse(b, 1<<20); !errors.Is(err, ErrChecksum) {
				t.Errorf("byte %d changed: %v", i, err)
			}
			b[i] ^= 1
		}
		if _, err := Parse(b, 10); !errors.Is(err, ErrFormat) {
			t.Errorf("%v with a limit: %v", v.Kind, err)
		}
	}
}

// streamOf is a stream of n entries, some of them of other fields, with groups.
func streamOf(n int) *collection.Stream {
	s, _ := collection.ParseStream(nil)
	for i := range n {
		texts := [][]byte{[]byte("field"), bytes.Repeat([]byte("x"), i), []byte("n"),
			strconv.AppendInt(nil, int64(i)*7919-3000, 10)}
		s.Add(collection.StreamID{MS: 1 << 40 * uint64(1+i/3), Seq: uint64(i % 3)}, texts[:4-2*(i%5/4)])
	}
	s.Added, s.MaxDeleted = math.MaxUint64, collection.StreamID{MS: 1, Seq: 1 << 40}
	for _, name := range []string{"", "12", "g"} {
		g := &collection.StreamGroup{Name: []byte(name), Last: collection.StreamID{MS: 7}, Read: int64(len(name)) - 1}
		for i := range len(name) {
			c, _ := g.See([]byte{byte('a' + i)}, 1<<41)
			g.Put(collection.PendingEntry{ID: collection.StreamID{MS: uint64(9 - i)}, Delivered: 1 << 41, Times: 70_000,
				Consumer: c})
		}
		s.AddGroup(g)
	}
	return s
}

// TestStream: what a stream is written as is the stream again, whatever has changed on the way is none, and so is what
// takes more than the limit.
func TestStream(t *testing.T) {
	for _, n := range []int{0, 1, 30, 260} {
		s := streamOf(n)
		b := Append(nil, Value{Kind: Stream, Stream: s})
		got, err := Parse(b, 1<<20)
		if err != nil || got.Kind != Stream || !bytes.Equal(got.Stream.Bytes(true), s.Bytes(true)) {
			t.Fatalf("%d entries: %v\n%x, want\n%x", n, err, got.Stream.Bytes(true), s.Bytes(true))
		}
		if _, err := Parse(b, len(s.Bytes(true))/2); !errors.Is(err, ErrFormat) {
			t.Errorf("%d entries with a limit: %v", n, err)
		}
		if end := len(b) - 10; n == 1 {
			for i := range end {
				if _, err := Parse(sealed(b[:i]), 1<<20); !errors.Is(err, ErrFormat) {
					t.Errorf("the first %d bytes: %v", i, err)
				}
			}
		}
	}
}

// TestOldStream: of the form of Redis 5 and 6, which does not say what has been added and read, both are worked out as
// Redis does.
func TestOldStream(t *testing.T) {
	s, _ := collection.ParseStream(nil)
	for seq := range uint64(3) {
		s.Add(collection.StreamID{MS: 5, Seq: seq}, [][]byte{[]byte("f"), []byte("v")})
	}
	n := nodesOf(s)[0]
	b := appendString(appendString([]byte{typeStream, 1}, appendRawID(nil, n.id)), n.pack())
	b = appendID(appendLen(b, 3), collection.StreamID{MS: 5, Seq: 9})
	b = appendID(appendString(append(b, 2), []byte("a")), collection.StreamID{MS: 5})
	b = appendID(appendString(append(b, 0, 0), []byte("b")), collection.StreamID{MS: 5, Seq: 1})
	v, err := Parse(sealed(append(b, 0, 0)), 1<<20)
	if err != nil || v.Stream.Added != 3 || v.Stream.Last.Seq != 9 || len(v.Stream.Groups) != 2 {
		t.Fatalf("%+v, %v", v.Stream, err)
	}
	if a, b := v.Stream.Groups[0].Read, v.Stream.Groups[1].Read; a != 1 || b != -1 {
		t.Errorf("the groups have read %d and %d entries, want 1 and -1: not known", a, b)
	}
}

// TestListpackLengths: the length of an element takes another byte where Redis's does.
func TestListpackLengths(t *testing.T) {
	for _, n := range []int{0, 62, 125, 126, 4095, 4096, 16376, 16377, 16378, 16379, 2097144, 2097145, 2097146} {
		var p packer
		p.string(bytes.Repeat([]byte("x"), n))
		r := &reader{b: append(append(make([]byte, 6), p.b...), 0xff), left: 1 << 30}
		binary.LittleEndian.PutUint32(r.b, uint32(len(r.b)))
		var v Value
		if r.listpack(&v); r.bad || len(v.Parts) != 1 || len(v.Parts[0]) != n {
			t.Errorf("%d bytes: %v, %d parts", n, r.bad, len(v.Parts))
		}
	}
}

// TestListpackIntegers: an integer is the same again, at the ends of each form too.
func TestListpackIntegers(t *testing.T) {
	var p packer
	var want [][]byte
	for shift := range 64 {
		for _, n := range []int64{1 << shift, 1<<shift - 1, -1 << shift, -1<<shift - 1} {
			p.int(n)
			want = append(want, strconv.AppendInt(nil, n, 10))
		}
	}
	r := &reader{b: append(append(make([]byte, 6), p.b...), 0xff), left: 1 << 20}
	binary.LittleEndian.PutUint32(r.b, uint32(len(r.b)))
	var v Value
	if r.listpack(&v); r.bad || !reflect.DeepEqual(v.Parts, want) {
		t.Errorf("%v %q, want %q", r.bad, v.Parts, want)
	}
}

// sealed puts version and checksum behind a value.
func sealed(b []byte) []byte {
	b = append(bytes.Clone(b), version, 0)
	sum := checksum(b)
	for range 8 {
		b = append(b, byte(sum))
		sum >>= 8
	}
	return b
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"\x00\x05hello", "\x00\xc3\x0b\x41\x2c\x01aa\xe0\x7f\x00", "\x01\x02\x01a\x01b", "\x04\x01\x01f\x01v",
		"\x03\x01\x01m\x031.5",
		"\x0b\x0c\x02\x00\x00\x00\x02\x00\x00\x00\x01\x00\x02\x00",
		"\x10\x0f\x0f\x00\x00\x00\x02\x00\x81f\x02\x81v\x02\x01\x01\xff",
		"\x12\x01\x02\x0b\x0b\x00\x00\x00\x01\x00\x81a\x02\xff",
		"\x0e\x01\x11\x11\x00\x00\x00\x0a\x00\x00\x00\x02\x00\x00\x01a\x03\xf2\xff",
	} {
		f.Add([]byte(s))
	}
	for _, n := range []int{0, 1, 5} {
		b := Append(nil, Value{Kind: Stream, Stream: streamOf(n)})
		f.Add(b[:len(b)-10])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := Parse(sealed(b), 1<<20)
		if err != nil {
			return
		}
		if v.Kind == Stream {
			again, err := Parse(Append(nil, v), 1<<30)
			if err != nil || !bytes.Equal(again.Stream.Bytes(true), v.Stream.Bytes(true)) {
				t.Fatalf("%x again: %v", v.Stream.Bytes(true), err)
			}
			return
		}
		again, err := Parse(Append(nil, v), 1<<30)
		if err != nil || again.Kind != v.Kind || !reflect.DeepEqual(again.Parts, v.Parts) && len(v.Parts[0]) > 0 {
			t.Fatalf("%v again: %v, %v", v, again, err)
		}
	})
}

// TestLibraries: the payload is one that a redis-server 7.0.15 returned to FUNCTION DUMP, the second library of it
// compressed.
func TestLibraries(t *testing.T) {
	want := []string{"#!LUA name=b\nredis.register_function(\"zz\", function() return 1 end)",
		"#!lua name=lib1\nredis.register_function(\"f\", function(keys,args) return {keys,args} end)"}
	payload := "\xf5@C" + want[0] + "\xf5\xc3@P@X\x1f#!lua name=lib1\nredis.register_f\x0cunction(\"f\", " +
		"\xe0\x00\r\x12keys,args) return {\xe0\x00\x12\x05} end)\n\x00:e=\xd3p92\xac"
	parse := func(payload []byte) []string {
		t.Helper()
		sources, err := ParseLibraries(payload, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, s := range sources {
			got = append(got, string(s))
		}
		return got
	}
	if got := parse([]byte(payload)); !reflect.DeepEqual(got, want) {
		t.Errorf("%q", got)
	}
	if got := parse(AppendLibraries(nil, [][]byte{[]byte(want[0]), []byte(want[1])})); !reflect.DeepEqual(got, want) {
		t.Errorf("again: %q", got)
	}
	if got := AppendLibraries(nil, nil); string(got) != "\n\x00]\x9b\\@\x0f\x7f\xa2\xda" || parse(got) != nil {
		t.Errorf("of no libraries: %q", got)
	}
	for body, want := range map[string]error{"\xf6\x01x": ErrOldLibrary, "\x00\x01x": ErrNoLibrary, "\xf5": ErrLibrary,
		"\xf5\x05x": ErrLibrary, "\xf5\x01x\xf5\xff": ErrLibrary,
		"\xf5\xc3\x02\x40\xff\x00x": ErrLibrary} {
		if _, err := ParseLibraries(sealed([]byte(body)), 100); err != want {
			t.Errorf("%q: %v, want %v", body, err, want)
		}
	}
	if _, err := ParseLibraries([]byte(payload), len(want[0])+len(want[1])-1); err != ErrLibrary {
		t.Errorf("longer than the limit: %v", err)
	}
	if _, err := ParseLibraries([]byte(payload[1:]), 1<<20); err != ErrChecksum {
		t.Errorf("with a byte less: %v", err)
	}
}

// FuzzLibraries is about payloads of FUNCTION RESTORE.
func FuzzLibraries(f *testing.F) {
	for _, s := range []string{"", "\xf5\x05hello", "\xf5\x01a\xf5\x01b", "\xf5\xc0\x05",
		"\xf5\xc3\x0b\x41\x2c\x01aa\xe0\x7f\x00", "\xf6\x01a", "\xf5\x80\x00\x00\x00\x01a"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 1 << 16
		sources, err := ParseLibraries(sealed(b), limit)
		if err != nil {
			return
		}
		n := 0
		for _, s := range sources {
			n += len(s)
		}
		if n > limit {
			t.Fatalf("%d bytes of sources", n)
		}
		again, err := ParseLibraries(AppendLibraries(nil, sources), limit)
		if err != nil || len(again) != len(sources) {
			t.Fatalf("%d sources again: %d, %v", len(sources), len(again), err)
		}
		for i := range again {
			if !bytes.Equal(again[i], sources[i]) {
				t.Fatalf("source %d is %q, was %q", i, again[i], sources[i])
			}
		}
	})
}
