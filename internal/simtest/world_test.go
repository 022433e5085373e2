package simtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/zeebo/xxh3"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma/sim"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// Verb is what a script step does. The zero value is invalid.
type Verb uint8

const (
	Get Verb = 1 + iota
	Put
	Add // PutIfAbsent
	Del
	Incr
	// CAS is conditional on the version that this client's last Get or write of
	// the key saw; without one it is skipped.
	CAS
	// DelIf is the conditional Delete, likewise.
	DelIf
	// Scan reads everything, page by page; its key is of no interest.
	Scan
	// Close ends the session in good order and gives its memory back.
	Close
	// GetIf is a Get unless the key's version is the one that this client saw last.
	GetIf
	// PutEx is a Put that expires when the clock moves on.
	PutEx
	// Evict removes every key that it finds in the group of its key and in the stash.
	// Its removals are in the history key by key, possible ones with an unknown outcome.
	Evict
	// Expire removes what has expired there, and is in no history.
	Expire
	// Txn is a transaction; its key is the number of one of Config.Txns.
	Txn
	// Grant gives a client of Config.Heirs the status words of a session that has ended. It waits for that, unless none
	// will be free.
	Grant
	// Look reads the keys of one of Config.Txns, as a transaction that only reads.
	Look
	// Stream is a Put of a long value by several operations, a chunk each and one that links them.
	Stream
	// Watch is a Get whose value is looked at where it is, as in a View of the library, until that is released.
	Watch
	// Has asks whether the key is there, and by which version.
	Has
	// Give is a Put of a version that is given, as a restore has it: a few later than the one that this client saw
	// last, or of the past. The value is the version's.
	Give
	// Demote puts a stub in place of the key's record, Promote the record back. Collect frees the oldest object of the
	// key, if there is one that nothing under way may name, and gives what is alive another address first.
	Demote
	Promote
	Collect
	// Touch changes the key's version and expiry alone, to none. Scopes with it ask for no versions.
	Touch
	expired // in histories only: what the clock did to a PutEx
)

var verbNames = [...]string{"?", "get", "put", "add", "del", "incr", "cas", "delif", "scan", "close", "getif", "putex",
	"evict", "expire", "txn", "grant", "look", "stream", "watch", "has", "give", "demote",
	"promote", "collect", "touch", "expired"}

func (v Verb) String() string { return verbNames[v] }

// Step is one operation of a script, on one of a few keys.
type Step struct {
	Verb Verb
	Key  int
}

// Act is what an operator asks of the directory.
type Act struct {
	Kind ActKind
	// Split, Migrate, Grow: the shard. Recall, Scrub: the placement group. Drain: the memory
	// node, from 0.
	ID uint32
	// Migrate, Split: the target placement group, or 0. Grow: the segments of the new array. Recall:
	// the extent.
	To uint32
}

// ActKind is the kind of an Act.
type ActKind uint8

const (
	Split ActKind = 1 + iota
	Migrate
	Drain
	Recall
	Scrub
	Grow
)

func (a Act) String() string {
	switch a.Kind {
	case Split:
		return fmt.Sprintf("split of shard %d", a.ID)
	case Migrate:
		return fmt.Sprintf("shard %d to migrate to pg %d", a.ID, a.To)
	case Grow:
		return fmt.Sprintf("shard %d to grow to %d segments", a.ID, a.To)
	case Drain:
		return fmt.Sprintf("drain of m%d", a.ID)
	case Recall:
		return fmt.Sprintf("recall of extent %d of pg %d", a.To, a.ID)
	}
	return fmt.Sprintf("scrub of pg %d", a.ID)
}

