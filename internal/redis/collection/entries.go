package collection

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"math/bits"
	"slices"

	"github.com/zeebo/xxh3"
)

// Hashes and sets of strings are entries: a format byte, the number of entries, and behind each other the entries, in
// the order in which they came. An entry is so many strings (per below: 2 of a hash, 1 of a set), each behind its
// length. The first of them is the entry's name, which no other has. No entries are no bytes.
//
// A function that finds something first walks over all the lengths, so that what it returns, or changes, is known to be
// whole. That costs little beside the checksum of the record.

// textAt is the place of the string whose length is at b[at], which is at most len(b); hi < 0: there is no string.
func textAt(b []byte, at int) (lo, hi int) {
	if hi = shortEnd(b, at); uint(hi) <= uint(len(b)) {
		return at + 1, hi
	}
	return longTextAt(b, at)
}

// shortEnd is where a string at b[at] ends if its length is of one byte, and no place in b if it is longer, or reaches
// beyond b. Loops call it where they could call textAt, since the compiler inlines it.
func shortEnd(b []byte, at int) int {
	if at < len(b) && b[at] < 0x80 {
		return at + 1 + int(b[at])
	}
	return -1
}

func longTextAt(b []byte, at int) (lo, hi int) {
	n, w := binary.Uvarint(b[at:])
	if w <= 0 || n > uint64(len(b)-at-w) {
		return 0, -1
	}
	return at + w, at + w + int(n)
}

// head is the number of entries, and where the first of them begins.
func head(b []byte, per int) (n, first int, err error) {
	if len(b) == 0 {
		return 0, 0, nil
	}
	u, w := binary.Uvarint(b[1:])
	if w <= 0 || u == 0 || u > uint64((len(b)-1-w)/per) {
		return 0, 0, ErrCorrupt
	}
	return int(u), 1 + w, nil
}

// entry is a place in an encoding: all of it is b[at:end], and its last string b[lo:end]. at is 0 of one that is not
// there.
type entry struct {
	at, value, lo, end int // value: where the length of a hash's value begins
}

// entryAt is the entry that begins there, in bytes that have been checked, and the place of its name.
func entryAt(b []byte, per, at int) (e entry, nameLo, nameHi int) {
	nameLo, nameHi = textAt(b, at)
	e = entry{at: at, value: at, lo: nameLo, end: nameHi}
	if per == 2 {
		e.value = nameHi
		e.lo, e.end = textAt(b, nameHi)
	}
	return e, nameLo, nameHi
}

// checkEntries walks over everything, and returns the number of entries.
func checkEntries(b []byte, per int) (n int, err error) {
	n, at, err := head(b, per)
	if err != nil {
		return 0, err
	}
	for range n * per {
		hi := shortEnd(b, at)
		if uint(hi) > uint(len(b)) {
			if _, hi = longTextAt(b, at); hi < 0 {
				return 0, ErrCorrupt
			}
		}
		at = hi
	}
	if at != len(b) {
		return 0, ErrCorrupt
	}
	return n, nil
}

// findEntry looks for the entry of that name, and checks everything.
func findEntry(b []byte, per int, name []byte) (e entry, n, first int, err error) {
	n, first, err = head(b, per)
	if err != nil {
		return e, 0, 0, err
	}
	at := first
	for range n {
		lo, hi := at+1, shortEnd(b, at)
		if uint(hi) > uint(len(b)) {
			if lo, hi = longTextAt(b, at); hi < 0 {
				return e, 0, 0, ErrCorrupt
			}
		}
		was := at
		at = hi
		if per == 2 {
			if at = shortEnd(b, hi); uint(at) > uint(len(b)) {
				if _, at = longTextAt(b, hi); at < 0 {
					return e, 0, 0, ErrCorrupt
				}
			}
		}
		if hi-lo == len(name) && e.at == 0 && string(b[lo:hi]) == string(name) {
			e, _, _ = entryAt(b, per, was)
		}
	}
	if at != len(b) {
		return e, 0, 0, ErrCorrupt
	}
	return e, n, first, nil
}

// textLen is how long a string is with its length.
func textLen(s []byte) int { return uvarintLen(len(s)) + len(s) }

