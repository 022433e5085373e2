package archive

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/livepeak"
)

// made is key i of a store, with what a put gives it.
func made(i int, far time.Time) client.Op {
	op := client.Op{Kind: client.OpPut, Key: fmt.Appendf(nil, "key:%08d", i), Type: client.Type(i % 6),
		Flags: uint32(i % 3), Note: uint64(i % 5)}
	if i%7 == 0 {
		op.Expires = far
	}
	op.Value = bytes.Repeat(binary.LittleEndian.AppendUint64(nil, uint64(i)*0x9e3779b97f4a7c15), 1+i%32)
	return op
}

// each calls fn with operations on n keys, as many as a batch has.
func each(n int, op func(i int) client.Op, fn func(first int, ops []client.Op)) {
	const batch = 512
	for first := 0; first < n; first += batch {
		ops := make([]client.Op, min(batch, n-first))
		for i := range ops {
			ops[i] = op(first + i)
		}
		fn(first, ops)
	}
}

// TestShapes: a namespace of one copy and four shards comes back in one of three copies and 64 shards, key by key with
// types, notes, user flags, expiries and versions. KVD_ARCHIVE_KEYS says how many keys there are.
func TestShapes(t *testing.T) {
	keys := 3000
	if s := os.Getenv("KVD_ARCHIVE_KEYS"); s != "" {
		var err error
		if keys, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	perNode := int64(keys)*512 + 64<<20
	store := func(name string, replicas, shards int) session {
		return sessionsOf(t, 3, perNode+64<<20, devstore.Namespace{Name: name, BytesPerNode: perNode,
			Replicas: replicas, Shards: shards})[0]
	}
	src := store("src", 1, 4)
	far := time.Now().Add(24 * time.Hour).Truncate(time.Millisecond)
	versions, total := make([]uint64, keys), int64(0)
	each(keys, func(i int) client.Op { return made(i, far) }, func(first int, ops []client.Op) {
		do(t, src, ops...)
		for i, op := range ops {
			versions[first+i] = op.Item.Version
			total += int64(len(op.Key) + len(op.Value))
		}
	})
	d, end, err := OpenFolder(&url.URL{Scheme: "file", Path: t.TempDir()}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	most := livepeak.Watch(false)
	begun := time.Now()
	snap := create(t, src, d)
	took, heap := time.Since(begun), most()
	if snap.Keys < int64(keys) || snap.LeftOut != 0 { // more: shards split meanwhile
		t.Fatalf("%d keys, %d left out, want %d and none", snap.Keys, snap.LeftOut, keys)
	}
	var written int64
	for _, g := range snap.Segments {
		written += g.Bytes
	}
	t.Logf("create: %d keys of %.1f MB to %.1f MB in %.2f s, %.0f keys/s, %.1f MB/s, heap %.0f MB at most", keys,
		mega(total), mega(written), took.Seconds(), float64(keys)/took.Seconds(), mega(total)/took.Seconds(),
		mega(heap))

	dst := store("dst", 3, 64)
	most = livepeak.Watch(false)
	begun = time.Now()
	r, err := Restore(t.Context(), dst, snap, RestoreOptions{Mode: IfNewer, Now: time.Now})
	if err != nil || r.Restored != int64(keys) || r.Restored+r.Kept != snap.Keys {
		t.Fatalf("%+v, %v", r, err)
	}
	took, heap = time.Since(begun), most()
	t.Logf("restore: %.2f s, %.0f keys/s, %.1f MB/s, heap %.0f MB at most", took.Seconds(),
		float64(keys)/took.Seconds(), mega(total)/took.Seconds(), mega(heap))
	begun = time.Now()
	cmp, err := Compare(t.Context(), dst, snap, CompareOptions{Extra: true, Now: time.Now})
	if err != nil || cmp.Same != snap.Keys || cmp.Extra != 0 {
		t.Fatalf("%+v, %v", cmp, err)
	}
	t.Logf("compare: %.2f s", time.Since(begun).Seconds())
	each(keys, func(i int) client.Op {
		return client.Op{Kind: client.OpGet, Key: fmt.Appendf(nil, "key:%08d", i), Typed: true}
	}, func(first int, ops []client.Op) {
		do(t, dst, ops...)
		for i := range ops {
			want, got := made(first+i, far), ops[i].Item
			if !bytes.Equal(got.Value, want.Value) || got.Type != want.Type || got.Flags != want.Flags ||
				got.Note != want.Note || !got.Expires.Equal(want.Expires) || got.Version != versions[first+i] {
				t.Fatalf("key %d is %+v", first+i, got)
			}
		}
	})
	shards := make(map[uint32]bool)
	for i := range min(keys, 3000) {
		at, err := dst.Locate(made(i, far).Key)
		if err != nil || at.Replicas != 3 {
			t.Fatalf("%+v, %v", at, err)
		}
		shards[at.ShardID] = true
	}
	if len(shards) < 64 {
		t.Errorf("keys are in %d shards, want 64 at least", len(shards))
	}
}

func mega(n int64) float64 { return float64(n) / 1e6 }
