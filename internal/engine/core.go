// Package engine is one session's side of the data path: it drives the step machines of package index over queue
// pairs. It keeps what the machines ask for: routes, hints, places, versions. It also keeps the accounts that make
// reuse of memory safe: reclaim epochs, limbo.
//
// [Core.Do] performs operations and blocks until they are over: it is the one way in. Beneath it a [Lane] is a
// machine that does not block: the simulator owns lanes itself and pumps them. Nothing calls the directory. A lane
// asks a [Control] for what it needs from outside, and learns it later. Its needs are memory, a newer map, a
// connection, and whether another session is fenced.
//
// Start with [Core.Do], then [Lane] and [Task]. Core's methods may be called concurrently. A Lane and its Tasks
// belong to their owner, one goroutine at a time, except Lane.Deliver, Kick, Visit, Under and TryOwn. Buffers of a
// Task belong to it until it is recycled.
//
// Lanes follow eRPC's and FaRM's one-queue-pair-a-thread rule: a processor performs on one of its own what
// needs no Task. The reclaim rule is docs/protocol.md, "Allocation and reuse".
package engine

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/heap"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/rdma"
)

// Options configure a Core.
type Options struct {
	Session       uint32
	Discriminator uint32 // < 4096
	Lanes         int    // to which keys hash; at most MaxLanes
	CacheBytes    int    // of all lanes
	MirrorBytes   int    // of all lanes, for images of groups; 0: none are kept
	Devices       []*rdma.Device
	Control       Control
	// SlabTasks is how many tasks' buffers, of 8 KiB each, are registered at a
	// time. Default 32.
	SlabTasks int
	// FullFor is for how long the directory must have said that all memory is in use before operations fail. The
	// reason is that what sessions have told the directory is a little old.
	FullFor int64
	// ReadOnly: the session may not CAS or WRITE.
	ReadOnly bool
	// Hash is the namespace's hash of a key; needed for a janitor's work only.
	Hash func(key []byte) uint64
	// Frequency is needed if there are access words. nil: counts add up.
	Frequency Frequency
	// Broken, if not nil, is called with what is wrong with a message of the directory. It must not block.
	Broken func(error)
	// Stirred, if not nil, is called when a quiet session unlinks something: its agenda is then to be
	// stirred (session.Agenda.Stir). Lanes call it; it must not block.
	Stirred func()
	// Crowded, if not nil, is called by a lane's owner when much comes into limbo at a time and [Core.Crowded] has
	// become true. Its agenda is then to be told.
	Crowded func()
	// BulkFrom is from how many bytes on a chain goes by the second queue pair to its memory node, where
	// Caps.SharedWire makes that worth while. Default 64 KiB.
	BulkFrom int
	// BulkLane: one more lane, the last of at most MaxLanes, performs what is expected to move BulkFrom bytes or more.
	// So its copies hold up no short operation.
	BulkLane bool
	// HoldBytes is how many bytes Holds may show together. Default 1 GiB.
	HoldBytes int
	// MostHolds is how many Holds the session has at most, those that have expired and are not released among them.
	// Default 16.
	MostHolds int
	// OpTimeout bounds an Op that waits, nanoseconds.
	OpTimeout int64
	// Objects is the tier, nil: the namespace has none.
	Objects Objects
	// WillWait, if not nil, is called before the goroutine of an Op waits, with the context of its Do.
	WillWait func(context.Context)
	// Limit, if not nil, is what each Op on a key of a Do with this context may read, see Task.Limit. Hinted ones
	// read 8 KiB at most.
	Limit func(context.Context) int
	// Expiring, if not nil, is called after a record with an expiry was written, with the expiry (Unix ms)
	// and the hash of the key. The
	// lane's owner calls it; it must not block.
	Expiring func(l *Lane, expiry, hash uint64)
	// Nanos is a monotonic clock; Millis the Unix time in milliseconds.
	Nanos  func() int64
	Millis func() uint64
}

// MaxLanes bounds the lanes of a session: versions and stamps carry a lane in
// four bits.
const MaxLanes = 16

