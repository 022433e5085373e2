package gateway

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/hotkeys"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/testutil"
)

// sharing are n databases in one namespace, and one behind them in another.
func sharing(api client.API, n int) []Database {
	return append(slices.Repeat([]Database{{"shared", api}}, n),
		Database{"alone", clienttest.New(clienttest.Options{})})
}

// inDatabase is a connection that has selected a database.
func inDatabase(t *testing.T, addr string, db int) *peer {
	t.Helper()
	p := dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "SELECT", fmt.Sprint(db))
	return p
}

// TestPlaceDatabases: a database's number is counted within its namespace, whatever stands before it in the list.
func TestPlaceDatabases(t *testing.T) {
	a, b := clienttest.New(clienttest.Options{}), clienttest.New(clienttest.Options{})
	dbs := placeDatabases([]Database{{"a", a}, {"b", b}, {"a", a}, {"b", b}, {"a", a}})
	for i, want := range []string{"", "", "\x00kvd:db1:", "\x00kvd:db1:", "\x00kvd:db2:"} {
		if d := dbs[i]; d.prefix != want || d.shared.dbs[d.number] != i {
			t.Errorf("database %d has prefix %q and is number %d of %v", i, d.prefix, d.number, d.shared.dbs)
		}
	}
}

// TestSharedLikeAlone: commands do in a database that shares its namespace what they do in one that is alone, whatever
// others have there.
func TestSharedLikeAlone(t *testing.T) {
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		t.Run(name, func(t *testing.T) {
			alone, shared := serve(t, Options{Databases: fake()}), serve(t, Options{Databases: sharing(api, 2)})
			commands := func(rng *rand.Rand) [][]string {
				all := randomCommands(rng)
				if c := all[0]; len(c) == 2 && c[0] == "SELECT" && c[1] == "0" {
					c[1] = fmt.Sprint(rng.IntN(2))
				}
				return all
			}
			for seed, proto := range []string{"2", "3", "2"} {
				compareWith(t, commands, uint64(seed), proto, inDatabase(t, shared, 1), inDatabase(t, alone, 1))
			}
		})
	}
}

