package luascript

import (
	"strings"

	lua "github.com/yuin/gopher-lua"
)

func (s *sandbox) stringLibrary() library {
	gmatch := s.stringGMatch
	return library{
		"byte": stringByte, "char": s.stringChar, "find": s.stringFind, "format": s.stringFormat, "gfind": gmatch,
		"gmatch": gmatch,
		"gsub":   s.stringGSub, "match": s.stringMatch, "rep": s.stringRep, "reverse": s.stringReverse,
		"sub":   s.stringSub,
		"len":   func(L *lua.LState) int { L.Push(lua.LNumber(len(argString(L, 1)))); return 1 },
		"lower": func(L *lua.LState) int { return s.mapBytes(L, 'A', 'Z') },
		"upper": func(L *lua.LState) int { return s.mapBytes(L, 'a', 'z') },
		"dump":  func(L *lua.LState) int { L.RaiseError("unable to dump given function"); return 0 },
	}
}

// relative is a position of Lua's as an offset from 1 on, counted from the end if it is negative.
func relative(at, length int) int {
	if at < 0 {
		at += length + 1
	}
	return max(at, 0)
}

// span is the part of a string between two positions, as string.sub takes it.
func span(length, i, j int) (from, to int) {
	i, j = max(relative(i, length), 1), min(relative(j, length), length)
	if i > j {
		return 0, 0
	}
	return i - 1, j
}

func (s *sandbox) stringSub(L *lua.LState) int {
	str := argString(L, 1)
	i, j := span(len(str), argInt(L, 2), optInt(L, 3, -1))
	L.Push(s.part(L, str, i, j))
	return 1
}

func stringByte(L *lua.LState) int {
	str := argString(L, 1)
	first := optInt(L, 2, 1)
	i, j := span(len(str), first, optInt(L, 3, relative(first, len(str))))
	if j-i > maxUnpacked {
		L.RaiseError("string slice too long")
	}
	for _, c := range []byte(str[i:j]) {
		L.Push(lua.LNumber(c))
	}
	return j - i
}

func (s *sandbox) stringChar(L *lua.LState) int {
	b := make([]byte, L.GetTop())
	for i := range b {
		c := argInt(L, i+1)
		if c != int(byte(c)) {
			L.ArgError(i+1, "invalid value")
		}
		b[i] = byte(c)
	}
	L.Push(lua.LString(b))
	return 1
}

func (s *sandbox) stringRep(L *lua.LState) int {
	str, n := argString(L, 1), argInt(L, 2)
	if n <= 0 || str == "" {
		L.Push(lua.LString(""))
		return 1
	}
	if n > 1<<40/len(str) {
		n = 1 << 40 / len(str) // more than there ever is
	}
	s.charge(L, n*len(str))
	L.Push(lua.LString(strings.Repeat(str, n)))
	return 1
}

func (s *sandbox) stringReverse(L *lua.LState) int {
	str := argString(L, 1)
	s.charge(L, len(str))
	b := make([]byte, len(str))
	for i := range len(str) {
		b[len(str)-1-i] = str[i]
	}
	s.work(L, len(b))
	L.Push(ownString(b))
	return 1
}

// mapBytes changes the case of the ASCII letters between two.
func (s *sandbox) mapBytes(L *lua.LState, from, to byte) int {
	str := argString(L, 1)
	s.charge(L, len(str))
	b := []byte(str)
	for i, c := range b {
		if c >= from && c <= to {
			b[i] = c ^ 0x20
		}
	}
	s.work(L, len(b))
	L.Push(ownString(b))
	return 1
}
