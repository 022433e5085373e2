package netsrv

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
)

// serverTLS is the configuration of a server whose certificate is its own authority.
func serverTLS(t *testing.T) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

// serveTLS serves echoes over TLS.
func serveTLS(t *testing.T, limits Limits) (*Server, net.Listener) {
	t.Helper()
	s, err := New(Options{Handle: echo, Limits: limits})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	l := testutil.Listen(t)
	go s.Serve(tls.NewListener(l, serverTLS(t))) //nolint:errcheck // Close ends it
	return s, l
}

// from dials l from an address of this machine.
func from(t *testing.T, addr string, l net.Listener) net.Conn {
	t.Helper()
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(addr)}}).Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { c.Close() })
	return c
}

// greetTLS finishes a handshake and exchanges a byte.
func greetTLS(c net.Conn) (*tls.Conn, error) {
	tc := tls.Client(c, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // a test of limits
	if _, err := tc.Write([]byte("x")); err != nil {
		return nil, err
	}
	_, err := io.ReadFull(tc, make([]byte, 1))
	return tc, err
}

// beginnings of a TLS connection that do not go on.
var beginnings = []string{"", "\x16\x03\x01", "\x16\x03\x01\x40\x00" + strings.Repeat("x", 1000), "GET / HTTP/1.1\r\n"}

// TestHandshakesEnd: a handshake that does not go on ends when its time is over.
func TestHandshakesEnd(t *testing.T) {
	s, l := serveTLS(t, Limits{HandshakeTimeout: 50 * time.Millisecond})
	for _, say := range beginnings {
		c := dial(t, l)
		io.WriteString(c, say)
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%.10q: it is still open after %v", say, patience)
		}
	}
	testutil.Until(t, "all are gone", func() bool { return s.Conns() == 0 })
	if n := s.Door().Stats().Refused[ReasonTimeout]; n < 2 { // the others are no TLS at all
		t.Errorf("%d timeouts are counted", n)
	}
}

// TestHalfHandshakesGiveWay: hundreds of handshakes that do not go on take a bounded memory, give way to each
// other, and leave others alone: those that are open, those that begin at another address, and new ones.
func TestHalfHandshakesGiveWay(t *testing.T) {
	const most, flood = 16, 1000
	var log bytes.Buffer
	s, l := serveTLS(t, Limits{MaxHandshakes: most, HandshakeTimeout: time.Hour,
		Logger: slog.New(slog.NewTextHandler(&log, nil))})
	open, err := greetTLS(from(t, "127.0.0.3", l))
	if err != nil {
		t.Fatal(err)
	}
	began := from(t, "127.0.0.3", l)
	testutil.Until(t, "it has begun", func() bool { return s.Door().Stats().Handshakes == 1 })
	before := testutil.Memory()
	for i := range flood {
		c := from(t, "127.0.0.2", l)
		io.WriteString(c, beginnings[i%3])
	}
	testutil.Until(t, "all were let in", func() bool { return s.Door().Stats().Accepted == flood+2 })
	grown := testutil.UntilGrown(t, "half handshakes", before, 8<<20)
	t.Logf("%d half handshakes, at most %d at a time: %.2f MB", flood, most, float64(grown)/1e6)
	st := s.Door().Stats()
	if st.Handshakes > most || st.Refused[ReasonHandshake] < flood-most {
		t.Errorf("%+v", st)
	}
	if _, err := greetTLS(began); err != nil {
		t.Errorf("one that began before them: %v", err)
	}
	if _, err := open.Write([]byte("y")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(open, make([]byte, 1)); err != nil {
		t.Errorf("one that was open: %v", err)
	}
	if _, err := greetTLS(from(t, "127.0.0.2", l)); err != nil {
		t.Errorf("a new one of the same address: %v", err)
	}
	s.Close()
	if n := strings.Count(log.String(), "\n"); n == 0 || n > 1+int(patience/logPause) {
		t.Errorf("%d lines:\n%.1000s", n, log.String())
	}
}

// caller is a connection from any address. Of it a Door uses these methods alone.
type caller struct {
	net.Conn
	from net.Addr
	end  chan struct{}
	once sync.Once
}

func (c *caller) RemoteAddr() net.Addr { return c.from }
func (c *caller) LocalAddr() net.Addr  { return &net.TCPAddr{} }
func (c *caller) Close() error         { c.once.Do(func() { close(c.end) }); return nil }

// call has one connection knock; g is nil if it is refused.
func call(t *testing.T, d *Door, addr string) (g *Guest) {
	t.Helper()
	c := &caller{end: make(chan struct{})}
	if addr == "unix" {
		c.from = &net.UnixAddr{}
	} else {
		c.from = net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(addr), 1))
	}
	stop := make(chan struct{})
	close(stop) // nobody serves those that give way
	return d.admit(c, stop)
}

