package memcached

import (
	"time"

	"github.com/kvd-project/kvd/client"
)

// note is what meta commands remember of an item, beside its value and its flags; see client.Item.
//
//	63                  32 31         3   2     1     0
//	+---------------------+-------------+-----+-----+-------+
//	| asked (32)          | 0           | hit | won | stale |
//	+---------------------+-------------+-----+-----+-------+
//
//	asked  Unix seconds of the last access that was noted
//	hit    an access has been noted
//	won    a client has been told W, and not written yet
//	stale  md with I has marked the item, or ms with I has written it
//
// A plain get notes no access: it would have to write. Every other write of the value but incr's ends the note.
type note uint64

const (
	noteStale note = 1 << iota
	noteWon
	noteHit
	noteAsked = 32
)

// access is n with an access noted at now, in Unix seconds.
func (n note) access(now int64) note {
	return n&(noteStale|noteWon) | noteHit | note(uint32(now))<<noteAsked
}

// sinceAccess is how many seconds ago the last access was that n tells of; 0 if it tells of none.
func (n note) sinceAccess(now int64) int64 {
	if n&noteHit == 0 {
		return 0
	}
	return max(0, now-int64(n>>noteAsked))
}

// visit is what a mg finds, and makes of it.
type visit struct {
	item    client.Item // as found; zero if created
	expires time.Time   // as the mg leaves it
	note    note        // likewise
	created bool
	won     bool
	writes  bool // the item has to be written
}

// visitItem decides what a mg does with an item; it is client.ErrNotFound if it does nothing with an absent one.
// m.flags are in their order, which counts for those that look at the expiry or set it.
func (m *meta) visitItem(now time.Time, it client.Item, present bool) (v visit, err error) {
	if !present && m.vivify == nil {
		return v, client.ErrNotFound
	}
	v = visit{item: it, expires: it.Expires, note: note(it.Note), created: !present}
	for _, f := range []byte(m.flags) {
		switch f {
		case 'T':
			v.expires = m.expires
		case 'N':
			if v.created {
				v.expires, v.won = *m.vivify, true
			}
		case 'R':
			if v.note&noteWon == 0 && !v.created && !v.expires.IsZero() && v.expires.Before(m.recache) {
				v.won = true
			}
		}
	}
	if v.note&(noteStale|noteWon) == noteStale {
		v.won = true // the first to find it stale
	}
	if v.won {
		v.note |= noteWon
	}
	if !m.noBump && (m.access || v.created) && (v.note&noteHit == 0 || v.note.sinceAccess(now.Unix()) > 0) {
		v.note = v.note.access(now.Unix())
	}
	v.writes = v.created || m.hasTTL || v.note != note(it.Note)
	return v, nil
}

// noteOfSum is the note of an item whose number incr or decr makes sum: a number that got longer is a new item to
// memcached.
func noteOfSum(cur client.Item, sum []byte) uint64 {
	if len(sum) > len(cur.Value) {
		return 0
	}
	return cur.Note
}
