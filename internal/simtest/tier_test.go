package simtest

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma/sim"
)

// object is one that the tier keeps. Each is a segment of its own, which is closed before it is collected.
type object struct {
	at     layout.ObjectAt
	key    int
	value  string
	bytes  []byte // nil: freed, or lost
	closed bool   // nothing names it anew
	lost   bool
}

// tier is the volume, and what went on in it.
type tier struct {
	objects []*object
	lost    bool // the directory has given the volume up, and another one has taken its place
	volume  uint32

	demoted, promoted, moved, freed, fetched, dropped, fails int
}

// diskAsk is what an operation waits for.
type diskAsk struct {
	at     layout.ObjectAt
	n      int
	object []byte // to be stored; nil: n bytes at at are read
	got    func(b []byte)
	stored func(at []layout.ObjectAt, err error)
}

// Volume is index.Tier.
func (c *cl) Volume(id uint32) index.VolumeState {
	if t := &c.w.tier; id < t.volume || t.lost {
		return index.VolumeLost
	}
	return index.VolumeUp
}

// Fetch is engine.Objects.
func (c *cl) Fetch(at layout.ObjectAt, n int, answer func(got []byte)) {
	c.disk = append(c.disk, diskAsk{at: at, n: n, got: answer})
}

// Store is engine.Objects.
func (c *cl) Store(b []byte, answer func(at []layout.ObjectAt, err error)) {
	c.disk = append(c.disk, diskAsk{object: b, stored: answer})
}

// objects is the client's way to the tier, if there is one.
func (c *cl) objects() engine.Objects {
	if !c.w.cfg.Tier {
		return nil
	}
	return c
}

// serveDisk answers the first of what the client's operations wait for; fails: that it is out of reach.
func (c *cl) serveDisk(fails bool) {
	ask, t := c.disk[0], &c.w.tier
	c.disk = c.disk[1:]
	c.w.effects++
	switch {
	case fails && ask.object != nil:
		t.fails++
		ask.stored(nil, engine.ErrTimeout)
	case fails:
		t.fails++
		ask.got(nil)
	case ask.object != nil:
		ask.stored([]layout.ObjectAt{c.w.keep(ask.object)}, nil)
	default:
		b := make([]byte, ask.n) // of what is not there, zeroes
		if x := c.w.objectAt(ask.at); x != nil {
			copy(b, x.bytes)
		}
		t.fetched++
		ask.got(b)
	}
}

// keep stores an object.
func (w *World) keep(b []byte) layout.ObjectAt {
	t := &w.tier
	rec, err := layout.ParseRecord(b)
	if err != nil {
		w.fail(fmt.Errorf("tier: what is stored is no record: %w", err))
		return layout.ObjectAt{Volume: 1, At: 1}
	}
	n, _ := linked{key: string(rec.Key)}.number()
	x := &object{at: layout.ObjectAt{Volume: t.volume + 1, At: uint64(len(t.objects)+1) << 20}, key: n,
		value: string(rec.Value), bytes: b}
	t.objects = append(t.objects, x)
	return x.at
}

func (w *World) objectAt(at layout.ObjectAt) *object {
	for _, x := range w.tier.objects {
		if x.at == at {
			return x
		}
	}
	return nil
}

// valueOfStub is the user's value that a stub stands for, as far as it is there.
func (w *World) valueOfStub(rec *layout.Record) string {
	s, err := rec.Object()
	if err != nil {
		return ""
	}
	if x := w.objectAt(s.At[0]); x != nil {
		return x.value
	}
	return ""
}

// loseObjects has the volume lose the i-th object, or all, and says so to the directory. The keys may be absent from
// now on.
func (w *World) loseObjects(i int) {
	t := &w.tier
	for k, x := range t.objects {
		if x.bytes == nil || i >= 0 && k != i {
			continue
		}
		x.bytes, x.lost, x.closed = nil, true, true
		w.record(&Event{Client: -1, Verb: Evict, Key: x.key, Old: x.value, Out: Unknown, Call: w.tick(),
			Return: math.MaxInt64})
	}
	if i < 0 {
		t.volume++
	}
	w.tier.dropped++
	w.effects++
}

// namedObjects lists the objects that the stubs of a word's records name in r.
func (w *World) namedObjects(r *region, x layout.Word) (list []*object) {
	for _, n := range w.records(r, x) {
		rec, err := w.recordAt(r, n)
		if err != nil || !rec.Stub {
			continue
		}
		if s, err := rec.Object(); err == nil {
			list = append(list, w.objectAt(s.At[0]))
		}
	}
	return list
}

// checkNamed checks I17 of a word that a slot of r has just taken.
func (w *World) checkNamed(r *region, x layout.Word) {
	if !w.cfg.Tier {
		return
	}
	for _, o := range w.namedObjects(r, x) {
		if o == nil || o.bytes == nil && !o.lost {
			w.fail(fmt.Errorf("I17: m%d links %v, a stub whose object is not there", r.node.i, x))
		}
	}
}

