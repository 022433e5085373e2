package gateway

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// topic is what a subscription is to. The zero value is invalid.
type topic uint8

const (
	toChannel topic = 1 + iota
	toPattern
	toShard // a channel of SSUBSCRIBE; they are apart from others, as in Redis
	numTopics
)

// topicWords are those of a topic's replies: to SUBSCRIBE, to UNSUBSCRIBE, and of a message.
var topicWords = [numTopics]struct{ subscribe, unsubscribe, message string }{
	toChannel: {"subscribe", "unsubscribe", "message"},
	toPattern: {"psubscribe", "punsubscribe", "pmessage"},
	toShard:   {"ssubscribe", "sunsubscribe", "smessage"},
}

// hub knows who listens to what at this gateway. Lock order: hub before an output.
// Both maps say the same, from the channel's and from the connection's side, and change together. Nothing is kept of a
// name without subscribers, nor of a connection without subscriptions.
type hub struct {
	sync.RWMutex
	topics [numTopics]map[string]map[*conn]struct{} // by channel or pattern
	conns  map[*conn]*listener                      // those that have a subscription
}

// listener is what a connection is subscribed to.
type listener struct {
	topics [numTopics]map[string]struct{} // names of channels or patterns
	held   int64                          // bytes of the connection's share that stand for it
}

// subscriptionCost is about how much memory a subscription takes besides two copies of its name.
const subscriptionCost = 256

// costOf is in bytes, and the same for subscribing and for its end: a share gets back what it gave.
func costOf(name []byte) int64 { return subscriptionCost + 2*int64(len(name)) }

func (h *hub) init() {
	for t := range h.topics {
		h.topics[t] = make(map[string]map[*conn]struct{})
	}
	h.conns = make(map[*conn]*listener)
}

// counts are the names of each topic that somebody is subscribed to.
func (h *hub) counts() (channels, patterns, shards int) {
	h.RLock()
	defer h.RUnlock()
	return len(h.topics[toChannel]), len(h.topics[toPattern]), len(h.topics[toShard])
}

// subscriptions are how many there are of each topic, of all connections.
func (h *hub) subscriptions() (channels, patterns, shards int) {
	h.RLock()
	defer h.RUnlock()
	var n [numTopics]int
	for _, l := range h.conns {
		for t, names := range l.topics {
			n[t] += len(names)
		}
	}
	return n[toChannel], n[toPattern], n[toShard]
}

func (h *hub) countsOf(c *conn) (channels, patterns, shards int) {
	if c.listens.Load() == 0 {
		return 0, 0, 0
	}
	h.RLock()
	defer h.RUnlock()
	if l := h.conns[c]; l != nil {
		return len(l.topics[toChannel]), len(l.topics[toPattern]), len(l.topics[toShard])
	}
	return 0, 0, 0
}

// subscribe adds a subscription, and reports whether there is memory for it.
// The connection's own goroutine calls it. A message that is published from here on reaches the connection, behind the
// confirmation (cork). A subscription that there is already counts once, and succeeds.
func (h *hub) subscribe(c *conn, t topic, name []byte) bool {
	cost := costOf(name)
	if !c.share.Try(cost) {
		return false
	}
	h.Lock()
	defer h.Unlock()
	l := h.conns[c]
	if l == nil {
		l = &listener{}
		h.conns[c] = l
	}
	if _, ok := l.topics[t][string(name)]; ok {
		c.share.Give(cost)
		return true
	}
	if l.topics[t] == nil {
		l.topics[t] = make(map[string]struct{})
	}
	key := string(name)
	l.topics[t][key] = struct{}{}
	l.held += cost
	of := h.topics[t][key]
	if of == nil {
		of = make(map[*conn]struct{})
		h.topics[t][key] = of
	}
	of[c] = struct{}{}
	c.listens.Add(1)
	return true
}

func (h *hub) unsubscribe(c *conn, t topic, name string) {
	h.Lock()
	defer h.Unlock()
	l := h.conns[c]
	if l == nil {
		return
	}
	if _, ok := l.topics[t][name]; !ok {
		return
	}
	h.removeLocked(c, l, t, name)
}

// removeLocked ends a subscription that is there. h is locked for writing.
func (h *hub) removeLocked(c *conn, l *listener, t topic, name string) {
	delete(l.topics[t], name)
	of := h.topics[t][name]
	if delete(of, c); len(of) == 0 {
		delete(h.topics[t], name)
	}
	cost := costOf([]byte(name))
	l.held -= cost
	c.share.Drop(cost)
	if c.listens.Add(-1) == 0 {
		delete(h.conns, c)
	}
}

