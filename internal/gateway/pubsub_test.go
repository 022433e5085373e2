package gateway

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
)

// talk is a conversation: lines of "connection: command", or "connection<" for a message that comes by itself. It
// returns what the connections heard.
func talk(t *testing.T, open func() *peer, lines string) string {
	t.Helper()
	peers := make(map[string]*peer)
	var out strings.Builder
	defer func() {
		if t.Failed() {
			t.Log(out.String())
		}
	}()
	for line := range strings.Lines(strings.TrimSpace(lines)) {
		line = strings.TrimSpace(line)
		name, cmd, is := strings.Cut(line, ": ")
		name = strings.TrimSuffix(name, "<")
		if peers[name] == nil {
			peers[name] = open()
		}
		p := peers[name]
		if is {
			p.send(t, strings.Fields(cmd))
		}
		n := 1
		if f := strings.Fields(strings.ToLower(cmd)); len(f) > 2 && strings.HasSuffix(f[0], "subscribe") {
			n = len(f) - 1
		}
		for range n {
			fmt.Fprintf(&out, "%s\n  %q\n", line, p.reply(t))
		}
	}
	return out.String()
}

const pubsubTalk = `
a: SUBSCRIBE one two
a: SUBSCRIBE one
a: PSUBSCRIBE o*
a: PING
a: PING hi
b: PUBLISH one hello
a<
a<
b: PUBLISH none hello
b: PUBSUB CHANNELS o*
b: PUBSUB NUMSUB one two none
b: PUBSUB NUMSUB
b: PUBSUB NUMPAT
b: PUBSUB CHANNELS a b
b: PUBSUB NOSUCH
a: SSUBSCRIBE one
b: SPUBLISH one sharded
a<
b: PUBSUB SHARDCHANNELS
b: PUBSUB SHARDNUMSUB one two
a: UNSUBSCRIBE two
a: UNSUBSCRIBE two
a: UNSUBSCRIBE
a: UNSUBSCRIBE
a: PUNSUBSCRIBE
a: SUNSUBSCRIBE
a: SUNSUBSCRIBE
a: SET k v
a: MULTI
a: SUBSCRIBE inside
a: PUBLISH inside self
a: DISCARD
b: SUBSCRIBE x
b: RESET
b: PUBLISH x nobody
b: PUBLISH x
b: SUBSCRIBE
b: SUBSCRIBE y
b: QUIT
`

const pubsubTalk2 = `
a: SUBSCRIBE one
a: GET k
a: CONFIG GET x
a: PUBLISH one x
a: UNSUBSCRIBE
a: GET k
`

const pubsubTalk3 = `
a: HELLO 3
a: SUBSCRIBE one
a: GET k
a: PING
b: PUBLISH one x
a<
a: UNSUBSCRIBE
a: UNSUBSCRIBE
`

// withoutHello takes out what differs: versions, and numbers of connections.
func withoutHello(s string) string {
	i := strings.Index(s, "HELLO 3")
	if i < 0 {
		return s
	}
	j := strings.Index(s[i:], "a: SUB")
	return s[:i] + s[i+j:]
}

// Replies and messages are Redis's, byte for byte.
func TestPubSubLikeRedis(t *testing.T) {
	sock := startRedis(t)
	addr := serve(t, Options{Databases: fake()})
	for _, lines := range []string{pubsubTalk, pubsubTalk2, pubsubTalk3} {
		theirs := talk(t, func() *peer { return dial(t, "unix", sock) }, lines)
		ours := talk(t, func() *peer { return dial(t, "tcp", addr) }, lines)
		if withoutHello(ours) != withoutHello(theirs) {
			t.Errorf("ours:\n%s\nRedis's:\n%s", ours, theirs)
		}
	}
}

// hears waits for a reply that begins so.
func (p *peer) hears(t testing.TB, want string) {
	t.Helper()
	if got := string(p.reply(t)); got != want {
		t.Errorf("heard %.300q, want %.300q", got, want)
	}
}

