package dirclient

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is one directory node. Which node leads is the cluster's to say.
type fake struct {
	dirpb.UnimplementedDirectoryServer
	cluster *cluster
	addr    string
	srv     *grpc.Server
	calls   atomic.Int32
}

// cluster is three fakes that share a leader and a map version.
type cluster struct {
	t     *testing.T
	fakes []*fake

	mu struct {
		sync.Mutex
		leader  string
		mute    bool // NotLeader details name nobody
		version uint64
		changed chan struct{}
		called  bool                               // the leader is to call whoever watches, once
		renew   func(context.Context, *fake) error // runs in Renew at the leader
	}
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{t: t}
	c.mu.version, c.mu.changed = 1, make(chan struct{})
	for range 3 {
		f := &fake{cluster: c}
		c.fakes = append(c.fakes, f)
		f.start()
	}
	c.mu.leader = c.fakes[0].addr
	t.Cleanup(func() {
		for _, f := range c.fakes {
			f.srv.Stop()
		}
	})
	return c
}

// start listens at the fake's address, a fresh one the first time.
func (f *fake) start() {
	if f.addr == "" {
		f.addr = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", f.addr)
	if err != nil {
		f.cluster.t.Fatal(err)
	}
	f.addr = l.Addr().String()
	f.srv = grpc.NewServer()
	dirpb.RegisterDirectoryServer(f.srv, f)
	go f.srv.Serve(l)
}

func (c *cluster) addrs() (a []string) {
	for _, f := range c.fakes {
		a = append(a, f.addr)
	}
	return a
}

func (c *cluster) set(fn func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fn()
	close(c.mu.changed)
	c.mu.changed = make(chan struct{})
}

func (c *cluster) open(addrs ...string) *Client {
	d, err := Open(Options{Addrs: addrs})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { d.Close() })
	return d
}

func (f *fake) notLeader() error {
	f.cluster.mu.Lock()
	defer f.cluster.mu.Unlock()
	if f.cluster.mu.leader == f.addr {
		return nil
	}
	d := &dirpb.NotLeader{Leader: f.cluster.mu.leader}
	if f.cluster.mu.mute {
		d.Leader = ""
	}
	s, err := status.New(codes.FailedPrecondition, "not the leader").WithDetails(d)
	if err != nil {
		return err
	}
	return s.Err()
}

func (f *fake) Renew(ctx context.Context, r *dirpb.RenewRequest) (*dirpb.RenewReply, error) {
	f.calls.Add(1)
	if err := f.notLeader(); err != nil {
		return nil, err
	}
	f.cluster.mu.Lock()
	hook := f.cluster.mu.renew
	f.cluster.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, f); err != nil {
			return nil, err
		}
	}
	return &dirpb.RenewReply{}, nil
}

