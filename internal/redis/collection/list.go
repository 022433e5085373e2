package collection

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"
)

// A list is the number of its elements, 4 bytes of little-endian, and then the elements, each between its length and
// the same length backwards:
//
//	count u32 | { len uvarint | element | len uvarint, its last byte first } ...
//
// So it can be walked from both ends. A walk decodes nothing but lengths; a change moves bytes. The empty list is never
// stored; here it is no bytes at all.
const (
	// ListStart is the byte where the first element of a list begins.
	ListStart = listHead
	listHead  = 4
	// minElem is what an empty element takes.
	minElem = 2
	// maxLenBytes bounds the bytes of an element's length: MaxLen has four.
	maxLenBytes = 4
)

// ListSize is how many bytes an element takes in a list.
func ListSize(elem []byte) int { return len(elem) + 2*lenBytes(len(elem)) }

// lenBytes is how many bytes an element's length takes.
func lenBytes(n int) int { return max(1, (bits.Len(uint(n))+6)/7) }

// ListGrown is the length in bytes of list b with more bytes of elements.
func ListGrown(b []byte, more int) int { return max(len(b), listHead) + more }

// ListLen is the number of elements of list b, which is not more than its bytes can hold.
func ListLen(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	if len(b) < listHead+minElem {
		return 0, ErrCorrupt
	}
	n := int64(binary.LittleEndian.Uint32(b))
	if n == 0 || n > int64(len(b)-listHead)/minElem {
		return 0, ErrCorrupt
	}
	return int(n), nil
}

// ListNext is the element that begins at byte off of list b, and where the next one begins. The element is a part of b.
func ListNext(b []byte, off int) (elem []byte, next int, err error) {
	if off < listHead || off >= len(b) {
		return nil, 0, ErrCorrupt
	}
	n, k := binary.Uvarint(b[off:min(off+maxLenBytes, len(b))])
	if k <= 0 || n > uint64(len(b)-off) || int(n)+2*k > len(b)-off {
		return nil, 0, ErrCorrupt
	}
	next = off + int(n) + 2*k
	for i := range k {
		if b[off+i] != b[next-1-i] {
			return nil, 0, ErrCorrupt
		}
	}
	return b[off+k : next-k : next-k], next, nil
}

// ListPrev is the element that ends before byte off of list b, and where it begins. The element is a part of b.
func ListPrev(b []byte, off int) (elem []byte, begin int, err error) {
	if off > len(b) {
		return nil, 0, ErrCorrupt
	}
	n, k := 0, 0
	for more := true; more; k++ {
		if k == maxLenBytes || off-1-k < listHead {
			return nil, 0, ErrCorrupt
		}
		c := b[off-1-k]
		n |= int(c&0x7f) << (7 * k)
		more = c&0x80 != 0
	}
	begin = off - n - 2*k
	elem, next, err := ListNext(b, begin)
	if err != nil || next != off {
		return nil, 0, ErrCorrupt
	}
	return elem, begin, nil
}

// ListSeek is the byte where element i of list b begins, counted from 0; the number of elements gives the end. It walks
// from the nearer end.
func ListSeek(b []byte, i int) (off int, err error) {
	n, err := ListLen(b)
	if err != nil || i < 0 || i > n {
		return 0, ErrCorrupt
	}
	if i <= n/2 {
		for off = listHead; i > 0 && err == nil; i-- {
			_, off, err = ListNext(b, off)
		}
		return off, err
	}
	for off = len(b); i < n && err == nil; i++ {
		_, off, err = ListPrev(b, off)
	}
	return off, err
}

// ListSplice changes list b in place, or in a longer buffer if b has no room. The strings elems take the place of bytes
// from to to, which hold the given number of elements. No elems may lie in b. An error has changed nothing. If no
// element is left the result is empty.
func ListSplice(b []byte, from, to, elements int, elems ...[]byte) ([]byte, error) {
	n, err := ListLen(b)
	if n == 0 && err == nil {
		b, from, to = append(b[:0], 0, 0, 0, 0), listHead, listHead
	}
	if err != nil || from < listHead || from > to || to > len(b) || elements > n {
		return b, ErrCorrupt
	}
	size := 0
	for _, e := range elems {
		size += ListSize(e)
	}
	had := len(b)
	have := had + size - (to - from)
	n += len(elems) - elements
	switch {
	case n == 0 && have == listHead:
		return b[:0], nil
	case n == 0, n > (have-listHead)/minElem: // it was so before
		return b, ErrCorrupt
	}
	b = slices.Grow(b, max(0, have-had))[:max(have, had)]
	copy(b[from+size:], b[to:had])
	b = b[:have]
	for _, e := range elems {
		k := binary.PutUvarint(b[from:], uint64(len(e)))
		copy(b[from+k:], e)
		end := from + ListSize(e)
		for i := range k {
			b[end-1-i] = b[from+i]
		}
		from = end
	}
	binary.LittleEndian.PutUint32(b, uint32(n))
	return b, nil
}

// ListRemove removes elements equal to v from list b in place. It removes the first limit of them, the last -limit if
// that is negative, or all if it is 0. It looks at all of b first, so an error has changed nothing. If no element is
// left the result is empty.
func ListRemove(b, v []byte, limit int) (rest []byte, removed int, err error) {
	n, err := ListLen(b)
	if err != nil {
		return b, 0, err
	}
	matches, off := 0, listHead
	for range n {
		var e []byte
		if e, off, err = ListNext(b, off); err != nil {
			return b, 0, err
		}
		if bytes.Equal(e, v) {
			matches++
		}
	}
	if n > 0 && off != len(b) {
		return b, 0, ErrCorrupt
	}
	skip := 0
	removed = matches
	switch {
	case limit > 0:
		removed = min(matches, limit)
	case limit < 0 && limit > -matches:
		removed, skip = -limit, matches+limit
	}
	if removed == 0 {
		return b, 0, nil
	}
	if removed == n {
		return b[:0], removed, nil
	}
	at, left := listHead, removed
	for off = listHead; off < len(b); {
		e, next, err := ListNext(b, off)
		switch {
		case err != nil:
			return b, 0, err // it was none before
		case left > 0 && bytes.Equal(e, v) && skip == 0:
			left--
		default:
			if left > 0 && bytes.Equal(e, v) {
				skip--
			}
			at += copy(b[at:], b[off:next])
		}
		off = next
	}
	b = b[:at]
	binary.LittleEndian.PutUint32(b, uint32(n-removed))
	return b, removed, nil
}
