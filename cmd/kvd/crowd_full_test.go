package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma/driver"
)

const (
	fullIdle, fullHostile = 10_000, 1000
	idleProcesses         = 4
	crowdWindow           = 600 * time.Millisecond
	crowdPassword         = "right"
)

// besieged is a listener of the full test of crowds.
type besieged struct {
	name, counted string // counted: in kvd_listener_connections
	p             *process
	addr          string
	asks          *tls.Config // of the process's metrics
	idle          gang        // but for N
	gangs         []gang
	// ask is a question of an honest client, which was there before the crowd; fresh makes another client, and lets it
	// ask.
	ask, fresh func() error
	bound      int64 // bytes, documented
	few        bool  // fewer than fullIdle connections are within its limits
}

// TestCrowdsInFull puts 10,000 idle and 1,000 hostile connections before each kind of listener, one after the other,
// and prints what an honest client and the process's memory see of it.
func TestCrowdsInFull(t *testing.T) {
	rounds, err := strconv.Atoi(os.Getenv("KVD_CROWD"))
	if err != nil || rounds < 1 {
		t.Skip("it takes two minutes, four processors and nobody beside it: make test-crowd")
	}
	servers, client, crowd := split(t)
	var table strings.Builder
	fmt.Fprintf(&table, "%-10s %-13s %-22s %-33s %s\n", "listener", "connections", "memory, MB",
		"p99 of an honest client, µs", "ratio")
	fmt.Fprintf(&table, "%-10s %6s %6s %6s %7s %7s %8s %8s %8s %7s\n", "", "tried", "open", "before", "at most",
		"after", "quiet", "idle", "crowd", "")
	var clear *clearStore
	var secret *tlsStore
	on(t, servers, func() { clear, secret = newClearStore(t), newTLSStore(t) })
	stayOn(t, client)
	for _, b := range []besieged{
		// The memory node's small listeners first: what a crowd before its large one leaves lets the heap grow for a
		// while.
		clear.redis(t), clear.memcached(t), secret.tls(t), clear.http(t), clear.health(t), clear.tcp(t), clear.grpc(t),
		clear.raft(t),
	} {
		t.Run(b.name, func(t *testing.T) { b.besiege(t, crowd, rounds, &table) })
	}
	t.Logf("%d processors: %d for the servers, %d for the honest client, %d for the crowd (0: any)\n%s",
		runtime.NumCPU(), cpusOf(servers), cpusOf(client), cpusOf(crowd), table.String())
}

func cpusOf(s *unix.CPUSet) int {
	if s == nil {
		return 0
	}
	return s.Count()
}

// windowP99 is of the questions that are asked one after the other in a window of time.
func (b *besieged) windowP99(t *testing.T) time.Duration {
	t.Helper()
	var took []time.Duration
	for until := time.Now().Add(crowdWindow); time.Now().Before(until); {
		began := time.Now()
		if err := b.ask(); err != nil {
			t.Fatalf("an honest client: %v", err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)*99/100]
}

func (b *besieged) windows(t *testing.T, n int) (p99 []time.Duration) {
	t.Helper()
	for range n {
		p99 = append(p99, b.windowP99(t))
	}
	return p99
}

func median(d []time.Duration) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[len(d)/2]
}

