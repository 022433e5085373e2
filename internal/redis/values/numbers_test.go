package values

import (
	"math"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

// FuzzParseLongDouble: the sum of any two arguments is a short one.
func FuzzParseLongDouble(f *testing.F) {
	f.Add([]byte("1e16383"), []byte("0x1p4"))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		k := Key{Present: true, Value: a, MaxValue: 1 << 20}
		w := new(resp.Writer)
		_ = cmdIncrByFloat(&k, [][]byte{nil, nil, b}, w)
		if w.Len() > 20_000 {
			t.Fatalf("%d bytes", w.Len())
		}
	})
}

// TestTimeouts reads them as redis-server does.
func TestTimeouts(t *testing.T) {
	for text, want := range map[string]string{
		"0": "0s", "1": "1s", "0.0001": "1ms", "1.5": "1.5s", "-0.0001": "0s", "-0.001": "0s", "0x10": "16s",
		"1e-30": "1ms",
		"-1":    "ERR timeout is negative", "inf": "ERR timeout is negative", "1e17": "ERR timeout is negative",
		"-inf": "ERR timeout is negative",
		"nan":  "ERR timeout is not a float or out of range", "": "ERR timeout is not a float or out of range",
		" 1":               "ERR timeout is not a float or out of range",
		"9223372036854775": "0s", "1e12": "0s",
	} {
		d, err := parseTimeout([]byte(text))
		got := d.String()
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// Numbers as strtod(3) reads them, where Go does otherwise.
func TestParseFloat(t *testing.T) {
	for _, c := range []struct {
		text string
		want float64
		ok   bool
	}{
		{"1", 1, true}, {"-1.5e3", -1500, true}, {"+.5", 0.5, true}, {"1.", 1, true}, {"0x10", 16, true},
		{"0x.8", 0.5, true}, {"0X1P-1", 0.5, true}, {"inf", math.Inf(1), true}, {"-Infinity", math.Inf(-1), true},
		{"0e5", 0, true}, {"0x0p5", 0, true}, {"5e-324", 5e-324, true}, {"0.000", 0, true},
		{"", 0, false}, {" 1", 0, false}, {"1 ", 0, false}, {"nan", 0, false}, {"1e400", 0, false},
		{"1e-400", 0, false}, {"0x1p-2000", 0, false}, {"1_0", 0, false}, {"0x_1", 0, false}, {"e", 0, false},
		{"0x", 0, false},
		{".", 0, false}, {"--1", 0, false}, {"+-1", 0, false}, {"1e", 0, false}, {"1\x00", 0, false},
		{strings.Repeat("1", 6000), 0, false},
	} {
		if got, ok := scoreOf([]byte(c.text)); ok != c.ok || ok && got != c.want {
			t.Errorf("%.40q is %v, %v", c.text, got, ok)
		}
	}
	for text, want := range map[string]bound{"": {}, "(": {Open: true}, " 2": {Score: 2},
		"(1e400": {Score: math.Inf(1), Open: true}, "3\x00x": {Score: 3}} {
		if got, ok := scoreBound([]byte(text)); !ok || got.Score != want.Score || got.Open != want.Open {
			t.Errorf("%q is %+v, %v", text, got, ok)
		}
	}
}
