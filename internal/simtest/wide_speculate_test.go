package simtest

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/internal/layout"
)

// specWide are random scopes for what happens to tentative words.
var specWide = map[string]Config{
	"r3": {Replicas: 3, Scripts: [][]Step{
		{k(Put, 0), k(Get, 0), k(CAS, 0), k(Put, 0)},
		{k(Put, 0), k(Incr, 0), k(Get, 0)},
		{k(Get, 0), k(CAS, 0), k(Get, 0), k(Del, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"r3-faults": {Replicas: 3, Crashes: 1, Failures: 2, Deadlines: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(CAS, 0), k(Get, 0)},
		{k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 0)},
		{k(CAS, 0), k(Get, 0), k(DelIf, 0), k(Add, 0)}},
		Setup: one, Warm: true, WritePieces: 2},
	"r2-crash": {Replicas: 2, Crashes: 1, Failures: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(CAS, 0), k(Get, 0)},
		{k(Put, 0), k(Get, 0), k(CAS, 0), k(Get, 0)},
		{k(Get, 0), k(CAS, 0), k(Get, 0), k(Incr, 0)}},
		Setup: one, Warm: true},
	"r2-head": {Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, Crashes: 1, Failures: 1, Scripts: [][]Step{
		{k(Put, 0), k(CAS, 0), k(Put, 0), k(Get, 0)},
		{k(Put, 0), k(Get, 0), k(CAS, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"r3-head": {Replicas: 3, Nodes: 3, Janitors: 1, NodeCrashes: 1, Failures: 1, Scripts: [][]Step{
		{k(Put, 0), k(CAS, 0), k(Put, 0)},
		{k(Put, 0), k(Get, 0), k(CAS, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	// The middle replica lags behind the others, and is all that is left.
	"r3-confirm": {Replicas: 3, Crashes: 1, NodeCrashes: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0), k(Get, 0)}, {k(Get, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	// A client that died may have left a tentative word that lies in what is recalled.
	"r2-recall-stray": {Replicas: 2, Janitors: 1, TwoExtents: true, Acts: []Act{{Recall, 1, 0}}, Crashes: 1,
		Failures: 1, Units: 6, Epochs: 4, Scripts: [][]Step{{k(Put, 0), k(Put, 0), k(Put, 0)},
			{k(Put, 0), k(Get, 0), k(Put, 0)}},
		Setup: one, Warm: true},
	// Tentative words rot, too.
	"r2-rot-crash": {Replicas: 2, Rots: 3, Crashes: 1, Failures: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Get, 0), k(CAS, 0)},
		{k(Put, 0), k(Get, 0), k(Incr, 0), k(Get, 0)},
		{k(Get, 0), k(Put, 0), k(Scan, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"r3-rot-crash": {Replicas: 3, Rots: 3, Crashes: 1, Failures: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(CAS, 0)},
		{k(Put, 0), k(Get, 0), k(Incr, 0), k(Get, 0)},
		{k(Get, 0), k(DelIf, 0), k(Put, 0)}},
		Setup: one, Warm: true},
	"r3-reuse": {Replicas: 3, Units: 4, Epochs: 10, Failures: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Put, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Put, 0)}},
		Setup: one, Warm: true, WritePieces: 2},
}

// specSmall are searched exhaustively.
var specSmall = map[string]Config{
	"put-put": {Replicas: 2, Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: one, Warm: true},
	"r3-put-get": {Replicas: 3, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
	"r3-put-cas": {Replicas: 3, Scripts: [][]Step{{k(Put, 0)}, {k(CAS, 0)}}, Setup: one, Warm: true},
	"crash": {Replicas: 2, Crashes: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Put, 0)}}, Setup: one,
		Warm: true},
	"fail": {Replicas: 2, Failures: 1, Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(CAS, 0)}}, Setup: one,
		Warm: true},
	"put-del": {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Del, 0), k(Get, 0)}}, Setup: one, Warm: true},
}

// specPrefix begins the names of scopes in which placement groups publish speculatively: twins of those with more than
// one copy, and some more.
const specPrefix = "spec"

