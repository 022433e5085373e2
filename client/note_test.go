package client_test

import (
	"bytes"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/devstore"
)

// A note and flags come back beside the value, whose length they do not change, however long it is; a write without
// them leaves none.
func TestNotes(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{}, client.Options{})
	for name, c := range map[string]client.API{"client": c, "clienttest": clienttest.New(clienttest.Options{})} {
		for _, want := range []client.Item{
			{Value: []byte("v"), Note: 1<<63 + 5}, {Value: []byte("v"), Note: 7, Flags: 9},
			{Value: []byte{}, Note: 1, Flags: 1 << 31},
			{Value: []byte("v"), Flags: 3}, {Value: []byte("v")},
			{Value: bytes.Repeat([]byte("x"), 5<<20), Note: 77}, {Value: bytes.Repeat([]byte("y"), 5<<20), Note: 78,
				Flags: 79},
		} {
			key := []byte("k")
			check := func(what string, it client.Item) {
				t.Helper()
				if !bytes.Equal(it.Value, want.Value) || it.Note != want.Note || it.Flags != want.Flags {
					t.Errorf("%s: %s: %d bytes, note %#x, flags %#x, want %d, %#x, %#x", name, what, len(it.Value),
						it.Note, it.Flags,
						len(want.Value), want.Note, want.Flags)
				}
			}
			ops := []client.Op{{Kind: client.OpPut, Key: key, Value: want.Value, Note: want.Note, Flags: want.Flags}}
			if c.Do(t.Context(), ops); ops[0].Err != nil {
				t.Fatal(name, ops[0].Err)
			}
			for range 2 { // by the index, then by a hint
				it, err := c.Get(t.Context(), key)
				if err != nil {
					t.Fatal(name, err)
				}
				check("get", it)
			}
			if n, err := c.GetInto(t.Context(), key, make([]byte, len(want.Value))); n != len(want.Value) ||
				err != nil {
				t.Errorf("%s: GetInto: %d, %v", name, n, err)
			}
			if err := c.Touch(t.Context(), key, 0); err != nil {
				t.Fatal(name, err)
			}
			if _, err := c.Update(t.Context(), key, func(cur client.Item, _ bool) (client.Change, error) {
				check("update", cur)
				return client.Change{Value: cur.Value, Note: cur.Note + 1, Flags: cur.Flags}, nil
			}); err != nil {
				t.Fatal(name, err)
			}
			want.Note++
			it, err := c.Get(t.Context(), key)
			if err != nil {
				t.Fatal(name, err)
			}
			check("get after an update", it)
			for kv, err := range c.Scan(t.Context(), client.ScanOptions{}) {
				if err != nil || !bytes.Equal(kv.Value, want.Value) || kv.Flags != want.Flags {
					t.Errorf("%s: scan: %d bytes, flags %d, %v", name, len(kv.Value), kv.Flags, err)
				}
			}
		}
		if _, err := c.Put(t.Context(), []byte("k"), []byte("v"), client.PutOptions{}); err != nil {
			t.Fatal(name, err)
		}
		if it, err := c.Get(t.Context(), []byte("k")); err != nil || it.Note != 0 {
			t.Errorf("%s: after a put: note %d, %v", name, it.Note, err)
		}
	}
}
