// Package simtest runs the real client code (internal/session over index) against
// the simulated fabric (rdma/sim) under one scheduler that chooses what happens
// next: which verb takes effect, when an operation begins, when a renewal is
// sent, served and answered, who crashes, when a fence is confirmed. Histories
// are checked for linearizability, remote memory for the numbered invariants of
// docs/protocol.md after every effect.
//
// Two searches share a [World]: exhaustive with state hashing for small scopes,
// and seeded random. A schedule is the list of choices made; it replays exactly.
//
// Start with [Config] and [World]. Nothing here is concurrent.
//
// The state hash leans on clients being deterministic: what a client has been
// told determines what it will do (stateless search with a visited set, after
// Godefroid's VeriSoft).
package simtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
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
)

var verbNames = [...]string{"?", "get", "put", "add", "del", "incr", "cas", "delif"}

func (v Verb) String() string { return verbNames[v] }

// Step is one operation of a script, on one of a few keys.
type Step struct {
	Verb Verb
	Key  int
}

// Config is one scope: who does what, and what may go wrong.
type Config struct {
	Replicas int
	Scripts  [][]Step
	// Setup runs to its end before the schedule begins, by client 0.
	Setup []Step
	// Warm makes every client read every key of Setup first, so that it starts
	// with hints.
	Warm bool
	// Units is what each client may take of the heap.
	Units uint32
	// Budgets: how often each fault may be chosen.
	Crashes, Deadlines, Failures int
	// Epochs is how often E may advance; 0 leaves out renewals.
	Epochs int
	// ReadPieces and WritePieces tear messages.
	ReadPieces, WritePieces int
	// MaxSteps ends a schedule; what is under way counts as unknown.
	MaxSteps int
}

const (
	clusters    = 1
	shardOff    = layout.RegionPageSize
	indexBytes  = 12 << 10 // header page and one cluster, rounded up
	maxReplicas = 3
)

// World is one run of a Config.
type World struct {
	cfg     Config
	fab     *sim.Fabric
	pd      [maxReplicas]*rdma.PD
	region  [maxReplicas][]byte
	mrs     [maxReplicas][2]*rdma.MR
	ls      [maxReplicas]rdma.Listener
	devs    [maxReplicas]*rdma.Device
	cls     []*cl
	heapEnd uint32

	epoch   uint64
	epochs  int
	crashes int
	dead    int // deadlines used
	fails   int
	step    int
	effects int // changes of words, and of what else may end a wait
	hist    []Event
	histSum uint64
	Trace   []string
	tracing bool
	reduce  bool // leave out choices whose order cannot matter

	events  []sim.Event
	choices []choice

	// Mirrors of the index, and places unlinked, for the invariants.
	words    map[wordAt]layout.Word
	seen     map[wordAt]map[layout.Word]bool
	unlinked map[uint32]unlinked
	past     map[wordAt][]layout.Word // words a slot has held, in order
	taken    map[wordAt]int           // how many of its predecessor's this one has passed
	err      error
}

type wordAt struct {
	replica uint8
	off     uint64
}

type unlinked struct {
	units uint32
	step  int
	word  layout.Word
}

// cl is one client: a session of the real code with one lane.
type cl struct {
	w        *World
	i        int
	id       uint32
	core     *session.Core
	lane     *session.Lane
	dev      *rdma.Device
	script   []Step
	pos      int
	task     *session.Task
	cur      *Event
	curStart int // World.step at which the operation under way counts as begun
	orphans  []orphan
	seen     map[int]ref
	values   int
	qps      map[uint32]*rdma.QP // by node
	nums     []uint32
	wantConn map[uint32]bool
	wantMem  uint32
	granted  uint32
	nanos    int64
	woken    int // World.effects at the last wake: waking earlier would find the same

	life  life
	sum   uint64 // of everything it was told
	renew struct {
		stage    int
		seq      uint64
		report   uint64
		epoch    uint64
		min      uint64
		reported uint64 // what the directory has of it
	}
}

type orphan struct {
	t     *session.Task
	start int
	cur   *Event
}

type ref struct {
	version uint64
	value   string
}

type life uint8

const (
	live life = iota
	crashed
	expired
	fenced
)

