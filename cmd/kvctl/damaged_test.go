package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
)

// damagedStore has memory in the first pages of a scan that cannot be read.
type damagedStore struct {
	store
	pages int
}

func (d *damagedStore) Scan(_ context.Context, cur client.Cursor, _ client.ScanOptions) ([]client.KV, client.Cursor, error) {
	var err error
	if cur.Cluster < uint32(d.pages) {
		err = fmt.Errorf("scan: %w: pg 1 replica 0: group at %#x", client.ErrCorrupt, 256*cur.Cluster)
	}
	kv := client.KV{Key: fmt.Append(nil, cur.Cluster)}
	cur.Cluster++
	cur.Done = cur.Cluster == 20
	return []client.KV{kv}, cur, err
}

// One damaged place does not take the other keys of a scan with it, and is told at the end.
func TestScanDamaged(t *testing.T) {
	for _, c := range []struct{ pages, named int }{{0, 0}, {1, 1}, {20, 8}} {
		var keys []string
		err := eachKey(t.Context(), &damagedStore{pages: c.pages}, nil, true, func(kv client.KV) (bool, error) {
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
