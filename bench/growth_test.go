package bench

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// patience bounds what takes seconds on a machine that is not busy.
const patience = 5 * time.Minute

// world is a store in this process, janitor included, with one namespace.
type world struct {
	*devstore.Store
	dir      *dirclient.Client
	provider string
}

func startWorld(tb testing.TB, provider string, nodes int, lease time.Duration) *world {
	tb.Helper()
	s, err := devstore.Start(tb.Context(), devstore.Options{
		Nodes: nodes, Providers: []string{provider}, CapacityBytes: 1 << 30, Lease: lease,
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	w := &world{Store: s, provider: provider}
	if w.dir, err = dirclient.Open(dirclient.Options{Addrs: s.Directory()}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { w.dir.Close() })
	return w
}

// ask asks the directory for something.
func (w *world) ask(tb testing.TB, f func(context.Context, dirpb.DirectoryClient) error) {
	tb.Helper()
	if err := w.dir.Call(tb.Context(), f); err != nil {
		tb.Fatal(err)
	}
}

// namespace makes the one there is, whatever else q asks for.
func (w *world) namespace(tb testing.TB, q *dirpb.CreateNamespaceRequest) {
	tb.Helper()
	q.Name, q.Replicas = worldNamespace, replicas
	w.ask(tb, func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, q)
		return err
	})
}

func (w *world) drain(tb testing.TB, node string) {
	tb.Helper()
	w.ask(tb, func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: node})
		return err
	})
}

// open opens a client.
func (w *world) open(tb testing.TB) *client.Client {
	tb.Helper()
	c, err := client.Open(tb.Context(), client.Options{
		Directory: w.Directory(), Namespace: worldNamespace, Provider: w.provider, Devices: w.Devices(),
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
	})
	return c
}

// until looks at the directory every few milliseconds until done says so.
func (w *world) until(tb testing.TB, what string, done func(*dirpb.StatusReply) bool) {
	tb.Helper()
	limit := time.Now().Add(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		st, err := w.Status(tb.Context())
		if err != nil {
			tb.Fatal(err)
		}
		if done(st) {
			return
		}
		if time.Now().After(limit) {
			tb.Fatalf("not %s within %v: %d shards, jobs %v", what, patience, len(st.GetMap().GetShards()),
				st.GetJobs())
		}
		<-tick.C
	}
}

// still: no data moves.
func still(st *dirpb.StatusReply) bool { return len(st.GetJobs()) == 0 }

// idle waits until no data moves and returns the map's version.
func (w *world) idle(tb testing.TB) (version uint64) {
	tb.Helper()
	w.until(tb, "idle", func(st *dirpb.StatusReply) bool {
		version = st.GetMap().GetVersion()
		return still(st)
	})
	return version
}

// whole: every placement group has its copies, none of them on any of some memory
// nodes, and nothing is being changed.
func whole(st *dirpb.StatusReply, without ...string) bool {
	gone := make(map[uint32]bool)
	for _, n := range st.GetMap().GetNodes() {
		gone[n.GetId()] = slices.Contains(without, n.GetName())
	}
	for _, pg := range st.GetMap().GetPgs() {
		if pg.GetState() != dirpb.PGState_PG_ACTIVE || pg.GetJoining() || pg.GetPlanned() != nil ||
			pg.GetLeaving() != nil ||
			len(pg.GetMembers()) != replicas || slices.ContainsFunc(pg.GetMembers(), func(m *dirpb.Member) bool {
			return gone[m.GetNodeId()]
		}) {
			return false
		}
	}
	return still(st)
}

// headOf names the memory node that is first in a placement group's chain.
func headOf(st *dirpb.StatusReply, pg uint32) string {
	for _, p := range st.GetMap().GetPgs() {
		for _, n := range st.GetMap().GetNodes() {
			if p.GetId() == pg && len(p.GetMembers()) > 0 && p.GetMembers()[0].GetNodeId() == n.GetId() {
				return n.GetName()
			}
		}
	}
	return ""
}

const (
	worldNamespace = "world"
	replicas       = 2
)

// shardSlots is how many keys a shard of one segment holds at most: as many times
// that take as many shards.
const shardSlots = (layout.SegmentGroups + 1) * layout.GroupSlots

// segments are how many all shards have.
func segments(st *dirpb.StatusReply) (n int) {
	for _, sh := range st.GetMap().GetShards() {
		n += int(sh.GetSegments())
	}
	return n
}

