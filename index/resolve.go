package index

// resolve asks A what became of the deciding CAS. Nothing of it can still land.
func (o *Op) resolve() Action {
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: 0, Off: o.slotOff(o.slot), Buf: o.word(0)})
	return o.post(stepResolve)
}

func (o *Op) resolved() Action {
	switch s := wordAt(o.word(0)); {
	case s == o.n && o.Kind == Settle && s == o.Txn.Placed.Intent.Final:
		// Others who settle leave this word, too: nobody can tell whose the places are that went with the intent.
	case s == o.n:
		o.deciding, o.won = false, true
		return o.sync(o.slot, 1, stepPublish)
	case s == o.x:
		// It did not happen. n may have been seen, so it is never posted again.
		o.deciding, o.won = false, false
		o.retire()
		o.written = 0
		return o.again(0)
	}
	if o.Kind.isTxn() {
		if a, known := o.resolvedTxn(wordAt(o.word(0))); known {
			return a
		}
	}
	o.leak()
	return o.finish(ErrUnknown)
}

// retire spends the place of a word that did not take effect.
func (o *Op) retire() {
	if o.havePlace {
		o.env.Retire(o.Route.PG, o.n)
		o.havePlace = false
	}
	o.dropTxn(o.env.Retire)
	o.dropChunks(o.env.Retire)
	o.dropPlace()
}

// leak leaves both places of an undecided Op to recall.
func (o *Op) leak() {
	o.leakOwn()
	if o.x.Readable() {
		o.env.Leak(o.Route.PG, o.x)
	}
	o.deciding = false
}

// leakOwn leaves the Op's own place to recall.
func (o *Op) leakOwn() {
	if o.havePlace {
		o.env.Leak(o.Route.PG, o.n)
	}
	o.havePlace = false
	o.dropTxn(o.env.Leak)
	o.dropChunks(o.env.Leak)
	if o.Machine != nil {
		o.Machine.Release(false)
	}
}
