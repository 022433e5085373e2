package memcached_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/bradfitz/gomemcache/memcache"
	"github.com/cockroachdb/datadriven"
	"github.com/prometheus/client_golang/prometheus"
	promtest "github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/memcached"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve starts a Server and returns its address.
func serve(t testing.TB, o memcached.Options) (addr string, s *memcached.Server) {
	t.Helper()
	s, err := memcached.New(o)
	if err != nil {
		t.Fatal(err)
	}
	s.SetCalm(testCalm)
	l := testutil.Listen(t)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String(), s
}

// talk sends everything at once, ends its half of the connection and returns what the
// server says until it ends the other.
func talk(t testing.TB, addr, say string) string {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testutil.Limit))
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		io.WriteString(c, say)
		c.(*net.TCPConn).CloseWrite()
	})
	b, err := io.ReadAll(c)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) { // of what it did not read
		t.Fatalf("%v after %q", err, b)
	}
	return string(b)
}

// Transcripts: `talk` sends its lines on one connection; `later` moves the clock;
// `fail` makes the store fail. In both directions \r\n is a line's end; # stands for
// a hundred k.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if strings.Contains(path, "same") {
			return // of TestSame
		}
		var mu sync.Mutex
		now := time.Unix(1_800_000_000, 0)
		clock := func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			return now
		}
		store := clienttest.New(clienttest.Options{Now: clock})
		addr, _ := serve(t, memcached.Options{Client: store, Now: clock, MaxValueBytes: 100})
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "talk":
				say := strings.ReplaceAll(d.Input, "#", strings.Repeat("k", 100))
				got := talk(t, addr, strings.ReplaceAll(say, "\n", "\r\n")+"\r\n")
				if strings.Count(got, "\n") != strings.Count(got, "\r\n") {
					t.Fatalf("a line without its end: %q", got)
				}
				return strings.ReplaceAll(strings.ReplaceAll(got, "\r\n", "\n"), strings.Repeat("k", 100), "#")
			case "later":
				var by string
				d.ScanArgs(t, "by", &by)
				n, err := time.ParseDuration(by)
				if err != nil {
					t.Fatal(err)
				}
				mu.Lock()
				now = now.Add(n)
				mu.Unlock()
				return ""
			case "fail":
				errs := map[string]error{"full": client.ErrFull, "unavailable": client.ErrUnavailable,
					"unknown": client.ErrUnknownOutcome,
					"deleted": client.ErrNoNamespace, "corrupt": client.ErrCorrupt}
				err, key := errs[d.CmdArgs[0].Key], ""
				d.MaybeScanArgs(t, "key", &key)
				store.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
					if key == "" || string(o.Key) == key {
						return clienttest.Fault{Err: err}
					}
					return clienttest.Fault{}
				})
				return ""
			}
			return "unknown command " + d.Cmd
		})
	})
}

// counting counts the batches and the operations in them.
type counting struct {
	client.API
	mu      sync.Mutex
	batches []int
}

func (c *counting) Do(ctx context.Context, ops []client.Op) {
	c.mu.Lock()
	c.batches = append(c.batches, len(ops))
	c.mu.Unlock()
	c.API.Do(ctx, ops)
}

func (c *counting) Put(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error) {
	c.mu.Lock()
	c.batches = append(c.batches, 1)
	c.mu.Unlock()
	return c.API.Put(ctx, key, value, o)
}

// distinct fails if two lookups of one key go to the store together.
type distinct struct {
	client.API
	t     *testing.T
	calls int
}

func (d *distinct) Do(ctx context.Context, ops []client.Op) {
	d.calls++
	keys := make(map[string]bool)
	for i := range ops {
		if k := string(ops[i].Key); keys[k] {
			d.t.Errorf("two lookups of %q in one batch of %d", k, len(ops))
		} else {
			keys[k] = true
		}
	}
	d.API.Do(ctx, ops)
}

