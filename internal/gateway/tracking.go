package gateway

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// checkBatch is how many versions are read at a time.
const checkBatch = 64

// tracks reports whether anybody, here or at another gateway, wants to hear of keys that are written.
func (g *Gateway) tracks() bool { return g.tracked.Clients() > 0 || g.o.Peers.WantsKeys() }

// hearsOfWrites reports whether wrote has anybody to tell.
func (g *Gateway) hearsOfWrites() bool { return g.tracks() || g.watchers.any() }

// wrote says that c's client has written keys, or may have.
// It is called when the store has answered, and before the client's reply is sent: a client that hears of a write and
// reads again finds it. The peers are told the names without their databases, so that their clients of any database
// drop them.
func (g *Gateway) wrote(c *conn, keys []live.Written) {
	if len(keys) == 0 { // to peers that would be all keys
		return
	}
	g.watchers.touch(keys)
	if g.o.Peers.WantsKeys() {
		names := make([][]byte, len(keys))
		for i, k := range keys {
			names[i] = k.Name
		}
		g.o.Peers.Changed(names...)
	}
	if g.tracked.Clients() > 0 {
		g.tracked.Invalidate(&c.box, &c.listener, keys)
	}
}

// wroteAll says that it may have written any.
func (g *Gateway) wroteAll(c *conn) {
	g.o.Peers.Changed()
	if g.tracked.Clients() > 0 {
		g.tracked.InvalidateAll(&c.box)
	}
}

// tracksReads reports whether the client caches what the command at hand reads.
func (c *conn) tracksReads() bool { return c.listener.Tracking().Notes(c.caching) && !c.tracksLate }

// beginTracking enters the keys that the client is about to cache, before they are read, so that no write in between is
// missed. Messages that are pushed meanwhile wait for the reply.
func (b *batch) beginTracking() {
	if b.c.listener.Tracking() == nil {
		return
	}
	b.c.out.cork()
	for _, u := range b.units {
		if u.track {
			b.c.g.tracked.Enter(&b.c.box, &b.c.listener, b.c.db, u.name)
		}
	}
}

// endTracking remembers the versions that were read.
// Long values are read when their replies are due, and noted then (readLarge).
func (b *batch) endTracking() {
	if b.c.listener.Tracking() == nil {
		return
	}
	for _, u := range b.units {
		if u.track && u.large == 0 {
			b.endTrackingOf(u)
		}
	}
}

// endTrackingOf notes what was read of one key; a unit that wrote it, or failed, has no version to go by, and the next
// look decides.
func (b *batch) endTrackingOf(u *unit) {
	version := u.got
	if u.err != nil || u.kind > spec.Read {
		version = live.UnknownVersion
	}
	b.c.g.tracked.SetVersion(&b.c.box, &b.c.listener, b.c.db, u.name, version)
}

// checkTracked looks at the versions of all keys that are cached, in as many steps as they take, once in each
// Options.TrackingCheck. It ends when no client caches any more.
// Close waits for the goroutine. The steps are spread over the time between two checks,
// so that the store meets a trickle of lookups and no burst.
func (g *Gateway) checkTracked() {
	for {
		began := time.Now()
		names := g.tracked.Names()
		// All steps together take Options.TrackingCheck, if the store is fast enough, and no step is nearer to the one
		// before than that makes it.
		for i, steps := 0, (len(names)+checkBatch-1)/checkBatch; i < steps; i++ {
			g.checkVersions(names[i*checkBatch : min((i+1)*checkBatch, len(names))])
			if !g.pause(time.Until(began.Add(g.o.TrackingCheck * time.Duration(i+1) / time.Duration(steps)))) {
				return
			}
		}
		if len(names) == 0 && !g.pause(g.o.TrackingCheck) || g.tracked.Rests() {
			return
		}
	}
}

// pause waits, and reports whether the Gateway goes on.
// A time that is not positive still gives way to Close.
func (g *Gateway) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-g.ctx.Done():
		return false
	}
}

// checkVersions looks at some keys, and tells of those whose version is another one than the one that was read. A key
// that cannot be looked at now is left to the next time, unless it was never read. Typed, since collections are cached
// like other values, and have versions only for those who take them.
func (g *Gateway) checkVersions(names []stagedName) {
	var box live.Outbox
	defer box.Flush()
	ctx := inside.LimitMemory(g.ctx, eachLimit)
	for db := range g.dbs {
		d := &g.dbs[db]
		var ops []client.Op
		var asked []stagedName
		for _, n := range names {
			if n.DB == db {
				ops = append(ops, client.Op{Kind: client.OpGet, Key: d.stored([]byte(n.Name)), Typed: true})
				asked = append(asked, n)
			}
		}
		if len(ops) == 0 {
			continue
		}
		d.api.Do(ctx, ops)
		for i := range ops {
			version, err := ops[i].Item.Version, ops[i].Err
			if large := (*inside.TooLargeError)(nil); errors.As(err, &large) {
				version, err = g.versionOfLarge(d.api, ops[i].Key, large.Want)
			}
			switch {
			case errors.Is(err, client.ErrNotFound):
				version = 0
			case err != nil:
				version = live.UnknownVersion
			}
			g.tracked.Compare(&box, asked[i], version)
		}
	}
}