// Keys: their hashes are chosen, not computed, so that they meet in one group.
// Keys 0 and 1 also share the fingerprint.
func keyOf(i int) []byte { return fmt.Appendf(nil, "key%d", i) }

func hashOf(i int) (hash, check uint64) {
	fp := uint64(7)
	if i >= 2 {
		fp = uint64(i)
	}
	return 3<<12 | fp, uint64(i+1) * 0x9e3779b97f4a7c15
}

// NewWorld builds the store and runs the Config's setup.
func NewWorld(cfg Config, trace bool) (*World, error) {
	if cfg.Replicas == 0 {
		cfg.Replicas = 1
	}
	if cfg.MaxSteps == 0 {
		cfg.MaxSteps = 2000
	}
	if cfg.Units == 0 {
		cfg.Units = 64
	}
	w := &World{cfg: cfg, epoch: 1, tracing: trace, words: map[wordAt]layout.Word{},
		seen: map[wordAt]map[layout.Word]bool{}, unlinked: map[uint32]unlinked{},
		past: map[wordAt][]layout.Word{}, taken: map[wordAt]int{}}
	w.fab = sim.New(sim.Options{Manual: true, ReadPieces: cfg.ReadPieces, WritePieces: cfg.WritePieces})
	size := int64(indexBytes) + int64(cfg.Units)*int64(len(cfg.Scripts)+1)*layout.UnitSize
	w.heapEnd = uint32(size / layout.UnitSize)
	pg := &session.PG{PG: index.PG{ID: 1, Epoch: 1, Replicas: uint8(cfg.Replicas)}, Active: true,
		RegionBytes: uint64(size), IndexBytes: indexBytes}
	for r := range cfg.Replicas {
		name := fmt.Sprintf("m%d", r)
		d := rdma.NewDevice("sim", w.fab.Device(name))
		w.devs[r] = d
		mem, err := d.Alloc(size, rdma.AllocOptions{Name: name})
		if err != nil {
			return nil, err
		}
		layout.InitRegion(mem.Bytes, layout.RegionHeader{PG: 1, Namespace: 1, Epoch: 1,
			RegionBytes: uint64(size), IndexBytes: indexBytes, Incarnation: 1})
		w.region[r] = mem.Bytes
		if w.pd[r], err = d.AllocPD(); err != nil {
			return nil, err
		}
		if w.mrs[r][0], err = w.pd[r].RegMR(mem, 0, indexBytes, rdma.AccessRemoteRead|rdma.AccessRemoteAtomic); err != nil {
			return nil, err
		}
		if w.mrs[r][1], err = w.pd[r].RegMR(mem, indexBytes, size-indexBytes, rdma.AccessRemoteRead|rdma.AccessRemoteWrite); err != nil {
			return nil, err
		}
		pd := w.pd[r]
		w.ls[r], err = d.Listen(name, rdma.ListenOptions{Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			return pd, rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic, nil
		}})
		if err != nil {
			return nil, err
		}
		pg.Members = append(pg.Members, session.Member{Node: uint32(r + 1), Incarnation: 1, Keys: map[string]session.Keys{
			"sim": {IndexRKey: w.mrs[r][0].RKey(), IndexBase: w.mrs[r][0].Base(), HeapRKey: w.mrs[r][1].RKey(), HeapBase: w.mrs[r][1].Base()}}})
	}
	for i, s := range cfg.Scripts {
		c, err := w.addClient(i, s, pg)
		if err != nil {
			return nil, err
		}
		w.cls = append(w.cls, c)
	}
	if len(cfg.Setup) > 0 {
		w.runScript(w.cls[0], cfg.Setup)
	}
	if cfg.Warm {
		keys := map[int]bool{}
		for _, s := range cfg.Setup {
			keys[s.Key] = true
		}
		for _, c := range w.cls {
			for k := range 8 {
				if keys[k] {
					w.runScript(c, []Step{{Get, k}})
				}
			}
		}
	}
	if w.err != nil {
		return nil, w.err
	}
	w.Trace = nil
	for i, c := range w.cls {
		c.script, c.pos = cfg.Scripts[i], 0
	}
	return w, nil
}