// openConns is how many connections the process says that it has.
func (b *besieged) openConns(t *testing.T) int {
	t.Helper()
	m := regexp.MustCompile(`(?m)^kvd_listener_connections\{listener="` + b.counted + `"\} (\d+)$`).FindStringSubmatch(
		metricsPage(t, b.p.kv["http"], b.asks))
	if m == nil {
		t.Fatalf("no count of connections of %s", b.counted)
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

func (b *besieged) besiege(t *testing.T, cpus *unix.CPUSet, rounds int, table *strings.Builder) {
	pid := b.p.cmd.Process.Pid
	b.windowP99(t) // warms up
	before := anonymous(t, pid)
	quiet := b.windows(t, 2)

	var mobs []*mobProcess
	greets := b.idle.Greet
	for i := range idleProcesses {
		g := b.idle
		g.N, g.Reads = fullIdle/idleProcesses, true
		if len(greets) >= fullIdle {
			g.Greet = greets[i*g.N:][:g.N]
		}
		mobs = append(mobs, startMob(t, cpus, mob{Addr: b.addr, Idle: g}))
	}
	only, hostile := os.Getenv("KVD_GANG"), 0
	b.gangs = slices.DeleteFunc(b.gangs, func(g gang) bool { return !strings.HasPrefix(g.Name, only) })
	for _, g := range b.gangs {
		hostile += g.N
	}
	if only == "" && hostile != fullHostile {
		t.Fatalf("%d hostile connections, want %d", hostile, fullHostile)
	}
	there := 0
	for _, m := range mobs {
		there += m.hear("idle")[0]
	}
	peak, open := anonymous(t, pid), b.openConns(t)
	if !b.few && open < fullIdle {
		t.Errorf("%d idle connections are open, want %d", open, fullIdle)
	}
	foes := startMob(t, cpus, mob{Addr: b.addr, Gangs: b.gangs})
	foes.hear("idle")
	var idle, crowded []time.Duration
	var did []int
	for range rounds { // in turns, as a machine is not always equally busy
		idle = append(idle, b.windowP99(t))
		foes.tell("go")
		b.windowP99(t) // until each of the crowd has done its first deed
		crowded = append(crowded, b.windowP99(t))
		peak, open = max(peak, anonymous(t, pid)), max(open, b.openConns(t))
		if err := b.fresh(); err != nil {
			t.Errorf("an honest client that comes beside the crowd: %v", err)
		}
		foes.tell("rest")
		did = foes.hear("rested")
	}
	for _, m := range append(mobs, foes) {
		_ = m.in.Close()
	}
	for until := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if n := b.openConns(t); n < 50 || time.Now().After(until) {
			break
		}
	}
	quiet = append(quiet, b.windows(t, 2)...)
	after := anonymous(t, pid)
	q, c := median(quiet), median(crowded)
	mb := func(n int64) float64 { return float64(n) / 1e6 }
	fmt.Fprintf(table, "%-10s %6d %6d %6.1f %7.1f %7.1f %8d %8d %8d %7.1f\n", b.name, fullIdle+hostile, open,
		mb(before), mb(peak), mb(after),
		q.Microseconds(), median(idle).Microseconds(), c.Microseconds(),
		float64(c)/float64(median(slices.Concat(quiet, idle))))
	t.Logf("%d of %d idle connections came, %d calls of hostile ones, which did %d deeds; quiet %v, idle %v, crowd %v",
		there, fullIdle, did[0], did[1], quiet, idle, crowded)
	if grown := peak - before; grown > b.bound {
		t.Errorf("%d bytes more, at most %d are due", grown, b.bound)
	}
}

// clearStore is a store without TLS.
type clearStore struct {
	dir, follower, node, redisGW, memcachedGW *process
	raftAddr                                  string
}

func newClearStore(t *testing.T) *clearStore {
	t.Helper()
	env, _ := runtimeDir(t)
	s := &clearStore{raftAddr: freeAddr(t)}
	env = append(env, "GOGC=100") // bounds are of what is in use, of which a directory node lets more be garbage
	web, most := "--http-listen=127.0.0.1:0", "--max-connections=12000"
	const patient = "--election-timeout=3s" // on a busy machine leaders are deposed without a crowd
	s.dir = start(t, env, "directory", "--id=d1", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5m", patient, web, most)
	s.follower = start(t, env, "directory", "--id=d2", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen="+s.raftAddr, "--join="+s.dir.kv["directory"], "--lease=5m", patient, web)
	s.node = start(t, env, "memnode", "--name=m", "--directory="+s.dir.kv["directory"], "--memory=256MiB",
		"--shm-socket=off", "--health-listen=127.0.0.1:0", web)
	createNamespace(t, s.dir.kv["directory"], "cache", nil)
	t.Setenv("KVD_PASSWORD", crowdPassword)
	s.redisGW = start(t, env, "gateway", "--directory="+s.dir.kv["directory"], "--listen=127.0.0.1:0",
		"--listen-memcached=off", web, most, "--buffer-memory=64MiB")
	if err := os.Unsetenv("KVD_PASSWORD"); err != nil {
		t.Fatal(err)
	}
	s.memcachedGW = start(t, env, "gateway", "--directory="+s.dir.kv["directory"], "--listen=off",
		"--listen-memcached=127.0.0.1:0", web, most, "--buffer-memory=64MiB")
	return s
}

// asks is an honest client over conn that wants a reply to what it says.
func asks(c net.Conn, say, reply []byte) func() error {
	r := bufio.NewReader(c)
	got := make([]byte, len(reply))
	return func() error {
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if _, err := c.Write(say); err != nil {
			return err
		}
		if n, err := readFull(r, got); err != nil || !bytes.Equal(got, reply) {
			return fmt.Errorf("%.60q: %.200q, %w", say, got[:n], cmpErr(err))
		}
		return nil
	}
}

func readFull(r *bufio.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var k int
		k, err = r.Read(p[n:])
		n += k
	}
	return n, err
}

func cmpErr(err error) error {
	if err == nil {
		return errors.New("another reply")
	}
	return err
}

// dialed is the question of a client that connects now, after what hello says and hears.
func dialed(dial func() (net.Conn, error), hello, welcome, say, reply string) (ask func() error, c net.Conn,
	err error) {
	if c, err = dial(); err != nil {
		return nil, nil, err
	}
	if hello != "" {
		if err := asks(c, []byte(hello), []byte(welcome))(); err != nil {
			return nil, nil, errors.Join(err, c.Close())
		}
	}
	return asks(c, []byte(say), []byte(reply)), c, nil
}

// speak fills in an honest client that writes and reads.
func (b *besieged) speak(t *testing.T, dial func() (net.Conn, error), hello, welcome, say, reply string) {
	t.Helper()
	ask, c, err := dialed(dial, hello, welcome, say, reply)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	b.ask = ask
	b.fresh = func() error {
		ask, c, err := dialed(dial, hello, welcome, say, reply)
		if err != nil {
			return err
		}
		return errors.Join(ask(), c.Close())
	}
}

func dialPlain(addr string) func() (net.Conn, error) {
	return func() (net.Conn, error) { return net.DialTimeout("tcp", addr, patience) }
}

const often = 100 * time.Millisecond

func flood(n int) gang { return gang{Name: "come and go", N: n, Leaves: true, Every: often} }

func (s *clearStore) redis(t *testing.T) besieged {
	auth := string(redisCommand("AUTH", crowdPassword))
	greet := gang{Greet: [][]byte{[]byte(auth)}, Welcome: len("+OK\r\n")}
	b := besieged{name: "redis", counted: "redis", p: s.redisGW, addr: s.redisGW.kv["redis"], idle: greet,
		bound: (fullIdle+fullHostile)*(100<<10) + 2*(64<<20)}
	deaf := func(name string, n int, say []byte) gang {
		return gang{Name: name, N: n, Greet: greet.Greet, Welcome: greet.Welcome, Say: say, Holds: 20 * time.Second,
			Every: time.Second}
	}
	b.gangs = []gang{
		{Name: "half a command", N: 150, Say: []byte("*2\r\n$3\r\nGE"), Holds: time.Minute, Every: time.Second},
		{Name: "a byte a second", N: 150, Say: []byte("*1\r\n$4\r\nPING\r\n"), Slow: true, Every: time.Second},
		{Name: "garbage", N: 150, Say: []byte("\x00\xff" + strings.Repeat("x", 5000)), Reads: true, Every: time.Second},
		deaf("large replies that nobody reads", 150, bytes.Repeat(redisCommand("GET", "big"), 4)),
		deaf("many replies that nobody reads", 50, bytes.Repeat([]byte("PING\r\n"), 5000)),
		{Name: "wrong passwords", N: 150, Say: redisCommand("AUTH", "wrong"), Reads: true, Every: time.Second},
		flood(200),
	}
	h := newHonest(t, b.addr)
	h.want("+OK\r\n+OK\r\n+OK\r\n", slicesConcat([]byte(auth), redisCommand("SET", "k", "v"),
		redisCommand("SET", "big", strings.Repeat("v", 1<<20))))
	b.speak(t, dialPlain(b.addr), auth, "+OK\r\n", string(redisCommand("GET", "k")), "$1\r\nv\r\n")
	return b
}

func (s *clearStore) memcached(t *testing.T) besieged {
	b := besieged{name: "memcached", counted: "memcached", p: s.memcachedGW, addr: s.memcachedGW.kv["memcached"],
		idle:  gang{Greet: [][]byte{[]byte("mn\r\n")}, Welcome: len("MN\r\n")},
		bound: (fullIdle+fullHostile)*(100<<10) + 2*(64<<20)}
	b.gangs = []gang{
		{Name: "half a command", N: 150, Say: []byte("ge"), Holds: time.Minute, Every: time.Second},
		{Name: "half a value", N: 100, Say: []byte("set h 0 0 1000000\r\nhalf"), Holds: time.Minute,
			Every: time.Second},
		{Name: "a byte a second", N: 150, Say: []byte("get k\r\n"), Slow: true, Every: time.Second},
		{Name: "garbage", N: 200, Say: []byte("\x00\xff" + strings.Repeat("x", 5000) + "\r\n"), Reads: true,
			Every: time.Second},
		{Name: "large replies that nobody reads", N: 150, Say: []byte("get big big big big\r\n"),
			Holds: 20 * time.Second, Every: time.Second},
		{Name: "many replies that nobody reads", N: 50, Say: bytes.Repeat([]byte("version\r\n"), 5000),
			Holds: 20 * time.Second, Every: time.Second},
		flood(200),
	}
	big := strings.Repeat("v", 1<<19)
	newHonest(t, b.addr).want("STORED\r\nSTORED\r\n", fmt.Appendf(nil, "set k 0 0 1\r\nv\r\nset big 0 0 %d\r\n%s\r\n",
		len(big), big))
	b.speak(t, dialPlain(b.addr), "", "", "get k\r\n", "VALUE k 0 1\r\nv\r\nEND\r\n")
	return b
}

// tlsStore is one where everybody has a certificate.
type tlsStore struct {
	gw    *process
	files config.TLS // of a client
	cfg   *tls.Config
	asks  *tls.Config // an operator's, for metrics
}

func newTLSStore(t *testing.T) *tlsStore {
	t.Helper()
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap"}, files.flags("directory")...)...)
	start(t, env, append([]string{"memnode", "--name=m", "--directory=" + d.kv["directory"], "--memory=64MiB",
		"--shm-socket=off"}, files.flags("memnode")...)...)
	createNamespace(t, d.kv["directory"], "cache", files.load("operator"), files.identity("gateway"))
	s := &tlsStore{files: files.files("client")}
	s.gw = start(t, env,
		append([]string{"gateway", "--directory=" + d.kv["directory"], "--listen=off", "--listen-memcached=off",
			"--listen-tls=127.0.0.1:0",
			"--http-listen=127.0.0.1:0", "--insecure", "--max-connections=12000", "--buffer-memory=64MiB"},
			files.flags("gateway")...)...)
	cfg, err := mobTLS(s.files)
	if err != nil {
		t.Fatal(err)
	}
	s.cfg = cfg
	if s.asks, err = mobTLS(files.files("operator")); err != nil {
		t.Fatal(err)
	}
	return s
}

// clientHello is what a TLS client says first.
func clientHello(t *testing.T, cfg *tls.Config) []byte {
	t.Helper()
	here, there := net.Pipe()
	defer here.Close()
	go tls.Client(there, cfg).Handshake() //nolint:errcheck // it is cut off
	b := make([]byte, 4<<10)
	n, err := here.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

func (s *tlsStore) tls(t *testing.T) besieged {
	b := besieged{name: "tls", counted: "redis", p: s.gw, addr: s.gw.kv["tls"], asks: s.asks,
		idle:  gang{Files: s.files, Greet: [][]byte{[]byte("PING\r\n")}, Welcome: len("+PONG\r\n")},
		bound: (fullIdle+fullHostile)*(160<<10) + 2*(64<<20)}
	b.gangs = []gang{
		{Name: "silence", N: 150, Holds: time.Minute, Every: time.Second},
		{Name: "half a hello", N: 150, Say: []byte("\x16\x03\x01\x40\x00" + strings.Repeat("x", 1000)),
			Holds: time.Minute, Every: time.Second},
		{Name: "a hello alone", N: 150, Say: clientHello(t, s.cfg), Holds: time.Second / 2, Every: time.Second / 2},
		{Name: "a byte a second", N: 100, Say: clientHello(t, s.cfg), Slow: true, Every: time.Second},
		{Name: "garbage", N: 150, Say: []byte("GET / HTTP/1.1\r\n\r\n"), Reads: true, Every: time.Second},
		{Name: "handshakes", N: 150, Files: s.files, Leaves: true, Every: time.Second},
		flood(150),
	}
	dial := func() (net.Conn, error) { return tls.Dial("tcp", b.addr, s.cfg) }
	b.speak(t, dial, string(redisCommand("SET", "k", "v")), "+OK\r\n", string(redisCommand("GET", "k")), "$1\r\nv\r\n")
	return b
}

// tcpGreetings are those of n connections of sessions that live, and what reads a MiB of a region again and again,
// unless somebody reads the replies.
func (s *clearStore) tcpGreetings(t *testing.T, n int) (greet [][]byte, readBig []byte) {
	t.Helper()
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{s.dir.kv["directory"]}})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	var session uint32
	for len(greet) < n {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err := dir.CallOnce(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
			rep, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "cache", Client: "crowd"})
			session = rep.GetSessionId()
			for lane := range rep.GetMaxLanes() {
				hello := append([]byte("KVDt\x02\x00"), byte(len(rep.GetToken())+4), 0)
				greet = append(greet, binary.LittleEndian.AppendUint32(append(hello, rep.GetToken()...), lane))
			}
			return err
		})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	seen := errors.New("seen")
	err = dir.WatchMap(ctx, session, 0, func(m *dirpb.Map) error {
		for _, p := range m.GetPgs() {
			for _, k := range p.GetMembers()[0].GetKeys() {
				if k.GetProvider() == "tcp" && p.GetState() == dirpb.PGState_PG_ACTIVE {
					readBig = tcpReads(k.GetHeapRkey(), k.GetHeapBase(), 1<<20, 40)
					return seen
				}
			}
		}
		return nil
	})
	if !errors.Is(err, seen) {
		t.Fatalf("the map: %v", err)
	}
	return greet[:n], readBig
}

