package main

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sort"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

func (a *app) checkCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "Read all of the namespace's memory and check it",
		Long: "Read every replica of every placement group of the namespace and check region\n" +
			"headers, group headers and slot words; that every record parses, has a good\n" +
			"checksum, the right length and fingerprint, and belongs to its group; that no key\n" +
			"is there twice and no two records overlap. The store may be in use: what changes\n" +
			"while it is looked at is read again, and counted as busy if it does not rest.\n" +
			"Exit status 1 if something is wrong.",
		Args:    cobra.NoArgs,
		GroupID: "tools",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withBackend(func(b backend) error { return a.check(cmd.Context(), b) })
		},
	}
}

// finding is one thing that is wrong.
type finding struct {
	PG      uint32 `json:"placement_group"`
	Replica int    `json:"replica"`
	Off     uint64 `json:"offset"` // of the word, in the region
	Slot    string `json:"slot,omitempty"`
	What    string `json:"what"`
}

type checkReport struct {
	OK       bool      `json:"ok"`
	PGs      int       `json:"placement_groups"`
	Replicas int       `json:"replicas"`
	Groups   uint64    `json:"groups"`
	Overflow uint64    `json:"overflow_groups"`
	Locks    uint64    `json:"locks_held"`
	Unused   uint64    `json:"never_used_slots"`
	Empty    uint64    `json:"empty_slots"`
	Live     uint64    `json:"live_slots"`
	Frozen   uint64    `json:"frozen_slots"`
	Moved    uint64    `json:"moved_slots"`
	Stashed  uint64    `json:"stashed_keys"`
	Expired  uint64    `json:"expired"`
	Chunks   uint64    `json:"chunks"`
	Bytes    uint64    `json:"record_bytes"` // of the places
	Busy     uint64    `json:"busy"`
	Total    uint64    `json:"findings_total"`
	Findings []finding `json:"findings"`
}

// maxFindings bounds what is listed; all are counted.
const maxFindings = 1000

func (a *app) check(ctx context.Context, b backend) error {
	s, err := b.Open(ctx, sessionOptions{Lanes: 1, ReadOnly: true})
	if err != nil {
		return err
	}
	defer a.closed("session", s.Close)
	st, err := clusterStatus(ctx, b)
	if err != nil {
		return err
	}
	m := st.GetMap()
	ns, err := namespaceOf(m, a.namespace)
	if err != nil {
		return err
	}
	k := &checker{a: a, ctx: ctx, s: s, ns: ns.GetId(), now: uint64(a.now().UnixMilli())}
	k.rep.Findings = []finding{}
	pgs := pgsOf(m, ns.GetId())
	byPG := shardsOf(m, ns.GetId())
	if isTerminal(a.stderr) {
		var clusters int64
		for _, p := range pgs {
			for _, s := range byPG[p.GetId()] {
				clusters += int64(s.GetClusters()) * int64(len(p.GetMembers()))
			}
		}
		k.bar = progressbar.NewOptions64(clusters, progressbar.OptionSetWriter(a.stderr), progressbar.OptionSetDescription("check"),
			progressbar.OptionClearOnFinish())
	}
	for _, p := range pgs {
		k.rep.PGs++
		for r := range p.GetMembers() {
			k.rep.Replicas++
			if err := k.region(p, r, byPG[p.GetId()]); err != nil {
				return fmt.Errorf("placement group %d, replica %d: %w", p.GetId(), r, err)
			}
		}
	}
	if k.bar != nil {
		_ = k.bar.Finish()
	}
	k.rep.OK = k.rep.Total == 0
	if err := a.printCheck(&k.rep); err != nil {
		return err
	}
	if !k.rep.OK {
		return fail(exitNo)
	}
	return nil
}

