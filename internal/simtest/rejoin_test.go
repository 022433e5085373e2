package simtest

import (
	"maps"
	"strings"
	"testing"
)

// rejoinWide are random scopes in which a memory node that was declared lost comes back with what it held, mostly
// beside whatever else goes wrong.
var rejoinWide = map[string]Config{
	"rejoin": {Retains: true, Replicas: 2, Janitors: 1, NodePauses: 2, Pauses: 1, Failures: 1, Epochs: 6, Units: 16,
		WritePieces: 2, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(Get, 1)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1), k(Add, 0)},
			{k(Add, 0), k(Get, 0), k(Put, 1), k(Incr, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1), k(Put, 2)}, Warm: true},
	// So little memory that places are used again and again, in reclaim epochs that are long.
	"rejoin-reuse": {Retains: true, Replicas: 2, Janitors: 1, NodePauses: 2, HeapUnits: 6, Units: 6, Stingy: true,
		Waits: true, Epochs: 10, Leap: 300, Leaders: 1, Scripts: [][]Step{
			{k(Put, 0), k(Del, 0), k(Put, 0), k(Close, 0)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Del, 0), k(Put, 0)}},
		Setup: one, Warm: true},
	"rejoin-restart": {Replicas: 2, Nodes: 3, Janitors: 1, Restarts: 3, NodePauses: 1, NodeCrashes: 1, Crashes: 1,
		Epochs: 4, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"rejoin-r3": {Retains: true, Replicas: 3, Janitors: 1, NodePauses: 3, NodeCrashes: 1, Pauses: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"rejoin-move": {Retains: true, Replicas: 2, Nodes: 3, PGs: 2, Janitors: 2, Children: 2, NodePauses: 2, Crashes: 1,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Put, 10), k(Get, 10), k(Del, 10), k(Put, 12)},
			{k(Get, 10), k(Put, 11), k(Put, 10), k(Get, 12)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"rejoin-there-and-back": {Retains: true, Replicas: 2, Nodes: 4, PGs: 3, Janitors: 1, NodePauses: 2, Epochs: 6,
		Leap: 500, Acts: []Act{{Migrate, 1, 3}, {Migrate, 2, 1}}, Scripts: [][]Step{
			{k(Put, 0), k(Get, 0), k(Del, 0), k(Put, 2)},
			{k(Get, 0), k(Put, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"rejoin-recall": {Retains: true, Replicas: 2, Janitors: 1, TwoExtents: true, Acts: []Act{{Recall, 1, 0}},
		NodePauses: 2, Crashes: 1, Epochs: 6, Units: 8, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 2)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"rejoin-recall-in-place": {Retains: true, Replicas: 2, Janitors: 1, TwoExtents: true, InPlace: true,
		Acts: []Act{{Recall, 1, 0}}, NodePauses: 2, Epochs: 8, Units: 8, Leap: 200, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 2)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"rejoin-evict": {Retains: true, Cache: true, Replicas: 2, Janitors: 1, NodePauses: 2, Crashes: 1, Epochs: 6,
		Units: 8, Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Put, 0), k(Get, 0)},
			{k(GetIf, 0), k(Put, 0), k(Evict, 0), k(Add, 0)}},
		Setup: one, Warm: true},
	"rejoin-long": {Retains: true, Long: 0xb6, Units: 96, Replicas: 2, Janitors: 1, NodePauses: 2, Crashes: 1,
		Failures: 1, Epochs: 4, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(CAS, 1)},
			{k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 1), k(Del, 1)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	"rejoin-full": {Retains: true, Replicas: 2, Janitors: 1, NodePauses: 2, Crashes: 1, Fill: 29, OVF: true,
		Scripts: [][]Step{
			{k(Put, 0), k(Del, 0), k(Put, 2)},
			{k(Add, 1), k(Get, 0), k(Put, 0), k(Get, 2)}},
		Setup: one, Warm: true},
	"txn-r2-rejoin": txnMix(2, Config{Retains: true, Janitors: 1, NodePauses: 2, Crashes: 1}),
	"txn-r2-rejoin-long": txnMix(2, Config{Retains: true, Long: 0xb6, Units: 128, Janitors: 1, NodePauses: 2,
		Failures: 1}),
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
		"rejoin-update": {Retains: true, Replicas: 2, Janitors: 1, NodePauses: 1,
			Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
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
			t.Errorf("in 100 schedules, synchronous %t: %d regions are made of what was retained, and %d words of "+
				"them are believed", sync, retained, believed)
		}
		t.Logf("synchronous %t: %d, %d", sync, retained, believed)
	}
}

// The schedules of memory that was retained: m1, or another memory node, is lost for a while and joins again with what
// it held.
func init() {
	// knows has clients learn the map and say so.
	knows := func(who ...string) (out []string) {
		for _, c := range who {
			out = append(out, c+" learns", c+" renews")
		}
		return out
	}
	// away takes a memory node out of its chains; the clients named go on without it.
	away := func(m string, who ...string) []string {
		return cat([]string{m + " falls silent", "time passes", "directory*"}, knows(who...), []string{"directory*"},
			knows(who...), []string{"directory*"}, knows(who...))
	}
	back := func(m string) []string { return []string{m + " hears the directory again", "all*"} }
	// rejoins has a memory node come back up to the moment when every client is to hear of it.
	rejoins := func(m string) []string { return []string{m + " hears the directory again", "directory*"} }
	with := func(c Config) Config {
		c.Retains, c.Replicas, c.Janitors = true, 2, 1
		c.NodePauses = max(c.NodePauses, 1)
		return c
	}
	// old is a store in which words come round: c0 put the key and gives its memory back, which c1 is granted again.
	old := func(c Config) Config {
		c.Scripts = [][]Step{{k(Close, 0)}, {k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}}
		c.Setup, c.HeapUnits, c.Units, c.Stingy, c.Epochs = one, 1, 1, true, 40
		return with(c)
	}
	round := func(n int, who ...string) []string {
		out := []string{}
		for range n {
			out = append(out, "E advances", "directory*")
			for range 2 {
				for _, c := range who {
					out = append(out, c+" renews")
				}
			}
		}
		return out
	}
	for name, s := range map[string]scenario{
		// While m1 was away one key was changed, one deleted, one left alone, and the place of the first was used for
		// another.
		"r42-words": {with(
			Config{Epochs: 8, Units: 4, Scripts: [][]Step{{k(Put, 0), k(Del, 1), k(Put, 0), k(Put, 3)},
				{k(Get, 0), k(Get, 1), k(Get, 2)}},
				Setup: []Step{k(Put, 0), k(Put, 1), k(Put, 2)}, Warm: true}),
			cat(away("m1", "c0", "c1", "c2"), repeated(4, "c0 begins", "c0*", "E advances", "c0 renews", "c1 renews",
				"c2 renews", "c0 renews", "c1 renews", "c2 renews"),
				back("m1"), repeated(3, "c1 begins", "c1*"))},
		// Tempting: a record with a good CRC is the word's record. m1 has the one that was at the place before.
		"r42-another-life": {
			with(Config{Epochs: 8, HeapUnits: 2, Units: 2, Stingy: true,
				Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true}),
			cat(away("m1", "c0", "c1", "c2"), []string{"c0 begins", "c0*"}, round(2, "c0", "c1", "c2"),
				[]string{"c0 begins", "c0*"}, back("m1"), []string{"c1 begins", "c1*"})},
		// c0 has a lock at m0, and lives. Tempting: the lock is what it was. m1 is lost, too, and then m0 arbitrates
		// again.
		"r42-lock": {with(Config{NodeCrashes: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Put, 2), k(Get, 0)}}}),
			cat([]string{"c0 begins", "c0|m0 CAS p1 a0 g3 s|1"}, away("m0", "c0", "c1", "c2"), []string{"c0*"},
				back("m0"),
				[]string{"m1 crashes", "time passes", "directory*"}, knows("c0", "c1", "c2"), []string{"directory*"},
				knows("c0", "c1", "c2"), []string{"c1 begins", "c1*", "c1 is done", "all*", "c1 begins", "c1*"})},
		// m1 has SPLIT in a header; the child was lost with its placement group, and the split was taken back.
		// Tempting: headers only grow.
		"r42-split-taken-back": {
			with(Config{Nodes: 4, PGs: 3, NodeCrashes: 2, LastCopy: true, Acts: []Act{{Split, 1, 3}},
				Scripts: [][]Step{{k(Get, 0)}, {k(Get, 10), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true}),
			cat([]string{"begin split"}, knows("c0", "c1", "c2"),
				[]string{"directory*", "c2 claims", "c2|m1 CAS p1 a0 g3 header|1", "c2 m1 CAS p1 a0 g3 header"},
				away("m1", "c0", "c1", "c2"),
				[]string{"m2 crashes", "m3 crashes", "time passes", "directory*", "all*"}, back("m1"),
				[]string{"c1 begins", "c1*", "all*", "c1 begins", "c1*"})},
		// The shard goes to another placement group and its array is zero again, while m1 is away. Later another shard
		// has that array.
		"r42-array": {with(Config{Nodes: 4, PGs: 3, Full: true, Children: 1, Epochs: 6, Leap: 1100,
			Acts:    []Act{{Migrate, 1, 3}, {Scrub, 1, 0}, {Migrate, 2, 1}},
			Scripts: [][]Step{{k(Del, 0)}, {k(Get, 0), k(Get, 2)}}, Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true}),
			cat(away("m1", "c0", "c1", "c2"), []string{"begin shard 1", "all*"}, back("m1"),
				[]string{"E advances", "all*", "E advances", "all*", "begin scrub", "all*", "c0 begins", "c0*",
					"begin shard 2", "all*", "c1 begins", "c1*", "c1 begins", "c1*"})},
		// Tempting: a word is a word. It is c0's at m1, and c1's at m0, of another time.
		"r42-too-old": {old(Config{Leap: 1100}),
			cat(away("m1", "c0", "c1", "c2", "c3"), []string{"c0 begins", "c0*", "directory*"}, knows("c1", "c2", "c3"),
				[]string{"c1 begins", "c1*"}, round(3, "c1", "c2", "c3"),
				[]string{"all*"}, round(3, "c1", "c2", "c3"), []string{"c1 begins", "c1*"}, back("m1"),
				[]string{"c2 begins", "c2*"})},
		// The joiner is planned in time, and a session hears of it too late.
		"r42-known-too-late": {
			with(Config{Epochs: 8, Leap: 300, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true}),
			cat(away("m1", "c0", "c1", "c2"), []string{"E advances", "directory*", "E advances", "directory*"},
				rejoins("m1"), []string{"c0 begins", "c0*", "E advances", "directory*", "E advances", "directory*",
					"all*", "c1 begins", "c1*"})},
		// m1 is lost again while it is a joiner: it has words of when it was a copy.
		"r42-a-joiner": {old(Config{Leap: 100, NodePauses: 2}),
			cat(away("m1", "c0", "c1", "c2", "c3"), []string{"c0 begins", "c0*", "directory*"}, knows("c1", "c2", "c3"),
				[]string{"c1 begins", "c1*"}, round(3, "c1", "c2", "c3"),
				[]string{"all*"}, round(4, "c1", "c2", "c3"), rejoins("m1"), knows("c1", "c2", "c3"),
				[]string{"directory*"}, knows("c1", "c2", "c3"), away("m1", "c1", "c2", "c3"),
				round(8, "c1", "c2", "c3"), []string{"c1 begins", "c1*"}, back("m1"), []string{"c2 begins", "c2*"})},
		// c0's delete was decided at m0 alone, so another one of c0's has to come, by the same EMPTY. m0 comes back
		// with that. c2 brings m0 up to the record, and c0 deletes; c1 has read the slots before and sets the record's
		// word there once more. Tempting: a word that was synced does not fall behind. Harmless where no joiner is a
		// copy before c1 has ended and its words have been looked at again.
		"r42-deleted-again": {
			with(Config{Crashes: 1, Failures: 1, Deadlines: 1, Scripts: [][]Step{{k(Del, 0), k(Del, 0)}, {k(Get, 0)},
				{k(Get, 0), k(Get, 0)}}, Setup: one, Warm: true}),
			cat([]string{"c0 begins", "c0 fails after", "c0 m0", "c0 reaches its deadline"},
				away("m0", "c0", "c1", "c2", "c3"), rejoins("m0"), knows("c0", "c1", "c2", "c3"),
				[]string{"directory*"}, knows("c0", "c1", "c2", "c3"), []string{"c1 begins", "c1>sync-cas", "c2 begins",
					"c2*", "c0 begins", "c0*", "c3 claims", "c3*", "directory*"},
				knows("c0", "c2"), []string{"c1 m0 CAS p1 a0 g3 s", "c1 crashes", "c2 begins", "c2*"})},
		// The last copy is lost, too, so that all begins anew, with the same words.
		"r42-another-generation": {
			with(Config{NodeCrashes: 1, LastCopy: true,
				Scripts: [][]Step{{k(Get, 0)}, {k(Del, 0), k(Put, 0), k(Del, 0)}}, Setup: one}),
			cat(away("m1", "c0", "c1", "c2"), []string{"c1 begins", "c1*", "m0 crashes", "time passes", "directory*",
				"m0 comes back", "all*", "c1 begins", "c1*"}, back("m1"),
				[]string{"c0 begins", "c0*", "c1 begins", "c1*"})},
	} {
		scenarios[name] = s
	}
}

