package engine

import (
	"encoding/binary"
	"math/bits"
	"runtime"
	"sync/atomic"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// Frequency gives the counts of access words their meaning. Its methods may be called
// concurrently and do not block.
type Frequency interface {
	// Born is the count of a key that is new, by its hash.
	Born(hash uint64) uint32
	// Touched is the count, at a time in Unix ms, after so many accesses more to a record whose access word
	// was old, 0 if that is not known.
	Touched(nowMillis uint64, old layout.AccessWord, hits uint32) uint32
}

// noteTable remembers, of keys used lately, when the session last noted an access and
// how many there were since. It is direct-mapped: two keys that share a cell are noted more often. It begins small and
// doubles as keys come, since each lookup in a table that is much longer than its keys need misses the processor's
// caches and those of the page tables. A table that grows forgets, so each key is noted once more. Lanes that share one
// (see Core.notesOf) lose an access now and then.
//
// A cell: tag (6 bits) | hits (6 bits) | time of the last note in ticks (20 bits, 70 minutes).
type noteTable struct {
	cells atomic.Pointer[noteCells]
	used  atomic.Int64 // cells that are not 0
	max   int          // bits of the index at most
}

// noteCells is as many cells as shift leaves of a hash.
type noteCells struct {
	cells []uint32
	shift uint8
}

const (
	noteTickBits = 20
	noteTickMask = 1<<noteTickBits - 1
	noteHitBits  = 6
	maxNoteHits  = 1<<noteHitBits - 1
	// leastNotes is how many bits the index of the first table has, and noteRoom how many cells there are at least for
	// each that is used.
	leastNotes, noteRoom = 10, 4
)

func newNoteTable(maxBytes int) *noteTable {
	t := &noteTable{max: max(leastNotes, bits.Len(uint(maxBytes/4))-1)}
	t.cells.Store(newNoteCells(leastNotes))
	return t
}

func newNoteCells(bits int) *noteCells { return &noteCells{make([]uint32, 1<<bits), uint8(64 - bits)} }

// cell is where accesses to a key are counted, and the tag that tells it from other keys of the cell. The multiplier is
// the golden ratio's, as in Fibonacci hashing (Knuth, TAOCP 6.4): neighbouring checks spread over the table.
func (x *noteCells) cell(check uint64) (c *uint32, tag uint32) {
	h := check * 0x9E3779B97F4A7C15
	return &x.cells[h>>x.shift], uint32(h) & (1<<6 - 1) << (noteTickBits + noteHitBits)
}

// touch loads what hit will look at. t may be nil.
func (t *noteTable) touch(check uint64) uint32 {
	if t == nil {
		return 0
	}
	c, _ := t.cells.Load().cell(check)
	return atomic.LoadUint32(c)
}

// hit counts an access at tick now and reports whether it is to be noted: interval
// ticks after the last one, when hits overflow, or when nothing is known.
func (t *noteTable) hit(check uint64, now, interval uint32) bool {
	x := t.cells.Load()
	c, tag := x.cell(check)
	v := atomic.LoadUint32(c)
	if v&^(1<<(noteTickBits+noteHitBits)-1) != tag || v == 0 {
		if v == 0 && t.used.Add(1)*noteRoom > int64(len(x.cells)) && 64-int(x.shift) < t.max {
			if t.cells.CompareAndSwap(x, newNoteCells(64-int(x.shift)+1)) {
				t.used.Store(1)
			}
			c, tag = t.cells.Load().cell(check)
		}
		atomic.StoreUint32(c, tag|1<<noteTickBits|(now-interval)&noteTickMask)
		return true
	}
	hits := v >> noteTickBits & maxNoteHits
	if hits < maxNoteHits {
		atomic.StoreUint32(c, v+1<<noteTickBits)
	}
	return hits+1 >= maxNoteHits || (now-v)&noteTickMask >= interval
}

// noted says that the key's accesses have been noted at tick now, and how many.
func (t *noteTable) noted(check uint64, now uint32) (hits uint32) {
	c, tag := t.cells.Load().cell(check)
	if v := atomic.LoadUint32(c); v&^(1<<(noteTickBits+noteHitBits)-1) == tag {
		hits = v >> noteTickBits & maxNoteHits
	}
	atomic.StoreUint32(c, tag|now&noteTickMask)
	return max(hits, 1)
}

// SetNoteInterval says how long, in milliseconds, accesses to a key are counted before
// they are noted.
func (c *Core) SetNoteInterval(millis uint64) {
	c.noteTicks.Store(uint32(min(max(millis/layout.AccessTickMillis, 1), noteTickMask/2)))
}

// Tick brings the clock of access words up to date; renewals do it, too.
func (c *Core) Tick() { c.millis.Store(c.opts.Millis()) }

func (c *Core) ticks() uint32 { return uint32(c.millis.Load() / layout.AccessTickMillis) }

// notesOf is the table of a lane's notes. There is one for each processor, or for each lane if there are fewer: lanes
// that processors use (see Core.hinted) do not write to the same cache lines, and all tables together are a sixteenth
// of the hints.
func (c *Core) notesOf(lane int) *noteTable {
	n := min(len(c.lanes), runtime.GOMAXPROCS(0))
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.notes == nil {
		c.mu.notes = make([]*noteTable, n)
	}
	t := &c.mu.notes[lane%len(c.mu.notes)]
	if *t == nil {
		*t = newNoteTable(c.opts.CacheBytes / len(c.mu.notes) / 16)
	}
	return *t
}

// noteDue counts an access to the key, and reports whether it is to be noted now.
func (l *Lane) noteDue(check uint64) bool {
	if l.notes == nil {
		l.notes = l.core.notesOf(l.id)
	}
	return l.notes.hit(check, l.core.ticks(), l.core.noteTicks.Load())
}

func (t *Task) NoteDue(o *index.Op) bool { return t.lane.noteDue(o.Check) }

// Note is index.Hints: of a key it counts an access. Without one it corrects an access word that does not belong to the
// record, or says until when that is pinned.
func (t *Task) Note(o *index.Op, off uint64, w layout.Word, old layout.AccessWord, expiry, until uint64, born bool) {
	if !t.lane.valid() {
		return
	}
	switch {
	case o.Kind == index.Pin:
		t.lane.pin(o, off, w, old, expiry)
		return
	case o.Key != nil:
		t.lane.noteAccess(o.Route.PG, off, o.Hash, o.Check, w, old, expiry, born)
		return
	}
	if !old.Of(w) {
		old = 0
	}
	// A correction, no access.
	now := t.lane.core.millis.Load()
	t.lane.postAccess(o.Route.PG, off, layout.MakeAccess(w, now, old.Count(), expiry).At(max(now, until)))
}

// noteAccess notes what has been counted of a key whose record is w's and whose access
// word was old, if it was read; off is that of the slot. The lease is valid, or was when the chain that read old was
// over.
func (l *Lane) noteAccess(pg *index.PG, off, hash, check uint64, w layout.Word, old layout.AccessWord, expiry uint64,
	born bool) {
	now := l.core.millis.Load() // that of the words that are compared with it; no clock is read for a note
	hits := uint32(1)
	if l.notes != nil {
		hits = l.notes.noted(check, l.core.ticks())
	}
	if !old.Of(w) {
		old = 0
	}
	count := hits
	switch f := l.core.opts.Frequency; {
	case f == nil:
		count += old.Count()
	case born:
		count = f.Born(hash)
	default:
		count = f.Touched(now, old, hits)
	}
	a := layout.MakeAccess(w, now, count, expiry)
	if l.core.pins.Load() && old.AheadTicks(now) > 0 {
		a = a.Later(old) // it is pinned
	}
	l.postAccess(pg, off, a)
}

// pin writes the access word that o, a Pin, asks for: until when the record is pinned, and of two pins the later time.
// The key's count stays. It is not known that the word arrives.
func (l *Lane) pin(o *index.Op, off uint64, w layout.Word, old layout.AccessWord, expiry uint64) {
	now := l.core.millis.Load()
	if !old.Of(w) {
		old = 0
	}
	count := old.Count()
	if f := l.core.opts.Frequency; old == 0 && f != nil {
		count = f.Touched(now, 0, 1)
	}
	a := layout.MakeAccess(w, now, max(count, 1), expiry)
	if o.Expiry > now {
		if a = a.At(o.Expiry); old.AheadTicks(now) > 0 {
			a = a.Later(old)
		}
		l.Stats.Pins++
	}
	l.postAccess(o.Route.PG, off, a)
}

// SetPins says whether the namespace lets keys be pinned: notes of uses then keep times that lie ahead.
func (c *Core) SetPins(on bool) { c.pins.Store(on) }

// postAccess posts the WRITE of an access word; nothing waits for its completion. The lease is valid.
func (l *Lane) postAccess(p *index.PG, off uint64, a layout.AccessWord) {
	if l.view == nil {
		return
	}
	pg := l.view.PG(p.ID)
	if pg == nil || pg.Epoch != p.Epoch || !pg.Active || pg.Joining || pg.AccessOff == 0 {
		return
	}
	r := pg.Replicas - 1
	c := l.connTo(pg.Members[r].Node)
	if !c.up || c.incarnation != pg.Members[r].Incarnation {
		return
	}
	if l.noteWords == nil {
		t, err := l.NewTask()
		if err != nil {
			return
		}
		l.noteWords = t
	}
	// The ring is longer than what is mostly under way; a word overwritten before it left
	// is one more hint that is wrong.
	at := l.noteN % (taskSlot / 8) * 8
	l.noteN++
	b := l.noteWords.buf[at : at+8 : at+8]
	binary.LittleEndian.PutUint64(b, uint64(a))
	k := l.keysOf(c, pg, r)
	c.seq++
	wr := c.next(l)
	*wr = rdma.WR{ID: noWaitID, Op: rdma.OpWrite, RemoteAddr: k.HeapBase + pg.AccessOff + off - pg.IndexBytes,
		RKey:  k.HeapRKey,
		Local: b, LKey: l.noteWords.lkeys[c.dev]}
	if l.noteN%signalEvery == 0 {
		wr.Flags = rdma.Signaled // only a WC makes room in the send queue
	}
	l.Stats.Notes++
}
