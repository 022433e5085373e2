package bench

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
)

// fakeSession renews its lease and acknowledges maps as a session does, on connections that may break, and does nothing
// else.
type fakeSession struct {
	id    uint32
	c     dirpb.DirectoryClient
	every time.Duration
	wake  chan struct{}
	stop  context.CancelFunc
	again *atomic.Int64 // calls that were repeated

	version atomic.Uint64 // of the map that it saw last
	acked   atomic.Uint64 // of the map that the directory knows it saw

	mu struct {
		sync.Mutex
		renewals []renewal
		err      error // that ended it
	}
}

type renewal struct {
	sent time.Time
	took time.Duration
}

// watch follows the map until ctx ends.
func (f *fakeSession) watch(ctx context.Context) error {
	return insist(ctx, f.again, func() error {
		stream, err := f.c.WatchMap(ctx, &dirpb.WatchMapRequest{SessionId: f.id, AfterVersion: f.version.Load()})
		for err == nil {
			var m *dirpb.Map
			if m, err = stream.Recv(); err == nil {
				f.version.Store(m.Version)
				select {
				case f.wake <- struct{}{}:
				default:
				}
			}
		}
		return err
	})
}

// insist calls f until it says something else than that the directory cannot be reached.
func insist(ctx context.Context, again *atomic.Int64, f func() error) (err error) {
	for err = f(); status.Code(err) == codes.Unavailable && ctx.Err() == nil; err = f() {
		again.Add(1)
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return err
}

// renew renews the lease until ctx ends, three times in a lease, and when there is another map, or the directory calls.
func (f *fakeSession) renew(ctx context.Context, epoch, term uint64) error {
	t := time.NewTimer(rand.N(f.every)) // sessions began at any time
	defer t.Stop()
	for number := uint64(0); ; {
		select {
		case <-t.C:
		case <-f.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
		v, sent := f.version.Load(), time.Now()
		var r *dirpb.RenewReply
		err := insist(ctx, f.again, func() (err error) {
			number++
			r, err = f.c.Renew(ctx, &dirpb.RenewRequest{SessionId: f.id, ReportEpoch: epoch, AckedMapVersion: v,
				QuiescedMapVersion: v, Number: number, Term: term})
			return err
		})
		if err != nil {
			return err
		}
		f.mu.Lock()
		f.mu.renewals = append(f.mu.renewals, renewal{sent, time.Since(sent)})
		f.mu.Unlock()
		f.acked.Store(v)
		epoch, term = r.Epoch, r.Term
		t.Reset(cmp.Or(time.Duration(r.QuietMillis)*time.Millisecond, f.every))
	}
}

// since are how long the renewals took that were sent after at, sorted.
func since(all []*fakeSession, at time.Time) (out []time.Duration) {
	for _, f := range all {
		f.mu.Lock()
		for _, r := range f.mu.renewals {
			if r.sent.After(at) {
				out = append(out, r.took)
			}
		}
		f.mu.Unlock()
	}
	slices.Sort(out)
	return out
}

// crest is how many renewals were sent after at in the busiest 50 ms.
func crest(all []*fakeSession, at time.Time) (most int) {
	sent := make(map[time.Duration]int)
	for _, f := range all {
		f.mu.Lock()
		for _, r := range f.mu.renewals {
			if r.sent.After(at) {
				k := r.sent.Sub(at) / (50 * time.Millisecond)
				sent[k]++
				most = max(most, sent[k])
			}
		}
		f.mu.Unlock()
	}
	return most
}

func part(sorted []time.Duration, p float64) time.Duration {
	return sorted[min(len(sorted)-1, int(p*float64(len(sorted))))]
}

// TestDirectoryScale renews the leases of as many sessions as a large installation has, over half as many
// connections, and looks at how long renewals take, what the directory needs for them, how soon the
// death of one session is known, and whether maps that follow one another fast cost anybody its lease.
func TestDirectoryScale(t *testing.T) {
	gated(t, "bench-directory")
	n, changes, term := scaled(10_000, 200), scaled(1000, 20), scaled(5*time.Second, 2*time.Second)
	const share = 2 // sessions of one connection: a client has few
	// The sessions stand for thousands of processes, which are not all held up when this one collects its garbage.
	defer debug.SetGCPercent(debug.SetGCPercent(500))
	s := &store{}
	// as kvd directory has it
	s.process, s.directory = startRole(t, "store", envNodes+"=1", envCapacity+"="+strconv.Itoa(1<<30), envLease+"="+
		term.String(), "GOMAXPROCS=2", "GOGC=400")
	s.namespace(t, &dirpb.CreateNamespaceRequest{Name: "scale", Replicas: 1, BytesPerNode: 64 << 20})

	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	all := make([]*fakeSession, n)
	dial := func() dirpb.DirectoryClient {
		conn, err := grpc.NewClient(s.directory, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithConnectParams(
				grpc.ConnectParams{
					Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 2,
						MaxDelay: term / 5},
					MinConnectTimeout: term}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return dirpb.NewDirectoryClient(conn)
	}
	var again atomic.Int64
	operator := dial()
	ask := func(f func() error) {
		t.Helper()
		if err := insist(ctx, &again, f); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	var opening sync.WaitGroup
	for first := 0; first < n; first += share {
		c := dial()
		opening.Go(func() {
			for i := first; i < min(first+share, n); i++ {
				// The first are those that may write, of which there are not as many.
				var r *dirpb.OpenSessionReply
				err := insist(ctx, &again, func() (err error) {
					r, err = c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "scale", Client: "fake",
						ReadOnly: i >= fsm.MaxWriters-100})
					return err
				})
				if err != nil {
					t.Errorf("session %d: %v", i, err)
					return
				}
				f := &fakeSession{id: r.SessionId, c: c, every: term / 3, wake: make(chan struct{}, 1), again: &again}
				var own context.Context
				own, f.stop = context.WithCancel(ctx)
				run := func(what string, part func() error) {
					wg.Go(func() {
						if err := part(); own.Err() == nil {
							f.mu.Lock()
							f.mu.err = cmp.Or(f.mu.err, fmt.Errorf("session %d: %s: %w", f.id, what, err))
							f.mu.Unlock()
						}
					})
				}
				run("watch", func() error { return f.watch(own) })
				run("renew", func() error { return f.renew(own, r.Epoch, r.Term) })
				all[i] = f
			}
		})
	}
	if opening.Wait(); t.Failed() {
		return
	}
	fmt.Printf("%d sessions on %d connections, lease %v, opened in %v; %d calls were repeated\n", n, (n+share-1)/share,
		term,
		time.Since(began).Round(time.Millisecond), again.Swap(0))
	healthy := func(without *fakeSession) {
		t.Helper()
		for _, f := range all {
			f.mu.Lock()
			if err := f.mu.err; err != nil && f != without {
				t.Error(err)
			}
			f.mu.Unlock()
		}
		if t.Failed() {
			t.Fatalf("%d calls were repeated", again.Load())
		}
	}
	pause := func(d time.Duration) {
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
	}
	show := func(what string, at time.Time, used time.Duration) {
		took := time.Since(at)
		list := since(all, at)
		if len(list) == 0 {
			t.Fatalf("%s: no renewals", what)
		}
		fmt.Printf("%s: %.0f renewals a second, at most %d in 50 ms, p50 %v, p99 %v, longest %v; the store used %.2f "+
			"cores\n", what, float64(len(list))/took.Seconds(), crest(all, at),
			part(list, 0.5).Round(10*time.Microsecond), part(list, 0.99).Round(10*time.Microsecond),
			list[len(list)-1].Round(10*time.Microsecond), used.Seconds()/took.Seconds())
	}

	pause(2 * term)
	at, before := time.Now(), cpu(t, s.pid)
	pause(scaled(3*term, term))
	show("at rest", at, cpu(t, s.pid)-before)
	healthy(nil)

	victim := all[n/2]
	victim.stop()
	died := time.Now()
	for life := dirpb.SessionLife_SESSION_LIVE; life != dirpb.SessionLife_SESSION_FENCED; pause(10 * time.Millisecond) {
		ask(func() error {
			r, err := operator.SessionState(ctx, &dirpb.SessionStateRequest{SessionId: victim.id})
			life = r.GetLife()
			return err
		})
	}
	dead := time.Since(died)
	fmt.Printf("a session that dies is fenced after %v, %.2f leases\n", dead.Round(time.Millisecond),
		dead.Seconds()/term.Seconds())
	healthy(victim)

	at, before = time.Now(), cpu(t, s.pid)
	const callers = 16
	var changing sync.WaitGroup
	for k := range callers {
		changing.Go(func() {
			for i := k; i < changes; i += callers {
				if err := insist(ctx, &again, func() error {
					_, err := operator.RegisterNode(ctx, &dirpb.RegisterNodeRequest{Name: fmt.Sprint("flapping", k),
						Incarnation: uint64(k + 1), Boot: uint64(i + 1), HostId: "h",
						Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}})
					return err
				}); err != nil {
					t.Errorf("map change %d: %v", i, err)
					return
				}
			}
		})
	}
	changing.Wait()
	if t.Failed() {
		return
	}
	changed := time.Since(at)
	var last uint64
	ask(func() error {
		r, err := operator.Status(ctx, &dirpb.StatusRequest{})
		last = r.GetMap().GetVersion()
		return err
	})
	for lag := slices.Clone(all); len(lag) > 0; pause(10 * time.Millisecond) {
		healthy(victim)
		lag = slices.DeleteFunc(lag, func(f *fakeSession) bool { return f == victim || f.acked.Load() >= last })
	}
	known := time.Since(at)
	show(fmt.Sprintf("%d map changes in %v, all of them acknowledged after %v", changes,
		changed.Round(time.Millisecond), known.Round(time.Millisecond)), at, cpu(t, s.pid)-before)
	pause(term)
	healthy(victim)
	fmt.Printf("no session lost its lease; %d calls were repeated since all were open\n", again.Load())
}
