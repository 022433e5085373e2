package client_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
)

// adapter is a client of a store whose provider takes registered memory alone.
func adapter(t *testing.T, co client.Options) *client.Client {
	_, c := open(t, devstore.Sim, devstore.Options{CapacityBytes: 256 << 20, SGEs: 3, NoJanitor: true}, co)
	return c
}

func copied(c *client.Client) uint64 { return c.Stats().Verbs.CopiedBytes }

// roundTrip puts b and gets it, and parts of it, back into dst, which may be longer.
func roundTrip(t *testing.T, c *client.Client, b, dst []byte) {
	t.Helper()
	key := []byte("k")
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8) ^ byte(len(b))
	}
	if _, err := c.Put(t.Context(), key, b, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // with a hint, too
		if n, err := c.GetInto(t.Context(), key, dst); err != nil || n != len(b) || !bytes.Equal(dst[:n], b) {
			t.Fatalf("GetInto of %d bytes: %d, %v; or bytes differ", len(b), n, err)
		}
	}
	off := len(b) / 3
	part := dst[:len(b)/2]
	if n, _, err := c.GetRange(t.Context(), key, int64(off), part); err != nil || !bytes.Equal(part[:n],
		b[off:off+len(part)]) {
		t.Fatalf("GetRange of %d bytes: %d, %v; or bytes differ", len(b), n, err)
	}
}

// Values in an Arena are the same as elsewhere, whatever the provider.
func TestArenaRoundTrips(t *testing.T) {
	for _, provider := range []string{"shm", "tcp", devstore.Sim, "adapter"} {
		t.Run(provider, func(t *testing.T) {
			var c *client.Client
			if provider == "adapter" {
				c = adapter(t, client.Options{Lanes: 2})
			} else {
				_, c = open(t, provider, devstore.Options{CapacityBytes: 256 << 20, NoJanitor: true}, client.Options{})
			}
			mem := make([]byte, 16<<20)
			a, err := c.Register(mem)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range []int{1, 100, 8 << 10, 8<<10 + 1, 100_003, 1 << 20, 2<<20 - 40, 2 << 20, 5<<20 + 7} {
				at := n % 61
				roundTrip(t, c, mem[at:at+n], mem[8<<20:8<<20+n+n%3])
			}
			if n := copied(c); n != 0 {
				t.Errorf("%d bytes were copied beside their way", n)
			}
			if err := a.Deregister(); err != nil {
				t.Fatal(err)
			}
			roundTrip(t, c, mem[3:1<<20], mem[8<<20:10<<20])
			if n := copied(c); (provider == "adapter") != (n >= 3<<20) {
				t.Errorf("%d bytes were copied beside their way when the Arena was gone", n)
			}
		})
	}
}

func TestArenaRefuses(t *testing.T) {
	_, c := open(t, "tcp", devstore.Options{CapacityBytes: 64 << 20, NoJanitor: true}, client.Options{})
	mem := make([]byte, 64<<10)
	a, err := c.Register(mem[:32<<10])
	if err != nil {
		t.Fatal(err)
	}
	if b := a.Bytes(); &b[0] != &mem[0] || len(b) != 32<<10 {
		t.Error("Bytes is not the memory")
	}
	for what, b := range map[string][]byte{"no bytes": nil, "8": mem[32<<10+1:], "already": mem[:32<<10],
		"overlap": mem} {
		if _, err := c.Register(b); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want ErrInvalid and %q", err, what)
		}
	}
	for i := range 3 {
		if err := a.Deregister(); (i == 0) != (err == nil) || i > 0 && !errors.Is(err, client.ErrClosed) {
			t.Errorf("Deregister %d: %v", i, err)
		}
	}
	if a, err = c.Register(mem); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Deregister(); !errors.Is(err, client.ErrClosed) {
		t.Errorf("Deregister after Close: %v, want ErrClosed", err)
	}
	if _, err := c.Register(mem); !errors.Is(err, client.ErrClosed) {
		t.Errorf("Register after Close: %v, want ErrClosed", err)
	}
}

