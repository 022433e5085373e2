package simtest

const tierFile = "index/tier.go"

// tierMutants are mistakes about values in the tier.
var tierMutants = []mutant{
	{"stub-before-durable", "tier: the object is kept before a stub names it", []edit{{tierFile,
		"		return Store\n", "t.To = []layout.ObjectAt{{Volume: 1, At: 1 << 20}}\nreturn o.putStub()\n"}}},
	{"promote-overwrites-newer", "tier: who loses gives up", []edit{{tierFile,
		"	if o.Kind.isTiered() && !o.reading.drops {\n", "if o.Kind == Promote && o.theCAS(0).Found>>62 == 1 && " +
			"!o.reading.drops {\no.x = layout.Word(o.theCAS(0).Found)\no.begin()\nreturn o.casSlot()\n}\n" +
			"if o.Kind.isTiered() && !o.reading.drops {\n"}}},
	{"demote-blind", "tier: who loses gives up", []edit{{tierFile,
		"	if o.Kind.isTiered() && !o.reading.drops {\n", "if o.Kind == Demote && o.theCAS(0).Found>>62 == 1 && " +
			"!o.reading.drops {\no.x = layout.Word(o.theCAS(0).Found)\no.begin()\nreturn o.casSlot()\n}\n" +
			"if o.Kind.isTiered() && !o.reading.drops {\n"}}},
	{"demote-what-was-stored-before", "tier: a stub names the object of its record", []edit{{tierFile,
		"	case r.Version != t.rec.Version:\n", "	case r.Version == 0:\n"}, {tierFile,
		"o.Tiered.To != nil && h.Version == o.Tiered.rec.Version:", "o.Tiered.To != nil:"}}},
	{"promote-into-intent", "tier: nothing is put in place of an intent", []edit{{"index/lookup.go",
		"if r.Flags&layout.FlagIntent != 0 && o.Kind.isTiered() {", "if r.Flags&layout.FlagIntent == 1 {"}}},
	{"gc-looks-at-a-only", "tier: the tail shows what the head does", []edit{{"index/insert.go",
		"	if o.Route.PG.tail() != 0 {\n		p := layout.Group(o.groups[1])",
		"if o.Kind != Locate && o.Route.PG.tail() != 0 {\np := layout.Group(o.groups[1])"}}},
	{"gc-ignores-own-pending", "tier: what may name an object is over", []edit{{"internal/simtest/tier_test.go",
		"if t := r.t.Op.Tiered; t != nil && slices.Contains(", "if t := r.t.Op.Tiered; t == nil && slices.Contains("},
		{"internal/simtest/tier_test.go", "[]*running{c.run, c.orphans} {\n" +
			"			for _, r := range list {",
			"[]*running{} {\nfor _, r := range list {"}}},
	{"gc-before-fence", "tier: a former session is fenced", []edit{{"internal/simtest/tier_test.go",
		"		if w.fenced(c) {\n			continue\n		}\n" +
			"		for _, list := range [][]*running{c.run, c.orphans} {\n" +
			"			for _, r := range list {",
		"if w.fenced(c) || c.life == crashed {\ncontinue\n}\nfor _, list := range [][]*running{c.run, c.orphans} {\n" +
			"for _, r := range list {"}}},
	{"gc-ignores-intents", "tier: an intent proves nothing", []edit{{tierFile,
		"	if w.State() != layout.Live || r.Flags&layout.FlagIntent != 0 {\n", "if w.State() == layout.Empty {\n"}}},
	{"gc-takes-lost-cas-for-garbage", "tier: a move that lost proves nothing", []edit{{"internal/simtest/tier_test.go",
		"		x.stage = toLocateAgain // also if it has lost\n",
		"x.stage = toLocateAgain\nif errors.Is(op.Err, index.ErrKept) {\nw.checkFreed(x.object)\n" +
			"x.object.bytes = nil\nc.collect = nil\n}\n"}}},
	{"gc-takes-a-failure-for-garbage", "tier: a lookup that fails proves nothing", []edit{{
		"internal/simtest/tier_test.go", "	case op.Err != nil:\n		c.collect = nil // nothing",
		"	case op.Err != nil:\nw.checkFreed(x.object)\nx.object.bytes = nil\nc.collect = nil //"}}},
	{"object-unchecked", "tier: the object counts if it is the one", []edit{{tierFile,
		"b.stub.Fill(&b.rec, o.Object.Got); err != nil {",
		"b.stub.Fill(&b.rec, o.Object.Got); err == b.why && err != nil {"}}},
	{"gone-is-not-found", "tier: a miss is made true", []edit{{tierFile,
		"	b.absent = true\n	o.step = stepStart\n	return o.again(0)\n", "return o.finish(ErrNotFound)\n"}}},
	{"unreachable-is-not-found", "tier: a miss is made true", []edit{{tierFile, "	return o.finish(ErrTier)\n",
		"return o.finish(ErrNotFound)\n"}}},
	{"lost-and-not-dropped", "tier: a miss is made true", []edit{{tierFile,
		"	b.drops = true\n	return o.casDelete()\n", "b.drops = false\nreturn o.finish(ErrNotFound)\n"}}},
	{"drop-of-what-is-there-now", "tier: a drop expects the stub", []edit{{tierFile,
		"	o.forgetReading()\n	return o.sync(", "if w := layout.Word(o.theCAS(0).Found); " +
			"w.State() == layout.Live {\no.x = w\nreturn o.casDelete()\n}\no.forgetReading()\nreturn o.sync("}}},
	{"expiry-ignored", "tier: the stub's expiry counts", []edit{{"index/lookup.go",
		"	case o.expired:\n		return o.finish(ErrNotFound)\n" +
			"	case o.Cond == IfVersion && r.Version == o.IfVersion:",
		"	case o.expired && !r.Stub:\nreturn o.finish(ErrNotFound)\ncase o.Cond == IfVersion && r.Version == " +
			"o.IfVersion:"}}},
	{"stub-without-expiry", "tier: the same record in another form", []edit{{tierFile,
		"	h.Stub, h.Pinned = true, 0\n", "h.Stub, h.Pinned, h.Expiry = true, 0, 0\n"}}},
	{"demote-of-a-new-version", "tier: the same record in another form", []edit{{tierFile,
		"o.version, o.flags, o.Expiry = h.Version, h.Flags, h.Expiry\n",
		"h.Version = o.env.Version(h.Version)\no.version, o.flags, o.Expiry = h.Version, h.Flags, h.Expiry\n"}}},
	{"promote-with-the-objects-version", "tier: the stub's version counts", []edit{{tierFile,
		"		return o.swap(b.rec.RecordHeader, b.rec.Value)\n",
		"was := b.rec.RecordHeader\nwas.Version = b.stub.Version\nreturn o.swap(was, b.rec.Value)\n"}}},
	{"touch-makes-the-stub-a-value", "tier: a stub's bytes are nobody's value", []edit{{"index/update.go",
		"Session(), Stub: o.stub, Parent: parent}", "Session()}"}}},
	{"stub-counts-as-a-value", "tier: a stub's bytes are nobody's value", []edit{{"index/lookup.go",
		"	if r.Stub {\n		return o.readObject(r)\n	}\n", ""}}},
}