// tcpReads is a doorbell of so many READs; rdma/tcp/wire.go has the bytes.
func tcpReads(rkey, addr uint64, n uint32, reads int) []byte {
	b := append([]byte{1, 0}, byte(reads), byte(reads>>8))
	b = binary.LittleEndian.AppendUint32(b, uint32(24*reads))
	for range reads {
		b = append(b, byte(driver.OpRead), byte(n), byte(n>>8), byte(n>>16))
		b = binary.LittleEndian.AppendUint64(b, rkey)
		b = binary.LittleEndian.AppendUint64(b, addr)
	}
	return b
}

func (s *clearStore) tcp(t *testing.T) besieged {
	const welcome = 20
	greet, readBig := s.tcpGreetings(t, fullIdle+fullHostile)
	foes := greet[fullIdle:]
	b := besieged{name: "tcp", counted: "tcp", p: s.node, addr: s.node.kv["tcp"],
		idle: gang{Greet: greet[:fullIdle], Welcome: welcome}, bound: fullIdle*(24<<10) + fullHostile*(220<<10)}
	inside := func(name string, say []byte, lanes int) gang {
		return gang{Name: name, N: 150, Greet: foes[lanes:][:150], Welcome: welcome, Say: say, Holds: 20 * time.Second,
			Every: time.Second}
	}
	b.gangs = []gang{
		{Name: "half a hello", N: 200, Say: []byte("KVD"), Holds: time.Minute, Every: time.Second},
		{Name: "a byte a second", N: 100, Say: foes[999], Slow: true, Every: time.Second},
		inside("garbage", bytes.Repeat([]byte{0xff}, 32), 0),
		inside("half a request", readBig[:20], 150),
		inside("large replies that nobody reads", readBig, 300),
		{Name: "no such session", N: 100, Say: append([]byte("KVDt\x02\x00\x30\x00"), make([]byte, 48)...), Reads: true,
			Every: time.Second},
		flood(150),
	}
	c := open(t, s.dir.kv["directory"], "tcp", nil)
	roundTrip(t, c, "k")
	b.ask = func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := c.Get(ctx, []byte("k"))
		return err
	}
	b.fresh = func() error {
		roundTrip(t, open(t, s.dir.kv["directory"], "tcp", nil), "k")
		return nil
	}
	return b
}

