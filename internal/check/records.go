package check

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/layout"
)

// count is true at the replica whose words and records are counted.
func (k *checker) count() bool { return k.repl == 0 }

// strangeSlot holds a word that only a move leaves, where none is, unless it names an intent.
type strangeSlot struct {
	replica int
	off     uint64
	word    layout.Word
}

// segment checks the groups in b, which stand at off, and their records.
func (k *checker) segment(r Array, off uint64, b []byte) ([]Slot, error) {
	var overflow [layout.SegmentGroups]bool
	var n Report
	for i := range layout.SegmentGroups + 1 {
		g := layout.Group(b[i*layout.GroupSize:][:layout.GroupSize])
		goff := off + uint64(i)*layout.GroupSize
		n.Groups++
		if g.Lock() != 0 {
			n.Locks++
		}
		if i < layout.SegmentGroups && g.Header().OVF() {
			overflow[i] = true
			n.Overflow++
		}
		if err := g.Check(k.HeapLo, k.HeapHi); err != nil {
			k.find(goff, 0, "%v", err)
		}
		for j := range layout.GroupSlots {
			w := g.Slot(j)
			switch w.State() {
			case layout.Live:
				n.Live++
			case layout.Frozen:
				n.Frozen++
			case layout.Moved:
				n.Moved++
			default:
				if w == 0 {
					n.Unused++
				} else {
					n.Empty++
				}
			}
			if (w.State() == layout.Frozen || w.State() == layout.Moved) && !r.Moving {
				k.strange = append(k.strange, strangeSlot{k.repl, goff + layout.SlotOff(j), w})
			}
		}
	}
	if k.count() {
		k.rep.Groups += n.Groups
		k.rep.Locks += n.Locks
		k.rep.Overflow += n.Overflow
		k.rep.Live += n.Live
		k.rep.Frozen += n.Frozen
		k.rep.Moved += n.Moved
		k.rep.Unused += n.Unused
		k.rep.Empty += n.Empty
	}
	slots := k.Slots(off, b)
	err := Fetch(slots, layout.MaxRecordSize, func(off uint64, n int) ([]byte, error) {
		return k.bytes(k.repl, off, n)
	})
	if err != nil {
		return nil, err
	}
	keys := make(map[string]Slot, len(slots))
	for _, s := range slots {
		key, err := k.record(r, off, s, &overflow)
		if err != nil {
			return nil, err
		}
		if key == nil {
			continue
		}
		if other, ok := keys[string(key)]; ok {
			if err := k.twice(key, other, s); err != nil {
				return nil, err
			}
		}
		keys[string(key)] = s
	}
	return slots, nil
}

// retries is how often a record is read again while its slot changes.
const retries = 3

// record checks what s names and returns its key; nil if there is none to
// compare. A finding counts only if the slot has not changed meanwhile.
func (k *checker) record(r Array, segment uint64, s Slot, overflow *[layout.SegmentGroups]bool) ([]byte, error) {
	for range retries {
		key, problem, err := k.judgeRecord(r, segment, s, overflow)
		if err != nil || problem == "" {
			return key, err
		}
		now, err := k.word(k.repl, s.Off)
		if err != nil {
			return nil, err
		}
		again := s
		again.Word, again.Rec = now, nil
		if k.names(now) {
			if again.Rec, err = k.bytes(k.repl, now.Off(), now.ReadLen()); err != nil {
				return nil, err
			}
		}
		switch {
		case now == s.Word && bytes.Equal(again.Rec, s.Rec):
			k.rep.Corrupt++
			k.find(s.Off, s.Word, "%s", problem)
			return nil, nil
		case again.Rec == nil:
			return nil, nil // gone
		}
		s = again
	}
	k.rep.Busy++
	return nil, nil
}

// judgeRecord checks one record; problem says what is wrong with it.
func (k *checker) judgeRecord(a Array, segment uint64, s Slot, overflow *[layout.SegmentGroups]bool) (key []byte,
	problem string, err error) {
	r, err := layout.ParseLinked(s.Rec)
	if err != nil {
		return nil, err.Error(), nil
	}
	if r.Flags&layout.FlagChunk != 0 {
		return nil, "names a chunk of a long value", nil
	}
	// A place that another session was granted serves records down to half its size, too.
	if c, ok := layout.CodeFor(layout.RecordLen(len(r.Key), len(r.Value))); !ok || c > s.Word.Code() ||
		layout.UnitsOf(s.Word.Code()) > 2*layout.UnitsOf(c) {
		return nil, fmt.Sprintf(
			"size code %d (%d bytes) for a record of %d bytes, want code %d, or up to twice the size",
			s.Word.Code(), s.Word.ReadLen(), layout.RecordLen(len(r.Key), len(r.Value)), c), nil
	}
	hash, err := k.Store.Hash(r.Key)
	if err != nil {
		return nil, "", err
	}
	// Where it belongs is asked of the array that is read: while a shard moves, a key
	// may be in the parent and in the child.
	home, stash := layout.GroupOff(hash, a.Segments)
	home, stash = a.Off+home, a.Off+stash
	group := s.Off &^ (layout.GroupSize - 1)
	switch {
	case layout.ShardPrefix(hash, a.Depth) != a.Prefix || group != home && group != stash:
		return nil, fmt.Sprintf("key %s belongs to %s", k.Key(r.Key), k.belongs(hash)), nil
	case s.Word.FP() != layout.FP(hash):
		return nil, fmt.Sprintf("fingerprint %03x, but that of key %s is %03x", s.Word.FP(), k.Key(r.Key),
			layout.FP(hash)), nil
	case group == stash && !overflow[(home-segment)/layout.GroupSize]:
		// The group was read before its stash.
		b, err := k.bytes(k.repl, home, layout.GroupSize)
		if err != nil {
			return nil, "", err
		}
		if !layout.Group(b).Header().OVF() {
			return nil, fmt.Sprintf("key %s is in the stash, but its group %#x has no OVF flag: no reader finds it",
				k.Key(r.Key), home), nil
		}
	}
	chunks := []layout.Chunk(nil)
	if r.Flags&layout.FlagIntent != 0 {
		if problem, err := k.intent(a, s, &r); problem != "" || err != nil {
			return nil, problem, err
		}
		k.strange = slices.DeleteFunc(k.strange, func(x strangeSlot) bool {
			return x == strangeSlot{k.repl, s.Off, s.Word}
		})
	}
	if r.Flags&layout.FlagManifest != 0 {
		m, err := layout.ParseManifest(r.Value, k.HeapLo, k.HeapHi)
		if err != nil {
			return nil, err.Error(), nil
		}
		if problem, err := k.chunks(m); problem != "" || err != nil {
			return nil, problem, err
		}
		chunks = m.Chunks
	}
	if !k.count() {
		return r.Key, "", nil
	}
	k.rep.Records++
	if r.Expired(k.NowMillis) {
		k.rep.Expired++
	}
	if group == stash {
		k.rep.Stashed++
	}
	k.place(a, s, s.Word.Unit(), s.Word.Units())
	for _, c := range chunks {
		k.rep.Chunks++
		k.place(a, s, c.Unit, layout.UnitsOf(c.Code))
	}
	return r.Key, "", nil
}

