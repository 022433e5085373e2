package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
)

// checker reads all replicas of a namespace.
type checker struct {
	a   *app
	ctx context.Context
	b   backend
	s   store
	ns  *dirpb.Namespace
	now uint64 // Unix ms
	bar *bar
	rep *checkReport

	// Of the placement group that is being read.
	pg   *dirpb.PlacementGroup
	repl int // replica
	geometry
	// places are all records and chunks at the arbiter, for overlaps: 32 bytes each,
	// the only thing that grows with the number of keys.
	places []placed
	linked uint64 // units of them, each once
	// suspects differ between replicas and are looked at again at the end.
	suspects []suspect
	strange  []strangeSlot
}

// array is one shard's clusters in a placement group, or those that it moves to.
type array struct {
	shard    uint32
	off      uint64
	clusters uint32
	prefix   uint32
	depth    uint8
	// moving: words may be FROZEN or MOVED, since it is the parent of a move.
	// child: a FROZEN word of the parent may name the same place.
	moving, child bool
}

func (r array) end() uint64 { return r.off + uint64(r.clusters)*layout.ClusterSize }

// arraysOf lists the arrays of a placement group that clients look into.
func arraysOf(m *dirpb.Map, pg uint32) (out []array) {
	for _, s := range m.GetShards() {
		mv := s.GetMove()
		if s.GetPgId() == pg {
			out = append(out, array{shard: s.GetId(), off: s.GetOffset(), clusters: s.GetClusters(), prefix: s.GetPrefix(),
				depth: uint8(s.GetDepth()), moving: mv != nil})
		}
		if mv != nil && mv.GetPgId() == pg && !mv.GetAbandoned() {
			c := array{shard: mv.GetChildId(), off: mv.GetOffset(), clusters: s.GetClusters(), prefix: s.GetPrefix(),
				depth: uint8(s.GetDepth()), child: true}
			if mv.GetSplit() {
				c.prefix, c.depth = c.prefix<<1|1, c.depth+1
			}
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(x, y array) int { return cmp.Compare(x.off, y.off) })
	return out
}

// shape differs between two maps when what was read of pg under the one is not what
// the other describes.
func shape(m *dirpb.Map, pg uint32) string {
	for _, p := range m.GetPgs() {
		if p.GetId() == pg {
			members := mapTo(p.GetMembers(), func(mb *dirpb.Member) string { return fmt.Sprint(mb.GetNodeId(), "/", mb.GetIncarnation()) })
			return fmt.Sprint(p.GetEpoch(), p.GetState(), p.GetJoining(), p.GetGeneration(), members, arraysOf(m, pg))
		}
	}
	return "gone"
}

// changesBorne is how often a placement group is read, if it changes meanwhile.
const changesBorne = 5

// verify reads every placement group. One that changes meanwhile is read again.
func (k *checker) verify() error {
	st, err := clusterStatus(k.ctx, k.b)
	if err != nil {
		return err
	}
	k.bar = k.a.bar("check", "", func() int64 { return clustersOf(st.GetMap(), k.ns.GetId()) })
	defer k.bar.end()
	for _, p := range pgsOf(st.GetMap(), k.ns.GetId()) {
		if err := k.group(p.GetId()); err != nil {
			return fmt.Errorf("placement group %d: %w", p.GetId(), err)
		}
	}
	return nil
}

func (k *checker) group(id uint32) error {
	for tries := 1; ; tries++ {
		before, err := clusterStatus(k.ctx, k.b)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(before.GetMap().GetPgs(), func(p *dirpb.PlacementGroup) bool { return p.GetId() == id })
		if i < 0 {
			return nil // all of it has moved elsewhere
		}
		pg := before.GetMap().GetPgs()[i]
		saved := *k.rep
		saved.Findings = slices.Clone(saved.Findings)
		if lacks := newView(before.GetMap()).lacks(pg); lacks != "" {
			k.rep.problem(id, "%s", lacks)
		}
		k.rep.PGs++
		if pg.GetState() == dirpb.PGState_PG_ACTIVE {
			err = k.read(pg, before)
		}
		after, serr := clusterStatus(k.ctx, k.b)
		switch {
		case k.ctx.Err() != nil:
			return context.Cause(k.ctx)
		case serr != nil:
			return serr
		case shape(before.GetMap(), id) == shape(after.GetMap(), id):
			if err == nil && pg.GetState() == dirpb.PGState_PG_ACTIVE {
				k.account(pg, before, after)
			}
			return err
		}
		*k.rep = saved
		if tries == changesBorne {
			k.rep.PGs++
			k.rep.problem(id, "not checked: it changed whenever it was read, %d times", tries)
			return nil
		}
	}
}

// read reads and checks all copies of pg.
func (k *checker) read(pg *dirpb.PlacementGroup, st *dirpb.StatusReply) error {
	k.pg, k.geometry = pg, geometryOf(pg.GetRegionBytes(), pg.GetIndexBytes(), pg.GetAccessBytes())
	k.places, k.suspects, k.strange, k.linked = k.places[:0], k.suspects[:0], k.strange[:0], 0
	copies := overview.Copies(pg)
	for k.repl = range copies {
		k.rep.Replicas++
		if err := k.header(); err != nil {
			return err
		}
	}
	// A move that has ended leaves MOVED words until its CLEAN is done.
	tidy := !slices.ContainsFunc(st.GetJobs(), func(j *dirpb.Job) bool {
		return (j.GetPgId() == pg.GetId() || j.GetTargetPgId() == pg.GetId()) &&
			(j.GetKind() == dirpb.JobKind_JOB_MOVE || j.GetKind() == dirpb.JobKind_JOB_CLEAN || j.GetKind() == dirpb.JobKind_JOB_ABANDON)
	})
	for _, r := range arraysOf(st.GetMap(), pg.GetId()) {
		if r.off < layout.RegionPageSize || r.end() > k.indexBytes || r.end() < r.off || r.off%layout.GroupSize != 0 {
			k.repl = 0
			k.find(r.off, 0, "shard %d: %d clusters do not lie in the index of %#x bytes", r.shard, r.clusters, k.indexBytes)
			continue
		}
		r.moving = r.moving || !tidy
		if err := k.array(r, copies); err != nil {
			return err
		}
	}
	if err := k.overlaps(); err != nil {
		return err
	}
	return k.confirm()
}

func (k *checker) find(off uint64, w layout.Word, format string, args ...any) {
	if k.rep.Total++; len(k.rep.Findings) < maxFindings {
		f := finding{PG: k.pg.GetId(), Replica: k.repl, Off: off, What: fmt.Sprintf(format, args...)}
		if w != 0 {
			f.Slot = w.String()
		}
		k.rep.Findings = append(k.rep.Findings, f)
	}
}

// bytes reads n bytes at off of a replica.
func (k *checker) bytes(replica int, off uint64, n int) (b []byte, err error) {
	err = persist(k.ctx, func() (err error) {
		b, err = k.s.ReadRaw(k.ctx, k.pg.GetId(), replica, off, n)
		return err
	})
	if err != nil {
		err = fmt.Errorf("replica %d: %w", replica, err)
	}
	return b, err
}

// word reads the word at off, of a group, as it is now.
func (k *checker) word(replica int, off uint64) (layout.Word, error) {
	g := off &^ (layout.GroupSize - 1)
	b, err := k.bytes(replica, g, layout.GroupSize)
	if err != nil {
		return 0, err
	}
	return wordAt(b, int(off-g)), nil
}

// wordAt is the word at byte off of group b: its header, or a slot.
func wordAt(b []byte, off int) layout.Word {
	if off == 0 {
		return layout.Word(layout.Group(b).Header())
	}
	return layout.Group(b).Slot((off - layout.GroupSlotsOff) / 8)
}

// still reports whether the slot at off of the replica being read holds w now.
func (k *checker) still(off uint64, w layout.Word) (bool, error) {
	now, err := k.word(k.repl, off)
	return now == w, err
}

func (k *checker) header() error {
	b, err := k.bytes(k.repl, 0, layout.RegionPageSize)
	if err != nil {
		return err
	}
	switch h, err := layout.ParseRegion(b); {
	case err != nil:
		k.find(0, 0, "region header: %v", err)
	case h.PG != k.pg.GetId() || h.Namespace != k.ns.GetId() || h.RegionBytes != k.regionBytes || h.IndexBytes != k.indexBytes:
		k.find(0, 0, "region header %+v is not that of the map: placement group %d, namespace %d, %d bytes, index %d",
			h, k.pg.GetId(), k.ns.GetId(), k.regionBytes, k.indexBytes)
	}
	return nil
}

// array reads the clusters of r, at all copies side by side.
func (k *checker) array(r array, copies int) error {
	const most = (1 << 20) / layout.ClusterSize
	b := make([][]byte, copies)
	for c := uint32(0); c < r.clusters; c += most {
		n := min(most, r.clusters-c)
		off := r.off + uint64(c)*layout.ClusterSize
		for i := range b {
			var err error
			if b[i], err = k.bytes(i, off, int(n)*layout.ClusterSize); err != nil {
				return err
			}
		}
		for i := range n {
			var before []slot
			for k.repl = range b {
				at := b[k.repl][i*layout.ClusterSize:][:layout.ClusterSize]
				slots, err := k.cluster(r, off+uint64(i)*layout.ClusterSize, at)
				if err != nil {
					return err
				}
				if k.repl > 0 {
					k.compare(off+uint64(i)*layout.ClusterSize, b[k.repl-1][i*layout.ClusterSize:][:layout.ClusterSize], at, before, slots)
				}
				before = slots
			}
		}
		k.bar.step(int(n))
	}
	return nil
}

// slot is a LIVE or FROZEN word and what it names.
type slot struct {
	off  uint64 // of the word
	word layout.Word
	rec  []byte
}

// count is true at the replica whose words and records are counted.
func (k *checker) count() bool { return k.repl == 0 }

// strangeSlot holds a word that only a move leaves, where none is.
type strangeSlot struct {
	replica int
	off     uint64
	word    layout.Word
}

// cluster checks the groups in b, which stand at off, and their records.
func (k *checker) cluster(r array, off uint64, b []byte) ([]slot, error) {
	var slots []slot
	var overflow [layout.ClusterGroups]bool
	var n checkReport
	for i := range layout.ClusterGroups + 1 {
		g := layout.Group(b[i*layout.GroupSize:][:layout.GroupSize])
		goff := off + uint64(i)*layout.GroupSize
		n.Groups++
		if g.Lock() != 0 {
			n.Locks++
		}
		if i < layout.ClusterGroups && g.Header().OVF() {
			overflow[i] = true
			n.Overflow++
		}
		if err := g.Check(k.heapLo, k.heapHi); err != nil {
			k.find(goff, 0, "%v", err)
		}
		for j := range layout.GroupSlots {
			w := g.Slot(j)
			switch w.State() {
			case layout.Live:
				n.Live++
			case layout.Frozen:
				n.Frozen++
			case layout.Moved:
				n.Moved++
			default:
				if w == 0 {
					n.Unused++
				} else {
					n.Empty++
				}
			}
			if (w.State() == layout.Frozen || w.State() == layout.Moved) && !r.moving {
				k.strange = append(k.strange, strangeSlot{k.repl, goff + layout.SlotOff(j), w})
			}
			if w.Readable() && layout.InHeap(w, k.heapLo, k.heapHi) {
				slots = append(slots, slot{off: goff + layout.SlotOff(j), word: w})
			}
		}
	}
	if k.count() {
		k.rep.Groups += n.Groups
		k.rep.Locks += n.Locks
		k.rep.Overflow += n.Overflow
		k.rep.Live += n.Live
		k.rep.Frozen += n.Frozen
		k.rep.Moved += n.Moved
		k.rep.Unused += n.Unused
		k.rep.Empty += n.Empty
	}
	err := fetch(slots, layout.MaxRecordSize, func(off uint64, n int) ([]byte, error) { return k.bytes(k.repl, off, n) })
	if err != nil {
		return nil, err
	}
	keys := make(map[string]slot, len(slots))
	for _, s := range slots {
		key, err := k.record(r, off, s, &overflow)
		if err != nil {
			return nil, err
		}
		if key == nil {
			continue
		}
		if other, ok := keys[string(key)]; ok {
			if err := k.twice(key, other, s); err != nil {
				return nil, err
			}
		}
		keys[string(key)] = s
	}
	return slots, nil
}

// Records that stand near each other are read together.
const (
	spanBytes = 1 << 20
	spanGap   = 16 << 10
)

// fetch reads the records of slots, of each at most so many bytes, with read.
func fetch(slots []slot, most int, read func(off uint64, n int) ([]byte, error)) error {
	order := make([]int, len(slots))
	for i := range order {
		order[i] = i
	}
	span := func(i int) (lo, hi uint64) {
		w := slots[order[i]].word
		return w.Off(), w.Off() + uint64(min(w.ReadLen(), most))
	}
	sort.Slice(order, func(i, j int) bool { return slots[order[i]].word.Unit() < slots[order[j]].word.Unit() })
	for i := 0; i < len(order); {
		lo, hi := span(i)
		j := i + 1
		for ; j < len(order); j++ {
			off, end := span(j)
			end = max(hi, end)
			if off > hi+spanGap || end-lo > spanBytes {
				break
			}
			hi = end
		}
		b, err := read(lo, int(hi-lo))
		if err != nil {
			return err
		}
		for ; i < j; i++ {
			off, end := span(i)
			slots[order[i]].rec = b[off-lo : end-lo]
		}
	}
	return nil
}

// retries is how often a record is read again while its slot changes.
const retries = 3

// record checks what s names and returns its key; nil if there is none to
// compare. A finding counts only if the slot has not changed meanwhile.
func (k *checker) record(r array, cluster uint64, s slot, overflow *[layout.ClusterGroups]bool) ([]byte, error) {
	for range retries {
		key, problem, err := k.judge(r, cluster, s, overflow)
		if err != nil || problem == "" {
			return key, err
		}
		now, err := k.word(k.repl, s.off)
		if err != nil {
			return nil, err
		}
		again := s
		again.word, again.rec = now, nil
		if now.Readable() && layout.InHeap(now, k.heapLo, k.heapHi) {
			if again.rec, err = k.bytes(k.repl, now.Off(), now.ReadLen()); err != nil {
				return nil, err
			}
		}
		switch {
		case now == s.word && bytes.Equal(again.rec, s.rec):
			k.rep.Corrupt++
			k.find(s.off, s.word, "%s", problem)
			return nil, nil
		case again.rec == nil:
			return nil, nil // gone
		}
		s = again
	}
	k.rep.Busy++
	return nil, nil
}

// judge checks one record; problem says what is wrong with it.
func (k *checker) judge(a array, cluster uint64, s slot, overflow *[layout.ClusterGroups]bool) (key []byte, problem string, err error) {
	r, err := layout.ParseRecord(s.rec)
	if err != nil {
		return nil, err.Error(), nil
	}
	if r.Flags&layout.FlagChunk != 0 {
		return nil, "names a chunk of a long value", nil
	}
	// A place that another session was granted serves records down to half its size, too.
	if c, ok := layout.CodeFor(layout.RecordLen(len(r.Key), len(r.Value))); !ok || c > s.word.Code() ||
		layout.UnitsOf(s.word.Code()) > 2*layout.UnitsOf(c) {
		return nil, fmt.Sprintf("size code %d (%d bytes) for a record of %d bytes, want code %d, or up to twice the size",
			s.word.Code(), s.word.ReadLen(), layout.RecordLen(len(r.Key), len(r.Value)), c), nil
	}
	loc, err := k.s.Locate(r.Key)
	if err != nil {
		return nil, "", err
	}
	// Where it belongs is asked of the array that is read: while a shard moves, a key
	// may be in the parent and in the child.
	home, stash := layout.GroupOff(loc.Hash, a.clusters)
	home, stash = a.off+home, a.off+stash
	group := s.off &^ (layout.GroupSize - 1)
	switch {
	case layout.ShardPrefix(loc.Hash, a.depth) != a.prefix || group != home && group != stash:
		return nil, fmt.Sprintf("key %s belongs to group %#x or %#x of placement group %d", k.a.showKey(r.Key), loc.Home, loc.Stash, loc.PG), nil
	case s.word.FP() != layout.FP(loc.Hash):
		return nil, fmt.Sprintf("fingerprint %03x, but that of key %s is %03x", s.word.FP(), k.a.showKey(r.Key), layout.FP(loc.Hash)), nil
	case group == stash && !overflow[(home-cluster)/layout.GroupSize]:
		// The group was read before its stash.
		b, err := k.bytes(k.repl, home, layout.GroupSize)
		if err != nil {
			return nil, "", err
		}
		if !layout.Group(b).Header().OVF() {
			return nil, fmt.Sprintf("key %s is in the stash, but its group %#x has no OVF flag: no reader finds it", k.a.showKey(r.Key), home), nil
		}
	}
	chunks := []layout.Chunk(nil)
	if r.Flags&layout.FlagManifest != 0 {
		m, err := layout.ParseManifest(r.Value, k.heapLo, k.heapHi)
		if err != nil {
			return nil, err.Error(), nil
		}
		if problem, err := k.chunks(m); problem != "" || err != nil {
			return nil, problem, err
		}
		chunks = m.Chunks
	}
	if !k.count() {
		return r.Key, "", nil
	}
	k.rep.Records++
	if r.Expired(k.now) {
		k.rep.Expired++
	}
	if group == stash {
		k.rep.Stashed++
	}
	k.place(a, s, s.word.Unit(), s.word.Units())
	for _, c := range chunks {
		k.rep.Chunks++
		k.place(a, s, c.Unit, layout.UnitsOf(c.Code))
	}
	return r.Key, "", nil
}

func (k *checker) chunks(m layout.Manifest) (problem string, err error) {
	left := m.Len
	for i, c := range m.Chunks {
		n := min(left, layout.ChunkSize)
		left -= n
		b, err := k.bytes(k.repl, uint64(c.Unit)*layout.UnitSize, layout.SizeOf(c.Code))
		if err != nil {
			return "", err
		}
		r, err := layout.ParseRecord(b)
		switch {
		case err != nil:
			return fmt.Sprintf("chunk %d at unit %d: %v", i, c.Unit, err), nil
		case r.Flags != layout.FlagChunk || r.Version != m.ID || r.Expiry != uint64(i) || uint64(len(r.Value)) != n:
			return fmt.Sprintf("chunk %d at unit %d: flags %v id %d number %d of %d bytes, want id %d, %d bytes",
				i, c.Unit, r.Flags, r.Version, r.Expiry, len(r.Value), m.ID, n), nil
		}
	}
	return "", nil
}

// twice reports a key in two slots, if both still stand.
func (k *checker) twice(key []byte, a, b slot) error {
	for _, s := range []slot{a, b} {
		if ok, err := k.still(s.off, s.word); !ok || err != nil {
			return err
		}
	}
	k.find(b.off, b.word, "key %s is in the slot at %#x as well", k.a.showKey(key), a.off)
	return nil
}

// ---- places ----------------------------------------------------------------

// placed is a place and the slot through which it is reached.
type placed struct {
	unit, units uint32
	slotOff     uint64
	word        layout.Word
	child       bool // through the child of a move
}

func (k *checker) place(a array, s slot, unit, units uint32) {
	k.rep.Bytes += uint64(units) * layout.UnitSize
	k.places = append(k.places, placed{unit, units, s.off, s.word, a.child})
}

// shared reports whether two slots may name one place: while a shard splits, the
// FROZEN word and its copy do.
func shared(a, b placed) bool {
	return a.unit == b.unit && a.units == b.units && a.child != b.child &&
		(a.child || a.word.State() == layout.Frozen) && (b.child || b.word.State() == layout.Frozen)
}

// overlaps compares neighbouring places and counts their units. One that was freed
// and given to another key between two reads is told by its slot.
func (k *checker) overlaps() error {
	k.repl = 0
	slices.SortFunc(k.places, func(a, b placed) int { return cmp.Compare(a.unit, b.unit) })
	if len(k.places) == 0 {
		return nil
	}
	furthest := k.places[0]
	k.linked = uint64(furthest.units)
	for _, p := range k.places[1:] {
		end := uint64(furthest.unit) + uint64(furthest.units)
		own := uint64(p.unit) + uint64(p.units)
		if own > end {
			k.linked += min(own-end, uint64(p.units))
		}
		if uint64(p.unit) < end && !shared(p, furthest) {
			a, err := k.still(furthest.slotOff, furthest.word)
			if err != nil {
				return err
			}
			b, err := k.still(p.slotOff, p.word)
			if err != nil {
				return err
			}
			if a && b {
				k.find(p.slotOff, p.word, "units [%d,+%d) overlap [%d,+%d) of the slot at %#x", p.unit, p.units,
					furthest.unit, furthest.units, furthest.slotOff)
			}
			if !a {
				furthest = p
				continue
			}
		}
		if own > end {
			furthest = p
		}
	}
	return nil
}

// ---- replicas --------------------------------------------------------------

// suspect is a word, or the record that it names, which a replica and the one before
// it do not have alike.
type suspect struct {
	replica int
	off     uint64 // of the word
	word    layout.Word
	before  layout.Word // at the replica before
}

// compare notes what the cluster at off holds differently at k.repl and at the
// replica before it. Insert locks are the arbiter's alone.
func (k *checker) compare(off uint64, was, is []byte, before, slots []slot) {
	for g := 0; g < len(is); g += layout.GroupSize {
		for w := 0; w < layout.GroupSize; w += 8 {
			if w == layout.GroupLockOff {
				continue
			}
			if a, b := wordAt(was[g:][:layout.GroupSize], w), wordAt(is[g:][:layout.GroupSize], w); a != b {
				k.suspects = append(k.suspects, suspect{k.repl, off + uint64(g+w), b, a})
			}
		}
	}
	i := 0
	for _, s := range slots { // both in the order of their words
		for i < len(before) && before[i].off < s.off {
			i++
		}
		if i < len(before) && before[i].off == s.off && before[i].word == s.word && !sameRecord(before[i].rec, s.rec) {
			k.suspects = append(k.suspects, suspect{k.repl, s.off, s.word, s.word})
		}
	}
}

// sameRecord compares two copies of a record; what follows it in its place means
// nothing.
func sameRecord(a, b []byte) bool {
	n := min(len(a), recordSpan(a))
	return len(a) == len(b) && bytes.Equal(a[:n], b[:n])
}

// rest is how long a difference must stand to be one: a client that is between two
// replicas goes on within that time, unless it is gone.
const rest = 300 * time.Millisecond

// confirm looks at the suspects again, twice with a rest between, and reports those
// that stand.
func (k *checker) confirm() error {
	if len(k.suspects) == 0 && len(k.strange) == 0 {
		return nil
	}
	if err := k.look(); err != nil || len(k.suspects) == 0 && len(k.strange) == 0 {
		return err
	}
	timer := time.NewTimer(rest)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-k.ctx.Done():
		return context.Cause(k.ctx)
	}
	if err := k.look(); err != nil {
		return err
	}
	differing := make(map[int]bool)
	for _, s := range k.suspects {
		k.repl = s.replica
		differing[s.replica] = true
		switch {
		case s.word == s.before:
			k.rep.DifferingRecords++
			k.find(s.off, s.word, "the record is not that of replica %d", s.replica-1)
		case s.off%layout.GroupSize == 0:
			k.rep.DifferingWords++
			k.find(s.off, 0, "header %#x, but %#x at replica %d", uint64(s.word), uint64(s.before), s.replica-1)
		default:
			k.rep.DifferingWords++
			k.find(s.off, s.word, "replica %d has %s", s.replica-1, s.before)
		}
	}
	k.rep.Differing += len(differing)
	for _, s := range k.strange {
		k.repl = s.replica
		k.find(s.off, s.word, "%s, but its shard does not move", strings.ToLower(s.word.State().String()))
	}
	return nil
}

// look keeps the suspects whose words have not changed and whose difference stands.
func (k *checker) look() error {
	var err error
	k.suspects = slices.DeleteFunc(k.suspects, func(s suspect) bool {
		if err != nil {
			return false
		}
		var now, before layout.Word
		// The later replica first: it never gets ahead of the one before it.
		if now, err = k.word(s.replica, s.off); err != nil {
			return false
		}
		if before, err = k.word(s.replica-1, s.off); err != nil {
			return false
		}
		if now != s.word || before != s.before {
			if now != before {
				k.rep.Busy++
			}
			return true
		}
		if now != before {
			return false
		}
		var a, b []byte
		if a, err = k.bytes(s.replica-1, now.Off(), now.ReadLen()); err != nil {
			return false
		}
		if b, err = k.bytes(s.replica, now.Off(), now.ReadLen()); err != nil {
			return false
		}
		return sameRecord(a, b)
	})
	k.strange = slices.DeleteFunc(k.strange, func(s strangeSlot) bool {
		if err != nil {
			return false
		}
		var now layout.Word
		now, err = k.word(s.replica, s.off)
		return err == nil && now != s.word
	})
	return err
}
