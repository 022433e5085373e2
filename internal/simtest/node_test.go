package simtest

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/memnode"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// node is one memory node: what package memnode does, by choices.
type node struct {
	i    int
	id   uint32
	inc  uint64
	boot uint64 // of the process that has its memory, 1 for the first
	life int    // of the memory: a new device each
	dev  *rdma.Device
	pd   *rdma.PD
	l    rdma.Listener

	regions map[uint32]*region // by placement group
	retains map[uint32]*region // what it held of placement groups that have gone on without it
	barred  map[uint32]bool    // sessions fenced here
	crashed bool
	deaf    bool // does not hear the directory, nor is it heard
	ranOut  bool // its lease
	// Between two processes: the memory is there, and nobody serves it. Then unknown: the next one has adopted it and
	// is not registered.
	down, unknown bool
	overtaken     bool // the registration of the process before arrived once more
}

// mute reports whether the directory does not hear it.
func (n *node) mute() bool { return n.crashed || n.deaf || n.down || n.unknown }

// region is the memory of one placement group on one memory node, and what it has held.
type region struct {
	pg         uint32
	node       *node
	inc, since uint64
	boot       uint64 // that published its keys
	bytes      []byte
	mrs        [2]*rdma.MR // index, heap
	used       bool        // it is a member's of its placement group now
	unproven   bool        // it began with what was retained, and nobody has read it yet
	known      uint64      // the map version that first had it
	copied     bool        // it is a copy
	left       uint64      // E when it was one last

	slots []*slot
}

// slot is the past of one slot.
type slot struct {
	off  uint64
	now  layout.Word
	past []layout.Word          // what it has held but the first word, in order
	left map[layout.Word]uint64 // E when it held the word last
	// now is a word of a joiner that retains words, and the replica before it holds another one: nobody believes it. It
	// is what was retained, or what an operation has set that began before the join's first pass was done.
	stale bool
}

// shown is the word that somebody may believe.
func (s *slot) shown() layout.Word {
	if s.stale {
		return 0
	}
	return s.now
}

func (r *region) slot(off uint64) *slot {
	for _, s := range r.slots {
		if s.off == off {
			return s
		}
	}
	s := &slot{off: off}
	r.slots = append(r.slots, s)
	return s
}

// find is slot for readers: nil if nothing was ever there.
func (r *region) find(off uint64) *slot {
	for _, s := range r.slots {
		if s.off == off {
			return s
		}
	}
	return nil
}

func (n *node) name() string   { return fmt.Sprintf("m%d", n.i) }
func (n *node) addr() string   { return fmt.Sprintf("m%d.%d", n.i, n.inc) }
func (n *node) device() string { return fmt.Sprintf("m%d/%d", n.i, n.life) }

func (w *World) addNode(i int) error {
	n := &node{i: i, id: uint32(i + 1), regions: map[uint32]*region{}, retains: map[uint32]*region{},
		barred: map[uint32]bool{}}
	w.nodes = append(w.nodes, n)
	return w.boot(n)
}

// boot begins a process of the memory node, which listens.
func (w *World) boot(n *node) (err error) {
	n.life++
	w.incs++
	n.inc = w.incs // no two processes share one
	n.boot = 1
	n.crashed, n.down, n.unknown, n.ranOut, n.overtaken = false, false, false, false, false
	w.touch()
	n.dev = rdma.NewDevice("sim", w.fab.Device(n.device()))
	if n.pd, err = n.dev.AllocPD(); err != nil {
		return err
	}
	return w.listen(n)
}

func (w *World) listen(n *node) (err error) {
	pd := n.pd
	n.l, err = n.dev.Listen(n.addr(), rdma.ListenOptions{Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
		return pd, rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic, nil
	}})
	return err
}

// dialable reports whether a client that knows of an incarnation would be accepted.
func (n *node) dialable(c *cl, inc uint64) bool {
	return !n.crashed && !n.down && !n.unknown && n.inc == inc && !n.barred[c.id]
}