// TestAddresses: an address has no more than its part, but this machine has all; what an IPv6 host could make up
// counts as one.
func TestAddresses(t *testing.T) {
	for _, x := range []struct {
		name   string
		limits Limits
		from   []string
		want   int
		why    Reason
	}{
		{"one address", Limits{MaxConns: 100, MaxPerAddr: 10}, []string{"192.0.2.1"}, 10, ReasonAddress},
		{"it by IPv6, too", Limits{MaxConns: 100, MaxPerAddr: 10}, []string{"192.0.2.1", "::ffff:192.0.2.1"}, 10,
			ReasonAddress},
		{"two", Limits{MaxConns: 100, MaxPerAddr: 10}, []string{"192.0.2.1", "192.0.2.2"}, 20, ReasonAddress},
		{"a network", Limits{MaxConns: 100, MaxPerAddr: 10}, []string{"2001:db8::1", "2001:db8::2", "2001:db8::ffff:1"},
			10, ReasonAddress},
		{"two networks", Limits{MaxConns: 100, MaxPerAddr: 10}, []string{"2001:db8::1", "2001:db8:0:1::1"}, 20,
			ReasonAddress},
		{"by default", Limits{MaxConns: 100}, []string{"192.0.2.1"}, 75, ReasonAddress},
		{"many", Limits{MaxConns: 100}, []string{"192.0.2.1", "192.0.2.2", "192.0.2.3"}, 100, ReasonFull},
		{"this machine", Limits{MaxConns: 100, MaxPerAddr: 10}, []string{"127.0.0.1", "::1", "unix"}, 100, ReasonFull},
	} {
		t.Run(x.name, func(t *testing.T) {
			d, err := NewDoor(x.limits)
			if err != nil {
				t.Fatal(err)
			}
			var in []*Guest
			for i := range 300 {
				if g := call(t, d, x.from[i%len(x.from)]); g != nil {
					if !g.Finish() {
						t.Fatal("it had to give way")
					}
					in = append(in, g)
				}
			}
			st := d.Stats()
			if len(in) != x.want || st.Conns != x.want || st.Refused[x.why] == 0 || st.Handshakes != 0 {
				t.Errorf("%d are in, want %d: %+v", len(in), x.want, st)
			}
			for _, g := range in {
				g.Release()
			}
			if n := len(d.mu.hosts); n != 0 || d.Stats().Conns != 0 {
				t.Errorf("%d addresses are remembered, of nobody", n)
			}
			if g := call(t, d, x.from[0]); g == nil {
				t.Error("there is room again, and not for this one")
			}
		})
	}
}

// age makes the connections that there are old enough to give way.
func age(d *Door) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for g := range d.mu.guests {
		g.since = g.since.Add(-welcomeTime)
	}
}

