package luascript

import (
	"crypto/sha1"
	"encoding/hex"
	"io"
	"strings"

	lua "github.com/yuin/gopher-lua"
)

// RedisVersion is what scripts see as redis.REDIS_VERSION.
const RedisVersion, redisVersionNum = "7.0.15", 0x07000f

// scriptsOnly are in the table redis of scripts, and not in that of functions.
var scriptsOnly = library{
	// A script's effects are replicated by the store, whatever it says.
	"replicate_commands": func(L *lua.LState) int { L.Push(lua.LTrue); return 1 },
	// There is no debugger.
	"breakpoint": func(L *lua.LState) int { L.Push(lua.LFalse); return 1 },
	"debug":      func(*lua.LState) int { return 0 },
}

// redisTable is the global redis.
func (s *sandbox) redisTable() *lua.LTable {
	t := s.L.SetFuncs(s.L.NewTable(), library{
		"call":          func(L *lua.LState) int { return s.redisCall(L, true) },
		"pcall":         func(L *lua.LState) int { return s.redisCall(L, false) },
		"log":           s.redisLog,
		"sha1hex":       s.redisSHA,
		"error_reply":   s.errorReply,
		"status_reply":  statusReply,
		"acl_check_cmd": s.redisCheck,
		"setresp":       s.redisSetResp,
		"set_repl":      s.redisSetRepl,
	})
	for name, n := range map[string]int{"REPL_NONE": 0, "REPL_AOF": 1, "REPL_SLAVE": 2, "REPL_REPLICA": 2,
		"REPL_ALL": 3} {
		t.RawSetString(name, lua.LNumber(n))
	}
	addConstants(t)
	return t
}

// loadTable is the global redis while a library is loaded.
func (s *sandbox) loadTable() *lua.LTable {
	t := s.L.SetFuncs(s.L.NewTable(), library{"register_function": s.registerFunction, "log": s.redisLog})
	addConstants(t)
	return t
}

// addConstants adds those that every table redis has.
func addConstants(t *lua.LTable) {
	for name, n := range map[string]int{"LOG_DEBUG": 0, "LOG_VERBOSE": 1, "LOG_NOTICE": 2, "LOG_WARNING": 3,
		"REDIS_VERSION_NUM": redisVersionNum} {
		t.RawSetString(name, lua.LNumber(n))
	}
	t.RawSetString("REDIS_VERSION", lua.LString(RedisVersion))
}

// fail raises an error of the table redis.
func (s *sandbox) fail(L *lua.LState, text string) {
	s.raiseTable(L, errorTable(L, "ERR "+text))
}

// commandArgs are the arguments of redis.call; the host may keep them.
func (s *sandbox) commandArgs(L *lua.LState) (args [][]byte, bad string) {
	n := L.GetTop()
	if n == 0 {
		return nil, "Please specify at least one argument for this redis lib call"
	}
	size := 0
	for i := 1; i <= n; i++ {
		switch v := L.Get(i).(type) {
		case lua.LString:
			size += len(v)
		case lua.LNumber:
			size += 24
		default:
			return nil, "Lua redis lib command arguments must be strings or integers"
		}
	}
	s.charge(L, size+24*n)
	args, all := s.room.takeSlices(n), s.room.takeBytes(size)
	for i := range args {
		at := len(all)
		switch v := L.Get(i + 1).(type) {
		case lua.LString:
			all = append(all, v...)
		case lua.LNumber:
			all = append(all, formatG(float64(v), 17)...)
		}
		args[i] = all[at:len(all):len(all)]
	}
	return args, ""
}

