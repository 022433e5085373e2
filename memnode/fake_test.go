package memnode

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

var _ Directory = (*dirclient.Client)(nil)

const patience = testutil.Limit

// keyOf is the fake cluster's key of a generation.
func keyOf(generation uint32) token.Key {
	return token.Key{Generation: generation, Secret: bytes.Repeat([]byte{41 + byte(generation)}, token.KeySize)}
}

// tokenKeys are the keys that a directory tells of while this generation is the present one.
func tokenKeys(generation uint32) []*dirpb.TokenKey {
	keys := []*dirpb.TokenKey{{Generation: generation, Key: keyOf(generation).Secret}}
	if generation > 1 {
		keys = append(keys, &dirpb.TokenKey{Generation: generation - 1, Key: keyOf(generation - 1).Secret})
	}
	return keys
}

var errDown = errors.New("fake directory is down")

// directory is a fake that keeps what a node told it. It is both the Directory
// and the client that Call hands out.
type directory struct {
	dirpb.DirectoryClient // the rest of the interface, not called

	t  *testing.T
	mu sync.Mutex
	// changed is closed and replaced whenever anything below changes.
	changed chan struct{}

	down       bool
	publishErr error
	refuse     error // of registrations
	regions    []*dirpb.WantRegion
	told       func(*dirpb.PublishRegionRequest)
	latest     uint32   // the session of the greatest id; 0: lastSession
	retain     []uint32 // placement groups that may take back what is retained
	fence      []uint32
	restart    bool // ask for another process
	again      bool // ask for another registration in the next heartbeat
	forget     bool // answer the next heartbeat with unknown_node
	left       *dirpb.LeaveNodeRequest
	clusterID  string
	key        uint32          // generation of the present key
	position   *dirpb.Position // as it is told
	lacks      error           // of heartbeats and registrations: it was put back from a copy
	recovered  uint64          // how often; who has heard of fewer is told that alone
	mute       bool            // says nothing of sessions
	interval   uint64          // between heartbeats, ms
	holds      bool            // has heartbeats wait for news
	held       int             // that wait
	cancelled  int             // that the node gave up
	quotas     []*dirpb.NamespaceQuota
	ended      []uint32 // sessions up to lastSession that do not live, beside those in fence

	registered   []*dirpb.RegisterNodeRequest
	reports      []*dirpb.ReportNodeRequest
	stale        []*dirpb.RegisterNodeRequest // registrations with memory of an earlier time
	nodeID       uint32
	heartbeats   int
	last         *dirpb.HeartbeatRequest
	published    map[uint32]*dirpb.PublishRegionRequest
	publications int

	// fabric is the network that sim devices of the test are on.
	fabric  *sim.Fabric
	devices int // of it, so far
}

func newDirectory(t *testing.T) *directory {
	return &directory{t: t, changed: make(chan struct{}), published: map[uint32]*dirpb.PublishRegionRequest{},
		clusterID: "c1", key: 1, interval: 5,
		fabric: sim.New(sim.Options{})}
}

// lastSession is the latest session that the fake directory tells of.
const lastSession = 1000

// sessions are those that live, all but what ended or was ever in fence.
func (d *directory) sessions() *dirpb.Sessions {
	if d.mute {
		return nil
	}
	for _, id := range d.fence {
		if !slices.Contains(d.ended, id) {
			d.ended = append(d.ended, id)
		}
	}
	s := &dirpb.Sessions{Last: cmp.Or(d.latest, lastSession)}
	for id := uint32(1); id <= s.Last; id++ {
		if !slices.Contains(d.ended, id) {
			s.Live = append(s.Live, id)
		}
	}
	return s
}

// change runs fn under the lock.
func (d *directory) change(fn func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fn()
	close(d.changed)
	d.changed = make(chan struct{})
}

// until waits for cond, which is called under the lock after every change.
func (d *directory) until(what string, cond func() bool) {
	d.t.Helper()
	deadline := time.After(patience)
	for {
		d.mu.Lock()
		ok, changed := cond(), d.changed
		d.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			d.t.Fatalf("waited %v for: %s", patience, what)
		}
	}
}

// beats waits until the node has sent n more heartbeats, so that it has acted on
// a reply made after the call.
func (d *directory) beats(n int) {
	d.t.Helper()
	d.mu.Lock()
	goal := d.heartbeats + n
	d.mu.Unlock()
	d.until("heartbeats", func() bool { return d.heartbeats >= goal })
}