// This file's name is behind those of all files with scopes, so all are there.
func init() {
	// c0 dies when the head and the tail have its word, and the middle replica has not. c1 reads it. Tempting: what
	// the head shows is decided, so it is confirmed. But then the middle replica is all that is left. Harmless if c1
	// brings that up before it answers.
	scenarios["spec-confirmed-by-the-head-alone"] = scenario{
		Config{Speculative: true, Replicas: 3, Crashes: 1, NodeCrashes: 2,
			Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: one, Warm: true},
		[]string{"c0 begins", "c0 m0 WRITE", "c0 m0 CAS", "c0 m2 WRITE", "c0 m2 CAS", "c0 crashes", "time passes",
			"directory*", "c1 begins", "c1*", "m0 crashes", "m2 crashes", "time passes", "directory*"}}
	// c0 does not know of the recall. It dies when the tail alone has its word, whose place lies in the extent. The
	// head's lies elsewhere. Tempting: what the head shows is all that a recall has to move. But nobody undoes a
	// tentative word. Harmless if the head's record goes elsewhere once more, which moves the tail on.
	stray := recalling(Config{Speculative: true, Scripts: [][]Step{{k(Get, 0), k(Put, 0)}, one, {k(Get, 0)}},
		Setup: one, Warm: true, Crashes: 1})
	scenarios["spec-recall-of-a-tentative-word"] = scenario{stray,
		cat([]string{"begin recall", "c1 learns", "c1 begins", "c1*", "c0 begins", "c0*", "c0 begins", "c0 m1 WRITE",
			"c0 m1 CAS", "c0 crashes", "time passes", "directory*"},
			repeated(3, "all*", "E advances"), []string{"freed"})}
	for name, cfg := range maps.Clone(wide) {
		if cfg.Replicas > 1 {
			cfg.Speculative = true
			wide[specPrefix+"-"+name], heavy[specPrefix+"-"+name] = cfg, 8*max(1, heavy[name])
		}
	}
	for name, cfg := range specWide {
		cfg.Speculative = true
		wide[specPrefix+"-"+name], heavy[specPrefix+"-"+name] = cfg, 2
	}
	for name, cfg := range maps.Clone(scopes) {
		if cfg.Replicas > 1 {
			cfg.Speculative = true
			scopes[specPrefix+"-"+name] = cfg
		}
	}
	for name, cfg := range specSmall {
		cfg.Speculative = true
		scopes[specPrefix+"-"+name] = cfg
	}
}

// TestSpeculates: among what the searches see are words that other replicas show before the head takes them, and such
// as it never takes.
func TestSpeculates(t *testing.T) {
	for _, name := range []string{"spec-r2-mixed", "spec-r3", "spec-r3-faults", "spec-r2-crash", "spec-r3-head"} {
		tentative, strays := 0, 0
		for seed := range uint64(100) {
			w, err := NewWorld(inMode(wide[name], seed%2 == 1), false)
			if err != nil {
				t.Fatal(err)
			}
			w.runRandom(seed)
			tentative += w.tentative
			for _, r := range w.regions {
				for _, s := range r.slots {
					for _, x := range s.past {
						if !slices.Contains(w.decided[slotAt{r.pg, s.off}], x) {
							strays++
						}
					}
				}
			}
			w.Close()
		}
		if t.Logf("%s: %d tentative, %d never decided", name, tentative, strays); tentative < 20 || strays < 5 {
			t.Errorf("%s: %d words were tentative in 100 schedules, %d of them for ever", name, tentative, strays)
		}
	}
}

// slotAt is a slot of a placement group, on whichever replica.
type slotAt struct {
	pg  uint32
	off uint64
}

// decide notes that the head of a placement group holds a word: it is decided.
func (w *World) decide(r *region, s *slot) {
	at := slotAt{r.pg, s.off}
	if l := w.decided[at]; s.now != 0 && (len(l) == 0 || l[len(l)-1] != s.now) {
		if w.decided == nil {
			w.decided = map[slotAt][]layout.Word{}
		}
		w.decided[at] = append(l, s.now)
	}
}

// checkParent checks that a record which a head links names a parent of the same placement group, or none: places of
// another one mean something else.
func (w *World) checkParent(r *region, rec *layout.Record) {
	if rec.Parent == 0 {
		return
	}
	for x := range w.linked {
		if x.pg == r.pg && rec.IsChildOf(x.word) {
			return
		}
	}
	w.fail(fmt.Errorf("I2: m%d links a child of %v, which pg %d has never linked", r.node.i, rec.Parent, r.pg))
}

// checkDecided checks I2 where words are published speculatively. Each word that R[k] takes is decided, or a LIVE
// child, by its record, of a word decided before. The decided ones come in the order of the heads.
func (w *World) checkDecided(r *region, s *slot) {
	decided := w.decided[slotAt{r.pg, s.off}]
	i := 0
	for _, x := range s.past {
		at := slices.Index(decided, x)
		if at < 0 {
			continue
		}
		for ; i < len(decided) && decided[i] != x; i++ {
		}
		if i == len(decided) {
			w.fail(fmt.Errorf("I2: slot %#x of m%d takes %v, which is not the heads' order: %v, decided %v", s.off,
				r.node.i, s.now, s.past, decided))
			return
		}
		i++
	}
	if s.now == 0 || slices.Contains(decided, s.now) {
		return
	}
	if s.now.State() == layout.Live {
		if rec, err := w.recordAt(r, s.now); err == nil && slices.ContainsFunc(decided, rec.IsChildOf) {
			w.tentative++
			return
		}
	}
	w.fail(fmt.Errorf("I2: slot %#x of m%d takes %v, which is neither decided nor a child of what is: %v", s.off,
		r.node.i, s.now, decided))
}
