package simtest

import "maps"

// archiveWide are random scopes in which a client goes through the keys and gets them, as a snapshot does, while others
// write and keys move, are evicted, or are in transactions. Each get is checked like any, and a scan misses no key that
// stood there throughout.
var archiveWide = map[string]Config{
	"archive-move": {Replicas: 2, PGs: 2, Janitors: 1, Children: 2, Epochs: 6,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Scan, 0), k(Get, 10), k(Get, 11), k(Get, 0)}, {k(Put, 10), k(Del, 11), k(Put, 11), k(Put, 0)}},
		Setup: []Step{k(Put, 10), k(Put, 11), k(Put, 0)}},
	"archive-join": {Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Epochs: 6, Units: 6,
		Scripts: [][]Step{{k(Scan, 0), k(Get, 0), k(Get, 1), k(Get, 2)}, {k(Put, 0), k(Del, 1), k(Put, 1), k(Put, 2)}},
		Setup:   []Step{k(Put, 0), k(Put, 1)}},
	"archive-evict": {Cache: true, Epochs: 4, Units: 6, Scripts: [][]Step{
		{k(Scan, 0), k(Get, 0), k(Get, 1)}, {k(Evict, 0), k(Put, 0), k(Evict, 1), k(Put, 1)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}},
	"archive-txn": withScripts(txnMix(1, Config{Crashes: 1}),
		[]Step{k(Scan, 0), k(Get, 0), k(Get, 10), k(Get, 11)}, []Step{k(Txn, 0), k(Put, 0), k(Txn, 2)},
		[]Step{k(Txn, 1), k(Txn, 5), k(Del, 0)}),
}

func init() {
	maps.Copy(wide, archiveWide)
	for name := range archiveWide {
		heavy[name] = 8
	}
}
