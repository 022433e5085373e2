package gateway

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/redis/exec"
)

// contents is all that is in a database, a line for each key.
func contents(t *testing.T, api client.API) string {
	t.Helper()
	var all []string
	for kv, err := range api.Scan(t.Context(), client.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		expires := "never"
		if !kv.Expires.IsZero() {
			expires = strconv.FormatInt(kv.Expires.Unix()/1000, 10)
		}
		all = append(all, fmt.Sprintf("%q %v %q %d %s", kv.Key, kv.Type, kv.Value, kv.Flags, expires))
	}
	slices.Sort(all)
	return strings.Join(all, "\n")
}

// severalCase is a command that changes several keys, or one by what others are, and what somebody else writes while it
// runs.
type severalCase struct{ keys, command, meanwhile string }

// Each EXEC stands for MULTI, commands, EXEC.
var severalCases = []severalCase{
	{"SET x 1", "MSETNX a 1 b 2", "SET b 3"},
	{"SET a 1 EX 5000", "RENAME a b", "APPEND a x"},
	{"SET a 1; SET b 2", "RENAME a b", "SET b 4 EX 7000"},
	{"RPUSH a 1", "RENAMENX a b", "SET b 1"},
	{"SADD a 1 2", "COPY a b", "SADD a 3"},
	{"SET a 1; SET b 2", "COPY a b REPLACE", "DEL a"},
	{"SADD a 1 2; SADD b 3", "SMOVE a b 1", "SREM a 1"},
	{"RPUSH a 1 2; RPUSH b 3", "LMOVE a b LEFT RIGHT", "LPUSH a 0"},
	{"RPUSH a 1", "RPOPLPUSH a b", "RPUSH b 0"},
	{"RPUSH a 1", "BLMOVE a b LEFT LEFT 0", "RPUSH b 0"},
	{"RPUSH a 1", "BRPOPLPUSH a b 0", "RPUSH b 0"},
	{"RPUSH b 1 2", "LMPOP 2 a b LEFT", "RPUSH a 0"},
	{"ZADD b 1 x 2 y", "ZMPOP 2 a b MAX", "ZADD a 1 z"},
	{"SADD a 1 2; SADD b 2 3", "SINTERSTORE c a b", "SADD b 1"},
	{"SADD a 1 2; SADD b 2 3", "SUNIONSTORE c a b", "SREM b 3"},
	{"SADD a 1 2; SADD b 2 3; SET c x", "SDIFFSTORE c a b", "SADD b 1"},
	{"ZADD a 1 x; ZADD b 2 x", "ZUNIONSTORE c 2 a b", "ZADD b 3 x"},
	{"ZADD a 1 x; ZADD b 2 x", "ZINTERSTORE c 2 a b", "ZREM b x"},
	{"ZADD a 1 x 2 y; ZADD b 2 x", "ZDIFFSTORE c 2 a b", "ZADD b 3 y"},
	{"ZADD a 1 x 2 y", "ZRANGESTORE c a 0 0", "ZADD a 0 w"},
	{"GEOADD a 1 1 x", "GEOSEARCHSTORE c a FROMLONLAT 1 1 BYRADIUS 10 km", "GEOADD a 1.01 1 y"},
	{"GEOADD a 1 1 x", "GEORADIUS a 1 1 10 km STORE c", "GEOADD a 1.01 1 y"},
	{"RPUSH a 3 1 2", "SORT a STORE c", "RPUSH a 0"},
	{"RPUSH a 1 2; SET w1 5; SET w2 4", "SORT a BY w* STORE c", "SET w2 6"},
	{"SET a ab; SET b cd", "BITOP OR c a b", "SET a xy"},
	{"PFADD a 1 2; PFADD b 3", "PFMERGE c a b", "PFADD b 4"},
	{"SET a 5", "EVAL redis.call('set',KEYS[2],redis.call('get',KEYS[1])*2)redis.call('incr',KEYS[1]) 2 a b",
		"SET a 7"},
	{"SET a 5", "EXEC INCR a;SET b 1;RPUSH c x", "SET a 7"},
	{"SET a 5; SET b 1", "EXEC RENAME a c;DEL b", "SET b 7"},
	{"SADD s 1", "EXEC SMOVE s d 1;SCARD d", "SADD d 2"},
}

