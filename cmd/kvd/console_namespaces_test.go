package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/gateway"
	"github.com/kvd-project/kvd/internal/testutil"
)

// Rates are of the last minute, and what was before it does not count.
func TestUseOfNamespace(t *testing.T) {
	var s client.Stats
	w := &watched{name: "cache", stats: func() client.Stats { return s }}
	begin := time.Now()
	for _, step := range []struct {
		after             time.Duration
		gets, puts, found uint64 // in all
		want              string
	}{
		{0, 1000, 0, 0, "[- - -]"}, // of long ago
		{10 * time.Second, 1000, 0, 0, "[- - 0]"},
		{20 * time.Second, 1100, 100, 75, "[- 75.0 10]"},
		{70 * time.Second, 1100, 100, 75, "[- 75.0 3]"},
		{90 * time.Second, 1100, 100, 75, "[- - 0]"},
		{300 * time.Second, 1100, 100, 75, "[- - -]"}, // nobody looked for longer than a minute
	} {
		s.Ops = map[string]uint64{"get": step.gets, "put": step.puts}
		s.Absent = step.gets - step.found
		if got := fmt.Sprint(w.now(begin.Add(step.after)).cells()); got != step.want {
			t.Errorf("after %v: %s, want %s", step.after, got, step.want)
		}
		if len(w.samples) > 4 {
			t.Errorf("after %v: %d samples are kept", step.after, len(w.samples))
		}
	}
}

// Keys are counted aside, one count at a time and no more often than is allowed; one that fails leaves what is known.
func TestKeysCounted(t *testing.T) {
	u := newUsage(nil, nil)
	defer u.close()
	counts, answer := make(chan error), make(chan uint64)
	w := &watched{name: "cache", stats: func() client.Stats { return client.Stats{} },
		count: func(ctx context.Context) (uint64, error) {
			select {
			case n := <-answer:
				return n, nil
			case err := <-counts:
				return 0, err
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}}
	u.all = append(u.all, w)
	keys := func() string { return u.byName()["cache"].cells()[0] }
	if got := keys(); got != "-" {
		t.Errorf("%s before the first count is over", got)
	}
	keys() // while one is under way
	answer <- 7
	testutil.Until(t, "7 keys", func() bool { return keys() == "7" })
	if again := time.Until(w.next); again < countPause-time.Second || w.counting {
		t.Errorf("the next count is after %v, under way: %v", again, w.counting)
	}
	w.next = time.Time{}
	keys()
	counts <- errors.New("none")
	testutil.Until(t, "a count that failed", func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		return !w.counting
	})
	if got := keys(); got != "7" {
		t.Errorf("%s after a count that failed", got)
	}
	w.next = time.Time{}
	keys() // close ends it
}

// A row of a slow command has its arguments only where readers may know keys.
func TestSlowTable(t *testing.T) {
	all := []*gateway.SlowCommand{{Took: 20 * time.Millisecond, Args: []string{"mget", "k1", "k2"},
		Peer: "10.0.0.1:99"}}
	for keys, want := range map[bool]string{
		false: "[mget 20ms 0001-01-01T00:00:00Z 10.0.0.1:99 name of the connection: -]",
		true:  "[mget 20ms 0001-01-01T00:00:00Z 10.0.0.1:99 name of the connection: - argument 1: k1 argument 2: k2]",
	} {
		if got := fmt.Sprint(slowTable(all, keys).Rows[0]); got != want {
			t.Errorf("%v: %s", keys, got)
		}
	}
	if got := slowTable(nil, true); len(got.Rows) != 0 || !strings.Contains(got.Title, "Slow") {
		t.Errorf("%v", got)
	}
}