// TestSharedIsolation: databases of a namespace do not see each other's keys, and nobody reaches them by what they are
// called in the store.
func TestSharedIsolation(t *testing.T) {
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, Options{Databases: sharing(api, 3)})
			var ps []*peer
			for db := range 4 {
				ps = append(ps, inDatabase(t, addr, db))
			}
			// Somebody else's: of a database that this gateway does not have, and of none.
			for _, k := range []string{inside.DatabasePrefix(9) + "k", inside.OwnPrefix + "x:k"} {
				if _, err := api.Put(t.Context(), []byte(k), []byte("v"), client.PutOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			ps[0].want(t, bulk("l"), "FUNCTION", "LOAD", library("l", "f", "return redis.call('get', keys[1])"))
			for db, p := range ps {
				for i := range db + 1 {
					p.want(t, "+OK\r\n", "SET", fmt.Sprint("k", i), fmt.Sprint("of ", db))
				}
				p.want(t, "+OK\r\n", "SET", "", "empty")
			}
			for db, p := range ps {
				n := fmt.Sprintf(":%d\r\n", db+2)
				p.want(t, n, "DBSIZE")
				p.want(t, bulk(fmt.Sprint("of ", db)), "GET", "k0")
				p.want(t, bulk(fmt.Sprint("of ", db)), "FCALL", "f", "1", "k0")
				want := append([]string{""}, "k0", "k1", "k2", "k3")[:db+2]
				if got := scanned(t, p); !slices.Equal(got, want) {
					t.Errorf("database %d: SCAN gives %q, want %q", db, got, want)
				}
				if got := p.do(t, "KEYS", "*"); !strings.HasPrefix(got, "*"+n[1:]) {
					t.Errorf("database %d: KEYS gives %q", db, got)
				}
				for range 20 {
					if got := p.do(t, "RANDOMKEY"); !slices.ContainsFunc(want, func(k string) bool {
						return got == bulk(k)
					}) {
						t.Errorf("database %d: RANDOMKEY gives %q", db, got)
					}
				}
				for _, other := range []int{1, 2, 9} {
					for _, k := range []string{inside.DatabasePrefix(other) + "k0", inside.OwnPrefix, inside.OwnPrefix +
						"x:k"} {
						for _, cmd := range [][]string{{"GET", k}, {"SET", k, "x"}, {"DEL", "k0", k}, {"MGET", "k0", k},
							{"RENAME", "k0", k}, {"COPY", k, "k0"}, {"COPY", "k0", k, "DB", fmt.Sprint((db + 1) % 4)},
							{"WATCH", k}, {"MSETNX", k, "x"}, {"BLPOP", k, "0.01"}, {"OBJECT", "IDLETIME", k},
							{"MOVE", k, fmt.Sprint((db + 1) % 4)}, {"EVAL", "return redis.call('get', KEYS[1])", "1",
								k}} {
							if got := p.do(t, cmd...); !strings.HasPrefix(got, `-ERR kvd: keys that begin with "\x00kvd:db" are reserved for other databases of the namespace`) {
								t.Errorf("database %d: %q: %q", db, cmd, got)
							}
						}
					}
				}
			}
			info := ps[0].do(t, "INFO", "keyspace")
			for db := range 4 {
				if want := fmt.Sprintf("db%d:keys=%d,", db, db+2); !strings.Contains(info, want) {
					t.Errorf("INFO lacks %s: %q", want, info)
				}
			}
			// A flush takes the keys of its database, and no others.
			for db, left := range [][]int{{0, 3, 4, 5}, {0, 0, 4, 5}, {0, 0, 0, 5}} {
				ps[db].want(t, "+OK\r\n", "FLUSHDB")
				for other, n := range left {
					ps[other].want(t, fmt.Sprintf(":%d\r\n", n), "DBSIZE")
				}
			}
			ps[0].want(t, bulk("of 3"), "EVAL", "redis.call('select', 3) return redis.call('get', 'k0')", "0")
			ps[1].want(t, "+OK\r\n", "SET", "k", "v")
			ps[2].want(t, "+OK\r\n", "FLUSHALL")
			for _, p := range ps {
				p.want(t, ":0\r\n", "DBSIZE")
			}
			ps[1].want(t, "$-1\r\n", "FCALL", "f", "1", "k0")
			if got := strings.Count(contents(t, api), "\n") + 1; got != 3 {
				t.Errorf("%d keys are left in the store, want those of others and the libraries", got)
			}
		})
	}
}

// scanned are the keys of a SCAN, sorted.
func scanned(t *testing.T, p *peer) []string {
	t.Helper()
	var keys []string
	for cursor := "0"; ; {
		lines := strings.Split(p.do(t, "SCAN", cursor, "COUNT", "2"), "\r\n")
		for i := 5; i+1 < len(lines); i += 2 {
			keys = append(keys, lines[i])
		}
		if cursor = lines[2]; cursor == "0" {
			slices.Sort(keys)
			return slices.Compact(keys)
		}
	}
}

