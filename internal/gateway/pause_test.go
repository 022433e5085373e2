package gateway

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/luascript"
	"github.com/kvd-project/kvd/internal/testutil"
)

// blockedOn is how many clients INFO counts as blocked. In a pause of all commands nobody can ask for that but a
// MONITOR.
func blockedOn(t *testing.T, m *peer) (n int) {
	t.Helper()
	m.send(t, []string{"INFO", "clients"})
	for {
		r := string(m.reply(t))
		if _, rest, ok := strings.Cut(r, "blocked_clients:"); ok {
			fmt.Sscan(rest, &n)
			return n
		}
	}
}

// holdsUp sends a command and reports whether a pause holds it up, and else its reply.
func holdsUp(t *testing.T, p, m *peer, before int, cmd ...string) (held bool, reply string) {
	t.Helper()
	done := make(chan string, 1)
	p.send(t, cmd)
	go func() {
		b, err := readReply(nil, p.r)
		if err != nil {
			b = []byte(err.Error())
		}
		done <- string(b)
	}()
	for until := time.Now().Add(patience); time.Now().Before(until); {
		if blockedOn(t, m) > before {
			t.Cleanup(func() {
				p.Close()
				<-done
			})
			return true, ""
		}
		select {
		case reply = <-done:
			return false, reply
		case <-time.After(time.Millisecond):
		}
	}
	t.Fatalf("%q: neither a reply nor held up", cmd)
	return false, ""
}

// TestPauseLikeRedis compares which commands a pause holds up with a redis-server, and what CLIENT PAUSE says.
func TestPauseLikeRedis(t *testing.T) {
	sock := startRedis(t)
	addr, _ := start(t, Options{Databases: fakes(1), Debug: true})
	const noWrites = "#!lua flags=no-writes\nreturn 1"
	for _, mode := range []string{"WRITE", "all"} {
		cmds := [][]string{{"GET", "a"}, {"SET", "a", "1"}, {"SET", "a"}, {"nosuch"}, {"PING"}, {"DEL", "a"},
			{"LPUSH", "l", "1"}, {"LRANGE", "l", "0", "-1"}, {"BLPOP", "l", "1"},
			{"XREAD", "STREAMS", "s", "0"}, {"PUBLISH", "c", "m"}, {"SPUBLISH", "c", "m"}, {"SUBSCRIBE", "c"},
			{"PFCOUNT", "h"}, {"PFADD", "h", "1"}, {"EVAL", "return 1", "0"}, {"EVAL_RO", "return 1", "0"},
			{"EVAL", noWrites, "0"}, {"EVALSHA", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "0"},
			{"FCALL", "nosuch", "0"}, {"FCALL", "reads", "0"}, {"FCALL_RO", "reads", "0"},
			{"EVAL", "#!lua flags=no-writes\nreturn 'new'", "0"}, {"EVAL", "#!lua flags=no-writes,nosuch\nreturn 1",
				"0"}, {"EVAL", "#!lua flags=no-writes", "0"}, {"EVAL", "#!lua\nreturn 1", "0"},
			{"EVAL_RO", "#!lua flags=no-writes\nreturn 'other'", "0"}, {"EVAL_RO", "#!lua\nreturn 2", "0"},
			{"EVALSHA", luascript.SHA([]byte(noWrites)), "0"},
			{"EVALSHA_RO", luascript.SHA([]byte(noWrites)), "0"}, {"FCALL", "writes", "0"}, {"FCALL_RO", "writes", "0"},
			{"SCRIPT", "LOAD", "return 1"}, {"FUNCTION", "FLUSH"}, {"FLUSHALL"}, {"MULTI"}, {"EXEC"}, {"WATCH", "a"},
			{"AUTH", "x"}, {"HELLO", "2"}, {"QUIT"}, {"RESET"},
			{"CLIENT", "ID"}, {"CLIENT", "UNPAUSE"}, {"GETEX", "a"}, {"SORT", "l"}, {"SORT_RO", "l"},
			{"COPY", "a", "b"}, {"OBJECT", "ENCODING", "a"}, {"MGET", "a", "b"}, {"MSET", "a", "1"}}
		if mode == "all" {
			cmds = cmds[:12]
		}
		for _, cmd := range cmds {
			var got [2]string
			for i, side := range [][2]string{{"tcp", addr}, {"unix", sock}} {
				p, m := dial(t, side[0], side[1]), dial(t, side[0], side[1])
				p.do(t, "FUNCTION", "LOAD", "REPLACE", "#!lua name=l\nredis.register_function{function_name='reads', "+
					"callback=function() return 1 end, flags={'no-writes'}} redis.register_function('writes', "+
					"function() return 2 end)")
				p.do(t, "EVAL", noWrites, "0")
				p.do(t, "DEL", "a", "b", "l", "h")
				m.do(t, "MONITOR")
				before := blockedOn(t, m)
				m.send(t, []string{"CLIENT", "PAUSE", "1000000", mode})
				for r := ""; r != "+OK\r\n"; r = string(m.reply(t)) {
				}
				held, reply := holdsUp(t, p, m, before, cmd...)
				got[i] = fmt.Sprint(held)
				if cmd[0] != "CLIENT" && cmd[0] != "HELLO" {
					got[i] += reply
				}
				m.send(t, []string{"CLIENT", "UNPAUSE"})
				for r := ""; r != "+OK\r\n"; r = string(m.reply(t)) {
				}
				p.Close()
				m.Close()
			}
			if got[0] != got[1] {
				t.Errorf("PAUSE %s: %q: held up, reply: got %q, want %q", mode, cmd, got[0], got[1])
			}
		}
	}
	ours, theirs := dial(t, "tcp", addr), dial(t, "unix", sock)
	for _, cmd := range []string{"CLIENT PAUSE", "CLIENT PAUSE 1 FOO", "CLIENT PAUSE -1", "CLIENT PAUSE x",
		"CLIENT PAUSE 1 WRITE x", "CLIENT PAUSE 0", "CLIENT PAUSE 0 write",
		"CLIENT UNPAUSE x", "CLIENT UNPAUSE", "PING"} {
		if got, want := ours.do(t, strings.Fields(cmd)...), theirs.do(t, strings.Fields(cmd)...); got != want {
			t.Errorf("%s: got %q, want %q", cmd, got, want)
		}
	}
}

