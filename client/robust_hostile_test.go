package client_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// TestCorruptBytes damages a record and its slot in every way that a check
// covers: a read answers with the right value or a *layout.CorruptError that
// says where.
func TestCorruptBytes(t *testing.T) {
	t.Parallel()
	r := newRig(t, "tcp", 1, 5*time.Second)
	ctx := t.Context()
	x := r.raw()
	for n, size := range []int{0, 20, 3000, 4 << 20} {
		k := fmt.Appendf(nil, "key-%d", n)
		want := make([]byte, size)
		stamp(want, uint64(n), 1)
		// A client without hints, and one that remembers the word.
		c := r.client(r.options())
		warm := r.client(r.options())
		if _, err := warm.Put(ctx, k, want, client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		loc, err := inside.Of(warm).Locate(k)
		if err != nil {
			t.Fatal(err)
		}
		var slot uint64
		var w layout.Word
		g := layout.Group(x.read(loc.PG, loc.Home, layout.GroupSize))
		for i := range layout.GroupSlots {
			if s := g.Slot(i); s.Readable() && s.FP() == layout.FP(loc.Hash) {
				slot, w = loc.Home+layout.SlotOff(i), s
			}
		}
		if slot == 0 {
			t.Fatalf("no slot of %+v holds %q", loc, k)
		}
		var whole []byte
		check := func(what string) {
			t.Helper()
			for _, c := range []*client.Client{c, warm} {
				it, err := c.Get(ctx, k)
				var bad *layout.CorruptError
				if err == nil && !bytes.Equal(it.Value, want) {
					t.Errorf("%s, %s: a wrong value of %d bytes", k, what, len(it.Value))
				}
				if err != nil && (!errors.As(err, &bad) || client.Outcome(err) != rdma.No) {
					t.Errorf("%s, %s: %v", k, what, err)
				}
				// A client that asks for a key puts in what the key itself tells.
				if err == nil && strings.HasPrefix(what, "record") && !bytes.Equal(x.read(loc.PG, w.Off(), len(whole)),
					whole) {
					t.Errorf("%s, %s: not noticed", k, what)
				}
				if err := scanned(c.Scan(ctx, client.ScanOptions{Count: 256, KeysOnly: true})); err != nil &&
					!errors.As(err, &bad) {
					t.Errorf("scan, %s, %s: %v", k, what, err)
				}
			}
		}
		rec := x.read(loc.PG, w.Off(), layout.RecordHeaderSize)
		length := layout.RecordLen(int(binary.LittleEndian.Uint16(rec[8:])), int(binary.LittleEndian.Uint32(rec[12:])))
		whole = x.read(loc.PG, w.Off(), length)
		// Every byte of the header and the key, some of the value.
		for i := 0; i < length; i += 1 + i/64*(i+37) {
			bent := bytes.Clone(whole)
			bent[i] ^= 0x41
			x.write(loc.PG, w.Off(), bent)
			check(fmt.Sprintf("record byte %d", i))
			if t.Failed() {
				return
			}
		}
		x.write(loc.PG, w.Off(), whole)
		check("restored")
		// A slot that points elsewhere: past the heap, into the index, at another size.
		for _, bent := range []layout.Word{
			layout.MakeLive(w.Ver(), w.FP(), w.Code(), 1<<32-1),
			layout.MakeLive(w.Ver(), w.FP(), w.Code(), 0),
			layout.MakeLive(w.Ver(), w.FP(), 255, w.Unit()),
			layout.MakeLive(w.Ver(), w.FP(), w.Code(), w.Unit()+1),
			layout.MakeLive(w.Ver()^1, w.FP(), 0, w.Unit()),
		} {
			x.set(loc.PG, slot, uint64(bent))
			check(fmt.Sprintf("slot %v", bent))
		}
		x.set(loc.PG, slot, uint64(w))
		for _, c := range []*client.Client{c, warm} {
			if it, err := c.Get(ctx, k); err != nil || !bytes.Equal(it.Value, want) {
				t.Fatalf("%s restored: %d bytes, %v", k, len(it.Value), err)
			}
		}
	}
}

// TestGarbageIndex fills groups with arbitrary words: every operation ends in
// time, with an answer or a typed error.
func TestGarbageIndex(t *testing.T) {
	t.Parallel()
	r := newRig(t, "tcp", 1, 5*time.Second)
	ctx := t.Context()
	o := r.options()
	o.OpTimeout = 60 * time.Millisecond
	c := r.client(o)
	if _, err := r.client(r.options()).Put(ctx, []byte("first"), nil, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	x := r.raw()
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	rng := rand.New(rand.NewPCG(11, 0))
	for round := range rounds {
		k := fmt.Appendf(nil, "k%d", round)
		loc, err := inside.Of(c).Locate(k)
		if err != nil {
			t.Fatal(err)
		}
		if round%2 == 0 {
			// Its group may be one of the rounds before.
			if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil && !errors.Is(err, client.ErrUnavailable) &&
				!errors.Is(err, client.ErrUnknownOutcome) &&
				!errors.Is(err, client.ErrCorrupt) {
				t.Fatal(err)
			}
		}
		for off := uint64(0); off < layout.GroupSize; off += 8 {
			w := rng.Uint64()
			if off >= layout.GroupSlotsOff {
				switch round % 4 {
				case 0: // every fingerprint matches
					w = w&^(0xfff<<40) | uint64(layout.MakeLive(0, layout.FP(loc.Hash), 0, 0))&(0xfff<<40)
				case 1: // and the record lies in the heap
					w = uint64(layout.MakeLive(uint16(w), layout.FP(loc.Hash), uint8(w>>20),
						uint32(loc.IndexBytes/layout.UnitSize)+uint32(w>>32)%1000))
				}
			} else if round%3 != 0 {
				continue // header and lock stay
			}
			x.set(loc.PG, loc.Home+off, w)
		}
		for what, op := range map[string]func() error{
			"get":  func() error { _, err := c.Get(ctx, k); return err },
			"put":  func() error { _, err := c.Put(ctx, k, k, client.PutOptions{}); return err },
			"add":  func() error { _, err := c.PutIfAbsent(ctx, k, k, client.PutOptions{}); return err },
			"cas":  func() error { _, err := c.CompareAndSwap(ctx, k, 1, k, client.PutOptions{}); return err },
			"del":  func() error { return c.Delete(ctx, k) },
			"inc":  func() error { _, err := c.Incr(ctx, k, 1); return err },
			"scan": func() error { return scanned(c.Scan(ctx, client.ScanOptions{})) },
		} {
			begin := time.Now()
			err := op()
			var bad *layout.CorruptError
			if err != nil && !errors.As(err, &bad) && !errors.Is(err, client.ErrNotFound) &&
				!errors.Is(err, client.ErrUnavailable) &&
				!errors.Is(err, client.ErrUnknownOutcome) &&
				!errors.Is(err, client.ErrFull) && !errors.Is(err, client.ErrConflict) &&
				!errors.Is(err, client.ErrExists) &&
				!errors.Is(err, client.ErrNotInteger) {
				t.Errorf("round %d: %s: %v", round, what, err)
			}
			if d := time.Since(begin); d > 5*time.Second {
				t.Errorf("round %d: %s took %v: %v", round, what, d, err)
			}
		}
	}
}
