package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/format"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// description is a line of commands.jsonl. Package spec says what its fields are; words in them are constants there.
type description struct {
	Name       string     `json:"name"`
	Arity      int        `json:"arity"`
	Group      string     `json:"group"`
	Since      string     `json:"since"`
	Summary    string     `json:"summary"`
	Instead    string     `json:"instead"`
	DocFlags   []string   `json:"doc_flags"`
	Flags      []string   `json:"flags"`
	Traits     []string   `json:"traits"`
	Categories []string   `json:"categories"` // but for those that follow from the flags
	Tips       []string   `json:"tips"`
	Keys       []key      `json:"keys"`
	Finder     string     `json:"finder"`
	Database   int        `json:"database"`
	Channels   string     `json:"channels"`
	Kind       string     `json:"kind"`
	Fold       string     `json:"fold"`
	Put        string     `json:"put"`
	Part       string     `json:"part"`
	Plain      bool       `json:"plain"`
	Event      string     `json:"event"` // class and name, or none; without it one that writes has its own name
	Secret     secret     `json:"secret"`
	Help       []string   `json:"help"`
	Arguments  []argument `json:"arguments"`
}

type key struct {
	Notes    string   `json:"notes"`
	Flags    []string `json:"flags"`
	Index    int      `json:"index"`
	Keyword  string   `json:"keyword"`
	From     int      `json:"from"`
	Numbered bool     `json:"numbered"`
	Last     int      `json:"last"`
	Step     int      `json:"step"` // without it 1
	Limit    int      `json:"limit"`
}

type secret struct {
	First int    `json:"first"`
	Step  int    `json:"step"`
	Count int    `json:"count"`
	Word  string `json:"word"`
}

type argument struct {
	Name       string     `json:"name"`
	Type       string     `json:"type"`
	Token      string     `json:"token"`
	Key        int        `json:"key"`
	Since      string     `json:"since"`
	Deprecated string     `json:"deprecated"`
	Flags      []string   `json:"flags"`
	Arguments  []argument `json:"arguments"`
}

