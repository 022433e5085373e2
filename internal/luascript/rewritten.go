package luascript

import (
	"math"

	lua "github.com/yuin/gopher-lua"
)

// concat is .., of any number of values.
func (s *sandbox) concat(L *lua.LState) int {
	n := L.GetTop()
	size, plain := 0, true
	for i := 1; i <= n; i++ {
		switch v := L.Get(i).(type) {
		case lua.LString:
			size += len(v)
		case lua.LNumber:
			size += 24
		default:
			plain = false
		}
	}
	if plain {
		s.charge(L, size)
		b := make([]byte, 0, size)
		for i := 1; i <= n; i++ {
			b = appendString(b, L.Get(i))
		}
		L.Push(ownString(b))
		return 1
	}
	right := L.Get(n)
	for i := n - 1; i >= 1; i-- {
		right = s.joinTwo(L, L.Get(i), right)
	}
	L.Push(right)
	return 1
}

// appendString appends a string or number.
func appendString(b []byte, v lua.LValue) []byte {
	switch v := v.(type) {
	case lua.LString:
		return append(b, v...)
	case lua.LNumber:
		return append(b, numberString(v)...)
	}
	return b
}

// joinTwo is .. with __concat.
func (s *sandbox) joinTwo(L *lua.LState, a, b lua.LValue) lua.LValue {
	if lua.LVCanConvToString(a) && lua.LVCanConvToString(b) {
		x, y := stringOf(a), stringOf(b)
		s.charge(L, len(x)+len(y))
		return lua.LString(x + y)
	}
	f := L.GetMetaField(a, "__concat")
	if f == lua.LNil {
		f = L.GetMetaField(b, "__concat")
	}
	if f == lua.LNil {
		if lua.LVCanConvToString(a) {
			a = b
		}
		L.RaiseError("attempt to concatenate a %s value", a.Type().String())
	}
	L.Push(f)
	L.Push(a)
	L.Push(b)
	s.callNested(L, 2, 1)
	v := L.Get(-1)
	L.Pop(1)
	return v
}

// callNested is L.Call for functions that a script could make call each other without end.
func (s *sandbox) callNested(L *lua.LState, args, results int) {
	if s.nested >= maxNested {
		L.RaiseError("C stack overflow")
	}
	s.nested++
	s.calledBack = true
	defer func() { s.nested-- }()
	L.Call(args, results)
}

// setIndex is t[k] = v.
func (s *sandbox) setIndex(L *lua.LState) int {
	t, is := L.Get(1).(*lua.LTable)
	if n, number := L.Get(2).(lua.LNumber); is && number {
		s.chargeIndex(L, t, n)
	}
	L.SetTable(L.Get(1), L.Get(2), L.Get(3))
	return 0
}

// chargeIndex takes the memory that a table needs to have an index far behind its others.
func (s *sandbox) chargeIndex(L *lua.LState, t *lua.LTable, n lua.LNumber) {
	if n > 1024 && n < lua.LNumber(lua.MaxArrayIndex) && n == lua.LNumber(math.Floor(float64(n))) {
		if more := int(n) - arrayLen(t); more > 1024 {
			s.charge(L, 32*more)
		}
	}
}

// checkKey is for keys of tables that are not known yet.
func (s *sandbox) checkKey(L *lua.LState) int {
	if n, is := L.Get(1).(lua.LNumber); is && n > 1024 && n < lua.LNumber(lua.MaxArrayIndex) {
		s.charge(L, 32*int(n))
	}
	L.SetTop(1)
	return 1
}

// countTable is called with each new table.
func (s *sandbox) countTable(L *lua.LState) int {
	s.charge(L, tableCost)
	L.SetTop(1)
	return 1
}

// length is #, which Lua 5.1 does not ask __len of tables for.
func (s *sandbox) length(L *lua.LState) int {
	switch v := L.Get(1).(type) {
	case lua.LString:
		L.Push(lua.LNumber(len(v)))
	case *lua.LTable:
		L.Push(lua.LNumber(v.Len()))
	default:
		L.RaiseError("attempt to get length of a %s value", v.Type().String())
	}
	return 1
}

// modulo is %.
func (s *sandbox) modulo(L *lua.LState) int {
	a, b := L.Get(1), L.Get(2)
	x, ok := toNumber(a)
	y, ok2 := toNumber(b)
	if ok && ok2 {
		L.Push(lua.LNumber(modulo(float64(x), float64(y))))
		return 1
	}
	f := L.GetMetaField(a, "__mod")
	if _, text := a.(lua.LString); f == lua.LNil || text {
		f = lua.LNil
		if _, text := b.(lua.LString); !text {
			f = L.GetMetaField(b, "__mod")
		}
	}
	if f == lua.LNil {
		if ok {
			a = b
		}
		L.RaiseError("attempt to perform arithmetic on a %s value", a.Type().String())
	}
	L.Push(f)
	L.Push(a)
	L.Push(b)
	s.callNested(L, 2, 1)
	return 1
}

// boundNumber makes a number of a string that means one, and leaves other values to the interpreter, which refuses
// them.
func boundNumber(L *lua.LState) int {
	if n, ok := toNumber(L.Get(1)); ok {
		L.Push(n)
		return 1
	}
	L.SetTop(1)
	return L.GetTop()
}
