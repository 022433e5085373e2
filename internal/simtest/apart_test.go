package simtest

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"unsafe"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma/sim"
)

// lent is the memory of a GET's caller. After the answer each byte of it is the value's, zero, or what it was before;
// and it stays so.
type lent struct {
	all  []byte
	what string
	sum  uint64 // since the answer; 0: before
}

const (
	lentMargin = 8
	lentLen    = 64
	lentBefore = 0xa7
)

// lend gives r's GET memory, if cfg says so of the client's latest value.
func (c *cl) lend(r *running) {
	r.t.Op.Apart = uint16(c.w.cfg.Apart >> (c.values % 8) & 1)
	if r.t.Op.Apart == 0 || !r.step.Verb.reads() || r.step.Verb == Watch || r.step.Verb == Has {
		return
	}
	r.lent = &lent{all: make([]byte, lentLen+2*lentMargin)}
	for i := range r.lent.all {
		r.lent.all[i] = lentBefore
	}
	c.w.lent = append(c.w.lent, r.lent)
	r.t.Filler = r.lent
}

// Into is engine.Filler.
func (x *lent) Into(n int) []byte { return x.all[lentMargin:][:min(n, lentLen)] }

// holds reports whether v lies there.
func (x *lent) holds(v []byte) bool {
	return unsafe.SliceData(v) == unsafe.SliceData(x.all[lentMargin:])
}

// returned checks what the caller finds when it has its answer, got if that lies there.
func (x *lent) returned(what, got string) error {
	x.what, x.sum = what, xxh3.Hash(x.all)
	for i, b := range x.all {
		at := i - lentMargin
		switch {
		case at < 0 || at >= lentLen:
			if b != lentBefore {
				return fmt.Errorf("%s: byte %d of its caller's %d was written", what, at, lentLen)
			}
		case at < len(got):
			if b != got[at] {
				return fmt.Errorf("%s: byte %d of its caller's memory is no more the value's", what, at)
			}
		case b != 0 && b != lentBefore:
			return fmt.Errorf("%s: byte %d of its caller's memory is somebody else's: %#x", what, at, b)
		}
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// payload is what the WRITE of ev, which is c's, carries to off. The fabric does not know a caller's value before it is
// read.
func (w *World) payload(c *cl, ev sim.Event, off uint64) []byte {
	data := w.fab.Payload(ev)
	for _, r := range slices.Concat(c.run, c.orphans) {
		for i := range r.t.Op.Accesses {
			a := &r.t.Op.Accesses[i]
			v := r.t.Op.ValueOf(a)
			if v != nil && a.Verb == index.Write && a.Off == off && r.t.Op.LenOf(a) == ev.Len &&
				len(data) == len(a.Buf) {
				data = append(bytes.Clone(data), v.Bytes...)
				layout.SealHead(data, crc32.Update(v.CRC, castagnoli, v.Bytes))
				return data
			}
		}
	}
	return data
}

// checkLent checks that nobody wrote to callers' memory after they had their answers.
func (w *World) checkLent() error {
	for _, x := range w.lent {
		if x.sum != 0 && x.sum != xxh3.Hash(x.all) {
			return fmt.Errorf("%s: its caller's memory was written after the answer", x.what)
		}
	}
	return nil
}

// apartWide are random scopes whose values go straight from and to their callers' memory, all or some of them.
var apartWide = map[string]Config{
	"apart": {Apart: 0x6e, Units: 48, Epochs: 8, Crashes: 1, Failures: 1, Deadlines: 1, WritePieces: 2, ReadPieces: 2,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(CAS, 1)},
			{k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 1), k(Del, 1)}, {k(Add, 0), k(Get, 0), k(Put, 1), k(Get, 0)}},
		Setup: k0(0), Warm: true},
	"apart-reuse": {Apart: 0xff, Units: 6, Epochs: 12, WritePieces: 2, ReadPieces: 2, Deadlines: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0), k(Get, 0), k(Incr, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"apart-long": {Apart: 0xdb, Long: 0xb6, Units: 96, Replicas: 2, Epochs: 6, Crashes: 1, Failures: 1, Deadlines: 1,
		WritePieces: 2, ReadPieces: 2, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0), k(Incr, 0), k(Get, 0)},
			{k(Add, 0), k(Get, 0), k(CAS, 0), k(Get, 0)}}, Setup: one, Warm: true},
	"apart-r2": {Apart: 0xff, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Crashes: 1,
		Failures: 1, Deadlines: 1, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 0)},
			{k(Add, 0), k(Get, 0), k(CAS, 0), k(Get, 0)}}, Setup: one, Warm: true},
}

func init() {
	maps.Copy(wide, apartWide)
	for name := range apartWide {
		heavy[name] = 4
	}
	heavy["apart-r2"] = 16
}
