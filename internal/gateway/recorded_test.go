package gateway

import (
	"bufio"
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// The recorded run. Replies to a fixed list of commands are compared with those of testdata/recorded, in time that
// stands still, so that whoever changes how commands are performed sees which replies change.
//
//	go test ./internal/gateway -run TestRecorded -rewrite   # records them anew

// pools are what the words in angle brackets of templates.txt stand for; the first is what the first command of a
// template has. Keys of a name that is no pool are that key, or now and then some other.
var pools = map[string][]string{
	"v":      {"x", "10", "hello", "", "\xff\r\n", "3.5", strings.Repeat("y", 100)},
	"n":      {"1", "0", "-1", "2", "3", "-2", "100", "abc", "9223372036854775807", "9223372036854775808", "1.5", ""},
	"f":      {"1.5", "1", "-2", "3", "inf", "-inf", "nan", "abc", "(1", "1e400", "0"},
	"score":  {"1", "(1", "-inf", "+inf", "2", "(3", "abc"},
	"lex":    {"[a", "-", "+", "(b", "[c", "a", "("},
	"m":      {"a", "b", "c", "zz", "1", ""},
	"field":  {"f1", "f2", "f3", "none", ""},
	"at":     {"4000000000", "946684900", "1", "0", "-1", "abc", "9223372036854775807"},
	"atms":   {"4000000000000", "946684900000", "1", "0", "-1", "abc", "9223372036854775807"},
	"ttlnum": {"100", "1000", "0", "5", "-1", "abc", "9223372036854775807"},
	"id": {"2-1", "1-1", "3-1", "0", "$", "-", "+", "5", "abc", "(1-1", "3-2", "0-0",
		"18446744073709551615-18446744073709551615"},
	"lon":    {"15", "13.4", "-181", "abc"},
	"lat":    {"37", "38.1", "86", "abc"},
	"radius": {"200", "100", "0", "-1", "abc"},
}

var someKeys = []string{"str", "num", "bits", "list", "set", "zset", "hash", "stream", "geo", "hll", "ttl", "none", ""}

// recordedKeys are there before the commands of each template.
func recordedKeys() (cmds [][]string) {
	for _, s := range []string{"FLUSHALL", "FUNCTION FLUSH", "SET str hello", "SET num 10", "SET bits \xff\xf0\x00",
		"SET ttl x PXAT 4000000000000", "RPUSH list a b c 1 a", "RPUSH list2 x", "SADD set a b c", "SADD set1 m",
		"SADD set2 b c d", "ZADD zset 1 a 2 b 3 c", "ZADD zset1 1 m", "ZADD zset2 1 b 2 c 3 d", "ZADD zlex 0 a 0 b 0 c",
		"HSET hash f1 v1 f2 10 f3 3.5", "HSET hash1 f v", "PFADD hll a b c",
		"GEOADD geo 13.361389 38.115556 Palermo 15.087269 37.502669 Catania", "XADD stream 1-1 f v",
		"XADD stream 2-1 f v", "XADD stream 3-1 g w", "XGROUP CREATE stream g 0",
		"XREADGROUP GROUP g c COUNT 2 STREAMS stream >", "MSET w_a 3 w_b 1 w_c 2"} {
		cmds = append(cmds, strings.Fields(s))
	}
	return append(cmds, []string{"FUNCTION", "LOAD", "#!lua name=l\nredis.register_function('put',function(k,a) " +
		"return redis.call('set',k[1],a[1]) end)\nredis.register_function{function_name='see',callback=" +
		"function(k) return redis.call('get',k[1]) end,flags={'no-writes'}}"})
}

// template makes commands of a line of templates.txt.
type template struct {
	text  string
	count int
	words []string
	rng   *rand.Rand
}

func newTemplate(t *testing.T, line string) *template {
	n, text, _ := strings.Cut(line, " ")
	count, err := strconv.Atoi(n)
	if err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	h := fnv.New64a()
	h.Write([]byte(text))
	x := &template{text: text, count: count, rng: rand.New(rand.NewPCG(h.Sum64(), 1))}
	for rest := text; rest != ""; {
		at := strings.IndexByte(rest, ' ')
		if rest[0] == '{' {
			at = strings.IndexByte(rest, '}') + 1
			if at < len(rest) && rest[at] == '?' {
				at++
			}
			if at == len(rest) {
				at = -1
			}
		}
		if at < 0 {
			at = len(rest)
		}
		x.words = append(x.words, rest[:at])
		rest = strings.TrimPrefix(rest[at:], " ")
	}
	return x
}

// word appends what a word stands for; good asks for what is right.
func (x *template) word(args []string, w string, good bool) []string {
	switch {
	case strings.HasPrefix(w, "{"):
		n := 1
		if w = w[1:]; strings.HasSuffix(w, "?") {
			if w = w[:len(w)-1]; good {
				return args
			}
			n = x.rng.IntN(4)
		}
		list := strings.Split(strings.TrimSuffix(w, "}"), "|")
		for range n {
			pick := list[0]
			if !good {
				pick = list[x.rng.IntN(len(list))]
			}
			for _, w := range strings.Fields(pick) {
				args = x.word(args, w, good)
			}
		}
		return args
	case strings.HasPrefix(w, "<"):
		name := strings.Trim(w, "<>")
		pool := pools[name]
		switch {
		case name == "any":
			pool = someKeys
		case pool != nil:
		case good || x.rng.IntN(10) < 7:
			return append(args, name)
		default:
			pool = someKeys
		}
		if good {
			return append(args, pool[0])
		}
		return append(args, pool[x.rng.IntN(len(pool))])
	}
	return append(args, unescape(w))
}

// unescape gives the bytes that \x stands for, and the spaces of what a shebang has.
func unescape(w string) string {
	w = strings.Replace(w, "#!lua_", "#!lua ", 1)
	if s, err := strconv.Unquote(`"` + w + `"`); err == nil {
		return s
	}
	return w
}

// commands are a good one, others, the name alone, and the good one with an argument too many.
func (x *template) commands() (cmds [][]string) {
	for i := range x.count - 2 {
		var args []string
		for _, w := range x.words {
			args = x.word(args, w, i == 0)
		}
		cmds = append(cmds, args)
	}
	good, names := cmds[0], 1
	if c := find([]byte(good[0])); c != nil && c.sub != nil {
		names = 2
	}
	return append(cmds, good[:min(names, len(good))], append(slices.Clone(good), "extra"))
}

// recorder records what a gateway replies, and which commands it was given.
type recorder struct {
	t       *testing.T
	out     bytes.Buffer
	replies map[*command][2]int // good ones, and errors
}

func (r *recorder) noteReply(cmd []string, reply string) {
	c := recordedCommand(cmd)
	if c == nil {
		return
	}
	n := r.replies[c]
	n[values.Bit(strings.HasPrefix(reply, "-"))]++
	r.replies[c] = n
}

// inOneLine is a reply in a line that a person can read; what is beyond the start of a long one is in a sum.
func inOneLine(reply string) string {
	const most = 160
	h := fnv.New32a()
	h.Write([]byte(reply))
	s := strconv.Quote(reply)
	s = strings.ReplaceAll(s[1:len(s)-1], `\r\n`, "·")
	if len(s) > most {
		s = fmt.Sprintf("%s… %d bytes, %08x", strings.ToValidUTF8(s[:most], ""), len(reply), h.Sum32())
	}
	return s
}

func commandLine(cmd []string) string {
	var b strings.Builder
	for i, a := range cmd {
		if i > 0 {
			b.WriteByte(' ')
		}
		q := strconv.Quote(a)
		if a != "" && q == `"`+a+`"` && !strings.Contains(a, " ") {
			q = a
		}
		if len(q) > 60 {
			q = fmt.Sprintf("%s…(%d)", q[:40], len(a))
		}
		b.WriteString(q)
	}
	return b.String()
}

const pcallScript = "return redis.pcall(unpack(ARGV))"

// ways are how a client may give the same commands. Each returns their replies; fitting ones are only of those that
// fit.
var ways = []struct {
	name    string
	fitting bool
	give    func(t *testing.T, p *peer, cmds [][]string) []string
}{
	{"alone", false, func(t *testing.T, p *peer, cmds [][]string) (replies []string) {
		for _, c := range cmds {
			replies = append(replies, p.do(t, c...))
		}
		return replies
	}},
	{"RESP3", false, func(t *testing.T, p *peer, cmds [][]string) []string {
		p.do(t, "HELLO", "3")
		return pipelined(t, p, cmds)
	}},
	{"EXEC each", false, func(t *testing.T, p *peer, cmds [][]string) (replies []string) {
		var all [][]string
		for _, c := range cmds {
			all = append(all, []string{"MULTI"}, c, []string{"EXEC"})
		}
		all = append(all, []string{"DISCARD"}) // of a MULTI whose commands were refused
		got := pipelined(t, p, all)
		for i := range cmds {
			replies = append(replies, executed(got[3*i+1:3*i+3], 1)...)
		}
		return replies
	}},
	{"EXEC all", true, func(t *testing.T, p *peer, cmds [][]string) (replies []string) {
		all := append([][]string{{"WATCH", "other"}, {"MULTI"}}, fitting(cmds)...)
		got := pipelined(t, p, append(all, []string{"EXEC"}))
		return executed(got[2:], len(all)-2)
	}},
	{"EVALSHA", true, func(t *testing.T, p *peer, cmds [][]string) []string {
		sha := strings.Split(p.do(t, "SCRIPT", "LOAD", pcallScript), "\r\n")[1]
		var all [][]string
		for _, c := range fitting(cmds) {
			head := []string{"EVALSHA", sha, "0"}
			if i := recordedCommand(c).First; i > 0 && i < len(c) {
				head = []string{"EVALSHA", sha, "1", c[i]}
			}
			all = append(all, append(head, c...))
		}
		return pipelined(t, p, all)
	}},
}

// recordedCommand is what a line is about, or nil.
func recordedCommand(cmd []string) *command {
	c := find([]byte(cmd[0]))
	if c != nil && c.sub != nil && len(cmd) > 1 {
		return cmp.Or(c.subcommand([]byte(cmd[1])), c)
	}
	return c
}

// fits reports whether a command may be queued by MULTI.
func fits(cmd []string) bool {
	c := recordedCommand(cmd)
	return c != nil && c.served() && c.sub == nil && !c.Is(spec.InSteps) &&
		(c.Arity < 0 && len(cmd) >= -c.Arity || len(cmd) == c.Arity)
}

func fitting(cmds [][]string) [][]string {
	return slices.DeleteFunc(slices.Clone(cmds), func(c []string) bool { return !fits(c) })
}

func pipelined(t *testing.T, p *peer, cmds [][]string) (replies []string) {
	p.send(t, cmds...)
	for range cmds {
		replies = append(replies, string(p.reply(t)))
	}
	return replies
}

// executed are the replies to queued commands, the last of got being EXEC's: those of the transaction, or why it was
// refused.
func executed(got []string, n int) (replies []string) {
	exec := got[len(got)-1]
	head := fmt.Sprintf("*%d\r\n", n)
	rest, ok := strings.CutPrefix(exec, head)
	for i := range n {
		if !ok || got[i] != "+QUEUED\r\n" {
			replies = append(replies, got[i])
			continue
		}
		one, err := readReply(nil, bufioOf(rest))
		if err != nil {
			one = []byte(err.Error())
		}
		rest = rest[len(one):]
		replies = append(replies, string(one))
	}
	return replies
}

// state is what the store has afterwards, in few letters.
func state(t *testing.T, p *peer) string {
	names := strings.Split(p.do(t, "KEYS", "*"), "\r\n")
	slices.Sort(names)
	var cmds [][]string
	for _, k := range names {
		if k != "" && k[0] != '$' && k[0] != '*' {
			cmds = append(cmds, []string{"DUMP", k}, []string{"PEXPIRETIME", k})
		}
	}
	h := fnv.New32a()
	fmt.Fprintf(h, "%q%q", names, pipelined(t, p, cmds))
	return fmt.Sprintf("%08x", h.Sum32())
}

// give gives the commands of a template in each way, and records the replies: those to commands by themselves, and of
// the other ways those that differ.
func (r *recorder) give(x *template, peers []*peer) {
	fmt.Fprintf(&r.out, "# %s\n", x.text)
	cmds := x.commands()
	replies := make([][]string, len(ways))
	states := make([]string, len(ways))
	for i, way := range ways {
		p := peers[i]
		pipelined(r.t, p, recordedKeys())
		replies[i] = way.give(r.t, p, cmds)
		p.do(r.t, "RESET")
		states[i] = state(r.t, p)
	}
	for i, c := range cmds {
		alone := replies[0][i]
		fmt.Fprintf(&r.out, "%s\n  %s\n", commandLine(c), inOneLine(masked(c, alone)))
		r.noteReply(c, alone)
		for j, way := range ways[1:] {
			all := &replies[j+1]
			if len(*all) == 0 || way.fitting && !fits(c) {
				continue
			}
			if got := (*all)[0]; masked(c, got) != masked(c, alone) {
				fmt.Fprintf(&r.out, "  %s: %s\n", way.name, inOneLine(masked(c, got)))
			}
			*all = (*all)[1:]
		}
	}
	fmt.Fprintf(&r.out, "state %s\n", states)
}

// check compares what was recorded with a file, or writes that.
func (r *recorder) check(name string) {
	r.t.Helper()
	file := filepath.Join("testdata", "recorded", name)
	if f := flag.Lookup("rewrite"); f != nil && f.Value.String() == "true" {
		if err := os.WriteFile(file, r.out.Bytes(), 0o644); err != nil {
			r.t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		r.t.Fatal(err)
	}
	got, old := strings.Split(r.out.String(), "\n"), strings.Split(string(want), "\n")
	bad := 0
	for i := range max(len(got), len(old)) {
		a, b := "(nothing)", "(nothing)"
		if i < len(got) {
			a = got[i]
		}
		if i < len(old) {
			b = old[i]
		}
		if a == b {
			continue
		}
		if bad++; bad > 20 {
			r.t.Fatal("and more: go test ./internal/gateway -run TestRecorded -rewrite, and look at the difference")
		}
		r.t.Errorf("%s:%d, behind %s\n got %s\nwant %s", file, i+1, lastCommand(got, i), a, b)
	}
}

func lastCommand(lines []string, i int) string {
	for i = min(i, len(lines)-1); i > 0 && strings.HasPrefix(lines[i], "  "); i-- {
	}
	return lines[max(i, 0)]
}

func TestRecorded(t *testing.T) {
	templates, err := os.ReadFile(filepath.Join("testdata", "recorded", "templates.txt"))
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		r := &recorder{t: t, replies: make(map[*command][2]int)}
		db := clienttest.New(clienttest.Options{})
		addr := serve(t, Options{Databases: []Database{{"a", db}, {"b", db}}, Debug: true})
		var peers []*peer
		for range ways {
			peers = append(peers, dial(t, "tcp", addr))
		}
		for l := range strings.Lines(string(templates)) {
			if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, "#") {
				r.give(newTemplate(t, l), peers)
			}
		}
		r.check("replies.txt")
		for _, name := range []string{"session", "cluster"} {
			addr, g := start(t, Options{Databases: fake(), Debug: true, Cluster: name == "cluster"})
			r.session(name, addr, g)
		}
		r.missing()
	})
}

