package simtest

import (
	"slices"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// rot is a byte of a copy of a record that has changed by itself.
type rot struct {
	r   *region
	off uint64
}

// rotMask is what changes in a byte that rots.
const rotMask = 0x55

// mayRot are the slots, by their offsets, whose records may rot at n: all other copies have them whole, so that nobody
// needs to notice.
//
// An operation may READ one copy damaged, and the other one after the first has been mended. That one must be whole.
func (w *World) mayRot(n *node) (offs []uint32) {
	if o, _ := w.begunBefore(w.healedAt); o != nil {
		return nil
	}
	for _, pg := range w.st.PGs(0) {
		chain := w.chain(pg.Id)
		i := slices.IndexFunc(chain, func(r *region) bool { return r.node == n })
		if pg.State != dirpb.PGState_PG_ACTIVE || i < 0 || len(chain) < 2 {
			continue
		}
		for _, s := range chain[i].slots {
			if s.now.State() == layout.Live && w.wholeEverywhere(chain, s) {
				offs = append(offs, uint32(s.off))
			}
		}
	}
	return offs
}

// wholeEverywhere reports whether all of chain show the word of s, and have its record, which is a key's of the scope.
// A word that is not decided need not be everywhere: the head takes it with its record, or never.
func (w *World) wholeEverywhere(chain []*region, s *slot) bool {
	shows := func(r *region) bool { x := r.find(s.off); return x != nil && x.shown() == s.now }
	tentative := w.cfg.Speculative && !slices.Contains(w.decided[slotAt{chain[0].pg, s.off}], s.now)
	for _, r := range chain {
		if r.node.crashed || !shows(r) && !tentative {
			return false
		}
		if !shows(r) {
			continue
		}
		rec, err := layout.ParseLinked(r.bytes[s.now.Off():][:s.now.ReadLen()])
		if err != nil || len(rec.Key) == 0 || rec.Key[0] != 'k' || rec.Flags&layout.FlagManifest != 0 {
			return false
		}
	}
	return true
}

// rot changes the last byte of the record in the slot at off, as n has it.
func (w *World) rot(n *node, off uint32) {
	w.rots++
	for _, pg := range w.st.PGs(0) {
		for _, r := range w.chain(pg.Id) {
			for _, s := range r.slots {
				if r.node != n || s.off != uint64(off) {
					continue
				}
				rec, _ := w.recordAt(r, s.now)
				x := rot{r, s.now.Off() + uint64(layout.RecordLen(len(rec.Key), len(rec.Value))) - 1}
				r.bytes[x.off] ^= rotMask
				w.rotten = append(w.rotten, x)
				w.touch()
				return
			}
		}
	}
}

// asWritten is the memory of r from off on as it was written, for the checks: rot is nobody's doing.
func (w *World) asWritten(r *region, off uint64, n int) []byte {
	b := r.bytes[off:][:n]
	for _, x := range w.rotten {
		if x.r == r && x.off >= off && x.off < off+uint64(n) {
			b = slices.Clone(b)
			b[x.off-off] ^= rotMask
		}
	}
	return b
}

// healed notes that data was written to r, if it was: a WRITE that fails has no effect.
func (w *World) healed(r *region, off uint64, data []byte) {
	n := len(w.rotten)
	w.rotten = slices.DeleteFunc(w.rotten, func(x rot) bool {
		return x.r == r && x.off >= off && x.off < off+uint64(len(data)) && r.bytes[x.off] == data[x.off-off]
	})
	if len(w.rotten) < n {
		w.healedAt = w.step
	}
}

// healAll ends all rot: the end of a run reads every byte.
func (w *World) healAll() {
	for _, x := range w.rotten {
		x.r.bytes[x.off] ^= rotMask
	}
	w.rotten = nil
}

// Clients meet what rots, and mend it.
func TestRot(t *testing.T) {
	rots, mended := 0, 0
	for seed := range uint64(60) {
		w, err := NewWorld(wide["r2-rot"], false)
		if err != nil {
			t.Fatal(err)
		}
		w.runRandom(seed)
		if err := w.Finish(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		rots, mended = rots+w.rots, mended+w.mended
		w.Close()
	}
	t.Logf("%d copies rotted, %d were mended by operations", rots, mended)
	if mended == 0 {
		t.Errorf("nobody has met one of %d damaged copies", rots)
	}
}