// Control is what lanes ask of their surroundings. Calls do not block; answers
// come through Core and Lane.Deliver.
type Control interface {
	// WantMemory: the session needs a run that holds a place of units.
	WantMemory(pg uint32, units uint32)
	// WantMap: version is not enough.
	WantMap(version uint64)
	// WantConn: lane needs a queue pair to node, or holds one to a node whose
	// memory is given up, which is to be closed. It may call Lane.Detach. bulk: the second one. No first one is
	// attached before a second one that the lane still holds is closed, nor while the other side may still execute
	// what it brought.
	WantConn(l *Lane, node uint32, bulk bool)
	// WantFenced: is the session fenced? Core.SetFenced answers.
	WantFenced(session uint32)
	// WantSplit: the shard fills up. If it cannot grow, Core.SetNoGrowth answers.
	WantSplit(shard uint32)
	// WantRoom: no slot is left in two groups of a cache, by their offsets in the index;
	// something is to be evicted from either.
	WantRoom(pg uint32, home, stash uint64)
}

// Core is what the lanes of a session share.
type Core struct {
	opts  Options // set by NewCore
	lanes []*Lane // set by NewCore, by id: opts.Lanes of them, and perhaps one for bulk

	in   atomic.Pointer[installed] // the map in force; never nil, replaced under taking
	maps *mappedTables             // of hints; set by NewCore
	// taking is held while memory is taken in under the view, which must not change then:
	// lanes that see a recall in the next one forget what they have by then.
	taking sync.Mutex

	// Written by renewals and by the callers of setters, read by every lane.
	epoch      atomic.Uint64 // the greatest E of a reply processed
	sendSeq    atomic.Uint64 // renewals sent; only grows
	releasable atomic.Uint64 // limbo tags below it may leave; only grows, up to sendSeq
	leaseEnd   atomic.Int64  // Options.Nanos; never earlier
	millis     atomic.Uint64 // Options.Millis at the last renewal or Tick, for versions and access words
	noteTicks  atomic.Uint32 // see SetNoteInterval
	unlinked   atomic.Uint64 // the greatest limbo tag given; lanes write it
	quiet      atomic.Bool   // the session renews its lease rarely; see session.Agenda
	pins       atomic.Bool   // see SetPins
	asking     asking        // guards itself

	// Under its mutex, by whatever goroutine; maps are made by NewCore.
	mu struct {
		sync.Mutex
		heaps map[uint32]*pgHeap // by placement group, of the latest generation that was asked for
		// exhausted is, by placement group, the number that the next renewal was to have when the directory last had
		// no memory to grant.
		exhausted map[uint32]uint64
		// full is likewise when it last said that none is on its way either, and vain until when
		// (Options.Nanos) no operation waits since others waited in vain.
		full      map[uint32]uint64
		fullAt    map[uint32]int64  // since when it has said so (Options.Nanos), 0: it has not
		comingAt  map[uint32]int64  // when it last said that some is
		vain      map[uint32]int64  // written by who waited in vain
		quota     map[uint32]string // of which there is no more, by placement group in exhausted
		recalls   map[uint32]uint64 // see Recalls; by placement group
		noGrowth  map[uint32]uint64 // as exhausted, by shard
		growthWhy map[uint32]string // by shard in noGrowth
		// newest is the directory's map, by its reply to renewal newestSeq.
		newest, newestSeq uint64
		supply            map[uint32]Supply // by placement group
		fenced            map[uint32]bool   // sessions confirmed fenced; none leaves
		replies           []reply           // to renewals, whose E the minimum has not passed; at most maxReplies
		minSeen           uint64            // the greatest minimum of any reply
		notes             []*noteTable      // see notesOf
	}
	leaked atomic.Bool // memory was lost track of; stays true
	drafts drafts
	// exhaustedUntil is the number of the renewal from which on Exhausted is false of every placement group.
	exhaustedUntil atomic.Uint64

	// The end, which is final.
	shut, dead atomic.Bool    // no operation begins any more; and none goes on
	over       chan struct{}  // closed once dead
	holds      holds          // guards itself
	drivers    sync.WaitGroup // goroutines that own a lane on behalf of callers that have gone
	bufs       bufPool        // registered memory of all lanes; guards itself

	// Set by NewCore, but for nextNear.
	immediate bool          // a provider executes within PostSend
	near      sync.Pool     // of *Lane: the lanes of processors
	nears     int           // that many, the first ones
	nextNear  atomic.Uint32 // counts lanes given to processors
}

