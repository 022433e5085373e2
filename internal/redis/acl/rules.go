package acl

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// These are Redis's words, since tools and people look for them.
var (
	errSyntax   = errors.New("Syntax error")
	errUnknown  = errors.New("Unknown command or category name in ACL")
	errAfterAll = errors.New("Adding a pattern after the * pattern (or the 'allkeys' flag) is not valid and does " +
		"not have any effect. Try 'resetkeys' to start with an empty list of patterns")
	errAfterAllChan = errors.New("Adding a pattern after the * pattern (or the 'allchannels' flag) is not valid and " +
		"does not have any effect. Try 'resetchannels' to start with an empty list of channels")
	errNoPassword = errors.New("The password you are trying to remove from the user does not exist")
	errBadHash    = errors.New("The password hash must be exactly 64 characters and contain only lowercase " +
		"hexadecimal characters")
	errFirstArg = errors.New("Allowing first-arg of a subcommand is not supported")
	errDatabase = fmt.Errorf("Want db=N,N,... with databases from 0 to %d, or alldbs", MaxDatabases-1)
)

// RuleError is a rule that will not do.
type RuleError struct {
	Rule string // as it was given, but nothing of a password
	At   int    // its place among the rules, from 1 on
	Err  error  // Redis's words
}

func (e *RuleError) Error() string { return "'" + e.Rule + "': " + e.Err.Error() }
func (e *RuleError) Unwrap() error { return e.Err }

// UnmatchedError is a selector without its end.
type UnmatchedError struct{ Rule string }

func (e *UnmatchedError) Error() string {
	return "Unmatched parenthesis in acl selector starting at '" + e.Rule + "'."
}

// apply gives Rights changed by rules, in their order, or the first rule that will not do.
func (r *Rights) apply(c *Catalog, rules []string) (*Rights, error) {
	rules, err := joinSelectors(rules)
	if err != nil {
		return nil, err
	}
	t := r.clone()
	for i, rule := range rules {
		if err := t.applyRule(c, rule); err != nil {
			return nil, &RuleError{withoutSecret(rule), i + 1, err}
		}
	}
	return t.seal(), nil
}

// joinSelectors makes one rule of a selector that came in several arguments, as people without quotes
// send it.
func joinSelectors(rules []string) (out []string, err error) {
	from := -1
	for i, rule := range rules {
		switch {
		case from < 0 && strings.HasPrefix(rule, "(") && !strings.HasSuffix(rule, ")"):
			from = i
		case from < 0:
			out = append(out, rule)
		case strings.HasSuffix(rule, ")"):
			out = append(out, strings.Join(rules[from:i+1], " "))
			from = -1
		}
	}
	if from >= 0 {
		return nil, &UnmatchedError{withoutSecret(rules[from])}
	}
	return out, nil
}

// withoutSecret is a rule for an error: all of it, unless it has a password in it.
func withoutSecret(rule string) string {
	switch {
	case rule != "" && strings.ContainsRune("><#!", rune(rule[0])):
		return rule[:1] + "..."
	case strings.HasPrefix(rule, "(") && strings.ContainsAny(rule, "><#!"):
		return "(..."
	case len(rule) > 128:
		return rule[:128] + "..."
	}
	return rule
}

// applyRule applies a rule about the user; others are about its own selector.
func (r *Rights) applyRule(c *Catalog, rule string) error {
	switch strings.ToLower(rule) {
	case "on":
		r.on = true
		return nil
	case "off":
		r.on = false
		return nil
	case "nopass":
		r.noPass, r.passwords = true, nil
		return nil
	case "resetpass":
		r.noPass, r.passwords = false, nil
		return nil
	case "sanitize-payload", "skip-sanitize-payload":
		r.payload = strings.ToLower(rule)
		return nil
	case "clearselectors":
		r.selectors = r.selectors[:1]
		return nil
	case "reset":
		*r = *newRights(c)
		r.payload = "sanitize-payload"
		return nil
	case "":
		return errSyntax
	}
	switch rule[0] {
	case '>', '#':
		d, err := digestOf(rule)
		if err != nil {
			return err
		}
		r.noPass = false
		if !slices.Contains(r.passwords, d) {
			r.passwords = append(r.passwords, d)
		}
		return nil
	case '<', '!':
		d, err := digestOf(rule)
		if err != nil {
			return err
		}
		i := slices.Index(r.passwords, d)
		if i < 0 {
			return errNoPassword
		}
		r.passwords = slices.Delete(r.passwords, i, i+1)
		return nil
	case '(':
		s := newSelector(c)
		for _, x := range strings.Fields(rule[1 : len(rule)-1]) {
			if err := s.applyRule(c, x); err != nil {
				return err
			}
		}
		r.selectors = append(r.selectors, s)
		return nil
	}
	return r.selectors[0].applyRule(c, rule)
}

// digestOf is the digest in a rule about a password, or of the password in it.
func digestOf(rule string) (d digest, err error) {
	if rule[0] == '>' || rule[0] == '<' {
		return sha256.Sum256([]byte(rule[1:])), nil
	}
	text := rule[1:]
	if len(text) != 2*len(d) || strings.ToLower(text) != text {
		return d, errBadHash
	}
	if _, err := hex.Decode(d[:], []byte(text)); err != nil {
		return d, errBadHash
	}
	return d, nil
}

// hasSpace reports whether s would be two words, or no word, in a file of users.
func hasSpace(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f })
}

