package engine_test

import (
	"errors"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// An Op that a chain has decided and that goes on as a Task began when the chain did: what it
// may still look at is not reused, though the reclaim epoch has risen since.
func TestGoesOnInItsEpoch(t *testing.T) {
	r := newRig(t, 2, true)
	r.put("a", "1")
	began := r.core.Epoch()
	bell := 0
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
		if bell++; bell == 2 { // behind the decision: somebody brings the tail up, and a renewal is answered
			off, w := r.slot(1, "a")
			putWord(r.nodes[1].mem[off:], uint64(w))
			r.renew(rigLease)
		}
		return q.PostSend(wrs)
	}
	op := &engine.Op{Kind: index.Put, Key: []byte("a"), Value: []byte("2"), Hash: rigHash("a"), Check: rigCheck("a")}
	r.l.Hinted([]*engine.Op{op})
	r.wire.post = nil
	if op.Task() == nil || r.core.Epoch() == began {
		t.Fatalf("it goes on: %v, in reclaim epoch %d; it began in %d", op.Task() != nil, r.core.Epoch(), began)
	}
	if oldest, ok := r.l.Oldest(); !ok || oldest != began {
		t.Errorf("the oldest operation is of reclaim epoch %d, %v, want %d", oldest, ok, began)
	}
	r.settleLane()
	if !op.Over() || op.Err != nil {
		t.Errorf("over %v: %v", op.Over(), op.Err)
	}
	r.wantCopies("a", "2")
}

// The hint that a PUT without a Task leaves knows whether its record expires: the slot alone
// does not say then that a version is still there.
func TestHintedPutExpires(t *testing.T) {
	r := newRig(t, 1, true)
	r.put("a", "1")
	op := &engine.Op{Kind: index.Put, Key: []byte("a"), Value: []byte("2"), Expiry: 1000, Hash: rigHash("a"),
		Check: rigCheck("a")}
	if left := r.l.Hinted([]*engine.Op{op}); left != 0 || op.Err != nil {
		t.Fatalf("%d are left: %v", left, op.Err)
	}
	get := func(want error) {
		t.Helper()
		x := r.request(index.Get, "a", "")
		x.Op.Cond, x.Op.IfVersion = index.IfVersion, op.Version
		r.l.Start(x)
		r.settleLane()
		if _, err := r.answer(x); !errors.Is(err, want) {
			t.Errorf("at %d: %v, want %v", r.millis, err, want)
		}
	}
	r.millis = 999
	get(index.ErrUnchanged)
	r.millis = 1000
	get(index.ErrNotFound)
}

// PUTs of two placement groups that have the tail in common, and not the head, do not share a
// chain: each is decided at its own head.
func TestHintedOfTwoGroups(t *testing.T) {
	const a, b = "c", "a" // in the lower and the upper half of all hashes
	if rigHash(a)>>63 != 0 || rigHash(b)>>63 != 1 {
		t.Fatal("the keys are in other halves")
	}
	r := newRig(t, 3, true)
	r.core.EndRenew(r.core.BeginRenew(), r.core.Epoch()+1, 0, r.now+rigLease)
	v, m := r.version+1, &dirpb.Map{}
	m.Version = v
	r.version = v
	var second [3]*rigNode // the memory of the second placement group
	for i, n := range r.nodes {
		x := &rigNode{id: n.id, pd: n.pd}
		mem := must(n.dev.Alloc(rigRegion, rdma.AllocOptions{}))
		x.mem = mem.Bytes
		x.register(mem)
		second[i] = x
		defer func() {
			if err := errors.Join(x.mrs[0].Deregister(), x.mrs[1].Deregister()); err != nil {
				t.Error(err)
			}
		}()
		m.Nodes = append(m.Nodes, &dirpb.Node{Id: n.id, Incarnation: n.incarnation, State: dirpb.NodeState_NODE_UP})
	}
	group := func(id uint32, nodes []*rigNode, members ...int) {
		pg := &dirpb.PlacementGroup{Id: id, NamespaceId: 1, Epoch: 1, Generation: 1, State: dirpb.PGState_PG_ACTIVE,
			RegionBytes: rigRegion, IndexBytes: rigIndex}
		for _, i := range members {
			n := nodes[i]
			pg.Members = append(pg.Members, &dirpb.Member{NodeId: n.id, Incarnation: r.nodes[i].incarnation,
				Keys: []*dirpb.RegionKeys{{Provider: "sim",
					IndexRkey: n.mrs[0].RKey(), IndexBase: n.mrs[0].Base(), HeapRkey: n.mrs[1].RKey(),
					HeapBase: n.mrs[1].Base()}}})
		}
		m.Pgs = append(m.Pgs, pg)
		m.Shards = append(m.Shards, &dirpb.Shard{Id: id, NamespaceId: 1, PgId: id, Prefix: id - 1, Depth: 1,
			Offset: layout.RegionPageSize, Segments: 1})
	}
	group(1, r.nodes, 0, 2)
	group(2, second[:], 1, 2)
	view, err := engine.ViewOf(m, 1)
	if err != nil {
		t.Fatal(err)
	}
	r.core.InstallView(view)
	r.l.Pump()
	if err := r.core.AddRun(2, 1, rigLo, 2000); err != nil {
		t.Fatal(err)
	}
	r.put(a, "1")
	r.put(b, "1")
	var ops []*engine.Op
	for _, key := range []string{a, b} {
		ops = append(ops, &engine.Op{Kind: index.Put, Key: []byte(key), Value: []byte("2"), Hash: rigHash(key),
			Check: rigCheck(key)})
	}
	if left := r.l.Hinted(ops); left != 0 || ops[0].Err != nil || ops[1].Err != nil {
		t.Fatalf("%d are left: %v, %v", left, ops[0].Err, ops[1].Err)
	}
	holds := func(nodes []*rigNode, key string, members ...int) {
		t.Helper()
		for _, i := range members {
			was := r.nodes
			r.nodes = nodes
			_, w := r.slot(uint32(i+1), key)
			r.nodes = was
			rec, err := layout.ParseRecord(nodes[i].mem[w.Off():][:w.ReadLen()])
			if err != nil || string(rec.Key) != key || string(rec.Value) != "2" {
				t.Errorf("memory node %d has %q of %q, %v", i+1, rec.Value, key, err)
			}
		}
	}
	holds(r.nodes, a, 0, 2)
	holds(second[:], b, 1, 2)
	r.get(a, "2")
	r.get(b, "2")
}
