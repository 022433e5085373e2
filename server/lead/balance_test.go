package lead

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// filling plays writers that add records uniformly by hash to one namespace, and a janitor that
// takes time for its jobs. It keeps what the leader cannot know: what every shard holds.
type filling struct {
	*world
	ns, janitor uint32
	rng         *rand.Rand

	size  map[uint32]float64 // live units by shard
	lump  map[uint32]float64 // live units of one key, by shard
	skew  map[uint32]float64 // how much faster a shard grows than its hashes say; 0: not at all
	dirty map[uint32]float64 // by placement group: units that a move has copied and not yet cleaned
	parts map[uint32]float64 // by job: units that move
	ends  map[uint32]time.Duration
	freed []freed // that waits for reclaim epochs

	rate           float64 // units that writers add in a tick
	copies         float64 // units that a janitor copies in a tick
	matures        time.Duration
	seed           uint64
	noise          float64 // of what the leader is told
	moves, inPlace int
	moved          float64
}

type freed struct {
	pg    uint32
	units float64
	at    time.Duration
}

const tick = lease / 4

// newFilling makes a namespace of r = 1 on n memory nodes with regions of so many bytes.
func newFilling(t *testing.T, n int, shards uint32, bytes uint64, mode dirpb.NamespaceMode) *filling {
	w := newWorld(t)
	for i := range n {
		name := fmt.Sprint("m", i+1)
		r := w.apply(&fsmpb.Command{
			Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{Node: &dirpb.RegisterNodeRequest{
				Name: name, Incarnation: 1, CapacityBytes: 4 * bytes, Domain: name, Endpoints: []*dirpb.Endpoint{
					{Provider: "tcp", Addr: "h:1"}},
			}}}})
		w.l.Heartbeat(w.s, w.now, r.NodeID, 1, nil)
	}
	r := w.apply(&fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
		Namespace: &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 1, BytesPerNode: bytes, Shards: shards,
			Mode: mode},
	}}})
	w.publish()
	f := &filling{
		world: w, ns: r.Namespace.Id, rng: rand.New(rand.NewPCG(1, 2)), lump: make(map[uint32]float64),
		size: make(map[uint32]float64), skew: make(map[uint32]float64),
		dirty: make(map[uint32]float64), parts: make(map[uint32]float64), ends: make(map[uint32]time.Duration),
		copies: 4 << 20, matures: 103 * time.Second,
	}
	f.janitor = w.open(f.ns)
	f.l.opts.ScrubInterval = 0
	return f
}

func (f *filling) heap(pg uint32) float64 { h := f.s.Heap(pg); return float64(h.End - h.Start) }

// live is what the shards of a placement group hold.
func (f *filling) live(pg uint32) (units float64) {
	for _, sh := range f.s.Shards(f.ns) {
		if sh.PgId == pg {
			units += f.size[sh.Id] + f.lump[sh.Id]
		}
	}
	return units
}

// room is what nothing uses: neither records nor copies under way, nor memory that waits.
func (f *filling) room(pg uint32) float64 {
	room := f.heap(pg) - f.live(pg) - f.dirty[pg]
	for _, x := range f.freed {
		if x.pg == pg {
			room -= x.units
		}
	}
	return room
}

// tell has the leader know what every placement group holds, and the state what is granted.
func (f *filling) tell() {
	e, _ := f.l.Epochs()
	for _, pg := range f.s.PGs(f.ns) {
		h := f.s.Heap(pg.Id)
		waits := 0.0
		for _, x := range f.freed {
			if x.pg == pg.Id {
				waits += x.units
			}
		}
		h.Free = nil
		if n := uint32(waits); n > 0 {
			h.Free = []*fsmpb.Run{{Unit: uint32(h.Start), Units: n, Returned: e + 1}}
		}
		h.Watermark = min(h.End, h.Start+uint64(f.heap(pg.Id)-f.room(pg.Id)))
		f.holds(f.janitor, pg.Id, uint64(max(0, (f.live(pg.Id)+f.dirty[pg.Id])*(1+f.noise*(2*f.rng.Float64()-1)))))
	}
}

