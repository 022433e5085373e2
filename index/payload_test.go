package index_test

import (
	"slices"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/layout"
)

// TestChunkPayload: readers go by what a manifest says of its chunks, whatever they write themselves. So does a
// janitor that moves one. Full chunks of the longest payload lie in places of 2 MiB.
func TestChunkPayload(t *testing.T) {
	for _, c := range []struct {
		payload uint32
		units   []uint32 // of the chunks' places
	}{{0, []uint32{34 << 10, 31 << 10}}, {layout.ChunkPayload, []uint32{32 << 10, 31 << 10}},
		{1<<20 - 32, []uint32{16 << 10, 16 << 10, 16 << 10, 14848}}} {
		w := newWorld(2, layout.ExtentUnits+300_000)
		w.quiet, w.pg.ChunkPayload = true, c.payload
		must(t, w.client(2).do(t, "put", "l", "long7"))
		places := func() (units []uint32) {
			_, _, x, _ := w.find(0, "l")
			rec, err := layout.ParseRecord(w.region[0][x.Off():][:x.ReadLen()])
			if err != nil {
				t.Fatal(err)
			}
			m, err := layout.ParseManifest(rec.Value, w.pg.HeapLo, w.pg.HeapHi)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range m.Chunks {
				units = append(units, layout.UnitsOf(c.Code))
			}
			return units
		}
		if got := places(); !slices.Equal(got, c.units) {
			t.Errorf("payload %d: chunks of %d units, want %d", c.payload, got, c.units)
		}
		want := map[string]string{"l": string(longValue(7))}
		for _, other := range []uint32{0, layout.ChunkPayload} {
			w.pg.ChunkPayload = other
			w.check(t, "read by one that writes others", want)
		}
		w.pg.Recalled = []uint32{0}
		w.nextUnit = layout.ExtentUnits
		w.client(1).job(t, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: []uint32{0}})
		if in := w.inExtent(0); len(in) > 0 || !slices.Equal(places(), c.units) {
			t.Errorf("payload %d: moved to chunks of %d units, and left in the extent: %v", c.payload, places(), in)
		}
		w.check(t, "moved", want)
		// An update by the other kind of session.
		must(t, w.client(3).do(t, "put", "l", "long9"))
		w.check(t, "replaced", map[string]string{"l": string(longValue(9))})
	}
}
