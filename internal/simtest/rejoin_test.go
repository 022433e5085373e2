package simtest

import (
	"maps"
	"strings"
	"testing"
)

// rejoinWide are random scopes in which a memory node that was declared lost comes back with what it held, mostly beside whatever else
// goes wrong.
var rejoinWide = map[string]Config{
	"rejoin": {Retains: true, Replicas: 2, Janitors: 1, NodePauses: 2, Pauses: 1, Failures: 1, Epochs: 6, Units: 16, WritePieces: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(Get, 1)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1), k(Add, 0)},
		{k(Add, 0), k(Get, 0), k(Put, 1), k(Incr, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1), k(Put, 2)}, Warm: true},
	// So little memory that places are used again and again, in reclaim epochs that are long.
	"rejoin-reuse": {Retains: true, Replicas: 2, Janitors: 1, NodePauses: 2, HeapUnits: 6, Units: 6, Stingy: true, Waits: true, Epochs: 10, Leap: 300, Leaders: 1, Scripts: [][]Step{
		{k(Put, 0), k(Del, 0), k(Put, 0), k(Close, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Del, 0), k(Put, 0)}},
		Setup: one, Warm: true},
	"rejoin-restart": {Replicas: 2, Nodes: 3, Janitors: 1, Restarts: 3, NodePauses: 1, NodeCrashes: 1, Crashes: 1, Epochs: 4, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"rejoin-r3": {Retains: true, Replicas: 3, Janitors: 1, NodePauses: 3, NodeCrashes: 1, Pauses: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"rejoin-move": {Retains: true, Replicas: 2, Nodes: 3, PGs: 2, Janitors: 2, Children: 2, NodePauses: 2, Crashes: 1, Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
		{k(Put, 10), k(Get, 10), k(Del, 10), k(Put, 12)},
		{k(Get, 10), k(Put, 11), k(Put, 10), k(Get, 12)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"rejoin-there-and-back": {Retains: true, Replicas: 2, Nodes: 4, PGs: 3, Janitors: 1, NodePauses: 2, Epochs: 6, Leap: 500, Acts: []Act{{Migrate, 1, 3}, {Migrate, 2, 1}}, Scripts: [][]Step{
		{k(Put, 0), k(Get, 0), k(Del, 0), k(Put, 2)},
		{k(Get, 0), k(Put, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"rejoin-recall": {Retains: true, Replicas: 2, Janitors: 1, TwoExtents: true, Acts: []Act{{Recall, 1, 0}}, NodePauses: 2, Crashes: 1, Epochs: 6, Units: 8, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 2)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"rejoin-recall-in-place": {Retains: true, Replicas: 2, Janitors: 1, TwoExtents: true, InPlace: true, Acts: []Act{{Recall, 1, 0}}, NodePauses: 2, Epochs: 8, Units: 8, Leap: 200, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 2)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"rejoin-evict": {Retains: true, Cache: true, Replicas: 2, Janitors: 1, NodePauses: 2, Crashes: 1, Epochs: 6, Units: 8, Scripts: [][]Step{
		{k(Put, 0), k(Evict, 0), k(Put, 0), k(Get, 0)},
		{k(GetIf, 0), k(Put, 0), k(Evict, 0), k(Add, 0)}},
		Setup: one, Warm: true},
	"rejoin-long": {Retains: true, Long: 0xb6, Units: 96, Replicas: 2, Janitors: 1, NodePauses: 2, Crashes: 1, Failures: 1, Epochs: 4, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(CAS, 1)},
		{k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 1), k(Del, 1)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	"rejoin-full": {Retains: true, Replicas: 2, Janitors: 1, NodePauses: 2, Crashes: 1, Fill: 29, OVF: true, Scripts: [][]Step{
		{k(Put, 0), k(Del, 0), k(Put, 2)},
		{k(Add, 1), k(Get, 0), k(Put, 0), k(Get, 2)}},
		Setup: one, Warm: true},
	"txn-r2-rejoin":       txnMix(2, Config{Retains: true, Janitors: 1, NodePauses: 2, Crashes: 1}),
	"txn-r2-rejoin-long":  txnMix(2, Config{Retains: true, Long: 0xb6, Units: 128, Janitors: 1, NodePauses: 2, Failures: 1}),
	"txn-r2-heirs-rejoin": txnHeirs(2, Config{Retains: true, NodePauses: 2, Crashes: 1, Pauses: 1}),
}

func init() {
	maps.Copy(wide, rejoinWide)
	for name := range rejoinWide {
		heavy[name] = 8
		if strings.HasPrefix(name, txnPrefix) {
			heavy[name] = 16
		}
	}
	maps.Copy(scopes, map[string]Config{
		"rejoin-update": {Retains: true, Replicas: 2, Janitors: 1, NodePauses: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
	})
}

// TestRejoins: the searches meet memory nodes that come back with what they held, and words of it that readers believe.
func TestRejoins(t *testing.T) {
	for _, sync := range []bool{false, true} {
		retained, believed := 0, 0
		for seed := range uint64(100) {
			w, err := NewWorld(inMode(wide["rejoin"], sync), false)
			if err != nil {
				t.Fatal(err)
			}
			w.runRandom(seed)
			retained, believed = retained+w.retained, believed+w.believed
			w.Close()
		}
		if retained < 10 || believed < 10 {
			t.Errorf("in 100 schedules, synchronous %t: %d regions are made of what was retained, and %d words of them are believed", sync, retained, believed)
		}
		t.Logf("synchronous %t: %d, %d", sync, retained, believed)
	}
}
