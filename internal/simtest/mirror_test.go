package simtest

import (
	"maps"
	"testing"
)

// mirrorWide are random scopes in which clients look for keys where images of groups have them, while writers, splits,
// moves, joins and recalls make the images old.
var mirrorWide = map[string]Config{
	"mirror": {Mirror: 1 << 16, Units: 6, Epochs: 6, Crashes: 1, Failures: 1, Deadlines: 1, WritePieces: 2,
		ReadPieces: 2, Scripts: [][]Step{{k(Put, 0), k(Del, 0), k(Put, 2), k(Put, 1), k(Get, 3)},
			{k(Get, 0), k(Get, 1), k(Get, 2), k(Has, 0)}, {k(Put, 1), k(Has, 2), k(Incr, 0), k(Get, 1)}},
		Setup: []Step{k(Put, 0), k(Put, 3)}, Warm: true},
	"mirror-reuse": {Mirror: 1 << 16, Units: 3, Epochs: 12, WritePieces: 2, ReadPieces: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 1), k(Put, 1)}, {k(Get, 0), k(Get, 1)}, {k(Get, 1), k(Has, 0)}},
		Setup: one, Warm: true},
	"mirror-stash": {Mirror: 1 << 16, Fill: 30, OVF: true, Epochs: 4, Scripts: [][]Step{
		{k(Put, 0), k(Del, 0), k(Put, 1)}, {k(Get, 0), k(Get, 1), k(Get, 0)}}, Setup: one, Warm: true},
	"mirror-r2": {Mirror: 1 << 16, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, NodePauses: 1, Crashes: 1,
		Epochs: 6, Units: 6, Scripts: [][]Step{{k(Put, 0), k(Del, 0), k(Put, 1), k(Put, 0)},
			{k(Get, 0), k(Get, 1), k(Has, 0), k(Get, 2)}}, Setup: one, Warm: true},
	"mirror-move": {Mirror: 1 << 16, Replicas: 2, PGs: 2, Janitors: 1, Children: 2, Epochs: 6,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Put, 10), k(Del, 10), k(Put, 11)}, {k(Get, 10), k(Put, 11), k(Incr, 12), k(Put, 0)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"mirror-scan": {Mirror: 1 << 16, Replicas: 2, Nodes: 3, PGs: 2, Janitors: 1, NodeCrashes: 1, Children: 2, Epochs: 6,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Scripts: [][]Step{
			{k(Scan, 0), k(Get, 10), k(Put, 11), k(Scan, 0), k(Put, 0)}, {k(Put, 10), k(Del, 11), k(Put, 0)}},
		Setup: []Step{k(Put, 10), k(Put, 11), k(Put, 0)}},
	"mirror-recall": {Mirror: 1 << 16, TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 4, Epochs: 4,
		Scripts: [][]Step{{k(Put, 0), k(Put, 1)}, {k(Get, 0), k(Get, 1), k(Get, 2)}}, Setup: []Step{k(Put, 0),
			k(Put, 2)}, Warm: true},
}

// mirrorScopes are searched exhaustively.
var mirrorScopes = map[string]Config{
	"mirror-update": {Mirror: 1 << 16, Scripts: [][]Step{{k(Put, 0), k(Del, 0)}, {k(Get, 0), k(Get, 1)}}, Setup: one,
		Warm: true},
	"mirror-insert": {Mirror: 1 << 16, Scripts: [][]Step{{k(Put, 1), k(Put, 2)}, {k(Get, 2), k(Get, 1)}}, Setup: one,
		Warm: true},
	"mirror-put": {Mirror: 1 << 16, Scripts: [][]Step{{k(Del, 0), k(Put, 1)}, {k(Put, 0)}}, Setup: one, Warm: true},
	"mirror-same-fp": {Mirror: 1 << 16, Scripts: [][]Step{{k(Put, 1), k(Get, 0)}, {k(Del, 0), k(Get, 1)}}, Setup: one,
		Warm: true},
	"mirror-r2-update": {Mirror: 1 << 16, Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Get, 0)}},
		Setup: one, Warm: true},
}

func init() {
	maps.Copy(wide, mirrorWide)
	for name := range mirrorWide {
		heavy[name] = 4
	}
	maps.Copy(scopes, mirrorScopes)
}

// TestMirror: among what the searches see are images that lead to keys and such as do not any more.
func TestMirror(t *testing.T) {
	for _, sync := range []bool{false, true} {
		var hits, stale uint64
		for _, name := range sorted(mirrorWide) {
			for seed := range uint64(20) {
				w, err := NewWorld(inMode(mirrorWide[name], sync), false)
				if err != nil {
					t.Fatal(err)
				}
				w.runRandom(seed)
				err = w.Finish()
				for _, c := range w.cls {
					for _, l := range c.lanes {
						hits += l.Stats.MirrorHits
						stale += l.Stats.MirrorStale
					}
				}
				w.Close()
				if err != nil {
					t.Fatalf("%s\n%v", replayHint(name, sync, seed), err)
				}
			}
		}
		if t.Logf("synchronous %t: %d hits, %d stale", sync, hits, stale); hits < 100 || stale < 20 {
			t.Errorf("synchronous %t: %d hits, %d stale", sync, hits, stale)
		}
	}
}

// mirrorMutants are mistakes about images of groups.
var mirrorMutants = []mutant{
	{"mirror-answers-absent", "mirror: that no image has a key proves nothing", []edit{
		{op, "	if h, ok := o.env.Guess(o); ok {\n		return o.getCached(h)\n	}\n	return o.readGroup()\n",
			"h, ok := o.env.Guess(o)\nif h.Slot == 255 {\nreturn o.absent()\n}\nif ok {\nreturn o.getCached(h)\n}\n" +
				"return o.readGroup()\n"},
		{env, "	t.guessed = ok && h.Leads(&o.Route)\n",
			"t.guessed = ok && h.Leads(&o.Route)\nif home, _ := layout.GroupOff(o.Hash, o.Route.Segments); !ok && " +
				"len((*l.mirror.shards.Load())[o.Route.Shard]) > 0 && (*l.mirror.shards.Load())[o.Route.Shard]" +
				"[home/layout.GroupSize].Load() != nil {\nh.Slot = 255\n}\n"}}},
	{"mirror-expects", "mirror: no CAS expects a word of an image", []edit{{op,
		"		if h, ok := o.env.Guess(o); ok {\n			return o.getCached(h)\n",
		"if h, ok := o.env.Guess(o); ok {\no.take(h)\nreturn o.update()\n"}}},
	{"mirror-key-unchecked", "mirror: the record has the whole key", []edit{{"index/get.go",
		"		if way.names(o.word(0), o.rec, o.Key, &r) {\n",
		"if way.names(o.word(0), o.rec, o.Key, &r) || w == o.x && w.Readable() && r.Parse(o.rec) == nil {\n"}}},
}
