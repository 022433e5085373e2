package repair

import (
	"bytes"
	"fmt"
	"hash/fnv"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// keyHash tells keys apart well enough for a finding: 128 bits of two hashes, instead of all keys of a segment.
type keyHash struct{ a, b uint64 }

// startScrub begins a Scrub: the segment's words are synced, then every record and chunk that they name is read on
// every replica and judged by its own CRC, its key's group and the other copies. A bad copy is written anew from a good
// one only after its word was found unchanged on all replicas: then its place is linked, and nobody else
// writes there (I4).
func (o *Op) startScrub() index.Action {
	o.Work.Records, o.Work.Units, o.Work.Lost = 0, 0, 0
	o.Work.Linked, o.Work.Findings = map[uint32]uint32{}, nil
	o.work.keys, o.work.same = map[keyHash]wordRef{}, nil
	return o.readCopies(func() index.Action {
		list := o.segmentDiffers()
		o.Work.Synced += uint64(len(list))
		if len(list) == 0 {
			return o.scrubRecords()
		}
		return o.syncWords(list, func() index.Action { return o.readCopies(o.scrubRecords) })
	})
}

func (o *Op) scrubRecords() index.Action {
	var list []*item
	for i := range layout.SegmentGroups + 1 {
		g := o.groupOf(i, 0)
		base := o.Work.Off + uint64(i)*layout.GroupSize
		if err := g.Check(0, 1<<32-1); err != nil {
			o.finding("pg %d group %#x: %v", o.Route.PG.ID, base, err)
		}
		for j := range layout.GroupSlots {
			x, ref := g.Slot(j), wordRef{base, uint8(j)}
			if !x.Readable() {
				continue
			}
			if err := o.inHeap(ref, x); err != nil {
				o.Work.Lost++
				o.finding("%v", err)
				continue
			}
			list = append(list, &item{wordRef: ref, x: x})
		}
	}
	return o.scrubBatch(list)
}

// linked counts the place of w.
func (o *Op) linked(unit uint32, code uint8) {
	o.Work.Units += uint64(layout.UnitsOf(code))
	o.Work.Linked[unit/layout.ExtentUnits] += layout.UnitsOf(code)
}

// scrubBatch READs some of the records on every replica and judges them. Clients go on meanwhile: a record that looks bad
// may have been replaced since its word was read, so nothing is said or written before its word has been read again.
func (o *Op) scrubBatch(list []*item) index.Action {
	if len(list) == 0 {
		return o.scrubSame()
	}
	r := int(o.Route.PG.Replicas)
	n, total := 0, 0
	for n < len(list) && (n == 0 || total+r*aligned(list[n].x.ReadLen()) <= batchBytes) {
		total += r * aligned(list[n].x.ReadLen())
		n++
	}
	buf := o.scratch(total)
	o.NewRound()
	for _, it := range list[:n] {
		buf = o.addCopies(it.x.Off(), it.x.ReadLen(), buf)
	}
	return o.await(index.StepScrubRecords, func() index.Action {
		var bad, manifests, intents []*item
		copies := map[*item][][]byte{}
		for i, it := range list[:n] {
			o.Work.Records++
			o.linked(it.x.Unit(), it.x.Code())
			c := o.copiesAt(i)
			good, ok := o.goodCopy(it, c)
			if !ok || o.anyBad(c, good) != 0 {
				bad, copies[it] = append(bad, it), c
			}
			if !ok {
				continue
			}
			rec, _ := layout.ParseRecord(good)
			o.noteKey(it.wordRef, rec.Key)
			if rec.Flags&layout.FlagIntent != 0 {
				if err := o.noteIntent(it, &rec); err != nil {
					o.Work.Lost++
					o.finding("%v", err)
				}
				intents = append(intents, it)
				continue
			}
			if rec.Flags&layout.FlagManifest == 0 {
				continue
			}
			m, err := o.partsOf(it, &rec)
			if err != nil {
				o.Work.Lost++
				o.finding("%v", err)
				continue
			}
			it.id, it.oldParts = m.ID, m.Chunks
			manifests = append(manifests, it)
		}
		return o.scrubBad(bad, copies, func() index.Action {
			return o.scrubChunks(manifests, 0, func() index.Action {
				return o.scrubIntents(intents, func() index.Action { return o.scrubBatch(list[n:]) })
			})
		})
	})
}

// scrubIntents counts what intents name.
func (o *Op) scrubIntents(list []*item, then func() index.Action) index.Action {
	return o.fetchNamed(list, false, func() index.Action {
		for _, it := range list {
			for _, c := range it.oldParts {
				o.linked(c.Unit, c.Code)
			}
		}
		return then()
	})
}

// addCopies adds a READ of n bytes of the heap on every replica, into b, and returns
// the rest of b.
func (o *Op) addCopies(off uint64, n int, b []byte) []byte {
	for k := range o.Route.PG.Replicas {
		o.Add(index.Access{Verb: index.Read, Space: index.Heap, Replica: k, Off: off, Buf: b[:n:n]})
		b = b[aligned(n):]
	}
	return b
}

// copiesAt is what the i-th addCopies of the round has read, by replica.
func (o *Op) copiesAt(i int) (c [][]byte) {
	r := int(o.Route.PG.Replicas)
	for _, a := range o.Accesses[i*r:][:r] {
		c = append(c, a.Buf)
	}
	return c
}

// goodCopy is the first copy that is whole and whose key belongs where the slot is. A good CRC is not enough: the place
// has had other records before, each with a good one.
func (o *Op) goodCopy(it *item, copies [][]byte) (good []byte, ok bool) {
	for _, b := range copies {
		if r, err := o.parseOf(it, b); err == nil && o.belongs(r.Key, it.base) {
			return b[:layout.RecordLen(len(r.Key), len(r.Value))], true
		}
	}
	return nil, false
}

// anyBad has a bit for every replica whose copy is not good.
func (o *Op) anyBad(copies [][]byte, good []byte) (bad uint8) {
	for k, b := range copies {
		if !bytes.Equal(b[:len(good)], good) {
			bad |= 1 << k
		}
	}
	return bad
}

// belongs reports whether a lookup of key would come to the group at base, or to the
// segment whose stash that is. While the shard moves, a lookup may come to the child's, too.
func (o *Op) belongs(key []byte, base uint64) bool {
	hash := o.Env().HashOf(key)
	r, ok := o.Env().Route(hash)
	if !ok {
		return true // nobody can tell now
	}
	for c := &r; c != nil; c = c.Child {
		if c.PG == nil || c.PG.ID != o.Route.PG.ID {
			continue
		}
		if home, stash := layout.GroupOff(hash, c.Segments); c.ShardOff+home == base || c.ShardOff+stash == base {
			return true
		}
	}
	return false
}

// noteKey looks whether another slot of the segment names the same key.
func (o *Op) noteKey(at wordRef, key []byte) {
	f := fnv.New64a()
	_, _ = f.Write(key)
	h := keyHash{o.Env().HashOf(key), f.Sum64()}
	if other, ok := o.work.keys[h]; ok {
		o.work.same = append(o.work.same, [2]wordRef{other, at})
		return
	}
	o.work.keys[h] = at
}

// scrubBad repairs records of which a copy is not good, or says that none is.
func (o *Op) scrubBad(list []*item, copies map[*item][][]byte, then func() index.Action) index.Action {
	if len(list) == 0 {
		return then()
	}
	it, next := list[0], func() index.Action { return o.scrubBad(list[1:], copies, then) }
	good, ok := o.goodCopy(it, copies[it])
	if !ok {
		good = nil
	}
	return o.repair(it, it.x.Off(), copies[it], good, next)
}

// repair writes good over the copies at off that differ from it, if it is still
// linked: then nobody else writes there. If replicas show different words, the record's writer is between them, or died
// there; sync knows what to do. If no copy is good there is nothing to write: readers get an error, and people a finding.
func (o *Op) repair(it *item, off uint64, copies [][]byte, good []byte, then func() index.Action) index.Action {
	return o.readWords(it.wordRef, func(words []layout.Word) index.Action {
		if words[0] != it.x {
			return then() // replaced meanwhile
		}
		for _, x := range words {
			if x != it.x {
				// Its writer is still writing, or has died: sync compares the copies.
				return o.syncWords([]wordRef{it.wordRef}, then)
			}
		}
		if good == nil {
			o.Work.Lost++
			_, err := layout.ParseRecord(copies[0])
			if err == nil {
				err = fmt.Errorf("not what belongs there")
			}
			o.finding("%s: no good copy at %#x: %v", o.where(it.wordRef), off, err)
			return then()
		}
		o.NewRound()
		bad := o.anyBad(copies, good)
		for k := range o.Route.PG.Replicas {
			if bad&(1<<k) != 0 {
				o.Add(index.Access{Verb: index.Write, Space: index.Heap, Replica: k, Off: off, Buf: good})
			}
		}
		n := uint64(len(o.Accesses))
		return o.await(index.StepWriteCopies, func() index.Action {
			o.Work.Repaired += n
			return then()
		})
	})
}

// scrubChunks does for the chunks of manifests, from the i-th of the first on, what
// scrubBatch does for records.
func (o *Op) scrubChunks(list []*item, i int, then func() index.Action) index.Action {
	if len(list) == 0 {
		return then()
	}
	it := list[0]
	if i >= len(it.oldParts) {
		return o.scrubChunks(list[1:], 0, then)
	}
	c := it.oldParts[i]
	o.linked(c.Unit, c.Code)
	off, n := uint64(c.Unit)*layout.UnitSize, layout.SizeOf(c.Code)
	o.NewRound()
	o.addCopies(off, n, o.scratch(int(o.Route.PG.Replicas)*aligned(n)))
	return o.await(index.StepScrubChunk, func() index.Action {
		next := func() index.Action { return o.scrubChunks(list, i+1, then) }
		copies := o.copiesAt(0)
		var good []byte
		for _, b := range copies {
			if r, err := parseChunk(b, it.id, i); err == nil {
				good = b[:layout.RecordLen(0, len(r.Value))]
				break
			}
		}
		if good != nil && o.anyBad(copies, good) == 0 {
			return next()
		}
		return o.repair(it, off, copies, good, next)
	})
}

// scrubSame looks at slots that seem to name one key: in this order, since words do not
// come back, both did at once if neither has changed. A finding alone (I6): nothing says which of them is the key's.
func (o *Op) scrubSame() index.Action {
	if len(o.work.same) == 0 {
		return o.finishWork()
	}
	pair := o.work.same[0]
	o.work.same = o.work.same[1:]
	o.NewRound()
	b := o.scratch(2 * 8)
	for i, r := range pair {
		o.Add(index.Access{Verb: index.Read, Space: index.Index, Off: r.off(), Buf: b[8*i:][:8:8]})
	}
	return o.await(index.StepScrubSame, func() index.Action {
		both := true
		for i, r := range pair {
			both = both && wordAt(b[8*i:]) == o.groupOf(int((r.base-o.Work.Off)/layout.GroupSize), 0).Slot(int(r.slot))
		}
		if both {
			o.finding("%s and group %#x slot %d: the same key", o.where(pair[0]), pair[1].base, pair[1].slot)
		}
		return o.scrubSame()
	})
}