// Keys are looked up together unless one comes twice, whatever their hashes share.
func TestRepeatedKeys(t *testing.T) {
	d := &distinct{API: clienttest.New(clienttest.Options{}), t: t}
	addr, _ := serve(t, memcached.Options{Client: d})
	rng := rand.New(rand.NewPCG(1, 2))
	var say, want strings.Builder
	for i := range 50 {
		key, v := fmt.Sprint("k", i), fmt.Sprint(i)
		fmt.Fprintf(&say, "set %s 0 0 %d\r\n%s\r\n", key, len(v), v)
		want.WriteString("STORED\r\n")
	}
	lookups := 0
	for range 200 {
		n := 1 + rng.IntN(100)
		lookups += n
		say.WriteString("get")
		for range n {
			i := rng.IntN(80)
			fmt.Fprintf(&say, " k%d", i)
			if v := fmt.Sprint(i); i < 50 {
				fmt.Fprintf(&want, "VALUE k%d 0 %d\r\n%s\r\n", i, len(v), v)
			}
		}
		say.WriteString("\r\n")
		want.WriteString("END\r\n")
	}
	if got := talk(t, addr, say.String()); got != want.String() {
		t.Errorf("%d bytes of answers, want %d", len(got), want.Len())
	}
	if d.calls > lookups/2 {
		t.Errorf("%d batches for %d lookups", d.calls, lookups)
	}
}

// Pipelined lookups of distinct keys go to the store together, and no others.
func TestPipelining(t *testing.T) {
	store := &counting{API: clienttest.New(clienttest.Options{})}
	addr, _ := serve(t, memcached.Options{Client: store})
	for _, c := range []struct {
		say  string
		want []int
	}{
		{"get a\r\nget b c\r\nmg d v\r\ngets e\r\n", []int{5}},
		{"get a\r\nget b\r\nget a\r\n", []int{2, 1}},
		{"get a b\r\nset a 0 0 1\r\nx\r\nget a b\r\n", []int{2, 1, 2}},
		{"get" + strings.Repeat(" k", 3) + "\r\n", []int{1, 1, 1}},
		{"get" + func() (s string) {
			for i := range 100 {
				s += fmt.Sprint(" k", i)
			}
			return s
		}() + "\r\n", []int{64, 36}},
	} {
		store.batches = nil
		c0, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		// A single write is one segment: the server reads it whole.
		if _, err := io.WriteString(c0, c.say+"quit\r\n"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(c0); err != nil {
			t.Fatal(err)
		}
		c0.Close()
		if !slices.Equal(store.batches, c.want) {
			t.Errorf("%.40q went in batches of %v, want %v", c.say, store.batches, c.want)
		}
	}
}

// TestValues: a value arrives whole, wherever it lies in what is read at a time, and whether it fits there or not.
func TestValues(t *testing.T) {
	addr, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{})})
	var say, want strings.Builder
	for i, n := range []int{0, 1, 1022, 1023, 1024, 4096, 16<<10 - 3, 16<<10 - 2, 16<<10 - 1, 16 << 10, 16<<10 + 1,
		40_000, 64 << 10, 200_000, 3, 15_000, 15_000} {
		value := make([]byte, n)
		for k := range value {
			value[k] = byte('a' + (i+k/7)%26)
		}
		fmt.Fprintf(&say, "set k%d 0 0 %d\r\n%s\r\nappend k%d 0 0 2\r\nzz\r\n", i, n, value, i)
		want.WriteString("STORED\r\nSTORED\r\n")
		fmt.Fprintf(&say, "get k%d\r\n", i)
		fmt.Fprintf(&want, "VALUE k%d 0 %d\r\n%szz\r\nEND\r\n", i, n+2, value)
	}
	if got := talk(t, addr, say.String()); got != want.String() {
		t.Errorf("%d bytes of answers, want %d", len(got), want.Len())
	}
}

// An answer does not wait for a command that has come in part.
func TestAnswersBeforeWaiting(t *testing.T) {
	addr, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{})})
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testutil.Limit))
	r := bufio.NewReader(c)
	for _, x := range []struct{ say, want string }{
		{"get a\r\nge", "END\r\n"},
		{"t b\r\nset c 0 0 5\r\nhe", "END\r\n"},
		{"llo\r\nget c\r", "STORED\r\n"},
		{"\n", "VALUE c 0 5\r\n"},
	} {
		io.WriteString(c, x.say)
		if got, err := r.ReadString('\n'); got != x.want || err != nil {
			t.Fatalf("after %q: %q, %v, want %q", x.say, got, err, x.want)
		}
	}
}

