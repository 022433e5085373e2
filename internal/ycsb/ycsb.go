// Package ycsb generates the six core workloads of the Yahoo! Cloud Serving
// Benchmark: which operation comes next, and on which record.
//
// It leaves running, timing and the store to its users, who turn a record's
// number into a key with [Key]. Start with [Workload], [Keyspace] and
// [Generator]. A Generator belongs to one goroutine; the Generators of a run
// share a Keyspace, whose methods may be called concurrently. Nothing is kept of
// the buffers passed in.
//
// Mixes and distributions are those of Cooper et al., "Benchmarking Cloud
// Serving Systems with YCSB" (SoCC'10) and of its Java implementation. The
// zipfian generator is from Gray et al., "Quickly Generating Billion-Record
// Synthetic Databases" (SIGMOD'94).
package ycsb

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
)

// Op is what to do with a record. The zero value is invalid.
type Op uint8

const (
	Read Op = 1 + iota
	Update
	Insert
	Scan
	ReadModifyWrite
)

// NumOps bounds arrays indexed by Op.
const NumOps = 6

func (o Op) String() string {
	return [...]string{"invalid", "read", "update", "insert", "scan", "read-modify-write"}[min(o, 5)]
}

// Distribution chooses the record of every operation but Insert. The zero value
// means the workload's own.
type Distribution uint8

const (
	// Uniform: every record equally likely.
	Uniform Distribution = 1 + iota
	// Zipfian: few records take most requests; which ones is scattered over the
	// key space.
	Zipfian
	// Latest: zipfian by age, the newest record first.
	Latest
)

func (d Distribution) String() string {
	return [...]string{"default", "uniform", "zipfian", "latest"}[min(d, 3)]
}

// ParseDistribution reads a name as String prints it; "zipf" is short for
// "zipfian".
func ParseDistribution(s string) (Distribution, error) {
	if s == "zipf" {
		return Zipfian, nil
	}
	for d := range Latest + 1 {
		if d.String() == s {
			return d, nil
		}
	}
	return 0, fmt.Errorf("distribution %q: want uniform, zipfian or latest", s)
}

// Workload is a mix of operations, in percent, and where they go.
type Workload struct {
	Name                                        string
	Read, Update, Insert, Scan, ReadModifyWrite int
	Distribution                                Distribution
}

// Workloads are YCSB's core workloads A to F.
func Workloads() []Workload {
	return []Workload{
		{Name: "A", Read: 50, Update: 50, Distribution: Zipfian},
		{Name: "B", Read: 95, Update: 5, Distribution: Zipfian},
		{Name: "C", Read: 100, Distribution: Zipfian},
		{Name: "D", Read: 95, Insert: 5, Distribution: Latest},
		{Name: "E", Scan: 95, Insert: 5, Distribution: Zipfian},
		{Name: "F", Read: 50, ReadModifyWrite: 50, Distribution: Zipfian},
	}
}

// ByName finds a core workload, in either case.
func ByName(name string) (Workload, error) {
	for _, w := range Workloads() {
		if strings.EqualFold(w.Name, name) {
			return w, nil
		}
	}
	return Workload{}, fmt.Errorf("workload %q: want one of A to F", name)
}

// Theta is the skew of YCSB's zipfian distributions.
const Theta = 0.99

// MaxScanLen is the longest scan, in records; lengths are uniform from 1.
const MaxScanLen = 100

// KeyLen is the length of every key, in bytes.
const KeyLen = 16

// Key appends the key of record n: "user" and twelve digits.
func Key(dst []byte, n uint64) []byte {
	dst = append(dst, "user000000000000"...)
	for i := len(dst) - 1; n > 0 && i >= len(dst)-KeyLen+4; i-- {
		dst[i] = byte('0' + n%10)
		n /= 10
	}
	return dst
}

// Keyspace numbers the records of a run: those loaded, from 0, and those
// inserted since.
type Keyspace struct {
	loaded uint64
	mu     struct {
		sync.Mutex
		next uint64          // to hand out
		end  uint64          // records below are in the store
		late map[uint64]bool // inserted, but not yet all before them
	}
}

// NewKeyspace starts with records 0 to loaded-1.
func NewKeyspace(loaded uint64) *Keyspace {
	k := &Keyspace{loaded: loaded}
	k.mu.next, k.mu.end = loaded, loaded
	k.mu.late = make(map[uint64]bool)
	return k
}

