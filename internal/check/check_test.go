package check

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// memory is a namespace of one placement group whose replicas are slices, with the
// state that the directory would show of it. The index has room for three arrays of
// two segments.
type memory struct {
	t       *testing.T
	regions [][]byte
	st      *dirpb.StatusReply
	next    uint32 // unit
	reads   int64
	onRead  func(n int64) // before read n, from 1
}

const (
	memIndex    = layout.RegionPageSize * 8
	memRegion   = 1 << 20
	memSegments = 2
	memSession  = 77
)

func arrayOff(n int) uint64 { return layout.RegionPageSize + uint64(n)*memSegments*layout.SegmentSize }

func newMemory(t *testing.T, replicas int) *memory {
	m := &memory{t: t, next: memIndex / layout.UnitSize}
	pg := &dirpb.PlacementGroup{Id: 1, NamespaceId: 1, Epoch: 1, State: dirpb.PGState_PG_ACTIVE, RegionBytes: memRegion,
		IndexBytes: memIndex}
	mp := &dirpb.Map{Version: 5, Pgs: []*dirpb.PlacementGroup{pg},
		Namespaces: []*dirpb.Namespace{{Id: 1, Name: "default", Replicas: uint32(replicas)}},
		Shards:     []*dirpb.Shard{{Id: 1, NamespaceId: 1, PgId: 1, Offset: arrayOff(0), Segments: memSegments}}}
	for i := range replicas {
		pg.Members = append(pg.Members, &dirpb.Member{NodeId: uint32(i + 1), Incarnation: 1})
		mp.Nodes = append(mp.Nodes, &dirpb.Node{Id: uint32(i + 1), Name: fmt.Sprintf("m%d", i+1),
			State: dirpb.NodeState_NODE_UP})
		b := make([]byte, memRegion)
		layout.InitRegion(b, layout.RegionHeader{PG: 1, Namespace: 1, RegionBytes: memRegion, IndexBytes: memIndex})
		m.regions = append(m.regions, b)
	}
	m.st = &dirpb.StatusReply{Map: mp, Usage: []*dirpb.PGUsage{{PgId: 1}},
		Sessions: []*dirpb.SessionInfo{
			{Id: memSession, Namespace: "default", Client: "kvctl", Life: dirpb.SessionLife_SESSION_LIVE}}}
	return m
}

func (m *memory) pg() *dirpb.PlacementGroup { return m.st.Map.Pgs[0] }

func hashOf(key string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(key))
	x := h.Sum64() // whose top bits differ little between short keys
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	return x ^ x>>31
}

func (m *memory) Status(context.Context) (*dirpb.StatusReply, error) {
	return proto.CloneOf(m.st), nil
}

func (m *memory) Hash(key []byte) (uint64, error) { return hashOf(string(key)), nil }

func (m *memory) Read(_ context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error) {
	if m.reads++; m.onRead != nil {
		m.onRead(m.reads)
	}
	if pg != 1 || replica >= len(m.regions) || off+uint64(n) > memRegion {
		return nil, fmt.Errorf("no bytes [%#x,+%#x) of copy %d of placement group %d", off, n, replica, pg)
	}
	return slices.Clone(m.regions[replica][off:][:n]), nil
}

// record writes a record at a fresh place, which it counts as granted, and returns
// the word that names it.
func (m *memory) record(key, value string) layout.Word {
	code, _ := layout.CodeFor(layout.RecordLen(len(key), len(value)))
	w := layout.MakeLive(1, layout.FP(hashOf(key)), code, m.next)
	for _, b := range m.regions {
		layout.EncodeRecord(b[w.Off():][:w.ReadLen()], layout.RecordHeader{Version: 1}, []byte(key), []byte(value))
	}
	m.next += w.Units()
	m.st.Usage[0].GrantedUnits += uint64(w.Units())
	return w
}

// link puts w into the first unused slot of key's group in array n, everywhere, and
// returns the slot's offset.
func (m *memory) link(n int, key string, w layout.Word) uint64 {
	home, _ := layout.GroupOff(hashOf(key), memSegments)
	g := arrayOff(n) + home
	for i := range layout.GroupSlots {
		if layout.Group(m.regions[0][g:][:layout.GroupSize]).Slot(i) == 0 {
			off := g + layout.SlotOff(i)
			for r := range m.regions {
				m.set(r, off, uint64(w))
			}
			return off
		}
	}
	m.t.Fatalf("no slot for %q", key)
	return 0
}