func (d *directory) Call(ctx context.Context, fn func(context.Context, dirpb.DirectoryClient) error) error {
	d.mu.Lock()
	down := d.down
	d.mu.Unlock()
	if down {
		return errDown
	}
	return fn(ctx, d)
}

func (d *directory) ReportNode(_ context.Context, r *dirpb.ReportNodeRequest, _ ...grpc.CallOption) (
	*dirpb.ReportNodeReply, error) {
	d.change(func() { d.reports = append(d.reports, r) })
	return &dirpb.ReportNodeReply{}, nil
}

func (d *directory) RegisterNode(_ context.Context, r *dirpb.RegisterNodeRequest, _ ...grpc.CallOption) (
	*dirpb.RegisterNodeReply, error) {
	d.mu.Lock()
	rep := &dirpb.RegisterNodeReply{HeartbeatMillis: d.interval}
	if d.refuse != nil {
		defer d.mu.Unlock()
		return nil, d.refuse
	}
	if d.lacks != nil || r.Position.GetRecoveries() < d.recovered {
		defer d.mu.Unlock()
		return &dirpb.RegisterNodeReply{Recovered: d.recovered, ClusterId: d.clusterID}, d.lacks
	}
	rep.Position = d.position
	if d.holds {
		rep.HeartbeatMillis = 1500
	}
	rep.Sessions, rep.Keys = d.sessions(), tokenKeys(d.key)
	d.mu.Unlock()
	d.change(func() {
		rep.ClusterId = d.clusterID
		if len(d.registered) > 0 && len(r.After) > 0 {
			last := d.registered[len(d.registered)-1].Nonce
			if rep.Stale = r.Nonce != last && !slices.Contains(r.After, last); rep.Stale {
				d.stale = append(d.stale, r)
				return
			}
		}
		again := len(d.registered) > 0 && d.registered[len(d.registered)-1].Incarnation == r.Incarnation
		d.registered = append(d.registered, r)
		if !again {
			d.nodeID++
			clear(d.published)
		}
		rep.NodeId, rep.ClusterId = d.nodeID, d.clusterID
	})
	return rep, nil
}

// hold waits until there is other news than the node has.
func (d *directory) hold(ctx context.Context, r *dirpb.HeartbeatRequest) (news uint64, err error) {
	d.change(func() { d.held, d.last = d.held+1, r })
	defer d.change(func() { d.held-- })
	over := time.After(time.Duration(r.WaitMillis) * time.Millisecond)
	for {
		d.mu.Lock()
		changed := d.changed
		news = uint64(1000*len(d.regions) + 100*len(d.published) + len(d.fence) + 10_000*int(d.key) + 1)
		d.mu.Unlock()
		if news != r.News {
			return news, nil
		}
		select {
		case <-changed:
		case <-over:
			return news, nil
		case <-ctx.Done():
			d.change(func() { d.cancelled++ })
			return 0, ctx.Err()
		}
	}
}

func (d *directory) Heartbeat(ctx context.Context, r *dirpb.HeartbeatRequest, _ ...grpc.CallOption) (
	*dirpb.HeartbeatReply, error) {
	rep := &dirpb.HeartbeatReply{}
	d.mu.Lock()
	holds := d.holds
	d.mu.Unlock()
	if holds {
		news, err := d.hold(ctx, r)
		if err != nil {
			return nil, err
		}
		rep.News = news
	}
	var err error
	d.change(func() {
		d.heartbeats++
		d.last = r
		if err = d.lacks; err != nil {
			return
		}
		if r.Position.GetRecoveries() < d.recovered {
			rep.Recovered = d.recovered
			return
		}
		rep.Position = d.position
		if d.left != nil {
			rep.UnknownNode = true
			return
		}
		if d.forget {
			d.forget, rep.UnknownNode = false, true
			return
		}
		rep.RetainPgs = d.retain
		for _, w := range d.regions {
			p := d.published[w.PgId]
			rep.Regions = append(rep.Regions, &dirpb.WantRegion{PgId: w.PgId, NamespaceId: w.NamespaceId,
				RegionBytes: w.RegionBytes, IndexBytes: w.IndexBytes, Epoch: w.Epoch, Published: p != nil &&
					p.Since == w.Since, Since: w.Since, Retain: w.Retain})
		}
		rep.FenceSessions, rep.Sessions, rep.Keys = slices.Clone(d.fence), d.sessions(), tokenKeys(d.key)
		rep.Quotas, rep.Restart, rep.RegisterAgain = d.quotas, d.restart, d.again
		d.again = false
	})
	return rep, err
}

