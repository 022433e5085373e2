// Package glob matches keys with the patterns that Redis has (stringmatchlen in its util.c), for
// the gateway's commands and for kvctl alike.
//
// It leaves to its callers what is matched. Start with [Match]. All of it may be called concurrently, keeps
// nothing of its arguments, and a hostile pattern cannot make it slow.
package glob

// Match reports whether s matches a pattern, byte by byte: * is any bytes, ? any one, [a-z] one of a class, [^a]
// one not of it, and \x is x. A class that is not closed ends with the pattern. It
// takes at most len(pattern) times len(s) steps.
func Match(pattern, s []byte) bool {
	p, i := 0, 0
	star, from := -1, 0 // behind the last *, and where in s it has ended so far
	for i < len(s) {
		if p < len(pattern) && pattern[p] == '*' {
			p++
			star, from = p, i
			continue
		}
		if p < len(pattern) {
			if n, ok := one(pattern[p:], s[i]); ok {
				p, i = p+n, i+1
				continue
			}
		}
		if star < 0 {
			return false
		}
		from++
		p, i = star, from
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

// MatchAll reports whether a pattern ends with a star and matches prefix, and so everything that begins with it.
// A pattern that matches all of that in another way, as *? does for most, is not seen.
func MatchAll(pattern, prefix []byte) bool {
	star := false
	for p := 0; p < len(pattern); {
		n := 1
		if star = pattern[p] == '*'; !star {
			n, _ = one(pattern[p:], 0)
		}
		p += n
	}
	return star && Match(pattern, prefix)
}

// one matches c with what p, which is not empty, begins with, and returns that
// element's length.
func one(p []byte, c byte) (n int, ok bool) {
	switch p[0] {
	case '?':
		return 1, true
	case '\\':
		if len(p) > 1 {
			return 2, p[1] == c
		}
	case '[':
		return class(p, c)
	}
	return 1, p[0] == c
}

func class(p []byte, c byte) (n int, ok bool) {
	n = 1
	not := len(p) > 1 && p[1] == '^'
	if not {
		n++
	}
	for n < len(p) {
		switch {
		case p[n] == '\\' && n+1 < len(p):
			ok = ok || p[n+1] == c
			n += 2
		case p[n] == ']':
			return n + 1, ok != not
		case n+2 < len(p) && p[n+1] == '-':
			lo, hi := min(p[n], p[n+2]), max(p[n], p[n+2])
			ok = ok || lo <= c && c <= hi
			n += 3
		default:
			ok = ok || p[n] == c
			n++
		}
	}
	return n, ok != not
}
