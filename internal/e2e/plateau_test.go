package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// TestPlateau: things that come and go leave nothing behind in a directory node, a memory node and a gateway.
// Namespaces are made and deleted, and sessions begin and end. Connections use scripts, libraries, channels, tracked
// keys and names that nobody uses again. The live part of each process's heap is measured in rows, the first third of
// which is the warm-up. KVD_SOAK says how long that goes on; without it, rounds are counted and few.
func TestPlateau(t *testing.T) {
	var soak time.Duration
	if s := os.Getenv("KVD_SOAK"); s != "" {
		var err error
		if soak, err = time.ParseDuration(s); err != nil {
			t.Fatalf("KVD_SOAK: %v", err)
		}
	}
	w := aloneWorld(t)
	w.dir = freeAddr(t)
	redis, pages := freeAddr(t), []string{freeAddr(t), freeAddr(t), freeAddr(t)}
	names := []string{"directory", "memory node", "gateway"}
	w.start(append(w.directory(t.TempDir(), freeAddr(t)), "--http-listen", pages[0])...)
	w.start(append(w.memnode("m1"), "--http-listen", pages[1])...)
	w.must(nil, "namespace", "create", "cache", "--mode", "cache", "--bytes", "32MiB")
	w.start("gateway", "--directory", w.dir, "--listen", redis, "--databases", "cache", "--http-listen", pages[2])

	c, err := newChurn(w.dir, redis)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	// A third of the rows is the warm-up: it fills what is bounded, such as the cache of scripts.
	rows, per := 9, 40
	began := time.Now()
	var live [][]int64
	for row := 0; row < rows; row++ {
		end := began.Add(soak * time.Duration(row+1) / time.Duration(rows))
		for n := 0; n < per || time.Now().Before(end); n++ {
			if err := c.round(t.Context()); err != nil {
				t.Fatalf("round %d: %v", c.n, err)
			}
		}
		x := make([]int64, len(pages))
		for i, page := range pages {
			x[i] = liveBytes(t, page)
		}
		live = append(live, x)
		t.Logf("%6d rounds, %4.0f s: live MiB: %s", c.n, time.Since(began).Seconds(), table(names, x))
	}
	// Without KVD_SOAK a third is 120 namespaces, 240 sessions and 960 connections, and tables of a data folder still
	// grow: what leaves many KB behind each time is seen. In half an hour it is thousands of each, and a hundred bytes
	// are seen.
	third, slack := rows/3, int64(4<<20)
	if soak > 0 {
		slack = 1 << 20
	}
	for i, name := range names {
		warm, last := most(live[third:2*third], i), most(live[2*third:], i)
		if last > warm+warm/20+slack {
			t.Errorf("%s: %.1f MiB are live at the end, %.1f MiB a third before", name, float64(last)/(1<<20),
				float64(warm)/(1<<20))
		}
	}
}

func most(rows [][]int64, i int) (n int64) {
	for _, r := range rows {
		n = max(n, r[i])
	}
	return n
}

func table(names []string, x []int64) string {
	var b strings.Builder
	for i, name := range names {
		fmt.Fprintf(&b, "%s %.2f  ", name, float64(x[i])/(1<<20))
	}
	return strings.TrimSpace(b.String())
}

// liveBytes is how much of a process's heap is live: the least of three looks, each behind a garbage collection.
func liveBytes(t *testing.T, page string) int64 {
	t.Helper()
	least := int64(1) << 62
	for range 3 {
		if status, body := fetch("http://" + page + "/debug/pprof/heap?gc=1&debug=0"); status != 200 {
			t.Fatalf("%s: status %d: %.200s", page, status, body)
		}
		status, body := fetch("http://" + page + "/metrics")
		_, after, ok := strings.Cut(body, "\ngo_memstats_heap_alloc_bytes ")
		if status != 200 || !ok {
			t.Fatalf("%s: status %d, no go_memstats_heap_alloc_bytes", page, status)
		}
		line, _, _ := strings.Cut(after, "\n")
		f, err := strconv.ParseFloat(line, 64)
		if err != nil {
			t.Fatal(err)
		}
		least = min(least, int64(f))
	}
	return least
}

// churn uses a store in ways that leave nothing. Its methods are called by one goroutine at a time.
type churn struct {
	n       int // rounds
	dir     string
	redis   string
	calls   *dirclient.Client
	devices []*rdma.Device
}

func newChurn(dir, redis string) (c *churn, err error) {
	c = &churn{dir: dir, redis: redis}
	if c.devices, err = providers.OpenFor("", providers.Options{}); err != nil {
		return nil, err
	}
	c.calls, err = dirclient.Open(dirclient.Options{Addrs: []string{dir}, AttemptTimeout: patience})
	return c, err
}

