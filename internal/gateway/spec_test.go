package gateway

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// TestSpecIsTheTable: descriptions say what the table says.
func TestSpecIsTheTable(t *testing.T) {
	if len(spec.Table) != len(commandsByID)-1 {
		t.Fatalf("%d descriptions, %d commands", len(spec.Table), len(commandsByID)-1)
	}
	need := func(a spec.Access) (n acl.Need) {
		if a&spec.Reads != 0 {
			n |= acl.NeedRead
		}
		if a&spec.Changes != 0 {
			n |= acl.NeedWrite
		}
		return n
	}
	part := []partFunc{nil, values.LengthPart, values.RangePart, values.BitPart}
	for i, d := range spec.Table {
		c := commandsByID[i]
		same := func(what string, got, want any) {
			t.Helper()
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: %s is %v, table %v", d.Name, what, got, want)
			}
		}
		same("name", d.Name, c.name)
		same("ID", int(d.ID), c.id)
		same("arity", d.Arity, c.arity)
		same("places", []int{d.First, d.Last, d.Step, d.Counted}, []int{c.first, c.last, c.step, c.counted})
		same("finder", d.Finder > spec.FindBitfield, c.spans != nil)
		same("kind", d.Kind, c.kind)
		same("fold", d.Fold, c.fold)
		same("put", d.Put, c.special)
		same("looks", d.Kind.Looks(), c.lookup)
		same("writes", d.Writes(), c.write || c.name == "swapdb" || c.name == "migrate")
		same("no auth", d.Has(spec.FlagNoAuth), c.noAuth)
		same("at once", d.Is(spec.AtOnce), c.noQueue)
		same("in steps", d.Is(spec.InSteps), c.steps)
		same("swift", d.Is(spec.Swift), c.swift)
		same("by SHA", d.Is(spec.BySha), c.bySHA)
		same("listening", d.Is(spec.WhileListening), c.listening)
		same("libraries", d.Is(spec.Libraries), c.libraries)
		same("part", fmt.Sprintf("%p", part[d.Part]), fmt.Sprintf("%p", c.part))
		same("plain", d.Plain, c.plain)
		same("group", d.Group, c.group)
		same("summary", d.Doc.Summary, c.summary)
		same("instead", d.Instead, c.instead)
		same("channels", d.Channels > 0, c.channels != noChannels)
		if keys := d.First > 0 || d.Counted > 0; keys {
			same("needs", []acl.Need{need(d.Access), need(d.LaterAccess)}, []acl.Need{c.needs, c.needsLater})
		}
		same("in database", d.First > 0 || d.Counted > 0 || d.Finder > 0 || d.Is(spec.WholeDatabase), c.inDatabase)
		class := values.OnNothing
		if d.Event.Class != 0 {
			class, _ = values.ParseEvents([]byte{d.Event.Class})
		}
		if c.event.class != 0 {
			same("event", []any{class, d.Event.Name}, []any{c.event.class, c.event.name})
		}
		if c.served() {
			var set acl.Category
			for _, name := range d.Categories {
				cat, _ := acl.ParseCategory(name)
				set |= cat
			}
			same("categories", set.Names(), c.categories.Names())
		}
		if row := table()[d.Name]; row != nil {
			var flags []any
			for _, f := range d.Flags.Names() {
				flags = append(flags, map[string]any{"simple": f})
			}
			same("flags", flags, members(row.Flags))
		}
		inScripts := c.key != nil || scriptable[c.name] || strings.HasSuffix(c.name, "|help") ||
			c.channels == oneChannel || c.keys != nil && !unscripted[c.name] && c.group != "scripting"
		if !c.steps && c.served() && (c.sub == nil || c.conn != nil) {
			same("in scripts", !d.Has(spec.FlagNoscript) && !d.Is(spec.NotInScripts), inScripts)
		}
		same("pauses", d.Is(spec.MayReplicate), slices.Contains(mayReplicate, c.name))
		same("whole database", d.Is(spec.WholeDatabase), slices.Contains(wholeDatabase, c.name))
		args := strings.Fields("a b auth requirepass auth requirepass auth requirepass")
		for n := range args {
			var list [][]byte
			for _, a := range args[:n+1] {
				list = append(list, []byte(a))
			}
			same("secret", d.Secret.Hides(list, n, values.Fold), isSecret(c, list, n))
		}
	}
}
