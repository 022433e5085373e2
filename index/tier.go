package index

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/internal/layout"
)

// In place of a record whose value lies on disk there may be a stub, which names an object there. To the protocol a
// stub is a record. An Op that needs the value asks for the object (Fetch) and gives up all that it has seen in memory
// while it waits. So a disk holds back neither the reclaim epoch nor a map.
//
//   - A Get looks at slot and stub in the operation itself, and answers with the object, if that is the one that the
//     stub names. All others look again, and expect the word that they see then.
//   - An object that is not there has moved, as long as the stub has. If the stub is still what the tail shows, the
//     volume has lost it. Then the key is made absent, by a CAS that expects just that stub, before anybody says so.
//   - Demote, Promote and Readdress put another form of the same record in its place, with its version. They expect
//     exactly the word of what they read. The loser gives up.

// VolumeState says whether objects of a volume can be read.
type VolumeState uint8

const (
	VolumeAway VolumeState = iota // not now, from here
	VolumeUp
	VolumeLost // never more: the directory has given the volume up
)

// Tier knows the volumes in which objects lie. It answers from the map.
type Tier interface {
	Volume(id uint32) VolumeState
}

// Object is what Fetch asks for, and brings.
type Object struct {
	At  layout.ObjectAt
	Len int // bytes
	// Got is the answer: Len bytes in memory that stays with the Op until it is done. nil: they could not be read. An
	// object that is not there reads as any other bytes.
	Got []byte
}

// Tiered is the request of an operation of the tier's kinds, and in part its answer.
type Tiered struct {
	// Stub is what the key's stub has to say to a Readdress, a Drop and a Locate. Its version, and the first of At,
	// count alone.
	Stub layout.Stub
	// To is where the object is: of a Readdress a request, of a Demote the answer to Store. Memory of the caller.
	To []layout.ObjectAt
	// Object is, of a Demote, what Store is to keep. It belongs to the caller from then on, and is not changed.
	Object []byte
	// Named is the answer of a Locate: the key's stub names the object.
	Named bool

	rec  layout.Record // of a Demote: the record that is in Object
	body []byte        // of the stub that is written
}

// ErrKept is the answer of an operation of the tier's kinds that leaves the key as it is. It is not what the operation
// is about, or somebody else is at work on it. To a Locate it says that nothing is proven.
var ErrKept = errors.New("the key stays as it is")

// errLong is why an object is not read, and not taken for lost.
var errLong = errors.New("the key's stub names the object of a long value, which this version does not read")

// maxObjectLooks is how often an Op looks at a key whose object it does not find.
const maxObjectLooks = 8

// reading is the object that an Op reads, or has read.
type reading struct {
	rec    layout.Record // the stub, in memory of its own
	stub   layout.Stub   // what rec says
	asked  bool          // Object.Got is the answer, and not judged
	have   bool          // rec is the record that the stub stands for
	next   uint8         // the copy to be read next
	away   bool          // some copy could not be read, which says nothing
	absent bool          // no copy is where stub says
	why    error
	looks  int8
	drops  bool // the Op makes the key absent
}

func (k Kind) isTiered() bool { return k >= Demote && k <= Locate }

// deletes reports whether the word that the Op leaves is EMPTY.
func (o *Op) deletes() bool {
	return o.Kind == Delete || o.Kind == Drop || o.far != nil && o.rare != nil && o.reading.drops
}

// beginTiered chooses the first round trip of the tier's kinds.
func (o *Op) beginTiered(h Hint, hinted bool) Action {
	b := &o.needRare().reading
	exact := hinted && h.Word.State() == layout.Live
	switch {
	case o.Kind == Locate:
		return o.lockGroup()
	case o.Kind == Demote && exact && o.Tiered.To != nil && h.Version == o.Tiered.rec.Version:
		o.take(h)
		return o.putStub()
	case o.Kind == Promote && exact && b.have && h.Version == b.rec.Version:
		o.take(h)
		return o.swap(b.rec.RecordHeader, b.rec.Value)
	case hinted:
		return o.getCached(h)
	}
	return o.guess()
}

