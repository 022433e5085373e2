package index_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/layout"
)

// damageAll flips a byte of the value of key's record at some replicas of a placement group, wherever in the first
// segment it is.
func (w *world) damageAll(t *testing.T, key string, replicas ...uint8) layout.Word {
	t.Helper()
	for g := range uint64(layout.SegmentGroups + 1) {
		for i := range layout.GroupSlots {
			x := w.groupAt(0, shardOff+g*layout.GroupSize).Slot(i)
			if !x.Readable() {
				continue
			}
			if r, err := layout.ParseRecord(w.region[0][x.Off():][:x.ReadLen()]); err == nil && string(r.Key) == key {
				for _, k := range replicas {
					w.region[k][x.Off()+layout.RecordHeaderSize+uint64(len(key))] ^= 1
				}
				return x
			}
		}
	}
	t.Fatalf("no record of %q", key)
	return 0
}

// A move, a migration and the growth of a shard mend a record that is damaged at the head, and go on.
func TestMoveMends(t *testing.T) {
	for _, m := range moveCases() {
		if m.replicas == 1 {
			continue
		}
		t.Run(m.String(), func(t *testing.T) {
			w := m.world()
			want := fillMove(t, w)
			w.damageAll(t, "A", 0)
			w.damageAll(t, "Z2", 0)
			m.begin(w)
			w.moveAll(t, w.client(1))
			w.moved = true
			w.check(t, "moved", want)
		})
	}
}

// A recall mends what is damaged at the head, and moves what is ruined as it is: nothing stays in the extent.
func TestRelocateDamaged(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		for _, all := range []bool{false, true} {
			name := fmt.Sprintf("r=%d, all %v", r, all)
			w := newWorld(r, layout.ExtentUnits+1024)
			must(t, w.client(2).do(t, "put", "k", "old"))
			must(t, w.client(2).do(t, "put", "m", "old"))
			damaged := []uint8{0}
			if all {
				damaged = []uint8{0, 1, 2}[:r]
			}
			w.damageAll(t, "k", damaged...)
			w.pg.Recalled = []uint32{0}
			w.nextUnit = layout.ExtentUnits
			w.client(1).job(t, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: []uint32{0}})
			if in := w.inExtent(0); len(in) > 0 {
				t.Errorf("%s: left in the extent: %v", name, in)
			}
			err := w.client(4).do(t, "get", "k")
			if ruined := all || r == 1; ruined != errors.As(err, new(*layout.CorruptError)) || !ruined && err != nil {
				t.Errorf("%s: get: %v", name, err)
			}
			must(t, w.client(4).do(t, "get", "m"))
			must(t, w.client(4).do(t, "put", "k", "new"))
		}
	}
}

// An abort leaves a copy of the record before, as damaged as that is: the intent goes, and its status word may serve
// another.
func TestSettleDamagedParent(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		for _, all := range []bool{false, true} {
			for _, by := range []string{"owner", "janitor", "put"} {
				name := fmt.Sprintf("r=%d, all %v, by %s", r, all, by)
				w := txnWorld(t, r, "put k old;put m old", false)
				c := w.client(1)
				damaged := []uint8{0}
				if all {
					damaged = []uint8{0, 1, 2}[:r]
				}
				must(t, c.do(t, "prepare", "k", "put", "new", "x=3", "seq=1"))
				_, _, x, _ := w.find(0, "k")
				rec, _ := layout.ParseRecord(w.region[0][x.Off():][:x.ReadLen()])
				in, err := layout.ParseIntent(rec.Value, w.pg.HeapLo, w.pg.HeapHi)
				must(t, err)
				for _, k := range damaged {
					w.region[k][in.Parent.Off()+layout.RecordHeaderSize+1] ^= 1
				}
				ruined := all || r == 1
				switch by {
				case "owner":
					must(t, c.do(t, "decide", "abort", "x=3", "seq=1"))
					must(t, c.do(t, "settle", "k"))
				case "janitor":
					w.client(9).job(t, index.SettleAll, settleWork())
				case "put":
					// It meets the intent, and a record before that it does not need.
					w.client(9).job(t, index.SettleAll, settleWork())
					must(t, w.client(5).do(t, "put", "k", "over"))
					ruined = false
				}
				if _, _, y, _ := w.find(0, "k"); y.State() == layout.Frozen {
					t.Errorf("%s: the intent stands", name)
				}
				err = w.client(4).do(t, "get", "k")
				if ruined != errors.As(err, new(*layout.CorruptError)) || !ruined && err != nil {
					t.Errorf("%s: get: %v", name, err)
				}
			}
		}
	}
}

// FreeLost takes away what no copy tells, and nothing else.
func TestFreeLost(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		for _, only := range []string{"", "k", "x"} {
			name := fmt.Sprintf("r=%d, only %q", r, only)
			w := newWorld(r, 256)
			must(t, w.client(2).do(t, "put", "k", "old"))
			must(t, w.client(2).do(t, "put", "m", "old"))
			must(t, w.client(2).do(t, "put", "n", "old"))
			must(t, w.client(2).do(t, "put", "o", "old"))
			_, _, x, _ := w.find(0, "k")
			for k := range r {
				clear(w.region[k][x.Off():][:layout.UnitSize])
			}
			w.damageAll(t, "m", 0)
			_, i, y, _ := w.find(0, "o") // names no place of the heap
			for k := range r {
				w.setSlot(k, home(), i, y|0xffffffff)
			}
			work := repair.Work{PG: 1, Off: shardOff}
			if o := w.client(9).job(t, index.Scrub, work); workOf(o).Freed != 0 || workOf(o).Lost == 0 {
				t.Errorf("%s: a scrub frees %d of %d", name, workOf(o).Freed, workOf(o).Lost)
			}
			work.FreeLost = true
			if only != "" {
				work.Only, work.More = [][]uint16{{layout.FP(hashOf(only))}}, []uint64{home(), stash()}
			}
			o := w.client(9).job(t, index.Scrub, work)
			want := map[string]uint64{"": 2, "k": 1, "x": 0}[only]
			if r == 1 && only == "" {
				want++ // m has no other copy
			}
			if workOf(o).Freed != want {
				t.Errorf("%s: freed %d, want %d: %q", name, workOf(o).Freed, want, workOf(o).Findings)
			}
			if only == "x" {
				continue
			}
			for k := range r {
				if g := w.groupAt(k, home()); g.Slot(0).State() != layout.Empty {
					t.Errorf("%s: replica %d: %v", name, k, g.Slot(0))
				}
			}
			if only == "" {
				for _, op := range []string{"put k v if-absent", "put o v if-absent", "get n", "get k"} {
					must(t, w.client(4).do(t, strings.Fields(op)...))
				}
				if err := w.client(4).do(t, "get", "m"); r > 1 && err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			if len(w.wrong) > 0 {
				t.Errorf("%s: %v", name, w.wrong)
			}
		}
	}
}
