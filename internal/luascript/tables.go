package luascript

import (
	"math"

	lua "github.com/yuin/gopher-lua"
)

// tableLibrary replaces the functions of table that make much of little, or see what is no index.
func (s *sandbox) tableLibrary(original *lua.LTable) library {
	return library{
		"concat": s.tableConcat, "insert": s.tableInsert, "remove": s.tableRemove, "sort": s.tableSort,
		"getn": func(L *lua.LState) int { L.Push(lua.LNumber(L.CheckTable(1).Len())); return 1 },
		"setn": func(L *lua.LState) int { L.RaiseError("'setn' is obsolete"); return 0 },
		"maxn": tableMaxN,
		"foreach": func(L *lua.LState) int {
			t, f := s.contents(L.CheckTable(1)), L.CheckFunction(2)
			for k, v := t.Next(lua.LNil); k != lua.LNil; k, v = t.Next(k) {
				if s.visit(L, f, k, v) {
					return 1
				}
			}
			return 0
		},
		"foreachi": func(L *lua.LState) int {
			t, f := L.CheckTable(1), L.CheckFunction(2)
			for i := 1; i <= t.Len(); i++ {
				if s.visit(L, f, lua.LNumber(i), t.RawGetInt(i)) {
					return 1
				}
			}
			return 0
		},
	}
}

// visit calls a function of foreach, and reports whether it returned a value, which is on the stack then.
func (s *sandbox) visit(L *lua.LState, f *lua.LFunction, k, v lua.LValue) bool {
	s.step(L)
	L.Push(f)
	L.Push(k)
	L.Push(v)
	s.callNested(L, 2, 1)
	if L.Get(-1) != lua.LNil {
		return true
	}
	L.Pop(1)
	return false
}

func tableMaxN(L *lua.LState) int {
	most := lua.LNumber(0)
	L.CheckTable(1).ForEach(func(k, _ lua.LValue) {
		if n, is := k.(lua.LNumber); is {
			most = max(most, n)
		}
	})
	L.Push(most)
	return 1
}

func (s *sandbox) tableConcat(L *lua.LState) int {
	t := L.CheckTable(1)
	sep := ""
	if L.Get(2) != lua.LNil {
		sep = argString(L, 2)
	}
	first, last := optInt(L, 3, 1), optInt(L, 4, t.Len())
	size := 0
	defer s.resetPending(s.pending)
	for i := first; i <= last; i++ {
		s.step(L)
		v := rawIndex(t, i)
		switch v := v.(type) {
		case lua.LString:
			size += len(v)
		case lua.LNumber:
			size += 24
		default:
			L.RaiseError("invalid value (%s) at index %d in table for 'concat'", v.Type().String(), i)
		}
		if size += len(sep); int64(size) > s.task.Memory {
			break
		}
		if i == math.MaxInt {
			break
		}
	}
	x := &builder{s: s, L: L}
	x.room(size)
	for i := first; i <= last; i++ {
		s.step(L)
		v := rawIndex(t, i)
		if text, is := v.(lua.LString); is {
			s.work(L, len(text))
		}
		x.value(v)
		if i < last {
			x.text(sep)
		} else {
			break
		}
	}
	return x.push()
}

func (s *sandbox) tableInsert(L *lua.LState) int {
	t := L.CheckTable(1)
	if s.contents(t) != t {
		s.raise(L, errReadOnly)
	}
	switch L.GetTop() {
	case 2:
		t.Append(L.Get(2))
	case 3:
		end := t.Len() + 1
		at := argInt(L, 2)
		if at < 1 || at >= end {
			s.chargeIndex(L, t, lua.LNumber(at))
			L.RawSet(t, lua.LNumber(at), L.Get(3))
			return 0
		}
		t.Insert(at, L.Get(3))
	default:
		L.RaiseError("wrong number of arguments to 'insert'")
	}
	s.step(L)
	return 0
}

func (s *sandbox) tableRemove(L *lua.LState) int {
	t := L.CheckTable(1)
	n := t.Len()
	at := optInt(L, 2, n)
	if n == 0 || at < 1 || at > n {
		return 0
	}
	s.step(L)
	L.Push(t.Remove(at))
	return 1
}

// ---- math.random --------------------------------------------------------------

// seedLow is the low end of drand48's state behind a seed.
const seedLow = 0x330E

// mathLibrary has Redis's random numbers, which are those of drand48 and begin anywhere, and what gopher-lua has otherwise than Lua.
func (s *sandbox) mathLibrary() library {
	next := func() int64 {
		s.seed = (s.seed*0x5DEECE66D + 0xB) & (1<<48 - 1)
		return int64(s.seed >> 17)
	}
	extreme := func(better func(a, b float64) bool) lua.LGFunction {
		return func(L *lua.LState) int {
			best := argNumber(L, 1)
			for i := 2; i <= L.GetTop(); i++ {
				if f := argNumber(L, i); better(f, best) {
					best = f
				}
			}
			L.Push(lua.LNumber(best))
			return 1
		}
	}
	return library{
		"max": extreme(func(a, b float64) bool { return a > b }),
		"min": extreme(func(a, b float64) bool { return a < b }),
		"random": func(L *lua.LState) int {
			r := float64(next()%math.MaxInt32) / math.MaxInt32
			low, high := 1.0, 0.0
			switch L.GetTop() {
			case 0:
				L.Push(lua.LNumber(r))
				return 1
			case 1:
				if high = float64(argInt(L, 1)); high < 1 {
					L.ArgError(1, "interval is empty")
				}
			case 2:
				if low, high = float64(argInt(L, 1)), float64(argInt(L, 2)); low > high {
					L.ArgError(2, "interval is empty")
				}
			default:
				L.RaiseError("wrong number of arguments")
			}
			L.Push(lua.LNumber(math.Floor(r*(high-low+1)) + low))
			return 1
		},
		"randomseed": func(L *lua.LState) int {
			s.seed = uint64(uint32(argInt(L, 1)))<<16 | seedLow
			return 0
		},
	}
}
