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

// tested is a mistake that the searches do not see: a test of the package has to.
type tested struct {
	name, pkg, test string
	edits           []edit
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
	{"out-of-limbo", "H1", []edit{{"internal/session/env.go", "m.limbo.Add(place(w), t.lane.core.unlinks())", "if !t.lane.core.Owns(pg, w.Unit()) {\nt.lane.core.HeapOf(pg).Free(place(w))\nreturn\n}\nm.limbo.Add(place(w), t.lane.core.unlinks())"}}},
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

var byTest = []tested{
	{"lease-not-checked-after-completion", "internal/session", "TestLeaseEndsUnderWay", []edit{{"internal/session/lane.go", "if t.pg != nil && !l.valid() {", "if false {"}}},
	{"lease-not-checked-after-post", "internal/session", "TestLeaseEndsWithinPost", []edit{{"internal/session/quick.go", "valid := !ch.lease || l.valid()", "valid := true"}}},
	{"late-reply-shortens-lease", "internal/session", "TestLateReply", []edit{{"internal/session/core.go", "if leaseEnd > c.leaseEnd.Load() {", "if leaseEnd != 0 {"}}},
	{"lease-counts-from-its-answer", "internal/session", "TestAgendaLease", []edit{{"internal/session/agenda.go", "p.GetMinEpoch(), r.Sent+int64(", "p.GetMinEpoch(), now+int64("}}},
	{"hints-of-lost-generation", "internal/session", "TestHintsOfLostGeneration", []edit{{"internal/session/lane.go", "l.cache.clear() // its words mean nothing any more\n", ""}}},
	{"hints-of-a-map-not-seen", "internal/session", "TestHintsOfLostGeneration", []edit{{"internal/session/quick.go", "if v == nil || v != l.view || len", "if v == nil || len"}}},
	{"places-of-lost-generation-with-lane", "internal/session", "TestPlacesOfLostGeneration", []edit{{"internal/session/lane.go", "if m == nil || m.generation != pg.Generation {", "if m == nil {"}}},
	{"places-of-lost-generation-with-session", "internal/session", "TestPlacesOfLostGeneration", []edit{{"internal/session/core.go", "if h == nil || h.generation != generation {", "if h == nil {"}}},
	{"lost-generation-comes-back", "internal/session", "TestPlacesOfLostGeneration", []edit{{"internal/session/core.go", "if h != nil && h.generation > generation {", "if false {"}}},
	{"posted-counts-as-refused", "internal/session", "TestPostedInPart", []edit{{"internal/session/lane.go", "l.refused(c, c.wrs[n:])", "l.refused(c, c.wrs)"}}},
	{"quick-in-frozen", "internal/session", "TestQuickNotInEveryView", []edit{{"internal/session/quick.go", "!s.PG.Active || s.PG.Joining ||", "s.PG.Joining ||"}}},
	{"quick-in-joining", "internal/session", "TestQuickNotInEveryView", []edit{{"internal/session/quick.go", "!s.PG.Active || s.PG.Joining ||", "!s.PG.Active ||"}}},
	{"quick-by-an-old-word", "internal/session", "TestQuickDeclines", []edit{{"internal/session/quick.go", "e == nil || epoch-e.seen >= layout.WordLifeEpochs ||", "e == nil ||"}}},
	{"quick-not-executed", "internal/session", "TestQuickNotExecuted", []edit{{"internal/session/quick.go", "} else if whole && (valid", "} else if (valid"}}},
	{"quick-out-of-limbo", "internal/session", "TestQuickLimbo", []edit{{"internal/session/quick.go", "t.Unlinked(&q.pg.PG, q.word)", "t.Unuse(&q.pg.PG, q.word)"}}},
	{"reads-not-fenced", "internal/session", "TestFencedReads", []edit{{"internal/session/lane.go", "if !c.caps.AtomicThenRead {", "if false {"}}},
	{"keys-of-an-earlier-map", "internal/session", "TestNewKeys", []edit{{"internal/session/lane.go", "if e.pg != pg || e.replica != r {", "if e.pg == nil {"}}},
	{"lane-acknowledges-maps-to-come", "internal/session", "TestAcks", []edit{{"internal/session/lane.go", "acked, quiesced := v.Version, v.Version", "acked, quiesced := v.Version+1, v.Version+1"}}},
	{"maps-to-come-acknowledged", "server/lead", "TestAcksOfTheFuture", []edit{{"server/lead/lead.go", "max(x.acked, min(r.Acked, s.MapVersion()))", "max(x.acked, r.Acked)"}}},
	{"maps-to-come-quiesced", "server/lead", "TestAcksOfTheFuture", []edit{{"server/lead/lead.go", "max(x.quiesced, acked, min(r.Quiesced, s.MapVersion()))", "max(x.quiesced, acked, r.Quiesced)"}}},
	{"unlock-not-repeated", "internal/session", "TestUnlockAfterReconnection", []edit{{"internal/session/lane.go", "l.addNoWait(c, pg, uint8(r), again[i])\n", ""}}},
	{"unlock-proven-unposted", "internal/session", "TestUnlockNeverPosted", []edit{{"internal/session/lane.go", "o.seq = math.MaxUint64 // no WC", "o.seq = 0 // no WC"}, {"internal/session/lane.go", "\t\"math\"\n", ""}}},
	{"mail-wakes-nobody", "internal/session", "TestMailWakes", []edit{{"internal/session/lane.go", "if len(fns) > 0 {\n\t\tl.events++\n\t}\n", ""}}},
	{"keys-of-an-earlier-region-published", "memnode", "TestRegionWantedAnew", []edit{{"memnode/region.go", "return a.GetSince() == b.GetSince() && a.Get", "return a.Get"}}},
	{"region-freed-with-somebody-inside", "memnode", "TestRegionInUse", []edit{{"memnode/region.go", "err != nil && !errors.Is(err, rdma.ErrClosed) {", "false {"}}},
	{"keys-of-an-earlier-region-taken", "server/fsm", "TestRegionOfAnEarlierPlan", []edit{{"server/fsm/pgs.go", "m.Incarnation != c.Incarnation || c.Since != 0 && m.Since != c.Since {", "m.Incarnation != c.Incarnation {"}}},
	{"near-keeps-what-a-write-overtook", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "if f.writes == s.writes && s.writing == 0 {", "if s.writing == 0 {"}}},
	{"near-keeps-what-a-write-overtakes", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "if f.writes == s.writes && s.writing == 0 {", "if f.writes == s.writes {"}}},
	{"near-keeps-many-that-a-write-overtook", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "if s.writes == writes[j] && s.writing == 0 {", "if s.writing == 0 {"}}},
	{"near-keeps-what-ends-last", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "alone := s.writing == 1 && s.writes == writes", "alone := s.writing == 1"}}},
	{"near-keeps-what-begins-last", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "alone := s.writing == 1 && s.writes == writes", "alone := s.writes == writes"}}},
	{"near-shares-a-read-from-before-a-write", "client/near", "TestSharingAfterWrite", []edit{{"client/near/near.go", "if f.writes == s.writes && s.writing == 0 && c.o.Now()", "if c.o.Now()"}}},
}