// generateCommands makes the table of package spec of the descriptions in a file beside it.
func generateCommands(name string) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	ids, rows, err := commandTable(text)
	if err != nil {
		return err
	}
	for _, f := range []struct{ name, format, of string }{
		{"ids.go", "// The commands.\nconst (\n%s)\n", ids},
		{"table.go", "// Table has the commands by their IDs; subcommands are behind theirs.\n" +
			"var Table = [...]Command{\n%s}\n", rows},
	} {
		code, err := format.Source(fmt.Appendf(nil, "// Code generated from commands.jsonl; DO NOT EDIT.\n\n"+
			"package spec\n\n"+f.format, f.of))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(filepath.Dir(name), f.name), code, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// commandTable is the code of the constants and rows of descriptions.
func commandTable(text []byte) (constants, table string, err error) {
	var ids, rows bytes.Buffer
	names := make(map[string]bool)
	for n, line := range bytes.Split(bytes.TrimSpace(text), []byte("\n")) {
		var d description
		dec := json.NewDecoder(bytes.NewReader(line))
		dec.DisallowUnknownFields()
		err := dec.Decode(&d)
		switch container, _, sub := strings.Cut(d.Name, "|"); {
		case err != nil:
			return "", "", fmt.Errorf("line %d: %w", n+1, err)
		case d.Name == "" || d.Name != strings.ToLower(d.Name), d.Arity == 0, names[d.Name], sub && !names[container]:
			return "", "", fmt.Errorf("line %d: name %q, arity %d: not one, there twice, or of no container",
				n+1, d.Name, d.Arity)
		}
		names[d.Name] = true
		fmt.Fprintf(&ids, "Cmd%s // %s\n", camel(d.Name), strings.ReplaceAll(d.Name, "|", " "))
		if n == 0 {
			ids.Reset()
			fmt.Fprintf(&ids, "Cmd%s ID = iota // %s\n", camel(d.Name), d.Name)
		}
		d.row(&rows)
	}
	return ids.String(), rows.String(), nil
}

// camel makes the words of a name those of a Go name.
func camel(name string) string {
	var b strings.Builder
	for _, w := range strings.FieldsFunc(name, func(r rune) bool { return strings.ContainsRune("|-_", r) }) {
		b.WriteString(strings.ToUpper(w[:1]) + w[1:])
	}
	return b.String()
}

// categories are those of the command: the ones that its flags stand for in Redis, and its own.
func (d *description) categories() []string {
	has := func(flag string) bool { return slices.Contains(d.Flags, flag) }
	list := slices.Clone(d.Categories)
	for _, f := range []string{"write", "admin", "pubsub", "fast", "blocking"} {
		if has(f) {
			list = append(list, f)
		}
	}
	if !has("fast") {
		list = append(list, "slow")
	}
	if has("admin") {
		list = append(list, "dangerous")
	}
	if has("readonly") && !slices.Contains(list, "scripting") {
		list = append(list, "read")
	}
	return list
}

// access is what flags of a key say that its command does to it. It leaves to options what they may add.
func (k *key) access() string {
	var list []string
	if slices.Contains(k.Flags, "access") && !slices.Contains(k.Flags, "variable_flags") {
		list = append(list, "Reads")
	}
	if slices.ContainsFunc(k.Flags, func(f string) bool { return f == "insert" || f == "delete" || f == "update" }) {
		list = append(list, "Changes")
	}
	return strings.Join(list, "|")
}

// places says where keys are, as COMMAND does for clients that know no specifications.
func (d *description) places() (first, last, step, counted int) {
	for _, k := range d.Keys {
		switch {
		case slices.Contains(k.Flags, "not_key"):
		case k.Numbered:
			counted = k.Index
		case k.Index == 0, first != 0 && k.Index != last+1:
		default:
			if first == 0 {
				first, step = k.Index, max(k.Step, 1)
			}
			if last = k.Last; last >= 0 {
				last += k.Index
			}
		}
	}
	return first, last, step, counted
}

// row writes the command as Go has it. Fields of no value are left out.
func (d *description) row(b *bytes.Buffer) {
	first, last, step, counted := d.places()
	from := 0
	if d.Finder == "store" {
		from = d.Keys[1].From
	}
	var access, later string
	if len(d.Keys) > 0 {
		access, later = d.Keys[0].access(), d.Keys[len(d.Keys)-1].access()
	}
	fmt.Fprintf(b, "{Name: %q, ID: Cmd%s, Arity: %d", d.Name, camel(d.Name), d.Arity)
	number(b, "First", first)
	number(b, "Last", last)
	number(b, "Step", step)
	number(b, "Counted", counted)
	word(b, "Finder", "Find", d.Finder)
	number(b, "From", from)
	code(b, "Access", access)
	code(b, "LaterAccess", later)
	code(b, "Flags", set("Flag", d.Flags))
	code(b, "Traits", set("", d.Traits))
	word(b, "Kind", "", d.Kind)
	word(b, "Fold", "", d.Fold)
	word(b, "Put", "Put", d.Put)
	word(b, "Part", "Part", d.Part)
	if d.Plain {
		code(b, "Plain", "true")
	}
	word(b, "Channels", "Channels", d.Channels)
	number(b, "Database", d.Database)
	d.event(b)
	if d.Secret.First > 0 {
		s := d.Secret
		code(b, "Secret", fmt.Sprintf("Secret{First: %d, Step: %d, Count: %d, Word: %q}", s.First, s.Step, s.Count,
			s.Word))
	}
	code(b, "Categories", list(d.categories()))
	text(b, "Group", d.Group)
	text(b, "Instead", d.Instead)
	fmt.Fprintf(b, ", Doc: &Doc{Summary: %q", d.Summary)
	text(b, "Since", d.Since)
	code(b, "Flags", list(d.DocFlags))
	code(b, "Tips", list(d.Tips))
	if len(d.Keys) > 0 {
		b.WriteString(", Keys: []Key{")
		for _, k := range d.Keys {
			k.write(b)
		}
		b.WriteString("}")
	}
	writeArguments(b, d.Arguments)
	code(b, "Help", list(d.Help))
	b.WriteString("}},\n")
}

func (d *description) event(b *bytes.Buffer) {
	class, name, _ := strings.Cut(d.Event, " ")
	writes := slices.Contains(d.Flags, "write") || slices.Contains(d.Traits, "may-write")
	switch {
	case d.Event == "none":
	case d.Event != "":
		code(b, "Event", fmt.Sprintf("Event{%q, %q}", class[0], name))
	case writes && !strings.Contains(d.Name, "|"):
		code(b, "Event", fmt.Sprintf("Event{'g', %q}", d.Name))
	}
}

func (k *key) write(b *bytes.Buffer) {
	fmt.Fprintf(b, "{Flags: %s", list(k.Flags))
	text(b, "Notes", k.Notes)
	number(b, "Index", k.Index)
	text(b, "Keyword", k.Keyword)
	number(b, "From", k.From)
	if k.Numbered {
		code(b, "Numbered", "true")
	}
	number(b, "Last", k.Last)
	number(b, "Step", max(k.Step, 1))
	number(b, "Limit", k.Limit)
	b.WriteString("},")
}

func writeArguments(b *bytes.Buffer, all []argument) {
	if len(all) == 0 {
		return
	}
	b.WriteString(", Arguments: []Argument{")
	for _, a := range all {
		fmt.Fprintf(b, "{Name: %q, Type: %q", a.Name, a.Type)
		text(b, "Token", a.Token)
		number(b, "Key", a.Key)
		text(b, "Since", a.Since)
		text(b, "Deprecated", a.Deprecated)
		code(b, "Flags", list(a.Flags))
		writeArguments(b, a.Arguments)
		b.WriteString("},")
	}
	b.WriteString("}")
}

func number(b *bytes.Buffer, field string, n int) {
	if n != 0 {
		fmt.Fprintf(b, ", %s: %d", field, n)
	}
}

func text(b *bytes.Buffer, field, s string) {
	if s != "" {
		fmt.Fprintf(b, ", %s: %q", field, s)
	}
}

// word is a field with a constant of a word.
func word(b *bytes.Buffer, field, prefix, s string) {
	if s != "" {
		code(b, field, prefix+camel(s))
	}
}

func code(b *bytes.Buffer, field string, c string) {
	if c != "" {
		fmt.Fprintf(b, ", %s: %s", field, c)
	}
}

// set is the constants of words, together.
func set(prefix string, words []string) string {
	var names []string
	for _, w := range words {
		names = append(names, prefix+camel(w))
	}
	return strings.Join(names, "|")
}

func list(words []string) string {
	if len(words) == 0 {
		return ""
	}
	return fmt.Sprintf("%#v", words)
}