func (w *World) addClient(i int, script []Step, pg *session.PG) (*cl, error) {
	c := &cl{w: w, i: i, id: uint32(i + 1), script: script, seen: map[int]ref{}, qps: map[uint32]*rdma.QP{},
		wantConn: map[uint32]bool{}}
	c.dev = rdma.NewDevice("sim", w.fab.Device(fmt.Sprintf("c%d", i)))
	var err error
	c.core, err = session.NewCore(session.Options{Session: c.id, Discriminator: c.id, Lanes: 1, CacheBytes: 4096,
		Devices: []*rdma.Device{c.dev}, Control: c, SlabTasks: 4,
		Nanos: func() int64 { return c.nanos }, Millis: func() uint64 { return 1_700_000_000_000 }})
	if err != nil {
		return nil, err
	}
	c.lane = c.core.Lanes()[0]
	c.core.SetEpoch(w.epoch)
	c.core.EndRenew(c.core.BeginRenew(), w.epoch, 0, 1<<62)
	c.renew.reported = w.epoch
	p := *pg
	v, err := session.NewView(1, []*session.PG{&p}, []session.Shard{{ID: 1, PG: &p, Off: shardOff, Clusters: clusters}})
	if err != nil {
		return nil, err
	}
	c.core.InstallView(v)
	return c, nil
}

// Close frees what the world made.
func (w *World) Close() {}

// ---- Control -----------------------------------------------------------------

func (c *cl) WantMemory(_ uint32, units uint32)     { c.wantMem = units }
func (c *cl) WantMap(uint64)                        {}
func (c *cl) WantFenced(uint32)                     {}
func (c *cl) WantConn(_ *session.Lane, node uint32) { c.wantConn[node] = true }

// connect replaces the queue pair to node. The memory node fences the old one
// before it accepts the new one.
func (c *cl) connect(node uint32) {
	if old := c.lane.Detach(node); old != nil {
		_ = c.w.fab.Fence(old.Num())
		_ = old.Close()
		c.lane.Closed(node)
	}
	qp, err := c.dev.Dial(context.Background(), c.core.PD(0), c.lane.CQ(0), fmt.Sprintf("m%d", node-1), nil)
	if err != nil {
		c.w.fail(fmt.Errorf("dial: %w", err))
		return
	}
	delete(c.wantConn, node)
	c.qps[node] = qp
	c.nums = append(c.nums, qp.Num())
	c.lane.Attach(node, 1, 0, qp)
}

// ---- choices -----------------------------------------------------------------

type choiceKind uint8

const (
	chFire choiceKind = 1 + iota
	chBegin
	chWake
	chConnect
	chGrant
	chAdvance
	chRenewSend
	chRenewServe
	chRenewReply
	chDeadline
	chCrash
	chExpire
	chFence
	chFailBefore
	chFailAfter
)

type choice struct {
	kind choiceKind
	c    int
	ev   sim.Event
	node uint32
}

func (ch choice) String() string {
	switch ch.kind {
	case chFire:
		return fmt.Sprintf("c%d %v", ch.c, ch.ev)
	case chConnect:
		return fmt.Sprintf("c%d connects to m%d", ch.c, ch.node-1)
	}
	return fmt.Sprintf("c%d %s", ch.c, [...]string{"", "", "begins", "wakes", "", "is granted memory", "E advances",
		"sends renewal", "renewal served", "renewal answered", "reaches its deadline", "crashes", "lease expires",
		"is fenced", "fails before", "fails after"}[ch.kind])
}

