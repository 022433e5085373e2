package engine_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// flown is a GET by Begin.
type flown struct {
	engine.Op
	value string
}

func (f *flown) Take(r *layout.Record, _ [][]byte) { f.value = string(r.Value) }

func getsOf(keys []string) (gets []*flown, ops []*engine.Op) {
	for _, key := range keys {
		f := &flown{Op: engine.Op{Kind: index.Get, Key: []byte(key), Hash: rigHash(key), Check: rigCheck(key)}}
		f.Asker = f
		gets, ops = append(gets, f), append(ops, &f.Op)
	}
	return gets, ops
}

// fly begins GETs of keys, and posts what they want posted.
func (r *rig) fly(deadline int64, keys ...string) []*flown {
	r.t.Helper()
	gets, ops := getsOf(keys)
	r.l.Begin(ops, deadline)
	r.l.Pump()
	return gets
}

// remembered puts n keys that the lane remembers.
func (r *rig) remembered(n int) (keys []string) {
	r.t.Helper()
	for i := range n {
		keys = append(keys, string(rune('a'+i)))
		r.put(keys[i], "value of "+keys[i])
	}
	return keys
}

// GETs of remembered keys share chains, behind one doorbell a memory node, on a provider that executes after PostSend;
// of a chain one WR is signaled.
func TestFlight(t *testing.T) {
	for replicas := 1; replicas <= 2; replicas++ {
		t.Run(fmt.Sprint("replicas ", replicas), func(t *testing.T) {
			r := newRig(t, replicas, false)
			keys := r.remembered(20)
			bells, reads, signaled := 0, 0, 0
			r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
				bells++
				for _, w := range wrs {
					if w.Op == rdma.OpRead {
						reads++
					}
					if w.Flags&rdma.Signaled != 0 {
						signaled++
					}
				}
				return q.PostSend(wrs)
			}
			gets := r.fly(0, keys...)
			r.settleLane()
			for i, f := range gets {
				if !f.Over() || f.Err != nil || f.value != "value of "+keys[i] || f.Version == 0 || f.Rounds != 1 {
					t.Errorf("%q: over %v, %q, version %d, %d rounds, %v", keys[i], f.Over(), f.value, f.Version,
						f.Rounds, f.Err)
				}
			}
			if bells != 1 || reads != 40 || signaled != 2 {
				t.Errorf("%d doorbells, %d READs, %d signaled; want 1, 40, 2", bells, reads, signaled)
			}
			if r.l.Active() != 0 {
				t.Errorf("%d under way", r.l.Active())
			}
		})
	}
}

// A GET that its flight does not decide begins anew, and nothing of the flight is believed.
func TestFlightUndecided(t *testing.T) {
	for name, tc := range map[string]struct {
		under  func(r *rig) // while the flight is under way
		rounds int32        // of the GET of "a"; 0: any
		want   string
		err    error
	}{
		"nothing":  {func(*rig) {}, 1, "value of a", nil},
		"replaced": {replaceA, 2, "new", nil}, // by the word that is there now the record is found
		"deleted": {func(r *rig) {
			off, _ := r.slot(1, "a")
			putWord(r.nodes[0].mem[off:], 0)
		}, 0, "", index.ErrNotFound},
		"the record is damaged": {func(r *rig) {
			_, w := r.slot(1, "a")
			r.nodes[0].mem[w.Off()+20] ^= 1
		}, 0, "", errAny},
		"the lease ends": {func(r *rig) { r.now += rigLease }, 0, "", engine.ErrLease},
		"another epoch": {func(r *rig) {
			r.epoch++
			r.install(nil)
		}, 2, "value of a", nil},
		"the connection is lost": {func(r *rig) {
			if err := r.fab.Kill(r.qp(1)); err != nil {
				r.t.Fatal(err)
			}
			r.l.Pump()
			r.connect(1)
		}, 0, "value of a", nil},
		"the connection is hung up": {func(r *rig) { r.connect(1) }, 0, "value of a", nil},
		"refused, and replaced":     {nil, 0, "new", nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1, false)
			keys := r.remembered(3)
			r.fly(0, keys...) // what it leaves in its buffer is no answer to the next
			r.settleLane()
			if tc.under == nil {
				r.wire.post = func(driver.QP, []driver.WR) (int, error) { return 0, driver.ErrQPError }
				tc.under = func(r *rig) {
					r.wire.post = nil
					replaceA(r)
					r.connect(1)
				}
			}
			gets := r.fly(0, keys...)
			if gets[0].Over() || r.l.Active() == 0 {
				t.Fatal("nothing is under way")
			}
			tc.under(r)
			r.settleLane()
			f := gets[0]
			ok := errors.Is(f.Err, tc.err) || tc.err == errAny && f.Err != nil
			if !f.Over() || !ok || f.value != tc.want || tc.rounds != 0 && f.Rounds != tc.rounds {
				t.Errorf("over %v, %q after %d rounds, %v; want %q after %d, %v", f.Over(), f.value, f.Rounds, f.Err,
					tc.want, tc.rounds, tc.err)
			}
			for i, f := range gets[1:] {
				if lost := tc.err == engine.ErrLease; !f.Over() || !lost &&
					(f.Err != nil || f.value != "value of "+keys[1+i]) {
					t.Errorf("%q: over %v, %q, %v", keys[1+i], f.Over(), f.value, f.Err)
				}
			}
			if r.l.Active() != 0 {
				t.Errorf("%d under way", r.l.Active())
			}
		})
	}
}