// perform gives a command of a severalCase, and returns its reply.
func (p *peer) perform(t *testing.T, command string) string {
	t.Helper()
	queue, is := strings.CutPrefix(command, "EXEC ")
	if !is {
		return p.do(t, strings.Fields(command)...)
	}
	p.want(t, "+OK\r\n", "MULTI")
	for q := range strings.SplitSeq(queue, ";") {
		p.want(t, "+QUEUED\r\n", strings.Fields(q)...)
	}
	return p.do(t, "EXEC")
}

// severalStore is a gateway's database with the keys of a case.
func severalStore(t *testing.T, c severalCase) (store *clienttest.Store, p, other *peer) {
	t.Helper()
	store = clienttest.New(clienttest.Options{})
	addr := serve(t, Options{Databases: []Database{{"default", store}}})
	p, other = dial(t, "tcp", addr), dial(t, "tcp", addr)
	for k := range strings.SplitSeq(c.keys, "; ") {
		if r := p.do(t, strings.Fields(k)...); r[0] == '-' {
			t.Fatal(k, r)
		}
	}
	return store, p, other
}

// atCommit calls f when the gateway is about to change keys for the first time, and makes what it returns of that.
func atCommit(store *clienttest.Store, f func() clienttest.Fault) {
	var done atomic.Bool
	store.Fail(func(_ context.Context, o *client.Op) (fault clienttest.Fault) {
		if o.Kind != client.OpGet && o.Kind != 0 && !done.Swap(true) {
			fault = f()
		}
		return fault
	})
}

// failsWhole performs a command whose commit fails, each time at a store that begin makes: what is there afterwards is
// all that was before, or all that the command makes, as the reply says.
func failsWhole(t *testing.T, command, before, after string, begin func() (*clienttest.Store, *peer)) {
	t.Helper()
	for _, f := range []struct {
		fault        clienttest.Fault
		reply, after string
	}{
		{clienttest.Fault{Err: client.ErrFull}, "-OOM ", before},
		{clienttest.Fault{Err: client.ErrUnavailable}, "-LOADING ", before},
		{clienttest.Fault{Err: client.ErrUnknownOutcome}, "-ERR unknown outcome", before},
		{clienttest.Fault{Applied: true}, "-ERR unknown outcome", after},
	} {
		store, p := begin()
		atCommit(store, func() clienttest.Fault { return f.fault })
		if got := p.perform(t, command); !strings.HasPrefix(got, f.reply) {
			t.Errorf("with %+v: replied %q", f.fault, got)
		}
		store.Fail(nil)
		if got := contents(t, store); got != f.after {
			t.Errorf("with %+v:\n%s\nwant\n%s", f.fault, got, f.after)
		}
	}
}

// TestSeveralKeysChangeTogether: all of a command takes effect, or nothing does, as its reply says.
func TestSeveralKeysChangeTogether(t *testing.T) {
	for _, c := range severalCases {
		t.Run(c.command, func(t *testing.T) {
			store, p, _ := severalStore(t, c)
			before := contents(t, store)
			reply := p.perform(t, c.command)
			after := contents(t, store)
			if reply[0] == '-' || before == after {
				t.Fatalf("replied %q, and left\n%s", reply, after)
			}
			failsWhole(t, c.command, before, after, func() (*clienttest.Store, *peer) {
				store, p, _ := severalStore(t, c)
				return store, p
			})
		})
	}
}

// TestSeveralKeysChangedMeanwhile: a command whose keys somebody else writes while it runs comes after that.
func TestSeveralKeysChangedMeanwhile(t *testing.T) {
	for _, c := range severalCases {
		t.Run(c.command, func(t *testing.T) {
			one, p, other := severalStore(t, c)
			other.perform(t, c.meanwhile)
			wantReply := p.perform(t, c.command)
			want := contents(t, one)

			store, p, other := severalStore(t, c)
			conflict := false
			atCommit(store, func() clienttest.Fault {
				conflict = true
				other.perform(t, c.meanwhile)
				return clienttest.Fault{}
			})
			if got := p.perform(t, c.command); got != wantReply {
				t.Errorf("replied %q, want %q", got, wantReply)
			}
			if got := contents(t, store); got != want || !conflict {
				t.Errorf("conflict %v:\n%s\nwant\n%s", conflict, got, want)
			}
		})
	}
}