// TestSharedInOneStep: what is done over databases of a namespace is one operation of the store, on condition that
// nothing of it has changed.
func TestSharedInOneStep(t *testing.T) {
	for _, c := range []struct{ keys, command, reply, meanwhile, replyThen string }{
		{"SET k 1", "MOVE k 1", ":1\r\n", "SELECT 1;SET k 2", ":0\r\n"},
		{"SET k 1", "MOVE k 1", ":1\r\n", "DEL k", ":0\r\n"},
		{"SET k 1", "COPY k k DB 1", ":1\r\n", "APPEND k 2", ":1\r\n"},
		{"SET k 1", "COPY k k DB 1", ":1\r\n", "DEL k", ":0\r\n"},
		{"SET k 1", "EXEC INCR k;SELECT 1;INCR k;SELECT 0", "*4\r\n:2\r\n+OK\r\n:1\r\n+OK\r\n", "SELECT 1;SET k 8",
			"*4\r\n:2\r\n+OK\r\n:9\r\n+OK\r\n"},
		{"SET k 1", "EXEC MOVE k 1;SELECT 1;INCR k;SELECT 0", "*4\r\n:1\r\n+OK\r\n:2\r\n+OK\r\n", "INCR k",
			"*4\r\n:1\r\n+OK\r\n:3\r\n+OK\r\n"},
		{"SET k 1", "EXEC GET k;SELECT 1;SET a b;SELECT 0", "*4\r\n" + bulk("1") + "+OK\r\n+OK\r\n+OK\r\n", "SET k 2",
			"*4\r\n" + bulk("2") + "+OK\r\n+OK\r\n+OK\r\n"},
		{"SET k 1", "EVAL redis.call('move',KEYS[1],1)redis.call('select',1)return(redis.call('incr',KEYS[1])) 1 k",
			":2\r\n", "INCR k", ":3\r\n"},
	} {
		t.Run(c.command, func(t *testing.T) {
			begin := func() (*countingAPI, *clienttest.Store, *peer, *peer) {
				store := clienttest.New(clienttest.Options{})
				api := &countingAPI{API: store}
				addr := serve(t, Options{Databases: sharing(api, 2)})
				p := dial(t, "tcp", addr)
				p.do(t, strings.Fields(c.keys)...)
				return api, store, p, dial(t, "tcp", addr)
			}
			api, store, p, _ := begin()
			before := contents(t, store)
			api.taken()
			if got := p.perform(t, c.command); got != c.reply {
				t.Errorf("replied %q, want %q", got, c.reply)
			}
			if calls := api.taken(); calls[len(calls)-1] != "MultiCAS of 2" || slices.Index(calls, "MultiCAS of 2") !=
				len(calls)-1 {
				t.Errorf("it took %q, want one MultiCAS of both keys", calls)
			}
			after := contents(t, store)
			failsWhole(t, c.command, before, after, func() (*clienttest.Store, *peer) {
				_, store, p, _ := begin()
				return store, p
			})
			_, store, p, other := begin()
			atCommit(store, func() clienttest.Fault {
				for cmd := range strings.SplitSeq(c.meanwhile, ";") {
					other.do(t, strings.Fields(cmd)...)
				}
				return clienttest.Fault{}
			})
			if got := p.perform(t, c.command); got != c.replyThen {
				t.Errorf("behind %s: replied %q, want %q", c.meanwhile, got, c.replyThen)
			}
		})
	}
}

// TestMovesAreOneStep: a key that is moved to and fro is in one of the databases at any time, for whoever reads both at
// once; what is paid from one database to another is neither made nor lost.
func TestMovesAreOneStep(t *testing.T) {
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, Options{Databases: sharing(api, 3)})
			other := serve(t, Options{Databases: sharing(api, 3)})
			dial(t, "tcp", addr).want(t, "+OK\r\n", "SET", "k", "v")
			for db := range 3 {
				inDatabase(t, addr, db).want(t, "+OK\r\n", "SET", "money", "100")
			}
			var moving, reading sync.WaitGroup
			for w := range 3 {
				from, to := inDatabase(t, []string{addr, other}[w%2], w), (w+1)%3
				moving.Go(func() {
					for i := range 40 {
						if got := from.do(t, "MOVE", "k", fmt.Sprint(to)); got != ":0\r\n" && got != ":1\r\n" {
							t.Errorf("MOVE: %q", got)
						}
						if got := from.perform(
							t, fmt.Sprintf("EXEC DECRBY money %d;SELECT %d;INCRBY money %d;SELECT %d", i, to, i,
								w)); got[0] != '*' {
							t.Errorf("EXEC: %q", got)
						}
					}
				})
			}
			stop := make(chan struct{})
			p := dial(t, "tcp", other)
			const look = "local n,sum=0,0 for db=0,2 do redis.call('select',db) n=n+redis.call('exists','k') " +
				"sum=sum+redis.call('get','money') end return{n,sum}"
			reading.Go(func() { p.sees(t, stop, "*2\r\n:1\r\n:300\r\n", "EVAL", look, "0") })
			moving.Wait()
			close(stop)
			reading.Wait()
			p.want(t, "*2\r\n:1\r\n:300\r\n", "EVAL", look, "0")
		})
	}
}