// presentTiered acts on the key's record r, or stub, found at the tail under x.
func (o *Op) presentTiered(r *layout.Record) Action {
	t := o.Tiered
	if o.x.State() != layout.Live || o.expired {
		return o.finish(ErrKept)
	}
	var s layout.Stub
	if r.Stub {
		s, _ = r.Object() // ParseLinked has checked it
	}
	names := r.Stub && t != nil && s.Version == t.Stub.Version && s.Names(t.Stub.At[0])
	switch {
	case o.Kind == Demote && !r.Stub:
		return o.demote(r)
	case o.Kind == Promote && r.Stub:
		if !o.holds(r) {
			return o.readObject(r)
		}
		return o.swap(r.RecordHeader, r.Value)
	case o.Kind == Readdress && names:
		s.At, s.Copies = [layout.MaxStubCopies]layout.ObjectAt{}, uint8(len(t.To))
		copy(s.At[:], t.To)
		t.body = layout.AppendStub(t.body[:0], &s, r.Tail())
		return o.swap(r.RecordHeader, t.body)
	case o.Kind == Drop && names:
		return o.casDelete()
	}
	return o.finish(ErrKept)
}

// demote has r stored, or puts the stub of what was stored in its place.
func (o *Op) demote(r *layout.Record) Action {
	t := o.Tiered
	switch {
	case r.Flags&layout.FlagManifest != 0, r.IsPinned(o.env.NowMillis()):
		return o.finish(ErrKept)
	case t.To == nil:
		t.Object = make([]byte, r.EncodedLen())
		layout.EncodeRecord(t.Object, r.RecordHeader, r.Key, r.Value)
		if err := t.rec.Parse(t.Object); err != nil {
			return o.finish(err)
		}
		return Store
	case r.Version != t.rec.Version:
		return o.finish(ErrKept) // what was stored is garbage
	}
	return o.putStub()
}

// putStub puts the stub of the record that was stored in place of that.
func (o *Op) putStub() Action {
	t := o.Tiered
	s := layout.StubOf(&t.rec, len(t.Object), layout.HeadSum(t.Object), t.To...)
	h := t.rec.RecordHeader
	h.Stub, h.Pinned = true, 0
	t.body = layout.AppendStub(t.body[:0], &s, t.rec.Tail())
	return o.swap(h, t.body)
}

// swap puts another form of the same record in place of the one that x names.
func (o *Op) swap(h layout.RecordHeader, value []byte) Action {
	code, ok := layout.CodeFor(layout.RecordLen(len(o.Key), len(value)))
	if !ok {
		return o.finish(ErrKept)
	}
	o.dropPlace() // that of another attempt may be too short
	o.wantCode = code
	unit, ver, code, ok := o.env.Alloc(o.Route.PG, code)
	if !ok {
		return Alloc
	}
	o.n = layout.MakeLive(ver, layout.FP(o.Hash), code, unit)
	o.havePlace = true
	h.Writer = o.env.Session()
	o.version, o.flags, o.Expiry = h.Version, h.Flags, h.Expiry
	o.encode(h, value, false)
	o.prepared, o.written = true, 0
	o.begin()
	o.addRecord(o.withDecision())
	return o.casSlot()
}

// holds makes of r, a stub, the record that it stands for, if the Op has read its object.
func (o *Op) holds(r *layout.Record) bool {
	b := &o.needRare().reading
	if !b.have {
		return false
	}
	if s, _ := r.Object(); s != b.stub || !bytes.Equal(r.Tail(), b.rec.Tail()) {
		return false
	}
	h := r.RecordHeader
	r.Value, r.Stub, r.ValueLen = b.rec.Value, false, b.rec.ValueLen
	h.Stub, h.ValueLen = false, r.ValueLen
	r.RecordHeader = h
	return true
}