type pgHeap struct {
	generation uint32
	heap       *heap.Heap
	flow       Flow
}

type reply struct{ seq, epoch uint64 }

// NewCore makes a session's core; Close frees its buffers once every lane is
// closed.
func NewCore(o Options) (*Core, error) {
	if o.Lanes < 1 || o.Lanes > MaxLanes {
		return nil, fmt.Errorf("engine: %d lanes, want 1..%d", o.Lanes, MaxLanes)
	}
	if o.BulkLane && o.Lanes == MaxLanes {
		return nil, fmt.Errorf("engine: %d lanes leave no room for another", o.Lanes)
	}
	if o.Session == 0 || o.Discriminator >= 4096 || len(o.Devices) == 0 {
		return nil, fmt.Errorf("engine: id %d discriminator %d with %d devices", o.Session, o.Discriminator,
			len(o.Devices))
	}
	if o.SlabTasks <= 0 {
		o.SlabTasks = 32
	}
	if o.HoldBytes <= 0 {
		o.HoldBytes = 1 << 30
	}
	if o.MostHolds <= 0 {
		o.MostHolds = mostHolds
	}
	if o.BulkFrom <= 0 {
		o.BulkFrom = 64 << 10
	}
	c := &Core{opts: o, over: make(chan struct{})}
	c.millis.Store(o.Millis())
	c.SetNoteInterval(10_000) // until memory is short
	c.mu.heaps = make(map[uint32]*pgHeap)
	c.mu.exhausted, c.mu.recalls = make(map[uint32]uint64), make(map[uint32]uint64)
	c.mu.full, c.mu.vain = make(map[uint32]uint64), make(map[uint32]int64)
	c.mu.fullAt, c.mu.comingAt = make(map[uint32]int64), make(map[uint32]int64)
	c.mu.supply = make(map[uint32]Supply)
	c.mu.noGrowth = make(map[uint32]uint64)
	c.mu.quota, c.mu.growthWhy = make(map[uint32]string), make(map[uint32]string)
	c.mu.fenced = make(map[uint32]bool)
	if err := c.bufs.open(o.Devices); err != nil {
		return nil, err
	}
	for _, d := range o.Devices {
		caps := d.Caps()
		c.immediate = c.immediate || caps.Synchronous && caps.SelfFencing
	}
	c.nears = min(o.Lanes, runtime.GOMAXPROCS(0))
	c.near.New = func() any { return c.lanes[(c.nextNear.Add(1)-1)%uint32(c.nears)] }
	c.maps = newMappedTables(o.Devices[0])
	c.in.Store(&installed{hints: newWordCache(o.CacheBytes, c.maps), mirror: newMirror(o.MirrorBytes)})
	c.asking.tell = make(chan struct{}, 1)
	lanes := o.Lanes
	if o.BulkLane {
		lanes++
	}
	for i := range lanes {
		l, err := newLane(c, i)
		if l != nil {
			c.lanes = append(c.lanes, l)
		}
		if err != nil {
			c.Close()
			return nil, err
		}
	}
	return c, nil
}

// Session is the session's id, never 0. It does not change.
func (c *Core) Session() uint32 { return c.opts.Session }

// Nanos is the time by the session's clock (Options.Nanos).
func (c *Core) Nanos() int64 { return c.opts.Nanos() }

// Broken reports what the directory should not have sent (Options.Broken).
func (c *Core) Broken(err error) {
	if c.opts.Broken != nil {
		c.opts.Broken(err)
	}
}

// Lanes are the session's lanes, by ID. The list is Core's, and must not be changed.
func (c *Core) Lanes() []*Lane { return c.lanes }

// KeyLanes is how many of the lanes, the first ones, keys hash to. It does not change.
func (c *Core) KeyLanes() int { return c.opts.Lanes }

// View is the map in force, nil before the first. Any goroutine may call it; lanes may still go by an older one.
func (c *Core) View() *View { return c.in.Load().View }

