package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// valueOf is n bytes of which each tells whose they are.
func valueOf(key byte, n int) []byte { return bytes.Repeat([]byte{key}, n) }

// Values of all lengths come whole into memory of all lengths. Behind a value, and after an error, that holds zeroes or
// what was there.
func TestValuesInto(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		_, c := open(t, p, devstore.Options{CapacityBytes: 128 << 20}, client.Options{})
		ctx := t.Context()
		for _, n := range []int{1, 8000, 8191, 8192, 16 << 10, 100_000, 1 << 20, 3 << 20, 5 << 20} {
			for _, flags := range []uint32{0, 7} {
				key := fmt.Appendf(nil, "%d", n)
				want := valueOf('v', n)
				if _, err := c.Put(ctx, key, want, client.PutOptions{Flags: flags}); err != nil {
					t.Fatal(err)
				}
				for _, more := range []int{0, -1, 4, 64, n} {
					dst := valueOf(0xc5, max(0, n+more)+64)
					mem := dst[: len(dst)-64 : len(dst)-64]
					got, err := c.GetInto(ctx, key, mem)
					if got != n || (more < 0) != errors.Is(err, io.ErrShortBuffer) || more >= 0 && err != nil {
						t.Fatalf("%d bytes into %d: %d, %v", n, len(mem), got, err)
					}
					if err != nil {
						got = 0
					}
					if !bytes.Equal(mem[:got], want[:got]) {
						t.Fatalf("%d bytes into %d: other bytes", n, len(mem))
					}
					for i, b := range dst[got:] {
						if b != 0xc5 && (b != 0 || got+i >= len(mem)) {
							t.Fatalf("%d bytes into %d: byte %d is %#x", n, len(mem), got+i, b)
						}
					}
				}
				it, err := c.Get(ctx, key)
				if err != nil || !bytes.Equal(it.Value, want) || it.Flags != flags {
					t.Fatalf("%d bytes: %d, %v", n, len(it.Value), err)
				}
				into := make([]byte, 3, n+100)
				ops := []client.Op{{Kind: client.OpGet, Key: key, Into: into}, {Kind: client.OpGet, Key: []byte("no")},
					{Kind: client.OpGet, Key: key}}
				c.Do(ctx, ops)
				for _, i := range []int{0, 2} {
					if v := ops[i].Item.Value; ops[i].Err != nil || !bytes.Equal(v, want) {
						t.Fatalf("%d bytes, op %d: %d, %v", n, i, len(v), ops[i].Err)
					}
				}
				if v := ops[0].Item.Value; &v[0] != &into[0] {
					t.Errorf("%d bytes: not in Into, which has room", n)
				}
				if err := c.Delete(ctx, key); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// A value that grew beyond its caller's memory since the session saw it leaves nothing there.
func TestGrownBeyondInto(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		s, c := open(t, p, devstore.Options{CapacityBytes: 128 << 20, NoJanitor: true}, client.Options{Lanes: 1})
		other := another(t, s)
		put := func(c *client.Client, b byte, n int) {
			t.Helper()
			if _, err := c.Put(t.Context(), []byte("k"), valueOf(b, n), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range []int{9000, 300_000} {
			for _, more := range []int{2 * n, 3 << 20} {
				put(c, 'a', n)
				put(other, 'b', n+more)
				into := valueOf(0xc5, n+128)
				ops := []client.Op{{Kind: client.OpGet, Key: []byte("k"), Into: into[:0]}}
				c.Do(t.Context(), ops)
				if v := ops[0].Item.Value; ops[0].Err != nil || !bytes.Equal(v, valueOf('b', n+more)) {
					t.Fatalf("%d bytes, %v", len(v), ops[0].Err)
				}
				for i, b := range into {
					if b != 0 && b != 0xc5 {
						t.Fatalf("of %d bytes, which became %d, byte %d is %#x", n, n+more, i, b)
					}
				}
			}
		}
	})
}

// A caller that gave up a GET or a PUT has its memory to itself again, whatever goes on in the lane that others own.
func TestCallersMemoryComesBack(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			_, c := open(t, p, devstore.Options{CapacityBytes: 256 << 20}, client.Options{Lanes: 1})
			const n = 300_000
			for k := range byte(4) {
				if _, err := c.Put(t.Context(), []byte{k}, valueOf('0'+k, n), client.PutOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			end := time.Now().Add(time.Second)
			for g := range byte(4) {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(uint64(g), 1))
					mem, src := make([]byte, n), make([]byte, n)
					for i := byte(0); time.Now().Before(end); i++ {
						k := g &^ 1
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.Int64N(600_000)))
						if g&1 == 0 {
							_, err := c.GetInto(ctx, []byte{k}, mem)
							for _, b := range mem {
								if b != 0 && (err != nil || b < '0' || b > '0'+3) {
									t.Errorf("ended with %v, and holds %#x", err, b)
									break
								}
							}
							clear(mem)
						} else {
							copy(src, valueOf('0'+i%4, n))
							_, _ = c.Put(ctx, []byte{k}, src, client.PutOptions{})
							clear(src)
						}
						cancel()
						it, err := c.Get(t.Context(), []byte{k})
						if err != nil || len(bytes.Trim(it.Value, string(it.Value[:1]))) != 0 || it.Value[0] < '0' {
							t.Errorf("get: %v", err)
						}
						for _, b := range mem {
							if b != 0 {
								t.Fatal("written after its GET was given up")
							}
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// mapping is a device that counts what it maps.
type mapping struct {
	driver.Device
	made atomic.Int64
}

func (m *mapping) Alloc(size int64, o driver.AllocOptions) (*driver.Memory, error) {
	m.made.Add(1)
	return m.Device.Alloc(size, o)
}

// Warm GETs and PUTs of long values take no buffer for them, alone and in batches, and map no memory. On shm GETs of
// one record allocate nothing.
func TestValuesInOnePass(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			st, _ := open(t, p, devstore.Options{CapacityBytes: 256 << 20, NoJanitor: true}, client.Options{})
			ctx, maps := t.Context(), &mapping{Device: st.Devices()[0].Driver()}
			c, err := client.Open(ctx, client.Options{Directory: st.Directory(), Lanes: 1,
				Devices: []*rdma.Device{rdma.NewDevice(p, maps)}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}()
			for _, n := range []int{8 << 10, 100_000, 1 << 20, 3 << 20, 9 << 20} {
				key, dst, src := fmt.Appendf(nil, "%d", n), make([]byte, n), valueOf('v', n)
				get := func() {
					if _, err := c.GetInto(ctx, key, dst); err != nil {
						t.Fatal(err)
					}
				}
				use := func() {
					if _, err := c.Put(ctx, key, src, client.PutOptions{}); err != nil {
						t.Fatal(err)
					}
					get()
				}
				use()
				ops := []client.Op{{Kind: client.OpGet, Key: key, Into: dst[:0]}, {Kind: client.OpGet, Key: key}}
				before, mapped := c.Buffered(), maps.made.Load()
				c.Do(ctx, ops)
				if err := errors.Join(ops[0].Err, ops[1].Err); err != nil {
					t.Fatal(err)
				}
				use()
				if got := c.Buffered() - before; got != 0 {
					t.Errorf("%d bytes: %d bytes of buffers", n, got)
				}
				if got := maps.made.Load() - mapped; got != 0 || mapped == 0 {
					t.Errorf("%d bytes: %d mappings, after %d of a new session", n, got, mapped)
				}
				if p != "shm" || n >= 1<<20 || invariants.On { // assertions allocate
					continue
				}
				if allocs := testing.AllocsPerRun(300, get); allocs >= 1 {
					t.Errorf("%d bytes: %v allocations", n, allocs)
				}
			}
		})
	}
}

// TestShortenedValue: a record that has fewer bytes than Open was told, and the same version, is damaged. No part that
// is not filled counts as read.
func TestShortenedValue(t *testing.T) {
	r := newRigOf(t, devstore.Sim, 1, 20*time.Second, 64<<20, nil)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Replicas: 1, BytesPerNode: 32 << 20})
	c := r.client(r.options())
	a := &apart{apartRig: &apartRig{T: t, other: c, x: r.raw()}, key: []byte("k"), n: 20_000}
	a.put(a.key, 'a', a.n)
	v, err := c.Open(t.Context(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	a.find()
	b := make([]byte, layout.RecordLen(len(a.key), a.n/2))
	layout.EncodeRecord(b, layout.RecordHeader{Version: v.Version}, a.key, valueOf('a', a.n/2))
	a.write(a.word.Off(), b)
	for _, off := range []int{0, a.n / 3, a.n / 2, a.n - 1} {
		p := valueOf('p', a.n-off)
		n, err := v.ReadAt(p, int64(off))
		if n != 0 || !errors.Is(err, client.ErrCorrupt) || len(bytes.Trim(p, "p\x00")) > 0 {
			t.Errorf("from %d: %d bytes, %v, %q", off, n, err, p[:1])
		}
	}
}