// holds has a session say that so many of a placement group's units are live, and that it holds
// the rest of what is granted.
func (w *world) holds(x, pg uint32, live uint64) {
	m, granted := w.l.memory(w.s, pg), uint64(0)
	for _, u := range w.s.Usage() {
		if u.PgId == pg {
			granted = u.GrantedUnits
		}
	}
	m.base, m.known = 0, true
	w.l.hold(w.s, x, w.l.sessions.of(x),
		[]*dirpb.Held{{PgId: pg, Generation: m.generation, OwnUnits: granted, FreeUnits: granted - min(granted, live),
			NetUnits: int64(live)}})
	w.l.accounted = 0
	w.l.plan(w.s, w.now).account()
}

// going is what a move takes along: small records, half of them in a split, and the large key,
// which goes or stays as a whole.
func (f *filling) going(sh *dirpb.Shard) (all, small, lump float64) {
	small, lump = f.size[sh.Id], f.lump[sh.Id]
	if sh.Move.Split {
		small /= 2
		if (f.seed+uint64(sh.Depth))%2 == 0 {
			lump = 0
		}
	}
	return small + lump, small, lump
}

// tick lets the janitor work, then the leader plan.
func (f *filling) tick() {
	f.t.Helper()
	f.wait(tick)
	f.ack()
	f.freed = slices.DeleteFunc(f.freed, func(x freed) bool { return f.now >= x.at })
	for j := f.claim(f.janitor); j != nil; j = f.l.Claimable(f.s, f.janitor, f.now,
		slices.Collect(maps.Keys(f.ends))...) {
		if j.Owner == 0 {
			f.apply(&fsmpb.Command{
				Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{SessionId: f.janitor, JobId: j.Id}}})
		}
		if _, ok := f.ends[j.Id]; ok {
			continue
		}
		if j.Kind == dirpb.JobKind_JOB_MOVE {
			sh := f.s.Shard(j.ShardId)
			part, _, _ := f.going(sh)
			if j.TargetPgId == j.PgId {
				f.inPlace++
			} else {
				if room := f.room(j.TargetPgId); part > room {
					f.t.Fatalf("at %v: %.0f units move into placement group %d, which has %.0f", f.now, part,
						j.TargetPgId, room)
				}
				f.moves++
				f.moved += part
				f.dirty[j.TargetPgId] += part // the copies
			}
			f.parts[j.Id] = part
		}
		f.ends[j.Id] = f.now + tick*time.Duration(1+f.parts[j.Id]/f.copies)
	}
	for id, at := range ordered.All(f.ends) {
		j := f.s.Job(id)
		if f.now < at {
			continue
		}
		delete(f.ends, id)
		part := f.parts[id]
		delete(f.parts, id)
		if j.Kind == dirpb.JobKind_JOB_MOVE {
			// Keys that came in meanwhile go along.
			mv := f.s.Shard(j.ShardId).Move
			all, small, lump := f.going(f.s.Shard(j.ShardId))
			f.size[mv.ChildId], f.lump[mv.ChildId] = small, lump
			f.size[j.ShardId] -= small
			f.lump[j.ShardId] -= lump
			if s, ok := f.skew[j.ShardId]; ok {
				f.skew[mv.ChildId] = s
			}
			if j.TargetPgId != j.PgId {
				f.dirty[j.TargetPgId] -= part
				f.dirty[j.PgId] += all
			}
		}
		if j.Kind == dirpb.JobKind_JOB_CLEAN && j.ChildPgId != j.PgId {
			f.freed = append(f.freed, freed{j.PgId, f.dirty[j.PgId], f.now + f.matures})
			f.dirty[j.PgId] = 0
		}
		f.finish(f.janitor, j)
	}
	f.tell()
	f.step()
}

// write adds what writers write in a tick. It stops with 1 where a placement group is full and
// waits, with 2 where it is full for good.
func (f *filling) write() int {
	grow := make(map[uint32]float64)
	for _, sh := range f.s.Shards(f.ns) {
		k, ok := f.skew[sh.Id]
		if !ok {
			k = 1
		}
		grow[sh.Id] = f.rate * weight(sh.Depth) * k
	}
	byPG := make(map[uint32]float64)
	for _, sh := range f.s.Shards(f.ns) {
		byPG[sh.PgId] += grow[sh.Id]
	}
	for pg, n := range ordered.All(byPG) {
		if f.room(pg) < n {
			if f.l.relieving(f.s, pg) {
				return 1
			}
			return 2
		}
	}
	for id, n := range grow {
		f.size[id] += n
	}
	return 0
}

