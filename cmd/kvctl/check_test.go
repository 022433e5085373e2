package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// memory is a namespace of one placement group whose replicas are slices, with the
// state that the directory would show of it. The index has room for three arrays of
// two clusters.
type memory struct {
	store   // nil: what is not below is not called
	t       *testing.T
	regions [][]byte
	st      *dirpb.StatusReply
	next    uint32 // unit
	reads   atomic.Int64
	onRead  func(n int64) // before read n, from 1
}

const (
	memIndex    = layout.RegionPageSize * 8
	memRegion   = 1 << 20
	memClusters = 2
	memSession  = 77
)

func arrayOff(n int) uint64 { return layout.RegionPageSize + uint64(n)*memClusters*layout.ClusterSize }

func newMemory(t *testing.T, replicas int) *memory {
	m := &memory{t: t, next: memIndex / layout.UnitSize}
	pg := &dirpb.PlacementGroup{Id: 1, NamespaceId: 1, Epoch: 1, State: dirpb.PGState_PG_ACTIVE, RegionBytes: memRegion, IndexBytes: memIndex}
	mp := &dirpb.Map{Version: 5, Pgs: []*dirpb.PlacementGroup{pg},
		Namespaces: []*dirpb.Namespace{{Id: 1, Name: "default", Replicas: uint32(replicas)}},
		Shards:     []*dirpb.Shard{{Id: 1, NamespaceId: 1, PgId: 1, Offset: arrayOff(0), Clusters: memClusters}}}
	for i := range replicas {
		pg.Members = append(pg.Members, &dirpb.Member{NodeId: uint32(i + 1), Incarnation: 1})
		mp.Nodes = append(mp.Nodes, &dirpb.Node{Id: uint32(i + 1), Name: fmt.Sprintf("m%d", i+1), State: dirpb.NodeState_NODE_UP})
		b := make([]byte, memRegion)
		layout.InitRegion(b, layout.RegionHeader{PG: 1, Namespace: 1, RegionBytes: memRegion, IndexBytes: memIndex})
		m.regions = append(m.regions, b)
	}
	m.st = &dirpb.StatusReply{Map: mp, Usage: []*dirpb.PGUsage{{PgId: 1}},
		Sessions: []*dirpb.SessionInfo{{Id: memSession, Namespace: "default", Client: "kvctl", Life: dirpb.SessionLife_SESSION_LIVE}}}
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

func (m *memory) Locate(key []byte) (client.Location, error) {
	h := hashOf(string(key))
	home, stash := layout.GroupOff(h, memClusters)
	return client.Location{PG: 1, ShardID: 1, Home: arrayOff(0) + home, Stash: arrayOff(0) + stash, Hash: h,
		RegionBytes: memRegion, IndexBytes: memIndex, Replicas: len(m.regions)}, nil
}

func (m *memory) ReadRaw(_ context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error) {
	if r := m.reads.Add(1); m.onRead != nil {
		m.onRead(r)
	}
	if pg != 1 || replica >= len(m.regions) || off+uint64(n) > memRegion {
		return nil, client.ErrInvalid
	}
	return slices.Clone(m.regions[replica][off:][:n]), nil
}

func (m *memory) Stats() client.Stats { return client.Stats{Session: memSession} }
func (m *memory) Close() error        { return nil }

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
	home, _ := layout.GroupOff(hashOf(key), memClusters)
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

// check runs kvctl check on m and the directory f.
func (m *memory) check(f *fakeDirectory, args ...string) (checkReport, result) {
	m.t.Helper()
	if f == nil {
		f = &fakeDirectory{}
	}
	if f.now == nil {
		f.now = m.st
	}
	e := &env{t: m.t, flags: []string{"--directory", f.serve(m.t)}, now: time.Now}
	e.backend = func(a *app) (backend, error) {
		b, err := openStore(a)
		return inMemory{b, m}, err
	}
	r := e.run("", append([]string{"-o", "json", "check"}, args...)...)
	if r.code != exitOK && r.code != exitNo {
		return checkReport{}, r
	}
	return decode[checkReport](m.t, r.stdout), r
}

// inMemory is a directory with m's sessions.
type inMemory struct {
	backend
	m *memory
}

func (b inMemory) Open(context.Context, sessionOptions) (store, error) { return b.m, nil }

// Everything that can be wrong with memory is found, and counted as what it is.
func TestCheckMemory(t *testing.T) {
	for _, c := range []struct {
		name  string
		plant func(m *memory)
		ok    bool
		want  string // in a finding or a problem
		have  func(r checkReport) bool
	}{
		{"nothing", func(*memory) {}, true, "", func(r checkReport) bool {
			return r.Records == 20 && r.Live == 20 && r.Replicas == 3 && r.Groups == 2*17 && r.Bytes == 20*layout.UnitSize
		}},
		{"a word that the last replica lacks", func(m *memory) {
			off, _ := m.put("a", "v")
			m.set(2, off, 0)
		}, false, "replica 1 has LIVE", func(r checkReport) bool {
			return r.DifferingWords == 1 && r.Differing == 1 && r.DifferingRecords == 0 && r.Corrupt == 0
		}},
		{"a word that two replicas lack", func(m *memory) {
			off, w := m.put("a", "v")
			m.set(1, off, uint64(w.Delete(9)))
			m.set(2, off, 0)
		}, false, "replica 0 has LIVE", func(r checkReport) bool { return r.DifferingWords == 2 && r.Differing == 2 }},
		{"another nonce", func(m *memory) {
			off, w := m.put("a", "v")
			m.st.Usage[0].GrantedUnits-- // it is free again
			for r := range m.regions {
				m.set(r, off, uint64(w.Delete(uint32(9+r/2))))
			}
		}, false, "replica 1 has EMPTY", func(r checkReport) bool { return r.DifferingWords == 1 }},
		{"a header", func(m *memory) { m.set(1, arrayOff(0), uint64(layout.FlagOVF)) }, false, "header 0x0, but 0x100 at replica 1",
			func(r checkReport) bool { return r.DifferingWords == 2 }},
		{"locks are the arbiter's alone", func(m *memory) { m.set(0, arrayOff(0)+layout.GroupLockOff, 1) }, true, "",
			func(r checkReport) bool { return r.Locks == 1 }},
		{"a torn copy", func(m *memory) {
			_, w := m.put("a", "v")
			m.regions[1][w.Off()+layout.RecordHeaderSize+1] ^= 1
		}, false, "CRC-32C", func(r checkReport) bool { return r.Corrupt == 1 && r.DifferingRecords == 2 && r.Differing == 2 }},
		{"a copy of the place's other life", func(m *memory) {
			_, w := m.put("a", "v")
			layout.EncodeRecord(m.regions[2][w.Off():][:w.ReadLen()], layout.RecordHeader{Version: 1}, []byte("a"), []byte("u"))
		}, false, "the record is not that of replica 1", func(r checkReport) bool { return r.Corrupt == 0 && r.DifferingRecords == 1 }},
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
		{"outside the heap", func(m *memory) { m.link(0, "a", layout.MakeLive(1, 0, 0, 1)) }, false, "outside the heap", nil},
		{"another shard's key", func(m *memory) { m.st.Map.Shards[0].Depth = 1 }, false, "belongs to group", nil},
		{"granted and not linked", func(m *memory) { m.st.Usage[0].GrantedUnits += 3 }, false, "",
			func(r checkReport) bool { return r.Unreachable == 3*layout.UnitSize && r.Held == 0 && r.Total == 0 }},
		{"linked and not granted", func(m *memory) { m.st.Usage[0].GrantedUnits-- }, false, "may be granted again", nil},
		{"leaks that the directory knows", func(m *memory) {
			m.st.Usage[0].LeakedExtents, m.st.Usage[0].LeakedUnits = 2, 5
			m.st.Usage[0].GrantedUnits += 5
		}, false, "", func(r checkReport) bool {
			return r.LeakedExtents == 2 && r.Unreachable == 5*layout.UnitSize && r.Total == 0
		}},
		{"leaks of an old scrub", func(m *memory) { m.st.Usage[0].LeakedExtents, m.st.Usage[0].LeakedUnits = 2, 5 }, true, "", nil},
		{"what other sessions hold", func(m *memory) {
			m.st.Usage[0].GrantedUnits += 100
			m.st.Sessions = append(m.st.Sessions, &dirpb.SessionInfo{Id: 5, Namespace: "default", Life: dirpb.SessionLife_SESSION_LIVE},
				&dirpb.SessionInfo{Id: 6, Namespace: "default", Life: dirpb.SessionLife_SESSION_FENCING},
				&dirpb.SessionInfo{Id: 7, Namespace: "other", Life: dirpb.SessionLife_SESSION_LIVE})
		}, true, "", func(r checkReport) bool {
			return r.Held == 100*layout.UnitSize && r.Holders == 2 && r.Unreachable == 0
		}},
		{"what other sessions hold, and what nobody does", func(m *memory) {
			m.st.Usage[0].GrantedUnits += 100
			m.st.Usage[0].LeakedUnits, m.st.Usage[0].LeakedExtents = 40, 1
			m.st.Sessions = append(m.st.Sessions, &dirpb.SessionInfo{Id: 5, Namespace: "default", Life: dirpb.SessionLife_SESSION_LIVE})
		}, false, "", func(r checkReport) bool {
			return r.Held == 60*layout.UnitSize && r.Unreachable == 40*layout.UnitSize && r.LeakedExtents == 1
		}},
		{"a copy too few", func(m *memory) { m.st.Map.Namespaces[0].Replicas = 4 }, false, "placement group 1: 3 of 4 copies",
			func(r checkReport) bool { return r.Records == 20 }},
		{"a joiner that holds nothing yet", func(m *memory) {
			m.pg().Joining = true
			clear(m.regions[2])
		}, false, "active, joining, 2 of 3 copies", func(r checkReport) bool { return r.Replicas == 2 && r.Total == 0 && r.Records == 20 }},
		{"frozen", func(m *memory) { m.pg().State = dirpb.PGState_PG_FROZEN }, false, "placement group 1: frozen",
			func(r checkReport) bool { return r.Records == 0 }},
		{"lost", func(m *memory) { m.pg().State, m.pg().Members = dirpb.PGState_PG_LOST, nil }, false, "placement group 1: lost", nil},
		{"frozen word without a move", func(m *memory) {
			w := m.record("a", "v")
			m.link(0, "a", w.WithState(layout.Frozen))
		}, false, "frozen, but its shard does not move", func(r checkReport) bool { return r.Total == 3 }},
		{"moved word after the move, before it is cleaned", func(m *memory) {
			w := m.record("a", "v")
			m.st.Usage[0].GrantedUnits -= uint64(w.Units())
			m.link(0, "a", w.WithState(layout.Moved))
			m.st.Jobs = []*dirpb.Job{{Id: 1, Kind: dirpb.JobKind_JOB_CLEAN, NamespaceId: 1, PgId: 1}}
		}, true, "", func(r checkReport) bool { return r.Moved == 1 }},
		{"array outside the index", func(m *memory) { m.st.Map.Shards[0].Clusters = 100 }, false, "do not lie in the index", nil},
		{"region of another placement group", func(m *memory) {
			layout.InitRegion(m.regions[1], layout.RegionHeader{PG: 2, Namespace: 1, RegionBytes: memRegion, IndexBytes: memIndex})
		}, false, "is not that of the map", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMemory(t, 3)
			m.keys(20)
			c.plant(m)
			rep, r := m.check(nil, "--no-repair", "--for", "1ms")
			if want := map[bool]int{true: exitOK, false: exitNo}[c.ok]; r.code != want || rep.OK != c.ok {
				t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
			}
			if text := fmt.Sprint(rep.Findings, rep.Problems); !strings.Contains(text, c.want) {
				t.Errorf("%s, want %q", text, c.want)
			}
			if c.have != nil && !c.have(rep) {
				t.Errorf("%s", r.stdout)
			}
			if strings.HasPrefix(c.want, "placement group 1: ") && !strings.Contains(r.stderr, "kvctl check: waiting for "+c.want) {
				t.Errorf("said %q", r.stderr)
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
func TestCheckMove(t *testing.T) {
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
			rep, r := m.check(nil, "--no-repair")
			if (c.want == "") != rep.OK || !strings.Contains(fmt.Sprint(rep.Findings), c.want) {
				t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
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
	if rep, r := m.check(nil, "--no-repair"); !rep.OK || rep.Groups != 2*17 {
		t.Errorf("abandoned: %s%s", r.stdout, r.stderr)
	}
}

// A difference that heals while it is looked at is none.
func TestCheckHealing(t *testing.T) {
	m := newMemory(t, 2)
	m.keys(5)
	off, w := m.put("a", "v")
	m.set(1, off, 0)
	m.onRead = func(n int64) {
		if n == 6 { // headers, then the clusters, then records
			m.set(1, off, uint64(w))
		}
	}
	if rep, r := m.check(nil, "--no-repair"); !rep.OK || rep.DifferingWords != 0 || m.reads.Load() < 7 {
		t.Errorf("%s%s", r.stdout, r.stderr)
	}
}

// A placement group that changes while it is read is read again, and what was found
// under the old map does not count.
func TestCheckChangedMap(t *testing.T) {
	m := newMemory(t, 2)
	m.keys(5)
	off, w := m.put("a", "v")
	m.set(1, off, 0)
	f := &fakeDirectory{now: m.st}
	var healed atomic.Bool
	m.onRead = func(n int64) {
		if n > 1 && !healed.Load() {
			f.mu.Lock()
			f.now = proto.Clone(f.now).(*dirpb.StatusReply)
			f.now.Map.Pgs[0].Epoch++
			f.mu.Unlock()
			if n > 8 {
				m.set(1, off, uint64(w))
				healed.Store(true)
			}
		}
	}
	rep, r := m.check(f, "--no-repair")
	if !rep.OK || rep.Total != 0 || rep.Records != 6 || rep.Replicas != 2 || rep.PGs != 1 {
		t.Errorf("%s%s", r.stdout, r.stderr)
	}
	// One that never rests is named.
	m.onRead = func(int64) {
		f.mu.Lock()
		f.now = proto.Clone(f.now).(*dirpb.StatusReply)
		f.now.Map.Pgs[0].Epoch++
		f.mu.Unlock()
	}
	g := &fakeDirectory{now: f.now}
	f = g
	rep, r = m.check(f, "--no-repair")
	if r.code != exitNo || !strings.Contains(fmt.Sprint(rep.Problems), "placement group 1: not checked: it changed whenever it was read") {
		t.Errorf("%s%s", r.stdout, r.stderr)
	}
}

// janitorOf plays the directory and a janitor: a scrub finds leaks in the first of
// its runs, and recalls of them make a second one necessary.
type janitorOf struct {
	f      *fakeDirectory
	m      *memory
	scrubs int
	leaks  int // extents, in the first scrub
	report *dirpb.JobReport
	silent bool // nobody works
}

func (j *janitorOf) start(q *dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
	j.f.mu.Lock()
	defer j.f.mu.Unlock()
	if q.GetKind() != dirpb.JobKind_JOB_SCRUB || !q.GetRepair() || q.GetPgId() != 1 || q.GetNamespace() != "default" {
		return nil, status.Errorf(codes.InvalidArgument, "%v", q)
	}
	j.scrubs++
	id := uint32(10 * j.scrubs)
	show := func(change func(*dirpb.StatusReply)) {
		last := j.f.now
		if len(j.f.next) > 0 {
			last = j.f.next[len(j.f.next)-1]
		}
		st := proto.Clone(last).(*dirpb.StatusReply)
		change(st)
		j.f.next = append(j.f.next, st)
	}
	job := &dirpb.Job{Id: id, Kind: dirpb.JobKind_JOB_SCRUB, NamespaceId: 1, PgId: 1, Total: 34}
	j.f.now = proto.Clone(j.f.now).(*dirpb.StatusReply)
	j.f.now.Jobs = []*dirpb.Job{job}
	if j.silent {
		return &dirpb.StartJobReply{JobIds: []uint32{id}}, nil
	}
	show(func(st *dirpb.StatusReply) { st.Jobs[0].Owner, st.Jobs[0].Done = 5, 17 })
	leaks := j.leaks
	j.leaks = 0
	show(func(st *dirpb.StatusReply) { // done; its leaks are recalled one by one
		st.Jobs = nil
		u := st.Usage[0]
		u.LastScrubUnixMillis += 1000
		u.LastScrub, u.LeakedExtents = j.report, uint32(leaks)
	})
	for i := range leaks {
		show(func(st *dirpb.StatusReply) {
			st.Jobs = []*dirpb.Job{{Id: id + uint32(i) + 1, Kind: dirpb.JobKind_JOB_RECALL, NamespaceId: 1, PgId: 1, Extents: []uint32{uint32(i)}}}
			st.Map.Pgs[0].Recalled = []uint32{uint32(i)}
			st.Usage[0].LeakedExtents--
		})
		show(func(st *dirpb.StatusReply) { st.Jobs = nil }) // an epoch has to pass
		show(func(st *dirpb.StatusReply) {
			st.Map.Pgs[0].Recalled, st.Usage[0].GrantedUnits = nil, st.Usage[0].GrantedUnits-10
		})
	}
	return &dirpb.StartJobReply{JobIds: []uint32{id}}, nil
}

func TestCheckScrubs(t *testing.T) {
	m := newMemory(t, 2)
	m.keys(10)
	m.st.Usage[0].GrantedUnits += 20 // what two extents leak
	j := &janitorOf{m: m, leaks: 2, f: &fakeDirectory{now: m.st}, report: &dirpb.JobReport{SyncedWords: 3, RepairedRecords: 2, BrokenLocks: 1}}
	j.f.startJob = j.start
	// Another job is in the way at first.
	m.st.Jobs = []*dirpb.Job{{Id: 3, Kind: dirpb.JobKind_JOB_MOVE, NamespaceId: 1, PgId: 2, TargetPgId: 1, ShardId: 4}}
	free := proto.Clone(m.st).(*dirpb.StatusReply)
	free.Jobs = nil
	j.f.next = []*dirpb.StatusReply{m.st, m.st, m.st, free}
	rep, r := m.check(j.f)
	if r.code != exitOK || rep.Unreachable != 0 {
		t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
	}
	if j.scrubs != 2 || rep.Scrubbed != 1 || rep.Recalls != 2 || rep.SyncedWords != 6 || rep.RepairedRecords != 4 || rep.BrokenLocks != 2 {
		t.Errorf("%d scrubs: %s", j.scrubs, r.stdout)
	}
	if !strings.Contains(r.stderr, "1 extents are being recalled") {
		t.Errorf("said %q", r.stderr)
	}
}

// What a scrub could not do is said, and is no success.
func TestCheckScrubTrouble(t *testing.T) {
	for _, c := range []struct {
		name string
		prep func(*memory, *janitorOf)
		want string
	}{
		{"records without a good copy", func(_ *memory, j *janitorOf) { j.report.LostRecords = 2 }, `"lost_records":2`},
		{"no janitor", func(_ *memory, j *janitorOf) { j.silent = true }, "scrub did not end: no janitor takes it"},
		{"always busy", func(m *memory, _ *janitorOf) {
			m.st.Jobs = []*dirpb.Job{{Id: 3, Kind: dirpb.JobKind_JOB_JOIN, NamespaceId: 1, PgId: 1}}
		}, "not scrubbed: join of placement group 1 is in the way"},
		{"refused", func(_ *memory, j *janitorOf) {
			j.f.startJob = func(*dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
				return nil, status.Error(codes.FailedPrecondition, "it rests")
			}
		}, "it rests"},
		{"a recall has no room", func(m *memory, j *janitorOf) {
			m.st.Usage[0].GrantedUnits += 10
			j.leaks = 1
		}, "recall of extent 0 did not end: no room"},
		{"leaks stay", func(m *memory, _ *janitorOf) { m.st.Usage[0].GrantedUnits += 9 }, `"leaked_extents":1`},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMemory(t, 2)
			m.keys(10)
			j := &janitorOf{m: m, f: &fakeDirectory{now: m.st}, report: &dirpb.JobReport{}}
			j.f.startJob = j.start
			c.prep(m, j)
			if strings.Contains(c.want, "extent") {
				// What follows the scrub does not end.
				j.f.startJob = func(q *dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
					rep, err := j.start(q)
					j.f.mu.Lock()
					defer j.f.mu.Unlock()
					j.f.next = j.f.next[:min(len(j.f.next), 3)]
					for _, st := range j.f.next {
						st.Usage[0].LeakedExtents = 1
						for _, job := range st.Jobs {
							job.Trouble = "no room"
						}
					}
					return rep, err
				}
			}
			rep, r := m.check(j.f, "--for", "200ms")
			if r.code != exitNo || rep.OK || !strings.Contains(r.stdout, c.want) {
				t.Errorf("exit %d: %s%s", r.code, r.stdout, r.stderr)
			}
		})
	}
	m := newMemory(t, 2)
	m.keys(1)
	f := &fakeDirectory{startJob: func(*dirpb.StartJobRequest) (*dirpb.StartJobReply, error) {
		return nil, status.Error(codes.Unimplemented, "what is a scrub?")
	}}
	if _, r := m.check(f); r.code != exitUsage || !strings.Contains(r.stderr, "scrub of placement group 1: directory") {
		t.Errorf("%+v", r)
	}
	if _, r := m.check(nil, "--for", "0s"); r.code != exitUsage {
		t.Errorf("%+v", r)
	}
}

// A store in use loses a memory node, gets another, is drained and grows, and is as
// good as new each time.
func TestOperateStore(t *testing.T) {
	e := newEnv(t, devstore.Options{Nodes: 3, Replicas: 2, CapacityBytes: 1 << 30, Lease: 2 * time.Second, Providers: []string{"shm"}})
	const keys = 300
	for i := range keys {
		e.must("value", "put", fmt.Sprintf("key%d", i))
	}
	check := func(what string, replicas int) {
		t.Helper()
		rep := decode[checkReport](t, e.must("", "-o", "json", "check", "--for", "60s"))
		if rep.Records != keys || rep.Replicas != replicas || rep.Scrubbed != rep.PGs || rep.Unreachable != 0 || rep.Held != 0 {
			t.Errorf("%s: %+v", what, rep)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	check("new", 6)

	e.must("", "shards", "split", "--all")
	check("split", 6)

	// Two of its three memory nodes have room for what the third held.
	e.must("", "drain", "m1", "--wait")
	if out := e.must("", "nodes"); !strings.Contains(out, "m1    up     yes             0") {
		t.Errorf("drained:\n%s", out)
	}
	check("drained", 6)
	e.must("", "nodes", "add", "m1", "--wait")

	if err := e.store.AddNode(ctx, "m4"); err != nil {
		t.Fatal(err)
	}
	e.must("", "rebalance", "--wait")
	if out := e.must("", "rebalance"); out != "default: nothing to do\n" {
		t.Errorf("rebalance after a rebalance: %q", out)
	}
	st, err := e.store.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	copies := 2 * len(st.GetMap().GetPgs())
	check("balanced", copies)

	if err := e.store.KillNode(1); err != nil {
		t.Fatal(err)
	}
	for n := dirpb.NodeState_NODE_UP; n == dirpb.NodeState_NODE_UP; {
		if st, err = e.store.Status(ctx); err != nil {
			t.Fatal(err)
		}
		n = nodeNamed(st.GetMap(), "m2").GetState()
	}
	check("lost a memory node", copies)
	e.must("", "nodes", "remove", "m2")
	if out := e.must("", "nodes"); strings.Contains(out, "m2") {
		t.Errorf("removed:\n%s", out)
	}
	for i := range keys {
		if out := e.must("", "get", fmt.Sprintf("key%d", i)); out != "value" {
			t.Fatalf("key%d: %q", i, out)
		}
	}
}

// A wait ends with its command, and bears a directory that is silent for a while.
func TestAwait(t *testing.T) {
	boom := errors.New("boom")
	f := &fakeDirectory{now: &dirpb.StatusReply{}}
	e := &env{t: t, flags: []string{"--directory", f.serve(t)}}
	var got error
	e.backend = func(a *app) (backend, error) {
		b, err := openStore(a)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		got = a.await(ctx, b, "test", 0, func(*dirpb.StatusReply) (progress, bool, error) {
			cancel(boom)
			return progress{}, false, nil
		})
		return b, nil
	}
	e.run("", "status")
	if !errors.Is(got, boom) {
		t.Errorf("await: %v", got)
	}
}
