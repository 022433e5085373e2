package args

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
)

func of(line string) Parser {
	var list [][]byte
	for _, f := range strings.Fields(line) {
		list = append(list, []byte(f))
	}
	return New(list)
}

func parseFloat(b []byte) (float64, bool) {
	f, err := strconv.ParseFloat(string(b), 64)
	return f, err == nil
}

// options reads a command like SET's, with an option of each kind.
func options(line string) (string, error) {
	p := of(line)
	key, by := p.Str(), p.Float(parseFloat)
	var out []string
	for p.More() {
		switch {
		case p.Flag("nx"):
			out = append(out, "nx")
		case p.Option("limit", 2):
			out = append(out, fmt.Sprint("limit ", p.Int(), " ", p.Int()))
		case p.Option("count", 1):
			out = append(out, fmt.Sprint("count ", p.IntFrom(1, "ERR COUNT must be > 0")))
		case p.Option("order", 1):
			out = append(out, []string{"asc", "desc"}[p.Choice("asc", "desc")])
		case p.Flag("rest"):
			out = append(out, fmt.Sprintf("%q", p.Rest()))
		default:
			p.Wrong()
		}
	}
	return fmt.Sprintf("%s %v %s", key, by, strings.Join(out, ", ")), p.End()
}

func TestParser(t *testing.T) {
	for _, c := range []struct {
		line, want string
		err        error
	}{
		{"k 1.5", "k 1.5 ", nil},
		{"k 1 nx LIMIT 1 -2 order DESC Nx", "k 1 nx, limit 1 -2, desc, nx", nil},
		{"k 1 count 1 Count 3", "k 1 count 1, count 3", nil},
		{"k 1 count 0", "", Refusal("ERR COUNT must be > 0")},
		{"k 1 count x nx", "", Refusal("ERR COUNT must be > 0")},
		{"k 1 count", "", Syntax},
		{"k 1 rest nx 7", `k 1 ["nx" "7"]`, nil},
		{"k 1 limit 1", "", Syntax},
		{"k 1 limit a 1", "", NotInt},
		{"k 1 limit 1 01", "", NotInt},
		{"k 1 limit a 1 order up", "", NotInt}, // the first mistake counts
		{"k 1 order up limit a 1", "", Syntax},
		{"k one limit a 1", "", NotFloat},
		{"k", "", Syntax},
		{"", "", Syntax},
		{"k 1 nx foo", "", Syntax},
		{"k 1 order", "", Syntax},
	} {
		got, err := options(c.line)
		if err != c.err || err == nil && got != c.want {
			t.Errorf("%q: %q, %v, want %q, %v", c.line, got, err, c.want, c.err)
		}
	}
}

// Behind a mistake nothing is read.
func TestMistakeEnds(t *testing.T) {
	p := of("x 1 nx 2 3")
	p.Int()
	if p.More() || p.Left() != 0 || p.Flag("nx") || p.Option("nx", 0) || p.Str() != nil || p.Int() != 0 ||
		len(p.Rest()) > 0 || p.Choice("nx") != 0 {
		t.Error("it reads on behind a mistake")
	}
	p.Refuse("ERR another one")
	if err := p.Err(); err != NotInt || p.End() != NotInt || err.Error() != string(NotInt) {
		t.Errorf("%v, want the first mistake", err)
	}
	p = of("a b")
	p.Fail(nil)
	if p.Left() != 2 || p.Err() != nil {
		t.Error("no error is a mistake")
	}
	if p.Fail(Refusal("ERR of a function")); p.More() || p.End() != Refusal("ERR of a function") {
		t.Error("an error is no mistake")
	}
	p = of("a b")
	if p.Str(); p.Err() != nil || p.End() != Syntax {
		t.Error("what is left is no mistake at the end")
	}
	p = New(nil)
	if p.More() || p.Err() != nil || p.End() != nil {
		t.Error("no arguments are a mistake")
	}
}

func TestIs(t *testing.T) {
	for arg, want := range map[string]bool{"nx": true, "NX": true, "nX": true, "n": false, "nxx": false, "": false,
		"\xee\xf8": false, "@x": false} {
		if Is([]byte(arg), "nx") != want {
			t.Errorf("%q: %v", arg, !want)
		}
	}
}
