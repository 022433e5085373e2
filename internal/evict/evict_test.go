package evict

import (
	"container/heap"
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvd-project/kvd/internal/evict/evicttest"
	"github.com/kvd-project/kvd/internal/layout"
)

var long = flag.Bool("long", false, "longer traces, over more keys")

// store is what an index with access words looks like to those who evict: groups of 30 slots, and
// clients that note uses now and then, each with a Policy of its own.
type store struct {
	groups     [][30]slot
	at         map[uint64]*slot
	capacity   int // units
	used       int
	clients    []*Policy
	r          *rand.Rand
	accesses   uint64
	start      uint64 // Unix milliseconds
	micros     uint64 // an access takes
	look, drop int    // groups that an eviction looks at, records that it drops
	size       func(key uint64) uint32
	blind      bool // does not tell the policy sizes

	notes int

	sample []Candidate
	where  []*slot
	victim []int
}

type slot struct {
	used   bool
	key    uint64
	units  uint32
	word   layout.AccessWord
	client []noted
}

// noted is what one client knows of a key.
type noted struct {
	known  bool
	millis uint64
	hits   uint32
}

// newStore makes a store with room for so many records and units, with one client, which looks at
// four groups and drops four records.
func newStore(seed uint64, records, capacity int) *store {
	s := &store{
		groups:   make([][30]slot, records*10/7/30+1),
		at:       make(map[uint64]*slot, records),
		capacity: capacity,
		r:        rand.New(rand.NewPCG(seed, 7)),
		start:    start,
		micros:   10,
		look:     4,
		drop:     4,
		size:     func(uint64) uint32 { return 1 },
	}
	s.join(seed, 1)
	return s
}

// join adds clients.
func (s *store) join(seed uint64, n int) {
	for range n {
		s.clients = append(s.clients, New(Options{Seed: seed + uint64(len(s.clients))}))
	}
}

func hash(key uint64) uint64 {
	key = (key ^ key>>31) * 0x7fb5d329728ea185
	key = (key ^ key>>27) * 0x81dadef4bc2dd44d
	return key ^ key>>33
}

// Access is as in evicttest.Cache.
func (s *store) Access(key uint64) bool {
	s.accesses++
	now := s.start + s.accesses*s.micros/1000
	me := 0
	if len(s.clients) > 1 {
		me = s.r.IntN(len(s.clients))
	}
	p := s.clients[me]
	if x := s.at[key]; x != nil {
		n := &x.client[me]
		n.hits = min(n.hits+1, 255)
		if !n.known || now-n.millis >= p.NoteIntervalMillis() {
			s.notes++
			x.word = layout.MakeAccess(0, now, p.Touched(now, x.word, n.hits), 0)
			*n = noted{known: true, millis: now}
		}
		return true
	}
	units := s.size(key)
	for s.used+int(units) > s.capacity {
		s.evict(p, now, -1)
	}
	g := int(hash(key) % uint64(len(s.groups)))
	x := s.free(g)
	if x == nil {
		s.evict(p, now, g)
		x = s.free(g)
	}
	c := x.client
	if c == nil {
		c = make([]noted, len(s.clients))
	}
	clear(c)
	c[me] = noted{known: true, millis: now}
	*x = slot{used: true, key: key, units: units, word: layout.MakeAccess(0, now, p.Born(now, hash(key)), 0), client: c}
	s.at[key] = x
	s.used += int(units)
	return false
}

func (s *store) free(g int) *slot {
	for i := range s.groups[g] {
		if x := &s.groups[g][i]; !x.used {
			return x
		}
	}
	return nil
}

// evict drops records of random groups, or of group only if that is not negative.
func (s *store) evict(p *Policy, now uint64, only int) {
	s.sample, s.where = s.sample[:0], s.where[:0]
	look, drop := s.look, s.drop
	if only >= 0 {
		look, drop = 1, 1
	}
	for range look {
		g := only
		if g < 0 {
			g = s.r.IntN(len(s.groups))
		}
		for i := range s.groups[g] {
			if x := &s.groups[g][i]; x.used {
				units := x.units
				if s.blind {
					units = 1
				}
				s.sample = append(s.sample, Candidate{Word: x.word, Known: true, Units: units})
				s.where = append(s.where, x)
			}
		}
	}
	s.victim = p.Choose(now, s.sample, s.victim[:0], drop)
	for _, i := range s.victim {
		x := s.where[i]
		if !x.used {
			continue // a group that was taken twice
		}
		p.Evicted(now, hash(x.key), s.sample[i])
		x.used = false
		s.used -= int(x.units)
		delete(s.at, x.key)
	}
}

