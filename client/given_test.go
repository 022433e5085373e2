package client_test

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
)

// TestPutGiven: a record gets the version that is given if the key had none as late, whether it is there, has expired
// or is an intent's. Any other is refused with the version that is there.
func TestPutGiven(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{}, client.Options{})
	ctx, tools := t.Context(), inside.Of(c)
	long := bytes.Repeat([]byte("long"), 1<<20)
	give := func(key string, version uint64, value []byte) inside.Given {
		t.Helper()
		g := []inside.Given{{Key: []byte(key), Value: append(bytes.Clone(value), 7, 0, 0, 0), Version: version,
			Flags: layout.FlagUser | layout.Type(client.Hash).Flags(), Expiry: 1 << 60}}
		tools.PutGiven(ctx, g)
		return g[0]
	}
	is := func(key string, version uint64, value []byte) {
		t.Helper()
		ops := []client.Op{{Kind: client.OpGet, Key: []byte(key), Typed: true}}
		c.Do(ctx, ops)
		if it := ops[0].Item; ops[0].Err != nil || it.Version != version || !bytes.Equal(it.Value, value) ||
			it.Flags != 7 || it.Type != client.Hash || it.Expires.UnixMilli() != 1<<60 {
			t.Errorf("%s: %v, version %d, %d bytes, want version %d", key, ops[0].Err, it.Version, len(it.Value),
				version)
		}
	}
	now := layout.VersionAt(uint64(time.Now().UnixNano()))
	for _, value := range [][]byte{{}, []byte("short"), long} {
		key := fmt.Sprint("absent ", len(value))
		for _, v := range []uint64{1 << 40, 1<<40 + 1} { // the first time the key is not there
			if g := give(key, v, value); g.Err != nil {
				t.Fatal(g.Err)
			}
			is(key, v, value)
		}
		for _, v := range []uint64{1<<40 + 1, 1 << 40, 1} {
			if g := give(key, v, []byte("other")); !errors.Is(g.Err, client.ErrConflict) || g.Found != 1<<40+1 {
				t.Errorf("%s: version %d: %v, found %d", key, v, g.Err, g.Found)
			}
			is(key, 1<<40+1, value)
		}
	}
	// A put that follows has a later version, also if the one given is ahead of the clock.
	ahead := now + layout.VersionAt(uint64(5*time.Minute))
	if g := give("ahead", ahead, nil); g.Err != nil {
		t.Fatal(g.Err)
	}
	if v, err := c.Put(ctx, []byte("ahead"), nil, client.PutOptions{}); err != nil || v <= ahead {
		t.Errorf("version %d after %d: %v", v, ahead, err)
	}
	ops := []client.Op{{Kind: client.OpPut, Key: []byte("expired"), Expires: time.UnixMilli(1)},
		{Kind: client.OpPut, Key: []byte("a")}, {Kind: client.OpPut, Key: []byte("b")}}
	c.Do(ctx, ops[:1])
	if g := give("expired", 1<<40, nil); !errors.Is(g.Err, client.ErrConflict) {
		t.Errorf("over a later version that has expired: %v", g.Err)
	}
	if err := c.MultiCAS(ctx, ops[1:]); err != nil {
		t.Fatal(err)
	}
	if g := give("a", 1<<40, nil); !errors.Is(g.Err, client.ErrConflict) {
		t.Errorf("over what a transaction wrote: %v", g.Err)
	}
	for what, g := range map[string]inside.Given{
		"version 0":             {Key: []byte("bad")},
		"version of tomorrow":   {Key: []byte("bad"), Version: now + layout.VersionAt(uint64(time.Hour))},
		"no key":                {Version: 1},
		"no tail":               {Key: []byte("bad"), Version: 1, Flags: layout.FlagNote},
		"flags of a manifest":   {Key: []byte("bad"), Version: 1, Flags: layout.FlagManifest},
		"a type that nobody is": {Key: []byte("bad"), Version: 1, Flags: layout.Type(7).Flags()},
	} {
		all := []inside.Given{g}
		if tools.PutGiven(ctx, all); !errors.Is(all[0].Err, client.ErrInvalid) {
			t.Errorf("%s: %v", what, all[0].Err)
		}
	}
	bad := []client.Op{{Kind: client.OpPut, Key: []byte("bad"), Cond: client.IfPresent + 1, Version: 1}}
	if c.Do(ctx, bad); !errors.Is(bad[0].Err, client.ErrInvalid) {
		t.Errorf("the condition by the API: %v", bad[0].Err)
	}
}

// TestPutGivenBeside: beside writers, and others that give versions, those of a key only grow.
func TestPutGivenBeside(t *testing.T) {
	_, c := open(t, "shm", devstore.Options{}, client.Options{})
	ctx, tools, key := t.Context(), inside.Of(c), []byte("k")
	base := layout.VersionAt(uint64(time.Now().UnixNano()))
	var wg sync.WaitGroup
	for n := range uint64(4) {
		wg.Go(func() {
			last := uint64(0)
			for i := range uint64(300) {
				g := []inside.Given{{Key: key, Version: base + i<<18 + n}}
				if i%3 == 2 {
					_, g[0].Err = c.Put(ctx, key, nil, client.PutOptions{})
				} else {
					tools.PutGiven(ctx, g)
				}
				if err := g[0].Err; err != nil && !errors.Is(err, client.ErrConflict) {
					t.Error(err)
				}
				it, err := c.Get(ctx, key)
				if err != nil || it.Version < last || g[0].Err == nil && i%3 != 2 && it.Version < g[0].Version {
					t.Errorf("version %d after %d, and %d was given: %v", it.Version, last, g[0].Version, err)
				}
				last = it.Version
			}
		})
	}
	wg.Wait()
}