// rejoinMutants are mistakes about memory that is retained.
var rejoinMutants = []mutant{
	{"retain-too-old", "rejoin: words are believed for so many reclaim epochs only", []edit{
		{retaining, " && epoch >= d.Epoch && epoch-d.Epoch <= RetainEpochs {", " {"},
		{retaining, "	if epoch < m.Retained.Epoch || epoch-m.Retained.Epoch >= layout.WordLifeEpochs {",
			"	if false {"}}},
	{"retain-late", "rejoin: their age counts when everybody knows of the joiner, not when it is planned", []edit{
		{retaining, "	if epoch < m.Retained.Epoch || epoch-m.Retained.Epoch >= layout.WordLifeEpochs {",
			"	if false {"}}},
	{"retain-unfrozen", "rejoin: nobody reads a joiner's words before everybody writes there", []edit{
		{retaining, "	pg.State = dirpb.PGState_PG_FROZEN\n	s.newEpoch(pg)\n	s.editHeap(pg.Id).FrozenVersion " +
			"= pg.ChangedVersion\n",
			"pg.Members[len(pg.Members)-1].Retained = nil\ns.newEpoch(pg)\ns.addJoin(pg)\n"}}},
	{"retain-crc-proves", "rejoin: a good CRC does not tell a place's lives apart", []edit{{op,
		"	same := bytes.Equal(mine[:n], prev[:n])\n", "_, err := layout.ParseRecord(mine)\nsame := err == nil || " +
			"bytes.Equal(mine[:n], prev[:n])\n"}}},
	{"retain-keeps-locks", "rejoin: a lock is of an operation that has gone on without it",
		[]edit{{"internal/layout",
			"			clear(index[at:][:GroupSlotsOff])\n", "clear(index[at:][:GroupLockOff])\n"}}},
	{"retain-keeps-headers", "rejoin: what a header tells of may have been taken back",
		[]edit{{"internal/layout",
			"			clear(index[at:][:GroupSlotsOff])\n", "clear(index[at:][GroupLockOff:GroupSlotsOff])\n"}}},
	{"retain-keeps-arrays", "rejoin: an array that no shard has is zero", []edit{
		{"internal/layout", "		clear(index[at:a.Off])\n", ""},
		{"internal/layout", "	clear(index[at:])\n	return nil\n", "return nil\n"}}},
	{"retain-once", "rejoin: the word of a delete comes again, so all is looked at when who has seen it has ended",
		[]edit{{"internal/janitor/plan.go",
			"		if job.GetKind() == dirpb.JobKind_JOB_JOIN && job.GetRejoin() {\n", "if false {\n"}}},
	{"retain-twice-at-once", "rejoin: the second look waits for all that is under way",
		[]edit{{"internal/janitor/plan.go",
			"	p.Len, p.first, p.outlasts = 2*n, n, true\n", "p.Len, p.first, p.outlasts = 2*n, n, false\n"}}},
	{"retain-a-joiner", "rejoin: a joiner is no copy, its words are of two times", []edit{{"server/fsm/pgs.go",
		"			pg.Members, pg.Joining = chain, false\n",
		"s.depart(pg, joiner[0], epoch)\npg.Members, pg.Joining = chain, false\n"}}},
	{"retain-other-generation", "rejoin: words of another generation mean nothing", []edit{{"server/fsm/pgs.go",
		"		IndexNext: old.IndexNext,\n", "IndexNext: old.IndexNext, Departed: old.Departed,\n"}}},
}

const retaining = "server/fsm/retain.go"