func message(channel, payload string) string {
	return "*3\r\n" + bulk("message") + bulk(channel) + bulk(payload)
}

// Messages come to subscribers in loops and outside, over TCP, in order, whatever else the connection does.
func TestMessagesInLoops(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	subs := looped(t, g, "tcp", addr, 8)
	for _, p := range subs {
		p.do(t, "SUBSCRIBE", "c")
	}
	pub := dial(t, "tcp", addr)
	const n = 2000
	go func() {
		for i := range n {
			if _, err := pub.Write(encode("PUBLISH", "c", fmt.Sprint(i))); err != nil {
				return
			}
		}
	}()
	go io.Copy(io.Discard, pub)
	for _, p := range subs {
		for i := range n {
			if got, want := string(p.reply(t)), message("c", fmt.Sprint(i)); got != want {
				t.Fatalf("message %d: %q", i, got)
			}
		}
	}
}

// A RESP3 connection reads replies and messages that are pushed meanwhile, each of them whole.
func TestPushesBesideReplies(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	p := looped(t, g, "tcp", addr, 1)[0]
	p.do(t, "HELLO", "3")
	p.do(t, "SUBSCRIBE", "c")
	long := strings.Repeat("x", 100_000)
	p.want(t, "+OK\r\n", "SET", "k", long)
	pub := dial(t, "tcp", addr)
	const n = 500
	go func() {
		for i := range n {
			pub.Write(encode("PUBLISH", "c", strings.Repeat("y", i*50)))
		}
	}()
	go io.Copy(io.Discard, pub)
	go func() {
		for range n {
			p.Write(encode("GET", "k"))
		}
	}()
	replies, messages := 0, 0
	for replies < n || messages < n {
		switch got := string(p.reply(t)); {
		case got == bulk(long):
			replies++
		case got == ">3\r\n"+bulk("message")+bulk("c")+bulk(strings.Repeat("y", messages*50)):
			messages++
		default:
			t.Fatalf("after %d replies and %d messages: %.200q", replies, messages, got)
		}
	}
}

// A subscriber that does not read is closed, nobody waits for it, and its memory comes back.
func TestSlowSubscriber(t *testing.T) {
	for _, inLoops := range []bool{false, true} {
		t.Run(fmt.Sprint("loop=", inLoops), func(t *testing.T) {
			budget := netsrv.NewBudget(256 << 20)
			addr, g := start(t, Options{Databases: fake(), Budget: budget})
			var slow *peer
			if inLoops {
				slow = looped(t, g, "tcp", addr, 1)[0]
			} else {
				slow = dial(t, "tcp", addr)
			}
			slow.do(t, "SUBSCRIBE", "c")
			fast := dial(t, "tcp", addr)
			fast.do(t, "SUBSCRIBE", "c")
			pub := dial(t, "tcp", addr)
			payload := strings.Repeat("z", 1<<20)
			for i := 0; g.m.flooded.Load() == 0; i++ {
				if i > 200 {
					t.Fatal("a client that reads nothing has 200 MiB to read, and is not closed")
				}
				pub.do(t, "PUBLISH", "c", payload)
				fast.hears(t, message("c", payload))
			}
			slow.closed(t)
			testutil.Until(t, "the memory is back", func() bool {
				return budget.Used() <= 1<<20 && g.m.queued.Load() == 0
			})
			testutil.Until(t, "the subscription is gone", func() bool {
				return pub.do(t, "PUBSUB", "NUMSUB", "c") == "*2\r\n"+bulk("c")+":1\r\n"
			})
			pub.want(t, ":1\r\n", "PUBLISH", "c", "x")
			fast.hears(t, message("c", "x"))
		})
	}
}

