package gateway

import (
	"regexp"
	"strings"
	"testing"
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
