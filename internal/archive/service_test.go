package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/testutil"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// holding holds the lock of d in a goroutine until let is called, which gives hold's error.
func holding(t *testing.T, d Destination, name string, every time.Duration) (held *atomic.Bool, let func() error) {
	t.Helper()
	held = new(atomic.Bool)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	l := &lock{d: d, holder: name, every: every}
	go func() {
		done <- l.hold(ctx, func(string) {}, func(held2 context.Context) error {
			held.Store(true)
			defer held.Store(false)
			<-held2.Done()
			return nil
		})
	}()
	var once atomic.Bool
	let = func() error {
		cancel()
		if once.Swap(true) {
			return nil
		}
		return <-done
	}
	t.Cleanup(func() { _ = let() }) // tests that want to know have asked
	return held, let
}

// TestLock: one holds it at a time. Another comes at once when it is released, and after three beats when the
// holder is silent; that finds out.
func TestLock(t *testing.T) {
	const every = 20 * time.Millisecond
	d := newMemory()
	a, letA := holding(t, d, "a", every)
	testutil.Until(t, "a holds it", a.Load)
	b, letB := holding(t, d, "b", time.Hour)
	testutil.Until(t, "a lived for ten beats", func() bool {
		l := &lock{d: d}
		n, _, err := l.newest(t.Context())
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		return n > 10
	})
	if b.Load() || !a.Load() {
		t.Fatalf("a holds it: %v; b: %v", a.Load(), b.Load())
	}
	if err := letA(); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "b holds it", b.Load)
	if err := letB(); err != nil {
		t.Fatal(err)
	}
	all, err := d.List(t.Context(), lockDir)
	if err != nil || len(all) != 1 {
		t.Fatalf("files of the lock: %v, %v", all, err)
	}

	// c takes it and is silent, as if it stood still.
	c := &lock{d: d, holder: "c", every: every}
	if err := c.acquire(t.Context(), func(string) { t.Error("c waits") }); err != nil {
		t.Fatal(err)
	}
	began, waited := time.Now(), ""
	e := &lock{d: d, holder: "e", every: every}
	if err := e.acquire(t.Context(), func(holder string) { waited = holder }); err != nil || waited != "c" {
		t.Fatalf("waited for %q: %v", waited, err)
	}
	if took := time.Since(began); took < missedBeats*every {
		t.Errorf("taken over after %v", took)
	}
	if err := c.next(t.Context(), c.n, false); !errors.Is(err, errLockLost) {
		t.Errorf("c holds it still: %v", err)
	}
	// Its number is free when e's have gone on; there are later ones.
	for range 3 {
		if err := e.next(t.Context(), e.n, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.next(t.Context(), c.n, false); !errors.Is(err, errLockLost) {
		t.Errorf("c holds it again: %v", err)
	}
}

// TestLockFails: a holder that cannot say that it lives stops before another takes over.
func TestLockFails(t *testing.T) {
	d := newMemory()
	l := &lock{d: d, holder: "a", every: 20 * time.Millisecond}
	err := l.hold(t.Context(), func(string) {}, func(ctx context.Context) error {
		d.mu.Lock()
		d.die = d.calls + 1
		d.mu.Unlock()
		<-ctx.Done()
		return nil
	})
	if !errors.Is(err, errLockLost) || !errors.Is(err, errKilled) {
		t.Errorf("hold: %v", err)
	}
	// A file that says what it should not does not hold it up for ever.
	d = newMemory()
	if err := d.PutIfAbsent(t.Context(), beatName(7), []byte(`{"holder":"x","millis":-9223372036854775808}`)); err != nil {
		t.Fatal(err)
	}
	l = &lock{d: d, holder: "a", every: time.Hour}
	if err := l.acquire(t.Context(), func(string) {}); err != nil || l.n != 8 {
		t.Errorf("number %d: %v", l.n, err)
	}
}

// TestLockIsDamaged: a newest file that says nothing is taken over after three beats, like a dead holder's.
func TestLockIsDamaged(t *testing.T) {
	const every = 20 * time.Millisecond
	for _, bad := range []string{"", "{", strings.Repeat("x", maxLockFile+1)} {
		d := newMemory()
		if err := d.PutIfAbsent(t.Context(), beatName(7), []byte(bad)); err != nil {
			t.Fatal(err)
		}
		began, waited := time.Now(), ""
		l := &lock{d: d, holder: "a", every: every}
		err := l.acquire(t.Context(), func(holder string) { waited = holder })
		if err != nil || l.n != 8 || !strings.Contains(waited, beatName(7)) {
			t.Fatalf("%.10q: number %d, waited for %q: %v", bad, l.n, waited, err)
		}
		if took := time.Since(began); took < missedBeats*every {
			t.Errorf("%.10q: taken over after %v", bad, took)
		}
	}
}

// oneSource is a store of one namespace, src.
type oneSource struct {
	s     session
	fail  atomic.Bool
	opens atomic.Int32
}

func (o *oneSource) Namespaces(context.Context) ([]string, error) { return []string{"src"}, nil }

func (o *oneSource) Open(context.Context, string) (Store, Manifest, func() error, error) {
	o.opens.Add(1)
	if o.fail.Load() {
		return nil, Manifest{}, nil, errKilled
	}
	return o.s, Manifest{Namespace: Namespace{Name: "src", Mode: "store"}}, func() error { return nil }, nil
}

// TestService makes snapshots, prunes, tells of failures, and makes a last one at its end. A second one of the same
// destination waits meanwhile.
func TestService(t *testing.T) {
	src, _ := sessions(t)
	do(t, src, client.Op{Kind: client.OpPut, Key: []byte("k"), Value: []byte("v")})
	d, from := newMemory(), &oneSource{s: src}
	var seconds atomic.Int64
	now := func() time.Time { return began.Add(time.Duration(seconds.Add(1)) * time.Second) }
	run := func(o ServiceOptions) (s *Service, stop func()) {
		o.Dest, o.Source, o.Now, o.Logger, o.Beat = d, from, now, quiet(), 50*time.Millisecond
		o.Keep, o.Holder = Keep{Last: 2}, "test"
		s = NewService(o)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		return s, func() {
			t.Helper()
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	first, stop := run(ServiceOptions{Every: time.Second})
	taken := from.opens.Load
	testutil.Until(t, "four snapshots", func() bool { return taken() > 4 })
	second, stopSecond := run(ServiceOptions{Every: 1e6 * time.Second, AtEnd: true})
	if st := second.Stats(); st.Holds || len(st.Namespaces) > 0 || st.Err != nil {
		t.Errorf("the second works: %+v", st)
	}
	from.fail.Store(true)
	testutil.Until(t, "a failure", func() bool {
		st := first.Stats()
		n := st.Namespaces["src"]
		return n.Failures > 0 && errors.Is(st.Err, errKilled) && !n.Success.IsZero()
	})
	from.fail.Store(false)
	testutil.Until(t, "it goes well again", func() bool { return first.Stats().Err == nil })
	stop()
	testutil.Until(t, "the second works", func() bool { return second.Stats().Holds })
	do(t, src, client.Op{Kind: client.OpPut, Key: []byte("last"), Value: []byte("v")})
	stopSecond()
	all, err := List(t.Context(), d, "src")
	if err != nil || len(all) != 2 {
		t.Fatalf("%d snapshots, want 2: %v", len(all), err)
	}
	snap, err := Open(t.Context(), d, "src", "")
	if err != nil || snap.Keys != 2 {
		t.Fatalf("the last has %+v: %v", snap, err)
	}
	if err := Verify(t.Context(), snap, nil); err != nil {
		t.Error(err)
	}
}

// TestServiceIsKilled at every call: what has a manifest is whole, and the next one works.
func TestServiceIsKilled(t *testing.T) {
	src, _ := sessions(t)
	for i := range 30 {
		do(t, src, client.Op{Kind: client.OpPut, Key: fmt.Appendf(nil, "k%d", i),
			Value: []byte(strings.Repeat("v", i))})
	}
	for die := 1; ; die++ {
		d := newMemory()
		d.die, d.after = die, die%2 == 0
		s := NewService(ServiceOptions{Dest: d, Source: &oneSource{s: src}, Every: time.Hour, Now: time.Now,
			Logger: quiet(), Keep: Keep{Last: 1}, Beat: time.Hour})
		n := &NamespaceStats{}
		l := &lock{d: d, holder: "a", every: time.Hour}
		failed := l.hold(t.Context(), func(string) {}, func(ctx context.Context) error {
			return errors.Join(s.once(ctx, "src", n), s.once(ctx, "src", n))
		})
		d.die = 0
		all, err := List(t.Context(), d, "src")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			if !e.Complete {
				continue
			}
			snap, err := Open(t.Context(), d, "src", e.ID)
			if err == nil {
				err = Verify(t.Context(), snap, nil)
			}
			if err != nil || snap.Keys != 30 {
				t.Fatalf("killed at call %d: %v", die, err)
			}
		}
		if failed == nil {
			if die < 15 {
				t.Fatalf("%d calls", die)
			}
			return
		}
	}
}

// undying is a memory whose old snapshots cannot be deleted while fails is set.
type undying struct {
	*memory
	fails atomic.Bool
}

func (u *undying) Delete(ctx context.Context, name string) error {
	if u.fails.Load() && strings.HasSuffix(name, ManifestName) {
		return errKilled
	}
	return u.memory.Delete(ctx, name)
}

// TestPruneFails: a snapshot whose prune fails is there and counts as made, the failure is told, and the next time is
// that of a success. The next prune takes the old one away.
func TestPruneFails(t *testing.T) {
	src, _ := sessions(t)
	do(t, src, client.Op{Kind: client.OpPut, Key: []byte("k"), Value: []byte("v")})
	d, at := &undying{memory: newMemory()}, began
	s := NewService(ServiceOptions{Dest: d, Source: &oneSource{s: src}, Every: time.Hour,
		Now: func() time.Time { return at }, Logger: quiet(), Keep: Keep{Last: 1}})
	left := func() int {
		t.Helper()
		all, err := List(t.Context(), d, "src")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	if wait, err := s.round(t.Context(), false); err != nil || wait > time.Hour {
		t.Fatalf("the first: next in %v, %v", wait, err)
	}
	at = at.Add(time.Hour)
	d.fails.Store(true)
	if _, err := s.round(t.Context(), false); !errors.Is(err, errKilled) || !strings.Contains(err.Error(), "prune") {
		t.Errorf("a prune that fails: %v", err)
	}
	s.hold(true)
	n := s.Stats().Namespaces["src"]
	if n.Failures != 1 || !n.Success.Equal(at) || !n.Since.Equal(at) || left() != 2 {
		t.Errorf("%+v, %d snapshots, want a success at %v and 2", n, left(), at)
	}
	at = at.Add(retryAfter)
	if _, err := s.round(t.Context(), false); err != nil || left() != 2 {
		t.Errorf("before it is due: %d snapshots, %v", left(), err)
	}
	d.fails.Store(false)
	at = at.Add(time.Hour)
	if _, err := s.round(t.Context(), false); err != nil || left() != 1 {
		t.Errorf("the next prune left %d: %v", left(), err)
	}
}
