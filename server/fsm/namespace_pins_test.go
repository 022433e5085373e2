package fsm

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// A cache says from level 3 on how much of it may be pinned, 90 % at most. It comes with the namespace or is set later,
// also to nothing, and nothing else changes it. Sessions are shown it.
func TestMaxPinned(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(2))
	h.do(register("m1", 200))
	cache := func(name string, percent uint32) *dirpb.CreateNamespaceRequest {
		return &dirpb.CreateNamespaceRequest{Name: name, Mode: dirpb.NamespaceMode_NAMESPACE_CACHE,
			BytesPerNode: 48 << 20, MaxPinnedPercent: percent}
	}
	pins := func(name string, percent uint32) *dirpb.SetNamespaceRequest {
		return &dirpb.SetNamespaceRequest{Name: name, KeepLimit: true, MaxPinnedPercent: proto.Uint32(percent)}
	}
	h.refuse(create(cache("a", 30)), ErrRefused, "pins begin with level 3, and the directory is at level 2")
	h.do(create(cache("a", 0)))
	h.refuse(set(pins("a", 30)), ErrRefused, "level 3")
	h.do(raise(3))
	h.refuse(set(pins("a", 91)), ErrInvalid, "want 0..90")
	h.refuse(create(cache("b", 91)), ErrInvalid, "want 0..90")
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "store", BytesPerNode: 48 << 20}))
	h.refuse(set(pins("store", 1)), ErrInvalid, "only a cache has pins")
	x := h.do(openBy(false, "")).Session
	shown := func(want uint32) {
		t.Helper()
		if n := h.s.Map(x).Namespaces[0].MaxPinnedPercent; n != want {
			t.Errorf("a session is shown %d %%, want %d", n, want)
		}
	}
	shown(0)
	h.do(set(pins("a", 90)))
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", LimitBytes: 1 << 20}))
	shown(90)
	h.do(set(pins("a", 0)))
	shown(0)
	if w := h.do(create(cache("b", 30))).Namespace; w.MaxPinnedPercent != 30 {
		t.Errorf("created with %v", w)
	}
}
