package main

import (
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
	costsShown, hotKeysShown, hotKeyChars = 20, 20, 64
)

// tables are what a gateway shows people.
func (g *runningGateway) tables() []httpd.Table {
	all := []httpd.Table{costsTable(g.redis.Costs()), g.evictionsTable()}
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

func (g *runningGateway) evictionsTable() httpd.Table {
	t := httpd.Table{Title: "Evictions", Header: []string{"namespace", "evicted records", "in bytes",
		"expired records"}}
	for i, name := range g.names {
		s := g.clients[i].Stats()
		t.Rows = append(t.Rows, []string{name, strconv.FormatUint(s.Evicted, 10), size(s.EvictedBytes),
			strconv.FormatUint(s.Expired, 10)})
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
