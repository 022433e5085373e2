package gateway

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/luascript"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/rdb"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Libraries of functions are in the store, so that all gateways of a database have the same ones: in database 0, under
// a name that users neither see nor touch (isReserved), in the form of FUNCTION DUMP. The commands that change them are
// staged: they read that key and write it if it is still the same. FCALL uses what the gateway has read up to
// libraryAge ago, and reads again before it says that there is no such function.

const (
	// libraryAge is for how long after a change FCALL at other gateways may still call the libraries of before.
	libraryAge = time.Second
	// maxLibraries bounds the bytes of all sources together.
	// All gateways load all libraries, so their sources together are bounded as a single one is.
	maxLibraries = luascript.MaxSource
	// loadTime bounds the time of FUNCTION LOAD's library, as in Redis, and loadMemory the bytes of a library's values
	// while it is loaded. They are not out of Options.Budget: a gateway loads one at a time.
	loadTime, loadMemory = 500 * time.Millisecond, 8 << 20
)

var librariesName = stagedName{DB: 0, Name: inside.FunctionsKey}

// functions is what a gateway knows of libraries.
// now is replaced as a whole, so that FCALL looks at it without a lock. changes is what makes FCALL at this gateway see
// the libraries that the same gateway has just changed, without waiting for libraryAge.
type functions struct {
	now      atomic.Pointer[librarySet] // as read last; nil: not yet
	changes  atomic.Uint64              // by this gateway; what was read before one does not count
	loading  chan struct{}              // capacity 1: holds an element while somebody loads libraries
	loadTime time.Duration              // loadTime, but for tests
}

// librarySet is the libraries of a time. It is not changed once others see it.
type librarySet struct {
	libraries map[string]*luascript.Library // by name
	functions map[string]function           // by name in lower case
	version   uint64                        // of the key; 0: there is none

	at      time.Time // when the key was read, or before
	changes uint64    // functions.changes then
}

// function is one, with its library.
// The zero value is no function; library is nil then.
type function struct {
	*luascript.Function
	library *luascript.Library
}

func newLibrarySet() *librarySet {
	return &librarySet{libraries: make(map[string]*luascript.Library), functions: make(map[string]function)}
}

// clone is a set that may be changed.
// Libraries themselves do not change, and are shared. version is left out: the clone is of no key.
func (s *librarySet) clone() *librarySet {
	return &librarySet{libraries: maps.Clone(s.libraries), functions: maps.Clone(s.functions)}
}

// find finds a function; its library is nil if there is none.
// Names of functions are the same in any case, those of libraries are not, as in Redis.
func (s *librarySet) find(name []byte) function { return s.functions[strings.ToLower(string(name))] }

// add adds a library unless one of its functions is there already; then it reports that one's name.
// There must be no library of that name. If taken is not empty nothing was added.
func (s *librarySet) add(l *luascript.Library) (taken string) {
	for _, f := range l.Functions {
		if s.find([]byte(f.Name)).library != nil {
			return f.Name
		}
	}
	s.libraries[l.Name] = l
	for _, f := range l.Functions {
		if name := strings.ToLower(f.Name); s.functions[name].library == nil {
			s.functions[name] = function{f, l}
		}
	}
	return ""
}

func (s *librarySet) remove(name string) {
	delete(s.libraries, name)
	maps.DeleteFunc(s.functions, func(_ string, f function) bool { return f.library.Name == name })
}

func (s *librarySet) sorted() []*luascript.Library {
	return slices.SortedFunc(maps.Values(s.libraries), func(a, b *luascript.Library) int {
		return strings.Compare(a.Name, b.Name)
	})
}

// payload is the libraries as FUNCTION DUMP has them.
// The order of names makes the payload of the same libraries the same bytes.
func (s *librarySet) payload() []byte {
	var sources [][]byte
	for _, l := range s.sorted() {
		sources = append(sources, []byte(l.Source))
	}
	return rdb.AppendLibraries(nil, sources)
}

// functionCaller is FCALL and FCALL_RO.
// It does not make the key of libraries a condition, which would have every call confirm it: a call may use the
// libraries of up to libraryAge ago.
func functionCaller(readOnly bool) stagedFunc {
	return func(t *staged, args [][]byte, w *resp.Writer) error {
		f, err := t.function(args[1])
		if err != nil {
			t.Err = err
			return nil
		}
		if f.library == nil {
			return refusal("ERR Function not found")
		}
		n, err := keysOfScript(args, "ERR Bad number of keys provided")
		switch {
		case err != nil:
			return err
		case readOnly && !f.NoWrites():
			return errScriptFlag
		}
		t.runScript(runningScript{name: f.Name, args: args}, true, f.NoWrites(), func(task *luascript.Task) bool {
			return t.c.g.scripts.pool.Call(task, f.library, f.Name, args[3:3+n], args[3+n:], w)
		})
		return nil
	}
}

