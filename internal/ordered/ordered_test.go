package ordered

import (
	"slices"
	"testing"
)

func TestOrder(t *testing.T) {
	m := map[uint32]string{}
	if n := testing.AllocsPerRun(10, func() { Keys(m); Values(m) }); n != 0 || Keys(m) != nil || Values(m) != nil {
		t.Errorf("%v, %v and %v allocations of an empty map", Keys(m), Values(m), n)
	}
	for i := range uint32(100) {
		m[i*0x9e3779b1] = string(rune(i))
	}
	keys, values := Keys(m), Values(m)
	if len(keys) != len(m) || !slices.IsSorted(keys) {
		t.Fatalf("keys %v", keys)
	}
	for i, k := range keys {
		if values[i] != m[k] {
			t.Errorf("value %d is %q, want %q", i, values[i], m[k])
		}
	}
	n := 0
	for k, v := range All(m) {
		if k != keys[n] || v != m[k] {
			t.Errorf("pair %d is %d, %q, want %d, %q", n, k, v, keys[n], m[keys[n]])
		}
		if n++; n == 50 {
			break
		}
	}
}

func TestSort(t *testing.T) {
	type pair struct{ a, b int }
	var s, want []pair
	for i := range 200 {
		s = append(s, pair{i * 7919 % 200, i})
	}
	want = slices.Clone(s)
	by := func(x, y pair) int { return x.a - y.a }
	slices.SortFunc(want, by)
	if Sort(s, by); !slices.Equal(s, want) {
		t.Errorf("%v, want %v", s, want)
	}
}