// ratios runs a trace through caches, and gives the percentage of hits of each after the first
// quarter.
func ratios(next func() uint64, accesses int, caches ...evicttest.Cache) []float64 {
	hits := make([]float64, len(caches))
	for i := range accesses {
		key := next()
		for j, c := range caches {
			if c.Access(key) && i >= accesses/4 {
				hits[j]++
			}
		}
	}
	for j := range hits {
		hits[j] *= 100 / float64(accesses-accesses/4)
	}
	return hits
}

// TestHitRatio compares one client, and four that share a cache, with the best of the others.
func TestHitRatio(t *testing.T) {
	keys, accesses := 100_000, 300_000
	if *long {
		keys, accesses = 400_000, 8_000_000
	}
	const seed = 1
	table := fmt.Sprintf("\n%-28s %5s %6s %6s %6s %6s %6s %6s %6s\n", "trace", "size", "LRU", "LFU", "Redis", "ours",
		"", "of 4", "notes")
	for _, percent := range []int{1, 5, 10} {
		capacity := keys * percent / 100
		for _, tr := range evicttest.Traces(seed, keys, capacity) {
			one, four := newStore(seed, capacity, capacity), newStore(seed, capacity, capacity)
			four.join(seed, 3)
			r := ratios(tr.Next, accesses, evicttest.NewLRU(capacity), evicttest.NewLFU(capacity),
				evicttest.NewRedisLFU(seed, capacity, 100_000), one, four)
			best := max(r[0], r[1], r[2])
			table += fmt.Sprintf("%-28s %4d%% %6.1f %6.1f %6.1f %6.1f %+6.1f %6.1f %6.3f\n", tr.Name, percent, r[0],
				r[1], r[2], r[3], r[3]-best, r[4], float64(one.notes)/float64(accesses))
			for i, who := range []string{"one client", "four clients"} {
				if r[3+i] < best-2 {
					t.Errorf("%s, size %d %%, %s: %.1f %% of hits, others reach %.1f", tr.Name, percent, who, r[3+i],
						best)
				}
			}
		}
	}
	t.Log(table)
}

// TestSlow runs a trace a thousand times slower, over the moment when the times of
// access words wrap: nothing may depend on the unit of time.
func TestSlow(t *testing.T) {
	const keys, capacity, accesses = 100_000, 5000, 400_000
	for _, i := range []int{1, 6} {
		tr := func() evicttest.Trace { return evicttest.Traces(1, keys, capacity)[i] }
		fast, slow := newStore(1, capacity, capacity), newStore(1, capacity, capacity)
		slow.micros = 1000 * fast.micros
		slow.start = 6<<tickBits*layout.AccessTickMillis - accesses/2*slow.micros/1000
		f, s := ratios(tr().Next, accesses, fast)[0], ratios(tr().Next, accesses, slow)[0]
		if s < f-1 {
			t.Errorf("%s: %.1f %% of hits when slow, %.1f when fast", tr().Name, s, f)
		}
		t.Logf("%s: fast %.1f %%, %.3f notes an access; slow %.1f %%, %.3f", tr().Name,
			f, float64(fast.notes)/accesses, s, float64(slow.notes)/accesses)
	}
}

// gdsf is exact GreedyDual-Size-Frequency: the least of age + uses/size goes, and age is what the
// last to go had.
type gdsf struct {
	capacity, used int
	age            float64
	size           func(uint64) uint32
	at             map[uint64]*gdsfEntry
	heap           gdsfHeap
}

type gdsfEntry struct {
	key      uint64
	uses     float64
	priority float64
	i        int
}

type gdsfHeap []*gdsfEntry