func (d *directory) LeaveNode(_ context.Context, r *dirpb.LeaveNodeRequest, _ ...grpc.CallOption) (
	*dirpb.LeaveNodeReply, error) {
	var goal int
	// at once: a node that has heard that it is unknown sends none after it
	d.change(func() { d.left, goal = r, d.heartbeats+1 })
	d.until("the heartbeat that tells the node that it is unknown", func() bool { return d.heartbeats >= goal })
	return &dirpb.LeaveNodeReply{}, nil
}

func (d *directory) PublishRegion(_ context.Context, r *dirpb.PublishRegionRequest, _ ...grpc.CallOption) (
	*dirpb.PublishRegionReply, error) {
	var err error
	if d.told != nil {
		d.told(r)
	}
	d.change(func() {
		d.publications++
		if err = d.publishErr; err == nil {
			d.published[r.PgId] = r
		}
	})
	return &dirpb.PublishRegionReply{}, err
}

// want adds a region of 64 KiB with 16 KiB of index.
func (d *directory) want(pg, namespace uint32) { d.wantSince(pg, namespace, 0) }

func (d *directory) wantSize(pg uint32, bytes uint64) {
	d.change(func() {
		d.regions = append(d.regions, &dirpb.WantRegion{PgId: pg, NamespaceId: 1, RegionBytes: bytes,
			IndexBytes: indexBytes, Epoch: 3})
	})
}

func (d *directory) wantSince(pg, namespace uint32, since uint64) {
	d.change(func() {
		d.regions = append(d.regions, &dirpb.WantRegion{PgId: pg, NamespaceId: namespace, RegionBytes: regionBytes,
			IndexBytes: indexBytes, Epoch: 3, Since: since})
	})
}

const (
	regionBytes = 64 << 10
	indexBytes  = 16 << 10
)

// keys waits for a region's publication.
func (d *directory) keys(pg uint32, provider string) *dirpb.RegionKeys {
	d.t.Helper()
	var k *dirpb.RegionKeys
	d.until(fmt.Sprintf("publication of pg %d", pg), func() bool {
		for _, c := range d.published[pg].GetKeys() {
			if c.Provider == provider {
				k = c
			}
		}
		return k != nil
	})
	return k
}

// endpoint is where the node says that a provider listens.
func (d *directory) endpoint(provider string) string {
	d.t.Helper()
	d.until("registration", func() bool { return len(d.registered) > 0 })
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.registered[len(d.registered)-1].Endpoints {
		if e.Provider == provider {
			return e.Addr
		}
	}
	d.t.Fatalf("no %s endpoint registered", provider)
	return ""
}

// logged collects log lines.
type logged struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), s)
}

// open starts a node over the providers named; the test's end checks that Close
// leaves nothing behind, neither error nor open object.
func open(t *testing.T, dir *directory, capacity int64, names ...string) (*Node, *logged) {
	t.Helper()
	return openWith(t, dir, capacity, func(*Options) {}, names...)
}

// openWith is open with other options.
func openWith(t *testing.T, dir *directory, capacity int64, change func(*Options), names ...string) (*Node, *logged) {
	t.Helper()
	log := &logged{}
	o := Options{
		Name: "m1", CapacityBytes: capacity, Directory: dir, Domain: "rack1", HostID: "host1",
		Logger:       slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		FenceTimeout: 200 * time.Millisecond,
	}
	for _, name := range names {
		addr := "127.0.0.1:0"
		switch name {
		case "shm":
			addr = fmt.Sprintf("@%s-%d", strings.ReplaceAll(t.Name(), "/", "-"), os.Getpid())
		case "sim":
			addr = "" // the fabric's choice
		}
		o.Devices = append(o.Devices, DeviceListen{Device: dir.device(name), Addr: addr})
	}
	change(&o)
	n, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		}
		if s := n.Stats(); s.RegisteredBytes != 0 || s.Connections != 0 || s.Registered || len(s.Regions) != 0 {
			t.Errorf("after Close: %+v", s)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := n.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	return n, log
}

