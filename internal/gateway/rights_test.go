package gateway

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/testutil"
)

// rightsWords are what commands of TestRightsLikeRedis are made of, beside keys and numbers: the options that say
// which arguments are keys, or what is done to them, and some that have nothing to do with that.
var rightsWords = strings.Fields(`GET SET INCRBY OVERFLOW WRAP u8 i5 #1 STORE STOREDIST BY ASC ALPHA LIMIT DESC KEYS STREAMS COUNT BLOCK GROUP
NOACK DB REPLACE EX PX KEEPTTL NX XX GT LT CH INCR WEIGHTS AGGREGATE WITHSCORES WITHSCORE LEFT RIGHT BEFORE AFTER MIN MAX SUM AND NOT MATCH FREQ
IDLETIME PERSIST ANY km FROMMEMBER BYRADIUS IDX LEN MAXLEN MINID NOMKSTREAM CREATE MKSTREAM # * b* $ > - + 0-1 (1 [a`)

// rightsLines are commands as programs say them: random ones rarely get as far.
const rightsLines = `
BITFIELD a
BITFIELD a GET u8 0
BITFIELD a GET u8 0 GET u8 8
BITFIELD a GET u8 0 OVERFLOW SAT
BITFIELD a OVERFLOW SAT GET u8 0
BITFIELD a SET u8 0 1
BITFIELD a INCRBY u8 0 1
BITFIELD a GET u8 0 SET u8 0 1
BITFIELD a SET u8 0 1 GET u8 0
BITFIELD a get u8 0 x
BITFIELD a get
BITFIELD a nothing at all 1
BITFIELD_RO a GET u8 0
SET a b
SET a b GET
SET a b EX 1 get
SET a b get get KEEPTTL
SORT a
SORT a BY x* GET y* LIMIT 0 1
SORT a STORE b
SORT a STORE b STORE c
SORT a BY store STORE b
SORT a LIMIT store 1 STORE b
SORT a GET # GET store ALPHA STORE c
SORT_RO a BY x*
COPY a b
COPY a b DB 1 REPLACE
MOVE a 1
RENAME a b
RENAMENX a b
GEORADIUS a 1 2 3 km
GEORADIUS a 1 2 3 km STORE b
GEORADIUS a 1 2 3 km STOREDIST b
GEORADIUS a 1 2 3 km STORE b STOREDIST c
GEORADIUSBYMEMBER a b 3 km STORE c
GEOSEARCHSTORE a b FROMMEMBER c BYRADIUS 1 km
ZUNIONSTORE a 2 b c
ZUNIONSTORE a 2 b c WEIGHTS 1 2
ZRANGESTORE a b 0 1
ZUNION 2 a b
ZINTERCARD 2 a b LIMIT 1
ZMPOP 2 a b MIN
BZMPOP 0 2 a b MAX COUNT 1
LMPOP 2 a b LEFT
BLMPOP 0 2 a b LEFT
SINTERCARD 2 a b
LMOVE a b LEFT RIGHT
BLMOVE a b LEFT RIGHT 0
BRPOPLPUSH a b 0
BLPOP a b c 0
XREAD STREAMS a b 0 0
XREAD COUNT 1 BLOCK 0 STREAMS a b $ $
XREAD COUNT streams STREAMS a 0
XREADGROUP GROUP a b STREAMS c d > >
XREADGROUP GROUP streams b COUNT 1 NOACK STREAMS c d > >
XADD a * b c
XGROUP CREATE a b $ MKSTREAM
XGROUP DESTROY a b
XGROUP CREATECONSUMER a b c
XINFO STREAM a FULL
XAUTOCLAIM a b c 0 0-0
EVAL x 2 a b c
EVAL_RO x 2 a b c
EVALSHA x 2 a b c
FCALL x 2 a b c
FCALL_RO x 1 a b
MSET a b c d
MSETNX a b c d
MGET a b c
DEL a b c
UNLINK a b
EXISTS a b
TOUCH a b
WATCH a b
OBJECT ENCODING a
MEMORY USAGE a SAMPLES 0
PFMERGE a b c
PFCOUNT a b
PFDEBUG ENCODING a
BITOP AND a b c
BITOP NOT a b
LCS a b LEN
SMOVE a b c
SDIFFSTORE a b c
GETEX a EX 1
GETEX a
GETDEL a
RESTORE a 0 x
PUBLISH a x
SPUBLISH a x
SUBSCRIBE a b
PSUBSCRIBE a b*
PSUBSCRIBE a
SSUBSCRIBE a b
UNSUBSCRIBE a
`

