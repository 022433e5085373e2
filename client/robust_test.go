package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/loopback"
	provider "github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/memnode"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/tcp"
	"github.com/kvd-project/kvd/server"
)

// ---- a store whose parts can be taken away ---------------------------------------

// proxy is a TCP hop that can be cut, closed to new connections or made to
// swallow everything.
type proxy struct {
	l      net.Listener
	wg     sync.WaitGroup
	target atomic.Pointer[string]

	mu struct {
		sync.Mutex
		conns  map[net.Conn]bool
		down   bool
		gate   chan struct{} // not nil: nothing passes until it is closed
		closed bool
	}
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{l: l}
	p.target.Store(&target)
	p.mu.conns = map[net.Conn]bool{}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(p.close)
	return p
}

func (p *proxy) addr() string { return p.l.Addr().String() }

func (p *proxy) aim(target string) { p.target.Store(&target) }

// track notes c, or closes it if nothing may pass.
func (p *proxy) track(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.down || p.mu.closed {
		c.Close()
		return false
	}
	p.mu.conns[c] = true
	return true
}

func (p *proxy) serve(c net.Conn) {
	if !p.track(c) {
		return
	}
	up, err := net.Dial("tcp", *p.target.Load())
	if err != nil {
		c.Close()
		return
	}
	if !p.track(up) {
		c.Close()
		return
	}
	var wg sync.WaitGroup
	pass := func(dst, src net.Conn) {
		// An orderly end of one direction passes on; the other goes on.
		defer dst.(*net.TCPConn).CloseWrite()
		b := make([]byte, 32<<10)
		for {
			n, err := src.Read(b)
			p.mu.Lock()
			gate := p.mu.gate
			p.mu.Unlock()
			if gate != nil {
				<-gate
			}
			if _, werr := dst.Write(b[:n]); werr != nil || err != nil && err != io.EOF {
				dst.Close()
				src.Close()
				return
			}
			if err != nil {
				return
			}
		}
	}
	wg.Go(func() { pass(up, c) })
	wg.Go(func() { pass(c, up) })
	wg.Wait()
	c.Close()
	up.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.mu.conns, c)
	delete(p.mu.conns, up)
}

// cut ends every connection; new ones are welcome.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.mu.conns {
		c.Close()
	}
}

// setDown ends every connection and refuses, or admits, new ones.
func (p *proxy) setDown(down bool) {
	p.mu.Lock()
	p.mu.down = down
	p.mu.Unlock()
	if down {
		p.cut()
	}
}

// stall swallows all bytes until resume.
func (p *proxy) stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.gate = make(chan struct{})
}

func (p *proxy) resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.gate != nil {
		close(p.mu.gate)
		p.mu.gate = nil
	}
}

func (p *proxy) close() {
	p.mu.Lock()
	p.mu.closed = true
	p.mu.Unlock()
	p.resume()
	p.l.Close()
	p.cut()
	p.wg.Wait()
}

// rig is a store of one directory node and memory nodes in this process, each
// behind a proxy that clients go through.
type rig struct {
	t        testing.TB
	provider string
	dirOpts  server.Options
	dir      *server.Node
	dirProxy *proxy
	admin    *dirclient.Client
	capacity int64
	nodes    []*rigNode
	devices  []*rdma.Device
}

type rigNode struct {
	dev   *rdma.Device
	node  *memnode.Node
	proxy *proxy // tcp only
	path  string // shm only
}

func newRig(t testing.TB, provider string, nodes int, lease time.Duration, change ...func(*server.Options)) *rig {
	t.Helper()
	r := &rig{t: t, provider: provider, capacity: 32 << 20, dirOpts: server.Options{ID: "d", DataDir: t.TempDir(),
		GRPCAddr: net.JoinHostPort(loopback.Host(), "0"), RaftAddr: net.JoinHostPort(loopback.Host(), "0"), Bootstrap: true, Lease: lease, EpochInterval: 10 * time.Millisecond}}
	for _, f := range change {
		f(&r.dirOpts)
	}
	t.Cleanup(r.close)
	ctx := t.Context()
	r.startDirectory()
	// It keeps its addresses over restarts.
	st := r.status()
	r.dirOpts.GRPCAddr, r.dirOpts.RaftAddr = r.dir.Addr(), st.GetDirectory()[0].GetRaftAddr()
	r.dirProxy = newProxy(t, r.dir.Addr())
	sockets, err := os.MkdirTemp("", "kvd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(sockets) })
	for i := range nodes {
		n := &rigNode{dev: r.open(), path: filepath.Join(sockets, strconv.Itoa(i))}
		if provider == "tcp" {
			n.proxy = newProxy(t, "127.0.0.1:1")
		}
		r.nodes = append(r.nodes, n)
		r.startNode(i)
	}
	for _, n := range r.nodes {
		if err := n.node.Ready(ctx); err != nil {
			t.Fatal(err)
		}
	}
	r.devices = append(r.devices, r.open())
	return r
}

func (r *rig) open() *rdma.Device {
	r.t.Helper()
	d, err := provider.Open(r.provider, provider.Options{})
	if err != nil {
		r.t.Fatal(err)
	}
	return d
}

func (r *rig) startDirectory() {
	r.t.Helper()
	var err error
	if r.dir, err = server.Open(r.t.Context(), r.dirOpts); err != nil {
		r.t.Fatal(err)
	}
	if r.admin == nil {
		if r.admin, err = dirclient.Open(dirclient.Options{Addrs: []string{r.dir.Addr()}}); err != nil {
			r.t.Fatal(err)
		}
	}
	if err := r.dir.Ready(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) stopDirectory() {
	r.t.Helper()
	if err := r.dir.Close(); err != nil {
		r.t.Fatal(err)
	}
	r.dir = nil
}

func (r *rig) startNode(i int) {
	r.t.Helper()
	n := r.nodes[i]
	l := memnode.DeviceListen{Device: n.dev, Addr: n.path}
	if n.proxy != nil {
		l.Addr, l.Advertise = freeAddr(r.t), n.proxy.addr()
		n.proxy.aim(l.Addr)
	}
	var err error
	if n.node, err = memnode.Open(r.t.Context(), memnode.Options{Name: fmt.Sprintf("m%d", i), CapacityBytes: r.capacity,
		Devices: []memnode.DeviceListen{l}, Directory: r.admin}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) stopNode(i int) {
	r.t.Helper()
	if err := r.nodes[i].node.Close(); err != nil {
		r.t.Fatal(err)
	}
	r.nodes[i].node = nil
}

// freeAddr is a loopback address of this process that was free a moment ago.
func freeAddr(t testing.TB) string {
	t.Helper()
	addr, err := loopback.Free()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

func (r *rig) status() *dirpb.StatusReply {
	r.t.Helper()
	var st *dirpb.StatusReply
	if err := r.admin.Call(r.t.Context(), func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
		st, err = c.Status(ctx, &dirpb.StatusRequest{})
		return err
	}); err != nil {
		r.t.Fatal(err)
	}
	return st
}

// create makes a namespace.
func (r *rig) create(q *dirpb.CreateNamespaceRequest) {
	r.t.Helper()
	if err := r.admin.CallOnce(r.t.Context(), func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, q)
		return err
	}); err != nil {
		r.t.Fatal(err)
	}
}

// nodeOf is the number of the memory node that holds key.
func (r *rig) nodeOf(c *client.Client, key []byte) int {
	r.t.Helper()
	loc, err := inside.Of(c).Locate(key)
	if err != nil {
		r.t.Fatal(err)
	}
	m := r.status().GetMap()
	for _, pg := range m.GetPgs() {
		if pg.GetId() != loc.PG {
			continue
		}
		for _, n := range m.GetNodes() {
			if n.GetId() == pg.GetMembers()[0].GetNodeId() {
				i, err := strconv.Atoi(n.GetName()[1:])
				if err != nil {
					r.t.Fatal(err)
				}
				return i
			}
		}
	}
	r.t.Fatalf("no memory node holds %q", key)
	return 0
}

func (r *rig) options() client.Options {
	return client.Options{Directory: []string{r.dirProxy.addr()}, Devices: r.devices, Provider: r.provider, Lanes: 2}
}

func (r *rig) client(o client.Options) *client.Client {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 20*time.Second)
	defer cancel()
	c, err := client.Open(ctx, o)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			r.t.Error(err)
		}
	})
	return c
}