// full is the part of all heaps that holds records.
func (f *filling) full() float64 {
	var live, heap float64
	for _, pg := range f.s.PGs(f.ns) {
		live += f.live(pg.Id)
		heap += f.heap(pg.Id)
	}
	return live / heap
}

// fill writes until a placement group is full for good, and says how long writers waited.
func (f *filling) fill() (waited time.Duration) {
	f.t.Helper()
	for range 200_000 {
		switch f.write() {
		case 1:
			waited += tick
		case 2:
			return waited
		}
		f.tick()
	}
	f.t.Fatalf("never full: %.3f, jobs %v, lately %q", f.full(), f.s.Jobs(), f.log[max(0, len(f.log)-5):])
	return 0
}

// A namespace takes values until nearly all of its memory is live, however its shards lie.
func TestFill(t *testing.T) {
	for _, tc := range []struct {
		name   string
		nodes  int
		shards uint32
		bytes  uint64
		secs   float64 // in which writers would fill everything
		noise  float64
		skew   float64
		want   float64
	}{
		{"slow", 7, 16, 1 << 30, 3600, 0, 0, 0.96},
		{"fast", 7, 16, 1 << 30, 60, 0, 0, 0.96},
		{"noise", 7, 16, 1 << 30, 600, 0.005, 0.05, 0.93},
		{"small", 7, 16, 64 << 20, 60, 0.005, 0.05, 0.92},
		{"even", 4, 16, 1 << 30, 600, 0, 0, 0.99},
		{"three", 3, 4, 1 << 30, 600, 0, 0, 0.94},
		{"many", 7, 256, 1 << 30, 600, 0, 0.05, 0.93},
		{"large", 5, 16, 64 << 30, 3600, 0.01, 0.05, 0.92},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFilling(t, tc.nodes, tc.shards, tc.bytes, 0)
			f.noise = tc.noise
			for _, sh := range f.s.Shards(f.ns) {
				f.skew[sh.Id] = 1 + tc.skew*(2*f.rng.Float64()-1)
			}
			heaps := 0.0
			for _, pg := range f.s.PGs(f.ns) {
				heaps += f.heap(pg.Id)
			}
			f.rate = heaps / tc.secs * tick.Seconds()
			f.copies = max(f.copies, heaps/1000)
			waited := f.fill()
			t.Logf("%.1f %% live, %d moves and %d splits in place, %.1f %% moved, writers waited %v of %v, %d shards",
				100*f.full(), f.moves, f.inPlace, 100*f.moved/heaps, waited, f.now, len(f.s.Shards(f.ns)))
			if f.full() < tc.want {
				t.Errorf("full at %.1f %%, want %.1f %%", 100*f.full(), 100*tc.want)
			}
			if f.moved > heaps/2 {
				t.Errorf("%.0f units moved, of %.0f that there are", f.moved, heaps)
			}
		})
	}
}

// idle fails if anything moves in so long.
func (f *filling) idle(d time.Duration) {
	f.t.Helper()
	before := f.moves + f.inPlace
	for end := f.now + d; f.now < end; {
		f.tick()
	}
	if n := f.moves + f.inPlace - before; n > 0 {
		f.t.Fatalf("%d moves: %q", n, f.log[max(0, len(f.log)-10):])
	}
}

// Memory that is even within what sessions lag behind is left alone, whatever it is.
func TestBalanceCalm(t *testing.T) {
	f := newFilling(t, 4, 16, 1<<30, 0)
	for _, full := range []float64{0.1, 0.5, 0.8, 0.95, 0.99} {
		for _, sh := range f.s.Shards(f.ns) {
			f.size[sh.Id] = full * f.heap(sh.PgId) / 4
		}
		f.noise = 0.009
		f.idle(100 * time.Second)
	}
	// Below an eighth nothing moves, however uneven it is.
	for _, sh := range f.s.Shards(f.ns) {
		f.size[sh.Id] = float64(sh.PgId) / 4 * 0.12 * f.heap(sh.PgId) / 4
	}
	f.idle(100 * time.Second)
	if f.l.relieving(f.s, 4) {
		t.Fatal("a move is due from a group that is nearly empty")
	}
	f.size[f.s.Shards(f.ns)[3].Id] *= 2 // of placement group 4
	for range 40 {
		f.tick()
	}
	if f.moves == 0 {
		t.Fatal("nothing moves from a group that is more than an eighth full")
	}
}

