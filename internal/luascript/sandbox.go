package luascript

import (
	"fmt"
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
	maths, tables, coroutines := open(lua.OpenMath, lua.MathLibName), open(lua.OpenTable, lua.TabLibName), open(lua.OpenCoroutine, lua.CoroutineLibName)
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
	concealed := library{hiddenConcat: s.concat, hiddenSet: s.setIndex, hiddenKey: s.checkKey, hiddenTable: s.countTable,
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
		{regexp.MustCompile(`cannot perform \w+ operation between number and (\w+)`), "attempt to perform arithmetic on a $1 value"},
		{regexp.MustCompile(`cannot perform \w+ operation between (\w+) and \w+`), "attempt to perform arithmetic on a $1 value"},
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

// truncated is a number without its fraction, as C's conversion on this processor; what is too great becomes the least integer.
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

// ---- what the rewritten source calls ------------------------------------------

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

// boundNumber makes a number of a string that means one, and leaves other values to the interpreter, which refuses them.
func boundNumber(L *lua.LState) int {
	if n, ok := toNumber(L.Get(1)); ok {
		L.Push(n)
		return 1
	}
	L.SetTop(1)
	return L.GetTop()
}

// ---- the base library ---------------------------------------------------------

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

// stringArithmetic is arithmetic on strings, which mean numbers in base ten: the interpreter alone would read 010 as octal.
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
