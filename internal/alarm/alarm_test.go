package alarm

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a queue with a clock of its own, and a waker that notes for when it is set.
type fake struct {
	*queue
	t    *testing.T
	time time.Duration
	at   time.Duration // -1: never
	sets int
	// made and closed count wakers.
	made, closed int
}

func newFake(t *testing.T) *fake {
	f := &fake{t: t, at: -1, time: time.Hour}
	f.queue = newQueue(func() time.Duration { return f.time }, func(*queue) waker { f.made++; return f })
	t.Cleanup(func() {
		if f.mu.waker != nil && len(f.mu.entries)+f.mu.holds == 0 {
			t.Error("nobody needs the waker, and it was not closed")
		}
	})
	return f
}

func (f *fake) close() { f.at, f.closed = -1, f.closed+1 }

func (f *fake) set(d time.Duration) {
	f.sets++
	if f.at = -1; d >= 0 {
		f.at = f.time + d
	}
}

// run lets time pass, and returns when the process woke up for it.
func (f *fake) run(d time.Duration) (wakes []time.Duration) {
	for end := f.time + d; ; {
		if f.at < 0 || f.at > end {
			f.time = end
			return wakes
		}
		f.time, f.at = max(f.at, f.time), -1
		wakes = append(wakes, f.time-time.Hour)
		f.due()
	}
}

func rung(t *Timer) bool {
	select {
	case <-t.C:
		return true
	default:
		return false
	}
}

// TestWakesOnlyWhenDue: what is stopped, cancelled or set to later does not wake the process.
func TestWakesOnlyWhenDue(t *testing.T) {
	f := newFake(t)
	kept, stopped, later := newTimer(f.queue, 400*time.Millisecond), newTimer(f.queue, 100*time.Millisecond),
		newTimer(f.queue, 200*time.Millisecond)
	_, cancel := withTimeout(f.queue, context.Background(), 300*time.Millisecond)
	stopped.Stop()
	cancel()
	later.Reset(time.Second)
	if got, want := f.run(10*time.Second),
		[]time.Duration{404 * time.Millisecond, 1010 * time.Millisecond}; !slices.Equal(got, want) {
		t.Fatalf("woken at %v, want %v: a hundredth late", got, want)
	}
	if !rung(kept) || !rung(later) || rung(stopped) {
		t.Fatal("not those rang that were due")
	}
	if n := len(f.mu.entries); n > 0 {
		t.Fatalf("%d entries are left", n)
	}
}

// TestGathers: timers that are due within a hundredth of their time take one wake-up.
func TestGathers(t *testing.T) {
	f := newFake(t)
	var timers []*Timer
	for i := range 100 {
		timers = append(timers, newTimer(f.queue, time.Second+time.Duration(i)*100*time.Microsecond))
	}
	if got := f.run(10 * time.Second); len(got) != 1 {
		t.Fatalf("woken at %v, want once", got)
	}
	for i, x := range timers {
		if !rung(x) {
			t.Fatalf("timer %d is late", i)
		}
	}
}

// TestSetsAlike: a timer that is set while an earlier one is does not touch the waker.
func TestSetsAlike(t *testing.T) {
	f := newFake(t)
	newTimer(f.queue, time.Second)
	x := newTimer(f.queue, 2*time.Second)
	for range 100 {
		x.Reset(3 * time.Second)
	}
	if f.sets != 1 {
		t.Fatalf("the waker was set %d times, want once", f.sets)
	}
}

// TestResetForgets: what was sent before Reset or Stop is not received behind it.
func TestResetForgets(t *testing.T) {
	f := newFake(t)
	x := newTimer(f.queue, time.Second)
	f.run(2 * time.Second)
	x.Reset(time.Second)
	if rung(x) {
		t.Fatal("Reset leaves what was sent before")
	}
	f.run(2 * time.Second)
	x.Stop()
	if rung(x) {
		t.Fatal("Stop leaves what was sent before")
	}
	x.Reset(1<<63 - 1)
	if got := f.run(1000 * time.Hour); len(got) > 0 || rung(x) {
		t.Fatalf("woken at %v by a timer that is never due", got)
	}
}

// TestBrief: short times are the runtime's, which is punctual when it is busy; a stale one does not ring.
func TestBrief(t *testing.T) {
	f := newFake(t)
	x := newTimer(f.queue, brief-1)
	if f.sets > 0 || !x.shortly {
		t.Fatalf("the waker was set %d times for a short time", f.sets)
	}
	x.ringShort() // too early: it had been set to less before
	if rung(x) {
		t.Fatal("rang before it was due")
	}
	f.time += brief
	x.ringShort()
	if !rung(x) {
		t.Fatal("did not ring")
	}
	x.Reset(0)
	x.Reset(time.Second)
	f.time += brief
	x.ringShort()
	if rung(x) {
		t.Fatal("rang for a time that it was reset from")
	}
}

