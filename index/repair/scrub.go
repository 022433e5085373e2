package repair

import (
	"bytes"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// keyHash tells keys apart well enough for a finding: 128 bits of two hashes, instead of all keys of a segment.
type keyHash struct{ a, b uint64 }

// startScrub begins a Scrub: the segment's words are synced, then every record and chunk that they name is read on
// every replica and judged by its own CRC, its key's group and the other copies. A bad copy is written anew from a good
// one, see mendAt.
func (o *Op) startScrub() index.Action {
	o.Work.Records, o.Work.Units, o.Work.Lost = 0, 0, 0
	o.Work.Linked, o.Work.Findings = map[uint32]uint32{}, nil
	o.work.keys, o.work.same, o.work.ruins = map[keyHash]wordRef{}, nil, nil
	o.Work.Freed = 0
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
				o.ruin(&item{wordRef: ref, x: x}, err)
				continue
			}
			list = append(list, &item{wordRef: ref, x: x})
		}
	}
	return o.scrubBatch(list)
}

func (o *Op) linked(unit uint32, code uint8) {
	o.Work.Units += uint64(layout.UnitsOf(code))
	o.Work.Linked[unit/layout.ExtentUnits] += layout.UnitsOf(code)
}

// scrubBatch READs some of the records on every replica and judges them. Clients go on meanwhile: a record that looks
// bad may have been replaced since its word was read, so nothing is said or written before its word has been read
// again.
func (o *Op) scrubBatch(list []*item) index.Action {
	if len(list) == 0 {
		return o.freeRuins(o.scrubSame)
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
		for i, it := range list[:n] {
			o.Work.Records++
			o.linked(it.x.Unit(), it.x.Code())
			c := o.copiesAt(i)
			good := o.goodCopy(c, o.judgeCopy(it))
			if good == nil || o.anyBad(c, good) != 0 {
				bad = append(bad, it)
			}
			if good == nil {
				continue
			}
			rec, _ := layout.ParseLinked(good)
			o.noteKey(it.wordRef, rec.Key)
			if rec.Flags&layout.FlagIntent != 0 {
				if err := o.noteIntent(it, &rec); err != nil {
					o.ruin(it, err)
				}
				intents = append(intents, it)
				continue
			}
			if rec.Flags&layout.FlagManifest == 0 {
				continue
			}
			m, err := o.partsOf(it, &rec)
			if err != nil {
				o.ruin(it, err)
				continue
			}
			it.id, it.oldParts = m.ID, m.Chunks
			manifests = append(manifests, it)
		}
		return o.scrubBad(bad, func() index.Action {
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

// judgeCopy tells what of a copy of it's record is good, nil: nothing. It is whole, and its key belongs where the slot
// is: the place has had other records before, each with a good CRC.
func (o *Op) judgeCopy(it *item) func(b []byte) []byte {
	return func(b []byte) []byte {
		r, err := o.parseOf(it, b)
		if err != nil || !o.belongs(r.Key, it.base) {
			return nil
		}
		return b[:layout.RecordLen(len(r.Key), len(r.Value))]
	}
}

// goodCopy is the first copy that is good, nil: none is.
func (o *Op) goodCopy(copies [][]byte, judge func(b []byte) []byte) []byte {
	for _, b := range copies {
		if good := judge(b); good != nil {
			return good
		}
	}
	return nil
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

// scrubBad mends records of which a copy is not good, or says that none is.
func (o *Op) scrubBad(list []*item, then func() index.Action) index.Action {
	if len(list) == 0 {
		return then()
	}
	it := list[0]
	return o.mend(it, func() index.Action {
		if it.lost {
			o.ruin(it, fmt.Errorf("%s: no good copy at %#x", o.where(it.wordRef), it.x.Off()))
		}
		return o.scrubBad(list[1:], then)
	})
}

// ruin tells of a record of which no copy is good, or of a word that names none. With Work.FreeLost the word is taken
// away in the end.
func (o *Op) ruin(it *item, err error) {
	o.Work.Lost++
	o.finding("%v", err)
	if w := &o.work; !slices.Contains(w.ruins, it) {
		w.ruins = append(w.ruins, it)
	}
}

// freeRuins takes away the words of what is ruined. Their places are ours then, but for those that a word of a move, or
// an intent, names: another word may name them as well, and a recall finds them.
func (o *Op) freeRuins(then func() index.Action) index.Action {
	var list []*item
	for _, it := range o.work.ruins {
		if only := o.Work.Only; only != nil &&
			(!slices.Contains(only[0], it.x.FP()) || !slices.Contains(o.Work.More, it.base)) {
			continue
		}
		if it.mine = it.x.State() == layout.Live && o.inHeap(it.wordRef, it.x) == nil; !it.mine {
			it.oldParts = nil
		}
		list = append(list, it)
	}
	if !o.Work.FreeLost || len(list) == 0 {
		return then()
	}
	return o.emptyNow(list, o.deleted, func() index.Action {
		for i := range o.work.swings {
			if o.work.swings[i].won {
				o.Work.Freed++
			}
		}
		return o.publishSwings(func() index.Action {
			o.unlinkFreed()
			return then()
		})
	})
}

// mend writes a good copy of it's record over those that differ, if there is one and it is still linked; it.lost: no
// copy is good.
func (o *Op) mend(it *item, then func() index.Action) index.Action {
	it.tried = true
	return o.mendAt(it, it.x.Off(), it.x.ReadLen(), o.judgeCopy(it), func(ruined bool) index.Action {
		it.lost = ruined
		return then()
	})
}

func (o *Op) mendChunk(it *item, c layout.Chunk, i int, then func(ruined bool) index.Action) index.Action {
	judge := func(b []byte) []byte {
		r, err := parseChunk(b, it.id, i)
		if err != nil {
			return nil
		}
		return b[:layout.RecordLen(0, len(r.Value))]
	}
	return o.mendAt(it, uint64(c.Unit)*layout.UnitSize, layout.SizeOf(c.Code), judge, then)
}

// mendAt looks for a good copy of n bytes at off, which it's word names, and writes it over the others. The word is
// read on every replica before the copies are. If all show it, or a child of it, each has had the bytes since, and
// nobody else writes there (I4). If replicas show other words, the record's writer is between them, or died there; sync
// knows what to do. ruined: no copy is good. It is false if the word has been replaced.
func (o *Op) mendAt(it *item, off uint64, n int, judge func(b []byte) []byte,
	then func(ruined bool) index.Action) index.Action {
	expect := it.x
	if it.under != 0 {
		expect = it.under
	}
	return o.readWords(it.wordRef, func(words []layout.Word) index.Action {
		if words[0] != expect {
			return then(false)
		}
		return o.pastAll(it.wordRef, expect, words, func(past bool) index.Action {
			if past {
				return o.mendCopies(off, n, judge, then)
			}
			if o.work.looks++; o.work.looks > maxLooks {
				return o.Restart(index.Backoff)
			}
			return o.syncWords([]wordRef{it.wordRef}, func() index.Action { return o.mendAt(it, off, n, judge, then) })
		})
	})
}

// pastAll reports whether each replica is at or past w, which the head shows: words are what they show.
func (o *Op) pastAll(at wordRef, w layout.Word, words []layout.Word, then func(past bool) index.Action) index.Action {
	o.NewRound()
	for k, x := range words {
		switch {
		case x == w:
		case o.Route.PG.MayBeTentative(uint8(k), x):
			o.Add(index.Access{Verb: index.Read, Space: index.Heap, Replica: uint8(k), Off: x.Off(),
				Buf: make([]byte, x.ReadLen())})
		default:
			return then(false)
		}
	}
	if len(o.Accesses) == 0 {
		return then(true)
	}
	return o.await(index.StepReadWord, func() index.Action {
		for i := range o.Accesses {
			if h := layout.HeadOf(o.Accesses[i].Buf); !h.IsChildOf(w) {
				return then(false)
			}
		}
		return then(true)
	})
}

// mendCopies READs n bytes at off on every replica, and writes the good copy over the others.
func (o *Op) mendCopies(off uint64, n int, judge func(b []byte) []byte,
	then func(ruined bool) index.Action) index.Action {
	o.NewRound()
	o.addCopies(off, n, o.scratch(int(o.Route.PG.Replicas)*aligned(n)))
	return o.await(index.StepScrubRecords, func() index.Action {
		copies := o.copiesAt(0)
		good := o.goodCopy(copies, judge)
		if good == nil {
			return then(true)
		}
		bad := o.anyBad(copies, good)
		o.NewRound()
		for k := range o.Route.PG.Replicas {
			if bad&(1<<k) != 0 {
				o.Add(index.Access{Verb: index.Write, Space: index.Heap, Replica: k, Off: off, Buf: good})
			}
		}
		mended := uint64(len(o.Accesses))
		if mended == 0 {
			return then(false)
		}
		return o.await(index.StepWriteCopies, func() index.Action {
			o.Work.Repaired += mended
			return then(false)
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
		good := o.goodCopy(copies, func(b []byte) []byte {
			r, err := parseChunk(b, it.id, i)
			if err != nil {
				return nil
			}
			return b[:layout.RecordLen(0, len(r.Value))]
		})
		if good != nil && o.anyBad(copies, good) == 0 {
			return next()
		}
		return o.mendChunk(it, c, i, func(ruined bool) index.Action {
			if ruined {
				o.ruin(it, fmt.Errorf("%s: no good copy of chunk %d at %#x", o.where(it.wordRef), i, off))
			}
			return next()
		})
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
