package glob

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
)

// The cases are what Redis 7's stringmatchlen answers.
func TestRedis(t *testing.T) {
	for _, c := range []struct {
		pattern, s string
		want       bool
	}{
		{"", "", true}, {"", "a", false}, {"*", "", true}, {"*", "abc", true}, {"a", "", false}, {"?", "", false},
		{"h?llo", "hello", true}, {"h?llo", "hllo", false}, {"h*llo", "heeello", true}, {"h*llo", "heeell", false},
		{"h[ae]llo", "hallo", true}, {"h[ae]llo", "hillo", false}, {"h[^e]llo", "hallo", true},
		{"h[^e]llo", "hello", false},
		{"h[a-b]llo", "hbllo", true}, {"h[b-a]llo", "hallo", true}, {"h[a-b]llo", "hcllo", false},
		{`h\*llo`, "h*llo", true}, {`h\*llo`, "hello", false}, {`[\]]`, "]", true}, {`[\-a]`, "-", true},
		{"[a-]", "-", false}, {"[a-]", "_", true},
		{"[]", "]", false}, {"[^]", "x", true}, {"[!a]", "a", true}, {"[abc", "c", true}, {"[a-", "a", true},
		{"[", "[", false},
		{`\`, `\`, true}, {`a\`, `a\`, true}, {"a**b*", "axbyb", true}, {"*a*b", "aab", true}, {"*a*b", "aabc", false},
		{"{a,b}", "a", false}, {"??", "é", true}, {"[a-]]", "b", false}, {"[a-]]", "_", true},
	} {
		if got := Match([]byte(c.pattern), []byte(c.s)); got != c.want {
			t.Errorf("%q on %q: %v", c.pattern, c.s, got)
		}
	}
	// This takes a backtracking matcher for ever.
	if Match([]byte(strings.Repeat("a*", 60)+"b"), bytes.Repeat([]byte("a"), 5000)) {
		t.Error("a match without b")
	}
}

func FuzzStar(f *testing.F) {
	f.Add([]byte("a*[^b-d]?\\x"), []byte("aqx"))
	f.Fuzz(func(t *testing.T, pattern, s []byte) {
		if Match(pattern, s) && !Match(append([]byte("*"), pattern...), append([]byte("more"), s...)) {
			t.Errorf("%q matches %q, but not with * and more before", pattern, s)
		}
	})
}

// slowMatch is Match without classes and escapes, in the plainest way.
func slowMatch(p, s string) bool {
	if p == "" {
		return s == ""
	}
	switch p[0] {
	case '*':
		return slowMatch(p[1:], s) || s != "" && slowMatch(p, s[1:])
	case '?':
		return s != "" && slowMatch(p[1:], s[1:])
	}
	return s != "" && p[0] == s[0] && slowMatch(p[1:], s[1:])
}

func TestPlain(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20_000 {
		var p, s []byte
		for range rng.IntN(8) {
			p = append(p, "ab*?*"[rng.IntN(5)])
		}
		for range rng.IntN(8) {
			s = append(s, "ab"[rng.IntN(2)])
		}
		if got, want := Match(p, s), slowMatch(string(p), string(s)); got != want {
			t.Fatalf("%q %q: %v", p, s, got)
		}
	}
	for _, c := range []struct {
		p, s string
		ok   bool
	}{
		{"[a-c]x", "bx", true}, {"[^a-c]x", "bx", false}, {"[c-a]", "b", true}, {"[\\]]", "]", true},
		{"\\*", "*", true},
		{"\\*", "x", false}, {"*[a]*", "xxaxx", true}, {"*\\[x", "a[x", true}, {"h[ae]llo*", "hallo!", true},
		{"", "", true}, {"a", "", false},
	} {
		if Match([]byte(c.p), []byte(c.s)) != c.ok {
			t.Errorf("%q %q: want %v", c.p, c.s, c.ok)
		}
	}
	// Hostile patterns end soon.
	Match([]byte(strings.Repeat("*a", 900)+"b"), bytes.Repeat([]byte("a"), 20_000))
}

func FuzzPlain(f *testing.F) {
	f.Add([]byte("*[a-"), []byte("b"))
	f.Add([]byte("*\\"), []byte("\\"))
	f.Add([]byte("a*b?*"), []byte("aabab"))
	f.Fuzz(func(t *testing.T, p, s []byte) {
		got := Match(p, s)
		if len(p) > 12 || len(s) > 12 || bytes.ContainsAny(p, "[\\") {
			return // slowMatch knows no more, and takes for ever
		}
		if want := slowMatch(string(p), string(s)); got != want {
			t.Fatalf("%q %q: %v", p, s, got)
		}
	})
}

// TestMatchAll: what it says holds for everything that begins with the prefix.
func TestMatchAll(t *testing.T) {
	for _, c := range []struct {
		pattern, prefix string
		want            bool
	}{
		{"*", "", true}, {"*", "a", true}, {"a*", "a", true}, {"a*", "ab", true}, {"a*", "", false}, {"a*", "b", false},
		{"a", "a", false}, {"", "", false},
		{"a**", "a", true}, {"a?*", "a", false}, {"a?*", "ab", true}, {"a*b", "ab", false}, {"a*b*", "axb", true},
		{`a\*`, "a", false}, {`a\\*`, `a\`, true},
		{"[ab]*", "b", true}, {"[ab*", "a", false}, {"[*]", "*", false}, {"[^a]*", "b", true}, {"[^a]*", "a", false},
		{`\`, `\`, false},
	} {
		if got := MatchAll([]byte(c.pattern), []byte(c.prefix)); got != c.want {
			t.Errorf("%q for all of %q: %v", c.pattern, c.prefix, got)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	text := func(of string, most int) []byte {
		b := make([]byte, rng.IntN(most+1))
		for i := range b {
			b[i] = of[rng.IntN(len(of))]
		}
		return b
	}
	all := 0
	for range 100_000 {
		pattern, prefix := text(`ab*?[]^\-`, 6), text("ab*", 3)
		if !MatchAll(pattern, prefix) {
			continue
		}
		all++
		if key := append(prefix, text(`ab*[]\`, 4)...); !Match(pattern, key) {
			t.Fatalf("%q does not match %q", pattern, key)
		}
	}
	if all < 1000 {
		t.Errorf("%d patterns match all", all)
	}
}