// TestWithTimeout: the context ends as one of package context does, and tells others which are made from it.
func TestWithTimeout(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(f *fake, parent, cancel func())
		want error
	}{
		"time":      {func(f *fake, _, _ func()) { f.run(time.Minute) }, context.DeadlineExceeded},
		"parent":    {func(_ *fake, parent, _ func()) { parent() }, context.Canceled},
		"cancelled": {func(_ *fake, _, cancel func()) { cancel() }, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			parent, cancelParent := context.WithCancel(context.WithValue(context.Background(), &name, 1))
			defer cancelParent()
			ctx, cancel := withTimeout(f.queue, parent, time.Second)
			defer cancel()
			child, cancelChild := context.WithCancel(ctx)
			defer cancelChild()
			stop := context.AfterFunc(ctx, func() { t.Error("called though it was stopped") })
			if _, ok := ctx.Deadline(); ok || ctx.Err() != nil || child.Err() != nil || ctx.Value(&name) != 1 ||
				!stop() || stop() {
				t.Fatal("not as before the end")
			}
			tc.end(f, cancelParent, cancel)
			for _, c := range []context.Context{ctx, child} {
				<-c.Done()
				if !errors.Is(c.Err(), tc.want) || !errors.Is(context.Cause(c), tc.want) {
					t.Fatalf("ended with %v, %v, want %v", c.Err(), context.Cause(c), tc.want)
				}
			}
			late := make(chan struct{})
			if stop := context.AfterFunc(ctx, func() { close(late) }); stop() {
				t.Fatal("stopped after the end")
			}
			<-late
			if got := f.run(time.Hour); len(got) > 0 {
				t.Fatalf("woken at %v after the end", got)
			}
		})
	}
}

// TestHold: without a hold there is a waker while a timer is set, with one until its end.
func TestHold(t *testing.T) {
	f := newFake(t)
	x := newTimer(f.queue, time.Second)
	f.run(2 * time.Second)
	x.Reset(time.Second)
	x.Stop()
	if f.made != 2 || f.closed != 2 {
		t.Fatalf("%d wakers were made and %d closed, want 2", f.made, f.closed)
	}
	release := f.hold()
	for range 3 {
		x.Reset(time.Second)
		f.run(2 * time.Second)
	}
	if f.made != 3 || f.closed != 2 {
		t.Fatalf("%d wakers were made and %d closed, want 3 and 2", f.made, f.closed)
	}
	release()
	release()
	if f.closed != 3 {
		t.Fatal("not closed when it was released")
	}
}

// TestComesAndGoes: a waker goes with the last timer, whoever stops it or whether it rings, while others need the next
// one.
func TestComesAndGoes(t *testing.T) {
	for name, f := range map[string]func(*queue) waker{"own": newWaker, "timer of the runtime": newGoTimer} {
		t.Run(name, func(t *testing.T) {
			q := newQueue(process().now, f)
			var wg sync.WaitGroup
			for i := range 4 {
				wg.Go(func() {
					for n := range 200 {
						ctx, cancel := withTimeout(q, context.Background(), time.Duration(i*n%7)*100*time.Microsecond)
						if i%2 == 0 {
							<-ctx.Done()
						}
						cancel()
					}
				})
			}
			wg.Wait()
			q.mu.Lock()
			defer q.mu.Unlock()
			if q.mu.waker != nil || len(q.mu.entries) > 0 {
				t.Fatal("something is left")
			}
		})
	}
}

// TestProcess: the process's own waker rings, now and again, and the one that other systems have.
func TestProcess(t *testing.T) {
	other := newQueue(process().now, newGoTimer)
	for name, q := range map[string]*queue{"own": process(), "timer of the runtime": other} {
		t.Run(name, func(t *testing.T) {
			never := newTimer(q, time.Hour)
			defer never.Stop()
			x := newTimer(q, brief)
			for range 3 {
				<-x.C
				x.Reset(brief)
			}
			x.Reset(0)
			<-x.C
			ctx, cancel := withTimeout(q, context.Background(), time.Millisecond)
			defer cancel()
			<-ctx.Done()
			never.Reset(time.Minute)
		})
	}
}
