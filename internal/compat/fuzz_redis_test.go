package compat

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// TestFuzzRedis asks the gateway and a redis-server the same random commands, in RESP2 and
// RESP3. The commands are those that the gateway lists; their arguments are made up from what
// COMMAND DOCS of the redis-server says about them, so that a new command takes part by itself.
func TestFuzzRedis(t *testing.T) {
	l := open(t)
	list, err := loadReviewed("redis")
	must(t, err)
	d, err := newRedisDialect(t.Context(), l.ours().redis, l.reference().redis, list)
	must(t, err)
	original := redis.NewClient(&redis.Options{Addr: l.reference().redis})
	defer original.Close()
	// The gateway's limit, so that strings become too long at the same length.
	const setting = "proto-max-bulk-len"
	before, err := original.ConfigGet(t.Context(), setting).Result()
	must(t, err)
	must(t, original.ConfigSet(t.Context(), setting, strconv.Itoa(64<<20)).Err())
	defer original.ConfigSet(context.WithoutCancel(t.Context()), setting, before[setting])
	f := &fuzzer{dialect: d, ours: l.ours().redis, theirs: l.reference().redis, list: list}
	f.differs(t, "Redis", 60)
}

// docCommand is a command as COMMAND and COMMAND DOCS describe it.
type docCommand struct {
	name, group string
	words       []string // the name as it is sent, a subcommand's with its container's
	write       bool
	// random: each answer is another one. unordered: a list in any order.
	random, unordered bool
	args              []docArg
}

// docArg is an argument, or several.
type docArg struct {
	name, kind, token                    string
	optional, multiple, multipleWithWord bool
	args                                 []docArg // of a block, or to choose from
}

type redisDialect struct {
	all     []*docCommand
	byGroup map[string][]*docCommand
	groups  []string
	byName  map[string]*docCommand // by words
}

func newRedisDialect(ctx context.Context, ours, theirs string, list *reviewed) (*redisDialect, error) {
	a := redis.NewClient(&redis.Options{Addr: ours, Protocol: 2})
	defer a.Close()
	served, err := a.Do(ctx, "COMMAND").Slice()
	if err != nil {
		return nil, err
	}
	b := redis.NewClient(&redis.Options{Addr: theirs, Protocol: 3})
	defer b.Close()
	known, err := b.Do(ctx, "COMMAND").Slice()
	if err != nil {
		return nil, err
	}
	tips := make(map[string][]any)
	for _, c := range known {
		addCommand(tips, c)
	}
	docs, err := b.Do(ctx, "COMMAND", "DOCS").Result()
	if err != nil {
		return nil, err
	}
	d := &redisDialect{byGroup: make(map[string][]*docCommand), byName: make(map[string]*docCommand)}
	has := make(map[string][]any)
	for _, c := range served {
		addCommand(has, c)
	}
	names := make([]string, 0, len(has))
	for name := range has {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		container, _, sub := strings.Cut(name, "|")
		doc, ok := docs.(map[any]any)[container].(map[any]any)
		if ok && sub {
			group := doc["group"]
			subs, _ := doc["subcommands"].(map[any]any)
			if doc, ok = subs[name].(map[any]any); ok {
				doc["group"] = group
			}
		}
		info := tips[name]
		if !ok || info == nil || list.left[name] != "" || list.left[container] != "" {
			continue // a container alone, one that Redis has not, or one that is not compared
		}
		c := &docCommand{name: name, words: strings.Split(name, "|"), group: fmt.Sprint(doc["group"]),
			args: docArgs(doc["arguments"])}
		flags, hints := fmt.Sprint(info[2]), fmt.Sprint(info[7])
		c.write = strings.Contains(flags, "write")
		c.unordered = strings.Contains(hints, "nondeterministic_output_order")
		c.random = !c.unordered && strings.Contains(hints, "nondeterministic_output")
		if name == popAll {
			c.random, c.unordered = false, true
		}
		if c.group == "stream" {
			c.random = false // but for times, since no ids are made up by the server
		}
		d.all = append(d.all, c)
		d.byName[strings.Join(c.words, " ")] = c
		if d.byGroup[c.group] == nil {
			d.groups = append(d.groups, c.group)
		}
		d.byGroup[c.group] = append(d.byGroup[c.group], c)
	}
	if len(d.all) < 50 {
		return nil, fmt.Errorf("%d commands, which are too few to be right", len(d.all))
	}
	return d, nil
}

