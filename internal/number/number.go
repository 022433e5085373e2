// Package number reads numbers in text as C's library does, on which Redis and Lua rely: strtod(3), strtold(3) and
// strtoul(3) of glibc on x86.
//
// It leaves to its callers which numbers they take: whether white space, infinity, or what is out of range is good.
// Start with [Double] and [LongDouble]; each tells how many bytes the number has, so that a caller sees what stands
// behind it. All functions may be called concurrently, and keep nothing of their arguments.
package number

import (
	"math"
	"math/big"
	"math/bits"
	"strconv"
	"strings"
)

// text is what numbers are read from.
type text interface{ ~string | ~[]byte }

// kind is a form of number.
type kind uint8

const (
	none kind = iota
	decimal
	hexadecimal
	infinity
	nan
)

// scanned is a number of which the form is known, and not yet the value.
type scanned struct {
	kind  kind
	start int // of the sign or first digit, behind white space
	end   int
	neg   bool
	zero  bool // all digits are 0
	bare  bool // hexadecimal, without exponent
}

// IsSpace is C's isspace.
func IsSpace(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }

func isDigit(c byte, hex bool) bool {
	return c >= '0' && c <= '9' || hex && c|0x20 >= 'a' && c|0x20 <= 'f'
}

func isLetter(c byte) bool { return c|0x20 >= 'a' && c|0x20 <= 'z' }

// has reports whether a word stands at i, in letters of either case.
func has[T text](s T, i int, word string) bool {
	if len(s)-i < len(word) {
		return false
	}
	for j := range len(word) {
		if c := s[i+j]; c != word[j] && !(isLetter(c) && c|0x20 == word[j]) {
			return false
		}
	}
	return true
}

// scan finds the longest number at the beginning of s, as strtod does.
func scan[T text](s T) (n scanned) {
	i := 0
	for i < len(s) && IsSpace(s[i]) {
		i++
	}
	n.start = i
	if i < len(s) && (s[i] == '-' || s[i] == '+') {
		n.neg = s[i] == '-'
		i++
	}
	switch {
	case has(s, i, "infinity"):
		n.kind, n.end = infinity, i+8
		return n
	case has(s, i, "inf"):
		n.kind, n.end = infinity, i+3
		return n
	case has(s, i, "nan"):
		n.kind, n.end = nan, i+3
		if j := n.end; j < len(s) && s[j] == '(' {
			for j++; j < len(s) && (isDigit(s[j], false) || isLetter(s[j]) || s[j] == '_'); j++ {
			}
			if j < len(s) && s[j] == ')' {
				n.end = j + 1
			}
		}
		return n
	}
	if has(s, i, "0x") {
		if end, zero := digits(s, i+2, true); end > 0 {
			n.kind, n.zero = hexadecimal, zero
			n.end = exponent(s, end, 'p')
			n.bare = n.end == end
			return n
		}
	}
	if end, zero := digits(s, i, false); end > 0 {
		n.kind, n.zero = decimal, zero
		n.end = exponent(s, end, 'e')
	}
	return n
}

// digits passes over digits, among which there may be a point; end is 0 if there are none.
func digits[T text](s T, i int, hex bool) (end int, zero bool) {
	zero = true
	some, point := false, false
	for ; i < len(s); i++ {
		switch c := s[i]; {
		case isDigit(c, hex):
			some = true
			zero = zero && c == '0'
		case c == '.' && !point:
			point = true
		default:
			if some {
				return i, zero
			}
			return 0, zero
		}
	}
	if some {
		return i, zero
	}
	return 0, zero
}

// exponent passes over an exponent at i, if there is one.
func exponent[T text](s T, i int, letter byte) int {
	j := i
	if j < len(s) && s[j]|0x20 == letter {
		if j++; j < len(s) && (s[j] == '-' || s[j] == '+') {
			j++
		}
		if j < len(s) && isDigit(s[j], false) {
			for j < len(s) && isDigit(s[j], false) {
				j++
			}
			return j
		}
	}
	return i
}

// Double is strtod(3): the number at the beginning of s, behind white space, and how many bytes both have; 0: there is
// no number. inRange is false where strtod sets ERANGE: the number is too large, and infinite, or too small. A number
// that is too small has fewer digits as a double, and may be 0.
func Double[T text](s T) (f float64, used int, inRange bool) {
	n := scan(s)
	switch n.kind {
	case none:
		return 0, 0, true
	case infinity:
		f = math.Inf(1)
	case nan:
		f = math.Float64frombits(0x7ff8 << 48)
	default:
		t := string(s[n.start:n.end])
		if n.bare {
			t += "p0" // which Go wants
		}
		var err error
		f, err = strconv.ParseFloat(t, 64)
		return f, n.end, err == nil && !underflows(f, t, n)
	}
	if n.neg {
		f = math.Copysign(f, -1)
	}
	return f, n.end, true
}

// minNormal is the least double that has all bits of its mantissa.
const minNormal = 0x1p-1022

// underflows reports whether f, which a text means, is so small that it is not what the text says.
func underflows(f float64, t string, n scanned) bool {
	switch f = math.Abs(f); {
	case f == 0:
		return !n.zero
	case f > minNormal:
		return false
	case f == minNormal:
		// A number that is less than this one, but for rounding to 53 bits, is too small.
		exact, _, err := big.ParseFloat(t, base(n), 53, big.ToNearestEven)
		return err == nil && exact.Cmp(big.NewFloat(math.Copysign(minNormal, float64(exact.Sign())))) != 0
	case n.kind == hexadecimal:
		return !isHex(f, t)
	}
	return !isDecimal(f, t)
}

