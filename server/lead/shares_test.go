package lead

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// In a full cache one who has nothing is given what the others have more than their share.
func TestShares(t *testing.T) {
	for _, mode := range []dirpb.NamespaceMode{dirpb.NamespaceMode_NAMESPACE_CACHE,
		dirpb.NamespaceMode_NAMESPACE_STORE} {
		w, a, b, _, all := fullWorld(t, mode)
		give := func(x uint32) (units, share uint64) {
			w.now += accountEvery
			w.plan()
			for _, s := range w.say(Renewal{Session: x}).Supply {
				units, share = s.GiveUnits, s.ShareUnits
			}
			return units, share
		}
		cache := mode == dirpb.NamespaceMode_NAMESPACE_CACHE
		w.say(Renewal{Session: b, Held: held(0, 0, 0, 0, 10)})
		if n, _ := give(a); n != 0 {
			t.Fatalf("%v: to be handed over are %d units, with nobody short", mode, n)
		}
		w.l.Short(w.s, 1, 10, w.now)
		n, share := give(a)
		if heap := w.s.Usage()[0].HeapUnits; share != heap/2 {
			t.Fatalf("%v: a share of %d units of %d", mode, share, heap)
		}
		// As much as half a share lacks, and at most a quarter of what is more than the share.
		if want := (all - share) / 4; cache && n != min(want, share/2) || !cache && n != 0 {
			t.Fatalf("%v: to be handed over are %d units, want %d", mode, n, want)
		}
		if n, _ := give(b); n != 0 {
			t.Fatalf("%v: one who has nothing is to hand over %d units", mode, n)
		}
		// A session that has enough, or puts nothing, is given nothing.
		for _, h := range [][]*dirpb.Held{held(share/2, 0, 0, 0, 10), held(0, 0, 0, 0, 0)} {
			w.say(Renewal{Session: b, Held: h})
			w.l.Short(w.s, 1, 10, w.now)
			if n, _ := give(a); n != 0 {
				t.Fatalf("%v: to be handed over are %d units to one who has %v", mode, n, h)
			}
		}
	}
}

// The memory that a session may keep shrinks with the number of sessions and if memory is short.
func TestSupplyTold(t *testing.T) {
	w, a, _, _, _ := fullWorld(t, dirpb.NamespaceMode_NAMESPACE_STORE)
	units := w.s.Usage()[0].HeapUnits
	sameText(t, "nothing said", w.say(Renewal{Session: a}).Supply, nil)
	want := &dirpb.Supply{PgId: 1, FloorUnits: units / 8, ShareUnits: units / 2}
	sameText(t, "all asked for", w.say(Renewal{Session: a, Held: held(1, 0, 0, 0, 1)}).Supply, []*dirpb.Supply{want})
	w.l.Short(w.s, 1, 10, w.now)
	want = &dirpb.Supply{PgId: 1, Short: true, FloorUnits: min(floorShort, units/64), ShareUnits: units / 2}
	sameText(t, "short", w.say(Renewal{Session: a}).Supply, []*dirpb.Supply{want})
	for range 62 {
		w.open(1)
	}
	want.FloorUnits, want.ShareUnits = units/(32*64), units/64
	sameText(t, "many sessions", w.say(Renewal{Session: a}).Supply, []*dirpb.Supply{want})
	w.now += shortFor
	sameText(t, "short no more", w.say(Renewal{Session: a}).Supply, nil)
}
