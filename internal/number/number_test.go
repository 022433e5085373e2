package number

import (
	"fmt"
	"math"
	"math/big"
	"os"
	"strconv"
	"strings"
	"testing"
)

// TestLikeC wants of each spelling what C's library made of it. Of a long double that has lost bits only the sign of
// its exponent counts: see LongDouble.
func TestLikeC(t *testing.T) {
	file, err := os.ReadFile("testdata/strtod")
	if err != nil {
		t.Fatal(err)
	}
	spellings := 0
	for line := range strings.Lines(string(file)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		spellings++
		quoted, err := strconv.QuotedPrefix(line)
		if err != nil {
			t.Fatal(err)
		}
		text, err := strconv.Unquote(quoted)
		if err != nil {
			t.Fatal(err)
		}
		var pattern uint64
		var used, inRange, longUsed, longInRange int
		var long string
		if _, err := fmt.Sscanf(line[len(quoted):], "%x %d %d %s %d %d", &pattern, &used, &inRange, &long, &longUsed,
			&longInRange); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		f, n, ok := Double(text)
		want := math.Float64frombits(pattern)
		if same := math.Float64bits(f) == pattern || math.IsNaN(f) && math.IsNaN(want) &&
			math.Signbit(f) == math.Signbit(want); !same || n != used || ok != (inRange == 1) {
			t.Errorf("Double(%q) = %v %d %v, want %v %d %d", text, f, n, ok, want, used, inRange)
		}
		if strings.Contains(long, "nan") {
			continue
		}
		l, n, ok := LongDouble([]byte(text))
		wanted := new(big.Float).SetInf(long[0] == '-')
		if !strings.Contains(long, "inf") {
			if wanted, _, err = big.ParseFloat(long, 0, LongDoubleBits, big.ToNearestEven); err != nil {
				t.Fatal(err)
			}
		}
		if denormal := wanted.Sign() != 0 && longInRange == 0 && !wanted.IsInf(); denormal {
			if l.Sign() != wanted.Sign() || n != longUsed || !ok {
				t.Errorf("LongDouble(%q) = %v %d %v, want %s %d", text, l, n, ok, long, longUsed)
			}
		} else if l.Cmp(wanted) != 0 || l.Signbit() != wanted.Signbit() && ok || n != longUsed ||
			ok != (longInRange == 1) {
			t.Errorf("LongDouble(%q) = %v %d %v, want %s %d %d", text, l, n, ok, long, longUsed, longInRange)
		}
	}
	if spellings < 150 {
		t.Errorf("%d spellings", spellings)
	}
}

func TestUnsigned(t *testing.T) {
	for _, c := range []struct {
		text string
		base int
		want uint64
		used int
	}{
		{"", 10, 0, 0}, {" ", 10, 0, 0}, {"-", 10, 0, 0}, {"x", 10, 0, 0}, {"0", 10, 0, 1}, {" +12x", 10, 12, 4},
		{"-1", 10, math.MaxUint64, 2},
		{"18446744073709551615", 10, math.MaxUint64, 20}, {"18446744073709551616", 10, math.MaxUint64, 20},
		{"-18446744073709551616", 10, math.MaxUint64, 21},
		{"-18446744073709551615", 10, 1, 21}, {"0x", 16, 0, 1}, {"0xg", 16, 0, 1}, {"0x1F", 16, 31, 4},
		{"-0x1f", 16, 0xffffffffffffffe1, 5}, {"0x1", 10, 0, 1},
		{"zz", 36, 35*36 + 35, 2}, {"102", 2, 2, 2}, {"2", 2, 0, 0}, {"7fg", 16, 0x7f, 2},
	} {
		if got, used, inRange := Unsigned(c.text, c.base); got != c.want || used != c.used ||
			inRange == strings.HasSuffix(c.text, "18446744073709551616") {
			t.Errorf("Unsigned(%q, %d) = %d, %d, want %d, %d", c.text, c.base, got, used, c.want, c.used)
		}
	}
}

// TestLong bounds the time that long texts take.
func TestLong(t *testing.T) {
	for _, text := range []string{strings.Repeat("9", 1<<20), "0." + strings.Repeat("0", 1<<20) + "1",
		"0x" + strings.Repeat("f", 1<<20), "1e" + strings.Repeat("9", 1<<20)} {
		if _, used, _ := Double(text); used != len(text) {
			t.Errorf("%d of %d bytes used", used, len(text))
		}
	}
}