// TestReplaceKeeps: whoever has shown what it is, with several connections, keeps them beside a flood of half
// handshakes, each from another address; and nobody gives way who has only just come, so accepting waits.
func TestReplaceKeeps(t *testing.T) {
	const most = 8
	d, err := NewDoor(Limits{MaxConns: most, Replace: true})
	if err != nil {
		t.Fatal(err)
	}
	stranger := 0
	next := func() *Guest {
		stranger++
		return &Guest{d: d, from: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(stranger)}), 32),
			since: time.Now(), released: make(chan struct{})}
	}
	var peers []*Guest
	for range 3 {
		g := next()
		stranger-- // the same address
		if goes, why, wait := d.addGuest(g); goes != nil || why != 0 || wait != 0 {
			t.Fatal(goes, why, wait)
		}
		g.Finish()
		peers = append(peers, g)
	}
	stranger++
	for i := range 5 * most {
		age(d)
		goes, why, wait := d.addGuest(next())
		if why != 0 || wait != 0 || (goes != nil) != (i >= most-len(peers)) || slices.Contains(peers, goes) {
			t.Fatalf("half handshake %d: %v goes, %v, wait %v", i, goes, why, wait)
		}
	}
	d.mu.Lock()
	for g := range d.mu.guests {
		if g.greet != nil {
			g.since = time.Now().Add(time.Hour) // young for as long as this takes
		}
	}
	d.mu.Unlock()
	for _, g := range peers {
		g.Touch()
	}
	g := next()
	if goes, why, wait := d.addGuest(g); goes != nil || why != 0 || wait <= 0 || wait > welcomeTime {
		t.Errorf("all others have only just come: %v goes, %v, wait %v", goes, why, wait)
	}
	peers[1].heard.Store(1)
	if goes, why, wait := d.addGuest(g); goes != peers[1] || why != 0 || wait != 0 {
		t.Errorf("one is silent: %v goes, %v, wait %v", goes, why, wait)
	}
}

// TestLight: a connection that gave way, and whose server goes on for a while, keeps nobody waiting if it is a light
// one.
func TestLight(t *testing.T) {
	for _, light := range []bool{false, true} {
		d, err := NewDoor(Limits{MaxConns: 1, Replace: true, Light: light})
		if err != nil {
			t.Fatal(err)
		}
		call(t, d, "192.0.2.1")
		age(d)
		c := &caller{end: make(chan struct{}), from: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2)}}
		began := time.Now()
		if d.admit(c, nil) == nil {
			t.Fatal("refused")
		}
		if waited := time.Since(began) >= evictPatience; waited == light {
			t.Errorf("light %v: waited %v", light, waited)
		}
	}
}

// TestReplace: connections that do nothing give way to new ones, first those whose handshake is not over, then those of
// the address with most, and of those the ones that have done nothing for longest. Busy ones do not, and those that
// have just done something come last.
func TestReplace(t *testing.T) {
	d, err := NewDoor(Limits{MaxConns: 4, MaxPerAddr: 4, Replace: true})
	if err != nil {
		t.Fatal(err)
	}
	in := func(g *Guest) bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return !g.gone
	}
	alone := call(t, d, "192.0.2.9")
	alone.Finish()
	alone.heard.Store(3) // silent, as the others
	a, b := call(t, d, "192.0.2.1"), call(t, d, "192.0.2.1")
	greeting := call(t, d, "192.0.2.1")
	b.Finish()
	a.Finish()
	for i, want := range []struct{ goes *Guest }{{greeting}, {b}, {a}} {
		if i == 0 {
			b.heard.Store(1)
			a.heard.Store(2)
		}
		age(d)
		g := call(t, d, "192.0.2.1")
		if g == nil || in(want.goes) || !in(alone) {
			t.Fatalf("newcomer %d: another one went than the one due", i)
		}
		g.Finish()
	}
	age(d)
	if call(t, d, "192.0.2.8").Finish(); in(alone) {
		t.Error("one that has just done something gave way, and a silent one did not")
	}
	for g := range d.mu.guests {
		g.SetBusy(true)
	}
	if call(t, d, "192.0.2.1") != nil || d.Stats().Refused[ReasonFull] != 1 {
		t.Error("a busy connection gave way")
	}
	if st := d.Stats(); st.Refused[ReasonHandshake] != 1 || st.Refused[ReasonIdle] != 3 {
		t.Errorf("%+v", st)
	}
}

// TestListen: connections of a listener for other servers count until they are closed, once each.
func TestListen(t *testing.T) {
	d, err := NewDoor(Limits{})
	if err != nil {
		t.Fatal(err)
	}
	l := d.Listen(testutil.Listen(t))
	dial(t, l)
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if n := d.Stats().Conns; n != 1 {
		t.Errorf("%d connections", n)
	}
	c.Close()
	c.Close()
	if n := d.Stats().Conns; n != 0 {
		t.Errorf("%d connections are left", n)
	}
	l.Close()
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept after Close: %v", err)
	}
}

