package index_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/layout"
)

const (
	shardOff   = layout.RegionPageSize
	indexBytes = shardOff + 5*layout.SegmentSize // one segment, and room for a child and to see a stray access
	heapLo     = (indexBytes + layout.UnitSize - 1) / layout.UnitSize
	homeGroup  = 3
)

// world is a placement group in memory: replicas as byte slices, and the
// clients that work on them. Verbs take effect at once, in the order given.
type world struct {
	on       *index.Op // whose accesses take effect
	pg       index.PG
	region   [3][]byte
	clients  []*client
	fenced   map[uint32]bool
	nextUnit uint32
	millis   uint64
	noRoute  bool
	quiet    bool            // accesses are not described
	covered  map[string]bool // steps reached
	// A move: child is where the shard's moved set goes, in this placement group or
	// in other's; nil: it does not move. moved: the map names only the child.
	child        *index.Route
	split, moved bool
	depth        uint8             // of the shard, which covers any prefix all the same
	other        *world            // placement group 2
	taken        []repair.UnitRun  // places, in the order in which they were taken
	left         map[string]string // places that were given up, and how
	wrong        []string          // places given up twice
	objects      map[layout.ObjectAt][]byte
	volumes      map[uint32]index.VolumeState // VolumeUp unless it is here
}

func newWorld(replicas uint8, heapUnits uint32) *world {
	w := &world{fenced: map[uint32]bool{}, nextUnit: heapLo, millis: 1000, covered: map[string]bool{},
		left: map[string]string{}, objects: map[layout.ObjectAt][]byte{}, volumes: map[uint32]index.VolumeState{}}
	w.pg = index.PG{ID: 1, Epoch: 1, Replicas: replicas, HeapLo: heapLo, HeapHi: heapLo + heapUnits}
	for r := range replicas {
		w.region[r] = make([]byte, heapLo*layout.UnitSize+heapUnits*layout.UnitSize)
	}
	return w
}

// asCache gives w access words. They lie behind the heap here, so that nothing else
// moves.
func (w *world) asCache() *world {
	w.pg.Cache, w.pg.AccessOff = true, uint64(len(w.region[0]))
	for r := range w.pg.Replicas {
		w.region[r] = append(w.region[r], make([]byte, indexBytes)...)
	}
	return w
}

// access is the access word of a slot of the home group, at the tail.
func (w *world) access(slot int) layout.AccessWord {
	return layout.AccessWord(
		binary.LittleEndian.Uint64(w.region[w.pg.Replicas-1][w.pg.AccessOff+home()+layout.SlotOff(slot):]))
}

// client is one session with one operation at a time; it is the operation's Env.
type client struct {
	w         *world
	id        uint32
	stamp     uint32
	version   uint64
	hints     map[string]index.Hint
	memory    int // allocations left; < 0: no limit
	places    []string
	op        *index.Op
	pos       int        // accesses of this round already performed
	order     []int      // in which they are
	rng       *rand.Rand // chains of different replicas run in an order that it chooses; nil: as they stand
	action    index.Action
	posted    bool // the round is not over
	verbs     int
	bytes     int      // that READs brought, and WRITEs took
	steps     []string // step of every round
	modified  int
	crowded   int                              // asks for more room
	images    []uint64                         // what Image was shown
	room      int                              // for so many of them
	txns      map[string]*index.Txn            // by key
	hit       bool                             // the latest CAS took effect
	unchained bool                             // no chain stops at a miss
	bases     map[index.StatusAt]layout.Status // by the status word with Seq 0: what it is to hold
}

func (w *world) client(id uint32) *client {
	for _, c := range w.clients {
		if c.id == id {
			return c
		}
	}
	c := &client{w: w, id: id, hints: map[string]index.Hint{}, memory: -1}
	w.clients = append(w.clients, c)
	return c
}

var _ index.Env = (*client)(nil)

func (c *client) Session() uint32 { return c.id }
func (c *client) Stamp() uint32   { c.stamp++; return c.stamp }

// Version keeps the client's number in the low digit.
func (c *client) Version(after uint64) uint64 {
	c.version = max(c.version, after)/10*10 + 10 + uint64(c.id)
	return c.version
}
func (c *client) NowMillis() uint64 { return c.w.millis }

func (c *client) Volume(id uint32) index.VolumeState {
	if s, ok := c.w.volumes[id]; ok {
		return s
	}
	return index.VolumeUp
}