// rightsUsers are users who lack one thing each, as rules.
// Keys are single letters. [^a] and ??* together are all that are not a.
func rightsUsers() map[string][]string {
	users := map[string][]string{
		"none": {"+@all"}, "reads": {"+@all", "%R~*"}, "writes": {"+@all", "%W~*"}, "both": {"+@all", "~*", "&*"},
		"nothing": {"-@all", "~*", "&*"},
		// It has every key, and yet is asked for rights.
		"limited":   {"+@all", "-acl|whoami", "~*", "&*"},
		"apart":     {"+@all", "%R~*", "%W~*", "&*"},
		"selectors": {"+@read", "%R~*", "(+@write %W~*)", "(+@all ~a ~b &a)"},
		"channels":  {"+@all", "~*", "&a", "&[^bc]", "&b*"},
	}
	for _, k := range []string{"a", "b", "c", "d"} {
		but := []string{"+@all", "&*", "~[^" + k + "]", "~??*"}
		users["no-"+k] = but
		users["reads-"+k] = append(slices.Clone(but), "%R~"+k)
		users["writes-"+k] = append(slices.Clone(but), "%W~"+k)
	}
	return users
}

// randomRights makes arguments of a command, more or less like those that it takes.
func randomRights(rng *rand.Rand, cmd *command) []string {
	args := strings.Split(cmd.Name, "|")
	n := max(cmd.Arity, -cmd.Arity) - len(args)
	if cmd.Arity < 0 {
		n += rng.IntN(7)
	}
	for range n {
		switch x := rng.IntN(20); {
		case x < 10:
			args = append(args, string(rune('a'+rng.IntN(5))))
		case x < 14:
			args = append(args, fmt.Sprint(rng.IntN(4)))
		default:
			args = append(args, rightsWords[rng.IntN(len(rightsWords))])
		}
	}
	return args
}

// unguarded reports whether a line is one of those whose keys redis-server 7.0.15 does not all know of, so that it lets
// a user write them without any right: PFMERGE of one key, a second STORE, and STREAMS as the name of a group.
func unguarded(args []string) bool {
	count := func(words ...string) (n int) {
		for _, a := range args[1:] {
			if slices.Contains(words, strings.ToUpper(a)) {
				n++
			}
		}
		return n
	}
	switch strings.ToLower(args[0]) {
	case "pfmerge":
		return len(args) == 2
	case "georadius", "georadiusbymember":
		return count("STORE", "STOREDIST") > 1
	case "xreadgroup":
		return count("STREAMS") > 1
	}
	return false
}

