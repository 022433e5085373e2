package repair

import (
	"slices"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// evictBytes is how much of a candidate's record is read: its header and, mostly, its
// key. Of a longer key the hash stays unknown.
const evictBytes = 256

// MaxEvictGroups bounds the groups that one Evict looks at.
const MaxEvictGroups = 32

// evictGroup is a group that an Evict looks at. Its memory is kept over a restart.
type evictGroup struct {
	off           uint64
	words, access []byte // at A; at the reader, if there are access words
}

// startEvict reads groups where words are decided, and their access words.
//
// An eviction is a delete that nobody waits for: LIVE words go to EMPTY at A, then
// down the chain, by the rules of any delete (docs/protocol.md). It takes no lock, and
// a word that somebody else changes meanwhile is left to him. Clients evict by
// sampling, as in Ditto (SOSP'23).
//
// Access words are read beside the group, at the tail where clients write them. They are hints: each has a tag of its
// key's fingerprint, and nothing is removed as expired before the record itself has said so.
func (o *Op) startEvict() index.Action {
	o.Work.Evicted, o.Work.Overflow, o.Work.Expiring = nil, nil, 0
	pg, w := o.Route.PG, &o.work
	o.NewRound()
	for i := range min(1+len(o.Work.More), MaxEvictGroups) {
		off := o.Work.Off
		if i > 0 {
			off = o.Work.More[i-1]
			if err := checkIndex(pg, off, layout.GroupSize); err != nil {
				return o.Finish(err)
			}
		}
		if i == len(w.evicts) {
			w.evicts = append(w.evicts, evictGroup{words: o.Buf(layout.GroupSize)})
		}
		g := &w.evicts[i]
		g.off = off
		o.Add(index.Access{Verb: index.Read, Space: index.Index, Off: off, Buf: g.words})
		if pg.Cache && o.Work.Only == nil {
			if g.access == nil {
				g.access = o.Buf(layout.GroupSize)
			}
			o.Add(index.Access{Verb: index.Read, Space: index.Heap, Replica: pg.Reader(), Off: pg.AccessOff + off,
				Buf: g.access})
		}
	}
	if !pg.Cache {
		return o.await(index.StepSampleGroups, o.evictExpired)
	}
	return o.await(index.StepSampleGroups, o.evictChosen)
}

// evictable lists the records of the groups just read. FROZEN ones stay: they are on their way elsewhere, and their
// mover relies on finding them as it froze them.
func (o *Op) evictable() (list []*item) {
	for i, g := range o.work.evicts {
		var only []uint16
		if o.Work.Only != nil {
			if i < len(o.Work.Only) {
				only = o.Work.Only[i]
			}
			if layout.Group(g.words).Header().OVF() {
				o.Work.Overflow = append(o.Work.Overflow, g.off)
			}
		}
		for j := range layout.GroupSlots {
			x, ref := layout.Group(g.words).Slot(j), wordRef{g.off, uint8(j)}
			if x.State() != layout.Live {
				continue
			}
			if o.Work.Only != nil && !slices.Contains(only, x.FP()) {
				continue
			}
			if err := o.inHeap(ref, x); err != nil {
				o.finding("%v", err)
				continue
			}
			it := &item{wordRef: ref, x: x, mine: true}
			if o.Route.PG.Cache && o.Work.Only == nil {
				if a := layout.AccessWord(layout.Group(g.access).Slot(j)); a.Of(x) {
					it.evicted.Access = a
				}
			}
			it.evicted.Word, it.evicted.Units = x, x.Units()
			list = append(list, it)
		}
	}
	return list
}

// mine reports whether a record that has expired is this session's to remove: sessions share that by where its place
// came from, so that they do not all delete the same, and memory comes back to its home.
func (o *Op) mine(it *item) bool { return o.Work.Mine == nil || o.Work.Mine(it.x.Unit()) }

// evictChosen asks which records are to go: Work.Choose, or else the expiry in the access words, which is rounded to
// seconds. Of these it reads the beginning, for the exact expiry, the key's hash, by which a policy knows
// a key that comes back, and whether it is a manifest. A note that was wrong is written anew, so that it misleads once.
func (o *Op) evictChosen() index.Action {
	all := o.evictable()
	now := o.Env().NowMillis()
	var list []*item
	switch {
	case o.Work.Only != nil:
		list = all // access words tell seconds only
	case o.Work.Choose == nil:
		for _, it := range all {
			a := it.evicted.Access
			if a.Expires() {
				o.Work.Expiring++
			}
			if a.Expired(now) && (o.mine(it) || a.Expired(o.Work.Late)) {
				list = append(list, it)
			}
		}
	default:
		c := make([]Candidate, len(all))
		for i, it := range all {
			c[i] = it.evicted.Candidate
		}
		seen := make([]bool, len(all))
		for _, i := range o.Work.Choose(c) {
			if i >= 0 && i < len(all) && !seen[i] {
				seen[i] = true
				list = append(list, all[i])
			}
		}
	}
	if len(list) == 0 {
		return o.finishWork()
	}
	n := o.readBatch(list, func(it *item) int { return min(it.x.ReadLen(), evictBytes) })
	list = list[:n]
	return o.await(index.StepReadVictims, func() index.Action {
		var gone, manifests []*item
		for i, it := range list {
			b := o.Accesses[i].Buf
			h, e := layout.HeadOf(b), &it.evicted
			e.Expired, e.Pinned = h.Expired(now), h.PinnedMillis()
			if o.Work.Only != nil {
				if h.Expiry != 0 {
					o.Work.Expiring++
				}
				if !e.Expired {
					continue // replaced, or another with the same fingerprint
				}
			}
			if k := layout.RecordLen(int(h.KeyLen), 0); k <= len(b) {
				e.Hash = o.Env().HashOf(b[layout.RecordHeaderSize:k])
			}
			// The access word's expiry is coarse, or about the record that was there before.
			if e.Access.Expired(now) && !e.Expired {
				o.Note(it.off(), it.x, e.Access, h.Expiry, 0)
				continue
			}
			if o.spared(it, &h, now) {
				continue
			}
			if h.Flags&layout.FlagManifest != 0 {
				manifests = append(manifests, it)
			}
			gone = append(gone, it)
		}
		return o.evict(gone, manifests)
	})
}

// notePinMillis is for how long an access word says that a record is pinned by its header. So eviction reads that
// header so often, and a record that takes its place, and is not pinned, is passed over no longer.
const notePinMillis = 10 * 60 * 1000

// spared reports whether it, which was picked and has the header h, stays because it is pinned. It notes that, so that
// it is not picked again soon.
func (o *Op) spared(it *item, h *layout.RecordHeader, now uint64) bool {
	if it.evicted.Expired || o.Work.Spare == nil || !o.Work.Spare(it.evicted.Candidate, h.PinnedMillis()) {
		return false
	}
	if h.IsPinned(now) {
		o.Note(it.off(), it.x, it.evicted.Access, h.Expiry, min(h.PinnedMillis(), now+notePinMillis))
	}
	return true
}

// evictExpired looks for records that have expired if no access words say so, which
// takes a READ of every header, and proves it by all of the record.
func (o *Op) evictExpired() index.Action {
	now := o.Env().NowMillis()
	var list []*item
	return o.fetch(o.evictable(), layout.RecordHeaderSize, func(it *item, b []byte) error {
		e := layout.HeadOf(b).Expiry
		if e != 0 {
			o.Work.Expiring++
		}
		if e != 0 && e <= now && (o.mine(it) || e <= o.Work.Late) {
			list = append(list, it)
		}
		return nil
	}, func() index.Action {
		var gone, manifests []*item
		return o.fetch(list, 0, func(it *item, b []byte) error {
			r, err := o.parseOf(it, b)
			if err != nil || !r.Expired(now) {
				return nil // replaced meanwhile
			}
			it.evicted.Hash, it.evicted.Expired = o.Env().HashOf(r.Key), true
			if r.Flags&layout.FlagManifest != 0 {
				manifests = append(manifests, it)
			}
			gone = append(gone, it)
			return nil
		}, func() index.Action { return o.evict(gone, manifests) })
	})
}

// evict removes the records of list, with the chunks of those that are manifests. A manifest that cannot be read any
// more goes without its chunks, which recall finds.
func (o *Op) evict(list, manifests []*item) index.Action {
	if len(list) == 0 {
		return o.finishWork()
	}
	got := func(it *item, b []byte) error {
		if r, err := o.parseOf(it, b); err == nil && r.Flags&layout.FlagManifest != 0 {
			if m, err := o.partsOf(it, &r); err == nil {
				it.oldParts = m.Chunks
			}
		}
		return nil
	}
	return o.fetch(manifests, 0, got, func() index.Action {
		return o.emptyNow(list, o.deleted, func() index.Action {
			return o.publishSwings(func() index.Action {
				o.unlinkFreed()
				for i := range o.work.swings {
					if s := &o.work.swings[i]; s.won {
						o.Work.Evicted = append(o.Work.Evicted, s.it.evicted)
						for _, c := range s.it.oldParts {
							o.Work.Evicted[len(o.Work.Evicted)-1].Units += layout.UnitsOf(c.Code)
						}
					}
				}
				return o.finishWork()
			})
		})
	})
}
