package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// pinRig is a small cache that lets so many percent of it be pinned.
func pinRig(t *testing.T, percent uint32) (*rig, *client.Client) {
	t.Helper()
	r := newRig(t, "shm", 1, 5*time.Second)
	r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: cacheMode, Replicas: 1, BytesPerNode: 4 << 20,
		MaxPinnedPercent: percent})
	return r, r.client(r.options())
}

func fillCache(t *testing.T, c *client.Client, prefix string, n int) {
	t.Helper()
	for i := range n {
		mustPut(t, c, fmt.Appendf(nil, "%s%d", prefix, i), string(make([]byte, 400)))
	}
}

// found is how many of n keys are there, from one on.
func found(t *testing.T, c *client.Client, prefix string, from, n int) (there int) {
	t.Helper()
	for i := range n {
		switch _, err := c.Exists(t.Context(), fmt.Appendf(nil, "%s%d", prefix, from+i)); {
		case err == nil:
			there++
		case !errors.Is(err, client.ErrNotFound):
			t.Fatal(err)
		}
	}
	return there
}

// Pinned keys stay while a cache takes many times what it holds, also those that are used and put meanwhile. Once they
// are unpinned they go like others.
func TestPin(t *testing.T) {
	t.Parallel()
	_, c := pinRig(t, 30)
	const pinned = 400
	rounds := 6
	if testing.Short() {
		rounds = 2
	}
	fillCache(t, c, "pin", pinned)
	for i := range pinned {
		if err := c.Pin(t.Context(), fmt.Appendf(nil, "pin%d", i), time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	for round := range rounds {
		fillCache(t, c, fmt.Sprint("other", round, "-"), 4000)
		for i := range pinned / 2 {
			if _, err := c.Get(t.Context(), fmt.Appendf(nil, "pin%d", i)); err != nil {
				t.Fatalf("round %d, key %d: %v", round, i, err)
			}
		}
		fillCache(t, c, "pin", pinned/4)
	}
	st := c.Stats()
	if n := found(t, c, "pin", 0, pinned); n != pinned || st.Pins != pinned || st.PinsPassed == 0 ||
		st.PinsBroken != 0 || st.Evicted == 0 {
		t.Errorf("%d of %d pinned keys are there; %d pins, %d passed over, %d broken, %d evicted", n, pinned, st.Pins,
			st.PinsPassed, st.PinsBroken, st.Evicted)
	}
	for i := range pinned {
		if err := c.Unpin(t.Context(), fmt.Appendf(nil, "pin%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	// Those that nobody has used go. The others may be worth keeping.
	for round := 0; found(t, c, "pin", pinned/2, pinned/2) > pinned/4; round++ {
		if round == 20 {
			t.Fatalf("%d keys that are not pinned any more are there", found(t, c, "pin", pinned/2, pinned/2))
		}
		fillCache(t, c, fmt.Sprint("more", round, "-"), 4000)
	}
}

// Keys that are put with PinUntil stay, short or long, while a cache takes many times what it holds. No other
// session knows of it. A put without PinUntil, and the time, end that.
func TestPutPinned(t *testing.T) {
	t.Parallel()
	r, c := pinRig(t, 60)
	const pinned = 400
	hour := client.PutOptions{PinUntil: time.Now().Add(time.Hour)}
	value, long := make([]byte, 400), make([]byte, 600<<10)
	ops := make([]client.Op, pinned)
	for i := range ops {
		ops[i] = client.Op{Kind: client.OpPut, Key: fmt.Appendf(nil, "pin%d", i), Value: value, PinUntil: hour.PinUntil}
	}
	c.Do(t.Context(), ops)
	for i := range ops {
		if ops[i].Err != nil {
			t.Fatal(ops[i].Err)
		}
	}
	put := func(k string, o client.PutOptions) {
		t.Helper()
		if _, err := c.PutFrom(t.Context(), []byte(k), bytes.NewReader(long), int64(len(long)), o); err != nil {
			t.Fatal(err)
		}
	}
	put("long", hour)
	other := r.client(r.options())
	fillCache(t, other, "other", 12_000)
	st := other.Stats()
	if n := found(t, c, "pin", 0, pinned); n != pinned || st.PinsPassed == 0 || st.PinsBroken != 0 || st.Evicted == 0 {
		t.Errorf("%d of %d pinned keys are there; %d passed over, %d broken, %d evicted", n, pinned, st.PinsPassed,
			st.PinsBroken, st.Evicted)
	}
	if _, err := c.Exists(t.Context(), []byte("long")); err != nil {
		t.Errorf("the long value: %v", err)
	}
}

// A cache in which everything is pinned by its record takes writes.
func TestPutEverythingPinned(t *testing.T) {
	t.Parallel()
	_, c := pinRig(t, 30)
	hour := client.PutOptions{PinUntil: time.Now().Add(time.Hour)}
	for i := range 11_000 {
		if _, err := c.Put(t.Context(), fmt.Appendf(nil, "key%d", i), make([]byte, 400), hour); err != nil {
			t.Fatal(err)
		}
	}
	if st := c.Stats(); st.PinsBroken == 0 || st.PinsOver == 0 {
		t.Errorf("%d pins broken, %d samples over the quota", st.PinsBroken, st.PinsOver)
	}
	for i := range 3 {
		mustPut(t, c, fmt.Appendf(nil, "large%d", i), string(make([]byte, 200<<10)))
	}
}

// A cache in which everything is pinned takes writes, of short values and of one that needs a stretch of memory.
func TestPinEverything(t *testing.T) {
	t.Parallel()
	_, c := pinRig(t, 30)
	rounds := 3
	if testing.Short() {
		rounds = 1
	}
	for round := range rounds {
		for i := range 4000 {
			k := fmt.Appendf(nil, "key%d-%d", round, i)
			mustPut(t, c, k, string(make([]byte, 400)))
			err := c.Pin(t.Context(), k, time.Now().Add(time.Hour))
			if err != nil && !errors.Is(err, client.ErrNotFound) {
				t.Fatal(err)
			}
		}
	}
	if st := c.Stats(); st.PinsBroken == 0 {
		t.Errorf("%d pins, none broken", st.Pins)
	}
	for i := range 3 {
		mustPut(t, c, fmt.Appendf(nil, "large%d", i), string(make([]byte, 200<<10)))
	}
}

// Pins are refused that last too long or that their namespace does not allow. Where nothing is evicted a Pin looks
// whether the key is there.
func TestPinRefused(t *testing.T) {
	r, cache := pinRig(t, 0)
	_, store := open(t, "shm", devstore.Options{}, client.Options{})
	fake := clienttest.New(clienttest.Options{})
	k, soon := []byte("k"), time.Now().Add(time.Minute)
	for name, c := range map[string]client.API{"cache": cache, "store": store, "clienttest": fake} {
		if _, err := c.Put(t.Context(), k, []byte("v"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		err := c.Pin(t.Context(), k, soon)
		if want := name == "cache"; errors.Is(err, client.ErrInvalid) != want || !want && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := c.Pin(t.Context(), k, time.Now().Add(client.MaxPin+time.Minute)); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: pinned for too long: %v", name, err)
		}
		_, err = c.Put(t.Context(), k, []byte("v"), client.PutOptions{PinUntil: soon})
		if want := name == "cache"; errors.Is(err, client.ErrInvalid) != want || !want && err != nil {
			t.Errorf("%s: put and pinned: %v", name, err)
		}
		_, err = c.Put(t.Context(), k, []byte("v"), client.PutOptions{
			PinUntil: time.Date(2106, 1, 1, 0, 0, 0, 0, time.UTC)})
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: put and pinned for too long: %v", name, err)
		}
		if err := c.Pin(t.Context(), k, time.Time{}); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: pinned until no time: %v", name, err)
		}
		if err := c.Unpin(t.Context(), []byte("none")); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("%s: unpin of nothing: %v", name, err)
		}
		if err := c.Unpin(t.Context(), k); err != nil {
			t.Errorf("%s: unpin: %v", name, err)
		}
	}
	if err := r.admin.CallOnce(t.Context(), func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.SetNamespace(ctx, &dirpb.SetNamespaceRequest{Name: "default", KeepLimit: true,
			MaxPinnedPercent: proto.Uint32(10)})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		if err := cache.Pin(t.Context(), k, soon); err != nil {
			return err.Error()
		}
		return ""
	})
	o := r.options()
	o.ReadOnly = true
	if err := r.client(o).Pin(t.Context(), k, soon); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a reader pins: %v", err)
	}
}

// Of two pins the later one counts, and notes of uses and of puts leave it; Unpin ends it.
func TestPinKept(t *testing.T) {
	r, a := pinRig(t, 30)
	b := r.client(r.options())
	k := []byte("k")
	mustPut(t, a, k, "v")
	lasts := func(what string, min, max time.Duration) {
		t.Helper()
		eventually(t, func() string { // notes are WRITEs that nobody waits for
			d, err := a.PinnedFor(t.Context(), k)
			if err != nil {
				t.Fatal(err)
			}
			if d < min || d > max {
				return fmt.Sprintf("%s: pinned for %v, want %v to %v", what, d, min, max)
			}
			return ""
		})
	}
	pin := func(c *client.Client, d time.Duration) {
		t.Helper()
		if err := c.Pin(t.Context(), k, time.Now().Add(d)); err != nil {
			t.Fatal(err)
		}
	}
	pin(a, 20*time.Minute)
	lasts("pin", 15*time.Minute, 20*time.Minute)
	pin(b, time.Hour)
	lasts("longer", 50*time.Minute, time.Hour)
	pin(a, 20*time.Minute)
	lasts("shorter", 50*time.Minute, time.Hour)
	if _, err := b.Get(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	for range 2 { // an expiry is noted in any case
		if _, err := b.Put(t.Context(), k, []byte("v2"), client.PutOptions{TTL: 2 * time.Hour}); err != nil {
			t.Fatal(err)
		}
	}
	if st := b.Stats(); st.Notes < 3 {
		t.Errorf("%d notes", st.Notes)
	}
	lasts("noted", 50*time.Minute, time.Hour)
	if err := b.Unpin(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	lasts("unpinned", 0, 0)
}
