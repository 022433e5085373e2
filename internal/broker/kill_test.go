package broker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// gate holds PUTs of keys that begin with "hold", until it is opened.
type gate struct {
	mu   sync.Mutex
	held int
	open chan struct{}
}

func newGate() *gate { return &gate{open: make(chan struct{})} }

func (g *gate) begin(ctx context.Context, op client.OpEvent) context.Context {
	keys := [][]byte{op.Key}
	for i := range op.Ops {
		keys = append(keys, op.Ops[i].Key)
	}
	n := 0
	for _, k := range keys {
		if op.Kind == "put" && strings.HasPrefix(string(k), "hold") {
			n++
		}
	}
	if n == 0 {
		return ctx
	}
	g.mu.Lock()
	g.held += n
	open := g.open
	g.mu.Unlock()
	<-open
	return ctx
}

// until waits until n operations are held.
func (g *gate) until(t *testing.T, n int) {
	t.Helper()
	testutil.Until(t, fmt.Sprint(n, " operations are held"), func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.held == n
	})
}

// release lets all go on; those to come are held again.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.open)
	g.open, g.held = make(chan struct{}), 0
}

// mapped counts the mappings of rings and arenas.
func mapped(t *testing.T) (n int) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "memfd:kvd ring") + strings.Count(string(b), "memfd:arena")
}

// shares counts the files that connections have of rings, arenas, eventfds and processes.
func shares(t *testing.T) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		to, err := os.Readlink("/proc/self/fd/" + f.Name())
		if err == nil && (strings.Contains(to, "memfd:kvd ring") || strings.Contains(to, "memfd:arena") ||
			strings.Contains(to, "eventfd") || strings.Contains(to, "pidfd")) {
			n++
		}
	}
	return n
}

// busy counts the goroutines that connections have.
func busy() (n int) {
	b := make([]byte, 4<<20)
	b = b[:runtime.Stack(b, true)]
	for _, g := range strings.Split(string(b), "\n\n") {
		if strings.Contains(g, "broker.(*conn)") || strings.Contains(g, "broker.(*taker)") ||
			strings.Contains(g, "broker.(*queue)") {
			n++
		}
	}
	return n
}

// left is what connections have, which is nothing without any.
type left struct{ files, mapped int }