func (r *rig) close() {
	var errs []error
	for _, n := range r.nodes {
		if n.node != nil {
			errs = append(errs, n.node.Close())
		}
		errs = append(errs, n.dev.Close())
	}
	if r.admin != nil {
		errs = append(errs, r.admin.Close())
	}
	if r.dir != nil {
		errs = append(errs, r.dir.Close())
	}
	for _, d := range r.devices {
		errs = append(errs, d.Close())
	}
	if err := errors.Join(errs...); err != nil {
		r.t.Error(err)
	}
}

// ---- load ------------------------------------------------------------------------

// load increments counters and rewrites keys from several goroutines, and knows
// what the store may hold afterwards.
type load struct {
	t      testing.TB
	c      *client.Client
	prefix string
	stop   chan struct{}
	wg     sync.WaitGroup
	done   atomic.Int64 // operations acknowledged

	mu struct {
		sync.Mutex
		acked, unknown map[string]int64           // counters
		values         map[string]map[uint64]bool // key → rounds that may be there
	}
	// tolerate says which errors are no failure; they must not have happened.
	tolerate func(error) bool
}

func startLoad(t testing.TB, c *client.Client, prefix string, workers int, tolerate func(error) bool) *load {
	l := &load{t: t, c: c, prefix: prefix, stop: make(chan struct{}), tolerate: tolerate}
	l.mu.acked, l.mu.unknown, l.mu.values = map[string]int64{}, map[string]int64{}, map[string]map[uint64]bool{}
	for w := range workers {
		l.wg.Go(func() { l.run(w) })
	}
	return l
}

func (l *load) stopped() bool {
	select {
	case <-l.stop:
		return true
	default:
		return false
	}
}

func (l *load) run(w int) {
	ctx := context.Background()
	// Paced: at full speed over shm a load uses up the memory that was granted
	// to it within a second of the directory's absence, and then rightly waits.
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for i := uint64(1); !l.stopped(); i++ {
		<-pace.C
		n := fmt.Sprintf("%sn%d", l.prefix, i%3)
		begin := time.Now()
		_, err := l.c.Incr(ctx, []byte(n), 1)
		if !l.judgeResult(n, "incr", begin, err) {
			return
		}
		l.mu.Lock()
		switch client.Outcome(err) {
		case rdma.Yes:
			l.mu.acked[n]++
		case rdma.Unknown:
			l.mu.unknown[n]++
		}
		l.mu.Unlock()

		k := fmt.Sprintf("%sk%d-%d", l.prefix, w, i%16)
		begin = time.Now()
		_, err = l.c.Put(ctx, []byte(k), binary.LittleEndian.AppendUint64(nil, i), client.PutOptions{})
		if !l.judgeResult(k, "put", begin, err) {
			return
		}
		l.mu.Lock()
		switch client.Outcome(err) {
		case rdma.Yes:
			l.mu.values[k] = map[uint64]bool{i: true}
		case rdma.Unknown:
			if l.mu.values[k] == nil {
				l.mu.values[k] = map[uint64]bool{0: true} // perhaps absent
			}
			l.mu.values[k][i] = true
		}
		l.mu.Unlock()
	}
}

func (l *load) judgeResult(key, what string, begin time.Time, err error) bool {
	if d := time.Since(begin); d > 15*time.Second {
		l.t.Errorf("%s %s took %v: %v", what, key, d, err)
		return false
	}
	if err == nil {
		l.done.Add(1)
		return true
	}
	if client.Outcome(err) == rdma.Unknown || l.tolerate != nil && l.tolerate(err) {
		return true
	}
	l.t.Errorf("%s %s: %v", what, key, err)
	return false
}

