package simtest

import (
	"encoding/binary"
	"fmt"

	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

const retryExc = driver.RetryExcErr

// before checks what a verb is about to do: I4 (a record's bytes do not change
// from link until its place leaves limbo) and I8 (nothing of a fenced session
// takes effect).
func (w *World) before(c *cl, ev sim.Event) {
	if ev.Kind == sim.Deliver {
		return
	}
	if c.life == fenced {
		w.fail(fmt.Errorf("I8: %v of client %d after its fence", ev, c.i))
	}
	if ev.Op != rdma.OpWrite {
		return
	}
	r, off := w.where(ev)
	if r < 0 {
		return
	}
	if off < indexBytes {
		w.fail(fmt.Errorf("I1: %v of client %d into the index", ev, c.i))
		return
	}
	lo := uint32(off / layout.UnitSize)
	hi := lo + uint32((ev.Len+layout.UnitSize-1)/layout.UnitSize)
	for at, word := range w.words {
		if int(at.replica) == r && word.Readable() && word.Unit() < hi && lo < word.Unit()+word.Units() {
			w.failI4(c, ev, word, "is linked")
		}
	}
	for unit, u := range w.unlinked {
		if !(unit < hi && lo < unit+u.units) {
			continue
		}
		for _, o := range w.cls {
			if o.life == fenced {
				continue
			}
			if o.task != nil && o.curStart <= u.step && o.task.Waiting() != waitAlloc {
				w.failI4(c, ev, u.word, fmt.Sprintf("was unlinked while %v of client %d, still under way, had begun", o.cur, o.i))
			}
			for _, z := range o.orphans {
				if z.start <= u.step {
					w.failI4(c, ev, u.word, fmt.Sprintf("was unlinked while %v of client %d, answered but still under way, had begun", z.cur, o.i))
				}
			}
		}
		// Past limbo: the place lives again.
		if w.err == nil && ev.Piece == ev.Pieces-1 {
			delete(w.unlinked, unit)
		}
	}
}

func (w *World) failI4(c *cl, ev sim.Event, word layout.Word, why string) {
	// Copying a record to a replica that lacks it (sync) rewrites equal bytes.
	if w.cfg.Replicas > 1 {
		if w.copying(ev) {
			return
		}
	}
	w.fail(fmt.Errorf("I4: %v of client %d writes over %v, which %s", ev, c.i, word, why))
}

// copying reports whether a WRITE's target on the arbiter already holds a good
// record: sync and repeated WRITEs of one record are such.
func (w *World) copying(ev sim.Event) bool {
	r, off := w.where(ev)
	if r == 0 {
		return false
	}
	_, err := layout.ParseRecord(w.region[0][off:])
	return err == nil
}

// after checks what an atomic has done to the index.
func (w *World) after(ev sim.Event) {
	if ev.Kind == sim.Deliver || !ev.Op.IsAtomic() {
		return
	}
	r, off := w.where(ev)
	if r < 0 || off >= indexBytes {
		return
	}
	in := (off - shardOff) % layout.GroupSize
	if in < layout.GroupSlotsOff {
		return
	}
	at := wordAt{uint8(r), off}
	now := layout.Group(w.region[r][off-in:][:layout.GroupSize]).Slot(int(in-layout.GroupSlotsOff) / 8)
	old := w.words[at]
	if now == old {
		return
	}
	w.words[at] = now
	// I2: a replica's history is an in-order subsequence of its predecessor's.
	w.past[at] = append(w.past[at], now)
	if r > 0 {
		before := w.past[wordAt{uint8(r - 1), off}]
		i := w.taken[at]
		for i < len(before) && before[i] != now {
			i++
		}
		if i == len(before) {
			w.fail(fmt.Errorf("I2: slot %#x of replica %d takes %v, which replica %d has not held since", off, r, now, r-1))
		}
		w.taken[at] = i + 1
	}
	// I5.
	s := w.seen[at]
	if s == nil {
		s = map[layout.Word]bool{0: true}
		w.seen[at] = s
	}
	if s[now] {
		w.fail(fmt.Errorf("I5: slot %#x of replica %d holds %v again", off, r, now))
	}
	s[now] = true
	// The place that the word at the publisher named is on its way to limbo.
	if r == w.cfg.Replicas-1 && old.Readable() {
		w.unlinked[old.Unit()] = unlinked{old.Units(), w.step, old}
	}
	if !now.Readable() {
		return
	}
	delete(w.unlinked, now.Unit())
	key, err := w.recordAt(r, now)
	if err != nil {
		w.fail(fmt.Errorf("I3: replica %d links %v: %w", r, now, err))
		return
	}
	// I3: complete on every replica once the publisher holds it.
	if r == w.cfg.Replicas-1 {
		for k := range r {
			if _, err := w.recordAt(k, now); err != nil {
				w.fail(fmt.Errorf("I3: publisher links %v, replica %d: %w", now, k, err))
			}
		}
	}
	// I6: one readable slot a key, at A.
	if r == 0 {
		for other, word := range w.words {
			if other.replica == 0 && other != at && word.Readable() {
				if k, err := w.recordAt(0, word); err == nil && k == key {
					w.fail(fmt.Errorf("I6: %s is live in slots %#x and %#x", key, other.off, at.off))
				}
			}
		}
	}
}

func (w *World) recordAt(r int, word layout.Word) (string, error) {
	off := word.Off()
	if off+uint64(word.ReadLen()) > uint64(len(w.region[r])) {
		return "", fmt.Errorf("%v lies outside the region", word)
	}
	rec, err := layout.ParseRecord(w.region[r][off:][:word.ReadLen()])
	return string(rec.Key), err
}

// wordOf is the word that an atomic is aimed at.
func (w *World) wordOf(ev sim.Event) uint64 {
	b := w.target(ev)
	if len(b) < 8 {
		return 0
	}
	return binary.LittleEndian.Uint64(b)
}

// lockChanged checks I9 when a word has changed from old: an insert lock passes
// from one owner to another only if the first is fenced, and nobody who is
// fenced takes one.
func (w *World) lockChanged(ev sim.Event, old layout.Lock) {
	r, off := w.where(ev)
	if r < 0 || off < shardOff || off >= indexBytes || (off-shardOff)%layout.GroupSize != layout.GroupLockOff {
		return
	}
	now := layout.Lock(w.wordOf(ev))
	if now == 0 {
		return
	}
	for _, c := range w.cls {
		switch {
		case c.id == now.Session() && c.life == fenced:
			w.fail(fmt.Errorf("I9: client %d, which is fenced, takes the lock at %#x", c.i, off))
		case c.id == old.Session() && old != 0 && c.life != fenced:
			w.fail(fmt.Errorf("I9: the lock at %#x is broken before the fence of client %d is confirmed", off, c.i))
		}
	}
}