// belongs says where a key of that hash belongs.
func (k *checker) belongs(hash uint64) string {
	for _, s := range k.m.GetShards() {
		if s.GetNamespaceId() == k.Namespace.GetId() && layout.ShardPrefix(hash, uint8(s.GetDepth())) == s.GetPrefix() {
			home, stash := layout.GroupOff(hash, s.GetSegments())
			return fmt.Sprintf("group %#x or %#x of placement group %d", s.GetOffset()+home, s.GetOffset()+stash,
				s.GetPgId())
		}
	}
	return "no shard"
}

// chunks checks those that a manifest names.
func (k *checker) chunks(m layout.Manifest) (problem string, err error) {
	left := m.Len
	for i, c := range m.Chunks {
		n := min(left, uint64(m.Payload))
		left -= n
		b, err := k.bytes(k.repl, uint64(c.Unit)*layout.UnitSize, layout.SizeOf(c.Code))
		if err != nil {
			return "", err
		}
		r, err := layout.ParseRecord(b)
		switch {
		case err != nil:
			return fmt.Sprintf("chunk %d at unit %d: %v", i, c.Unit, err), nil
		case r.Flags != layout.FlagChunk || r.Version != m.ID || r.Expiry != uint64(i) || uint64(len(r.Value)) != n:
			return fmt.Sprintf("chunk %d at unit %d: flags %v id %d number %d of %d bytes, want id %d, %d bytes",
				i, c.Unit, r.Flags, r.Version, r.Expiry, len(r.Value), m.ID, n), nil
		}
	}
	return "", nil
}

// twice reports a key in two slots, if both still stand.
func (k *checker) twice(key []byte, a, b Slot) error {
	for _, s := range []Slot{a, b} {
		if ok, err := k.still(s.Off, s.Word); !ok || err != nil {
			return err
		}
	}
	k.find(b.Off, b.Word, "key %s is in the slot at %#x as well", k.Key(key), a.Off)
	return nil
}

// placed is a place and the slot through which it is reached.
type placed struct {
	unit, units uint32
	slotOff     uint64
	word        layout.Word
	child       bool // through the child of a move
}

func (k *checker) place(a Array, s Slot, unit, units uint32) {
	k.rep.Bytes += uint64(units) * layout.UnitSize
	k.places = append(k.places, placed{unit, units, s.Off, s.Word, a.Child})
}

// shared reports whether two slots may name one place: while a shard splits, the
// FROZEN word and its copy do.
func shared(a, b placed) bool {
	return a.unit == b.unit && a.units == b.units && a.child != b.child &&
		(a.child || a.word.State() == layout.Frozen) && (b.child || b.word.State() == layout.Frozen)
}

// link counts units of a place that begins at unit.
func (k *checker) link(unit uint32, units uint64) {
	for int(unit/layout.ExtentUnits) >= len(k.linked) {
		k.linked = append(k.linked, 0)
	}
	k.linked[unit/layout.ExtentUnits] += units
}

// overlaps compares neighbouring places and counts their units. A place that was freed and given to another
// key between two reads is told by its slot.
func (k *checker) overlaps() error {
	k.repl = 0
	slices.SortFunc(k.places, func(a, b placed) int { return cmp.Compare(a.unit, b.unit) })
	if len(k.places) == 0 {
		return nil
	}
	furthest := k.places[0]
	k.link(furthest.unit, uint64(furthest.units))
	for _, p := range k.places[1:] {
		end := uint64(furthest.unit) + uint64(furthest.units)
		own := uint64(p.unit) + uint64(p.units)
		if own > end {
			k.link(p.unit, min(own-end, uint64(p.units)))
		}
		if uint64(p.unit) < end && !shared(p, furthest) {
			a, err := k.still(furthest.slotOff, furthest.word)
			if err != nil {
				return err
			}
			b, err := k.still(p.slotOff, p.word)
			if err != nil {
				return err
			}
			if a && b {
				k.find(p.slotOff, p.word, "units [%d,+%d) overlap [%d,+%d) of the slot at %#x", p.unit, p.units,
					furthest.unit, furthest.units, furthest.slotOff)
			}
			if !a {
				furthest = p
				continue
			}
		}
		if own > end {
			furthest = p
		}
	}
	return nil
}
