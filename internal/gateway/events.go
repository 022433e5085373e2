package gateway

import (
	"errors"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// tellOfWrites publishes the events of what the batch has performed, and says which keys were written to those who
// cache them. It is called when the store has answered, before the replies. Messages go to b.c.box, which sends them
// behind the batch. An update whose outcome is unknown invalidates what clients cache, and is no event: a cache must
// not be stale, and an event must have happened.
func (b *batch) tellOfWrites() {
	g := b.c.g
	notify := values.EventClass(g.notify.Load())
	hears := g.hearsOfWrites()
	if notify == 0 && !hears {
		return
	}
	var keys []live.Written
	for _, u := range b.units {
		if u.kind <= spec.Read {
			if notify&values.OnMiss != 0 && u.err == nil && !u.stored && u.large == 0 {
				b.eachEntry(u, func(e *entry) {
					if e.cmd.tellsMiss(e.args) {
						g.event(&b.c.box, notify, b.c.db, exec.Event{Class: values.OnMiss, Name: "keymiss"}, u.name)
					}
				})
			}
			continue
		}
		wrote := errors.Is(u.err, client.ErrUnknownOutcome)
		if u.err == nil {
			b.eachEntry(u, func(e *entry) {
				ch := u.changeOf(e)
				if ch.Missed && e.cmd.tellsMiss(e.args) {
					g.event(&b.c.box, notify, b.c.db, exec.Event{Class: values.OnMiss, Name: "keymiss"}, u.name)
				}
				if wrote = wrote || ch.Changed; ch.Changed && notify != 0 {
					b.c.tellOfChange(notify, e.cmd.event, b.c.db, u.name, ch)
				}
			})
		}
		if wrote && hears {
			left := u.got
			if u.err != nil {
				left = live.UnknownVersion
			}
			keys = append(keys, live.Written{Name: u.name, DB: b.c.db, Read: u.track, Version: left})
		}
	}
	g.wrote(b.c, keys)
}

// tellsMiss reports whether there is an event if a command on one key does not find it: it reads, if only to return
// what it is going to change. Redis looks at keys for OBJECT and MEMORY in silence.
func (cmd *command) tellsMiss(args [][]byte) bool {
	switch cmd.Finder {
	case spec.FindSet:
		return cmd.access(args)&spec.Reads != 0
	case spec.FindBitfield:
		return cmd.access(args) == spec.Reads
	}
	return cmd.Kind.Looks() && !cmd.Is(spec.Silent) || cmd.Is(spec.Misses)
}

// readKeys appends those of a command's keys that it does nothing to but read, as rules of users have it; PFMERGE reads
// the one that it changes, too. They are in the order of the arguments. The keys are arguments, and no copies.
func (cmd *command) readKeys(dst [][]byte, args [][]byte) [][]byte {
	first := true
	for _, s := range both(cmd.keySpans(args)) {
		for i := s.First; s.First > 0 && i <= s.Last; i += s.Step {
			does := cmd.LaterAccess
			if first {
				does = cmd.access(args)
			}
			if cmd.key != nil && cmd.tellsMiss(args) || cmd.keys != nil && does == spec.Reads || first &&
				cmd.Is(spec.Misses) {
				dst = append(dst, args[i])
			}
			first = false
		}
	}
	return dst
}

// eachEntry calls f for the commands on the unit's key, in the order in which they came.
func (b *batch) eachEntry(u *unit, f func(e *entry)) {
	for i := u.first; i >= 0; i = b.entries[i].next {
		f(&b.entries[i])
	}
}

// changeOf is what an entry did to the unit's key, now that the unit has been performed. A put does not learn whether
// the key was there. The unit has no error. Several puts on a key are one write, and each is told of as if it had been
// there for a moment.
func (u *unit) changeOf(e *entry) exec.Change {
	switch u.kind {
	case spec.PutValue, spec.PutIf:
		return exec.Change{Changed: u.stored, Expires: u.expires,
			Created: u.kind == spec.PutIf && u.cond == client.IfAbsent}
	case spec.Remove:
		return exec.Change{Changed: u.stored, Deleted: true}
	}
	return e.change
}

// tellOfChange publishes the events of one command's change of one key, see live.EachEvent.
func (c *conn) tellOfChange(notify values.EventClass, ev exec.Event, db int, name []byte, ch exec.Change) {
	live.EachEvent(ev, ch, func(ev exec.Event) { c.g.event(&c.box, notify, db, ev, name) })
	if notify&values.OnExpired != 0 {
		c.g.watchExpiry(db, name, ch.Expires)
	}
}

// noteChanges notes what a command does to the keys, and which of those among args it has not found, until the returned
// function is called. They are told when all that is staged has taken effect.
func (t *staged) noteChanges(cmd *command, args [][]byte, w *resp.Writer) (end func()) {
	t.Forget()
	if t.c.g.notify.Load() == 0 || cmd.Group == "scripting" { // a script's commands note theirs
		return func() {}
	}
	errors := w.Errors
	n := t.Note()
	return func() {
		if values.EventClass(t.c.g.notify.Load())&values.OnMiss != 0 && args != nil {
			t.noteMisses(cmd, args, w.Errors != errors, n)
		}
		n.End(cmd.event)
	}
}

// noteMisses notes which of a command's keys it has not found.
func (t *staged) noteMisses(cmd *command, args [][]byte, failed bool, notes *exec.Notes) {
	for _, name := range cmd.readKeys(nil, args) {
		if k := t.Find[stagedName{DB: t.DB, Name: string(name)}]; k != nil && !notes.Had(k) {
			t.MissedKeys = append(t.MissedKeys, k)
		}
	}
	n := 1
	switch {
	case cmd.ID == spec.CmdXreadgroup:
		t.MissedKeys = t.MissedKeys[:min(1, len(t.MissedKeys))] // it has no groups, and the command failed
	case failed:
		n = 0 // nobody knows which keys Redis would have come to
	case cmd.ID == spec.CmdXread:
		n = 2 // Redis looks at their types first
	}
	for range n {
		for _, k := range t.MissedKeys {
			t.NoteMiss(k)
		}
	}
}

// tellOfWrites is the batch's, for what has taken effect in one step, or may have.
// performStaged calls it behind the commit, with no changes if the outcome is unknown: then only caches are told.
func (t *staged) tellOfWrites() {
	g := t.c.g
	notify := values.EventClass(g.notify.Load())
	for _, x := range t.Changes {
		if x.Class == values.OnMiss {
			g.event(&t.c.box, notify, x.Key.DB, x.Event, []byte(x.Key.Name))
			continue
		}
		t.c.tellOfChange(notify, x.Event, x.Key.DB, []byte(x.Key.Name), x.Change)
	}
	if !g.hearsOfWrites() {
		return
	}
	tracks := t.c.tracksReads()
	var keys []live.Written
	for _, k := range t.Keys {
		if k.Changed && !k.Quiet {
			keys = append(keys, live.Written{Name: []byte(k.Name), DB: k.DB, Read: tracks, Version: k.Version})
		}
	}
	g.wrote(t.c, keys)
}

// event publishes an event of a key, if it is asked for.
// Events are messages of publish/subscribe, to this gateway's subscribers and to those of its peers.
func (g *Gateway) event(box *live.Outbox, notify values.EventClass, db int, ev exec.Event, key []byte) {
	live.KeyMessages(notify, db, ev, key, func(channel, payload []byte) { g.publish(box, false, channel, payload) })
}
