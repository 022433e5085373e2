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

// TestScriptedCommands wants scripts to be refused the commands that Redis keeps from them, and no others but some
// whose effects cannot be undone.
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
		got := err != nil && (strings.Contains(err.Error(), "This Redis command is not allowed from script") ||
			strings.Contains(err.Error(), "Unknown Redis command"))
		if got != kept {
			t.Errorf("%s in a script: %v; Redis keeps it from scripts: %v", name, err, kept)
		}
		asked++
	}
	if asked < 200 {
		t.Errorf("%d commands", asked)
	}
}

// TestKeysAndFlags wants COMMAND GETKEYS and GETKEYSANDFLAGS to say of the commands of numberCommands, and of some
// others, what Redis says.
func TestKeysAndFlags(t *testing.T) {
	l := open(t)
	list, err := loadReviewed("numbers")
	must(t, err)
	d, err := newRedisDialect(t.Context(), l.ours().redis, l.reference().redis, list)
	must(t, err)
	lines := slices.Clone(numberCommands)
	for _, c := range d.all { // with as many arguments as each needs at least, and some more
		if c.name == "debug" || c.name == "pfmerge" {
			continue // the first has no subcommands in Redis, which does not find a lone key of the second
		}
		for n := 1; n <= 6; n++ {
			lines = append(lines, strings.Join(c.words, " ")+" "+strings.TrimSpace(strings.Repeat("1 ", n)))
		}
	}
	lines = append(lines, "SET a b GET", "SET a b XX GET EX 5", "SET a b EX 5", "BITFIELD k SET u8 0 1", "BITFIELD k",
		"SORT l STORE d", "SORT l BY w* GET # STORE d", "SORT_RO l GET x*",
		"GEORADIUS g 1 1 1 m STORE d", "GEORADIUS g 1 1 1 m STOREDIST d", "GEORADIUSBYMEMBER g p 1 m STORE d",
		"ZUNIONSTORE d 2 a b", "ZINTER 2 a b WEIGHTS 1 2", "EVAL x 2 a b c",
		"EVALSHA x 0", "FCALL f 1 a b", "MSET a 1 b 2", "RENAME a b", "COPY a b", "LMOVE a b LEFT RIGHT",
		"BITOP AND d a b", "PFMERGE d a b", "XREAD COUNT 1 STREAMS a b 0 0",
		"XREADGROUP GROUP g c STREAMS a b > >", "LMPOP 2 a b LEFT", "BLMPOP 0 2 a b LEFT", "SINTERSTORE d a b",
		"OBJECT ENCODING a", "MEMORY USAGE a", "GET", "NOSUCH a", "PING", "EVAL x nan a")
	for variant := range d.variants() {
		a, err := d.begin(l.ours().redis, variant)
		must(t, err)
		defer a.Close()
		b, err := d.begin(l.reference().redis, variant)
		must(t, err)
		defer b.Close()
		asked := make(map[string]bool)
		for _, line := range lines {
			for _, sub := range []string{"GETKEYS", "GETKEYSANDFLAGS"} {
				words, _ := numberWord(line, "1")
				s := append(step{"COMMAND", sub}, words...)
				if asked[d.show(s)] {
					continue
				}
				asked[d.show(s)] = true
				if ours, theirs := a.ask(s), b.ask(s); ours.String() != theirs.String() {
					t.Errorf("%s\n\tours   %.200v\n\ttheirs %.200v", d.show(s), ours, theirs)
				}
			}
		}
	}
}
