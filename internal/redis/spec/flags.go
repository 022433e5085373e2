package spec

// Flags are Redis's flags of a command.
type Flags uint32

// The flags, in the order in which COMMAND has them.
const (
	FlagWrite Flags = 1 << iota
	FlagReadonly
	FlagDenyoom
	FlagModule
	FlagAdmin
	FlagPubsub
	FlagNoscript
	FlagBlocking
	FlagLoading
	FlagStale
	FlagSkipMonitor
	FlagSkipSlowlog
	FlagAsking
	FlagFast
	FlagNoAuth
	FlagNoMandatoryKeys
	FlagNoAsyncLoading
	FlagNoMulti
	FlagMovablekeys
	FlagAllowBusy
)

var flagNames = [...]string{"write", "readonly", "denyoom", "module", "admin", "pubsub", "noscript", "blocking",
	"loading", "stale", "skip_monitor", "skip_slowlog", "asking", "fast", "no_auth",
	"no_mandatory_keys", "no_async_loading", "no_multi", "movablekeys", "allow_busy"}

// Names are the flags as COMMAND has them.
func (f Flags) Names() (names []string) {
	for i, name := range flagNames {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// Traits are what else is true of a command, here.
type Traits uint32

// The traits.
const (
	AtOnce         Traits = 1 << iota // performed at once after MULTI too
	Swift                             // not on keys, and still done in no time
	WhileListening                    // for connections of RESP2 that are subscribed, too; these may give no others
	InSteps                           // changes keys one after the other: not for transactions and scripts
	BySha                             // runs a script that the gateway has
	MayWrite                          // runs what may write, and is no write itself
	MayReplicate                      // CLIENT PAUSE WRITE holds it up, as what writes
	NotInScripts                      // Redis lets scripts have it, and a gateway does not
	Libraries                         // works on libraries of functions, in the database where they are
	WholeDatabase                     // works in the database of SELECT without naming keys
	AllDatabases                      // works in all databases
	DatabaseOption                    // works in the database behind an option DB, too
	Misses                            // tells of a key that it does not find, though it is no lookup
	Silent                            // does not tell of it, though it is one
)