// PD is the protection domain of the i-th device.
func (c *Core) PD(i int) *rdma.PD { return c.bufs.pds[i] }

// Close frees buffers; lanes must hold no task and their queue pairs be closed.
func (c *Core) Close() error {
	none := newWordCache(0, nil)
	for _, l := range c.lanes {
		l.closeBuffers()
		l.cache, l.mirror = none, nil
	}
	c.taking.Lock()
	c.in.Store(&installed{c.View(), none, nil}) // nobody finds the tables any more
	c.taking.Unlock()
	c.maps.close()
	return c.bufs.close()
}

// InstallView makes v the map in force, unless it is older. Lanes notice when they
// are pumped.
func (c *Core) InstallView(v *View) {
	c.taking.Lock()
	defer c.taking.Unlock()
	was := c.in.Load()
	now, old := &installed{v, was.hints, was.mirror}, was.View
	if old != nil && old.Version >= v.Version {
		return
	}
	if old != nil {
		for id, p := range old.PGs {
			n := v.PGs[id]
			if invariants.On {
				invariants.Assert(n == nil || n.Generation > p.Generation || n.Generation == p.Generation &&
					n.Epoch >= p.Epoch,
					"session %d: map %d has placement group %d of an earlier placement group epoch than map %d",
					c.opts.Session, v.Version, id, old.Version)
			}
			if n == nil || n.Generation != p.Generation {
				now.hints = nil // its words mean nothing any more
			}
		}
	}
	if now.hints == nil {
		now.hints, now.mirror = newWordCache(c.opts.CacheBytes, c.maps), newMirror(c.opts.MirrorBytes)
	}
	now.mirror.keep(v)
	c.drafts.tell(v)
	c.holds.Lock()
	defer c.holds.Unlock()
	c.endHoldsLocked(func(h *Hold) bool { return !h.stands(v) })
	c.noteRecalls(old, v)
	c.in.Store(now)
}

// noteRecalls counts recalls. When one is over, what the directory said of memory before it no longer holds.
func (c *Core) noteRecalls(old, v *View) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, p := range v.PGs {
		var before []uint32
		if old != nil && old.PGs[id] != nil {
			before = old.PGs[id].Recalled
		}
		for _, x := range p.Recalled {
			if !slices.Contains(before, x) {
				c.mu.recalls[id]++
			}
		}
		for _, x := range before {
			if !slices.Contains(p.Recalled, x) {
				delete(c.mu.exhausted, id)
			}
		}
	}
}

// Recalls is how many extents of pg were recalled by the maps that the session has seen. A recall that has come and
// gone has changed it.
func (c *Core) Recalls(pg uint32) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.recalls[pg]
}

// installed is the map in force, and the hints of its lanes. Those that still go by an older map, of memory that has
// gone, have others.
type installed struct {
	*View // nil: there is none yet
	hints *wordCache
	// mirror is of the same memory as the hints; nil: there is none.
	mirror *mirror
}

// Acked returns two map versions. acked is the newest for which every lane has seen that no operation begun under
// an older map is in flight. quiesced is the newest for which no lane has a verb under way that was posted under an
// older map. An idle lane notices a new map when pumped.
func (c *Core) Acked() (acked, quiesced uint64) {
	acked, quiesced = math.MaxUint64, math.MaxUint64
	for _, l := range c.lanes {
		acked, quiesced = min(acked, l.acked.Load()), min(quiesced, l.quiesced.Load())
	}
	return acked, quiesced
}

// Leaked reports whether the session has lost track of memory, which a recall
// would find.
func (c *Core) Leaked() bool { return c.leaked.Load() }

// SetEpoch seeds E from the reply that opened the session.
func (c *Core) SetEpoch(e uint64) { c.epoch.Store(e) }

// Epoch is the reclaim epoch E of the last reply processed.
func (c *Core) Epoch() uint64 { return c.epoch.Load() }

// BeginRenew numbers a renewal that is about to be sent. The reply may cover unlinks before the call, and none after
// it.
func (c *Core) BeginRenew() (seq uint64) { return c.sendSeq.Add(1) }

