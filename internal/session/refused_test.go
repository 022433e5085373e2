package session_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
)

// refuse answers a grant with nothing.
func (a *agenda) refuse(q session.Ask, coming uint64, quota string) {
	a.Answer(q, session.Reply{Grant: &dirpb.GrantExtentReply{Term: 4, MapVersion: 3, ComingUnits: coming, Quota: quota},
		Sent: a.now})
}

// Operations act by what the directory says as it refuses memory: whether some is on its way, and of which quota there
// is no more. A grant says that there is some.
func TestAgendaRefused(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	fails := func(what, want string) {
		t.Helper()
		switch err := a.core.NoMemory(1, 1, a.now, true); {
		case want == "" && err != nil:
			t.Fatalf("%s: an operation fails with %v", what, err)
		case want != "" && (!errors.Is(err, index.ErrFull) || !strings.HasSuffix(err.Error(), want)):
			t.Fatalf("%s: an operation gets %v, want %q", what, err, want)
		}
		a.now += pause
	}
	fails("nothing said", "")
	a.refuse(a.wants(10), 0, "quota bytes: so many")
	fails("full", "no memory left (quota bytes: so many)")
	a.refuse(a.wants(10), 1, "")
	fails("some is on its way", "")
	a.refuse(a.wants(10), 0, "")
	fails("full again", "placement group 1 has no memory left")
	a.grant(a.wants(10), 4, 3, fresh(1, heapLo, 100))
	fails("granted", "")
	// That nothing is had ahead says nothing of what is needed.
	f := a.core.Flow(1, 1)
	a.renew(&dirpb.RenewReply{})
	f.Add(0, 60_000, 60_000)
	for range 46 { // it counts for 50 renewals
		a.core.BeginRenew()
	}
	if !a.core.Exhausted(1) {
		t.Fatal("a refusal is forgotten at once")
	}
	for range 10 {
		a.core.BeginRenew()
	}
	if a.core.Exhausted(1) {
		t.Fatal("a refusal is never forgotten")
	}
	a.now += renewEvery
	a.answer(a.hurried(0), &dirpb.RenewReply{})
	q, due := a.ahead()
	if !due {
		t.Fatal("not asked ahead")
	}
	a.refuse(q, 0, "")
	fails("nothing ahead", "")
}

// A cache waits rather than evict while half of all its memory is on its way. A store is told, also one that has access
// words.
func TestAgendaIdleCache(t *testing.T) {
	for i, cache := range []bool{false, false, true} {
		a := newAgenda(t)
		pg, half := group(1, 1), uint64(heapHi-heapLo)/2
		a.mode = dirpb.NamespaceMode_NAMESPACE_STORE
		if cache {
			a.mode = dirpb.NamespaceMode_NAMESPACE_CACHE
		}
		if i > 0 {
			pg.AccessBytes, half = layout.RegionPageSize, uint64(heapHi-2*heapLo)/2
		}
		a.install(3, pg)
		a.answer(a.renewal(), &dirpb.RenewReply{})
		for _, coming := range []uint64{half, half - 1} {
			a.refuse(a.wants(10), coming, "")
			if got, want := a.core.Exhausted(1), !cache || coming < half; got != want {
				t.Errorf("cache %v, access words of %d bytes, %d of %d units coming: exhausted %v", cache,
					pg.AccessBytes, coming, 2*half, got)
			}
			a.now += pause
		}
	}
}

// A session asks for more with each grant, up to an extent, and pauses upon a run of another placement group as upon
// none. Memory up to the heap's last unit is taken.
func TestAgendaGrantsGrow(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, fresh(1, heapHi-5, 5))
	a.granted(5)
	want := uint32(1 << 14)
	for i := range uint32(8) {
		want = min(2*want, layout.ExtentUnits)
		q := a.wants(10)
		if q.Grant.WantUnits != want {
			t.Fatalf("asked for %d units, want %d", q.Grant.WantUnits, want)
		}
		a.grant(q, 4, 3, fresh(1, heapLo+10*i, 10))
	}
	a.grant(a.wants(10), 4, 3) // none: it asks for what it needs from then on
	a.now += pause
	if q := a.wants(20_000).Grant; q.WantUnits != 20_000 || q.PlaceUnits != 20_000 {
		t.Fatalf("asked %v", q)
	}
	a = newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	a.grant(a.wants(10), 4, 3, &dirpb.ReturnedRun{PgId: 2, Unit: heapLo, Units: 2, Generation: 1})
	a.WantMemory(1, 10)
	a.idle()
	if at := a.Next(); at != a.now+pause {
		t.Fatalf("next in %d ms, want %d", (at-a.now)/ms, pause/ms)
	}
}

// A run of a placement group that the session's map does not have any more waits for a map that is as new as the grant.
func TestAgendaEarlyRunOfNoGroup(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	a.answer(a.renewal(), &dirpb.RenewReply{})
	q := a.wants(10)
	a.install(4)
	a.grant(q, 4, 6, fresh(2, heapLo, 100))
	a.view(6, 2)
	a.DueWants()
	a.granted(100)
}

// The directory's word of its newest map counts by the renewal that it answered, also if that is late.
func TestAgendaNewest(t *testing.T) {
	a := newAgenda(t)
	a.view(3, 1)
	first := a.renewal()
	again := a.Again(first)
	newest := func(what string, since session.Ask, version uint64, want bool) {
		t.Helper()
		if got := a.core.IsNewest(version, since.Renew.Number); got != want {
			t.Fatalf("%s: map %d is the newest since renewal %d: %v", what, version, since.Renew.Number, got)
		}
	}
	newest("nothing said", first, 3, false)
	a.answer(first, &dirpb.RenewReply{MapVersion: 3})
	newest("the first one's reply, late", first, 3, true)
	newest("the first one's reply, late", again, 3, false)
	a.answer(again, &dirpb.RenewReply{MapVersion: 4})
	newest("the other's", again, 3, false)
	newest("the other's", again, 4, true)

	first = a.hurried(0)
	again = a.Again(first)
	a.answer(again, &dirpb.RenewReply{MapVersion: 6})
	a.answer(first, &dirpb.RenewReply{MapVersion: 5})
	newest("overtaken", again, 5, false)
	newest("overtaken", again, 6, true)
}
