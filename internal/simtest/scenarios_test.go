package simtest

import "slices"

// scenario is a schedule that random search rarely meets: one for every tempting rule
// that model checking refuted. It passes; under the mistake it is about it does not.
type scenario struct {
	cfg   Config
	steps []string
}

// epochs is one round of the reclaim epoch: E advances, and both clients learn of it and
// report.
var epochs = []string{"E advances", "c0 renews", "c1 renews", "c0 renews", "c1 renews"}

var one = []Step{k(Put, 0)}

func cat(parts ...[]string) []string { return slices.Concat(parts...) }

var scenarios = map[string]scenario{
	// A holds c0's word, P does not. c1's conditional write may not answer "conflict" before P
	// shows why: its own next read would find the old value.
	"r01-conflict-needs-P": {Config{Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(CAS, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
		[]string{"c0 begins", "c0>publish", "c1 begins", "c1*", "c1 begins", "c1*"}},

	// The cached slot is EMPTY; the key lives in another one by now.
	"r02-nothing-in-the-cached-slot": {
		Config{Scripts: [][]Step{{k(Del, 0), k(Put, 2), k(Put, 0), k(Del, 2)}, {k(Get, 0)}}, Setup: one, Warm: true},
		[]string{"c0 begins", "c0*", "c0 begins", "c0*", "c0 begins", "c0*", "c0 begins", "c0*", "c1 begins", "c1*"}},

	// c0's publish of an insert is delayed. c1 deletes the key, and brings P up. c0's CAS,
	// which expects what was there before the insert, must not bring the key back.
	"r03-late-publish-of-a-deleted-key": {
		Config{Replicas: 2, Scripts: [][]Step{{k(Del, 0), k(Put, 0)}, {k(Del, 0)}, {k(Get, 0)}}, Setup: one,
			Warm: true},
		[]string{"c0 begins", "c0*", "c0 begins", "c0>publish", "c1 begins", "c1*", "c0*", "c2 begins", "c2*"}},
	// c0's insert took effect, the completion says otherwise, and somebody has
	// deleted the key before c0 looks: its word must not be linked again.
	"r03-insert-resolved-after-delete": {Config{Scripts: [][]Step{one, {k(Get, 0), k(Del, 0), k(Get, 0)}}, Failures: 1},
		[]string{"c0 begins", "c0 asks mem", "c0 connects", "c0 m0", "c0 m0", "c0 m0", "c0 fails after", "c0 m0",
			"c1 begins", "c1*", "c1 begins", "c1*", "c0 connects", "c0*", "c1 begins", "c1*"}},

	// c0's delete took effect at A, its completion failed, and A is lost. c1 deletes the
	// same word at the new A. Only one of them may take that for its own delete.
	"r04-two-deleters-and-a-lost-head": {
		Config{Replicas: 2, NodeCrashes: 1, Failures: 1, Scripts: [][]Step{{k(Del, 0)}, {k(Del, 0)}}, Setup: one,
			Warm: true},
		[]string{"c0 begins", "c0 fails after", "c0 m0", "m0 crashes", "time passes", "directory*", "c0 learns",
			"c1 learns", "c0 renews", "c1 renews",
			"directory*", "c1 learns", "c1 begins", "c1*", "c0 learns", "c0*"}},

	// c0, inserting, reads A's group before, P's after c1 has swung a slot and published: they
	// differ, but as a pair of expected and new they would move P backward.
	"r05-two-reads-are-no-pair": {Config{Replicas: 2, Scripts: [][]Step{{k(Put, 2)}, one}, Setup: one, Warm: true},
		[]string{"c0 begins", "c0* -m1", "c1 begins", "c1*", "c0*"}},

	// A deleter dies between A and P: P still shows the key in slot 1. The insert
	// that follows takes slot 0 and must first bring slot 1 up to date.
	"r06-insert-beside-a-half-deleted-key": {Config{Replicas: 2, Scripts: [][]Step{one, {k(Del, 0)}, {k(Get, 0)}},
		Setup: []Step{k(Put, 2), k(Put, 0), k(Del, 2)}, Warm: true, Crashes: 1},
		[]string{"c1 begins", "c1 connects to m0", "c1 m0", "c1 crashes", "time passes", "directory*", "c0 begins",
			"c0*", "c2 begins", "c2*"}},

	// c0's record is not at P yet. c1 helps c0's word there: not before the record.
	"r07-help-without-a-look": {Config{Replicas: 2, Scripts: [][]Step{one, {k(CAS, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
		[]string{"c0 begins", "c0* -m1", "c1 begins", "c1*"}},

	// The same with a place in its second life: at P lies the previous record, whole.
	"r08-a-good-crc": {
		Config{Replicas: 2, Units: 2, Epochs: 6, Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(CAS, 0), k(Get, 0)}},
			Setup: one, Warm: true},
		cat([]string{"c0 begins", "c0*"}, epochs, epochs, epochs, []string{"c0 begins", "c0* -m1", "c1 begins", "c1*",
			"c1 begins", "c1*"})},

	// c0's blind write loses to a conditional one that saw the value before: it did not
	// happen before that, so it has to happen after.
	"r09-overwritten-is-not-done": {Config{Scripts: [][]Step{one, {k(CAS, 0), k(Get, 0)}}, Setup: one, Warm: true},
		[]string{"c0 begins", "c0 connects", "c1 begins", "c1*", "c0*", "c1 begins", "c1*"}},

	"r10-acknowledged-at-A": {Config{Replicas: 2, Scripts: [][]Step{one, {k(Get, 0)}}, Setup: one, Warm: true},
		[]string{"c0 begins", "c0>publish", "c1 begins", "c1*"}},

	// r = 3. c1 has overtaken c0's word at the second replica, which never had it. c0's
	// publish finds that and must not go on to the third, which has the old word still.
	"r11-publish-after-a-replica-skipped": {Config{Replicas: 3, Scripts: [][]Step{one, one}, Setup: one, Warm: true},
		[]string{"c0 begins", "c0>publish", "c1 begins", "c1* -m2", "c0*", "c1*"}},

	// c1 learns c0's word at A, not at P, where the place still holds its previous life. If
	// that served a cached read which reads the record first, the slot next would agree.
	"r12-record-before-slot": {
		Config{Replicas: 2, Units: 2, Epochs: 6, Deadlines: 1,
			Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(CAS, 0), k(Get, 0)}}, Setup: one, Warm: true},
		cat([]string{"c0 begins", "c0*"}, epochs, epochs, epochs,
			[]string{"c0 begins", "c0* -m1", "c1 begins", "c1>sync-read", "c1 reaches",
				"c1 begins", "c1 m1", "c1 m1", "c0*", "c1*"})},

	// c1's read is under way; the place it looks at must not be reused.
	"r13-reuse-under-a-reader": {Config{Units: 2, Epochs: 3, Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}},
		Setup: one, Warm: true},
		[]string{"c1 begins", "c0 begins", "c0*", "c0 begins", "c0*"}},
	"r13-reuse-at-the-minimum": {Config{Units: 2, Epochs: 3, Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}},
		Setup: one, Warm: true},
		cat(epochs, []string{"c1 begins", "c0 begins", "c0*", "c0 renews", "c0 begins", "c0*"})},

	// The reply that c0 gets after its unlink was generated before; c1's read began in between.
	"r14-a-reply-that-was-under-way": {
		Config{Units: 2, Epochs: 3, Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
		cat(epochs, []string{"E advances", "c0 sends renewal", "c0 renewal served", "E advances", "c1 renews",
			"c1 renews", "c1 begins", "c0 begins", "c0*",
			"c0 renewal answered", "c0 renews", "c0 renews", "c0 renews", "c0 begins", "c0*"})},

	// The reclaim epoch as ver: the place's next life, four reclaim epochs on, has the same word.
	"r15-ver-counts-lives": {Config{Units: 1, Epochs: 8, Scripts: [][]Step{{k(Del, 0), k(Put, 1)}, {k(Put, 0)}},
		Setup: one},
		cat([]string{"c0 begins", "c0*"}, epochs, epochs, epochs, epochs, []string{"c0 begins", "c0*"})},

	// c0's memory goes back to the directory, and after more than a thousand reclaim epochs to c2, whose
	// key gets the very word that c1 remembers of another key.
	"r16-an-old-hint": {
		Config{HeapUnits: 1, Leaders: 1, Epochs: 3, Scripts: [][]Step{{k(Del, 0), k(Close, 0)}, {k(Del, 0)},
			{k(Put, 1)}}, Setup: one, Warm: true},
		[]string{"c0 begins", "c0*", "c0 begins", "another", "directory*", "c1 renews", "c2 renews", "c1 renews",
			"c2 renews",
			"c2 begins", "c2*", "c1 begins", "c1*"}},

	// c1's read has answered at its deadline but its READs are still queued;
	// the place that it reads must not be reused.
	"r17-answered-read-still-queued": {Config{Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: one,
		Warm: true, Units: 2, Epochs: 6, Deadlines: 1},
		cat([]string{"c1 begins", "c1 reaches", "c0 begins", "c0*", "c0 begins", "c0*"},
			epochs, []string{"c0*"}, epochs, []string{"c0*"}, epochs, []string{"c0*"}, epochs, []string{"c0*"})},

	// c1 begins after the renewal that would cover an unlink at A, and before P shows it.
	"r18-limbo-begins-at-P": {
		Config{Replicas: 2, Units: 2, Epochs: 4, Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: one,
			Warm: true},
		cat(epochs, []string{"c0 begins", "c0>publish", "c0 renews", "E advances", "c1 renews", "c1 renews",
			"c1 begins", "c0*",
			"c0 renews", "c0 renews", "c0 begins", "c0*"})},

	// c0's word was at A when A was lost. It is not posted again.
	"r19-the-same-word-after-a-loss": {
		Config{Replicas: 2, NodeCrashes: 1, Failures: 1, Scripts: [][]Step{one, {k(Get, 0), k(CAS, 0), k(Get, 0)}},
			Setup: one, Warm: true},
		[]string{"c0 begins", "c0 fails after", "c0 m0", "c0 m0", "m0 crashes", "time passes", "directory*",
			"c0 learns", "c1 learns", "c0 renews", "c1 renews",
			"directory*", "c1 learns", "c1 begins", "c1*", "c0 learns", "c0*", "c1 begins", "c1*", "c1 begins", "c1*"}},

	// The lock's owner is dead but not fenced: its queued CAS must not land in
	// the group of a later owner.
	"r20-lock-owner-not-fenced": {Config{Scripts: [][]Step{one, {k(Put, 0), k(Get, 0), k(Get, 0)}}, Crashes: 1},
		[]string{"c0 begins", "c0 asks mem", "c0 connects", "c0 m0", "c0 m0", "c0 m0", "c0 crashes", "time passes",
			"directory: fencing",
			"c1 begins", "c1 asks mem", "c1 connects", "c1*", "c1 wakes", "c1*", "c0 m0", "c0 m0", "directory*",
			"c1*"}},
	// c0 has chosen a slot for its insert when another one, before it, becomes free.
	"r20-two-inserts": {Config{Scripts: [][]Step{{k(Add, 0)}, {k(Del, 2), k(Add, 0)}}, Setup: []Step{k(Put, 2)},
		Warm: true},
		[]string{"c0 begins", "c0>cas-slot", "c1 begins", "c1*", "c1 begins", "c1*", "c0*", "c1*"}},
	// The lock's owner lives; its waiter must not take the end of a freeze for a fence.
	"r20-a-waiter-in-a-freeze": {Config{Replicas: 2, NodeCrashes: 1, Scripts: [][]Step{one, {k(Add, 0), k(Get, 0)}}},
		[]string{"c0 begins", "c0>cas-slot", "c1 begins", "c1*", "m1 crashes", "time passes", "directory*", "c1 learns",
			"c1*", "c0 learns", "c0 m0",
			"c0 renews", "c1 renews", "directory*", "c1 learns", "c1*"}},

	// A joiner is no copy: it has nothing yet.
	"r21-a-reader-of-the-joiner": {
		joining(Config{Scripts: [][]Step{{k(Get, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: one, Warm: true}, 0),
		[]string{"m2 crashes", "m1 crashes", "time passes", "all*", "m2 comes back", "all*", "c0 begins", "c0*",
			"c0 begins", "c0>publish", "c1 begins", "c1*"}},

	// c1 reads the joiner before the key comes to it, and the copy before it after c0 has deleted the key there: both
	// show EMPTY, and c2 finds the key, since the joiner is a copy then and has yet to hear of the delete.
	"r21-absent-around-a-joiner": {joining(Config{Scripts: [][]Step{{k(Del, 0)}, {k(Get, 0)}, {k(Get, 0)}}, Setup: one},
		1),
		[]string{"m2 crashes", "m1 crashes", "time passes", "all*", "m2 comes back", "all* -c3", "c1 begins",
			"c1 connects", "c1 connects", "c1 m2 READ", "all* -c1",
			"c0 begins", "c0|m2 CAS|1", "c1*", "c2 begins", "c2*"}},

	// m1, the tail, is given up but can still be read. c0 does not know.
	"r21-thaw-before-all-know": {Config{Replicas: 2, NodePauses: 1, Scripts: [][]Step{{k(Get, 0)}, one}, Setup: one,
		Warm: true},
		[]string{"m1 falls silent", "time passes", "directory*", "c1 learns", "directory*", "c1 learns", "c1 begins",
			"c1*", "c0 begins", "c0*"}},

	// c0 stands still until its lease has run out. m1, the tail, is given up but can still
	// be read, and fences nobody any more: only c0 itself knows that it may not answer.
	"r21-a-reader-without-a-lease": {
		Config{Replicas: 2, NodePauses: 1, Pauses: 1, Scripts: [][]Step{{k(Get, 0), k(Get, 0)}, one}, Setup: one,
			Warm: true},
		[]string{"c0 begins", "c0 pauses", "m1 falls silent", "time passes", "directory*", "c1 learns", "c1 renews",
			"directory*", "c1 learns",
			"c1 begins", "c1*", "c0 resumes", "c0*", "c0 begins", "c0*"}},

	// c0 does not know of the joiner: nobody fills it before.
	"r22-join-without-acknowledgement": {
		joining(Config{Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true}, 1),
		[]string{"m2 crashes", "m1 crashes", "time passes", "all*", "m2 comes back", "all* -c0", "c0 begins", "c0*",
			"c1 begins", "c1*"}},
	// c0's publish at the joiner is delayed; c1, who does not know the joiner, deletes the key.
	// The joiner has to learn of that, though there is nothing to read.
	"r22-join-carries-EMPTY": {joining(Config{Scripts: [][]Step{{k(Put, 0)}, {k(Del, 0), k(Get, 0)}}}, 1),
		[]string{"m2 crashes", "m1 crashes", "time passes", "all*", "m2 comes back", "all* -c1", "c0 begins",
			"c0>publish", "c1 begins", "c1*",
			"c1 learns", "c1 renews", "all* -c0", "c0*", "c1 learns", "c1 begins", "c1*"}},

	// The janitor has set MOVED at A, P shows FROZEN: who writes in the child now is
	// acknowledged before P stops showing the old value.
	"r23-moved-at-A": {
		splitting(Config{Scripts: [][]Step{{k(Put, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}, Warm: true}),
		[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims", "c2|m1 CAS p1 a0 g3 s0|2",
			"c0 begins", "c0*", "c1 begins", "c1*"}},

	// The janitor has set SPLIT at A and died; P does not show it.
	"r24-split-at-A": {
		splitting(Config{Scripts: [][]Step{{k(Put, 12)}, {k(Get, 12)}}, Setup: []Step{k(Put, 10)}, Crashes: 1}),
		[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims", "c2|m1 CAS p1 a0 g3 header|1",
			"c2 crashes", "time passes", "directory*",
			"c0 begins", "c0*", "c1 begins", "c1*"}},

	// The janitor has died in a group that is half moved: no insert before another one is
	// through.
	"r25-insert-into-a-half-moved-group": {
		splitting(Config{Scripts: [][]Step{{k(Put, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}, Crashes: 1}),
		[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims", "c2|m0 CAS p1 a0 g3 header|1",
			"c2 crashes", "time passes", "directory*",
			"c0 begins", "c0*", "c1 begins", "c1*"}},
	// A MOVED word of another group's key, in the stash, sends c0 to the child; its own
	// group has not moved.
	"r25-insert-into-a-child": {
		splitting(Config{Fill: 30, Scripts: [][]Step{{k(Incr, 31)}, {k(Put, 31)}}, Setup: []Step{k(Put, 10)},
			OVF: true}),
		[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims", "c2|m0 CAS p1 a0 g5 lock|1",
			"c0 begins", "c0*", "c1 begins", "c1*"}},

	// c0's update is at A, not at P, whose copy of the record is not there either: the child
	// must not get the word before P shows it FROZEN.
	"r26-copy-before-FROZEN": {
		splitting(Config{Scripts: [][]Step{{k(Put, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}, Warm: true}),
		[]string{"c0 begins", "c0* -m1", "begin split", "c2 learns", "c2 claims", "c2*"}},
	"r26-MOVED-before-copy": {
		splitting(Config{Scripts: [][]Step{{k(Put, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}, Warm: true}),
		[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims", "c2|m0 CAS p1 a1|1", "c1 begins",
			"c1*"}},
	"r26-child-at-its-A-only": {
		splitting(Config{Scripts: [][]Step{{k(Put, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}, Warm: true}),
		[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims", "c2|m0 CAS p1 a0 g3 header|1",
			"c1 begins", "c1*"}},
	// The deleter dies between A and P, of a key that the mover has read and not frozen yet; then A is lost.
	"r26-deleted-before-FROZEN": {
		splitting(Config{Replicas: 2, Crashes: 1, NodeCrashes: 1, Scripts: [][]Step{{k(Del, 10)}, {k(Get, 10)}},
			Setup: []Step{k(Put, 10)}, Warm: true}),
		[]string{"begin split", "c2 learns", "c2 claims", "c2>cas-words", "c0 begins", "c0 crashes", "c0 m0", "c2*",
			"m0 crashes", "time passes", "all*", "c1 begins", "c1*"}},
	// c1 has the map from before: it finds the way by MOVED and SPLIT alone.
	"r26-cleaned-too-soon": {
		splitting(Config{Scripts: [][]Step{{k(Put, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}}),
		[]string{"begin split", "all* -c1", "c1 begins", "c1*"}},

	// c0's word won at A under a map without the joiner, where what it names is not: a long value's manifest, since a
	// short record comes with its word. A reader has brought the joiner to the word before.
	"r27-publish-in-a-new-view": {
		Config{Replicas: 3, NodeCrashes: 1, Janitors: 1, Long: 0xff, Units: 96,
			Scripts: [][]Step{one, {k(Get, 0), k(Get, 0)}}, Setup: one, Warm: true},
		[]string{"m2 crashes", "time passes", "all*", "m2 comes back", "all* -c0", "c1 begins", "c1*", "c0 begins",
			"c0>cas-slot", "c0 learns", "c0*", "c1 begins", "c1*"}},

	// c0 holds the lock when it learns that its group has moved; it waits for the map without.
	"r28-parked-with-a-lock": {
		splitting(Config{Scripts: [][]Step{{k(Put, 12)}, {k(Put, 2), k(Get, 2)}}, Setup: []Step{k(Put, 10)}}),
		[]string{"begin split", "c1 learns", "c2 learns", "c2 claims", "c2*", "c0 begins", "c0>sync-read", "c0 m1",
			"c0 m0", "c0 m0",
			"c1 begins", "c1*", "c1 is done"}},
	// c0's write may have happened in a placement group whose shard migrates away: it counts
	// there until it knows.
	"r28-resumed-in-a-new-map": {Config{Nodes: 2, PGs: 2, Full: true, Children: 1, Janitors: 1, Failures: 1,
		Acts: []Act{{Drain, 0, 0}}, Scripts: [][]Step{one, {k(Get, 0)}}, Setup: one, Warm: true},
		cat([]string{"c0 begins", "c0 fails after", "c0 m0", "c0 m0", "begin drain"},
			repeated(14, "c0 learns", "c0 renews", "all* -c0"), []string{"c0*"})},
	// c1 remembers key 0 by a word that key 1 has in the array where the shard is now.
	"r28-hints-of-what-moved": {Config{Nodes: 2, PGs: 2, Children: 1, Janitors: 1, Acts: []Act{{Migrate, 1, 2}},
		Scripts: [][]Step{{k(Del, 0), k(Put, 1), k(Get, 1)}, one}, Setup: one, Warm: true},
		[]string{"c0 begins", "c0*", "begin shard", "all*", "c0 begins", "c0*", "c1 begins", "c1*", "c0 begins",
			"c0*"}},

	// The deleter died between A and P, which still names a place of the extent.
	"r29-recall-by-A": {
		recalling(Config{Scripts: [][]Step{{k(Del, 0)}, {k(Get, 0)}}, Setup: one, Warm: true, Crashes: 1}),
		cat([]string{"c0 begins", "c0 connects to m0", "c0 m0", "c0 crashes", "time passes", "directory*",
			"begin recall"}, repeated(3, "all*", "E advances"), []string{"freed"})},
	// The inserter died between A and P: P does not name the place yet.
	"r29-recall-by-P": {recalling(Config{Scripts: [][]Step{one, {k(Get, 0)}}, Crashes: 1}),
		cat([]string{"c0 begins", "c0>publish", "c0 crashes", "time passes", "directory*", "begin recall"},
			repeated(3, "all*", "E advances"), []string{"freed"})},
	// c1 reads what the scan has moved away.
	"r29-recall-under-a-reader": {
		recalling(Config{Scripts: [][]Step{{k(Get, 0)}, {k(Get, 0)}}, Setup: one, Warm: true}),
		cat([]string{"begin recall", "c0 learns", "c1 learns", "c2 learns", "c1 renews", "c1 begins"},
			repeated(3, "all* -c1", "E advances"), repeated(3, "all*", "E advances"), []string{"freed"})},
	// c1 does not know of the recall and takes a place of the extent when the scan has passed.
	"r29-recall-without-acknowledgement": {recalling(Config{Scripts: [][]Step{{k(Get, 0)}, {k(Put, 2), k(Put, 0)}}}),
		cat([]string{"c1 begins", "c1*", "begin recall", "all* -c1", "c1 begins", "c1*"},
			repeated(2, "c1 renews", "E advances", "all* -c1"),
			repeated(3, "all*", "E advances"), []string{"freed"})},
	// c1 is silent, not fenced: what it has posted still lands.
	"r29-silence-is-no-acknowledgement": {recalling(Config{Pauses: 1, Scripts: [][]Step{{k(Get, 0)}, one}}),
		cat([]string{"c1 begins", "c1>cas-slot", "c1 pauses", "begin recall", "c0 learns", "c2 learns", "time passes",
			"directory: fencing", "c0 renews", "c2 renews",
			"c2 claims", "c2*", "c1 m0", "directory*"}, repeated(3, "all*", "E advances"), []string{"freed"})},

	// c0's page was routed by a map that knows of no move: what it meets as MOVED is in the
	// child, which it cannot skip.
	"scan-of-what-moves": {Config{Children: 1, Janitors: 1, Acts: []Act{{Split, 1, 0}}, Scripts: [][]Step{{k(Scan, 0)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}},
		[]string{"begin split", "c1 learns", "c0 begins", "c1 claims", "c1*", "c0*"}},
	// The page after the parent's is to be the child's; the move is over by then.
	"scan-across-the-end-of-a-move": {Config{Nodes: 2, PGs: 2, Children: 1, Janitors: 1, Acts: []Act{{Migrate, 1, 2}},
		Scripts: [][]Step{{k(Scan, 0)}}, Setup: []Step{k(Put, 10), k(Put, 0)}},
		[]string{"begin shard", "c0 learns", "c1 learns", "c1 claims", "c1*", "c0 begins", "c0*", "c0 learns",
			"c0 begins", "c0*"}},

	// The same for a shard that grows: both of the child's segments are one of the parent's.
	"scan-across-the-end-of-growth": {
		Config{Children: 2, Janitors: 1, Acts: []Act{{Grow, 1, 2}}, Scripts: [][]Step{{k(Scan, 0)}},
			Setup: []Step{k(Put, 80), k(Put, 0)}},
		[]string{"begin shard", "c0 learns", "c1 learns", "c1 claims", "c1*", "c0 begins", "c0*", "c0 learns",
			"c0 begins", "c0*"}},
	// The page behind the parent's is of the child's first segment, the next of its second.
	"scan-of-what-grows": {Config{Children: 2, Janitors: 1, Acts: []Act{{Grow, 1, 2}}, Scripts: [][]Step{{k(Scan, 0)}},
		Setup: []Step{k(Put, 80), k(Put, 0)}},
		[]string{"begin shard", "c0 learns", "c1 learns", "c1 claims", "c1>work", "c0 begins", "c0*"}},

	// Clocks agree to the tick: versions differ all the same.
	"r30-versions": {Config{Scripts: [][]Step{one, {k(Put, 2)}}},
		[]string{"c0 begins", "c0*", "c1 begins", "c1*"}},
}

// joining is a placement group of two copies of which one is lost, with a spare node.
func joining(c Config, janitors int) Config {
	c.Replicas, c.Nodes, c.NodeCrashes, c.Janitors = 2, 3, 2, janitors
	return c
}

func splitting(c Config) Config {
	c.Replicas, c.Children, c.Janitors, c.Acts = 2, 1, 1, []Act{{Split, 1, 0}}
	return c
}

func recalling(c Config) Config {
	c.Replicas, c.TwoExtents, c.Epochs, c.Janitors, c.Acts = 2, true, 6, 1, []Act{{Recall, 1, 0}}
	return c
}

func repeated(n int, steps ...string) (out []string) {
	for range n {
		out = append(out, steps...)
	}
	return out
}
