package client_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/ycsb"
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
	absent := make([][]byte, 4*n)
	for i := range absent {
		absent[i] = fmt.Appendf(nil, "absent%d", i)
	}
	var b *client.Client
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
	// A new client's turn. Where the shard grows meanwhile, which the PUTs have asked for, images do not hold.
	turn := func() (bad string) {
		c, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices(),
			Provider: provider, MirrorBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		b = c
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
		if after.MirrorBytes == 0 || after.MirrorBytes > 1<<20 {
			t.Errorf("%d bytes of images", after.MirrorBytes)
		}
		rounds, hits := after.Rounds["get"]-before.Rounds["get"], after.MirrorHits-before.MirrorHits
		reads := after.Verbs.Verbs[rdma.OpRead] - before.Verbs.Verbs[rdma.OpRead]
		reads -= after.Rounds["scan"] - before.Rounds["scan"] // of segments, which the Client READs by itself
		if hits < n*98/100 || rounds > n+2*(n-hits)+n/100 || reads > 2*n+n/50 {
			return fmt.Sprintf("%d GETs: %d by images, %d round trips, %d READs; %d images did not hold, %d bytes", n,
				hits, rounds, reads, after.MirrorStale-before.MirrorStale, after.MirrorBytes)
		}
		return ""
	}
	testutil.UntilNone(t, "a turn by images", turn)
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

var flagMirrorKeys = flag.Int("mirror-keys", 10_000, "keys of TestMirrorWarms")

// TestMirrorWarms: a Client that begins to read a store finds nearly every key in one round trip soon, whichever keys
// it asks for. It asks as YCSB-C does, and remembers four keys at most. It READs the index by itself, and no more of
// it once nobody asks.
func TestMirrorWarms(t *testing.T) {
	n := *flagMirrorKeys
	st, a := open(t, "shm", devstore.Options{CapacityBytes: int64(max(64<<20, 1024*n))}, client.Options{})
	key := func(i int) []byte { return fmt.Appendf(nil, "user%d", i) }
	for at := 0; at < n; at += 500 {
		pairs := make([]client.KV, min(500, n-at))
		for i := range pairs {
			pairs[i] = client.KV{Key: key(at + i), Value: make([]byte, 100)}
		}
		for _, r := range a.MultiPut(t.Context(), pairs) {
			if r.Err != nil {
				t.Fatal(r.Err)
			}
		}
	}
	b, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices(), Provider: "shm",
		CacheBytes: 1, MirrorBytes: max(1<<20, 13*n)})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if s := b.Stats(); s.Rounds["scan"] != 0 || s.MirrorBytes != 0 {
		t.Errorf("%d READs of segments, %d bytes of images, and nobody has asked", s.Rounds["scan"], s.MirrorBytes)
	}
	if _, err := b.Get(t.Context(), key(0)); err != nil {
		t.Fatal(err)
	}
	// Each word of an image takes eight bytes, and no GET brings them.
	testutil.Until(t, "images of all groups", func() bool { return b.Stats().MirrorBytes >= int64(8*n) })
	z, rng := ycsb.NewZipf(uint64(n), 0.99), rand.New(rand.NewPCG(1, 2))
	share, gets := 0.0, min(n, 100_000)
	testutil.Until(t, "99 % of GETs in one round trip", func() bool {
		before := b.Stats().Rounds["get"]
		for range gets {
			if _, err := b.Get(t.Context(), key(int(z.Next(rng)))); err != nil {
				t.Fatal(err)
			}
		}
		// A GET takes one or two, but for stashes and fingerprints that keys share.
		share = 2 - float64(b.Stats().Rounds["get"]-before)/float64(gets)
		return share >= 0.99
	})
	s := b.Stats()
	t.Logf("%d keys: %.2f %% of %d GETs in one round trip, %.1f bytes of memory a key, %d segments READ", n, 100*share,
		gets, float64(s.MirrorBytes)/float64(n), s.Rounds["scan"])
}