func (m *memory) set(replica int, off uint64, w uint64) {
	binary.LittleEndian.PutUint64(m.regions[replica][off:], w)
}

func (m *memory) put(key, value string) (off uint64, w layout.Word) {
	w = m.record(key, value)
	return m.link(0, key, w), w
}

// keys stores n of them.
func (m *memory) keys(n int) {
	for i := range n {
		m.put(fmt.Sprintf("key%d", i), "value")
	}
}

// check runs the checker on m.
func (m *memory) check() *Report {
	m.t.Helper()
	rep := NewReport()
	err := Run(m.t.Context(), rep, Options{Store: m, Namespace: m.st.Map.Namespaces[0], Session: memSession,
		NowMillis: uint64(time.Now().UnixMilli()), Rest: time.Millisecond})
	if err != nil {
		m.t.Fatal(err)
	}
	return rep
}

// Everything that can be wrong with memory is found, and counted as what it is.
func TestMemory(t *testing.T) {
	for _, c := range []struct {
		name  string
		plant func(m *memory)
		ok    bool
		want  string // in a finding or a problem
		have  func(r *Report) bool
	}{
		{"nothing", func(*memory) {}, true, "", func(r *Report) bool {
			return r.Records == 20 && r.Live == 20 && r.Replicas == 3 && r.Groups == 2*17 &&
				r.Bytes == 20*layout.UnitSize
		}},
		{"a word that the last replica lacks", func(m *memory) {
			off, _ := m.put("a", "v")
			m.set(2, off, 0)
		}, false, "replica 1 has LIVE", func(r *Report) bool {
			return r.DifferingWords == 1 && r.Differing == 1 && r.DifferingRecords == 0 && r.Corrupt == 0
		}},
		{"a word that two replicas lack", func(m *memory) {
			off, w := m.put("a", "v")
			m.set(1, off, uint64(w.Delete(9)))
			m.set(2, off, 0)
		}, false, "replica 0 has LIVE", func(r *Report) bool { return r.DifferingWords == 2 && r.Differing == 2 }},
		{"another nonce", func(m *memory) {
			off, w := m.put("a", "v")
			m.st.Usage[0].GrantedUnits-- // it is free again
			for r := range m.regions {
				m.set(r, off, uint64(w.Delete(uint32(9+r/2))))
			}
		}, false, "replica 1 has EMPTY", func(r *Report) bool { return r.DifferingWords == 1 }},
		{"a header", func(m *memory) {
			m.set(1, arrayOff(0), uint64(layout.FlagOVF))
		}, false, "header 0x0, but 0x100 at replica 1",
			func(r *Report) bool { return r.DifferingWords == 2 }},
		{"locks are the head's alone", func(m *memory) { m.set(0, arrayOff(0)+layout.GroupLockOff, 1) }, true, "",
			func(r *Report) bool { return r.Locks == 1 }},
		{"a torn copy", func(m *memory) {
			_, w := m.put("a", "v")
			m.regions[1][w.Off()+layout.RecordHeaderSize+1] ^= 1
		}, false, "CRC-32C", func(r *Report) bool {
			return r.Corrupt == 1 && r.DifferingRecords == 2 && r.Differing == 2
		}},
		{"a copy of the place's other life", func(m *memory) {
			_, w := m.put("a", "v")
			layout.EncodeRecord(m.regions[2][w.Off():][:w.ReadLen()], layout.RecordHeader{Version: 1}, []byte("a"),
				[]byte("u"))
		}, false, "the record is not that of replica 1", func(r *Report) bool {
			return r.Corrupt == 0 && r.DifferingRecords == 1
		}},
		{"behind the record anything may stand", func(m *memory) {
			_, w := m.put("a", "v")
			m.regions[1][w.Off()+uint64(w.ReadLen())-1] = 1
		}, true, "", nil},
		{"a key twice", func(m *memory) {
			m.put("a", "v")
			m.put("a", "w")
		}, false, "is in the slot at", nil},
		{"one place twice", func(m *memory) {
			_, w := m.put("a", "v")
			m.link(0, "a", w)
		}, false, "overlap", nil},
		{"outside the heap", func(m *memory) {
			m.link(0, "a", layout.MakeLive(1, 0, 0, 1))
		}, false, "outside the heap", nil},
		{"another shard's key", func(m *memory) {
			m.st.Map.Shards[0].Depth = 1
			m.st.Map.Shards = append(m.st.Map.Shards, &dirpb.Shard{Id: 2, NamespaceId: 1, PgId: 1, Offset: arrayOff(1),
				Segments: memSegments, Prefix: 1, Depth: 1})
		}, false, fmt.Sprintf("belongs to group %#x", arrayOff(1))[:19], nil},
		{"granted and not linked", func(m *memory) { m.st.Usage[0].GrantedUnits += 3 }, false, "",
			func(r *Report) bool { return r.Unreachable == 3*layout.UnitSize && r.Held == 0 && r.Total == 0 }},
		{"linked and not granted", func(m *memory) {
			m.st.Usage[0].GrantedUnits--
		}, false, "may be granted again", nil},
		{"leaks that the directory knows", func(m *memory) {
			m.st.Usage[0].LeakedExtents, m.st.Usage[0].LeakedUnits = 2, 5
			m.st.Usage[0].GrantedUnits += 5
		}, false, "", func(r *Report) bool {
			return r.LeakedExtents == 2 && r.Unreachable == 5*layout.UnitSize && r.Total == 0
		}},
		{"leaks of an old scrub", func(m *memory) {
			m.st.Usage[0].LeakedExtents, m.st.Usage[0].LeakedUnits = 2, 5
		}, true, "", nil},
		{"what other sessions hold", func(m *memory) {
			m.st.Usage[0].GrantedUnits += 100
			m.st.Sessions = append(m.st.Sessions, &dirpb.SessionInfo{Id: 5, Namespace: "default",
				Life: dirpb.SessionLife_SESSION_LIVE},
				&dirpb.SessionInfo{Id: 6, Namespace: "default", Life: dirpb.SessionLife_SESSION_FENCING},
				&dirpb.SessionInfo{Id: 7, Namespace: "other", Life: dirpb.SessionLife_SESSION_LIVE})
		}, true, "", func(r *Report) bool {
			return r.Held == 100*layout.UnitSize && r.Holders == 2 && r.Unreachable == 0
		}},
		{"what is on its way back", func(m *memory) {
			m.st.Usage[0].GrantedUnits += 100
			m.st.Usage[0].ComingUnits = 100
		}, true, "", func(r *Report) bool { return r.Held == 100*layout.UnitSize && r.Unreachable == 0 }},
		{"what other sessions hold, and what was linked since the scrub", func(m *memory) {
			m.st.Usage[0].GrantedUnits += 100
			m.st.Usage[0].LeakedUnits, m.st.Usage[0].LeakedExtents = 15, 1 // of sessions that have ended
			m.st.Usage[0].LastScrub = &dirpb.JobReport{LinkedUnits: []uint32{5}}
			m.st.Sessions = append(m.st.Sessions, &dirpb.SessionInfo{Id: 5, Namespace: "default",
				Life: dirpb.SessionLife_SESSION_LIVE})
		}, true, "", func(r *Report) bool {
			return r.Held == 100*layout.UnitSize && r.Unreachable == 0 && r.LeakedExtents == 0
		}},
		{"what other sessions hold, and what nobody does", func(m *memory) {
			m.st.Usage[0].GrantedUnits += 100
			m.st.Usage[0].LeakedUnits, m.st.Usage[0].LeakedExtents = 40, 1
			m.st.Usage[0].LastScrub = &dirpb.JobReport{LinkedUnits: []uint32{20}}
			m.st.Sessions = append(m.st.Sessions, &dirpb.SessionInfo{Id: 5, Namespace: "default",
				Life: dirpb.SessionLife_SESSION_LIVE})
		}, false, "", func(r *Report) bool {
			return r.Held == 60*layout.UnitSize && r.Unreachable == 40*layout.UnitSize && r.LeakedExtents == 1
		}},
		{"a copy too few", func(m *memory) {
			m.st.Map.Namespaces[0].Replicas = 4
		}, false, "placement group 1: 3 of 4 copies",
			func(r *Report) bool { return r.Records == 20 }},
		{"a joiner that holds nothing yet", func(m *memory) {
			m.pg().Joining = true
			clear(m.regions[2])
		}, false, "active, joining, 2 of 3 copies", func(r *Report) bool {
			return r.Replicas == 2 && r.Total == 0 && r.Records == 20
		}},
		{"frozen", func(m *memory) { m.pg().State = dirpb.PGState_PG_FROZEN }, false, "placement group 1: frozen",
			func(r *Report) bool { return r.Records == 0 }},
		{"lost", func(m *memory) {
			m.pg().State, m.pg().Members = dirpb.PGState_PG_LOST, nil
		}, false, "placement group 1: lost", nil},
		{"frozen word without a move", func(m *memory) {
			w := m.record("a", "v")
			m.link(0, "a", w.WithState(layout.Frozen))
		}, false, "frozen, but its shard does not move", func(r *Report) bool { return r.Total == 3 }},
		{"moved word after the move, before it is cleaned", func(m *memory) {
			w := m.record("a", "v")
			m.st.Usage[0].GrantedUnits -= uint64(w.Units())
			m.link(0, "a", w.WithState(layout.Moved))
			m.st.Jobs = []*dirpb.Job{{Id: 1, Kind: dirpb.JobKind_JOB_CLEAN, NamespaceId: 1, PgId: 1}}
		}, true, "", func(r *Report) bool { return r.Moved == 1 }},
		{"array outside the index", func(m *memory) {
			m.st.Map.Shards[0].Segments = 100
		}, false, "do not lie in the index", nil},
		{"region of another placement group", func(m *memory) {
			layout.InitRegion(m.regions[1], layout.RegionHeader{PG: 2, Namespace: 1, RegionBytes: memRegion,
				IndexBytes: memIndex})
		}, false, "is not that of the map", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMemory(t, 3)
			m.keys(20)
			c.plant(m)
			rep := m.check()
			if rep.Good() != c.ok {
				t.Errorf("good is %v: %+v", rep.Good(), rep)
			}
			if text := fmt.Sprint(rep.Findings, rep.Problems); !strings.Contains(text, c.want) {
				t.Errorf("%s, want %q", text, c.want)
			}
			if c.have != nil && !c.have(rep) {
				t.Errorf("%+v", rep)
			}
		})
	}
}