// A peer that says only half of something is not waited for without end, one that is
// silent is.
func TestHostile(t *testing.T) {
	addr, s := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{}),
		IOTimeout: 50 * time.Millisecond, MaxConns: 16})
	idle, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	for _, say := range []string{"get", "set a 0 0 1000000\r\nabc", "set a 0 0 2000000000\r\nabc", "ms a 10\r\n"} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(testutil.Limit))
		io.WriteString(c, say)
		if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
			t.Errorf("%q: %q, %v", say, b, err)
		}
		c.Close()
	}
	io.WriteString(idle, "mn\r\n")
	if got, err := bufio.NewReader(idle).ReadString('\n'); got != "MN\r\n" {
		t.Errorf("an idle connection: %q, %v", got, err)
	}
	if got := talk(t, addr, "get "+strings.Repeat("k ", 200_000)+"\r\nversion\r\n"); got !=
		"CLIENT_ERROR line too long\r\n" {
		t.Errorf("a long line: %q", got)
	}
	for _, say := range []string{strings.Repeat("x", 20_000), "getx " + strings.Repeat("k ", 10_000),
		"ms k " + strings.Repeat("0", 20_000)} {
		if got := talk(t, addr, say+"\r\nversion\r\n"); got != "" {
			t.Errorf("%.8q: a line as long as no command is: %q", say, got)
		}
	}
	for _, say := range []string{"get", "  gets", "gat 0"} {
		if got := talk(t, addr, say+strings.Repeat(" k", 10_000)+"\r\n"); got != "END\r\n" {
			t.Errorf("%q of 10,000 keys: %.100q", say, got)
		}
	}
	for _, say := range []string{"POST / HTTP/1.1\r\nset stolen 0 0 1\r\n1\r\n",
		"GET / HTTP/1.1\r\nHost: x\r\nset stolen 0 0 1\r\n1\r\n"} {
		if got := talk(t, addr, say) + talk(t, addr, "get stolen\r\n"); got != "END\r\n" {
			t.Errorf("a browser: %q", got)
		}
	}
	if got := talk(t, addr, "\x80\x00\x00\x01\r\nversion\r\n"); got != "" {
		t.Errorf("the binary protocol: %q", got)
	}
	many := "get" + strings.Repeat(" "+strings.Repeat("k", 250), 1000) + "\r\n"
	if got := talk(t, addr, many); got != "END\r\n" {
		t.Errorf("a get of 1,000 keys: %.100q", got)
	}
	big := strings.Repeat("x", 1<<20)
	if got := talk(t, addr, "set big 3 0 1048576\r\n"+big+"\r\nget big\r\n"); got !=
		"STORED\r\nVALUE big 3 1048576\r\n"+big+"\r\nEND\r\n" {
		t.Errorf("a long value: %d bytes, %.100q", len(got), got)
	}
	n, err := promtest.GatherAndCount(registry(t, s), "kvd_memcached_commands_total")
	if err != nil || n != 6 {
		t.Errorf("%d counts, %v", n, err)
	}
}

// TestOthersMemory: a command that waits for memory that others have is not late.
func TestOthersMemory(t *testing.T) {
	o := memcached.Options{Client: clienttest.New(clienttest.Options{}), IOTimeout: time.Second,
		Budget: netsrv.NewBudget(1 << 20)}
	addr, _ := serve(t, o)
	for n := int64(512 << 10); n >= 64<<10; n /= 2 {
		s := o.Budget.Share(func(int64) {})
		if !s.Try(n) {
			t.Fatalf("no %d bytes", n)
		}
		time.AfterFunc(3*o.IOTimeout, func() { s.Give(n) })
	}
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testutil.Limit))
	// A line that comes in two parts: its time has begun before the value needs memory.
	io.WriteString(c, "version\r\nset a 0 0 ")
	r := bufio.NewReader(c)
	r.ReadString('\n')
	io.WriteString(c, "204800\r\n"+strings.Repeat("v", 204800)+"\r\n")
	if got, err := r.ReadString('\n'); got != "STORED\r\n" {
		t.Errorf("%q, %v", got, err)
	}
}

