package luascript

import lua "github.com/yuin/gopher-lua"

// threadCost is about what a coroutine takes.
const threadCost = 16 << 10

func (s *sandbox) coroutineLibrary(original *lua.LTable) library {
	create, wrap := original.RawGetString("create"), original.RawGetString("wrap")
	resume := original.RawGetString("resume").(*lua.LFunction).GFunction
	// A coroutine within a coroutine is a call in Go.
	checkDepth := func(L *lua.LState) {
		depth := 0
		for th := L.Parent; th != nil; th = th.Parent {
			if depth++; depth >= maxNested {
				L.RaiseError("C stack overflow")
			}
		}
	}
	begin := func(L *lua.LState, how lua.LValue) {
		f, is := L.Get(1).(*lua.LFunction)
		if !is || f.IsG {
			L.ArgError(1, "Lua function expected")
		}
		s.charge(L, threadCost)
		L.Push(how)
		L.Push(f)
		L.Call(1, 1)
		th, is := L.Get(-1).(*lua.LState)
		if w, wrapped := L.Get(-1).(*lua.LFunction); wrapped {
			th, is = w.Upvalues[0].Value().(*lua.LState)
			L.Pop(1)
			L.Push(L.NewClosure(func(L *lua.LState) int {
				checkDepth(L)
				s.calledBack = true
				return w.GFunction(L)
			}, th))
		}
		if !is {
			panic("gopher-lua: no thread in what coroutine.wrap returns")
		}
		th.SetContext(s) // else it would ask a context of its own, and nothing would be counted
		s.threads, s.starts = append(s.threads, th), append(s.starts, f)
	}
	return library{
		"create": func(L *lua.LState) int { begin(L, create); return 1 },
		"wrap":   func(L *lua.LState) int { begin(L, wrap); return 1 },
		"resume": func(L *lua.LState) int {
			if _, is := L.Get(1).(*lua.LState); !is {
				L.ArgError(1, "coroutine expected")
			}
			checkDepth(L)
			s.calledBack = true
			return resume(L)
		},
	}
}
