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
	{"near-shares-a-read-from-before-a-write", "client/near", "TestSharingAfterWrite", []edit{{"client/near/near.go", "if f.writes == s.writes && s.writing == 0 && c.o.Now()", "if c.o.Now()"}}},
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
