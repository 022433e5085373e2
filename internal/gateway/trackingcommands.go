package gateway

import (
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// stopTracking forgets what the client caches.
func (c *conn) stopTracking() {
	t := c.tracker.Load()
	if t == nil {
		return
	}
	g := c.g
	x := &g.tracked
	x.Lock()
	for name := range x.conns[c] {
		k := x.keys[name]
		delete(k.conns, c)
		if x.items--; len(k.conns) == 0 {
			x.removeLocked(name, k)
		}
	}
	delete(x.conns, c)
	for _, p := range t.prefixes {
		if delete(x.prefixes[p], c); len(x.prefixes[p]) == 0 {
			delete(x.prefixes, p)
		}
	}
	c.tracker.Store(nil)
	x.clients.Add(-1)
	x.Unlock()
	c.caching = cachingAsUsual
	g.tellInterest()
}

// track begins to note what the client caches, or goes on in another way.
// It waits until the peers have heard, before the client reads anything that it would cache.
func (c *conn) track(t *tracker) {
	g := c.g
	x := &g.tracked
	x.Lock()
	if c.tracker.Swap(t) == nil {
		x.clients.Add(1)
	}
	if _, ok := x.conns[c]; !ok {
		x.conns[c] = nil
	}
	for _, p := range t.prefixes {
		if x.prefixes[p] == nil {
			x.prefixes[p] = make(map[*conn]struct{})
		}
		x.prefixes[p][c] = struct{}{}
	}
	// Clients with BCAST have no keys in the table, so there is nothing to look at for them.
	if !x.checking && !t.bcast && g.ctx.Err() == nil {
		x.checking = true
		x.checks.Go(g.checkTracked)
	}
	x.Unlock()
	c.awaitInterest()
}

// cmdClientTracking reads all options before it changes anything, as Redis does.
func cmdClientTracking(c *conn, w *resp.Writer, args [][]byte) error {
	t := &tracker{}
	p := values.OptionsOf(args[3:])
	for p.More() {
		switch {
		case p.Option("redirect", 1):
			if t.redirect != 0 {
				p.Refuse("ERR A client can only redirect to a single other client")
			}
			t.redirect = p.Int()
			c.g.mu.Lock()
			_, ok := c.g.mu.conns[t.redirect]
			c.g.mu.Unlock()
			if !ok {
				p.Refuse("ERR The client ID you want redirect to does not exist")
			}
		case p.Flag("bcast"):
			t.bcast = true
		case p.Flag("optin"):
			t.optIn = true
		case p.Flag("optout"):
			t.optOut = true
		case p.Flag("noloop"):
			t.noLoop = true
		case p.Option("prefix", 1):
			t.prefixes = append(t.prefixes, string(p.Str()))
		default:
			p.Wrong()
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	switch p := values.OptionsOf(args[2:3]); {
	case p.Flag("on"):
		if err := t.conflict(c.tracker.Load()); err != nil {
			return err
		}
		if err := c.refusesPrefixes(t); err != nil {
			return err
		}
		c.track(t)
	case p.Flag("off"):
		c.stopTracking()
	default:
		return values.ErrSyntax
	}
	w.OK()
	return nil
}

// maxPrefixes bounds those of a connection, which has none in common with itself.
const maxPrefixes = 1024

// conflict is why t cannot follow was, which is nil for a client that begins to cache. It completes t's prefixes.
// The texts are Redis's. Prefixes that overlap are refused, so that no client hears of a key twice.
func (t *tracker) conflict(was *tracker) error {
	const again = " mode before disabling tracking for this client, and then re-enabling it with a different mode."
	switch {
	case len(t.prefixes) > 0 && !t.bcast:
		return refusal("ERR PREFIX option requires BCAST mode to be enabled")
	case was != nil && was.bcast != t.bcast:
		return refusal("ERR You can't switch BCAST mode on/off before disabling tracking for this client, and then " +
			"re-enabling it with a different mode.")
	case t.bcast && (t.optIn || t.optOut):
		return refusal("ERR OPTIN and OPTOUT are not compatible with BCAST")
	case t.optIn && t.optOut:
		return refusal("ERR You can't specify both OPTIN mode and OPTOUT mode")
	case was != nil && (t.optIn && was.optOut || t.optOut && was.optIn):
		return refusal("ERR You can't switch OPTIN/OPTOUT" + again)
	case !t.bcast:
		return nil
	}
	var have []string
	if was != nil {
		have = was.prefixes
	}
	for i, p := range t.prefixes {
		for _, q := range have {
			if strings.HasPrefix(p, q) || strings.HasPrefix(q, p) {
				return refusal("ERR Prefix '" + values.Clip([]byte(p), 128) + "' overlaps with an existing prefix '" +
					values.Clip([]byte(q), 128) + "'. Prefixes for a single client must not overlap.")
			}
		}
		for _, q := range t.prefixes[i+1:] {
			if strings.HasPrefix(p, q) || strings.HasPrefix(q, p) {
				return refusal("ERR Prefix '" + values.Clip([]byte(p), 128) +
					"' overlaps with another provided prefix '" + values.Clip([]byte(q), 128) +
					"'. Prefixes for a single client must not overlap.")
			}
		}
	}
	if len(t.prefixes) == 0 && len(have) == 0 {
		t.prefixes = []string{""}
	}
	t.prefixes = slices.Concat(have, t.prefixes)
	if len(t.prefixes) > maxPrefixes {
		return refusal("ERR kvd: more than 1024 prefixes")
	}
	return nil
}

// cmdClientCaching holds for the next command alone, or for the transaction that begins with it; dispatch ends it.
func cmdClientCaching(c *conn, w *resp.Writer, args [][]byte) error {
	t := c.tracker.Load()
	switch p := values.OptionsOf(args[2:]); {
	case t == nil:
		return refusal("ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or " +
			"OPTOUT mode enabled")
	case p.Flag("yes"):
		if !t.optIn {
			return refusal("ERR CLIENT CACHING YES is only valid when tracking is enabled in OPTIN mode.")
		}
		c.caching = cachingYes
	case p.Flag("no"):
		if !t.optOut {
			return refusal("ERR CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.")
		}
		c.caching = cachingNo
	default:
		return values.ErrSyntax
	}
	w.OK()
	return nil
}

func cmdClientGetRedir(c *conn, w *resp.Writer, _ [][]byte) error {
	if t := c.tracker.Load(); t != nil {
		w.Int(t.redirect)
	} else {
		w.Int(-1)
	}
	return nil
}

func cmdClientTrackingInfo(c *conn, w *resp.Writer, _ [][]byte) error {
	t := c.tracker.Load()
	flags, redirect, prefixes := []string{"off"}, int64(-1), []string(nil)
	if t != nil {
		flags, redirect = []string{"on"}, t.redirect
		for _, f := range []struct {
			is   bool
			name string
		}{{t.bcast, "bcast"}, {t.optIn, "optin"}, {c.caching == cachingYes, "caching-yes"}, {t.optOut, "optout"},
			{c.caching == cachingNo, "caching-no"},
			{t.noLoop, "noloop"}, {t.broken.Load(), "broken_redirect"}} {
			if f.is {
				flags = append(flags, f.name)
			}
		}
		prefixes = t.prefixes
	}
	w.Map(3)
	w.BulkString("flags")
	w.Set(len(flags))
	for _, f := range flags {
		w.BulkString(f)
	}
	w.BulkString("redirect")
	w.Int(redirect)
	w.BulkString("prefixes")
	writeStrings(w, prefixes)
	return nil
}
