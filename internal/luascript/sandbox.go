package luascript

import (
	"math"
	"regexp"
	"strconv"
	"strings"

	lua "github.com/yuin/gopher-lua"

	"github.com/kvd-project/kvd/internal/number"
)

// maxCalls bounds the depth of calls, maxNested that of calls through Go, each of which takes stack of a goroutine.
const maxCalls, maxNested = 8000, 190

// maxRegisters bounds the values that a thread has on its stack.
const maxRegisters = 256 << 10

// maxUnpacked is how many values unpack returns at most, as in Redis.
const maxUnpacked = 7999

// idleBytes is about what an interpreter takes before it runs a script, to those that ask.
const idleBytes = 42 << 10

const errReadOnly = "Attempt to modify a readonly table"

// library is a table of functions by name.
type library map[string]lua.LGFunction

// newSandbox makes an interpreter with all that scripts may use. It takes some tenths of a millisecond, hence the Pool.
func newSandbox() *sandbox {
	s := &sandbox{real: make(map[*lua.LTable]*lua.LTable), task: &Task{}, next: math.MaxInt64}
	L := lua.NewState(lua.Options{SkipOpenLibs: true, CallStackSize: maxCalls, MinimizeStackMemory: true,
		RegistrySize: 512, RegistryMaxSize: maxRegisters, RegistryGrowStep: 512})
	s.L = L
	s.env, s.globals = L.NewTable(), L.NewTable()
	s.null = &lua.LUserData{Metatable: lua.LNil}

	open := func(f lua.LGFunction, name string) *lua.LTable {
		L.Push(L.NewFunction(f))
		L.Push(lua.LString(name))
		L.Call(1, 0)
		return L.GetGlobal(name).(*lua.LTable)
	}
	maths, tables, coroutines := open(lua.OpenMath, lua.MathLibName), open(lua.OpenTable, lua.TabLibName),
		open(lua.OpenCoroutine, lua.CoroutineLibName)
	L.SetFuncs(maths, s.mathLibrary())
	maths.RawSetString("huge", lua.LNumber(math.Inf(1)))
	L.SetFuncs(tables, s.tableLibrary(tables))
	L.SetFuncs(coroutines, s.coroutineLibrary(coroutines))
	strs := L.SetFuncs(L.NewTable(), s.stringLibrary())
	s.expose("math", maths)
	s.expose("table", tables)
	s.expose("coroutine", coroutines)
	s.expose("string", strs)
	meta := L.SetFuncs(L.NewTable(), s.stringArithmetic())
	meta.RawSetString("__index", strs)
	shown := L.NewTable()
	shown.RawSetString("__index", s.globals.RawGetString("string"))
	s.stringMeta = s.visible(shown)
	L.SetMetatable(lua.LString(""), meta)

	L.SetFuncs(s.globals, s.baseLibrary())
	s.globals.RawSetString("_VERSION", lua.LString("Lua 5.1"))
	s.globals.RawSetString("pairs", L.NewClosure(s.pairs, s.globals.RawGetString("next")))
	s.expose("cjson", s.fillJSON(L.NewTable(), &s.jdepth))
	packs := L.SetFuncs(L.NewTable(), s.messageLibrary())
	packs.RawSetString("_NAME", lua.LString("cmsgpack"))
	packs.RawSetString("_VERSION", lua.LString("lua-cmsgpack 0.4.0"))
	packs.RawSetString("_DESCRIPTION", lua.LString("MessagePack C implementation for Lua"))
	packs.RawSetString("_COPYRIGHT", lua.LString("Copyright (C) 2012, Redis Ltd."))
	s.expose("cmsgpack", packs)
	s.expose("struct", L.SetFuncs(L.NewTable(), s.structLibrary()))
	s.expose("bit", L.SetFuncs(L.NewTable(), s.bitLibrary()))
	s.scriptAPI = s.expose("redis", L.SetFuncs(s.redisTable(), scriptsOnly))
	s.functionAPI = s.visible(s.redisTable())

	s.globals.RawSetString("_G", s.env)
	strict := L.NewTable()
	s.globalMeta = s.visible(strict)
	strict.RawSetString("__index", L.NewFunction(func(L *lua.LState) int {
		name := stringOf(L.Get(2))
		s.charge(L, 4*len(name)) // what the interpreter makes of it
		L.RaiseError("Script attempted to access nonexistent global variable '%s'", name)
		return 0
	}))
	s.globals.Metatable = strict
	s.loading = L.NewTable()
	s.loading.Metatable = strict
	api := s.loadTable()
	api.Metatable = strict
	s.loading.RawSetString("redis", s.visible(api))
	s.guard(s.env, s.globals)
	concealed := library{hiddenConcat: s.concat, hiddenSet: s.setIndex, hiddenKey: s.checkKey,
		hiddenTable:  s.countTable,
		hiddenLength: s.length, hiddenModulo: s.modulo, hiddenNumber: boundNumber}
	L.SetFuncs(s.globals, concealed)
	L.SetFuncs(s.loading, concealed)
	L.SetTop(0)
	L.SetContext(s)
	return s
}