// disk does what an operation asks of the tier. An object that is not there reads as zeroes.
func (c *client) disk(a index.Action) string {
	o := c.op
	if a == index.Fetch {
		x := &o.Object
		x.Got = make([]byte, x.Len)
		copy(x.Got, c.w.objects[x.At])
		if c.Volume(x.At.Volume) != index.VolumeUp {
			x.Got = nil
		}
		return fmt.Sprintf("read %d bytes at %#x of volume %d", x.Len, x.At.At, x.At.Volume)
	}
	at := layout.ObjectAt{Volume: 7, At: uint64(len(c.w.objects)+1) << 20}
	c.w.objects[at] = o.Tiered.Object
	o.Tiered.To = []layout.ObjectAt{at}
	return fmt.Sprintf("store %d bytes at %#x of volume 7", len(o.Tiered.Object), at.At)
}

// parent is the route of the shard that moves, or of all keys if none does.
func (w *world) parent() index.Route {
	r := index.Route{PG: &w.pg, ShardOff: shardOff, Segments: 1, MapVersion: 1, Depth: w.depth}
	if w.child != nil && !w.moved {
		r.Child, r.Split = w.child, w.split
	}
	return r
}

func (c *client) Route(hash uint64) (index.Route, bool) {
	r := c.w.parent()
	if c.w.moved {
		r.MapVersion++
		if c.w.split {
			r.Depth = 1
		}
		if !c.w.split || layout.HashBit(hash, 0) {
			v := r.MapVersion
			r = *c.w.child
			r.MapVersion = v
		}
	}
	return r, !c.w.noRoute
}
func (c *client) RouteShard(prefix uint64) (index.Route, bool) { return c.Route(prefix) }
func (c *client) RoutePG(id uint32, _ bool) (index.Route, bool) {
	return index.Route{PG: &c.w.of(id).pg, MapVersion: 1}, !c.w.noRoute
}
func (c *client) RouteMove(uint32) (index.Route, bool) {
	return c.w.parent(), !c.w.noRoute && c.w.child != nil && !c.w.moved
}
func (c *client) Chains(*index.PG) bool               { return !c.unchained }
func (c *client) ReadOnly() bool                      { return false }
func (c *client) HashOf(key []byte) uint64            { return hashOf(string(key)) }
func (c *client) Crowded(uint32)                      { c.crowded++ }
func (c *client) Hint(o *index.Op) (index.Hint, bool) { h, ok := c.hints[string(o.Key)]; return h, ok }
func (c *client) Remember(o *index.Op, h index.Hint)  { c.hints[string(o.Key)] = h }
func (c *client) Forget(o *index.Op)                  { delete(c.hints, string(o.Key)) }
func (c *client) Guess(*index.Op) (index.Hint, bool)  { return index.Hint{}, false }
func (c *client) Image(_ *index.Op, off uint64, g layout.Group) bool {
	c.images = append(c.images, off)
	return len(c.images) <= c.room
}
func (c *client) NoteDue(*index.Op) bool { return true }

// Note writes at once: nobody waits for it.
func (c *client) Note(o *index.Op, off uint64, w layout.Word, old layout.AccessWord, expiry, until uint64,
	born bool) {
	a := layout.MakeAccess(w, c.w.millis, old.Count()+1, expiry).At(max(until, c.w.millis))
	if o.Kind == index.Pin {
		a = layout.MakeAccess(w, c.w.millis, old.Count(), expiry).At(max(o.Expiry, c.w.millis))
	}
	w2 := c.w.of(o.Route.PG.ID)
	binary.LittleEndian.PutUint64(w2.region[w2.pg.Replicas-1][w2.pg.AccessOff+off:], uint64(a))
}

func (c *client) Buf(_ *index.Op, n int) []byte { return make([]byte, n, (n+7)&^7) }

// Into has memory for every GET.
func (c *client) Into(_ *index.Op, n int) []byte { return make([]byte, n) }

// Show shows what the reader's region has.
func (c *client) Show(o *index.Op, off uint64, n int) []byte {
	w := c.w.of(o.Route.PG.ID)
	return w.region[o.Route.PG.Reader()][off:][:n:n]
}

func (c *client) SumShown(_ *index.Op, _, _ uint64, crc uint32, b []byte) uint32 {
	return layout.ValueCRC(crc, b)
}