// checkFreed checks I17 of an object that is about to be freed.
func (w *World) checkFreed(o *object) {
	for _, pg := range w.st.PGs(1) {
		for _, r := range w.chain(pg.Id) {
			for _, s := range r.slots {
				if !r.node.crashed && s.shown().Readable() && slices.Contains(w.namedObjects(r, s.now), o) {
					w.fail(fmt.Errorf("I17: the object of key%d at %#x is freed, and slot %#x of m%d names it", o.key,
						o.at.At, s.off, r.node.i))
				}
			}
		}
	}
}

// checkKept checks I18: what an operation of the tier puts in place of a record is the same record.
func (w *World) checkKept(ev sim.Event, r *region, off uint64, old, now layout.Word) {
	c := w.owners[ev.QP].c
	for _, list := range [][]*running{c.run, c.orphans} {
		for _, x := range list {
			if k := x.t.Op.Kind; k != index.Demote && k != index.Promote && k != index.Readdress ||
				!posted(&x.t.Op, off, old) {
				continue
			}
			a, err := w.recordAt(r, old)
			b, err2 := w.recordAt(r, now)
			switch {
			case err != nil || err2 != nil:
				w.fail(fmt.Errorf("I18: %v of client %d: %w", x, c.i, errors.Join(err, err2)))
			case a.Flags&layout.FlagIntent != 0:
				w.fail(fmt.Errorf("I18: %v of client %d takes an intent away", x, c.i))
			case a.Version != b.Version || a.Expiry != b.Expiry || a.Flags != b.Flags ||
				w.valueOf(r, &a) != w.valueOf(r, &b):
				w.fail(fmt.Errorf("I18: %v of client %d puts %s of version %#x that expires at %d in place of "+
					"%s, %#x, %d", x, c.i, w.valueOf(r, &b), b.Version, b.Expiry, w.valueOf(r, &a), a.Version,
					a.Expiry))
			}
		}
	}
}

// collecting is an object that a client is about to free.
type collecting struct {
	object *object
	to     *object
	stage  collectStage
}

type collectStage uint8

const (
	toLocate collectStage = iota
	toReaddress
	toLocateAgain
)

// beginTiered begins a script's Demote, Promote or Collect.
func (c *cl) beginTiered(s Step) {
	if s.Verb == Collect {
		for _, x := range c.w.tier.objects {
			if x.key == s.Key && x.bytes != nil && !c.w.isBusy(x) {
				x.closed = true
				c.collect = &collecting{object: x}
				c.collectPart()
				return
			}
		}
		return
	}
	kind := map[Verb]index.Kind{Demote: index.Demote, Promote: index.Promote}[s.Verb]
	c.startTiered(s, kind, &index.Tiered{})
}

func (c *cl) startTiered(s Step, kind index.Kind, t *index.Tiered) {
	r := c.newRun(c.laneFor(s.Key))
	if r == nil {
		return
	}
	r.step, r.tiered = s, true
	o := &r.t.Op
	o.Kind, o.Key, o.Tiered = kind, keyOf(s.Key), t
	o.Hash, o.Check = hashOf(s.Key)
	c.start(r)
}

// isBusy reports whether an object may yet be named by an operation that is under way. Those of a session that is
// fenced are over.
func (w *World) isBusy(x *object) bool {
	for _, c := range w.cls {
		if w.fenced(c) {
			continue
		}
		for _, list := range [][]*running{c.run, c.orphans} {
			for _, r := range list {
				if t := r.t.Op.Tiered; t != nil && slices.Contains(t.To, x.at) {
					return true
				}
			}
		}
	}
	return false
}

// collectPart begins the next operation of a Collect.
func (c *cl) collectPart() {
	x := c.collect
	rec, err := layout.ParseRecord(x.object.bytes)
	if err != nil { // lost meanwhile
		c.collect = nil
		return
	}
	t := &index.Tiered{Stub: layout.StubOf(&rec, len(x.object.bytes), layout.HeadSum(x.object.bytes), x.object.at)}
	s := Step{Collect, x.object.key}
	if x.stage != toReaddress {
		c.startTiered(s, index.Locate, t)
		return
	}
	at := c.w.keep(x.object.bytes)
	x.to, t.To = c.w.objectAt(at), []layout.ObjectAt{at}
	c.startTiered(s, index.Readdress, t)
}

