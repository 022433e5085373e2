// Package acl decides what a user of the gateway may do, by the rules of Redis's ACL. The rules
// speak of users with passwords, commands, patterns of keys, and selectors of these. In addition
// to those of Redis 7.0 a selector names databases (db=0,3; alldbs).
//
// It leaves to its caller connections, and the log of what was refused as clients see it. The caller
// also says which commands there are, and hands it a [Catalog]. Start with [Users], the users of one
// server, and [Rights], what one of them may do. Channel patterns are kept for tools and compared
// with nothing.
//
// All methods may be called concurrently. Rights never change: a User is given others. Passwords are
// kept as their SHA-256 alone. The rules are those of acl.c in Redis 7.0, whose error texts these are.
package acl

import (
	"fmt"
	"slices"
	"strings"
)

// Category is a set of Redis's categories of commands.
type Category uint32

// categoryNames are in Redis's order, which ACL CAT shows.
var categoryNames = [...]string{"keyspace", "read", "write", "set", "sortedset", "list", "hash", "string", "bitmap",
	"hyperloglog",
	"geo", "stream", "pubsub", "admin", "fast", "slow", "blocking", "dangerous", "connection", "transaction",
	"scripting"}

// Categories are the names of all categories, in the order in which ACL CAT shows them.
func Categories() []string { return slices.Clone(categoryNames[:]) }

// ParseCategory finds a category by its name in any case, without the @.
func ParseCategory(name string) (c Category, ok bool) {
	for i, n := range categoryNames {
		if strings.EqualFold(n, name) {
			return 1 << i, true
		}
	}
	return 0, false
}

// Names are the categories of the set.
func (c Category) Names() (names []string) {
	for i, n := range categoryNames {
		if c&(1<<i) != 0 {
			names = append(names, n)
		}
	}
	return names
}

// Command is something that rules can allow.
type Command struct {
	// Name is in lower case; that of a subcommand is "config|get".
	Name       string
	Categories Category
}

// Catalog is the commands that rules can name. A command's number is its place.
type Catalog struct {
	commands []Command
	byName   map[string]int
	subs     map[int][]int // of a container
}

// NewCatalog makes a Catalog that owns commands. A container comes before its subcommands.
func NewCatalog(commands []Command) (*Catalog, error) {
	c := &Catalog{commands: commands, byName: make(map[string]int, len(commands)), subs: make(map[int][]int)}
	for i, cmd := range commands {
		if _, twice := c.byName[cmd.Name]; twice {
			return nil, fmt.Errorf("command %q is there twice", cmd.Name)
		}
		c.byName[cmd.Name] = i
		if container, _, is := strings.Cut(cmd.Name, "|"); is {
			of, ok := c.byName[container]
			if !ok {
				return nil, fmt.Errorf("subcommand %q comes before its command", cmd.Name)
			}
			c.subs[of] = append(c.subs[of], i)
		}
	}
	return c, nil
}

// bits is a set of commands, by their numbers.
type bits []uint64

func (c *Catalog) none() bits { return make(bits, (len(c.commands)+63)/64) }

func (b bits) has(i int) bool { return i/64 < len(b) && b[i/64]>>(i%64)&1 != 0 }

func (b bits) put(i int, on bool) {
	if on {
		b[i/64] |= 1 << (i % 64)
	} else {
		b[i/64] &^= 1 << (i % 64)
	}
}

// Need is what a command does to a key's value, where %R and %W patterns tell it apart. The zero
// value is a look at the key that shows nothing of its value, which any pattern allows.
type Need uint8

const (
	NeedRead  Need = 1 << iota // returns or copies the value
	NeedWrite                  // changes, makes or deletes it
)

// Access is one command as it came, and what of it is to be checked. Nothing of it is kept.
type Access struct {
	Command int      // its number in the Catalog
	Args    [][]byte // the command's name and, of a subcommand, that one's come first
	// Open is a command that everybody may perform, such as AUTH.
	Open bool
	// First, Last and Step say which Args are keys; First 0: none are. Last is within Args.
	First, Last, Step int
	// Also are more of them, with First 0 none.
	Also Span
	// Needs is of the first key, NeedsLater of those behind it and of Also.
	Needs, NeedsLater Need
	// FirstChannel and LastChannel say which Args are channels, or with Patterns patterns of channels; FirstChannel 0:
	// none are.
	FirstChannel, LastChannel int
	Patterns                  bool
	// Databases is a set of those that the command works in, as of DB.
	Databases uint64
	// AllDatabases says that the command works in every database there is, or in one beyond 63.
	AllDatabases bool
}

// Use adds a database to those that the command works in.
func (a *Access) Use(db int) {
	a.Databases |= DB(db)
	a.AllDatabases = a.AllDatabases || db >= MaxDatabases
}

// Span is every Step-th argument from First to Last.
type Span struct{ First, Last, Step int }

// MaxDatabases is how many databases rules can name.
const MaxDatabases = 64

// DB is the set of one database; 0 if it is beyond MaxDatabases, see Access.AllDatabases.
func DB(n int) uint64 {
	if n < 0 || n >= MaxDatabases {
		return 0
	}
	return 1 << n
}

// Denial says why a command is refused. A later value is of a command that came further.
type Denial uint8

const (
	Allowed        Denial = iota
	DeniedCommand         // the user may not perform the command
	DeniedDatabase        // not in this database
	DeniedKey             // not on this key
	DeniedChannel         // not on this channel
	DeniedAuth            // a wrong password or user
)

var denialNames = [...]string{"allowed", "command", "database", "key", "channel", "auth"}

// String is the reason as ACL LOG has it.
func (d Denial) String() string { return denialNames[d] }
