package simtest

// specMutants are mistakes in how words are published speculatively.
var specMutants = []mutant{
	{"spec-trust-tail", "spec: a word at the tail is confirmed before anybody goes by it", []edit{{op,
		"	if o.isUnsure(w) {\n", "	if false {\n"}}},
	{"spec-undo", "spec: sync leaves a tentative word alone", []edit{{op,
		"		case b == o.syncQ, o.isTentative(b):\n", "		case b == o.syncQ:\n"}}},
	{"spec-leave-stray", "spec: strays are taken away before a loss is answered or tried again", []edit{{op,
		"	if every && took == 0 {\n		return o.strayGone()\n", "	if true {\nreturn o.strayGone()\n"}}},
	{"spec-ack-at-head", "spec: an UPDATE is acknowledged when every replica is at or past it", []edit{{op,
		"		if o.won = true; every && took == all {\n", "		if o.won = true; every || took == all {\n"}}},
	{"spec-delete", "spec: a DELETE is not posted at every replica at once", []edit{{op,
		"	o.n = o.x.Delete(o.env.Session())\n	o.begin()\n	return o.casSlot()\n",
		"	o.n = o.x.Delete(o.env.Session())\n	o.begin()\n	if o.isSpeculative() && !o.locked {\n" +
			"return o.casEverywhere()\n}\nreturn o.casSlot()\n"}}},
	{"spec-confirm-at-head", "spec: a word is confirmed by every replica, not by the head alone", []edit{{op,
		"		if k != o.Route.PG.Reader() {\n", "		if k == 0 {\n"}}},
	{"spec-lost-is-lost", "spec: a loss at a head that is gone is none yet", []edit{{op,
		"		o.deciding, o.won = true, false\n		after = stepResolve\n",
		"		if after != stepCASSlot {\no.deciding, o.won = true, false\nafter = stepResolve\n}\n"}}},
	{"spec-expect-tail", "spec: a word that was seen at the tail alone is no expectation", []edit{{op,
		"o.x.State() == layout.Live && o.needRare().spec.sure == o.x\n",
		"o.x.State() == layout.Live\n"},
		{op, "return o.isSpeculative() && w.State() == layout.Live && o.needRare().spec.sure != w\n",
			"return o.Kind.Reads() && o.isSpeculative() && w.State() == layout.Live && " +
				"o.needRare().spec.sure != w\n"}}},
	{"spec-same-word", "spec: a word that has lost is not posted again", []edit{{op,
		"	c := o.spec.lostTo\n	o.retire()\n", "	c := o.spec.lostTo\n"}}},
	{"spec-help-at-head", "spec: nobody but its writer brings a word to the head", []edit{{op,
		"		case b == o.syncQ, o.isTentative(b):\n			o.syncK++\n",
		"		case b != o.syncQ && o.isTentative(b):\nq := o.syncQ\no.syncQ, o.syncB = b, q\no.begin()\n" +
			"o.add(Access{Verb: CAS, Space: Index, Replica: 0, Off: o.slotOff(o.syncSlot), " +
			"Expect: uint64(b), New: uint64(q)})\nreturn o.post(stepSyncCAS)\n" +
			"case b == o.syncQ:\no.syncK++\n"}}},
	{"spec-stray-place-reused", "spec: the place of a stray is for nobody while a replica shows it", []edit{{op,
		"	c := o.spec.lostTo\n	o.retire()\n", "	c := o.spec.lostTo\n	o.dropPlace()\n"}}},
	{"spec-no-parent", "spec: a record names its parent", []edit{{op,
		"		return o.x.AsParent()\n", "		return 0\n"}}},
	{"spec-old-parent", "spec: a record names the word that its own replaces now", []edit{{op,
		"	if o.speculates() && o.prepared && o.spec.parent != o.x.AsParent() {\n", "	if false {\n"}}},
	{"spec-by-predecessor", "spec: sync goes by the head, since any other replica may be ahead", []edit{{op,
		"	if o.isSpeculative() {\n		return 0\n	}\n	return o.syncK - 1\n", "	return o.syncK - 1\n"}}},
	{"spec-answers-own-read", "spec: a refuted word is answered by what the head held", []edit{{op,
		"	case b == g.word && g.bad == 0:\n", "	case g.bad == 0:\n"}}},
	{"spec-late-stray-forgotten", "spec: a fault does not make strays be forgotten", []edit{{op,
		"		o.after = stepCASSlot\n", "		o.spread, o.after = false, 0\n		o.retire()\n"}}},
	{"spec-recall-by-a-word", "spec: a recall moves what any replica shows in the extent", []edit{{
		"index/repair/relocate.go", "	if !o.Route.PG.Speculative {\n		return nil\n	}\n	for _, it",
		"	if true {\nreturn nil\n}\n	for _, it"}}},
	{"spec-copy-keeps-parent", "spec: a copy of a record names no parent", []edit{{"index/repair/copies.go",
		"			if r.Parent != 0 {\n", "			if false {\n"}}},
}
