package luascript

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	lua "github.com/yuin/gopher-lua"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

// Host performs what a script asks for. A run calls it from a single goroutine.
type Host interface {
	// Call performs a command and returns its reply in the given version of RESP, which is valid until the next call.
	// The arguments are the Host's. An error is the script's, which has no command's reply then.
	Call(args [][]byte, proto int) (reply []byte, err error)
	// Permits reports whether the script's user may perform a command; known is false if there is no such command.
	Permits(args [][]byte) (permitted, known bool)
	// Log writes a message of redis.log, at its level: 0 (debug) to 3 (warning).
	Log(level int, text string)
	// Reserve takes memory that is given back when the script is over.
	Reserve(bytes int64) error
	// Stopped reports whether the script may as well end, since nothing of what it does will be done.
	Stopped() bool
}

// Reasons for which a script is stopped.
const (
	goesOn int32 = iota
	outOfTime
	outOfMemory
	killed
	noUse // see Host.Stopped
)

var stopTexts = [...]string{"", "Script ran for longer than script-timeout", "Script takes more than script-memory",
	"Script killed by user with SCRIPT KILL.", "the store failed"}

// Names of the chunks that scripts and libraries are, as errors show them.
const scriptChunk, functionChunk = "user_script", "user_function"

// Task is one call of a script, however often it runs until it has had its effect. Its fields are not changed once it
// runs.
type Task struct {
	Host Host
	// Memory bounds the bytes of a run's values.
	Memory int64
	// Function says that it is a function of a library, which FUNCTION KILL ends.
	Function bool

	stop  atomic.Int32
	timer *time.Timer
}

// Start begins the time that the task has for all its runs.
func (t *Task) Start(limit time.Duration) {
	t.timer = time.AfterFunc(limit, t.TimeOut)
}

// TimeOut makes the script end because its time is over, for callers that watch the time of many tasks instead of
// calling Start. It may be called from any goroutine.
func (t *Task) TimeOut() { t.stop.CompareAndSwap(goesOn, outOfTime) }

// End is to be called when the task is over.
func (t *Task) End() {
	if t.timer != nil {
		t.timer.Stop()
	}
}

// stopText is the error for a reason.
func (t *Task) stopText(reason int32) string {
	if reason == killed && t.Function {
		return "Script killed by user with FUNCTION KILL."
	}
	return stopTexts[reason]
}

// Kill makes the script end with an error. It may be called from any goroutine.
func (t *Task) Kill() { t.stop.CompareAndSwap(goesOn, killed) }

// Pool keeps interpreters between runs. The zero value is ready to use.
type Pool struct{ idle sync.Pool }

// Run runs a program and appends its one reply, in w's version of RESP. Keys and arguments are copied. It reports
// whether the script came to its end; else the reply is the error that ended it, and the caller undoes what it did.
func (p *Pool) Run(t *Task, prog *Program, keys, args [][]byte, w *resp.Writer) (ok bool) {
	p.with(func(s *sandbox) (clean bool) {
		ok, clean = s.run(t, prog, keys, args, w)
		return clean
	})
	return ok
}

// with lends an interpreter to f, which says whether it is as good as new afterwards.
func (p *Pool) with(f func(s *sandbox) (clean bool)) {
	s, _ := p.idle.Get().(*sandbox)
	if s == nil {
		s = newSandbox()
	}
	if f(s) {
		p.idle.Put(s)
	}
}

const (
	// instructionCost is charged for each instruction, for the small values that it may make.
	instructionCost = 64
	// tableCost is about what a table takes with its first named field, entryCost each further one.
	tableCost, entryCost = 2048, 120
	// lookEvery is the least that is charged between two looks at how much memory the values really take.
	lookEvery = 1 << 20
	// freeBytes need not be reserved.
	freeBytes = 512 << 10
	// keepBytes is the most that an interpreter that goes back to the pool may have been charged.
	keepBytes = 4 << 20
)

// sandbox is an interpreter with the libraries of Redis. It is the context of its own LState: the interpreter asks Done
// before each instruction, and that is where time and memory are looked at.
type sandbox struct {
	L       *lua.LState
	env     *lua.LTable // empty, so that every access asks its metatable
	globals *lua.LTable
	real    map[*lua.LTable]*lua.LTable // tables of libraries, by what scripts see of them
	null    *lua.LUserData              // cjson.null
	// Scripts see these as the metatables of globals and of strings.
	globalMeta, stringMeta *lua.LTable
	// The global redis of scripts and of functions, and the globals while a library is loaded.
	scriptAPI, functionAPI, loading *lua.LTable

	registered []registered // by the library that is loaded

	// Runs share these, which none of them can change.
	lastMain *lua.LFunction // of the last program
	lastArgs [lastArgs]lua.LValue
	room     chunk

	task    *Task
	chunk   string
	proto   int // for replies of redis.call
	where   string
	thrown  lua.LValue // by error, at where
	seed    uint64
	threads []*lua.LState
	starts  []*lua.LFunction
	jdepth  jsonLimits
	nested  int // calls of pcall and the like within each other
	// calledBack: since the last pcall began a function of a library has called one of the script.
	calledBack bool

	charged int64 // what values take, at most
	next    int64 // where to look again
	pending int64 // of values that functions of Go are making, which nothing of the script refers to yet
	held    int64 // reserved from the Host
	steps   int
	worked  int // bytes, since the last look at the time
	replied int // bytes of the reply that memory was taken for, and of what was before it
}

