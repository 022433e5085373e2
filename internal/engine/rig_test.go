package engine_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

const (
	second = int64(1e9)

	rigIndex  = layout.RegionPageSize + layout.SegmentSize
	rigRegion = 1 << 20
	rigLo     = (rigIndex + layout.UnitSize - 1) / layout.UnitSize // first unit of the heap
	rigLease  = second
	rigSelf   = 7 // session
)

// rig is a session with one lane, and memory nodes 1 to n that hold placement group 1,
// which has one shard of one segment. The lane's WRs take effect when the test says.
type rig struct {
	disk   disk
	looks  int // at a clock
	atLook func()
	closed bool
	t      *testing.T
	fab    *sim.Fabric
	wire   *wire
	dev    *rdma.Device
	core   *engine.Core
	l      *engine.Lane
	nodes  []*rigNode
	now    int64
	millis uint64

	version                  uint64 // of the map
	epoch, generation, shard uint32 // in it
	wantConn, wantFenced     []uint32
	wantBulk                 []uint32 // second queue pairs
	wantMemory               int
}

type rigNode struct {
	id          uint32
	incarnation uint64
	dev         *rdma.Device
	mem         []byte
	region      *rdma.Memory
	mrs         [2]*rdma.MR // index, heap
	pd          *rdma.PD
	l           rdma.Listener
}

// wire is the client's device, between the lane and the fabric.
type wire struct {
	driver.Device
	fab *sim.Fabric
	// caps, if not nil, changes what the device can do. Where it is synchronous PostSend
	// executes, as on shm.
	caps func(*driver.Caps)
	// post, if not nil, stands between the lane and the queue pair.
	post func(q driver.QP, wrs []driver.WR) (int, error)
}

func (w *wire) Caps() driver.Caps {
	c := w.Device.Caps()
	if w.caps != nil {
		w.caps(&c)
	}
	return c
}

func (w *wire) Dial(ctx context.Context, r driver.DialRequest) (driver.QP, error) {
	q, err := w.Device.Dial(ctx, r)
	return &wireQP{q, w}, err
}

type wireQP struct {
	driver.QP
	w *wire
}

func (q *wireQP) PostSend(wrs []driver.WR) (n int, err error) {
	if q.w.post != nil {
		n, err = q.w.post(q.QP, wrs)
	} else {
		n, err = q.QP.PostSend(wrs)
	}
	if q.w.Caps().Synchronous {
		fire(q.w.fab)
	}
	return n, err
}

// Map is driver.Mapper.
func (q *wireQP) Map(rkey, addr uint64, n int) (*driver.Mapping, bool, error) {
	return q.QP.(driver.Mapper).Map(rkey, addr, n)
}

// fire has all take effect that is under way.
func fire(f *sim.Fabric) (any bool) {
	for {
		evs := f.Events()
		if len(evs) == 0 {
			return any
		}
		any = true
		_ = f.Fire(evs[0])
	}
}

// newRig makes a rig with so many copies; synchronous: over a provider as shm is.
func newRig(t *testing.T, replicas int, synchronous bool) *rig {
	t.Helper()
	return newRigOf(t, replicas, func(c *driver.Caps) { c.Synchronous, c.SelfFencing = synchronous, synchronous })
}

func newRigOf(t *testing.T, replicas int, caps func(*driver.Caps)) *rig {
	t.Helper()
	r := &rig{t: t, fab: sim.New(sim.Options{Manual: true, MaxSendWR: 1 << 20}), now: second, millis: 1, epoch: 1,
		generation: 1, shard: 1}
	r.wire = &wire{Device: r.fab.Device("c"), fab: r.fab, caps: caps}
	r.dev = rdma.NewDevice("sim", r.wire)
	core, err := engine.NewCore(engine.Options{Session: rigSelf, Discriminator: 1, Lanes: 1, CacheBytes: 1 << 16,
		Devices: []*rdma.Device{r.dev},
		Hash:    func(key []byte) uint64 { return rigHash(string(key)) },
		Control: r, Objects: &r.disk, SlabTasks: 8, Nanos: func() int64 {
			r.looks++
			if r.atLook != nil {
				r.atLook()
			}
			return r.now
		}, Millis: func() uint64 { r.looks++; return r.millis }})
	if err != nil {
		t.Fatal(err)
	}
	r.core, r.l = core, core.Lanes()[0]
	for i := range replicas {
		r.nodes = append(r.nodes, r.node(uint32(i+1)))
	}
	t.Cleanup(r.close)
	r.renew(rigLease)
	r.install(nil)
	r.grant(rigLo, 2000)
	for _, n := range r.nodes {
		r.connect(n.id)
	}
	return r
}

func must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}

func (r *rig) node(id uint32) *rigNode {
	n := &rigNode{id: id, incarnation: 100 + uint64(id)}
	n.dev = rdma.NewDevice("sim", r.fab.Device(fmt.Sprint("m", id)))
	n.pd = must(n.dev.AllocPD())
	m := must(n.dev.Alloc(rigRegion, rdma.AllocOptions{}))
	n.mem = m.Bytes
	n.register(m)
	n.l = must(n.dev.Listen(fmt.Sprint("m", id),
		rdma.ListenOptions{Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			return n.pd, rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic, nil
		}}))
	return n
}

