package memnode

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var rw = token.Grant{Session: 7, Namespace: 1}

// The same memory over two providers: what one writes the other reads; the index takes atomics and no
// WRITE; the region starts with its header.
func TestPublish(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp", "shm")
	reg := dir.registered[0]
	if reg.Name != "m1" || reg.Domain != "rack1" || reg.HostId != "host1" || reg.CapacityBytes != 1<<20 ||
		reg.Incarnation == 0 || len(reg.Endpoints) != 2 {
		t.Fatalf("registered %v", reg)
	}
	dir.want(9, 1)
	kt, ks := dir.keys(9, "tcp"), dir.keys(9, "shm")
	lt, ls := mustDial(t, dir, "tcp", rw, 0), mustDial(t, dir, "shm", rw, 1)

	b, err := lt.read(kt.IndexRkey, kt.IndexBase, layout.RegionPageSize)
	if err != nil {
		t.Fatal(err)
	}
	h, err := layout.ParseRegion(b)
	want := layout.RegionHeader{PG: 9, Namespace: 1, Epoch: 3, RegionBytes: regionBytes, IndexBytes: indexBytes,
		Incarnation: reg.Incarnation}
	if err != nil || h != want {
		t.Fatalf("header %+v, %v; want %+v", h, err, want)
	}
	last := uint64(regionBytes - indexBytes - 8)
	if err := lt.write(kt.HeapRkey, kt.HeapBase+last, "written!"); err != nil {
		t.Fatal(err)
	}
	if b, err := ls.read(ks.HeapRkey, ks.HeapBase+last, 8); err != nil || string(b) != "written!" {
		t.Fatalf("shm reads %q, %v", b, err)
	}
	if err := ls.cas(ks.IndexRkey, ks.IndexBase+indexBytes-8, 0, 5); err != nil {
		t.Fatal(err)
	}
	if b, err := lt.read(kt.IndexRkey, kt.IndexBase+indexBytes-8, 8); err != nil || b[0] != 5 {
		t.Fatalf("tcp reads %v, %v", b, err)
	}
	s := n.Stats()
	if s.RegisteredBytes != regionBytes || s.Connections != 2 || s.Sessions != 1 || len(s.Regions) != 1 ||
		s.Regions[0].PG != 9 || s.DataPathCPU <= 0 {
		t.Fatalf("stats %+v", s)
	}
	dir.until("CPU time in a heartbeat", func() bool {
		return dir.last.Stats.DataPathCpuNanos > 0 && dir.last.Stats.Connections == 2 &&
			dir.last.Stats.RegisteredBytes == regionBytes
	})
	for i, op := range []struct {
		name string
		do   func(*lane) error
	}{
		{"WRITE to the index", func(l *lane) error { return l.write(kt.IndexRkey, kt.IndexBase, "x") }},
		{"CAS in the heap", func(l *lane) error { return l.cas(kt.HeapRkey, kt.HeapBase, 0, 1) }},
		{"READ behind the index", func(l *lane) error {
			_, err := l.read(kt.IndexRkey, kt.IndexBase+indexBytes, 8)
			return err
		}},
		{"WRITE behind the region", func(l *lane) error { return l.write(kt.HeapRkey, kt.HeapBase+last+8, "x") }},
	} {
		refused(t, op.name, op.do(mustDial(t, dir, "tcp", rw, uint32(10+i))))
	}

	late := mustDial(t, dir, "tcp", rw, 20)
	dir.change(func() { dir.regions = nil })
	dir.until("the region's memory given back", func() bool { return dir.last.Stats.RegisteredBytes == 0 })
	_, err = late.read(kt.HeapRkey, kt.HeapBase, 8)
	refused(t, "READ of a dropped region", err)
}

// A namespace that is deleted leaves nothing behind, and the next one finds all it needs.
func TestNamespaceGone(t *testing.T) {
	for _, order := range [][]string{{"tcp", "shm"}, {"sim", "tcp"}} {
		t.Run(strings.Join(order, "+"), func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := open(t, dir, 1<<20, order...)
			domains := func() (left int) {
				n.mu.Lock()
				defer n.mu.Unlock()
				for _, d := range n.devices {
					left += len(d.pds)
				}
				return left + len(n.mu.loops)
			}
			for ns := range uint32(3) {
				pg, g := 9+ns, token.Grant{Session: 7 + ns, Namespace: 1 + ns}
				dir.want(pg, g.Namespace)
				for i, p := range order {
					k := dir.keys(pg, p)
					if err := mustDial(t, dir, p, g, uint32(i)).cas(k.IndexRkey, k.IndexBase+word, uint64(i),
						uint64(i+1)); err != nil {
						t.Fatal(err)
					}
				}
				dir.change(func() { dir.regions = nil })
				dir.until("the region's memory given back", func() bool { return dir.last.Stats.RegisteredBytes == 0 })
				dir.beats(2)
				testutil.Until(t, `domains() <= len(order)`, func() bool {
					dir.beats(1)
					return domains() <= len(order)
				})
				if got := domains(); got != len(order) {
					t.Errorf("%d protection domains while sessions are connected, want %d", got, len(order))
				}
				dir.change(func() { dir.fence = []uint32{g.Session} })
				testutil.Until(t, `domains() == 0`, func() bool { dir.beats(1); return domains() == 0 })
				dir.change(func() { dir.fence = nil })
			}
		})
	}
}

