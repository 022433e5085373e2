package luascript

import (
	"fmt"
	"strings"

	lua "github.com/yuin/gopher-lua"

	"github.com/kvd-project/kvd/internal/number"
)

func (s *sandbox) baseLibrary() library {
	return library{
		"assert": s.assert, "error": s.throwError, "pcall": s.protectedCall, "xpcall": s.handledCall,
		"tostring": s.toString, "tonumber": s.toNumber, "type": typeOf, "select": selectArgs, "unpack": s.unpack,
		"next": s.next1, "ipairs": s.ipairs, "rawget": s.rawGet, "rawset": s.rawSet, "rawequal": rawEqual,
		"getmetatable": s.getMetatable, "setmetatable": s.setMetatable,
		"load": s.load, "loadstring": s.loadString, "collectgarbage": s.collectGarbage,
		"gcinfo": func(L *lua.LState) int { L.Push(lua.LNumber((s.charged + idleBytes) / 1024)); return 1 },
	}
}

func (s *sandbox) toString(L *lua.LState) int {
	if L.GetTop() == 0 {
		L.ArgError(1, "value expected")
	}
	switch v := L.Get(1).(type) {
	case lua.LNumber:
		L.Push(lua.LString(numberString(v)))
	case lua.LString:
		L.SetTop(1)
	case *lua.LTable:
		if f := L.GetMetaField(v, "__tostring"); f != lua.LNil {
			L.Push(f)
			L.Push(v)
			s.callNested(L, 1, 1)
			return 1
		}
		L.Push(lua.LString(fmt.Sprintf("table: %p", v)))
	case *lua.LUserData:
		L.Push(lua.LString("userdata: (nil)"))
	default:
		L.Push(lua.LString(v.String()))
	}
	return 1
}

func (s *sandbox) toNumber(L *lua.LState) int {
	if L.GetTop() == 0 {
		L.ArgError(1, "value expected")
	}
	base := optInt(L, 2, 10)
	if base == 10 {
		if n, ok := toNumber(L.Get(1)); ok {
			L.Push(n)
		} else {
			L.Push(lua.LNil)
		}
		return 1
	}
	if base < 2 || base > 36 {
		L.ArgError(2, "base out of range")
	}
	text, _, _ := strings.Cut(argString(L, 1), "\x00")
	u, used, _ := number.Unsigned(text, base)
	if used == 0 || !onlySpace(text[used:]) {
		L.Push(lua.LNil)
	} else {
		L.Push(lua.LNumber(u))
	}
	return 1
}

func typeOf(L *lua.LState) int {
	if L.GetTop() == 0 {
		L.ArgError(1, "value expected")
	}
	L.Push(lua.LString(L.Get(1).Type().String()))
	return 1
}

func selectArgs(L *lua.LState) int {
	top := L.GetTop()
	if L.Get(1) == lua.LString("#") {
		L.Push(lua.LNumber(top - 1))
		return 1
	}
	n := argInt(L, 1)
	switch {
	case n < 0:
		n += top
	case n > top:
		n = top
	}
	if n < 1 {
		L.ArgError(1, "index out of range")
	}
	return top - n
}

func (s *sandbox) unpack(L *lua.LState) int {
	t := tableArg(L, 1)
	i := optInt(L, 2, 1)
	j := optInt(L, 3, t.Len())
	if i > j {
		return 0
	}
	if j-i >= maxUnpacked || j-i < 0 {
		at := L.Where(1) + " "
		if strings.HasPrefix(at, "[G]") {
			at = ""
		}
		s.raise(L, at+"too many results to unpack")
	}
	n := j - i + 1
	for ; i <= j; i++ {
		L.Push(rawIndex(t, i))
	}
	return n
}

// rawIndex is t[i] without metatables; RawGetInt looks at the array alone.
func rawIndex(t *lua.LTable, i int) lua.LValue {
	if v := t.RawGetInt(i); v != lua.LNil {
		return v
	}
	return t.RawGet(lua.LNumber(i))
}

func (s *sandbox) next1(L *lua.LState) int {
	t := s.contents(tableArg(L, 1))
	if k := L.Get(2); k != lua.LNil && !hasKey(t, k) {
		s.raise(L, "invalid key to 'next'")
	}
	key, value := t.Next(L.Get(2))
	for k, is := key.(lua.LString); is && len(k) > 0 && k[0] == 0 && t == s.globals; k, is = key.(lua.LString) {
		key, value = t.Next(key) // what the rewritten source calls
	}
	if key == lua.LNil {
		L.Push(lua.LNil)
		return 1
	}
	L.Push(key)
	L.Push(value)
	return 2
}

func (s *sandbox) pairs(L *lua.LState) int {
	t := tableArg(L, 1)
	L.Push(L.Get(lua.UpvalueIndex(1)))
	L.Push(t)
	L.Push(lua.LNil)
	return 3
}

func (s *sandbox) ipairs(L *lua.LState) int {
	t := tableArg(L, 1)
	L.Push(L.NewFunction(nextIndex))
	L.Push(t)
	L.Push(lua.LNumber(0))
	return 3
}

func nextIndex(L *lua.LState) int {
	t := tableArg(L, 1)
	i := argInt(L, 2) + 1
	v := rawIndex(t, i)
	if v == lua.LNil {
		L.Push(lua.LNil)
		return 1
	}
	L.Push(lua.LNumber(i))
	L.Push(v)
	return 2
}

