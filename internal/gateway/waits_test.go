package gateway

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
)

// waitersOf are commands that wait for a key of each type, and one that makes such a key.
var waitersOf = []struct {
	write string
	waits []string
}{
	{"RPUSH k a", []string{"BLPOP k 0", "BRPOP k 0", "BLPOP none k 0", "BLMOVE k other LEFT LEFT 0", "BRPOPLPUSH k other 0", "BLMPOP 0 1 k LEFT"}},
	{"ZADD k 1 a", []string{"BZPOPMIN k 0", "BZPOPMAX k 0", "BZPOPMIN none k 0", "BZMPOP 0 1 k MIN"}},
	{"XADD k 1-1 f v", []string{"XREAD BLOCK 0 STREAMS k 0"}},
}

// TestWaitersOfOtherTypesLikeRedis: a client that waits for a key of one type is not in the way of those who wait for one of another type,
// who are served in the order in which they came.
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

// othersServed is what clients are told of whom the first waits as a says and two more as b says, when writes for b come, and then one for a.
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
		eventually(t, "it waits", func() bool {
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
	trying, release chan struct{}
}

func (s *pausedStore) wait(ops []client.Op, after bool) {
	for i := range ops {
		if k := ops[i].Kind; k != client.OpGet && k != client.OpUpdate && after == s.after && s.hold.CompareAndSwap(true, false) {
			s.trying <- struct{}{}
			<-s.release
		}
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

// TestTakenForWhoHasGone: what a client takes that goes at this moment stays where it was, and is had by who waits behind it. It may go before
// the step that takes the element, while that is under way, and behind it.
func TestTakenForWhoHasGone(t *testing.T) {
	for _, when := range []string{"before", "during", "behind"} {
		for _, c := range takers {
			t.Run(when+" "+c[1], func(t *testing.T) {
				store := &pausedStore{Store: clienttest.New(clienttest.Options{}), after: when == "behind", trying: make(chan struct{}), release: make(chan struct{})}
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
				p, q := dial(t, "tcp", addr), dial(t, "tcp", addr)
				for i, x := range []*peer{p, q} {
					x.send(t, strings.Fields(c[1]))
					blocked(t, g, int64(i+1))
				}
				var c0 *conn
				eventually(t, "they wait", func() bool {
					var first *waiter
					g.waits.mu.Lock()
					if k := g.waits.mu.keys[stagedName{0, "k"}]; k != nil && len(k.lines[0].queue) == 2 {
						first = k.lines[0].queue[0]
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
					eventually(t, "it has gone", func() bool { return c0.link.PeerGone() })
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
				q.answers(t, want)
				blocked(t, g, 0)
				if got := heard(); !slices.Equal(got, events) {
					t.Errorf("events %q, want %q", got, events)
				}
			})
		}
	}
}