func (c *client) Alloc(pg *index.PG, code uint8) (uint32, uint16, uint8, bool) {
	n := layout.UnitsOf(code)
	w := c.w.of(pg.ID)
	if c.memory == 0 || w.nextUnit+n > pg.HeapHi {
		return 0, 0, 0, false
	}
	for pg.IsRecalled(w.nextUnit) {
		w.nextUnit++
	}
	c.memory--
	u := w.nextUnit
	w.nextUnit += n
	w.taken = append(w.taken, repair.UnitRun{Unit: u, Units: n})
	return u, 0, code, true
}

func (c *client) place(what string, pg *index.PG, w layout.Word) {
	name := unitName(w.Unit())
	if pg.ID == 2 {
		name = "pg 2 " + name
	}
	c.places = append(c.places, fmt.Sprintf("%s %s", what, name))
	if what == "leak" {
		return // perhaps still linked
	}
	if was, ok := c.w.left[name]; ok {
		c.w.wrong = append(c.w.wrong, fmt.Sprintf("%s: %s, then %s", name, was, what))
	}
	c.w.left[name] = fmt.Sprintf("%s by s%d", what, c.id)
}
func (c *client) Unuse(pg *index.PG, w layout.Word)    { c.place("unuse", pg, w) }
func (c *client) Unlinked(pg *index.PG, w layout.Word) { c.place("unlinked", pg, w) }
func (c *client) Retire(pg *index.PG, w layout.Word)   { c.place("retire", pg, w) }
func (c *client) Leak(pg *index.PG, w layout.Word)     { c.place("leak", pg, w) }

func (w *world) of(id uint32) *world {
	if id == 2 {
		return w.other
	}
	return w
}

// mem is the memory that the operation works on.
func (c *client) mem() *world {
	w := c.w.of(c.op.Route.PG.ID)
	w.on = c.op
	return w
}

// hashOf puts every key in one group, but "…@5" in group 5. A key's first letter is its
// fingerprint, except for the fillers f00, f01, …; a capital belongs to the moved
// set of a split. The letters take turns in where they go if the shard grows.
func hashOf(key string) uint64 {
	fp := uint64(key[0])
	group, bit := uint64(homeGroup), uint64(0)
	var n uint64
	if _, err := fmt.Sscanf(strings.ToLower(key), "f%02d", &n); err == nil {
		fp = 0x800 | n
	}
	if _, at, ok := strings.Cut(key, "@"); ok {
		_, _ = fmt.Sscan(at, &group)
	}
	if key[0] >= 'A' && key[0] <= 'Z' {
		bit = 1 << 63
	}
	return bit | uint64(key[0]%4)<<42 | group<<12 | fp
}

