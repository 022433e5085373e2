package simtest

func init() {
	// Of the key's copies the older one is still visible at P, in slot 1, because its deleter
	// died between A and P; whoever inserts it again takes slot 0. Tempting: to bring
	// slot 1 up to date later, since the insert is not acknowledged before that. But c1, which
	// remembers the key in slot 0 from long ago, finds the new word there, goes on from
	// it, and is acknowledged: nothing makes it look at slot 1, where c2 remembers the key.
	// Harmless if slot 1 is up to date at P before the new word is at A.
	scenarios["r06-overtaken-beside-a-half-deleted-key"] = scenario{
		Config{Replicas: 2, Scripts: [][]Step{movedToSlot1, {k(Put, 0)}, {k(Get, 0), k(Get, 0)}, {k(Put, 0)}},
			Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 1},
		cat(halfDeleted, []string{"c3 begins", "c3|m0 CAS p1 a0 g3 s0|2", "c3 m0 CAS", "c1 begins", "c1*", "c2 begins",
			"c2*"})}
	// The same, and the inserter dies when A has its word. c1 helps that word to P in order to
	// answer "conflict", and reads it there; c2 would still find the old value where it
	// remembers it. Harmless for the same reason: P lost the old copy first.
	scenarios["r06-inserter-dies-beside-a-half-deleted-key"] = scenario{
		Config{Replicas: 2, Scripts: [][]Step{movedToSlot1, {k(CAS, 0), k(Get, 0)}, {k(Get, 0), k(Get, 0)},
			{k(Put, 0)}},
			Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 2},
		cat(halfDeleted, []string{"c3 begins", "c3|m0 CAS p1 a0 g3 s0|2", "c3 m0 CAS", "c3 crashes", "time passes",
			"directory*", "c1 begins", "c1*", "c1 begins", "c1*", "c2 begins", "c2*"})}

	// r = 3. c1 has replaced c0's word at A, and c2, who has to see c1's at P before it
	// answers "conflict", has brought it to the second replica, which never had c0's. Tempting:
	// c0's publish takes that for its own work done and goes on to P, where the word before
	// c0's still is. P would take a word that its predecessor never had. Harmless if,
	// from the first surprise on, P takes only what its predecessor shows.
	scenarios["r11-a-replica-that-skipped-the-word"] = scenario{
		Config{Replicas: 3, Scripts: [][]Step{{k(Put, 0)}, {k(Put, 0)}, {k(CAS, 0), k(Get, 0)}},
			Setup: []Step{k(Put, 0)}, Warm: true},
		[]string{"c0 begins", "c0>publish", "c1 begins", "c1>publish", "c2 begins", "c2>sync-cas", "c2 m1 CAS", "c0*",
			"c2*", "c2 begins", "c2*", "c1*"}}

	// c1 has read in the group where the record is, and not the record yet. Tempting: the place
	// of what was replaced is free, since a reader compares keys. But c0 writes its next
	// record of the same key there, and c1 would answer with what nobody has
	// linked yet; its next read would find the value before. Harmless if c0 waits for the
	// place until c1 has answered.
	scenarios["r13-a-record-read-before-it-is-linked"] = scenario{
		Config{Units: 2, Epochs: 3, Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}},
			Setup: []Step{k(Put, 0)}},
		[]string{"c1 begins", "c1>read-records", "c0 begins", "c0*", "c0 begins", "c0 m0 WRITE", "c1*", "c1 begins",
			"c1*", "c0*"}}

	// Tempting: a place's ver is the reclaim epoch in which it was taken. Reclaim epochs repeat, modulo what
	// fits, and a round of them later the place holds another key's record, in the same
	// slot under the same word: c1, which remembers that word, would replace the other
	// key. Harmless if ver counts the place's lives.
	scenarios["r15-another-key-under-the-same-word"] = scenario{
		Config{Units: 1, Epochs: 4, Scripts: [][]Step{{k(Del, 0), k(Put, 1), k(Get, 1)}, {k(Put, 0)}},
			Setup: []Step{k(Put, 0)}, Warm: true},
		cat([]string{"c0 begins", "c0*"}, anEpoch, anEpoch, anEpoch, anEpoch,
			[]string{"c0 begins", "c0*", "c1 begins", "c1*", "c0 begins", "c0*"})}

	// c2, helping, is about to write c1's record at P when its caller goes. Tempting: who has
	// answered is in flight no more. But its WRITE is still queued, and would land when c3 has
	// replaced that record and gives its place another life. Harmless if c2's report
	// stays where it is until the WRITE is over: the place does not leave limbo.
	scenarios["r17-answered-help-still-queued"] = scenario{
		Config{Replicas: 2, Units: 1, Epochs: 6, Deadlines: 1, Setup: []Step{k(Put, 0)}, Warm: true,
			Scripts: [][]Step{{k(Get, 0)}, {k(Put, 0)}, {k(CAS, 0), k(Get, 0)}, {k(Put, 0), k(Put, 0)}}},
		cat([]string{"c1 begins", "c1* -m1", "c2 begins", "c2>sync-cas", "c2 reaches", "c1*", "c3 begins", "c3*"},
			anEpoch, anEpoch, anEpoch, []string{"c3 begins", "c3*", "c2 m1 WRITE", "c2*", "c2 begins", "c2*"})}

	// c0's word was at A, where c1 has replaced it already, when A is lost; P, now the head,
	// has not seen either. Tempting: what did not happen is done again as it was. But the
	// place had a life that others have seen and that has ended; c0 would write another record
	// there, under the same word, with no limbo in between. Harmless if the place is
	// retired: its next word has another ver.
	scenarios["r19-a-word-that-was-replaced-at-the-lost-head"] = scenario{
		Config{Replicas: 2, NodeCrashes: 1, Failures: 1, Scripts: [][]Step{{k(Incr, 0)}, {k(Put, 0), k(Get, 0)}},
			Setup: []Step{k(Put, 0)}, Warm: true},
		[]string{"c0 begins", "c0>cas-slot", "c0 m0", "c0 fails after", "c0 m0", "c1 begins", "c1>publish",
			"m0 crashes", "time passes",
			"directory*", "c0 learns", "c1 learns", "c0*", "c1*", "c0 renews", "c1 renews", "directory*", "c0 learns",
			"c0*", "c1 learns", "c1*",
			"c1 begins", "c1*"}}
}

// movedToSlot1 is client 0's part of halfDeleted: the key, in slot 0 at first, is inserted
// again when another key has that slot, which then goes.
var movedToSlot1 = []Step{k(Del, 0), k(Put, 2), k(Put, 0), k(Del, 2), k(Del, 0)}

// halfDeleted makes client 2 remember the key in slot 1, and client 0 die when the key is
// deleted there at A. The others remember it in slot 0.
var halfDeleted = []string{"c0 begins", "c0*", "c0 begins", "c0*", "c0 begins", "c0*", "c0 begins", "c0*", "c2 begins",
	"c2*",
	"c0 begins", "c0 m0 CAS", "c0 crashes", "time passes", "directory*"}

// anEpoch lets the reclaim epoch advance, and clients 0 to 3 learn of it and report.
var anEpoch = []string{"E advances", "c0 renews", "c1 renews", "c2 renews", "c3 renews", "c0 renews", "c1 renews",
	"c2 renews", "c3 renews"}