// TestWatchOfOtherKeys: EXEC does nothing if any watched key has changed, also while it runs, whether it uses that key
// or not.
func TestWatchOfOtherKeys(t *testing.T) {
	for name, meanwhile := range map[string]bool{"before EXEC": false, "while EXEC runs": true} {
		t.Run(name, func(t *testing.T) {
			c := severalCase{keys: "SET a 1; SET watched 1; SET watched2 1"}
			store, p, other := severalStore(t, c)
			p.want(t, "+OK\r\n", "WATCH", "watched", "watched2", "nothing")
			want := "*-1\r\n"
			change := func() clienttest.Fault {
				other.want(t, "+OK\r\n", "SET", "watched2", "2")
				return clienttest.Fault{}
			}
			if meanwhile {
				atCommit(store, change)
			} else {
				change()
			}
			if got := p.perform(t, "EXEC INCR a;SET b 1"); got != want {
				t.Errorf("replied %q, want %q", got, want)
			}
			p.want(t, "*2\r\n"+bulk("1")+"$-1\r\n", "MGET", "a", "b")
			p.want(t, "+OK\r\n", "WATCH", "watched", "watched2", "nothing")
			if got := p.perform(t, "EXEC INCR a;SET b 1"); got != "*2\r\n:2\r\n+OK\r\n" {
				t.Errorf("with nothing changed: %q", got)
			}
		})
	}
}

// TestSelectInTransaction: what follows works in the chosen database, and so does the connection if EXEC does; keys of
// two databases do not change together.
func TestSelectInTransaction(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	p := dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "SET", "a", "zero")
	for _, c := range []struct{ queue, reply, db string }{
		{"SELECT 1;SET a one;SELECT 0", "*3\r\n+OK\r\n+OK\r\n+OK\r\n", "0"},
		{"GET a;SELECT 1;GET a;DBSIZE", "*4\r\n" + bulk("zero") + "+OK\r\n" + bulk("one") + ":1\r\n", "1"},
		{"SELECT 2;GET a", "*2\r\n-ERR DB index is out of range\r\n" + bulk("one"), "1"},
		{"SET b 1;SELECT 0;SET b 2", "-ERR kvd: " + exec.ErrDatabases.Error() + "\r\n", "1"},
		{"GET a;SELECT 0;SET b 2", "-ERR kvd: " + exec.ErrDatabases.Error() + "\r\n", "1"},
		{"COPY a b DB 0;GET a", "-ERR kvd: " + exec.ErrDatabases.Error() + "\r\n", "1"},
		{"COPY a b DB 0", "*1\r\n:1\r\n", "1"},
		{"EXISTS b;SELECT 0;EXISTS b", "*3\r\n:0\r\n+OK\r\n:1\r\n", "0"},
	} {
		if got := p.perform(t, "EXEC "+c.queue); got != c.reply {
			t.Errorf("%s: got %q, want %q", c.queue, got, c.reply)
		}
		if got := p.do(t, "CLIENT", "INFO"); !strings.Contains(got, " db="+c.db+" ") {
			t.Errorf("%s: then %q, want database %s", c.queue, got, c.db)
		}
	}
	p.want(t, "+OK\r\n", "ACL", "SETUSER", "u", "on", "nopass", "~*", "+@all", "db=1")
	u := dial(t, "tcp", addr)
	u.want(t, "+OK\r\n", "AUTH", "u", "any")
	if got := u.perform(t, "EXEC SELECT 1;GET a"); got != "*2\r\n+OK\r\n"+bulk("one") {
		t.Error(got)
	}
	u.want(t, "+OK\r\n", "MULTI")
	u.want(t, "-NOPERM this user has no permissions to access this database\r\n", "SELECT", "0")
	u.want(t, "-EXECABORT Transaction discarded because of previous errors.\r\n", "EXEC")
}

