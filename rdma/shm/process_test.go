package shm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

const regionBytes = 32 << 20

// childMain runs this binary as the other process, if the environment says so.
func childMain() {
	role := os.Getenv("KVD_SHM_TEST_ROLE")
	if role == "" {
		return
	}
	var err error
	switch role {
	case "dialer":
		err = childDialer(os.Getenv("KVD_SHM_TEST_ADDR"))
	case "memory-node":
		err = childMemoryNode(os.Getenv("KVD_SHM_TEST_ADDR"))
	}
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// side is a device with a PD and one region; drivers are used directly.
type side struct {
	d  *Device
	pd driver.PD
	m  *driver.Memory
	mr driver.MR
}

func newSide(o Options, a driver.Access) (*side, error) {
	d, err := Open(o)
	if err != nil {
		return nil, err
	}
	s := &side{d: d}
	if s.pd, err = d.AllocPD(); err != nil {
		return nil, err
	}
	if s.m, err = d.Alloc(regionBytes, driver.AllocOptions{Name: "test", Shared: true}); err != nil {
		return nil, err
	}
	s.mr, err = s.pd.RegMR(s.m, 0, regionBytes, a)
	return s, err
}

func (s *side) close() error {
	return errors.Join(s.mr.Deregister(), s.m.Free(), s.pd.Dealloc(), s.d.Close())
}

// childDialer reads an rkey, adds 1000 to word 0, fills page 1 from page 2, says
// so, and WRITEs without end until its QP fails.
func childDialer(addr string) error {
	var rkey uint64
	if _, err := fmt.Scan(&rkey); err != nil {
		return err
	}
	s, err := newSide(Options{}, driver.AccessLocal)
	if err != nil {
		return err
	}
	cq, err := s.d.CreateCQ(16)
	if err != nil {
		return err
	}
	qp, err := s.d.Dial(context.Background(), driver.DialRequest{PD: s.pd, CQ: cq, Addr: addr,
		Private: []byte("hello")})
	if err != nil {
		return err
	}
	do := func(w driver.WR) error {
		w.Flags, w.LKey, w.RKey = driver.Signaled, s.mr.LKey(), rkey
		if _, err := qp.PostSend([]driver.WR{w}); err != nil {
			return err
		}
		var wc [1]driver.WC
		if cq.Poll(wc[:]) != 1 || wc[0].Status != driver.Success {
			return fmt.Errorf("WC %+v: %w", wc[0], errWC)
		}
		return nil
	}
	for range 1000 {
		if err := do(driver.WR{Op: driver.OpFetchAdd, Local: s.m.Bytes[:8], Swap: 1}); err != nil {
			return err
		}
	}
	if err := do(driver.WR{Op: driver.OpRead, Local: s.m.Bytes[:4096], RemoteAddr: 8192}); err != nil {
		return err
	}
	if err := do(driver.WR{Op: driver.OpWrite, Local: s.m.Bytes[:4096], RemoteAddr: 4096}); err != nil {
		return err
	}
	fmt.Println("worked")
	// A long WRITE may see the fence before it begins, and is flushed then; the next post is refused.
	for err == nil || errors.Is(err, errWC) && qp.State() == driver.StateErr {
		err = do(driver.WR{Op: driver.OpWrite, Local: s.m.Bytes[8192:], RemoteAddr: 8192})
	}
	fmt.Println("ended:", errors.Is(err, driver.ErrQPError) && qp.State() == driver.StateErr)
	return nil
}

// childMemoryNode lends a region, prints its rkey, and lives until killed.
func childMemoryNode(addr string) error {
	s, err := newSide(Options{}, rdmatest.All)
	if err != nil {
		return err
	}
	copy(s.m.Bytes[4096:], "from the other process")
	if _, err := s.d.Listen(addr, driver.ListenOptions{
		Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) { return s.pd, rdmatest.All, nil },
	}); err != nil {
		return err
	}
	fmt.Println(s.mr.RKey())
	_, _ = io.Copy(io.Discard, os.Stdin)
	return nil
}

// child is another process running this binary.
type child struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startChild(t *testing.T, role, addr string) *child {
	t.Helper()
	c := &child{t: t, cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), "KVD_SHM_TEST_ROLE="+role, "KVD_SHM_TEST_ADDR="+addr)
	c.cmd.Stderr = os.Stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if c.cmd.ProcessState == nil {
			c.kill()
		}
	})
	return c
}

func (c *child) line() string {
	c.t.Helper()
	s, err := c.out.ReadString('\n')
	if err != nil {
		c.t.Fatalf("child: %q, %v", s, err)
	}
	return strings.TrimSpace(s)
}