// enabled lists what may happen next, in a fixed order.
func (w *World) enabled() []choice {
	w.choices = w.choices[:0]
	add := func(k choiceKind, c int) { w.choices = append(w.choices, choice{kind: k, c: c}) }
	w.events = w.fab.AppendEvents(w.events[:0])
	for _, ev := range w.events {
		w.choices = append(w.choices, choice{kind: chFire, c: w.ownerOf(ev.QP), ev: ev})
	}
	for i, c := range w.cls {
		switch c.life {
		case crashed:
			add(chExpire, i)
			continue
		case expired:
			add(chFence, i)
			continue
		case fenced:
			continue
		}
		if c.task == nil && c.pos < len(c.script) {
			add(chBegin, i)
		}
		if at := c.lane.NextWake(); at != 0 && c.woken != w.effects {
			add(chWake, i)
		}
		for n := range uint32(w.cfg.Replicas) {
			if c.wantConn[n+1] {
				w.choices = append(w.choices, choice{kind: chConnect, c: i, node: n + 1})
			}
		}
		if c.wantMem > 0 {
			add(chGrant, i)
		}
		if w.cfg.Epochs > 0 {
			switch c.renew.stage {
			case 0:
				// Only a renewal that can tell or bring something new.
				if c.core.Epoch() < w.epoch || w.report(c) > c.renew.reported || w.minEpoch() > c.core.MinEpoch() {
					add(chRenewSend, i)
				}
			case 1:
				add(chRenewServe, i)
			case 2:
				add(chRenewReply, i)
			}
		}
		if c.task != nil && w.dead < w.cfg.Deadlines {
			add(chDeadline, i)
		}
		if w.crashes < w.cfg.Crashes && c.task != nil {
			add(chCrash, i)
		}
		if w.fails < w.cfg.Failures && c.task != nil && len(w.events) > 0 {
			add(chFailBefore, i)
			add(chFailAfter, i)
		}
	}
	if w.epochs < w.cfg.Epochs {
		add(chAdvance, 0)
	}
	if w.reduce {
		for i, ch := range w.choices {
			if w.invisible(ch) {
				w.choices = append(w.choices[:0], w.choices[i])
				break
			}
		}
	}
	return w.choices
}

// invisible reports that nobody can tell when ch happens, so that only one order
// need be tried: nothing fails and no place is reused in this scope, so a
// record is written before any word names it and never changes after.
func (w *World) invisible(ch choice) bool {
	if w.cfg.Crashes+w.cfg.Deadlines+w.cfg.Failures+w.cfg.Epochs > 0 {
		return false
	}
	switch ch.kind {
	case chGrant, chConnect:
		return true
	case chFire:
		r, off := w.where(ch.ev)
		return r >= 0 && off >= indexBytes
	}
	return false
}

func (w *World) ownerOf(qp uint32) int {
	for _, c := range w.cls {
		for _, n := range c.nums {
			if n == qp {
				return c.i
			}
		}
	}
	return 0
}

// report is what the client's next renewal says.
func (w *World) report(c *cl) uint64 {
	e := c.core.Epoch()
	if o, ok := c.lane.Oldest(); ok && o < e {
		e = o
	}
	return e
}

func (w *World) minEpoch() uint64 {
	m := w.epoch
	for _, c := range w.cls {
		if c.life != fenced && c.renew.reported < m {
			m = c.renew.reported
		}
	}
	return m
}

