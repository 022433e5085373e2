package index

import (
	"reflect"
	"testing"
	"unsafe"
)

// The fields that are neither request nor answer of a key operation take 256 bytes at most: every operation
// of a session is such an Op, and is cleared for its next use.
func TestOpIsThin(t *testing.T) {
	var o Op
	request := unsafe.Offsetof(o.slot)
	answer := unsafe.Sizeof(o.Err) + unsafe.Sizeof(o.Version) + unsafe.Sizeof(o.Record)
	if state := unsafe.Sizeof(o) - request - answer; state > 256 {
		t.Errorf("an Op's state: %d bytes of %d, want 256 at most", state, unsafe.Sizeof(o))
	}
}

// An Op and each of its parts have 60 fields at most, and a part counts as one: a reader holds no more in mind.
func TestOpHasFewFields(t *testing.T) {
	for _, of := range []reflect.Type{reflect.TypeFor[Op](), reflect.TypeFor[far](), reflect.TypeFor[rare]()} {
		if n := of.NumField(); n > 60 {
			t.Errorf("%v: %d fields, want 60 at most", of, n)
		}
	}
}

// The far of a GET without a hint, of an insert and of a sync is cleared after each. It takes 1720 bytes at most.
func TestFarIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(far{}); n > 1720 {
		t.Errorf("%d bytes, want 1720 at most", n)
	}
}

// HasRare reports whether o has, since its last Reset, used what few operations need.
func (o *Op) HasRare() bool { return o.far != nil && o.rare != nil && o.rarely }