// Another session has the Arenas of the one before.
func TestArenaOutlivesSession(t *testing.T) {
	c := adapter(t, client.Options{Lanes: 1})
	mem := make([]byte, 2<<20)
	a, err := c.Register(mem)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		was := c.Stats().Session
		c.LoseSession()
		roundTrip(t, c, mem[:1<<20], mem[1<<20:])
		if c.Stats().Session == was {
			t.Fatal("the session is the same")
		}
	}
	if n := copied(c); n != 0 {
		t.Errorf("%d bytes were copied beside their way", n)
	}
	if err := a.Deregister(); err != nil {
		t.Fatal(err)
	}
}

// Arenas come and go while sessions do, and values are read and written in them.
func TestArenaConcurrently(t *testing.T) {
	c := adapter(t, client.Options{Lanes: 2})
	const n, rounds = 200_000, 30
	errs := make(chan error, 8)
	var wg sync.WaitGroup
	for w := range 3 {
		wg.Go(func() {
			key, mem := []byte{byte(w)}, make([]byte, 2*n)
			for i := range rounds {
				a, err := c.Register(mem)
				if err != nil {
					errs <- err
					return
				}
				done := make(chan error, 1)
				go func() {
					src, dst := mem[:n], mem[n:]
					for j := range src {
						src[j] = byte(i + w + j>>8)
					}
					_, err := c.Put(context.Background(), key, src, client.PutOptions{})
					if err == nil {
						_, err = c.GetInto(context.Background(), key, dst)
					}
					if err == nil && !bytes.Equal(src, dst) {
						err = errors.New("got other bytes")
					}
					done <- err
				}()
				if i%2 == 0 {
					errs <- <-done
				}
				if err := a.Deregister(); err != nil {
					errs <- err
				}
				if i%2 != 0 {
					errs <- <-done
				}
			}
		})
	}
	go func() {
		wg.Wait()
		close(errs)
	}()
	lost := 0
	for err := range errs {
		if err != nil && !errors.Is(err, client.ErrUnknownOutcome) { // as with a session that was lost
			t.Error(err)
		}
		if lost++; lost%20 == 0 {
			c.LoseSession()
		}
	}
}

// A caller who goes has the memory back at once: nothing comes later.
func TestArenaAfterDeadline(t *testing.T) {
	c := adapter(t, client.Options{Lanes: 1})
	const n = 4 << 20
	mem := make([]byte, 2*n)
	if _, err := c.Register(mem); err != nil {
		t.Fatal(err)
	}
	value := slices.Repeat([]byte("value---"), n/8)
	if _, err := c.Put(t.Context(), []byte("k"), value, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	ended, rounds := 0, 60
	if testing.Short() {
		rounds = 10
	}
	for i := range rounds {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(4_000))*time.Microsecond)
		dst := mem[:n]
		clear(dst)
		got, err := c.GetInto(ctx, []byte("k"), dst)
		cancel()
		switch {
		case err == nil && (got != n || !bytes.Equal(dst, value)):
			t.Fatalf("round %d: %d bytes, other than they were put", i, got)
		case err != nil && bytes.Count(dst, []byte{0}) != n:
			t.Fatalf("round %d: %v, and bytes are there", i, err)
		case err != nil:
			ended++
		}
		for j := range dst {
			dst[j] = 0xc5
		}
		// The one before is over when this is answered.
		if got, err := c.GetInto(t.Context(), []byte("k"), mem[n:]); err != nil || got != n {
			t.Fatal(got, err)
		}
		if k := bytes.Count(dst, []byte{0xc5}); k != n {
			t.Fatalf("round %d: %d bytes came after GetInto had returned", i, n-k)
		}
	}
	t.Logf("%d of %d ended early", ended, rounds)
}