// movedKey is one whose hash begins with the bit that moves.
func movedKey(moves bool) string {
	for i := 0; ; i++ {
		k := fmt.Sprintf("k%d", i)
		if (hashOf(k)>>63 == 1) == moves {
			return k
		}
	}
}

// While a shard splits, a key may be in the parent, in both under one place, or in
// the child alone.
func TestMove(t *testing.T) {
	moving, staying := movedKey(true), movedKey(false)
	for _, c := range []struct {
		name  string
		plant func(m *memory, w layout.Word)
		want  string
	}{
		{"not yet", func(m *memory, w layout.Word) { m.link(0, moving, w) }, ""},
		{"frozen", func(m *memory, w layout.Word) { m.link(0, moving, w.WithState(layout.Frozen)) }, ""},
		{"copied", func(m *memory, w layout.Word) {
			m.link(0, moving, w.WithState(layout.Frozen))
			m.link(1, moving, w)
		}, ""},
		{"moved", func(m *memory, w layout.Word) {
			m.link(0, moving, w.WithState(layout.Moved))
			m.link(1, moving, w)
		}, ""},
		{"live in both", func(m *memory, w layout.Word) {
			m.link(0, moving, w)
			m.link(1, moving, w)
		}, "overlap"},
		{"the child holds a key that stays", func(m *memory, _ layout.Word) {
			m.link(0, moving, m.record(moving, "v"))
			m.link(1, staying, m.record(staying, "v"))
			m.st.Usage[0].GrantedUnits--
		}, "belongs to group"},
		{"the child differs", func(m *memory, w layout.Word) {
			m.link(0, moving, w.WithState(layout.Frozen))
			m.set(1, m.link(1, moving, w), 0)
		}, "replica 0 has LIVE"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMemory(t, 2)
			m.st.Map.Shards[0].Move = &dirpb.Move{ChildId: 2, PgId: 1, Offset: arrayOff(1), Split: true}
			w := m.record(moving, "v")
			c.plant(m, w)
			rep := m.check()
			if (c.want == "") != rep.Good() || !strings.Contains(fmt.Sprint(rep.Findings), c.want) {
				t.Errorf("%+v", rep)
			}
			if rep.Groups != 2*2*17 {
				t.Errorf("%d groups, want those of parent and child", rep.Groups)
			}
		})
	}
	// A child that was lost is not looked into.
	m := newMemory(t, 2)
	m.st.Map.Shards[0].Move = &dirpb.Move{ChildId: 2, PgId: 1, Offset: arrayOff(1), Split: true, Abandoned: true}
	m.link(1, staying, layout.MakeLive(1, 0, 0, 1))
	if rep := m.check(); !rep.Good() || rep.Groups != 2*17 {
		t.Errorf("abandoned: %+v", rep)
	}
}