// A single key of a shard holds a large part of its placement group. Estimates are wrong then;
// nothing may move for ever while nothing is written.
func TestBalanceLargeKey(t *testing.T) {
	for seed := range uint64(32) {
		f := newFilling(t, 4, 16, 1<<30, 0)
		f.seed, f.noise, f.matures = seed, 0.002, time.Second
		for _, sh := range f.s.Shards(f.ns) {
			f.size[sh.Id] = 0.42 * f.heap(sh.PgId) / 4
		}
		f.lump[uint32(seed%16)+1] = 0.2 * f.heap(1)
		for f.now < 300*time.Second {
			f.tick()
		}
		if f.moves > 20 {
			t.Fatalf("seed %d: %d moves: %q", seed, f.moves, f.log)
		}
		f.idle(200 * time.Second)
	}
}

// Shards that are each a small part of their placement group move all the same, and none splits.
func TestBalanceSmallShards(t *testing.T) {
	f := newFilling(t, 2, 1024, 1<<30, 0)
	for _, sh := range f.s.Shards(f.ns) {
		f.size[sh.Id] = (0.7 - 0.2*float64(sh.PgId)) * f.heap(sh.PgId) / 512
	}
	for range 60 {
		f.tick()
	}
	if n := len(f.s.Shards(f.ns)); f.moves == 0 || n != 1024 {
		t.Fatalf("%d moves, %d shards", f.moves, n)
	}
}

// The memory of caches is always full.
func TestBalanceCache(t *testing.T) {
	f := newFilling(t, 7, 16, 1<<30, dirpb.NamespaceMode_NAMESPACE_CACHE)
	for _, sh := range f.s.Shards(f.ns) {
		f.size[sh.Id] = 0.3 * f.heap(sh.PgId)
	}
	f.idle(100 * time.Second)
	for _, pg := range f.s.PGs(f.ns) {
		if f.l.relieving(f.s, pg.Id) {
			t.Fatalf("placement group %d of a cache is being relieved", pg.Id)
		}
	}
	if live, heap := f.l.Fullness(f.s, 1); float64(live) < 0.89*float64(heap) || live > heap {
		t.Fatalf("%d units live of %d", live, heap)
	}
}

// Small placement groups are left alone.
func TestBalanceUnits(t *testing.T) {
	for _, units := range []uint64{0, 1 << 30 / layout.UnitSize} {
		f := newFilling(t, 2, 4, 64<<20, 0)
		if units != 0 {
			f.l.opts.BalanceUnits = units
		}
		for _, sh := range f.s.Shards(f.ns) {
			f.size[sh.Id] = 0.1 * f.heap(1)
			if sh.PgId == 1 {
				f.size[sh.Id] = 0.45 * f.heap(1)
			}
		}
		for range 40 {
			f.tick()
		}
		if (f.moves > 0) != (units == 0) {
			t.Fatalf("least heap %d: %d moves", f.l.opts.BalanceUnits, f.moves)
		}
	}
}

