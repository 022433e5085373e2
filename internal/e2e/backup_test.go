package e2e

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

// ask sends a command of any bytes, and gives all of the reply.
func (r *redis) ask(args ...string) string {
	r.t.Helper()
	_ = r.c.SetDeadline(time.Now().Add(patience))
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := r.c.Write(b.Bytes()); err != nil {
		r.t.Fatal(err)
	}
	return r.reply()
}

func (r *redis) reply() string {
	r.t.Helper()
	line, err := r.r.ReadString('\n')
	if err != nil {
		r.t.Fatal(err)
	}
	line = strings.TrimSuffix(line, "\r\n")
	n, _ := strconv.Atoi(line[1:])
	switch {
	case line[0] == '*' && n >= 0:
		parts := make([]string, n)
		for i := range parts {
			parts[i] = r.reply()
		}
		return "[" + strings.Join(parts, " ") + "]"
	case line[0] == '$' && n >= 0:
		b := make([]byte, n+2)
		if _, err := io.ReadFull(r.r, b); err != nil {
			r.t.Fatal(err)
		}
		return strconv.Quote(string(b[:n]))
	}
	return line
}

// memcached sends a line, perhaps with a block, and gives what is answered up to a line that ends it.
func (r *redis) memcached(line string) string {
	r.t.Helper()
	got := r.do("%s", line)
	for last := got; strings.HasPrefix(last, "VA"); {
		l, err := r.r.ReadString('\n')
		if err != nil {
			r.t.Fatal(err)
		}
		got += "|" + strings.TrimSpace(l)
		if last = strings.TrimSpace(l); strings.HasPrefix(got, "VALUE") && last != "END" {
			last = "VA"
		}
	}
	return got
}

// fillKinds fills a database with every kind of value that the gateway stores, by Redis's commands and by memcached's;
// read reads all of it.
func fillKinds(t *testing.T, db, mc *redis) (read func(db, mc *redis) []string) {
	t.Helper()
	far := strconv.FormatInt(time.Now().Add(24*time.Hour).UnixMilli(), 10)
	many := func(name, each string, n int) []string {
		out := []string{name, name + " many"}
		for i := range n {
			for _, w := range strings.Fields(each) {
				out = append(out, strings.ReplaceAll(w, "N", strconv.Itoa(i)))
			}
		}
		out[0] = map[string]string{"hash": "HSET", "set": "SADD", "ints": "SADD", "zset": "ZADD", "list": "RPUSH"}[name]
		return out
	}
	long := strings.Repeat("\x00\xff long ", 1<<20)
	for _, c := range [][]string{
		{"SET", "text", "value"}, {"SET", "number", "42"}, {"SET", "\x00\xff key\r\n", "\xfe\x00"},
		{"SET", "", "of the empty name"}, {"SET", "long", long},
		{"SET", "nuls", strings.Repeat("\x00", 3<<20)}, {"SETBIT", "bits", "1000", "1"}, {"PFADD", "unique", "a", "b"},
		{"GEOADD", "places", "13.36", "38.11", "Palermo"},
		{"HSET", "hash", "f", "v", "\xff", "\x00"}, {"SADD", "ints", "1", "2", "70000"}, {"SADD", "set", "a", "\xff"},
		{"ZADD", "zset", "1.5", "a", "-inf", "b", "1e-300", "\xff"},
		{"RPUSH", "list", "a", "", "\xff"}, many("hash", "fN vN", 600), many("set", "mN", 600), many("ints", "N", 600),
		many("zset", "N mN", 200), many("list", "eN", 600),
		{"XADD", "stream", "5-1", "f", "v"}, {"XADD", "stream", "5-2", "f", "w"},
		{"XADD", "stream", "6-0", "\xff", "\x00"}, {"XDEL", "stream", "5-2"},
		{"XGROUP", "CREATE", "stream", "group", "0"}, {"XREADGROUP", "GROUP", "group", "me", "COUNT", "1", "STREAMS",
			"stream", ">"},
		{"XGROUP", "CREATE", "empty stream", "group", "$", "MKSTREAM"},
		{"FUNCTION", "LOAD", "#!lua name=lib\nredis.register_function('answer', function() return 42 end)"},
	} {
		if got := db.ask(c...); strings.HasPrefix(got, "-") {
			t.Fatalf("%.40q: %s", c, got)
		}
	}
	var keys []string
	for _, k := range []string{"text", "number", "\x00\xff key\r\n", "", "long", "nuls", "bits", "unique", "places",
		"hash", "ints", "set", "zset", "list", "hash many", "set many",
		"ints many", "zset many", "list many", "stream", "empty stream"} {
		keys = append(keys, k)
		if k == "" {
			continue
		}
		for copied, at := range map[string]string{k + " expires": far, k + " far": "253402300800000"} {
			// the year 10000
			if got := db.ask("COPY", k, copied) + db.ask("PEXPIREAT", copied, at); got != ":1:1" {
				t.Fatalf("COPY and PEXPIREAT of %q: %s", copied, got)
			}
			keys = append(keys, copied)
		}
	}
	for _, line := range []string{"set mc 4294967295 0 3\r\na\x00b", "set mc-expires 7 86400 1\r\nx",
		"set mc-stale 5 0 1\r\nx", "md mc-stale I T80000", "mg mc-stale v h", "mg mc v h", "ms AAECAw== 1 b F9\r\nx"} {
		if got := mc.memcached(line); strings.Contains(got, "ERR") {
			t.Fatalf("%.40q: %s", line, got)
		}
	}
	return func(db, mc *redis) (out []string) {
		say := func(c []string, got string) {
			if len(got) > 300 {
				got = fmt.Sprintf("%s… %d bytes of %s", got[:100], len(got),
					strconv.FormatUint(xxh3.HashString(got), 16))
			}
			out = append(out, fmt.Sprintf("%.60q: %s", c, got))
		}
		ask := func(c ...string) { say(c, db.ask(c...)) }
		for _, k := range keys {
			for _, c := range []string{"TYPE", "PEXPIRETIME", "DUMP", "OBJECT ENCODING"} {
				ask(append(strings.Fields(c), k)...)
			}
		}
		ask("DBSIZE")
		for _, k := range []string{"text", "long", "", "\x00\xff key\r\n", "nuls", "bits"} {
			ask("GET", k)
		}
		ask("PFCOUNT", "unique")
		ask("GEOPOS", "places", "Palermo")
		for _, k := range []string{"", " many", " expires", " far"} {
			ask("HGETALL", "hash"+k)
			ask("SMEMBERS", "ints"+k)
			ask("SMEMBERS", "set"+k)
			ask("ZRANGE", "zset"+k, "0", "-1", "WITHSCORES")
			ask("LRANGE", "list"+k, "0", "-1")
			ask("XRANGE", "stream"+k, "-", "+")
		}
		ask("XINFO", "STREAM", "stream", "FULL")
		ask("XINFO", "STREAM", "empty stream", "FULL")
		ask("FUNCTION", "LIST", "WITHCODE")
		ask("FCALL", "answer", "0")
		for _, line := range []string{"get mc", "mg mc v f h", "get mc-expires", "mg AAECAw== b v f",
			"mg mc-stale v f h s", "get number"} {
			say([]string{line}, mc.memcached(line))
		}
		return out
	}
}

