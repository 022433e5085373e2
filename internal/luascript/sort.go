package luascript

import (
	"fmt"
	"sort"

	lua "github.com/yuin/gopher-lua"
)

// tableSort is table.sort, which the time limit ends in the middle.
func (s *sandbox) tableSort(L *lua.LState) int {
	t := L.CheckTable(1)
	x := &sorter{s: s, L: L}
	if L.GetTop() > 1 && L.Get(2) != lua.LNil {
		x.less = L.CheckFunction(2)
	}
	n := t.Len()
	defer s.resetPending(s.pending)
	s.grow(L, 16*n)
	x.values = make([]lua.LValue, n)
	for i := range x.values {
		x.values[i] = rawIndex(t, i+1)
	}
	sort.Sort(x)
	for i, v := range x.values {
		t.RawSetInt(i+1, v)
	}
	return 0
}

// sorter is of sort.Interface.
type sorter struct {
	s      *sandbox
	L      *lua.LState
	less   *lua.LFunction // nil: <
	values []lua.LValue
}

func (x *sorter) Len() int      { return len(x.values) }
func (x *sorter) Swap(i, j int) { x.values[i], x.values[j] = x.values[j], x.values[i] }

func (x *sorter) Less(i, j int) bool {
	x.s.step(x.L)
	a, b := x.values[i], x.values[j]
	if x.less != nil {
		x.L.Push(x.less)
		x.L.Push(a)
		x.L.Push(b)
		x.s.callNested(x.L, 2, 1)
		is := lua.LVAsBool(x.L.Get(-1))
		x.L.Pop(1)
		return is
	}
	switch a := a.(type) {
	case lua.LNumber:
		if b, is := b.(lua.LNumber); is {
			return a < b
		}
	case lua.LString:
		if b, is := b.(lua.LString); is {
			x.s.work(x.L, min(len(a), len(b)))
			return a < b
		}
	}
	switch {
	case a.Type() != b.Type():
		x.s.raise(x.L, fmt.Sprintf("attempt to compare %v with %v", a.Type(), b.Type()))
	case x.L.GetMetaField(a, "__lt") == lua.LNil:
		x.s.raise(x.L, fmt.Sprintf("attempt to compare two %v values", a.Type()))
	}
	return x.L.LessThan(a, b)
}