// do makes one choice happen.
func (w *World) do(ch choice) {
	c := w.cls[ch.c]
	if w.tracing {
		w.Trace = append(w.Trace, w.describe(ch))
	}
	w.step++
	for _, o := range w.cls {
		if o.task != nil && o.task.Waiting() == waitAlloc {
			o.curStart = w.step // begins when there is memory
		}
	}
	switch ch.kind {
	case chFire:
		w.observe(c, ch.ev)
		w.before(c, ch.ev)
		var old uint64
		atomic := ch.ev.Op.IsAtomic() && ch.ev.Kind != sim.Deliver
		if atomic {
			old = w.wordOf(ch.ev)
		}
		if err := w.fab.Fire(ch.ev); err != nil {
			w.fail(err)
			return
		}
		if atomic && w.wordOf(ch.ev) != old {
			w.effects++
			w.lockChanged(ch.ev, layout.Lock(old))
		}
		w.after(ch.ev)
	case chBegin:
		w.begin(c)
	case chWake:
		c.nanos = c.lane.NextWake()
		c.woken = w.effects
	case chConnect:
		c.connect(ch.node)
		w.effects++
	case chGrant:
		w.grant(c)
	case chAdvance:
		w.epoch++
		w.epochs++
	case chRenewSend:
		c.renew.report = w.report(c)
		c.renew.seq = c.core.BeginRenew()
		c.renew.stage = 1
	case chRenewServe:
		c.renew.reported = max(c.renew.reported, c.renew.report)
		c.renew.epoch, c.renew.min = w.epoch, w.minEpoch()
		c.renew.stage = 2
	case chRenewReply:
		c.core.EndRenew(c.renew.seq, c.renew.epoch, c.renew.min, 1<<62)
		c.renew.stage = 0
		c.tell(c.renew.epoch, c.renew.min)
		c.lane.Deliver(func(*session.Lane) {})
	case chDeadline:
		w.dead++
		w.deadline(c)
	case chCrash:
		w.crashes++
		c.life = crashed
		for _, q := range c.qps {
			_ = w.fab.Kill(q.Num())
		}
		w.unknown(c)
	case chExpire:
		c.life = expired
	case chFence:
		for _, n := range c.nums {
			_ = w.fab.Fence(n)
		}
		c.life = fenced
		for _, o := range w.cls {
			o.core.SetFenced(c.id)
		}
		w.effects++
	case chFailBefore, chFailAfter:
		w.fails++
		when := sim.BeforeEffect
		if ch.kind == chFailAfter {
			when = sim.AfterEffect
		}
		for n := range uint32(w.cfg.Replicas) {
			if q := c.qps[n+1]; q != nil {
				_ = w.fab.FailNext(q.Num(), retryExc, when)
				break
			}
		}
	}
	if c.life == live {
		c.tell(uint64(ch.kind), uint64(ch.node))
		c.lane.Pump()
	}
	if w.cfg.Epochs > 0 && ch.kind == chFence {
		for _, o := range w.cls {
			if o.life == live {
				o.lane.Deliver(func(*session.Lane) {})
			}
		}
	}
}

func (w *World) describe(ch choice) string {
	c := w.cls[ch.c]
	s := ch.String()
	if c.task != nil && c.cur != nil {
		s += fmt.Sprintf("   [%v %v]", c.cur, c.task.Op.Step())
	}
	return s
}

// tell folds something the client learnt into its sum.
func (c *cl) tell(v ...uint64) {
	for _, x := range v {
		c.sum = (c.sum ^ x) * 0x9e3779b97f4a7c15
		c.sum ^= c.sum >> 29
	}
}

// observe folds what a verb is about to find.
func (w *World) observe(c *cl, ev sim.Event) {
	c.tell(uint64(ev.Op), ev.Addr, ev.Index, uint64(ev.Piece), uint64(ev.Kind))
	if b := w.target(ev); b != nil {
		c.tell(xxh3.Hash(b))
	}
}

// target is the remote memory a verb touches, and where it is.
func (w *World) target(ev sim.Event) []byte {
	r, off := w.where(ev)
	if r < 0 {
		return nil
	}
	return w.region[r][off : off+uint64(ev.Len)]
}

func (w *World) where(ev sim.Event) (replica int, off uint64) {
	for r := range w.cfg.Replicas {
		for k, mr := range w.mrs[r] {
			if mr.RKey() == ev.RKey {
				off = ev.Addr - mr.Base()
				if k == 1 {
					off += indexBytes
				}
				return r, off
			}
		}
	}
	return -1, 0
}

func (w *World) grant(c *cl) {
	need := max(c.wantMem, w.cfg.Units)
	c.wantMem = 0
	if c.granted+need > w.cfg.Units {
		c.core.SetExhausted(1)
		return
	}
	base := uint32(indexBytes/layout.UnitSize) + uint32(c.i)*w.cfg.Units + c.granted
	c.granted += need
	if err := c.core.AddRun(1, 1, base, need); err != nil {
		w.fail(err)
	}
	c.lane.Deliver(func(*session.Lane) {})
}