func TestCapacity(t *testing.T) {
	dir := newDirectory(t)
	n, log := open(t, dir, regionBytes+4096, "tcp")
	dir.want(1, 1)
	dir.keys(1, "tcp")
	dir.want(2, 1)
	dir.change(func() { // absurd sizes must not wrap
		w := dir.regions[1]
		dir.regions = append(dir.regions, &dirpb.WantRegion{PgId: 3, NamespaceId: 1, RegionBytes: 1<<64 - 64,
			IndexBytes: 4096})
		dir.regions = append(dir.regions, &dirpb.WantRegion{PgId: 4, NamespaceId: 1, RegionBytes: w.RegionBytes,
			IndexBytes: w.RegionBytes})
		dir.regions = append(dir.regions, &dirpb.WantRegion{PgId: 5, NamespaceId: 1, RegionBytes: 8192, IndexBytes: 8})
	})
	dir.beats(3)
	var s Stats
	for deadline := time.Now().Add(patience); len(s.Regions) < 5 && time.Now().Before(deadline); s = n.Stats() {
		dir.beats(1)
	}
	if len(s.Regions) != 5 || s.RegisteredBytes != regionBytes || s.Regions[0].Err != nil {
		t.Fatalf("stats %+v", s)
	}
	for i, capacity := range map[int]bool{1: true, 2: true, 3: false, 4: false} {
		if r := s.Regions[i]; r.Err == nil || errors.Is(r.Err, ErrCapacity) != capacity || r.Published {
			t.Errorf("pg %d: %v", r.PG, r.Err)
		}
	}
	if !strings.Contains(s.Regions[1].Err.Error(), "64 KiB of 68 KiB in use") {
		t.Errorf("the reason lacks the numbers: %v", s.Regions[1].Err)
	}
	if log.count("pg 2: over capacity") != 1 {
		t.Errorf("the failure was logged %d times, want once", log.count("pg 2: over capacity"))
	}
	dir.change(func() { dir.regions = dir.regions[1:2] })
	dir.keys(2, "tcp")
	dir.beats(3)
	if s := n.Stats(); s.RegisteredBytes != regionBytes || len(s.Regions) != 1 || s.Regions[0].Err != nil {
		t.Fatalf("stats %+v", s)
	}
}

// A region takes whole pages, and counts as such.
func TestCapacityOfPages(t *testing.T) {
	const page = 2 << 20
	dir := newDirectory(t)
	// which has none, and takes any
	n, _ := openWith(t, dir, 2*page-1, func(o *Options) { o.HugePageBytes = page }, "sim")
	dir.want(1, 1)
	dir.keys(1, "sim")
	dir.want(2, 1)
	testutil.Until(t, `len(s.Regions) == 2 && s.Regions[1].Err != nil`, func() bool {
		s := n.Stats()
		return len(s.Regions) == 2 && s.Regions[1].Err != nil
	})
	if s := n.Stats(); s.RegisteredBytes != page || !errors.Is(s.Regions[1].Err, ErrCapacity) {
		t.Fatalf("stats %+v", s)
	}
	dir.change(func() { dir.regions = dir.regions[:1] })
	testutil.Until(t, `len(n.Stats().Regions) == 1`, func() bool { return len(n.Stats().Regions) == 1 })
}

// busy is a device of which somebody is inside a region.
type busy struct {
	driver.Device
	inside atomic.Bool
	freed  atomic.Int32 // regions
}

func (b *busy) Alloc(size int64, o driver.AllocOptions) (*driver.Memory, error) {
	m, err := b.Device.Alloc(size, o)
	if err != nil {
		return nil, err
	}
	return driver.NewMemory(m.Bytes, m.FD, o, func() error { b.freed.Add(1); return m.Free() }), nil
}

func (b *busy) AllocPD() (driver.PD, error) {
	pd, err := b.Device.AllocPD()
	return busyPD{pd, b}, err
}

type busyPD struct {
	driver.PD
	b *busy
}

func (p busyPD) RegMR(m *driver.Memory, off, n int64, a driver.Access) (driver.MR, error) {
	mr, err := p.PD.RegMR(m, off, n, a)
	return busyMR{mr, p.b}, err
}

type busyMR struct {
	driver.MR
	b *busy
}

func (m busyMR) Deregister() error {
	if m.b.inside.Load() {
		return errors.New("somebody is inside")
	}
	return m.MR.Deregister()
}

// The memory of a region that a provider cannot take back yet is not freed: whoever is inside
// would find another's.
func TestRegionInUse(t *testing.T) {
	dir := newDirectory(t)
	var b *busy
	n, _ := openWith(t, dir, 1<<20, func(o *Options) {
		b = &busy{Device: o.Devices[0].Device.Driver()}
		o.Devices[0].Device = rdma.NewDevice("sim", b)
	}, "sim")
	dir.want(1, 1)
	dir.keys(1, "sim")
	b.inside.Store(true)
	dir.change(func() { dir.regions = nil })
	testutil.Until(t, "the region is freed, or kept with a reason", func() bool {
		s := n.Stats()
		return b.freed.Load() > 0 || len(s.Regions) == 1 && s.Regions[0].Err != nil
	})
	dir.beats(3)
	if s := n.Stats(); b.freed.Load() != 0 || s.RegisteredBytes != regionBytes || len(s.Regions) != 1 ||
		s.Regions[0].Published {
		t.Fatalf("freed %d regions with somebody inside; stats %+v", b.freed.Load(), s)
	}
	b.inside.Store(false)
	testutil.Until(t, `len(n.Stats().Regions) == 0`, func() bool { return len(n.Stats().Regions) == 0 })
	if s := n.Stats(); b.freed.Load() != 1 || s.RegisteredBytes != 0 {
		t.Fatalf("freed %d regions; stats %+v", b.freed.Load(), s)
	}
}

