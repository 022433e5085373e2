package repair

import (
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// placeState says whose a place is, as far as this Op knows.
//
//	a place for a copy:   own ── CAS posted ──> posted ── won ───> done: n links it
//	                       ^                       └─── lost ──> own
//	the place of x:       done ─ CAS posted ──> posted ── won ───> freed ── published ──> done: in limbo
//	                       ^                       └─── lost ──> done: whoever won has it
//
// An Op can end between any two of these: Release gives back what is own, and leaves to recall what is posted or
// freed. Nothing else would be safe: a CAS without a known result may have linked the place, and readers at the
// tail still reach one that is not published as gone.
type placeState uint8

const (
	placeDone   placeState = iota // none of this Op's business, or no longer
	placeOwn                      // taken; no word ever named it
	placePosted                   // a CAS is under way that links or unlinks it
	placeFreed                    // A has unlinked it for us; not yet published
)

type place struct {
	pg    *index.PG
	w     layout.Word
	state placeState
}

// addPlace notes a place and returns its number. Numbers stay good until Release: items and swings hold them
// instead of places, so that each place has one state wherever it is named.
func (o *Op) addPlace(pg *index.PG, w layout.Word, s placeState) int {
	o.work.places = append(o.work.places, place{pg, w, s})
	return len(o.work.places) - 1
}

func (w *workState) turn(places []int, s placeState) {
	for _, i := range places {
		w.places[i].state = s
	}
}

// Release is index.Machine. It gives back the places that no word ever named, and leaves to recall those for which
// that is not certain. Unless nothing is under way, it also leaves to recall those to which a verb may still come.
func (o *Op) Release(idle bool) {
	for _, p := range o.work.places {
		switch {
		case p.state == placeDone:
		case p.state == placeOwn && idle:
			o.Env().Unuse(p.pg, p.w)
		default:
			o.Env().Leak(p.pg, p.w)
		}
	}
	o.work.places = o.work.places[:0]
}

// unlinkFreed hands over what has been unlinked and published. Its caller has seen the tail swing: before that,
// limbo would begin too early (I4).
func (o *Op) unlinkFreed() {
	for i := range o.work.places {
		if p := &o.work.places[i]; p.state == placeFreed {
			p.state = placeDone
			o.Env().Unlinked(p.pg, p.w)
		}
	}
}

func chunkWord(c layout.Chunk) layout.Word { return layout.MakeLive(c.Ver, 0, c.Code, c.Unit) }

// takePlaces takes a place in pg for a copy of it's record, and for its chunks if
// they are to be copied. It is all or none: half of a long value would keep memory from others
// while it waits for the rest.
func (o *Op) takePlaces(pg *index.PG, it *item) bool {
	take := func(code uint8) (layout.Chunk, bool) {
		unit, ver, size, ok := o.Env().Alloc(pg, code)
		if !ok {
			o.work.wantPG, o.work.wantCode = pg.ID, code
			o.givePlaces(it)
			return layout.Chunk{}, false
		}
		c := layout.Chunk{Unit: unit, Code: size, Ver: ver}
		it.fresh = append(it.fresh, o.addPlace(pg, chunkWord(c), placeOwn))
		return c, true
	}
	for _, c := range it.chunks {
		n, ok := take(c.Code)
		if !ok {
			return false
		}
		it.newChunks = append(it.newChunks, n)
	}
	c, ok := take(it.x.Code())
	if !ok {
		return false
	}
	it.havePlace = true
	it.n = layout.MakeLive(c.Ver, it.x.FP(), c.Code, c.Unit)
	o.work.places[it.fresh[len(it.fresh)-1]].w = it.n
	if len(it.chunks) > 0 {
		it.newID = o.Env().Version(0)
	}
	return true
}

// givePlaces gives back it's places, which no word named and nothing is under way to.
func (o *Op) givePlaces(it *item) {
	for _, i := range it.fresh {
		if p := &o.work.places[i]; p.state == placeOwn {
			p.state = placeDone
			o.Env().Unuse(p.pg, p.w)
		}
	}
	it.havePlace, it.written, it.copied, it.fresh, it.newChunks = false, false, 0, nil, nil
}
