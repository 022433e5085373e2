package clienttest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/devstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func put(t *testing.T, s client.API, key, value string, o client.PutOptions) uint64 {
	t.Helper()
	v, err := s.Put(t.Context(), []byte(key), []byte(value), o)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func wantGet(t *testing.T, s client.API, key, want string) {
	t.Helper()
	it, err := s.Get(t.Context(), []byte(key))
	if err != nil || string(it.Value) != want {
		t.Fatalf("get %q: %q, %v, want %q", key, it.Value, err, want)
	}
}

func wantErr(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

func TestExpiry(t *testing.T) {
	now := time.UnixMilli(1_000_000)
	s := clienttest.New(clienttest.Options{Now: func() time.Time { return now }})
	ctx := t.Context()
	put(t, s, "k", "v", client.PutOptions{TTL: 2*time.Millisecond + 999*time.Microsecond})
	now = now.Add(time.Millisecond)
	wantGet(t, s, "k", "v")
	if n, err := s.Count(ctx); n != 1 || err != nil {
		t.Fatalf("count: %d, %v", n, err)
	}
	now = now.Add(time.Millisecond)
	_, err := s.Get(ctx, []byte("k"))
	wantErr(t, err, client.ErrNotFound)
	wantErr(t, s.Delete(ctx, []byte("k")), client.ErrNotFound)
	wantErr(t, s.Touch(ctx, []byte("k"), time.Second), client.ErrNotFound)
	if n, err := s.Count(ctx); n != 0 || err != nil {
		t.Fatalf("count: %d, %v", n, err)
	}
	put(t, s, "k", "v", client.PutOptions{TTL: time.Second, Flags: 9})
	if err := s.Touch(ctx, []byte("k"), 0); err != nil {
		t.Fatal(err)
	}
	now = now.Add(time.Hour)
	it, err := s.Get(ctx, []byte("k"))
	if err != nil || it.Flags != 9 || !it.Expires.IsZero() {
		t.Fatalf("touched: %+v, %v", it, err)
	}
}

func TestBounds(t *testing.T) {
	ctx := t.Context()
	now := time.UnixMilli(1_000_000)
	clock := func() time.Time { return now }
	s := clienttest.New(clienttest.Options{Now: clock, MaxKeys: 2, MaxBytes: 10})
	put(t, s, "a", "1234", client.PutOptions{TTL: time.Second})
	put(t, s, "b", "1234", client.PutOptions{})
	_, err := s.Put(ctx, []byte("c"), nil, client.PutOptions{})
	wantErr(t, err, client.ErrFull)
	_, err = s.Put(ctx, []byte("b"), []byte("12345"), client.PutOptions{})
	wantErr(t, err, client.ErrFull)
	wantGet(t, s, "b", "1234")
	put(t, s, "b", "", client.PutOptions{})
	put(t, s, "b", "4321", client.PutOptions{})
	now = now.Add(time.Second) // a is gone
	put(t, s, "c", "12", client.PutOptions{})

	s = clienttest.New(clienttest.Options{MaxKeys: 3, MaxBytes: 12, Evict: true})
	for _, k := range []string{"a", "b", "c"} {
		put(t, s, k, k, client.PutOptions{})
	}
	wantGet(t, s, "a", "a")
	put(t, s, "d", "d", client.PutOptions{})
	_, err = s.Get(ctx, []byte("b"))
	wantErr(t, err, client.ErrNotFound)
	wantGet(t, s, "a", "a")
	// c, the one used last but for a and d, makes room for a longer c.
	put(t, s, "c", "12345678", client.PutOptions{})
	_, err = s.Get(ctx, []byte("d"))
	wantErr(t, err, client.ErrNotFound)
	wantGet(t, s, "a", "a")
	_, err = s.Put(ctx, []byte("c"), make([]byte, 12), client.PutOptions{})
	wantErr(t, err, client.ErrFull)
	wantGet(t, s, "c", "12345678")
}

// A View expires by the test's clock.
func TestViewExpires(t *testing.T) {
	now := time.Unix(1000, 0)
	s := clienttest.New(clienttest.Options{Now: func() time.Time { return now }})
	if _, err := s.Put(t.Context(), []byte("k"), []byte("v"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	v, err := s.View(t.Context(), []byte("k"), client.ViewOptions{Hold: time.Minute / 10})
	if err != nil || v.Err() != nil || string(v.Parts()[0]) != "v" {
		t.Fatalf("%v, %v", err, v)
	}
	now = now.Add(time.Minute / 10)
	if err := v.Release(); !errors.Is(err, client.ErrViewExpired) {
		t.Errorf("its Hold is over: %v", err)
	}
}

func TestFail(t *testing.T) {
	ctx := t.Context()
	s := clienttest.New(clienttest.Options{})
	put(t, s, "k", "old", client.PutOptions{})

	var seen []string
	fault := clienttest.Fault{Err: client.ErrUnavailable}
	s.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		seen = append(seen, fmt.Sprintf("%d %s", o.Kind, o.Key))
		return fault
	})
	_, err := s.Put(ctx, []byte("k"), []byte("new"), client.PutOptions{})
	wantErr(t, err, client.ErrUnavailable)
	fault = clienttest.Fault{Err: client.ErrUnknownOutcome}
	_, err = s.Put(ctx, []byte("k"), []byte("new"), client.PutOptions{})
	wantErr(t, err, client.ErrUnknownOutcome)
	fault = clienttest.Fault{}
	wantGet(t, s, "k", "old")
	boom := errors.New("boom")
	fault = clienttest.Fault{Err: boom, Applied: true}
	v, err := s.Put(ctx, []byte("k"), []byte("new"), client.PutOptions{})
	wantErr(t, err, client.ErrUnknownOutcome)
	wantErr(t, err, boom)
	if v != 0 {
		t.Fatalf("version %d of a put that nobody knows of", v)
	}
	_, err = s.Incr(ctx, []byte("n"), 5)
	wantErr(t, err, client.ErrUnknownOutcome)
	for _, r := range s.MultiDelete(ctx, [][]byte{[]byte("x"), []byte("y")}) {
		wantErr(t, r.Err, client.ErrUnknownOutcome)
	}
	for _, err := range s.Scan(ctx, client.ScanOptions{}) {
		wantErr(t, err, boom)
	}
	_, err = s.Count(ctx)
	wantErr(t, err, boom)
	s.Fail(nil)
	wantGet(t, s, "k", "new")
	wantGet(t, s, "n", "5")
	want := "2 k|2 k|1 k|2 k|4 n|3 y|3 x|0 |0 "
	if got := strings.Join(seen, "|"); got != want {
		t.Fatalf("the hook saw %s, want %s", got, want)
	}

	gone, cancel := context.WithCancelCause(ctx)
	cancel(boom)
	_, err = s.Get(gone, []byte("k"))
	wantErr(t, err, boom)
}

// A change in between makes Update ask again, with what is there then.
func TestUpdateAsksAgain(t *testing.T) {
	s := clienttest.New(clienttest.Options{})
	var kept []byte
	calls := 0
	v, err := s.Update(t.Context(), []byte("k"), func(cur client.Item, present bool) (client.Change, error) {
		calls++
		if calls == 1 {
			put(t, s, "k", "other", client.PutOptions{})
		}
		kept = cur.Value
		return client.Change{Value: append(cur.Value, '!')}, nil
	})
	if err != nil || v == 0 || calls != 2 {
		t.Fatalf("version %d, %v after %d calls", v, err, calls)
	}
	wantGet(t, s, "k", "other!")
	if string(kept) == "other" {
		t.Fatal("the value that f was shown is still there")
	}
}

func TestConcurrent(t *testing.T) {
	s := clienttest.New(clienttest.Options{})
	ctx := t.Context()
	const workers, rounds = 8, 200
	var won atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for i := range rounds {
				if _, err := s.Incr(ctx, []byte("n"), 1); err != nil {
					t.Error(err)
				}
				if _, err := s.PutIfAbsent(ctx, fmt.Appendf(nil, "k%d", i), nil, client.PutOptions{}); err == nil {
					won.Add(1)
				}
				for _, err := range s.Scan(ctx, client.ScanOptions{}) {
					if err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	wantGet(t, s, "n", fmt.Sprint(workers*rounds))
	if won.Load() != rounds {
		t.Fatalf("%d puts of %d keys won", won.Load(), rounds)
	}
}

// Keys that are there from beginning to end are found, whatever happens to others.
func TestScan(t *testing.T) {
	s := clienttest.New(clienttest.Options{})
	ctx := t.Context()
	const n = 3000
	for i := range n {
		put(t, s, fmt.Sprint("stay", i), fmt.Sprint(i), client.PutOptions{Flags: 3})
	}
	rng := rand.New(rand.NewPCG(1, 1))
	seen := map[string]bool{}
	pages := 0
	for c := (client.Cursor{}); !c.Done; pages++ {
		for kv, err := range s.Scan(ctx, client.ScanOptions{Cursor: &c, Count: 100, Match: func(k []byte) bool {
			return k[0] == 's'
		}}) {
			if err != nil {
				t.Fatal(err)
			}
			seen[string(kv.Key)] = true
			if "stay"+string(kv.Value) != string(kv.Key) || kv.Flags != 3 || kv.Version == 0 {
				t.Fatalf("%+v", kv)
			}
		}
		for range 20 {
			k := fmt.Sprint("come", rng.IntN(100))
			put(t, s, k, "", client.PutOptions{})
			if err := s.Delete(ctx, fmt.Appendf(nil, "come%d", rng.IntN(100))); err != nil &&
				!errors.Is(err, client.ErrNotFound) {
				t.Fatal(err)
			}
		}
	}
	if len(seen) != n || pages < n/200 {
		t.Fatalf("%d of %d keys in %d pages", len(seen), n, pages)
	}
}

// answer is what an operation said, without versions.
type answer struct {
	class   string
	value   string
	flags   uint32
	expires time.Time
	version uint64
	n       int64
}

func classOf(err error) string {
	for _, e := range []error{client.ErrNotFound, client.ErrExists, client.ErrConflict, client.ErrFull,
		client.ErrNotInteger,
		client.ErrOverflow, client.ErrWrongType, client.ErrTxnTooLarge, client.ErrInvalid, io.ErrShortBuffer, errMine,
		context.Canceled} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	if err != nil {
		return "unexpected: " + err.Error()
	}
	return "ok"
}

var errMine = errors.New("mine")

// player performs a script on one store.
type player struct {
	api client.API
	// versions by key, of the last write that the script knows of.
	last map[string]uint64
}

func itemAnswer(it client.Item, err error) answer {
	if err != nil {
		return answer{class: classOf(err)}
	}
	return answer{class: "ok", value: string(it.Value), flags: it.Flags, expires: it.Expires, version: it.Version}
}

func versionAnswer(v uint64, err error) answer {
	if err != nil {
		v = 0 // means nothing
	}
	return answer{class: classOf(err), version: v}
}

// step performs the operation that rng picks. Both players get the same rng.
func (p *player) step(ctx context.Context, rng *rand.Rand, epoch time.Time) (what string, as []answer) {
	key := func() []byte {
		switch rng.IntN(60) {
		case 0:
			return nil
		case 1:
			return make([]byte, client.MaxKeyLen+1)
		}
		return fmt.Appendf(nil, "key%d", rng.IntN(24))
	}
	value := func() []byte {
		switch rng.IntN(8) {
		case 0:
			return nil
		case 1:
			return fmt.Append(nil, rng.Int64())
		case 2:
			return fmt.Append(nil, rng.IntN(100))
		case 3: // in chunks
			if rng.IntN(20) == 0 {
				return bytes.Repeat([]byte{byte(rng.IntN(256))}, 4<<20+rng.IntN(1<<20))
			}
		}
		return bytes.Repeat([]byte{byte(rng.IntN(256))}, rng.IntN(3000))
	}
	opts := func() client.PutOptions {
		o := client.PutOptions{Flags: uint32(rng.IntN(3)) * 0x7fffffff}
		switch rng.IntN(10) {
		case 0:
			o.TTL = time.Duration(1+rng.IntN(100)) * time.Hour
		case 1:
			o.TTL = -1
		}
		return o
	}
	// The past or the far future, so that both stores agree on what has expired.
	expires := func() time.Time {
		switch rng.IntN(5) {
		case 0:
			return epoch.Add(-time.Hour)
		case 1:
			return epoch.Add(time.Hour + time.Duration(rng.IntN(1e9)))
		}
		return time.Time{}
	}
	version := func(k []byte) uint64 {
		v := p.last[string(k)]
		if rng.IntN(3) == 0 {
			return v ^ 1<<60
		}
		return v
	}
	update := func() client.UpdateFunc {
		v, kind, exp, flags := value(), rng.IntN(6), expires(), rng.Uint32()
		return func(cur client.Item, present bool) (client.Change, error) {
			switch kind {
			case 0:
				return client.Change{}, errMine
			case 1:
				return client.Change{Delete: true}, nil
			case 2:
				return client.Change{Value: cur.Value, Expires: cur.Expires, Flags: cur.Flags}, nil
			case 3:
				return client.Change{Value: append(bytes.Clone(cur.Value[:len(cur.Value)/2]), fmt.Sprint(present)...),
					Flags: cur.Flags + 1}, nil
			}
			return client.Change{Value: v, Expires: exp, Flags: flags}, nil
		}
	}
	keys := func() (ks [][]byte) { // distinct
		for _, i := range rng.Perm(24)[:rng.IntN(6)] {
			ks = append(ks, fmt.Appendf(nil, "key%d", i))
		}
		return ks
	}
	results := func(rs []client.Result, del bool) (as []answer) {
		for _, r := range rs {
			a := itemAnswer(r.Item, r.Err)
			if del {
				a.version = 0
			}
			as = append(as, a)
		}
		return as
	}
	one := func(name string, k []byte, a answer) (string, []answer) {
		return fmt.Sprintf("%s %.8q", name, k), []answer{a}
	}
	switch rng.IntN(20) {
	case 0, 1:
		k := key()
		return one("get", k, itemAnswer(p.api.Get(ctx, k)))
	case 2:
		k, dst := key(), make([]byte, rng.IntN(4000))
		n, err := p.api.GetInto(ctx, k, dst)
		a := answer{class: classOf(err), n: int64(n)}
		if err == nil {
			a.value = string(dst[:n])
		}
		return one("get-into", k, a)
	case 3, 4:
		k := key()
		return one("put", k, versionAnswer(p.api.Put(ctx, k, value(), opts())))
	case 5:
		k := key()
		return one("put-if-absent", k, versionAnswer(p.api.PutIfAbsent(ctx, k, value(), opts())))
	case 6:
		k := key()
		return one("compare-and-swap", k, versionAnswer(p.api.CompareAndSwap(ctx, k, version(k), value(), opts())))
	case 7:
		k := key()
		return one("delete", k, versionAnswer(0, p.api.Delete(ctx, k)))
	case 8:
		k := key()
		return one("delete-version", k, versionAnswer(0, p.api.DeleteVersion(ctx, k, version(k))))
	case 9:
		k := key()
		n, err := p.api.Incr(ctx, k, rng.Int64()*int64(rng.IntN(3)-1))
		return one("incr", k, answer{class: classOf(err), n: n})
	case 10:
		k := key()
		return one("touch", k, versionAnswer(0, p.api.Touch(ctx, k, opts().TTL)))
	case 11:
		return "multi-get", results(p.api.MultiGet(ctx, keys()), false)
	case 12:
		var kvs []client.KV
		for _, k := range keys() {
			o := opts()
			kvs = append(kvs, client.KV{Key: k, Value: value(), TTL: o.TTL, Flags: o.Flags})
		}
		return "multi-put", results(p.api.MultiPut(ctx, kvs), false)
	case 13:
		return "multi-delete", results(p.api.MultiDelete(ctx, keys()), true)
	case 14:
		k := key()
		v, err := p.api.Update(ctx, k, update())
		return one("update", k, versionAnswer(v, err))
	case 15:
		k := key()
		it, changed, err := p.api.GetIfChanged(ctx, k, version(k))
		a := itemAnswer(it, err)
		if changed {
			a.n = 1
		}
		return one("get-if-changed", k, a)
	case 16:
		var ops []client.Op
		for _, k := range keys() {
			o := client.Op{Kind: client.OpKind(rng.IntN(6)), Key: k, Value: value(), Expires: expires(),
				Flags: rng.Uint32() % 2,
				Cond:  client.Cond(rng.IntN(4)), Version: version(k), Update: update(), Into: make([]byte, 3, 100)}
			if o.Kind == client.OpDelete && o.Cond == client.IfAbsent {
				o.Cond = client.Always
			}
			if rng.IntN(10) == 0 {
				o.Update = nil
			}
			ops = append(ops, o)
		}
		p.api.Do(ctx, ops)
		var as []answer
		for _, o := range ops {
			a := itemAnswer(o.Item, o.Err)
			if o.Kind == client.OpDelete {
				a.version = 0
			}
			as = append(as, a)
		}
		return "do", as
	case 17, 18:
		var ops []client.Op
		for _, k := range keys() {
			o := client.Op{Kind: []client.OpKind{client.OpPut, client.OpPut, client.OpDelete,
				client.OpKeep}[rng.IntN(4)], Key: k, Value: value(), Expires: expires(), Flags: rng.Uint32() % 2}
			switch rng.IntN(12) {
			case 0:
				o.Cond = client.Cond(rng.IntN(4))
			case 1, 2, 3:
				if v := p.last[string(k)]; v != 0 {
					o.Cond, o.Version = client.IfVersion, v
				} else {
					o.Cond = client.IfAbsent
				}
			}
			if o.Cond == client.IfVersion && o.Version == 0 {
				o.Version = version(k)
			}
			ops = append(ops, o)
		}
		err := p.api.MultiCAS(ctx, ops)
		as := []answer{{class: classOf(err)}}
		for _, o := range ops {
			as = append(as, answer{version: o.Item.Version})
		}
		return "multi-cas", as
	}
	o := client.ScanOptions{Count: rng.IntN(20) - 1, KeysOnly: rng.IntN(2) == 0}
	if rng.IntN(2) == 0 {
		o.Match = func(k []byte) bool { return k[len(k)-1]%2 == 0 }
	}
	// Order and pages are the store's own.
	found := map[string]answer{}
	for c := (client.Cursor{}); !c.Done; {
		o.Cursor = &c
		for kv, err := range p.api.Scan(ctx, o) {
			if err != nil {
				return "scan", []answer{{class: classOf(err)}}
			}
			found[string(kv.Key)] = answer{class: string(kv.Key), value: string(kv.Value), flags: kv.Flags,
				expires: kv.Expires, version: kv.Version}
		}
	}
	for i := range 24 {
		if a, ok := found[fmt.Sprintf("key%d", i)]; ok {
			as = append(as, a)
		}
	}
	return "scan", as
}

// A script gets the same answers here and from the real store.
func TestSameAnswers(t *testing.T) {
	st, err := devstore.Start(t.Context(), devstore.Options{Providers: []string{"shm"}, CapacityBytes: 512 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	steps := 3000
	if testing.Short() {
		steps = 300
	}
	for seed := range uint64(3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			real, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices()})
			if err != nil {
				t.Fatal(err)
			}
			defer real.Close()
			for i := range 24 {
				if err := real.Delete(t.Context(), fmt.Appendf(nil, "key%d", i)); err != nil &&
					!errors.Is(err, client.ErrNotFound) {
					t.Fatal(err)
				}
			}
			compare(t, seed, steps, real)
		})
	}
}

func compare(t *testing.T, seed uint64, steps int, real client.API) {
	ctx := t.Context()
	epoch := time.Now()
	ps := [2]*player{{api: clienttest.New(clienttest.Options{})}, {api: real}}
	for _, p := range ps {
		p.last = map[string]uint64{}
	}
	theirs := map[uint64]uint64{} // versions: of the fake, of the real one
	known := map[uint64]bool{}
	classes := map[string]int{}
	for i := range steps {
		var as [2][]answer
		var what string
		for j, p := range ps {
			what, as[j] = p.step(ctx, rand.New(rand.NewPCG(seed, uint64(i))), epoch)
		}
		if len(as[0]) != len(as[1]) {
			t.Fatalf("seed %d step %d: %s: %d answers here, %d there", seed, i, what, len(as[0]), len(as[1]))
		}
		for j := range as[0] {
			a, b := as[0][j], as[1][j]
			if strings.HasPrefix(a.class, "unexpected") {
				t.Fatalf("seed %d step %d: %s: %s", seed, i, what, a.class)
			}
			classes[a.class]++
			if want, ok := theirs[a.version]; ok && want != b.version || !ok && known[b.version] {
				t.Fatalf("seed %d step %d: %s: version %d here is %d there, want %d", seed, i, what, a.version,
					b.version, want)
			}
			theirs[a.version], known[b.version] = b.version, true
			a.version, b.version = 0, 0
			if d := a.expires.Sub(b.expires); d.Abs() < time.Minute {
				b.expires = a.expires // TTLs begin when they are received
			}
			if a != b {
				t.Fatalf("seed %d step %d: %s:\nhere  %.200v\nthere %.200v", seed, i, what, a, b)
			}
		}
		// Learn the versions, and that each is above the one before.
		for k := range 24 {
			key := fmt.Sprintf("key%d", k)
			var vs [2]uint64
			for j, p := range ps {
				it, err := p.api.Get(ctx, []byte(key))
				if err == nil {
					vs[j] = it.Version
					if it.Version < p.last[key] && p.last[key] != 0 {
						t.Fatalf("seed %d step %d: %s: version %d of %s after %d", seed, i, what, it.Version, key,
							p.last[key])
					}
				}
				p.last[key] = vs[j]
			}
			if want, ok := theirs[vs[0]]; ok && want != vs[1] || (vs[0] == 0) != (vs[1] == 0) {
				t.Fatalf("seed %d step %d: %s: %s has version %d here and %d there, want %d", seed, i, what, key, vs[0],
					vs[1], want)
			}
			theirs[vs[0]], known[vs[1]] = vs[1], true
		}
	}
	if len(classes) < 7 && steps >= 1000 {
		t.Fatalf("the script met only %v", classes)
	}
}

func ExampleStore() {
	ctx := context.Background()
	now := time.Unix(0, 0)
	s := clienttest.New(clienttest.Options{Now: func() time.Time { return now }})

	s.Put(ctx, []byte("session"), []byte("alice"), client.PutOptions{TTL: time.Minute})
	it, _ := s.Get(ctx, []byte("session"))
	fmt.Printf("%s\n", it.Value)

	now = now.Add(time.Minute)
	_, err := s.Get(ctx, []byte("session"))
	fmt.Println(err)
	// Output:
	// alice
	// not found
}

// A put whose answer got lost: the caller learns that it does not know.
func ExampleStore_Fail() {
	ctx := context.Background()
	s := clienttest.New(clienttest.Options{})
	s.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		if o.Kind == client.OpPut {
			return clienttest.Fault{Err: errors.New("cable cut"), Applied: true}
		}
		return clienttest.Fault{}
	})
	_, err := s.Put(ctx, []byte("k"), []byte("v"), client.PutOptions{})
	fmt.Println(errors.Is(err, client.ErrUnknownOutcome))
	it, err := s.Get(ctx, []byte("k"))
	fmt.Printf("%s %v\n", it.Value, err)
	// Output:
	// true
	// v <nil>
}