// TestPatches builds the searches with one mistake at a time, and the tests that are named for
// the others; they must notice every one.
func TestPatches(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	slots := make(chan struct{}, 2)
	try := func(name, what, pkg, by string, edits []edit, args ...string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			slots <- struct{}{}
			defer func() { <-slots }()
			test := build(t, root, pkg, edits)
			test.Args = append(append(test.Args, "-test.run", "^"+by+"$"), args...)
			began := time.Now()
			out, err := test.CombinedOutput()
			if err == nil || !strings.Contains(string(out), by) {
				t.Fatalf("%s: not noticed in %v: %.300s", what, time.Since(began), out)
			}
			t.Logf("%s: noticed after %v: %.300s", what, time.Since(began).Round(time.Millisecond), lines(out))
		})
	}
	for _, p := range patches {
		try(p.name, "rule "+p.rule, "internal/simtest", "TestHunt", p.edits, "-hunt", flagPatience.String())
	}
	for _, p := range byTest {
		try(p.name, p.pkg+" "+p.test, p.pkg, p.test, p.edits, "-test.timeout", "2m")
	}
}

// build makes the command that runs a package's tests with a mistake in the tree.
func build(t *testing.T, root, pkg string, edits []edit) *exec.Cmd {
	dir := t.TempDir()
	overlay := map[string]map[string]string{"Replace": {}}
	for i, e := range edits {
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
	file, bin := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "patched.test")
	if err := os.WriteFile(file, b, 0o644); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("go", "test", "-c", "-overlay", file, "-o", bin, "./"+pkg)
	c.Dir = root
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("does not build: %v\n%s", err, out)
	}
	c = exec.Command(bin)
	c.Dir = filepath.Join(root, pkg)
	return c
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
