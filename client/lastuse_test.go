package client_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
)

// TestLastUse: in a cache the last use of a key is known until it is noted again, and asking for it is no use.
// Elsewhere nothing is noted, and a key that is not there, or has expired, is not found.
func TestLastUse(t *testing.T) {
	s, c := open(t, "shm",
		devstore.Options{Namespaces: []devstore.Namespace{{Name: "cache", Mode: cacheMode, BytesPerNode: 64 << 20}}},
		client.Options{})
	cache, err := client.Open(t.Context(), client.Options{Directory: s.Directory(), Devices: s.Devices(),
		Namespace: "cache"})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	ctx := t.Context()
	for name, c := range map[string]*client.Client{"store": c, "cache": cache} {
		tools := inside.Of(c)
		for _, n := range []int{1, 1000, 65535} {
			key := bytes.Repeat([]byte("k"), n)
			if _, _, err := tools.LastUse(ctx, key); !errors.Is(err, client.ErrNotFound) {
				t.Errorf("%s: a key that is not there: %v", name, err)
			}
			if _, err := c.Put(ctx, key, []byte("v"), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			if ago, noted, err := tools.LastUse(ctx, key); err != nil || noted != (name == "cache") ||
				ago > time.Minute {
				t.Errorf("%s: a key of %d bytes: %v, %v, %v", name, n, ago, noted, err)
			}
		}
		expired := []client.Op{
			{Kind: client.OpPut, Key: []byte("expired"), Value: []byte("v"), Expires: time.UnixMilli(1)}}
		c.Do(ctx, expired)
		if _, _, err := tools.LastUse(ctx, []byte("expired")); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("%s: a key that has expired: %v", name, err)
		}
	}
	key := []byte("k")
	idle := until(ctx, t, cache, key, func(ago time.Duration) bool { return ago > time.Second })
	// A use is noted if the last note is old enough; another one follows until it is seen.
	until(ctx, t, cache, key, func(ago time.Duration) bool {
		if _, err := cache.Get(ctx, key); err != nil {
			t.Fatal(err)
		}
		return ago < idle
	})
}

// until asks for the last use of a key until ok says so, and returns it.
func until(ctx context.Context, t *testing.T, c *client.Client, key []byte,
	ok func(ago time.Duration) bool) time.Duration {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		ago, noted, err := inside.Of(c).LastUse(ctx, key)
		if err != nil || !noted {
			t.Fatal(noted, err)
		}
		if ok(ago) {
			return ago
		}
		if time.Now().After(end) {
			t.Fatalf("the last use was %v ago", ago)
		}
	}
}
