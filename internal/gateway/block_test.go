package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/testutil"
)

// blocked waits until so many clients wait.
func blocked(t testing.TB, g *Gateway, n int64) {
	t.Helper()
	testutil.Until(t, fmt.Sprint(n, " clients wait"), func() bool { return g.waits.clients.Load() == n })
}

func (p *peer) answers(t testing.TB, want string) {
	t.Helper()
	if got := string(p.reply(t)); got != want {
		t.Errorf("got %.300q, want %.300q", got, want)
	}
}

// TestBlockedAreServedInTurn: a push serves who came first, one for each element, and a push of several serves as many.
func TestBlockedAreServedInTurn(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	w := dial(t, "tcp", addr)
	var ps []*peer
	for i := range 6 {
		p := dial(t, "tcp", addr)
		p.send(t, []string{"BLPOP", "k", "0"})
		blocked(t, g, int64(i+1))
		ps = append(ps, p)
	}
	w.want(t, ":1\r\n", "RPUSH", "k", "0")
	ps[0].answers(t, array("k", "0"))
	w.want(t, ":3\r\n", "RPUSH", "k", "1", "2", "3")
	for i, p := range ps[1:4] {
		p.answers(t, array("k", fmt.Sprint(i+1)))
	}
	blocked(t, g, 2)
	w.want(t, ":0\r\n", "LLEN", "k")
	// A client that goes away is in nobody's way.
	ps[4].Close()
	blocked(t, g, 1)
	w.want(t, "+OK\r\n", "MULTI")
	w.want(t, "+QUEUED\r\n", "RPUSH", "k", "5")
	w.want(t, "*1\r\n:1\r\n", "EXEC")
	ps[5].answers(t, array("k", "5"))
	blocked(t, g, 0)
}

// TestBlockedByOthers: what is written through another gateway, or by the library, is found by a poll.
func TestBlockedByOthers(t *testing.T) {
	store := newStore(t)
	a, ga := start(t, Options{Databases: []Database{{"default", store}}})
	b, _ := start(t, Options{Databases: []Database{{"default", store}}})
	w := dial(t, "tcp", b)
	var ps []*peer
	for i := range 3 {
		p := dial(t, "tcp", a)
		p.send(t, []string{"BRPOP", "k", "0"})
		blocked(t, ga, int64(i+1))
		ps = append(ps, p)
	}
	for i, p := range ps {
		if i == 1 { // text is none, and then it is a list
			w.want(t, "+OK\r\n", "SET", "k", strings.Repeat("text", 1000))
			w.want(t, ":1\r\n", "DEL", "k")
		}
		w.want(t, ":1\r\n", "RPUSH", "k", fmt.Sprint(i))
		p.answers(t, array("k", fmt.Sprint(i)))
	}
}

// counts is a store that counts lookups of a key.
type counts struct {
	client.API
	of      string
	lookups atomic.Int64
}

func (c *counts) Do(ctx context.Context, ops []client.Op) {
	for i := range ops {
		if ops[i].Kind == client.OpGet && string(ops[i].Key) == c.of {
			c.lookups.Add(1)
		}
	}
	c.API.Do(ctx, ops)
}

// TestManyWaitersShareAPoll: those who wait for one key cost no more lookups than one does.
func TestManyWaitersShareAPoll(t *testing.T) {
	store := &counts{API: clienttest.New(clienttest.Options{}), of: "k"}
	addr, g := start(t, Options{Databases: []Database{{"default", store}}})
	const clients = 50
	began := time.Now()
	for i := range clients {
		dial(t, "tcp", addr).send(t, []string{"BLPOP", "k", "0"})
		blocked(t, g, int64(i+1))
	}
	before := store.lookups.Load()
	testutil.Until(t, "some polls", func() bool { return store.lookups.Load() >= before+5 })
	// 5, 10, 20, 40, 80 and then 100 ms apart, from the last one on who came; the first tried itself.
	most := 1 + 10 + int64(time.Since(began)/minPollPause)
	if n := store.lookups.Load(); n > most {
		t.Errorf("%d lookups for %d clients, want at most %d in %v", n, clients, most, time.Since(began))
	}
	g.waits.mu.Lock()
	k := g.waits.mu.keys[stagedName{DB: 0, Name: "k"}]
	g.waits.mu.Unlock()
	testutil.Until(t, "the polls are far apart", func() bool {
		g.waits.mu.Lock()
		defer g.waits.mu.Unlock()
		return k.pause == maxPollPause
	})
	g.each(func(c *conn) { c.link.Kill() })
	blocked(t, g, 0)
	testutil.Until(t, "the poll ends", func() bool {
		g.waits.mu.Lock()
		defer g.waits.mu.Unlock()
		return !g.waits.mu.polling && len(g.waits.mu.keys) == 0
	})
}