// Config is one scope: who does what, and what may go wrong.
type Config struct {
	// Replicas of each placement group, default 1; Nodes lend memory, default as many; the
	// chain of the i-th of PGs (default 1) begins at the i-th of them. The one shard is
	// in the first.
	Replicas, Nodes, PGs int
	// Missing copies of each chain: the directory makes them anew.
	Missing int
	// Segments of the shard, default 1. Children is for how many more arrays like it
	// each index has room.
	Segments, Children int
	// Full: no memory node has room for another region.
	Full bool
	// TwoExtents lets the heap reach into a second extent, for recalls of the first.
	TwoExtents bool
	Scripts    [][]Step
	// Txns are the transactions of scripts. Status is how many status words each client has, the i-th in the i-th
	// placement group. Halves: there are two shards, the second in the second placement group; keys from 10 on with an
	// odd tens digit are in it.
	Txns   [][]Part
	Status int
	Halves bool
	// Together: transactions that can be are tried as one chain first.
	Together bool
	// Heirs is how many clients, the last ones, begin without status words. Then the directory grants those of sessions
	// that have ended again, once a janitor has settled what these left.
	Heirs int
	// Patient: who meets an undecided transaction waits for it once before aborting it. Otherwise it is aborted at
	// once, which is more than anybody else does.
	Patient bool
	// Long says which of each client's values go to chunks, however short they are: the n-th if bit n%8 is set.
	Long uint8
	// Payload is what each chunk of a long value holds, bytes. 0: as the directory says.
	Payload uint32
	// Apart says which of each client's values go straight from and to their caller's memory, likewise.
	Apart uint8
	// Pins says which of each client's values are pinned, likewise, until the clock has moved on twice. Evictions pass
	// over them, unless of what they find more than a share of PinQuota is pinned.
	Pins     uint8
	PinQuota float64
	// Synchronous: the provider executes WRs within PostSend, as shm does, and clients try what needs
	// no task first.
	Synchronous bool
	// BulkFrom: chains of so many bytes go by a second queue pair to the memory node, if the provider is not
	// Synchronous. 0: there is none.
	BulkFrom int
	// Lanes of each client, default 1, and operations under way at once on each.
	Lanes, Window int
	Janitors      int
	// Setup runs to its end before the schedule begins, by client 0.
	Setup []Step
	// Warm makes every client read every key of Setup first, so that it starts
	// with hints.
	Warm bool
	// Mirror is for how many bytes of images of groups each client has room. Warm clients then begin with images
	// instead of hints: they have read keys beside those of Setup, which are absent.
	Mirror int
	// Fill is how many slots of the keys' home group are taken by other keys, all of
	// which stay where they are when the shard splits.
	Fill int
	// FillStash is how many slots of the stash are.
	FillStash int
	// OVF: the keys' groups overflowed to the stash once.
	OVF bool
	// Cache: there are access words, clients note what they use, and they evict when they
	// lack memory or a slot.
	Cache bool
	// Tier: there is a volume for objects. DiskFails is how often it is out of reach when it is asked for something.
	// Lost is how often it loses an object by itself, GivenUp how often an operator gives up all of it.
	Tier                     bool
	DiskFails, Lost, GivenUp int
	// Words: there are access words though it is a store.
	Words bool
	// Units is what each client may take of the heap, HeapUnits how large that is, if it
	// is to be tight; then one client takes from another what the directory has back.
	Units     uint32
	HeapUnits int
	// These are budgets: how often each fault may be chosen.
	Crashes, Pauses, Deadlines, Failures int
	NodeCrashes, NodePauses              int // memory lost; not heard by the directory for a while
	// Restarts is how often the process of a memory node may end and the next one take over its memory, which memory
	// nodes keep then. NewKeys: with other rkeys, each of which was another's.
	Restarts int
	NewKeys  bool
	// Retains: a memory node that was declared lost retains what it held, and offers it. With Restarts they do so
	// anyway.
	Retains bool
	// Beside: each memory node, which keeps its memory, has the only copy of a placement group of another namespace, so
	// that it is waited for. Nobody of that is in the schedule.
	Beside  bool
	Leaders int // directory crashes
	// Rots is how often a byte of a linked record may change in one copy by itself, while all others have it whole.
	Rots int
	// LastCopy: a memory node may be lost with the only copy. The schedule sees to it that no
	// key is lost with it.
	LastCopy bool
	// Epochs is how often the reclaim epoch E may advance; 0 leaves out renewals that nothing else needs. Leap
	// is by how much, default 1.
	Epochs int
	Leap   uint64
	// Losses is how many renewals' replies do not come in time: the message, or its reply, comes
	// later, twice, or never.
	Losses int
	// Waits: operations wait for memory that is on its way. Stingy: what is granted is as
	// small as can be, so that others soon lack it. Reclaims: the directory begins counts and
	// recalls by itself. InPlace: a recall leaves what is linked where it is.
	Waits, Stingy, Reclaims, InPlace bool
	// Speculative: placement groups publish speculatively.
	Speculative bool
	// Emptied is how many units at the heap's start such a recall empties after all.
	Emptied uint32
	// Clock is how often the clock may move on, by more than any PutEx lives, and by half of what a pin lasts.
	Clock int
	// Acts are begun in any order, each once.
	Acts []Act
	// ReadPieces and WritePieces tear messages.
	ReadPieces, WritePieces int
	// MaxSteps ends a schedule; the rest runs without faults.
	MaxSteps int
}

// changes reports whether the map may change.
func (c *Config) changes() bool {
	return len(c.Acts)+c.NodeCrashes+c.NodePauses+c.Restarts+c.Children+c.Missing > 0 || c.Reclaims
}

// keeps reports whether memory nodes keep their memory.
func (c *Config) keeps() bool { return c.Restarts > 0 || c.Beside }