// device opens a provider's device that must have nothing left at the end.
func (d *directory) device(name string) *rdma.Device {
	d.t.Helper()
	if name == "sim" {
		d.mu.Lock()
		d.devices++
		dev := rdma.NewDevice("sim", d.fabric.Device(fmt.Sprint("d", d.devices)))
		d.mu.Unlock()
		return atEnd(d.t, dev)
	}
	return openDevice(d.t, name)
}

func openDevice(t *testing.T, name string) *rdma.Device {
	t.Helper()
	d, err := providers.Open(name, providers.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return atEnd(t, d)
}

func atEnd(t *testing.T, d *rdma.Device) *rdma.Device {
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// lane is a client's connection.
type lane struct {
	t   *testing.T
	qp  *rdma.QP
	cq  *rdma.CQ
	mr  *rdma.MR
	seq uint64
}

// private is the private data of a connection that shows the grant, signed with the first key unless it names another,
// for as many lanes and as long as it is to be if it does not say.
func private(g token.Grant, lane uint32) []byte {
	g.Lanes, g.Expires = cmp.Or(g.Lanes, 256), cmp.Or(g.Expires, time.Now().Add(time.Hour).Unix())
	b, err := token.Sign(keyOf(cmp.Or(g.Generation, 1)), g)
	if err != nil {
		panic(err)
	}
	return binary.LittleEndian.AppendUint32(b, lane)
}

// dial connects; everything is closed at the test's end, before the node is.
func dial(t *testing.T, dir *directory, provider string, priv []byte) (*lane, error) {
	t.Helper()
	dev := dir.device((&dirpb.Endpoint{Provider: provider}).Carrier())
	pd, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	cq, err := dev.CreateCQ(16)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := dev.Alloc(4096, rdma.AllocOptions{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	mr, err := pd.RegMR(mem, 0, 4096, rdma.AccessLocal)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	qp, derr := dev.Dial(ctx, pd, cq, dir.endpoint(provider), priv)
	t.Cleanup(func() {
		var errs []error
		if qp != nil && derr == nil {
			errs = append(errs, qp.Close())
		}
		errs = append(errs, cq.Close(), mr.Deregister(), mem.Free(), pd.Dealloc())
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
	})
	return &lane{t: t, qp: qp, cq: cq, mr: mr}, derr
}

func mustDial(t *testing.T, dir *directory, provider string, g token.Grant, num uint32) *lane {
	t.Helper()
	l, err := dial(t, dir, provider, private(g, num))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// do posts one verb and gives its WC's error.
func (l *lane) do(w rdma.WR) error {
	l.t.Helper()
	l.seq++
	w.ID, w.LKey, w.Flags = l.seq, l.mr.LKey(), rdma.Signaled
	if n, err := l.qp.PostSend([]rdma.WR{w}); n != 1 {
		return err
	}
	deadline := time.After(patience)
	var wcs [1]rdma.WC
	for {
		if l.cq.Poll(wcs[:]) == 1 {
			if wcs[0].Status.String() != "SUCCESS" {
				return &rdma.WCError{WC: wcs[0]}
			}
			return nil
		}
		select {
		case <-l.cq.Ready():
		case <-deadline:
			l.t.Fatal("no WC")
		}
	}
}

func (l *lane) read(rkey, addr uint64, n int) ([]byte, error) {
	l.t.Helper()
	b := l.mr.Bytes()[:n]
	err := l.do(rdma.WR{Op: rdma.OpRead, Local: b, RemoteAddr: addr, RKey: rkey})
	return bytes.Clone(b), err
}

func (l *lane) write(rkey, addr uint64, data string) error {
	l.t.Helper()
	b := l.mr.Bytes()[:len(data)]
	copy(b, data)
	return l.do(rdma.WR{Op: rdma.OpWrite, Local: b, RemoteAddr: addr, RKey: rkey})
}

func (l *lane) cas(rkey, addr, old, new uint64) error {
	l.t.Helper()
	return l.do(rdma.WR{Op: rdma.OpCmpAndSwp, Local: l.mr.Bytes()[:8], RemoteAddr: addr, RKey: rkey, Compare: old,
		Swap: new})
}

// refused asserts that the target refused a verb.
func refused(t *testing.T, what string, err error) {
	t.Helper()
	var wc *rdma.WCError
	if !errors.As(err, &wc) || wc.WC.Status.String() != "REM_ACCESS_ERR" {
		t.Fatalf("%s: got %v, want REM_ACCESS_ERR", what, err)
	}
}