// EndRenew processes the reply to renewal seq: E and the minimum over all
// sessions, and until when (Options.Nanos) the lease holds.
func (c *Core) EndRenew(seq, epoch, minEpoch uint64, leaseEnd int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.millis.Store(c.opts.Millis())
	if epoch > c.epoch.Load() {
		c.epoch.Store(epoch)
	}
	if leaseEnd > c.leaseEnd.Load() {
		c.leaseEnd.Store(leaseEnd)
	}
	c.mu.replies = append(c.mu.replies, reply{seq, epoch})
	if len(c.mu.replies) > maxReplies {
		// Covered by any later reply, only later.
		c.mu.replies = append(c.mu.replies[:0], c.mu.replies[maxReplies/2:]...)
	}
	if invariants.On {
		a := func(ok bool, what string) {
			invariants.Assert(ok, "session %d, renewal %d: %s", c.opts.Session, seq, what)
		}
		a(seq <= c.sendSeq.Load(), "answered and not sent")
		a(epoch <= c.epoch.Load(), "an E that was not taken")
		a(c.releasable.Load() <= c.sendSeq.Load(), "limbo of renewals to come may leave")
	}
	n := 0
	for _, r := range c.mu.replies {
		if r.epoch < minEpoch {
			if r.seq > c.releasable.Load() {
				c.releasable.Store(r.seq)
			}
			continue
		}
		c.mu.replies[n] = r
		n++
	}
	c.mu.replies = c.mu.replies[:n]
	c.mu.minSeen = max(c.mu.minSeen, minEpoch)
}

const maxReplies = 4096

// SetNewest says that the directory, when it answered renewal seq, had no newer map than of
// this version.
func (c *Core) SetNewest(seq, version uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if seq >= c.mu.newestSeq {
		c.mu.newestSeq, c.mu.newest = seq, version
	}
}

// IsNewest reports whether the directory has said, in reply to a renewal from seq on, that it
// had no newer map than of this version.
func (c *Core) IsNewest(version, seq uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.newestSeq >= seq && c.mu.newest <= version
}

// Quiet reports whether the session renews its lease rarely, since nobody waits for it and
// it has nothing to tell.
func (c *Core) Quiet() bool { return c.quiet.Load() }

// SetQuiet says whether the session renews its lease rarely from now on; it returns what was so before.
func (c *Core) SetQuiet(quiet bool) (was bool) { return c.quiet.Swap(quiet) }

// Unlinks notes that a place comes into limbo, and gives its tag.
func (c *Core) Unlinks() (tag uint64) {
	tag = c.sendSeq.Load()
	for old := c.unlinked.Load(); old < tag && !c.unlinked.CompareAndSwap(old, tag); {
		old = c.unlinked.Load()
	}
	if c.quiet.Load() && c.opts.Stirred != nil {
		c.opts.Stirred()
	}
	return tag
}

// Released reports whether what was tagged so is out of limbo. If so, every operation, of any session, that was
// under way when the tag was given has ended.
func (c *Core) Released(tag uint64) bool { return tag < c.releasable.Load() }

// LastUnlink is the number of the renewal that was the last one sent when a place came into limbo last.
func (c *Core) LastUnlink() uint64 { return c.unlinked.Load() }

// InLimbo reports whether a place may be in limbo.
func (c *Core) InLimbo() bool {
	tag := c.unlinked.Load()
	return tag != 0 && tag >= c.releasable.Load()
}

// MinEpoch is the largest minimum over all sessions that any reply has brought, 0 before the first.
func (c *Core) MinEpoch() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.minSeen
}

// Renewals returns how many renewals were sent and the number up to which limbo
// has been released.
func (c *Core) Renewals() (sent, released uint64) { return c.sendSeq.Load(), c.releasable.Load() }

// LeaseValid reports whether the lease holds now, by the session's clock. Any goroutine may call it.
func (c *Core) LeaseValid() bool { return c.opts.Nanos() < c.leaseEnd.Load() }

// SetFenced records that session is confirmed fenced, for good: ids are not given out again.
func (c *Core) SetFenced(session uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.fenced[session] = true
}

// IsFenced reports whether the directory has confirmed to this Core that session is fenced.
func (c *Core) IsFenced(session uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.fenced[session]
}

