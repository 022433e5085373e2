package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/devstore"
)

// Values of all lengths come whole into Views, checked or not, hinted or not; an overwrite and a delete leave them as
// they are.
func TestViews(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		_, c := open(t, p, devstore.Options{CapacityBytes: 128 << 20}, client.Options{})
		testViews(t, c)
		if n := c.Holds(); n != 0 {
			t.Errorf("%d Views are left", n)
		}
	})
	t.Run("fake", func(t *testing.T) { testViews(t, clienttest.New(clienttest.Options{})) })
}

func testViews(t *testing.T, c client.API) {
	ctx := t.Context()
	if _, err := c.View(ctx, []byte("none"), client.ViewOptions{}); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("view of nothing: %v", err)
	}
	for _, d := range []time.Duration{-1, 11 * time.Second} {
		if _, err := c.View(ctx, []byte("none"), client.ViewOptions{Hold: d}); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("Hold %v: %v", d, err)
		}
	}
	for _, n := range []int{0, 1, 8000, 8192, 100_000, 3 << 20, 4<<20 - 3, 9 << 20} {
		for _, flags := range []uint32{0, 7} {
			key, want := fmt.Appendf(nil, "%d", n), valueOf('v', n)
			ver, err := c.Put(ctx, key, want, client.PutOptions{Flags: flags})
			if err != nil {
				t.Fatal(err)
			}
			var vs []*client.View
			for _, unchecked := range []bool{true, false, false} {
				v, err := c.View(ctx, key, client.ViewOptions{Unchecked: unchecked, Hold: 10 * time.Second})
				if err != nil {
					t.Fatalf("%d bytes: %v", n, err)
				}
				vs = append(vs, v)
			}
			if _, err := c.Put(ctx, key, valueOf('w', n), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := c.Delete(ctx, key); err != nil {
				t.Fatal(err)
			}
			for _, v := range vs {
				if got := bytes.Join(v.Parts(), nil); !bytes.Equal(got, want) || v.Size != int64(n) ||
					v.Version != ver || v.Flags != flags || n == 0 && len(v.Parts()) > 0 {
					t.Errorf("%d bytes: %d, version %d of %d, flags %d", n, v.Size, v.Version, ver, v.Flags)
				}
				if err := v.Err(); err != nil {
					t.Errorf("%d bytes: %v", n, err)
				}
				for range 2 {
					if err := v.Release(); err != nil || v.Err() != nil || v.Parts() != nil {
						t.Errorf("%d bytes: released: %v, %v", n, err, v.Err())
					}
				}
			}
		}
	}
}

// A View of a long value over shm copies nothing: the region is mapped once, and READs bring headers alone.
func TestViewsCopyNothing(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{CapacityBytes: 128 << 20, NoJanitor: true}, client.Options{Lanes: 1})
	ctx := t.Context()
	for _, n := range []int{8 << 10, 1 << 20, 9 << 20} {
		key := fmt.Appendf(nil, "%d", n)
		if _, err := c.Put(ctx, key, valueOf('v', n), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			buffered, before := c.Buffered(), c.Stats().Verbs
			v, err := c.View(ctx, key, client.ViewOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := v.Release(); err != nil {
				t.Fatal(err)
			}
			after := c.Stats().Verbs
			if b, m := after.ReadBytes-before.ReadBytes, after.Mapped-before.Mapped; c.Buffered() != buffered ||
				b > 1024 || m > 1 || m > 0 && i > 0 {
				t.Errorf("%d bytes: READs of %d bytes, %d of buffers, %d mappings", n, b, c.Buffered()-buffered, m)
			}
		}
	}
}

