package simtest

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/index/repair"
	policy "github.com/kvd-project/kvd/internal/evict"
	"github.com/kvd-project/kvd/internal/layout"
)

// pinMillis is for how long values are pinned: longer than the clock moves at once, and shorter than twice that.
const pinMillis = 6000

// pinned is how many pinned records evictions have spared, have taken beyond the quota, and have taken when the pin was
// over.
type pinned struct {
	spared, broken, over int
	// Evictions that found more pinned than the quota, and no more, by all that lived; and that did not look at all.
	above, within, partial int
	until                  map[string]uint64 // Unix ms, by value, as its writer has asked for it
}

// pin pins what r writes, if cfg says so of the client's latest value.
func (c *cl) pin(r *running) {
	writes := r.step.Verb == Put || r.step.Verb == PutEx || r.step.Verb == Add || r.step.Verb == CAS
	if writes && c.w.cfg.Pins>>(c.values%8)&1 != 0 {
		until := c.w.millis + pinMillis
		r.t.Op.Pinned = uint32(until / 1000)
		if c.w.pins.until == nil {
			c.w.pins.until = map[string]uint64{}
		}
		c.w.pins.until[r.e.Value] = until
	}
}

// unpinned leaves of the picked candidates those that may go, as the library's evictor does.
func (c *cl) unpinned(ev *evicting, l []repair.Candidate, picked []int) (out []int) {
	sample := make([]policy.Candidate, len(l))
	for i, x := range l {
		sample[i] = policy.Candidate{Word: x.Access, Known: x.Access != 0, Units: x.Units}
	}
	var p policy.Pins
	may, _ := p.Evictable(c.w.millis, c.w.cfg.PinQuota, sample, len(sample), nil)
	ev.over = p.Over(c.w.cfg.PinQuota)
	c.w.quotaJudged(c, ev)
	for _, i := range picked {
		if slices.Contains(may, i) {
			out = append(out, i)
		}
	}
	return out
}

// spare has pinned records stay, unless ev has found too many.
func (c *cl) spare(ev *evicting) func(x repair.Candidate, until uint64) bool {
	return func(x repair.Candidate, until uint64) bool {
		if until <= c.w.millis || ev.over {
			return false
		}
		c.w.pins.spared++
		return true
	}
}

// unpins checks that ev, an eviction, may take rec from a head, where x named it. It goes by what the writer asked for.
func (w *World) unpins(c *cl, ev *evicting, x layout.Word, rec *layout.Record) {
	until := w.pins.until[w.linked[named{ev.pg, x.WithState(layout.Live)}].value]
	switch {
	case until == 0 || rec.Expiry != 0 && rec.Expiry <= w.millis:
	case until <= w.millis:
		w.pins.over++
	case ev.over:
		w.pins.broken++
	default:
		w.fail(fmt.Errorf("client %d evicts %q at %d, which is pinned until %d", c.i, rec.Key, w.millis, until))
	}
}