func (h gdsfHeap) Len() int           { return len(h) }
func (h gdsfHeap) Less(i, j int) bool { return h[i].priority < h[j].priority }
func (h gdsfHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i]; h[i].i, h[j].i = i, j }
func (h *gdsfHeap) Push(x any)        { x.(*gdsfEntry).i = len(*h); *h = append(*h, x.(*gdsfEntry)) }
func (h *gdsfHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}

func (c *gdsf) Access(key uint64) bool {
	size := c.size(key)
	e := c.at[key]
	hit := e != nil
	if !hit {
		for c.used+int(size) > c.capacity {
			v := heap.Pop(&c.heap).(*gdsfEntry)
			c.age = v.priority
			c.used -= int(c.size(v.key))
			delete(c.at, v.key)
		}
		e = &gdsfEntry{key: key}
		heap.Push(&c.heap, e)
		c.at[key] = e
		c.used += int(size)
	}
	e.uses++
	e.priority = c.age + e.uses/float64(size)
	heap.Fix(&c.heap, e.i)
	return hit
}

// TestSizes has records of 1 to 64 units, most of them small.
func TestSizes(t *testing.T) {
	const keys, capacity, accesses = 100_000, 60_000, 400_000
	size := func(key uint64) uint32 { return 1 << (bits.TrailingZeros64(hash(key^12345) | 64)) }
	for _, i := range []int{1, 3, 5} {
		tr := evicttest.Traces(1, keys, capacity/8)[i]
		// Small records stay, so there are more of them than the mean size says.
		aware, blind := newStore(1, capacity/2, capacity), newStore(1, capacity/2, capacity)
		aware.size, blind.size, blind.blind = size, size, true
		exact := &gdsf{capacity: capacity, size: size, at: map[uint64]*gdsfEntry{}}
		r := ratios(tr.Next, accesses, exact, aware, blind)
		if r[1] < r[0]-2 || r[1] < r[2]+2 {
			t.Errorf("%s: %.1f %% of hits, exact GDSF reaches %.1f, without sizes %.1f", tr.Name, r[1], r[0], r[2])
		}
		t.Logf("%s: exact GDSF %.1f %%, ours %.1f, ours without sizes %.1f", tr.Name, r[0], r[1], r[2])
	}
}

func TestBuckets(t *testing.T) {
	for b := range ages {
		if lo := ageFloor(b); ageBucket(lo) != b || b > 0 && ageBucket(lo-1) != b-1 {
			t.Errorf("age bucket %d from %d: got %d, before it %d", b, lo, ageBucket(lo), ageBucket(lo-1))
		}
	}
	if got := ageBucket(math.MaxUint32); got != ages-1 {
		t.Errorf("age bucket of the largest: %d, want %d", got, ages-1)
	}
	for k := range classes {
		if lo := classFloor(k); class(lo) != k || k > 0 && class(lo-1) != k-1 {
			t.Errorf("class %d from %d: got %d, before it %d", k, lo, class(lo), class(lo-1))
		}
	}
	if lo, hi := class(0), class(math.MaxUint32); lo != 0 || hi != classes-1 {
		t.Errorf("classes from %d to %d, want 0 to %d", lo, hi, classes-1)
	}
}

func TestHalved(t *testing.T) {
	for x := 0.0; x < 63; x += 1.0 / 64 {
		if got, want := halved(1000, x), 1000*math.Exp2(-x); math.Abs(got-want) > 0.004*want {
			t.Errorf("1000 halved %v times: %v, want %v", x, got, want)
		}
	}
	if got := halved(1000, 1e9); got != 0 {
		t.Errorf("1000 halved a billion times: %v, want 0", got)
	}
}

const start = 1_700_000_000_000