// TestBackup: what a gateway has stored, of every kind, is written to a file and brought back from it: by the store
// that it is from, and by another one. Redis's and memcached's commands answer as before.
func TestBackup(t *testing.T) {
	w := newWorld(t)
	store := func() (s *world, db, mc *redis) {
		s = &world{t: t, env: w.env, dir: freeAddr(t)}
		s.start(s.directory(t.TempDir(), freeAddr(t))...)
		s.start("memnode", "--name", "m1", "--directory", s.dir, "--memory", "192MiB")
		s.must(nil, "namespace", "create", "shop", "--bytes", "128MiB", "--replicas", "1")
		at, mcAt := freeAddr(t), freeAddr(t)
		s.start("gateway", "--databases", "shop", "--directory", s.dir, "--listen", at, "--listen-memcached", mcAt)
		return s, s.redis(at), s.redis(mcAt)
	}
	from, db, mc := store()
	read := fillKinds(t, db, mc)
	before := read(db, mc)
	same := func(what string, got []string) {
		t.Helper()
		for i := range before {
			if got[i] != before[i] {
				t.Errorf("%s: got  %s\nwant %s", what, got[i], before[i])
			}
		}
	}
	same("read once more", read(db, mc))
	file := from.must(nil, "--namespace", "shop", "--provider", "tcp", "scan", "--long", "-o", "json")

	from.must(nil, "--namespace", "shop", "flush", "--yes")
	if got := db.ask("DBSIZE"); got != ":0" {
		t.Fatalf("DBSIZE after a flush: %s", got)
	}
	from.must(file, "--namespace", "shop", "pipe")
	same("brought back", read(db, mc))

	to, db2, mc2 := store()
	to.must(file, "--namespace", "shop", "pipe")
	same("in another store", read(db2, mc2))

	// A byte that has changed in the file costs a key, and its line is named.
	lines := bytes.SplitAfter(file, []byte("\n"))
	at := -1
	for i, l := range lines {
		if bytes.Contains(l, []byte(`"key":"hash"`)) {
			at = i
		}
	}
	lines[at] = bytes.Replace(lines[at], []byte(`"type":"hash"`), []byte(`"type":"zset"`), 1)
	to.must(nil, "--namespace", "shop", "flush", "--yes")
	out, stderr, status := to.ctl(bytes.Join(lines, nil), "--namespace", "shop", "pipe", "-o", "json")
	if status != 2 || !strings.Contains(stderr, fmt.Sprintf("kvctl pipe: line %d: value of ", at+1)) ||
		!strings.Contains(stderr, "is no zset") || !bytes.Contains(out, []byte(`"failed":1,`)) {
		t.Errorf("a damaged line %d: exit status %d\n%s%s", at+1, status, out, stderr)
	}
	if got := db2.ask("EXISTS", "hash") + db2.ask("HLEN", "hash many"); got != ":0:600" {
		t.Errorf("after a damaged line: %s", got)
	}
}
