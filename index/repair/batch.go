package repair

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// scratch is n bytes that the next call takes again: the memory of one round's records. An item that is needed longer
// keeps a clone of its key and no more, so an Op's memory does not grow with the group.
func (o *Op) scratch(n int) []byte {
	w := &o.work
	if len(w.buf) < n {
		size := 4096
		for size < n {
			size *= 2
		}
		w.buf = o.Buf(size)
	}
	return w.buf[:n]
}

func aligned(n int) int { return (n + 7) &^ 7 }

// image is the i-th group at work as replica k showed it last.
func (o *Op) image(i int, k uint8) layout.Group {
	for i >= len(o.work.images) {
		o.work.images = append(o.work.images, [index.MaxChain][]byte{})
	}
	b := &o.work.images[i][k]
	if *b == nil {
		*b = o.Buf(layout.GroupSize)
	}
	return layout.Group(*b)
}

func (o *Op) addImages() {
	for k := range o.Route.PG.Replicas {
		for i := range o.work.groups {
			o.Add(index.Access{Verb: index.Read, Space: index.Index, Replica: k, Off: o.work.groups[i],
				Buf: o.image(i, k)})
		}
	}
}

func (o *Op) setGroups(off ...uint64) {
	o.work.groups = append(o.work.groups[:0], off...)
}

// differing lists the words in which a replica's group at base differs from that of the
// replica before it; slots before the header, which speaks of them.
func differing(list []wordRef, replicas uint8, base uint64, group func(k uint8) layout.Group) []wordRef {
	for i := range layout.GroupSlots {
		for k := uint8(1); k < replicas; k++ {
			if group(k).Slot(i) != group(k-1).Slot(i) {
				list = append(list, wordRef{base, uint8(i)})
				break
			}
		}
	}
	for k := uint8(1); k < replicas; k++ {
		if group(k).Header() != group(k-1).Header() {
			return append(list, wordRef{base, index.HeaderSlot})
		}
	}
	return list
}

// slotsBehind lists the slots of the groups at work that differ between replicas.
func (o *Op) slotsBehind() (list []wordRef) {
	for i := range o.work.groups {
		list = differing(list, o.Route.PG.Replicas, o.work.groups[i], func(k uint8) layout.Group {
			return o.image(i, k)
		})
	}
	return slices.DeleteFunc(list, func(r wordRef) bool { return r.slot == index.HeaderSlot })
}

// fetch READs n bytes of each item's record at A (0: all of it), in batches, and lets
// got judge them. At A, since that is where words are decided: the record is complete there before the CAS
// that links it, whatever the tail shows. If got fails, the record is mended from another copy and got judges it once
// more; then its error ends the Op.
func (o *Op) fetch(list []*item, n int, got func(it *item, b []byte) error, then func() index.Action) index.Action {
	size := func(it *item) int {
		if n != 0 {
			return n
		}
		return it.x.ReadLen()
	}
	if len(list) == 0 {
		return then()
	}
	m := o.readBatch(list, size)
	return o.await(index.StepFetchRecords, func() index.Action {
		for i, it := range list[:m] {
			err := got(it, o.Accesses[i].Buf)
			switch {
			case err != nil && !it.tried:
				return o.mend(it, func() index.Action { return o.fetch(list[i:], n, got, then) })
			case err != nil:
				return o.Finish(err)
			}
		}
		return o.fetch(list[m:], n, got, then)
	})
}

// readBatch adds a READ at A for as many of the items as one round may have, and returns how many these are: at least
// one, however long its record is.
func (o *Op) readBatch(list []*item, size func(*item) int) (n int) {
	total := 0
	for n < len(list) && (n == 0 || total+aligned(size(list[n])) <= batchBytes) {
		total += aligned(size(list[n]))
		n++
	}
	buf := o.scratch(total)
	o.NewRound()
	for _, it := range list[:n] {
		o.Add(index.Access{Verb: index.Read, Space: index.Heap, Off: it.x.Off(), Buf: buf[:size(it):size(it)]})
		buf = buf[aligned(size(it)):]
	}
	return n
}

// parseOf parses the record that it names, not a chunk. Bytes of remote memory are hostile until this has checked
// them (I14); the error says where they are.
func (o *Op) parseOf(it *item, b []byte) (layout.Record, error) {
	r, err := layout.ParseLinked(b)
	if err == nil && r.Flags&layout.FlagChunk != 0 {
		err = &layout.CorruptError{What: "record", Off: 10, Check: "chunk named by a slot", Got: uint64(r.Flags)}
	}
	if err != nil {
		return r, fmt.Errorf("%s: record at %#x: %w", o.where(it.wordRef), it.x.Off(), err)
	}
	return r, nil
}

func (o *Op) partsOf(it *item, r *layout.Record) (m layout.Manifest, err error) {
	if m, err = layout.ParseManifest(r.Value, o.Route.PG.HeapLo, o.Route.PG.HeapHi); err != nil {
		err = fmt.Errorf("%s: record at %#x: %w", o.where(it.wordRef), it.x.Off(), err)
	}
	return m, err
}