// register gives the region keys.
func (n *rigNode) register(m *rdma.Memory) {
	n.region = m
	n.mrs[0] = must(n.pd.RegMR(m, 0, rigIndex, rdma.AccessRemoteRead|rdma.AccessRemoteAtomic))
	n.mrs[1] = must(n.pd.RegMR(m, rigIndex, rigRegion-rigIndex, rdma.AccessRemoteRead|rdma.AccessRemoteWrite))
}

func (r *rig) close() {
	if r.closed {
		return
	}
	for _, n := range r.nodes {
		r.disconnect(n.id)
	}
	errs := []error{r.core.Close(), r.dev.Close()}
	for _, n := range r.nodes {
		errs = append(errs, n.l.Close(), n.mrs[0].Deregister(), n.mrs[1].Deregister(), n.pd.Dealloc(), n.dev.Close())
	}
	if err := errors.Join(errs...); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) WantMemory(uint32, uint32)       { r.wantMemory++ }
func (r *rig) WantFenced(id uint32)            { r.wantFenced = append(r.wantFenced, id) }
func (r *rig) WantMap(uint64)                  {}
func (r *rig) WantSplit(uint32)                {}
func (r *rig) WantRoom(uint32, uint64, uint64) {}

func (r *rig) WantConn(_ *engine.Lane, n uint32, bulk bool) {
	if bulk {
		r.wantBulk = append(r.wantBulk, n)
	} else {
		r.wantConn = append(r.wantConn, n)
	}
}

// install makes the next map the view; change, if not nil, edits its placement group.
func (r *rig) install(change func(*dirpb.PlacementGroup)) {
	r.t.Helper()
	r.offer(change)
	r.l.Pump()
}

// offer installs a map that the lane has not seen.
func (r *rig) offer(change func(*dirpb.PlacementGroup)) {
	r.t.Helper()
	r.version++
	pg := &dirpb.PlacementGroup{Id: 1, NamespaceId: 1, Epoch: r.epoch, Generation: r.generation,
		State:       dirpb.PGState_PG_ACTIVE,
		RegionBytes: rigRegion, IndexBytes: rigIndex}
	m := &dirpb.Map{Version: r.version, Pgs: []*dirpb.PlacementGroup{pg},
		Shards: []*dirpb.Shard{{Id: r.shard, NamespaceId: 1, PgId: 1, Offset: layout.RegionPageSize, Segments: 1}}}
	for _, n := range r.nodes {
		m.Nodes = append(m.Nodes, &dirpb.Node{Id: n.id, Incarnation: n.incarnation, State: dirpb.NodeState_NODE_UP})
		pg.Members = append(pg.Members, &dirpb.Member{NodeId: n.id, Incarnation: n.incarnation,
			Keys: []*dirpb.RegionKeys{{Provider: "sim",
				IndexRkey: n.mrs[0].RKey(), IndexBase: n.mrs[0].Base(), HeapRkey: n.mrs[1].RKey(),
				HeapBase: n.mrs[1].Base()}}})
	}
	if change != nil {
		change(pg)
	}
	v, err := engine.ViewOf(m, 1)
	if err != nil {
		r.t.Fatal(err)
	}
	r.core.InstallView(v)
}

// startOver is the loss of all copies: the placement group begins anew, zeroed. The lane
// sees it when it is pumped.
func (r *rig) startOver() {
	r.t.Helper()
	for _, n := range r.nodes {
		clear(n.mem)
	}
	r.epoch++
	r.generation = r.epoch
	r.offer(nil)
}

// renew extends the lease, and what is in limbo by now leaves it with the next two.
func (r *rig) renew(lease int64) {
	e := r.core.Epoch() + 1
	r.core.EndRenew(r.core.BeginRenew(), e, e, r.now+lease)
}

func (r *rig) grant(unit, units uint32) {
	r.t.Helper()
	if err := r.core.AddRun(1, r.generation, unit, units); err != nil {
		r.t.Fatal(err)
	}
}

// connect gives the lane a new queue pair to a memory node, once nothing of the old one
// can land.
func (r *rig) connect(node uint32) {
	r.t.Helper()
	r.disconnect(node)
	r.wantConn = nil
	r.attach(node, false)
}

