package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
)

// damagedStore has memory in the first pages of a scan that cannot be read.
type damagedStore struct {
	store
	pages int
}

func (d *damagedStore) Scan(_ context.Context, o client.ScanOptions) iter.Seq2[client.KV, error] {
	return func(yield func(client.KV, error) bool) {
		for cur := o.Cursor; !cur.Done; {
			at := cur.Segment
			if !yield(client.KV{Key: fmt.Append(nil, at)}, nil) {
				return
			}
			cur.Segment++
			cur.Done = cur.Segment == 20
			if at < uint32(d.pages) && !yield(client.KV{}, fmt.Errorf("scan: %w: pg 1 replica 0: group at %#x", client.ErrCorrupt, 256*at)) {
				return
			}
		}
	}
}

// A damaged place does not take the other keys of a scan with it, and is told at the end.
func TestScanDamaged(t *testing.T) {
	for _, c := range []struct{ pages, named int }{{0, 0}, {1, 1}, {20, 8}} {
		var keys []string
		err := eachKey(t.Context(), &damagedStore{pages: c.pages}, client.ScanOptions{KeysOnly: true}, func(kv client.KV) (bool, error) {
			keys = append(keys, string(kv.Key))
			return true, nil
		})
		if len(keys) != 20 {
			t.Errorf("%d damaged pages: %d keys, want 20", c.pages, len(keys))
		}
		if (err != nil) != (c.pages > 0) || err != nil && (!errors.Is(err, client.ErrCorrupt) || strings.Count(err.Error(), "group at") != c.named) {
			t.Errorf("%d damaged pages: %v, want %d of them named", c.pages, err, c.named)
		}
		if err != nil && exitCode(err) != exitOther {
			t.Errorf("exit status %d, want %d", exitCode(err), exitOther)
		}
	}
}
