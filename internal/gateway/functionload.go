package gateway

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/luascript"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/rdb"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/units"
)

// loadHost is the luascript.Host of a library that is loaded: all that it can do is write to the log.
type loadHost struct{ *scriptHost }

// Reserve is of luascript.Host; loadMemory is enough of a bound.
func (loadHost) Reserve(int64) error { return nil }

func (loadHost) Stopped() bool { return false }

// load loads a library, with others waiting.
// It runs the library's own code, which registers functions, without commands of the store and within loadMemory. The
// caller has lockLoading.
func (c *conn) load(source []byte, limit time.Duration) (*luascript.Library, error) {
	task := &luascript.Task{Host: loadHost{&scriptHost{t: &staged{c: c}}}, Memory: loadMemory, Function: true}
	return c.g.scripts.pool.Load(task, source, limit)
}

// lockLoading waits until nobody else loads libraries; the caller calls unlock.
// It is a channel and no mutex, since a connection that waits for it may be closed.
func (c *conn) lockLoading() (unlock func(), err error) {
	loading := c.g.functions.loading
	c.link.Waits()
	select {
	case loading <- struct{}{}:
		return func() { <-loading }, nil
	case <-c.ctx.Done():
		return nil, c.ctx.Err()
	}
}

// loadAll loads the libraries of a payload into an empty set. Those of known that have the same source are taken from
// there. Nothing is kept of a payload of which any part is wrong.
func (c *conn) loadAll(payload []byte, known *librarySet) (*librarySet, error) {
	sources, err := rdb.ParseLibraries(payload, maxLibraries)
	if err != nil {
		return nil, err
	}
	set := newLibrarySet()
	for _, source := range sources {
		name, err := luascript.LibraryName(source)
		if err != nil {
			return nil, err
		}
		if set.libraries[name] != nil {
			return nil, errors.New("Library '" + name + "' already exists")
		}
		var l *luascript.Library
		if known != nil {
			l = known.libraries[name]
		}
		if l == nil || l.Source != string(source) {
			if l, err = c.load(source, c.g.o.ScriptTimeout); err != nil {
				return nil, err
			}
		}
		if taken := set.add(l); taken != "" {
			return nil, errors.New("Function " + taken + " already exists")
		}
	}
	return set, nil
}

// loadStored is loadAll for what is in the store.
func (c *conn) loadStored(payload []byte) (*librarySet, error) {
	set, err := c.loadAll(payload, c.g.functions.now.Load())
	if err != nil {
		return nil, unreadable(err)
	}
	return set, nil
}

// unreadable is the error where the key of libraries has something else.
func unreadable(err error) error {
	return values.ResultError("ERR kvd: the libraries of functions in the store cannot be read, and FUNCTION " +
		"FLUSH deletes them: " + brief(err))
}

// libraries are those of the store, up to libraryAge old, or as of now.
// The set must not be changed: others have it, too. While many calls wait for a reading, one of them reads for all.
func (c *conn) libraries(asOfNow bool) (*librarySet, error) {
	f := &c.g.functions
	begun, known := time.Now(), f.now.Load()
	if !asOfNow && known != nil && known.changes == f.changes.Load() && begun.Sub(known.at) < libraryAge {
		return known, nil
	}
	unlock, err := c.lockLoading()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if known = f.now.Load(); known != nil && known.changes == f.changes.Load() && known.at.After(begun) {
		return known, nil // read by another while this one waited
	}
	next := newLibrarySet()
	next.at, next.changes = time.Now(), f.changes.Load()
	// GetIfChanged reads the value only if the key is not at the version that is known, so the usual look takes no
	// memory.
	version := uint64(0)
	if known != nil {
		version = known.version
	}
	api := c.g.dbs[0].api
	var it client.Item
	changed := false
	give, err := c.do(func(ctx context.Context) (err error) {
		it, changed, err = api.GetIfChanged(ctx, []byte(inside.FunctionsKey), version)
		return err
	})
	defer give()
	switch {
	case errors.Is(err, client.ErrNotFound):
	case errors.Is(err, client.ErrWrongType):
		return nil, unreadable(err)
	case err != nil:
		return nil, err
	case !changed:
		next.libraries, next.functions, next.version = known.libraries, known.functions, version
	default:
		set, err := c.loadStored(it.Value)
		if err != nil {
			return nil, err
		}
		next.libraries, next.functions, next.version = set.libraries, set.functions, it.Version
	}
	f.now.Store(next)
	return next, nil
}

// libraries are those that the commands before have left, and the key that they are in; ok is false if they cannot be
// read.
func (t *staged) libraries() (set *librarySet, k *exec.Key, ok bool) {
	k = t.librariesKey()
	if t.Failed() {
		return nil, nil, false
	}
	if !k.Present {
		return newLibrarySet(), k, true
	}
	// The version says that the libraries that this gateway has loaded are those in the key, so they need not be loaded
	// again.
	if set := t.c.g.functions.now.Load(); set != nil && !k.Changed && set.version == k.Version {
		return set.clone(), k, true
	}
	if k.Type != client.Plain {
		t.Err = unreadable(client.ErrWrongType)
		return nil, nil, false
	}
	unlock, err := t.c.lockLoading()
	if err != nil {
		t.Err = err
		return nil, nil, false
	}
	defer unlock()
	if set, err = t.c.loadStored(k.Value); err != nil {
		t.Err = err
		return nil, nil, false
	}
	if !k.Changed {
		set.version = k.Version
		t.c.g.functions.now.Store(set) // FCALL asks whether it is still the latest, since it has no time
	}
	return set.clone(), k, true
}

// librariesKey is the key that libraries are in.
// It is a condition of the commit, as any key that is used: two gateways that change libraries at a time do so one
// after the other.
func (t *staged) librariesKey() *exec.Key {
	k := t.Find[librariesName]
	if k == nil {
		k = t.Add(librariesName)
		k.Used = true
		t.Read(k)
	}
	return k
}

// setLibraries writes libraries, if that can be done.
// The error may also say that there is no room yet, as key.mutable does; all of it then runs again with more.
func setLibraries(k *exec.Key, set *librarySet) error {
	if len(set.libraries) == 0 {
		if k.Present {
			k.Delete()
		}
		return nil
	}
	payload := set.payload()
	switch most := min(maxLibraries, k.MaxValue); {
	case len(payload) > most:
		return refusal(fmt.Sprintf("ERR kvd: libraries of functions of %s; all together may have %s",
			units.Bytes(len(payload)), units.Bytes(most)))
	case len(payload) > k.Room:
		k.Want = len(payload)
		return values.ErrRoom
	}
	k.Flags = 0
	k.SetAs(client.Plain, payload, 0)
	return nil
}
