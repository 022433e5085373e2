package heap

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// Two lanes allocate, exchange and free places; every life of a start unit
// carries the ver after its predecessor's, and at the end all units are back.
func TestCacheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := New()
		units := rapid.Uint32Range(100, 3000).Draw(t, "granted")
		if err := h.AddRun(0, units); err != nil {
			t.Fatal(err)
		}
		caches := []*Cache{NewCache(h), NewCache(h)}
		next := map[uint32]uint16{}
		linked := make([]bool, units)
		owner := make([]bool, units)
		var held []Place
		cache := func(t *rapid.T) *Cache { return caches[rapid.IntRange(0, 1).Draw(t, "lane")] }
		alloc := func(t *rapid.T, c *Cache, n uint32) bool {
			p, ok := c.Alloc(n)
			if !ok {
				if c.Units() != 0 {
					t.Fatalf("out of memory with %d units in the lane's own cache", c.Units())
				}
				return false
			}
			if p.Units != n || p.Ver != next[p.Unit] {
				t.Fatalf("%v for %d units, ver should be %d", p, n, next[p.Unit])
			}
			for i := p.Unit; i < p.Unit+n; i++ {
				if owner[i] {
					t.Fatalf("%v: unit %d is in use", p, i)
				}
				owner[i] = true
			}
			held = append(held, p)
			return true
		}
		give := func(c *Cache, p Place, link bool) {
			for i := p.Unit; i < p.Unit+p.Units; i++ {
				owner[i] = false
				linked[i] = linked[i] || link
			}
			if link {
				next[p.Unit] = (p.Ver + 1) % 1024
				c.Free(p)
			} else {
				c.Unuse(p)
			}
		}
		take := func(t *rapid.T) Place {
			if len(held) == 0 {
				t.Skip("nothing held")
			}
			i := rapid.IntRange(0, len(held)-1).Draw(t, "place")
			p := held[i]
			held = slices.Delete(held, i, i+1)
			return p
		}
		size := rapid.OneOf(rapid.Uint32Range(1, 5), rapid.Uint32Range(1, 80), rapid.Just(uint32(64)))
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) { alloc(t, cache(t), size.Draw(t, "units")) },
			"allocMany": func(t *rapid.T) {
				c, n := cache(t), size.Draw(t, "units")
				for range 40 {
					alloc(t, c, n)
				}
			},
			"free":  func(t *rapid.T) { give(cache(t), take(t), true) },
			"unuse": func(t *rapid.T) { give(cache(t), take(t), false) },
			"freeMany": func(t *rapid.T) {
				c := cache(t)
				for range min(40, len(held)) {
					give(c, take(t), true)
				}
			},
			// As many lives as bring the ver round to where it was.
			"wrap": func(t *rapid.T) {
				c, n := cache(t), size.Draw(t, "units")
				for range 1024 {
					if !alloc(t, c, n) {
						break
					}
					p := held[len(held)-1]
					held = held[:len(held)-1]
					give(c, p, true)
				}
			},
			"flush": func(t *rapid.T) {
				c := cache(t)
				c.Flush()
				if c.Units() != 0 {
					t.Fatalf("%d units left", c.Units())
				}
			},
			"": func(t *rapid.T) {
				used := uint64(0)
				for _, p := range held {
					used += uint64(p.Units)
				}
				s := h.Stats()
				if sum := s.Free + used + caches[0].Units() + caches[1].Units(); sum != uint64(units) ||
					s.RefusedPlaces != 0 {
					t.Fatalf("%d units of %d, %+v", sum, units, s)
				}
			},
		})
		for _, p := range held {
			give(caches[0], p, true)
		}
		for _, c := range caches {
			c.Flush()
		}
		if err := h.Check(); err != nil {
			t.Fatal(err)
		}
		at := uint32(0)
		runs, foreign := h.Drain()
		if len(foreign) > 0 {
			t.Fatalf("foreign %v", foreign)
		}
		for _, r := range runs {
			if r.Unit != at {
				t.Fatalf("%+v follows unit %d", r, at)
			}
			for ; at < r.Unit+r.Units; at++ {
				if linked[at] == r.Fresh {
					t.Fatalf("%+v, but unit %d linked is %v", r, at, linked[at])
				}
			}
		}
		if at != units {
			t.Fatalf("drained %d units of %d", at, units)
		}
	})
}

// Places that a lane hoards come to another after the first has next used its cache.
func TestStarved(t *testing.T) {
	h := New()
	mustAdd(t, h, 0, batchPlaces)
	a, b := NewCache(h), NewCache(h)
	p, _ := a.Alloc(1)
	if _, ok := b.Alloc(1); ok {
		t.Fatal("the batch is not what the test expects")
	}
	a.Free(p)
	if _, ok := b.Alloc(1); !ok {
		t.Fatal("the first lane did not give back")
	}
}

