package repair

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// readCopies READs the segment on every replica, side by side: words may change in between, so what differs is
// only a hint for sync, which looks again in the right order.
func (o *Op) readCopies(then func() index.Action) index.Action {
	o.NewRound()
	for k := range o.Route.PG.Replicas {
		b := &o.work.copies[k]
		if *b == nil {
			*b = o.Buf(layout.SegmentSize)
		}
		o.Add(index.Access{Verb: index.Read, Space: index.Index, Replica: k, Off: o.Work.Off, Buf: *b})
	}
	return o.await(index.StepReadCopies, then)
}

// groupOf is group i of the segment as replica k showed it.
func (o *Op) groupOf(i int, k uint8) layout.Group {
	return layout.Group(o.work.copies[k][i*layout.GroupSize:][:layout.GroupSize])
}

// segmentDiffers lists the words of the segment that differ between replicas, EMPTY ones and headers included: a joiner
// that lacked a nonce would let a delayed publish bring a key back.
func (o *Op) segmentDiffers() (list []wordRef) {
	for i := range layout.SegmentGroups + 1 {
		list = differing(list, o.Route.PG.Replicas, o.Work.Off+uint64(i)*layout.GroupSize,
			func(k uint8) layout.Group { return o.groupOf(i, k) })
	}
	return list
}

func (o *Op) syncSegment() index.Action {
	list := o.segmentDiffers()
	o.Work.Synced += uint64(len(list))
	return o.bringUp(list, o.finishWork)
}

// copyItems writes a copy of every item's record, which A names, to its fresh place on
// all replicas, chunks first. Those of a Move's moved set go to the child. Version, flags and expiry stay: nobody can
// tell the copy from the record. A record that is damaged is mended; if it is ruined its copy is what there is, but for
// a Move's. A record that is not as its item says ends the Op: its word has changed, and a copy would be of something
// else.
func (o *Op) copyItems(list []*item, then func() index.Action) index.Action {
	list = slices.DeleteFunc(slices.Clone(list), func(it *item) bool { return it.written })
	if len(list) == 0 {
		return then()
	}
	o.ToParent()
	for _, it := range list {
		if it.copied < len(it.newChunks) {
			return o.copyChunk(it, func() index.Action { return o.copyItems(list, then) })
		}
	}
	n := o.readBatch(list, func(it *item) int { return it.x.ReadLen() })
	return o.await(index.StepCopyRead, func() index.Action {
		bufs := make([][]byte, n)
		for i, it := range list[:n] {
			r, err := o.parseOf(it, o.Accesses[i].Buf)
			switch {
			case err != nil && !it.tried:
				return o.mend(it, func() index.Action { return o.copyItems(list, then) })
			case err != nil && it.lost && o.Kind != index.Move:
				// As damaged as it is: what is there now has to go, whatever it says.
				bufs[i] = o.Accesses[i].Buf
				continue
			}
			if err == nil && it.key != nil && !bytes.Equal(r.Key, it.key) {
				err = fmt.Errorf("%s: record at %#x has changed", o.where(it.wordRef), it.x.Off())
			}
			if err != nil {
				return o.Finish(err)
			}
			bufs[i] = o.Accesses[i].Buf[:layout.RecordLen(len(r.Key), len(r.Value))]
			if r.Parent != 0 {
				layout.DropParent(bufs[i]) // the copy's word replaces another one
			}
			if len(it.newChunks) > 0 {
				m, err := o.partsOf(it, &r)
				if err == nil && (m.ID != it.id || len(m.Chunks) != len(it.newChunks)) {
					err = fmt.Errorf("%s: manifest at %#x has changed", o.where(it.wordRef), it.x.Off())
				}
				if err != nil {
					return o.Finish(err)
				}
				m.ID, m.Chunks = it.newID, it.newChunks
				layout.EncodeManifest(r.Value, m)
				layout.SetVersion(bufs[i], r.Version) // and the CRC
			}
		}
		if o.Kind == index.Move && list[0].mine {
			o.ToChild()
		}
		o.NewRound()
		for i, it := range list[:n] {
			for k := range o.Route.PG.Replicas {
				o.Add(index.Access{Verb: index.Write, Space: index.Heap, Replica: k, Off: it.n.Off(), Buf: bufs[i]})
			}
		}
		return o.await(index.StepCopyWrite, func() index.Action {
			for _, it := range list[:n] {
				it.written = true
			}
			return o.copyItems(list[n:], then)
		})
	})
}

