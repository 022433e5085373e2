// Package cost measures what the store's operations cost, in round trips, verbs
// and bytes, and compares that with the table of docs/protocol.md ("Costs").
//
// It runs every operation of the table several times on keys of its own and
// reads the sessions' counters before and after. It opens no store itself; the
// caller gives it a way to. Start with [Measure] and [Row]. Only a single Measure may run at a time per set
// of sessions; keys are deleted at the end.
//
// The papers that this design descends from (RACE, FUSEE, Outback) are compared
// with it by counting verbs instead of timing them. Counts do not depend on the
// machine.
package cost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/client"
)

// Session is the part of a client that the table is about. It must have one
// lane, so that a batch is not divided.
type Session interface {
	Get(ctx context.Context, key []byte) (client.Item, error)
	Put(ctx context.Context, key, value []byte, o client.PutOptions) (uint64, error)
	Delete(ctx context.Context, key []byte) error
	MultiGet(ctx context.Context, keys [][]byte) []client.Result
	MultiCAS(ctx context.Context, ops []client.Op) error
	Stats() client.Stats
	Close() error
}

// Options configure Measure.
type Options struct {
	// Open opens a session that has never seen a key. Required.
	Open func(context.Context) (Session, error)
	// OpenMirrored opens one with a mirror that remembers four keys at most. Required.
	OpenMirrored func(context.Context) (Session, error)
	// Group tells the placement group that a key is in. nil: all are in one.
	Group func(s Session, key []byte) (uint32, error)
	// Prefix begins every key. Required; nobody else may use it meanwhile.
	Prefix string
	// Replicas is how many copies the keys have. Default 1.
	Replicas int
	// Trials is how often each operation runs. Default 16.
	Trials int
	// Batch is the number of keys of a MULTI-GET. Default 32.
	Batch int
	// ValueBytes is the length of the values. Default 64.
	ValueBytes int
}

func (o *Options) ensureDefaults() {
	o.Replicas = cmp.Or(o.Replicas, 1)
	o.Trials = cmp.Or(o.Trials, 16)
	o.Batch = cmp.Or(o.Batch, 32)
	o.ValueBytes = cmp.Or(o.ValueBytes, 64)
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var errs []error
	if o.Open == nil {
		errs = append(errs, errors.New("Open: nil"))
	}
	if o.OpenMirrored == nil {
		errs = append(errs, errors.New("OpenMirrored: nil"))
	}
	if o.Prefix == "" {
		errs = append(errs, errors.New("Prefix: empty"))
	}
	if o.Replicas < 1 {
		errs = append(errs, fmt.Errorf("Replicas is %d, want at least 1", o.Replicas))
	}
	if o.Trials < 1 || o.Trials > 10_000 {
		errs = append(errs, fmt.Errorf("Trials is %d, want 1 to 10000", o.Trials))
	}
	if o.Batch < 2 || o.Batch > 64 {
		errs = append(errs, fmt.Errorf("Batch is %d keys, want 2 to 64", o.Batch))
	}
	if o.ValueBytes < 0 || o.ValueBytes > 4096 {
		errs = append(errs, fmt.Errorf("ValueBytes is %d, want 0 to 4096", o.ValueBytes))
	}
	return errors.Join(errs...)
}

// Count is what one run of an operation took.
type Count struct {
	RTT   uint64 `json:"rtt"`
	Verbs uint64 `json:"verbs"`
	// Behind are verbs that follow the answer.
	Behind uint64 `json:"behind,omitempty"`
	// Doorbells includes those off the path. If a batch's completions come one
	// by one, so do the doorbells of its second round trip.
	Doorbells  uint64 `json:"doorbells"`
	ReadBytes  uint64 `json:"read_bytes"`
	WriteBytes uint64 `json:"write_bytes"`
}

// Cost is round trips and verbs to the answer, and verbs behind it.
type Cost struct {
	RTT    uint64 `json:"rtt"`
	Verbs  uint64 `json:"verbs"`
	Behind uint64 `json:"behind,omitempty"`
}

