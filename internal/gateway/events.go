package gateway

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// keyEvent is what a command's change of a key is called.
type keyEvent struct {
	class values.EventClass
	name  string // as in Redis; the last part of the event's channel
}

// change is what an entry did to its key, for those who want to hear of it.
// It is filled in while the command runs, and told when the store has answered; what a command did in a try that was
// repeated is forgotten.
type change struct {
	missed                    bool  // it was not there
	changed, created, deleted bool  // it was written; it is new; it has gone
	expires                   int64 // Unix ms; 0: never
	// A change of XADD that trims is two events, for one.
	also string
}

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
	var keys []written
	for _, u := range b.units {
		if u.kind <= spec.Read {
			if notify&values.OnMiss != 0 && u.err == nil && !u.stored && u.large == 0 {
				b.eachEntry(u, func(e *entry) {
					if e.cmd.tellsMiss(e.args) {
						g.event(&b.c.box, notify, b.c.db, keyEvent{values.OnMiss, "keymiss"}, u.name)
					}
				})
			}
			continue
		}
		wrote := errors.Is(u.err, client.ErrUnknownOutcome)
		if u.err == nil {
			b.eachEntry(u, func(e *entry) {
				ch := u.changeOf(e)
				if ch.missed && e.cmd.tellsMiss(e.args) {
					g.event(&b.c.box, notify, b.c.db, keyEvent{values.OnMiss, "keymiss"}, u.name)
				}
				if wrote = wrote || ch.changed; ch.changed && notify != 0 {
					b.c.tellOfChange(notify, e.cmd.event, b.c.db, u.name, ch)
				}
			})
		}
		if wrote && hears {
			left := u.got
			if u.err != nil {
				left = unknownVersion
			}
			keys = append(keys, written{u.name, b.c.db, u.track, left})
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
func (u *unit) changeOf(e *entry) change {
	switch u.kind {
	case spec.PutValue, spec.PutIf:
		return change{changed: u.stored, expires: u.expires, created: u.kind == spec.PutIf && u.cond == client.IfAbsent}
	case spec.Remove:
		return change{changed: u.stored, deleted: true}
	}
	return e.change
}

// tellOfChange publishes the events of one command's change of one key: its own, and those of a new key, of an expiry
// that came with a value, and of a deletion. The order is Redis's: what made the key first, what happened to it, and
// its deletion last.
func (c *conn) tellOfChange(notify values.EventClass, ev keyEvent, db int, name []byte, ch change) {
	tell := func(ev keyEvent) { c.g.event(&c.box, notify, db, ev, name) }
	if ch.created {
		tell(keyEvent{values.OnNew, "new"})
	}
	// These two deletions are their own events: the key has not gone, it is elsewhere.
	goes := ch.deleted && ev.name != "rename_from" && ev.name != "move_from"
	switch {
	case goes && (ev.class == values.OnGeneric || strings.HasSuffix(ev.name, "store")):
		ev = keyEvent{values.OnGeneric, "del"}
	case ev.name == "getex":
		if ev.name = "expire"; ch.expires == 0 {
			ev.name = "persist"
		}
	}
	tell(ev)
	if ch.also != "" {
		tell(keyEvent{values.OnStream, ch.also})
	}
	if notify&values.OnExpired != 0 {
		c.g.watchExpiry(db, name, ch.expires)
	}
	switch {
	case goes && ev.name != "del":
		tell(keyEvent{values.OnGeneric, "del"})
	case ch.expires != 0 && ev.name == "set":
		tell(keyEvent{values.OnGeneric, "expire"})
	}
}

// stagedChange is a command's change of a staged key, and what it is called.
type stagedChange struct {
	k *exec.Key
	keyEvent
	change
}

// namedChange is what a command calls its change of a key, if that has not the command's own event.
type namedChange struct {
	k *values.Key
	keyEvent
}

// Name says that the command at hand calls its change of a key so. Redis tells of changes in this order.
// A command of several keys needs it, as RENAME does: rename_from and rename_to. For one without names, every key that
// it changes has the command's own event.
func (t *staged) Name(k *values.Key, class values.EventClass, event string) {
	t.named = append(t.named, namedChange{k, keyEvent{class, event}})
}

// noteChanges notes what a command does to the keys, and which of those among args it has not found, until the returned
// function is called. They are told when all that is staged has taken effect. k.changed is cleared for the time of the
// command, so that each command's changes can be told from those before it.
func (t *staged) noteChanges(cmd *command, args [][]byte, w *resp.Writer) (end func()) {
	t.missed = t.missed[:0]
	if t.named = t.named[:0]; t.c.g.notify.Load() == 0 || cmd.Group == "scripting" { // a script's commands note theirs
		return func() {}
	}
	errors := w.Errors
	type state struct{ changed, present bool }
	// Keys that the command is the first to ask for are added behind these, with what they were when they were read.
	before := make([]state, len(t.Keys))
	for i, k := range t.Keys {
		before[i] = state{k.Changed, k.Present}
		k.Changed = false
	}
	return func() {
		for i, k := range t.Keys {
			if i >= len(before) { // the command has read it
				before = append(before, state{present: k.Version != 0})
			}
		}
		if values.EventClass(t.c.g.notify.Load())&values.OnMiss != 0 && args != nil {
			t.noteMisses(cmd, args, w.Errors != errors, func(k *exec.Key) bool {
				return before[slices.Index(t.Keys, k)].present
			})
		}
		note := func(k *exec.Key, ev keyEvent, created bool) {
			t.changes = append(t.changes,
				stagedChange{k, ev, change{changed: true, created: created, deleted: !k.Present, expires: k.Expires,
					also: k.Also}})
		}
		for _, x := range t.named {
			i := slices.IndexFunc(t.Keys, func(k *exec.Key) bool { return &k.Key == x.k })
			k := t.Keys[i]
			note(k, x.keyEvent, !before[i].present && k.Present && x.class != values.OnNew)
			before[i].present = k.Present // the next event of it is of no new key
		}
		for i, k := range t.Keys {
			was := before[i]
			if k.Changed && (was.present || k.Present) && !isLibraries(k.Name) &&
				!slices.ContainsFunc(t.named, func(x namedChange) bool {
					return x.k == &k.Key
				}) {
				note(k, cmd.event, !was.present && k.Present)
			}
			k.Changed = k.Changed || was.changed
		}
	}
}

// noteMisses notes which of a command's keys it has not found.
func (t *staged) noteMisses(cmd *command, args [][]byte, failed bool, was func(*exec.Key) bool) {
	for _, name := range cmd.readKeys(nil, args) {
		if k := t.Find[stagedName{DB: t.DB, Name: string(name)}]; k != nil && !was(k) {
			t.missed = append(t.missed, k)
		}
	}
	n := 1
	switch {
	case cmd.ID == spec.CmdXreadgroup:
		t.missed = t.missed[:min(1, len(t.missed))] // it has no groups, and the command failed
	case failed:
		n = 0 // nobody knows which keys Redis would have come to
	case cmd.ID == spec.CmdXread:
		n = 2 // Redis looks at their types first
	}
	for range n {
		for _, k := range t.missed {
			t.changes = append(t.changes, stagedChange{k: k, keyEvent: keyEvent{values.OnMiss, "keymiss"}})
		}
	}
}

// tellOfWrites is the batch's, for what has taken effect in one step, or may have.
// performStaged calls it behind the commit, with no changes if the outcome is unknown: then only caches are told.
func (t *staged) tellOfWrites() {
	g := t.c.g
	notify := values.EventClass(g.notify.Load())
	for _, x := range t.changes {
		if x.class == values.OnMiss {
			g.event(&t.c.box, notify, x.k.DB, x.keyEvent, []byte(x.k.Name))
			continue
		}
		t.c.tellOfChange(notify, x.keyEvent, x.k.DB, []byte(x.k.Name), x.change)
	}
	if !g.hearsOfWrites() {
		return
	}
	tracks := t.c.tracksReads()
	var keys []written
	for _, k := range t.Keys {
		if k.Changed && !isLibraries(k.Name) {
			keys = append(keys, written{[]byte(k.Name), k.DB, tracks, k.Version})
		}
	}
	g.wrote(t.c, keys)
}

// event publishes an event of a key, if it is asked for.
// Events are messages of publish/subscribe, to this gateway's subscribers and to those of its peers, in the channels
// that Redis has for them: __keyspace@<db>__:<key> and __keyevent@<db>__:<event>.
func (g *Gateway) event(box *outbox, notify values.EventClass, db int, ev keyEvent, key []byte) {
	if notify&ev.class == 0 {
		return
	}
	at := "@" + strconv.Itoa(db) + "__:"
	if notify&values.OnKeyspace != 0 {
		g.publish(box, false, append([]byte("__keyspace"+at), key...), []byte(ev.name))
	}
	if notify&values.OnKeyevent != 0 {
		g.publish(box, false, []byte("__keyevent"+at+ev.name), key)
	}
}