// names are those that a connection is subscribed to, in order.
func (h *hub) names(c *conn, t topic) (names []string) {
	h.RLock()
	defer h.RUnlock()
	if l := h.conns[c]; l != nil {
		for name := range l.topics[t] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (c *conn) stopListening() {
	if c.listens.Load() == 0 {
		return
	}
	h := &c.g.hub
	defer c.g.tellInterest()
	h.Lock()
	defer h.Unlock()
	l := h.conns[c]
	for t := range l.topics {
		for name := range l.topics[t] {
			h.removeLocked(c, l, topic(t), name)
		}
	}
}

// dismissListeners closes connections that are subscribed to what their user may not hear any more; self is closed
// behind its reply.
// It is called whenever rules change, by any connection's goroutine; Kill is called without the lock, which what it
// ends needs.
func (g *Gateway) dismissListeners(self *conn) {
	var gone []*conn
	g.hub.RLock()
	for c, l := range g.hub.conns {
		r := c.user.Load().Rights()
		if !r.AnyChannel() && !l.isAllowed(r.AllowsChannel) {
			gone = append(gone, c)
		}
	}
	g.hub.RUnlock()
	for _, c := range gone {
		if c == self {
			c.closing = true
		} else {
			c.link.Kill()
		}
	}
}

// A pattern must be allowed as a pattern: channels that it matches by chance do not count, as in Redis.
func (l *listener) isAllowed(allows func(channel string, isPattern bool) bool) bool {
	for t, names := range l.topics {
		for name := range names {
			if !allows(name, topic(t) == toPattern) {
				return false
			}
		}
	}
	return true
}

// deliver gives a message to those who listen at this gateway, and returns how many connections these are, one with
// several subscriptions counted for each. It goes out with the box's flush. It never waits for a subscriber: push
// copies, and closes the connection of a client that leaves too much unread. Messages of one client come to each
// subscriber in their order; those of several gateways in any.
func (g *Gateway) deliver(box *outbox, shard bool, channel, payload []byte) (n int) {
	g.hub.audience(shard, channel, func(t topic, pattern []byte, of map[*conn]struct{}) {
		n += len(of)
		box.begin()
		for c := range of {
			c.out.push(box, box.encoded(c, t, pattern, channel, payload))
		}
	})
	g.m.messages.Add(uint64(n))
	return n
}

// audience calls f for the subscriptions that hear a message: those to its channel, and those to each pattern.
// f is called with the lock held for reading, and must not keep the map. Every pattern is matched against every
// message: their number, and not that of subscribers, is what a message costs.
func (h *hub) audience(shard bool, channel []byte, f func(t topic, pattern []byte, of map[*conn]struct{})) {
	h.RLock()
	defer h.RUnlock()
	t := toChannel
	if shard {
		t = toShard
	}
	if of := h.topics[t][string(channel)]; len(of) > 0 {
		f(t, nil, of)
	}
	if shard {
		return
	}
	for pattern, of := range h.topics[toPattern] {
		if glob.Match([]byte(pattern), channel) {
			f(toPattern, []byte(pattern), of)
		}
	}
}

// receivers is how many connections deliver would give a message to.
func (h *hub) receivers(shard bool, channel []byte) (n int) {
	h.RLock()
	defer h.RUnlock()
	if shard {
		return len(h.topics[toShard][string(channel)])
	}
	n = len(h.topics[toChannel][string(channel)])
	for pattern, of := range h.topics[toPattern] {
		if glob.Match([]byte(pattern), channel) {
			n += len(of)
		}
	}
	return n
}

// begin forgets the message that was encoded last.
// A message is encoded at most twice, however many hear it: once for each protocol's version.
func (x *outbox) begin() {
	for i := range x.forms {
		x.forms[i].Reset(keepReply)
	}
}

// encoded is a message in the form for a connection, valid until begin.
func (x *outbox) encoded(c *conn, t topic, pattern, channel, payload []byte) []byte {
	w := x.form(c)
	if w.Len() > 0 {
		return w.Bytes()
	}
	if pattern != nil {
		w.Push(4)
	} else {
		w.Push(3)
	}
	w.BulkString(topicWords[t].message)
	if pattern != nil {
		w.Bulk(pattern)
	}
	w.Bulk(channel)
	w.Bulk(payload)
	return w.Bytes()
}

// form is the writer for connections of c's protocol.
// In RESP2 a push is an array. c's protocol may change at any time; a client that changes it gets messages of both
// forms.
func (x *outbox) form(c *conn) *resp.Writer {
	i := values.Bit(c.seenP3.Load())
	x.forms[i].Proto = 2 + int(i)
	return &x.forms[i]
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
	g.hub.RLock()
	messages := len(g.hub.conns) > 0
	g.hub.RUnlock()
	g.o.Peers.Want(messages, g.tracked.clients.Load() > 0)
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
	var box outbox
	for _, m := range h.Messages {
		g.deliver(&box, m.Shard, m.Channel, m.Payload)
	}
	if h.AllKeys {
		g.tracked.invalidateAll(g, &box)
	}
	if len(h.Keys) > 0 {
		keys := make([]written, len(h.Keys))
		for i, k := range h.Keys {
			keys[i].name = k
		}
		g.tracked.invalidate(g, &box, nil, keys)
	}
	box.flush()
}

// missed is told that other gateways may have written keys unheard.
// Clients then drop all that they cache, which is right in any case. Messages that were missed are lost, as in Redis.
func (g *Gateway) missed() {
	var box outbox
	g.tracked.invalidateAll(g, &box)
	box.flush()
}

// pubsubCommands are about channels.
func pubsubCommands() performers {
	sub := func(t topic) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error { return cmdSubscribe(c, w, t, args) }
	}
	unsub := func(t topic) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error { cmdUnsubscribe(c, w, t, args); return nil }
	}
	publish := func(shard bool) connFunc {
		return func(c *conn, w *resp.Writer, args [][]byte) error {
			w.Int(int64(c.g.publish(&c.box, shard, args[1], args[2])))
			return nil
		}
	}
	return performers{
		spec.CmdSubscribe:      sub(toChannel),
		spec.CmdUnsubscribe:    unsub(toChannel),
		spec.CmdPsubscribe:     sub(toPattern),
		spec.CmdPunsubscribe:   unsub(toPattern),
		spec.CmdSsubscribe:     sub(toShard),
		spec.CmdSunsubscribe:   unsub(toShard),
		spec.CmdPublish:        publish(false),
		spec.CmdSpublish:       publish(true),
		spec.CmdPubsubChannels: listTopics(toChannel),
		spec.CmdPubsubNumsub:   countTopics(toChannel),
		spec.CmdPubsubNumpat: func(c *conn, w *resp.Writer, _ [][]byte) error {
			_, patterns, _ := c.g.hub.counts()
			w.Int(int64(patterns))
			return nil
		},
		spec.CmdPubsubShardchannels: listTopics(toShard),
		spec.CmdPubsubShardnumsub:   countTopics(toShard),
	}
}