// begin starts the client's next script step.
func (w *World) begin(c *cl) {
	s := c.script[c.pos]
	c.pos++
	e := &Event{Client: c.i, Verb: s.Verb, Key: s.Key, Call: w.tick()}
	t, err := c.lane.NewTask()
	if err != nil {
		w.fail(err)
		return
	}
	o := &t.Op
	o.Key = keyOf(s.Key)
	o.Hash, o.Check = hashOf(s.Key)
	c.values++
	e.Value = fmt.Sprintf("%d.%d", c.i, c.values)
	switch s.Verb {
	case Get:
		o.Kind = index.Get
	case Put:
		o.Kind, o.Value = index.Put, []byte(e.Value)
	case Add:
		o.Kind, o.Cond, o.Value = index.Put, index.IfAbsent, []byte(e.Value)
	case Del:
		o.Kind = index.Delete
	case CAS, DelIf:
		ref, ok := c.seen[s.Key]
		if !ok {
			c.lane.Recycle(t)
			return
		}
		e.Old = ref.value
		o.IfVersion, o.Cond = ref.version, index.IfVersion
		o.Kind, o.Value = index.Put, []byte(e.Value)
		if s.Verb == DelIf {
			o.Kind, o.Value = index.Delete, nil
		}
	case Incr:
		o.Kind = index.Modify
		o.Modify = func(cur *layout.Record) ([]byte, uint64, error) {
			old := ""
			if cur != nil {
				old = string(cur.Value)
			}
			e.Value = old + "+"
			return []byte(e.Value), 0, nil
		}
	}
	c.task, c.cur, c.curStart = t, e, w.step
	t.Done = func(t *session.Task) { w.done(c, t, e) }
	c.lane.Start(t)
}

func (w *World) tick() int64 { w.step++; return int64(w.step) }

// done records an operation's answer.
func (w *World) done(c *cl, t *session.Task, e *Event) {
	if c.task != t { // answered before, by its deadline
		for i := range c.orphans {
			if c.orphans[i].t == t {
				c.orphans = append(c.orphans[:i], c.orphans[i+1:]...)
				break
			}
		}
		c.lane.Recycle(t)
		return
	}
	err := t.Op.Err
	switch {
	case err == nil:
		e.Out = OK
		if e.Verb == Get {
			e.Got = string(t.Op.Record.Value)
			if !bytes.Equal(t.Op.Record.Key, keyOf(e.Key)) {
				w.fail(fmt.Errorf("I14: get of %s answered a record of %q", keyOf(e.Key), t.Op.Record.Key))
			}
		}
		switch e.Verb {
		case Get:
			c.seen[e.Key] = ref{t.Op.Version, e.Got}
		case Put, Add, CAS, Incr:
			c.seen[e.Key] = ref{t.Op.Version, e.Value}
		}
	case errors.Is(err, index.ErrUnknown):
		e.Out = Unknown
	case errors.Is(err, index.ErrNotFound):
		e.Out = NotFound
	case errors.Is(err, index.ErrExists):
		e.Out = Exists
	case errors.Is(err, index.ErrConflict):
		e.Out = Conflict
	case errors.Is(err, index.ErrFull), errors.Is(err, session.ErrTimeout), errors.Is(err, session.ErrNoConn):
		e.Out = NotDone
	default:
		w.fail(fmt.Errorf("%v: %w", e, err))
	}
	e.Return = w.tick()
	w.record(e)
	c.tell(uint64(e.Out), xxh3.HashString(e.Got))
	c.task, c.cur = nil, nil
	c.lane.Recycle(t)
}

// deadline answers the operation under way as the blocking client does; its
// verbs stay in flight.
func (w *World) deadline(c *cl) {
	t, e := c.task, c.cur
	posted := t.Op.Posted()
	start := c.curStart
	c.orphans = append(c.orphans, orphan{t, start, e})
	c.task, c.cur = nil, nil
	n := len(c.orphans)
	c.lane.Orphan(t, session.ErrTimeout)
	e.Out = NotDone
	switch {
	case len(c.orphans) < n: // it ended at once
		if posted {
			e.Out = Unknown
		}
	case posted:
		e.Out = Unknown
	}
	e.Return = w.tick()
	w.record(e)
}

// unknown records a crashed client's operation as pending.
func (w *World) unknown(c *cl) {
	if c.cur != nil {
		e := *c.cur
		e.Out = Unknown
		e.Return = w.tick()
		w.record(&e)
		c.cur = nil
	}
}

func (w *World) record(e *Event) {
	w.hist = append(w.hist, *e)
	w.histSum = (w.histSum ^ xxh3.HashString(e.sum())) * 0x9e3779b97f4a7c15
	if w.tracing {
		w.Trace = append(w.Trace, "      => "+e.String())
	}
}

