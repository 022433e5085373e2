// Package check reads all copies of a namespace's memory and says what is wrong with it. It finds
// headers, words and records that are not good or do not belong where they are. It finds keys that are
// there twice, records that overlap, copies that differ, and memory that was granted and is nobody's.
// `kvctl check` runs it on a store that may be in use, the simulator on memory at rest.
//
// It leaves reaching the store to its caller ([Store]) and repairing it to janitors. [Run] checks;
// [Walk], [Fetch] and [Geometry] are for others who read the index, too. A run has one goroutine; what
// [Store.Read] returns belongs to the run and is not changed.
//
// Groups that change while they are looked at are read again, so that nothing counts as wrong that is only new.
package check

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
)

// Store is a store as the checker reaches it.
type Store interface {
	// Status is what the directory says now.
	Status(ctx context.Context) (*dirpb.StatusReply, error)
	// Read reads n bytes at off of a copy of a placement group; copy 0 is the head's.
	Read(ctx context.Context, pg uint32, copy int, off uint64, n int) ([]byte, error)
	// Hash is the hash by which a key is found.
	Hash(key []byte) (uint64, error)
}

// Options say what is checked, and how.
type Options struct {
	Store     Store            // required
	Namespace *dirpb.Namespace // required
	// Session is the caller's own, which is not counted among those that may hold memory; 0: none.
	Session uint32
	// NowMillis is the time (Unix ms) by which records have expired.
	NowMillis uint64
	// Rest is how long a difference between copies must stand to be one. A client that is between
	// two copies goes on within that time, unless it is gone. 0: the store is at rest.
	Rest time.Duration
	// Degraded says that placement groups may lack copies: then that is no problem.
	Degraded bool
	// Key shows a key in a finding. Default: quoted.
	Key func([]byte) string
	// Progress, if not nil, is called now and then with the number of segments that were read.
	Progress func(segments int)
}

// Finding is one thing that is wrong.
type Finding struct {
	PG      uint32 `json:"placement_group"`
	Replica int    `json:"replica"`
	Off     uint64 `json:"offset"` // of the word, in the region
	Slot    string `json:"slot,omitempty"`
	What    string `json:"what"`
}

// Report counts words and records at the heads, and what is wrong at every
// replica.
type Report struct {
	PGs      int    `json:"placement_groups"`
	Replicas int    `json:"replicas"`
	Groups   uint64 `json:"groups"`
	Overflow uint64 `json:"overflow_groups"`
	Locks    uint64 `json:"locks_held"`
	Unused   uint64 `json:"never_used_slots"`
	Empty    uint64 `json:"empty_slots"`
	Live     uint64 `json:"live_slots"`
	Frozen   uint64 `json:"frozen_slots"`
	Moved    uint64 `json:"moved_slots"`
	// Intents are those of the frozen slots that name a transaction's intent.
	Intents uint64 `json:"intents"`
	Stashed uint64 `json:"stashed_keys"`
	Expired uint64 `json:"expired"`
	Chunks  uint64 `json:"chunks"`
	Records uint64 `json:"records"`      // good ones; both of a record that is being moved
	Bytes   uint64 `json:"record_bytes"` // of their places

	// Unreachable is memory that was granted, and is neither linked nor held by any
	// session. Held is what else is not linked. Holders sessions may have it, it is on
	// its way back from one, or it is being recalled.
	Unreachable   uint64 `json:"unreachable_bytes"`
	Held          uint64 `json:"held_bytes"`
	Holders       int    `json:"other_sessions"`
	LeakedExtents uint64 `json:"leaked_extents"` // says the directory
	// DifferingWords and DifferingRecords differ from the replica before; Differing is
	// how many replicas hold any.
	DifferingWords   uint64 `json:"differing_words"`
	DifferingRecords uint64 `json:"differing_records"`
	Differing        int    `json:"replicas_that_differ"`
	Corrupt          uint64 `json:"corrupt_records"`

	Busy     uint64    `json:"busy"`
	Problems []string  `json:"problems"` // with whole placement groups
	Total    uint64    `json:"findings_total"`
	Findings []Finding `json:"findings"`
}

// maxFindings bounds what is listed; all are counted.
const maxFindings = 1000