// TestTransactionLimits: more keys than the store changes together, or others without end, are refused in words, and
// nothing is done.
func TestTransactionLimits(t *testing.T) {
	store, p, _ := severalStore(t, severalCase{keys: "SET a 1"})
	before := contents(t, store)
	many := []string{"MSETNX"}
	for i := range client.MaxTxnKeys + 1 {
		many = append(many, "k"+strconv.Itoa(i), "v")
	}
	p.want(t, "-ERR kvd: transaction too large: 1025 keys, at most 1024; nothing was done\r\n", many...)
	atCommit(store, func() clienttest.Fault { return clienttest.Fault{Err: client.ErrTxnContended} })
	p.want(t, "-ERR kvd: transaction contended; nothing was done\r\n", "MSETNX", "b", "1", "c", "2")
	store.Fail(nil)
	if got := contents(t, store); got != before {
		t.Errorf("then\n%s\nwant\n%s", got, before)
	}
	p.want(t, ":1\r\n", many[:1+2*client.MaxTxnKeys]...)
	p.want(t, ":1025\r\n", "DBSIZE")
}

// TestManyKeys: a command or script that only reads has as many keys as there may be, whether they are there or not, in
// little memory; those that it changes are refused in words if they are too many for one step.
func TestManyKeys(t *testing.T) {
	const maxStaged = 16 << 10 // of a plan
	budget := netsrv.NewBudget(256 << 20)
	store := clienttest.New(clienttest.Options{})
	p := dial(t, "tcp",
		serve(t, Options{Databases: []Database{{"default", store}}, Budget: budget, ScriptTimeout: time.Hour}))
	for from := 0; from < maxStaged; from += 4096 {
		set, push := []string{"MSET"}, []string{"RPUSH", "list"}
		for i := from; i < from+4096; i++ {
			set, push = append(set, "there:"+strconv.Itoa(i), strconv.Itoa(maxStaged-i)), append(push, strconv.Itoa(i))
		}
		p.want(t, "+OK\r\n", set...)
		p.want(t, ":"+strconv.Itoa(from+4096)+"\r\n", push...)
	}
	const count = "local n = 0 for i = 0, ARGV[1] - 1 do for _, k in ipairs({unpack(ARGV, 2)}) do if " +
		"redis.call('GET', k .. i) then n = n + 1 end end end return n"
	script := func(want string, n int, kinds ...string) {
		t.Helper()
		p.want(t, want, append([]string{"EVAL", count, "0", strconv.Itoa(n)}, kinds...)...)
	}
	script(":16384\r\n", maxStaged, "there:")
	script(":0\r\n", maxStaged, "absent:")
	script(":8192\r\n", maxStaged/2, "there:", "absent:")
	script("-ERR kvd: more than 16384 keys at once; nothing was done\r\n", maxStaged+1, "absent:")
	p.want(t, "+OK\r\n", "LTRIM", "list", "1", "-1") // the list is a key, too
	p.want(t, "*2\r\n"+bulk("16382")+bulk("16381"), "SORT", "list", "BY", "there:*", "LIMIT", "1", "2")
	if reply := p.do(t, "SORT", "list", "BY", "absent:*", "GET", "absent:*", "LIMIT", "0", "1"); reply !=
		"*1\r\n$-1\r\n" {
		t.Errorf("absent weights: %q", reply)
	}
	const change = "for i = 1, ARGV[1] do redis.call('SET', 'there:' .. i, string.rep('x', 20000)) end return 1"
	p.want(t, ":1\r\n", "EVAL", change, "0", "1024")
	if reply := p.do(t, "EVAL", change, "0", "1025"); !strings.Contains(
		reply, "transaction too large: 1025 keys, at most 1024") {
		t.Errorf("1025 keys: %q", reply)
	}
}

// countingAPI counts calls for a connection's commands.
type countingAPI struct {
	client.API
	mu    sync.Mutex
	calls []string
}

func (c *countingAPI) noteCall(ctx context.Context, what string, ops []client.Op) {
	if inside.MemoryLimit(ctx) == pollLimit {
		return // of a poll for those who wait
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, fmt.Sprint(what, " of ", len(ops)))
}

// taken gives the calls since it was called before.
func (c *countingAPI) taken() (calls []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	calls, c.calls = c.calls, nil
	return calls
}

func (c *countingAPI) Do(ctx context.Context, ops []client.Op) {
	c.noteCall(ctx, "Do", ops)
	c.API.Do(ctx, ops)
}

