package gateway

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/redis/go-redis/v9"
)

// readable is a reply in one line.
func readable(t *testing.T, raw []byte) string {
	t.Helper()
	r := bufio.NewReader(bytes.NewReader(raw))
	var one func() string
	one = func() string {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		line = strings.TrimSuffix(line, "\r\n")
		n, _ := strconv.Atoi(line[1:])
		switch line[0] {
		case '$':
			if n < 0 {
				return "nil"
			}
			b := make([]byte, n+2)
			if _, err := io.ReadFull(r, b); err != nil {
				t.Fatalf("%q: %v", raw, err)
			}
			return strconv.Quote(string(b[:n]))
		case '*':
			if n < 0 {
				return "nil"
			}
			var list []string
			for range n {
				x := one()
				if len(list) > 0 && (list[len(list)-1] == `"age-seconds"` || list[len(list)-1] == `"client-info"` ||
					list[len(list)-1] == `"id"`) {
					x = "..."
				}
				list = append(list, x)
			}
			return "[" + strings.Join(list, " ") + "]"
		}
		return line
	}
	return one()
}

// words are a line's; those in quotes may have spaces.
func words(line string) (out []string) {
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimSpace(line) {
		if q, err := strconv.QuotedPrefix(line); err == nil {
			s, _ := strconv.Unquote(q)
			out, line = append(out, s), line[len(q):]
			continue
		}
		w, rest, _ := strings.Cut(line, " ")
		out, line = append(out, w), rest
	}
	return out
}

// script says lines on connections, which it opens as they are named, and returns the replies.
func script(t *testing.T, peers map[string]*peer, open func() *peer, input string) string {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(input) {
		w := words(line)
		p := peers[w[0]]
		if p == nil {
			p = open()
			peers[w[0]] = p
		}
		reply := "closed"
		_, err := p.Write(encode(w[1:]...))
		if err == nil {
			_, err = p.r.Peek(1)
		}
		if err == nil {
			reply = readable(t, p.reply(t))
		}
		if strings.EqualFold(w[1], "CLIENT") && strings.EqualFold(w[2], "LIST") && strings.HasPrefix(reply, `"`) {
			reply = "..."
		}
		fmt.Fprintf(&b, "%s\n", reply)
	}
	return b.String()
}

func TestACL(t *testing.T) {
	datadriven.Walk(t, "testdata/acl", func(t *testing.T, path string) {
		addr := serve(t, Options{Databases: fake(), ACLFile: aclFile(t, "user default on nopass ~* &* +@all\n")})
		peers := make(map[string]*peer)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			return script(t, peers, func() *peer { return dial(t, "tcp", addr) }, d.Input)
		})
	})
}

// aclFile makes a file of users.
func aclFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "users.acl")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestACLLikeRedis: a redis-server answers as testdata says.
func TestACLLikeRedis(t *testing.T) {
	sock := startRedis(t, "--aclfile", aclFile(t, ""))
	peers := make(map[string]*peer)
	datadriven.RunTest(t, "testdata/acl/redis", func(t *testing.T, d *datadriven.TestData) string {
		return script(t, peers, func() *peer { return dial(t, "unix", sock) }, d.Input)
	})
}

// TestCategoriesLikeRedis: categories are those that a redis-server tells. Needs of keys are TestRightsLikeRedis's.
func TestCategoriesLikeRedis(t *testing.T) {
	c := redis.NewClient(&redis.Options{Network: "unix", Addr: startRedis(t), Protocol: 3})
	defer c.Close()
	checked := 0
	var compareOne func(x []any)
	compareOne = func(x []any) {
		for _, sub := range x[9].([]any) {
			compareOne(sub.([]any))
		}
		cmd := named([]byte(x[0].(string)))
		if cmd == nil {
			return
		}
		checked++
		var theirs []string
		for _, cat := range x[6].([]any) {
			theirs = append(theirs, strings.TrimPrefix(cat.(string), "@"))
		}
		ours := cmd.categories.Names()
		slices.Sort(ours)
		if slices.Sort(theirs); !slices.Equal(ours, theirs) {
			t.Errorf("%s: categories %v, redis-server has %v", cmd.Name, ours, theirs)
		}
	}
	all, err := c.Do(t.Context(), "COMMAND").Slice()
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range all {
		compareOne(x.([]any))
	}
	if checked < 100 {
		t.Errorf("%d commands compared", checked)
	}
}

