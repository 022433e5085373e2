package index

// resolve asks A what became of the deciding CAS. Nothing of it can still land.
func (o *Op) resolve() Action {
	o.begin()
	o.add(Access{Verb: Read, Space: Index, Replica: 0, Off: o.slotOff(o.slot), Buf: o.word(0)})
	return o.post(stepResolve)
}

func (o *Op) resolved() Action {
	switch s := wordAt(o.word(0)); {
	case s == o.n && o.leftByOthers():
		// Nobody can tell whose the places are that went with x.
	case s == o.n:
		o.deciding, o.won = false, true
		return o.sync(o.slot, 1, stepPublish)
	case s == o.x && o.spread:
		return o.respread()
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

// leftByOthers reports whether others may leave n in place of x, too: an EMPTY word tells sessions apart and not the
// operations of one, and everybody who settles a committed intent leaves its final record's word. An intent that
// stands for nothing is left by one operation of a session only: deletes find no key there.
func (o *Op) leftByOthers() bool {
	return o.deletes() || o.Kind == Settle && o.n == o.Txn.Placed.Intent.Final
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