// start begins an operation given in words:
//
//	get k
//	exists k
//	pin k expiry=MS
//	put k v [if-absent | if-present | if=VERSION] [expiry=MS] [pinned=SECONDS] [whole=BYTES]
//	del k [if=VERSION]
//	append k v    refuses a value that ends with v
//	refuse k
//	touch k
//	demote k, promote k
//	readdress k to=A [at=B] [version=V], drop k, locate k  about the object of the key's stub, or about another
//	scan, raw
//	sync, scrub, move, clean [wipe], abandon, relocate, evict k [spare]  a janitor's
func (c *client) start(words []string) error {
	o := &index.Op{}
	if len(words) > 1 {
		o.Key = []byte(words[1])
		o.Hash = hashOf(words[1])
	}
	rest := words[min(2, len(words)):]
	switch words[0] {
	case "get":
		o.Kind = index.Get
	case "exists":
		o.Kind = index.Exists
	case "pin":
		o.Kind = index.Pin
	case "del":
		o.Kind = index.Delete
	case "put":
		o.Kind = index.Put
		o.Value = valueOf(rest[0])
		rest = rest[1:]
	case "append":
		suffix := rest[0]
		rest = rest[1:]
		o.Kind = index.Modify
		o.Modify = func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
			c.modified++
			if cur == nil {
				return []byte(suffix), 0, 0, nil
			}
			if bytes.HasSuffix(cur.Value, []byte(suffix)) {
				return nil, 0, 0, fmt.Errorf("%q ends with %q", cur.Value, suffix)
			}
			return append(bytes.Clone(cur.Value), suffix...), 0, 0, nil
		}
	case "touch": // a Modify of the expiry alone
		o.Kind, o.Keeps = index.Modify, true
		o.Modify = func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
			if cur == nil {
				return nil, 0, 0, errRefusedAbsent
			}
			return bytes.Clone(cur.Value), cur.Flags, 70_000, nil
		}
	case "refuse": // a Modify that refuses whatever is there
		o.Kind = index.Modify
		o.Modify = func(cur *layout.Record) ([]byte, layout.RecordFlags, uint64, error) {
			if cur == nil {
				return nil, 0, 0, errRefusedAbsent
			}
			return nil, 0, 0, fmt.Errorf("refused %q", cur.Value)
		}
	case "demote", "promote", "readdress", "drop", "locate":
		for k := index.Demote; k <= index.Locate; k++ {
			if k.String() == words[0] {
				o.Kind = k
			}
		}
		o.Tiered, rest = &index.Tiered{}, nil
		if s, ok := c.w.stubOf(words[1]); ok {
			o.Tiered.Stub = s
		}
		for _, x := range words[2:] { // another address than the key's stub has, or a new one
			name, value, _ := strings.Cut(x, "=")
			var at uint64
			_, _ = fmt.Sscan(value, &at)
			switch name {
			case "at":
				o.Tiered.Stub.At[0] = layout.ObjectAt{Volume: 7, At: at}
			case "to":
				o.Tiered.To = []layout.ObjectAt{{Volume: 7, At: at}}
			case "version":
				o.Tiered.Stub.Version = at
			}
		}
	case "scan":
		o.Kind, o.Scan = index.Scan, &index.Page{Bytes: 1 << 20}
	case "move", "clean", "abandon", "relocate", "sync", "scrub", "settle-all":
		for k := range index.Kind(index.NumKinds) {
			if k.String() == words[0] {
				o.Kind = k
			}
		}
		o.Key, o.Hash = nil, 0
		x := &repair.Work{PG: 1, Off: home(), Group: homeGroup}
		if o.Kind == index.Sync || o.Kind == index.Scrub {
			x.Off = shardOff
		}
		x.Extents, x.Wipe = c.w.pg.Recalled, slices.Contains(words, "wipe")
		if slices.Contains(words, "patience=1") {
			o.Patience = 1
		}
		o.Machine, rest = repair.New(o.Kind, x), nil
	case "evict": // the key, or with "expired" what has expired, or with "only:a+b" which of these
		x := &repair.Work{PG: 1, Off: home()}
		fp := layout.FP(o.Hash)
		if keys, ok := strings.CutPrefix(words[1], "only:"); ok {
			x.Only = [][]uint16{nil}
			for k := range strings.SplitSeq(keys, "+") {
				x.Only[0] = append(x.Only[0], layout.FP(hashOf(k)))
			}
		} else if words[1] != "expired" {
			x.Choose = func(list []repair.Candidate) (picked []int) {
				for i, x := range list {
					if x.Word.FP() == fp {
						picked = append(picked, i)
					}
				}
				return picked
			}
			if slices.Contains(words, "spare") {
				x.Spare = func(_ repair.Candidate, until uint64) bool { return until > c.w.millis }
			}
		}
		o.Kind, o.Machine, rest = index.Evict, repair.New(index.Evict, x), nil
		o.Key, o.Hash = nil, 0
	case "transact": // key=value …, a value of "-" deletes
		c.startTransaction(o, words)
		rest = nil
	case "prepare", "decide", "settle":
		rest = c.startTxn(o, words)
	case "raw":
		o.Kind, o.Raw = index.Raw, &index.RawRead{PG: 1, Replica: c.w.pg.Replicas - 1, Space: index.Index, Len: 64}
	default:
		return fmt.Errorf("unknown operation %q", words[0])
	}
	for _, x := range rest {
		name, value, _ := strings.Cut(x, "=")
		var n uint64
		_, _ = fmt.Sscan(value, &n)
		switch name {
		case "if-absent":
			o.Cond = index.IfAbsent
		case "if-present":
			o.Cond = index.IfPresent
		case "if":
			o.Cond, o.IfVersion = index.IfVersion, n
		case "expiry":
			o.Expiry = n
		case "pinned":
			o.Pinned = uint32(n)
		case "whole":
			o.Whole = uint32(n)
		case "apart":
			o.Apart = uint16(n)
		case "from":
			o.Scan.From = uint16(n)
		case "bytes":
			o.Scan.Bytes = int(n)
		case "next":
			o.Scan.Next = uint16(n)
		case "images":
			o.Scan.Images = n == 1
		default:
			return fmt.Errorf("unknown option %q", x)
		}
	}
	c.begin(o)
	return nil
}