// TestEveryCommandHasCategories: a rule such as +@read -@dangerous must know of each command.
func TestEveryCommandHasCategories(t *testing.T) {
	for _, c := range commandsByID {
		if c != unknown && c.categories == 0 {
			t.Errorf("%s has none", c.Name)
		}
		if c.First > 0 && !c.inDatabase {
			t.Errorf("%s has keys and no database", c.Name)
		}
	}
}

// TestACLFile: the file's users are those that there are; a bad file changes nothing and is told of without
// its passwords; connections of users that it has no more are closed, and what is saved can be loaded.
func TestACLFile(t *testing.T) {
	path := aclFile(t, "user default off\n\nuser alice on >pw ~* &* +@all\nuser bob on nopass ~* db=0 +get\n")
	addr, g := start(t, Options{Databases: fake(), ACLFile: path})
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a, b, n := dial(t, "tcp", addr), dial(t, "tcp", addr), dial(t, "tcp", addr)
	n.want(t, "-NOAUTH Authentication required.\r\n", "PING")
	n.want(t, "-WRONGPASS invalid username-password pair or user is disabled.\r\n", "AUTH", "default", "")
	a.want(t, "+OK\r\n", "AUTH", "alice", "pw")
	b.want(t, "+OK\r\n", "AUTH", "bob", "x")
	b.want(t, "$-1\r\n", "GET", "k")

	write("user alice on s3cret\nuser alice on >s3cret +nosuch\n" +
		"user carol #s3cret\nalice\nuser carol on\nuser carol on\n")
	err := g.ReloadUsers()
	if err == nil {
		t.Fatal("a bad file was loaded")
	}
	want := strings.ReplaceAll(`users: F:1: user alice: rule 2: Syntax error
F:2: user alice: '+nosuch': Unknown command or category name in ACL
F:3: user carol: rule 1: The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters
F:4: want: user NAME RULE...
F:6: user carol is there twice`, "F", path)
	if err.Error() != want {
		t.Errorf("got %s\nwant %s", err, want)
	}
	if r := a.do(t, "ACL", "LOAD"); !strings.HasPrefix(r, "-ERR users: ") ||
		!strings.Contains(r, "no change to the previously active ACL rules") || strings.Contains(r, "s3cret") {
		t.Errorf("ACL LOAD: %q", r)
	}
	b.want(t, "$-1\r\n", "GET", "k")

	write("user default off\nuser alice on >other ~* &* +@all\nuser carol on nopass +ping\n")
	if err := g.ReloadUsers(); err != nil {
		t.Fatal(err)
	}
	b.closed(t)
	a.want(t, "+PONG\r\n", "PING")
	n.want(t, "-WRONGPASS invalid username-password pair or user is disabled.\r\n", "AUTH", "alice", "pw")
	n.want(t, "+OK\r\n", "AUTH", "alice", "other")
	c := dial(t, "tcp", addr)
	c.want(t, "+OK\r\n", "AUTH", "carol", "")
	n.want(t, "+OK\r\n", "ACL", "SETUSER", "dave", "on", ">pw", "%R~r*", "&c", "db=1", "+get", "(~w* +set)")
	n.want(t, "+OK\r\n", "ACL", "SAVE")
	saved := n.do(t, "ACL", "LIST")
	n.want(t, "+OK\r\n", "ACL", "SETUSER", "carol", "off")
	n.want(t, ":1\r\n", "ACL", "DELUSER", "dave")
	c.want(t, "+PONG\r\n", "PING") // as in Redis, until a reload
	n.want(t, "+OK\r\n", "ACL", "LOAD")
	n.want(t, saved, "ACL", "LIST")
	if text, err := os.ReadFile(path); err != nil || strings.Contains(string(text), "pw") {
		t.Errorf("the file is %q, %v", text, err)
	}
	write("user alice off >other ~* &* +@all\nuser carol on nopass +ping\n")
	n.want(t, "+OK\r\n", "ACL", "LOAD")
	n.closed(t)
	c.want(t, "+PONG\r\n", "PING")
	p := dial(t, "tcp", addr)
	p.want(t, "-NOAUTH Authentication required.\r\n", "PING") // a file without default leaves it off

	if _, err := New(Options{Databases: fake(), ACLFile: path + ".not"}); err == nil {
		t.Error("a gateway without its file of users began")
	}
	q := dial(t, "tcp", serve(t, Options{Databases: fake(), ACLFile: path, Password: "top"}))
	q.want(t, "+OK\r\n", "AUTH", "top")
	q.want(t, "+OK\r\n", "AUTH", "carol", "x")
}