func (w *World) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

// runScript runs steps of one client alone, to their end.
func (w *World) runScript(c *cl, steps []Step) {
	save := c.script
	c.script, c.pos = steps, 0
	w.settle(func(ch choice) bool { return ch.c == c.i && ch.kind != chDeadline && ch.kind < chCrash })
	if c.task != nil {
		w.fail(fmt.Errorf("setup of client %d does not end: step %v waits for %v, %v enabled\n%s", c.i, c.task.Op.Step(), c.task.Waiting(),
			w.enabled(), strings.Join(w.Trace, "\n")))
	}
	c.script = save
}

// settle makes the first allowed choice again and again until there is none.
func (w *World) settle(allowed func(choice) bool) {
	for n := 0; n < 10_000 && w.err == nil; n++ {
		found := false
		for _, ch := range w.enabled() {
			if allowed(ch) && ch.kind != chAdvance && ch.kind != chRenewSend {
				w.do(ch)
				found = true
				break
			}
		}
		if !found {
			return
		}
	}
}

// Finish runs what is left without faults, then reads every key with a client
// that knows nothing, and checks the history.
func (w *World) Finish() error {
	for round := 0; round < 200 && w.err == nil; round++ {
		w.settle(func(ch choice) bool {
			return ch.kind != chDeadline && ch.kind != chCrash && ch.kind != chFailBefore && ch.kind != chFailAfter
		})
		busy := false
		for _, c := range w.cls {
			busy = busy || c.life == live && (c.task != nil || c.pos < len(c.script))
		}
		if !busy {
			break
		}
		// Somebody waits for memory or for a fence: let epochs pass.
		w.epoch++
		for _, c := range w.cls {
			c.nanos += 1 << 20
			c.woken = -1
			if c.life == live && c.renew.stage == 0 {
				w.do(choice{kind: chRenewSend, c: c.i})
			}
		}
	}
	for _, c := range w.cls {
		if w.err == nil && c.life == live && c.task != nil {
			w.fail(fmt.Errorf("client %d does not finish: %v in step %v waits for %v", c.i, c.cur, c.task.Op.Step(), c.task.Waiting()))
		}
	}
	if w.err != nil {
		return w.err
	}
	keys := map[int]bool{}
	for i := range w.hist {
		keys[w.hist[i].Key] = true
	}
	var reads []Step
	for k := range 8 {
		if keys[k] {
			reads = append(reads, Step{Get, k})
		}
	}
	v := w.cls[0].core.View()
	c, err := w.addClient(len(w.cls), reads, v.PGs[1])
	if err != nil {
		return err
	}
	w.cls = append(w.cls, c)
	w.runScript(c, reads)
	if w.err != nil {
		return w.err
	}
	for _, c := range w.cls {
		if w.histSum%16 != 0 {
			break // costly; a sample will do
		}
		for _, h := range c.core.Heaps() {
			if err := h.Heap.Check(); err != nil {
				return fmt.Errorf("I7: client %d: %w", c.i, err)
			}
		}
	}
	return CheckHistory(w.hist)
}

// Sum identifies the state for the visited set.
func (w *World) Sum() uint64 {
	h := w.histSum
	mix := func(x uint64) {
		h = (h ^ x) * 0x9e3779b97f4a7c15
		h ^= h >> 31
	}
	for r := range w.cfg.Replicas {
		mix(xxh3.Hash(w.region[r]))
	}
	mix(w.fab.QPHash())
	mix(w.epoch)
	mix(uint64(w.crashes)<<40 | uint64(w.dead)<<20 | uint64(w.fails))
	for _, c := range w.cls {
		mix(c.sum)
		mix(uint64(c.pos)<<8 | uint64(c.life))
		mix(uint64(c.renew.stage) | c.renew.report<<4 | c.renew.reported<<24 | c.renew.min<<44)
		if c.woken == w.effects {
			mix(1)
		}
	}
	return h
}

// History is the operations recorded so far.
func (w *World) History() []Event { return w.hist }

func (w *World) String() string { return strings.Join(w.Trace, "\n") }