// TestRightsLikeRedis: a redis-server says of every command that is served which of some users may perform it, and on
// which key or channel it fails, as a gateway does. ACL DRYRUN asks what commands ask, so both answer about the same
// rules. The gateway never allows what redis-server refuses; what it refuses alone is what redis-server leaves
// unguarded.
func TestRightsLikeRedis(t *testing.T) {
	theirs := dial(t, "unix", startRedis(t)) // first, since it may skip the test
	ours := dial(t, "tcp", serve(t, Options{Databases: fake(), Cluster: true}))
	var names []string
	for name, rules := range rightsUsers() {
		names = append(names, name)
		for _, p := range []*peer{ours, theirs} {
			p.want(t, "+OK\r\n", append([]string{"ACL", "SETUSER", name, "resetchannels"}, rules...)...)
		}
	}
	slices.Sort(names)
	bad, answers := 0, 0
	compareOne := func(args []string) {
		t.Helper()
		var asked [][]string
		for _, name := range names {
			asked = append(asked, append([]string{"ACL", "DRYRUN", name}, args...))
		}
		ours.send(t, asked...)
		theirs.send(t, asked...)
		for i := range asked {
			got, want := string(ours.reply(t)), string(theirs.reply(t))
			answers++
			if got == want || unguarded(args) && strings.Contains(got, "no permissions to access") {
				continue
			}
			if bad++; bad <= 40 {
				t.Errorf("%s may %q: %q, redis-server says %q", names[i], args, got, want)
			}
		}
	}
	for line := range strings.Lines(strings.TrimSpace(rightsLines)) {
		compareOne(words(line))
	}
	checked := 0
	for _, cmd := range commandsByID {
		if cmd == unknown || !cmd.served() {
			continue
		}
		guarded := cmd.First != 0 || cmd.Counted != 0 || cmd.Finder != 0 || cmd.Channels != spec.NoChannels
		if info := theirs.do(t, "COMMAND", "INFO", cmd.Name); info == "*1\r\n*-1\r\n" || info == "*1\r\n$-1\r\n" {
			if guarded { // a command of later versions: there is nothing to compare
				t.Errorf("%s has keys or channels, and redis-server does not know it", cmd.Name)
			}
			continue
		}
		if cmd.sub != nil && cmd.Arity < -1 {
			continue // it does nothing without a subcommand, and those have their turns
		}
		checked++
		lines := 5
		if guarded {
			lines = 120
		}
		rng := rand.New(rand.NewPCG(uint64(len(cmd.Name)), 11))
		for range lines {
			compareOne(randomRights(rng, cmd))
		}
	}
	t.Logf("%d commands, %d users, %d answers, of which %d differ", checked, len(names), answers, bad)
	if checked < 310 {
		t.Errorf("%d commands compared", checked)
	}
}

// randomRules are rules of a user, selectors among them.
func randomRules(rng *rand.Rand, served []*command) (rules []string) {
	one := func(of ...string) string { return of[rng.IntN(len(of))] }
	categories := strings.Fields("all read write fast slow dangerous admin keyspace string bitmap sortedset set list " +
		"hash stream geo pubsub scripting transaction connection blocking hyperloglog")
	rule := func() string {
		switch rng.IntN(9) {
		case 0, 1:
			return one("+", "-") + "@" + categories[rng.IntN(len(categories))]
		case 2, 3:
			return one("+", "-") + served[rng.IntN(len(served))].Name
		case 4, 5:
			return one("~", "%R~", "%W~", "%RW~") + one("*", "a", "b*", "[ab]", "[^a]", "?", "??*", "c", "d*")
		case 6:
			return "&" + one("*", "a", "b*", "[ab]", "c")
		case 7:
			return one("allkeys", "allchannels", "allcommands", "nocommands", "resetkeys", "resetchannels",
				"clearselectors")
		}
		return "+" + one("select|0", "debug|sleep", "config|get", "client|id", "object|freq", "acl|whoami",
			"memory|usage", "script|load", "function|list", "xinfo|stream", "cluster|keyslot")
	}
	rules = []string{"reset"}
	for range 1 + rng.IntN(8) {
		r := rule()
		if rng.IntN(4) == 0 {
			var in []string
			for range 1 + rng.IntN(4) {
				in = append(in, rule())
			}
			r = "(" + strings.Join(in, " ") + ")"
		}
		rules = append(rules, r)
	}
	return rules
}

// TestRandomRulesLikeRedis: what users of random rules may do is what a redis-server says.
func TestRandomRulesLikeRedis(t *testing.T) {
	theirs := dial(t, "unix", startRedis(t)) // first, since it may skip the test
	ours := dial(t, "tcp", serve(t, Options{Databases: fake(), Cluster: true}))
	var served []*command
	for _, cmd := range commandsByID {
		later := cmd.Name == "client|no-touch" || cmd.Name == "client|setinfo" // than Redis 7.0
		if cmd != unknown && cmd.served() && (cmd.sub == nil || cmd.Arity == -1) && !later {
			served = append(served, cmd)
		}
	}
	bad, answers, allowed := 0, 0, 0
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 13))
		set := append([]string{"ACL", "SETUSER", "u"}, randomRules(rng, served)...)
		if got, want := ours.do(t, set...), theirs.do(t, set...); got != want {
			if bad++; bad <= 40 {
				t.Errorf("%q: %q, redis-server says %q", set, got, want)
			}
			continue
		}
		var asked [][]string
		for range 100 {
			asked = append(asked,
				append([]string{"ACL", "DRYRUN", "u"}, randomRights(rng, served[rng.IntN(len(served))])...))
		}
		ours.send(t, asked...)
		theirs.send(t, asked...)
		for _, cmd := range asked {
			got, want := string(ours.reply(t)), string(theirs.reply(t))
			answers++
			if want == "+OK\r\n" {
				allowed++
			}
			if got == want || unguarded(cmd[3:]) && strings.Contains(got, "no permissions to access") {
				continue
			}
			if bad++; bad <= 40 {
				t.Errorf("after %q, %q: %q, redis-server says %q", set[3:], cmd[3:], got, want)
			}
		}
	}
	t.Logf("%d answers, %d allow, %d differ", answers, allowed, bad)
	if allowed < answers/20 {
		t.Errorf("%d of %d answers allow anything", allowed, answers)
	}
}

