package values

import (
	"maps"
	"time"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

// Functions perform commands on keys, and are found by the command's name in lower case. Each file says which ones it
// has. All else about a command is in its description, which names no function.

// A KeyFunc is a command on one key: it appends its one reply and changes the key. An error is its reply instead.
// It depends on nothing else, and may run several times.
type KeyFunc func(k *Key, args [][]byte, w *resp.Writer) error

// A SeveralFunc is a command on several keys: it appends its one reply to w and changes keys of t. An error is its
// reply instead.
type SeveralFunc func(t Keys, args [][]byte, w *resp.Writer) error

// A WaitFunc reads the arguments of a command that may wait. It may keep them.
type WaitFunc func(args [][]byte) (Blocking, error)

// OneKey are the commands on one key. It does not change once the package is initialized, as the two behind it.
var OneKey = make(map[string]KeyFunc)

// SeveralKeys are those on several keys at once, but for scripts, libraries and those that may wait.
var SeveralKeys = make(map[string]SeveralFunc)

// WaitingFor are the readers of the arguments of those that may wait.
var WaitingFor = make(map[string]WaitFunc)

// These add the commands of a file, while variables are initialized.
func oneKey(some map[string]KeyFunc) (none struct{}) { maps.Copy(OneKey, some); return none }
func severalKeys(some map[string]SeveralFunc) (none struct{}) {
	maps.Copy(SeveralKeys, some)
	return none
}
func waitingFor(some map[string]WaitFunc) (none struct{}) { maps.Copy(WaitingFor, some); return none }

// Keys are what a command on several keys works on. All of its methods are about the one try that the command is a
// part of, and for its goroutine.
type Keys interface {
	// Key is the key of a name in the current database, read when it is first asked for. That it stays as it was read
	// is a condition of all that is written.
	Key(name []byte) *Key
	// KeyIn is a key of another database.
	KeyIn(db int, name []byte) *Key
	// Peek is Key without the condition.
	Peek(name []byte) *Key
	// Load reads keys together that the command may ask for. It makes no conditions.
	Load(names ...[]byte)
	// Possible reports whether a key may have such a name.
	Possible(name []byte) bool

	// Take takes n bytes of memory until all of it is over. Without them it gives all of it up.
	Take(n int64) bool
	// Fail gives all of it up, with that reply in the place of all others.
	Fail(reply ResultError)
	// Failure is why all of it was given up, nil if it was not. The command has no effect then.
	Failure() error

	// Name gives what the command does to a key an event of its own.
	Name(k *Key, class EventClass, event string)
	// Miss notes a name that led to no key.
	Miss(name []byte)

	// Current is the number of the database that names are of.
	Current() int
	// DBIndex reads the number of another one.
	DBIndex(b []byte) (db int, err error)
	// Together reports whether keys of that and the current one change in one step.
	Together(db int) bool
	// Waits reports whether the command goes on waiting if it finds nothing.
	Waits() bool
	// ReadsEverything reports whether the user of the command with these arguments may read every key by it.
	ReadsEverything(args [][]byte) bool
}

// Blocking is what a command that may wait asks for.
// It is made for each command, and its names are the command's arguments, which stay until the connection has replied.
type Blocking struct {
	Names   [][]byte      // that it waits for
	Timeout time.Duration // from the first try on; 0: for ever; NoWait: it does not wait
	// Line is which of those who wait for a key it is served in turn with: those who take what it takes.
	Line string
	// Reads: it has to look at its keys before it waits, whoever does so already. If it has no line nobody is in its
	// way afterwards, since it takes nothing.
	Reads bool
	// A transaction never waits. With One the reply to nothing is one value there, and no array.
	One bool
	// Try does it now, if it can, for the first of the given names that has something. It reports whether it replied,
	// unless the error is its reply. again says that the client has waited: a key of a wrong type is then like none, as
	// in Redis.
	Try func(t Keys, names [][]byte, again bool, w *resp.Writer) (found bool, err error)
}

// lineOfLists and lineOfZSets are the lines of those who wait for a list and for a sorted set. Readers of a stream have
// none, or their group's.
const lineOfLists, lineOfZSets = "list", "sorted set"

// NoWait is the timeout of a command that was not told to wait.
const NoWait = time.Duration(-1)

// ResultError is a reply that takes the place of all others.
// An EXEC, for one, replies it instead of the array. It is in Redis's form, with the class of the error first.
type ResultError string

func (e ResultError) Error() string { return string(e) }