// TestMovesUnderLoad grows a namespace from one segment to sixteen or more, by a larger array and by splits, and drains
// the memory node that decides its writes, with readers and writers at work: no operation fails and nothing is lost.
func TestMovesUnderLoad(t *testing.T) {
	for _, provider := range []string{"shm", "tcp"} {
		t.Run(provider, func(t *testing.T) {
			w := startWorld(t, provider, 3, lease)
			w.namespace(t, &dirpb.CreateNamespaceRequest{BytesPerNode: 16 << 20, Shards: 1, Segments: 1,
				IndexPercent: 1})
			tr := &traffic{led: newLedger(200, 16*shardSlots), workers: 4, loaders: 2, rate: 800, inserts: 4000,
				clients: []*client.Client{w.open(t), w.open(t)}}
			tr.led.load(t, tr.clients[0])

			grow := tr.start(t, func(f *flow) { f.growing = true })
			var head string // of the placement group that holds it all
			w.until(t, "16 segments in two shards", func(st *dirpb.StatusReply) bool {
				shards := st.GetMap().GetShards()
				head = headOf(st, shards[0].GetPgId())
				return segments(st) >= 16 && len(shards) >= 2
			})
			grow.stop().check(t)
			tr.led.verify(t, w)

			move := tr.start(t, nil)
			w.drain(t, head)
			w.until(t, "drained", func(st *dirpb.StatusReply) bool { return whole(st, head) })
			move.stop().check(t)
			tr.led.verify(t, w)
			t.Logf("%d operations and %d records while growing, %d operations while draining",
				grow.all.due.TotalCount(),
				tr.led.keys.End(), move.all.due.TotalCount())
		})
	}
}

// quietTime is how long latencies are taken while nothing moves.
func quietTime() time.Duration { return scaled(10*time.Second, 200*time.Millisecond) }

// quiet is traffic while nothing else happens, for a while.
func (tr *traffic) quiet(t *testing.T) *flow {
	t.Helper()
	f := tr.start(t, nil)
	time.Sleep(quietTime()) // what is measured, not waited for
	f.stop().check(t)
	return f
}

// pace sets the rates to a share of what the store takes, so that a pause shows as
// a pause and not as a queue that never ends.
func (tr *traffic) pace(t *testing.T) (saturated float64) {
	t.Helper()
	loaders := tr.loaders
	tr.loaders, tr.rate = 0, 0
	f := tr.start(t, nil)
	time.Sleep(quietTime() / 4)
	f.stop().check(t)
	saturated = f.throughput()
	tr.loaders, tr.rate = loaders, min(0.3*saturated, maxRate)
	tr.inserts = tr.rate / 8
	return saturated
}

// maxRate, operations a second, is what sleeping goroutines can keep up with.
const maxRate = 20_000

// printed is a table of latencies against those of a quiet time.
type printed struct {
	*tabwriter.Writer
	quiet *latencies
}

func newPrinted() *printed {
	return &printed{Writer: tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)}
}

func (p *printed) head() {
	fmt.Fprintln(p, "\t\tfrom when it was due\t\t\t\t\tfrom when it began\t\t\t\t")
	fmt.Fprintln(p, "\toperations\tp50\tp99\tp99.9\tmax\tp99/quiet\tp50\tp99\tp99.9\tp99/quiet\t")
}

func (p *printed) row(what string, l *latencies) {
	us := func(v int64) string { return fmt.Sprintf("%.0f µs", float64(v)/1e3) }
	p99 := func(l *latencies) (due, begun int64) { return l.due.ValueAtQuantile(99), l.begun.ValueAtQuantile(99) }
	due, begun := p99(l)
	if l.due.TotalCount() == 0 {
		fmt.Fprintf(p, "%s\t0\t\n", what)
		return
	}
	p.quiet = cmp.Or(p.quiet, l)
	qdue, qbegun := p99(p.quiet)
	fmt.Fprintf(p, "%s\t%d\t%s\t%s\t%s\t%s\t%.2f\t%s\t%s\t%s\t%.2f\t\n", what, l.due.TotalCount(),
		us(l.due.ValueAtQuantile(50)), us(due), us(l.due.ValueAtQuantile(99.9)), us(l.due.Max()),
		float64(due)/float64(qdue),
		us(l.begun.ValueAtQuantile(50)), us(begun), us(l.begun.ValueAtQuantile(99.9)), float64(begun)/float64(qbegun))
}

// both is the latencies of two flows together.
func both(a, b *flow) *latencies {
	l := newLatencies()
	l.merge(a.all)
	l.merge(b.all)
	return l
}

