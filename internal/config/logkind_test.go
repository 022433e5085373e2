package config

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// TestLogKinds: numbers and names in a message do not make kinds of their own, in either format.
func TestLogKinds(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		var out bytes.Buffer
		h := Log{Level: "info", Format: format}.Logger(&out, slog.LevelInfo).Handler()
		now := time.Unix(1_800_000_000, 0)
		for i := range 5000 {
			for _, text := range []string{fmt.Sprintf("session %d refused", i),
				fmt.Sprintf("memory node %q is gone", fmt.Sprint("m", i))} {
				if err := h.Handle(t.Context(), slog.NewRecord(now, slog.LevelWarn, text, 0)); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, kind := range []string{"refused", "is gone"} {
			if n := strings.Count(out.String(), kind); n != logBurst {
				t.Errorf("%s: %d of 5000 lines that differ in a number or name, want %d", format, n, logBurst)
			}
		}
		for i := range 2 * logKinds { // memory is bounded, whatever is said
			if err := h.Handle(t.Context(), slog.NewRecord(now, slog.LevelWarn, strings.Repeat("x", i+1), 0)); err !=
				nil {
				t.Fatal(err)
			}
		}
		if n := len(h.(limitedLog).kinds.mu.by); n > logKinds+1 {
			t.Errorf("%s: %d kinds are remembered", format, n)
		}
	}
}