// addCommand takes a command of COMMAND's answer, and its subcommands.
func addCommand(to map[string][]any, c any) {
	fields, ok := c.([]any)
	if !ok || len(fields) < 10 {
		return
	}
	name, _ := fields[0].(string)
	to[name] = fields
	subs, _ := fields[9].([]any)
	for _, s := range subs {
		addCommand(to, s)
	}
}

func docArgs(v any) (args []docArg) {
	list, _ := v.([]any)
	for _, e := range list {
		m, _ := e.(map[any]any)
		text := func(k string) string { s, _ := m[k].(string); return s }
		flags := fmt.Sprint(m["flags"])
		args = append(args, docArg{name: text("name"), kind: text("type"), token: text("token"),
			args:     docArgs(m["arguments"]),
			optional: strings.Contains(flags, "optional"), multiple: strings.Contains(flags, "multiple"),
			multipleWithWord: strings.Contains(flags, "multiple_token")})
	}
	return args
}

// maker makes up the arguments of one command.
type maker struct {
	*rand.Rand
	command *docCommand
	keys    int // what numkeys has announced, or how many streams there are; -1: nothing
}

func (m *maker) pick(s ...string) string { return s[m.IntN(len(s))] }

// usual is one of the first most of the time, and something else now and then.
func (m *maker) usual(good []string, else_ ...string) string {
	if m.IntN(6) > 0 {
		return m.pick(good...)
	}
	return m.pick(else_...)
}

// popAll removes members at random, so that afterwards the databases would differ: it is made to
// remove all there are.
const popAll = "spop"

// sequence begins with commands that make values, has a few groups of commands as its theme,
// and transactions now and then.
func (d *redisDialect) sequence(rng *rand.Rand) []step {
	theme := []string{d.groups[rng.IntN(len(d.groups))], d.groups[rng.IntN(len(d.groups))]}
	var steps []step
	for i := range 40 {
		from := d.all
		if i < 8 || rng.IntN(5) > 0 {
			from = d.byGroup[theme[rng.IntN(len(theme))]]
		}
		c := from[rng.IntN(len(from))]
		for tries := 0; i < 8 && !c.write && tries < 8; tries++ {
			c = from[rng.IntN(len(from))]
		}
		if c.group == "transactions" && rng.IntN(3) > 0 {
			c = d.all[rng.IntN(len(d.all))]
		}
		s := d.command(rng, c)
		if c.name == popAll && (len(s) == 2 || len(s) == 3) {
			s = append(s[:2], "1000")
		}
		steps = append(steps, s)
	}
	return steps
}

func (d *redisDialect) command(rng *rand.Rand, c *docCommand) step {
	m := &maker{Rand: rng, command: c, keys: -1}
	s := append(step{}, c.words...)
	if rng.IntN(4) == 0 {
		for i := range s {
			s[i] = strings.ToUpper(s[i])
		}
	}
	for _, a := range c.args {
		s = m.arg(s, a)
	}
	fixed := len(c.words)
	switch rng.IntN(25) {
	case 0:
		if len(s) > fixed {
			s = s[:len(s)-1]
		}
	case 1:
		s = append(s, m.pick("x", "", "1", "k:any"))
	case 2:
		// Into databases that nobody empties, and waiting for ever.
		if c.name != popAll && len(s) > fixed &&
			!slices.Contains([]string{"select", "copy", "move", "xread", "xreadgroup"}, c.name) {
			s[fixed+rng.IntN(len(s)-fixed)] = m.pick("", "abc", "-1", "0", "1.5", "\r\n", "9223372036854775807", "nx")
		}
	}
	return s
}

