package simtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/check"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

// unlinked is a place whose record no slot names any more.
type unlinked struct {
	units   uint32
	step    int // of the last slot's change
	word    layout.Word
	version uint64 // of the record
	key     string
}

// where is what a verb is aimed at: a region and an offset in it; nil if that is gone.
func (w *World) where(ev sim.Event) (*region, uint64) {
	r := w.byKey[ev.RKey]
	if r == nil {
		return nil, 0
	}
	off := ev.Addr - r.mrs[0].Base()
	if ev.RKey == r.mrs[1].RKey() {
		off = ev.Addr - r.mrs[1].Base() + w.indexBytes
	}
	if off > uint64(len(r.bytes)) || uint64(ev.Len) > uint64(len(r.bytes))-off { // it wraps for what is below
		return nil, 0
	}
	return r, off
}

// target is the remote memory that a verb touches.
func (w *World) target(ev sim.Event) []byte {
	r, off := w.where(ev)
	if r == nil {
		return nil
	}
	return r.bytes[off : off+uint64(ev.Len)]
}

// observe folds what a verb is about to find into its client's sum.
func (w *World) observe(c *cl, ev sim.Event) {
	if !w.reduce {
		return
	}
	c.tell(uint64(ev.Op), ev.Addr, ev.Index, uint64(ev.Piece), uint64(ev.Kind))
	if r, off := w.where(ev); r != nil && w.isAccess(off) && w.cfg.Clock == 0 {
		return // nothing depends on it
	}
	if b := w.target(ev); b != nil {
		c.tell(xxh3.Hash(b))
	}
}

// wordOf is the word that an atomic is aimed at.
func (w *World) wordOf(ev sim.Event) uint64 {
	b := w.target(ev)
	if len(b) < 8 {
		return 0
	}
	return binary.LittleEndian.Uint64(b)
}

// before checks what a verb is about to do: I4 (a record's bytes do not change
// from link until its place leaves limbo) and I8 (nothing of a fenced session
// takes effect). Memory that is given up is of no interest.
func (w *World) before(c *cl, ev sim.Event) {
	r, off := w.where(ev)
	if ev.Kind == sim.Deliver || r == nil || !r.used || r.node.crashed {
		return
	}
	if w.fenced(c) {
		w.fail(fmt.Errorf("I8: %v of client %d after its fence", ev, c.i))
	}
	if ev.Op != rdma.OpWrite {
		return
	}
	if off < w.indexBytes {
		w.fail(fmt.Errorf("I1: %v of client %d into the index", ev, c.i))
		return
	}
	if w.isAccess(off) {
		if at := off - w.accessBytes; ev.Len != 8 || off%8 != 0 || at < layout.RegionPageSize ||
			(at-layout.RegionPageSize)%layout.GroupSize < layout.GroupSlotsOff {
			w.fail(fmt.Errorf("I1: %v of client %d is of no slot's access word", ev, c.i))
		}
		return
	}
	data := w.payload(c, ev, off)
	lo := uint32(off / layout.UnitSize)
	hi := lo + uint32((ev.Len+layout.UnitSize-1)/layout.UnitSize)
	for _, s := range r.slots {
		if !s.shown().Readable() {
			continue
		}
		for _, x := range w.names(r, s.now) {
			if x.Unit() < hi && lo < x.Unit()+x.Units() && !bytes.Equal(data, w.asWritten(r, off, ev.Len)) {
				w.fail(fmt.Errorf("I4: %v of client %d writes over %v, which slot %#x of m%d links", ev, c.i, x, s.off,
					r.node.i))
			}
		}
	}
	rec, err := layout.ParseLinked(data)
	for p, u := range w.unlinked {
		if p.pg != r.pg || !(p.unit < hi && lo < p.unit+u.units) {
			continue
		}
		if err == nil && rec.Version == u.version && string(rec.Key) == u.key {
			continue // sync copies it to a replica that lacks it
		}
		if o, x := w.begunBefore(u.step); o != nil {
			w.fail(fmt.Errorf("I4: %v of client %d writes over %v, which was unlinked while %v of client %d, still "+
				"under way, had begun", ev, c.i, u.word, x, o.i))
			return
		}
		if x := w.watchedBefore(u.step); x != nil {
			w.fail(fmt.Errorf("I4: %v of client %d writes over %v, which was unlinked when %s, which stands, had "+
				"begun", ev, c.i, u.word, x.what))
			return
		}
		delete(w.unlinked, p) // past limbo: the place lives again
	}
}