// Namespaces share no MR and no PD, on any device: each region has rkeys of its own, with which nobody of another
// namespace does anything. Of sim with tcp, tcp's atomics are those of the adapter.
func TestForeignNamespace(t *testing.T) {
	for _, order := range [][]string{{"tcp"}, {"shm"}, {"sim", "tcp"}} {
		t.Run(strings.Join(order, "+"), func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := open(t, dir, 1<<20, order...)
			dir.want(1, 1)
			dir.want(2, 2)
			keys := make(map[uint64]string)
			for _, provider := range order {
				mine, theirs := dir.keys(1, provider), dir.keys(2, provider)
				for _, k := range []*dirpb.RegionKeys{mine, theirs} {
					for _, rkey := range []uint64{k.IndexRkey, k.HeapRkey} {
						what := fmt.Sprintf("%s %v", provider, k)
						if keys[rkey] != "" {
							t.Errorf("rkey %#x is of %s and of %s", rkey, keys[rkey], what)
						}
						keys[rkey] = what
					}
				}
				owner := mustDial(t, dir, provider, token.Grant{Session: 8, Namespace: 2}, 0)
				if err := owner.write(theirs.HeapRkey, theirs.HeapBase, "theirs"); err != nil {
					t.Fatal(err)
				}
				for lane, try := range []struct {
					what string
					do   func(l *lane) error
				}{
					{"READ of a foreign heap", func(l *lane) error {
						_, err := l.read(theirs.HeapRkey, theirs.HeapBase, 8)
						return err
					}},
					{"READ of a foreign index", func(l *lane) error {
						_, err := l.read(theirs.IndexRkey, theirs.IndexBase, 8)
						return err
					}},
					{"WRITE to a foreign heap", func(l *lane) error {
						return l.write(theirs.HeapRkey, theirs.HeapBase, "stolen")
					}},
					{"CAS in a foreign index", func(l *lane) error {
						return l.cas(theirs.IndexRkey, theirs.IndexBase+word, 0, 1)
					}},
				} {
					l := mustDial(t, dir, provider, rw, uint32(lane))
					if _, err := l.read(mine.HeapRkey, mine.HeapBase, 8); err != nil {
						t.Fatal(err)
					}
					refused(t, try.what+" over "+provider, try.do(l))
				}
				if b, err := owner.read(theirs.HeapRkey, theirs.HeapBase, 6); err != nil || string(b) != "theirs" {
					t.Errorf("over %s its owner reads %q, %v", provider, b, err)
				}
				if b, err := owner.read(theirs.IndexRkey, theirs.IndexBase+word, 8); err != nil ||
					!bytes.Equal(b, make([]byte, 8)) {
					t.Errorf("over %s its owner reads the word %x, %v", provider, b, err)
				}
			}
			n.mu.Lock()
			defer n.mu.Unlock()
			for _, d := range n.devices {
				if len(d.pds) != 2 || d.pds[1] == d.pds[2] {
					t.Errorf("the PDs of %s are %v", d.dev.Name(), d.pds)
				}
			}
		})
	}
}

// A namespace's quota of verbs over tcp holds at the PDs that there are and at those made later, until it is taken
// back. Other namespaces, and verbs that the client executes, are not concerned.
func TestQuota(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("late=%v", late), func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := open(t, dir, 1<<20, "tcp", "shm")
			limit := func(ops uint64) {
				dir.change(func() {
					dir.quotas = []*dirpb.NamespaceQuota{{NamespaceId: 2, Name: "any"},
						{NamespaceId: 1, TcpOpsPerSecond: ops, Name: "small"}}
				})
				dir.beats(2) // the first may have been under way
			}
			if late {
				limit(1)
				if got := n.Stats().Quotas; len(got) != 0 {
					t.Errorf("quotas of no memory: %+v", got)
				}
			}
			dir.want(1, 1)
			dir.want(2, 2)
			tcp, shm, theirs := dir.keys(1, "tcp"), dir.keys(1, "shm"), dir.keys(2, "tcp")
			l, local := mustDial(t, dir, "tcp", rw, 0), mustDial(t, dir, "shm", rw, 1)
			other := mustDial(t, dir, "tcp", token.Grant{Session: 9, Namespace: 2}, 0)
			if !late {
				limit(1)
			}
			read := func(l *lane, k *dirpb.RegionKeys) {
				t.Helper()
				if _, err := l.read(k.HeapRkey, k.HeapBase, 8); err != nil {
					t.Fatal(err)
				}
			}
			want := []QuotaStats{{Namespace: 1, Name: "small", TCPOps: 1}, {Namespace: 2, Name: "any"}}
			if got := n.Stats().Quotas; !slices.Equal(got, want) {
				t.Fatalf("quotas %+v, want %+v", got, want)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				for range 1000 {
					if _, err := l.read(tcp.HeapRkey, tcp.HeapBase, 8); err != nil {
						t.Error(err)
						return
					}
				}
			}()
			testutil.Until(t, `n.Stats().Quotas[0].Paced > 0`, func() bool { return n.Stats().Quotas[0].Paced > 0 })
			for range 100 {
				read(local, shm)
				read(other, theirs)
			}
			select {
			case <-done:
				t.Error("1000 READs were done at once")
			default:
			}
			limit(0)
			<-done
			if got := n.Stats().Quotas; len(got) != 2 || got[0].TCPOps != 0 || got[1].Paced != 0 {
				t.Errorf("quotas %+v, want no bound, and that the other namespace never waited", got)
			}
		})
	}
}

func TestReadOnly(t *testing.T) {
	dir := newDirectory(t)
	open(t, dir, 1<<20, "tcp")
	dir.want(1, 1)
	k := dir.keys(1, "tcp")
	ro := token.Grant{Session: 8, Namespace: 1, ReadOnly: true}
	l := mustDial(t, dir, "tcp", ro, 0)
	if _, err := l.read(k.IndexRkey, k.IndexBase, 8); err != nil {
		t.Fatal(err)
	}
	if _, err := l.read(k.HeapRkey, k.HeapBase, 8); err != nil {
		t.Fatal(err)
	}
	refused(t, "WRITE", l.write(k.HeapRkey, k.HeapBase, "x"))
	refused(t, "CAS", mustDial(t, dir, "tcp", ro, 1).cas(k.IndexRkey, k.IndexBase+4096, 0, 1))
}

