package simtest

import (
	"maps"

	"github.com/kvd-project/kvd/index"
)

func put(key int, c ...index.Cond) Part  { return aPart(index.PutKey, key, c) }
func del(key int, c ...index.Cond) Part  { return aPart(index.DeleteKey, key, c) }
func keep(key int, c ...index.Cond) Part { return aPart(index.KeepKey, key, c) }

func aPart(e index.Effect, key int, c []index.Cond) Part {
	p := Part{Key: key, Effect: e}
	for _, x := range c {
		p.Cond = x
	}
	return p
}

func k0(key int) []Step { return []Step{k(Put, key), k(Put, 10)} }

// pair is a scope over two keys in two placement groups, with one status word a client in the first of them.
func pair(replicas int, c Config) Config {
	c.Replicas, c.PGs, c.Halves = replicas, 2, true
	if c.Status == 0 {
		c.Status = 1
	}
	c.Warm = len(c.Setup) > 0
	return c
}

var two = []Part{put(0), put(10)}

// txnScopes are exhaustive ones with transactions.
var txnScopes = map[string]Config{
	"txn-get": pair(1, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 10)}},
		Setup: k0(0)}),
	"txn-get-back": pair(1, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 10), k(Get, 0)}},
		Setup: k0(0), Crashes: 1}),
	"txn-put": pair(1, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}},
		Setup: k0(0)}),
	"txn-txn": pair(
		1, Config{Txns: [][]Part{two, {put(10), del(0)}}, Scripts: [][]Step{{k(Txn, 0)}, {k(Txn, 1)}}, Setup: k0(0)}),
	"txn-guard": pair(
		1, Config{Txns: [][]Part{{keep(0), put(10)}}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}},
			Setup: k0(0)}),
	"txn-insert": pair(1, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Add, 0), k(Get, 10)}}}),
	"txn-next": pair(
		1, Config{Txns: [][]Part{two, {put(0)}}, Scripts: [][]Step{{k(Txn, 0), k(Txn, 1)}, {k(Get, 0), k(Get, 10)}},
			Setup: k0(0)}),
	"txn-r2-get": pair(2, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 10)}},
		Setup: k0(0)}),
	"txn-r2-get-back": pair(2, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 10), k(Get, 0)}},
		Setup: k0(0)}),
	"txn-r2-put-crash": pair(2, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}},
		Setup: k0(0), Crashes: 1}),
	"txn-r2-loss": pair(2, Config{Nodes: 3, Janitors: 1, NodeCrashes: 1, Txns: [][]Part{two},
		Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
	"txn-guard-absent": pair(1, Config{Txns: [][]Part{{keep(0, index.IfAbsent), put(10)}},
		Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}}}),
	"txn-look": pair(1, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Look, 0)}},
		Setup: k0(0)}),
	"txn-look-put": pair(1, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Put, 0), k(Put, 10)}, {k(Look, 0)}},
		Setup: k0(0)}),
	"txn-r2-look": pair(2, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Look, 0)}},
		Setup: k0(0)}),
	"txn-heir":    heir(1, Config{}),
	"txn-r2-heir": heir(2, Config{}),
	"txn-delete-insert": pair(1, Config{Txns: [][]Part{{del(0), put(10, index.IfAbsent)}},
		Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 10), k(Put, 0)}}, Setup: []Step{k(Put, 0)}}),
}

// nearTwo are two keys of one placement group, and farTwo of two: what one chain and two chains are about.
var (
	nearTwo = []Part{put(0), put(20)}
	farTwo  = []Part{put(10), put(0)}
)

func kNearTwo() []Step { return []Step{k(Put, 0), k(Put, 20)} }

// chained is pair for transactions that are tried as one chain first.
func chained(c Config) Config {
	c.Together = true
	return pair(1, c)
}

// cold is c without hints: keys are looked for.
func cold(c Config) Config {
	c.Warm = false
	return c
}

