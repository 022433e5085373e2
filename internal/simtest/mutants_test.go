package simtest

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
)

var (
	flagMutants = flag.Bool("mutants", false, "run TestMutants and TestPatches: build with deliberate mistakes, "+
		"which must be noticed")
	flagPatience = flag.Duration("patience", time.Minute, "how long the searches look for each mistake")
)

// The places in which most mistakes are made.
const (
	op     = "index"
	evict  = "index/repair/evict.go"
	work   = "index/repair"
	env    = "internal/engine/env.go"
	lane   = "internal/engine"
	hinted = "internal/engine/hinted.go"
	core   = "internal/engine/core.go"
)

// mutants are the mistakes in the protocol proper; those in how memory goes home are patches.
var mutants = []mutant{
	{"empty-is-zero", "EMPTY carries a nonce", []edit{{op, "o.n = o.x.Delete(o.env.Session())", "o.n = 0"}}},
	{"negative-from-cache", "an EMPTY under a cached word proves no absence", []edit{{op,
		"	// The word just read is the next hint; it proves nothing about absence.\n",
		"if w.State() == layout.Empty {\nreturn o.absent()\n}\n"}}},
	{"fp-is-proof", "a matching fingerprint is no matching key", []edit{{op,
		"case err == nil && bytes.Equal(rec.Key, o.Key):\n\t\t\treturn s,", "case err == nil:\nreturn s,"}}},
	{"lost-put-is-done", "a blind PUT whose CAS lost is retried", []edit{{op,
		"	o.env.Forget(o)\n	switch c.State() {\n",
		"o.env.Forget(o)\nif o.Kind == Put && o.Cond == Always {\nreturn o.finish(nil)\n}\nswitch c.State() {\n"}}},
	{"no-insert-lock", "an insert holds the group's lock", []edit{{op,
		"	if !o.locked {\n		o.addLock(o.home())\n",
		"o.locked, o.lock, o.lockOff = true, layout.MakeLock(o.env.Session(), o.env.Stamp()), " +
			"o.home()+layout.GroupLockOff\nif !o.locked {\no.addLock(o.home())\n"}}},
	{"break-lock-early", "a lock is broken only when its owner's fence is confirmed", []edit{{op,
		"(after != stepLockGroup || !o.OwnerFenced || !sameMemory", "(after != stepLockGroup || !sameMemory"}}},
	{"ver-stays", "a place's next life has another ver", []edit{{env,
		"	m.take(p.Units)\n	return p.Unit, p.Ver, code, true", "m.take(p.Units)\nreturn p.Unit, 0, code, true"}}},
	{"reuse-now", "a place is reused only when the reclaim minimum has passed its unlink", []edit{{
		"internal/engine/memory.go", "	m.limbo.Add(p, l.core.Unlinks())\n	m.give(p.Units)\n",
		"m.cache.Free(p)\n"}}},
	{"unlock-lost-with-second", "what was off the path on a second queue pair is repeated by the first", []edit{{lane,
		"\t\t\tm.noWait = append(m.noWait, o)\n", "_ = m\n"}}},
	{"reuse-at-min", "the minimum has to be greater, not equal",
		[]edit{{core, "if r.epoch < minEpoch {", "if r.epoch <= minEpoch {"}}},
	{"reply-after", "only the E of a reply to a renewal sent after the unlink counts", []edit{{core,
		"	c.mu.replies = append(c.mu.replies, reply{seq, epoch})\n",
		"c.mu.replies = append(c.mu.replies, reply{c.sendSeq.Load() + 1, epoch})\n"}}},
	{"answered-not-in-flight", "an operation that answered (deadline) holds back the reclaim minimum until its verbs " +
		"are over", []edit{{lane,
		"		if !ok || t.epoch < epoch {\n", "if t.orphan != nil {\ncontinue\n}\nif !ok || t.epoch < epoch {\n"}}},
	{"no-sync-before-insert", "the group's other slots are synced before the insert's CAS", []edit{
		{op, "	if o.Route.PG.tail() != 0 {\n		p := layout.Group(o.groups[1])\n",
			"if false {\np := layout.Group(o.groups[1])\n"},
		{op, "	if o.Route.PG.tail() != 0 {\n		a, p := layout.Group(o.groups[2])",
			"if false {\na, p := layout.Group(o.groups[2])"}}},
	{"answer-before-sync", "\"conflict\" and \"exists\" wait for P", []edit{{op,
		"	o.need().answer = err\n	return o.sync(o.slot, 1, stepDone)\n", "return o.finish(err)\n"}}},
	{"ack-before-publish", "a write is acknowledged when P has it",
		[]edit{{op, "	o.pubK = 1\n	return o.publishStage()\n", "return o.published()\n"}}},
	{"limbo-before-publish", "limbo starts when P has swung", []edit{{op,
		"	if o.Route.PG.Replicas == 1 {\n		return o.published()\n",
		"o.unlink()\nif o.Route.PG.Replicas == 1 {\nreturn o.published()\n"}}},
	{"crc-proves", "sync compares the record with its predecessor's copy", []edit{{op,
		"	same := bytes.Equal(mine[:n], prev[:n])\n", "_, err := layout.ParseRecord(mine)\nsame := err == nil || " +
			"n < 0\n"}}},
	{"empty-is-mine", "an EMPTY word that is found is not taken for the one that was to be left",
		[]edit{{op, "return o.deletes() || o.Kind == Settle &&", "return o.Kind == Settle &&"}}},
	{"insert-pair", "two READs of a group are no expectation and new word",
		[]edit{{op, "		return o.sync(s, 1, stepSyncGroup)\n",
			"o.begin()\no.add(Access{Verb: CAS, Space: Index, Replica: o.Route.PG.tail(), Off: o.slotOff(s),\n" +
				"Expect: uint64(layout.Group(o.groups[1]).Slot(int(s))), New: " +
				"uint64(layout.Group(o.groups[0]).Slot(int(s)))})\n" +
				"return o.post(stepSyncGroup)\n"}}},
	{"helper-blind", "a helper's CAS follows a look at the record", []edit{{op,
		"		case !b.Readable():\n			return o.syncCAS(false)\n",
		"case true:\nreturn o.syncCAS(false)\n"}}},
	{"publish-goes-on", "publish goes on with x->n only while each stage took exactly that", []edit{{op,
		"if f := layout.Word(o.theCAS(o.pubK).Found); f != o.x {", "if false {"}}},
	{"word-before-record", "a replica gets the record before its word, in one chain", []edit{{op,
		"	if o.havePlace {\n		o.addRecord(o.pubK + 1)\n	}\n	o.Accesses = way.Publish(o.Accesses, " +
			"o.pubK)\n",
		"o.Accesses = way.Publish(o.Accesses, o.pubK)\nif o.havePlace {\no.addRecord(o.pubK + 1)\n}\n"}}},
	{"record-behind-the-tail", "every replica gets the record before its word, not the tail alone", []edit{{op,
		"	if o.havePlace {\n		o.addRecord(o.pubK + 1)\n",
		"if o.havePlace && o.pubK == o.Route.PG.tail() {\no.addRecord(o.pubK + 1)\n"}}},
	{"hinted-word-before-record", "a PUT without a task brings the record before its word", []edit{{hinted,
		"x.way.Publish(x.way.Write(l.hintAccesses[:0], x.rec, k, k+1), k)",
		"x.way.Write(x.way.Publish(l.hintAccesses[:0], k), x.rec, k, k+1)"}}},
	{"hinted-publish-undecided", "a PUT without a task is published if the head took it", []edit{{hinted,
		"		if binary.LittleEndian.Uint64(ch.cells(x)) == uint64(x.way.X) {\n", "if true {\n"}}},
	{"hinted-decided-given-up", "a PUT that the head has decided goes on, whatever is in its way", []edit{{hinted,
		"x.shown > 0 && x.shown < x.pg.Replicas && !l.goOn(x, ch.began) {", "false && !l.goOn(x, ch.began) {"},
		{hinted, "	if x.shown > 0 && x.shown < x.pg.Replicas {\n		return false // decided",
			"if false {\nreturn false // decided"}}},
	{"record-first", "a cached GET reads the slot first, and words learnt at A are no hints", []edit{
		{op, "	x[0].set(Read, Index, p, h.Off, word, 0, 0)\n	x[1].set(Read, Heap, p, h.X.Off(), rec, 0, 0)",
			"x[1].set(Read, Index, p, h.Off, word, 0, 0)\nx[0].set(Read, Heap, p, h.X.Off(), rec, 0, 0)"},
		{op, "	o.Version, o.atA = r.Version, true\n	// Nobody learns",
			"o.Version, o.atA = r.Version, true\no.env.Remember(o, Hint{Word: o.x, Version: r.Version, Shard: " +
				"o.Route.Shard, Slot: o.slot, Flags: HintFlagsOf(r.Flags, r.Expiry)})\n// Nobody learns"}}},
	{"part-any-slot", "chunks that are known from before count if the slot, read before them, leads to them",
		[]edit{{op, "return was && wordAt(o.word(0)) != o.x", "return false && was"}}},
	// Modulo 4, so that it repeats soon.
	{"ver-is-epoch", "ver counts lives", []edit{{env,
		"	m.take(p.Units)\n	return p.Unit, p.Ver, code, true",
		"m.take(p.Units)\nreturn p.Unit, uint16(t.lane.core.epoch.Load() % 4), code, true"}}},
	{"no-age-bound", "a word is a hint for 1,000 epochs only", []edit{{env,
		"uint32(l.core.epoch.Load()), layout.WordLifeEpochs)", "uint32(l.core.epoch.Load()), 1<<32-1)"}}},
	{"retry-same-word", "a word that may have been seen is not posted again", []edit{{op,
		"		o.retire()\n		o.written = 0\n		return o.again(0)\n",
		"o.written = 0\nreturn o.again(0)\n"}}},
	{"join-no-ack", "a joiner is filled when every session knows of it", []edit{{"server/lead/view.go",
		"return v.floorOf(pg).acked < j.Barrier", "return false"}}},
	{"thaw-early", "a frozen placement group waits until every session has quiesced", []edit{{"server/lead",
		" || p.floorOf(pg).quiesced < v {", " {"}}},
	{"join-skips-empty", "a joiner gets EMPTY words, too", []edit{{"index/repair/copies.go",
		"	list := o.segmentDiffers()\n	o.Work.Synced", "list := slices.DeleteFunc(o.segmentDiffers(), func(r " +
			"wordRef) bool {\n" +
			"i := int((r.base - o.Work.Off) / layout.GroupSize)\n" +
			"return r.slot != index.HeaderSlot && o.groupOf(i, 0).Slot(int(r.slot)).State() == " +
			"layout.Empty\n})\no.Work.Synced"}}},
	{"words-torn-in-segments", "words are whole in what is read of the index, segments too (I2, I12)",
		[]edit{{"rdma/sim/qp.go",
			"return w.value || w.bytes > wholeBytes\n", "return w.value || w.bytes > 4<<10\n"}}},
	{"up-order", "of many words that are brought up the one behind is read first, too", []edit{
		{work, "o.readLags(index.StepReadBehind, k, lags, func(l *lag, w layout.Word) { l.q = w }",
			"o.readLags(index.StepReadBehind, k-1, lags, func(l *lag, w layout.Word) { l.b = w }"},
		{work, "o.readLags(index.StepReadBefore, k-1, lags, func(l *lag, w layout.Word) { l.b = w }",
			"o.readLags(index.StepReadBefore, k, lags, func(l *lag, w layout.Word) { l.q = w }"}}},
	{"up-crc-proves", "rejoins compare the records of many words with their predecessor's copies, too", []edit{{work,
		"				if l.prev = l.prev[:n]; bytes.Equal(l.mine[:n], l.prev) {\n",
		"l.prev = l.prev[:n]\nif _, err := layout.ParseRecord(l.mine); err == nil {\n"}}},
	{"up-no-record", "many words are brought up with their records", []edit{{work,
		"		if l.prev != nil {\n			o.Add(", "if l.prev != nil {\nl.prev = nil\n}\nif l.prev != nil " +
			"{\no.Add("}}},
	{"joiner-any-empty", "a key is absent when a joiner and the copy before it show the same EMPTY word", []edit{{op,
		"	if s, hides := o.joinerHides(g); hides {\n", "if s, hides := o.joinerHides(g); false && hides {\n"}}},
	{"read-joiner", "no reader believes a joiner alone",
		[]edit{{"internal/engine/view.go", "Joining: p.GetJoining(),", "Joining: false,"}}},
	{"follow-moved-at-a", "MOVED is followed when P shows it", []edit{{op,
		"		// Nobody follows it before the tail shows it.\n		return o.sync(o.slot, 1, stepStart)\n",
		"o.need()\nreturn o.goChild(true, o.group(0), o.home())\n"}}},
	{"follow-split-at-a", "SPLIT is followed when P shows it", []edit{{op,
		"		// Nobody follows it before the tail shows it.\n		return o.sync(HeaderSlot, 1, stepSplitSeen)\n",
		"return o.splitSeen()\n"}}},
	{"insert-half-moved", "no insert into a group whose move is not over",
		[]edit{{op, "if o.moveUnfinished(g) {\n", "if false {\nreturn 0\n"}}},
	{"insert-in-child", "a child takes a key when the key's group has moved",
		[]edit{{op, "if o.child != 0 && !o.sureChild {\n		// Only", "if false {\n		// Only"}}},
	{"mover-forgets-deleted", "a key of the moved set that was deleted at A before it was frozen is gone from P " +
		"before SPLIT", []edit{{work,
		"		o.work.behind = o.slotsBehind()\n		return o.readMoving()\n", "return o.readMoving()\n"}}},
	{"copy-before-frozen", "the child gets a word when P shows it FROZEN", []edit{{work,
		"		return o.setMoved(o.setSplit)\n	}\n	w.swings = w.swings[:0]\n	for _, it := range w.mine() " +
			"{\n		// A took exactly",
		"return o.setMoved(o.setSplit)\n}\nif true {\nreturn o.readChild()\n}\nw.swings = w.swings[:0]\nfor _, it := " +
			"range w.mine() {\n// A took exactly"}}},
	{"moved-before-copy", "MOVED follows the copy", []edit{{work, "	return o.publishSwings(o.readChild)\n",
		"return o.publishSwings(func() index.Action { return o.setMoved(o.readChild) })\n"}}},
	{"child-only-at-a", "the child's word is set on every replica", []edit{
		{work, "return o.syncWords(half, o.linkChild)", "return o.syncWords(half[:0], o.linkChild)"},
		{work, "return o.swingA(func() index.Action { return o.publishSwings(linked) })", "return o.swingA(linked)"}}},
	{"grow-to-one", "a key goes to the segment of the larger array that its hash chooses", []edit{{work,
		"	return uint32(home/layout.SegmentSize) % o.Parent().Fan()\n", "_ = home\nreturn 0\n"}}},
	{"scan-one-grown", "a scan looks into every segment that takes what was in one", []edit{{op,
		"p.base/segmentSlots < p.fan {", "p.base == 0 && p.fan > 0 {"}}},
	{"clean-early", "MOVED is cleared when every session has acknowledged", []edit{{"server/lead/view.go",
		"return v.floor(j.NamespaceId).acked < j.Barrier", "return j.Kind != dirpb.JobKind_JOB_CLEAN && " +
			"v.floor(j.NamespaceId).acked < j.Barrier"}}},
	{"resume-publish", "no publish is carried over into a new view", []edit{{op,
		"		return o.resolve()\n	}\n	return o.sync(o.slot, 1, after)\n",
		"return o.resolve()\n}\nreturn o.publish()\n"}}},
	{"parked-keeps-lock", "an operation that waits for a map holds no lock", []edit{{op,
		"	if o.lock != 0 {\n		o.addUnlock()\n	}\n	return a\n",
		"if o.lock != 0 && a != Refresh {\no.addUnlock()\n}\nreturn a\n"}}},
	{"resumed-is-new", "a decided operation counts under the map that it was posted under", []edit{{op,
		" || o.lock != 0 || o.deciding || o.won || o.spread\n", " || o.lock != 0\n"}}},
	{"hints-survive", "hints into what moved are void",
		[]edit{{env, "case uint16(h.Shard) == uint16(o.Route.Shard):", "case true:"}}},
	{"recall-a-only", "a recall syncs what replicas still show", []edit{{work,
		"	// A replica may still show what is gone at A, and that lies in the extent.\n",
		"if true {\nreturn o.finishWork()\n}\n"}}},
	{"recall-p-only", "a recall moves what A shows", []edit{{work,
		"		g := o.image(0, 0)\n		w.items = nil\n",
		"g := o.image(0, o.Route.PG.Replicas-1)\nw.items = nil\n"}}},
	{"recall-no-wait", "a recalled extent is free one epoch after the scan", []edit{
		{"server/lead", "if x.Scanned && least > x.Epoch {", "if x.Scanned {"},
		{"server/lead", "Epoch: epoch, MinEpoch: least,", "Epoch: x.Epoch, MinEpoch: x.Epoch + 1,"},
		{"server/lead",
			"	epoch, least := p.l.Epochs()\n	for _, x := range p.s.Heap(pg.Id).GetRecalls() {",
			"for _, x := range p.s.Heap(pg.Id).GetRecalls() {"}}},
	{"recall-no-ack", "a recall waits for acknowledgements", []edit{{"server/lead/view.go",
		"return v.floor(j.NamespaceId).acked < j.Barrier", "return j.Kind != dirpb.JobKind_JOB_RECALL && " +
			"v.floor(j.NamespaceId).acked < j.Barrier"}}},
	{"silent-acked", "a silent session has acknowledged when it is fenced, not before", []edit{{"server/lead/view.go",
		"case x == nil || x.n < all || v.lapsed[namespace]:", "case x == nil || v.lapsed[namespace]:"}}},
	{"version-clash", "versions carry a discriminator", []edit{{lane, "disc: uint64(c.opts.Discriminator)<<4 | " +
		"uint64(id)}", "disc: 0}"}}},
	{"evict-unpublished", "an eviction ends when P shows it",
		[]edit{{evict, "			return o.publishSwings(func() index.Action {\n				o.unlinkFreed()\n",
			"return func(then func() index.Action) index.Action { return then() }(func() index.Action " +
				"{\no.unlinkFreed()\n"}}},
	{"evict-frees-first", "an evicted place goes to limbo after its publish",
		[]edit{{evict, "			return o.publishSwings(func() index.Action {\n				o.unlinkFreed()\n",
			"o.unlinkFreed()\nreturn o.publishSwings(func() index.Action {\no.unlinkFreed()\n"}}},
	{"evict-at-tail", "A decides evictions", []edit{
		{evict, "		return o.emptyNow(list, o.deleted, func() index.Action {\n",
			"a := o.emptyNow(list, o.deleted, func() index.Action {\n"},
		{evict, "				return o.finishWork()\n			})\n		})\n	})\n",
			"return o.finishWork()\n})\n})\nfor i := range o.Accesses {\no.Accesses[i].Replica = o.Route.PG.Replicas " +
				"- 1\n}\nreturn a\n})\n"}}},
	{"evict-frozen", "FROZEN words are not evicted", []edit{{evict, "if x.State() != layout.Live " +
		"{\n				continue\n			}\n			if o.Work.Only",
		"if !x.Readable() {\ncontinue\n}\nif o.Work.Only"}}},
	{"evict-unproven", "an access word proves no expiry",
		[]edit{{evict, "if e.Access.Expired(now) && !e.Expired {", "if false {"}}},
	{"unchanged-by-place", "\"unchanged\" goes by the whole word",
		[]edit{{op, "case h.Word == o.x && h.Word.Readable():",
			"case h.Word == o.x && h.Word.Readable(), h.Word.Unit() == o.x.Unit() && h.Word.Ver() == o.x.Ver():"}}},
	{"gone-from-check", "an EMPTY in the slot that held the version proves no absence", []edit{{op,
		"	case h.Word.Readable() && h.Word.FP() == layout.FP(o.Hash)", "case h.Word.State() == " +
			"layout.Empty:\nreturn o.absent()\ncase h.Word.Readable() && h.Word.FP() == layout.FP(o.Hash)"}}},
	{"unchanged-for-ever", "the slot says nothing of a record that expires", []edit{{op,
		"{ return h.Version != 0 && h.Flags&HintExpires == 0 }", "{ return h.Version != 0 }"}}},
	{"no-fence", "a memory node confirms a fence that it has made", []edit{{"internal/simtest/node_test.go",
		"		w.fenceAll(n, c.fence)\n		n.barred[c.fence] = true\n", ""}}},
	{"apart-not-cleared", "what READs have left in a caller's memory is cleared before the answer",
		[]edit{{"internal/engine/value.go", "clear(t.given[n:])", "_ = n"}}},
	{"apart-not-detached", "nothing is written to a caller's memory after the answer",
		[]edit{{"internal/engine/task.go", "		t.detach()\n		t.settleGiven()\n", "t.settleGiven()\n"}}},
	{"apart-no-slot-check", "a value in a caller's memory counts if the slot holds the word", []edit{{op,
		"	case w == o.x && w.Readable():\n		if o.gotApart(&r) {", "case true:\nif o.gotApart(&r) {"}}},
	{"draft-survives-recall", "a value on its way is void when a place of it is recalled",
		[]edit{{"index/draft.go", "		if pg.IsRecalled(c.Unit) {\n", "if false {\n"}}},
	{"draft-in-another-epoch", "a value is linked in the placement group epoch of its chunks", []edit{
		{"index/draft.go", "d.mu.void || pg.Epoch != d.mu.at.Epoch", "d.mu.void"},
		{"index/draft.go", "samePlaces(at, pg) && at.Epoch == pg.Epoch)", "samePlaces(at, pg))"}}},
	{"draft-linked-and-given-back", "the places of a value that is linked are given back by nobody else", []edit{
		{"index/draft.go", "	d.mu.void, d.mu.chunks = true, nil\n	return to, d.mu.id, true\n",
			"d.mu.void = true\nreturn to, d.mu.id, true\n"}}},
	{"no-lease", "nothing is answered without a lease",
		[]edit{{lane, "return l.core.LeaseValid() }", "return true }"}}},
}