// copyChunk copies the next chunk of a manifest under the new manifest's id, by which a reader knows that a chunk is
// the manifest's. Chunks go one after the other: each has 2 MiB. A ruined one is copied as it is, and has no id.
func (o *Op) copyChunk(it *item, then func() index.Action) index.Action {
	from, to := it.chunks[it.copied], it.newChunks[it.copied]
	b := o.scratch(layout.SizeOf(from.Code))
	o.NewRound()
	o.Add(index.Access{Verb: index.Read, Space: index.Heap, Off: uint64(from.Unit) * layout.UnitSize, Buf: b})
	return o.await(index.StepCopyChunk, func() index.Action {
		r, err := parseChunk(b, it.id, it.copied)
		switch {
		case err == nil:
			b = b[:layout.RecordLen(0, len(r.Value))]
			layout.SetVersion(b, it.newID)
		case it.triedChunk != it.copied+1:
			it.triedChunk, it.lostChunk = it.copied+1, false
			return o.mendChunk(it, from, it.copied, func(ruined bool) index.Action {
				it.lostChunk = ruined
				return o.copyChunk(it, then)
			})
		case !it.lostChunk:
			return o.Finish(fmt.Errorf("%s: chunk %d at %#x: %w", o.where(it.wordRef), it.copied,
				uint64(from.Unit)*layout.UnitSize, err))
		}
		if o.Kind == index.Move {
			o.ToChild()
		}
		o.NewRound()
		for k := range o.Route.PG.Replicas {
			o.Add(index.Access{Verb: index.Write, Space: index.Heap, Replica: k, Off: uint64(to.Unit) * layout.UnitSize,
				Buf: b})
		}
		return o.await(index.StepCopyChunk, func() index.Action {
			it.copied++
			return then()
		})
	})
}

// parseChunk parses chunk i of the manifest with the id given. A chunk's version is that id, and its expiry its number.
func parseChunk(b []byte, id uint64, i int) (layout.Record, error) {
	r, err := layout.ParseRecord(b)
	if err == nil && (r.Flags&layout.FlagChunk == 0 || r.Version != id || r.Expiry != uint64(i)) {
		err = &layout.CorruptError{What: "chunk", Check: "manifest id", Got: r.Version, Want: id}
	}
	return r, err
}

// replace gives every item's record a fresh place, a batch at a time; its old one is
// handed over. Items whose words somebody else has changed meanwhile are left with done unset. A batch is as much as
// one round of records: places are taken for it alone, so an Op that waits for memory holds little.
func (o *Op) replace(list []*item, then func() index.Action) index.Action {
	w := &o.work
	if len(list) == 0 {
		return then()
	}
	n, total := 0, 0
	for n < len(list) && (n == 0 || total+list[n].x.ReadLen() <= batchBytes) {
		if total += list[n].x.ReadLen(); len(list[n].chunks) > 0 {
			total += batchBytes
		}
		n++
	}
	for _, it := range list[:n] {
		if !o.takePlaces(o.Route.PG, it) {
			return o.noMemory()
		}
	}
	return o.copyItems(list[:n], func() index.Action {
		w.swings = w.swings[:0]
		for _, it := range list[:n] {
			s := swing{wordRef: it.wordRef, x: it.x, n: it.n, fresh: it.fresh, it: it}
			s.old = append(s.old, o.addPlace(o.Route.PG, it.x.WithState(layout.Live), placeDone))
			for _, c := range it.chunks {
				s.old = append(s.old, o.addPlace(o.Route.PG, chunkWord(c), placeDone))
			}
			w.swings = append(w.swings, s)
		}
		return o.swingA(func() index.Action {
			return o.publishSwings(func() index.Action {
				for i := range w.swings {
					if s := &w.swings[i]; s.won {
						s.it.done = true
						o.Work.Moved++
					} else {
						o.givePlaces(s.it)
					}
				}
				o.unlinkFreed()
				return o.replace(list[n:], then)
			})
		})
	})
}