func (c *Config) ensureDefaults() {
	c.Replicas = max(c.Replicas, 1)
	c.Nodes = max(c.Nodes, c.Replicas)
	c.PGs = max(c.PGs, 1)
	c.Segments = max(c.Segments, 1)
	c.Lanes = max(c.Lanes, 1)
	c.Window = max(c.Window, 1)
	c.Leap = max(c.Leap, 1)
	if c.MaxSteps == 0 {
		c.MaxSteps = 3000
	}
	if c.Units == 0 {
		c.Units = 32
	}
}

const (
	// lease is so long that what a wait adds to a client's clock never matters.
	lease    = int64(1 << 50)
	never    = int64(1 << 60)
	fillUnit = 1 // units of a filler's record
	// extraUnits are for clients that come when the schedule is over.
	extraUnits = 64
	// Records put to expire live for ttlMillis, and the clock moves in steps of stepMillis.
	ttlMillis  = 2000
	stepMillis = 4000
)

// World is one run of a Config.
type World struct {
	cfg    Config
	fab    *sim.Fabric
	fiber  *fiber              // that runs
	quick  [index.NumKinds]int // operations that needed no task
	wentOn int                 // PUTs that began without one, and ended in one
	// Processes that took over memory and were registered, and that were refused; verbs that landed between two
	// processes.
	kept, tooLate, between int
	thawed                 uint64 // E when the last thaw of a placement group was planned: all sessions had quiesced
	retained, believed     int    // regions made of what was retained; words of them that readers believe
	nodes                  []*node
	incs                   uint64
	cls                    []*cl // scripts first, then janitors, then those that come at the end

	// The directory: the replicated state, its present leader, what that has planned
	// and not done.
	st        *fsm.State
	ld        *lead.Leader
	term      uint64
	backs     []*fsmpb.Command // proposed and not applied
	now       int64
	due       []lead.Step
	stale     bool // plan again
	stamp     int  // of what look finds, which it found at looked
	looked    int
	freed     int  // extents recalled and free again
	recalls   bool // some extent is being recalled
	epoch     uint64
	least     uint64
	chores    []chore
	claims    []*dirpb.Job // by client
	may       []bool       // by act
	views     []*engine.View
	acts      []bool // begun
	scannedAt map[place]int
	chains    map[uint32][]*region // of the present state
	gone      map[uint64]bool      // incarnations that the directory has declared lost
	parted    map[parted]bool      // members that it has declared lost though their memory nodes stay up
	alone     int                  // how often
	blocks    []*block
	sweeps    map[uint32]*sweeping // by placement group
	dirSum    uint64
	dirSumOK  bool

	regions []*region
	byKey   map[uint64]*region // both rkeys
	heapLo  uint64             // units: where records may be, in every region
	// Of every region: the index, and the access words behind it, if any.
	indexBytes, accessBytes uint64
	regionBytes             uint64
	capacity                uint64          // bytes that a memory node lends
	relevant                map[[2]int]bool // segment and group that a key of the scope may be in

	losses, epochs, crashes, pauses, dead, fails, nodeCrashes, nodePauses, restarts, leaders, clocks int

	tier      tier
	decided   map[slotAt][]layout.Word // by heads, in order, where words are published speculatively
	tentative int                      // how often a replica behind the head took a word before it did
	rots      int
	rotten    []rot
	healedAt  int // the step at which the last of them was written over
	mended    int // copies that operations have written anew

	millis   uint64 // the Unix time of all clients
	expiring []*expiring
	pins     pinned

	step    int
	effects int // changes of words, and of what else may end a wait
	hist    []Event
	scans   []scanned
	// streamed counts Streams that failed, and those that were linked
	streamed [2]int
	held     held
	lent     []*lent
	histSum  uint64
	Trace    []string
	tracing  bool
	reduce   bool // leave out choices whose order cannot matter
	setup    bool

	events  []sim.Event
	choices []choice
	owners  []*conn // by queue pair

	unlinked map[place]*unlinked
	linked   map[named]linked
	versions map[uint64]string
	err      error
}

// parted is a member of a placement group.
type parted struct {
	pg, node   uint32
	inc, since uint64
}

// place is the start of a record's place; with an extent's number instead of a unit, an extent.
type place struct {
	pg, unit uint32
}

// keyOf is a key by its number. Hashes of keys are chosen, not computed. Keys below 10 meet in one group and do not
// move when the shard splits. For those from 10 on the tens count: 1 moves with a split, 2
// lies in another group, 4 moves with a second split, 8 goes to the other segment of a shard that grows
// to two. Keys whose last digit is 0 or 1
// share the fingerprint.
func keyOf(i int) []byte { return fmt.Appendf(nil, "key%d", i) }

