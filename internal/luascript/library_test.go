package luascript

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/testutil"
)

// patience bounds what takes milliseconds on a machine that is not busy.
const patience = testutil.Limit

// loadLibrary loads a source within limits.
func loadLibrary(source string, memory int64, limit time.Duration) (*Library, error) {
	return testPool.Load(&Task{Host: &host{}, Memory: memory, Function: true}, []byte(source), limit)
}

// callLibrary calls a function of a library, and returns the reply.
func callLibrary(l *Library, name string, limit time.Duration, args ...[]byte) string {
	task := &Task{Host: &host{}, Memory: 8 << 20, Function: true}
	task.Start(limit)
	defer task.End()
	w := resp.Writer{Proto: 2}
	testPool.Call(task, l, name, args, args, &w)
	return string(w.Bytes())
}

// TestLibraryErrors: the texts are those of a redis-server 7.0.15.
func TestLibraryErrors(t *testing.T) {
	const names = "Library names can only contain letters, numbers, or underscores(_) and must be at least one " +
		"character long"
	for source, want := range map[string]string{
		"":                                "Missing library metadata",
		"lua name=a\nx":                   "Missing library metadata",
		"#!lua name=a":                    "Invalid library metadata",
		"#!lua name='a\nx":                "Invalid library metadata",
		"#!lua\nx":                        "Library name was not given",
		"#!\nx":                           "Library name was not given",
		"#!lua name=\nx":                  names,
		"#!lua name=a-b\nx":               names,
		"#!lua name=\"a b\"\nx":           names,
		"#!lua name=a name=b\nx":          "Invalid metadata value, name argument was given multiple times",
		"#!lua name=a flags=no-writes\nx": "Invalid metadata value given: flags=no-writes",
		"#! lua name=a\nx":                "Invalid metadata value given: lua",
		"#!js name=a\nx":                  "Engine 'js' not found",
		"#!lua name=a\nlocal x = 1":       "No functions registered",
		"#!lua name=a\nlocal x = math.pi": "Error registering functions: ERR user_function:2: Script attempted to " +
			"access nonexistent global variable 'math'",
		"#!lua name=a\nredis.call('get')": "Error registering functions: ERR user_function:2: Script attempted to " +
			"access nonexistent global variable 'call'",
		"#!lua name=a\nredis.setresp(3)": "Error registering functions: ERR user_function:2: Script attempted to " +
			"access nonexistent global variable 'setresp'",
		"#!lua name=a\nx = 1": "Error registering functions: ERR user_function:2: Attempt to modify a " +
			"readonly table",
		"#!lua name=a\nredis.x = 1": "Error registering functions: ERR user_function:2: Attempt to modify a " +
			"readonly table",
		"#!lua name=a\nwhile true do end": "Error registering functions: ERR FUNCTION LOAD timeout",
		"#!lua name=a\n\nlocal x = KEYS": "Error registering functions: ERR user_function:3: Script attempted to " +
			"access nonexistent global variable 'KEYS'",
		"#!lua name=a\nlocal x = 'a' .. 1": "No functions registered",
	} {
		limit := patience
		if strings.Contains(source, "while") {
			limit = 50 * time.Millisecond
		}
		if _, err := loadLibrary(source, 8<<20, limit); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", source, err, want)
		}
	}
	for call, want := range map[string]string{
		"()":                       "wrong number of arguments to redis.register_function",
		"('f', function() end, 1)": "wrong number of arguments to redis.register_function",
		"('f')": "calling redis.register_function with a single argument is only " +
			"applicable to Lua table (representing named arguments).",
		"('f', 1)":            "second argument to redis.register_function must be a function",
		"({}, 1)":             "first argument to redis.register_function must be a string",
		"{}":                  "redis.register_function must get a function name argument",
		"{function_name='f'}": "redis.register_function must get a callback argument",
		"{function_name={}}":  "function_name argument given to redis.register_function must be a string",
		"{description={}}":    "description argument given to redis.register_function must be a string",
		"{callback=1}":        "callback argument given to redis.register_function must be a function",
		"{flags='no-writes'}": "flags argument to redis.register_function must be a table representing " +
			"function flags",
		"{flags={'no-writes', 'x'}}":       "unknown flag given",
		"{name='f'}":                       "unknown argument given to redis.register_function",
		"{[{}]='f'}":                       "named argument key given to redis.register_function is not a string",
		"('', function() end)":             names,
		"('a-b', function() end)":          names,
		"('g', function() end)":            "Function already exists in the library",
		"{function_name='g', callback=at}": "Function already exists in the library",
	} {
		source := "#!lua name=a\nlocal function at() end redis.register_function('g', at) redis.register_function" +
			call
		if _, err := loadLibrary(source, 8<<20, patience); err == nil ||
			err.Error() != "Error registering functions: ERR "+want {
			t.Errorf("%s: %v, want %s", call, err, want)
		}
	}
	if _, err := loadLibrary("#!lua name=a\nsyntax error", 8<<20, patience); err == nil ||
		!strings.HasPrefix(err.Error(), "Error compiling function: user_function:2: ") {
		t.Errorf("a source that is no Lua: %v", err)
	}
}