// tieredDone takes the answer of an operation of the tier's.
func (c *cl) tieredDone(r *running) {
	w, op, t := c.w, &r.t.Op, &c.w.tier
	switch err := op.Err; {
	case err == nil, errors.Is(err, index.ErrKept), errors.Is(err, index.ErrNotFound), errors.Is(err, index.ErrTier),
		errors.Is(err, index.ErrUnknown), errors.Is(err, index.ErrFull), errors.Is(err, engine.ErrTimeout),
		errors.Is(err, engine.ErrNoConn), errors.Is(err, engine.ErrLease):
	default:
		w.fail(fmt.Errorf("%v of client %d: %w", op.Kind, c.i, err))
	}
	c.tell(uint64(op.Kind), uint64(b2i(op.Err == nil)))
	if op.Err == nil {
		t.demoted += b2i(op.Kind == index.Demote)
		t.promoted += b2i(op.Kind == index.Promote)
		t.moved += b2i(op.Kind == index.Readdress)
	}
	x := c.collect
	if r.step.Verb != Collect || x == nil {
		return
	}
	named := op.Kind == index.Locate && op.Tiered.Named
	c.tell(uint64(b2i(named)))
	switch {
	case op.Kind == index.Readdress:
		x.stage = toLocateAgain // also if it has lost
	case op.Err != nil:
		c.collect = nil // nothing is proven: the object stays
	case !named:
		if x.object.bytes != nil {
			w.checkFreed(x.object)
			x.object.bytes = nil
			t.freed++
			w.effects++
		}
		c.collect = nil
	case x.stage == toLocate:
		x.stage = toReaddress
	default:
		c.collect = nil // somebody else has named it meanwhile
	}
}

// tierSum is what of the tier a state depends on.
func (w *World) tierSum() (h uint64) {
	for _, x := range w.tier.objects {
		h = h*31 + uint64(b2i(x.bytes != nil)) + 2*uint64(b2i(x.closed)) + 4*uint64(x.key)
	}
	for _, c := range w.cls {
		h = h*31 + uint64(len(c.disk))
		if c.collect != nil {
			h = h*31 + c.collect.object.at.At + uint64(c.collect.stage) + 1
		}
	}
	return h*31 + uint64(w.tier.fails)<<8 + uint64(w.tier.dropped)
}

