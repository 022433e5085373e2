package simtest

import (
	"maps"
	"testing"
)

// besideWide are random scopes in which every memory node has, beside its copies of the namespace that is in use, the
// only copy of something else: one that is silent is lost to each placement group by itself, stays up, and comes back,
// mostly beside whatever else goes wrong.
var besideWide = map[string]Config{
	"beside": {Beside: true, Retains: true, Replicas: 2, Nodes: 3, Janitors: 1, NodePauses: 2, Pauses: 1, Failures: 1,
		Epochs: 6, Units: 16, WritePieces: 2, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(Get, 1)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1), k(Add, 0)},
			{k(Add, 0), k(Get, 0), k(Put, 1), k(Incr, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1), k(Put, 2)}, Warm: true},
	"beside-dead": {Beside: true, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 2, Crashes: 1, Pauses: 1, Leaders: 1,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"beside-restart": {Beside: true, Replicas: 2, Nodes: 3, Janitors: 1, Restarts: 3, NodePauses: 1, NodeCrashes: 1,
		Crashes: 1, Epochs: 4, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"beside-r3": {Beside: true, Retains: true, Replicas: 3, Janitors: 1, NodePauses: 3, NodeCrashes: 1, Pauses: 1,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"beside-move": {Beside: true, Retains: true, Replicas: 2, Nodes: 3, PGs: 2, Janitors: 2, Children: 2, NodePauses: 2,
		Crashes: 1, Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Put, 10), k(Get, 10), k(Del, 10), k(Put, 12)},
			{k(Get, 10), k(Put, 11), k(Put, 10), k(Get, 12)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"txn-r2-beside": txnMix(2, Config{Beside: true, Retains: true, Janitors: 1, NodePauses: 2, Crashes: 1}),
}

func init() {
	maps.Copy(wide, besideWide)
	for name := range besideWide {
		heavy[name] = 16
	}
	heavy["beside"], heavy["beside-dead"] = 8, 4
	maps.Copy(scopes, map[string]Config{
		"beside-update": {Beside: true, Retains: true, Replicas: 2, Janitors: 1, NodePauses: 1,
			Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
	})
}

// The schedules of a memory node that is silent and has the only copy of something else.
func init() {
	lost := []string{"c0 learns", "c1 learns", "c0 renews", "c1 renews", "directory*", "c0 learns", "c1 learns"}
	for name, s := range map[string]scenario{
		// m0, the head, falls silent, and is served. The others go on without it; c0 does not know yet. Tempting: it
		// stays up, so what it has is a copy.
		"beside-the-head-is-silent": {Config{Beside: true, Retains: true, Replicas: 2, Janitors: 1, NodePauses: 1,
			Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: one, Warm: true},
			cat([]string{"c0 begins", "c0|m0 CAS|1", "m0 falls silent", "time passes", "directory*", "c0 m0 CAS"}, lost,
				[]string{"c1 begins", "c1*", "m0 hears the directory again", "all*", "c0 begins", "c0*", "c1 begins",
					"c1*"})},
		// It comes back when the key has been changed, before it has dropped what it was taken out of.
		"beside-it-is-back": {Config{Beside: true, Retains: true, Replicas: 2, Janitors: 1, NodePauses: 1,
			Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: one, Warm: true},
			cat([]string{"m1 falls silent", "time passes", "directory*"}, lost,
				[]string{"c0 begins", "c0*", "m1 hears the directory again", "c1 begins", "c1*", "all*", "c0 begins",
					"c0*", "c1 begins", "c1*"})},
		// c0 dies with m0. Tempting: who is up has to confirm its fence, and m0 is.
		"beside-a-client-dies": {Config{Beside: true, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, Crashes: 1,
			Scripts: [][]Step{{k(Put, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: one, Warm: true},
			[]string{"c0 begins", "c0|m0 CAS|1", "m0 crashes", "c0 crashes", "time passes", "directory*", "m1 fences",
				"m2 fences", "c1 learns", "c1 renews", "directory*", "all*", "c1 begins", "c1*"}},
	} {
		scenarios[name] = s
	}
}

// besideMutants are mistakes about memory nodes that are lost to some placement groups and waited for by others.
var besideMutants = []mutant{
	{"lost-whole-or-not", "beside: a silent memory node is lost to each placement group by itself",
		[]edit{{"server/lead/lose.go",
			"	others := slices.DeleteFunc(p.s.Losable(m.Id), last)\n",
			"if true {\nreturn\n}\nothers := slices.DeleteFunc(p.s.Losable(m.Id), last)\n"}}},
	{"losable-leaves-one", "beside: each placement group with another copy goes on", []edit{{"server/fsm/lose.go",
		"	for _, id := range lost {\n", "if len(lost) > 1 {\nlost = lost[1:]\n} else {\nlost = nil\n}\nfor _, id " +
			":= range lost {\n"}}},
	{"returning-member-is-believed", "beside: what a memory node has of a placement group that went on without it is " +
		"no region of it any more", []edit{
		{"server/fsm/pgs.go", "	s.editPG(pg.Id).Planned = &dirpb.Member{NodeId: c.NodeId, Incarnation: " +
			"s.nodes[c.NodeId].Incarnation, Since: s.nextVersion(), Retained: old}\n",
			"since := s.nextVersion()\nif old.GetIncarnation() == s.nodes[c.NodeId].Incarnation && old != nil " +
				"{\nsince, old = old.Since, nil\n}\n" +
				"s.editPG(pg.Id).Planned = &dirpb.Member{NodeId: c.NodeId, Incarnation: " +
				"s.nodes[c.NodeId].Incarnation, Since: since, Retained: old}\n"}}},
	{"silent-has-to-confirm", "beside: a silent memory node that has nothing of a namespace holds up none of its " +
		"sessions' fences", []edit{{"server/fsm/lose.go",
		"	with := make(map[uint32]map[uint32]bool) // by namespace\n",
		"if true {\nreturn\n}\nwith := make(map[uint32]map[uint32]bool)\n"}}},
	{"nobody-has-to-confirm", "beside: the fence of a session is confirmed by all that lend its namespace something",
		[]edit{{"server/fsm/lose.go",
			"(with[n.Id] || !s.KnowsBoots())", "(!with[n.Id] || !s.KnowsBoots())"}}},
}

// TestBeside: the searches meet memory nodes that stay up and are lost to some placement groups, and what they retained
// joins again.
func TestBeside(t *testing.T) {
	for _, sync := range []bool{false, true} {
		alone, retained := 0, 0
		for seed := range uint64(100) {
			w, err := NewWorld(inMode(wide["beside"], sync), false)
			if err != nil {
				t.Fatal(err)
			}
			w.runRandom(seed)
			alone, retained = alone+w.alone, retained+w.retained
			w.Close()
		}
		if alone < 20 || retained < 5 {
			t.Errorf("in 100 schedules, synchronous %t: %d times a memory node is lost to some placement groups, %d "+
				"regions are made of what it retained", sync, alone, retained)
		}
		t.Logf("synchronous %t: %d, %d", sync, alone, retained)
	}
}