func registry(t testing.TB, s *memcached.Server) *prometheus.Registry {
	r := prometheus.NewPedanticRegistry()
	for _, c := range s.Collectors() {
		if err := r.Register(c); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func TestMetrics(t *testing.T) {
	addr, s := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{})})
	talk(t, addr, "set a 0 0 1\r\nx\r\nget a b\r\nmg a v\r\nincr a 1\r\nwhat\r\n")
	want := `
# HELP kvd_memcached_commands_total Commands answered.
# TYPE kvd_memcached_commands_total counter
kvd_memcached_commands_total{command="get",result="ok"} 1
kvd_memcached_commands_total{command="incr",result="client_error"} 1
kvd_memcached_commands_total{command="mg",result="ok"} 1
kvd_memcached_commands_total{command="set",result="ok"} 1
kvd_memcached_commands_total{command="unknown",result="client_error"} 1
# HELP kvd_memcached_hits_total Lookups that found their key.
# TYPE kvd_memcached_hits_total counter
kvd_memcached_hits_total 2
# HELP kvd_memcached_misses_total Lookups that did not find their key.
# TYPE kvd_memcached_misses_total counter
kvd_memcached_misses_total 1
`
	if err := promtest.GatherAndCompare(registry(t, s), strings.NewReader(want), "kvd_memcached_commands_total",
		"kvd_memcached_hits_total", "kvd_memcached_misses_total"); err != nil {
		t.Error(err)
	}
}

// The Go client of memcached works with it.
func TestGomemcache(t *testing.T) {
	addr, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{})})
	m := memcache.New(addr)
	defer m.Close()
	check := func(err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Fatalf("error %v, want %v", err, want)
		}
	}
	check(m.Ping(), nil)
	_, err := m.Get("k")
	check(err, memcache.ErrCacheMiss)
	check(m.Set(&memcache.Item{Key: "k", Value: []byte("v"), Flags: 7, Expiration: 100}), nil)
	it, err := m.Get("k")
	check(err, nil)
	if string(it.Value) != "v" || it.Flags != 7 {
		t.Fatalf("%+v", it)
	}
	check(m.Add(&memcache.Item{Key: "k"}), memcache.ErrNotStored)
	check(m.Append(&memcache.Item{Key: "k", Value: []byte("w")}), nil)
	check(m.Prepend(&memcache.Item{Key: "k", Value: []byte("u")}), nil)
	check(m.CompareAndSwap(it), memcache.ErrCASConflict)
	it, err = m.Get("k")
	check(err, nil)
	if string(it.Value) != "uvw" {
		t.Fatalf("%q", it.Value)
	}
	check(m.CompareAndSwap(it), nil)
	check(m.Replace(&memcache.Item{Key: "n", Value: []byte("1")}), memcache.ErrNotStored)
	check(m.Set(&memcache.Item{Key: "n", Value: []byte("18446744073709551615")}), nil)
	n, err := m.Increment("n", 6)
	check(err, nil)
	if n != 5 {
		t.Fatalf("incremented to %d", n)
	}
	n, err = m.Decrement("n", 9)
	check(err, nil)
	if n != 0 {
		t.Fatalf("decremented to %d", n)
	}
	check(m.Touch("n", 10), nil)
	_, err = m.GetAndTouch("n", 10)
	check(err, nil)
	all, err := m.GetMulti([]string{"k", "n", "absent"})
	check(err, nil)
	if len(all) != 2 {
		t.Fatalf("%v", all)
	}
	check(m.Delete("n"), nil)
	check(m.Delete("n"), memcache.ErrCacheMiss)
	check(m.FlushAll(), nil)
	_, err = m.Get("k")
	check(err, memcache.ErrCacheMiss)
}

// The server neither panics nor stops answering, whatever is sent.
func FuzzConn(f *testing.F) {
	for _, s := range []string{"get a b\r\n", "set a 0 0 1\r\nx\r\n", "ms a 1 T1 c\r\nx\r\n", "mg a v k O1 q\r\n",
		"ma a N0 J5 v\r\n",
		"cas a 1 2 3 4\r\nabc\r\n", "md YQ== b\r\n", "gat 1 a\r\n", "incr a 1 noreply\r\n", "flush_all 0\r\n",
		"stats\r\n", "me a\r\n", "touch a -1\n"} {
		f.Add([]byte(s))
	}
	addr, _ := serve(f, memcached.Options{Client: clienttest.New(clienttest.Options{MaxBytes: 1 << 20, Evict: true}),
		IOTimeout: time.Second})
	f.Fuzz(func(t *testing.T, b []byte) {
		got := talk(t, addr, string(b))
		if strings.HasSuffix(got, "\n") != (len(got) > 0) {
			t.Fatalf("%q", got)
		}
		if got := talk(t, addr, "mn\r\n"); got != "MN\r\n" {
			t.Fatalf("afterwards: %q", got)
		}
	})
}

