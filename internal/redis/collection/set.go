package collection

import (
	"encoding/binary"
	"iter"
	"math"
	"slices"
	"sort"
	"strconv"
)

// Formats of a set. Integers are behind the format byte in ascending order, all of the least width that does for each
// of them; strings are entries. A set begins with integers and has strings as soon as a member is no integer, or there
// are more than 512, and for ever from then on, as in Redis.
const (
	setInt16   = 1
	setInt32   = 2
	setInt64   = 3
	setStrings = 4

	maxInts = 512 // set-max-intset-entries
)

// Set is an encoded set; nil is the empty one, which no record has. Methods that change it do so in its own memory
// where there is room, so that memory has to be the caller's. Strings that they return may lie in it. All but those
// that say otherwise check all the bytes, and their error is ErrCorrupt with nothing changed.
type Set []byte

// width is how many bytes an integer takes; 0: the members are strings. A format that there is not
// counts as one of integers: Len refuses it.
func (s Set) width() int {
	switch {
	case len(s) == 0:
		return 2
	case s[0] == setStrings:
		return 0
	case s[0] > setStrings:
		return 1
	}
	return 1 << s[0]
}

// ints counts the integers of a set of such.
func (s Set) ints() int {
	if len(s) == 0 {
		return 0
	}
	return (len(s) - 1) >> s[0]
}

// int is the i-th integer.
func (s Set) int(i int) int64 {
	switch s[0] {
	case setInt16:
		return int64(int16(binary.LittleEndian.Uint16(s[1+2*i:])))
	case setInt32:
		return int64(int32(binary.LittleEndian.Uint32(s[1+4*i:])))
	}
	return int64(binary.LittleEndian.Uint64(s[1+8*i:]))
}

// putInt writes the i-th integer.
func (s Set) putInt(i int, n int64) {
	switch s[0] {
	case setInt16:
		binary.LittleEndian.PutUint16(s[1+2*i:], uint16(n))
	case setInt32:
		binary.LittleEndian.PutUint32(s[1+4*i:], uint32(n))
	default:
		binary.LittleEndian.PutUint64(s[1+8*i:], uint64(n))
	}
}

// formatOfInt is the least that has room for an integer.
func formatOfInt(n int64) byte {
	switch {
	case n == int64(int16(n)):
		return setInt16
	case n == int64(int32(n)):
		return setInt32
	}
	return setInt64
}

// findInt is where an integer is, or belongs.
func (s Set) findInt(n int64) (at int, found bool) {
	return sort.Find(s.ints(), func(i int) int {
		switch x := s.int(i); {
		case n < x:
			return -1
		case n > x:
			return 1
		}
		return 0
	})
}

// parseInt reads an integer as Redis does: one that is written as strconv would.
func parseInt(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > len("-9223372036854775808") || b[0] > '9' {
		return 0, false
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		return 0, false
	}
	var a [20]byte
	return n, string(strconv.AppendInt(a[:0], n, 10)) == string(b)
}

// Len counts the members.
func (s Set) Len() (n int, err error) {
	switch {
	case len(s) == 0:
		return 0, nil
	case s[0] == setStrings:
		return checkEntries(s, 1)
	case s[0] < setInt16 || s[0] > setStrings || len(s) == 1 || (len(s)-1)%s.width() != 0:
		return 0, ErrCorrupt
	}
	last := int64(math.MinInt64)
	for i := range s.ints() {
		n := s.int(i)
		if n <= last && i > 0 {
			return 0, ErrCorrupt
		}
		last = n
	}
	return s.ints(), nil
}

// Ints reports whether Redis would keep it as integers; it checks no more than that.
func (s Set) Ints() bool { return s.width() > 0 }

// Has reports whether it has a member.
func (s Set) Has(member []byte) (bool, error) {
	if s.width() == 0 {
		e, _, _, err := findEntry(s, 1, member)
		return e.at > 0, err
	}
	if _, err := s.Len(); err != nil {
		return false, err
	}
	n, ok := parseInt(member)
	if ok {
		_, ok = s.findInt(n)
	}
	return ok, nil
}

// HasAll appends to dst whether it has each of the members.
func (s Set) HasAll(dst []bool, members [][]byte) ([]bool, error) {
	n, err := s.Len()
	if err != nil {
		return dst, err
	}
	if s.width() > 0 || len(members)*n <= fewSteps {
		for _, m := range members {
			is, _ := s.Has(m)
			dst = append(dst, is)
		}
		return dst, nil
	}
	var x Names
	for _, m := range members {
		x.Add(m)
	}
	has := make([]bool, x.Len())
	for m := range s.All() {
		if i := x.Find(m); i >= 0 {
			has[i] = true
		}
	}
	for _, m := range members {
		dst = append(dst, has[x.Find(m)])
	}
	return dst, nil
}

// Room is how many bytes more a set may take with these members, whose bytes are counted together.
func (s Set) Room(members, bytes int) int {
	n := bytes + 10*members + 16
	if s.width() > 0 {
		n += 8*members + 24*min(s.ints(), maxInts+1) // if the integers become wider, or strings
	}
	return n
}