// A View expires when its Hold is over, and with its Client.
func TestViewsExpire(t *testing.T) {
	each(t, func(t *testing.T, p string) {
		_, c := open(t, p, devstore.Options{CapacityBytes: 64 << 20}, client.Options{})
		ctx, key := t.Context(), []byte("k")
		put := func(key []byte, n int) {
			if _, err := c.Put(ctx, key, valueOf('v', n), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		view := func(hold time.Duration) *client.View {
			v, err := c.View(ctx, key, client.ViewOptions{Hold: hold})
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		put(key, 100_000)
		v, long := view(time.Millisecond), view(10*time.Second)
		for v.Err() == nil {
			put([]byte("other"), 1) // so that the session is not quiet
		}
		if err := v.Release(); !errors.Is(err, client.ErrViewExpired) || !errors.Is(v.Err(), err) {
			t.Errorf("after its Hold: %v", err)
		}
		if err := long.Err(); err != nil {
			t.Errorf("before its Hold is over: %v", err)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if err := long.Err(); !errors.Is(err, client.ErrViewExpired) {
			t.Errorf("after Close: %v", err)
		}
		sum := 0
		for _, p := range long.Parts() {
			sum += bytes.Count(p, []byte{0}) // it may be looked at
		}
		if err := long.Release(); !errors.Is(err, client.ErrViewExpired) || sum > 100_000 {
			t.Errorf("after Close: %v", err)
		}
	})
}

// A View's Handle has the value in the memory's file, until the state's word says that the View is over.
func TestViewHandle(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{CapacityBytes: 128 << 20}, client.Options{})
	ctx := t.Context()
	for _, n := range []int{100_000, 9 << 20} {
		for _, released := range []bool{true, false} {
			key, want := fmt.Appendf(nil, "%d", n), valueOf('v', n)
			if _, err := c.Put(ctx, key, want, client.PutOptions{Flags: 7}); err != nil {
				t.Fatal(err)
			}
			v, err := c.View(ctx, key, client.ViewOptions{Hold: 10 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			h, err := v.Handle()
			if err != nil {
				t.Fatal(err)
			}
			again, err := v.Handle()
			if err != nil || again.Deadline < h.Deadline || again.Close() != nil {
				t.Fatalf("again: %+v, %v", again, err)
			}
			var got []byte
			for _, r := range h.Parts {
				b := make([]byte, r.Len)
				if _, err := h.Memory.ReadAt(b, r.Off); err != nil {
					t.Fatal(err)
				}
				got = append(got, b...)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%d bytes: %d others in the file", n, len(got))
			}
			for _, f := range []*os.File{h.Memory, h.State} {
				if m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
					t.Errorf("%s can be mapped for writing", f.Name())
					_ = unix.Munmap(m)
				}
			}
			var now unix.Timespec
			if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil || h.Deadline <= now.Nano() {
				t.Errorf("Deadline %d, the clock is at %v, %v", h.Deadline, now, err)
			}
			state := func() byte {
				b := make([]byte, 4)
				if _, err := h.State.ReadAt(b, 0); err != nil {
					t.Fatal(err)
				}
				return b[0]
			}
			if state() != 0 {
				t.Error("over before its end")
			}
			if released {
				err = v.Release()
			} else {
				c.LoseSession()
			}
			if err != nil || state() != 1 {
				t.Errorf("released %v: state %d, %v", released, state(), err)
			}
			if err := h.Close(); err != nil {
				t.Error(err)
			}
			_ = v.Release()
			if _, err := v.Handle(); !errors.Is(err, client.ErrViewExpired) {
				t.Errorf("over: %v", err)
			}
		}
	}
	if _, err := c.Put(ctx, []byte("short"), []byte("v"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	v, err := c.View(ctx, []byte("short"), client.ViewOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Handle(); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("of a copy: %v", err)
	}
	_ = v.Release()
}

// Views are few, and their bytes bounded.
func TestViewLimits(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20}, client.Options{ViewBytes: 3 << 20, Views: 17})
	ctx, key := t.Context(), []byte("k")
	for n, most := range map[int]int{100: 17, 1<<20 - 100: 3} {
		if _, err := c.Put(ctx, key, valueOf('v', n), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		var vs []*client.View
		for len(vs) < 20 {
			v, err := c.View(ctx, key, client.ViewOptions{})
			if err != nil {
				if !errors.Is(err, client.ErrTooManyViews) {
					t.Error(err)
				}
				break
			}
			vs = append(vs, v)
		}
		if len(vs) != most {
			t.Errorf("%d Views of %d bytes, want %d", len(vs), n, most)
		}
		for _, v := range vs {
			_ = v.Release()
		}
		if c.Holds() != 0 {
			t.Errorf("%d Views are left", c.Holds())
		}
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := c.View(over, key, client.ViewOptions{}); !errors.Is(err, context.Canceled) || c.Holds() != 0 {
		t.Errorf("context over: %v", err)
	}
}
