package lead

import "iter"

// Sessions get their ids one after the other, so those that live are near each other.
const pageSessions = 64

// sessions are the sessions that a leader knows, by id: in pages, since of many thousands a hash table's rows are in no
// cache when a renewal wants one, and it wants one for nearly every session before it wants the same again. A page
// takes 0.5 KiB, also if one session alone is in it.
type sessions struct {
	pages map[uint32]*page // by the id of the first / pageSessions
	n     int
}

type page struct {
	n    int
	rows [pageSessions]*session
}

// of is the session with this id, or nil.
func (t *sessions) of(id uint32) *session {
	if p := t.pages[id/pageSessions]; p != nil {
		return p.rows[id%pageSessions]
	}
	return nil
}

// put takes in x, whose id no other session in the table has.
func (t *sessions) put(x *session) {
	p := t.pages[x.id/pageSessions]
	if p == nil {
		if t.pages == nil {
			t.pages = make(map[uint32]*page)
		}
		p = &page{}
		t.pages[x.id/pageSessions] = p
	}
	p.rows[x.id%pageSessions] = x
	p.n, t.n = p.n+1, t.n+1
}

// remove takes out a session that is in the table.
func (t *sessions) remove(id uint32) {
	p := t.pages[id/pageSessions]
	p.rows[id%pageSessions] = nil
	p.n, t.n = p.n-1, t.n-1
	if p.n == 0 {
		delete(t.pages, id/pageSessions)
	}
}

// all are the sessions, in no order.
func (t *sessions) all() iter.Seq2[uint32, *session] {
	return func(yield func(uint32, *session) bool) {
		for _, p := range t.pages {
			for i := range p.rows {
				if x := p.rows[i]; x != nil && !yield(x.id, x) {
					return
				}
			}
		}
	}
}