// arg appends an argument, or the several that it stands for.
func (m *maker) arg(s step, a docArg) step {
	if a.optional && m.IntN(5) < 3 {
		return s
	}
	n := 1
	if a.multiple {
		n += m.IntN(3)
	}
	if a.kind == "key" && m.keys >= 0 {
		if n = m.keys; n == 0 {
			return s
		}
	}
	if a.multiple && strings.HasPrefix(m.command.name, "xread") { // as many ids as streams
		if a.kind == "key" {
			m.keys = n
		} else if m.IntN(12) > 0 {
			n = m.keys
		}
	}
	for i := range n {
		if a.token != "" && a.kind != "pure-token" && (i == 0 || a.multipleWithWord) {
			s = append(s, a.token)
		}
		switch a.kind {
		case "block":
			for _, b := range a.args {
				s = m.arg(s, b)
			}
		case "oneof":
			s = m.arg(s, a.args[m.IntN(len(a.args))])
		case "pure-token":
			if a.token == "*" { // an id of the server's clock
				s = append(s, m.streamID())
			} else if m.IntN(4) == 0 {
				s = append(s, strings.ToLower(a.token))
			} else {
				s = append(s, a.token)
			}
		default:
			s = append(s, m.value(a))
		}
	}
	return s
}

// key is mostly one that holds what the command is for.
func (m *maker) key() string {
	group := m.command.group
	if m.IntN(8) == 0 {
		group = m.pick("string", "hash", "list", "set", "sorted-set", "bitmap", "hyperloglog", "geo", "stream")
	}
	switch group {
	case "string", "hash", "list", "set", "sorted-set", "bitmap", "hyperloglog", "geo", "stream":
		return "k:" + group + ":" + strconv.Itoa(m.IntN(3))
	}
	return "k:" + m.pick("string", "string", "hash", "list", "set", "sorted-set", "any") + ":" + strconv.Itoa(m.IntN(3))
}

var scripts = []string{
	"return redis.call('GET', KEYS[1])",
	"return redis.call('SET', KEYS[1], ARGV[1])",
	"return redis.call('INCRBY', KEYS[1], ARGV[1])",
	"local n = redis.call('INCR', KEYS[1]) redis.call('PEXPIRE', KEYS[1], 100000) return n",
	"return redis.pcall('HGET', KEYS[1], ARGV[1])",
	"return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])",
	"if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end",
	"return {KEYS[1], ARGV[1], #KEYS, #ARGV}",
	"return {1, 2.9, 'x', {'y', false}, true}",
	"return false", "return nil", "return tonumber(ARGV[1])", "return 3.99", "return {ok='fine'}",
	"return {err='MY own'}",
	"return redis.error_reply('MY own')", "return redis.status_reply('fine')", "return redis.sha1hex('a')",
	"return cjson.encode({1, 2, 'x'})", "return cjson.decode('[1, {\"a\": null}]')[1]", "return tostring(1e15)",
	"return bit.band(7, 3)",
	"error('on purpose')", "return this is no lua", "return redis.call('NOSUCH')", "return redis.call('GET')",
	"return undefined",
	"return string.format('%d', 3)", "local t = {} for i = 1, 5 do t[i] = i end return t", "return #ARGV[1]",
}

// library makes up the source of a library of one function, whose names collide now and then.
func (m *maker) library() string {
	body := m.pick("return redis.call('GET', keys[1])", "return redis.call('SET', keys[1], args[1])",
		"return redis.call('APPEND', keys[1], args[1] or 'x')",
		"return redis.pcall('INCR', keys[1])", "return {#keys, #args, keys[1], args[1]}", "error({err='MY own'})",
		"return redis.call('NOSUCH')",
		"redis.setresp(3) return redis.call('HGETALL', keys[1])",
		"redis.call('DEL', keys[1]) return redis.call('RPUSH', keys[1], unpack(args))", "return undefined")
	name := m.pick("f1", "f1", "f2", "F2", "f3")
	f := "redis.register_function('" + name + "', function(keys, args) " + body + " end)"
	if m.IntN(3) == 0 {
		f = "redis.register_function{function_name='" + name + "', callback=function(keys, args) " + body +
			" end, flags={" +
			m.pick("'no-writes'", "'no-writes', 'allow-oom'", "'allow-stale'", "'nothing'", "") + "}" +
			m.pick("", ", description='tells'", ", name='x'") + "}"
	}
	first := m.usual([]string{"#!lua name=l1", "#!lua name=l2", "#!LUA name='l3'"}, "", "#!lua", "#!js name=l1",
		"#!lua name=l-1", "#!lua name=l1 name=l1", "#!lua name='l1")
	return first + "\n" + m.usual([]string{f}, "redis.call('PING')", "local x = 1", "redis.register_function('f1')",
		"x = 1", f+" "+f)
}

