package simtest

import (
	"strings"
	"testing"
)

// tested is a mistake that the searches do not see: a test of the package has to.
type tested struct {
	name, pkg, test string
	edits           []edit
}

// patches are the mistakes in how memory goes home.
var patches = []mutant{
	{"older-renewal-heeded", "H2", []edit{{"server/lead/lead.go", "if r.Number <= x.number {", "if r.Number == 0 {"}}},
	{"only-hand-backs-count", "H2", []edit{{"server/lead/lead.go", "x.number = r.Number\n", "if len(r.HandBacks)+len(r.Returns) > 0 {\nx.number = r.Number\n}\n"}}},
	{"any-term", "H2", []edit{{"server/lead/lead.go", "if r.Term == l.opts.Term {", "if r.Term <= l.opts.Term {"}}},
	{"recalled-extent-taken", "H2", []edit{{"server/lead/memory.go", "if !s.Settled(p.pg, p.generation, p.unit, p.units, p.mark) {\n\t\treturn\n\t}\n\tm := l.memory(s, p.pg)", "m := l.memory(s, p.pg)"}}},
	// A recalled extent has no homes, which a delivery looks at, too: a guard that repeats the
	// other.
	{"queue-survives-recall", "H3", []edit{{"server/lead/memory.go", "home != id || !s.Settled(p.pg, p.generation, p.unit, p.units, p.mark) {", "home > 1<<31 {"}}},
	{"closed-out-of-limbo", "H8", []edit{{"server/lead/lead.go", "l.handBack(s, now, id, x, back, l.epoch+1)", "l.handBack(s, now, id, x, back, 0)"}}},
	{"older-reply-applied", "H3", []edit{{"internal/session/renew.go", "if !latest || p.GetTerm() < a.mu.term {", "if p.GetTerm() < a.mu.term {"}}},
	{"reply-applied-twice", "H3", []edit{{"internal/session/renew.go", "for _, f := range p.GetDeliveries() {", "for _, f := range append(p.GetDeliveries(), p.GetDeliveries()...) {"}}},
	{"pop-keeps-the-entry", "H3", []edit{{"server/lead/memory.go", "if x.queue = x.queue[n:]; len(left) > 0", "if x.queue = slices.Clone(x.queue); len(left) > 0"}}},
	{"out-of-limbo", "H1", []edit{{"internal/engine/env.go", "m.limbo.Add(place(w), t.lane.core.Unlinks())", "if !t.lane.core.Owns(pg, w.Unit()) {\nt.lane.core.HeapOf(pg).Free(place(w))\nreturn\n}\nm.limbo.Add(place(w), t.lane.core.Unlinks())"}}},
	{"put-back-when-lost", "H2", []edit{{"internal/session/renew.go", "a.mu.told = acks{} // said again with the next one\n", "a.mu.told = acks{}\nfor _, f := range q.Renew.GetHandBacks() {\nunit := f.Unit\nfor _, x := range f.Places {\na.core.HeapOf(&a.core.View().PG(f.PgId).PG).Unuse(heap.Place{Unit: unit, Units: x >> 10, Ver: uint16(x & (1<<10 - 1))})\nunit += x >> 10\n}\n}\n"}}},
	{"ver-not-carried", "H4", []edit{{"internal/session/renew.go", "Units: x >> 10, Ver: uint16(x & (1<<10 - 1))}", "Units: x >> 10}"}}},
	{"received-though-recalled", "H4", []edit{{"internal/engine/core.go", "v.PG(pg).Generation != generation || v.PG(pg).IsRecalled(p.Unit) {", "v.PG(pg).Generation != generation {"}}},
	{"waits-for-operations-only", "H5", []edit{{"server/fsm/heap.go", "c.MinEpoch > r.Returned-1+ReuseEpochs {", "c.MinEpoch > r.Returned-1 {"}}},
	{"waits-for-hints-only", "H5", []edit{{"internal/simtest/session_test.go", "_, least := w.ld.Epochs()\n\t\tres", "least, _ := w.ld.Epochs()\n\t\tres"}}},
	{"waits-for-nobody", "H5", []edit{{"server/fsm/heap.go", "run = &fsmpb.Run{Unit: r.unit, Units: r.units, Returned: epoch + 1}", "run = &fsmpb.Run{Unit: r.unit, Units: r.units}"}}},
	{"no-home-while-it-lives", "H5", []edit{{"server/lead/memory.go", "case home == 0 && !any:", "case home >= 0 && (any || !any):"},
		{"server/fsm/heap.go", "return !anyHome(h, r.unit, r.units)", "return true"}}},
	{"returned-and-not-forgotten", "H6", []edit{{"internal/heap/space.go", "s.disown(x.num, x.off, lo, hi)\n", ""}}},
	{"returned-by-an-older-renewal", "H6", []edit{{"server/lead/lead.go", "if r.Number <= x.number {\n", "if r.Number <= x.number {\nl.giveUp(s, now, r.Session, r.Returns)\n"}}},
	{"command-outlives-recall", "H5", []edit{{"server/fsm/heap.go", "if recallOf(h, extent) != nil || recalledSince(h, extent, r.mark) {", "if recallOf(h, extent) != nil {"}}},
	{"recalled-places-kept", "H7", []edit{{"internal/engine", "dropped := m.limbo.Forget(x) + m.cache.Forget(x) + l.core.heapOf(pg.ID, pg.Generation).Forget(x)", "dropped := 0 * x"}}},
	{"acknowledged-while-a-grant-is-under-way", "H7", []edit{{"internal/session/renew.go", "acked = min(acked, g.view)", "_ = g"}}},
	{"recalled-in-place-at-A-only", "H7", []edit{{"index/repair", "\t\t\tkept(c.Unit, c.Code)\n\t\t}\n\t}\n", "kept(c.Unit, c.Code)\n}\n}\nif true {\nreturn o.finishWork()\n}\n"}}},
	{"recalled-in-place-with-what-is-linked", "H7", []edit{{"server/fsm/heap.go", "if lo, hi = max(lo, from), min(hi, to); lo < hi {", "if lo, hi = max(lo, from), min(hi+1, to); lo < hi {"}}},
	{"generation-not-checked", "H2", []edit{{"server/fsm/heap.go", "return h != nil && s.pgs[pg].Generation == generation && granted", "return h != nil && granted"},
		{"server/fsm/heap.go", "if s.pgs[r.pg].GetGeneration() != r.generation || !granted", "if !granted"}}},
}