// before counts without connections, once the store's clients have all theirs.
func (w *world) before(t *testing.T) left {
	t.Helper()
	for name, c := range w.c {
		for i := range 256 {
			if _, err := c.Put(t.Context(), fmt.Append(nil, "warm", i), nil, client.PutOptions{}); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	return left{shares(t), mapped(t)}
}

// none waits until nothing of connections is left.
func (w *world) none(t *testing.T, before left) {
	t.Helper()
	for _, x := range w.b.tenants {
		testutil.UntilNone(t, "connections", func() int64 { return x.stats.Clients.Load() })
		testutil.UntilNone(t, "bytes of arenas", func() int64 { return x.stats.ArenaBytes.Load() })
		testutil.UntilNone(t, "queues", func() int64 { return x.stats.Queues.Load() })
	}
	testutil.UntilNone(t, "mappings", func() int { return mapped(t) - before.mapped })
	testutil.UntilNone(t, "files", func() int { return shares(t) - before.files })
	testutil.UntilNone(t, "goroutines", busy)
}

// stored asks the store for a key of the first tenant.
func (w *world) stored(t *testing.T, key string) bool {
	t.Helper()
	_, err := w.c["default"].Get(t.Context(), []byte(key))
	if err != nil && !errors.Is(err, client.ErrNotFound) {
		t.Fatalf("get %s: %v", key, err)
	}
	return err == nil
}

// draining waits until the only connection of the first tenant takes nothing more.
func (w *world) draining(t *testing.T) {
	t.Helper()
	testutil.Until(t, "the connection drains", func() bool {
		x := w.b.tenants[0]
		x.mu.Lock()
		defer x.mu.Unlock()
		for c := range x.mu.conns {
			if c.ended.Load() {
				return true
			}
		}
		return false
	})
}

// child is a process with a program in it. It has said that it is in its state.
type child struct {
	t    *testing.T
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	over bool
}

const envState = "KVD_TEST_PROGRAM"

func (w *world) child(t *testing.T, state string) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestProgram$", "-test.v")
	cmd.Env = append(os.Environ(), envState+"="+state, envState+"_AT="+w.paths["default"])
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
	c := &child{t: t, cmd: cmd, in: in, out: bufio.NewReader(out)}
	t.Cleanup(c.kill)
	c.says("ready")
	return c
}

// says reads on until a line that begins with a word, and returns its rest.
func (c *child) says(word string) string {
	c.t.Helper()
	var all strings.Builder
	for {
		line, err := c.out.ReadString('\n')
		if rest, ok := strings.CutPrefix(line, "PROGRAM "+word); ok {
			return strings.TrimSpace(rest)
		}
		if all.WriteString(line); err != nil {
			c.t.Fatalf("the program ended before %q: %s", word, all.String())
		}
	}
}

// tell has the program go on.
func (c *child) tell() {
	c.t.Helper()
	if _, err := c.in.Write([]byte{1}); err != nil {
		c.t.Fatal(err)
	}
}

// kill is SIGKILL. A child of its own goes on until its standard input ends.
func (c *child) kill() {
	if c.over {
		return
	}
	c.over = true
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
	_ = c.in.Close()
}

// TestProgram is what a child does.
func TestProgram(t *testing.T) {
	state := os.Getenv(envState)
	switch state {
	case "":
		t.Skip("for child processes")
	case "grandchild":
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	ready := func() { fmt.Println("\nPROGRAM ready") }
	w := &world{paths: map[string]string{"default": os.Getenv(envState + "_AT")}}
	if state == "silent" {
		w.dial(t, "default")
		ready()
		select {}
	}
	p := w.open(t, "default", 1<<20, ring.Hello{Name: "child"})
	arena := p.welcome.Arena
	held := func(i int) {
		copy(p.arena[i*4096:], "mine")
		p.start(ring.Submission{Op: ring.OpPut, Memory: arena, Offset: uint64(i) * 4096, Length: 4}, fmt.Sprint("hold", i), "")
		p.publish()
	}
	switch state {
	case "serving":
	case "written": // not published
		p.start(ring.Submission{Op: ring.OpPut, Length: 4}, "hold0", "mine")
	case "taken", "stopped":
		held(0)
	case "many":
		for i := range 16 {
			held(i)
		}
	case "registered":
		p.send((&ring.Register{Length: 1 << 20}).Message(5), p.makeArena(1<<20, unix.F_SEAL_SHRINK))
		if h, _, _, err := p.hear(); err != nil || h.Kind != ring.KindDone {
			t.Fatalf("%+v, %v", h, err)
		}
		held(0)
	case "forked":
		held(0)
		f, err := p.nc.File()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestProgram$")
		cmd.Env = append(os.Environ(), envState+"=grandchild")
		cmd.Stdin, cmd.ExtraFiles = os.Stdin, []*os.File{f}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
	case "bye":
		held(0)
	}
	ready()
	if state != "bye" && state != "registered" {
		select {}
	}
	_, _ = os.Stdin.Read(make([]byte, 1)) // until it is held
	if state == "registered" {
		p.send(ring.Numbered(ring.Head{Kind: ring.KindDeregister, Serial: 6}, arena)) // answered once that is over
		fmt.Println("\nPROGRAM deregisters")
		select {}
	}
	p.send(ring.Bare(ring.Head{Kind: ring.KindBye}))
	for { // the socket's end is the last
		if _, _, _, err := p.hear(); err != nil {
			break
		}
	}
	all, err := p.Reap(nil)
	if err != nil || len(all) != 1 {
		t.Fatalf("%d completions, %v", len(all), err)
	}
	fmt.Printf("\nPROGRAM verdict %d\n", all[0].Outcome)
}

// TestKilled: a program that is killed in any state leaves nothing, and others are served meanwhile. Its memory stays
// mapped for as long as an operation is under way there.
func TestKilled(t *testing.T) {
	g := newGate()
	w := newWorldWith(t, nil, &client.Events{Begin: g.begin})
	before := w.before(t)
	for _, x := range []struct {
		state string
		held  int
	}{{"silent", 0}, {"serving", 0}, {"written", 0}, {"taken", 1}, {"many", 16}, {"registered", 1}, {"forked", 1},
		{"stopped", 1}} {
		t.Run(x.state, func(t *testing.T) {
			c := w.child(t, x.state)
			g.until(t, x.held)
			if x.state == "stopped" {
				if err := c.cmd.Process.Signal(unix.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				// What was taken of a program that stands still ends as it would have.
				g.release()
				testutil.Until(t, "the value is stored", func() bool { return w.b.tenants[0].stats.Codes[ring.OK].Load() > 0 })
			}
			if x.state == "registered" {
				c.tell()
				c.says("deregisters")
			}
			if err := c.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			if x.held > 0 && x.state != "stopped" {
				w.draining(t)
				if w.b.tenants[0].stats.ArenaBytes.Load() == 0 || mapped(t) == before.mapped {
					t.Error("memory is unmapped while operations are under way there")
				}
				other := w.open(t, "other", 0, ring.Hello{})
				oc, _ := other.one(ring.Submission{Op: ring.OpPut, Length: 1}, "k", "v")
				other.want("another tenant meanwhile", oc, ring.Yes, ring.OK)
				other.close()
				g.release()
			}
			// A forked child, if there is one, holds the socket until its input ends.
			for _, tn := range w.b.tenants {
				testutil.UntilNone(t, "connections", func() int64 { return tn.stats.Clients.Load() })
			}
			c.kill()
			for i := range x.held {
				if key := fmt.Sprint("hold", i); x.state != "stopped" && w.stored(t, key) {
					t.Errorf("%s was stored, though its operation began after its program's death", key)
				}
			}
			w.none(t, before)
		})
	}
	t.Run("bye", func(t *testing.T) {
		if err := w.c["default"].Delete(t.Context(), []byte("hold0")); err != nil && !errors.Is(err, client.ErrNotFound) {
			t.Fatal(err)
		}
		c := w.child(t, "bye")
		g.until(t, 1)
		c.tell()
		w.draining(t)
		g.release()
		verdict := c.says("verdict")
		if was := w.stored(t, "hold0"); was != (verdict == "0") {
			t.Errorf("outcome %s, and stored is %v", verdict, was)
		}
		c.kill()
		w.none(t, before)
	})
}
