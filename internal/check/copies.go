package check

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/layout"
)

// suspect is a word, or the record that it names, which a replica and the one before
// it do not have alike.
type suspect struct {
	replica int
	off     uint64 // of the word
	word    layout.Word
	before  layout.Word // at the replica before
}

// compare notes what the segment at off holds differently at k.repl and at the
// replica before it. Insert locks are the head's alone.
func (k *checker) compare(off uint64, was, is []byte, before, slots []Slot) {
	for g := 0; g < len(is); g += layout.GroupSize {
		for w := 0; w < layout.GroupSize; w += 8 {
			if w == layout.GroupLockOff {
				continue
			}
			if a, b := wordAt(was[g:][:layout.GroupSize], w), wordAt(is[g:][:layout.GroupSize], w); a != b {
				k.suspects = append(k.suspects, suspect{k.repl, off + uint64(g+w), b, a})
			}
		}
	}
	i := 0
	for _, s := range slots { // both in the order of their words
		for i < len(before) && before[i].Off < s.Off {
			i++
		}
		if i < len(before) && before[i].Off == s.Off && before[i].Word == s.Word && !sameRecord(before[i].Rec, s.Rec) {
			k.suspects = append(k.suspects, suspect{k.repl, s.Off, s.Word, s.Word})
		}
	}
}

// sameRecord compares two copies of a record; what follows it in its place means
// nothing.
func sameRecord(a, b []byte) bool {
	n := min(len(a), RecordSpan(a))
	return len(a) == len(b) && bytes.Equal(a[:n], b[:n])
}

// confirm looks at the suspects again, twice with a rest between unless the store is at rest, and reports those
// that stand.
func (k *checker) confirm() error {
	if len(k.suspects) == 0 && len(k.strange) == 0 {
		return nil
	}
	if err := k.recheckSuspects(); err != nil || len(k.suspects) == 0 && len(k.strange) == 0 {
		return err
	}
	if k.Rest > 0 {
		timer := time.NewTimer(k.Rest)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-k.ctx.Done():
			return context.Cause(k.ctx)
		}
		if err := k.recheckSuspects(); err != nil {
			return err
		}
	}
	differing := make(map[int]bool)
	for _, s := range k.suspects {
		k.repl = s.replica
		differing[s.replica] = true
		switch {
		case s.word == s.before:
			k.rep.DifferingRecords++
			k.find(s.off, s.word, "the record is not that of replica %d", s.replica-1)
		case s.off%layout.GroupSize == 0:
			k.rep.DifferingWords++
			k.find(s.off, 0, "header %#x, but %#x at replica %d", uint64(s.word), uint64(s.before), s.replica-1)
		default:
			k.rep.DifferingWords++
			k.find(s.off, s.word, "replica %d has %s", s.replica-1, s.before)
		}
	}
	k.rep.Differing += len(differing)
	for _, s := range k.strange {
		k.repl = s.replica
		k.find(s.off, s.word, "%s, but its shard does not move", strings.ToLower(s.word.State().String()))
	}
	return nil
}

// recheckSuspects keeps the suspects whose words have not changed and whose difference stands.
func (k *checker) recheckSuspects() error {
	var err error
	k.suspects = slices.DeleteFunc(k.suspects, func(s suspect) bool {
		if err != nil {
			return false
		}
		var now, before layout.Word
		// The later replica first: it never gets ahead of the one before it.
		if now, err = k.word(s.replica, s.off); err != nil {
			return false
		}
		if before, err = k.word(s.replica-1, s.off); err != nil {
			return false
		}
		if now != s.word || before != s.before {
			if now != before {
				k.rep.Busy++
			}
			return true
		}
		if now != before {
			return false
		}
		var a, b []byte
		if a, err = k.bytes(s.replica-1, now.Off(), now.ReadLen()); err != nil {
			return false
		}
		if b, err = k.bytes(s.replica, now.Off(), now.ReadLen()); err != nil {
			return false
		}
		return sameRecord(a, b)
	})
	k.strange = slices.DeleteFunc(k.strange, func(s strangeSlot) bool {
		if err != nil {
			return false
		}
		var now layout.Word
		now, err = k.word(s.replica, s.off)
		return err == nil && now != s.word
	})
	return err
}