// A difference that heals while it is looked at is none.
func TestHealing(t *testing.T) {
	m := newMemory(t, 2)
	m.keys(5)
	off, w := m.put("a", "v")
	m.set(1, off, 0)
	m.onRead = func(n int64) {
		if n == 6 { // headers, then the segments, then records
			m.set(1, off, uint64(w))
		}
	}
	if rep := m.check(); !rep.Good() || rep.DifferingWords != 0 || m.reads < 7 {
		t.Errorf("%d reads: %+v", m.reads, rep)
	}
}

// A placement group that changes while it is read is read again, and what was found
// under the old map does not count.
func TestChangedMap(t *testing.T) {
	m := newMemory(t, 2)
	m.keys(5)
	off, w := m.put("a", "v")
	m.set(1, off, 0)
	healed := false
	m.onRead = func(n int64) {
		if n > 1 && !healed {
			m.pg().Epoch++
			if n > 8 {
				m.set(1, off, uint64(w))
				healed = true
			}
		}
	}
	if rep := m.check(); !rep.Good() || rep.Total != 0 || rep.Records != 6 || rep.Replicas != 2 || rep.PGs != 1 {
		t.Errorf("%+v", rep)
	}
	// A placement group that never rests is named.
	m.onRead = func(int64) { m.pg().Epoch++ }
	if rep := m.check(); rep.Good() || !strings.Contains(fmt.Sprint(rep.Problems),
		"placement group 1: not checked: it changed whenever it was read") {
		t.Errorf("%+v", rep)
	}
}

