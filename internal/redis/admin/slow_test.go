package admin

import (
	"math"
	"strings"
	"testing"
	"time"
)

// TestSlowLogBounds: entries, and bytes of them, are bounded; a lower bound holds at once.
func TestSlowLogBounds(t *testing.T) {
	var l Slow
	l.SetTime(5)
	if l.logs(5*time.Microsecond-1) || !l.logs(5*time.Microsecond) {
		t.Error("it logs from another time on than 5 µs")
	}
	for _, off := range []int64{-1, math.MaxInt64} {
		if l.SetTime(off); l.logs(time.Hour) {
			t.Errorf("it logs with %d", off)
		}
	}
	l.SetLen(3)
	for range 5 {
		l.add(&SlowCommand{Args: []string{"x"}})
	}
	if all := l.Newest(2); len(all) != 2 || all[0].ID != 4 || all[1].ID != 3 {
		t.Errorf("%d entries, the newest is %+v", len(all), all[0])
	}
	if n, _ := l.Size(); n != 3 {
		t.Errorf("%d entries", n)
	}
	if l.SetLen(1); len(l.Newest(-1)) != 1 {
		t.Error("more than one entry")
	}
	l.SetLen(math.MaxInt64)
	long := strings.Repeat("x", 1<<20)
	for range 10 {
		l.add(&SlowCommand{Args: []string{long}})
	}
	if n, bytes := l.Size(); n != 3 || bytes > maxSlowBytes {
		t.Errorf("%d entries, %d bytes", n, bytes)
	}
	l.SetLen(0)
	if n, bytes := l.Size(); n != 0 || bytes != 0 {
		t.Errorf("%d entries, %d bytes", n, bytes)
	}
}

// TestLatencies: what is kept of each second, how much of it, and how it is drawn.
func TestLatencies(t *testing.T) {
	var l latencies
	at := func(s int64) time.Time { return time.Unix(1000+s, 0) }
	for i, ms := range []int64{100, 200, 150, 400, 100} {
		l.add(slowCommand, at(int64(i)*100), ms)
		l.add(slowCommand, at(int64(i)*100), ms-50) // a shorter one of the same second
	}
	e, ok := l.find([]byte("command"))
	if !ok || len(e.samples) != 5 || e.samples[3] != (latencySample{1300, 400}) || e.max != 400 {
		t.Errorf("%v %+v", ok, e)
	}
	want := "command - high 400 ms, low 100 ms (all time high 400 ms)\n" + strings.Repeat("-", 80) + "\n" +
		"   # \n   | \n o | \n_|#|_\n     \n65311\nmmmm0\n    s\n"
	if got := e.graph("command", 1410); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	mean, deviation, period := e.summary(1410)
	if mean != 190 || deviation != 88 || period != 82 {
		t.Errorf("mean %d, deviation %d, period %v", mean, deviation, period)
	}
	for i := range int64(2 * latencySamples) {
		l.add(fastCommand, at(i), i)
	}
	if e, _ := l.find([]byte("fast-command")); len(e.samples) != latencySamples || e.samples[0].ms != latencySamples ||
		e.max != 2*latencySamples-1 {
		t.Errorf("%d samples from %+v on, max %d", len(e.samples), e.samples[0], e.max)
	}
	if n := l.reset([][]byte{[]byte("command"), []byte("x")}); n != 1 {
		t.Errorf("%d events were reset", n)
	}
	if n := l.reset(nil); n != 1 {
		t.Errorf("%d events were reset", n)
	}
}