// TestSharedWatch: EXEC does nothing if a key of another database of the namespace has changed that was watched there.
func TestSharedWatch(t *testing.T) {
	addr := serve(t, Options{Databases: sharing(clienttest.New(clienttest.Options{}), 2)})
	p, zero, one := dial(t, "tcp", addr), inDatabase(t, addr, 0), inDatabase(t, addr, 1)
	for _, c := range []struct {
		changes *peer
		reply   string
	}{{nil, "*1\r\n+OK\r\n"}, {zero, "*1\r\n+OK\r\n"}, {one, "*-1\r\n"}} {
		p.want(t, "+OK\r\n", "SELECT", "1")
		p.want(t, "+OK\r\n", "WATCH", "k")
		p.want(t, "+OK\r\n", "SELECT", "0")
		if c.changes != nil {
			c.changes.do(t, "INCR", "k")
		}
		if got := p.perform(t, "EXEC SET done 1"); got != c.reply {
			t.Errorf("got %q, want %q", got, c.reply)
		}
	}
}

// TestSharedEvents: events, expiry and what is told to clients that cache are about the names that clients know, by
// their database.
func TestSharedEvents(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr := serve(t, Options{Databases: sharing(db, 2), TrackingCheck: 50 * time.Millisecond})
	sub, p, caches := dial(t, "tcp", addr), inDatabase(t, addr, 1), inDatabase(t, addr, 1)
	p.want(t, "+OK\r\n", "CONFIG", "SET", "notify-keyspace-events", "KEAn")
	sub.do(t, "PSUBSCRIBE", "__keyspace*")
	hears := func(db int, key string, events ...string) {
		t.Helper()
		for _, ev := range events {
			sub.hears(t, "*4\r\n"+bulk("pmessage")+bulk("__keyspace*")+bulk(fmt.Sprintf("__keyspace@%d__:%s", db, key))+
				bulk(ev))
		}
	}
	p.want(t, "+OK\r\n", "SET", "", "v")
	hears(1, "", "new", "set")
	p.want(t, ":1\r\n", "MOVE", "", "0")
	hears(0, "", "new")
	hears(1, "", "move_from")
	hears(0, "", "move_to")
	p.want(t, "+OK\r\n", "SET", "brief", "v", "PX", "200")
	hears(1, "brief", "new", "set", "expire", "expired")
	p.want(t, "$-1\r\n", "GET", "brief")

	caches.do(t, "HELLO", "3")
	caches.want(t, "+OK\r\n", "SET", "k", "1")
	caches.want(t, "+OK\r\n", "SET", "", "1")
	caches.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	for _, k := range []string{"k", ""} {
		invalidated := ">2\r\n" + bulk("invalidate") + "*1\r\n" + bulk(k)
		caches.want(t, bulk("1"), "GET", k)
		p.want(t, "+OK\r\n", "SET", k, "2")
		caches.hears(t, invalidated)
		caches.want(t, bulk("2"), "GET", k)
		// Nobody tells the gateway of this.
		if _, err := db.Put(t.Context(), []byte(inside.DatabasePrefix(1)+k), []byte("3"), client.PutOptions{}); err !=
			nil {
			t.Fatal(err)
		}
		caches.hears(t, invalidated)
		caches.want(t, bulk("3"), "GET", k)
	}
}

