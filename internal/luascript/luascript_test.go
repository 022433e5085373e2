package luascript

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	lua "github.com/yuin/gopher-lua"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

// host is a store of one command, ECHO, and a budget.
type host struct {
	reply    []byte
	budget   int64
	reserved int64
	stopped  bool
}

func (h *host) Call(args [][]byte, _ int) ([]byte, error) {
	if h.reply != nil {
		return h.reply, nil
	}
	var w resp.Writer
	w.Bulk(args[len(args)-1])
	return w.Bytes(), nil
}

func (h *host) Permits([][]byte) (bool, bool) { return true, true }
func (h *host) Log(int, string)               {}
func (h *host) Stopped() bool                 { return h.stopped }
func (h *host) Reserve(n int64) error {
	if h.reserved += n; h.budget > 0 && h.reserved > h.budget {
		return errors.New("none left")
	}
	return nil
}

var testPool Pool

// perform runs a source within limits, and returns the reply.
func perform(t testing.TB, h *host, source string, memory int64, limit time.Duration) string {
	t.Helper()
	p, err := Compile([]byte(source))
	if err != nil {
		return "-" + err.Error()
	}
	task := &Task{Host: h, Memory: memory}
	task.Start(limit)
	defer task.End()
	w := resp.Writer{Proto: 2}
	testPool.Run(task, p, nil, nil, &w)
	return string(w.Bytes())
}