func uvarintLen(n int) int { return (bits.Len(uint(n)|1) + 6) / 7 }

func appendText(b, s []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// resize makes b[i:j] n bytes long, of any content, and moves what is behind it.
func resize(b []byte, i, j, n int) []byte {
	d := n - (j - i)
	if d == 0 {
		return b
	}
	size := len(b)
	if d > 0 {
		b = slices.Grow(b, d)[:size+d]
	}
	copy(b[i+n:size+d], b[j:size])
	return b[:size+d]
}

// recount writes the number of entries, where first is still the place for the old one.
func recount(b []byte, first, n int) []byte {
	w := uvarintLen(n)
	b = resize(b, 1, first, w)
	binary.PutUvarint(b[1:], uint64(n))
	return b
}

// putEntry adds or replaces an entry, in b if there is room in it. A set's entry, which has no value, stays as it is.
func putEntry(b []byte, format byte, per int, name, value []byte) (_ []byte, added bool, err error) {
	e, n, first, err := findEntry(b, per, name)
	switch {
	case err != nil:
		return b, false, err
	case e.at > 0 && per == 1:
		return b, false, nil
	case e.at > 0:
		size := textLen(value)
		b = resize(b, e.value, e.end, size)
		copy(b[e.value+binary.PutUvarint(b[e.value:e.value+size], uint64(len(value))):], value)
		return b, false, nil
	case n == 0:
		b = append(b[:0], format, 0)
		first = 2
	}
	b = appendText(recount(b, first, n+1), name)
	if per == 2 {
		b = appendText(b, value)
	}
	return b, true, nil
}

// fewSteps is how many entries may be walked over for several names before an index of the names is the cheaper way.
const fewSteps = 512

// putEntries adds or replaces several, args being per strings of each. The last of several with one name counts.
func putEntries(b []byte, format byte, per int, args [][]byte) (_ []byte, added int, err error) {
	n, first, err := head(b, per)
	if err != nil {
		return b, 0, err
	}
	k := len(args) / per
	if k*(n+k) <= fewSteps || k == 1 {
		for ; len(args) > 0; args = args[per:] {
			var is bool
			if b, is, err = putEntry(b, format, per, args[0], args[per-1]); err != nil {
				return b, 0, err
			}
			if is {
				added++
			}
		}
		return b, added, nil
	}
	if _, err := checkEntries(b, per); err != nil {
		return b, 0, err
	}
	var names Names
	var last []int // by name: the arguments that count
	size := len(b) + 10
	for i := 0; i < len(args); i += per {
		at, is := names.Add(args[i])
		if is {
			last = append(last, i)
		}
		last[at] = i
		size += 10 + len(args[i]) + len(args[i+per-1])
	}
	out := make([]byte, 0, size)
	if n == 0 {
		out, first = append(out, format, 0), 2
	} else {
		out = append(out, b[:first]...)
	}
	seen := make([]bool, len(last))
	for at := first; at < len(b); {
		e, lo, hi := entryAt(b, per, at)
		switch i := names.Find(b[lo:hi]); {
		case i < 0:
			out = append(out, b[at:e.end]...)
		default:
			seen[i] = true
			out = append(out, b[at:e.value]...)
			out = appendText(out, args[last[i]+per-1])
		}
		at = e.end
	}
	for i, was := range seen {
		if was {
			continue
		}
		for _, s := range args[last[i]:][:per] {
			out = appendText(out, s)
		}
		added++
	}
	return recount(out, first, n+added), added, nil
}

// A Place is where an entry, or an integer, of a collection is, until the collection changes.
type Place uint32

// placesOf appends the places of all entries to dst, in their order.
func placesOf(dst []Place, b []byte, per int) []Place {
	n, at, err := head(b, per)
	if err != nil {
		return dst
	}
	dst = slices.Grow(dst, n)
	for at < len(b) {
		dst = append(dst, Place(at))
		e, _, _ := entryAt(b, per, at)
		at = e.end
	}
	return dst
}

// placesNamed appends the places of the entries with such names, in their order, and checks everything.
func placesNamed(dst []Place, b []byte, per int, names [][]byte) ([]Place, error) {
	if len(names) == 1 {
		e, _, _, err := findEntry(b, per, names[0])
		if e.at > 0 {
			dst = append(dst, Place(e.at))
		}
		return dst, err
	}
	n, err := checkEntries(b, per)
	if err != nil || n == 0 {
		return dst, err
	}
	var x Names
	for _, s := range names {
		x.Add(s)
	}
	_, at, _ := head(b, per)
	for at < len(b) {
		e, lo, hi := entryAt(b, per, at)
		if x.Find(b[lo:hi]) >= 0 {
			dst = append(dst, Place(at))
		}
		at = e.end
	}
	return dst, nil
}

// removePlaces takes out entries, in b itself; places are in their order. nil: none is left.
func removePlaces(b []byte, per int, places []Place) []byte {
	if len(places) == 0 {
		return b
	}
	n, first, _ := head(b, per)
	if len(places) == n {
		return nil
	}
	to := int(places[0])
	for i, p := range places {
		e, _, _ := entryAt(b, per, int(p))
		until := len(b)
		if i+1 < len(places) {
			until = int(places[i+1])
		}
		to += copy(b[to:], b[e.end:until])
	}
	return recount(b[:to], first, n-len(places))
}

// Names finds strings among many. The hash is seeded, so that no client can choose strings that collide; few strings
// are compared with. The zero value is empty. It keeps the strings, which must not change, and is not for concurrent
// use.
type Names struct {
	items [][]byte
	table []int32 // item + 1; a power of two, at most half full
	seed  maphash.Seed
}

// NameBytes is about how much memory each string of Names takes, beside itself.
const NameBytes = 64

const fewNames = 8

// Len counts the strings.
func (x *Names) Len() int { return len(x.items) }

// At is the i-th of the strings, in the order in which they came.
func (x *Names) At(i int) []byte { return x.items[i] }

// Add adds a string, if it is not there, and returns which it is.
func (x *Names) Add(s []byte) (i int, added bool) {
	if i := x.Find(s); i >= 0 {
		return i, false
	}
	i = len(x.items)
	x.items = append(x.items, s)
	switch {
	case i < fewNames:
	case 2*i >= len(x.table):
		if x.table == nil {
			x.seed = maphash.MakeSeed()
		}
		x.table = make([]int32, max(64, 4*len(x.table)))
		for j := range x.items {
			x.enterItem(j)
		}
	default:
		x.enterItem(i)
	}
	return i, true
}

func (x *Names) enterItem(i int) {
	mask := uint64(len(x.table) - 1)
	at := maphash.Bytes(x.seed, x.items[i]) & mask
	for x.table[at] != 0 {
		at = (at + 1) & mask
	}
	x.table[at] = int32(i + 1)
}

// Find returns which string it is, -1 if there is no such.
func (x *Names) Find(s []byte) int {
	if x.table == nil {
		for i, t := range x.items {
			if bytes.Equal(s, t) {
				return i
			}
		}
		return -1
	}
	mask := uint64(len(x.table) - 1)
	for at := maphash.Bytes(x.seed, s) & mask; x.table[at] != 0; at = (at + 1) & mask {
		if i := int(x.table[at] - 1); bytes.Equal(s, x.items[i]) {
			return i
		}
	}
	return -1
}

// A scan goes through the hashes of the names, of 32 bits, from 0 on; a cursor is the least hash that was not reached.
// So a name that is there all the time is found, and found once, whatever comes and goes meanwhile, and any gateway can
// go on with it.
const (
	scanEnd = 1 << 32
	// scanCalls is how many calls a scan of a collection takes at most, since each of them reads all of it.
	scanCalls = 64
)

// scanWindow is which hashes a call looks for that should find count of n names; next is 0 if they are the last.
func scanWindow(cursor uint64, count int64, n int) (hi, next uint64) {
	share := float64(max(count, int64(n/scanCalls))) / float64(n)
	if cursor >= scanEnd || share >= 1 {
		return scanEnd, 0
	}
	if hi = cursor + max(1, uint64(share*scanEnd)); hi >= scanEnd {
		return scanEnd, 0
	}
	return hi, hi
}

// scanHash must be the same in all gateways and for ever, or scans that are on the way would lose what they have to
// find.
func scanHash(name []byte) uint64 { return xxh3.Hash(name) >> 32 }
