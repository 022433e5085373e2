// Package loglimit keeps a log readable, and a disk from filling, while something goes wrong
// many thousands of times a second: of each kind of line it lets [Burst] through at once, and
// one a second after that.
//
// It leaves formatting and levels to the handler that it wraps. Lines of one kind have the same
// level and the same message up to its first digit or quotation mark; attributes make no
// difference. A line that follows suppressed ones of its kind says how many. Debug lines,
// which somebody asked for, all pass.
//
// Start with [New]. A handler may be used concurrently. The idea is that of zap's sampler,
// with a token bucket in the place of its counter, so that the first lines are never lost.
package loglimit

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Burst is how many lines of one kind pass at once.
const Burst = 30

const (
	maxKinds   = 1024 // remembered; what makes more of them forgets all
	maxKindLen = 64   // bytes
)

// New wraps h.
func New(h slog.Handler) slog.Handler {
	return &handler{next: h, kinds: &kinds{of: map[kind]*bucket{}}}
}

// handler is h with some attributes or groups; all made of one share what they counted.
type handler struct {
	next  slog.Handler
	kinds *kinds
}

type kinds struct {
	mu sync.Mutex
	of map[kind]*bucket
}

type kind struct {
	level slog.Level
	text  string
}

// bucket has a token for every line that may pass.
type bucket struct {
	tokens     float64
	last       time.Time
	suppressed uint64
}

func (h *handler) Enabled(ctx context.Context, l slog.Level) bool { return h.next.Enabled(ctx, l) }

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{next: h.next.WithAttrs(attrs), kinds: h.kinds}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{next: h.next.WithGroup(name), kinds: h.kinds}
}

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelInfo {
		return h.next.Handle(ctx, r)
	}
	suppressed, ok := h.kinds.take(kindOf(r), time.Now())
	if !ok {
		return nil
	}
	if suppressed > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Uint64("suppressed", suppressed))
	}
	return h.next.Handle(ctx, r)
}

func kindOf(r slog.Record) kind {
	text := r.Message[:min(len(r.Message), maxKindLen)]
	if i := strings.IndexAny(text, `0123456789"`); i >= 0 {
		text = text[:i]
	}
	return kind{r.Level, strings.Clone(text)} // a message may be long
}

// take reports whether a line of k passes, and how many have not since the last that did.
func (s *kinds) take(k kind, now time.Time) (suppressed uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.of[k]
	if b == nil {
		if len(s.of) >= maxKinds {
			clear(s.of)
		}
		b = &bucket{tokens: Burst, last: now}
		s.of[k] = b
	}
	b.tokens = min(Burst, b.tokens+max(now.Sub(b.last).Seconds(), 0))
	b.last = now
	if b.tokens < 1 {
		b.suppressed++
		return 0, false
	}
	b.tokens--
	suppressed, b.suppressed = b.suppressed, 0
	return suppressed, true
}
