package gateway

import (
	_ "embed"
	"slices"
	"strings"
	"sync"

	"github.com/kvd-project/kvd/internal/resp"
)

// keyFlagsText has the commands of Redis 7.0.15 by what they do with their keys, as the key specifications of COMMAND have it: with the
// first key, and behind a comma with those behind it. TestKeysAndFlags compares it with a redis-server.
//
//go:embed keyflags.txt
var keyFlagsText string

// keyFlags are the flags of each command's first key and of those behind it.
var keyFlags = sync.OnceValue(func() map[string][2][]string {
	all := make(map[string][2][]string)
	for line := range strings.Lines(keyFlagsText) {
		flags, names, _ := strings.Cut(line, ":")
		first, later, more := strings.Cut(flags, ",")
		if !more {
			later = first
		}
		for _, name := range strings.Fields(names) {
			all[name] = [2][]string{strings.Fields(first), strings.Fields(later)}
		}
	}
	return all
})

// flagsOfKeys are the flags of the keys among arguments, which for some commands depend on the others.
func flagsOfKeys(cmd *command, args [][]byte) (first, later []string) {
	flags := keyFlags()[cmd.name]
	if _, also := cmd.keySpans(args); cmd.name == "sort" && also.First > 0 {
		return flags[0], []string{"OW", "update"}
	}
	switch {
	case cmd.name == "set" && !slices.ContainsFunc(args[3:], func(a []byte) bool { return fold(a, "get") }):
		return []string{"OW", "update"}, nil
	case cmd.name == "bitfield" && onlyGets(args[2:]):
		return []string{"RO", "access"}, nil
	}
	return flags[0], flags[1]
}

// onlyGets reports whether BITFIELD's operations are all GET.
func onlyGets(ops [][]byte) bool {
	for len(ops) >= 3 && fold(ops[0], "get") {
		ops = ops[3:]
	}
	return len(ops) == 0
}

// keysOfCall are the keys of a whole command among args; false: it has replied why there are none.
func keysOfCall(w *resp.Writer, args [][]byte) (cmd *command, found [][]byte, ok bool) {
	cmd = find(args[0])
	if cmd != nil && cmd.sub != nil && len(args) > 1 {
		cmd = cmd.subcommand(args[1])
	}
	switch {
	case cmd == nil:
		w.Error("ERR Invalid command specified")
		return nil, nil, false
	case cmd.first == 0 && cmd.counted == 0 && cmd.spans == nil:
		w.Error("ERR The command has no key arguments")
		return nil, nil, false
	case cmd.arity > 0 && len(args) != cmd.arity || len(args) < -cmd.arity:
		w.Error("ERR Invalid number of arguments specified for command")
		return nil, nil, false
	}
	for _, s := range both(cmd.keySpans(args)) {
		for i := s.First; s.First > 0 && i <= s.Last; i += s.Step {
			found = append(found, args[i])
		}
	}
	if found == nil && cmd.group != "scripting" { // a script may have none
		w.Error("ERR Invalid arguments specified for command")
		return nil, nil, false
	}
	return cmd, found, true
}

// cmdCommandGetKeys goes by the same numbers that describe tells, so that a client which trusts
// COMMAND finds the same keys.
func cmdCommandGetKeys(c *conn, w *resp.Writer, args [][]byte) {
	_, found, ok := keysOfCall(w, args[2:])
	if !ok {
		return
	}
	w.Array(len(found))
	for _, k := range found {
		w.Bulk(k)
	}
}

// cmdCommandGetKeysAndFlags is that with what the command does to each key.
func cmdCommandGetKeysAndFlags(c *conn, w *resp.Writer, args [][]byte) {
	cmd, found, ok := keysOfCall(w, args[2:])
	if !ok {
		return
	}
	flags, later := flagsOfKeys(cmd, args[2:])
	w.Array(len(found))
	for _, k := range found {
		w.Array(2)
		w.Bulk(k)
		w.Set(len(flags))
		for _, f := range flags {
			w.Simple(f)
		}
		flags = later
	}
}
