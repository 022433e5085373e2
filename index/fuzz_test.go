package index_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/layout"
)

// FuzzOp answers an operation's accesses with hostile bytes: whatever a broken or
// malicious peer may have left in memory. The operation must not panic, must not
// leave its placement group, and once memory behaves (reads as zeroes, CAS wins)
// must end within a few round trips (I14).
func FuzzOp(f *testing.F) {
	for kind := range byte(index.NumKinds) {
		for shape := range byte(8) {
			for _, bits := range []byte{0, 12, 24} {
				f.Add(kind, kind%4, 1+kind%3+bits,
					[]byte{shape, shape + 1, 3, 200, shape, 0, 5, 4, 5, 6, 7, shape, 1, 2, 3})
			}
		}
	}
	// A group whose first slot names a manifest without chunks.
	noChunks := append([]byte{1, 1, 0, 1, 0, 0, 0x42, 0, 0}, bytes.Repeat([]byte{1, 0, 0}, 29)...)
	f.Add(byte(0), byte(0), byte(0), append(noChunks, 5, 0, 1, 0))
	f.Fuzz(func(t *testing.T, kind, cond, replicas byte, data []byte) {
		w := newWorld(1+replicas%3, 128)
		w.pg.Speculative = replicas/24%2 == 1
		c := w.client(1)
		// A shard that moves, to here or elsewhere, or not at all.
		w.split = kind%2 == 0
		switch w.child = (&index.Route{PG: &w.pg, Shard: 9, ShardOff: childOff, Segments: 1}); replicas / 3 % 4 {
		case 1:
			w.other = newWorld(1+cond%3, 128)
			w.other.pg.ID = 2
			w.child.PG = &w.other.pg
		case 2:
			w.child.PG = nil
		case 3:
			w.child = nil
		}
		o := &index.Op{Kind: index.Kind(1 + int(kind)%(index.NumKinds-1)), Cond: index.Cond(cond % 4),
			Key: []byte("key"), Value: []byte("value"), Apart: uint16(replicas / 12 % 2),
			Hash: hashOf("key"), IfVersion: 11, Scan: &index.Page{Bytes: 500},
			Raw: &index.RawRead{PG: 1, Space: index.Index, Len: 64},
			Modify: func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
				return []byte("v"), 0, 0, nil
			}}
		if o.Kind >= index.Demote && o.Kind <= index.Locate {
			o.Tiered = &index.Tiered{}
		}
		if o.Kind == index.Prepare || o.Kind == index.Settle || o.Kind == index.Decide {
			o.Txn = &index.Txn{Status: index.StatusAt{PG: 1, Off: statusOff(0), Seq: 1},
				Effect: 1 + index.Effect(replicas%3), Verdict: layout.Verdict(cond % 3)}
			if o.Kind == index.Settle {
				x := layout.MakeLive(1, layout.FP(o.Hash), 0, heapLo+1)
				o.Txn.Placed = index.Placed{
					Word:   layout.MakeLive(1, layout.FP(o.Hash), 1, heapLo).WithState(layout.Frozen),
					Intent: layout.Intent{Kind: layout.IntentPut, Seq: 1, Parent: x, Final: x}}
			}
		}
		if o.Kind >= index.Sync {
			x := &repair.Work{PG: 1, Off: shardOff, Group: homeGroup, Wipe: cond%2 == 0, Drop: cond%4 == 0,
				Target: uint32(replicas % 3)}
			if o.Kind == index.Clean || o.Kind == index.Relocate {
				x.Off = home()
			}
			o.Machine = repair.New(o.Kind, x)
		}
		if o.Kind == index.Transact {
			x := &index.Transaction{Status: index.StatusAt{PG: 1, Off: statusOff(0), Seq: 1}}
			for _, k := range []string{"key", "kit"} {
				x.Legs = append(x.Legs, index.Leg{Key: []byte(k), Hash: hashOf(k), Value: o.Value,
					Effect: index.PutKey + index.Effect(replicas/2%2), Cond: o.Cond, IfVersion: o.IfVersion})
			}
			o.Machine = x
		}
		in := hostile{b: data, w: w, op: o}
		if in.byte()%2 == 0 {
			c.hints["key"] = index.Hint{Word: in.word(), Slot: in.byte() % 62, Flags: index.HintFlags(in.byte() % 4)}
			if h := c.hints["key"]; h.Slot >= 30 && h.Slot < index.StashSlot || !h.Word.Readable() {
				delete(c.hints, "key") // a session remembers only what it saw
			} else if h.Version = 11; o.Kind == index.Transact && h.Word.State() == layout.Live {
				h.Flags = 0
				c.hints["key"], c.hints["kit"] = h, h
			}
		}
		o.Start(c)
		c.op = o
		quiet := 0 // actions since the hostile bytes ran out
		for n := 0; ; n++ {
			if in.done() {
				quiet++
			}
			if quiet > 200 && o.Kind < index.Sync || quiet > 4000 {
				t.Fatalf("no end: step %v after %d actions", o.Step(), n)
			}
			a := o.Next()
			switch a {
			case index.Post:
				waited, cas := 0, 0
				for i := range o.Accesses {
					x := &o.Accesses[i]
					c.mem().checkBounds(x) // panics
					if x.Verb == index.CAS && !x.NoWait {
						cas++
					}
					if !x.NoWait {
						waited++
					}
					in.answer(x)
				}
				if cas > index.MaxCAS {
					t.Fatalf("step %v: %d CASes in a round", o.Step(), cas)
				}
				if waited == 0 {
					t.Fatalf("step %v posts nothing to wait for", o.Step())
				}
				continue
			case index.AskFenced:
				o.OwnerFenced = in.byte()%2 == 0
			case index.Done:
				if o.Err == nil && o.Kind.Reads() && string(o.Record.Key) != "key" {
					t.Fatalf("get answered a record of %q", o.Record.Key)
				}
				return
			case index.Alloc:
				if w.nextUnit = heapLo; w.other != nil {
					w.other.nextUnit = heapLo
				}
			case index.Refresh, index.Grow:
				if in.done() && (o.Kind >= index.Sync || w.child != nil && w.child.PG == nil) {
					return // it waits for a map that never comes here
				}
			}
			if in.byte() == 77 {
				o.Fail(index.ErrFull)
				return
			}
			for i := range o.Accesses {
				c.mem().checkBounds(&o.Accesses[i])
			}
			o.Accesses = o.Accesses[:0]
		}
	})
}