// noteIntent notes the intent r that it's word names, in oldParts the places of the records that r names, and in long
// which of them are manifests.
func (o *Op) noteIntent(it *item, r *layout.Record) error {
	in, err := layout.ParseIntent(r.Value, o.Route.PG.HeapLo, o.Route.PG.HeapHi)
	fp := layout.FP(o.Env().HashOf(r.Key))
	for _, x := range []layout.Word{it.x, in.Parent, in.Final} {
		if err == nil && x.State() != layout.Empty && x.FP() != fp {
			err = &layout.CorruptError{What: "intent", Check: "fingerprint of " + x.String(), Got: uint64(x.FP()),
				Want: uint64(fp)}
		}
	}
	if err != nil {
		return fmt.Errorf("%s: record at %#x: %w", o.where(it.wordRef), it.x.Off(), err)
	}
	it.in, it.key, it.oldParts, it.long = &in, bytes.Clone(r.Key), nil, nil
	for _, x := range []layout.Word{in.Parent, in.Final} {
		if x.State() == layout.Live {
			it.oldParts = append(it.oldParts, layout.Chunk{Unit: x.Unit(), Code: x.Code(), Ver: x.Ver()})
		}
	}
	if in.Long&layout.LongParent != 0 {
		it.long = append(it.long, in.Parent)
	}
	if in.Long&layout.LongFinal != 0 && in.Kind != layout.IntentGuard { // whose records share their chunks
		it.long = append(it.long, in.Final)
	}
	return nil
}

// fetchNamed reads the manifests that the intents of list name, and adds their chunks to what these name. must is as in
// readManifests.
func (o *Op) fetchNamed(list []*item, must bool, then func() index.Action) index.Action {
	var named []*item
	of := map[*item]*item{}
	for _, it := range list {
		for _, x := range it.long {
			n := &item{wordRef: it.wordRef, x: x, under: it.x}
			named, of[n] = append(named, n), it
		}
		it.long = nil
	}
	return o.fetch(named, 0, func(n *item, b []byte) error {
		r, err := o.parseOf(n, b)
		if err == nil {
			var m layout.Manifest
			m, err = o.partsOf(n, &r)
			of[n].oldParts = append(of[n].oldParts, m.Chunks...)
		}
		return o.skip(n, err, must)
	}, then)
}

// skip tells of a manifest, or an intent, that cannot be read, and goes on without it, if it is ruined or need not be
// there (must). Nobody comes to the chunks of one that is ruined.
func (o *Op) skip(it *item, err error, must bool) error {
	if err != nil && (it.lost || !must) {
		o.finding("%v", err)
		return nil
	}
	return err
}

// inHeap checks a word's place: nothing is read, written or freed where a damaged word says.
func (o *Op) inHeap(r wordRef, x layout.Word) error {
	if layout.InHeap(x, o.Route.PG.HeapLo, o.Route.PG.HeapHi) {
		return nil
	}
	return fmt.Errorf("%s: %w", o.where(r), &layout.CorruptError{What: "slot", Off: layout.SlotOff(int(r.slot)),
		Check: "outside the heap", Got: uint64(x)})
}

// readManifests finds the manifests among the items' records at A, and their chunks; and intents, the records that they
// name, and the chunks of these. A bad one is a finding, or ends the Op if it must not be skipped: chunks that nobody
// knows of would be freed while they are linked. Two passes, headers first: few records are manifests, and the others
// are not read whole.
func (o *Op) readManifests(list []*item, manifests *[]*item, must bool, then func() index.Action) index.Action {
	got := func(it *item, b []byte) error {
		if layout.RecordFlags(b[10])&(layout.FlagManifest|layout.FlagIntent) != 0 {
			*manifests = append(*manifests, it)
		}
		return nil
	}
	return o.fetch(list, layout.RecordHeaderSize, got, func() index.Action {
		return o.fetch(*manifests, 0, func(it *item, b []byte) error {
			r, err := o.parseOf(it, b)
			switch {
			case err != nil:
			case r.Flags&layout.FlagIntent != 0:
				err = o.noteIntent(it, &r)
			case r.Flags&layout.FlagManifest != 0: // else half a look at something else
				var m layout.Manifest
				if m, err = o.partsOf(it, &r); err == nil {
					it.id, it.oldParts = m.ID, m.Chunks
				}
			}
			return o.skip(it, err, must)
		}, func() index.Action { return o.fetchNamed(*manifests, must, then) })
	})
}

// readWords READs one word on every replica and hands them over, in the order of the chain.
func (o *Op) readWords(r wordRef, then func(words []layout.Word) index.Action) index.Action {
	o.NewRound()
	for k := range o.Route.PG.Replicas {
		// Into an image: Scrub has no other use for them.
		o.Add(index.Access{Verb: index.Read, Space: index.Index, Replica: k, Off: r.off(), Buf: o.image(0, k)[:8:8]})
	}
	return o.await(index.StepReadWord, func() index.Action {
		var words []layout.Word
		for i := range o.Accesses {
			words = append(words, wordAt(o.Accesses[i].Buf))
		}
		return then(words)
	})
}
