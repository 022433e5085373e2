package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/gateway"
	"github.com/kvd-project/kvd/internal/httpd"
)

// A gateway shows its commands by what they took in all, and keys as text that can be read.
func TestGatewayTables(t *testing.T) {
	var costs []gateway.CommandCost
	for i := range 30 {
		costs = append(costs, gateway.CommandCost{Name: fmt.Sprint("c", i), Calls: 4, Failed: 1, Took: time.Second})
	}
	table := costsTable(costs)
	if got := fmt.Sprint(table.Rows[0]); len(table.Rows) != costsShown || got != "[c0 4 1 1s 3.3 250ms]" {
		t.Errorf("%d rows, %s", len(table.Rows), got)
	}
	for key, want := range map[string]string{
		"user:1": "user:1", "é": "é", odd: odd[:hotKeyChars] + "…", "\x00\xff": `"\x00\xff"`, "a\nb": `"a\nb"`,
		"\u202e":                 `"\u202e"`,
		strings.Repeat("é", 100): strings.Repeat("é", hotKeyChars) + "…", "": "",
	} {
		if got := keyText(key); got != want {
			t.Errorf("%q: %q, want %q", key, got, want)
		}
	}
	s := servePage(t, nil)
	s.Serving(func() error { return nil }, func(context.Context) (httpd.Page, error) {
		return httpd.Page{
			Tables: []httpd.Table{
				hotKeysTable([]gateway.HotKey{{Database: "cache", Key: odd, Share: 0.25, Least: 0.2}})}}, nil
	})
	if page := read(t, "http://"+s.Addr()+"/"); strings.Count(page, "<script") != 1 ||
		!strings.Contains(page, "<td>cache</td><td>&lt;script&gt;") ||
		!strings.Contains(page, "<td>25.0</td><td>20.0</td>") {
		t.Error(page)
	}
}