// touched is a store that counts the calls of a gateway.
type touched struct {
	client.API
	calls atomic.Int64
}

func (s *touched) GetInto(ctx context.Context, key, dst []byte) (int, error) {
	s.calls.Add(1)
	return s.API.GetInto(ctx, key, dst)
}

func (s *touched) Put(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error) {
	s.calls.Add(1)
	return s.API.Put(ctx, key, value, o)
}

func (s *touched) PutIfAbsent(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error) {
	s.calls.Add(1)
	return s.API.PutIfAbsent(ctx, key, value, o)
}

func (s *touched) Delete(ctx context.Context, key []byte) error {
	s.calls.Add(1)
	return s.API.Delete(ctx, key)
}

func (s *touched) MultiDelete(ctx context.Context, keys [][]byte) []client.Result {
	s.calls.Add(1)
	return s.API.MultiDelete(ctx, keys)
}

func (s *touched) Scan(ctx context.Context, o client.ScanOptions) iter.Seq2[client.KV, error] {
	s.calls.Add(1)
	return s.API.Scan(ctx, o)
}

func (s *touched) Do(ctx context.Context, ops []client.Op) {
	s.calls.Add(1)
	s.API.Do(ctx, ops)
}

func (s *touched) GetIfChanged(ctx context.Context, key []byte, version uint64) (client.Item, bool, error) {
	s.calls.Add(1)
	return s.API.GetIfChanged(ctx, key, version)
}

func (s *touched) Count(ctx context.Context) (uint64, error) {
	s.calls.Add(1)
	return s.API.Count(ctx)
}

func (s *touched) MultiCAS(ctx context.Context, ops []client.Op) error {
	s.calls.Add(1)
	return s.API.MultiCAS(ctx, ops)
}

