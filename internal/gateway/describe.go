package gateway

import (
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
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
	slices.SortFunc(out, func(a, b *command) int { return strings.Compare(a.Name, b.Name) })
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

// describe is a command as COMMAND tells of it: ten fields since Redis 7.
func describe(w *resp.Writer, c *command) {
	w.Array(10)
	w.BulkString(c.Name)
	w.Int(int64(c.Arity))
	writeFlags(w, c.Flags.Names())
	w.Int(int64(c.First))
	w.Int(int64(c.Last))
	w.Int(int64(c.Step))
	cats := c.categories.Names()
	w.Set(len(cats))
	for _, cat := range cats {
		w.Simple("@" + cat)
	}
	w.Set(len(c.Doc.Tips))
	for _, tip := range c.Doc.Tips {
		w.BulkString(tip)
	}
	w.Set(len(c.Doc.Keys))
	for i := range c.Doc.Keys {
		describeKey(w, &c.Doc.Keys[i])
	}
	subs := sortedSubs(c)
	w.Set(len(subs))
	for _, s := range subs {
		describe(w, s)
	}
}

func writeFlags(w *resp.Writer, flags []string) {
	w.Set(len(flags))
	for _, f := range flags {
		w.Simple(f)
	}
}

// describeKey is a key specification.
func describeKey(w *resp.Writer, k *spec.Key) {
	if w.Map(3 + int(values.Bit(k.Notes != ""))); k.Notes != "" {
		w.BulkString("notes")
		w.BulkString(k.Notes)
	}
	w.BulkString("flags")
	writeFlags(w, k.Flags)
	part := func(name, kind string, fields ...any) {
		w.BulkString(name)
		w.Map(2)
		w.BulkString("type")
		w.BulkString(kind)
		w.BulkString("spec")
		w.Map(len(fields) / 2)
		for _, f := range fields {
			switch f := f.(type) {
			case string:
				w.BulkString(f)
			case int:
				w.Int(int64(f))
			}
		}
	}
	switch {
	case k.Index > 0:
		part("begin_search", "index", "index", k.Index)
	case k.Keyword != "":
		part("begin_search", "keyword", "keyword", k.Keyword, "startfrom", k.From)
	default:
		part("begin_search", "unknown")
		part("find_keys", "unknown")
		return
	}
	if k.Numbered {
		part("find_keys", "keynum", "keynumidx", 0, "firstkey", 1, "keystep", k.Step)
	} else {
		part("find_keys", "range", "lastkey", k.Last, "keystep", k.Step, "limit", k.Limit)
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

// fields are those of a map that are there.
type fields []func(w *resp.Writer)

// add adds a field, if it is there.
func (f *fields) add(is bool, name string, value func(w *resp.Writer)) {
	if is {
		*f = append(*f, func(w *resp.Writer) { w.BulkString(name); value(w) })
	}
}

func (f *fields) text(name, s string) {
	f.add(s != "", name, func(w *resp.Writer) { w.BulkString(s) })
}

func (f *fields) flags(name string, list []string) {
	f.add(len(list) > 0, name, func(w *resp.Writer) { writeFlags(w, list) })
}

func (f *fields) arguments(list []spec.Argument) {
	f.add(len(list) > 0, "arguments", func(w *resp.Writer) {
		w.Array(len(list))
		for i := range list {
			documentArgument(w, &list[i])
		}
	})
}

func (f *fields) write(w *resp.Writer) {
	w.Map(len(*f))
	for _, p := range *f {
		p(w)
	}
}

// document writes what redis-cli needs, with Redis's arguments; subcommands are documented within their
// command.
func document(w *resp.Writer, c *command) {
	subs := sortedSubs(c)
	w.BulkString(c.Name)
	var f fields
	f.add(true, "summary", func(w *resp.Writer) { w.BulkString(c.Doc.Summary) })
	f.text("since", c.Doc.Since)
	f.add(true, "group", func(w *resp.Writer) { w.BulkString(c.Group) })
	f.flags("doc_flags", c.Doc.Flags)
	f.arguments(c.Doc.Arguments)
	f.add(len(subs) > 0, "subcommands", func(w *resp.Writer) {
		w.Map(len(subs))
		for _, s := range subs {
			document(w, s)
		}
	})
	f.write(w)
}

// documentArgument is one of a command's arguments, or of those that an argument stands for.
func documentArgument(w *resp.Writer, a *spec.Argument) {
	var f fields
	f.text("name", a.Name)
	f.text("type", a.Type)
	f.add(a.Key > 0, "key_spec_index", func(w *resp.Writer) { w.Int(int64(a.Key - 1)) })
	f.text("token", a.Token)
	f.text("since", a.Since)
	f.text("deprecated_since", a.Deprecated)
	f.flags("flags", a.Flags)
	f.arguments(a.Arguments)
	f.write(w)
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
			want = func(c *command) bool { return glob.Match(by, []byte(c.Name)) }
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
		w.BulkString(c.Name)
	}
	return nil
}

// both is for loops over what keySpans returns.
func both(a, b acl.Span) [2]acl.Span { return [2]acl.Span{a, b} }
