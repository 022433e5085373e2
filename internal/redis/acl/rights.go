package acl

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/glob"
)

// Rights are what a user may do. They never change.
type Rights struct {
	on, noPass bool
	payload    string // Redis's flag sanitize-payload or skip-sanitize-payload, kept as it was said
	passwords  []digest
	selectors  []*selector // the first is the user's own; a command needs one that allows all of it
	// unlimited says that a selector allows every command in every database on every key, and anyChannel that such a
	// one allows every channel, too.
	unlimited, anyChannel bool
}

// digest is the SHA-256 of a password.
type digest [sha256.Size]byte

// selector is a set of commands on a set of keys in a set of databases.
type selector struct {
	allCommands bool // those to come, too
	commands    bits
	firstArgs   map[int][]string // allowed for a command that is not: +select|0
	rules       []string         // that led to commands, as ACL GETUSER shows them
	allKeys     bool
	keys        []pattern
	allChannels bool
	channels    []string
	allDBs      bool
	dbs         uint64 // a set, as of DB
}

// pattern is a glob of keys, and what may be done to them.
type pattern struct {
	glob  string
	allow Need
}

const needAll = NeedRead | NeedWrite

func (p pattern) String() string {
	switch p.allow {
	case NeedRead:
		return "%R~" + p.glob
	case NeedWrite:
		return "%W~" + p.glob
	}
	return "~" + p.glob
}

// newSelector allows no command and no key, in all databases.
func newSelector(c *Catalog) *selector {
	return &selector{commands: c.none(), rules: []string{"-@all"}, allDBs: true}
}

// newRights are those of a user that has just been made: off, without a password, and nothing allowed.
func newRights(c *Catalog) *Rights { return &Rights{selectors: []*selector{newSelector(c)}} }

// openRights are those of user default while nothing is configured.
func openRights(c *Catalog) *Rights {
	r := newRights(c)
	r.on, r.noPass = true, true
	s := r.selectors[0]
	s.allowAll(c, true)
	s.allKeys, s.allChannels = true, true
	return r.seal()
}

func (s *selector) clone() *selector {
	t := *s
	t.commands = slices.Clone(s.commands)
	t.firstArgs = maps.Clone(s.firstArgs)
	t.rules, t.keys, t.channels = slices.Clone(s.rules), slices.Clone(s.keys), slices.Clone(s.channels)
	return &t
}

func (r *Rights) clone() *Rights {
	t := *r
	t.passwords = slices.Clone(r.passwords)
	t.selectors = nil
	for _, s := range r.selectors {
		t.selectors = append(t.selectors, s.clone())
	}
	return &t
}

// seal ends the making of Rights.
func (r *Rights) seal() *Rights {
	r.unlimited, r.anyChannel = false, false
	for _, s := range r.selectors {
		all := s.allCommands && s.allKeys && s.allDBs
		r.unlimited = r.unlimited || all
		r.anyChannel = r.anyChannel || all && s.allChannels
	}
	return r
}

// Unlimited reports whether Check allows everything, of commands that name no channel.
func (r *Rights) Unlimited() bool { return r.unlimited }

// AnyChannel reports whether Check allows everything.
func (r *Rights) AnyChannel() bool { return r.anyChannel }

// AllowsChannel reports whether a selector allows a channel, or a pattern of channels.
func (r *Rights) AllowsChannel(channel string, isPattern bool) bool {
	for _, s := range r.selectors {
		if s.allowsChannel([]byte(channel), isPattern) {
			return true
		}
	}
	return false
}

// Enabled reports whether the user may authenticate.
func (r *Rights) Enabled() bool { return r.on }

// Open reports whether the user needs no password.
func (r *Rights) Open() bool { return r.on && r.noPass }

// accepts compares in constant time, and with every password, so that the time it takes tells nothing
// about them but their number.
func (r *Rights) accepts(d digest) bool {
	found := 0
	for i := range r.passwords {
		found |= subtle.ConstantTimeCompare(r.passwords[i][:], d[:])
	}
	return r.on && (r.noPass || found == 1)
}

// ReadsAllKeys reports whether a selector allows all of the command, and reading every key besides.
func (r *Rights) ReadsAllKeys(a *Access) bool {
	return r.unlimited || slices.ContainsFunc(r.selectors, func(s *selector) bool {
		all := s.allKeys || slices.ContainsFunc(s.keys, func(p pattern) bool {
			return p.glob == "*" && p.allow&NeedRead != 0
		})
		why, _ := s.check(a)
		return all && why == Allowed
	})
}

// ReadsPrefix reports whether selectors let the user read all keys of a database that begin with prefix. A pattern does
// if it ends with a star and matches the prefix itself; those that do together, or otherwise, do not count.
func (r *Rights) ReadsPrefix(prefix string, db int) bool {
	return r.unlimited || slices.ContainsFunc(r.selectors, func(s *selector) bool {
		return (s.allDBs || s.dbs&DB(db) != 0) && (s.allKeys || slices.ContainsFunc(s.keys, func(p pattern) bool {
			return p.allow&NeedRead != 0 && glob.MatchAll([]byte(p.glob), []byte(prefix))
		}))
	})
}