func (c *client) begin(o *index.Op) {
	o.Start(c)
	c.op, c.action, c.posted, c.pos, c.verbs, c.bytes = o, 0, false, 0, 0, 0
	c.steps, c.places, c.modified = nil, nil, 0
	c.w.covered[o.Step().String()] = true
}

var errRefusedAbsent = errors.New("refused: absent")

// valueOf is the value that a word stands for: longN is one of N bytes over the longest record, and kibN one of N KiB.
func valueOf(word string) []byte {
	var n int
	if _, err := fmt.Sscanf(word, "kib%d", &n); err == nil {
		return bytes.Repeat([]byte{'v'}, n<<10)
	}
	if _, err := fmt.Sscanf(word, "long%d", &n); err == nil {
		return longValue(n)
	}
	return []byte(word)
}

// longValue is n bytes over the longest record.
func longValue(n int) []byte {
	b := make([]byte, layout.MaxRecordSize+n)
	for i := range b {
		b[i] = byte(i >> 10)
	}
	return b
}

// fault is what happens to a round.
type fault uint8

const (
	noFault    fault = iota
	failBefore       // every access fails without effect
	failAfter        // every access fails after its effect
	failR0           // those at the head, before their effect
	failR1           // those to replica 1 fail without effect
)

// advance goes on by one round trip: the last one's results are consumed and the
// next one's accesses performed, or as many of them as limit says. It reports
// what happened as lines, and whether the operation is done.
func (c *client) advance(limit int, f fault) (lines []string, done bool) {
	o := c.op
	if c.action == index.Done {
		return nil, true
	}
	if !c.posted {
		c.action = o.Next()
		c.w.covered[o.Step().String()] = true
		lines = append(lines, c.takePlaces()...)
		c.pos = 0
		switch c.action {
		case index.Post:
			c.posted = true
			c.arrange()
			c.steps = append(c.steps, o.Step().String())
			lines = append(lines, o.Step().String())
			if !slices.ContainsFunc(o.Accesses, func(a index.Access) bool { return !a.NoWait }) {
				panic(fmt.Sprintf("step %v posts nothing to wait for", o.Step()))
			}
		case index.Done:
			lines = append(lines, c.noWait()...)
			lines = append(lines, c.answer())
			return lines, true
		case index.Fetch, index.Store:
			lines = append(lines, c.disk(c.action))
			return append(lines, c.noWait()...), false
		case index.AskFenced:
			o.OwnerFenced = c.w.fenced[o.LockOwner]
			lines = append(lines, fmt.Sprintf("ask whether s%d is fenced: %v", o.LockOwner, o.OwnerFenced))
			return append(lines, c.noWait()...), false
		default:
			lines = append(lines, actionName(c.action))
			return append(lines, c.noWait()...), false
		}
	}
	for n := 0; c.pos < len(o.Accesses) && n < limit; n++ {
		a := &o.Accesses[c.order[c.pos]]
		c.pos++
		c.verbs++
		c.bytes += len(a.Buf)
		line := ""
		switch {
		case f == failBefore || f == failR0 && a.Replica == 0 || f == failR1 && a.Replica == 1:
			line = strings.TrimRight(c.mem().describe(a), " ") + "  FAILED before its effect"
			a.Failed = true
		case f == failAfter:
			line = c.mem().perform(a) + "  FAILED after its effect"
			a.Failed = true
		case a.IfHit && !c.hit:
			a.Found = ^a.Expect
			line = strings.TrimRight(c.mem().describe(a), " ") + "  skipped"
		default:
			line = c.mem().perform(a)
		}
		if a.Verb == index.CAS {
			c.hit = a.Found == a.Expect
		}
		lines = append(lines, "  "+line)
	}
	c.posted = c.pos < len(o.Accesses)
	return lines, false
}

// arrange decides in which order the round's accesses take effect: each replica's chain as
// it stands, the chains anyhow.
func (c *client) arrange() {
	c.order = c.order[:0]
	for i := range c.op.Accesses {
		c.order = append(c.order, i)
	}
	if c.rng == nil {
		return
	}
	replica := func(i int) uint8 { return c.op.Accesses[c.order[i]].Replica }
	for i := range c.order {
		r := replica(i + c.rng.IntN(len(c.order)-i))
		j := i
		for replica(j) != r {
			j++
		}
		a := c.order[j]
		copy(c.order[i+1:j+1], c.order[i:j])
		c.order[i] = a
	}
}