const preface = http2.ClientPreface

// h2Calls are n calls of a method without a message's fields on one connection, from the preface on.
func h2Calls(t *testing.T, method string, n int) []byte {
	t.Helper()
	var b, head bytes.Buffer
	b.WriteString(preface)
	fr, enc := http2.NewFramer(&b, nil), hpack.NewEncoder(&head)
	if err := fr.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		head.Reset()
		for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "a"},
			{"content-type", "application/grpc"}, {"te", "trailers"}} {
			if err := enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}); err != nil {
				t.Fatal(err)
			}
		}
		id := uint32(2*i + 1)
		if err := errors.Join(
			fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: head.Bytes(), EndHeaders: true}),
			fr.WriteData(id, true, make([]byte, 5))); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// h2Gangs are hostile connections to a server of gRPC's.
func h2Gangs(t *testing.T, method string) []gang {
	call := h2Calls(t, method, 1)
	return []gang{
		{Name: "half a greeting", N: 150, Say: []byte("PRI * HT"), Holds: time.Minute, Every: time.Second},
		{Name: "a byte a second", N: 150, Say: []byte(preface), Slow: true, Every: time.Second},
		{Name: "HTTP/1", N: 100, Say: []byte("GET / HTTP/1.1\r\n\r\n"), Reads: true, Every: time.Second},
		{Name: "garbage", N: 100, Say: []byte(preface + "\xff\xff\xff\x04\x00\x00\x00\x00\x00"), Holds: 5 * time.Second,
			Every: time.Second},
		{Name: "half a request", N: 150, Say: call[:len(call)-10], Holds: time.Minute, Every: time.Second},
		{Name: "replies that nobody reads", N: 150, Say: h2Calls(t, method, 4), Holds: 5 * time.Second,
			Every: time.Second},
		flood(200),
	}
}