func hashOf(i int) (hash, check uint64) {
	fp := uint64(7)
	if i%10 >= 2 {
		fp = uint64(i % 10)
	}
	hash = 3<<12 | fp
	t := i / 10
	if t&1 != 0 {
		hash |= 1 << 63
	}
	if t&2 != 0 {
		hash ^= 6 << 12 // group 5
	}
	if t&4 != 0 {
		hash |= 1 << 62
	}
	if t&8 != 0 {
		hash |= 1 << 43
	}
	return hash, uint64(i+1) * 0x9e3779b97f4a7c15
}

// hashOfKey is the namespace's hash for janitors: of keys and of fillers.
func hashOfKey(key []byte) uint64 {
	n := 0
	for _, c := range key {
		if c >= '0' && c <= '9' {
			n = n*10 + int(c-'0')
		}
	}
	if key[0] == 'f' {
		return 3<<12 | uint64(100+n)
	}
	h, _ := hashOf(n)
	return h
}

// NewWorld builds the store and runs the Config's setup.
func NewWorld(cfg Config, trace bool) (*World, error) {
	cfg.ensureDefaults()
	w := &World{cfg: cfg, tracing: trace, byKey: map[uint64]*region{}, unlinked: map[place]*unlinked{},
		linked: map[named]linked{}, sweeps: map[uint32]*sweeping{}, millis: 1_700_000_000_000,
		scannedAt: map[place]int{}, gone: map[uint64]bool{}, parted: map[parted]bool{},
		acts: make([]bool, len(cfg.Acts)), relevant: map[[2]int]bool{}, stale: true, stamp: 1, capacity: 1 << 40}
	w.fab = sim.New(sim.Options{Manual: true, ReadPieces: cfg.ReadPieces, WritePieces: cfg.WritePieces,
		Synchronous: cfg.Synchronous, SharedWire: cfg.BulkFrom > 0, Wait: w.wait})
	for _, s := range append([][]Step{cfg.Setup}, cfg.Scripts...) {
		for _, x := range s {
			if x.Verb == Txn || x.Verb == Look {
				continue
			}
			h, _ := hashOf(x.Key)
			home, _ := layout.GroupOff(h, uint32(cfg.Segments))
			c := int(home / layout.SegmentSize)
			w.relevant[[2]int{c, int(home%layout.SegmentSize) / layout.GroupSize}] = true
			w.relevant[[2]int{c, layout.StashGroup}] = true
		}
	}
	w.relevantTxns()
	// The last segment is for status words: moves leave room for them.
	w.indexBytes = layout.RegionPageSize + uint64((1+cfg.Children)*cfg.Segments+1)*layout.SegmentSize
	if cfg.Cache || cfg.Words {
		w.accessBytes = w.indexBytes
	}
	own := uint64(cfg.Units)*uint64(len(cfg.Scripts)+cfg.Janitors) + extraUnits
	start := (w.indexBytes + w.accessBytes) / layout.UnitSize
	w.heapLo = start
	end := start + own + uint64((cfg.Fill+cfg.FillStash)*fillUnit)
	if cfg.HeapUnits > 0 {
		end = start + uint64(cfg.HeapUnits)
	}
	if cfg.TwoExtents {
		// The heap begins near the end of the first one: a recall needs room for it.
		w.heapLo = layout.ExtentUnits - own
		start, end = w.heapLo, layout.ExtentUnits+2*own
	}
	w.regionBytes = end * layout.UnitSize
	for i := range cfg.Nodes {
		if err := w.addNode(i); err != nil {
			return nil, err
		}
	}
	if err := w.found(start, end); err != nil {
		return nil, err
	}
	w.fill()
	for i := range len(cfg.Scripts) + cfg.Janitors {
		if err := w.addClient(i >= len(cfg.Scripts)); err != nil {
			return nil, err
		}
	}
	w.setup = true
	if len(cfg.Setup) > 0 {
		w.runScript(w.cls[0], cfg.Setup)
	}
	if cfg.Warm {
		keys := map[int]bool{}
		var reads []Step
		for _, s := range cfg.Setup {
			if cfg.Mirror > 0 {
				s.Key = s.Key/10*10 + 9
			}
			if !keys[s.Key] {
				reads = append(reads, Step{Get, s.Key})
			}
			keys[s.Key] = true
		}
		for _, c := range w.cls[:len(cfg.Scripts)] {
			w.runScript(c, reads)
		}
	}
	w.setup = false
	if w.err != nil {
		return nil, w.err
	}
	w.Trace = nil
	for i, s := range cfg.Scripts {
		w.cls[i].script, w.cls[i].pos = s, 0
	}
	return w, nil
}

