package bulk

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

const (
	lineBytes = 64
	canary    = 0xa5
)

var canaries = bytes.Repeat([]byte{canary}, lineBytes)

func (f form) String() string {
	return [...]string{"portable", "words", "fold128", "fold256", "fold512"}[f]
}

// eachForm runs f with every form that this processor has.
func eachForm(t *testing.T, f func(*testing.T, form)) {
	for v := portable; v <= fold512; v++ {
		if has(v) {
			t.Run(v.String(), func(t *testing.T) { f(t, v) })
		}
	}
}

// aligned gives n bytes whose address is align modulo lineBytes, between lineBytes of canaries.
type aligned struct {
	all   []byte
	at, n int // of what was taken last
}

func newAligned(most int) *aligned { return &aligned{all: make([]byte, most+4*lineBytes)} }

func (a *aligned) take(n, align int) []byte {
	a.at, a.n = 2*lineBytes-int(uintptr(unsafe.Pointer(&a.all[0]))%lineBytes)+align, n
	copy(a.all[a.at-lineBytes:], canaries)
	copy(a.all[a.at+n:], canaries)
	return a.all[a.at:][:n:n]
}

// intact reports whether the canaries of what was taken last are as they were.
func (a *aligned) intact() bool {
	return bytes.Equal(a.all[a.at-lineBytes:a.at], canaries) && bytes.Equal(a.all[a.at+a.n:][:lineBytes], canaries)
}

// random fills b, always with the same bytes.
func random(b []byte) []byte {
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// try copies src to a place in dst and compares everything with package hash/crc32.
func try(t testing.TB, f form, crc uint32, dst *aligned, align int, src []byte) {
	t.Helper()
	to := dst.take(len(src), align)
	clear(to)
	want := crc32.Update(crc, castagnoli, src)
	if got := copyBy(f, crc, to, src); got != want {
		t.Fatalf("%v: %d bytes to %d: CRC %#x, want %#x", f, len(src), align, got, want)
	}
	if got := crcBy(f, crc, src); got != want {
		t.Fatalf("%v: CRC of %d bytes is %#x, want %#x", f, len(src), got, want)
	}
	if !bytes.Equal(to, src) {
		t.Fatalf("%v: %d bytes to %d: other bytes were stored", f, len(src), align)
	}
	if !dst.intact() {
		t.Fatalf("%v: %d bytes to %d: bytes beside the destination have changed", f, len(src), align)
	}
}

// Lengths up to 2 KiB go to any alignment. With -short, 16 lengths one after the other have all alignments together.
func TestShort(t *testing.T) {
	src, dst := random(make([]byte, 2048+2*lineBytes)), newAligned(2048)
	eachForm(t, func(t *testing.T, f form) {
		for n := range 2048 + 1 {
			for align := range lineBytes {
				if testing.Short() && (align+n)%16 != 0 {
					continue
				}
				from := (n*7 + align*13) % lineBytes
				try(t, f, uint32(n)<<24+uint32(align), dst, align, src[from:][:n])
			}
		}
	})
}

// Around where something else begins, any alignment of destination and source does.
func TestLong(t *testing.T) {
	most := 2*piece + StreamFrom
	src, dst := random(make([]byte, most+2*lineBytes)), newAligned(most)
	step := 1
	if testing.Short() {
		step = 21
	}
	eachForm(t, func(t *testing.T, f form) {
		for _, at := range []int{block, StreamFrom, piece, most - 200} {
			for _, n := range []int{at - 65, at - 1, at, at + 1, at + 63, at + 64, at + 200} {
				for align := 0; align < lineBytes; align += step {
					try(t, f, 0, dst, align, src[(n+align*5)%lineBytes:][:n])
				}
			}
		}
	})
}

func TestChecks(t *testing.T) {
	b := make([]byte, 3000)
	for _, tc := range []struct {
		name     string
		dst, src []byte
		refused  bool
	}{
		{"short", b[:9], b[1000:1010], true},
		{"the same", b[:10], b[:10], true},
		{"one byte, before", b[:1000], b[999:1999], true},
		{"one byte, behind", b[999:1999], b[:1000], true},
		{"within", b[:2000], b[10:20], false},
		{"within, early", b[:2000], b[:10], true},
		{"beside, before", b[:1000], b[1000:2000], false},
		{"beside, behind", b[1000:2000], b[:1000], false},
		{"nothing", b[:10], b[5:5], false},
		{"nothing to nil", nil, nil, false},
	} {
		func() {
			defer func() {
				if r := recover(); (r != nil) != tc.refused {
					t.Errorf("%s: panic %v, want one: %v", tc.name, r, tc.refused)
				}
			}()
			Copy(0, tc.dst, tc.src)
		}()
	}
	if got := CRC(7, nil); got != 7 {
		t.Errorf("CRC of nothing after 7 is %d", got)
	}
}

// A destination that is longer than the source keeps the rest of its bytes.
func TestLongerDestination(t *testing.T) {
	dst, src := bytes.Repeat([]byte{canary}, 500), random(make([]byte, 300))
	if got, want := Copy(3, dst, src), crc32.Update(3, castagnoli, src); got != want {
		t.Errorf("CRC %#x, want %#x", got, want)
	}
	if !bytes.Equal(dst[:300], src) || !bytes.Equal(dst[300:], bytes.Repeat([]byte{canary}, 200)) {
		t.Error("other bytes are in the destination")
	}
	if got, want := CRC(3, src), crc32.Update(3, castagnoli, src); got != want {
		t.Errorf("CRC alone %#x, want %#x", got, want)
	}
}

// Remote memory may change at any time. The CRC is that of what was stored.
func TestSourceChanges(t *testing.T) {
	if raced {
		t.Skip("the race is meant; make test runs it")
	}
	for _, n := range []int{200, 4000, block + 5, StreamFrom + 100} {
		src, dst := make([]byte, n), make([]byte, n)
		eachForm(t, func(t *testing.T, f form) {
			var stop atomic.Bool
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				for i := 0; !stop.Load(); i++ {
					for at := i % 64; at < n; at += 64 {
						src[at]++
					}
				}
			}()
			seen, last := 0, uint32(0)
			for i := 0; i < 1<<24/n || seen < 10; i++ {
				crc := copyBy(f, 0, dst, src)
				if want := crc32.Checksum(dst, castagnoli); crc != want {
					t.Errorf("%d bytes: CRC %#x, of what was stored %#x", n, crc, want)
					break
				}
				if crc != last {
					seen++
				}
				last = crc
			}
			stop.Store(true)
			<-gone
		})
	}
}