// TestSharedBlocking: clients that wait for a list are served by what comes into their database, from wherever it
// comes.
func TestSharedBlocking(t *testing.T) {
	api := clienttest.New(clienttest.Options{})
	addr, here := start(t, Options{Databases: sharing(api, 3)})
	there := serve(t, Options{Databases: sharing(api, 3)})
	var waiting []*peer
	for db := range 3 {
		p := inDatabase(t, addr, db)
		p.send(t, []string{"BLPOP", "l", "0"})
		waiting = append(waiting, p)
	}
	testutil.Until(t, "all of them wait", func() bool { return here.waits.clients.Load() == 3 })
	inDatabase(t, there, 1).want(t, ":1\r\n", "RPUSH", "l", "a")
	waiting[1].answers(t, array("l", "a"))
	p := inDatabase(t, addr, 1)
	p.want(t, ":1\r\n", "RPUSH", "tmp", "b")
	p.want(t, ":1\r\n", "COPY", "tmp", "l", "DB", "2")
	waiting[2].answers(t, array("l", "b"))
	p.want(t, ":1\r\n", "RPUSH", "l", "c")
	p.want(t, ":1\r\n", "MOVE", "l", "0")
	waiting[0].answers(t, array("l", "c"))
}

// TestSharedLongKeys: a name may be as long as the store allows with what is before it there, and an error tells how
// long that is.
func TestSharedLongKeys(t *testing.T) {
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, Options{Databases: sharing(api, 2)})
			zero, one := inDatabase(t, addr, 0), inDatabase(t, addr, 1)
			most := client.MaxKeyLen - len(inside.DatabasePrefix(1))
			k := strings.Repeat("k", most)
			one.want(t, "+OK\r\n", "SET", k, "v")
			one.want(t, bulk("v"), "GET", k)
			one.want(t, array("v", "v", "v", "v", "v", "v", "v", "v"),
				append([]string{"MGET"}, slices.Repeat([]string{k}, 8)...)...)
			one.want(t, ":1\r\n", "MOVE", k, "0")
			zero.want(t, "+OK\r\n", "RENAME", k, k+"k")
			refused := fmt.Sprintf("-ERR kvd: key of %d bytes: keys have up to %d in this database, whose namespace "+
				"has others\r\n", most+1, most)
			for _, cmd := range [][]string{{"SET", k + "k", "v"}, {"MGET", "a", k + "k"}, {"MSETNX", k + "k", "v"},
				{"WATCH", k + "k"}} {
				one.want(t, refused, cmd...)
			}
			zero.want(t, refused, "MOVE", k+"k", "1")
			zero.want(t, refused, "COPY", k+"k", k+"k", "DB", "1")
			zero.want(t, ":1\r\n", "EXISTS", k+"k")
			one.want(t, ":0\r\n", "DBSIZE")
			// Many long names at once are within the gateway's memory, or refused.
			var many [][]string
			for i := range 200 {
				many = append(many, []string{"SET", fmt.Sprint(k[:most-8], i), "v"})
			}
			one.send(t, many...)
			for range many {
				if got := string(one.reply(t)); got != "+OK\r\n" {
					t.Fatal(got)
				}
			}
			one.want(t, ":200\r\n", "DBSIZE")
		})
	}
}

// TestSharedHotKeys: operators see which database of a namespace a key is in.
func TestSharedHotKeys(t *testing.T) {
	dbs := sharing(clienttest.New(clienttest.Options{}), 2)
	g := &Gateway{o: Options{Databases: dbs}, dbs: placeDatabases(dbs), hot: hotkeys.New()}
	c := &conn{g: g}
	for c.db = range dbs {
		for range 100 * hotkeys.Every {
			c.countHot(find([]byte("get")), [][]byte{[]byte("get"), []byte("k")})
		}
	}
	var got []string
	for _, k := range g.HotKeys() {
		got = append(got, k.Database)
	}
	if slices.Sort(got); !slices.Equal(got, []string{"alone", "shared (SELECT 0)", "shared (SELECT 1)"}) {
		t.Errorf("got %q", got)
	}
}