// The state machine grants what the leader takes for grantable, but for what it keeps for those who move records.
func TestSupply(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 3))
		f := newFilling(t, 1, 1, 64<<20, 0)
		for range 2 {
			f.open(f.ns)
		}
		if rng.IntN(2) == 0 {
			f.leak(1) // the janitor: the oldest session is 2 then
			f.fence()
			f.janitor = 2
		}
		f.l.epoch = 2000
		for _, x := range f.s.Sessions() {
			f.renew(x.Id, 0, 0)
		}
		h := f.s.Heap(1)
		at := h.Start
		for range rng.IntN(8) {
			r := &fsmpb.Run{Unit: uint32(at), Units: 1 + uint32(rng.IntN(10_000)), Returned: uint64(rng.IntN(3)) * 975}
			h.Free = append(h.Free, r)
			at += uint64(r.Units) + 10
		}
		h.Watermark = at + uint64(rng.IntN(100_000))
		u := f.l.newView(f.s, f.now).supply(h)
		if got := f.s.Usage()[0].GrantedUnits; got != u.granted {
			t.Fatalf("seed %d: %d units are granted, the leader takes it for %d", seed, got, u.granted)
		}
		_, least := f.l.Epochs()
		var granted, waiting uint64
		for {
			r := f.apply(&fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{
				SessionId: f.janitor, PgId: 1, WantUnits: layout.ExtentUnits, PlaceUnits: 1, MinEpoch: least,
			}}})
			waiting = r.Grant.WaitingUnits
			if len(r.Grant.Runs) == 0 {
				break
			}
			for _, x := range r.Grant.Runs {
				granted += uint64(x.Units)
			}
		}
		h = f.s.Heap(1)
		if reserve := fsm.MoveReserve(h.End - h.Start); granted != u.room-min(u.room, reserve) || u.waits > waiting {
			t.Fatalf("seed %d: %d units granted, %d wait; the leader said %+v", seed, granted, waiting, u)
		}
	}
}

// A writer that finds a placement group full waits while a move out of it is due or under way,
// until the memory can be granted; not while the janitor has trouble.
func TestRelieving(t *testing.T) {
	f := newFilling(t, 2, 4, 1<<30, 0)
	for _, sh := range f.s.Shards(f.ns) {
		f.size[sh.Id] = 0.1 * f.heap(1)
		if sh.PgId == 1 {
			f.size[sh.Id] = 0.49 * f.heap(1)
		}
	}
	f.tell()
	is := func(one, two bool) {
		t.Helper()
		if a, b := f.l.relieving(f.s, 1), f.l.relieving(f.s, 2); a != one || b != two {
			t.Fatalf("relieving: %v, %v, want %v, %v; jobs %v", a, b, one, two, f.s.Jobs())
		}
	}
	is(true, false) // due: a new leader waits a lease
	scrub := f.start(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_SCRUB, PgId: 2})
	is(true, false)
	f.l.Progress(scrub, 0, 1, "stuck", f.now)
	is(false, false)
	f.l.Progress(scrub, 0, 1, "", f.now)
	f.wait(2 * lease)
	f.ack()
	f.do(f.janitor, dirpb.JobKind_JOB_SCRUB)
	for len(f.s.Jobs()) == 0 {
		f.tick()
	}
	is(true, false)
	j := f.s.Jobs()[0]
	f.holds(f.janitor, 1, 1)
	f.holds(f.janitor, 2, 1)
	is(true, false) // under way
	f.l.Progress(j.Id, 1, 2, "no memory", f.now)
	is(false, false)
	f.l.Progress(j.Id, 1, 2, "", f.now)
	for f.s.Job(j.Id) != nil {
		f.tick()
	}
	f.holds(f.janitor, 1, 1)
	f.holds(f.janitor, 2, 1)
	is(true, false) // being cleaned
	for len(f.freed) == 0 {
		f.tick()
	}
	f.holds(f.janitor, 1, 1)
	f.holds(f.janitor, 2, 1)
	is(true, false) // waits for reclaim epochs
	for len(f.freed) > 0 {
		f.tick()
	}
	is(false, false)
	if f.l.relieving(f.s, 99) {
		t.Fatal("a placement group that does not exist is being relieved")
	}
}