func (s *selector) applyRule(c *Catalog, rule string) error {
	switch strings.ToLower(rule) {
	case "allkeys", "~*":
		s.allKeys, s.keys = true, nil
		return nil
	case "resetkeys":
		s.allKeys, s.keys = false, nil
		return nil
	case "allchannels", "&*":
		s.allChannels, s.channels = true, nil
		return nil
	case "resetchannels":
		s.allChannels, s.channels = false, nil
		return nil
	case "allcommands", "+@all":
		s.allowAll(c, true)
		return nil
	case "nocommands", "-@all":
		s.allowAll(c, false)
		return nil
	case "alldbs":
		s.allDBs, s.dbs = true, 0
		return nil
	case "":
		return errSyntax
	}
	switch {
	case rule[0] == '~':
		return s.addKeys(rule[1:], needAll)
	case rule[0] == '%':
		return s.applyKeys(rule[1:])
	case rule[0] == '&':
		return s.addChannels(rule[1:])
	case rule[0] == '+' || rule[0] == '-':
		return s.applyCommand(c, rule[1:], rule[0] == '+')
	case len(rule) >= 3 && strings.EqualFold(rule[:3], "db="):
		return s.applyDatabases(rule[3:])
	}
	return errSyntax
}

// applyKeys is for %R~pattern, %W~pattern and %RW~pattern, without the %.
func (s *selector) applyKeys(rule string) error {
	how, glob, found := strings.Cut(rule, "~")
	allow := Need(0)
	for _, c := range how {
		switch c {
		case 'r', 'R':
			allow |= NeedRead
		case 'w', 'W':
			allow |= NeedWrite
		default:
			return errSyntax
		}
	}
	if !found || allow == 0 {
		return errSyntax
	}
	return s.addKeys(glob, allow)
}

func (s *selector) addKeys(glob string, allow Need) error {
	switch {
	case s.allKeys:
		return errAfterAll
	case hasSpace(glob):
		return errSyntax
	}
	for i := range s.keys {
		if s.keys[i].glob == glob {
			s.keys[i].allow |= allow
			return nil
		}
	}
	s.keys = append(s.keys, pattern{glob, allow})
	return nil
}

func (s *selector) addChannels(glob string) error {
	switch {
	case s.allChannels:
		return errAfterAllChan
	case hasSpace(glob):
		return errSyntax
	case !slices.Contains(s.channels, glob):
		s.channels = append(s.channels, glob)
	}
	return nil
}

// applyDatabases replaces the databases: a first db= would otherwise have to take away all of them, and a
// second one none.
func (s *selector) applyDatabases(list string) error {
	set := uint64(0)
	for x := range strings.SplitSeq(list, ",") {
		n, err := strconv.ParseUint(x, 10, 8)
		if err != nil || n >= MaxDatabases {
			return errDatabase
		}
		set |= DB(int(n))
	}
	s.allDBs, s.dbs = false, set
	return nil
}

// allowAll is +@all and -@all.
func (s *selector) allowAll(c *Catalog, on bool) {
	s.allCommands, s.firstArgs = on, nil
	for i := range c.commands {
		s.commands.put(i, on)
	}
	s.rules = []string{"-@all"}
	if on {
		s.rules = []string{"+@all"}
	}
}

// applyCommand is for a rule about a command or a category, without its sign.
func (s *selector) applyCommand(c *Catalog, rule string, on bool) error {
	rule = strings.ToLower(rule)
	if name, is := strings.CutPrefix(rule, "@"); is {
		cat, ok := ParseCategory(name)
		if !ok {
			return errUnknown
		}
		for i, cmd := range c.commands {
			if cmd.Categories&cat != 0 {
				s.put(i, on)
			}
		}
		s.addRule(rule, on)
		return nil
	}
	i, ok := c.byName[rule]
	if !ok {
		return s.applyFirstArg(c, rule, on)
	}
	s.put(i, on)
	for _, sub := range c.subs[i] {
		s.put(sub, on)
	}
	s.addRule(rule, on)
	return nil
}

// applyFirstArg is for +command|argument of a command without subcommands. It cannot be taken away: the
// rest of the command is not allowed anyway.
func (s *selector) applyFirstArg(c *Catalog, rule string, on bool) error {
	at := strings.LastIndexByte(rule, '|')
	if at < 0 || !on {
		return errUnknown
	}
	name, arg := rule[:at], rule[at+1:]
	i, ok := c.byName[name]
	switch {
	case !ok:
		return errUnknown
	case strings.Contains(name, "|"):
		return errFirstArg
	case arg == "":
		return errSyntax
	case len(c.subs[i]) > 0 || hasSpace(arg):
		return errUnknown
	}
	if s.firstArgs == nil {
		s.firstArgs = make(map[int][]string)
	}
	if !slices.Contains(s.firstArgs[i], arg) {
		s.firstArgs[i] = append(slices.Clone(s.firstArgs[i]), arg) // a clone shares it
	}
	s.addRule(rule, on)
	return nil
}

// put allows a command, or does not; first arguments of it mean nothing any more.
func (s *selector) put(i int, on bool) {
	s.commands.put(i, on)
	delete(s.firstArgs, i)
	s.allCommands = s.allCommands && on
}

// addRule records a rule, without those before it that it makes void.
func (s *selector) addRule(rule string, on bool) {
	s.rules = slices.DeleteFunc(s.rules, func(x string) bool {
		return x[1:] == rule || strings.HasPrefix(x[1:], rule+"|")
	})
	sign := "-"
	if on {
		sign = "+"
	}
	s.rules = append(s.rules, sign+rule)
}