// AddAll adds members, and counts the new ones.
func (s Set) AddAll(members [][]byte) (_ Set, added int, err error) {
	if _, err := s.Len(); err != nil {
		return s, 0, err
	}
	for s.width() > 0 && len(members) > 0 {
		n, ok := parseInt(members[0])
		if !ok {
			s = s.strings()
			break
		}
		members = members[1:]
		var is bool
		if s, is = s.addInt(n); is {
			added++
		}
		if s.ints() > maxInts {
			s = s.strings()
		}
	}
	if len(members) == 0 {
		return s, added, nil
	}
	b, more, err := putEntries(s, setStrings, 1, members)
	return b, added + more, err
}

// addInt adds an integer to a set of such.
func (s Set) addInt(n int64) (_ Set, added bool) {
	at, found := s.findInt(n)
	if found {
		return s, false
	}
	if f := formatOfInt(n); len(s) == 0 {
		s = append(s, f)
	} else if f > s[0] {
		s = s.widen(f)
	}
	w := s.width()
	s = resize(s, 1+at*w, 1+at*w, w)
	s.putInt(at, n)
	return s, true
}

// widen changes the format of integers, from the last one on, so that none is written over before it is read.
func (s Set) widen(f byte) Set {
	n, was := s.ints(), s[0]
	s = slices.Grow(s, n<<f)[:1+n<<f]
	for i := n - 1; i >= 0; i-- {
		s[0] = was
		x := s.int(i)
		s[0] = f
		s.putInt(i, x)
	}
	return s
}

// strings is the same members as strings, in the same order.
func (s Set) strings() Set {
	if len(s) == 0 {
		return s
	}
	var a [24]byte
	out := append(make([]byte, 0, 24*(s.ints()+1)), setStrings, 0)
	for i := range s.ints() {
		out = appendText(out, strconv.AppendInt(a[:0], s.int(i), 10))
	}
	return append(s[:0], recount(out, 2, s.ints())...)
}

// Remove takes out members, and counts those that there were. nil: none is left.
func (s Set) Remove(members [][]byte) (_ Set, n int, err error) {
	var few [8]Place
	places := few[:0]
	if s.width() == 0 {
		places, err = placesNamed(places, s, 1, members)
		if err != nil {
			return s, 0, err
		}
		return removePlaces(s, 1, places), len(places), nil
	}
	if _, err := s.Len(); err != nil {
		return s, 0, err
	}
	for _, m := range members {
		if x, ok := parseInt(m); ok {
			if at, found := s.findInt(x); found {
				s = s.removeInt(at)
				n++
			}
		}
	}
	return s, n, nil
}

// removeInt takes out the i-th integer.
func (s Set) removeInt(i int) Set {
	w := s.width()
	if len(s) == 1+w {
		return nil
	}
	return resize(s, 1+i*w, 1+(i+1)*w, 0)
}

// RemovePlaces takes out the members at places, which are in their order and of this set. nil: none is left. It checks
// nothing.
func (s Set) RemovePlaces(places []Place) Set {
	if s.width() == 0 {
		return removePlaces(s, 1, places)
	}
	for i := len(places) - 1; i >= 0; i-- {
		s = s.removeInt(int(places[i]))
	}
	return s
}

// All is the members: integers in their order, strings as they came. Each is valid until the next. It is for a set that
// Len has found to be whole.
func (s Set) All() iter.Seq[[]byte] {
	return func(yield func(member []byte) bool) {
		if s.width() > 0 {
			var a [24]byte
			for i := range s.ints() {
				if !yield(strconv.AppendInt(a[:0], s.int(i), 10)) {
					return
				}
			}
			return
		}
		_, at, _ := head(s, 1)
		for at < len(s) {
			e, lo, hi := entryAt(s, 1, at)
			if !yield(s[lo:hi:hi]) {
				return
			}
			at = e.end
		}
	}
}

// Members appends all members to dst, as strings of their own if they are integers. It is for a set that Len has found
// to be whole.
func (s Set) Members(dst [][]byte) [][]byte {
	if s.width() == 0 {
		for m := range s.All() {
			dst = append(dst, m)
		}
		return dst
	}
	text := make([]byte, 0, 20*s.ints())
	for m := range s.All() {
		lo := len(text)
		text = append(text, m...)
		dst = append(dst, text[lo:len(text):len(text)])
	}
	return dst
}

// Places appends the places of all members to dst. It is for a set that Len has found to be whole.
func (s Set) Places(dst []Place) []Place {
	if s.width() == 0 {
		return placesOf(dst, s, 1)
	}
	for i := range s.ints() {
		dst = append(dst, Place(i))
	}
	return dst
}

// At appends the member at a place that Places returned to dst.
func (s Set) At(dst []byte, p Place) []byte {
	if s.width() > 0 {
		return strconv.AppendInt(dst, s.int(int(p)), 10)
	}
	_, lo, hi := entryAt(s, 1, int(p))
	return append(dst, s[lo:hi]...)
}

// Scan is one call of a scan, as that of a hash. Integers are given all at once.
func (s Set) Scan(cursor uint64, count int64, f func(member []byte)) (next uint64, err error) {
	n, err := s.Len()
	if err != nil || n == 0 {
		return 0, err
	}
	hi := uint64(scanEnd)
	if s.width() > 0 {
		cursor = 0
	} else {
		hi, next = scanWindow(cursor, count, n)
	}
	all := cursor == 0 && hi == scanEnd
	for m := range s.All() {
		if all {
			f(m)
		} else if x := scanHash(m); x >= cursor && x < hi {
			f(m)
		}
	}
	return next, nil
}