func (c *child) signal(s os.Signal) {
	c.t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		c.t.Fatal(err)
	}
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// stopInside stops the child at a moment when it is inside a verb.
func (c *child) stopInside(p *peer) {
	c.t.Helper()
	for end := time.Now().Add(rdmatest.Patience); time.Now().Before(end); {
		if _, busy := p.inside(); !busy {
			runtime.Gosched() // it may not have been given a processor yet
			continue
		}
		c.signal(unix.SIGSTOP)
		var ws unix.WaitStatus
		if _, err := unix.Wait4(c.cmd.Process.Pid, &ws, unix.WUNTRACED, nil); err != nil || !ws.Stopped() {
			c.t.Fatalf("child did not stop: %v, %v", ws, err)
		}
		if _, busy := p.inside(); busy {
			return
		}
		c.signal(unix.SIGCONT)
	}
	c.t.Fatal("the child is never inside a verb")
}

// node is a memory node in this process with one dialer in another.
type node struct {
	*side
	ln     driver.Listener
	peer   *peer
	closed atomic.Int32
	gone   chan driver.Peer // the first whose Closed was called
	c      *child
}

func newNode(t *testing.T) *node {
	t.Helper()
	s, err := newSide(Options{ConfirmTimeout: 50 * time.Millisecond}, rdmatest.All)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{side: s, gone: make(chan driver.Peer, 1)}
	accepted := make(chan *peer, 1)
	rdmatest.Pattern(s.m.Bytes[8192:12288], 5)
	n.ln, err = s.d.Listen(filepath.Join(t.TempDir(), "s"), driver.ListenOptions{
		Accept: func(r driver.ConnRequest) (driver.PD, driver.Access, error) {
			if string(r.Private) != "hello" {
				return nil, 0, errors.New("not hello")
			}
			accepted <- r.Peer.(*peer)
			return s.pd, rdmatest.All, nil
		},
		Closed: func(p driver.Peer) {
			if n.closed.Add(1) == 1 {
				n.gone <- p
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	n.c = startChild(t, "dialer", n.ln.Addr())
	fmt.Fprintln(n.c.in, s.mr.RKey())
	if got := n.c.line(); got != "worked" {
		t.Fatalf("child: %s", got)
	}
	n.peer = <-accepted
	t.Cleanup(func() {
		if err := errors.Join(n.ln.Close(), s.close()); err != nil {
			t.Error(err)
		}
		if got := n.closed.Load(); got != 1 {
			t.Errorf("Closed was called %d times", got)
		}
	})
	return n
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func (n *node) waitGone(t *testing.T) {
	t.Helper()
	select {
	case p := <-n.gone:
		if p != n.peer {
			t.Errorf("Closed was called for %s", p.Remote())
		}
	case <-time.After(rdmatest.Patience):
		t.Fatal("Closed was not called")
	}
}

// errWC: a work request did not complete with success.
var errWC = errors.New("not done")

// Two processes: atomics, READ and WRITE reach the owner's bytes. Then kill -9
// inside a WRITE: the owner notices, confirms, and goes on.
func TestDialerKilledInsideVerb(t *testing.T) {
	n := newNode(t)
	if got := rdmatest.Le(n.m.Bytes); got != 1000 {
		t.Errorf("word is %d after 1000 FETCH_ADDs", got)
	}
	want := make([]byte, 4096)
	rdmatest.Pattern(want, 5)
	if got := n.m.Bytes[4096:8192]; string(got) != string(want) {
		t.Error("the child's READ and WRITE did not copy the page")
	}
	if want := fmt.Sprintf("pid %d uid %d", n.c.cmd.Process.Pid, os.Getuid()); n.peer.Remote() != want {
		t.Errorf("Remote is %q, want %q", n.peer.Remote(), want)
	}
	n.c.stopInside(n.peer)
	n.c.kill()
	n.waitGone(t)
	if err := n.peer.Fence(within(t, rdmatest.Patience)); err != nil {
		t.Error(err)
	}
	n.m.Bytes[regionBytes-1] = 1
}

// A process stopped inside a verb can be neither fenced nor deregistered under;
// both say so, and succeed once it is dead.
func TestStoppedInsideVerbIsUnconfirmed(t *testing.T) {
	n := newNode(t)
	n.c.stopInside(n.peer)
	if err := n.mr.Deregister(); !errors.Is(err, ErrUnconfirmed) || !strings.Contains(err.Error(), n.peer.Remote()) {
		t.Errorf("Deregister: %v", err)
	}
	err := n.peer.Fence(within(t, 50*time.Millisecond))
	if !errors.Is(err, ErrUnconfirmed) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Fence: %v", err)
	}
	if n.closed.Load() != 0 {
		t.Error("Closed was called while the peer was inside a verb")
	}
	n.c.kill()
	if err := n.peer.Fence(within(t, rdmatest.Patience)); err != nil {
		t.Error(err)
	}
	n.waitGone(t)
	if err := n.mr.Deregister(); err != nil {
		t.Error(err)
	}
}

// The same process continued: it leaves its verb, the fence confirms with the
// process alive, and its QP refuses the next post.
func TestContinuedPeerIsFenced(t *testing.T) {
	n := newNode(t)
	n.c.stopInside(n.peer)
	if err := n.peer.Fence(within(t, 20*time.Millisecond)); !errors.Is(err, ErrUnconfirmed) {
		t.Errorf("Fence: %v", err)
	}
	n.c.signal(unix.SIGCONT)
	if err := n.peer.Fence(within(t, rdmatest.Patience)); err != nil {
		t.Error(err)
	}
	if got := n.c.line(); got != "ended: true" {
		t.Errorf("child %s", got)
	}
	if err := n.c.cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// Closing the listener gives up on a stopped peer, says so, and keeps the PD in
// use until the peer is dead.
func TestListenerCloseGivesUp(t *testing.T) {
	n := newNode(t)
	n.c.stopInside(n.peer)
	if err := n.ln.Close(); !errors.Is(err, ErrUnconfirmed) || !strings.Contains(err.Error(), n.peer.Remote()) {
		t.Errorf("Close: %v", err)
	}
	if err := n.ln.Close(); !errors.Is(err, ErrUnconfirmed) {
		t.Errorf("second Close: %v", err)
	}
	if err := n.mr.Deregister(); !errors.Is(err, ErrUnconfirmed) {
		t.Errorf("Deregister: %v", err)
	}
	if err := n.pd.Dealloc(); !errors.Is(err, ErrInUse) {
		t.Errorf("Dealloc: %v", err)
	}
	n.c.kill()
	if err := n.mr.Deregister(); err != nil {
		t.Error(err)
	}
	if err := n.pd.Dealloc(); err != nil {
		t.Errorf("Dealloc after the peer's death: %v", err)
	}
	select {
	case <-n.peer.confirmed:
	default:
		t.Error("the dead peer is not confirmed")
	}
	n.ln = closedListener{n.ln}
	n.closed.Store(1) // Closed is never called for a peer given up on
}

// closedListener has reported its error already.
type closedListener struct{ driver.Listener }

func (closedListener) Close() error { return nil }

// The memory node's process dies: the dialer's QP goes to error, Ready fires,
// and the bytes it has mapped are no danger.
func TestMemoryNodeKilled(t *testing.T) {
	addr := filepath.Join(t.TempDir(), "s")
	c := startChild(t, "memory-node", addr)
	var rkey uint64
	if _, err := fmt.Sscan(c.line(), &rkey); err != nil {
		t.Fatal(err)
	}
	s, err := newSide(Options{}, driver.AccessLocal)
	if err != nil {
		t.Fatal(err)
	}
	cq, err := s.d.CreateCQ(16)
	if err != nil {
		t.Fatal(err)
	}
	qp, err := s.d.Dial(within(t, rdmatest.Patience), driver.DialRequest{PD: s.pd, CQ: cq, Addr: addr})
	if err != nil {
		t.Fatal(err)
	}
	read := []driver.WR{{Op: driver.OpRead, Local: s.m.Bytes[:22], LKey: s.mr.LKey(), RemoteAddr: 4096, RKey: rkey}}
	if _, err := qp.PostSend(read); err != nil {
		t.Fatal(err)
	}
	if got := string(s.m.Bytes[:22]); got != "from the other process" {
		t.Errorf("READ gave %q", got)
	}
	c.kill()
	for qp.State() == driver.StateRTS {
		select {
		case <-cq.Ready():
		case <-time.After(rdmatest.Patience):
			t.Fatal("the QP did not notice")
		}
	}
	if n, err := qp.PostSend(read); n != 0 || !errors.Is(err, driver.ErrQPError) {
		t.Errorf("PostSend = %d, %v", n, err)
	}
	if err := errors.Join(qp.Close(), cq.Close(), s.close()); err != nil {
		t.Error(err)
	}
	// Its socket file is stale now; a successor takes the address over.
	startChild(t, "memory-node", addr).line()
}
