package gateway

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestTrackingOlderReaders: when one client reads another version than others have read, all of them are told, before
// any look at versions.
func TestTrackingOlderReaders(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr := serve(t, Options{Databases: []Database{{"cache", db}}, TrackingCheck: time.Hour})
	put := func(v string) {
		t.Helper()
		if _, err := db.Put(t.Context(), []byte("k"), []byte(v), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	put("old")
	var ps []*peer
	for range 4 {
		p := dial(t, "tcp", addr)
		p.do(t, "HELLO", "3")
		p.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
		ps = append(ps, p)
	}
	for _, p := range ps[:3] {
		p.want(t, bulk("old"), "GET", "k")
	}
	put("new") // past the gateway
	ps[3].want(t, bulk("new"), "GET", "k")
	for _, p := range ps[:3] {
		p.send(t, []string{"PING"}) // what it hears comes before
		if got := string(p.reply(t)); got != invalidated("k") {
			t.Fatalf("a reader of the older version heard %q", got)
		}
		p.answers(t, "+PONG\r\n")
	}
}

// TestTrackingOfDatabases: a client is told of what it has read whichever database it has chosen.
func TestTrackingOfDatabases(t *testing.T) {
	addr := serve(t, Options{Databases: fake(), TrackingCheck: time.Hour})
	a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	for _, db := range []string{"1", "0", "1"} {
		a.want(t, "+OK\r\n", "SELECT", db)
		b.want(t, "+OK\r\n", "SELECT", db)
		a.do(t, "GET", "k")
		b.want(t, "+OK\r\n", "SET", "k", db)
		a.send(t, []string{"PING"}) // what it hears comes before
		if got := string(a.reply(t)); got != invalidated("k") {
			t.Fatalf("database %s: heard %q", db, got)
		}
		a.answers(t, "+PONG\r\n")
	}
}

// TestWakePassedOn: a client that leaves just when it was woken leaves that to whoever is behind it.
func TestWakePassedOn(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	dial(t, "tcp", addr).want(t, "+PONG\r\n", "PING") // it serves
	s, b := &g.waits, &values.Blocking{Names: [][]byte{[]byte("k")}}
	first, second, third := s.enterQueues(0, b), s.enterQueues(0, b), s.enterQueues(0, b)
	s.leaveQueues(second, false)
	if len(third.wake) > 0 {
		t.Fatal("a client was woken for nothing")
	}
	s.wake(0, "k")
	s.leaveQueues(first, false) // its time was over
	if len(third.wake) != 1 {
		t.Error("the wake of a client that left is lost")
	}
	s.leaveQueues(third, false)
	if s.any() || len(s.mu.keys) > 0 {
		t.Error("somebody waits still")
	}
}

// TestWakePassedOnByAnEnding: a client that is woken and told to stop at the same moment leaves the wake to whoever is
// behind it.
func TestWakePassedOnByAnEnding(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	gate := make(chan chan struct{}, 1) // holds what is closed when lookups go on
	open := make(chan struct{})
	close(open)
	gate <- open
	store.Fail(func(context.Context, *client.Op) clienttest.Fault {
		held := <-gate
		gate <- held
		<-held
		return clienttest.Fault{}
	})
	addr, g := start(t, Options{Databases: []Database{{"default", store}}})
	p := dial(t, "tcp", addr)
	for range 20 { // of a wake and an ending any one may be seen first
		held := make(chan struct{})
		<-gate
		gate <- held
		p.send(t, []string{"BLPOP", "k", "0"})
		blocked(t, g, 1)
		var x *waiter
		testutil.Until(t, "it has a queue", func() bool {
			g.waits.mu.Lock()
			defer g.waits.mu.Unlock()
			if k := g.waits.mu.keys[stagedName{DB: 0, Name: "k"}]; k != nil {
				x = k.lines[0].queue[0]
			}
			return x != nil
		})
		behind := g.waits.enterQueues(0, &values.Blocking{Names: [][]byte{[]byte("k")}, Line: "list"})
		g.waits.wake(0, "k")
		x.stop(endTimeout)
		close(held)
		p.answers(t, "*-1\r\n")
		blocked(t, g, 1)
		if len(behind.wake) != 1 {
			t.Fatal("the wake of a client that was told to stop is lost")
		}
		g.waits.leaveQueues(behind, false)
	}
}

// TestPollSoonForWhoeverComes: a key that was looked up seldom is looked up soon for a client that begins to wait for
// it.
func TestPollSoonForWhoeverComes(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	dial(t, "tcp", addr).want(t, "+PONG\r\n", "PING") // it serves
	s, b := &g.waits, &values.Blocking{Names: [][]byte{[]byte("k")}}
	s.mu.polling = true // by nobody
	x := s.enterQueues(0, b)
	k := x.keys[0]
	k.pause, k.next = maxPollPause, time.Now().Add(time.Hour)
	if len(s.early) != 1 {
		t.Fatal("the poller is not told of the first")
	}
	<-s.early
	y := s.enterQueues(0, b)
	if k.pause != minPollPause || k.next.After(time.Now().Add(minPollPause)) || len(s.early) != 1 {
		t.Errorf("pause %v, next in %v, the poller is told %d times", k.pause, time.Until(k.next), len(s.early))
	}
	s.leaveQueues(x, false)
	s.leaveQueues(y, false)
}

// TestStreamWentMeanwhile: a stream that went between a reader's first try and the first look of the poll counts as
// changed.
func TestStreamWentMeanwhile(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	dial(t, "tcp", addr).want(t, "+PONG\r\n", "PING") // it serves
	s := &g.waits
	for _, reads := range []bool{true, false} {
		x := s.enterQueues(0, &values.Blocking{Names: [][]byte{[]byte("s")}, Reads: reads, Line: "group g"})
		s.found(x.keys, []client.Op{{Err: client.ErrNotFound}})
		if woken := len(x.wake) > 0; woken != reads {
			t.Errorf("reads %v: woken %v", reads, woken)
		}
		s.leaveQueues(x, false)
	}
}

// TestWatchOfDeletedKeys: EXEC does nothing if any of several watched keys has been deleted, made, or deleted and made
// again.
func TestWatchOfDeletedKeys(t *testing.T) {
	p, other := (*peer)(nil), (*peer)(nil)
	for _, change := range [][]string{{"DEL", "b"}, {"DEL", "a"}, {"SET", "c", "1"}, {"DEL", "c"}} {
		_, p, other = severalStore(t, severalCase{keys: "SET a 1; SET b 1; SET d 1"})
		p.want(t, "+OK\r\n", "WATCH", "a", "b", "c")
		other.do(t, change...)
		want := "*-1\r\n"
		if change[1] == "c" && change[0] == "DEL" { // it was not there
			want = "*2\r\n+OK\r\n+OK\r\n"
		}
		if got := p.perform(t, "EXEC SET d 2;SET e 2"); got != want {
			t.Errorf("%v: replied %q, want %q", change, got, want)
		}
	}
}

// heard is what a client with tracking is told until all that it has sent before is answered.
func (p *peer) heard(t *testing.T, cmds ...[]string) (told []string) {
	t.Helper()
	p.send(t, append(cmds, []string{"PING"})...)
	p.send(t, []string{"ECHO", "end"}) // what is told of a batch comes behind it
	for {
		switch got := string(p.reply(t)); {
		case got == bulk("end"):
			return told
		case strings.HasPrefix(got, ">"):
			told = append(told, got)
		}
	}
}

// TestTrackingOwnWrites: a client that reads a key behind its own write, in one step, caches it: with NOLOOP it hears
// of the next write of somebody else, through a gateway or past all of them, and of nothing else.
func TestTrackingOwnWrites(t *testing.T) {
	for name, db := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		t.Run(name, func(t *testing.T) { trackingOwnWrites(t, db) })
	}
}

func trackingOwnWrites(t *testing.T, db client.API) {
	addr, g := start(t, Options{Databases: []Database{{"cache", db}}, TrackingCheck: time.Hour})
	set := func(cmd string) (c [][]string) {
		for part := range strings.SplitSeq(cmd, "|") {
			c = append(c, strings.Fields(part))
		}
		return c
	}
	for _, cmds := range []string{
		"SET k 1|GET k", "DEL k|SETNX k 1|GET k", "INCR n|GET k|SET k 2|GET k", "GETSET k 1|GET k",
		"APPEND k 1|STRLEN k", "DEL k|INCR k|GET k",
		"MULTI|SET k 1|GET k|EXEC", "MULTI|SET k 1|SET j 1|GET k|EXEC", "MULTI|MSET k 1 j 2|MGET j k|EXEC",
		"MULTI|DEL k|SET j 1|GET k|EXEC",
		"EVAL redis.call('set','j','1')redis.call('set',KEYS[1],'1')return(redis.call('get',KEYS[1])) 1 k",
	} {
		for _, past := range []bool{false, true} {
			a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
			b.do(t, "DEL", "j", "n")
			b.do(t, "SET", "k", "0")
			a.do(t, "HELLO", "3")
			a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON", "NOLOOP")
			if told := a.heard(t, set(cmds)...); len(told) > 0 {
				t.Errorf("%s: told of its own: %q", cmds, told)
			}
			g.checkVersions(g.tracked.Names())
			if told := a.heard(t); len(told) > 0 {
				t.Errorf("%s: a look at versions told %q", cmds, told)
			}
			if !past {
				b.do(t, "SET", "k", "9")
			} else if _, err := db.Put(t.Context(), []byte("k"), []byte("9"), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			g.checkVersions(g.tracked.Names())
			if told := a.heard(t); !slices.Contains(told, invalidated("k")) {
				t.Errorf("%s, written past the gateways %t: told %q, want %q", cmds, past, told, invalidated("k"))
			}
			a.Close()
			testutil.Until(t, "it has gone", func() bool { return !g.tracks() })
		}
	}
}

// TestTrackingUnwritten: a client that has read a key together with a write that changed nothing hears that the key has
// gone.
func TestTrackingUnwritten(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr, g := start(t, Options{Databases: []Database{{"cache", db}}, TrackingCheck: time.Hour})
	a := dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "SET", "k", "1")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	a.send(t, []string{"GET", "k"}, []string{"SETNX", "k", "2"})
	a.answers(t, bulk("1"))
	a.answers(t, ":0\r\n")
	if err := db.Delete(t.Context(), []byte("k")); err != nil { // past the gateway
		t.Fatal(err)
	}
	g.checkVersions(g.tracked.Names())
	if told := a.heard(t); !slices.Equal(told, []string{invalidated("k")}) {
		t.Errorf("told %q, want %q", told, invalidated("k"))
	}
}
