package repair

import (
	"bytes"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// lag is a word of R[k] that differs from that of the replica before it.
type lag struct {
	wordRef
	q    layout.Word // of R[k]
	b    layout.Word // what R[k] is to hold
	mine []byte      // R[k]'s bytes where b's record lies, nil: none is needed
	prev []byte      // those of the replica before it
}

// bringUp syncs each word of list, up to MaxCAS at a time, on one replica after the other. It does for many words side
// by side what index's sync does for one, by the same rules: q is read before the predecessor's word, R[k]'s record is
// compared with the predecessor's, and its WRITE stands before the CAS in one chain. A word for which that is not all,
// such as a manifest's, an intent's, one that changes meanwhile, or a damaged one, is left to that sync. It is for
// segments that a joiner has to be told.
func (o *Op) bringUp(list []wordRef, then func() index.Action) index.Action {
	if o.Route.PG.Replicas == 1 || len(list) == 0 {
		return then()
	}
	if o.Route.PG.Speculative { // whether a word is tentative, that sync alone asks
		return o.syncWords(list, then)
	}
	// By what was read before: long records make batches short.
	n, total := 0, 0
	for ; n < len(list) && n < index.MaxCAS; n++ {
		size := 0
		if r := list[n]; r.slot != index.HeaderSlot {
			if w := o.groupOf(int(r.base-o.Work.Off)/layout.GroupSize, 0).Slot(int(r.slot)); w.Readable() {
				size = 2 * aligned(w.ReadLen())
			}
		}
		if total += size; n > 0 && total > batchBytes {
			break
		}
	}
	lags := make([]lag, n)
	for i, r := range list[:n] {
		lags[i].wordRef = r
	}
	return o.bringUpAt(1, lags, nil, func(left []wordRef) index.Action {
		return o.syncWords(left, func() index.Action { return o.bringUp(list[n:], then) })
	})
}

// bringUpAt does so from the k-th replica on. left are those words that it leaves to sync.
func (o *Op) bringUpAt(k uint8, lags []lag, left []wordRef, then func(left []wordRef) index.Action) index.Action {
	if k == o.Route.PG.Replicas || len(lags) == 0 {
		return then(left)
	}
	return o.readLags(index.StepReadBehind, k, lags, func(l *lag, w layout.Word) { l.q = w }, func() index.Action {
		return o.readLags(index.StepReadBefore, k-1, lags, func(l *lag, w layout.Word) {
			l.b = w
		}, func() index.Action {
			return o.verifyBehind(k, lags, left, then)
		})
	})
}

func (o *Op) readLags(step index.Step, k uint8, lags []lag, got func(l *lag, w layout.Word),
	then func() index.Action) index.Action {
	buf := o.scratch(8 * len(lags))
	o.NewRound()
	for i := range lags {
		o.Add(index.Access{Verb: index.Read, Space: index.Index, Replica: k, Off: lags[i].off(),
			Buf: buf[8*i : 8*i+8 : 8*i+8]})
	}
	return o.await(step, func() index.Action {
		for i := range lags {
			got(&lags[i], wordAt(o.Accesses[i].Buf))
		}
		return then()
	})
}

// verifyBehind READs the records of words that R[k] lacks, at R[k] and at the replica before it, side by side: a
// place's previous life had a good CRC, too.
func (o *Op) verifyBehind(k uint8, lags []lag, left []wordRef, then func(left []wordRef) index.Action) index.Action {
	pg, total := o.Route.PG, 0
	size := func(l *lag) int {
		if l.slot == index.HeaderSlot || l.b == l.q || !l.b.Readable() {
			return 0
		}
		return aligned(l.b.ReadLen())
	}
	var up []lag
	for _, l := range lags {
		if l.slot == index.HeaderSlot { // headers grow
			l.b = layout.Word(layout.Header(l.q).Merge(layout.Header(l.b)))
		}
		n := 2 * size(&l)
		if n > 0 && (!layout.InHeap(l.b, pg.HeapLo, pg.HeapHi) || total > 0 && total+n > batchBytes) {
			left = append(left, l.wordRef)
			continue
		}
		total += n
		up = append(up, l)
	}
	if total == 0 {
		return o.casBehind(k, up, left, then)
	}
	buf := o.scratch(total)
	o.NewRound()
	for i := range up {
		l := &up[i]
		n := size(l)
		if n == 0 {
			continue
		}
		read := l.b.ReadLen()
		l.mine, l.prev = buf[:read:read], buf[n:n+read:n+read]
		buf = buf[2*n:]
		o.Add(index.Access{Verb: index.Read, Space: index.Heap, Replica: k, Off: l.b.Off(), Buf: l.mine})
		o.Add(index.Access{Verb: index.Read, Space: index.Heap, Replica: k - 1, Off: l.b.Off(), Buf: l.prev})
	}
	return o.await(index.StepVerifyBehind, func() index.Action {
		plain := up[:0]
		for _, l := range up {
			if l.mine != nil {
				r, err := layout.ParseLinked(l.prev)
				if more := layout.FlagManifest | layout.FlagIntent; err != nil || r.Flags&more != 0 {
					left = append(left, l.wordRef)
					continue
				}
				n := layout.RecordLen(len(r.Key), len(r.Value))
				if l.prev = l.prev[:n]; bytes.Equal(l.mine[:n], l.prev) {
					l.prev = nil // R[k] has it
				}
			}
			plain = append(plain, l)
		}
		return o.casBehind(k, plain, left, then)
	})
}

// casBehind takes R[k] from q to b, behind the WRITEs of records that it lacks, and goes on at the next replica with
// those that were taken, and with those that did not differ.
func (o *Op) casBehind(k uint8, lags []lag, left []wordRef, then func(left []wordRef) index.Action) index.Action {
	o.NewRound()
	for i := range lags {
		l := &lags[i]
		if l.b == l.q {
			continue
		}
		if l.prev != nil {
			o.Add(index.Access{Verb: index.Write, Space: index.Heap, Replica: k, Off: l.b.Off(), Buf: l.prev})
		}
		o.Add(index.Access{Verb: index.CAS, Space: index.Index, Replica: k, Off: l.off(), Expect: uint64(l.q),
			New: uint64(l.b)})
	}
	next := func() index.Action {
		for i := range lags {
			lags[i].mine, lags[i].prev = nil, nil
		}
		return o.bringUpAt(k+1, lags, left, then)
	}
	if len(o.Accesses) == 0 {
		return next()
	}
	return o.await(index.StepCASBehind, func() index.Action {
		i, up := 0, lags[:0]
		for _, l := range lags {
			if l.b != l.q {
				if l.prev != nil {
					i++
				}
				found := layout.Word(o.Accesses[i].Found)
				if i++; found != l.q {
					left = append(left, l.wordRef)
					continue
				}
			}
			up = append(up, l)
		}
		lags = up
		return next()
	})
}
