package gateway

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/testutil"
)

// waitersOf are commands that wait for a key of each type, and one that makes such a key.
var waitersOf = []struct {
	write string
	waits []string
}{
	{"RPUSH k a", []string{"BLPOP k 0", "BRPOP k 0", "BLPOP none k 0", "BLMOVE k other LEFT LEFT 0",
		"BRPOPLPUSH k other 0", "BLMPOP 0 1 k LEFT"}},
	{"ZADD k 1 a", []string{"BZPOPMIN k 0", "BZPOPMAX k 0", "BZPOPMIN none k 0", "BZMPOP 0 1 k MIN"}},
	{"XADD k 1-1 f v", []string{"XREAD BLOCK 0 STREAMS k 0"}},
}

// TestWaitersOfOtherTypesLikeRedis: a client that waits for a key of one type is not in the way of those who wait for
// one of another type, who are served in the order in which they came.
func TestWaitersOfOtherTypesLikeRedis(t *testing.T) {
	theirs := startRedis(t)
	ours := serve(t, Options{Databases: []Database{{"default", newStore(t)}}})
	for i, first := range waitersOf {
		for j, second := range waitersOf {
			if i == j {
				continue
			}
			for _, a := range first.waits {
				for _, b := range second.waits {
					said := map[string]string{}
					for _, side := range [][2]string{{"tcp", ours}, {"unix", theirs}} {
						said[side[0]] = othersServed(t, side[0], side[1], first.write, a, second.write, b)
					}
					if said["tcp"] != said["unix"] {
						t.Errorf("%s behind %s:\n%q\nredis-server says\n%q", b, a, said["tcp"], said["unix"])
					}
				}
			}
		}
	}
}

// othersServed is what clients are told of whom the first waits as a says and two more as b says, when writes for b
// come, and then one for a.
func othersServed(t *testing.T, network, addr, writeA, a, writeB, b string) string {
	w := dial(t, network, addr)
	defer w.Close()
	var said strings.Builder
	do := func(cmd string) { said.WriteString(w.do(t, strings.Fields(cmd)...)) }
	do("FLUSHALL")
	var ps []*peer
	for i, cmd := range []string{a, b, b} {
		p := dial(t, network, addr)
		defer p.Close()
		p.send(t, strings.Fields(cmd))
		testutil.Until(t, "it waits", func() bool {
			return strings.Contains(w.do(t, "INFO", "clients"), fmt.Sprintf("blocked_clients:%d\r\n", i+1))
		})
		ps = append(ps, p)
	}
	do(writeB)
	said.Write(ps[1].reply(t))
	if !strings.HasPrefix(b, "XREAD") { // whose readers are all served
		do("DEL k other")
		do(writeB)
	}
	said.Write(ps[2].reply(t))
	do("DEL k other")
	do(writeA)
	said.Write(ps[0].reply(t))
	return said.String()
}

// pausedStore is a store that can hold up the step in which somebody takes an element.
type pausedStore struct {
	*clienttest.Store
	after           bool // behind the step, which has taken effect
	hold            atomic.Bool
	steps           atomic.Int64 // in which somebody took an element, or put it back
	trying, release chan struct{}
}

func (s *pausedStore) wait(ops []client.Op, after bool) {
	if k := ops[0].Kind; k == client.OpGet || k == client.OpUpdate {
		return
	}
	if !after {
		s.steps.Add(1)
	}
	if after == s.after && s.hold.CompareAndSwap(true, false) {
		s.trying <- struct{}{}
		<-s.release
	}
}

func (s *pausedStore) Do(ctx context.Context, ops []client.Op) {
	s.wait(ops, false)
	s.Store.Do(ctx, ops)
	s.wait(ops, true)
}

func (s *pausedStore) MultiCAS(ctx context.Context, ops []client.Op) error {
	s.wait(ops, false)
	err := s.Store.MultiCAS(ctx, ops)
	s.wait(ops, true)
	return err
}

// takers are commands that take what they have waited for, each behind the write that it waits for.
var takers = [][2]string{
	{"RPUSH k 1", "BLPOP k 0"},
	{"RPUSH k 1 2 3", "BRPOP k 0"},
	{"RPUSH k 1 2 3", "BLMPOP 0 1 k LEFT COUNT 2"},
	{"RPUSH k 1", "BLMOVE k other LEFT RIGHT 0"},
	{"RPUSH k 1 2 3", "BLMOVE k k LEFT RIGHT 0"},
	{"RPUSH k 1 2", "BRPOPLPUSH k other 0"},
	{"ZADD k 1 a 2 b", "BZPOPMIN k 0"},
	{"ZADD k 1 a", "BZPOPMAX k 0"},
	{"ZADD k 1 a 2 b 3 c", "BZMPOP 0 1 k MAX COUNT 2"},
	{"XADD k 1-1 f v", "XREADGROUP GROUP g me BLOCK 0 STREAMS k >"},
}

