package client_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// noise is n bytes, others for each seed.
func noise(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// streamLens are lengths of records and of chunks, around their bounds.
var streamLens = []int{0, 1, 5000, 8 << 10, 100_000, 2<<20 - 32, 2 << 20, 3900 << 10, 4 << 20, 5<<20 + 3, 17<<20 + 1}

// Parts of values are those bytes of them, in the store and in its fake.
func TestStreams(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, p string) {
		if testing.Short() && p != devstore.Sim {
			t.Skip("-short moves the megabytes by one provider; make test does by all")
		}
		_, c := open(t, p, devstore.Options{CapacityBytes: 192 << 20}, client.Options{})
		testStreams(t, c)
	})
	t.Run("fake", func(t *testing.T) { testStreams(t, clienttest.New(clienttest.Options{})) })
}

func testStreams(t *testing.T, c client.API) {
	for _, n := range streamLens {
		for _, flags := range []uint32{0, 9} {
			testStream(t, c, n, flags)
		}
	}
	v, err := c.Open(t.Context(), []byte("1"))
	if err != nil {
		t.Fatal(err)
	}
	ops := []client.Op{{Kind: client.OpPut, Key: []byte("1"), Value: []byte("x"), Type: client.Hash}}
	if c.Do(t.Context(), ops); ops[0].Err != nil {
		t.Fatal(ops[0].Err)
	}
	if _, err := v.ReadAt(make([]byte, 1), 0); !errors.Is(err, client.ErrConflict) {
		t.Errorf("replaced by a collection: %v", err)
	}
	if _, _, err := c.GetRange(t.Context(), []byte("absent"), 0, nil); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("a part of an absent key: %v", err)
	}
	if _, err := c.Open(t.Context(), []byte("absent")); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("an absent key: %v", err)
	}
	if _, _, err := c.GetRange(t.Context(), []byte("0"), -1, nil); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a part before the first byte: %v", err)
	}
}

