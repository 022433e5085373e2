package simtest

import (
	"maps"

	"github.com/kvd-project/kvd/index"
)

// txnScenarios are schedules with transactions that random search rarely meets. The status words are a1 g0; the head of
// the first placement group is m0, of the second m1, if there are two replicas.
var txnScenarios = map[string]scenario{
	// c1 has read c0's intent at key0 when c2 aborts the transaction. The status word serves the next one, which
	// commits: that says nothing of the intent.
	"txn-status-went-on": {
		pair(1, Config{Txns: [][]Part{two, {put(11), put(1)}}, Scripts: [][]Step{{k(Txn, 0), k(Txn, 1)}, {k(Get, 0)},
			{k(Put, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c1 begins", "c1>read-status", "c2 begins", "c2*", "c0*",
			"c0 begins", "c0*", "c1*"}},
	// The same if the first one is acknowledged, and the next one aborted.
	"txn-status-went-on-aborted": {
		pair(1, Config{Txns: [][]Part{two, {put(11), put(1)}}, Scripts: [][]Step{{k(Txn, 0), k(Txn, 1)}, {k(Get, 0)},
			{k(Put, 11)}}, Setup: append(k0(0), k(Put, 11))}),
		[]string{"c0 begins", "c0|m0 CAS p1 a0 g3 s0|2", "c1 begins", "c1>read-status", "c0*", "c0 begins",
			"c0|m0 CAS p1 a1|1", "c2 begins", "c2*", "c0*", "c1*"}},

	// c0's intent lies outside the extent that is recalled, and the record that it would replace within. It is settled
	// before the scan ends.
	"txn-recall-of-a-parent": {Config{TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 24,
		HeapUnits: 1, Epochs: 6, Status: 1, Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0)}},
		Setup: k0(0), Warm: true},
		[]string{"begin recall", "c0 learns", "c1 learns", "c2 learns", "c0 renews", "c1 renews", "c2 renews",
			"c0 begins", "c0|m0 CAS p1 a1|1", "all* -c0", "c0*", "all*", "c1 begins", "c1*"}},

	// c2's put is at A, not at P; c0's intent stands on it. c1 aborts c0 and finds its condition refused by
	// c2's put, which P must show before c1 says so.
	"txn-refused-below-an-intent": {
		pair(2, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(CAS, 0), k(Get, 0)}, {k(Put, 0)}},
			Setup: k0(0)}),
		[]string{"c2 begins", "c2>publish", "c0 begins", "c0|m1 CAS p1 a0 g3 s0|1", "c1 begins", "c1*", "c1 begins",
			"c1*", "c2*", "c0*"}},

	// A(X) says COMMIT, P(X) nothing yet. c1's put settles key0; then c2 must not find key10 as it was.
	"txn-committed-at-A": {
		pair(2, Config{Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 0)},
			{k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m1 CAS p1 a1|1", "c1 begins", "c1*", "c2 begins", "c2*", "c2 begins", "c2*", "c0*",
			"c1 begins", "c1*"}},
	// The same for an abort: c0, which is late, must not take P(X) back to where it was.
	"txn-aborted-at-A": {
		pair(2, Config{Txns: [][]Part{two}, Crashes: 1,
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0)}, {k(Get, 10), k(Put, 10), k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c1 begins", "c1|m1 CAS p1 a1|1", "c1 crashes", "c2 begins", "c2*",
			"c2 begins", "c2*", "c0*", "c2 begins", "c2*"}},

	// A(X) alone says COMMIT when it is lost, and its coordinator dies. Nobody may have seen it.
	"txn-verdict-seen-and-lost": {
		pair(2, Config{Nodes: 3, Janitors: 1, NodeCrashes: 1, Crashes: 1, Txns: [][]Part{two},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m1 CAS p1 a1|1", "c1 begins", "c1*", "c0 crashes", "m0 crashes", "time passes",
			"all* -c0", "c1 begins", "c1*"}},
	// A(X) alone says ABORT when it is lost. c1 has changed key0 since, and seen that nothing happened to key10.
	"txn-abort-lost": {
		pair(2, Config{Nodes: 3, Janitors: 1, NodeCrashes: 1, Txns: [][]Part{two},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c1 begins", "c1*", "c1 begins", "c1*", "m0 crashes", "time passes",
			"all*", "c0*"}},
	// c0 has given up waiting, and its verdict is still on its way. Its own delete of key10 is no reason to think that
	// nothing comes.
	"txn-delete-of-ones-own": {
		pair(1, Config{Nodes: 2, Deadlines: 1, Txns: [][]Part{two},
			Scripts: [][]Step{{k(Txn, 0), k(Del, 10)}, {k(Get, 0), k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c0 reaches", "c0 begins", "c0* -m0", "c1 begins", "c1*", "c0*",
			"c1 begins", "c1*"}},

	// c0 has given up waiting for an intent that is still on its way to key10, and aborts the transaction. Its status
	// word may serve no other: the intent arrives behind that.
	"txn-intent-still-comes": {
		pair(1, Config{Nodes: 2, Deadlines: 1, Status: 1, Txns: [][]Part{two, {put(0), put(1)}},
			Scripts: [][]Step{{k(Txn, 0), k(Txn, 1)}, {k(Get, 10), k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m1 CAS p2|1", "c0* -m1", "c0 reaches", "c0* -m1", "c0 begins", "c0* -m1", "c0*",
			"c1 begins", "c1*", "c1 begins", "c1*"}},

	// The coordinator is dead and its intents stand. Others insert beside them, and go on with their keys.
	"txn-orphans": {
		pair(2, Config{Txns: [][]Part{two}, Crashes: 1,
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 2), k(Put, 0), k(Get, 10)}, {k(Add, 13), k(Del, 10), k(Get, 0)}},
			Setup:   k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c0 crashes", "time passes", "directory*", "c1 begins", "c1*",
			"c1 is done", "c2 begins", "c2*", "c2 is done",
			"c1 begins", "c1*", "c1 is done", "c2 begins", "c2*", "c2 is done", "c1 begins", "c1*", "c2 begins",
			"c2*"}},

	// c0's intents are at both heads, one of which is lost with the only copy: nothing of it may be seen.
	"txn-head-lost-with-an-intent": {
		pair(2, Config{Nodes: 3, Janitors: 1, NodeCrashes: 1, Txns: [][]Part{two},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p2 a0|1", "m1 crashes", "time passes", "all*", "c1 begins", "c1*", "c1 begins",
			"c1*", "c0*"}},
	// P(X) is lost between the two replicas' verdict.
	"txn-tail-lost-between-verdicts": {
		pair(2, Config{Nodes: 3, Janitors: 1, NodeCrashes: 1, Txns: [][]Part{two},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m1 CAS p1 a1|1", "m1 crashes", "time passes", "c1 begins", "c1*", "all*", "c1*",
			"c1 begins", "c1*", "c0*"}},
	// A(X) is lost, which alone had the verdict: the transaction is decided again.
	"txn-head-lost-with-the-verdict": {
		pair(2, Config{Nodes: 3, Janitors: 1, NodeCrashes: 1, Txns: [][]Part{two},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 10), k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m1 CAS p1 a1|1", "m0 crashes", "time passes", "all* -c0", "c1 begins", "c1*", "all*",
			"c0*", "c1*", "c1 begins", "c1*"}},
	// The same, and c0's verdict stays in a queue of the head that is given up: an abort stands.
	"txn-silent-head-with-the-verdict": {
		pair(2, Config{Nodes: 3, Janitors: 1, NodePauses: 1, Txns: [][]Part{two},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 10), k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "m0 falls silent", "time passes", "all* -c0", "c1 begins", "c1*",
			"all*", "c0*", "c1*", "c1 begins", "c1*"}},
	// S and X get a joiner between the intents and the verdict.
	"txn-join-before-the-verdict": {
		pair(2, Config{Nodes: 3, Janitors: 1, NodeCrashes: 1, Txns: [][]Part{two},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "m1 crashes", "time passes", "all* -c0", "c1 begins", "c1*", "all*",
			"c0*", "c1*", "c1 begins", "c1*"}},

	// c1 has swung c0's settled intent at A; P shows it still. The status word may not go on before P shows c1's put.
	"txn-settled-by-another": {
		pair(2, Config{Txns: [][]Part{two, {put(30), put(20)}}, Scripts: [][]Step{{k(Txn, 0), k(Txn, 1)}, {k(Put, 0)},
			{k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a0 g3 s0|2", "c1 begins", "c1|m1 CAS p1 a0 g3 s0|1", "c0*", "c0 begins",
			"c0*", "c2 begins", "c2*", "c1*"}},

	// A guard keeps a long value, which is read while it is undecided, when it is settled, and overwritten afterwards.
	"txn-manifest-under-guard": {
		pair(2, Config{Long: 0xff, Txns: [][]Part{{keep(0), put(10)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0), k(Get, 0)}, {k(Get, 0), k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c2 begins", "c2*", "c0*", "c2 begins", "c2*", "c1 begins", "c1*",
			"c1 begins", "c1*"}},
	// The same, aborted: c1's put of the other key aborts the transaction.
	"txn-manifest-under-aborted-guard": {
		pair(2, Config{Long: 0xff, Txns: [][]Part{{keep(0), put(10)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 10), k(Del, 0)}, {k(Get, 0), k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c1 begins", "c1*", "c2 begins", "c2*", "c0*", "c2 begins", "c2*",
			"c1 begins", "c1*"}},
	// A put over a long value is aborted: the copy of the manifest names the chunks, which stay, and the put's own go.
	"txn-abort-over-a-manifest": {
		pair(2, Config{Long: 0xff, Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 10), k(Del, 0)},
			{k(Get, 0), k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c1 begins", "c1*", "c2 begins", "c2*", "c0*", "c2 begins", "c2*",
			"c1 begins", "c1*"}},
	// Another transaction stands on the aborted one, and names the manifest as its parent: it is aborted as well.
	"txn-abort-over-an-aborted-manifest": {
		pair(2, Config{Long: 0xff, Txns: [][]Part{two, {put(0), keep(10)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Txn, 1)}, {k(Put, 10), k(Get, 0), k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c1 begins", "c1|m0 CAS p1 a1|1", "c2 begins", "c2*", "c1*",
			"c2 begins", "c2*", "c0*", "c2 begins", "c2*"}},
	// c0 dies with its intents, undecided. A janitor settles them before c1 has the status word.
	"txn-heir-of-an-undecided": {heir(1, Config{}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c0 crashes", "time passes", "directory*", "c1 begins", "all*",
			"c1 begins", "c1*", "c1 begins", "c1*", "c1 begins", "c1*", "all*", "c1 begins", "c1*"}},
	// The same when the head alone has the verdict.
	"txn-heir-of-a-verdict": {heir(2, Config{}),
		[]string{"c0 begins", "c0|m1 CAS p1 a1|1", "c0 crashes", "time passes", "directory*", "c1 begins", "all*",
			"c1 begins", "c1*", "c1 begins", "c1*", "c1 begins", "c1*", "all*", "c1 begins", "c1*"}},
	// The same again: c1 sees what a janitor has settled of one key, and then has to see it of the other, whose intent
	// waits for the tail's verdict.
	"txn-heir-before-the-tail": {pair(2, Config{Crashes: 1, Janitors: 1, Heirs: 1, Txns: [][]Part{two}, Setup: k0(0),
		Scripts: [][]Step{{k(Txn, 0)}, {k(Get, 0), k(Get, 10)}}}),
		[]string{"c0 begins", "c0|m1 CAS p1 a1|1", "c0 crashes", "time passes", "directory*", "c2|m1 CAS p2|1",
			"c1 begins", "c1*", "c1 begins", "c1*", "all*"}},
	// c0 dies. c1 has settled its intent at the head, and the tail shows it still when a janitor comes. c2, which has
	// c0's word then, may not go on before the tail shows c1's put.
	"txn-heir-behind-a-put": {
		pair(2, Config{Crashes: 1, Janitors: 1, Heirs: 1, Txns: [][]Part{two, {put(30), put(20)}}, Setup: k0(0),
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0)}, {k(Grant, 0), k(Txn, 1), k(Get, 0)}}}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c0 crashes", "time passes", "directory*", "c1 begins",
			"c1|m1 CAS p1 a0 g3 s0|1", "all* -c1", "c2 begins", "c2*", "c2 begins", "c2*", "all* -c1", "c2 begins",
			"c2*", "c1*"}},

	// c0 dies. c1 settles its intent at the head after a janitor has looked there, and before that swings it.
	"txn-heir-behind-a-look": {
		pair(2, Config{Crashes: 1, Janitors: 1, Heirs: 1, Txns: [][]Part{two, {put(30), put(20)}}, Setup: k0(0),
			Scripts: [][]Step{{k(Txn, 0)}, {k(Put, 0)}, {k(Grant, 0), k(Txn, 1), k(Get, 0)}}}),
		[]string{"c0 begins", "c0|m0 CAS p1 a1|1", "c0 crashes", "time passes", "directory*", "c1 begins",
			"c1|m0 CAS p1 a0 g3 s0|2", "c3>cas-words", "c1 m0 CAS p1 a0 g3 s0", "all* -c1",
			"c2 begins", "c2*", "c2 begins", "c2*", "all* -c1", "c2 begins", "c2*", "c1*"}},
	// c1 reads key0 before c0 commits and key10 afterwards: only a second round tells.
	"txn-look-across": {
		pair(1, Config{Nodes: 2, Txns: [][]Part{two}, Scripts: [][]Step{{k(Txn, 0)}, {k(Look, 0)}}, Setup: k0(0)}),
		[]string{"c1 begins", "c1* -m1", "c0 begins", "c0*", "c1*"}},
	// The same, and when it reads again c2 has deleted key0, and changes key10 with that. No version tells of it: key0
	// was absent both times.
	"txn-look-absent": {
		pair(1, Config{Nodes: 2, Txns: [][]Part{two, {del(0), put(10)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Look, 0)}, {k(Txn, 1)}}, Setup: []Step{k(Put, 10)}}),
		[]string{"c1 begins", "c1* -m1", "c0 begins", "c0*", "c1* -m0", "c2 begins", "c2*", "c1*"}},
	// Two transactions cross.
	"txn-cross": {pair(
		1, Config{Txns: [][]Part{two, {put(10), put(0)}},
			Scripts: [][]Step{{k(Txn, 0)}, {k(Txn, 1)}, {k(Get, 0), k(Get, 10)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0 m0", "c0 m0", "c0 m0", "c1 begins", "c1 m0", "c1 m0", "c1 m0", "c0*", "c1*",
			"c2 begins", "c2*", "c2 begins", "c2*"}},
	// Delete and insert of a key in one transaction after the other.
	"txn-delete-insert": {
		pair(2, Config{Txns: [][]Part{{del(0), put(10)}, {put(0, index.IfAbsent), keep(10)}}, Status: 2,
			Scripts: [][]Step{{k(Txn, 0), k(Txn, 1)}, {k(Get, 0), k(Get, 10), k(Get, 0)}}, Setup: k0(0)}),
		[]string{"c0 begins", "c0|m1 CAS p1 a1|1", "c1 begins", "c1*", "c0 m1", "c0 begins", "c0*", "c1 begins", "c1*",
			"c1 begins", "c1*"}},
}

func init() { maps.Copy(scenarios, txnScenarios) }
