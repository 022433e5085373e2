package config

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// TestLogFloods: of one kind there are a few lines at once and one a second after that, which
// says what it left out; other kinds do not suffer.
func TestLogFloods(t *testing.T) {
	var out bytes.Buffer
	h := Log{Level: "info", Format: "text"}.Logger(&out, slog.LevelInfo).Handler()
	now := time.Unix(1_800_000_000, 0)
	say := func(text string, attrs ...slog.Attr) {
		t.Helper()
		r := slog.NewRecord(now, slog.LevelWarn, text, 0)
		r.AddAttrs(attrs...)
		if err := h.Handle(context.Background(), r); err != nil {
			t.Fatal(err)
		}
	}
	lines := func(text string) int { return strings.Count(out.String(), `msg="`+text+`"`) }
	const seconds = 30
	for range seconds * 1000 {
		now = now.Add(time.Millisecond)
		say("wrong password", slog.String("peer", "1.2.3.4"))
	}
	if n := lines("wrong password"); n < seconds || n > seconds+logBurst {
		t.Errorf("%d lines in %d seconds", n, seconds)
	}
	if !strings.Contains(out.String(), "peer=1.2.3.4 suppressed=999\n") {
		t.Errorf("what was left out is not told:\n%s", out.String()[max(0, out.Len()-1000):])
	}
	say("something else")
	h = h.WithAttrs([]slog.Attr{slog.Int("a", 1)}) // is limited with the others
	for range 1000 {
		say("wrong password")
	}
	if n := lines("wrong password"); n > seconds+logBurst+1 {
		t.Errorf("%d lines", n)
	}
	if lines("something else") != 1 {
		t.Error("another kind was left out")
	}
	for range 1000 {
		say(auditLine)
	}
	if n := strings.Count(out.String(), "msg="+auditLine); n != 1000 {
		t.Errorf("%d of 1000 lines of the audit trail", n)
	}
	for i := range 2 * logKinds { // memory is bounded, whatever is said
		say(fmt.Sprint("kind ", i))
	}
	if n := len(h.(limitedLog).kinds.mu.by); n > logKinds+1 {
		t.Errorf("%d kinds are remembered", n)
	}
	if n := lines("kind 2000"); n > 1 {
		t.Errorf("%d lines", n)
	}
}