// near names a scope for each mistake that a search of all scopes finds after many seconds only.
var near = map[string]string{
	"apart-no-slot-check":         "watch-reuse-all",
	"apart-not-cleared":           "apart",
	"apart-not-detached":          "apart-r2",
	"draft-in-another-epoch":      "stream-loss",
	"draft-linked-and-given-back": "stream",
	"draft-survives-recall":       "stream-recall",
	"gc-before-fence":             "tier-fence",
	"hinted-decided-given-up":     "apart-r2",
	"lost-and-not-dropped":        "tier-gone",
	"part-any-slot":               "stream-reuse",
	"pins-of-another-key":         "pins-slot",
	"scan-one-grown":              "scan-grow",
	"spec-by-predecessor":         "spec-r3",
	"spec-copy-keeps-parent":      "spec-r2-migrate",
	"spec-expect-tail":            "spec-r2-loss",
	"spec-late-stray-forgotten":   "spec-r3-head",
	"spec-lost-is-lost":           "spec-r3-head",
	"txn-joiner-has-chunks":       "txn-r2-rejoin-long",
	"txn-overturned":              "txn-r3-loss",
	"txn-recall-skips-chunks":     "txn-long-recall",
	"txn-seq-restarts":            "txn-r2-heirs-restart",
	"txn-sweep-frees-what-stays":  "txn-long-recall",
	"txn-sync-without-chunks":     "txn-long-r3-loss",
	"unlock-lost-with-second":     "bulk",
	"up-order":                    "beside-r3",
	"view-not-counted":            "watch-zombie",
	"view-without-lease":          "watch-zombie",
	"words-torn-in-segments":      "scan-grow",
}

