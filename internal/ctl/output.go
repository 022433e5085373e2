package ctl

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/term"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/overview"
)

// Output is stdout; commands that print raw bytes ask whether it is a terminal.
type Output struct {
	*bufio.Writer
	Terminal bool
}

// Flush sends on what was printed so far, for a command that goes on for long.
func (a *App) Flush() error {
	if o, ok := a.Stdout.(*Output); ok {
		if err := o.Flush(); err != nil {
			return err
		}
	}
	if a.Parent != nil {
		return a.Parent.Flush()
	}
	return nil
}

// IsTerminal reports whether a stream of an App is a terminal.
func IsTerminal(w any) bool {
	if o, ok := w.(*Output); ok {
		return o.Terminal
	}
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// OneLine is s as one line, visible.
func OneLine(s string) string {
	return Visible(strings.ReplaceAll(strings.TrimSpace(s), "\n", "; "))
}

// Visible is s with escapes in the place of what terminals obey, or show as nothing: the
// store's names and messages are others' choice.
func Visible(s string) string {
	bad := func(r rune) bool { return !unicode.IsPrint(r) }
	if strings.IndexFunc(s, bad) < 0 && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if c := s[:n]; bad(r) || r == utf8.RuneError {
			q := strconv.Quote(c)
			b.WriteString(q[1 : len(q)-1])
		} else {
			b.WriteString(c)
		}
		s = s[n:]
	}
	return b.String()
}

// ProtoJSON gives a message as one line of JSON, with the field names of
// directory.proto and every field present.
func ProtoJSON(m proto.Message) ([]byte, error) {
	b, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return nil, err
	}
	// protojson varies its spaces on purpose; output for scripts does not.
	var line bytes.Buffer
	if err := json.Compact(&line, b); err != nil {
		return nil, err
	}
	return line.Bytes(), nil
}

// PrintProto prints a message as one line of JSON: see ProtoJSON.
func (a *App) PrintProto(m proto.Message) error {
	b, err := ProtoJSON(m)
	if err != nil {
		return err
	}
	_, err = a.Stdout.Write(append(b, '\n'))
	return err
}

// MapTo is f of each of in.
func MapTo[T, U any](in []T, f func(T) U) []U {
	out := make([]U, len(in))
	for i, v := range in {
		out[i] = f(v)
	}
	return out
}

// Short drops the prefix of an enum's name: "NODE_UP" is "up".
func Short(e fmt.Stringer) string {
	s := e.String()
	for _, p := range []string{"NODE_STATE_", "NODE_", "PG_STATE_", "PG_", "NAMESPACE_MODE_", "NAMESPACE_",
		"SESSION_LIFE_", "SESSION_", "JOB_KIND_", "JOB_", "ATOMICS_BY_", "RIGHT_"} {
		if rest, ok := strings.CutPrefix(s, p); ok {
			return strings.ToLower(rest)
		}
	}
	return strings.ToLower(s)
}

// PrintProtos prints one line of JSON a message.
func PrintProtos[M proto.Message](a *App, ms []M) error {
	for _, m := range ms {
		if err := a.PrintProto(m); err != nil {
			return err
		}
	}
	return nil
}

// JSON reports whether output is for scripts.
func (a *App) JSON() bool { return a.Output == "json" }

// PrintJSON prints one line.
func (a *App) PrintJSON(v any) error {
	e := json.NewEncoder(a.Stdout)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// Row is a line of a table: its cells are numbers and texts.
type Row = table.Row

// PrintTable prints rows below a header; numbers are aligned right.
func (a *App) PrintTable(header Row, rows []Row) {
	a.printAligned(header, rows, func(int) bool { return false })
}

// printAligned is PrintTable with columns that are aligned right, whatever is in them.
func (a *App) printAligned(header Row, rows []Row, flush func(i int) bool) {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Format.Header = text.FormatDefault
	t.Style().Options.DrawBorder = false
	t.Style().Options.SeparateColumns = false
	for _, r := range append([]Row{header}, rows...) {
		for i := range r {
			if s, ok := r[i].(string); ok {
				r[i] = Visible(s)
			}
		}
	}
	t.AppendHeader(header)
	t.AppendRows(rows)
	var right []table.ColumnConfig
	for i := range header {
		if flush(i) || !slices.ContainsFunc(rows, func(r Row) bool { return !isNumber(fmt.Sprint(r[i])) }) {
			right = append(right, table.ColumnConfig{Number: i + 1, Align: text.AlignRight,
				AlignHeader: text.AlignRight})
		}
	}
	t.SetColumnConfigs(right)
	for line := range strings.Lines(t.Render()) {
		fmt.Fprintln(a.Stdout, strings.TrimRight(line, " \n"))
	}
}

// PrintColumns prints a row of each of all.
func PrintColumns[T any](a *App, columns overview.Columns[T], all []T) {
	row := func(cells []string) Row { return MapTo(cells, func(s string) any { return s }) }
	shown := slices.DeleteFunc(slices.Clone(columns), func(c overview.Column[T]) bool { return c.Head == "" })
	a.printAligned(row(columns.Heads()), MapTo(all, func(x T) Row { return row(columns.Texts(x)) }),
		func(i int) bool { return shown[i].Right })
}

// isNumber reports whether a cell is a number, or - in the place of one.
func isNumber(s string) bool {
	_, err := strconv.ParseFloat(s, 64)
	return err == nil || s == "-"
}

// Say prints a line for people on stderr.
func (a *App) Say(format string, args ...any) {
	for line := range strings.SplitSeq(fmt.Sprintf(format, args...), "\n") {
		fmt.Fprintln(a.Stderr, Visible(line))
	}
}

// When prints a time of expiry.
func When(t time.Time) string {
	if t.IsZero() {
		return "none"
	}
	return t.UTC().Format("2006-01-02T15:04:05.000Z")
}
