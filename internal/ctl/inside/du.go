package inside

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

// maxGroups bounds the prefixes that du tells apart.
const maxGroups = 100_000

type duOptions struct {
	prefix     []byte
	depth      int
	separators string
	top        int
}

func (a *commands) duCommand() *cobra.Command {
	var o duOptions
	var prefix string
	c := &cobra.Command{
		Use:   "du",
		Short: "Show how many bytes keys take, by their prefix",
		Long: "Read the index and the heads of all records, as bigkeys does. Add up records by the\n" +
			"first --depth parts of their keys behind --prefix. A part ends with one of the\n" +
			"characters of --separators. A key with fewer parts counts with those that it has:\n" +
			"each key counts once. A record is key, value and 32 bytes. Records that changed\n" +
			"while they were looked at are only counted. Beyond 100,000 prefixes, others are\n" +
			"added up in one line.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := ctl.CheckTop(o.top); err != nil {
				return err
			}
			if o.depth < 0 || o.depth > 64 {
				return ctl.Usagef("--depth %d: want 0 to 64", o.depth)
			}
			var err error
			if o.prefix, err = a.Prefix(prefix); err != nil {
				return ctl.Usagef("--prefix: %w", err)
			}
			return a.du(cmd.Context(), o)
		},
	}
	f := c.Flags()
	f.StringVar(&prefix, "prefix", "", "only keys that begin with this")
	f.IntVar(&o.depth, "depth", 1, "parts of keys that are told apart, 0: one line for all")
	f.StringVar(&o.separators, "separators", "/:", "characters that end a part of a key")
	f.IntVar(&o.top, "top", 50, "how many prefixes to list, the largest")
	return c
}

// duGroup is what the keys of a prefix take.
type duGroup struct {
	prefix      string
	keys, bytes uint64
}

// group gives the prefix that k counts with.
func (o *duOptions) group(k []byte) []byte {
	end := len(o.prefix)
	for range o.depth {
		i := bytes.IndexAny(k[end:], o.separators)
		if i < 0 {
			break
		}
		end += i + 1
	}
	return k[:end]
}

func (a *commands) du(ctx context.Context, o duOptions) error {
	groups := make(map[string]*duGroup)
	var all, rest duGroup // rest: those of too many prefixes
	var changed uint64
	add := func(k bigKey) {
		if !bytes.HasPrefix(k.key, o.prefix) {
			return
		}
		name := o.group(k.key)
		g := groups[string(name)]
		switch {
		case g != nil:
		case len(groups) < maxGroups:
			g = &duGroup{prefix: string(name)}
			groups[g.prefix] = g
		default:
			g = &rest
		}
		for _, sum := range []*duGroup{g, &all} {
			sum.keys++
			sum.bytes += k.bytes
		}
	}
	err := a.walk(ctx, "du", func(w *walker) error {
		return w.each(func(p *part) error { return p.measureAll(add, func() { changed++ }) })
	})
	if err != nil {
		return err
	}
	list := make([]*duGroup, 0, len(groups))
	for _, g := range groups {
		list = append(list, g)
	}
	slices.SortFunc(list, func(x, y *duGroup) int {
		return cmp.Or(cmp.Compare(y.bytes, x.bytes), cmp.Compare(x.prefix, y.prefix))
	})
	for _, g := range list[min(o.top, len(list)):] {
		rest.keys += g.keys
		rest.bytes += g.bytes
	}
	list = list[:min(o.top, len(list))]
	if a.JSON() {
		out := make([]map[string]any, len(list))
		for i, g := range list {
			out[i] = map[string]any{"keys": g.keys, "bytes": g.bytes}
			a.SetKey(out[i], "prefix", []byte(g.prefix))
		}
		return a.PrintJSON(map[string]any{"keys": all.keys, "bytes": all.bytes, "changed": changed, "prefixes": out,
			"others": map[string]any{"keys": rest.keys, "bytes": rest.bytes}})
	}
	rows := ctl.MapTo(list, func(g *duGroup) ctl.Row {
		return ctl.Row{a.showShort([]byte(g.prefix)), g.keys, g.bytes, units.Rounded(g.bytes), overview.Percent(g.bytes,
			all.bytes)}
	})
	if rest.keys > 0 {
		rows = append(rows, ctl.Row{"(others)", rest.keys, rest.bytes, units.Rounded(rest.bytes),
			overview.Percent(rest.bytes, all.bytes)})
	}
	a.PrintTable(ctl.Row{"Prefix", "Keys", "Bytes", "", "% of bytes"}, rows)
	fmt.Fprintf(a.Stdout, "\n%d keys, %s", all.keys, units.Rounded(all.bytes))
	if changed > 0 {
		fmt.Fprintf(a.Stdout, "; %d changed meanwhile", changed)
	}
	fmt.Fprintln(a.Stdout)
	return nil
}