// A large place may need what the lane's own cache holds.
func TestOwnCacheFlushed(t *testing.T) {
	h := New()
	mustAdd(t, h, 0, 100)
	c := NewCache(h)
	for _, units := range []uint32{1, 5} {
		p, ok := c.Alloc(units)
		if !ok {
			t.Fatalf("no place of %d units", units)
		}
		c.Unuse(p)
	}
	if p, ok := c.Alloc(100); !ok || p != (Place{Units: 100}) {
		t.Fatalf("%v %v with %+v, %d cached", p, ok, h.Stats(), c.Units())
	}
}

func TestCacheForeign(t *testing.T) {
	h := New()
	c := NewCache(h)
	c.Free(Place{Unit: 5, Units: 3, Ver: 1023})
	c.Free(Place{Unit: 50, Units: 3, Ver: 7})
	c.Free(Place{Unit: 500, Units: 300, Ver: 7})
	c.Free(Place{Unit: 900})                     // damaged
	c.Free(Place{Unit: 900, Units: 3, Ver: 4e4}) // damaged
	for _, want := range []Place{{50, 3, 8}, {5, 3, 0}, {500, 300, 8}} {
		if p, ok := c.Alloc(want.Units); !ok || p != want {
			t.Errorf("got %v, want %v", p, want)
		}
	}
	if s := h.Stats(); s.RefusedPlaces != 2 || s.ForeignFree != 0 {
		t.Errorf("%+v", s)
	}
	mustCheck(t, h)
}

func TestCacheDoesNotAllocate(t *testing.T) {
	h := New()
	mustAdd(t, h, 0, ExtentUnits)
	c := NewCache(h)
	var held [100]Place
	for _, units := range []uint32{1, 16, 64, 1000} {
		work := func() {
			for i := range held {
				held[i], _ = c.Alloc(units)
			}
			for _, p := range held {
				c.Free(p)
			}
		}
		work()
		if n := testing.AllocsPerRun(100, work); n != 0 {
			t.Errorf("%d units: %v Go allocations", units, n)
		}
	}
}

// Lanes share a heap that is too small for all of them and pass places on to be
// freed elsewhere.
func TestLanes(t *testing.T) {
	const lanes, units, steps = 4, 6000, 20000
	h := New()
	mustAdd(t, h, 0, units)
	var users [units]atomic.Int32
	give := make(chan Place, 64)
	var wg sync.WaitGroup
	caches := make([]*Cache, lanes)
	for lane := range lanes {
		c := NewCache(h)
		caches[lane] = c
		rng := rand.New(rand.NewPCG(1, uint64(lane)))
		wg.Go(func() {
			var held []Place
			free := func(p Place) {
				for i := p.Unit; i < p.Unit+p.Units; i++ {
					users[i].Add(-1)
				}
				c.Free(p)
			}
			for range steps {
				if p, ok := c.Alloc(drawSize(rng, 100)); ok {
					for i := p.Unit; i < p.Unit+p.Units; i++ {
						if users[i].Add(1) != 1 {
							t.Errorf("%v: unit %d is in use", p, i)
							return
						}
					}
					held = append(held, p)
				}
				if n := len(held); n > 0 && (n > 40 || rng.IntN(2) == 0) {
					k := rng.IntN(n)
					p := held[k]
					held[k] = held[n-1]
					held = held[:n-1]
					select {
					case give <- p:
					default:
						free(p)
					}
				}
				select {
				case p := <-give:
					free(p)
				default:
				}
			}
			for _, p := range held {
				free(p)
			}
		})
	}
	wg.Wait()
	close(give)
	for p := range give {
		caches[0].Free(p)
	}
	for _, c := range caches {
		c.Flush()
	}
	mustCheck(t, h)
	if s := h.Stats(); s != (Stats{Granted: units, Free: units}) {
		t.Errorf("%+v", s)
	}
	if p := mustAlloc(t, h, units); p.Unit != 0 {
		t.Errorf("%v", p)
	}
}

// drawSize draws mostly small sizes, some up to 1024 units and a few up to large.
func drawSize(rng *rand.Rand, large int) uint32 {
	switch n := rng.IntN(1000); {
	case n < 900:
		return 1 + uint32(rng.IntN(16))
	case n < 998:
		return 1 + uint32(rng.IntN(min(large, 1024)))
	default:
		return 1 + uint32(rng.IntN(large))
	}
}