// found makes the directory's first state: one namespace that is in use.
func (w *World) found(start, end uint64) error {
	cfg := &w.cfg
	var rows []fsm.Row
	var errs error
	add := func(kind byte, id uint32, m proto.Message) {
		key := []byte{kind}
		if id != 0 {
			key = binary.BigEndian.AppendUint32(key, id)
		}
		v, err := proto.Marshal(m)
		if err != nil {
			errs = err
		}
		rows = append(rows, fsm.Row{Key: key, Value: v})
	}
	add('m', 0, &fsmpb.Meta{ClusterId: "sim", ClusterKey: []byte("k"), MapVersion: 1, NodeId: uint32(cfg.Nodes),
		NamespaceId:  uint32(1 + b2i(cfg.Beside)),
		PgId:         uint32(cfg.PGs + b2i(cfg.Beside)*cfg.Nodes),
		ShardId:      uint32(1 + b2i(cfg.Halves) + b2i(cfg.Beside)),
		EpochCeiling: 1})
	mode := dirpb.NamespaceMode_NAMESPACE_STORE
	if cfg.Cache {
		mode = dirpb.NamespaceMode_NAMESPACE_CACHE
	}
	add('w', 1, &dirpb.Namespace{Id: 1, Name: "sim", Mode: mode, Replicas: uint32(cfg.Replicas)})
	used := make([]uint64, cfg.Nodes)
	for i := range cfg.PGs {
		pg := &dirpb.PlacementGroup{Id: uint32(i + 1), NamespaceId: 1, Epoch: 1, State: dirpb.PGState_PG_ACTIVE,
			RegionBytes: w.regionBytes, IndexBytes: w.indexBytes, AccessBytes: w.accessBytes, Generation: 1,
			ChangedVersion: 1,
			StatusArrays:   w.statusArray()}
		for k := range cfg.Replicas - cfg.Missing {
			n := w.nodes[(i+k)%cfg.Nodes]
			r, err := w.makeRegion(n, &dirpb.WantRegion{PgId: pg.Id, NamespaceId: 1, RegionBytes: w.regionBytes,
				IndexBytes: w.indexBytes})
			if err != nil {
				return err
			}
			used[n.i] += w.regionBytes
			pg.Members = append(pg.Members, &dirpb.Member{NodeId: n.id, Incarnation: n.inc, Boot: n.boot,
				Keys: r.keys()})
		}
		add('p', pg.Id, pg)
		h := &fsmpb.Heap{PgId: pg.Id, Start: start, Watermark: w.heapLo, End: end, IndexNext: layout.RegionPageSize}
		if i == 0 || i == 1 && cfg.Halves {
			h.IndexNext += uint64(cfg.Segments) * layout.SegmentSize
			h.Watermark += uint64((cfg.Fill + cfg.FillStash) * fillUnit)
		}
		if cfg.Status > 0 {
			h.IndexNext = w.statusBase() + layout.SegmentSize // no shard gets it
		}
		add('h', pg.Id, h)
	}
	if cfg.Beside {
		add('w', 2, &dirpb.Namespace{Id: 2, Name: "beside", Mode: dirpb.NamespaceMode_NAMESPACE_STORE, Replicas: 1})
		for i, n := range w.nodes {
			id := uint32(cfg.PGs + 1 + i)
			r, err := w.makeRegion(n, &dirpb.WantRegion{PgId: id, NamespaceId: 2, RegionBytes: w.regionBytes,
				IndexBytes: w.indexBytes})
			if err != nil {
				return err
			}
			used[i] += w.regionBytes
			add('p', id, &dirpb.PlacementGroup{Id: id, NamespaceId: 2, Epoch: 1, State: dirpb.PGState_PG_ACTIVE,
				RegionBytes: w.regionBytes, IndexBytes: w.indexBytes,
				AccessBytes: w.accessBytes, Generation: 1, ChangedVersion: 1, Members: []*dirpb.Member{
					{NodeId: n.id, Incarnation: n.inc, Boot: n.boot, Keys: r.keys()}}})
			add('h', id, &fsmpb.Heap{PgId: id, Start: start, Watermark: start + 1, End: end,
				IndexNext: layout.RegionPageSize + layout.SegmentSize})
		}
		sh := uint32(2 + b2i(cfg.Halves))
		add('x', sh, &dirpb.Shard{Id: sh, NamespaceId: 2, PgId: uint32(cfg.PGs + 1), Offset: layout.RegionPageSize,
			Segments: 1})
	}
	for i := range 1 + b2i(cfg.Halves) {
		add('x', uint32(i+1), &dirpb.Shard{Id: uint32(i + 1), NamespaceId: 1, PgId: uint32(i + 1),
			Offset: layout.RegionPageSize, Segments: uint32(cfg.Segments),
			Depth: uint32(b2i(cfg.Halves)), Prefix: uint32(i)})
	}
	for _, n := range w.nodes {
		if cfg.Full {
			w.capacity = used[n.i]
		}
		add('n', n.id, &dirpb.Node{Id: n.id, Name: n.name(), Incarnation: n.inc, State: dirpb.NodeState_NODE_UP,
			Domain: n.name(), Boot: n.boot, Keeps: cfg.keeps(),
			Endpoints: []*dirpb.Endpoint{{Provider: "sim", Addr: n.addr()}}, CapacityBytes: w.capacity,
			UsedBytes: used[n.i]})
	}
	if errs != nil {
		return errs
	}
	var err error
	if w.st, err = fsm.Load(rows); err != nil {
		return err
	}
	// Rows are of level 0, as the version wrote them that knew no levels.
	if err := fsm.Apply(
		w.st, &fsmpb.Command{Op: &fsmpb.Command_Raise{Raise: &fsmpb.Level{Level: fsm.Level}}}).Err; err != nil {
		return err
	}
	w.newLeader()
	// The first reclaim epochs.
	for _, s := range w.ld.Plan(w.st, time.Duration(w.now)) {
		w.apply(s.Do)
	}
	w.apply(&fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: epochBlock}}})
	w.directoryChanged()
	return w.err
}

