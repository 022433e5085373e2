package simtest

import (
	"maps"
	"testing"
)

// hasWide are random scopes in which clients ask whether keys are there, by hints and without, while these are
// replaced, deleted, evicted and moved, and expire.
var hasWide = map[string]Config{
	"has": {Units: 4, Epochs: 12, Clock: 1, Crashes: 1, Failures: 1, Deadlines: 1, WritePieces: 2, ReadPieces: 2,
		Scripts: [][]Step{{k(Put, 0), k(Del, 0), k(PutEx, 0), k(Has, 1), k(Put, 1)},
			{k(Has, 0), k(Has, 0), k(Put, 0), k(Has, 0)}, {k(Del, 0), k(Has, 0), k(PutEx, 0), k(Has, 0)}},
		Setup: []Step{k(PutEx, 0)}, Warm: true},
	"has-r2": {Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Crashes: 1, Epochs: 6, Units: 6,
		Scripts: [][]Step{{k(Put, 0), k(Has, 0), k(Del, 0), k(Put, 0)}, {k(Has, 0), k(CAS, 0), k(Has, 0), k(Has, 1)}},
		Setup:   one, Warm: true},
	"has-evict": {Cache: true, Replicas: 2, Clock: 1, Epochs: 6, Units: 6, Crashes: 1, Scripts: [][]Step{
		{k(Evict, 0), k(Put, 0), k(Has, 0), k(Expire, 0)}, {k(Has, 0), k(PutEx, 0), k(Evict, 0), k(Has, 0)}},
		Setup: []Step{k(PutEx, 0)}, Warm: true},
	"has-move": {Replicas: 2, PGs: 2, Janitors: 1, Children: 2, Epochs: 6,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Put, 10), k(Has, 10), k(Del, 10), k(Has, 12)}, {k(Has, 10), k(Put, 10), k(Has, 10)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"has-rot": {Replicas: 2, Rots: 2, Scripts: [][]Step{
		{k(Put, 0), k(Has, 0), k(Del, 0), k(Has, 1)}, {k(Has, 0), k(Has, 1), k(Put, 0), k(Has, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}},
	"has-long": {Long: 0xb6, Units: 96, Replicas: 2, Epochs: 8, Scripts: [][]Step{
		{k(Put, 0), k(Has, 0), k(Del, 0), k(Put, 0)}, {k(Has, 0), k(Get, 0), k(Incr, 0), k(Has, 0)}},
		Setup: one, Warm: true},
	"has-txn": withScripts(txnMix(2, Config{Crashes: 1}), []Step{k(Txn, 0), k(Has, 0), k(Has, 10)},
		[]Step{k(Has, 0), k(Txn, 1), k(Del, 0), k(Has, 0)}, []Step{k(Has, 10), k(Has, 0), k(Put, 0), k(Has, 10)}),
}

// hasScopes are searched exhaustively.
var hasScopes = map[string]Config{
	"has-delete": {Scripts: [][]Step{{k(Del, 0), k(Put, 0)}, {k(Has, 0), k(Has, 0)}}, Setup: one, Warm: true},
	"has-expire": {Clock: 1, Scripts: [][]Step{{k(Del, 0), k(PutEx, 0)}, {k(Has, 0), k(Has, 0)}},
		Setup: []Step{k(PutEx, 0)}, Warm: true},
	"has-insert-r2": {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Has, 0), k(Has, 0)}}},
	"has-reuse": {Epochs: 4, Units: 2, Scripts: [][]Step{{k(Put, 0), k(Put, 1)}, {k(Has, 0)}}, Setup: one,
		Warm: true},
}

func init() {
	maps.Copy(wide, hasWide)
	for name := range hasWide {
		heavy[name] = 4
	}
	maps.Copy(scopes, hasScopes)
}

// TestHas: among what the searches see are keys that are there and such as are not, found by hints and without.
func TestHas(t *testing.T) {
	for _, name := range sorted(hasWide) {
		for _, sync := range []bool{false, true} {
			found := map[Outcome]int{}
			for seed := range uint64(40) {
				w, err := NewWorld(inMode(hasWide[name], sync), false)
				if err != nil {
					t.Fatal(err)
				}
				w.runRandom(seed)
				err = w.Finish()
				for i := range w.hist {
					if e := &w.hist[i]; e.Verb == Has {
						found[e.Out]++
					}
				}
				w.Close()
				if err != nil {
					t.Fatalf("%s\n%v", replayHint(name, sync, seed), err)
				}
			}
			if t.Logf("%s, synchronous %t: %v", name, sync, found); found[OK] == 0 || found[NotFound] == 0 {
				t.Errorf("%s, synchronous %t: %v", name, sync, found)
			}
		}
	}
}

// hasMutants are mistakes about what tells that a key is there.
var hasMutants = []mutant{
	{"there-by-a-start-alone", "has: a start counts if the slot holds the word", []edit{{"index/get.go",
		"		if w == o.x && w.Readable() {\n			if o.gotHead", "if true {\nif o.gotHead"}}},
	{"absent-by-starts", "has: that a key is absent rests on whole records", []edit{{op,
		"		o.inOne = true // that the key is absent",
		"if at == stepReadRecords {\nreturn o.notHome(o.groups[0])\n}\no.inOne = true //"}}},
}