// value makes up an argument by what it is and how it is called.
func (m *maker) value(a docArg) string {
	edge := []string{"9223372036854775807", "-9223372036854775808", "9223372036854775808", "4294967296", "abc", "",
		"1.5", " 1", "007", "+3", "2147483648"}
	switch a.kind {
	case "key":
		return m.key()
	case "pattern":
		return m.pick("*", "k:*", "k:string:[0-1]", "k:s*:?", "nothing", "[a-", "f*", "\\*", "*[^1]", "")
	case "unix-time":
		if strings.Contains(a.name, "milli") {
			return m.usual([]string{"4000000000000", "2500000000123"}, append(edge, "0", "1", "-1")...)
		}
		return m.usual([]string{"4000000000", "2500000000"}, append(edge, "0", "1", "-1")...)
	case "double":
		if a.name == "timeout" {
			return m.usual([]string{"0.01", "0.02"}, "-1", "abc", "", "1e400", "0.001")
		}
		return m.usual([]string{"1", "2.5", "-1", "0", "10.5", "3"}, "inf", "-inf", "nan", "abc", "", "1e400", "0.1",
			"-0", "3.0e3", "1e30", "0x10", " 1")
	case "integer":
		if s, ok := m.streamWord(a.name); ok {
			return s
		}
		return m.integer(a.name, edge)
	}
	if m.command.group == "stream" {
		if s, ok := m.streamWord(a.name); ok {
			return s
		}
	}
	switch a.name {
	case "min", "max", "start", "stop", "end":
		if m.command.group == "sorted-set" {
			return m.pick("-inf", "+inf", "(1", "2", "0", "-1", "[a", "(c", "-", "+", "[", "abc", "1", "3", "")
		}
	case "script":
		return m.pick(scripts...)
	case "function":
		return m.usual([]string{"f1", "f2", "F1", "f3"}, "nosuch", "")
	case "function-code":
		return m.library()
	case "library-name":
		return m.usual([]string{"l1", "l2", "l3"}, "L1", "nosuch", "")
	case "library-name-pattern":
		return m.pick("*", "l?", "L[12]", "nosuch", "l1")
	case "sha1":
		return m.pick("c664a3bf70bd1d45c4284ffebb65a6f2299bfc9f", "E0E1F9FABFC9D4800C877A703B823AC0578FF8DB", "no sha",
			"")
	case "member", "element", "field", "pivot", "member1", "member2":
		return m.pick("a", "b", "c", "d", "1", "2", "", "10.5", "\x00\xff")
	case "encoding":
		return m.usual([]string{"u8", "i16", "u4", "i63"}, "u64", "i64", "x8", "u0", "i65")
	case "timeout":
		return m.usual([]string{"0.01", "0.02"}, "-1", "abc")
	}
	return m.text()
}

// streamID makes up an id, most often one that there may be.
func (m *maker) streamID() string {
	id := strconv.Itoa(m.IntN(40)) + m.pick("-0", "-1", "-2", "", "-*")
	return m.usual([]string{id}, "0", "0-0", "-", "+", "(", "5-", "abc", "",
		"18446744073709551615-18446744073709551615", " 7")
}

// streamWord makes up what commands on streams call so.
func (m *maker) streamWord(name string) (s string, ok bool) {
	switch name {
	case "id", "last-id", "max_deleted_entry_id":
		if strings.HasPrefix(m.command.name, "xread") {
			return m.pick(m.streamID(), ">", ">", "$", "0"), true
		}
		return m.streamID(), true
	case "start", "end":
		return m.pick("-", "+", m.streamID(), "("+m.streamID()), true
	case "threshold":
		return m.pick("0", "1", "3", "10", "-1", m.streamID()), true
	case "group", "groupname":
		return m.usual([]string{"g1", "g2"}, "nosuch", ""), true
	case "consumer", "consumername":
		return m.pick("c1", "c2", "c3", ""), true
	case "min-idle-time":
		return m.usual([]string{"0", "3600000"}, "abc", "-1"), true
	}
	return "", false
}

