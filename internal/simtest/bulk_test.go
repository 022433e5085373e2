package simtest

import (
	"maps"
	"testing"
)

// Queue pairs that only long chains use are there from 9 bytes on, which leaves CASes and READs of slots to the first
// ones, or from 257 on, which takes a lock, reads its group and writes a record.
var bulkWide = map[string]Config{
	"bulk": {BulkFrom: 9, Crashes: 1, Pauses: 1, Failures: 2, Deadlines: 2, WritePieces: 2, Window: 2,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Add, 0), k(Get, 0)},
			{k(Put, 0), k(Get, 0), k(CAS, 0), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 1), k(Get, 0), k(Incr, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"bulk-reuse": {BulkFrom: 9, Failures: 3, Deadlines: 2, Epochs: 8, Units: 4, ReadPieces: 2, WritePieces: 2,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Put, 0), k(Put, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Put, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"bulk-locks": {BulkFrom: 257, Failures: 2, Deadlines: 2, Window: 2, Scripts: [][]Step{
		{k(Add, 0), k(Del, 0), k(Add, 0), k(Put, 2), k(Add, 4)},
		{k(Add, 0), k(Put, 2), k(Del, 0), k(Add, 4), k(Put, 0)},
		{k(Put, 0), k(Del, 2), k(Add, 2), k(Get, 0)}}},
	"bulk-incr": {BulkFrom: 9, Failures: 3, Window: 3, Scripts: [][]Step{
		{k(Incr, 0), k(Put, 1), k(Incr, 0), k(Add, 2), k(Incr, 0), k(Del, 2)},
		{k(CAS, 1), k(Incr, 0), k(Add, 2), k(Incr, 0), k(CAS, 1), k(Incr, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	"bulk-long": {BulkFrom: 9, Replicas: 2, Long: 0b1010_1010, Failures: 2, Deadlines: 1, Units: 64,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Get, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"bulk-r2": {BulkFrom: 9, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Pauses: 1, Failures: 2,
		WritePieces: 2, Lanes: 2, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)},
			{k(Add, 0), k(Get, 0), k(Put, 1), k(Incr, 0)}},
		Setup: one, Warm: true},
	"bulk-restart": {BulkFrom: 9, Restarts: 2, NewKeys: true, Crashes: 1, Failures: 2, Deadlines: 1, Epochs: 8,
		Units: 4, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Add, 0), k(Get, 0)},
			{k(Put, 0), k(Get, 0), k(CAS, 0), k(Del, 0), k(Put, 0)}},
		Setup: one, Warm: true},
	"bulk-move": {BulkFrom: 257, Replicas: 2, PGs: 2, Janitors: 2, Children: 2, Failures: 2, Crashes: 1,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Put, 10), k(Get, 10), k(Del, 10), k(Put, 12)},
			{k(Get, 10), k(Put, 11), k(Put, 10), k(Get, 12)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"txn-bulk": txnMix(2, Config{BulkFrom: 9, Failures: 2, Crashes: 1}),
}

func init() {
	maps.Copy(wide, bulkWide)
	maps.Copy(heavy, map[string]int{"bulk-long": 2, "bulk-r2": 4, "bulk-restart": 2, "bulk-move": 4, "txn-bulk": 8})
	maps.Copy(scopes, map[string]Config{
		"bulk-update": {BulkFrom: 9, Failures: 1, Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: one,
			Warm: true},
		"bulk-insert": {BulkFrom: 257, Failures: 1, Scripts: [][]Step{{k(Add, 0), k(Put, 0)}, {k(Add, 0)}}},
	})
}

// TestBulk: among what the searches see are chains on second queue pairs, beside others on first ones, and failures of
// either.
func TestBulk(t *testing.T) {
	for _, name := range sorted(bulkWide) {
		var verbs, failed [2]int // first, second queue pairs
		for seed := range uint64(60) {
			w, err := NewWorld(wide[name], false)
			if err != nil {
				t.Fatal(err)
			}
			w.runRandom(seed)
			for _, c := range w.cls {
				for _, q := range c.conns {
					if n := q.qp.Counters(); n.Total() > 0 {
						verbs[b2i(q.bulk)]++
						failed[b2i(q.bulk)] += b2i(!q.open)
					}
				}
			}
			err = w.err
			w.Close()
			if err != nil {
				t.Fatalf("%s\n%v", replayHint(name, false, seed), err)
			}
		}
		t.Logf("%s: %d first and %d second queue pairs were used; %v were replaced", name, verbs[0], verbs[1], failed)
		if verbs[0] == 0 || verbs[1] == 0 || failed[0] == 0 || failed[1] == 0 {
			t.Errorf("%s: %d first and %d second queue pairs were used, %v were replaced", name, verbs[0], verbs[1],
				failed)
		}
	}
}
