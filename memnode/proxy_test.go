package memnode

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

const word = 4096 // an index word behind the header page

// increment adds 1 by compare-and-swap, as often as that takes, and gives how often.
func (l *lane) increment(k *dirpb.RegionKeys) (tries uint64, err error) {
	for want := uint64(0); ; {
		tries++
		if err := l.cas(k.IndexRkey, k.IndexBase+word, want, want+1); err != nil {
			return tries, err
		}
		found := binary.LittleEndian.Uint64(l.mr.Bytes())
		if found == want {
			return tries, nil
		}
		want = found
	}
}

// value is the word by this provider's READ.
func (l *lane) value(k *dirpb.RegionKeys) uint64 {
	l.t.Helper()
	b, err := l.read(k.IndexRkey, k.IndexBase+word, 8)
	if err != nil {
		l.t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b)
}

// Clients of an adapter and of tcp count in one word. The sum shows that no update
// was lost, and the adapter's own count that it executed every one of them.
func TestProxiedAtomics(t *testing.T) {
	for _, order := range [][]string{{"sim", "tcp"}, {"tcp", "sim"}} {
		t.Run(strings.Join(order, "+"), func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := open(t, dir, 1<<20, order...)
			by := map[string]dirpb.AtomicsBy{}
			for _, e := range dir.registered[0].Endpoints {
				by[e.Provider] = e.Atomics
			}
			if by["sim"] != dirpb.AtomicsBy_ATOMICS_BY_NIC || by["tcp"] != dirpb.AtomicsBy_ATOMICS_BY_PROXY {
				t.Fatalf("atomics by %v", by)
			}
			dir.want(1, 1)
			const each, times = 3, 200
			var wg sync.WaitGroup
			var mu sync.Mutex
			var tries uint64
			for i, provider := range slices.Repeat([]string{"sim", "tcp"}, each) {
				k := dir.keys(1, provider)
				l := mustDial(t, dir, provider, rw, uint32(i))
				wg.Go(func() {
					for range times {
						n, err := l.increment(k)
						mu.Lock()
						tries += n
						mu.Unlock()
						if err != nil {
							t.Errorf("%s: %v", provider, err)
							return
						}
					}
				})
			}
			wg.Wait()
			if cas := dir.fabric.Stats().Total.Verbs[rdma.OpCmpAndSwp]; cas != tries {
				t.Errorf("the adapter executed %d of %d compare-and-swaps", cas, tries)
			}
			l, k := mustDial(t, dir, "tcp", rw, 100), dir.keys(1, "tcp")
			if v := l.value(k); v != 2*each*times {
				t.Errorf("counted to %d, want %d", v, 2*each*times)
			}
			// FETCH_ADD goes the same way.
			if err := l.do(rdma.WR{Op: rdma.OpFetchAdd, Local: l.mr.Bytes()[:8], RemoteAddr: k.IndexBase + word,
				RKey: k.IndexRkey, Swap: 5}); err != nil {
				t.Fatal(err)
			}
			if found := binary.LittleEndian.Uint64(l.mr.Bytes()); found != 2*each*times {
				t.Errorf("FETCH_ADD found %d", found)
			}
			ls, ks := mustDial(t, dir, "sim", rw, 101), dir.keys(1, "sim")
			if v := ls.value(ks); v != 2*each*times+5 {
				t.Errorf("sim reads %d", v)
			}
			// Only what clients made counts as a connection.
			if s := n.Stats(); s.Connections != 2*each+2 || s.Sessions != 1 {
				t.Errorf("stats %+v", s)
			}
			// A namespace has its own way in; rights are as ever.
			dir.want(2, 2)
			theirs := dir.keys(2, "tcp")
			refused(t, "CAS in a foreign namespace", mustDial(t, dir, "tcp", rw, 102).cas(theirs.IndexRkey,
				theirs.IndexBase+word, 0, 1))
			refused(t, "CAS in the heap", mustDial(t, dir, "tcp", rw, 103).cas(k.HeapRkey, k.HeapBase, 0, 1))
			other := mustDial(t, dir, "tcp", token.Grant{Session: 8, Namespace: 2}, 0)
			if err := other.cas(theirs.IndexRkey, theirs.IndexBase+word, 0, 9); err != nil {
				t.Fatal(err)
			}
			if v := other.value(theirs); v != 9 {
				t.Errorf("namespace 2 reads %d", v)
			}
		})
	}
}