func (s *clearStore) grpc(t *testing.T) besieged {
	// A connection whose handshake is over has heard the server's SETTINGS.
	b := besieged{name: "directory", counted: "grpc", p: s.dir, addr: s.dir.kv["directory"],
		idle:  gang{Greet: [][]byte{h2Calls(t, "", 0)}, Welcome: 9},
		gangs: h2Gangs(t, dirpb.Directory_Status_FullMethodName), bound: (fullIdle+fullHostile)*(100<<10) + 2*(64<<20)}
	call := func(dir *dirclient.Client) error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return dir.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
			_, err := c.SessionState(ctx, &dirpb.SessionStateRequest{SessionId: 1})
			return err
		})
	}
	dial := func() (*dirclient.Client, error) { return dirclient.Open(dirclient.Options{Addrs: []string{b.addr}}) }
	dir, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	b.ask = func() error { return call(dir) }
	b.fresh = func() error {
		dir, err := dial()
		if err != nil {
			return err
		}
		return errors.Join(call(dir), dir.Close())
	}
	return b
}

// raft: the honest client is the directory's leader, which needs the follower for each decision.
func (s *clearStore) raft(t *testing.T) besieged {
	b := besieged{name: "raft", few: true, counted: "raft", p: s.follower, addr: s.raftAddr, bound: 64 << 20}
	b.gangs = []gang{
		{Name: "silence", N: 250, Holds: time.Minute, Every: time.Second},
		{Name: "a byte a second", N: 250, Say: []byte("\x00\x01\x02\x03"), Slow: true, Every: time.Second},
		{Name: "garbage", N: 250, Say: bytes.Repeat([]byte{0xff}, 500), Reads: true, Every: time.Second},
		flood(250),
	}
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{s.dir.kv["directory"]}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	b.ask = func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return dir.CallOnce(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
			rep, err := c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "cache", Client: "honest"})
			if err != nil {
				return err
			}
			_, err = c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: rep.GetSessionId()})
			return err
		})
	}
	b.fresh = b.ask
	return b
}

