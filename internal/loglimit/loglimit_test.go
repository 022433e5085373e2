package loglimit

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A flood of one kind costs a burst and a line a second, which says how many are not there;
// other kinds pass beside it.
func TestFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		l := slog.New(New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug}))).With("node", "m1")
		count := func(s string) int { return strings.Count(b.String(), s) }
		for i := range 100_000 {
			l.Warn(fmt.Sprintf("session %d refused", i), "err", errors.New("full"))
			if i%10_000 == 9999 {
				time.Sleep(time.Second)
			}
		}
		l.Warn("another kind")
		l.Info("session 7 is open") // another level
		l.WithGroup("g").Warn("session 100000 refused")
		if n := count("refused"); n != Burst+10 {
			t.Errorf("%d lines of a flood of 10 s, want %d", n, Burst+10)
		}
		for _, want := range []string{"another kind", "session 7 is open", "suppressed=9999", "suppressed=9970"} {
			if count(want) == 0 {
				t.Errorf("no line with %q:\n%s", want, b.String())
			}
		}
		time.Sleep(time.Hour) // no flood any more
		b.Reset()
		for range Burst {
			l.Warn("session 1 refused")
		}
		if n := count("refused"); n != Burst {
			t.Errorf("%d lines, want %d", n, Burst)
		}
		b.Reset()
		for range 100 {
			l.Debug("asked for")
		}
		if n := count("asked for"); n != 100 {
			t.Errorf("%d debug lines, want all 100", n)
		}
	})
}

// What makes up kinds does not take memory without bound.
func TestKinds(t *testing.T) {
	h := New(slog.DiscardHandler).(*handler)
	l := slog.New(New(slog.NewTextHandler(&bytes.Buffer{}, nil)))
	k := l.Handler().(*handler).kinds
	for i := range 10 * maxKinds {
		l.Info(strings.Repeat("x", 1<<10) + "y")
		l.Info("kind " + string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676)))
	}
	if len(k.of) > maxKinds {
		t.Errorf("%d kinds, want at most %d", len(k.of), maxKinds)
	}
	for x := range k.of {
		if len(x.text) > maxKindLen {
			t.Errorf("a kind of %d bytes", len(x.text))
		}
	}
	if h.Enabled(t.Context(), slog.LevelError) {
		t.Error("enabled where the handler below is not")
	}
}

func TestConcurrent(t *testing.T) {
	var mu sync.Mutex
	var b bytes.Buffer
	l := slog.New(New(slog.NewTextHandler(writer{&mu, &b}, nil)))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				l.Error("boom")
			}
		})
	}
	wg.Wait()
	if n := strings.Count(b.String(), "boom"); n < Burst || n > Burst+60 {
		t.Errorf("%d lines, want %d and one a second", n, Burst)
	}
}

type writer struct {
	mu *sync.Mutex
	b  *bytes.Buffer
}

func (w writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}