// fill takes slots of the keys' home group, and of its stash, with other keys.
func (w *World) fill() {
	const home, stash = layout.RegionPageSize + 3*layout.GroupSize, layout.RegionPageSize +
		layout.StashGroup*layout.GroupSize
	for _, r := range w.chain(1) {
		if w.cfg.OVF {
			for _, g := range []uint64{3, 5} {
				binary.LittleEndian.PutUint64(r.bytes[layout.RegionPageSize+g*layout.GroupSize:],
					uint64(layout.FlagOVF))
			}
		}
		for i := range w.cfg.Fill + w.cfg.FillStash {
			key := fmt.Appendf(nil, "fill%d", i)
			unit := uint32(w.heapLo) + uint32(i*fillUnit)
			layout.EncodeRecord(r.bytes[uint64(unit)*layout.UnitSize:], layout.RecordHeader{Version: 1, Writer: 1}, key,
				nil)
			word := layout.MakeLive(0, layout.FP(hashOfKey(key)), 0, unit)
			at := home + layout.SlotOff(i)
			if i >= w.cfg.Fill {
				at = stash + layout.SlotOff(i-w.cfg.Fill)
			}
			binary.LittleEndian.PutUint64(r.bytes[at:], uint64(word))
			s := r.slot(at)
			s.now, s.past = word, append(s.past, word)
		}
	}
}

// memories keep regions' bytes for the next World; they are zero.
var memories struct {
	sync.Mutex
	free map[int][][]byte
}

func takeMemory(n int) []byte {
	memories.Lock()
	defer memories.Unlock()
	if l := memories.free[n]; len(l) > 0 {
		b := l[len(l)-1]
		memories.free[n] = l[:len(l)-1]
		return b
	}
	return make([]byte, n)
}

