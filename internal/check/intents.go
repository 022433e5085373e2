package check

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// intent checks what the record r of a transaction's intent, under the word of s, names: the records before and after,
// which are good and of the same key, and a status word that has not gone on. All of these count as linked. problem
// says what is wrong.
func (k *checker) intent(a Array, s Slot, r *layout.Record) (problem string, err error) {
	in, err := layout.ParseIntent(r.Value, k.HeapLo, k.HeapHi)
	if err != nil {
		return err.Error(), nil
	}
	if s.Word.State() != layout.Frozen {
		return "names a transaction's intent, and is not frozen", nil
	}
	var places []layout.Chunk
	for i, w := range [...]layout.Word{in.Parent, in.Final} {
		if w.State() != layout.Live {
			continue
		}
		what := [...]string{"before", "after"}[i]
		b, err := k.bytes(k.repl, w.Off(), w.ReadLen())
		if err != nil {
			return "", err
		}
		x, err := layout.ParseLinked(b)
		switch {
		case err != nil:
			return fmt.Sprintf("an intent; the record %s at %#x: %v", what, w.Off(), err), nil
		case !bytes.Equal(x.Key, r.Key) || x.Flags&(layout.FlagChunk|layout.FlagIntent) != 0:
			return fmt.Sprintf("an intent; the record %s at %#x is not one of its key", what, w.Off()), nil
		}
		places = append(places, layout.Chunk{Unit: w.Unit(), Code: w.Code()})
		if x.Flags&layout.FlagManifest == 0 {
			continue
		}
		m, err := layout.ParseManifest(x.Value, k.HeapLo, k.HeapHi)
		if err != nil {
			return fmt.Sprintf("an intent; the record %s at %#x: %v", what, w.Off(), err), nil
		}
		if problem, err := k.chunks(m); problem != "" || err != nil {
			return problem, err
		}
		if i == 0 || in.Kind != layout.IntentGuard { // whose records share their chunks
			places = append(places, m.Chunks...)
		}
	}
	if problem, err := k.statusOf(&in); problem != "" || err != nil || !k.count() {
		return problem, err
	}
	k.rep.Intents++
	for _, c := range places {
		k.place(a, s, c.Unit, layout.UnitsOf(c.Code))
	}
	return "", nil
}

// statusOf looks whether the status word of in is where the map has status words, and still is, or was last, in's
// transaction. No replica shows an intent when its word has gone on.
func (k *checker) statusOf(in *layout.Intent) (problem string, err error) {
	i := slices.IndexFunc(k.m.GetPgs(), func(p *dirpb.PlacementGroup) bool {
		return p.GetId() == in.PG && p.GetNamespaceId() == k.Namespace.GetId()
	})
	if i < 0 {
		return fmt.Sprintf("an intent whose status word is in placement group %d, which is not there", in.PG), nil
	}
	p := k.m.GetPgs()[i]
	if p.GetGeneration() != in.Generation || p.GetState() != dirpb.PGState_PG_ACTIVE {
		return "", nil // lost: it counts as aborted; or nobody can tell now
	}
	if !layout.StatusOff(in.Off, p.GetIndexBytes()) ||
		!slices.ContainsFunc(p.GetStatusArrays(), func(a *dirpb.StatusArray) bool {
			return in.Off >= a.GetOffset() && in.Off-a.GetOffset() < uint64(a.GetSegments())*layout.SegmentSize
		}) {
		return fmt.Sprintf("an intent whose status word is at %#x of placement group %d, where none is", in.Off, in.PG),
			nil
	}
	g := layout.RegionPageSize + (in.Off-layout.RegionPageSize)/layout.GroupSize*layout.GroupSize
	b, err := k.Store.Read(k.ctx, in.PG, 0, g, layout.GroupSize)
	if err != nil {
		return "", fmt.Errorf("status word of placement group %d: %w", in.PG, err)
	}
	status := layout.Status(wordAt(b, int(in.Off-g)))
	if err := status.Check(in.Off); err != nil {
		return fmt.Sprintf("an intent of transaction %d: %v", in.Seq, err), nil
	}
	if _, over := status.Of(in.Seq); over {
		return fmt.Sprintf("an intent of transaction %d, whose status word has gone on to %v", in.Seq, status), nil
	}
	return "", nil
}
