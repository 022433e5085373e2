package rdb

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// Payloads that a redis-server 7.0.15 returned to DUMP are in internal/gateway, which compares with one.
func TestAppend(t *testing.T) {
	// As in the documentation of DUMP, for version 10.
	if got, want := Append(nil, Value{Parts: [][]byte{[]byte("10")}}), "\x00\xc0\n\n\x00n\x9f\x11Z\x11\xd9\xb1c"; !strings.HasPrefix(string(got), want[:5]) {
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
		"\x00\x05hello", "\x00\xc3\x0b\x41\x2c\x01aa\xe0\x7f\x00", "\x01\x02\x01a\x01b", "\x04\x01\x01f\x01v", "\x03\x01\x01m\x031.5",
		"\x0b\x0c\x02\x00\x00\x00\x02\x00\x00\x00\x01\x00\x02\x00",
		"\x10\x0f\x0f\x00\x00\x00\x02\x00\x81f\x02\x81v\x02\x01\x01\xff",
		"\x12\x01\x02\x0b\x0b\x00\x00\x00\x01\x00\x81a\x02\xff",
		"\x0e\x01\x11\x11\x00\x00\x00\x0a\x00\x00\x00\x02\x00\x00\x01a\x03\xf2\xff",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := Parse(sealed(b), 1<<20)
		if err != nil {
			return
		}
		again, err := Parse(Append(nil, v), 1<<30)
		if err != nil || again.Kind != v.Kind || !reflect.DeepEqual(again.Parts, v.Parts) && len(v.Parts[0]) > 0 {
			t.Fatalf("%v again: %v, %v", v, again, err)
		}
	})
}

// TestLibraries: the payload is one that a redis-server 7.0.15 returned to FUNCTION DUMP, the second library of it compressed.
func TestLibraries(t *testing.T) {
	want := []string{"#!LUA name=b\nredis.register_function(\"zz\", function() return 1 end)",
		"#!lua name=lib1\nredis.register_function(\"f\", function(keys,args) return {keys,args} end)"}
	payload := "\xf5@C" + want[0] + "\xf5\xc3@P@X\x1f#!lua name=lib1\nredis.register_f\x0cunction(\"f\", \xe0\x00\r\x12keys,args) return {\xe0\x00\x12\x05} end)\n\x00:e=\xd3p92\xac"
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
	for body, want := range map[string]error{"\xf6\x01x": ErrOldLibrary, "\x00\x01x": ErrNoLibrary, "\xf5": ErrLibrary, "\xf5\x05x": ErrLibrary, "\xf5\x01x\xf5\xff": ErrLibrary,
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
	for _, s := range []string{"", "\xf5\x05hello", "\xf5\x01a\xf5\x01b", "\xf5\xc0\x05", "\xf5\xc3\x0b\x41\x2c\x01aa\xe0\x7f\x00", "\xf6\x01a", "\xf5\x80\x00\x00\x00\x01a"} {
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