func (c *churn) close() {
	_ = c.calls.Close()
	for _, d := range c.devices {
		_ = d.Close()
	}
}

// round does everything once, and the gateway's part several times, side by side.
func (c *churn) round(ctx context.Context) error {
	c.n++
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, 10)
	n := c.n
	wg.Go(func() { errs[8] = c.namespace(ctx, n) })
	wg.Go(func() { errs[9] = c.session(ctx, n) })
	for i := range 8 {
		wg.Go(func() { errs[i] = c.connection(ctx, fmt.Sprintf("%d-%d", n, i)) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// namespace makes one, uses it, and deletes it.
func (c *churn) namespace(ctx context.Context, n int) error {
	name := fmt.Sprintf("n%d", n)
	q := &dirpb.CreateNamespaceRequest{Name: name, Mode: dirpb.NamespaceMode_NAMESPACE_STORE, Replicas: 1,
		BytesPerNode: 1 << 20}
	err := c.calls.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.CreateNamespace(ctx, q)
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(c.use(ctx, name, "k"),
		c.calls.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
			_, err := d.DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: name})
			return err
		}))
}

// session is one in the namespace that stays.
func (c *churn) session(ctx context.Context, n int) error {
	return c.use(ctx, "cache", fmt.Sprint("session", n))
}

func (c *churn) use(ctx context.Context, namespace, key string) (err error) {
	x, err := client.Open(ctx, client.Options{Directory: []string{c.dir}, Namespace: namespace, Devices: c.devices,
		Lanes: 2, CacheBytes: 1 << 20})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close()) }()
	if _, err := x.Put(ctx, []byte(key), []byte("v"), client.PutOptions{}); err != nil {
		return err
	}
	if _, err := x.Get(ctx, []byte(key)); err != nil {
		return err
	}
	return x.Delete(ctx, []byte(key))
}

// connection uses a gateway with names that are used once. QUIT ends it, and every reply has come then.
func (c *churn) connection(ctx context.Context, id string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", c.redis)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	var b bytes.Buffer
	say := func(args ...string) {
		fmt.Fprintf(&b, "*%d\r\n", len(args))
		for _, a := range args {
			fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
		}
	}
	long := strings.Repeat("-- a comment that makes the script long\n", 400)
	say("HELLO", "3", "SETNAME", "name-"+id)
	say("EVAL", long+"return redis.call('SET', KEYS[1], ARGV[1], 'PX', '50') and '"+id+"'", "1", "key-"+id, id)
	say("SCRIPT", "LOAD", "return '"+id+"'")
	say("FUNCTION", "LOAD", "#!lua name=lib"+strings.ReplaceAll(id, "-", "_")+"\nredis.register_function('f"+
		strings.ReplaceAll(id, "-", "_")+"', function() return 1 end)")
	say("FUNCTION", "DELETE", "lib"+strings.ReplaceAll(id, "-", "_"))
	say("CLIENT", "TRACKING", "ON")
	say("GET", "key-"+id)
	say("MGET", "missing-"+id, "key-"+id)
	say("CLIENT", "TRACKING", "OFF")
	say("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "prefix-"+id)
	say("SUBSCRIBE", "channel-"+id)
	say("PSUBSCRIBE", "pattern-"+id+"*")
	say("SSUBSCRIBE", "shard-"+id)
	say("PUBLISH", "channel-"+id, "hello")
	say("PUBLISH", "nobody-"+id, "hello")
	say("WATCH", "watched-"+id)
	say("MULTI")
	say("HSET", "hash-"+id, "f", "v")
	say("PEXPIRE", "hash-"+id, "50")
	say("EXEC")
	say("BLPOP", "list-"+id, "0.001")
	say("XGROUP", "CREATE", "stream-"+id, "group-"+id, "$", "MKSTREAM")
	say("XREADGROUP", "GROUP", "group-"+id, "consumer-"+id, "COUNT", "1", "STREAMS", "stream-"+id, ">")
	say("DEL", "stream-"+id, "key-"+id, "hash-"+id)
	say("NOSUCH" + id)
	say("SET", "key-"+id)
	say("EVALSHA", fmt.Sprintf("%040x", len(id)), "0")
	say("QUIT")
	if _, err := conn.Write(b.Bytes()); err != nil {
		return err
	}
	reply, err := io.ReadAll(conn)
	if err == nil && (!bytes.Contains(reply, []byte("hello")) || !bytes.HasSuffix(reply, []byte("+OK\r\n"))) {
		err = fmt.Errorf("connection %s: %.2000q", id, reply)
	}
	return err
}