// heapOf is the session's heap in a placement group; a new generation begins with
// an empty one.
func (c *Core) heapOf(pg, generation uint32) *heap.Heap {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.mu.heaps[pg]
	if h != nil && h.generation > generation {
		return heap.New() // for an operation that outlived its memory
	}
	if h == nil || h.generation != generation {
		h = &pgHeap{generation: generation, heap: heap.New()}
		c.mu.heaps[pg] = h
	}
	return h.heap
}

// AddRun adds memory granted in a generation of a placement group. Places in an extent that is being
// recalled were granted before and are left alone.
func (c *Core) AddRun(pg, generation, unit, units uint32) error {
	c.taking.Lock()
	defer c.taking.Unlock()
	if v := c.View(); v != nil {
		if p := v.PG(pg); p != nil && p.IsRecalled(unit) {
			return nil
		}
	}
	if err := c.heapOf(pg, generation).AddRun(unit, units); err != nil {
		return err
	}
	c.flowOf(pg, generation).Add(int64(units), 0, 0)
	return nil
}

// Receive takes in a place of the session's own that comes home; see heap.Heap.Receive.
func (c *Core) Receive(pg, generation uint32, p heap.Place) bool {
	c.taking.Lock()
	defer c.taking.Unlock()
	v := c.View()
	if v == nil || v.PG(pg) == nil || v.PG(pg).Generation != generation || v.PG(pg).IsRecalled(p.Unit) {
		return false
	}
	if !c.heapOf(pg, generation).Receive(p) {
		return false
	}
	c.flowOf(pg, generation).Add(int64(p.Units), 0, 0)
	return true
}

// SetNoGrowth says that the directory cannot split a shard just now, and why.
func (c *Core) SetNoGrowth(shard uint32, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.noGrowth[shard], c.mu.growthWhy[shard] = c.sendSeq.Load()+1, why
}

// cannotGrow is the error of an operation that finds no room in a shard which does not grow.
func (c *Core) cannotGrow(shard uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fmt.Errorf("%w: shard %d cannot be split: %s", index.ErrFull, shard, c.mu.growthWhy[shard])
}

// NoGrowth is the number that the next renewal was to have when the directory last said that it cannot split a
// shard. It is 0 if the directory has not said so.
func (c *Core) NoGrowth(shard uint32) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.noGrowth[shard]
}

// SetExhausted says that the directory had no memory of pg to grant just now. quota names the namespace's quota that is
// used up; empty: it is none of these.
func (c *Core) SetExhausted(pg uint32, quota string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.exhausted[pg], c.mu.quota[pg] = c.sendSeq.Load()+1, quota
	c.exhaustedUntil.Store(c.mu.exhausted[pg] + exhaustedRenewals) // sendSeq only grows
}

func (c *Core) lackedLocked(pg uint32) error {
	if q := c.mu.quota[pg]; q != "" {
		return fmt.Errorf("%w: placement group %d has no memory left (%s)", index.ErrFull, pg, q)
	}
	return fmt.Errorf("%w: placement group %d has no memory left", index.ErrFull, pg)
}

func (c *Core) lacked(pg uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lackedLocked(pg)
}

// SetFull says besides that none is on its way, or that some is.
func (c *Core) SetFull(pg uint32, full bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !full {
		delete(c.mu.full, pg)
		delete(c.mu.fullAt, pg)
		c.mu.comingAt[pg] = c.opts.Nanos()
		return
	}
	c.mu.full[pg] = c.sendSeq.Load() + 1
	if c.mu.fullAt[pg] == 0 {
		c.mu.fullAt[pg] = max(c.opts.Nanos(), 1)
	}
}

