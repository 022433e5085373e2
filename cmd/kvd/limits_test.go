package main

import (
	"log/slog"
	"math"
	"os"
	"runtime/debug"
	"testing"
)

// A directory node collects garbage seldom, within the memory that there is, unless its environment says otherwise.
func TestCollectSeldom(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(math.MaxInt64))
	for _, name := range []string{"GOGC", "GOMEMLIMIT", "AUTOMEMLIMIT"} {
		t.Setenv(name, "") // so that it is as it was afterwards
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
	collectSeldom(slog.New(slog.DiscardHandler))
	if got := debug.SetGCPercent(100); got != 400 {
		t.Errorf("the garbage collector's percentage is %d", got)
	}
	if got := debug.SetMemoryLimit(math.MaxInt64); got == math.MaxInt64 || got < 64<<20 {
		t.Errorf("the memory limit is %d", got)
	}
	t.Setenv("GOGC", "70")
	t.Setenv("GOMEMLIMIT", "1GiB")
	collectSeldom(slog.New(slog.DiscardHandler))
	if p, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(math.MaxInt64); p != 100 || limit != math.MaxInt64 {
		t.Errorf("the environment's words were overruled: %d %%, %d bytes", p, limit)
	}
}