func TestFence(t *testing.T) {
	for _, provider := range []string{"tcp", "shm"} {
		t.Run(provider, func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := open(t, dir, 1<<20, provider)
			dir.want(1, 1)
			k := dir.keys(1, provider)
			victims := []*lane{mustDial(t, dir, provider, rw, 0), mustDial(t, dir, provider, rw, 1)}
			other := mustDial(t, dir, provider, token.Grant{Session: 8, Namespace: 1}, 0)
			for _, l := range append(victims, other) {
				if err := l.write(k.HeapRkey, k.HeapBase, "before"); err != nil {
					t.Fatal(err)
				}
			}
			dir.change(func() { dir.fence = []uint32{7, 1000} })
			dir.until("both fences confirmed", func() bool {
				return slices.Equal(dir.last.FencedSessions, []uint32{7, 1000})
			})
			dir.beats(2) // it goes on reporting while asked
			dir.until("reported again", func() bool { return slices.Equal(dir.last.FencedSessions, []uint32{7, 1000}) })
			for _, l := range victims {
				if err := l.write(k.HeapRkey, k.HeapBase, "after!"); err == nil {
					t.Fatal("a fenced session's WRITE succeeded")
				}
			}
			if b, err := other.read(k.HeapRkey, k.HeapBase, 6); err != nil || string(b) != "before" {
				t.Fatalf("another session reads %q, %v", b, err)
			}
			dir.change(func() { dir.fence = nil })
			dir.until("the directory is told no more", func() bool { return len(dir.last.FencedSessions) == 0 })
			for _, s := range []uint32{7, 1000} { // barred for good
				_, err := dial(t, dir, provider, private(token.Grant{Session: s, Namespace: 1}, 2))
				if !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), "session has ended") {
					t.Fatalf("session %d dials: %v, want a refusal", s, err)
				}
			}
			if s := n.Stats(); s.Connections != 1 || len(s.Fencing) != 0 {
				t.Fatalf("stats %+v", s)
			}
		})
	}
}

// A session that the directory does not call live any more is barred, and what it has
// open is fenced, though nobody asks for a confirmation; one that is younger than what the
// directory said is not.
// A heartbeat that waits is answered by news, and given up for the node's own.
func TestHeartbeatWaits(t *testing.T) {
	d := newDirectory(t)
	d.holds = true
	n, _ := open(t, d, 1<<20, "tcp")
	d.want(1, 1)
	d.keys(1, "tcp")
	d.want(2, 1)
	d.keys(2, "tcp")
	d.until("another heartbeat instead of one that waits", func() bool {
		if d.cancelled == 0 && d.held > 0 {
			n.kickHeartbeat()
		}
		return d.cancelled > 0 && d.held > 0
	})
	if err := n.Stats().DirectoryErr; err != nil {
		t.Fatalf("giving up a heartbeat counts as trouble: %v", err)
	}
	d.change(func() { d.fence = append(d.fence, 7) })
	d.until("the fence's confirmation", func() bool { return slices.Contains(d.last.GetFencedSessions(), 7) })
}

func TestEndedSession(t *testing.T) {
	for _, provider := range []string{"tcp", "shm", "sim"} {
		t.Run(provider, func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := open(t, dir, 1<<20, provider)
			dir.want(1, 1)
			k := dir.keys(1, provider)
			victim := mustDial(t, dir, provider, rw, 0)
			young := mustDial(t, dir, provider, token.Grant{Session: lastSession + 1, Namespace: 1}, 0)
			dir.change(func() { dir.ended = []uint32{7} })
			testutil.Until(t, `s.Connections == 1 && len(s.Fencing) == 0`, func() bool {
				s := n.Stats()
				return s.Connections == 1 && len(s.Fencing) == 0
			})
			if err := victim.write(k.HeapRkey, k.HeapBase, "x"); err == nil {
				t.Fatal("a WRITE of a session that has ended succeeded")
			}
			if _, err := dial(t, dir, provider, private(rw, 1)); !errors.Is(err, rdma.ErrRefused) ||
				!strings.Contains(err.Error(), "session 7: the session has ended") {
				t.Fatalf("got %v, want a refusal", err)
			}
			if err := young.write(k.HeapRkey, k.HeapBase, "y"); err != nil {
				t.Fatal(err)
			}
			dir.beats(2)
			dir.mu.Lock()
			defer dir.mu.Unlock()
			if len(dir.last.FencedSessions) != 0 {
				t.Fatalf("the directory is told of %d, for which it did not ask", dir.last.FencedSessions)
			}
		})
	}
}

// A memory node that comes up knows which sessions have ended before it admits any.
func TestEndedBeforeRestart(t *testing.T) {
	dir := newDirectory(t)
	dir.ended = []uint32{7}
	n, _ := open(t, dir, 1<<20, "tcp")
	if _, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(rw, 0), Peer: &stubborn{}}); !errors.Is(
		err, ErrEnded) {
		t.Fatalf("got %v, want ErrEnded", err)
	}
}

