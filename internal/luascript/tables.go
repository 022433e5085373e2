package luascript

import (
	"math"

	lua "github.com/yuin/gopher-lua"
)

// tableLibrary replaces the functions of table that make much of little, or see what is no index.
func (s *sandbox) tableLibrary(original *lua.LTable) library {
	return library{
		"concat": s.tableConcat, "insert": s.tableInsert, "remove": s.tableRemove, "sort": s.tableSort,
		"getn": func(L *lua.LState) int { L.Push(lua.LNumber(tableArg(L, 1).Len())); return 1 },
		"setn": func(L *lua.LState) int { L.RaiseError("'setn' is obsolete"); return 0 },
		"maxn": tableMaxN,
		"foreach": func(L *lua.LState) int {
			t, f := s.contents(tableArg(L, 1)), functionArg(L, 2)
			for k, v := t.Next(lua.LNil); k != lua.LNil; k, v = t.Next(k) {
				if s.visit(L, f, k, v) {
					return 1
				}
			}
			return 0
		},
		"foreachi": func(L *lua.LState) int {
			t, f := tableArg(L, 1), functionArg(L, 2)
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
	tableArg(L, 1).ForEach(func(k, _ lua.LValue) {
		if n, is := k.(lua.LNumber); is {
			most = max(most, n)
		}
	})
	L.Push(most)
	return 1
}

func (s *sandbox) tableConcat(L *lua.LState) int {
	t := tableArg(L, 1)
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
	t := tableArg(L, 1)
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
	t := tableArg(L, 1)
	n := t.Len()
	at := optInt(L, 2, n)
	if n == 0 || at < 1 || at > n {
		return 0
	}
	s.step(L)
	L.Push(t.Remove(at))
	return 1
}

// tableSort sorts as Lua's own does, comparison by comparison, so that a function that is no order gives what it gives
// there.
func (s *sandbox) tableSort(L *lua.LState) int {
	t := tableArg(L, 1)
	if L.Get(2) != lua.LNil {
		functionArg(L, 2)
	}
	o := &sorter{s: s, L: L, t: t, before: L.Get(2)}
	o.sort(1, t.Len())
	return 0
}

type sorter struct {
	s      *sandbox
	L      *lua.LState
	t      *lua.LTable
	before lua.LValue // nil: <
}

func (o *sorter) at(i int) lua.LValue { return rawIndex(o.t, i) }

func (o *sorter) swap(i, j int) {
	a, b := o.at(i), o.at(j)
	o.t.RawSetInt(i, b)
	o.t.RawSetInt(j, a)
}

// less reports whether a is before b.
func (o *sorter) less(a, b lua.LValue) bool {
	o.s.step(o.L)
	if o.before != lua.LNil {
		o.L.Push(o.before)
		o.L.Push(a)
		o.L.Push(b)
		o.s.callNested(o.L, 2, 1)
		is := lua.LVAsBool(o.L.Get(-1))
		o.L.Pop(1)
		return is
	}
	if a, is := a.(lua.LString); is {
		if b, is := b.(lua.LString); is {
			o.s.work(o.L, min(len(a), len(b)))
			return a < b
		}
	}
	switch {
	case a.Type() != b.Type():
		o.s.raise(o.L, "attempt to compare "+a.Type().String()+" with "+b.Type().String())
	case a.Type() != lua.LTNumber && a.Type() != lua.LTString:
		if f := o.L.GetMetaField(a, "__lt"); f == lua.LNil || f != o.L.GetMetaField(b, "__lt") {
			o.s.raise(o.L, "attempt to compare two "+a.Type().String()+" values")
		}
	}
	return o.L.LessThan(a, b)
}

// sort is auxsort of Lua 5.1: quicksort between two places.
func (o *sorter) sort(l, u int) {
	for l < u {
		if o.less(o.at(u), o.at(l)) {
			o.swap(l, u)
		}
		if u-l == 1 {
			return
		}
		i := (l + u) / 2
		if o.less(o.at(i), o.at(l)) {
			o.swap(i, l)
		} else if o.less(o.at(u), o.at(i)) {
			o.swap(i, u)
		}
		if u-l == 2 {
			return
		}
		pivot := o.at(i)
		o.swap(i, u-1)
		i = l
		j := u - 1
		for {
			for i++; o.less(o.at(i), pivot); i++ {
				if i > u {
					o.L.RaiseError("invalid order function for sorting")
				}
			}
			for j--; o.less(pivot, o.at(j)); j-- {
				if j < l {
					o.L.RaiseError("invalid order function for sorting")
				}
			}
			if j < i {
				break
			}
			o.swap(i, j)
		}
		o.swap(u-1, i)
		if i-l < u-i {
			j, i, l = l, i-1, i+1
		} else {
			j, i, u = i+1, u, i-1
		}
		o.sort(j, i)
	}
}

// seedLow is the low end of drand48's state behind a seed.
const seedLow = 0x330E

// modulo is %, as C computes it for Lua: what it gives for infinite and for large numbers is not the remainder.
func modulo(a, b float64) float64 { return a - math.Floor(a/b)*b }

// invalid is what C's functions return where they have no value. The processor makes such a NaN, which is printed as
// -nan.
func invalid() float64 { return math.Copysign(math.NaN(), -1) }

// orInvalid is a function that returns invalid for what it has no value for, where C's others return a NaN without a
// sign.
func orInvalid(f func(float64) float64) func(float64) float64 {
	return func(a float64) float64 {
		r := f(a)
		if math.IsNaN(r) {
			r = invalid()
		}
		return r
	}
}

// power is C's pow.
func power(a, b float64) float64 {
	r := math.Pow(a, b)
	if math.IsNaN(r) && !math.IsNaN(a) && !math.IsNaN(b) {
		r = invalid()
	}
	return r
}

// remainder is C's fmod.
func remainder(a, b float64) float64 {
	switch {
	case math.IsNaN(a), math.IsNaN(b):
		return a + b
	case b == 0, math.IsInf(a, 0):
		return invalid()
	}
	return math.Mod(a, b)
}

// mathLibrary has Redis's random numbers, which are those of drand48 and begin anywhere, and Lua's functions of
// numbers.
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
	one := func(f func(float64) float64) lua.LGFunction {
		return func(L *lua.LState) int {
			a := argNumber(L, 1)
			r := f(a)
			if math.IsNaN(a) {
				r = a
			}
			L.Push(lua.LNumber(r))
			return 1
		}
	}
	two := func(f func(a, b float64) float64) lua.LGFunction {
		return func(L *lua.LState) int {
			L.Push(lua.LNumber(f(argNumber(L, 1), argNumber(L, 2))))
			return 1
		}
	}
	return library{
		"abs": one(math.Abs), "acos": one(math.Acos), "asin": one(math.Asin), "atan": one(math.Atan),
		"ceil": one(math.Ceil), "cos": one(orInvalid(math.Cos)),
		"cosh": one(math.Cosh), "exp": one(math.Exp), "floor": one(math.Floor), "log": one(orInvalid(math.Log)),
		"log10": one(math.Log10), "sin": one(orInvalid(math.Sin)),
		"sinh": one(math.Sinh), "sqrt": one(orInvalid(math.Sqrt)), "tan": one(orInvalid(math.Tan)),
		"tanh":  one(math.Tanh),
		"deg":   one(func(f float64) float64 { return f / (math.Pi / 180) }),
		"rad":   one(func(f float64) float64 { return f * (math.Pi / 180) }),
		"atan2": two(math.Atan2), "fmod": two(remainder), "mod": two(remainder), "pow": two(power),
		"ldexp": func(L *lua.LState) int {
			L.Push(lua.LNumber(math.Ldexp(argNumber(L, 1), int(int32(argInt(L, 2))))))
			return 1
		},
		"frexp": func(L *lua.LState) int {
			m, e := math.Frexp(argNumber(L, 1))
			L.Push(lua.LNumber(m))
			L.Push(lua.LNumber(e))
			return 2
		},
		"modf": func(L *lua.LState) int {
			f := argNumber(L, 1)
			whole, part := math.Trunc(f), 0.0
			if !math.IsInf(f, 0) {
				part = f - whole
			}
			L.Push(lua.LNumber(whole))
			L.Push(lua.LNumber(math.Copysign(part, f)))
			return 2
		},
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