func (s *sandbox) rawGet(L *lua.LState) int {
	L.Push(s.contents(tableArg(L, 1)).RawGet(L.CheckAny(2)))
	return 1
}

func (s *sandbox) rawSet(L *lua.LState) int {
	t := tableArg(L, 1)
	if s.contents(t) != t {
		s.raise(L, errReadOnly)
	}
	if n, is := L.CheckAny(2).(lua.LNumber); is {
		s.chargeIndex(L, t, n)
	}
	L.RawSet(t, L.Get(2), L.CheckAny(3))
	L.SetTop(1)
	return 1
}

func rawEqual(L *lua.LState) int {
	L.Push(lua.LBool(L.RawEqual(L.CheckAny(1), L.CheckAny(2))))
	return 1
}

// getMetatable shows those that scripts have made, and of the globals and of strings what they cannot change.
func (s *sandbox) getMetatable(L *lua.LState) int {
	t, is := L.CheckAny(1).(*lua.LTable)
	_, str := L.Get(1).(lua.LString)
	switch {
	case str:
		L.Push(s.stringMeta)
	case t == s.env && is:
		L.Push(s.globalMeta)
	case !is, s.contents(t) != t:
		L.Push(lua.LNil)
	default:
		L.Push(L.GetMetatable(t))
	}
	return 1
}

func (s *sandbox) setMetatable(L *lua.LState) int {
	t := tableArg(L, 1)
	meta := L.Get(2)
	if _, is := meta.(*lua.LTable); !is && (meta != lua.LNil || L.GetTop() < 2) {
		L.ArgError(2, "nil or table expected")
	}
	if s.contents(t) != t {
		s.raise(L, errReadOnly)
	}
	if L.GetMetaField(t, "__metatable") != lua.LNil {
		L.RaiseError("cannot change a protected metatable")
	}
	L.SetMetatable(t, meta)
	L.SetTop(1)
	return 1
}

func (s *sandbox) loadString(L *lua.LState) int {
	source := argString(L, 1)
	name := chunkName(source)
	if L.Get(2) != lua.LNil {
		name = chunkName(argString(L, 2))
	}
	return s.pushChunk(L, source, name)
}

// chunkName is how errors name a source.
func chunkName(source string) string {
	if rest, is := strings.CutPrefix(source, "@"); is {
		return rest
	}
	if rest, is := strings.CutPrefix(source, "="); is {
		return rest
	}
	line, _, more := strings.Cut(source, "\n")
	if len(line) > 40 || more {
		line = line[:min(len(line), 40)] + "..."
	}
	return `[string "` + line + `"]`
}

// pushChunk compiles what a script has made.
func (s *sandbox) pushChunk(L *lua.LState, source, name string) int {
	defer s.resetPending(s.pending)
	s.grow(L, programOverhead*len(source))
	proto, err := compileChunk(source, name)
	s.goOn(L)
	if err != nil {
		L.Push(lua.LNil)
		L.Push(lua.LString(err.Error()))
		return 2
	}
	f := L.NewFunctionFromProto(proto)
	f.Env = s.env
	L.Push(f)
	return 1
}

func (s *sandbox) load(L *lua.LState) int {
	f := functionArg(L, 1)
	name := "=(load)"
	if L.Get(2) != lua.LNil {
		name = argString(L, 2)
	}
	source := &builder{s: s, L: L}
	defer s.resetPending(s.pending)
	for {
		L.Push(f)
		s.callNested(L, 0, 1)
		v := L.Get(-1)
		L.Pop(1)
		if v == lua.LNil || v == lua.LString("") {
			return s.pushChunk(L, string(ownString(source.b)), chunkName(name))
		}
		if !lua.LVCanConvToString(v) {
			L.RaiseError("reader function must return a string")
		}
		source.text(stringOf(v))
	}
}

// collectGarbage has nothing to do: Go collects when it likes.
func (s *sandbox) collectGarbage(L *lua.LState) int {
	switch what := L.OptString(1, "collect"); what {
	case "count":
		L.Push(lua.LNumber(float64(s.charged+idleBytes) / 1024))
	case "collect", "stop", "restart", "step", "setpause", "setstepmul":
		L.Push(lua.LNumber(0))
	default:
		L.ArgError(1, "invalid option '"+what+"'")
	}
	return 1
}

// stringArithmetic is arithmetic on strings, which mean numbers in base ten: the interpreter alone would read 010 as
// octal.
func (s *sandbox) stringArithmetic() library {
	operation := func(f func(a, b float64) float64) lua.LGFunction {
		return func(L *lua.LState) int {
			a, ok := toNumber(L.Get(1))
			b, ok2 := a, ok
			if L.GetTop() > 1 { // else it is the minus of one string
				b, ok2 = toNumber(L.Get(2))
			}
			if !ok || !ok2 {
				v := L.Get(1)
				if ok {
					v = L.Get(2)
				}
				L.RaiseError("attempt to perform arithmetic on a %s value", v.Type().String())
			}
			L.Push(lua.LNumber(f(float64(a), float64(b))))
			return 1
		}
	}
	return library{
		"__add": operation(func(a, b float64) float64 { return a + b }),
		"__sub": operation(func(a, b float64) float64 { return a - b }),
		"__mul": operation(func(a, b float64) float64 { return a * b }),
		"__div": operation(func(a, b float64) float64 { return a / b }),
		"__mod": operation(modulo),
		"__pow": operation(power),
		"__unm": operation(func(a, _ float64) float64 { return -a }),
	}
}
