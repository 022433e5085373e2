package collection

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func membersOf(s Set) (all []string) {
	for m := range s.All() {
		all = append(all, string(m))
	}
	return all
}

// TestSetBytes has the examples of docs/collections.md.
func TestSetBytes(t *testing.T) {
	var s Set
	for _, c := range []struct{ add, want string }{
		{"3", "\x01\x03\x00"},
		{"-1", "\x01\xff\xff\x03\x00"},
		{"3", "\x01\xff\xff\x03\x00"},
		{"70000", "\x02\xff\xff\xff\xff\x03\x00\x00\x00\x70\x11\x01\x00"},
		{"x", "\x04\x04\x02-1\x013\x0570000\x01x"},
	} {
		s, _, _ = s.AddAll(split(c.add))
		if string(s) != c.want {
			t.Errorf("with %s: %q, want %q", c.add, s, c.want)
		}
	}
}

// TestSetModel does random things to a set and to a map.
func TestSetModel(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 3))
		size := 1 + rng.IntN(700)
		wide := rng.IntN(3)
		words := rng.IntN(2) * rng.IntN(100)
		text := func() string {
			if rng.IntN(100) < words {
				return strings.Repeat("w", rng.IntN(3)) + strconv.Itoa(rng.IntN(size)) +
					strings.Repeat("z", rng.IntN(200)*rng.IntN(2))
			}
			n := rng.Int64N(int64(size)) - int64(size)/2
			switch rng.IntN(20) * wide {
			case 1:
				n *= 1 << 20
			case 2:
				n <<= 50
			case 6:
				return []string{"-9223372036854775808", "9223372036854775807", "9223372036854775808", "-0", "01", "+1",
					"", " 1"}[rng.IntN(8)]
			}
			return strconv.FormatInt(n, 10)
		}
		texts := func(n int) (all []string) {
			for range n {
				all = append(all, text())
			}
			return all
		}
		model := make(map[string]bool)
		var s Set
		ints := true
		for range 150 {
			k := 1 + rng.IntN(4)
			if rng.IntN(8) == 0 {
				k = rng.IntN(300)
			}
			var n, want int
			var err error
			args := texts(k)
			switch rng.IntN(5) {
			case 0, 1, 2:
				for _, m := range args {
					if !model[m] {
						model[m] = true
						want++
					}
					if x, err := strconv.ParseInt(m, 10, 64); err != nil || strconv.FormatInt(x, 10) != m {
						ints = false
					}
				}
				ints = ints && len(model) <= 512
				s, n, err = s.AddAll(split(args...))
			case 3:
				for _, m := range args {
					if model[m] {
						delete(model, m)
						want++
					}
				}
				s, n, err = s.Remove(split(args...))
			case 4:
				places := s.Places(nil)
				var kept []Place
				for _, p := range places {
					if rng.IntN(10) == 0 {
						kept = append(kept, p)
						delete(model, string(s.At(nil, p)))
					}
				}
				s = s.RemovePlaces(kept)
			}
			if len(model) == 0 {
				ints = true
			}
			if err != nil || n != want {
				t.Fatalf("seed %d: %d of %q, %v, want %d", seed, n, args, err, want)
			}
			if n, err := s.Len(); err != nil || n != len(model) || s.Ints() != ints || (len(s) == 0) != (n == 0) {
				t.Fatalf("seed %d: %d members, %v, integers %v, want %d, %v", seed, n, err, s.Ints(), len(model), ints)
			}
			all := membersOf(s)
			for i, m := range s.Members(nil) {
				if string(m) != all[i] || !model[all[i]] {
					t.Fatalf("seed %d: member %q", seed, m)
				}
			}
			if ints && !slices.IsSortedFunc(all, func(a, b string) int {
				x, _ := strconv.ParseInt(a, 10, 64)
				y, _ := strconv.ParseInt(b, 10, 64)
				return int(min(1, max(-1, x/2-y/2)))
			}) {
				t.Fatalf("seed %d: %q", seed, all)
			}
			args = append(args, texts(50)...)
			has, err := s.HasAll(nil, split(args...))
			for i, m := range args {
				if one, err2 := s.Has([]byte(m)); err != nil || err2 != nil || has[i] != model[m] || one != model[m] {
					t.Fatalf("seed %d: has %q: %v and %v, want %v", seed, m, has[i], one, model[m])
				}
			}
		}
	}
}

// checkSet is checkHash for sets.
func checkSet(t *testing.T, b []byte) {
	n, bad := Set(b).Len()
	var many [][]byte
	for i := range 600 {
		many = append(many, []byte(strconv.Itoa(i)))
	}
	for i, f := range []func(Set) error{
		func(s Set) error { _, err := s.Has([]byte("m")); return err },
		func(s Set) error { _, err := s.HasAll(nil, many); return err },
		func(s Set) error { _, _, err := s.AddAll(split("m", "1", "70000")); return err },
		func(s Set) error { _, _, err := s.AddAll(split("1", "70000", "1234567890123")); return err },
		func(s Set) error { _, _, err := s.AddAll(many); return err },
		func(s Set) error { _, _, err := s.Remove(split("m", "1")); return err },
		func(s Set) error { _, err := s.Scan(1, 10, func([]byte) {}); return err },
	} {
		s := Set(bytes.Clone(b))
		if err := f(s); err != bad {
			t.Fatalf("method %d: %v, and Len %v", i, err, bad)
		} else if err != nil && !bytes.Equal(s, b) {
			t.Fatalf("method %d changed corrupt bytes", i)
		}
	}
	if bad != nil {
		return
	}
	all := membersOf(b)
	if len(all) != n || len(Set(b).Places(nil)) != n || len(Set(b).Members(nil)) != n {
		t.Fatalf("%d members, and %d", len(all), n)
	}
	for _, m := range all {
		if is, err := Set(b).Has([]byte(m)); !is || err != nil {
			t.Fatalf("member %q: %v", m, err)
		}
	}
	s, _, err := Set(bytes.Clone(b)).AddAll(split("m", "5"))
	if has, err2 := s.HasAll(nil, split("m", "5")); err != nil || err2 != nil || !has[0] || !has[1] {
		t.Fatalf("%v, %v, %v", has, err, err2)
	}
	s, _, err = s.Remove(split("m", "5"))
	if _, err2 := s.Len(); err != nil || err2 != nil {
		t.Fatalf("%v, %v", err, err2)
	}
}

func FuzzSet(f *testing.F) {
	words, _, _ := Set(nil).AddAll(split("a", "", "m", strings.Repeat("x", 300)))
	small, _, _ := Set(nil).AddAll(split("1", "2", "-3"))
	wide, _, _ := Set(nil).AddAll(split("1", "9223372036854775807", "-9223372036854775808"))
	for _, s := range []Set{words, small, wide} {
		for i := range s {
			f.Add([]byte(s[:i]))
		}
		f.Add([]byte(s))
	}
	f.Add([]byte("\x01\x02\x00\x01\x00"))
	f.Add([]byte("\x00\x02"))
	f.Add([]byte("\x09\x02"))
	f.Fuzz(func(t *testing.T, b []byte) { checkSet(t, b) })
}
