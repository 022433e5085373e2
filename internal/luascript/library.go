package luascript

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	lua "github.com/yuin/gopher-lua"

	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/units"
)

// Library is a compiled library of functions. It is never changed.
//
// Its source is run when it is loaded, to learn which functions it registers, and again before each call of one of
// them. So a library keeps nothing from one call to the next, and all gateways and all calls see the same one.
type Library struct {
	Name string
	// Source is all of it, with its first line.
	Source string
	// Functions are in the order of their names.
	Functions []*Function

	proto *lua.FunctionProto
}

// Function is one that a library has registered.
type Function struct {
	Name string
	// Description is what the library says of it, if Described.
	Description string
	Described   bool
	// Flags are in Redis's order.
	Flags []string
}

// NoWrites reports whether the function has the flag of that name.
func (f *Function) NoWrites() bool { return slices.Contains(f.Flags, noWrites) }

// registered is a function while its library is loaded.
type registered struct {
	Function
	callback *lua.LFunction
}

// maxRegistered bounds the functions of a library; their names and descriptions have MaxSource bytes together.
const maxRegistered = 2000

const badName = "Library names can only contain letters, numbers, or underscores(_) and must be at least one " +
	"character long"

// isName reports whether a library or function may be called that.
func isName(s string) bool {
	for _, c := range []byte(s) {
		if c != '_' && (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'z') {
			return false
		}
	}
	return s != ""
}

// Bytes is about what the library takes in memory.
func (l *Library) Bytes() int {
	return 512 + len(l.Source) + 128*len(l.Functions) + protoBytes(l.proto)
}

// LibraryName reads the first line of a library's source, and returns its name. The error's text is Redis's, without
// its code.
func LibraryName(source []byte) (name string, err error) {
	line, _, more := strings.Cut(string(source), "\n")
	if !strings.HasPrefix(line, "#!") {
		return "", errors.New("Missing library metadata")
	}
	words, ok := resp.SplitLine(nil, []byte(line))
	if !more || !ok || len(words) == 0 {
		return "", errors.New("Invalid library metadata")
	}
	named := false
	for _, w := range words[1:] {
		const field = "name="
		switch {
		case len(w) < len(field) || !strings.EqualFold(string(w[:len(field)]), field):
			return "", errors.New("Invalid metadata value given: " + string(w))
		case named:
			return "", errors.New("Invalid metadata value, name argument was given multiple times")
		}
		name, named = string(w[len(field):]), true
	}
	switch engine := string(words[0][2:]); {
	case !named:
		return "", errors.New("Library name was not given")
	case !isName(name):
		return "", errors.New(badName)
	case !strings.EqualFold(engine, "lua"):
		return "", errors.New("Engine '" + engine + "' not found")
	}
	return name, nil
}

// Load compiles a library, starts t's time and runs the library to see what it registers. The error's text is the one
// that Redis would give, without its code.
func (p *Pool) Load(t *Task, source []byte, limit time.Duration) (*Library, error) {
	name, err := LibraryName(source)
	if err != nil {
		return nil, err
	}
	l := &Library{Name: name, Source: string(source)}
	_, body, _ := strings.Cut(l.Source, "\n")
	if l.proto, err = compileChunk("\n"+body, functionChunk); err != nil {
		return nil, errors.New("Error compiling function: " + err.Error())
	}
	t.Start(limit)
	defer t.End()
	p.with(func(s *sandbox) bool {
		s.begin(t, functionChunk)
		if err = s.loadLibrary(l); err != nil {
			text, _ := s.errorText(err)
			if t.stop.Load() == outOfTime {
				text = "ERR FUNCTION LOAD timeout"
			}
			err = errors.New("Error registering functions: " + text)
		}
		for _, r := range s.registered {
			f := r.Function // without the callback, which is the sandbox's
			l.Functions = append(l.Functions, &f)
		}
		return s.end(err)
	})
	if err != nil {
		return nil, err
	}
	if len(l.Functions) == 0 {
		return nil, errors.New("No functions registered")
	}
	slices.SortFunc(l.Functions, func(a, b *Function) int { return strings.Compare(a.Name, b.Name) })
	return l, nil
}

// Call calls a function of a library; otherwise it is Run.
func (p *Pool) Call(t *Task, l *Library, name string, keys, args [][]byte, w *resp.Writer) (ok bool) {
	p.with(func(s *sandbox) bool {
		s.begin(t, functionChunk)
		err := s.loadLibrary(l)
		if err == nil {
			err = s.callFunction(name, keys, args)
		}
		err = s.reply(err, name, w)
		ok = err == nil
		return s.end(err)
	})
	return ok
}