// TestPollIsNotPutOff: clients that come more often than every 5 ms do not put off the poll that the first of them
// waits for.
func TestPollIsNotPutOff(t *testing.T) {
	_, g := start(t, Options{Databases: fake()})
	names := [][]byte{[]byte("k")}
	first := g.waits.enterQueues(0, &values.Blocking{Names: names})
	defer g.waits.leaveQueues(first, false)
	due := func() time.Time {
		g.waits.mu.Lock()
		defer g.waits.mu.Unlock()
		return first.keys[0].next
	}
	polls := 0
	for before := due(); polls < 3; {
		g.waits.leaveQueues(g.waits.enterQueues(0, &values.Blocking{Names: names}), false)
		now := due()
		if now.After(before) {
			if before.After(time.Now()) {
				t.Fatalf("the poll is later by %v", now.Sub(before))
			}
			polls++
		}
		before = now
	}
}

// TestUnblocked: everything that ends a wait but an element.
func TestUnblocked(t *testing.T) {
	addr, g := start(t, Options{Databases: fake(), IdleTimeout: time.Second})
	w, p := dial(t, "tcp", addr), dial(t, "tcp", addr)
	var id int
	fmt.Sscanf(p.do(t, "CLIENT", "ID"), ":%d", &id)
	me := fmt.Sprint(id)
	wait := func(cmd ...string) {
		t.Helper()
		p.send(t, cmd)
		blocked(t, g, 1)
		if list := w.do(t, "CLIENT", "LIST", "ID", me); !strings.Contains(list, " flags=b ") ||
			!strings.Contains(list, " cmd="+strings.ToLower(cmd[0])) {
			t.Errorf("CLIENT LIST: %q", list)
		}
		if info := w.do(t, "INFO", "clients"); !strings.Contains(info, "blocked_clients:1\r\n") {
			t.Errorf("INFO: %q", info)
		}
	}
	wait("BLPOP", "a", "b", "0")
	w.want(t, ":1\r\n", "CLIENT", "UNBLOCK", me)
	p.answers(t, "*-1\r\n")
	w.want(t, ":0\r\n", "CLIENT", "UNBLOCK", me)
	wait("BLMOVE", "a", "b", "LEFT", "LEFT", "0")
	w.want(t, ":1\r\n", "CLIENT", "UNBLOCK", me, "error")
	p.answers(t, "-UNBLOCKED client unblocked via CLIENT UNBLOCK\r\n")
	w.want(t, ":0\r\n", "CLIENT", "UNBLOCK", "999999", "timeout")
	w.want(t, "-ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR\r\n", "CLIENT", "UNBLOCK", me, "never")
	w.want(t, "-ERR value is not an integer or out of range\r\n", "CLIENT", "UNBLOCK", "me")

	// A timeout, longer than the idle timeout, which is for those who do not wait; the replies before it do not wait
	// for it.
	began := time.Now()
	p.send(t, []string{"PING"}, []string{"BLMPOP", "1.3", "1", "a", "LEFT"}, []string{"ECHO", "behind"})
	p.answers(t, "+PONG\r\n")
	blocked(t, g, 1)
	p.answers(t, "*-1\r\n")
	if took := time.Since(began); took < 1300*time.Millisecond {
		t.Errorf("1.3 s were %v", took)
	}
	p.answers(t, bulk("behind"))
	p.want(t, "+PONG\r\n", "PING")
	q, w := dial(t, "tcp", addr), dial(t, "tcp", addr)
	q.send(t, []string{"BLPOP", "a", "0"})
	blocked(t, g, 1)
	w.want(t, ":1\r\n", "CLIENT", "KILL", "ADDR", q.LocalAddr().String())
	q.closed(t)
	blocked(t, g, 0)
}

