package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type session struct {
	*client.Client
	inside.Tools
}

// sessions starts a store and opens a session in each of its namespaces: src, of one copy, and dst, of two.
func sessions(t *testing.T) (src, dst session) {
	t.Helper()
	all := sessionsOf(t, 2, 512<<20, devstore.Namespace{Name: "src", BytesPerNode: 96 << 20, Replicas: 1},
		devstore.Namespace{Name: "dst", BytesPerNode: 96 << 20, Replicas: 2})
	return all[0], all[1]
}

// sessionsOf is sessions with so many memory nodes, of capacity bytes each, and with the namespaces given.
func sessionsOf(t *testing.T, nodes int, capacity int64, namespaces ...devstore.Namespace) (all []session) {
	t.Helper()
	s, err := devstore.Start(t.Context(), devstore.Options{Providers: []string{"shm"}, Nodes: nodes,
		CapacityBytes: capacity, Namespaces: namespaces})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, n := range namespaces {
		c, err := client.Open(t.Context(), client.Options{Directory: s.Directory(), Devices: s.Devices(),
			Namespace: n.Name})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		all = append(all, session{c, inside.Of(c)})
	}
	return all
}

func do(t *testing.T, s session, ops ...client.Op) {
	t.Helper()
	s.Do(t.Context(), ops)
	for _, op := range ops {
		if op.Err != nil {
			t.Fatalf("%.40q: %v", op.Key, op.Err)
		}
	}
}

func create(t *testing.T, s session, d Destination) *Snapshot {
	t.Helper()
	m, err := Create(t.Context(), s, d, CreateOptions{Now: time.Now, Manifest: Manifest{Namespace: Namespace{
		Name: "src", Mode: "store"}}})
	if err != nil {
		t.Fatal(err)
	}
	snap, err := Open(t.Context(), d, "src", m.ID)
	if err != nil {
		t.Fatal(err)
	}
	return snap
}

