package collection

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// elements walks all of a list, in both directions.
func elements(b []byte) (out [][]byte, err error) {
	n, err := ListLen(b)
	if err != nil || n == 0 {
		return nil, err
	}
	off := listHead
	for range n {
		var e []byte
		if e, off, err = ListNext(b, off); err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	if off != len(b) {
		return nil, ErrCorrupt
	}
	for i := n - 1; i >= 0; i-- {
		var e []byte
		if e, off, err = ListPrev(b, off); err != nil {
			return nil, err
		}
		if !bytes.Equal(e, out[i]) {
			return nil, errors.New("backwards it is another list")
		}
	}
	return out, nil
}

// TestListModel changes a list and a slice alike.
func TestListModel(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var b []byte
		var model [][]byte
		elem := func() []byte {
			n := []int{0, 1, 2, 3, 126, 127, 128, 129, 16383, 16384}[rng.IntN(2+rng.IntN(9))]
			return bytes.Repeat([]byte{byte('a' + rng.IntN(3))}, n)
		}
		for step := range 400 {
			n := len(model)
			i := rng.IntN(n + 1)
			j := i + rng.IntN(n-i+1)
			switch rng.IntN(5) {
			case 0, 1:
				elems := make([][]byte, rng.IntN(4))
				for k := range elems {
					elems[k] = elem()
				}
				if rng.IntN(3) > 0 {
					j = i
				}
				from, err1 := ListSeek(b, i)
				to, err2 := ListSeek(b, j)
				var err error
				b, err = ListSplice(b, from, to, j-i, elems...)
				if err := errors.Join(err1, err2, err); err != nil && n > 0 {
					t.Fatal(err)
				}
				model = slices.Concat(model[:i:i], elems, model[j:])
			case 2:
				v, limit := elem(), rng.IntN(9)-4
				var removed int
				var err error
				if b, removed, err = ListRemove(b, v, limit); err != nil {
					t.Fatal(err)
				}
				want := 0
				if limit < 0 {
					slices.Reverse(model)
				}
				model = slices.DeleteFunc(slices.Clone(model), func(e []byte) bool {
					is := bytes.Equal(e, v) && (limit == 0 || want < max(limit, -limit))
					want += map[bool]int{true: 1}[is]
					return is
				})
				if limit < 0 {
					slices.Reverse(model)
				}
				if removed != want {
					t.Fatalf("seed %d, step %d: removed %d of %.10q by %d, want %d", seed, step, removed, v, limit,
						want)
				}
			default:
				if n == 0 {
					continue
				}
				off, err := ListSeek(b, i)
				if err != nil {
					t.Fatal(err)
				}
				if i < n {
					if e, _, err := ListNext(b, off); err != nil || !bytes.Equal(e, model[i]) {
						t.Fatalf("element %d is %.10q, %v", i, e, err)
					}
				}
			}
			got, err := elements(b)
			if err != nil || !slices.EqualFunc(got, model, bytes.Equal) {
				t.Fatalf("seed %d, step %d: %.100q, %v, want %.100q", seed, step, got, err, model)
			}
		}
	}
}

// TestListBytes is the example of docs/collections.md.
func TestListBytes(t *testing.T) {
	b, err := ListSplice(nil, 0, 0, 0, []byte("ab"), nil, bytes.Repeat([]byte("x"), 130))
	want := slices.Concat([]byte{3, 0, 0, 0, 2, 'a', 'b', 2, 0, 0, 0x82, 1}, bytes.Repeat([]byte("x"), 130),
		[]byte{1, 0x82})
	if err != nil || !bytes.Equal(b, want) {
		t.Errorf("%x, %v", b, err)
	}
	if n := ListGrown(nil, ListSize([]byte("ab"))+ListSize(nil)+ListSize(make([]byte, 130))); n != len(want) {
		t.Errorf("%d bytes were told of, want %d", n, len(want))
	}
}

