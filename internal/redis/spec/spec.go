// Package spec says what Redis's commands are: their arguments, the keys among these, their effects on keys, and all
// that COMMAND tells of them. It performs none.
//
// Start with [Command] and [Table]. commands.jsonl describes the commands, a line each, and `make generate` makes Table
// and the constants of [ID] from it. A fact of a command stands in its line and nowhere else. Flags, tips, key
// specifications and arguments are Redis's, as COMMAND has them; traits are ours. Lines leave out what follows from
// others of their words, as categories follow from most flags.
//
// Table does not change, so any goroutine may read it. The idea is Valkey's src/commands.
package spec

// ID is a command's place in [Table]. Numbers are of this program alone: nothing stores or sends them.
type ID uint16

// Command is what there is to know of a command, or of a subcommand ("config|get").
type Command struct {
	Name  string // lower case
	ID    ID
	Arity int // with the name, as in COMMAND: negative is "at least"

	// First, Last and Step say which arguments are keys, as in COMMAND.
	First, Last, Step int
	// Counted is the place of an argument that says how many keys follow it, 0: none. First is then the key before it,
	// if there is one.
	Counted int
	// Finder says which arguments are keys, or what becomes of them, where options decide that. The numbers above are
	// then for COMMAND. Options begin at argument From.
	Finder Finder
	From   int
	// Access is the first key's, and LaterAccess that of those behind it. It is without what options may add.
	Access, LaterAccess Access

	Flags  Flags
	Traits Traits
	Kind   Kind // what one such command asks of the store; 0: it is not on one key
	Fold   Fold // how the replies for several keys make one
	Put    Put  // a write that may be a put
	Part   Part // which bytes of a long value it needs
	Plain  bool // it replies with the plain value, or that part

	Channels Channels // which arguments are channels
	Database int      // argument that is the number of a database that it works in, too; 0: none
	Event    Event    // of a key that it changes
	Secret   Secret   // arguments that nobody is shown

	Categories []string // of ACL rules, without @
	Group      string   // of COMMAND DOCS
	Instead    string   // what serves its purpose; of a command that is not served
	Doc        *Doc     // never nil
}

// Is reports whether the command has a trait.
func (c *Command) Is(t Traits) bool { return c.Traits&t != 0 }

// Has reports whether the command has a flag.
func (c *Command) Has(f Flags) bool { return c.Flags&f != 0 }

// Writes reports whether the command may change a key.
func (c *Command) Writes() bool { return c.Has(FlagWrite) || c.Is(MayWrite) }

// Doc is what only those are told who ask.
type Doc struct {
	Summary   string
	Since     string   // version of Redis; empty: it has no such command
	Flags     []string // of COMMAND DOCS
	Tips      []string
	Keys      []Key
	Arguments []Argument
	Help      []string // lines of a subcommand HELP, but for the first and the last two
}

// Key is a key specification, as COMMAND has them. At most one of Index and Keyword is set; without them Redis does not
// know where keys are.
type Key struct {
	Notes    string
	Flags    []string
	Index    int    // argument where keys begin
	Keyword  string // argument before them
	From     int    // where Keyword is looked for first
	Numbered bool   // the number of keys is at their begin, and they follow it
	// Last is the last key, counted from the first one on, or, negative, from the end on. Each Step-th argument is one.
	// Only a Limit-th part of the arguments may be keys: 2 is a half.
	Last, Step, Limit int
}

// Argument is an argument, or several, as COMMAND DOCS has them.
type Argument struct {
	Name, Type, Token string
	Key               int // number of its key specification, from 1 on; 0: it is no key
	Since, Deprecated string
	Flags             []string
	Arguments         []Argument
}

// Access is what a command does to the value of a key; 0: it shows nothing of it.
type Access uint8

// Kinds of Access.
const (
	Reads Access = 1 << iota
	Changes
)

// Kind is what a command on one key asks of the store, from the cheapest on. Several commands on a key ask for the
// least kind that does for all. Reads stay reads. Puts stay puts: the last one counts, and no reply depends on the
// others. All else is an update, which may run several times.
type Kind uint8

// Kinds of commands on one key.
const (
	Presence  Kind = 1 + iota // that there is one, its version and expiry; no use is noted
	ReadValue                 // a Get of nothing but a plain value; of a collection, that there is one
	Read                      // version, expiry, flags and type, too, of any value
	PutValue                  // replies do not depend on what was there
	PutIf                     // alone on its key; replies say whether the condition held
	Remove                    // alone on its key
	Update                    // reads, and writes if it is still what was read
)

// Looks reports whether the kind is of commands that count as hit or miss.
func (k Kind) Looks() bool { return k >= Presence && k <= Read }

// Fold says how a command's replies for its keys make one.
type Fold uint8

// Ways of folding.
const (
	Single Fold = iota // it is on one key
	List               // an array of them
	Sum                // the sum of what was counted
	SetAll             // OK
)

// Put is of writes that most often need not see what was there.
type Put uint8

// Puts. The zero value is a command that is none.
const (
	PutSet    Put = 1 + iota // SET, whose options decide
	PutSetnx                 // if there is none
	PutPsetex                // with an expiry in milliseconds
	PutSetex                 // in seconds
)

// Part says which bytes of a long value a command needs. The zero value is all of them.
type Part uint8

// Parts of a value.
const (
	PartLength Part = 1 + iota // none: how many there are
	PartRange                  // those between two arguments
	PartBit                    // the byte with a bit
)

// Finder says how keys are found, where options decide that.
type Finder uint8

// Ways to find keys.
const (
	FindSet          Finder = 1 + iota // the key is read with the option GET
	FindBitfield                       // the key is only read if all operations are GET
	FindStore                          // behind STORE and STOREDIST, too
	FindSort                           // behind STORE, too
	FindStreams                        // behind STREAMS
	FindGroupStreams                   // behind STREAMS, which may be a group's name
)

// Channels says which arguments are channels.
type Channels uint8

// Places of channels.
const (
	NoChannels       Channels = iota
	ChannelsFirst             // the first one
	ChannelsAll               // all of them
	ChannelsPatterns          // all of them, and they are patterns
)

// Event is what a command's change of a key is called. The zero value is of commands that have none, or that name each
// by itself.
type Event struct {
	Class byte // letter of notify-keyspace-events
	Name  string
}

// Secret says which arguments are secret. First 0: none. Without a Word all of them from First on are secret. With one
// these are the Count arguments behind each Word, which stands at First or a multiple of Step behind it.
type Secret struct {
	First, Step, Count int
	Word               string
}

// Hides reports whether the argument i is secret. It goes by the places of words and nothing else, since a wrong
// command may hold a password, too. is compares words in any case.
func (s *Secret) Hides(args [][]byte, i int, is func(b []byte, word string) bool) bool {
	if s.First == 0 || s.Word == "" {
		return s.First > 0 && i >= s.First
	}
	for n := 1; n <= s.Count; n++ {
		if at := i - n; at >= s.First && (at-s.First)%s.Step == 0 && is(args[at], s.Word) {
			return true
		}
	}
	return false
}
