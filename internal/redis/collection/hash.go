package collection

import "iter"

// Formats of a hash. Both have the same entries; a large one is what Redis would keep in a hash table: since it has had
// more than 512 fields, or longer strings than 64 bytes, and for ever from then on.
const (
	hashSmall = 1
	hashLarge = 2

	smallFields = 512 // hash-max-listpack-entries
	smallText   = 64  // hash-max-listpack-value
)

// Hash is an encoded hash, fields with values; nil is the empty one, which no record has. Methods that change it do so
// in its own memory where there is room, so that memory has to be the caller's. Strings that they return lie in it. All
// but those that say otherwise check all the bytes, and their error is ErrCorrupt with nothing changed.
type Hash []byte

func (h Hash) check() error {
	if len(h) > 0 && h[0] != hashSmall && h[0] != hashLarge {
		return ErrCorrupt
	}
	return nil
}

// Len counts the fields.
func (h Hash) Len() (n int, err error) {
	if err := h.check(); err != nil {
		return 0, err
	}
	return checkEntries(h, 2)
}

// Large reports whether Redis would have made a hash table of it; it checks no more than that.
func (h Hash) Large() bool { return len(h) > 0 && h[0] == hashLarge }

// Get returns the value of a field; nil: there is no such field.
func (h Hash) Get(field []byte) (value []byte, err error) {
	if err := h.check(); err != nil {
		return nil, err
	}
	e, _, _, err := findEntry(h, 2, field)
	if err != nil || e.at == 0 {
		return nil, err
	}
	return h[e.lo:e.end:e.end], nil
}

// GetAll appends the values of fields to dst, nil for those that are not there.
func (h Hash) GetAll(dst [][]byte, fields [][]byte) ([][]byte, error) {
	n, err := h.Len()
	if err != nil {
		return dst, err
	}
	if len(fields)*n <= fewSteps {
		for _, f := range fields {
			v, _ := h.Get(f)
			dst = append(dst, v)
		}
		return dst, nil
	}
	var x Names
	for _, f := range fields {
		x.Add(f)
	}
	values := make([][]byte, x.Len())
	for f, v := range h.All() {
		if i := x.Find(f); i >= 0 {
			values[i] = v
		}
	}
	for _, f := range fields {
		dst = append(dst, values[x.Find(f)])
	}
	return dst, nil
}

// Set sets a field, and reports whether it is a new one.
func (h Hash) Set(field, value []byte) (_ Hash, added bool, err error) {
	if err := h.check(); err != nil {
		return h, false, err
	}
	b, added, err := putEntry(h, hashSmall, 2, field, value)
	if err == nil {
		b[0] = formatOf(b, field, value)
	}
	return b, added, err
}

// SetAll sets fields, each behind which its value is, and counts the new ones. If a field has several values, the last
// counts.
func (h Hash) SetAll(pairs [][]byte) (_ Hash, added int, err error) {
	if err := h.check(); err != nil || len(pairs) == 0 {
		return h, 0, err
	}
	b, added, err := putEntries(h, hashSmall, 2, pairs)
	if err == nil {
		b[0] = formatOf(b, pairs...)
	}
	return b, added, err
}

// formatOf is the format of a hash to which strings have come.
func formatOf(b []byte, texts ...[]byte) byte {
	if n, _, _ := head(b, 2); n > smallFields {
		return hashLarge
	}
	for _, s := range texts {
		if len(s) > smallText {
			return hashLarge
		}
	}
	return b[0]
}

// Delete takes out fields, and counts those that there were. nil: no field is left.
func (h Hash) Delete(fields [][]byte) (_ Hash, n int, err error) {
	if err := h.check(); err != nil {
		return h, 0, err
	}
	var few [8]Place
	places, err := placesNamed(few[:0], h, 2, fields)
	if err != nil {
		return h, 0, err
	}
	return removePlaces(h, 2, places), len(places), nil
}

// All is the fields with their values, in the order in which they came. It is for a hash that Len has found to be
// whole.
func (h Hash) All() iter.Seq2[[]byte, []byte] {
	return func(yield func(field, value []byte) bool) {
		_, at, _ := head(h, 2)
		for at < len(h) {
			e, lo, hi := entryAt(h, 2, at)
			if !yield(h[lo:hi:hi], h[e.lo:e.end:e.end]) {
				return
			}
			at = e.end
		}
	}
}

// Places appends the places of all fields to dst. It is for a hash that Len has found to be whole.
func (h Hash) Places(dst []Place) []Place { return placesOf(dst, h, 2) }

// At is the field at a place that Places returned, with its value.
func (h Hash) At(p Place) (field, value []byte) {
	e, lo, hi := entryAt(h, 2, int(p))
	return h[lo:hi:hi], h[e.lo:e.end:e.end]
}

// Scan is one call of a scan: it calls f with fields and values, about count of them. It returns the cursor for the
// next call, 0 if there is none. A field that is there from the first call to the last is given once. A hash that is
// not Large is given all at once.
func (h Hash) Scan(cursor uint64, count int64, f func(field, value []byte)) (next uint64, err error) {
	n, err := h.Len()
	if err != nil || n == 0 {
		return 0, err
	}
	hi := uint64(scanEnd)
	if !h.Large() {
		cursor = 0
	} else {
		hi, next = scanWindow(cursor, count, n)
	}
	all := cursor == 0 && hi == scanEnd
	for field, value := range h.All() {
		if all {
			f(field, value)
		} else if x := scanHash(field); x >= cursor && x < hi {
			f(field, value)
		}
	}
	return next, nil
}
