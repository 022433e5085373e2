package luascript

import (
	"regexp"
	"strings"

	lua "github.com/yuin/gopher-lua"
)

// Errors that scripts raise and catch: error, assert, pcall and xpcall.

func (s *sandbox) assert(L *lua.LState) int {
	if L.GetTop() == 0 {
		L.ArgError(1, "value expected")
	}
	if lua.LVAsBool(L.Get(1)) {
		return L.GetTop()
	}
	text := "assertion failed!"
	if L.Get(2) != lua.LNil {
		text = argString(L, 2)
	}
	s.charge(L, 4*len(text)) // what the interpreter makes of it
	L.RaiseError("%s", text)
	return 0
}

func (s *sandbox) throwError(L *lua.LState) int {
	level := optInt(L, 2, 1)
	s.where = position(L, 1)
	v := L.Get(1)
	s.thrown = v
	if lua.LVCanConvToString(v) && level > 0 {
		at := L.Where(level)
		if strings.HasPrefix(at, "[G]") {
			at = ""
		}
		if at != "" {
			at += " "
		}
		text := stringOf(v)
		s.charge(L, len(text))
		v = lua.LString(at + text)
	}
	L.Error(v, 0)
	return 0
}

func (s *sandbox) protectedCall(L *lua.LState) int {
	if L.GetTop() == 0 {
		L.ArgError(1, "value expected")
	}
	n, failed := s.try(L)
	if failed {
		// As in Redis, an error of redis.call is its text here; redis.pcall returns the table.
		if t, is := L.Get(-1).(*lua.LTable); is && lua.LVCanConvToString(t.RawGetString("err")) {
			L.Pop(1)
			L.Push(t.RawGetString("err"))
		}
	}
	return n
}

// try calls the first value on the stack with the others, and leaves whether that went well and what came of it.
func (s *sandbox) try(L *lua.LState) (results int, failed bool) {
	if s.nested >= maxNested {
		L.RaiseError("C stack overflow")
	}
	f, called := L.Get(1).(*lua.LFunction)
	if !called && L.GetMetaField(L.Get(1), "__call") == lua.LNil {
		text := "attempt to call a " + L.Get(1).Type().String() + " value"
		L.Push(lua.LFalse)
		L.Push(lua.LString(text))
		return 2, true
	}
	nested := s.nested
	s.nested++
	s.calledBack = false
	err := L.PCall(L.GetTop()-1, lua.MultRet, nil)
	s.nested = nested
	if err != nil {
		v := s.errorValue(err)
		if text, is := v.(lua.LString); is && called && f.IsG && !s.calledBack &&
			lua.LValue(f) != s.globals.RawGetString("error") {
			v = lua.LString(fromNowhere(string(text)))
		}
		s.calledBack = true // to whoever called this
		L.Push(lua.LFalse)
		L.Push(v)
		return 2, true
	}
	s.calledBack = true
	L.Insert(lua.LTrue, 1)
	return L.GetTop(), false
}

// fromNowhere is an error of a library's function that no line of the script calls, but pcall: then Lua knows neither
// the line nor the name.
func fromNowhere(text string) string {
	if at := positioned.FindString(text); at != "" {
		text = text[len(at):]
	}
	return calledName.ReplaceAllString(text, "bad argument #$1 to '?' (")
}

var calledName = regexp.MustCompile(`^bad argument #(\d+) to '?[^' ]+'? \(`)

// errorValue is what a script sees of an error.
func (s *sandbox) errorValue(err error) lua.LValue {
	if e, is := err.(*lua.ApiError); is && e.Object != nil {
		return s.translate(e.Object)
	}
	return lua.LString(err.Error())
}

// handledCall calls the handler when the stack is unwound already, which only debug.traceback could tell.
func (s *sandbox) handledCall(L *lua.LState) int {
	if L.GetTop() < 2 {
		L.ArgError(2, "value expected")
	}
	handler := L.Get(2)
	L.SetTop(1)
	n, failed := s.try(L)
	if !failed {
		return n
	}
	v := L.Get(-1)
	if t, is := v.(*lua.LTable); is && t.RawGetString("ignore_error_stats_update") != lua.LNil {
		t.RawSetString("source", lua.LNil) // which Redis adds to what nobody handles
		t.RawSetString("line", lua.LNil)
	}
	L.Push(lua.LFalse)
	L.Push(handler)
	L.Push(v)
	s.callNested(L, 1, 1)
	return 2
}