// No move is planned that the state machine refuses, that its target has no room for, or that
// makes a difference larger; whatever the state.
func TestBalanceRoom(t *testing.T) {
	planned := 0
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 7))
		n := 2 + rng.IntN(5)
		f := newFilling(t, n, 1<<rng.IntN(6), 128<<20, 0)
		for range rng.IntN(12) { // other depths
			shards := f.s.Shards(f.ns)
			q := &fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: shards[rng.IntN(len(shards))].Id, Split: true}
			if rng.IntN(2) == 0 {
				q.TargetPgId = 1 + uint32(rng.IntN(n))
			}
			if f.try(&fsmpb.Command{Op: &fsmpb.Command_StartJob{StartJob: q}}).Err == nil && rng.IntN(4) > 0 {
				for j := f.claim(f.janitor); j != nil; j = f.claim(f.janitor) {
					f.finish(f.janitor, j)
					f.ack()
				}
			}
		}
		for _, pg := range f.s.PGs(f.ns) {
			h := f.s.Heap(pg.Id)
			heap := h.End - h.Start
			granted := uint64(rng.Float64() * float64(heap))
			h.Watermark = h.Start + granted
			if granted > 1000 && rng.IntN(2) == 0 {
				r := &fsmpb.Run{Unit: uint32(h.Start), Units: uint32(rng.Uint64N(granted)),
					Returned: uint64(rng.IntN(2))}
				h.Free = []*fsmpb.Run{r}
			}
			f.holds(f.janitor, pg.Id, uint64(rng.Float64()*float64(granted)))
			switch rng.IntN(4) {
			case 0:
				h.IndexNext = pg.IndexBytes - min(pg.IndexBytes, uint64(rng.IntN(1<<20)))
			case 1:
				h.IndexFree = append(h.IndexFree, &fsmpb.Array{Offset: 1 << 40, Segments: uint32(rng.IntN(100)),
					Returned: uint64(rng.IntN(2))})
			}
		}
		if rng.IntN(4) == 0 {
			f.s.Namespace(f.ns).LimitBytes = rng.Uint64N(uint64(n)*128<<20) + 1
		}
		if rng.IntN(4) == 0 {
			f.s.Namespace(f.ns).Quota = &dirpb.Quota{IndexBytes: f.s.IndexBytes(f.ns) + rng.Uint64N(1<<18) + 1}
		}
		f.wait(2 * lease)
		f.ack()
		busy := make(map[uint32]bool)
		for _, j := range f.s.Jobs() {
			busy[j.PgId], busy[j.TargetPgId] = true, true
		}
		granted, room := uint64(0), make(map[uint32]uint64)
		v := f.l.newView(f.s, f.now)
		for _, u := range f.s.Usage() {
			granted += u.GrantedUnits
			room[u.PgId] = v.supply(f.s.Heap(u.PgId)).room
		}
		limit := uint64(math.MaxUint64)
		if b := f.s.Namespace(f.ns).LimitBytes; b != 0 {
			limit = b/layout.UnitSize - min(b/layout.UnitSize, granted)
		}
		depths := make(map[uint32]float64)
		for _, sh := range f.s.Shards(f.ns) {
			depths[sh.PgId] += weight(sh.Depth)
		}
		for _, s := range f.plan() {
			q := s.Do.GetStartJob()
			if q == nil || q.Reason != reasonUneven {
				t.Fatalf("seed %d: due is %s", seed, s.Why)
			}
			planned++
			sh := f.s.Shard(q.ShardId)
			from, to := sh.PgId, q.TargetPgId
			if err := f.s.CheckIndexQuota(f.ns, sh.Segments); q.Split && err != nil {
				t.Fatalf("seed %d: %s: %v", seed, s.Why, err)
			}
			if busy[from] || busy[to] {
				t.Fatalf("seed %d: %s: placement group is busy", seed, s.Why)
			}
			busy[from], busy[to] = true, true
			if from != to {
				part := float64(f.l.live(f.s, from)) * weight(sh.Depth) / depths[from]
				if q.Split {
					part /= 2
				}
				if part > float64(room[to]) || part > float64(limit) {
					t.Fatalf("seed %d: %s: moves %.0f units, room is %d, limit %d", seed, s.Why, part, room[to], limit)
				}
				heap := float64(spared(uint64(f.heap(from))))
				if q.Split && part < 0.99*leastMove*heap || float64(f.l.live(f.s, from)) < 0.87*heap &&
					2*part > float64(room[to])+1 {
					t.Fatalf("seed %d: %s: moves %.0f units of %.0f where %d are free", seed, s.Why, part, heap,
						room[to])
				}
				a, b := float64(f.l.live(f.s, from))/f.heap(from), float64(f.l.live(f.s, to))/f.heap(to)
				if after := math.Abs(a - part/f.heap(from) - b - part/f.heap(to)); after >= a-b {
					t.Fatalf("seed %d: %s: the difference grows from %.3f to %.3f", seed, s.Why, a-b, after)
				}
			}
			f.apply(s.Do)
		}
	}
	if planned < 100 {
		t.Fatalf("only %d moves were planned", planned)
	}
}

