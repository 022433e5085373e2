package config

import (
	"errors"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// Size is a number of bytes, written with a binary unit: 64GiB.
type Size int64

const wantSize = "want a size such as 512MiB or 64GiB (B, KiB, MiB, GiB, TiB)"

var errSize = errors.New(wantSize)

// units from the largest.
var units = []struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

// ParseSize reads what String writes, and fractions that are whole bytes, such
// as 1.5GiB. A number without a unit is bytes. GB is refused, because half of
// its users mean GiB.
func ParseSize(s string) (Size, error) {
	s = strings.TrimSpace(s)
	scale := int64(1)
	for _, u := range units {
		if len(s) > len(u.name) && strings.EqualFold(s[len(s)-len(u.name):], u.name) {
			s, scale = strings.TrimSpace(s[:len(s)-len(u.name)]), u.bytes
			break
		}
	}
	// Digits and at most one point: big.Rat would take fractions and exponents,
	// and an exponent can make it allocate without bound.
	if s == "" || len(s) > 32 || strings.Trim(s, "0123456789.") != "" {
		return 0, errSize
	}
	r, ok := new(big.Rat).SetString(s)
	if !ok {
		return 0, errSize
	}
	r.Mul(r, new(big.Rat).SetInt64(scale))
	if !r.IsInt() {
		return 0, errors.New("want a whole number of bytes")
	}
	if !r.Num().IsInt64() {
		return 0, errors.New("want less than " + Size(math.MaxInt64).String())
	}
	return Size(r.Num().Int64()), nil
}

// String uses the largest unit that divides s.
func (s Size) String() string {
	for _, u := range units {
		if s != 0 && int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.name
		}
	}
	return "0B"
}
