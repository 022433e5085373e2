package spec_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/spec"
)

// TestDocumentHasTheCommands: docs/compatibility.md has each command in its table, once, and says of those with
// something to use instead that they are not there. It may name commands of Redis that have no description.
func TestDocumentHasTheCommands(t *testing.T) {
	doc, err := os.ReadFile("../../../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(doc), "\n## Commands of Redis\n")
	rest, _, _ = strings.Cut(rest, "\n## ")
	states := make(map[string]string)
	name := regexp.MustCompile("`([A-Z_-]+)`")
	for line := range strings.Lines(rest) {
		cells := strings.Split(line, "|")
		if len(cells) < 5 {
			continue
		}
		for _, m := range name.FindAllStringSubmatch(cells[1], -1) {
			if states[m[1]] != "" {
				t.Errorf("%s is there twice", m[1])
			}
			states[m[1]] = strings.TrimSpace(cells[2])
		}
	}
	for _, c := range spec.Table {
		if strings.Contains(c.Name, "|") {
			continue
		}
		upper := strings.ToUpper(c.Name)
		state, is := states[upper]
		delete(states, upper)
		if missing := c.Instead != "" || c.ID == spec.CmdSwapdb; !is || (state == "not") != missing {
			t.Errorf("%s is %q in docs/compatibility.md; what to use instead of it: %q", upper, state, c.Instead)
		}
	}
	for name, state := range states {
		if state != "not" {
			t.Errorf("%s is %s in docs/compatibility.md, and has no description", name, state)
		}
	}
}

// TestTable: IDs are places, subcommands are behind their containers, and what options decide is described.
func TestTable(t *testing.T) {
	seen := make(map[string]bool)
	for i := range spec.Table {
		c := &spec.Table[i]
		container, _, sub := strings.Cut(c.Name, "|")
		if int(c.ID) != i || seen[c.Name] || sub && !seen[container] {
			t.Errorf("%s has ID %d, at %d", c.Name, c.ID, i)
		}
		seen[c.Name] = true
		if c.Instead == "" && (c.Group == "" || c.Doc.Summary == "" || len(c.Categories) == 0) {
			t.Errorf("%s has no group, summary or category", c.Name)
		}
		if keys := c.First > 0 || c.Counted > 0 || c.Finder > 0; keys && c.Instead == "" && c.Doc.Keys == nil {
			t.Errorf("%s has keys without a specification", c.Name)
		}
		if c.Kind > 0 && (c.Kind > spec.Read) != c.Writes() {
			t.Errorf("%s is of kind %d, and writes: %t", c.Name, c.Kind, c.Writes())
		}
		if c.Fold != spec.Single && c.Kind == 0 || c.Put > 0 && c.Kind < spec.PutValue {
			t.Errorf("%s: fold %d, put %d, kind %d", c.Name, c.Fold, c.Put, c.Kind)
		}
	}
}

// TestSecrets: places of words decide which arguments are secret, not what else is there.
func TestSecrets(t *testing.T) {
	is := func(b []byte, word string) bool { return strings.EqualFold(string(b), word) }
	for id, lines := range map[spec.ID][]string{
		spec.CmdAuth:       {"auth *", "auth * *", "auth * * *"},
		spec.CmdAclSetuser: {"acl setuser * * *"},
		spec.CmdHello: {"hello 3 AUTH * *", "hello 3 auth * * setname n", "hello auth 3 x",
			"hello 3 setname auth * *"},
		spec.CmdConfigSet: {"config set requirepass *", "config set a requirepass REQUIREPASS *",
			"config set requirepass"},
		spec.CmdGet: {"get auth"},
	} {
		for _, line := range lines {
			var args [][]byte
			for _, a := range strings.Fields(line) {
				args = append(args, []byte(a))
			}
			for i, a := range args {
				if got := spec.Table[id].Secret.Hides(args, i, is); got != (string(a) == "*") {
					t.Errorf("%q: argument %d is secret: %t", line, i, got)
				}
			}
		}
	}
}
