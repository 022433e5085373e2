package simtest

import (
	"cmp"
	"slices"
)

// Schedules for tempting rules about memory that goes home.
func init() {
	// home is a heap of four units that goes round, granted unit by unit. Each reclaim epoch is long
	// enough for what came back to be granted again.
	home := func(c Config) Config {
		c.HeapUnits, c.Leap = cmp.Or(c.HeapUnits, 4), cmp.Or(c.Leap, 1100)
		c.Units, c.Stingy, c.Epochs, c.Losses = uint32(c.HeapUnits), true, 20, 2
		return c
	}
	// inPlace is that with a janitor, the last client, and a recall of all that nobody links.
	inPlace := func(c Config) Config {
		c.InPlace, c.Janitors, c.Acts = true, 1, []Act{{Recall, 1, 0}}
		return home(c)
	}
	// round is one of the reclaim epoch: E advances, and those named learn of it and report.
	round := func(who ...string) []string {
		out := []string{"E advances", "directory*"}
		for range 2 {
			for _, c := range who {
				out = append(out, c+" renews")
			}
		}
		return out
	}
	// recall is one of extent 0, by the janitor, from its begin to its end and until what it
	// freed may be granted.
	recall := func(janitor string, others ...string) []string {
		who := append(others[:len(others):len(others)], janitor)
		out := []string{"begin recall", "directory*"}
		for _, c := range who {
			out = append(out, c+" learns", c+" renews")
		}
		out = append(out, janitor+" claims", janitor+"*")
		out = cat(out, round(who...), []string{"directory*", "freed"})
		for _, c := range who {
			out = append(out, c+" learns", c+" renews")
		}
		return cat(out, round(who...), round(who...))
	}
	// deleted is how c1 deletes the key, and its place is past limbo.
	deleted := func(who ...string) []string {
		return cat([]string{"c1 begins", "c1*"}, round(who...), round(who...))
	}
	unfreed := func(steps []string) []string {
		return slices.DeleteFunc(slices.Clone(steps), func(s string) bool { return s == "freed" })
	}
	pair := [][]Step{{k(Put, 0)}, {k(Del, 0)}}
	for name, s := range map[string]scenario{
		// c1 hands back the place of the key that it has deleted, and the renewal is slow. It
		// acknowledges a recall meanwhile, which frees the place; c0 is granted it again and
		// links it there. The renewal must not send it home a second time.
		"h2-handed-back-behind-a-recall": {inPlace(Config{Scripts: pair, Setup: one, Warm: true}),
			cat(deleted("c0", "c1", "c2"), []string{"c1 hands back", "c1 gives up"}, recall("c2", "c0", "c1"),
				[]string{"c0 begins", "c0*", "c1 late", "E advances", "c0 renews", "c0 renews"})},
		// c1 gives up the renewal with which it hands the place back. It arrives all the same: if c1
		// had put the place back, c0 and c1 would both have it.
		"h2-handed-back-and-given-up": {home(Config{Scripts: pair, Setup: one, Warm: true}),
			cat(deleted("c0", "c1"), []string{"c1 hands back", "c1 gives up", "c1 late", "E advances", "c0 renews",
				"c0 renews"})},
		// The same as the first, and the renewal arrives with the next leader, which knows no number of c1.
		"h2-handed-back-to-the-next-leader": {inPlace(Config{Leaders: 1, Scripts: pair, Setup: one, Warm: true}),
			cat(deleted("c0", "c1", "c2"), []string{"c1 hands back", "c1 gives up"}, recall("c2", "c0", "c1"),
				[]string{"c0 begins", "c0*", "another directory", "c1 late", "E advances", "c0 renews", "c0 renews"})},
		// The home has closed. c1's hand-back is served when the recall has begun: if that made
		// a command, and the command were slow, it would free what c2 has linked in memory
		// that it left with its session.
		"h2-taken-while-it-is-recalled": {
			inPlace(Config{Scripts: [][]Step{{k(Close, 0)}, {k(Del, 0)}, {k(Put, 0), k(Close, 0)}}, Setup: one,
				Warm: true}),
			cat([]string{"c0 begins"}, deleted("c1", "c2", "c3"),
				[]string{"c1 hands back", "begin recall", "c1 renewal served", "c1 renewal answered",
					"directory proposes"}, recall("c3", "c1", "c2"),
				[]string{"c2 begins", "c2*", "c2 begins", "directory has back"})},
		// The reply with which the place goes home to c0 is slow. c0 has given it up, and
		// acknowledged a recall; the place is its own again, and linked.
		"h3-delivered-behind-a-recall": {inPlace(Config{Scripts: pair, Setup: one, Warm: true}),
			cat(deleted("c0", "c1", "c2"), []string{"c1 hands back", "c1 renewal served", "c1 renewal answered",
				"E advances", "c0 sends renewal",
				"c0 renewal served", "c0 gives up"}, recall("c2", "c0", "c1"),
				[]string{"c0 begins", "c0*", "c0 late * answered"})},
		// c1 closes, and its limbo waits for c0 until a reclaim epoch has passed. By then a recall has
		// taken the place from c0: it has a home no more, and c0 no longer has it in use.
		"h3-queued-behind-a-recall": {
			inPlace(Config{Scripts: [][]Step{{k(Put, 0)}, {k(Del, 0), k(Close, 0)}}, Setup: one, Warm: true}),
			cat([]string{"c1 begins", "c1*", "c1 begins"}, recall("c2", "c0"), []string{"c0 begins", "c0*"})},
		// c0 learns that all is recalled, and then gets the place home that it has just forgotten: if
		// its books were asked, they would call it damaged.
		"h4-delivered-while-recalled": {inPlace(Config{Scripts: pair, Setup: one, Warm: true}),
			cat(deleted("c0", "c1", "c2"), []string{"c1 hands back", "c1 renewal served", "c1 renewal answered",
				"E advances", "c0 sends renewal",
				"c0 renewal served", "begin recall", "c0 learns", "c0 renewal answered"})},
		// c0's next record in the place that came home may not have the word that it had before.
		"h4-comes-home-with-its-ver": {home(Config{HeapUnits: 1, Leap: 1, Scripts: pair, Setup: one, Warm: true}),
			cat(deleted("c0", "c1"), []string{"c1 hands back", "c1 renewal served", "c1 renewal answered", "E advances",
				"c0 renews", "c0 renews", "c0 begins", "c0*", "c0 is done"})},
		// The command that makes the place free, which has no home, is slower than a recall. c2
		// is granted the place, links it and closes: it has no home again.
		"h5-command-behind-a-recall": {
			inPlace(Config{Scripts: [][]Step{{k(Close, 0)}, {k(Del, 0)}, {k(Put, 0), k(Close, 0)}}, Setup: one,
				Warm: true}),
			cat([]string{"c0 begins"}, deleted("c1", "c2", "c3"),
				[]string{"c1 hands back", "c1 renewal served", "c1 renewal answered",
					"directory proposes"}, recall("c3", "c1", "c2"),
				[]string{"c2 begins", "c2*", "c2 begins", "directory has back"})},
		// The home lives. c1 would be granted the place as its own; c0, which deletes what c1
		// links there, believes that it is still its own.
		"h5-free-while-its-home-lives": {
			home(Config{HeapUnits: 1, Scripts: [][]Step{{k(Del, 1)}, {k(Del, 0), k(Put, 1)}}, Setup: one, Warm: true}),
			cat(deleted("c0", "c1"), []string{"c1 hands back", "c1 renewal served", "c1 renewal answered",
				"directory proposes", "directory has back"},
				round("c0", "c1"), round("c0", "c1"), []string{"c1 begins", "c1*", "c0 begins", "c0*"})},
		// c1 knows the key's word, and asks whether it is as it was, after its deletion. The read is
		// under way while the place comes back; if E alone counted, c2 would link it, with the
		// same word, and c1 find nothing changed.
		"h5-granted-under-an-operation": {
			home(Config{HeapUnits: 1, Leap: 600, Scripts: [][]Step{{k(Close, 0)}, {k(GetIf, 0)},
				{k(Del, 0), k(Put, 0)}}, Setup: one, Warm: true}),
			cat([]string{"c0 begins", "c2 begins", "c2*", "c2 renews"}, round("c2", "c1"),
				[]string{"c1 begins", "c2 hands back", "c2 renewal served", "c2 renewal answered",
					"directory proposes", "directory has back"}, round("c2"), round("c2"), round("c2"),
				[]string{"c2 begins", "c2*", "c1*"})},
		// The same, and it is the memory that is lost meanwhile, with nothing in it: what the
		// command names is of another generation.
		"h5-command-into-another-generation": {
			home(Config{LastCopy: true, NodeCrashes: 1,
				Scripts: [][]Step{{k(Close, 0)}, {k(Del, 0)}, {k(Put, 0), k(Close, 0)}}, Setup: one, Warm: true}),
			cat([]string{"c0 begins"}, deleted("c1", "c2"),
				[]string{"c1 hands back", "c1 renewal served", "c1 renewal answered", "directory proposes",
					"m0 crashes", "time passes", "directory*", "c1 learns", "c2 learns"}, round("c1", "c2"),
				[]string{"m0 comes back", "time passes", "directory*",
					"c1 learns", "c2 learns"}, round("c1", "c2"), []string{"directory*", "c1 learns", "c2 learns",
					"c2 begins", "c2*", "c2 begins", "directory has back"})},
		// c0 returns a run of its own, for c1 lacks memory. The renewal arrives twice: between, c0 is
		// granted the run again, and links it.
		"h6-returned-twice": {
			home(Config{HeapUnits: 2, Scripts: [][]Step{{k(Put, 0), k(Put, 2)}, {k(Put, 1)}}, Setup: one, Warm: true}),
			cat([]string{"c0 begins", "c0*"}, round("c0", "c1"), round("c0", "c1"),
				[]string{"c1 begins", "c1 asks memory", "E advances", "c0 renews", "E advances", "c0 hands back",
					"c0 gives up",
					"c0 late * served", "directory proposes", "directory has back"}, round("c0", "c1"),
				round("c0", "c1"),
				[]string{"c0 begins", "c0*", "c0 late * served", "directory proposes", "directory has back"})},
		// c0's grant is on its way while all is recalled, and free. If c0 acknowledged that before the
		// grant has come, it would use what is free, and c1's by then.
		"h7-granted-behind-a-recall": {inPlace(Config{Scripts: [][]Step{{k(Put, 0)}, {k(Put, 1)}}}),
			cat([]string{"c0 begins", "c0 asks memory"}, unfreed(recall("c2", "c0", "c1")),
				[]string{"c1 begins", "c1*", "c0 is granted", "c0*"})},
	} {
		scenarios[name] = s
	}
}