// Good reports whether nothing is wrong.
func (r *Report) Good() bool {
	return r.Total == 0 && len(r.Problems) == 0 && r.Unreachable == 0 && r.LeakedExtents == 0
}

// Problem adds one with a whole placement group.
func (r *Report) Problem(pg uint32, format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Sprintf("placement group %d: %s", pg, fmt.Sprintf(format, args...)))
}

// NewReport makes an empty Report.
func NewReport() *Report { return &Report{Findings: []Finding{}, Problems: []string{}} }

// Run checks a namespace and adds what it finds to rep. An error means that the store was not read to
// the end.
func Run(ctx context.Context, rep *Report, o Options) error {
	if o.Key == nil {
		o.Key = func(k []byte) string { return fmt.Sprintf("%q", k) }
	}
	if o.Progress == nil {
		o.Progress = func(int) {}
	}
	k := &checker{Options: o, ctx: ctx, rep: rep}
	return k.verify()
}

// checker is one run.
type checker struct {
	Options
	ctx context.Context
	rep *Report

	// Of the placement group that is being read.
	pg   *dirpb.PlacementGroup
	m    *dirpb.Map
	repl int // copy
	Geometry
	// places are all records and chunks at the head, for overlaps: 32 bytes each,
	// the only thing that grows with the number of keys.
	places []placed
	linked []uint64 // units of them, each once, by extent
	// suspects differ between copies and are looked at again at the end.
	suspects []suspect
	strange  []strangeSlot
}

// shape differs between two maps when what was read of pg under the one is not what
// the other describes.
func shape(m *dirpb.Map, pg uint32) string {
	for _, p := range m.GetPgs() {
		if p.GetId() == pg {
			var members []string
			for _, mb := range p.GetMembers() {
				members = append(members, fmt.Sprint(mb.GetNodeId(), "/", mb.GetIncarnation()))
			}
			return fmt.Sprint(p.GetEpoch(), p.GetState(), p.GetJoining(), p.GetGeneration(), members, Arrays(m, pg))
		}
	}
	return "gone"
}

// changesBorne is how often a placement group is read, if it changes meanwhile.
const changesBorne = 5

// verify reads every placement group. A placement group that changes meanwhile is read again.
func (k *checker) verify() error {
	st, err := k.Store.Status(k.ctx)
	if err != nil {
		return err
	}
	for _, p := range overview.Groups(st.GetMap(), k.Namespace.GetId()) {
		if err := k.group(p.GetId()); err != nil {
			return fmt.Errorf("placement group %d: %w", p.GetId(), err)
		}
	}
	return nil
}

func (k *checker) group(id uint32) error {
	for tries := 1; ; tries++ {
		before, err := k.Store.Status(k.ctx)
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
		if lacks := overview.Lacks(before.GetMap(), pg); lacks != "" && !k.Degraded {
			k.rep.Problem(id, "%s", lacks)
		}
		k.rep.PGs++
		if pg.GetState() == dirpb.PGState_PG_ACTIVE {
			err = k.read(pg, before)
		}
		after, serr := k.Store.Status(k.ctx)
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
			k.rep.Problem(id, "not checked: it changed whenever it was read, %d times", tries)
			return nil
		}
	}
}

// read reads and checks all copies of pg.
func (k *checker) read(pg *dirpb.PlacementGroup, st *dirpb.StatusReply) error {
	k.pg, k.m, k.Geometry = pg, st.GetMap(), GeometryOf(pg.GetRegionBytes(), pg.GetIndexBytes(), pg.GetAccessBytes())
	k.places, k.suspects, k.strange, k.linked = k.places[:0], k.suspects[:0], k.strange[:0], k.linked[:0]
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
			(j.GetKind() == dirpb.JobKind_JOB_MOVE || j.GetKind() == dirpb.JobKind_JOB_CLEAN ||
				j.GetKind() == dirpb.JobKind_JOB_ABANDON)
	})
	for _, r := range Arrays(st.GetMap(), pg.GetId()) {
		if r.Off < layout.RegionPageSize || r.end() > k.IndexBytes || r.end() < r.Off || r.Off%layout.GroupSize != 0 {
			k.repl = 0
			k.find(r.Off, 0, "shard %d: %d segments do not lie in the index of %#x bytes", r.Shard, r.Segments,
				k.IndexBytes)
			continue
		}
		r.Moving = r.Moving || !tidy
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
		f := Finding{PG: k.pg.GetId(), Replica: k.repl, Off: off, What: fmt.Sprintf(format, args...)}
		if w != 0 {
			f.Slot = w.String()
		}
		k.rep.Findings = append(k.rep.Findings, f)
	}
}