func testStream(t *testing.T, c client.API, n int, flags uint32) {
	t.Helper()
	ctx, key, want := t.Context(), fmt.Appendf(nil, "%d", n), noise(byte(n), n)
	ops := []client.Op{{Kind: client.OpPut, Key: key, Value: want, Flags: flags, Note: uint64(flags)}}
	c.Do(ctx, ops)
	if ops[0].Err != nil {
		t.Fatalf("%d bytes, flags %d: %v", n, flags, ops[0].Err)
	}
	version := ops[0].Item.Version
	if it, err := c.Get(ctx, key); err != nil || !bytes.Equal(it.Value, want) || it.Version != version ||
		it.Flags != flags || it.Note != uint64(flags) {
		t.Fatalf("%d bytes: read back %d, %v", n, len(it.Value), err)
	}
	v, err := c.Open(ctx, key)
	if err != nil || v.Size != int64(n) || v.Version != version || v.Flags != flags || v.Note != uint64(flags) {
		t.Fatalf("%d bytes: opened %+v, %v", n, v, err)
	}
	var whole bytes.Buffer
	if k, err := io.Copy(&whole, v); err != nil || k != int64(n) || !bytes.Equal(whole.Bytes(), want) {
		t.Errorf("%d bytes: copied %d, %v", n, k, err)
	}
	const chunk = 2 << 20
	for _, off := range []int{0, 1, n / 2, n - 1, n, n + 1, chunk - 33, chunk - 32, chunk - 1, chunk, 2*chunk - 64} {
		for _, k := range []int{0, 1, 100, chunk, n} {
			if off = max(off, 0); k > n {
				continue
			}
			part := want[min(off, n):min(off+k, n)]
			mem := valueOf(0xc5, k+64)
			got, in, err := c.GetRange(ctx, key, int64(off), mem[:k])
			if err != nil || got != len(part) || in != v.Info || !bytes.Equal(mem[:got], part) {
				t.Fatalf("%d bytes, %d from %d on: %d, %+v, %v", n, k, off, got, in, err)
			}
			if i := bytes.IndexFunc(mem[got:], func(r rune) bool { return r != 0xfffd }); i >= 0 && mem[got+i] != 0 {
				t.Fatalf("%d bytes, %d from %d on: byte %d behind is %#x", n, k, off, i, mem[got+i])
			}
			got, err = v.ReadAt(mem[:k], int64(off))
			if (err != nil) != (len(part) < k) || err != nil && err != io.EOF || !bytes.Equal(mem[:got], part) {
				t.Fatalf("%d bytes, ReadAt of %d from %d on: %d, %v", n, k, off, got, err)
			}
		}
	}
	if _, err := c.Put(ctx, key, want, client.PutOptions{Flags: flags}); err != nil {
		t.Fatal(err)
	}
	if n > 0 {
		mem := valueOf(0xc5, n)
		if _, err := v.ReadAt(mem, 0); !errors.Is(err, client.ErrConflict) {
			t.Errorf("%d bytes, replaced by equal ones: %v", n, err)
		}
		for i, b := range mem {
			if b != 0 && b != 0xc5 {
				t.Fatalf("%d bytes, replaced: byte %d is %#x", n, i, b)
			}
		}
	}
	v, err = c.Open(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	if n > 1 {
		_, err = v.Read(make([]byte, 1)) // which reads ahead
	}
	if err := errors.Join(err, v.Close()); err != nil {
		t.Error(err)
	}
	if k, err := v.Read(make([]byte, 1)); k != 0 || !errors.Is(err, client.ErrClosed) {
		t.Errorf("Read after Close: %d, %v", k, err)
	}
	if k, err := v.WriteTo(io.Discard); k != 0 || !errors.Is(err, client.ErrClosed) {
		t.Errorf("WriteTo after Close: %d, %v", k, err)
	}
	if _, err := v.ReadAt(make([]byte, 1), 0); !errors.Is(err, client.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// The next part of an opened value takes one round trip, and the chunks that it touches.
func TestPartCosts(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{CapacityBytes: 128 << 20}, client.Options{})
	ctx, key, want := t.Context(), []byte("k"), noise(1, 17<<20)
	if _, err := c.Put(ctx, key, want, client.PutOptions{Flags: 1}); err != nil {
		t.Fatal(err)
	}
	v, err := c.Open(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	const chunk = layout.ChunkPayload
	for _, x := range []struct {
		off, n         int
		rounds, chunks uint64
	}{{0, 1, 1, 1}, {chunk - 1, 2, 1, 2}, {2 * chunk, chunk, 1, 1}, {1, 4 * chunk, 2, 5},
		{0, 17 << 20, 3, 9}} {
		before := c.Stats()
		mem := make([]byte, x.n)
		if n, err := v.ReadAt(mem, int64(x.off)); err != nil || !bytes.Equal(mem, want[x.off:x.off+n]) {
			t.Fatalf("%d from %d on: %d, %v", x.n, x.off, n, err)
		}
		after := c.Stats()
		if n := after.Rounds["get"] - before.Rounds["get"]; n != x.rounds {
			t.Errorf("%d from %d on: %d round trips, want %d", x.n, x.off, n, x.rounds)
		}
		if n := after.Verbs.Verbs[rdma.OpRead] - before.Verbs.Verbs[rdma.OpRead]; n != x.chunks+1 {
			t.Errorf("%d from %d on: %d READs, want %d", x.n, x.off, n, x.chunks+1)
		}
	}
	before := c.Stats().Rounds["get"]
	if n, _, err := c.GetRange(ctx, key, 3<<20, make([]byte, 4<<20)); n != 4<<20 || err != nil {
		t.Fatal(n, err)
	}
	if n := c.Stats().Rounds["get"] - before; n != 2 {
		t.Errorf("GetRange of a value in chunks: %d round trips, want 2", n)
	}
}

// An opened value that another session has replaced, or deleted, is a conflict, and no byte of another one is shown.
func TestOpenedStale(t *testing.T) {
	store, c := open(t, "shm", devstore.Options{CapacityBytes: 256 << 20}, client.Options{})
	other, err := client.Open(t.Context(), client.Options{Directory: store.Directory(), Devices: store.Devices(),
		Provider: "shm"})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	ctx, key := t.Context(), []byte("k")
	put := func(c *client.Client, b []byte) func() error {
		return func() error { _, err := c.Put(ctx, key, b, client.PutOptions{}); return err }
	}
	for _, change := range []struct {
		name string
		f    func() error
	}{
		{"replaced by chunks", put(other, noise(2, 9<<20))},
		{"replaced by a record", put(other, noise(2, 9))},
		{"deleted", func() error { return other.Delete(ctx, key) }},
		{"replaced by equal bytes", put(c, noise(1, 9<<20))},
		{"replaced by a collection", func() error {
			ops := []client.Op{{Kind: client.OpPut, Key: key, Value: noise(3, 9<<20), Type: client.Hash}}
			other.Do(ctx, ops)
			return ops[0].Err
		}},
	} {
		if _, err := c.Put(ctx, key, noise(1, 9<<20), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		v, err := c.Open(ctx, key)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := v.ReadAt(make([]byte, 1), 0); err != nil {
			t.Fatal(err)
		}
		if err := change.f(); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			mem := valueOf(0xc5, 5<<20)
			if n, err := v.ReadAt(mem, 1); n != 0 || !errors.Is(err, client.ErrConflict) {
				t.Errorf("%s: %d, %v", change.name, n, err)
			}
			for i, b := range mem {
				if b != 0 && b != 0xc5 {
					t.Fatalf("%s: byte %d is %#x", change.name, i, b)
				}
			}
		}
	}
}