func (s *clearStore) http(t *testing.T) besieged {
	b := besieged{name: "http", few: true, counted: "http", p: s.node, addr: s.node.kv["http"], bound: 32 << 20}
	b.gangs = []gang{
		{Name: "silence", N: 150, Holds: time.Minute, Every: time.Second},
		{Name: "half a request", N: 200, Say: []byte("GET /metrics HTTP/1.1\r\n"), Holds: time.Minute,
			Every: time.Second},
		{Name: "a byte a second", N: 150, Say: []byte("GET /metrics HTTP/1.1\r\n"), Slow: true, Every: time.Second},
		{Name: "a body without an end", N: 100, Say: []byte("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " +
			"1000000000000\r\n\r\n"), Holds: time.Minute, Every: time.Second},
		{Name: "pages that nobody reads", N: 200, Say: bytes.Repeat([]byte("GET /healthz HTTP/1.1\r\nHost: "+
			"localhost\r\n\r\n"), 50), Holds: time.Minute, Every: time.Second},
		flood(200),
	}
	c := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	get := func() error {
		r, err := c.Get("http://" + b.addr + "/healthz")
		if err != nil {
			return err
		}
		_ = r.Body.Close()
		if r.StatusCode != http.StatusOK {
			return errors.New(r.Status)
		}
		return nil
	}
	b.ask = func() error { return again(get) }
	b.fresh = b.ask
	return b
}

// again asks until there is an answer: where connections give way, clients that had to call again.
func again(ask func() error) (err error) {
	for range 10 {
		if err = ask(); err == nil {
			break
		}
	}
	return err
}

func (s *clearStore) health(t *testing.T) besieged {
	b := besieged{name: "health", few: true, counted: "health", p: s.node, addr: s.node.kv["health"],
		idle:  gang{Greet: [][]byte{h2Calls(t, "", 0)}, Welcome: 9},
		gangs: h2Gangs(t, healthpb.Health_Check_FullMethodName), bound: 32 << 20}
	check := func() error {
		c, err := grpc.NewClient(b.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err = healthpb.NewHealthClient(c).Check(ctx, &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
		return err
	}
	b.ask = func() error { return again(check) }
	b.fresh = b.ask
	return b
}