// TestDatabaseOfOthers: no command of a user of database 1 touches database 0, wherever his connection is. FCALL calls
// functions that are there, and INFO counts keys.
func TestDatabaseOfOthers(t *testing.T) {
	store := &touched{API: clienttest.New(clienttest.Options{})}
	addr := serve(t, Options{Databases: []Database{{"zero", store}, {"one", clienttest.New(clienttest.Options{})}},
		Cluster: true})
	admin := dial(t, "tcp", addr)
	admin.want(t, "+OK\r\n", "ACL", "SETUSER", "one", "on", "nopass", "+@all", "~*", "&*", "db=1")
	admin.want(t, "+OK\r\n", "SET", "a", "secret")
	admin.want(t, bulk("l"), "FUNCTION", "LOAD", library("l", "x", "return 1"))
	// These end the connection, wait, keep others waiting, or leave it without replies.
	leave := strings.Fields("fcall fcall_ro info monitor subscribe psubscribe ssubscribe quit reset auth hello " +
		"client|pause client|reply client|kill acl|setuser acl|deluser")
	perform := func(args []string, selected bool) {
		t.Helper()
		p := dial(t, "tcp", addr)
		defer p.Close()
		p.want(t, "+OK\r\n", "AUTH", "one", "x")
		if selected {
			p.want(t, "+OK\r\n", "SELECT", "1")
		}
		before := store.calls.Load()
		if cmd := lookupCommand([][]byte{[]byte(args[0]), []byte(args[min(1, len(args)-1)])}); cmd != nil &&
			cmd.block != nil {
			p.do(t, "MULTI")
			p.do(t, args...)
			p.do(t, "EXEC")
		} else {
			p.do(t, args...)
		}
		if n := store.calls.Load() - before; n != 0 {
			t.Errorf("%q with database 1 selected %v: %d calls to database 0", args, selected, n)
		}
	}
	var lines [][]string
	for line := range strings.Lines(strings.TrimSpace(rightsLines)) {
		if w := words(line); !slices.Contains(leave, strings.ToLower(w[0])) {
			lines = append(lines, w)
		}
	}
	for _, cmd := range commandsByID {
		if !cmd.served() || slices.Contains(leave, cmd.Name) {
			continue
		}
		rng := rand.New(rand.NewPCG(uint64(len(cmd.Name)), 12))
		for range 3 {
			lines = append(lines, randomRights(rng, cmd))
		}
	}
	lines = append(lines, []string{"FUNCTION", "LOAD", "REPLACE", library("l", "x", "return 2")},
		[]string{"FUNCTION", "DELETE", "l"}, []string{"FUNCTION", "FLUSH"},
		[]string{"FUNCTION", "DUMP"}, []string{"FUNCTION", "LIST"}, []string{"FUNCTION", "STATS"},
		[]string{"CLUSTER", "GETKEYSINSLOT", "15495", "1"},
		[]string{"CLUSTER", "COUNTKEYSINSLOT", "15495"}, []string{"EVAL", "redis.call('select', 0) return " +
			"redis.call('get', 'a')", "0"}, []string{"EVAL", "return redis.call('copy', 'a', 'b', 'db', 0)", "0"},
		[]string{"EVAL", "return redis.call('move', 'a', 0)", "0"}, []string{"EVAL", "return redis.call('scan', 0)",
			"0"}, []string{"SORT", "a", "BY", "x*", "STORE", "b"})
	for _, args := range lines {
		perform(args, true)
		perform(args, false)
	}
	admin.want(t, ":1\r\n", "FCALL", "x", "0")
	admin.want(t, bulk("secret"), "GET", "a")
}

// twoStores are two databases with nothing in common.
func twoStores() []Database {
	return []Database{{"zero", clienttest.New(clienttest.Options{})}, {"one", clienttest.New(clienttest.Options{})}}
}

// TestFunctionRights: commands about libraries need the database where they are, in MULTI as well. A function has the
// rights of who calls it, in his database; and one that runs in another database is not for him to see or to end.
func TestFunctionRights(t *testing.T) {
	addr, g := start(t, Options{Databases: twoStores()})
	admin, p := dial(t, "tcp", addr), dial(t, "tcp", addr)
	admin.want(t, "+OK\r\n", "ACL", "SETUSER", "one", "on", "nopass", "+@all", "~a*", "db=1")
	admin.want(t, bulk("l"), "FUNCTION", "LOAD", library("l", "f", "return redis.call('set', args[1], 'x')"))
	p.want(t, "+OK\r\n", "AUTH", "one", "x")
	p.want(t, "+OK\r\n", "SELECT", "1")
	const refused = "-NOPERM this user has no permissions to access this database\r\n"
	mine := library("l", "f", "return 'mine'")
	for _, cmd := range [][]string{{"LOAD", "REPLACE", mine}, {"LOAD", mine}, {"DELETE", "l"}, {"FLUSH"},
		{"RESTORE", "x"}, {"LIST"}, {"DUMP"}, {"STATS"}} {
		p.want(t, refused, append([]string{"FUNCTION"}, cmd...)...)
	}
	p.want(t, "+OK\r\n", "MULTI")
	p.want(t, refused, "FUNCTION", "LOAD", "REPLACE", mine)
	p.want(t, "-EXECABORT Transaction discarded because of previous errors.\r\n", "EXEC")
	p.want(t, "+OK\r\n", "FCALL", "f", "0", "a1")
	if got := p.do(t, "FCALL", "f", "0", "b1"); !strings.Contains(got, "can't access at least one of the keys") {
		t.Errorf("a function wrote past its caller's rights: %q", got)
	}
	admin.want(t, "$-1\r\n", "GET", "a1")
	admin.want(t, "+OK\r\n", "SELECT", "1")
	admin.want(t, bulk("x"), "GET", "a1")
	admin.want(t, "+OK\r\n", "SELECT", "0")

	admin.want(t, bulk("ever"), "FUNCTION", "LOAD", library("ever", "ever", "while true do end"))
	p.want(t, "+OK\r\n", "CLIENT", "SETNAME", "p")
	runs := func(n int) {
		t.Helper()
		testutil.Until(t, fmt.Sprint(n, " scripts run"), func() bool {
			have := 0
			g.eachScript(func(*runningScript) { have++ })
			return have == n
		})
	}
	busy := dial(t, "tcp", addr)
	for _, end := range []struct {
		run, kill []string
	}{
		{[]string{"FCALL", "ever", "0"}, []string{"FUNCTION", "KILL"}},
		{[]string{"EVAL", "while true do end", "0"}, []string{"SCRIPT", "KILL"}},
	} {
		busy.send(t, end.run)
		runs(1)
		p.want(t, "-NOTBUSY No scripts in execution right now.\r\n", end.kill...)
		admin.want(t, "+OK\r\n", "ACL", "SETUSER", "both", "reset", "on", "nopass", "+@all", "~*", "db=0,1")
		both := dial(t, "tcp", addr)
		both.want(t, "+OK\r\n", "AUTH", "both", "x")
		both.want(t, "+OK\r\n", end.kill...)
		busy.reply(t)
		runs(0)
	}
}