func TestCounts(t *testing.T) {
	p := New(Options{Seed: 1, GhostEntries: 100})
	if got := p.Born(start, 1); got != countUnit {
		t.Errorf("count of an unknown key: %d, want %d", got, countUnit)
	}
	if got := p.Touched(start, 0, 3); got != 3*countUnit {
		t.Errorf("count of three uses: %d, want %d", got, 3*countUnit)
	}
	if got := p.Touched(start, layout.MakeAccess(0, start, 4000, 0), math.MaxUint32); got != layout.MaxAccessCount {
		t.Errorf("count of many uses: %d, want %d", got, layout.MaxAccessCount)
	}
	if got := p.NoteIntervalMillis(); got != 1000 {
		t.Errorf("note interval before the first eviction: %d ms, want 1000", got)
	}
	// Records of 8 s: 16 times that halves a count.
	c := Candidate{Word: layout.MakeAccess(0, start, 80*countUnit/8, 0), Known: true}
	now := uint64(start + 8000)
	if got := p.Choose(now, []Candidate{c}, nil, 3); len(got) != 1 {
		t.Errorf("victims of a sample of one: %v", got)
	}
	if got := p.NoteIntervalMillis(); got != 1000 {
		t.Errorf("note interval at a mean age of 8 s: %d ms, want 1000", got)
	}
	if got := p.Touched(start+16*8000, c.Word, 1); got != 40+countUnit {
		t.Errorf("count of 80 after a half-life and a use: %d, want %d", got, 40+countUnit)
	}
	p.Evicted(now, 77, c)
	if got := p.Born(start+16*8000, 77); got != 40+countUnit {
		t.Errorf("count of 80, evicted, put again after a half-life: %d, want %d", got, 40+countUnit)
	}
	if got := p.Born(start+16*8000, 77); got != countUnit {
		t.Errorf("count of a key remembered once, put a second time: %d, want %d", got, countUnit)
	}
	// Of a clock an hour ahead: used now.
	if got := p.Touched(start, layout.MakeAccess(0, start+3_600_000, 80, 0), 1); got != 80+countUnit {
		t.Errorf("count of a word from the future: %d, want %d", got, 80+countUnit)
	}
}

// TestGhostIsBounded fills the history ten times over: the latest are remembered, and most of the
// first are not.
func TestGhostIsBounded(t *testing.T) {
	p := New(Options{GhostEntries: 1024})
	const n = 10 * 1024
	for i := range uint64(n) {
		p.Evicted(start+4*i, i, Candidate{Word: layout.MakeAccess(0, start+4*i, 80, 0), Known: true})
	}
	remembered := func(from, to uint64) (k int) {
		for i := from; i < to; i++ {
			if p.Born(start+4*n, i) > countUnit {
				k++
			}
		}
		return k
	}
	if old := remembered(0, 8*1024); old > 100 {
		t.Errorf("%d of the first 8192 are remembered", old)
	}
	if late := remembered(n-512, n); late < 450 {
		t.Errorf("%d of the last 512 are remembered", late)
	}
}

func TestConcurrent(t *testing.T) {
	p := New(Options{GhostEntries: 64})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(g)))
			for i := range uint64(20_000) {
				now := start + i
				if got := p.Born(now, r.Uint64N(200)); got < countUnit {
					t.Errorf("born with a count of %d", got)
				}
				w := layout.MakeAccess(0, now-r.Uint64N(1000), r.Uint32N(4096), 0)
				if got := p.Touched(now, w, 1); got < countUnit {
					t.Errorf("touched to a count of %d", got)
				}
				if ms := p.NoteIntervalMillis(); ms < minNoteMillis || ms > maxNoteMillis {
					t.Errorf("note interval %d ms", ms)
				}
			}
		})
	}
	r := rand.New(rand.NewPCG(1, 100))
	var dst []int
	for i := range uint64(20_000) {
		c := sample(r, start+i, 25)
		dst = p.Choose(start+i, c, dst[:0], 2)
		for _, v := range dst {
			p.Evicted(start+i, r.Uint64N(200), c[v])
		}
	}
	wg.Wait()
}

func sample(r *rand.Rand, now uint64, n int) []Candidate {
	c := make([]Candidate, n)
	for i := range c {
		c[i] = Candidate{Word: layout.MakeAccess(0, now-r.Uint64N(10_000), 8+r.Uint32N(100), 0), Known: true,
			Units: 1 + r.Uint32N(8)}
	}
	return c
}

func TestNoAllocations(t *testing.T) {
	p := New(Options{})
	r := rand.New(rand.NewPCG(1, 1))
	c, dst := sample(r, start, 100), make([]int, 0, 4)
	if got := testing.AllocsPerRun(100, func() {
		p.Evicted(start, 1, c[p.Choose(start, c, dst, 4)[0]])
		p.Touched(start, c[0].Word, 1)
		p.Born(start, 1)
		p.NoteIntervalMillis()
	}); got != 0 {
		t.Errorf("%v allocations, want 0", got)
	}
}