func (c *client) noWait() (lines []string) {
	for i := range c.op.Accesses {
		if c.op.Accesses[i].NoWait {
			c.verbs++
			lines = append(lines, "  "+c.mem().perform(&c.op.Accesses[i]))
		}
	}
	c.op.Accesses = c.op.Accesses[:0]
	return lines
}

func (c *client) takePlaces() (lines []string) {
	for _, p := range c.places {
		lines = append(lines, "  place: "+p)
	}
	c.places = nil
	return lines
}

func actionName(a index.Action) string {
	return [...]string{index.Alloc: "wait for memory", index.Refresh: "wait for a newer map",
		index.Backoff: "back off", index.Grow: "wait for a split", index.Reconnect: "reconnect"}[a]
}

// run drives the operation to its end.
func (c *client) run(maxActions int) (lines []string, err error) {
	for range maxActions {
		l, done := c.advance(1<<30, noFault)
		lines = append(lines, l...)
		if done {
			return lines, nil
		}
	}
	return lines, fmt.Errorf("no end after %d actions, in step %v", maxActions, c.op.Step())
}

func (c *client) do(t testing.TB, words ...string) error {
	t.Helper()
	if err := c.start(words); err != nil {
		t.Fatal(err)
	}
	if lines, err := c.run(300); err != nil {
		t.Fatalf("s%d %v: %v\n%s", c.id, words, err, strings.Join(lines[max(0, len(lines)-60):], "\n"))
	}
	return c.op.Err
}

func (c *client) answer() string {
	o := c.op
	at := fmt.Sprintf("(%d rounds, %d verbs)", o.Rounds, c.verbs)
	switch {
	case o.Err != nil:
		return fmt.Sprintf("done: %v %s", o.Err, at)
	case o.Kind == index.Get && o.Parts() != nil:
		return fmt.Sprintf("done: %d bytes in %d parts, version %d %s", len(bytes.Join(o.Parts(), nil)), len(o.Parts()),
			o.Version, at)
	case o.Kind == index.Get:
		return fmt.Sprintf("done: %q version %d %s", short(o.Record.Value), o.Version, at)
	case o.Kind == index.Scan:
		var keys []string
		for _, r := range o.Scan.Found {
			keys = append(keys, string(r.Key))
		}
		return fmt.Sprintf("done: %v next %d end %v %s", keys, o.Scan.Next, o.Scan.End, at)
	case o.Kind == index.Raw:
		return fmt.Sprintf("done: %d bytes %s", len(o.Record.Value), at)
	case o.Kind == index.Transact:
		return fmt.Sprintf("done: %v %s", o.Machine.(*index.Transaction).Verdict, at)
	case o.Kind >= index.Sync, o.Kind == index.Settle:
		return fmt.Sprintf("done: %s", at)
	case o.Kind == index.Decide:
		return fmt.Sprintf("done: %v %s", o.Txn.Found, at)
	case o.Kind == index.Delete:
		return "done: deleted " + at
	case o.Kind == index.Locate:
		return fmt.Sprintf("done: named %t %s", o.Tiered.Named, at)
	case o.Kind == index.Exists:
		return fmt.Sprintf("done: there, version %d %s", o.Record.Version, at)
	}
	return fmt.Sprintf("done: version %d %s", o.Version, at)
}

func short(b []byte) string {
	if len(b) > 24 {
		return fmt.Sprintf("%s… %dB", b[:16], len(b))
	}
	return string(b)
}

// perform lets one verb take effect and says what it found.
func (w *world) perform(a *index.Access) string {
	w.checkBounds(a)
	mem := w.region[a.Replica]
	where := ""
	if !w.quiet {
		where = w.describe(a)
	}
	switch a.Verb {
	case index.Read:
		copy(a.Buf, mem[a.Off:][:len(a.Buf)])
		if v := w.on.ValueOf(a); v != nil {
			if v.N, v.CRC = v.Start(a.Buf); v.N >= 0 {
				copy(v.Bytes[:v.N], mem[a.Off:][len(a.Buf):])
				v.CRC = crc32.Update(v.CRC, castagnoli, v.Bytes[:v.N])
			}
		}
		if w.quiet {
			return ""
		}
		return fmt.Sprintf("%s  %s", where, w.show(a))
	case index.Write:
		if v := w.on.ValueOf(a); v != nil {
			copy(mem[a.Off:][len(a.Buf):], v.Bytes)
			layout.SealHead(a.Buf, crc32.Update(v.CRC, castagnoli, v.Bytes))
		}
		copy(mem[a.Off:], a.Buf)
		if w.quiet {
			return ""
		}
		return fmt.Sprintf("%s  %s", where, showRecord(mem[a.Off:][:w.on.LenOf(a)]))
	default:
		p := mem[a.Off:]
		a.Found = binary.LittleEndian.Uint64(p)
		if a.Found == a.Expect {
			binary.LittleEndian.PutUint64(p, a.New)
			return where + "  won"
		}
		if w.quiet {
			return ""
		}
		return fmt.Sprintf("%s  lost: %s", where, w.showWord(a, a.Found))
	}
}

