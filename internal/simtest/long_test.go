package simtest

import "maps"

// longWide are random scopes without transactions whose values go to chunks, all or some of them.
var longWide = map[string]Config{
	"long": {Long: 0x6e, Units: 48, Epochs: 8, Crashes: 1, Failures: 1, Deadlines: 1, WritePieces: 2, ReadPieces: 2,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(CAS, 1)},
			{k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 1), k(Del, 1)}, {k(Add, 0), k(Get, 0), k(Put, 1), k(GetIf, 0)}},
		Setup: k0(0), Warm: true},
	"long-reuse": {Long: 0xff, Units: 14, Epochs: 12, WritePieces: 2, ReadPieces: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Put, 0), k(Get, 0), k(Incr, 0), k(Get, 0)}},
		Setup: one, Warm: true},
	"long-r2": {Long: 0xb6, Units: 96, Replicas: 2, Epochs: 6, Crashes: 1, Failures: 1, Deadlines: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(CAS, 1)},
		{k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 1), k(Del, 1)}, {k(Add, 0), k(Get, 0), k(Put, 1), k(GetIf, 0)}},
		Setup: k0(0), Warm: true},
	"long-loss": {Long: 0xff, Units: 96, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Crashes: 1,
		Failures: 1, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 0)},
			{k(Add, 0), k(Get, 0), k(CAS, 0)}}, Setup: one, Warm: true},
	"long-recall": {Long: 0xff, Units: 24, Replicas: 2, TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}},
		Crashes: 1, Epochs: 6, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 2)}, {k(Get, 0), k(Put, 0), k(Get, 2), k(Put, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"long-migrate": {Long: 0xb6, Units: 96, Replicas: 2, PGs: 2, Janitors: 1, Children: 2, Acts: []Act{{Migrate, 1, 2}},
		Crashes: 1, Scripts: [][]Step{
			{k(Put, 0), k(Put, 10), k(Del, 0), k(Put, 0)}, {k(Get, 10), k(Put, 10), k(Get, 0), k(Incr, 10)}},
		Setup: k0(0),
		Warm:  true},
	"long-evict": {Long: 0xff, Units: 48, Cache: true, Replicas: 2, Crashes: 1, Epochs: 6, Scripts: [][]Step{
		{k(Put, 0), k(Evict, 0), k(Put, 0), k(Get, 0)}, {k(GetIf, 0), k(Put, 0), k(Evict, 0), k(Add, 0)}}, Setup: one,
		Warm: true},
}

func init() {
	maps.Copy(wide, longWide)
	for name := range longWide {
		heavy[name] = 4
	}
	heavy["long-loss"], heavy["long-migrate"], heavy["long-recall"] = 16, 16, 16
}
