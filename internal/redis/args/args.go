// Package args reads the arguments of Redis's commands, and refuses wrong ones in Redis's words. It knows no command,
// no key and no connection.
package args

import "github.com/kvd-project/kvd/internal/redis/resp"

// Refusal is an error that a client is told: its first word is the class, as in "ERR syntax error". A command that is
// refused has had no effect.
type Refusal string

// Error is the text as a client gets it, without the dash before it.
func (r Refusal) Error() string { return string(r) }

// Clients look for these texts.
const (
	Syntax   Refusal = "ERR syntax error"
	NotInt   Refusal = "ERR value is not an integer or out of range"
	NotFloat Refusal = "ERR value is not a valid float"
)

// Parser reads arguments from left to right. The first mistake becomes the Refusal, and from there on it reads nothing:
// its methods return zero values, and More is false. So a command looks at End once, behind its options. Strings that
// it returns lie in the arguments. It is for one goroutine.
type Parser struct {
	left [][]byte
	bad  Refusal // empty: no mistake
}

// New makes a Parser of a list, which it does not change.
func New(list [][]byte) Parser { return Parser{left: list} }

// More reports whether arguments are left.
func (p *Parser) More() bool { return len(p.left) > 0 }

// Left is how many arguments are left.
func (p *Parser) Left() int { return len(p.left) }

// Refuse ends reading, if nothing has ended it before.
func (p *Parser) Refuse(why Refusal) {
	if p.bad == "" {
		p.bad = why
	}
	p.left = nil
}

// Fail is Refuse with an error that a function of a command's own has returned, which is a Refusal. nil is no mistake.
func (p *Parser) Fail(err error) {
	if err != nil {
		p.Refuse(Refusal(err.Error()))
	}
}

// Wrong is Refuse with Syntax.
func (p *Parser) Wrong() { p.Refuse(Syntax) }

// Str reads the next argument. A missing one is a mistake of syntax.
func (p *Parser) Str() []byte {
	if len(p.left) == 0 {
		p.Wrong()
		return nil
	}
	a := p.left[0]
	p.left = p.left[1:]
	return a
}

// Int reads a decimal number, as strictly as Redis does.
func (p *Parser) Int() int64 {
	n, ok := resp.ParseInt(p.Str())
	if !ok {
		p.Refuse(NotInt)
	}
	return n
}

// IntFrom reads a number of at least least, and refuses all else with why.
func (p *Parser) IntFrom(least int64, why Refusal) int64 {
	n, ok := resp.ParseInt(p.Str())
	if !ok || n < least {
		p.Refuse(why)
		return 0
	}
	return n
}

// Float reads a number that parse understands: Redis's commands differ in which ones they take.
func (p *Parser) Float(parse func([]byte) (float64, bool)) float64 {
	f, ok := parse(p.Str())
	if !ok {
		p.Refuse(NotFloat)
	}
	return f
}

// Flag reads the next argument if it is a word, which is in lower case here.
func (p *Parser) Flag(word string) bool { return p.Option(word, 0) }

// Option is Flag for a word that at least n arguments follow. Without them it is none of the option's.
func (p *Parser) Option(word string, n int) bool {
	if len(p.left) <= n || !Is(p.left[0], word) {
		return false
	}
	p.left = p.left[1:]
	return true
}

// Choice reads one of several words, and returns its place among them. Any other is a mistake of syntax.
func (p *Parser) Choice(words ...string) int {
	for i, w := range words {
		if p.Flag(w) {
			return i
		}
	}
	p.Wrong()
	return 0
}

// Rest reads all that is left.
func (p *Parser) Rest() [][]byte {
	all := p.left
	p.left = nil
	return all
}

// Err is the first mistake, if there was one.
func (p *Parser) Err() error {
	if p.bad != "" {
		return p.bad
	}
	return nil
}

// End is Err, and a mistake of syntax if arguments are left.
func (p *Parser) End() error {
	if len(p.left) > 0 {
		p.Wrong()
	}
	return p.Err()
}

// Is compares an argument with a word in lower case. ASCII letters match in either case, and nothing is allocated.
func Is(arg []byte, word string) bool {
	if len(arg) != len(word) {
		return false
	}
	for i, c := range arg {
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != word[i] {
			return false
		}
	}
	return true
}