// pinsWide are random scopes with values that are pinned when they are put, all or some of them.
var pinsWide = map[string]Config{
	"pins": {Cache: true, Pins: 0xb6, PinQuota: 0.6, Clock: 3, Crashes: 1, Pauses: 1, Deadlines: 1, Failures: 1,
		Epochs: 6, Units: 6, WritePieces: 2, Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Put, 2), k(Evict, 0), k(Get, 0)},
			{k(Evict, 0), k(PutEx, 0), k(Evict, 0), k(GetIf, 0), k(CAS, 0)},
			{k(Del, 0), k(Add, 0), k(Get, 2), k(Evict, 2), k(Put, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"pins-r2": {Cache: true, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, Pins: 0xff, PinQuota: 1, Clock: 2,
		Crashes: 1, Pauses: 1, Failures: 1, Epochs: 4, Units: 6, Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Put, 0), k(Evict, 0)},
			{k(Evict, 0), k(Del, 0), k(Put, 0), k(Get, 0)},
			{k(Get, 0), k(Evict, 0), k(Incr, 0), k(Evict, 0)}},
		Setup: one, Warm: true},
	"pins-long": {Cache: true, Pins: 0xff, PinQuota: 1, Long: 0x5a, Clock: 2, Crashes: 1, Failures: 1, Epochs: 4,
		Units: 64, Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Put, 0), k(Evict, 0)},
			{k(Evict, 0), k(CAS, 0), k(Evict, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	// A key that is not pinned takes the slot of one that was.
	"pins-slot": {Cache: true, Pins: 0b10, PinQuota: 0.6, Clock: 1, Crashes: 1, Failures: 1, Epochs: 4, Units: 6,
		Scripts: [][]Step{
			{k(Evict, 0), k(Del, 0), k(Put, 2), k(Evict, 2), k(Evict, 2)},
			{k(Get, 2), k(Evict, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"pins-recall": {Cache: true, Replicas: 2, Janitors: 2, TwoExtents: true, Acts: []Act{{Recall, 1, 0}}, Pins: 0xff,
		PinQuota: 1, Clock: 2, Crashes: 1, Epochs: 4, Units: 6, Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Get, 2), k(Evict, 2)},
			{k(Evict, 2), k(Put, 2), k(Evict, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
}

// pinsMutants are mistakes about pins.
var pinsMutants = []mutant{
	{"pins-unasked", "pins: an eviction reads until when the header pins a record", []edit{{evict,
		"if it.evicted.Expired || o.Work.Spare == nil ||", "if true || o.Work.Spare == nil ||"}}},
	{"pins-end-early", "pins: a pin lasts until its time", []edit{{"internal/layout/record.go",
		"return uint64(r.Pinned) * 1000", "return uint64(r.Pinned) * 999"}}},
	{"pins-of-another-key", "pins: an access word tells of the key whose tag it has, and the quota goes by that",
		[]edit{{evict, "; a.Of(x) {", "; a != 0 {"}}},
	{"pin-not-written", "pins: a record says until when it is pinned",
		[]edit{{"index/update.go", "Pinned: o.Pinned,", "Pinned: 0,"}}},
	{"pin-not-written-at-once", "pins: a record says until when it is pinned, of a hinted put too",
		[]edit{{hinted, "			Pinned: op.Pinned, Writer", "			Writer"}}},
}

func init() {
	maps.Copy(wide, pinsWide)
	maps.Copy(heavy, map[string]int{"pins": 2, "pins-r2": 2, "pins-long": 2, "pins-recall": 2, "pins-slot": 2})
	maps.Copy(scopes, map[string]Config{
		"pins-put": {Cache: true, Pins: 0b0101_0101, PinQuota: 1, Clock: 2,
			Scripts: [][]Step{{k(Evict, 0), k(Get, 0)}, {k(Put, 0)}}, Setup: one, Warm: true},
	})
}

// TestPins sees that evictions spare what is pinned in these scopes, and take it beyond the quota and when its time is
// over.
func TestPins(t *testing.T) {
	var all pinned
	for name := range pinsWide {
		for _, sync := range []bool{false, true} {
			for seed := range uint64(40) {
				w, err := NewWorld(inMode(wide[name], sync), false)
				if err != nil {
					t.Fatal(err)
				}
				w.runRandom(seed)
				err = w.Finish()
				all.spared += w.pins.spared
				all.broken += w.pins.broken
				all.over += w.pins.over
				all.above += w.pins.above
				all.within += w.pins.within
				all.partial += w.pins.partial
				w.Close()
				if err != nil {
					t.Fatalf("%s\n%v", replayHint(name, sync, seed), err)
				}
			}
		}
	}
	if t.Logf("%+v", all); all.spared == 0 || all.broken == 0 || all.over == 0 ||
		all.above == 0 || all.within == 0 {
		t.Errorf("%+v", all)
	}
}