// TestBlockedPeerGoes: a client that closes its connection waits no longer, although something that it has sent is
// unread, and with TLS too; and a client that stays gets what it waits for.
func TestBlockedPeerGoes(t *testing.T) {
	a := identitytest.New(t)
	for name, conf := range map[string]*tls.Config{"in clear": nil, "TLS": a.Config(a.Leaf())} {
		t.Run(name, func(t *testing.T) {
			g, err := New(Options{Databases: fake()})
			if err != nil {
				t.Fatal(err)
			}
			l := testutil.Listen(t)
			if conf != nil {
				l = tls.NewListener(l, conf)
			}
			served := make(chan error, 1)
			go func() { served <- g.Serve(l) }()
			open := func() *peer {
				p := dial(t, "tcp", l.Addr().String())
				if conf == nil {
					return p
				}
				client := conf.Clone()
				client.ServerName = "localhost"
				c := tls.Client(p.Conn, client)
				return &peer{c, bufio.NewReader(c)}
			}
			p, q := open(), open()
			p.send(t, []string{"BLPOP", "k", "0"})
			blocked(t, g, 1)
			q.send(t, []string{"BLPOP", "k", "0"})
			blocked(t, g, 2)
			p.send(t, []string{"SET", "never", "1"})
			p.Close()
			blocked(t, g, 1)
			q.send(t, []string{"EXISTS", "never"}) // half of it is unread while it waits, all of it is performed behind
			w := open()
			w.want(t, ":1\r\n", "RPUSH", "k", "1")
			q.answers(t, array("k", "1"))
			q.answers(t, ":0\r\n")
			q.want(t, "+PONG\r\n", "PING")
			g.Close()
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDrainUnblocks: a gateway that stops tells those who wait, and ends their connections; Close does not wait for
// them.
func TestDrainUnblocks(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	p := dial(t, "tcp", addr)
	p.send(t, []string{"BLPOP", "k", "0"})
	blocked(t, g, 1)
	drained := make(chan struct{})
	go func() { defer close(drained); g.Drain(t.Context()) }()
	p.answers(t, "-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)\r\n")
	p.closed(t)
	<-drained
	q := dial(t, "tcp", addr)
	q.send(t, []string{"BLPOP", "k", "0"})
	blocked(t, g, 1)
	g.Close()
	q.closed(t)
}

// TestUnblockAfterAll: CLIENT UNBLOCK of a client that is being served at the moment waits for the outcome, and tells
// it.
func TestUnblockAfterAll(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	var hold atomic.Bool
	trying, release := make(chan struct{}), make(chan struct{})
	store.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		if o.Kind == client.OpDelete && hold.CompareAndSwap(true, false) {
			close(trying)
			<-release
		}
		return clienttest.Fault{}
	})
	addr, g := start(t, Options{Databases: []Database{{"default", store}}})
	p, w := dial(t, "tcp", addr), dial(t, "tcp", addr)
	var id int
	fmt.Sscanf(p.do(t, "CLIENT", "ID"), ":%d", &id)
	p.send(t, []string{"BLPOP", "k", "0"})
	blocked(t, g, 1)
	hold.Store(true)
	w.want(t, ":1\r\n", "RPUSH", "k", "1")
	<-trying
	w.send(t, []string{"CLIENT", "UNBLOCK", fmt.Sprint(id)})
	close(release)
	w.answers(t, ":0\r\n")
	p.answers(t, array("k", "1"))
}

// TestBlockedHearOfFailure: a store that fails ends a wait with its error, instead of letting a client wait for
// nothing.
func TestBlockedHearOfFailure(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	var broken atomic.Bool
	store.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		if broken.Load() && bytes.Equal(o.Key, []byte("k")) {
			return clienttest.Fault{Err: client.ErrUnavailable}
		}
		return clienttest.Fault{}
	})
	addr, g := start(t, Options{Databases: []Database{{"default", store}}})
	p := dial(t, "tcp", addr)
	p.send(t, []string{"BLPOP", "k", "0"})
	blocked(t, g, 1)
	broken.Store(true)
	if got := string(p.reply(t)); !strings.HasPrefix(got, "-LOADING kvd: ") {
		t.Errorf("%q", got)
	}
}