// FuzzChoose takes whatever words: indexes are distinct and in range, as many as asked for, and
// expired records come first.
func FuzzChoose(f *testing.F) {
	f.Add(uint64(start), 4, []byte("0123456789abcdef0123456789abcdef"))
	f.Add(uint64(0), -1, []byte(""))
	f.Add(uint64(math.MaxUint64), 1000, make([]byte, 12*50))
	p := New(Options{GhostEntries: 64})
	f.Fuzz(func(t *testing.T, now uint64, n int, b []byte) {
		var c []Candidate
		for ; len(b) >= 12 && len(c) < 200; b = b[12:] {
			units := binary.LittleEndian.Uint32(b[8:])
			c = append(c, Candidate{Word: layout.AccessWord(binary.LittleEndian.Uint64(b)), Known: units&1 == 0,
				Units: units >> 1})
		}
		before := []int{-7}
		got := p.Choose(now, c, before, n)
		if got[0] != -7 {
			t.Fatalf("what dst had is gone: %v", got)
		}
		got = got[1:]
		if want := max(min(n, len(c), MaxChoose), 0); len(got) != want {
			t.Fatalf("%d victims, want %d", len(got), want)
		}
		expired := func(i int) bool { return c[i].Known && c[i].Word.Expired(now) }
		chosen := map[int]bool{}
		for k, i := range got {
			if i < 0 || i >= len(c) || chosen[i] {
				t.Fatalf("victims %v of %d", got, len(c))
			}
			chosen[i] = true
			if k > 0 && expired(i) && !expired(got[k-1]) {
				t.Fatalf("victims %v: %d has expired, the one before it has not", got, i)
			}
		}
		if len(got) > 0 && !expired(got[len(got)-1]) {
			for i := range c {
				if expired(i) && !chosen[i] {
					t.Fatalf("victims %v: %d has expired and is not among them", got, i)
				}
			}
		}
		for _, i := range got {
			p.Evicted(now, uint64(i), c[i])
			p.Touched(now, c[i].Word, c[i].Units)
			if count := p.Born(now, uint64(i)); count < countUnit || count > layout.MaxAccessCount {
				t.Fatalf("born with a count of %d", count)
			}
		}
		if ms := p.NoteIntervalMillis(); ms < minNoteMillis || ms > maxNoteMillis {
			t.Fatalf("note interval %d ms", ms)
		}
		p.refresh()
		for k := range classes {
			for a := range ages {
				if v := p.value[k][a]; !(v > 0 && v < math.MaxFloat32) {
					t.Fatalf("value of class %d at age %d: %v", k, a, v)
				}
			}
		}
	})
}

func BenchmarkTouched(b *testing.B) {
	p := New(Options{})
	r := rand.New(rand.NewPCG(1, 1))
	c := sample(r, start, 1024)
	p.Choose(start, c, nil, 1)
	for i := 0; b.Loop(); i++ {
		p.Touched(start, c[i%1024].Word, 1)
	}
}

func BenchmarkBorn(b *testing.B) {
	p := New(Options{})
	for i := range uint64(200_000) {
		p.Evicted(start, hash(i), Candidate{Word: layout.MakeAccess(0, start, 8, 0), Known: true})
	}
	for i := uint64(0); b.Loop(); i++ {
		p.Born(start, hash(i%400_000))
	}
}

func BenchmarkEvicted(b *testing.B) {
	p := New(Options{})
	c := Candidate{Word: layout.MakeAccess(0, start, 8, 0), Known: true}
	for i := uint64(0); b.Loop(); i++ {
		p.Evicted(start, hash(i), c)
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, n := range []int{25, 100} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := New(Options{})
			c, dst := sample(rand.New(rand.NewPCG(1, 1)), start, n), make([]int, 0, 4)
			for b.Loop() {
				p.Choose(start, c, dst, 4)
			}
		})
	}
}

func BenchmarkRefresh(b *testing.B) {
	p := New(Options{})
	for a := range ages {
		for k := range classes {
			p.ends[k][a].Store(1)
		}
	}
	for b.Loop() {
		p.refresh()
	}
}