// byTest are the mistakes that tests of their packages have to notice.
var byTest = []tested{
	{"lease-not-checked-after-completion", "internal/engine", "TestLeaseEndsUnderWay", []edit{{"internal/engine", "if t.pg != nil && t.leased && !l.valid() {", "if false {"}}},
	{"lease-not-checked-after-post", "internal/engine", "TestLeaseEndsWithinPost", []edit{{"internal/engine/hinted.go", "valid := !ch.lease && !ch.notes || l.valid()", "valid := true"}}},
	{"late-reply-shortens-lease", "internal/engine", "TestLateReply", []edit{{"internal/engine/core.go", "if leaseEnd > c.leaseEnd.Load() {", "if leaseEnd != 0 {"}}},
	{"lease-counts-from-its-answer", "internal/session", "TestAgendaLease", []edit{{"internal/session/renew.go", "p.GetMinEpoch(), r.Sent+int64(", "p.GetMinEpoch(), now+int64("}}},
	{"asked-while-under-way", "internal/session", "TestAgendaQuestions", []edit{{"internal/session/questions.go", "x != nil && (x.until == 0 || now < x.until)", "x != nil && now < x.until"}}},
	{"hung-at-the-silent", "internal/session", "TestAgendaHangsUpSilent", []edit{{"internal/engine/view.go", "n.Incarnation == incarnation && n.Lost <= version", "n.Incarnation == incarnation"}}},
	{"dialed-before-hung-up", "internal/session", "TestAgendaHangsUp", []edit{{"internal/session/conns.go", "\t\t\tcontinue\n\t\t}\n\t\tif a.isUp", "x.old, x.asked = nil, false\n}\nif a.isUp"}}},
	{"hung-up-and-not-told", "internal/session", "TestAgendaHangsUpDown", []edit{{"internal/session/conns.go", "x.old, x.asked = nil, false\n\tq.Lane.Deliver(func(l *engine.Lane) { l.Closed(q.Node) })", "x.old, x.asked = nil, false"}}},
	{"hints-of-lost-generation", "internal/engine", "TestHintsOfLostGeneration", []edit{{"internal/engine", "now.hints = nil // its words mean nothing any more\n", ""}}},
	{"hints-without-fingerprint", "internal/engine", "TestHintOfAnotherKey", []edit{{"internal/engine/wordcache.go", " && layout.Word(x.word).FP() == fp", ""}}},
	{"hints-of-a-map-not-seen", "internal/engine", "TestHintsOfLostGeneration", []edit{{"internal/engine/hinted.go", "return l.core.View() == l.view && l.mailN", "return l.mailN"}}},
	{"places-of-lost-generation-with-lane", "internal/engine", "TestPlacesOfLostGeneration", []edit{{"internal/engine", "if m == nil || m.generation != pg.Generation {", "if m == nil {"}}},
	{"places-of-lost-generation-with-session", "internal/engine", "TestPlacesOfLostGeneration", []edit{{"internal/engine/core.go", "if h == nil || h.generation != generation {", "if h == nil {"}}},
	{"lost-generation-comes-back", "internal/engine", "TestPlacesOfLostGeneration", []edit{{"internal/engine/core.go", "if h != nil && h.generation > generation {", "if false {"}}},
	{"posted-counts-as-refused", "internal/engine", "TestPostedInPart", []edit{{"internal/engine", "l.refused(c, c.wrs[n:])", "l.refused(c, c.wrs)"}}},
	{"hinted-in-frozen", "internal/engine", "TestHintedNotInEveryView", []edit{{"internal/engine/hinted.go", "if s == nil || !s.PG.Active {", "if s == nil {"}}},
	{"hinted-in-joining", "internal/engine", "TestHintedNotInEveryView", []edit{{"index/hinted.go", "if r.PG.Joining || h.Flags", "if h.Flags"}}},
	{"hinted-by-an-old-word", "internal/engine", "TestHintedDeclines", []edit{{"internal/engine/hinted.go", " || epoch-x.at.seen() >= layout.WordLifeEpochs {", " {"}}},
	{"hint-replaced-unseen", "internal/engine", "TestWordCacheChanged", []edit{{"internal/engine/wordcache.go", "if e.meta.CompareAndSwap(x.meta, x.meta|metaBusy) {", "{"}}},
	{"hint-seen-unseen", "internal/engine", "TestWordCacheChanged", []edit{{"internal/engine/wordcache.go", "x.e.meta.CompareAndSwap(x.meta, x.meta&(1<<metaSeen-1)|uint64(epoch)<<metaSeen)", "x.e.meta.Store(x.e.meta.Load()&(1<<metaSeen-1)|uint64(epoch)<<metaSeen)"}}},
	{"hint-being-changed", "internal/engine", "TestWordCacheChanged", []edit{{"internal/engine/wordcache.go", "		if m&metaBusy != 0 {\n			continue", "		if false {\n			continue"}}},
	{"hinted-not-executed", "internal/engine", "TestHintedNotExecuted", []edit{{"internal/engine/hinted.go", "} else if read && (valid", "} else if (read || true) && (valid"}}},
	{"hinted-publish-unseen", "internal/engine", "TestHintedCopiesInterrupted", []edit{{"internal/engine/hinted.go", "if binary.LittleEndian.Uint64(cell) == uint64(x.way.X) {", "if true {"}}},
	{"decided-out-of-reach", "internal/engine", "TestNothingDecidedAlone", []edit{{"internal/engine/post.go", "t.Op.Decides() && !l.reaches(pg)", "false"}}},
	{"long-record-behind-the-decision", "internal/engine", "TestDoorbellsOfCopies", []edit{{"index/update.go", "len(o.own) > maxBehind || ", ""}}},
	{"manifest-behind-the-decision", "index", "TestTraces", []edit{{"index/update.go", " || o.flags&layout.FlagManifest != 0 {", " {"}}},
	{"short-record-with-the-decision", "internal/engine", "TestDoorbellsOfCopies", []edit{{"index/update.go", "len(o.own) > maxBehind ||", "len(o.own) > 0 ||"}}},
	{"hinted-decided-behind-a-failure", "internal/engine", "TestHintedCopiesBehindAFailure", []edit{{"internal/engine/hinted.go", "d < ch.most && whole; d++ {", "d < ch.most; d++ {"}}},
	{"hinted-published-without-lease", "internal/engine", "TestHintedCopiesInterrupted", []edit{{"internal/engine/hinted.go", "k < ch.most && whole && l.valid(); k++ {", "k < ch.most && whole; k++ {"}}},
	{"hinted-change-of-another-record", "internal/engine", "TestHintedChangesOfOneKey", []edit{{"internal/engine/hinted.go", " || op.found != 0 && h.Word != op.found {", " {"}}},
	{"hinted-change-of-another-version", "internal/engine", "TestHintedChangesRefused", []edit{{"internal/engine/hinted.go", "} else if r.Version != op.IfVersion {", "} else if false {"}}},
	{"hinted-out-of-limbo", "internal/engine", "TestHintedLimbo", []edit{{"internal/engine/hinted.go", "t.Unlinked(&x.pg.PG, x.way.X)", "t.Unuse(&x.pg.PG, x.way.X)"}}},
	{"flight-without-lease", "internal/engine", "TestFlightUndecided", []edit{{"internal/engine/flight.go", "whole := !f.failed && l.valid()", "whole := !f.failed"}}},
	{"flight-not-executed", "internal/engine", "TestFlightUndecided", []edit{{"internal/engine/flight.go", "whole := !f.failed && l.valid()", "whole := l.valid()"}}},
	{"flight-into-another-epoch", "internal/engine", "TestFlightUndecided", []edit{{"internal/engine/flight.go", "pg == nil || pg.Epoch != x.pg.Epoch || !pg.Active {", "pg == nil {"}}},
	{"flight-not-acknowledged", "internal/engine", "TestFlightCounts", []edit{{"internal/engine/lane.go", "acked = min(acked, t.postView)", "_ = t"}}},
	{"flight-answers-who-left", "internal/engine", "TestFlightLeft", []edit{{"internal/engine/flight.go", "f.gets[i].op = nil", "_ = op"}}},
	{"reads-not-fenced", "internal/engine", "TestFencedReads", []edit{{"internal/engine", "if !c.caps.AtomicThenRead {", "if false {"}}},
	{"keys-of-an-earlier-map", "internal/engine", "TestNewKeys", []edit{{"internal/engine", "if e.pg != pg || e.replica != r {", "if e.pg == nil {"}}},
	{"lane-acknowledges-maps-to-come", "internal/engine", "TestAcks", []edit{{"internal/engine", "acked, quiesced := v.Version, v.Version", "acked, quiesced := v.Version+1, v.Version+1"}}},
	{"cache-waits-for-the-silent", "server/lead", "TestSilentIsLostToEachGroup", []edit{{"server/lead/plan.go", "(spares && p.s.Spares(pg.Id))", "(spares && false)"}}},
	{"last-copy-lost-with-others", "server/lead", "TestSilentIsLostToEachGroup", []edit{{"server/fsm/lose.go", "return len(without(Copies(pg), node)) > 0", "return true"}}},
	{"silent-lost-whole-or-not", "server/lead", "TestSilentIsLostToEachGroup", []edit{{"server/lead/lose.go", "		if waits {\n", "if waits {\ncontinue\n}\nif waits {\n"}}},
	{"silent-takes-regions", "server/lead", "TestSilentIsLostToEachGroup", []edit{{"server/fsm/pgs.go", "!n.Leaving && !n.Silent", "!n.Leaving"}}},
	{"registered-again-silent-still", "server/lead", "TestSilentIsLostToEachGroup", []edit{{"server/fsm/nodes.go", "n.LostVersion = old.PauseMillis, old.Leaving, old.LostVersion", "n.LostVersion = old.PauseMillis, old.Leaving, old.LostVersion\nn.Silent = old.Silent"}}},
	{"silent-not-excused", "server/lead", "TestDeadSessionsOfTheSilent", []edit{{"server/fsm/lose.go", "	if !s.KnowsBoots() || len(s.roster.fencing) == 0 {\n", "if true {\n"}}},
	{"fenced-elsewhere-is-waited-for", "server/lead", "TestDeadSessionsOfTheSilent", []edit{{"server/lead/view.go", "v.s.SessionsIn(namespace)-fenced", "v.s.SessionsIn(namespace)-0*fenced"}}},
	{"maps-to-come-acknowledged", "server/lead", "TestAcksOfTheFuture", []edit{{"server/lead/lead.go", "max(x.acked, min(r.Acked, s.MapVersion()))", "max(x.acked, r.Acked)"}}},
	{"maps-to-come-quiesced", "server/lead", "TestAcksOfTheFuture", []edit{{"server/lead/lead.go", "max(x.quiesced, acked, min(r.Quiesced, s.MapVersion()))", "max(x.quiesced, acked, r.Quiesced)"}}},
	{"newest-by-an-old-word", "internal/engine", "TestMovedNowhere", []edit{{"internal/engine/core.go", "c.mu.newestSeq >= seq && c.mu.newest <= version", "seq > 0 && c.mu.newest <= version"}}},
	{"txn-version-before-the-intent", "index", "TestMeetDecided", []edit{{"index/intent.go", "o.x, o.xVersion, o.xFlags, o.expired = m.word, m.version, 0, false", "o.x, o.xVersion, o.xFlags, o.expired = m.word, 0, 0, false"}}},
	{"txn-waits-from-the-start", "index", "TestMeetWaits", []edit{{"index/intent.go", "m.resume = o.Machine == nil && o.Kind != Settle", "m.resume = false"}}},
	{"txn-settled-is-unknown", "index", "TestMeetSettled", []edit{{"index/update.go", "o.isSettled() && c == o.met.stands {", "false {"}}},
	{"txn-young-aborts-old", "index", "TestTxnAges", []edit{{"index/intent.go", "o.Kind == Prepare && (&layout.Intent{TS: o.Txn.TS, Coord: o.Txn.Coord}).Older(in):", "o.Kind == Prepare && !(&layout.Intent{TS: o.Txn.TS, Coord: o.Txn.Coord}).Older(in):"}}},
	{"newest-in-another-map", "index", "TestMovedNowhere", []edit{{"index", "o.MapCurrent != 0 && o.MapCurrent == o.Route.MapVersion", "o.MapCurrent != 0"}}},
	{"moved-by-a-damaged-header", "index", "TestMoveDamaged", []edit{{"index/repair", "if err := o.image(0, 0).CheckHeader(); err != nil {", "if err := error(nil); err != nil {"}}},
	{"hint-with-a-place-of-elsewhere", "index", "TestHintAtChildWithPlace", []edit{{"index", "if o.hasPlaces() && !samePlaces(o.Route.PG, c.PG) {", "if false {"}}},
	{"slow-is-silent", "internal/gateway", "TestSlowIsNotSilent", []edit{{"internal/gateway/conn.go", "c.active.Store(now)\n", "c.active.Store(b.now)\n"}}},
	{"waiting-is-late", "internal/gateway", "TestOthersMemory", []edit{{"internal/gateway/conn.go", "(c.rd.Buffered()) + c.waited", "(c.rd.Buffered())"}}},
	{"memcached-waiting-is-late", "internal/memcached", "TestOthersMemory", []edit{{"internal/memcached/conn.go", ">>20 + c.waited", ">>20"}}},
	{"unlock-not-repeated", "internal/engine", "TestUnlockAfterReconnection", []edit{{"internal/engine", "l.addNoWait(c, pg, uint8(r), again[i])\n", ""}}},
	{"unlock-proven-unposted", "internal/engine", "TestUnlockNeverPosted", []edit{{"internal/engine", "o.seq = math.MaxUint64 // no WC", "o.seq = 0 // no WC"}}},
	{"mail-wakes-nobody", "internal/engine", "TestMailWakes", []edit{{"internal/engine", "if len(fns) > 0 {\n\t\tl.events++\n\t}\n", ""}}},
	{"keys-of-an-earlier-region-published", "memnode", "TestRegionWantedAnew", []edit{{"memnode/region.go", "return a.GetSince() == b.GetSince() && a.Get", "return a.Get"}}},
	{"fence-confirmed-and-not-made", "memnode", "TestFence", []edit{{"memnode/peers.go", "if len(n.mu.peers[session]) == 0 {", "if true {"}}},
	{"ended-session-admitted", "memnode", "TestFence", []edit{{"memnode/peers.go", "return n.mu.sessions.ended(session)", "return false"}}},
	{"region-freed-with-somebody-inside", "memnode", "TestRegionInUse", []edit{{"memnode/region.go", "err != nil && !errors.Is(err, rdma.ErrClosed) {", "false {"}}},
	{"boot-not-written-down", "memnode", "TestAnswersUnheard", []edit{{"memnode/keep.go", "if err := n.keep.file.write(s); err != nil {", "if err := error(nil); err != nil {"}}},
	{"nonce-not-written-down", "memnode", "TestAnswersUnheard", []edit{{"memnode/keep.go", "s.lives = append(s.lives, n.nonce)", "_ = s.lives"}}},
	{"dropped-region-in-the-state", "memnode", "TestStateComesFirst", []edit{{"memnode/keep.go", "if r.dying && !r.retiring || r.keys == nil {", "if r.keys == nil {"}}},
	{"retained-region-in-the-state-with-keys", "memnode", "TestStateComesFirst", []edit{{"memnode/keep.go", "if !r.retiring {\n\t\t\t\tk.keys", "if true {\n\t\t\t\tk.keys"}}},
	{"damaged-page-not-mended", "memnode", "TestEveryByteFlipped", []edit{{"memnode/keep.go", "if f := n.keep.file; f.torn {", "if f := n.keep.file; false {"}}},
	{"other-items-given-back", "memnode", "TestWarmGivesBackTheRest", []edit{{"memnode/keep.go", "if strings.HasPrefix(name, RegionItems) {", "if name != stateItem {"}}},
	{"nameless-regions-kept", "memnode", "TestWarmGivesBackTheRest", []edit{{"memnode/keep.go", "if strings.HasPrefix(name, RegionItems) {", "if false {"}}},
	{"served-with-the-door-open", "memnode", "TestDoor", []edit{{"memnode/keep.go", "if len(inside) == 0 {", "if true {"}}},
	{"another-machines-state-taken", "memnode", "TestStartsEmpty", []edit{{"memnode/keep.go", "case !hostid.Same(s.host, n.o.HostID):", "case s.host == \"\":"}}},
	{"damaged-memory-dropped", "memnode", "TestStartsEmpty", []edit{{"memnode/keep.go", "rescued := n.o.Keeper != nil && why.isRescued() && n.keepAside(why)", "rescued := false"}}},
	{"page-in-the-others-place", "memnode", "TestStateInTheOthersPlace", []edit{{"memnode/state.go", "case seq%2 != k:", "case seq%2 > 1:"}}},
	{"torn-page-looks-damaged", "memnode", "TestStateInterrupted", []edit{{"memnode/state.go", "\tatomic.StoreUint64(magic, 0)\n", ""}}},
	{"unwritten-page-looks-damaged", "memnode", "TestStateInterrupted", []edit{{"memnode/state.go", "case magic == 0:", "case magic == 0 && k > 1:"}}},
	{"whole-page-written-first", "memnode", "TestStateInterrupted", []edit{{"memnode/state.go", "f.writePage(1-f.whole, body)\n\tf.writePage(f.whole, body)", "f.writePage(f.whole, body)\n\tf.writePage(1-f.whole, body)"}}},
	{"one-page-written", "memnode", "TestStateSaysWhatWasWrittenLast", []edit{{"memnode/state.go", "\tf.writePage(f.whole, body)\n", ""}}},
	{"format-not-summed", "memnode", "TestStateFlipped", []edit{{"memnode/state.go", "if binary.LittleEndian.Uint32(p[8:]) >= 3 {", "if false {"}}},
	{"published-before-the-state", "memnode", "TestStateComesFirst", []edit{{"memnode/region.go", "err = n.saveState(reg) // before anybody is told of the region", "_ = reg"}}},
	{"freed-before-the-state", "memnode", "TestStateComesFirst", []edit{{"memnode/region.go", "if err := n.saveState(reg); err != nil { // before any of it is another's", "if err := error(nil); err != nil {"}}},
	{"retained-memory-registered", "memnode", "TestRetainedIsOutOfReach", []edit{{"memnode/retain.go", "\tif err := r.deregister(); err != nil {\n\t\treturn false, err\n\t}\n", ""}}},
	{"retained-not-in-the-state", "memnode", "TestStateComesFirst", []edit{{"memnode/retain.go", "if err := n.saveState(reg); err != nil {", "if err := error(nil); err != nil {"}}},
	{"retained-of-another-incarnation", "memnode", "TestRetainedNot", []edit{{"memnode/retain.go", "r.inc == old.GetIncarnation() && ", ""}}},
	{"retained-of-another-namespace", "memnode", "TestRetainedOfAnother", []edit{{"memnode/retain.go", "r.want.GetNamespaceId() == w.GetNamespaceId() &&\n", ""}}},
	{"sessions-of-another-cluster", "memnode", "TestAnotherCluster", []edit{{"memnode/control.go", "n.mu.clusterID, n.mu.sessions, n.mu.told = rep.GetClusterId(), sessions{}, position{}", "n.mu.clusterID, n.mu.told = rep.GetClusterId(), position{}"}}},
	{"admitted-before-the-state", "memnode", "TestNobodyBeforeTheState", []edit{{"memnode/control.go", "n.mu.saved = reg\n", "n.mu.saved, n.mu.reg = reg, reg\n"}}},
	{"put-back-memory-served", "memnode", "TestPutBack", []edit{{"memnode/control.go", "if rep.GetStale() {", "if false {"}}},
	{"put-back-memory-offered", "memnode", "TestPutBack", []edit{{"memnode/control.go", "n.forgetKept(how)", "n.keep.after = nil"}}},
	{"rescue-beside-regions", "memnode", "TestRescueGivesWay", []edit{{"memnode/rescue.go", "\tif lacks {\n", "\tif lacks && false {\n"}}},
	{"rescue-not-counted", "memnode", "TestRescueGivesWay", []edit{{"memnode/rescue.go", "n.mu.rescuedBytes += bytesOf(i)", "_ = bytesOf"}}},
	{"rescue-piles-up", "memnode", "TestRescueGivesWay", []edit{{"memnode/rescue.go", "\tn.dropRescued(\"other memory is kept aside\")\n", ""}}},
	{"file-that-others-write-is-memory", "internal/keeper", "TestFolder", []edit{{"internal/keeper/folder.go", "st.Mode != unix.S_IFREG|0o600 ||", "st.Mode&^0o022 != unix.S_IFREG|0o600 ||"}}},
	{"file-with-another-name-is-memory", "internal/keeper", "TestFolder", []edit{{"internal/keeper/folder.go", " || st.Nlink != 1)", ")"}}},
	{"link-is-memory", "internal/keeper", "TestFolder", []edit{{"internal/keeper/folder.go", "unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC", "unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC"}}},
	{"folder-that-others-read", "internal/keeper", "TestFolderOfOthers", []edit{{"internal/keeper/folder.go", "case st.Mode&0o077 != 0:", "case st.Mode&0o022 != 0:"}}},
	{"folder-of-a-living-process", "internal/keeper", "TestFolderIsOnes", []edit{{"internal/keeper/folder.go", "if err := f.ended(ctx, before, me); err != nil {", "if err := error(nil); err != nil {"}}},
	{"rename-over-another", "internal/keeper", "TestFolder", []edit{{"internal/keeper/folder.go", "unix.RENAME_NOREPLACE", "0"}}},
	{"killed-without-regions-is-the-last", "internal/keeper", "TestNothingToKeep", []edit{{"internal/keeper/keeper.go", "!wasKilled(state) && ", ""}}},
	{"failed-without-regions-is-the-last", "internal/keeper", "TestNothingToKeep", []edit{{"internal/keeper/keeper.go", "!wasKilled(state) && !held.hasAny(o.Vital) && !programs.wasUp() {", "!wasKilled(state) && !held.hasAny(o.Vital) {"}}},
	{"store-left-when-interrupted", "internal/keeper", "TestStoreAfterRun", []edit{{"internal/keeper/keeper.go", "held.closeAll(ctx.Err() != nil && !interrupted(ctx))", "held.closeAll(ctx.Err() != nil)"}}},
	{"store-given-up-at-the-end", "internal/keeper", "TestStoreAfterRun", []edit{{"internal/keeper/keeper.go", "held.closeAll(ctx.Err() != nil && !interrupted(ctx))", "held.closeAll(false)"}}},
	{"worker-beside-that-of-the-keeper-before", "internal/keeper", "TestEarlierWorker", []edit{{"internal/keeper/keeper.go", "\tif w == nil {\n\t\treturn nil\n\t}\n", "\tif w != nil {\n\t\treturn nil\n\t}\n"}}},
	{"new-name-before-the-old-one-goes", "internal/keeper", "TestRename", []edit{{"internal/keeper/wire.go", "if err = c.Drop(from); err == nil {\n\t\terr = c.Put(to, is.Meta, is.FDs...)\n\t}", "if err = c.Put(to, is.Meta, is.FDs...); err == nil {\n\t\terr = c.Drop(from)\n\t}"}}},
	{"frozen-group-settled", "server/fsm", "TestStatusOfFrozen", []edit{{"server/fsm/status.go", "return pg.State != dirpb.PGState_PG_ACTIVE && pg.State != dirpb.PGState_PG_FROZEN", "return pg.State != dirpb.PGState_PG_ACTIVE"}}},
	{"later-arrays-retained", "server/fsm", "TestRetainedArraysSince", []edit{{"server/fsm/retain.go", "if a.ShardId <= d.LastShard {", "if true {"}}},
	{"put-back-memory-registered", "server/fsm", "TestStale", []edit{{"server/fsm/nodes.go", "if old.Recoveries == s.meta.Recoveries && isStale(old, c) {", "if false {"}}},
	{"unheard-process-is-stale", "server/fsm", "TestStale", []edit{{"server/fsm/nodes.go", " && !slices.Contains(c.After, last.Nonce)", " && c.After[0] != last.Nonce"}}},
	{"keys-of-an-earlier-region-taken", "server/fsm", "TestRegionOfAnEarlierPlan", []edit{{"server/fsm/pgs.go", "m.Incarnation != c.Incarnation || c.Since != 0 && m.Since != c.Since {", "m.Incarnation != c.Incarnation {"}}},
	{"role-of-a-caller-not-asked", "server", "TestRightsByUnit", []edit{{"server/identity.go", "allowed.ServerOptions(n.opts.Identities, welcome, n.log)...)", "func() []grpc.ServerOption { _ = welcome; return nil }()...)"}}},
	{"id-of-another-entered", "server/fsm", "TestDirectoryOwner", []edit{{"server/fsm/fsm.go", "old != \"\" && identity != \"\" && old != identity", "old != \"\" && identity != \"\" && old == \"\""}}},
	{"id-not-claimed-by-its-leader", "server", "TestDirectoryOwners", []edit{{"server/lead.go", "claimID(s, want, n.identity())", "claimID(s, want, \"\")"}}},
	{"revoked-not-asked-by-calls", "internal/certs", "TestRevoked", []edit{{"internal/certs/certs.go", "c.VerifyConnection = now.VerifyConnection", "_ = now.VerifyConnection"}}},
	{"revoked-by-number-alone", "internal/certs", "TestRevokedBetween", []edit{{"internal/certs/revoked.go", "issued{string(authority.RawSubjectPublicKeyInfo), serial", "issued{\"\", serial"}}},
	{"lists-of-anybody", "internal/certs", "TestListsRefused", []edit{{"internal/certs/revoked.go", "return l.CheckSignatureFrom(a) == nil", "return true"}}},
	{"session-of-another-used", "server", "TestSessionOwners", []edit{{"server/identity.go", "i != \"\" && owner != \"\" && i != owner", "i == owner && owner == \"\" && what == \"\""}}},
	{"raft-hears-every-role", "server", "TestRaftPortRoles", []edit{{"server/transport.go", "s.server = m.Require(serverTLS(conf), \"Raft\", directories)", "s.server = serverTLS(conf)"}}},
	{"raft-talks-to-every-role", "server", "TestRaftPortRoles", []edit{{"server/transport.go", "s.client = m.Require(clientTLS(conf), \"Raft\", directories)", "s.client = clientTLS(conf)"}}},
	{"another-disk-counts", "server", "TestEmptyDiskCountsForNothing", []edit{{"server/hello.go", "case h.server != wanted:", "case false:"},
		{"server/hello.go", "if h.wanted != p.server {", "if false {"}}},
	{"called-for-another-disk", "server", "TestHellos", []edit{{"server/hello.go", "if h.wanted != p.server {", "if false {"}}},
	{"folder-of-any-id", "server", "TestFolderOfAnother", []edit{{"server/disk.go", "if d.id != id {", "if false {"}}},
	{"living-member-replaced", "server", "TestSecondProcess", []edit{{"server/admit.go", "there, err = n.streams.probe(ctx, string(was.Address), was.ID)", "err = errSilent"},
		{"server/admit.go", "case !same && n.peers.silence(was.ID, l.term, n.patience()) == 0:", "case false:"}}},
	{"removal-ends-the-majority", "server", "TestRemoveKeepsMajority", []edit{{"server/admit.go", "if !q.Force {", "if q.Force {"}}},
	{"opened-without-the-right", "server/fsm", "TestOpenNeedsRight", []edit{{"server/fsm/access.go", "if has >= want {", "if has >= want || has > 0 {"}}},
	{"revoked-session-lives", "server/fsm", "TestRevokeFences", []edit{{"server/fsm/access.go", "return w, s.fenceBeyond(w), nil", "return w, 0, nil"}}},
	{"former-owner-lives", "server/fsm", "TestRevokeFences", []edit{{"server/fsm/spread.go", "s.fenceBeyond(w)", ""}}},
	{"group-named-as-somebody", "server/fsm", "TestRightOf", []edit{{"server/fsm/access.go", "return !ok && who == c.Identity || ok && slices.Contains(c.Groups, group)", "_, _ = group, ok\nreturn who == c.Identity || slices.Contains(c.Groups, strings.TrimPrefix(who, identity.GroupPrefix))"}}},
	{"name-of-another-taken-over", "server/fsm", "TestNodeOwner", []edit{{"server/fsm/nodes.go", "old != \"\" && identity != \"\" && old != identity", "old != \"\" && identity != \"\" && old == \"\""}}},
	{"role-of-a-peer-not-asked", "memnode", "TestRoles", []edit{{"memnode/peers.go", "if r.TLS != nil {", "if false {"}}},
	{"token-of-another-taken", "memnode", "TestTokenOfAnother", []edit{{"memnode/keys.go", "if tls && g.Identity != peer.String() {", "if false {"}}},
	{"token-without-a-region-taken", "memnode", "TestRefusals", []edit{{"memnode/keys.go", "if !r.dying && r.want.GetNamespaceId() == namespace {", "if !r.dying {"}}},
	{"lanes-without-end", "memnode", "TestRefusals", []edit{{"memnode/peers.go", "if lane >= uint32(g.Lanes) {", "if lane >= 1<<16 {"}}},
	{"expired-token-taken", "internal/token", "TestRefusals", []edit{{"internal/token/token.go", "if now.Unix() >= g.Expires {", "if now.Unix() < 0 {"}}},
	{"rights-not-signed", "internal/token", "TestRoundTrip", []edit{{"internal/token/token.go", "h.Write(b)", "h.Write(b[:14])\n\th.Write(b[15:])"}}},
	{"key-signs-before-all-have-it", "server/lead", "TestKeys", []edit{{"server/lead/keys.go", "l.signs = now - 1", "l.signs = now"}}},
	{"older-token-not-waited-for", "server/lead", "TestKeys", []edit{{"server/lead/keys.go", "x.token != 0 && TokenGeneration(x.token) < now {", "false {"}}},
	{"key-made-before-all-have-the-last", "server", "TestRotateKey", []edit{{"server/keys.go", "why != \"\" && !q.Force", "why == \"nobody\" && !q.Force"}}},
	{"new-key-is-no-news", "server", "TestRotateKey", []edit{{"server/await.go", "put(uint64(k.Generation))", "_ = k"}}},
	{"near-keeps-what-a-write-overtook", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "if f.writes == s.writes && s.writing == 0 {", "if s.writing == 0 {"}}},
	{"near-keeps-what-a-write-overtakes", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "if f.writes == s.writes && s.writing == 0 {", "if f.writes == s.writes {"}}},
	{"near-keeps-many-that-a-write-overtook", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "if s.writes == writes[j] && s.writing == 0 {", "if s.writing == 0 {"}}},
	{"near-keeps-what-ends-last", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "alone := s.writing == 1 && s.writes == writes", "alone := s.writing == 1"}}},
	{"near-keeps-what-begins-last", "client/near", "TestOverlaps", []edit{{"client/near/near.go", "alone := s.writing == 1 && s.writes == writes", "alone := s.writes == writes"}}},
	{"ruin-is-absent", "index", "TestUnreadableRecord", []edit{{"index/lookup.go", "	o.env.Forget(o)\n	if o.hides != nil {", "	o.env.Forget(o)\n	if false {"}}},
	{"ruin-of-anybody-replaced", "index", "TestUnreadableRecord", []edit{{"index/insert.go", "if o.atA = true; x.mine {", "if o.atA = true; true {"}}},
	{"settled-beside-a-damaged-parent", "index", "TestSettleDamagedParent", []edit{{"index/txn.go", "return o.settleBytes(o.met.recs[0], 0)", "return o.answerAfterSync(nil)"}}},
	{"recall-ends-at-a-ruin", "index", "TestRelocateDamaged", []edit{{"index/repair/copies.go", "case err != nil && it.lost && o.Kind != index.Move:", "case false:"}}},
	{"txn-snapshot-not-believed", "client", "TestTxnRetries", []edit{{"client/tx.go", "tx.ahead, tx.instant = make(map[string]Item, len(ops)), true", "tx.ahead, tx.instant = make(map[string]Item, len(ops)), false"}}},
	{"txn-believes-what-came-after-the-snapshot", "client", "TestTxnRetries", []edit{{"client/tx.go", "			return false, nil\n", "			continue\n"}}},
	{"txn-reads-anew-one-by-one", "client", "TestTxnRetries", []edit{{"client/tx.go", "if it, ok := tx.ahead[string(k)]; ok {", "if it, ok := tx.ahead[string(k)]; ok && false {"}}},
	{"txn-without-a-time", "client", "TestTxnTime", []edit{{"client/tx.go", "tries == 1 && !ok {", "tries < 0 && !ok {"}}},
	{"flush-ends-at-damage", "cmd/kvctl", "TestEraseDamaged", []edit{{"cmd/kvctl/erase.go", "left, err = append(left, err), nil", "left = append(left, err)"}}},
	{"near-shares-a-read-from-before-a-write", "client/near", "TestSharingAfterWrite", []edit{{"client/near/near.go", "if f.writes == s.writes && s.writing == 0 && c.o.Now()", "if c.o.Now()"}}},
	{"near-older-answer-replaces", "client/near", "TestLaterStays", []edit{{"client/near/near.go", "\tif cur, ok := c.entries.GetIfPresent(n); ok && cur.asked.After(e.asked) {", "if cur, ok := c.entries.GetIfPresent(n); false && ok && cur.asked.After(e.asked) {"}}},
	{"near-shares-what-has-expired", "client/near", "TestSharedExpires", []edit{{"client/near/near.go", "\t\tcase f.e != nil && c.expired(f.e, c.o.Now()):", "case false && f.e != nil && c.expired(f.e, c.o.Now()):"}}},
	{"near-kept-of-another-key", "client/near", "TestTwins", []edit{{"client/near/near.go", "\tif !ok || !bytes.Equal(e.key, key) {", "if !ok {"}}},
	{"near-shares-another-key", "client/near", "TestTwins", []edit{{"client/near/near.go", "\t\tcase f.gone, f.e != nil && !bytes.Equal(f.e.key, key), f.e == nil && !bytes.Equal(f.key, key):", "case f.gone, f.e == nil && !bytes.Equal(f.key, key):"}}},
	{"near-shares-that-another-is-none", "client/near", "TestTwins", []edit{{"client/near/near.go", "\t\tcase f.gone, f.e != nil && !bytes.Equal(f.e.key, key), f.e == nil && !bytes.Equal(f.key, key):", "case f.gone, f.e != nil && !bytes.Equal(f.e.key, key):"}}},
	{"near-a-write-that-ends-is-none", "client/near", "TestStaggered", []edit{{"client/near/near.go", "\ts.writes++\n\ts.writing--", "s.writing--"}}},
	{"near-age-from-the-answer", "client/near", "TestAge", []edit{{"client/near/near.go", "\t\tf.e = entryOf(key, &it, f.asked)", "f.e = entryOf(key, &it, c.o.Now())"}}},
	{"near-age-from-the-comparison", "client/near", "TestAge", []edit{{"client/near/near.go", "\t\te.asked = f.asked", "e.asked = c.o.Now()"}}},
	{"near-age-of-many-from-the-answer", "client/near", "TestAge", []edit{{"client/near/near.go", "\t\t\te = entryOf(ask[j], &r.Item, asked)", "e = entryOf(ask[j], &r.Item, asked.Add(c.o.Now().Sub(asked)))"}}},
	{"near-age-from-the-end-of-a-put", "client/near", "TestAge", []edit{{"client/near/near.go", "flags: op.Flags, asked: asked}", "flags: op.Flags, asked: asked.Add(c.o.Now().Sub(asked))}"}}},
	{"near-given-up-and-left", "client/near", "TestGivenUpInTurn", []edit{{"client/near/near.go", "\t\t\tif s.flights[n] == f && !f.begun && f.waiting == 0 {\n\t\t\t\tdelete(s.flights, n)\n\t\t\t}", ""}}},
	{"near-given-up-takes-another", "client/near", "TestReadsInTurn", []edit{{"client/near/near.go", "\t\t\tif s.flights[n] == f && !f.begun && f.waiting == 0 {", "if !f.begun && f.waiting == 0 {"}}},
	{"near-next-read-unseen", "client/near", "TestReadsInTurn", []edit{{"client/near/near.go", "\t\t\ts.flights[n] = f.next", "_ = f.next"}}},
	{"near-absence-not-shared", "client/near", "TestReadsInTurn", []edit{{"client/near/near.go", "\tf.gone = f.err != nil && ctx.Err() != nil", "f.gone = f.err != nil"}}},
	{"near-deletes-of-multicas-kept", "client/near", "TestEveryWrite", []edit{{"client/near/near.go", "\t\t\tif ops[i].Kind != client.OpKeep && !yield(ops[i].Key) {", "if ops[i].Kind == client.OpPut && !yield(ops[i].Key) {"}}},
	{"near-writing-after-a-panic", "client/near", "TestPanics", []edit{{"client/near/near.go", "\tdefer func() {\n\t\tfor k := range keys {\n\t\t\tc.end(k, 0, nil)\n\t\t}\n\t}()\n\tf()", "f()\n\tfor k := range keys {\n\t\tc.end(k, 0, nil)\n\t}"}}},
	{"near-keeps-the-callers-buffer", "client/near", "TestWholeItems", []edit{{"client/near/near.go", "value: bytes.Clone(op.Value), version", "value: op.Value, version"}}},
	{"renewal-reports-a-later-epoch", "internal/session", "TestAgendaRenews", []edit{{"internal/session/renew.go", "\tif e, ok := oldest(); ok && e < q.ReportEpoch {\n\t\tq.ReportEpoch = e\n\t}", "if e, ok := oldest(); ok && e > q.ReportEpoch {\n\t\tq.ReportEpoch = e\n\t}"}}},
	{"another-try-reports-a-later-epoch", "internal/session", "TestAgendaAgain", []edit{{"internal/session/renew.go", "ReportEpoch: q.ReportEpoch,", "ReportEpoch: a.core.Epoch(),"}}},
	{"holdings-of-a-lost-renewal-told", "internal/session", "TestAgendaLost", []edit{{"internal/session/renew.go", "\t\ta.mu.told = acks{} // said again with the next one\n\t\ta.untold()", "a.mu.told = acks{} // said again with the next one"}}},
	{"quiet-after-the-look", "internal/session", "TestAgendaStirredWhileGoingQuiet", []edit{{"internal/session/renew.go", "\ta.core.SetQuiet(true) // before looking: what happens from here on stirs it\n\tif !a.idle(now) {\n\t\ta.core.SetQuiet(false)\n\t\treturn\n\t}", "if !a.idle(now) {\n\t\treturn\n\t}\n\ta.core.SetQuiet(true)"}}},
	{"holdings-of-another-try-told", "internal/session", "TestAgendaAgain", []edit{{"internal/session/renew.go", "\tq := first.Renew\n\ta.untold()", "q := first.Renew"}}},
	{"another-try-without-limbo", "internal/session", "TestAgendaAgain", []edit{{"internal/session/renew.go", "InLimbo: q.InLimbo,", "InLimbo: false,"}}},
	{"late-reply-counts-for-the-latest", "internal/session", "TestAgendaAgain", []edit{{"internal/session/renew.go", "\ta.core.EndRenew(q.Renew.Number, p", "a.core.EndRenew(a.mu.number, p"}}},
	{"limbo-awaited-untold", "internal/session", "TestAgendaAgain", []edit{{"internal/session/renew.go", "\tcase q.Renew.InLimbo:\n\t\ta.mu.awaits", "case true:\n\t\ta.mu.awaits"}}},
	{"limbo-of-meanwhile-untold", "internal/session", "TestAgendaAgain", []edit{{"internal/session/renew.go", "a.core.LastUnlink() >= a.mu.awaits", "a.core.LastUnlink() > a.mu.awaits"}}},
	{"quiet-with-operations", "internal/session", "TestAgendaNotQuiet", []edit{{"internal/session/renew.go", "\tcase a.mu.wasBusy || a.mu.busy ||", "case a.mu.wasBusy ||"}}},
	{"quiet-with-a-grant-of-a-later-map", "internal/session", "TestAgendaNotQuiet", []edit{{"internal/session/renew.go", "len(a.mu.wants)+len(a.mu.grants)+len(a.mu.early) > 0:", "len(a.mu.wants)+len(a.mu.grants) > 0:"}}},
	{"quiet-with-holdings-untold", "internal/session", "TestAgendaNotQuiet", []edit{{"internal/session/renew.go", " || !sameHeld(p.told, heldOf(m, f)) {", "{"}}},
	{"quiet-without-end", "internal/session", "TestAgendaQuietBounds", []edit{{"internal/session/renew.go", "int64(min(millis, maxQuietMillis))", "int64(millis)"}}},
	{"stirred-renews-at-once", "internal/session", "TestAgendaQuietBounds", []edit{{"internal/session/renew.go", "\ta.mu.next = min(a.mu.next, max(a.mu.sent+a.o.Renew, a.core.Nanos()))", "a.mu.next = a.core.Nanos()"}}},
	{"acks-not-looked-at-again", "internal/session", "TestAgendaAckPauses", []edit{{"internal/session/renew.go", "\tif v := a.core.View(); v != nil && (k.acked < v.Version || k.quiesced < v.Version) {", "if v := a.core.View(); v != nil && false {"}}},
	{"due-while-one-is-under-way", "internal/session", "TestAgendaLost", []edit{{"internal/session/agenda.go", "\tif !a.mu.renewing {\n\t\tnext = a.mu.next", "if true {\n\t\tnext = a.mu.next"}}},
	{"lost-grant-is-no-leak", "internal/session", "TestAgendaLeaks", []edit{{"internal/session/grants.go", "\tif r.Err != nil {\n\t\ta.mu.unsure = true", "if r.Err != nil {"}}},
	{"late-grant-is-no-leak", "internal/session", "TestAgendaLeaks", []edit{{"internal/session/grants.go", "\tif r.Grant.GetTerm() < a.mu.term {\n\t\ta.mu.unsure = true", "if r.Grant.GetTerm() < a.mu.term {"}}},
	{"delivery-goes-round", "internal/session", "TestAgendaDeliveryGoesRound", []edit{{"internal/session/renew.go", "unit > math.MaxUint32 {", "false {"}}},
	{"returned-as-never-used", "internal/session", "TestAgendaReturnsWhatWasUsed", []edit{{"internal/session/handback.go", "\t\tq.Returns = append(q.Returns, &dirpb.ReturnedRun{PgId: m.PG, Generation: m.Generation, Unit: r.Unit, Units: r.Units, Fresh: r.Fresh})", "q.Returns = append(q.Returns, &dirpb.ReturnedRun{PgId: m.PG, Generation: m.Generation, Unit: r.Unit, Units: r.Units, Fresh: true})"}}},
	{"closed-as-never-used", "internal/session", "TestAgendaReturnsWhatWasUsed", []edit{{"internal/session/handback.go", "\t\t\t\tq.Runs = append(q.Runs, &dirpb.ReturnedRun{PgId: m.PG, Generation: m.Generation, Unit: r.Unit, Units: r.Units, Fresh: r.Fresh})", "q.Runs = append(q.Runs, &dirpb.ReturnedRun{PgId: m.PG, Generation: m.Generation, Unit: r.Unit, Units: r.Units, Fresh: true})"}}},
	{"handed-back-across-extents", "internal/session", "TestAgendaBacklog", []edit{{"internal/session/handback.go", " || x.Unit != end || x.Unit%layout.ExtentUnits == 0 {", "|| x.Unit != end {"}}},
	{"handed-back-of-a-lost-generation", "internal/session", "TestAgendaBacklog", []edit{{"internal/session/handback.go", "\t\tif v == nil || v.PG(m.PG) == nil || v.PG(m.PG).Generation != m.Generation {\n\t\t\tcontinue\n\t\t}\n\t\tp, f, s", "if v == nil || v.PG(m.PG) == nil {\n\t\t\tcontinue\n\t\t}\n\t\tp, f, s"}}},
	{"backlog-forgotten", "internal/session", "TestAgendaBacklog", []edit{{"internal/session/handback.go", "\ta.mu.backlog = a.mu.backlog || *places <= 0", ""}}},
	{"ahead-instead-of-missed", "internal/session", "TestAgendaAheadAndMissed", []edit{{"internal/session/grants.go", "\tif _, wanted := a.mu.wants[m.PG]; !wanted {\n\t\ta.mu.wants[m.PG] = 0\n\t}", "a.mu.wants[m.PG] = 0"}}},
	{"changed-holdings-untold", "internal/session", "TestAgendaTells", []edit{{"internal/session/handback.go", "\t\t\tnews = news || !sameHeld(p.told, h)", "news = news || p.told == nil"}}},
	{"supply-of-nobody-kept", "internal/session", "TestAgendaTells", []edit{{"internal/session/renew.go", "\ta.supplied(p.GetSupply(), len(q.Renew.Held) > 0)", "a.supplied(p.GetSupply(), false)"}}},
	{"called-and-not-answered", "internal/session", "TestAgendaCalled", []edit{{"internal/session/renew.go", "a.mu.called && p.GetEpoch() > q.Renew.ReportEpoch", "a.mu.called && p.GetEpoch() > q.Renew.ReportEpoch+1"}}},
	{"task-in-a-later-epoch", "internal/engine", "TestGoesOnInItsEpoch", []edit{{"internal/engine/hinted.go", "\tt.epoch = began", ""}}},
	{"hint-forgets-expiry", "internal/engine", "TestHintedPutExpires", []edit{{"internal/engine/hinted.go", "index.HintFlagsOf(op.Flags, op.Expiry), ch.epoch)", "index.HintFlagsOf(op.Flags, 0), ch.epoch)"}}},
	{"puts-to-one-head", "internal/engine", "TestHintedOfTwoGroups", []edit{{"internal/engine/hinted.go", "\t\t\tcase ch.conns[d] != nil && ch.conns[d] != up:\n\t\t\t\treturn false", ""}}},
	{"hint-age-stops", "internal/engine", "TestWordCacheAgeGoesRound", []edit{{"internal/engine/wordcache.go", "\tif int32(epoch-x.seen()) > 0 {", "if epoch > x.seen() {"}}},
	{"intent-of-lost-memory-believed", "index", "TestIntentOfLostMemory", []edit{{"index/intent.go", "\tif r.PG.Generation != m.in.Generation {", "if false {"}}},
	{"modified-with-a-manifest-flag", "index", "TestModifyOfChunks", []edit{{"index/modify.go", "\t\tc.Flags &^= layout.FlagManifest", ""}}},
	{"overtaken-settle-keeps-its-copy", "index", "TestSettleOvertaken", []edit{{"index/txn.go", "\t\t\treturn o.again(0) // the caller did not know the word before\n\t\t}\n\t}", "return o.again(0) // the caller did not know the word before\n\t\t}\n\t}\n\to.final.have = false"}}},
	{"overtaken-settle-leaks-nothing", "index", "TestSettleOvertaken", []edit{{"index/txn.go", "\t\to.leak()", "o.final.have = false"}}},
	{"second-reader-of-an-older-version-missed", "internal/gateway", "TestTrackingOlderReaders", []edit{{"internal/gateway/tracking.go", "\t\t\t\tt.items--\n\t\t\t\tt.tell(g, &c.box, x, key)", "t.items--\n\t\t\t\tt.tell(g, &c.box, x, key)\n\t\t\t\tbreak"}}},
	{"tracked-before-its-own-write", "internal/gateway", "TestTrackingUnwritten", []edit{{"internal/gateway/tracking.go", "	if u.err != nil || u.kind > read {", "if u.err != nil {"}}},
	{"own-write-forgets-the-read-behind-it", "internal/gateway", "TestTrackingOwnWrites", []edit{{"internal/gateway/tracking.go", "silent && k.read && db == k.db {", "silent && k.read && db != k.db {"}}},
	{"own-write-left-nothing", "internal/gateway", "TestTrackingOwnWrites", []edit{{"internal/gateway/events.go", "			left := u.got\n", "left := uint64(0)\n"}}},
	{"own-staged-write-left-what-was", "internal/gateway", "TestTrackingOwnWrites", []edit{{"internal/gateway/staged.go", "			k.version = ops[i].Item.Version\n", "_, _ = i, k\n"}}},
	{"own-staged-write-forgets-the-read-behind-it", "internal/gateway", "TestTrackingOwnWrites", []edit{{"internal/gateway/events.go", "	tracks := t.c.tracksReads()\n", "tracks := false\n"}}},
	{"tracked-in-database-0-alone", "internal/gateway", "TestTrackingOfDatabases", []edit{{"internal/gateway/tracking.go", "\tfor db := range g.o.Databases {", "for db := range g.o.Databases[:1] {"}}},
	{"wake-lost-at-timeout", "internal/gateway", "TestWakePassedOn", []edit{{"internal/gateway/block.go", "\tpass = pass || len(x.wake) > 0", ""}}},
	{"wake-lost-at-an-ending", "internal/gateway", "TestWakePassedOnByAnEnding", []edit{{"internal/gateway/block.go", "		pass = pass || woken\n", "_ = woken\n"}}},
	{"first-poll-as-late-as-the-last", "internal/gateway", "TestPollSoonForWhoeverComes", []edit{{"internal/gateway/block.go", "		if k.next.After(soon) {\n			k.next = soon\n		}\n", ""}}},
	{"polls-stay-far-apart", "internal/gateway", "TestPollSoonForWhoeverComes", []edit{{"internal/gateway/block.go", "		k.pause = minPollPause\n		if k.next", "		if k.next"}}},
	{"poller-not-told-of-who-comes", "internal/gateway", "TestPollSoonForWhoeverComes", []edit{{"internal/gateway/block.go", "	signal(s.early)\n	return x\n", "return x\n"}}},
	{"stream-that-went-waited-for", "internal/gateway", "TestStreamWentMeanwhile", []edit{{"internal/gateway/block.go", "\t\t\tk.version = unknownVersion", "k.version = 0"}}},
	{"deleted-key-is-as-watched", "internal/gateway", "TestWatchOfDeletedKeys", []edit{{"internal/gateway/staged.go", "t.err == nil && (k.version != x.version || x.touched())", "t.err == nil && (k.version != 0 && k.version != x.version || x.touched())"}}},
	{"poll-asks-one-namespace-for-all", "internal/gateway", "TestPollOfDatabases", []edit{{"internal/gateway/block.go", "s.g.dbs[keys[n].db].shared == s.g.dbs[keys[0].db].shared", "true || s == nil"}}},
	{"poll-goes-from-namespace-to-namespace", "internal/gateway", "TestPollOfDatabases", []edit{{"internal/gateway/block.go", "\tslices.SortFunc(keys, func(a, b *awaited) int { return a.db - b.db })\n", ""}}},
	{"poll-looks-under-the-name-of-another-database", "internal/gateway", "TestPollOfDatabases", []edit{{"internal/gateway/block.go", "Key: s.g.dbs[k.db].stored([]byte(k.name)), Typed: true}", "Key: s.g.dbs[keys[0].db].stored([]byte(k.name)), Typed: true}"}}},
	{"key-that-went-wakes-for-ever", "internal/gateway", "TestPollWakesOnce", []edit{{"internal/gateway/block.go", "\t\t\twake = k.version != 0\n\t\t\tk.version = 0\n", "wake = k.version != 0\n"}}},
	{"key-that-stays-wakes-for-ever", "internal/gateway", "TestPollWakesOnce", []edit{{"internal/gateway/block.go", "\t\t\t\tk.version, pause = o.Item.Version, minPollPause\n", "pause = minPollPause\n"}}},
	{"unblock-tells-before-the-outcome", "internal/gateway", "TestUnblockWaitsForTheOutcome", []edit{{"internal/gateway/block.go", "\t<-x.over\n\treturn x.taken == why\n", "return x.taken == why\n"}}},
	{"key-named-twice-is-waited-for-twice", "internal/gateway", "TestWaitsOnceForAKey", []edit{{"internal/gateway/block.go", "\t\tif slices.Contains(x.keys, k) {\n\t\t\tcontinue\n\t\t}\n", ""}}},
	{"waiter-counts-behind-its-queue", "internal/gateway", "TestSeenBeforeItWaits", []edit{{"internal/gateway/block.go", "\ts.clients.Add(1) // before its first try: a writer that misses it has written before that\n\ts.mu.Lock()\n\tdefer s.mu.Unlock()\n", "s.mu.Lock()\ndefer s.mu.Unlock()\ns.clients.Add(1)\n"}}},
	{"paused-waiter-takes", "internal/gateway", "TestPausedWaitersTakeNothing", []edit{{"internal/gateway/block.go", "\t\t\t\tmine = nil\n", ""}}},
	{"one-line-for-all-types", "internal/gateway", "TestLines", []edit{{"internal/gateway/block.go", "\t\tif l.name == name && l.all == all {", "\t\tif l.all == all {"}}},
	{"readers-stand-in-a-line", "internal/gateway", "TestLines", []edit{{"internal/gateway/block.go", "line: b.line, all: b.reads && b.line == \"\",", "line: b.line, all: false && b.reads,"}}},
	{"taken-for-who-has-gone", "internal/gateway", "TestTakenForWhoHasGone", []edit{{"internal/gateway/block.go", "\t\tcase again && c.link.PeerGone():\n", "\t\tcase again && !again && c.link.PeerGone():\n"}}},
	{"taken-while-the-client-goes", "internal/gateway", "TestTakenForWhoHasGone", []edit{{"internal/gateway/staged.go", "t.waited && c.link.PeerGone() && t.putBack():", "t.waited && !t.waited && t.putBack():"}}},
	{"put-back-is-told", "internal/gateway", "TestTakenForWhoHasGone", []edit{{"internal/gateway/block.go", "\tt.changes = nil\n\tt.tellOfWrites()\n\treturn true\n", "t.tellOfWrites()\nreturn true\n"}}},
	{"tracked-of-database-0-looked-at", "internal/gateway", "TestLooksAtVersions", []edit{{"internal/gateway/tracking.go", "\t\t\tif n.db == db {", "\t\t\tif n.db == 0 {"}}},
	{"long-value-has-no-version", "internal/gateway", "TestLooksAtVersions", []edit{{"internal/gateway/tracking.go", "\treturn op[0].Item.Version, op[0].Err\n", "return 0*op[0].Item.Version, op[0].Err\n"}}},
	{"unread-is-absent", "internal/gateway", "TestLooksAtVersions", []edit{{"internal/gateway/tracking.go", "\t\t\tcase err != nil:\n\t\t\t\tversion = unknownVersion\n", "\t\t\tcase err != nil:\n\t\t\t\tversion = 0\n"}}},
	{"unknown-version-is-another-one", "internal/gateway", "TestLooksAtVersions", []edit{{"internal/gateway/tracking.go", " || version == unknownVersion && k.version != unknownVersion {", " {"}}},
	{"key-that-is-being-read-compared", "internal/gateway", "TestLooksAtVersions", []edit{{"internal/gateway/tracking.go", "k == nil || !k.read || k.version == version", "k == nil || k.version == version"}}},
	{"tracking-on-again-forgets-what-is-cached", "internal/gateway", "TestTrackingOnAgain", []edit{{"internal/gateway/tracking.go", "\tif _, ok := x.conns[c]; !ok {\n", "\tif _, ok := x.conns[c]; ok || !ok {\n"}}},
	{"versions-looked-at-for-nobody", "internal/gateway", "TestChecksEnd", []edit{{"internal/gateway/tracking.go", "\t\tt.checking = false\n", "_ = t.checking\n"}}},
	{"invalidated-before-the-reply", "internal/gateway", "TestTrackedReplyComesFirst", []edit{{"internal/gateway/events.go", "\tc.out.cork()\n\tfor _, k := range keys {", "\tfor _, k := range keys {"}}},
	{"unread-is-of-version-0", "internal/gateway", "TestTrackedUnread", []edit{{"internal/gateway/events.go", "\t\t\t\tversion = unknownVersion\n\t\t\t}\n\t\t\tc.g", "\t\t\t\t_ = unknownVersion\n\t\t\t}\n\t\t\tc.g"}}},
	{"absent-key-made-and-gone-is-as-watched", "internal/gateway", "TestWatchTouched", []edit{{"internal/gateway/tx.go", "\t\t\tmade.Store(true)\n\t\t}\n\t}\n", "\t\t\t_ = made\n\t\t}\n\t}\n"}}},
	{"touched-too-late-for-one-key", "internal/gateway", "TestWatchTouched", []edit{{"internal/gateway/tx.go", "return x.touched() }) {", "return false }) {"}}},
	{"watched-key-seen-and-gone-is-as-watched", "internal/gateway", "TestWatchedKeysSeen", []edit{{"internal/gateway/tx.go", "\t\t\tx.made.Store(true)\n", "_ = x.made\n"}}},
	{"watched-key-seen-in-vain-by-a-condition", "internal/gateway", "TestWatchedKeysSeen", []edit{{"internal/gateway/tx.go", "\t\t\tthere = there && u.cond == client.IfAbsent && !u.stored\n", "there = false\n"}}},
	{"watched-key-seen-in-vain-by-an-update", "internal/gateway", "TestWatchedKeysSeen", []edit{{"internal/gateway/tx.go", "\t\t\tthere = there && !b.entries[u.first].change.missed\n", "there = false\n"}}},
	{"watch-is-never-over", "internal/gateway", "TestWatchedKeysSeen", []edit{{"internal/gateway/conn.go", "\t\tc.tx.end(c)\n\t\tc.forgetWatched()\n\t\tc.out.finish()\n", "\t\tc.tx.end(c)\n\t\tc.out.finish()\n"}}},
	{"transaction-caches-nothing-by-its-own-word", "internal/gateway", "TestTrackingInside", []edit{{"internal/gateway/staged.go", "\t\t\tlate.performed(c, t, q)\n", ""}}},
	{"transaction-tracks-one-key-too-late", "internal/gateway", "TestTrackingInside", []edit{{"internal/gateway/tx.go", " || q.cmd.setsTracking() {", " {"}}},
	{"written-before-it-was-entered", "internal/gateway", "TestTrackingInside", []edit{{"internal/gateway/latetracking.go", "\tc.g.checkVersions(names)\n", "_ = names\n"}}},
	{"caching-outlasts-its-transaction", "internal/gateway", "TestTrackingInside", []edit{{"internal/gateway/conn.go", "(c.caching != cachingAsUsual || cmd.batch != nil) &&", "c.caching != cachingAsUsual &&"}}},
	{"message-for-each-key-of-a-prefix", "internal/gateway", "TestBroadcastTogether", []edit{{"internal/gateway/tracking.go", "\t\t\t\tt.tell(g, box, x, names...)\n", "for _, name := range names {\nt.tell(g, box, x, name)\n}\n"}}},
	{"keys-of-a-prefix-out-of-order", "internal/gateway", "TestBroadcastTogether", []edit{{"internal/gateway/tracking.go", "\t\tslices.SortFunc(names, bytes.Compare)\n", ""}}},
	{"word-in-doubt-goes-on", "client", "TestTxnInDoubt", []edit{{"client/txn.go", "t.s.status.put(t.x, len(t.doubt) > 0)", "t.s.status.put(t.x, false)"}}},
	{"word-in-doubt-is-used-again", "client", "TestTxnInDoubt", []edit{{"client/txn.go", "if !placed && len(t.doubt) == 0 {", "if !placed {"}}},
	{"get-of-a-blind-write-is-a-condition", "client", "TestTxnBlindWrites", []edit{{"client/tx.go", " || tx.ops[i].Kind != OpKeep)", ")"}}},
}