// TestLibrary: what a library registers, and how its functions see the world.
func TestLibrary(t *testing.T) {
	l, err := loadLibrary(`#!LUA NAME="lib"
local calls = 0
redis.register_function('sum', function(keys, args) return keys[1] + args[1] end)
redis.register_function{FUNCTION_NAME='Count', callback=function() calls = calls + 1 return calls end, description='counts',
	flags={'ALLOW-OOM', 'no-writes', 'no-writes'}}
redis.register_function(7, function() return {type(redis.call), type(redis.breakpoint), type(redis.replicate_commands), type(redis.register_function)} end)
redis.register_function('keys', function() return KEYS end)
redis.register_function('slow', function() while true do end end)
redis.register_function('fails', function() error({err='MINE no'}) end)
redis.register_function('globals', function() x = 1 end)
redis.log(redis.LOG_NOTICE, redis.REDIS_VERSION)
`, 8<<20, patience)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range l.Functions {
		names = append(names, f.Name)
	}
	if want := []string{"7", "Count", "fails", "globals", "keys", "slow", "sum"}; l.Name != "lib" ||
		!reflect.DeepEqual(names, want) {
		t.Errorf("library %s has the functions %q", l.Name, names)
	}
	if f := l.Functions[1]; !f.Described || f.Description != "counts" || !f.NoWrites() ||
		!reflect.DeepEqual(f.Flags, []string{"no-writes", "allow-oom"}) {
		t.Errorf("%+v", f)
	}
	for _, c := range []struct{ name, want string }{
		{"sum", ":42\r\n"},
		{"Count", ":1\r\n"},
		{"Count", ":1\r\n"}, // a library keeps nothing
		{"7", "*4\r\n$8\r\nfunction\r\n$3\r\nnil\r\n$3\r\nnil\r\n$3\r\nnil\r\n"},
		{"keys", "-ERR user_function:7: Script attempted to access nonexistent global variable 'KEYS' script: keys, " +
			"on @user_function:7.\r\n"},
		{"globals", "-ERR user_function:10: Attempt to modify a readonly table script: globals, on " +
			"@user_function:10.\r\n"},
		{"fails", "-MINE no script: fails, on @user_function:9.\r\n"},
		{"slow", "-ERR Script ran for longer than script-timeout script: slow, on @user_function:8.\r\n"},
		{"sum", ":42\r\n"},
	} {
		limit := patience
		if c.name == "slow" {
			limit = 50 * time.Millisecond
		}
		if got := callLibrary(l, c.name, limit, []byte("21")); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	// A script in the same interpreters sees nothing of libraries.
	if got := perform(t, &host{}, "return {type(redis.breakpoint), type(redis.register_function), type(math), #KEYS}",
		8<<20, patience); got != "*4\r\n$8\r\nfunction\r\n$3\r\nnil\r\n$5\r\ntable\r\n:0\r\n" {
		t.Errorf("a script sees %q", got)
	}
}

// TestLibraryBounds: no library takes more than it may.
func TestLibraryBounds(t *testing.T) {
	for source, want := range map[string]string{
		"local function f(n) redis.register_function('f' .. n, f) return f(n + 1) end f(1)": "kvd: library of more than 2000 functions",
		"local s = 'x' for i = 1, 21 do s = s .. s end redis.register_function(s, f)":       "Error registering functions: ERR Script takes more than script-memory",
		"local function f(n) return f(n + 1) + 1 end f(1)":                                  "Error registering functions: ERR stack overflow",
		"local s = 'x' while true do s = s .. s end": "Script takes more than " +
			"script-memory",
		"local s = 'x' for i = 1, 20 do s = s .. s end local function g() end " +
			"redis.register_function{function_name='g', callback=g, description=s}": "names and descriptions of more than 1 MiB",
	} {
		memory := int64(8 << 20)
		if strings.Contains(source, "21") {
			memory = 1 << 20
		}
		if _, err := loadLibrary("#!lua name=a\n"+source, memory, patience); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", source, err)
		}
	}
}

// FuzzLibrary loads sources, and calls what they register.
func FuzzLibrary(f *testing.F) {
	for _, s := range []string{"#!lua name=a\nredis.register_function('f', function(k, a) return a end)",
		"#!lua name=a name=b\n", "#!\"lua\" name='x y'\n\\",
		"#!lua name=a\nredis.register_function{function_name='f', callback=function() return redis.call('echo', 'x') " +
			"end, flags={'no-writes'}, description='d'}",
		"#!lua name=\"\\x61\"\nlocal t = {} redis.register_function(1, function() t[#t+1] = 1 return t end)",
		"#!lua name=a\nredis.register_function(redis)"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, source string) {
		start := time.Now()
		l, err := loadLibrary(source, 8<<20, 100*time.Millisecond)
		if err == nil {
			if name, err := LibraryName([]byte(l.Source)); err != nil || name != l.Name || !isName(name) ||
				len(l.Functions) == 0 {
				t.Errorf("%q of %d functions: %q, %v", l.Name, len(l.Functions), name, err)
			}
			for _, f := range l.Functions[:min(len(l.Functions), 3)] {
				if got := callLibrary(l, f.Name, 100*time.Millisecond, []byte("x")); !isName(f.Name) ||
					!strings.HasSuffix(got, "\r\n") {
					t.Errorf("%q: the reply is %.100q", f.Name, got)
				}
			}
		}
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}
