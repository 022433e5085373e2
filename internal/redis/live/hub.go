package live

import (
	"slices"
	"sync"

	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Topic is what a subscription is to. The zero value is invalid.
type Topic uint8

// Topics.
const (
	ToChannel Topic = 1 + iota
	ToPattern
	ToShard // a channel of SSUBSCRIBE; they are apart from others, as in Redis
	numTopics
)

// topicWords are those of a topic's replies: to SUBSCRIBE, to UNSUBSCRIBE, and of a message.
var topicWords = [numTopics]struct{ subscribe, unsubscribe, message string }{
	ToChannel: {"subscribe", "unsubscribe", "message"},
	ToPattern: {"psubscribe", "punsubscribe", "pmessage"},
	ToShard:   {"ssubscribe", "sunsubscribe", "smessage"},
}

// Hub knows who listens to what at this gateway. Lock order: Hub before an output.
// Listeners and topics say the same, and change together. Nothing is kept of a name without subscribers, nor of a
// client without subscriptions.
type Hub struct {
	mu struct {
		sync.RWMutex
		topics    [numTopics]map[string]map[*Listener]struct{} // by channel or pattern
		listeners map[*Listener]struct{}                       // those that have a subscription
	}
}

// subscriptionCost is about how much memory a subscription takes besides two copies of its name.
const subscriptionCost = 256

// costOf is in bytes, and the same for subscribing and for its end: a share gets back what it gave.
func costOf(name []byte) int64 { return subscriptionCost + 2*int64(len(name)) }

// Init is to be called first.
func (h *Hub) Init() {
	for t := range h.mu.topics {
		h.mu.topics[t] = make(map[string]map[*Listener]struct{})
	}
	h.mu.listeners = make(map[*Listener]struct{})
}

// Any reports whether somebody listens.
func (h *Hub) Any() bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return len(h.mu.listeners) > 0
}

// Counts are the names of each topic that somebody is subscribed to.
func (h *Hub) Counts() (channels, patterns, shards int) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return len(h.mu.topics[ToChannel]), len(h.mu.topics[ToPattern]), len(h.mu.topics[ToShard])
}

// Subscriptions are how many there are of each topic, of all clients.
func (h *Hub) Subscriptions() (channels, patterns, shards int) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	var n [numTopics]int
	for l := range h.mu.listeners {
		for t, names := range l.topics {
			n[t] += len(names)
		}
	}
	return n[ToChannel], n[ToPattern], n[ToShard]
}

// CountsOf are a client's subscriptions of each topic.
func (h *Hub) CountsOf(l *Listener) (channels, patterns, shards int) {
	if !l.Listens() {
		return 0, 0, 0
	}
	h.mu.RLock()
	defer h.mu.RUnlock()
	return len(l.topics[ToChannel]), len(l.topics[ToPattern]), len(l.topics[ToShard])
}

// subscribe adds a subscription, and reports whether there is memory for it.
// A message that is published from here on reaches the client. A subscription that there is already counts once, and
// succeeds.
func (h *Hub) subscribe(l *Listener, t Topic, name []byte) bool {
	cost := costOf(name)
	if !l.Try(cost) {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := l.topics[t][string(name)]; ok {
		l.Give(cost)
		return true
	}
	h.mu.listeners[l] = struct{}{}
	if l.topics[t] == nil {
		l.topics[t] = make(map[string]struct{})
	}
	key := string(name)
	l.topics[t][key] = struct{}{}
	l.held += cost
	of := h.mu.topics[t][key]
	if of == nil {
		of = make(map[*Listener]struct{})
		h.mu.topics[t][key] = of
	}
	of[l] = struct{}{}
	l.count.Add(1)
	return true
}

func (h *Hub) unsubscribe(l *Listener, t Topic, name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := l.topics[t][name]; ok {
		h.removeLocked(l, t, name)
	}
}

// removeLocked ends a subscription that is there. h is locked for writing.
func (h *Hub) removeLocked(l *Listener, t Topic, name string) {
	delete(l.topics[t], name)
	of := h.mu.topics[t][name]
	if delete(of, l); len(of) == 0 {
		delete(h.mu.topics[t], name)
	}
	cost := costOf([]byte(name))
	l.held -= cost
	l.Drop(cost)
	if l.count.Add(-1) == 0 {
		delete(h.mu.listeners, l)
		l.topics = [numTopics]map[string]struct{}{}
	}
}

// namesOf are those that a client is subscribed to, in order.
func (h *Hub) namesOf(l *Listener, t Topic) (names []string) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for name := range l.topics[t] {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Leave ends all subscriptions of a client.
func (h *Hub) Leave(l *Listener) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for t, names := range l.topics {
		for name := range names {
			h.removeLocked(l, Topic(t), name)
		}
	}
}

// Denied are the clients that are subscribed to what they may not hear. allows says that of a client's name, for all of
// its names if it is nil. It must not wait.
func (h *Hub) Denied(allows func(l *Listener) func(channel string, isPattern bool) bool) (gone []*Listener) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for l := range h.mu.listeners {
		if f := allows(l); f != nil && !l.isAllowed(f) {
			gone = append(gone, l)
		}
	}
	return gone
}