// function finds a function; its library is nil if there is none.
// A name that is not there is looked for once more in the libraries as of now, so that a client that has just loaded
// one at another gateway finds it.
func (t *staged) function(name []byte) (f function, err error) {
	if t.Find[librariesName] != nil { // a command before has looked at it, or changed it
		set, _, ok := t.libraries()
		if !ok {
			return f, t.Err
		}
		return set.find(name), nil
	}
	for _, asOfNow := range []bool{false, true} {
		set, err := t.c.libraries(asOfNow)
		if err != nil {
			return f, err
		}
		if f = set.find(name); f.library != nil {
			return f, nil
		}
	}
	return f, nil
}

// functionLoad replies with the library's name. The library takes effect with all that is staged, at all gateways
// within libraryAge.
func functionLoad(t *staged, args [][]byte, w *resp.Writer) error {
	replace := false
	for p := values.OptionsOf(args[2 : len(args)-1]); p.More(); replace = true {
		if !p.Flag("replace") {
			return refusal("ERR Unknown option given: " + values.Clip(p.Str(), 4096))
		}
	}
	set, k, ok := t.libraries()
	if !ok {
		return nil
	}
	source := args[len(args)-1]
	name, err := luascript.LibraryName(source)
	if err == nil && !replace && set.libraries[name] != nil {
		err = errors.New("Library '" + name + "' already exists")
	}
	var l *luascript.Library
	if err == nil {
		unlock, lockErr := t.c.lockLoading()
		if lockErr != nil {
			t.Err = lockErr
			return nil
		}
		// A try that runs again, since another gateway has changed the libraries, loads it again: rare, and without
		// effects.
		l, err = t.c.load(source, t.c.g.functions.loadTime)
		unlock()
	}
	if err != nil {
		return refusal("ERR " + err.Error())
	}
	set.remove(name)
	if taken := set.add(l); taken != "" {
		return refusal("ERR Function " + taken + " already exists")
	}
	if err := setLibraries(k, set); err != nil {
		return err
	}
	w.BulkString(name)
	return nil
}

// functionDelete deletes a library with all its functions. Calls that are running go on.
func functionDelete(t *staged, args [][]byte, w *resp.Writer) error {
	set, k, ok := t.libraries()
	if !ok {
		return nil
	}
	name := string(args[2])
	if set.libraries[name] == nil {
		return refusal("ERR Library not found")
	}
	set.remove(name)
	if err := setLibraries(k, set); err != nil {
		return err
	}
	w.OK()
	return nil
}

// manyForFunction is the reply to a subcommand with too many arguments.
func manyForFunction(args [][]byte) refusal {
	return refusal("ERR unknown subcommand or wrong number of arguments for '" + values.Clip(args[1], 128) +
		"'. Try FUNCTION HELP.")
}

// functionFlush does not look into the libraries, so it also gets rid of ones that cannot be read.
func functionFlush(t *staged, args [][]byte, w *resp.Writer) error {
	switch p := values.OptionsOf(args[2:]); {
	case p.Left() > 1:
		return manyForFunction(args)
	case p.More() && !p.Flag("sync") && !p.Flag("async"):
		return refusal("ERR FUNCTION FLUSH only supports SYNC|ASYNC option")
	}
	k := t.librariesKey()
	if t.Failed() {
		return t.Err
	}
	if err := setLibraries(k, newLibrarySet()); err != nil {
		return err
	}
	w.OK()
	return nil
}

// functionRestore adds all libraries of a payload, or none. With FLUSH those that there are go, and are not looked
// into.
func functionRestore(t *staged, args [][]byte, w *resp.Writer) error {
	flush, replace := false, false
	switch p := values.OptionsOf(args[3:]); {
	case p.Left() > 1:
		return manyForFunction(args)
	case !p.More(), p.Flag("append"):
	case p.Flag("replace"):
		replace = true
	case p.Flag("flush"):
		flush = true
	default:
		return refusal("ERR Wrong restore policy given, value should be either FLUSH, APPEND or REPLACE.")
	}
	// The key is a condition with FLUSH, too, though nothing of it counts: its version is what the write compares.
	set, k, ok := newLibrarySet(), t.librariesKey(), !t.Failed()
	if ok && !flush {
		set, k, ok = t.libraries()
	}
	if !ok {
		return nil
	}
	unlock, err := t.c.lockLoading()
	if err != nil {
		t.Err = err
		return nil
	}
	more, err := t.c.loadAll(args[2], set)
	unlock()
	if err == nil {
		err = set.join(more, replace)
	}
	if err != nil {
		return refusal("ERR " + err.Error())
	}
	if err := setLibraries(k, set); err != nil {
		return err
	}
	w.OK()
	return nil
}

