package luascript

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// prepareSource makes a source one that the interpreter reads as Lua 5.1 does: there goto is a name, and a number is
// more than it takes. renamed is what stands for goto, a name that the source does not have, or empty. Lines stay; a
// number that makes no sense is an error.
func prepareSource(source, name string) (prepared, renamed string, err error) {
	p := preparer{source: source, name: name}
	for p.at < len(source) {
		if err := p.token(); err != nil {
			return "", "", err
		}
	}
	if p.copied == 0 {
		return source, "", nil
	}
	p.out.WriteString(source[p.copied:])
	return p.out.String(), p.renamed, nil
}

// preparer passes over the tokens of a source.
type preparer struct {
	source, name string
	at           int
	out          strings.Builder
	copied       int // bytes of source that are in out, or replaced there
	renamed      string
}

// replace puts a text in place of what stands between start and at.
func (p *preparer) replace(start int, text string) {
	p.out.WriteString(p.source[p.copied:start])
	p.out.WriteString(text)
	p.copied = p.at
}

func isNamePart(c byte) bool { return c == '_' || isDigit(c) || c|0x20 >= 'a' && c|0x20 <= 'z' }

// token passes over the next token, or a byte that is none of those that matter.
func (p *preparer) token() error {
	c, next := p.source[p.at], byte(0)
	if p.at+1 < len(p.source) {
		next = p.source[p.at+1]
	}
	start := p.at
	switch {
	case isDigit(c), c == '.' && isDigit(next):
		return p.number()
	case isNamePart(c):
		for p.at < len(p.source) && isNamePart(p.source[p.at]) {
			p.at++
		}
		if p.source[start:p.at] == "goto" {
			if p.renamed == "" {
				p.renamed = "goto_"
				for strings.Contains(p.source, p.renamed) {
					p.renamed += "_"
				}
			}
			p.replace(start, p.renamed)
		}
	case c == '"', c == '\'':
		p.text(c)
	case c == '-' && next == '-':
		p.at += 2
		if !p.long() {
			for p.at < len(p.source) && p.source[p.at] != '\n' && p.source[p.at] != '\r' {
				p.at++
			}
		}
	case c == ':' && next == ':': // no label: there are none
		p.at += 2
		p.replace(start, ": :")
	case c == '[' && p.long():
	case c == '.' && next == '.': // the third of ... is no number's
		for p.at < len(p.source) && p.source[p.at] == '.' {
			p.at++
		}
	case c == '\v' || c == '\f': // white space
		p.at++
		p.replace(start, " ")
	default:
		p.at++
	}
	return nil
}

// line is the one that at is on.
func (p *preparer) line() int {
	before := p.source[:p.at]
	return 1 + strings.Count(before, "\n") + strings.Count(before, "\r") - strings.Count(before, "\r\n") -
		strings.Count(before, "\n\r")
}

// text passes over a string in quotes, to the end of its line if it is not closed.
func (p *preparer) text(quote byte) {
	for p.at++; p.at < len(p.source); p.at++ {
		switch p.source[p.at] {
		case quote:
			p.at++
			return
		case '\\':
			p.at++
		case '\n', '\r':
			return
		}
	}
	p.at = len(p.source)
}

// long passes over a string in long brackets, and reports whether there is one.
func (p *preparer) long() bool {
	rest := p.source[p.at:]
	if len(rest) < 2 || rest[0] != '[' {
		return false
	}
	level := 1
	for level < len(rest) && rest[level] == '=' {
		level++
	}
	if level == len(rest) || rest[level] != '[' {
		return false
	}
	end := strings.Index(rest[level+1:], "]"+rest[1:level]+"]")
	if end < 0 {
		p.at = len(p.source)
	} else {
		p.at += level + 1 + end + level + 1
	}
	return true
}

// number passes over a number as Lua finds its end: with all letters and digits behind it.
func (p *preparer) number() error {
	start := p.at
	for p.at < len(p.source) && (isDigit(p.source[p.at]) || p.source[p.at] == '.') {
		p.at++
	}
	plain := true
	// To Lua a zero byte is as good as an exponent's letter, and as its sign.
	if p.at < len(p.source) && (p.source[p.at]|0x20 == 'e' || p.source[p.at] == 0) {
		plain = p.source[p.at] != 0
		if p.at++; p.at < len(p.source) && (p.source[p.at] == '-' || p.source[p.at] == '+' || p.source[p.at] == 0) {
			plain = plain && p.source[p.at] != 0
			p.at++
		}
	}
	for p.at < len(p.source) && isNamePart(p.source[p.at]) {
		plain = plain && isDigit(p.source[p.at])
		p.at++
	}
	text := p.source[start:p.at]
	f, ok := parseNumber(text)
	switch {
	case !ok:
		return fmt.Errorf("%s:%d: malformed number near '%s'", p.name, p.line(), text)
	case !plain && math.IsInf(float64(f), 0):
		p.replace(start, "1e999 ")
	case !plain: // hexadecimal
		p.replace(start, strconv.FormatFloat(float64(f), 'g', -1, 64)+" ") // a point behind it is none of its own
	}
	return nil
}

// mayHaveMetatables reports whether a script may meet tables with metatables that scripts have made. A script that
// makes none, and no script that does, is not made slower by what they might say of #.
func mayHaveMetatables(source string) bool {
	return strings.Contains(source, "setmetatable") || strings.Contains(source, "load")
}
