package simtest

import (
	"maps"
	"testing"
)

// restartWide are random scopes in which processes of memory nodes end and others take over their memory, mostly beside
// whatever else goes wrong.
var restartWide = map[string]Config{
	"restart": {Restarts: 2, Crashes: 1, Pauses: 1, Failures: 1, Deadlines: 1, WritePieces: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Add, 0), k(Get, 0)},
		{k(Put, 0), k(Get, 0), k(CAS, 0), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 1), k(Get, 0), k(Incr, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"restart-keys": {Restarts: 2, NewKeys: true, Crashes: 1, Pauses: 1, Leaders: 1, Failures: 1, Epochs: 8, Units: 4,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Add, 0), k(Get, 0)},
			{k(Put, 0), k(Get, 0), k(CAS, 0), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 1), k(Get, 0), k(Incr, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"restart-r2": {Replicas: 2, Nodes: 3, Janitors: 1, Restarts: 3, NodeCrashes: 1, NodePauses: 1, Pauses: 1,
		Failures: 1, Leaders: 1, WritePieces: 2, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)},
			{k(Add, 0), k(Get, 0), k(Put, 1), k(Incr, 0)}},
		Setup: one, Warm: true},
	"restart-r2-keys": {Replicas: 2, Nodes: 3, Janitors: 1, Missing: 1, Restarts: 3, NewKeys: true, NodeCrashes: 1,
		Crashes: 1, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"restart-r3": {Replicas: 3, Nodes: 4, Janitors: 2, Restarts: 4, NodeCrashes: 1, Pauses: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"restart-move": {Replicas: 2, PGs: 2, Janitors: 2, Children: 2, Restarts: 2, Crashes: 1,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Put, 10), k(Get, 10), k(Del, 10), k(Put, 12)},
			{k(Get, 10), k(Put, 11), k(Put, 10), k(Get, 12)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"restart-recall": {Replicas: 2, Janitors: 1, TwoExtents: true, Acts: []Act{{Recall, 1, 0}}, Restarts: 2, Crashes: 1,
		Pauses: 1, Epochs: 6, Units: 4, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 2)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"restart-lanes": {Replicas: 2, Lanes: 2, Window: 2, Restarts: 3, Deadlines: 1, Failures: 1, Pauses: 1, Epochs: 4,
		Units: 64, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 1), k(Get, 0)},
			{k(Get, 1), k(Put, 0), k(CAS, 1), k(Get, 0), k(Add, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	"restart-evict": {Cache: true, Replicas: 2, Restarts: 2, NewKeys: true, Crashes: 1, Failures: 1, Epochs: 6,
		Units: 6, Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Put, 0), k(Get, 0)},
			{k(GetIf, 0), k(Put, 0), k(Evict, 0), k(Add, 0)}},
		Setup: one, Warm: true},
	"txn-restart":          txnMix(1, Config{Restarts: 2, Crashes: 1, Failures: 1}),
	"txn-r2-restart":       txnMix(2, Config{Nodes: 3, Janitors: 1, Restarts: 3, NodeCrashes: 1, Crashes: 1}),
	"txn-r2-heirs-restart": txnHeirs(2, Config{Restarts: 2, NewKeys: true, Crashes: 1, Pauses: 1}),
}

func init() {
	maps.Copy(wide, restartWide)
	maps.Copy(heavy, map[string]int{"restart-r2": 2, "restart-r2-keys": 4, "restart-r3": 8, "restart-move": 4,
		"restart-recall": 4, "restart-lanes": 4,
		"restart-evict": 2, "txn-restart": 4, "txn-r2-restart": 8, "txn-r2-heirs-restart": 8})
	maps.Copy(scopes, map[string]Config{
		"restart-update": {Restarts: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
		"restart-insert": {Restarts: 1, Scripts: [][]Step{one, {k(Add, 0)}}},
		"restart-pause":  {Restarts: 1, Pauses: 1, Scripts: [][]Step{one, {k(Get, 0)}}, Setup: one, Warm: true},
		"restart-keys": {Restarts: 1, NewKeys: true, MaxSteps: 60, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}},
			Setup: one, Warm: true},
		"restart-r2-update": {Replicas: 2, Restarts: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one,
			Warm: true},
		"restart-r2-join": {Replicas: 2, Missing: 1, Janitors: 1, Restarts: 1, Scripts: [][]Step{{k(Put, 0)}},
			Setup: one, Warm: true},
	})
}

