package collection

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// zsetOf encodes a sorted set.
func zsetOf(entries ...ZEntry) []byte { return ZSet{}.AppendChanged(nil, nil, entries) }

func entriesOf(z ZSet) (list []ZEntry) {
	for i := range z.Len() {
		list = append(list, z.Entry(i))
	}
	return list
}

// The bytes of docs/collections.md.
func TestZSetBytes(t *testing.T) {
	b := zsetOf(ZEntry{[]byte("a"), 1}, ZEntry{[]byte("bc"), 2.5})
	want := "02000000" + "000000000000f03f" + "0000000000000440" + "01000000" + "03000000" + "616263"
	if got := fmt.Sprintf("%x", b); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestZSetChanges compares random changes with a map.
func TestZSetChanges(t *testing.T) {
	scores := []float64{0, math.Copysign(0, -1), 1, -1, 0.1, math.Inf(1), math.Inf(-1), 1e300, 5e-324, 7}
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 3))
		model := map[string]float64{}
		var value []byte
		for range 150 {
			var z ZSet
			if value != nil {
				var err error
				if z, err = ParseZSet(value); err != nil {
					t.Fatal(err)
				}
			}
			var drop []Span
			for at := 0; at < z.Len(); {
				lo := at + rng.IntN(z.Len()-at+1)
				hi := lo + rng.IntN(min(4, z.Len()-lo)+1)
				if rng.IntN(3) > 0 {
					drop = append(drop, Span{lo, hi})
					for i := lo; i < hi; i++ {
						delete(model, string(z.Member(i)))
					}
				}
				at = hi + 1
			}
			var add []ZEntry
			for range rng.IntN(6) {
				m := []byte(fmt.Sprint(rng.IntN(80)))
				if rng.IntN(20) == 0 {
					m = nil
				}
				if _, ok := model[string(m)]; !ok {
					s := scores[rng.IntN(len(scores))]
					if model[string(m)] = s; z.Small() {
						model[string(m)] = s + 0
					}
					add = append(add, ZEntry{m, s})
				}
			}
			slices.SortFunc(add, CompareZ)
			next := z.AppendChanged([]byte("kept"), drop, add)
			if want := z.ChangedLen(drop, add); len(next) != want+4 || string(next[:4]) != "kept" {
				t.Fatalf("%d bytes behind the buffer's own, want %d", len(next)-4, want)
			}
			if value = next[4:]; len(model) == 0 {
				value = nil
				continue
			}
			compareZSet(t, value, model)
		}
	}
}

// compareZSet checks all that a set tells of itself.
func compareZSet(t *testing.T, value []byte, model map[string]float64) {
	t.Helper()
	z, err := ParseZSet(value)
	if err != nil {
		t.Fatalf("%x: %v", value, err)
	}
	var want []ZEntry
	for m, s := range model {
		want = append(want, ZEntry{[]byte(m), s})
	}
	slices.SortFunc(want, CompareZ)
	got := entriesOf(z)
	if !slices.EqualFunc(got, want, func(a, b ZEntry) bool {
		return CompareZ(a, b) == 0 && math.Signbit(a.Score) == math.Signbit(b.Score)
	}) {
		t.Fatalf("got %v, want %v", got, want)
	}
	names := [][]byte{nil, []byte("absent")}
	for i, e := range want {
		if z.Find(e.Member) != i {
			t.Fatalf("%q is at %d, want %d", e.Member, z.Find(e.Member), i)
		}
		if at := z.SearchScore(e.Score, false); at > i || at > 0 && want[at-1].Score >= e.Score {
			t.Fatalf("score %v begins at %d, of %v", e.Score, at, want)
		}
		if at := z.SearchScore(e.Score, true); at <= i || at < len(want) && want[at].Score <= e.Score {
			t.Fatalf("score %v ends at %d, of %v", e.Score, at, want)
		}
		names = append(names, e.Member, e.Member)
	}
	for i, at := range z.Places(names) {
		if at != z.Find(names[i]) {
			t.Fatalf("%q is at %d, and at %d by itself", names[i], at, z.Find(names[i]))
		}
	}
}