// redisCall performs a command. An error of the command is one of the script if it raises.
func (s *sandbox) redisCall(L *lua.LState, raises bool) int {
	var v lua.LValue
	var reply []byte
	args, bad := s.commandArgs(L)
	called := bad == ""
	if called {
		var err error
		if reply, err = s.task.Host.Call(args, s.proto); err != nil {
			bad = err.Error()
		}
		if s.task.Host.Stopped() {
			s.task.stop.CompareAndSwap(goesOn, noUse)
		}
		s.goOn(L)
		if bad == "" {
			defer s.resetPending(s.pending)
			v, _ = s.replyValue(L, reply)
			raises = raises && reply[0] == '-'
		}
	} else {
		bad = "ERR " + bad
	}
	if bad != "" {
		v = errorTable(L, bad)
	}
	if t, is := v.(*lua.LTable); is && called && (bad != "" || reply[0] == '-') {
		t.RawSetString("ignore_error_stats_update", lua.LTrue)
	}
	if t, is := v.(*lua.LTable); is && raises && t.RawGetString("err") != lua.LNil {
		s.raiseTable(L, t)
	}
	L.Push(v)
	return 1
}

func (s *sandbox) redisLog(L *lua.LState) int {
	n := L.GetTop()
	if n < 2 {
		s.fail(L, "redis.log() requires two arguments or more.")
	}
	level, ok := toNumber(L.Get(1))
	if !ok {
		s.fail(L, "First argument must be a number (log level).")
	}
	if level < 0 || level > 3 {
		s.fail(L, "Invalid debug level.")
	}
	var words []string
	size := 0
	for i := 2; i <= n; i++ {
		if lua.LVCanConvToString(L.Get(i)) {
			words = append(words, stringOf(L.Get(i)))
			size += len(words[len(words)-1]) + 1
		}
	}
	s.charge(L, 4*size) // for who writes the log, too
	s.task.Host.Log(int(level), strings.Join(words, " "))
	return 0
}

func (s *sandbox) redisSHA(L *lua.LState) int {
	if L.GetTop() != 1 {
		s.fail(L, "wrong number of arguments")
	}
	text := ""
	if lua.LVCanConvToString(L.Get(1)) {
		text = stringOf(L.Get(1))
	}
	h := sha1.New()
	for rest := text; rest != ""; {
		n := min(len(rest), workBytes)
		_, _ = io.WriteString(h, rest[:n]) // never fails
		rest = rest[n:]
		s.work(L, n)
	}
	L.Push(lua.LString(hex.EncodeToString(h.Sum(nil))))
	return 1
}

const errReplyArgs = "ERR wrong number or type of arguments"

// errorReply makes an error whose code is its first word, ERR if it has only one.
func (s *sandbox) errorReply(L *lua.LState) int {
	text, is := L.Get(1).(lua.LString)
	if !is || L.GetTop() != 1 {
		L.Push(errorTable(L, errReplyArgs))
		return 1
	}
	e := strings.TrimPrefix(string(text), "-")
	if !strings.Contains(e, " ") {
		s.charge(L, len(e))
		e = "ERR " + e
	}
	L.Push(errorTable(L, e))
	return 1
}

func statusReply(L *lua.LState) int {
	text, is := L.Get(1).(lua.LString)
	if !is || L.GetTop() != 1 {
		L.Push(errorTable(L, errReplyArgs))
		return 1
	}
	t := L.CreateTable(0, 1)
	t.RawSetString("ok", text)
	L.Push(t)
	return 1
}

func (s *sandbox) redisCheck(L *lua.LState) int {
	args, bad := s.commandArgs(L)
	if bad != "" {
		s.fail(L, bad)
	}
	permitted, known := s.task.Host.Permits(args)
	if !known {
		s.fail(L, "Invalid command passed to redis.acl_check_cmd()")
	}
	L.Push(lua.LBool(permitted))
	return 1
}

func (s *sandbox) redisSetResp(L *lua.LState) int {
	if L.GetTop() != 1 {
		s.fail(L, "redis.setresp() requires one argument.")
	}
	n, _ := toNumber(L.Get(1))
	if n != 2 && n != 3 {
		s.fail(L, "RESP version must be 2 or 3.")
	}
	s.proto = int(n)
	return 0
}

func (s *sandbox) redisSetRepl(L *lua.LState) int {
	if L.GetTop() != 1 {
		s.fail(L, "redis.set_repl() requires two arguments.")
	}
	if n, _ := toNumber(L.Get(1)); n < 0 || n > 3 {
		s.fail(L, "Invalid replication flags. Use REPL_AOF, REPL_REPLICA, REPL_ALL or REPL_NONE.")
	}
	return 0
}
