package session

// Use counts units as taken and given back.
func (f *Flow) Use(units int64) { f.add(0, units, units) }

func (c *Core) NoMemory(pg uint32, starved uint64, missed int64) error {
	return c.noMemory(pg, starved, missed)
}

func (c *Core) GaveUp(pg uint32, missed int64) { c.gaveUp(pg, missed) }

func (c *Core) SetVain(pg uint32) { c.gaveUp(pg, c.opts.Nanos()-vainFor) }

func (c *Core) SetFullFor(nanos int64) { c.opts.FullFor = nanos }

// Term is the greatest that the directory has shown.
func (a *Agenda) Term() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.term
}

// Unlinks has a place come into limbo, as far as the session's renewals are concerned.
func (c *Core) Unlinks() { c.unlinks() }