// TestRightsAtWaking: a client that waits is served by the rights that its user has when there is something, and what
// is refused goes to the next one.
func TestRightsAtWaking(t *testing.T) {
	for _, x := range []struct {
		wait []string
		give []string
		to   string // the next one's reply
	}{
		{[]string{"BLPOP", "k", "0"}, []string{"RPUSH", "k", "v"}, array("k", "v")},
		{[]string{"BRPOP", "k", "0"}, []string{"RPUSH", "k", "v"}, array("k", "v")},
		{[]string{"BLMOVE", "k", "l", "LEFT", "LEFT", "0"}, []string{"RPUSH", "k", "v"}, bulk("v")},
		{[]string{"BRPOPLPUSH", "k", "l", "0"}, []string{"RPUSH", "k", "v"}, bulk("v")},
		{[]string{"BLMPOP", "0", "1", "k", "LEFT"}, []string{"RPUSH", "k", "v"}, "*2\r\n" + bulk("k") + array("v")},
		{[]string{"BZPOPMIN", "k", "0"}, []string{"ZADD", "k", "1", "v"}, array("k", "v", "1")},
		{[]string{"BZPOPMAX", "k", "0"}, []string{"ZADD", "k", "1", "v"}, array("k", "v", "1")},
		{[]string{"BZMPOP", "0", "1", "k", "MIN"}, []string{"ZADD", "k", "1", "v"}, "*2\r\n" + bulk("k") + "*1\r\n" +
			array("v", "1")},
		{[]string{"XREAD", "BLOCK", "0", "STREAMS", "k", "0"}, []string{"XADD", "k", "1-1", "f", "v"}, "*1\r\n*2\r\n" +
			bulk("k") + "*1\r\n*2\r\n" + bulk("1-1") + array("f", "v")},
	} {
		for name, rule := range map[string][]string{"keys": {"resetkeys", "~other"}, "command": {"-@all", "+ping"},
			"database": {"db=1"}} {
			t.Run(x.wait[0]+"/"+name, func(t *testing.T) {
				addr, g := start(t, Options{Databases: twoStores()})
				admin, p, next := dial(t, "tcp", addr), dial(t, "tcp", addr), dial(t, "tcp", addr)
				admin.want(t, "+OK\r\n", "ACL", "SETUSER", "u", "on", "nopass", "+@all", "~*")
				p.want(t, "+OK\r\n", "AUTH", "u", "x")
				p.send(t, x.wait)
				blocked(t, g, 1)
				next.send(t, x.wait)
				blocked(t, g, 2)
				admin.want(t, "+OK\r\n", append([]string{"ACL", "SETUSER", "u"}, rule...)...)
				admin.do(t, x.give...)
				if got := string(p.reply(t)); !strings.HasPrefix(got, "-NOPERM ") {
					t.Errorf("got %q", got)
				}
				next.answers(t, x.to)
				blocked(t, g, 0)
			})
		}
	}
}