// progress waits until n more operations are acknowledged.
func (l *load) progress(n int64) {
	l.t.Helper()
	from := l.done.Load()
	eventually(l.t, func() string {
		if d := l.done.Load() - from; d < n && !l.t.Failed() {
			return fmt.Sprintf("%d of %d operations", d, n)
		}
		return ""
	})
}

// end stops the load and checks with c what is there.
func (l *load) end(c *client.Client) {
	l.t.Helper()
	l.halt()
	if l.t.Failed() {
		l.t.FailNow()
	}
	ctx := l.t.Context()
	unknown := int64(0)
	for n, acked := range l.mu.acked {
		v, err := c.Incr(ctx, []byte(n), 0)
		if err != nil {
			l.t.Fatal(err)
		}
		unknown += l.mu.unknown[n]
		if v < acked || v > acked+l.mu.unknown[n] {
			l.t.Errorf("counter %s is %d, want %d..%d", n, v, acked, acked+l.mu.unknown[n])
		}
	}
	for k, rounds := range l.mu.values {
		it, err := c.Get(ctx, []byte(k))
		var got uint64
		if err == nil && len(it.Value) == 8 {
			got = binary.LittleEndian.Uint64(it.Value)
		}
		if !errors.Is(err, client.ErrNotFound) && err != nil || !rounds[got] {
			l.t.Errorf("key %s holds round %d (%v), want one of %v", k, got, err, rounds)
		}
	}
	l.t.Logf("%d operations, %d increments of unknown outcome", l.done.Load(), unknown)
}

func (l *load) halt() {
	if !l.stopped() {
		close(l.stop)
	}
	l.wg.Wait()
}

// ---- connections -------------------------------------------------------------------

// TestCutConnections cuts every TCP connection to the memory nodes again and
// again under load: operations in flight find out what became of them.
func TestCutConnections(t *testing.T) {
	r := newRig(t, "tcp", 2, 5*time.Second)
	c := r.client(r.options())
	other := r.client(r.options())
	l := startLoad(t, c, "", 4, nil)
	defer l.halt()
	cuts := 60
	if testing.Short() {
		cuts = 15
	}
	for i := range cuts {
		l.progress(int64(i % 7 * 20))
		r.nodes[i%2].proxy.cut()
	}
	l.progress(100)
	l.end(c)
	l.end(other) // sees the same
	if s := c.Stats(); s.FreeUnits+s.LiveUnits+s.LimboUnits != s.GrantedUnits {
		t.Errorf("free + live + limbo is not granted: %+v", s)
	}
}

// TestStalledNode lets a memory node fall silent without closing anything: an
// operation ends with its time, says what it knows, and the client goes on when
// the node answers again.
func TestStalledNode(t *testing.T) {
	r := newRig(t, "tcp", 1, 3*time.Second)
	o := r.options()
	o.OpTimeout = 300 * time.Millisecond
	c := r.client(o)
	ctx := t.Context()
	if _, err := c.Put(ctx, []byte("k"), []byte("1"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	r.nodes[0].proxy.stall()
	begin := time.Now()
	_, err := c.Put(ctx, []byte("k"), []byte("2"), client.PutOptions{})
	if !errors.Is(err, client.ErrUnknownOutcome) {
		t.Fatalf("put on a silent node: %v", err)
	}
	if _, err := c.Get(ctx, []byte("k")); !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
		t.Fatalf("get on a silent node: %v", err)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Fatalf("two operations of 300 ms took %v", d)
	}
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := c.Put(short, []byte("k"), []byte("3"), client.PutOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("put with a deadline: %v", err)
	}
	r.nodes[0].proxy.resume()
	eventually(t, func() string {
		if _, err := c.Put(ctx, []byte("k"), []byte("4"), client.PutOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
	if it, err := c.Get(ctx, []byte("k")); err != nil || string(it.Value) != "4" {
		t.Fatalf("%q, %v", it.Value, err)
	}
}

// TestLeaveSilentNode: whoever waits in the socket of a silent memory node hears of others'
// operations and of the end of its context.
func TestLeaveSilentNode(t *testing.T) {
	r := newRig(t, "tcp", 2, time.Minute)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Replicas: 1})
	d, err := tcp.Open(tcp.Options{PeerTimeout: time.Minute}) // nothing else ends a wait
	if err != nil {
		t.Fatal(err)
	}
	r.devices = append(r.devices, rdma.NewDevice("tcp", d))
	o := r.options()
	o.Devices = r.devices[1:]
	o.OpTimeout, o.Lanes = time.Minute, 1
	c := r.client(o)
	ctx := t.Context()
	var keys [2][]byte // by memory node
	for i := 0; keys[0] == nil || keys[1] == nil; i++ {
		key := []byte(strconv.Itoa(i))
		if _, err := c.Put(ctx, key, []byte("1"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		keys[r.nodeOf(c, key)] = key
	}
	r.nodes[0].proxy.stall()
	defer r.nodes[0].proxy.resume()
	short, cancel := context.WithCancel(ctx)
	waits, ended := make(chan struct{}), make(chan error, 1)
	var once sync.Once
	go func() {
		_, err := c.Get(inside.OnWait(short, func() { once.Do(func() { close(waits) }) }), keys[0])
		ended <- err
	}()
	<-waits
	if it, err := c.Get(ctx, keys[1]); err != nil || string(it.Value) != "1" {
		t.Fatalf("the other memory node's key: %q, %v", it.Value, err)
	}
	select {
	case err := <-ended:
		t.Fatalf("a Get of a silent memory node ended: %v", err)
	default:
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled: %v", err)
	}
}

// ---- memory nodes --------------------------------------------------------------------

// TestNodeRestart takes a memory node away and brings it back empty: its keys
// are gone, keys of the other node never notice, and writes work again without
// anybody's help.
func TestNodeRestart(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		for _, long := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/long=%v", p, long), func(t *testing.T) {
				t.Parallel()
				lease := time.Second
				r := newRig(t, p, 2, lease, func(o *server.Options) { o.LastCopyLeases = 4 })
				r.create(&dirpb.CreateNamespaceRequest{Name: "default", Replicas: 1})
				o := r.options()
				o.OpTimeout = 2 * time.Second
				c := r.client(o)
				ctx := t.Context()
				var lost, kept [][]byte
				for i := range 200 {
					k := fmt.Appendf(nil, "k%d", i)
					if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
						t.Fatal(err)
					}
					if len(lost) < 20 && r.nodeOf(c, k) == 0 {
						lost = append(lost, k)
					} else if len(kept) < 20 && r.nodeOf(c, k) == 1 {
						kept = append(kept, k)
					}
				}
				if len(lost) < 20 || len(kept) < 20 {
					t.Fatalf("%d keys on node 0, %d on node 1", len(lost), len(kept))
				}
				// The other node's keys, all the while.
				ctx2, cancel := context.WithCancel(ctx)
				var wg sync.WaitGroup
				reads := 0
				wg.Go(func() {
					for ctx2.Err() == nil {
						k := kept[reads%len(kept)]
						if it, err := c.Get(ctx, k); err != nil || !bytes.Equal(it.Value, k) {
							t.Errorf("key %s of the node that stayed: %q, %v", k, it.Value, err)
							return
						}
						reads++
					}
				})
				defer wg.Wait()
				defer cancel()
				session := c.Stats().Session
				r.stopNode(0)
				if long {
					// Long enough for the directory to count it as lost.
					eventually(t, func() string {
						for _, n := range r.status().GetMap().GetNodes() {
							if n.GetName() == "m0" && n.GetState() == dirpb.NodeState_NODE_DOWN {
								return ""
							}
						}
						return "the directory has not noticed that m0 is gone"
					})
					_, err := c.Put(ctx, lost[0], []byte("x"), client.PutOptions{})
					if !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
						t.Fatalf("put on a node that is down: %v", err)
					}
				}
				r.startNode(0)
				begin := time.Now()
				for _, k := range lost {
					eventually(t, func() string {
						it, err := c.Get(ctx, k)
						if err == nil {
							t.Fatalf("key %s of the lost node: %q", k, it.Value)
						}
						if !errors.Is(err, client.ErrNotFound) {
							return err.Error()
						}
						return ""
					})
					if _, err := c.Put(ctx, k, []byte("new"), client.PutOptions{}); err != nil {
						t.Fatalf("put on the node that came back: %v", err)
					}
					if it, err := c.Get(ctx, k); err != nil || string(it.Value) != "new" {
						t.Fatalf("get on the node that came back: %q, %v", it.Value, err)
					}
				}
				t.Logf("back after %v", time.Since(begin))
				if s := c.Stats().Session; s != session {
					t.Errorf("session %d became %d", session, s)
				}
				cancel()
				wg.Wait()
			})
		}
	}
}

