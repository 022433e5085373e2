package gateway

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/peers/peerstest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// gatewaysOf starts gateways of the same databases that have met.
func gatewaysOf(t *testing.T, n int) (addrs []string, gs []*Gateway, wires []*peerstest.Wire) {
	r := peerstest.NewRoom()
	dbs := fake()
	for range n {
		w := peerstest.Listen(t)
		p := r.New(t, peers.Options{Listener: w})
		addr, g := start(t, Options{Databases: dbs, Peers: p, TrackingCheck: time.Hour})
		t.Cleanup(func() { p.Close() }) // before the gateway's
		addrs, gs, wires = append(addrs, addr), append(gs, g), append(wires, w)
	}
	meet(t, n-1, gs...)
	return addrs, gs, wires
}

func meet(t *testing.T, n int, gs ...*Gateway) {
	t.Helper()
	testutil.Until(t, "the gateways meet", func() bool {
		for _, g := range gs {
			if s := g.o.Peers.Stats(); s.Following != n || s.Followers != n {
				return false
			}
		}
		return true
	})
}

// A message that is published at any gateway comes to the subscribers of all, once, from the confirmation of their
// subscription on.
func TestMessagesAmongGateways(t *testing.T) {
	addrs, _, _ := gatewaysOf(t, 3)
	var all []*peer
	for _, addr := range addrs {
		all = append(all, dial(t, "tcp", addr))
	}
	all[0].do(t, "SUBSCRIBE", "c")
	pub := dial(t, "tcp", addrs[1])
	for i := range 100 {
		pub.want(t, ":0\r\n", "PUBLISH", "c", fmt.Sprint(i))
	}
	for i := range 100 {
		all[0].hears(t, message("c", fmt.Sprint(i)))
	}
	all[1].do(t, "PSUBSCRIBE", "*")
	all[2].do(t, "SSUBSCRIBE", "c")
	other := dial(t, "tcp", addrs[2])
	other.want(t, ":1\r\n", "SPUBLISH", "c", "shard")
	other.want(t, ":0\r\n", "PUBLISH", "c", "last")
	all[0].hears(t, message("c", "last"))
	all[1].hears(t, "*4\r\n"+bulk("pmessage")+bulk("*")+bulk("c")+bulk("last"))
	all[2].hears(t, "*3\r\n"+bulk("smessage")+bulk("c")+bulk("shard"))
}

// Events of a write through one gateway, whose setting asks for them, come to subscribers of another.
func TestEventsAmongGateways(t *testing.T) {
	addrs, _, _ := gatewaysOf(t, 2)
	sub, w := dial(t, "tcp", addrs[0]), dial(t, "tcp", addrs[1])
	sub.do(t, "SUBSCRIBE", "__keyevent@1__:set")
	w.want(t, "+OK\r\n", "CONFIG", "SET", "notify-keyspace-events", "E$")
	w.want(t, "+OK\r\n", "SELECT", "1")
	w.want(t, "+OK\r\n", "SET", "k", "v")
	sub.hears(t, message("__keyevent@1__:set", "k"))
}

// invalidated is a push that tells of a key.
func invalidated(key string) string { return ">2\r\n" + bulk("invalidate") + "*1\r\n" + bulk(key) }

const allInvalidated = ">2\r\n$10\r\ninvalidate\r\n_\r\n"

// A client that caches hears of writes through every gateway, and after a stream was cut, or a gateway has gone or
// come, that anything may have been written.
func TestTrackingAmongGateways(t *testing.T) {
	addrs, gs, wires := gatewaysOf(t, 2)
	a, w := dial(t, "tcp", addrs[0]), dial(t, "tcp", addrs[1])
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	for i := range 100 {
		k := fmt.Sprint("k", i)
		a.want(t, "_\r\n", "GET", k)
		w.want(t, "+OK\r\n", "SET", k, "1")
		a.hears(t, invalidated(k))
	}
	a.do(t, "GET", "k1")
	w.want(t, "+OK\r\n", "FLUSHALL")
	a.hears(t, allInvalidated)
	a.do(t, "GET", "k1")
	wires[1].Cut()
	a.hears(t, allInvalidated) // the stream has ended
	a.hears(t, allInvalidated) // there is another
	meet(t, 1, gs...)
	a.do(t, "GET", "k1")
	w.want(t, "+OK\r\n", "SET", "k1", "1")
	a.hears(t, invalidated("k1"))
	a.do(t, "GET", "k1")
	gs[1].o.Peers.Close()
	a.hears(t, allInvalidated)
	testutil.Until(t, "the other gateway has left nothing", func() bool {
		s := gs[0].o.Peers.Stats()
		return s.Known == 0 && s.Followers == 0 && s.Following == 0 && !gs[0].o.Peers.WantsKeys()
	})
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "OFF")
}

// A gateway whose clients want nothing is told nothing.
func TestInterestEnds(t *testing.T) {
	addrs, gs, _ := gatewaysOf(t, 2)
	a := dial(t, "tcp", addrs[0])
	a.do(t, "HELLO", "3")
	wants := func(messages, keys bool) func() bool {
		return func() bool { p := gs[1].o.Peers; return p.WantsMessages() == messages && p.WantsKeys() == keys }
	}
	for _, x := range []struct{ begin, end string }{{"SUBSCRIBE c", "UNSUBSCRIBE c"}, {"PSUBSCRIBE c", "PUNSUBSCRIBE"},
		{"SUBSCRIBE c", "RESET"}} {
		a.do(t, "HELLO", "3")
		a.do(t, strings.Fields(x.begin)...)
		if !wants(true, false)() {
			t.Errorf("%s: the other gateway has not heard", x.begin)
		}
		a.do(t, strings.Fields(x.end)...)
		testutil.Until(t, x.end, wants(false, false))
	}
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	if !wants(false, true)() {
		t.Error("CLIENT TRACKING: the other gateway has not heard")
	}
	a.do(t, "SUBSCRIBE", "c")
	a.Close()
	testutil.Until(t, "the end of a connection", wants(false, false))
}