// TestTrackingRights: a client hears of keys with a prefix only if its user may read all of them in every database, and
// no longer than that.
func TestTrackingRights(t *testing.T) {
	addr := serve(t, Options{Databases: twoStores()})
	admin := dial(t, "tcp", addr)
	for _, x := range []struct {
		rules    []string
		prefixes string // with commas between
		refused  string
	}{
		{[]string{"~*"}, "", ""},
		{[]string{"%R~*"}, "", ""},
		{[]string{"%R~*"}, "a,b", ""},
		{[]string{"~app:*"}, "app:", ""},
		{[]string{"~app:*"}, "app:x", ""},
		{[]string{"~app:*"}, "app", "keys"},
		{[]string{"~app:*"}, "", "keys"},
		{[]string{"~app:*"}, "app:,other", "keys"},
		{[]string{"~app:*", "%R~other*"}, "app:,other", ""},
		{[]string{"%W~app:*"}, "app:", "keys"},
		{[]string{"~app:"}, "app:", "keys"},
		{[]string{`~app:\*`}, "app:", "keys"},
		{[]string{"~[ab]*"}, "a", ""},
		{[]string{"~[ab*"}, "a", "keys"},
		{nil, "a", "keys"},
		{[]string{"(~app:* +get)"}, "app:", ""},
		{[]string{"~*", "db=0"}, "a", "database"},
		{[]string{"~*", "db=0,1"}, "a", ""},
		{[]string{"~*", "db=0", "(~a* db=1 +get)"}, "a", ""},
		{[]string{"~*", "db=0", "(~a* db=1 +get)"}, "b", "database"},
	} {
		t.Run(strings.Join(x.rules, " ")+" hears of "+x.prefixes, func(t *testing.T) {
			admin.want(t, "+OK\r\n", append([]string{"ACL", "SETUSER", "u", "reset", "on", "nopass", "+@all"},
				x.rules...)...)
			admin.want(t, "+OK\r\n", "ACL", "LOG", "RESET")
			cmd := []string{"CLIENT", "TRACKING", "ON", "BCAST"}
			for prefix := range strings.SplitSeq(x.prefixes, ",") {
				if prefix != "" {
					cmd = append(cmd, "PREFIX", prefix)
				}
			}
			p := dial(t, "tcp", addr)
			p.do(t, "HELLO", "3", "AUTH", "u", "x")
			switch x.refused {
			case "":
				p.want(t, "+OK\r\n", cmd...)
			case "keys":
				p.want(t, "-NOPERM this user has no permissions to access one of the keys used as arguments\r\n",
					cmd...)
			default:
				p.want(t, "-NOPERM this user has no permissions to access this database\r\n", cmd...)
			}
			if x.refused != "" {
				if log := admin.do(t, "ACL", "LOG"); !strings.HasPrefix(log, "*1\r\n") {
					t.Errorf("the log has %q", log)
				}
				if info := p.do(t, "CLIENT", "TRACKINGINFO"); !strings.Contains(info, "off") {
					t.Errorf("it hears: %q", info)
				}
				return
			}
			// The rights are taken away, or the connection becomes somebody's who has none.
			admin.want(t, "+OK\r\n", "ACL", "SETUSER", "nobody", "on", "nopass", "+@all", "~none")
			q := dial(t, "tcp", addr)
			q.do(t, "HELLO", "3", "AUTH", "u", "x")
			q.want(t, "+OK\r\n", cmd...)
			q.want(t, "+OK\r\n", "AUTH", "nobody", "x")
			q.closed(t)
			p.want(t, "+PONG\r\n", "PING")
			admin.want(t, "+OK\r\n", "ACL", "SETUSER", "u", "resetkeys", "clearselectors", "~none")
			p.closed(t)
		})
	}
	p := dial(t, "tcp", addr)
	p.do(t, "HELLO", "3", "AUTH", "u", "x")
	p.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON") // what it reads, it may read
}
