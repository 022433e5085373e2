package engine

import (
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// imageOf is a group with words in its first slots.
func imageOf(words ...layout.Word) layout.Group {
	g := make(layout.Group, layout.GroupSize)
	for i, w := range words {
		at := layout.SlotOff(i)
		for k := range 8 {
			g[at+uint64(k)] = byte(w >> (8 * k))
		}
	}
	return g
}

// TestMirrorAge: an image is found until its words' life is over, whatever the count of epochs.
func TestMirrorAge(t *testing.T) {
	w := layout.MakeLive(0, 7, 0, 99)
	for _, began := range []uint32{1, 1 << 31, 1<<32 - 10} {
		m := newMirror(1 << 16)
		m.put(1, 1, 0, imageOf(0, w), began)
		got, slot, ok := m.find(1, 1, 7, began+layout.WordLifeEpochs-1)
		if !ok || got != w || slot != 1 {
			t.Errorf("epoch %d: %v in slot %d, %t; want %v in slot 1", began, got, slot, ok, w)
		}
		if _, _, ok := m.find(1, 1, 7, began+layout.WordLifeEpochs); ok {
			t.Errorf("epoch %d: found after a word's life", began)
		}
	}
}

// TestMirrorFinds one word with the fingerprint, in the home group or else in the stash, and none of several.
func TestMirrorFinds(t *testing.T) {
	word := func(fp uint16, unit uint32) layout.Word { return layout.MakeLive(0, fp, 0, unit) }
	m := newMirror(1 << 16)
	_, stash := layout.GroupOff(0, 2)
	m.put(1, 2, 0, imageOf(word(7, 1), word(8, 2), word(8, 3), 0, word(9, 4)), 1)
	m.put(1, 2, stash, imageOf(0, word(5, 5)), 1)
	for hash, want := range map[uint64]struct {
		slot uint8
		ok   bool
	}{7: {0, true}, 9: {4, true}, 5: {index.StashSlot + 1, true}, 8: {}, 6: {}, 7 | 1<<12: {}, 7 | 1<<43: {}} {
		if _, slot, ok := m.find(1, 2, hash, 1); ok != want.ok || ok && slot != want.slot {
			t.Errorf("hash %#x: slot %d, %t; want %+v", hash, slot, ok, want)
		}
	}
	if _, _, ok := m.find(2, 2, 7, 1); ok {
		t.Error("found in an array of which there are no images")
	}
	m.put(1, 2, 1<<40, imageOf(word(7, 1)), 1) // beyond the array
	m.put(1, 2, 0, imageOf(), 2)
	if _, _, ok := m.find(1, 2, 7, 2); ok {
		t.Error("found in an image that another has replaced")
	}
}

// TestMirrorBound: what images take is counted, stays within the bound, and comes back when an array goes.
func TestMirrorBound(t *testing.T) {
	const segments, most = 8, 12 << 10
	full := make([]layout.Word, 21)
	for i := range full {
		full[i] = layout.MakeLive(0, uint16(i), 0, uint32(i))
	}
	if n := imagePtrLen + imageLen(len(full)); n > int64(9*len(full)) {
		t.Errorf("%d keys take %d bytes, want at most 9 a key", len(full), n)
	}
	m := newMirror(most)
	groups := uint64(segments * (layout.SegmentGroups + 1))
	for range 2 {
		for i := range groups {
			m.put(1, segments, i*layout.GroupSize, imageOf(full...), 1)
		}
		if n := m.used.Load(); n > most || n < most-200 {
			t.Fatalf("%d bytes, at most %d", n, most)
		}
	}
	for i := range groups {
		m.put(1, segments, i*layout.GroupSize, imageOf(full[:1]...), 2)
	}
	if n, want := m.used.Load(), int64(groups)*(imagePtrLen+imageLen(1)); n != want {
		t.Errorf("%d bytes with short images, want %d", n, want)
	}
	m.put(2, 1<<20, 0, imageOf(full...), 1)
	if _, _, ok := m.find(2, 1<<20, 0, 1); ok {
		t.Error("an array larger than the bound has images")
	}
	at := (*m.shards.Load())[1]
	m.keep(&View{Shards: []Shard{{ID: 1}}})
	if _, _, ok := m.find(1, segments, 0, 2); !ok {
		t.Error("an array that the map has is forgotten")
	}
	m.keep(&View{})
	if n := m.used.Load(); n != 0 || len(*m.shards.Load()) != 0 {
		t.Errorf("%d bytes are left when the array is gone", n)
	}
	if _, _, n := at.find(0, 0, 2); n != 0 {
		t.Error("found in an array that is gone")
	}
}

// TestMirrorAsked: whoever waits for it is told once that somebody asks, and anew only when somebody has asked since.
func TestMirrorAsked(t *testing.T) {
	c := &Core{}
	c.asking.tell = make(chan struct{}, 1)
	told := func(ch <-chan struct{}) bool {
		select {
		case <-ch:
			return true
		default:
			return false
		}
	}
	for range 2 {
		ch := c.MirrorAsked()
		if told(ch) {
			t.Fatal("told, and nobody has asked")
		}
		for range 3 {
			c.asking.ask()
		}
		if !told(ch) || told(ch) {
			t.Fatal("not told once")
		}
		c.asking.ask() // of before the next MirrorAsked: those who go on asking are heard then
	}
}
