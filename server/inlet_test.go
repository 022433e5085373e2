package server

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
)

// frame is one of HTTP/2 (RFC 9113).
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload)<<8)|uint32(kind))
	b = append(b, flags)
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}

// greeting is how HTTP/2 begins.
func greeting() []byte {
	return append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), frame(4, 0, 0, nil)...)
}

// request is the beginning of one that announces a message of so many bytes and sends some.
func request(stream uint32, path string, announced, sent int) []byte {
	var head []byte
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", path}, {":authority", "d"},
		{"content-type", "application/grpc"}, {"te", "trailers"}} {
		head = append(append(head, 0, byte(len(h[0]))), h[0]...)
		head = append(append(head, byte(len(h[1]))), h[1]...)
	}
	b := frame(1, 4, stream, head)
	body := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(announced)), make([]byte, sent)...)
	for part := range slices.Chunk(body, 16<<10) {
		b = append(b, frame(0, 0, stream, part)...)
	}
	return b
}

// strangers are connections to a directory node that speak for themselves.
type strangers []net.Conn

func (p *strangers) open(t *testing.T, addr string, say []byte) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(2 * patience))
	t.Cleanup(func() { c.Close() })
	*p = append(*p, c)
	go func() { _, _ = c.Write(say) }() // it may be hung up on
	return c
}

// p99 is of n calls, one after the other.
func p99(t *testing.T, c dirpb.DirectoryClient, n int) time.Duration {
	t.Helper()
	var took []time.Duration
	for range n {
		began := time.Now()
		if _, err := c.Status(testCtx(t), &dirpb.StatusRequest{}); err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[n*99/100]
}

// TestInletIsBounded: beside thousands of idle connections and hundreds of hostile ones a client of the directory is
// served as before, and they take no more memory than they are taken to.
func TestInletIsBounded(t *testing.T) {
	const (
		idle, hostile, streams = 1200, 150, 4
		half                   = 128 << 10 // bytes sent of each half request
		each                   = 48 << 10  // bytes that a connection takes
	)
	n := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, Lease: forever}))
	client := dial(t, n)
	quiet := p99(t, client, 500)
	before := testutil.Memory()
	var all strangers
	stats := func() netsrv.DoorStats { return n.inlet.door.Stats() }
	for range idle { // all are there before the first greets
		all.open(t, n.Addr(), nil)
	}
	testutil.Until(t, "all are there", func() bool { return stats().Handshakes >= idle })
	for _, c := range all {
		_, _ = c.Write(greeting())
	}
	testutil.Until(t, "all have greeted", func() bool { s := stats(); return s.Conns >= idle && s.Handshakes == 0 })
	t.Logf("%d idle connections take %.1f MB", idle, float64(testutil.Memory()-before)/1e6)
	if refused := stats().Refused; refused != [netsrv.NumReasons]uint64{} {
		t.Errorf("of %d clients that call at once some are refused: %v", idle, refused)
	}
	const path = dirpb.Directory_Status_FullMethodName
	var halves, heads []byte
	for i := range uint32(streams) {
		halves = append(halves, request(2*i+1, path, maxMessageBytes, half)...)
	}
	for i := range uint32(maxStreams) {
		heads = append(heads, request(2*i+1, path, maxMessageBytes, 0)...)
	}
	for _, say := range [][]byte{
		nil, greeting()[:10], append(greeting(), request(1, path, 1<<31, 1000)...), append(greeting(), halves...),
	} {
		for range hostile {
			all.open(t, n.Addr(), say)
		}
	}
	for range hostile / 15 {
		all.open(t, n.Addr(), append(greeting(), heads...))
	}
	weigh := func() (requests, weight int64) {
		n.inlet.mu.Lock()
		defer n.inlet.mu.Unlock()
		return int64(n.inlet.mu.half.Len()), n.inlet.mu.bytes
	}
	const requests = hostile*streams + hostile/15*maxStreams
	testutil.Until(t, "half requests arrive", func() bool {
		n, weight := weigh()
		return n >= requests && weight >= requests*halfCost+hostile*streams*half
	})
	attacked := p99(t, client, 500)
	_, weight := weigh()
	bound := (idle+4*hostile)*each + weight
	grown := testutil.UntilGrown(t, "connections", before, int64(bound))
	t.Logf("with %d hostile ones: %.1f MB, bound %.1f MB; p99 of a call %v, quiet %v; %+v", 4*hostile,
		float64(grown)/1e6, float64(bound)/1e6, attacked, quiet, stats())
	for _, c := range all {
		c.Close()
	}
	testutil.Until(t, "all have gone and are forgotten", func() bool {
		n.inlet.mu.Lock()
		defer n.inlet.mu.Unlock()
		return stats().Conns <= 1 && n.inlet.mu.half.Len() == 0 && n.inlet.mu.bytes == 0 && len(n.inlet.mu.conns) <= 1
	})
}

// chatter is a connection, and a listener with that one, which sends as much as is read.
type chatter struct {
	net.Conn
	port   int
	closed bool
}

func (c *chatter) Accept() (net.Conn, error) { return c, nil }
func (c *chatter) Addr() net.Addr            { return c.LocalAddr() }
func (c *chatter) LocalAddr() net.Addr       { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }
func (c *chatter) RemoteAddr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: c.port}
}
func (c *chatter) SetDeadline(time.Time) error { return nil }
func (c *chatter) Read(p []byte) (int, error)  { return len(p), nil }

func (c *chatter) Close() error {
	c.closed = true
	return nil
}