// TestPauseHoldsUp: a pause holds up connections in loops and others, in a transaction too, and ends by itself, or when
// it is told to; what was held up then happens, in its order.
func TestPauseHoldsUp(t *testing.T) {
	onBothWays(t, func(t *testing.T, p *peer, g *Gateway) {
		q := dial(t, "tcp", p.RemoteAddr().String())
		p.want(t, "+OK\r\n", "SET", "a", "1")
		q.want(t, "+OK\r\n", "CLIENT", "PAUSE", "1000000", "WRITE")
		p.want(t, bulk("1"), "GET", "a")
		p.send(t, []string{"GET", "a"}, []string{"MULTI"}, []string{"GET", "a"}, []string{"SET", "a", "2"},
			[]string{"EXEC"}, []string{"GET", "a"})
		for _, want := range []string{bulk("1"), "+OK\r\n", "+QUEUED\r\n"} {
			if got := string(p.reply(t)); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		q.waits(t, 1)
		if list := q.do(t, "CLIENT", "LIST"); strings.Count(list, "flags=xb ") != 1 {
			t.Errorf("CLIENT LIST: %q", list)
		}
		q.want(t, ":0\r\n", "CLIENT", "UNBLOCK",
			strings.TrimSpace(strings.Split(strings.Split(q.do(t, "CLIENT", "LIST"), "id=")[1], " ")[0]))
		q.want(t, bulk("1"), "GET", "a")
		q.want(t, "+OK\r\n", "CLIENT", "UNPAUSE")
		for _, want := range []string{"+QUEUED\r\n", "*2\r\n" + bulk("1") + "+OK\r\n", bulk("2")} {
			if got := string(p.reply(t)); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		q.want(t, "+OK\r\n", "CLIENT", "PAUSE", "50")
		q.want(t, "+OK\r\n", "SET", "a", "3") // when that is over
		p.want(t, bulk("3"), "GET", "a")
		if n := g.heed.Load(); n != 0 {
			t.Errorf("heed is %d", n)
		}
	})
}

// TestPauseOfLookups: a lookup that a pause holds up, in a loop too, is made when the pause is over.
func TestPauseOfLookups(t *testing.T) {
	onBothWays(t, func(t *testing.T, p *peer, g *Gateway) {
		m := dial(t, "tcp", p.RemoteAddr().String())
		p.want(t, "+OK\r\n", "SET", "a", "before")
		m.want(t, "+OK\r\n", "MONITOR")
		p.want(t, bulk("before"), "GET", "a")
		m.send(t, []string{"CLIENT", "PAUSE", "1000000"})
		for r := ""; r != "+OK\r\n"; r = string(m.reply(t)) {
		}
		p.send(t, []string{"GET", "a"})
		testutil.Until(t, "the command is held up", func() bool { return g.pausing.clients.Load() == 1 })
		if _, err := g.o.Databases[0].Client.Put(t.Context(), []byte("a"), []byte("after"), client.PutOptions{}); err !=
			nil {
			t.Fatal(err)
		}
		m.send(t, []string{"CLIENT", "UNPAUSE"})
		if got := string(p.reply(t)); got != bulk("after") {
			t.Errorf("got %q", got)
		}
	})
}

// waits waits until so many clients of a gateway are blocked.
func (p *peer) waits(t *testing.T, n int) {
	t.Helper()
	testutil.Until(t, fmt.Sprintf("%d blocked clients", n), func() bool {
		return strings.Contains(p.do(t, "INFO", "clients"), fmt.Sprintf("blocked_clients:%d\r\n", n))
	})
}

// TestPauseOfWaiters: a client that waited for a key before the pause takes nothing during it, although another
// gateway's client pushes.
func TestPauseOfWaiters(t *testing.T) {
	dbs := fakes(1)
	addr, _ := start(t, Options{Databases: dbs})
	other, _ := start(t, Options{Databases: dbs})
	p, q, o := dial(t, "tcp", addr), dial(t, "tcp", addr), dial(t, "tcp", other)
	p.send(t, []string{"BLPOP", "l", "0"})
	q.waits(t, 1)
	q.want(t, "+OK\r\n", "CLIENT", "PAUSE", "1000000", "WRITE")
	o.want(t, ":1\r\n", "RPUSH", "l", "1")
	reply := make(chan []byte, 1)
	go func() {
		b, _ := readReply(nil, p.r)
		reply <- b
	}()
	// So long that the poller has found it, if it did not miss it.
	select {
	case b := <-reply:
		t.Fatalf("%q during the pause", b)
	case <-time.After(3 * maxPollPause):
	}
	o.want(t, ":1\r\n", "LLEN", "l")
	q.want(t, "+OK\r\n", "CLIENT", "UNPAUSE")
	if b := <-reply; !bytes.Equal(b, []byte("*2\r\n"+bulk("l")+bulk("1"))) {
		t.Errorf("got %q", b)
	}
}

// TestPauseLeaksNothing: clients that die while they are held up are gone at once, killed ones too, and a stop waits
// for no pause: what was held up has not happened, and is said not to have.
func TestPauseLeaksNothing(t *testing.T) {
	dbs := fakes(1)
	addr, g := start(t, Options{Databases: dbs})
	q := dial(t, "tcp", addr)
	q.want(t, "+OK\r\n", "CLIENT", "PAUSE", "1000000000", "WRITE")
	var held []*peer
	for i := range 20 {
		p := dial(t, "tcp", addr)
		p.send(t, []string{"CLIENT", "SETNAME", "held"}, []string{"SET", fmt.Sprint("k", i), "1"})
		p.reply(t)
		held = append(held, p)
	}
	q.waits(t, 20)
	for _, p := range held[:10] {
		p.Close()
	}
	q.waits(t, 10)
	killed := 0
	for _, line := range strings.Split(q.do(t, "CLIENT", "LIST"), "\n") {
		if strings.Contains(line, "name=held") && killed < 5 {
			killed++
			id, _, _ := strings.Cut(line[strings.Index(line, "id=")+3:], " ")
			q.want(t, ":1\r\n", "CLIENT", "KILL", "ID", id)
		}
	}
	q.waits(t, 5)
	testutil.Until(t, "6 connections", func() bool { return g.srv.Conns() == 6 })
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	q.Close()
	g.Drain(ctx)
	if ctx.Err() != nil {
		t.Error("Drain waited for the pause")
	}
	refused := 0
	for _, p := range held[10:] {
		if b, err := readReply(nil, p.r); err == nil {
			if refused++; string(b) != "-"+string(errStopping)+"\r\n" {
				t.Errorf("got %q", b)
			}
		}
	}
	if refused != 5 {
		t.Errorf("%d clients were told, want 5", refused)
	}
	for i := range held {
		if _, err := dbs[0].Client.Get(ctx, fmt.Append(nil, "k", i)); err == nil {
			t.Errorf("k%d was written", i)
		}
	}
}

// TestCloseWhilePaused does not wait for the pause.
func TestCloseWhilePaused(t *testing.T) {
	addr, g := start(t, Options{Databases: fakes(1)})
	p, q := dial(t, "tcp", addr), dial(t, "tcp", addr)
	q.want(t, "+OK\r\n", "CLIENT", "PAUSE", "1000000000")
	p.send(t, []string{"GET", "a"})
	testutil.Until(t, "the command is held up", func() bool { return g.pausing.clients.Load() == 1 })
	done := make(chan error, 1)
	go func() { done <- g.Close() }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("Close waits")
	}
}

// slowStore holds up writes.
type slowStore struct {
	client.API
	begun, proceed chan struct{}
}

func (s *slowStore) Put(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error) {
	s.begun <- struct{}{}
	<-s.proceed
	return s.API.Put(ctx, key, value, o)
}

// TestPauseSettles: when CLIENT PAUSE replies, a write that had begun is over.
func TestPauseSettles(t *testing.T) {
	dbs := fakes(1)
	slow := &slowStore{dbs[0].Client, make(chan struct{}), make(chan struct{})}
	dbs[0].Client = slow
	addr, g := start(t, Options{Databases: dbs})
	p, q := dial(t, "tcp", addr), dial(t, "tcp", addr)
	p.send(t, []string{"SET", "a", "1"})
	<-slow.begun
	q.send(t, []string{"CLIENT", "PAUSE", "1000000", "WRITE"})
	testutil.Until(t, "a pause", func() bool { return g.pausing.word() != "" })
	q.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if b, err := q.r.Peek(1); err == nil {
		t.Errorf("it replied %q before the write was over", b)
	}
	q.SetReadDeadline(time.Now().Add(patience))
	close(slow.proceed)
	if got := string(q.reply(t)); got != "+OK\r\n" {
		t.Errorf("got %q", got)
	}
	q.want(t, bulk("1"), "GET", "a")
	if got := string(p.reply(t)); got != "+OK\r\n" {
		t.Errorf("got %q", got)
	}
}
