package session

import (
	"encoding/binary"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// Peek is a cached GET without a Task: on a provider that executes within
// PostSend and fences by itself, with nothing else under way on the lane, it
// reads slot and record in one chain and judges them by [index.Hit], as Op does.
// It answers with a hit or not at all: false means that a Task has to look. The
// record, which has no expiry and is whole, aliases the lane's memory until the
// next call.
//
// The caller has published the reclaim epoch of this moment for the lane before
// the call, as for Start.
func (l *Lane) Peek(key []byte, hash, check uint64) (r layout.Record, ok bool) {
	v := l.core.view.Load()
	if v == nil || v != l.view || len(l.active) > 0 || len(l.dirty) > 0 || l.mailN.Load() != 0 ||
		l.core.releasable.Load() != l.released {
		return r, false
	}
	epoch := uint32(l.core.epoch.Load())
	e := l.cache.find(check)
	if e == nil || epoch-e.seen >= layout.WordLifeEpochs || index.HintFlags(e.flags) != 0 {
		return r, false
	}
	w := layout.Word(e.word)
	s := v.ShardOf(hash)
	if s == nil || !s.PG.Active || s.PG.Joining || e.shard != uint16(s.ID) || !layout.InHeap(w, s.PG.HeapLo, s.PG.HeapHi) || w.ReadLen() > taskSlot-peekRecord {
		return r, false
	}
	pg := s.PG
	if pg.AccessOff != 0 && l.noteDue(check) {
		return r, false // a Task notes it
	}
	p := pg.Replicas - 1 // the publisher
	m := &pg.Members[p]
	if int(m.Node) >= len(l.conns) {
		return r, false
	}
	c := l.conns[m.Node]
	if c == nil || !c.up || c.incarnation != m.Incarnation || !c.caps.Synchronous || !c.caps.SelfFencing {
		return r, false
	}

	off, stash := layout.GroupOff(hash, s.Clusters)
	slot := e.slot
	if slot >= index.StashSlot {
		off, slot = stash, slot-index.StashSlot
	}
	k := l.keysOf(c, pg, p)
	word, rec := l.peek.stash[:8], l.peek.stash[peekRecord:peekRecord+w.ReadLen()]
	lkey := l.peek.lkeys[c.dev]
	wrs := &l.peekWRs
	// Unsignaled: only a failure has a WC.
	wrs[0].Local, wrs[0].LKey, wrs[0].RKey, wrs[0].RemoteAddr = word, lkey, k.IndexRKey, k.IndexBase+s.Off+off+layout.SlotOff(int(slot))
	wrs[1].Local, wrs[1].LKey, wrs[1].RKey, wrs[1].RemoteAddr = rec, lkey, k.HeapRKey, k.HeapBase+w.Off()-pg.IndexBytes
	c.seq += 2
	if n, _ := c.qp.PostSend(wrs[:]); n < len(wrs) || l.poll() {
		return r, false
	}
	// One copy of a provider that fences by itself needs no lease: a memory node that
	// was declared lost while it lived on fences nobody, but then there is no other copy.
	if pg.Replicas > 1 && !l.valid() {
		return r, false
	}
	if r, ok = index.Hit(layout.Word(binary.LittleEndian.Uint64(word)), w, rec, key); !ok ||
		r.Expiry != 0 || r.Flags&layout.FlagManifest != 0 {
		return r, false
	}
	e.seen = epoch
	l.Stats.Ops[index.Get]++
	l.Stats.Rounds[index.Get]++
	l.Stats.CacheHits++
	return r, true
}

// peekRecord is where a Peek's record lies in its task's slot; the word lies at
// the start.
const peekRecord = 64

var peekWRs = [2]rdma.WR{{ID: noWaitID, Op: rdma.OpRead}, {ID: noWaitID, Op: rdma.OpRead}}