// waitsUnbegun reports whether an operation that waits for a counts as not begun.
func waitsUnbegun(a index.Action) bool {
	return a == index.Alloc || a == index.Fetch || a == index.Store
}

// begunBefore finds an operation still under way that began before a step.
func (w *World) begunBefore(step int) (*cl, *running) {
	for _, o := range w.cls {
		if w.fenced(o) {
			continue
		}
		for _, x := range o.run {
			if x.start <= step && !waitsUnbegun(x.t.Waiting()) {
				return o, x
			}
		}
		for _, x := range o.orphans {
			if x.start <= step {
				return o, x
			}
		}
	}
	return nil, nil
}

// after checks what an atomic has done to a slot.
func (w *World) after(ev sim.Event) {
	if ev.Kind == sim.Deliver || !ev.Op.IsAtomic() {
		return
	}
	r, off := w.where(ev)
	if r == nil || off >= w.indexBytes || off < layout.RegionPageSize || r.node.crashed {
		return
	}
	in := (off - layout.RegionPageSize) % layout.GroupSize
	if in < layout.GroupSlotsOff {
		return
	}
	now := layout.Word(binary.LittleEndian.Uint64(r.bytes[off:]))
	s := r.slot(off)
	old := s.now
	if now == old {
		return
	}
	retained := s.shown() != old
	s.stale = false
	if s.left == nil {
		s.left = map[layout.Word]uint64{}
	}
	epoch, _ := w.ld.Epochs()
	if !retained {
		s.left[old] = epoch
	}
	if now != 0 && w.rejoins(r) && w.goesBack(r, s, now) {
		return
	}
	if s.now = now; now != 0 || !retained { // else it is as the chain's, which has held nothing yet
		s.past = append(s.past, now)
	}
	defer w.watchShares()
	if !r.used {
		// Somebody who has not heard of the loss may have read it, and brings it to those that are left.
		if old.Readable() && now.State() == layout.Empty {
			w.took(ev, off, old)
		}
		return
	}
	if retained {
		old = 0 // nobody has believed it
	}
	if old.Readable() && now.State() == layout.Empty {
		w.emptied(ev, r, off, old)
	}
	// I5. The zeroes of an array that is wiped are no words.
	if at, ok := s.left[now]; ok && now != 0 && epoch < at+layout.WordLifeEpochs || now == 0 && !retained &&
		w.inUse(r.pg, off) {
		w.fail(fmt.Errorf("I5: slot %#x of m%d holds %v again", off, r.node.i, now))
	}
	chain := w.chain(r.pg)
	k := slices.Index(chain, r)
	w.checkOrder(chain, k, s)
	if k >= 0 && k < len(chain)-1 && w.rejoins(chain[k+1]) {
		if o := chain[k+1].find(off); o != nil && o.stale && o.now == now {
			w.believe(r, chain[k+1], o) // it is the chain's word once more, or has become it
		}
	}
	w.checkStatus(r, off, old, now)
	if old.Readable() {
		for _, x := range w.names(r, old) {
			if w.links(r.pg, x) {
				continue
			}
			u := &unlinked{units: x.Units(), step: w.step, word: x}
			if rec, err := w.recordAt(r, x); err == nil {
				u.version, u.key = rec.Version, string(rec.Key)
			}
			w.unlinked[place{r.pg, x.Unit()}] = u
		}
	}
	if !now.Readable() {
		return
	}
	for _, x := range w.names(r, now) {
		delete(w.unlinked, place{r.pg, x.Unit()})
	}
	rec, err := w.recordAt(r, now)
	if err != nil {
		w.fail(fmt.Errorf("I3: m%d links %v: %w", r.node.i, now, err))
		return
	}
	w.checkNamed(r, now)
	if old.Readable() && k == 0 {
		w.checkKept(ev, r, off, old, now)
	}
	w.linked[named{r.pg, now.WithState(layout.Live)}] = linked{string(rec.Key), w.valueOf(r, &rec)}
	copies := w.copies(r.pg)
	if r == copies[len(copies)-1] {
		w.checkComplete(copies, now)
	}
	if k == 0 {
		w.checkParent(r, &rec)
		w.checkUnique(string(rec.Key), now.FP())
	}
}

