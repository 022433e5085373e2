package gateway

import (
	"context"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestWaitersOfOtherTypes: who waits for another type is in nobody's way, whether it came first or later.
func TestWaitersOfOtherTypes(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	for _, c := range [][4]string{
		{"RPUSH k a", "BLPOP k 0", "ZADD k 1 a", "BZPOPMIN k 0"}, {"ZADD k 1 a", "BZMPOP 0 1 k MIN", "RPUSH k a",
			"BLMPOP 0 1 k LEFT"},
		{"XADD k 1-1 f v", "XREAD BLOCK 0 STREAMS k 0", "RPUSH k a", "BRPOP k 0"},
		{"RPUSH k a", "BLMOVE k other LEFT LEFT 0", "XADD k 1-1 f v", "XREAD BLOCK 0 STREAMS k 0"},
	} {
		if said := othersServed(t, "tcp", addr, c[0], c[1], c[2], c[3]); strings.Contains(said, "-ERR") ||
			strings.Count(said, "a\r\n")+strings.Count(said, "1-1\r\n") < 3 {
			t.Errorf("%q: %q", c, said)
		}
	}
}

// TestLines: a write wakes the first of those who wait for lists, the first of those who wait for sorted sets, and all
// who read.
func TestLines(t *testing.T) {
	s := polls(t, Options{Databases: fake()})
	var xs []*waiter
	names := [][]byte{[]byte("k")}
	for _, b := range []values.Blocking{{Line: "list"}, {Line: "list"},
		{Line: "sorted set"}, {Line: "sorted set"},
		{Reads: true}, {Reads: true}, {Reads: true, Line: "group g"}} {
		b.Names = names
		x := s.enterQueues(0, &b)
		defer s.leaveQueues(x, false)
		xs = append(xs, x)
	}
	s.wake(0, "k")
	for i, want := range []int{1, 0, 1, 0, 1, 1, 1} {
		if len(xs[i].wake) != want || len(s.turn(xs[i], 0, names)) != want {
			t.Errorf("client %d: woken %d times, its turn %t, want %d", i, len(xs[i].wake),
				len(s.turn(xs[i], 0, names)) > 0, want)
		}
	}
}

// polls is a gateway's waits without the goroutine that polls.
func polls(t *testing.T, o Options) *waits {
	addr, g := start(t, o)
	dial(t, "tcp", addr).want(t, "+PONG\r\n", "PING") // it serves
	g.waits.mu.polling = true                         // by nobody
	return &g.waits
}

// waiting enters a client in the queue of a key.
func (s *waits) waiting(t *testing.T, db int, names ...string) *waiter {
	b := &values.Blocking{Line: "list"}
	for _, n := range names {
		b.Names = append(b.Names, []byte(n))
	}
	x := s.enterQueues(db, b)
	t.Cleanup(func() { s.leaveQueues(x, false) })
	return x
}

// callsAPI counts calls of Do.
type callsAPI struct {
	client.API
	calls atomic.Int64
}

func (c *callsAPI) Do(ctx context.Context, ops []client.Op) {
	c.calls.Add(1)
	c.API.Do(ctx, ops)
}

// TestPollOfDatabases: a key is looked up in its own database, and those of one namespace together.
func TestPollOfDatabases(t *testing.T) {
	apis := []*callsAPI{{API: clienttest.New(clienttest.Options{})}, {API: clienttest.New(clienttest.Options{})}}
	for _, shared := range []bool{false, true} {
		dbs := []Database{{"a", apis[0]}, {"b", apis[1]}}
		if shared {
			dbs[1] = dbs[0]
		}
		addr, g := start(t, Options{Databases: dbs})
		p := dial(t, "tcp", addr)
		p.want(t, "+OK\r\n", "FLUSHALL")
		p.want(t, "+OK\r\n", "SELECT", "1")
		p.want(t, ":1\r\n", "RPUSH", "k", "1")
		s := &g.waits
		s.mu.polling = true // by nobody
		a, b, c := s.waiting(t, 0, "k"), s.waiting(t, 1, "k"), s.waiting(t, 0, "l")
		was := apis[0].calls.Load()
		s.lookUp([]*awaited{a.keys[0], b.keys[0], c.keys[0]})
		if len(a.wake) != 0 || len(b.wake) != 1 || len(c.wake) != 0 {
			t.Errorf("shared %t: woken %d, %d and %d times; want the second alone", shared, len(a.wake), len(b.wake),
				len(c.wake))
		}
		if n := apis[0].calls.Load() - was; n != 1 {
			t.Errorf("shared %t: %d lookups of database 0 instead of one for all of its keys", shared, n)
		}
	}
}

// TestPollWakesOnce: each change that a poll finds wakes once.
func TestPollWakesOnce(t *testing.T) {
	s := polls(t, Options{Databases: fake()})
	x := s.waiting(t, 0, "k")
	for i, c := range []struct {
		version uint64 // 0: it is not there
		wakes   int
	}{{0, 0}, {5, 1}, {5, 0}, {6, 1}, {0, 1}, {0, 0}, {7, 1}, {7, 0}} {
		op := client.Op{Item: client.Item{Version: c.version}}
		if c.version == 0 {
			op.Err = client.ErrNotFound
		}
		if s.found(x.keys, []client.Op{op}); len(x.wake) != c.wakes {
			t.Errorf("look %d, version %d: woken %d times, want %d", i, c.version, len(x.wake), c.wakes)
		}
		select {
		case <-x.wake:
		default:
		}
	}
}

// TestUnblockWaitsForTheOutcome: whoever ends a wait does not know whether it did so before the client says it.
func TestUnblockWaitsForTheOutcome(t *testing.T) {
	x := &waiter{end: make(chan ending, 1), over: make(chan struct{})}
	ended := make(chan bool)
	go func() { ended <- x.unblock(endError) }()
	testutil.Until(t, "it is told to end", func() bool { return len(x.end) == 1 })
	select {
	case <-ended:
		t.Fatal("the outcome is known before the client has told it")
	case <-time.After(20 * time.Millisecond):
	}
	x.told()
	close(x.over)
	if !<-ended {
		t.Error("it did not end, though the client took that")
	}
}

// TestWaitsOnceForAKey: a key that is named twice has the client in its queue once.
func TestWaitsOnceForAKey(t *testing.T) {
	s := polls(t, Options{Databases: fake()})
	x := s.waiting(t, 0, "k", "k")
	if n := len(x.keys[0].lines[0].queue); len(x.keys) != 1 || n != 1 {
		t.Errorf("waits for %d keys, %d times for the first", len(x.keys), n)
	}
}

// TestSeenBeforeItWaits: a client counts before it is in a queue, so that a writer that sees nobody has written before
// its first look.
func TestSeenBeforeItWaits(t *testing.T) {
	s := polls(t, Options{Databases: fake()})
	s.mu.Lock()
	entered := make(chan *waiter)
	go func() { entered <- s.enterQueues(0, &values.Blocking{Names: [][]byte{[]byte("k")}}) }()
	waits := func() bool {
		b := make([]byte, 1<<20)
		return slices.ContainsFunc(strings.Split(string(b[:runtime.Stack(b, true)]), "\n\n"), func(g string) bool {
			return strings.Contains(g, "[sync.Mutex.Lock") && strings.Contains(g, "enterQueues")
		})
	}
	testutil.Until(t, "it counts, or waits for the queues", func() bool { return s.any() || waits() })
	if !s.any() {
		t.Error("it does not count yet, and waits for the queues")
	}
	s.mu.Unlock()
	s.leaveQueues(<-entered, false)
}

// copyPast copies a key past the gateway, as another gateway writes it.
func copyPast(t *testing.T, db client.API, from, to string) {
	t.Helper()
	ops := []client.Op{{Kind: client.OpGet, Key: []byte(from), Typed: true}}
	if db.Do(t.Context(), ops); ops[0].Err != nil {
		t.Fatal(ops[0].Err)
	}
	put := []client.Op{{Kind: client.OpPut, Key: []byte(to), Value: ops[0].Item.Value, Type: ops[0].Item.Type}}
	if db.Do(t.Context(), put); put[0].Err != nil {
		t.Fatal(put[0].Err)
	}
}

// TestPausedWaitersTakeNothing: during CLIENT PAUSE a client that waits takes nothing of what another gateway writes.
func TestPausedWaitersTakeNothing(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr, g := start(t, Options{Databases: []Database{{"cache", db}}})
	p, w := dial(t, "tcp", addr), dial(t, "tcp", addr)
	w.want(t, ":1\r\n", "RPUSH", "from", "1")
	p.send(t, []string{"BLPOP", "k", "0"})
	blocked(t, g, 1)
	w.want(t, "+OK\r\n", "CLIENT", "PAUSE", "1000000", "WRITE")
	copyPast(t, db, "from", "k")
	testutil.Until(t, "the poll finds it, and the client has heard of that", func() bool {
		g.waits.mu.Lock()
		defer g.waits.mu.Unlock()
		k := g.waits.mu.keys[stagedName{DB: 0, Name: "k"}]
		return k == nil || k.version != 0 && len(k.lines[0].queue[0].wake) == 0
	})
	p.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	var timeout net.Error
	if b, err := p.r.Peek(1); err == nil {
		t.Fatalf("it was served during the pause: %q", b)
	} else if timeout, _ = err.(net.Error); timeout == nil || !timeout.Timeout() {
		t.Fatal(err)
	}
	p.SetReadDeadline(time.Time{})
	w.want(t, "+OK\r\n", "CLIENT", "UNPAUSE")
	p.answers(t, array("k", "1"))
}

// TestLooksAtVersions: what a look at versions tells, of each database, of long values, of those that cannot be read,
// and of those that are being read.
func TestLooksAtVersions(t *testing.T) {
	stores := []*clienttest.Store{clienttest.New(clienttest.Options{}), clienttest.New(clienttest.Options{})}
	addr, g := start(t, Options{Databases: []Database{{"a", stores[0]}, {"b", stores[1]}}, TrackingCheck: time.Hour})
	a := dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	look := func(what string, want ...string) {
		t.Helper()
		g.checkVersions(g.tracked.Names())
		if told := a.heard(t); strings.Join(told, "") != strings.Join(want, "") {
			t.Errorf("%s: told %q, want %q", what, told, want)
		}
	}
	for db, store := range stores {
		a.want(t, "+OK\r\n", "SELECT", string(rune('0'+db)))
		for _, n := range []int{1, 300_000} {
			a.want(t, "+OK\r\n", "SET", "k", strings.Repeat("x", n))
			a.do(t, "GET", "k")
			a.do(t, "GET", "absent")
			look("nothing was written")
			store.Fail(func(_ context.Context, o *client.Op) (f clienttest.Fault) {
				if o.Kind == client.OpGet {
					f.Err = client.ErrUnavailable
				}
				return f
			})
			look("nothing can be read")
			store.Fail(nil)
			copyPast(t, store, "k", "k")
			look("it was written", invalidated("k"))
			a.do(t, "GET", "k")
			if err := store.Delete(t.Context(), []byte("k")); err != nil {
				t.Fatal(err)
			}
			look("it was deleted", invalidated("k"))
		}
	}
	if _, err := stores[0].Put(t.Context(), []byte("read"), []byte("1"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	var c *conn
	g.each(func(x *conn) { c = x })
	g.tracked.Enter(&c.box, &c.listener, 0, []byte("read"))
	look("it is being read")
}

// TestTrackingOnAgain: a client that says TRACKING ON twice leaves nothing behind, and the versions are looked at while
// somebody caches, and no longer.
func TestTrackingOnAgain(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr, g := start(t, Options{Databases: []Database{{"cache", db}}, TrackingCheck: 5 * time.Millisecond})
	checks := g.tracked.Checking
	for range 2 {
		a := dial(t, "tcp", addr)
		a.do(t, "HELLO", "3")
		a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
		a.do(t, "GET", "k")
		a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON", "NOLOOP")
		a.do(t, "GET", "l")
		if _, err := db.Put(t.Context(), []byte("l"), []byte("1"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		a.hears(t, invalidated("l"))
		if !checks() {
			t.Error("nobody looks at versions")
		}
		a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "OFF")
		if keys, items, _ := g.tracked.Counts(); keys+items > 0 {
			t.Errorf("%d keys and %d items are left", keys, items)
		}
		testutil.Until(t, "nobody looks at versions", func() bool { return !checks() })
		if err := db.Delete(t.Context(), []byte("l")); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTrackedReplyComesFirst: a write while a client reads is told behind the reply.
func TestTrackedReplyComesFirst(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr := serve(t, Options{Databases: []Database{{"cache", db}}, TrackingCheck: time.Hour})
	a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	b.want(t, ":1\r\n", "SADD", "k", "1")
	b.want(t, ":1\r\n", "SADD", "j", "1")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	for _, cmd := range []string{"SCARD k", "SINTERCARD 2 k j", "EVAL return(redis.call('scard',KEYS[1])) 2 k j"} {
		var once atomic.Bool
		reading, written := make(chan struct{}), make(chan struct{})
		db.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
			if o.Kind == client.OpGet && string(o.Key) == "k" && once.CompareAndSwap(false, true) {
				close(reading)
				<-written
			}
			return clienttest.Fault{}
		})
		a.send(t, strings.Fields(cmd))
		<-reading
		b.do(t, "SADD", "k", cmd)
		close(written)
		if got := string(a.reply(t)); got[0] != ':' {
			t.Errorf("%s: heard %q before the reply", cmd, got)
		}
		a.hears(t, invalidated("k"))
		db.Fail(nil)
	}
}

// TestTrackedUnread: a key that could not be read counts as of no known version, so that its client hears of it at the
// next look.
func TestTrackedUnread(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr, g := start(t, Options{Databases: []Database{{"cache", db}}, TrackingCheck: time.Hour})
	a := dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	for _, cmd := range []string{"SCARD k", "SINTERCARD 1 k"} {
		db.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
			return clienttest.Fault{Err: client.ErrUnavailable}
		})
		if got := a.do(t, strings.Fields(cmd)...); got[0] != '-' {
			t.Errorf("%s: replied %q", cmd, got)
		}
		db.Fail(nil)
		g.checkVersions(g.tracked.Names())
		if told := a.heard(t); len(told) != 1 || told[0] != invalidated("k") {
			t.Errorf("%s: told %q, want %q", cmd, told, invalidated("k"))
		}
	}
}

// TestWatchTouched: EXEC does nothing if an absent key that it watches was made through this gateway and is gone again;
// without redis-server.
func TestWatchTouched(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	p, w := dial(t, "tcp", addr), dial(t, "tcp", addr)
	for _, touch := range []string{"SET k 1;DEL k", "HSET k f v;HDEL k f", "MSETNX k 1 l 1;DEL k l",
		"EVAL redis.call('set',KEYS[1],1)redis.call('set','l',1) 1 k;DEL k l"} {
		for _, queue := range []string{"SET k 2", "GET k", "SET other 1;GET k"} {
			p.want(t, "+OK\r\n", "WATCH", "k")
			for cmd := range strings.SplitSeq(touch, ";") {
				w.do(t, strings.Fields(cmd)...)
			}
			if got := p.perform(t, "EXEC "+queue); got != "*-1\r\n" {
				t.Errorf("%s, then %s: replied %q", touch, queue, got)
			}
			p.want(t, "+OK\r\n", "WATCH", "k")
			if got := p.perform(t, "EXEC "+queue); got == "*-1\r\n" {
				t.Errorf("%s: replied %q, though nothing has changed", queue, got)
			}
			w.do(t, "DEL", "k")
		}
	}
}

// TestWatchElsewhere: whatever a transaction on one key does, it does nothing if another gateway has written the key.
func TestWatchElsewhere(t *testing.T) {
	o := Options{Databases: fake()}
	p, w := dial(t, "tcp", serve(t, o)), dial(t, "tcp", serve(t, o))
	for _, was := range []string{"SET k 0", "DEL k"} {
		for _, queue := range []string{"SET k 2", "SETEX k 100 2", "GET k", "EXISTS k", "INCR k", "DEL k", "PING"} {
			w.do(t, strings.Fields(was)...)
			p.want(t, "+OK\r\n", "WATCH", "k")
			w.want(t, "+OK\r\n", "SET", "k", "1")
			if got := p.perform(t, "EXEC "+queue); got != "*-1\r\n" {
				t.Errorf("%s, then %s: replied %q", was, queue, got)
			}
			w.want(t, "$1\r\n1\r\n", "GET", "k")
		}
	}
}

// TestLookupsInOneStep: keys that are looked for in transactions and scripts count as hits and misses, once.
func TestLookupsInOneStep(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	p := dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "SET", "k", "1")
	p.perform(t, "EXEC GET k;EXISTS none;INCR k")
	p.perform(t, "EXEC GET k;STRLEN none")
	p.do(t, "EVAL", "return redis.call('GET', KEYS[1])", "1", "k")
	if r := p.do(t, "INFO", "stats"); !strings.Contains(r, "keyspace_hits:3\r\nkeyspace_misses:2\r\n") {
		t.Errorf("%s", r)
	}
}

// behindAPI calls f once, behind a Do of a key.
type behindAPI struct {
	client.API
	of string
	f  atomic.Pointer[func()]
}

func (a *behindAPI) Do(ctx context.Context, ops []client.Op) {
	a.API.Do(ctx, ops)
	if string(ops[0].Key) != a.of {
		return
	}
	if f := a.f.Swap(nil); f != nil {
		(*f)()
	}
}

// TestTrackingInside: CLIENT CACHING in a transaction holds for what is behind it, and no longer; what was written
// before the key was entered is told, too.
func TestTrackingInside(t *testing.T) {
	api := &behindAPI{API: clienttest.New(clienttest.Options{}), of: "k"}
	addr := serve(t, Options{Databases: []Database{{"cache", api}}, TrackingCheck: time.Hour})
	a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON", "OPTIN")
	told := func(what string, want ...string) {
		t.Helper()
		if got := a.heard(t); strings.Join(got, "") != strings.Join(want, "") {
			t.Errorf("%s: told %q, want %q", what, got, want)
		}
	}
	for _, queue := range []string{"CLIENT CACHING YES;GET k", "CLIENT CACHING YES;GET k;GET j",
		"GET j;CLIENT CACHING YES;STRLEN k"} {
		if got := a.perform(t, "EXEC "+queue); got[0] != '*' {
			t.Fatalf("%s: replied %q", queue, got)
		}
		a.do(t, "GET", "m")
		b.do(t, "SET", "m", "1")
		told(queue + ", of what was read right behind it")
		b.do(t, "SET", "k", "1")
		told(queue, invalidated("k"))
		a.do(t, "GET", "k")
		b.do(t, "SET", "k", "2")
		told(queue + ", of what was read behind it")
	}
	write := func() {
		if _, err := api.Put(t.Context(), []byte("k"), []byte("3"), client.PutOptions{}); err != nil {
			t.Error(err)
		}
	}
	api.f.Store(&write)
	if got := a.perform(t, "EXEC CLIENT CACHING YES;GET k"); got != "*2\r\n+OK\r\n"+bulk("2") {
		t.Fatalf("replied %q", got)
	}
	told("written behind the read", invalidated("k"))
}

// TestBroadcastTogether: a client with BCAST hears at once of keys that are written together, in the order of their
// names.
func TestBroadcastTogether(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "k", "PREFIX", "j")
	for _, cmd := range []string{"MSET k2 1 j1 1 k1 1 other 1", "MSETNX k2 1 j1 1 k1 1 other 1",
		"EVAL redis.call('mset','k2',1,'j1',2,'k1',3) 0"} {
		b.do(t, strings.Fields(cmd)...)
		want := []string{invalidated("j1"), ">2\r\n" + bulk("invalidate") + array("k1", "k2")}
		if told := a.heard(t); strings.Join(told, "") != strings.Join(want, "") {
			t.Errorf("%s: told %q, want %q", cmd, told, want)
		}
		b.do(t, "FLUSHALL")
		a.heard(t)
	}
}
