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
