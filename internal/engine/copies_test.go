package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// bells notes the verbs of each doorbell until its result is called.
func (r *rig) bells() (list func() []string) {
	var all []string
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
		var verbs []string
		for i := range wrs {
			verbs = append(verbs, fmt.Sprint(wrs[i].Op))
		}
		all = append(all, strings.Join(verbs, " "))
		return q.PostSend(wrs)
	}
	return func() []string {
		r.wire.post = nil
		return all
	}
}

// A change of a remembered key rings one doorbell for each copy, one after the other: record and word go together. A
// long record goes to all copies at once, before the words.
func TestDoorbellsOfCopies(t *testing.T) {
	write, cas := fmt.Sprint(rdma.OpWrite), fmt.Sprint(rdma.OpCmpAndSwp)
	both := write + " " + cas
	short, long := "2", strings.Repeat("2", 17<<10)
	for _, tc := range []struct {
		copies int
		value  string
		want   []string
	}{
		{1, short, []string{both}},
		{2, short, []string{both, both}},
		{3, short, []string{both, both, both}},
		{1, long, []string{both}},
		{2, long, []string{both, write, cas}},
		{3, long, []string{both, write, write, cas, cas}},
	} {
		for _, kind := range []index.Kind{index.Put, index.Modify} {
			t.Run(fmt.Sprintf("%v, %d copies, %d bytes", kind, tc.copies, len(tc.value)), func(t *testing.T) {
				r := newRig(t, tc.copies, false)
				r.put("a", "1")
				bells := r.bells()
				x := r.request(kind, "a", tc.value)
				if kind == index.Modify {
					x.Op.Value, x.Op.Modify = nil, r.appends("a", tc.value[1:]).Modify
					tc.value = "1" + tc.value[1:]
				}
				r.l.Start(x)
				r.settleLane()
				got := bells()
				if _, err := r.answer(x); err != nil {
					t.Fatal(err)
				}
				if kind == index.Modify {
					got = got[1:] // it reads first
				}
				if !slices.Equal(got, tc.want) {
					t.Errorf("doorbells %q, want %q", got, tc.want)
				}
				r.wantCopies("a", tc.value)
			})
		}
	}
}

// Nothing is decided while a copy cannot be reached: what the head alone shows has an unknown outcome if the copy stays
// away.
func TestNothingDecidedAlone(t *testing.T) {
	for _, kind := range []index.Kind{index.Put, index.Delete} {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			r := newRig(t, 2, false)
			r.put("a", "1")
			r.disconnect(2)
			bells := r.bells()
			x := r.request(kind, "a", "2")
			x.Deadline = r.now + second/10
			r.l.Start(x)
			r.settleLane()
			r.now += second / 10
			r.settleLane()
			if _, err := r.answer(x); !errors.Is(err, engine.ErrTimeout) || errors.Is(err, index.ErrUnknown) {
				t.Errorf("ended with %v", err)
			}
			if got := bells(); len(got) > 0 {
				t.Errorf("posted %q", got)
			}
			r.connect(2)
			r.wantCopies("a", "1")
		})
	}
}

// A copy whose record cannot be written does not show its word: the CAS stands behind the WRITE, and falls with it.
func TestRecordBeforeWord(t *testing.T) {
	for _, synchronous := range []bool{false, true} {
		t.Run(fmt.Sprintf("synchronous %v", synchronous), func(t *testing.T) {
			r := newRig(t, 2, synchronous)
			r.put("a", "1")
			_, was := r.slot(2, "a")
			bell := 0
			r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) {
				if bell++; bell == 2 {
					wrs = slices.Clone(wrs)
					wrs[0].RKey = ^wrs[0].RKey
				}
				return q.PostSend(wrs)
			}
			op := &engine.Op{Kind: index.Put, Key: []byte("a"), Value: []byte("2"), Hash: rigHash("a"),
				Check: rigCheck("a")}
			x := (*engine.Task)(nil)
			if r.l.Hinted([]*engine.Op{op}) > 0 { // not on such a provider
				x = r.request(index.Put, "a", "2")
				r.l.Start(x)
			}
			r.settleLane()
			r.wire.post = nil
			_, decided := r.slot(1, "a")
			if _, w := r.slot(2, "a"); w != was || decided == was || bell != 2 {
				t.Fatalf("after %d doorbells the head has %v, the tail %v; both had %v", bell, decided, w, was)
			}
			r.disconnect(2)
			r.connect(2)
			r.settleLane()
			if over := op.Over() && op.Err == nil; over != synchronous || x != nil && (!x.IsDone() || x.Op.Err != nil) {
				t.Error("not over, or failed")
			}
			r.wantCopies("a", "2")
		})
	}
}
