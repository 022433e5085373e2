package gateway

import (
	"regexp"
	"strings"
	"testing"
	"time"
)

// latencyNumbers are what two servers need not have alike.
var latencyNumbers = regexp.MustCompile(`:\d+|\b\d+(\.\d+)?`)

// TestLatencyLikeRedis compares the monitor of latencies with a redis-server's, but for times.
func TestLatencyLikeRedis(t *testing.T) {
	sock := startRedis(t, "--enable-debug-command", "yes")
	addr, _ := start(t, Options{Databases: fakes(1), Debug: true})
	ours, theirs := dial(t, "tcp", addr), dial(t, "unix", sock)
	for _, line := range strings.Split("LATENCY LATEST;LATENCY HISTORY command;LATENCY HISTORY nosuch;LATENCY GRAPH "+
		"command;LATENCY GRAPH nosuch;LATENCY RESET;LATENCY RESET command x;"+
		"CONFIG GET latency-monitor-threshold;CONFIG SET latency-monitor-threshold 5;CONFIG GET "+
		"latency-monitor-threshold;CONFIG SET slowlog-log-slower-than -1;SET a 1;LATENCY LATEST;"+
		"DEBUG SLEEP 0.01;LATENCY LATEST;LATENCY HISTORY command;LATENCY HISTORY COMMAND;LATENCY GRAPH "+
		"command;LATENCY GRAPH fast-command;LATENCY RESET x;"+
		"LATENCY RESET command;LATENCY RESET command;LATENCY LATEST;"+
		"DEBUG SLEEP 0.01;LATENCY RESET;LATENCY HISTORY command;CONFIG SET latency-monitor-threshold 0;DEBUG SLEEP "+
		"0.01;LATENCY LATEST;LATENCY NOSUCH;LATENCY GRAPH;LATENCY HELP", ";") {
		cmd := strings.Fields(line)
		got, want := ours.do(t, cmd...), theirs.do(t, cmd...)
		if strings.HasPrefix(line, "LATENCY LATEST") || strings.HasPrefix(line, "LATENCY HISTORY") ||
			strings.HasPrefix(line, "LATENCY GRAPH") {
			got, want = latencyNumbers.ReplaceAllString(got, "N"), latencyNumbers.ReplaceAllString(want, "N")
		}
		if strings.HasPrefix(line, "LATENCY GRAPH command") { // the length is of numbers
			_, got, _ = strings.Cut(got, "\r\n")
			_, want, _ = strings.Cut(want, "\r\n")
		}
		if got != want {
			t.Errorf("%s\n got %q\nwant %q", line, got, want)
		}
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
