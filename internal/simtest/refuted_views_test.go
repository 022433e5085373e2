package simtest

// More schedules for tempting rules about views and background jobs: those that need
// more than one thing to go wrong.
func init() {
	for name, s := range map[string]scenario{
		// Tempting: who is lost is lost, so the survivors may serve at once. m0, the head, is
		// given up while it lives, and c0 does not know: m0 grants its condition, which c1 has
		// refuted at m1, the head since. Harmless where the placement group stays frozen until c0
		// has no verb under way and posts none under the old map.
		"r21-two-heads": {
			Config{Replicas: 2, NodePauses: 1, Scripts: [][]Step{{k(CAS, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}},
				Setup: one, Warm: true},
			[]string{"m0 falls silent", "time passes", "directory*", "c1 learns", "c1 renews", "directory*",
				"c1 learns",
				"c1 begins", "c1*", "c0 begins", "c0*", "c1 begins", "c1*"}},

		// Tempting: a MOVED word of one's fingerprint leads to the child, so that is where to
		// insert. Key 10 fills the stash's slot with MOVED; key 31 shares its fingerprint, and its
		// own group has not moved. c0 has looked into that group before c1 inserts key 31 there,
		// and into the stash after key 10 has left it. Harmless where c0 asks the lock of the
		// parent's group, under which it finds what c1 wrote.
		"r25-insert-where-another-group-moved": {
			splitting(Config{Fill: 30, Scripts: [][]Step{{k(Incr, 31)}, {k(Put, 31), k(Get, 31)}},
				Setup: []Step{k(Put, 10)}, OVF: true}),
			[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims",
				"c0 begins", "c0|m1 READ p1 a0 g5|1", "c0 m1 READ p1 a0 g5", "c1 begins", "c1*",
				"c2|m0 CAS p1 a0 g3 header|1", "c0*", "c1 begins", "c1*"}},

		// Tempting: an operation that waits for a connection acts by no map. c0's CAS is still
		// queued, and names a place of the extent that c0 knows to be recalled; it lands when the
		// scan has passed its slot, which held c1's word, in another extent. Harmless where
		// what may have been decided counts under the map that it was posted under: no scan
		// begins before c0 knows.
		"r28-what-may-be-decided-counts": {
			Config{TwoExtents: true, Epochs: 6, Janitors: 1, Failures: 1, Acts: []Act{{Recall, 1, 0}},
				Scripts: [][]Step{{k(Get, 0), k(Put, 0)}, one}, Setup: one},
			cat([]string{"begin recall", "c1 learns", "c1 begins", "c1*", "c0 begins", "c0*", "c0 begins",
				"c0>cas-slot", "c0 fails after", "c0 m0",
				"c0 learns", "c2 learns", "c0 renews", "c1 renews", "c2 renews", "c2 claims", "c2*", "c0 m0"},
				repeated(3, "all*", "E advances"))},

		// Tempting: a scan finds whatever lies in the extent, so nobody needs to know of the recall
		// before. c0 does not, and takes a place of the extent for a slot that the scan has
		// passed. Harmless where the scan begins when all have acknowledged.
		"r29-a-place-taken-behind-the-scan": {recalling(Config{Scripts: [][]Step{one, {k(Get, 0)}}, Setup: one}),
			cat([]string{"begin recall", "c1 learns", "c2 learns", "c1 renews", "c2 renews", "c2 claims", "c2*",
				"c0 begins", "c0*"},
				repeated(3, "c0 renews", "E advances", "all* -c0"))},
	} {
		scenarios[name] = s
	}
}