// TestNoDescriptors has a process run out of descriptors: a few lines of its log say so, it does not spin, half
// handshakes give way, those who are in are served, and everybody is when there are descriptors again.
func TestNoDescriptors(t *testing.T) {
	if addr := os.Getenv("NETSRV_CHILD"); addr != "" {
		runShortOfDescriptors(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestNoDescriptors$", "-test.v")
	cmd.Env = append(os.Environ(), "NETSRV_CHILD=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); cmd.Wait() }()
	lines := bufio.NewScanner(out)
	ask := func(prefix string) string {
		for lines.Scan() {
			if s, ok := strings.CutPrefix(lines.Text(), prefix+" "); ok {
				return s
			}
		}
		t.Fatalf("the process does not say %s", prefix)
		return ""
	}
	addr := ask("ADDR")
	connect := func() net.Conn {
		c, err := net.DialTimeout("tcp", addr, patience)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(patience))
		return c
	}
	echoed := func(c net.Conn) error {
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 1))
		return err
	}
	early := connect()
	defer early.Close()
	if err := echoed(early); err != nil {
		t.Fatal(err)
	}
	var crowd []net.Conn
	for range 3 * shortOf {
		crowd = append(crowd, connect()) // the kernel has a queue of those that nobody accepts
	}
	var cpu time.Duration
	var failures, told int
	for failures < 8 { // its pauses double, so some seconds
		fmt.Fprintln(in, "?")
		fmt.Sscan(ask("STATE"), &failures, &told, &cpu)
		if err := echoed(early); err != nil {
			t.Fatalf("a client that is in: %v", err)
		}
	}
	t.Logf("%d failures to accept, %d lines, %v of CPU", failures, told, cpu)
	if told < 1 || told > 1+int(patience/logPause) {
		t.Errorf("%d lines of the log", told)
	}
	for _, c := range crowd {
		c.Close()
	}
	late := connect()
	defer late.Close()
	if err := echoed(late); err != nil {
		t.Errorf("when there are descriptors again: %v", err)
	}
}

// shortOf is how many descriptors the process may have.
const shortOf = 64

// runShortOfDescriptors is the process of TestNoDescriptors.
func runShortOfDescriptors(t *testing.T) {
	var log lockedBuffer
	s, err := New(Options{Handle: echo, Limits: Limits{Logger: slog.New(slog.NewTextHandler(&log, nil))}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: shortOf, Max: shortOf}); err != nil {
		t.Fatal(err)
	}
	l := testutil.Listen(t)
	go s.Serve(l) //nolint:errcheck // Close ends it
	fmt.Printf("ADDR %s\n", l.Addr())
	for asked := bufio.NewScanner(os.Stdin); asked.Scan(); {
		var r syscall.Rusage
		syscall.Getrusage(syscall.RUSAGE_SELF, &r)
		cpu := time.Duration(r.Utime.Nano() + r.Stime.Nano())
		fmt.Printf("STATE %d %d %d\n", s.Door().Stats().Failures, strings.Count(log.String(), "accept failed"), cpu)
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// TestNoDescriptorsGiveWay: half handshakes give their descriptors to others.
func TestNoDescriptorsGiveWay(t *testing.T) {
	s, l := serveTLS(t, Limits{HandshakeTimeout: time.Hour})
	dial(t, l)
	testutil.Until(t, "it has begun", func() bool { return s.Door().Stats().Handshakes == 1 })
	s.Door().outOfDescriptors(l, syscall.EMFILE, minBackoff)
	testutil.Until(t, "it has gone", func() bool { return s.Conns() == 0 })
	if st := s.Door().Stats(); st.Failures != 1 || st.Refused[ReasonHandshake] != 1 {
		t.Errorf("%+v", st)
	}
}

// TestReasons: every reason has a name of its own.
func TestReasons(t *testing.T) {
	var names []string
	for r := range Reason(NumReasons) {
		names = append(names, r.String())
	}
	slices.Sort(names)
	if len(slices.Compact(names)) != NumReasons || Reason(99).String() != "Reason(99)" {
		t.Error(names)
	}
}