// hostile makes answers from fuzzed bytes, some of them plausible, so that they
// pass the first checks.
type hostile struct {
	b  []byte
	w  *world
	op *index.Op
}

func (h *hostile) done() bool { return len(h.b) == 0 }

func (h *hostile) byte() byte {
	if len(h.b) == 0 {
		return 0
	}
	x := h.b[0]
	h.b = h.b[1:]
	return x
}

// word is a slot word, often of the key's fingerprint and inside the heap.
func (h *hostile) word() layout.Word {
	s := h.byte()
	fp := hashOf("key") & 0xfff
	if s%5 == 0 {
		fp = uint64(h.byte())
	}
	unit := heapLo + uint32(h.byte())%140
	return layout.MakeLive(uint16(s), uint16(fp), h.byte()%20, unit).WithState(layout.State(s >> 6))
}

func (h *hostile) answer(a *index.Access) {
	if v := h.op.ValueOf(a); v != nil && a.Verb == index.Read {
		whole := index.Access{Verb: index.Read, Buf: make([]byte, h.op.LenOf(a))}
		h.answer(&whole)
		a.Failed = whole.Failed
		copy(v.Bytes, whole.Buf[copy(a.Buf, whole.Buf):])
		if v.N, v.CRC = v.Start(a.Buf); v.N >= 0 {
			v.CRC = crc32.Update(v.CRC, castagnoli, v.Bytes[:v.N])
		}
		return
	}
	if h.done() {
		if a.Verb == index.Read {
			clear(a.Buf)
		}
		a.Found = a.Expect
		return
	}
	how := h.byte()
	if how == 13 {
		a.Failed = true
	}
	switch a.Verb {
	case index.CAS:
		switch how % 4 {
		case 0:
			a.Found = a.Expect
		case 1:
			a.Found = uint64(h.word())
		case 2:
			a.Found = uint64(layout.MakeLock(uint32(h.byte()), 1))
		case 3:
			a.Found = a.New
		}
	case index.Read:
		clear(a.Buf)
		switch how % 8 {
		case 0:
			for i := range a.Buf {
				a.Buf[i] = h.byte()
			}
		case 1, 2, 3: // a group, or a word
			for i := 0; i+8 <= len(a.Buf) && !h.done(); i += 8 {
				if i == 0 && len(a.Buf) >= layout.GroupSize {
					binary.LittleEndian.PutUint64(a.Buf, uint64(h.byte())<<8&uint64(layout.FlagOVF|layout.FlagSplit))
					continue
				}
				binary.LittleEndian.PutUint64(a.Buf[i:], uint64(h.word()))
			}
		case 4: // the key's record
			h.record(a.Buf, 0, "key", []byte("theirs"))
		case 5: // a manifest, of as many chunks as fit
			n := int(h.byte()) % 4
			m := layout.Manifest{Len: uint64(n) * layout.ChunkSize, ID: 9}
			for range n {
				m.Chunks = append(m.Chunks, layout.Chunk{Unit: heapLo + uint32(h.byte())%128, Code: h.byte()})
			}
			b := make([]byte, layout.ManifestLen(n))
			layout.EncodeManifest(b, m)
			h.record(a.Buf, layout.FlagManifest, "key", b)
		case 6:
			h.record(a.Buf, 0, "another", nil)
		case 7:
			h.record(a.Buf, layout.FlagChunk, "", []byte("x"))
		}
	}
}

func (h *hostile) record(b []byte, f layout.RecordFlags, key string, value []byte) {
	if len(b) >= layout.RecordLen(len(key), len(value)) {
		layout.EncodeRecord(b, layout.RecordHeader{Version: uint64(h.byte()), Flags: f, Expiry: uint64(h.byte() % 2)},
			[]byte(key), value)
	}
}
