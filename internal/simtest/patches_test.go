//go:build kvdmutants

package simtest

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var flagPatience = flag.Duration("patience", time.Minute, "how long TestPatches searches for each mistake")

// patch is a deliberate mistake: text of the tree that is replaced while the simulator is
// built, with the rule of docs/protocol.md that it breaks. The tree itself has none.
type patch struct {
	name, rule string
	edits      []edit
}

type edit struct{ file, old, new string }

var patches = []patch{
	{"older-renewal-heeded", "H2", []edit{{"server/lead/lead.go", "if r.Number <= x.number {", "if r.Number == 0 {"}}},
	{"only-hand-backs-count", "H2", []edit{{"server/lead/lead.go", "x.number = r.Number\n", "if len(r.HandBacks)+len(r.Returns) > 0 {\nx.number = r.Number\n}\n"}}},
	{"any-term", "H2", []edit{{"server/lead/lead.go", "if r.Term == l.opts.Term {", "if r.Term <= l.opts.Term {"}}},
	{"recalled-extent-taken", "H2", []edit{{"server/lead/memory.go", "if !s.Settled(p.pg, p.generation, p.unit, p.units, p.mark) {\n\t\treturn\n\t}\n\tm := l.memory(s, p.pg)", "m := l.memory(s, p.pg)"}}},
	// A recalled extent has no homes, which a delivery looks at, too: a guard that repeats the
	// other.
	{"queue-survives-recall", "H3", []edit{{"server/lead/memory.go", "home != id || !s.Settled(p.pg, p.generation, p.unit, p.units, p.mark) {", "home > 1<<31 {"}}},
	{"closed-out-of-limbo", "H8", []edit{{"server/lead/lead.go", "l.handBack(s, now, id, x, back, l.epoch+1)", "l.handBack(s, now, id, x, back, 0)"}}},
	{"older-reply-applied", "H3", []edit{{"internal/session/agenda.go", "if !latest || p.GetTerm() < a.mu.term {", "if p.GetTerm() < a.mu.term {"}}},
	{"reply-applied-twice", "H3", []edit{{"internal/session/agenda.go", "for _, f := range p.GetDeliveries() {", "for _, f := range append(p.GetDeliveries(), p.GetDeliveries()...) {"}}},
	{"pop-keeps-the-entry", "H3", []edit{{"server/lead/memory.go", "if x.queue = x.queue[n:]; len(left) > 0", "if x.queue = slices.Clone(x.queue); len(left) > 0"}}},
	{"out-of-limbo", "H1", []edit{{"internal/session/env.go", "m.limbo.Add(place(w), t.lane.core.sendSeq.Load())", "if !t.lane.core.Owns(pg, w.Unit()) {\nt.lane.core.HeapOf(pg).Free(place(w))\nreturn\n}\nm.limbo.Add(place(w), t.lane.core.sendSeq.Load())"}}},
	{"put-back-when-lost", "H2", []edit{{"internal/session/agenda.go", "a.mu.told = acks{} // said again with the next one\n", "a.mu.told = acks{}\nfor _, f := range q.Renew.GetHandBacks() {\nunit := f.Unit\nfor _, x := range f.Places {\na.core.heapOf(f.PgId, f.Generation).Unuse(heap.Place{Unit: unit, Units: x >> 10, Ver: uint16(x & (1<<10 - 1))})\nunit += x >> 10\n}\n}\n"}}},
	{"ver-not-carried", "H4", []edit{{"internal/session/agenda.go", "Units: x >> 10, Ver: uint16(x & (1<<10 - 1))}", "Units: x >> 10}"}}},
	{"received-though-recalled", "H4", []edit{{"internal/session/core.go", "v.pg(pg).Generation != generation || v.pg(pg).IsRecalled(p.Unit) {", "v.pg(pg).Generation != generation {"}}},
	{"waits-for-operations-only", "H5", []edit{{"server/fsm/heap.go", "c.MinEpoch > r.Returned-1+ReuseEpochs {", "c.MinEpoch > r.Returned-1 {"}}},
	{"waits-for-hints-only", "H5", []edit{{"internal/simtest/client.go", "_, least := w.ld.Epochs()\n\t\t\tres", "least, _ := w.ld.Epochs()\n\t\t\tres"}}},
	{"waits-for-nobody", "H5", []edit{{"server/fsm/heap.go", "run = &fsmpb.Run{Unit: r.unit, Units: r.units, Returned: epoch + 1}", "run = &fsmpb.Run{Unit: r.unit, Units: r.units}"}}},
	{"no-home-while-it-lives", "H5", []edit{{"server/lead/memory.go", "case home == 0 && !any:", "case home >= 0 && (any || !any):"},
		{"server/fsm/heap.go", "return !anyHome(h, r.unit, r.units)", "return true"}}},
	{"returned-and-not-forgotten", "H6", []edit{{"internal/heap/space.go", "s.disown(x.num, x.off, lo, hi)\n", ""}}},
	{"returned-by-an-older-renewal", "H6", []edit{{"server/lead/lead.go", "if r.Number <= x.number {\n", "if r.Number <= x.number {\nl.giveUp(s, now, r.Session, r.Returns)\n"}}},
	{"command-outlives-recall", "H5", []edit{{"server/fsm/heap.go", "if recallOf(h, extent) != nil || recalledSince(h, extent, r.mark) {", "if recallOf(h, extent) != nil {"}}},
	{"recalled-places-kept", "H7", []edit{{"internal/session/lane.go", "dropped := m.limbo.Forget(x) + m.cache.Forget(x) + l.core.heapOf(pg.ID, pg.Generation).Forget(x)", "dropped := 0 * x"}}},
	{"acknowledged-while-a-grant-is-under-way", "H7", []edit{{"internal/session/agenda.go", "acked = min(acked, g.view)", "_ = g"}}},
	{"recalled-in-place-at-A-only", "H7", []edit{{"index/work.go", "o.Work.Synced += uint64(len(late))\n\treturn o.syncWords(late, o.finishWork)\n}\n\nfunc (o *Op) relocateFound", "_ = late\n\treturn o.finishWork()\n}\n\nfunc (o *Op) relocateFound"}}},
	{"recalled-in-place-with-what-is-linked", "H7", []edit{{"server/fsm/heap.go", "if lo, hi = max(lo, from), min(hi, to); lo < hi {", "if lo, hi = max(lo, from), min(hi+1, to); lo < hi {"}}},
	{"generation-not-checked", "H2", []edit{{"server/fsm/heap.go", "return h != nil && s.pgs[pg].Generation == generation && granted", "return h != nil && granted"},
		{"server/fsm/heap.go", "if s.pgs[r.pg].GetGeneration() != r.generation || !granted", "if !granted"}}},
}