// bytes reads n bytes at off of a replica.
func (k *checker) bytes(replica int, off uint64, n int) (b []byte, err error) {
	if b, err = k.Store.Read(k.ctx, k.pg.GetId(), replica, off, n); err != nil {
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
	case h.PG != k.pg.GetId() || h.Namespace != k.Namespace.GetId() || h.RegionBytes != k.RegionBytes ||
		h.IndexBytes != k.IndexBytes:
		k.find(0, 0, "region header %+v is not that of the map: placement group %d, namespace %d, %d bytes, index %d",
			h, k.pg.GetId(), k.Namespace.GetId(), k.RegionBytes, k.IndexBytes)
	}
	return nil
}

// array reads the segments of r, at all copies side by side.
func (k *checker) array(r Array, copies int) error {
	all := make([]int, copies)
	for i := range all {
		all[i] = i
	}
	return Walk([]Array{r}, all, k.bytes, func(p *Part) error {
		for at := 0; at < len(p.Copies[0]); at += layout.SegmentSize {
			off := p.Off + uint64(at)
			var before []Slot
			for k.repl = range p.Copies {
				b := p.Copies[k.repl][at:][:layout.SegmentSize]
				slots, err := k.segment(r, off, b)
				if err != nil {
					return err
				}
				if k.repl > 0 {
					k.compare(off, p.Copies[k.repl-1][at:][:layout.SegmentSize], b, before, slots)
				}
				before = slots
			}
		}
		k.Progress(len(p.Copies[0]) / layout.SegmentSize)
		return nil
	})
}

// account compares what of a placement group was granted with what is linked.
// before and after are the states around its reading.
func (k *checker) account(pg *dirpb.PlacementGroup, before, after *dirpb.StatusReply) {
	others := max(k.others(before), k.others(after))
	k.rep.Holders = max(k.rep.Holders, others)
	u := overview.Usage(after, pg.GetId())
	granted, linked := u.GetGrantedUnits(), uint64(0)
	for _, n := range k.linked {
		linked += n
	}
	rest := granted - min(granted, linked)
	quiet := others == 0 && len(pg.GetRecalled()) == 0
	for _, st := range []*dirpb.StatusReply{before, after} {
		quiet = quiet && !slices.ContainsFunc(st.GetJobs(), func(j *dirpb.Job) bool {
			return j.GetPgId() == pg.GetId() || j.GetTargetPgId() == pg.GetId()
		})
	}
	leaked := rest - min(rest, u.GetComingUnits())
	if quiet && linked > granted {
		k.rep.Problem(pg.GetId(), "%d units are linked, but only %d are granted: what is linked may be granted again",
			linked, granted)
	}
	if !quiet {
		leaked = min(leaked, k.leaked(u)) // only the directory can tell who holds what
	}
	k.rep.Unreachable += leaked * layout.UnitSize
	k.rep.Held += (rest - leaked) * layout.UnitSize
	if leaked > 0 { // else the directory's count is of an old scrub
		k.rep.LeakedExtents += uint64(u.GetLeakedExtents())
	}
}

// leaked is how much of what the directory says has leaked by its last scrub was not linked since then, at least.
// Sessions that linked it may have ended.
func (k *checker) leaked(u *dirpb.PGUsage) uint64 {
	n, then := u.GetLeakedUnits(), u.GetLastScrub().GetLinkedUnits()
	for x, now := range k.linked {
		before := uint64(0)
		if x < len(then) {
			before = uint64(then[x])
		}
		n -= min(n, now-min(now, before))
	}
	return n
}

// others counts the sessions of the namespace beside this one.
func (k *checker) others(st *dirpb.StatusReply) (n int) {
	for _, s := range st.GetSessions() {
		if s.GetNamespace() == k.Namespace.GetName() && s.GetId() != k.Session &&
			s.GetLife() != dirpb.SessionLife_SESSION_FENCED {
			n++
		}
	}
	return n
}
