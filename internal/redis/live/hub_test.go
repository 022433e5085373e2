package live

import (
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

// radio is a client with some memory, that writes down what it hears when that is flushed.
type radio struct {
	memory         int64
	resp3          bool
	pending, heard string
	flushes        int
	box            *Outbox
}

func (r *radio) Output() Output    { return r }
func (r *radio) SpeaksRESP3() bool { return r.resp3 }
func (r *radio) Give(n int64)      { r.memory += n }
func (r *radio) Drop(n int64)      { r.memory += n }

func (r *radio) Try(n int64) bool {
	if n > r.memory {
		return false
	}
	r.memory -= n
	return true
}

func (r *radio) Push(box *Outbox, message []byte) {
	r.pending += string(message)
	if r.box != box {
		r.box = box
		box.Add(r)
	}
}

func (r *radio) Flush(*Outbox) {
	r.heard, r.pending, r.box = r.heard+r.pending, "", nil
	r.flushes++
}

func words(s string) (list [][]byte) {
	for f := range strings.FieldsSeq(s) {
		list = append(list, []byte(f))
	}
	return list
}

// TestHub: a message goes to each subscription that hears it, in the client's protocol and in one write for each.
func TestHub(t *testing.T) {
	var h Hub
	h.Init()
	a, b := &radio{memory: 1 << 20}, &radio{memory: 1 << 20, resp3: true}
	la, lb := &Listener{Client: a}, &Listener{Client: b}
	var w resp.Writer
	w.Proto = 2
	if !h.Subscribe(&w, la, ToChannel, words("news news other")) || !h.Subscribe(&w, la, ToPattern, words("n*")) ||
		!h.Subscribe(&w, lb, ToChannel, words("news")) || !h.Subscribe(&w, lb, ToShard, words("news")) {
		t.Fatal("no memory")
	}
	if c, p, s := h.CountsOf(la); c != 2 || p != 1 || s != 0 {
		t.Errorf("a has %d, %d and %d subscriptions", c, p, s)
	}
	if c, p, s := h.Subscriptions(); c != 3 || p != 1 || s != 1 {
		t.Errorf("there are %d, %d and %d subscriptions", c, p, s)
	}
	var box Outbox
	for _, m := range []struct {
		shard   bool
		channel string
		n       int
	}{{false, "news", 3}, {true, "news", 1}, {false, "none", 1}, {false, "x", 0}} {
		if n := h.Receivers(m.shard, []byte(m.channel)); n != m.n {
			t.Errorf("%s, shard %t: %d hear it, want %d", m.channel, m.shard, n, m.n)
		}
		if n := h.Deliver(&box, m.shard, []byte(m.channel), []byte("hi")); n != m.n {
			t.Errorf("%s, shard %t: %d heard it, want %d", m.channel, m.shard, n, m.n)
		}
	}
	box.Flush()
	box.Flush()
	const news = "$4\r\nnews\r\n$2\r\nhi\r\n"
	wantA := "*3\r\n$7\r\nmessage\r\n" + news + "*4\r\n$8\r\npmessage\r\n$2\r\nn*\r\n" + news +
		"*4\r\n$8\r\npmessage\r\n$2\r\nn*\r\n$4\r\nnone\r\n$2\r\nhi\r\n"
	wantB := ">3\r\n$7\r\nmessage\r\n" + news + ">3\r\n$8\r\nsmessage\r\n" + news
	if a.heard != wantA || b.heard != wantB || a.flushes != 1 || b.flushes != 1 {
		t.Errorf("a heard %q in %d writes, b %q in %d", a.heard, a.flushes, b.heard, b.flushes)
	}
}

// TestMemory: subscriptions take memory once, there are none without it, and all of it comes back.
func TestMemory(t *testing.T) {
	var h Hub
	h.Init()
	const enough = 2*subscriptionCost + 10
	r := &radio{memory: enough}
	l := &Listener{Client: r}
	var w resp.Writer
	if !h.Subscribe(&w, l, ToChannel, words("a a")) || r.memory != enough-subscriptionCost-2 {
		t.Errorf("%d bytes are left", r.memory)
	}
	if h.Subscribe(&w, l, ToChannel, words("b c")) {
		t.Error("there was memory for three")
	}
	if c, _, _ := h.Counts(); c != 2 || !h.Any() {
		t.Errorf("%d channels", c)
	}
	h.Unsubscribe(&w, l, ToChannel, words("b none"))
	h.Leave(l)
	if r.memory != enough || l.Listens() || h.Any() || l.held != 0 {
		t.Errorf("%d bytes are left, it listens: %t", r.memory, l.Listens())
	}
	h.Leave(l)
	h.Unsubscribe(&w, l, ToPattern, nil)
	if !strings.HasSuffix(string(w.Bytes()), "$12\r\npunsubscribe\r\n$-1\r\n:0\r\n") {
		t.Errorf("%q", w.Bytes())
	}
}

// TestDenied: who is subscribed to what he may not hear is found, and a pattern has to be allowed as one.
func TestDenied(t *testing.T) {
	var h Hub
	h.Init()
	var all []*Listener
	for _, topic := range []Topic{ToChannel, ToPattern, ToShard} {
		l := &Listener{Client: &radio{memory: 1 << 20}}
		h.Subscribe(&resp.Writer{}, l, topic, words("ab"))
		all = append(all, l)
	}
	gone := h.Denied(func(l *Listener) func(string, bool) bool {
		if l == all[2] {
			return nil
		}
		return func(channel string, isPattern bool) bool { return channel == "ab" && !isPattern }
	})
	if len(gone) != 1 || gone[0] != all[1] {
		t.Errorf("%d are to go", len(gone))
	}
}