// session gives the commands of a file, which several connections give in turn, and records their replies:
//
//	a> GET k   # of connection a, with its reply
//	a+ GET k   # and there is no reply
//	a* BLPOP k # and it waits
//	a<         # one more reply, or message
//	a.         # it ends, or has been ended
//
// An argument with spaces is in quotes.
func (r *recorder) session(name, addr string, g *Gateway) {
	commands, err := os.ReadFile(filepath.Join("testdata", "recorded", name+".txt"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.out.Reset()
	peers := make(map[string]*peer)
	var names []string // addresses, and what they are called
	for l := range strings.Lines(string(commands)) {
		l = strings.TrimSpace(l)
		if l == "" || l[0] == '#' {
			fmt.Fprintln(&r.out, l)
			continue
		}
		who := l[:1]
		p := peers[who]
		if p == nil {
			p = dial(r.t, "tcp", addr)
			peers[who] = p
			names = append(names, p.LocalAddr().String(), "address:of"+who, addr, "the gateway",
				addr[strings.LastIndexByte(addr, ':'):], ":port")
		}
		fmt.Fprintln(&r.out, l)
		cmd := r.split(l[2:])
		var reply string
		switch l[1] {
		case '>':
			reply = p.do(r.t, cmd...)
		case '+':
			p.send(r.t, cmd)
			r.noteReply(cmd, "+")
			continue
		case '*':
			p.send(r.t, cmd)
			for !blockedClients(g) {
				runtime.Gosched()
			}
			r.noteReply(cmd, "+")
			continue
		case '<':
			reply = string(p.reply(r.t))
		case '.':
			p.closed(r.t)
			p.Close()
			delete(peers, who)
			continue
		default:
			r.t.Fatalf("%s: %q", name, l)
		}
		if l[1] == '>' {
			r.noteReply(cmd, reply)
		}
		fmt.Fprintf(&r.out, "  %s\n", inOneLine(masked(cmd, strings.NewReplacer(names...).Replace(reply))))
	}
	r.check(name + "-replies.txt")
}

// blockedClients reports whether a client waits. Time does not pass here, so that whoever asks has to ask again.
func blockedClients(g *Gateway) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.mu.conns {
		if c.blocked.Load() != nil {
			return true
		}
	}
	return false
}

// split is a line of a session as arguments.
func (r *recorder) split(l string) (args []string) {
	for l = strings.TrimSpace(l); l != ""; l = strings.TrimSpace(l) {
		if l[0] != '"' {
			a, rest, _ := strings.Cut(l, " ")
			args, l = append(args, a), rest
			continue
		}
		q, err := strconv.QuotedPrefix(l)
		if err != nil {
			r.t.Fatalf("%s: %v", l, err)
		}
		a, _ := strconv.Unquote(q)
		args, l = append(args, a), l[len(q):]
	}
	return args
}

// masked hides what differs from run to run.
func masked(cmd []string, reply string) string {
	switch what := strings.ToLower(strings.Join(cmd, " ")); {
	case what == "info", strings.HasPrefix(what, "info "), what == "memory stats", what == "acl genpass",
		what == "cluster myid":
		if len(reply) > 3 {
			return reply[:1] + "…"
		}
	case strings.HasPrefix(what, "cluster"):
		return runIDs.ReplaceAllString(reply, "node")
	case strings.HasPrefix(what, "client"):
		return changing.ReplaceAllString(reply, "$1=0")
	}
	return reply
}

var (
	runIDs   = regexp.MustCompile("[0-9a-f]{40}")
	changing = regexp.MustCompile("(fd|tot-mem|rbs|rbp|obl|omem|qbuf-free|argv-mem|multi-mem|age|idle)=[0-9]+")
)

// oneKind are commands whose replies are all good here, or all errors.
var oneKind = strings.Fields("quit info lolwut command|docs command|info latency|histogram latency|reset " +
	"unsubscribe punsubscribe sunsubscribe pubsub|channels pubsub|numsub pubsub|shardchannels pubsub|shardnumsub " +
	"object|freq config|rewrite acl|load acl|save latency|graph script|kill function|kill function|restore " +
	"cluster|replicas cluster|slaves")

// missing reports commands of the table that were not given, or not well and badly.
func (r *recorder) missing() {
	for _, c := range commandsByID {
		switch n := r.replies[c]; {
		case c == unknown:
		case n[0]+n[1] < 2:
			r.t.Errorf("%s is not in the recorded run twice", c.Name)
		case c.served() && c.sub == nil && (n[0] == 0 || n[1] == 0) != slices.Contains(oneKind, c.Name):
			r.t.Errorf("%s has %d good replies and %d errors in the recorded run: see oneKind", c.Name, n[0], n[1])
		}
	}
}

func bufioOf(s string) *bufio.Reader { return bufio.NewReader(strings.NewReader(s)) }