// TestTakenForWhoHasGone: what a client takes that goes at this moment stays where it was, and is had by who waits
// behind it. It may go before the step that takes the element, while that is under way, and behind it.
func TestTakenForWhoHasGone(t *testing.T) {
	for _, when := range []string{"before", "during", "behind"} {
		for _, c := range takers {
			t.Run(when+" "+c[1], func(t *testing.T) {
				store := &pausedStore{Store: clienttest.New(clienttest.Options{}), after: when == "behind",
					trying: make(chan struct{}), release: make(chan struct{})}
				addr, g := start(t, Options{Databases: []Database{{"default", store}}})
				w := dial(t, "tcp", addr)
				w.want(t, "+OK\r\n", "CONFIG", "SET", "notify-keyspace-events", "KA")
				sub := dial(t, "tcp", addr)
				sub.do(t, "SUBSCRIBE", "__keyspace@0__:k")
				heard := func() (events []string) {
					w.do(t, "PUBLISH", "__keyspace@0__:k", "end")
					for {
						f := strings.Split(string(sub.reply(t)), "\r\n")[6]
						if f == "end" {
							return events
						}
						events = append(events, f)
					}
				}
				begin := func() {
					w.want(t, "+OK\r\n", "FLUSHALL")
					if c[0][0] == 'X' {
						w.want(t, "+OK\r\n", "XGROUP", "CREATE", "k", "g", "$", "MKSTREAM")
					}
					heard()
				}
				// Without anybody who goes.
				begin()
				w.do(t, strings.Fields(c[0])...)
				want := w.do(t, strings.Fields(c[1])...)
				events := heard()
				begin()
				steps := store.steps.Load()
				p, q := dial(t, "tcp", addr), dial(t, "tcp", addr)
				for i, x := range []*peer{p, q} {
					x.send(t, strings.Fields(c[1]))
					blocked(t, g, int64(i+1))
				}
				var c0 *conn
				testutil.Until(t, "they wait", func() bool {
					var first *waiter
					g.waits.mu.Lock()
					if k := g.waits.mu.keys[stagedName{DB: 0, Name: "k"}]; k != nil && len(k.lines[0].queue) == 2 {
						// A client that finds something at its first look is not asked whether it is still there.
						if two := k.lines[0].queue; two[0].rest.Load() && two[1].rest.Load() {
							first = two[0]
						}
					}
					g.waits.mu.Unlock()
					g.each(func(c *conn) {
						if first != nil && c.blocked.Load() == first {
							c0 = c
						}
					})
					return c0 != nil
				})
				gone := func() {
					p.Close()
					testutil.Until(t, "it has gone", func() bool { return c0.link.PeerGone() })
				}
				if when == "before" {
					// The look at the key is held up, since the client that waits is woken by its end, too.
					held := make(chan struct{})
					var reads atomic.Int64
					store.Fail(func(ctx context.Context, o *client.Op) clienttest.Fault {
						if o.Kind == client.OpGet && inside.MemoryLimit(ctx) != pollLimit && reads.Add(1) == 1 {
							store.trying <- struct{}{}
							<-held
						}
						return clienttest.Fault{}
					})
					w.do(t, strings.Fields(c[0])...)
					<-store.trying
					gone()
					close(held)
				} else {
					store.hold.Store(true)
					w.do(t, strings.Fields(c[0])...)
					<-store.trying
					gone()
					store.release <- struct{}{}
				}
				testutil.Until(t, "it waits no longer", func() bool { return c0.blocked.Load() == nil })
				if n := store.steps.Load() - steps; when != "before" && n < 2 {
					t.Fatal("what it took was not put back")
				}
				q.answers(t, want)
				blocked(t, g, 0)
				wantSteps := int64(1) // who has gone already takes nothing
				if when != "before" {
					wantSteps = 3
				}
				if n := store.steps.Load() - steps; n != wantSteps {
					t.Errorf("%d steps, want %d", n, wantSteps)
				}
				if got := heard(); !slices.Equal(got, events) {
					t.Errorf("events %q, want %q", got, events)
				}
			})
		}
	}
}

// TestWatchOfAbsentKeysLikeRedis: EXEC does nothing if a key that was absent when it was watched has been made
// meanwhile, though it is absent again.
func TestWatchOfAbsentKeysLikeRedis(t *testing.T) {
	theirs := startRedis(t)
	ours := serve(t, Options{Databases: fake()})
	for _, line := range strings.Split(strings.TrimSpace(absentTalk), "\n") {
		for _, queue := range []string{"SET k 2", "GET k", "SET k 2|SET other 1", "GET other|GET k", ""} {
			said := map[string]string{}
			for _, side := range [][2]string{{"tcp", ours}, {"unix", theirs}} {
				a, b := dial(t, side[0], side[1]), dial(t, side[0], side[1])
				a.do(t, "FLUSHALL")
				a.do(t, "SET", "there", "1")
				a.do(t, "RPUSH", "list", "1")
				var out strings.Builder
				for cmd := range strings.SplitSeq("a: WATCH before k|"+line, "|") {
					p := b
					name, cmd, _ := strings.Cut(cmd, ": ")
					if name == "a" {
						p = a
					}
					var batch [][]string
					for one := range strings.SplitSeq(cmd, ";") { // in one step
						batch = append(batch, strings.Fields(one))
					}
					p.send(t, batch...)
					for range batch {
						out.Write(p.reply(t))
					}
				}
				out.WriteString(a.do(t, "MULTI"))
				for cmd := range strings.SplitSeq(queue, "|") {
					if cmd != "" {
						out.WriteString(a.do(t, strings.Fields(cmd)...))
					}
				}
				out.WriteString(a.do(t, "EXEC"))
				out.WriteString(b.do(t, "GET", "k"))
				a.Close()
				b.Close()
				said[side[0]] = out.String()
			}
			if said["tcp"] != said["unix"] {
				t.Errorf("%s, then %q:\n%q\nredis-server says\n%q", line, queue, said["tcp"], said["unix"])
			}
		}
	}
}