var closedChan = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// Deadline is of context.Context; there is none.
func (s *sandbox) Deadline() (time.Time, bool) { return time.Time{}, false }

// Value is of context.Context.
func (s *sandbox) Value(any) any { return nil }

// Err says why the script is stopped.
func (s *sandbox) Err() error {
	if r := s.task.stop.Load(); r != goesOn {
		return errors.New(s.task.stopText(r))
	}
	return nil
}

var _ context.Context = (*sandbox)(nil)

// Done is asked before each instruction.
func (s *sandbox) Done() <-chan struct{} {
	if s.charged += instructionCost; s.charged >= s.next {
		s.lookAtMemory(0)
	}
	if s.task.stop.Load() != goesOn {
		return closedChan
	}
	return nil
}

// charge takes memory for a value that is about to be made, or ends the script.
func (s *sandbox) charge(L *lua.LState, n int) {
	if s.charged += int64(n); s.charged >= s.next {
		s.lookAtMemory(int64(n))
	}
	s.goOn(L)
}

// grow is charge for a part of a value that is not finished. The function that makes it resets pending when it is over.
func (s *sandbox) grow(L *lua.LState, n int) {
	s.pending += int64(n)
	if s.charged += int64(n); s.charged >= s.next {
		s.lookAtMemory(0)
	}
	s.goOn(L)
}

// resetPending is what such a function defers, with pending as it was before.
func (s *sandbox) resetPending(before int64) { s.pending = before }

// goOn ends the script if it has been stopped. Loops of Go call it, as they run no instructions.
func (s *sandbox) goOn(L *lua.LState) {
	if r := s.task.stop.Load(); r != goesOn {
		L.RaiseError("%s", s.task.stopText(r))
	}
}

// step is goOn for loops whose rounds take no time worth to mention.
func (s *sandbox) step(L *lua.LState) {
	if s.steps++; s.steps&255 == 0 {
		s.goOn(L)
	}
}

// lookAtMemory replaces the estimate by what the values take, and the n bytes that a value is about to.
func (s *sandbox) lookAtMemory(n int64) {
	t := s.task
	if t.Host.Stopped() {
		t.stop.CompareAndSwap(goesOn, noUse)
		return
	}
	live := n + s.pending
	if live <= t.Memory {
		live += s.liveBytes()
	}
	if live > t.Memory {
		t.stop.CompareAndSwap(goesOn, outOfMemory)
		return
	}
	s.charged = live
	s.next = live + max(lookEvery, live/8)
	if want := s.next - freeBytes; want > s.held {
		if t.Host.Reserve(want-s.held) != nil {
			t.stop.CompareAndSwap(goesOn, outOfMemory)
			return
		}
		s.held = want
	}
}

// Fields of gopher-lua's tables that tell how much memory they have, filled or not. TestTableFields holds them.
var tableFields = func() (f struct{ array, dict, strdict, keys int }) {
	t := reflect.TypeFor[lua.LTable]()
	for name, at := range map[string]*int{"array": &f.array, "dict": &f.dict, "strdict": &f.strdict, "keys": &f.keys} {
		field, ok := t.FieldByName(name)
		if !ok {
			panic("gopher-lua: its tables have no field " + name)
		}
		*at = field.Index[0]
	}
	return f
}()

// keyPlaces is where a table has the keys that are not in its array, also of values that are gone. TestTableFields
// holds it.
var keyPlaces = func() uintptr {
	field, ok := reflect.TypeFor[lua.LTable]().FieldByName("k2i")
	if !ok || field.Type != reflect.TypeFor[map[lua.LValue]int]() {
		panic("gopher-lua: its tables have no field k2i")
	}
	return field.Offset
}()

// hasKey reports whether a key has been in a table: next goes on from it, even if it was removed meanwhile.
func hasKey(t *lua.LTable, k lua.LValue) bool {
	if n, is := k.(lua.LNumber); is && n >= 1 && n == lua.LNumber(int(n)) {
		if int(n) <= reflect.ValueOf(t).Elem().Field(tableFields.array).Cap() {
			return true
		}
	}
	_, ok := (*(*map[lua.LValue]int)(unsafe.Add(unsafe.Pointer(t), keyPlaces)))[k]
	return ok
}