// TestPatches builds the searches with one mistake at a time; they must notice every one.
func TestPatches(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	slots := make(chan struct{}, 2)
	for _, p := range patches {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			slots <- struct{}{}
			defer func() { <-slots }()
			dir := t.TempDir()
			overlay := map[string]map[string]string{"Replace": {}}
			for i, e := range p.edits {
				path := filepath.Join(root, e.file)
				if with := overlay["Replace"][path]; with != "" {
					path = with
				}
				b, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if n := strings.Count(string(b), e.old); n != 1 {
					t.Fatalf("%s has %d times, want once:\n%s", e.file, n, e.old)
				}
				with := filepath.Join(dir, string(rune('a'+i))+".go")
				if err := os.WriteFile(with, []byte(strings.Replace(string(b), e.old, e.new, 1)), 0o644); err != nil {
					t.Fatal(err)
				}
				overlay["Replace"][filepath.Join(root, e.file)] = with
			}
			b, err := json.Marshal(overlay)
			if err != nil {
				t.Fatal(err)
			}
			file, bin := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "simtest.test")
			if err := os.WriteFile(file, b, 0o644); err != nil {
				t.Fatal(err)
			}
			build := exec.Command("go", "test", "-c", "-overlay", file, "-o", bin, "./internal/simtest")
			build.Dir = root
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("does not build: %v\n%s", err, out)
			}
			began := time.Now()
			out, err := exec.Command(bin, "-test.run", "^TestHunt$", "-hunt", flagPatience.String()).CombinedOutput()
			if err == nil {
				t.Fatalf("rule %s: not noticed in %v", p.rule, time.Since(began))
			}
			t.Logf("rule %s: noticed after %v: %.300s", p.rule, time.Since(began).Round(time.Millisecond), lines(out))
		})
	}
}

// lines are the first two of a failure that say something.
func lines(out []byte) string {
	var some []string
	for _, l := range strings.Split(string(out), "\n") {
		if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, "---") && len(some) < 2 {
			some = append(some, l)
		}
	}
	return strings.Join(some, ": ")
}
