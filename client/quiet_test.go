package client_test

import (
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/testutil"
)

// settles waits for what takes seconds on a machine that is not busy, and returns how long that was.
func settles(t *testing.T, what string, cond func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	eventually(t, func() string {
		if cond() {
			return ""
		}
		return "no " + what
	})
	return time.Since(began)
}

// another opens a client of st's namespace, until the test's end.
func another(t *testing.T, st *devstore.Store) *client.Client {
	t.Helper()
	c, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// Sessions that do nothing are quiet, and yet places that another one unlinks leave limbo: they
// are called, renew their leases, and are quiet again.
func TestQuietSessions(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("sessions are quiet after seconds in which nothing happens")
	}
	const idlers = 8
	st, writer := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20, Lease: 30 * time.Second}, client.Options{})
	idle := make([]*client.Client, idlers)
	for i := range idle {
		idle[i] = another(t, st)
	}
	put := func() {
		t.Helper()
		if _, err := writer.Put(t.Context(), []byte("k"), []byte("v"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	quiet := func() {
		t.Helper()
		settles(t, "quiet", func() bool {
			for _, c := range append([]*client.Client{writer}, idle...) {
				if _, _, quiet := c.Renewals(); !quiet {
					return false
				}
			}
			return true
		})
	}
	put()
	for range 3 {
		quiet()
		before := make([]uint64, idlers)
		for i, c := range idle {
			before[i], _, _ = c.Renewals()
		}
		tag, _, _ := writer.Renewals()
		put() // its place before is in limbo until every session has reported another reclaim epoch
		took := settles(t, "the end of limbo", func() bool {
			_, released, _ := writer.Renewals()
			return released > tag
		})
		for i, c := range idle {
			if sent, _, _ := c.Renewals(); sent == before[i] {
				t.Errorf("limbo ended, but client %d has sent no renewal", i)
			}
		}
		t.Logf("limbo ended after %v beside %d quiet sessions", took.Round(time.Millisecond), idlers)
	}
	quiet()
	over, err := inside.Of(writer).UnderWay(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if over() {
		t.Error("all that was under way has ended, and nobody was asked")
	}
	t.Logf("%v until all that was under way had ended", settles(t, "what is under way", over).Round(time.Millisecond))
}

// An idle session starts no goroutine to renew its lease, since each wakes threads; and while a renewal lasts, another
// goroutine sees to what happens.
func TestQuietTurns(t *testing.T) {
	t.Parallel()
	st, _ := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20, Lease: time.Second}, client.Options{})
	c := another(t, st)
	// A map or a call may come at any time, and then somebody sees to it.
	for began := time.Now(); ; {
		settles(t, "quiet", func() bool { _, _, quiet := c.Renewals(); return quiet })
		alone, begun := c.Turns()
		renews(t, c, 5)
		nowAlone, nowBegun := c.Turns()
		if nowAlone >= alone+5 && nowBegun == begun {
			break
		}
		if time.Since(began) > testutil.Limit {
			t.Fatalf("of five renewals control performed %d, and started %d goroutines", nowAlone-alone, nowBegun-begun)
		}
	}
	wakes(t, c)
	renews(t, c, 3)
}

// A session renews its lease in time though it is woken again and again while a renewal lasts.
func TestWokenTurns(t *testing.T) {
	t.Parallel()
	st, _ := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20, Lease: time.Second}, client.Options{})
	c := another(t, st)
	for range 6 {
		wakes(t, c)
		renews(t, c, 2)
	}
}

// renews waits until c has sent n renewals more.
func renews(t *testing.T, c *client.Client, n uint64) {
	t.Helper()
	sent, _, _ := c.Renewals()
	settles(t, "renewals", func() bool { now, _, _ := c.Renewals(); return now >= sent+n })
}

// wakes wakes c's control until it is away, so that another goroutine begins in its place.
func wakes(t *testing.T, c *client.Client) {
	t.Helper()
	_, begun := c.Turns()
	settles(t, "wake-up while a renewal lasts", func() bool {
		c.Wake()
		_, now := c.Turns()
		return now > begun
	})
}