func TestAllocations(t *testing.T) {
	a, b := make([]byte, 700), make([]byte, 700)
	if n := testing.AllocsPerRun(100, func() { sink = Copy(CRC(0, b), b, a) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

var sink uint32

func FuzzCopy(f *testing.F) {
	f.Add([]byte("x"), uint32(1), uint32(0), byte(0), byte(0), uint32(0))
	f.Add([]byte("some bytes"), uint32(255), uint32(1), byte(63), byte(1), uint32(100))
	f.Add([]byte{0}, uint32(70000), ^uint32(0), byte(9), byte(8), uint32(64))
	f.Add([]byte{255, 1, 0}, uint32(StreamFrom+999), uint32(5), byte(33), byte(31), uint32(4097))
	const most = StreamFrom + piece + 4096
	from, to := make([]byte, most+2*lineBytes), newAligned(most)
	// n bytes, which repeat data, go from an alignment to another, at once and in two parts.
	f.Fuzz(func(t *testing.T, data []byte, n, crc uint32, dstAlign, srcAlign byte, cut uint32) {
		if n %= most; len(data) == 0 {
			n = 0
		}
		src := from[srcAlign%lineBytes:][:n]
		for at := 0; at < len(src); {
			at += copy(src[at:], data)
		}
		for v := portable; v <= fold512; v++ {
			if has(v) {
				try(t, v, crc, to, int(dstAlign%lineBytes), src)
			}
		}
		if cut > n {
			cut = n
		}
		whole, b := CRC(crc, src), to.take(int(n), int(dstAlign%lineBytes))
		clear(b)
		first := Copy(crc, b, src[:cut])
		if got := Copy(first, b[cut:], src[cut:]); got != whole || !bytes.Equal(b, src) || !to.intact() {
			t.Fatalf("%d bytes, then %d: CRC %#x, want %#x; or other bytes", cut, n-cut, got, whole)
		}
	})
}

// ways are what benchmarks compare: functions that copy, and then some that take a CRC alone.
func ways() (names []string, funcs []func(dst, src []byte) uint32) {
	add := func(name string, f func(dst, src []byte) uint32) {
		names, funcs = append(names, name), append(funcs, f)
	}
	add("copy", func(dst, src []byte) uint32 { return uint32(copy(dst, src)) })
	add("separate", func(dst, src []byte) uint32 {
		copy(dst, src)
		return crc32.Update(0, castagnoli, dst)
	})
	for v := portable; v <= fold512; v++ {
		if has(v) {
			add(v.String(), func(dst, src []byte) uint32 { return copyBy(v, 0, dst, src) })
		}
	}
	add("Copy", func(dst, src []byte) uint32 { return Copy(0, dst, src) })
	add("crc32", func(_, src []byte) uint32 { return crc32.Update(0, castagnoli, src) })
	add("CRC", func(_, src []byte) uint32 { return CRC(0, src) })
	return names, funcs
}

var benchSizes = []int{64, 128, 256, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20,
	64 << 20}

// BenchmarkCopy has the same two buffers each time, in caches if they fit there.
func BenchmarkCopy(b *testing.B) { compare(b, 0, 0) }

// BenchmarkCopyBehind is that with a source whose place in its page is 40 bytes behind the destination's.
func BenchmarkCopyBehind(b *testing.B) { compare(b, 0, 40) }

// BenchmarkCopyCold goes through more memory than caches hold, with source and destination.
func BenchmarkCopyCold(b *testing.B) { compare(b, 128<<20, 0) }

// compare has the ways take turns, each for a short while, and reports medians. So load of others changes little.
func compare(b *testing.B, arena, behind int) {
	most := max(arena, benchSizes[len(benchSizes)-1])
	from, to := random(make([]byte, most)), random(make([]byte, most+behind))[behind:]
	names, funcs := ways()
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			times := make([][]time.Duration, len(funcs))
			at, repeat := 0, max(1, 16<<10/n)
			for b.Loop() {
				for i, f := range funcs {
					start := time.Now()
					for range repeat {
						sink += f(to[at:at+n], from[at:at+n])
						if at += (n + lineBytes - 1) &^ (lineBytes - 1); at+n > arena {
							at = 0
						}
					}
					times[i] = append(times[i], time.Since(start))
				}
			}
			for i, t := range times {
				slices.Sort(t)
				b.ReportMetric(float64(n*repeat)/float64(t[len(t)/2]), names[i]+"-GB/s")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
