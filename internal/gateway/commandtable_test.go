package gateway

import (
	"bufio"
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// tree reads a reply of RESP3: strings, numbers, lists, and maps of one member for other types.
func tree(t *testing.T, r *bufio.Reader) any {
	t.Helper()
	line, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	line = strings.TrimSuffix(line, "\r\n")
	n, _ := strconv.Atoi(line[1:])
	many := func(n int) []any {
		list := make([]any, n)
		for i := range list {
			list[i] = tree(t, r)
		}
		return list
	}
	switch line[0] {
	case '$':
		b := make([]byte, n+2)
		for i := range b {
			b[i], _ = r.ReadByte()
		}
		return string(b[:n])
	case '_':
		return nil
	case '+':
		return map[string]any{"simple": line[1:]}
	case ':':
		return n
	case '*':
		return many(n)
	case '~':
		return map[string]any{"set": many(n)}
	case '%':
		return map[string]any{"map": many(2 * n)}
	}
	t.Fatalf("a reply of %q", line)
	return nil
}

// mapField is the value of a map's field, nil if it has none.
func mapField(m any, name string) any {
	list := m.(map[string]any)["map"].([]any)
	for i := 0; i < len(list); i += 2 {
		if list[i] == name {
			return list[i+1]
		}
	}
	return nil
}

// TestTableLikeRedis: COMMAND INFO says what a redis-server says of the commands that are served, byte by byte, but for
// subcommands that are not; DOCS has the same arguments.
func TestTableLikeRedis(t *testing.T) {
	theirs := dial(t, "unix", startRedis(t))
	theirs.do(t, "HELLO", "3")
	ask := func(p *peer, cmd ...string) any {
		t.Helper()
		p.send(t, cmd)
		return tree(t, bufio.NewReader(bytes.NewReader(p.reply(t))))
	}
	var names []string
	for _, c := range commandsByID {
		if docs := ask(theirs, "COMMAND", "DOCS", c.Name); c.served() && docs.(map[string]any)["map"] != nil &&
			len(docs.(map[string]any)["map"].([]any)) > 0 {
			names = append(names, c.Name)
		}
	}
	if len(names) < 300 {
		t.Fatalf("%d commands", len(names))
	}
	addr := serve(t, Options{Databases: fake()})
	for _, proto := range []string{"2", "3"} {
		ours := dial(t, "tcp", addr)
		ours.do(t, "HELLO", proto)
		theirs.do(t, "HELLO", proto)
		for _, name := range names {
			if slices.Contains(tableDiffers, name) || named([]byte(name)).sub != nil {
				continue
			}
			if got, want := sortedFlags(ours.do(t, "COMMAND", "INFO", name)),
				sortedFlags(theirs.do(t, "COMMAND", "INFO", name)); got != want {
				t.Errorf("RESP%s: COMMAND INFO %s:\n got %.1500q\nwant %.1500q", proto, name, got, want)
			}
		}
	}
	ours := dial(t, "tcp", addr)
	ours.do(t, "HELLO", "3")
	for _, name := range names {
		a := ask(ours, "COMMAND", "DOCS", name).(map[string]any)["map"].([]any)
		b := ask(theirs, "COMMAND", "DOCS", name).(map[string]any)["map"].([]any)
		for _, field := range []string{"arguments", "since", "group", "doc_flags"} {
			if got, want := fmt.Sprint(mapField(a[1], field)), fmt.Sprint(mapField(b[1], field)); got != want {
				t.Errorf("COMMAND DOCS %s: %s is %s, want %s", name, field, got, want)
			}
		}
	}
}

// tableDiffers are commands of which COMMAND INFO says something else here: their channels are no keys.
var tableDiffers = []string{"ssubscribe", "sunsubscribe", "spublish"}

// sortedFlags leaves a reply as it is, but for the order of lines, which sets leave open.
func sortedFlags(reply string) string {
	lines := strings.Split(reply, "\r\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// TestKeysAndFlagsLikeRedis: COMMAND GETKEYS and GETKEYSANDFLAGS answer as a redis-server.
func TestKeysAndFlagsLikeRedis(t *testing.T) {
	theirs, ours := dial(t, "unix", startRedis(t)), dial(t, "tcp", serve(t, Options{Databases: fake()}))
	for _, proto := range []string{"2", "3"} {
		ours.do(t, "HELLO", proto)
		theirs.do(t, "HELLO", proto)
		for _, c := range []string{"get k", "set k v", "set k v get", "set k v ex 10 GET", "mset a 1 b 2", "del a b c",
			"lmove a b left right", "zunionstore d 2 a b", "zunion 2 a b", "eval x 2 a b c", "eval x 0",
			"sort k store d",
			"sort k by w_* store a store b", "sort k", "georadius k 1 2 3 m store d", "georadius k 1 2 3 m storedist d",
			"georadius k 1 2 3 m", "xread count 1 streams a b 0 0", "xreadgroup group g c streams a >",
			"bitop and d a b", "bitfield k get u8 0",
			"bitfield k set u8 0 1", "copy a b", "rename a b", "object encoding k", "memory usage k", "memory doctor",
			"xinfo stream k", "xgroup create k g 0", "nosuch", "get", "ping", "zmpop 2 a b min", "zmpop x a b min",
			"blmpop 0 2 a b left",
			"fcall f 1 k", "lcs a b", "sintercard 2 a b", "pfmerge d a b", "pfcount a b", "pfdebug encoding k",
			"smove a b m", "sinterstore d a b", "zrangestore d s 0 1", "geosearchstore d s frommember m byradius 1 m",
			"migrate h 1 k 0 1", "watch a b",
			"sort_ro k by x", "getex k", "restore k 0 x", "publish c m", "spublish c m", "command getkeys get k",
			"config get x", "eval x 9 a"} {
			for _, how := range []string{"GETKEYS", "GETKEYSANDFLAGS"} {
				cmd := append([]string{"COMMAND", how}, strings.Fields(c)...)
				if strings.HasPrefix(c, "migrate") {
					continue // not served
				}
				if got, want := sortedFlags(ours.do(t, cmd...)), sortedFlags(theirs.do(t, cmd...)); got != want {
					t.Errorf("RESP%s: %q:\n got %q\nwant %q", proto, cmd, got, want)
				}
			}
		}
	}
}

// oneSpec is the only key specification of a command, in COMMAND INFO, whose keys begin at its first argument.
func oneSpec(kind, does string, last, step int) string {
	return "*1\r\n*6\r\n" + bulk("flags") + "*2\r\n+" + kind + "\r\n+" + does + "\r\n" +
		bulk("begin_search") + "*4\r\n" + bulk("type") + bulk("index") + bulk("spec") + "*2\r\n" + bulk("index") +
		":1\r\n" +
		bulk("find_keys") + "*4\r\n" + bulk("type") + bulk("range") + bulk("spec") + "*6\r\n" +
		bulk("lastkey") + fmt.Sprintf(":%d\r\n", last) + bulk("keystep") + fmt.Sprintf(":%d\r\n", step) +
		bulk("limit") + ":0\r\n"
}