// TestBlockedLikeRedis: clients of both wait and are served in the same order, with the same replies.
func TestBlockedLikeRedis(t *testing.T) {
	type side struct{ network, addr string }
	theirs := side{"unix", startRedis(t)}
	ours := side{"tcp", serve(t, Options{Databases: []Database{{"default", newStore(t)}}})}
	said := map[side][]string{}
	for _, s := range []side{ours, theirs} {
		w := dial(t, s.network, s.addr)
		waiting := 0
		say := func(p *peer) { said[s] = append(said[s], string(p.reply(t))) }
		wait := func(cmd string) *peer {
			p := dial(t, s.network, s.addr)
			p.send(t, []string{"HELLO", fmt.Sprint(2 + len(said[s])%2)})
			p.reply(t)
			p.send(t, strings.Fields(cmd))
			waiting++
			testutil.Until(t, "it waits", func() bool {
				return strings.Contains(w.do(t, "INFO", "clients"), fmt.Sprintf("blocked_clients:%d\r\n", waiting))
			})
			return p
		}
		do := func(cmd string) {
			said[s] = append(said[s], w.do(t, strings.Fields(cmd)...))
		}
		get := func(ps ...*peer) {
			for _, p := range ps {
				say(p)
			}
			waiting -= len(ps)
			testutil.Until(t, "they do not wait", func() bool {
				return strings.Contains(w.do(t, "INFO", "clients"), fmt.Sprintf("blocked_clients:%d\r\n", waiting))
			})
		}
		a, b, c := wait("BLPOP k 0"), wait("BRPOP k 0"), wait("BLMPOP 0 1 k RIGHT COUNT 2")
		do("RPUSH k 1 2 3 4 5")
		get(a, b, c)
		do("LRANGE k 0 -1")
		do("DEL k")
		a, b = wait("BLMOVE k k LEFT RIGHT 0"), wait("BLPOP k 0")
		do("LPUSH k x")
		get(a, b)
		// A text comes and goes.
		a = wait("BLPOP k 0")
		do("SET k text")
		do("DEL k")
		do("MULTI")
		do("RPUSH k 1")
		do("RPUSH k 2")
		do("EXEC")
		get(a)
		do("LRANGE k 0 -1")
		do("DEL k")
		a = wait("BRPOPLPUSH k k 0.2")
		get(a)
		a = wait("BLMPOP 0.2 1 k LEFT")
		get(a)
		// Readers of a stream are all served; a client that pops from the same key goes on waiting.
		d := wait("BLPOP s 0")
		a, b, c = wait("XREAD BLOCK 0 STREAMS s $"), wait("XREAD BLOCK 0 STREAMS none s 0 0"),
			wait("XREAD COUNT 1 BLOCK 0 STREAMS s 5-5")
		do("XADD s 1-1 f v")
		get(a, b)
		do("XREAD BLOCK 0 STREAMS s 0") // who waits is not in the way
		do("XADD s 6-1 f v")
		get(c)
		do("XGROUP CREATE s g $")
		do("XGROUP CREATE s h 0")
		a = wait("XREADGROUP GROUP g alice BLOCK 0 STREAMS s >")
		do("XREADGROUP GROUP h bob BLOCK 0 STREAMS s >")
		do("XREADGROUP GROUP g alice BLOCK 0 STREAMS s 0")
		do("XADD s 7-1 f v")
		get(a)
		do("XINFO GROUPS s")
		a, b = wait("XREADGROUP GROUP g alice BLOCK 0 NOACK STREAMS s >"),
			wait("XREADGROUP GROUP g bob BLOCK 0 STREAMS s >")
		do("XADD s 8-1 f v")
		get(a)
		do("XADD s 8-2 f v")
		get(b)
		do("XPENDING s g")
		a = wait("XREADGROUP GROUP g alice BLOCK 0 STREAMS s >")
		do("XGROUP DESTROY s g")
		get(a)
		a = wait("XREAD BLOCK 200 STREAMS s $")
		get(a)
		do("XREADGROUP GROUP h alice STREAMS s >")
		a, b = wait("XREADGROUP GROUP h alice BLOCK 0 STREAMS s >"), wait("XREAD BLOCK 0 STREAMS s 9")
		do("DEL s")
		get(a)
		do("RPUSH s x")
		get(d)
		do("XADD s 10-1 f v")
		get(b)
	}
	for i, want := range said[theirs] {
		if got := said[ours][i]; got != want {
			t.Errorf("reply %d: %q, redis-server says %q", i, got, want)
		}
	}
}
