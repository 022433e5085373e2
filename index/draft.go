package index

import (
	"errors"

	"github.com/kvd-project/kvd/internal/layout"
)

// ErrDraft ends a Put of a part: the map has taken away what the Draft had gathered, or another Put has linked it.
// Nothing of the value can be seen, and the whole of it has to be written again.
var ErrDraft = errors.New("the part of the value that was written is lost to a change of its placement group")

// Draft is a long value on its way: Puts with a Part write its chunks, a window each, and the last one links them. In
// between it rests with its caller, and nothing of it is in flight. Its session tells it of each map before a lane goes
// by that (Check). It is void once a map takes away what it has. So nobody has acknowledged a map by which a place of a
// Draft is another's, or a replica lacks a chunk, and links it later.
//
// Methods may be called concurrently if there is a Guard; Puts with the same Draft come one after the other.
type Draft struct {
	Len uint64 // bytes of the whole value, with its tail; set before the first Put
	// Guard, if not nil, is held while what mu has is used. The driver sets it before the first Put.
	Guard interface {
		Lock()
		Unlock()
	}

	child uint32 // as in Op, of a complete move: the key was followed there once. Set before the first Put

	mu struct {
		pgOf   func(id uint32) *PG // of the newest map; nil before Check
		at     *PG                 // whose the places are; nil before the first
		id     uint64              // that the chunks carry
		bytes  uint64              // in the chunks that were written
		count  int                 // of these
		chunks []layout.Chunk      // places that rest here; fewer than count once it is void
		void   bool                // for good
	}
}

// Again is a Draft of the same value, to be written from the beginning.
func (d *Draft) Again() *Draft { return &Draft{Len: d.Len, child: d.child} }

func (d *Draft) lock() {
	if d.Guard != nil {
		d.Guard.Lock()
	}
}

func (d *Draft) unlock() {
	if d.Guard != nil {
		d.Guard.Unlock()
	}
}

// Check tells d what the placement groups are in the newest map, nil for those that are gone.
func (d *Draft) Check(pgOf func(id uint32) *PG) {
	d.lock()
	defer d.unlock()
	if d.mu.pgOf = pgOf; d.mu.at == nil {
		return
	}
	pg := pgOf(d.mu.at.ID)
	if pg == nil || !samePlaces(pg, d.mu.at) {
		d.mu.void, d.mu.chunks = true, nil // the memory has gone
		return
	}
	d.mu.void = d.mu.void || pg.Epoch != d.mu.at.Epoch
	kept := d.mu.chunks[:0]
	for _, c := range d.mu.chunks {
		if pg.IsRecalled(c.Unit) {
			d.mu.void = true // the place is nobody's any more
		} else {
			kept = append(kept, c)
		}
	}
	d.mu.chunks = kept
}

// Rests is how many units the places of d take in a placement group.
func (d *Draft) Rests(pg, generation uint32) (units uint64) {
	d.lock()
	defer d.unlock()
	if at := d.mu.at; at != nil && at.ID == pg && at.Generation == generation {
		for _, c := range d.mu.chunks {
			units += uint64(layout.UnitsOf(c.Code))
		}
	}
	return units
}

// Drop makes d void, and hands over the places that rest in it: no word has ever named one of them. d hears of no map
// for them any more, so who takes them goes by no newer one before it has them.
func (d *Draft) Drop(unuse func(*PG, layout.Word)) {
	d.lock()
	at, chunks := d.mu.at, d.mu.chunks
	d.mu.void, d.mu.chunks = true, nil
	d.unlock()
	for _, c := range chunks {
		unuse(at, chunkWord(c))
	}
}

// fits reports whether places of pg may come to those of d.
func (d *Draft) fits(pg *PG) bool {
	at := d.mu.at
	return !d.mu.void && (at == nil || samePlaces(at, pg) && at.Epoch == pg.Epoch)
}

// next is the number of the next chunk, and the id of those before. ok is false if d cannot go on in pg.
func (d *Draft) next(pg *PG) (number int, id uint64, ok bool) {
	d.lock()
	defer d.unlock()
	return d.mu.count, d.mu.id, d.fits(pg) && d.mu.bytes%uint64(pg.payload()) == 0
}

// leaveChunks gives d chunks of n bytes that every replica of pg has. The newest map may say of these places what the
// Op did not know yet, so d asks it.
func (d *Draft) leaveChunks(pg *PG, chunks []layout.Chunk, id uint64, n int) bool {
	d.lock()
	defer d.unlock()
	if !d.fits(pg) || d.mu.bytes+uint64(n) > d.Len {
		return false
	}
	if d.mu.pgOf != nil {
		now := d.mu.pgOf(pg.ID)
		if now == nil || !samePlaces(now, pg) || now.Epoch != pg.Epoch {
			return false
		}
		for _, c := range chunks {
			if now.IsRecalled(c.Unit) {
				return false
			}
		}
	}
	d.mu.at, d.mu.id = pg, id
	d.mu.chunks = append(d.mu.chunks, chunks...)
	d.mu.count += len(chunks)
	d.mu.bytes += uint64(n)
	return true
}

// take gives the chunks of all of the value, to the one Put that links them.
func (d *Draft) take(to []layout.Chunk, pg *PG) (chunks []layout.Chunk, id uint64, ok bool) {
	d.lock()
	defer d.unlock()
	if d.mu.at == nil || !d.fits(pg) || d.mu.bytes != d.Len {
		return to, 0, false
	}
	to = append(to, d.mu.chunks...)
	d.mu.void, d.mu.chunks = true, nil
	return to, d.mu.id, true
}

// draft is that of a Put of a part, else nil.
func (o *Op) draft() *Draft {
	if o.Kind != Put || o.Part == nil {
		return nil
	}
	return o.Part.Draft
}

// writePart writes Value as the next chunks of the Draft, and leaves them there.
func (o *Op) writePart() Action {
	d := o.Part.Draft
	number, id, ok := d.next(o.Route.PG)
	if !ok {
		return o.finish(ErrDraft)
	}
	o.need().base, o.chunkID = number, id
	return o.prepareChunks()
}

// wrotePart leaves the chunks with the Draft, or gives them back.
func (o *Op) wrotePart() Action {
	if !o.Part.Draft.leaveChunks(o.Route.PG, o.chunks, o.chunkID, len(o.Value)) {
		return o.finish(ErrDraft)
	}
	o.chunks, o.chunksWritten = o.chunks[:0], false
	return o.finish(nil)
}

// adopt makes the Draft's chunks the Op's, once. They have been written, so they are good while the placement group
// epoch is the same; a queue pair that breaks later takes nothing of them away.
func (o *Op) adopt() bool {
	if o.long() {
		return o.chunksWritten
	}
	var ok bool
	f := o.need()
	f.chunks, f.chunkID, ok = o.Part.Draft.take(f.chunks[:0], o.Route.PG)
	if f.chunksWritten = ok; !ok && o.sureChild {
		o.Part.Draft.child = o.child
	}
	return ok
}
