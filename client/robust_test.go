package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/loopback"
	provider "github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/memnode"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
	"github.com/kvd-project/kvd/server"
)

// proxy is a TCP hop that can be cut, closed to new connections or made to
// swallow everything.
type proxy struct {
	l      net.Listener
	wg     sync.WaitGroup
	target atomic.Pointer[string]
	served atomic.Int32 // connections to the target that there have been

	mu struct {
		sync.Mutex
		conns  map[net.Conn]bool
		down   bool
		gate   chan struct{} // not nil: nothing passes until it is closed
		held   int           // the number of the connection for which alone the gate stands, 0: for all
		caught int           // reads that have met the gate
		passed map[int]int   // bytes, by connection
		closed bool
	}
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	l := testutil.Listen(t)
	p := &proxy{l: l}
	p.target.Store(&target)
	p.mu.conns, p.mu.passed = map[net.Conn]bool{}, map[int]int{}
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
	number := int(p.served.Add(1))
	var wg sync.WaitGroup
	pass := func(dst, src net.Conn) {
		// An orderly end of one direction passes on; the other goes on.
		defer dst.(*net.TCPConn).CloseWrite()
		b := make([]byte, 32<<10)
		for {
			n, err := src.Read(b)
			p.mu.Lock()
			gate := p.mu.gate
			if number != p.mu.held && p.mu.held != 0 {
				gate = nil
			}
			if p.mu.passed[number] += n; gate != nil {
				p.mu.caught++
			}
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

// hold is stall for one connection, by its number in the order in which they came, from 1 on.
func (p *proxy) hold(number int) {
	p.stall()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.held = number
}

// saw is how many bytes of a connection have come, and how many reads have met the gate.
func (p *proxy) saw(number int) (bytes, caught int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.passed[number], p.mu.caught
}

// stall swallows all bytes until resume.
func (p *proxy) stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.gate, p.mu.held = make(chan struct{}), 0
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
	fabric   *sim.Fabric // nil without sim
	opened   int
	nodes    []*rigNode
	devices  []*rdma.Device
}

type rigNode struct {
	dev   *rdma.Device
	node  *memnode.Node
	proxy *proxy // tcp only
	path  string // where it listens without a proxy
	more  []way  // other endpoints
}

// way is an endpoint of a memory node, behind a proxy.
type way struct {
	dev   *rdma.Device
	proxy *proxy
}

func newRig(t testing.TB, provider string, nodes int, lease time.Duration, change ...func(*server.Options)) *rig {
	t.Helper()
	return newRigOf(t, provider, nodes, lease, 32<<20, nil, change...)
}

// newRigOf has memory nodes of that many bytes each, whose devices pass through wrap unless it is nil. The provider
// "adapter" is sim, which takes registered memory alone; "verbs" has the adapters of the virtual machine, see
// internal/verbstest.
func newRigOf(t testing.TB, provider string, nodes int, lease time.Duration, capacity int64,
	wrap func(driver.Device) driver.Device, change ...func(*server.Options)) *rig {
	t.Helper()
	var fabric *sim.Fabric
	if provider == "adapter" {
		provider, fabric = devstore.Sim, sim.New(sim.Options{SGEs: 3})
	}
	r := &rig{t: t, provider: provider, fabric: fabric, capacity: capacity, dirOpts: server.Options{ID: "d",
		DataDir:  t.TempDir(),
		GRPCAddr: net.JoinHostPort(loopback.Host(), "0"), RaftAddr: net.JoinHostPort(loopback.Host(), "0"),
		Bootstrap: true, Lease: lease, EpochInterval: 10 * time.Millisecond}}
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
		if wrap != nil {
			n.dev = rdma.NewDevice(provider, wrap(n.dev.Driver()))
		}
		switch provider {
		case "tcp":
			n.proxy = newProxy(t, "127.0.0.1:1")
		case "verbs":
			n.path = fmt.Sprintf("10.77.1.%d:0", i+1)
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
	if r.provider == devstore.Sim {
		if r.fabric == nil {
			r.fabric = sim.New(sim.Options{})
		}
		r.opened++
		return rdma.NewDevice(devstore.Sim, r.fabric.Device(strconv.Itoa(r.opened)))
	}
	var o provider.Options
	if r.provider == "verbs" {
		o.Verbs.Device = fmt.Sprintf("rxe%d", r.opened%4)
		r.opened++
	}
	d, err := provider.Open(r.provider, o)
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
	listens := []memnode.DeviceListen{l}
	for _, w := range n.more {
		l := memnode.DeviceListen{Device: w.dev, Addr: freeAddr(r.t), Advertise: w.proxy.addr()}
		w.proxy.aim(l.Addr)
		listens = append(listens, l)
	}
	var err error
	if n.node, err = memnode.Open(r.t.Context(), memnode.Options{Name: fmt.Sprintf("m%d", i), CapacityBytes: r.capacity,
		Devices: listens, Directory: r.admin}); err != nil {
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
		for _, w := range n.more {
			errs = append(errs, w.dev.Close())
		}
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