// versionOfLarge reads a value that takes memory of the budget.
// want is in bytes. The share is its own, so that no connection is held to account for it.
func (g *Gateway) versionOfLarge(api client.API, key []byte, want int) (version uint64, err error) {
	share := g.o.Budget.Share(func(int64) {})
	defer share.Close()
	n := readCost * int64(want)
	if err := share.Take(g.ctx, n, time.Second); err != nil {
		return 0, err
	}
	defer share.Drop(n)
	ctx, cancel := context.WithTimeout(inside.LimitMemory(g.ctx, want), 10*time.Second)
	defer cancel()
	op := [1]client.Op{{Kind: client.OpGet, Key: key, Typed: true}}
	api.Do(ctx, op[:])
	return op[0].Item.Version, op[0].Err
}

// listenerOf is the connection of a number, or nil.
func (g *Gateway) listenerOf(id int64) *live.Listener {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.mu.conns[id]; c != nil {
		return &c.listener
	}
	return nil
}

// stopTracking forgets what the client caches.
func (c *conn) stopTracking() {
	if c.g.tracked.Leave(&c.listener) {
		c.caching = live.CachingAsUsual
		c.g.tellInterest()
	}
}

// track begins to note what the client caches, or goes on in another way.
// It waits until the peers have heard, before the client reads anything that it would cache.
func (c *conn) track(t *live.Tracking) {
	g := c.g
	g.tracked.Track(&c.listener, t, func() bool {
		if g.ctx.Err() != nil {
			return false
		}
		g.tracked.checks.Go(g.checkTracked)
		return true
	})
	c.awaitInterest()
}

func cmdClientTracking(c *conn, w *resp.Writer, args [][]byte) error {
	t, err := live.ParseTracking(args[2:], func(id int64) bool { return c.g.listenerOf(id) != nil })
	switch {
	case err != nil:
		return err
	case t == nil:
		c.stopTracking()
	default:
		if err := t.Follow(c.listener.Tracking()); err != nil {
			return err
		}
		if err := c.refusesPrefixes(t); err != nil {
			return err
		}
		c.track(t)
	}
	w.OK()
	return nil
}

// cmdClientCaching holds for the next command alone, or for the transaction that begins with it; dispatch ends it.
func cmdClientCaching(c *conn, w *resp.Writer, args [][]byte) error {
	caching, err := c.listener.Tracking().ParseCaching(args[2:])
	if err != nil {
		return err
	}
	c.caching = caching
	w.OK()
	return nil
}

func cmdClientGetRedir(c *conn, w *resp.Writer, _ [][]byte) error {
	if t := c.listener.Tracking(); t != nil {
		w.Int(t.Redirect)
	} else {
		w.Int(-1)
	}
	return nil
}

func cmdClientTrackingInfo(c *conn, w *resp.Writer, _ [][]byte) error {
	c.listener.Tracking().WriteInfo(w, c.caching)
	return nil
}

// setsTracking reports whether a command changes what the client caches of the commands behind it.
func (cmd *command) setsTracking() bool {
	return cmd.ID == spec.CmdClientTracking || cmd.ID == spec.CmdClientCaching
}

// tracksInside is the LateTracking of a transaction that needs one, or nil.
func (c *conn) tracksInside(queue []queued) *live.LateTracking {
	if !slices.ContainsFunc(queue, func(q queued) bool { return q.cmd.setsTracking() }) {
		return nil
	}
	return &live.LateTracking{Began: c.listener.Tracking()}
}

// performedLate takes a command whose turn has come; t is the transaction's, which has taken effect.
// As in Redis it is the keys of commands that read which are cached, and those that a script names.
func (c *conn) performedLate(late *live.LateTracking, t *staged, q queued) {
	if late == nil {
		return
	}
	how := c.listener.Tracking()
	if how == nil {
		late.Forget()
		return
	}
	script := q.cmd.Group == "scripting"
	reads := c.tracksReads() && (script || q.cmd.Has(spec.FlagReadonly))
	writes := script || q.cmd.Has(spec.FlagWrite)
	for _, s := range both(q.cmd.keySpans(q.args)) {
		for i := s.First; s.First > 0 && i <= s.Last; i += s.Step {
			// A command that was refused before it came to a key has none.
			if k := t.Find[stagedName{DB: c.db, Name: string(q.args[i])}]; k != nil {
				late.Performed(how, k, reads, writes)
			}
		}
	}
}

// enterLate enters the keys, when the transaction's replies have been written.
func (c *conn) enterLate(late *live.LateTracking) {
	if late == nil || c.listener.Tracking() == nil || late.IsEmpty() {
		return
	}
	c.link.Waits()
	c.out.cork()
	names := c.g.tracked.EnterLate(&c.box, &c.listener, late)
	c.g.checkVersions(names)
}