func (m *maker) integer(name string, edge []string) string {
	switch name {
	case "numkeys":
		n := 1 + m.IntN(3)
		m.keys = n
		if m.IntN(12) == 0 {
			return m.pick("0", "-1", "abc", "10", "1")
		}
		return strconv.Itoa(n)
	case "cursor":
		return m.usual([]string{"0"}, "abc", "-1", "")
	case "index", "destination-db", "db":
		if m.command.group == "list" {
			break
		}
		return m.usual([]string{"14", "15"}, "99", "-1", "abc", "9223372036854775807")
	case "count":
		if m.command.name == popAll {
			return "1000"
		}
	case "seconds", "milliseconds", "ttl":
		if m.command.group == "stream" { // it waits
			return m.usual([]string{"1", "2"}, "-1", "abc", "")
		}
		// None so short that it ends while it is compared, and no two alike: which of them ends
		// later would be a matter of milliseconds.
		return m.usual([]string{strconv.Itoa(100_000 + m.IntN(1_000_000_000))}, append(edge, "0", "-1", "-100")...)
	case "timeout":
		return m.usual([]string{"0.01", "0.02"}, "-1", "abc")
	}
	return m.usual([]string{"0", "1", "2", "3", "5", "-1", "-2", "10"}, edge...)
}

func (m *maker) text() string {
	switch m.IntN(6) {
	case 0:
		return m.pick("1", "0", "-5", "100", "9223372036854775807", "3.25", "1e5", " 1", "nan")
	case 1:
		return strings.Repeat(m.pick("x", "\x00", "é", "\r\n"), m.IntN(100))
	case 2:
		return m.pick("$-1\r\n", "", "k:string:1")
	}
	return m.pick("a", "b", "hello", "Hello World", "foobar", "c")
}

func (d *redisDialect) variants() int { return 2 }

func (d *redisDialect) show(s step) string {
	quoted := make([]string, len(s))
	for i, a := range s {
		quoted[i] = a
		if a == "" || strings.ContainsFunc(a, func(r rune) bool { return r <= ' ' || r > '~' || r == '"' }) {
			quoted[i] = strconv.Quote(a)
		}
	}
	return strings.Join(quoted, " ")
}

// describe finds what is known of a command; nil if nothing is.
func (d *redisDialect) describe(s step) *docCommand {
	if len(s) > 1 {
		if c := d.byName[strings.ToLower(s[0]+" "+s[1])]; c != nil {
			return c
		}
	}
	return d.byName[strings.ToLower(s[0])]
}

// alike finds out which commands an EXEC is about from the answers to those before it.
func (d *redisDialect) alike(steps []step, replies []reply, theirs reply) bool {
	last := len(steps) - 1
	ours := replies[last]
	if !strings.EqualFold(steps[last][0], "exec") || ours.kind != '*' || theirs.kind != '*' {
		return sameReply(d.describe(steps[last]), steps[last], ours, theirs)
	}
	var queue []step
	for i := last - 1; i >= 0; i-- {
		if strings.EqualFold(steps[i][0], "multi") && !replies[i].failed() { // one within a transaction fails
			break
		}
		if replies[i].kind == '+' && replies[i].text == "QUEUED" {
			queue = append(queue, steps[i])
		}
	}
	slices.Reverse(queue)
	if len(ours.elems) != len(theirs.elems) || len(queue) != len(ours.elems) {
		return ours.String() == theirs.String()
	}
	for i, s := range queue {
		if !sameReply(d.describe(s), s, ours.elems[i], theirs.elems[i]) {
			return false
		}
	}
	return true
}

func sameReply(c *docCommand, s step, a, b reply) bool {
	if a.String() == b.String() {
		return true
	}
	if c == nil || a.kind != b.kind || a.failed() {
		return false
	}
	switch c.name {
	case "ttl", "expiretime":
		return near(a, b, 1)
	case "pttl", "pexpiretime":
		return near(a, b, 5000)
	case "xpending", "xinfo|stream", "xinfo|consumers":
		return sameButTimes(c.name == "xpending", a, b)
	}
	switch {
	case c.unordered:
		return slices.Equal(sorted(a), sorted(b))
	case c.random:
		return len(a.elems) == len(b.elems)
	}
	return false
}