// arrayLen is the length of a table's array, with nils at its end.
func arrayLen(t *lua.LTable) int { return reflect.ValueOf(t).Elem().Field(tableFields.array).Len() }

// tableBytes is about what a table takes by itself.
func tableBytes(t *lua.LTable) int64 {
	v := reflect.ValueOf(t).Elem()
	n := 160 + 16*int64(v.Field(tableFields.array).Cap())
	if keys := v.Field(tableFields.keys).Cap(); keys > 0 {
		n += tableCost - 160 + entryCost*int64(
			max(keys, v.Field(tableFields.dict).Len()+v.Field(tableFields.strdict).Len()))
	}
	return n
}

// liveBytes adds up the values that the script can still reach.
func (s *sandbox) liveBytes() int64 {
	w := walk{seen: make(map[unsafe.Pointer]struct{})}
	w.addThread(s.L)
	threads, starts := s.threads[:0], s.starts[:0]
	for i, th := range s.threads {
		if !th.Dead {
			w.bytes += 4096
			w.addThread(th)
			w.addValue(s.starts[i])
			threads, starts = append(threads, th), append(starts, s.starts[i])
		}
	}
	clear(s.threads[len(threads):])
	clear(s.starts[len(starts):])
	s.threads, s.starts = threads, starts
	w.addValue(s.globals.RawGetString("KEYS"))
	w.addValue(s.globals.RawGetString("ARGV"))
	for _, r := range s.registered {
		w.addValue(r.callback)
	}
	for len(w.todo) > 0 {
		t := w.todo[len(w.todo)-1]
		w.todo = w.todo[:len(w.todo)-1]
		w.addValue(t.Metatable)
		t.ForEach(func(k, v lua.LValue) {
			w.addValue(k)
			w.addValue(v)
		})
	}
	return w.bytes
}

// walk visits each value once.
type walk struct {
	seen  map[unsafe.Pointer]struct{}
	todo  []*lua.LTable
	bytes int64
}

// first reports whether a value has not been visited.
func (w *walk) first(p unsafe.Pointer) bool {
	if _, ok := w.seen[p]; ok {
		return false
	}
	w.seen[p] = struct{}{}
	return true
}

func (w *walk) addThread(th *lua.LState) {
	for level := 0; ; level++ {
		d, ok := th.GetStack(level)
		if !ok {
			return
		}
		if f, err := th.GetInfo("f", d, lua.LNil); err == nil {
			w.addValue(f)
		}
		for i := 1; ; i++ {
			name, v := th.GetLocal(d, i)
			if name == "" {
				break
			}
			w.bytes += 16
			w.addValue(v)
		}
	}
}

// addProto adds what the code of a function takes, and of those within it, which may be counted again.
func (w *walk) addProto(p *lua.FunctionProto) {
	if p == nil || !w.first(unsafe.Pointer(p)) {
		return
	}
	w.bytes += int64(protoBytes(p))
}

func (w *walk) addValue(v lua.LValue) {
	switch v := v.(type) {
	case lua.LString:
		w.bytes += 16
		// Short ones are counted wherever they are; it would cost more to remember them.
		if len(v) <= 64 || w.first(unsafe.Pointer(unsafe.StringData(string(v)))) {
			w.bytes += int64(len(v))
		}
	case *lua.LTable:
		if w.first(unsafe.Pointer(v)) {
			w.bytes += tableBytes(v)
			w.todo = append(w.todo, v)
		}
	case *lua.LFunction:
		if v != nil && w.first(unsafe.Pointer(v)) {
			w.bytes += 128 + 64*int64(len(v.Upvalues))
			w.addProto(v.Proto)
			for _, u := range v.Upvalues {
				if u != nil {
					w.addValue(u.Value())
				}
			}
		}
	}
}

// begin prepares the interpreter for a run.
func (s *sandbox) begin(t *Task, chunk string) {
	s.task, s.chunk, s.proto, s.where, s.thrown, s.seed = t, chunk, 2, "", nil, rand.Uint64()&(1<<48-1)
	s.charged, s.next, s.pending, s.held, s.nested, s.steps, s.worked = 0, lookEvery, 0, 0, 0, 0, 0
	s.threads, s.starts = s.threads[:0], s.starts[:0]
	s.jdepth = defaultJSONLimits
}

// end forgets what a run has left. clean reports whether the interpreter is as good as new.
func (s *sandbox) end(err error) (clean bool) {
	s.L.SetTop(0)
	s.globals.RawSetString("KEYS", lua.LNil)
	s.globals.RawSetString("ARGV", lua.LNil)
	clear(s.registered)
	s.registered = s.registered[:0]
	s.task, s.thrown = nil, nil
	return err == nil && s.charged < keepBytes && s.held == 0
}