// replaceA is a PUT of "a" by another session.
func replaceA(r *rig) {
	off, w := r.slot(1, "a")
	next := layout.MakeLive(w.Ver()+1, w.FP(), w.Code(), w.Unit()+1000)
	rec := r.nodes[0].mem[next.Off():][:layout.RecordLen(1, 3)]
	layout.EncodeRecord(rec, layout.RecordHeader{Version: 1 << 40, Writer: 9}, []byte("a"), []byte("new"))
	putWord(r.nodes[0].mem[off:], uint64(next))
}

var errAny = errors.New("any")

// A GET whose caller goes, or has no time left, gets the answer that nothing happened; the others fly on.
func TestFlightLeft(t *testing.T) {
	r := newRig(t, 1, false)
	keys := r.remembered(3)
	early, late := r.now+second/10, r.now+second/5
	gets := append(r.fly(early, keys[0]), r.fly(late, keys[1:]...)...)
	r.l.Abandon(&gets[1].Op, errGone)
	if f := gets[1]; !f.Over() || !errors.Is(f.Err, errGone) || errors.Is(f.Err, index.ErrUnknown) {
		t.Fatalf("over %v, %v", f.Over(), f.Err)
	}
	if at := r.l.NextWake(); at != early {
		t.Fatalf("wakes at %d, want %d", at, early)
	}
	r.now = early
	r.l.EndOverdue()
	if f := gets[0]; !f.Over() || !errors.Is(f.Err, engine.ErrTimeout) || errors.Is(f.Err, index.ErrUnknown) {
		t.Fatalf("over %v, %v", f.Over(), f.Err)
	}
	if at := r.l.NextWake(); at != late || gets[2].Over() {
		t.Fatalf("wakes at %d, want %d; the other is over: %v", at, late, gets[2].Over())
	}
	r.settleLane()
	if f := gets[2]; !f.Over() || f.Err != nil || f.value != "value of "+keys[2] {
		t.Fatalf("over %v, %q, %v", f.Over(), f.value, f.Err)
	}
	if gets[0].value+gets[1].value != "" {
		t.Errorf("answered after they had left: %q, %q", gets[0].value, gets[1].value)
	}
	if r.l.Active() != 0 {
		t.Errorf("%d under way", r.l.Active())
	}
}

// A flight counts among what is under way: its reclaim epoch, and the map that it acts by.
func TestFlightCounts(t *testing.T) {
	r := newRig(t, 1, false)
	keys := r.remembered(1)
	began, version := r.core.Epoch(), r.version
	r.fly(0, keys...)
	r.renew(rigLease)
	r.install(nil)
	if e, ok := r.l.Oldest(); !ok || e != began {
		t.Errorf("the oldest began in epoch %d, %v, want %d", e, ok, began)
	}
	if acked, quiesced := r.core.Acked(); acked != version || quiesced != version {
		t.Errorf("acknowledged map %d and quiesced %d, want %d", acked, quiesced, version)
	}
	r.settleLane()
	if acked, quiesced := r.core.Acked(); acked != version+1 || quiesced != version+1 {
		t.Errorf("acknowledged map %d and quiesced %d, want %d", acked, quiesced, version+1)
	}
}

// On a provider that executes within PostSend the owner performs what others have queued as they would have themselves:
// GETs of remembered keys need no Task.
func TestQueuedHinted(t *testing.T) {
	r := newRig(t, 1, true)
	keys := r.remembered(3)
	var tasks []int // under way when a doorbell rings
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
		tasks = append(tasks, r.l.Active())
		return q.PostSend(wrs)
	}
	gets, ops := getsOf(keys)
	over := r.l.Queue(ops)
	others, ops := getsOf([]string{"a", "never put"})
	othersOver := r.l.Queue(ops)
	r.l.Turn()
	for i, g := range gets {
		if !g.Over() || g.Err != nil || g.value != "value of "+keys[i] || g.Rounds != 1 {
			t.Errorf("%q: over %v, %q, %d rounds, %v", keys[i], g.Over(), g.value, g.Rounds, g.Err)
		}
	}
	if !over() || len(tasks) < 2 || tasks[0] != 0 || tasks[1] != 0 {
		t.Errorf("over %v; at the doorbells there were %d tasks, want none at the first two", over(), tasks)
	}
	if g := others[0]; !othersOver() || g.value != "value of a" || !errors.Is(others[1].Err, index.ErrNotFound) {
		t.Errorf("beside a key that is not there: over %v, %q, %v", othersOver(), g.value, others[1].Err)
	}
}