// Nobody is admitted on the word of a directory that does not say which sessions live.
func TestNoSessions(t *testing.T) {
	dir := newDirectory(t)
	dir.mute = true
	n, err := Open(t.Context(), Options{Name: "m1", CapacityBytes: 1, Directory: dir,
		Devices: []DeviceListen{{Device: openDevice(t, "tcp"), Addr: "127.0.0.1:0"}}})
	if err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, `errors.Is(n.Stats().DirectoryErr, errNoSessions)`, func() bool {
		return errors.Is(n.Stats().DirectoryErr, errNoSessions)
	})
	if n.Stats().Registered {
		t.Error("registered")
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// stubborn is a peer whose fence cannot be confirmed for a while.
type stubborn struct {
	tries chan struct{}
	yield atomic.Bool
}

func (s *stubborn) Remote() string { return "stubborn" }
func (s *stubborn) Fence(ctx context.Context) error {
	select {
	case s.tries <- struct{}{}:
	default:
	}
	if s.yield.Load() {
		return nil
	}
	return errors.New("still inside a verb")
}

func TestFenceUnconfirmed(t *testing.T) {
	dir := newDirectory(t)
	n, log := open(t, dir, 1<<20, "tcp")
	dir.want(1, 1)
	dir.keys(1, "tcp")
	p := &stubborn{tries: make(chan struct{}, 1)}
	if _, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(rw, 0), Remote: "stubborn",
		Peer: p}); err != nil {
		t.Fatal(err)
	}
	dir.change(func() { dir.fence = []uint32{7} })
	for range 3 {
		<-p.tries
	}
	dir.beats(2)
	dir.mu.Lock()
	reported := dir.last.FencedSessions
	dir.mu.Unlock()
	if len(reported) != 0 || !slices.Equal(n.Stats().Fencing, []uint32{7}) {
		t.Fatalf("reported %v, stats %+v", reported, n.Stats())
	}
	if c := log.count("cannot confirm a fence"); c != 1 {
		t.Fatalf("logged %d times, want once", c)
	}
	// Its lane cannot be taken over either, nor the session come back.
	if _, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(rw, 0), Peer: &stubborn{}}); !errors.Is(
		err, ErrEnded) {
		t.Fatalf("got %v, want ErrEnded", err)
	}
	p.yield.Store(true)
	dir.until("confirmation", func() bool { return slices.Equal(dir.last.FencedSessions, []uint32{7}) })
}

// A lane's new connection is accepted when nothing of its old one can land.
func TestLaneReplaced(t *testing.T) {
	for _, provider := range []string{"tcp", "shm"} {
		t.Run(provider, func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := open(t, dir, 1<<20, provider)
			dir.want(1, 1)
			k := dir.keys(1, provider)
			old := mustDial(t, dir, provider, rw, 3)
			fresh := mustDial(t, dir, provider, rw, 3)
			if err := old.write(k.HeapRkey, k.HeapBase, "x"); err == nil {
				t.Fatal("the replaced connection still writes")
			}
			if err := fresh.write(k.HeapRkey, k.HeapBase, "x"); err != nil {
				t.Fatal(err)
			}
			if s := n.Stats(); s.Connections != 1 {
				t.Fatalf("%d connections, want 1", s.Connections)
			}
		})
	}
	t.Run("second connection", func(t *testing.T) {
		dir := newDirectory(t)
		n, _ := open(t, dir, 1<<20, "tcp")
		dir.want(1, 1)
		k := dir.keys(1, "tcp")
		const bulk = 3 | token.BulkLane
		writes := func(what string, lt *lane, want bool) {
			t.Helper()
			if err := lt.write(k.HeapRkey, k.HeapBase, "x"); (err == nil) != want {
				t.Fatalf("%s writes: %v, want that to work: %v", what, err, want)
			}
		}
		first, old := mustDial(t, dir, "tcp", rw, 3), mustDial(t, dir, "tcp", rw, bulk)
		second := mustDial(t, dir, "tcp", rw, bulk)
		writes("a second one that was replaced", old, false)
		writes("the second one", second, true)
		writes("the first one", first, true)
		if s := n.Stats(); s.Connections != 2 {
			t.Fatalf("%d connections, want 2", s.Connections)
		}
		fresh := mustDial(t, dir, "tcp", rw, 3) // nothing of the lane can land any more
		writes("the first one, replaced,", first, false)
		writes("the second one beside it", second, false)
		writes("the new first one", fresh, true)
		if _, err := dial(t, dir, "tcp", private(rw, 1<<16|token.BulkLane)); err == nil {
			t.Fatal("a lane that the session does not have has a second connection")
		}
	})
	t.Run("unconfirmed", func(t *testing.T) {
		dir := newDirectory(t)
		n, _ := open(t, dir, 1<<20, "tcp")
		dir.want(1, 1)
		dir.keys(1, "tcp")
		p := &stubborn{}
		if _, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(rw, 0), Peer: p}); err != nil {
			t.Fatal(err)
		}
		if _, err := dial(t, dir, "tcp", private(rw, 0)); !errors.Is(err, rdma.ErrRefused) {
			t.Fatalf("got %v, want a refusal", err)
		}
		n.gone(p)
		mustDial(t, dir, "tcp", rw, 0)
	})
}

// A directory that has become one of a later version is told of the same process once more; connections and memory
// stay.
func TestRegisterAgain(t *testing.T) {
	dir := newDirectory(t)
	open(t, dir, 1<<20, "tcp", "shm")
	dir.want(1, 1)
	k := dir.keys(1, "tcp")
	lt := mustDial(t, dir, "tcp", rw, 0)
	if err := lt.write(k.HeapRkey, k.HeapBase, "old"); err != nil {
		t.Fatal(err)
	}
	dir.change(func() { dir.again = true })
	dir.until("registration", func() bool { return len(dir.registered) == 2 })
	dir.beats(2)
	dir.change(func() {
		a, b := dir.registered[0], dir.registered[1]
		if a.After = b.After; !proto.Equal(a, b) || b.Boot == 0 || len(dir.registered) != 2 {
			t.Errorf("it registered %d times, as\n%v\n%v", len(dir.registered), a, b)
		}
	})
	if b, err := lt.read(k.HeapRkey, k.HeapBase, 3); err != nil || string(b) != "old" {
		t.Fatalf("read %q, %v", b, err)
	}
}