// Clients that all call at once, of whose requests only the heads are there, lose no connection, nor do they when
// others send halves of requests until their memory is used up: those give way, first those that have sent most or
// begun most. Time stands still: on a busy machine this takes longer than a half request may.
func TestHalfRequestsGiveWay(t *testing.T) { synctest.Test(t, testHalfRequestsGiveWay) }

func testHalfRequestsGiveWay(t *testing.T) {
	const clients, hogs = 9000, 200
	in, err := newInlet(nil, netsrv.Limits{MaxConns: 2 * clients})
	if err != nil {
		t.Fatal(err)
	}
	port := 0
	type caller struct {
		*chatter
		conn *inletConn
		ctx  context.Context // of the connection
		rpcs []context.Context
	}
	connect := func() *caller {
		port++
		c := &caller{chatter: &chatter{port: port}}
		in.Listener = in.door.Listen(c.chatter)
		x, err := in.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = x.SetDeadline(time.Time{}) // the handshake is over
		c.conn = x.(*inletConn)
		c.ctx = in.TagConn(t.Context(), &stats.ConnTagInfo{LocalAddr: x.LocalAddr(), RemoteAddr: x.RemoteAddr()})
		return c
	}
	begin := func(c *caller) {
		t.Helper()
		ctx := in.TagRPC(c.ctx, nil)
		c.rpcs = append(c.rpcs, ctx)
		if in.HandleRPC(ctx, &stats.Begin{}); in.mu.bytes > maxHalfBytes {
			t.Fatalf("half requests of %d bytes", in.mu.bytes)
		}
	}
	send := func(c *caller, n int) {
		t.Helper()
		p := make([]byte, 16*connBuffer)
		for ; n > 0 && !c.closed; n -= len(p) {
			if _, err := c.conn.Read(p); err != nil {
				t.Fatal(err)
			}
		}
		if in.mu.bytes > maxHalfBytes {
			t.Fatalf("half requests of %d bytes", in.mu.bytes)
		}
	}
	arrive := func(c *caller) {
		for _, ctx := range c.rpcs {
			in.HandleRPC(ctx, &stats.InPayload{})
			in.HandleRPC(ctx, &stats.End{})
		}
		c.rpcs = nil
	}
	all := make([]*caller, clients)
	for i := range all {
		all[i] = connect()
		begin(all[i])
		send(all[i], 1<<20)
		arrive(all[i])
		begin(all[i])
	}
	hog := func(do func(c *caller)) (gone int) {
		var mine []*caller
		for range hogs {
			c := connect()
			mine = append(mine, c)
			do(c)
		}
		for _, c := range mine {
			if arrive(c); c.closed {
				gone++
			}
		}
		return gone
	}
	for name, do := range map[string]func(c *caller){
		"sent": func(c *caller) { begin(c); send(c, maxMessageBytes/2) },
		"begun": func(c *caller) {
			for range maxStreams {
				begin(c)
			}
		},
	} {
		if gone := hog(do); gone == 0 || gone == hogs {
			t.Errorf("of %d hostile connections that have %s most, %d gave way", hogs, name, gone)
		}
	}
	for i, c := range all {
		if c.closed {
			t.Fatalf("client %d lost its connection", i)
		}
		arrive(c)
	}
	if in.mu.bytes != 0 || in.mu.half.Len() != 0 {
		t.Errorf("%d half requests of %d bytes are left", in.mu.half.Len(), in.mu.bytes)
	}
}

// TestInletAnnounced: a message that is announced too long is refused before any of it is kept.
func TestInletAnnounced(t *testing.T) {
	n := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, Lease: forever}))
	_, err := dial(t, n).RegisterNode(testCtx(t), &dirpb.RegisterNodeRequest{
		Name: string(make([]byte, maxMessageBytes+1))})
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%.200v", err)
	}
}

// TestInletHandshakes: TLS handshakes that do not go on give way to each other, and to a client that has a certificate;
// over the limit on connections nobody comes in, and those who are in are served.
func TestInletHandshakes(t *testing.T) {
	conf := testTLS(t)
	n := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, Lease: forever, TLS: conf, MaxConns: 20}))
	connect := func() dirpb.DirectoryClient {
		conn, err := grpc.NewClient("passthrough:///"+n.Addr(),
			grpc.WithTransportCredentials(credentials.NewTLS(clientTLS(conf))))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return dirpb.NewDirectoryClient(conn)
	}
	first := connect()
	p99(t, first, 1)
	var all strangers
	before := testutil.Memory()
	for i := range 400 {
		all.open(t, n.Addr(), []byte{22, 3, 1, 2, 0, 1}[:i%7])
	}
	testutil.Until(t, "they give way", func() bool {
		return n.inlet.door.Stats().Refused[netsrv.ReasonHandshake] >= 380
	})
	p99(t, connect(), 1)
	t.Logf("400 half handshakes take %.1f MB: %+v", float64(testutil.Memory()-before)/1e6, n.inlet.door.Stats())
	var in []*tls.Conn
	greets := clientTLS(conf)
	greets.NextProtos = []string{"h2"}
	for range 18 {
		c, err := tls.Dial("tcp", n.Addr(), greets)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write(greeting()) // it may be hung up on
		in = append(in, c)
	}
	testutil.Until(t, "all places are taken", func() bool {
		s := n.inlet.door.Stats()
		return s.Conns == 20 && s.Handshakes == 0
	})
	c := all.open(t, n.Addr(), nil)
	if _, err := io.ReadFull(c, make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("over the limit: %v", err)
	}
	if n.inlet.door.Stats().Refused[netsrv.ReasonFull] == 0 {
		t.Error("nothing is counted as refused")
	}
	p99(t, first, 1)
	runtime.KeepAlive(in)
}