// chainScopes are exhaustive ones with transactions that are one chain, or two.
var chainScopes = map[string]Config{
	"txn-chain-get": chained(Config{Txns: [][]Part{nearTwo}, Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 20)}},
		Setup: kNearTwo()}),
	"txn-chain-get-back": chained(Config{Txns: [][]Part{nearTwo},
		Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 20), k(Get, 0)}},
		Setup:   kNearTwo(), Crashes: 1}),
	"txn-chain-put": chained(Config{Txns: [][]Part{nearTwo}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 20), k(Get, 0)}},
		Setup: kNearTwo()}),
	"txn-chain-txn": chained(Config{Txns: [][]Part{nearTwo, {put(20), del(0)}},
		Scripts: [][]Step{{k(Txn, 0)}, {k(Txn, 1)}}, Setup: kNearTwo()}),
	"txn-chain-next": chained(Config{Txns: [][]Part{nearTwo, {del(20), put(0)}}, Setup: kNearTwo(),
		Scripts: [][]Step{{k(Txn, 0), k(Txn, 1)}, {k(Get, 0), k(Get, 20)}}}),
	"txn-chain-if": chained(Config{Txns: [][]Part{{put(0, index.IfVersion), put(20)}}, Setup: kNearTwo(),
		Scripts: [][]Step{{k(Get, 0), k(Txn, 0)}, {k(Put, 0), k(Get, 20)}}}),
	"txn-chain-fault": chained(Config{Txns: [][]Part{nearTwo}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0)}},
		Setup: kNearTwo(), Failures: 1}),
	"txn-chain-deadline": chained(Config{Txns: [][]Part{nearTwo},
		Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 20)}},
		Setup:   kNearTwo(), Deadlines: 1}),
	"txn-chain-far-get": chained(Config{Txns: [][]Part{farTwo}, Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 10)}},
		Setup: k0(0)}),
	"txn-chain-far-back": chained(Config{Txns: [][]Part{farTwo},
		Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 10), k(Get, 0)}},
		Setup:   k0(0), Crashes: 1}),
	"txn-chain-far-put": chained(Config{Txns: [][]Part{farTwo}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}},
		Setup: k0(0)}),
	"txn-chain-cold": cold(chained(Config{Txns: [][]Part{nearTwo}, Setup: kNearTwo(),
		Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 20), k(Get, 0)}}})),
	"txn-chain-cold-far": cold(chained(Config{Txns: [][]Part{farTwo}, Setup: k0(0),
		Scripts: [][]Step{{k(Get, 0), k(Txn, 0)}, {k(Del, 10), k(Get, 0)}}})),
	"txn-chain-far-next": chained(Config{Txns: [][]Part{farTwo, nearTwo},
		Setup:   []Step{k(Put, 0), k(Put, 10), k(Put, 20)},
		Scripts: [][]Step{{k(Txn, 0), k(Txn, 1)}, {k(Get, 10), k(Get, 0)}}}),
	"txn-chain-far-txn": chained(Config{Txns: [][]Part{farTwo, {put(0), del(10)}},
		Scripts: [][]Step{{k(Txn, 0)}, {k(Txn, 1)}}, Setup: k0(0)}),
}

// chainWide are random ones of the same kind.
var chainWide = map[string]Config{
	"txn-chain":            chainMix(Config{WritePieces: 2, ReadPieces: 2}),
	"txn-chain-fault-wide": chainMix(Config{Crashes: 1, Deadlines: 1, Failures: 2, WritePieces: 2}),
	"txn-chain-reuse":      chainMix(Config{Units: 20, Epochs: 10, Crashes: 1, WritePieces: 2, ReadPieces: 2}),
	"txn-chain-restart":    chainMix(Config{Restarts: 2, Crashes: 1, Failures: 1}),
	"txn-chain-join":       chainMix(Config{Replicas: 2, Missing: 1, Nodes: 3, Janitors: 1, Crashes: 1}),
	"txn-chain-cold-mix":   cold(chainMix(Config{Crashes: 1, Failures: 1})),
	"txn-chain-recall": {TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 48, HeapUnits: 1, Epochs: 6,
		Status: 2, Together: true, Txns: [][]Part{nearTwo, {put(20), put(0)}, {del(20), put(0)}}, Scripts: [][]Step{
			{k(Txn, 0), k(Get, 20), k(Txn, 2)}, {k(Txn, 1), k(Get, 0), k(Put, 20)}, {k(Get, 0), k(Get, 20), k(Put, 0)}},
		Setup: kNearTwo(), Warm: true},
	"txn-chain-split": {Janitors: 1, Children: 1, Acts: []Act{{Split, 1, 0}}, Status: 2, Together: true,
		Txns: [][]Part{nearTwo, {put(20), put(0)}, {put(12), del(20)}}, Scripts: [][]Step{
			{k(Txn, 0), k(Get, 20), k(Txn, 2), k(Put, 20)}, {k(Txn, 1), k(Put, 20), k(Txn, 0)},
			{k(Get, 0), k(Get, 20), k(Get, 12), k(Put, 0)}}, Setup: kNearTwo(), Warm: true},
	"txn-chain-migrate": {PGs: 2, Janitors: 1, Children: 2, Acts: []Act{{Migrate, 1, 2}}, Status: 2, Together: true,
		Txns: [][]Part{nearTwo, {put(20), put(0)}, {del(20), put(0)}}, Scripts: [][]Step{
			{k(Txn, 0), k(Get, 20), k(Txn, 2)}, {k(Txn, 1), k(Get, 0), k(Put, 20)}, {k(Get, 0), k(Get, 20), k(Put, 0)}},
		Setup: kNearTwo(), Warm: true},
}

