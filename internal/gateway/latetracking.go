package gateway

import (
	"bytes"
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// lateTracking is what the client caches of a transaction in which CLIENT TRACKING or CLIENT CACHING is queued: they
// hold from their turn on, which comes when all keys have been read. So these are entered behind the transaction, with
// the versions that it read, and looked at again at once, for what was written in between. A nil one is of all other
// transactions, and does nothing.
type lateTracking struct {
	began *tracker // what the client cached by before
	keys  []*exec.Key
	// Keys that the client has written itself behind that, of those that it has read, and of those with prefixes.
	told, prefixed [][]byte
}

// setsTracking reports whether a command changes what the client caches of the commands behind it.
func (cmd *command) setsTracking() bool {
	return cmd.ID == spec.CmdClientTracking || cmd.ID == spec.CmdClientCaching
}

// tracksInside is the lateTracking of a transaction that needs one.
func (c *conn) tracksInside(queue []queued) *lateTracking {
	if !slices.ContainsFunc(queue, func(q queued) bool { return q.cmd.setsTracking() }) {
		return nil
	}
	return &lateTracking{began: c.tracker.Load()}
}

// performed takes a command whose turn has come; t is the transaction's, which has taken effect.
// As in Redis it is the keys of commands that read which are cached, and those that a script names.
func (l *lateTracking) performed(c *conn, t *staged, q queued) {
	if l == nil {
		return
	}
	tr := c.tracker.Load()
	if tr == nil {
		l.keys = nil
		return
	}
	script := q.cmd.Group == "scripting"
	reads := c.tracksReads() && (script || q.cmd.Has(spec.FlagReadonly))
	writes := script || q.cmd.Has(spec.FlagWrite)
	for _, s := range both(q.cmd.keySpans(q.args)) {
		for i := s.First; s.First > 0 && i <= s.Last; i += s.Step {
			k := t.Find[stagedName{DB: c.db, Name: string(q.args[i])}]
			if k == nil { // the command was refused before it came to it
				continue
			}
			if reads && !slices.Contains(l.keys, k) {
				l.keys = append(l.keys, k)
			}
			if !writes || !k.Changed || tr.noLoop {
				continue
			}
			at := slices.Index(l.keys, k)
			if at >= 0 {
				l.keys = slices.Delete(l.keys, at, at+1)
			}
			switch {
			case at >= 0:
				l.told = append(l.told, []byte(k.Name))
			// Prefixes that it had before have been told of all that the transaction wrote.
			case tr.follows(k.Name) && !l.began.follows(k.Name):
				l.prefixed = append(l.prefixed, []byte(k.Name))
			}
		}
	}
}

// follows reports whether a client with BCAST hears of a key.
func (t *tracker) follows(name string) bool {
	return t != nil && slices.ContainsFunc(t.prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// enterKeys enters the keys, when the transaction's replies have been written.
func (l *lateTracking) enterKeys(c *conn) {
	if l == nil || c.tracker.Load() == nil || len(l.keys)+len(l.told)+len(l.prefixed) == 0 {
		return
	}
	c.link.Waits()
	c.out.cork()
	x := &c.g.tracked
	x.Lock()
	for _, name := range l.told {
		x.tell(c.g, &c.box, c, name)
	}
	if len(l.prefixed) > 0 {
		slices.SortFunc(l.prefixed, bytes.Compare)
		x.tell(c.g, &c.box, c, slices.CompactFunc(l.prefixed, bytes.Equal)...)
	}
	x.Unlock()
	names := make([]trackedName, len(l.keys))
	for i, k := range l.keys {
		version := k.Version
		if !k.Present {
			version = 0
		}
		x.enterKey(c, k.DB, []byte(k.Name))
		x.setVersion(c.g, c, k.DB, []byte(k.Name), version)
		names[i] = trackedName{k.DB, k.Name}
	}
	c.g.checkVersions(names)
}