func (a *app) printCheck(r *checkReport) error {
	if a.json() {
		return a.printJSON(r)
	}
	verdict := "ok"
	if !r.OK {
		verdict = fmt.Sprintf("%d findings", r.Total)
	}
	a.printTable(row{"Checked", ""}, []row{
		{"placement groups", r.PGs}, {"replicas", r.Replicas}, {"groups", r.Groups}, {"  with overflow", r.Overflow},
		{"  insert lock held", r.Locks}, {"slots live", r.Live}, {"  frozen", r.Frozen}, {"  moved", r.Moved}, {"  empty", r.Empty},
		{"  never used", r.Unused}, {"keys in a stash", r.Stashed}, {"expired", r.Expired}, {"chunks of long values", r.Chunks},
		{"bytes of records", r.Bytes}, {"busy, not checked", r.Busy}, {"result", verdict},
	})
	if len(r.Findings) > 0 {
		fmt.Fprintln(a.stdout)
		a.printTable(row{"PG", "Replica", "Offset", "Slot", "What"}, mapTo(r.Findings, func(f finding) row {
			return row{f.PG, f.Replica, fmt.Sprintf("%#x", f.Off), f.Slot, f.What}
		}))
	}
	return nil
}

// checker goes through one namespace.
type checker struct {
	a    *app
	ctx  context.Context
	s    store
	ns   uint32
	now  uint64 // Unix ms
	bar  *progressbar.ProgressBar
	rep  checkReport
	pg   *dirpb.PlacementGroup
	repl int
	geometry
	// places are all records and chunks of the replica, for overlaps: 24 bytes
	// each, the only thing that grows with the number of keys.
	places []placed
}

