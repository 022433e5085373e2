package memtest

import (
	"bytes"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

const (
	// mayFail is the part of the memory that has to be live for a write to fail.
	mayFail = 0.80
	// waited is how long a write takes that has waited for memory.
	waited = 50 * time.Millisecond
	mib    = 1 << 20
)

// form is how much a run does.
type form struct {
	memory   int64         // that each memory node lends
	times    float64       // of the namespace's memory that a case writes
	keys     int           // of the case of small ones
	keySize  int           // of their values
	limit    time.Duration // of a case
	rounds   int           // of kills
	wideNode int64         // memory of each node of the wide namespace
}

// scale is read by tests, so that a remembered result is void when it changes.
var scale = sync.OnceValue(func() form {
	switch os.Getenv("KVD_MEMORY") {
	case "full":
		return form{memory: 512 * mib, times: 10, keys: 1e6, keySize: 16, limit: 4 * time.Minute, rounds: 3,
			wideNode: 64 * mib}
	case "half":
		return form{memory: 256 * mib, times: 2.5, keys: 25e4, keySize: 16, limit: 4 * time.Minute, rounds: 2,
			wideNode: 64 * mib}
	}
	return form{memory: 128 * mib, times: 2.5, keys: 1e5, keySize: 100, limit: 2 * time.Minute, rounds: 1,
		wideNode: 32 * mib}
})

// rig is a store, one of its namespaces, and the model of what is live in it.
type rig struct {
	t    *testing.T
	s    *devstore.Store
	ns   string
	pgs  []uint32
	heap int64 // bytes of all placement groups, each copy counted once
	live ledger

	began time.Time
	ctx   context.Context // ends with the case's time, or its first failure
	stop  context.CancelCauseFunc

	mu struct {
		sync.Mutex
		users   []*user
		writes  []time.Duration
		written int64 // bytes of values
		failed  bool
	}
}

// newRig starts a store as `kvd dev` does: two memory nodes, a store with two copies
// and a cache with one, the usual reclaim epochs and leases, and a janitor.
func newRig(t *testing.T, namespace string) *rig {
	t.Helper()
	r := newStore(t, devstore.Options{Nodes: 2, CapacityBytes: scale().memory,
		Namespaces: []devstore.Namespace{
			{Name: "default", Mode: dirpb.NamespaceMode_NAMESPACE_STORE},
			{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1},
		}})
	r.use(namespace)
	return r
}

func newStore(t *testing.T, o devstore.Options) *rig {
	t.Helper()
	o.Lease, o.EpochInterval = 5*time.Second, 100*time.Millisecond
	if path := os.Getenv("KVD_MEMORY_LOG"); path != "" { // to understand a failure
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		o.Logger = slog.New(slog.NewTextHandler(f, nil))
	}
	r := &rig{t: t}
	timed, end := context.WithTimeoutCause(t.Context(), scale().limit,
		fmt.Errorf("the case takes longer than %v", scale().limit))
	t.Cleanup(end)
	r.ctx, r.stop = context.WithCancelCause(timed)
	var err error
	if r.s, err = devstore.Start(r.ctx, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return r
}

// use makes the rig that of a namespace, once its memory is there.
func (r *rig) use(namespace string) {
	r.t.Helper()
	r.ns = namespace
	r.until("the namespace's memory is there", scale().limit, func() string {
		r.pgs, r.heap = nil, 0
		st := r.status()
		for _, p := range pgsOf(st, namespace) {
			if p.GetState() != dirpb.PGState_PG_ACTIVE {
				return fmt.Sprintf("placement group %d: %v", p.GetId(), p.GetState())
			}
			r.pgs = append(r.pgs, p.GetId())
		}
		for _, u := range st.GetUsage() {
			if slices.Contains(r.pgs, u.GetPgId()) {
				r.heap += int64(u.GetHeapUnits()) * layout.UnitSize
			}
		}
		if r.heap == 0 {
			return "no placement groups"
		}
		return ""
	})
	r.began = time.Now()
	r.t.Cleanup(func() {
		r.report() // while the clients hold what they hold
		r.mu.Lock()
		users := slices.Clone(r.mu.users)
		r.mu.Unlock()
		for _, u := range users {
			u.close()
		}
	})
}

// create makes a namespace that devstore cannot.
func (r *rig) create(q *dirpb.CreateNamespaceRequest) {
	r.t.Helper()
	dir, err := dirclient.Open(dirclient.Options{Addrs: r.s.Directory()})
	if err != nil {
		r.t.Fatal(err)
	}
	err = dir.CallOnce(r.ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, q)
		return err
	})
	if err := errors.Join(err, dir.Close()); err != nil {
		r.t.Fatal(err)
	}
}