// guard makes an empty table show the contents of another one, which scripts do not get hold of.
func (s *sandbox) guard(visible, real *lua.LTable) {
	meta := s.L.NewTable()
	meta.RawSetString("__index", real)
	meta.RawSetString("__newindex", s.L.NewFunction(func(L *lua.LState) int {
		L.RaiseError(errReadOnly)
		return 0
	}))
	visible.Metatable = meta
	s.real[visible] = real
}

// expose makes a library a global that cannot be changed.
func (s *sandbox) expose(name string, real *lua.LTable) *lua.LTable {
	visible := s.visible(real)
	s.globals.RawSetString(name, visible)
	return visible
}

// visible is how scripts see a table that they cannot change.
func (s *sandbox) visible(real *lua.LTable) *lua.LTable {
	visible := s.L.NewTable()
	s.guard(visible, real)
	return visible
}

// contents is the table that has what a script sees in t.
func (s *sandbox) contents(t *lua.LTable) *lua.LTable {
	if t.Metatable != lua.LNil {
		if real := s.real[t]; real != nil {
			return real
		}
	}
	return t
}

// raise ends the script, or the nearest pcall, with a text that says no line.
func (s *sandbox) raise(L *lua.LState, text string) {
	s.where = position(L, 1)
	L.Error(lua.LString(text), 0)
}

// raiseTable does so with an error as redis.call has it.
func (s *sandbox) raiseTable(L *lua.LState, t *lua.LTable) {
	if at := position(L, 1); at != "" {
		source, line, _ := strings.Cut(at, ":")
		t.RawSetString("source", lua.LString(source))
		if n, err := strconv.Atoi(line); err == nil {
			t.RawSetString("line", lua.LNumber(n))
		}
	}
	L.Error(t, 0)
}

// position is the line of the function at that level of calls, in Redis's form; empty if there is none.
func position(L *lua.LState, level int) string {
	at := strings.TrimSuffix(L.Where(level), ":")
	if !strings.HasPrefix(at, scriptChunk+":") && !strings.HasPrefix(at, functionChunk+":") {
		return ""
	}
	return "@" + at
}

var (
	positioned = regexp.MustCompile(`^(user_script|user_function):(\d+): `)
	// wordings turn the interpreter's errors into those of Lua's own.
	wordings = []struct {
		from *regexp.Regexp
		to   string
	}{
		{regexp.MustCompile(`attempt to index a non-table object\((\w+)\) with key '(?s:.*)'`), "attempt to index a $1 value"},
		{regexp.MustCompile(`cannot perform \w+ operation between number and (\w+)`),
			"attempt to perform arithmetic on a $1 value"},
		{regexp.MustCompile(`cannot perform \w+ operation between (\w+) and \w+`),
			"attempt to perform arithmetic on a $1 value"},
		{regexp.MustCompile(`attempt to compare (nil) with nil|attempt to compare (boolean) with boolean|attempt to compare (table) with table|attempt to compare (function) with function`), "attempt to compare two $1$2$3$4 values"},
		{regexp.MustCompile(`attempt to call a non-function object`), "attempt to call a nil value"},
		{regexp.MustCompile(`for statement init must be a number`), "'for' initial value must be a number"},
		{regexp.MustCompile(`for statement (limit|step) must be a number`), "'for' $1 must be a number"},
		{regexp.MustCompile(`__unm undefined`), "attempt to perform arithmetic on a non-number value"},
		{regexp.MustCompile(`__len undefined`), "attempt to get length of a non-table value"},
		{regexp.MustCompile(`bad argument #(\d+) to ([^' ]+) \((.*)\)`), "bad argument #$1 to '$2' ($3)"},
		{regexp.MustCompile(`registry overflow|lua callstack overflow`), "stack overflow"},
	}
)

