package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
)

func newTest(t *testing.T) (*catalogue, *clienttest.Store, *time.Time) {
	t.Helper()
	source, err := readTable("../products.json", 0)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_800_000_000, 0)
	c := newCatalogue(source, slog.New(slog.DiscardHandler))
	c.now = func() time.Time { return now }
	store := clienttest.New(clienttest.Options{})
	if err := c.use(store); err != nil {
		t.Fatal(err)
	}
	return c, store, &now
}

// wants asks for a product.
func (c *catalogue) wants(t *testing.T, id, name, from string) {
	t.Helper()
	p, got, err := c.product(t.Context(), id)
	if err != nil || p.Name != name || got != from {
		t.Errorf("product %s: %+v from %q, %v; want %q from %q", id, p, got, err, name, from)
	}
}

func TestCache(t *testing.T) {
	c, store, _ := newTest(t)
	c.wants(t, "1", "kettle", "source")
	c.wants(t, "1", "kettle", "cache")
	if err := c.change(t.Context(), product{ID: "1", Name: "samovar"}); err != nil {
		t.Fatal(err)
	}
	c.wants(t, "1", "samovar", "cache")
	it, err := store.Get(t.Context(), []byte("product:1"))
	if err != nil || it.Expires.IsZero() {
		t.Errorf("what is cached: %+v, %v; want it to expire", it, err)
	}
	if _, _, err := c.product(t.Context(), "99"); !errors.Is(err, errNoProduct) {
		t.Errorf("a product that there is not: %v", err)
	}
	if _, _, err := c.product(t.Context(), strings.Repeat("9", 1<<17)); !errors.Is(err, errNoProduct) {
		t.Errorf("an id that is no key: %v", err)
	}
}

// A product that was read from the source before another process changed it does not replace the new one.
func TestLateFill(t *testing.T) {
	c, store, _ := newTest(t)
	store.Fail(func(ctx context.Context, op *client.Op) clienttest.Fault {
		if op.Kind == client.OpPut {
			store.Fail(nil)
			_, err := store.Put(ctx, op.Key, []byte(`{"id":"2","name":"samovar","price_cents":1}`), client.PutOptions{})
			if err != nil {
				t.Error(err)
			}
		}
		return clienttest.Fault{}
	})
	c.wants(t, "2", "teapot", "source")
	c.wants(t, "2", "samovar", "cache")
}

// A store that does not answer is asked once a pause, and again afterwards.
func TestStoreAway(t *testing.T) {
	c, store, now := newTest(t)
	asked := 0
	store.Fail(func(context.Context, *client.Op) clienttest.Fault {
		asked++
		return clienttest.Fault{Err: fmt.Errorf("%w: no memory node answers", client.ErrUnavailable)}
	})
	for range 5 {
		c.wants(t, "3", "cup", "source")
	}
	if err := c.change(t.Context(), product{ID: "3", Name: "mug"}); err != nil || asked != 1 {
		t.Errorf("a store that is away was asked %d times, want once; change: %v", asked, err)
	}
	store.Fail(nil)
	c.wants(t, "3", "mug", "source")
	*now = now.Add(pause + time.Millisecond)
	c.wants(t, "3", "mug", "source")
	c.wants(t, "3", "mug", "cache")
	want := `
# HELP catalogue_cache_failures_total Times that the store did not answer.
# TYPE catalogue_cache_failures_total counter
catalogue_cache_failures_total 1
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), "catalogue_cache_failures_total"); err != nil {
		t.Error(err)
	}
}

// A full cache, and a value that is none of ours, cost that key its help and no other.
func TestCacheOfNoUse(t *testing.T) {
	c, store, _ := newTest(t)
	if _, err := store.Put(t.Context(), []byte("product:4"), []byte("what?"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	c.wants(t, "4", "tray", "source")
	c.wants(t, "5", "spoon", "source")
	c.wants(t, "5", "spoon", "cache")
	store.Fail(func(_ context.Context, op *client.Op) clienttest.Fault {
		if op.Kind == client.OpPut {
			return clienttest.Fault{Err: client.ErrFull}
		}
		return clienttest.Fault{}
	})
	c.wants(t, "1", "kettle", "source")
	c.wants(t, "5", "spoon", "cache")
}

func TestBadRequests(t *testing.T) {
	c, _, _ := newTest(t)
	for body, want := range map[string]string{
		"{":                                  "the body: unexpected EOF",
		`{"name":"x","colour":"red"}`:        `the body: json: unknown field "colour"`,
		`{"name":"","price_cents":1}`:        "invalid product: want an id",
		`{"name":"x","price_cents":-1}`:      "invalid product: want an id",
		`"` + strings.Repeat("x", 65<<10):    "the body: http: request body too large",
		`{"name":"x","price_cents":1000000}`: "",
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequest("PUT", "/products/1", strings.NewReader(body))
		r.SetPathValue("id", "1")
		c.put(w, r)
		if (w.Code == 200) != (want == "") || !strings.HasPrefix(w.Body.String(), want) {
			t.Errorf("PUT %.40s: %d %s, want %s", body, w.Code, w.Body, want)
		}
	}
}