// ---- directory -------------------------------------------------------------------------

// TestDirectoryRestart stops the directory and starts it again from its folder:
// operations go on meanwhile, and nothing that it knew is lost.
func TestDirectoryRestart(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 2, 5*time.Second)
			c := r.client(r.options())
			l := startLoad(t, c, "", 2, nil)
			defer l.halt()
			l.progress(200)
			before, session := r.status(), c.Stats().Session
			r.stopDirectory()
			l.progress(500)
			r.startDirectory()
			epoch := c.Stats().Epoch
			eventually(t, func() string {
				if s := c.Stats(); s.Epoch < epoch+5 || s.MinEpoch <= epoch {
					return fmt.Sprintf("epoch %d, minimum %d, were %d when the directory came back", s.Epoch, s.MinEpoch, epoch)
				}
				return ""
			})
			l.progress(200)
			l.end(c)
			if s := c.Stats().Session; s != session {
				t.Errorf("session %d became %d", session, s)
			}
			after := r.status()
			b, a := before.GetMap(), after.GetMap()
			if a.GetClusterId() != b.GetClusterId() || len(a.GetNodes()) != len(b.GetNodes()) || len(a.GetNamespaces()) != len(b.GetNamespaces()) ||
				len(a.GetPgs()) != len(b.GetPgs()) || len(a.GetShards()) != len(b.GetShards()) {
				t.Errorf("before: %v\nafter: %v", b, a)
			}
			for i, n := range a.GetNodes() {
				if n.GetIncarnation() != b.GetNodes()[i].GetIncarnation() || n.GetState() != dirpb.NodeState_NODE_UP {
					t.Errorf("memory node %v became %v", b.GetNodes()[i], n)
				}
			}
			for i, pg := range a.GetPgs() {
				if pg.GetEpoch() != b.GetPgs()[i].GetEpoch() || pg.GetState() != dirpb.PGState_PG_ACTIVE {
					t.Errorf("placement group %v became %v", b.GetPgs()[i], pg)
				}
			}
		})
	}
}