// base is what package big calls the form of number.
func base(n scanned) int {
	if n.kind == hexadecimal {
		return 0
	}
	return 10
}

// split takes a number apart: its digits without leading and trailing zeros, and the exponent of the first one.
func split(t string, letter string) (digits string, exponent int) {
	t = strings.TrimLeft(strings.ToLower(t), "+-")
	if letter == "p" {
		t = t[2:]
	}
	t, e, _ := strings.Cut(t, letter)
	exponent = clamp(e)
	whole, part, _ := strings.Cut(t, ".")
	each := 1
	if letter == "p" {
		each = 4
	}
	digits = strings.TrimLeft(whole+part, "0")
	exponent += each * (len(digits) - len(part))
	return strings.TrimRight(digits, "0"), exponent
}

// clampAt is more than the exponent of any number that has a value.
const clampAt = 1 << 24

// clamp reads an exponent.
func clamp(t string) int {
	e, err := strconv.Atoi(t)
	if err != nil && t != "" && t[0] == '-' {
		return -clampAt
	} else if err != nil && t != "" {
		return clampAt
	}
	return max(-clampAt, min(e, clampAt))
}

// isDecimal reports whether a decimal number is exactly f. No double has more than 767 digits.
func isDecimal(f float64, t string) bool {
	digits, exponent := split(t, "e")
	d, e := split(strconv.FormatFloat(f, 'e', 800, 64), "e")
	return d == digits && e == exponent
}

// isHex is isDecimal for a hexadecimal number.
func isHex(f float64, t string) bool {
	digits, exponent := split(t, "p")
	if len(digits) > 16 {
		return false
	}
	mantissa, err := strconv.ParseUint(digits, 16, 64)
	if err != nil {
		return false
	}
	exponent -= 4 * len(digits)
	m, e := math.Frexp(f)
	want := uint64(math.Ldexp(m, 53))
	shift := bits.TrailingZeros64(want)
	own := bits.TrailingZeros64(mantissa)
	return mantissa>>own == want>>shift && exponent+own == e-53+shift
}

// LongDoubleBits is how many bits the mantissa of x87's long double has.
const LongDoubleBits = 64

// LongDoubleMax is the greatest exponent of a long double, as big.Float has it.
const LongDoubleMax = 16384

// longDoubleHalf is the exponent of the power of 2 that is half of the least long double.
const longDoubleHalf = -16446

// LongDouble is strtold(3), and otherwise Double. NaN, which a big.Float cannot be, is no number. A number that is too
// large is infinite and not in range, and one that is too small is 0 and not in range. A number of fewer bits than
// LongDoubleBits is in range. It takes time that grows with the square of the length of s.
func LongDouble[T text](s T) (f *big.Float, used int, inRange bool) {
	n := scan(s)
	f = new(big.Float).SetPrec(LongDoubleBits)
	switch n.kind {
	case none, nan:
		return f, 0, true
	case infinity:
		return f.SetInf(n.neg), n.end, true
	}
	if n.zero {
		if n.neg {
			f.Neg(f)
		}
		return f, n.end, true
	}
	t := string(s[n.start:n.end])
	letter := "e"
	if n.kind == hexadecimal {
		letter = "p"
	}
	if _, e := split(t, letter); e > 1<<15 {
		return f.SetInf(n.neg), n.end, false
	} else if e < -1<<15 {
		return f, n.end, false
	}
	f, _, err := big.ParseFloat(t, base(n), LongDoubleBits, big.ToNearestEven)
	if err != nil {
		return new(big.Float).SetPrec(LongDoubleBits), 0, true
	}
	half := new(big.Float).SetMantExp(big.NewFloat(1), longDoubleHalf)
	switch {
	case f.MantExp(nil) > LongDoubleMax:
		return f.SetInf(n.neg), n.end, false
	case new(big.Float).Abs(f).Cmp(half) <= 0:
		return f.SetInt64(0), n.end, false
	}
	return f, n.end, true
}

// Unsigned is strtoul(3): the number at the beginning of s, behind white space, in a base from 2 to 36. A number with a
// minus is counted from 2^64 down, and one that is too large is the greatest, and not in range.
func Unsigned[T text](s T, base int) (u uint64, used int, inRange bool) {
	i := 0
	for i < len(s) && IsSpace(s[i]) {
		i++
	}
	neg := false
	if i < len(s) && (s[i] == '-' || s[i] == '+') {
		neg = s[i] == '-'
		i++
	}
	if base == 16 && has(s, i, "0x") && i+2 < len(s) && isDigit(s[i+2], true) {
		i += 2
	}
	over := false
	for ; i < len(s); i++ {
		d := digit(s[i])
		if d >= base {
			break
		}
		hi, lo := bits.Mul64(u, uint64(base))
		sum, carry := bits.Add64(lo, uint64(d), 0)
		over = over || hi != 0 || carry != 0
		u, used = sum, i+1
	}
	switch {
	case used == 0:
		return 0, 0, true
	case over:
		return math.MaxUint64, used, false
	case neg:
		return -u, used, true
	}
	return u, used, true
}

// digit is the value of a digit or letter, 99 for others.
func digit(c byte) int {
	switch {
	case isDigit(c, false):
		return int(c - '0')
	case isLetter(c):
		return int(c|0x20-'a') + 10
	}
	return 99
}
