package memnode

import (
	"bytes"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/testutil"
)

// array is where the first shard of the tests' regions has its words.
var array = &dirpb.RetainedArray{ShardId: 1, Offset: layout.RegionPageSize, Segments: 1}

// of gives the memory of a node's region.
func (n *Node) of(pg uint32) []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.regions[pg].mem.Bytes
}

// holding opens a node with regions of two placement groups that are full of ones.
func holding(t *testing.T, dir *directory, k *memory) *Node {
	t.Helper()
	dir.wantSince(1, 1, 7)
	dir.wantSince(2, 1, 7)
	n, _ := keeps(t, dir, k, same)
	for _, pg := range []uint32{1, 2} {
		dir.keys(pg, "tcp")
		b := n.of(pg)
		for i := range b[layout.RegionPageSize:] {
			b[layout.RegionPageSize+i] = 0xff
		}
	}
	return n
}

// TestRetained: a node that is disowned offers what it held, in this process or in the next one. A region that is
// wanted of that has its heap, and its words in the arrays that are named; locks, headers and the rest of the index are
// zero. It gives back what nobody may want any more.
func TestRetained(t *testing.T) {
	for name, restart := range map[string]bool{"this process": false, "the next process": true} {
		t.Run(name, func(t *testing.T) {
			dir, k := newDirectory(t), newMemory(t)
			n := holding(t, dir, k)
			first := n.Stats()
			if restart {
				crash(t, n)
			}
			dir.change(func() {
				dir.forget = true
				dir.regions = []*dirpb.WantRegion{
					{PgId: 1, NamespaceId: 1, RegionBytes: regionBytes, IndexBytes: indexBytes, Epoch: 4, Since: 8,
						Retain: &dirpb.Retained{Incarnation: first.Incarnation, Since: 7,
							Arrays: []*dirpb.RetainedArray{
								array}}}}
				dir.retain = []uint32{2}
				if restart {
					dir.refuse = status.Error(codes.FailedPrecondition, "declared lost")
				}
			})
			opened := make(chan *Node, 1)
			go func() {
				if restart {
					n, _ = keeps(t, dir, k, same)
				}
				opened <- n
			}()
			dir.until("a question", func() bool { return !dir.forget })
			dir.change(func() { dir.refuse = nil })
			n = <-opened
			dir.until("publication", func() bool { return dir.published[1].GetSince() == 8 })
			q := dir.registered[len(dir.registered)-1]
			if len(q.Retained) != 2 || q.Retained[1].PgId != 2 || q.Retained[1].Incarnation != first.Incarnation ||
				q.Retained[1].Since != 7 || q.Incarnation == first.Incarnation {
				t.Errorf("registered: %v", q)
			}
			b := n.of(1)
			if h, err := layout.ParseRegion(b); err != nil || h.Incarnation != q.Incarnation || h.Epoch != 4 {
				t.Errorf("header %+v, %v", h, err)
			}
			ones := func(b []byte) bool { return len(bytes.TrimLeft(b, "\xff")) == 0 }
			zero := func(b []byte) bool { return len(bytes.TrimLeft(b, "\x00")) == 0 }
			end := array.Offset + layout.SegmentSize
			for g := array.Offset; g < end; g += layout.GroupSize {
				if x := b[g:][:layout.GroupSize]; !zero(x[:layout.GroupSlotsOff]) || !ones(x[layout.GroupSlotsOff:]) {
					t.Errorf("group at %#x: %x", g, x)
				}
			}
			if !zero(b[end:indexBytes]) || !ones(b[indexBytes:regionBytes]) {
				t.Errorf("behind the array %x, heap %x", b[end:indexBytes], b[indexBytes:][:64])
			}
			if s := n.Stats(); s.RegisteredBytes != 2*regionBytes || len(s.Regions) != 1 {
				t.Errorf("one region is used and one retained: %+v", s)
			}
			for i, provider := range []string{"shm", "tcp"} {
				l := mustDial(t, dir, provider, rw, uint32(i))
				key := dir.keys(1, provider)
				if b, err := l.read(key.HeapRkey, key.HeapBase, 8); err != nil || !ones(b) {
					t.Errorf("%s reads %x, %v", provider, b, err)
				}
			}
			dir.change(func() { dir.retain = nil })
			dir.until("memory back", func() bool { return n.Stats().RegisteredBytes == regionBytes })
		})
	}
}

