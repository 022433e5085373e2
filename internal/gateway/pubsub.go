package gateway

import (
	"context"
	"time"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// ear is a connection as package live knows it.
type ear struct {
	c *conn
	*netsrv.Share
}

// Output is of live.Client.
func (e ear) Output() live.Output { return &e.c.out }

// SpeaksRESP3 is of live.Client.
func (e ear) SpeaksRESP3() bool { return e.c.seenP3.Load() }

func (c *conn) stopListening() {
	if c.listener.Listens() {
		c.g.hub.Leave(&c.listener)
		c.g.tellInterest()
	}
}

// dismissListeners closes connections that are subscribed to what their user may not hear any more; self is closed
// behind its reply.
// It is called whenever rules change, by any connection's goroutine; Kill is called without the lock, which what it
// ends needs.
func (g *Gateway) dismissListeners(self *conn) {
	gone := g.hub.Denied(func(l *live.Listener) func(channel string, isPattern bool) bool {
		r := l.Client.(ear).c.user.Load().Rights()
		if r.AnyChannel() {
			return nil
		}
		return r.AllowsChannel
	})
	for _, l := range gone {
		if c := l.Client.(ear).c; c == self {
			c.closing = true
		} else {
			c.link.Kill()
		}
	}
}

// deliver gives a message to those who listen at this gateway, and returns how many these are.
func (g *Gateway) deliver(box *live.Outbox, shard bool, channel, payload []byte) int {
	n := g.hub.Deliver(box, shard, channel, payload)
	g.m.messages.Add(uint64(n))
	return n
}

// interestPatience is how long a command waits until the other gateways have heard that this one has subscribers, or
// clients that cache, since before they would not tell it anything.
const interestPatience = time.Second

// tellInterest says to the other gateways what this one wants to hear.
// The lock keeps what is told in the order in which it came to be: without it two calls could tell peers the older
// state last.
func (g *Gateway) tellInterest() {
	if g.o.Peers == nil {
		return
	}
	g.interest.Lock()
	defer g.interest.Unlock()
	g.o.Peers.Want(g.hub.Any(), g.tracked.Clients() > 0)
}

// awaitInterest is tellInterest, and waits until they have heard.
// Peers that do not answer in time are given up on: a gateway that cannot be reached must not keep clients from
// subscribing. Its messages are missed until it has heard.
func (c *conn) awaitInterest() {
	c.g.tellInterest()
	ctx, cancel := context.WithTimeout(c.g.ctx, interestPatience)
	defer cancel()
	c.g.o.Peers.AwaitHeard(ctx, c.link.Waits)
}

// heard takes what another gateway tells.
// Goroutines of package peers call it, one for each peer, so that it may run several times at once.
func (g *Gateway) heard(h peers.Heard) {
	var box live.Outbox
	for _, m := range h.Messages {
		g.deliver(&box, m.Shard, m.Channel, m.Payload)
	}
	if h.AllKeys {
		g.tracked.InvalidateAll(&box)
	}
	if len(h.Keys) > 0 {
		keys := make([]live.Written, len(h.Keys))
		for i, k := range h.Keys {
			keys[i].Name = k
		}
		g.tracked.Invalidate(&box, nil, keys)
	}
	box.Flush()
}

// missed is told that other gateways may have written keys unheard.
// Clients then drop all that they cache, which is right in any case. Messages that were missed are lost, as in Redis.
func (g *Gateway) missed() {
	var box live.Outbox
	g.tracked.InvalidateAll(&box)
	box.Flush()
}

// pubsubCommands are about channels.
func pubsubCommands() performers {
	sub := func(t live.Topic) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error {
			c.out.cork() // messages wait until the confirmations have been sent
			if !c.g.hub.Subscribe(w, &c.listener, t, args[1:]) {
				return refusal(errNoMemory)
			}
			c.awaitInterest()
			return nil
		}
	}
	unsub := func(t live.Topic) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error {
			c.g.hub.Unsubscribe(w, &c.listener, t, args[1:])
			c.g.tellInterest()
			return nil
		}
	}
	publish := func(shard bool) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error {
			w.Int(int64(c.g.publish(&c.box, shard, args[1], args[2])))
			return nil
		}
	}
	list := func(t live.Topic) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error { return c.g.hub.List(w, t, args) }
	}
	count := func(t live.Topic) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error {
			c.g.hub.CountEach(w, t, args[2:])
			return nil
		}
	}
	return performers{
		spec.CmdSubscribe:      sub(live.ToChannel),
		spec.CmdUnsubscribe:    unsub(live.ToChannel),
		spec.CmdPsubscribe:     sub(live.ToPattern),
		spec.CmdPunsubscribe:   unsub(live.ToPattern),
		spec.CmdSsubscribe:     sub(live.ToShard),
		spec.CmdSunsubscribe:   unsub(live.ToShard),
		spec.CmdPublish:        publish(false),
		spec.CmdSpublish:       publish(true),
		spec.CmdPubsubChannels: list(live.ToChannel),
		spec.CmdPubsubNumsub:   count(live.ToChannel),
		spec.CmdPubsubNumpat: func(c *conn, w *resp.Writer, _ [][]byte) error {
			_, patterns, _ := c.g.hub.Counts()
			w.Int(int64(patterns))
			return nil
		},
		spec.CmdPubsubShardchannels: list(live.ToShard),
		spec.CmdPubsubShardnumsub:   count(live.ToShard),
	}
}

// publish tells this gateway's subscribers, and those of the others. It returns how many of this one hear it, as a node
// of Redis Cluster does. The peers get it without an answer, at most once; a nil Peers tells nobody.
func (g *Gateway) publish(box *live.Outbox, shard bool, channel, payload []byte) int {
	g.o.Peers.Publish(shard, channel, payload)
	return g.deliver(box, shard, channel, payload)
}
