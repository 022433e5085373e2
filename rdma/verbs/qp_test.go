//go:build verbs && cgo && linux

package verbs

import (
	"slices"
	"testing"

	"github.com/kvd-project/kvd/rdma/driver"
)

// An adapter that calls a WR done without having brought its answer is not believed,
// nor what it says of those behind.
func TestUnanswered(t *testing.T) {
	needAdapters(t)
	dd, err := Open(Options{Device: "rxe0"})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(err)
	d := dd.(*device)
	defer func() { must(d.Close()) }()
	m, err := d.Alloc(4096, driver.AllocOptions{})
	must(err)
	defer func() { must(m.Free()) }()
	p, err := d.AllocPD()
	must(err)
	defer func() { must(p.Dealloc()) }()
	r, err := p.RegMR(m, 0, 4096, driver.AccessLocal)
	must(err)
	defer func() { must(r.Deregister()) }()
	for _, c := range []struct {
		name     string
		op       driver.Opcode
		bytes    int
		answered bool
		want     []driver.Status
	}{
		{"a CAS with its answer", driver.OpCmpAndSwp, 8, true, []driver.Status{driver.Success}},
		{"a CAS without", driver.OpCmpAndSwp, 8, false, []driver.Status{driver.GeneralErr, driver.WRFlushErr}},
		{"a FETCH_ADD without", driver.OpFetchAdd, 8, false, []driver.Status{driver.GeneralErr, driver.WRFlushErr}},
		{"a READ without its end", driver.OpRead, 100, false, []driver.Status{driver.GeneralErr, driver.WRFlushErr}},
		{"a READ of less than a word", driver.OpRead, 7, false, []driver.Status{driver.Success}},
		{"a READ into a Value", driver.OpRead, 164, true, []driver.Status{driver.Success}},
		{"a READ into a Value without its end", driver.OpRead, 164, false, []driver.Status{driver.GeneralErr,
			driver.WRFlushErr}},
	} {
		dc, err := d.CreateCQ(16)
		must(err)
		q, err := newQP(d, p.(*pd), dc.(*cq), 0)
		must(err)
		q.cq.mu.Lock()
		for i, w := range []driver.WR{{Op: driver.OpWrite, Local: m.Bytes[:8]},
			{Op: c.op, Local: m.Bytes[64 : 64+c.bytes]},
			{Op: driver.OpRead, Local: m.Bytes[512:520], Flags: driver.Signaled}} {
			w.ID, w.LKey = uint64(i), r.LKey()
			if n := len(w.Local); n == 164 { // in three pieces, of which others write to the last
				w.Value = &driver.Value{Slack: 8, SGEs: []driver.SGE{{Bytes: w.Local[:100], LKey: r.LKey()},
					{Bytes: m.Bytes[1024:1032], LKey: r.LKey()}}}
				w.Local = w.Local[100:]
			}
			q.noteWR(&w)
		}
		copy(m.Bytes[512:], "answered")
		if c.answered {
			copy(m.Bytes[64+min(c.bytes, 100)-8:], "answered")
		}
		q.complete(2, driver.Success)
		var got []driver.Status
		for _, wc := range q.cq.soft {
			got = append(got, wc.Status)
		}
		q.cq.mu.Unlock()
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: completed %v, want %v", c.name, got, c.want)
		}
		if broken := len(c.want) > 1; broken != (q.State() == driver.StateErr) {
			t.Errorf("%s: the QP is in state %d", c.name, q.State())
		}
		must(q.Close())
		must(dc.Close())
	}
}