// goesBack reports whether a joiner that retains words takes one that the replica before it has left already: somebody
// brings the slot up from a retained word, and the chain has taken that word once more meanwhile. Nobody believes it.
func (w *World) goesBack(r *region, s *slot, now layout.Word) bool {
	chain := w.chain(r.pg)
	prev := chain[len(chain)-2].find(s.off)
	if prev == nil {
		return false
	}
	taken := prev.past
	if w.cfg.Speculative { // a sync goes by the head
		taken = w.decided[slotAt{r.pg, s.off}]
	}
	to, at := slices.Index(taken, now), 0
	for i, x := range s.past {
		for ; at < len(taken) && taken[at] != x; at++ {
		}
		if to >= 0 && to <= at {
			for _, y := range s.past[i:] {
				delete(s.left, y)
			}
			s.now, s.stale, s.past = now, true, s.past[:i]
			return true
		}
	}
	return false
}

// checkOrder checks I2: a replica's history is an in-order subsequence of its
// predecessor's.
func (w *World) checkOrder(chain []*region, k int, s *slot) {
	if w.cfg.Speculative {
		if k == 0 {
			w.decide(chain[0], s)
		} else if k > 0 {
			w.checkDecided(chain[k], s)
		}
		return
	}
	if k <= 0 {
		return
	}
	prev := chain[k-1].find(s.off)
	i := 0
	for _, x := range s.past {
		for ; prev != nil && i < len(prev.past) && prev.past[i] != x; i++ {
		}
		if prev == nil || i == len(prev.past) {
			w.fail(fmt.Errorf("I2: slot %#x of m%d takes %v, which m%d has not held since", s.off, chain[k].node.i,
				s.now, chain[k-1].node.i))
			return
		}
		i++
	}
}

// links reports whether some slot of a placement group names a word's place.
func (w *World) links(pg uint32, x layout.Word) bool {
	for _, r := range w.chain(pg) {
		for _, s := range r.slots {
			if s.shown().Readable() && slices.ContainsFunc(w.names(r, s.now), func(y layout.Word) bool {
				return y.Unit() == x.Unit()
			}) {
				return true
			}
		}
	}
	return false
}

// checkComplete checks I3: what the tail holds is complete on every copy.
func (w *World) checkComplete(copies []*region, x layout.Word) {
	if w.cfg.Speculative { // others may be at what comes before, or after
		copies = copies[len(copies)-1:]
	}
	for _, r := range copies {
		if r.node.crashed {
			continue
		}
		for _, n := range w.records(r, x) {
			rec, err := w.recordAt(r, n)
			if err == nil {
				_, value := w.chunks(r, &rec)
				_, err = value()
			}
			if err != nil {
				w.fail(fmt.Errorf("I3: the tail m%d holds %v, m%d: %v: %w", copies[len(copies)-1].node.i, x, r.node.i,
					n, err))
			} else if own, err := w.recordAt(r, x); err == nil && string(own.Key) != string(rec.Key) {
				w.fail(fmt.Errorf("I3: the tail m%d holds %v of %q, which names a record of %q",
					copies[len(copies)-1].node.i, x, own.Key, rec.Key))
			}
		}
	}
}

// checkChains checks I2 and I3 if a chain may have another head or tail.
func (w *World) checkChains() {
	for _, pg := range w.st.PGs(1) {
		if pg.State != dirpb.PGState_PG_ACTIVE && pg.State != dirpb.PGState_PG_FROZEN {
			continue
		}
		copies := w.copies(pg.Id)
		if len(copies) == 0 {
			w.fail(fmt.Errorf("I10: placement group %d has no copy left", pg.Id))
			return
		}
		for _, s := range copies[len(copies)-1].slots {
			if s.now.Readable() && !copies[len(copies)-1].node.crashed {
				w.checkComplete(copies, s.now)
			}
		}
		for k := range copies {
			for _, s := range copies[k].slots {
				w.checkOrder(copies, k, s)
			}
		}
		w.checkAllIntents(copies)
	}
}

func (w *World) recordAt(r *region, x layout.Word) (layout.Record, error) {
	off := x.Off()
	if off < w.indexBytes+w.accessBytes || off+uint64(x.ReadLen()) > uint64(len(r.bytes)) {
		return layout.Record{}, fmt.Errorf("%v lies outside the heap", x)
	}
	return layout.ParseLinked(w.asWritten(r, off, x.ReadLen()))
}

// inUse reports whether an index offset lies in the array of a shard, or of a child.
func (w *World) inUse(pg uint32, off uint64) bool {
	in := func(at uint64, segments uint32) bool {
		return off >= at && off < at+uint64(segments)*layout.SegmentSize
	}
	for _, sh := range w.st.Shards(1) {
		if sh.PgId == pg && in(sh.Offset, sh.Segments) {
			return true
		}
		if mv := sh.Move; mv != nil && !mv.Abandoned && mv.PgId == pg && in(mv.Offset, sh.ChildSegments()) {
			return true
		}
	}
	return false
}

