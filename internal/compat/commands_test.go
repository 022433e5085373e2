package compat

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// commandTable reads the table of docs/compatibility.md: a command's state is
// "served", "differs" or "not".
func commandTable(t *testing.T) map[string]string {
	doc, err := os.ReadFile(docFile)
	must(t, err)
	_, rest, ok := strings.Cut(string(doc), "\n## Commands of Redis\n")
	if !ok {
		t.Fatalf("%s has no section of Redis's commands", docFile)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	table := make(map[string]string)
	name := regexp.MustCompile("`([A-Z_-]+)`")
	for line := range strings.Lines(rest) {
		cells := strings.Split(line, "|")
		if len(cells) < 5 || !strings.Contains(cells[1], "`") {
			continue
		}
		state := strings.TrimSpace(cells[2])
		if !slices.Contains([]string{"served", "differs", "not"}, state) {
			t.Errorf("state %q in %s", state, line)
		}
		for _, m := range name.FindAllStringSubmatch(cells[1], -1) {
			c := strings.ToLower(m[1])
			if table[c] != "" {
				t.Errorf("%s is there twice", m[1])
			}
			table[c] = state
		}
	}
	return table
}

// TestCommandTable wants every command that Redis has in the document, and what the
// document says of it to be true.
func TestCommandTable(t *testing.T) {
	l := open(t)
	ctx := t.Context()
	table := commandTable(t)
	list := func(at target) map[string]bool {
		c := redis.NewClient(&redis.Options{Addr: at.redis})
		defer c.Close()
		names, err := c.Do(ctx, "COMMAND", "LIST").StringSlice()
		must(t, err)
		set := make(map[string]bool)
		for _, n := range names {
			n, _, _ = strings.Cut(n, "|") // a subcommand
			set[n] = true
		}
		return set
	}
	redisHas, oursHas := list(l.reference()), list(l.ours())
	for name := range redisHas {
		if table[name] == "" {
			t.Errorf("Redis has %s, the document does not", name)
		}
	}
	for name := range oursHas {
		if s := table[name]; s == "" {
			t.Errorf("the gateway lists %s, the document does not", name)
		}
	}
	c := redis.NewClient(&redis.Options{Addr: l.ours().redis})
	defer c.Close()
	for name, state := range table {
		if state != "not" {
			if !oursHas[name] {
				t.Errorf("%s: the document says %s, the gateway does not list it", name, state)
			}
			continue
		}
		// The numbers of arguments suffice for any command.
		for n := range 5 {
			args := append([]any{name}, []any{"a", "1", "b", "2"}[:n]...)
			if r, err := c.Do(ctx, args...).Result(); err == nil {
				t.Errorf("%v: the document says that it is not there, the gateway answers %v", args, r)
			}
		}
	}
}

// TestScriptedCommands wants scripts to be refused the commands that Redis keeps from them, and no others but some whose effects cannot be undone.
func TestScriptedCommands(t *testing.T) {
	l := open(t)
	ctx := t.Context()
	list := func(at target) map[string][]any {
		c := redis.NewClient(&redis.Options{Addr: at.redis, Protocol: 2})
		defer c.Close()
		all, err := c.Do(ctx, "COMMAND").Slice()
		must(t, err)
		m := make(map[string][]any)
		for _, info := range all {
			addCommand(m, info)
		}
		return m
	}
	served, known := list(l.ours()), list(l.reference())
	refused := []string{"slowlog|reset", "swapdb", "pfselftest", "flushall", "flushdb"}
	c := redis.NewClient(&redis.Options{Addr: l.ours().redis, DB: 14})
	defer c.Close()
	asked := 0
	for name, info := range known {
		if served[name] == nil || len(info[9].([]any)) > 0 || slices.Contains(refused, name) {
			continue
		}
		args := []any{"EVAL", "return redis.pcall(unpack(ARGV))", "0"}
		for _, w := range strings.Split(name, "|") {
			args = append(args, w)
		}
		arity := info[1].(int64)
		for n := max(arity, -arity); int64(len(args)-3) < n; {
			args = append(args, "1")
		}
		kept := slices.Contains(info[2].([]any), any("noscript"))
		err := c.Do(ctx, args...).Err()
		if got := err != nil && strings.Contains(err.Error(), "This Redis command is not allowed from script"); got != kept {
			t.Errorf("%s in a script: %v; Redis keeps it from scripts: %v", name, err, kept)
		}
		asked++
	}
	if asked < 200 {
		t.Errorf("%d commands", asked)
	}
}
