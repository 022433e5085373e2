package operate

import (
	"bufio"
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// The share of a CPU is known from the second view on, and not over a restart of a memory node.
func TestTopCPU(t *testing.T) {
	view := func(nanos uint64) *dirpb.StatusReply {
		return &dirpb.StatusReply{Map: &dirpb.Map{Nodes: []*dirpb.Node{{Id: 1, Name: "m1"}}},
			NodeStats: map[uint32]*dirpb.NodeStats{1: {DataPathCpuNanos: nanos}}}
	}
	if got := nodeLines(nil, view(5), time.Second); got[0].CPU != nil {
		t.Errorf("the first view: %v", *got[0].CPU)
	}
	if got := nodeLines(view(6), view(5), time.Second); got[0].CPU != nil {
		t.Errorf("after a restart: %v", *got[0].CPU)
	}
	if got := nodeLines(view(0), view(500_000_000), 2*time.Second); got[0].CPU == nil || *got[0].CPU != 25 {
		t.Errorf("half a second of two: %+v", got[0])
	}
}

// On a terminal a view takes the place of the one before; elsewhere nothing moves the cursor.
func TestTopClears(t *testing.T) {
	for _, terminal := range []bool{true, false} {
		var text bytes.Buffer
		out := &ctl.Output{Writer: bufio.NewWriter(&text), Terminal: terminal}
		a := &commands{ctl.New(strings.NewReader(""), out, &bytes.Buffer{})}
		t.Setenv("NO_COLOR", "1")
		for n := range 2 {
			if err := a.printTop(&dirpb.StatusReply{}, nil, n, 10); err != nil {
				t.Fatal(err)
			}
		}
		if err := out.Flush(); err != nil {
			t.Fatal(err)
		}
		want := 0
		if terminal {
			want = 2
		}
		if got := strings.Count(text.String(), "\x1b[H\x1b[J"); got != want || !terminal &&
			strings.Contains(text.String(), "\x1b") {
			t.Errorf("terminal %v: cleared %d times in %q", terminal, got, text.String())
		}
	}
}