// intent stores what a transaction may leave of a put of key from old to new: an intent of transaction seq of the first
// status word.
func (m *memory) intent(key string, change func(*layout.Intent)) (off uint64, w layout.Word) {
	before, after := m.record(key, "old"), m.record(key, "new")
	pg := m.pg()
	pg.StatusArrays = []*dirpb.StatusArray{{Offset: arrayOff(2), Segments: 1}}
	in := layout.Intent{Kind: layout.IntentPut, PG: 1, Off: arrayOff(2) + layout.SlotOff(0), Seq: 3, Parent: before,
		Final: after}
	if change != nil {
		change(&in)
	}
	var v [layout.IntentLen]byte
	layout.EncodeIntent(v[:], &in)
	w = m.record(key, string(v[:])).WithState(layout.Frozen)
	for _, b := range m.regions {
		layout.EncodeRecord(b[w.Off():][:w.ReadLen()], layout.RecordHeader{Version: 2, Flags: layout.FlagIntent},
			[]byte(key), v[:])
	}
	return m.link(0, key, w), w
}

// An intent is no word of a move. All that it names counts as linked, and is checked, as its status word is; a status
// array is no part of a shard.
func TestIntents(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*layout.Intent)
		after  func(m *memory, off uint64, w layout.Word)
		status layout.Status
		want   string
	}{
		"undecided":      {},
		"decided":        {status: layout.MakeStatus(3, layout.Commit, 7)},
		"gone on":        {status: layout.MakeStatus(4, layout.Abort, 7), want: "has gone on to transaction 4 ABORT"},
		"no status word": {status: layout.Status(3 << 60), want: "state and verdict"},
		"elsewhere": {change: func(in *layout.Intent) {
			in.Off = arrayOff(1) + layout.SlotOff(0)
		}, want: "where none is"},
		"no group": {change: func(in *layout.Intent) {
			in.PG = 9
		}, want: "placement group 9, which is not there"},
		"lost": {change: func(in *layout.Intent) {
			in.Generation = 9
		}, status: layout.MakeStatus(4, layout.Abort, 7)},
		"live": {after: func(m *memory, off uint64, w layout.Word) {
			for r := range m.regions {
				m.set(r, off, uint64(w.WithState(layout.Live)))
			}
		}, want: "is not frozen"},
		"of a damaged record": {after: func(m *memory, _ uint64, w layout.Word) {
			m.regions[1][uint64(w.Unit()-1)*layout.UnitSize+layout.RecordHeaderSize] ^= 1
		}, want: "the record after"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t, 2)
			m.keys(20)
			off, w := m.intent("key-in-doubt", c.change)
			for r := range m.regions {
				m.set(r, arrayOff(2)+layout.SlotOff(0), uint64(c.status))
			}
			if c.after != nil {
				c.after(m, off, w)
			}
			rep := m.check()
			if (c.want == "") != rep.Good() || !strings.Contains(fmt.Sprint(rep.Findings), c.want) {
				t.Errorf("%+v", rep)
			}
			if c.want == "" && (rep.Intents != 1 || rep.Frozen != 1 || rep.Records != 21 || rep.Groups != 2*17) {
				t.Errorf("counts %+v", rep)
			}
		})
	}
}