func pgsOf(st *dirpb.StatusReply, namespace string) (out []*dirpb.PlacementGroup) {
	for _, n := range st.GetMap().GetNamespaces() {
		for _, p := range st.GetMap().GetPgs() {
			if n.GetName() == namespace && p.GetNamespaceId() == n.GetId() {
				out = append(out, p)
			}
		}
	}
	return out
}

func (r *rig) status() *dirpb.StatusReply {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	st, err := r.s.Status(ctx)
	if err != nil {
		r.t.Errorf("status: %v", err)
	}
	return st
}

// until waits until missing returns nothing.
func (r *rig) until(what string, limit time.Duration, missing func() string) {
	r.t.Helper()
	for end := time.Now().Add(limit); ; {
		left := missing()
		if left == "" {
			return
		}
		if time.Now().After(end) {
			r.t.Fatalf("%s: not within %v: %s\n%s", what, limit, left, r.usage())
		}
		select {
		case <-r.ctx.Done():
			r.t.Fatalf("%s: %v: %s\n%s", what, context.Cause(r.ctx), left, r.usage())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// wait waits for a condition, false: the case has ended before. Any goroutine may call it.
func (r *rig) wait(is func() bool) bool {
	t := time.NewTicker(time.Millisecond)
	defer t.Stop()
	for !is() {
		select {
		case <-r.ctx.Done():
			return false
		case <-t.C:
		}
	}
	return true
}

// fail ends the case; the first call counts. Any goroutine may call it.
func (r *rig) fail(format string, a ...any) {
	r.t.Helper()
	r.mu.Lock()
	again := r.mu.failed
	r.mu.failed = true
	written := r.mu.written
	r.mu.Unlock()
	if again {
		return
	}
	text := fmt.Sprintf(format, a...)
	r.t.Errorf("%s\nafter %v and %.0f MiB (%.2f times the memory), %.1f %% live\n%s", text,
		time.Since(r.began).Round(time.Millisecond),
		float64(written)/mib, float64(written)/float64(r.heap), 100*r.part(), r.usage())
	r.stop(errors.New(text))
}

// check ends the test if anything has failed, or the case's time is over.
func (r *rig) check() {
	r.t.Helper()
	if r.ctx.Err() != nil {
		r.fail("%v", context.Cause(r.ctx))
		r.t.FailNow()
	}
}

// part is how much of the memory is live.
func (r *rig) part() float64 { return float64(r.live.bytes()) / float64(r.heap) }

// total is how many bytes of values a case writes.
func (r *rig) total() int64 { return int64(scale().times * float64(r.heap)) }

// usage tells where the memory is, as the directory and each client know it.
func (r *rig) usage() string {
	var b strings.Builder
	st := r.status()
	for _, u := range st.GetUsage() {
		if !slices.Contains(r.pgs, u.GetPgId()) {
			continue
		}
		fmt.Fprintf(&b, "  placement group %d:", u.GetPgId())
		m := u.ProtoReflect()
		for i := range m.Descriptor().Fields().Len() {
			f := m.Descriptor().Fields().Get(i)
			if name, ok := strings.CutSuffix(string(f.Name()), "_units"); ok && f.Kind() == protoreflect.Uint64Kind &&
				!f.IsList() {
				fmt.Fprintf(&b, " %s %.1f", name, float64(m.Get(f).Uint()*layout.UnitSize)/mib)
			}
		}
		b.WriteString(" MiB\n")
	}
	for _, s := range st.GetSessions() {
		if s.GetNamespace() == r.ns {
			fmt.Fprintf(&b, "  session %d %s: %v\n", s.GetId(), s.GetClient(), s.GetLife())
		}
	}
	for _, j := range st.GetJobs() {
		fmt.Fprintf(&b, "  job %d: %v of placement group %d, %d of %d, %s %s\n", j.GetId(), j.GetKind(), j.GetPgId(),
			j.GetDone(), j.GetTotal(), j.GetReason(), j.GetTrouble())
	}
	r.mu.Lock()
	users := slices.Clone(r.mu.users)
	r.mu.Unlock()
	for _, u := range users {
		s := u.c.Stats()
		m := func(units uint64) float64 { return float64(units*layout.UnitSize) / mib }
		fmt.Fprintf(&b, "  client %s: granted %.1f free %.1f limbo %.1f live %.1f MiB, %d evicted, %d expired\n",
			u.name,
			m(s.GrantedUnits), m(s.FreeUnits), m(s.LimboUnits), m(s.LiveUnits), s.Evicted, s.Expired)
	}
	return b.String()
}

// report prints what the case did.
func (r *rig) report() {
	r.mu.Lock()
	w, written := slices.Clone(r.mu.writes), r.mu.written
	r.mu.Unlock()
	slices.Sort(w)
	at := func(p float64) time.Duration {
		if len(w) == 0 {
			return 0
		}
		return w[min(int(p*float64(len(w))), len(w)-1)].Round(time.Microsecond)
	}
	n, _ := slices.BinarySearch(w, waited)
	usage := ""
	if !r.t.Failed() { // else it has been shown
		usage = r.usage()
	}
	r.t.Logf("memory %.1f MiB, %.0f MiB written (%.1f times), %d writes in %v: p50 %v p99 %v max %v, %d waited; %.1f "+
		"%% live at the end\n%s",
		float64(r.heap)/mib, float64(written)/mib, float64(written)/float64(r.heap), len(w),
		time.Since(r.began).Round(time.Millisecond),
		at(0.5), at(0.99), at(1), len(w)-n, 100*r.part(), usage)
}

// unitsOf is the memory of a record.
func unitsOf(keyLen, size int) int64 {
	code, _ := layout.CodeFor(layout.RecordLen(keyLen, size)) // no case has a value too long for it
	return int64(layout.UnitsOf(code))
}

// ledger is what is live: keys that were written, not deleted since, and have not expired.
type ledger struct {
	mu      sync.Mutex
	units   int64
	entries map[string]*entry
	due     dues
}

type entry struct {
	key     string
	units   int64
	expires time.Time // zero: never
}

// dues is a heap of entries that expire, the first one on top.
type dues []*entry

func (d dues) Len() int           { return len(d) }
func (d dues) Less(i, j int) bool { return d[i].expires.Before(d[j].expires) }
func (d dues) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *dues) Push(x any)        { *d = append(*d, x.(*entry)) }
func (d *dues) Pop() any {
	last := (*d)[len(*d)-1]
	*d = (*d)[:len(*d)-1]
	return last
}

// put notes a value before it is written.
func (l *ledger) put(key string, size int, ttl time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropLocked(key)
	if l.entries == nil {
		l.entries = map[string]*entry{}
	}
	e := &entry{key: key, units: unitsOf(len(key), size)}
	l.entries[key] = e
	l.units += e.units
	if ttl > 0 {
		e.expires = time.Now().Add(ttl)
		heap.Push(&l.due, e)
	}
}

// drop notes that a key is gone.
func (l *ledger) drop(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropLocked(key)
}

func (l *ledger) dropLocked(key string) {
	if e := l.entries[key]; e != nil {
		l.units -= e.units
		delete(l.entries, key)
	}
}

func (l *ledger) bytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	for now := time.Now(); len(l.due) > 0 && !l.due[0].expires.After(now); {
		if e := heap.Pop(&l.due).(*entry); l.entries[e.key] == e {
			l.dropLocked(e.key)
		}
	}
	return l.units * layout.UnitSize
}

// keyOf names value i of a client that writes values of this size.
func keyOf(prefix string, i, size int) string { return fmt.Sprintf("%s/%d/%d", prefix, i, size) }

func numberOf(key []byte) int {
	n, _ := strconv.Atoi(strings.Split(string(key), "/")[1]) // made by keyOf
	return n
}

// pattern is what values are made of.
var pattern = func() []byte {
	b := make([]byte, 256<<10)
	for i := range b {
		b[i] = byte(i * 131 >> 3)
	}
	return b
}()

// stamp makes a value that another key's would not pass for. It reuses b.
func stamp(b []byte, key string, size int) []byte {
	b = append(b[:0], pattern[:size]...)
	copy(b, key)
	copy(b[size-min(size, len(key)):], key)
	return b
}

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// user is a client.
type user struct {
	r    *rig
	name string
	c    *client.Client
}

// open starts a client, over shm unless another provider is named. The rig closes it.
func (r *rig) open(name string, provider ...string) *user {
	r.t.Helper()
	c, err := client.Open(r.ctx, client.Options{Directory: r.s.Directory(), Devices: r.s.Devices(), Namespace: r.ns,
		Provider: append(provider, "shm")[0], Name: name})
	if err != nil {
		r.t.Fatal(err)
	}
	u := &user{r: r, name: name, c: c}
	r.mu.Lock()
	r.mu.users = append(r.mu.users, u)
	r.mu.Unlock()
	return u
}

// close is idempotent.
func (u *user) close() {
	u.r.mu.Lock()
	i := slices.Index(u.r.mu.users, u)
	if i >= 0 {
		u.r.mu.users = slices.Delete(u.r.mu.users, i, i+1)
	}
	u.r.mu.Unlock()
	if i < 0 {
		return
	}
	if err := u.c.Close(); err != nil {
		u.r.t.Errorf("close client %s: %v", u.name, err)
	}
}

// held is what the client keeps without using it, in bytes.
func (u *user) held() int64 {
	s := u.c.Stats()
	return int64(s.FreeUnits+s.LimboUnits) * layout.UnitSize
}

// put writes a value of a size. An error has failed the case, unless so much is live that
// a write may fail.
func (u *user) put(key string, size int, ttl time.Duration) error {
	u.r.t.Helper()
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	*b = stamp(*b, key, size)
	u.r.live.put(key, size, ttl)
	began := time.Now()
	_, err := u.c.Put(u.r.ctx, []byte(key), *b, client.PutOptions{TTL: ttl})
	u.r.wrote(time.Since(began), int64(size), err)
	if err == nil {
		return nil
	}
	part := u.r.part()
	u.r.live.drop(key)
	u.r.refused(u, err, part)
	return err
}

func (r *rig) wrote(took time.Duration, size int64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.writes = append(r.mu.writes, took)
	if err == nil {
		r.mu.written += size
	}
}

// refused judges a write's error while so much was live.
func (r *rig) refused(u *user, err error, part float64) {
	r.t.Helper()
	switch {
	case r.ctx.Err() != nil:
		r.fail("%v", context.Cause(r.ctx))
	case part < mayFail:
		r.fail("client %s: a write fails with %.1f %% live: %v", u.name, 100*part, err)
	case !errors.Is(err, client.ErrFull):
		r.fail("client %s: %v", u.name, err)
	}
}

// drop deletes a key, which must be there unless it may have expired or been evicted.
func (u *user) drop(key string, mayBeGone bool) error {
	u.r.t.Helper()
	err := u.c.Delete(u.r.ctx, []byte(key))
	if err == nil || mayBeGone && errors.Is(err, client.ErrNotFound) {
		u.r.live.drop(key)
		return nil
	}
	u.r.fail("client %s: delete of %q: %v", u.name, key, err)
	return err
}

// checkKey reads a key and checks that the value is its own.
func (u *user) checkKey(key string, size int, mayBeGone bool) error {
	u.r.t.Helper()
	it, err := u.c.Get(u.r.ctx, []byte(key))
	if mayBeGone && errors.Is(err, client.ErrNotFound) {
		return nil
	}
	if err == nil && !bytes.Equal(it.Value, stamp(nil, key, size)) {
		err = fmt.Errorf("%d bytes that nobody wrote, want %d", len(it.Value), size)
	}
	if err != nil {
		u.r.fail("client %s: get of %q: %v", u.name, key, err)
	}
	return err
}

// flush deletes every key as FLUSHDB does, a page at a time, and returns how many it found; only, if not nil, chooses.
// The scan may give a key twice, if its shard moves meanwhile: then it is deleted once.
func (u *user) flush(only func(key []byte) bool) (n int) {
	u.r.t.Helper()
	for cur := (client.Cursor{}); !cur.Done; {
		var names [][]byte
		for kv, err := range u.c.Scan(u.r.ctx, client.ScanOptions{Cursor: &cur, Count: 1000, KeysOnly: true,
			Expired: true, Match: only}) {
			if err != nil {
				u.r.fail("client %s: scan: %v", u.name, err)
				return n
			}
			names = append(names, kv.Key)
		}
		for i, res := range u.c.MultiDelete(u.r.ctx, names) {
			switch {
			case res.Err == nil:
				n++
			case !errors.Is(res.Err, client.ErrNotFound):
				u.r.fail("client %s: delete of %q: %v", u.name, names[i], res.Err)
			}
			u.r.live.drop(string(names[i]))
		}
	}
	u.r.check()
	return n
}

// fill writes values of the sizes that next gives until the part is live, several at a
// time, and returns how many.
func (u *user) fill(prefix string, part float64, next func(i int) int) (n int) {
	u.r.t.Helper()
	const workers = 2
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for u.r.ctx.Err() == nil {
				mu.Lock()
				i := n
				n++
				mu.Unlock()
				if u.r.part() >= part || u.put(keyOf(prefix, i, next(i)), next(i), 0) != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	u.r.check()
	return n
}