// A full Store drops what was not used for longest and is not pinned; if all else is pinned, no pin counts.
func TestPins(t *testing.T) {
	now := time.UnixMilli(1_000_000)
	s := clienttest.New(clienttest.Options{MaxKeys: 3, Evict: true, Now: func() time.Time { return now }})
	ctx := t.Context()
	there := func(want ...string) {
		t.Helper()
		for _, k := range []string{"a", "b", "c", "d", "e", "f"} {
			_, err := s.Exists(ctx, []byte(k))
			if got := err == nil; got != strings.Contains(strings.Join(want, ""), k) {
				t.Errorf("%s is there: %v, want %v", k, got, want)
			}
		}
	}
	for _, k := range []string{"a", "b", "c"} {
		put(t, s, k, "v", client.PutOptions{})
	}
	if err := s.Pin(ctx, []byte("a"), now.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	put(t, s, "d", "v", client.PutOptions{})
	there("a", "c", "d")
	for _, k := range []string{"c", "d"} {
		if err := s.Pin(ctx, []byte(k), now.Add(time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	put(t, s, "e", "v", client.PutOptions{}) // which is pinned by nobody, and goes next
	there("c", "d", "e")
	put(t, s, "f", "v", client.PutOptions{})
	there("c", "d", "f")
	now = now.Add(time.Second)
	put(t, s, "a", "v", client.PutOptions{})
	there("d", "f", "a")
	if err := errors.Join(s.Pin(ctx, []byte("d"), now.Add(time.Second)), s.Unpin(ctx, []byte("d"))); err != nil {
		t.Fatal(err)
	}
	put(t, s, "b", "v", client.PutOptions{})
	there("f", "a", "b")
}