func sorted(r reply) (texts []string) {
	if r.kind == '%' {
		for i := 0; i+1 < len(r.elems); i += 2 {
			texts = append(texts, r.elems[i].String()+r.elems[i+1].String())
		}
	} else {
		for _, e := range r.elems {
			texts = append(texts, e.String())
		}
	}
	slices.Sort(texts)
	return texts
}

// sameButTimes allows for clocks in what is told of streams: times of delivery, and those since then. Redis's radix
// tree may keep a node for a stream without entries.
func sameButTimes(pending bool, a, b reply) bool {
	if a.kind != b.kind || len(a.elems) != len(b.elems) {
		return false
	}
	if len(a.elems) == 0 {
		return a.text == b.text
	}
	for i, x := range a.elems {
		y, name := b.elems[i], a.elems[max(0, i-1)].text
		if sameButTimes(pending, x, y) || strings.HasPrefix(name, "radix-tree-") && a.elems[1].text == "0" {
			continue
		}
		n, err1 := strconv.Atoi(x.text)
		m, err2 := strconv.Atoi(y.text)
		isTime := name == "idle" || pending && i == 2 && len(a.elems) == 4 || len(x.text) > 11
		if !isTime || x.kind != ':' || y.kind != ':' || err1 != nil || err2 != nil || n-m > 5000 || m-n > 5000 {
			return false
		}
	}
	return true
}

// near allows for clocks that were read at different times.
func near(a, b reply, tolerance int) bool {
	x, err1 := strconv.Atoi(a.text)
	y, err2 := strconv.Atoi(b.text)
	return err1 == nil && err2 == nil && x > 0 && y > 0 && x-y <= tolerance && y-x <= tolerance
}

type redisSession struct {
	net.Conn
	in *bufio.Reader
}

// begin empties the two databases that sequences use: the last ones, which are small.
func (d *redisDialect) begin(addr string, variant int) (session, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	s := &redisSession{c, bufio.NewReader(c)}
	for _, cmd := range []string{"SCRIPT FLUSH", "FUNCTION FLUSH", "SELECT 15", "FLUSHDB", "SELECT 14", "FLUSHDB",
		"HELLO " + strconv.Itoa(variant+2)} {
		if r := s.ask(strings.Fields(cmd)); r.failed() && cmd != "SCRIPT FLUSH" {
			c.Close()
			return nil, fmt.Errorf("%s: %v", cmd, r)
		}
	}
	return s, nil
}

func (s *redisSession) ask(cmd step) reply {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(cmd))
	for _, a := range cmd {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	err := s.SetDeadline(time.Now().Add(answerTime))
	if _, err2 := io.WriteString(s, b.String()); err == nil {
		err = err2
	}
	if err != nil {
		return reply{kind: '!', text: err.Error()}
	}
	r, err := s.read()
	if err != nil {
		return reply{kind: '!', text: cmp.Or(r.text, errNoAnswer.Error()+": "+err.Error())}
	}
	return r
}

// read reads one reply. It does not look at what a server must not send: the answers are
// compared.
func (s *redisSession) read() (reply, error) {
	line, err := s.in.ReadString('\n')
	if err != nil || len(line) < 3 {
		return reply{}, cmp.Or(err, io.ErrUnexpectedEOF)
	}
	r := reply{kind: line[0], text: line[1 : len(line)-2]}
	n, numberErr := strconv.Atoi(r.text)
	switch r.kind {
	case '$', '=':
		if numberErr != nil || n < 0 {
			return r, numberErr
		}
		b := make([]byte, n+2)
		_, err := io.ReadFull(s.in, b)
		r.text = string(b[:n])
		if n == 2 && r.text == "-1" { // not what stands for nothing
			r.text = "'-1'"
		}
		return r, err
	case '*', '~', '%', '>':
		if numberErr != nil || n < 0 {
			r.kind = '_'
			return r, numberErr
		}
		if r.kind == '%' {
			n *= 2
		}
		for range n {
			e, err := s.read()
			if err != nil {
				return r, err
			}
			r.elems = append(r.elems, e)
		}
		r.text = ""
	}
	return r, nil
}
