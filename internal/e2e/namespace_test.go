package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
)

// redis is a connection to a gateway.
type redis struct {
	t *testing.T
	c net.Conn
	r *bufio.Reader
}

func (w *world) redis(addr string) *redis {
	w.t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	return &redis{w.t, c, bufio.NewReader(c)}
}

// do sends an inline command and gives the first line of the reply, which has no other.
func (r *redis) do(format string, args ...any) string {
	_ = r.c.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintf(r.c, format+"\r\n", args...); err != nil {
		return err.Error()
	}
	l, err := r.r.ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(l)
}

// fetch gets a page; status 0: no answer.
func fetch(url string) (status int, body string) {
	c := http.Client{Timeout: patience}
	rep, err := c.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer rep.Body.Close()
	b, err := io.ReadAll(rep.Body)
	if err != nil {
		return 0, err.Error()
	}
	return rep.StatusCode, string(b)
}

// until waits for a condition.
func (w *world) until(what string, cond func() bool) {
	w.t.Helper()
	testutil.Until(w.t, what, cond)
}

// TestNamespace changes the copies of a namespace under load, then deletes it while a memory
// node is stopped and a gateway serves it. No operation fails before; none succeeds after.
func TestNamespace(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	web, http, listen := freeAddr(t), freeAddr(t), freeAddr(t)
	w.start(append(w.directory(t.TempDir(), freeAddr(t)), "--http-listen", web)...)
	w.start(w.memnode("m1")...)
	m2 := w.start(w.memnode("m2")...)
	w.must(nil, "namespace", "create", "keep", "--replicas", "2", "--bytes", "8MiB")
	w.must(nil, "namespace", "create", "n", "--replicas", "1", "--bytes", "16MiB")
	w.must([]byte("v"), "--namespace", "keep", "put", "k")
	w.start("gateway", "--databases", "n", "--directory", w.dir, "--listen", listen, "--listen-memcached", "off",
		"--http-listen", http)

	var stop atomic.Bool
	var sets atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	for i := range 2 {
		c := w.redis(listen)
		wg.Go(func() {
			for n := 1; !stop.Load(); n++ {
				if got, want := c.do("INCR key%d", i), fmt.Sprintf(":%d", n); got != want {
					t.Errorf("INCR: %q, want %q", got, want)
					return
				}
				sets.Add(1)
			}
		})
	}
	loaded := func(n int64) {
		t.Helper()
		at := sets.Load()
		w.until("operations", func() bool { return t.Failed() || sets.Load() >= at+n })
	}
	loaded(200)
	_, stderr, status := w.ctl(nil, "namespace", "set", "n", "--replicas", "3")
	if status != 1 || !strings.Contains(stderr, "need as many memory nodes; 2 are up") {
		t.Errorf("3 copies on 2 memory nodes: exit status %d\n%s", status, stderr)
	}
	for _, n := range []string{"2", "1", "2"} {
		w.must(nil, "namespace", "set", "n", "--replicas", n, "--wait")
		if st := string(w.must(nil, "status")); !strings.Contains(st, "4 of 4 placement groups fully replicated") {
			t.Errorf("with %s copies the status is\n%s", n, st)
		}
		loaded(200)
	}
	stop.Store(true)
	wg.Wait()

	if _, stderr, status = w.ctl([]byte("m\n"), "namespace", "delete", "n"); status != 1 ||
		!strings.Contains(stderr, "Type its name") {
		t.Errorf("delete without its name: exit status %d\n%s", status, stderr)
	}
	if _, stderr, status = w.ctl([]byte("n\n"), "namespace", "delete", "n"); status != 1 ||
		!strings.Contains(stderr, "kvd gateway") || !strings.Contains(stderr, "--end-sessions") {
		t.Errorf("delete while a gateway serves it: exit status %d\n%s", status, stderr)
	}
	has := func(text string) bool {
		status, body := fetch("http://" + web + "/metrics")
		return status == 200 && strings.Contains(body, text)
	}
	if !has(`namespace="n"`) {
		t.Error("the directory has no metrics of the namespace")
	}
	c := w.redis(listen)
	if got := c.do("SET k v"); got != "+OK" {
		t.Fatalf("SET: %s", got)
	}
	// A memory node that is silent owes a fence until it counts as lost.
	if err := syscall.Kill(m2.pid(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(m2.pid(), syscall.SIGCONT) // so that it can end
	w.must([]byte("n\n"), "namespace", "delete", "n", "--end-sessions")
	if got := string(w.must(nil, "namespace", "list")); strings.Contains(got, " n ") {
		t.Errorf("namespaces are\n%s", got)
	}
	w.until("the gateway to say so", func() bool {
		got := c.do("SET k v")
		if got == "+OK" {
			t.Fatal("SET in a namespace that was deleted")
		}
		return got == `-ERR kvd: unknown namespace: namespace "n" was deleted`
	})
	w.until("the gateway not to be ready", func() bool {
		status, body := fetch("http://" + http + "/readyz")
		return status == 503 && strings.Contains(body, "was deleted")
	})
	if has(`namespace="n"`) {
		t.Error("the directory has metrics of a namespace that is gone")
	}
	if _, stderr, status := w.ctl(nil, "--namespace", "n", "get", "k"); status != 2 ||
		!strings.Contains(stderr, `unknown namespace: namespace "n"`) {
		t.Errorf("get: exit status %d\n%s", status, stderr)
	}

	// The memory node that was stopped comes back and gives the memory back, too.
	if err := syscall.Kill(m2.pid(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	w.until("memory nodes to have what is wanted and no more", func() bool {
		var st struct {
			Map struct {
				Nodes []struct {
					ID    int    `json:"id"`
					State string `json:"state"`
					Used  string `json:"used_bytes"`
				} `json:"nodes"`
			} `json:"map"`
			Stats map[string]struct {
				Registered string `json:"registered_bytes"`
			} `json:"node_stats"`
		}
		if err := json.Unmarshal(w.must(nil, "-o", "json", "status"), &st); err != nil {
			t.Fatal(err)
		}
		for _, n := range st.Map.Nodes {
			if n.State != "NODE_UP" || n.Used != fmt.Sprint(8<<20) || st.Stats[fmt.Sprint(n.ID)].Registered != n.Used {
				return false
			}
		}
		return len(st.Map.Nodes) == 2
	})
	if got := string(w.must(nil, "--namespace", "keep", "get", "k")); got != "v" {
		t.Errorf("the other namespace has %q", got)
	}

	// A new namespace of the same name is another one, which the gateway finds by itself.
	created := string(w.must(nil, "-o", "json", "namespace", "create", "n", "--replicas", "1", "--bytes", "16MiB"))
	if !strings.Contains(created, `"id":3,`) {
		t.Errorf("created %s", created)
	}
	w.until("the gateway to serve again", func() bool { return c.do("SET k w") == "+OK" })
	if got := c.do("EXISTS key0"); got != ":0" {
		t.Errorf("a key of the namespace that was deleted: %s", got)
	}
}