// at is where a key is readable at a head.
type at struct {
	pg     uint32
	off    uint64
	word   layout.Word
	child  bool
	strays bool
}

// checkUnique checks I6: at the heads a key has one readable slot, in its group or
// stash. While its shard moves it may have a second one in the child, hidden behind the
// first, which is FROZEN.
func (w *World) checkUnique(key string, fp uint16) {
	hash := hashOfKey([]byte(key))
	var found []at
	for _, pg := range w.st.PGs(1) {
		chain := w.chain(pg.Id)
		if len(chain) == 0 || chain[0].node.crashed {
			continue
		}
		for _, s := range chain[0].slots {
			if !s.now.Readable() || s.now.FP() != fp {
				continue
			}
			rec, err := w.recordAt(chain[0], s.now)
			if err != nil || string(rec.Key) != key {
				continue
			}
			x := at{pg: pg.Id, off: s.off, word: s.now, strays: true}
			for _, sh := range w.st.Shards(1) {
				if layout.ShardPrefix(hash, uint8(sh.Depth)) != sh.Prefix {
					continue
				}
				home, stash := layout.GroupOff(hash, sh.Segments)
				g := homeOf(s.off)
				if sh.PgId == pg.Id && (g == sh.Offset+home || g == sh.Offset+stash) {
					x.strays = false
				}
				if mv := sh.Move; mv != nil && mv.PgId == pg.Id &&
					(!mv.Split || layout.HashBit(hash, uint8(sh.Depth))) {
					home, stash = layout.GroupOff(hash, sh.ChildSegments())
					if g == mv.Offset+home || g == mv.Offset+stash {
						x.child, x.strays = true, false
					}
				}
			}
			found = append(found, x)
		}
	}
	n, children, live := 0, 0, 0
	for _, x := range found {
		if x.strays {
			w.fail(fmt.Errorf("I6: %s is readable in slot %#x of pg %d, where nobody looks for it", key, x.off, x.pg))
		}
		switch {
		case x.child:
			children++
		default:
			n++
			if x.word.State() == layout.Live {
				live++
			}
		}
	}
	if n > 1 || children > 1 || live > 0 && children > 0 {
		w.fail(fmt.Errorf("I6: %s is readable in several slots: %+v", key, found))
	}
}

// lockChanged checks I9 when a word has changed from old: an insert lock passes
// from one owner to another only if the first is fenced, and nobody who is
// fenced takes one.
func (w *World) lockChanged(ev sim.Event, old layout.Lock) {
	r, off := w.where(ev)
	if r == nil || !r.used || off < layout.RegionPageSize || off >= w.indexBytes ||
		(off-layout.RegionPageSize)%layout.GroupSize != layout.GroupLockOff {
		return
	}
	now := layout.Lock(w.wordOf(ev))
	if now == 0 {
		return
	}
	for _, c := range w.cls {
		switch {
		case c.id == now.Session() && w.fenced(c):
			w.fail(fmt.Errorf("I9: client %d, which is fenced, takes the lock at %#x", c.i, off))
		case c.id == old.Session() && old != 0 && !w.fenced(c):
			w.fail(fmt.Errorf("I9: the lock at %#x is broken before the fence of client %d is confirmed", off, c.i))
		}
	}
}

// checkRecalled checks, as an extent becomes free, or what lies between its records, that
// nothing names that and nobody is left who may have seen something in it (I4, I7).
func (w *World) checkRecalled(pg, extent uint32) {
	for _, f := range w.st.Heap(pg).Free {
		if f.Unit/layout.ExtentUnits != extent {
			continue
		}
		for _, r := range w.chain(pg) {
			for _, s := range r.slots {
				if !s.shown().Readable() {
					continue
				}
				for _, x := range w.names(r, s.now) {
					if x.Unit() < f.Unit+f.Units && f.Unit < x.Unit()+x.Units() {
						w.fail(fmt.Errorf("I7: units [%d,+%d) of extent %d of pg %d are free, but slot %#x of m%d "+
							"names %v", f.Unit, f.Units, extent, pg, s.off, r.node.i, x))
					}
				}
			}
		}
	}
	if o, x := w.begunBefore(w.scannedAt[place{pg, extent}]); o != nil {
		w.fail(fmt.Errorf("I4: extent %d of pg %d is free while %v of client %d, begun before its scan was done, is "+
			"under way", extent, pg, x, o.i))
	}
	for p := range w.unlinked {
		if p.pg == pg && p.unit/layout.ExtentUnits == extent {
			delete(w.unlinked, p)
		}
	}
}