// A pattern must be allowed as a pattern: channels that it matches by chance do not count, as in Redis.
func (l *Listener) isAllowed(allows func(channel string, isPattern bool) bool) bool {
	for t, names := range l.topics {
		for name := range names {
			if !allows(name, Topic(t) == ToPattern) {
				return false
			}
		}
	}
	return true
}

// Deliver gives a message to those who listen, and returns how many these are, one with several subscriptions counted
// for each. It goes out with the box's flush. It never waits for a subscriber. Messages of one client come to each
// subscriber in their order; those of several gateways in any.
func (h *Hub) Deliver(box *Outbox, shard bool, channel, payload []byte) (n int) {
	h.audience(shard, channel, func(t Topic, pattern []byte, of map[*Listener]struct{}) {
		n += len(of)
		box.Begin()
		for l := range of {
			l.Output().Push(box, box.encoded(l.SpeaksRESP3(), t, pattern, channel, payload))
		}
	})
	return n
}

// audience calls f for the subscriptions that hear a message: those to its channel, and those to each pattern.
// f is called with the lock held for reading, and must not keep the map. Every pattern is matched against every
// message: their number, and not that of subscribers, is what a message costs.
func (h *Hub) audience(shard bool, channel []byte, f func(t Topic, pattern []byte, of map[*Listener]struct{})) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	t := ToChannel
	if shard {
		t = ToShard
	}
	if of := h.mu.topics[t][string(channel)]; len(of) > 0 {
		f(t, nil, of)
	}
	if shard {
		return
	}
	for pattern, of := range h.mu.topics[ToPattern] {
		if glob.Match([]byte(pattern), channel) {
			f(ToPattern, []byte(pattern), of)
		}
	}
}

// Receivers is how many clients Deliver would give a message to.
func (h *Hub) Receivers(shard bool, channel []byte) (n int) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if shard {
		return len(h.mu.topics[ToShard][string(channel)])
	}
	n = len(h.mu.topics[ToChannel][string(channel)])
	for pattern, of := range h.mu.topics[ToPattern] {
		if glob.Match([]byte(pattern), channel) {
			n += len(of)
		}
	}
	return n
}

// refusal is the reply to a command that is wrong, in Redis's words.
type refusal = args.Refusal

// writeListening is the confirmation of a subscription, or of its end; name nil: there was none.
func (h *Hub) writeListening(w *resp.Writer, l *Listener, t Topic, word string, name []byte) {
	channels, patterns, shards := h.CountsOf(l)
	w.Push(3)
	w.BulkString(word)
	if name == nil {
		w.Null()
	} else {
		w.Bulk(name)
	}
	if t == ToShard {
		w.Int(int64(shards))
	} else {
		w.Int(int64(channels + patterns))
	}
}

// Subscribe is SUBSCRIBE and its like. It confirms each subscription by itself, and reports whether there was memory
// for all of them; those before have been confirmed and stay. The client's output holds messages back meanwhile.
func (h *Hub) Subscribe(w *resp.Writer, l *Listener, t Topic, names [][]byte) bool {
	for _, name := range names {
		if !h.subscribe(l, t, name) {
			return false
		}
		h.writeListening(w, l, t, topicWords[t].subscribe, name)
	}
	return true
}

// Unsubscribe is UNSUBSCRIBE and its like. Without names it ends all subscriptions of the kind, and says so even if
// there are none.
func (h *Hub) Unsubscribe(w *resp.Writer, l *Listener, t Topic, names [][]byte) {
	word := topicWords[t].unsubscribe
	if len(names) == 0 {
		for _, name := range h.namesOf(l, t) {
			names = append(names, []byte(name))
		}
		if len(names) == 0 {
			h.writeListening(w, l, t, word, nil)
		}
	}
	for _, name := range names {
		h.unsubscribe(l, t, string(name))
		h.writeListening(w, l, t, word, name)
	}
}

// List is PUBSUB CHANNELS and SHARDCHANNELS.
func (h *Hub) List(w *resp.Writer, t Topic, args [][]byte) error {
	if len(args) > 3 {
		return refusal("ERR unknown subcommand or wrong number of arguments for '" + values.Clip(args[1], 128) +
			"'. Try PUBSUB HELP.")
	}
	var names []string
	h.mu.RLock()
	for name := range h.mu.topics[t] {
		if len(args) == 2 || glob.Match(args[2], []byte(name)) {
			names = append(names, name)
		}
	}
	h.mu.RUnlock()
	w.Array(len(names))
	for _, name := range names {
		w.BulkString(name)
	}
	return nil
}

// CountEach is PUBSUB NUMSUB and SHARDNUMSUB.
func (h *Hub) CountEach(w *resp.Writer, t Topic, names [][]byte) {
	w.Array(2 * len(names)) // in RESP3, too
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, name := range names {
		w.Bulk(name)
		w.Int(int64(len(h.mu.topics[t][string(name)])))
	}
}
