package devstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, o Options) *Store {
	t.Helper()
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := Start(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		left, err := os.ReadDir(os.Getenv("XDG_RUNTIME_DIR"))
		if err != nil || len(left) != 0 {
			t.Errorf("left behind after Close: %v %v", left, err)
		}
	})
	return s
}

// roundTrip opens a client, puts and gets a few keys and closes it.
func roundTrip(t *testing.T, s *Store, provider string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: s.Directory(), Devices: s.Devices(), Provider: provider})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Errorf("close client: %v", err)
		}
	}()
	for i := range 20 {
		k := []byte(provider + strconv.Itoa(i))
		if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
			t.Fatalf("put %s: %v", k, err)
		}
		it, err := c.Get(ctx, k)
		if err != nil || string(it.Value) != string(k) {
			t.Fatalf("get %s: %q, %v", k, it.Value, err)
		}
	}
	for node, p := range c.Stats().Connections {
		if p != provider {
			t.Errorf("connected to %s over %s, want %s", node, p, provider)
		}
	}
}

func TestProviders(t *testing.T) {
	for _, providers := range [][]string{{"shm", "tcp"}, {"sim"}} {
		t.Run(strings.Join(providers, "+"), func(t *testing.T) {
			s := start(t, Options{Nodes: 2, CapacityBytes: 64 << 20, Providers: providers})
			for _, p := range providers {
				roundTrip(t, s, p)
			}
			st, err := s.Status(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if n := len(st.GetMap().GetNodes()); n != 2 {
				t.Errorf("%d memory nodes in the map, want 2", n)
			}
		})
	}
}

func TestNamespaces(t *testing.T) {
	s := start(t, Options{Nodes: 2, CapacityBytes: 64 << 20, Replicas: 2, Namespaces: []Namespace{
		{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1, BytesPerNode: 8 << 20},
		{Name: "rest"},
	}})
	st, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range st.GetMap().GetNamespaces() {
		got = append(got, fmt.Sprintf("%s %v %d %dMiB", n.GetName(), n.GetMode(), n.GetReplicas(),
			n.GetBytesPerNode()>>20))
	}
	want := []string{"default NAMESPACE_STORE 2 32MiB", "cache NAMESPACE_CACHE 1 8MiB", "rest NAMESPACE_STORE 2 12MiB"}
	if !slices.Equal(got, want) {
		t.Errorf("namespaces %q, want %q", got, want)
	}
	if n := s.DirectoryNodes(); len(n) != 1 || n[0].Addr() != s.Directory()[0] {
		t.Errorf("directory nodes %v", n)
	}
}

func TestSocketsArePrivate(t *testing.T) {
	s := start(t, Options{Providers: []string{"shm"}})
	fi, err := os.Stat(s.run)
	if err != nil || fi.Mode().Perm() != 0o700 {
		t.Fatalf("folder of the sockets: %v %v, want mode 0700", fi.Mode(), err)
	}
	if _, err := os.Stat(filepath.Join(s.run, "m1.sock")); err != nil {
		t.Fatal(err)
	}
}

// Three directory nodes lose each of them in turn, the leader included, and
// clients that know all of them notice nothing.
func TestDirectoryRestarts(t *testing.T) {
	s := start(t, Options{Directories: 3, CapacityBytes: 64 << 20, Dir: t.TempDir(), Providers: []string{"shm"}})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	for i := range 3 {
		if err := s.StopDirectory(i); err != nil {
			t.Fatal(err)
		}
		roundTrip(t, s, "shm")
		if err := s.RestartDirectory(ctx, i); err != nil {
			t.Fatal(err)
		}
		if err := s.mu.directories[i].node.Ready(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.StopDirectory(0); err != nil {
		t.Fatal(err)
	}
	if err := s.StopDirectory(0); err == nil {
		t.Error("a stopped directory node was stopped again")
	}
}

func TestOneDirectoryRestarts(t *testing.T) {
	s := start(t, Options{CapacityBytes: 64 << 20, Dir: t.TempDir(), Providers: []string{"shm"}})
	roundTrip(t, s, "shm")
	before, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RestartDirectory(t.Context(), 0); err == nil {
		t.Fatal("a running directory node was started")
	}
	if err := s.StopDirectory(0); err != nil {
		t.Fatal(err)
	}
	if err := s.RestartDirectory(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, s, "shm")
	after, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if before.GetClusterId() != after.GetClusterId() || len(after.GetMap().GetNodes()) != 1 ||
		len(after.GetMap().GetShards()) == 0 {
		t.Errorf("after the restart: cluster %q (was %q), map %v", after.GetClusterId(), before.GetClusterId(),
			after.GetMap())
	}
}

// A killed memory node is missed after its lease, and one of its name that comes
// later is another life of it.
func TestNodesComeAndGo(t *testing.T) {
	s := start(t, Options{Nodes: 2, Replicas: 2, CapacityBytes: 64 << 20, Lease: 200 * time.Millisecond,
		Providers: []string{"shm"}})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	await := func(what string, ok func(map[string]*dirpb.Node) bool) {
		t.Helper()
		for {
			st, err := s.Status(ctx)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			nodes := make(map[string]*dirpb.Node)
			for _, n := range st.GetMap().GetNodes() {
				nodes[n.GetName()] = n
			}
			if ok(nodes) {
				return
			}
			select {
			case <-ctx.Done():
				t.Fatalf("%s: %v", what, nodes)
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
	st, err := s.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if ns := st.GetMap().GetNamespaces(); len(ns) != 1 || ns[0].GetName() != "default" || ns[0].GetReplicas() != 2 {
		t.Errorf("namespaces %v, want default with 2 copies", ns)
	}
	first := st.GetMap().GetNodes()[1].GetIncarnation()
	if err := s.AddNode(ctx, "m2"); err == nil {
		t.Error("a running memory node was started")
	}
	if err := s.KillNode(1); err != nil {
		t.Fatal(err)
	}
	if err := s.KillNode(1); err == nil {
		t.Error("a stopped memory node was stopped again")
	}
	await("killed", func(n map[string]*dirpb.Node) bool { return n["m2"].GetState() == dirpb.NodeState_NODE_DOWN })
	for _, name := range []string{"m2", "m3"} {
		if err := s.AddNode(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	await("added", func(n map[string]*dirpb.Node) bool {
		return n["m2"].GetState() == dirpb.NodeState_NODE_UP && n["m2"].GetIncarnation() != first &&
			n["m3"].GetState() == dirpb.NodeState_NODE_UP
	})
	if n := s.Nodes(); len(n) != 4 {
		t.Errorf("%d memory nodes, want 4 with the killed one", len(n))
	}
}

func TestInMemoryDirectoryIsForgotten(t *testing.T) {
	s := start(t, Options{Providers: []string{"sim"}})
	if err := s.StopDirectory(0); err != nil {
		t.Fatal(err)
	}
	if err := s.RestartDirectory(t.Context(), 0); !errors.Is(err, ErrInMemory) {
		t.Fatalf("restart: %v, want ErrInMemory", err)
	}
}

// A store lends far more than the machine has until somebody writes to it.
func TestMemoryIsLazy(t *testing.T) {
	s := start(t, Options{Nodes: 2, CapacityBytes: 32 << 30, Providers: []string{"shm"}})
	before := resident(t)
	roundTrip(t, s, "shm")
	if grown := resident(t) - before; grown > 512<<20 {
		t.Errorf("resident memory grew by %d MiB for 20 small keys", grown>>20)
	}
}

// resident is this process's resident memory in bytes, shared memory included.
func resident(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

func TestStartRefuses(t *testing.T) {
	for _, tc := range []struct {
		name string
		o    Options
		want string
	}{
		{"sim with others", Options{Providers: []string{"sim", "tcp"}}, "atomics"},
		{"unknown provider", Options{Providers: []string{"ib"}}, `unknown provider "ib"`},
		{"negative counts", Options{Nodes: -1, Directories: -1}, "Directories is -1"},
		{"too many copies", Options{Nodes: 2, Replicas: 3}, "Replicas is 3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := Start(t.Context(), tc.o)
			if err == nil {
				t.Fatal(errors.Join(errors.New("started"), s.Close()))
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q does not contain %q", err, tc.want)
			}
		})
	}
}

func TestWait(t *testing.T) {
	s := start(t, Options{Providers: []string{"sim"}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Wait(ctx); err != nil {
		t.Errorf("Wait with an ended context: %v", err)
	}
	if got := s.Directory(); len(got) != 1 || slices.Contains(got, "") {
		t.Errorf("Directory is %q", got)
	}
}

// The arrangement of `kvd dev`: a namespace with two copies beside a cache with one. A memory node dies that has the
// last copies of the cache's, which holds something. Where the cache cannot start over, since nobody has room, it
// waits; the other namespace goes on without the memory node either way, before that counts as lost.
func TestCacheBesideCopies(t *testing.T) {
	for _, room := range []bool{false, true} {
		t.Run(fmt.Sprintf("room=%t", room), func(t *testing.T) {
			o := Options{Nodes: 3, CapacityBytes: 48 << 20, Lease: time.Second, Namespaces: []Namespace{
				{Name: "default", BytesPerNode: 32 << 20},
				{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1, BytesPerNode: 16 << 20},
			}}
			if room {
				o.CapacityBytes *= 2
			}
			s := start(t, o)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			open := func(ns string, limit time.Duration) *client.Client {
				c, err := client.Open(ctx, client.Options{Directory: s.Directory(), Devices: s.Devices(), Namespace: ns,
					OpTimeout: limit})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					closed := make(chan error, 1)
					go func() { closed <- c.Close() }()
					select {
					case err := <-closed:
						if err != nil {
							t.Error(err)
						}
					case <-time.After(testutil.Limit):
						t.Errorf("the client of %s does not close: nothing that it was asked for is under way", ns)
					}
				})
				return c
			}
			put := func(c *client.Client, value string) {
				t.Helper()
				for i := range 64 {
					for err := errors.New("not yet"); err != nil; {
						if _, err = c.Put(ctx, []byte(strconv.Itoa(i)), []byte(value),
							client.PutOptions{}); ctx.Err() != nil {
							t.Fatal(err)
						}
					}
				}
			}
			// The cache's client sees to its own memory, too, also where nobody answers. Its end waits for no such
			// thing.
			data, cache := open("default", 0), open("cache", time.Hour)
			put(data, "before")
			put(cache, "before")
			if err := s.KillNode(1); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			put(data, "after")
			t.Log("went on after", time.Since(began))
			if room {
				put(cache, "after")
				return
			}
			st, err := s.Status(ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range st.GetMap().GetNodes() {
				if n.GetName() == "m2" && (n.GetState() != dirpb.NodeState_NODE_UP || !n.GetWaiting()) {
					t.Fatalf("m2 is %v when the copies elsewhere have gone on, want it waited for", n)
				}
			}
		})
	}
}