var (
	casText = regexp.MustCompile(`(?m)^(VALUE \S+ \d+ \d+) (\d+)`)
	casMeta = regexp.MustCompile(` c(\d+)`)
	failed  = regexp.MustCompile(`(?m)^(NS|EX|NF).*$`)
	ttlMeta = regexp.MustCompile(` t(0|\d{3,})\b`) // expired: it shows a number that has wrapped
	won     = regexp.MustCompile(`(?m)^(HD|VA).* W\r`)
)

// dialogue is a connection on which commands are sent and answers awaited.
type dialogue struct {
	c   net.Conn
	r   *bufio.Reader
	cas string // the last one seen
}

func dial(t *testing.T, addr string) *dialogue {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &dialogue{c: c, r: bufio.NewReader(c), cas: "1"}
}

// ask returns the answer with versions and times taken out.
func (d *dialogue) ask(t *testing.T, say string) string {
	d.c.SetDeadline(time.Now().Add(testutil.Limit))
	if _, err := io.WriteString(d.c, strings.ReplaceAll(say, "$CAS", d.cas)+"mn\r\n"); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	for {
		line, err := d.r.ReadString('\n')
		if err != nil {
			t.Fatalf("%q: %v after %q", say, err, b.String())
		}
		if line == "MN\r\n" {
			break
		}
		b.WriteString(line)
	}
	got := b.String()
	for _, m := range casText.FindAllStringSubmatch(got, -1) {
		d.cas = m[2]
	}
	for _, m := range casMeta.FindAllStringSubmatch(failed.ReplaceAllString(got, ""), -1) {
		d.cas = m[1]
	}
	if strings.Contains(say, "touch") || strings.Contains(say, "gat") || strings.Contains(say, " T") ||
		won.MatchString(got) {
		d.cas = "1" // here they change the version
	}
	got = casText.ReplaceAllString(got, "$1 CAS")
	got = casMeta.ReplaceAllString(got, " cCAS")
	return ttlMeta.ReplaceAllString(got, " tLONG")
}

// A random script gets the same answers here and from memcached.
func TestSameAsMemcached(t *testing.T) {
	if os.Getenv("KVD_COMPAT") != "1" {
		t.Skip("needs memcached 1.6 installed: set KVD_COMPAT=1")
	}
	theirs := startMemcached(t)
	ours, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{})})
	a, b := dial(t, ours), dial(t, theirs)
	steps := 20_000
	if testing.Short() {
		steps = 2000
	}
	for seed := range uint64(3) {
		var said []string
		rng := rand.New(rand.NewPCG(seed, 7))
		for i := range steps {
			say := sentence(rng)
			said = append(said, say)
			if x, y := a.ask(t, say), b.ask(t, say); x != y {
				t.Fatalf("seed %d step %d: %q\nhere      %q\nmemcached %q\nbefore that: %q", seed, i, say, x, y,
					said[max(0, len(said)-40):])
			}
		}
	}
}