const absentTalk = `
b: SET k 1|a: GET k|b: DEL k
b: SET k 1|b: DEL k
b: SET k 1;DEL k
b: DEL k
b: GET k
a: SET k 1|a: DEL k
a: SET k 1;DEL k
b: SET k 1 NX|b: GETDEL k
b: SETNX k 1|b: UNLINK k
b: MSET k 1 l 2|b: DEL k
b: MSETNX k 1 l 2|b: DEL k l
b: SETEX k 100 1|b: DEL k
b: APPEND k x|b: DEL k
b: INCR k|b: DEL k
b: SETBIT k 1 1|b: DEL k
b: HSET k f v|b: HDEL k f
b: RPUSH k 1|b: LPOP k
b: RPUSH k 1|b: LTRIM k 5 6
b: SADD k 1|b: SPOP k
b: ZADD k 1 a|b: ZREM k a
b: XADD k 1-1 f v|b: DEL k
b: PFADD k a|b: DEL k
b: RENAME there k|b: RENAME k there
b: COPY there k|b: DEL k
b: RPOPLPUSH list k|b: RPOPLPUSH k list
b: SORT list STORE k|b: DEL k
b: BLMOVE list k LEFT LEFT 0|b: BLPOP k 0
b: MULTI|b: SET k 1|b: SET m 1|b: EXEC|b: DEL k
b: MULTI|b: SET k 1|b: DEL k|b: EXEC
b: EVAL redis.call('set',KEYS[1],1)return(redis.call('del',KEYS[1])) 1 k
b: EVAL redis.call('set',KEYS[1],1) 1 k|b: DEL k
b: EVAL redis.call('set',KEYS[1],1)redis.call('set','l',1) 1 k|b: DEL k
b: LPUSHX k 1
b: SET k 1 XX
b: SADD k 1|b: FLUSHALL
b: SELECT 1|b: SET k 1|b: DEL k|b: SELECT 0
b: SELECT 1|b: SET k 1|b: MOVE k 0|b: SELECT 0|b: DEL k
b: SET k 1|a: UNWATCH|b: DEL k
b: SET k 1|b: DEL k|a: UNWATCH|a: WATCH k
b: SET k 1|b: DEL k|a: WATCH k
b: SET k 1|b: DEL k|a: MULTI|a: DISCARD|a: WATCH k
b: SET k 1|b: DEL k|a: MULTI|a: EXEC
`

// TestWatchedKeysSeen: a watched key that was made past the gateway and is gone again has changed for whoever has seen
// it.
func TestWatchedKeysSeen(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr, g := start(t, Options{Databases: []Database{{"cache", db}}})
	p := dial(t, "tcp", addr)
	for _, long := range []bool{false, true} {
		value := []byte("1")
		if long {
			value = bytes.Repeat(value, 300_000)
		}
		for _, look := range []string{
			"GET k", "EXISTS k", "TYPE k", "TTL k", "STRLEN k", "SETNX k 2", "SET k 2 NX", "SET k 2 NX GET",
			"LPUSH k 1", "MGET other k", "MSETNX k 1 other 2",
			"SINTERCARD 2 other k", "EVAL return(redis.call('strlen',KEYS[1])) 1 k",
			"EVAL redis.call('mget','k','other') 0", "GET other;GET k;EXISTS other",
		} {
			p.want(t, "+OK\r\n", "WATCH", "k")
			if _, err := db.Put(t.Context(), []byte("k"), value, client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			var batch [][]string
			for one := range strings.SplitSeq(look, ";") {
				batch = append(batch, strings.Fields(one))
			}
			p.send(t, batch...)
			for range batch {
				p.reply(t)
			}
			if err := db.Delete(t.Context(), []byte("k")); err != nil {
				t.Fatal(err)
			}
			if got := p.perform(t, "EXEC SET other 1"); got != "*-1\r\n" {
				t.Errorf("%s: EXEC replied %.50q", look, got)
			}
		}
	}
	p.want(t, "+OK\r\n", "WATCH", "k", "l")
	p.Close()
	testutil.Until(t, "nothing is left of it", func() bool { return !g.watchers.any() })
	if len(g.watchers.mu.keys) > 0 {
		t.Error("a key is watched by nobody")
	}
}