// A memory node that died and is back, empty, gets its share of a namespace whose placement
// groups have found other members: a placement group of its own where there is room, and members
// of others in any case.
func TestRebalanceReturned(t *testing.T) {
	for _, tc := range []struct {
		name  string
		room  uint64 // regions of each memory node
		steps []string
	}{
		{"room", 16, []string{`create a placement group on memory nodes ["m1" `, "replace", "move"}},
		{"no room for another", 3, []string{`replace memory node "m`, `by "m1"`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.nodes(3, tc.room)
			ns := w.create("n", 2, 8)
			x := w.open(ns)
			w.down(1)
			w.settleJobs(x)
			for _, pg := range w.s.PGs(ns) {
				if len(pg.Members) != 2 {
					t.Fatalf("no other member was found: %v", pg)
				}
			}
			w.mute[1] = false
			w.boot("m1", "d1", tc.room, 2)
			if n := w.s.Node(1).UsedBytes; n != 0 {
				t.Fatalf("%d bytes are used", n)
			}
			steps := w.rebalance(ns)
			all := strings.Join(steps, "\n")
			for _, want := range tc.steps {
				if !strings.Contains(all, want) {
					t.Fatalf("steps %q, want %q", steps, want)
				}
			}
			w.settleJobs(x)
			least, most := uint64(math.MaxUint64), uint64(0)
			for _, n := range w.s.Nodes() {
				least, most = min(least, n.UsedBytes/region), max(most, n.UsedBytes/region)
			}
			if most > least+1 {
				t.Fatalf("between %d and %d regions a node: %v", least, most, w.s.PGs(ns))
			}
			for _, pg := range w.s.PGs(ns) {
				w.whole(pg)
			}
			if again := w.rebalance(ns); len(again) != 0 || len(w.s.Rebalancing()) != 0 {
				t.Fatalf("a rebalance after a rebalance: %q", again)
			}
		})
	}
}

// whole fails unless a placement group is active on two memory nodes of different domains.
func (w *world) whole(pg *dirpb.PlacementGroup) {
	w.t.Helper()
	if len(pg.Members) != 2 || pg.State != dirpb.PGState_PG_ACTIVE || pg.Joining ||
		w.s.Node(pg.Members[0].NodeId).Domain == w.s.Node(pg.Members[1].NodeId).Domain {
		w.t.Fatalf("%v", pg)
	}
}

// Regions spread over failure domains stay so: a fuller memory node keeps its member if the
// only emptier one is in the other member's domain.
func TestRebalanceDomains(t *testing.T) {
	w := newWorld(t)
	w.node("a", "x", 4)
	w.node("b", "y", 4)
	ns := w.create("n", 2, 4)
	x := w.open(ns)
	w.node("c", "y", 0) // no room yet, so it heads nothing
	w.boot("c", "y", 1, 2)
	w.rebalance(ns)
	w.settleJobs(x)
	for _, pg := range w.s.PGs(ns) {
		w.whole(pg)
	}
	if w.s.Node(3).UsedBytes == 0 {
		t.Fatal("the empty memory node got nothing")
	}
}

// newUneven is a store of even hashes and uneven memory, which moves when that is asked for.
func newUneven(t *testing.T) *filling {
	t.Helper()
	f := newFilling(t, 4, 16, 1<<30, 0)
	for _, sh := range f.s.Shards(f.ns) {
		f.size[sh.Id] = 0.05 * f.heap(sh.PgId) * float64(sh.PgId)
	}
	f.l.opts.BalanceUnits = math.MaxUint64 // what moves was asked for
	f.tell()
	f.idle(2 * lease)
	return f
}

