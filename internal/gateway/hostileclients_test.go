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

// bounded runs f, and checks that the connections that it leaves open cost at most
// max bytes, and that another client is served meanwhile.
func bounded(t *testing.T, o Options, max int64, f func(addr string)) {
	t.Helper()
	addr := serve(t, o)
	p := dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "SET", "a", "1")
	before := testutil.Memory()
	f(addr)
	p.want(t, bulk("1"), "GET", "a")
	testutil.UntilGrown(t, "connections", before, max)
}

func TestFloods(t *testing.T) {
	const conns = 200
	each := func(b string) func(addr string) {
		return func(addr string) {
			for range conns {
				fmt.Fprint(dial(t, "tcp", addr), b)
			}
		}
	}
	t.Run("half-open", func(t *testing.T) { bounded(t, Options{Databases: fake()}, conns*40<<10, each("")) })
	t.Run("slow-loris", func(t *testing.T) {
		bounded(t, Options{Databases: fake()}, conns*60<<10, each("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$10\r\nabc"))
	})
	t.Run("giant lengths", func(t *testing.T) {
		bounded(t, Options{Databases: fake()}, conns*60<<10, each("*1048576\r\n$67108864\r\nabc"))
	})
	t.Run("too long a line", func(t *testing.T) {
		bounded(t, Options{Databases: fake()}, conns*60<<10, each(strings.Repeat("x", 70_000)))
	})
	t.Run("nested arrays", func(t *testing.T) {
		bounded(t, Options{Databases: fake()}, conns*60<<10, each(strings.Repeat("*1\r\n", 10_000)))
	})
	t.Run("unauthenticated", func(t *testing.T) {
		addr := serve(t, Options{Databases: fake(), Password: "x"})
		before := testutil.Memory()
		each("*10\r\n" + strings.Repeat("$16384\r\n"+strings.Repeat("x", 16384)+"\r\n", 9))(addr)
		testutil.UntilGrown(t, "connections", before, conns*400<<10)
	})
	// Values that never end share the budget, and have their time.
	t.Run("unfinished values", func(t *testing.T) {
		const budget, attackers = 48 << 20, 23
		// Those who send all that they have may be late on a busy machine, so they get more time than others here.
		o := Options{Databases: fake(), Budget: netsrv.NewBudget(budget), CommandTimeout: 5 * time.Second}
		var ps []*peer
		bounded(t, o, budget+24<<20+conns*80<<10, func(addr string) {
			head := fmt.Sprintf("*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$%d\r\n", 32<<20)
			body := bytes.Repeat([]byte("x"), 24<<20)
			for range attackers {
				p := dial(t, "tcp", addr)
				go func() {
					fmt.Fprint(p, head)
					p.Write(body) // as much as the gateway takes
				}()
				ps = append(ps, p)
			}
			testutil.Until(t, "they have taken what they can", func() bool { return o.Budget.Used() > budget/2 })
			honest := dial(t, "tcp", addr)
			for _, n := range []int{10, 100 << 10, 1 << 20 >> 2} {
				v := strings.Repeat("v", n)
				honest.want(t, "+OK\r\n", "SET", "honest", v)
				honest.want(t, bulk(v), "GET", "honest")
			}
		})
		for _, p := range ps { // some are told, some reset
			io.Copy(io.Discard, p)
		}
		testutil.Until(t, "their memory is back", func() bool { return o.Budget.Used() == 0 })
	})
	// Half a command has its time in a loop, too.
	t.Run("half a command", func(t *testing.T) {
		twoProcessors(t)
		addr, g := start(t, Options{Databases: fake(), CommandTimeout: 300 * time.Millisecond})
		p := dial(t, "tcp", addr)
		p.want(t, "+PONG\r\n", "PING")
		if testCalm == 1 {
			testutil.Until(t, "it is in a loop", func() bool { return g.loops.Conns() == 1 })
		}
		fmt.Fprint(p, "*2\r\n$3\r\nGET\r\n$1\r\n")
		p.closed(t)
		p = dial(t, "tcp", addr) // one that has said nothing has all the time
		idle := dial(t, "tcp", addr)
		for range 5 {
			for _, c := range "*1\r\n$4\r\nPING\r\n" {
				fmt.Fprint(p, string(c))
			}
			if got := string(p.reply(t)); got != "+PONG\r\n" {
				t.Fatalf("%q", got)
			}
			time.Sleep(100 * time.Millisecond)
		}
		idle.want(t, "+PONG\r\n", "PING")
	})
}

// TestOthersMemory: a command that waits for memory that others have is not late.
func TestOthersMemory(t *testing.T) {
	o := Options{Databases: fake(), Budget: netsrv.NewBudget(1 << 20), CommandTimeout: time.Second}
	p := dial(t, "tcp", serve(t, o))
	p.want(t, "+PONG\r\n", "PING")
	for n := int64(512 << 10); n >= 64<<10; n /= 2 {
		s := o.Budget.Share(func(int64) {})
		if !s.Try(n) {
			t.Fatalf("no %d bytes", n)
		}
		time.AfterFunc(3*o.CommandTimeout, func() { s.Give(n) })
	}
	p.want(t, "+OK\r\n", "SET", "a", strings.Repeat("v", 200<<10))
}

// TestReaderStops: a client that asks and does not read costs its share, is
// disconnected after the write timeout, and takes nothing from others.
func TestReaderStops(t *testing.T) {
	const limit = 1 << 20
	addr, g := start(t, Options{Databases: fake(), OutputBytes: limit, WriteTimeout: 300 * time.Millisecond})
	p := dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "SET", "a", strings.Repeat("x", 100_000))
	bad := dial(t, "tcp", addr)
	req := bytes.Repeat(encode("GET", "a"), 1000)
	var most int64
	gone := make(chan error, 1)
	go func() {
		for {
			if _, err := bad.Write(req); err != nil {
				gone <- err
				return
			}
		}
	}()
	for done := false; !done; {
		select {
		case <-gone:
			done = true
		default:
			most = max(most, g.m.queued.Load())
			if r := p.do(t, "STRLEN", "a"); r != ":100000\r\n" {
				t.Fatalf("%q", r)
			}
		}
	}
	if most > 4*limit {
		t.Errorf("%d bytes were queued", most)
	}
	if most == 0 {
		t.Error("nothing was queued")
	}
	testutil.Until(t, "the queue is gone", func() bool { return g.m.queued.Load() == 0 })
}

// TestWriteBeforeRead: a client may send a long pipeline before it reads anything.
func TestWriteBeforeRead(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	p.want(t, "+OK\r\n", "SET", "a", strings.Repeat("x", 1000))
	const n = 10_000 // 10 MB of replies: more than sockets hold
	if _, err := p.Write(bytes.Repeat(encode("GET", "a"), n)); err != nil {
		t.Fatal(err)
	}
	want := bulk(strings.Repeat("x", 1000))
	for i := range n {
		if got := string(p.reply(t)); got != want {
			t.Fatalf("reply %d: %.100q", i, got)
		}
	}
}

func TestIdleTimeout(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake(), IdleTimeout: 50 * time.Millisecond}))
	p.want(t, "+PONG\r\n", "PING")
	p.closed(t)
}

func TestKeysBound(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake(), OutputBytes: 100_000}))
	for i := range 2000 {
		p.send(t, []string{"SET", fmt.Sprintf("%0200d", i), ""})
	}
	for range 2000 {
		p.reply(t)
	}
	if r := p.do(t, "KEYS", "*"); !strings.Contains(r, "use SCAN") {
		t.Errorf("%.100q", r)
	}
}