// Row is one line of the table.
type Row struct {
	Operation string `json:"operation"`
	// Keys is the number of keys of one run.
	Keys int `json:"keys"`
	// Table is what the operation costs with 1, 2 and 3 replicas.
	Table [3]Cost `json:"table"`
	// WantRTT, WantVerbs and WantBehind are what it costs with the replicas that there are.
	WantRTT    uint64 `json:"want_rtt"`
	WantVerbs  uint64 `json:"want_verbs"`
	WantBehind uint64 `json:"want_behind,omitempty"`
	// Count is the most frequent measurement. Others are legitimate but rare: a
	// fingerprint that another key shares costs one more READ, a key in the stash
	// one or two more round trips.
	Count
	Trials int `json:"trials"`
	// Agree is how many of the trials took what was wanted.
	Agree int  `json:"agree"`
	OK    bool `json:"ok"`
}

// want gives the expected round trips and verbs with r replicas.
type want func(r uint64) Cost

// Readers ask the tail alone. A write adds a round trip for each replica that
// it is published to, and a record for each; with one replica, the head's group
// is the tail's and is read once.
var (
	getCached    want = func(uint64) Cost { return Cost{RTT: 1, Verbs: 2} }
	get          want = func(uint64) Cost { return Cost{RTT: 2, Verbs: 2} }
	updateCached want = func(r uint64) Cost { return Cost{RTT: r, Verbs: 2 * r} }
	// a GET and an UPDATE by what that has proven
	updateMirrored want = func(r uint64) Cost { return Cost{RTT: 1 + r, Verbs: 2 + 2*r} }
	update         want = func(r uint64) Cost { return Cost{RTT: 2 + r, Verbs: 4 + 2*r + min(r-1, 1)} }
	insert         want = func(r uint64) Cost { return Cost{RTT: 1 + r, Verbs: 3 + 2*r + min(r-1, 1)} }
	deleteCached   want = func(r uint64) Cost { return Cost{RTT: r, Verbs: r} }
)

// txnCached is the cost of a transaction that puts n keys: each takes two records and a slot word, the status word
// decides, and behind the answer each key's slot word goes on.
func txnCached(n uint64) want {
	return func(r uint64) Cost { return Cost{RTT: 2 * r, Verbs: 3*n*r + r, Behind: n * r} }
}

// txnChained is the same where a chain stops at a miss, and the keys are in one placement group: with one replica the
// chain also decides, and settles. It asks for each slot word but one before it changes any.
func txnChained(n uint64) want {
	return func(r uint64) Cost {
		if r == 1 {
			return Cost{RTT: 1, Verbs: 5 * n}
		}
		return txnCached(n)(r)
	}
}

// chains reports whether all providers that a session uses have Caps.StopAtMiss.
func chains(s client.Stats) bool {
	for _, p := range s.Connections {
		if p != "shm" && p != "tcp" {
			return false
		}
	}
	return len(s.Connections) > 0
}

// of is the cost of n keys at once, which share their round trips.
func (w want) of(n uint64) want {
	return func(r uint64) Cost {
		c := w(r)
		return Cost{RTT: c.RTT, Verbs: c.Verbs * n}
	}
}