// CLIENT LIST and INFO tell of subscribers.
func TestSubscribersInClientList(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
	a.do(t, "SUBSCRIBE", "one")
	a.do(t, "PSUBSCRIBE", "p*")
	a.do(t, "SSUBSCRIBE", "s")
	list := b.do(t, "CLIENT", "LIST", "TYPE", "pubsub")
	if !strings.Contains(list, "flags=P ") || !strings.Contains(list, " sub=1 psub=1 ssub=1 ") ||
		strings.Count(list, "id=") != 1 {
		t.Error(list)
	}
	if info := b.do(t, "INFO", "stats"); !strings.Contains(
		info, "pubsub_channels:1\r\npubsub_patterns:1\r\npubsubshard_channels:1\r\n") {
		t.Error(info)
	}
	a.Close()
	testutil.Until(t, "the subscriptions of a closed connection are gone", func() bool {
		return strings.Contains(b.do(t, "PUBSUB", "NUMPAT"), ":0") && b.do(t, "PUBSUB", "CHANNELS") == "*0\r\n"
	})
}

// Users hear and say what their channels allow, and a connection that hears what its user may not hear any more is
// closed.
func TestChannelRules(t *testing.T) {
	for name, open := range map[string]func() *peer{"kvd": nil, "redis": nil} {
		t.Run(name, func(t *testing.T) {
			if name == "kvd" {
				addr := serve(t, Options{Databases: fake()})
				open = func() *peer { return dial(t, "tcp", addr) }
			} else {
				sock := startRedis(t)
				open = func() *peer { return dial(t, "unix", sock) }
			}
			admin, ann := open(), open()
			admin.want(t, "+OK\r\n", "ACL", "SETUSER", "ann", "on", ">x", "+@all", "~*", "resetchannels", "&news.*",
				"&exact")
			ann.want(t, "+OK\r\n", "AUTH", "ann", "x")
			const no = "-NOPERM this user has no permissions to access one of the channels used as arguments\r\n"
			ann.want(t, no, "SUBSCRIBE", "secret")
			ann.want(t, no, "SUBSCRIBE", "news.1", "secret")
			ann.want(t, no, "PUBLISH", "secret", "x")
			ann.want(t, no, "SPUBLISH", "secret", "x")
			ann.want(t, no, "PSUBSCRIBE", "*")
			ann.want(t, no, "PSUBSCRIBE", "news.1*")
			ann.want(t, ":0\r\n", "PUBLISH", "news.1", "x")
			ann.want(t, ":0\r\n", "PUBLISH", "exact", "x")
			ann.want(t, "*3\r\n"+bulk("psubscribe")+bulk("news.*")+":1\r\n", "PSUBSCRIBE", "news.*")
			admin.want(t, bulk("This user has no permissions to access the 'secret' channel"), "ACL", "DRYRUN", "ann",
				"PUBLISH", "secret", "x")
			admin.want(t, "+OK\r\n", "ACL", "SETUSER", "ann", "allchannels")
			admin.want(t, ":1\r\n", "PUBLISH", "news.2", "still")
			ann.hears(t, "*4\r\n"+bulk("pmessage")+bulk("news.*")+bulk("news.2")+bulk("still"))
			admin.want(t, "+OK\r\n", "ACL", "SETUSER", "ann", "resetchannels", "&other")
			ann.closed(t)
		})
	}
}

// A reply that comes long after the socket was full must not meet the deadline of the write before.
func TestWriteAfterFullSocket(t *testing.T) {
	addr := serve(t, Options{Databases: fake(), WriteTimeout: 300 * time.Millisecond})
	p := dial(t, "tcp", addr)
	long := strings.Repeat("x", 1<<20)
	p.want(t, "+OK\r\n", "SET", "k", long)
	for range 16 {
		p.Write(encode("GET", "k"))
	}
	for range 16 {
		p.hears(t, bulk(long))
	}
	for past := time.Now().Add(500 * time.Millisecond); time.Now().Before(past); time.Sleep(10 * time.Millisecond) {
		// while the gateway's deadline passes; so many at once keep it out of a loop
		p.Write(bytes.Repeat(encode("PING"), 8))
		for range 8 {
			p.hears(t, "+PONG\r\n")
		}
	}
}
