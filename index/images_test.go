package index_test

import (
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/internal/layout"
)

// TestImages: a scan shows every group of a segment once. With images alone it READs the segment at one replica, finds
// no record, and tells whether there was room for any.
func TestImages(t *testing.T) {
	const groups = layout.SegmentGroups + 1
	for r := uint8(1); r <= 3; r++ {
		for room, full := range map[int]bool{groups: false, groups - 1: false, 0: true} {
			w := newWorld(r, 64)
			must(t, w.client(1).do(t, "put", "k", "v"))
			c := w.client(2)
			c.room = room
			must(t, c.do(t, "scan", "k", "images=1"))
			if p := c.op.Scan; c.verbs != 1 || c.bytes != layout.SegmentSize || len(p.Found) != 0 || p.Full != full {
				t.Errorf("r=%d, room for %d: %d verbs, %d bytes, found %d, full %t", r, room, c.verbs, c.bytes,
					len(p.Found), p.Full)
			}
			for i, off := range c.images {
				if off != uint64(i)*layout.GroupSize {
					t.Errorf("image %d is of %#x", i, off)
				}
			}
			if len(c.images) != groups {
				t.Errorf("%d images, want %d", len(c.images), groups)
			}
			c.images = nil
			if must(t, c.do(t, "scan")); len(c.images) != groups || len(c.op.Scan.Found) != 1 {
				t.Errorf("r=%d: %d images of a scan that found %d", r, len(c.images), len(c.op.Scan.Found))
			}
		}
	}
}

// TestPageUsedAgain: a page that goes on with the share of a move that is over ends, whatever the last read left in it.
func TestPageUsedAgain(t *testing.T) {
	w := newWorld(1, 64)
	must(t, w.client(1).do(t, "put", "k", "v"))
	c := w.client(2)
	at := fmt.Sprint((layout.SegmentGroups + 1) * layout.GroupSlots)
	must(t, c.do(t, "scan", "k", "from="+at, "next="+at))
	if p := c.op.Scan; p.Next != 0 || len(p.Found) != 0 || c.verbs != 0 {
		t.Errorf("goes on at %d, with %d records by %d verbs", p.Next, len(p.Found), c.verbs)
	}
}
