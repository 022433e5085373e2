package engine

import (
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// Filler is an [Asker] with memory for what a GET finds.
type Filler interface {
	// Into gives memory for a value of n bytes at most, or nil. It begins where the value is to begin, and may be
	// shorter than n if the caller has no more. It is the same memory as before, unless that is too short; then the
	// GET goes on with the new one alone. Until the GET is over the lane has all of it. Then the last memory holds
	// the value that Take gets, and zeroes behind that; or zeroes, or what was there before, as earlier memory does.
	Into(n int) []byte
}

// value is the second piece of a WR's memory; see index.Value.
type value struct {
	rdma.Value
	of *index.Value // nil: nothing is under way
}

// nextValue is a WR's Value for v, of the round that t is about to post.
func (t *Task) nextValue(v *index.Value) *rdma.Value {
	if t.valueN == len(t.values) {
		x := &value{}
		x.Start = func(head []byte) (int, uint32) { return x.of.Start(head) }
		x.Seal = layout.SealHead
		t.values = append(t.values, x)
	}
	x := t.values[t.valueN]
	t.valueN++
	x.of, x.Bytes, x.Slack, x.N, x.CRC = v, v.Bytes, v.Slack, -1, v.CRC
	return &x.Value
}

// valuesOver takes back the Values of a round that is over. Those of one that failed, or whose caller has gone, are
// left to the provider, which touches their memory no more.
func (t *Task) valuesOver(ok bool) {
	if t.valueN == 0 {
		return
	}
	if !ok || t.orphan != nil {
		t.detach()
		return
	}
	for _, x := range t.values[:t.valueN] {
		x.of.N, x.of.CRC = x.N, x.CRC
		x.of, x.Bytes = nil, nil
	}
	t.valueN = 0
}

// detach ends the use of the caller's memory by WRs under way: they go on with copies.
func (t *Task) detach() {
	for _, x := range t.values[:t.valueN] {
		x.Detach()
	}
	clear(t.values)
	t.values, t.valueN = t.values[:0], 0
}

// Into is index.Env. Where a buffer would be refused, so is this. It counts for none: the caller had such memory beside
// the buffer for as long.
func (t *Task) Into(o *index.Op, n int) []byte {
	if t.Filler == nil || t.Limit > 0 && o.Untouched() && t.wanted+n > t.Limit {
		return nil // of a buffer that is too long Buf says so
	}
	b := t.Filler.Into(n)
	switch {
	case len(b) == 0:
	case !sameStart(b, t.given):
		clear(t.given) // of the last round, which is over
		t.given = b
	case len(b) > len(t.given):
		t.given = b
	}
	return b
}

// settleGiven clears what READs may have left in the caller's memory besides the Op's answer. Nothing is under way
// there any more.
func (t *Task) settleGiven() {
	if t.given == nil {
		return
	}
	n := 0
	if v := t.Op.Record.Value; t.orphan == nil && t.Op.Err == nil && sameStart(v, t.given) {
		n = len(v)
	}
	clear(t.given[n:])
	t.given = nil
}

func sameStart(a, b []byte) bool { return unsafe.SliceData(a) == unsafe.SliceData(b) }
