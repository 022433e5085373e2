package engine_test

import (
	"errors"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/rdma/driver"
)

// flyExists begins Exists of keys, and posts what they want posted.
func (r *rig) flyExists(keys ...string) []*flown {
	r.t.Helper()
	asks, ops := getsOf(keys)
	for _, op := range ops {
		op.Kind = index.Exists
	}
	r.l.Begin(ops, 0)
	r.l.Pump()
	return asks
}

// Exists of remembered keys fly as GETs do, and bring eight bytes each. If its flight does not decide one, that begins
// anew. GETs are served by the hints that they leave.
func TestFlightExists(t *testing.T) {
	for name, tc := range map[string]struct {
		under  func(r *rig) // while the flight is under way
		rounds int32        // of the one of "a"; 0: any
		err    error
	}{
		"nothing":  {func(*rig) {}, 1, nil},
		"replaced": {replaceA, 2, nil}, // the start of the new record tells
		"deleted": {func(r *rig) {
			off, _ := r.slot(1, "a")
			putWord(r.nodes[0].mem[off:], 0)
		}, 0, index.ErrNotFound},
		"the record is damaged": {func(r *rig) { // nobody looks at it
			_, w := r.slot(1, "a")
			r.nodes[0].mem[w.Off()+20] ^= 1
		}, 1, nil},
		"the lease ends": {func(r *rig) { r.now += rigLease }, 0, engine.ErrLease},
		"another epoch": {func(r *rig) {
			r.epoch++
			r.install(nil)
		}, 2, nil},
		"the connection is lost": {func(r *rig) {
			if err := r.fab.Kill(r.qp(1)); err != nil {
				r.t.Fatal(err)
			}
			r.l.Pump()
			r.connect(1)
		}, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1, false)
			keys := r.remembered(20)
			bells, reads, bytes := 0, 0, 0
			r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
				bells++
				for _, w := range wrs {
					reads++
					bytes += len(w.Local)
				}
				return q.PostSend(wrs)
			}
			asks := r.flyExists(keys...)
			if asks[0].Over() || bells != 1 || reads != len(keys) || bytes != 8*len(keys) {
				t.Fatalf("over %v: %d READs of %d bytes behind %d doorbells", asks[0].Over(), reads, bytes, bells)
			}
			r.wire.post = nil
			tc.under(r)
			r.settleLane()
			for i, f := range asks {
				want, rounds := error(nil), tc.rounds
				if i == 0 || tc.err == engine.ErrLease {
					want = tc.err
				}
				if i > 0 && rounds == 2 && name == "replaced" {
					rounds = 1
				}
				if !f.Over() || !errors.Is(f.Err, want) || f.Err == nil && f.Version == 0 ||
					rounds != 0 && f.Rounds != rounds {
					t.Errorf("%q: over %v, version %d after %d rounds, %v; want %d, %v", keys[i], f.Over(), f.Version,
						f.Rounds, f.Err, rounds, want)
				}
			}
			if r.l.Active() != 0 {
				t.Errorf("%d under way", r.l.Active())
			}
			if tc.err == nil && name != "the record is damaged" {
				gets := r.fly(0, keys...)
				r.settleLane()
				for i, f := range gets {
					if want := asks[i].Version; f.Err != nil || f.Version != want || f.Rounds != 1 {
						t.Errorf("%q: get of version %d after %d rounds, %v; want %d", keys[i], f.Version, f.Rounds,
							f.Err, want)
					}
				}
			}
		})
	}
}