// sentence is a command, mostly a good one. Numbers have keys of their own, since
// memcached pads them, and stay below 2⁶³: it looks for a minus behind a number that
// large, past the end of the item, and refuses the number if chance has put one into
// the memory there. testdata/text has what larger ones do here.
func sentence(rng *rand.Rand) string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	key := func() string {
		if rng.IntN(50) == 0 {
			return strings.Repeat("k", 240+rng.IntN(20))
		}
		return pick("a", "b", "c", "d", "key-\xc3\xa4")
	}
	num := func() string { return pick("n1", "n2", "n3") }
	exp := func() string { return pick("0", "0", "0", "0", "-1", "1000", "5000", "400000000", "zz") }
	flags := func() string { return pick("0", "0", "1", "4294967295", "-1", "x") }
	value := func() string { return strings.Repeat(pick("x", "y", "0"), rng.IntN(200)) }
	noreply := func() string { return pick("", "", "", " noreply") }
	meta := func(known string) (s string) {
		for range rng.IntN(4) {
			f := known[rng.IntN(len(known))]
			s += " " + string(rune(f))
			switch f {
			case 'O':
				s += pick("", "123", "abc")
			case 'T', 'N':
				s += pick("0", "1000", "2000", "-1", "x")
			case 'R': // not near those: seconds end at another moment there
				s += pick("0", "500", "1500", "-1", "x")
			case 'C':
				s += pick("$CAS", "$CAS", "1", "x")
			case 'M':
				s += pick("", "E", "A", "I", "D", "ZZ")
			case 'F':
				s += pick("0", "5")
			case 'D', 'J':
				s += pick("1", "7", "1000")
			}
		}
		return s
	}
	set := func(cmd string, tail string) string {
		v := value()
		return fmt.Sprintf("%s %s %s %s %d%s\r\n%s\r\n", cmd, key(), flags(), exp(), len(v), tail, v)
	}
	switch rng.IntN(26) {
	case 0, 1:
		return pick("get", "gets") + " " + key() + "\r\n"
	case 2:
		return pick("get", "gets") + " " + key() + " " + key() + " " + key() + "\r\n"
	case 3:
		return pick("gat", "gats") + " " + exp() + " " + key() + "\r\n"
	case 4, 5, 6:
		return set(pick("set", "set", "add", "replace", "append", "prepend"), noreply())
	case 7:
		return set("cas", pick(" $CAS", " $CAS", " 99", " zz")+noreply())
	case 8:
		return "delete " + key() + pick("", "", " 0", " 5") + noreply() + "\r\n"
	case 9:
		return numberSet(num(), pick("1", "99", "9000000000000000000", "text"))
	case 10:
		return "incr " + num() + " " + pick("1", "5", "100", "-1", "x") + noreply() + "\r\n"
	case 11:
		return "decr " + num() + " " + pick("1", "5", "100", "18446744073709551615", "-1", "x") + noreply() + "\r\n"
	case 12:
		return "touch " + key() + " " + exp() + noreply() + "\r\n"
	case 13:
		return pick("verbosity\r\n", "verbosity 1\r\n", "flush_all\r\n", "flush_all 0\r\n", "foo\r\n", "\r\n",
			"get\r\n", "set\r\n", "incr n1\r\n", "mg\r\n", "md\r\n", "touch a\r\n", "delete\r\n", "stats reset\r\n",
			"stats what\r\n", "me\r\n")
	case 14, 15, 16: // h and l are told from other accesses there
		return "mg " + key() + meta("ckOqsvfTtuNRILPMbS!") + "\r\n"
	case 17, 18, 19:
		v := value()
		// N with MA or MP creates an item here.
		tail := meta("ckOqTFCIsvtR") + pick("", "", "", "", " ME", " MA", " MP", " MR", " MS", " MQ", " MXX")
		return fmt.Sprintf("ms %s %d%s\r\n%s\r\n", key(), len(v), tail, v)
	case 20:
		return "md " + key() + meta("kOqCITv") + "\r\n"
	case 21, 22: // without T, which memcached gives to the item that goes if the number gets longer
		return "ma " + num() + pick(meta("ckOqtvDI"), " N0"+meta("ckOtvDJqC")) + pick("", "", " MI", " MD", " MX") +
			"\r\n"
	case 23:
		return pick("mg YWJjZA== b v", "mg YWJjZA== v b", "ms YWJjZA== 0 b\r\n\r\nms YWJjZA== 0 b", "mg wrong b") +
			pick("", " k", " O1") + "\r\n\r\n"
	case 24:
		return fmt.Sprintf("set %s 0 0 %d\r\n%s\r\n", key(), 3, pick("abcd", "abcdef", "abc"))
	}
	if rng.IntN(50) == 0 { // with too long a key, too, memcached hangs up
		return "set a 0 0 2000000\r\n" + strings.Repeat("x", 2_000_000) + "\r\n"
	}
	return pick("mg a Z\r\n", "ms a x\r\n", "ms a\r\n", "mg a v v\r\n", "ma n1 Dx\r\n", "mg %% b\r\n",
		"set a 0 0 -1\r\n", "set a 0 0\r\n")
}