// TestGrowth prints what growth from one shard to a hundred times its capacity costs
// those who use the store meanwhile. It fails if an operation does, if a write
// is lost, or if the namespace does not grow.
func TestGrowth(t *testing.T) {
	gated(t, "bench-growth")
	const first = shardSlots
	least := scaled(64, 2) // segments in the end
	keys := scaled(100, 3) * first
	for _, provider := range []string{"shm", "tcp"} {
		t.Run(provider, func(t *testing.T) {
			began := time.Now()
			w := startWorld(t, provider, 2, lease)
			// so that the index is small, and shards split
			w.namespace(t, &dirpb.CreateNamespaceRequest{BytesPerNode: 64 << 20,
				Shards: 1, Segments: 1, IndexPercent: 1})
			tr := &traffic{led: newLedger(first/2, keys), workers: 16, loaders: 8,
				clients: []*client.Client{w.open(t), w.open(t)}}
			tr.led.load(t, tr.clients[0])
			saturated := tr.pace(t)
			before := tr.quiet(t)

			var moving, last time.Time
			var busy time.Duration // while data moved
			var grew time.Duration // until there were enough
			from, n, shards := uint64(first/2), 1, 1
			grow := tr.start(t, func(f *flow) { f.growing = true })
			watch := func(st *dirpb.StatusReply) {
				now := time.Now()
				if grow.moving.Load() {
					busy += now.Sub(last)
				}
				last = now
				grow.moving.Store(!still(st))
				if moving.IsZero() && !still(st) {
					moving = now
				}
				n, shards = segments(st), len(st.GetMap().GetShards())
			}
			w.until(t, fmt.Sprintf("%d segments and %d keys", least, keys), func(st *dirpb.StatusReply) bool {
				watch(st)
				return n >= least && tr.led.keys.End() >= uint64(keys)
			})
			grew = time.Since(moving)
			grow.stop().check(t)
			w.idle(t)
			after := tr.quiet(t)
			tr.led.verify(t, w)

			p := newPrinted()
			defer p.Flush()
			fmt.Fprintf(p, "\n%s, %d copies; %s\n", provider, replicas, machine(began))
			fmt.Fprintf(p, "%.0f + %.0f operations/s of %.0f/s saturated, YCSB-A and a loader, each counted from "+
				"when it was due\n",
				tr.rate, tr.inserts, saturated)
			fmt.Fprintf(p, "%d to %d keys (%.0f × a segment's %d slots), 1 to %d segments in %d shards in %.1f s, "+
				"data moved %.0f %% of the time\n\n",
				from, tr.led.keys.End(), float64(tr.led.keys.End())/first, first, n, shards, grew.Seconds(),
				100*busy.Seconds()/grow.took.Seconds())
			p.quiet = both(before, after)
			p.head()
			p.row("quiet, before", before.all)
			p.row("quiet, after", after.all)
			p.row("growing, while data moves", grow.during)
			p.row("growing, between moves", grow.still)
			p.quiet = grow.still // which saw the same machine
			p.row("the same against between", grow.during)
			p.quiet = before.loading
			p.row("the loader's updates, quiet", before.loading)
			p.row("its inserts, growing", grow.loading)
			fmt.Fprintf(p, "\nlongest that a record was not writable: quiet %v, growing %v; failed operations: 0 if "+
				"this test passes\n",
				max(before.waited, after.waited).Round(time.Microsecond), grow.waited.Round(time.Microsecond))
		})
	}
}

// TestDisturbance prints what a drain and the loss of a memory node cost. It fails if
// an operation does during a drain, if one fails without saying whether it happened
// after a loss, or if a write is lost.
func TestDisturbance(t *testing.T) {
	gated(t, "bench-growth")
	const lease = 2 * time.Second // bounds how long a loss takes to be noticed
	keys := scaled(50_000, 2_000)
	for _, provider := range []string{"shm", "tcp"} {
		t.Run(provider, func(t *testing.T) {
			began := time.Now()
			w := startWorld(t, provider, 3, lease)
			w.namespace(t, &dirpb.CreateNamespaceRequest{BytesPerNode: 256 << 20})
			if err := w.AddNode(t.Context(), "m4"); err != nil { // the spare: it came later
				t.Fatal(err)
			}
			tr := &traffic{led: newLedger(keys, keys), workers: 16, clients: []*client.Client{w.open(t), w.open(t)}}
			tr.led.load(t, tr.clients[0])
			saturated := tr.pace(t)
			before := tr.quiet(t)

			drain := tr.start(t, nil)
			w.drain(t, "m1")
			w.until(t, "drained", func(st *dirpb.StatusReply) bool { return whole(st, "m1") })
			drain.stop().check(t)
			between := tr.quiet(t)

			kill := tr.start(t, func(f *flow) { f.faulty = true })
			if err := w.KillNode(1); err != nil {
				t.Fatal(err)
			}
			w.until(t, "whole again", func(st *dirpb.StatusReply) bool { return whole(st, "m1", "m2") })
			kill.stop().check(t)
			after := tr.quiet(t)
			tr.led.verify(t, w)

			p := newPrinted()
			defer p.Flush()
			fmt.Fprintf(p, "\n%s, %d copies, lease %v; %s\n", provider, replicas, lease, machine(began))
			fmt.Fprintf(p, "%d keys, %.0f operations/s of %.0f/s saturated, YCSB-A, each counted from when it was "+
				"due\n\n", keys, tr.rate, saturated)
			p.quiet = both(before, between)
			p.head()
			phases := []struct {
				what string
				f    *flow
			}{{"quiet", before}, {"a memory node drains", drain}, {"quiet again", between},
				{"a memory node is killed", kill}, {"quiet at last", after}}
			for _, x := range phases {
				p.row(x.what, x.f.all)
			}
			fmt.Fprintln(p, "\n\ttook\tlongest not writable\terrors\t")
			for _, x := range phases {
				errs := fmt.Sprint(x.f.errs)
				if len(x.f.errs) == 0 {
					errs = "none"
				}
				fmt.Fprintf(p, "%s\t%.2f s\t%v\t%s\t\n", x.what, x.f.took.Seconds(), x.f.waited.Round(time.Microsecond),
					strings.TrimPrefix(errs, "map"))
			}
		})
	}
}