// purged reports whether the extent of a unit was ever recalled: what waited before that
// for its home is still listed, and goes nowhere.
func (w *World) purged(pg, unit uint32) bool {
	for _, m := range w.st.Heap(pg).RecallMarks {
		if m.Extent == unit/layout.ExtentUnits {
			return true
		}
	}
	return false
}

// version checks that no two writes share a version.
func (w *World) version(key int, version uint64, value string) {
	if w.versions == nil {
		w.versions = map[uint64]string{}
	}
	x := fmt.Sprintf("%d=%s", key, value)
	if old, ok := w.versions[version]; ok && old != x {
		w.fail(fmt.Errorf("I13: version %#x is of %s and of %s", version, old, x))
	}
	w.versions[version] = x
}

// versionOf is the version of a key's value, if somebody has learned it, else 0. A value that was given says it itself.
func (w *World) versionOf(key int, value string) uint64 {
	var given uint64
	if n, _ := fmt.Sscanf(value, "given %v", &given); n == 1 {
		return given
	}
	x := fmt.Sprintf("%d=%s", key, value)
	for version, of := range w.versions {
		if of == x {
			return version
		}
	}
	return 0
}

// atRest is the World as package check reaches it when nothing is under way.
type atRest struct {
	w  *World
	st *dirpb.StatusReply
}

func (r atRest) Status(context.Context) (*dirpb.StatusReply, error) { return r.st, nil }

func (r atRest) Read(_ context.Context, pg uint32, copy int, off uint64, n int) ([]byte, error) {
	b := r.w.chain(pg)[copy].bytes
	if off+uint64(n) > uint64(len(b)) {
		return nil, fmt.Errorf("[%#x,+%#x) is outside the region of %#x bytes", off, n, len(b))
	}
	return b[off:][:n], nil
}

func (r atRest) Hash(key []byte) (uint64, error) { return hashOfKey(key), nil }

// checkBytes has the checker of kvctl check read all memory.
func (w *World) checkBytes() {
	if w.cfg.FillStash > 0 && !w.cfg.OVF {
		return // the fillers stand in the stash although their group has not overflowed
	}
	r := atRest{w, &dirpb.StatusReply{Map: w.st.Map(nil), Usage: w.st.Usage()}}
	for _, ns := range r.st.Map.Namespaces[:1] { // of another one nothing is checked
		rep := check.NewReport()
		if err := check.Run(context.Background(), rep, check.Options{Store: r, Namespace: ns, NowMillis: w.millis,
			Degraded: true}); err != nil {
			w.fail(err)
			return
		}
		bad := rep.Total
		if slices.ContainsFunc(w.cls, func(c *cl) bool { return c.life != live || w.fenced(c) }) ||
			slices.ContainsFunc(w.hist, func(e Event) bool { return e.Out == Unknown }) {
			bad -= rep.DifferingWords // whoever meets a word that was left halfway publishes it
		}
		if bad > 0 || len(rep.Problems) > 0 {
			w.fail(fmt.Errorf("check: %d findings %+v, problems %q", rep.Total, rep.Findings, rep.Problems))
		}
	}
}

