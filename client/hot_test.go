package client_test

import (
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
)

// TestHotKeys: a client tells the keys that it uses most, by whatever operation; and nothing unless it was asked to.
func TestHotKeys(t *testing.T) {
	_, quiet := open(t, "shm", devstore.Options{}, client.Options{})
	_, c := open(t, "shm", devstore.Options{}, client.Options{HotKeys: true})
	const rounds = 20_000
	for i := range rounds {
		hot, cold := []byte("hot"), fmt.Append(nil, "cold", i)
		ops := []client.Op{{Kind: client.OpPut, Key: hot}, {Kind: client.OpPut, Key: cold}}
		switch i % 4 {
		case 0:
			c.Get(t.Context(), hot)
		case 1:
			c.Put(t.Context(), hot, nil, client.PutOptions{})
		case 2:
			c.Do(t.Context(), ops)
		case 3:
			if err := c.MultiCAS(t.Context(), ops); err != nil {
				t.Fatal(err)
			}
		}
		quiet.Get(t.Context(), hot)
	}
	// Of six uses four are of the hot key.
	all := c.HotKeys()
	if len(all) == 0 || all[0].Key != "hot" || all[0].Share < 0.4 || all[0].Share > 0.9 || all[0].Least > all[0].Share {
		t.Errorf("%+v", all)
	}
	if all := quiet.HotKeys(); all != nil {
		t.Errorf("nobody asked for %+v", all)
	}
}
