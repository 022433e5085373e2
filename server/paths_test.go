package server

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// So are a memory node's words about its adapters.
func TestCleanStats(t *testing.T) {
	long := strings.Repeat("x", 1000)
	x := &dirpb.NodeStats{Connections: 7, Fabrics: []*dirpb.Fabric{nil,
		{Device: "rxe0\x1b[2J", Gid: long, GidType: long, TrafficClass: 104}}}
	for range 100 {
		x.Fabrics = append(x.Fabrics, &dirpb.Fabric{Device: long})
	}
	x = cleanStats(x)
	if len(x.Fabrics) != 3 || proto.Size(x) > 400 || x.Connections != 7 || x.Fabrics[0].Device != "rxe0[2J" ||
		x.Fabrics[0].TrafficClass != 104 {
		t.Errorf("kept %d bytes: %v", proto.Size(x), x)
	}
	if cleanStats(nil) != nil {
		t.Error("nothing became something")
	}
}

// A session's words about its paths are bounded, and write over nobody's terminal.
func TestCleanPaths(t *testing.T) {
	if cleanPaths(nil) != nil {
		t.Error("nothing new became something")
	}
	long := strings.Repeat("ä", 1000)
	q := &dirpb.ClientPaths{Host: "h\x1b[2J\n" + long, Adapter: true}
	for range 100 {
		q.Paths = append(q.Paths, &dirpb.ClientPath{Provider: long, Reason: "a\xffb\u202e", Detail: long,
			Connections: 3})
	}
	q.Paths[0] = nil
	p := cleanPaths(q)
	if len(p.Paths) != mostPaths || proto.Size(p) > 8*300+100 || strings.ContainsAny(p.Host, "\x1b\n\ufffd") ||
		!strings.HasPrefix(p.Host, "h[2Jää") || !p.Adapter {
		t.Errorf("kept %d bytes: %v", proto.Size(p), p)
	}
	if x := p.Paths[1]; x.Reason != "ab" || x.Connections != 3 || len(x.Detail) > longestPath || x.Detail == "" {
		t.Errorf("a path became %v", x)
	}
}