func TestUnknownNode(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp", "shm")
	dir.want(1, 1)
	k := dir.keys(1, "tcp")
	lt, ls := mustDial(t, dir, "tcp", rw, 0), mustDial(t, dir, "shm", rw, 1)
	if err := lt.write(k.HeapRkey, k.HeapBase, "old"); err != nil {
		t.Fatal(err)
	}
	dir.change(func() { dir.fence = []uint32{9} })
	dir.until("fence", func() bool { return slices.Equal(dir.last.FencedSessions, []uint32{9}) })
	before := n.Stats()

	dir.change(func() { dir.forget, dir.fence = true, nil })
	dir.until("registration", func() bool { return len(dir.registered) == 2 })
	if a, b := dir.registered[0], dir.registered[1]; a.Incarnation == b.Incarnation || b.Incarnation == 0 {
		t.Fatalf("incarnations %d, %d", a.Incarnation, b.Incarnation)
	}
	k2 := dir.keys(1, "tcp")
	if lt.write(k.HeapRkey, k.HeapBase, "x") == nil || ls.write(dir.keys(1, "shm").HeapRkey, 0, "x") == nil {
		t.Fatal("a connection survived the node's incarnation")
	}
	fresh := mustDial(t, dir, "tcp", rw, 0)
	if b, err := fresh.read(k2.HeapRkey, k2.HeapBase, 3); err != nil || b[0] != 0 {
		t.Fatalf("the fresh region holds %q, %v", b, err)
	}
	b, err := fresh.read(k2.IndexRkey, k2.IndexBase, layout.RegionPageSize)
	if err != nil {
		t.Fatal(err)
	}
	s := n.Stats()
	if h, err := layout.ParseRegion(b); err != nil || h.Incarnation != s.Incarnation ||
		s.Incarnation == before.Incarnation {
		t.Fatalf("header %+v, %v; stats %+v", h, err, s)
	}
	if s.RegisteredBytes != regionBytes {
		t.Fatalf("%d bytes registered, want %d", s.RegisteredBytes, regionBytes)
	}
	_, err = fresh.read(k.HeapRkey, k.HeapBase, 8)
	refused(t, "READ with the old incarnation's rkey", err)
	if _, err := dial(t, dir, "tcp", private(token.Grant{Session: 9, Namespace: 1}, 0)); !errors.Is(
		err, rdma.ErrRefused) {
		t.Fatalf("a session fenced before dials: %v", err)
	}

	// Another cluster numbers its sessions anew.
	dir.change(func() { dir.forget, dir.clusterID, dir.ended = true, "c2", nil })
	dir.until("registration", func() bool { return len(dir.registered) == 3 })
	dir.keys(1, "tcp") // without a region it would be refused
	mustDial(t, dir, "tcp", token.Grant{Session: 9, Namespace: 1}, 0)
}

// A node that has said goodbye serves its regions until it is closed, though the directory
// does not know it any more.
func TestLeave(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp")
	dir.want(1, 1)
	k := dir.keys(1, "tcp")
	l := mustDial(t, dir, "tcp", rw, 0)
	if err := n.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if dir.left.GetNodeId() != 1 || dir.left.GetIncarnation() != dir.registered[0].Incarnation {
		t.Errorf("goodbye %v of %v", dir.left, dir.registered[0])
	}
	if err := l.write(k.HeapRkey, k.HeapBase, "late"); err != nil {
		t.Errorf("a WRITE of a session that has not heard yet: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if len(dir.registered) != 1 {
		t.Error("it registered again")
	}
}

// Without a directory a goodbye takes a moment, not for ever, and says so.
func TestLeaveUnheard(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp")
	dir.want(1, 1)
	dir.keys(1, "tcp")
	dir.change(func() { dir.down = true })
	if err := n.Leave(t.Context()); !errors.Is(err, errDown) {
		t.Errorf("goodbye to nobody: %v", err)
	}
}

// Regions outlive the wait for a peer that cannot be fenced, and so does the
// old life: the node does not register before.
func TestUnknownNodeWaitsForFence(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp")
	dir.want(1, 1)
	dir.keys(1, "tcp")
	p := &stubborn{tries: make(chan struct{}, 1)}
	if _, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(rw, 0), Peer: p}); err != nil {
		t.Fatal(err)
	}
	dir.change(func() { dir.forget = true })
	for range 3 {
		<-p.tries
	}
	if _, err := dial(t, dir, "tcp", private(rw, 1)); !errors.Is(err, rdma.ErrRefused) ||
		!strings.Contains(err.Error(), "not registered") {
		t.Fatalf("got %v, want a refusal", err)
	}
	if s := n.Stats(); s.Registered || s.RegisteredBytes != regionBytes || len(dir.registered) != 1 {
		t.Fatalf("stats %+v", s)
	}
	p.yield.Store(true)
	dir.until("registration", func() bool { return len(dir.registered) == 2 })
}

func TestDirectoryLost(t *testing.T) {
	dir := newDirectory(t)
	n, log := open(t, dir, 1<<20, "tcp")
	dir.want(1, 1)
	k := dir.keys(1, "tcp")
	l := mustDial(t, dir, "tcp", rw, 0)
	dir.change(func() { dir.down = true })
	testutil.Until(t, `n.Stats().DirectoryErr != nil`, func() bool { return n.Stats().DirectoryErr != nil })
	if err := l.write(k.HeapRkey, k.HeapBase, "served"); err != nil {
		t.Fatal(err)
	}
	if b, err := mustDial(t, dir, "tcp", rw, 1).read(k.HeapRkey, k.HeapBase, 6); err != nil || string(b) != "served" {
		t.Fatalf("reads %q, %v", b, err)
	}
	dir.change(func() { dir.down = false })
	dir.beats(2)
	if err := n.Stats().DirectoryErr; err != nil {
		t.Fatal(err)
	}
	if log.count("directory does not answer") != 1 || log.count("directory answers again") != 1 ||
		len(dir.registered) != 1 {
		t.Fatal("losing and finding the directory was not logged once each, or the node registered again")
	}
}

