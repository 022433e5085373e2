package simtest

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/layout"
)

// share is what lived in a placement group while an eviction looked there: all of the namespace's there, whatever the
// eviction has found of it. The quota of pins goes by that.
type share struct {
	groups []uint64 // that the eviction reads
	now    int      // how often it was looked at
	all    map[site]*lived
}

// site is a word in a slot.
type site struct {
	off  uint64
	word layout.Word
}

// lived is a record. READs may have found it at any time since they began, or at none unless it was there all the time.
type lived struct {
	units  float64
	last   int  // when it was there last
	always bool // it was there all the time
	pinned bool // it was pinned at some time, by its writer or by an access word
	known  bool // all the time each access word said so
}

// watchShares notes what lives, for all evictions under way.
func (w *World) watchShares() {
	if w.cfg.Pins == 0 {
		return
	}
	for _, c := range w.cls {
		for _, r := range c.run {
			if r.evict != nil && r.evict.share != nil {
				w.watchShare(r.evict)
			}
		}
	}
}

// watchShare notes what lives now.
func (w *World) watchShare(ev *evicting) {
	l := ev.share
	chain := w.chain(ev.pg)
	if len(chain) == 0 {
		return
	}
	first := l.now == 0
	l.now++
	for _, s := range chain[0].slots {
		if s.now.State() != layout.Live {
			continue
		}
		at := site{s.off, s.now}
		x := l.all[at]
		if x == nil {
			x = &lived{units: float64(max(s.now.Units(), 1)), always: first, known: first}
			l.all[at] = x
		}
		x.last = l.now
		some, each := w.accessTells(ev.pg, at)
		x.pinned = x.pinned || some || w.pins.until[w.linked[named{ev.pg, s.now}].value] > w.millis
		x.known = x.known && each
	}
	for _, x := range l.all {
		x.always = x.always && x.last == l.now
	}
}

// accessTells reports whether access words say that a record is pinned: that of some copy, and that of each.
func (w *World) accessTells(pg uint32, at site) (some, each bool) {
	each = true
	for _, r := range w.regions {
		if r.pg != pg {
			continue
		}
		a := layout.AccessWord(binary.LittleEndian.Uint64(r.bytes[w.indexBytes+at.off:]))
		is := a.Of(at.word) && a.AheadTicks(w.millis) > 0 && !a.Expired(w.millis)
		some, each = some || is, each && is
	}
	return some, each
}

// quotaJudged sees that an eviction that has read its groups, and finds that more is pinned than the quota, or that no
// more is, may do so by the share that was pinned of all that lived meanwhile.
func (w *World) quotaJudged(c *cl, ev *evicting) {
	l := ev.share
	w.watchShare(ev)
	var ever, pinned, free, known float64
	for at, x := range l.all {
		if !slices.ContainsFunc(l.groups, func(g uint64) bool { return at.off >= g && at.off-g < layout.GroupSize }) {
			w.pins.partial++
			return // of which it knows nothing
		}
		ever += x.units
		switch {
		case x.pinned:
			pinned += x.units
		case x.always:
			free += x.units
		}
		if x.always && x.known {
			known += x.units
		}
	}
	const rounding = 1e-9
	switch most, least := pinned/max(pinned+free, 1), known/max(ever, 1); {
	case ev.over && most <= w.cfg.PinQuota-rounding:
		w.fail(fmt.Errorf("client %d finds more than %v pinned, and at most %v was, of %v units", c.i, w.cfg.PinQuota,
			most, ever))
	case !ev.over && least > w.cfg.PinQuota+rounding:
		w.fail(fmt.Errorf("client %d finds no more than %v pinned, and at least %v was, of %v units", c.i,
			w.cfg.PinQuota, least, ever))
	case ev.over:
		w.pins.above++
	default:
		w.pins.within++
	}
}