// placed is a place and the slot through which it is reached.
type placed struct {
	unit, units uint32
	slotOff     uint64
	word        layout.Word
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

func (k *checker) read(off uint64, n int) (b []byte, err error) {
	err = persist(k.ctx, func() (err error) {
		b, err = k.s.ReadRaw(k.ctx, k.pg.GetId(), k.repl, off, n)
		return err
	})
	return b, err
}

// still reports whether the slot at off holds w now.
func (k *checker) still(off uint64, w layout.Word) (bool, error) {
	now, err := k.word(off)
	return now == w, err
}

func (k *checker) word(off uint64) (layout.Word, error) {
	g := off &^ (layout.GroupSize - 1)
	b, err := k.read(g, layout.GroupSize)
	if err != nil {
		return 0, err
	}
	return layout.Group(b).Slot(int(off-g-layout.GroupSlotsOff) / 8), nil
}

func (k *checker) region(pg *dirpb.PlacementGroup, replica int, shards []*dirpb.Shard) error {
	k.pg, k.repl, k.geometry, k.places = pg, replica, geometryOf(pg.GetRegionBytes(), pg.GetIndexBytes()), k.places[:0]
	b, err := k.read(0, layout.RegionPageSize)
	if err != nil {
		return err
	}
	switch h, err := layout.ParseRegion(b); {
	case err != nil:
		k.find(0, 0, "region header: %v", err)
	case h.PG != pg.GetId() || h.Namespace != k.ns || h.RegionBytes != k.regionBytes || h.IndexBytes != k.indexBytes:
		k.find(0, 0, "region header %+v is not that of the map: placement group %d, namespace %d, %d bytes, index %d",
			h, pg.GetId(), k.ns, k.regionBytes, k.indexBytes)
	}
	for _, s := range shards {
		end := s.GetOffset() + uint64(s.GetClusters())*layout.ClusterSize
		if s.GetOffset() < layout.RegionPageSize || end > k.indexBytes || end < s.GetOffset() || s.GetOffset()%layout.GroupSize != 0 {
			k.find(s.GetOffset(), 0, "shard %d: %d clusters do not lie in the index of %#x bytes", s.GetId(), s.GetClusters(), k.indexBytes)
			continue
		}
		const most = (1 << 20) / layout.ClusterSize
		for c := uint32(0); c < s.GetClusters(); c += most {
			n := min(most, s.GetClusters()-c)
			off := s.GetOffset() + uint64(c)*layout.ClusterSize
			b, err := k.read(off, int(n)*layout.ClusterSize)
			if err != nil {
				return err
			}
			for i := range n {
				if err := k.cluster(off+uint64(i)*layout.ClusterSize, b[i*layout.ClusterSize:][:layout.ClusterSize]); err != nil {
					return err
				}
			}
			step(k.bar, int(n))
		}
	}
	return k.overlaps()
}

// slot is a LIVE or FROZEN word and what it names.
type slot struct {
	off  uint64 // of the word
	word layout.Word
	rec  []byte
}

// cluster checks the groups in b, which stand at off, and their records.
func (k *checker) cluster(off uint64, b []byte) error {
	var slots []slot
	var overflow [layout.ClusterGroups]bool
	for i := range layout.ClusterGroups + 1 {
		g := layout.Group(b[i*layout.GroupSize:][:layout.GroupSize])
		goff := off + uint64(i)*layout.GroupSize
		k.rep.Groups++
		if g.Lock() != 0 {
			k.rep.Locks++
		}
		if i < layout.ClusterGroups && g.Header().OVF() {
			overflow[i] = true
			k.rep.Overflow++
		}
		if err := g.Check(k.heapLo, k.heapHi); err != nil {
			k.find(goff, 0, "%v", err)
		}
		for j := range layout.GroupSlots {
			w := g.Slot(j)
			switch w.State() {
			case layout.Live:
				k.rep.Live++
			case layout.Frozen:
				k.rep.Frozen++
			case layout.Moved:
				k.rep.Moved++
			default:
				if w == 0 {
					k.rep.Unused++
				} else {
					k.rep.Empty++
				}
			}
			if w.Readable() && layout.InHeap(w, k.heapLo, k.heapHi) {
				slots = append(slots, slot{off: goff + layout.SlotOff(j), word: w})
			}
		}
	}
	if err := k.fetch(slots); err != nil {
		return err
	}
	keys := make(map[string]slot, len(slots))
	for _, s := range slots {
		key, err := k.record(off, s, &overflow)
		if err != nil {
			return err
		}
		if key == nil {
			continue
		}
		if other, ok := keys[string(key)]; ok {
			if err := k.twice(key, other, s); err != nil {
				return err
			}
		}
		keys[string(key)] = s
	}
	return nil
}

// Records that stand near each other are read together.
const (
	spanBytes = 1 << 20
	spanGap   = 16 << 10
)

// fetch reads the records of slots.
func (k *checker) fetch(slots []slot) error {
	order := make([]int, len(slots))
	for i := range order {
		order[i] = i
	}
	sort.Slice(order, func(i, j int) bool { return slots[order[i]].word.Unit() < slots[order[j]].word.Unit() })
	for i := 0; i < len(order); {
		w := slots[order[i]].word
		lo, hi := w.Off(), w.Off()+uint64(w.ReadLen())
		j := i + 1
		for ; j < len(order); j++ {
			w := slots[order[j]].word
			end := max(hi, w.Off()+uint64(w.ReadLen()))
			if w.Off() > hi+spanGap || end-lo > spanBytes {
				break
			}
			hi = end
		}
		b, err := k.read(lo, int(hi-lo))
		if err != nil {
			return err
		}
		for ; i < j; i++ {
			s := &slots[order[i]]
			s.rec = b[s.word.Off()-lo:][:s.word.ReadLen()]
		}
	}
	return nil
}

// retries is how often a record is read again while its slot changes.
const retries = 3

// record checks what s names and returns its key; nil if there is none to
// compare. A finding counts only if the slot has not changed meanwhile.
func (k *checker) record(cluster uint64, s slot, overflow *[layout.ClusterGroups]bool) ([]byte, error) {
	for range retries {
		key, problem, err := k.judge(cluster, s, overflow)
		if err != nil || problem == "" {
			return key, err
		}
		now, err := k.word(s.off)
		if err != nil {
			return nil, err
		}
		again := s
		again.word = now
		if now.Readable() && layout.InHeap(now, k.heapLo, k.heapHi) {
			if again.rec, err = k.read(now.Off(), now.ReadLen()); err != nil {
				return nil, err
			}
		}
		switch {
		case now == s.word && bytes.Equal(again.rec, s.rec):
			k.find(s.off, s.word, "%s", problem)
			return nil, nil
		case again.rec == nil || !now.Readable():
			return nil, nil // gone
		}
		s = again
	}
	k.rep.Busy++
	return nil, nil
}

// judge checks one record; problem says what is wrong with it.
func (k *checker) judge(cluster uint64, s slot, overflow *[layout.ClusterGroups]bool) (key []byte, problem string, err error) {
	r, err := layout.ParseRecord(s.rec)
	if err != nil {
		return nil, err.Error(), nil
	}
	if r.Flags&layout.FlagChunk != 0 {
		return nil, "names a chunk of a long value", nil
	}
	if c, ok := layout.CodeFor(layout.RecordLen(len(r.Key), len(r.Value))); !ok || c != s.word.Code() {
		return nil, fmt.Sprintf("size code %d (%d bytes) for a record of %d bytes, want code %d",
			s.word.Code(), s.word.ReadLen(), layout.RecordLen(len(r.Key), len(r.Value)), c), nil
	}
	loc, err := k.s.Locate(r.Key)
	if err != nil {
		return nil, "", err
	}
	group := s.off &^ (layout.GroupSize - 1)
	switch {
	case loc.PG != k.pg.GetId() || group != loc.Home && group != loc.Stash:
		return nil, fmt.Sprintf("key %s belongs to group %#x or %#x of placement group %d", k.a.showKey(r.Key), loc.Home, loc.Stash, loc.PG), nil
	case s.word.FP() != layout.FP(loc.Hash):
		return nil, fmt.Sprintf("fingerprint %03x, but that of key %s is %03x", s.word.FP(), k.a.showKey(r.Key), layout.FP(loc.Hash)), nil
	case group == loc.Stash && !overflow[(loc.Home-cluster)/layout.GroupSize]:
		// The group was read before its stash.
		home, err := k.read(loc.Home, layout.GroupSize)
		if err != nil {
			return nil, "", err
		}
		if !layout.Group(home).Header().OVF() {
			return nil, fmt.Sprintf("key %s is in the stash, but its group %#x has no OVF flag: no reader finds it", k.a.showKey(r.Key), loc.Home), nil
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
	if r.Expired(k.now) {
		k.rep.Expired++
	}
	if group == loc.Stash {
		k.rep.Stashed++
	}
	k.place(s, s.word.Unit(), s.word.Units())
	for _, c := range chunks {
		k.rep.Chunks++
		k.place(s, c.Unit, layout.UnitsOf(c.Code))
	}
	return r.Key, "", nil
}

func (k *checker) chunks(m layout.Manifest) (problem string, err error) {
	left := m.Len
	for i, c := range m.Chunks {
		n := min(left, layout.ChunkSize)
		left -= n
		b, err := k.read(uint64(c.Unit)*layout.UnitSize, layout.SizeOf(c.Code))
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

func (k *checker) place(s slot, unit, units uint32) {
	k.rep.Bytes += uint64(units) * layout.UnitSize
	k.places = append(k.places, placed{unit, units, s.off, s.word})
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

// overlaps compares neighbouring places. One that was freed and given to another
// key between two reads is told by its slot.
func (k *checker) overlaps() error {
	slices.SortFunc(k.places, func(a, b placed) int {
		return int(int64(a.unit) - int64(b.unit))
	})
	if len(k.places) == 0 {
		return nil
	}
	furthest := k.places[0]
	for _, p := range k.places[1:] {
		end := uint64(furthest.unit) + uint64(furthest.units)
		if uint64(p.unit) < end {
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
		if uint64(p.unit)+uint64(p.units) > end {
			furthest = p
		}
	}
	return nil
}
