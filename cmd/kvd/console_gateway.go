package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvd-project/kvd/internal/gateway"
	"github.com/kvd-project/kvd/internal/httpd"
)

const (
	// Bounds of what a gateway's page shows.
	costsShown, slowShown, hotKeysShown, hotKeyChars = 20, 20, 20, 64
)

// tables are what a gateway shows people.
func (g *runningGateway) tables() []httpd.Table {
	all := []httpd.Table{costsTable(g.redis.Costs()), slowTable(g.redis.Slowest(slowShown), g.o.settings.HotKeys)}
	if g.o.settings.HotKeys {
		all = append(all, hotKeysTable(g.redis.HotKeys()))
	}
	return all
}

// withTables shows more on a page.
func withTables(page func(context.Context) (httpd.Page, error), more func() []httpd.Table) func(context.Context) (
	httpd.Page, error) {
	return func(ctx context.Context) (httpd.Page, error) {
		p, err := page(ctx)
		p.Tables = append(p.Tables, more()...)
		return p, err
	}
}

func costsTable(costs []gateway.CommandCost) httpd.Table {
	t := httpd.Table{Title: "Dearest commands", Header: []string{"command", "calls", "failed", "time in all",
		"% of all", "mean"}}
	var sum time.Duration
	for _, c := range costs {
		sum += c.Took
	}
	for i, c := range costs {
		if i == costsShown {
			break
		}
		t.Rows = append(t.Rows, []string{c.Name, strconv.FormatUint(c.Calls, 10), strconv.FormatUint(c.Failed, 10),
			c.Took.Round(time.Millisecond).String(),
			percent(float64(c.Took) / float64(max(sum, 1))), (c.Took / time.Duration(max(c.Calls, 1))).Round(
				time.Microsecond).String()})
	}
	return t
}

// slowTable has the slowest first. Opened, a row has the arguments, if readers of the page may know keys.
func slowTable(all []*gateway.SlowCommand, keys bool) httpd.Table {
	t := httpd.Table{Title: "Slow commands", Header: []string{"command", "took", "ended", "client"}}
	for _, c := range all {
		row := []string{c.Args[0], c.Took.Round(time.Microsecond).String(), c.At.UTC().Format(time.RFC3339),
			c.Peer, "name of the connection: " + cmp.Or(c.Name, "-")}
		if keys {
			for i, a := range c.Args[1:] {
				row = append(row, fmt.Sprintf("argument %d: %s", i+1, keyText(a)))
			}
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func hotKeysTable(keys []gateway.HotKey) httpd.Table {
	t := httpd.Table{Title: "Hot keys", Header: []string{"namespace", "key", "about % of uses", "at least"}}
	for i, k := range keys {
		if i == hotKeysShown {
			break
		}
		t.Rows = append(t.Rows, []string{k.Database, keyText(k.Key), percent(k.Share), percent(k.Least)})
	}
	return t
}

// keyText shows a key, or how it begins, as it is if that can be read, and else as Go quotes it.
func keyText(key string) string {
	s := key
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) }) {
		s = strconv.Quote(s)
	}
	if r := []rune(s); len(r) > hotKeyChars {
		s = string(r[:hotKeyChars]) + "…"
	}
	return s
}

func percent(share float64) string { return fmt.Sprintf("%.1f", share*100) }