func numberSet(key, v string) string {
	return fmt.Sprintf("set %s 0 0 %d\r\n%s\r\n", key, len(v), v)
}

// writes counts the writes to connections that it accepts.
type writes struct {
	net.Listener
	n       atomic.Int64
	longest atomic.Int64 // bytes
}

func (l *writes) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return writing{c, l}, err
}

type writing struct {
	net.Conn
	l *writes
}

func (c writing) Write(b []byte) (int, error) {
	c.l.n.Add(1)
	c.l.longest.Store(max(c.l.longest.Load(), int64(len(b))))
	return c.Conn.Write(b)
}

// TestLongAnswerInTurns: a long answer is written in parts, between which others have the processor.
func TestLongAnswerInTurns(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	_, s := serve(t, memcached.Options{Client: store})
	l := &writes{Listener: testutil.Listen(t)}
	go s.Serve(l) //nolint:errcheck // Close ends it
	value := strings.Repeat("x", 1<<20)
	if _, err := store.Put(t.Context(), []byte("long"), []byte(value), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p := &peer{c, bufio.NewReader(c)}
	p.want(t, "VALUE long 0 1048576\r\n"+value+"\r\nEND\r\n", "get long\r\n")
	if n, longest := l.n.Load(), l.longest.Load(); longest > 72<<10 || n < 1<<20/(72<<10) {
		t.Errorf("%d writes, of at most %d bytes", n, longest)
	}
}

// TestOneWrite: what a get of batchKeys values of 1 KiB finds is sent at once.
func TestOneWrite(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	_, s := serve(t, memcached.Options{Client: store})
	inner := testutil.Listen(t)
	l := &writes{Listener: inner}
	go s.Serve(l) //nolint:errcheck // Close ends it
	var ask, answer strings.Builder
	value := strings.Repeat("x", 1024)
	ask.WriteString("get")
	for i := range 64 {
		key := fmt.Sprintf("key:%012d", i)
		if _, err := store.Put(t.Context(), []byte(key), []byte(value), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		ask.WriteString(" " + key)
		answer.WriteString("VALUE " + key + " 0 1024\r\n" + value + "\r\n")
	}
	c, err := net.Dial("tcp", inner.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p := &peer{c, bufio.NewReader(c)}
	for i := range 3 {
		p.want(t, answer.String()+"END\r\n", ask.String()+"\r\n")
		if n := l.n.Load(); n != int64(i)+1 {
			t.Errorf("%d answers took %d writes", i+1, n)
		}
	}
}

// Options.Answered is told of every command once, in text and in the binary protocol, with the class of its error.
func TestAnswered(t *testing.T) {
	var mu sync.Mutex
	var told []string
	store := clienttest.New(clienttest.Options{})
	addr, _ := serve(t, memcached.Options{Client: store, Answered: func(a netsrv.Answered) {
		line := a.Command
		if a.Error != "" {
			line += fmt.Sprintf(" %s %v", a.Error, a.Unknown)
		}
		if _, ok := a.Client.(*net.TCPAddr); !ok || a.Took < 0 {
			line += fmt.Sprintf(": took %v, from %v", a.Took, a.Client)
		}
		mu.Lock()
		defer mu.Unlock()
		told = append(told, line)
	}})
	talk(t, addr, "set a 0 0 1\r\n1\r\nget a b\r\nmg a v\r\nadd a 0 0 1\r\n1\r\nincr a x\r\nnosuch\r\nquit\r\n")
	store.Fail(func(context.Context, *client.Op) clienttest.Fault {
		return clienttest.Fault{Err: client.ErrUnknownOutcome}
	})
	talk(t, addr, "set a 0 0 1\r\n1\r\nnosuch\r\nquit\r\n")
	store.Fail(nil)
	talk(t, addr, "\x80\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00a")
	want := []string{"set", "get", "mg", "add", "incr client_error false", "unknown client_error false", "quit",
		"set server_error true", "unknown client_error false", "quit", "get"}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(told, want) {
		t.Errorf("told of %q, want %q", told, want)
	}
}