// makeRegion makes a region, of zeroes or of what the memory node retains.
func (w *World) makeRegion(n *node, x *dirpb.WantRegion) (*region, error) {
	r := n.retains[x.PgId]
	delete(n.retains, x.PgId)
	retained := r != nil && x.Retain != nil && r.inc == x.Retain.Incarnation && r.since == x.Retain.Since
	if !retained {
		r = &region{pg: x.PgId, node: n, bytes: takeMemory(int(w.regionBytes))}
		w.regions = append(w.regions, r)
	}
	r.inc, r.since, r.boot, r.slots = n.inc, x.Since, n.boot, nil
	if err := memnode.InitRegion(r.bytes, x, n.inc, retained); err != nil {
		return nil, err
	}
	if retained {
		w.retained++
		r.noteRetained(x.Retain.Arrays)
	}
	if err := w.registerMRs(r); err != nil {
		return nil, err
	}
	n.regions[r.pg] = r
	w.touch()
	return r, nil
}

// noteRetained notes the words that a region begins with.
func (r *region) noteRetained(arrays []*dirpb.RetainedArray) {
	r.unproven, r.known = true, 0
	for _, a := range arrays {
		for g := a.Offset; g < a.Offset+uint64(a.Segments)*layout.SegmentSize; g += layout.GroupSize {
			for i := range layout.GroupSlots {
				if x := layout.Group(r.bytes[g:][:layout.GroupSize]).Slot(i); x != 0 {
					s := r.slot(g + layout.SlotOff(i))
					s.now, s.stale = x, true
				}
			}
		}
	}
}

// checkRetained looks at what a joiner has retained, at the moment from which it may be read: readers believe a word
// that the replica before it shows, too, so the record has to be the same.
func (w *World) checkRetained(prev, r *region) {
	r.unproven = false
	if w.thawed >= r.left+layout.WordLifeEpochs {
		w.fail(fmt.Errorf("I5: m%d has retained words of reclaim epoch %d, and all knew of it at %d", r.node.i, r.left,
			w.thawed))
	}
	for _, c := range w.cls {
		if v := c.core.View().Version; !w.fenced(c) && v < r.known {
			w.fail(fmt.Errorf("I5: m%d has retained words that may be read, and client %d, which has map %d, does "+
				"not write there", r.node.i, c.i, v))
		}
	}
	for _, s := range r.slots {
		o := prev.find(s.off)
		if !s.stale || o == nil || o.shown() != s.now {
			continue
		}
		w.believe(prev, r, s)
	}
}

// believe has readers believe the retained word of a slot, which the replica before it holds by now.
func (w *World) believe(prev, r *region, s *slot) {
	s.stale, s.past = false, append(s.past, s.now)
	if !s.now.Readable() {
		return
	}
	w.believed++
	for _, x := range w.records(prev, s.now) {
		rec, err := w.recordAt(prev, x)
		if n := layout.RecordLen(len(rec.Key), len(rec.Value)); err == nil &&
			!bytes.Equal(r.bytes[x.Off():][:n], prev.bytes[x.Off():][:n]) {
			w.fail(fmt.Errorf("I5: slot %#x of m%d has retained %v, which m%d holds, and %v is another record there",
				s.off, r.node.i, s.now, prev.node.i, x))
		}
	}
}

// rejoins reports whether r is a joiner that began with what it retained, and no copy yet.
func (w *World) rejoins(r *region) bool {
	pg, c := w.st.PG(r.pg), w.chain(r.pg)
	return pg.GetJoining() && len(c) > 0 && c[len(c)-1] == r && pg.Members[len(pg.Members)-1].GetRejoins()
}

// checkRejoined checks that nothing stale is left at a joiner that retained words as it becomes a copy.
func (w *World) checkRejoined(r *region) {
	for _, s := range r.slots {
		if s.stale && s.now != 0 {
			w.fail(fmt.Errorf("I10: m%d is a copy, and its slot %#x holds %v, which the replica before it has left",
				r.node.i, s.off, s.now))
		}
	}
}

// registerMRs gives a region these rkeys, or new ones if there are none.
func (w *World) registerMRs(r *region, rkeys ...uint64) error {
	m := driver.NewMemory(r.bytes, -1, driver.AllocOptions{}, nil)
	off, n, write := int64(0), int64(w.indexBytes), rdma.AccessRemoteAtomic
	for i := range r.mrs {
		var err error
		if rkeys == nil {
			r.mrs[i], err = r.node.pd.RegMR(m, off, n, rdma.AccessRemoteRead|write)
		} else {
			r.mrs[i], err = r.node.pd.RegMRAs(m, off, n, rdma.AccessRemoteRead|write, rkeys[i])
		}
		if err != nil {
			return err
		}
		w.byKey[r.mrs[i].RKey()] = r
		off, n, write = n, int64(w.regionBytes-w.indexBytes), rdma.AccessRemoteWrite
	}
	return nil
}