// loadLibrary runs a library's source, which sees nothing but what it needs to register functions.
func (s *sandbox) loadLibrary(l *Library) error {
	meta := s.env.Metatable.(*lua.LTable)
	meta.RawSetString("__index", s.loading)
	defer meta.RawSetString("__index", s.globals)
	s.L.Push(s.newFunction(l.proto))
	return s.L.PCall(0, 0, nil)
}

// callFunction leaves the result of a registered function on the stack.
func (s *sandbox) callFunction(name string, keys, args [][]byte) error {
	i := slices.IndexFunc(s.registered, func(r registered) bool { return r.Name == name })
	if i < 0 {
		return errors.New("Function not found")
	}
	s.globals.RawSetString("redis", s.functionAPI)
	defer s.globals.RawSetString("redis", s.scriptAPI)
	s.L.Push(s.registered[i].callback)
	clear(s.registered)
	s.registered = s.registered[:0]
	s.L.Push(s.argTable(keys, 0))
	s.L.Push(s.argTable(args, len(keys)))
	return s.L.PCall(2, 1, nil)
}

// registerFunction is redis.register_function.
func (s *sandbox) registerFunction(L *lua.LState) int {
	var r registered
	var bad string
	switch L.GetTop() {
	case 1:
		r, bad = namedArguments(L)
	case 2:
		r, bad = placedArguments(L)
	default:
		bad = "wrong number of arguments to redis.register_function"
	}
	size := 0
	for _, o := range s.registered {
		size += len(o.Name) + len(o.Description)
		if o.Name == r.Name && bad == "" {
			bad = "Function already exists in the library"
		}
	}
	switch {
	case bad != "":
	case !isName(r.Name):
		bad = badName
	case len(s.registered) == maxRegistered:
		bad = fmt.Sprintf("kvd: library of more than %d functions", maxRegistered)
	case size+len(r.Name)+len(r.Description) > MaxSource:
		bad = fmt.Sprintf("kvd: names and descriptions of more than %s", units.Bytes(MaxSource))
	}
	if bad != "" {
		s.fail(L, bad)
	}
	s.registered = append(s.registered, r)
	return 0
}

func placedArguments(L *lua.LState) (r registered, bad string) {
	var is bool
	if r.Name, is = stringArgument(L.Get(1)); !is {
		return r, "first argument to redis.register_function must be a string"
	}
	if r.callback, is = L.Get(2).(*lua.LFunction); !is {
		return r, "second argument to redis.register_function must be a function"
	}
	return r, ""
}

// stringArgument is a string, or a number as one.
func stringArgument(v lua.LValue) (string, bool) {
	switch v.(type) {
	case lua.LString, lua.LNumber:
		return stringOf(v), true
	}
	return "", false
}

// namedArguments are looked at in the table's order, as far as Lua has one: of several that are wrong, any may be
// named.
func namedArguments(L *lua.LState) (r registered, bad string) {
	t, is := L.Get(1).(*lua.LTable)
	if !is {
		return r, "calling redis.register_function with a single argument is only applicable to Lua table " +
			"(representing named arguments)."
	}
	named := false
	for k, v := t.Next(lua.LNil); k != lua.LNil; k, v = t.Next(k) {
		key, is := stringArgument(k)
		if !is {
			return r, "named argument key given to redis.register_function is not a string"
		}
		switch strings.ToLower(key) {
		case "function_name":
			if r.Name, named = stringArgument(v); !named {
				return r, "function_name argument given to redis.register_function must be a string"
			}
		case "description":
			if r.Description, r.Described = stringArgument(v); !r.Described {
				return r, "description argument given to redis.register_function must be a string"
			}
		case "callback":
			if r.callback, is = v.(*lua.LFunction); !is {
				return r, "callback argument given to redis.register_function must be a function"
			}
		case "flags":
			flags, is := v.(*lua.LTable)
			if !is {
				return r, "flags argument to redis.register_function must be a table representing function flags"
			}
			if r.Flags, is = readFlags(flags); !is {
				return r, "unknown flag given"
			}
		default:
			return r, "unknown argument given to redis.register_function"
		}
	}
	switch {
	case !named:
		return r, "redis.register_function must get a function name argument"
	case r.callback == nil:
		return r, "redis.register_function must get a callback argument"
	}
	return r, ""
}

// readFlags puts the flags of a table in order; false: there is another one. It looks at the table itself, and not for
// long.
func readFlags(t *lua.LTable) (flags []string, ok bool) {
	given := make(map[string]bool)
	for i := 1; ; i++ {
		v := rawIndex(t, i)
		if v == lua.LNil {
			break
		}
		s, is := stringArgument(v)
		if s = strings.ToLower(s); !is || !slices.Contains(flagNames, s) {
			return nil, false
		}
		given[s] = true
	}
	for _, f := range flagNames {
		if given[f] {
			flags = append(flags, f)
		}
	}
	return flags, true
}
