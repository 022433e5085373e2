package client_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/rdma"
)

// TestMirror: a client that has READ the groups of some keys finds the others, which it has never seen, in one round
// trip. It finds keys that have changed since, too, in more.
func TestMirror(t *testing.T) {
	for _, provider := range []string{"shm", "tcp"} {
		t.Run(provider, func(t *testing.T) { mirror(t, provider) })
	}
}

func mirror(t *testing.T, provider string) {
	st, a := open(t, provider, devstore.Options{CapacityBytes: 16 << 20}, client.Options{})
	const n = 3000
	keys := make([][]byte, 2*n)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "key%d", i)
	}
	pairs := make([]client.KV, len(keys))
	for i, k := range keys {
		pairs[i] = client.KV{Key: k, Value: []byte("old")}
	}
	for _, r := range a.MultiPut(t.Context(), pairs) {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	b, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices(),
		Provider: provider, MirrorBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	get := func(key []byte, want string) {
		t.Helper()
		it, err := b.Get(t.Context(), key)
		if want == "" && errors.Is(err, client.ErrNotFound) {
			return
		}
		if err != nil || string(it.Value) != want {
			t.Fatalf("%s: %q, %v, want %q", key, it.Value, err, want)
		}
	}
	absent := make([][]byte, 4*n)
	for i := range absent {
		absent[i] = fmt.Appendf(nil, "absent%d", i)
	}
	for i, r := range b.MultiGet(t.Context(), absent) { // READs every group
		if !errors.Is(r.Err, client.ErrNotFound) {
			t.Fatalf("%s: %v", absent[i], r.Err)
		}
	}
	before := b.Stats()
	for _, k := range keys[:n] {
		get(k, "old")
	}
	after := b.Stats()
	rounds, hits := after.Rounds["get"]-before.Rounds["get"], after.MirrorHits-before.MirrorHits
	reads := after.Verbs.Verbs[rdma.OpRead] - before.Verbs.Verbs[rdma.OpRead]
	if hits < n*99/100 || rounds > n+2*(n-hits)+n/100 || reads > 2*n+n/50 {
		t.Errorf("%d GETs: %d by images, %d round trips, %d READs; %d images did not hold, %d bytes", n, hits, rounds,
			reads, after.MirrorStale-before.MirrorStale, after.MirrorBytes)
	}
	if after.MirrorBytes == 0 || after.MirrorBytes > 1<<20 {
		t.Errorf("%d bytes of images", after.MirrorBytes)
	}
	for i, k := range keys[n:][:200] {
		switch i % 2 {
		case 0:
			mustPut(t, a, k, "a longer value than the one before, in another place")
		default:
			if err := a.Delete(t.Context(), k); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, k := range keys[n:][:200] {
		get(k, []string{"a longer value than the one before, in another place", ""}[i%2])
	}
	if s := b.Stats(); s.MirrorStale < 50 {
		t.Errorf("%d images did not hold", s.MirrorStale)
	}
}