// attach dials one of the two queue pairs to a memory node for the lane.
func (r *rig) attach(node uint32, bulk bool) {
	r.t.Helper()
	qp, err := r.dev.Dial(context.Background(), r.core.PD(0), r.l.CQ(0), fmt.Sprint("m", node), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	r.l.Attach(node, bulk, r.nodes[node-1].incarnation, 0, "sim", qp)
}

// disconnect closes the queue pairs to a memory node.
func (r *rig) disconnect(node uint32) {
	r.t.Helper()
	r.hangUp(node, true)
	r.hangUp(node, false)
}

// hangUp closes one of the two queue pairs to a memory node, if the lane has that.
func (r *rig) hangUp(node uint32, bulk bool) {
	r.t.Helper()
	if qp, _, _ := r.l.Detach(node, bulk); qp != nil {
		if err := qp.Close(); err != nil {
			r.t.Fatal(err)
		}
		r.l.Closed(node, bulk)
	}
}

// qp is the number of the lane's queue pair to a memory node, the first one.
func (r *rig) qp(node uint32) uint32 { return append(r.qps(node), 0)[0] }

// qps are the numbers of the lane's queue pairs to a memory node, the first one's first.
func (r *rig) qps(node uint32) (nums []uint32) {
	r.l.Conns(func(n uint32, _ int, q *rdma.QP) {
		if n == node {
			nums = append(nums, q.Num())
		}
	})
	return nums
}

// request is an operation on a key; see rigHash.
func (r *rig) request(kind index.Kind, key, value string) *engine.Task {
	r.t.Helper()
	t, err := r.l.NewTask()
	if err != nil {
		r.t.Fatal(err)
	}
	o := &t.Op
	o.Kind, o.Key, o.Value = kind, []byte(key), []byte(value)
	o.Hash, o.Check = rigHash(key), rigCheck(key)
	return t
}

// rigHash is the same for keys that begin alike, so that tests choose what shares a group and
// a fingerprint.
func rigHash(key string) uint64 { return uint64(key[0]) * 0x9e3779b97f4a7c15 }

func rigCheck(key string) (c uint64) {
	for _, b := range []byte(key) {
		c = (c ^ uint64(b)) * 0x100000001b3
	}
	return c | 1
}

// settleLane moves the lane until it waits for what does not come by itself. Time passes for
// those who back off.
func (r *rig) settleLane() {
	r.t.Helper()
	if !r.settleFor(second / 4) {
		r.t.Fatalf("the lane is not done: %d operations under way", r.l.Active())
	}
}

// settleFor is settleLane, which may take so long; it reports whether the lane came to rest.
func (r *rig) settleFor(time int64) bool {
	for end := r.now + time; ; {
		for r.l.Pump() || fire(r.fab) {
		}
		at := r.l.NextWake()
		if at == 0 {
			return true
		}
		if at > end {
			return at > r.now+second/100 // a deadline
		}
		r.now = max(r.now, at)
	}
}

// do performs an operation and gives what it found; the lane has its connections.
func (r *rig) do(kind index.Kind, key, value string) (string, error) {
	r.t.Helper()
	t := r.request(kind, key, value)
	r.l.Start(t)
	r.settleLane()
	return r.answer(t)
}

func (r *rig) answer(t *engine.Task) (string, error) {
	r.t.Helper()
	if !t.IsDone() {
		r.t.Fatalf("%v %q is in step %v and waits for %v", t.Op.Kind, t.Op.Key, t.Op.Step(), t.Waiting())
	}
	v, err := string(t.Op.Record.Value), t.Op.Err
	r.l.Recycle(t)
	return v, err
}

func (r *rig) put(key, value string) {
	r.t.Helper()
	if _, err := r.do(index.Put, key, value); err != nil {
		r.t.Fatalf("put %q: %v", key, err)
	}
}

func (r *rig) get(key, want string) {
	r.t.Helper()
	if v, err := r.do(index.Get, key, ""); err != nil || v != want {
		r.t.Fatalf("get %q: %q, %v, want %q", key, v, err, want)
	}
}

// hinted is what came of an operation without a Task.
type hinted struct {
	OK    bool
	Err   error
	value string
}

func (h *hinted) Take(r *layout.Record, _ [][]byte) { h.value = string(r.Value) }

// hinted tries an operation without a Task; the lane is synchronous.
func (r *rig) hinted(put bool, key, value string) (h hinted) {
	r.t.Helper()
	op := &engine.Op{Kind: index.Get, Key: []byte(key), Hash: rigHash(key), Check: rigCheck(key), Asker: &h}
	if put {
		op.Kind, op.Value = index.Put, []byte(value)
	}
	left := r.l.Hinted([]*engine.Op{op})
	if h.OK, h.Err = op.Over(), op.Err; h.OK != (left == 0) {
		r.t.Fatalf("over: %v, and %d are left", h.OK, left)
	}
	return h
}

func putWord(b []byte, w uint64) { binary.LittleEndian.PutUint64(b, w) }

func (n *rigNode) word(off uint64) uint64 { return binary.LittleEndian.Uint64(n.mem[off:]) }

// slot is where a memory node has a word with the fingerprint of key, and the word.
func (r *rig) slot(node uint32, key string) (off uint64, w layout.Word) {
	n := r.nodes[node-1]
	home, _ := layout.GroupOff(rigHash(key), 1)
	for i := range layout.GroupSlots {
		off = layout.RegionPageSize + home + layout.SlotOff(i)
		if w = layout.Word(n.word(off)); w.Readable() && w.FP() == layout.FP(rigHash(key)) {
			return off, w
		}
	}
	return 0, 0
}

// lock is the insert lock of a key's group.
func (r *rig) lock(node uint32, key string) layout.Lock {
	home, _ := layout.GroupOff(rigHash(key), 1)
	return layout.Lock(r.nodes[node-1].word(layout.RegionPageSize + home + layout.GroupLockOff))
}