// newFunction makes a function of what was compiled.
func (s *sandbox) newFunction(proto *lua.FunctionProto) *lua.LFunction {
	f := s.L.NewFunctionFromProto(proto)
	f.Env = s.env
	return f
}

// run runs a program; see Pool.Run. clean reports whether the interpreter is as good as new afterwards.
func (s *sandbox) run(t *Task, prog *Program, keys, args [][]byte, w *resp.Writer) (ok, clean bool) {
	s.begin(t, scriptChunk)
	if s.lastMain == nil || s.lastMain.Proto != prog.proto {
		s.lastMain = s.newFunction(prog.proto)
	}
	s.globals.RawSetString("KEYS", s.argTable(keys, 0))
	s.globals.RawSetString("ARGV", s.argTable(args, len(keys)))
	s.L.Push(s.lastMain)
	err := s.reply(s.L.PCall(0, 1, nil), prog.SHA, w)
	return err == nil, s.end(err)
}

// reply writes what the function that has returned, or failed, has to say.
func (s *sandbox) reply(err error, name string, w *resp.Writer) error {
	start, errs := w.Len(), w.Errors
	s.replied = start
	if err == nil {
		result := s.L.Get(-1)
		text, long := result.(lua.LString)
		if long = long && len(text) > 1<<16; long || !s.writeSimple(w, result) {
			err = s.L.GPCall(func(L *lua.LState) int {
				defer s.resetPending(s.pending)
				s.writeReply(L, w, L.Get(1), 0)
				return 0
			}, result)
		}
	}
	if err != nil {
		w.Truncate(start)
		w.Errors = errs
		text, line := s.errorText(err)
		w.Error(text + " script: " + name + ", on " + line + ".")
	}
	return err
}

// lastArgs is how many of a run's arguments are kept for the next run, lastArgBytes how long they may be: the script is
// most often called with the same ones again.
const lastArgs, lastArgBytes = 8, 64

// argTable is KEYS or ARGV, in front of which a run has before arguments.
func (s *sandbox) argTable(args [][]byte, before int) *lua.LTable {
	t := s.L.CreateTable(len(args), 0)
	n := 0
	for i, a := range args {
		t.Append(s.argValue(a, before+i))
		n += len(a) + 32
	}
	s.charged += int64(n)
	return t
}

// argValue is the i-th argument of a run.
func (s *sandbox) argValue(a []byte, i int) lua.LValue {
	if i >= lastArgs || len(a) > lastArgBytes {
		return lua.LString(a)
	}
	if last, is := s.lastArgs[i].(lua.LString); !is || string(last) != string(a) {
		s.lastArgs[i] = lua.LString(a)
	}
	return s.lastArgs[i]
}

// chunk is memory of which many small pieces are taken, each of them once.
type chunk struct {
	bytes  []byte
	slices [][]byte
}

const chunkBytes, chunkSlices = 1 << 10, 64

// takeBytes is no bytes, with room for n.
func (c *chunk) takeBytes(n int) []byte {
	if n > chunkBytes/4 {
		return make([]byte, 0, n)
	}
	if len(c.bytes) < n {
		c.bytes = make([]byte, chunkBytes)
	}
	b := c.bytes[:0:n]
	c.bytes = c.bytes[n:]
	return b
}

// takeSlices is n slices.
func (c *chunk) takeSlices(n int) [][]byte {
	if n > chunkSlices/4 {
		return make([][]byte, n)
	}
	if len(c.slices) < n {
		c.slices = make([][]byte, chunkSlices)
	}
	list := c.slices[:n:n]
	c.slices = c.slices[n:]
	return list
}

// errorText is what ended a script, and where.
func (s *sandbox) errorText(err error) (text, line string) {
	line = s.where
	var e *lua.ApiError
	if !errors.As(err, &e) {
		text = "ERR " + err.Error()
	} else if t, is := e.Object.(*lua.LTable); is {
		msg, isString := t.RawGetString("err").(lua.LString)
		if text = string(msg); !isString {
			text = "ERR unknown error"
		}
		if l, is := t.RawGetString("line").(lua.LNumber); is && s.thrown != lua.LValue(t) {
			line = "@" + s.chunk + ":" + numberString(l)
		}
	} else {
		msg := s.translate(e.Object)
		text = "ERR " + stringOf(msg)
		if r := s.task.stop.Load(); r != goesOn {
			text = "ERR " + s.task.stopText(r)
		}
		if m := positioned.FindStringSubmatch(stringOf(msg)); m != nil {
			line = "@" + m[1] + ":" + m[2]
		}
	}
	if line == "" {
		line = "@" + s.chunk + ":1"
	}
	return strings.TrimPrefix(text, "-"), line
}