func (f *fake) WatchMap(r *dirpb.WatchMapRequest, s grpc.ServerStreamingServer[dirpb.Map]) error {
	f.calls.Add(1)
	if r.SessionId == 404 {
		return status.Error(codes.NotFound, "session 404 does not exist")
	}
	after := r.AfterVersion
	for {
		f.cluster.mu.Lock()
		v, changed := f.cluster.mu.version, f.cluster.mu.changed
		call := f.cluster.mu.called && f.cluster.mu.leader == f.addr
		if call {
			f.cluster.mu.called = false
		}
		f.cluster.mu.Unlock()
		for ; after < v; after++ {
			if err := s.Send(&dirpb.Map{Version: after + 1, ClusterId: f.addr}); err != nil {
				return err
			}
		}
		if call {
			if err := s.Send(&dirpb.Map{Version: after, ClusterId: f.addr, Renew: proto.Bool(true)}); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

func renew(ctx context.Context, d dirpb.DirectoryClient) error {
	_, err := d.Renew(ctx, &dirpb.RenewRequest{})
	return err
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// renewUntil is renew in a context that ends, as by its deadline, once an attempt has ended as enough says. An attempt
// more is begun, so that enough's is known to the client by then, however slow the machine is.
func renewUntil(t *testing.T, enough func(error) bool) (context.Context,
	func(context.Context, dirpb.DirectoryClient) error) {
	ctx, end := context.WithCancelCause(within(t, 20*time.Second))
	t.Cleanup(func() { end(nil) })
	done := false
	return ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		if done {
			end(context.DeadlineExceeded)
			<-ctx.Done()
			return ctx.Err() // nothing was sent
		}
		err := renew(ctx, d)
		done = done || enough(err)
		return err
	}
}

func TestFollowsLeader(t *testing.T) {
	c := newCluster(t)
	d := c.open(c.addrs()...)
	ctx := within(t, 10*time.Second)
	for _, i := range []int{2, 0, 1} {
		c.set(func() { c.mu.leader = c.fakes[i].addr })
		if err := d.Call(ctx, renew); err != nil {
			t.Fatal(err)
		}
		before := c.fakes[i].calls.Load()
		if err := d.CallOnce(ctx, renew); err != nil {
			t.Fatal(err)
		}
		if got := c.fakes[i].calls.Load() - before; got != 1 {
			t.Fatalf("leader %d was asked %d times by the second call, want 1", i, got)
		}
	}
}

// A directory node is not told when a call is given up: it would set a timer for each, which wakes it though the call
// is long over.
func TestNoDeadline(t *testing.T) {
	c := newCluster(t)
	told := make(chan bool, 1)
	c.set(func() {
		c.mu.renew = func(ctx context.Context, _ *fake) error {
			_, ok := ctx.Deadline()
			told <- ok
			return nil
		}
	})
	if err := c.open(c.addrs()...).Call(t.Context(), renew); err != nil {
		t.Fatal(err)
	}
	if <-told {
		t.Error("told of a deadline")
	}
}

// A follower's hint is followed at once: nobody else is asked.
func TestFollowsHint(t *testing.T) {
	c := newCluster(t)
	c.set(func() { c.mu.leader = c.fakes[2].addr })
	d := c.open(c.addrs()...)
	if err := d.Call(within(t, 10*time.Second), renew); err != nil {
		t.Fatal(err)
	}
	for i, want := range []int32{1, 0, 1} {
		if got := c.fakes[i].calls.Load(); got != want {
			t.Errorf("node %d was asked %d times, want %d", i, got, want)
		}
	}
}

// The leader's address is learned when only a follower is configured.
func TestLearnsLeader(t *testing.T) {
	c := newCluster(t)
	d := c.open(c.fakes[1].addr)
	if err := d.Call(within(t, 10*time.Second), renew); err != nil {
		t.Fatal(err)
	}
	if c.fakes[0].calls.Load() != 1 {
		t.Fatal("the leader was not asked")
	}
}

// A leader that names nobody is found by asking every address.
func TestFindsLeaderWithoutHint(t *testing.T) {
	c := newCluster(t)
	c.set(func() { c.mu.mute, c.mu.leader = true, c.fakes[2].addr })
	d := c.open(c.addrs()...)
	if err := d.CallOnce(within(t, 10*time.Second), renew); err != nil {
		t.Fatal(err)
	}
}

func TestLeaderDies(t *testing.T) {
	c := newCluster(t)
	d := c.open(c.addrs()...)
	ctx := within(t, 10*time.Second)
	if err := d.Call(ctx, renew); err != nil {
		t.Fatal(err)
	}
	c.fakes[0].srv.Stop() // followers still name it
	done := make(chan error, 1)
	go func() { done <- d.Call(ctx, renew) }()
	for c.fakes[1].calls.Load() == 0 || c.fakes[2].calls.Load() == 0 {
		select {
		case err := <-done:
			t.Fatalf("answered without a leader: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	c.set(func() { c.mu.leader = c.fakes[2].addr })
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	// And back to a restarted first node.
	c.fakes[0].start()
	c.set(func() { c.mu.leader = c.fakes[0].addr })
	if err := d.Call(ctx, renew); err != nil {
		t.Fatal(err)
	}
}

// A node that breaks the connection after it was asked leaves the outcome
// unknown: CallOnce stops, Call asks again.
func TestSentOrNot(t *testing.T) {
	for _, once := range []bool{true, false} {
		t.Run(fmt.Sprintf("once=%t", once), func(t *testing.T) {
			c := newCluster(t)
			var runs atomic.Int32
			c.set(func() {
				c.mu.renew = func(ctx context.Context, f *fake) error {
					if runs.Add(1) == 1 {
						c.set(func() { c.mu.leader = c.fakes[1].addr })
						go f.srv.Stop() // returns after this call has
						<-ctx.Done()
						return status.Error(codes.Unavailable, "stopping")
					}
					return nil
				}
			})
			d := c.open(c.addrs()...)
			ctx := within(t, 10*time.Second)
			if once {
				err := d.CallOnce(ctx, renew)
				if !errors.Is(err, ErrUnknownOutcome) || !errors.Is(err, ErrUnavailable) {
					t.Fatalf("got %v, want an unknown outcome", err)
				}
				if runs.Load() != 1 {
					t.Fatalf("the request ran %d times, want 1", runs.Load())
				}
				// The dead node refuses connections now: nothing is sent to it.
				if err := d.CallOnce(ctx, renew); err != nil {
					t.Fatal(err)
				}
				return
			}
			if err := d.Call(ctx, renew); err != nil {
				t.Fatal(err)
			}
			if runs.Load() != 2 {
				t.Fatalf("the request ran %d times, want 2", runs.Load())
			}
		})
	}
}

// A node that answers that nothing was done leaves no doubt, and CallOnce leaves it at that; a
// request that went out before may have taken effect all the same.
func TestNothingDone(t *testing.T) {
	c := newCluster(t)
	s, err := status.New(codes.Unavailable, "no room; nothing was done").WithDetails(&dirpb.NothingDone{})
	if err != nil {
		t.Fatal(err)
	}
	var runs atomic.Int32
	broken := false
	c.set(func() {
		c.mu.renew = func(context.Context, *fake) error {
			if runs.Add(1) == 1 && broken {
				return status.Error(codes.Unavailable, "stopping")
			}
			return s.Err()
		}
	})
	d := c.open(c.addrs()...)
	err = d.CallOnce(within(t, 10*time.Second), renew)
	if errors.Is(err, ErrUnknownOutcome) || !errors.Is(err, ErrUnavailable) ||
		!strings.Contains(err.Error(), "nothing was done") || runs.Load() != 1 {
		t.Errorf("after %d runs: %v", runs.Load(), err)
	}
	runs.Store(0)
	broken = true
	ctx, fn := renewUntil(t, func(error) bool { return runs.Load() == 2 })
	if err := d.Call(ctx, fn); !errors.Is(err, ErrUnknownOutcome) || runs.Load() < 2 {
		t.Errorf("after %d runs, of which one broke off: %v", runs.Load(), err)
	}
}

// A node that takes requests and stays silent is left after AttemptTimeout.
func TestSilentLeader(t *testing.T) {
	c := newCluster(t)
	c.set(func() {
		c.mu.renew = func(ctx context.Context, f *fake) error {
			if f == c.fakes[0] {
				c.set(func() { c.mu.leader = c.fakes[1].addr })
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
	})
	d, err := Open(Options{Addrs: c.addrs(), AttemptTimeout: 30 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Call(within(t, 10*time.Second), renew); err != nil {
		t.Fatal(err)
	}
}

func TestErrors(t *testing.T) {
	c := newCluster(t)
	dead, err := loopback.Free()
	if err != nil {
		t.Fatal(err)
	}

	t.Run("refused", func(t *testing.T) {
		d := c.open(dead)
		for _, call := range []func(context.Context, func(context.Context, dirpb.DirectoryClient) error) error{
			d.Call, d.CallOnce} {
			err := call(renewUntil(t, func(error) bool { return true }))
			want := "directory " + dead + ": connection refused; is `kvd directory` running? (--directory)"
			if err == nil || err.Error() != want {
				t.Fatalf("got  %v\nwant %s", err, want)
			}
			if !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) ||
				errors.Is(err, ErrUnknownOutcome) {
				t.Fatalf("%#v matches the wrong sentinels", err)
			}
		}
	})
	t.Run("tls", func(t *testing.T) { // the node is there, and talks in clear
		d, err := Open(Options{Addrs: []string{c.fakes[0].addr}, TLS: &tls.Config{MinVersion: tls.VersionTLS13}})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		err = d.CallOnce(renewUntil(t, func(error) bool { return true }))
		if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrUnknownOutcome) ||
			!strings.Contains(err.Error(), "it speaks gRPC in clear, not TLS") ||
			strings.Contains(err.Error(), "running?") {
			t.Fatalf("got %v, want the handshake's failure", err)
		}
	})
	t.Run("another service", func(t *testing.T) {
		lis := testutil.Listen(t)
		web := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Minute}
		go web.Serve(lis)
		defer web.Close()
		err = c.open(lis.Addr().String()).CallOnce(renewUntil(t, func(error) bool { return true }))
		want := "directory " + lis.Addr().String() + ": it speaks HTTP/1, as at http-listen: is it a directory " +
			"node's gRPC port?"
		if err == nil || err.Error() != want || !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrUnknownOutcome) {
			t.Fatalf("got  %v\nwant %s", err, want)
		}
	})
	t.Run("headless", func(t *testing.T) {
		c.set(func() { c.mu.mute, c.mu.leader = true, "" })
		defer c.set(func() { c.mu.mute, c.mu.leader = false, c.fakes[0].addr })
		d := c.open(dead, c.fakes[1].addr)
		err := d.Call(renewUntil(t, func(err error) bool { return status.Code(err) == codes.FailedPrecondition }))
		for _, want := range []string{dead + ": connection refused", c.fakes[1].addr +
			": not the leader, and knows none", "are most of"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("got %v, want it to say %q", err, want)
			}
		}
	})
	t.Run("answer", func(t *testing.T) {
		c.set(func() {
			c.mu.renew = func(context.Context, *fake) error {
				return status.Error(codes.NotFound, "session 9 does not exist")
			}
		})
		d := c.open(c.addrs()...)
		err := d.Call(within(t, 10*time.Second), renew)
		if status.Code(err) != codes.NotFound || errors.Is(err, ErrUnavailable) {
			t.Fatalf("got %v, want NotFound", err)
		}
		if want := "directory " + c.fakes[0].addr + ": session 9 does not exist"; err.Error() != want {
			t.Fatalf("got %q, want %q", err, want)
		}
	})
	t.Run("closed", func(t *testing.T) {
		d := c.open(dead)
		failed := make(chan struct{}, 100)
		done := make(chan error, 1)
		go func() {
			done <- d.Call(context.Background(), func(ctx context.Context, r dirpb.DirectoryClient) error {
				select {
				case failed <- struct{}{}:
				default:
				}
				return renew(ctx, r)
			})
		}()
		<-failed
		d.Close()
		if err := <-done; !errors.Is(err, ErrClosed) {
			t.Fatalf("got %v, want ErrClosed", err)
		}
		if err := d.Call(context.Background(), renew); !errors.Is(err, ErrClosed) {
			t.Fatalf("got %v, want ErrClosed", err)
		}
	})
	t.Run("options", func(t *testing.T) {
		for _, o := range []Options{{}, {Addrs: []string{"nohost"}}, {Addrs: []string{"h:1"}, AttemptTimeout: -1}} {
			if d, err := Open(o); err == nil {
				d.Close()
				t.Errorf("%+v: accepted", o)
			}
		}
	})
}

// watchMap gives what a watch brings, and how it ends.
func watchMap(ctx context.Context, d *Client) (got chan *dirpb.Map, done chan error) {
	got, done = make(chan *dirpb.Map), make(chan error, 1)
	go func() {
		done <- d.WatchMap(ctx, 1, 0, func(m *dirpb.Map) error {
			got <- m
			return nil
		})
	}()
	return got, done
}

func TestWatchMapResumes(t *testing.T) {
	c := newCluster(t)
	d := c.open(c.addrs()...)
	ctx, cancel := context.WithCancel(within(t, 10*time.Second))
	got, done := watchMap(ctx, d)
	byAddr := map[string]*fake{}
	for _, f := range c.fakes {
		byAddr[f.addr] = f
	}
	for v := uint64(1); v <= 3; v++ {
		var m *dirpb.Map
		select {
		case m = <-got:
		case err := <-done:
			t.Fatal(err)
		}
		if m.Version != v {
			t.Fatalf("got version %d, want %d", m.Version, v)
		}
		if v < 3 {
			byAddr[m.ClusterId].srv.Stop() // the stream breaks
			c.set(func() { c.mu.version++ })
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want Canceled", err)
	}
}

// A watch moves to the node that answers calls as leader, behind the last map that it brought,
// and passes on calls, which have no new version.
func TestWatchMapFollowsLeader(t *testing.T) {
	c := newCluster(t)
	d := c.open(c.addrs()...)
	ctx, cancel := context.WithCancel(within(t, 10*time.Second))
	got, done := watchMap(ctx, d)
	next := func() *dirpb.Map {
		t.Helper()
		select {
		case m := <-got:
			return m
		case err := <-done:
			t.Fatal(err)
		}
		return nil
	}
	next()
	for v, i := range []int{2, 0, 1} {
		c.set(func() { c.mu.leader = c.fakes[i].addr })
		if err := d.Call(ctx, renew); err != nil {
			t.Fatal(err)
		}
		version := uint64(v + 2)
		c.set(func() { c.mu.version = version })
		next() // perhaps of the old stream still
		c.set(func() { c.mu.called = true })
		m := next()
		if m.ClusterId != c.fakes[i].addr || m.Version != version || !m.GetRenew() {
			t.Fatalf("called with %v, want version %d of %s", m, version, c.fakes[i].addr)
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want Canceled", err)
	}
}

func TestWatchMapEnds(t *testing.T) {
	c := newCluster(t)
	d := c.open(c.addrs()...)
	ctx := within(t, 10*time.Second)
	boom := errors.New("boom")
	if err := d.WatchMap(ctx, 1, 0, func(*dirpb.Map) error { return boom }); err != boom {
		t.Fatalf("got %v, want fn's error", err)
	}
	if err := d.WatchMap(ctx, 404, 0, func(*dirpb.Map) error { return nil }); status.Code(err) != codes.NotFound {
		t.Fatalf("got %v, want NotFound", err)
	}
	err := d.WatchMap(ctx, 1, 0, func(*dirpb.Map) error { go d.Close(); <-d.closed.Done(); return nil })
	if !errors.Is(err, ErrClosed) {
		t.Fatalf("got %v, want ErrClosed", err)
	}
}