// loopQP is the number of the one QP on the fabric, that of the node itself.
func loopQP(t *testing.T, dir *directory) uint32 {
	t.Helper()
	qps := dir.fabric.Stats().QPs
	if len(qps) != 1 {
		t.Fatalf("%d QPs, want the node's own alone", len(qps))
	}
	return qps[0].Num
}

// The client of an atomic that the adapter fails is told what became of it, and the next atomic has a
// connection that works.
func TestProxyFails(t *testing.T) {
	dir := newDirectory(t)
	_, log := open(t, dir, 1<<20, "tcp", "sim")
	dir.want(1, 1)
	k := dir.keys(1, "tcp")
	want := uint64(0)
	for i, c := range []struct {
		inject driver.Status
		when   sim.When
		told   string
		effect rdma.Outcome
	}{
		{driver.RemAccessErr, sim.BeforeEffect, "REM_ACCESS_ERR", rdma.No},
		{driver.RetryExcErr, sim.BeforeEffect, "REM_OP_ERR", rdma.Unknown},
		{driver.RetryExcErr, sim.AfterEffect, "REM_OP_ERR", rdma.Unknown},
		{driver.WRFlushErr, sim.AfterEffect, "REM_OP_ERR", rdma.Unknown},
		{driver.LocProtErr, sim.BeforeEffect, "REM_OP_ERR", rdma.Unknown},
	} {
		first, then := mustDial(t, dir, "tcp", rw, uint32(2*i)), mustDial(t, dir, "tcp", rw, uint32(2*i+1))
		if err := dir.fabric.FailNext(loopQP(t, dir), c.inject, c.when); err != nil {
			t.Fatal(err)
		}
		err := first.cas(k.IndexRkey, k.IndexBase+word, want, want+1)
		wc, ok := errors.AsType[*rdma.WCError](err)
		if !ok || wc.WC.Status.String() != c.told || wc.Applied() != c.effect {
			t.Fatalf("%v: client is told %v, want %s", c.inject, err, c.told)
		}
		if c.when == sim.AfterEffect {
			want++
		}
		if v := then.value(k); v != want {
			t.Fatalf("%v: word %d, want %d", c.inject, v, want)
		}
		if err := then.cas(k.IndexRkey, k.IndexBase+word, want, want+1); err != nil {
			t.Fatalf("after %v: %v", c.inject, err)
		}
		want++
		loopQP(t, dir) // the broken one is gone
	}
	if bad, good := log.count("does not execute atomics"), log.count("executes atomics again"); bad != 5 || good != 5 {
		t.Errorf("trouble was logged %d times and its end %d times, want 5 each", bad, good)
	}
	// A connection that breaks while nobody uses it costs nobody an atomic.
	if err := dir.fabric.Kill(loopQP(t, dir)); err != nil {
		t.Fatal(err)
	}
	if err := mustDial(t, dir, "tcp", rw, 100).cas(k.IndexRkey, k.IndexBase+word, want, want+1); err != nil {
		t.Fatal(err)
	}
	loopQP(t, dir)
}