// TestMutants switches on one mistake in the protocol at a time; the searches must notice
// every one.
func TestMutants(t *testing.T) {
	if !*flagMutants {
		t.Skip("builds a program and searches for minutes: make mutants")
	}
	root := tree(t)
	all := slices.Concat(patches, mutants, txnMutants, restartMutants, rejoinMutants, besideMutants, watchMutants,
		hasMutants, pinsMutants, mirrorMutants, tierMutants, specMutants)
	bin := build(t, root, "internal/simtest", all)
	if out, err := command(root, "internal/simtest", bin, "", "TestScenarios").CombinedOutput(); err != nil {
		t.Fatalf("without a mistake: %v\n%s", err, out)
	}
	for _, m := range all {
		args := []string{"-hunt", flagPatience.String()}
		if strings.HasPrefix(m.rule, "H") {
			args = append(args, "-hunt-in", "home")
		}
		for _, scopes := range []string{"restart", "rejoin", "beside", "watch", "has", "pins", "mirror", "tier",
			specPrefix} {
			if strings.HasPrefix(m.rule, scopes) {
				args = append(args, "-hunt-in", scopes)
			}
		}
		if strings.HasPrefix(m.rule, "transaction") {
			args = append(args, "-hunt-in", txnPrefix)
		}
		if strings.HasPrefix(m.name, "txn-chain") {
			args = append(args, "-hunt-in", "txn-chain")
		}
		if scope := near[m.name]; scope != "" {
			args = append(args, "-hunt-in", scope)
		}
		hunt(t, m, root, "internal/simtest", bin, "TestHunt", args...)
	}
	t.Cleanup(func() {
		t.Logf("%d mistakes in the protocol, of which %d are in how memory goes home", len(all), len(patches))
	})
}

