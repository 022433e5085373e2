package session

// Use counts units as taken and given back.
func (f *Flow) Use(units int64) { f.add(0, units, units) }

func (c *Core) NoMemory(pg uint32, starved uint64, missed int64) error {
	return c.noMemory(pg, starved, missed)
}

func (c *Core) SetVain(pg uint32) { c.setVain(pg) }

func (c *Core) SetFullFor(nanos int64) { c.opts.FullFor = nanos }