// gaveUp notes that an operation's time was over which had missed memory of pg since a moment
// (Options.Nanos). An operation that had little time says nothing of others.
func (c *Core) gaveUp(pg uint32, missed int64) {
	now := c.opts.Nanos()
	if now-missed < vainFor {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.vain[pg] = now + vainFor
}

// NoMemory judges an operation that has missed memory of pg since a renewal and a moment. Its error says that there is
// none, or that what is on its way takes too long; nil: wait. With a deadline (timed) an operation waits until that
// while the directory goes on saying that memory is on its way.
func (c *Core) NoMemory(pg uint32, starved uint64, missed int64, timed bool) error {
	now := c.opts.Nanos()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.mu.full[pg] >= starved && now-c.mu.fullAt[pg] >= c.opts.FullFor:
		return c.lackedLocked(pg)
	case c.mu.exhausted[pg] < starved:
		return nil // nobody has said so
	case now-missed >= memoryWait && (!timed || now-c.mu.comingAt[pg] >= memoryWait):
		c.mu.vain[pg] = now + vainFor
		return fmt.Errorf("%w, and what was on its way did not come in %v", c.lackedLocked(pg),
			time.Duration(memoryWait))
	case now < c.mu.vain[pg]:
		return fmt.Errorf("%w; others waited for it in vain", c.lackedLocked(pg))
	}
	return nil
}

const (
	// memoryWait is how long an operation waits for memory that is on its way, if its deadline is not earlier: since it
	// missed some or, with a deadline, since the directory last said so.
	memoryWait = int64(8 * time.Second)
	// vainFor is how long others do not wait after one waited in vain, as long at least.
	vainFor = int64(2 * time.Second)
)

// Supply is what the directory says of the memory of a placement group; units.
type Supply struct {
	Known       bool   // it has said something
	Short       bool   // somebody finds too little
	Floor       uint64 // the session may keep so much free in any case
	Share, Give uint64 // see Core.Share and Core.Give
	Live        uint64 // hold records of whatever session
}

// Supply is how the directory said last that pg stands.
func (c *Core) Supply(pg uint32) Supply {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.supply[pg]
}

// SetSupply notes how placement groups stand, as a renewal's reply says; all: those that it does not name are
// gone. Else they have room again.
func (c *Core) SetSupply(told map[uint32]Supply, all bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if all {
		clear(c.mu.supply)
	}
	for pg, s := range c.mu.supply {
		s.Short, s.Give = false, 0
		c.mu.supply[pg] = s
	}
	for pg, s := range told {
		if !all {
			s.Live = c.mu.supply[pg].Live // which the directory does not say then
		}
		c.mu.supply[pg] = s
	}
}

// Short reports whether somebody finds too little memory of pg.
func (c *Core) Short(pg uint32) bool { return c.Supply(pg).Short }

// Share is the session's part of pg's memory if all had equally much, units; 0: unknown.
func (c *Core) Share(pg uint32) uint64 { return c.Supply(pg).Share }

// Give is how much own memory of pg the directory asks the session to hand over to those
// who have nearly none, units.
func (c *Core) Give(pg uint32) uint64 { return c.Supply(pg).Give }

// Idle reports whether memory of a cache is on its way that is at least half of all that pg has. Then what is live
// may stay.
func (c *Core) Idle(pg uint32, coming uint64) bool {
	v := c.View()
	if v == nil || v.PG(pg) == nil {
		return false
	}
	p := v.PG(pg)
	return p.Cache && coming >= uint64(p.HeapHi-p.HeapLo)/2
}

// exhausted is the number that the next renewal was to have when the directory last had no memory of pg, or 0.
func (c *Core) exhausted(pg uint32) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.exhausted[pg]
}

// Memory is what a session holds in one placement group.
type Memory struct {
	PG, Generation uint32
	Heap           *heap.Heap
	Drafts         uint64 // units that rest in drafts: linked by nobody yet
}

// Heaps lists the session's heaps, by placement group. They are shared with the lanes, and guard themselves.
func (c *Core) Heaps() (hs []Memory) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, h := range c.mu.heaps {
		hs = append(hs, Memory{PG: id, Generation: h.generation, Heap: h.heap,
			Drafts: c.drafts.rests(id, h.generation)})
	}
	sort.Slice(hs, func(i, j int) bool { return hs[i].PG < hs[j].PG })
	return hs
}

// start is the origin of process-local monotonic time.
var start = time.Now()

// Nanos is a monotonic clock for Options.Nanos.
func Nanos() int64 { return int64(time.Since(start)) }

// Millis is the wall clock for Options.Millis.
func Millis() uint64 { return uint64(time.Now().UnixMilli()) }