// TestDirectoryOutage keeps the directory away for longer than a lease: over a
// provider that does not fence by itself, operations stop with a typed error
// and certainty, and resume by themselves.
func TestDirectoryOutage(t *testing.T) {
	r := newRig(t, "tcp", 2, time.Second)
	o := r.options()
	o.OpTimeout = 500 * time.Millisecond
	c := r.client(o)
	ctx := t.Context()
	if _, err := c.Put(ctx, []byte("k"), []byte("v"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	r.stopDirectory()
	eventually(t, func() string {
		_, err := c.Get(ctx, []byte("k"))
		if err == nil {
			return "get still works"
		}
		if !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
			t.Fatalf("get without a lease: %v", err)
		}
		return ""
	})
	for what, op := range map[string]func() error{
		"put":    func() error { _, err := c.Put(ctx, []byte("k"), []byte("w"), client.PutOptions{}); return err },
		"delete": func() error { return c.Delete(ctx, []byte("k")) },
		"incr":   func() error { _, err := c.Incr(ctx, []byte("n"), 1); return err },
		"multi":  func() error { return c.MultiGet(ctx, [][]byte{[]byte("k")})[0].Err },
		"scan":   func() error { return scanned(c.Scan(ctx, client.ScanOptions{})) },
	} {
		begin := time.Now()
		err := op()
		if !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No {
			t.Errorf("%s without a lease: %v", what, err)
		}
		if d := time.Since(begin); d > 10*time.Second {
			t.Errorf("%s without a lease took %v", what, d)
		}
	}
	r.startDirectory()
	eventually(t, func() string {
		it, err := c.Get(ctx, []byte("k"))
		if err != nil {
			return err.Error()
		}
		if string(it.Value) != "v" {
			t.Fatalf("value %q", it.Value)
		}
		return ""
	})
	if _, err := c.Put(ctx, []byte("k"), []byte("w"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Incr(ctx, []byte("n"), 1); err != nil {
		t.Fatal(err)
	}
}

// TestSessionLost keeps a client from renewing until the directory fences it:
// it opens another session by itself, and no increment is lost or doubled.
func TestSessionLost(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 2, time.Second)
			c := r.client(r.options())
			o := r.options()
			o.Directory = []string{r.dir.Addr()}
			other := r.client(o)
			l := startLoad(t, c, "", 3, func(err error) bool { return errors.Is(err, client.ErrUnavailable) })
			defer l.halt()
			for range 2 {
				l.progress(100)
				session := c.Stats().Session
				r.dirProxy.setDown(true)
				eventually(t, func() string {
					for _, s := range r.status().GetSessions() {
						if s.GetId() == session {
							return fmt.Sprintf("session %d is %v", session, s.GetLife())
						}
					}
					return ""
				})
				r.dirProxy.setDown(false)
				eventually(t, func() string {
					if s := c.Stats().Session; s == session {
						return fmt.Sprintf("still session %d", s)
					}
					return ""
				})
			}
			l.progress(200)
			l.end(other)
		})
	}
}

// ---- crash -------------------------------------------------------------------------------

const (
	crashEnv      = "KVD_TEST_CRASH_DIRECTORY"
	crashProvider = "KVD_TEST_CRASH_PROVIDER"
)

// TestCrashChild is the process that TestCrash kills. It inserts and deletes new
// keys, which takes insert locks, and increments a counter, without end.
func TestCrashChild(t *testing.T) {
	dir := os.Getenv(crashEnv)
	if dir == "" {
		t.Skip("not a child of TestCrash")
	}
	dev, err := provider.Open(os.Getenv(crashProvider), provider.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.Open(t.Context(), client.Options{Directory: []string{dir}, Devices: []*rdma.Device{dev}, Lanes: 4})
	if err != nil {
		t.Fatal(err)
	}
	for w := range 4 {
		go func() {
			for i := 0; ; i++ {
				k := fmt.Appendf(nil, "c%d", (i*4+w)%64)
				if _, err := c.Put(t.Context(), k, k, client.PutOptions{}); err != nil {
					panic(err)
				}
				if err := c.Delete(t.Context(), k); err != nil && !errors.Is(err, client.ErrNotFound) {
					panic(err)
				}
				n, err := c.Incr(t.Context(), []byte("count"), 1)
				if err != nil {
					panic(err)
				}
				if w == 0 {
					fmt.Println(n) // tells the parent how far it is
				}
			}
		}()
	}
	select {}
}

// TestCrash kills a client process in the midst of inserts: the others go on
// once its locks are broken, and see whole values only.
func TestCrash(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 1, time.Second)
			c := r.client(r.options())
			ctx := t.Context()
			rounds := 4
			if testing.Short() {
				rounds = 2
			}
			for round := range rounds {
				cmd := exec.Command(os.Args[0], "-test.run=^TestCrashChild$")
				cmd.Env = append(os.Environ(), crashEnv+"="+r.dir.Addr(), crashProvider+"="+p)
				var stderr bytes.Buffer
				cmd.Stderr = &stderr
				out, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				acked := int64(0)
				lines := make([]byte, 4096)
				for i := range 5 + round {
					n, err := out.Read(lines)
					if err != nil {
						t.Fatalf("child: %v\n%s", err, stderr.Bytes())
					}
					f := strings.Fields(string(lines[:n]))
					if i > 0 && len(f) > 1 { // whole lines only
						acked, _ = strconv.ParseInt(f[len(f)-2], 10, 64)
					}
				}
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, out)
				_ = cmd.Wait()
				// Each key that the child wrote, locked or not, can be written.
				for i := range 64 {
					k := fmt.Appendf(nil, "c%d", i)
					if it, err := c.Get(ctx, k); err == nil && !bytes.Equal(it.Value, k) || err != nil && !errors.Is(err, client.ErrNotFound) {
						t.Fatalf("get %s after the crash: %q, %v", k, it.Value, err)
					}
					if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
						t.Fatalf("put %s after the crash: %v", k, err)
					}
					if err := c.Delete(ctx, k); err != nil {
						t.Fatal(err)
					}
				}
				if n, err := c.Incr(ctx, []byte("count"), 0); err != nil || n < acked {
					t.Fatalf("count is %d after the child was told %d: %v", n, acked, err)
				}
			}
		})
	}
}

// ---- a session without the library --------------------------------------------------------

// raw is a session that moves bytes by itself, to do what a client never does.
type raw struct {
	r     *rig
	id    uint32
	token []byte
	pd    *rdma.PD
	cq    *rdma.CQ
	mem   *rdma.Memory
	mr    *rdma.MR
	qps   map[uint32]*rdma.QP // by memory node
	m     *dirpb.Map
	stop  context.CancelFunc
	wg    sync.WaitGroup
	pause atomic.Bool // no renewals
}