// registerAnew gives a memory node's regions the rkeys that they had, each another's: an adapter may do so for the next
// process.
func (w *World) registerAnew(n *node) error {
	var rkeys []uint64
	for _, pg := range slices.Sorted(maps.Keys(n.regions)) {
		for _, mr := range n.regions[pg].mrs {
			rkeys = append(rkeys, mr.RKey())
			delete(w.byKey, mr.RKey())
			_ = mr.Deregister()
		}
	}
	if len(rkeys) > 2 { // another region's
		rkeys = append(rkeys[2:], rkeys[:2]...)
	} else {
		slices.Reverse(rkeys)
	}
	for i, pg := range slices.Sorted(maps.Keys(n.regions)) {
		if err := w.registerMRs(n.regions[pg], rkeys[2*i:]...); err != nil {
			return err
		}
	}
	return nil
}

func (r *region) keys() []*dirpb.RegionKeys {
	return []*dirpb.RegionKeys{{Provider: "sim", IndexRkey: r.mrs[0].RKey(), IndexBase: r.mrs[0].Base(),
		HeapRkey: r.mrs[1].RKey(), HeapBase: r.mrs[1].Base()}}
}

// chore is the next thing that the directory wants of a memory node.
type chore struct {
	any    bool
	make   *dirpb.WantRegion
	drop   *region
	reset  bool   // the directory disowns it
	fence  uint32 // session
	enlist bool   // a new process registers
	again  bool   // the same one does, when it has dropped what has gone on without it
}

func (w *World) choreOf(n *node) (c chore, ok bool) {
	if n.crashed || n.deaf || n.down {
		return c, false
	}
	m := w.st.Node(n.id)
	if m == nil {
		return c, false
	}
	if m.Incarnation != n.inc || n.unknown || m.Boot != n.boot && m.State == dirpb.NodeState_NODE_UP {
		return chore{enlist: true}, true
	}
	if m.State != dirpb.NodeState_NODE_UP {
		return chore{reset: true}, true
	}
	for _, id := range w.st.FenceWork(n.id, n.inc) {
		return chore{fence: id}, true
	}
	wanted := w.st.WantRegions(n.id, n.inc)
	for pg := uint32(1); int(pg) <= w.cfg.PGs+2+b2i(w.cfg.Beside)*w.cfg.Nodes; pg++ {
		r := n.regions[pg]
		var x *dirpb.WantRegion
		for _, y := range wanted {
			if y.PgId == pg {
				x = y
			}
		}
		if r != nil && (x == nil || x.Since != r.since) {
			return chore{drop: r}, true
		}
		if x != nil && (r == nil || !x.Published || r.boot != n.boot && w.cfg.NewKeys) {
			return chore{make: x}, true
		}
	}
	return chore{again: m.Silent}, m.Silent
}

// doChore does what the directory wants of a memory node.
func (w *World) doChore(n *node) {
	c, ok := w.choreOf(n)
	switch {
	case !ok:
	case c.enlist:
		w.enlist(n)
	case c.again:
		w.fail(w.register(n, n.boot))
		n.ranOut = false
		w.touch()
		w.ld.Heartbeat(w.st, time.Duration(w.now), n.id, n.inc, nil)
	case c.reset:
		w.reset(n)
	case c.fence != 0:
		w.fenceAll(n, c.fence)
		n.barred[c.fence] = true
		w.touch()
		w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_ConfirmFence{ConfirmFence: &fsmpb.ConfirmFence{NodeId: n.id, Incarnation: n.inc,
				SessionIds: []uint32{c.fence}}}})
	case c.drop != nil:
		w.drop(c.drop)
	default:
		r := n.regions[c.make.PgId]
		if r == nil {
			w.endLeftovers(n)
			var err error
			if r, err = w.makeRegion(n, c.make); err != nil {
				w.fail(err)
				return
			}
		}
		w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_PublishRegion{
				PublishRegion: &dirpb.PublishRegionRequest{NodeId: n.id, Incarnation: n.inc,
					Boot: n.boot, PgId: r.pg, Keys: r.keys(), Since: r.since}}})
		r.boot = n.boot
	}
}

