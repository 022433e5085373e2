package gateway

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/testutil"
)

func TestClientKillAndList(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
	a.want(t, "+OK\r\n", "CLIENT", "SETNAME", "anna")
	id := strings.TrimSpace(b.do(t, "CLIENT", "ID"))[1:]
	if r := a.do(t, "CLIENT", "LIST"); !strings.Contains(r, "name=anna") || !strings.Contains(r, "id="+id+" ") {
		t.Errorf("%s", r)
	}
	a.want(t, ":1\r\n", "CLIENT", "KILL", "ID", id)
	b.closed(t)
	a.want(t, "+OK\r\n", "CLIENT", "KILL", a.LocalAddr().String())
	a.closed(t)
}

// A connection that was killed is no client any more, though what serves it may not have seen the end.
func TestKilledIsNoClient(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	a := dial(t, "tcp", addr)
	for range 50 {
		b := dial(t, "tcp", addr)
		id := strings.TrimSpace(b.do(t, "CLIENT", "ID"))[1:]
		kill := []string{"CLIENT", "KILL", "ID", id}
		a.send(t, kill, []string{"CLIENT", "LIST"}, kill)
		if r := a.reply(t); string(r) != ":1\r\n" {
			t.Fatalf("%q", r)
		}
		if r := a.reply(t); strings.Contains(string(r), "id="+id+" ") {
			t.Fatalf("connection %s was killed, and is listed: %s", id, r)
		}
		if r := a.reply(t); string(r) != ":0\r\n" {
			t.Fatalf("killed twice: %q", r)
		}
		b.closed(t)
	}
	for n := range 50 {
		b := dial(t, "tcp", addr)
		id, err := strconv.ParseInt(strings.TrimSpace(b.do(t, "CLIENT", "ID"))[1:], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if _, found := (operated{g}).Kill(id); !found {
			t.Fatalf("connection %d is not found", id)
		}
		if _, again := (operated{g}).Kill(id); again || len(operated{g}.Clients()) != 1 {
			t.Fatalf("connection %d is killed again: %v; %d clients after %d", id, again, len(operated{g}.Clients()), n)
		}
		b.closed(t)
	}
}

// TestClientListShowsUnread: replies that a client leaves unread are in its line, until it has read them.
func TestClientListShowsUnread(t *testing.T) {
	addr, g := start(t, Options{Databases: fake()})
	a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
	id := strings.TrimSpace(a.do(t, "CLIENT", "ID"))[1:]
	value := strings.Repeat("v", 1<<20)
	b.want(t, "+OK\r\n", "SET", "long", value)
	field := func(name string) (n int64) {
		list := b.do(t, "CLIENT", "LIST", "ID", id)
		_, rest, ok := strings.Cut(list, " "+name+"=")
		if _, err := fmt.Sscan(rest, &n); !ok || err != nil {
			t.Fatalf("no %s in %q", name, list)
		}
		return n
	}
	const gets = 14
	for range gets {
		a.send(t, []string{"GET", "long"})
	}
	testutil.Until(t, "replies wait", func() bool {
		return field("omem") > 0 && field("oll") > 0 && field("tot-mem") > 0
	})
	if n := field("omem"); n > int64(g.o.OutputBytes) {
		t.Errorf("omem=%d, of at most %d", n, g.o.OutputBytes)
	}
	for range gets {
		if r := a.reply(t); string(r) != bulk(value) {
			t.Fatalf("%.100q", r)
		}
	}
	testutil.Until(t, "nothing waits", func() bool {
		return field("omem") == 0 && field("oll") == 0 && field("tot-mem") == 0
	})
}