// TestDocumentedUsers: the users of docs/gateway.md may do what they are meant to, and nothing else.
func TestDocumentedUsers(t *testing.T) {
	page, err := os.ReadFile("../../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	_, lines, _ := strings.Cut(string(page), "```\nuser default off\n")
	lines, _, found := strings.Cut(lines, "```")
	hash := "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae" // of foo
	if !found || strings.Count(lines, "#SHA256 ") != 3 {
		t.Fatalf("the example is %q", lines)
	}
	path := aclFile(t, "user default off\n"+strings.ReplaceAll(lines, "#SHA256 ", "#"+hash+" "))
	addr, _ := start(t, Options{Databases: fake(), ACLFile: path})
	for user, cmds := range map[string]map[string]bool{
		"app": {"SET app:1 x": true, "MGET app:1 app:2": true, "MULTI": true, "DISCARD": true, "CLIENT SETNAME x": true,
			"SET other x": false, "SELECT 1": false,
			"KEYS *": false, "FLUSHDB": false, "ACL LIST": false, "INFO": false},
		"report": {"GET app:1": true, "SCAN 0": true, "SELECT 1": true, "GETEX app:1": false, "SET app:1 x": false,
			"DEL app:1": false, "FLUSHALL": false},
		"admin": {"FLUSHALL": true, "ACL LIST": true, "SELECT 1": true, "SET x y": true},
	} {
		p := dial(t, "tcp", addr)
		p.want(t, "+OK\r\n", "AUTH", user, "foo")
		for cmd, may := range cmds {
			if got := p.do(t, words(cmd)...); strings.HasPrefix(got, "-NOPERM") == may || may &&
				strings.HasPrefix(got, "-") && cmd != "DISCARD" {
				t.Errorf("%s as %s: %q", cmd, user, got)
			}
			if cmd == "MULTI" {
				p.do(t, "DISCARD") // the order of a map is any
			}
		}
	}
}

// TestACLGoRedis: go-redis authenticates as users with both protocols, and its commands about ACL work.
func TestACLGoRedis(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	for _, proto := range []int{2, 3} {
		admin := redis.NewClient(&redis.Options{Addr: addr, Protocol: proto})
		defer admin.Close()
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatalf("RESP%d: %v", proto, err)
			}
		}
		must(admin.ACLSetUser(t.Context(), "alice", "on", ">pw", "~a:*", "+@read", "+@write", "+@connection").Err())
		must(admin.ACLLogReset(t.Context()).Err())
		alice := redis.NewClient(&redis.Options{Addr: addr, Protocol: proto, Username: "alice", Password: "pw"})
		defer alice.Close()
		must(alice.Set(t.Context(), "a:k", "v", 0).Err())
		err := alice.Get(t.Context(), "b:k").Err()
		if err == nil || !redis.HasErrorPrefix(err, "NOPERM") {
			t.Errorf("RESP%d: %v", proto, err)
		}
		logs, err := admin.ACLLog(t.Context(), 10).Result()
		must(err)
		if len(logs) != 1 || logs[0].Username != "alice" || logs[0].Reason != "key" || logs[0].Object != "b:k" ||
			logs[0].ClientInfo.User != "alice" {
			t.Errorf("RESP%d: log %+v", proto, logs)
		}
		reply, err := admin.ACLDryRun(t.Context(), "alice", "get", "b:k").Result()
		must(err)
		if reply != "This user has no permissions to access the 'b:k' key" {
			t.Errorf("RESP%d: %q", proto, reply)
		}
		list, err := admin.ACLList(t.Context()).Result()
		must(err)
		if len(list) != 2 {
			t.Errorf("RESP%d: %q", proto, list)
		}
		in, err := admin.Do(t.Context(), "ACL", "GETUSER", "alice").Result()
		must(err)
		if m, ok := in.(map[any]any); proto == 3 && (!ok || m["keys"] != "~a:*") {
			t.Errorf("RESP3: %v", in)
		}
		wrong := redis.NewClient(&redis.Options{Addr: addr, Protocol: proto, Username: "alice", Password: "no",
			MaxRetries: -1})
		defer wrong.Close()
		if err := wrong.Ping(t.Context()).Err(); err == nil || !redis.HasErrorPrefix(err, "WRONGPASS") {
			t.Errorf("RESP%d: %v", proto, err)
		}
		n, err := admin.ACLDelUser(t.Context(), "alice").Result()
		must(err)
		if err := alice.Get(t.Context(), "a:k").Err(); n != 1 || err == nil || !redis.HasErrorPrefix(err, "WRONGPASS") {
			t.Errorf("RESP%d: after DELUSER: %d, %v", proto, n, err)
		}
	}
}