// Measure runs the operations of the table and returns its rows in order. An
// error means that the store failed, not that a cost differs.
func Measure(ctx context.Context, o Options) (rows []Row, err error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("cost: %w", err)
	}
	m := &measurement{o: o, ctx: ctx, value: make([]byte, o.ValueBytes)}
	defer func() { err = errors.Join(err, m.close()) }()

	single := m.keys("one", o.Trials)
	batches := make([][][]byte, min(o.Trials, 8))
	for i := range batches {
		batches[i] = m.keys(fmt.Sprintf("many%d", i), o.Batch)
	}

	// a knows every key, because it writes them; the others have never seen any.
	a, err := m.open()
	if err != nil {
		return nil, err
	}
	singles, err := m.eachAlone(a, single)
	if err != nil {
		return nil, err
	}
	multis, err := m.allAtOnce(a, batches)
	if err != nil {
		return nil, err
	}
	mirrored, err := m.mirrored(batches)
	if err != nil {
		return nil, err
	}
	rows = append(append(singles, mirrored...), multis...)
	for _, n := range []int{2, 4} {
		r, err := m.multiCAS(a, n)
		if err != nil {
			return nil, err
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// AllOK reports whether every row is as expected.
func AllOK(rows []Row) bool {
	return !slices.ContainsFunc(rows, func(r Row) bool { return !r.OK })
}

type measurement struct {
	o        Options
	ctx      context.Context
	value    []byte
	sessions []Session
	stored   [][]byte // to delete at the end
}

// keys are named by number of bytes alike, so that their records cost alike.
func (m *measurement) keys(kind string, n int) [][]byte {
	ks := make([][]byte, n)
	for i := range ks {
		ks[i] = fmt.Appendf(nil, "%s%s/%06d", m.o.Prefix, kind, i)
	}
	return ks
}

// eachAlone runs the operations on one key, in an order in which each finds the keys as its row wants them: a inserts
// them and has them in its cache from then on, and the sessions opened here, which have not, read, update and delete
// them. The rows are in the table's order.
func (m *measurement) eachAlone(a Session, keys [][]byte) ([]Row, error) {
	put := func(s Session) func([]byte) error {
		return func(k []byte) error {
			_, err := s.Put(m.ctx, k, m.value, client.PutOptions{})
			return err
		}
	}
	getOf := func(s Session) func([]byte) error {
		return func(k []byte) error { _, err := s.Get(m.ctx, k); return err }
	}
	// A key is m.stored from before its first write until after its delete.
	m.stored = append(m.stored, keys...)
	rInsert, err := m.each("INSERT", a, keys, insert, put(a))
	if err != nil {
		return nil, err
	}
	rGetCached, err := m.each("GET cached", a, keys, getCached, getOf(a))
	if err != nil {
		return nil, err
	}
	rUpdateCached, err := m.each("UPDATE cached", a, keys, updateCached, put(a))
	if err != nil {
		return nil, err
	}

	b, err := m.open()
	if err != nil {
		return nil, err
	}
	rGet, err := m.each("GET", b, keys, get, getOf(b))
	if err != nil {
		return nil, err
	}
	c, err := m.open()
	if err != nil {
		return nil, err
	}
	rUpdate, err := m.each("UPDATE, no hint", c, keys, update, put(c))
	if err != nil {
		return nil, err
	}
	rDelete, err := m.each("DELETE cached", c, keys, deleteCached, func(k []byte) error { return c.Delete(m.ctx, k) })
	if err != nil {
		return nil, err
	}
	return []Row{rGetCached, rGet, rUpdateCached, rUpdate, rInsert, rDelete}, nil
}

// allAtOnce runs MULTI-GET on batches of keys that a writes, by a, which has them in its cache, and by a session that
// has never seen any.
func (m *measurement) allAtOnce(a Session, batches [][][]byte) ([]Row, error) {
	// Each batch is measured right after it was written and read once: the cache
	// of slot words is set-associative and may have dropped one of many keys.
	var cached []Count
	for _, ks := range batches {
		m.stored = append(m.stored, ks...)
		for _, k := range ks {
			if _, err := a.Put(m.ctx, k, m.value, client.PutOptions{}); err != nil {
				return nil, fmt.Errorf("cost: put %q: %w", k, err)
			}
		}
		if _, err := m.multiGet(a, ks); err != nil {
			return nil, err
		}
		n, err := m.multiGet(a, ks)
		if err != nil {
			return nil, err
		}
		cached = append(cached, n)
	}
	d, err := m.open()
	if err != nil {
		return nil, err
	}
	var uncached []Count
	for _, ks := range batches {
		n, err := m.multiGet(d, ks)
		if err != nil {
			return nil, err
		}
		uncached = append(uncached, n)
	}
	n := uint64(m.o.Batch)
	return []Row{
		m.row(fmt.Sprintf("MULTI-GET of %d, cached", n), m.o.Batch, cached, getCached.of(n)),
		m.row(fmt.Sprintf("MULTI-GET of %d", n), m.o.Batch, uncached, get.of(n)),
	}, nil
}

// rest is how long a mirror's reader has done nothing when its pass is taken to be over. The next one is far off.
const rest = 250 * time.Millisecond

// readerRests waits for the end of a pass of the mirror's reader, whose READs would count.
func (m *measurement) readerRests(s Session) error {
	tick := time.NewTicker(rest / 10)
	defer tick.Stop()
	for scans, since := s.Stats().Ops["scan"], time.Now(); time.Since(since) < rest; {
		select {
		case <-tick.C:
		case <-m.ctx.Done():
			return m.ctx.Err()
		}
		if n := s.Stats().Ops["scan"]; n != scans {
			scans, since = n, time.Now()
		}
	}
	return nil
}

// mirrored runs GETs, then UPDATEs, by a session that has READ the groups of the keys, and does not remember these.
func (m *measurement) mirrored(batches [][][]byte) ([]Row, error) {
	s, err := m.openBy(m.o.OpenMirrored)
	if err != nil {
		return nil, err
	}
	last := m.keys(fmt.Sprintf("warm%d", len(m.sessions)), warmKeys)
	keys := batches[0][:min(len(batches[0]), m.o.Trials)]
	row := func(name string, w want, op func([]byte) error) (Row, error) {
		for _, ks := range append(slices.Clone(batches), last) { // the last of these are what it remembers
			if _, err := m.multiGet(s, ks); err != nil {
				return Row{}, err
			}
		}
		if err := m.readerRests(s); err != nil {
			return Row{}, err
		}
		return m.each(name, s, keys, w, op)
	}
	rGet, err := row("GET, mirrored", getCached, func(k []byte) error { _, err := s.Get(m.ctx, k); return err })
	if err != nil {
		return nil, err
	}
	rUpdate, err := row("UPDATE, mirrored", updateMirrored, func(k []byte) error {
		_, err := s.Put(m.ctx, k, m.value, client.PutOptions{})
		return err
	})
	return []Row{rGet, rUpdate}, err
}

// warmKeys are enough that every memory node holds one of them.
const warmKeys = 16

// open opens a session and makes it connect and take memory, which is not part
// of any operation's cost.
func (m *measurement) open() (Session, error) { return m.openBy(m.o.Open) }

func (m *measurement) openBy(open func(context.Context) (Session, error)) (Session, error) {
	s, err := open(m.ctx)
	if err != nil {
		return nil, err
	}
	m.sessions = append(m.sessions, s)
	warm := m.keys(fmt.Sprintf("warm%d", len(m.sessions)), warmKeys)
	m.stored = append(m.stored, warm...)
	for _, k := range warm {
		if _, err := s.Put(m.ctx, k, m.value, client.PutOptions{}); err != nil {
			return nil, fmt.Errorf("cost: put %q: %w", k, err)
		}
	}
	return s, nil
}

func (m *measurement) close() error {
	var errs []error
	if len(m.sessions) > 0 {
		// Also when m.ctx was cancelled: leave nothing behind.
		ctx := context.WithoutCancel(m.ctx)
		for _, k := range m.stored {
			err := m.sessions[0].Delete(ctx, k)
			if err != nil && !errors.Is(err, client.ErrNotFound) {
				errs = append(errs, fmt.Errorf("cost: delete %q: %w", k, err))
				break
			}
		}
	}
	for _, s := range m.sessions {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// each runs op on every key and counts it by itself.
func (m *measurement) each(name string, s Session, keys [][]byte, w want, op func([]byte) error) (Row, error) {
	counts := make([]Count, len(keys))
	for i, k := range keys {
		before := s.Stats()
		if err := op(k); err != nil {
			return Row{}, fmt.Errorf("cost: %s %q: %w", name, k, err)
		}
		counts[i] = diff(before, s.Stats())
	}
	return m.row(name, 1, counts, w), nil
}

// multiGet counts one MULTI-GET. Its keys go side by side, so its round trips are
// those of the key that takes most: the mean, rounded up, if all take the same
// but a few that take more.
func (m *measurement) multiGet(s Session, keys [][]byte) (Count, error) {
	before := s.Stats()
	for i, r := range s.MultiGet(m.ctx, keys) {
		if r.Err != nil {
			return Count{}, fmt.Errorf("cost: MULTI-GET: key %q: %w", keys[i], r.Err)
		}
	}
	c := diff(before, s.Stats())
	n := uint64(len(keys))
	c.RTT = (c.RTT + n - 1) / n
	return c, nil
}

// multiCAS counts transactions that put the same n keys of one placement group again and again. The first two of them,
// which make the keys, take status words and remember where the keys are, do not count.
func (m *measurement) multiCAS(s Session, n int) (Row, error) {
	name := fmt.Sprintf("MULTI-CAS of %d, cached", n)
	ops := make([]client.Op, n)
	keys, err := m.together(s, n)
	if err != nil {
		return Row{}, fmt.Errorf("cost: %s: %w", name, err)
	}
	for i, k := range keys {
		ops[i] = client.Op{Kind: client.OpPut, Key: k, Value: m.value}
		m.stored = append(m.stored, k)
	}
	counts := make([]Count, m.o.Trials)
	for i := -2; i < len(counts); i++ {
		before := s.Stats()
		if err := s.MultiCAS(m.ctx, ops); err != nil {
			return Row{}, fmt.Errorf("cost: %s: %w", name, err)
		}
		after, err := m.settled(s, before, uint64(n))
		if err != nil {
			return Row{}, fmt.Errorf("cost: %s: %w", name, err)
		}
		if i < 0 {
			continue
		}
		c := diff(before, after)
		took := func(kind string) uint64 { return after.Rounds[kind] - before.Rounds[kind] }
		// A settle is one verb a round trip. Its keys are prepared side by side.
		c.Behind = took("settle")
		c.Verbs -= c.Behind
		c.RTT = (took("prepare")+uint64(n)-1)/uint64(n) + took("decide") + took("transact")
		counts[i] = c
	}
	if chains(s.Stats()) {
		return m.row(name, n, counts, txnChained(uint64(n))), nil
	}
	return m.row(name, n, counts, txnCached(uint64(n))), nil
}

// together makes n keys of one placement group.
func (m *measurement) together(s Session, n int) (keys [][]byte, err error) {
	groups := map[uint32][][]byte{}
	for _, k := range m.keys(fmt.Sprintf("txn%d", n), 64*n) {
		group := uint32(0)
		if m.o.Group != nil {
			if group, err = m.o.Group(s, k); err != nil {
				return nil, err
			}
		}
		if groups[group] = append(groups[group], k); len(groups[group]) == n {
			return groups[group], nil
		}
	}
	return nil, fmt.Errorf("%d keys are in %d placement groups, and no %d in one", 64*n, len(groups), n)
}

// settled waits until a session has performed n settles since before, which follow an answer; or none, if the answer
// had nothing to settle.
func (m *measurement) settled(s Session, before client.Stats, n uint64) (client.Stats, error) {
	const limit = 10 * time.Second
	for end := time.Now().Add(limit); ; {
		st := s.Stats()
		switch {
		case st.Ops["settle"] >= before.Ops["settle"]+n, st.Ops["decide"] == before.Ops["decide"]:
			return st, nil
		case time.Now().After(end):
			return st, fmt.Errorf("%w: nothing was settled for %v", client.ErrUnavailable, limit)
		}
		select {
		case <-time.After(100 * time.Microsecond):
		case <-m.ctx.Done():
			return st, context.Cause(m.ctx)
		}
	}
}

func diff(a, b client.Stats) (c Count) {
	for kind, n := range b.Rounds {
		c.RTT += n - a.Rounds[kind]
	}
	c.Verbs = b.Verbs.Total() - a.Verbs.Total()
	c.Doorbells = b.Verbs.Doorbells - a.Verbs.Doorbells
	c.ReadBytes = b.Verbs.ReadBytes - a.Verbs.ReadBytes
	c.WriteBytes = b.Verbs.WriteBytes - a.Verbs.WriteBytes
	return c
}

func (m *measurement) row(name string, keys int, counts []Count, w want) Row {
	c := w(uint64(m.o.Replicas))
	r := Row{Operation: name, Keys: keys, WantRTT: c.RTT, WantVerbs: c.Verbs, WantBehind: c.Behind, Trials: len(counts)}
	for i := range r.Table {
		r.Table[i] = w(uint64(i + 1))
	}
	cost := func(c Count) Cost { return Cost{c.RTT, c.Verbs, c.Behind} }
	seen := make(map[Cost]int)
	best := 0
	for _, x := range counts {
		seen[cost(x)]++
		if cost(x) == c {
			r.Agree++
		}
	}
	for _, x := range counts {
		if n := seen[cost(x)]; n > best {
			best, r.Count = n, x
		}
	}
	r.OK = cost(r.Count) == c
	return r
}