// chainMix are scripts with transactions of one chain and of two beside every key operation.
func chainMix(c Config) Config {
	c.Txns = [][]Part{nearTwo, {put(20), del(0)}, farTwo, {put(0, index.IfVersion), put(20)},
		{put(0), put(20), put(10)},
		{keep(0), put(20)}}
	c.Scripts = [][]Step{
		{k(Txn, 0), k(Get, 20), k(Get, 0), k(Txn, 3), k(Txn, 4)},
		{k(Get, 0), k(Get, 10), k(Put, 0), k(Get, 20), k(CAS, 20)},
		{k(Txn, 1), k(Get, 0), k(Txn, 2), k(Txn, 5), k(Del, 10)},
	}
	c.Setup = []Step{k(Put, 0), k(Put, 10), k(Put, 20)}
	c.Status, c.Together = 2, true
	return pair(max(c.Replicas, 1), c)
}

// txnLong are the scopes whose values go to chunks, all or some of them.
var (
	txnLong = map[string]Config{
		"txn-long-guard": pair(1, Config{Long: 0xff, Txns: [][]Part{{keep(0), put(10)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}}, Setup: k0(0)}),
		"txn-long-put": pair(
			1, Config{Long: 0xaa, Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}},
				Setup: k0(0)}),
		"txn-long-delete": pair(1, Config{Long: 0xff, Txns: [][]Part{{del(0), put(10)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 10), k(Del, 0)}}, Setup: k0(0)}),
		"txn-long-insert": pair(
			1, Config{Long: 0xff, Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Add, 0), k(Get, 10)}}}),
		"txn-long-txn": pair(1, Config{Long: 0xff, Txns: [][]Part{{put(0), keep(10)}, {put(10), keep(0)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Txn, 1)}}, Setup: k0(0)}),
		"txn-r2-long": pair(2, Config{Long: 0xff, Txns: [][]Part{{keep(0), put(10)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}}, Setup: k0(0), Crashes: 1}),
	}
	txnLongWide = map[string]Config{
		"txn-long":       txnMix(1, Config{Long: 0x6e, Units: 128, WritePieces: 2, ReadPieces: 2}),
		"txn-long-fault": txnMix(1, Config{Long: 0xff, Units: 128, Crashes: 1, Deadlines: 1, Failures: 1}),
		"txn-long-reuse": withScripts(
			txnMix(1, Config{Long: 0x6e, Units: 26, Epochs: 10, Crashes: 1, WritePieces: 2, ReadPieces: 2}),
			[]Step{k(Txn, 0), k(Txn, 2), k(Txn, 1), k(Put, 0)}, []Step{k(Get, 0), k(Put, 10), k(Get, 10), k(Put, 0),
				k(Get, 0)}),
		"txn-long-kinds": withScripts(txnMix(1, Config{Long: 0xb6, Units: 128, Crashes: 1}),
			[]Step{k(Txn, 5), k(Del, 0), k(Txn, 5), k(Txn, 6)}, []Step{k(Add, 0), k(Txn, 7), k(Incr, 0), k(DelIf, 0)},
			[]Step{k(Get, 11), k(GetIf, 0), k(Put, 1), k(Get, 11), k(Scan, 0)}),
		"txn-long-r2": txnMix(2, Config{Long: 0xb6, Units: 128, Crashes: 1, Deadlines: 1, Failures: 1}),
		"txn-long-r2-guard": withScripts(txnMix(2, Config{Long: 0xff, Units: 128, Crashes: 1}),
			[]Step{k(Txn, 2), k(Txn, 4)}, []Step{k(Txn, 2), k(Put, 0), k(Get, 10)},
			[]Step{k(Txn, 2), k(Get, 0), k(Del, 0)}),
		"txn-long-loss": txnMix(2, Config{Long: 0xff, Units: 128, Nodes: 3, Janitors: 1, NodeCrashes: 1,
			NodePauses: 1, Crashes: 1, Failures: 1}),
		"txn-long-r3-loss": txnMix(3, Config{Long: 0xb6, Units: 128, Nodes: 4, Janitors: 1, NodeCrashes: 2,
			Crashes: 1}),
		"txn-long-recall": {Long: 0xff, TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 48,
			HeapUnits: 1, Epochs: 6, Status: 2, Txns: [][]Part{two, {put(10), put(0)}, {keep(10), put(0)}},
			Scripts: [][]Step{
				{k(Txn, 0), k(Get, 10), k(Txn, 2)}, {k(Txn, 1), k(Get, 0), k(Put, 10)},
				{k(Get, 0), k(Get, 10), k(Put, 0)}},
			Setup: k0(0), Warm: true},
		"txn-long-migrate": {Long: 0xff, Units: 128, Replicas: 2, PGs: 2, Janitors: 1, Children: 2,
			Acts: []Act{{Migrate, 1, 2}}, Status: 2, Txns: [][]Part{two, {put(10), put(0)}, {keep(10), put(0)}},
			Scripts: [][]Step{
				{k(Txn, 0), k(Get, 10), k(Txn, 2)}, {k(Txn, 1), k(Get, 0), k(Put, 10)},
				{k(Get, 0), k(Get, 10), k(Put, 0)}},
			Setup: k0(0), Warm: true},
	}
)

