package rdb

import "errors"

// Opcodes of RDB files that stand before a library of functions; the first is of the time before Redis 7.0.0.
const (
	opcodeOldFunction = 0xf6
	opcodeFunction    = 0xf5
)

// Errors of ParseLibraries besides ErrChecksum; the texts are Redis's.
var (
	ErrOldLibrary = errors.New("Pre-GA function format not supported")
	ErrNoLibrary  = errors.New("given type is not a function")
	ErrLibrary    = errors.New("Failed loading library payload")
)

// AppendLibraries appends the payload of FUNCTION DUMP to b: the sources of libraries.
func AppendLibraries(b []byte, sources [][]byte) []byte {
	at := len(b)
	for _, s := range sources {
		b = appendString(append(b, opcodeFunction), s)
	}
	return seal(b, at)
}

// ParseLibraries reads such a payload. The sources have limit bytes together at most, and alias the payload where they
// can.
func ParseLibraries(b []byte, limit int) (sources [][]byte, err error) {
	b, err = unseal(b)
	if err != nil {
		return nil, err
	}
	r := &reader{b: b, left: limit}
	for len(r.b) > 0 {
		switch r.byte() {
		case opcodeFunction:
		case opcodeOldFunction:
			return nil, ErrOldLibrary
		default:
			return nil, ErrNoLibrary
		}
		s := r.string()
		if limit -= len(s); r.bad || limit < 0 {
			return nil, ErrLibrary
		}
		r.left = limit
		sources = append(sources, s)
	}
	return sources, nil
}