func (r *rig) raw() *raw {
	t := r.t
	t.Helper()
	x := &raw{r: r, qps: map[uint32]*rdma.QP{}}
	ctx, cancel := context.WithCancel(t.Context())
	x.stop = cancel
	var rep *dirpb.OpenSessionReply
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(r.admin.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
		rep, err = c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "default", Client: "raw"})
		return err
	}))
	x.id, x.token = rep.GetSessionId(), rep.GetToken()
	first := make(chan *dirpb.Map, 1)
	x.wg.Go(func() {
		_ = r.admin.WatchMap(ctx, x.id, 0, func(m *dirpb.Map) error {
			select {
			case first <- m:
			default:
			}
			return nil
		})
	})
	x.wg.Go(func() {
		tick := time.NewTicker(time.Duration(rep.GetRenewMillis()) * time.Millisecond / 2)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !x.pause.Load() {
				_ = r.admin.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
					_, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: x.id, ReportEpoch: rep.GetEpoch()})
					return err
				})
			}
		}
	})
	x.m = <-first
	var err error
	d := r.devices[0]
	x.pd, err = d.AllocPD()
	check(err)
	x.cq, err = d.CreateCQ(64)
	check(err)
	x.mem, err = d.Alloc(1<<20, rdma.AllocOptions{Name: "raw"})
	check(err)
	x.mr, err = x.pd.RegMR(x.mem, 0, int64(len(x.mem.Bytes)), rdma.AccessLocal)
	check(err)
	for _, n := range x.m.GetNodes() {
		for _, e := range n.GetEndpoints() {
			x.qps[n.GetId()], err = d.Dial(ctx, x.pd, x.cq, e.GetAddr(), append(bytes.Clone(x.token), 0, 0, 0, 0))
			check(err)
		}
	}
	t.Cleanup(x.close)
	return x
}

func (x *raw) close() {
	x.stop()
	x.wg.Wait()
	var errs []error
	for _, q := range x.qps {
		errs = append(errs, q.Close())
	}
	errs = append(errs, x.mr.Deregister(), x.mem.Free(), x.cq.Close(), x.pd.Dealloc())
	if err := errors.Join(errs...); err != nil {
		x.r.t.Error(err)
	}
}

func (x *raw) state() dirpb.SessionLife {
	x.r.t.Helper()
	var rep *dirpb.SessionStateReply
	if err := x.r.admin.Call(x.r.t.Context(), func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
		rep, err = c.SessionState(ctx, &dirpb.SessionStateRequest{SessionId: x.id})
		return err
	}); err != nil {
		x.r.t.Fatal(err)
	}
	return rep.GetLife()
}

// do performs one verb at off of pg's region.
func (x *raw) do(pg uint32, off uint64, wr rdma.WR) {
	x.r.t.Helper()
	if err := x.try(pg, off, wr); err != nil {
		x.r.t.Fatalf("%v at %#x of pg %d: %v", wr.Op, off, pg, err)
	}
}

// try is do for a verb that may be refused.
func (x *raw) try(pg uint32, off uint64, wr rdma.WR) error {
	t := x.r.t
	t.Helper()
	for _, p := range x.m.GetPgs() {
		if p.GetId() != pg {
			continue
		}
		k := p.GetMembers()[0].GetKeys()[0]
		if wr.RemoteAddr, wr.RKey = k.GetIndexBase()+off, k.GetIndexRkey(); off >= p.GetIndexBytes() {
			wr.RemoteAddr, wr.RKey = k.GetHeapBase()+off-p.GetIndexBytes(), k.GetHeapRkey()
		}
		wr.Flags, wr.LKey = rdma.Signaled, x.mr.LKey()
		if n, err := x.qps[p.GetMembers()[0].GetNodeId()].PostSend([]rdma.WR{wr}); n != 1 || err != nil {
			return fmt.Errorf("post: %d, %w", n, err)
		}
		var wc [1]rdma.WC
		eventually(t, func() string {
			if x.cq.Poll(wc[:]) == 0 {
				return "no completion"
			}
			return ""
		})
		if wc[0].Status != driver.Success {
			return &rdma.WCError{WC: wc[0]}
		}
		return nil
	}
	t.Fatalf("no placement group %d", pg)
	return nil
}

func (x *raw) read(pg uint32, off uint64, n int) []byte {
	x.r.t.Helper()
	x.do(pg, off, rdma.WR{Op: rdma.OpRead, Local: x.mem.Bytes[:n]})
	return bytes.Clone(x.mem.Bytes[:n])
}

func (x *raw) write(pg uint32, off uint64, b []byte) {
	x.r.t.Helper()
	x.do(pg, off, rdma.WR{Op: rdma.OpWrite, Local: x.mem.Bytes[:copy(x.mem.Bytes, b)]})
}

// set makes the index word at off w, whatever it was.
func (x *raw) set(pg uint32, off, w uint64) {
	x.r.t.Helper()
	for {
		old := binary.LittleEndian.Uint64(x.read(pg, off, 8))
		x.do(pg, off, rdma.WR{Op: rdma.OpCmpAndSwp, Compare: old, Swap: w, Local: x.mem.Bytes[:8]})
		if binary.LittleEndian.Uint64(x.mem.Bytes) == old {
			return
		}
	}
}

// TestLockOfTheDead holds an insert lock: others wait as long as its owner
// lives, and take it over only when its fence is confirmed.
func TestLockOfTheDead(t *testing.T) {
	r := newRig(t, "tcp", 1, time.Second)
	o := r.options()
	o.OpTimeout = 30 * time.Second
	c := r.client(o)
	ctx := t.Context()
	x := r.raw()
	k := []byte("k")
	loc, err := inside.Of(c).Locate(k)
	if err != nil {
		t.Fatal(err)
	}
	x.set(loc.PG, loc.Home+layout.GroupLockOff, uint64(layout.MakeLock(x.id, 7)))
	short, cancel := context.WithTimeout(ctx, 1300*time.Millisecond)
	defer cancel()
	if _, err := c.Put(short, k, k, client.PutOptions{}); !errors.Is(err, context.DeadlineExceeded) || client.Outcome(err) != rdma.No {
		t.Fatalf("put behind a live owner's lock: %v", err)
	}
	if _, err := c.Get(ctx, k); !errors.Is(err, client.ErrNotFound) {
		t.Fatalf("get behind a live owner's lock: %v", err)
	}
	x.pause.Store(true)
	if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if s := x.state(); s != dirpb.SessionLife_SESSION_FENCED {
		t.Fatalf("the lock was taken over while its owner was %v", s)
	}
}

// ---- hostile bytes ---------------------------------------------------------------------------

