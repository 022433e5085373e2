package lead

import (
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func (w *world) keepVolume(boot uint64) uint32 {
	w.t.Helper()
	id := w.apply(&fsmpb.Command{Op: &fsmpb.Command_KeepVolume{KeepVolume: &fsmpb.KeepVolume{Volume: &dirpb.Volume{
		Name: "t1", Folder: 7, Boot: boot, Process: boot, CapacityBytes: 1 << 40,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}}}}}).VolumeID
	w.l.KeptVolume(id, boot, 5, w.now)
	return id
}

// A tier node that is silent for a minute is said to be, once, and by a new leader a minute after its election. A
// process that was registered and not answered yet has its own minute.
func TestSilentVolumes(t *testing.T) {
	w := newWorld(t)
	id := w.keepVolume(1)
	w.want()
	w.pass(volumeWait - time.Second)
	w.want()
	if used, silent := w.l.VolumeStats(id, w.now); used != 5 || silent != volumeWait-time.Second {
		t.Fatalf("%d bytes, silent for %v", used, silent)
	}
	w.keepVolume(1)
	w.pass(volumeWait - time.Second)
	w.want()
	w.pass(time.Second)
	w.want("tier node \"t1\" was not heard for 1m0s")
	if v := w.s.Volume(id); v.State != dirpb.VolumeState_VOLUME_SILENT {
		t.Fatalf("%v", v)
	}
	w.want()

	w.keepVolume(2)
	w.pass(volumeWait / 2)
	w.elect()
	w.pass(volumeWait / 2)
	w.want() // it had its minute begin when this leader first looked
	w.pass(volumeWait)
	w.want("was not heard")

	w.keepVolume(3)
	w.pass(volumeWait)
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_KeepVolume{KeepVolume: &fsmpb.KeepVolume{Volume: &dirpb.Volume{
		Name: "t1", Folder: 7, Boot: 4, Process: 4, Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}}}}})
	w.want()
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_GiveUpVolume{GiveUpVolume: &fsmpb.GiveUpVolume{VolumeId: id}}})
	w.want()
	if len(w.l.volumes) != 0 {
		t.Errorf("%d volumes are remembered that are gone", len(w.l.volumes))
	}
}

// Tier nodes are to demote from 85 % of a placement group's memory down to 75 %, and not between the two on the way up.
func TestTierBudgets(t *testing.T) {
	w, a, _, _ := memoryWorld(t)
	all := shareable(w.s, w.s.PG(1))
	for w.s.Usage()[0].GrantedUnits < all*9/10 {
		w.grant(a, 1, uint32(all/5))
	}
	at := func(percent uint64) uint64 {
		t.Helper()
		w.now += time.Second
		w.say(Renewal{Session: a, Held: held(all*9/10, 0, 0, 0, int64(all*percent/100))})
		var bytes uint64
		for _, b := range w.l.TierBudgets(w.s, 1, w.now) {
			if b.PgId == 1 {
				bytes = b.Bytes
			}
		}
		return bytes
	}
	for _, c := range []struct{ full, budget uint64 }{{80, 0}, {84, 0}, {86, 11}, {80, 5}, {76, 1}, {74, 0}, {80, 0}} {
		want := all * c.budget / 100 * layout.UnitSize
		if got := at(c.full); got < want-min(want, all/100*layout.UnitSize) || got > want+all/100*layout.UnitSize ||
			c.budget == 0 && got != 0 {
			t.Fatalf("%d %% full: demote %d bytes, want about %d", c.full, got, want)
		}
	}
}