// txnMix are scripts with transactions of every kind beside every key operation.
func txnMix(replicas int, c Config) Config {
	c.Txns = [][]Part{
		two,
		{put(10), put(0)},
		{keep(0), put(10)},
		{del(0), put(10)},
		{put(0, index.IfVersion), keep(10)},
		{put(0, index.IfAbsent), del(10)},
		{keep(0, index.IfAbsent), put(11)},
		{put(11), put(1), put(0)},
	}
	c.Scripts = [][]Step{
		{k(Txn, 0), k(Get, 10), k(Txn, 3), k(Txn, 4)},
		{k(Get, 0), k(Get, 10), k(Put, 0), k(Get, 10), k(CAS, 10)},
		{k(Txn, 1), k(Get, 0), k(Txn, 2), k(Del, 10)},
	}
	c.Setup = k0(0)
	c.Status = 2
	return pair(replicas, c)
}

// withScripts is c with other scripts.
func withScripts(c Config, s ...[]Step) Config {
	c.Scripts = s
	return c
}

// heir is a scope in which a client dies, perhaps with a transaction under way, and another goes on with its status
// word.
func heir(replicas int, c Config) Config {
	c.Crashes, c.Janitors, c.Heirs, c.Setup = 1, 1, 1, k0(0)
	c.Txns = [][]Part{two, {put(11), put(1)}}
	c.Scripts = [][]Step{{k(Txn, 0)}, {k(Grant, 0), k(Txn, 1), k(Get, 0), k(Get, 10)}}
	return pair(replicas, c)
}

