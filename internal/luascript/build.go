package luascript

import (
	"strings"
	"unsafe"

	lua "github.com/yuin/gopher-lua"
)

// builder makes a string of parts. It takes memory for each part before it has it, so that a script that may not have a
// string ends before there is one. A function that makes a builder defers resetPending.
type builder struct {
	s *sandbox
	L *lua.LState
	b []byte
}

// room makes room for n more bytes.
func (x *builder) room(n int) {
	need := len(x.b) + n
	was := cap(x.b)
	if need <= was {
		return
	}
	size := max(need, was+was/2, 32)
	x.s.grow(x.L, size)
	b := make([]byte, len(x.b), size)
	copy(b, x.b)
	x.b = b
	x.s.pending -= int64(was) // which is garbage from here on
}

func (x *builder) byte(c byte) {
	x.room(1)
	x.b = append(x.b, c)
}

func (x *builder) bytes(b []byte) {
	x.room(len(b))
	x.b = append(x.b, b...)
}

func (x *builder) text(t string) {
	x.room(len(t))
	x.b = append(x.b, t...)
}

// value adds a string or number.
func (x *builder) value(v lua.LValue) {
	switch v := v.(type) {
	case lua.LString:
		x.text(string(v))
	case lua.LNumber:
		x.text(numberString(v))
	}
}

// fill adds n times a byte.
func (x *builder) fill(c byte, n int) {
	x.room(max(n, 0))
	for ; n > 0; n-- {
		x.b = append(x.b, c)
	}
}

// push pushes what was made, and ends the builder.
func (x *builder) push() int {
	x.L.Push(ownString(x.b))
	x.b = nil
	return 1
}

// ownString is a string of bytes that nobody changes any more, without a copy of them unless most of their room is not
// used.
func ownString(b []byte) lua.LString {
	if cap(b) > 2*len(b) {
		return lua.LString(b)
	}
	return lua.LString(unsafe.String(unsafe.SliceData(b), len(b)))
}

// sharedBytes is how long a string may be of which parts are not copies.
const sharedBytes = 32

// part is a part of a string, copied: one of its bytes would keep all of a long string, and nobody would count that.
func (s *sandbox) part(L *lua.LState, src string, from, to int) lua.LString {
	p := src[from:to]
	if len(p) == len(src) || len(src) <= sharedBytes {
		return lua.LString(p)
	}
	s.charge(L, len(p))
	return lua.LString(strings.Clone(p))
}

// work is step for n bytes that are looked at, or moved, at once.
func (s *sandbox) work(L *lua.LState, n int) {
	s.worked += n
	if s.worked >= workBytes {
		s.worked = 0
		s.goOn(L)
	}
}

// workBytes are moved within a millisecond.
const workBytes = 1 << 20
