package heap

const (
	// cacheUnits is the largest place a Cache keeps.
	cacheUnits = 64
	// A batch is what a Cache moves to or from the Heap at a time.
	batchUnits  = 16 << 10 / 64
	batchPlaces = 32
)

func batchOf(units uint32) int {
	return int(min(batchPlaces, max(1, batchUnits/units)))
}

// Cache is a lane's stock of small places, own and foreign alike, in front of a
// Heap. It belongs to one goroutine; a place may be freed to another Cache of the
// same Heap than it came from.
//
// A lane about to wait for long calls Flush first: a Cache notices that others
// starve only when it is used.
type Cache struct {
	heap *Heap
	seen uint64 // heap.starved at the last Flush
	// bins[u-1] is a stack of places of u units; Ver is the next life's. Its
	// capacity is two batches, or zero before its first use.
	bins [cacheUnits][]Place
}

// NewCache returns an empty Cache in front of h.
func NewCache(h *Heap) *Cache { return &Cache{heap: h, seen: h.starved.Load()} }

// Alloc is like [Heap.Alloc].
func (c *Cache) Alloc(units uint32) (Place, bool) {
	if i := units - 1; i < cacheUnits && c.heap.starved.Load() == c.seen {
		b := c.bins[i]
		if n := len(b) - 1; n >= 0 {
			c.bins[i] = b[:n]
			return b[n], true
		}
	}
	return c.allocSlow(units)
}

// AllocReusing is Alloc for a lane with places in limbo whose tag is below before. Those at the front of l go
// before what the Heap has, at a fraction of the cost.
func (c *Cache) AllocReusing(l *Limbo, before uint64, units uint32) (Place, bool) {
	p, ok := c.AllocStocked(l, before, units)
	if !ok {
		p, ok = c.Alloc(units)
	}
	if !ok && l.Release(before, c.Free) > 0 {
		p, ok = c.Alloc(units)
	}
	return p, ok
}

// AllocStocked is AllocReusing without what the Heap has.
func (c *Cache) AllocStocked(l *Limbo, before uint64, units uint32) (Place, bool) {
	if c.Starved() {
		l.Release(before, c.Free)
		c.Flush()
		return Place{}, false
	}
	if i := units - 1; i < cacheUnits {
		if b := c.bins[i]; len(b) > 0 {
			return c.Alloc(units)
		}
		for range reuseTries {
			p, ok := l.take(before)
			if !ok {
				break
			}
			if p.Units == units && p.Ver < verMask {
				p.Ver++
				return p, true
			}
			c.Free(p)
		}
	}
	return Place{}, false
}

// reuseTries is how many places of other sizes AllocReusing sorts out.
const reuseTries = 4

// Starved reports whether somebody found the Heap empty since the last Flush.
func (c *Cache) Starved() bool { return c.heap.starved.Load() != c.seen }

// Free is like [Heap.Free].
func (c *Cache) Free(p Place) {
	// A ver that wraps is for the Heap to see: it takes an unchanged ver for a
	// place that was not linked.
	if p.Ver < verMask {
		p.Ver++
		c.push(p)
		return
	}
	c.heap.Free(p)
}

// Unuse is like [Heap.Unuse].
func (c *Cache) Unuse(p Place) { c.push(p) }

func (c *Cache) push(p Place) {
	if i := p.Units - 1; i < cacheUnits && c.heap.starved.Load() == c.seen {
		if b := c.bins[i]; len(b) < cap(b) {
			c.bins[i] = append(b, p)
			return
		}
	}
	c.pushSlow(p)
}

// Flush gives everything back to the Heap.
func (c *Cache) Flush() {
	c.seen = c.heap.starved.Load()
	c.heap.mu.Lock()
	defer c.heap.mu.Unlock()
	for i, b := range c.bins {
		for _, p := range b {
			c.heap.mu.giveBack(p, false)
		}
		c.bins[i] = b[:0]
	}
}

// Forget drops what the Cache holds in an extent that is being recalled, and returns how
// many units that is.
func (c *Cache) Forget(extent uint32) (units uint64) {
	for i, b := range c.bins {
		n := 0
		for _, p := range b {
			if p.Unit/ExtentUnits != extent {
				b[n] = p
				n++
			}
		}
		units += uint64(len(b)-n) * uint64(i+1)
		c.bins[i] = b[:n]
	}
	return units
}

// Units returns how much the Cache holds.
func (c *Cache) Units() uint64 {
	n := uint64(0)
	for i, b := range c.bins {
		n += uint64(len(b)) * uint64(i+1)
	}
	return n
}

func (c *Cache) allocSlow(units uint32) (Place, bool) {
	if c.heap.starved.Load() != c.seen {
		c.Flush()
	}
	if units-1 >= cacheUnits {
		p, ok := c.heap.Alloc(units)
		if !ok && c.Units() > 0 {
			c.Flush()
			p, ok = c.heap.Alloc(units)
		}
		return p, ok
	}
	b := c.bin(units)
	n := c.heap.AllocBatch(units, b[:batchOf(units)])
	if n == 0 && c.Units() > 0 {
		c.Flush()
		n = c.heap.AllocBatch(units, b[:batchOf(units)])
	}
	if n == 0 {
		return Place{}, false
	}
	c.bins[units-1] = b[:n-1]
	return b[:n][n-1], true
}

func (c *Cache) pushSlow(p Place) {
	if c.heap.starved.Load() != c.seen {
		c.Flush()
	}
	if p.Units-1 >= cacheUnits {
		c.heap.Unuse(p)
		return
	}
	b := c.bin(p.Units)
	if len(b) == cap(b) {
		// The older half goes: what was used last is likelier to be in a cache.
		half := b[:batchOf(p.Units)]
		c.heap.mu.Lock()
		for _, q := range half {
			c.heap.mu.giveBack(q, false)
		}
		c.heap.mu.Unlock()
		b = b[:copy(b, b[len(half):])]
	}
	c.bins[p.Units-1] = append(b, p)
}

// bin returns the stack for places of units units, ready for use.
func (c *Cache) bin(units uint32) []Place {
	if c.bins[units-1] == nil {
		c.bins[units-1] = make([]Place, 0, 2*batchOf(units))
	}
	return c.bins[units-1]
}
