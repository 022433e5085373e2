package engine_test

import (
	"errors"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

// A session is crowded when an eighth of what it was granted is in limbo, and 32 MiB or an eighth of the heap besides.
// Its lane says so with each 4 MiB more, until renewals have emptied its limbo.
func TestCrowded(t *testing.T) {
	const mib = 1 << 20 / layout.UnitSize // units
	for _, tc := range []struct {
		name                string
		heap, granted, want uint32 // MiB; want rounded up to what the account shows
	}{
		{"an eighth of what was granted", 2048, 1024, 128},
		{"32 MiB", 2048, 100, 32},
		{"an eighth of a small heap", 96, 20, 12},
		{"an eighth of a small heap, all granted", 96, 96, 12},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := rdma.NewDevice("sim", sim.New(sim.Options{}).Device("c"))
			told, now := 0, second
			core, err := engine.NewCore(engine.Options{Session: rigSelf, Discriminator: 1, Lanes: 1,
				CacheBytes: 1 << 16, Devices: []*rdma.Device{d}, Crowded: func() { told++ },
				Nanos: func() int64 { return now }, Millis: func() uint64 { return 1 }})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := errors.Join(core.Close(), d.Close()); err != nil {
					t.Error(err)
				}
			}()
			v, err := engine.ViewOf(&dirpb.Map{Version: 1, Pgs: []*dirpb.PlacementGroup{{Id: 1, NamespaceId: 1,
				Epoch: 1, State: dirpb.PGState_PG_ACTIVE, Generation: 1,
				Members:     []*dirpb.Member{{NodeId: 1, Incarnation: 1}},
				RegionBytes: uint64(tc.heap)<<20 + layout.RegionPageSize, IndexBytes: layout.RegionPageSize}}}, 1)
			if err != nil {
				t.Fatal(err)
			}
			core.InstallView(v)
			l := core.Lanes()[0]
			l.Pump()
			pg := &v.PG(1).PG
			for at, end := uint32(pg.HeapLo), uint32(pg.HeapLo)+tc.granted*mib; at < end; {
				n := min(end-at, heap.ExtentUnits-at%heap.ExtentUnits)
				if err := core.AddRun(1, 1, at, n); err != nil {
					t.Fatal(err)
				}
				at += n
			}
			x, err := l.NewTask()
			if err != nil {
				t.Fatal(err)
			}
			code, _ := layout.CodeFor(1 << 20)
			unlink := func(n uint32) {
				for range n {
					x.Unlinked(pg, layout.MakeLive(1, 1, code, uint32(pg.HeapLo)))
				}
			}
			if unlink(tc.want - 1); told != 0 || core.Crowded() {
				t.Fatalf("told %d times, crowded %v, with %d MiB in limbo", told, core.Crowded(), tc.want-1)
			}
			if unlink(1); told != 1 || !core.Crowded() {
				t.Fatalf("told %d times, crowded %v, with %d MiB in limbo", told, core.Crowded(), tc.want)
			}
			if unlink(3); told != 1 {
				t.Fatalf("told %d times for 3 MiB more", told)
			}
			if unlink(1); told != 2 {
				t.Fatalf("told %d times for 4 MiB more, want once more", told)
			}
			for e := uint64(1); l.LimboUnits() > 0; e++ {
				if e > 5 {
					t.Fatal("limbo does not end")
				}
				core.EndRenew(core.BeginRenew(), e+1, e, now+rigLease)
				l.Pump()
			}
			if core.Crowded() {
				t.Fatal("crowded, with nothing in limbo")
			}
		})
	}
}
