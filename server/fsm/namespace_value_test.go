package fsm

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// A namespace has a longest value from level 2 on, of 512 MiB at most. It comes with the namespace or is set later, and
// nothing else changes it. Sessions are shown it.
func TestMaxValue(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(1))
	h.do(register("m1", 100))
	h.refuse(create(&dirpb.CreateNamespaceRequest{Name: "a", MaxValueBytes: 1}), ErrRefused, "level 2")
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "a"}))
	h.refuse(set(&dirpb.SetNamespaceRequest{Name: "a", MaxValueBytes: 1}), ErrRefused, "level 2")
	h.do(raise(2))
	const most = layout.MaxValueLen
	h.refuse(set(&dirpb.SetNamespaceRequest{Name: "a", MaxValueBytes: most + 1}), ErrInvalid, "want 1B..512 MiB")
	h.refuse(create(&dirpb.CreateNamespaceRequest{Name: "b", MaxValueBytes: most + 1}), ErrInvalid, "want 1B..512 MiB")
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", KeepLimit: true, MaxValueBytes: most}))
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", LimitBytes: 1 << 20}))
	x := h.do(openBy(false, "")).Session
	if n := h.s.Map(x).Namespaces[0].MaxValueBytes; n != most {
		t.Errorf("a session is shown %d", n)
	}
	if w := h.do(create(&dirpb.CreateNamespaceRequest{Name: "b", BytesPerNode: 24 << 20,
		MaxValueBytes: 1})).Namespace; w.MaxValueBytes != 1 {
		t.Errorf("created with %v", w)
	}
	// Chunks of namespaces stay as they were made.
	if a, b := h.s.Namespace(1).ChunkPayload, h.s.Namespace(2).ChunkPayload; a != 0 || b != layout.ChunkPayload {
		t.Errorf("chunks of %d and %d bytes", a, b)
	}
}
