package client_test

import (
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
)

// quietPatience bounds what takes seconds on a machine that is not busy.
const quietPatience = time.Minute

// Sessions that do nothing are quiet, and yet places that another one unlinks leave limbo: they
// are called, renew their leases, and are quiet again.
func TestQuietSessions(t *testing.T) {
	if testing.Short() {
		t.Skip("sessions are quiet after seconds in which nothing happens")
	}
	const idlers = 8
	st, writer := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20, Lease: 30 * time.Second}, client.Options{})
	idle := make([]*client.Client, idlers)
	for i := range idle {
		c, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
		idle[i] = c
	}
	put := func() {
		t.Helper()
		if _, err := writer.Put(t.Context(), []byte("k"), []byte("v"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	until := func(what string, cond func() bool) time.Duration {
		t.Helper()
		began := time.Now()
		for !cond() {
			if time.Since(began) > quietPatience {
				t.Fatalf("waited %v for %s", quietPatience, what)
			}
			time.Sleep(time.Millisecond)
		}
		return time.Since(began)
	}
	quiet := func() {
		t.Helper()
		until("quiet", func() bool {
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
		took := until("the end of limbo", func() bool {
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
	t.Logf("%v until all that was under way had ended", until("what is under way", over).Round(time.Millisecond))
}

// An idle session starts no goroutine to renew its lease, since each wakes threads; and while a renewal lasts, another
// goroutine sees to what happens.
func TestQuietTurns(t *testing.T) {
	if testing.Short() {
		t.Skip("sessions are quiet after seconds in which nothing happens")
	}
	st, _ := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20, Lease: time.Second}, client.Options{})
	c, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	until := func(what string, cond func() bool) {
		t.Helper()
		for began := time.Now(); !cond(); time.Sleep(time.Millisecond) {
			if time.Since(began) > quietPatience {
				t.Fatalf("waited %v for %s", quietPatience, what)
			}
		}
	}
	// A map or a call may come at any time, and then somebody sees to it.
	until("five renewals without a goroutine", func() bool {
		until("quiet", func() bool { _, _, quiet := c.Renewals(); return quiet })
		sent, _, _ := c.Renewals()
		alone, begun := c.Turns()
		until("five renewals", func() bool { now, _, _ := c.Renewals(); return now >= sent+5 })
		nowAlone, nowBegun := c.Turns()
		return nowAlone >= alone+5 && nowBegun == begun
	})
	_, begun := c.Turns()
	until("a wake-up while a renewal lasts", func() bool {
		c.Wake()
		_, now := c.Turns()
		return now > begun
	})
	sent, _, _ := c.Renewals()
	until("renewals behind it", func() bool { now, _, _ := c.Renewals(); return now >= sent+3 })
}

// A session renews its lease in time though it is woken again and again while a renewal lasts.
func TestWokenTurns(t *testing.T) {
	if testing.Short() {
		t.Skip("control is seldom away")
	}
	st, _ := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20, Lease: time.Second}, client.Options{})
	c, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	began, sent := time.Now(), uint64(0)
	for turns := uint64(0); turns < 20; {
		_, before := c.Turns()
		c.Wake() // if control is away, another begins, which waits for nothing
		if _, now := c.Turns(); now > before {
			turns++
			sent, _, _ = c.Renewals()
			for now := sent; now < sent+2; now, _, _ = c.Renewals() {
				if time.Since(began) > quietPatience {
					t.Fatalf("no renewal follows the one that was under way at turn %d", turns)
				}
				time.Sleep(time.Millisecond)
			}
		}
		if time.Since(began) > quietPatience {
			t.Skip("control was hardly ever away")
		}
	}
}
