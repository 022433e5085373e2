package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/testutil"
)

// patience bounds what takes milliseconds on a machine that is not busy.
const patience = testutil.Limit

// serve starts a gateway and returns its address.
func serve(t testing.TB, o Options) string {
	t.Helper()
	addr, _ := start(t, o)
	return addr
}

func start(t testing.TB, o Options) (string, *Gateway) {
	t.Helper()
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	g.calm = testCalm
	g.functions.loadTime = patience
	g.scripts.groupTime = testGroupTime
	l := testutil.Listen(t)
	done := make(chan error, 1)
	go func() { done <- g.Serve(l) }()
	t.Cleanup(func() {
		g.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String(), g
}

// newStore is a client of a store over shm in this process.
func newStore(t testing.TB) *client.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := devstore.Start(ctx, devstore.Options{Replicas: 1, Providers: []string{"shm"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	c, err := client.Open(ctx, client.Options{Directory: s.Directory(), Devices: s.Devices()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// peer is a client that sees bytes.
type peer struct {
	net.Conn
	r *bufio.Reader
}

func dial(t testing.TB, network, addr string) *peer {
	t.Helper()
	c, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(2 * patience))
	t.Cleanup(func() { c.Close() })
	return &peer{c, bufio.NewReader(c)}
}

func encode(cmd ...string) []byte {
	b := fmt.Appendf(nil, "*%d\r\n", len(cmd))
	for _, a := range cmd {
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(a), a)
	}
	return b
}

func (p *peer) send(t testing.TB, cmds ...[]string) {
	t.Helper()
	var b []byte
	for _, c := range cmds {
		b = append(b, encode(c...)...)
	}
	if _, err := p.Write(b); err != nil {
		t.Fatal(err)
	}
}

// reply is the next reply's bytes.
func (p *peer) reply(t testing.TB) []byte {
	t.Helper()
	b, err := readReply(nil, p.r)
	if err != nil {
		t.Fatalf("after %q: %v", b, err)
	}
	return b
}

func (p *peer) do(t testing.TB, cmd ...string) string {
	t.Helper()
	p.send(t, cmd)
	return string(p.reply(t))
}

func (p *peer) want(t testing.TB, reply string, cmd ...string) {
	t.Helper()
	if got := p.do(t, cmd...); got != reply {
		t.Errorf("%q: got %.300q, want %.300q", cmd, got, reply)
	}
}

// closed waits for the other side to close.
func (p *peer) closed(t testing.TB) {
	t.Helper()
	if _, err := io.Copy(io.Discard, p.r); err != nil {
		if n, ok := err.(net.Error); ok && n.Timeout() {
			t.Error("the connection stays open")
		}
	}
}

func readReply(b []byte, r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadBytes('\n')
	b = append(b, line...)
	if err != nil {
		return b, err
	}
	if len(line) < 3 {
		return b, fmt.Errorf("line %q", line)
	}
	n, _ := strconv.Atoi(string(line[1 : len(line)-2]))
	switch line[0] {
	case '$', '=':
		if n >= 0 {
			at := len(b)
			b = append(b, make([]byte, n+2)...)
			_, err = io.ReadFull(r, b[at:])
		}
	case '%':
		n *= 2
		fallthrough
	case '*', '~', '>':
		for ; n > 0 && err == nil; n-- {
			b, err = readReply(b, r)
		}
	case '+', '-', ':', ',', '#', '_', '(':
	default:
		err = fmt.Errorf("type %q", line[0])
	}
	return b, err
}

func newWriter() *resp.Writer { return new(resp.Writer) }
