package simtest

const (
	intents  = "index/intent.go"
	txns     = "index/txn.go"
	coordSim = "internal/simtest/txn_test.go"
)

// txnMutants are the mistakes in transactions. The searches look for them in scopes with transactions.
var txnMutants = []mutant{
	{"txn-intents-at-A-only", "transaction: decided when every intent is on every replica", []edit{{op,
		"	if o.Route.PG.Replicas == 1 {\n		return o.published()\n", "if o.Route.PG.Replicas == 1 || o.Kind == Prepare {\nreturn o.published()\n"}}},
	{"txn-acknowledged-at-A", "transaction: acknowledged, and settled, when the tail of the status word shows the verdict", []edit{{op,
		"	if o.Route.PG.Replicas == 1 {\n		return o.published()\n", "if o.Route.PG.Replicas == 1 || o.Kind == Decide {\nreturn o.published()\n"}}},
	{"txn-read-at-A", "transaction: readers read the status word at its tail", []edit{{intents,
		"Replica: r.PG.Reader(), Off: m.in.Off", "Replica: 0 * r.PG.Reader(), Off: m.in.Off"}}},
	{"txn-verdict-at-A", "transaction: a writer brings the status word up before it acts on the verdict", []edit{{intents,
		"	case v != layout.Undecided:\n		return o.sync(0, 1, stepSyncStatus)\n", "case v != layout.Undecided:\nreturn o.statusKnown()\n"}}},
	{"txn-overwritten", "transaction: nobody aborts without a CAS on the status word", []edit{{intents,
		"	o.begin()\n	o.add(Access{Verb: CAS, Space: Index, Off: m.in.Off,", "if true {\nm.verdict = layout.Abort\nreturn o.statusKnown()\n}\no.begin()\no.add(Access{Verb: CAS, Space: Index, Off: m.in.Off,"}}},
	{"txn-validated", "transaction: keys that are read get intents, too", []edit{{txns,
		"		o.Record = *r\n", "o.Record = *r\nif true {\nreturn o.finish(nil)\n}\n"}}},
	{"txn-parent-put-back", "transaction: an abort leaves a fresh copy", []edit{{txns,
		"	o.n, o.version = o.final.word, r.Version\n", "o.n, o.version = o.met.in.Parent, r.Version\n"}}},
	{"txn-not-settled", "transaction: the status word goes on when no intent is left", []edit{{coordSim,
		"	t.stage = index.Settle\n", "t.stage, t.reqs = index.Settle, nil\n"}}},
	{"txn-settle-lost-is-gone", "transaction: a settle that finds another word syncs the slot", []edit{{txns,
		"			return o.again(0) // the caller did not know the word before\n		}\n	}\n	return o.answerAfterSync(nil)\n", "return o.again(0)\n}\n}\nreturn o.finish(nil)\n"}}},
	{"txn-over-is-aborted", "transaction: a status word that went on says nothing of an intent", []edit{{intents,
		"		o.toParent()\n		return o.again(0) // the intent is gone from every replica\n", "v = layout.Abort\n"}}},
	{"txn-over-is-committed", "transaction: a status word that went on says nothing of an intent", []edit{{intents,
		"		o.toParent()\n		return o.again(0) // the intent is gone from every replica\n", "v = layout.Commit\n"}}},
	{"txn-refused-early", "transaction: a refused condition is answered when the tail shows why", []edit{{intents,
		"	if err := o.refuted(r); err != nil {\n		return o.answerAfterSync(err)\n", "if err := o.refuted(r); err != nil {\nreturn o.finish(err)\n"}}},
	{"txn-sync-copies-one", "transaction: a sync copies what an intent names", []edit{{op,
		"if layout.RecordFlags(prev[10])&layout.FlagIntent != 0 {", "if false {"}}},
	{"txn-intent-as-hint", "transaction: an intent is no hint", []edit{{txns,
		"		o.env.Forget(o) // an intent is no hint\n", "o.env.Remember(o, Hint{Word: o.n.WithState(layout.Frozen), Version: o.version, Shard: o.Route.Shard, Slot: o.slot})\n"},
		{op, "	if o.x.State() == layout.Frozen && !o.isSettled() {\n		return o.isFrozen()\n	}\n	if o.env.Deleting(o) {", "if o.env.Deleting(o) {"}}},
	{"txn-intent-as-parent", "transaction: an intent's parent is no intent", []edit{{txns,
		"if in.Parent = o.met.stands; in.Parent == 0 {", "if in.Parent = o.x.WithState(layout.Live); in.Parent == 0 {"}}},
	{"txn-parent-freed-early", "transaction: the record before is freed with the intent", []edit{{txns,
		"		if o.isSettled() {\n			o.unlink()\n		}\n", "o.unlink()\n"}}},
	{"txn-final-freed", "transaction: the record that an intent led to is freed once", []edit{{intents,
		"w.State() != layout.Live || w == o.n || o.Kind", "w.State() != layout.Live || o.Kind"}}},
	{"txn-intent-is-a-move", "transaction: an intent keeps nobody from inserting beside it", []edit{{intents,
		"return slices.Contains(o.met.intents, w) }", "return len(o.met.intents) > 1000 && slices.Contains(o.met.intents, w) }"}}},
	{"txn-overturned", "transaction: a verdict stands", []edit{{txns,
		"if v, over := t.Found.Of(t.Status.Seq); over || v != layout.Undecided {", "if v, over := t.Found.Of(t.Status.Seq); over && v != layout.Undecided {"}}},
	{"txn-reused-in-doubt", "transaction: the status word goes on when nothing of a transaction can land any more", []edit{{coordSim,
		"	if !t.doubt {\n		t.x.busy", "if true {\nt.x.busy"}}},
	{"txn-intent-moved", "transaction: no intent moves", []edit{{work, "	if r.Flags&layout.FlagIntent != 0 {\n		it.intent = true // it stays as it is\n", "if false {\nit.intent = true\n"}}},
	{"txn-recall-skips", "transaction: a recall waits for what intents name", []edit{{work, "&(layout.FlagManifest|layout.FlagIntent) != 0 {", "&layout.FlagManifest != 0 {"}}},
	{"txn-aborted-unpublished", "transaction: who aborts brings the status word up before going on", []edit{{intents,
		"	m.verdict = layout.Abort\n	// Nobody acts on what the tail of the status word does not show.\n	return o.sync(0, 1, stepSyncStatus)\n", "m.verdict = layout.Abort\nreturn o.statusKnown()\n"}}},
}
