package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// A group whose memory is ones fails its own keys, at once and with its place, while every
// other key is served; a Scan says so and has the rest.
func TestDamagedGroup(t *testing.T) {
	r := newRig(t, "tcp", 1, 5*time.Second)
	c := r.client(r.options())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const keys = 2000
	key := func(i int) []byte { return fmt.Appendf(nil, "k%d", i) }
	for i := range keys {
		if _, err := c.Put(ctx, key(i), []byte("v"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	loc, err := inside.Of(c).Locate(key(0))
	if err != nil {
		t.Fatal(err)
	}
	x := r.raw()
	group := x.mem.Bytes[:layout.GroupSize]
	x.do(loc.PG, loc.Home, rdma.WR{Op: rdma.OpRead, Local: group})
	for off := uint64(0); off < layout.GroupSize; off += 8 {
		x.do(loc.PG, loc.Home+off, rdma.WR{Op: rdma.OpCmpAndSwp, Local: x.mem.Bytes[512:520],
			Compare: binary.LittleEndian.Uint64(group[off:]), Swap: 1<<64 - 1})
	}

	fresh := r.client(r.options()) // it has no hints
	var lost [][]byte
	for i := range keys {
		_, err := fresh.Get(ctx, key(i))
		at, _ := inside.Of(c).Locate(key(i))
		switch damaged := at.PG == loc.PG && at.Home == loc.Home; {
		case damaged && !errors.Is(err, client.ErrCorrupt):
			t.Fatalf("get %q: %v, want ErrCorrupt", key(i), err)
		case !damaged && err != nil:
			t.Fatalf("get %q of another group: %v", key(i), err)
		case damaged:
			lost = append(lost, key(i))
		}
	}
	for name, op := range map[string]func(c *client.Client) error{
		"put": func(c *client.Client) error {
			_, err := c.Put(ctx, key(0), []byte("w"), client.PutOptions{})
			return err
		},
		"put if absent": func(c *client.Client) error {
			_, err := c.PutIfAbsent(ctx, key(0), []byte("w"), client.PutOptions{})
			return err
		},
		"delete": func(c *client.Client) error { return c.Delete(ctx, key(0)) },
		"incr":   func(c *client.Client) error { _, err := c.Incr(ctx, key(0), 1); return err },
		"mget":   func(c *client.Client) error { return c.MultiGet(ctx, [][]byte{key(0), []byte("other")})[0].Err },
	} {
		for _, c := range []*client.Client{c, fresh} { // with and without hints
			err := op(c)
			var corrupt *layout.CorruptError
			if !errors.Is(err, client.ErrCorrupt) || !errors.As(err, &corrupt) || client.Outcome(err) != rdma.No {
				t.Errorf("%s: %v, want ErrCorrupt, which did not happen", name, err)
			}
		}
	}

	found, said := scanAround(t, ctx, fresh)
	if said != 1 {
		t.Errorf("%d pages said that something was left out, want 1", said)
	}
	for i := range keys {
		if want := !slices.ContainsFunc(lost, func(k []byte) bool {
			return string(k) == string(key(i))
		}); found[string(key(i))] != want {
			t.Errorf("scan found %q: %v, want %v", key(i), !want, want)
		}
	}
}

// A word that was made to say that its key has moved, while nothing moves, is told as damage once
// the directory knows of no newer map, well before the operation's time is over.
func TestMovedNowhere(t *testing.T) {
	r := newRig(t, "tcp", 1, time.Second)
	c := r.client(r.options())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	loc, err := inside.Of(c).Locate([]byte("k"))
	if err != nil {
		t.Fatal(err)
	}
	other := ""
	for i, at := 0, loc; at.PG == loc.PG && at.Home == loc.Home; i++ { // every store has hashes of its own
		other = fmt.Sprintf("other%d", i)
		if at, err = inside.Of(c).Locate([]byte(other)); err != nil {
			t.Fatal(err)
		}
	}
	for _, k := range []string{"k", other} {
		if _, err := c.Put(ctx, []byte(k), []byte("v"), client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	x := r.raw()
	group := x.mem.Bytes[:layout.GroupSize]
	x.do(loc.PG, loc.Home, rdma.WR{Op: rdma.OpRead, Local: group})
	for i := range layout.GroupSlots {
		w := layout.Group(group).Slot(i)
		if w.State() != layout.Live {
			continue
		}
		x.do(loc.PG, loc.Home+layout.SlotOff(i), rdma.WR{Op: rdma.OpCmpAndSwp, Local: x.mem.Bytes[512:520],
			Compare: uint64(w), Swap: uint64(w.WithState(layout.Moved))})
	}
	fresh := r.client(r.options()) // it has no hints
	for name, op := range map[string]func(c *client.Client) error{
		"get": func(c *client.Client) error { _, err := c.Get(ctx, []byte("k")); return err },
		"put": func(c *client.Client) error {
			_, err := c.Put(ctx, []byte("k"), []byte("w"), client.PutOptions{})
			return err
		},
		"delete": func(c *client.Client) error { return c.Delete(ctx, []byte("k")) },
		"incr":   func(c *client.Client) error { _, err := c.Incr(ctx, []byte("k"), 1); return err },
	} {
		for _, c := range []*client.Client{c, fresh} {
			if err := op(c); !errors.Is(err, client.ErrCorrupt) || client.Outcome(err) != rdma.No {
				t.Errorf("%s: %v, want ErrCorrupt, which did not happen", name, err)
			}
		}
	}
	if it, err := fresh.Get(ctx, []byte(other)); err != nil || string(it.Value) != "v" {
		t.Errorf("another key: %q, %v", it.Value, err)
	}
	found, said := scanAround(t, ctx, fresh)
	if said != 1 || len(found) != 1 || !found[other] {
		t.Errorf("a scan says %d times that something was left out, and finds %v", said, found)
	}
}

// scanAround is what a scan finds, and how often it says that it left something out.
func scanAround(t *testing.T, ctx context.Context, c *client.Client) (found map[string]bool, said int) {
	t.Helper()
	found = make(map[string]bool)
	for kv, err := range c.Scan(ctx, client.ScanOptions{}) {
		switch {
		case errors.Is(err, client.ErrCorrupt):
			said++
		case err != nil:
			t.Fatal(err)
		default:
			found[string(kv.Key)] = true
		}
	}
	return found, said
}
