package collection

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// pair is a field and its value in a model of a hash, in which the order counts.
type pair struct{ field, value string }

func pairsOf(h Hash) (all []pair) {
	for f, v := range h.All() {
		all = append(all, pair{string(f), string(v)})
	}
	return all
}

func split(s ...string) (all [][]byte) {
	for _, x := range s {
		all = append(all, []byte(x))
	}
	return all
}

// TestHashBytes has the examples of docs/collections.md.
func TestHashBytes(t *testing.T) {
	h, _, err := Hash(nil).SetAll(split("name", "Ann", "age", "7"))
	if want := "\x01\x02\x04name\x03Ann\x03age\x017"; err != nil || string(h) != want {
		t.Errorf("%q, %v, want %q", h, err, want)
	}
	h, _, _ = h.Set([]byte("name"), []byte(strings.Repeat("x", 200)))
	if want := "\x02\x02\x04name\xc8\x01" + strings.Repeat("x", 200) + "\x03age\x017"; string(h) != want {
		t.Errorf("%q, want %q", h, want)
	}
	h, _, _ = h.Delete(split("name"))
	if want := "\x02\x01\x03age\x017"; string(h) != want {
		t.Errorf("%q, want %q", h, want)
	}
}

// TestHashModel does random things to a hash and to a list of pairs.
func TestHashModel(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		text := func(n int) string {
			s := strconv.Itoa(rng.IntN(n))
			if rng.IntN(20) == 0 {
				s += strings.Repeat("y", rng.IntN(300))
			}
			return s[:min(len(s), rng.IntN(len(s)+30))]
		}
		fields := 1 + rng.IntN(700)
		var model []pair
		var h Hash
		large := false
		for range 200 {
			switch rng.IntN(4) {
			case 0, 1:
				var args []string
				k := 1 + rng.IntN(4)
				if rng.IntN(10) == 0 {
					k = rng.IntN(300)
				}
				want := 0
				for range k {
					p := pair{text(fields), text(1000)}
					args = append(args, p.field, p.value)
					large = large || len(p.field) > 64 || len(p.value) > 64
					if i := slices.IndexFunc(model, func(q pair) bool { return q.field == p.field }); i >= 0 {
						model[i] = p
					} else {
						model = append(model, p)
						want++
					}
				}
				large = large || len(model) > 512
				var n int
				var err error
				if h, n, err = h.SetAll(split(args...)); err != nil || n != want {
					t.Fatalf("seed %d: %d new fields, %v, want %d", seed, n, err, want)
				}
			case 2:
				var args []string
				for range 1 + rng.IntN(20) {
					args = append(args, text(fields))
				}
				was := len(model)
				model = slices.DeleteFunc(model, func(p pair) bool { return slices.Contains(args, p.field) })
				var n int
				var err error
				if h, n, err = h.Delete(split(args...)); err != nil || n != was-len(model) {
					t.Fatalf("seed %d: %d deleted, %v, want %d", seed, n, err, was-len(model))
				}
				large = large && len(model) > 0
			case 3:
				var args []string
				for range 1 + rng.IntN(20) {
					args = append(args, text(fields))
				}
				got, err := h.GetAll(nil, split(args...))
				if err != nil {
					t.Fatal(err)
				}
				for i, f := range args {
					j := slices.IndexFunc(model, func(p pair) bool { return p.field == f })
					one, err := h.Get([]byte(f))
					if err != nil || !bytes.Equal(one, got[i]) || (one == nil) != (j < 0) ||
						(got[i] == nil) != (j < 0) || j >= 0 && string(one) != model[j].value {
						t.Fatalf("seed %d: field %q: %q and %q, %v", seed, f, one, got[i], err)
					}
				}
			}
			n, err := h.Len()
			if err != nil || n != len(model) || h.Large() != large || !slices.Equal(pairsOf(h), model) {
				t.Fatalf("seed %d: %d fields, %v, large %v, want %d, %v:\n%q\n%q", seed, n, err, h.Large(), len(model),
					large, pairsOf(h), model)
			}
			if (len(h) == 0) != (len(model) == 0) {
				t.Fatalf("an empty hash of %d bytes", len(h))
			}
			for i, p := range h.Places(nil) {
				if f, v := h.At(p); string(f) != model[i].field || string(v) != model[i].value {
					t.Fatalf("seed %d: %q %q at place %d, want %q", seed, f, v, i, model[i])
				}
			}
		}
	}
}

// TestHashInPlace: a change within the room that there is allocates nothing.
func TestHashInPlace(t *testing.T) {
	h := make(Hash, 0, 4096)
	for i := range 10 {
		h, _, _ = h.Set(fmt.Appendf(nil, "field%d", i), []byte("0"))
	}
	field, value := []byte("field7"), []byte("12345")
	first := &h[0]
	if n := testing.AllocsPerRun(100, func() {
		h, _, _ = h.Set(field, value)
		h, _, _ = h.Set(field, value[:1])
		h.Get(field)
		h, _, _ = h.Delete([][]byte{field})
	}); n != 0 || &h[0] != first {
		t.Errorf("%v allocations", n)
	}
}

