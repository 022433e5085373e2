package bulk

import (
	"bytes"
	"hash/crc32"
	"syscall"
	"testing"
)

// guarded gives memory of n bytes, whole pages, between two pages that kill whoever touches them.
func guarded(t *testing.T, n int) []byte {
	t.Helper()
	page := syscall.Getpagesize()
	const access, flags = syscall.PROT_READ | syscall.PROT_WRITE, syscall.MAP_ANON | syscall.MAP_PRIVATE
	m, err := syscall.Mmap(-1, 0, page+n+page, access, flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Munmap(m); err != nil {
			t.Error(err)
		}
	})
	for _, g := range [][]byte{m[:page], m[page+n:]} {
		if err := syscall.Mprotect(g, syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return m[page : page+n : page+n]
}

// Source and destination each begin behind, or end before, a page that may not be touched.
func TestNothingOutside(t *testing.T) {
	const most = StreamFrom + 1<<16
	src, dst := guarded(t, most), guarded(t, most)
	random(src)
	var sizes []int
	for n := 1; n <= 1100; n++ {
		sizes = append(sizes, n)
	}
	for _, at := range []int{block, StreamFrom} {
		for d := -70; d <= 70; d++ {
			if at+d <= block || d%7 == 0 {
				sizes = append(sizes, at+d)
			}
		}
	}
	sizes = append(sizes, most)
	eachForm(t, func(t *testing.T, f form) {
		for _, n := range sizes {
			for _, from := range []int{0, most - n} {
				s := src[from:][:n]
				want := crc32.Checksum(s, castagnoli)
				if got := crcBy(f, 0, s); got != want {
					t.Fatalf("CRC of %d bytes is %#x, want %#x", n, got, want)
				}
				for _, to := range []int{0, most - n} {
					d := dst[to:][:n]
					if got := copyBy(f, 0, d, s); got != want || !bytes.Equal(d, s) {
						t.Fatalf("%d bytes: CRC %#x, want %#x; or other bytes", n, got, want)
					}
				}
			}
		}
	})
}
