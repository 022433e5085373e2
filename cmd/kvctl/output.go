package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

func (a *app) json() bool { return a.output == "json" }

// printJSON prints one line.
func (a *app) printJSON(v any) error {
	e := json.NewEncoder(a.stdout)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

type row = table.Row

// printTable prints rows below a header; numbers are aligned right.
func (a *app) printTable(header row, rows []row) {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Format.Header = text.FormatDefault
	t.Style().Options.DrawBorder = false
	t.Style().Options.SeparateColumns = false
	for _, r := range append([]row{header}, rows...) {
		for i := range r {
			if s, ok := r[i].(string); ok {
				r[i] = visible(s)
			}
		}
	}
	t.AppendHeader(header)
	t.AppendRows(rows)
	var right []table.ColumnConfig
	for i := range header {
		if !slices.ContainsFunc(rows, func(r row) bool { return !isNumber(fmt.Sprint(r[i])) }) {
			right = append(right, table.ColumnConfig{Number: i + 1, Align: text.AlignRight,
				AlignHeader: text.AlignRight})
		}
	}
	t.SetColumnConfigs(right)
	for line := range strings.Lines(t.Render()) {
		fmt.Fprintln(a.stdout, strings.TrimRight(line, " \n"))
	}
}

// isNumber reports whether a cell is a number, or - in the place of one.
func isNumber(s string) bool {
	_, err := strconv.ParseFloat(s, 64)
	return err == nil || s == "-"
}

// say prints a line for people on stderr.
func (a *app) say(format string, args ...any) {
	for line := range strings.SplitSeq(fmt.Sprintf(format, args...), "\n") {
		fmt.Fprintln(a.stderr, visible(line))
	}
}

// when prints a time of expiry.
func when(t time.Time) string {
	if t.IsZero() {
		return "none"
	}
	return t.UTC().Format("2006-01-02T15:04:05.000Z")
}

// bytesText prints a number of bytes for people.
func bytesText[T ~int | ~int64 | ~uint64](n T) string {
	v, unit := float64(n), 0
	for v >= 1024 && unit < 4 {
		v /= 1024
		unit++
	}
	if unit == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, [...]string{"", "KiB", "MiB", "GiB", "TiB"}[unit])
}