// readObject asks for the object of r, the key's stub, which the tail or the head has shown under x.
func (o *Op) readObject(r *layout.Record) Action {
	b := &o.needRare().reading
	s, _ := r.Object()
	switch {
	case s.Long:
		b.why = errLong
		return o.noObject()
	case b.absent && s == b.stub:
		// It was not there, between two looks that found it named.
		return o.objectLost(false)
	case b.looks >= maxObjectLooks:
		return o.noObject()
	}
	b.looks++
	b.rec, b.stub = *r, s
	b.rec.Key, b.rec.Value = o.Key, bytes.Clone(r.Value)
	b.next, b.have, b.away, b.absent, b.why = 0, false, false, false, nil
	return o.readCopy()
}

// readCopy asks for the next copy of the object that can be had.
func (o *Op) readCopy() Action {
	b, lost := &o.reading, 0
	for ; b.next < b.stub.Copies; b.next++ {
		at := b.stub.At[b.next]
		switch o.env.Volume(at.Volume) {
		case VolumeUp:
			b.next++
			b.asked, o.Object = true, Object{At: at, Len: int(b.stub.Len)}
			return Fetch
		case VolumeLost:
			lost++
		default:
			b.away = true
		}
	}
	switch {
	case b.away:
		return o.noObject()
	case lost == int(b.stub.Copies):
		return o.objectLost(true)
	}
	// It has moved, or is lost: another look at the key tells.
	b.absent = true
	o.step = stepStart
	return o.again(0)
}

// judgeObject looks at what Fetch has brought.
func (o *Op) judgeObject() {
	b := &o.reading
	if !b.asked {
		return
	}
	b.asked = false
	if o.Object.Got == nil {
		b.away = true
		return
	}
	if err := b.stub.Fill(&b.rec, o.Object.Got); err != nil {
		b.why = err
		return
	}
	b.have = true
}

func (o *Op) gotObject() Action {
	b := &o.reading
	o.judgeObject()
	switch {
	case !b.have:
		return o.readCopy()
	case o.Kind == Get:
		// Slot and stub were read in this operation: the value was the key's at that time.
		o.Record, o.Version = b.rec, b.rec.Version
		return o.finish(nil)
	}
	o.step = stepStart
	return o.start()
}

// noObject ends an Op that cannot have the object.
func (o *Op) noObject() Action {
	if why := o.reading.why; why != nil {
		return o.finish(fmt.Errorf("%w: %w", ErrTier, why))
	}
	return o.finish(ErrTier)
}

// objectLost acts on a key whose object no volume has any more; givenUp: by the directory's word. The key is made
// absent, unless a move or a transaction is at work on it.
func (o *Op) objectLost(givenUp bool) Action {
	b := &o.reading
	if o.env.ReadOnly() || o.x.State() != layout.Live || !o.Route.PG.Cache && !givenUp {
		return o.noObject() // a store waits for an operator, who gives a volume up
	}
	o.dropPlace()
	b.drops = true
	return o.casDelete()
}

// lostTiered acts on a CAS that was to drop the key, or is of the tier's kinds, and has lost.
func (o *Op) lostTiered() Action {
	o.env.Forget(o)
	if o.Kind.isTiered() && !o.reading.drops {
		return o.finish(ErrKept)
	}
	o.forgetReading()
	return o.sync(o.slot, 1, stepStart) // else the tail may show the stub for ever
}

// dropped goes on once the key is absent.
func (o *Op) dropped() Action {
	o.forgetReading()
	o.unlinked = false
	return o.again(0)
}

func (o *Op) forgetReading() { o.reading = reading{looks: o.reading.looks} }

// located answers a Locate: r is the key's, at the head under w. Every replica shows that.
func (o *Op) located(w layout.Word, r *layout.Record) Action {
	if w.State() != layout.Live || r.Flags&layout.FlagIntent != 0 {
		return o.finish(ErrKept)
	}
	t := o.Tiered
	if r.Stub {
		s, _ := r.Object() // ParseLinked has checked it
		t.Named = s.Version == t.Stub.Version && s.Names(t.Stub.At[0])
	}
	return o.finish(nil)
}

// holdsNothing reports whether an Op in that step waits for a disk.
func (s Step) holdsNothing() bool { return s == stepReadObject || s == stepStoreObject }