func TestPublishAgain(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, 1<<20, "tcp")
	dir.change(func() { dir.publishErr = errors.New("no") })
	dir.want(1, 1)
	testutil.Until(t, `len(s.Regions) == 1 && s.Regions[0].Err != nil`, func() bool {
		s := n.Stats()
		return len(s.Regions) == 1 && s.Regions[0].Err != nil
	})
	dir.change(func() { dir.publishErr = nil })
	k := dir.keys(1, "tcp")
	testutil.Until(t, `s.Regions[0].Published && s.Regions[0].Err == nil`, func() bool {
		s := n.Stats()
		return s.Regions[0].Published && s.Regions[0].Err == nil
	})
	// A directory that lost the publication is told again, of the same region.
	dir.change(func() { clear(dir.published) })
	if again := dir.keys(1, "tcp"); again.HeapRkey != k.HeapRkey {
		t.Fatal("the region was made twice")
	}
	dir.beats(3)
	dir.mu.Lock()
	count := dir.publications
	dir.mu.Unlock()
	dir.beats(5)
	dir.mu.Lock()
	defer dir.mu.Unlock()
	if dir.publications != count {
		t.Fatal("a published region is published on and on")
	}
}

// A region that the directory wants since another time is another region, however alike: the
// keys of the earlier one are not published for it.
func TestRegionWantedAnew(t *testing.T) {
	dir := newDirectory(t)
	n, _ := open(t, dir, regionBytes, "tcp") // there is no room for both at once
	dir.wantSince(1, 1, 5)
	k := dir.keysSince(1, 5)
	l := mustDial(t, dir, "tcp", rw, 0)
	if err := l.write(k.HeapRkey, k.HeapBase, "old"); err != nil {
		t.Fatal(err)
	}
	dir.change(func() { dir.regions[0].Since = 6 })
	k2 := dir.keysSince(1, 6)
	if k2.IndexRkey == k.IndexRkey || k2.HeapRkey == k.HeapRkey {
		t.Fatalf("published again: %v, before %v", k2, k)
	}
	if b, err := l.read(k2.HeapRkey, k2.HeapBase, 3); err != nil || string(b) != "\x00\x00\x00" {
		t.Fatalf("the region made anew holds %q, %v", b, err)
	}
	_, err := l.read(k.HeapRkey, k.HeapBase, 3)
	refused(t, "READ with the earlier region's key", err)

	// Dropped and wanted again: the directory takes the earlier keys for good until it is told.
	dir.change(func() { dir.regions = nil })
	testutil.Until(t, `len(n.Stats().Regions) == 0`, func() bool { return len(n.Stats().Regions) == 0 })
	dir.change(func() { dir.publishErr = errors.New("no") })
	dir.wantSince(1, 1, 6)
	testutil.Until(t, `len(s.Regions) == 1 && s.Regions[0].Err != nil`, func() bool {
		s := n.Stats()
		return len(s.Regions) == 1 && s.Regions[0].Err != nil
	})
	dir.change(func() { dir.publishErr = nil })
	testutil.Until(t, `len(s.Regions) == 1 && s.Regions[0].Published`, func() bool {
		s := n.Stats()
		return len(s.Regions) == 1 && s.Regions[0].Published
	})
	k3 := dir.keysSince(1, 6)
	if b, err := mustDial(t, dir, "tcp", rw, 0).read(k3.HeapRkey, k3.HeapBase, 3); err != nil ||
		string(b) != "\x00\x00\x00" {
		t.Fatalf("the region made last holds %q, %v", b, err)
	}
}

// keysSince waits for the publication of a region at tcp that was wanted since then.
func (d *directory) keysSince(pg uint32, since uint64) (k *dirpb.RegionKeys) {
	d.t.Helper()
	d.until("publication of the region wanted anew", func() bool {
		p := d.published[pg]
		if p == nil || p.Since != since {
			return false
		}
		k = p.Keys[0]
		return true
	})
	return k
}

// Over TLS a peer shows whose it is, besides a token.
func TestRoles(t *testing.T) {
	dir := newDirectory(t)
	n, _ := openWith(t, dir, 1<<20, func(o *Options) {
		o.Identities = identity.Mapping{TrustDomain: identitytest.TrustDomain}
	}, "tcp")
	dir.want(1, 1)
	dir.keys(1, "tcp")
	a := identitytest.New(t)
	chain := func(c tls.Certificate) *tls.ConnectionState {
		return &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{c.Leaf}}}
	}
	for i, r := range identity.Every.All() {
		p := &stubborn{}
		g := rw
		g.Identity = "spiffe://" + identitytest.TrustDomain + "/kvd/" + r.String() + "/it"
		_, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(g, uint32(i)), Peer: p,
			TLS: chain(a.Role(r.String(), "it"))})
		defer n.gone(p)
		var denied *identity.DeniedError
		if refused := errors.As(err, &denied); refused != (r == identity.Directory) || err != nil && !refused {
			t.Errorf("%v: %v", r, err)
		}
	}
	for name, s := range map[string]*tls.ConnectionState{
		"no identity":          chain(a.Leaf()),
		"another trust domain": chain(a.Leaf(identitytest.SPIFFE("spiffe://other/kvd/client/it"))),
		"not verified":         {PeerCertificates: []*x509.Certificate{a.Role("client", "it").Leaf}},
	} {
		_, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(rw, 99), Peer: &stubborn{}, TLS: s})
		if !errors.Is(err, identity.ErrUnidentified) && !errors.Is(err, identity.ErrNoCertificate) {
			t.Errorf("%s: %v, want a refusal", name, err)
		}
	}
}

