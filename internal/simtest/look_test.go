package simtest

import (
	"errors"
	"slices"

	"github.com/kvd-project/kvd/index"
)

// looking is a transaction that only reads, as the client library does it: it reads all keys, and then all again until
// no version is another the second time.
type looking struct {
	c        *cl
	e        *Event
	versions []uint64 // by part, 0: absent; of the last round
	found    []uint64 // of this one
	rounds   int
	left     int
	failed   bool
}

// looks is how many rounds there are at most; then it has to be a transaction with guards.
const looks = 4

// beginLook begins a script's reads of the keys of parts.
func (c *cl) beginLook(parts []Part) {
	l := &looking{c: c, e: &Event{Client: c.i, Verb: Txn, Call: c.w.tick()}, found: make([]uint64, len(parts))}
	for _, p := range parts {
		l.e.Parts = append(l.e.Parts, part{Part: Part{Key: p.Key, Effect: index.KeepKey}})
	}
	l.read()
}

// read begins a round.
func (l *looking) read() {
	l.rounds++
	var runs []*running
	for i := range l.e.Parts {
		r := l.c.newRun(0)
		if r == nil {
			return
		}
		r.look, r.part, r.step = l, i, Step{Look, 0}
		k := l.e.Parts[i].Key
		r.t.Op.Kind, r.t.Op.Key = index.Get, keyOf(k)
		r.t.Op.Hash, r.t.Op.Check = hashOf(k)
		runs = append(runs, r)
	}
	l.left = len(runs)
	for _, r := range runs {
		l.c.start(r)
	}
}

// over takes the end of one read.
func (l *looking) over(r *running, err error) {
	p := &l.e.Parts[r.part]
	switch {
	case err == nil:
		p.got, l.found[r.part] = string(r.t.Op.Record.Value), r.t.Op.Version
	case errors.Is(err, index.ErrNotFound):
		p.got, l.found[r.part] = "", 0
	default:
		l.failed = true
	}
	l.c.tell(uint64(r.part+1), l.found[r.part], uint64(b2i(l.failed)))
	if l.left--; l.left > 0 || l.c.life != live {
		return
	}
	switch {
	case l.failed, l.rounds == looks, slices.Contains(l.found, 0):
		// Guards are needed: a key that is absent twice may have been there in between, and no version tells.
		l.e.Out = NotDone
	case l.rounds > 1 && slices.Equal(l.found, l.versions):
		l.e.Out = OK
	default:
		l.versions = slices.Clone(l.found)
		l.read()
		return
	}
	l.e.Return = l.c.w.tick()
	l.c.w.record(l.e)
}
