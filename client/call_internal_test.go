package client

import (
	"testing"
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// Every GET clears a call. Whole cache lines lie side by side in the allocator's pages, so a byte more costs two.
func TestCallLines(t *testing.T) {
	if n := unsafe.Sizeof(call{}); n > 7*64 {
		t.Errorf("a call has %d bytes, want at most %d", n, 7*64)
	}
}

// A transaction that keeps a key is told no value of one whose value is in the tier: it is read by a GET, as a long one
// is.
func TestKeptStubHasNoValue(t *testing.T) {
	s := layout.Stub{Version: 3, Len: 40, ValueLen: 7, Copies: 1}
	s.At[0] = layout.ObjectAt{Volume: 1, At: 1}
	r := layout.Record{Key: []byte("k"), Value: layout.AppendStub(nil, &s, nil)}
	r.Version, r.Stub = 9, true
	q := &call{item: &Item{}}
	q.Kind, q.typed = index.Prepare, true
	q.Take(&r, nil)
	if q.item.Version != 9 || q.item.Value != nil {
		t.Errorf("%+v", q.item)
	}
	if n := lenOf(&r); n != 7 {
		t.Errorf("a scan says %d bytes, want 7", n)
	}
}