// A directory that refuses is not called silent.
func TestRegistrationRefused(t *testing.T) {
	dir := newDirectory(t)
	dir.refuse = status.Error(codes.PermissionDenied, "m1 belongs to another")
	log := &logged{}
	n, err := Open(t.Context(), Options{Name: "m1", CapacityBytes: 1, Directory: dir,
		Logger:  slog.New(slog.NewTextHandler(log, nil)),
		Devices: []DeviceListen{{Device: openDevice(t, "tcp"), Addr: "127.0.0.1:0"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	const text = "level=ERROR msg=\"the directory refuses this memory node"
	testutil.Until(t, `log.count(text) > 0 && n.Stats().DirectoryErr != nil`, func() bool {
		return log.count(text) > 0 && n.Stats().DirectoryErr != nil
	})
	dir.change(func() { dir.refuse = nil })
	if err := n.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	if log.count(text) != 1 || log.count("does not answer") != 0 {
		t.Errorf("the refusal was logged %d times, and silence %d times", log.count(text), log.count("does not answer"))
	}
}

func TestNotReady(t *testing.T) {
	dir := newDirectory(t)
	dir.down = true
	n, err := Open(t.Context(), Options{Name: "m1", CapacityBytes: 1, Directory: dir,
		Devices: []DeviceListen{{Device: openDevice(t, "tcp"), Addr: "127.0.0.1:0"}}})
	if err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, `n.Stats().DirectoryErr != nil`, func() bool { return n.Stats().DirectoryErr != nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Ready(ctx); !errors.Is(err, errDown) || !errors.Is(err, context.Canceled) {
		t.Errorf("Ready: %v, want the reason", err)
	}
	if _, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(rw, 0), Peer: &stubborn{}}); !errors.Is(
		err, ErrNotRegistered) {
		t.Errorf("accept: %v, want ErrNotRegistered", err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if err := n.Ready(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Ready: %v, want ErrClosed", err)
	}
}

func TestOptions(t *testing.T) {
	dir := newDirectory(t)
	tcp, shm := openDevice(t, "tcp"), openDevice(t, "shm")
	simulated := rdma.NewDevice("sim", sim.New(sim.Options{}).Device("m"))
	another := rdma.NewDevice("another", sim.New(sim.Options{}).Device("m"))
	none := rdma.NewDevice("none", atomicless{simulated.Driver()})
	good := Options{Name: "m", CapacityBytes: 1, Directory: dir, Devices: []DeviceListen{
		{Device: tcp, Addr: "127.0.0.1:0"}}}
	for want, change := range map[string]func(*Options){
		"Name":                  func(o *Options) { o.Name = "" },
		"CapacityBytes is 0":    func(o *Options) { o.CapacityBytes = 0 },
		"HugePageBytes is 4096": func(o *Options) { o.HugePageBytes = 4096 },
		"Domain \"a\\x1b\"":     func(o *Options) { o.Domain = "a\x1b" },
		"Directory is missing":  func(o *Options) { o.Directory = nil },
		"Devices is empty":      func(o *Options) { o.Devices = nil },
		"Device is missing":     func(o *Options) { o.Devices = []DeviceListen{{}} },
		"a second shm device":   func(o *Options) { o.Devices = []DeviceListen{{Device: shm}, {Device: shm}} },
		"none has no atomics":   func(o *Options) { o.Devices = []DeviceListen{{Device: none}} },
		"leave shm out, or have sim leave atomics to its agent": func(o *Options) {
			o.Devices = []DeviceListen{{Device: shm}, {Device: tcp}, {Device: simulated}}
		},
		"sim and another each have an adapter": func(o *Options) {
			o.Devices = []DeviceListen{{Device: tcp}, {Device: simulated}, {Device: another}}
		},
		"those of one are not atomic with the other's": func(o *Options) {
			o.Devices = []DeviceListen{{Device: ofPort(simulated, "a/1")}, {Device: ofPort(another, "b/1")}}
		},
		"FenceTimeout": func(o *Options) { o.FenceTimeout = -1 },
		"cannot dial":  func(o *Options) { o.Devices = []DeviceListen{{Device: tcp, Addr: "0.0.0.0:0"}} },
		"listen": func(o *Options) {
			o.Devices = append(slices.Clone(o.Devices), DeviceListen{Device: shm, Addr: "/nonexistent/dir/socket"})
		},
	} {
		o := good
		change(&o)
		n, err := Open(t.Context(), o)
		if err == nil {
			n.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want it to say %q", err, want)
		}
	}
}

// Ports of one adapter share their atomics.
func TestPortsOfAdapter(t *testing.T) {
	f := sim.New(sim.Options{})
	o := Options{Name: "m", CapacityBytes: 1, Directory: newDirectory(t), FenceTimeout: time.Second,
		Devices: []DeviceListen{{Device: ofPort(rdma.NewDevice("verbs", f.Device("a")), "a/1")},
			{Device: ofPort(rdma.NewDevice("verbs", f.Device("b")), "a/2")}}}
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
}

// portDevice is a device of an adapter's port.
type portDevice struct {
	driver.Device
	port string
}

func (d portDevice) Caps() driver.Caps {
	c := d.Device.Caps()
	c.Port = d.port
	return c
}

func ofPort(d *rdma.Device, port string) *rdma.Device {
	return rdma.NewDevice(d.Name(), portDevice{d.Driver(), port})
}

// atomicless is a device without atomics.
type atomicless struct{ driver.Device }

func (atomicless) Caps() driver.Caps { return driver.Caps{AtomicScope: driver.AtomicNone} }