// An adapter that never answers: the client is told so in the end, no fence is
// confirmed before, and nothing lands after.
func TestProxySilent(t *testing.T) {
	dir := newDirectory(t)
	dir.fabric = sim.New(sim.Options{Manual: true})
	open(t, dir, 1<<20, "tcp", "sim")
	dir.want(1, 1)
	k := dir.keys(1, "tcp")
	l := mustDial(t, dir, "tcp", rw, 0)
	ended := make(chan error, 1)
	go func() { ended <- l.cas(k.IndexRkey, k.IndexBase+word, 0, 1) }()
	testutil.Until(t, `len(dir.fabric.Events()) == 1`, func() bool { return len(dir.fabric.Events()) == 1 })
	dir.change(func() { dir.fence = []uint32{rw.Session} })
	dir.until("the fence confirmed when the atomic is out of the way", func() bool {
		if len(dir.last.FencedSessions) == 0 {
			return false
		}
		if len(dir.fabric.Events()) != 0 {
			t.Error("a fence was confirmed while an atomic of the session could still land")
		}
		return true
	})
	if err := <-ended; err == nil {
		t.Fatal("an atomic that the adapter did not execute succeeded")
	}
	if v := mustDial(t, dir, "tcp", token.Grant{Session: 8, Namespace: 1}, 0).value(k); v != 0 {
		t.Fatalf("word %d, want 0", v)
	}
}

// Another life has other regions and connects to the adapter anew.
func TestProxyUnknownNode(t *testing.T) {
	dir := newDirectory(t)
	open(t, dir, 1<<20, "tcp", "sim")
	dir.want(1, 1)
	k, before := dir.keys(1, "tcp"), loopQP(t, dir)
	if err := mustDial(t, dir, "tcp", rw, 0).cas(k.IndexRkey, k.IndexBase+word, 0, 1); err != nil {
		t.Fatal(err)
	}
	dir.change(func() { dir.forget = true })
	dir.until("registration", func() bool { return len(dir.registered) == 2 })
	k = dir.keys(1, "tcp")
	if now := loopQP(t, dir); now == before {
		t.Fatalf("the connection to the adapter outlived the registration")
	}
	l := mustDial(t, dir, "tcp", rw, 0)
	if err := l.cas(k.IndexRkey, k.IndexBase+word, 0, 2); err != nil {
		t.Fatal(err)
	}
	if v := l.value(k); v != 2 {
		t.Fatalf("word %d, want 2", v)
	}
}

// Nobody else gets in by the node's own way.
func TestLoopRefusals(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp", "sim")
	dir.want(1, 1)
	dir.keys(1, "sim")
	private := func(namespace, number uint32) []byte {
		return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(slices.Clone(n.loopKey[:]), namespace),
			number)
	}
	n.mu.Lock()
	number := n.mu.loops[1].number
	n.mu.Unlock()
	forged := private(1, number)
	forged[0] ^= 1
	for what, c := range map[string]struct {
		provider string
		private  []byte
	}{
		"forged":             {"sim", forged},
		"all zero":           {"sim", make([]byte, loopPrivateSize)},
		"another namespace":  {"sim", private(2, number)},
		"another attempt":    {"sim", private(1, number+1)},
		"by tcp":             {"tcp", private(1, number)},
		"a byte longer":      {"sim", append(private(1, number), 0)},
		"the key by itself":  {"sim", n.loopKey[:]},
		"a client's, by sim": {"sim", make([]byte, token.MinSize+admit.LaneSize)},
	} {
		if _, err := dial(t, dir, c.provider, c.private); !errors.Is(err, rdma.ErrRefused) {
			t.Errorf("%s: got %v, want a refusal", what, err)
		}
	}
	loopQP(t, dir)
}

// An adapter that cannot reach itself shows in the region that needs it.
func TestLoopUnreachable(t *testing.T) {
	dir := newDirectory(t)
	n, err := Open(t.Context(), Options{Name: "m1", CapacityBytes: 1 << 20, Directory: dir, Devices: []DeviceListen{
		{Device: dir.device("tcp"), Addr: "127.0.0.1:0"}, {Device: dir.device("sim"), Advertise: "nowhere:1"}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	dir.want(1, 1)
	testutil.Until(t, "the region is refused, and not registered", func() bool {
		s := n.Stats()
		return len(s.Regions) == 1 && s.Regions[0].Err != nil && !s.Regions[0].Published && s.RegisteredBytes == 0
	})
	if err := n.Stats().Regions[0].Err.Error(); !strings.Contains(err, "sim: connection of this process to itself") ||
		!strings.Contains(err, "nowhere:1") {
		t.Errorf("the reason is %q", err)
	}
}
