package index

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/layout"
)

const segmentSlots = (layout.SegmentGroups + 1) * layout.GroupSlots

// Page.From counts the slots of a segment, and of all that take what was in it.
const _ = uint16(layout.MaxGrowth*segmentSlots + segmentSlots - 1)

// Page is the request of a Scan and its answer.
type Page struct {
	// The page starts at slot From of segment Segment of the shard that covers hash prefix Op.Hash. A From of
	// 0..509 is a slot of that segment. A From of 510 and more is for what has moved to the child. It counts on
	// through the child's segments that take what was in this one, one after the other. An array is replaced by a
	// larger one alone, in which the same Segment is no later.
	Segment uint32
	From    uint16
	// Shard is the array in which From was found, 0 if it is 0; afterwards that of this page.
	Shard   uint32
	Bytes   int  // stop after about so many bytes of records
	Expired bool // include what has expired and is still there
	Images  bool // show the Env the groups, and find no records: a READ of each segment at its reader

	// Answer. Found aliases the Op's buffers.
	// The Value of a Stub is none of the user's.
	Found []layout.Record
	// Corrupt says what of the page could not be read, nil if nothing: Found is the rest.
	Corrupt error
	Next    uint16 // the slot to go on from, or 0 when the segment is done
	End     bool   // that was the shard's last segment and it is done
	Full    bool   // the Env had no room for an image

	at   uint32 // the segment of the array at work
	base int    // From of that segment's first slot
	fan  int    // how many of the child's segments there are beside the parent's, 0: no child
	last uint32 // the shard's last segment
}

func (o *Op) readSegment() Action {
	o.need()
	o.syncBase = 0
	if o.child == 0 {
		if o.Scan.Shard != 0 && o.Scan.Shard != o.Route.Shard {
			o.Scan.From = 0 // in another array words sit elsewhere
		}
		o.Scan.Shard = o.Route.Shard
		p := o.Scan
		p.at, p.base, p.fan, p.last = p.Segment, 0, 0, o.Route.Segments-1
		if o.Route.Child != nil && p.Segment <= p.last {
			p.fan = int(o.Route.Fan())
		}
		if part := int(p.From) / segmentSlots; part > 0 {
			if part > p.fan {
				p.Found, p.Next, p.End = p.Found[:0], 0, false // the move is over; the page may have been used before
				return o.scanned()
			}
			if o.Route.Child.PG == nil {
				return o.again(Refresh)
			}
			p.at, p.base = p.Segment*uint32(p.fan)+uint32(part-1), part*segmentSlots
			o.Route = *o.Route.Child // what has moved of this segment
			o.child = o.Route.Shard
		}
	}
	if o.Scan.at >= o.Route.Segments {
		return o.scanned()
	}
	if o.segment == nil {
		o.segment = o.env.Buf(o, layout.SegmentSize)
	}
	off := o.Route.ShardOff + uint64(o.Scan.at)*layout.SegmentSize
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.Reader(), Off: off, Buf: o.segment})
	if o.Route.PG.Joining && !o.Scan.Images {
		if o.joiners == nil {
			o.joiners = o.env.Buf(o, layout.SegmentSize)
		}
		o.add(Access{Verb: Read, Space: Index, Replica: o.Route.PG.tail(), Off: off, Buf: o.joiners})
	}
	return o.post(stepReadSegment)
}

func (o *Op) gotSegment() Action {
	o.Scan.Next, o.Scan.End = 0, false
	o.Scan.Corrupt, o.corrupts, o.onPage = nil, 0, o.onPage[:0]
	o.begin()
	if o.Scan.Images || int(o.Scan.From) == o.Scan.base {
		o.showImages()
	}
	if o.Scan.Images {
		o.Scan.Found = nil
		return o.scanned()
	}
	total := 0
	base := o.Scan.base
	for i := int(o.Scan.From) - base; i < segmentSlots; i++ {
		at := i / layout.GroupSlots * layout.GroupSize
		off := o.Route.ShardOff + uint64(o.Scan.at)*layout.SegmentSize + uint64(at)
		g := layout.Group(o.segment[at:][:layout.GroupSize])
		if i%layout.GroupSlots == 0 || i == int(o.Scan.From)-base {
			if err := o.damaged(g, off, o.Route.PG.Reader()); err != nil {
				o.corrupted(err)
				i = i/layout.GroupSlots*layout.GroupSlots + layout.GroupSlots - 1 // go on with the next group
				continue
			}
		}
		w := g.Slot(i % layout.GroupSlots)
		if o.Route.PG.Joining && !o.env.ReadOnly() {
			if j := layout.Group(o.joiners[at:][:layout.GroupSize]).Slot(i % layout.GroupSlots); j != w &&
				!o.asksJoiner(w) && (j.Readable() || w.Readable()) {
				if len(o.Accesses) > 0 {
					o.Scan.Next = uint16(base + i)
					break
				}
				o.syncBase = off
				return o.sync(uint8(i%layout.GroupSlots), 1, stepReadSegment)
			}
		}
		if w.State() == layout.Moved && o.child == 0 && o.Route.Child == nil {
			home := g
			if i/layout.GroupSlots == layout.StashGroup {
				home = o.segment[:layout.GroupSize] // a stash is cleared before any home group
			}
			if !o.leftOver(home) {
				if o.MapCurrent == 0 || o.MapCurrent != o.Route.MapVersion {
					o.astray = true
					return o.again(Refresh) // by a move that this map does not know
				}
				o.corrupted(o.groupError(off, o.Route.PG.Reader(), g.MoveError()))
				i = i/layout.GroupSlots*layout.GroupSlots + layout.GroupSlots - 1
				continue
			}
		}
		if !w.Readable() {
			continue
		}
		if !layout.InHeap(w, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
			o.corrupted(o.groupError(off, o.Route.PG.Reader(), g.Check(o.Route.PG.HeapLo, o.Route.PG.HeapHi)))
			continue
		}
		if n := len(o.Accesses); n > 0 && total+w.ReadLen() > o.Scan.Bytes {
			o.Scan.Next = uint16(base + i)
			break
		}
		total += w.ReadLen()
		o.onPage = append(o.onPage, pageRef{off, uint8(i % layout.GroupSlots), w})
		o.add(Access{Verb: Read, Space: Heap, Replica: o.Route.PG.Reader(), Off: w.Off(),
			Buf: o.recBuf(len(o.Accesses), w.ReadLen())})
	}
	if len(o.Accesses) == 0 {
		return o.scanned()
	}
	o.pageCorrupt, o.pageCorrupts = o.Scan.Corrupt, o.corrupts
	return o.post(stepScanRecords)
}