// Check reports whether a selector allows all of the command. If none does, why is the reason of the
// selector that allows most of it. at is the argument that is refused: the command, or a key.
func (r *Rights) Check(a *Access) (why Denial, at int) {
	if r.anyChannel || r.unlimited && a.FirstChannel == 0 {
		return Allowed, 0
	}
	for _, s := range r.selectors {
		d, i := s.check(a)
		if d == Allowed {
			return Allowed, 0
		}
		if d > why || d == why && i > at {
			why, at = d, i
		}
	}
	return why, at
}

func (s *selector) check(a *Access) (Denial, int) {
	switch {
	case s.allCommands, a.Open, s.commands.has(a.Command):
	case len(a.Args) > 1 && s.allowsFirstArg(a.Command, a.Args[1]):
	default:
		return DeniedCommand, 0
	}
	if !s.allDBs && (a.AllDatabases || a.Databases&^s.dbs != 0) {
		return DeniedDatabase, 0
	}
	if !s.allKeys && a.First != 0 {
		need := a.Needs
		for i := a.First; i <= a.Last; i += a.Step {
			if !s.allowsKey(a.Args[i], need) {
				return DeniedKey, i
			}
			need = a.NeedsLater
		}
	}
	if a.FirstChannel != 0 {
		for i := a.FirstChannel; i <= a.LastChannel; i++ {
			if !s.allowsChannel(a.Args[i], a.Patterns) {
				return DeniedChannel, i
			}
		}
	}
	if also := a.Also; !s.allKeys && also.First > 0 {
		for i := also.First; i <= also.Last; i += also.Step {
			if !s.allowsKey(a.Args[i], a.NeedsLater) {
				return DeniedKey, i
			}
		}
	}
	return Allowed, 0
}

// allowsChannel takes a pattern only if it is among the rules word by word, as Redis does: which channels two patterns
// have in common is not asked.
func (s *selector) allowsChannel(channel []byte, isPattern bool) bool {
	if s.allChannels {
		return true
	}
	for _, p := range s.channels {
		if isPattern && p == string(channel) || !isPattern && glob.Match([]byte(p), channel) {
			return true
		}
	}
	return false
}

func (s *selector) allowsFirstArg(command int, arg []byte) bool {
	for _, x := range s.firstArgs[command] {
		if strings.EqualFold(x, string(arg)) {
			return true
		}
	}
	return false
}

func (s *selector) allowsKey(key []byte, need Need) bool {
	for _, p := range s.keys {
		if p.allow&need == need && glob.Match([]byte(p.glob), key) {
			return true
		}
	}
	return false
}

// SelectorInfo is a selector in the words of its rules.
type SelectorInfo struct {
	Commands  string // "-@all +get"
	Keys      string // "~a:* %R~b:*"
	Channels  string // "&*"
	Databases string // "db=0,3"; empty: all
}

// Info is a user in the words of its rules.
type Info struct {
	Flags     []string // "on", "nopass"
	Passwords []string // SHA-256, hexadecimal
	Selectors []SelectorInfo
}

// Info describes r. Its first selector is the user's own.
func (r *Rights) Info() (in Info) {
	in.Flags = []string{"off"}
	if r.on {
		in.Flags[0] = "on"
	}
	if r.noPass {
		in.Flags = append(in.Flags, "nopass")
	}
	if r.payload != "" {
		in.Flags = append(in.Flags, r.payload)
	}
	for _, d := range r.passwords {
		in.Passwords = append(in.Passwords, hex.EncodeToString(d[:]))
	}
	for _, s := range r.selectors {
		in.Selectors = append(in.Selectors, s.info())
	}
	return in
}

func (s *selector) info() (in SelectorInfo) {
	in.Commands = strings.Join(s.rules, " ")
	var words []string
	for _, k := range s.keys {
		words = append(words, k.String())
	}
	if in.Keys = strings.Join(words, " "); s.allKeys {
		in.Keys = "~*"
	}
	words = nil
	for _, c := range s.channels {
		words = append(words, "&"+c)
	}
	if in.Channels = strings.Join(words, " "); s.allChannels {
		in.Channels = "&*"
	}
	if s.allDBs {
		return in
	}
	words = nil
	for n := range MaxDatabases {
		if s.dbs&DB(n) != 0 {
			words = append(words, strconv.Itoa(n))
		}
	}
	in.Databases = "db=" + strings.Join(words, ",")
	return in
}

// rulesText is the selector as rules that make it of a new one.
func (in SelectorInfo) rulesText() string {
	channels := in.Channels
	if channels != "&*" {
		channels = strings.TrimSpace("resetchannels " + channels)
	}
	words := slices.DeleteFunc([]string{in.Keys, channels, in.Databases, in.Commands}, func(w string) bool {
		return w == ""
	})
	return strings.Join(words, " ")
}

// Line is the user as a line of a file of users, and of ACL LIST.
func (r *Rights) Line(name string) string {
	in := r.Info()
	words := append([]string{"user", name}, in.Flags...)
	for _, p := range in.Passwords {
		words = append(words, "#"+p)
	}
	words = append(words, in.Selectors[0].rulesText())
	for _, s := range in.Selectors[1:] {
		words = append(words, "("+s.rulesText()+")")
	}
	return strings.Join(words, " ")
}
