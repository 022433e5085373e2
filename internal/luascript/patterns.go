package luascript

import (
	"strings"

	lua "github.com/yuin/gopher-lua"
)

// maxCaptures is Lua's; maxMatchDepth bounds how often the matcher calls itself.
const maxCaptures, maxMatchDepth = 32, 200

// A capture's length may be one of these instead.
const captureOpen, capturePosition = -1, -2

// matcher matches a pattern of Lua. It asks now and then whether the script has been stopped, since a pattern may
// take as long as it likes: that is why the interpreter's own does not do.
type matcher struct {
	s        *sandbox
	L        *lua.LState
	src, pat string
	depth    int
	level    int
	captures [maxCaptures]struct{ start, length int }
}

// match matches the pattern from p on at the source's offset i, and returns where the match ends, -1: nowhere.
func (m *matcher) match(i, p int) int {
	if m.depth++; m.depth > maxMatchDepth {
		m.L.RaiseError("pattern too complex")
	}
	defer func() { m.depth-- }()
	for {
		m.s.step(m.L)
		if p >= len(m.pat) {
			return i
		}
		switch m.pat[p] {
		case '(':
			if p+1 < len(m.pat) && m.pat[p+1] == ')' {
				return m.startCapture(i, p+2, capturePosition)
			}
			return m.startCapture(i, p+1, captureOpen)
		case ')':
			return m.endCapture(i, p+1)
		case '$':
			if p+1 == len(m.pat) {
				if i == len(m.src) {
					return i
				}
				return -1
			}
		case '%':
			if p+1 >= len(m.pat) {
				break
			}
			switch c := m.pat[p+1]; {
			case c == 'b':
				if i = m.matchBalance(i, p+2); i < 0 {
					return -1
				}
				p += 4
				continue
			case c == 'f':
				p += 2
				if p >= len(m.pat) || m.pat[p] != '[' {
					m.L.RaiseError("missing '[' after '%%%s' in pattern", "f")
				}
				end := m.classEnd(p)
				var before, here byte
				if i > 0 {
					before = m.src[i-1]
				}
				if i < len(m.src) {
					here = m.src[i]
				}
				if m.inSet(before, p, end-1) || !m.inSet(here, p, end-1) {
					return -1
				}
				p = end
				continue
			case isDigit(c):
				if i = m.matchCapture(i, c); i < 0 {
					return -1
				}
				p += 2
				continue
			}
		}
		end := m.classEnd(p)
		fits := i < len(m.src) && m.single(m.src[i], p, end)
		var suffix byte
		if end < len(m.pat) {
			suffix = m.pat[end]
		}
		switch suffix {
		case '?':
			if fits {
				if to := m.match(i+1, end+1); to >= 0 {
					return to
				}
			}
			p = end + 1
		case '*':
			return m.maxExpand(i, p, end)
		case '+':
			if !fits {
				return -1
			}
			return m.maxExpand(i+1, p, end)
		case '-':
			return m.minExpand(i, p, end)
		default:
			if !fits {
				return -1
			}
			i++
			p = end
		}
	}
}

// classEnd is where the item of the pattern at p ends.
func (m *matcher) classEnd(p int) int {
	c := m.pat[p]
	p++
	switch c {
	case '%':
		if p >= len(m.pat) {
			m.L.RaiseError("malformed pattern (ends with '%%%s')", "")
		}
		return p + 1
	case '[':
		if p < len(m.pat) && m.pat[p] == '^' {
			p++
		}
		for first := true; first || p >= len(m.pat) || m.pat[p] != ']'; first = false {
			if p >= len(m.pat) {
				m.L.RaiseError("malformed pattern (missing ']')")
			}
			m.s.step(m.L)
			c := m.pat[p]
			p++
			if c == '%' && p < len(m.pat) {
				p++
			}
		}
		return p + 1
	}
	return p
}

// single reports whether a byte is of the item between p and end.
func (m *matcher) single(c byte, p, end int) bool {
	switch m.pat[p] {
	case '.':
		return true
	case '%':
		return inClass(c, m.pat[p+1])
	case '[':
		return m.inSet(c, p, end-1)
	}
	return m.pat[p] == c
}

// inSet reports whether a byte is in the set that begins with [ at p and ends with ] at end.
func (m *matcher) inSet(c byte, p, end int) bool {
	found := true
	if m.pat[p+1] == '^' {
		found = false
		p++
	}
	for p++; p < end; p++ {
		m.s.step(m.L)
		switch {
		case m.pat[p] == '%':
			p++
			if inClass(c, m.pat[p]) {
				return found
			}
		case p+2 < end && m.pat[p+1] == '-':
			if m.pat[p] <= c && c <= m.pat[p+2] {
				return found
			}
			p += 2
		case m.pat[p] == c:
			return found
		}
	}
	return !found
}