// The schedules of restarts: what becomes of what was under way, of fences, locks, joins and last copies.
func init() {
	back := []string{"m0 adopts", "directory*"}
	for name, s := range map[string]scenario{
		// c0's CAS was on its way when the process of m0 ended. It took effect all the same, or did not, or its record
		// did alone. Tempting: what a lost connection takes with it has not happened, so it is done again.
		"r35-executed": {Config{Restarts: 1, Scripts: [][]Step{{k(Incr, 0)}, {k(Get, 0)}}, Setup: []Step{k(Incr, 0)},
			Warm: true},
			cat([]string{"c0 begins", "c0|m0 CAS|1", "m0 restarts", "c0 m0 CAS"}, back,
				[]string{"c0*", "c1 begins", "c1*"})},
		"r35-dropped": {Config{Restarts: 1, Scripts: [][]Step{{k(Incr, 0)}, {k(Get, 0)}}, Setup: []Step{k(Incr, 0)},
			Warm: true},
			cat([]string{"c0 begins", "c0|m0 CAS|1", "m0 restarts"}, back, []string{"c0*", "c1 begins", "c1*"})},
		"r35-record-alone": {Config{Replicas: 2, Restarts: 1, Scripts: [][]Step{one, {k(Get, 0), k(Put, 0)}},
			Setup: one, Warm: true},
			cat([]string{"c0 begins", "c0|m0 WRITE|1", "m0 restarts", "c0 m0 WRITE"}, back,
				[]string{"c1 begins", "c1*", "c1 begins", "c1*", "c0*"})},

		// c0 does not know that its lease has ended. It is fenced since the process that it was to be fenced by has
		// ended. Tempting: a process that begins takes every token that the cluster has signed.
		"r36-a-fenced-session-dials": {Config{Restarts: 1, Pauses: 1, Scripts: [][]Step{one, {k(Put, 0), k(Get, 0)}},
			Setup: one, Warm: true},
			cat([]string{"c0 begins", "c0|m0 CAS|1", "c0 pauses", "m0 restarts", "time passes", "directory*"}, back,
				[]string{"c0 resumes", "c0*", "c1 begins", "c1*"})},
		// The same before the next process knows who lives.
		"r36-before-it-is-registered": {Config{Restarts: 1, Pauses: 1, Scripts: [][]Step{one, {k(Put, 0), k(Get, 0)}},
			Setup: one, Warm: true},
			[]string{"c0 begins", "c0|m0 CAS|1", "c0 pauses", "m0 restarts", "time passes", "directory*", "m0 adopts",
				"c0 resumes", "c0 connects", "directory*", "c0*", "c1 begins", "c1*"}},
		// c0 is to be fenced by the second process, which has not done it, when the registration of the first one
		// arrives again. Tempting: whoever registers with what is there has fenced everybody.
		"r36-overtaken": {Config{Restarts: 1, Pauses: 1, Scripts: [][]Step{one, {k(Put, 0), k(Get, 0)}}, Setup: one,
			Warm: true},
			cat([]string{"m0 restarts"}, back, []string{"c0 begins", "c0|m0 CAS|1", "c0 pauses", "time passes",
				"directory: ", "directory: ",
				"m0 is registered", "c1 begins", "c1*", "c0 m0 CAS"})},

		// c0 executes its verbs itself, and is stopped between two of them. Tempting: the next process has other
		// connections, so it need not wait for those of the last one.
		"r37-stopped-inside-a-verb": {
			Config{Restarts: 1, Pauses: 1, Synchronous: true, Scripts: [][]Step{one, {k(Put, 0), k(Get, 0)}},
				Setup: one, Warm: true},
			cat([]string{"c0 begins", "c0|m0 CAS|1", "c0 pauses", "m0 restarts", "time passes", "directory*"}, back,
				[]string{"c1 begins", "c1*", "c0 resumes", "c0 m0 CAS", "c1 begins", "c1*"})},
		"r37-late": {Config{Restarts: 1, Pauses: 1, Scripts: [][]Step{one, {k(Put, 0), k(Get, 0)}}, Setup: one,
			Warm: true},
			cat([]string{"c0 begins", "c0|m0 CAS|1", "c0 pauses", "m0 restarts", "time passes", "directory*"}, back,
				[]string{"c0 m0 CAS", "c1 begins", "c1*"})},

		// c0 holds the lock, and its release is lost. c0 lives, so nobody may break the lock: it has to say it again.
		"r38-unlock-is-lost": {Config{Restarts: 1, Scripts: [][]Step{one, {k(Put, 2), k(Get, 0)}}},
			cat([]string{"c0 begins", "c0|m0 CAS p1 a0 g3 lock|2", "m0 restarts"}, back,
				[]string{"c1 begins", "c1*", "c0*", "c1*", "c1 begins", "c1*"})},
		// c0 has the lock and has read the group at m0, not at m1. It goes on when another of its operations has
		// connected to m0 again. Tempting: locks are of connections, which have ended.
		"r38-lock-is-kept": {
			Config{Replicas: 2, Restarts: 1, Window: 2,
				Scripts: [][]Step{{k(Put, 0), k(Put, 20)}, {k(Del, 2), k(Put, 0), k(Get, 0)}},
				Setup:   []Step{k(Put, 2), k(Put, 20)}, Warm: true},
			cat([]string{"c0 begins", "c0* -m1", "m0 restarts"}, back, []string{"c0 begins", "c0 connects to m0",
				"c1 begins", "c1*", "c1 begins", "c1*", "c0*", "c1*", "c1 begins", "c1*"})},

		// m0 is lost, and m1 restarts while m2 is being brought up to it: that starts over.
		"r39-survivor-restarts": {
			Config{Replicas: 3, Janitors: 1, NodeCrashes: 1, Restarts: 1,
				Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
			[]string{"c0 begins", "c0>publish", "c0|m1 CAS|1", "c0 m1 CAS", "m0 crashes", "time passes", "directory*",
				"c0 learns", "c1 learns", "c2 learns",
				"c0 renews", "c1 renews", "c2 renews", "directory*", "c2 claims", "c2|m2 READ|1", "m1 restarts",
				"m1 adopts", "directory*", "all*", "c1 begins", "c1*"}},

		// m1 joins, and its process ends when some of its words are there. Tempting: a joiner is no copy, so its next
		// process may begin anew.
		"r40-joiner-restarts": {
			Config{Replicas: 2, Missing: 1, Janitors: 1, Restarts: 1, Scripts: [][]Step{{k(Put, 2)}, {k(Get, 0)}},
				Setup: []Step{k(Put, 0), k(Put, 20)}},
			[]string{"directory*", "c0 learns", "c1 learns", "c2 learns", "c0 renews", "c1 renews", "c2 renews",
				"directory*",
				"c0 learns", "c1 learns", "c2 learns", "c0 renews", "c1 renews", "c2 renews", "c2 claims",
				"c2|m1 CAS|1", "c2 m1 CAS", "m1 restarts", "m1 adopts", "directory*",
				"all*", "c0 begins", "c0*", "c1 begins", "c1*"}},

		// m0 is declared lost while its process is away, and comes back with what it held. The chain has gone on
		// without it.
		"r41-lost-meanwhile": {
			Config{Replicas: 2, Restarts: 1, Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}},
				Setup: one, Warm: true},
			cat([]string{"c0 begins", "c0>publish", "m0 restarts", "time passes", "directory*", "c0 learns",
				"c1 learns", "c0 renews", "c1 renews",
				"directory*", "c0 learns", "c1 learns", "c1 begins", "c1*"}, back,
				[]string{"all*", "c0 begins", "c0*", "c1 begins", "c1*"})},

		// Both processes of a chain end, in turn or together.
		"r43-both-restart": {
			Config{Replicas: 2, Restarts: 2, Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}},
				Setup: one, Warm: true},
			cat([]string{"c0 begins", "c0>publish", "m0 restarts", "m1 restarts", "c0 m1 CAS", "m1 adopts", "c1 begins",
				"c1*"}, back,
				[]string{"c1*", "c0*", "c0 begins", "c0*", "c1 begins", "c1*"})},
		"r43-both-are-silent": {
			Config{Replicas: 2, Restarts: 2, Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}},
				Setup: one, Warm: true},
			cat([]string{"c0 begins", "c0>publish", "m0 restarts", "m1 restarts", "time passes", "directory*",
				"m1 adopts"}, back,
				[]string{"all*", "c0 begins", "c0*", "c1 begins", "c1*"})},

		// Tempting: a memory node that has been away for so long is lost, whatever it holds.
		"r44-the-only-copy": {Config{Restarts: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: one, Warm: true},
			cat([]string{"m0 restarts", "time passes", "directory*", "c0 learns", "c1 begins", "c1*"}, back,
				[]string{"c1*", "c0 begins", "c0*"})},

		// c1 has the map with the keys of the process that has ended.
		"restart-with-other-keys": {
			Config{Replicas: 2, Restarts: 1, NewKeys: true, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Put, 0)}},
				Setup: one, Warm: true},
			cat([]string{"c0 begins", "c0|m0 CAS|1", "m0 restarts", "c0 m0 CAS"}, back,
				[]string{"c0 learns", "c0*", "c1 begins", "c1 connects", "c1 m1", "c1 m1", "c1 begins", "c1 connects",
					"c1 m0", "c1 learns", "c1*"})},
		// The next process of m0 has the keys of the last one, which c1 goes by, for other memory: what was the index's
		// names records now.
		"restart-with-keys-of-others": {
			Config{Restarts: 1, NewKeys: true, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Put, 0), k(Get, 0)}},
				Setup: one, Warm: true},
			cat([]string{"m0 restarts"}, back, []string{"c1 begins", "c1 connects", "c1 m0", "c1 learns", "c1*",
				"c1 begins", "c1*", "c0 begins", "c0*", "c1 begins", "c1*"})},
	} {
		scenarios[name] = s
	}
}