// rebalanced fails unless a rebalance ends with even memory.
func (f *filling) rebalanced() {
	f.t.Helper()
	for range 2000 {
		f.tick()
	}
	least, most := math.Inf(1), 0.0
	for _, pg := range f.s.PGs(f.ns) {
		x := f.live(pg.Id) / f.heap(pg.Id)
		least, most = min(least, x), max(most, x)
	}
	if most-least > 0.035 || len(f.s.Rebalancing()) > 0 {
		f.t.Fatalf("between %.3f and %.3f after %d moves", least, most, f.moves)
	}
}

// A rebalance of a store that holds something goes by memory: what is more even after the
// steps is the memory, not the number of shards.
func TestRebalanceMemory(t *testing.T) {
	f := newUneven(t)
	steps := f.rebalance(f.ns)
	if len(steps) == 0 || !strings.Contains(steps[0], "MiB, from placement group 4 to placement group 1") {
		t.Fatalf("steps %q", steps)
	}
	if f.rebalanced(); f.moves > 2*len(steps) {
		t.Fatalf("%d moves, %d were told", f.moves, len(steps))
	}
	f.idle(10 * time.Second)
	// Caches go by hashes, however full they are.
	c := newFilling(t, 4, 16, 1<<30, dirpb.NamespaceMode_NAMESPACE_CACHE)
	for _, sh := range c.s.Shards(c.ns) {
		c.size[sh.Id] = 0.06 * c.heap(sh.PgId) * float64(sh.PgId)
	}
	c.tell()
	if steps := c.rebalance(c.ns); len(steps) != 0 {
		t.Fatalf("steps %q of a cache with as many shards everywhere", steps)
	}
}

// The next leader goes on with a rebalance, once sessions have told it what they hold. Before, it would go by hashes,
// which are even here.
func TestRebalanceElected(t *testing.T) {
	f := newUneven(t)
	f.rebalance(f.ns)
	for terms := 0; f.moves < 3 || terms < 3; f.tick() {
		if f.moves >= terms && len(f.s.Jobs()) == 0 {
			f.elect()
			f.l.opts.BalanceUnits = math.MaxUint64
			f.step() // nobody has told anything
			terms++
		}
		if len(f.s.Rebalancing()) == 0 {
			t.Fatalf("it ended after %d moves and %d elections: %q", f.moves, terms, f.log[max(0, len(f.log)-5):])
		}
	}
	f.rebalanced()
}

// Records do not move to where there are fewer copies.
func TestBalanceCopies(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 2) // no room for other members
	ns := w.create("n", 2, 8)
	x := w.open(ns)
	w.down(3) // of placement groups 2 and 3
	w.settleJobs(x)
	w.on(2, dirpb.PGState_PG_ACTIVE, 2)
	h := w.s.Heap(1)
	for pg := range uint32(2) {
		for i := range uint32(2) {
			live := uint64(0)
			if i == pg {
				live = 9 * (h.End - h.Start) / 10
			}
			w.s.Heap(i + 1).Watermark = h.Start + live
			w.holds(x, i+1, live)
		}
		w.wait(2 * lease)
		w.ack()
		var moves []uint32
		for _, s := range w.plan() {
			moves = append(moves, w.s.Shard(s.Do.GetStartJob().GetShardId()).GetPgId())
		}
		if want := []uint32{pg + 1}; pg == 0 && len(moves) > 0 || pg == 1 && !slices.Equal(moves, want) {
			t.Fatalf("placement group %d is full: moves out of %d", pg+1, moves)
		}
	}
}

// A refused move is no memory that a group took.
func TestBalanceRefused(t *testing.T) {
	f := newFilling(t, 2, 4, 1<<30, 0)
	for _, sh := range f.s.Shards(f.ns) {
		f.size[sh.Id] = 0.45 * f.heap(1) * float64(2-sh.PgId)
	}
	f.tell()
	f.wait(2 * lease)
	f.ack()
	steps := f.plan()
	if len(steps) != 1 || len(f.l.took) != 1 {
		t.Fatalf("due are %v, took %v", steps, f.l.took)
	}
	f.l.Refused(f.s, steps[0], f.now)
	if len(f.l.took) != 0 || len(f.plan()) != 0 {
		t.Fatalf("took %v", f.l.took)
	}
	f.wait(2 * maxPause)
	f.ack()
	if steps = f.plan(); len(steps) != 1 {
		t.Fatalf("due are %v", steps)
	}
}