func (w *world) describe(a *index.Access) string {
	s := fmt.Sprintf("R%d %-5v %-8s", a.Replica, a.Verb, w.placeName(a))
	if a.Verb == index.CAS {
		s += fmt.Sprintf("  %s -> %s", w.showWord(a, a.Expect), w.showWord(a, a.New))
	}
	if a.NoWait {
		s += "  (off the path)"
	}
	return s
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func home() uint64  { return shardOff + homeGroup*layout.GroupSize }
func stash() uint64 { return shardOff + layout.StashGroup*layout.GroupSize }

// checkBounds panics about an access that leaves its space: it is a bug.
func (w *world) checkBounds(a *index.Access) {
	n := uint64(8)
	if a.Verb != index.CAS {
		n = uint64(w.on.LenOf(a))
	}
	lo, hi := uint64(0), uint64(indexBytes)
	if a.Space == index.Heap {
		lo, hi = uint64(w.pg.HeapLo)*layout.UnitSize, uint64(w.pg.HeapHi)*layout.UnitSize
	}
	if a.Space == index.Heap && w.pg.AccessOff != 0 && a.Off >= w.pg.AccessOff {
		lo, hi = w.pg.AccessOff, w.pg.AccessOff+indexBytes
	}
	if a.Replica >= w.pg.Replicas || a.Off < lo || a.Off+n > hi || a.Off%8 != 0 ||
		a.Space == index.Heap && a.Verb == index.CAS || a.Space == index.Index && a.Verb == index.Write {
		panic(fmt.Sprintf("access out of bounds: %v, %d bytes", a, n))
	}
}

// placeName names an address.
func (w *world) placeName(a *index.Access) string {
	w.checkBounds(a)
	if a.Space == index.Heap {
		return unitName(uint32(a.Off / layout.UnitSize))
	}
	if a.Off < shardOff || len(a.Buf) == layout.SegmentSize {
		return "segment"
	}
	if a.Off >= statusOff(0) && len(a.Buf) <= 8 {
		return fmt.Sprintf("status[%d]", (a.Off-statusOff(0))/8)
	}
	array, at := (a.Off-shardOff)/layout.SegmentSize, (a.Off-shardOff)%layout.SegmentSize
	name := fmt.Sprintf("g%d", at/layout.GroupSize)
	switch at / layout.GroupSize {
	case homeGroup:
		name = "home"
	case layout.StashGroup:
		name = "stash"
	}
	if array > 0 {
		name = "child." + name
	}
	switch in := at % layout.GroupSize; {
	case a.Verb == index.Read && len(a.Buf) == layout.GroupSize:
		return name
	case in == 0:
		return name + ".hdr"
	case in == layout.GroupLockOff:
		return name + ".lock"
	default:
		return fmt.Sprintf("%s[%d]", name, (in-layout.GroupSlotsOff)/8)
	}
}

// unitName counts from the start of the heap.
func unitName(u uint32) string { return fmt.Sprintf("u%d", int64(u)-heapLo) }

func (w *world) showWord(a *index.Access, x uint64) string {
	switch name := w.placeName(a); {
	case strings.HasSuffix(name, ".hdr"):
		return showHeader(layout.Header(x))
	case strings.HasPrefix(name, "status"):
		return layout.Status(x).String()
	case strings.HasSuffix(name, ".lock"):
		if x == 0 {
			return "free"
		}
		return fmt.Sprintf("s%d#%d", layout.Lock(x).Session(), layout.Lock(x).Stamp())
	}
	return showSlot(layout.Word(x))
}

func showHeader(h layout.Header) string {
	s := "plain"
	if h.OVF() {
		s = "OVF"
	}
	if h.Split() {
		s += " SPLIT"
	}
	return s
}

func showSlot(x layout.Word) string {
	switch {
	case x == 0:
		return "zero"
	case x.State() == layout.Empty:
		return fmt.Sprintf("EMPTY(%s by s%d)", unitName(x.Unit()), x.Deleter())
	}
	return fmt.Sprintf("%v(%s fp=%03x)", x.State(), unitName(x.Unit()), x.FP())
}

func (w *world) show(a *index.Access) string {
	switch {
	case a.Space == index.Heap:
		b := a.Buf
		if v := w.on.ValueOf(a); v != nil {
			b = append(bytes.Clone(b), v.Bytes[:max(v.N, 0)]...)
		}
		return showRecord(b)
	case len(a.Buf) == layout.GroupSize:
		return showGroup(a.Buf)
	case len(a.Buf) == 8:
		return w.showWord(a, binary.LittleEndian.Uint64(a.Buf))
	}
	return fmt.Sprintf("%d bytes", len(a.Buf))
}

func showRecord(b []byte) string {
	r, err := layout.ParseLinked(b)
	var head layout.Record
	switch {
	case err != nil && head.ParseHead(b, layout.MaxRecordSize) == nil && layout.RecordLen(len(head.Key), 0) == len(b):
		return fmt.Sprintf("start of %s version %d", head.Key, head.Version)
	case err != nil:
		return "no record"
	case r.Flags&layout.FlagChunk != 0:
		return fmt.Sprintf("chunk %d of %d, %dB", r.Expiry, r.Version, len(r.Value))
	case r.Flags&layout.FlagIntent != 0:
		in, err := layout.ParseIntent(r.Value, 0, 1<<32-1)
		if err != nil {
			return "no intent"
		}
		s := fmt.Sprintf("%s: intent of transaction %d to %v", r.Key, in.Seq, in.Kind)
		if in.Parent.State() == layout.Live {
			s += " from " + unitName(in.Parent.Unit())
		}
		if in.Final != 0 {
			s += " to " + unitName(in.Final.Unit())
		}
		return s
	case r.Flags&layout.FlagManifest != 0:
		return fmt.Sprintf("%s=manifest version %d", r.Key, r.Version)
	}
	return fmt.Sprintf("%s=%s version %d", r.Key, short(r.Value), r.Version)
}

func showGroup(b []byte) string {
	g := layout.Group(b)
	s := showHeader(g.Header())
	used := 0
	for i := range layout.GroupSlots {
		if g.Slot(i) != 0 {
			used++
			if used <= 4 {
				s += fmt.Sprintf(" [%d]=%s", i, showSlot(g.Slot(i)))
			}
		}
	}
	if used > 4 {
		s += fmt.Sprintf(" … %d slots in use", used)
	}
	return s
}

func (w *world) groupAt(r uint8, off uint64) layout.Group {
	return layout.Group(w.region[r][off:][:layout.GroupSize])
}

func (w *world) setSlot(r uint8, group uint64, i int, x layout.Word) {
	binary.LittleEndian.PutUint64(w.region[r][group+layout.SlotOff(i):], uint64(x))
}

// find is the slot of key at replica r.
func (w *world) find(r uint8, key string) (group uint64, i int, x layout.Word, ok bool) {
	for _, g := range []uint64{home(), stash()} {
		for i := range layout.GroupSlots {
			x := w.groupAt(r, g).Slot(i)
			if x.State() == layout.Empty {
				continue
			}
			if rec, err := layout.ParseLinked(w.region[r][x.Off():][:x.ReadLen()]); err == nil &&
				string(rec.Key) == key {
				return g, i, x, true
			}
		}
	}
	return 0, 0, 0, false
}

// fill occupies every slot of a group, on every replica, by keys of other
// fingerprints.
func (w *world) fill(group uint64, slots int) {
	for i := range slots {
		key := fmt.Sprintf("f%02d", i)
		if group == stash() {
			key = fmt.Sprintf("f%02d", 40+i)
		}
		x := layout.MakeLive(0, layout.FP(hashOf(key)), 0, w.nextUnit)
		w.nextUnit++
		for r := range w.pg.Replicas {
			layout.EncodeRecord(w.region[r][x.Off():], layout.RecordHeader{Version: 1}, []byte(key), []byte("x"))
			w.setSlot(r, group, i, x)
		}
	}
}