// showImages shows the Env the segment's groups, but for damaged ones. A segment of which nothing is kept says that the
// Env is full; one image that has grown does not.
func (o *Op) showImages() {
	kept, refused := false, false
	for at := uint64(0); at < layout.SegmentSize; at += layout.GroupSize {
		g := layout.Group(o.segment[at:][:layout.GroupSize])
		if g.CheckHeader() != nil {
			continue
		}
		if o.env.Image(o, uint64(o.Scan.at)*layout.SegmentSize+at, g) {
			kept = true
		} else {
			refused = true
		}
	}
	o.Scan.Full = refused && !kept
}

func (o *Op) gotScanRecords() Action {
	o.Scan.Found, o.met.list = o.Scan.Found[:0], o.met.list[:0]
	o.syncBase = 0
	for i, at := range o.onPage {
		r, err := layout.ParseLinked(o.recAt(i))
		if err != nil && o.ruinUnder(at.word) == nil {
			return o.mendOnPage(i, err)
		}
		where := func(err error) error {
			return fmt.Errorf("pg %d replica %d: record at %#x: %w", o.Route.PG.ID, o.Route.PG.Reader(), at.word.Off(),
				err)
		}
		if err != nil {
			o.corrupted(where(err))
			continue
		}
		if r.Flags&layout.FlagIntent != 0 {
			in, err := layout.ParseIntent(r.Value, o.Route.PG.HeapLo, o.Route.PG.HeapHi)
			if err != nil {
				o.corrupted(where(err))
				continue
			}
			o.met.list = append(o.met.list, met{at.word.Off(), in})
			continue
		}
		if o.Scan.Expired || !o.isExpired(&r.RecordHeader) {
			o.Scan.Found = append(o.Scan.Found, r)
		}
	}
	return o.scanIntents()
}

type pageRef struct {
	group uint64 // region offset
	slot  uint8
	word  layout.Word
}

// mendOnPage looks for a good copy of the i-th record of a Scan's page, then goes on.
func (o *Op) mendOnPage(i int, err error) Action {
	at := o.onPage[i]
	o.syncBase = at.group
	return o.mend(mending{slot: at.slot, word: at.word, off: at.word.Off(), into: o.recAt(i),
		good: o.goodRecord(at.word, at.slot), then: func(gone bool) Action {
			if gone {
				o.ruins = append(o.ruins, ruin{word: at.word, err: err})
			}
			o.Scan.Corrupt, o.corrupts = o.pageCorrupt, o.pageCorrupts
			return o.gotScanRecords()
		}})
}

// mendDecided puts what the head shows, b, on a Scan's page instead of tentative word x, whose record is damaged.
func (o *Op) mendDecided(x, b layout.Word) Action {
	i := slices.IndexFunc(o.onPage, func(p pageRef) bool { return p.word == x })
	o.onPage[i].word = b
	o.recBuf(i, b.ReadLen())
	_, err := layout.ParseLinked(o.mending.into)
	return o.mendOnPage(i, err)
}

// corrupted notes what a Scan cannot read, and leaves out.
func (o *Op) corrupted(err error) {
	if o.corrupts++; o.corrupts <= maxCorrupts {
		o.Scan.Corrupt = errors.Join(o.Scan.Corrupt, err)
	}
}

// maxCorrupts is how many errors of one segment are told one by one.
const maxCorrupts = 4

func (o *Op) scanned() Action {
	if n := o.corrupts - maxCorrupts; n > 0 {
		o.Scan.Corrupt = errors.Join(o.Scan.Corrupt, fmt.Errorf("and %d more in this segment", n))
	}
	p := o.Scan
	if p.Next == 0 && p.base/segmentSlots < p.fan {
		p.Next = uint16(p.base + segmentSlots) // the child's share of this segment, or the next of it
	}
	p.End = p.Next == 0 && p.Segment >= p.last
	return o.finish(nil)
}