func TestZSetSmall(t *testing.T) {
	var list []ZEntry
	for i := range 129 {
		list = append(list, ZEntry{fmt.Appendf(nil, "%03d", i), 1})
	}
	for _, c := range []struct {
		list []ZEntry
		want bool
	}{
		{list[:128], true}, {list, false},
		{[]ZEntry{{make([]byte, 64), 1}}, true}, {[]ZEntry{{make([]byte, 65), 1}, {[]byte{1}, 2}}, false},
	} {
		z, err := ParseZSet(zsetOf(c.list...))
		if err != nil || z.Small() != c.want {
			t.Errorf("%d members: %v, %v", len(c.list), z.Small(), err)
		}
		// It stays large.
		if z, err = ParseZSet(z.AppendChanged(nil, []Span{{0, min(1, z.Len()-1)}}, nil)); err != nil ||
			z.Small() != c.want {
			t.Errorf("%d members, less one: %v, %v", len(c.list), z.Small(), err)
		}
	}
	if z, err := ParseZSet(zsetOf(list...)); err != nil || z.SearchMember([]byte("064"), false) != 64 ||
		z.SearchMember([]byte("064"), true) != 65 || z.SearchMember([]byte("x"), true) != 129 {
		t.Error("members are not found by their bytes", err)
	}
}

// TestZSetCorrupt changes each bit of a set, and cuts it everywhere: the result is an error or another set.
func TestZSetCorrupt(t *testing.T) {
	good := zsetOf(ZEntry{[]byte("a"), 1}, ZEntry{[]byte("b"), 1}, ZEntry{[]byte("cc"), 2}, ZEntry{nil, 3})
	for cut := range len(good) {
		if _, err := ParseZSet(good[:cut]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%d of %d bytes: %v", cut, len(good), err)
		}
	}
	for i := range 8 * len(good) {
		b := bytes.Clone(good)
		b[i/8] ^= 1 << (i % 8)
		checkZSet(t, b)
	}
	for _, bad := range [][]byte{
		nil, {0, 0, 0, 0}, append(bytes.Clone(good), 0),
		zsetOf(ZEntry{[]byte("a"), math.NaN()}), zsetOf(ZEntry{[]byte("a"), 1}, ZEntry{[]byte("a"), 1}),
		zsetOf(ZEntry{[]byte("b"), 1}, ZEntry{[]byte("a"), 1}), zsetOf(ZEntry{[]byte("a"), 1}, ZEntry{[]byte("b"), -1}),
		{255, 255, 255, 255},
	} {
		if _, err := ParseZSet(bad); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%x: %v", bad, err)
		}
	}
}

// checkZSet uses a value of any bytes as a set, if it is accepted as one.
func checkZSet(t *testing.T, b []byte) {
	z, err := ParseZSet(b)
	if err != nil {
		if !errors.Is(err, ErrCorrupt) {
			t.Fatal(err)
		}
		return
	}
	list := entriesOf(z)
	if len(list) == 0 || !slices.IsSortedFunc(list, CompareZ) {
		t.Fatalf("%x is %v", b, list)
	}
	if again, err := ParseZSet(zsetOf(list...)); err != nil || again.Len() != z.Len() {
		t.Fatalf("%x, encoded again: %v", b, err)
	}
	i := len(list) / 2
	if z.Find(list[i].Member) < 0 {
		t.Fatalf("%x: %q is not found", b, list[i].Member)
	}
	list[i].Score = 7
	if next, err := ParseZSet(z.AppendChanged(nil, []Span{{i, i + 1}}, list[i:i+1])); err != nil ||
		next.Len() != z.Len() {
		t.Fatalf("%x, changed: %v", b, err)
	}
}

// FuzzZSet: bytes are a set that can be changed, or an error.
func FuzzZSet(f *testing.F) {
	f.Add([]byte{})
	f.Add(zsetOf(ZEntry{[]byte("a"), 1}))
	f.Add(zsetOf(ZEntry{nil, math.Inf(-1)}, ZEntry{[]byte("b"), 0}, ZEntry{[]byte("cc"), 0},
		ZEntry{[]byte("d"), math.Inf(1)}))
	f.Fuzz(checkZSet)
}

func BenchmarkZSet(b *testing.B) {
	for _, n := range []int{10, 100, 2700, 150_000} {
		var list []ZEntry
		for i := range n {
			list = append(list, ZEntry{fmt.Appendf(nil, "user:%07d", i), float64(i * 7919 % n)})
		}
		slices.SortFunc(list, CompareZ)
		value := zsetOf(list...)
		b.Run(fmt.Sprintf("n=%d/bytes=%d/score", n, len(value)), func(b *testing.B) {
			for i := range b.N {
				z, err := ParseZSet(value)
				if err != nil || z.Find(list[i%n].Member) < 0 {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("n=%d/bytes=%d/add", n, len(value)), func(b *testing.B) {
			var buf []byte
			for i := range b.N {
				z, err := ParseZSet(value)
				if err != nil || z.Find(list[i%n].Member) < 0 {
					b.Fatal(err)
				}
				buf = z.AppendChanged(buf[:0], []Span{{i % n, i%n + 1}}, []ZEntry{{list[i%n].Member, 5}})
			}
		})
	}
}
