package lead

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const someNodes = 20

// newSome is newFilling on that many memory nodes that lend 64 MiB each, in the namespace that q asks for.
func newSome(t *testing.T, q *dirpb.CreateNamespaceRequest) *filling {
	w := newWorld(t)
	for i := range someNodes {
		name := fmt.Sprint("m", i+1)
		r := w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
				Name: name, Incarnation: 1, CapacityBytes: 64 << 20, Domain: fmt.Sprint("rack", i%4),
				Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}},
			}}}})
		w.l.Heartbeat(w.s, w.now, r.NodeID, 1, nil)
	}
	r := w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{Namespace: q}}})
	w.publish()
	f := &filling{
		world: w, ns: r.Namespace.Id, rng: rand.New(rand.NewPCG(1, 2)), lump: make(map[uint32]float64),
		size: make(map[uint32]float64), skew: make(map[uint32]float64),
		dirty: make(map[uint32]float64), parts: make(map[uint32]float64), ends: make(map[uint32]time.Duration),
		copies: 64 << 20, matures: time.Second,
	}
	f.janitor = w.open(f.ns)
	f.l.opts.ScrubInterval = 0
	return f
}

// TestExtend: a namespace that begins on some of the memory nodes takes further ones as it fills, until it has all, and
// what it holds then fills them; one with a number of its own, or with a limit that it has room for, stays where it is.
func TestExtend(t *testing.T) {
	for name, x := range map[string]struct {
		q           *dirpb.CreateNamespaceRequest
		first, last int
	}{
		"grows": {&dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 32 << 20}, fsm.FirstNodes,
			someNodes},
		"its own": {&dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 32 << 20, Nodes: 5}, 5, 5},
		"at a limit": {&dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: 32 << 20,
			LimitBytes: 60 << 20}, 3, 3},
	} {
		t.Run(name, func(t *testing.T) {
			f := newSome(t, x.q)
			if n := len(f.s.PGs(f.ns)); n != x.first {
				t.Fatalf("%d placement groups, want %d", n, x.first)
			}
			f.rate = someNodes * float64(32<<20) / 64 / 600
			written, waited, full := 0.0, 0, math.Inf(1)
			for range 20_000 {
				switch f.write() {
				case 0:
					written += f.rate
				case 1:
					waited++
				default:
					full = f.full()
				}
				if full < 2 {
					break
				}
				f.publish()
				f.tick()
			}
			t.Logf("full at %.3f on %d placement groups, %d moves, writers waited %d ticks", full, len(f.s.PGs(f.ns)),
				f.moves, waited)
			if n := len(f.s.PGs(f.ns)); n != x.last || full < 0.7 || full > 1 {
				t.Errorf("full at %.3f with %d placement groups, want %d", full, n, x.last)
			}
		})
	}
}