// TestPatches switches on one mistake at a time; the test that is named for it must notice.
func TestPatches(t *testing.T) {
	if !*flagMutants {
		t.Skip("builds the tests of other packages: make mutants")
	}
	root := tree(t)
	for pkg, list := range byPackage() {
		t.Run(pkg, func(t *testing.T) {
			t.Parallel()
			mutants := ofTests(list)
			bin := build(t, root, pkg, mutants)
			var tests []string
			for _, p := range list {
				tests = append(tests, p.test)
			}
			if out, err := command(root, pkg, bin, "", strings.Join(tests, "|"), "-test.timeout", "2m").CombinedOutput(); err != nil {
				t.Fatalf("without a mistake: %v\n%s", err, out)
			}
			for i, m := range mutants {
				hunt(t, m, root, pkg, bin, list[i].test, "-test.timeout", "2m")
			}
		})
	}
	t.Cleanup(func() { t.Logf("%d mistakes that tests of their packages notice", len(byTest)) })
}

func byPackage() map[string][]tested {
	m := make(map[string][]tested)
	for _, p := range byTest {
		m[p.pkg] = append(m[p.pkg], p)
	}
	return m
}

func ofTests(list []tested) (out []mutant) {
	for _, p := range list {
		out = append(out, mutant{p.name, p.pkg + " " + p.test, p.edits})
	}
	return out
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