// txnHeirs are scripts of two clients that die or close and of one that has their status words afterwards, beside key
// operations.
func txnHeirs(replicas int, c Config) Config {
	c.Janitors, c.Heirs, c.Status, c.Setup = max(c.Janitors, 1), 1, 2, k0(0)
	c.Txns = [][]Part{two, {put(10), del(0)}, {put(0), keep(10)}, {put(11), put(1)}, {put(0, index.IfAbsent), put(10)}}
	c.Scripts = [][]Step{
		{k(Txn, 0), k(Txn, 2), k(Txn, 4), k(Close, 0)},
		{k(Txn, 1), k(Put, 0), k(Txn, 0), k(Get, 10)},
		{k(Get, 0), k(Put, 0), k(Get, 10), k(Add, 0), k(CAS, 10)},
		{k(Grant, 0), k(Txn, 3), k(Get, 0), k(Txn, 2), k(Txn, 1)},
	}
	return pair(replicas, c)
}

// txnWide are random ones with transactions.
var txnWide = map[string]Config{
	"txn":       txnMix(1, Config{WritePieces: 2, ReadPieces: 2}),
	"txn-fault": txnMix(1, Config{Crashes: 1, Deadlines: 1, Failures: 1, WritePieces: 2}),
	"txn-reuse": withScripts(txnMix(1, Config{Units: 14, Epochs: 10, Crashes: 1, WritePieces: 2, ReadPieces: 2}),
		[]Step{k(Txn, 0), k(Txn, 2), k(Txn, 1), k(Put, 0)}, []Step{k(Get, 0), k(Put, 10), k(Get, 10), k(Put, 0),
			k(Get, 0)}),
	"txn-kinds": withScripts(txnMix(1, Config{Crashes: 1}),
		[]Step{k(Txn, 5), k(Del, 0), k(Txn, 5), k(Txn, 6)}, []Step{k(Add, 0), k(Txn, 7), k(Incr, 0), k(DelIf, 0)},
		[]Step{k(Get, 11), k(GetIf, 0), k(Put, 1), k(Get, 11), k(Scan, 0)}),
	"txn-r2":       txnMix(2, Config{WritePieces: 2}),
	"txn-r2-fault": txnMix(2, Config{Crashes: 1, Deadlines: 1, Failures: 1}),
	"txn-r2-kinds": withScripts(txnMix(2, Config{Crashes: 1, Patient: true}),
		[]Step{k(Txn, 5), k(Del, 0), k(Txn, 5), k(Txn, 6)}, []Step{k(Add, 0), k(Txn, 7), k(Incr, 0), k(DelIf, 0)},
		[]Step{k(Get, 11), k(GetIf, 0), k(Put, 1), k(Get, 11)}),
	"txn-r2-loss": txnMix(2, Config{Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Crashes: 1, Failures: 1}),
	"txn-r3-loss": txnMix(3, Config{Nodes: 4, Janitors: 1, NodeCrashes: 2, Crashes: 1}),
	// Moves and recalls wait for intents, so none may be left behind.
	"txn-split": {Replicas: 2, Janitors: 1, Children: 1, Acts: []Act{{Split, 1, 0}}, Status: 2,
		Txns: [][]Part{two, {put(10), put(0)}, {keep(10), put(0)}, {put(12), del(10)}}, Scripts: [][]Step{
			{k(Txn, 0), k(Get, 10), k(Txn, 3), k(Put, 10)}, {k(Txn, 1), k(Put, 10), k(Txn, 2)},
			{k(Get, 0), k(Get, 10), k(Get, 12), k(Put, 0)}}, Setup: k0(0), Warm: true},
	"txn-migrate": {Replicas: 2, PGs: 2, Janitors: 1, Children: 2, Acts: []Act{{Migrate, 1, 2}}, Status: 2,
		Txns: [][]Part{two, {put(10), put(0)}, {keep(10), put(0)}}, Scripts: [][]Step{
			{k(Txn, 0), k(Get, 10), k(Txn, 2)}, {k(Txn, 1), k(Get, 0), k(Put, 10)}, {k(Get, 0), k(Get, 10), k(Put, 0)}},
		Setup: k0(0), Warm: true},
	"txn-recall": {TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 24, HeapUnits: 1, Epochs: 6,
		Status: 2, Txns: [][]Part{two, {put(10), put(0)}, {keep(10), put(0)}}, Scripts: [][]Step{
			{k(Txn, 0), k(Get, 10), k(Txn, 2)}, {k(Txn, 1), k(Get, 0), k(Put, 10)}, {k(Get, 0), k(Get, 10), k(Put, 0)}},
		Setup: k0(0), Warm: true},
	"txn-evict": withScripts(txnMix(2, Config{Cache: true, Crashes: 1, Units: 48}),
		[]Step{k(Txn, 0), k(Evict, 0), k(Txn, 2)}, []Step{k(Evict, 10), k(Get, 10), k(Put, 10), k(Get, 0)},
		[]Step{k(Txn, 1), k(Evict, 0), k(Get, 10)}),
	// Transactions that only read.
	"txn-looks": withScripts(txnMix(1, Config{Crashes: 1, WritePieces: 2, ReadPieces: 2}),
		[]Step{k(Txn, 0), k(Put, 10), k(Txn, 2)}, []Step{k(Look, 0), k(Look, 7), k(Look, 0)},
		[]Step{k(Txn, 1), k(Put, 0), k(Txn, 7), k(Put, 10)}),
	"txn-r2-looks": withScripts(txnMix(2, Config{Crashes: 1, Deadlines: 1}),
		[]Step{k(Txn, 0), k(Txn, 3), k(Txn, 0)}, []Step{k(Look, 0), k(Look, 7), k(Look, 0)},
		[]Step{k(Txn, 5), k(Del, 0), k(Txn, 1), k(Put, 10)}),
	// Status words are granted again.
	"txn-heirs":      txnHeirs(1, Config{Crashes: 1, WritePieces: 2}),
	"txn-r2-heirs":   txnHeirs(2, Config{Crashes: 2, Deadlines: 1, Pauses: 1}),
	"txn-long-heirs": txnHeirs(2, Config{Long: 0xff, Units: 128, Crashes: 2}),
	"txn-r2-heirs-loss": txnHeirs(2, Config{Nodes: 3, Janitors: 2, NodeCrashes: 1, NodePauses: 1, Crashes: 2,
		Failures: 1, Leaders: 1}),
	"txn-heirs-split": {Replicas: 2, Janitors: 2, Children: 1, Acts: []Act{{Split, 1, 0}}, Status: 2, Heirs: 1,
		Crashes: 1, Patient: true, Txns: [][]Part{two, {put(10), put(0)}, {keep(10), put(0)}}, Scripts: [][]Step{
			{k(Txn, 0), k(Get, 10), k(Txn, 2)}, {k(Get, 0), k(Put, 10), k(Get, 10)},
			{k(Grant, 0), k(Txn, 1), k(Get, 0), k(Txn, 2)}}, Setup: k0(0), Warm: true},
	"txn-heirs-migrate": {Replicas: 2, PGs: 2, Janitors: 2, Children: 2, Acts: []Act{{Migrate, 1, 2}}, Status: 2,
		Heirs: 1, Crashes: 1, Txns: [][]Part{two, {put(10), put(0)}, {keep(10), put(0)}}, Scripts: [][]Step{
			{k(Txn, 0), k(Get, 10), k(Txn, 2)}, {k(Get, 0), k(Put, 10), k(Get, 10)},
			{k(Grant, 0), k(Txn, 1), k(Get, 0), k(Txn, 2)}}, Setup: k0(0), Warm: true},
	"txn-r3": txnMix(3, Config{Crashes: 1, Deadlines: 1}),
}

func init() {
	maps.Copy(scopes, txnScopes)
	maps.Copy(scopes, txnLong)
	maps.Copy(scopes, chainScopes)
	maps.Copy(txnWide, chainWide)
	maps.Copy(txnWide, txnLongWide)
	maps.Copy(wide, txnWide)
	for name := range txnWide {
		heavy[name] = 4
	}
	for _, name := range []string{"txn-r2-loss", "txn-r3-loss", "txn-split", "txn-migrate", "txn-recall", "txn-evict",
		"txn-long-loss", "txn-long-r3-loss", "txn-long-migrate", "txn-long-recall",
		"txn-r2-heirs-loss", "txn-heirs-split", "txn-heirs-migrate"} {
		heavy[name] = 16
	}
}
