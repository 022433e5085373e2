package gateway

import (
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
)

// TestTrackingOlderReaders: when one client reads another version than others have read, all of them are told, before any look
// at versions.
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
	s, b := &g.waits, &blocking{names: [][]byte{[]byte("k")}}
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

// TestStreamWentMeanwhile: a stream that went between a reader's first try and the first look of the poll counts as changed.
func TestStreamWentMeanwhile(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	dial(t, "tcp", addr).want(t, "+PONG\r\n", "PING") // it serves
	s := &g.waits
	for _, reads := range []bool{true, false} {
		x := s.enterQueues(0, &blocking{names: [][]byte{[]byte("s")}, reads: reads, line: "group g"})
		s.found(x.keys, []client.Op{{Err: client.ErrNotFound}})
		if woken := len(x.wake) > 0; woken != reads {
			t.Errorf("reads %v: woken %v", reads, woken)
		}
		s.leaveQueues(x, false)
	}
}

// TestWatchOfDeletedKeys: EXEC does nothing if any of several watched keys has been deleted, made, or deleted and made again.
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