// TestRetainedNot: a region that is wanted of what is not retained is made of zeroes, and one with arrays that cannot
// be is made so the next time.
func TestRetainedNot(t *testing.T) {
	for name, old := range map[string]*dirpb.Retained{
		"of another incarnation": {Incarnation: 1, Since: 7, Arrays: []*dirpb.RetainedArray{array}},
		"of another time":        {Since: 6, Arrays: []*dirpb.RetainedArray{array}},
		"beyond": {
			Since: 7, Arrays: []*dirpb.RetainedArray{{ShardId: 1, Offset: layout.RegionPageSize, Segments: 9}}},
		"twice":         {Since: 7, Arrays: []*dirpb.RetainedArray{array, array}},
		"in the header": {Since: 7, Arrays: []*dirpb.RetainedArray{{ShardId: 1, Segments: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			dir, k := newDirectory(t), newMemory(t)
			n := holding(t, dir, k)
			old.Incarnation += n.Stats().Incarnation
			dir.change(func() {
				dir.forget = true
				dir.regions = []*dirpb.WantRegion{
					{PgId: 1, NamespaceId: 1, RegionBytes: regionBytes, IndexBytes: indexBytes, Since: 8, Retain: old}}
			})
			dir.until("publication", func() bool { return dir.published[1].GetSince() == 8 })
			if b := n.of(1)[layout.RegionPageSize:]; slices.ContainsFunc(b, func(x byte) bool { return x != 0 }) {
				t.Error("it is not of zeroes")
			}
		})
	}
}

// TestRetainedOfAnother: memory is not taken for a region of another namespace or layout.
func TestRetainedOfAnother(t *testing.T) {
	for name, w := range map[string]*dirpb.WantRegion{
		"namespace": {NamespaceId: 2, RegionBytes: regionBytes, IndexBytes: indexBytes},
		"size":      {NamespaceId: 1, RegionBytes: 2 * regionBytes, IndexBytes: indexBytes},
		"index":     {NamespaceId: 1, RegionBytes: regionBytes, IndexBytes: indexBytes / 2},
	} {
		t.Run(name, func(t *testing.T) {
			dir, k := newDirectory(t), newMemory(t)
			n := holding(t, dir, k)
			w.PgId, w.Since, w.Retain = 1, 8, &dirpb.Retained{Incarnation: n.Stats().Incarnation, Since: 7,
				Arrays: []*dirpb.RetainedArray{array}}
			dir.change(func() { dir.forget, dir.regions = true, []*dirpb.WantRegion{w} })
			dir.until("publication", func() bool { return dir.published[1].GetSince() == 8 })
			if b := n.of(1); uint64(len(b)) < w.RegionBytes || slices.ContainsFunc(b[layout.RegionPageSize:],
				func(x byte) bool {
					return x != 0
				}) {
				t.Errorf("it has %d bytes that are not all zeroes", len(b))
			}
		})
	}
}

// TestRetainedIsOutOfReach: nobody reads or writes by the keys that retained memory had, in the same namespace either,
// and the next process offers it at once.
func TestRetainedIsOutOfReach(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	n := holding(t, dir, k)
	was := map[string]*dirpb.RegionKeys{"shm": dir.keys(2, "shm"), "tcp": dir.keys(2, "tcp")}
	dir.change(func() { dir.regions, dir.retain = dir.regions[:1], []uint32{2} })
	testutil.Until(t, `len(n.Stats().Regions) == 1`, func() bool { return len(n.Stats().Regions) == 1 })
	for i, provider := range []string{"shm", "tcp"} {
		for j, try := range []func(*lane) error{
			func(l *lane) error { _, err := l.read(was[provider].HeapRkey, was[provider].HeapBase, 8); return err },
			func(l *lane) error { return l.write(was[provider].HeapRkey, was[provider].HeapBase, "late") },
			func(l *lane) error { return l.cas(was[provider].IndexRkey, was[provider].IndexBase+word, 0, 1) },
		} {
			refused(t, "retained memory over "+provider, try(mustDial(t, dir, provider, rw, uint32(3*i+j))))
		}
	}
	crash(t, n)
	keeps(t, dir, k, same)
	if q := dir.registered[1]; len(q.Retained) != 1 || q.Retained[0].PgId != 2 {
		t.Errorf("offered: %v", q)
	}
}

// TestRetainedMakesRoom: what is retained gives way to a region that is wanted.
func TestRetainedMakesRoom(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	n := holding(t, dir, k)
	dir.change(func() {
		dir.forget, dir.retain = true, []uint32{1, 2}
		dir.regions = []*dirpb.WantRegion{
			{PgId: 3, NamespaceId: 1, RegionBytes: 1 << 20, IndexBytes: indexBytes, Since: 8}}
	})
	dir.keys(3, "tcp")
	if s := n.Stats(); s.RegisteredBytes != 1<<20 {
		t.Errorf("%+v", s)
	}
}
