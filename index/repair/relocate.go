package repair

import (
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// relocate looks for what lies in the extent, until there is nothing. It takes no lock: a record that is put elsewhere
// is an update with the same value and version, which loses to any other; and whoever wins puts the record elsewhere,
// too, since no session takes places of a recalled extent after it has acknowledged the recall.
func (o *Op) relocate() index.Action {
	o.setGroups(o.Work.Off)
	o.NewRound()
	o.addImages()
	return o.await(index.StepReadGroups, func() index.Action {
		w := &o.work
		if w.looks++; w.looks > maxLooks {
			return o.Restart(index.Backoff)
		}
		g := o.image(0, 0)
		w.items = nil
		count := o.Work.Count
		if count {
			o.Work.Lost = 0
		}
		for j := range layout.GroupSlots {
			x, ref := g.Slot(j), wordRef{o.Work.Off, uint8(j)}
			if !x.Readable() {
				continue
			}
			if err := o.inHeap(ref, x); err != nil {
				if count {
					// It names no memory of the heap's, so it keeps none.
					o.Work.Lost++
					o.finding("%v", err)
					continue
				}
				return o.Finish(err)
			}
			w.items = append(w.items, &item{wordRef: ref, x: x})
		}
		var manifests []*item
		// Without its manifest nobody knows the chunks of a long value, which a recall must not
		// free.
		must := !count || len(o.Work.Extents) > 0
		if count && o.Work.Window.Units == 0 {
			return o.readManifests(w.items, &manifests, must, o.countFound)
		}
		return o.readManifests(w.items, &manifests, must, o.relocateFound)
	})
}

// countFound counts what the group links. A word that a replica still shows and that is gone at A is
// synced: its record may lie in an extent of which all the rest becomes free.
func (o *Op) countFound() index.Action {
	if list := o.tentativeIn(func(unit uint32, _ uint8) bool {
		return slices.Contains(o.Work.Extents, unit/layout.ExtentUnits)
	}); len(list) > 0 {
		return o.replace(list, o.relocate)
	}
	o.Work.Records, o.Work.Units, o.Work.Linked, o.Work.Kept = 0, 0, map[uint32]uint32{}, nil
	kept := func(unit uint32, code uint8) {
		o.linked(unit, code)
		if slices.Contains(o.Work.Extents, unit/layout.ExtentUnits) {
			o.Work.Kept = append(o.Work.Kept, UnitRun{unit, layout.UnitsOf(code)})
		}
	}
	for _, it := range o.work.items {
		o.Work.Records++
		kept(it.x.Unit(), it.x.Code())
		for _, c := range it.oldParts {
			kept(c.Unit, c.Code)
		}
	}
	late := differing(nil, o.Route.PG.Replicas, o.Work.Off, func(k uint8) layout.Group { return o.image(0, k) })
	o.Work.Synced += uint64(len(late))
	return o.syncWords(late, o.finishWork)
}

// relocateFound puts elsewhere what lies in the extents, or in the window, and reads the group again until there is
// nothing. A long value moves as a whole if one of its chunks lies there. A FROZEN word belongs to a mover, which is
// waited for: its copy goes to memory that is not recalled. An intent is settled if it, or what it names, lies there.
func (o *Op) relocateFound() index.Action {
	in := func(unit uint32, code uint8) bool {
		if units := layout.UnitsOf(code); o.Work.Count {
			return o.Work.Window.meets(unit, units) && (o.Work.WindowMost == 0 || units < o.Work.WindowMost)
		}
		return slices.Contains(o.Work.Extents, unit/layout.ExtentUnits)
	}
	var list, met []*item
	for _, it := range o.work.items {
		if slices.ContainsFunc(it.oldParts, func(c layout.Chunk) bool { return in(c.Unit, c.Code) }) {
			it.chunks = it.oldParts // all of them: they carry the manifest's id
		} else if !in(it.x.Unit(), it.x.Code()) {
			continue
		}
		if it.in != nil {
			it.chunks, met = nil, append(met, it)
			continue
		}
		if it.x.State() == layout.Frozen {
			// Its mover copies it, or the one after.
			if o.work.frozen++; o.work.frozen > maxFrozen {
				return o.Finish(fmt.Errorf("%s: %v stays FROZEN in extent %d", o.where(it.wordRef), it.x,
					it.x.Unit()/layout.ExtentUnits))
			}
			return o.Restart(index.Backoff)
		}
		list = append(list, it)
	}
	if len(list) == 0 {
		list = o.tentativeIn(in)
	}
	if len(met) > 0 {
		return o.settleIntents(met, o.relocate) // what it has come to is moved, if need be
	}
	if len(list) > 0 {
		return o.replace(list, o.relocate) // the client that won a word instead of us put it elsewhere
	}
	if o.Work.Count {
		return o.countFound()
	}
	// A replica may still show what is gone at A, and that lies in the extent.
	late := differing(nil, o.Route.PG.Replicas, o.Work.Off, func(k uint8) layout.Group { return o.image(0, k) })
	o.Work.Synced += uint64(len(late))
	return o.syncWords(late, o.finishWork)
}

// tentativeIn lists the LIVE words at A of slots in which another replica shows another LIVE word that lies in what is
// to be freed. That may be a tentative word, which nobody undoes, and its writer may be gone. A record that is put
// elsewhere moves such a replica on.
func (o *Op) tentativeIn(in func(unit uint32, code uint8) bool) (list []*item) {
	if !o.Route.PG.Speculative {
		return nil
	}
	for _, it := range o.work.items {
		for k := uint8(1); k < o.Route.PG.Replicas && it.x.State() == layout.Live; k++ {
			if q := o.image(0, k).Slot(int(it.slot)); q != it.x && q.State() == layout.Live && in(q.Unit(), q.Code()) {
				list = append(list, it)
				break
			}
		}
	}
	return list
}