// TestMutantsApply: mutants whose text is not in the tree any more show nothing.
func TestMutantsApply(t *testing.T) {
	root := tree(t)
	lists := [][]mutant{slices.Concat(patches, mutants, txnMutants, restartMutants, rejoinMutants, besideMutants,
		watchMutants, hasMutants, pinsMutants, mirrorMutants, tierMutants, specMutants)}
	for _, list := range byPackage() {
		lists = append(lists, ofTests(list))
	}
	for _, list := range lists {
		if _, err := overlay(root, list); err != nil {
			t.Error(err)
		}
	}
}

// TestOverlay builds mutants of a module of its own, whose functions have every kind of parameter.
func TestOverlay(t *testing.T) {
	root := t.TempDir()
	for file, text := range map[string]string{
		"go.mod": "module m\n\ngo 1.24\n",
		"m.go": `package m

type T[K comparable] struct{ n int }

func (t *T[K]) Add(_ K, ns ...int) (sum int, err error) {
	for _, n := range ns {
		sum += n
	}
	return t.n + sum, nil
}

func pick[K, V any](k K, _ V) K { return k }

func (T[K]) none() { set = 0 }

var set int

func do(n, m int, _ func(int) int) { set = n - m }
`,
		"m_test.go": `package m

import "testing"

func TestM(t *testing.T) {
	T[string]{}.none()
	do(3, 2, nil)
	if n, _ := (&T[string]{1}).Add("", 1, 2); n != 4 || pick(5, "") != 5 || set != 1 {
		t.Fatal("TestM notices", n, set)
	}
}
`} {
		if err := os.WriteFile(filepath.Join(root, file), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	good := []mutant{
		{"twice-edited", "r", []edit{{"m.go", "sum += n", "sum -= n"}, {"m.go", "t.n + sum", "sum"}}},
		{"another-copy", "r", []edit{{"m.go", "sum += n", "sum += 2 * n"}}},
		{"generic", "r", []edit{{"m.go", "{ return k }", "{\nvar zero K\nreturn zero\n}"}}},
		{"nothing-returned", "r", []edit{{"m.go", "set = n - m", "set = m"}}},
		{"panics", "r", []edit{{"m.go", "set = 0", "panic(0)"}}},
	}
	bin := build(t, root, ".", good)
	if out, err := command(root, ".", bin, "", "TestM").CombinedOutput(); err != nil {
		t.Fatalf("without a mistake: %v\n%s", err, out)
	}
	for _, m := range good {
		hunt(t, m, root, ".", bin, "TestM")
	}
	for want, m := range map[string]mutant{
		"0 times, want once":      {"m", "r", []edit{{"m.go", "sum *= n", ""}}},
		"2 times, want once":      {"m", "r", []edit{{"m.go", "return t.n", "return 0"}, {"m.go", "return", ""}}},
		"after the edits before":  {"m", "r", []edit{{"m.go", "sum += n", "sum++"}, {"m.go", "sum += n", "sum--"}}},
		"not inside one function": {"m", "r", []edit{{"m.go", "var set int", "var set string"}}},
		"no such file":            {"m", "r", []edit{{"n.go", "", ""}}},
		"with its mutants":        {"m", "r", []edit{{"m.go", "sum += n", "sum +="}}},
		"of its own":              {"panics", "r", []edit{{"m.go", "sum += n", ""}}},
	} {
		if _, err := overlay(root, append(good[4:5:5], m)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func tree(t *testing.T) string {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// command runs a test of a program made by build, with a mistake.
func command(root, pkg, bin, mutant, test string, args ...string) *exec.Cmd {
	c := exec.Command(bin, append([]string{"-test.run", "^(" + test + ")$"}, args...)...)
	c.Dir, c.Env = filepath.Join(root, pkg), append(os.Environ(), mutantEnv+"="+mutant)
	if mutant != "" {
		c.Env = append(c.Env, testutil.LimitEnv+"=12s")
	}
	return c
}

// hunt sees that a test fails with a mistake switched on.
func hunt(t *testing.T, m mutant, root, pkg, bin, test string, args ...string) {
	t.Run(m.name, func(t *testing.T) {
		t.Parallel()
		began := time.Now()
		out, err := command(root, pkg, bin, m.name, test, args...).CombinedOutput()
		if err == nil || !bytes.Contains(out, []byte(test)) {
			t.Fatalf("%s: not noticed in %v: %v\n%.300s", m.rule, time.Since(began), err, out)
		}
		t.Logf("%s: noticed after %v: %.300s", m.rule, time.Since(began).Round(time.Millisecond), lines(out))
	})
}
