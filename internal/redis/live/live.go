// Package live tells clients of a gateway what they did not ask for at that moment. It has publish/subscribe, MONITOR,
// client-side caching, events of keys, and the outboxes in which all such messages wait. Reads of versions and the
// peers are the gateway's.
//
// Start with [Hub]: it knows which [Listener] hears what. [Monitors] see all commands, and [Tracked] knows who caches
// which keys. An [Outbox] collects the messages of one owner, so that those of a batch go out in one write for each
// client. Hub, Monitors and Tracked may be called concurrently; an Outbox is for one goroutine. Messages are copied by
// the client's output, which belongs to the gateway, as does its memory. The protocol and the texts are those of Redis.
package live

import (
	"sync/atomic"

	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Output is where messages for a client wait until somebody flushes them.
type Output interface {
	// Push adds a whole message, which it copies, and Adds the output to the box. It never waits.
	Push(box *Outbox, message []byte)
	// Flush sends what has been pushed.
	Flush(box *Outbox)
}

// Client is a connection that can hear.
type Client interface {
	Output() Output
	// SpeaksRESP3 may change at any time.
	SpeaksRESP3() bool
	// Try takes n bytes of memory for what it is subscribed to, and Give and Drop give them back: Give if it was not
	// used.
	Try(n int64) bool
	Give(n int64)
	Drop(n int64)
}

// Listener is a client as a Hub knows it. Its Client is set before anything else.
type Listener struct {
	Client
	count    atomic.Int32             // subscriptions
	tracking atomic.Pointer[Tracking] // nil: the client caches nothing; Tracked changes it

	// Guarded by the Hub.
	topics [numTopics]map[string]struct{} // names of channels or patterns
	held   int64                          // bytes of the client's memory that stand for it
}

// Listens reports whether there is a subscription. Any goroutine may ask.
func (l *Listener) Listens() bool { return l.count.Load() > 0 }

// Tracking is how the client caches, nil if it does not. Any goroutine may ask.
func (l *Listener) Tracking() *Tracking { return l.tracking.Load() }

// keepForm is how long a buffer of a message may be, in bytes, that serves again.
const keepForm = 128 << 10

// Outbox remembers the outputs that its owner has pushed to, for one flush of each. Its owner's goroutine uses it
// alone. An output knows which Outbox has it already, so that many messages to one client are one entry. Two owners
// that push to one client in turn may both have it; the second flush finds nothing then.
type Outbox struct {
	list  []Output
	forms [2]resp.Writer // of one message: for RESP2 and RESP3
}

// Add remembers an output for Flush. The output calls it, if the Outbox was not the last one that it was added to.
func (x *Outbox) Add(o Output) { x.list = append(x.list, o) }

// Flush sends what the owner has pushed.
// Each output takes its lock by itself, and none of the Hub's is held, so that a slow socket holds up nobody who
// listens.
func (x *Outbox) Flush() {
	for i, o := range x.list {
		o.Flush(x)
		x.list[i] = nil
	}
	x.list = x.list[:0]
}

// Begin forgets the message that was encoded last.
// A message is encoded at most twice, however many hear it: once for each protocol's version.
func (x *Outbox) Begin() {
	for i := range x.forms {
		x.forms[i].Reset(keepForm)
	}
}

// Form is the writer for clients of a protocol, good until Begin.
// In RESP2 a push is an array. A client that changes its protocol meanwhile gets messages of both forms.
func (x *Outbox) Form(resp3 bool) *resp.Writer {
	i := values.Bit(resp3)
	x.forms[i].Proto = 2 + int(i)
	return &x.forms[i]
}

// encoded is a message in the form for a client, valid until Begin.
func (x *Outbox) encoded(resp3 bool, t Topic, pattern, channel, payload []byte) []byte {
	w := x.Form(resp3)
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
