package fsm

import (
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// roster is what follows from the rows of the sessions and is asked for often, so that nobody walks all of them for it.
type roster struct {
	discriminators map[uint32]bool // of those that write
	readersToo     bool            // and of all others: the state is below levelBoots
	// in order; a session that goes leaves a copy without it, as Admitted hands this out
	live    []uint32
	fencing map[uint32]*fsmpb.Session  // those being fenced
	of      map[uint32]namespaceRoster // by namespace, without those that have none

	changes uint64                // how many sessions began, began to be fenced or ended
	recent  [recentChanges]uint32 // which ones, by number of the change
}

type namespaceRoster struct{ all, counted uint32 }

// recentChanges is how many changes of sessions are remembered.
const recentChanges = 1024

func newRoster() roster {
	return roster{discriminators: make(map[uint32]bool), fencing: make(map[uint32]*fsmpb.Session),
		of: make(map[uint32]namespaceRoster)}
}

// noteSession takes in that a session's row changed; nil: there was none, or there is none any more.
func (r *roster) noteSession(id uint32, was, is *fsmpb.Session) {
	if was.GetLife() != is.GetLife() {
		r.recent[r.changes%recentChanges] = id
		r.changes++
	}
	if was != nil {
		r.count(was, -1)
		if r.hasDiscriminator(was) {
			delete(r.discriminators, was.Discriminator)
		}
		delete(r.fencing, id)
	}
	if is != nil {
		r.count(is, +1)
		if r.hasDiscriminator(is) {
			r.discriminators[is.Discriminator] = true
		}
		if is.Life == dirpb.SessionLife_SESSION_FENCING {
			r.fencing[id] = is
		}
	}
	lived, lives := was.GetLife() == dirpb.SessionLife_SESSION_LIVE, is.GetLife() == dirpb.SessionLife_SESSION_LIVE
	switch i, _ := slices.BinarySearch(r.live, id); {
	case lives && !lived && i == len(r.live):
		r.live = append(r.live, id) // behind what was handed out
	case lives && !lived:
		r.live = slices.Insert(slices.Clone(r.live), i, id)
	case lived && !lives:
		r.live = slices.Delete(slices.Clone(r.live), i, i+1)
	}
}

// hasDiscriminator reports whether x has a discriminator that no other session may have.
func (r *roster) hasDiscriminator(x *fsmpb.Session) bool { return r.readersToo || !x.ReadOnly }

func (r *roster) count(x *fsmpb.Session, by int) {
	n := r.of[x.NamespaceId]
	n.all += uint32(by)
	if counted(x.Background, x.Everywhere, x.Identity) {
		n.counted += uint32(by)
	}
	if r.of[x.NamespaceId] = n; n.all == 0 {
		delete(r.of, x.NamespaceId)
	}
}

// ChangedSessions are the sessions that began, began to be fenced or ended after the given number of such
// changes, perhaps repeatedly. It also gives how many changes there are now. Not ok: they are too many to
// remember, or this State never had that many. Any session may then have changed.
func (s *State) ChangedSessions(after uint64) (ids []uint32, now uint64, ok bool) {
	r := &s.roster
	if after > r.changes || r.changes-after > recentChanges {
		return nil, r.changes, false
	}
	for n := after; n < r.changes; n++ {
		ids = append(ids, r.recent[n%recentChanges])
	}
	return ids, r.changes, true
}

// SessionsIn is how many sessions a namespace has, open or being fenced.
func (s *State) SessionsIn(namespace uint32) uint32 { return s.roster.of[namespace].all }

// SessionsOf is how many sessions count against a namespace's quota: open, or being fenced.
func (s *State) SessionsOf(namespace uint32) uint32 { return s.roster.of[namespace].counted }

// Admitted are the sessions whose tokens memory nodes take. A session that is being fenced is not among them.
func (s *State) Admitted() *dirpb.Sessions {
	return &dirpb.Sessions{Last: s.meta.SessionId, Live: s.roster.live}
}

// FenceWork are the sessions that one process of a memory node has yet to fence.
func (s *State) FenceWork(node uint32, incarnation uint64) []uint32 {
	var ids []uint32
	for _, x := range ordered.Values(s.roster.fencing) {
		for _, p := range x.Pending {
			if p.NodeId == node && p.Incarnation == incarnation {
				ids = append(ids, x.Id)
			}
		}
	}
	return ids
}