// inClass reports whether a byte is of the class of a letter; other characters stand for themselves.
func inClass(c, class byte) (in bool) {
	lower, upper, digit := c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', isDigit(c)
	control := c < ' ' || c == 127
	switch class | 0x20 {
	case 'a':
		in = lower || upper
	case 'd':
		in = digit
	case 'l':
		in = lower
	case 's':
		in = c == ' ' || c >= '\t' && c <= '\r'
	case 'u':
		in = upper
	case 'w':
		in = lower || upper || digit
	case 'x':
		in = digit || c|0x20 >= 'a' && c|0x20 <= 'f'
	case 'p':
		in = c > ' ' && c < 127 && !lower && !upper && !digit
	case 'c':
		in = control
	case 'z':
		in = c == 0
	default:
		return class == c
	}
	if class >= 'A' && class <= 'Z' {
		return !in
	}
	if class < 'a' || class > 'z' {
		return class == c
	}
	return in
}

func (m *matcher) maxExpand(i, p, end int) int {
	n := 0
	for i+n < len(m.src) && m.single(m.src[i+n], p, end) {
		n++
		m.s.step(m.L)
	}
	for ; n >= 0; n-- {
		if to := m.match(i+n, end+1); to >= 0 {
			return to
		}
	}
	return -1
}

func (m *matcher) minExpand(i, p, end int) int {
	for {
		if to := m.match(i, end+1); to >= 0 {
			return to
		}
		if i >= len(m.src) || !m.single(m.src[i], p, end) {
			return -1
		}
		i++
	}
}

func (m *matcher) startCapture(i, p, what int) int {
	if m.level >= maxCaptures {
		m.L.RaiseError("too many captures")
	}
	m.captures[m.level].start, m.captures[m.level].length = i, what
	m.level++
	to := m.match(i, p)
	if to < 0 {
		m.level--
	}
	return to
}

func (m *matcher) endCapture(i, p int) int {
	l := -1
	for k := m.level - 1; k >= 0 && l < 0; k-- {
		if m.captures[k].length == captureOpen {
			l = k
		}
	}
	if l < 0 {
		m.L.RaiseError("invalid pattern capture")
	}
	m.captures[l].length = i - m.captures[l].start
	to := m.match(i, p)
	if to < 0 {
		m.captures[l].length = captureOpen
	}
	return to
}

func (m *matcher) matchBalance(i, p int) int {
	if p+1 >= len(m.pat) {
		m.L.RaiseError("unbalanced pattern")
	}
	if i >= len(m.src) || m.src[i] != m.pat[p] {
		return -1
	}
	open, end := m.pat[p], m.pat[p+1]
	depth := 1
	for i++; i < len(m.src); i++ {
		m.s.step(m.L)
		switch m.src[i] {
		case end:
			if depth--; depth == 0 {
				return i + 1
			}
		case open:
			depth++
		}
	}
	return -1
}

func (m *matcher) matchCapture(i int, digit byte) int {
	l := int(digit) - '1'
	if l < 0 || l >= m.level || m.captures[l].length == captureOpen {
		m.L.RaiseError("invalid capture index")
	}
	c := m.captures[l]
	m.s.work(m.L, max(c.length, 0))
	if c.length >= 0 && strings.HasPrefix(m.src[i:], m.src[c.start:c.start+c.length]) {
		return i + c.length
	}
	return -1
}

// capture is the value of a capture, or the whole match if there are none.
func (m *matcher) capture(l, from, to int) lua.LValue {
	if l >= m.level {
		if l != 0 {
			m.L.RaiseError("invalid capture index")
		}
		return m.s.part(m.L, m.src, from, to)
	}
	c := m.captures[l]
	switch c.length {
	case captureOpen:
		m.L.RaiseError("unfinished capture")
	case capturePosition:
		return lua.LNumber(c.start + 1)
	}
	return m.s.part(m.L, m.src, c.start, c.start+c.length)
}

// pushCaptures pushes all of them; the whole match if there are none and it is wanted.
func (m *matcher) pushCaptures(from, to int, whole bool) int {
	n := m.level
	if n == 0 && whole {
		n = 1
	}
	for l := range n {
		m.L.Push(m.capture(l, from, to))
	}
	return n
}

func (s *sandbox) stringFind(L *lua.LState) int  { return s.findPattern(L, true) }
func (s *sandbox) stringMatch(L *lua.LState) int { return s.findPattern(L, false) }