// checkUnits checks I7 when nothing is under way: no unit is two things at once. Live
// clients hand over what they hold.
func (w *World) checkUnits() {
	w.checkBytes()
	for _, pg := range w.st.PGs(1) {
		chain := w.chain(pg.Id)
		if len(chain) == 0 {
			continue
		}
		type claim struct {
			lo, hi uint32
			who    string
		}
		var all []claim
		seen := map[uint32]bool{}
		for _, s := range chain[0].slots {
			x := s.now
			if x.Readable() {
				for _, n := range w.names(chain[0], x) {
					if !seen[n.Unit()] {
						all = append(all,
							claim{n.Unit(), n.Unit() + n.Units(), fmt.Sprintf("%v in slot %#x", n, s.off)})
					}
					seen[n.Unit()] = true
				}
			}
		}
		for _, f := range w.st.Heap(pg.Id).Free {
			all = append(all, claim{f.Unit, f.Unit + f.Units, "free with the directory"})
			if _, any := w.st.HomeOf(pg.Id, f.Unit, f.Units); any {
				w.fail(fmt.Errorf(
					"I7: units [%d,+%d) of pg %d are free with the directory, and some are a session's own", f.Unit,
					f.Units, pg.Id))
			}
		}
		for _, c := range w.cls {
			if c.life != live || w.fenced(c) {
				continue
			}
			for _, l := range c.lanes {
				l.GiveBack(true)
			}
			for _, h := range c.core.Heaps() {
				if h.PG != pg.Id || h.Generation != pg.Generation {
					continue
				}
				if w.histSum%16 != 0 {
					// It is costly; a sample will do.
				} else if err := h.Heap.Check(); err != nil {
					w.fail(fmt.Errorf("I7: client %d: %w", c.i, err))
				}
				if n := h.Heap.Stats().RefusedPlaces; n > 0 {
					w.fail(fmt.Errorf("I7: client %d was given %d places of pg %d that it had already", c.i, n, pg.Id))
				}
				own, foreign := h.Heap.Drain()
				for _, x := range own {
					all = append(all, claim{x.Unit, x.Unit + x.Units, fmt.Sprintf("free with client %d", c.i)})
					if home, _ := w.st.HomeOf(pg.Id, x.Unit, x.Units); home != c.id {
						w.fail(fmt.Errorf("I7: client %d has units [%d,+%d) of pg %d as its own, which the directory "+
							"says are session %d's", c.i, x.Unit, x.Units, pg.Id, home))
					}
				}
				for _, x := range foreign {
					all = append(all, claim{x.Unit, x.Unit + x.Units, fmt.Sprintf("free with client %d, which others "+
						"were granted", c.i)})
				}
			}
		}
		w.ld.OnTheWay(func(id, unit, units uint32) {
			// A place that was on its way when its extent was recalled goes nowhere.
			if id == pg.Id && w.st.Settled(id, pg.Generation, unit, units, w.st.Heap(id).RecallSeq) &&
				!w.purged(id, unit) {
				all = append(all, claim{unit, unit + units, "on the way"})
			}
		})
		slices.SortFunc(all, func(a, b claim) int { return int(int64(a.lo) - int64(b.lo)) })
		if w.losesNothing() {
			at := uint32(w.heapLo)
			for _, c := range append(all, claim{lo: uint32(w.st.Heap(pg.Id).Watermark)}) {
				if c.lo > at {
					w.fail(fmt.Errorf("I7: units [%d,%d) of pg %d are nobody's", at, c.lo, pg.Id))
				}
				at = max(at, c.hi)
			}
		}
		for i := 1; i < len(all); i++ {
			if all[i-1].hi > all[i].lo {
				w.fail(fmt.Errorf("I7: units [%d,%d) of pg %d are %s, [%d,%d) are %s", all[i-1].lo, all[i-1].hi, pg.Id,
					all[i-1].who, all[i].lo, all[i].hi, all[i].who))
			}
		}
	}
}

// losesNothing reports whether every unit is somebody's: nothing has happened that leaves places to a recall.
func (w *World) losesNothing() bool {
	c := &w.cfg
	if w.crashes+w.nodeCrashes+w.nodePauses+w.leaders > 0 || w.recalls || c.Losses+len(c.Acts)+c.Missing > 0 ||
		c.Reclaims {
		return false
	}
	for _, c := range w.cls {
		if c.life != live || w.fenced(c) {
			return false
		}
		for _, l := range c.lanes {
			if l.Stats.Leaked > 0 {
				return false
			}
		}
	}
	return true
}

// checkScans checks I12: a scan finds every key that was present throughout.
func (w *World) checkScans() error {
	for _, s := range w.scans {
		present := map[int]bool{}
		for i := range w.hist {
			e := &w.hist[i]
			switch e.Verb {
			case Put, PutEx, Add, Incr, CAS, Stream:
				if e.Out == OK && e.Return < s.call {
					present[e.Key] = true
				}
			}
		}
		for i := range w.hist {
			e := &w.hist[i]
			for _, p := range e.Parts {
				if p.Effect == index.DeleteKey && e.Call < s.end {
					delete(present, p.Key)
				}
			}
			if e.Verb != Txn && !e.Verb.reads() && !e.Verb.writes() && e.Call < s.end {
				delete(present, e.Key)
			}
		}
		for k := range present {
			if !s.found[k] {
				return fmt.Errorf("I12: the scan [%d,%d] of client %d misses key%d", s.call, s.end, s.client, k)
			}
		}
	}
	return nil
}
