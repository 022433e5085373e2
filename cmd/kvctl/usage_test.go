package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Every command has an example, each of whose lines runs that command with flags and arguments that it takes.
func TestExamples(t *testing.T) {
	a := newApp(strings.NewReader(""), &bytes.Buffer{}, io.Discard)
	paths := map[string]bool{"exit": true, "use": true} // a shell's alone
	var each func(*cobra.Command)
	each = func(c *cobra.Command) {
		path := strings.TrimPrefix(strings.TrimPrefix(c.CommandPath(), "kvctl"), " ")
		paths[path] = true
		if c.Example == "" {
			t.Errorf("kvctl %s has no example", path)
		}
		for line := range strings.Lines(c.Example) {
			if path != "" && !strings.Contains(line, "kvctl ") {
				t.Errorf("example of %s: %q runs no kvctl", path, line)
			}
			_, words, _ := strings.Cut(line, "kvctl ")
			words, _, _ = strings.Cut(words, " >")
			words, _, _ = strings.Cut(words, " |")
			words = strings.TrimRight(strings.TrimSpace(words), ")")
			root := newApp(strings.NewReader(""), &bytes.Buffer{}, io.Discard).root()
			got, rest, err := root.Find(split(t, words))
			if err != nil {
				t.Errorf("example of %s: %q: %v", path, line, err)
				continue
			}
			if ran := got.CommandPath(); path != "" && !c.HasSubCommands() && ran != c.CommandPath() {
				t.Errorf("example of %s: %q runs %s", path, line, ran)
			}
			if err := got.ParseFlags(rest); err != nil {
				t.Errorf("example of %s: %q: %v", path, line, err)
			} else if err := got.ValidateArgs(got.Flags().Args()); err != nil {
				t.Errorf("example of %s: %q: %v", path, line, err)
			}
		}
		for _, sub := range c.Commands() {
			each(sub)
		}
	}
	each(a.root())
	for path := range examples {
		if !paths[path] {
			t.Errorf("an example of %q, which is no command", path)
		}
	}
}