func (c *countingAPI) MultiCAS(ctx context.Context, ops []client.Op) error {
	c.noteCall(ctx, "MultiCAS", ops)
	return c.API.MultiCAS(ctx, ops)
}

// TestCallsOfTheStore: keys are read together, and what a command named and did not use is no part of its change.
func TestCallsOfTheStore(t *testing.T) {
	api := &countingAPI{API: clienttest.New(clienttest.Options{})}
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", api}}}))
	p.do(t, "MSET", "a", "1", "b", "2", "c", "3")
	p.do(t, "RPUSH", "l", "1", "2", "3", "4")
	for _, c := range []struct{ command, calls string }{
		{"MSETNX x 1 y 2", "Do of 2, MultiCAS of 2"},
		{"MSETNX x 1 z 2", "Do of 2"}, // the first key decides
		{"RENAME x y", "Do of 2, MultiCAS of 2"},
		{"COPY y a", "Do of 2, Do of 2"}, // nothing to change
		{"BITOP AND d a b c", "Do of 4, MultiCAS of 4"},
		{"EVAL return#redis.call('mget',unpack(KEYS)) 3 a b c", "Do of 3, Do of 3"},
		{"EVAL return(redis.call('incr',KEYS[3])) 3 a b c", "Do of 3, Do of 1"},
		{"EVAL redis.call('incr',KEYS[1])redis.call('incr',KEYS[2]) 3 a b c", "Do of 3, MultiCAS of 2"},
		{"EXEC INCR a;INCR b;GET c", "Do of 3, MultiCAS of 3"},
		{"EXEC INCR a;INCR a;GET a", "Do of 1"}, // an update
		{"LMPOP 2 none l LEFT", "Do of 2, MultiCAS of 2"},
		{"BLPOP none l 0", "Do of 1, Do of 1, Do of 1"}, // that there is no other list is no condition
	} {
		api.taken()
		if got := p.perform(t, c.command); got[0] == '-' {
			t.Errorf("%s: %q", c.command, got)
		}
		if got := strings.Join(api.taken(), ", "); got != c.calls {
			t.Errorf("%s: %s, want %s", c.command, got, c.calls)
		}
	}
}

// TestTransfers: money that is moved between keys by transactions, scripts and RENAMEs of lists is neither made nor
// lost, and whoever reads all of it at one time sees all of it.
func TestTransfers(t *testing.T) {
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, Options{Databases: []Database{{"default", api}}})
			const accounts, each = 4, 60
			keys := make([]string, accounts)
			for i := range keys {
				keys[i] = "account" + strconv.Itoa(i)
				dial(t, "tcp", addr).want(t, "+OK\r\n", "SET", keys[i], "100")
			}
			var moving, reading sync.WaitGroup
			stop := make(chan struct{})
			for w := range 4 {
				p := dial(t, "tcp", addr)
				moving.Go(func() {
					for i := range each {
						from, to := keys[(w+i)%accounts], keys[(w+3*i+1)%accounts]
						if from == to {
							continue
						}
						var r string
						if i%2 == 0 {
							r = p.perform(t, "EXEC DECRBY "+from+" 7;INCRBY "+to+" 7")
						} else {
							r = p.do(t, "EVAL", "redis.call('decrby',KEYS[1],3) return redis.call('incrby',KEYS[2],3)",
								"2", from, to)
						}
						if r[0] == '-' {
							t.Error(r)
						}
					}
				})
			}
			p := dial(t, "tcp", addr)
			reading.Go(func() {
				p.sees(t, stop, ":400\r\n", "EVAL", "local s = 0 for _, v in ipairs(redis.call('mget', "+
					"unpack(KEYS))) do s = s + v end return s", "4", keys[0], keys[1], keys[2], keys[3])
			})
			moving.Wait()
			close(stop)
			reading.Wait()
		})
	}
}

// sees performs a command that reads until stop is closed, and wants one answer each time, unless the keys change too
// often for any.
func (p *peer) sees(t *testing.T, stop <-chan struct{}, want string, args ...string) {
	for {
		if got := p.do(t, args...); got != want && !strings.Contains(got, exec.ErrAgain.Error()) {
			t.Errorf("a reader saw %q", got)
		}
		select {
		case <-stop:
			return
		default:
		}
	}
}

