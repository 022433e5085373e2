package gateway

import (
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// servedCommands leaves out what only a refusal exists for, so that a client that asks first
// does not use it. The order is that of the names, since that of a map would differ from call to
// call.
// The list is the caller's. Subcommands are within their commands.
func servedCommands() []*command {
	var out []*command
	for _, c := range commands {
		if c.served() {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b *command) int { return strings.Compare(a.name, b.name) })
	return out
}

// cmdCommand describes all commands; redis-cli and cluster clients ask for it as they connect,
// to learn which arguments are keys.
func cmdCommand(_ *conn, w *resp.Writer, _ [][]byte) error {
	all := servedCommands()
	w.Array(len(all))
	for _, c := range all {
		describe(w, c)
	}
	return nil
}

// cmdCommandCount counts what COMMAND describes, without subcommands.
func cmdCommandCount(_ *conn, w *resp.Writer, _ [][]byte) error {
	w.Int(int64(len(servedCommands())))
	return nil
}

// named finds "get" and "config|get".
// It returns nil for a command that is not served, too.
func named(b []byte) *command {
	name, sub, is := strings.Cut(string(b), "|")
	c := find([]byte(name))
	if c != nil && is {
		c = c.subcommand([]byte(sub))
	}
	if c == nil || !c.served() {
		return nil
	}
	return c
}

// cmdCommandInfo says null for a command that is not served, as Redis does for those it does not
// know.
func cmdCommandInfo(c *conn, w *resp.Writer, args [][]byte) error {
	if len(args) == 2 {
		return cmdCommand(c, w, args)
	}
	w.Array(len(args) - 2)
	for _, a := range args[2:] {
		if cmd := named(a); cmd != nil {
			describe(w, cmd)
		} else {
			w.NullArray()
		}
	}
	return nil
}

// describe is a command as COMMAND tells of it: ten fields since Redis 7. Flags, tips and key specifications are those
// that Redis has.
func describe(w *resp.Writer, c *command) {
	w.Array(10)
	w.BulkString(c.name)
	w.Int(int64(c.arity))
	cats := c.categories.Names()
	row := table()[c.name]
	if row != nil {
		writeTree(w, row.Flags)
	} else {
		describeFlags(w, c, cats)
	}
	w.Int(int64(c.first))
	w.Int(int64(c.last))
	w.Int(int64(c.step))
	w.Set(len(cats))
	for _, cat := range cats {
		w.Simple("@" + cat)
	}
	if row != nil {
		writeTree(w, row.Tips)
		writeTree(w, row.Keys)
	} else {
		w.Array(0)
		w.Array(0)
	}
	subs := sortedSubs(c)
	w.Set(len(subs))
	for _, s := range subs {
		describe(w, s)
	}
}

// describeFlags has the flags of a command that Redis has not, as far as they follow from what is known here.
func describeFlags(w *resp.Writer, c *command, cats []string) {
	var flags []string
	if c.write {
		flags = append(flags, "write", "denyoom")
	} else if c.key != nil || c.keys != nil {
		flags = append(flags, "readonly")
	}
	if c.noAuth {
		flags = append(flags, "no_auth")
	}
	if slices.Contains(cats, "fast") {
		flags = append(flags, "fast")
	}
	w.Set(len(flags))
	for _, f := range flags {
		w.Simple(f)
	}
}

// cmdCommandDocs is what redis-cli's help and completion are made of.
func cmdCommandDocs(_ *conn, w *resp.Writer, args [][]byte) error {
	var list []*command
	if len(args) == 2 {
		list = servedCommands()
	}
	for _, a := range args[2:] {
		if c := named(a); c != nil {
			list = append(list, c)
		}
	}
	w.Map(len(list))
	for _, c := range list {
		document(w, c)
	}
	return nil
}

// document writes what redis-cli needs, with Redis's arguments; subcommands are documented within their
// command.
func document(w *resp.Writer, c *command) {
	subs := sortedSubs(c)
	row := table()[c.name]
	if row == nil {
		row = new(tableRow)
	}
	fields := []struct {
		name  string
		value any
	}{{"summary", c.summary}, {"since", row.Since}, {"group", c.group}, {"doc_flags", row.DocFlags},
		{"arguments", row.Arguments}}
	n := 0
	for _, f := range fields {
		n += int(values.Bit(f.value != nil))
	}
	w.BulkString(c.name)
	w.Map(n + int(values.Bit(len(subs) > 0)))
	for _, f := range fields {
		if f.value != nil {
			w.BulkString(f.name)
			writeTree(w, f.value)
		}
	}
	if len(subs) > 0 {
		w.BulkString("subcommands")
		w.Map(len(subs))
		for _, s := range subs {
			document(w, s)
		}
	}
}

// cmdCommandList filters as Redis does. There are no modules, so the filter by one leaves
// nothing.
func cmdCommandList(_ *conn, w *resp.Writer, args [][]byte) error {
	list := servedCommands()
	p := values.OptionsOf(args[2:])
	if p.More() {
		want := func(*command) bool { return false }
		switch by := lower(nil, args[len(args)-1]); {
		case len(args) != 5 || !p.Flag("filterby"):
			p.Wrong()
		case p.Flag("pattern"):
			want = func(c *command) bool { return glob.Match(by, []byte(c.name)) }
		// A category that does not exist has no commands, as in Redis.
		case p.Flag("aclcat"):
			cat, _ := acl.ParseCategory(string(by))
			want = func(c *command) bool { return c.categories&cat != 0 }
		case !p.Flag("module"):
			p.Wrong()
		}
		if err := p.Err(); err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(c *command) bool { return !want(c) })
	}
	w.Array(len(list))
	for _, c := range list {
		w.BulkString(c.name)
	}
	return nil
}

// both is for loops over what keySpans returns.
func both(a, b acl.Span) [2]acl.Span { return [2]acl.Span{a, b} }
