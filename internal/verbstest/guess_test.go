package verbstest

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// guesser is somebody with a session and an adapter who posts what he likes.
type guesser struct {
	s      *store
	rpc    *dirclient.Client
	dev    *rdma.Device
	pd     *rdma.PD
	mr     *rdma.MR
	id     uint32 // session
	lease  time.Duration
	opened time.Time // just after the directory's answer
	token  []byte
	pgs    []*dirpb.PlacementGroup // with rkeys
	nodes  map[uint32]*dirpb.Node
	lanes  atomic.Uint32 // given to queue pairs
	most   uint32        // of them
	stop   context.CancelFunc
}

// guesser opens a session of the namespace with the fourth adapter. Unless it
// renews, it is fenced when its lease ends.
func (s *store) guesser(namespace string, readOnly, renews bool) *guesser {
	s.t.Helper()
	return s.guesserAs(s.rpc, s.conf, namespace, readOnly, renews)
}

// guesserAs is guesser of somebody who calls the directory by rpc and has the certificate of conf.
func (s *store) guesserAs(rpc *dirclient.Client, conf *tls.Config, namespace string, readOnly, renews bool) *guesser {
	s.t.Helper()
	g := &guesser{s: s, rpc: rpc, dev: openDevice(s.t, provider, 3, conf, nil), nodes: map[uint32]*dirpb.Node{}}
	var rep *dirpb.OpenSessionReply
	s.callAs(rpc, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = d.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: namespace, Client: "guesser",
			ReadOnly: readOnly})
		return err
	})
	g.opened = time.Now()
	g.most = rep.GetMaxLanes()
	g.id, g.token, g.lease = rep.GetSessionId(), rep.GetToken(), time.Duration(rep.GetLeaseMillis())*time.Millisecond
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	g.stop = stop
	s.t.Cleanup(func() { stop(); wg.Wait() })
	if renews {
		wg.Go(func() { g.renew(ctx, time.Duration(rep.GetRenewMillis())*time.Millisecond) })
	}

	watch, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	seen := errors.New("seen")
	err := rpc.WatchMap(watch, g.id, 0, func(m *dirpb.Map) error {
		g.pgs = m.GetPgs()
		for _, n := range m.GetNodes() {
			g.nodes[n.GetId()] = n
		}
		if slices.ContainsFunc(g.pgs, func(p *dirpb.PlacementGroup) bool {
			return p.GetState() != dirpb.PGState_PG_ACTIVE
		}) {
			return nil
		}
		return seen
	})
	if !errors.Is(err, seen) {
		s.t.Fatalf("map of namespace %q: %v", namespace, err)
	}

	if g.pd, err = g.dev.AllocPD(); err != nil {
		s.t.Fatal(err)
	}
	mem, err := g.dev.Alloc(4096, rdma.AllocOptions{Name: "guesser"})
	if err != nil {
		s.t.Fatal(err)
	}
	if g.mr, err = g.pd.RegMR(mem, 0, 4096, rdma.AccessLocal); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := errors.Join(g.mr.Deregister(), mem.Free(), g.pd.Dealloc()); err != nil {
			s.t.Error(err)
		}
	})
	return g
}

// renew keeps the session alive until ctx ends. It holds nothing of any map, so
// it acknowledges each.
func (g *guesser) renew(ctx context.Context, every time.Duration) {
	req := &dirpb.RenewRequest{SessionId: g.id}
	for {
		err := g.rpc.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
			req.Number++ // the directory heeds the latest one alone
			rep, err := d.Renew(ctx, req)
			req.ReportEpoch, req.AckedMapVersion, req.QuiescedMapVersion = rep.GetEpoch(), rep.GetMapVersion(),
				rep.GetMapVersion()
			return err
		})
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			g.s.t.Errorf("guesser's session %d is not renewed: %v", g.id, err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
	}
}

// region is one region as the map shows it to the session.
type region struct {
	node                     string
	indexRKey, heapRKey      uint64
	index, heap              uint64 // remote addresses of their first bytes
	indexBytes, heapBytes    uint64
	indexEnd, heapEnd, lastW uint64 // remote addresses; lastW is the heap's last word
}

// region is the session's first region on the memory node.
func (g *guesser) region(name string) region {
	g.s.t.Helper()
	for _, p := range g.pgs {
		for _, m := range p.GetMembers() {
			for _, k := range m.GetKeys() {
				if g.nodes[m.GetNodeId()].GetName() != name || k.GetProvider() != provider {
					continue
				}
				r := region{node: name, indexRKey: k.GetIndexRkey(), heapRKey: k.GetHeapRkey(), index: k.GetIndexBase(),
					heap:       k.GetHeapBase(),
					indexBytes: p.GetIndexBytes(), heapBytes: p.GetRegionBytes() - p.GetIndexBytes()}
				r.indexEnd, r.heapEnd = r.index+r.indexBytes, r.heap+r.heapBytes
				r.lastW = r.heapEnd - 8
				return r
			}
		}
	}
	g.s.t.Fatalf("session %d sees no region on %s", g.id, name)
	return region{}
}

// qp is one connection of a guesser.
type qp struct {
	g   *guesser
	qp  *rdma.QP
	cq  *rdma.CQ
	seq uint64
}