// translate words an error of the interpreter as Lua does. Other values are left alone.
func (s *sandbox) translate(v lua.LValue) lua.LValue {
	msg, is := v.(lua.LString)
	if !is || len(msg) > 1024 {
		return v
	}
	text := string(msg)
	for _, w := range wordings {
		if w.from.MatchString(text) {
			return lua.LString(w.from.ReplaceAllString(text, w.to))
		}
	}
	return v
}

// numberString is a number as Lua prints it, with "%.14g".
func numberString(n lua.LNumber) string {
	f := float64(n)
	if i := int64(f); float64(i) == f && i > -1e14 && i < 1e14 && (i != 0 || !math.Signbit(f)) {
		return strconv.FormatInt(i, 10)
	}
	return formatG(f, 14)
}

// formatG is C's %.<digits>g.
func formatG(f float64, digits int) string {
	switch {
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	case math.IsNaN(f) && math.Signbit(f):
		return "-nan"
	case math.IsNaN(f):
		return "nan"
	}
	return strconv.FormatFloat(f, 'g', digits, 64)
}

// stringOf is a string or number as a string; others are what the interpreter prints.
func stringOf(v lua.LValue) string {
	if n, is := v.(lua.LNumber); is {
		return numberString(n)
	}
	return v.String()
}

// parseNumber reads a number as Lua does, white space around it allowed. As there, a zero byte ends the text.
func parseNumber(text string) (lua.LNumber, bool) {
	text, _, _ = strings.Cut(text, "\x00")
	f, used, _ := number.Double(text)
	return lua.LNumber(f), used > 0 && onlySpace(text[used:])
}

// onlySpace reports whether a text is nothing but white space.
func onlySpace(text string) bool { return strings.Trim(text, " \f\n\r\t\v") == "" }

// digitOf is the value of a digit or letter, 99 for others.
func digitOf(c byte) int {
	switch {
	case isDigit(c):
		return int(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'z':
		return int(c|0x20-'a') + 10
	}
	return 99
}

// toNumber is the number that a value is, or that a string means.
func toNumber(v lua.LValue) (lua.LNumber, bool) {
	switch v := v.(type) {
	case lua.LNumber:
		return v, true
	case lua.LString:
		return parseNumber(string(v))
	}
	return 0, false
}

// typeName is a value's type, "no value" behind the last argument.
func typeName(L *lua.LState, n int) string {
	if n > L.GetTop() {
		return "no value"
	}
	return L.Get(n).Type().String()
}

// tableArg is an argument that is to be a table.
func tableArg(L *lua.LState, n int) *lua.LTable {
	t, is := L.Get(n).(*lua.LTable)
	if !is {
		L.ArgError(n, "table expected, got "+typeName(L, n))
	}
	return t
}

// functionArg is an argument that is to be a function.
func functionArg(L *lua.LState, n int) *lua.LFunction {
	f, is := L.Get(n).(*lua.LFunction)
	if !is {
		L.ArgError(n, "function expected, got "+typeName(L, n))
	}
	return f
}

// argString is an argument that is to be a string, or a number.
func argString(L *lua.LState, n int) string {
	switch v := L.Get(n).(type) {
	case lua.LString:
		return string(v)
	case lua.LNumber:
		return numberString(v)
	}
	L.ArgError(n, "string expected, got "+typeName(L, n))
	return ""
}

// argNumber is an argument that is to be a number, or a string that means one.
func argNumber(L *lua.LState, n int) float64 {
	f, ok := toNumber(L.Get(n))
	if !ok {
		L.ArgError(n, "number expected, got "+typeName(L, n))
	}
	return float64(f)
}

// argInt is an argument that is to be a number, cut to an integer.
func argInt(L *lua.LState, n int) int { return truncated(argNumber(L, n)) }

// truncated is a number without its fraction, as C's conversion on this processor; what is too great becomes the least
// integer.
func truncated(f float64) int {
	if math.IsNaN(f) || f >= 1<<63 || f < -1<<63 {
		return math.MinInt64
	}
	return int(f)
}

// optInt is argInt with a default.
func optInt(L *lua.LState, n, otherwise int) int {
	if L.Get(n) == lua.LNil {
		return otherwise
	}
	return argInt(L, n)
}
