package bench

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/webget"
)

// TestProfile makes anew, in the file that KVD_PROFILE names, the profile by which programs that ship are compiled: of
// a gateway over shm that serves all that compareGateway asks of it, and of a store that serves a client over tcp. Each
// part has the same time.
func TestProfile(t *testing.T) {
	gated(t, "profile")
	to := os.Getenv("KVD_PROFILE")
	switch {
	case smoke():
		to = filepath.Join(t.TempDir(), "kvd.pgo")
	case to == "":
		t.Skip("KVD_PROFILE, the file for it, is not set; run make profile")
	}
	const memory = "2GiB"
	_, at := startKvd(t, "dev", "--listen", anyPort, "--http", anyPort, "--redis", "off", "--memcached", "off",
		"--memnodes", "1", "--memory", memory)
	p := &profiler{tb: t, dir: t.TempDir(), seconds: scaled(4, 1)}
	p.gateway(startGateway(t, at["directory"], "cache"))
	p.store(at["directory"], at["http"])
	t.Logf("%s: %d bytes, of %d parts", to, p.merge(to), len(p.parts))
}

// profiler has a process say where its processor time goes while it is asked for something.
type profiler struct {
	tb      testing.TB
	dir     string
	seconds int
	parts   []string // files
}

// during profiles the process whose page is at web while do, which takes a moment, is called again and again.
func (p *profiler) during(web string, do func()) {
	p.tb.Helper()
	if smoke() && len(p.parts)%4 != 0 { // some of them
		p.parts = append(p.parts, "")
		return
	}
	part := filepath.Join(p.dir, strconv.Itoa(len(p.parts)))
	var over atomic.Bool
	fetched := make(chan error, 1)
	go func() {
		defer over.Store(true)
		fetched <- fetch(p.tb.Context(), web, "/debug/pprof/profile", fmt.Sprint("seconds=", p.seconds), part)
	}()
	for !over.Load() {
		do()
	}
	if err := <-fetched; err != nil {
		p.tb.Fatal(err)
	}
	p.parts = append(p.parts, part)
}

// fetch writes a process's page to a file.
func fetch(ctx context.Context, host, path, query, to string) error {
	status, page, err := webget.Get(ctx, &url.URL{Scheme: "http", Host: host, Path: path, RawQuery: query}, nil, 16<<20)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%s: status %d: %s", path, status, page)
	}
	if err != nil {
		return err
	}
	return os.WriteFile(to, page, 0o600)
}

// served is what samples are kept by: one of these functions is on their stacks. The rest of a process is not worth
// longer code.
const served = `kvd/(internal/(gateway|memcached|loop)|rdma|memnode)[./]`

// merge writes the sum of all parts, and returns its length in bytes.
func (p *profiler) merge(to string) int64 {
	p.tb.Helper()
	args := []string{"tool", "pprof", "-proto", "-focus", served, "-output", to}
	for _, part := range p.parts {
		if part != "" {
			args = append(args, part)
		}
	}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		p.tb.Fatalf("go %v: %v\n%s", args, err, out)
	}
	st, err := os.Stat(to)
	if err != nil {
		p.tb.Fatal(err)
	}
	return st.Size()
}

// gateway profiles g while it serves strings, hashes and memcached's protocol.
func (p *profiler) gateway(g *gatewayProcess) {
	host, port, err := net.SplitHostPort(g.redis)
	if err != nil {
		p.tb.Fatal(err)
	}
	redis := func(test string, size, depth int) {
		p.during(g.http, func() {
			redisBenchmark(p.tb, test, scaled(20_000*depth, 500), "-h", host, "-p", port, "-d", strconv.Itoa(size),
				"-P", strconv.Itoa(depth), "-c", "50")
		})
	}
	for _, size := range []int{3, 1024} {
		for _, depth := range []int{1, 16, 64} {
			redis("set", size, depth)
			redis("get", size, depth)
		}
	}
	var fields strings.Builder
	for i := range 10 {
		fmt.Fprintf(&fields, " field%d 100%d", i, i)
	}
	redis("hset hash:__rand_int__"+fields.String(), 3, 16)
	for _, test := range []string{"hset hash:__rand_int__ field7 12345", "hget hash:__rand_int__ field7",
		"hincrby hash:__rand_int__ field8 1"} {
		redis(test, 3, 16)
	}
	const conns, batch = 50, 64
	s := newKeySet(scaled(100_000, 1_000))
	var cs []*memcachedConn
	for range conns {
		cs = append(cs, dialMemcached(p.tb, g.memcached))
	}
	memcached := func(do func(c *memcachedConn, i int) error) {
		p.during(g.http, func() {
			together(conns, scaled(time.Second, time.Millisecond), func(k, i int) {
				if err := do(cs[k], i+k*1021); err != nil {
					p.tb.Error(err)
				}
			})
		})
	}
	for _, size := range []int{3, 1024} {
		value := make([]byte, size)
		memcached(func(c *memcachedConn, i int) error { return c.set(s.at(i), value) })
		memcached(func(c *memcachedConn, i int) error { _, err := c.get(s.at(i)); return err })
		memcached(func(c *memcachedConn, i int) error {
			var keys [batch][]byte
			for k := range keys {
				keys[k] = s.at(i*batch + k)
			}
			_, err := c.get(keys[:]...)
			return err
		})
	}
}

// store profiles the store whose page is at web while a client puts and gets over tcp.
func (p *profiler) store(directory, web string) {
	c := (&store{directory: directory}).open(p.tb, "tcp", "cache")
	s := newKeySet(scaled(100_000, 1_000))
	load(p.tb, c, s)
	x := newBatcher(s, 64, 0)
	p.during(web, func() {
		if err := x.do(p.tb.Context(), c, client.OpGet); err != nil {
			p.tb.Error(err)
		}
	})
	for _, size := range []int{valueLen, 4 << 10} {
		for _, o := range ops {
			p.during(web, func() {
				together(16, scaled(time.Second, time.Millisecond), func(k, i int) {
					if err := o.do(p.tb.Context(), c, s, i+k*1021, make([]byte, size)); err != nil {
						p.tb.Error(err)
					}
				})
			})
		}
	}
}