// restartMutants are mistakes about memory that outlives its process, those of memory nodes in how the simulator plays
// them.
var restartMutants = []mutant{
	{"restart-retries", "restart: what a lost connection takes with it may have happened", []edit{{op,
		"	case o.deciding && o.Machine == nil: // a Machine begins anew, and " +
			"knows\n		o.after = stepResolve\n	case o.won:\n		// Decided",
		"case o.deciding:\no.deciding, o.written = false, 0\no.retire()\no.after = 0\ncase o.won:\n// Decided"}}},
	{"restart-forgets-barred", "restart: a process bars all sessions but those that the directory names",
		[]edit{{played,
			"			n.barred[id] = !slices.Contains(admitted.Live, id)\n", "_ = id\n"}}},
	{"restart-serves-unregistered", "restart: nobody connects before the directory has named those who live",
		[]edit{{played,
			"!n.down && !n.unknown && n.inc == inc", "!n.down && n.inc == inc"}}},
	{"restart-open-door", "restart: nothing that was posted to the last process lands when the next one is registered",
		[]edit{{played,
			"	w.fenceAll(n, 0)\n	n.down, n.unknown", "n.down, n.unknown"}}},
	{"restart-clears-locks", "restart: locks are of sessions, not of connections",
		[]edit{{played, "	n.barred = map[uint32]bool{}\n	if w.cfg.NewKeys {",
			"n.barred = map[uint32]bool{}\nfor _, r := range n.regions {\n" +
				"for off := uint64(layout.RegionPageSize); off " +
				"< w.indexBytes; off += layout.GroupSize {\n" +
				"clear(r.bytes[off+layout.GroupLockOff:][:8])\n}\n}\nif w.cfg.NewKeys {"}}},
	{"restart-is-new-joiner", "restart: a joiner keeps what it has",
		[]edit{{played, "	n.barred = map[uint32]bool{}\n	if w.cfg.NewKeys {",
			"n.barred = map[uint32]bool{}\nfor _, r := range n.regions {\nif pg := w.st.PG(r.pg); pg.GetJoining() && " +
				"pg.Members[len(pg.Members)-1].NodeId == n.id {\n" +
				"clear(r.bytes[layout.RegionPageSize:])\n}\n}\nif w.cfg.NewKeys {"}}},
	{"down-comes-back", "restart: an incarnation that was declared lost stays lost", []edit{{nodes,
		"	if old.Incarnation == c.Incarnation && old.State == dirpb.NodeState_NODE_DOWN {", "if false {"}}},
	{"overtaken-boot", "restart: a registration that was overtaken confirms no fence", []edit{{nodes,
		"	if old.Incarnation == c.Incarnation && c.Boot < old.Boot {", "if false {"}}},
	{"last-copy-by-time", "restart: time alone gives up no last copy that is kept", []edit{{"server/lead/part.go",
		"	if n.Keeps {\n", "if false {\n"}}},
	{"keys-of-others", "restart: keys of the last process lead nowhere, whatever the adapter has given them to",
		[]edit{{"rdma/sim/mr.go",
			"		r.base = f.mu.again << 40\n", ""}}},
	{"keys-of-the-last-process", "restart: the next process's keys take the place of the last one's",
		[]edit{{"server/fsm/pgs.go",
			"	m.Keys, m.Boot = c.Keys, boot\n", "if len(m.Keys) == 0 {\nm.Keys = c.Keys\n}\nm.Boot = boot\n"}}},
}

const (
	played = "internal/simtest/node_test.go"
	nodes  = "server/fsm/nodes.go"
)

// TestRestarts: the searches meet processes that take over memory, others that come too late for it, and verbs that
// land between two processes.
func TestRestarts(t *testing.T) {
	for _, sync := range []bool{false, true} {
		kept, tooLate, between := 0, 0, 0
		for seed := range uint64(200) {
			w, err := NewWorld(inMode(wide["restart-r2"], sync), false)
			if err != nil {
				t.Fatal(err)
			}
			w.runRandom(seed)
			kept, tooLate, between = kept+w.kept, tooLate+w.tooLate, between+w.between
			w.Close()
		}
		if kept < 50 || tooLate < 10 || between < 10 {
			t.Errorf("in 200 schedules, synchronous %t: %d processes take over, %d come too late, %d verbs land in "+
				"between", sync, kept, tooLate, between)
		}
		t.Logf("synchronous %t: %d, %d, %d", sync, kept, tooLate, between)
	}
}