// TestScanPromise: a scan gives all that is there from its begin to its end once, whatever else comes and goes.
func TestScanPromise(t *testing.T) {
	for seed := range uint64(10) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var h Hash
		var s Set
		stay := 1 + rng.IntN(2000)
		name := func(c string, i int) []byte { return []byte(c + strconv.Itoa(i)) }
		for i := range stay {
			h, _, _ = h.Set(name("stay", i), []byte("v"))
			s, _, _ = s.AddAll([][]byte{name("stay", i)})
			if rng.IntN(2) == 0 {
				h, _, _ = h.Set(name("go", i), nil)
				s, _, _ = s.AddAll([][]byte{name("go", i)})
			}
		}
		count := 1 + rng.Int64N(40)
		for kind, scan := range map[string]func(uint64, func([]byte)) (uint64, error){
			"hash": func(c uint64, f func([]byte)) (uint64, error) {
				return h.Scan(c, count, func(field, _ []byte) { f(field) })
			},
			"set": func(c uint64, f func([]byte)) (uint64, error) { return s.Scan(c, count, f) },
		} {
			found := make(map[string]int)
			calls := 0
			for cursor := uint64(0); ; {
				next, err := scan(cursor, func(b []byte) { found[string(b)]++ })
				if calls++; err != nil || next != 0 && next <= cursor || calls > 5000 {
					t.Fatalf("cursor %d behind %d, %v", next, cursor, err)
				}
				for range rng.IntN(5) {
					i := rng.IntN(stay)
					h, _, _ = h.Delete([][]byte{name("go", i)})
					s, _, _ = s.Remove([][]byte{name("go", i)})
					h, _, _ = h.Set(name("come", i), nil)
					s, _, _ = s.AddAll([][]byte{name("come", i)})
				}
				if cursor = next; cursor == 0 {
					break
				}
			}
			for i := range stay {
				if n := found[string(name("stay", i))]; n != 1 {
					t.Fatalf("seed %d: a %s's stay%d was found %d times", seed, kind, i, n)
				}
			}
			if n, _ := s.Len(); n > 900 && calls < 3 {
				t.Errorf("seed %d: all %d of a %s in %d calls", seed, n, kind, calls)
			}
		}
	}
}

// checkHash uses bytes as a hash: either every method finds them corrupt, and changes nothing, or all agree.
func checkHash(t *testing.T, b []byte) {
	n, bad := Hash(b).Len()
	own := func() Hash { return Hash(bytes.Clone(b)) }
	many := make([][]byte, 0, 1200)
	for i := range cap(many) / 2 {
		many = append(many, []byte(strconv.Itoa(i)), []byte("v"))
	}
	for i, f := range []func(Hash) error{
		func(h Hash) error { _, err := h.Get([]byte("f")); return err },
		func(h Hash) error { _, err := h.GetAll(nil, many); return err },
		func(h Hash) error { _, _, err := h.Set([]byte("f"), []byte("long enough")); return err },
		func(h Hash) error { _, _, err := h.SetAll(many); return err },
		func(h Hash) error { _, _, err := h.Delete(split("f")); return err },
		func(h Hash) error { _, _, err := h.Delete(many); return err },
		func(h Hash) error { _, err := h.Scan(1, 10, func(_, _ []byte) {}); return err },
	} {
		h := own()
		if err := f(h); err != bad {
			t.Fatalf("method %d: %v, and Len %v", i, err, bad)
		} else if err != nil && !bytes.Equal(h, b) {
			t.Fatalf("method %d changed corrupt bytes", i)
		}
	}
	if bad != nil {
		if !errors.Is(bad, ErrCorrupt) {
			t.Fatal(bad)
		}
		return
	}
	all := pairsOf(b)
	if len(all) != n || len(Hash(b).Places(nil)) != n {
		t.Fatalf("%d fields, and %d", len(all), n)
	}
	for _, p := range all {
		if v, err := Hash(b).Get([]byte(p.field)); v == nil || err != nil {
			t.Fatalf("field %q: %v", p.field, err)
		}
	}
	h, _, err := own().Set([]byte("f"), []byte("v"))
	if v, err2 := h.Get([]byte("f")); err != nil || err2 != nil || string(v) != "v" {
		t.Fatalf("%q, %v, %v", v, err, err2)
	}
	h, _, err = h.Delete(split("f"))
	if _, err2 := h.Len(); err != nil || err2 != nil {
		t.Fatalf("%v, %v", err, err2)
	}
}

func FuzzHash(f *testing.F) {
	h, _, _ := Hash(nil).SetAll(split("a", "1", "b", "2", "", "", "f", strings.Repeat("x", 300)))
	for i := range h {
		f.Add([]byte(h[:i]))
	}
	f.Add([]byte(h))
	f.Add([]byte("\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x01a\x01b"))
	f.Add([]byte("\x01\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01a"))
	f.Add([]byte("\x01\x00"))
	f.Add([]byte("\x01\x81\x00\x01a\x01b"))
	f.Fuzz(func(t *testing.T, b []byte) { checkHash(t, b) })
}