// TestCorruptBytes damages a record and its slot in every way that a check
// covers: a read answers with the right value or a *layout.CorruptError that
// says where.
func TestCorruptBytes(t *testing.T) {
	r := newRig(t, "tcp", 1, 5*time.Second)
	ctx := t.Context()
	x := r.raw()
	for n, size := range []int{0, 20, 3000, 4 << 20} {
		k := fmt.Appendf(nil, "key-%d", n)
		want := make([]byte, size)
		stamp(want, uint64(n), 1)
		// A client without hints, and one that remembers the word.
		c := r.client(r.options())
		warm := r.client(r.options())
		if _, err := warm.Put(ctx, k, want, client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		loc, err := inside.Of(warm).Locate(k)
		if err != nil {
			t.Fatal(err)
		}
		var slot uint64
		var w layout.Word
		g := layout.Group(x.read(loc.PG, loc.Home, layout.GroupSize))
		for i := range layout.GroupSlots {
			if s := g.Slot(i); s.Readable() && s.FP() == layout.FP(loc.Hash) {
				slot, w = loc.Home+layout.SlotOff(i), s
			}
		}
		if slot == 0 {
			t.Fatalf("no slot of %+v holds %q", loc, k)
		}
		var whole []byte
		check := func(what string) {
			t.Helper()
			for _, c := range []*client.Client{c, warm} {
				it, err := c.Get(ctx, k)
				var bad *layout.CorruptError
				if err == nil && !bytes.Equal(it.Value, want) {
					t.Errorf("%s, %s: a wrong value of %d bytes", k, what, len(it.Value))
				}
				if err != nil && (!errors.As(err, &bad) || client.Outcome(err) != rdma.No) {
					t.Errorf("%s, %s: %v", k, what, err)
				}
				// A client that asks for a key puts in what the key itself tells.
				if err == nil && strings.HasPrefix(what, "record") && !bytes.Equal(x.read(loc.PG, w.Off(), len(whole)), whole) {
					t.Errorf("%s, %s: not noticed", k, what)
				}
				if err := scanned(c.Scan(ctx, client.ScanOptions{Count: 256, KeysOnly: true})); err != nil && !errors.As(err, &bad) {
					t.Errorf("scan, %s, %s: %v", k, what, err)
				}
			}
		}
		rec := x.read(loc.PG, w.Off(), layout.RecordHeaderSize)
		length := layout.RecordLen(int(binary.LittleEndian.Uint16(rec[8:])), int(binary.LittleEndian.Uint32(rec[12:])))
		whole = x.read(loc.PG, w.Off(), length)
		// Every byte of the header and the key, some of the value.
		for i := 0; i < length; i += 1 + i/64*(i+37) {
			bent := bytes.Clone(whole)
			bent[i] ^= 0x41
			x.write(loc.PG, w.Off(), bent)
			check(fmt.Sprintf("record byte %d", i))
			if t.Failed() {
				return
			}
		}
		x.write(loc.PG, w.Off(), whole)
		check("restored")
		// A slot that points elsewhere: past the heap, into the index, at another size.
		for _, bent := range []layout.Word{
			layout.MakeLive(w.Ver(), w.FP(), w.Code(), 1<<32-1),
			layout.MakeLive(w.Ver(), w.FP(), w.Code(), 0),
			layout.MakeLive(w.Ver(), w.FP(), 255, w.Unit()),
			layout.MakeLive(w.Ver(), w.FP(), w.Code(), w.Unit()+1),
			layout.MakeLive(w.Ver()^1, w.FP(), 0, w.Unit()),
		} {
			x.set(loc.PG, slot, uint64(bent))
			check(fmt.Sprintf("slot %v", bent))
		}
		x.set(loc.PG, slot, uint64(w))
		for _, c := range []*client.Client{c, warm} {
			if it, err := c.Get(ctx, k); err != nil || !bytes.Equal(it.Value, want) {
				t.Fatalf("%s restored: %d bytes, %v", k, len(it.Value), err)
			}
		}
	}
}

// TestGarbageIndex fills groups with arbitrary words: every operation ends in
// time, with an answer or a typed error.
func TestGarbageIndex(t *testing.T) {
	r := newRig(t, "tcp", 1, 5*time.Second)
	ctx := t.Context()
	o := r.options()
	o.OpTimeout = 60 * time.Millisecond
	c := r.client(o)
	if _, err := r.client(r.options()).Put(ctx, []byte("first"), nil, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	x := r.raw()
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	rng := rand.New(rand.NewPCG(11, 0))
	for round := range rounds {
		k := fmt.Appendf(nil, "k%d", round)
		loc, err := inside.Of(c).Locate(k)
		if err != nil {
			t.Fatal(err)
		}
		if round%2 == 0 {
			// Its group may be one of the rounds before.
			if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil && !errors.Is(err, client.ErrUnavailable) && !errors.Is(err, client.ErrUnknownOutcome) &&
				!errors.Is(err, client.ErrCorrupt) {
				t.Fatal(err)
			}
		}
		for off := uint64(0); off < layout.GroupSize; off += 8 {
			w := rng.Uint64()
			if off >= layout.GroupSlotsOff {
				switch round % 4 {
				case 0: // every fingerprint matches
					w = w&^(0xfff<<40) | uint64(layout.MakeLive(0, layout.FP(loc.Hash), 0, 0))&(0xfff<<40)
				case 1: // and the record lies in the heap
					w = uint64(layout.MakeLive(uint16(w), layout.FP(loc.Hash), uint8(w>>20), uint32(loc.IndexBytes/layout.UnitSize)+uint32(w>>32)%1000))
				}
			} else if round%3 != 0 {
				continue // header and lock stay
			}
			x.set(loc.PG, loc.Home+off, w)
		}
		for what, op := range map[string]func() error{
			"get":  func() error { _, err := c.Get(ctx, k); return err },
			"put":  func() error { _, err := c.Put(ctx, k, k, client.PutOptions{}); return err },
			"add":  func() error { _, err := c.PutIfAbsent(ctx, k, k, client.PutOptions{}); return err },
			"cas":  func() error { _, err := c.CompareAndSwap(ctx, k, 1, k, client.PutOptions{}); return err },
			"del":  func() error { return c.Delete(ctx, k) },
			"inc":  func() error { _, err := c.Incr(ctx, k, 1); return err },
			"scan": func() error { return scanned(c.Scan(ctx, client.ScanOptions{})) },
		} {
			begin := time.Now()
			err := op()
			var bad *layout.CorruptError
			if err != nil && !errors.As(err, &bad) && !errors.Is(err, client.ErrNotFound) && !errors.Is(err, client.ErrUnavailable) &&
				!errors.Is(err, client.ErrUnknownOutcome) &&
				!errors.Is(err, client.ErrFull) && !errors.Is(err, client.ErrConflict) && !errors.Is(err, client.ErrExists) &&
				!errors.Is(err, client.ErrNotInteger) {
				t.Errorf("round %d: %s: %v", round, what, err)
			}
			if d := time.Since(begin); d > 5*time.Second {
				t.Errorf("round %d: %s took %v: %v", round, what, d, err)
			}
		}
	}
}

// ---- bad input -----------------------------------------------------------------------------

// TestBadInput gives arguments that cannot work.
func TestBadInput(t *testing.T) {
	r := newRig(t, "tcp", 1, 5*time.Second)
	ctx := t.Context()
	c := r.client(r.options())

	o := r.options()
	o.Namespace = "nowhere"
	if _, err := client.Open(ctx, o); !errors.Is(err, client.ErrNoNamespace) || !strings.Contains(err.Error(), "nowhere") {
		t.Errorf("unknown namespace: %v", err)
	}
	// Nobody listens there, and somebody who is no directory.
	deaf, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	for what, addr := range map[string]string{"closed port": freeAddr(t), "silent listener": deaf.Addr().String()} {
		o := r.options()
		o.Directory = []string{addr}
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		begin := time.Now()
		_, err := client.Open(short, o)
		cancel()
		if !errors.Is(err, client.ErrUnavailable) || !strings.Contains(err.Error(), addr) {
			t.Errorf("%s: %v", what, err)
		}
		if d := time.Since(begin); d > 5*time.Second {
			t.Errorf("%s: %v for a context of 300 ms", what, d)
		}
	}
	o = r.options()
	o.Directory = []string{"no port"}
	if _, err := client.Open(ctx, o); err == nil || !strings.Contains(err.Error(), "no port") {
		t.Errorf("malformed address: %v", err)
	}
	for _, bad := range []client.Options{
		{Devices: r.devices},
		{Directory: []string{"127.0.0.1:1"}, Provider: "rocket"},
		{Directory: []string{"127.0.0.1:1"}, Devices: r.devices, Lanes: 99},
		{Directory: []string{"127.0.0.1:1"}, Devices: r.devices, OpTimeout: -1},
		{Directory: []string{"127.0.0.1:1"}, Devices: r.devices, Provider: "verbs"},
	} {
		if _, err := client.Open(ctx, bad); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}

	long, huge := make([]byte, client.MaxKeyLen+1), make([]byte, client.MaxValueLen+1)
	k := []byte("k")
	if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"get, no key":        func() error { _, err := c.Get(ctx, nil); return err }(),
		"get, long key":      func() error { _, err := c.Get(ctx, long); return err }(),
		"get into, long key": func() error { _, err := c.GetInto(ctx, long, nil); return err }(),
		"put, long value":    func() error { _, err := c.Put(ctx, k, huge, client.PutOptions{}); return err }(),
		"put, TTL":           func() error { _, err := c.Put(ctx, k, k, client.PutOptions{TTL: -1}); return err }(),
		"delete, long key":   c.Delete(ctx, long),
		"incr, long key":     func() error { _, err := c.Incr(ctx, long, 1); return err }(),
		"touch, TTL":         c.Touch(ctx, k, -1),
		"multi-get":          c.MultiGet(ctx, [][]byte{long})[0].Err,
		"multi-put":          c.MultiPut(ctx, []client.KV{{Key: k, Value: huge}})[0].Err,
		"multi-delete":       c.MultiDelete(ctx, [][]byte{nil})[0].Err,
	} {
		if !errors.Is(err, client.ErrInvalid) || client.Outcome(err) != rdma.No {
			t.Errorf("%s: %v", what, err)
		}
	}
	if it, err := c.Get(ctx, k); err != nil || string(it.Value) != "k" {
		t.Errorf("nothing of it happened, but k is %q, %v", it.Value, err)
	}
	// A good key beside a bad one.
	if rs := c.MultiGet(ctx, [][]byte{long, k}); rs[1].Err != nil || string(rs[1].Value) != "k" {
		t.Errorf("multi-get: %q, %v", rs[1].Value, rs[1].Err)
	}
}

// TestCloseUnderLoad closes clients while goroutines use them: every operation
// ends with an answer or ErrClosed, and what was acknowledged is there.
func TestCloseUnderLoad(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 1, 5*time.Second)
			check := r.client(r.options())
			for round := range 5 {
				c, err := client.Open(t.Context(), r.options())
				if err != nil {
					t.Fatal(err)
				}
				l := startLoad(t, c, fmt.Sprintf("%d/", round), 4, func(err error) bool { return errors.Is(err, client.ErrClosed) })
				l.progress(50)
				if err := c.Close(); err != nil {
					t.Error(err)
				}
				if _, err := c.Get(t.Context(), []byte("k")); !errors.Is(err, client.ErrClosed) {
					t.Errorf("get after Close: %v", err)
				}
				l.end(check)
				for _, pg := range r.status().GetMap().GetPgs() {
					if pg.GetEpoch() != 1 {
						t.Fatalf("the machine was too busy for this test: a memory node lost its lease: %v", pg)
					}
				}
			}
		})
	}
}

// scanned is the error that ends a scan.
func scanned(kvs iter.Seq2[client.KV, error]) error {
	for _, err := range kvs {
		if err != nil {
			return err
		}
	}
	return nil
}