// content is all that a namespace has, with versions.
func content(t *testing.T, s session) map[string]client.Item {
	t.Helper()
	all := make(map[string]client.Item)
	for kv, err := range s.Scan(t.Context(), client.ScanOptions{KeysOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		op := []client.Op{{Kind: client.OpGet, Key: kv.Key, Typed: true}}
		if s.Do(t.Context(), op); op[0].Err != nil {
			t.Fatal(op[0].Err)
		}
		all[string(kv.Key)] = op[0].Item
	}
	return all
}

func differ(t *testing.T, want, got map[string]client.Item) {
	t.Helper()
	for k, a := range want {
		b, ok := got[k]
		if !ok || !bytes.Equal(a.Value, b.Value) || a.Version != b.Version || a.Flags != b.Flags || a.Note != b.Note ||
			a.Type != b.Type || !a.Expires.Equal(b.Expires) {
			t.Errorf("%.40q: there %v: version %d, %d bytes; want version %d, %d bytes", k, ok, b.Version, len(b.Value),
				a.Version, len(a.Value))
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d keys, want %d", len(got), len(want))
	}
}

// TestRestore: all comes back with its version, in a namespace of other copies. Restored again it stays, by each mode
// as it says; and an interrupted restore goes on.
func TestRestore(t *testing.T) {
	src, dst := sessions(t)
	ctx, far := t.Context(), time.Now().Add(time.Hour).Truncate(time.Millisecond)
	var ops []client.Op
	for i := range 600 {
		v := make([]byte, i)
		for k := range v {
			v[k] = byte(rand.Uint32() >> (i % 9))
		}
		op := client.Op{Kind: client.OpPut, Key: fmt.Appendf(nil, "key %d", i), Value: v, Type: client.Type(i % 6),
			Flags: uint32(i % 3), Note: uint64(i % 5)}
		if i%7 == 0 {
			op.Expires = far
		}
		ops = append(ops, op)
	}
	long := bytes.Repeat([]byte("0123456789abcde\n"), (longValue+1<<20)/16)
	do(t, src, append(ops,
		client.Op{Kind: client.OpPut, Key: []byte("long"), Value: long, Flags: 1, Note: 2, Expires: far},
		client.Op{Kind: client.OpPut, Key: []byte("long set"), Value: long, Type: client.Set},
		client.Op{Kind: client.OpPut, Key: bytes.Repeat([]byte{0xff}, client.MaxKeyLen)},
		client.Op{Kind: client.OpPut, Key: []byte("3 MiB"), Value: long[:3<<20]},
		client.Op{Kind: client.OpPut, Key: []byte("soon over"), Expires: far.Add(-time.Minute)})...)
	snap := create(t, src, newMemory())
	if err := Verify(ctx, snap, nil); err != nil || snap.Keys != 605 {
		t.Fatalf("%d keys: %v", snap.Keys, err)
	}
	want := content(t, src)
	restore := func(mode Mode, restored, kept, fresh, expired int64) {
		t.Helper()
		now := func() time.Time { return far.Add(-time.Second) }
		r, err := Restore(ctx, dst, snap, RestoreOptions{Mode: mode, Now: now})
		if err != nil {
			t.Fatal(err)
		}
		if r.Restored != restored || r.Kept != kept || r.Fresh != fresh || r.Expired != expired || r.Records != 605 {
			t.Errorf("%+v, want %d restored, %d kept, %d of new versions, %d expired", *r, restored, kept, fresh,
				expired)
		}
	}
	restore(IfNewer, 604, 0, 0, 1)
	delete(want, "soon over")
	differ(t, want, content(t, dst))
	restore(IfNewer, 0, 604, 0, 1)
	restore(IfAbsent, 0, 604, 0, 1)
	restore(Overwrite, 0, 604, 0, 1)
	differ(t, want, content(t, dst))

	// An earlier version that is there stays only if no key is to be touched.
	do(t, dst, client.Op{Kind: client.OpDelete, Key: []byte("key 4")})
	earlier := []inside.Given{{Key: []byte("key 4"), Value: []byte("earlier"), Version: 1}}
	if dst.PutGiven(ctx, earlier); earlier[0].Err != nil {
		t.Fatal(earlier[0].Err)
	}
	restore(IfAbsent, 0, 604, 0, 1)
	if r, err := Compare(ctx, dst, snap, CompareOptions{Now: time.Now}); err != nil || r.Older != 1 {
		t.Errorf("%+v, %v: want one that is older", *r, err)
	}
	restore(IfNewer, 1, 603, 0, 1)
	differ(t, want, content(t, dst))

	do(t, dst, client.Op{Kind: client.OpPut, Key: []byte("key 1"), Value: []byte("changed")},
		client.Op{Kind: client.OpPut, Key: []byte("key 2"), Value: []byte("changed")},
		client.Op{Kind: client.OpDelete, Key: []byte("key 3")},
		client.Op{Kind: client.OpPut, Key: []byte("extra")})
	compare := func(missing, newer, extra int64) {
		t.Helper()
		r, err := Compare(ctx, dst, snap, CompareOptions{Extra: true, Now: time.Now})
		if err != nil || r.Keys != 605 || r.Missing != missing || r.Newer != newer || r.Extra != extra ||
			r.Older != 0 || r.Different != 0 || r.Same != 605-missing-newer {
			t.Errorf("%+v, %v: want %d missing, %d newer, %d extra", *r, err, missing, newer, extra)
		}
	}
	compare(2, 2, 1)
	restore(IfAbsent, 1, 603, 0, 1)
	compare(1, 2, 1)
	restore(Overwrite, 2, 602, 2, 1)
	compare(1, 0, 1)
	got := content(t, dst)
	for _, k := range []string{"key 1", "key 2"} {
		if got[k].Version <= want[k].Version || !bytes.Equal(got[k].Value, want[k].Value) {
			t.Errorf("%s: version %d, want a later one than %d", k, got[k].Version, want[k].Version)
		}
	}
}

// TestRestoreGoesOn: segments that were done are not read again, by a file of progress that is of this restore alone.
func TestRestoreGoesOn(t *testing.T) {
	_, dst := sessions(t)
	d := newMemory()
	all := someRecords(60, 200)
	for i := range all {
		all[i].Version, all[i].Expiry = uint64(1+i), 0
	}
	m, err := write(t.Context(), d, all, 1000)
	if err != nil {
		t.Fatal(err)
	}
	snap, err := Open(t.Context(), d, "shop", m.ID)
	if err != nil {
		t.Fatal(err)
	}
	last := began1 + m.Segments[len(m.Segments)-1].Name
	good := d.files[last]
	bad := bytes.Clone(good)
	bad[len(bad)-1] ^= 1
	d.files[last] = bad
	o := RestoreOptions{Mode: IfNewer, Now: time.Now, Target: "c/1",
		Progress: filepath.Join(t.TempDir(), "progress")}
	var c *CorruptError
	if _, err := Restore(t.Context(), dst, snap, o); !errors.As(err, &c) || c.File != last {
		t.Fatalf("%v, want that %s is damaged", err, last)
	}
	other := o
	other.Target = "c/2"
	if _, err := Restore(t.Context(), dst, snap, other); err == nil || !strings.Contains(err.Error(), "another") {
		t.Errorf("into another namespace: %v", err)
	}
	d.files[last] = good
	r, err := Restore(t.Context(), dst, snap, o)
	if err != nil || r.Earlier != len(m.Segments)-1 || r.Records != m.Segments[len(m.Segments)-1].Records {
		t.Errorf("%+v, %v: want %d segments done earlier", *r, err, len(m.Segments)-1)
	}
	if _, err := os.Stat(o.Progress); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of progress stays: %v", err)
	}
	cmp, err := Compare(t.Context(), dst, snap, CompareOptions{Extra: true, Now: o.Now})
	if err != nil || cmp.Same != 60 || cmp.Extra != 0 {
		t.Errorf("%+v, %v", *cmp, err)
	}
}

// TestBesideWriters: each record was its key's state at some moment between the snapshot's begin and end.
func TestBesideWriters(t *testing.T) {
	src, _ := sessions(t)
	type write struct{ begun, ended time.Time }
	const keys = 64
	var mu sync.Mutex
	history := make(map[string]map[uint64]write) // by key and version
	for k := range keys {
		history[fmt.Sprint("k", k)] = map[uint64]write{}
	}
	put := func(ctx context.Context, k string) error {
		w := write{begun: time.Now()}
		v, err := src.Put(ctx, []byte(k), []byte(k), client.PutOptions{})
		w.ended = time.Now()
		mu.Lock()
		defer mu.Unlock()
		history[k][v] = w
		return err
	}
	for k := range keys {
		if err := put(t.Context(), fmt.Sprint("k", k)); err != nil {
			t.Fatal(err)
		}
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for n := range 2 {
		wg.Go(func() {
			for i := n; ; i += 2 { // a key has one writer
				select {
				case <-stop:
					return
				default:
				}
				if err := put(t.Context(), fmt.Sprint("k", i%keys)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var snaps []*Snapshot
	d := newMemory()
	for range 8 {
		snaps = append(snaps, create(t, src, d))
	}
	close(stop)
	wg.Wait()
	for _, snap := range snaps {
		seen := map[string]bool{}
		for i := range snap.Segments {
			seg, err := snap.Segment(t.Context(), i)
			if err != nil {
				t.Fatal(err)
			}
			for r, err := seg.Next(); err == nil; r, err = seg.Next() {
				h, ok := history[string(r.Key)][r.Version]
				seen[string(r.Key)] = true
				if !ok || h.begun.After(snap.T1) {
					t.Errorf("%s, version %d: written %v, and the snapshot ends at %v", r.Key, r.Version, h.begun,
						snap.T1)
				}
				for v, next := range history[string(r.Key)] {
					if v > r.Version && next.ended.Before(snap.T0) {
						t.Errorf("%s, version %d: version %d was there before the snapshot", r.Key, r.Version, v)
					}
				}
			}
			seg.Close()
		}
		if len(seen) != keys {
			t.Errorf("%d keys, want %d", len(seen), keys)
		}
	}
}

// TestCreateFails: a snapshot that cannot be written leaves nothing, and none that is begun counts.
func TestCreateFails(t *testing.T) {
	src, _ := sessions(t)
	do(t, src, client.Op{Kind: client.OpPut, Key: []byte("k"), Value: []byte("v")})
	for die := 1; ; die++ {
		d := newMemory()
		d.die = die
		_, err := Create(t.Context(), src, d, CreateOptions{Now: time.Now, Manifest: Manifest{Namespace: Namespace{
			Name: "src"}}})
		if err == nil {
			break
		}
		if all, err := List(t.Context(), d, ""); err != nil || slices.ContainsFunc(all, func(e Entry) bool {
			return e.Complete
		}) {
			t.Errorf("dead at call %d: %+v, %v", die, all, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d := newMemory()
	if _, err := Create(ctx, src, d, CreateOptions{Now: time.Now, Manifest: Manifest{Namespace: Namespace{
		Name: "src"}}}); !errors.Is(err, context.Canceled) || len(d.files) > 0 {
		t.Errorf("%v, and %d files stay", err, len(d.files))
	}
}

// TestPrune: the newest of each hour and day stay, as many as are wanted, and what interrupted writers left goes late.
func TestPrune(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	var all []Entry
	for i := range 200 { // one every 20 minutes
		at := now.Add(-time.Duration(i) * 20 * time.Minute)
		all = append(all, Entry{Namespace: "n", ID: idAt(at), Begun: at, Complete: i%10 != 9, Changed: at})
	}
	for _, c := range []struct {
		keep Keep
		want string // hours before now of those that are complete and stay
	}{
		{Keep{}, "0.0"},
		{Keep{Last: 3}, "0.0 0.3 0.7"},
		{Keep{Hourly: 3}, "0.0 0.3 1.3"},
		{Keep{Daily: 2}, "0.0 12.3"},
		{Keep{Last: 2, Daily: 9}, "0.0 0.3 12.3 36.7 60.3"},
	} {
		stay, away := c.keep.Prune(all, now)
		var got []string
		for _, e := range stay {
			if e.Complete {
				got = append(got, fmt.Sprintf("%.1f", now.Sub(e.Begun).Hours()))
			} else if now.Sub(e.Changed) >= leftoverAge {
				t.Errorf("%+v: %s stays", c.keep, e.ID)
			}
		}
		if text := strings.Join(got, " "); text != c.want || len(stay)+len(away) != len(all) {
			t.Errorf("%+v keeps %s, want %s", c.keep, text, c.want)
		}
	}
}