// join adds the libraries of another set.
// An error leaves the set half joined: it is dropped then. With replace, libraries of the same name go first, so that
// their functions are in nobody's way.
func (s *librarySet) join(more *librarySet, replace bool) error {
	for _, l := range more.sorted() {
		if s.libraries[l.Name] == nil {
			continue
		}
		if !replace {
			return errors.New("Library " + l.Name + " already exists")
		}
		s.remove(l.Name)
	}
	for _, l := range more.sorted() {
		if taken := s.add(l); taken != "" {
			return errors.New("Function " + taken + " already exists")
		}
	}
	return nil
}

// functionDump gives all libraries as FUNCTION RESTORE takes them, here and in Redis.
func functionDump(t *staged, _ [][]byte, w *resp.Writer) error {
	if set, _, ok := t.libraries(); ok {
		w.Bulk(set.payload())
	}
	return nil
}

// functionList lists libraries and functions in the order of their names.
func functionList(t *staged, args [][]byte, w *resp.Writer) error {
	var pattern []byte
	withCode := false
	for p := values.OptionsOf(args[2:]); p.More(); {
		switch {
		case !withCode && p.Flag("withcode"):
			withCode = true
		case pattern == nil && p.Flag("libraryname"):
			if !p.More() {
				return refusal("ERR library name argument was not given")
			}
			pattern = p.Str()
		default:
			return refusal("ERR Unknown argument " + values.Clip(p.Str(), 4096))
		}
	}
	set, _, ok := t.libraries()
	if !ok {
		return nil
	}
	list := set.sorted()
	if pattern != nil {
		pattern = lower(nil, pattern)
		list = slices.DeleteFunc(list, func(l *luascript.Library) bool {
			return !glob.Match(pattern, lower(nil, []byte(l.Name)))
		})
	}
	w.Array(len(list))
	for _, l := range list {
		writeLibrary(w, l, withCode)
	}
	return nil
}

// writeLibrary is a library in FUNCTION LIST, with the fields of Redis 7.0 in its order.
func writeLibrary(w *resp.Writer, l *luascript.Library, withCode bool) {
	if withCode {
		w.Map(4)
	} else {
		w.Map(3)
	}
	w.BulkString("library_name")
	w.BulkString(l.Name)
	w.BulkString("engine")
	w.BulkString("LUA")
	w.BulkString("functions")
	w.Array(len(l.Functions))
	for _, f := range l.Functions {
		w.Map(3)
		w.BulkString("name")
		w.BulkString(f.Name)
		w.BulkString("description")
		if f.Described {
			w.BulkString(f.Description)
		} else {
			w.Null()
		}
		w.BulkString("flags")
		w.Set(len(f.Flags))
		for _, flag := range f.Flags {
			w.Simple(flag)
		}
	}
	if withCode {
		w.BulkString("library_code")
		w.BulkString(l.Source)
	}
}

// functionStats shows the function of this gateway that began first, of those in databases that the user may work in.
func functionStats(t *staged, args [][]byte, w *resp.Writer) error {
	set, _, ok := t.libraries()
	if !ok {
		return nil
	}
	w.Map(2)
	w.BulkString("running_script")
	running := t.c.withOldest(args, true, func(r *runningScript) {
		w.Map(3)
		w.BulkString("name")
		w.BulkString(r.name)
		w.BulkString("command")
		w.Array(len(r.args))
		for _, a := range r.args {
			w.Bulk(a)
		}
		w.BulkString("duration_ms")
		w.Int(time.Since(r.since).Milliseconds())
	})
	if !running {
		w.Null()
	}
	functions := 0
	for _, l := range set.libraries {
		functions += len(l.Functions)
	}
	w.BulkString("engines")
	w.Map(1)
	w.BulkString("LUA")
	w.Map(2)
	w.BulkString("libraries_count")
	w.Int(int64(len(set.libraries)))
	w.BulkString("functions_count")
	w.Int(int64(functions))
	return nil
}