// A list does not cost the square of its length from whichever end it is read.
func TestListSeekFromTheNearerEnd(t *testing.T) {
	elems := slices.Repeat([][]byte{[]byte("x")}, 1001)
	b, err := ListSplice(nil, 0, 0, 0, elems...)
	if err != nil {
		t.Fatal(err)
	}
	// Damage in the middle is not met from either end.
	b[listHead+3*500] = 0x7f
	for _, i := range []int{0, 1, 499, 502, 1000, 1001} {
		if off, err := ListSeek(b, i); err != nil || off != listHead+3*i {
			t.Errorf("element %d at %d, %v", i, off, err)
		}
	}
	if _, _, err := ListNext(b, listHead+3*500); !errors.Is(err, ErrCorrupt) {
		t.Errorf("damage: %v", err)
	}
	if _, _, err := ListRemove(b, []byte("x"), 1); !errors.Is(err, ErrCorrupt) {
		t.Errorf("damage: %v", err)
	}
}

// FuzzList gives the functions bytes that somebody else wrote.
func FuzzList(f *testing.F) {
	some, _ := ListSplice(nil, 0, 0, 0, []byte("a"), nil, bytes.Repeat([]byte("x"), 200), []byte("a"))
	f.Add(some, 1, []byte("a"))
	f.Add(append(bytes.Clone(some), 0), -1, []byte("a"))
	f.Add(some[:len(some)-1], 2, []byte("x"))
	f.Add([]byte{255, 255, 255, 255, 0, 0}, 0, []byte{})
	f.Add([]byte{1, 0, 0, 0, 255, 255, 255, 255, 255, 255}, 1, []byte{})
	f.Add([]byte{2, 0, 0, 0, 3, 'a', 'b', 'c', 3}, 0, []byte{}) // another number than there are
	f.Add(some, math.MinInt, []byte("a"))
	f.Add([]byte{2, 0, 0, 0, 128, 0, 0, 128, 0, 0}, 1, []byte{})
	f.Fuzz(func(t *testing.T, b []byte, i int, v []byte) {
		all, err := elements(b)
		for off := -2; off < len(b)+3 && off < 100; off++ {
			for _, step := range []func([]byte, int) ([]byte, int, error){ListNext, ListPrev} {
				if e, at, err := step(b, off); err == nil && (at < listHead || at > len(b) || len(e) > len(b)) {
					t.Errorf("from %d to %d", off, at)
				}
			}
		}
		from, err1 := ListSeek(b, i)
		if err == nil && (err1 != nil) != (i < 0 || i > len(all) || len(all) == 0 && i != 0) && len(all) > 0 {
			t.Errorf("element %d of %d: %v", i, len(all), err1)
		}
		if err1 == nil {
			c, err2 := ListSplice(bytes.Clone(b), from, from, 0, v)
			if _, err := ListLen(c); err2 == nil && err != nil {
				t.Errorf("it makes %x of %x", c, b)
			}
			if err2 == nil && err == nil {
				if got, err := elements(c); err != nil || len(got) != len(all)+1 ||
					len(c) != ListGrown(b, ListSize(v)) {
					t.Errorf("%d elements, %v, want %d and one", len(got), err, len(all))
				}
			}
			to, err3 := ListSeek(b, i+1)
			if err3 == nil {
				c, err4 := ListSplice(bytes.Clone(b), from, to, 1)
				if _, err := ListLen(c); err4 == nil && err != nil {
					t.Errorf("it makes %x of %x", c, b)
				}
				if got, err5 := elements(c); err == nil && (err4 != nil || err5 != nil || len(got) != len(all)-1) {
					t.Errorf("%d elements, %v, %v, want all but one of %d", len(got), err4, err5, len(all))
				}
			}
		}
		c, n, err2 := ListRemove(bytes.Clone(b), v, i)
		if (err2 == nil) != (err == nil) && !bytes.Contains([]byte(errText(err)), []byte("backwards")) {
			t.Errorf("ListRemove: %v, and a walk: %v", err2, err)
		}
		if err == nil {
			if got, err := elements(c); err != nil || len(got) != len(all)-n {
				t.Errorf("%d elements, %v, want all but %d of %d", len(got), err, n, len(all))
			}
		}
	})
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