// TestACLInLoop: what a loop looks up is allowed as everything else is.
func TestACLInLoop(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	admin := dial(t, "tcp", addr)
	admin.want(t, "+OK\r\n", "ACL", "SETUSER", "alice", "on", "nopass", "~a*", "+get")
	var all []*peer
	for range 8 {
		p := dial(t, "tcp", addr)
		p.want(t, "+OK\r\n", "AUTH", "alice", "x")
		all = append(all, p)
	}
	for range 200 {
		for _, p := range all {
			p.send(t, []string{"GET", "a"})
		}
		for _, p := range all {
			if got := string(p.reply(t)); got != "$-1\r\n" {
				t.Fatalf("got %q", got)
			}
		}
		for _, p := range all {
			p.send(t, []string{"GET", "b"})
		}
		for _, p := range all {
			if got := string(p.reply(t)); !strings.HasPrefix(got, "-NOPERM") {
				t.Fatalf("got %q", got)
			}
		}
	}
}

// TestACLGenPass: as many hexadecimal digits as the bits need, 256 bits unless said otherwise.
func TestACLGenPass(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	for bits, digits := range map[string]int{"": 64, "1": 1, "5": 2, "4096": 1024} {
		cmd := []string{"ACL", "GENPASS"}
		if bits != "" {
			cmd = append(cmd, bits)
		}
		if r := p.do(t, cmd...); len(r) != len(bulk(strings.Repeat("x", digits))) {
			t.Errorf("%q bits: %q", bits, r)
		}
	}
	for _, bad := range []string{"0", "-1", "4097"} {
		p.want(t, "-ERR ACL GENPASS argument must be the number of bits for the output password, a positive number "+
			"up to 4096\r\n", "ACL", "GENPASS", bad)
	}
}

// TestRulesAllocateNothing: commands of users with rules cost no memory each.
func TestRulesAllocateNothing(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	p := dial(t, "tcp", addr)
	if err := g.users.Set(
		"u", []string{"on", "nopass", "+@read", "+set", "db=0", "~a-pattern-that-is-longer-than-32-bytes:*",
			"(~b* +get)"}); err != nil {
		t.Fatal(err)
	}
	p.want(t, "+OK\r\n", "AUTH", "u", "x")
	var c *conn
	g.each(func(x *conn) { c = x })
	for _, cmd := range []string{"GET b", "GET a-pattern-that-is-longer-than-32-bytes:1",
		"SET a-pattern-that-is-longer-than-32-bytes:1 x EX 1", "SCAN 0"} {
		var args [][]byte
		for _, w := range words(cmd) {
			args = append(args, []byte(w))
		}
		known := named(lower(nil, args[0]))
		if n := testing.AllocsPerRun(100, func() {
			if err := c.refusal(known, args); err != nil {
				t.Error(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", cmd, n)
		}
	}
	g.each(func(*conn) {}) // which locks what the connection locks when it ends: what was done here is done before that
}