// tierWide are random scopes with a tier node, which demotes, promotes and collects while clients go on.
var tierWide = map[string]Config{
	"tier": {Tier: true, Units: 24, Epochs: 10, Crashes: 1, Failures: 1, Deadlines: 1, DiskFails: 1, WritePieces: 2,
		Scripts: [][]Step{{k(Demote, 0), k(Collect, 0), k(Promote, 0), k(Demote, 0), k(Collect, 0)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(CAS, 0), k(Del, 0), k(Get, 0)}, {k(Get, 0), k(Incr, 0), k(Demote, 0),
				k(Collect, 0), k(Get, 0)}}, Setup: one, Warm: true},
	"tier-r2": {Tier: true, Replicas: 2, Units: 24, Epochs: 6, Crashes: 1, Deadlines: 1, Failures: 1,
		Scripts: [][]Step{{k(Demote, 0), k(Collect, 0), k(Promote, 0), k(Demote, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 0)}, {k(Incr, 0), k(Collect, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
	"tier-touch-r2": {Tier: true, Replicas: 2, Units: 24, Epochs: 6, Crashes: 1, Deadlines: 1, Scripts: [][]Step{
		{k(Demote, 0), k(Collect, 0), k(Promote, 0), k(Demote, 0), k(Collect, 0)},
		{k(Touch, 0), k(Get, 0), k(Touch, 0), k(Put, 0), k(Get, 0)}, {k(Get, 0), k(Touch, 0), k(Collect, 0)}},
		Setup: one, Warm: true},
	"tier-two-nodes": {Tier: true, Replicas: 2, Units: 24, Crashes: 1, Scripts: [][]Step{
		{k(Demote, 0), k(Collect, 0), k(Demote, 0), k(Collect, 0)}, {k(Demote, 0), k(Collect, 0), k(Promote, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Has, 0)}}, Setup: one, Warm: true},
	"tier-loss": {Tier: true, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Crashes: 1, Units: 24,
		Scripts: [][]Step{{k(Demote, 0), k(Collect, 0), k(Demote, 0), k(Collect, 0)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Incr, 0)}}, Setup: one, Warm: true},
	"tier-join": {Tier: true, Replicas: 2, Missing: 1, Nodes: 2, Janitors: 1, Units: 24, Scripts: [][]Step{
		{k(Demote, 0), k(Collect, 0), k(Promote, 0)}, {k(Get, 0), k(Put, 0), k(Get, 0)}}, Setup: one, Warm: true},
	"tier-split": {Tier: true, Replicas: 2, PGs: 2, Janitors: 1, Children: 2, Units: 24,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{{k(Demote, 10), k(Collect, 10), k(Promote, 10)},
			{k(Get, 10), k(Put, 10), k(Del, 10), k(Get, 10)}}, Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"tier-recall": {Tier: true, TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Epochs: 6, Units: 24,
		Scripts: [][]Step{{k(Demote, 0), k(Collect, 0), k(Promote, 0)}, {k(Get, 0), k(Put, 0), k(Get, 0)}},
		Setup:   one, Warm: true},
	"tier-restart": {Tier: true, Replicas: 2, Restarts: 2, Crashes: 1, Units: 24, Scripts: [][]Step{
		{k(Demote, 0), k(Collect, 0), k(Promote, 0)}, {k(Get, 0), k(Put, 0), k(Get, 0), k(Incr, 0)}}, Setup: one,
		Warm: true},
	"tier-expire": {Tier: true, Cache: true, Clock: 1, Units: 24, Epochs: 6, Scripts: [][]Step{
		{k(Demote, 0), k(Collect, 0), k(Promote, 0), k(Evict, 0)}, {k(PutEx, 0), k(Get, 0), k(Get, 0), k(Has, 0)}},
		Setup: []Step{k(PutEx, 0)}, Warm: true},
	"tier-gone": {Tier: true, Cache: true, Replicas: 2, Lost: 2, Crashes: 1, Units: 24, Scripts: [][]Step{
		{k(Demote, 0), k(Get, 0), k(Demote, 0), k(Collect, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Incr, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"tier-given-up": {Tier: true, Replicas: 2, GivenUp: 1, Units: 24, Scripts: [][]Step{
		{k(Demote, 0), k(Get, 0), k(Promote, 0)}, {k(Get, 0), k(Put, 0), k(Get, 0), k(Incr, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"tier-txn": withTier(txnMix(2, Config{Crashes: 1}), []Step{k(Txn, 0), k(Get, 0), k(Get, 10)},
		[]Step{k(Demote, 0), k(Collect, 0), k(Demote, 10), k(Collect, 0)}, []Step{k(Get, 0), k(Txn, 1), k(Put, 0)}),
}

func withTier(cfg Config, scripts ...[]Step) Config {
	cfg = withScripts(cfg, scripts...)
	cfg.Tier = true
	return cfg
}

// tierScopes are searched exhaustively, as far as there is time.
var tierScopes = map[string]Config{
	"tier-put": {Tier: true, Scripts: [][]Step{{k(Demote, 0), k(Collect, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
	"tier-delete": {Tier: true, Scripts: [][]Step{{k(Demote, 0), k(Collect, 0)}, {k(Del, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
	"tier-incr": {Tier: true, Scripts: [][]Step{{k(Demote, 0), k(Collect, 0)}, {k(Incr, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
	"tier-touch": {Tier: true, Scripts: [][]Step{{k(Demote, 0), k(Collect, 0)}, {k(Touch, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
	"tier-promote": {Tier: true, Scripts: [][]Step{{k(Demote, 0), k(Promote, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
	"tier-get-r2": {Tier: true, Replicas: 2, Scripts: [][]Step{{k(Demote, 0), k(Collect, 0)}, {k(Get, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"tier-drop": {Tier: true, Cache: true, Lost: 1, Scripts: [][]Step{{k(Get, 0)}, {k(Put, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0), k(Demote, 0)}, Warm: true},
	"tier-fence": {Tier: true, Crashes: 1, Scripts: [][]Step{{k(Demote, 0), k(Demote, 0)}, {k(Collect, 0), k(Get, 0)}},
		Setup: one, Warm: true},
}

func init() {
	maps.Copy(wide, tierWide)
	for name := range tierWide {
		heavy[name] = 4
	}
	maps.Copy(scopes, tierScopes)
}

// TestTier: among what the searches see are objects that are read, moved and freed, and records that come back.
func TestTier(t *testing.T) {
	for _, name := range sorted(tierWide) {
		sum := tier{}
		for seed := range uint64(60) {
			w, err := NewWorld(inMode(tierWide[name], seed%2 == 1), false)
			if err != nil {
				t.Fatal(err)
			}
			w.runRandom(seed)
			err = w.Finish()
			x := &w.tier
			sum.demoted, sum.promoted, sum.moved = sum.demoted+x.demoted, sum.promoted+x.promoted, sum.moved+x.moved
			sum.freed, sum.fetched, sum.dropped = sum.freed+x.freed, sum.fetched+x.fetched, sum.dropped+x.dropped
			w.Close()
			if err != nil {
				t.Fatalf("%s\n%v", replayHint(name, seed%2 == 1, seed), err)
			}
		}
		t.Logf("%s: %+v", name, sum)
		c := tierWide[name]
		loses := c.Lost+c.GivenUp > 0
		if sum.demoted == 0 || sum.fetched == 0 || loses && sum.dropped == 0 || !loses && sum.freed == 0 {
			t.Errorf("%s: %+v", name, sum)
		}
	}
}