func (s *sandbox) findPattern(L *lua.LState, find bool) int {
	src, pat := argString(L, 1), argString(L, 2)
	at := optInt(L, 3, 1)
	if at < 0 {
		at = max(at+len(src)+1, 1)
	}
	at = min(max(at, 1)-1, len(src))
	if find && (lua.LVAsBool(L.Get(4)) || !strings.ContainsAny(pat, "^$*+?.([%-")) {
		s.work(L, len(src)-at)
		i := strings.Index(src[at:], pat)
		if i < 0 {
			L.Push(lua.LNil)
			return 1
		}
		L.Push(lua.LNumber(at + i + 1))
		L.Push(lua.LNumber(at + i + len(pat)))
		return 2
	}
	m := &matcher{s: s, L: L, src: src}
	pat, anchored := strings.CutPrefix(pat, "^")
	m.pat = pat
	for ; at <= len(src); at++ {
		m.level = 0
		if to := m.match(at, 0); to >= 0 {
			if !find {
				return m.pushCaptures(at, to, true)
			}
			L.Push(lua.LNumber(at + 1))
			L.Push(lua.LNumber(to))
			return 2 + m.pushCaptures(at, to, false)
		}
		if anchored {
			break
		}
	}
	L.Push(lua.LNil)
	return 1
}

func (s *sandbox) stringGMatch(L *lua.LState) int {
	src, pat := argString(L, 1), argString(L, 2)
	at := 0
	// They are values of the function's, too, so that they are counted as long as there is the function.
	L.Push(L.NewClosure(func(L *lua.LState) int {
		m := &matcher{s: s, L: L, src: src, pat: pat}
		for ; at <= len(src); at++ {
			m.level = 0
			to := m.match(at, 0)
			if to < 0 {
				continue
			}
			from := at
			if at = to; to == from {
				at++
			}
			return m.pushCaptures(from, to, true)
		}
		L.Push(lua.LNil)
		return 1
	}, lua.LString(src), lua.LString(pat)))
	return 1
}

func (s *sandbox) stringGSub(L *lua.LState) int {
	src, pat := argString(L, 1), argString(L, 2)
	with := L.Get(3)
	switch with.(type) {
	case lua.LString, lua.LNumber, *lua.LTable, *lua.LFunction:
	default:
		L.ArgError(3, "string/function/table expected")
	}
	most := optInt(L, 4, len(src)+1)
	pat, anchored := strings.CutPrefix(pat, "^")
	m := &matcher{s: s, L: L, src: src, pat: pat}
	x := &builder{s: s, L: L}
	n, at := 0, 0
	defer s.resetPending(s.pending)
	for n < most {
		m.level = 0
		to := m.match(at, 0)
		if to >= 0 {
			n++
			s.appendReplacement(m, x, with, at, to)
		}
		switch {
		case to > at:
			at = to
		case at < len(src):
			x.byte(src[at])
			at++
		default:
			at = len(src) + 1
		}
		if at > len(src) || anchored {
			break
		}
	}
	if at < len(src) {
		x.text(src[at:])
	}
	x.push()
	L.Push(lua.LNumber(n))
	return 2
}

// appendReplacement appends what takes the place of a match.
func (s *sandbox) appendReplacement(m *matcher, x *builder, with lua.LValue, from, to int) {
	var v lua.LValue
	switch with := with.(type) {
	case *lua.LTable:
		v = m.L.GetTable(with, m.capture(0, from, to))
	case *lua.LFunction:
		m.L.Push(with)
		s.callNested(m.L, m.pushCaptures(from, to, true), 1)
		v = m.L.Get(-1)
		m.L.Pop(1)
	default:
		text := stringOf(with)
		for i := 0; i < len(text); i++ {
			s.step(m.L)
			if text[i] != '%' {
				x.byte(text[i])
				continue
			}
			i++
			switch {
			case i < len(text) && text[i] == '0':
				x.text(m.src[from:to])
			case i < len(text) && isDigit(text[i]):
				x.value(m.capture(int(text[i]-'1'), from, to))
			case i < len(text):
				x.byte(text[i])
			}
		}
		return
	}
	switch v := v.(type) {
	case lua.LString, lua.LNumber:
		x.value(v)
		return
	case *lua.LNilType:
	case lua.LBool:
		if v {
			m.L.RaiseError("invalid replacement value (a boolean)")
		}
	default:
		m.L.RaiseError("invalid replacement value (a %s)", v.Type().String())
	}
	x.text(m.src[from:to])
}