// publish tells this gateway's subscribers, and those of the others. It returns how many of this one hear it, as a node
// of Redis Cluster does. The peers get it without an answer, at most once; a nil Peers tells nobody.
func (g *Gateway) publish(box *outbox, shard bool, channel, payload []byte) int {
	g.o.Peers.Publish(shard, channel, payload)
	return g.deliver(box, shard, channel, payload)
}

// writeListening is the confirmation of a subscription, or of its end; name nil: there was none.
func (c *conn) writeListening(w *resp.Writer, t topic, word string, name []byte) {
	channels, patterns, shards := c.g.hub.countsOf(c)
	w.Push(3)
	w.BulkString(word)
	if name == nil {
		w.Null()
	} else {
		w.Bulk(name)
	}
	if t == toShard {
		w.Int(int64(shards))
	} else {
		w.Int(int64(channels + patterns))
	}
}

// cmdSubscribe confirms each subscription by itself. Messages wait until the confirmations have been sent.
// If there is no memory for one of several, those before it have been confirmed and stay.
func cmdSubscribe(c *conn, w *resp.Writer, t topic, args [][]byte) error {
	c.out.cork()
	for _, name := range args[1:] {
		if !c.g.hub.subscribe(c, t, name) {
			return refusal(errNoMemory)
		}
		c.writeListening(w, t, topicWords[t].subscribe, name)
	}
	c.awaitInterest()
	return nil
}

// cmdUnsubscribe without names ends all subscriptions of the kind, and says so even if there are none.
func cmdUnsubscribe(c *conn, w *resp.Writer, t topic, args [][]byte) {
	word := topicWords[t].unsubscribe
	if len(args) > 1 {
		for _, name := range args[1:] {
			c.g.hub.unsubscribe(c, t, string(name))
			c.writeListening(w, t, word, name)
		}
		c.g.tellInterest()
		return
	}
	names := c.g.hub.names(c, t)
	defer c.g.tellInterest()
	for _, name := range names {
		c.g.hub.unsubscribe(c, t, name)
		c.writeListening(w, t, word, []byte(name))
	}
	if len(names) == 0 {
		c.writeListening(w, t, word, nil)
	}
}

// listTopics is PUBSUB CHANNELS and SHARDCHANNELS.
func listTopics(t topic) connFunc {
	return func(c *conn, w *resp.Writer, args [][]byte) error {
		if len(args) > 3 {
			return refusal("ERR unknown subcommand or wrong number of arguments for '" + values.Clip(args[1], 128) +
				"'. Try PUBSUB HELP.")
		}
		var names []string
		c.g.hub.RLock()
		for name := range c.g.hub.topics[t] {
			if len(args) == 2 || glob.Match(args[2], []byte(name)) {
				names = append(names, name)
			}
		}
		c.g.hub.RUnlock()
		writeStrings(w, names)
		return nil
	}
}

// countTopics is PUBSUB NUMSUB and SHARDNUMSUB.
func countTopics(t topic) connFunc {
	return func(c *conn, w *resp.Writer, args [][]byte) error {
		w.Array(2 * (len(args) - 2)) // in RESP3, too
		c.g.hub.RLock()
		defer c.g.hub.RUnlock()
		for _, name := range args[2:] {
			w.Bulk(name)
			w.Int(int64(len(c.g.hub.topics[t][string(name)])))
		}
		return nil
	}
}