// Loaded is the number of records the run began with.
func (k *Keyspace) Loaded() uint64 { return k.loaded }

// End is the number of records that are certainly in the store, counted without
// a gap.
func (k *Keyspace) End() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mu.end
}

func (k *Keyspace) reserve() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.next++
	return k.mu.next - 1
}

// Inserted notes that record n, which a Generator named for Insert, is in the
// store, so that Latest may choose it.
func (k *Keyspace) Inserted(n uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if n < k.mu.end || n >= k.mu.next {
		return
	}
	k.mu.late[n] = true
	for k.mu.late[k.mu.end] {
		delete(k.mu.late, k.mu.end)
		k.mu.end++
	}
}

// Options configure a Generator.
type Options struct {
	Workload Workload
	// Distribution replaces the workload's own, if not 0.
	Distribution Distribution
	Keyspace     *Keyspace
	// Seed and Stream choose the random numbers; the Generators of a run share
	// Seed and differ in Stream.
	Seed, Stream uint64
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var errs []error
	w := o.Workload
	if n := w.Read + w.Update + w.Insert + w.Scan + w.ReadModifyWrite; n != 100 {
		errs = append(errs, fmt.Errorf("Workload %q: shares add up to %d, want 100 percent", w.Name, n))
	}
	if o.Keyspace == nil || o.Keyspace.loaded == 0 {
		errs = append(errs, errors.New("Keyspace: empty, want at least one loaded record"))
	}
	if o.Distribution > Latest || o.Distribution == 0 && w.Distribution == 0 {
		errs = append(errs, fmt.Errorf("Distribution is %d, want uniform, zipfian or latest", o.Distribution))
	}
	return errors.Join(errs...)
}

// Request is one operation.
type Request struct {
	Op     Op
	Record uint64
	// ScanLen is the number of records of a Scan.
	ScanLen int
}

// Generator produces the requests of one thread.
type Generator struct {
	w    Workload
	dist Distribution
	keys *Keyspace
	rng  *rand.Rand
	zipf *Zipf
}

// New makes a Generator.
func New(o Options) (*Generator, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("ycsb: %w", err)
	}
	g := &Generator{w: o.Workload, dist: o.Distribution, keys: o.Keyspace, rng: rand.New(rand.NewPCG(o.Seed, o.Stream))}
	if g.dist == 0 {
		g.dist = o.Workload.Distribution
	}
	switch g.dist {
	case Zipfian:
		g.zipf = NewZipf(scatterItems, Theta)
	case Latest:
		g.zipf = NewZipf(o.Keyspace.loaded, Theta)
	}
	return g, nil
}

// Next is the next request.
func (g *Generator) Next() Request {
	p := g.rng.IntN(100)
	for _, c := range [...]struct {
		op    Op
		share int
	}{{Read, g.w.Read}, {Update, g.w.Update}, {Insert, g.w.Insert}, {Scan, g.w.Scan},
		{ReadModifyWrite, g.w.ReadModifyWrite}} {
		if p -= c.share; p >= 0 {
			continue
		}
		switch c.op {
		case Insert:
			return Request{Op: Insert, Record: g.keys.reserve()}
		case Scan:
			return Request{Op: Scan, Record: g.record(), ScanLen: 1 + g.rng.IntN(MaxScanLen)}
		default:
			return Request{Op: c.op, Record: g.record()}
		}
	}
	panic("ycsb: shares below 100 percent") // Validate refuses them
}

func (g *Generator) record() uint64 {
	switch g.dist {
	case Zipfian:
		return fnv64(g.zipf.Next(g.rng)) % g.keys.loaded
	case Latest:
		end := g.keys.End()
		g.zipf.Grow(end)
		return end - 1 - g.zipf.Next(g.rng)
	default:
		return g.rng.Uint64N(g.keys.loaded)
	}
}

// scatterItems is from how many ranks YCSB draws before it hashes them onto the
// records, so that the skew does not depend on their number.
const scatterItems = 10_000_000_000

// fnv64 is FNV-1a of x's eight bytes.
func fnv64(x uint64) uint64 {
	h := uint64(0xcbf29ce484222325)
	for range 8 {
		h = (h ^ x&0xff) * 0x100000001b3
		x >>= 8
	}
	return h
}
