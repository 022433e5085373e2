package simtest

// Schedules for tempting rules about eviction, expiry and "unchanged".
func init() {
	cache := func(c Config) Config {
		c.Cache = true
		if c.Setup == nil {
			c.Setup = one
		}
		c.Warm = true
		return c
	}
	for name, s := range map[string]scenario{
		// The evictor is done: nobody may find the key at P any more.
		"r31-evicted-at-A": {cache(Config{Replicas: 2, Scripts: [][]Step{{k(Evict, 0)}, {k(Get, 0)}}}),
			[]string{"c0 begins", "c0*", "c1 begins", "c1*"}},
		// It dies between A and P, as a deleter may: c1, who inserts the key, brings P up.
		"r31-evictor-dies": {
			cache(Config{Replicas: 2, Crashes: 1, Scripts: [][]Step{{k(Evict, 0)}, {k(Put, 0), k(GetIf, 0)},
				{k(GetIf, 0), k(Get, 0)}}}),
			[]string{"c0 begins", "c0|m0 CAS|1", "c0 m0 CAS", "c0 crashes", "c2 begins", "c2*", "time passes",
				"directory*", "c1 begins", "c1*", "c2 begins", "c2*",
				"c1 begins", "c1*"}},
		// c1's word is at A, P shows the one before. It is c1's word that goes, and P skips it.
		"r31-evicted-before-its-publish": {
			cache(Config{Replicas: 2, Scripts: [][]Step{{k(Evict, 0)}, {k(Put, 0), k(Get, 0)}, {k(Get, 0)}}}),
			[]string{"c1 begins", "c1>publish", "c0 begins", "c0*", "c2 begins", "c2*", "c1*", "c1 begins", "c1*"}},
		"r31-evicted-behind-a-replica-that-skipped": {
			cache(Config{Replicas: 3, Scripts: [][]Step{{k(Evict, 0)}, {k(Put, 0), k(Get, 0)},
				{k(Put, 0), k(Get, 0)}}}),
			[]string{"c0 begins", "c0|m1 CAS|1", "c1 begins", "c1* -m2", "c0*", "c2 begins", "c2* -m2", "c1*", "c2*",
				"c1 begins", "c1*", "c2 begins", "c2*"}},
		// The evictor has chosen what c1 replaces.
		"r31-replaced-before-it-is-evicted": {
			cache(Config{Replicas: 2, Scripts: [][]Step{{k(Evict, 0)}, {k(Put, 0), k(Get, 0)}}}),
			[]string{"c0 begins", "c0|m0 CAS|1", "c1 begins", "c1>publish", "c0*", "c1*", "c1 begins", "c1*"}},
		// Tempting: nobody needs the key, so its place is free at once. c1 is about to read it.
		"r31-evicted-under-a-reader": {
			cache(Config{Units: 1, Epochs: 3, Scripts: [][]Step{{k(Evict, 0), k(Put, 1)}, {k(Get, 0)}}}),
			[]string{"c1 begins", "c0 begins", "c0*", "c0 begins", "c0*"}},
		// c1 begins after the renewal that would cover what A has lost, and before P has.
		"r31-limbo-begins-at-P": {
			cache(Config{Replicas: 2, Units: 1, Epochs: 4, Scripts: [][]Step{{k(Evict, 0), k(Put, 1)}, {k(Get, 0)}}}),
			cat(epochs, []string{"c0 begins", "c0|m1 CAS|1", "c0 renews", "E advances", "c1 renews", "c1 renews",
				"c1 begins", "c0*",
				"c0 renews", "c0 renews", "c0 begins", "c0*"})},
		// c0 deletes the key and evicts it, on two lanes. The delete's CAS never happens, and it
		// finds an EMPTY word of c0's own. Tempting: then it was the delete after all. The place
		// would be given back twice.
		"r31-deleted-and-evicted-by-one": {
			cache(Config{Lanes: 2, Window: 2, Failures: 1, Scripts: [][]Step{{k(Del, 0), k(Evict, 0)}, {k(Get, 0)}}}),
			cat([]string{"c0 begins", "c0 begins", "c0 fails before", "c0 connects to m0"}, repeated(8, "c0 m0 lane 1"),
				[]string{"c0 m0 lane 0", "c0*"})},
		// c0 deletes the key twice at once; the first one did it, and neither hears of it.
		"r31-deleted-twice-by-one": {
			Config{Window: 2, Failures: 1, Scripts: [][]Step{{k(Del, 0), k(Del, 0)}, {k(Get, 0)}}, Setup: one,
				Warm: true},
			[]string{"c0 begins", "c0 begins", "c0 fails after", "c0 m0", "c0*"}},
		// The same, and the first one hears of it, and is over before the second one looks.
		"r31-deleted-by-an-earlier-one": {
			Config{Window: 2, Failures: 1, Scripts: [][]Step{{k(Del, 0), k(Del, 0)}, {k(Get, 0)}}, Setup: one,
				Warm: true},
			[]string{"c0 begins", "c0 begins", "c0 m0", "c0 fails after", "c0 m0", "c0*"}},

		// The word is on its way to the child, which may name the same place.
		"r32-evicted-on-its-way": {
			splitting(cache(Config{Scripts: [][]Step{{k(Evict, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}})),
			[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims", "c2|m0 CAS p1 a0 g3 header|1",
				"c0 begins", "c0*", "c1 begins", "c1*"}},
		"r32-evicted-before-the-copy": {
			splitting(cache(Config{Scripts: [][]Step{{k(Evict, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}})),
			[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c2 claims", "c2|m0 CAS p1 a1|1",
				"c0 begins", "c0*", "c1 begins", "c1*"}},
		// The mover freezes what the evictor has chosen, and the other way round.
		"r32-frozen-before-it-is-evicted": {
			splitting(cache(Config{Scripts: [][]Step{{k(Evict, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}})),
			[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c0 begins", "c0|m0 CAS|1", "c2 claims",
				"c2|m0 CAS p1 a1|1", "c0*", "c1 begins", "c1*"}},
		"r32-evicted-before-it-is-frozen": {
			splitting(cache(
				Config{Scripts: [][]Step{{k(Evict, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10), k(Put, 11)}})),
			[]string{"begin split", "c0 learns", "c1 learns", "c2 learns", "c0 begins", "c2 claims",
				"c2|m0 CAS p1 a0 g3 s0|1", "c0|m1 CAS|1", "c2|m0 CAS p1 a1|1", "c0*", "c2*", "c1 begins", "c1*"}},
		// c0 has the map from before a migration, and evicts where everything has moved away and is
		// to be wiped.
		"r32-evicted-in-an-array-that-is-wiped": {
			cache(Config{Nodes: 2, PGs: 2, Children: 1, Janitors: 1, Acts: []Act{{Migrate, 1, 2}},
				Scripts: [][]Step{{k(Evict, 0)}, {k(Get, 0)}}}),
			[]string{"begin shard", "all* -c0", "c0 begins", "c0|m0 READ p1 a0 g16|1", "c0 learns", "all* -c0", "c0*",
				"all*", "c1 begins", "c1*"}},
		// The recall's copy is linked when the evictor has chosen the word before.
		"r32-recalled-before-it-is-evicted": {recalling(cache(Config{Scripts: [][]Step{{k(Evict, 0)}, {k(Get, 0)}}})),
			cat([]string{"begin recall", "c0 learns", "c1 learns", "c2 learns", "c0 renews", "c1 renews", "c2 renews",
				"c0 begins", "c0|m0 CAS|1", "all* -c0",
				"c0*", "c1 begins", "c1*"},
				repeated(3, "all*", "E advances"), []string{"freed"})},
		// The evictor learns of the joiner while its CAS is under way: it starts over and finds
		// nothing, and the janitor brings the joiner what it took.
		"r32-evicted-while-a-copy-joins": {
			joining(cache(Config{Scripts: [][]Step{{k(Evict, 0)}, {k(Get, 0), k(Get, 0)}}}), 1),
			[]string{"m2 crashes", "m1 crashes", "time passes", "all*", "m2 comes back", "all* -c0", "c1 begins", "c1*",
				"c0 begins", "c0|m0 CAS|1",
				"c0 learns", "c0 m0 CAS", "c0*", "all*", "c1 begins", "c1*"}},

		// The record has no expiry any more, its access word does: c1's note is on its way.
		"r33-an-access-word-is-a-hint": {
			cache(Config{Clock: 1, Scripts: [][]Step{{k(Expire, 0)}, {k(PutEx, 0), k(Put, 0), k(Get, 0)}}}),
			[]string{"c1 begins", "c1*", "c1 begins", "c1|m0 WRITE p1 access|1", "the clock", "c0 begins", "c0*",
				"c1 begins", "c1*"}},
		// c0 has read that the record has expired; c1 replaces it.
		"r33-replaced-when-it-has-expired": {
			cache(Config{Replicas: 2, Clock: 1, Scripts: [][]Step{{k(Expire, 0)}, {k(Put, 0), k(Get, 0)}},
				Setup: []Step{k(PutEx, 0)}}),
			[]string{"the clock", "c0 begins", "c0|m0 CAS|1", "c1 begins", "c1>publish", "c0*", "c1*", "c1 begins",
				"c1*"}},

		// "Unchanged" is an answer of P's: c0's word is at A only, then everywhere.
		"r34-unchanged-at-P": {cache(Config{Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(GetIf, 0), k(GetIf, 0)}}}),
			[]string{"c0 begins", "c0>publish", "c1 begins", "c1*", "c0*", "c1 begins", "c1*"}},
		// The slot shows the same place in the same life, EMPTY.
		"r34-deleted-is-not-unchanged": {cache(Config{Scripts: [][]Step{{k(Del, 0)}, {k(GetIf, 0)}}}),
			[]string{"c0 begins", "c0*", "c1 begins", "c1*"}},
		// The slot that held the version is EMPTY; the key lives in another one by now.
		"r34-nothing-in-the-slot-that-held-it": {
			cache(Config{Scripts: [][]Step{{k(Del, 0), k(Put, 2), k(Put, 0), k(Del, 2)}, {k(GetIf, 0)}}}),
			[]string{"c0 begins", "c0*", "c0 begins", "c0*", "c0 begins", "c0*", "c0 begins", "c0*", "c1 begins",
				"c1*"}},
		// The slot still holds the version, which has expired.
		"r34-expired-is-not-unchanged": {
			cache(Config{Clock: 1, Scripts: [][]Step{{k(Get, 0)}, {k(GetIf, 0)}}, Setup: []Step{k(PutEx, 0)}}),
			[]string{"the clock", "c1 begins", "c1*"}},
	} {
		scenarios[name] = s
	}
}