// TestTimeLimit: no script goes on for much longer than it may, in Lua or within a function of a library, and none can
// catch it.
func TestTimeLimit(t *testing.T) {
	for name, source := range map[string]string{
		"loop":      `while true do end`,
		"repeat":    `repeat until false`,
		"goto":      `for i = 1, 1e18 do end`,
		"pcall":     `while true do pcall(function() while true do end end) end`,
		"xpcall":    `while true do xpcall(function() while true do end end, function() while true do end end) end`,
		"coroutine": `coroutine.wrap(function() while true do end end)()`,
		"resume":    `while true do coroutine.resume(coroutine.create(function() while true do end end)) end`,
		"find":      `return string.find(string.rep('a', 100000), string.rep('a-', 30)..'b')`,
		"optional":  `return string.find(string.rep('a', 100), string.rep('a?', 100)..string.rep('a', 100))`,
		"gsub":      `return string.gsub(string.rep('a', 100000), '.-.-.-.-b', '')`,
		"gmatch":    `for w in string.gmatch(string.rep('a', 100000), '.-.-.-.-b') do end`,
		"sort":      `local t = {} for i = 1, 1000 do t[i] = i end table.sort(t, function(a, b) while true do end end)`,
		"index":     `local t = setmetatable({}, {__index = function(t, k) while true do end end}) return t.x`,
		"tostring":  `return tostring(setmetatable({}, {__tostring = function() while true do end end}))`,
		"json":      `local s = '['..string.rep('0,', 100000)..'0]' while true do cjson.decode(s) end`,
		"concat":    `local t = {} for i = 1, 100000 do t[i] = 'x' end while true do table.concat(t) end`,
		"gsub call": `return string.gsub(string.rep('a', 10), 'a', function() while true do end end)`,
		"load":      `load(function() return ' ' end)`,
		"foreach":   `local t = {} for i = 1, 100 do t[i] = i end while true do table.foreach(t, function() end) end`,
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			got := perform(t, &host{}, source, 256<<20, 50*time.Millisecond)
			if !strings.Contains(got, stopTexts[outOfTime]) {
				t.Errorf("it ended with %.200q", got)
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// TestMemoryLimit: a script that wants more than it may have ends, whatever it makes, and takes no more than that by
// much.
func TestMemoryLimit(t *testing.T) {
	const limit = 16 << 20
	for name, source := range map[string]string{
		"rep":         `return #string.rep('x', 1e9)`,
		"rep times":   `local s = string.rep('x', 1e6) return #s:rep(1e6)`,
		"double":      `local s = 'x' while true do s = s..s end`,
		"chain":       `local s = 'x' while true do s = s..s..s..s..s..s..s..s end`,
		"strings":     `local t = {} while true do t[#t+1] = string.rep('x', 1000)..#t end`,
		"array":       `local t = {} t[60000000] = 1 return 1`,
		"arrays":      `local all = {} while true do local t = {} t[2000] = 1 t[2000] = nil all[#all+1] = t end`,
		"constructor": `return {[60000000] = 1}`,
		"swap":        `local t = {} t[60000000], t[1] = 1, 2`,
		"rawset":      `local t = {} rawset(t, 60000000, 1)`,
		"insert":      `local t = {} table.insert(t, 60000000, 1)`,
		"tables":      `local t = {} while true do t = {t} end`,
		"fields":      `local t = {} local i = 0 while true do i = i + 1 t['k'..i] = i end`,
		"forgotten":   `local t = {} local i = 0 while true do i = i + 1 t['k'..i] = i t['k'..i] = nil end`,
		"numbers":     `local t = {} local i = 0.5 while true do i = i + 1 t[i] = i end`,
		"closures":    `local f = function() end while true do local g = f f = function() return g end end`,
		"upvalues":    `local f while true do local s, g = string.rep('x', 1e5), f f = function() return s, g end end`,
		"coroutines":  `local t = {} while true do t[#t+1] = coroutine.create(function() end) end`,
		"held":        `local t = {} while true do local s = string.rep('x', 1e5)..#t t[#t+1] = coroutine.wrap(function() return s end) end`,
		"stack":       `local function f(...) return 1 + f(1, ...) end return f()`,
		"temporaries": `local function f() return (string.rep('x', 1e5)..f()) end return f()`,
		"concat":      `local t = {} for i = 1, 1000 do t[i] = 'x' end return #table.concat(t, string.rep('y', 1e5))`,
		"gsub":        `return string.gsub(string.rep('x', 1e5), 'x', string.rep('y', 1e5))`,
		"format":      `local s = string.rep('x', 1e6) return string.format(string.rep('%s', 100), unpack((function() local t = {} for i = 1, 100 do t[i] = s end return t end)()))`,
		"json":        `local t = {string.rep('x', 1e6)} for i = 1, 10 do t = {t, t, t, t} end return cjson.encode(t)`,
		"json decode": `return #cjson.decode('['..string.rep('{"a":1},', 1e6)..'1]')`,
		"pack":        `local t = {string.rep('x', 1e6)} for i = 1, 10 do t = {t, t, t, t} end return cmsgpack.pack(t)`,
		"reply":       `local t = {} for i = 1, 30 do t = {t, t, t} end return t`,
		"struct":      `return struct.pack('c0c0', string.rep('x', 9e6), string.rep('y', 9e6))`,
		"loadstring":  `while true do loadstring(string.rep(' ', 1e6)) end`,
		"sources":     `local t = {} while true do t[#t+1] = loadstring('return '..string.rep('1+', 20)..#t) end`,
		"call":        `while true do redis.call('echo', string.rep('x', 1e8)) end`,
	} {
		t.Run(name, func(t *testing.T) {
			h := &host{}
			runtime.GC()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			got := perform(t, h, source, limit, 2*time.Minute)
			runtime.ReadMemStats(&after)
			if !strings.Contains(got, stopTexts[outOfMemory]) && !strings.Contains(got, "stack overflow") &&
				!strings.Contains(got, "too many results") {
				t.Errorf("it ended with %.200q", got)
			}
			if h.reserved > 2*limit {
				t.Errorf("it reserved %d bytes", h.reserved)
			}
			if most := after.HeapSys - before.HeapSys; int64(most) > 0 && int64(most) > 12*limit {
				t.Errorf("the heap grew by %d bytes", most)
			}
		})
	}
}

// TestLittleMemory: a script that makes much and keeps little is let.
func TestLittleMemory(t *testing.T) {
	for name, source := range map[string]string{
		"strings": `local n = 0 for i = 1, 200000 do n = n + #(string.rep('x', 1000)..i) end return n`,
		"tables":  `local t for i = 1, 200000 do t = {a = i, b = {i}} end return t.a`,
		"threads": `for i = 1, 3000 do coroutine.wrap(function() return i end)() end return 1`,
		"shared":  `local s, t = string.rep('x', 1e6), {} for i = 1, 1000 do t[i] = s end return #t`,
		"steps":   `local n = 0 for i = 1, 3000000 do n = n + i end return n`,
	} {
		t.Run(name, func(t *testing.T) {
			h := &host{}
			if got := perform(t, h, source, 16<<20, time.Minute); got[0] != ':' {
				t.Errorf("it ended with %.200q", got)
			}
			if h.reserved > 8<<20 {
				t.Errorf("it reserved %d bytes", h.reserved)
			}
		})
	}
}

// TestBudget: a host that has no memory ends the script, and so does one whose store has failed.
func TestBudget(t *testing.T) {
	const source = `local t = {} for i = 1, 1e6 do t[i] = 'x'..i end return 1`
	if got := perform(t, &host{budget: 2 << 20}, source, 1<<30, time.Minute); !strings.Contains(
		got, stopTexts[outOfMemory]) {
		t.Errorf("without memory it ended with %.200q", got)
	}
	if got := perform(t, &host{stopped: true}, `while true do pcall(redis.call, 'x') end`, 1<<30,
		time.Minute); !strings.Contains(got, stopTexts[noUse]) {
		t.Errorf("with a failed store it ended with %.200q", got)
	}
}

// TestDepth: neither a source nor calls can be nested so deep that the stack of a goroutine would not hold them.
func TestDepth(t *testing.T) {
	for name, source := range map[string]string{
		"parentheses": "return " + strings.Repeat("(", 100_000) + "1" + strings.Repeat(")", 100_000),
		"minus":       "return " + strings.Repeat("- ", 100_000) + "1",
		"not":         "return " + strings.Repeat("not ", 100_000) + "1",
		"sum":         "return " + strings.Repeat("1+", 100_000) + "1",
		"power":       "return " + strings.Repeat("1^", 100_000) + "1",
		"tables":      "return " + strings.Repeat("{", 100_000) + strings.Repeat("}", 100_000),
		"functions":   strings.Repeat("return function() ", 50_000) + strings.Repeat(" end", 50_000),
		"blocks":      strings.Repeat("do ", 100_000) + strings.Repeat(" end", 100_000),
		"calls":       "return f" + strings.Repeat("()", 100_000),
		"many":        "local t = {" + strings.Repeat("function() end,", 50_000) + "}",
		"long":        "return '" + strings.Repeat("x", MaxSource) + "'",
		"recursion":   "local function f() return 1 + f() end return f()",
		"pcall":       "local function f() return pcall(f) end return select('#', f())..error('end')",
		"tostring": "local t = {} setmetatable(t, {__tostring = function() return tostring(t) end}) return " +
			"tostring(t)",
		"index":      "local t = {} setmetatable(t, {__index = function(t, k) return t[k] end}) return t.x",
		"gsub":       "local function f() return string.gsub('x', 'x', f) end return f()",
		"sort":       "local function f() local t = {1, 2, 3} table.sort(t, f) end return f()",
		"coroutines": "local function f() return coroutine.wrap(f)() end return f()",
		"result":     "local t = {} t[1] = t return t",
	} {
		t.Run(name, func(t *testing.T) {
			if got := perform(t, &host{}, source, 64<<20, 20*time.Second); name != "result" && name != "parentheses" &&
				got[0] != '-' {
				t.Errorf("it ended with %.200q", got)
			}
		})
	}
}

// TestConcatChain: a chain of more strings than a call has arguments is joined in parts.
func TestConcatChain(t *testing.T) {
	source := "return " + strings.Repeat("'ab'..", 150) + "'c'"
	if got, want := perform(t, &host{}, source, 1<<20, time.Minute), strings.Repeat("ab", 150)+
		"c"; !strings.Contains(got, want) {
		t.Errorf("got %.100q", got)
	}
}

// TestNoTraces: a script leaves nothing in the interpreter for the next one.
func TestNoTraces(t *testing.T) {
	sources := []string{
		`local t = {} for k, v in pairs(_G) do t[#t+1] = k..type(v) end table.sort(t) return table.concat(t, ' ')`,
		`cjson.encode_max_depth(3) return cjson.encode_max_depth()`,
		`getmetatable('').__index = nil return ('x'):rep(2)`,
		`return pcall(rawset, _G, 'x', 1)`,
		`return pcall(function() string.rep = nil end)`,
		`return pcall(setmetatable, redis, nil)`,
		`table.insert(KEYS, 'x') KEYS.y = 1 return #KEYS`,
		`return pcall(table.insert, _G, 'x')`,
		`redis.setresp(3) return 1`,
	}
	var first []string
	for round := range 3 {
		for i, s := range sources {
			got := perform(t, &host{}, s, 1<<20, time.Minute)
			if round == 0 {
				first = append(first, got)
			} else if got != first[i] {
				t.Errorf("%s: first %q, then %q", s, first[i], got)
			}
		}
		perform(t, &host{}, `error('x')`, 1<<20, time.Minute)
		if got := perform(t, &host{}, `return {tostring(cjson.encode_max_depth()), type(redis.call('get', 'x'))}`, 1<<20, time.Minute); got != "*2\r\n$4\r\n1000\r\n$6\r\nstring\r\n" {
			t.Errorf("settings stayed: %q", got)
		}
	}
}

// TestTableFields: what tableFields reads is there, and grows with the table.
func TestTableFields(t *testing.T) {
	table := &lua.LTable{Metatable: lua.LNil}
	empty := tableBytes(table)
	table.RawSetInt(1000, lua.LTrue)
	array := tableBytes(table)
	for i := range 1000 {
		table.RawSetString(fmt.Sprint(i), lua.LTrue)
	}
	if full := tableBytes(table); array < empty+16000 || full < array+1000*entryCost {
		t.Errorf("a table takes %d bytes, %d with an array and %d with fields", empty, array, full)
	}
	if n := reflect.TypeFor[lua.LTable]().NumField(); n != 6 {
		t.Errorf("tables of gopher-lua have %d fields, 6 are known", n)
	}
}

func TestCache(t *testing.T) {
	c := NewCache(10_000)
	var all []*Program
	for i := range 20 {
		p, err := Compile(fmt.Appendf(nil, "return %d", i))
		if err != nil {
			t.Fatal(err)
		}
		c.Add(p)
		c.Add(p)
		all = append(all, p)
		if c.Find([]byte(all[0].SHA)) == nil {
			t.Fatal("the script that is used is gone")
		}
	}
	n, bytes := c.Len()
	if n < 2 || bytes > 10_000 {
		t.Errorf("%d scripts of %d bytes", n, bytes)
	}
	if c.Find([]byte(all[1].SHA)) != nil || c.Find([]byte(strings.ToUpper(all[19].SHA))) == nil {
		t.Error("not the oldest ones are gone")
	}
	c.Clear()
	if n, bytes := c.Len(); n != 0 || bytes != 0 {
		t.Errorf("%d scripts of %d bytes after Clear", n, bytes)
	}
}

// fuzzLimits run a source, which must end in time, with one reply, and without a panic of Go's own.
func fuzzLimits(t *testing.T, source string) {
	start := time.Now()
	got := perform(t, &host{}, source, 8<<20, 100*time.Millisecond)
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	if got == "" || !strings.HasSuffix(got, "\r\n") && got[0] != '-' {
		t.Errorf("the reply is %.100q", got)
	}
	for _, bad := range []string{"runtime error", "nil pointer", "interface conversion", "gopher-lua:"} {
		if strings.Contains(got, bad) {
			t.Errorf("the reply is %.200q", got)
		}
	}
}

// FuzzSource runs sources.
func FuzzSource(f *testing.F) {
	for _, s := range []string{"return 1", "local t = {} t[1], t[2] = 1, 2 return t", "return ('x'):rep(5)..1",
		"for i, v in ipairs({1, 2}) do redis.call('set', i, v) end",
		"return coroutine.wrap(function() coroutine.yield(1) end)()", "goto x ::x::", "return #{...}", "x = 1",
		"return setmetatable({}, {__index = function() end})[1]"} {
		f.Add(s)
	}
	f.Fuzz(fuzzLimits)
}

// FuzzDecoders gives bytes to what reads bytes.
func FuzzDecoders(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.5e3,"\u00e9"]}`, "\x93\x01\xa1x\xc0", "\x01\x02\x03\x04", "%d %5.2f",
		"(%w+)=(%b())", "[[\\\"", "\xdd\xff\xff\xff\xff",
		"\xdf\x00\x00\x00\x01\xcb\x41\x8c\x9c\x38\x00\x00\x00\x00\x01"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		arg := "'"
		for _, c := range b {
			arg += fmt.Sprintf("\\%03d", c)
		}
		arg += "'"
		for _, call := range []string{"cjson.decode(%s)", "cmsgpack.unpack(%s)", "cmsgpack.unpack_one(%s, 1)",
			"struct.unpack('>i3<I8sc0', %s)", "struct.unpack(%s, string.rep('x', 100))",
			"struct.pack(%s, 1, 2, 'a', 'b', 3)", "struct.size(%s)", "string.format(%s, 1, 2.5, 'x', 4)",
			"string.find(string.rep('abc(=) ', 20), %s)", "string.gsub('hello world', %s, '%%0%%1')",
			"string.gsub('hello', 'l', %s)", "tonumber(%s)", "%s + 1", "loadstring(%s)"} {
			fuzzLimits(t, "return "+fmt.Sprintf(call, arg))
		}
	})
}

// BenchmarkRateLimit is what a script of the usual kind costs beside its commands.
func BenchmarkRateLimit(b *testing.B) {
	p, err := Compile([]byte(`local n = redis.call('INCR', KEYS[1]) if n == 1 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end return n`))
	if err != nil {
		b.Fatal(err)
	}
	h := &host{reply: []byte(":1\r\n")}
	keys, args := [][]byte{[]byte("key:1")}, [][]byte{[]byte("60000")}
	var w resp.Writer
	b.ReportAllocs()
	for b.Loop() {
		task := &Task{Host: h, Memory: 64 << 20}
		task.Start(5 * time.Second)
		w.Reset(1 << 10)
		testPool.Run(task, p, keys, args, &w)
		task.End()
	}
}
