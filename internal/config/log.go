package config

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

const (
	// Of one kind there may be logBurst lines at once, and one each logPause after that.
	logBurst, logPause = 10, time.Second
	// auditLine is the message of package server's audit trail, of which no line is left out.
	auditLine = "audit"
	// logKinds bounds how many kinds are told apart; the rest count as one.
	logKinds = 1024
)

// limitedLog is a slog.Handler that leaves out lines if there are too many of one kind, which is
// those of one message up to its first digit or quotation mark: a peer that makes the same trouble again and again does
// not fill the disk, nor hide what else is said. The next line of the kind says how many there were meanwhile. Lines of
// level debug are not limited, nor are those of the audit trail, which only those with rights can cause.
type limitedLog struct {
	slog.Handler
	kinds *logLimits
}

// logLimits is what a limitedLog and those derived from it share.
type logLimits struct {
	mu struct {
		sync.Mutex
		by map[string]*logKind
	}
}

// logKind is a bucket of logBurst tokens, kept as the time at which it will be full.
type logKind struct {
	full       time.Time
	suppressed int
}

func limitLog(h slog.Handler) slog.Handler {
	l := &logLimits{}
	l.mu.by = make(map[string]*logKind)
	return limitedLog{h, l}
}

func (h limitedLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return limitedLog{h.Handler.WithAttrs(attrs), h.kinds}
}

func (h limitedLog) WithGroup(name string) slog.Handler {
	return limitedLog{h.Handler.WithGroup(name), h.kinds}
}

func (h limitedLog) Handle(ctx context.Context, r slog.Record) error {
	if r.Level <= slog.LevelDebug || r.Message == auditLine {
		return h.Handler.Handle(ctx, r)
	}
	ok, suppressed := h.kinds.admit(lineKind(r.Message), r.Time)
	if !ok {
		return nil
	}
	if suppressed > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("suppressed", suppressed))
	}
	return h.Handler.Handle(ctx, r)
}

// lineKind is a message without what differs from one line of a kind to the next.
func lineKind(message string) string {
	if i := strings.IndexAny(message, `0123456789"`); i > 0 {
		return message[:i]
	}
	return message
}

// admit reports whether a line of a kind may be written now, and how many were not since the
// last.
func (l *logLimits) admit(kind string, now time.Time) (ok bool, suppressed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.mu.by[kind]
	if k == nil {
		if len(l.mu.by) >= logKinds {
			kind = ""
			k = l.mu.by[kind]
		}
		if k == nil {
			k = &logKind{}
			l.mu.by[kind] = k
		}
	}
	if k.full.Before(now) {
		k.full = now
	}
	if k.full.Sub(now) > (logBurst-1)*logPause {
		k.suppressed++
		return false, 0
	}
	k.full = k.full.Add(logPause)
	suppressed, k.suppressed = k.suppressed, 0
	return true, suppressed
}