// TestCopiesAreApart: of two keys that came to one value by COPY or RENAME in a transaction, each changes alone.
func TestCopiesAreApart(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	for _, c := range []struct{ queue, get, want string }{
		{"SET a 1;APPEND a 2;COPY a b;APPEND a x;APPEND b y;APPEND a z;APPEND b w", "MGET a b", array("12xz", "12yw")},
		{"INCR n;COPY n m;INCR n;INCR n;DECR m", "MGET n m", array("3", "0")},
		{"RPUSH l 1 2;RENAME l k;RPUSH l 9 8;RPUSH k 3;LPOP k;LPUSH l 7", "LRANGE k 0 -1", array("2", "3")},
		{"HSET h f 1;HSET h g 2;COPY h i;HSET h f 3;HSET i f 4;HSET h g 5", "HMGET i f g", array("4", "2")},
		{"ZADD z 1 a;ZADD z 2 b;COPY z y;ZADD z 3 a;ZADD y 4 a;ZADD z 9 b", "ZMSCORE y a b", array("4", "2")},
		{"SADD s 1 x;SADD s y;COPY s t;SREM s x;SADD t z;SADD s q", "SMISMEMBER t 1 x y z q",
			"*5\r\n:1\r\n:1\r\n:1\r\n:1\r\n:0\r\n"},
	} {
		if got := p.perform(t, "EXEC "+c.queue); strings.Contains(got, "-") {
			t.Errorf("%s: %q", c.queue, got)
		}
		p.want(t, c.want, strings.Fields(c.get)...)
	}
}

// TestStagedWritesWake: clients that wait for a list are served when a command on several keys makes it, without a
// poll.
func TestStagedWritesWake(t *testing.T) {
	for _, command := range []string{"RENAME tmp k", "COPY tmp k", "LMOVE tmp k LEFT LEFT", "SORT tmp STORE k",
		"EXEC RENAME tmp k;SET other 1", "EVAL redis.call('rename',KEYS[1],KEYS[2]) 2 tmp k"} {
		store, p, other := severalStore(t, severalCase{keys: "RPUSH tmp 1"})
		stop := make(chan struct{})
		polled := make(chan struct{}, 1)
		store.Fail(func(ctx context.Context, _ *client.Op) clienttest.Fault {
			if inside.MemoryLimit(ctx) == pollLimit { // a poll, which never ends
				signal(polled)
				<-stop
			}
			return clienttest.Fault{}
		})
		p.send(t, []string{"BLPOP", "k", "0"})
		<-polled
		if got := other.perform(t, command); got[0] == '-' {
			t.Errorf("%s: %q", command, got)
		}
		p.answers(t, array("k", "1"))
		close(stop)
	}
}

// Replies take memory twice their length, whatever they are made of, and strings before they are made.
func TestRepliesTakeMemory(t *testing.T) {
	const n = 4 << 20
	for what, does := range map[string]func(s *staged){
		"nulls": func(s *staged) {
			for s.out.Len() < n {
				s.out.Null()
			}
		},
		"a string": func(s *staged) { s.out.Bulk(make([]byte, n)) },
	} {
		share := netsrv.NewBudget(1 << 30).Share(nil)
		s := newStaged(&conn{g: &Gateway{}, share: share})
		s.does = does
		(*stagedCommands)(s).Begin()
		if (*stagedCommands)(s).Run(); s.Err != nil || share.Held() < 2*(n-oneLimit) || share.Held() > 2*(n+oneLimit) {
			t.Errorf("%s: %d bytes are taken, %v", what, share.Held(), s.Err)
		}
		s.free()

		s = newStaged(&conn{g: &Gateway{}, share: share})
		s.Lone = true // who cannot take memory
		(*stagedCommands)(s).Begin()
		s.does = does
		if (*stagedCommands)(s).Run(); s.Err == nil {
			t.Errorf("%s: there is no memory, and nothing says so", what)
		}
		if what == "a string" && s.out.Len() > 0 {
			t.Errorf("%d bytes are made without memory", s.out.Len())
		}
		s.Lone = false
		s.free()
		share.Close()
	}
}