// connect asks the memory node for a connection of a lane that has none yet, or of the one that has had its own for
// longest.
func (g *guesser) connect(name string) (*qp, error) {
	g.s.t.Helper()
	cq, err := g.dev.CreateCQ(16)
	if err != nil {
		g.s.t.Fatal(err)
	}
	// A memory node that was started again listens elsewhere than the session's map says.
	addr := endpoint(member(g.s.status().GetMap(), name), provider).GetAddr()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	q, err := g.dev.Dial(ctx, g.pd, cq, addr, binary.LittleEndian.AppendUint32(slices.Clone(g.token),
		g.lanes.Add(1)%g.most))
	g.s.t.Cleanup(func() {
		if err == nil {
			// That the peer of a killed or fenced connection confirms nothing is no news.
			_ = q.Abort()
		}
		if err := cq.Close(); err != nil {
			g.s.t.Error(err)
		}
	})
	return &qp{g: g, qp: q, cq: cq}, err
}

func (g *guesser) mustConnect(name string) *qp {
	g.s.t.Helper()
	q, err := g.connect(name)
	if err != nil {
		g.s.t.Fatal(err)
	}
	return q
}

// do posts one verb with the guesser's buffer and says how it ended: a status, or
// why it was not posted.
func (q *qp) do(w rdma.WR) string {
	q.g.s.t.Helper()
	q.seq++
	w.ID, w.LKey, w.Flags = q.seq, q.g.mr.LKey(), rdma.Signaled
	if n, err := q.qp.PostSend([]rdma.WR{w}); n != 1 {
		return "not posted: " + err.Error()
	}
	return q.wait().Status.String()
}

// wait is the next completion.
func (q *qp) wait() rdma.WC {
	q.g.s.t.Helper()
	deadline := time.After(patience)
	for {
		var wcs [1]rdma.WC
		if q.cq.Poll(wcs[:]) == 1 {
			return wcs[0]
		}
		select {
		case <-q.cq.Ready():
		case <-deadline:
			q.g.s.t.Fatalf("no completion within %v", patience)
		}
	}
}

func (g *guesser) readWR(rkey, addr uint64, n int) rdma.WR {
	return rdma.WR{Op: rdma.OpRead, Local: g.mr.Bytes()[:n], RemoteAddr: addr, RKey: rkey}
}

// writeWR writes the word "guessed!", which nothing else changes, at the end of the
// buffer.
func (g *guesser) writeWR(rkey, addr uint64) rdma.WR {
	b := g.mr.Bytes()[len(g.mr.Bytes())-8:]
	copy(b, "guessed!")
	return rdma.WR{Op: rdma.OpWrite, Local: b, RemoteAddr: addr, RKey: rkey}
}

func (g *guesser) casWR(rkey, addr, compare, swap uint64) rdma.WR {
	return rdma.WR{Op: rdma.OpCmpAndSwp, Local: g.mr.Bytes()[:8], RemoteAddr: addr, RKey: rkey, Compare: compare,
		Swap: swap}
}

// read gives n bytes of remote memory, which the session may read.
func (q *qp) read(rkey, addr uint64, n int) []byte {
	q.g.s.t.Helper()
	if st := q.do(q.g.readWR(rkey, addr, n)); st != success {
		q.g.s.t.Fatalf("READ of %d bytes at %#x: %s", n, addr, st)
	}
	return bytes.Clone(q.g.mr.Bytes()[:n])
}

// broken waits until the queue pair is in error.
func (q *qp) broken() {
	q.g.s.t.Helper()
	testutil.UntilNone(q.g.s.t, "the queue pair is in error", func() string {
		if st := q.qp.State(); st == driver.StateRTS {
			return fmt.Sprintf("its state is %d", st)
		}
		return ""
	})
}

const (
	success      = "SUCCESS"
	remAccessErr = "REM_ACCESS_ERR"
	remInvReqErr = "REM_INV_REQ_ERR"
)

// bystander uses the store all the time and must notice nothing.
type bystander struct {
	ops  atomic.Int64
	quit func()
	done chan struct{} // closed when it has ended
	err  error         // why, if not because it was told to; valid then
}

// bystander puts and gets keys of the namespace, over the third adapter, until the
// test ends or quit.
func (s *store) bystander(namespace string) *bystander {
	s.t.Helper()
	c := s.client(provider, 2, client.Options{Namespace: namespace})
	ctx, cancel := context.WithCancel(context.Background())
	b := &bystander{done: make(chan struct{})}
	b.quit = func() {
		cancel()
		<-b.done
	}
	s.t.Cleanup(b.quit) // before its client is closed
	go func() {
		defer close(b.done)
		for i := 0; ctx.Err() == nil; i++ {
			key, value := fmt.Appendf(nil, "bystander%d", i%16), fmt.Appendf(nil, "value %d", i)
			if _, err := c.Put(context.Background(), key, value, client.PutOptions{}); err != nil {
				b.err = fmt.Errorf("put %d: %w", i, err)
				return
			}
			it, err := c.Get(context.Background(), key)
			if err != nil || !bytes.Equal(it.Value, value) {
				b.err = fmt.Errorf("get %d: %q, %w, want %q", i, it.Value, err, value)
				return
			}
			b.ops.Add(2)
		}
	}()
	return b
}

// moves waits until the bystander has done something more.
func (b *bystander) moves(t *testing.T) {
	t.Helper()
	before := b.ops.Load()
	testutil.UntilNone(t, "the bystander goes on", func() string {
		select {
		case <-b.done:
			t.Fatalf("the bystander: %v", b.err)
		default:
		}
		if n := b.ops.Load(); n <= before {
			return fmt.Sprintf("%d operations", n)
		}
		return ""
	})
}
