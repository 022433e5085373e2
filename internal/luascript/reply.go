package luascript

import (
	"bytes"
	"strconv"
	"strings"

	lua "github.com/yuin/gopher-lua"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

// maxReplyDepth bounds how deep the tables of a script's result may be nested.
const maxReplyDepth = 1000

// writeSimple writes a result that is no table, and reports whether it was one.
func (s *sandbox) writeSimple(w *resp.Writer, v lua.LValue) bool {
	switch v := v.(type) {
	case lua.LString:
		w.BulkString(string(v))
	case lua.LNumber:
		w.Int(int64(truncated(float64(v))))
	case lua.LBool:
		switch {
		case s.proto == 3:
			w.Bool(bool(v))
		case bool(v):
			w.Int(1)
		default:
			w.Null()
		}
	case *lua.LTable:
		return false
	default:
		w.Null()
	}
	return true
}

// writeReply writes a script's result as Redis does: a table is what its field says (err, ok, double, map, set,
// big_number, verbatim_string), or else an array that ends before the first nil.
func (s *sandbox) writeReply(L *lua.LState, w *resp.Writer, v lua.LValue, depth int) {
	t, is := v.(*lua.LTable)
	if !is {
		text, _ := v.(lua.LString)
		s.chargeReply(L, w, len(text))
		s.writeSimple(w, v)
		return
	}
	if depth > maxReplyDepth {
		w.Error("ERR reached lua stack limit")
		return
	}
	s.chargeReply(L, w, 0)
	t = s.contents(t)
	if e, is := fieldString(t, "err"); is {
		s.chargeReply(L, w, len(e))
		w.Error(strings.TrimPrefix(e, "-"))
		return
	}
	if ok, is := fieldString(t, "ok"); is {
		s.chargeReply(L, w, len(ok))
		w.Simple(ok)
		return
	}
	if f, is := t.RawGetString("double").(lua.LNumber); is {
		w.Double(float64(f))
		return
	}
	if m, is := t.RawGetString("map").(*lua.LTable); is {
		n := 0
		m.ForEach(func(_, _ lua.LValue) { n++ })
		w.Map(n)
		m.ForEach(func(k, v lua.LValue) {
			s.writeReply(L, w, k, depth+1)
			s.writeReply(L, w, v, depth+1)
		})
		return
	}
	if set, is := t.RawGetString("set").(*lua.LTable); is {
		n := 0
		set.ForEach(func(_, _ lua.LValue) { n++ })
		w.Set(n)
		set.ForEach(func(k, _ lua.LValue) { s.writeReply(L, w, k, depth+1) })
		return
	}
	if n, is := fieldString(t, "big_number"); is {
		s.chargeReply(L, w, 2*len(n))
		w.BigNumber(strings.NewReplacer("\r", " ", "\n", " ").Replace(n))
		return
	}
	if text, is := t.RawGetString("verbatim_string").(*lua.LTable); is {
		str, ok := fieldString(text, "string")
		format, ok2 := fieldString(text, "format")
		if ok && ok2 {
			s.chargeReply(L, w, len(str)+len(format))
			w.Verbatim((format + "   ")[:3], str)
			return
		}
	}
	n := 0
	for rawIndex(t, n+1) != lua.LNil {
		n++
	}
	w.Array(n)
	for i := 1; i <= n; i++ {
		s.writeReply(L, w, rawIndex(t, i), depth+1)
	}
}

// chargeReply takes memory for n bytes of the reply that are about to be written, and for what is before them.
func (s *sandbox) chargeReply(L *lua.LState, w *resp.Writer, n int) {
	s.step(L)
	if more := w.Len() + n - s.replied; more > 1<<16 {
		s.work(L, n)
		s.grow(L, more+more/4) // a buffer that grows has more room than it needs
		s.replied += more
	}
}

// fieldString is a field that is a string.
func fieldString(t *lua.LTable, name string) (string, bool) {
	v, is := t.RawGetString(name).(lua.LString)
	return string(v), is
}

// replyValue makes a value of a reply, and returns what follows it. The reply is a command's, so its form is right.
func (s *sandbox) replyValue(L *lua.LState, b []byte) (lua.LValue, []byte) {
	end := bytes.IndexByte(b, '\r')
	head, rest := b[1:end], b[end+2:]
	switch b[0] {
	case '+':
		t := L.CreateTable(0, 1)
		t.RawSetString("ok", lua.LString(head))
		return t, rest
	case '-':
		return errorTable(L, string(head)), rest
	case ':':
		n, _ := strconv.ParseInt(string(head), 10, 64)
		return lua.LNumber(n), rest
	case '$':
		n, _ := strconv.Atoi(string(head))
		if n < 0 {
			return lua.LFalse, rest
		}
		s.grow(L, n+32)
		return lua.LString(rest[:n]), rest[n+2:]
	case '_':
		return lua.LNil, rest
	case '#':
		return lua.LBool(head[0] == 't'), rest
	case ',':
		f, _ := strconv.ParseFloat(string(head), 64)
		t := L.CreateTable(0, 1)
		t.RawSetString("double", lua.LNumber(f))
		return t, rest
	case '(':
		s.grow(L, len(head)+32)
		t := L.CreateTable(0, 1)
		t.RawSetString("big_number", lua.LString(head))
		return t, rest
	case '=':
		n, _ := strconv.Atoi(string(head))
		s.grow(L, n+2*tableCost)
		inner := L.CreateTable(0, 2)
		inner.RawSetString("format", lua.LString(rest[:3]))
		inner.RawSetString("string", lua.LString(rest[4:n]))
		t := L.CreateTable(0, 1)
		t.RawSetString("verbatim_string", inner)
		return t, rest[n+2:]
	}
	return s.replyTable(L, b[0], head, rest)
}

// replyTable is replyValue for arrays, maps and sets.
func (s *sandbox) replyTable(L *lua.LState, kind byte, head, rest []byte) (lua.LValue, []byte) {
	n, _ := strconv.Atoi(string(head))
	if n < 0 {
		return lua.LFalse, rest
	}
	var k, v lua.LValue
	t := L.CreateTable(0, 0)
	switch kind {
	case '%', '~':
		s.grow(L, tableCost+entryCost*n)
		name := "map"
		if kind == '~' {
			name = "set"
		}
		for range n {
			k, rest = s.replyValue(L, rest)
			v = lua.LTrue
			if kind == '%' {
				v, rest = s.replyValue(L, rest)
			}
			t.RawSet(k, v)
		}
		outer := L.CreateTable(0, 1)
		outer.RawSetString(name, t)
		return outer, rest
	}
	s.grow(L, 160+32*n)
	for i := range n {
		v, rest = s.replyValue(L, rest)
		t.RawSetInt(i+1, v)
	}
	return t, rest
}

// errorTable is an error as redis.pcall returns it; its text has no dash.
func errorTable(L *lua.LState, text string) *lua.LTable {
	t := L.CreateTable(0, 2)
	t.RawSetString("err", lua.LString(text))
	return t
}