// Close gives back the memory that the world used.
func (w *World) Close() {
	for _, c := range w.cls {
		c.stopFibers()
	}
	for _, r := range w.regions {
		clear(r.bytes[:w.indexBytes+w.accessBytes])
		clear(r.bytes[w.heapLo*layout.UnitSize:])
		memories.Lock()
		if memories.free == nil {
			memories.free = map[int][][]byte{}
		}
		memories.free[len(r.bytes)] = append(memories.free[len(r.bytes)], r.bytes)
		memories.Unlock()
		r.bytes = nil
	}
	w.regions = nil
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (w *World) tick() int64 { w.step++; return int64(w.step) }

func (w *World) fail(err error) {
	if w.err == nil && err != nil {
		w.err = err
	}
}

// runScript runs steps of one client alone, to their end.
func (w *World) runScript(c *cl, steps []Step) {
	save, at := c.script, c.pos
	c.script, c.pos = steps, 0
	w.runAllowed(func(ch choice) bool { return ch.c == c.i && ch.kind < faults && ch.kind != chRenewSend })
	if len(c.run) > 0 || c.pos < len(c.script) {
		w.fail(fmt.Errorf("client %d alone does not end: %v, %v enabled\n%s", c.i, c.underWay(), w.enabled(),
			strings.Join(w.Trace, "\n")))
	}
	c.script, c.pos = save, at
}

// runAllowed makes allowed choices, those of whoever had none for longest first, until
// there are none, or nobody gets on but those who look again and again in vain.
func (w *World) runAllowed(allowed func(choice) bool) {
	served := make([]int, len(w.cls)+2)
	wakes := make([]int, len(w.cls)+2)
	for n := 1; w.err == nil; n++ {
		best := -1
		var at int
		for i, ch := range w.enabled() {
			if !allowed(ch) || ch.kind == chWake && wakes[ch.c+1] > 12 {
				continue
			}
			t := served[ch.c+1]
			if ch.kind == chWake {
				t += 1 << 30
			}
			if ch.kind == chLearn {
				t = -1 // maps come by themselves; with the keys of an old one it may dial again and again
			}
			if best < 0 || t < at {
				best, at = i, t
			}
		}
		if best < 0 {
			return
		}
		ch := w.choices[best]
		served[ch.c+1] = n
		if ch.kind == chWake {
			wakes[ch.c+1]++
		}
		w.do(ch)
		if n > 20_000 {
			w.fail(fmt.Errorf("no end of it:\n%s", strings.Join(w.Trace[max(0, len(w.Trace)-40):], "\n")))
		}
	}
}

// rounds is how many times everything may get on, and all renew, until all is done.
const rounds = 400

// finish lets everything go on without faults until nothing is left to do: no operation
// under way, no job, every placement group whole.
func (w *World) finish() {
	w.reduce = false
	for _, n := range w.nodes {
		n.deaf = false
		switch {
		case n.crashed:
			w.do(choice{kind: chNodeBack, c: -1, node: uint32(n.i)})
		case n.down:
			w.do(choice{kind: chAdopt, c: -1, node: uint32(n.i)})
		}
	}
	for _, c := range w.cls {
		if c.paused {
			w.do(choice{kind: chResume, c: c.i})
		}
	}
	for round := 0; w.err == nil; round++ {
		w.runAllowed(func(ch choice) bool {
			return ch.kind < faults && ch.kind != chRenewSend && ch.kind != chAdvance && ch.kind != chAct
		})
		why := w.unfinished()
		if why == "" || w.err != nil {
			return
		}
		if round == rounds {
			w.fail(fmt.Errorf("no end: %s", why))
			return
		}
		if (len(w.st.Jobs()) > 0 || w.findBlock(blockDead) != nil) && !w.anyJanitor() {
			if err := w.addClient(true); err != nil {
				w.fail(err)
				return
			}
		}
		if round > patience {
			w.giveUp()
		}
		// Somebody waits for memory, for a fence, for the others: let time pass.
		if w.silent() {
			w.do(choice{kind: chTick, c: -1})
		}
		w.now++
		w.ld.Run(w.st, w.cfg.Leap)
		w.touch()
		for _, c := range w.cls {
			if c.able() {
				c.drift += 1 << 20
				c.woken = -1
				if c.renew.stage == 0 {
					w.do(choice{kind: chRenewSend, c: c.i})
				}
			}
		}
	}
}

// patience is for how many rounds an operation waits for memory, or for a slot, in a cache,
// which says of neither that there is none.
const patience = 20

// giveUp ends what waits for memory or a slot of a cache: perhaps all is with other clients.
func (w *World) giveUp() {
	for _, c := range w.cls {
		if !w.cfg.Cache || !c.able() {
			continue
		}
		for i := len(c.run) - 1; i >= 0; i-- {
			if r := c.run[i]; r.e != nil && !c.within(r.lane) &&
				(r.t.Waiting() == index.Alloc || r.t.Waiting() == index.Grow) {
				c.abandon(r, engine.ErrTimeout)
			}
		}
	}
}

func (w *World) anyJanitor() bool {
	for _, c := range w.cls {
		if c.janitor && c.able() {
			return true
		}
	}
	return false
}

// unfinished says what is left to do, "" if nothing.
func (w *World) unfinished() string {
	for _, c := range w.cls {
		if c.able() && (len(c.run) > 0 || len(c.orphans) > 0 || c.pos < len(c.script) || c.job != nil) {
			return fmt.Sprintf("client %d: %v", c.i, c.underWay())
		}
		if c.life != live && w.st.Session(c.id) != nil {
			return fmt.Sprintf("client %d is not fenced", c.i)
		}
	}
	if jobs := w.st.Jobs(); len(jobs) > 0 {
		return fmt.Sprintf("job %v", jobs[0])
	}
	if b := w.findBlock(blockDead); b != nil {
		return fmt.Sprintf("status words of client %d are not free", b.owner.i)
	}
	for _, pg := range w.st.PGs(1) {
		if pg.State != dirpb.PGState_PG_ACTIVE || pg.Joining || pg.Planned != nil || pg.Leaving != nil ||
			len(pg.Recalled) > 0 {
			return fmt.Sprintf("placement group %v", pg)
		}
	}
	return ""
}

// Finish runs what is left without faults, then reads every key with a client
// that knows nothing, also after all copies but one are lost, and checks the history
// and the accounts.
func (w *World) Finish() error {
	w.finish()
	w.healAll()
	if w.err != nil {
		return w.err
	}
	w.checkUnits()
	w.readAll()
	if w.cfg.Replicas > 1 && w.err == nil && w.histSum%4 == 0 {
		w.loseCopies()
		w.finish()
		w.readAll()
	}
	if w.err != nil {
		return w.err
	}
	if err := errors.Join(w.checkScans(), w.checkLent()); err != nil {
		return err
	}
	return CheckHistory(w.hist)
}

// readAll reads every key by a new client.
func (w *World) readAll() {
	keys := map[int]bool{}
	var reads []Step
	add := func(k int) {
		if !keys[k] {
			keys[k] = true
			reads = append(reads, Step{Get, k})
		}
	}
	for i := range w.hist {
		if w.hist[i].Verb != Txn {
			add(w.hist[i].Key)
		}
		for _, p := range w.hist[i].Parts {
			add(p.Key)
		}
	}
	if len(reads) == 0 || w.err != nil {
		return
	}
	if err := w.addClient(false); err != nil {
		w.fail(err)
		return
	}
	w.runScript(w.cls[len(w.cls)-1], reads)
}

// Sum identifies the state for the visited set.
func (w *World) Sum() uint64 {
	h := w.histSum
	mix := func(x uint64) {
		h = (h ^ x) * 0x9e3779b97f4a7c15
		h ^= h >> 31
	}
	for _, r := range w.regions {
		if w.cfg.Clock > 0 { // otherwise nothing depends on access words
			mix(xxh3.Hash(r.bytes[w.indexBytes:][:w.accessBytes]))
		}
		mix(xxh3.Hash(r.bytes[:w.indexBytes]))
		mix(xxh3.Hash(r.bytes[w.heapLo*layout.UnitSize:]))
	}
	mix(w.fab.QPHash())
	if !w.dirSumOK {
		w.dirSumOK = true
		w.dirSum = 0
		for _, r := range w.st.Rows() {
			w.dirSum = xxh3.HashSeed(r.Value, w.dirSum+uint64(r.Key[0]))
		}
	}
	mix(w.dirSum)
	e, least := w.ld.Epochs()
	mix(e)
	mix(least)
	mix(uint64(len(w.due)))
	mix(w.blockSum())
	mix(uint64(len(w.backs))<<8 | uint64(w.losses)<<32)
	w.ld.OnTheWay(func(pg, unit, units uint32) { h += xxh3.HashString(fmt.Sprint(pg, unit, units)) })
	mix(uint64(w.crashes)<<56 | uint64(w.dead)<<48 | uint64(w.fails)<<40 | uint64(w.pauses)<<32 |
		uint64(w.nodeCrashes)<<24 | uint64(w.nodePauses)<<16 | uint64(w.leaders)<<8 | uint64(w.clocks))
	mix(uint64(w.restarts))
	mix(w.tierSum())
	for i, b := range w.acts {
		if b {
			mix(uint64(i))
		}
	}
	for _, n := range w.nodes {
		x := n.inc << 2
		if n.crashed {
			x |= 1
		}
		if n.deaf {
			x |= 2
		}
		if n.ranOut {
			x |= 1 << 40
		}
		x |= n.boot<<48 | uint64(b2i(n.down))<<41 | uint64(b2i(n.unknown))<<42 | uint64(b2i(n.overtaken))<<43
		mix(x)
	}
	for _, c := range w.cls {
		mix(c.sum)
		mix(uint64(c.pos)<<8 | uint64(c.life))
		mix(uint64(c.renew.stage) | c.renew.ask.Renew.GetReportEpoch()<<4 | c.reported()<<24 |
			c.renew.reply.GetMinEpoch()<<44)
		for _, r := range c.late {
			mix(uint64(r.stage)<<8 | uint64(r.served)<<4 | r.ask.Renew.GetNumber()<<16)
		}
		mix(c.dirAcked<<32 | c.dirQuiesced)
		if c.woken == w.effects {
			mix(1)
		}
		for _, x := range c.status {
			mix(x.seq<<1 | uint64(b2i(x.busy)))
		}
		for _, t := range c.txns {
			mix(uint64(t.stage)<<8 | uint64(t.left)<<4 | uint64(t.out))
		}
		if c.paused {
			mix(2)
		}
		if c.ranOut {
			mix(3)
		}
		for _, x := range c.watched {
			mix(x.began<<4 | uint64(b2i(x.hold.Stands()))<<1 | uint64(b2i(x.hold.For != 0)) | 4)
		}
	}
	return h
}

// History is the operations recorded so far.
func (w *World) History() []Event { return w.hist }

func (w *World) String() string { return strings.Join(w.Trace, "\n") }