// endLeftovers ends the connections of all sessions that do not live any more.
func (w *World) endLeftovers(n *node) {
	admitted := w.st.Admitted()
	for id := uint32(1); id <= admitted.Last; id++ {
		if !slices.Contains(admitted.Live, id) && !n.barred[id] {
			w.fenceAll(n, id)
			n.barred[id] = true
		}
	}
}

// offers is what the memory node retains, by placement group.
func (n *node) offers() (list []*dirpb.RetainedRegion) {
	for _, pg := range slices.Sorted(maps.Keys(n.retains)) {
		r := n.retains[pg]
		list = append(list, &dirpb.RetainedRegion{PgId: pg, Incarnation: r.inc, Since: r.since})
	}
	return list
}

// register says to the directory that a process of the memory node is there.
func (w *World) register(n *node, boot uint64) error {
	epoch, _ := w.ld.Epochs()
	return w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_RegisterNode{
			RegisterNode: &fsmpb.RegisterNode{ReclaimEpoch: epoch, Node: &dirpb.RegisterNodeRequest{
				Name: n.name(), Incarnation: n.inc, Boot: boot, Keeps: w.cfg.keeps(), Retained: n.offers(),
				Domain:        n.name(),
				CapacityBytes: w.capacity,
				Endpoints:     []*dirpb.Endpoint{{Provider: "sim", Addr: n.addr()}}}}}}).Err
}

// enlist registers the present process. A process that has adopted memory learns which sessions it is to bar; if its
// memory counts as lost it begins anew.
func (w *World) enlist(n *node) {
	if err := w.register(n, n.boot); err != nil {
		w.tooLate++
		w.reset(n)
		return
	}
	if n.unknown {
		w.kept++
		n.unknown, n.ranOut = false, false
		admitted := w.st.Admitted()
		for id := uint32(1); id <= admitted.Last; id++ {
			n.barred[id] = !slices.Contains(admitted.Live, id)
		}
	}
	w.touch()
	w.ld.Heartbeat(w.st, time.Duration(w.now), n.id, n.inc, nil)
}

// reset gives up what the memory node holds, under a new incarnation, or retains it, if memory nodes do.
func (w *World) reset(n *node) {
	w.fenceAll(n, 0)
	for _, r := range n.regions {
		w.drop(r)
	}
	w.incs++
	n.inc, n.boot = w.incs, 1
	n.ranOut, n.unknown, n.overtaken = false, false, false
	w.touch()
	if err := w.listen(n); err != nil {
		w.fail(err)
	}
}

// restart ends the process of the memory node. Its memory stays. Clients that execute verbs themselves go on; of other
// connections something may still land.
func (w *World) restart(n *node) {
	n.down = true
	if !w.cfg.Synchronous {
		for _, q := range w.owners {
			if q != nil && q.n == n {
				_ = w.fab.Kill(q.num) // those that are closed are gone anyway
			}
		}
	}
	w.touch()
	w.effects++
}

// adopt begins the next process, which takes over the memory. It has seen to it that nothing lands any more that was
// posted to the one before, and it knows of no session.
func (w *World) adopt(n *node) {
	w.fenceAll(n, 0)
	n.down, n.unknown, n.overtaken = false, true, false
	n.boot++
	n.barred = map[uint32]bool{}
	if w.cfg.NewKeys {
		w.fail(w.registerAnew(n))
	}
	w.touch()
	w.effects++
}

// fenceAll ends the connections of a session, or of all for 0.
func (w *World) fenceAll(n *node, session uint32) {
	for _, q := range w.owners {
		if q != nil && q.n == n && (session == 0 || q.c.id == session) {
			_ = w.fab.Fence(q.num) // those that are closed are gone anyway
		}
	}
}

func (w *World) drop(r *region) {
	for _, mr := range r.mrs {
		_ = mr.Deregister()
		delete(w.byKey, mr.RKey()) // what is on its way there still meets nothing
	}
	delete(r.node.regions, r.pg)
	if w.cfg.Retains || w.cfg.Restarts > 0 {
		r.node.retains[r.pg] = r
	}
	w.touch()
	w.effects++
}

// crashNode takes a memory node's memory away.
func (w *World) crashNode(n *node) {
	n.crashed = true
	if err := w.fab.CrashDevice(n.device()); err != nil {
		w.fail(err)
	}
	n.regions, n.retains = map[uint32]*region{}, map[uint32]*region{}
	w.touch()
	w.effects++
}
